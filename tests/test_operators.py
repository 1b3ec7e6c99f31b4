import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opteq.operators import Conv, Dense, Operator, Padding, Separable

PADDINGS: tuple[Padding, ...] = ("zeros", "circular")


def shift(tap: int, length: int, size: int, padding: Padding) -> Tensor:
    """The matrix that reads the image where tap number `tap` of a kernel stands."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for y in range(size):
        source = y + tap - (length - 1) // 2
        if padding == "circular":
            matrix[y, source % size] += 1
        elif 0 <= source < size:
            matrix[y, source] = 1
    return matrix


def conv_matrix(W: Tensor, padding: Padding, size: tuple[int, int], groups: int = 1) -> Tensor:
    """sum_t W_t (x) shift by t, from the definition: also for kernels larger than the image."""
    blocks = []
    for block in W.unflatten(0, (groups, -1)):
        hidden, channels, height, width = block.shape
        matrix = torch.zeros(hidden * size[0] * size[1], channels * size[0] * size[1], dtype=torch.float64)
        for i, j in itertools.product(range(height), range(width)):
            moved = torch.kron(shift(i, height, size[0], padding), shift(j, width, size[1], padding))
            matrix += torch.kron(block[:, :, i, j].contiguous(), moved)
        blocks.append(matrix)
    return torch.block_diag(*blocks)


def columns(operator: Operator, shape: tuple[int, ...]) -> Tensor:
    """The matrix of an operator, from its products with the unit vectors."""
    count = torch.Size(shape).numel()
    return operator(torch.eye(count, dtype=torch.float64).view(count, *shape)).flatten(1).T


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_adjoint(operator: Operator, shape: tuple[int, ...]) -> None:
    z = randn(3, *shape)
    Wz = operator(z)
    s = torch.randn_like(Wz)
    Ws = operator.adjoint(s)
    assert Ws.shape == z.shape
    scale = torch.linalg.vector_norm(Wz) * torch.linalg.vector_norm(s)
    assert abs((Wz * s).sum() - (z * Ws).sum()) <= 1e-12 * scale


@given(hidden=st.integers(1, 7), features=st.integers(1, 7), seed=st.integers(0, 99))
def test_the_adjoint_of_a_dense_map(hidden: int, features: int, seed: int) -> None:
    torch.manual_seed(seed)
    W = Dense(randn(hidden, features))
    assert_adjoint(W, (features,))
    z = randn(4, features)
    torch.testing.assert_close(W(z), z @ W.W.T)


@pytest.mark.parametrize("padding", PADDINGS)
@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    size=st.tuples(st.integers(2, 7), st.integers(2, 7)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_the_adjoint_of_a_convolution(
    padding: Padding, kernel: tuple[int, int], size: tuple[int, int], channels: tuple[int, int], groups: int, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, features = channels
    W = Conv(randn(groups * hidden, features, *kernel), padding, groups)
    assert_adjoint(W, (groups * features, *size))
    assert W(randn(2, groups * features, *size)).shape == (2, groups * hidden, *size)


@pytest.mark.parametrize("padding", PADDINGS)
@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    size=st.tuples(st.integers(2, 7), st.integers(2, 7)),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 99),
)
def test_the_adjoint_of_a_separable_convolution(
    padding: Padding, kernel: tuple[int, int], size: tuple[int, int], channels: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, features = channels
    W = Separable(randn(features, 1, *kernel), randn(hidden, features), padding)
    assert_adjoint(W, (features, *size))
    product = Conv(W.P[:, :, None, None] * W.D[:, 0], padding)
    z = randn(2, features, *size)
    assert W(z).shape == (2, hidden, *size)
    torch.testing.assert_close(W(z), product(z))
    s = randn(2, hidden, *size)
    torch.testing.assert_close(W.adjoint(s), product.adjoint(s))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (2, 5), (5, 2), (1, 4)])
@pytest.mark.parametrize("size", [(4, 5), (2, 3)])
def test_a_convolution_is_its_matrix(padding: Padding, groups: int, kernel: tuple[int, int], size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    W = Conv(randn(2 * groups, 3, *kernel), padding, groups)
    matrix = conv_matrix(W.W, padding, size, groups)
    torch.testing.assert_close(columns(W, (3 * groups, *size)), matrix)
    s = randn(4, 2 * groups, *size)
    torch.testing.assert_close(W.adjoint(s).flatten(1), s.flatten(1) @ matrix)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 5), (1, 3), (5, 3)])
@pytest.mark.parametrize("groups", [1, 2])
def test_odd_kernels_with_zeros_are_torch_s_own(kernel: tuple[int, int], groups: int) -> None:
    torch.manual_seed(0)
    W = Conv(randn(4, 3, *kernel), groups=groups)
    z, s = randn(2, 3 * groups, 6, 7), randn(2, 4, 6, 7)
    padding = (kernel[0] // 2, kernel[1] // 2)
    torch.testing.assert_close(W(z), torch.nn.functional.conv2d(z, W.W, padding=padding, groups=groups))
    torch.testing.assert_close(W.adjoint(s), torch.nn.functional.conv_transpose2d(s, W.W, padding=padding, groups=groups))


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (4, 4), (2, 5)])
@pytest.mark.parametrize("size", [(6, 7), (5, 4), (3, 3)])
def test_a_circular_convolution_is_a_product_of_transforms(kernel: tuple[int, int], size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    W, z = Conv(randn(2, 3, *kernel), "circular"), randn(2, 3, *size)
    wrapped = torch.zeros(2, 3, *size, dtype=torch.float64)
    for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
        wrapped[:, :, ((kernel[0] - 1) // 2 - i) % size[0], ((kernel[1] - 1) // 2 - j) % size[1]] += W.W[:, :, i, j]
    product = torch.einsum("hcij,bcij->bhij", torch.fft.fft2(wrapped), torch.fft.fft2(z))
    torch.testing.assert_close(W(z), torch.fft.ifft2(product).real)


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 3)])
def test_a_circular_convolution_wraps_around_images_smaller_than_its_kernel(size):
    g = torch.Generator().manual_seed(0)
    W, z = torch.randn(3, 2, 5, 4, generator=g).double(), torch.randn(2, 2, *size, generator=g).double()
    conv = Conv(W, "circular")
    expected = torch.zeros(2, 3, *size).double()
    for i, j, a, b in itertools.product(range(size[0]), range(size[1]), range(5), range(4)):
        source = z[:, :, (i + a - 2) % size[0], (j + b - 1) % size[1]]
        expected[:, :, i, j] += source @ W[:, :, a, b].T
    torch.testing.assert_close(conv(z), expected)
    s = torch.randn(2, 3, *size, generator=g).double()
    torch.testing.assert_close((conv(z) * s).sum(), (z * conv.adjoint(s)).sum())
