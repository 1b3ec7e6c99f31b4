"""The loss around a model's parameters, and where its equilibria were solved."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, SupportsFloat, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from opteq.checks import check_finite, check_instance, check_integer, check_number, invalid
from opteq.diagnostics.basin import Basin, Flatness, find_basin, measure_flatness
from opteq.diagnostics.directions import Biases, directions
from opteq.diagnostics.finding import Columns, Finding
from opteq.diagnostics.grid_file import GridFile, Point, fingerprint
from opteq.diagnostics.keeping import kept
from opteq.diagnostics.losses import check_callable
from opteq.diagnostics.progress import Progress, reporting
from opteq.equilibrium import ConvergenceWarning, Equilibrium, observe
from opteq.solution import ConvergenceError, Solution, finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Landscape", "landscape"]

Loss: TypeAlias = Callable[[nn.Module], Tensor | float]


@dataclass(frozen=True, eq=False, repr=False)
class Landscape(Finding):
    """loss[i, j] = L(theta + axis[i] d_1 + axis[j] d_2), or loss[i] along one direction: float64 tensors on the CPU.

    `converged`: whether every Equilibrium or Readout that the loss called on was solved; elsewhere the loss is of something else.
    One of a fixed depth (`Unrolled`) has nothing to solve: its states must be finite.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import data_loss, landscape
        >>> model = torch.nn.Sequential(Equilibrium(OptEq(4, 8, 16)), torch.nn.Linear(8, 3))
        >>> found = landscape(model, data_loss(torch.randn(32, 4), torch.randint(3, (32,))), steps=5, span=0.5)
        >>> found.loss.shape, bool(found.converged.all()), found.axis.tolist()
        (torch.Size([5, 5]), True, [-0.5, -0.25, 0.0, 0.25, 0.5])
    """

    name: ClassVar[str] = "landscape"
    axis: Tensor
    loss: Tensor
    converged: Tensor
    seed: int
    span: float

    def figure(self, level: float | None = None) -> "Figure":
        """Contours of the loss, or its curve, with the points hatched where a solve failed; and the basin of a level."""
        from opteq.diagnostics.landscape_figure import draw_landscape

        return draw_landscape(self, None if level is None else self.basin(level))

    def basin(self, level: float) -> Basin:
        """The connected set around the model where loss <= level: its width or area, exact to second order in the grid."""
        return find_basin(self, level)

    def flatness(self, radius: float | None = None) -> Flatness:
        """Sharpness, mean increase and curvature around the model, within a radius (by default a quarter of the span)."""
        return measure_flatness(self, radius)

    def columns(self) -> Columns:
        """One row for each point: the coordinate along each direction, the loss, and whether it converged."""
        places = np.meshgrid(*[self.axis.numpy()] * self.loss.ndim, indexing="ij")
        point = dict(zip("xy", (place.ravel() for place in places), strict=False))
        return {**point, "loss": self.loss.numpy().ravel(), "converged": self.converged.numpy().ravel()}


def landscape(
    model: nn.Module,
    loss: Loss,
    *,
    steps: int = 51,
    span: float = 1.0,
    seed: int = 0,
    dims: int = 2,
    biases: Biases = "fixed",
    file: str | Path | None = None,
    progress: Progress = False,
) -> Landscape:
    """L(theta + a d_1 + b d_2) for a and b in [-span, span]: random directions, filter by filter as long as the weights.

    `loss(model)` is any function that gives one number, such as `data_loss(x, y)`. It runs without gradients, in the mode that the
    model is in, and every call meets the same buffers and the same random numbers. The model is left as it was, whatever happens.
    `steps`: points in each direction; odd ones include theta itself. `dims`: 1 for a line along d_1 alone.
    `biases`: "fixed", or "scaled" if they and the parameters of normalisation are to move as well.
    `file`: where finished points are kept. The next call with that file computes the other ones only, and gives the same grid.
    `progress`: True for a bar on a terminal, or a function of (done, total).
    A point where a solve fails is not `converged`; if `on_failure` is "raise", its loss is NaN.
    Li et al., Visualizing the loss landscape of neural nets (2018).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import data_loss, landscape
        >>> model = torch.nn.Sequential(Equilibrium(OptEq(4, 8, 16)), torch.nn.Linear(8, 3))
        >>> loss = data_loss(torch.randn(32, 4), torch.randint(3, (32,)))
        >>> found = landscape(model, loss, steps=5, dims=1)
        >>> torch.isclose(found.loss[2], loss(model).double()).item()  # the middle is the model
        True
    """
    _check(model, loss, steps, span, seed, dims, biases)
    axis = (torch.arange(steps, dtype=torch.float64) - (steps - 1) / 2) * (2 * span / (steps - 1))  # the middle is exactly 0
    plane = directions(model, dims, seed, biases)
    if not plane:
        raise ValueError(invalid("landscape", "model", "a model with weights: biases and normalisation stay", type(model).__name__))
    settings = {"steps": steps, "span": float(span), "seed": seed, "dims": dims, "biases": biases}
    store = None if file is None else GridFile(Path(file), fingerprint(model, plane, settings), steps**dims)
    with reporting("landscape", progress, steps**dims) as tell, kept(model, seed) as reset:
        evaluate = partial(_evaluate, model, loss, plane, reset)
        if store is not None:
            store.begin(evaluate((0.0,) * dims))
        found = {} if store is None else store.points
        tell(len(found))
        for i, point in enumerate(product(axis.tolist(), repeat=dims)):
            if i not in found:
                found[i] = evaluate(point)
                if store is not None:
                    store.append(i)
                tell(len(found))
    values, converged = zip(*(found[i] for i in range(steps**dims)), strict=True)
    shape = [steps] * dims
    return Landscape(axis, torch.tensor(values, dtype=torch.float64).view(shape), torch.tensor(converged).view(shape), seed, span)


def _check(model: nn.Module, loss: Loss, steps: int, span: float, seed: int, dims: int, biases: str) -> None:
    check_instance("landscape", "model", model, nn.Module, "an nn.Module")
    check_callable("landscape", loss)
    check_integer("landscape", "steps", steps, 2)
    check_number("landscape", "span", span, 0.0, open_low=True)
    check_integer("landscape", "seed", seed, 0)
    if dims not in (1, 2):
        raise ValueError(invalid("landscape", "dims", "1 or 2", dims))
    if biases not in get_args(Biases):
        raise ValueError(invalid("landscape", "biases", "'fixed' or 'scaled'", biases))
    check_finite(model, model.named_parameters())


def _evaluate(
    model: nn.Module,
    loss: Loss,
    plane: dict[str, tuple[Tensor, ...]],
    reset: Callable[[], None],
    point: tuple[float, ...],
) -> Point:
    """The loss at one point, and whether all that was solved for it converged."""
    reset()
    for name, parts in plane.items():
        weight = model.get_parameter(name).data
        for part, length in zip(parts, point, strict=True):
            weight.add_(part, alpha=length)
    failed = False

    def watch(layer: Equilibrium, solution: Solution, phase: str) -> None:
        nonlocal failed
        done = finite(solution.codes) if phase == "unrolled" else solution.converged  # a fixed depth has no tolerance to meet
        failed = failed or not bool(done.all())

    with torch.no_grad(), observe(watch), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            value = _number(loss(model))
        except ConvergenceError:
            return math.nan, False
    return (math.nan if math.isnan(value) else value), not failed  # one NaN of the many, as a file gives it back


def _number(value: Tensor | float) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, Tensor) or not isinstance(value, SupportsFloat):
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else value
        raise ValueError(invalid("landscape", "loss", "a function that returns one number", got))
    return float(value)
