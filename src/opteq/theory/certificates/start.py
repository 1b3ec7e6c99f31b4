"""What is known at theta(0), each number on the safe side of rounding and of the solver's error."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.batch import norm
from opteq.cells import Monotone, ScaledReLU
from opteq.checks import invalid
from opteq.models import Readout
from opteq.theory.certificates.measure import sigma_min, tight_solution
from opteq.theory.certificates.scope import LARGEST, SMALLEST, check_sizes, constant, covered

__all__ = ["Start", "is_bounded", "observe", "upper_norm"]

_EPS = torch.finfo(torch.float64).eps
_TINY = 1e-100  # below that, powers of sigma_min(Z) and what they are compared with may underflow


@dataclass(frozen=True)
class Start:
    """Norms, |y^ - y| and ||X||_F from above, sigma_min(Z) from below. Where no equilibrium need exist, the last ones are NaN."""

    N: int
    width: int
    XF: float
    norms: Mapping[str, float]
    constant: float  # gamma of ScaledReLU, m of Monotone, sigma_w2 of GaussianDEQ
    apart: float  # |x_i / |x_i| - x_j / |x_j|| of the two inputs closest to parallel; infinite where their states need not be
    pair: tuple[int, int]
    rounding: float  # of `apart`
    sigma: float = math.nan
    r0: float = math.nan
    bounded: bool = False  # whether sigma is, so that a larger injection does not make Z larger
    residual: float = math.nan  # |y^ - y| as computed


@dataclass(frozen=True)
class _Reach:
    """|z - z*| <= factor |f(z) - z|; `linear` and `injection` bound the entries that rounding in f(z) is relative to."""

    factor: float
    linear: float
    injection: float


def observe(readout: Readout, X: Tensor, y: Tensor) -> Start:
    """Everything that the conditions of a theorem need; sizes that would lose a power of theirs are refused."""
    cell = covered(readout)
    bias = cell.b if isinstance(cell, Monotone) else None
    biased = bias is not None and bool(bias.detach().any())
    augmented = biased or (bias is not None and bias.requires_grad)
    inputs = torch.cat([X, torch.ones_like(X[:, :1])], dim=1) if augmented else X
    norms = {name: upper_norm(value.detach()) for name, value in _weights(readout, augmented).items()}
    seen = inputs if biased else X  # a bias of 0 does not tell parallel inputs apart
    apart, pair = _most_parallel(seen) if cell.activation.name in _HOMOGENEOUS else (math.inf, (0, 0))
    XF = upper_norm(inputs.reshape(-1))
    check_sizes({"X": upper_norm(X.reshape(-1)), "y": upper_norm(y), **norms})
    rounding, bounded = 8 * (inputs.shape[1] + 2) * _EPS, is_bounded(cell.activation)
    known = Start(X.shape[0], readout.a.numel(), XF, norms, constant(cell), apart, pair, rounding, bounded=bounded)
    reach = _reach(readout, norms)
    return known if reach is None else _solved(known, reach, readout, X, inputs, y)


_HOMOGENEOUS = ("relu", "leaky_relu", "identity")


def is_bounded(activation: Activation) -> bool:
    """Whether sigma stays small however large its argument: tanh does."""
    return bool((activation(torch.tensor([-1e30, 1e30], dtype=torch.float64)).abs() < 1e15).all())


def _weights(readout: Readout, augmented: bool) -> dict[str, Tensor]:
    """The parameters by the names of the papers; the bias of a Monotone is one more column of U."""
    cell = covered(readout)
    found: dict[str, Tensor] = {"a": readout.a}
    if isinstance(cell, Monotone):
        U = torch.cat([cell.U, cell.b[:, None]], dim=1) if augmented and cell.b is not None else cell.U
        return found | {"A": cell.A, "B": cell.B, "[U b]" if augmented else "U": U}
    return found | dict(cell.named_parameters())


def upper_norm(value: Tensor) -> float:
    """||W||_2 of a matrix or |a| of a vector, enlarged by more than the error of its computation."""
    found = torch.linalg.matrix_norm(value, 2) if value.ndim == 2 else norm(value[None])
    return float(found) * (1 + 1e-12 + 16 * max(value.shape) * _EPS)


def _most_parallel(X: Tensor) -> tuple[float, tuple[int, int]]:
    """The least distance between two inputs scaled to length 1, and which they are; an input 0 is paired with itself."""
    unit = torch.nn.functional.normalize(X / X.abs().amax(1, keepdim=True).clamp_min(torch.finfo(X.dtype).tiny), dim=1)
    empty = (~X.any(1)).nonzero().flatten().tolist()
    if empty or X.shape[0] == 1:
        return (0.0, (empty[0], empty[0])) if empty else (math.inf, (0, 0))
    cosines = (unit @ unit.T).fill_diagonal_(-2.0)
    i, j = sorted(divmod(int(cosines.argmax()), X.shape[0]))
    return float(torch.linalg.vector_norm(unit[i] - unit[j])), (i, j)


def _reach(readout: Readout, norms: Mapping[str, float]) -> _Reach | None:
    """How far z can be from the equilibrium, or None when there may be no equilibrium."""
    cell = covered(readout)
    if isinstance(cell, Monotone):
        return _monotone_reach(cell) if cell.m > 0 else None
    if isinstance(cell, ScaledReLU):
        factor, linear, injection = cell.gamma * norms["A"], cell.gamma * cell.A, cell.W
    else:
        factor, linear, injection = norms["W"], cell.W, cell.U
    return _Reach(1 / (1 - factor), _frobenius(linear), _frobenius(injection)) if 0 <= factor < 1 else None


def _monotone_reach(cell: Monotone) -> _Reach:
    """|z - z*| <= |e| + |W e| / m for e = f(z) - z: I - W >= m I."""
    W = upper_norm(cell.matrix().detach())
    linear = abs(1 - cell.m) * math.sqrt(cell.width) + _frobenius(cell.A) ** 2 + 2 * _frobenius(cell.B)
    bias = 0.0 if cell.b is None else _frobenius(cell.b)
    return _Reach(1 + W / cell.m, linear, math.hypot(_frobenius(cell.U), bias))


def _frobenius(value: Tensor) -> float:
    return float(norm(value.detach().reshape(1, -1)))


@torch.no_grad()
def _solved(known: Start, reach: _Reach, readout: Readout, X: Tensor, inputs: Tensor, y: Tensor) -> Start:
    """sigma_min(Z*) >= sigma_min(Z) - ||Z - Z*||_F - rounding, and |y^ - y| from above, whatever the solver returned."""
    Z = tight_solution(readout, X).z
    step = norm(covered(readout).bind(X)(Z) - Z)
    entries = (reach.linear + 1) * norm(Z) + reach.injection * norm(inputs)
    rounding = 2 * _EPS * (known.width + inputs.shape[1] + 16) * entries
    error = reach.factor * _frobenius(step + rounding) * (1 + 1e-9)
    spread = 16 * (known.N + known.width) * _EPS * _frobenius(Z)
    sigma = max(0.0, sigma_min(Z) - error - spread) * (1 - 1e-12)
    sigma = sigma if sigma > _TINY else 0.0
    residual = _frobenius(Z @ readout.a - y)
    r0 = residual * (1 + 1e-12) + known.norms["a"] * (error + spread)
    if sigma > 0 and r0 > LARGEST:
        raise ValueError(invalid("certify", "y", f"within {LARGEST:g} of the outputs of the readout", f"|y^ - y| = {r0:.3g}"))
    return replace(known, sigma=sigma, r0=max(r0, SMALLEST) if r0 > 0 else r0, residual=residual)
