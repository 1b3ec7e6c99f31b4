"""Where a NaN or an infinity came from."""

import copy
import math

import torch
from torch import Tensor, nn

from opteq.checks import all_finite
from opteq.equilibrium import Equilibrium
from opteq.training.watch import Trouble

_REMEDY = "(a) lower lr, (b) clip the gradient, (c) keep the weights well-posed (constrained=True)."


def nan_loss(model: nn.Module, x: Tensor, value: float) -> Trouble:
    """Where a loss that is not finite came from: the first parameter, or else the first module, that is not finite."""
    found = _origin(model, x)
    layer, cause = ("", "the loss itself, whose inputs are finite") if found is None else (found.layer, found.message)
    return Trouble("nan_loss", layer, value, f"the loss is {value:g}; it began in {cause}. {_REMEDY}")


def nan_state(model: nn.Module, x: Tensor, name: str, samples: float) -> Trouble:
    """Where the NaN or infinity that an equilibrium met came from: a module before it, or its own iteration."""
    found = _origin(model, x)
    layer, cause = (name, "its own iteration") if found is None else (found.layer, found.message)
    message = f"{samples:.0f} samples met NaN or infinity in layer '{name}'; it began in {cause}. {_REMEDY}"
    return Trouble("nan_state", layer, samples, message)


def _origin(model: nn.Module, x: Tensor) -> Trouble | None:
    """Where the first NaN or infinity of a forward pass is: in the batch, a parameter, or the output of a module."""
    if not all_finite(x):
        return Trouble("nan_input", "", math.nan, "the batch itself: look at the data")
    if (found := nan_parameter(model)) is not None:
        return found
    try:
        return _first_output(copy.deepcopy(model), x)
    except (ValueError, RuntimeError) as error:  # of copying, or of the pass
        return Trouble("nan_output", "", math.nan, f"a place that could not be found ({error})")


def nan_parameter(model: nn.Module) -> Trouble | None:
    """The first parameter with NaN or infinity."""
    for name, parameter in model.named_parameters():
        if not all_finite(parameter):
            share = 1 - float(parameter.detach().isfinite().float().mean())
            return Trouble("nan_parameter", name, share, f"parameter '{name}', {share:.0%} of which is not finite")
    return None


def nan_gradient(model: nn.Module) -> Trouble:
    """The last parameter, that is, the first one in the order of backward, whose gradient is not finite."""
    name = next((n for n, p in reversed(list(model.named_parameters())) if p.grad is not None and not all_finite(p.grad)), "")
    where = f"in the gradient of '{name}'" if name else "in the norm of the gradient, which overflows"
    return Trouble("nan_gradient", name, math.nan, f"NaN or infinity {where}: (a) lower lr, (b) clip the gradient.")


@torch.no_grad()
def _first_output(model: nn.Module, x: Tensor) -> Trouble | None:
    """The first module, in the order of evaluation, with a finite input and an output that is not. The model is used up."""
    found: list[Trouble] = []

    def look(name: str, part: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if found or not isinstance(output, Tensor) or all_finite(output):
            return
        if all(all_finite(i) for i in inputs if isinstance(i, Tensor)):
            share = 1 - float(output.isfinite().float().mean())
            kind = type(part).__name__
            found.append(Trouble("nan_output", name, share, f"layer '{name}' ({kind}), {share:.0%} of its output is not finite"))

    for name, part in model.named_modules():
        if isinstance(part, Equilibrium):
            part.on_failure = "ignore"
        part.register_forward_hook(lambda part, inputs, output, name=name: look(name, part, inputs, output))
    model(x)
    return found[0] if found else None
