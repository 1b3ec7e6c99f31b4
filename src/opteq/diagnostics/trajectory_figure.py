"""Trajectories as figures."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from opteq.diagnostics.drawing import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opteq.diagnostics.trajectory import Trajectory

__all__ = ["draw_trajectory"]

Array = npt.NDArray[Any]
OTHERS = "#BBBBBB"


def draw_trajectory(found: "Trajectory") -> "Figure":
    """One panel a stage on shared axes, with a legend of the classes below."""
    stages = len(found.stages)
    across = stages if stages < 4 else 2 if stages == 4 else 3
    down = -(-stages // across)
    groups = _groups(found)
    with new_figure((max(3.4, 2.3 * across), 2.3 * down + 0.6)) as figure:
        panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
        for place, axes in enumerate(panels):
            axes.set_visible(place < stages)
        for place, axes in enumerate(panels[:stages]):
            _draw(axes, found, place, groups)
            axes.xaxis.set_tick_params(labelbottom=place + across >= stages)
            axes.set_xlabel(_component(found, 0) if place + across >= stages else "")
            axes.set_ylabel(_component(found, 1) if place % across == 0 else "")
        handles, names = panels[0].get_legend_handles_labels()
        title = None if found.labels is None else "ends of the paths, by class"
        options = {"fontsize": 7, "title": title, "title_fontsize": 7, "markerscale": 2, "columnspacing": 1.2, "handletextpad": 0.2}
        figure.legend(handles, names, loc="outside lower center", ncols=6 if across < 3 else 12, frameon=False, **options)
    return figure


def _component(found: "Trajectory", index: int) -> str:
    return f"PC {index + 1} ({100 * float(found.explained[index]):.3g}% of variance)"


def _groups(found: "Trajectory") -> list[tuple[str, str, Array]]:
    """The name, the colour and the samples of each class; beyond ten, the rarest are one grey group."""
    if found.labels is None:
        return [("", COLOURS[0], np.ones(len(found.points[0]), dtype=bool))]
    labels = found.labels.numpy()
    classes, counts = np.unique(labels, return_counts=True)
    kept = np.sort(classes[np.argsort(-counts, kind="stable")[: len(COLOURS)]])
    groups = [(f"{each}", colour, labels == each) for each, colour in zip(kept, COLOURS, strict=False)]
    rest = ~np.isin(labels, kept)
    return [("others", OTHERS, rest), *groups] if rest.any() else groups


def _draw(axes: "Axes", found: "Trajectory", place: int, groups: list[tuple[str, str, Array]]) -> None:
    points = found.points[place].numpy()[..., :2]
    last = np.isfinite(points[..., 0]).sum(axis=1) - 1
    ends = points[np.arange(len(points)), last]
    for name, colour, members in groups:
        broken = np.concatenate([points[members], np.full((members.sum(), 1, 2), np.nan)], axis=1).reshape(-1, 2)
        axes.plot(*broken.T, color=colour, linewidth=0.4, alpha=0.5)
        axes.plot(*ends[members].T, color=colour, linestyle="", marker=".", markersize=2.5, zorder=3, label=name or "end")
    axes.plot(*points[:, 0].T, color="black", linestyle="", marker="+", markersize=5, markeredgewidth=0.8, zorder=4, label="start")
    axes.set_title(_title(found, place), fontsize=7)


def _title(found: "Trajectory", place: int) -> str:
    mean, error = found.length[place]
    words = f"length {mean:.3g}" + (f" ± {error:.1g}" if np.isfinite(error) else "")
    separation = found.separation[place]
    apart = f", silhouette {separation:.2f}" if np.isfinite(separation) else ""
    missed = 1 - float(found.converged[place].double().mean())
    return f"{found.stages[place]}\n{words}{apart}" + (f"\n{missed:.1%} not converged" if missed else "")
