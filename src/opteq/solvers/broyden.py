"""Broyden's good method with bounded memory, safeguarded without a line search."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from opteq.batch import combine, dots, flat, lined, norm, per_sample_like
from opteq.checks import check_integer, check_number
from opteq.maps import Map, first_value
from opteq.solver import ResidualState, Solver, State, moved, residual_at


@dataclass(frozen=True)
class BroydenState(ResidualState):
    """With r = f(z) - z, the inverse of its Jacobian is taken to be B = -I + sum_i u_i v_i'."""

    history: ClassVar[tuple[str, ...]] = ("U", "V")
    U: Tensor  # [batch, memory, n]
    V: Tensor  # [batch, memory, n]
    damping: Tensor  # [batch], shortens the steps of samples whose last step was refused
    slot: int  # updates so far


def _apply(left: Tensor, right: Tensor, x: Tensor) -> Tensor:
    """(-I + sum_i left_i right_i') x."""
    return combine(dots(right, x), left).sub_(x)


@dataclass(frozen=True)
class Broyden(Solver):
    """z <- z - B (f(z) - z), where B, begun at -I, learns the inverse Jacobian from each step (the good Broyden update).

    `memory`: how many updates are kept; a full memory is emptied. `growth`: a step that makes the residual more than `growth`
    times as large is refused, the sample forgets its updates and takes a shorter plain step next. One evaluation a step.
    Broyden (1965).

    Examples:
        >>> import torch
        >>> from opteq import Stop, solve
        >>> from opteq.solvers import Broyden
        >>> found = solve(lambda z: 3 - 2 * z, torch.zeros(1, 1), Broyden(), Stop(rtol=1e-6))  # no contraction
        >>> found.status.name, round(found.z.item(), 4)
        ('CONVERGED', 1.0)
    """

    evaluates: ClassVar[bool] = True
    memory: int = 20
    growth: float = 4.0

    def __post_init__(self) -> None:
        check_integer(self, "memory", self.memory, 1)
        check_number(self, "growth", self.growth, 1.0, open_low=True)

    def init(self, fn: Map, z0: Tensor) -> BroydenState:
        fields = residual_at(z0, first_value(fn, z0))
        batch, n = flat(z0).shape
        U, V = z0.new_empty(batch, self.memory, n), z0.new_empty(batch, self.memory, n)
        return BroydenState(evals=1, **fields, U=U, V=V, damping=torch.ones_like(fields["size"]), slot=0)

    def step(self, fn: Map, state: State) -> BroydenState:
        assert isinstance(state, BroydenState)
        slot = state.slot % self.memory  # a full memory is emptied
        fields = moved(fn, state.z, self._move(state, slot))
        self._learn(state, slot, fields)
        refused = ~(fields["size"] <= self.growth * state.size)
        damping = torch.where(refused, state.damping / 4, (2 * state.damping).clamp(max=1))
        if refused.any():
            rows = refused.nonzero()[:, 0]
            state.U[rows], state.V[rows] = 0, 0
            for name in fields:
                fields[name] = torch.where(per_sample_like(refused, fields[name]), getattr(state, name), fields[name])
        return replace(state, evals=state.evals + 1, **fields, damping=damping, slot=slot + 1)

    def _move(self, state: BroydenState, slot: int) -> Tensor:
        """s = -B r, damped; it is also left in the slot of U that comes next."""
        move = _apply(state.U[:, : state.slot], state.V[:, : state.slot], lined(state.r, state.z)).mul_(-state.damping[:, None])
        state.U[:, slot] = move
        return move

    def _learn(self, state: BroydenState, slot: int, fields: dict[str, Tensor]) -> None:
        """B <- B + (s - B y) (s'B) / (s'B y), s the move and y the change of r, in the memory of u and v themselves.

        Samples with a vanishing denominator, or with a change that is only rounding, learn nothing.
        """
        U, V, u, v = state.U[:, :slot], state.V[:, :slot], state.U[:, slot], state.V[:, slot]  # u holds s
        eps = torch.finfo(u.dtype).eps
        torch.sub(lined(fields["r"], state.z), lined(state.r, state.z), out=v)  # y
        usable = norm(v) > 2 * eps * fields["scale"]
        length = norm(u)
        unit = torch.where(length > 0, 1 / length, 0)[:, None]  # the update does not depend on the scale
        u.mul_(unit)
        v.mul_(unit)
        size = norm(v)
        weights = dots(U, u)
        image = _apply(U, V, v)
        v.copy_(u)
        u.sub_(image)  # s - B y
        denominator = image.mul_(v).sum(dim=1)  # s'B y
        del image
        torch.sub(combine(weights, V), v, out=v)  # B's
        usable &= denominator.abs() > eps**0.5 * norm(v) * size
        u.mul_(torch.where(usable, 1 / denominator, 0)[:, None])
        if not usable.all():
            rows = (~usable).nonzero()[:, 0]
            state.U[rows, slot], state.V[rows, slot] = 0, 0
