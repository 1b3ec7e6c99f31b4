"""What figures 4.3 to 4.5 of the thesis share: trainings by Adam, and the loss surface around a network that was trained."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from opteq.diagnostics import Landscape, data_loss, landscape
from opteq.diagnostics.basin import Basin
from opteq.diagnostics.drawing import COLOURS
from opteq.diagnostics.landscape_figure import LEVELS
from opteq.experiments import _training
from opteq.experiments._claims import mean_error
from opteq.experiments._harness import Options, Series, grid, rounded
from opteq.grids import Outcome
from opteq.recipes import Recipe, load_model, sample
from opteq.training import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "ONE_SEED", "Width", "adam", "colour_limits", "draw_surface", "drawable", "halfway", "matrix", "plane", "surface", "surfaces",
    "thinned", "widths",
]  # fmt: skip

Array = npt.NDArray[Any]
ONE_SEED = "Each network was trained once: which is the wider, the longer or the lower has no error estimate."


def adam(epochs: int, seed: int, keep: int = 1) -> TrainConfig:
    """The thesis's training: Adam from 1e-3 on, a cosine down to 0, batches of 100; and no end where solves do not converge."""
    return TrainConfig(
        epochs=epochs, batch_size=100, optimizer="adam", lr=1e-3, schedule="cosine", seed=seed, least_converged=0.0, keep=keep
    )


# --- one cell -------------------------------------------------------------------------------------------------------------------


def surface(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a recipe; then the loss on a plane through its weights, and on lines along further directions.

    All of them go on where they were interrupted. Where a solve failed, the loss is that of the last iterate; `converged` is the
    share of the points of the plane without such a sample.
    """
    scores, place = _training.train(settings), Path(settings["folder"])
    if "diverged" in scores:
        raise RuntimeError(scores["diverged"])
    model, dataset = load_model(place)
    loss = data_loss(*sample(getattr(dataset, settings["split"]), settings["samples"]))
    seed, steps, span = settings["seed"], settings["steps"], settings["span"]
    found = landscape(model, loss, steps=steps, span=span, seed=seed, file=place / "plane.grid")
    lines = [
        landscape(model, loss, steps=steps, span=span, seed=seed + i, dims=1, file=place / f"line{i}.grid")
        for i in range(1, settings["lines"] + 1)
    ]
    return {
        "axis": found.axis.tolist(),
        "loss": found.loss.tolist(),
        "lines": [line.loss.tolist() for line in lines],
        "converged": float(found.converged.double().mean()),
        "guessing": math.log(len(dataset.classes)),  # the loss where each class has the same probability
        **{name: scores["curves"][name] for name in ("train_loss", "valid_accuracy")},
    }


# --- the grid -------------------------------------------------------------------------------------------------------------------


def surfaces(name: str, recipes: Mapping[str, Recipe], looking: dict[str, Any], options: Options) -> dict[str, Outcome]:
    """`surface` of each recipe, by its name; `looking` has its steps, span, samples, split and lines."""
    named = {f"{title}-seed{options.seed}": recipe for title, recipe in recipes.items()}
    cells = _training.cells(name, named, options)
    found = grid(name, surface, {cell: {**one, "seed": options.seed, **looking} for cell, one in cells.items()}, options)
    return dict(zip(recipes, found.values(), strict=True))


def thinned(series: Series) -> Series:
    """Surfaces for the result file, their losses to 4 digits: a plane is long. Measure them before."""
    return {name: one and {**one, **{part: rounded(one[part], 4) for part in ("loss", "lines")}} for name, one in series.items()}


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


@dataclass(frozen=True)
class Width:
    """How wide a basin is, NaN if it is not known. `bound`: only a lower bound, as the basin reaches the end of the grid."""

    value: float = math.nan
    error: float = math.nan
    bound: bool = False

    def over(self, other: "Width") -> float:
        """How many times as wide as the other; NaN if that one is 0, or nothing but a lower bound."""
        return self.value / other.value if other.value and not other.bound else math.nan

    def text(self) -> str | None:
        """For a table, with the standard error where there is one."""
        if math.isnan(self.value):
            return None
        return f"{'>= ' if self.bound else ''}{self.value:.3f}" + ("" if math.isnan(self.error) else f" ({self.error:.3f})")


def widths(found: Mapping[str, Any] | None, level: float) -> tuple[Width, Width]:
    """The basin {loss <= level} around the minimiser: its diameter on the plane, and its mean width along every direction there is.

    These are both of the plane and the lines. Where the cell failed, or there is no such level, nothing is known.
    """
    if found is None or math.isnan(level):
        return Width(), Width()
    loss, disc = matrix(found["loss"]), plane(found).basin(level)
    middle = len(loss) // 2
    lines = [_landscape(found["axis"], line).basin(level) for line in (loss[:, middle], loss[middle], *map(matrix, found["lines"]))]
    along = Width(*mean_error([line.size for line in lines]), bound=any(_open(line) for line in lines))
    return Width(disc.diameter, bound=_open(disc)), along


def _open(basin: Basin) -> bool:
    """Whether it may go on where there is no loss."""
    return basin.at_edge or basin.at_failure


# --- drawing --------------------------------------------------------------------------------------------------------------------


def drawable(series: Series) -> dict[str, dict[str, Any]]:
    """The surfaces that have a loss anywhere."""
    return {name: one for name, one in series.items() if one and np.isfinite(matrix(one["loss"])).any()}


def colour_limits(series: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """From the least loss to the 95th percentile of all; for colours by logarithm, so the least is above 0."""
    every = np.concatenate([matrix(one["loss"]).ravel() for one in series.values()])
    every = every[np.isfinite(every)]
    high = max(float(np.percentile(every, 95)), 1e-3)
    return min(max(float(every.min()), 1e-3 * high), 0.99 * high), high


def draw_surface(axes: "Axes", found: Mapping[str, Any], title: str, limits: tuple[float, float], level: float) -> Any:
    """Contours between the limits, the same colours in every panel that has them, a cross at the minimiser, and its basin."""
    from matplotlib.collections import LineCollection

    axis = found["axis"]
    loss = np.ma.masked_invalid(matrix(found["loss"])).clip(*limits)
    levels = np.geomspace(*limits, LEVELS)
    filled = axes.contourf(axis, axis, loss.T, levels=levels, norm="log", cmap="viridis")
    axes.contour(filled, levels=levels[::3], colors="white", linewidths=0.4)
    outline = [] if math.isnan(level) else list(plane(found).basin(level).outline)
    axes.add_collection(LineCollection(outline, colors=COLOURS[1], linewidths=1.4, zorder=4))
    axes.plot(0, 0, marker="+", color="white", markersize=6, zorder=5)
    axes.set(aspect="equal", xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]))
    axes.set_title(title, fontsize=8)
    axes.locator_params(nbins=5)
    return filled
