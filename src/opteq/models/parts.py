"""What stands before and behind an equilibrium: normalisation of the data, extractors of a few convolutions, heads."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from opteq.batch import quick_images
from opteq.cells.multiscale import group_norm
from opteq.checks import check_finite, check_floating, check_instance, check_integer, invalid

NormKind: TypeAlias = Literal["batch", "group"]

_CHUNK = 2**20  # numbers that are summed at a time: float64 copies of 8 MiB


def check_images(owner: object, x: Tensor, channels: int, least: int) -> None:
    """Raise unless x is [batch, channels, height, width] of floats, neither side below `least`."""
    check_floating(owner, "x", x)
    if x.ndim != 4 or x.shape[1] != channels:
        raise ValueError(invalid(owner, "x", f"of shape [batch, {channels}, height, width]", list(x.shape)))
    if min(x.shape[2:]) < least:
        expected = f"images of at least {least} x {least}, which its strides and pooling need"
        raise ValueError(invalid(owner, "x", expected, f"{x.shape[2]} x {x.shape[3]}"))


def check_widths(owner: object, name: str, widths: object) -> tuple[int, ...]:
    """The widths as a tuple; raise unless they are one integer or more."""
    check_instance(owner, name, widths, (tuple, list), "a tuple of integers")
    assert isinstance(widths, (tuple, list))
    if not widths:
        raise ValueError(invalid(owner, name, "not empty", widths))
    for width in widths:
        check_integer(owner, name, width, 1)
    return tuple(widths)


def check_kernel(owner: object, kernel_size: int) -> None:
    """Raise unless the side of the kernels is an odd integer."""
    check_integer(owner, "kernel_size", kernel_size, 1)
    if kernel_size % 2 == 0:
        raise ValueError(invalid(owner, "kernel_size", "odd", kernel_size))


def make_norm(owner: object, kind: NormKind | None, channels: int) -> nn.Module:
    """Batch norm, group norm of up to 8 groups, or nothing."""
    if kind is None:
        return nn.Identity()
    if kind not in get_args(NormKind):
        raise ValueError(invalid(owner, "norm", "'batch', 'group' or None", kind))
    return nn.BatchNorm2d(channels) if kind == "batch" else group_norm(channels, 8)


class Standardize(nn.Module):
    """x -> (x - mean) / std, channel by channel: a layer, so that a saved model knows the scale of its data.

    Examples:
        >>> import torch
        >>> from opteq.models import Standardize
        >>> x = torch.rand(64, 3, 4, 4)
        >>> z = Standardize.of(x)(x)
        >>> bool(z.mean().abs() < 1e-4), bool((z.std() - 1).abs() < 0.01)
        (True, True)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor | Sequence[float], std: Tensor | Sequence[float]) -> None:
        super().__init__()
        for name, given in (("mean", mean), ("std", std)):
            values = torch.as_tensor(given, dtype=None if isinstance(given, Tensor) else torch.float32).detach().clone()
            check_floating(self, name, values)
            if values.ndim != 1:
                raise ValueError(invalid(self, name, "one number a channel", list(values.shape)))
            self.register_buffer(name, values)
        check_finite(self, self.named_buffers())
        if len(self.mean) != len(self.std) or not bool((self.std > 0).all()):
            raise ValueError(invalid(self, "std", f"{len(self.mean)} positive numbers", self.std.tolist()))

    @classmethod
    def of(cls, x: Tensor) -> "Standardize":
        """By the mean and the deviation of each channel of x [n, channels, ...]; a constant channel is only shifted."""
        check_floating("Standardize.of", "x", x)
        if x.ndim < 2 or x.numel() == 0:
            raise ValueError(invalid("Standardize.of", "x", "of shape [n, channels, ...] and not empty", list(x.shape)))
        chunks = x.detach().split(max(1, _CHUNK // x[0].numel()))
        mean = _means(chunk.double() for chunk in chunks)
        shift = mean.reshape(-1, *([1] * (x.ndim - 2)))
        std = _means((chunk.double() - shift).square() for chunk in chunks).sqrt()
        others = [0, *range(2, x.ndim)]
        constant = std <= 1e-6 * torch.maximum(x.detach().amax(others), -x.detach().amin(others)).double()
        return cls(mean.to(x.dtype), torch.where(constant, torch.ones_like(std), std).to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.mean):
            raise ValueError(invalid(self, "x", f"of shape [batch, {len(self.mean)}, ...]", list(x.shape)))
        shape = (-1, *([1] * (x.ndim - 2)))
        return (x - self.mean.to(x.dtype).reshape(shape)) / self.std.to(x.dtype).reshape(shape)

    def extra_repr(self) -> str:
        return f"channels={len(self.mean)}"


def _means(chunks: Iterable[Tensor]) -> Tensor:
    """The mean of each channel over all chunks [n, channels, ...], one of which is held at a time."""
    total, count = torch.zeros(()), 0
    for chunk in chunks:
        total = chunk.sum([0, *range(2, chunk.ndim)]) + total.to(chunk)
        count += chunk.numel() // chunk.shape[1]
    return total / count


class Checked(nn.Sequential):
    """Layers one after the other, which say in words when images do not fit."""

    def __init__(self, in_channels: int, least: int, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.in_channels, self.least = in_channels, least

    def forward(self, x: Tensor) -> Any:
        check_images(self, x, self.in_channels, self.least)
        return nn.Sequential.forward(self, quick_images(x))  # type: ignore[no-untyped-call]

    def __getitem__(self, index: Any) -> Any:
        """One layer, or a slice of them as a plain nn.Sequential."""
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)


class Stem(Checked):
    """g(x) = W0 * x + b0: a single convolution, the extractor of Tables 3 to 5 of the OptEq paper; a norm may follow.

    An image of side n becomes one of side n // stride with the default kernel, of side stride + 2.

    Examples:
        >>> import torch
        >>> from opteq.models import Stem
        >>> Stem(3, 16, stride=2, norm="batch")(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 16, 16, 16])
    """

    def __init__(
        self, in_channels: int, channels: int, *, kernel_size: int | None = None, stride: int = 1, norm: NormKind | None = None
    ) -> None:
        for name, value in (("in_channels", in_channels), ("channels", channels), ("stride", stride)):
            check_integer("Stem", name, value, 1)
        size = stride + 2 if kernel_size is None else kernel_size
        check_integer("Stem", "kernel_size", size, stride)
        padding = (size - stride + 1) // 2
        conv = nn.Conv2d(in_channels, channels, size, stride, padding, bias=norm is None)
        super().__init__(in_channels, stride, conv, make_norm("Stem", norm, channels))


class Strided(Checked):
    """relu(norm(W_i * .)) with strides of 2: an image of side n becomes one of about n / 2^k after k = len(channels) of them.

    Examples:
        >>> import torch
        >>> from opteq.models import Strided
        >>> Strided(3, (16, 32, 64))(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 64, 4, 4])
    """

    def __init__(self, in_channels: int, channels: tuple[int, ...], *, norm: NormKind | None = "batch") -> None:
        check_integer("Strided", "in_channels", in_channels, 1)
        widths = check_widths("Strided", "channels", channels)
        layers: list[nn.Module] = []
        for before, after in zip((in_channels, *widths), widths, strict=False):
            conv = nn.Conv2d(before, after, 3, 2, 1, bias=norm is None)
            layers += [conv, make_norm("Strided", norm, after), nn.ReLU()]
        super().__init__(in_channels, 2 ** len(widths), *layers)


class Pooled(Checked):
    """z [batch, channels, height, width] -> logits: a norm, the mean over each of pool x pool regions, a linear map.

    `pool=1` is global average pooling. Where the image is `pool` wide and high, every pixel is used as it is.

    Examples:
        >>> import torch
        >>> from opteq.models import Pooled
        >>> Pooled(16, 10, pool=2)(torch.randn(2, 16, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, channels: int, classes: int, *, pool: int = 1, norm: NormKind | None = None) -> None:
        for name, value in (("channels", channels), ("classes", classes), ("pool", pool)):
            check_integer("Pooled", name, value, 1)
        linear = nn.Linear(channels * pool**2, classes)
        super().__init__(channels, pool, make_norm("Pooled", norm, channels), nn.AdaptiveAvgPool2d(pool), nn.Flatten(), linear)


class Scores(Checked):
    """z [batch, channels, height, width] -> [batch, classes, height, width]: a norm and a linear map at each pixel.

    Examples:
        >>> import torch
        >>> from opteq.models import Scores
        >>> Scores(16, 5)(torch.randn(2, 16, 8, 8)).shape
        torch.Size([2, 5, 8, 8])
    """

    def __init__(self, channels: int, classes: int, *, norm: NormKind | None = None) -> None:
        for name, value in (("channels", channels), ("classes", classes)):
            check_integer("Scores", name, value, 1)
        super().__init__(channels, 1, make_norm("Scores", norm, channels), nn.Conv2d(channels, classes, 1))
