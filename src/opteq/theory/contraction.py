"""How much a bound map shrinks distances: what a-posteriori error bounds and Lipschitz bounds have in common.

Everything is computed in double precision, and each number is rounded to the safe side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor

from opteq.cells import DepthwiseOptEq, GaussianDEQ, Monotone, MonotoneConv, MonotoneMultiTier, ScaledReLU
from opteq.cells.deep import RegularizedStep
from opteq.cells.optimization import ConvOptEq, OptEq, OptEqMap
from opteq.cells.variants import MultivariateMap, MultivariateOptEq
from opteq.equilibrium import Cell
from opteq.maps import Map
from opteq.operators import Conv, Dense, Operator, Separable
from opteq.regularizers import L2
from opteq.spectral import Evidence, Norm, operator_norm
from opteq.splitting import ActivationMap, SplitMap

__all__ = [
    "ROUNDING",
    "Rates",
    "UnknownFactorError",
    "around",
    "in_sequence",
    "injection_operator",
    "layer_rates",
    "measured",
    "monotonicity",
    "rates",
    "ratio",
    "side_by_side",
    "weakest",
]

ROUNDING = 1e-12  # of a computed norm: some sqrt(n) units in the last place


class UnknownFactorError(TypeError):
    """A map of which no Lipschitz constant is known."""


@dataclass(frozen=True)
class Rates:
    """|f(z, u) - f(z', u')| <= c |z - z'| + gain |u - u'|, by gap = 1 - c, which loses no digits when c is near 1."""

    gap: Tensor  # 0-d; f is a contraction if it is > 0
    gain: Tensor
    evidence: Evidence

    def relaxed(self, alpha: float | Tensor) -> "Rates":
        """Those of alpha f + (1 - alpha) I: 1 - (alpha c + 1 - alpha) = alpha (1 - c)."""
        return replace(self, gap=alpha * self.gap, gain=alpha * self.gain)

    def driven(self, injection: Norm) -> "Rates":
        """With |U| |x - x'| in place of |u - u'|, u = U x + b."""
        return replace(self, gain=self.gain * injection.value, evidence=weakest(self.evidence, injection.evidence))

    def then(self, after: "Rates") -> "Rates":
        """Those of f_2 o f_1: c = c_1 c_2 and gain = c_2 gain_1 + gain_2, driven by the same input."""
        gap = self.gap + after.gap - self.gap * after.gap
        return Rates(gap, (1 - after.gap) * self.gain + after.gain, weakest(self.evidence, after.evidence))


def weakest(*evidence: Evidence) -> Evidence:
    """How sure a number is that was made of others."""
    return max(evidence, key=("exact", "bound", "estimate").index)


def ratio(value: Tensor, gap: Tensor) -> Tensor:
    """value / gap; infinity where the gap is not positive, and nothing is known."""
    return torch.where(gap > 0, value / torch.where(gap > 0, gap, 1), torch.inf)


def measured(operator: Operator, shape: Sequence[int] | None = None) -> Norm:
    """||W|| on samples of a shape (None: on images of every size), by Lanczos' method where there is no formula."""
    double = operator.replace_leaves(lambda leaf: leaf.tensor.double())
    if isinstance(double, Dense):
        found = operator_norm(double)
    elif isinstance(double, (Conv, Separable)):
        found = operator_norm(double, None if shape is None else shape[1:])
    elif shape is None:
        raise UnknownFactorError(f"the norm of a {type(operator).__name__} on images of every size is not known.")
    else:
        found = operator_norm(double, shape, method="lanczos")
    return replace(found, value=found.value * (1 + ROUNDING))


def injection_operator(cell: Cell) -> Operator | None:
    """U of u = U x + b, the part of x in a cell of the library; None for others, and where a subclass has its own way with x."""
    kind = next((kind for kind in type(cell).__mro__ if kind in _INJECTIONS), None)
    if kind is None or any(getattr(type(cell), name, None) is not getattr(kind, name, None) for name in _TAKING_X):
        return None
    return _INJECTIONS[kind](cell)


_TAKING_X: Final = ("bind", "injection", "_inject", "features")  # the methods that take x, as far as a cell has them
_INJECTIONS: Final[dict[type, Callable[[Any], Operator]]] = {
    **dict.fromkeys((OptEq, MultivariateOptEq, GaussianDEQ, Monotone), lambda cell: Dense(cell.U)),
    **dict.fromkeys((ConvOptEq, MonotoneConv), lambda cell: Conv(cell.U, cell.padding)),
    DepthwiseOptEq: lambda cell: Separable(cell.U1, cell.U2[:, :, 0, 0], cell.padding),
    MonotoneMultiTier: lambda cell: Conv(cell.U, "circular"),  # the tiers that x does not enter add nothing to the norm
    ScaledReLU: lambda cell: Dense(cell.W.T),
}


def layer_rates(fn: OptEqMap | MultivariateMap | ActivationMap, shape: Sequence[int] | None = None) -> Rates:
    """c and gain of one layer without its skip connection.

    W' sigma(W z + u) / mu: c = L ||W||^2 / mu, gain = L ||W|| / mu. W' S (W z + u) / mu: c = ||W' S W|| / mu, gain = ||W' S|| / mu.
    sigma(W z + u): c = L ||W||, gain = L.
    """
    if isinstance(fn, MultivariateMap):
        W, S = fn.W.W.double(), fn.S.double()
        lifted = W.T @ S
        product, lift = (torch.linalg.matrix_norm(part, 2) * (1 + ROUNDING) for part in (lifted @ W, lifted))
        return Rates(1 - product / fn.mu, lift / fn.mu, "exact")
    norm, lipschitz = measured(fn.W, shape), fn.sigma.lipschitz
    if isinstance(fn, OptEqMap):
        return Rates(1 - lipschitz * norm.value**2 / fn.mu, lipschitz * norm.value / fn.mu, norm.evidence)
    return Rates(1 - lipschitz * norm.value, torch.full_like(norm.value, lipschitz), norm.evidence)


def rates(fn: Map, shape: Sequence[int] | None = None) -> Rates:
    """c and gain of a layer as it is applied, skip connection and all; gain 0 for the step of a regulariser."""
    if isinstance(fn, (OptEqMap, MultivariateMap)):
        return layer_rates(fn, shape).relaxed(fn.alpha)
    if isinstance(fn, RegularizedStep):
        return _step_rates(fn)
    raise UnknownFactorError(f"no Lipschitz constant of a {type(fn).__name__} is known.")


def _step_rates(step: RegularizedStep) -> Rates:
    """c of T_R. Convex R: 1 for the prox and max(1, gamma L_R - 1) for the gradient step; else 1 + gamma L_R."""
    R, gamma = step.regularizer, step.gamma
    if isinstance(R, L2):
        c = 1 / (1 + gamma) if step.mode == "prox" else abs(1 - gamma)
    elif step.mode == "prox" and R.convex:
        c = 1.0
    elif step.mode == "gradient" and R.smoothness is not None:
        c = max(1.0, gamma * R.smoothness - 1) if R.convex else 1 + gamma * R.smoothness
    else:
        raise UnknownFactorError(f"the {step.mode} step of {type(R).__name__} has no known Lipschitz constant.")
    return Rates(torch.tensor(1 - c, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64), "exact")


def in_sequence(parts: Sequence[Rates]) -> Rates:
    """c and gain of f_L o ... o f_1."""
    return reduce(Rates.then, parts)


def side_by_side(parts: Sequence[Rates], weights: Sequence[float | Tensor]) -> Rates:
    """c and gain of sum_l w_l f_l, the weights of sum 1."""
    pairs = list(zip(weights, parts, strict=True))
    gap, gain = (torch.stack([weight * getattr(part, name) for weight, part in pairs]).sum(0) for name in ("gap", "gain"))
    return Rates(gap, gain, weakest(*(part.evidence for part in parts)))


def around(parts: Sequence[Rates], r: Tensor) -> Tensor:
    """The d >= 0 with d_l = c_l d_{l-1} + r_l around a cycle of L layers, d_0 = d_L: [..., L]; infinite if there is none."""
    c = [1 - part.gap for part in parts]
    last = torch.zeros_like(r[..., 0])
    for factor, own in zip(c, r.unbind(-1), strict=True):
        last = factor * last + own
    found = [ratio(last, in_sequence(parts).gap)]
    for factor, own in zip(c, r.unbind(-1), strict=True):
        found.append(factor * found[-1] + own)
    return torch.stack(found[1:], dim=-1)


def monotonicity(fn: ActivationMap) -> Tensor | None:
    """m = 1/L - 1 + m_W with I - W >= m_W I, for which m |d|^2 <= <a - W d, d> wherever d is a difference of sigma, a that of its
    arguments: a monotone L-Lipschitz sigma has <a, d> >= |d|^2 / L. None where sigma is not monotone or m_W is not known.
    """
    if isinstance(fn, SplitMap):
        return torch.tensor(fn.m + (1 / fn.sigma.lipschitz - 1), dtype=torch.float64)
    if not isinstance(fn.W, Dense) or not fn.sigma.monotone:
        return None
    W = fn.W.W.double()
    top: Tensor = torch.linalg.eigvalsh((W + W.T) / 2)[-1]
    m: Tensor = 1 / fn.sigma.lipschitz - top - ROUNDING * torch.linalg.matrix_norm(W)
    return m
