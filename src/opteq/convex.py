"""Maps whose equilibrium minimises a convex function, and the dual form in which that is cheaper."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.batch import is_zero, norm
from opteq.maps import Jacobian, Map
from opteq.products import affine, product
from opteq.solver import State
from opteq.tree import per_sample

__all__ = ["ConvexMap", "DualForm", "DualMap", "DualState", "raised"]


@dataclass(frozen=True)
class DualMap(Map):
    """s -> sigma(G s + u), G symmetric: for a monotone sigma, the optimality condition of min_s 1'sigma~*(s) - u's - s'G s / 2."""

    closed: ClassVar[bool] = True
    G: Tensor  # [hidden, hidden]
    sigma: Activation
    u: Tensor = per_sample()  # [batch, hidden]

    def __call__(self, s: Tensor) -> Tensor:
        return self.sigma(affine(self.u, s, self.G))

    def linearize(self, z: Tensor) -> Jacobian:
        """J = D G, D = diag(sigma'(G s + u))."""
        slope = self.sigma.derivative(affine(self.u, z, self.G))
        return Jacobian(jvp=lambda v: slope * product(v, self.G), vjp=lambda v: product(slope * v, self.G))


class ConvexMap(Map):
    """z -> (alpha / mu) W' sigma(W z + u) + (1 - alpha) z with a dense W.

    With s = sigma(W z + u) an equilibrium is z = W' s / mu, and s = sigma(G s + u) with G = W W' / mu: one product an iteration
    instead of two, and a symmetric positive definite Hessian.
    """

    sigma: Activation
    alpha: float | Tensor
    mu: float

    @abstractmethod
    def dual(self) -> DualMap:
        """s -> sigma(G s + u)."""

    @abstractmethod
    def hidden(self, z: Tensor) -> Tensor:
        """W z + u, so that s = sigma(hidden(z))."""

    @abstractmethod
    def project(self, z: Tensor) -> Tensor:
        """W z."""

    @abstractmethod
    def lift(self, s: Tensor) -> Tensor:
        """z = W' s / mu."""

    @abstractmethod
    def dual_pays(self) -> bool:
        """Whether a product with G is cheaper than the two with W and W' that it replaces."""


@dataclass(frozen=True)
class DualForm(Map):
    """A convex map together with its dual, which is made once, when a solver begins."""

    base: ConvexMap
    dual: DualMap

    @classmethod
    def of(cls, fn: Map) -> Map:
        """The dual form of a convex map; any other map as it is."""
        return cls(fn, fn.dual()) if isinstance(fn, ConvexMap) else fn

    @property
    def closed(self) -> bool:  # type: ignore[override]
        return self.base.closed

    def __call__(self, z: Tensor) -> Tensor:
        return self.base(z)

    def linearize(self, z: Tensor) -> Jacobian:
        return self.base.linearize(z)

    def size(self, e: Tensor) -> Tensor:
        """About |T(z) - z| for e = sigma(G s + u) - s at z = W's / mu: never less while L ||W||^2 <= mu."""
        factor = self.base.alpha / math.sqrt(self.base.mu * self.base.sigma.lipschitz)
        return norm(e) * factor

    def scale(self, s: Tensor, Gs: Tensor) -> Tensor:
        """|z| for z = W's / mu: |z|^2 = s'G s / mu."""
        squared, info = (s * Gs).sum(1), torch.finfo(s.dtype)
        if ((squared > info.tiny / info.eps) & (squared < math.inf)).all():
            return (squared / self.base.mu).sqrt()
        unit = s.abs().amax(1).clamp_min(info.tiny)[:, None]  # squares overflow or vanish, or s = 0
        length: Tensor = ((s / unit * (Gs / unit)).sum(1).clamp_min(0) / self.base.mu).sqrt() * unit[:, 0]
        return length

    def first(self, z0: Tensor) -> "DualStart":
        """s and the size of the residual at z0."""
        if is_zero(z0):  # so that W z0 needs no product
            s = self.dual.sigma(self.dual.u)
            Gs = product(s, self.dual.G)
            scale = self.scale(s, Gs) * self.base.alpha
            return DualStart(self.dual.u, s, Gs, scale, scale, 1)
        a = self.base.hidden(z0)
        s = self.dual.sigma(a)
        step = self.base.alpha * (self.base.lift(s) - z0)
        return DualStart(a, s, product(s, self.dual.G), norm(step), norm(z0 + step), 2)


class DualStart(NamedTuple):
    """a = W z0 + u, s = sigma(a), G s, |T(z0) - z0|, |T(z0)|, and the products that these took."""

    a: Tensor
    s: Tensor
    Gs: Tensor
    size: Tensor
    scale: Tensor
    evals: int


def raised(trust: Tensor, rows: Tensor, truth: Tensor, estimate: Tensor) -> Tensor:
    """The factor of later estimates, after some were found too small: so that they do not call the loop at every step."""
    return trust.index_copy(0, rows, (trust[rows] * (truth / estimate).clamp(1, 100)).clamp_max(1e4))


@dataclass(frozen=True)
class DualState(State, ABC):
    """The iterate is z0 at first, then lift(s). `trust`: how far the estimate of the residual was below the truth."""

    exact: ClassVar[bool] = False
    size: Tensor
    scale: Tensor
    trust: Tensor
    moved: bool

    @abstractmethod
    def hidden(self, fn: DualForm, rows: Tensor | None) -> Tensor:
        """s, of some rows or of all."""

    def candidate(self, fn: Map, rows: Tensor | None = None) -> Tensor:
        assert isinstance(fn, DualForm)
        return fn.base.lift(self.hidden(fn, rows)) if self.moved else super().candidate(fn, rows)

    def estimate(self) -> tuple[Tensor, Tensor]:
        return self.size * self.trust, self.scale

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        """Only where L ||W||^2 > mu, or by rounding."""
        return replace(self, trust=raised(self.trust, rows, norm(fz - z), self.estimate()[0][rows]))
