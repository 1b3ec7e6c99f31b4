"""Two more rows of the paper's Table 1: change the convex problem of a layer, get another architecture."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from opteq.batch import at_least_single, own_precision
from opteq.cells.optimization import OptEq, OptEqMap, blend
from opteq.checks import check_instance, invalid
from opteq.equilibrium import Cell
from opteq.maps import Jacobian, Map
from opteq.operators import Dense
from opteq.products import linear
from opteq.tree import per_sample


@dataclass(frozen=True)
class AffineMap(Map):
    """z -> A^-1 (f(A z + t) - t)."""

    closed: ClassVar[bool] = True
    base: OptEqMap
    A: Tensor  # [features, features]
    inverse: Tensor
    t: Tensor  # [features]
    orthogonal: bool

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """A^-1 J A is symmetric for orthogonal A."""
        return self.orthogonal

    def __call__(self, z: Tensor) -> Tensor:
        return linear(self.base(linear(z, self.A, self.t)) - self.t, self.inverse)

    def linearize(self, z: Tensor) -> Jacobian:
        """A^-1 J A, J that of f at A z + t."""
        inner = self.base.linearize(linear(z, self.A, self.t))
        return Jacobian(
            jvp=lambda v: linear(inner.jvp(linear(v, self.A)), self.inverse),
            vjp=lambda v: inner.vjp(v @ self.inverse) @ self.A,
            symmetric=self.symmetric,
        )


class AffineOptEq(Cell):
    """z = A^-1 (f(A z + t) - t), f an OptEq layer: the minimiser of phi(A z + t), for A invertible.

    Parameters A [features, features], which begins as the identity, and t [features]. `orthogonal=True` keeps A orthogonal; only
    then is the layer itself a proximal operator, and its Jacobian symmetric. Optimization induced equilibrium networks, Table 1.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import AffineOptEq, OptEq
        >>> layer = Equilibrium(AffineOptEq(OptEq(4, 8, 16), orthogonal=True))
        >>> layer(torch.randn(5, 4)).shape
        torch.Size([5, 8])
    """

    def __init__(self, cell: OptEq, *, orthogonal: bool = False) -> None:
        super().__init__()
        check_instance(self, "cell", cell, OptEq, "an OptEq")
        check_instance(self, "orthogonal", orthogonal, bool, "a bool")
        self.cell, self.orthogonal = cell, orthogonal
        self.state_shape = cell.state_shape
        dtype, device = cell.b.dtype, cell.b.device
        self.A = nn.Parameter(torch.eye(cell.features, dtype=dtype, device=device))
        self.t = nn.Parameter(torch.zeros(cell.features, dtype=dtype, device=device))
        if orthogonal:
            parametrizations.orthogonal(self, "A")

    def bind(self, x: Tensor) -> AffineMap:
        dtype = self.promoted(x)
        with own_precision(self.t):  # rounded to less, A would not be orthogonal
            A = self.A.to(dtype)
            inverse = A.T if self.orthogonal else torch.linalg.inv(at_least_single(A)).to(dtype)
        return AffineMap(self.cell.bind(x.to(dtype)), A, inverse, self.t.to(dtype), self.orthogonal)


@dataclass(frozen=True)
class MultivariateMap(Map):
    """z -> (alpha / mu) W' S (W z + u) + (1 - alpha) z."""

    closed: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True
    W: Dense
    S: Tensor  # [hidden, hidden]
    alpha: float | Tensor
    mu: float
    u: Tensor = per_sample()

    def hidden(self, z: Tensor) -> Tensor:
        """W z + u."""
        return self.W(z) + self.u

    def plain(self, z: Tensor) -> Tensor:
        """f(z) = W' S (W z + u) / mu: the layer without its skip connection."""
        return self.W.adjoint(linear(self.hidden(z), self.S)) / self.mu

    def __call__(self, z: Tensor) -> Tensor:
        return blend(self.alpha, self.plain(z), z)

    def linearize(self, z: Tensor) -> Jacobian:
        """J = (alpha / mu) W' S W + (1 - alpha) I: symmetric."""

        def product(v: Tensor) -> Tensor:
            return blend(self.alpha, self.W.adjoint(linear(self.W(v), self.S)) / self.mu, v)

        return Jacobian(jvp=product, vjp=product, symmetric=True)


class Contraction(nn.Module):
    """S = I - (I + M M')^-1: symmetric, 0 <= S < I."""

    def forward(self, M: Tensor) -> Tensor:
        wide = at_least_single(M)
        eye = torch.eye(M.shape[0], dtype=wide.dtype, device=M.device)
        with own_precision(M):  # rounded to less, S could have eigenvalues below 0
            S: Tensor = eye - torch.linalg.inv(eye + wide @ wide.T)
        return ((S + S.T) / 2).to(M.dtype)

    def right_inverse(self, S: Tensor) -> Tensor:
        """M = (S (I - S)^-1)^1/2; eigenvalues of S at 1 begin just below."""
        if S.is_meta:  # no numbers to check
            return torch.empty_like(S)
        wide = at_least_single(S)
        eps = torch.finfo(S.dtype).eps / 2 + 8 * torch.finfo(wide.dtype).eps  # of the numbers, and of what follows
        rounding = max(1e-6, S.numel() ** 0.25 * eps)  # times |S|_F <= sqrt(hidden)
        if S.ndim != 2 or len(S) != S.shape[1] or not torch.allclose(wide, wide.T, atol=rounding):
            raise ValueError(invalid("MultivariateOptEq", "S", "symmetric", "a matrix that is not"))
        values, vectors = torch.linalg.eigh((wide + wide.T) / 2)
        if values.min() < -rounding or values.max() > 1 + rounding:
            spread = f"[{values.min().item():.3g}, 1 + {values.max().item() - 1:.3g}]"
            raise ValueError(invalid("MultivariateOptEq", "S", "of eigenvalues in [0, 1]", spread))
        below = max(1e-6, torch.finfo(S.dtype).eps, torch.finfo(wide.dtype).eps ** 0.5)  # |M|^2 is 1 over it: more would be lost
        values = values.clamp(0, 1 - below)
        M: Tensor = (vectors * (values / (1 - values)).sqrt()) @ vectors.T
        return M.to(S.dtype)


class MultivariateOptEq(OptEq):
    """z = (1 / mu) W' S (W z + U x + b): the activation is a matrix S, symmetric with 0 <= S <= I, across the hidden units.

    The minimiser of a quadratic: for an invertible W and mu = 1, of z' W^-1 S^-1 W^-T z / 2 - <U x + b, W^-T z> - |z|^2 / 2.
    Parameters as of OptEq, and S [hidden, hidden], which begins as I / 2. Optimization induced equilibrium networks, Table 1.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import MultivariateOptEq
        >>> cell = MultivariateOptEq(4, 8, 16, constrained=True)
        >>> Equilibrium(cell)(torch.randn(5, 4)).shape, cell.S.shape
        (torch.Size([5, 8]), torch.Size([16, 16]))
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        hidden: int,
        *,
        alpha: float = 1.0,
        mu: float = 1.0,
        constrained: bool = False,
        margin: float = 1e-3,
    ) -> None:
        super().__init__(
            in_features,
            features,
            hidden,
            activation="identity",
            alpha=alpha,
            mu=mu,
            constrained=constrained,
            margin=margin,
        )
        self.S = nn.Parameter(torch.eye(hidden) / 2)
        parametrize.register_parametrization(self, "S", Contraction())

    def bind(self, x: Tensor) -> MultivariateMap:  # type: ignore[override]
        return MultivariateMap(self.operator(), self.S, self.alpha, self.mu, self.injection(x))
