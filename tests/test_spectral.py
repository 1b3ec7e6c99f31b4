import copy
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from opteq import spectral
from opteq.operators import Conv, Dense, Operator, Padding, Separable
from opteq.spectral import Norm, NormBall, operator_norm, scale_to
from test_operators import PADDINGS, columns, conv_matrix, randn

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

KERNELS = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (2, 5), (3, 1)]


def svd(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def true_norm(W: Tensor, padding: Padding, size: tuple[int, int], groups: int = 1) -> float:
    return svd(conv_matrix(W.detach().double(), padding, size, groups))


def unpruned(W: Tensor, rows: int, columns: int) -> Tensor:
    """|K(w)| at every frequency, by the transform of the wrapped kernel."""
    wrapped = W.new_zeros(*W.shape[:2], rows, columns)
    for i, j in itertools.product(range(W.shape[2]), range(W.shape[3])):
        wrapped[:, :, i % rows, j % columns] += W[:, :, i, j]
    return torch.linalg.svdvals(torch.fft.fft2(wrapped).permute(2, 3, 0, 1))[..., 0]


def special_kernels() -> list[Tensor]:
    """Kernels whose norm is attained at the frequency 0, everywhere, at the highest frequency, and between grid points."""
    ones = torch.ones(2, 2, 3, 3, dtype=torch.float64)
    delta = nn.init.dirac_(torch.empty(2, 2, 3, 3, dtype=torch.float64))
    sign = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    angle = torch.arange(5, dtype=torch.float64) * (2 * math.pi * 10.5 / 64)
    wave = (angle[:, None] + angle).cos()[None, None]
    return [
        ones,
        delta,
        ones * sign[:, None] * sign,
        ones * torch.tensor([[1.0], [-1.0]], dtype=torch.float64)[:, :, None, None],
        wave,
    ]


# The norm with a size


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 2), (3, 3), (4, 4), (5, 4), (3, 6)])
def test_circular_norms_are_exact(kernel: tuple[int, int], size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for hidden, channels in ((2, 3), (3, 2), (1, 1)):
        W = randn(hidden, channels, *kernel)
        norm = operator_norm(Conv(W, "circular"), size)
        assert norm.evidence == "exact"
        assert float(norm) == pytest.approx(true_norm(W, "circular", size), rel=1e-10)


@functools.cache
def largest(W: Tensor) -> float:
    """max |K(w)| over a fine grid."""
    return float(unpruned(W, 512, 512).max())


@pytest.mark.parametrize("W", special_kernels())
@pytest.mark.parametrize("size", [(4, 4), (5, 3), (2, 7)])
def test_special_kernels(W: Tensor, size: tuple[int, int]) -> None:
    assert float(operator_norm(Conv(W, "circular"), size)) == pytest.approx(true_norm(W, "circular", size), rel=1e-10)
    for padding in PADDINGS:
        everywhere = float(operator_norm(Conv(W, padding)))
        for bound in (float(operator_norm(Conv(W, padding), size)), everywhere):
            assert bound >= true_norm(W, padding, size) * (1 - 1e-12)
    assert everywhere <= 1.01 * largest(W)


@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 10**6),
    integers=st.booleans(),
)
@settings(max_examples=60)
def test_bounds_are_never_below_the_norm(
    kernel: tuple[int, int], size: tuple[int, int], channels: tuple[int, int], seed: int, integers: bool
) -> None:
    torch.manual_seed(seed)
    W = randn(*channels, *kernel)
    W = W.round() if integers else W  # zeros, ties, equal singular values
    for padding in PADDINGS:
        true = true_norm(W, padding, size) * (1 - 1e-12)
        assert float(operator_norm(Conv(W, padding), size)) >= true
        assert float(operator_norm(Conv(W, padding))) >= true


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (4, 5)])
def test_the_bound_with_zeros_is_tight_for_large_images(kernel: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for _ in range(3):
        W = randn(2, 2, *kernel)
        ratios = []
        for size in ((5, 5), (10, 10), (20, 20)):
            norm = operator_norm(Conv(W), size)
            assert norm.evidence == "bound"
            ratios.append(float(norm) / float(operator_norm(Conv(W), size, method="lanczos")))
        assert all(ratio + 1e-9 >= 1 for ratio in ratios)
        assert ratios[0] < 2
        assert ratios[-1] < min(1.1, ratios[0])


# The bound without a size


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bound_for_every_size(kernel: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for _ in range(3):
        W = randn(3, 2, *kernel)
        everywhere = float(operator_norm(Conv(W, "circular")))
        assert everywhere == float(operator_norm(Conv(W, "zeros")))
        for size in ((1, 1), (2, 3), (7, 7), (31, 33)):
            assert float(operator_norm(Conv(W, "circular"), size)) <= everywhere * (1 + 1e-12)
        at_64 = float(operator_norm(Conv(W, "circular"), (64, 64)))
        assert at_64 <= everywhere <= 1.011 * at_64


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@given(seed=st.integers(0, 10**6), shift=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=20)
def test_the_bound_between_the_points_of_its_grid(length: int, seed: int, shift: tuple[float, float]) -> None:
    """The largest |K(w)| may be anywhere: here it is, for a kernel of modulus one per tap, at `shift` of a grid step."""
    torch.manual_seed(seed)
    step = 2 * math.pi / (16 * (length - 1))
    w = [(int(torch.randint(9, ())) + part) * step for part in shift]
    taps = torch.arange(length, dtype=torch.float64)
    phase = taps[:, None] * w[0] + taps * w[1]
    W = torch.stack([phase.cos(), phase.sin(), -phase.sin(), phase.cos()]).view(2, 2, length, length)  # a complex number as 2 x 2
    assert float(operator_norm(Conv(W))) >= length**2 * (1 - 1e-12)  # attained at w
    assert float(operator_norm(Conv(W))) <= length**2 * 1.01


def test_why_not_the_norm_of_the_reshaped_kernel() -> None:
    W = torch.ones(1, 1, 3, 3) / 3
    assert svd(W.flatten(1)) == pytest.approx(1)
    assert float(operator_norm(Conv(W, "circular"), (8, 8))) == pytest.approx(3)
    assert true_norm(W, "circular", (8, 8)) == pytest.approx(3)
    assert true_norm(W, "zeros", (8, 8)) > 1.4


# Other operators


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 1)])
def test_dense(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    W = randn(*shape)
    norm = operator_norm(Dense(W))
    assert (norm.evidence, norm.method) == ("exact", "svd")
    assert float(norm) == pytest.approx(math.sqrt(float(torch.linalg.eigvalsh(W @ W.T)[-1])))


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("padding", PADDINGS)
def test_groups(groups: int, padding: Padding) -> None:
    torch.manual_seed(0)
    for loudest in range(groups):
        W = randn(2 * groups, 3, 3, 3)
        W.unflatten(0, (groups, 2))[loudest] *= 3
        true = true_norm(W, padding, (4, 5), groups)
        norm = float(operator_norm(Conv(W, padding, groups), (4, 5)))
        assert norm == pytest.approx(true, rel=1e-10) if padding == "circular" else true <= norm <= 2 * true
        assert true <= float(operator_norm(Conv(W, padding, groups)))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("hidden", "channels"), [(4, 3), (2, 5)])
def test_separable(padding: Padding, hidden: int, channels: int) -> None:
    torch.manual_seed(0)
    W = Separable(randn(channels, 1, 3, 2), randn(hidden, channels), padding)
    product = Conv(W.P[:, :, None, None] * W.D[:, 0], padding)
    for size in (None, (5, 4)):
        norm, same = operator_norm(W, size), operator_norm(product, size)
        assert (norm.evidence, norm.method) == (same.evidence, same.method)
        assert float(norm) == pytest.approx(float(same), rel=1e-12)
        assert svd(columns(W, (channels, 5, 4))) <= float(norm) * (1 + 1e-12)
    if padding == "circular":
        assert float(operator_norm(W, (5, 4))) == pytest.approx(svd(columns(W, (channels, 5, 4))), rel=1e-10)


@dataclass(frozen=True)
class Diagonal(Operator):
    d: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.d * z

    adjoint = __call__


def test_lanczos_is_a_lower_bound() -> None:
    torch.manual_seed(0)
    image = (3, 5, 4)
    cases: list[tuple[Operator, tuple[int, ...] | None, tuple[int, ...]]] = [
        (Dense(randn(6, 4)), None, (4,)),
        (Diagonal(randn(7)), (7,), (7,)),
        (Conv(randn(6, 1, 2, 2), groups=3), (5, 4), image),
    ]
    for padding in PADDINGS:
        for W in (Conv(randn(2, 3, 3, 4), padding), Separable(randn(3, 1, 3, 3), randn(4, 3), padding)):
            cases.append((W, (5, 4), image))
    for W, size, shape in cases:
        norm = operator_norm(W, size, method="lanczos")
        assert (norm.evidence, norm.method) == ("estimate", "lanczos")
        true = svd(columns(W, shape))
        assert true * (1 - 1e-6) <= float(norm) <= true * (1 + 1e-12)
        assert not norm.value.requires_grad


def test_lanczos_of_small_and_zero_operators() -> None:
    assert float(operator_norm(Dense(torch.tensor([[-2.0]])), method="lanczos")) == 2
    assert float(operator_norm(Dense(torch.tensor([[3.0, 4.0]])), method="lanczos")) == pytest.approx(5)
    assert float(operator_norm(Conv(torch.zeros(2, 2, 3, 3)), (4, 4), method="lanczos")) == 0
    weight = torch.ones(1, 1, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    assert float(operator_norm(Conv(weight), (1, 1), method="lanczos")) == 1


# The search for the largest frequency


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12, 12, 3, 3), (5, 9, 2, 4), (16, 4, 5, 5), (1, 1, 3, 3)])
def test_the_search_misses_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rel = 200 * torch.finfo(dtype).eps
    for seed in range(4):
        torch.manual_seed(seed)
        W = torch.randn(shape, dtype=dtype)
        for chunk in (2**8, 2**18):
            monkeypatch.setattr(spectral, "_CHUNK", chunk)
            for size in ((16, 15), (7, 10)):
                norm = operator_norm(Conv(W, "circular"), size)
                assert float(norm) == pytest.approx(float(unpruned(W, *size).max()), rel=rel)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_search_neither_overflows_nor_underflows(scale: float) -> None:
    torch.manual_seed(0)
    W = torch.randn(4, 4, 3, 3)
    expected = float(operator_norm(Conv(W)))
    assert float(operator_norm(Conv(W * scale))) == pytest.approx(expected * scale, rel=1e-5)
    assert float(scale_to(Conv(W * scale), 2.0)) == pytest.approx(min(1.0, 2.0 / (expected * scale)), rel=1e-4)


def test_flat_kernels_need_few_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """|K(w)| = 1 at every frequency, up to rounding: the test with Cholesky factors must not keep all of them."""
    calls = []
    eigvalsh = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda gram: calls.append(len(gram)) or eigvalsh(gram))
    torch.manual_seed(0)
    Q = torch.linalg.qr(torch.randn(16, 16)).Q
    W = torch.zeros(16, 16, 3, 3)
    W[:8, :, 0, 1], W[8:, :, 2, 2] = Q[:8], Q[8:]
    assert float(operator_norm(Conv(W, "circular"), (32, 32))) == pytest.approx(1, rel=1e-5)
    assert sum(calls) < 50
    calls.clear()
    assert float(scale_to(Conv(W), 1.1)) == 1
    assert not calls  # inside the ball one test per frequency is all


# Derivatives


@pytest.mark.parametrize("size", [None, (5, 4)])
@pytest.mark.parametrize("padding", PADDINGS)
def test_the_norm_is_differentiable(padding: Padding, size: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    W = randn(4, 2, 3, 2).requires_grad_()
    D, P = randn(3, 1, 3, 3).requires_grad_(), randn(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda W: operator_norm(Conv(W, padding), size).value, W, fast_mode=True)
    assert torch.autograd.gradcheck(lambda W: operator_norm(Conv(W, padding, groups=2), size).value, W, fast_mode=True)
    assert torch.autograd.gradcheck(lambda D, P: operator_norm(Separable(D, P, padding), size).value, (D, P), fast_mode=True)
    assert torch.autograd.gradcheck(lambda P: operator_norm(Dense(P)).value, P, fast_mode=True)


# Errors and texts


def test_the_evidence_and_the_text() -> None:
    W = torch.ones(1, 1, 3, 3)
    assert repr(operator_norm(Conv(W, "circular"), (4, 4))) == "Norm(= 9, exact by fft)"
    assert repr(operator_norm(Conv(W), (4, 4))) == "Norm(<= 9, bound by fft of a larger torus)"
    assert repr(operator_norm(Conv(W), (1, 1), method="lanczos")) == "Norm(>= 1, estimate by lanczos)"
    assert operator_norm(Conv(W, "circular")).evidence == "bound"
    assert repr(operator_norm(Dense(torch.eye(2)))) == "Norm(= 1, exact by svd)"
    for size in (None, (3, 3)):  # one tap: the same matrix at every pixel
        assert operator_norm(Conv(torch.ones(2, 2, 1, 1)), size) == Norm(
            operator_norm(Dense(torch.ones(2, 2))).value, "exact", "svd"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    W = torch.full((1, 1, 3, 3), 0.5, dtype=dtype)
    norm = operator_norm(Conv(W, "circular"), (4, 4))
    assert norm.value.dtype == torch.float32
    assert float(norm) == pytest.approx(4.5)
    assert operator_norm(Dense(W[0, 0])).value.dtype == torch.float32


def test_bad_arguments() -> None:
    W, D = Conv(torch.ones(1, 1, 3, 3)), Dense(torch.eye(2))
    with pytest.raises(TypeError, match=r"^The 'operator' parameter of operator_norm must be an Operator\. Got 3 instead\.$"):
        operator_norm(3)  # type: ignore[arg-type]
    for size in ((4,), (4, 4, 4), (0, 4), (4, -1)):
        with pytest.raises(ValueError, match=r"^The 'size' parameter of operator_norm must be "):
            operator_norm(W, size)
    for other in (4, "44", (4.0, 4), (True, 4), torch.ones(2)):
        with pytest.raises(TypeError, match=r"^The 'size' parameter of operator_norm must be "):
            operator_norm(W, other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'size' parameter of operator_norm must be None for a Dense operator"):
        operator_norm(D, (4, 4))
    with pytest.raises(
        ValueError, match=r"^The 'method' parameter of operator_norm must be None or 'lanczos'\. Got 'power' instead\.$"
    ):
        operator_norm(W, (4, 4), method="power")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'size' parameter of operator_norm must be given when the method is 'lanczos'"):
        operator_norm(W, method="lanczos")
    with pytest.raises(TypeError, match=r"'method' parameter of operator_norm must be 'lanczos' for a Diagonal"):
        operator_norm(Diagonal(torch.ones(3)), (3,))
    with pytest.raises(TypeError, match=r"'operator' parameter of scale_to must be a Dense, Conv or Separable\. Got 'Diagonal'"):
        scale_to(Diagonal(torch.ones(3)), 1.0)
    for limit in (0, -1.0, math.nan, math.inf):
        for call in (lambda limit: scale_to(D, limit), lambda limit: NormBall(limit)):
            with pytest.raises(ValueError, match=r"^The 'limit' parameter of (scale_to|NormBall) must be a finite number > 0\."):
                call(limit)
    with pytest.raises(TypeError, match=r"'build' parameter of NormBall must be a function from a weight to an Operator"):
        NormBall(1.0, 3)  # type: ignore[arg-type]


# The ball


def circular(W: Tensor) -> Conv:
    return Conv(W, "circular")


def grouped(W: Tensor) -> Conv:
    return Conv(W, groups=2)


BALLS = [
    (Dense, (5, 4)),
    (Dense, (40, 40)),
    (Conv, (3, 2, 3, 3)),
    (Conv, (2, 2, 2, 5)),
    (circular, (2, 3, 3, 3)),
    (grouped, (4, 2, 3, 3)),
]


def norms(operator: Operator) -> list[float]:
    """The norms of an operator on some sizes, from its matrix."""
    if isinstance(operator, Dense):
        return [svd(operator.W.detach().double())]
    assert isinstance(operator, Conv)
    return [true_norm(operator.W, operator.padding, size, operator.groups) for size in ((1, 1), (3, 4), (6, 6))]


@pytest.mark.parametrize(("build", "shape"), BALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_ball_holds(build: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tightness = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.1}
    for seed, size, limit in ((0, 1.0, 0.9), (1, 30.0, 1.0), (2, 100.0, 3.3)):
        torch.manual_seed(seed)
        W = (size * torch.randn(shape)).to(dtype)
        scaled = NormBall(limit, build)(W)
        assert scaled.dtype == dtype
        assert max(norms(build(scaled))) <= limit
        assert float(operator_norm(build(scaled))) >= limit * (1 - tightness[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_does_not_leave_the_ball(dtype: torch.dtype) -> None:
    """Many weights whose norm is the bound itself, so that an error in the last place would show."""
    torch.manual_seed(0)
    for _ in range(200):
        W = torch.randn(6, 6, dtype=dtype)
        assert svd(NormBall(0.7)(W).double()) <= 0.7
        W = torch.randn(3, 3, 1, 1, dtype=dtype)
        assert svd(NormBall(0.7, Conv)(W).double()[:, :, 0, 0]) <= 0.7


@pytest.mark.parametrize(("build", "shape"), BALLS)
def test_inside_the_ball_nothing_changes(build: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for size in (1.0, 1e-3, 0.0, 1e-40):
        W = (size * torch.randn(shape)).requires_grad_()
        limit = 1.02 * max(float(operator_norm(build(W))), 0.1)
        scaled = NormBall(limit, build)(W)
        assert torch.equal(scaled, W)
        weights = torch.randn(shape)
        (grad,) = torch.autograd.grad((weights * scaled).sum(), W, create_graph=True)
        assert torch.equal(grad, weights)
        (second,) = torch.autograd.grad(grad.sum(), W)
        assert not second.any()


@pytest.mark.parametrize(("build", "shape"), BALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_does_not_round_the_norm(build: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    W = 30 * torch.randn(shape)
    exact, scaled = float(operator_norm(build(W))), NormBall(1.0, build)(W)
    with torch.autocast("cpu", dtype):
        assert float(operator_norm(build(W))) == exact
        assert torch.equal(NormBall(1.0, build)(W), scaled)


@pytest.mark.parametrize(("build", "shape"), BALLS)
def test_the_derivatives_of_the_ball(build: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    shape = tuple(min(length, 5) for length in shape)
    W = randn(*shape)
    norm = float(operator_norm(build(W)))
    for limit in (0.5 * norm, 1.5 * norm):
        ball = NormBall(limit, build)
        assert torch.autograd.gradcheck(ball, W.clone().requires_grad_(), fast_mode=True)
        assert torch.autograd.gradgradcheck(ball, W.clone().requires_grad_(), fast_mode=True)


def test_separable_weights_share_one_factor() -> None:
    torch.manual_seed(0)
    for padding in PADDINGS:
        D, P = torch.randn(3, 1, 3, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        scaled = Separable(D.detach().double(), (P * scale_to(Separable(D, P, padding), 0.5)).detach().double(), padding)
        assert 0.3 < svd(columns(scaled, (3, 6, 6))) <= 0.5
    D, P = randn(3, 1, 3, 3).requires_grad_(), randn(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda D, P: scale_to(Separable(D, P), 0.5), (D, P))
    factor = scale_to(Separable(D, P), 1e3)
    assert torch.equal(factor, torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize(("build", "shape"), [BALLS[0], BALLS[2], BALLS[5]])
def test_transforms_of_the_ball(build: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ball = NormBall(2.0, build)
    stack = randn(4, *shape) * torch.tensor([0.01, 1.0, 3.0, 0.0], dtype=torch.float64).view(-1, *[1] * len(shape))
    each = torch.stack([ball(W) for W in stack])
    torch.testing.assert_close(torch.func.vmap(ball)(stack), each)
    torch.testing.assert_close(torch.func.vmap(ball, in_dims=1)(stack.transpose(0, 1)), each)

    def loss(W: Tensor) -> Tensor:
        return ball(W).sin().sum()

    grads = []
    for W in stack:
        leaf = W.clone().requires_grad_()
        loss(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(stack), torch.stack(grads))
    tangent = torch.func.jvp(loss, (stack[2],), (stack[1],))[1]
    torch.testing.assert_close(tangent, (grads[2] * stack[1]).sum())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(2, 2, 3, 3))
        parametrize.register_parametrization(self, "W", NormBall(0.9, circular))

    def forward(self, z: Tensor) -> Tensor:
        return circular(self.W)(z)


def test_parametrize() -> None:
    torch.manual_seed(0)
    layer, z = Layer(), torch.randn(1, 2, 4, 4)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.W, layer.W)
    other = Layer()
    assert not torch.equal(other.W, layer.W)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(z), layer(z))
    given = torch.randn(2, 2, 3, 3)
    other.W = given
    assert torch.equal(other.parametrizations.W.original, given)
    assert max(norms(circular(other.W))) <= 0.9
    replaced = torch.func.functional_call(layer, {"parametrizations.W.original": given}, (z,))
    assert torch.equal(replaced, other(z))
    assert "NormBall(limit=0.9, build=circular)" in repr(layer)
    small = 1e-3 * given
    other.W = small
    assert torch.equal(other.W, small)


def test_training_stays_in_the_ball() -> None:
    torch.manual_seed(0)
    layer, z = Layer(), torch.randn(4, 2, 6, 6)
    with torch.no_grad():
        layer.parametrizations.W.original.mul_(0.01)
    optimizer = torch.optim.SGD(layer.parameters(), lr=3e-4)
    seen = []
    for _ in range(60):
        optimizer.zero_grad()
        (-layer(z).square().sum()).backward()
        optimizer.step()
        seen.append(max(norms(circular(layer.W))))
    assert seen[0] < 0.1
    assert all(norm <= 0.9 for norm in seen)
    assert seen[-1] > 0.85
