"""certified_init: an initialisation whose certificate holds."""

import copy
import math

import torch
from torch import Tensor, nn

from opteq.cells import GaussianDEQ, Monotone, ScaledReLU
from opteq.checks import check_instance, check_number, invalid
from opteq.models import Readout
from opteq.theory.certificates.conditions import Certificate
from opteq.theory.certificates.decide import certificate
from opteq.theory.certificates.measure import check_data
from opteq.theory.certificates.scope import LARGEST, check_scope, covered
from opteq.theory.certificates.start import is_bounded, upper_norm

__all__ = ["certified_init"]

_STEP = 1.1  # how close to the smallest scale is close enough
_SATURATED = 1e4  # beyond that, bounded activations do not change any more


def certified_init(readout: Readout, X: Tensor, y: Tensor, *, flow: bool = False, max_scale: float = 2.0**40) -> Readout:
    """A copy in float64 with a = 0 and the injection (W of ScaledReLU, U and b of others) scaled up until its certificate holds.

    The scale is the smallest one, to 10%, of at least 1: the admissible step shrinks with it like 1 / scale^2. A ScaledReLU with
    gamma ||A|| >= 1 gets gamma = 1 / (2 ||A||), a GaussianDEQ with ||W|| >= 1 is scaled to ||W|| = 1/2. Raises ValueError with what
    stands in the way when no scale up to `max_scale` (1e4 for bounded activations, such as tanh) is enough.
    Gamma-scaled ReLU implicit networks, Section 5.1.

    Examples:
        >>> import torch
        >>> from opteq.cells import ScaledReLU
        >>> from opteq.data import unit_norm
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import certified_init, certify
        >>> X, y = unit_norm(torch.randn(4, 8, dtype=torch.float64)), torch.randn(4, dtype=torch.float64)
        >>> certify(certified_init(Readout(ScaledReLU(8, 32)), X, y), X, y).holds
        True
    """
    check_instance("certified_init", "flow", flow, bool, "a bool")
    check_number("certified_init", "max_scale", max_scale, 1.0)
    if type(readout) is not Readout or type(readout.cell) not in (GaussianDEQ, ScaledReLU, Monotone):
        expected = "a Readout on GaussianDEQ, ScaledReLU or Monotone (no subclasses)"
        raise TypeError(invalid("certified_init", "readout", expected, type(readout).__name__))
    check_scope("certified_init", readout)
    base = copy.deepcopy(readout).double()
    check_data("certified_init", base, X, y)
    _make_well_posed(base)
    limit = _largest_scale(base, max_scale)
    low, high = 0.0, 1.0
    found = _attempt(base, high, X, y, flow)
    while not found.holds:
        if high >= limit or not _helps(found):
            tried = f"up to {high:.3g} " if high > 1 else ""
            raise ValueError(f"certified_init found no scale {tried}that is certified.\n{found.explain()}")
        low, high = high, min(high * _growth(found), limit)
        found = _attempt(base, high, X, y, flow)
    while low > 0 and high / low > _STEP:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _attempt(base, middle, X, y, flow).holds else (middle, high)
    return _scaled(base, high)


@torch.no_grad()
def _make_well_posed(base: Readout) -> None:
    """Set a = 0, and shrink what keeps the equilibrium from existing."""
    base.a.zero_()
    cell = base.cell
    if isinstance(cell, ScaledReLU) and cell.gamma * (norm := float(torch.linalg.matrix_norm(cell.A, 2))) >= 1:
        cell.gamma = 1 / (2 * norm)
    if isinstance(cell, GaussianDEQ) and (norm := float(torch.linalg.matrix_norm(cell.W, 2))) >= 1:
        cell.W.div_(2 * norm)


def _largest_scale(base: Readout, most: float) -> float:
    """The least of the caller's limit, what still changes a bounded activation, and the largest norm that certify takes."""
    size = sum(upper_norm(p.detach().reshape(-1)) for p in _injection(base))
    allowed = LARGEST / (1.01 * size) if size > 0 else math.inf
    return min(most, _SATURATED if is_bounded(covered(base).activation) else math.inf, max(1.0, allowed))


def _injection(readout: Readout) -> list[nn.Parameter]:
    """What z is proportional to: W of ScaledReLU, U and b of others."""
    cell = covered(readout)
    if isinstance(cell, ScaledReLU):
        return [cell.W]
    return [cell.U, cell.b] if isinstance(cell, Monotone) and cell.b is not None else [cell.U]


@torch.no_grad()
def _scaled(base: Readout, scale: float) -> Readout:
    made = copy.deepcopy(base)
    for parameter in _injection(made):
        parameter.mul_(scale)
    return made


def _attempt(base: Readout, scale: float, X: Tensor, y: Tensor, flow: bool) -> Certificate:
    return certificate(_scaled(base, scale), X, y, None, flow, remarks=False)


def _growth(found: Certificate) -> float:
    """By how much to scale next: the worst slack says how much at least is missing."""
    slack = found.failing[0].slack
    return min(max(2.0, 1 / slack), 64.0) if slack > 0 else 64.0


def _helps(found: Certificate) -> bool:
    """Whether a larger scale can repair what fails: rank and well-posedness it cannot."""
    return not any(c.name in ("well-posed", "width", "inputs", "rank", "step") for c in found.failing)
