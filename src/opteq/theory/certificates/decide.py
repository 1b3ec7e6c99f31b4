"""certify: whether a theorem guarantees that gradient descent from here converges."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from opteq.cells import GaussianDEQ, Monotone, ScaledReLU
from opteq.checks import check_instance, invalid
from opteq.models import Readout
from opteq.solution import ConvergenceError
from opteq.theory.certificates.conditions import Certificate, Condition
from opteq.theory.certificates.gaussian import GaussianTheorem
from opteq.theory.certificates.measure import check_data
from opteq.theory.certificates.monotone import MonotoneTheorem
from opteq.theory.certificates.opteq import check_assumption, find_layers
from opteq.theory.certificates.scaled_relu import ScaledReLUTheorem
from opteq.theory.certificates.scope import check_scope
from opteq.theory.certificates.search import best_radii
from opteq.theory.certificates.start import observe
from opteq.theory.certificates.theorem import Radii, Theorem
from opteq.theory.kernels import least_eigenvalue
from opteq.theory.ntk import empirical_ntk

__all__ = ["certificate", "certify"]

_THEOREMS: dict[type, type[Theorem]] = {GaussianDEQ: GaussianTheorem, ScaledReLU: ScaledReLUTheorem, Monotone: MonotoneTheorem}
_KERNEL = 1000  # the largest N for which the tangent kernel is computed to compare with
_LEAST = 1e-290  # the least step, and step times decay: rounded by no more than usual


def certify(
    readout: nn.Module, X: Tensor, y: Tensor, radii: Mapping[str, float] | None = None, *, flow: bool = False, sharp: bool = False
) -> Certificate:
    """Conditions at theta(0) that imply L(k) <= (1 - step decay)^k L(0), L = |y^ - y|^2 / 2, for gradient descent on X, y.

    For a Readout on GaussianDEQ (Theorem 1 of its paper, (9) corrected), ScaledReLU (Theorem 4.4; flow: 4.2) or Monotone (Theorem
    3.3.5 re-derived; flow: 3.3.1); descent is by full batches on the sum of squares, all parameters with one step.
    Freezing a weight of the cell changes no conclusion; the readout must be trained. For any model of OptEq layers Assumption 5 is
    checked, which implies nothing that can be checked: `holds` is None then.

    `radii`: how far the parameters may move, by the names of the theorem (d; C1, C2, C3; R_A, R_U, R_u); None searches them. Norms
    are rounded up and sigma_min(Z) down by more than the errors of their computation and of the solver. Rank and well-posedness are
    conditions like the others, and so is float64: a model that fails them gets a certificate that says so, and does not hold.
    Norms of X, y and the weights must be 0 or in [1e-40, 1e40].

    `sharp=True`: the same conditions and conclusions with a step of 1 / sup ||Z||_F^2, a thousand times the stated one or more,
    by a shorter last step of the proof (`Theorem.max_step`).

    Examples:
        >>> import torch
        >>> from opteq import certify
        >>> from opteq.cells import ScaledReLU
        >>> from opteq.data import unit_norm
        >>> from opteq.models import Readout
        >>> X, y = unit_norm(torch.randn(4, 8, dtype=torch.float64)), torch.randn(4, dtype=torch.float64)
        >>> certificate = certify(Readout(ScaledReLU(8, 32)).double(), X, y)
        >>> certificate.holds, [condition.name for condition in certificate.failing]
        (False, ['(17)', '(18)', '(19)'])
    """
    check_instance("certify", "readout", readout, nn.Module, "an nn.Module")
    for name, value in (("flow", flow), ("sharp", sharp)):
        check_instance("certify", name, value, bool, "a bool")
    if flow and sharp:
        raise ValueError(invalid("certify", "sharp", "False for a flow, which has no step", sharp))
    if not (type(readout) is Readout and type(readout.cell) in _THEOREMS):
        return _assumption(readout, X, y, {"radii": radii, "flow": flow, "sharp": sharp})
    return certificate(readout, X, y, radii, flow, sharp, remarks=True)


def _assumption(model: nn.Module, X: Tensor, y: Tensor, options: Mapping[str, object]) -> Certificate:
    if not find_layers(model):
        kinds = "a Readout on GaussianDEQ, ScaledReLU or Monotone (no subclasses), or a model of OptEq layers"
        got = f"{type(model).__name__} on {type(model.cell).__name__}" if isinstance(model, Readout) else type(model).__name__
        raise TypeError(invalid("certify", "readout", kinds, got))
    for name, value in options.items():
        if value not in (None, False):
            expected = f"{'None' if name == 'radii' else 'False'} for OptEq layers, whose Assumption 5 has no radii and no rate"
            raise ValueError(invalid("certify", name, expected, value))
    return check_assumption(model, X, y)


def certificate(
    readout: Readout, X: Tensor, y: Tensor, radii: Mapping[str, float] | None, flow: bool, sharp: bool = False, *, remarks: bool
) -> Certificate:
    """The certificate of a readout that a theorem covers; `remarks` seeks the largest step and compares with the tangent kernel."""
    check_scope("certify", readout)
    precision = _precision(readout)
    readout = readout if precision is None else copy.deepcopy(readout).double()
    X, y = check_data("certify", readout, X, y)
    theorem = _THEOREMS[type(readout.cell)](observe(readout, X, y), flow, sharp)
    chosen = best_radii(theorem, progress=remarks) if radii is None else theorem.check_radii(radii)
    found = _conclude(theorem, chosen, precision)
    notes = (*found.notes, *_notes(readout, found, X, sharp, remarks))
    return replace(found, notes=notes)


def _precision(readout: Readout) -> Condition | None:
    """A condition that fails for parameters in less than double precision, where the steps of a theorem are lost in rounding."""
    eps = max(torch.finfo(p.dtype).eps for p in readout.parameters())
    if eps <= torch.finfo(torch.float64).eps:
        return None
    remedy = (
        "Call .double() on the model: the theorem speaks of exact arithmetic, and its steps vanish in the rounding of the weights."
    )
    return Condition("precision", "bits of the parameters >= 53", 1 - math.log2(eps), 53.0, remedy=remedy)


def _conclude(theorem: Theorem, radii: Radii, precision: Condition | None) -> Certificate:
    start, conditions = theorem.start, theorem.conditions(radii) + (() if precision is None else (precision,))
    conditions += _vanishing_step(theorem, radii) if all(c.holds for c in conditions) else ()
    holds = all(c.holds for c in conditions)
    decay = theorem.decay if holds else 0.0
    step = theorem.max_step(radii) * (1 - 1e-12) if holds and not theorem.flow else 0.0
    rate = decay if theorem.flow else 1 - step * decay
    return Certificate(
        theorem=theorem.title,
        kind="flow" if theorem.flow else "descent",
        holds=holds,
        conditions=conditions,
        max_step=step,
        rate=rate if holds else math.nan,
        decay=decay,
        radii=theorem.complete(radii),
        guarantees=theorem.guarantees(radii) if holds else (),
        loss=start.r0 * start.r0 / 2,
        measured=start.residual * start.residual / 2,
    )


def _vanishing_step(theorem: Theorem, radii: Radii) -> tuple[Condition, ...]:
    """A condition that fails where float64 has no number for the step, or for what it takes from the loss."""
    if theorem.flow:
        return ()
    step = theorem.max_step(radii)
    remedy = f"Make X or {theorem.scaled} smaller, or the radii larger: the admissible step is too small for float64."
    formula = f"max_step and max_step * decay >= {_LEAST:g}"
    found = Condition("step", formula, min(step, step * theorem.decay), _LEAST, "bound", remedy)
    return () if found.holds else (found,)


def _notes(readout: Readout, found: Certificate, X: Tensor, sharp: bool, remarks: bool) -> list[str]:
    notes = []
    if found.kind == "flow" and isinstance(readout.cell, GaussianDEQ):
        notes.append("The paper states descent only; with integrals for sums its proof gives the conditions above.")
    frozen = [name.removeprefix("cell.") for name, p in readout.named_parameters() if not p.requires_grad]
    if frozen:
        notes.append(f"Frozen: {', '.join(frozen)}. The conclusions hold, as these parameters do not move at all.")
    if readout.stop is not None and readout.stop.rtol > 1e-10:
        notes.append(f"The theorem speaks of exact equilibria; this model solves them to rtol {readout.stop.rtol:g} only.")
    if found.holds and found.kind == "descent" and not sharp:
        notes.append("This step is cautious: certify(..., sharp=True) proves the same for one that is much larger.")
    if found.holds and remarks and X.shape[0] <= _KERNEL:
        notes += _compared(readout, found, X)
    return notes


def _compared(readout: Readout, found: Certificate, X: Tensor) -> list[str]:
    try:
        eigenvalue = least_eigenvalue(empirical_ntk(readout, X))
    except ConvergenceError:  # by the solver of the readout, which need not be as patient as the one here
        return []
    text = (
        f"For comparison: the tangent kernel at theta(0) has lambda_min = {eigenvalue:.4g}, so that the loss should fall like "
        f"exp(-{2 * eigenvalue:.4g} t) or faster, {2 * eigenvalue / found.decay:.3g} times the guaranteed exponent."
    )
    return [text]
