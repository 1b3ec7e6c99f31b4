"""The peak of live tensor bytes during a solve, in states: what solvers hold does not grow with the number of steps."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opteq import Map, Solver, Stop, per_sample, solve
from opteq.linear import CG, GMRES, LinearizedMap, Neumann
from opteq.solve import Jacobian
from opteq.solvers import Anderson, Broyden, Newton, Picard

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


SOLVERS = [Picard(), Anderson(memory=3), Broyden(memory=5), GMRES(restart=5), CG(), Neumann()]


@pytest.mark.parametrize("even", [True, False], ids=["one pace", "compacted"])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_memory_does_not_grow_with_the_number_of_steps(solver: Solver, even: bool) -> None:
    few, many = peak_of_solve(solver, even, 10), peak_of_solve(solver, even, 200)
    assert many <= few + 1.5  # the best iterate and one more temporary, however many steps


@pytest.mark.parametrize("even", [True, False], ids=["one pace", "compacted"])
def test_memory_of_newton_does_not_grow_with_the_number_of_steps(even: bool) -> None:
    few, many = peak_of_solve(Newton(), even, 6), peak_of_solve(Newton(), even, 30)
    assert many <= few + 1.5


def bound(solver: Solver) -> float:
    """How many states a solve may hold at one time; the last term is for the small matrices of each sample."""
    match solver:
        case Anderson(memory=memory) | Broyden(memory=memory):
            return 2 * memory + 6 + 2 * memory**2 / N
        case GMRES(restart=restart):
            return restart + 6 + 2 * (restart + 1) ** 2 / N
        case _:
            return 8


BOUNDED = [Picard(), Picard(damping=0.5), Anderson(), Anderson(memory=20), Broyden(memory=6), Broyden(), Neumann()]


@pytest.mark.parametrize("even", [True, False], ids=["one pace", "compacted"])
@pytest.mark.parametrize("solver", BOUNDED, ids=str)
def test_memory_is_bounded(solver: Solver, even: bool) -> None:
    assert peak_of_solve(solver, even, 60) <= bound(solver)
