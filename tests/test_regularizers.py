import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from opteq.regularizers import HSIC, L1, L2, Decorrelation, FrozenDecorrelation, FrozenHSIC, Incay, Regularizer

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SHAPES = [(5, 3), (4, 3, 2, 2), (4, 2, 3)]
SINGLE = [L2(), L1(), Incay(), Incay(eps=0.1)]
COUPLED = [Decorrelation(), Decorrelation(eps=0.5), HSIC(), HSIC(bandwidth=0.7), HSIC(features=9), HSIC(bandwidth=0.7, features=2)]
ALL = SINGLE + COUPLED


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(regularizer: Regularizer, frozen: bool, shape: tuple[int, ...]) -> Regularizer:
    return regularizer.frozen(states(7, *shape[1:], seed=9)) if frozen else regularizer


CASES = [(r, False) for r in ALL] + [(r, True) for r in COUPLED[:4]]
cases = pytest.mark.parametrize(("regularizer", "frozen"), CASES, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def differences(f: Callable[[Tensor], Tensor], z: Tensor, h: float = 1e-5) -> np.ndarray:
    out = np.zeros(z.numel())
    for i in range(z.numel()):
        move = torch.zeros(z.numel(), dtype=z.dtype)
        move[i] = h
        out[i] = (float(f(z + move.view_as(z)).sum()) - float(f(z - move.view_as(z)).sum())) / (2 * h)
    return out.reshape(z.shape)


@cases
@shapes
def test_gradient_is_that_of_the_value(regularizer: Regularizer, frozen: bool, shape: tuple[int, ...]) -> None:
    r, z = made(regularizer, frozen, shape), states(*shape)
    assert r.value(z).shape == (() if r.couples_batch else shape[:1])
    np.testing.assert_allclose(r.gradient(z).numpy(), differences(r.value, z), rtol=1e-6, atol=1e-9)


@cases
@shapes
def test_gradient_can_be_differentiated(regularizer: Regularizer, frozen: bool, shape: tuple[int, ...]) -> None:
    r, z = made(regularizer, frozen, shape), states(*shape)
    assert torch.autograd.gradcheck(r.gradient, z.clone().requires_grad_(True), fast_mode=True)
    hessian = torch.autograd.functional.jacobian(r.gradient, z).reshape(z.numel(), z.numel())
    torch.testing.assert_close(hessian, hessian.T)
    move = states(*shape, seed=3)
    for product in (torch.func.jvp(r.gradient, (z,), (move,))[1], torch.func.vjp(r.gradient, z)[1](move)[0]):
        torch.testing.assert_close(product.detach().flatten(), hessian @ move.flatten())


@cases
@shapes
def test_transforms_modes_and_precisions(regularizer: Regularizer, frozen: bool, shape: tuple[int, ...]) -> None:
    r, z = made(regularizer, frozen, shape), states(3, *shape)
    expected = torch.stack([r.gradient(part) for part in z])
    torch.testing.assert_close(torch.func.vmap(r.gradient)(z), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda v: r.value(v).sum()))(z), expected)
    with torch.no_grad():
        torch.testing.assert_close(r.gradient(z[0]), expected[0])
    with torch.inference_mode():
        torch.testing.assert_close(r.gradient(z[0]), expected[0])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        small = z[0].to(dtype)
        assert r.value(small).dtype == r.gradient(small).dtype == dtype
        torch.testing.assert_close(r.gradient(small).double(), expected[0], rtol=tolerance, atol=tolerance)


@cases
def test_flags_of_coupling_are_true(regularizer: Regularizer, frozen: bool) -> None:
    r = made(regularizer, frozen, (5, 3))
    z = states(5, 3)
    other = torch.cat([z[:1], states(4, 3, seed=5)])
    same = torch.equal(r.gradient(z)[0], r.gradient(other)[0])
    assert same == (not r.couples_batch)
    assert r.frozen(z) is r or r.couples_batch
    if not r.couples_batch:
        torch.testing.assert_close(r.gradient(z[:1]), r.gradient(z)[:1])
        torch.testing.assert_close(r.value(z[:1]), r.value(z)[:1])


@pytest.mark.parametrize("r", [r for r in ALL if r.convex], ids=str)
@given(data=st.data())
def test_the_convex_are_convex(r: Regularizer, data: st.DataObject) -> None:
    numbers = st.lists(st.floats(-5, 5), min_size=6, max_size=6)
    a, b = (torch.tensor(data.draw(numbers), dtype=torch.float64).reshape(2, 3) for _ in range(2))
    assert (r.value((a + b) / 2) <= (r.value(a) + r.value(b)) / 2 + 1e-12).all()


@cases
def test_the_flags_convex_and_smooth(regularizer: Regularizer, frozen: bool) -> None:
    r = made(regularizer, frozen, (6, 3))
    pairs = [(states(6, 3, seed=i), states(6, 3, seed=100 + i)) for i in range(50)]
    pairs += [(a, -a) for a, _ in pairs]
    broken = [r.value((a + b) / 2).sum() > (r.value(a) + r.value(b)).sum() / 2 + 1e-6 for a, b in pairs]
    assert any(broken) == (not r.convex)
    if r.smoothness is not None:
        rates = [(r.gradient(a) - r.gradient(b)).norm() / (a - b).norm() for a, b in pairs]
        assert 0.3 * r.smoothness < max(rates) <= r.smoothness * (1 + 1e-12)


def test_smoothness_of_the_frozen_is_attained() -> None:
    r = Decorrelation().frozen(states(6, 3))
    top = torch.linalg.svd(r.M).Vh[:1]
    assert math.isclose(float(r.gradient(top).norm()), r.smoothness or 0.0)


@pytest.mark.parametrize("r", [L2(), L1()], ids=str)
@pytest.mark.parametrize("gamma", [0.0, 0.3, 2.0])
def test_prox_minimises(r: Regularizer, gamma: float) -> None:
    z = states(2, 2, 3)
    assert r.prox is not None
    prox = r.prox(z, gamma)

    def best(target: float) -> float:
        def objective(v: float) -> float:
            return gamma * float(r.value(torch.tensor([[v]], dtype=torch.float64))) + (v - target) ** 2 / 2

        return float(minimize_scalar(objective, bracket=(-1, 1), tol=1e-12).x)

    np.testing.assert_allclose(prox.flatten().numpy(), [best(float(t)) for t in z.flatten()], atol=1e-6)
    torch.testing.assert_close(r.prox(z, torch.tensor(gamma, dtype=torch.float64)), prox)


def test_who_has_a_prox() -> None:
    assert [r.prox is None for r in (L2(), L1(), Incay(), Decorrelation(), HSIC())] == [False, False, True, True, True]
    assert Decorrelation().frozen(states(4, 3)).prox is None


@given(gamma=st.floats(1e-3, 10), eps=st.floats(1e-2, 10), scale=st.floats(1e-2, 10))
def test_the_step_of_incay_expands_every_sample(gamma: float, eps: float, scale: float) -> None:
    r, z = Incay(eps=eps), scale * states(5, 3, 2)
    square = z.flatten(1).square().sum(1)
    step = z - gamma * r.gradient(z)
    assert (step.flatten(1).norm(dim=1) > z.flatten(1).norm(dim=1)).all()
    torch.testing.assert_close(step, (1 + 4 * gamma / (square + 2 * eps) ** 2)[:, None, None] * z)


def cosine_loop(z: Tensor, eps: float = 0.0) -> float:
    rows = z.transpose(0, 1).flatten(1).numpy()
    size = np.sqrt((rows**2).sum(1) + eps)
    m = len(rows)
    return sum((rows[i] @ rows[j] / (size[i] * size[j])) ** 2 for i in range(m) for j in range(m) if i != j) / 2


@shapes
def test_decorrelation_is_a_sum_over_pairs(shape: tuple[int, ...]) -> None:
    z = states(*shape)
    for eps in (0.0, 0.3):
        assert math.isclose(float(Decorrelation(eps=eps).value(z)), cosine_loop(z, eps), rel_tol=1e-12)


@shapes
def test_gradient_of_decorrelation_is_the_printed_one_with_the_sign_mended(shape: tuple[int, ...]) -> None:
    z = states(*shape)
    rows = z.transpose(0, 1).flatten(1)
    proj = [torch.outer(v, v) / v.dot(v) for v in rows]
    eye = torch.eye(rows.shape[1], dtype=z.dtype)
    expected = [
        2 * (eye - proj[i]) @ sum(p @ v for j, p in enumerate(proj) if j != i) / v.dot(v)  # type: ignore[operator]
        for i, v in enumerate(rows)
    ]
    torch.testing.assert_close(Decorrelation().gradient(z).transpose(0, 1).flatten(1), torch.stack(expected))


@shapes
def test_a_small_step_of_decorrelation_lowers_the_cosines(shape: tuple[int, ...]) -> None:
    r = Decorrelation()
    for seed in range(5):
        z = states(*shape, seed=seed)
        values = [cosine_loop(z)]
        for _ in range(20):
            z = z - 0.01 * r.gradient(z)
            values.append(cosine_loop(z))
        assert all(b < a for a, b in pairwise(values))


@given(scale=st.floats(1e-6, 1e6))
def test_decorrelation_ignores_the_scale_of_a_feature(scale: float) -> None:
    z = states(5, 3)
    scales = torch.tensor([1, scale, 1], dtype=torch.float64)
    r = Decorrelation()
    torch.testing.assert_close(r.value(z * scales), r.value(z))
    torch.testing.assert_close(r.gradient(z * scales) * scales, r.gradient(z))


def test_half_precision_does_not_take_small_features_for_dead_ones() -> None:
    z = (1e-3 * states(5, 3)).half()
    for r in (Decorrelation(), HSIC()):
        torch.testing.assert_close(r.value(z).double(), r.value(z.double()), rtol=2e-3, atol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_dead_feature_has_gradient_zero(eps: float, dtype: torch.dtype) -> None:
    r = Decorrelation(eps=eps)
    z = states(5, 4, 2).to(dtype)
    z[:, 1] = 0
    alive = [0, 2, 3]
    slope = r.gradient(z)
    assert (slope[:, 1] == 0).all()
    torch.testing.assert_close(slope[:, alive], r.gradient(z[:, alive]))
    torch.testing.assert_close(r.value(z), r.value(z[:, alive]))
    hessian = torch.autograd.functional.jacobian(r.gradient, z)
    assert isinstance(hessian, Tensor)
    assert hessian.isfinite().all()
    assert r.frozen(z).gradient(z).isfinite().all()
    assert (r.gradient(torch.zeros_like(z)) == 0).all()
    assert r.value(torch.zeros_like(z)) == 0


@shapes
def test_frozen_decorrelation_is_linear_and_right_at_its_reference(shape: tuple[int, ...]) -> None:
    reference = states(*shape)
    r = Decorrelation().frozen(reference)
    assert isinstance(r, FrozenDecorrelation)
    torch.testing.assert_close(r.gradient(reference), Decorrelation().gradient(reference))
    assert abs(float(r.value(reference).sum())) < 1e-12
    a, b = states(*shape, seed=1), states(*shape, seed=2)
    torch.testing.assert_close(r.gradient(2 * a - b), 2 * r.gradient(a) - r.gradient(b))
    assert [leaf.per_sample for leaf in r.leaves()] == [False]


def median_widths(z: Tensor) -> list[float]:
    points = z.transpose(0, 1).flatten(2).numpy() if z.ndim > 2 else z.T[:, :, None].numpy()
    widths = []
    for p in points:
        pairs = sorted(float(np.linalg.norm(p[b] - p[c])) for b in range(len(p)) for c in range(b))
        widths.append(pairs[(len(pairs) - 1) // 2])
    return widths


def hsic_loop(z: Tensor, widths: list[float]) -> float:
    count, m = z.shape[:2]
    points = z.reshape(count, m, -1).numpy()
    H = np.eye(count) - np.ones((count, count)) / count
    K = np.zeros((m, count, count))
    for i in range(m):
        for b in range(count):
            for c in range(count):
                K[i, b, c] = np.exp(-np.sum((points[b, i] - points[c, i]) ** 2) / (2 * widths[i] ** 2))
    return float(sum(np.trace(K[i] @ H @ K[j] @ H) for i in range(m) for j in range(i + 1, m)) / (count - 1) ** 2)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3), (9, 5), (6, 1), (6, 2, 4, 4)], ids=str)
def test_hsic_is_a_sum_over_pairs(shape: tuple[int, ...]) -> None:
    z = states(*shape)
    np.testing.assert_allclose(float(HSIC(bandwidth=0.7).value(z)), hsic_loop(z, [0.7] * shape[1]), rtol=1e-10)
    np.testing.assert_allclose(float(HSIC().value(z)), hsic_loop(z, median_widths(z)), rtol=1e-10)


def test_hsic_with_wide_kernels_loses_no_digits() -> None:
    z = states(8, 3)
    centred = z - z.mean(0)
    covariances = (centred.T @ centred).triu(1).square().sum() / 49
    torch.testing.assert_close(HSIC(bandwidth=1e4).value(z) * 1e16, covariances, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 4)], ids=str)
def test_hsic_ignores_the_level_of_a_feature(shape: tuple[int, ...]) -> None:
    z = states(*shape).float() + 1000  # in float32 the distances would drown in |z|^2
    for r in (HSIC(), HSIC(bandwidth=1.0)):
        torch.testing.assert_close(r.value(z).double(), r.value(z.double() - 1000), rtol=1e-4, atol=0)


def test_hsic_sees_dependence_without_correlation() -> None:
    first = states(100)
    first = torch.cat([first, -first])
    second = first.square()
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    r = HSIC()
    dependent, shuffled = (r.value(torch.stack([first, s], 1)) for s in (second, second[order]))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 1e-12
    assert dependent > 10 * shuffled > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(6, 2), (40, 2, 9, 9)], ids=str)
@pytest.mark.parametrize("r", [HSIC(), HSIC(bandwidth=0.5), HSIC(features=5)], ids=str)
def test_constant_and_mostly_zero_features(r: HSIC, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    z = states(*shape).to(dtype)
    z[:, 1] = 0.1
    assert abs(float(r.value(z))) < 100 * torch.finfo(dtype).eps
    assert r.gradient(z).isfinite().all()
    z[:-1, 1] = 0  # the median distance is 0, the feature is not constant
    z[-1, 1] = 1
    assert r.gradient(z).isfinite().all()
    if r.features is None:
        widths = [median_widths(z)[0], 1.0] if isinstance(r.bandwidth, str) else [r.bandwidth] * 2
        np.testing.assert_allclose(float(r.value(z)), hsic_loop(z.double(), widths), rtol=1e-4)


@pytest.mark.parametrize("r", COUPLED, ids=str)
def test_tiny_batches(r: Regularizer) -> None:
    for count in (0, 1):
        z = states(count, 3)
        assert r.gradient(z).shape == z.shape
        assert r.gradient(z).isfinite().all()
        if isinstance(r, HSIC):
            z.requires_grad_(True)
            r.value(z).backward()
            assert z.grad is not None
            assert (z.grad == 0).all()
            assert (r.gradient(z) == 0).all()
            assert r.value(z) == 0


@pytest.mark.parametrize("bandwidth", [0.7, "median"])
@pytest.mark.parametrize("shape", [(24, 4), (12, 3, 2, 2)], ids=str)
def test_random_features_converge(bandwidth: float | str, shape: tuple[int, ...]) -> None:
    z = states(*shape)
    z[:, 1] = z[:, 0] ** 2
    exact = float(HSIC(bandwidth=bandwidth).value(z))

    def error(count: int) -> float:
        got = [float(HSIC(bandwidth=bandwidth, features=count, seed=seed).value(z)) for seed in range(12)]
        return float(np.sqrt(np.mean([(v / exact - 1) ** 2 for v in got])))

    coarse, fine = error(64), error(4096)
    assert coarse / 24 < fine < coarse / 3  # 1/8 is what 1 / sqrt(D) says
    assert fine < 0.05


def test_random_features_are_unbiased() -> None:
    z = states(12, 3)
    got = [float(HSIC(bandwidth=0.7, features=4, seed=seed).value(z)) for seed in range(400)]
    assert abs(np.mean(got) - float(HSIC(bandwidth=0.7).value(z))) < 3 * np.std(got) / math.sqrt(len(got))


@pytest.mark.parametrize(("batch", "count"), [(3, 8), (12, 8), (40, 8)])
def test_each_way_to_sum_random_features_is_the_definition(batch: int, count: int) -> None:
    z = states(batch, 3)
    r = HSIC(bandwidth=0.7, features=count, seed=3)
    source = torch.Generator().manual_seed(3)
    w = torch.randn(3, 1, count, generator=source, dtype=torch.float64) / 0.7
    p = 2 * math.pi * torch.rand(3, 1, count, generator=source, dtype=torch.float64)
    phi = math.sqrt(2 / count) * torch.cos(z.T[:, :, None] @ w + p)
    H = torch.eye(batch, dtype=torch.float64) - 1 / batch
    expected = sum((phi[i].T @ H @ phi[j]).square().sum() for i in range(3) for j in range(i + 1, 3))
    torch.testing.assert_close(r.value(z), expected / (batch - 1) ** 2)
    assert torch.equal(r.value(z), r.value(z))
    assert not torch.equal(r.value(z), HSIC(bandwidth=0.7, features=count, seed=4).value(z))


@pytest.mark.parametrize("bandwidth", [0.7, "median"])
@pytest.mark.parametrize("n", [1, 2, 7])
@shapes
def test_frozen_hsic_joins_each_sample_to_the_reference(bandwidth: float | str, n: int, shape: tuple[int, ...]) -> None:
    reference, z = states(n, *shape[1:], seed=1), states(*shape)
    r = HSIC(bandwidth=bandwidth).frozen(reference)
    assert isinstance(r, FrozenHSIC)
    fixed = [bandwidth] * shape[1] if not isinstance(bandwidth, str) else median_widths(reference) if n > 1 else [1.0] * shape[1]
    expected = [hsic_loop(torch.cat([reference, s[None]]), fixed) for s in z]
    np.testing.assert_allclose(r.value(z).numpy(), expected, rtol=1e-10)
    assert not any(leaf.per_sample for leaf in r.leaves())
    assert torch.equal(r.filled(leaf.tensor for leaf in r.leaves()).value(z), r.value(z))


def test_frozen_does_not_keep_the_graph_of_the_reference() -> None:
    reference = states(4, 3).requires_grad_(True)
    for r in (Decorrelation(), HSIC(features=3)):
        assert not any(leaf.tensor.requires_grad for leaf in r.frozen(reference).leaves())


def template(kind: type, name: str) -> str:
    return rf"^The '{name}' parameter of {kind.__name__} must be .+\. Got .+ instead\.$"


@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    [
        *[(Incay, "eps", v, ValueError) for v in (0, -1.0, math.nan, math.inf)],
        *[(Decorrelation, "eps", v, ValueError) for v in (-1e-9, math.nan, math.inf)],
        *[(HSIC, "bandwidth", v, ValueError) for v in (0, -1.0, math.inf, "mean")],
        *[(HSIC, "features", v, ValueError) for v in (0, -1)],
        *[
            (k, n, v, TypeError)
            for k, n in ((Incay, "eps"), (Decorrelation, "eps"), (HSIC, "bandwidth"))
            for v in (None, True, [1])
        ],
        *[(HSIC, n, v, TypeError) for n in ("features", "seed") for v in (2.5, True, "2")],
        (HSIC, "seed", -1, ValueError),
    ],
)
def test_bad_parameters(kind: type, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=template(kind, name)):
        kind(**{name: value})


@cases
def test_bad_states(regularizer: Regularizer, frozen: bool) -> None:
    r = made(regularizer, frozen, (5, 3))
    uses: list[Callable[..., Tensor]] = [r.value, r.gradient] + ([lambda z: r.prox(z, 0.5)] if r.prox else [])  # type: ignore[misc]
    for use in uses:
        with pytest.raises(ValueError, match=template(type(r), "z")):
            use(states(3))
        with pytest.raises(TypeError, match=template(type(r), "z")):
            use(torch.ones(3, 2, dtype=torch.long))
        if frozen:
            with pytest.raises(ValueError, match=template(type(r), "z")):
                use(states(5, 4))
    if r.couples_batch:
        with pytest.raises(ValueError, match=template(type(r), "reference")):
            r.frozen(states(3))
    if r.prox is not None:
        with pytest.raises(ValueError, match=template(type(r), "gamma")):
            r.prox(states(3, 2), -0.1)


def test_an_empty_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=template(HSIC, "reference")):
        HSIC().frozen(states(0, 3))


@cases
def test_every_one_can_be_stated(regularizer: Regularizer, frozen: bool) -> None:
    r = made(regularizer, frozen, (5, 3))
    assert "z" in r.formula or "K" in r.formula
    assert r.latex.count("{") == r.latex.count("}")
