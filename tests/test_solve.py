import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from conformance import check_honest, residual, uneven_cos, uneven_tanh
from opteq import ConvergenceError, Map, Solution, Solver, Status, Stop, per_sample, solve
from opteq.solve import CallableMap, Trace, norm
from opteq.solvers import Anderson, Broyden, Newton, Picard

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
