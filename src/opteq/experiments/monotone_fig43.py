"""Figure 4.3 of the thesis on the tangent kernel of monotone DEQs: the way to the equilibrium, over a training.

The DEQ is z = norm(relu(z + norm(x + W2 * norm(relu(W1 * z))))), with group norms, between a convolution and a linear map, trained
on MNIST for 40 epochs with Adam from 1e-3 on and a cosine schedule; it is solved from z = 0 by Anderson's method to 1e-2 in at most
50 steps. The figure shows the iterates for training images in their first two principal components; its caption says 1e-3 and 100
steps, which is taken here for the paths that are drawn and measured. The thesis says (Section 4.1.2) that before the training a
path "just takes a single leap and quickly becomes steady", that after an epoch the states "corresponding to different classes are
moved to a different region of the space", and that later "the trajectory becomes more complex and orbits near the fixed points". It
prints no numbers.

How long a path is: sum_k |z_{k+1} - z_k|, also over the distance |z* - 0| that it makes good, which is 1 for a single leap. How
well the classes are told apart: the mean silhouette of the ends of the paths, and the scatter of the means of the classes over that
inside of the classes.

Not in its text: the channels (those of the tutorial that the block is from, 48 and 64 inside) and the batch (that of Section 4.2).
`small` has maps of 7 x 7 instead of 28 x 28 (a first convolution of stride 4), a tenth of the training set and 8 epochs. The
training keeps the weights after every epoch, and goes on where it was interrupted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from opteq import Solution, Stop
from opteq.diagnostics import trajectory
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.equilibrium import Equilibrium, observe
from opteq.experiments import _training
from opteq.experiments._claims import Measured, at_least, column, judged
from opteq.experiments._harness import Options, Result, Series, command, gather, grid, rounded, table
from opteq.experiments._thesis import adam
from opteq.recipes import Data, Recipe, Residual, Solve, load_stages, sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "Config", "figure", "follow", "judge", "main", "recipe", "run", "scatter"]

NAME = "monotone_fig43"
ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "longer": "The paths are longer after the training than before, in the space of the states and beside the distance they cover.",
    "still_longer": "They are longer at the end than after the first epoch: they go on growing.",
    "more_steps": "The solver needs more steps after the training than before.",
    "classes": "The ends of the paths are further apart by class after one epoch than before, and still further at the end.",
}


@dataclass(frozen=True)
class Config:
    """The sizes. `samples` are measured after each epoch, `paths` of them are drawn, after each of the epochs `drawn`."""

    data: str = "mnist"
    limit: int | None = None
    epochs: int = 40
    channels: int = 48
    inner: int = 64
    stride: int = 1
    pool: int = 4
    rtol: float = 1e-2
    max_steps: int = 50
    path_rtol: float = 1e-3
    path_steps: int = 100
    samples: int = 200
    paths: int = 50
    drawn: tuple[int, ...] = (0, 1, 5, 40)


PRESETS = {
    "smoke": Config("digits", 200, 2, 8, 8, pool=2, samples=30, paths=20, drawn=(0, 1, 2)),
    "small": Config(limit=6000, epochs=8, stride=4, drawn=(0, 1, 3, 8)),
    "paper": Config(),
}

# --- one cell -------------------------------------------------------------------------------------------------------------------


def recipe(config: Config, options: Options) -> Recipe:
    """The training of the DEQ, which keeps the weights of every epoch."""
    solve = Solve("anderson", config.rtol, config.max_steps)
    model = Residual(config.channels, config.inner, stride=config.stride, pool=config.pool, solve=solve)
    data = Data(config.data, options.root, limit=config.limit, test_limit=1000)
    return Recipe(data, model, adam(config.epochs, options.seed, keep=config.epochs + 1))


def follow(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, then follow the iterates before the training and after each epoch, for the same training images."""
    scores = _training.train(settings)
    if "diverged" in scores:
        raise RuntimeError(scores["diverged"])
    stages, dataset = load_stages(Path(settings["folder"]))
    models = [model for name, model in stages.items() if name != "step 0"]  # before, after the epochs 1, 2, ...
    for model in models:
        part(model).stop = Stop(rtol=settings["path_rtol"], max_steps=settings["path_steps"])
    x, labels = sample(dataset.train, settings["samples"])
    rows = [measure(model, x, labels) for model in models]
    paths = settings["paths"]
    drawn = trajectory({str(epoch): models[epoch] for epoch in settings["drawn"]}, x[:paths], labels[:paths])
    return {
        "epoch": list(range(len(models))),
        **{name: [row[name] for row in rows] for name in rows[0]},
        "valid_accuracy": scores["curves"]["valid_accuracy"],
        "drawn": list(settings["drawn"]),
        "points": [points(stage) for stage in drawn.points],
        "explained": drawn.explained.tolist(),
        "labels": labels[:paths].tolist(),
    }


def part(model: nn.Module) -> Equilibrium:
    """The equilibrium of a model."""
    return next(layer for layer in model.modules() if isinstance(layer, Equilibrium))


def measure(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Means over the samples: the length of the paths, also over the distance that they cover, steps, and how far classes are."""
    found, ends = trajectory(model, x, labels), states(model, x)
    length = found.lengths[0]
    detour = length / ends.double().norm(dim=1)
    return {
        "length": float(length.mean()),
        "length_error": found.length[0].error,
        "detour": float(detour.mean()),
        "detour_error": float(detour.std() / math.sqrt(len(detour))),
        "steps": float((found.points[0][..., 0].isfinite().sum(dim=1) - 1).double().mean()),
        "converged": float(found.converged[0].double().mean()),
        "silhouette": found.separation[0],
        "scatter": scatter(ends, labels),
    }


@torch.no_grad()
def states(model: nn.Module, x: Tensor) -> Tensor:
    """The equilibria of the samples, as vectors."""
    kept: list[Tensor] = []

    def keep(layer: Equilibrium, solution: Solution, phase: str) -> None:
        kept.append(solution.z.detach().flatten(1))

    part(model).on_failure = "ignore"  # the share that converged is measured
    with observe(keep):
        model(x)
    return kept[0]


def scatter(z: Tensor, labels: Tensor) -> float:
    """sum_i |m_i - m|^2 / sum_i |z_i - m_i|^2, m the mean of all, m_i of the class of i: the scatter of classes, and in them."""
    z = z.double()
    means = torch.stack([z[labels == label].mean(dim=0) for label in labels])
    return float((means - z.mean(dim=0)).square().sum() / (z - means).square().sum())


def points(stage: Tensor) -> list[list[list[float]]]:
    """The paths of a stage, [sample][step], without what comes after their end."""
    return [rounded(path[path[:, 0].isfinite()].tolist(), 3) for path in stage]


# --- the claims -----------------------------------------------------------------------------------------------------------------


def run(options: Options) -> Result:
    """One training, and the paths of the same images after each of its epochs."""
    config = PRESETS[options.preset]
    shared = ("path_rtol", "path_steps", "samples", "paths", "drawn")
    cell = f"DEQ-seed{options.seed}"
    cells = _training.cells(NAME, {cell: recipe(config, options)}, options)
    outcomes = grid(NAME, follow, {cell: {**cells[cell], **{key: getattr(config, key) for key in shared}}}, options)
    series = outcomes[cell].result
    return gather(
        NAME,
        options,
        judged(CLAIMS, judge(series)),
        outcomes=outcomes,
        tables={"The paths of the same training images, over the training": summary(series)},
        series=series,
        notes=[
            "The paths are solved to 1e-3 in at most 100 steps, as the caption says; the training solves to 1e-2 in at most 50.",
            "There is one training: what changes in it has no error estimate but that over the images.",
        ],
    )


def judge(series: Series | None) -> dict[str, Measured | str]:
    """What was measured for each claim; a training that failed shows nothing."""

    def ratio(name: str, after: int, before: int) -> float:
        values = column(series, name)
        return values[after] / values[before] if len(values) > 1 else float("nan")

    def gain(name: str, after: int, before: int) -> float:
        values = column(series, name)
        return values[after] - values[before] if len(values) > 1 else float("nan")

    return {
        "longer": {
            "length at the end over that before": at_least(ratio("length", -1, 0), 1.0),
            "length per distance at the end over that before": at_least(ratio("detour", -1, 0), 1.0),
        },
        "still_longer": {
            "length at the end over that after one epoch": at_least(ratio("length", -1, 1), 1.0),
            "length per distance at the end over that after one epoch": at_least(ratio("detour", -1, 1), 1.0),
        },
        "more_steps": {"steps to 1e-3 at the end over those before": at_least(ratio("steps", -1, 0), 1.0)},
        "classes": {
            "silhouette after one epoch less that before": at_least(gain("silhouette", 1, 0), 0.0),
            "silhouette at the end less that after one epoch": at_least(gain("silhouette", -1, 1), 0.0),
            "scatter ratio after one epoch over that before": at_least(ratio("scatter", 1, 0), 1.0),
            "scatter ratio at the end over that after one epoch": at_least(ratio("scatter", -1, 1), 1.0),
        },
    }


def summary(series: Series | None) -> dict[str, Any]:
    """The table: a row for each stage."""
    names = ("length", "detour", "steps", "converged", "silhouette", "scatter")
    columns = ["epochs", "length", "length / distance", "steps", "converged", "silhouette", "between / within classes"]
    if series is None:
        return table(columns, [])
    return table(columns, [[str(epoch), *(series[name][k] for name in names)] for k, epoch in enumerate(series["epoch"])])


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """The paths at some stages in one basis, a colour for each class; below, length, steps and separation over the training."""
    from matplotlib.lines import Line2D

    series = result["series"]
    curves = {"length": "length of the paths", "steps": "steps of the solver", "silhouette": "silhouette of the classes"}
    with new_figure((6.3, 4.2)) as page:
        if not series:  # the training failed
            return page
        cells = page.add_gridspec(2, 3 * len(series["drawn"]), height_ratios=(1.25, 1))
        draw_stages([page.add_subplot(cells[0, 3 * i : 3 * i + 3]) for i in range(len(series["drawn"]))], series)
        width = len(series["drawn"])
        for i, (name, title) in enumerate(curves.items()):
            axes = page.add_subplot(cells[1, width * i : width * (i + 1)])
            axes.errorbar(series["epoch"], column(series, name), error(series, name), color=COLOURS[0], marker=".", capsize=2)
            axes.set(xlabel="epoch")
            axes.set_title(title, fontsize=8)
            axes.grid(visible=True)
        marks = [Line2D([], [], color=COLOURS[label], marker="o", linestyle="", markersize=3) for label in range(10)]
        page.legend(marks, [str(label) for label in range(10)], loc="outside upper center", ncols=10, frameon=False, title="class")
    return page


def draw_stages(panels: Sequence["Axes"], series: Series) -> None:
    """The paths of some stages, on the same axes."""
    every = np.concatenate([np.array(path) for stage in series["points"] for path in stage])
    low, high = every.min(axis=0), every.max(axis=0)
    room = 0.05 * (high - low)
    first, second = (f"PC {i} ({100 * share:.0f}%)" for i, share in enumerate(series["explained"], 1))
    for axes, epoch, paths in zip(panels, series["drawn"], series["points"], strict=True):
        draw_paths(axes, paths, series["labels"])
        axes.set(xlim=(low[0] - room[0], high[0] + room[0]), ylim=(low[1] - room[1], high[1] + room[1]), xlabel=first)
        axes.set_title("before" if epoch == 0 else f"epoch {epoch}", fontsize=8)
        axes.tick_params(labelleft=axes is panels[0])
    panels[0].set_ylabel(second)


def error(series: Series, name: str) -> list[float] | None:
    """The standard errors of a curve, where there are any."""
    return column(series, f"{name}_error") if f"{name}_error" in series else None


def draw_paths(axes: "Axes", paths: Sequence[Sequence[Sequence[float]]], labels: Sequence[int]) -> None:
    """The paths of one stage from the start, a dot where each ends."""
    for path, label in zip(paths, labels, strict=True):
        x, y = np.array(path).T
        axes.plot(x, y, color=COLOURS[label], linewidth=0.4, alpha=0.6)
        axes.plot(x[-1], y[-1], color=COLOURS[label], marker="o", markersize=2.2)
    axes.plot(*paths[0][0], color="black", marker="+", markersize=6, zorder=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
