"""f of every cell, computed without the library in float64, with a bound of how far rounding may take the library from it.

A running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, Section 3.3): each number comes with a bound of
the error that a computation of the same formula in precision u = eps / 2, in any order of summation, can have made so far:

    |fl(sum_j a_j b_j) - sum_j a_j b_j| <= gamma sum_j |a_j| |b_j| + n t,   gamma = (n + 2) eps  (twice the gamma_n of the book),

with t the smallest normal number, for products that underflow and may be flushed to zero. An L-Lipschitz activation passes L times
the error on and adds 8 eps of its own value. Where a result is compared with the library's, the whole error is allowed, no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, softplus

from opteq import Cell
from opteq.cells import (
    AffineOptEq,
    ConvOptEq,
    DeepOptEq,
    DepthwiseOptEq,
    FunctionCell,
    GaussianDEQ,
    Monotone,
    MonotoneConv,
    MonotoneMultiTier,
    MultivariateOptEq,
    OptEq,
    ScaledReLU,
    StackedOptEq,
    WideOptEq,
)
from opteq.cells.optimization import OptEqCell
from opteq.regularizers import L1, L2

SIGMA = {
    "relu": torch.relu,
    "leaky_relu": lambda a: torch.where(a > 0, a, 0.01 * a),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda a: softplus(a, threshold=40.0),
    "identity": lambda a: a,
    "soft_threshold": lambda a: torch.sign(a) * torch.relu(a.abs() - 1),
}


@dataclass(frozen=True)
class Rounded:
    """A float64 tensor, and how far a computation of it in `dtype` may be from it, entry by entry."""

    value: Tensor
    error: Tensor
    dtype: torch.dtype

    @classmethod
    def exact(cls, tensor: Tensor, dtype: torch.dtype) -> "Rounded":
        """A number that the computation is given."""
        return cls(tensor.double(), torch.zeros_like(tensor, dtype=torch.float64), dtype)

    def _with(self, value: Tensor, error: Tensor, eps: float = 0.5) -> "Rounded":
        info = torch.finfo(self.dtype)
        return Rounded(value, error + eps * info.eps * value.detach().abs() + info.tiny, self.dtype)

    def __add__(self, other: "Rounded") -> "Rounded":
        return self._with(self.value + other.value, self.error + other.error)

    def __sub__(self, other: "Rounded") -> "Rounded":
        return self + (-1.0) * other

    def __rmul__(self, factor: float | Tensor) -> "Rounded":
        if isinstance(factor, float) and factor in (1.0, -1.0):
            return Rounded(factor * self.value, self.error, self.dtype)
        return self._with(factor * self.value, torch.as_tensor(factor).detach().abs() * self.error, 2)  # 1 - alpha is rounded, too

    def __matmul__(self, other: "Rounded") -> "Rounded":
        """Rows times a matrix."""
        a, b, info = self.value.detach().abs(), other.value.detach().abs(), torch.finfo(self.dtype)
        terms = max(int((other.value != 0).sum(0).max()), 1)  # zeros add nothing, and no rounding
        error = self.error @ (b + other.error) + a @ other.error + (terms + 2) * info.eps * (a @ b) + terms * info.tiny
        return Rounded(self.value @ other.value, error, self.dtype)

    @property
    def T(self) -> "Rounded":
        return Rounded(self.value.T, self.error.T, self.dtype)

    def through(self, name: str, lipschitz: float = 1.0) -> "Rounded":
        return self._with(SIGMA[name](self.value), lipschitz * self.error, 8)


Step = Callable[[Rounded], Rounded]


def convolution(kernel: Tensor, size: Sequence[int], padding: str) -> Tensor:
    """The matrix, for columns, of a convolution on images of a size: its action on the images with one bright pixel."""
    channels, (high, wide) = kernel.shape[1], kernel.shape[-2:]
    pixels = torch.eye(channels * size[0] * size[1], dtype=torch.float64).reshape(-1, channels, *size)
    margins = ((wide - 1) // 2, wide // 2, (high - 1) // 2, high // 2)
    if padding == "circular":
        rows = torch.arange(-margins[2], size[0] + margins[3]) % size[0]
        columns = torch.arange(-margins[0], size[1] + margins[1]) % size[1]
        images = pixels[..., rows, :][..., columns]
    else:
        images = pad(pixels, margins)
    return conv2d(images, kernel.double()).flatten(1).T


def depthwise(kernel: Tensor, size: Sequence[int], padding: str) -> Tensor:
    """The matrix of one kernel a channel."""
    return torch.block_diag(*(convolution(one[None], size, padding) for one in kernel))


def across(matrix: Tensor, size: Sequence[int]) -> Tensor:
    """The matrix of one that acts across channels, at every pixel."""
    return torch.kron(matrix.double().contiguous(), torch.eye(size[0] * size[1], dtype=torch.float64))


@singledispatch
def reference(cell: Cell, x: Tensor, dtype: torch.dtype) -> Step:
    """f(., x) on flat states [batch, n], as the library computes it in the dtype."""
    raise NotImplementedError(type(cell).__name__)


def _lifted(cell: OptEqCell, x: Tensor, dtype: torch.dtype) -> tuple[list[Rounded], Rounded]:
    """W as the matrices that are applied one after the other, and U x + b."""

    def given(*matrices: Tensor) -> list[Rounded]:
        return [Rounded.exact(matrix, dtype) for matrix in matrices]

    flat = Rounded.exact(x.flatten(1), dtype)
    if isinstance(cell, OptEq):
        return given(cell.W), flat @ given(cell.U)[0].T + given(cell.b)[0]
    size = x.shape[2:]
    bias = Rounded.exact(cell.b.repeat_interleave(size.numel()), dtype)
    if isinstance(cell, ConvOptEq):
        return given(convolution(cell.W, size, cell.padding)), flat @ given(convolution(cell.U, size, cell.padding))[0].T + bias
    assert isinstance(cell, DepthwiseOptEq)
    scaled = cell.operator()  # a constrained W2 is scaled as it is used
    first, second = given(depthwise(cell.U1, size, cell.padding), across(cell.U2[:, :, 0, 0], size))
    return given(depthwise(scaled.D, size, cell.padding), across(scaled.P, size)), flat @ first.T @ second.T + bias


def _plain(cell: OptEqCell, x: Tensor, dtype: torch.dtype) -> Step:
    """W' sigma(W z + u) / mu, without the skip connection."""
    W, u = _lifted(cell, x, dtype)
    S = Rounded.exact(cell.S, dtype) if isinstance(cell, MultivariateOptEq) else None

    def f(z: Rounded) -> Rounded:
        a = z
        for part in W:
            a = a @ part.T
        a = a + u
        s = a @ S.T if S is not None else a.through(cell.activation.name, cell.activation.lipschitz)
        for part in reversed(W):
            s = s @ part
        return (1 / cell.mu) * s

    return f


def alpha_of(cell: OptEqCell) -> float | Tensor:
    return cell.alpha if isinstance(cell.alpha, float) else cell.alpha.double()


@reference.register
def _(cell: OptEqCell, x: Tensor, dtype: torch.dtype) -> Step:
    plain, alpha = _plain(cell, x, dtype), alpha_of(cell)
    if isinstance(alpha, float) and alpha == 1:
        return plain
    return lambda z: alpha * plain(z) + (1 - alpha) * z


@reference.register
def _(cell: DeepOptEq, x: Tensor, dtype: torch.dtype) -> Step:
    layers = [reference(layer, x, dtype) for layer in cell.layers]
    R, gamma, prox = cell.regularizer, cell.gamma, cell.mode == "prox"

    def f(z: Rounded) -> Rounded:
        if isinstance(R, L2):
            z = (1 / (1 + gamma)) * z if prox else z - gamma * z
        elif isinstance(R, L1):
            z = z._with(z.value.sign() * torch.relu(z.value.abs() - gamma), z.error, 2)
        for layer in layers:
            z = layer(z)
        return z

    return f


@reference.register
def _(cell: StackedOptEq, x: Tensor, dtype: torch.dtype) -> Step:
    layers = [reference(layer, x, dtype) for layer in cell.layers]

    def f(z: Rounded) -> Rounded:
        values, errors = (t.chunk(len(layers), 1) for t in (z.value, z.error))
        parts = [layer(Rounded(values[i - 1], errors[i - 1], dtype)) for i, layer in enumerate(layers)]
        return Rounded(torch.cat([p.value for p in parts], 1), torch.cat([p.error for p in parts], 1), dtype)

    return f


@reference.register
def _(cell: WideOptEq, x: Tensor, dtype: torch.dtype) -> Step:
    layers, alphas = [_plain(layer, x, dtype) for layer in cell.layers], [alpha_of(layer) for layer in cell.layers]

    def f(z: Rounded) -> Rounded:
        first, *others = ((alpha / sum(alphas)) * layer(z) for alpha, layer in zip(alphas, layers, strict=True))
        for part in others:
            first = first + part
        return first

    return f


@reference.register
def _(cell: AffineOptEq, x: Tensor, dtype: torch.dtype) -> Step:
    base, A, t = reference(cell.cell, x, dtype), Rounded.exact(cell.A, dtype), Rounded.exact(cell.t, dtype)
    if cell.orthogonal:
        return lambda z: (base(z @ A.T + t) - t) @ A
    inverse = torch.linalg.inv(A.value)
    size, least = (torch.linalg.matrix_norm(matrix.detach(), 2) for matrix in (A.value, inverse))
    wrong = 10 * len(inverse) * torch.finfo(dtype).eps * size * least**2  # of an LU, Section 14.3
    back = Rounded(inverse, wrong.expand(inverse.shape), dtype)
    return lambda z: (base(z @ A.T + t) - t) @ back.T


@reference.register
def _(cell: GaussianDEQ, x: Tensor, dtype: torch.dtype) -> Step:
    W, U = Rounded.exact(cell.W, dtype), Rounded.exact(cell.U, dtype)
    u = Rounded.exact(x, dtype) @ U.T
    return lambda z: (z @ W.T + u).through("relu")


@reference.register
def _(cell: ScaledReLU, x: Tensor, dtype: torch.dtype) -> Step:
    A, W = cell.gamma * Rounded.exact(cell.A, dtype), Rounded.exact(cell.W, dtype)
    u = (Rounded.exact(x, dtype) @ W).through("relu")
    return lambda z: (z @ A + u).through("relu")


@reference.register
def _(cell: Monotone, x: Tensor, dtype: torch.dtype) -> Step:
    A, B, U = (Rounded.exact(p, dtype) for p in (cell.A, cell.B, cell.U))
    W = (1 - cell.m) * Rounded.exact(torch.eye(cell.width), dtype) - A.T @ A + B - B.T
    u = Rounded.exact(x, dtype) @ U.T
    u = u if cell.b is None else u + Rounded.exact(cell.b, dtype)
    return lambda z: (z @ W.T + u).through(cell.activation.name)


@reference.register
def _(cell: MonotoneConv, x: Tensor, dtype: torch.dtype) -> Step:
    A, B, U = (Rounded.exact(convolution(p, cell.size, cell.padding), dtype) for p in (cell.A, cell.B, cell.U))
    bias = Rounded.exact(cell.b.repeat_interleave(cell.size[0] * cell.size[1]), dtype)
    u = Rounded.exact(x.flatten(1), dtype) @ U.T + bias
    return lambda z: (z @ B.T - z @ B - z @ A.T @ A + (1 - cell.m) * z + u).through(cell.activation.name)


@reference.register
def _(cell: MonotoneMultiTier, x: Tensor, dtype: torch.dtype) -> Step:
    """The tiers are images of a flat state, so that A, B and K are blocks of matrices on all of it."""
    places = cell.unpack(torch.arange(torch.Size(cell.state_shape).numel()).reshape(1, *cell.state_shape))
    count = sum(place.numel() for place in places)
    A, B = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    for t, place in enumerate(places):
        rows, size = place.flatten(), place.shape[-2:]
        A[rows[:, None], rows], B[rows[:, None], rows] = (convolution(p, size, "circular") for p in (cell.A[t], cell.B[t]))
        if t + 1 < len(places):  # zeros between the pixels of the next tier: its columns are every second row and column
            K = convolution(cell.K[t], size, "circular").unflatten(1, (-1, *size))[:, :, ::2, ::2].flatten(1)
            A[rows[:, None], places[t + 1].flatten()] = K
    Am, Bm = Rounded.exact(A, dtype), Rounded.exact(B, dtype)
    fine = places[0].shape[-2:]
    into = torch.zeros(count, x[0].numel(), dtype=torch.float64)
    into[places[0].flatten()] = convolution(cell.U, fine, "circular")
    bias = torch.zeros(count, dtype=torch.float64)
    for place, b in zip(places, cell.b, strict=True):
        bias[place.flatten()] = b.double().repeat_interleave(place.shape[-2:].numel())
    u = Rounded.exact(x.flatten(1), dtype) @ Rounded.exact(into, dtype).T + Rounded.exact(bias, dtype)
    return lambda z: (z @ Bm.T - z @ Bm - z @ Am.T @ Am + (1 - cell.m) * z + u).through(cell.activation.name)


@reference.register
def _(cell: FunctionCell, x: Tensor, dtype: torch.dtype) -> Step:
    """Of the module below."""
    module = cell.f
    assert isinstance(module, Affine)
    W, U = Rounded.exact(module.W, dtype), Rounded.exact(module.U, dtype)
    u = Rounded.exact(x, dtype) @ U.T
    return lambda z: (z @ W.T + u).through(module.sigma)


class Affine(nn.Module):
    """sigma(W z + U x)."""

    def __init__(self, W: Tensor, U: Tensor, sigma: str) -> None:
        super().__init__()
        self.W, self.U, self.sigma = nn.Parameter(W), nn.Parameter(U), sigma

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return SIGMA[self.sigma](z @ self.W.T + x @ self.U.T)
