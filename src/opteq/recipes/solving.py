"""How an equilibrium is solved and differentiated, as settings."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from opteq.checks import check_choice
from opteq.equilibrium import Cell, Equilibrium
from opteq.gradients import Gradient, Implicit, JacobianFree, Phantom, Unrolled
from opteq.solution import Stop
from opteq.solver import Solver
from opteq.solvers import Accelerated, Anderson, Broyden, ForwardBackward, Newton, PeacemanRachford, Picard

__all__ = ["Solve"]

SolverName: TypeAlias = Literal[
    "auto", "picard", "anderson", "broyden", "newton", "accelerated", "forward-backward", "peaceman-rachford"
]
GradientName: TypeAlias = Literal["implicit", "unrolled", "phantom", "jacobian-free"]

USUAL = Stop()  # of an Equilibrium

_SOLVERS: dict[str, type[Solver]] = {
    "picard": Picard,
    "anderson": Anderson,
    "broyden": Broyden,
    "newton": Newton,
    "accelerated": Accelerated,
    "forward-backward": ForwardBackward,
    "peaceman-rachford": PeacemanRachford,
}


@dataclass(frozen=True)
class Solve:
    """How the equilibrium is found, and differentiated."""

    solver: SolverName = "auto"
    """auto: as the kind of the equilibrium suggests."""
    rtol: float | None = None
    """Relative residual |f(z) - z| / |f(z)| to reach; by default 1e-4, and what the precision allows on real targets."""
    max_steps: int | None = None
    """Steps of the solver at most; by default 100, and 2000 on real targets."""
    gradient: GradientName = "implicit"
    """implicit: exact; the others are approximations, or a fixed depth. `--train.mode` may replace it."""
    steps: int = 5
    """Of unrolled and phantom gradients."""

    def __post_init__(self) -> None:
        check_choice(self, "solver", self.solver, get_args(SolverName))
        check_choice(self, "gradient", self.gradient, get_args(GradientName))

    def method(self) -> Solver | None:
        """The solver; None: the library chooses."""
        return None if self.solver == "auto" else _SOLVERS[self.solver]()

    def stop(self, usual: Stop = USUAL) -> Stop | None:
        """The tolerance, for a layer whose default is `usual`; None: that default."""
        if self.rtol is None and self.max_steps is None:
            return None
        rtol = usual.rtol if self.rtol is None else self.rtol
        return replace(usual, rtol=rtol, max_steps=usual.max_steps if self.max_steps is None else self.max_steps)

    def derivative(self) -> Gradient:
        """The gradient strategy."""
        if self.gradient == "unrolled":
            return Unrolled(self.steps)
        if self.gradient == "phantom":
            return Phantom(self.steps)
        return Implicit() if self.gradient == "implicit" else JacobianFree()

    def layer(self, cell: Cell) -> Equilibrium:
        """x -> z with z = f(z, x)."""
        return Equilibrium(cell, self.method(), self.stop(), self.derivative())


AUTO = Solve()
UNROLLED = Solve(gradient="unrolled")
