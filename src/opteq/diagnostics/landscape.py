"""The loss around a model's parameters, and where its equilibria were solved."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from opteq.checks import check_finite, check_instance, check_integer, check_number, invalid
from opteq.diagnostics.directions import directions
from opteq.diagnostics.finding import Columns, Finding
from opteq.equilibrium import ConvergenceWarning, Equilibrium, observe
from opteq.solve import ConvergenceError, Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Landscape", "landscape"]

Loss: TypeAlias = Callable[[nn.Module], Tensor | float]


@dataclass(frozen=True, eq=False)
class Landscape(Finding):
    """loss[i, j] = L(theta + axis[i] d_1 + axis[j] d_2), or loss[i] along one direction: float64 tensors on the CPU.

    `converged`: whether every equilibrium solved for that loss was reached; elsewhere the loss is of something else.
    """

    name: ClassVar[str] = "landscape"
    axis: Tensor
    loss: Tensor
    converged: Tensor
    seed: int
    span: float

    def figure(self) -> "Figure":
        """Contours of the loss, or its curve, with the points hatched where a solve failed."""
        from opteq.diagnostics.contours import draw_landscape

        return draw_landscape(self)

    def columns(self) -> Columns:
        """One row for each point: the coordinate along each direction, the loss, and whether it converged."""
        places = np.meshgrid(*[self.axis.numpy()] * self.loss.ndim, indexing="ij")
        point = dict(zip("xy", (place.ravel() for place in places), strict=False))
        return {**point, "loss": self.loss.numpy().ravel(), "converged": self.converged.numpy().ravel()}


def landscape(model: nn.Module, loss: Loss, *, steps: int = 51, span: float = 1.0, seed: int = 0, dims: int = 2) -> Landscape:
    """L(theta + a d_1 + b d_2) for a and b in [-span, span]: random directions, filter by filter as long as the weights.

    `loss(model)` is any function that gives one number. It runs without gradients, in the mode that the model is in, and every
    call meets the same buffers and the same random numbers. The model is left as it was, whatever happens.
    `steps`: points in each direction; odd ones include theta itself. `dims`: 1 for a line along d_1 alone.
    A point where a solve fails is not `converged`; if `on_failure` is "raise", its loss is NaN.
    Li et al., Visualizing the loss landscape of neural nets (2018).
    """
    _check(model, steps, span, seed, dims)
    axis = (torch.arange(steps, dtype=torch.float64) - (steps - 1) / 2) * (2 * span / (steps - 1))  # the middle is exactly 0
    plane = directions(model, dims, seed)
    if not plane:
        raise ValueError(invalid("landscape", "model", "a model with weights: biases and normalisation stay", type(model).__name__))
    with _kept(model, seed) as reset:
        points = [_evaluate(model, loss, plane, point, reset) for point in product(axis.tolist(), repeat=dims)]
    shape = [steps] * dims
    values, converged = zip(*points, strict=True)
    return Landscape(axis, torch.tensor(values, dtype=torch.float64).view(shape), torch.tensor(converged).view(shape), seed, span)


def _check(model: nn.Module, steps: int, span: float, seed: int, dims: int) -> None:
    check_instance("landscape", "model", model, nn.Module, "an nn.Module")
    check_integer("landscape", "steps", steps, 2)
    check_number("landscape", "span", span, 0.0, open_low=True)
    check_integer("landscape", "seed", seed, 0)
    if dims not in (1, 2):
        raise ValueError(invalid("landscape", "dims", "1 or 2", dims))
    check_finite(model, model.named_parameters())


@contextmanager
def _kept(model: nn.Module, seed: int) -> Iterator[Callable[[], None]]:
    """Gives a function that puts parameters, buffers and modes back as they are now, and random numbers to the seed.

    At the end it is called in any case, and the random numbers outside go on as if nothing had been drawn.
    Values are written through `.data`, which leaves the version counters alone: a graph built before can still be differentiated.
    """
    modes = [(part, part.training) for part in model.modules()]
    buffers = [(part, name, buffer) for part in model.modules() for name, buffer in part._buffers.items()]
    values = [(tensor, tensor.detach().clone()) for tensor in [*model.parameters(), *model.buffers()]]

    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    generators = [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]

    def reset() -> None:
        for generator in generators:
            generator.manual_seed(seed)
        for part, training in modes:
            part.training = training
        for part, name, buffer in buffers:
            part._buffers[name] = buffer  # a forward pass may have put another tensor in its place
        for tensor, value in values:
            tensor.data.copy_(value)

    with torch.random.fork_rng(devices):
        try:
            yield reset
        finally:
            reset()


def _evaluate(
    model: nn.Module,
    loss: Loss,
    plane: dict[str, tuple[Tensor, ...]],
    point: tuple[float, ...],
    reset: Callable[[], None],
) -> tuple[float, bool]:
    """The loss at one point, and whether all that was solved for it converged."""
    reset()
    for name, parts in plane.items():
        weight = model.get_parameter(name).data
        for part, length in zip(parts, point, strict=True):
            weight.add_(part, alpha=length)
    failed = False

    def watch(layer: Equilibrium, solution: Solution, phase: str) -> None:
        nonlocal failed
        failed = failed or not bool(solution.converged.all())

    with torch.no_grad(), observe(watch), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            value = _number(loss(model))
        except ConvergenceError:
            return math.nan, False
    return value, not failed


def _number(value: Tensor | float) -> float:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(invalid("landscape", "loss", "a function that returns one number", f"shape {list(value.shape)}"))
    return float(value.detach())
