"""Any f(z, x) as a cell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opteq.checks import check_integer, invalid
from opteq.equilibrium import Cell
from opteq.solve import Map, per_sample


@dataclass(frozen=True)
class FunctionMap(Map):
    """z -> f(z, x) for a plain function; it may capture anything, so its samples stay together."""

    independent: ClassVar[bool] = False
    f: Callable[[Tensor, Tensor], Tensor]
    x: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return self.f(z, self.x)


@dataclass(frozen=True)
class ModuleMap(Map):
    """z -> f(z, x) for a module; its parameters and buffers are operands."""

    f: nn.Module
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    x: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(self.f, {**self.parameters, **self.buffers}, (z, self.x))
        return out


class FunctionCell(Cell):
    """z = f(z, x) for any f that maps [batch, *state_shape] and x to [batch, *state_shape].

    A function may capture tensors; they get exact gradients, but torch.func.vmap and forward mode cannot see them. An nn.Module
    becomes a submodule and has no such limits; it must treat each sample alone.
    """

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor], state_shape: Sequence[int]) -> None:
        super().__init__()
        if not callable(f):
            raise TypeError(invalid(self, "f", "a function f(z, x) or an nn.Module", f))
        if isinstance(state_shape, (str, int)) or not isinstance(state_shape, Sequence):
            raise TypeError(invalid(self, "state_shape", "a sequence of integers, the shape of one sample's z", state_shape))
        for size in state_shape:
            check_integer(self, "state_shape", size, 1)
        self.f = f
        self.state_shape = tuple(state_shape)

    def bind(self, x: Tensor) -> Map:
        if not isinstance(self.f, nn.Module):
            return FunctionMap(self.f, x)
        parameters: dict[str, Any] = dict(self.f.named_parameters())
        return ModuleMap(self.f, parameters, dict(self.f.named_buffers()), x)
