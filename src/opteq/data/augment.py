"""Augmentation as tensor operations on a whole batch."""

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from opteq.checks import check_instance, check_integer, invalid

__all__ = ["Augment"]


@dataclass(frozen=True)
class Augment:
    """Each image shifted by up to `crop` pixels in both directions, zeros moving in, then mirrored with probability 1/2 if `flip`.

    The shift is the usual random crop of the image padded by `crop` zeros. What happens to a batch is drawn apart from doing it:
    draw for the whole global batch from one generator, and let each process apply its own rows.

    Examples:
        >>> import torch
        >>> from opteq.data import Augment
        >>> augment, x = Augment(crop=2, flip=True), torch.rand(8, 3, 16, 16)
        >>> draws = augment.draw(8, torch.Generator().manual_seed(0))
        >>> augment.apply(x, draws).shape
        torch.Size([8, 3, 16, 16])
    """

    crop: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        check_integer(self, "crop", self.crop, 0)
        check_instance(self, "flip", self.flip, bool, "a bool")

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """int64 [n, 3]: dy, dx and flip of n samples, on the generator's device."""
        shift = torch.randint(-self.crop, self.crop + 1, (n, 2), generator=generator, device=generator.device)
        mirror = torch.randint(0, 1 + self.flip, (n, 1), generator=generator, device=generator.device)
        return torch.cat([shift, mirror], 1)

    @overload
    def apply(self, x: Tensor, draws: Tensor) -> Tensor: ...

    @overload
    def apply(self, x: Tensor, draws: Tensor, y: Tensor, void: int | None = None) -> tuple[Tensor, Tensor]: ...

    def apply(self, x: Tensor, draws: Tensor, y: Tensor | None = None, void: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The batch [n, channels, height, width] moved by its draws: out[i, j] = x[i + dy, j + dx], then mirrored in j.

        With labels y, both: label maps [n, height, width] move with their images, and `void` moves in; labels [n] stay.
        """
        if x.ndim != 4:
            raise ValueError(invalid(self, "x", "of shape [n, channels, height, width]", list(x.shape)))
        if tuple(draws.shape) != (len(x), 3):
            raise ValueError(invalid(self, "draws", f"of shape [{len(x)}, 3]", list(draws.shape)))
        source, outside = _sources(draws.to(x.device), x.shape[2], x.shape[3])
        moved = _moved(x, source, outside, 0)
        if y is None:
            return moved
        if y.ndim == 1:
            return moved, y
        if y.shape != (len(x), *x.shape[2:]):
            raise ValueError(invalid(self, "y", f"of shape [{len(x)}] or {[len(x), *x.shape[2:]]}", list(y.shape)))
        if void is None and self.crop:
            raise ValueError(invalid(self, "void", "the label of pixels that move in, for label maps", void))
        return moved, _moved(y[:, None], source, outside, void or 0)[:, 0]


def _sources(draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """[n, height * width]: the pixel that each pixel of the result comes from, and whether that is outside of the image."""
    dy, dx, mirror = draws[:, :, None].unbind(1)  # [n, 1] each
    j = torch.arange(width, device=draws.device)
    rows = torch.arange(height, device=draws.device) + dy
    columns = torch.where(mirror.bool(), width - 1 - j, j) + dx
    outside = ((rows < 0) | (rows >= height))[:, :, None] | ((columns < 0) | (columns >= width))[:, None]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    return source.flatten(1), outside.flatten(1)


def _moved(x: Tensor, source: Tensor, outside: Tensor, fill: int) -> Tensor:
    pixels = x.flatten(2).gather(2, source[:, None].expand(-1, x.shape[1], -1))
    return pixels.masked_fill_(outside[:, None], fill).reshape(x.shape)
