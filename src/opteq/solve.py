"""Solve z = f(z): the nouns Map, Solver, Stop, Status, Solution and the one loop that joins them.

    x -> cell.bind(x) -> Map -> solve(Map, z0, solver, stop) -> Solution

A Solver proposes, the loop decides. A sample counts as converged only if the residual of the z that is returned,
|f(z) - z| <= atol + rtol |f(z)|, was evaluated and is small: undamped, per sample, the same for every solver.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opteq.batch import compacted, norm, per_sample_like, taken, unlined
from opteq.checks import check_floating, check_instance, check_integer, check_number, invalid, is_transformed
from opteq.tree import Leaf, Tree, per_sample

__all__ = ["ConvergenceError", "Jacobian", "Map", "Solution", "Solver", "State", "Status", "Stop", "Trace", "per_sample", "solve"]


class Status(Enum):
    """What became of a sample, from good to bad; the value is the message with the remedy.

    Examples:
        >>> from opteq import Status
        >>> [status.name for status in Status]
        ['CONVERGED', 'MAX_STEPS', 'DIVERGED', 'NONFINITE']
        >>> print(Status.CONVERGED.value)
        converged: the residual of the returned z meets the tolerance.
    """

    CONVERGED = "converged: the residual of the returned z meets the tolerance."
    MAX_STEPS = (
        "stopped at max_steps: (a) raise Stop.max_steps, (b) loosen Stop.rtol, (c) take a faster solver "
        "(Anderson, Broyden, Newton; PeacemanRachford for monotone cells), (d) if the residual stalls, the map may be no "
        "contraction: lower the norm of its weights."
    )
    DIVERGED = (
        "diverged: the iterates grow and the residual does not fall. (a) The equation may have no solution, "
        "(b) the map may be no contraction: lower the norm of its weights, (c) try Anderson or Newton, or damping below 1."
    )
    NONFINITE = (
        "met NaN or infinity: (a) look for NaN or infinity in this sample's input, "
        "(b) f may be undefined where the iteration went, (c) the iterates may overflow: lower the norm of the weights."
    )


_CODES = tuple(Status)
_MAX_STEPS, _DIVERGED, _NONFINITE = (_CODES.index(s) for s in (Status.MAX_STEPS, Status.DIVERGED, Status.NONFINITE))


class ConvergenceError(RuntimeError):
    """An equilibrium was not found; `solution` holds what was.

    Examples:
        >>> import torch
        >>> from opteq import ConvergenceError, Stop, solve
        >>> from opteq.solvers import Picard
        >>> try:
        ...     solve(torch.cos, torch.zeros(1, 1), Picard(), Stop(max_steps=3)).raise_if_failed()
        ... except ConvergenceError as error:
        ...     print(error.solution.status)
        Status.MAX_STEPS
    """

    def __init__(self, message: str, solution: "Solution") -> None:
        super().__init__(message)
        self.solution = solution


@dataclass(frozen=True)
class Stop:
    """Stop when |f(z) - z| <= atol + rtol |f(z)| for each sample, or after max_steps steps of the solver.

    Examples:
        >>> import torch
        >>> from opteq import Stop, solve
        >>> from opteq.solvers import Picard
        >>> found = solve(torch.cos, torch.zeros(1, 1), Picard(), Stop(rtol=1e-3, max_steps=50))
        >>> bool(found.residual <= 1e-3), int(found.steps) < 50
        (True, True)
    """

    rtol: float = 1e-4
    atol: float = 0.0
    max_steps: int = 100

    def __post_init__(self) -> None:
        check_number(self, "rtol", self.rtol, 0.0)
        check_number(self, "atol", self.atol, 0.0)
        check_integer(self, "max_steps", self.max_steps, 1)


Pullback: TypeAlias = Callable[..., tuple[Tensor, ...]]


def pullback(f: Callable[..., Any], *primals: Tensor) -> Pullback:
    """v -> J' v for each of the primals, differentiable itself: torch.func.vjp without the value."""
    pull: Pullback = torch.func.vjp(f, *primals)[1]
    return pull


@dataclass(frozen=True)
class Jacobian:
    """J = f'(z) as two products, `jvp(v) = J v` and `vjp(v) = J' v`, each sample with its own J."""

    jvp: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor], Tensor]
    symmetric: bool = False


@dataclass(frozen=True)
class Map(Tree, ABC):
    """f, bound to its inputs: a frozen dataclass whose tensor fields are its operands, the per-sample ones marked `per_sample()`.

    Subclasses define `__call__`; the rest is derived. Tensors that f uses but that are no fields still get gradients, at the
    cost of one more evaluation a solve; declare `closed = True` when there are none.

    Examples:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from opteq import Map, per_sample, solve
        >>> from opteq.solvers import Picard
        >>> @dataclass(frozen=True)
        ... class Shrink(Map):
        ...     u: torch.Tensor = per_sample()
        ...     def __call__(self, z):
        ...         return 0.5 * z + self.u
        >>> fn = Shrink(torch.tensor([[1.0], [2.0]]))
        >>> solve(fn, torch.zeros(2, 1), Picard()).z.round(decimals=2)
        tensor([[2.],
                [4.]])
        >>> fn.linearize(torch.zeros(2, 1)).vjp(torch.ones(2, 1))
        tensor([[0.5000],
                [0.5000]])
    """

    closed: ClassVar[bool] = False  # every tensor that f uses is a field
    symmetric: ClassVar[bool] = False  # J = J' at every z
    independent: ClassVar[bool] = True  # f acts on each sample alone, so that some samples can be solved without the others
    fresh: ClassVar[bool] = False  # f(z) is in memory of its own, to which its caller may write
    coupled: ClassVar[bool] = False  # f(z) of a sample depends on the others, so that the batch is solved as a whole or not at all

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """f(z), of the shape and dtype of z: [batch, ...]."""

    def linearize(self, z: Tensor) -> Jacobian:
        """The Jacobian at z, by automatic differentiation; maps with structure override this with closed forms."""
        pull = pullback(self, z)
        pushes: list[Pullback] = []  # J'v is linear in v, so its own transpose is J; made when first needed

        def jvp(v: Tensor) -> Tensor:
            if not pushes:
                pushes.append(pullback(lambda w: pullback(self, z)(w)[0], torch.zeros_like(z)))
            return pushes[0](v)[0]

        return Jacobian(jvp=jvp, vjp=lambda v: pull(v)[0], symmetric=self.symmetric)

    def begin(self, z0: Tensor) -> Tensor:
        """f(z0); maps that know f(0) without a product override this."""
        return self(z0)

    def value_and_jacobian(self, z: Tensor) -> tuple[Tensor, Jacobian]:
        """f(z) and the Jacobian at z; maps whose two have a part in common override this."""
        return self(z), self.linearize(z)

    def select(self, rows: Tensor) -> Self:
        """The map of some samples only."""
        return self.replace_leaves(lambda leaf: taken(leaf.tensor, rows) if leaf.per_sample else leaf.tensor)

    def to(self, dtype: torch.dtype) -> Self:
        """The same map with its floating-point tensors in a dtype."""
        return self.replace_leaves(lambda leaf: leaf.tensor.to(dtype) if leaf.tensor.is_floating_point() else leaf.tensor)

    def detach(self) -> Self:
        """The same map outside of the autograd graph."""
        return self.replace_leaves(lambda leaf: leaf.tensor.detach())


@dataclass(frozen=True)
class CallableMap(Map):
    """Any callable z -> f(z). What it captures is unknown, so its samples are never separated."""

    independent: ClassVar[bool] = False
    f: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor) -> Tensor:
        return self.f(z)


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
    evaluates: ClassVar[bool] = False  # the last thing that a step does with f is to evaluate it at the iterates of the new state

    def prepare(self, fn: Map) -> Map:
        """The map that the steps are given: fn with what is worth computing once, such as factorisations."""
        return fn

    @abstractmethod
    def init(self, fn: Map, z0: Tensor) -> State:
        """The state at z0."""

    @abstractmethod
    def step(self, fn: Map, state: State) -> State:
        """The state one step on."""


def evaluates(solver: Solver) -> bool:
    """Whether its steps are of the kind that `Solver.evaluates` promises: a class with other steps has to say so itself."""
    own = next(kind for kind in type(solver).__mro__ if "step" in vars(kind))
    return bool(vars(own).get("evaluates", False))


@dataclass(frozen=True)
class Trace:
    """At each step: which samples were still being solved, how far each one was, what that had cost and, if asked for, where.

    `residual` is true for every solver: where a solver only estimates, f was evaluated once more, unknown to it and not counted.
    """

    rows: tuple[Tensor, ...] = ()
    residual: tuple[Tensor, ...] = ()
    evals: tuple[int, ...] = ()
    z: tuple[Tensor, ...] | None = None  # the iterates, in the order of the rows

    def of(self, sample: int) -> Tensor:
        """The residuals of one sample, one for each step until it was done."""
        return torch.cat([r[i == sample] for i, r in zip(self.rows, self.residual, strict=True)])

    def path(self, sample: int) -> Tensor:
        """The iterates of one sample from z0 on, [steps + 1, ...], where they were recorded."""
        if self.z is None:
            raise ValueError("The trace holds no iterates: ask for them with record(iterates=True).")
        return torch.cat([z[i == sample] for i, z in zip(self.rows, self.z, strict=True)])

    def then(self, rows: Tensor, residual: Tensor, evals: int, z: Tensor) -> "Trace":
        """The trace with one more step."""
        places = None if self.z is None else (*self.z, z)
        return Trace((*self.rows, rows), (*self.residual, residual), (*self.evals, evals), places)


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """The best z found for each sample and how good it is: `residual` is |f(z) - z| / |f(z)| of that very z.

    Examples:
        >>> import torch
        >>> from opteq import solve
        >>> from opteq.solvers import Anderson
        >>> found = solve(torch.cos, torch.tensor([[0.0], [float("nan")]]), Anderson())
        >>> found.status.name, found.converged.tolist()
        ('NONFINITE', [True, False])
        >>> print(round(found.z[0].item(), 3), bool(found.residual[0] <= found.stop.rtol))
        0.739 True
    """

    z: Tensor
    codes: Tensor  # per sample, the position in Status
    residual: Tensor
    steps: Tensor
    evals: int
    stop: Stop
    trace: Trace | None = None

    @property
    def converged(self) -> Tensor:
        """Which samples meet the tolerance."""
        return self.codes == 0

    @property
    def statuses(self) -> tuple[Status, ...]:
        """The status of each sample."""
        return tuple(_CODES[code] for code in self.codes.tolist())

    @property
    def status(self) -> Status:
        """The worst status of the batch."""
        return _CODES[int(self.codes.max())] if self.codes.numel() else Status.CONVERGED

    def __repr__(self) -> str:
        shape = f"z {list(self.z.shape)} {self.z.dtype}"
        if is_transformed(self.codes):
            return f"Solution({shape})"
        counts = ", ".join(f"{count} {status.name}" for status, count in Counter(self.statuses).items())
        worst = f"worst residual {self.residual.max().item():.1e}, most steps {int(self.steps.max())}, " if len(self.codes) else ""
        return f"Solution({counts or 'empty'}; {worst}evals {self.evals}, {shape})"

    def explain(self) -> str:
        """What happened, how far it got, what to try."""
        counts = Counter(self.statuses)
        failed = [status for status in reversed(_CODES[1:]) if counts[status]]
        total = len(self.codes)
        if not failed:
            return f"All {total} samples converged (rtol {self.stop.rtol:g}, atol {self.stop.atol:g})."
        residual = self.residual[~self.converged]
        known = residual[residual.isfinite()]
        reached = f"{known.max().item():.2e}" if known.numel() else "unknown"
        head = f"{total - counts[Status.CONVERGED]} of {total} samples did not converge. "
        how_far = (
            f"The worst relative residual is {reached} (rtol {self.stop.rtol:g}, atol {self.stop.atol:g}) "
            f"after {int(self.steps.max())} steps, {self.evals} evaluations."
        )
        drifting = int((residual <= self.stop.rtol).sum())
        drift = f" {drifting} met the tolerance only because |f(z)| is large: their residual did not fall." if drifting else ""
        return head + how_far + drift + "".join(f"\n{counts[status]} {status.value}" for status in failed)

    def raise_if_failed(self) -> Self:
        """This solution, or a ConvergenceError if a sample did not converge."""
        if self.status is not Status.CONVERGED:
            raise ConvergenceError(self.explain(), self)
        return self


def relative(size: Tensor, scale: Tensor) -> Tensor:
    """size / scale, and 0 / 0 = 0."""
    return torch.where(size == 0, torch.zeros_like(size), size / scale)


def first_value(fn: Map, z0: Tensor) -> Tensor:
    """f(z0), checked: f must keep the shape, dtype and device of its state, and leave the state itself alone."""
    before, version = z0.clone(), _version(z0)
    fz = fn.begin(z0)
    check_tensor(fz)
    if not is_transformed(fz) and (_version(z0) != version or not _equal(before, z0)):
        raise ValueError("The map f must not change its input z in place. (In-place layers such as ReLU(inplace=True) do.)")
    for name in ("shape", "dtype", "device"):
        got, expected = getattr(fz, name), getattr(z0, name)
        if got != expected:
            raise ValueError(f"The map f must return a tensor of the {name} of its state, {expected}. Got {got} instead.")
    return fz


def _version(z: Tensor) -> int:
    """How often z was written to (a ReLU in place does not change z0 = 0); 0 for tensors that do not know."""
    return 0 if is_transformed(z) or z.is_inference() else z._version


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether all entries are the same; NaN is NaN."""
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())  # the first needs no memory


def check_tensor(value: object) -> None:
    """f must return a tensor."""
    if not isinstance(value, Tensor):
        name = type(value).__name__
        raise TypeError(f"The map f must return a tensor. Got {name} instead; pack several tensors into one.")


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
    check_floating("solve", "z0", z0)
    if z0.ndim == 0 or 0 in z0.shape[1:]:
        raise ValueError(invalid("solve", "z0", "of shape [batch, ...] with no empty dimension but the batch", list(z0.shape)))
    if not callable(fn):
        raise TypeError(invalid("solve", "fn", "a Map or a callable", fn))
    map_ = fn if isinstance(fn, Map) else CallableMap(fn)
    return solve_map(map_, z0, solver, stop, Trace(z=() if iterates else None) if record or iterates else None)


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


_FALLS = 0.9  # the part of a residual that a step may leave to be worth taking where the tolerance is met already


class _Loop:
    """The loop. Arrays named in the singular hold one entry for each row still worked on; `rows` tells which samples those are."""

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
        samples, self.eps = z0.shape[0], torch.finfo(z0.dtype).eps
        device = z0.device
        self.fn, self.whole = solver.prepare(fn) if samples else fn, fn  # the first, made ready for the solver, loses samples
        self.solver, self.stop, self.z0 = solver, stop, z0
        self.start = norm(z0)  # then max(|z0|, |f(z0)|)
        self.best = z0
        self.best_owned = False  # whether `best` may be written to
        self.latest: Tensor | None = None  # the iterates of the live rows, if they are the best of theirs; not yet in `best`
        if not self.start.isfinite().all():
            self.best = torch.where(per_sample_like(self.start.isfinite(), z0), z0, torch.zeros_like(z0))
        self.residual = torch.full((samples,), math.nan, dtype=z0.dtype, device=device)
        self.codes = torch.full((samples,), _MAX_STEPS, device=device)
        self.steps = torch.zeros(samples, dtype=torch.long, device=device)
        self.rows = torch.arange(samples, device=device)
        self.live = torch.ones(samples, dtype=torch.bool, device=device)
        self.peak = torch.zeros_like(self.start)  # the largest |f(z) - z| seen
        self.before = torch.full_like(self.start, math.inf)  # |f(z) - z| one step before
        self.soon = torch.zeros(samples, dtype=torch.bool, device=device)  # foreseen to meet the tolerance one step on
        self.aim, self.verified = aim, verified
        self.met = torch.zeros_like(self.live)  # the best iterate meets the tolerance, but not yet what is aimed at
        self.last = last if evaluates(solver) else None
        self.evals = 0  # evaluations made here, beside the solver's own
        self.trace = trace
        self.far = max(
            1.0, 1 / max(stop.rtol, self.eps)
        )  # growth of |z| that, with a residual that has not fallen, means divergence
        self.too_far = 1 / self.eps  # growth at which to give up at once

    def run(self) -> Solution:
        if self.rows.numel() == 0:
            return self.solution(0)
        state = self.solver.init(self.fn, self.z0)
        for step in range(self.stop.max_steps + 1):
            state = self.judge(state, step)
            if step == self.stop.max_steps or not self.live.any():
                break
            state = self.compact(state)
            state = self.solver.step(self.evaluated(), state)
        self.store()
        self.steps[self.rows[self.live]] = self.stop.max_steps
        self.complete()
        return self.solution(state.evals)

    def complete(self) -> None:
        """Measure the samples of which only estimates were seen before they ran away."""
        unknown = self.residual.isnan() & (self.codes != _NONFINITE)
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
        known = torch.ones_like(self.live)
        z = state.z
        if not state.exact:  # estimates drive, truth decides
            known = self.live & (self.enough(size, scale) | (scale > self.too_far * self.start) | last)
            if self.fn.coupled and not known[self.live].all():
                known = torch.zeros_like(known)
            if known.any() and self.verified:
                state, z, size, scale = self.verify(state, known, size, scale)
            elif known.any():
                z = self.candidates(state, known)[1]
        finite = size.isfinite() & scale.isfinite()
        self.peak = torch.where(finite, torch.maximum(self.peak, size), self.peak)
        risen = size > 0.5 * self.peak
        growth = torch.where(self.start > 0, scale / self.start, torch.zeros_like(scale))
        good = self.live & known & finite & (self.meets(size, scale) if last else self.enough(size, scale))
        self.before = size
        if (good & risen).any():
            good &= ~risen | (self.meets(size, self.start) & self.turns(state, z, size, scale))
        runaway = good & (growth > 0.01 * self.too_far)  # there, a residual as large as the start is lost in rounding
        if runaway.any():
            runaway &= self.drifts(z)
            good &= ~runaway
        if (self.solver.selective and not last) or (self.fn.coupled and not good[self.live].all()):
            good = torch.zeros_like(good)
        residual = relative(size, scale)
        better = self.live & known & finite & ~runaway & (~(residual >= self.residual[self.rows]) | self.solver.selective)
        if self.fn.coupled:  # iterates of different steps do not go together
            sound = bool((known & finite & ~runaway)[self.live].all())
            worse = residual.nan_to_num(0.0, math.inf).max() >= self.residual.max()
            better = self.live & sound & (~worse | self.solver.selective)
        better &= ~(risen & (growth > self.far))
        self.keep(good | better, z, residual)
        if self.trace is not None:
            self.trace = self.traced(self.trace, state, z, known, residual)
        lost = runaway | risen & (growth > (self.far if last else self.too_far))
        self.finish(good, 0, step)
        if self.aim < 1:
            self.settle(better & ~risen, self.meets(size, scale), last, step)
        self.finish(~finite, _NONFINITE, step)
        self.finish(lost, _DIVERGED, step)
        return state

    def settle(self, kept: Tensor, meets: Tensor, last: bool, step: int) -> None:
        """Samples that met the tolerance, and were sent on for less of it, end at their best where they do not get there."""
        done = self.live & self.met & (~meets | last)
        self.finish(torch.full_like(done, bool(done.any())) if self.fn.coupled else done, 0, step)
        met = kept & meets
        self.met |= met & bool(met[self.live].all()) if self.fn.coupled else met
        if last:
            self.finish(self.met, 0, step)

    def uneventful(self, state: State, size: Tensor, scale: Tensor) -> bool:
        """Whether every live sample is on its way: then there is no more to do than to note it, which most steps come to."""
        if self.trace is not None or self.solver.selective or self.fn.coupled:
            return False
        far = self.far if state.exact else self.too_far
        calm = ~self.enough(size, scale) & (size < math.inf) & (scale <= far * self.start)
        residual = None
        if state.exact:
            residual = size / scale
            calm &= ~(residual >= self.residual[self.rows])
        if self.aim < 1:
            meets = self.meets(size, scale)
            calm &= meets | ~self.met
        if not bool((calm | ~self.live).all()):
            return False
        self.peak, self.before = torch.maximum(self.peak, size), size
        if self.aim < 1 and state.exact:
            self.met |= meets & (size <= 0.5 * self.peak)
        if residual is not None:
            self.latest = state.z
            self.residual[self.rows[self.live]] = residual[self.live]
        return True

    def evaluated(self) -> Map:
        """f for the next step: as the caller evaluates it if all samples will be done then, for all that can be foreseen."""
        if self.last is None or len(self.live) < len(self.codes) or not bool((self.live & self.soon).all()):
            return self.fn
        return cast(Map, self.last)  # a solver that says so does no more with it than to call it

    def meets(self, size: Tensor, scale: Tensor) -> Tensor:
        return size <= self.stop.atol + self.stop.rtol * scale

    def enough(self, size: Tensor, scale: Tensor) -> Tensor:
        """Which samples meet the tolerance, and as much less of it as is aimed at or can be had: NaN is never enough."""
        limit = self.stop.atol + self.stop.rtol * scale
        if self.aim == 1:
            return size <= limit
        return (size <= self.aim * limit) | ((size <= limit) & (size > _FALLS * self.before))

    def verify(self, state: State, wanted: Tensor, size: Tensor, scale: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        """Evaluate f at the iterates of the wanted rows, and put the truth in place of the estimate."""
        rows, z, at = self.candidates(state, wanted)
        value = (self.fn if at is z else self.fn.select(rows))(at)
        self.evals += 1
        size, scale = size.index_copy(0, rows, norm(value - at)), scale.index_copy(0, rows, norm(value))
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

    def turns(self, state: State, z: Tensor, size: Tensor, scale: Tensor) -> Tensor:
        """Whether the residual is rounding only, or changes along itself: for f(z) = z + 1 it does neither, however large z."""
        fz = state.value() if state.exact else self.fn(z)
        self.evals += 1 if state.exact else 2
        noise = 2 * self.eps * scale
        return (size <= noise) | (norm((self.fn(fz) - fz).sub_(fz).add_(z)) > 1e-6 * size + noise)

    def drifts(self, z: Tensor) -> Tensor:
        """Whether f moves z along itself as the identity does: then z has run away along a direction in which I - J is singular."""
        push = math.sqrt(self.eps) * z
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

    def traced(self, trace: Trace, state: State, z: Tensor, known: Tensor, residual: Tensor) -> Trace:
        """The trace with the live rows of this step. What the solver only estimates is measured, but told to nobody else."""
        if not known[self.live].all():
            z = torch.where(per_sample_like(known, z), z, state.candidate(self.fn))
            value = self.fn(z)
            residual = torch.where(known, residual, relative(norm(value - z), norm(value)))
        return trace.then(self.rows[self.live], residual[self.live], state.evals + self.evals, z[self.live])

    def finish(self, mask: Tensor, code: int, step: int) -> None:
        """Give the live rows under the mask their status, and freeze them."""
        mask = mask & self.live
        if mask.any():
            self.codes[self.rows[mask]] = code
            self.steps[self.rows[mask]] = step
            self.live = self.live & ~mask

    def compact(self, state: State) -> State:
        """Drop the finished rows when they are at least a quarter."""
        if not self.fn.independent or 4 * int(self.live.sum()) > 3 * self.live.numel():
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
