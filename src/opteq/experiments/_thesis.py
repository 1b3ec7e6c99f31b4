"""What figures 4.3 to 4.5 of the thesis share: trainings by Adam, and the loss surface around a network that was trained."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opteq.data import Dataset
from opteq.diagnostics import Landscape, data_loss, landscape
from opteq.diagnostics.landscape_figure import LEVELS
from opteq.experiments import _training
from opteq.experiments._harness import Options, grid
from opteq.grids import Outcome
from opteq.recipes import Recipe, load_model, sample
from opteq.training import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["adam", "draw_surface", "halfway", "line_widths", "matrix", "plane", "surface", "surfaces"]

Array = npt.NDArray[Any]


def adam(epochs: int, seed: int, keep: int = 1) -> TrainConfig:
    """The thesis's training: Adam from 1e-3 on, a cosine down to 0, batches of 100; and no end where solves do not converge."""
    return TrainConfig(
        epochs=epochs, batch_size=100, optimizer="adam", lr=1e-3, schedule="cosine", seed=seed, least_converged=0.0, keep=keep
    )  # fmt: skip


# --- one cell -------------------------------------------------------------------------------------------------------------------


def surface(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a recipe; then the loss on a plane through its weights, and on lines along further directions.

    Both go on where they were interrupted. Where a solve failed, the loss is that of the last iterate; `converged` is the share of
    the points of the plane without such a sample.
    """
    scores, place = _training.train(settings), Path(settings["folder"])
    if "diverged" in scores:
        raise RuntimeError(scores["diverged"])
    model, dataset = load_model(place)
    loss = data_loss(*samples(dataset, settings["split"], settings["samples"]))
    seed, steps, span = settings["seed"], settings["steps"], settings["span"]
    found = landscape(model, loss, steps=steps, span=span, seed=seed, file=place / "plane.grid")
    lines = [landscape(model, loss, steps=steps, span=span, seed=seed + i, dims=1) for i in range(1, settings["lines"] + 1)]
    return {
        "axis": found.axis.tolist(),
        "loss": rounded(found.loss),
        "lines": [rounded(line.loss) for line in lines],
        "converged": float(found.converged.double().mean()),
        "guessing": math.log(len(dataset.classes)),  # the loss where each class has the same probability
        **{name: scores["curves"][name] for name in ("train_loss", "valid_accuracy")},
    }


def samples(dataset: Dataset, split: str, count: int) -> tuple[Tensor, Tensor]:
    """So many samples of the training or the test set, always the same."""
    if split == "train":
        return sample(dataset, count)
    rows = torch.randperm(len(dataset.test), generator=torch.Generator().manual_seed(0))[:count]
    return dataset.test.x[rows], dataset.test.y[rows]


def rounded(loss: Tensor) -> list[Any]:
    """The losses to 4 digits: a plane is long."""
    values: list[Any] = np.vectorize(lambda value: float(f"{value:.4g}"), otypes=[float])(loss.numpy()).tolist()
    return values


# --- the grid -------------------------------------------------------------------------------------------------------------------


def surfaces(name: str, recipes: Mapping[str, Recipe], looking: dict[str, Any], options: Options) -> dict[str, Outcome]:
    """`surface` of each recipe; `looking` has its steps, span, samples, split and lines."""
    cells = _training.cells(name, recipes, options)
    return grid(name, surface, {cell: {**one, "seed": options.seed, **looking} for cell, one in cells.items()}, options)


# --- measures -------------------------------------------------------------------------------------------------------------------


def matrix(values: Sequence[Any]) -> Array:
    """Lists of losses as an array; NaN for null."""
    return np.array(values, dtype=float)  # None becomes NaN


def plane(found: Mapping[str, Any]) -> Landscape:
    """A surface as a Landscape, in which every point counts: the thesis takes the last iterate of a solve that fails, too."""
    return _landscape(found["axis"], found["loss"])


def _landscape(axis: Sequence[float], loss: Sequence[Any]) -> Landscape:
    values = torch.from_numpy(matrix(loss))
    return Landscape(torch.tensor(axis, dtype=torch.float64), values, torch.ones_like(values, dtype=torch.bool), 0, max(axis))


def halfway(found: Mapping[str, Any]) -> float:
    """The middle between the loss at the minimiser and that of guessing."""
    loss = matrix(found["loss"])
    return (float(loss[len(loss) // 2, len(loss) // 2]) + float(found["guessing"])) / 2


def line_widths(found: Mapping[str, Any], level: float) -> list[float]:
    """How wide {loss <= level} is around the minimiser along each direction there is: both of the plane, and the lines."""
    loss = matrix(found["loss"])
    middle = len(loss) // 2
    lines = [loss[:, middle], loss[middle], *map(matrix, found["lines"])]
    return [_landscape(found["axis"], line).basin(level).size for line in lines]


# --- drawing --------------------------------------------------------------------------------------------------------------------


def draw_surface(axes: "Axes", found: Mapping[str, Any], title: str, limits: tuple[float, float], level: float) -> Any:
    """Contours between the limits, the same colours in every panel that has them, a cross at the minimiser, and its basin."""
    from matplotlib.collections import LineCollection

    landscape, axis = plane(found), found["axis"]
    loss = np.ma.masked_invalid(matrix(found["loss"])).clip(*limits)
    levels = np.geomspace(*limits, LEVELS)
    filled = axes.contourf(axis, axis, loss.T, levels=levels, norm="log", cmap="viridis")
    axes.contour(filled, levels=levels[::3], colors="white", linewidths=0.4)
    axes.add_collection(LineCollection(list(landscape.basin(level).outline), colors="#D55E00", linewidths=1.4, zorder=4))
    axes.plot(0, 0, marker="+", color="white", markersize=6, zorder=5)
    axes.set(aspect="equal", xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]))
    axes.set_title(title, fontsize=8)
    axes.locator_params(nbins=5)
    return filled
