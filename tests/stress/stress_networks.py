"""f of the cells with group norms, Residual and Multiscale, in float64 with a bound of its rounding, as in stress_reference.

A group norm y = (v - mean) / s, s^2 = var + 1e-5, passes on, to first order, dy = (dv - mean(dv) - y mean(y dv)) / s; the bound
takes absolute values throughout, twice, and adds (n + 8) eps for the sums over the n numbers of a group.
"""

import torch
from stress_reference import Rounded, Step, reference
from torch import Tensor, nn
from torch.nn.functional import conv2d

from opteq.cells import Multiscale, Residual
from opteq.cells.multiscale import Block, Fusion, Repeat


def convolved(z: Rounded, weight: Tensor, stride: int = 1, padding: int = 0) -> Rounded:
    kernel, info, terms = weight.double(), torch.finfo(z.dtype), weight[0].numel()

    def along(images: Tensor) -> Tensor:
        return conv2d(images, kernel.abs(), stride=stride, padding=padding)

    error = along(z.error) + (terms + 2) * info.eps * along(z.value.abs()) + terms * info.tiny
    return Rounded(conv2d(z.value, kernel, stride=stride, padding=padding), error, z.dtype)


def normed(z: Rounded, norm: nn.GroupNorm) -> Rounded:
    v, dv = (t.reshape(len(t), norm.num_groups, -1) for t in (z.value, z.error))
    eps = torch.finfo(z.dtype).eps * (v.shape[2] + 8)
    dv = dv + eps * v.abs()  # of the sums
    s = (v.var(2, correction=0, keepdim=True) + norm.eps).sqrt()
    y = (v - v.mean(2, keepdim=True)) / s
    dy = 2 * (dv + dv.mean(2, keepdim=True) + y.abs() * (y.abs() * dv).mean(2, keepdim=True)) / s + eps * y.abs()
    gain, shift = (p.double()[:, None, None] for p in (norm.weight, norm.bias))
    scaled = Rounded(y.view_as(z.value) * gain + shift, dy.view_as(z.value) * gain.abs(), z.dtype)
    return scaled._with(scaled.value, scaled.error, 4)


def relu(z: Rounded) -> Rounded:
    return Rounded(torch.relu(z.value), z.error, z.dtype)


def applied(module: nn.Module, z: Rounded) -> Rounded:
    """The layers that the paths of a Multiscale are made of."""
    if isinstance(module, nn.Sequential):
        for part in module:
            z = applied(part, z)
        return z
    if isinstance(module, nn.Conv2d):
        return convolved(z, module.weight, module.stride[0], module.padding[0])
    if isinstance(module, nn.GroupNorm):
        return normed(z, module)
    if isinstance(module, Repeat):
        value, error = (t.repeat_interleave(module.times, 2).repeat_interleave(module.times, 3) for t in (z.value, z.error))
        return Rounded(value, error, z.dtype)
    return relu(z) if isinstance(module, nn.ReLU) else z


def blocked(block: Block, z: Rounded, x: Rounded | None) -> Rounded:
    inner = applied(block.conv2, relu(normed(applied(block.conv1, z), block.norm1)))
    return normed(relu(z + normed(inner if x is None else x + inner, block.norm2)), block.norm3)


def fused(fusion: Fusion, tiers: list[Rounded]) -> Rounded:
    first, *others = (applied(path, tier) for path, tier in zip(fusion.paths, tiers, strict=True))
    for other in others:
        first = first + other
    return normed(applied(fusion.conv, relu(first)), fusion.norm)


@reference.register
def _(cell: Residual, x: Tensor, dtype: torch.dtype) -> Step:
    given, padding = Rounded.exact(x, dtype), cell.kernel_size // 2

    def f(flat: Rounded) -> Rounded:
        z = Rounded(flat.value.reshape(x.shape), flat.error.reshape(x.shape), dtype)
        inner = normed(relu(convolved(z, cell.W1, 1, padding)), cell.norm1)
        out = normed(relu(z + normed(given + convolved(inner, cell.W2, 1, padding), cell.norm2)), cell.norm3)
        return Rounded(out.value.flatten(1), out.error.flatten(1), dtype)

    return f


@reference.register
def _(cell: Multiscale, x: Tensor, dtype: torch.dtype) -> Step:
    given, shape = Rounded.exact(x, dtype), cell.initial(x).shape

    def f(flat: Rounded) -> Rounded:
        values, errors = (cell.unpack(t.reshape(shape)) for t in (flat.value, flat.error))
        tiers = [Rounded(*pair, dtype) for pair in zip(values, errors, strict=True)]
        own = []
        for t, (branch, tier) in enumerate(zip(cell.branches, tiers, strict=True)):
            for i, block in enumerate(branch.blocks):
                tier = blocked(block, tier, given if t == i == 0 else None)
            own.append(tier)
        out = [fused(fusion, own) for fusion in cell.fusions]
        return Rounded(cell.pack([o.value for o in out]).flatten(1), cell.pack([o.error for o in out]).flatten(1), dtype)

    return f
