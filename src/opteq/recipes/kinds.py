"""The models by name: settings that build a network for a data set."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from torch import nn

from opteq import cells, models
from opteq.cells.deep import Mode
from opteq.cells.scaled_relu import ScaledReLUInit
from opteq.checks import invalid
from opteq.data import Dataset
from opteq.models.parts import NormKind
from opteq.models.zoo import Draw
from opteq.recipes.inputs import features, images, labels, vectors
from opteq.recipes.solving import AUTO, Solve
from opteq.regularizers import HSIC, L1, L2, Decorrelation, Incay, Regularizer

RegularizerName: TypeAlias = Literal["none", "l2", "l1", "incay", "decorrelation", "hsic"]
_REGULARIZERS: dict[str, type[Regularizer]] = {
    "l2": L2, "l1": L1, "incay": Incay, "decorrelation": Decorrelation, "hsic": HSIC,
}  # fmt: skip


def regularizer(name: RegularizerName) -> Regularizer | None:
    """R by its name."""
    return None if name == "none" else _REGULARIZERS[name]()


@dataclass(frozen=True)
class Deep:
    """Deep OptEq on images: a convolution, the equilibrium of convolutional layers, pooling, a linear map."""

    channels: int = 16
    """Channels of z."""
    hidden: tuple[int, ...] = (16, 32)
    """Channels inside of each layer; 29 channels with 16 32 64 64 128, stride 2 and pool 2 are the paper's 162k on CIFAR-10."""
    kernel_size: int = 3
    """Side of the kernels, odd."""
    stride: int = 1
    """Of the first convolution: 2 halves the image, which is enough for sides of 28 or more."""
    pool: int = 4
    """Means over pool x pool regions go into the linear map."""
    norm: NormKind | None = "batch"
    """Behind the first convolution and before the pooling; never inside f."""
    alpha: float = 0.8
    """Weight of f beside the skip connection, in (0, 1]."""
    activation: str = "relu"
    """Monotone: relu, leaky_relu, tanh, ..."""
    learn_alpha: bool = False
    """Learn the alpha of each layer."""
    constrained: bool = True
    """Keep ||W||^2 L below mu, so that the equilibrium exists and is unique throughout the training."""
    draw: Draw = "half"
    """How W begins: at norms of about 1/2, or, without the constraint, as nn.Conv2d draws it, at norms above 1."""
    regularizer: RegularizerName = "none"
    """R of T_R, a step of which begins f."""
    regularizer_mode: Mode = "gradient"
    """The step: z - gamma grad R(z), or prox_{gamma R}(z) where R has one."""
    gamma: float = 0.1
    """Size of that step (with `--train.mode sam`, SAM has its own)."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return models.deep_opteq(
            images("deep", dataset)[0], labels("deep", dataset), channels=self.channels, hidden=self.hidden,
            kernel_size=self.kernel_size, stride=self.stride, pool=self.pool, norm=self.norm, alpha=self.alpha,
            activation=self.activation, regularizer=regularizer(self.regularizer), mode=self.regularizer_mode, gamma=self.gamma,
            learn_alpha=self.learn_alpha, constrained=self.constrained, draw=self.draw, solver=self.solve.method(),
            stop=self.solve.stop(), gradient=self.solve.derivative(),
        )  # fmt: skip


@dataclass(frozen=True)
class Dense:
    """Deep OptEq of dense layers, on samples as vectors; on real targets y = a'z."""

    features: int = 64
    """Length of z."""
    hidden: tuple[int, ...] = (64,)
    """Width of each layer."""
    alpha: float = 0.8
    """Weight of f beside the skip connection, in (0, 1]."""
    activation: str = "relu"
    """Monotone: relu, leaky_relu, tanh, ..."""
    learn_alpha: bool = False
    """Learn the alpha of each layer."""
    constrained: bool = True
    """Keep ||W||^2 L below mu."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return vectors(cells.DeepOptEq(self._layers(dataset), learn_alpha=self.learn_alpha), dataset, self.solve)

    def _layers(self, dataset: Dataset) -> list[cells.OptEq]:
        return [
            cells.OptEq(
                features(dataset), self.features, width, activation=self.activation, alpha=self.alpha, constrained=self.constrained
            )
            for width in self.hidden
        ]


@dataclass(frozen=True)
class Wide(Dense):
    """Wide OptEq of dense layers side by side, the limit of a deep one; on real targets y = a'z."""

    def build(self, dataset: Dataset) -> nn.Module:
        if self.learn_alpha:
            raise ValueError(invalid(self, "learn_alpha", "False: alpha is only a weight there", True))
        return vectors(cells.WideOptEq(self._layers(dataset)), dataset, self.solve)


@dataclass(frozen=True)
class Monotone:
    """Monotone DEQ of one dense layer, on samples as vectors; on real targets y = a'z, with a theorem (opteq certify)."""

    width: int = 64
    """Length of z."""
    m: float = 0.1
    """Strong monotonicity of I - W, > 0."""
    activation: str = "relu"
    """Monotone and 1-Lipschitz: relu, leaky_relu, tanh, ..."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return vectors(cells.Monotone(features(dataset), self.width, m=self.m, activation=self.activation), dataset, self.solve)


@dataclass(frozen=True)
class Gaussian:
    """Gaussian-initialised DEQ z = relu(W z + U x), on vectors; on real targets y = a'z, with a theorem (opteq certify)."""

    width: int = 64
    """Length of z."""
    sigma_w2: float = 0.08
    """||W|| begins at about 2 sqrt(2 sigma_w2): below 1 for sigma_w2 < 1/8."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return vectors(cells.GaussianDEQ(features(dataset), self.width, sigma_w2=self.sigma_w2), dataset, self.solve)


@dataclass(frozen=True)
class ScaledRelu:
    """z = relu(gamma z A + relu(x W)), on vectors; on real targets y = a'z, with a theorem (opteq certify)."""

    width: int = 64
    """Length of z; the theorem needs at least the number of samples."""
    gamma: float = 0.1
    """A contraction when gamma ||A|| < 1."""
    start: ScaledReLUInit = "identity"
    """The first weights. identity: A = I (Section 7 of the paper); scaled_identity: A = ||W|| I; half_normal: Eq. 27."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        cell = cells.ScaledReLU(features(dataset), self.width, gamma=self.gamma, init=self.start)
        return vectors(cell, dataset, self.solve)


@dataclass(frozen=True)
class MonotoneConv:
    """Monotone DEQ of one convolution on the image itself, pooling, a linear map."""

    channels: int = 32
    """Channels of z; 81 with pool 8 are the 172k network on CIFAR-10."""
    kernel_size: int = 3
    """Side of the kernels, odd."""
    m: float = 1.0
    """Strong monotonicity of I - W, > 0."""
    pool: int = 4
    """Means over pool x pool regions go into the linear map."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        channels, size = images("monotone-conv", dataset)
        return models.monotone_conv(
            channels, labels("monotone-conv", dataset), size=size, channels=self.channels, kernel_size=self.kernel_size, m=self.m,
            pool=self.pool, solver=self.solve.method(), stop=self.solve.stop(), gradient=self.solve.derivative(),
        )  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """What a residual block has, however often it is applied."""

    channels: int = 48
    """Channels of z."""
    inner: int = 64
    """Channels inside of the block."""
    groups: int = 8
    """Of the group norms."""
    stride: int = 1
    """Of the first convolution."""
    pool: int = 4
    """Means over pool x pool regions go into the linear map."""
    norm: NormKind | None = "batch"
    """Behind the first convolution and before the pooling; never inside f."""

    def _network(self, kind: str, dataset: Dataset) -> Callable[..., nn.Module]:
        return partial(
            models.residual_deq, images(kind, dataset)[0], labels(kind, dataset), channels=self.channels, inner=self.inner,
            groups=self.groups, stride=self.stride, pool=self.pool, norm=self.norm,
        )  # fmt: skip


@dataclass(frozen=True)
class Residual(_Block):
    """A residual block with group norms at its equilibrium."""

    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        network = self._network("residual", dataset)
        return network(solver=self.solve.method(), stop=self.solve.stop(), gradient=self.solve.derivative())


@dataclass(frozen=True)
class Repeat(_Block):
    """The block of `residual`, applied a fixed number of times: a weight-tied network."""

    times: int = 6
    """The paper has 6, 11 and 18."""

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return self._network("repeat", dataset)(repeat=self.times)
