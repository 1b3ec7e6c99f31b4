"""Several resolutions of an image in one tensor at the coarsest resolution."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opteq.checks import check_instance, check_integer, invalid


@dataclass(frozen=True)
class Tiers:
    """z_0, ..., z_{T-1} as one z: each 2^(T-1-t) x 2^(T-1-t) block of tier t becomes channels, and the tiers are stacked.

    Tier 0 is the finest; tier t has channels[t] channels and is 2^(T-1-t) times as high and wide as the coarsest. The entries are
    only rearranged: norms and inner products of z are those of the tiers together.
    """

    channels: tuple[int, ...]
    owner: str = field(default="Tiers", compare=False, repr=False)  # whom errors name

    def __post_init__(self) -> None:
        check_instance(self.owner, "channels", self.channels, (tuple, list), "a tuple of integers, the channels of each resolution")
        if len(self.channels) == 0:
            raise ValueError(invalid(self.owner, "channels", "of at least one resolution", self.channels))
        for count in self.channels:
            check_integer(self.owner, "channels", count, 1)
        object.__setattr__(self, "channels", tuple(self.channels))

    @property
    def scales(self) -> tuple[int, ...]:
        """How many times as high and wide as the coarsest each tier is: 2^(T-1), ..., 2, 1."""
        return tuple(2**t for t in reversed(range(len(self.channels))))

    @property
    def packed_channels(self) -> int:
        """The channels of z: the sum of channels[t] 4^(T-1-t)."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        return [count * scale**2 for count, scale in zip(self.channels, self.scales, strict=True)]

    def shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """The shape of one sample of z, where the finest tier has this height and width."""
        coarse = self.scales[0]
        if len(size) != 2 or any(side < 1 or side % coarse for side in size):
            expected = f"two positive multiples of {coarse}, which {len(self.channels)} resolutions need"
            raise ValueError(invalid(self.owner, "size", expected, tuple(size)))
        return self.packed_channels, size[0] // coarse, size[1] // coarse

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """The packed z of the tiers, each of shape [batch, channels[t], height, width]."""
        self._check_parts(parts)
        return torch.cat([_unshuffle(part, scale) for part, scale in zip(parts, self.scales, strict=True)], dim=1)

    def unpack(self, z: Tensor) -> tuple[Tensor, ...]:
        """The tiers of z, of shape [batch, packed_channels, height, width]."""
        if z.ndim != 4 or z.shape[1] != self.packed_channels:
            raise ValueError(invalid(self.owner, "z", f"of shape [batch, {self.packed_channels}, height, width]", list(z.shape)))
        parts = torch.split(z, self._widths, dim=1)
        return tuple(_shuffle(part, scale) for part, scale in zip(parts, self.scales, strict=True))

    def _check_parts(self, parts: Sequence[Tensor]) -> None:
        if len(parts) != len(self.channels):
            raise ValueError(invalid(self.owner, "parts", f"of {len(self.channels)} tensors, one a resolution", f"{len(parts)}"))
        if any(part.ndim != 4 for part in parts):
            shapes = [list(part.shape) for part in parts]
            raise ValueError(invalid(self.owner, "parts", "of shapes [batch, channels, height, width]", shapes))
        batch, _, height, width = parts[-1].shape
        expected = [[batch, c, s * height, s * width] for c, s in zip(self.channels, self.scales, strict=True)]
        got = [list(part.shape) for part in parts]
        if got != expected:
            raise ValueError(invalid(self.owner, "parts", f"of shapes {expected}, from the finest to the coarsest", got))


def _unshuffle(part: Tensor, scale: int) -> Tensor:
    """torch.nn.functional.pixel_unshuffle, which keeps the shape of an empty batch."""
    batch, channels, height, width = part.shape
    blocks = part.reshape(batch, channels, height // scale, scale, width // scale, scale)
    return blocks.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * scale**2, height // scale, width // scale)


def _shuffle(part: Tensor, scale: int) -> Tensor:
    """The inverse of `_unshuffle`."""
    batch, channels, height, width = part.shape
    blocks = part.reshape(batch, channels // scale**2, scale, scale, height, width)
    return blocks.permute(0, 1, 4, 2, 5, 3).reshape(batch, channels // scale**2, scale * height, scale * width)
