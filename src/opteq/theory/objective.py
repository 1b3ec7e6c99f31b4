"""The convex function that an OptEq layer minimises, and the problem that a whole equilibrium solves.

One layer is f(y) = grad psi(y) = prox_phi(y) with psi(y) = (1 / mu) 1'sigma~(W y + u) and phi = psi* - |.|^2 / 2. psi* is finite
only near the range of f, so phi is evaluated at points given by their pre-image: at v = f(y), Fenchel's equality says
psi*(v) = <y, v> - psi(y), and y - v is a subgradient of phi.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from opteq.batch import dot, flat, norm
from opteq.cells.deep import DeepMap, DeepOptEq, StackedOptEq
from opteq.cells.optimization import OptEqMap
from opteq.cells.variants import AffineMap, MultivariateMap
from opteq.cells.wide import WideMap
from opteq.checks import check_floating, check_instance, check_shape, invalid
from opteq.equilibrium import Cell
from opteq.maps import Map

__all__ = ["Term", "bound", "envelope", "inclusion_residual", "objective", "term"]


class Term(ABC):
    """h = alpha M_phi^{1-alpha} of one layer, phi itself for alpha = 1; at points that are given by their pre-image y."""

    @abstractmethod
    def phi(self, y: Tensor) -> Tensor:
        """phi(v) at v = f(y)."""

    @abstractmethod
    def point(self, y: Tensor) -> Tensor:
        """v = alpha f(y) + (1 - alpha) y."""

    @abstractmethod
    def subgradient(self, y: Tensor) -> Tensor:
        """A subgradient of h at point(y)."""

    @abstractmethod
    def envelope(self, y: Tensor) -> Tensor:
        """h at point(y)."""


@dataclass(frozen=True)
class LayerTerm(Term):
    """The h of a layer f = grad psi."""

    f: Callable[[Tensor], Tensor]
    psi: Callable[[Tensor], Tensor]
    alpha: float | Tensor

    def phi(self, y: Tensor) -> Tensor:
        v = self.f(y)
        return dot(y, v) - self.psi(y) - dot(v, v) / 2

    def point(self, y: Tensor) -> Tensor:
        return self.alpha * self.f(y) + (1 - self.alpha) * y

    def subgradient(self, y: Tensor) -> Tensor:
        return y - self.point(y)

    def envelope(self, y: Tensor) -> Tensor:
        gap = y - self.f(y)  # the minimum over w of phi(w) + |w - v|^2 / (2 (1 - alpha)) is at w = f(y)
        return self.alpha * (self.phi(y) + (1 - self.alpha) / 2 * dot(gap, gap))


@dataclass(frozen=True)
class AffineTerm(Term):
    """h(A z + t), h that of the layer inside."""

    inner: Term
    map: AffineMap

    def phi(self, y: Tensor) -> Tensor:
        return self.inner.phi(self._inward(y))

    def point(self, y: Tensor) -> Tensor:
        return linear(self.inner.point(self._inward(y)) - self.map.t, self.map.inverse)

    def subgradient(self, y: Tensor) -> Tensor:
        return self.inner.subgradient(self._inward(y)) @ self.map.A

    def envelope(self, y: Tensor) -> Tensor:
        return self.inner.envelope(self._inward(y))

    def _inward(self, y: Tensor) -> Tensor:
        return linear(y, self.map.A, self.map.t)


def bound(owner: str, cell: Cell, x: Tensor, y: Tensor) -> Map:
    """The cell's map at x, after a look at the arguments."""
    check_instance(owner, "cell", cell, Cell, "a cell, such as OptEq (of an Equilibrium, its .cell)")
    check_floating(owner, "y", y)
    check_shape(owner, "y", y, cell.initial(x[:1]).shape[1:])
    if len(y) != len(x) and 1 not in (len(y), len(x)):
        raise ValueError(invalid(owner, "y", f"of {len(x)} samples, as x is, or of one", list(y.shape)))
    return cell.bind(x).to(torch.promote_types(cell.promoted(x), y.dtype))


def term(owner: str, fn: Map) -> Term:
    """The h of a map that is one layer: OptEq, dense or not, wide, affine or with a multivariate activation."""
    if isinstance(fn, DeepMap) and len(fn.layers) == 1:
        return term(owner, fn.layers[0])
    if isinstance(fn, AffineMap):
        return AffineTerm(term(owner, fn.base), fn)
    found = _layer_term(fn)
    if found is None:
        expected = "one OptEq layer without a regulariser, or a wide OptEq (see recover_problem for deep and regularised ones)"
        raise TypeError(invalid(owner, "cell", expected, type(fn).__name__.removesuffix("Map")))
    return found


def _layer_term(fn: Map) -> LayerTerm | None:
    if isinstance(fn, OptEqMap):
        return LayerTerm(fn.plain, lambda y: _psi(fn, y), fn.alpha)
    if isinstance(fn, MultivariateMap):
        return LayerTerm(fn.plain, lambda y: dot(fn.hidden(y), linear(fn.hidden(y), fn.S)) / (2 * fn.mu), fn.alpha)
    if isinstance(fn, WideMap):
        parts = [part for part in map(_layer_term, fn.layers) if part is not None]
        return LayerTerm(fn, lambda y: _sum(w * part.psi(y) for w, part in zip(fn.weights, parts, strict=True)), 1.0)
    return None


def _psi(layer: OptEqMap, y: Tensor) -> Tensor:
    """psi(y) = (1 / mu) 1'sigma~(W y + u)."""
    return flat(layer.sigma.integral(layer.hidden(y))).sum(1) / layer.mu


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


def objective(cell: Cell, x: Tensor, y: Tensor) -> Tensor:
    """phi_x(v) at v = f(y), exact: <y, v> - psi(y) - |v|^2 / 2.

    f is the layer without its skip connection. At an equilibrium z = f(z), which minimises phi, objective(cell, x, z) is the
    minimum. Optimization induced equilibrium networks, Theorem 1.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import objective
        >>> cell, x = OptEq(4, 8, 16, constrained=True).double(), torch.randn(5, 4, dtype=torch.float64)
        >>> z = Equilibrium(cell, stop=Stop(rtol=1e-10))(x)
        >>> bool((objective(cell, x, z) < objective(cell, x, z + 0.1)).all())
        True
    """
    return term("objective", bound("objective", cell, x, y)).phi(y)


def envelope(cell: Cell, x: Tensor, y: Tensor) -> Tensor:
    """alpha M_phi^{1-alpha}(v) at v = alpha f(y) + (1 - alpha) y, exact: what a layer with a skip connection minimises.

    M_phi^t(v) = min_w phi(w) + |w - v|^2 / (2 t). Optimization induced equilibrium networks, Table 1 and Theorem 2.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import envelope
        >>> cell, x = OptEq(4, 8, 16, alpha=0.8, constrained=True).double(), torch.randn(5, 4, dtype=torch.float64)
        >>> z = Equilibrium(cell, stop=Stop(rtol=1e-10))(x)
        >>> bool((envelope(cell, x, z) < envelope(cell, x, z + 0.1)).all())
        True
    """
    return term("envelope", bound("envelope", cell, x, y)).envelope(y)


def inclusion_residual(deep: DeepOptEq | StackedOptEq, x: Tensor, z: Tensor) -> Tensor:
    """|v + (I - P) z~| for the v in dPhi at z~ = (z_1, ..., z_{L-1}, z_0), z_0 = z and z_l = f_l(z_{l-1}).

    By construction grad Phi_l(z_l) = z_{l-1} - z_l for l < L, and z_{L-1} - f_L(z_{L-1}) is a subgradient of Phi_L at
    f_L(z_{L-1}): so what is left is the distance |f_L(z_{L-1}) - z_0|, which is 0 at equilibria and only there. A regulariser is
    one more block (prox) or a term in the first (gradient). For a StackedOptEq, z is z~ itself.
    Optimization induced equilibrium networks, Theorem 2.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import DeepOptEq, OptEq
        >>> from opteq.theory import inclusion_residual
        >>> deep, x = DeepOptEq([OptEq(4, 8, 16), OptEq(4, 8, 12)]).double(), torch.randn(5, 4, dtype=torch.float64)
        >>> z = Equilibrium(deep, stop=Stop(rtol=1e-10))(x)
        >>> bool(inclusion_residual(deep, x, z).max() < 1e-8), bool(inclusion_residual(deep, x, z + 0.1).min() > 0.01)
        (True, True)
    """
    if not isinstance(deep, (DeepOptEq, StackedOptEq)):
        raise TypeError(invalid("inclusion_residual", "deep", "a DeepOptEq or a StackedOptEq", type(deep).__name__))
    return norm(bound("inclusion_residual", deep, x, z)(z) - z)
