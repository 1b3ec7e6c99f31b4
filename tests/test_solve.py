import math
import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from conformance import check_honest, residual, uneven_cos, uneven_tanh
from opteq import ConvergenceError, Equilibrium, Map, Solution, Solver, Status, Stop, per_sample, record, solve
from opteq.cells import Monotone, OptEq
from opteq.checks import is_transformed
from opteq.gradients import Unrolled
from opteq.linear import CG, GMRES, DualCG, LinearizedMap, Neumann
from opteq.regularizers import L2
from opteq.solve import CallableMap, State, Trace, ValueState, norm
from opteq.solvers import SAM, Accelerated, Anderson, Broyden, ForwardBackward, Newton, PeacemanRachford, Picard

f64 = torch.float64
ACCELERATED = [Anderson(), Anderson(memory=1), Broyden(), Newton()]


def zeros(*shape: int, dtype: torch.dtype = f64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


# Status


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_an_expanding_map_is_given_up_long_before_it_overflows(damping: float, dtype: torch.dtype) -> None:
    found = solve(lambda z: 2 * z + 1, zeros(3, 4, dtype=dtype), Picard(damping), Stop(max_steps=10_000))
    assert set(found.statuses) == {Status.DIVERGED}
    assert int(found.steps.max()) <= 110
    assert found.z.abs().max() < 1e18


@pytest.mark.parametrize("rtol", [1e-1, 1e-2])
def test_growth_beyond_the_tolerance_without_progress_is_divergence_at_the_last_step(rtol: float) -> None:
    found = solve(lambda z: z + 1, zeros(2, 3), Picard(), Stop(rtol=rtol, max_steps=200))
    assert set(found.statuses) == {Status.DIVERGED}
    assert found.z.max() <= 1 / rtol  # further out, a smaller relative residual is no merit
    check_honest(found, lambda z: z + 1)


@pytest.mark.parametrize("solver", ACCELERATED, ids=str)
@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
def test_leaving_an_unstable_equilibrium_is_no_divergence(solver: Solver, rtol: float) -> None:
    def f(z: Tensor) -> Tensor:
        return torch.tanh(3 * z) + 1e-12

    assert solve(f, zeros(2, 3), solver, Stop(rtol=rtol)).status is Status.CONVERGED


def test_plain_iteration_leaves_an_unstable_equilibrium_for_a_stable_one() -> None:
    found = solve(lambda z: torch.tanh(3 * z), torch.full((2, 3), 1e-3, dtype=f64), Picard(), Stop(rtol=1e-8))
    assert found.status is Status.CONVERGED
    assert (found.z > 0.9).all()


def test_a_start_far_outside_is_no_divergence() -> None:
    assert (
        solve(lambda z: 0.5 * z, torch.full((2, 3), 1e12, dtype=f64), Picard(), Stop(rtol=1e-4, atol=1e-6)).status
        is Status.CONVERGED
    )


def test_each_sample_has_its_own_status() -> None:
    def f(z: Tensor) -> Tensor:
        return torch.stack([0.5 * z[0] + 1, 2 * z[1] + 1, torch.log(z[2] - 1), 0.999 * z[3] + 1])

    found = solve(f, zeros(4, 3), Picard(), Stop(rtol=1e-6, max_steps=60))
    assert found.statuses == (Status.CONVERGED, Status.DIVERGED, Status.NONFINITE, Status.MAX_STEPS)
    assert found.converged.tolist() == [True, False, False, False]
    assert found.status is Status.NONFINITE  # the worst
    assert found.residual[2].isnan()
    assert found.steps.tolist()[2:] == [0, 60]
    text = found.explain()
    assert text.startswith("3 of 4 samples did not converge.")
    for status in (Status.DIVERGED, Status.NONFINITE, Status.MAX_STEPS):
        assert f"1 {status.value}" in text


def test_overflow_is_nonfinite_and_returns_a_finite_z() -> None:
    found = solve(lambda z: z * z + 1e200, zeros(2, 3), Picard(), Stop(max_steps=50))
    assert set(found.statuses) == {Status.NONFINITE}
    assert found.z.isfinite().all()


def test_raise_if_failed_passes_a_good_solution_on_and_names_the_remedy_of_a_bad_one() -> None:
    good = solve(lambda z: 0.5 * z + 1, zeros(2, 3), Picard())
    assert good.raise_if_failed() is good
    assert good.explain() == "All 2 samples converged (rtol 0.0001, atol 0)."
    bad = solve(lambda z: 0.99 * z + 1, zeros(2, 3), Picard(), Stop(max_steps=5))
    with pytest.raises(ConvergenceError, match=r"raise Stop\.max_steps") as caught:
        bad.raise_if_failed()
    assert caught.value.solution is bad
    undefined = solve(lambda z: z * math.nan, zeros(2, 3), Picard())
    assert "The worst relative residual is unknown" in undefined.explain()


@pytest.mark.parametrize(
    "again", [copy, deepcopy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "deepcopy", "pickle"]
)
def test_an_error_goes_from_a_process_to_another_with_its_solution(again: Callable[[object], ConvergenceError]) -> None:
    found = solve(lambda z: 0.99 * z + 1, zeros(2, 3), Picard(), Stop(max_steps=5))
    found = replace(found, z=found.z * torch.ones(1, requires_grad=True))  # with derivatives, as a layer gives it
    error = ConvergenceError(found.explain(), found)
    error.add_note("in the third layer")
    sent = again(error)
    assert (str(sent), sent.__notes__) == (str(error), ["in the third layer"])
    assert torch.equal(sent.solution.z, found.z)
    assert sent.solution.statuses == found.statuses
    assert not sent.solution.z.requires_grad
    assert error.solution is found


def test_the_absolute_tolerance_counts_too() -> None:
    stop = Stop(rtol=0.0, atol=1e-3, max_steps=50)
    found = solve(lambda z: 0.5 * z, torch.full((2, 4), 1e3, dtype=f64), Picard(), stop)
    assert found.status is Status.CONVERGED
    assert (0.5 * found.z).norm(dim=1).max() <= 1e-3
    assert (0.5 * found.z).norm(dim=1).min() > 1e-3 / 2.1  # and no step too many


# What is returned


def logistic(z: Tensor) -> Tensor:
    return 3.9 * z * (1 - z)


@pytest.mark.parametrize("max_steps", [7, 12, 33])
def test_the_best_iterate_is_returned_not_the_last(max_steps: int) -> None:
    z0 = torch.tensor([[0.2], [0.3], [0.41], [0.77]], dtype=f64)
    iterates = [z0]
    for _ in range(max_steps):
        iterates.append(logistic(iterates[-1]))
    residuals = torch.stack([torch.from_numpy(residual(logistic, z)) for z in iterates])  # [step, sample]
    best = residuals.argmin(dim=0)
    assert (best < max_steps).all()  # or this would test nothing
    found = solve(logistic, z0, Picard(), Stop(rtol=1e-12, max_steps=max_steps))
    assert set(found.statuses) == {Status.MAX_STEPS}
    assert torch.equal(found.z, torch.stack([iterates[k][i] for i, k in enumerate(best)]))
    assert torch.allclose(found.residual, residuals.min(dim=0).values, rtol=1e-12, atol=0)
    assert found.steps.tolist() == [max_steps] * 4


def test_the_best_iterate_of_one_sample_is_kept_while_another_goes_on_to_improve() -> None:
    after = {0.0: 8.0, 8.0: 12.0, 12.0: 13.0, 13.0: 20.0}  # nearest to its image at 12

    def f(z: Tensor) -> Tensor:
        return torch.cat([torch.tensor([[after[z[0].item()]]], dtype=f64), 0.5 * z[1:] + 1])

    found = solve(f, zeros(2, 1), Picard(), Stop(rtol=1e-9, max_steps=3))
    assert found.z.tolist() == [[12.0], [1.75]]
    check_honest(found, f)


@pytest.mark.parametrize("max_steps", [1, 2, 17])
def test_max_steps_is_honoured(max_steps: int) -> None:
    found = solve(lambda z: 0.999 * z + 1, zeros(2, 3), Picard(), Stop(rtol=1e-9, max_steps=max_steps))
    assert found.steps.tolist() == [max_steps] * 2
    assert found.evals == max_steps + 1


@pytest.mark.parametrize("kind", ["map", "callable"])
def test_the_trace_has_no_padding(kind: str) -> None:
    fn = uneven_cos(batch=16)
    f = fn if kind == "map" else fn.__call__
    found = solve(f, torch.zeros_like(fn.shift), Picard(), Stop(rtol=1e-8, max_steps=100), record=True)
    assert isinstance(found.trace, Trace)
    assert len(set(found.steps.tolist())) > 4
    for i in range(16):
        seen = found.trace.of(i)
        assert len(seen) == int(found.steps[i]) + 1
        assert seen[-1] == found.residual[i]
        assert (seen[:-1] > 1e-8 if found.converged[i] else seen[:-1] >= found.residual[i]).all()
        assert seen.isfinite().all()
    assert sum(len(r) for r in found.trace.residual) == int((found.steps + 1).sum())


def test_the_trace_is_what_plain_iteration_sees() -> None:
    z = torch.full((1, 3), 0.3, dtype=f64)
    found = solve(torch.cos, z, Picard(), Stop(rtol=1e-6), record=True)
    assert found.trace is not None
    for value in found.trace.of(0):
        assert value.item() == pytest.approx(residual(torch.cos, z)[0])
        z = torch.cos(z)


def test_no_trace_unless_asked() -> None:
    assert solve(torch.cos, zeros(1, 3), Picard()).trace is None


# Recorded iterates


def dense_opteq(batch: int = 12) -> Map:
    """A map that Newton and Accelerated solve in its dual, where residuals are estimated; |W| = 0.97."""
    torch.manual_seed(0)
    cell = OptEq(5, 20, 8).double()
    cell.W.data *= 0.97 / torch.linalg.matrix_norm(cell.W.data, 2)
    return cell.bind(torch.randn(batch, 5, dtype=f64)).detach()


def monotone(batch: int = 12) -> Map:
    torch.manual_seed(0)
    return Monotone(5, 8).double().bind(torch.randn(batch, 5, dtype=f64)).detach()


def adjoint(fn: Map) -> Map:
    """v = J'v + 1 at a point of the map."""
    z = torch.linspace(-1, 1, 12 * 20, dtype=f64).view(12, 20)
    return LinearizedMap(fn, True, z, torch.ones_like(z))


TRACED: dict[str, tuple[Map, Solver, int]] = {
    **{str(solver): (uneven_tanh(batch=12, n=6), solver, 6) for solver in (Picard(), Picard(0.5), *ACCELERATED, Accelerated())},
    **{f"dual {solver}": (dense_opteq(), solver, 20) for solver in (Newton(), Accelerated())},
    **{f"monotone {solver}": (monotone(), solver, 8) for solver in (ForwardBackward(), PeacemanRachford(), Anderson())},
    **{f"adjoint {solver}": (adjoint(dense_opteq()), solver, 20) for solver in (CG(), DualCG(), GMRES(restart=4), Neumann())},
    "SAM": (uneven_tanh(batch=12, n=6), SAM(L2()), 6),
}
every_trace = pytest.mark.parametrize("name", list(TRACED))


@every_trace
@pytest.mark.parametrize("max_steps", [3, 60])
def test_the_path_of_a_sample_begins_at_z0_and_ends_where_it_was_done(name: str, max_steps: int) -> None:
    fn, solver, n = TRACED[name]
    z0 = 0.1 * torch.randn(12, n, generator=torch.Generator().manual_seed(1), dtype=f64)
    found = solve(fn, z0, solver, Stop(rtol=1e-6, max_steps=max_steps), iterates=True)
    trace = found.trace
    assert trace is not None
    for i in range(12):
        path, seen = trace.path(i), trace.of(i)
        assert path.shape == (int(found.steps[i]) + 1, n)
        assert torch.equal(path[0], z0[i])
        assert (path == found.z[i]).all(dim=1).any()  # the best iterate is on the path
        if found.converged[i]:
            assert torch.equal(path[-1], found.z[i])
            assert seen[-1] == found.residual[i]
        single = fn.select(torch.tensor([i]))
        assert seen.tolist() == pytest.approx([residual(single, z[None])[0] for z in path], rel=1e-6, abs=1e-13)
    assert len(trace.evals) == int(found.steps.max()) + 1
    assert list(trace.evals) == sorted(trace.evals)
    assert trace.evals[-1] == found.evals
    if max_steps == 60 and not solver.selective and "ForwardBackward" not in name:
        assert found.converged.any()


@every_trace
def test_recording_changes_nothing_of_the_solution(name: str) -> None:
    fn, solver, n = TRACED[name]
    z0, stop = zeros(12, n), Stop(rtol=1e-6, max_steps=40)
    alone = solve(fn, z0, solver, stop)
    for found in (solve(fn, z0, solver, stop, record=True), solve(fn, z0, solver, stop, iterates=True)):
        assert torch.equal(found.z, alone.z)
        assert torch.equal(found.steps, alone.steps)
        assert torch.equal(found.codes, alone.codes)
        assert torch.equal(found.residual, alone.residual)
        assert found.evals == alone.evals


@pytest.mark.parametrize("damping", [1.0, 0.3])
def test_the_path_of_plain_iteration_is_plain_iteration(damping: float) -> None:
    fn = uneven_tanh(batch=6)
    found = solve(fn, torch.zeros_like(fn.u), Picard(damping), Stop(rtol=1e-4), iterates=True)
    assert found.trace is not None
    for i in range(6):
        single, z = fn.select(torch.tensor([i])), zeros(1, 10)
        for step in found.trace.path(i):
            assert torch.allclose(step, z[0], rtol=1e-12, atol=1e-14)
            z = (1 - damping) * z + damping * single(z)


def test_paths_are_copies() -> None:
    z0 = zeros(2, 3)
    trace = solve(torch.cos, z0, Picard(), iterates=True).trace
    assert trace is not None
    z0 += 1
    assert trace.path(0)[0].tolist() == [0, 0, 0]


def test_paths_are_copies_where_f_answers_in_memory_of_its_own() -> None:
    buffer = zeros(2, 3)

    def f(z: Tensor) -> Tensor:
        return torch.cos(z, out=buffer)

    found = solve(f, zeros(2, 3), Picard(), Stop(rtol=1e-3), iterates=True)
    assert found.trace is not None
    path, z = found.trace.path(1), zeros(3)
    assert len(path) > 3
    for step in path:
        assert torch.allclose(step, z)
        z = torch.cos(torch.cos(z))  # f overwrites z with its image, from where plain iteration goes on


def test_a_sample_that_meets_nan_has_a_path_that_ends_there() -> None:
    z0 = torch.tensor([[4.0], [2.0], [math.nan]], dtype=f64)
    found = solve(lambda z: torch.sqrt(z - 1), z0, Picard(), Stop(rtol=1e-9), iterates=True)
    assert found.trace is not None
    assert set(found.statuses) == {Status.NONFINITE}
    assert found.trace.path(0).squeeze()[:2].tolist() == [4.0, 3**0.5]
    assert found.trace.path(2).isnan().tolist() == [[True]]
    assert found.trace.of(2).isnan().tolist() == [True]


def test_no_iterates_unless_asked() -> None:
    trace = solve(torch.cos, zeros(1, 3), Picard(), record=True).trace
    assert trace is not None
    assert trace.z is None
    with pytest.raises(ValueError, match=r"record\(iterates=True\)"):
        trace.path(0)


def layer(gradient: Unrolled | None = None, solver: Solver | None = None) -> tuple[Equilibrium, Tensor]:
    torch.manual_seed(0)
    return Equilibrium(OptEq(3, 6, 5).double(), solver, gradient=gradient), torch.randn(4, 3, dtype=f64)


def test_record_collects_iterates_of_forward_and_backward_solves() -> None:
    model, x = layer()
    with record(iterates=True) as log:
        z = model(x)
        z.sum().backward()
    forward, backward = (solution.trace for solution in log)
    assert forward is not None
    assert backward is not None
    for i in range(4):
        assert torch.equal(forward.path(i)[-1], z[i])
        assert torch.equal(backward.path(i)[-1], log[1].z[i])
        assert not forward.path(i).requires_grad


def test_a_record_without_iterates_is_not_given_them() -> None:
    model, x = layer()
    with record() as log:
        model(x)
    assert log[0].trace is not None
    assert log[0].trace.z is None


@dataclass(frozen=True)
class _Guess(ValueState):
    """Plain iteration that calls f(z) an estimate."""

    exact = False

    def value(self) -> Tensor:
        return State.value(self)


@dataclass(frozen=True)
class Guessing(Solver):
    differentiable = True

    def init(self, fn: Map, z0: Tensor) -> State:
        return _Guess(z0, 1, fn(z0))

    def step(self, fn: Map, state: State) -> State:
        assert isinstance(state, _Guess)
        return _Guess(state.fz, state.evals + 1, fn(state.fz))


@pytest.mark.parametrize("solver", [None, Guessing()], ids=["exact", "estimated"])
def test_an_unrolled_network_records_the_states_of_its_layers(solver: Solver | None) -> None:
    model, x = layer(Unrolled(5), solver)
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.cell.W)
    with record(iterates=True) as log:
        z = model(x)
        (found,) = torch.autograd.grad(z.square().sum(), model.cell.W)
    assert torch.equal(found, expected)
    trace = log[0].trace
    assert trace is not None
    fn, state = model.cell.bind(x).detach(), zeros(4, 6)
    assert trace.evals == (1, 2, 3, 4, 5, 6)
    for step in range(6):
        assert trace.rows[step].tolist() == [0, 1, 2, 3]
        assert torch.allclose(torch.stack([trace.path(i)[step] for i in range(4)]), state, rtol=1e-12, atol=1e-15)
        assert trace.residual[step].tolist() == pytest.approx(residual(fn, state).tolist())
        state = fn(state)
    assert not any(each.requires_grad for each in trace.z or ())
    assert torch.equal(trace.path(2)[-1], z[2])


def test_an_unrolled_network_records_no_more_than_asked() -> None:
    model, x = layer(Unrolled(3))
    assert model.solve(x).trace is None
    with record() as log:
        model(x)
    assert log[0].trace is not None
    assert log[0].trace.z is None
    assert len(log[0].trace.of(0)) == 4


def test_unsound_samples_of_an_unrolled_network_have_no_path() -> None:
    model, x = layer(Unrolled(3))
    model.on_failure = "ignore"
    x[1, 0] = math.nan
    with record(iterates=True) as log:
        model(x)
    assert log[0].trace is not None
    assert len(log[0].trace.path(0)) == 4
    assert len(log[0].trace.path(1)) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in forward mode
def test_unrolled_iterates_are_plain_tensors_inside_transforms_and_none_inside_vmap() -> None:
    model, x = layer(Unrolled(3))
    with record(iterates=True) as log:
        z = model(x).detach()
        torch.func.grad(lambda x: model(x).sum())(x)
        torch.func.jvp(model, (x,), (x,))
        torch.func.vmap(lambda row: model(row[None]))(x)
    for solution in log[1:3]:
        assert solution.trace is not None
        assert solution.trace.z is not None
        assert torch.allclose(solution.trace.path(3)[-1], z[3])
        assert not any(is_transformed(tensor) for tensor in (*solution.trace.rows, *solution.trace.residual, *solution.trace.z))
    assert log[3].trace is None


def test_the_arguments_are_left_alone() -> None:
    fn = uneven_tanh(batch=16)
    before = [leaf.tensor.clone() for leaf in fn.leaves()]
    z0 = torch.randn(16, 10, dtype=f64, generator=torch.Generator().manual_seed(0))
    kept = z0.clone()
    for solver in (Picard(), Picard(0.5), *ACCELERATED):
        solve(fn, z0, solver, Stop(rtol=1e-9, max_steps=300))
        assert torch.equal(z0, kept)
        assert all(torch.equal(leaf.tensor, b) for leaf, b in zip(fn.leaves(), before, strict=True))


def test_a_stride_of_the_start_does_not_matter() -> None:
    z0 = torch.randn(3, 4, 5, dtype=f64, generator=torch.Generator().manual_seed(0))
    for solver in (Picard(), *ACCELERATED):
        stop = Stop(rtol=1e-10)
        found = solve(lambda z: 0.5 * torch.cos(z), z0.transpose(1, 2), solver, stop)
        same = solve(lambda z: 0.5 * torch.cos(z), z0.transpose(1, 2).contiguous(), solver, stop)
        assert found.status is Status.CONVERGED
        assert torch.allclose(found.z, same.z, rtol=1e-9)


def test_the_default_stop_and_the_empty_worst_status() -> None:
    assert solve(torch.cos, zeros(1, 3), Picard()).stop == Stop(rtol=1e-4, atol=0.0, max_steps=100)
    none = torch.zeros(0, dtype=torch.long)
    assert Solution(zeros(0, 3), none, zeros(0), none, 0, Stop()).status is Status.CONVERGED


# Norms


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-38, 1e-30, 1.0, 1e30, 1e38, 1e300])
def test_norms_neither_overflow_nor_vanish(scale: float, dtype: torch.dtype) -> None:
    z = torch.tensor([[3.0, 4.0], [0.3, -0.4]], dtype=f64).mul(scale / 10).to(dtype)
    expected = z.double().abs().amax(1) * (1.25 if scale else 0)
    assert torch.allclose(norm(z).double(), expected, rtol=1e-5, atol=0, equal_nan=True) or not z.isfinite().all()


def test_the_norm_of_nonfinite_samples_is_nonfinite_and_stays_with_them() -> None:
    z = torch.tensor([[3.0, 4.0], [math.nan, 0.0], [math.inf, 1.0], [0.0, 0.0], [1e-30, 0.0]])
    found = norm(z)
    assert found[[0, 3, 4]].tolist() == pytest.approx([5.0, 0.0, 1e-30])
    assert not found[1:3].isfinite().any()


# Maps


@dataclass(frozen=True)
class Scaled(Map):
    a: Tensor  # [n]
    b: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return torch.sin(self.a * z) + self.b


def test_a_map_selects_only_per_sample_tensors() -> None:
    fn = Scaled(torch.arange(3.0), torch.arange(12.0).reshape(4, 3))
    chosen = fn.select(torch.tensor([2, 0]))
    assert torch.equal(chosen.a, fn.a)
    assert torch.equal(chosen.b, fn.b[[2, 0]])
    assert fn.b.shape == (4, 3)


def test_a_detached_map_is_outside_of_the_graph() -> None:
    fn = Scaled(torch.arange(3.0, requires_grad=True), torch.zeros(4, 3, requires_grad=True))
    assert not any(leaf.tensor.requires_grad for leaf in fn.detach().leaves())
    assert fn.a.requires_grad


def test_the_derived_jacobian_is_the_jacobian() -> None:
    g = torch.Generator().manual_seed(0)
    fn = uneven_tanh(batch=3, n=4)
    z, v = torch.randn(3, 4, generator=g, dtype=f64), torch.randn(3, 4, generator=g, dtype=f64)
    dense = torch.autograd.functional.jacobian(lambda y: fn(y).sum(0), z).permute(1, 0, 2)  # [sample, out, in]
    for jacobian in (Map.linearize(fn, z), fn.linearize(z)):
        assert torch.allclose(jacobian.jvp(v), torch.einsum("bij,bj->bi", dense, v))
        assert torch.allclose(jacobian.vjp(v), torch.einsum("bij,bi->bj", dense, v))
        assert jacobian.symmetric is False


def test_a_map_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Map()  # type: ignore[abstract]


# Bad arguments


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("solver", "anderson", TypeError, "a Solver, such as Anderson()"),
        ("solver", Anderson, TypeError, "a Solver, such as Anderson()"),
        ("solver", None, TypeError, "a Solver, such as Anderson()"),
        ("stop", 1e-4, TypeError, "a Stop"),
        ("stop", Stop, TypeError, "a Stop"),
        ("z0", torch.zeros(2, 3, dtype=torch.long), TypeError, "a floating-point tensor"),
        ("z0", torch.zeros(2, 3, dtype=torch.bool), TypeError, "a floating-point tensor"),
        ("z0", torch.zeros(2, 3, dtype=torch.complex64), TypeError, "a floating-point tensor"),
        ("z0", [[0.0]], TypeError, "a floating-point tensor"),
        ("z0", None, TypeError, "a floating-point tensor"),
        ("z0", torch.tensor(0.0), ValueError, r"of shape \[batch, ...\]"),
        ("fn", 3, TypeError, "a Map or a callable"),
        ("fn", None, TypeError, "a Map or a callable"),
    ],
)
def test_bad_arguments_of_solve(name: str, value: object, error: type[Exception], text: str) -> None:
    arguments: dict[str, object] = {"fn": torch.cos, "z0": torch.zeros(2, 3), "solver": Picard(), "stop": Stop(), name: value}
    with pytest.raises(error, match=rf"^The '{name}' parameter of solve must be .*{text}.*\. Got .* instead\.$"):
        solve(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", [Picard(), *ACCELERATED], ids=str)
@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda z: z.double(), r"the dtype of its state.*torch\.float32.*\. Got torch\.float64"),
        (lambda z: z[:, None], r"the shape of its state.*2, 1.*\. Got .*2, 1, 1\D*"),
        (lambda z: z.expand(2, 3), r"the shape of its state.*2, 1.*\. Got .*2, 3\D*"),
    ],
    ids=["dtype", "dimensions", "broadcast"],
)
def test_f_must_keep_the_shape_and_dtype(f: object, text: str, solver: Solver) -> None:
    with pytest.raises(ValueError, match=f"^The map f must return a tensor of {text} instead\\.$"):
        solve(f, torch.zeros(2, 1), solver)  # type: ignore[arg-type]


def test_a_map_that_is_no_dataclass_is_refused_with_the_reason() -> None:
    class Bare(CallableMap):
        def __call__(self, z: Tensor) -> Tensor:
            return z

    with pytest.raises(TypeError, match=r"^Bare must be decorated with @dataclass\(frozen=True\): its fields tell which tensors"):
        solve(Bare(torch.cos), torch.zeros(2, 3), Picard())


@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.5)], ids=str)
@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-6, 1e-8])
def test_plain_iteration_may_leave_an_unstable_equilibrium(solver: Solver, rtol: float) -> None:
    z0 = torch.zeros(2, 3, dtype=torch.float64)
    assert solve(lambda z: torch.tanh(3 * z) + 1e-12, z0, solver, Stop(rtol=rtol, max_steps=300)).status is Status.CONVERGED


def test_a_slow_contraction_in_float32_is_no_divergence() -> None:
    """z* = 6667: the growth passes 1/sqrt(eps) = 2900 before the residual has halved."""
    found = solve(lambda z: 0.99985 * z + 1, torch.zeros(1, 3), Picard(), Stop(rtol=1.5e-4, max_steps=6000))
    assert found.status is Status.CONVERGED
    assert found.z.min() > 2900


@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.5), Anderson(), Broyden(), Newton()], ids=str)
@pytest.mark.parametrize("rtol", [1e-1, 1e-2, 1e-3])
def test_a_residual_that_never_falls_is_no_solution_however_large_z_becomes(solver: Solver, rtol: float) -> None:
    z0 = torch.zeros(1, 3, dtype=torch.float64)
    max_steps = 100 if isinstance(solver, Newton) else math.ceil(2 / rtol)  # |f - z| <= rtol |f| holds on the way
    found = solve(lambda z: z + 1 + 0.3 * torch.sin(z), z0, solver, Stop(rtol=rtol, max_steps=max_steps))
    assert Status.CONVERGED not in found.statuses


def test_the_message_explains_a_tolerance_met_without_a_falling_residual() -> None:
    found = solve(lambda z: z + 1, torch.zeros(2, 3), Picard(), Stop(rtol=1e-2, max_steps=300))
    assert found.residual.max() <= 1e-2
    assert "2 met the tolerance only because |f(z)| is large: their residual did not fall" in found.explain()


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton()], ids=str)
def test_f_that_changes_its_input_is_refused(solver: Solver) -> None:
    with pytest.raises(ValueError, match="must not change its input z in place"):
        solve(lambda z: z.mul_(0.5).add_(1), torch.zeros(2, 3), solver, Stop())
    with pytest.raises(ValueError, match="must not change its input z in place"):  # though 0 stays 0
        solve(lambda z: 0.4 * z.relu_() - 1, torch.zeros(2, 3), solver, Stop())
    with torch.inference_mode(), pytest.raises(ValueError, match="must not change its input z in place"):
        solve(lambda z: z.mul_(0.5).add_(1), torch.zeros(2, 3), solver, Stop())


@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.5), Anderson(), Broyden()], ids=str)
def test_f_may_answer_in_a_buffer_of_its_own(solver: Solver) -> None:
    buffer = torch.empty(2, 3, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return torch.add(0.5 * z, 1, out=buffer)

    found = solve(f, torch.zeros(2, 3, dtype=torch.float64), solver, Stop(rtol=1e-10))
    assert found.status is Status.CONVERGED
    torch.testing.assert_close(found.z, torch.full_like(found.z, 2), rtol=1e-9, atol=0)


def test_f_must_return_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"must return a tensor\. Got tuple instead; pack several tensors into one"):
        solve(lambda z: (z, z), torch.zeros(2, 3), Picard(), Stop())


def test_a_tolerance_above_one_still_says_how_far_it_got() -> None:
    found = solve(lambda z: z + 1, torch.zeros(2, 3), Picard(), Stop(rtol=2.0, max_steps=3))
    assert found.residual.isfinite().all()


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 4)])
def test_an_empty_state_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no empty dimension but the batch"):
        solve(lambda z: z, torch.zeros(shape), Picard(), Stop())


@pytest.mark.parametrize(("dtype", "size", "rtol"), [(torch.float32, 2e5, 1e-4), (torch.float32, 2e6, 1e-4), (f64, 3e14, 1e-10)])
@pytest.mark.parametrize("solver", [Picard(), Anderson(), Newton()], ids=str)
def test_a_drift_that_is_lost_beside_the_rest_of_z_is_no_solution(
    solver: Solver, dtype: torch.dtype, size: float, rtol: float
) -> None:
    """One number grows by 1 a step, the other is at its equilibrium and so large that this is a few units of rounding."""

    def f(z: Tensor) -> Tensor:
        return torch.stack([z[:, 0] + 1, 0.5 * z[:, 1] + 0.5 * size], 1)

    z0 = torch.tensor([[0.0, size]], dtype=dtype)
    assert solve(f, z0, solver, Stop(rtol=rtol, max_steps=50)).status is not Status.CONVERGED


@pytest.mark.parametrize("mates", [0, 1])
def test_a_residual_that_equals_its_limit_to_the_bit_meets_it_alone_and_among_others(mates: int) -> None:
    """From 99 to 100 the relative residual is 1e-2, the tolerance; a step later there is nothing left of it."""

    def f(z: Tensor) -> Tensor:
        hard = torch.where(z == 0, 99.0, torch.where(z == 99, 100.0, math.nan))
        return torch.cat([hard[:1], torch.ones_like(z[1:])])

    found = solve(f, zeros(1 + mates, 8), Picard(), Stop(rtol=1e-2, max_steps=20))
    assert found.statuses == (Status.CONVERGED,) * (1 + mates)
    assert found.steps.tolist() == [1] * (1 + mates)
