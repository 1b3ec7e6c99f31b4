"""Mixed precision: float64 results from steps in float32, and float64 steps where these do not do."""

from dataclasses import dataclass

import pytest
import torch

from opteq import Equilibrium, Map, Stop, solve
from opteq.cells import GaussianDEQ, Monotone, OptEq
from opteq.gradients import Implicit, default_linear, default_solver, in_mixed_precision
from opteq.linear import GMRES, LinearizedMap
from opteq.regularizers import L2
from opteq.solvers import SAM, Anderson, ForwardBackward, MixedPrecision, Newton, PeacemanRachford, Picard
from opteq.solvers.mixed import MixedMap

CELLS = {
    "OptEq": lambda: OptEq(7, 40, 30, constrained=True),
    "OptEq near 1": lambda: scaled(OptEq(7, 40, 30), 0.999),
    "Monotone": lambda: Monotone(7, 30, m=0.1),
    "GaussianDEQ": lambda: GaussianDEQ(7, 30),
}


def scaled(cell, size):
    with torch.no_grad():
        cell.W *= size / torch.linalg.matrix_norm(cell.W, 2)
    return cell


def mixed(fn, rtol):
    return MixedPrecision(default_solver(fn), default_linear(fn, 1e-5), rtol)


@pytest.fixture(params=CELLS)
def cell(request):
    torch.manual_seed(0)
    return CELLS[request.param]().double()


@pytest.mark.parametrize("rtol", [1e-3, 1e-6, 1e-12])
def test_it_reaches_any_tolerance_of_float64(cell, rtol):
    x = torch.randn(20, 7, dtype=torch.float64)
    fn, z0 = cell.bind(x), cell.initial(x)
    found = solve(fn, z0, mixed(fn, rtol), Stop(rtol=rtol)).raise_if_failed()
    value = fn(found.z)
    assert found.z.dtype == torch.float64
    assert ((value - found.z).norm(dim=1) <= rtol * value.norm(dim=1)).all()
    again = solve(fn, found.z, mixed(fn, rtol), Stop(rtol=rtol)).raise_if_failed()
    assert (again.residual <= 1.001 * found.residual + 1e-15).all()  # from its own solution: nothing is lost in float32
    assert int(again.steps.max()) <= 2


@pytest.mark.parametrize("transposed", [False, True])
def test_adjoints_and_tangents_are_refined_too(cell, transposed):
    x, g = torch.randn(6, 7, dtype=torch.float64), torch.randn(6, *cell.state_shape, dtype=torch.float64)
    fn = cell.bind(x)
    z = solve(fn, cell.initial(x), default_solver(fn), Stop(rtol=1e-13)).z
    equation = LinearizedMap(fn, transposed, z, g)
    found = solve(equation, torch.zeros_like(g), mixed(fn, 1e-12), Stop(rtol=1e-12)).raise_if_failed()
    for i in range(len(x)):
        J = torch.autograd.functional.jacobian(lambda z, i=i: cell.bind(x[i : i + 1])(z[None])[0], z[i])
        exact = torch.linalg.solve(torch.eye(len(J)) - (J.T if transposed else J), g[i])
        torch.testing.assert_close(found.z[i], exact, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("scale", [1e60, 1e-60])
def test_numbers_that_float32_does_not_hold_are_solved_in_float64(scale):
    torch.manual_seed(0)
    cell, x = GaussianDEQ(7, 30).double(), scale * torch.randn(4, 7, dtype=torch.float64)
    fn = cell.bind(x)
    found = solve(fn, cell.initial(x), mixed(fn, 1e-8), Stop(rtol=1e-8)).raise_if_failed()
    exact = solve(fn, cell.initial(x), Anderson(), Stop(rtol=1e-12)).z
    assert ((found.z - exact).norm(dim=1) < 1e-6 * exact.norm(dim=1)).all()


def test_one_sample_out_of_range_leaves_the_others_as_they_are():
    torch.manual_seed(0)
    cell, x = GaussianDEQ(7, 30).double(), torch.randn(5, 7, dtype=torch.float64)
    x[2] *= 1e60
    others = [0, 1, 3, 4]
    layer = Equilibrium(cell, mixed(cell.bind(x), 1e-10), Stop(rtol=1e-10), on_failure="raise")
    found, alone = layer(x).detach()[others], layer(x[others]).detach()
    assert ((found - alone).norm(dim=1) <= 1e-9 * alone.norm(dim=1)).all()


def test_where_corrections_do_not_help_the_solver_goes_on_in_float64(monkeypatch):
    torch.manual_seed(0)
    cell, x = GaussianDEQ(7, 30).double(), torch.randn(5, 7, dtype=torch.float64)
    fn = cell.bind(x)
    none = (torch.zeros(5, 30, dtype=torch.float64), 1)
    monkeypatch.setattr(MixedPrecision, "_correction", lambda self, fn, state, far: none)
    found = solve(fn, cell.initial(x), mixed(fn, 1e-10), Stop(rtol=1e-10)).raise_if_failed()
    assert int(found.steps.max()) > 1


def test_a_correction_that_does_harm_is_undone(monkeypatch):
    torch.manual_seed(0)
    cell, x = GaussianDEQ(7, 30).double(), torch.randn(5, 7, dtype=torch.float64)
    fn, correct, calls = cell.bind(x), MixedPrecision._correction, []

    def spoilt(self, fn, state, far):
        move, evals = correct(self, fn, state, far)
        calls.append(far)
        move[1] += 1.0 if len(calls) == 2 else 0.0  # the first one has met the tolerance
        return move, evals

    monkeypatch.setattr(MixedPrecision, "_correction", spoilt)
    found = solve(fn, cell.initial(x), mixed(fn, 1e-10), Stop(rtol=1e-10)).raise_if_failed()
    assert len(calls) == 2
    value = fn(found.z)
    torch.testing.assert_close(found.residual, (value - found.z).norm(dim=1) / value.norm(dim=1), rtol=1e-6, atol=1e-17)
    assert found.residual.max() <= 1e-10


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by what forward mode imports
@pytest.mark.parametrize("make", [lambda: GaussianDEQ(4, 260), lambda: OptEq(4, 260, 260), lambda: Monotone(4, 260)])
def test_tangents_are_the_transposes_of_adjoints(make):
    torch.manual_seed(0)
    layer = Equilibrium(make().double(), stop=Stop(rtol=1e-10), on_failure="raise")
    x, v, g = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (3, 4), (3, 260)))
    tangent = torch.func.jvp(layer, (x,), (v,))[1]
    (adjoint,) = torch.func.vjp(layer, x)[1](g)
    assert abs((tangent * g).sum() - (adjoint * v).sum()) < 1e-8 * tangent.norm() * g.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nonfinite_sample_is_set_aside_and_has_no_part_in_the_gradient(cell, bad):
    x = torch.randn(5, 7, dtype=torch.float64)
    layer = Equilibrium(cell, mixed(cell.bind(x), 1e-8), Stop(rtol=1e-8), on_failure="ignore")
    parameters, others = list(cell.parameters()), [0, 1, 3, 4]
    exact = torch.autograd.grad(layer(x[others]).square().sum(), parameters)
    x[2, 3] = bad
    found = layer.solve(x)
    assert [status.name for status in found.statuses] == ["CONVERGED"] * 2 + ["NONFINITE"] + ["CONVERGED"] * 2
    for one, other in zip(torch.autograd.grad(found.z.square().sum(), parameters), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@dataclass(frozen=True)
class Ready(Map):
    """What a solver of somebody else's prepares."""

    fn: Map

    def __call__(self, z):
        return self.fn(z)


class Prepares(Picard):
    def prepare(self, fn):
        assert isinstance(fn, LinearizedMap)
        return Ready(fn)


@pytest.mark.parametrize(
    "linear", [ForwardBackward(alpha=0.3), PeacemanRachford(), Newton(), Prepares()], ids=lambda s: type(s).__name__
)
def test_any_solver_of_linear_equations_makes_the_corrections_of_an_adjoint(linear):
    torch.manual_seed(0)
    cell, x = Monotone(7, 30, m=0.5).double(), torch.randn(16, 7, dtype=torch.float64)
    with torch.no_grad():
        cell.A *= 0.5
        cell.B *= 0.5
    scales = torch.logspace(-3, 3, 16, dtype=torch.float64)[:, None]  # so that samples end at different steps
    gradient = Implicit(linear=MixedPrecision(GMRES(), linear, 1e-10))
    layers = [Equilibrium(cell, stop=Stop(rtol=1e-9), gradient=g, on_failure="raise") for g in (gradient, Implicit())]
    found, exact = (torch.autograd.grad((layer(x) * scales).square().sum(), cell.B)[0] for layer in layers)
    torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-7 * float(exact.abs().max()))


def test_it_is_the_default_for_large_weights_in_float64_only():
    large, small = GaussianDEQ(3, 300).double(), GaussianDEQ(3, 30).double()
    x, stop = torch.randn(2, 3, dtype=torch.float64), Stop(rtol=1e-7)
    assert in_mixed_precision(large.bind(x), Anderson(), stop) == MixedPrecision(Anderson(), GMRES(), 1e-7, 100)
    assert in_mixed_precision(small.bind(x), Anderson(), stop) == Anderson()
    assert in_mixed_precision(large.float().bind(x.float()), Anderson(), stop) == Anderson()


@pytest.mark.parametrize("make", [lambda: GaussianDEQ(3, 300), lambda: OptEq(3, 300, 250), lambda: Monotone(3, 260)])
def test_gradients_by_default_are_exact_in_float64(make, monkeypatch):
    torch.manual_seed(0)
    cell, x = make().double(), torch.randn(4, 3, dtype=torch.float64)
    made = []
    prepare = MixedPrecision.prepare
    monkeypatch.setattr(MixedPrecision, "prepare", lambda self, fn: made.append(prepare(self, fn)) or made[-1])

    def gradient(**settings):
        cell.zero_grad()
        Equilibrium(cell, stop=Stop(rtol=1e-10), on_failure="raise", **settings)(x).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in cell.parameters() if p.grad is not None])

    found = gradient()
    assert [type(map_) for map_ in made] == [MixedMap, MixedMap]  # forward and backward
    exact = gradient(solver=Anderson(), gradient=Implicit(linear=GMRES()))
    assert len(made) == 2
    assert (found - exact).norm() < 1e-7 * exact.norm()
    assert torch.autograd.gradcheck(lambda x: Equilibrium(cell, stop=Stop(rtol=1e-12))(x).sum(), x.requires_grad_(), eps=1e-5)


@pytest.mark.parametrize("size", [0.9, 2.0])
@pytest.mark.parametrize("scale", [1.0, 1e39])
def test_the_dual_goes_on_in_float64_with_weights_and_numbers_of_all_kinds(size, scale):
    torch.manual_seed(0)
    cell, x = scaled(OptEq(4, 260, 260), size**0.5).double(), scale * torch.randn(3, 4, dtype=torch.float64)
    found = Equilibrium(cell, on_failure="ignore").solve(x)
    assert found.converged.all() or size > 1
    found.z.sum().backward()
    value = cell.bind(x)(found.z)
    met = (value - found.z).norm(dim=1) <= 1e-4 * value.norm(dim=1)
    assert torch.equal(met, found.converged)


def test_adjoints_in_the_dual_go_on_in_float64(monkeypatch):
    torch.manual_seed(0)
    cell, x = scaled(OptEq(4, 260, 260), 0.9).double(), torch.randn(3, 4, dtype=torch.float64)
    wanted = torch.autograd.grad(Equilibrium(cell, stop=Stop(rtol=1e-10))(x).sum(), cell.W)[0]
    layer = Equilibrium(cell, stop=Stop(rtol=1e-10), on_failure="raise")
    z = layer(x)
    helpless = (torch.zeros(3, 260, dtype=torch.float64), 1)
    monkeypatch.setattr(MixedPrecision, "_correction", lambda self, fn, state, far: helpless)
    torch.testing.assert_close(torch.autograd.grad(z.sum(), cell.W)[0], wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("make", [lambda: GaussianDEQ(4, 260), lambda: OptEq(4, 260, 260), lambda: Monotone(4, 260)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sample_has_the_same_z_alone_and_among_others(make, seed):
    torch.manual_seed(seed)
    layer, x = Equilibrium(make().double(), stop=Stop(rtol=1e-10)), torch.randn(8, 4, dtype=torch.float64)
    together = layer(x).detach()
    alone = torch.cat([layer(x[i : i + 1]).detach() for i in range(8)])
    assert ((together - alone).norm(dim=1) <= 1e-12 * together.norm(dim=1)).all()


@pytest.mark.parametrize("seed", [12, 14, 18, 26])
def test_a_solution_that_is_exact_to_rounding_is_known_as_one(seed):
    torch.manual_seed(seed)
    cell = scaled(OptEq(7, 40, 30).double(), 0.99)
    x = torch.randn(50, 7, dtype=torch.float64)
    fn, z = cell.bind(x), cell.initial(x)
    for _ in range(3):  # the residual is some eps by then: whether it changes along itself cannot be seen
        z = solve(fn, z, mixed(fn, 1e-12), Stop(rtol=1e-12)).raise_if_failed().z


@pytest.mark.parametrize("name", ["solver", "linear"])
def test_a_solver_that_seeks_one_of_several_fixed_points_is_refused(name):
    parts = {"solver": Anderson(), "linear": GMRES()} | {name: SAM(L2())}
    with pytest.raises(TypeError, match=f"'{name}' parameter of MixedPrecision must be a Solver for maps with one fixed point"):
        MixedPrecision(**parts)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_f_must_return_a_tensor(start):
    with pytest.raises(TypeError, match="must return a tensor"):
        solve(lambda z: [z], torch.full((2, 3), start, dtype=torch.float64), MixedPrecision(Anderson(), GMRES()))
