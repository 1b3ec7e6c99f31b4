"""Anderson mixing: extrapolate from the last few evaluations."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from opteq.batch import at_least_single, dots, flat, lined, norm
from opteq.checks import check_integer, check_number
from opteq.maps import Map, first_value
from opteq.solver import ResidualState, Solver, State, moved, residual_at


@dataclass(frozen=True)
class AndersonState(ResidualState):
    """With r = f(z) - z, differences between successive steps of r (`dR`) and of z + mixing r (`dG`), both divided by |dr|."""

    history: ClassVar[tuple[str, ...]] = ("dR", "dG")
    dR: Tensor  # [batch, memory, n]; [batch, 0, n] as long as all samples are brisk
    dG: Tensor  # [batch, memory, n]; likewise
    gram: Tensor  # [batch, memory, memory], of dR: the diagonal is 1, or 0 in an empty slot
    best: Tensor  # [batch], the smallest |r| since the last restart
    brisk: Tensor  # [batch] bool: plain steps have been fast so far, and no history is kept
    slot: int  # the next row to overwrite
    used: int  # rows that hold something

    def slots(self) -> int:
        return self.used


@dataclass(frozen=True)
class Anderson(Solver):
    """z <- z + mixing r - sum_j c_j (dz_j + mixing dr_j), where c minimises |r - sum_j c_j dr_j|, r = f(z) - z.

    `memory`: how many past differences are used; on linear maps the method then does about what GMRES does.
    `ridge`: Tikhonov weight relative to the Gram matrix of the dr_j scaled to a unit diagonal; None takes a multiple of the
    precision of the dtype, so that a singular system is never an error.
    `restart`: a sample whose residual exceeds `restart` times the best since its last restart forgets its history; inf: never.
    `brisk`: while each plain step z <- z + mixing r leaves at most this part of a sample's residual, the sample takes plain steps
    and keeps no history, which costs less; 0: never. Walker and Ni (2011).

    Examples:
        >>> import torch
        >>> from opteq import Stop, solve
        >>> from opteq.solvers import Anderson, Picard
        >>> found = [solve(torch.cos, torch.zeros(1, 1), solver, Stop(rtol=1e-6)) for solver in (Picard(), Anderson())]
        >>> [solution.status.name for solution in found], found[1].evals < found[0].evals
        (['CONVERGED', 'CONVERGED'], True)
    """

    evaluates: ClassVar[bool] = True
    memory: int = 6
    mixing: float = 1.0
    ridge: float | None = None
    restart: float = 10.0
    brisk: float = 0.4

    def __post_init__(self) -> None:
        check_integer(self, "memory", self.memory, 1)
        check_number(self, "mixing", self.mixing, 0.0, 1.0, open_low=True)
        if self.ridge is not None:
            check_number(self, "ridge", self.ridge, 0.0)
        if self.restart != math.inf:
            check_number(self, "restart", self.restart, 1.0, open_low=True)
        check_number(self, "brisk", self.brisk, 0.0, 1.0, open_high=True)

    def init(self, fn: Map, z0: Tensor) -> AndersonState:
        fields = residual_at(z0, first_value(fn, z0))
        batch, n = flat(z0).shape
        none = z0.new_empty(batch, 0, n)
        gram = z0.new_zeros(batch, self.memory, self.memory)
        brisk = torch.full_like(fields["size"], self.brisk > 0, dtype=torch.bool)
        return AndersonState(evals=1, **fields, dR=none, dG=none, gram=gram, best=fields["size"], brisk=brisk, slot=0, used=0)

    def step(self, fn: Map, state: State) -> AndersonState:
        assert isinstance(state, AndersonState)
        return self._remember(state, moved(fn, state.z, self._move(state)))

    def _move(self, state: AndersonState) -> Tensor:
        """The step, which is also left in the slot of dG that comes next, if there are slots yet."""
        r = lined(state.r, state.z)
        if state.used:
            weights, rows = self._weights(state, r), state.dG[:, : state.used]
            move = torch.baddbmm(r[:, None], weights[:, None], rows, beta=self.mixing, alpha=-1)[:, 0]
        else:
            move = r if self.mixing == 1 else self.mixing * r
        if state.dG.shape[1]:
            state.dG[:, state.slot] = move
        return move

    def _weights(self, state: AndersonState, r: Tensor) -> Tensor:
        """c = (gram + ridge)^-1 dR r by Cholesky; samples for which that fails take c = 0, a Picard step."""
        gram = at_least_single(state.gram[:, : state.used, : state.used])
        diagonal = gram.diagonal(dim1=1, dim2=2)
        ridge = 10 * torch.finfo(r.dtype).eps if self.ridge is None else self.ridge
        shift = torch.where(diagonal > 0, torch.full_like(diagonal, ridge), 1.0)
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(shift))
        rhs = dots(state.dR[:, : state.used], r)
        weights = torch.cholesky_solve(at_least_single(rhs)[:, :, None], factor)[:, :, 0].to(r.dtype)
        usable = (info == 0) & weights.isfinite().all(dim=1)
        return torch.where(usable[:, None], weights, torch.zeros_like(weights))

    def _remember(self, state: AndersonState, fields: dict[str, Tensor]) -> AndersonState:
        """The next state: overwrite the oldest difference, and empty the history of samples that got much worse."""
        size, slot, used = fields["size"], state.slot, min(state.used + 1, self.memory)
        brisk = state.brisk & (size <= self.brisk * state.size)
        if brisk.all():
            best = torch.minimum(state.best, size)
            return replace(state, evals=state.evals + 1, **fields, best=best, brisk=brisk, slot=slot, used=state.used)
        if state.dR.shape[1] == 0:
            batch, _, n = state.dR.shape
            state = replace(state, dR=size.new_empty(batch, self.memory, n), dG=size.new_empty(batch, self.memory, n))
            torch.mul(lined(state.r, state.z), self.mixing, out=state.dG[:, slot])  # the step was a plain one
        dr, dg = state.dR[:, slot], state.dG[:, slot]
        torch.sub(lined(fields["r"], state.z), lined(state.r, state.z), out=dr)
        dg.add_(dr, alpha=self.mixing)
        length, noise = norm(dr), 2 * torch.finfo(dr.dtype).eps * fields["scale"]  # below the noise, a change is only rounding
        inverse = torch.where((length > noise) & ~brisk, 1 / length, 0)[:, None]
        dr.mul_(inverse)
        dg.mul_(inverse)
        products = dots(state.dR[:, :used], dr)
        state.gram[:, slot, :used] = products
        state.gram[:, :used, slot] = products
        worse = ~(size <= self.restart * state.best)
        if worse.any():
            rows = worse.nonzero()[:, 0]
            for tensor in (state.dR, state.dG, state.gram):
                tensor[rows] = 0
        best = torch.where(worse, size, torch.minimum(state.best, size))
        slot = (slot + 1) % self.memory
        return replace(state, evals=state.evals + 1, **fields, best=best, brisk=brisk, slot=slot, used=used)
