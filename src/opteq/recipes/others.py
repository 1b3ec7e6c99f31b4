"""More models by name: several resolutions, the networks for ImageNet, segmentation, and baselines without an equilibrium."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from opteq import models
from opteq.data import Dataset
from opteq.models.parts import NormKind
from opteq.recipes.inputs import images, labels
from opteq.recipes.kinds import RegularizerName, regularizer
from opteq.recipes.solving import AUTO, UNROLLED, Solve

OdeMethod: TypeAlias = Literal["dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun", "euler", "midpoint", "rk4"]


@dataclass(frozen=True)
class Multiscale:
    """Multiscale DEQ: two strided convolutions, several resolutions at equilibrium together, a head that joins them."""

    channels: tuple[int, ...] = (16, 32)
    """Of each resolution, the finest first; height and width must be multiples of 4 2^(T-1) for T of them."""
    expand: int = 1
    """How much wider the residual blocks are inside."""
    head: tuple[int, ...] = (8, 16)
    """Inner channels of the head's block at each resolution."""
    final: int = 64
    """Channels before the linear map."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return models.mdeq_small(
            labels("multiscale", dataset), in_channels=images("multiscale", dataset)[0], channels=self.channels, expand=self.expand,
            head=self.head, final=self.final, solver=self.solve.method(), stop=self.solve.stop(), gradient=self.solve.derivative(),
        )  # fmt: skip


@dataclass(frozen=True)
class MdeqSmall:
    """MDEQ-small for ImageNet: 17.0M parameters, sides that are multiples of 32."""

    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return models.mdeq_small(
            labels("mdeq-small", dataset), in_channels=images("mdeq-small", dataset)[0], solver=self.solve.method(),
            stop=self.solve.stop(), gradient=self.solve.derivative(),
        )  # fmt: skip


@dataclass(frozen=True)
class OpteqSmall:
    """OptEq-Small for ImageNet: 8.8M parameters, images of at least 32 x 32; 17.2M with three stages."""

    stages: int = 2
    """Of the residual network that extracts features."""
    alpha: float = 0.8
    """Weight of f beside the skip connection, in (0, 1]."""
    learn_alpha: bool = False
    """Learn the alpha of each layer."""
    regularizer: RegularizerName = "none"
    """The paper has decorrelation."""
    gamma: float = 0.1
    """Size of the regulariser's step."""
    equilibrium: bool = True
    """False leaves it out: the head is directly on the extractor, which must have two stages."""
    solve: Solve = UNROLLED

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return self._built("opteq-small", models.opteq_small, dataset)

    def _built(self, kind: str, make: Callable[..., models.Classifier], dataset: Dataset) -> nn.Module:
        network = make(
            labels(kind, dataset), in_channels=images(kind, dataset)[0], stages=self.stages, alpha=self.alpha,
            learn_alpha=self.learn_alpha, regularizer=regularizer(self.regularizer), gamma=self.gamma, solver=self.solve.method(),
            stop=self.solve.stop(), gradient=self.solve.derivative(),
        )  # fmt: skip
        return network if self.equilibrium else models.without_equilibrium(network)


@dataclass(frozen=True)
class OpteqMid(OpteqSmall):
    """OptEq-Middle for ImageNet: 13.7M parameters, images of at least 32 x 32; 36.1M with three stages."""

    def build(self, dataset: Dataset) -> nn.Module:
        return self._built("opteq-mid", models.opteq_mid, dataset)


@dataclass(frozen=True)
class Segmenter:
    """Deep OptEq between strided convolutions and scores at each pixel: segmentation."""

    channels: tuple[int, ...] = (64, 128, 256)
    """Of the strided convolutions, each of which halves the image; the last is that of z."""
    hidden: tuple[int, ...] = (256, 512, 512)
    """Channels inside of each layer."""
    norm: NormKind | None = "batch"
    """In the extractor and before the scores; never inside f."""
    alpha: float = 0.8
    """Weight of f beside the skip connection, in (0, 1]."""
    learn_alpha: bool = False
    """Learn the alpha of each layer."""
    constrained: bool = True
    """Keep ||W||^2 L below mu."""
    solve: Solve = AUTO

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return models.opteq_segmenter(
            images("segmenter", dataset)[0], labels("segmenter", dataset), channels=self.channels, hidden=self.hidden,
            norm=self.norm, alpha=self.alpha, learn_alpha=self.learn_alpha, constrained=self.constrained,
            solver=self.solve.method(), stop=self.solve.stop(), gradient=self.solve.derivative(),
        )  # fmt: skip


@dataclass(frozen=True)
class Fcn:
    """Baseline of `segmenter`: plain convolutions in the place of the equilibrium."""

    channels: tuple[int, ...] = (64, 128, 256)
    """Of the strided convolutions, each of which halves the image."""
    hidden: tuple[int, ...] = (310, 620, 620)
    """Channels of the convolutions behind them."""
    norm: NormKind | None = "batch"
    """Behind every convolution."""
    parameters: int | None = None
    """Scale `hidden` so that the whole has at most so many."""

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return models.FCN(
            images("fcn", dataset)[0], labels("fcn", dataset), channels=self.channels, hidden=self.hidden, norm=self.norm,
            parameters=self.parameters,
        )  # fmt: skip


@dataclass(frozen=True)
class FeedForward:
    """Baseline of `deep`: the same extractor and head, and layers of a fixed depth that are each given x."""

    channels: int = 16
    """Channels of the extractor."""
    hidden: tuple[int, ...] = (16, 32)
    """Channels of each layer."""
    kernel_size: int = 3
    """Side of the kernels, odd."""
    stride: int = 1
    """Of the first convolution: 2 halves the image, which is enough for sides of 28 or more."""
    pool: int = 4
    """Means over pool x pool regions go into the linear map."""
    norm: NormKind | None = "batch"
    """Behind the first convolution and before the pooling."""
    activation: str = "relu"
    """Of the layers."""
    parameters: int | None = None
    """Scale `hidden` so that the whole has at most so many."""

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        return models.feed_forward(
            images("feed-forward", dataset)[0], labels("feed-forward", dataset), channels=self.channels, hidden=self.hidden,
            kernel_size=self.kernel_size, stride=self.stride, pool=self.pool, norm=self.norm, activation=self.activation,
            parameters=self.parameters,
        )  # fmt: skip


@dataclass(frozen=True)
class Ode:
    """Baseline: a neural ODE that begins at the image, and a linear map of its end."""

    filters: int = 32
    """Channels of the field; 125, or 64 with augment 10, are the 172k networks on CIFAR-10."""
    augment: int = 0
    """Channels of zeros that are added to the image: augmented neural ODE."""
    method: OdeMethod = "dopri5"
    """euler, midpoint and rk4 take `steps` equal steps; the others choose theirs."""
    rtol: float = 1e-3
    """Relative tolerance of the methods that choose their steps."""
    atol: float = 1e-3
    """Absolute tolerance of these."""
    steps: int = 10
    """Of euler, midpoint and rk4."""
    adjoint: bool = False
    """Differentiate by a second equation: flat memory, a gradient as exact as the tolerance."""

    def build(self, dataset: Dataset) -> nn.Module:
        """The network."""
        channels, size = images("ode", dataset)
        return models.neural_ode(
            channels, labels("ode", dataset), size=size, filters=self.filters, augment=self.augment, method=self.method,
            rtol=self.rtol, atol=self.atol, steps=self.steps, adjoint=self.adjoint,
        )  # fmt: skip
