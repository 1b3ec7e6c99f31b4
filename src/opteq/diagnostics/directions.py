"""Filter-wise normalised random directions in the space of a model's parameters."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.weight_norm import WeightNorm

from opteq.cells import ScaledReLU
from opteq.models import Readout

__all__ = ["Biases", "directions"]

Biases: TypeAlias = Literal["fixed", "scaled"]

_NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def directions(model: nn.Module, count: int, seed: int, biases: Biases = "fixed") -> dict[str, tuple[Tensor, ...]]:
    """`count` directions d by the name of the parameter: Gaussian, each filter scaled so that |d_i| = |w_i|.

    A filter is all that feeds one unit: a row of W in W' sigma(W z + U x + b). A parametrised weight moves in the space of its
    original. `biases`: those, the parameters of normalisation layers and single numbers (a learnt alpha) stay "fixed" and are left
    out; or they move, "scaled", each entry a filter of its own, d_i = +-w_i.
    The seed alone decides, whatever the device, and the first direction does not depend on `count`.
    A factor on a layer that the next layer divides by, or that a normalisation undoes, makes no difference to the landscape.
    Li et al., Visualizing the loss landscape of neural nets (2018), section 4.
    """
    draw = np.random.default_rng(seed)  # not torch's: a model drawn from the same seed would be its own direction
    weights = [part for part in _weights(model) if biases == "scaled" or part.is_weight]
    drawn = [[_direction(part, draw) for part in weights] for _ in range(count)]
    return {part.name: parts for part, parts in zip(weights, zip(*drawn, strict=True), strict=True)}


class _Weight(NamedTuple):
    name: str
    owner: nn.Module  # that uses it
    values: Tensor
    is_weight: bool


def _direction(part: _Weight, draw: np.random.Generator) -> Tensor:
    """Gaussian numbers with the filter norms of the weight; 0 where the filter is."""
    d = torch.from_numpy(np.asarray(draw.standard_normal(part.values.shape))).to(part.values)
    norms = _filter_norms(part, d)
    return d * (_filter_norms(part, part.values) / norms.where(norms > 0, 1.0))


def _filter_norms(part: _Weight, weight: Tensor) -> Tensor:
    """The norm of the filter that each entry belongs to: all that feeds one unit of the output."""
    owner = part.owner
    if not part.is_weight:
        return weight.abs()
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):  # [in, out / groups, ...], each group of inputs with its own outputs
        grouped = weight.unflatten(0, (owner.groups, -1))
        return _norms(grouped, keep=(0, 2)).expand_as(grouped).flatten(0, 1)
    if isinstance(owner, Readout):  # a of y = a'z is one filter
        return _norms(weight, keep=())
    return _norms(weight, keep=(1,) if isinstance(owner, ScaledReLU) else (0,))  # there rows are samples: x W, z A


def _norms(weight: Tensor, keep: tuple[int, ...]) -> Tensor:
    """The norms over all dimensions but `keep`, which broadcast against the weight."""
    over = [i for i in range(weight.ndim) if i not in keep]
    norms: Tensor = torch.linalg.vector_norm(weight, dim=over, keepdim=True)
    return norms


def _weights(model: nn.Module) -> Iterator[_Weight]:
    """The parameters, integers left out."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = modules[path]
        scale = any(isinstance(hook, WeightNorm) and leaf == f"{hook.name}_g" for hook in owner._forward_pre_hooks.values())
        if isinstance(owner, parametrize.ParametrizationList):  # "<owner>.parametrizations.<leaf>.original<i>"
            scale = isinstance(owner[0], parametrizations._WeightNorm) and leaf == "original0"  # the norms, not the filters
            path, _, leaf = path.rpartition(".")
            owner = modules[path.rpartition(".")[0]]
        if parameter.is_floating_point():
            yield _Weight(name, owner, parameter.detach(), not scale and _is_weight(owner, leaf, parameter))


def _is_weight(owner: nn.Module, leaf: str, parameter: Tensor) -> bool:
    """Whether the parameter is a weight: no bias, no scale, no single number."""
    if isinstance(owner, Readout):
        return True
    return parameter.ndim > 1 and "bias" not in leaf and leaf != "b" and not isinstance(owner, _NORMALISATION)
