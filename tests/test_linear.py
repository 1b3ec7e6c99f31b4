import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Log, TanhMap, check_honest, distance, residual, rows_of, uneven_tanh
from opteq import Equilibrium, Map, Solver, Status, Stop, per_sample, solve
from opteq.cells import Monotone, OptEq
from opteq.gradients import Implicit
from opteq.linear import CG, GMRES, DualCG, LinearizedMap, Neumann, linear_solver
from opteq.solve import CallableMap, Jacobian
from opteq.solvers import Anderson, Broyden, Newton, Picard

f64 = torch.float64
GENERAL = [GMRES(), GMRES(restart=1), GMRES(restart=2), GMRES(restart=5), GMRES(restart=100), Neumann()]
LINEAR = [CG(), *GENERAL]
TIGHT = Stop(rtol=1e-11, max_steps=3000)


@dataclass(frozen=True)
class Dense(Map):
    """M z, each sample with its own M [batch, n, n]; products are logged."""

    closed: ClassVar[bool] = True
    M: Tensor = per_sample()
    log: Log = field(default_factory=Log)

    def __call__(self, z: Tensor) -> Tensor:
        return torch.einsum("bij,bj->bi", self.M, z)

    def linearize(self, z: Tensor) -> Jacobian:
        def jvp(v: Tensor) -> Tensor:
            self.log.rows.append(v.shape[0])
            return torch.einsum("bij,bj->bi", self.M, v)

        def vjp(v: Tensor) -> Tensor:
            self.log.rows.append(v.shape[0])
            return torch.einsum("bij,bi->bj", self.M, v)

        return Jacobian(jvp=jvp, vjp=vjp, symmetric=self.symmetric)


def dense(M: Tensor, g: Tensor, transposed: bool = False) -> LinearizedMap:
    return LinearizedMap(Dense(M), transposed, torch.zeros_like(g), g)


def exact(M: Tensor, g: Tensor, transposed: bool = False) -> Tensor:
    A = torch.eye(M.shape[-1], dtype=M.dtype) - (M.mT if transposed else M)
    return torch.linalg.solve(A, g)


def contractions(batch: int = 12, n: int = 8, norm: float = 0.8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    M = torch.randn(batch, n, n, generator=generator, dtype=f64)
    return M * (norm / torch.linalg.matrix_norm(M, 2))[:, None, None], torch.randn(batch, n, generator=generator, dtype=f64)


def symmetric(batch: int = 12, n: int = 8, low: float = -5.0, high: float = 0.95, seed: int = 0) -> tuple[Tensor, Tensor]:
    """M symmetric with a spectrum in [low, high], so that I - M is positive definite, and M need be no contraction."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(batch, n, n, generator=generator, dtype=f64))[0]
    spectrum = low + (high - low) * torch.rand(batch, 1, n, generator=generator, dtype=f64)
    return (Q * spectrum) @ Q.mT, torch.randn(batch, n, generator=generator, dtype=f64)


def zeros(g: Tensor) -> Tensor:
    return torch.zeros_like(g)


# Against dense linear algebra


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("solver", GENERAL, ids=str)
def test_general_systems(solver: Solver, transposed: bool) -> None:
    M, g = contractions()
    found = solve(dense(M, g, transposed), zeros(g), solver, TIGHT).raise_if_failed()
    assert distance(found.z, exact(M, g, transposed)) <= 1e-9


@pytest.mark.parametrize("solver", [CG(), GMRES(), GMRES(restart=4)], ids=str)
def test_symmetric_positive_definite_systems(solver: Solver) -> None:
    M, g = symmetric()
    found = solve(dense(M, g), zeros(g), solver, TIGHT).raise_if_failed()
    assert distance(found.z, exact(M, g)) <= 1e-9
    assert isinstance(solver, GMRES) or int(found.steps.max()) <= 2 * 8


def quick_and_slow() -> tuple[Tensor, Tensor]:
    """Samples whose series is quick, slow, diverges, or is quick for two terms and then grows."""
    M, g = contractions(norm=1.0)
    M = M * torch.tensor([0.05, 0.25, 0.9, 3.0] * 3, dtype=f64)[:, None, None]
    ramp = torch.diag(torch.tensor([0.1, 0.1, 2.0, 2.0, 2.0, 2.0, 2.0], dtype=f64), -1)  # e1 -> 0.1 e2 -> 0.01 e3 -> 0.02 e4 ...
    M[::4], g[::4] = ramp, torch.eye(8, dtype=f64)[0] * torch.tensor([[1.0], [2.0], [3.0]], dtype=f64)
    return M, g


@pytest.mark.parametrize("restart", [2, 5, 30])
def test_gmres_sums_the_series_for_each_sample_as_long_as_that_is_quick(restart: int) -> None:
    M, g = quick_and_slow()
    stop = Stop(rtol=1e-10, max_steps=60)
    found = solve(dense(M, g), zeros(g), GMRES(restart), stop)
    right = (found.z - exact(M, g)).norm(dim=1) <= 1e-8 * exact(M, g).norm(dim=1)
    assert torch.equal(right, found.converged)
    assert bool(found.converged.all()) or restart < 8  # short cycles may make no progress where the series diverges
    for i in range(len(g)):
        alone = solve(dense(M[i : i + 1], g[i : i + 1]), zeros(g[:1]), GMRES(restart), stop)
        assert int(alone.steps) == int(found.steps[i])
        assert distance(alone.z, found.z[i : i + 1]) <= 1e-8


def test_gmres_holds_no_basis_while_the_series_is_quick() -> None:
    M, g = contractions(norm=0.2)
    equation, solver = dense(M, g), GMRES()
    state = solver.init(equation, zeros(g))
    for _ in range(5):
        state = solver.step(equation, state)
    assert state.V.shape[1] == 1
    series = sum(torch.linalg.matrix_power(M, k) @ g[:, :, None] for k in range(5))
    assert distance(state.z, series[:, :, 0]) <= 1e-14


@pytest.mark.parametrize("restart", range(1, 10))
def test_gmres_with_every_restart(restart: int) -> None:
    M, g = contractions(norm=0.7)
    found = solve(dense(M, g), zeros(g), GMRES(restart=restart, brisk=0), TIGHT).raise_if_failed()
    assert distance(found.z, exact(M, g)) <= 1e-9
    assert int(found.steps.max()) > restart or restart >= 8  # several cycles, or one that is exact
    assert int(found.steps.max()) <= 8 or restart < 8


def test_gmres_does_not_need_a_contraction() -> None:
    M, g = contractions(norm=6.0)
    found = solve(dense(M, g), zeros(g), GMRES(), TIGHT).raise_if_failed()
    assert distance(found.z, exact(M, g)) <= 1e-8
    assert int(found.steps.max()) <= 9


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton()], ids=str)
def test_general_solvers_solve_linear_equilibria_too(solver: Solver) -> None:
    M, g = contractions()
    found = solve(dense(M, g), zeros(g), solver, TIGHT).raise_if_failed()
    assert distance(found.z, exact(M, g)) <= 1e-9


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("derived", [False, True], ids=["structured", "autograd"])
def test_the_linearisation_of_a_nonlinear_map(derived: bool, transposed: bool) -> None:
    base = uneven_tanh(batch=5, n=6)
    generator = torch.Generator().manual_seed(1)
    z, g = torch.randn(5, 6, generator=generator, dtype=f64), torch.randn(5, 6, generator=generator, dtype=f64)
    J = torch.autograd.functional.jacobian(lambda y: base(y).sum(0), z).permute(1, 0, 2)
    fn: Map = Derived(base.W, base.u) if derived else base
    equation = LinearizedMap(fn, transposed, z, g)
    found = solve(equation, zeros(g), GMRES(), TIGHT).raise_if_failed()
    assert distance(found.z, exact(J, g, transposed)) <= 1e-9
    v = torch.randn(5, 6, generator=generator, dtype=f64)
    M = J.mT if transposed else J
    assert torch.allclose(equation.linearize(z).jvp(v), torch.einsum("bij,bj->bi", M, v))
    assert torch.allclose(equation.linearize(z).vjp(v), torch.einsum("bij,bi->bj", M, v))


@pytest.mark.parametrize("transposed", [False, True], ids=["tangent", "adjoint"])
@pytest.mark.parametrize("inside", [False, True], ids=["made there", "inside"])
def test_inference_mode_linearises_too(inside: bool, transposed: bool) -> None:
    base = uneven_tanh(batch=5, n=6)
    with torch.inference_mode():
        z, g = torch.full((5, 6), 0.5, dtype=f64), torch.ones(5, 6, dtype=f64)
    J = torch.autograd.functional.jacobian(lambda y: base(y).sum(0), z.clone()).permute(1, 0, 2)
    with torch.inference_mode(inside):
        found = solve(LinearizedMap(Derived(base.W, base.u), transposed, z, g), torch.zeros_like(g), GMRES(), TIGHT)
        assert distance(found.z, exact(J, g.clone(), transposed)) <= 1e-9


@pytest.mark.parametrize(("transposed", "most"), [(True, 1), (False, 1)], ids=["adjoint", "tangent"])
def test_a_map_is_linearised_once_however_many_products_follow(transposed: bool, most: int) -> None:
    base, calls = uneven_tanh(batch=5, n=6), []

    def f(z: Tensor) -> Tensor:
        calls.append(z)
        return base(z)

    g = torch.ones(5, 6, dtype=f64)
    found = solve(LinearizedMap(CallableMap(f), transposed, g / 2, g), zeros(g), GMRES(brisk=0), TIGHT).raise_if_failed()
    assert found.evals > most
    assert len(calls) <= most


@dataclass(frozen=True)
class Derived(TanhMap):
    def linearize(self, z: Tensor) -> Jacobian:
        return Map.linearize(self, z)


@pytest.mark.parametrize("solver", LINEAR, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 2, 2)])
def test_any_state_shape(solver: Solver, shape: tuple[int, ...]) -> None:
    rate = torch.linspace(-0.5, 0.5, 4, dtype=f64).reshape(4, *[1] * len(shape))
    base = Diagonal(rate.expand(4, *shape))
    g = torch.ones(4, *shape, dtype=f64)
    found = solve(LinearizedMap(base, False, zeros(g), g), zeros(g), solver, TIGHT).raise_if_failed()
    assert torch.allclose(found.z, g / (1 - rate), rtol=1e-9)


@dataclass(frozen=True)
class Diagonal(Map):
    d: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return self.d * z

    def linearize(self, z: Tensor) -> Jacobian:
        return Jacobian(jvp=lambda v: self.d * v, vjp=lambda v: self.d * v, symmetric=True)


# The start


@pytest.mark.parametrize("solver", LINEAR, ids=str)
def test_a_start_other_than_zero(solver: Solver) -> None:
    M, g = symmetric(low=-0.7, high=0.7)
    z0 = 10 * g.flip(0)
    found = solve(dense(M, g), z0, solver, TIGHT).raise_if_failed()
    assert distance(found.z, exact(M, g)) <= 1e-9


@pytest.mark.parametrize("solver", LINEAR, ids=str)
def test_a_start_at_the_solution_takes_no_step(solver: Solver) -> None:
    M, g = symmetric(low=-0.7, high=0.7)
    found = solve(dense(M, g), exact(M, g), solver, Stop(rtol=1e-10))
    assert found.status is Status.CONVERGED
    assert found.steps.tolist() == [0] * len(g)


@pytest.mark.parametrize("solver", LINEAR, ids=str)
def test_a_zero_right_side_is_solved_by_zero_at_once_and_does_not_disturb_the_others(solver: Solver) -> None:
    M, g = symmetric(low=-0.7, high=0.7)
    some = g.clone()
    some[[0, 5]] = 0
    found = solve(dense(M, some), zeros(g), solver, TIGHT).raise_if_failed()
    assert found.z[[0, 5]].abs().max() == 0
    assert found.residual[[0, 5]].tolist() == [0, 0]
    assert found.steps[[0, 5]].tolist() == [0, 0]
    others = [i for i in range(12) if i not in (0, 5)]
    assert distance(found.z[others], exact(M, g)[others]) <= 1e-9


# Samples on their own


@pytest.mark.parametrize("solver", [CG(), GMRES(), GMRES(restart=3), Neumann()], ids=str)
def test_each_sample_stops_on_its_own_residual(solver: Solver) -> None:
    M, g = symmetric(batch=32, n=10, low=-0.9, high=0.9)
    M = M * torch.linspace(0.02, 1, 32, dtype=f64)[:, None, None]
    stop = Stop(rtol=1e-10, max_steps=2000)
    fn = dense(M, g)
    found = solve(fn, zeros(g), solver, stop).raise_if_failed()
    assert (residual(fn, found.z) <= 1e-10 * (1 + 1e-6)).all()
    assert len(set(found.steps.tolist())) >= 4
    assert min(fn.base.log.rows) <= 12  # compacted
    for i in range(0, 32, 5):
        alone = solve(dense(M[i : i + 1], g[i : i + 1]), zeros(g[:1]), solver, stop).raise_if_failed()
        assert distance(alone.z, found.z[i : i + 1]) <= 1e-12
        assert alone.steps[0] == found.steps[i]


@pytest.mark.parametrize("solver", [CG(), GMRES(), GMRES(restart=3), Neumann()], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["M", "g"])
def test_a_nonfinite_sample_is_set_aside(solver: Solver, bad: float, where: str) -> None:
    M, g = symmetric(batch=20, low=-0.8, high=0.8)
    clean = solve(dense(M, g), zeros(g), solver, TIGHT)
    M, g = M.clone(), g.clone()
    (M if where == "M" else g)[3].view(-1)[1] = bad
    found = solve(dense(M, g), zeros(g), solver, TIGHT)
    others = torch.arange(20) != 3
    assert found.statuses[3] is Status.NONFINITE
    assert found.z.isfinite().all()
    assert found.converged[others].all()
    assert distance(found.z[others], clean.z[others]) <= 1e-12
    assert torch.equal(found.steps[others], clean.steps[others])
    assert found.evals <= clean.evals + 1


# Scales and precision


@pytest.mark.parametrize("solver", [CG(), GMRES(), GMRES(restart=3), Neumann()], ids=str)
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_no_scale_overflows_or_vanishes_in_float32(solver: Solver, scale: float) -> None:
    M, g = symmetric(low=-0.7, high=0.7)
    found = solve(dense(M.float(), (scale * g).float()), zeros(g).float(), solver, Stop(rtol=1e-5, max_steps=200)).raise_if_failed()
    assert distance(found.z.double(), exact(M, scale * g)) <= 1e-4


@pytest.mark.parametrize("solver", LINEAR, ids=str)
def test_products_are_counted_exactly(solver: Solver) -> None:
    M, g = symmetric(low=-0.9, high=0.9)
    for start in (zeros(g), g):
        for stop in (TIGHT, Stop(rtol=1e-10, max_steps=3), Stop(rtol=0.5)):
            fn = dense(M, g)
            found = solve(fn, start, solver, stop)
            assert found.evals == len(fn.base.log.rows) > 0
            assert int(found.steps.max()) <= stop.max_steps


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    solver=st.sampled_from(LINEAR),
    norm=st.floats(0.0, 20.0),
    rtol=st.sampled_from([0.5, 1e-3, 1e-8, 1e-12, 1e-15]),
    n=st.integers(1, 7),
    symmetrised=st.booleans(),
    dtype=st.sampled_from([torch.float32, f64]),
    max_steps=st.integers(1, 40),
)
def test_what_is_called_converged_is(
    seed: int, solver: Solver, norm: float, rtol: float, n: int, symmetrised: bool, dtype: torch.dtype, max_steps: int
) -> None:
    M, g = contractions(batch=3, n=n, norm=norm, seed=seed)
    M = (0.5 * (M + M.mT) if symmetrised else M).to(dtype)
    g = g.to(dtype)
    found = solve(dense(M, g), zeros(g), solver, Stop(rtol=rtol, max_steps=max_steps))
    true = residual(dense(M.double(), g.double()), found.z.double())
    slack = 10 * n * (1 + norm) * torch.finfo(dtype).eps  # the rounding of one product
    assert (true <= rtol * (1 + 1e-3) + slack)[found.converged.numpy()].all()
    finite = found.residual.isfinite().numpy()
    told = found.residual.numpy()[finite]
    assert (abs(true[finite] - told) <= 1e-3 * told + slack).all()


# What cannot be solved


@pytest.mark.parametrize("max_steps", [1, 20])
def test_cg_does_not_move_along_negative_curvature(max_steps: int) -> None:
    g = torch.ones(2, 3, dtype=f64)
    M = 3 * torch.eye(3, dtype=f64).repeat(2, 1, 1)  # I - M = -2 I
    found = solve(dense(M, g), zeros(g), CG(), Stop(rtol=1e-6, max_steps=max_steps))
    assert not found.converged.any()
    assert torch.equal(found.z, zeros(g))
    assert found.residual.tolist() == [1, 1]


def test_newton_solves_an_adjoint_of_samples_that_end_at_different_steps() -> None:
    torch.manual_seed(0)
    cell, x = Monotone(4, 8, activation="tanh").double(), torch.randn(16, 4, dtype=torch.float64)
    x *= torch.logspace(-2, 2, 16, dtype=torch.float64)[:, None]  # the Jacobians of some are nearly zero
    layers = [Equilibrium(cell, gradient=Implicit(linear=linear), on_failure="raise") for linear in (Newton(), None)]
    found, exact = (torch.autograd.grad(layer(x).square().sum(), cell.B)[0] for layer in layers)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


def test_cg_reports_no_success_on_indefinite_systems_and_solves_the_definite_samples() -> None:
    M, g = symmetric(batch=8, low=-1.0, high=0.9)
    M[::2] += 4 * g[::2, :, None] * g[::2, None, :] / (g[::2] ** 2).sum(1)[:, None, None]  # negative curvature along g
    found = solve(dense(M, g), zeros(g), CG(), Stop(rtol=1e-9, max_steps=100))
    assert found.converged.tolist() == [False, True] * 4
    assert distance(found.z[1::2], exact(M, g)[1::2]) <= 1e-7
    assert found.z.isfinite().all()


@pytest.mark.parametrize("solver", [CG(), GMRES(), GMRES(restart=2), Neumann()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("start", [0.0, 1e6])
@pytest.mark.parametrize("rtol", [0.5, 1e-6])
def test_singular_systems_neither_crash_nor_converge(solver: Solver, dtype: torch.dtype, start: float, rtol: float) -> None:
    g = torch.ones(2, 3, dtype=dtype)
    M = torch.eye(3, dtype=dtype).repeat(2, 1, 1)  # v = v + g
    found = solve(dense(M, g), torch.full_like(g, start), solver, Stop(rtol=rtol, max_steps=40))
    assert not found.converged.any()
    assert found.z.isfinite().all()


def test_gmres_solves_the_consistent_part_of_a_singular_system() -> None:
    M = torch.diag(torch.tensor([1.0, 0.5, 0.5, 0.2], dtype=f64))[None]
    consistent = solve(dense(M, torch.tensor([[0.0, 1, 2, 3]], dtype=f64)), torch.zeros(1, 4, dtype=f64), GMRES(), TIGHT)
    assert consistent.status is Status.CONVERGED
    assert torch.allclose(consistent.z, torch.tensor([[0.0, 2, 4, 3.75]], dtype=f64))


def test_neumann_diverges_where_the_series_does() -> None:
    M, g = contractions(norm=0.5)
    M = M + 2 * torch.eye(8, dtype=f64)
    found = solve(dense(M, g), zeros(g), Neumann(), Stop(max_steps=1000))
    assert set(found.statuses) == {Status.DIVERGED}
    assert int(found.steps.max()) < 200


@pytest.mark.parametrize("solver", [CG(), GMRES(), Neumann()], ids=str)
@pytest.mark.parametrize("fn", [torch.cos, uneven_tanh(batch=2, n=3)], ids=["callable", "map"])
def test_a_nonlinear_map_is_refused_and_the_solvers_that_fit_are_named(solver: Solver, fn: object) -> None:
    name = type(solver).__name__
    with pytest.raises(TypeError, match=rf"^{name} solves linear equilibria .* Got (CallableMap|TanhMap) instead; .*Anderson.*"):
        solve(fn, torch.zeros(2, 3, dtype=f64), solver)  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", LINEAR, ids=str)
def test_an_empty_batch_is_solved(solver: Solver) -> None:
    g = torch.zeros(0, 3)
    found = solve(dense(torch.zeros(0, 3, 3), g), g, solver)
    assert found.status is Status.CONVERGED
    assert found.z.shape == (0, 3)


@pytest.mark.parametrize("solver", LINEAR, ids=str)
def test_the_arguments_are_left_alone(solver: Solver) -> None:
    M, g = symmetric(low=-0.7, high=0.7)
    kept = (M.clone(), g.clone())
    for start in (zeros(g), g):
        z0 = start.clone()
        found = solve(dense(M, g), z0, solver, Stop(rtol=1e-8))
        found.z.fill_(77.0)
        assert torch.equal(z0, start)
        assert torch.equal(M, kept[0])
        assert torch.equal(g, kept[1])


def test_a_linearised_map_takes_its_kind_from_its_base() -> None:
    base = uneven_tanh(batch=2, n=3)
    fn = LinearizedMap(base, True, base.u, base.u)
    assert (fn.closed, fn.symmetric, fn.independent) == (True, False, True)
    assert [leaf.name for leaf in fn.leaves()] == ["base.W", "base.u", "z", "g"]
    assert fn.select(rows_of(1)).base.W.shape == (1, 3, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("restart", [2, 30])
@pytest.mark.parametrize("n", [4, 5, 6, 7])
def test_gmres_does_not_converge_on_inconsistent_systems(n: int, restart: int, dtype: torch.dtype) -> None:
    seeds = range(n - 4, 60, 4)
    rest = torch.stack([torch.rand(n - 1, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    M = torch.diag_embed(torch.cat([torch.ones(len(seeds), 1), 0.8 * rest], dim=1)).to(dtype)
    g = torch.ones(len(seeds), n, dtype=dtype)
    found = solve(dense(M, g), torch.zeros_like(g), GMRES(restart), Stop(rtol=1e-4))
    assert not found.converged.any(), found.z
    assert found.z.isfinite().all()
    assert (found.residual > 1e-4).all()


def test_a_diverging_series_returns_the_start_with_its_true_residual() -> None:
    M, g = 2 * torch.eye(3, dtype=f64)[None], torch.ones(1, 3, dtype=f64)
    fn = dense(M, g)
    found = solve(fn, zeros(g), Neumann(), Stop())
    assert found.status is Status.DIVERGED
    assert torch.equal(found.z, zeros(g))
    assert found.residual.item() == 1  # |f(0) - 0| / |f(0)|
    assert found.evals == len(fn.base.log.rows)


def test_where_f_vanishes_the_relative_residual_is_infinite() -> None:
    """v = -v + g from v = 0: the first term of the series is g, where f(g) = 0."""
    found = solve(dense(-torch.ones(1, 1, 1), torch.ones(1, 1)), torch.zeros(1, 1), Neumann(), Stop(max_steps=1))
    assert found.status is Status.MAX_STEPS
    assert found.residual.item() == float("inf")


@pytest.mark.parametrize("mu", [1.0, 2.5])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid"])
def test_cg_in_the_dual_solves_the_primal_system(name: str, alpha: float, mu: float) -> None:
    torch.manual_seed(0)
    cell = OptEq(3, 7, 5, activation=name, alpha=alpha, mu=mu).double()
    with torch.no_grad():
        cell.W.mul_((0.95 * mu / cell.activation.lipschitz) ** 0.5 / torch.linalg.matrix_norm(cell.W, 2))
    fn, z = cell.bind(torch.randn(4, 3).double()).detach(), torch.randn(4, 7).double()
    scale = torch.tensor([[1.0], [1e30], [1e-30], [1.0]], dtype=torch.float64)  # of each sample
    g = scale * torch.randn(4, 7).double()
    g[3] = 0
    J = torch.stack([torch.func.jacrev(lambda v, i=i: fn.select(torch.tensor([i]))(v[None])[0])(z[i]) for i in range(4)])
    exact = torch.linalg.solve(torch.eye(7).double() - J, g[:, :, None])[:, :, 0]
    for transposed, v0 in itertools.product((False, True), (torch.zeros_like(g), scale * torch.randn(4, 7).double(), exact)):
        equation = LinearizedMap(fn, transposed, z, g)
        found = solve(equation, v0, DualCG(), Stop(rtol=1e-11, max_steps=200))
        sound = torch.arange(4) < (4 if not v0.any() else 3)  # a zero solution has no relative residual but from zero
        assert found.converged[sound].all()
        check_honest(found, equation)
        torch.testing.assert_close((found.z / scale)[sound], (exact / scale)[sound], rtol=1e-7, atol=1e-8)
    assert solve(equation, torch.zeros_like(g), DualCG(), Stop(rtol=1e-11)).steps[3] == 0
    assert solve(equation, exact, DualCG(), Stop(rtol=1e-11)).steps.tolist() == [0, 0, 0, 0]


def test_the_dual_needs_a_dense_layer() -> None:
    fn = LinearizedMap(CallableMap(torch.cos), False, torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match="DualCG needs a map that has a dual"):
        solve(fn, torch.zeros(1, 2), DualCG())
    assert isinstance(linear_solver(OptEq(3, 7, 5).bind(torch.zeros(1, 3))), DualCG)
    assert type(linear_solver(OptEq(3, 2, 5).bind(torch.zeros(1, 3)))) is CG  # hidden > 2 features: W W' does not pay
