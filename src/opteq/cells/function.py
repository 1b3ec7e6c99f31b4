"""Any f(z, x) as a cell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from opteq.checks import check_integer, invalid
from opteq.equilibrium import Cell
from opteq.maps import Map
from opteq.tree import per_sample


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
        tensors = {**self.parameters, **self.buffers}
        out: Tensor = torch.func.functional_call(self.f, tensors, (z, self.x), tie_weights=False)
        return out


@dataclass(frozen=True)
class NetworkMap(ModuleMap):
    """z -> f(z, x) for a cell whose `forward` is f, and uses nothing but its parameters and buffers."""

    closed: ClassVar[bool] = True

    @classmethod
    def of(cls, cell: Cell, x: Tensor) -> "NetworkMap":
        """The map of the cell for these inputs, in the promoted dtype."""
        return cls(_twin(cell, {}), _own(cell, "parameters"), _own(cell, "buffers"), x.to(cell.promoted(x)))


class FunctionCell(Cell):
    """z = f(z, x) for any f that maps [batch, *state_shape] and x to [batch, *state_shape].

    A function may capture tensors; they get exact gradients, but torch.func.vmap and forward mode cannot see them. An nn.Module
    becomes a submodule and has no such limits; it must treat each sample alone, and not write to its buffers.

    Whether a function captures tensors is found by evaluating it at the start z0: it must not use them on other branches only.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import FunctionCell
        >>> W = torch.eye(3, requires_grad=True)
        >>> layer = Equilibrium(FunctionCell(lambda z, x: torch.tanh(0.5 * z @ W + x), (3,)))
        >>> layer(torch.randn(5, 3)).sum().backward()
        >>> W.grad.shape
        torch.Size([3, 3])
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
        return ModuleMap(_twin(self.f, {}), _own(self.f, "parameters"), _own(self.f, "buffers"), x)


def _twin(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """A module of our own with the same tensors and modes, into which operands are put: the user's is never touched.

    So threads do not disturb one another, and train() or eval() between forward and backward changes nothing.
    """
    if id(module) not in made:
        twin = made[id(module)] = object.__new__(type(module))
        children = {name: None if child is None else _twin(child, made) for name, child in module._modules.items()}
        tensors = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
        twin.__dict__.update({**module.__dict__, **tensors, "_modules": children})
    return made[id(module)]


def _own(module: nn.Module, kind: Literal["parameters", "buffers"]) -> dict[str, Tensor]:
    """Every parameter or buffer by name; each attribute of each module once, also where modules are shared."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        tensors = part._parameters if kind == "parameters" else part._buffers
        found |= {f"{path}.{name}" if path else name: tensor for name, tensor in tensors.items() if tensor is not None}
    return found
