"""The strategies of gradients.py are what they say they are, and a linear solve that fails says so."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from opteq import ConvergenceError, ConvergenceWarning, Equilibrium, Solution, Solver, Status, Stop, record
from opteq.cells import DeepOptEq, FunctionCell, OptEq
from opteq.gradients import Gradient, Implicit, JacobianFree, Phantom, Unrolled, gradient_error
from opteq.linear import CG, GMRES
from opteq.regularizers import HSIC
from opteq.solvers import Anderson, Broyden, Newton, Picard
from problems import FEATURES, SOLVABLE, Affine, with_norm, zoo

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

TIGHT = Stop(rtol=1e-12, max_steps=2000)
STRATEGIES = [Implicit(), Unrolled(40), Phantom(), JacobianFree()]


def layer_of(name: str, gradient: Gradient | None = None, stop: Stop = TIGHT, **options) -> tuple[Equilibrium, Tensor]:
    problem = zoo()[name]
    options.setdefault("on_failure", "raise")
    return Equilibrium(FunctionCell(problem.f, problem.state_shape), gradient=gradient, stop=stop, **options), problem.x


def opteq_layer(gradient: Gradient | None = None, **options) -> tuple[Equilibrium, Tensor]:
    torch.manual_seed(0)
    cell = OptEq(5, FEATURES, 12, activation="leaky_relu").double()
    options = {"stop": TIGHT, "on_failure": "raise", **options}
    return Equilibrium(cell, gradient=gradient, **options), zoo()["tanh"].x


def gradients(layer: nn.Module, x: Tensor, weights: Tensor | None = None) -> list[Tensor]:
    """Of sum(weights * z) in x and the parameters."""
    x = x.detach().clone().requires_grad_()
    z = layer(x)
    return list(torch.autograd.grad(z, [x, *layer.parameters()], torch.ones_like(z) if weights is None else weights))


def relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest |a - b| / |b| of a list of tensors, NaN if one is NaN."""
    pairs = list(zip(found, wanted, strict=True))
    return torch.stack([torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b) for a, b in pairs]).max().item()


# Unrolled


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("name", SOLVABLE)
def test_unrolled_is_the_hand_written_loop_in_value_and_gradient(name, steps, damping):
    layer, x = layer_of(name, Unrolled(steps), solver=Picard(damping))
    problem = zoo()[name]

    def loop(x: Tensor) -> Tensor:
        z = problem.z0()
        for _ in range(steps):
            z = (1 - damping) * z + damping * problem.f(z, x)
        return z

    x = x.clone().requires_grad_()
    z, by_hand = layer(x), loop(x)
    torch.testing.assert_close(z, by_hand, rtol=1e-14, atol=1e-14)
    found = torch.autograd.grad(z.square().sum(), [x, *layer.parameters()], materialize_grads=True)
    wanted = torch.autograd.grad(by_hand.square().sum(), [x, *problem.f.parameters()], materialize_grads=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_unrolled_takes_plain_picard_when_no_solver_is_named():
    layer, x = layer_of("tanh", Unrolled(3))
    z = zoo()["tanh"].z0()
    for _ in range(3):
        z = layer.cell.f(z, x)
    assert torch.equal(layer(x), z)


def test_unrolled_begins_at_the_given_z0_but_is_not_differentiated_through_it():
    layer, x = layer_of("tanh", Unrolled(1))
    z0 = torch.ones(6, FEATURES, dtype=torch.float64, requires_grad=True)
    z = layer(x, z0)
    assert torch.equal(z, layer.cell.f(z0, x))
    z.sum().backward()
    assert z0.grad is None


@pytest.mark.parametrize("solver", [Anderson(), Broyden(), Newton()])
def test_unrolled_refuses_solvers_that_autograd_cannot_follow(solver):
    with pytest.raises(TypeError, match=rf"such as Picard\. Got {type(solver).__name__} instead"):
        layer_of("tanh", Unrolled(3), solver=solver)
    layer, x = layer_of("tanh", Unrolled(3))
    layer.solver = solver
    with pytest.raises(TypeError, match=rf"such as Picard\. Got {type(solver).__name__} instead"):
        layer(x)


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_unrolled_tells_its_residual_without_a_warning(on_failure):
    layer, x = layer_of("relu", Unrolled(3), on_failure=on_failure)  # a warning would be an error here
    solution = layer.solve(x)
    assert solution.status is Status.MAX_STEPS
    assert solution.steps.tolist() == [3] * x.shape[0]
    z = solution.z
    fz = layer.cell.f(z, x)
    torch.testing.assert_close(solution.residual, ((fz - z).norm(dim=1) / fz.norm(dim=1)).detach(), rtol=1e-12, atol=0)
    assert not solution.residual.requires_grad
    assert solution.evals == 5  # at the start, after each step, and to tell the residual


def test_unrolled_deep_enough_is_converged():
    layer, x = layer_of("linear contraction", Unrolled(200))
    assert layer.solve(x).status is Status.CONVERGED


def test_unrolled_still_reports_nan():
    layer, x = layer_of("tanh", Unrolled(3), on_failure="warn")
    x = x.clone()
    x[1] = torch.nan
    with pytest.warns(ConvergenceWarning, match="NaN or infinity"):
        solution = layer.solve(x)
    assert solution.statuses[1] is Status.NONFINITE
    assert Status.NONFINITE not in solution.statuses[:1] + solution.statuses[2:]


def test_unrolled_steps_from_nan_have_no_part_in_the_gradient():
    layer, x = layer_of("tanh", Unrolled(3), on_failure="ignore")
    x, z0 = x.clone().requires_grad_(), torch.zeros(6, FEATURES, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    z0[1] = torch.nan
    solution = layer.solve(x, z0)
    assert [status is Status.NONFINITE for status in solution.statuses] == [i == 1 for i in range(6)]
    (found,) = torch.autograd.grad(solution.z.sum(), x)
    wanted[1] = 0
    assert torch.equal(found, wanted)


# Phantom and JacobianFree


@pytest.mark.parametrize(("steps", "damping"), [(1, 0.5), (1, 1.0), (4, 0.5), (5, 0.9)])
@pytest.mark.parametrize("name", SOLVABLE)
def test_phantom_is_the_hand_written_phantom_gradient(name, steps, damping):
    layer, x = layer_of(name, Phantom(steps, damping))
    weights = torch.linspace(-1, 1, 6 * FEATURES, dtype=torch.float64).reshape(6, FEATURES)
    z = layer(x).detach()
    assert torch.equal(z, layer_of(name)[0](x).detach())  # the value is the solver's

    x = x.clone().requires_grad_()
    carrier = z
    for _ in range(steps):
        carrier = (1 - damping) * carrier + damping * layer.cell.f(carrier, x)
    wanted = list(torch.autograd.grad(carrier, [x, *layer.parameters()], weights))
    assert relative_error(gradients(layer, x, weights), wanted) < 1e-13


@pytest.mark.parametrize("name", SOLVABLE)
def test_jacobian_free_is_one_vjp_through_f(name):
    layer, x = layer_of(name, JacobianFree())
    x = x.clone().requires_grad_()
    z = layer(x).detach()
    assert torch.equal(z, layer_of(name)[0](x).detach())
    wanted = list(torch.autograd.grad(layer.cell.f(z, x).sum(), [x, *layer.parameters()]))
    assert relative_error(gradients(layer, x), wanted) < 1e-14


@pytest.mark.parametrize("gradient", [Phantom(3, 0.7), JacobianFree(), Unrolled(3)])
def test_approximate_gradients_reach_captured_tensors_too(gradient):
    owned, x = layer_of("tanh", gradient)
    f = owned.cell.f
    captured = Equilibrium(FunctionCell(lambda z, x: f(z, x), (FEATURES,)), gradient=gradient, stop=TIGHT)
    wanted = gradients(owned, x)
    x = x.clone().requires_grad_()
    found = torch.autograd.grad(captured(x).sum(), [x, *f.parameters()])
    assert relative_error(list(found), wanted) < 1e-12


@pytest.mark.parametrize("gradient", STRATEGIES)
def test_every_strategy_gives_no_graph_when_nothing_needs_one(gradient):
    layer, x = layer_of("linear contraction", gradient)
    with torch.no_grad():
        assert not layer(x).requires_grad
    layer.requires_grad_(False)
    assert not layer(x).requires_grad


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Unrolled(0), ValueError),
        (lambda: Unrolled(2.0), TypeError),
        (lambda: Phantom(0), ValueError),
        (lambda: Phantom(damping=0.0), ValueError),
        (lambda: Phantom(damping=1.5), ValueError),
        (lambda: Implicit(stop=1e-3), TypeError),
        (lambda: Implicit(linear="cg"), TypeError),
    ],
)
def test_bad_options_are_errors(make, error):
    with pytest.raises(error, match="must be"):
        make()


# gradient_error


@pytest.mark.parametrize(
    "make", [opteq_layer, lambda gradient: layer_of("tanh", gradient), lambda gradient: layer_of("relu", gradient)]
)
def test_gradient_error_of_implicit_is_zero(make):
    layer, x = make(Implicit())
    assert gradient_error(layer, x) < 1e-8


def test_gradient_error_of_jacobian_free_is_the_known_one():
    """For z = w z + x and J = w: exact 1 / (1 - w) and z / (1 - w), one step 1 and z. Both are off by the factor 1 - w."""
    f = Affine(0.75 * torch.eye(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    layer = Equilibrium(FunctionCell(f, (1,)), stop=TIGHT, gradient=JacobianFree())
    assert gradient_error(layer, torch.ones(3, 1, dtype=torch.float64)) == pytest.approx(0.75, rel=1e-9)


def test_gradient_error_falls_with_the_steps_of_phantom():
    errors = [gradient_error(*layer_of("tanh", Phantom(steps, 0.8))) for steps in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.05 > 1e-4 > errors[-1]
    assert gradient_error(*layer_of("tanh", Phantom(200, 0.8))) < 1e-8


def test_gradient_error_falls_with_the_depth_of_unrolled():
    errors = [gradient_error(*layer_of("linear contraction", Unrolled(steps))) for steps in (1, 5, 20, 200)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-8


def test_gradient_error_is_reproducible_and_leaves_the_layer_alone():
    layer, x = layer_of("tanh", Phantom(2))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert gradient_error(layer, x, seed=3) == gradient_error(layer, x, seed=3)
    assert gradient_error(layer, x, seed=3) != gradient_error(layer, x, seed=4)
    assert layer.gradient == Phantom(2)
    assert all(p.grad is None for p in layer.parameters())
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_gradient_error_sees_float32_and_loose_tolerances():
    problem = zoo(dtype=torch.float32)["tanh"]
    loose, strict = (
        Equilibrium(FunctionCell(problem.f, (FEATURES,)), stop=Stop(rtol=rtol), gradient=Implicit()) for rtol in (1e-2, 1e-6)
    )
    assert 1e-8 < gradient_error(strict, problem.x) < 1e-4 < gradient_error(loose, problem.x) < 0.1
    short, x = layer_of("tanh", stop=Stop(max_steps=2), on_failure="ignore")
    assert 1e-4 < gradient_error(short, x) < 10  # the exact one has more steps


def test_gradient_error_refuses_a_reference_that_does_not_exist():
    layer, x = layer_of("undefined", JacobianFree(), on_failure="ignore")
    with pytest.raises(ConvergenceError):
        gradient_error(layer, x)


# Implicit: the tolerance of the linear solve


@pytest.mark.parametrize(
    ("dtype", "rtol", "expected"),
    [
        (torch.float64, 1e-3, 1e-4),
        (torch.float64, 1e-12, 1e-13),
        (torch.float64, 1e-13, 50 * torch.finfo(torch.float64).eps),
        (torch.float64, 0.0, 50 * torch.finfo(torch.float64).eps),
        (torch.float32, 1e-2, 1e-3),
        (torch.float32, 1e-6, 50 * torch.finfo(torch.float32).eps),
    ],
)
def test_the_linear_solve_is_ten_times_stricter_than_the_forward_one_but_never_below_precision(dtype, rtol, expected):
    problem = zoo(dtype=dtype)["linear contraction"]
    layer = Equilibrium(FunctionCell(problem.f, (FEATURES,)), stop=Stop(rtol=rtol), on_failure="ignore")
    with record() as log:
        layer(problem.x).sum().backward()
    assert [solution.stop.rtol for solution in log] == [rtol, pytest.approx(expected, rel=1e-12)]
    assert [solution.stop.max_steps for solution in log] == [100, 200]


def test_the_linear_solve_obeys_its_own_stop():
    own = Stop(rtol=1e-3, atol=1e-9, max_steps=77)
    layer, x = layer_of("tanh", Implicit(own))
    with record() as log:
        layer(x).sum().backward()
    assert [solution.stop for solution in log] == [TIGHT, own]


def test_a_looser_linear_solve_gives_a_gradient_of_that_accuracy():
    wanted = gradients(*layer_of("tanh"))
    for rtol in (1e-2, 1e-5):
        found = gradients(*layer_of("tanh", Implicit(Stop(rtol=rtol))))
        assert 0 < relative_error(found, wanted) < 20 * rtol


def test_a_solve_aims_at_0_3_of_the_relative_tolerance_with_derivatives_or_without():
    layer, x = layer_of("relu", stop=Stop(rtol=1e-3, max_steps=500), solver=Picard())
    solution = layer.solve(x)
    assert 1e-4 < float(solution.residual.max()) <= 3e-4
    with torch.no_grad():
        assert torch.equal(layer(x), solution.z)
    layer.stop = Stop(rtol=1e-3, atol=1e-9, max_steps=500)
    assert float(layer.solve(x).residual.max()) > 3e-4


# Failures are told


class Spy(Solver):
    """A linear solver that notes on what it was used."""

    def __init__(self, inner: Solver) -> None:
        self.inner, self.used = inner, 0

    def init(self, fn, z0):
        self.used += 1
        return self.inner.init(fn, z0)

    def step(self, fn, state):
        return self.inner.step(fn, state)


@pytest.mark.parametrize("inner", [CG(), GMRES()])
def test_the_linear_solver_that_was_named_is_the_one_used(inner):
    spy = Spy(inner)
    layer, x = opteq_layer(Implicit(linear=spy))
    z = layer(x)
    assert spy.used == 0
    z.sum().backward()
    assert spy.used == 1


IMPATIENT = Implicit(Stop(rtol=1e-14, max_steps=1))


def assert_tells_all(message: str, phase: str, steps: int) -> None:
    """What happened, how far it got, what to try."""
    assert f"Equilibrium, {phase} solve: 6 of 6 samples did not converge." in message
    assert f"after {steps} steps" in message
    assert "The worst relative residual is" in message
    assert "max_steps" in message
    assert "(a) raise Stop.max_steps" in message


@pytest.mark.parametrize("make", [opteq_layer, lambda gradient, **options: layer_of("tanh", gradient, **options)])
def test_a_linear_solve_that_does_not_converge_follows_on_failure(make):
    for on_failure in ("warn", "raise", "ignore"):
        layer, x = make(IMPATIENT, on_failure=on_failure)
        z = layer(x)
        if on_failure == "warn":
            with pytest.warns(ConvergenceWarning) as caught:
                z.sum().backward()
            assert len(caught) == 1
            assert_tells_all(str(caught[0].message), "backward", 1)
        elif on_failure == "raise":
            with pytest.raises(ConvergenceError) as failure:
                z.sum().backward()
            assert_tells_all(str(failure.value), "backward", 1)
            assert failure.value.solution.status is Status.MAX_STEPS
        else:
            z.sum().backward()  # a warning would be an error
            assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(("on_failure", "raised"), [("raise", ConvergenceError), ("warn", ConvergenceWarning)])
def test_a_linear_solve_through_captured_tensors_follows_on_failure_too(on_failure, raised):
    problem = zoo()["tanh"]
    cell = FunctionCell(lambda z, x: problem.f(z, x), (FEATURES,))
    z = Equilibrium(cell, stop=TIGHT, gradient=IMPATIENT, on_failure=on_failure)(problem.x)
    with pytest.raises(raised, match="backward solve"):  # a warning is an error here
        z.sum().backward()


@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), JacobianFree()])
def test_a_forward_solve_that_does_not_converge_follows_on_failure(gradient):
    one = Stop(rtol=1e-12, max_steps=1)
    layer, x = layer_of("tanh", gradient, one, on_failure="warn")
    with pytest.warns(ConvergenceWarning) as caught:
        layer(x)
    assert len(caught) == 1
    assert_tells_all(str(caught[0].message), "forward", 1)
    layer, x = layer_of("tanh", gradient, one, on_failure="raise")
    with pytest.raises(ConvergenceError) as failure:
        layer(x)
    assert_tells_all(str(failure.value), "forward", 1)
    assert isinstance(failure.value.solution, Solution)
    layer, x = layer_of("tanh", gradient, one, on_failure="ignore")
    assert layer.solve(x).status is Status.MAX_STEPS


def test_a_tangent_solve_that_does_not_converge_follows_on_failure():
    layer, x = opteq_layer(IMPATIENT)
    with pytest.raises(ConvergenceError, match="tangent solve"):
        torch.func.jvp(layer, (x,), (x,))


def test_failures_are_told_under_vmap():
    layer, x = layer_of("tanh", IMPATIENT)
    with pytest.raises(ConvergenceError, match="backward solve: 6 of 6"):
        vmap(grad(lambda x: layer(x[None]).sum()))(x)


@pytest.mark.parametrize(("name", "status"), [("no fixed point", Status.DIVERGED), ("undefined", Status.NONFINITE)])
def test_divergence_and_undefined_maps_are_told(name, status):
    layer, x = layer_of(name, on_failure="raise", solver=Picard(), stop=Stop(rtol=1e-2, max_steps=200))
    with pytest.raises(ConvergenceError, match=status.value.split(":")[0]) as failure:
        layer(x)
    assert failure.value.solution.status is status


# A sample with NaN spoils nobody else


def relu_layer(gradient: Gradient, **options) -> tuple[Equilibrium, Tensor]:
    return layer_of("relu", gradient, **options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), JacobianFree()])
@pytest.mark.parametrize("make", [opteq_layer, relu_layer])
def test_a_bad_sample_leaves_the_gradients_of_the_others_alone(make, gradient, bad):
    layer, x = make(gradient, on_failure="ignore")
    rest = [0, 1, 3, 4, 5]
    spoilt = x.clone()
    spoilt[2, 0] = bad
    solution = layer.solve(spoilt)
    assert [s is Status.NONFINITE for s in solution.statuses] == [i == 2 for i in range(6)]
    assert solution.converged[rest].all()
    assert solution.z.isfinite().all()
    dx, *found = gradients(layer, spoilt)
    dx_rest, *wanted = gradients(layer, x[rest])
    assert relative_error(found, wanted) < 1e-12
    torch.testing.assert_close(dx[rest], dx_rest, rtol=1e-12, atol=1e-14)
    assert (dx[2] == 0).all()


@pytest.mark.parametrize("make", [opteq_layer, relu_layer])
def test_a_bad_sample_leaves_the_gradients_of_the_others_alone_under_vmap(make):
    layer, x = make(Implicit(), on_failure="ignore")
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    spoilt = x.clone()
    spoilt[2] = torch.nan

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x,)).square().sum()

    # in pairs: [3, 2, inputs], the bad sample with a good one
    found, dx = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(parameters, spoilt.reshape(3, 2, -1))
    for pair, rows in enumerate(([0, 1], [3], [4, 5])):
        wanted, dx_wanted = grad(loss, argnums=(0, 1))(parameters, x[rows])
        for name, value in wanted.items():
            torch.testing.assert_close(found[name][pair], value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(dx.reshape(6, -1)[rows], dx_wanted, rtol=1e-12, atol=1e-14)
    assert (dx[1, 0] == 0).all()


@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), JacobianFree()])
def test_a_bad_sample_leaves_the_gradients_of_captured_tensors_alone(gradient):
    f = zoo()["relu"].f
    x = zoo()["relu"].x
    layer = Equilibrium(FunctionCell(lambda z, x: f(z, x), (FEATURES,)), stop=TIGHT, gradient=gradient, on_failure="ignore")
    rest = [0, 1, 3, 4, 5]
    spoilt = x.clone()
    spoilt[2] = torch.nan
    spoilt.requires_grad_()
    dx, *found = torch.autograd.grad(layer(spoilt).sum(), [spoilt, *f.parameters()])
    wanted = torch.autograd.grad(layer(x[rest]).sum(), list(f.parameters()))
    assert relative_error(found, wanted) < 1e-12
    assert (dx[2] == 0).all()
    assert dx.isfinite().all()


def test_a_bad_sample_warns_by_default():
    layer, x = opteq_layer(on_failure="warn")
    x = x.clone()
    x[2] = torch.nan
    with pytest.warns(ConvergenceWarning, match="1 of 6 samples did not converge"):
        layer(x)


def test_a_bad_sample_leaves_tangents_and_second_derivatives_alone():
    layer, x = layer_of("tanh", on_failure="ignore")
    rest = [0, 1, 3, 4, 5]
    spoilt = x.clone()
    spoilt[2] = torch.nan
    tangent = torch.func.jvp(layer, (spoilt,), (torch.ones_like(x),))[1]
    wanted = torch.func.jvp(layer, (x[rest],), (torch.ones_like(x[rest]),))[1]
    torch.testing.assert_close(tangent[rest], wanted, rtol=1e-10, atol=1e-12)

    def penalty(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), list(layer.parameters())))

    assert relative_error(penalty(spoilt), penalty(x[rest])) < 1e-10


# Under torch.func


@pytest.mark.parametrize("gradient", STRATEGIES)
def test_every_strategy_gives_per_sample_gradients_under_vmap(gradient):
    layer, x = layer_of("tanh", gradient)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(x.shape[0]):
        for name, value in grad(loss)(parameters, x[i]).items():
            torch.testing.assert_close(found[name][i], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gradient", STRATEGIES)
def test_every_strategy_has_the_same_forward_and_reverse_mode(gradient):
    layer, x = layer_of("tanh", gradient)
    tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
    cotangent = torch.linspace(-1, 1, tangent.numel(), dtype=x.dtype).view_as(tangent)
    (pulled,) = torch.func.vjp(layer, x)[1](cotangent)
    torch.testing.assert_close((cotangent * tangent).sum(), pulled.sum(), rtol=1e-10, atol=1e-12)


def test_unrolled_and_implicit_agree_when_the_depth_suffices():
    def second(gradient: Gradient) -> Tensor:
        f = Affine(with_norm(torch.eye(2, dtype=torch.float64), 0.3), torch.eye(2, dtype=torch.float64), torch.tanh)
        layer = Equilibrium(FunctionCell(f, (2,)), stop=TIGHT, gradient=gradient)
        curve: Callable[[Tensor], Tensor] = grad(lambda x: layer(x).sum())
        return grad(lambda x: curve(x).square().sum())(torch.tensor([[0.2, -0.4]], dtype=torch.float64))

    torch.testing.assert_close(second(Unrolled(60)), second(Implicit()), rtol=1e-10, atol=1e-12)


def test_gradient_error_takes_the_names_of_the_documentation_and_the_layers_own_solver():
    layer, x = layer_of("tanh", Implicit(), solver=Newton(), stop=Stop(rtol=1e-10))
    with record() as log:
        assert gradient_error(equilibrium=layer, x=x, seed=3) < 1e-8
    given, _, exact, _ = log  # forward and backward
    assert exact.stop.rtol == 1e-12
    assert int(exact.steps.max()) <= int(given.steps.max()) + 1  # Anderson() takes many more


def test_gradient_error_of_a_function_that_captures_single_precision():
    W = 0.3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    cell = FunctionCell(lambda z, x: torch.tanh(z @ W.float().T + x), (4,))
    layer = Equilibrium(cell, stop=Stop(rtol=1e-5))
    assert 0 <= gradient_error(layer, torch.randn(3, 4, generator=torch.Generator().manual_seed(1))) < 1e-3


def test_gradient_error_of_a_vanishing_gradient_is_zero():
    layer = Equilibrium(FunctionCell(lambda z, x: 0 * x, (3,)))
    assert gradient_error(layer, torch.ones(2, 3)) == 0


def test_what_met_the_tolerance_and_was_sent_on_has_converged():
    """The residual of a non-normal map falls and rises again: at every limit of the steps a sample is judged by its best."""
    A = torch.tensor([[0.9, 0.0], [3.0, -0.9]], dtype=torch.float64)
    cell, x = FunctionCell(lambda z, x: z @ A.T + x, (2,)), torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    for steps in range(1, 120):
        found = Equilibrium(cell, Picard(), Stop(1e-2, 0.0, steps), on_failure="ignore").solve(x)
        assert torch.equal(found.converged, found.residual <= 1e-2), steps


def test_batches_whose_samples_depend_on_each_other_end_where_they_met_the_tolerance():
    torch.manual_seed(0)
    cell = DeepOptEq([OptEq(4, 8, 16), OptEq(4, 8, 12, alpha=0.5)], regularizer=HSIC(), gamma=0.01).double()
    found = Equilibrium(cell, stop=Stop(rtol=1e-3, max_steps=200), on_failure="ignore").solve(torch.randn(5, 4).double())
    assert torch.equal(found.converged, found.residual <= 1e-3)


# What f may hold, and how it may be asked


class Sine(torch.autograd.Function):
    """A Function in the old style, which torch.func refuses."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return torch.sin(a)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g * torch.cos(ctx.saved_tensors[0])


class Wave(nn.Module):
    """0.6 sin(W z + b + x)."""

    def __init__(self, sine: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.sine = nn.Linear(4, 4).double(), sine

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.6 * self.sine(self.inner(z) + x)


def wave_layer(f: nn.Module, recompute: bool = False) -> tuple[Equilibrium, Tensor]:
    """Its samples end at different steps, so that some are dropped in the midst of a solve."""
    x = torch.logspace(-3, 1, 6, dtype=torch.float64)[:, None] * torch.arange(1.0, 5.0, dtype=torch.float64).sin()
    return Equilibrium(FunctionCell(f, (4,)), stop=TIGHT, gradient=Implicit(recompute=recompute), on_failure="raise"), x


@pytest.mark.parametrize("recompute", [False, True])
def test_functions_in_the_old_style_and_backward_hooks_inside_f_change_nothing(recompute):
    wanted = gradients(*wave_layer(Wave(), recompute))
    assert all(torch.equal(a, b) for a, b in zip(gradients(*wave_layer(Wave(Sine.apply), recompute)), wanted, strict=True))
    f, seen = Wave(), []
    f.inner.register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0].shape))
    assert all(torch.equal(a, b) for a, b in zip(gradients(*wave_layer(f, recompute)), wanted, strict=True))
    assert {shape[0] for shape in seen} > {6}  # at every product, also after samples were dropped


class Silent(nn.Module):
    """1, whatever z and x are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.ones_like(z)


@pytest.mark.parametrize("recompute", [False, True])
def test_an_f_that_depends_on_nothing_has_no_gradient(recompute):
    layer = Equilibrium(FunctionCell(Silent(), (3,)), gradient=Implicit(recompute=recompute), on_failure="raise")
    x = torch.ones(2, 3, requires_grad=True)
    z = layer(x)
    z.sum().backward(retain_graph=True)
    assert x.grad is None
    assert layer.cell.f.w.grad is None
    assert not any(g.any() for g in torch.autograd.grad(z.sum(), [x, layer.cell.f.w], create_graph=True))


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_pass_under_autocast_is_the_one_outside_of_it(create_graph):
    f = Wave().float()
    layer, x = Equilibrium(FunctionCell(f, (4,)), stop=Stop(rtol=1e-6)), wave_layer(f)[1].float()
    z = layer(x)
    wanted = torch.autograd.grad(z.sum(), list(f.parameters()), create_graph=create_graph, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(z.sum(), list(f.parameters()), create_graph=create_graph)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_tangent_under_autocast_is_the_one_outside_of_it():
    layer, x = wave_layer(Wave().float())
    layer.stop, x = Stop(rtol=1e-6), x.float()
    wanted = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1], wanted)


@pytest.mark.parametrize("captured", [False, True])
def test_the_vmap_of_autograd_itself_is_refused_with_the_remedy(captured):
    f = Wave()
    _, x = wave_layer(f)
    layer = Equilibrium(FunctionCell((lambda z, x: f(z, x)) if captured else f, (4,)))
    with pytest.raises(RuntimeError, match=r"is_grads_batched.*torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)
    if not captured:
        with pytest.raises(RuntimeError, match=r"is_grads_batched.*torch\.func\.jacrev"):
            torch.autograd.functional.jacobian(layer, x, vectorize=True, strategy="forward-mode")
