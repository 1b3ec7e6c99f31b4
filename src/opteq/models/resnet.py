"""Residual networks, whole or their first stages, which extract what equilibria are given."""

from torch import Tensor, nn
from torch.nn.functional import relu

from opteq.cells.multiscale import convolution
from opteq.checks import check_instance, check_integer, invalid
from opteq.models.classifier import Classifier
from opteq.models.parts import Checked, Pooled, check_widths


def normed(channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """A convolution and its batch norm."""
    return nn.Sequential(convolution(channels, out_channels, kernel_size, stride), nn.BatchNorm2d(out_channels))


class Block(nn.Module):
    """relu(shortcut(x) + F(x)), F two convolutions of 3 x 3 or, with `inner` channels, the bottleneck 1 x 1, 3 x 3, 1 x 1.

    The shortcut is the identity where the shapes allow it, else a convolution of 1 x 1.
    """

    def __init__(self, channels: int, out_channels: int, stride: int, inner: int | None) -> None:
        super().__init__()
        if inner is None:
            layers = [normed(channels, out_channels, 3, stride), normed(out_channels, out_channels, 3)]
        else:
            layers = [normed(channels, inner, 1), normed(inner, inner, 3, stride), normed(inner, out_channels, 1)]
        self.layers = nn.ModuleList(layers)
        same = stride == 1 and channels == out_channels
        self.shortcut = nn.Identity() if same else normed(channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        *first, last = self.layers
        y = x
        for layer in first:
            y = relu(layer(y))
        return relu(last(y) + self.shortcut(x))


class ResNet(Checked):
    """The feature map of a residual network: a convolution of 7 x 7 and pooling, then stages of blocks at halved resolutions.

    `blocks`: how many blocks each stage has; `stages` keeps only the first ones. Stage i has 64 2^i channels, four times as many
    with `bottleneck`, where `width` multiplies those of the 3 x 3 convolutions. `out_channels` and `reduction` tell the shape of
    the result: an image of side n becomes one of n / reduction, rounded up.
    He et al. (2016), strides in the 3 x 3 convolutions; Zagoruyko and Komodakis (2016), wide.

    Examples:
        >>> import torch
        >>> from opteq.models import ResNet
        >>> extractor = ResNet((2, 2), bottleneck=False)
        >>> extractor(torch.randn(2, 3, 32, 32)).shape, extractor.reduction
        (torch.Size([2, 128, 4, 4]), 8)
    """

    def __init__(
        self, blocks: tuple[int, ...], *, bottleneck: bool, width: int = 1, stages: int | None = None, in_channels: int = 3
    ) -> None:
        depths = check_widths("ResNet", "blocks", blocks)
        check_instance("ResNet", "bottleneck", bottleneck, bool, "a bool")
        for name, value in (("width", width), ("in_channels", in_channels)):
            check_integer("ResNet", name, value, 1)
        if width > 1 and not bottleneck:
            raise ValueError(invalid("ResNet", "width", "1 without bottlenecks", width))
        kept = len(depths) if stages is None else stages
        check_integer("ResNet", "stages", kept, 1)
        if kept > len(depths):
            raise ValueError(invalid("ResNet", "stages", f"at most {len(depths)}", kept))
        channels, parts = 64, []
        for i, depth in enumerate(depths[:kept]):
            base = 64 * 2**i
            out, inner = (4 * base, width * base) if bottleneck else (base, None)
            strides = [1 if i == 0 else 2] + [1] * (depth - 1)
            parts.append(
                nn.Sequential(*(Block(channels if j == 0 else out, out, stride, inner) for j, stride in enumerate(strides)))
            )
            channels = out
        reduction = 4 * 2 ** (kept - 1)
        super().__init__(in_channels, reduction, normed(in_channels, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *parts)
        self.out_channels, self.reduction = channels, reduction
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Convolutions by He's rule for the outputs; the gains of the norms are 1, their shifts 0."""
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(part, nn.BatchNorm2d):
                part.reset_parameters()


def _whole(extractor: ResNet, classes: int) -> Classifier:
    return Classifier(extractor, nn.Identity(), Pooled(extractor.out_channels, classes))


def resnet18(classes: int = 1000, *, in_channels: int = 3) -> Classifier:
    """ResNet-18: 11,689,512 parameters with 1000 classes.

    Examples:
        >>> from opteq.models import count_parameters, resnet18
        >>> count_parameters(resnet18())["total"]
        11689512
    """
    return _whole(ResNet((2, 2, 2, 2), bottleneck=False, in_channels=in_channels), classes)


def resnet34(classes: int = 1000, *, in_channels: int = 3) -> Classifier:
    """ResNet-34: 21,797,672 parameters with 1000 classes.

    Examples:
        >>> import torch
        >>> from opteq.models import count_parameters, resnet34
        >>> with torch.device("meta"):  # shapes only
        ...     model = resnet34(classes=10)
        >>> count_parameters(model)["total"]
        21289802
    """
    return _whole(ResNet((3, 4, 6, 3), bottleneck=False, in_channels=in_channels), classes)


def resnet50(classes: int = 1000, *, in_channels: int = 3) -> Classifier:
    """ResNet-50: 25,557,032 parameters with 1000 classes.

    Examples:
        >>> import torch
        >>> from opteq.models import count_parameters, resnet50
        >>> with torch.device("meta"):  # shapes only
        ...     model = resnet50()
        >>> count_parameters(model)["total"]
        25557032
    """
    return _whole(ResNet((3, 4, 6, 3), bottleneck=True, in_channels=in_channels), classes)


def resnet101(classes: int = 1000, *, in_channels: int = 3) -> Classifier:
    """ResNet-101: 44,549,160 parameters with 1000 classes.

    Examples:
        >>> import torch
        >>> from opteq.models import count_parameters, resnet101
        >>> with torch.device("meta"):  # shapes only
        ...     model = resnet101()
        >>> count_parameters(model)["total"]
        44549160
    """
    return _whole(ResNet((3, 4, 23, 3), bottleneck=True, in_channels=in_channels), classes)


def wide_resnet50(classes: int = 1000, *, in_channels: int = 3) -> Classifier:
    """Wide-ResNet-50-2, with 3 x 3 convolutions twice as wide: 68,883,240 parameters with 1000 classes.

    Examples:
        >>> import torch
        >>> from opteq.models import count_parameters, wide_resnet50
        >>> with torch.device("meta"):  # shapes only
        ...     model = wide_resnet50()
        >>> count_parameters(model)["total"]
        68883240
    """
    return _whole(ResNet((3, 4, 6, 3), bottleneck=True, width=2, in_channels=in_channels), classes)
