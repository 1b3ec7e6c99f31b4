"""Broyden's good method with bounded memory, safeguarded without a line search."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from opteq.checks import check_integer, check_number
from opteq.linear import combine, compacted, dots
from opteq.solve import Map, Solver, State, first_value, flat, norm, per_sample_like


@dataclass(frozen=True)
class BroydenState(State):
    """With r = f(z) - z, the inverse of its Jacobian is taken to be B = -I + sum_i u_i v_i'."""

    r: Tensor
    size: Tensor  # |r|
    U: Tensor  # [batch, memory, n]
    V: Tensor  # [batch, memory, n]
    damping: Tensor  # [batch], shortens the steps of samples whose last step was refused
    slot: int  # updates so far

    def estimate(self) -> tuple[Tensor, Tensor]:
        assert self.fz is not None
        return self.size, norm(self.fz)

    def select(self, rows: Tensor) -> Self:
        return self.replace_leaves(
            lambda leaf: compacted(leaf, rows) if leaf.name in ("U", "V") else leaf.tensor.index_select(0, rows)
        )


def _apply(left: Tensor, right: Tensor, x: Tensor) -> Tensor:
    """(-I + sum_i left_i right_i') x."""
    return combine(dots(right, x), left) - x


@dataclass(frozen=True)
class Broyden(Solver):
    """z <- z - B (f(z) - z), where B, begun at -I, learns the inverse Jacobian from each step (the good Broyden update).

    `memory`: how many updates are kept; a full memory is emptied. `growth`: a step that makes the residual more than `growth`
    times as large is refused, the sample forgets its updates and takes a shorter plain step next. One evaluation a step.
    Broyden (1965).
    """

    memory: int = 20
    growth: float = 4.0

    def __post_init__(self) -> None:
        check_integer(self, "memory", self.memory, 1)
        check_number(self, "growth", self.growth, 1.0, open_low=True)

    def init(self, fn: Map, z0: Tensor) -> BroydenState:
        fz = first_value(fn, z0)
        r = fz - z0
        size = norm(r)
        batch, n = z0.shape[0], z0[0].numel()
        U, V = z0.new_empty(batch, self.memory, n), z0.new_empty(batch, self.memory, n)
        return BroydenState(z0, fz, 1, r, size, U, V, damping=torch.ones_like(size), slot=0)

    def step(self, fn: Map, state: State) -> BroydenState:
        assert isinstance(state, BroydenState)
        move = -state.damping[:, None] * _apply(state.U[:, : state.slot], state.V[:, : state.slot], flat(state.r))
        z = state.z + move.view_as(state.z)
        fz = fn(z)
        r = fz - z
        size = norm(r)
        slot = self._learn(state, move, flat(r - state.r), norm(fz))
        refused = ~(size <= self.growth * state.size)
        if not refused.any():
            damping = (2 * state.damping).clamp(max=1)
            return replace(state, z=z, fz=fz, evals=state.evals + 1, r=r, size=size, damping=damping, slot=slot)
        rows = refused.nonzero()[:, 0]
        state.U[rows], state.V[rows] = 0, 0
        return self._refuse(state, refused, z, fz, r, size, slot)

    def _learn(self, state: BroydenState, move: Tensor, change: Tensor, scale: Tensor) -> int:
        """B <- B + (s - B y) (s'B) / (s'B y), s the move and y the change of r.

        Samples with a vanishing denominator, or with a change that is only rounding at this `scale`, learn nothing.
        """
        slot = state.slot % self.memory  # a full memory is emptied
        U, V = state.U[:, :slot], state.V[:, :slot]
        length = norm(move)[:, None]
        unit = torch.where(length > 0, 1 / length, torch.zeros_like(length))
        s, y = move * unit, change * unit  # the update does not depend on the scale
        image, left = _apply(U, V, y), _apply(V, U, s)
        denominator = (left * y).sum(dim=1, keepdim=True)
        floor = torch.finfo(s.dtype).eps ** 0.5 * norm(left)[:, None] * norm(y)[:, None]
        usable = (denominator.abs() > floor) & (norm(change) > 2 * torch.finfo(s.dtype).eps * scale)[:, None]
        state.U[:, slot] = torch.where(usable, (s - image) / denominator, torch.zeros_like(s))
        state.V[:, slot] = torch.where(usable, left, torch.zeros_like(s))
        return slot + 1

    def _refuse(
        self, state: BroydenState, refused: Tensor, z: Tensor, fz: Tensor, r: Tensor, size: Tensor, slot: int
    ) -> BroydenState:
        assert state.fz is not None
        mask = per_sample_like(refused, z)
        damping = torch.where(refused, state.damping / 4, (2 * state.damping).clamp(max=1))
        return replace(
            state,
            z=torch.where(mask, state.z, z),
            fz=torch.where(mask, state.fz, fz),
            evals=state.evals + 1,
            r=torch.where(mask, state.r, r),
            size=torch.where(refused, state.size, size),
            damping=damping,
            slot=slot,
        )
