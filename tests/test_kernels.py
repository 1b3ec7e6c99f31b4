"""Infinite-width kernels against Monte Carlo, wide networks and 50 digits; regression against refitting and trained networks."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import write_verify
from opteq.cells import GaussianDEQ
from opteq.models import Readout
from opteq.theory.kernels import (
    KernelRegression,
    kernel_regression,
    least_eigenvalue,
    population_kernel,
    scaled_relu_kernel,
    tangent_limit,
)
from opteq.theory.ntk import empirical_ntk


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_sphere(n: int, d: int, seed: int = 0) -> Tensor:
    """Inputs of norm sqrt(d), as the paper has them."""
    X = normal(n, d, seed=seed)
    return X * math.sqrt(d) / X.norm(dim=1, keepdim=True)


def mixed(n: int, d: int, seed: int = 0) -> Tensor:
    """Inputs whose norms go from 0.3 to 3 times sqrt(d)."""
    return on_sphere(n, d, seed) * torch.logspace(math.log10(0.3), math.log10(3), n, dtype=torch.float64)[:, None]


def printed_Q(c: Tensor) -> Tensor:
    """Q as the paper writes it."""
    return ((1 - c**2).clamp(min=0).sqrt() + (math.pi - c.clamp(-1, 1).arccos()) * c) / math.pi


def definition_1(X: Tensor, sigma_w2: float, depth: int, average: Callable[[Tensor], Tensor]) -> Tensor:
    """K^(l) layer by layer; `average` maps the covariance of (u, v) to E[relu(u) relu(v)]."""
    K = torch.zeros(len(X), len(X), dtype=torch.float64)
    for _ in range(depth):
        K = 2 * average(sigma_w2 * K + X @ X.T / X.shape[1])
    return K


def arc_cosine(covariance: Tensor) -> Tensor:
    scale = covariance.diagonal().sqrt()
    scales = torch.outer(scale, scale)
    return scales * printed_Q(covariance / scales) / 2


# --- the population kernel --------------------------------------------------------------------------------------------------------


def exact_kernel(t: Any, sigma_w2: float, *, tangent: bool) -> Any:
    """The kernel of two inputs of norm sqrt(d) at the angle t, by bisection with 80 digits."""
    s, cos_x = mp.mpf(sigma_w2), mp.cos(t)
    low, high = cos_x, mp.mpf(1)

    def Q(c: Any) -> Any:
        return (mp.sqrt(1 - c * c) + (mp.pi - mp.acos(c)) * c) / mp.pi

    for _ in range(180):
        c = (low + high) / 2
        low, high = (c, high) if c < s * Q(c) + (1 - s) * cos_x else (low, c)
    K, k = Q(low) / (1 - s), 1 - mp.acos(low) / mp.pi
    return K * (1 + k / 2 / (1 - s * k)) if tangent else K


@pytest.mark.parametrize("tangent", [False, True])
@pytest.mark.parametrize("sigma_w2", [0.0, 1e-10, 0.08, 0.5, 0.999, 1 - 1e-12])
def test_kernels_are_exact_to_rounding_at_every_angle(sigma_w2: float, tangent: bool) -> None:
    kernel = tangent_limit if tangent else population_kernel
    near = [1e-14, 1e-9, 1e-6, 1e-3]
    with mp.workdps(80):
        for angle in [*near, 0.3, 1.0, 1.6, 2.5, *(math.pi - t for t in near[1:])]:
            X = torch.tensor([[math.sqrt(2), 0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
            x, y = (mp.mpf(v) for v in X[1].tolist())
            expected = exact_kernel(mp.atan2(y, x), sigma_w2, tangent=tangent) * mp.sqrt(x * x + y * y) * mp.mpf(math.sqrt(2)) / 2
            assert abs(kernel(X, sigma_w2)[0, 1].item() / expected - 1) < 3e-15


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_finite_depth_is_definition_1_by_monte_carlo(depth: int) -> None:
    X, samples = mixed(5, 6), 200_000

    def average(covariance: Tensor) -> Tensor:
        u = normal(samples, 5, seed=1) @ torch.linalg.cholesky(covariance).T
        return torch.relu(u).T @ torch.relu(u) / samples

    K = population_kernel(X, 0.3, depth)
    scale = torch.outer(K.diagonal(), K.diagonal()).sqrt()
    assert ((definition_1(X, 0.3, depth, average) - K) / scale).abs().max() < 0.03  # a standard error is at most 0.005 a layer
    assert torch.allclose(definition_1(X, 0.3, depth, arc_cosine), K, rtol=1e-7, atol=0)  # limited by arccos on the diagonal
    assert ((definition_1(X, 0.2, depth, average) - K) / scale).abs().max() > 0.03 or depth == 1  # the test can see sigma_w2


def test_deep_networks_with_weights_of_their_own_in_each_layer_have_this_kernel() -> None:
    X, m, sigma_w2 = mixed(6, 10, seed=3), 1500, 0.3
    U, Z = normal(m, 10, seed=4) * math.sqrt(2 / 10), torch.zeros(m, 6, dtype=torch.float64)
    for layer in range(12):
        Z = torch.relu(normal(m, m, seed=100 + layer) * math.sqrt(2 * sigma_w2 / m) @ Z + U @ X.T)
        if layer in (0, 2, 11):
            K = population_kernel(X, sigma_w2, layer + 1)
            scale = torch.outer(K.diagonal(), K.diagonal()).sqrt()
            assert ((Z.T @ Z / m - K) / scale).abs().max() < 0.2  # 0.04 is one standard error at m = 1500
    assert ((K - population_kernel(X, sigma_w2)) / scale).abs().max() < 1e-5


@pytest.mark.parametrize("sigma_w2", [0.02, 0.08, 0.125, 0.5])
def test_the_depth_converges_by_sigma_w2_a_layer_and_not_by_its_root(sigma_w2: float) -> None:
    X = mixed(6, 5)
    limit = population_kernel(X, sigma_w2)
    last = max(3, int(math.log(1e-8) / math.log(sigma_w2)))
    errors = [(population_kernel(X, sigma_w2, depth) - limit).norm().item() for depth in (last - 1, last)]
    assert errors[1] / errors[0] == pytest.approx(sigma_w2, rel=0.05)
    assert errors[1] < 0.1 * math.sqrt(last) * sigma_w2 ** (last / 2) * limit.norm().item()  # the printed bound is far above


def test_lemma_3_as_printed_divides_by_zero_and_then_uses_the_wrong_layer() -> None:
    X, s = on_sphere(5, 4), 0.1
    cos_x = X @ X.T / 4
    rho = [(1 - s**layer) / (1 - s) for layer in range(6)]
    with pytest.raises(ZeroDivisionError):
        1 / rho[0]  # Eq. (13) at l = 1 needs 1/rho^(0)
    printed = right = cos_x
    for layer in range(2, 6):
        printed = (1 - 1 / rho[layer - 1]) * printed_Q(printed) + cos_x / rho[layer - 1]
        right = (1 - 1 / rho[layer]) * printed_Q(right) + cos_x / rho[layer]
        K = population_kernel(X, s, layer)
        assert (rho[layer] * printed_Q(right) - K).abs().max() < 1e-7
        wrong = (rho[layer] * printed_Q(printed) - K).abs().max()
        assert wrong > (1e-2 if layer == 2 else s**layer)
        previous = population_kernel(X, s, layer - 1)
        denominator = rho[layer] * printed_Q((s * previous + cos_x) / (s * previous + 1))  # Lemma 3: K_ij where K_ii is meant
        assert (denominator - K).abs().max() > 1e-3


def test_lemma_1_fails_at_its_exact_edge_with_a_probability_that_does_not_vanish() -> None:
    """||W|| > 2 sqrt(2) sigma_w in about 14% of the draws at m = 100 and 17% in the limit (Tracy-Widom): not in exp(-Omega(m))."""
    for m, draws in ((25, 1000), (100, 300)):
        W = normal(draws, m, m, seed=m) * math.sqrt(2 * 0.08 / m)
        outside = (torch.linalg.eigvalsh(W @ W.mT)[:, -1].sqrt() > 2 * math.sqrt(2 * 0.08)).double().mean().item()
        assert 0.08 < outside < 0.25


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 6), st.sampled_from([0.0, 0.05, 0.12, 0.7, 0.99]))
def test_the_kernel_is_the_positive_homogeneous_fixed_point(seed: int, n: int, d: int, sigma_w2: float) -> None:
    X = normal(n, d, seed=seed)
    scale = normal(n, seed=seed + 1).exp()
    K = population_kernel(X, sigma_w2)
    assert torch.equal(K, K.T)
    assert torch.allclose(K.diagonal(), (X**2).sum(1) / d / (1 - sigma_w2), rtol=1e-13)
    again = 2 * arc_cosine(sigma_w2 * K + X @ X.T / d)
    assert torch.allclose(again, K, rtol=1e-6, atol=1e-7 * K.max().item())
    assert torch.allclose(population_kernel(scale[:, None] * X, sigma_w2), torch.outer(scale, scale) * K, rtol=1e-11)
    assert torch.linalg.eigvalsh(K)[0] > -1e-13 * K.diagonal().sum()
    deep = population_kernel(X, sigma_w2, 60)
    assert (deep - K).abs().max() <= 1.01 * sigma_w2**60 * K.diagonal().max() + 1e-13 * K.max()


def test_parallel_inputs_are_told_from_inputs_that_are_almost_so() -> None:
    x, sideways = normal(1, 7), normal(1, 7, seed=1)
    K = population_kernel(torch.cat([x, 3 * x, x + 1e-7 * sideways, -x]), 0.08)
    assert abs(K[0, 1] / K[0, 0] - 3) < 1e-14
    correlation = K / torch.outer(K.diagonal(), K.diagonal()).sqrt()
    assert 1e-16 < 1 - correlation[0, 2] < 1e-13
    assert 0 < correlation[0, 3] < 0.1  # -x is not parallel: it turns other units on
    H = tangent_limit(torch.cat([x, x + 1e-7 * sideways]), 0.08)
    lost = torch.outer(H.diagonal(), H.diagonal()).sqrt()[0, 1] - H[0, 1]
    assert 1e-9 < lost / H[0, 0] < 1e-7  # linear in the angle, which 1 - c = 1e-15 could not give


@pytest.mark.parametrize(
    "kernel",
    [
        lambda X, X2=None: population_kernel(X, 0.08, None, X2),
        lambda X, X2=None: population_kernel(X, 0.08, 3, X2),
        lambda X, X2=None: tangent_limit(X, 0.08, X2, width=50),
        scaled_relu_kernel,
    ],
)
def test_blocks_zeros_dtypes_and_empty_sets(kernel: Callable[..., Tensor]) -> None:
    X, X2 = mixed(5, 4), normal(3, 4, seed=9)
    X[2] = 0
    both = kernel(torch.cat([X, X2]))
    assert torch.allclose(kernel(X, X2), both[:5, 5:], rtol=1e-13)
    assert torch.equal(both[2], torch.zeros(8, dtype=torch.float64))
    assert both.isfinite().all()
    single = kernel(X.float(), X2.float())
    assert single.dtype == torch.float32
    assert torch.equal(single, kernel(X.float().double(), X2.float().double()).float())
    assert kernel(X.float(), X2).dtype == torch.float64
    assert kernel(X[:0]).shape == (0, 0)
    assert kernel(X, X2[:0]).shape == (5, 0)
    assert not kernel(X.requires_grad_()).requires_grad


def test_depth_zero_is_zero_and_no_depth_needs_a_small_sigma_w2() -> None:
    X = mixed(3, 4)
    assert torch.equal(population_kernel(X, 0.5, 0), torch.zeros(3, 3, dtype=torch.float64))
    assert torch.allclose(population_kernel(X, 1.0, 7).diagonal(), 7 * (X**2).sum(1) / 4)
    assert torch.allclose(population_kernel(X, 2.0, 3), definition_1(X, 2.0, 3, arc_cosine), rtol=1e-6)


@pytest.mark.parametrize("kernel", [population_kernel, tangent_limit])
def test_bad_inputs_are_named(kernel: Callable[..., Tensor]) -> None:
    X = mixed(3, 4)
    name = kernel.__name__
    for bad, error in (
        (X.tolist(), TypeError),
        (X.long(), TypeError),
        (X[0], ValueError),
        (X[:, :0], ValueError),
        (X * math.nan, ValueError),
    ):
        with pytest.raises(error, match=f"'X' parameter of {name}"):
            kernel(bad, 0.1)
    for other in (X[:, :3], X.to("meta"), X / 0):
        with pytest.raises(ValueError, match=f"'X2' parameter of {name}"):
            kernel(X, 0.1, X2=other)
    for sigma_w2 in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"'sigma_w2' parameter of .* < 1"):
            kernel(X, sigma_w2)
    with pytest.raises(TypeError, match="sigma_w2"):
        kernel(X, "0.1")


def test_bad_depths_and_widths_are_named() -> None:
    X = mixed(3, 4)
    for depth, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="'depth' parameter of population_kernel"):
            population_kernel(X, 0.1, depth)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'sigma_w2' parameter of population_kernel"):
        population_kernel(X, -0.1, 2)
    with pytest.raises(ValueError, match="'width' parameter of tangent_limit"):
        tangent_limit(X, 0.1, width=0)


# --- wide networks ----------------------------------------------------------------------------------------------------------------


def gaussian(d: int, m: int, sigma_w2: float, seed: int) -> Readout:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Readout(GaussianDEQ(d, m, sigma_w2=sigma_w2).double())


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def structured(m: int, seeds: int, sigma_w2: float, X: Tensor) -> tuple[Tensor, Tensor]:
    """G/m and H/m of many networks at once, H = G + (R'R)*G + (R'R)*(XX'), by plain iteration and dense solves."""
    d = X.shape[1]
    W, U = normal(seeds, m, m, seed=m) * math.sqrt(2 * sigma_w2 / m), normal(seeds, m, d, seed=m + 1) * math.sqrt(2 / d)
    a, Z = normal(seeds, m, 1, seed=m + 2) / math.sqrt(m), torch.zeros(seeds, m, len(X), dtype=torch.float64)
    for _ in range(40):
        Z = torch.relu(W @ Z + U @ X.T)
    D, V = (Z > 0).double(), a
    for _ in range(40):
        V = a + W.mT @ (D * V)
    R = D * V
    G = Z.mT @ Z
    return G / m, (G + R.mT @ R * (G + X @ X.T)) / m


def through_readout(m: int, seeds: int, sigma_w2: float, X: Tensor) -> tuple[Tensor, Tensor]:
    """The same by the library."""
    grams, tangents = [], []
    for seed in range(seeds):
        readout = gaussian(X.shape[1], m, sigma_w2, 1000 * m + seed)
        with torch.no_grad():
            Z = readout.solve(X).z
        grams.append(Z @ Z.T / m)
        tangents.append(empirical_ntk(readout, X) / m)
    return torch.stack(grams), torch.stack(tangents)


INPUTS = ("norm sqrt(d)", "norms 0.3 to 3 sqrt(d)")
Sample = Callable[[int, int, float, Tensor], tuple[Tensor, Tensor]]


def rates(sample: Sample, widths: list[int], seeds: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean errors [width, inputs, (G, H)] and the slopes of their logarithms in log m [inputs, (G, H)]."""
    sigma_w2, X, errors = 0.08, torch.cat([on_sphere(n, d), mixed(n, d, seed=1)]), []
    for m in widths:
        limits = population_kernel(X, sigma_w2), tangent_limit(X, sigma_w2, width=m)
        for kernels, limit in zip(sample(m, seeds, sigma_w2, X), limits, strict=True):
            for b in (slice(n), slice(n, 2 * n)):
                errors.append(np.mean([relative_error(kernel[b, b], limit[b, b]) for kernel in kernels]))
    logs = np.log(errors).reshape(len(widths), 4)
    slopes = np.polyfit(np.log(widths), logs, 1)[0]
    return np.array(errors).reshape(len(widths), 2, 2).swapaxes(1, 2), slopes.reshape(2, 2).T


def test_wide_networks_approach_the_limits_at_the_monte_carlo_rate() -> None:
    errors, slopes = rates(structured, [100, 200, 400], 20, 4, 6)
    assert (slopes > -0.75).all()
    assert (slopes < -0.25).all()
    assert (errors[-1] < 0.2).all()


def test_the_library_and_the_formula_agree_on_the_limits_they_approach() -> None:
    X = mixed(4, 6)
    for kernels, limit in zip(
        through_readout(150, 3, 0.08, X), (population_kernel(X, 0.08), tangent_limit(X, 0.08, width=150)), strict=True
    ):
        assert relative_error(kernels.mean(0), limit) < 0.2


@pytest.mark.verify
def test_verify_wide_networks_approach_the_limits_at_the_monte_carlo_rate() -> None:
    widths = [250, 500, 1000, 2000, 4000]
    errors, slopes = rates(through_readout, widths, 20, 6, 10)
    write_verify(
        "kernel_rates",
        {
            "what": "mean over 20 seeds of |G/m - K|_F / |K|_F, the same for H/m, and the slopes of their logarithms in log m",
            "setting": "GaussianDEQ, sigma_w2 = 0.08, N = 6, d = 10, float64",
            "widths": widths,
            "errors": {inputs: {"G": errors[:, i, 0].tolist(), "H": errors[:, i, 1].tolist()} for i, inputs in enumerate(INPUTS)},
            "slopes": {inputs: {"G": slopes[i, 0], "H": slopes[i, 1]} for i, inputs in enumerate(INPUTS)},
            "bound": [-0.6, -0.4],
        },
    )
    assert (slopes > -0.6).all()
    assert (slopes < -0.4).all()


def test_the_width_adds_the_part_of_U() -> None:
    X, m = mixed(4, 60), 60
    mean = structured(m, 300, 0.08, X)[1].mean(0)
    with_U, without = (relative_error(mean, tangent_limit(X, 0.08, width=width)) for width in (m, None))
    assert with_U < 0.25 * without


def test_a_wide_trained_network_is_predicted_by_regression_with_the_limit() -> None:
    check_trained_network(200, steps=25, tolerance=0.35)


@pytest.mark.verify
def test_verify_a_wide_trained_network_is_predicted_by_regression_with_the_limit() -> None:
    payload = check_trained_network(2000, steps=80, tolerance=0.12)
    write_verify("kernel_prediction", payload)


def check_trained_network(m: int, steps: int, tolerance: float) -> dict[str, Any]:
    """Gradient descent on a readout against f_0 + K_cross K^-1 (y - f_0), on inputs that it was not trained on."""
    d, sigma_w2 = 5, 0.08
    X, new = on_sphere(6, d, seed=5), on_sphere(20, d, seed=6)
    y = torch.sin(X[:, 0]) + X[:, 1] * X[:, 2] / 2
    readout = gaussian(d, m, sigma_w2, seed=7)
    with torch.no_grad():
        start, start_new = readout(X), readout(new)
    limit = tangent_limit(X, sigma_w2)
    step = 1 / (m * torch.linalg.eigvalsh(limit)[-1].item())
    for _ in range(steps):
        loss = ((readout(X) - y) ** 2).sum() / 2
        with torch.no_grad():
            for parameter, gradient in zip(
                readout.parameters(), torch.autograd.grad(loss, list(readout.parameters())), strict=True
            ):
                parameter -= step * gradient
    with torch.no_grad():
        trained = readout(new)
    move = kernel_regression(limit, y - start).predict(tangent_limit(new, sigma_w2, X))
    blind = kernel_regression(limit, y).predict(tangent_limit(new, sigma_w2, X))
    error = ((trained - start_new - move).norm() / move.norm()).item()
    without_start = ((trained - blind).norm() / move.norm()).item()
    assert loss.item() < 1e-2 * ((start - y) ** 2).sum().item()
    assert error < tolerance
    assert error < 0.5 * without_start  # the initial function is of order 1 at every width: it must not be left out
    return {
        "what": "|trained(new) - f_0(new) - p| / |p|, p = K_cross K^-1 (y - f_0(X)), after gradient descent on 6 samples",
        "width": m,
        "steps": steps,
        "loss": loss.item(),
        "relative_error": error,
        "relative_error_without_f_0": without_start,
        "bound": tolerance,
    }


# --- fresh randomness (Lemma 4 of the Gaussian paper) -----------------------------------------------------------------------------


def fresh(
    W: Tensor, U: Tensor, x: Tensor, x2: Tensor, layers: int, sigma_w2: float, *, printed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M, h, h' of Lemma 4 and G_ij^(l+1); `printed` takes q itself where its part orthogonal to p is needed."""
    m, root = len(W), math.sqrt(len(W) / sigma_w2)
    states: list[list[Tensor]] = [[], []]
    for i, v in enumerate((x, x2)):
        z = torch.zeros(m, dtype=torch.float64)
        for _ in range(layers + 1):
            z = torch.relu(W @ z + U @ v)
            states[i].append(z)
    earlier = (
        torch.stack([*states[0][: layers - 1], *states[1][: layers - 1]], 1)
        if layers > 1
        else torch.zeros(m, 0, dtype=torch.float64)
    )
    V = torch.linalg.qr(earlier).Q
    z, z2 = states[0][layers - 1], states[1][layers - 1]
    p, q = z - V @ (V.T @ z), z2 - V @ (V.T @ z2)
    rest = q if printed else q - (p @ q) / (p @ p) * p
    M = torch.cat([root * W @ torch.cat([V, (p / p.norm())[:, None], (rest / rest.norm())[:, None]], 1), math.sqrt(len(x)) * U], 1)
    zero = torch.zeros(1, dtype=torch.float64)
    h = torch.cat([V.T @ z / root, p.norm()[None] / root, zero, x / math.sqrt(len(x))])
    h2 = torch.cat([V.T @ z2 / root, (p @ q / p.norm())[None] / root, rest.norm()[None] / root, x2 / math.sqrt(len(x))])
    return M, h, h2, states[0][layers] @ states[1][layers]


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_lemma_4_gives_fresh_randomness_with_the_part_of_q_orthogonal_to_p(layers: int) -> None:
    m, d, sigma_w2, draws = 30, 3, 0.1, 200
    x, x2 = mixed(2, d)
    moments, products = [], []
    for seed in range(draws):
        W, U = normal(m, m, seed=2 * seed) * math.sqrt(2 * sigma_w2 / m), normal(m, d, seed=2 * seed + 1) * math.sqrt(2 / d)
        M, h, h2, G = fresh(W, U, x, x2, layers, sigma_w2, printed=False)
        assert M.shape == (m, 2 * layers + d)  # 2 l + d columns; the lemma says 2 l + d + 2
        assert torch.relu(M @ h) @ torch.relu(M @ h2) == pytest.approx(G.item(), rel=1e-10)
        before = (
            fresh(W, U, x, x2, layers - 1, sigma_w2, printed=False)[3] if layers > 1 else torch.relu(U @ x) @ torch.relu(U @ x2)
        )
        assert (h @ h2).item() == pytest.approx((sigma_w2 / m * before + x @ x2 / d).item(), rel=1e-10)
        moments.append(M.T @ M / m)
        products.append((M**4).mean())
    identity = 2 * torch.eye(2 * layers + d, dtype=torch.float64)
    assert (torch.stack(moments).mean(0) - identity).abs().max() < 6 * 2 * math.sqrt(2 / (m * draws))  # i.i.d. columns, N(0, 2)
    assert torch.stack(products).mean().item() == pytest.approx(12, rel=0.05)
    M, h, h2, G = fresh(W, U, x, x2, layers, sigma_w2, printed=True)
    assert abs((torch.relu(M @ h) @ torch.relu(M @ h2)).item() / G.item() - 1) > 1e-6


# --- the scaled ReLU kernel -------------------------------------------------------------------------------------------------------


def test_the_scaled_relu_kernel_is_the_mean_of_the_features() -> None:
    X = mixed(5, 3)
    G = scaled_relu_kernel(X)
    features = torch.relu(X @ normal(3, 400_000))
    scale = torch.outer(G.diagonal(), G.diagonal()).sqrt()
    assert ((features @ features.T / 400_000 - G) / scale).abs().max() < 0.025  # one standard error is at most 0.004
    assert torch.allclose(G.diagonal(), (X**2).sum(1) / 2)


def test_lambda_star_bounds_the_features_of_wide_networks() -> None:
    """Section 5.2: sigma_min(Phi)^2 >= m lambda_*/4 with high probability, and lambda_* is at most half of the printed 1."""
    X = on_sphere(8, 10) / math.sqrt(10)
    least = least_eigenvalue(scaled_relu_kernel(X))
    assert 0.05 < least <= 0.5
    for seed in range(20):
        Phi = torch.relu(X @ normal(10, 400, seed=seed))
        assert torch.linalg.svdvals(Phi)[-1] ** 2 >= 400 * least / 4
    assert least_eigenvalue(scaled_relu_kernel(torch.cat([X, 2 * X[:1]]))) == pytest.approx(0, abs=1e-14)
    assert least_eigenvalue(scaled_relu_kernel(torch.cat([X, -X[:1]]))) > 0.01


# --- kernel regression ------------------------------------------------------------------------------------------------------------


def refitted(K: Tensor, y: Tensor, ridge: float) -> Tensor:
    """y_i minus the prediction for it of a fit to the others, each by its own pseudo-inverse."""
    found = []
    for i in range(len(K)):
        rest = [j for j in range(len(K)) if j != i]
        A = K[rest][:, rest] + ridge * torch.eye(len(rest), dtype=K.dtype)
        found.append(y[i] - K[i, rest] @ (torch.linalg.pinv(A, hermitian=True, rtol=1e-12) @ y[rest]))
    return torch.stack(found)


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 2.0])
@pytest.mark.parametrize("columns", [(), (1,), (3,)])
def test_the_fit_and_its_leave_one_out_residuals_are_those_of_refitting(columns: tuple[int, ...], ridge: float) -> None:
    X, y = mixed(12, 5), normal(12, *columns, seed=2)
    K = tangent_limit(X, 0.08)
    found = kernel_regression(K, y, ridge=ridge)
    expected = torch.linalg.solve(K + ridge * torch.eye(12, dtype=K.dtype), y)
    assert torch.allclose(found.coefficients, expected, rtol=1e-9)
    assert torch.allclose(found.fitted, K @ expected, rtol=1e-9)
    assert torch.allclose(found.leave_one_out, refitted(K, y, ridge), rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.leave_one_out_error, (refitted(K, y, ridge) ** 2).mean(0), rtol=1e-9)
    cross = tangent_limit(normal(4, 5, seed=3), 0.08, X)
    assert torch.allclose(found.predict(cross), cross @ expected, rtol=1e-9)
    values = torch.linalg.eigvalsh(K + ridge * torch.eye(12, dtype=K.dtype))
    assert (found.evidence, found.rank, found.singular) == ("bound", 12, False)
    assert (values[-1] / values[0]).item() <= found.condition <= 12 * (values[-1] / values[0]).item()
    assert "full rank 12" in found.explain()


def singular_regression(K: Tensor, y: Tensor, ridge: float = 0.0) -> KernelRegression:
    with pytest.warns(RuntimeWarning, match="singular"):
        return kernel_regression(K, y, ridge=ridge)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans())
def test_parallel_inputs_get_the_limit_of_a_small_ridge_and_a_warning(seed: int, more: int, zero: bool) -> None:
    X = mixed(6, 4, seed=seed)
    X = torch.cat([X, 2.5 * X[:1], *[0.5 * X[1:2]] * more, *[0 * X[:1]] * zero])
    K, y = population_kernel(X, 0.08), normal(len(X), seed=seed + 1)
    found = singular_regression(K, y)
    assert (found.rank, found.condition, found.evidence) == (6, math.inf, "exact")
    assert found.parallel is not None
    i, j = found.parallel
    assert torch.nn.functional.cosine_similarity(X[i], X[j], dim=0) == pytest.approx(1)
    assert f"rank 6 of {len(X)}" in found.explain()
    assert f"Inputs {i} and {j} are parallel" in found.explain()
    assert torch.allclose(found.coefficients, torch.linalg.pinv(K, hermitian=True, rtol=1e-12) @ y, rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.leave_one_out, refitted(K, y, 0.0), rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.fitted[2:6], y[2:6], atol=1e-9)  # what has no double is still interpolated
    assert (found.fitted - y).abs().max() > 1e-3


def test_labels_that_agree_with_the_parallel_inputs_are_interpolated() -> None:
    X = torch.cat([on_sphere(5, 4), 2 * on_sphere(5, 4)[:1]])
    y = X.norm(dim=1) * torch.tensor([1.0, 2, 3, 4, 5, 1], dtype=torch.float64)
    found = singular_regression(population_kernel(X, 0.08), y)
    assert torch.allclose(found.fitted, y, rtol=1e-10)
    assert found.leave_one_out[[0, 5]].abs().max() < 1e-9


def test_a_ridge_cures_a_singular_kernel_unless_it_is_lost_in_rounding() -> None:
    X = torch.cat([mixed(5, 4), 2 * mixed(5, 4)[:1]])
    K, y = population_kernel(X, 0.08), normal(6, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cured = kernel_regression(K, y, ridge=1e-6)
    assert cured.rank == 6
    assert torch.allclose(cured.coefficients, torch.linalg.solve(K + 1e-6 * torch.eye(6, dtype=K.dtype), y), rtol=1e-7)
    assert singular_regression(K, y, ridge=1e-20).ridge == 1e-20


def test_a_kernel_of_rank_deficit_without_parallel_inputs_names_no_pair() -> None:
    X = normal(5, 2)
    X[1] = X[0] + 1e-5 * X[1]  # close, but told apart
    found = singular_regression(X @ X.T, normal(5, seed=1))
    assert found.rank == 2
    assert found.parallel is None
    assert "Inputs" not in found.explain()
    assert torch.allclose(found.leave_one_out, refitted(X @ X.T, normal(5, seed=1), 0.0), atol=1e-9)


def test_the_zero_kernel_predicts_zero() -> None:
    y = normal(3)
    found = singular_regression(torch.zeros(3, 3, dtype=torch.float64), y)
    assert found.rank == 0
    assert torch.equal(found.fitted, torch.zeros_like(y))
    assert torch.allclose(found.leave_one_out, y)


def test_a_badly_conditioned_kernel_of_full_rank_is_not_called_singular() -> None:
    V = torch.linalg.qr(normal(6, 6)).Q
    K = (V * torch.tensor([1.0, 1, 1, 1, 1, 2e-15], dtype=torch.float64)) @ V.T
    K = (K + K.T) / 2
    found = kernel_regression(K, normal(6, seed=1))
    assert found.rank == 6
    assert 1e14 < found.condition < 1e16
    assert found.evidence == "exact"


def test_float32_kernels_are_judged_by_their_own_precision() -> None:
    X = torch.cat([mixed(5, 4), 3 * mixed(5, 4)[:1]])
    K = population_kernel(X.float(), 0.08)
    found = singular_regression(K, normal(6).float())
    assert found.rank == 5
    assert found.coefficients.dtype == found.fitted.dtype == found.leave_one_out.dtype == torch.float32
    assert found.predict(K).dtype == torch.float32
    assert kernel_regression(K[:5, :5], normal(5)).fitted.dtype == torch.float64


def test_one_sample_is_predicted_by_nothing_when_left_out() -> None:
    found = kernel_regression(torch.tensor([[2.0]]).double(), torch.tensor([3.0]).double())
    assert found.coefficients.tolist() == pytest.approx([1.5])
    assert found.leave_one_out.tolist() == pytest.approx([3.0])


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_the_scale_of_a_kernel_is_no_matter_to_the_fit(scale: float) -> None:
    K, y = population_kernel(mixed(4, 5), 0.1), normal(4)
    expected, found = kernel_regression(K, y), kernel_regression(scale * K, y)
    assert torch.allclose(found.coefficients * scale, expected.coefficients, rtol=1e-9)
    assert torch.allclose(found.fitted, expected.fitted, rtol=1e-9)
    assert torch.allclose(found.leave_one_out, expected.leave_one_out, rtol=1e-9)
    assert found.condition == pytest.approx(expected.condition, rel=1e-9)


def test_coefficients_that_overflow_are_refused() -> None:
    K, y = population_kernel(mixed(4, 5), 0.1), normal(4)
    with pytest.raises(ValueError, match="'K' parameter of kernel_regression must be larger: the coefficients overflow"):
        kernel_regression(1e-310 * K, y)
    assert torch.isfinite(kernel_regression(1e-310 * K, 1e-10 * y).coefficients).all()
    assert torch.isfinite(kernel_regression(1e-310 * K, y, ridge=1.0).coefficients).all()


def test_a_kernel_that_is_symmetric_to_half_its_digits_is_taken_as_its_symmetric_part() -> None:
    K = population_kernel(mixed(4, 5), 0.1)
    skewed = K + 1e-10 * normal(4, 4)
    symmetric = (skewed + skewed.T) / 2
    assert least_eigenvalue(skewed) == pytest.approx(least_eigenvalue(symmetric), rel=1e-14)
    assert least_eigenvalue(skewed.requires_grad_()) == least_eigenvalue(skewed.detach())  # without a warning


def test_bad_arguments_of_the_regression_are_named() -> None:
    K, y = population_kernel(mixed(3, 4), 0.1), normal(3)
    for bad, error in (
        (K.long(), TypeError),
        (K[:2], ValueError),
        (K[:0, :0], ValueError),
        (K * math.nan, ValueError),
        (K.triu(), ValueError),
    ):
        with pytest.raises(error, match="'K' parameter of kernel_regression"):
            kernel_regression(bad, y)
    with pytest.raises(ValueError, match="'K' parameter of kernel_regression must be positive semi-definite"):
        kernel_regression(-K, y)
    for wrong, error in (
        (y.long(), TypeError),
        (y[:2], ValueError),
        (y[:, None, None], ValueError),
        (y / 0, ValueError),
        (y.to("meta"), ValueError),
    ):
        with pytest.raises(error, match="'y' parameter of kernel_regression"):
            kernel_regression(K, wrong)
    with pytest.raises(ValueError, match="ridge"):
        kernel_regression(K, y, ridge=-1.0)
    with pytest.raises(ValueError, match="'K' parameter of least_eigenvalue"):
        least_eigenvalue(K[:2])
    found = kernel_regression(K, y)
    for cross, error in ((K[:, :2], ValueError), (K[0], ValueError), (K.long(), TypeError)):
        with pytest.raises(error, match="'K_cross' parameter of KernelRegression"):
            found.predict(cross)
