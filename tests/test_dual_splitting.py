"""Peaceman-Rachford on the dual: the equilibria of plain iteration, in fewer products, and Newton's method where it is slow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq import Equilibrium, Status, Stop, solve
from opteq.cells import FunctionCell, Monotone, OptEq
from opteq.convex import DualForm
from opteq.solvers import DualSplitting, MixedPrecision, Newton
from opteq.solvers.dual_splitting import ReflectedForm

FORMULAS = ["relu", "leaky_relu", "identity", "soft_threshold"]


def cell_of(features, hidden, norm, activation="relu", alpha=1.0, mu=1.0, seed=0):
    """A cell in float64 with L ||W||^2 = norm^2 mu."""
    torch.manual_seed(seed)
    cell = OptEq(3, features, hidden, activation=activation, alpha=alpha, mu=mu).double()
    with torch.no_grad():
        cell.W *= norm * math.sqrt(mu / cell.activation.lipschitz) / torch.linalg.matrix_norm(cell.W, 2)
    return cell


def spread(cell, low, high):
    """The cell with singular values spread evenly between two numbers."""
    left, values, right = torch.linalg.svd(cell.W.detach(), full_matrices=False)
    with torch.no_grad():
        cell.W.copy_(left * torch.linspace(low, high, values.numel(), dtype=values.dtype) @ right)
    return cell


def iterated(fn, steps):
    """What plain iteration leads to."""
    z = torch.zeros(len(fn.u), fn.W.W.shape[1], dtype=fn.u.dtype)
    for _ in range(steps):
        z = fn(z)
    return z


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    features=st.integers(1, 9),
    hidden=st.integers(1, 9),
    norm=st.floats(0.05, 0.97),
    activation=st.sampled_from([*FORMULAS, "tanh"]),
    alpha=st.sampled_from([1.0, 0.6]),
    mu=st.sampled_from([1.0, 3.0]),
    warm=st.booleans(),
)
def test_it_finds_the_equilibrium_of_plain_iteration(seed, features, hidden, norm, activation, alpha, mu, warm):
    cell = cell_of(features, hidden, norm, activation, alpha, mu, seed)
    fn = cell.bind(torch.randn(4, 3, dtype=torch.float64)).detach()
    z0 = torch.randn(4, features, dtype=torch.float64) if warm else torch.zeros(4, features, dtype=torch.float64)
    found = solve(fn, z0, DualSplitting(), Stop(rtol=1e-10)).raise_if_failed()
    exact = iterated(fn, 1 + int(math.log(1e-14) / math.log(1 - alpha * (1 - norm**2))))
    torch.testing.assert_close(found.z, exact, rtol=0, atol=2e-9 * (1 + float(exact.abs().max())) / (alpha * (1 - norm**2)))


@pytest.mark.parametrize("activation", FORMULAS)
def test_the_reflection_has_the_dual_equilibrium_as_its_fixed_point(activation):
    cell = cell_of(12, 9, 0.9, activation)
    fn = cell.bind(torch.randn(5, 3, dtype=torch.float64)).detach()
    form = DualSplitting().prepare(fn)
    assert isinstance(form, ReflectedForm)
    s = fn.sigma(fn.hidden(iterated(fn, 400)))
    t = torch.lerp(s, s @ form.dual.G + form.dual.u, form.step)  # s - step ((I - G) s - u)
    torch.testing.assert_close(fn.sigma.prox(t, form.step), s, rtol=0, atol=1e-12)
    torch.testing.assert_close((2 * s - t) @ form.C + form.shift, t, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("low", "high"), [(0.8, 0.99), (0.1, 0.999), (0.99, 0.999), (0.0, 0.9)])
def test_it_takes_fewer_products_than_newton(low, high):
    torch.manual_seed(0)
    cell = spread(OptEq(128, 128, 128), low, high)
    x = torch.randn(32, 128)
    fn, z0 = cell.bind(x).detach(), cell.initial(x)
    split, newton = (solve(fn, z0, solver).raise_if_failed().evals for solver in (DualSplitting(), Newton()))
    assert split <= 14
    assert split < newton


def test_samples_that_it_does_not_help_go_on_by_newton():
    """Where all units are active, an error is multiplied by C itself, of norm 0.998."""
    torch.manual_seed(0)
    cell = spread(OptEq(64, 64, 64), 0.5, 0.9995)
    with torch.no_grad():
        cell.U.copy_(torch.eye(64))
    x = torch.randn(24, 64) + torch.linspace(-1.5, 3.0, 24)[:, None]
    fn, z0, stop = cell.bind(x).detach(), cell.initial(x), Stop(rtol=1e-5)
    solver = DualSplitting()
    state, form = solver.init(solver.prepare(fn), z0), solver.prepare(fn)
    for _ in range(9):  # after eight it is asked who is slow
        state = solver.step(form, state)
    assert 0 < int(state.reflected.sum()) < len(x)  # both kinds in one batch
    found = solve(fn, z0, solver, stop).raise_if_failed()
    assert int(found.steps.max()) < 30  # reflections alone would take thousands
    for row in (0, 12, 23):  # each goes its own way, whoever is with it
        alone = solve(fn.select(torch.tensor([row])), z0[:1], solver, stop).raise_if_failed()
        torch.testing.assert_close(alone.z[0], found.z[row], rtol=0, atol=1e-3 * float(found.z[row].norm()))


def test_rounding_in_the_factor_leaves_no_wrong_answer():
    """W W' within 1e-7 of I: in float32 little is left of I - G, and the truth decides."""
    torch.manual_seed(0)
    cell = spread(OptEq(48, 48, 48), 1 - 2e-7, 1 - 1e-7)
    x = torch.randn(16, 48)
    found = solve(cell.bind(x).detach(), cell.initial(x), DualSplitting(), Stop(rtol=1e-5, max_steps=200))
    fn = cell.double().bind(x.double()).detach()
    value = fn(found.z.double())
    size = (value - found.z.double()).norm(dim=1) / value.norm(dim=1)
    assert (size[found.converged] <= 1.2e-5).all()
    assert (found.status is Status.CONVERGED) == bool(found.converged.all())


@pytest.mark.parametrize("norm", [1.2, 4.0])
def test_weights_that_are_too_large_are_left_to_newton(norm):
    cell = cell_of(20, 20, norm)
    fn = cell.bind(torch.randn(4, 3, dtype=torch.float64)).detach()
    form = DualSplitting().prepare(fn)
    if norm > 2:
        assert type(form) is DualForm  # I + step (I - G) is not definite, or I - G negative in the mean
    found = solve(fn, torch.zeros(4, 20, dtype=torch.float64), DualSplitting(), Stop(rtol=1e-8, max_steps=50))
    value = fn(found.z)
    assert ((value - found.z).norm(dim=1) <= 1e-8 * value.norm(dim=1))[found.converged].all()


@pytest.mark.parametrize("activation", ["tanh", "softplus"])
def test_without_a_formula_of_the_prox_it_is_newton(activation):
    cell = cell_of(8, 8, 0.9, activation)
    fn = cell.bind(torch.randn(4, 3, dtype=torch.float64)).detach()
    stop, z0 = Stop(rtol=1e-9), torch.zeros(4, 8, dtype=torch.float64)
    found, newton = solve(fn, z0, DualSplitting(), stop), solve(fn, z0, Newton(), stop)
    assert torch.equal(found.z, newton.z)
    assert found.evals == newton.evals


def test_it_is_the_default_of_dense_layers_where_there_are_samples_enough():
    torch.manual_seed(0)
    x, layer = torch.randn(4, 3), Equilibrium(OptEq(3, 8, 8))
    assert torch.equal(layer(x), Equilibrium(layer.cell, DualSplitting())(x))
    assert torch.equal(layer(x[:3]), Equilibrium(layer.cell, Newton())(x[:3]))
    layer.double()
    assert torch.equal(layer(x.double()), Equilibrium(layer.cell, Newton())(x.double()))


def test_a_sample_has_its_equilibrium_alone_and_among_others_whatever_the_default():
    torch.manual_seed(0)
    layer = Equilibrium(OptEq(3, 260, 260).double(), stop=Stop(rtol=1e-10))
    layer.cell.W.data *= 0.97 / torch.linalg.matrix_norm(layer.cell.W.data, 2)
    x = torch.randn(140, 3, dtype=torch.float64)
    solvers = [layer.gradient.problem(layer.cell.bind(rows), None, layer.stop, lambda *_: None).solver for rows in (x, x[:1])]
    assert all(isinstance(solver, MixedPrecision) for solver in solvers)
    assert [solver.solver for solver in solvers] == [DualSplitting(), Newton()]
    z = layer(x).detach()
    for row in range(0, 140, 20):
        torch.testing.assert_close(layer(x[row : row + 1])[0], z[row], rtol=0, atol=1e-12 * float(z[row].norm()))


def test_maps_without_a_dual_are_refused():
    for cell in (Monotone(3, 4), FunctionCell(lambda z, x: torch.tanh(z), (4,))):
        with pytest.raises(TypeError, match=r"DualSplitting needs a map that has a dual.*Got .* instead.*Anderson"):
            Equilibrium(cell, DualSplitting())(torch.randn(2, 3))
