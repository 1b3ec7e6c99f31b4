"""What proposes: a Solver, and the State that it carries from step to step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from opteq.batch import compacted, norm, taken, unlined
from opteq.maps import Map
from opteq.tree import Leaf, Tree


class Solver(ABC):
    """A method for z = f(z): a frozen dataclass of hyper-parameters, validated when it is made.

    Examples:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from opteq import Solver, solve
        >>> from opteq.solve import ValueState
        >>> @dataclass(frozen=True)
        ... class Halfway(Solver):
        ...     def init(self, fn, z0):
        ...         return ValueState(z0, 1, fn(z0))
        ...     def step(self, fn, state):
        ...         z = (state.z + state.fz) / 2
        ...         return ValueState(z, state.evals + 1, fn(z))
        >>> print(solve(torch.cos, torch.zeros(1, 1), Halfway()).status)
        Status.CONVERGED
    """

    differentiable: ClassVar[bool] = False  # whether autograd can follow its steps
    estimates: ClassVar[bool] = False  # its states are not exact, so that f is evaluated once more at their candidates
    selective: ClassVar[bool] = False  # seeks one of several fixed points: takes every step, whatever the residual
    aim: ClassVar[float] = 1.0  # the part of the tolerance that is gone on to, while the residual falls
    evaluates: ClassVar[bool] = False  # the last thing that a step does with f is to evaluate it at the iterates of the new state

    def prepare(self, fn: Map) -> Map:
        """The map that the steps are given: fn with what is worth computing once, such as factorisations."""
        return fn

    @abstractmethod
    def init(self, fn: Map, z0: Tensor) -> "State":
        """The state at z0."""

    @abstractmethod
    def step(self, fn: Map, state: "State") -> "State":
        """The state one step on."""


def evaluates(solver: Solver) -> bool:
    """Whether its steps are of the kind that `Solver.evaluates` promises: a class with other steps has to say so itself."""
    own = next(kind for kind in type(solver).__mro__ if "step" in vars(kind))
    return bool(vars(own).get("evaluates", False))


@dataclass(frozen=True)
class State(Tree, ABC):
    """What a solver carries from step to step; every tensor is batch first. No step may change `z` in place.

    An exact state knows f(z). Others set `exact = False` and only estimate the residual; the loop then evaluates f at candidates.
    """

    exact: ClassVar[bool] = True
    history: ClassVar[tuple[str, ...]] = ()  # large fields of the solver's own, [batch, slots, n] or as z, compacted in place
    z: Tensor
    evals: int  # evaluations of f and products with its Jacobian so far; what `linearize` itself evaluates is not counted

    @abstractmethod
    def estimate(self) -> tuple[Tensor, Tensor]:
        """(|f(z) - z|, |f(z)|) for each sample: exact or estimated."""

    def candidate(self, fn: Map, rows: Tensor | None = None) -> Tensor:
        """The iterates of some rows, by default of all, for states that compute them on demand."""
        return self.z if rows is None else self.z[rows]

    def value(self) -> Tensor:
        """f(z), for exact states."""
        raise TypeError(f"{type(self).__name__} holds an estimate only.")

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        """The state after learning that f(z[rows]) = fz, though the estimate had called these samples converged."""
        return self

    def slots(self) -> int | None:
        """How many slots of its history hold something; None: all."""
        return None

    def select(self, rows: Tensor) -> Self:
        """The state of some samples only; the rows ascend."""

        def kept(leaf: Leaf) -> Tensor:
            return compacted(leaf.tensor, rows, self.slots()) if leaf.name in self.history else taken(leaf.tensor, rows)

        return self.replace_leaves(kept)


@dataclass(frozen=True)
class ValueState(State):
    """z and f(z)."""

    fz: Tensor

    def estimate(self) -> tuple[Tensor, Tensor]:
        return norm(self.fz - self.z), norm(self.fz)

    def value(self) -> Tensor:
        return self.fz


@dataclass(frozen=True)
class ResidualState(State):
    """z and r = f(z) - z, with their sizes: f(z) itself is not kept, to save memory."""

    r: Tensor
    size: Tensor  # |r|
    scale: Tensor  # |f(z)|

    def estimate(self) -> tuple[Tensor, Tensor]:
        return self.size, self.scale

    def value(self) -> Tensor:
        return self.z + self.r


def residual_at(z: Tensor, fz: Tensor, *, fresh: bool = False) -> dict[str, Tensor]:
    """The fields of a ResidualState at z; r is written over a fresh f(z)."""
    scale = norm(fz)
    r = fz.sub_(z) if fresh else fz - z
    return {"z": z, "r": r, "size": norm(r), "scale": scale}


def moved(fn: Map, z: Tensor, move: Tensor) -> dict[str, Tensor]:
    """The fields of a ResidualState at z + move, the move given as rows."""
    z = z + unlined(move, z)
    del move  # the caller has no other use of it, and f may need the memory
    return residual_at(z, fn(z), fresh=getattr(fn, "fresh", False))  # the last one, which is kept, is not
