"""The experiments on gamma-scaled ReLU networks: their descent against autograd, iterations against formulas, and their judges."""

import math
from itertools import pairwise

import pytest
import torch

from opteq import data
from opteq.experiments import Options, _scaledrelu, scaledrelu_gamma, scaledrelu_step, scaledrelu_width
from opteq.experiments._harness import found


def smoke(**own):
    """The settings of a small training on digits."""
    chosen = {
        "data": "digits",
        "width": 5,
        "gamma": 0.1,
        "step": 1e-3,
        "seed": 3,
        "samples": 20,
        "tests": 4,
        "steps": 2,
        "every": 1,
    }
    return _scaledrelu.settings(scaledrelu_width.PRESETS["smoke"], Options(seed=3), **{**chosen, **own})


def unrolled(W, A, x, gamma, steps=120):
    Z = torch.zeros(len(x), len(A), dtype=x.dtype)
    for _ in range(steps):
        Z = torch.relu(gamma * Z @ A + torch.relu(x @ W))
    return Z


@pytest.mark.parametrize(("gamma", "step", "steps"), [(0.1, 1e-3, 3), (0.8, 5e-3, 12)])
def test_gradient_descent_is_that_of_the_paper(gamma, step, steps):
    """Against an unrolling of the iteration and autograd, in float64."""
    found = _scaledrelu.train(smoke(gamma=gamma, step=step, steps=steps, tolerance=1e-7))
    (x, y), held_out = data.theory_split(data.load("digits"), train=20, test=4, targets=(0.0, 1.0), seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        W = (torch.randn(784, 5) / math.sqrt(5)).double().requires_grad_()
    A, b = torch.eye(5, dtype=torch.float64, requires_grad=True), torch.zeros(5, dtype=torch.float64, requires_grad=True)

    def loss(x, y):
        return (unrolled(W, A, x, gamma) @ b - y).square().sum() / 2

    losses = []
    for k in range(steps + 1):
        value = loss(x, y)
        losses.append(value.item())
        curves = found["curves"]
        assert curves["k"][k] == k
        assert curves["train"][k] == pytest.approx(losses[k], rel=1e-4)
        assert curves["test"][k] == pytest.approx(loss(*held_out).item(), rel=1e-4)
        assert curves["norm"][k] == pytest.approx(gamma * torch.linalg.matrix_norm(A, 2).item(), rel=1e-5)
        with torch.no_grad():
            for parameter, gradient in zip((W, A, b), torch.autograd.grad(value, (W, A, b)), strict=True):
                parameter -= step * gradient
    assert found["rise"] == pytest.approx(max(later / earlier for earlier, later in pairwise(losses)), rel=1e-4)
    assert found["peak"] == pytest.approx(max(losses[1:]) / losses[0], rel=1e-4)
    assert found["stopped"] is None


def test_the_solves_find_the_equilibrium_and_its_adjoint_also_far_from_the_identity():
    """With A = -0.8 I the faster iteration diverges (E = -7.2 I), and the plain one must be taken."""
    generator = torch.Generator().manual_seed(0)
    x, r = torch.rand(7, 6, generator=generator), torch.randn(7, generator=generator)
    for A in (torch.eye(8) + 0.02 * torch.randn(8, 8, generator=generator), -0.8 * torch.eye(8)):
        network = _scaledrelu.Network(6, 8, 0.8, seed=1, tolerance=1e-6)
        network.A, network.b = A, torch.randn(8, generator=generator)
        Z, V = network.solve(x), network.adjoint(r)
        torch.testing.assert_close(Z, unrolled(network.W, A, x, 0.8), rtol=1e-4, atol=1e-5)
        D = (Z > 0).float()
        torch.testing.assert_close(V, D * (torch.outer(r, network.b) + 0.8 * V @ A.T), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(network.predict(x), Z @ network.b, rtol=1e-4, atol=1e-4)


def test_a_training_stops_where_it_finds_no_equilibrium(monkeypatch):
    network = _scaledrelu.Network(6, 8, 0.5, seed=1, tolerance=1e-6)
    network.A = 4 * torch.eye(8)
    assert network.solve(torch.ones(7, 6)).isnan().all()
    monkeypatch.setattr(_scaledrelu, "MOST", 1)  # enough as long as A = I, and the first step, from b = 0, moves b alone
    found = _scaledrelu.train(smoke(steps=20))
    assert found["stopped"] == 2
    assert found["curves"]["k"] == [0, 1]


@pytest.mark.parametrize("gamma", [0.1, 0.3, 0.5, 0.8])
def test_the_forward_iterations_at_the_identity_are_those_of_the_formula(gamma):
    """The l-th change is gamma^(l - 1) Phi."""
    network = _scaledrelu.Network(6, 8, gamma, seed=1, tolerance=1e-6)
    x = torch.rand(7, 6, generator=torch.Generator().manual_seed(0))
    Phi = torch.relu(x @ network.W).double()
    for count, order in zip(_scaledrelu.forward_iterations(network, x), (2, "fro"), strict=True):
        size = torch.linalg.matrix_norm(Phi, order).item()
        assert count == 1 + math.ceil(math.log(size / 1e-2) / math.log(1 / gamma))


def test_the_forward_iterations_end_at_a_hundred():
    network = _scaledrelu.Network(6, 8, 0.5, seed=1, tolerance=1e-6)
    network.A = 4 * torch.eye(8)
    x = torch.rand(7, 6, generator=torch.Generator().manual_seed(0))
    assert _scaledrelu.forward_iterations(network, x) == (100, 100)


# --- what is judged -------------------------------------------------------------------------------------------------------------


def all_shown(measured):
    return bool(measured) and all(one["shown"] for one in measured.values())


def test_a_wrong_order_of_widths_or_a_norm_that_grows_is_not_shown():
    config = scaledrelu_width.PRESETS["smoke"]
    good = {"train": [9.0, 1.0], "test": [9.0, 1.0], "norm": [0.1, 0.11]}
    for name, bad in {
        "training_loss": {"train": [9.0, 1.3]},
        "test_loss": {"test": [9.0, 1.3]},
        "norm": {"norm": [0.1, 0.16]},
    }.items():
        for claim in scaledrelu_width.CLAIMS:  # one seed of two, which moves the mean
            series = {"digits": {"m = 1": [good, good], "m = 2": [good, {**good, **bad}]}}
            assert all_shown(scaledrelu_width.judge(claim, config, series)) == (claim != name)
            series["digits"]["m = 2"] = [good, None]
            assert not all_shown(scaledrelu_width.judge(claim, config, series))  # a cell that failed
    low = scaledrelu_width.judge("norm", config, {"digits": {"m = 1": [{**good, "norm": [0.1, 0.04]}]}})
    assert [one["shown"] for one in low.values()] == [True, False]


def test_a_forward_pass_that_overflows_does_not_count_as_converged():
    network = _scaledrelu.Network(3, 4, 0.5, 0, 1e-5)
    network.A = 1e30 * torch.ones(4, 4)
    x = torch.ones(2, 3)
    network.W = torch.ones(3, 4)
    assert _scaledrelu.forward_iterations(network, x) == (_scaledrelu.LIMIT, _scaledrelu.LIMIT)


def test_a_training_that_stopped_shows_nothing():
    found = {"curves": {"train": [1.0]}, "stopped": 11}
    assert scaledrelu_width.curves(found) is None
    assert scaledrelu_width.curves({**found, "stopped": None}) == {"train": [1.0]}


def test_the_end_is_a_median_and_the_mean_has_a_standard_error():
    assert _scaledrelu.end([*range(40), 5.0, 100.0, 6.0, 7.0]) == 6.5  # of the last four, so that one peak does not matter
    assert (_scaledrelu.shown([1.0, 3.0]), _scaledrelu.shown([2.0])) == ("2 ± 1", "2")


def steps(large, small):
    """The series of one data set with two steps."""
    return {"digits": {"0.1": large, "0.001": small}}


def test_a_large_step_that_descends_or_a_small_one_that_does_not_is_not_shown():
    config = scaledrelu_step.PRESETS["smoke"]
    falls = {"curves": {"train": [9.0, 1.0], "test": [9.0, 1.0], "norm": [0.1, 0.11]}, "rise": 0.5, "peak": 0.5}
    rises = {"curves": {"train": [9.0, 20.0, 8.0], "test": [9.0, 20.0, 8.0], "norm": [0.1, 5.0]}, "rise": 2.2, "peak": 2.2}

    def judged(large, small):
        return {name: all_shown(one) for name, one in scaledrelu_step.judge(config, steps(large, small)).items()}

    assert judged(rises, falls) == dict.fromkeys(scaledrelu_step.CLAIMS, True)
    assert judged(falls, falls) == {"large": False, "test_loss": False, "norm": True, "bounded": False, "small": True}
    assert judged(rises, rises) == {"large": True, "test_loss": True, "norm": True, "bounded": False, "small": False}
    assert judged(falls, rises) == dict.fromkeys(scaledrelu_step.CLAIMS, False)
    assert judged(None, falls) == {"large": False, "test_loss": False, "norm": False, "bounded": False, "small": True}
    assert judged(rises, None) == dict.fromkeys(scaledrelu_step.CLAIMS, False)


def gamma_result(loss, count, peak=0.9, stopped=None):
    curves = {"k": [0, 1], "train": [9.0, loss], "test": [9.0, loss], "norm": [0.1, 0.2], "operator": [count, count]}
    return {"curves": curves, "peak": peak, "stopped": stopped}


def test_table_1_takes_the_largest_stable_step_and_what_failed_shows_nothing():
    def judged(series):
        return {name: all_shown(one) for name, one in scaledrelu_gamma.judge({"mnist": series}).items()}

    small = {"0.1": gamma_result(5.0, 6), "0.8": gamma_result(1.0, 50)}
    large = {"0.1": gamma_result(4.0, 5), "0.3": gamma_result(3.0, 9), "0.8": gamma_result(8.0, 3, peak=1.5)}
    series = {"0.001": large, "0.0001": {**small, "0.3": gamma_result(2.0, 9)}}
    counted = scaledrelu_gamma.counted({"mnist": series})
    assert [(gamma, eta) for gamma, (eta, _) in counted.items()] == [("0.1", "0.001"), ("0.3", "0.001"), ("0.8", "0.0001")]
    assert judged({"0.0001": small}) == dict.fromkeys(scaledrelu_gamma.CLAIMS, True)
    for result, wrong in (
        (gamma_result(1.0, 20), {"iterations"}),
        (gamma_result(6.0, 50), {"training_loss", "test_loss"}),
        (gamma_result(1.0, 5), {"iterations", "more"}),
        (gamma_result(1.0, 50, stopped=7), set(scaledrelu_gamma.CLAIMS)),
        (None, set(scaledrelu_gamma.CLAIMS)),
    ):
        shown = judged({"0.0001": {**small, "0.8": result}})
        assert {name for name, one in shown.items() if not one} == wrong
    shrinks = gamma_result(1.0, 50)
    shrinks["curves"]["operator"] = [51, 49]
    assert {name for name, one in judged({"0.0001": {**small, "0.8": shrinks}}).items() if not one} == {"growth"}


def test_data_that_are_not_there_are_left_out_unless_required(tmp_path):
    assert found(("digits", "mnist"), 1, tmp_path) == ["digits"]
    for module in (scaledrelu_width, scaledrelu_step, scaledrelu_gamma):
        with pytest.raises(FileNotFoundError, match=r"^mnist .*train-images-idx3-ubyte"):
            module.run(Options("small", data_dir=tmp_path))
