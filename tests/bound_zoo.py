"""Random cells of every kind that error_bound and lipschitz_bound cover, in float64, with oracles for their equilibria."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cell_zoo import affine, conv, deep, dense, depthwise, multivariate, random_matrix, scale_weights
from opteq import Cell, Stop, solve
from opteq.activations import find_activation
from opteq.cells import GaussianDEQ, Monotone, MonotoneConv, MonotoneMultiTier, ScaledReLU, StackedOptEq, WideOptEq
from opteq.operators import Conv, Dense, MonotoneOperator, Operator
from opteq.regularizers import L1, L2, Decorrelation
from opteq.solvers import Anderson, Newton
from opteq.splitting import ActivationMap, SplitMap


class ActivationCell(Cell):
    """z = sigma(W z + U x) for any activation."""

    def __init__(self, activation: str, factor: float, *, wrapped: bool = False) -> None:
        super().__init__()
        self.in_features, self.state_shape = 3, (6,)
        self.activation, self.wrapped = find_activation(self, activation), wrapped
        W = torch.randn(6, 6, dtype=torch.float64)
        self.W = nn.Parameter(W * factor / self.activation.lipschitz / torch.linalg.matrix_norm(W, 2))
        self.U = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))

    def bind(self, x: Tensor) -> ActivationMap:
        W = Wrapped(self.W) if self.wrapped else Dense(self.W)
        return ActivationMap(W, self.activation, linear(x, self.U))


@dataclass(frozen=True)
class Wrapped(Operator):
    """An operator whose norm has no formula."""

    W: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return z @ self.W.T

    def adjoint(self, s: Tensor) -> Tensor:
        return s @ self.W


class ImageSplit(Cell):
    """A monotone network on images, bound to a SplitMap with an operator that is no matrix."""

    def __init__(self, m: float) -> None:
        super().__init__()
        self.in_channels, self.size, self.m = 2, 4, m
        self.state_shape = (2, 4, 4)
        self.A, self.B, self.U = (nn.Parameter(torch.randn(2, 2, 3, 3, dtype=torch.float64) / 3) for _ in range(3))
        self.b = nn.Parameter(torch.randn(2, dtype=torch.float64))

    def injection(self, x: Tensor) -> Tensor:
        return Conv(self.U)(x) + self.b[:, None, None]

    def bind(self, x: Tensor) -> SplitMap:
        W = MonotoneOperator(self.m, Conv(self.A), Conv(self.B))
        return SplitMap(W, find_activation(self, "relu"), self.injection(x), m=self.m)


def gaussian(seed: int, factor: float | None = None) -> GaussianDEQ:
    torch.manual_seed(seed)
    cell = GaussianDEQ(3, 12, sigma_w2=0.06).double()
    with torch.no_grad():
        factor = 0.3 + 0.65 * ((seed * 0.618) % 1) if factor is None else factor
        cell.W.mul_(factor / torch.linalg.matrix_norm(cell.W, 2))
    return cell


def scaled(seed: int) -> ScaledReLU:
    torch.manual_seed(seed)
    cell = ScaledReLU(3, 10, gamma=0.05).double()
    with torch.no_grad():
        cell.A.normal_()
        cell.A.mul_((0.3 + 0.65 * ((seed * 0.618) % 1)) / cell.gamma / torch.linalg.matrix_norm(cell.A, 2))
    return cell


def monotone(seed: int, activation: str = "relu") -> Monotone:
    torch.manual_seed(seed)
    init = ("linear", "normal")[seed % 2]
    cell = Monotone(3, 10, m=(0.02, 0.1, 0.5, 1.0)[seed % 4], activation=activation, init=init).double()
    with torch.no_grad():
        cell.b.normal_()
        cell.B.mul_(1 + seed % 3)
    return cell


def small(cell: Cell) -> Cell:
    """With room between the norm of a padded convolution on a small image and its bound."""
    scale_weights(cell, 0.75)
    return cell


def frozen_deep(seed: int) -> Cell:
    cell = deep(dense(seed, activation="tanh"), regularizer=Decorrelation(0.5), gamma=0.05, evaluation="frozen").eval()
    cell.freeze(3 * random_matrix(6, 4, seed=seed))
    return cell


def activated(seed: int, activation: str) -> ActivationCell:
    torch.manual_seed(seed)
    return ActivationCell(activation, 0.85)


def image_split(seed: int) -> ImageSplit:
    torch.manual_seed(seed)
    return ImageSplit((0.05, 0.3, 1.0)[seed % 3])


def monotone_conv(seed: int) -> MonotoneConv:
    torch.manual_seed(seed)
    padding, activation = ("circular", "zeros")[seed % 2], ("relu", "tanh", "sigmoid")[seed % 3]
    cell = MonotoneConv(2, 3, (4, 3), m=(0.05, 0.5)[seed // 2 % 2], padding=padding, activation=activation)
    return cell.double()


def monotone_tiers(seed: int) -> MonotoneMultiTier:
    torch.manual_seed(seed)
    return MonotoneMultiTier(1, (2, 3), 4, m=(0.05, 0.5)[seed % 2]).double()


@dataclass(frozen=True)
class Kind:
    make: Callable[[int], Cell]
    shape: tuple[int, ...] = (3,)
    lipschitz: bool = True  # whether lipschitz_bound covers it

    def x(self, seed: int, batch: int = 4) -> Tensor:
        return random_matrix(batch, *self.shape, seed=seed + 1000)


IMAGE = (2, 4, 3)
ALPHAS = (1.0, 0.3, 0.01)
KINDS = {
    "OptEq relu": Kind(lambda s: dense(s, hidden=(3, 6)[s % 2], alpha=ALPHAS[s % 3], mu=1 + s % 2)),
    "OptEq tanh": Kind(lambda s: dense(s, activation="tanh", alpha=ALPHAS[s % 3], factor=(0.5, 0.95)[s % 2])),
    "OptEq sigmoid, softplus": Kind(lambda s: dense(s, activation=("sigmoid", "softplus")[s % 2])),
    "OptEq constrained": Kind(lambda s: dense(s, constrained=True, margin=0.1)),
    "ConvOptEq zeros": Kind(lambda s: small(conv(s, (3, 2)[s % 2], alpha=ALPHAS[s % 3])), IMAGE),
    "ConvOptEq circular": Kind(lambda s: conv(s, (3, 2)[s % 2], padding="circular", activation="tanh"), IMAGE),
    "DepthwiseOptEq": Kind(lambda s: small(depthwise(s, padding=("zeros", "circular")[s % 2])), IMAGE),
    "MultivariateOptEq": Kind(lambda s: multivariate(s, alpha=ALPHAS[s % 3])),
    "AffineOptEq": Kind(lambda s: affine(s, orthogonal=False)),
    "AffineOptEq orthogonal": Kind(lambda s: affine(s, orthogonal=True)),
    "DeepOptEq 2": Kind(lambda s: deep(dense(s, activation="tanh", alpha=0.6), dense(s + 1, hidden=3, mu=2.0))),
    "DeepOptEq 3, small alpha": Kind(lambda s: deep(*(dense(s + i, alpha=0.02) for i in range(3)))),
    "DeepOptEq learn_alpha": Kind(lambda s: deep(dense(s, alpha=0.5), dense(s + 1), learn_alpha=True)),
    "DeepOptEq conv": Kind(lambda s: deep(small(conv(s)), small(depthwise(s + 1))), IMAGE),
    "DeepOptEq L2 gradient": Kind(lambda s: deep(dense(s), regularizer=L2(), gamma=(0.3, 1.7)[s % 2])),
    "DeepOptEq L2 prox": Kind(lambda s: deep(dense(s), dense(s + 1), regularizer=L2(), mode="prox", gamma=0.3)),
    "DeepOptEq L1 prox": Kind(lambda s: deep(dense(s), regularizer=L1(), mode="prox", gamma=0.1)),
    "DeepOptEq frozen Decorrelation": Kind(frozen_deep),
    "WideOptEq one matrix": Kind(lambda s: WideOptEq([dense(s), dense(s + 1, hidden=3)])),
    "WideOptEq": Kind(lambda s: WideOptEq([dense(s, alpha=0.2), dense(s + 1, activation="tanh", alpha=0.9, mu=2.0)])),
    "WideOptEq conv": Kind(lambda s: WideOptEq([small(conv(s)), small(depthwise(s + 1, alpha=0.5))]), IMAGE),
    "StackedOptEq": Kind(lambda s: StackedOptEq([dense(s), dense(s + 1, hidden=3, alpha=0.4), dense(s + 2, mu=2.0)])),
    "GaussianDEQ": Kind(gaussian),
    "ScaledReLU": Kind(scaled),
    "Monotone relu": Kind(monotone),
    "Monotone tanh": Kind(lambda s: monotone(s, "tanh")),
    "MonotoneConv": Kind(monotone_conv, (2, 4, 3)),
    "MonotoneMultiTier": Kind(monotone_tiers, (1, 4, 4)),
    "monotone convolution": Kind(image_split, (2, 4, 4)),
    "ActivationMap silu": Kind(lambda s: activated(s, "silu"), lipschitz=False),
    "ActivationMap sigmoid": Kind(lambda s: activated(s, "sigmoid"), lipschitz=False),
}


def equilibrium(cell: Cell, x: Tensor, z0: Tensor | None = None) -> Tensor:
    """z* to rounding, whatever solver is the default; checked."""
    with torch.no_grad():
        fn = cell.bind(x).to(torch.float64)
        z = cell.initial(x) if z0 is None else z0
        z = solve(fn, z, Anderson(), Stop(rtol=1e-10, max_steps=200)).z
        z = solve(fn, z, Newton(halvings=12), Stop(rtol=1e-14, max_steps=30)).z
        residual = (fn(z) - z).flatten(1).norm(dim=1)
        assert (residual <= 1e-12 * (1 + z.flatten(1).norm(dim=1))).all(), residual
    return z
