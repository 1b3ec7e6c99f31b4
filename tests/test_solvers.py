import functools
import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import (
    SolverConformance,
    TanhMap,
    check_honest,
    distance,
    residual,
    rows_of,
    spoilt_run,
    uneven_cos,
    uneven_run,
    uneven_tanh,
    write_verify,
)
from opteq import Solver, Status, Stop, solve
from opteq.linear import CG, GMRES, linear_solver
from opteq.solve import CallableMap
from opteq.solvers import Accelerated, Anderson, Broyden, Newton, Picard
from problems import SOLVABLE, Problem, zoo

SOLVERS: dict[str, Solver] = {
    "Picard": Picard(),
    "Picard(damping=0.5)": Picard(damping=0.5),
    "Anderson": Anderson(),
    "Anderson(memory=1)": Anderson(memory=1),
    "Anderson(memory=12)": Anderson(memory=12),
    "Accelerated": Accelerated(),
    "Accelerated(modulus=0.1)": Accelerated(modulus=0.1),
    "Broyden": Broyden(),
    "Broyden(memory=2)": Broyden(memory=2),
    "Newton": Newton(),
}
every_solver = pytest.mark.parametrize("solver", list(SOLVERS.values()), ids=list(SOLVERS))
PROBLEMS = zoo()

# The worst status of the batch for each problem; every solver not named reaches the first.
EXPECTED: dict[str, tuple[Status, dict[str, Status]]] = {name: (Status.CONVERGED, {}) for name in SOLVABLE}
CYCLING = ("Picard", "Accelerated", "Accelerated(modulus=0.1)")  # where the map is no contraction
EXPECTED["monotone, no contraction"] = (Status.CONVERGED, dict.fromkeys(CYCLING, Status.MAX_STEPS))
EXPECTED["rotation 0.9"] = (Status.CONVERGED, {"Accelerated(modulus=0.1)": Status.MAX_STEPS})  # as far from symmetric as can be
EXPECTED["no fixed point"] = (Status.MAX_STEPS, {})
EXPECTED["undefined"] = (Status.NONFINITE, {})


@every_solver
class TestConformance(SolverConformance):
    pass


@functools.cache
def exact(name: str) -> Tensor:
    return PROBLEMS[name].exact()


def max_steps(problem: Problem, expected: Status) -> int:
    if not problem.solvable:
        return 15
    return 300 if expected is Status.MAX_STEPS else 2500 if problem.slow else 1500


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("name", SOLVERS)
def test_every_problem_gets_the_right_status(name: str, problem: Problem) -> None:
    usual, others = EXPECTED[problem.name]
    expected = others.get(name, usual)
    found = solve(problem.map(), problem.z0(), SOLVERS[name], Stop(rtol=1e-11, max_steps=max_steps(problem, expected)))
    assert found.status is expected, found.explain()
    if usual is not Status.CONVERGED:
        assert set(found.statuses) == {usual}
    check_honest(found, problem.map())
    if problem.solvable:
        assert found.converged.tolist() == (residual(problem.map(), found.z) <= 1e-11).tolist()
        assert distance(found.z[found.converged], exact(problem.name)[found.converged]) <= 1e-8


@pytest.mark.parametrize("name", SOLVERS)
def test_the_default_tolerance_is_reached_in_float32(name: str) -> None:
    for problem in zoo(dtype=torch.float32).values():
        if problem.solvable and problem.contraction:
            found = solve(problem.map(), problem.z0(), SOLVERS[name], Stop(max_steps=2000)).raise_if_failed()
            check_honest(found, problem.map())


@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.5)], ids=str)
def test_elementwise_maps_give_the_same_bits_alone_and_among_others(solver: Solver) -> None:
    fn = uneven_cos()
    z0 = torch.zeros_like(fn.shift)
    stop = Stop(rtol=1e-10, max_steps=2000)
    among = solve(fn, z0, solver, stop)
    assert among.status is Status.CONVERGED
    assert min(fn.log.rows) < 16
    for i in range(0, 64, 7):
        alone = solve(fn.select(rows_of(i)), z0[:1], solver, stop)
        assert torch.equal(alone.z[0], among.z[i])
        assert torch.equal(alone.residual[0], among.residual[i])
        assert alone.steps[0] == among.steps[i]


@pytest.mark.parametrize("plain", [False, True], ids=["map", "callable"])
def test_a_nonfinite_sample_leaves_every_bit_of_the_others(plain: bool) -> None:
    fn, spoilt = uneven_cos(), uneven_cos()
    spoilt.shift[5, 0], spoilt.shift[50, 0] = math.nan, math.inf
    z0, stop = torch.zeros_like(fn.shift), Stop(rtol=1e-10, max_steps=2000)
    clean = solve(fn.__call__ if plain else fn, z0, Picard(), stop)
    found = solve(spoilt.__call__ if plain else spoilt, z0, Picard(), stop)
    others = torch.ones(64, dtype=torch.bool)
    others[[5, 50]] = False
    assert found.statuses[5] is found.statuses[50] is Status.NONFINITE
    assert torch.equal(found.z[others], clean.z[others])
    assert torch.equal(found.steps[others], clean.steps[others])
    assert found.evals <= clean.evals + 1


@pytest.mark.parametrize("plain", [False, True], ids=["map", "callable"])
@every_solver
def test_a_nonfinite_sample_costs_at_most_one_evaluation(solver: Solver, plain: bool) -> None:
    (clean, _), found = uneven_run(solver, plain), spoilt_run(solver, plain)
    assert found.evals <= clean.evals + 1


@pytest.mark.parametrize("damping", [1.0, 0.5, 0.1])
def test_damping_does_not_shrink_the_residual(damping: float) -> None:
    found = solve(
        lambda z: 0.5 * z + 1, torch.ones(2, 3, dtype=torch.float64), Picard(damping=damping), Stop(rtol=0.3, max_steps=1)
    )
    z = 1 + damping * 0.5
    assert found.residual.tolist() == pytest.approx([(1 - 0.5 * z) / (0.5 * z + 1)] * 2)


# Anderson


def symmetric_problem(seed: int, n: int = 64) -> tuple[Tensor, Tensor]:
    """W symmetric with a spectrum uniform in [-0.999, 0.999], and b, in float32."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    spectrum = 0.999 * (2 * torch.rand(n, generator=g, dtype=torch.float64) - 1)
    return ((Q * spectrum) @ Q.T).float(), torch.randn(1, n, generator=g)


def anderson_evaluations(seed: int) -> int:
    """Evaluations to a relative residual of 1e-5 in float32, checked in float64."""
    W, b = symmetric_problem(seed)
    found = solve(lambda z: z @ W + b, torch.zeros_like(b), Anderson(memory=20), Stop(rtol=1e-5, max_steps=99))
    assert found.status is Status.CONVERGED, f"seed {seed}: {found.explain()}"
    assert residual(lambda z: z @ W.double() + b.double(), found.z.double()).max() <= 1.1e-5
    return found.evals


def test_anderson_solves_indefinite_spectra_in_float32_within_100_evaluations() -> None:
    assert max(anderson_evaluations(seed) for seed in range(10)) <= 100


@pytest.mark.verify
def test_verify_anderson_float32_on_100_seeds() -> None:
    counts = [anderson_evaluations(seed) for seed in range(100)]
    write_verify(
        "anderson_float32",
        {
            "what": "evaluations to a relative residual of 1e-5 in float32: symmetric, n = 64, spectrum uniform in [-0.999, 0.999]",
            "solver": repr(Anderson(memory=20)),
            "evaluations": counts,
            "median": statistics.median(counts),
            "max": max(counts),
            "bound": 100,
        },
    )
    assert max(counts) <= 100


def random_walks(rates: list[float], n: int = 12) -> tuple[Tensor, Tensor]:
    """M [batch, n, n], each a rate times a random orthogonal matrix, and b: z = M z + b."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(len(rates), n, n, generator=generator, dtype=torch.float64))[0]
    return torch.tensor(rates, dtype=torch.float64)[:, None, None] * Q, torch.randn(len(rates), n, generator=generator).double()


def moved_by(M: Tensor, b: Tensor) -> CallableMap:
    return CallableMap(lambda z: (M @ z[:, :, None])[:, :, 0] + b)


def jumping(z: Tensor) -> Tensor:
    """|f(z) - z| is 1 at z = 0, and 99 after a plain step."""
    return torch.where(z > 0.5, 100 * z, 1 + 0 * z)


def test_anderson_takes_plain_steps_while_they_are_fast() -> None:
    M, b = random_walks([0.1, 0.3, 0.39])
    stop = Stop(rtol=1e-10)
    plain, lazy = (solve(moved_by(M, b), torch.zeros_like(b), solver, stop) for solver in (Picard(), Anderson()))
    assert torch.equal(lazy.z, plain.z)
    assert lazy.evals == plain.evals
    eager = solve(moved_by(M, b), torch.zeros_like(b), Anderson(brisk=0.0), stop)
    assert not torch.equal(eager.z, plain.z)


def test_anderson_accelerates_a_slow_sample_as_if_it_were_alone() -> None:
    M, b = random_walks([0.2, 0.97, 0.3])
    stop = Stop(rtol=1e-9)
    among = solve(moved_by(M, b), torch.zeros_like(b), Anderson(memory=12), stop)
    assert among.status is Status.CONVERGED
    assert among.steps[1] < 40  # plain steps would take 700
    for i in range(3):
        alone = solve(moved_by(M[i : i + 1], b[i : i + 1]), torch.zeros(1, 12, dtype=torch.float64), Anderson(memory=12), stop)
        assert alone.steps[0] == among.steps[i]
        torch.testing.assert_close(among.z[i], alone.z[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("mixing", [1.0, 0.4])
def test_anderson_takes_the_steps_of_its_formula(mixing: float) -> None:
    M, b = random_walks([0.9, 0.6])
    fn, solver = moved_by(M, b), Anderson(memory=2, mixing=mixing, brisk=0.0, restart=math.inf)
    state = solver.init(fn, torch.zeros_like(b))
    zs, rs = [state.z], [fn(state.z) - state.z]
    for k in range(6):
        dZ, dR = (torch.stack(found[-3:], 2).diff(dim=2) for found in (zs, rs))  # [batch, n, differences]
        wanted = zs[-1] + mixing * rs[-1]
        if k:
            c = torch.linalg.lstsq(dR, rs[-1][:, :, None]).solution
            wanted = wanted - ((dZ + mixing * dR) @ c)[:, :, 0]
        state = solver.step(fn, state)
        torch.testing.assert_close(state.z, wanted, rtol=1e-9, atol=1e-9)
        zs.append(state.z)
        rs.append(fn(state.z) - state.z)


@pytest.mark.parametrize(("restart", "kept"), [(10.0, 0.0), (200.0, 1.0)])
def test_anderson_forgets_its_history_after_a_step_that_made_a_sample_much_worse(restart: float, kept: float) -> None:
    fn = CallableMap(jumping)
    solver = Anderson(brisk=0.0, restart=restart)
    state = solver.step(fn, solver.init(fn, torch.zeros(2, 1, dtype=torch.float64)))
    assert state.size.tolist() == [99, 99]
    assert state.gram[:, 0, 0].tolist() == pytest.approx([kept, kept])
    assert state.best.tolist() == ([1, 1] if kept else [99, 99])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ridge", [None, 0.0, 1e-3])
@pytest.mark.parametrize("memory", [1, 2, 30])
def test_singular_gram_matrices_are_no_error(memory: int, ridge: float | None, dtype: torch.dtype) -> None:
    solver = Anderson(memory=memory, ridge=ridge)
    z0 = torch.zeros(3, 2, dtype=dtype)
    line = torch.tensor([0.3, 0.7], dtype=dtype)
    constant = solve(lambda z: line.expand(3, 2), z0, solver, Stop(rtol=1e-6))
    assert constant.status is Status.CONVERGED  # the differences vanish
    assert torch.equal(constant.z, line.expand(3, 2))
    shift = solve(lambda z: z + 1, z0, solver, Stop(rtol=1e-6, max_steps=40))
    assert set(shift.statuses) == {Status.MAX_STEPS}  # the differences of r are all zero
    parallel = solve(lambda z: 0.9 * z.mean(1, keepdim=True) + line, z0, solver, Stop(rtol=1e-5, max_steps=200))
    assert parallel.status is Status.CONVERGED  # the differences are all parallel
    stalled = solve(lambda z: torch.cos(z) + line, z0, solver, Stop(rtol=0.0, max_steps=60))
    assert stalled.residual.max() <= 1e-2  # steps go on at rounding level, with more memory than dimensions
    assert stalled.z.isfinite().all()


def test_more_memory_takes_fewer_evaluations() -> None:
    problem = PROBLEMS["linear, spectral radius 0.97"]
    counts = [solve(problem.map(), problem.z0(), Anderson(memory=m), Stop(rtol=1e-8, max_steps=3000)).evals for m in (1, 6, 12)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] <= 2 * 8 + 2  # on linear maps of dimension 8: about what GMRES does


# Accelerated


def test_momentum_begins_anew_where_it_opposes_the_step_or_the_residual_grew() -> None:
    rate = torch.tensor([[0.99, 0.5], [0.9, 0.97]], dtype=torch.float64)
    fn = CallableMap(lambda z: rate * z + 1)
    state, z = Accelerated().init(fn, torch.zeros_like(rate)), torch.zeros_like(rate)
    before, t, worst, restarts = z, torch.ones(2, dtype=torch.float64), torch.full((2,), math.inf, dtype=torch.float64), 0
    for _ in range(60):
        r, move = fn(z) - z, fn(z) - before
        opposed, grew = (r * move).sum(1) < 0, r.norm(dim=1) > worst
        t = torch.where(opposed | grew, 1.0, t)
        following = (1 + (1 + 4 * t**2).sqrt()) / 2
        worst, before, restarts = r.norm(dim=1).minimum(worst), fn(z), restarts + int((opposed & ~grew).sum())
        z, t = fn(z) + ((t - 1) / following)[:, None] * move, following
        state = Accelerated().step(fn, state)
        torch.testing.assert_close(state.z, z, rtol=1e-11, atol=1e-11)
    assert restarts > 1


# Broyden


def test_a_step_that_blows_up_is_refused() -> None:
    fn = CallableMap(jumping)
    z0 = torch.zeros(2, 1, dtype=torch.float64)
    start = Broyden().init(fn, z0)
    state = Broyden().step(fn, start)
    assert torch.equal(state.z, z0)
    assert torch.equal(state.size, start.size)
    after = Broyden().step(fn, state)
    assert after.z.tolist() == [[0.25], [0.25]]  # a quarter of the plain step
    assert [found.damping.tolist() for found in (state, after)] == [[0.25, 0.25], [0.5, 0.5]]
    bold = Broyden(growth=100.0)
    assert bold.step(fn, bold.init(fn, z0)).z.tolist() == [[1], [1]]
    assert solve(fn, z0, Broyden(), Stop(max_steps=30)).residual.max() <= 1


# Newton


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    norm=st.floats(0.1, 5.0),
    sigma=st.sampled_from([torch.relu, torch.tanh]),
    start=st.floats(-3, 3),
    n=st.integers(1, 6),
)
def test_newton_never_makes_the_residual_worse_than_the_start(seed: int, norm: float, sigma: object, start: float, n: int) -> None:
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(n, n, generator=g, dtype=torch.float64)
    W = W * norm / torch.linalg.matrix_norm(W, 2)
    b = torch.randn(3, n, generator=g, dtype=torch.float64)
    fn = CallableMap(lambda z: sigma(z @ W.T + b))  # type: ignore[operator]
    z0 = torch.full((3, n), start, dtype=torch.float64)
    first = (fn(z0) - z0).norm(dim=1)
    with torch.no_grad():
        state = Newton().init(fn, z0)
        for _ in range(5):
            before = state
            state = Newton().step(fn, state)
            size = (fn(state.z) - state.z).norm(dim=1)
            assert (size <= first * (1 + 1e-12)).all()
            plain = (state.z == before.value()).all(dim=1)  # where Newton's step does not let the residual fall
            assert (plain | (state.size <= before.size)).all()
            assert torch.allclose(size, state.size, rtol=1e-9, atol=1e-13)
    found = solve(fn, z0, Newton(), Stop(rtol=1e-10, max_steps=5))
    assert (found.residual.numpy() <= residual(fn, z0) * (1 + 1e-12)).all()


@pytest.mark.parametrize(("forcing", "least"), [(1e-9, 0.0), (0.3, 1e-3)])
def test_the_linear_equation_of_a_newton_step_is_solved_as_tightly_as_asked(forcing: float, least: float) -> None:
    M, b = random_walks([0.5, 0.9])  # of an affine map, the equation is the whole problem
    solver = Newton(forcing=forcing)
    state = solver.step(moved_by(M, b), solver.init(moved_by(M, b), torch.zeros_like(b)))
    assert (state.size <= 1.01 * forcing * state.start).all()
    assert (state.size >= least * state.start).all()
    short = Newton(forcing=1e-9, inner_steps=2)
    first = short.init(moved_by(M, b), torch.zeros_like(b))
    assert short.step(moved_by(M, b), first).evals <= first.evals + 4  # two products, and two looks at f at most


@dataclass(frozen=True)
class SymmetricTanhMap(TanhMap):
    symmetric: ClassVar[bool] = True


def diagonal(kind: type[TanhMap], *entries: float) -> TanhMap:
    """A map whose Jacobian at 0 is diagonal."""
    u = torch.tensor([[1e-3, 2e-3, -1e-3]], dtype=torch.float64)
    return kind(torch.diag(torch.tensor(entries, dtype=torch.float64))[None], u)


def test_the_linear_solver_follows_the_symmetry() -> None:
    assert linear_solver(diagonal(SymmetricTanhMap, 0, 0, 0)) == CG()
    assert linear_solver(diagonal(TanhMap, 0, 0, 0)) == GMRES()


def test_newton_uses_cg_for_symmetric_maps_and_gmres_for_others() -> None:
    indefinite = (3.0, -1.0, 3.0)  # I - J has the eigenvalues -2, 2, -2: nothing for CG, one cycle for GMRES
    z0 = torch.zeros(1, 3, dtype=torch.float64)
    stop = Stop(rtol=1e-10, max_steps=8)
    assert solve(diagonal(TanhMap, *indefinite), z0, Newton(), stop).status is Status.CONVERGED
    general, symmetric = diagonal(TanhMap, *indefinite), diagonal(SymmetricTanhMap, *indefinite)
    gmres, cg = Newton().step(general, Newton().init(general, z0)), Newton().step(symmetric, Newton().init(symmetric, z0))
    assert gmres.size[0] < 1e-4 * gmres.start[0]
    assert cg.size[0] > 0.1 * cg.start[0]
    definite = diagonal(SymmetricTanhMap, 0.9, -3.0, 0.5)  # I - J is positive definite, and f no contraction
    assert solve(definite, z0, Newton(), stop).status is Status.CONVERGED


@pytest.mark.parametrize("kind", [TanhMap, SymmetricTanhMap])
def test_newton_counts_evaluations_and_products(kind: type[TanhMap]) -> None:
    base = uneven_tanh(batch=8)
    fn = kind(0.5 * (base.W + base.W.mT), base.u)
    found = solve(fn, torch.zeros_like(fn.u), Newton(), Stop(rtol=1e-10))
    assert found.status is Status.CONVERGED
    assert fn.log.products > 0
    assert found.evals == fn.log.uses


def test_newton_converges_in_few_steps_where_plain_iteration_cycles() -> None:
    problem = PROBLEMS["monotone, no contraction"]
    stop = Stop(rtol=1e-11, max_steps=20)
    assert solve(problem.map(), problem.z0(), Picard(), stop).status is not Status.CONVERGED
    found = solve(problem.map(), problem.z0(), Newton(), stop).raise_if_failed()
    assert int(found.steps.max()) <= 10


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_wider_default_dtype_changes_nothing(solver: Solver, dtype: torch.dtype) -> None:
    z0, stop = torch.zeros(2, 3, dtype=dtype), Stop(rtol=1e-2)
    expected = solve(lambda z: 0.5 * torch.cos(z) + 1, z0, solver, stop)
    torch.set_default_dtype(torch.float64)
    try:
        found = solve(lambda z: 0.5 * torch.cos(z) + 1, z0, solver, stop)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.z.dtype is dtype
    assert torch.equal(found.z, expected.z)
