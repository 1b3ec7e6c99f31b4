"""The cells of the convergence theory, and Readout, which puts a linear output on them."""

import math

import pytest
import torch
from torch import nn

from cell_zoo import random_matrix
from opteq import ConvergenceError, Equilibrium, Stop
from opteq.cells import ConvOptEq, DeepOptEq, GaussianDEQ, Monotone, MonotoneConv, MonotoneMultiTier, OptEq, ScaledReLU
from opteq.models import Readout
from opteq.solvers import Anderson, Picard

X = random_matrix(5, 3, seed=0)


# Initialisations


def test_gaussian_weights_have_the_variances_of_assumption_1():
    torch.manual_seed(0)
    cell = GaussianDEQ(50, 400, sigma_w2=0.08)
    assert cell.W.shape == (400, 400)
    assert cell.U.shape == (400, 50)
    assert cell.W.var().item() == pytest.approx(2 * 0.08 / 400, rel=0.02)
    assert cell.U.var().item() == pytest.approx(2 / 50, rel=0.05)
    assert torch.linalg.matrix_norm(cell.W, 2).item() == pytest.approx(2 * math.sqrt(2 * 0.08), rel=0.05)


def test_gaussian_states_of_inputs_of_norm_sqrt_d_have_a_norm_of_about_sqrt_m():
    torch.manual_seed(0)
    x = nn.functional.normalize(torch.randn(6, 30)) * math.sqrt(30)
    z = Equilibrium(GaussianDEQ(30, 2000, sigma_w2=0.08))(x)
    assert z.square().mean().item() == pytest.approx(1 / (1 - 0.08), rel=0.05)


@pytest.mark.parametrize("init", ["identity", "scaled_identity", "half_normal"])
def test_scaled_relu_weights_are_those_of_the_paper(init):
    torch.manual_seed(0)
    cell = ScaledReLU(50, 300, init=init)
    std = 1.0 if init == "half_normal" else 300**-0.5
    assert cell.W.shape == (50, 300)
    assert cell.W.std().item() == pytest.approx(std, rel=0.05)
    if init == "half_normal":
        assert (cell.A >= 0).all()
        assert cell.A.square().mean().item() == pytest.approx(1, rel=0.05)
    else:
        size = 1.0 if init == "identity" else torch.linalg.matrix_norm(cell.W, 2).item()
        torch.testing.assert_close(cell.A.detach(), size * torch.eye(300))


@pytest.mark.parametrize("init", ["linear", "normal"])
def test_monotone_weights_are_drawn_by_name(init):
    torch.manual_seed(0)
    cells = [Monotone(50, 300, init=init), MonotoneConv(20, 30, 4, init=init), MonotoneMultiTier(20, (30, 20), 4, init=init)]
    for cell in cells:
        for name, p in cell.named_parameters():
            if name[0] == "b":
                assert not p.any()
            else:
                scale = p[0].numel() ** -0.5
                assert p.std().item() == pytest.approx(scale if init == "normal" else scale / math.sqrt(3), rel=0.05)
                assert init == "normal" or p.abs().max() <= scale


@pytest.mark.parametrize("make", [ScaledReLU, Monotone, lambda d, n, init: MonotoneConv(d, n, 4, init=init)])
def test_unknown_initialisations_are_refused(make):
    with pytest.raises(ValueError, match=r"The 'init' parameter of \w+ must be one of '\w+', '.*'. Got 'xavier' instead."):
        make(3, 4, init="xavier")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GaussianDEQ(0, 4), "in_features"),
        (lambda: GaussianDEQ(3, 4.0), "width"),
        (lambda: GaussianDEQ(3, 4, sigma_w2=-0.1), "sigma_w2"),
        (lambda: ScaledReLU(3, 0), "width"),
        (lambda: ScaledReLU(3, 4, gamma=0.0), "gamma"),
        (lambda: Monotone(3, 4, m=0.0), "m"),
        (lambda: Monotone(3, 4, m=math.nan), "m"),
        (lambda: Monotone(3, 4, bias=1), "bias"),
        (lambda: Monotone(3, 4, activation="gelu"), "activation"),
        (lambda: Monotone(3, 4, activation=2), "activation"),
        (lambda: MonotoneConv(3, 4, 0), "size"),
        (lambda: MonotoneConv(3, 4, (4, 4, 4)), "size"),
        (lambda: MonotoneConv(3, 4, True), "size"),
        (lambda: MonotoneConv(3, 4, 4, padding="reflect"), "padding"),
        (lambda: MonotoneConv(3, 4, 4, kernel_size=0), "kernel_size"),
        (lambda: MonotoneMultiTier(3, (2, 2), (4, 5)), "size"),
        (lambda: MonotoneMultiTier(3, (), 4), "channels"),
        (lambda: MonotoneMultiTier(3, 4, 4), "channels"),
    ],
)
def test_bad_arguments_are_refused_by_name(make, name):
    with pytest.raises((ValueError, TypeError), match=rf"The '{name}' parameter of \w+ must be"):
        make()


def test_an_activation_that_is_no_proximal_operator_is_refused():
    from opteq.activations import Activation

    steep = Activation("steep", lambda a: 2 * a, lipschitz=2.0)
    with pytest.raises(ValueError, match=r"1-Lipschitz.*steep, of Lipschitz constant 2"):
        Monotone(3, 4, activation=steep)


# Closed forms


@pytest.mark.parametrize("init", ["identity", "scaled_identity", "half_normal"])
def test_the_closed_form_is_the_equilibrium_where_A_is_nonnegative(init):
    torch.manual_seed(1)
    cell = ScaledReLU(3, 8, gamma=0.1 if init == "half_normal" else 0.4, init=init).double()
    z = Equilibrium(cell, None, Stop(1e-13, max_steps=500))(X)
    torch.testing.assert_close(cell.closed_form(X), z, rtol=1e-11, atol=1e-12)


def test_the_closed_form_needs_a_spectral_radius_and_not_a_norm_below_1():
    cell = ScaledReLU(3, 2, gamma=1.0).double()
    with torch.no_grad():
        cell.A.copy_(torch.tensor([[0.5, 4.0], [0.0, 0.5]]))
    z = Equilibrium(cell, None, Stop(1e-13, max_steps=500))(X)
    torch.testing.assert_close(cell.closed_form(X), z, rtol=1e-10, atol=1e-11)


def test_the_closed_form_is_refused_where_it_does_not_hold():
    cell = ScaledReLU(3, 4, gamma=0.5).double()
    with torch.no_grad():
        cell.A[0, 1] = -0.25
    with pytest.raises(ValueError, match=r"The 'A' parameter of closed_form must be nonnegative in every entry. Got .*-0.25"):
        cell.closed_form(X)
    with torch.no_grad():
        cell.A.copy_(2 * torch.eye(4))
    with pytest.raises(ValueError, match=r"spectral radius below 1 / gamma. Got 'gamma rho\(A\) = 1'"):
        cell.closed_form(X)


# Readout


@pytest.mark.parametrize(
    "make",
    [
        lambda: GaussianDEQ(3, 200),
        lambda: ScaledReLU(3, 200),
        lambda: ScaledReLU(3, 200, gamma=1 / 300, init="half_normal"),
        lambda: Monotone(3, 200),
        lambda: OptEq(3, 200, 20),
        lambda: DeepOptEq([OptEq(3, 200, 20), OptEq(3, 200, 9)]),
    ],
)
def test_readout_is_a_linear_function_of_the_equilibrium(make):
    torch.manual_seed(0)
    cell = make().double()
    model = Readout(cell)
    assert model.a.shape == (200,)
    if isinstance(cell, ScaledReLU) and cell.init == "identity":
        assert not model.a.any()
    else:
        assert model.a.std().item() == pytest.approx(200**-0.5, rel=0.2)
    nn.init.normal_(model.a)
    solution = model.solve(X)
    assert solution.residual.max() <= 1e-12
    torch.testing.assert_close(model(X), solution.z @ model.a)
    assert model(X).shape == (5,)
    assert {name.split(".")[-1] for name, _ in model.named_parameters()} >= {"a", "U"} - (
        {"U"} if isinstance(cell, ScaledReLU) else set()
    )


def test_readout_solves_as_tightly_as_its_precision_allows_unless_told_otherwise():
    torch.manual_seed(0)
    model = Readout(GaussianDEQ(3, 20))
    assert model.solve(X.float()).stop.rtol == 100 * torch.finfo(torch.float32).eps
    assert model.double().solve(X).stop.rtol == 1e-12
    assert Readout(GaussianDEQ(3, 20), stop=Stop(1e-2)).solve(X.float()).stop == Stop(1e-2)
    assert model(X.float()).dtype is torch.float64  # promoted
    assert Readout(GaussianDEQ(3, 20).double()).a.dtype is torch.float64


def test_readout_hands_on_the_solver_and_the_policy():
    torch.manual_seed(0)
    cell = GaussianDEQ(3, 20)
    with torch.no_grad():
        cell.W.copy_(3 * torch.eye(20))
    with pytest.raises(ConvergenceError):
        Readout(cell, Picard(), on_failure="raise")(X.float())
    one = Readout(GaussianDEQ(3, 20), Anderson(memory=1))
    assert one.solve(X.float(), torch.ones(5, 20)).converged.all()
    plain, default = (Readout(one.cell.double(), solver).solve(X) for solver in (Picard(), None))
    assert plain.steps.sum() > default.steps.sum()
    assert Readout(one.cell, Picard()).solve(X, plain.z.detach()).steps.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Readout(nn.Linear(3, 4)), "The 'cell' parameter of Readout must be a Cell"),
        (
            lambda: Readout(DeepOptEq([ConvOptEq(2, 2, 2)])),
            "The 'cell' parameter of Readout must be a cell whose states are vectors",
        ),
        (lambda: Readout(MonotoneConv(2, 2, 4)), "must be a cell whose states are vectors"),
        (lambda: Readout(GaussianDEQ(3, 4), solver="anderson"), "The 'solver' parameter of Equilibrium must be"),
        (lambda: Readout(GaussianDEQ(3, 4), on_failure="no"), "The 'on_failure' parameter of Equilibrium must be"),
    ],
)
def test_readout_refuses_what_does_not_fit(make, said):
    with pytest.raises((TypeError, ValueError), match=said):
        make()


def test_readout_trains_like_any_module_and_its_state_dict_round_trips():
    torch.manual_seed(0)
    model, other = Readout(Monotone(3, 10, m=0.5)), Readout(Monotone(3, 10, m=0.5))
    y = torch.sin(X.float().sum(1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(X.float()) - y).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(X.float()), model(X.float()))
