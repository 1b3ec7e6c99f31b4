"""The problem that each equilibrium solves, against cvxpy, scipy and random points."""

import itertools
import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from opteq import Equilibrium, Stop
from opteq.activations import leaky_relu
from opteq.cells import (
    AffineOptEq,
    ConvOptEq,
    DeepOptEq,
    DepthwiseOptEq,
    FunctionCell,
    MultivariateOptEq,
    OptEq,
    StackedOptEq,
    WideOptEq,
)
from opteq.models.separable import TwofoldOptEq
from opteq.regularizers import L1, L2, Incay
from opteq.theory import envelope, inclusion_residual, objective, recover_problem
from problems import with_norm

MONOTONE = ["relu", "leaky_relu", "tanh", "sigmoid", "softplus", "identity", "soft_threshold"]
EXACT = Stop(rtol=1e-12, max_steps=5000)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def layer(norm: float = 0.95, *, seed: int = 0, inputs: int = 4, features: int = 6, hidden: int = 5, **settings) -> OptEq:
    torch.manual_seed(seed)
    cell = OptEq(inputs, features, hidden, **settings)
    scale = (cell.mu / cell.activation.lipschitz) ** 0.5
    with torch.no_grad():
        cell.W.copy_(with_norm(cell.W, norm * scale))
        cell.U.normal_()
    return cell


def inputs(batch: int = 3, size: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(batch, size, generator=torch.Generator().manual_seed(seed))


def solved(cell, x: Tensor) -> Tensor:
    with torch.no_grad():
        return Equilibrium(cell, stop=EXACT, on_failure="raise")(x)


# --- Theorem 1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("features", "hidden"), [(8, 5), (6, 6), (5, 9)], ids=["hidden <", "hidden =", "hidden >"])
@pytest.mark.parametrize("seed", range(17))
def test_a_relu_equilibrium_is_cvxpys_solution_of_the_dual_qp(seed, features, hidden):
    norm, mu = 0.5 + 0.03 * seed, (1.0, 2.5)[seed % 2]
    cell = layer(norm, seed=seed, features=features, hidden=hidden, mu=mu)
    x = inputs(1, seed=seed)
    W, u = cell.W.detach().numpy(), cell.injection(x).detach().numpy()[0]
    s = cp.Variable(hidden, nonneg=True)
    hessian = np.eye(hidden) - W @ W.T / mu
    problem = cp.Problem(cp.Minimize(cp.quad_form(s, cp.psd_wrap(hessian)) / 2 - u @ s))
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    z = solved(cell, x)[0].numpy()
    assert np.linalg.norm(z - W.T @ s.value / mu) <= 1e-6 * max(1, np.linalg.norm(z))


@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("name", MONOTONE)
def test_phi_is_least_at_the_equilibrium_among_points_of_the_range(name, alpha):
    cell, x = layer(activation=name, alpha=alpha, mu=1.5), inputs()
    z = solved(cell, x)
    least, least_envelope = objective(cell, x, z), envelope(cell, x, z)
    generator = torch.Generator().manual_seed(2)
    count = 250  # for each of the scales: 1,000 points for each sample
    for scale in (1e-3, 0.1, 1.0, 10.0):
        y = z.repeat(count, 1) + scale * torch.randn(count * len(z), z.shape[1], generator=generator)
        assert (objective(cell, x.repeat(count, 1), y) >= least.repeat(count) - 1e-12).all()
        assert (envelope(cell, x.repeat(count, 1), y) >= least_envelope.repeat(count) - 1e-12).all()
    far = z + torch.randn(z.shape, generator=generator)
    assert (objective(cell, x, far) > least + 1e-6).all()  # the test can fail


@pytest.mark.parametrize("name", MONOTONE)
def test_phi_by_fenchel_is_the_conjugate_of_the_activation_for_invertible_W(name):
    """Eq. (4): phi(v) = 1'sigma~*(s) - <u, s> - |v|^2/2 with v = W's, mu = 1."""
    cell, x = layer(activation=name, features=5, hidden=5), inputs()
    y = 0.7 * torch.randn(3, 5)
    v = cell.bind(x).plain(y)
    s = torch.linalg.solve(cell.W.T, v.T).T
    s = torch.where(s.abs() < 1e-12, 0, s)  # not below 0 by rounding, where ReLU's conjugate is infinite
    expected = cell.activation.conjugate(s).sum(1) - (cell.injection(x) * s).sum(1) - (v * v).sum(1) / 2
    torch.testing.assert_close(objective(cell, x, y), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("alpha", [0.2, 0.7])
@pytest.mark.parametrize("name", ["relu", "tanh", "softplus"])
def test_the_envelope_is_the_minimum_that_defines_it(name, alpha):
    """alpha M_phi^{1-alpha}(v) = alpha min_w phi(w) + |w - v|^2 / (2 (1 - alpha)), w = f(y') over pre-images y'."""
    cell, x = layer(activation=name, alpha=alpha, features=4), inputs(1)
    y = torch.randn(1, 4)
    v = alpha * cell.bind(x).plain(y) + (1 - alpha) * y

    def value(t: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.tensor(t).reshape(1, 4).requires_grad_()
        w = cell.bind(x).plain(at)
        total = alpha * (objective(cell, x, at) + ((w - v) ** 2).sum() / (2 * (1 - alpha)))
        (slope,) = torch.autograd.grad(total.sum(), at)
        return total.item(), slope.flatten().numpy()

    found = scipy.optimize.minimize(value, np.zeros(4), jac=True, options={"gtol": 1e-10, "maxiter": 5000})
    assert envelope(cell, x, y).item() == pytest.approx(found.fun, abs=1e-7)


@pytest.mark.parametrize("kind", ["conv", "depthwise", "wide", "unequal wide", "affine", "rotated", "multivariate"])
def test_other_layers_minimise_their_objective(kind):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 4)
    if kind == "conv":
        cell, x = ConvOptEq(3, 2, 4, activation="tanh", mu=0.5), images
    elif kind == "depthwise":
        cell, x = DepthwiseOptEq(3, 2, 4, alpha=0.5), images
    elif kind == "affine":
        cell, x = AffineOptEq(layer(alpha=0.8)), inputs()
        with torch.no_grad():
            cell.A.add_(0.3 * torch.randn(6, 6))
            cell.t.normal_()
    elif kind == "rotated":
        cell, x = AffineOptEq(layer(), orthogonal=True), inputs()
        cell.A = torch.linalg.qr(torch.randn(6, 6))[0]
    elif kind == "multivariate":
        cell, x = MultivariateOptEq(4, 6, 5), inputs()
        B = torch.randn(5, 5)
        cell.S = B @ B.T / torch.linalg.matrix_norm(B, 2) ** 2
    else:
        weights = (0.5, 0.5) if kind == "wide" else (0.8, 0.2)
        cell, x = WideOptEq([layer(seed=i, alpha=a) for i, a in enumerate(weights)]), inputs()
    z = solved(cell, x)
    problem = recover_problem(cell)
    assert problem.kind == "minimisation"
    assert problem.residual(x, z).max() <= 1e-10
    assert problem.residual(x, z + 0.1).min() > 1e-3
    least = problem.value(x, z)
    for scale in (1e-2, 1.0):
        for _ in range(100):
            assert (problem.value(x, z + scale * torch.randn_like(z)) >= least - 1e-11).all()
    torch.testing.assert_close(problem.point(x, z)[0], z, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["layer", "affine", "wide", "regularized", "prox", "two"])
def test_subgradients_are_the_slopes_of_the_value(kind):
    """d value / d y = (d point / d y)' subgradient, by the chain rule, for smooth activations."""
    first, second = layer(activation="tanh", alpha=0.6), layer(activation="softplus", alpha=0.3, seed=5)
    affine = AffineOptEq(first)
    with torch.no_grad():
        affine.A.add_(0.3 * torch.randn(6, 6))
    cell = {
        "layer": first,
        "affine": affine,
        "wide": WideOptEq([first, second]),
        "regularized": DeepOptEq([first], regularizer=L2(), gamma=0.7),
        "prox": DeepOptEq([first], regularizer=L1(), mode="prox", gamma=0.2),
        "two": DeepOptEq([first, second]),
    }[kind]
    problem, x = recover_problem(cell), inputs()
    blocks = [torch.randn(3, 6, requires_grad=True) for _ in range(2 if kind == "two" else 1)]
    slopes = torch.autograd.grad(problem.value(x, *blocks).sum(), blocks)
    points, subgradients = problem.point(x, *blocks), problem.subgradient(x, *blocks)
    expected = torch.autograd.grad(points, blocks, [s.detach() for s in subgradients])
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-9)


# --- Corollary 1 --------------------------------------------------------------------------------------------------------------


def relu_moreau(W: np.ndarray, u: np.ndarray, alpha: float, z: cp.Expression) -> tuple[cp.Expression, list]:
    """alpha M_phi^{1-alpha}(z) of an invertible ReLU layer, as a convex program over w = W's, s >= 0, from Eq. (4).

    phi(W's) = |s|^2/2 - <u, s> - |W's|^2/2 = s'(I - WW')s/2 - <u, s>.
    """
    s = cp.Variable(W.shape[0], nonneg=True)
    phi = cp.quad_form(s, cp.psd_wrap(np.eye(len(u)) - W @ W.T)) / 2 - u @ s
    if alpha == 1:
        return phi, [z == W.T @ s]
    return alpha * (phi + cp.sum_squares(W.T @ s - z) / (2 * (1 - alpha))), []


def clarabel(goal: cp.Expression, constraints: list) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cp.Problem(cp.Minimize(goal), constraints).solve(
            solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
        )


def parts(cell: OptEq, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return cell.W.detach().numpy(), cell.injection(x).detach().numpy()[0]


@pytest.mark.parametrize("alpha", [1.0, 0.6, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_two_layers_minimise_the_objective_of_corollary_1(seed, alpha):
    first, second = (layer(0.9, seed=10 * seed + i, features=5, hidden=5, alpha=alpha) for i in range(2))
    x = inputs(1, seed=seed)
    cell = DeepOptEq([first, second])
    z1, z0 = cp.Variable(5), cp.Variable(5)
    (h1, c1), (h2, c2) = relu_moreau(*parts(first, x), alpha, z1), relu_moreau(*parts(second, x), alpha, z0)
    least = clarabel(h1 + h2 + cp.sum_squares(z1 - z0) / 2, c1 + c2)
    z = solved(cell, x)
    problem = recover_problem(cell)
    np.testing.assert_allclose(z[0].numpy(), z0.value, atol=1e-6)
    np.testing.assert_allclose(first.bind(x)(z)[0].detach().numpy(), z1.value, atol=1e-6)
    assert problem.value(x, *problem.preimage(x, z)).item() == pytest.approx(least, abs=1e-8)
    assert problem.residual(x, z).item() <= 1e-10


# --- Theorem 4 ----------------------------------------------------------------------------------------------------------------


def regularized_by_cvxpy(cell: OptEq, x: Tensor, penalty) -> np.ndarray:
    """argmin phi(z) + penalty(z)."""
    z = cp.Variable(5)
    phi, constraints = relu_moreau(*parts(cell, x), 1.0, z)
    clarabel(phi + penalty(z), constraints)
    return z.value


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_form_minimises_phi_plus_gamma_R(seed):
    cell, x = layer(0.9, seed=seed, features=5, hidden=5), inputs(1, seed=seed)
    deep = DeepOptEq([cell], regularizer=L2(), gamma=0.8)
    z = solved(deep, x)[0].numpy()
    np.testing.assert_allclose(z, regularized_by_cvxpy(cell, x, lambda z: 0.4 * cp.sum_squares(z)), atol=1e-6)


@pytest.mark.parametrize(("R", "gamma"), [(L2(), 0.8), (L1(), 3.0)], ids=["L2", "L1"])
@pytest.mark.parametrize("seed", range(5))
def test_the_prox_form_minimises_the_envelope_and_not_the_sum(seed, R, gamma):
    cell, x = layer(0.9, seed=seed, features=5, hidden=5), inputs(1, seed=seed)
    deep = DeepOptEq([cell], regularizer=R, mode="prox", gamma=gamma)
    z = solved(deep, x)[0].numpy()

    def plain(at: cp.Expression) -> cp.Expression:
        return gamma * (cp.norm1(at) if isinstance(R, L1) else cp.sum_squares(at) / 2)

    def enveloped(at: cp.Expression) -> cp.Expression:
        p = cp.Variable(5)
        return plain(p) + cp.sum_squares(p - at) / 2

    np.testing.assert_allclose(z, regularized_by_cvxpy(cell, x, enveloped), atol=1e-6)
    # (for L1 both agree where every |z_i| > gamma: here some are not)
    assert np.linalg.norm(z - regularized_by_cvxpy(cell, x, plain)) > 1e-3 * np.linalg.norm(z)
    problem = recover_problem(deep)
    assert problem.residual(x, torch.tensor(z)[None]).item() <= 1e-10
    assert "Moreau envelope" in problem.text


@pytest.mark.parametrize("mode", ["gradient", "prox"])
def test_a_regularised_skip_connection_minimises_its_envelope_plus_the_penalty(mode):
    cell, x = layer(0.9, activation="tanh", alpha=0.5, features=5), inputs(1)
    deep = DeepOptEq([cell], regularizer=L2(), mode=mode, gamma=0.8)
    z, problem = solved(deep, x), recover_problem(deep)
    best = problem.value(x, *problem.preimage(x, z)).item()

    def value(t: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.tensor(t)[None].requires_grad_()
        total = problem.value(x, y)
        (slope,) = torch.autograd.grad(total.sum(), y)
        return total.item(), slope[0].numpy()

    found = scipy.optimize.minimize(value, np.ones(5), jac=True, options={"gtol": 1e-10})
    assert best == pytest.approx(found.fun, abs=1e-8)
    (v,) = problem.point(x, torch.tensor(found.x)[None])
    torch.testing.assert_close(v, z, rtol=0, atol=1e-6)
    assert best < problem.value(x, torch.ones(1, 5)).item() - 1e-3


# --- Theorem 2 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [3, 5, 8])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_inclusion_holds_at_equilibria_and_only_there(layers, alpha):
    cells = [layer(0.95, seed=i, alpha=alpha, hidden=4 + i, activation=MONOTONE[i % 3]) for i in range(layers)]
    deep, x = DeepOptEq(cells), inputs()
    z = solved(deep, x)
    assert inclusion_residual(deep, x, z).max() < 1e-10
    assert inclusion_residual(deep, x, z + 0.1 * torch.randn_like(z)).min() > 1e-3
    problem = recover_problem(deep)
    assert problem.kind == "inclusion"
    torch.testing.assert_close(problem.residual(x, z), inclusion_residual(deep, x, z))
    with pytest.raises(TypeError, match="monotone inclusion"):
        problem.value(x, z)
    stacked = StackedOptEq(cells)
    assert inclusion_residual(stacked, x, solved(stacked, x)).max() < 1e-10


def test_the_inclusion_by_gradients_of_envelopes_that_were_computed_by_scipy():
    """0 = grad Phi_l(z_l) + z_l - z_{l-1}, each grad by finite differences of a numerically minimised Moreau envelope."""
    alpha = 0.5
    cells = [layer(0.9, seed=i, alpha=alpha, features=3, hidden=3, activation="tanh") for i in range(3)]
    x = inputs(1)
    path = DeepOptEq(cells).bind(x).path(solved(DeepOptEq(cells), x))
    for cell, before, at in zip(cells, path[:-1], path[1:], strict=True):

        def moreau(v: np.ndarray, cell: OptEq = cell, before: Tensor = before) -> float:
            def inner(t: np.ndarray) -> tuple[float, np.ndarray]:
                y = torch.tensor(t)[None].requires_grad_()
                total = objective(cell, x, y) + ((cell.bind(x).plain(y) - torch.tensor(v)) ** 2).sum() / (2 * (1 - alpha))
                (slope,) = torch.autograd.grad(total.sum(), y)
                return total.item(), slope[0].numpy()

            return alpha * scipy.optimize.minimize(inner, before[0].detach().numpy(), jac=True, options={"gtol": 1e-11}).fun

        slope = scipy.optimize.approx_fprime(at[0].detach().numpy(), moreau, 1e-5)
        np.testing.assert_allclose(slope + (at - before)[0].detach().numpy(), 0, atol=2e-5)


@pytest.mark.parametrize("mode", ["gradient", "prox"])
def test_regularised_deep_networks_state_the_true_inclusion(mode):
    cells = [layer(0.9, seed=i, alpha=0.5) for i in range(3)]
    deep, x = DeepOptEq(cells, regularizer=L2(), mode=mode), inputs()
    z, problem = solved(deep, x), recover_problem(deep)
    assert problem.kind == "inclusion"
    assert ("one more block" if mode == "prox" else "gamma grad R(z_0) added to the first row") in problem.text
    assert problem.residual(x, z).max() < 1e-10
    assert problem.residual(x, solved(DeepOptEq(cells), x)).min() > 1e-4


# --- Theorem 3 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.25)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_the_distance_to_the_wide_limit_halves_with_alpha(name, weights):
    x = inputs()
    cells = [layer(0.9, seed=i, hidden=5 + i, activation=name) for i in range(3)]

    def set_alpha(alpha: float) -> None:
        for cell, weight in zip(cells, weights, strict=True):
            cell.alpha = alpha * weight

    set_alpha(1.0)
    limit = solved(WideOptEq(cells), x)
    distances = []
    for alpha in (0.1, 0.05, 0.025, 0.0125, 0.00625):
        set_alpha(alpha)
        distances.append((solved(DeepOptEq(cells), x) - limit).norm().item())
    ratios = [a / b for a, b in itertools.pairwise(distances)]
    assert min(ratios) >= 1.8, ratios


# --- the object ---------------------------------------------------------------------------------------------------------------


def test_requirements_tell_whether_the_problem_is_convex():
    assert recover_problem(layer(0.99)).convex
    outside = recover_problem(layer(1.5))
    assert not outside.convex
    assert outside.requirements[0].lhs == pytest.approx(2.25)
    assert "FAILS" in str(outside)
    (scaled,) = recover_problem(layer(0.9, activation="sigmoid", mu=2.5)).requirements
    assert (scaled.lhs, scaled.rhs) == (pytest.approx(0.81 * 2.5), 2.5)
    assert not recover_problem(DeepOptEq([layer()], regularizer=Incay())).convex
    too_long = recover_problem(DeepOptEq([layer()], regularizer=L2(), gamma=2.5))
    assert [r.name for r in too_long.requirements if not r.holds] == ["gamma L_R <= 2"]
    conv = recover_problem(ConvOptEq(3, 2, 4))
    assert conv.requirements[0].evidence == "bound"
    assert conv.convex


def test_a_norm_without_a_formula_leaves_the_question_open():
    layers = [TwofoldOptEq(3, 4, 5) for _ in range(2)]
    problem = recover_problem(DeepOptEq(layers))
    assert not problem.convex
    assert [(r.lhs, r.evidence) for r in problem.requirements] == [(math.inf, "bound")] * 2
    assert str(problem).endswith("L ||W_2||^2 <= mu_2: inf <= 1 (bound), not known")
    too_rough = str(recover_problem(DeepOptEq([layer()], regularizer=L1())))
    assert too_rough.endswith("gamma L_R <= 2: inf <= 2 (exact), FAILS")  # L_R is known to be infinite


def test_a_deep_network_of_one_layer_states_the_problem_of_that_layer():
    for cell in (layer(alpha=0.5), MultivariateOptEq(4, 6, 5)):
        alone, deep = recover_problem(cell), recover_problem(DeepOptEq([cell]))
        assert (deep.text, deep.latex) == (alone.text, alone.latex)
        assert alone.text in recover_problem(DeepOptEq([cell], regularizer=L2())).text


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_statement_names_its_parts(alpha):
    problem = recover_problem(layer(alpha=alpha, activation="relu"))
    assert "s^2/2 for s >= 0" in problem.text
    assert r"\tilde\sigma" in problem.latex
    assert ("M_phi^{1-alpha}" in problem.text) is (alpha < 1)
    assert "leaky_relu" in recover_problem(layer(activation=leaky_relu(0.2))).text
    assert "L_1 M_phi" not in recover_problem(DeepOptEq([layer(), layer()])).text
    assert r"\tfrac12\|z_1 - z_0\|^2" in recover_problem(DeepOptEq([layer(), layer()])).latex


def test_braces_of_every_formula_balance():
    a, b = layer(alpha=0.5), layer(seed=2)
    cells = [
        a,
        b,
        WideOptEq([a, b]),
        AffineOptEq(a),
        MultivariateOptEq(4, 6, 5),
        *(DeepOptEq([a, b][: i + 1] * j, regularizer=R, mode=m) for i in (0, 1) for j in (1, 2) for R, m in _steps()),
    ]
    for cell in cells:
        latex = recover_problem(cell).latex
        assert latex.count("{") == latex.count("}")
        assert "min" in latex or "partial" in latex


def _steps():
    return [(None, "gradient"), (L2(), "gradient"), (L1(), "prox"), (Incay(), "gradient")]


def test_what_has_no_objective_is_refused_with_the_reason():
    x, z = inputs(), torch.zeros(3, 6)
    for function in (objective, envelope):
        with pytest.raises(TypeError, match=r"'cell' parameter of .* must be one OptEq layer"):
            function(DeepOptEq([layer(), layer()]), x, z)
        with pytest.raises(TypeError, match="one OptEq layer"):
            function(FunctionCell(lambda z, x: 0 * z, (6,)), x, z)
        with pytest.raises(TypeError, match="without a regulariser"):
            function(DeepOptEq([layer()], regularizer=L2()), x, z)
    for cell in (FunctionCell(lambda z, x: 0 * z, (6,)), Equilibrium(layer())):
        with pytest.raises(TypeError, match=r"a cell of the OptEq family \(of an Equilibrium, its \.cell\)"):
            recover_problem(cell)
    with pytest.raises(TypeError, match="a DeepOptEq or a StackedOptEq"):
        inclusion_residual(layer(), x, z)
    torch.testing.assert_close(objective(DeepOptEq([layer()]), x, z), objective(layer(), x, z))


def test_both_blocks_of_a_stacked_point_count():
    stacked, x = StackedOptEq([layer(), layer(seed=3)]), inputs()
    z = solved(stacked, x)
    problem = recover_problem(stacked)
    assert problem.residual(x, z).max() < 1e-9
    for block in (0, 1):
        moved = z.clone()
        moved[:, block] += 1
        assert problem.residual(x, moved).min() > 0.1


def test_a_step_too_long_spoils_convergence_and_not_convexity():
    long = recover_problem(DeepOptEq([layer()], regularizer=L2(), gamma=3.0))
    assert long.convex
    assert [r.purpose for r in long.requirements if not r.holds] == ["convergence"]
    assert recover_problem(DeepOptEq([layer()], regularizer=L1())).convex


def test_a_float32_cell_takes_float64_inputs():
    for cell, x in ((OptEq(4, 6, 5).float(), inputs()), (ConvOptEq(3, 2, 4).float(), torch.randn(2, 3, 4, 4))):
        z = solved(cell, x)
        assert objective(cell, x, z).dtype == envelope(cell, x, z).dtype == torch.float64
        assert recover_problem(cell).residual(x, z).max() < 1e-9


def test_mistakes_are_named():
    cell, x = layer(), inputs()
    with pytest.raises(TypeError, match=r"'cell' parameter of objective must be a cell.*its \.cell"):
        objective(Equilibrium(cell), x, torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"'y' parameter of envelope must be of shape \[batch, 6\]"):
        envelope(cell, x, torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"'y' parameter of objective must be of 3 samples, as x is, or of one. Got \[2, 6\]"):
        objective(cell, x, torch.zeros(2, 6))
    assert objective(cell, x[:1], torch.zeros(2, 6)).shape == (2,)
    for cells in ([layer(), layer()], [ConvOptEq(3, 2, 4), ConvOptEq(3, 2, 4)]):
        for make in (DeepOptEq, StackedOptEq):
            with pytest.raises(ValueError, match=r"'y' parameter of TwoLayers must be two pre-images, as preimage\(x, z\)"):
                recover_problem(make(cells)).value(x, torch.zeros(3, 6))


@pytest.mark.parametrize("make", [AffineOptEq, lambda cell: MultivariateOptEq(4, 6, 5, alpha=float(cell.alpha))])
def test_the_statement_tells_of_a_skip_connection(make):
    for alpha in (1.0, 0.5):
        assert ("skip connection" in recover_problem(make(layer(alpha=alpha))).text) is (alpha < 1)


def test_the_blocks_of_an_inclusion_are_listed():
    cells = [layer(seed=i) for i in range(5)]
    assert "(z_1, z_2, z_0)" in recover_problem(DeepOptEq(cells[:3])).text
    assert "(z_1, ..., z_4, z_0)" in recover_problem(DeepOptEq(cells)).text
    assert "(z_1, z_0)" in recover_problem(DeepOptEq(cells[:2], regularizer=L2())).text
