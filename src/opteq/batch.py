"""Small operations on batches, one result for each sample: [batch, ...] in, batch first out."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from opteq.checks import is_transformed


def flat(z: Tensor) -> Tensor:
    """Each sample as one row: [batch, ...] -> [batch, n]."""
    return z if z.ndim == 2 else z.reshape(z.shape[0], math.prod(z.shape[1:]))


def channels_together(z: Tensor) -> bool:
    """Whether z are images [batch, channels, height, width] whose channels lie together in memory: torch.channels_last."""
    if z.ndim != 4:
        return False
    channels, height, width = z.shape[1:]
    return z.stride() == (channels * height * width, 1, width * channels, channels)


def own_precision(z: Tensor) -> AbstractContextManager[Any]:
    """Operations in the precision of their arguments, whatever autocast says, which knows no tensors without numbers in them."""
    return nullcontext() if z.is_meta else torch.autocast(z.device.type, enabled=False)


def quick_images(z: Tensor) -> Tensor:
    """Images with their channels together, on a CPU: convolutions are then up to a quarter faster, depthwise ones twice as fast."""
    if z.device.type != "cpu" or z.ndim != 4 or channels_together(z):
        return z
    return z.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def blank_images(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Zeros for images of the size of those in x, laid out as `quick_images` does."""
    batch, _, height, width = x.shape
    if x.device.type != "cpu":
        return torch.zeros(batch, channels, height, width, dtype=dtype, device=x.device)
    return torch.zeros(batch, height, width, channels, dtype=dtype, device=x.device).permute(0, 3, 1, 2)


def nothing(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the shape of a tensor, to be read only: rows of them take no memory."""
    return like.new_zeros((), dtype=dtype).expand_as(like) if like.ndim == 2 else torch.zeros_like(like, dtype=dtype)


def laid_out(z: Tensor, like: Tensor) -> Tensor:
    """z with its channels together in memory if those of another tensor of its shape are, else not."""
    if channels_together(like) == channels_together(z):
        return z
    return z.contiguous() if channels_together(z) else z.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def lined(z: Tensor, like: Tensor | None = None) -> Tensor:
    """Each sample as one row [batch, n], in the order in which its numbers, or those of another tensor, lie in memory."""
    return flat(z.permute(0, 2, 3, 1)) if channels_together(z if like is None else like) else flat(z)


def unlined(rows: Tensor, like: Tensor) -> Tensor:
    """Rows [batch, n] in the shape of another tensor: the inverse of `lined(., like)`."""
    if not channels_together(like):
        return rows.view_as(like)
    batch, channels, height, width = like.shape
    return rows.view(batch, height, width, channels).permute(0, 3, 1, 2)


def taken(z: Tensor, rows: Tensor) -> Tensor:
    """Some samples, in the order of memory in which they were."""
    if not channels_together(z):
        return z.index_select(0, rows)
    return z.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)


def norm(z: Tensor) -> Tensor:
    """The Euclidean norm of each sample, also where squares overflow or vanish: 1e30 and 1e-30 are fine in float32."""
    rows = lined(z)
    plain: Tensor = torch.linalg.vector_norm(rows, dim=1)
    if not plain.numel():
        return plain
    info = torch.finfo(z.dtype)
    least = math.sqrt(info.tiny) / info.eps
    low, high = bounds(plain)
    if (low > least and high < math.inf) or (high == 0 and is_zero(rows)):
        return plain
    unsafe = ~((plain > least) & (plain < math.inf))
    largest = rows.abs().amax(dim=1)  # many times as fast as the norm of that order
    again = (unsafe & (largest > 0) & largest.isfinite()).nonzero()[:, 0]
    unit = largest[again]
    return plain.index_copy(0, again, torch.linalg.vector_norm(rows[again] / unit[:, None], dim=1) * unit)


def bounds(values: Tensor) -> tuple[float, float]:
    """The least and the largest, both NaN if one is: as numbers, which compare in a tenth of the time that tensors take."""
    low, high = torch.aminmax(values)
    return low.item(), high.item()


def added(new: Tensor, u: Tensor) -> Tensor:
    """new + u, written over `new`, in which nobody else is interested, where no derivative is taken."""
    if torch.is_grad_enabled() or is_transformed(new) or is_transformed(u) or new.dtype != u.dtype or new.shape != u.shape:
        return new + u
    return new.add_(u)


def is_zero(z: Tensor) -> bool:
    """Whether all numbers are 0, five times as fast as `any`; NaN is not."""
    return not z.numel() or bounds(z) == (0, 0)


def begins_at_zero(z0: Tensor) -> bool:
    """Whether z0 = 0, where nobody differentiates or maps over it: then f(z0) needs no product with it."""
    return not torch.is_grad_enabled() and not is_transformed(z0) and is_zero(z0)


def sound_samples(x: Tensor) -> Tensor:
    """Which samples are finite throughout."""
    return lined(x.isfinite()).all(dim=1)


def per_sample_like(values: Tensor, z: Tensor) -> Tensor:
    """One number a sample, shaped to broadcast against the states z."""
    return values.reshape(-1, *[1] * (z.ndim - 1))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> for each sample."""
    return lined(a * b).sum(1)


def dots(rows: Tensor, v: Tensor) -> Tensor:
    """<rows_j, v> for each sample: [batch, j, n], [batch, n] -> [batch, j]."""
    return torch.bmm(v[:, None], rows.transpose(1, 2))[:, 0]  # eight times as fast as rows @ v on CPU


def at_least_single(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better, which factorisations need."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def combine(weights: Tensor, rows: Tensor) -> Tensor:
    """sum_j weights_j rows_j for each sample: [batch, j], [batch, j, n] -> [batch, n]."""
    return torch.bmm(weights[:, None], rows)[:, 0]


def compacted(tensor: Tensor, rows: Tensor, slots: int | None = None) -> Tensor:
    """Some rows (ascending) of a solver's own tensor, moved to its front in place: memory never holds more than a small part twice.

    Of the slots of a history [batch, slots, n], only the first ones are moved, if a number is given.
    """
    kept, filled = rows.numel(), tensor[:, :slots] if slots is not None else tensor
    chunk = max(1, -(-kept // max(8, filled.shape[1] if tensor.ndim == 3 else 1)))
    for a in range(0, kept, chunk):
        part = rows[a : a + chunk]
        filled[a : a + part.numel()] = filled[part]  # rows[i] >= i, so nothing is overwritten before it is read
    return tensor[:kept]
