"""The peak of live tensor bytes during a solve, in states: what solvers hold does not grow with the number of steps."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opteq import Equilibrium, Map, Solver, Stop, per_sample, solve
from opteq.cells import Monotone, OptEq
from opteq.gradients import Unrolled
from opteq.linear import CG, GMRES, LinearizedMap, Neumann
from opteq.solve import Jacobian
from opteq.solvers import Accelerated, Anderson, Broyden, Newton, Picard

BATCH, N = 64, 1024
STATE = BATCH * N * 4  # bytes, in float32


@dataclass(frozen=True)
class Lean(Map):
    """s a z + c, a [n] shared, s [batch, 1] and c [batch, n]; allocates its value and nothing else."""

    closed: ClassVar[bool] = True
    a: Tensor
    s: Tensor = per_sample()
    c: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return (z * self.s).mul_(self.a).add_(self.c)

    def linearize(self, z: Tensor) -> Jacobian:
        def product(v: Tensor) -> Tensor:
            return (v * self.s).mul_(self.a)

        return Jacobian(jvp=product, vjp=product, symmetric=self.symmetric)


@dataclass(frozen=True)
class SymmetricLean(Lean):
    symmetric: ClassVar[bool] = True


def lean(even: bool, kind: type[Lean] = Lean) -> Lean:
    """A map whose samples are equally hard, or so different that the loop compacts again and again."""
    g = torch.Generator().manual_seed(0)
    s = torch.full((BATCH, 1), 0.99) if even else torch.linspace(0.01, 0.99, BATCH)[:, None]
    return kind(2 * torch.rand(N, generator=g) - 1, s, torch.randn(BATCH, N, generator=g))


def peak(run: Callable[[], Any]) -> tuple[float, Any]:
    """The most that was alive at one time during the call, beyond what was before it, in states."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest / STATE, result


def peak_of_solve(solver: Solver, even: bool, max_steps: int) -> float:
    linear = isinstance(solver, (CG, GMRES, Neumann))
    fn: Map = lean(even, SymmetricLean if isinstance(solver, (CG, Newton)) else Lean)
    if linear:
        fn = LinearizedMap(fn, False, torch.zeros(BATCH, N), fn.c)
    z0 = torch.zeros(BATCH, N)
    highest, found = peak(lambda: solve(fn, z0, solver, Stop(rtol=0.0 if even else 1e-5, max_steps=max_steps)))
    assert even or found.converged.sum() >= BATCH // 4 or max_steps < 50  # compaction took place
    return highest


def test_the_measure_sees_what_is_held_and_what_is_freed() -> None:
    def run() -> Tensor:
        kept = [torch.zeros(BATCH, N) for _ in range(3)]
        del kept
        return torch.ones(BATCH, N).mul_(2)

    assert peak(run)[0] == pytest.approx(3, abs=0.01)
    assert peak(lambda: [torch.zeros(BATCH, N) + 1 for _ in range(5)])[0] == pytest.approx(6, abs=0.01)


HISTORIES = [Anderson(memory=3), Broyden(memory=5), GMRES(restart=5)]
CASES = [(solver, True) for solver in (Picard(), *HISTORIES, CG(), Neumann())] + [(solver, False) for solver in HISTORIES]


@pytest.mark.parametrize(("solver", "even"), CASES, ids=str)
def test_memory_does_not_grow_with_the_number_of_steps(solver: Solver, even: bool) -> None:
    few, many = peak_of_solve(solver, even, 10), peak_of_solve(solver, even, 40 if even else 60)
    assert many <= few + 1.5  # the best iterate and one more temporary, however many steps


@pytest.mark.parametrize("even", [True, False], ids=["one pace", "compacted"])
def test_memory_of_newton_does_not_grow_with_the_number_of_steps(even: bool) -> None:
    few, many = peak_of_solve(Newton(), even, 4), peak_of_solve(Newton(), even, 12)
    assert many <= few + 1.5


def test_gmres_holds_no_basis_where_the_series_is_quick() -> None:
    fn = lean(True, Lean)
    equation = LinearizedMap(replace(fn, s=0.25 * fn.s), False, torch.zeros(BATCH, N), fn.c)
    highest, found = peak(lambda: solve(equation, torch.zeros(BATCH, N), GMRES(), Stop(rtol=1e-5)))
    assert bool(found.converged.all())
    assert highest <= 8


def bound(solver: Solver) -> float:
    """How many states a solve may hold at one time; the last term is for the small matrices of each sample."""
    match solver:
        case Anderson(memory=memory) | Broyden(memory=memory):
            return 2 * memory + 6 + 2 * memory**2 / N
        case GMRES(restart=restart):
            return restart + 8 + 2 * (restart + 1) ** 2 / N  # the basis, and the sum of the series
        case CG() | Newton():
            return 12
        case _:
            return 8


BOUNDED = [Picard(), Picard(damping=0.5), Anderson(), Anderson(memory=20), Broyden(memory=6), Broyden(), Neumann()]
BOUNDED += [GMRES(10), GMRES(), CG(), Newton()]


@pytest.mark.parametrize("even", [True, False], ids=["one pace", "compacted"])
@pytest.mark.parametrize("solver", BOUNDED, ids=str)
def test_memory_is_bounded(solver: Solver, even: bool) -> None:
    history = getattr(solver, "memory", getattr(solver, "restart", 0))
    steps = 3 if isinstance(solver, Newton) else history + 10 if even else 50  # the history is full; samples have been left out
    assert peak_of_solve(solver, even, steps) <= bound(solver)


def train_step(layer: Equilibrium, x: Tensor) -> None:
    layer(x).sum().backward()


class Saved:
    """A tensor that autograd keeps; as another one, for an output that its own graph kept would never go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def saved_states(layer: Equilibrium, x: Tensor) -> float:
    """What autograd keeps alive between forward and backward, beyond the inputs and the parameters, in states."""
    saved: WeakSet[Saved] = WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved.add(one := Saved(tensor))
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        z = layer(x)
    assert z.requires_grad
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    storages = {one.tensor.untyped_storage() for one in saved}
    kept = {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in known}
    return sum(kept.values()) / STATE


@pytest.mark.parametrize("solver", [Picard(), Anderson(memory=3), Broyden(memory=3)], ids=str)
def test_what_is_kept_for_backward_does_not_grow_with_the_number_of_steps(solver: Solver) -> None:
    torch.manual_seed(0)
    cell, x = OptEq(8, N, 16), torch.randn(BATCH, 8)
    few, many = (Equilibrium(cell, solver, Stop(rtol=0.0, max_steps=steps), on_failure="ignore") for steps in (10, 100))
    assert saved_states(many, x) == pytest.approx(saved_states(few, x), abs=0.01)
    assert saved_states(many, x) <= 1.5  # z, and the injection u; where hooks look on, no graph is kept beside them
    unrolled = Equilibrium(cell, Picard(), gradient=Unrolled(10))
    assert saved_states(unrolled, x) > 5  # the measure sees what unrolling keeps


@pytest.mark.parametrize("solver", [Picard(), Anderson(memory=3, brisk=0.0), Broyden(memory=3)], ids=str)
def test_the_peak_of_a_train_step_does_not_grow_with_the_number_of_steps(solver: Solver) -> None:
    torch.manual_seed(0)
    cell, x = OptEq(8, N, 16), torch.randn(BATCH, 8)
    few, many = (Equilibrium(cell, solver, Stop(rtol=0.0, max_steps=steps), on_failure="ignore") for steps in (10, 60))
    highest = [peak(lambda layer=layer: train_step(layer, x))[0] for layer in (few, many)]
    assert highest[1] <= highest[0] + 1.5
    assert highest[1] <= 12 + (6 if solver != Picard() else 0)


@pytest.mark.parametrize("solver", [None, Accelerated()], ids=["default", "Accelerated"])
def test_a_train_step_in_the_dual_form_takes_about_twelve_states(solver: Solver | None) -> None:
    torch.manual_seed(0)
    batch, width = 2048, 256  # so large that W W' and what there is one of a sample are small beside a state
    cell, x = OptEq(8, width, width), torch.randn(batch, 8)
    with torch.no_grad():
        left, right = (torch.linalg.qr(torch.randn(width, width))[0] for _ in range(2))
        cell.W.copy_((left * torch.linspace(0.5, 0.9999, width)) @ right)  # so hard that some samples need more steps
    few, many = (Equilibrium(cell, solver, Stop(rtol=1e-6, max_steps=steps), on_failure="ignore") for steps in (2, 5))
    assert not many.solve(x).converged.all()
    highest = [peak(lambda layer=layer: train_step(layer, x))[0] * STATE / (4 * batch * width) for layer in (few, many)]
    assert highest[1] <= highest[0] + 0.5
    assert highest[1] <= 13  # W W' itself is an eighth of a state


def test_a_train_step_by_splitting_takes_about_twelve_states() -> None:
    torch.manual_seed(0)
    batch, width = 2048, 256
    cell, x = Monotone(8, width, m=0.05), torch.randn(batch, 8)
    with torch.no_grad():
        cell.A.mul_(3)
        cell.B.mul_(3)
    few, many = (Equilibrium(cell, None, Stop(rtol=1e-6, max_steps=steps), on_failure="ignore") for steps in (8, 30))
    highest = [peak(lambda layer=layer: train_step(layer, x))[0] * STATE / (4 * batch * width) for layer in (few, many)]
    assert highest[1] <= highest[0] + 1.1
    assert highest[1] <= 13  # W and its factor are an eighth of a state each


@pytest.mark.parametrize("make", [OptEq, Monotone], ids=lambda kind: kind.__name__)
def test_a_train_step_in_float64_takes_about_twelve_states_however_small_the_tolerance(make: type[OptEq] | type[Monotone]) -> None:
    torch.manual_seed(0)
    batch, width = 2048, 256
    cell, x = make(8, *[width] * (2 if make is OptEq else 1)).double(), torch.randn(batch, 8, dtype=torch.float64)
    for rtol in (1e-4, 1e-8):
        layer = Equilibrium(cell, stop=Stop(rtol=rtol), on_failure="raise")
        highest = peak(lambda layer=layer: train_step(layer, x))[0] * STATE / (8 * batch * width)
        assert highest <= 12.5  # the weights are an eighth of a state each, and half of that in float32
