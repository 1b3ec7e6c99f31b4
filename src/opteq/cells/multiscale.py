"""Several resolutions of an image that exchange what they know, at equilibrium together."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from opteq.cells.function import NetworkMap
from opteq.cells.norms import GroupNorm
from opteq.cells.tiers import Tiers
from opteq.checks import check_choice, check_integer, invalid
from opteq.equilibrium import Cell

MultiscaleInit = Literal["damped", "mdeq"]
GAIN = 0.1  # Picard's iteration converged on every new net tried; with 0.2 not on those of three blocks, with 1 on none


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """Group norm with the most groups, up to `groups`, that divide the channels and, of several channels, hold two or more."""
    most = max(1, min(groups, channels // 2))
    return GroupNorm(next(count for count in range(most, 0, -1) if channels % count == 0), channels)


def convolution(channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution with zeros around the image; the norm that follows has the bias."""
    return nn.Conv2d(channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)


class Block(nn.Module):
    """norm(relu(z + norm(x + W2 * relu(norm(W1 * z))))), without x where there is none."""

    def __init__(self, channels: int, inner: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(channels, inner), group_norm(inner, groups)
        self.conv2, self.norm2 = convolution(inner, channels), group_norm(channels, groups)
        self.norm3 = group_norm(channels, groups)

    def forward(self, z: Tensor, x: Tensor | None) -> Tensor:
        inner = self.conv2(relu(self.norm1(self.conv1(z))))
        out: Tensor = self.norm3(relu(z + self.norm2(inner if x is None else x + inner)))
        return out


class Branch(nn.Module):
    """The blocks of one resolution, one after the other; the first is given x."""

    def __init__(self, channels: int, blocks: int, expand: int, groups: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(channels, expand * channels, groups) for _ in range(blocks))

    def forward(self, z: Tensor, x: Tensor | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            z = block(z, x if i == 0 else None)
        return z


def downward(channels: Sequence[int], groups: int) -> nn.Sequential:
    """From the first of these resolutions to the last: convolutions of stride 2, each with its norm, relu between them."""
    first, *between, last = channels
    steps: list[nn.Module] = []
    for _ in between:
        steps += [convolution(first, first, stride=2), group_norm(first, groups), nn.ReLU()]
    return nn.Sequential(*steps, convolution(first, last, stride=2), group_norm(last, groups))


class Repeat(nn.Module):
    """Nearest upsampling, each pixel a square of `times` x `times`: nn.Upsample, in half the time on CPU."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        squares = x[:, :, :, None, :, None].expand(-1, -1, -1, self.times, -1, self.times)
        return squares.reshape(batch, channels, self.times * height, self.times * width)

    def extra_repr(self) -> str:
        return f"times={self.times}"


def upward(channels: Sequence[int], groups: int) -> nn.Sequential:
    """From the last of these resolutions to the first: a 1 x 1 convolution, its norm, then every pixel repeated."""
    return nn.Sequential(
        convolution(channels[-1], channels[0], 1), group_norm(channels[0], groups), Repeat(2 ** (len(channels) - 1))
    )


def path(channels: Sequence[int], source: int, target: int, groups: int) -> nn.Module:
    """From one resolution to another."""
    if source == target:
        return nn.Identity()
    if source < target:
        return downward(channels[source : target + 1], groups)
    return upward(channels[target : source + 1], groups)


class Fusion(nn.Module):
    """norm(W * relu(sum_j path_j(z_j))): what one resolution takes from all of them, its own as it is."""

    def __init__(self, channels: Sequence[int], target: int, groups: int) -> None:
        super().__init__()
        self.paths = nn.ModuleList(path(channels, source, target, groups) for source in range(len(channels)))
        self.conv, self.norm = convolution(channels[target], channels[target], 1), group_norm(channels[target], groups)

    def forward(self, tiers: Sequence[Tensor]) -> Tensor:
        first, *others = (path(tier) for path, tier in zip(self.paths, tiers, strict=True))
        out: Tensor = self.norm(self.conv(relu(sum(others, start=first))))
        return out


class Multiscale(Cell):
    """z = fusion(blocks(z, x)): residual blocks at each resolution, then each takes from all others, by strides or by repetition.

    Tier 0 of z, the finest, has the size of x [batch, channels[0], height, width], which enters there; each next tier is half as
    high and wide, so that height and width must be multiples of 2^(T-1). `unpack(z)` gives the tiers, `pack` joins them.
    `blocks` are the residual blocks of each resolution, `expand` times as wide inside; `groups` the most that a group norm has.

    Weights begin as N(0, 0.01^2). `init` "mdeq" has all gains at 1, as in the paper: the norms then cancel the scale of all weights
    but those next to x, and the iterates do not settle. "damped" begins with the gains at 0.1, except on the way from x, in the
    blocks of tier 0 and the paths that leave it: near its equilibrium the iteration then contracts, by 0.2 to 0.4 a step in the
    nets of one block that were tried; training is free to change that. (32, 64) has 118,720 parameters.
    Bai, Koltun and Kolter (2020), "Multiscale deep equilibrium models", Section 3.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import Multiscale
        >>> cell = Multiscale((8, 16))
        >>> [tuple(tier.shape) for tier in cell.unpack(Equilibrium(cell)(torch.randn(2, 8, 4, 4)))]
        [(2, 8, 4, 4), (2, 16, 2, 2)]
    """

    def __init__(
        self, channels: tuple[int, ...], *, blocks: int = 1, expand: int = 1, groups: int = 8, init: MultiscaleInit = "damped"
    ) -> None:
        super().__init__()
        self.tiers = Tiers(channels, type(self).__name__)
        for name, value in (("blocks", blocks), ("expand", expand), ("groups", groups)):
            check_integer(self, name, value, 1)
        check_choice(self, "init", init, get_args(MultiscaleInit))
        self.channels = self.tiers.channels
        self.blocks, self.expand, self.groups, self.init = blocks, expand, groups, init
        self.branches = nn.ModuleList(Branch(count, blocks, expand, groups) for count in self.channels)
        self.fusions = nn.ModuleList(Fusion(self.channels, target, groups) for target in range(len(self.channels)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights, and set the gains as `init` says; the shifts of the norms are 0."""
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.normal_(part.weight, std=0.01)
        _set_gains(self.modules(), GAIN if self.init == "damped" else 1.0)
        for fed_by_x in (self.branches[0], *(part.paths[0] for part in self.modules() if isinstance(part, Fusion))):
            _set_gains(fed_by_x.modules(), 1.0)

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """One state from its tiers, the finest first."""
        return self.tiers.pack(parts)

    def unpack(self, z: Tensor) -> tuple[Tensor, ...]:
        """The tiers of a state, the finest first."""
        return self.tiers.unpack(z)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x)."""
        parts = self.unpack(z)
        own = [branch(part, x if i == 0 else None) for i, (branch, part) in enumerate(zip(self.branches, parts, strict=True))]
        return self.pack([fusion(own) for fusion in self.fusions])

    def initial(self, x: Tensor) -> Tensor:
        shape = self._shape(x)
        return torch.zeros(x.shape[0], *shape, dtype=self.promoted(x), device=x.device)

    def bind(self, x: Tensor) -> NetworkMap:
        self._shape(x)
        return NetworkMap.of(self, x)

    def _shape(self, x: Tensor) -> tuple[int, int, int]:
        """The shape of one sample's z."""
        coarse = self.tiers.scales[0]
        if x.ndim != 4 or x.shape[1] != self.channels[0] or 0 in x.shape[2:] or x.shape[2] % coarse or x.shape[3] % coarse:
            expected = f"of shape [batch, {self.channels[0]}, height, width], height and width multiples of {coarse}"
            raise ValueError(invalid(self, "x", expected, list(x.shape)))
        shape = self.tiers.shape((x.shape[2], x.shape[3]))
        if min(self.channels) * shape[1] * shape[2] < 2:
            expected = "larger: at the coarsest resolution, a norm would see one number only"
            raise ValueError(invalid(self, "x", expected, list(x.shape)))
        return shape

    def extra_repr(self) -> str:
        return f"channels={self.channels}, blocks={self.blocks}, expand={self.expand}, groups={self.groups}, init={self.init!r}"


def _set_gains(parts: Iterable[nn.Module], gain: float) -> None:
    for part in parts:
        if isinstance(part, nn.GroupNorm):
            nn.init.constant_(part.weight, gain)
            nn.init.zeros_(part.bias)
