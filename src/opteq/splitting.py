"""Maps z -> sigma(W z + u), and those among them that are monotone inclusions, which splitting methods solve."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.batch import begins_at_zero, norm, per_sample_like
from opteq.maps import Jacobian, Map
from opteq.operators import Factors, Operator
from opteq.tree import Tree, per_sample

__all__ = ["ActivationMap", "Diagonal", "SplitMap"]


@dataclass(frozen=True)
class ActivationMap(Map):
    """z -> sigma(W z + u), with u = U x + b."""

    closed: ClassVar[bool] = True
    fresh: ClassVar[bool] = True
    W: Operator
    sigma: Activation
    u: Tensor = per_sample()

    def hidden(self, z: Tensor) -> Tensor:
        """W z + u."""
        return self.W.affine(self.u, z)

    def __call__(self, z: Tensor) -> Tensor:
        return self.sigma.over(self.hidden(z))

    def begin(self, z0: Tensor) -> Tensor:
        return self.sigma.over(self.u.clone()) if begins_at_zero(z0) else self(z0)

    def linearize(self, z: Tensor) -> Jacobian:
        """J = D W, D = diag(sigma'(W z + u))."""
        slope = self.sigma.derivative(self.hidden(z))
        return Jacobian(jvp=lambda v: slope * self.W(v), vjp=lambda v: self.W.adjoint(slope * v))


@dataclass(frozen=True)
class Diagonal(Tree):
    """p -> D p with 0 <= D <= 1: the proximal operator of a quadratic, in the place of an activation; its prox has one step."""

    step: float
    D: Tensor = per_sample()
    scaled: Tensor | None = per_sample()  # the ratio, where it is not D

    @classmethod
    def of(cls, D: Tensor, step: float) -> Self:
        """Made ready for the steps to come."""
        scaled = D / torch.lerp(D, torch.ones_like(D), step)
        return cls(step, D, None if torch.equal(D, scaled) else scaled)  # the slopes of ReLU, 0 and 1, stay what they are

    def __call__(self, p: Tensor) -> Tensor:
        return self.D * p

    def prox(self, v: Tensor, step: float) -> Tensor:
        """D v / (D + step (1 - D))."""
        assert step == self.step
        return v * self.ratio

    @property
    def ratio(self) -> Tensor:
        """D / (D + step (1 - D))."""
        return self.D if self.scaled is None else self.scaled


@dataclass(frozen=True)
class SplitMap(ActivationMap):
    """z -> sigma(W z + u) with sigma = prox_h and I - W >= m I: its equilibrium solves 0 in (I - W) z - u + dh(z).

    It exists and is unique for m > 0, whatever the norm of W. Winston and Kolter (2020), "Monotone operator equilibrium networks".
    """

    m: float = field(kw_only=True)
    factors: Factors = field(default_factory=Factors, compare=False, repr=False, kw_only=True)

    def to(self, dtype: torch.dtype) -> Self:
        other = super().to(dtype)  # with the same rounded W each time, so that what is made of it is made once
        return replace(other, W=self.factors.get(("rounded", dtype), self.W, lambda: other.W))

    def linear(self, z: Tensor) -> Tensor:
        """(I - W) z - u."""
        return z - self.hidden(z)

    def prox(self, v: Tensor, step: float) -> Tensor:
        """prox_{step h}(v), sigma itself for a step of 1."""
        return self.sigma.prox(v, step)

    def resolvent(self, v: Tensor, step: float) -> Tensor:
        """(I + step (I - W))^-1 (v + step u), which solves z + step linear(z) = v; TypeError where no factorisation is known."""
        return self.W.resolvent(step, self.u.shape[1:])(v + step * self.u)

    def reflection(self, step: float) -> Operator:
        """2 (I + step (I - W))^-1 - I, made once for all solves of this map."""
        found: Operator = self.factors.get(
            ("reflection", step), self.W, lambda: self.W.resolvent(step, self.u.shape[1:]).reflection()
        )
        return found

    def has_resolvent(self) -> bool:
        """Whether a factorisation is known, for the precision of this map."""
        return self.W.has_resolvent() and self.u.dtype in (torch.float32, torch.float64)

    def norms(self) -> tuple[float, float]:
        """(||I - W||, ||W||), both estimated from below."""
        found: tuple[float, float] = self.factors.get("norms", self.W, lambda: _norms(self.W, self.u))
        return found

    def resolved_step(self) -> float:
        """1 / sqrt(L max(m, min(0.6, L))): the step of Peaceman-Rachford, which converges for every step.

        1 / L has the best guaranteed rate; this is within a third of the best step measured, for L from 0.5 to 130 and m from 0.01
        to 3.
        """
        L = max(self.norms()[0], self.m, torch.finfo(self.u.dtype).tiny)  # m is lost where W rounds to I
        return 1 / math.sqrt(L * max(self.m, min(0.6, L)))

    def forward_step(self) -> float:
        """m / L^2: the middle of the interval in which forward-backward contracts, so that L may be 1.4 times too small."""
        return self.m / max(self.norms()[0], self.m) ** 2


@torch.no_grad()
def _norms(W: Operator, like: Tensor) -> tuple[float, float]:
    """||I - W|| and ||W|| by power iterations on both at once, from a vector without symmetries."""
    v = torch.arange(1, 2 * like[0].numel() + 1, device=like.device).sin().to(like.dtype).view(2, *like.shape[1:])
    size = torch.ones(2, dtype=like.dtype, device=like.device)
    minus = torch.tensor([1.0, 0.0], dtype=like.dtype, device=like.device).view(
        2, *[1] * (v.ndim - 1)
    )  # I - W for the first, -W for the second
    for _ in range(_POWER_STEPS):
        v = _unit(v)[0]
        v, size = _unit(minus * v - W(v))
        v = minus * v - W.adjoint(v)
    return float(size[0]), float(size[1])


def _unit(v: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample scaled to length 1, or 0, and the lengths."""
    size = norm(v)
    return v / per_sample_like(torch.where(size > 0, size, 1), v), size


_POWER_STEPS = 12
