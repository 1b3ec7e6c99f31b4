"""Does f use tensors that are none of its fields? Found by evaluating it on constants.

Whatever it gives then that has derivatives, it has from a tensor that it captures: ordinary autograd says so of its output, and a
watch on its operations finds those of torch.func, which only an operation shows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from opteq.checks import is_transformed
from opteq.maps import Map, check_tensor

HAND_OVER = (
    "(a) Pass it through x, (b) give FunctionCell an nn.Module that owns it instead of a function that captures it, "
    "(c) write a Cell whose Map has it as a field."
)

SECOND_ORDER = "f captures a tensor; its derivatives are exact up to the second order only. " + HAND_OVER

NOT_MAPPED = "f captures a tensor that has derivatives, so torch.func.vmap cannot map over f or its gradient. " + HAND_OVER


def is_closed(fn: Map, z0: Tensor) -> bool:
    """Whether every tensor with derivatives that f uses is an operand: declared, or found by evaluating f on constants."""
    if fn.closed or z0.shape[0] == 0:
        return True

    def constant(tensor: Tensor, batched: bool) -> Tensor:
        if is_transformed(tensor):  # its values are not ours to see: others of the same kind
            random = torch.rand(tensor.shape, generator=torch.Generator(tensor.device).manual_seed(0), device=tensor.device)
            tensor = random.to(tensor.dtype)
        else:
            tensor = primal(tensor).detach()
        return tensor[:1] if batched and fn.independent else tensor

    with temporarily_clear_interpreter_stack(), torch.enable_grad(), torch.autocast(z0.device.type, enabled=False):
        plain = fn.replace_leaves(lambda leaf: constant(leaf.tensor, leaf.per_sample))
        try:
            with _Spy():
                out = plain(constant(z0, True))
                check_tensor(out)
        except _TransformedError as found:
            if found.order > 2:
                raise RuntimeError(SECOND_ORDER) from None
            if found.mapped:
                raise RuntimeError("f captures a tensor that torch.func.vmap maps over, and cannot see. " + HAND_OVER) from None
            return False
    captured = out.requires_grad and torch.is_grad_enabled()
    return not captured and forward_ad.unpack_dual(out).tangent is None


class _TransformedError(Exception):
    """A function used a tensor that belongs to a torch.func transform."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.mapped = is_mapped(tensor)
        self.order = sum(torch._C._functorch.is_gradtrackingtensor(level) for level in _levels(tensor))


class _Spy(TorchFunctionMode):
    """Raises _TransformedError when a tensor of a torch.func transform is used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor))
        transformed = [item for item in tensors if is_transformed(item)]
        try:
            out = func(*args, **(kwargs or {}))
        except RuntimeError:
            if transformed:
                raise _TransformedError(transformed[0]) from None
            raise
        if transformed and isinstance(out, Tensor):  # more than a look at a shape or a flag
            raise _TransformedError(transformed[0])
        return out


def _levels(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as each torch.func transform sees it, the innermost first, and last the plain one."""
    yield tensor
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor


def underlying(tensor: Tensor) -> Tensor:
    """The plain tensor below every torch.func transform: for looking at values."""
    *_, plain = _levels(tensor)
    return plain


def is_mapped(tensor: Tensor) -> bool:
    """Whether torch.func.vmap, at any level, maps over the tensor."""
    return any(torch._C._functorch.is_batchedtensor(level) for level in _levels(tensor))


def primal(tensor: Tensor) -> Tensor:
    """The tensor without its tangent of forward mode."""
    plain: Tensor = forward_ad.unpack_dual(tensor).primal
    return plain
