"""The gradient flow against closed forms and tiny steps of descent; the loss curve of a constant kernel."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import expm
from torch import Tensor

from opteq.cells import FunctionCell, GaussianDEQ, Monotone, OptEq, ScaledReLU
from opteq.models import Readout
from opteq.solve import ConvergenceError, Stop
from opteq.theory import flow as module
from opteq.theory.certificates import certified_init, certify
from opteq.theory.flow import gradient_flow, loss_gradient, predicted_loss
from opteq.theory.ntk import empirical_ntk

CELLS = {
    "gaussian": lambda d, n: GaussianDEQ(d, n, sigma_w2=0.05),
    "scaled_relu": lambda d, n: ScaledReLU(d, n, gamma=0.3),
    "monotone": lambda d, n: Monotone(d, n, m=0.8, init="normal"),
    "tanh": lambda d, n: Monotone(d, n, m=0.8, activation="tanh"),
    "opteq": lambda d, n: OptEq(d, n, n + 2),
}


def network(kind: str, N: int = 4, d: int = 5, n: int = 8, seed: int = 0) -> tuple[Readout, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        readout = Readout(CELLS[kind](d, n)).double()
        with torch.no_grad():
            readout.a.normal_(std=n**-0.5)
        return readout, torch.randn(N, d).double(), torch.randn(N).double()


def only_a(readout: Readout) -> Readout:
    """With y^ = Z a linear in all that is trained."""
    readout.cell.requires_grad_(False)
    return readout


def residual(readout: Readout, X: Tensor, y: Tensor) -> Tensor:
    return readout(X).detach() - y


def loss(readout: Readout, X: Tensor, y: Tensor) -> float:
    return float(residual(readout, X, y).square().sum() / 2)


# The gradient.


@pytest.mark.parametrize("kind", list(CELLS))
def test_the_gradient_is_that_of_autograd(kind: str) -> None:
    readout, X, y = network(kind)
    value = (readout(X) - y).square().sum() / 2
    expected = torch.autograd.grad(value, list(readout.parameters()))
    for z0 in (None, torch.ones(4, 8, dtype=torch.float64)):
        found = loss_gradient(readout, X, y, z0)
        assert found.loss == pytest.approx(float(value.detach()), rel=1e-10)
        assert list(found.gradient) == [name for name, _ in readout.named_parameters()]
        for ours, theirs in zip(found.gradient.values(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        assert found.squared_norm() == pytest.approx(sum(float(g.square().sum()) for g in expected), rel=1e-9)
    assert all(p.grad is None for p in readout.parameters())


def test_large_batches_go_through_autograd_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = network("gaussian")
    dense = loss_gradient(readout, X, y)
    monkeypatch.setattr(module, "_DENSE", 0)
    other = loss_gradient(readout, X, y)
    for name, gradient in dense.gradient.items():
        torch.testing.assert_close(gradient, other.gradient[name], rtol=1e-9, atol=1e-11)


def test_newton_that_does_not_arrive_is_replaced_by_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = network("gaussian")
    expected = loss_gradient(readout, X, y).loss
    monkeypatch.setattr(module, "_NEWTON_STEPS", 1)
    assert loss_gradient(readout, X, y).loss == pytest.approx(expected, rel=1e-10)


def test_an_unused_parameter_has_the_gradient_0() -> None:
    readout, X, y = network("gaussian")
    readout.register_parameter("spare", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    assert loss_gradient(readout, X, y).gradient["spare"].tolist() == [0, 0, 0]


def test_without_an_equilibrium_there_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = network("gaussian")
    monkeypatch.setattr(module, "_NEWTON_STEPS", 1)
    readout.stop, readout.on_failure = Stop(rtol=1e-12, max_steps=1), "ignore"
    with pytest.raises(ConvergenceError, match="did not converge"):
        loss_gradient(readout, X, y)
    with torch.no_grad():
        readout.cell.U.fill_(1e300)
    with pytest.raises(ConvergenceError, match="did not converge"):
        loss_gradient(readout, 1e10 * X, y)


# The flow.


@pytest.mark.parametrize(("method", "rtol"), [("DOP853", 1e-8), ("RK45", 1e-7), ("Radau", 1e-5)])
@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_the_flow_of_a_linear_model_is_the_matrix_exponential(method: Any, rtol: float, scale: float) -> None:
    readout, X, y = network("gaussian", N=3)
    with torch.no_grad():
        readout.cell.U.mul_(scale)
        readout.a.div_(scale)
    only_a(readout)
    Z = readout.solve(X).z.detach()
    a, K = readout.a.detach(), Z @ Z.T
    times = torch.linspace(0, 1, 3, dtype=torch.float64) / torch.linalg.eigvalsh(K)[0]
    found = gradient_flow(readout, X, y, times, rtol=rtol, method=method)
    r0 = Z @ a - y
    for i, t in enumerate(times.tolist()):
        r = torch.tensor(expm(-t * K.numpy())) @ r0
        assert float((Z @ found.parameters["a"][i] - y - r).norm()) <= 10 * rtol * float(r0.norm())
        moved = Z.T @ torch.linalg.solve(K, r - r0)  # a stays in a(0) + range(Z')
        assert float((found.parameters["a"][i] - a - moved).norm()) <= 100 * rtol * float(r0.norm() / torch.linalg.svdvals(Z)[-1])
    expected = predicted_loss(K, r0, None, times)
    assert float((found.losses.sqrt() - expected.sqrt()).abs().max()) <= 10 * rtol * float(r0.norm())
    assert list(found.parameters) == ["a"]


@pytest.mark.parametrize("method", ["DOP853", "Radau"])
def test_tiny_steps_of_descent_approach_the_flow(method: str) -> None:
    readout, X, y = network("tanh", N=2, d=2, n=3)
    span = 1.0
    found = gradient_flow(readout, X, y, [0.0, span / 2, span], rtol=1e-6, method=method)  # type: ignore[arg-type]
    assert found.losses[2] < found.losses[1] < 0.9 * found.losses[0]
    errors = []
    for steps in (50, 100):
        model, z = copy.deepcopy(readout), None
        for _ in range(steps):
            _, gradient, z = loss_gradient(model, X, y, z)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.sub_(span / steps * gradient[name])
        errors.append(abs(loss(model, X, y) - float(found.losses[2])))
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1)  # Euler's method is of order 1
    assert errors[1] < 0.014 * float(found.losses[0])


def test_the_loss_falls_as_the_gradient_says() -> None:
    """dL/dt = -|grad L|^2, and L never rises."""
    readout, X, y = network("tanh")
    h = 0.01
    times = h * torch.arange(0, 5, dtype=torch.float64)
    found = gradient_flow(readout, X, y, times, rtol=1e-10)
    assert bool((found.losses.diff() < 0).all())
    speeds = torch.tensor([loss_gradient(found.model_at(i), X, y).squared_norm() for i in range(len(times))]).double()
    simpson = h / 3 * (speeds[0:-2:2] + 4 * speeds[1:-1:2] + speeds[2::2])
    torch.testing.assert_close(simpson, found.losses[0:-2:2] - found.losses[2::2], rtol=1e-3, atol=0)


def test_a_flow_has_a_path_no_longer_than_its_pl_constant_allows() -> None:
    """|theta(t) - theta(0)| <= sqrt(2 L(0) / lambda) where |grad L|^2 >= 2 lambda L on the way."""
    readout, X, y = network("tanh")
    found = gradient_flow(readout, X, y, torch.linspace(0, 0.3, 4))
    models = [found.model_at(i) for i in range(4)]
    least = min(float(torch.linalg.eigvalsh(empirical_ntk(model, X))[0]) for model in models)
    moved = math.sqrt(sum(float((p[-1] - p[0]).square().sum()) for p in found.parameters.values()))
    assert 0 < moved <= math.sqrt(2 * float(found.losses[0]) / least)


def test_the_model_given_is_left_as_it_is_and_copies_are_handed_out() -> None:
    readout, X, y = network("tanh")
    before = {name: p.detach().clone() for name, p in readout.named_parameters()}
    found = gradient_flow(readout, X, y, [0.1, 0.2])
    assert all(torch.equal(p, before[name]) for name, p in readout.named_parameters())
    for i in (0, 1):
        assert loss(found.model_at(i), X, y) == pytest.approx(float(found.losses[i]), rel=1e-9)
    assert found.losses[1] < found.losses[0] < loss(readout, X, y)
    assert found.times.tolist() == [0.1, 0.2]
    assert found.evals == gradient_flow(readout, X, y, [0.1, 0.2], rtol=1e-6).evals  # the default
    assert torch.equal(next(found.start.parameters()), next(readout.parameters()))
    at_start = gradient_flow(readout, X, y, [0.0])
    assert at_start.evals == 0
    assert float(at_start.losses[0]) == pytest.approx(loss(readout, X, y), rel=1e-9)


def test_a_flow_that_begins_at_the_solution_stays_there() -> None:
    readout, X, _ = network("tanh")
    y = readout(X).detach()
    found = gradient_flow(readout, X, y, [0.0, 1.0])
    assert float(found.losses.max()) <= 1e-20
    assert found.evals < 200  # 26: rounding is not followed


@pytest.mark.parametrize("kind", ["gaussian", "monotone"])
def test_the_certified_decay_has_the_square_of_sigma_min(kind: str) -> None:
    """L(t) <= exp(-sigma_min(Z)^2 t / 4) L(0): without the square, as one line of the thesis has it, a small network breaks it."""
    readout, X, y = network(kind, N=2, n=8)
    readout = certified_init(readout, X, 1e-2 * y, flow=True)
    y = 1e-2 * y
    certificate = certify(readout, X, y, flow=True)
    sigma = float(torch.linalg.svdvals(readout.solve(X).z.detach())[-1])
    span = 1 / certificate.decay
    found = gradient_flow(readout, X, y, torch.linspace(0, 1, 3, dtype=torch.float64) * span)
    for t, value in zip(found.times.tolist(), found.losses.tolist(), strict=True):
        assert value <= certificate.loss_bound(t) * (1 + 1e-9)
    assert certificate.decay == pytest.approx(sigma**2 * (1.0 if kind == "gaussian" else 0.5), rel=1e-3)
    small = copy.deepcopy(readout)  # sigma_min far below 1: exp(-sigma t / 4) then falls faster than the loss
    with torch.no_grad():
        small.cell.U.mul_(1e-4 / sigma)
        small.a.zero_()
    only_a(small)
    slow = gradient_flow(small, X, y, [0.0, 4 / 1e-4])
    assert float(slow.losses[1]) > math.exp(-1) * float(slow.losses[0])
    least = 1e-4**2
    assert float(slow.losses[1]) <= math.exp(-least / 4 * 4e4) * float(slow.losses[0])


@pytest.mark.parametrize(
    "times",
    [[], [1.0, 1.0], [-1.0, 1.0], [0.0, math.nan], [0.0, math.inf], [2.0, 1.0], torch.zeros(2, 2), "abc", None, [1, "a"]],
    ids=str,
)
def test_times_must_increase_from_0(times: Any) -> None:
    readout, X, y = network("tanh")
    with pytest.raises((ValueError, TypeError), match="'times' parameter of gradient_flow must be increasing numbers"):
        gradient_flow(readout, X, y, times)


def test_bad_arguments_are_named() -> None:
    readout, X, y = network("tanh")
    with pytest.raises(ValueError, match="'method'"):
        gradient_flow(readout, X, y, [1.0], method="Euler")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'rtol'"):
        gradient_flow(readout, X, y, [1.0], rtol=1e-16)
    with pytest.raises(ValueError, match="'rtol'"):
        gradient_flow(readout, X, y, [1.0], rtol=0.5)
    with pytest.raises(ValueError, match="'rtol'"):
        gradient_flow(readout.float(), X.float(), y.float(), [1.0], rtol=1e-6)
    readout.double()
    for call in (lambda X, y: gradient_flow(readout, X, y, [1.0]), lambda X, y: loss_gradient(readout, X, y)):
        with pytest.raises(ValueError, match=r"'X' parameter of .* with N >= 1"):
            call(X[:0], y[:0])
    with pytest.raises(ValueError, match=r"'z0' parameter of loss_gradient must be of shape \[4, 8\]"):
        loss_gradient(readout, X, y, torch.zeros(3, 2))
    with pytest.raises(ValueError, match="'max_evals'"):
        gradient_flow(readout, X, y, [1.0], max_evals=0)
    with pytest.raises(ValueError, match="'y'"):
        gradient_flow(readout, X, y[:2], [1.0])
    with pytest.raises(ValueError, match="'y'"):
        gradient_flow(readout, X, math.nan * y, [1.0])
    with pytest.raises(TypeError, match="'X'"):
        gradient_flow(readout, X.long(), y, [1.0])
    with pytest.raises(TypeError, match="'readout'"):
        gradient_flow(torch.nn.Linear(5, 1), X, y, [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trainable"):
        gradient_flow(readout.requires_grad_(False), X, y, [1.0])


def test_data_that_require_gradients_are_constants() -> None:
    readout, X, y = network("gaussian")
    wanted = gradient_flow(readout, X, y, [0.0, 0.1], rtol=1e-3).losses
    found = gradient_flow(readout, X.requires_grad_(), y.requires_grad_(), [0.0, 0.1], rtol=1e-3).losses
    assert torch.equal(found, wanted)


def test_too_few_gradients_say_how_far_it_came() -> None:
    readout, X, y = network("tanh")
    with pytest.raises(RuntimeError, match=r"near the time .* after max_evals = 30 gradients"):
        gradient_flow(readout, X, y, [1e6], max_evals=30)


@pytest.mark.parametrize("kind", ["gaussian", "opteq"])
@pytest.mark.parametrize(("model", "data"), [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_model_and_data_of_two_precisions_meet_in_the_better_one(kind: str, model: torch.dtype, data: torch.dtype) -> None:
    readout, X, y = network(kind)
    expected = loss_gradient(readout, X, y)
    readout, X, y = readout.to(model), X.to(data), y.to(data)
    found = loss_gradient(readout, X, y)
    assert found.z.dtype == torch.float64
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, gradient in found.gradient.items():
        assert gradient.dtype == model
        torch.testing.assert_close(gradient.double(), expected.gradient[name], rtol=1e-3, atol=1e-5)
    flow = gradient_flow(readout, X, y, [0.0, 1e-3], rtol=1e-2)
    assert flow.losses[1] < flow.losses[0] == pytest.approx(expected.loss, rel=1e-5)


def test_labels_of_a_better_precision_than_all_else_are_rounded() -> None:
    readout, X, y = network("gaussian")
    assert loss_gradient(readout.float(), X.float(), y).loss == pytest.approx(loss(readout.double(), X, y), rel=1e-5)


def test_single_precision_has_a_default_tolerance_of_its_own() -> None:
    readout, X, y = network("tanh")
    expected = gradient_flow(readout, X, y, [0.2])
    found = gradient_flow(readout.float(), X.float(), y.float(), [0.2])
    assert found.parameters["a"].dtype == torch.float32
    assert float(found.losses[0]) == pytest.approx(float(expected.losses[0]), rel=1e-3)


def test_a_flow_that_leaves_its_equilibria_says_when_and_warns_nowhere() -> None:
    """W begins near norm 1, and labels far above the outputs make it grow. Warnings are errors here."""
    readout, X, y = network("gaussian", N=2)
    readout.stop = Stop(rtol=1e-12, max_steps=40)
    with torch.no_grad():
        for p in readout.parameters():
            p.abs_()
        readout.cell.W.mul_(0.95 / torch.linalg.matrix_norm(readout.cell.W, 2))
    for method in ("DOP853", "Radau"):
        text = r"near the time \d.*, since an equilibrium was not found: the flow may have left .*\|\|W\|\| < 1.*did not converge"
        with pytest.raises(ConvergenceError, match=text) as found:
            gradient_flow(readout, X.abs(), 1e3 + 0 * y, [1.0], method=method, rtol=1e-3)  # type: ignore[arg-type]
        assert found.value.solution is not None


def test_a_step_to_where_there_is_no_equilibrium_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = network("tanh")
    expected, plain, calls = gradient_flow(readout, X, y, [0.1]), loss_gradient, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if 5 <= len(calls) < 5 + module._ATTEMPTS - 1:
            raise ConvergenceError("lost", None)  # type: ignore[arg-type]
        return plain(*args)

    monkeypatch.setattr(module, "loss_gradient", failing)
    found = gradient_flow(readout, X, y, [0.1])
    assert found.evals > expected.evals
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)


def test_tolerances_need_no_equilibrium_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = module._Network(*network("tanh"), 10)
    first, plain, calls = inside.jacobian(inside.theta0), inside.jacobian, []

    def once(theta: Any) -> Any:
        calls.append(theta)
        if len(calls) == 2:
            raise ConvergenceError("lost", None)  # type: ignore[arg-type]
        return plain(theta)

    monkeypatch.setattr(inside, "jacobian", once)
    found = inside.tolerances(1e-6)
    assert len(calls) == 2
    assert found.shape == first[0].shape
    assert (found > 0).all()


def test_kinks_that_hold_the_flow_are_noticed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = network("scaled_relu", N=3)
    monkeypatch.setattr(module, "_PATIENCE", 300)
    with pytest.raises(RuntimeError, match=r"since the last 300 gradients advanced it by .* kinks of a ReLU.*larger rtol") as found:
        gradient_flow(readout, X, y, [2.0])
    assert not isinstance(found.value, ConvergenceError)


def test_slow_progress_that_was_asked_for_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = network("tanh")
    monkeypatch.setattr(module, "_PATIENCE", 20)
    dense = gradient_flow(readout, X, y, torch.linspace(0, 1e-6, 12, dtype=torch.float64))
    assert dense.evals > 100
    long = gradient_flow(readout, X, y, [0.0, 1.0])  # more than one look at its progress
    assert long.evals > 50


def test_a_solver_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = network("tanh")
    failed = SimpleNamespace(success=False, message="Required step size is less than spacing.", t=[0.25])
    monkeypatch.setattr("scipy.integrate.solve_ivp", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match=r"near the time 0, since the solver failed: Required step size"):
        gradient_flow(readout, X, y, [1.0])


def test_a_flow_that_leaves_the_numbers_says_so() -> None:
    inside = module._Network(*network("tanh"), 10)
    inside.velocity(0.5, inside.theta0)
    with pytest.raises(RuntimeError, match=r"near the time 0.5, since the parameters are no longer finite"):
        inside.velocity(0.6, math.nan * inside.theta0)


def test_a_cell_without_a_matrix_flows_too() -> None:
    readout = Readout(FunctionCell(lambda z, x: 0.5 * torch.tanh(z + x), (2,))).double()
    X, y = torch.tensor([[1.0, 2.0], [0.5, -1.0]]).double(), torch.tensor([1.0, -1.0]).double()
    Z = readout.solve(X).z.detach()
    found = gradient_flow(readout, X, y, [0.0, 3.0], rtol=1e-9)
    expected = predicted_loss(Z @ Z.T, residual(readout, X, y), None, found.times)
    torch.testing.assert_close(found.losses, expected, rtol=1e-6, atol=0)


# The loss curve of a constant kernel.


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 6), st.floats(0.05, 1.2), st.integers(0, 1000))
def test_the_prediction_is_exact_for_a_linear_model(N: int, p: int, share: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    J, r = torch.randn(N, p, generator=g).double(), torch.randn(N, generator=g).double()
    K = J @ J.T
    step = 2 * share / float(torch.linalg.eigvalsh(K)[-1])  # above 1 it diverges, as predicted
    losses, w = [], torch.zeros(p).double()
    for _ in range(30):
        error = J @ w + r
        losses.append(float(error.square().sum() / 2))
        w = w - step * J.T @ error
    assert predicted_loss(K, r, step, torch.arange(30)).tolist() == pytest.approx(losses, rel=1e-8, abs=1e-14)
    assert float(predicted_loss(K, r, step, 7)) == pytest.approx(losses[7], rel=1e-8, abs=1e-14)


def test_tiny_steps_are_predicted_like_the_flow() -> None:
    g = torch.Generator().manual_seed(0)
    J, r = torch.randn(4, 9, generator=g).double(), torch.randn(4, generator=g).double()
    K = J @ J.T
    times = torch.tensor([[0.0, 0.1], [0.2, 0.5]])
    flow = predicted_loss(K, r, None, times)
    assert flow.shape == (2, 2)
    assert float(flow[0, 0]) == pytest.approx(float(r.square().sum() / 2), rel=1e-12)
    expected = [float((torch.tensor(expm(-t * K.numpy())) @ r).square().sum() / 2) for t in times.flatten().tolist()]
    assert flow.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    steps = predicted_loss(K, r, 1e-5, (times * 1e5).long())
    torch.testing.assert_close(steps, flow, rtol=2e-3, atol=0)


def test_descent_of_wide_networks_is_as_predicted_the_better_the_wider() -> None:
    errors = []
    for width in (20, 240):
        gaps = []
        for seed in range(2):
            readout, X, y = network("gaussian", N=3, n=width, seed=seed)
            K, r0 = empirical_ntk(readout, X), residual(readout, X, y)
            step, z, losses = 0.5 / float(torch.linalg.eigvalsh(K)[-1]), None, []
            for _ in range(13):
                value, gradient, z = loss_gradient(readout, X, y, z)
                losses.append(value)
                with torch.no_grad():
                    for name, parameter in readout.named_parameters():
                        parameter.sub_(step * gradient[name])
            predicted = predicted_loss(K, r0, step, torch.arange(13))
            gaps.append(float((predicted - torch.tensor(losses)).abs().max() / predicted[0]))
        errors.append(sum(gaps) / 2)
    assert errors[1] < errors[0] / 2
    assert errors[1] < 0.05


def test_several_outputs_are_one_long_residual() -> None:
    g = torch.Generator().manual_seed(0)
    J, r = torch.randn(6, 9, generator=g).double(), torch.randn(6, generator=g).double()
    K = J @ J.T
    expected = predicted_loss(K, r, 0.01, torch.arange(3))
    torch.testing.assert_close(predicted_loss(K.view(2, 3, 2, 3), r.view(2, 3), 0.01, torch.arange(3)), expected)
    torch.testing.assert_close(predicted_loss(K, r[:, None], 0.01, torch.arange(3)), expected)


def test_what_a_direction_without_a_share_does_is_no_matter() -> None:
    K, r = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0])).double(), torch.tensor([1.0, 0.0, 1.0, 1.0]).double()
    assert float(predicted_loss(K, r, 10.0, 400)) == math.inf  # not NaN: (1 - 20)^800 times 0 is not there
    only = torch.tensor([0.0, 0.0, 0.0, 1.0]).double()
    assert float(predicted_loss(K, only, 10.0, 400)) == 0.5
    assert predicted_loss(K, 0 * r, 10.0, torch.tensor([0, 400])).tolist() == [0, 0]


def test_an_eigenvalue_that_rounding_made_negative_does_not_grow() -> None:
    K, r = torch.diag(torch.tensor([1.0, 1.0, -1e-16])).double(), torch.ones(3).double()
    assert float(predicted_loss(K, r, None, 1e18)) == 0.5
    assert float(predicted_loss(K, r, 0.5, 2**62)) == 0.5
    assert float(predicted_loss(torch.diag(torch.tensor([1.0, -0.1])).double(), r[:2], None, 10.0)) > 1  # this one is not rounding


def test_a_kernel_that_is_symmetric_to_half_its_digits_is_taken_as_its_symmetric_part() -> None:
    g = torch.Generator().manual_seed(0)
    J, r, noise = (torch.randn(*shape, generator=g).double() for shape in ((4, 9), (4,), (4, 4)))
    skewed = J @ J.T + 1e-9 * noise
    symmetric = (skewed + skewed.T) / 2
    torch.testing.assert_close(predicted_loss(skewed, r, 0.01, 3), predicted_loss(symmetric, r, 0.01, 3), rtol=1e-14, atol=0)


def test_what_predicts_nothing_is_refused() -> None:
    K, r = torch.eye(3).double(), torch.ones(3).double()
    for kernel, residuals, step, k, name in [
        (torch.ones(2, 3).double(), r, 0.1, 1, "kernel"),
        (K + torch.tensor([0.0, 1.0, 0.0]), r, 0.1, 1, "kernel"),
        (math.nan * K, r, 0.1, 1, "kernel"),
        (K, r[:2], 0.1, 1, "residual"),
        (K, math.inf * r, 0.1, 1, "residual"),
        (K, r, 0.0, 1, "step"),
        (K, r, 0.1, -1, "k"),
        (K, r, None, math.nan, "k"),
        (K[:0, :0], r[:0], 0.1, 1, "kernel"),
        (K, r[:, None, None], 0.1, 1, "residual"),
        (torch.ones(2, 3, 2, 2).double(), torch.ones(2, 3).double(), 0.1, 1, "kernel"),
        (torch.eye(6).double().view(2, 3, 2, 3), torch.ones(6).double(), 0.1, 1, "residual"),
    ]:
        with pytest.raises(ValueError, match=f"'{name}'"):
            predicted_loss(kernel, residuals, step, k)
    for k in (0.5, True, 1j, "a", 2**70, None):
        with pytest.raises(TypeError, match="'k'"):
            predicted_loss(K, r, 0.1, k)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'kernel'"):
        predicted_loss([[1.0]], r, 0.1, 1)  # type: ignore[arg-type]
