"""Monotone maps and the splitting methods, forward and backward."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from cell_zoo import MONOTONE, matrix_of, monotone, random_matrix
from conformance import residual
from opteq import ConvergenceWarning, Equilibrium, Status, Stop, record, solve
from opteq.activations import Activation, find_activation
from opteq.cells import GaussianDEQ, Monotone, MonotoneConv, MonotoneMultiTier, OptEq
from opteq.cells.monotone import MonotoneCell
from opteq.gradients import Implicit, Unrolled, default_linear, default_solver
from opteq.linear import GMRES, LinearizedMap
from opteq.operators import Dense, Factors, Transposed
from opteq.solve import Map
from opteq.solvers import Anderson, ForwardBackward, Newton, PeacemanRachford, Picard
from opteq.solvers.splitting import SplitLinear
from opteq.splitting import SplitMap

TIGHT = Stop(rtol=1e-12, max_steps=2000)
PROXIMAL = [name for name in MONOTONE if find_activation("test", name).lipschitz <= 1]
KINDS = {
    "dense": (lambda m: Monotone(3, 6, m=m), (3,)),
    "conv": (lambda m: MonotoneConv(2, 3, (4, 5), m=m), (2, 4, 5)),
    "conv of a large kernel": (lambda m: MonotoneConv(2, 2, (2, 3), m=m, kernel_size=5), (2, 2, 3)),
    "one tier of an even kernel": (lambda m: MonotoneMultiTier(2, (2,), 4, m=m, kernel_size=2), (2, 4, 4)),
    "three tiers": (lambda m: MonotoneMultiTier(2, (2, 1, 3), (8, 4), m=m), (2, 8, 4)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def bound(kind: str, m: float = 0.5, seed: int = 0, scale: float = 1.5) -> tuple[MonotoneCell, SplitMap, Tensor]:
    """A cell with weights of that scale, its map for 4 samples, and W as a matrix."""
    make, inputs = KINDS[kind]
    cell = monotone(seed, make(m), scale)
    fn = cell.bind(random_matrix(4, *inputs, seed=seed + 1)).detach()
    return cell, fn, matrix_of(fn.W, cell.state_shape)


# The operators


@kinds
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.sampled_from([0.01, 0.3, 2.0]), scale=st.sampled_from([0.0, 0.5, 4.0]))
def test_I_minus_W_is_strongly_monotone_for_every_A_and_B(kind, seed, m, scale):
    _, _, W = bound(kind, m, seed, scale)
    least = torch.linalg.eigvalsh(torch.eye(len(W)) - (W + W.T) / 2).min()
    assert least >= m - 1e-12 * torch.linalg.matrix_norm(W, 2)


@kinds
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), step=st.sampled_from([0.03, 1.0, 7.0]))
def test_the_resolvent_is_the_dense_inverse_and_its_adjoint_the_transpose(kind, seed, step):
    cell, fn, W = bound(kind, seed=seed)
    identity = torch.eye(len(W), dtype=W.dtype)
    exact = torch.linalg.inv(identity + step * (identity - W))
    found = fn.W.resolvent(step, cell.state_shape)
    torch.testing.assert_close(matrix_of(found, cell.state_shape), exact, rtol=0, atol=1e-13)
    torch.testing.assert_close(matrix_of(fn.reflection(step), cell.state_shape), 2 * exact - identity, rtol=0, atol=1e-13)
    z, s = (random_matrix(3, *cell.state_shape, seed=i) for i in (5, 6))
    for operator in (fn.W, found, fn.reflection(step), found.reflection()):
        torch.testing.assert_close((operator(z) * s).sum(), (z * operator.adjoint(s)).sum(), rtol=1e-11, atol=1e-11)
    v = random_matrix(4, *cell.state_shape, seed=7)
    w = fn.resolvent(v, step)
    torch.testing.assert_close(w + step * fn.linear(w), v, rtol=1e-11, atol=1e-11)


@kinds
def test_norms_come_close_to_the_singular_values_and_stay_below_them(kind):
    for seed in range(3):
        _, fn, W = bound(kind, seed=seed)
        exact = [float(torch.linalg.matrix_norm(M, 2)) for M in (torch.eye(len(W), dtype=W.dtype) - W, W)]
        for found, true in zip(fn.norms(), exact, strict=True):
            assert 0.8 * true <= found <= true * (1 + 1e-12)


def test_links_between_tiers_reach_their_neighbours_in_both_directions():
    cell, fn, _ = bound("three tiers")
    z = torch.zeros(1, *cell.state_shape, dtype=torch.float64)
    parts = list(cell.unpack(z))
    for t in range(3):
        lit = [torch.ones_like(part) if s == t else part for s, part in enumerate(parts)]
        out = cell.unpack(fn.W(cell.pack(lit)))
        assert [bool(part.abs().max() > 1e-9) for part in out] == [abs(s - t) <= 1 for s in range(3)]


# The proximal operators of the activations


@pytest.mark.parametrize("name", [*PROXIMAL, "arctan"])
@pytest.mark.parametrize("step", [0.05, 0.4, 1.0, 3.0])
def test_prox_minimises_the_penalty(name, step):
    sigma = Activation("arctan", torch.atan, lipschitz=1.0) if name == "arctan" else find_activation("test", name)
    v = torch.tensor([-7.0, -1.2, -0.3, 0.0, 0.2, 0.9, 6.0], dtype=torch.float64)
    found = sigma.prox(v, step)
    for value, s in zip(v.tolist(), found.tolist(), strict=True):

        def problem(s: float, value: float = value) -> float:
            penalty = float(sigma.penalty(torch.tensor(s, dtype=torch.float64)))
            return min(step * penalty + (s - value) ** 2 / 2, 1e6)

        low, high = (-10.0, 10.0) if name not in ("tanh", "sigmoid", "arctan") else (-1.57, 1.57)
        best = minimize_scalar(problem, bounds=(low, high), method="bounded", options={"xatol": 1e-10}).x
        assert abs(s - best) <= 2e-5  # half of the digits is what values of a minimum can tell
    t = found + (v - found) / step  # the point that sigma maps to the prox
    torch.testing.assert_close(sigma(t), found, rtol=0, atol=2e-14 / min(step, 1.0))


@pytest.mark.parametrize("name", [*PROXIMAL, "arctan"])
@pytest.mark.parametrize("step", [0.3, 2.5])
def test_prox_has_a_derivative(name, step):
    sigma = Activation("arctan", torch.atan, lipschitz=1.0) if name == "arctan" else find_activation("test", name)
    v = torch.tensor([-3.1, -0.8, 0.35, 4.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: sigma.prox(v, step), v)
    assert sigma.prox(torch.zeros(0, dtype=torch.float64), step).shape == (0,)


# Forward


@kinds
@pytest.mark.parametrize("scale", [0.7, 4.0])
def test_splitting_finds_the_equilibrium_where_plain_iteration_diverges(kind, scale):
    _, fn, W = bound(kind, 2.5 if scale == 0.7 else 1.0, 3, scale)
    z0 = torch.zeros_like(fn.u)
    assert torch.linalg.matrix_norm(W, 2) > 1
    found = {}
    others = (PeacemanRachford(0.2),) if scale == 4.0 else (ForwardBackward(),)  # where L / m is some 40, thousands of steps
    for solver in (Newton(), PeacemanRachford(), PeacemanRachford(1.0), *others):
        solution = solve(fn, z0, solver, Stop(1e-12, max_steps=2000))
        assert solution.status is Status.CONVERGED
        assert residual(fn, solution.z).max() <= 1.1e-12
        found[solver] = solution.z
    for z in found.values():
        torch.testing.assert_close(z, found[Newton()], rtol=1e-10, atol=1e-10)
    plain = solve(fn, z0, Picard(), Stop(max_steps=100))
    assert not plain.converged.any()


@pytest.mark.parametrize("name", PROXIMAL)
def test_every_activation_and_step_has_the_same_equilibrium(name):
    cell = monotone(2, Monotone(3, 6, m=0.7, activation=name), 2.0)
    twice = torch.arange(4).repeat(2)  # each sample from both starts
    fn = cell.bind(random_matrix(4, 3, seed=1)[twice]).detach()
    exact = solve(fn, torch.zeros_like(fn.u), Newton(), Stop(1e-13, max_steps=100)).z
    start = torch.cat([torch.zeros(4, 6, dtype=torch.float64), random_matrix(4, 6, seed=9)])
    for alpha in ("auto", 1.0, 0.3, 2.0):
        solution = solve(fn, start, PeacemanRachford(alpha), TIGHT)
        assert solution.status is Status.CONVERGED
        torch.testing.assert_close(solution.z, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", PROXIMAL)
def test_forward_backward_goes_with_every_activation(name):
    fn = monotone(2, Monotone(3, 6, m=2.0, activation=name)).bind(random_matrix(4, 3, seed=1)).detach()
    assert torch.linalg.matrix_norm(fn.W.W, 2) > 1.5
    exact = solve(fn, torch.zeros_like(fn.u), Newton(), Stop(1e-13, max_steps=100)).z
    solution = solve(fn, torch.zeros_like(fn.u), ForwardBackward(), TIGHT)
    assert solution.status is Status.CONVERGED
    torch.testing.assert_close(solution.z, exact, rtol=1e-10, atol=1e-10)


def estimates_and_truths(solver, fn: Map, z0: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    ready = solver.prepare(fn)
    state = solver.init(ready, z0)
    pairs = []
    for _ in range(steps):
        z = state.candidate(ready)
        value = fn(z)
        pairs.append(
            (torch.stack(state.estimate()), torch.stack([(value - z).flatten(1).norm(dim=1), value.flatten(1).norm(dim=1)]))
        )
        state = solver.step(ready, state)
    return pairs


@kinds
@pytest.mark.parametrize("solver", [PeacemanRachford(), PeacemanRachford(1.0), ForwardBackward()])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_the_residual_comes_without_a_product_of_its_own(kind, solver, start):
    _, fn, _ = bound(kind)
    z0 = torch.zeros_like(fn.u) if start == "zero" else random_matrix(*fn.u.shape, seed=11)
    for estimate, truth in estimates_and_truths(solver, fn, z0, 12):
        torch.testing.assert_close(estimate, truth, rtol=1e-9, atol=1e-11)


def test_peaceman_rachford_takes_one_product_a_step():
    _, fn, _ = bound("dense")
    solution = solve(fn, torch.zeros_like(fn.u), PeacemanRachford(), Stop(1e-8))
    assert solution.evals <= int(solution.steps.max()) + 4  # at most one look at f for each sample that is done


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.sampled_from([0.02, 0.3, 2.0]), scale=st.sampled_from([0.1, 1.0, 6.0]))
def test_the_forward_step_lies_where_the_iteration_contracts(seed, m, scale):
    _, fn, W = bound("dense", m, seed, scale)
    L = float(torch.linalg.matrix_norm(torch.eye(len(W), dtype=W.dtype) - W, 2))
    step = ForwardBackward().prepare(fn).step
    assert 0 < step < 2 * m / L**2
    T = torch.eye(len(W), dtype=W.dtype) - step * (torch.eye(len(W), dtype=W.dtype) - W)
    assert torch.linalg.matrix_norm(T, 2) < 1


@pytest.mark.parametrize("m", [0.05, 2.0])
def test_the_automatic_step_is_that_of_its_formula(m):
    _, fn, W = bound("dense", m)
    L = float(torch.linalg.matrix_norm(torch.eye(len(W), dtype=W.dtype) - W, 2))
    formula = 1 / math.sqrt(L * max(m, min(0.6, L)))
    assert formula <= PeacemanRachford().prepare(fn).step <= 1.2 * formula  # the estimate of L may be a fifth too small
    assert PeacemanRachford(0.3).prepare(fn).step == 0.3


def test_the_end_of_the_interval_of_forward_steps_is_open():
    """Thesis, Section 3.2.2 prints (0, 2 m / L^2]: at its end a skew W makes T an isometry."""
    m, turn = 1.0, torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    F = m * torch.eye(2, dtype=torch.float64) + 3 * turn
    L = float(torch.linalg.matrix_norm(F, 2))
    T = torch.eye(2, dtype=torch.float64) - 2 * m / L**2 * F
    assert abs(torch.linalg.matrix_norm(T, 2) - 1) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_no_scale_of_the_input_overflows_or_vanishes(scale, dtype):
    cell = monotone(0, Monotone(3, 6, m=0.5)).to(dtype)
    with torch.no_grad():
        cell.b.zero_()
    x = random_matrix(4, 3, seed=1).to(dtype)
    small = Equilibrium(cell, None, Stop(1e-5))(x)
    large = Equilibrium(cell, None, Stop(1e-5))(x * scale)
    torch.testing.assert_close(large / scale, small, rtol=1e-3, atol=1e-4)


def test_nonfinite_samples_are_told_and_the_rest_is_solved():
    _, fn, _ = bound("dense")
    u = fn.u.clone()
    u[1] = math.nan
    solution = solve(replace(fn, u=u), torch.zeros_like(u), PeacemanRachford())
    assert [s is Status.NONFINITE for s in solution.statuses] == [False, True, False, False]
    assert solution.converged[[0, 2, 3]].all()


# Backward


def dense_jacobian(fn: SplitMap, z: Tensor) -> Tensor:
    """One matrix for each sample."""
    batch, n = len(z), z[0].numel()
    rows = torch.arange(batch).repeat_interleave(n)
    units = torch.eye(n, dtype=z.dtype).reshape(n, *z.shape[1:]).repeat(batch, *[1] * (z.dim() - 1))
    return fn.select(rows).linearize(z[rows]).jvp(units).reshape(batch, n, n).mT


@kinds
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("solver", [PeacemanRachford(), PeacemanRachford(1.0), ForwardBackward()])
def test_adjoints_and_tangents_are_those_of_dense_linear_algebra(kind, transposed, solver):
    _, fn, _ = bound(kind, 2.5, scale=0.7) if isinstance(solver, ForwardBackward) else bound(kind, 0.5)
    z, g = random_matrix(*fn.u.shape, seed=3), random_matrix(*fn.u.shape, seed=4)
    J = dense_jacobian(fn, z)
    system = torch.eye(J.shape[1], dtype=J.dtype) - (J.mT if transposed else J)
    exact = torch.linalg.solve(system, g.flatten(1)[:, :, None])[:, :, 0].view_as(g)
    start = torch.cat([torch.zeros_like(g), random_matrix(*g.shape, seed=5)])
    twice = torch.arange(len(g)).repeat(2)  # each sample from both starts
    solution = solve(LinearizedMap(fn.select(twice), transposed, z[twice], g[twice]), start, solver, TIGHT)
    assert solution.status is Status.CONVERGED
    torch.testing.assert_close(solution.z, exact[twice], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("solver", [PeacemanRachford(), ForwardBackward()])
def test_the_residual_of_an_adjoint_is_not_told_too_small_by_much(solver):
    _, fn, _ = bound("dense", 1.0)
    z, g = random_matrix(*fn.u.shape, seed=3), random_matrix(*fn.u.shape, seed=4)
    for transposed in (True, False):
        equation = LinearizedMap(fn, transposed, z, g)
        for estimate, truth in estimates_and_truths(solver, equation, torch.zeros_like(g), 10):
            assert (estimate[0] >= 0.999 * truth[0]).all()


@kinds
def test_one_factorisation_serves_forward_and_backward(kind, monkeypatch):
    make, inputs = KINDS[kind]
    cell = monotone(0, make(0.5))
    calls = []
    inverse = torch.linalg.inv
    monkeypatch.setattr(torch.linalg, "inv", lambda matrix: calls.append(matrix.shape) or inverse(matrix))
    x = random_matrix(4, *inputs, seed=1).requires_grad_()
    z = Equilibrium(cell, None, Stop(1e-10))(x)
    z.sum().backward(retain_graph=True)
    z.square().sum().backward()
    tiers = len(cell.channels) if isinstance(cell, MonotoneMultiTier) else 1
    assert len(calls) == tiers
    Equilibrium(cell, None, Stop(1e-10))(x)
    assert len(calls) == 2 * tiers  # a new bind


@pytest.mark.parametrize(
    ("cell", "inputs"),
    [
        (Monotone(2, 3, m=0.8), (2,)),
        (MonotoneConv(1, 2, (3, 2), m=0.8, kernel_size=2), (1, 3, 2)),
        (MonotoneMultiTier(1, (1, 2), (4, 2), m=0.8, kernel_size=2), (1, 4, 2)),
    ],
    ids=["dense", "conv", "tiers"],
)
def test_gradients_pass_gradcheck(cell, inputs):
    cell = monotone(5, cell, 0.8)
    layer = Equilibrium(cell, None, Stop(1e-13, max_steps=2000), on_failure="raise")
    names = [name for name, _ in cell.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in cell.parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        named = {f"cell.{name}": p for name, p in zip(names, parameters, strict=True)}
        return torch.func.functional_call(layer, named, (x,))

    assert torch.autograd.gradcheck(function, (random_matrix(2, *inputs, seed=1).requires_grad_(), *values), fast_mode=True)


def test_second_derivatives_are_those_of_finite_differences():
    cell = monotone(5, Monotone(3, 4, m=0.8, activation="tanh"))
    layer = Equilibrium(cell, None, Stop(1e-13, max_steps=2000))
    assert torch.autograd.gradgradcheck(layer, random_matrix(2, 3, seed=1).requires_grad_(), fast_mode=True)


def test_every_linear_solver_gives_the_same_gradient():
    cell, x = monotone(0, Monotone(3, 6, m=0.7)), random_matrix(4, 3, seed=1)
    found = []
    for linear in (GMRES(), PeacemanRachford(), PeacemanRachford(0.5), ForwardBackward(), None):
        layer = Equilibrium(cell, None, TIGHT, Implicit(TIGHT, linear), on_failure="raise")
        found.append(torch.autograd.grad(layer(x).square().sum(), list(cell.parameters())))
    for grads in found[1:]:
        for a, b in zip(grads, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_unrolled_forward_backward_is_differentiated_through_its_steps(activation):
    cell, x = monotone(0, Monotone(3, 6, m=1.0, activation=activation)), random_matrix(4, 3, seed=1)
    step = 0.05
    z = Equilibrium(cell, ForwardBackward(step), gradient=Unrolled(7))(x)
    found = torch.autograd.grad(z.square().sum(), list(cell.parameters()))
    fn = cell.bind(x)
    wanted = torch.zeros_like(fn.u)
    for _ in range(7):
        wanted = fn.prox(wanted - step * fn.linear(wanted), step)
    torch.testing.assert_close(z, wanted)
    for a, b in zip(found, torch.autograd.grad(wanted.square().sum(), list(cell.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# Factors


def test_factors_are_made_anew_when_a_tensor_is_another_or_was_written_to():
    made, W = [], torch.eye(3)
    factors = Factors()

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [factors.get("key", Dense(W), make) for _ in range(2)] == [0, 0]
    assert factors.get("key", Dense(W.detach()), make) == 0  # the same memory
    assert factors.get("other", Dense(W), make) == 1
    W.mul_(2)
    assert factors.get("key", Dense(W), make) == 2
    assert factors.get("key", Dense(W.clone()), make) == 3
    assert factors.get("key", Dense(W), make) == 4
    assert factors.get("key", Dense(W.double()), make) == 5
    with torch.inference_mode():
        inferred = torch.eye(3)
        assert [factors.get("key", Dense(inferred), make) for _ in range(2)] == [6, 7]


def test_an_ensemble_under_vmap_does_not_share_factors():
    cells = [monotone(seed, Monotone(3, 5, m=0.6)) for seed in range(3)]
    x = random_matrix(4, 3, seed=1)
    layer = Equilibrium(cells[0], None, TIGHT)
    stacked, _ = torch.func.stack_module_state([Equilibrium(cell) for cell in cells])
    found = torch.func.vmap(lambda weights: torch.func.functional_call(layer, weights, (x,)))(stacked)
    for z, cell in zip(found, cells, strict=True):
        torch.testing.assert_close(z, Equilibrium(cell, None, TIGHT)(x), rtol=1e-11, atol=1e-11)


# Choices and refusals


def test_monotone_maps_with_a_resolvent_are_split_by_default_and_others_are_not():
    for kind in KINDS:
        fn = bound(kind)[1]
        assert default_solver(fn) == PeacemanRachford()
        assert default_linear(fn, 1e-6) == SplitLinear(1e-6)
    zeros = MonotoneConv(2, 3, 4, padding="zeros").bind(torch.zeros(1, 2, 4, 4))
    assert not zeros.has_resolvent()
    assert default_solver(zeros) == Anderson()
    assert default_linear(zeros, 1e-6) == GMRES()
    assert default_solver(GaussianDEQ(3, 4).bind(torch.zeros(1, 3))) == Anderson()


def test_a_map_without_a_resolvent_is_refused_with_the_remedy():
    cell = MonotoneConv(2, 3, 4, padding="zeros")
    with pytest.raises(
        TypeError,
        match=r"PeacemanRachford needs the resolvent.*zero padding.*padding='circular'.*Anderson\(\).*ForwardBackward\(\)",
    ):
        Equilibrium(cell, PeacemanRachford())(torch.zeros(1, 2, 4, 4))
    with pytest.raises(TypeError, match="circular"):
        cell.bind(torch.zeros(1, 2, 4, 4)).resolvent(torch.zeros(1, 3, 4, 4), 1.0)
    with pytest.raises(TypeError, match="no known resolvent"):
        cell.bind(torch.zeros(1, 2, 4, 4)).W.A.resolvent(1.0, (3, 4, 4))


@pytest.mark.parametrize("solver", [PeacemanRachford(), ForwardBackward()])
def test_maps_of_another_kind_are_refused_by_name(solver):
    with pytest.raises(TypeError, match=rf"{type(solver).__name__} splits monotone maps.*Got DenseOptEqMap instead.*Anderson"):
        Equilibrium(OptEq(3, 4, 5), solver)(torch.zeros(1, 3))
    with pytest.raises(TypeError, match="splits monotone maps"):
        solve(lambda z: z / 2, torch.ones(1, 3), solver)


@pytest.mark.parametrize("kind", [PeacemanRachford, ForwardBackward])
@pytest.mark.parametrize(
    ("alpha", "error"), [(0.0, ValueError), (-1.0, ValueError), (math.inf, ValueError), ("best", ValueError), (None, TypeError)]
)
def test_bad_steps_are_refused_by_name(kind, alpha, error):
    with pytest.raises(error, match=rf"The 'alpha' parameter of {kind.__name__} must be"):
        kind(alpha)


def test_peaceman_rachford_is_not_unrolled():
    with pytest.raises(TypeError, match="Unrolled needs a solver whose steps can be differentiated"):
        Equilibrium(Monotone(3, 4), PeacemanRachford(), gradient=Unrolled(3))


def test_too_few_steps_are_told():
    with pytest.warns(ConvergenceWarning, match="stopped at max_steps"), record() as log:
        Equilibrium(monotone(0, Monotone(3, 6, m=0.1), 3.0), None, Stop(1e-10, max_steps=3))(random_matrix(4, 3, seed=1))
    assert log[0].status is Status.MAX_STEPS
    assert (log[0].residual > 1e-10).any()


# Precision


@pytest.mark.parametrize(
    ("cell", "scale"),
    [
        (Monotone(20, 60, m=100.0), 1.0),
        (Monotone(20, 60, m=100.0, activation="tanh"), 1.0),
        (Monotone(20, 60, init="normal", activation="tanh"), 5.0),
        (Monotone(20, 60, init="normal"), 5.0),
        (MonotoneConv(2, 6, 6, init="normal", activation="tanh"), 3.0),
    ],
    ids=["m", "m tanh", "tanh", "relu", "conv tanh"],
)
def test_single_precision_meets_the_default_tolerances_forward_and_backward(cell, scale):
    torch.manual_seed(0)
    cell.reset_parameters()
    with torch.no_grad():
        cell.A.mul_(scale)
        cell.B.mul_(scale)
    x = torch.randn(8, *((20,) if isinstance(cell, Monotone) else (2, 6, 6)))
    with record() as log:
        Equilibrium(cell, stop=Stop(max_steps=200), on_failure="raise")(x).square().mean().backward()
    assert [entry.status for entry in log] == [Status.CONVERGED] * 2


def test_the_backward_solve_leaves_the_splitting_where_rounding_would_keep_it_from_its_tolerance():
    _, fn, _ = bound("dense", 100.0)
    z, g = torch.zeros_like(fn.u), random_matrix(*fn.u.shape, seed=4)
    for rtol, splits in ((1e-8, True), (1e-13, False)):
        solver, equation = SplitLinear(rtol), LinearizedMap(fn, True, z, g)
        assert (solver.prepare(equation) is not equation) is splits
        assert solve(equation, torch.zeros_like(g), solver, Stop(rtol, max_steps=200)).status is Status.CONVERGED


def test_half_precision_has_no_resolvent():
    _, fn, _ = bound("dense")
    assert fn.has_resolvent()
    for dtype in (torch.float16, torch.bfloat16):
        half = fn.to(dtype)
        assert not half.has_resolvent()
        assert default_solver(half) == Anderson()
        with pytest.raises(TypeError, match=f"none is known for this W in {dtype}"):
            PeacemanRachford().prepare(half)


def test_autocast_does_not_round_the_matrix():
    cell = Monotone(3, 6)
    exact = cell.matrix()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cell.matrix(), exact)


@pytest.mark.parametrize("name", ["tanh", "softplus", "leaky_relu"])
def test_prox_keeps_its_digits_at_large_steps(name):
    sigma, v = find_activation("test", name), torch.tensor([-5.0, -0.4, 0.3, 2.0, 40.0])
    for step in (3.0, 30.0, 1e5 if name == "leaky_relu" else 50.0):
        exact = sigma.prox(v.double(), step)
        torch.testing.assert_close(sigma.prox(v, step).double(), exact, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e15, 1e25])
def test_norms_of_every_size_are_found(size):
    W = -size * torch.eye(4)
    fn = SplitMap(Dense(W), find_activation("test", "relu"), torch.ones(1, 4), m=1.0)
    assert fn.norms() == pytest.approx((1 + size, size), rel=1e-4)


# Steps


@pytest.mark.parametrize("m", [1e-3, 0.05, 0.4])
def test_a_map_that_is_all_but_the_identity_takes_few_steps(m):
    cell = Monotone(3, 6, m=m).double()
    with torch.no_grad():
        cell.A.zero_()
        cell.B.zero_()
    solution = Equilibrium(cell, None, Stop(1e-10)).solve(random_matrix(4, 3, seed=1))
    assert solution.status is Status.CONVERGED
    assert solution.steps.max() <= 3


def test_products_are_counted():
    _, fn, _ = bound("dense")
    zero, start = torch.zeros_like(fn.u), random_matrix(*fn.u.shape, seed=3)
    for solver, at_zero in ((PeacemanRachford(), 0), (ForwardBackward(), 1)):
        ready = solver.prepare(fn)
        assert solver.init(ready, zero).evals == at_zero
        assert solver.init(ready, start).evals == 1
        assert solver.step(ready, solver.init(ready, start)).evals == 2


def test_a_state_that_was_wrong_trusts_its_estimates_less():
    _, fn, _ = bound("dense")
    solver = PeacemanRachford()
    ready = solver.prepare(fn)
    state = solver.init(ready, random_matrix(*fn.u.shape, seed=3))
    size = state.estimate()[0]
    rows, z = torch.tensor([1, 3]), torch.zeros(2, 6, dtype=torch.float64)
    fz = z.clone()
    fz[:, 0] = 3 * size[rows]
    after = state.corrected(rows, z, fz).estimate()[0]
    torch.testing.assert_close(after, size * torch.tensor([1.0, 3.0, 1.0, 3.0], dtype=torch.float64))


# Activations with memory of their own, or none


@pytest.mark.parametrize("solver", [PeacemanRachford(1.0), PeacemanRachford(), ForwardBackward()])
def test_an_activation_may_answer_with_a_view_of_its_argument(solver):
    view = Activation("view", lambda a: a[...], lipschitz=1.0)
    cell = monotone(1, Monotone(3, 5, m=1.5, activation=view))
    x = random_matrix(4, 3, seed=1)
    fn = cell.bind(x).detach()
    u = fn.u.clone()
    solution = solve(fn, torch.zeros_like(u), solver, TIGHT)
    assert solution.status is Status.CONVERGED
    torch.testing.assert_close(solution.z, torch.linalg.solve(torch.eye(5, dtype=torch.float64) - fn.W.W, u.T).T)
    assert torch.equal(fn.u, u)


def test_an_activation_that_writes_to_its_argument_is_refused():
    with pytest.raises(ValueError, match=r"The 'function' parameter of Activation must be one that leaves its argument as it is"):
        Activation("in place", torch.nn.ReLU(inplace=True), lipschitz=1.0)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_unrolled_forward_backward_under_vmap_is_the_loop(activation):
    layer = Equilibrium(monotone(0, Monotone(3, 6, m=1.0, activation=activation)), ForwardBackward(), gradient=Unrolled(5))
    x = random_matrix(3, 4, 3, seed=1)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(each) for each in x]))


def test_the_resolvent_is_differentiable_however_often_it_was_used():
    cell = monotone(0, Monotone(3, 6))
    fn, v = cell.bind(random_matrix(4, 3, seed=1)), random_matrix(4, 6, seed=2)
    fn.detach().resolvent(v, 0.5)
    found = [torch.autograd.grad(fn.resolvent(v, 0.5).sum(), cell.A, retain_graph=True)[0] for _ in range(2)]
    assert found[0].abs().max() > 0
    assert torch.equal(found[0], found[1])


def test_a_copy_of_a_map_makes_factors_of_its_own():
    _, fn, _ = bound("dense")
    fn.reflection(0.5)
    assert deepcopy(fn).factors._made == {}
    assert deepcopy(fn).reflection(0.5).W.equal(fn.reflection(0.5).W)


def test_the_adjoint_of_a_transpose_is_the_operator():
    _, fn, _ = bound("conv")
    z = random_matrix(*fn.u.shape, seed=3)
    assert torch.equal(Transposed(fn.W).adjoint(z), fn.W(z))
    assert torch.equal(Transposed(fn.W)(z), fn.W.adjoint(z))
    assert not Transposed(fn.W).has_resolvent()
