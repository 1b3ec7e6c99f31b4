"""Newton's method, matrix-free, for smooth and piecewise smooth maps."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.batch import per_sample_like
from opteq.checks import check_integer, check_number
from opteq.convex import DualForm
from opteq.linear import LinearizedMap, linear_solver
from opteq.maps import Map, first_value
from opteq.solution import Stop
from opteq.solve import solve_map
from opteq.solver import ResidualState, Solver, State, residual_at
from opteq.solvers.dual import DualNewtonState, advance, begin


@dataclass(frozen=True)
class NewtonState(ResidualState):
    """The iterate, its residual, and the residual not to exceed."""

    start: Tensor  # |r| at z0


@dataclass(frozen=True)
class Newton(Solver):
    """z <- z + t d with (I - J) d = f(z) - z, J a (generalised) Jacobian of f at z: semismooth Newton, for ReLU maps too.

    The linear equation is solved by CG when J is symmetric, else by GMRES, to the relative residual `forcing` (None: 1e-2) in at
    most `inner_steps` products. t is 1, halved at most `halvings` times until the residual falls; where it does not, a plain step
    z <- f(z) is taken if that leaves the residual below the one at z0, else the sample stays. So no iterate is worse than z0.

    A convex map with a dual (a dense OptEq) is solved in its dual form, with CG and t = 1 (`forcing` None: 0.2); samples that
    Newton's steps do not help take plain ones for a while.

    Examples:
        >>> import torch
        >>> from opteq import Stop, solve
        >>> from opteq.solvers import Newton
        >>> found = solve(torch.cos, torch.zeros(1, 1), Newton(), Stop(rtol=1e-6))
        >>> found.status.name, round(found.z.item(), 4), int(found.steps) < 10
        ('CONVERGED', 0.7391, True)
    """

    forcing: float | None = None
    inner_steps: int = 60
    halvings: int = 6

    def __post_init__(self) -> None:
        if self.forcing is not None:
            check_number(self, "forcing", self.forcing, 0.0, 0.5, open_low=True)
        check_integer(self, "inner_steps", self.inner_steps, 1)
        check_integer(self, "halvings", self.halvings, 0)

    def prepare(self, fn: Map) -> Map:
        return DualForm.of(fn)

    def init(self, fn: Map, z0: Tensor) -> NewtonState | DualNewtonState:
        if isinstance(fn, DualForm):
            return begin(fn, z0)
        fields = residual_at(z0, first_value(fn, z0))
        return NewtonState(evals=1, start=fields["size"], **fields)

    def step(self, fn: Map, state: State) -> NewtonState | DualNewtonState:
        if isinstance(fn, DualForm):
            assert isinstance(state, DualNewtonState)
            return advance(fn, state, self.forcing or 0.2, self.inner_steps)
        assert isinstance(state, NewtonState)
        equation = LinearizedMap(fn, False, state.z, state.r)
        inner = Stop(rtol=self.forcing or 1e-2, max_steps=min(self.inner_steps, 2 * state.z[0].numel()))
        found = solve_map(equation, torch.zeros_like(state.z), linear_solver(fn), inner, verified=False)
        state = replace(state, evals=state.evals + found.evals)
        return self._globalise(fn, state, found.z)

    def _globalise(self, fn: Map, state: NewtonState, direction: Tensor) -> NewtonState:
        """Halve the steps of the samples whose residual does not fall; then try a plain step."""
        waiting = state.size > 0  # not where it is NaN: nothing would help
        current, length = state, 1.0
        for _ in range(self.halvings + 1):
            bound = (1 - 1e-4 * length) * state.size
            current, waiting = _try(fn, current, waiting, state.z + length * direction, bound)
            if not waiting.any():
                return current
            length /= 2
        return _try(fn, current, waiting, state.value(), state.start)[0]


def _try(fn: Map, state: NewtonState, waiting: Tensor, z: Tensor, bound: Tensor) -> tuple[NewtonState, Tensor]:
    """Move the waiting samples to z where that keeps the residual within the bound."""
    tried = residual_at(z, fn(z))
    taken = waiting & (tried["size"] <= bound)
    if not taken.all():
        tried = {name: torch.where(per_sample_like(taken, t), t, getattr(state, name)) for name, t in tried.items()}
    return replace(state, evals=state.evals + 1, **tried), waiting & ~taken
