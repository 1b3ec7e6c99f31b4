"""Solve z = f(z): the one loop, which joins Map, Solver, Stop and Solution.

    x -> cell.bind(x) -> Map -> solve(Map, z0, solver, stop) -> Solution

A Solver proposes, the loop decides. A sample counts as converged only if the residual of the z that is returned,
|f(z) - z| <= atol + rtol |f(z)|, was evaluated and is small: undamped, per sample, the same for every solver.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opteq.batch import bounds, norm, per_sample_like
from opteq.checks import check_instance
from opteq.maps import CallableMap, Jacobian, Map, as_map, check_states, first_value
from opteq.solution import ConvergenceError, Solution, Status, Stop, Trace, relative
from opteq.solver import ResidualState, Solver, State, ValueState, evaluates
from opteq.tree import per_sample

__all__ = [  # the nouns too, so that whoever writes a solver or a map finds all in one place
    "CallableMap",
    "ConvergenceError",
    "Jacobian",
    "Map",
    "ResidualState",
    "Solution",
    "Solver",
    "State",
    "Status",
    "Stop",
    "Trace",
    "ValueState",
    "first_value",
    "per_sample",
    "solve",
]


def solve(
    fn: Map | Callable[[Tensor], Tensor],
    z0: Tensor,
    solver: Solver,
    stop: Stop | None = None,
    *,
    record: bool = False,
    iterates: bool = False,
) -> Solution:
    """Find z = f(z) for every sample of the batch, starting at z0, without touching autograd.

    Converged samples are frozen, and dropped from the work when a quarter are done; samples that meet NaN or infinity are
    set aside. `record=True` keeps the residual of every step in `Solution.trace`; `iterates=True` keeps every z as well.

    Examples:
        >>> import torch
        >>> from opteq import Stop, solve
        >>> from opteq.solvers import Anderson
        >>> found = solve(torch.cos, torch.zeros(2, 1), Anderson(), Stop(rtol=1e-6), record=True)
        >>> found.status.name, [round(z, 4) for z in found.z.flatten().tolist()]
        ('CONVERGED', [0.7391, 0.7391])
        >>> bool(found.trace.of(0)[-1] < 1e-6 < found.trace.of(0)[0])
        True
    """
    stop = Stop() if stop is None else stop
    check_instance("solve", "solver", solver, Solver, "a Solver, such as Anderson()")
    check_instance("solve", "stop", stop, Stop, "a Stop")
    check_states("solve", "z0", z0)
    trace = Trace(z=() if iterates else None) if record or iterates else None
    return solve_map(as_map("solve", fn), z0, solver, stop, trace)


def solve_map(
    fn: Map,
    z0: Tensor,
    solver: Solver,
    stop: Stop,
    trace: Trace | None = None,
    *,
    aim: float = 1.0,
    verified: bool = True,
    last: Callable[[Tensor], Tensor] | None = None,
) -> Solution:
    """`solve` for those who have checked what they pass.

    `aim`: go on to this part of the tolerance while the residual falls; what meets the tolerance itself has converged all the same.
    `verified`: False believes the estimates of a solver, for callers that measure the residual themselves.
    `last`: f itself, to be called where an evaluation is expected to be the last one, of all samples at once.
    """
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), torch.autocast(z0.device.type, enabled=False):
        return _Loop(fn.detach(), z0.detach(), solver, stop, trace, aim, verified, last).run()


_ROUNDING = 32.0  # times the precision is what the residual of an exact equilibrium may come to

_FALLS = 0.9  # the part of a residual that a step may leave to be worth taking where the tolerance is met already


@dataclass(frozen=True)
class _Seen:
    """What the loop sees of its rows at one step."""

    state: State
    z: Tensor
    size: Tensor  # |f(z) - z|
    scale: Tensor  # |f(z)|
    known: Tensor  # where these two are true; elsewhere the solver estimates them
    finite: Tensor
    risen: Tensor  # the residual is above half of its largest
    growth: Tensor  # |f(z)| over its start


class _Loop:
    """The loop. `best`, `residual`, `codes` and `steps` hold all samples; other tensors the `rows` that are still worked on."""

    def __init__(
        self,
        fn: Map,
        z0: Tensor,
        solver: Solver,
        stop: Stop,
        trace: Trace | None,
        aim: float,
        verified: bool,
        last: Callable[[Tensor], Tensor] | None,
    ) -> None:
        samples, device, self.eps = z0.shape[0], z0.device, torch.finfo(z0.dtype).eps
        self.fn, self.whole = solver.prepare(fn) if samples else fn, fn  # the first, made ready for the solver, loses samples
        self.solver, self.stop, self.z0, self.trace = solver, stop, z0, trace
        self.aim, self.verified, self.last = min(aim, solver.aim), verified, last if evaluates(solver) else None
        self.evals = 0  # evaluations made here, beside the solver's own
        # growth of |f(z)| that, with a residual that has not fallen, means divergence; and at which to give up at once
        self.far, self.too_far = max(1.0, 1 / max(stop.rtol, self.eps)), 1 / self.eps

        self.start = norm(z0)  # then max(|z0|, |f(z0)|)
        self.peak = torch.zeros_like(self.start)  # the largest |f(z) - z| seen
        self.before = torch.full_like(self.start, math.inf)  # |f(z) - z| one step before
        self.rows = torch.arange(samples, device=device)
        self.live, self.left = torch.ones(samples, dtype=torch.bool, device=device), samples  # and how many these are
        self.soon = torch.zeros_like(self.live)  # foreseen to meet the tolerance one step on
        self.met = torch.zeros_like(self.live)  # the best iterate meets the tolerance, but not yet what is aimed at
        self.meeting = False  # whether there is one
        self.latest: Tensor | None = None  # the iterates of the live rows, if they are the best of theirs; not yet in `best`

        self.best, self.best_owned = z0, False  # whether `best` may be written to
        if not self.start.isfinite().all():
            self.best = torch.where(per_sample_like(self.start.isfinite(), z0), z0, torch.zeros_like(z0))
        self.residual = torch.full((samples,), math.nan, dtype=z0.dtype, device=device)
        self.codes = torch.full((samples,), Status.MAX_STEPS.code, device=device)
        self.steps = torch.zeros(samples, dtype=torch.long, device=device)

    def run(self) -> Solution:
        if self.rows.numel() == 0:
            return self.solution(0)
        state = self.solver.init(self.fn, self.z0)
        for step in range(self.stop.max_steps + 1):
            state = self.judge(state, step)
            if step == self.stop.max_steps or not self.left:
                break
            state = self.compact(state)
            state = self.solver.step(self.evaluated(), state)
        self.store()
        self.steps[self.rows[self.live]] = self.stop.max_steps
        self.complete()
        return self.solution(state.evals)

    def complete(self) -> None:
        """Measure the samples of which only estimates were seen before they ran away."""
        unknown = self.residual.isnan() & (self.codes != Status.NONFINITE.code)
        if unknown.any():
            value = self.whole(self.best)
            self.evals += 1
            size, scale = norm(value - self.best), norm(value)
            self.residual = torch.where(unknown, relative(size, scale), self.residual)

    def judge(self, state: State, step: int) -> State:
        """Decide, for each live sample, whether its iterate is the solution, hopeless, or to be improved."""
        last = step == self.stop.max_steps
        size, scale = state.estimate()
        self.start = torch.maximum(self.start, scale) if step == 0 else self.start
        if self.last is not None:
            self.soon = self.meets(size / self.before * size, 2 * scale)
        if not last and self.uneventful(state, size, scale):
            return state
        seen = self.seen(state, size, scale, last)
        good, runaway = self.solved(seen, last)
        self.before, residual = seen.size, relative(seen.size, seen.scale)
        better = self.better(seen, residual, runaway)
        self.keep(good | better, seen.z, residual)
        if self.trace is not None:
            self.trace = self.traced(self.trace, seen, residual)
        self.finish(good, Status.CONVERGED, step)
        if self.aim < 1:
            self.settle(better & ~seen.risen, self.meets(seen.size, seen.scale), last, step)
        self.finish(~seen.finite, Status.NONFINITE, step)
        self.finish(runaway | seen.risen & (seen.growth > (self.far if last else self.too_far)), Status.DIVERGED, step)
        return seen.state

    def seen(self, state: State, size: Tensor, scale: Tensor, last: bool) -> _Seen:
        """The step as it is: estimates drive, truth decides, so that f is evaluated where an estimate would end a sample."""
        known, z = torch.ones_like(self.live), state.z
        if not state.exact:
            known = self.live & (self.enough(size, scale) | (scale > self.too_far * self.start) | last)
            if self.fn.coupled and not known[self.live].all():
                known = torch.zeros_like(known)
            if known.any() and self.verified:
                state, z, size, scale = self.verify(state, known, size, scale)
            elif known.any():
                z = self.candidates(state, known)[1]
        finite = size.isfinite() & scale.isfinite()
        self.peak = torch.where(finite, torch.maximum(self.peak, size), self.peak)
        growth = torch.where(self.start > 0, scale / self.start, torch.zeros_like(scale))
        return _Seen(state, z, size, scale, known, finite, size > 0.5 * self.peak, growth)

    def solved(self, seen: _Seen, last: bool) -> tuple[Tensor, Tensor]:
        """Which samples are solved; and which only seem so, having run away to where their residual is small beside them."""
        size, scale = seen.size, seen.scale
        good = self.live & seen.known & seen.finite & (self.meets(size, scale) if last else self.enough(size, scale))
        if (good & seen.risen).any():
            good &= ~seen.risen | (self.meets(size, self.start) & self.turns(seen))
        runaway = good & (seen.growth > 0.01 * self.too_far)  # there, a residual as large as the start is lost in rounding
        if runaway.any():
            runaway &= self.drifts(seen.z)
            good &= ~runaway
        if (self.solver.selective and not last) or (self.fn.coupled and not good[self.live].all()):
            good = torch.zeros_like(good)
        return good, runaway

    def better(self, seen: _Seen, residual: Tensor, runaway: Tensor) -> Tensor:
        """Which iterates are the best of their samples so far; none on a run-away is."""
        sound = seen.known & seen.finite & ~runaway
        if self.fn.coupled:  # iterates of different steps do not go together
            worse = residual.nan_to_num(0.0, math.inf).max() >= self.residual.max()
            found = self.live & bool(sound[self.live].all()) & (~worse | self.solver.selective)
        else:
            found = self.live & sound & (~(residual >= self.residual[self.rows]) | self.solver.selective)
        return found & ~(seen.risen & (seen.growth > self.far))

    def settle(self, kept: Tensor, meets: Tensor, last: bool, step: int) -> None:
        """Samples that met the tolerance, and were sent on for less of it, end at their best where they do not get there."""
        done = self.live & self.met & (~meets | last)
        self.finish(torch.full_like(done, bool(done.any())) if self.fn.coupled else done, Status.CONVERGED, step)
        met = kept & meets
        self.met |= met & bool(met[self.live].all()) if self.fn.coupled else met
        if last:
            self.finish(self.met, Status.CONVERGED, step)
        self.meeting = bool((self.met & self.live).any())

    def uneventful(self, state: State, size: Tensor, scale: Tensor) -> bool:
        """Whether every live sample is on its way: then there is no more to do than to note it, which most steps come to.

        That is when none meets the tolerance, nor did before, and none has run away or, where that is known, got worse.
        """
        if self.trace is not None or self.solver.selective or self.fn.coupled or self.meeting:
            return False
        excess, growth = size - self.limit(scale), scale / self.start  # above 0 exactly where size > limit
        if self.left < len(self.live):  # what has ended is no event
            excess, growth = torch.where(self.live, excess, 1.0), torch.where(self.live, growth, 0.0)
        low, high = bounds(excess)
        if not (low > 0 and high < math.inf and growth.max().item() <= (self.far if state.exact else self.too_far)):
            return False
        if state.exact and not self.note(state.z, size / scale):
            return False
        self.peak, self.before = torch.maximum(self.peak, size), size
        return True

    def note(self, z: Tensor, residual: Tensor) -> bool:
        """Note the iterates as the best of their samples, if for all that are live they are."""
        whole = len(self.live) == len(self.codes)
        worse = residual >= (self.residual if whole else self.residual[self.rows])
        if (worse if self.left == len(self.live) else worse & self.live).any():
            return False
        self.latest = z
        if whole and self.left == len(self.live):
            self.residual = residual
        else:
            self.residual[self.rows[self.live]] = residual[self.live]
        return True

    def evaluated(self) -> Map:
        """f for the next step: as the caller evaluates it if all samples will be done then, for all that can be foreseen."""
        if self.last is None or len(self.live) < len(self.codes) or not bool((self.live & self.soon).all()):
            return self.fn
        return cast(Map, self.last)  # a solver that says so does no more with it than to call it

    def limit(self, scale: Tensor) -> Tensor:
        """What the residual may come to."""
        relative = self.stop.rtol * scale
        return self.stop.atol + relative if self.stop.atol else relative

    def meets(self, size: Tensor, scale: Tensor) -> Tensor:
        return size <= self.limit(scale)

    def enough(self, size: Tensor, scale: Tensor) -> Tensor:
        """Which samples meet the tolerance, and as much less of it as is aimed at or can be had: NaN is never enough."""
        limit = self.limit(scale)
        if self.aim == 1:
            return size <= limit
        return (size <= self.aim * limit) | ((size <= limit) & (size > _FALLS * self.before))

    def verify(self, state: State, wanted: Tensor, size: Tensor, scale: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        """Evaluate f at the iterates of the wanted rows, and put the truth in place of the estimate."""
        rows, z, at = self.candidates(state, wanted)
        value = (self.fn if at is z else self.fn.select(rows))(at)
        self.evals += 1
        size = torch.where(wanted, size.index_copy(0, rows, norm(value - at)), size)  # of the others nothing is learnt: what
        scale = torch.where(wanted, scale.index_copy(0, rows, norm(value)), scale)  # they do must not depend on their batch-mates
        failed = (wanted & ~self.meets(size, scale))[rows]
        if failed.any():
            state = state.corrected(rows[failed], at[failed], value[failed])
        return state, z, size, scale

    def candidates(self, state: State, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The wanted rows, or all if they are many; the iterates of all; and of those rows."""
        rows = wanted.nonzero()[:, 0]
        if not self.fn.independent or 2 * rows.numel() > wanted.numel():  # copying so many would cost more than they do
            z = state.candidate(self.fn)
            return torch.arange(wanted.numel(), device=wanted.device), z, z
        at = state.candidate(self.fn, rows)
        return rows, state.z if type(state).candidate is State.candidate else state.z.index_copy(0, rows, at), at

    def turns(self, seen: _Seen) -> Tensor:
        """Whether the residual is rounding only, or changes along itself: for f(z) = z + 1 it does neither, however large z."""
        fz = seen.state.value() if seen.state.exact else self.fn(seen.z)
        self.evals += 1 if seen.state.exact else 2
        noise = 2 * self.eps * seen.scale
        turning = (seen.size <= noise) | (norm((self.fn(fz) - fz).sub_(fz).add_(seen.z)) > 1e-6 * seen.size + noise)
        unsure = ~turning & (seen.size <= _ROUNDING * noise)  # a change of so small a residual would be lost in rounding
        if unsure.any():
            turning |= unsure & ~self.drifts(seen.z) & ~self.drifts(seen.z, fz - seen.z)
        return turning

    def drifts(self, z: Tensor, along: Tensor | None = None) -> Tensor:
        """Whether f moves z along itself, or another direction, as the identity does: one in which I - J is singular."""
        push = math.sqrt(self.eps) * z
        if along is not None:
            push = along * per_sample_like(norm(push) / norm(along).clamp_min(torch.finfo(z.dtype).tiny), z)
        self.evals += 2
        return norm(self.fn(z + push) - self.fn(z) - push) <= 1e-3 * norm(push)

    def keep(self, mask: Tensor, z: Tensor, residual: Tensor) -> None:
        """Store the rows of z under the mask as the best of their samples."""
        if (self.live & ~mask).any():
            self.store()
        self.latest = None
        if not mask.any():
            return
        self.residual[self.rows[mask]] = residual[mask]
        self.write(mask, z)

    def store(self) -> None:
        """Put the latest iterates where they belong."""
        if self.latest is not None:
            self.write(self.live, self.latest)
            self.latest = None

    def write(self, mask: Tensor, z: Tensor) -> None:
        """The rows of z under the mask into `best`."""
        whole = self.rows.numel() == self.best.shape[0]
        if whole and mask.all():
            self.best, self.best_owned = z, False
        elif not self.best_owned and whole:
            self.best, self.best_owned = torch.where(per_sample_like(mask, z), z, self.best), True
        else:
            self.best = self.best if self.best_owned else self.best.clone()
            self.best_owned = True
            self.best[self.rows[mask]] = z[mask]

    def traced(self, trace: Trace, seen: _Seen, residual: Tensor) -> Trace:
        """The trace with the live rows of this step. What the solver only estimates is measured, but told to nobody else."""
        z, known = seen.z, seen.known
        if not known[self.live].all():
            z = torch.where(per_sample_like(known, z), z, seen.state.candidate(self.fn))
            value = self.fn(z)
            residual = torch.where(known, residual, relative(norm(value - z), norm(value)))
        return trace.then(self.rows[self.live], residual[self.live], seen.state.evals + self.evals, z[self.live])

    def finish(self, mask: Tensor, status: Status, step: int) -> None:
        """Give the live rows under the mask their status, and freeze them."""
        mask = mask & self.live
        if done := int(mask.sum()):
            self.codes[self.rows[mask]] = status.code
            self.steps[self.rows[mask]] = step
            self.live, self.left = self.live & ~mask, self.left - done

    def compact(self, state: State) -> State:
        """Drop the finished rows when they are at least a quarter."""
        if not self.fn.independent or 4 * self.left > 3 * self.live.numel():
            return state
        self.store()
        rows = self.live.nonzero()[:, 0]
        self.fn = self.fn.select(rows)  # one after the other: the old one is freed before the next is made
        state = state.select(rows)
        self.rows, self.live, self.soon, self.met = self.rows[rows], self.live[rows], self.soon[rows], self.met[rows]
        self.start, self.peak, self.before = self.start[rows], self.peak[rows], self.before[rows]
        return state

    def solution(self, evals: int) -> Solution:
        z = self.best if self.best_owned else self.best.clone()  # never the caller's z0
        return Solution(z, self.codes, self.residual, self.steps, self.evals + evals, self.stop, self.trace)
