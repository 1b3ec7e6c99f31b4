"""Which problem does an equilibrium solve? recover_problem finds it.

A problem is over one or more blocks. Each point is given by a pre-image y, at which its value and a subgradient are exact; at
an equilibrium z the pre-images are known (`preimage`), and the subgradient is 0.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from opteq.batch import dot, norm
from opteq.cells.deep import DeepOptEq, RegularizedStep, StackedOptEq
from opteq.cells.optimization import OptEqCell
from opteq.cells.variants import AffineOptEq, MultivariateOptEq
from opteq.cells.wide import WideOptEq
from opteq.checks import invalid
from opteq.equilibrium import Cell
from opteq.spectral import Evidence
from opteq.theory.common import norm_by_formula
from opteq.theory.formulas import TWO_LAYERS, WIDE, affine, inclusion, multivariate, one_layer, regularized
from opteq.theory.objective import Term, inclusion_residual, term

__all__ = ["Problem", "Requirement", "recover_problem"]

Blocks: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Requirement:
    """One condition, lhs <= rhs, under which the problem is convex or the iteration for it converges.

    Examples:
        >>> from opteq.theory import Requirement
        >>> Requirement("||W||^2 <= mu", lhs=0.25, rhs=1.0, evidence="exact").holds
        True
    """

    name: str
    lhs: float
    rhs: float
    evidence: Evidence  # of lhs; a bound that is infinite says nothing
    purpose: Literal["convexity", "convergence"] = "convexity"

    @property
    def holds(self) -> bool:
        """Whether lhs <= rhs; a bound that fails leaves the truth open."""
        return self.lhs <= self.rhs

    def __str__(self) -> str:
        known = self.evidence == "exact" or self.lhs < math.inf
        verdict = "holds" if self.holds else "FAILS" if known else "not known"
        return f"{self.name}: {self.lhs:.4g} <= {self.rhs:.4g} ({self.evidence}), {verdict}"


@dataclass(frozen=True, eq=False)
class Problem(ABC):
    """The problem that the equilibrium of `cell` solves: stated as `text` and `latex`, evaluated by `value` and `residual`.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import recover_problem
        >>> cell, x = OptEq(4, 8, 16, constrained=True), torch.randn(5, 4)
        >>> problem, z = recover_problem(cell), Equilibrium(cell)(x)
        >>> problem.kind, problem.convex, problem.value(x, z).shape, bool(problem.residual(x, z).max() < 1e-3)
        ('minimisation', True, torch.Size([5]), True)
    """

    kind: ClassVar[Literal["minimisation", "inclusion"]] = "minimisation"
    cell: Cell
    text: str
    latex: str
    requirements: tuple[Requirement, ...]

    @abstractmethod
    def preimage(self, x: Tensor, z: Tensor) -> Blocks:
        """The pre-images of the blocks at an equilibrium z."""

    @abstractmethod
    def point(self, x: Tensor, *y: Tensor) -> Blocks:
        """The blocks whose pre-images are y."""

    @abstractmethod
    def value(self, x: Tensor, *y: Tensor) -> Tensor:
        """The objective of each sample at `point(x, *y)`."""

    @abstractmethod
    def subgradient(self, x: Tensor, *y: Tensor) -> Blocks:
        """A subgradient of the objective at `point(x, *y)`, block by block."""

    def residual(self, x: Tensor, z: Tensor) -> Tensor:
        """The length of the subgradient at the point that z generates: 0 at equilibria, and only there."""
        parts = [norm(part) for part in self.subgradient(x, *self.preimage(x, z))]
        length: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        return length

    @property
    def convex(self) -> bool:
        """Whether every condition for the problem to be convex was shown to hold."""
        return all(r.holds and r.evidence != "estimate" for r in self.requirements if r.purpose == "convexity")

    def __str__(self) -> str:
        return "\n".join([self.text, *map(str, self.requirements)])


@dataclass(frozen=True, eq=False)
class OneLayer(Problem):
    """min phi(z), or min alpha M_phi^{1-alpha}(z) with a skip connection. Theorem 1."""

    def term(self, x: Tensor) -> Term:
        """phi at x."""
        return term("recover_problem", self.cell.bind(x).to(self.cell.promoted(x)))

    def preimage(self, x: Tensor, z: Tensor) -> Blocks:
        return (z,)

    def point(self, x: Tensor, *y: Tensor) -> Blocks:
        return (self.term(x).point(*y),)

    def value(self, x: Tensor, *y: Tensor) -> Tensor:
        return self.term(x).envelope(*y)

    def subgradient(self, x: Tensor, *y: Tensor) -> Blocks:
        return (self.term(x).subgradient(*y),)


@dataclass(frozen=True, eq=False)
class Regularized(OneLayer):
    """min h(z) + gamma R(z), or with the envelope of gamma R: h is phi, or alpha M_phi^{1-alpha}. Theorem 4.

    An R that couples the batch has one value for all samples, which is added to the h of each.
    """

    step: RegularizedStep

    def term(self, x: Tensor) -> Term:
        assert isinstance(self.cell, DeepOptEq)
        return term("recover_problem", self.cell.bound(x)[0].to(self.cell.promoted(x)))

    def preimage(self, x: Tensor, z: Tensor) -> Blocks:
        return (self.step(z),)

    def value(self, x: Tensor, *y: Tensor) -> Tensor:
        (v,) = self.point(x, *y)
        return super().value(x, *y) + self._penalty(v)

    def _penalty(self, v: Tensor) -> Tensor:
        regularizer, gamma = self.step.regularizer, self.step.gamma
        if self.step.mode == "gradient":
            return gamma * regularizer.value(v)
        p = self.step(v)  # M^1_{gamma R}(v) = gamma R(p) + |p - v|^2 / 2
        return gamma * regularizer.value(p) + dot(p - v, p - v) / 2

    def subgradient(self, x: Tensor, *y: Tensor) -> Blocks:
        (v,), (part,) = self.point(x, *y), super().subgradient(x, *y)
        return (part + (v - self.step(v)),)  # v - T_R(v) is gamma grad R(v), or the gradient of the envelope


@dataclass(frozen=True, eq=False)
class TwoLayers(Problem):
    """min over (z_1, z_0) of h_1(z_1) + h_2(z_0) + |z_1 - z_0|^2 / 2, h_l = alpha_l M_{phi_l}^{1-alpha_l}. Corollary 1."""

    def terms(self, x: Tensor) -> tuple[Term, Term]:
        """phi_1 and phi_2 at x."""
        assert isinstance(self.cell, (DeepOptEq, StackedOptEq))
        first, second = (layer.to(self.cell.promoted(x)) for layer in self.cell.bound(x))
        return term("recover_problem", first), term("recover_problem", second)

    def preimage(self, x: Tensor, z: Tensor) -> Blocks:
        return (z[:, -1], z[:, 0]) if isinstance(self.cell, StackedOptEq) else (z, self.terms(x)[0].point(z))

    def point(self, x: Tensor, *y: Tensor) -> Blocks:
        if len(y) != 2:
            raise ValueError(invalid(self, "y", "two pre-images, as preimage(x, z) gives them", f"{len(y)}"))
        return tuple(part.point(at) for part, at in zip(self.terms(x), y, strict=True))

    def value(self, x: Tensor, *y: Tensor) -> Tensor:
        z1, z0 = self.point(x, *y)
        first, second = self.terms(x)
        return first.envelope(y[0]) + second.envelope(y[1]) + dot(z1 - z0, z1 - z0) / 2

    def subgradient(self, x: Tensor, *y: Tensor) -> Blocks:
        z1, z0 = self.point(x, *y)
        first, second = (part.subgradient(at) for part, at in zip(self.terms(x), y, strict=True))
        return first + z1 - z0, second + z0 - z1


@dataclass(frozen=True, eq=False)
class Inclusion(Problem):
    """0 in dPhi(z~) + (I - P) z~ over L blocks: for more than two the cyclic shift P is no gradient, so there is no objective."""

    kind: ClassVar[Literal["minimisation", "inclusion"]] = "inclusion"

    def preimage(self, x: Tensor, z: Tensor) -> Blocks:
        return (z,)

    def point(self, x: Tensor, *y: Tensor) -> Blocks:
        return (self.cell.bind(x).to(self.cell.promoted(x))(*y),)

    def value(self, x: Tensor, *y: Tensor) -> Tensor:
        raise TypeError(f"This equilibrium solves a monotone inclusion, which minimises no function: {self.text}")

    def subgradient(self, x: Tensor, *y: Tensor) -> Blocks:
        return (y[0] - self.point(x, *y)[0],)

    def residual(self, x: Tensor, z: Tensor) -> Tensor:
        assert isinstance(self.cell, (DeepOptEq, StackedOptEq))
        return inclusion_residual(self.cell, x, z)


def recover_problem(cell: Cell) -> Problem:
    """The problem that the equilibrium of a cell solves: argmin of a convex function, or a monotone inclusion.

    One layer (Theorem 1), two layers (Corollary 1), the wide limit (Theorem 3) and one regularised layer (Theorem 4) minimise a
    function; more layers solve an inclusion (Theorem 2). The printed objective Phi + R of regularised deep networks holds for one
    layer only: with more, the gradient form adds gamma grad R(z_0) to the first row of the inclusion and the prox form is one
    more block. Optimization induced equilibrium networks.

    Examples:
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import recover_problem
        >>> problem = recover_problem(OptEq(4, 8, 16, constrained=True))
        >>> problem.text.split(", ")[0], problem.convex
        ('minimise over z: phi(z) = psi*(z) - |z|^2/2', True)
    """
    if isinstance(cell, (DeepOptEq, StackedOptEq)):
        return _recover_deep(cell)
    if isinstance(cell, WideOptEq):
        return OneLayer(cell, *WIDE, _requirements(*cell.layers))
    if isinstance(cell, AffineOptEq):
        return OneLayer(cell, *affine(cell.cell), _requirements(cell.cell))
    if isinstance(cell, OptEqCell):
        return OneLayer(cell, *_stated(cell), _requirements(cell))
    expected = "a cell of the OptEq family (of an Equilibrium, its .cell)"
    raise TypeError(invalid("recover_problem", "cell", expected, type(cell).__name__))


def _stated(cell: OptEqCell) -> tuple[str, str]:
    """The problem of one layer, as text and LaTeX."""
    return multivariate(cell) if isinstance(cell, MultivariateOptEq) else one_layer(cell)


def _recover_deep(cell: DeepOptEq | StackedOptEq) -> Problem:
    step = cell.step() if isinstance(cell, DeepOptEq) else None
    layers, requirements = len(cell.layers), _requirements(*cell.layers)
    if step is not None:
        requirements = (*requirements, *_step_requirements(step))
    if layers == 1 and isinstance(cell, DeepOptEq):
        text, latex = _stated(cell.layers[0])
        if step is None:
            return OneLayer(cell, text, latex, requirements)
        return Regularized(cell, *regularized(text, latex, step), requirements, step)
    if layers == 2 and step is None:
        return TwoLayers(cell, *TWO_LAYERS, requirements)
    return Inclusion(cell, *inclusion(layers, step), requirements)


def _requirements(*cells: OptEqCell) -> tuple[Requirement, ...]:
    found = []
    for i, cell in enumerate(cells, start=1):
        size, index = norm_by_formula(cell.operator()), f"_{i}" if len(cells) > 1 else ""
        lhs = math.inf if size is None else cell.activation.lipschitz * float(size) ** 2
        found.append(Requirement(f"L ||W{index}||^2 <= mu{index}", lhs, cell.mu, "bound" if size is None else size.evidence))
    return tuple(found)


def _step_requirements(step: RegularizedStep) -> tuple[Requirement, ...]:
    """R must be convex; the gradient form converges for gamma L_R < 2."""
    curved = Requirement("R is convex", 0.0 if step.regularizer.convex else 1.0, 0.0, "exact")
    smoothness = step.regularizer.smoothness
    if step.mode == "prox":
        return (curved,)
    lhs = math.inf if smoothness is None else step.gamma * smoothness
    return curved, Requirement("gamma L_R <= 2", lhs, 2.0, "exact", "convergence")
