"""Filter-wise normalised random directions in the space of a model's parameters."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from opteq.cells import ScaledReLU
from opteq.models import Readout

__all__ = ["directions"]

_NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def directions(model: nn.Module, count: int, seed: int) -> dict[str, tuple[Tensor, ...]]:
    """`count` directions d by the name of the parameter: Gaussian, each filter scaled so that |d_i| = |w_i|.

    Biases and the parameters of normalisation layers are left out: they do not move. A parametrised weight moves in the space of
    its original. The seed alone decides, whatever the device, and the first direction does not depend on `count`.
    Li et al., Visualizing the loss landscape of neural nets (2018), section 4.
    """
    draw = np.random.default_rng(seed)  # not torch's: a model drawn from the same seed would be its own direction
    weights = list(_weights(model))
    drawn = [[_direction(owner, weight, draw) for _, owner, weight in weights] for _ in range(count)]
    return {name: parts for (name, _, _), parts in zip(weights, zip(*drawn, strict=True), strict=True)}


def _direction(owner: nn.Module, weight: Tensor, draw: np.random.Generator) -> Tensor:
    """Gaussian numbers with the filter norms of the weight; 0 where the filter is."""
    d = torch.from_numpy(draw.standard_normal(weight.shape)).to(weight.device, weight.dtype)
    norms = _filter_norms(owner, d)
    return d * (_filter_norms(owner, weight) / norms.where(norms > 0, 1.0))


def _filter_norms(owner: nn.Module, weight: Tensor) -> Tensor:
    """The norm of the filter that each entry belongs to: all that feeds one unit of the output."""
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


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """The parameters that move: their name, the module that uses them, and their values."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner, rule = modules[path], None
        if isinstance(owner, parametrize.ParametrizationList):  # "<owner>.parametrizations.<leaf>.original<i>"
            rule, original = owner[0], leaf
            path, _, leaf = path.rpartition(".")
            owner = modules[path.rpartition(".")[0]]
            if isinstance(rule, parametrizations._WeightNorm) and original == "original0":  # the norms, not the filters
                continue
        if _moves(owner, leaf, parameter):
            yield name, owner, parameter.detach()


def _moves(owner: nn.Module, leaf: str, parameter: Tensor) -> bool:
    """Whether the parameter is a weight: no bias, no scale, no single number."""
    if isinstance(owner, Readout):
        return True
    matrix = parameter.ndim > 1 and parameter.is_floating_point()
    return matrix and "bias" not in leaf and leaf != "b" and not isinstance(owner, _NORMALISATION)
