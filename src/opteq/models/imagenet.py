"""The networks for ImageNet: OptEq-Small, OptEq-Middle and MDEQ-small."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from opteq.cells import DeepOptEq, Multiscale
from opteq.cells.deep import Evaluation, Mode
from opteq.cells.multiscale import MultiscaleInit
from opteq.cells.tiers import Tiers
from opteq.checks import invalid
from opteq.equilibrium import Equilibrium, OnFailure
from opteq.gradients import Gradient, Unrolled
from opteq.models.classifier import Classifier
from opteq.models.parts import Checked, Pooled, Strided, check_widths
from opteq.models.resnet import Block, ResNet, normed
from opteq.models.separable import QuickDepthwiseOptEq, TwofoldOptEq
from opteq.regularizers import Regularizer
from opteq.solution import Stop
from opteq.solver import Solver

PUBLISHED = Unrolled(5)  # how the paper trains these networks


class TableHead(Checked):
    """[1 x 1 convolution, relu, max pooling by 2] twice, 512 -> 1024 -> 2048 channels, global average pooling, a linear map.

    Optimization induced equilibrium networks, Table 6.
    """

    def __init__(self, classes: int, channels: Sequence[int] = (512, 1024, 2048)) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 1), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(channels[0], 2 ** (len(channels) - 1), *layers, Pooled(channels[-1], classes))


def opteq_small(
    classes: int = 1000,
    *,
    in_channels: int = 3,
    stages: int = 2,
    alpha: float = 0.8,
    learn_alpha: bool = False,
    regularizer: Regularizer | None = None,
    mode: Mode = "gradient",
    gamma: float = 0.1,
    evaluation: Evaluation = "batch",
    solver: Solver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = PUBLISHED,
    on_failure: OnFailure = "warn",
) -> Classifier:
    """OptEq-Small: the first stages of ResNet-50, five layers of separable convolutions with 512 channels, `TableHead`.

    8.8M parameters where the paper prints 18M = 8M + 7M + 3M: the extractor that it describes, 28 x 28 x 512 of 224 x 224, has
    1.4M. `stages=3` takes one of 8.5M, 14 x 14 x 1024 of 224 x 224, and the whole has 17.2M. The paper trains with Unrolled(5) and
    `regularizer=Decorrelation()`. Images of at least 32 x 32, with three stages 64 x 64.
    Optimization induced equilibrium networks, Section 7.3.2 and Table 6.

    Examples:
        >>> import torch
        >>> from opteq.models import count_parameters, opteq_small
        >>> model = opteq_small(classes=10)
        >>> model(torch.randn(2, 3, 32, 32)).shape, count_parameters(model)["extractor"]
        (torch.Size([2, 10]), 1444928)
    """
    extractor = ResNet((3, 4, 6, 3), bottleneck=True, stages=stages, in_channels=in_channels)
    layers = [QuickDepthwiseOptEq(extractor.out_channels, 512, 512, alpha=alpha) for _ in range(5)]
    cell = DeepOptEq(layers, regularizer=regularizer, mode=mode, learn_alpha=learn_alpha, gamma=gamma, evaluation=evaluation)
    return Classifier(extractor, Equilibrium(cell, solver, stop, gradient, on_failure), TableHead(classes))


def opteq_mid(
    classes: int = 1000,
    *,
    in_channels: int = 3,
    stages: int = 2,
    alpha: float = 0.8,
    learn_alpha: bool = False,
    regularizer: Regularizer | None = None,
    mode: Mode = "gradient",
    gamma: float = 0.1,
    evaluation: Evaluation = "batch",
    solver: Solver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = PUBLISHED,
    on_failure: OnFailure = "warn",
) -> Classifier:
    """OptEq-Middle: the first stages of Wide-ResNet-50-2, three layers of two separable convolutions each, `TableHead`.

    13.7M parameters where the paper prints 40M = 24M + 13M + 3M; `stages=3` has 36.1M, of which the extractor has 24.9M. The rest
    is as in `opteq_small`.
    Optimization induced equilibrium networks, Section 7.3.2 and Table 6.

    Examples:
        >>> from opteq.models import count_parameters, opteq_mid
        >>> count_parameters(opteq_mid())["total"]
        13701416
    """
    extractor = ResNet((3, 4, 6, 3), bottleneck=True, width=2, stages=stages, in_channels=in_channels)
    layers = [TwofoldOptEq(extractor.out_channels, 512, 512, alpha=alpha) for _ in range(3)]
    cell = DeepOptEq(layers, regularizer=regularizer, mode=mode, learn_alpha=learn_alpha, gamma=gamma, evaluation=evaluation)
    return Classifier(extractor, Equilibrium(cell, solver, stop, gradient, on_failure), TableHead(classes))


class TieredHead(nn.Module):
    """y_0 = B_0(z_0), y_t = B_t(z_t) + relu(norm(D_t * y_{t-1})): the tiers of z from the finest to the coarsest, then logits.

    B_t are bottleneck blocks to four times inner[t] channels, D_t convolutions of stride 2. Bai, Koltun and Kolter (2020).
    """

    def __init__(self, channels: tuple[int, ...], inner: tuple[int, ...], final: int, classes: int) -> None:
        super().__init__()
        self.tiers = Tiers(channels, type(self).__name__)
        wide = [4 * count for count in inner]
        self.blocks = nn.ModuleList(Block(*sizes) for sizes in zip(channels, wide, [1] * len(wide), inner, strict=True))
        self.steps = nn.ModuleList(normed(before, after, 3, 2) for before, after in pairwise(wide))
        self.last = normed(wide[-1], final, 1)
        self.pooled = Pooled(final, classes)

    def forward(self, z: Tensor) -> Tensor:
        first, *others = self.tiers.unpack(z)
        y = self.blocks[0](first)
        for block, step, tier in zip(list(self.blocks)[1:], self.steps, others, strict=True):
            y = block(tier) + relu(step(y))
        out: Tensor = self.pooled(relu(self.last(y)))
        return out


def mdeq_small(
    classes: int = 1000,
    *,
    in_channels: int = 3,
    channels: tuple[int, ...] = (32, 64, 128, 256),
    expand: int = 4,
    head: tuple[int, ...] = (28, 56, 112, 224),
    final: int = 2048,
    init: MultiscaleInit = "damped",
    solver: Solver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = None,
    on_failure: OnFailure = "warn",
) -> Classifier:
    """MDEQ-small: two strided convolutions, four resolutions at equilibrium together, a head that joins them: 17.0M parameters.

    Height and width must be multiples of 4 2^(T-1), for T resolutions: 32 as it is. The norms of f are group norms; batch norms
    are in the extractor and the head. Bai, Koltun and Kolter (2020), with the sizes of their code.

    Examples:
        >>> import torch
        >>> from opteq.models import mdeq_small
        >>> model = mdeq_small(10, channels=(8, 16), expand=1, head=(4, 8), final=32)
        >>> model(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """
    check_widths("mdeq_small", "channels", channels)
    if len(check_widths("mdeq_small", "head", head)) != len(channels):
        raise ValueError(invalid("mdeq_small", "head", f"{len(channels)} numbers, one a resolution", head))
    extractor = Strided(in_channels, (channels[0], channels[0]))
    cell = Multiscale(channels, expand=expand, init=init)
    middle = Equilibrium(cell, solver, stop, gradient, on_failure)
    return Classifier(extractor, middle, TieredHead(cell.channels, head, final, classes))
