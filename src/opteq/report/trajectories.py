"""The charts of trajectories: the iterates of a solver in a plane, one chart for each stage of a training."""

from typing import TYPE_CHECKING, Any

import numpy as np

from opteq.report.charts import Chart, Key, Trace, as_svg, axis, colour, drawing, listed
from opteq.report.findings import SamplePath, Trajectory
from opteq.report.reading import RunData
from opteq.report.svg import COLOURS, INK
from opteq.report.text import for_legend, for_plot, short

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

__all__ = ["trajectory_charts"]

UNKNOWN = "-1"  # a sample without a label
SAMPLES = 480  # of all charts of a page, which must stay small
NAMED = 12  # labels in a legend


def trajectory_charts(runs: list[RunData]) -> list[Chart]:
    """One chart for each stage of each run; the stages of a run share their axes."""
    most = max(4, SAMPLES // max(1, sum(len(run.findings.trajectory) for run in runs)))
    return [
        _chart(place, at, run, stage.thinned(most))
        for place, run in enumerate(runs)
        for at, stage in enumerate(run.findings.trajectory)
        if any(len(_finite(path)) for path in stage.thinned(most).paths)
    ]


def _finite(path: SamplePath) -> Any:
    return path.points[np.isfinite(path.points).all(axis=1)]


def _chart(place: int, at: int, run: RunData, stage: Trajectory) -> Chart:
    labels = _labels(run.findings.trajectory)
    described = f"{run.name}, {stage.stage}: the iterates of {len(stage.paths)} samples in the plane of two principal components."
    ranges = _ranges(run.findings.trajectory)
    traces = [trace for label in labels for trace in _traces(label, labels[label], stage)]
    return Chart(
        name=f"trajectory-{place}-{at}",
        title=stage.stage,
        described=described,
        svg=_static(stage, labels, ranges, described),
        traces=traces,
        layout={
            "xaxis": axis("first component", range=listed(ranges[0]), zeroline=False),
            "yaxis": axis("second component", range=listed(ranges[1]), zeroline=False),
        },
        runs=[place] * len(traces),
        legend=_legend(labels),
        note=_note(stage, len(run.findings.trajectory)),
        shape="square",
    )


def _note(stage: Trajectory, stages: int) -> str:
    parts = ((len(stage.paths), stage.samples, "samples"), (stages, stage.stages, "stages"))
    return " ".join(f"{shown} of {count:,} {what} are shown." for shown, count, what in parts if shown < count)


def _legend(labels: dict[str, int]) -> list[Key]:
    keys = [Key(str(at), _named(label), _colour(label, at), "point") for label, at in labels.items()]
    return keys if 1 < len(keys) <= NAMED else []


def _labels(stages: tuple[Trajectory, ...]) -> dict[str, int]:
    """The place of each label in the palette: 10 classes have 10 colours."""
    found = dict.fromkeys(path.label for stage in stages for path in stage.paths)
    return {label: place for place, label in enumerate(sorted(found, key=lambda text: (len(text), text)))}


def _ranges(stages: tuple[Trajectory, ...]) -> Any:
    points = np.concatenate([_finite(path) for stage in stages for path in stage.paths])
    low, high = points.min(axis=0), points.max(axis=0)
    room = np.where(high > low, 0.06 * (high - low), 0.5)
    return np.stack([low - room, high + room], axis=1)


def _traces(label: str, place: int, stage: Trajectory) -> list[Trace]:
    """The paths of a class as one line with gaps, and their last points."""
    paths = _paths(label, stage)
    if not paths:
        return []
    shade, name = _colour(label, place), for_plot(_named(label))
    points, ends = _joined(paths)
    about = [[for_plot(short(path.sample)), step] for path in paths for step in (*listed(path.steps), None)]
    hover = "class %{fullData.name}<br>sample %{customdata[0]}, step %{customdata[1]}<br>(%{x:.4~g}, %{y:.4~g})<extra></extra>"
    base = {"type": "scatter", "name": name, "legendgroup": str(place)}
    line = {**base, "mode": "lines", "line": {"color": shade, "width": 1.2}, "opacity": 0.6, "hovertemplate": hover}
    end = {**base, "mode": "markers", "marker": {"color": shade, "size": 6}, "hoverinfo": "skip"}
    return [
        {**line, "x": listed(points[:, 0]), "y": listed(points[:, 1]), "customdata": about},
        {**end, "x": listed(ends[:, 0]), "y": listed(ends[:, 1])},
    ]


def _paths(label: str, stage: Trajectory) -> list[SamplePath]:
    return [path for path in stage.paths if path.label == label and len(_finite(path))]


def _joined(paths: list[SamplePath]) -> tuple[Any, Any]:
    """All points of the paths, with a gap after each, and their last points."""
    gap = np.full((1, 2), np.nan)
    return np.concatenate([part for path in paths for part in (path.points, gap)]), np.stack([_finite(path)[-1] for path in paths])


def _named(label: str) -> str:
    return "none" if label == UNKNOWN else short(label, 14)


def _colour(label: str, place: int) -> str:
    return "var(--soft)" if label == UNKNOWN else colour(place)


def _static(stage: Trajectory, labels: dict[str, int], ranges: Any, described: str) -> str:
    with drawing((4.3, 3.6)) as figure:
        axes = figure.subplots()
        for label in labels:
            if paths := _paths(label, stage):
                points, ends = _joined(paths)
                axes.plot(*points.T, color=_shade(label, labels), linewidth=0.8, alpha=0.6)
                axes.plot(*ends.T, "o", color=_shade(label, labels), markersize=3)
        axes.set(xlabel="first component", ylabel="second component", xlim=ranges[0], ylim=ranges[1])
        handles = [_handle(label, _shade(label, labels)) for label in labels]
        if 1 < len(handles) <= NAMED:
            figure.legend(
                handles=handles, loc="outside upper center", ncols=min(10, len(handles)), handletextpad=0, columnspacing=0.6
            )
        return as_svg(figure, described)


def _handle(label: str, shade: str) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], color=shade, marker="o", linestyle="", label=for_legend(_named(label)))


def _shade(label: str, labels: dict[str, int]) -> str:
    return INK if label == UNKNOWN else COLOURS[labels[label] % len(COLOURS)]
