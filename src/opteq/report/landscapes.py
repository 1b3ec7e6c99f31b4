"""The charts of loss landscapes: contours or a curve, with the points marked where a solve failed."""

from typing import Any

import numpy as np
import numpy.typing as npt

from opteq.diagnostics.landscape_figure import contour_levels, is_log
from opteq.report.charts import Chart, Trace, as_svg, axis, colour, drawing, listed, log_scale
from opteq.report.curves import finite
from opteq.report.findings import Landscape
from opteq.report.reading import RunData
from opteq.report.svg import COLOURS, INK
from opteq.report.text import short
from opteq.report.words import figure_text, percent

__all__ = ["landscape_charts"]

Array = npt.NDArray[Any]
POINTS = 20_000  # of all planes of a page, which must stay small
FAILED, CROSS = 1, "#ff5a36"  # the colour of failures: in the palette, and on viridis


def landscape_charts(runs: list[RunData]) -> list[Chart]:
    """One chart for each run that has a landscape; planes share one scale of colours."""
    found = [(place, run, run.findings.landscape) for place, run in enumerate(runs) if run.findings.landscape is not None]
    values = np.concatenate([finite(shape.loss) for _, _, shape in found]) if found else np.zeros(0)
    side = int((POINTS / max(len(found), 1)) ** 0.5)
    drawn = [(place, run.name, shape, shape.thinned(side if shape.y is not None else side**2)) for place, run, shape in found]
    return [_chart(*part, values, len(runs) > 1) for part in drawn if len(finite(part[-1].loss))]


def _chart(place: int, name: str, whole: Landscape, shape: Landscape, values: Array, several: bool) -> Chart:
    own, failed = finite(whole.loss), ~whole.converged
    share = percent(float(failed.mean()))
    described = (
        f"Loss around the parameters of {name}: from {figure_text(float(own.min()))} to {figure_text(float(own.max()))}; "
        f"{share} of the points did not converge."
    )
    plane, fits = shape.y is not None, shape.loss.shape == whole.loss.shape
    traces, layout = (_plane if plane else _line)(shape, values)
    middle = "The trained network is at the white plus. " if plane else "The trained network is at 0. "
    failures = f"Crosses mark the {share} of the points where a solve did not converge: the loss there is of no equilibrium."
    return Chart(
        name=f"landscape-{place}",
        title=f"Loss landscape, {short(name)}" if several else "Loss landscape",
        described=described,
        svg=(_static_plane if plane else _static_line)(shape, values, described),
        traces=traces,
        layout=layout,
        runs=[place] * len(traces),
        note=middle + (failures if failed.any() else "Every point converged.") + ("" if fits else " Not every point is shown."),
        shape="square" if plane else "wide",
    )


def _ticks(values: Array) -> Array:
    """About five round values of a logarithmic scale."""
    low, high = np.log10(values.min()), np.log10(values.max())
    if high - low >= 3:
        return np.asarray(10.0 ** np.unique(np.linspace(np.ceil(low), np.floor(high), 6).round()))
    candidates = np.array([base * 10.0**power for power in range(int(np.floor(low)), int(np.ceil(high)) + 1) for base in (1, 2, 5)])
    return np.asarray(candidates[(candidates >= 10**low) & (candidates <= 10**high)])


# --- for plotly -----------------------------------------------------------------------------------------------------------------


def _plane(shape: Landscape, values: Array) -> tuple[list[Trace], dict[str, Any]]:
    assert shape.y is not None
    plain = {"zeroline": False, "showgrid": False, "constrain": "domain"}
    layout = {
        "xaxis": axis("first direction", range=_range(shape.x), **plain),
        "yaxis": axis("second direction", range=_range(shape.y), scaleanchor="x", **plain),
    }
    return [_contours(shape, values), *_crosses(shape), _middle()], layout


def _contours(shape: Landscape, values: Array) -> Trace:
    assert shape.y is not None
    log, levels = is_log(values), contour_levels(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        heights, steps = (np.log10(shape.loss), np.log10(levels)) if log else (shape.loss, levels)
    bar: dict[str, Any] = {"title": {"text": "loss"}, "thickness": 12, "outlinewidth": 0, "len": 0.9}
    if log:
        ticks = _ticks(values)
        bar |= {"tickvals": listed(np.log10(ticks)), "ticktext": [figure_text(float(tick)) for tick in ticks]}
    good = shape.converged
    return {
        "type": "contour",
        "x": listed(shape.x),
        "y": listed(shape.y),
        "z": listed(heights.T, 5),
        "text": [[_words(*point) for point in zip(*row, strict=True)] for row in zip(shape.loss.T, good.T, strict=True)],
        "hovertemplate": "loss %{text}<br>at (%{x:.3~g}, %{y:.3~g})<extra></extra>",
        "colorscale": "Viridis",
        "zmin": float(steps[0]),
        "zmax": float(steps[-1]),
        "contours": {"start": float(steps[0]), "end": float(steps[-1]), "size": float(steps[1] - steps[0])},
        "line": {"width": 0.4, "color": "#ffffff"},
        "colorbar": bar,
    }


def _range(places: Array) -> list[Any]:
    room = 0.01 * (places[-1] - places[0]) or 1.0
    return listed([places[0] - room, places[-1] + room])


def _words(loss: float, good: bool) -> str:
    return (figure_text(float(loss)) if np.isfinite(loss) else "not finite") + ("" if good else "<br>NOT converged")


def _crosses(shape: Landscape) -> list[Trace]:
    x, y = _failures(shape)
    marker = {"symbol": "x-thin", "size": 6, "line": {"width": 1.4, "color": CROSS}}
    base = {"type": "scatter", "mode": "markers", "marker": marker, "hoverinfo": "skip"}
    return [{**base, "x": listed(x), "y": listed(y)}] if len(x) else []


def _failures(shape: Landscape) -> list[Array]:
    """The coordinates of the points of a plane that did not converge."""
    assert shape.y is not None
    return [places[~shape.converged] for places in np.meshgrid(shape.x, shape.y, indexing="ij")]


def _middle() -> Trace:
    marker = {"symbol": "cross-thin", "size": 11, "line": {"width": 2, "color": "#ffffff"}}
    return {"type": "scatter", "mode": "markers", "x": [0], "y": [0], "marker": marker, "hoverinfo": "skip"}


def _line(shape: Landscape, values: Array) -> tuple[list[Trace], dict[str, Any]]:
    marker = {
        "symbol": ["circle" if good else "x" for good in shape.converged],
        "size": [5 if good else 8 for good in shape.converged],
        "color": [colour(0 if good else FAILED) for good in shape.converged],
    }
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": listed(shape.x),
        "y": listed(shape.loss),
        "text": ["" if good else "<br>NOT converged" for good in shape.converged],
        "hovertemplate": "loss <b>%{y:.5~g}</b> at %{x:.3~g}%{text}<extra></extra>",
        "line": {"color": colour(0), "width": 2},
        "marker": marker,
    }
    scale = {"type": "log"} if is_log(values) else {}
    return [trace], {"xaxis": axis("direction"), "yaxis": axis("loss", **scale)}


# --- for paper ------------------------------------------------------------------------------------------------------------------


def _static_plane(shape: Landscape, values: Array, described: str) -> str:
    assert shape.y is not None
    with drawing((4.3, 3.5)) as figure:
        axes = figure.subplots()
        axes.grid(False)
        scale: Any = "log" if is_log(values) else "linear"
        shown = np.ma.masked_invalid(shape.loss)
        filled = axes.contourf(shape.x, shape.y, shown.T, levels=contour_levels(values), norm=scale, cmap="viridis")
        bar = figure.colorbar(filled, ax=axes, label="loss", format="%.3g", ticks=_ticks(values) if scale == "log" else None)
        bar.outline.set_visible(False)
        bar.minorticks_off()
        axes.plot(*_failures(shape), "x", color=CROSS, markersize=3, markeredgewidth=0.9)
        axes.plot(0, 0, marker="+", color="white", markersize=8, markeredgewidth=1.6)
        axes.set(xlabel="first direction", ylabel="second direction", aspect="equal")
        return as_svg(figure, described)


def _static_line(shape: Landscape, values: Array, described: str) -> str:
    with drawing((4.3, 2.8)) as figure:
        axes = figure.subplots()
        axes.plot(shape.x, shape.loss, color=COLOURS[0], marker="." if len(shape.x) < 100 else "")
        bad = ~shape.converged
        axes.plot(shape.x[bad], shape.loss[bad], "x", color=COLOURS[FAILED], markersize=6, markeredgewidth=1.4)
        axes.set(xlabel="direction", ylabel="loss")
        if is_log(values):
            log_scale(axes)
        axes.axvline(0, color=INK, linewidth=0.6)
        return as_svg(figure, described)
