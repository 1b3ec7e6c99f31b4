"""The charts of what was measured over the steps of a training."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opteq.diagnostics.panels import Curve, Panel, Series, number, ranges_widely, series_curves
from opteq.report.charts import Chart, Key, Trace, as_svg, axis, colour, drawing, listed, log_axis, log_scale
from opteq.report.curves import finite, thinned
from opteq.report.reading import Row, RunData
from opteq.report.svg import COLOURS, INK
from opteq.report.text import clean, for_plot, short
from opteq.report.words import figure_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EVENTS_DRAWN", "curve_charts", "event_steps"]

EVENTS_DRAWN, CURVES_DESCRIBED, NAMED = 20, 8, 8
MARKED, BUSY = 40, 12  # a curve of no more points has markers, in drawings of no more lines: each is an element of the page
STATIC, LIVE = (300, 3_000), (1_500, 6_000)  # points of a curve, and of a chart: the page must stay small
LEAST = 20  # points of a curve of many
DASHES: Final = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}


@dataclass(frozen=True, eq=False)
class Line:
    """One curve of a panel: of which run, and which of its series; `place` among the lines of its run."""

    run: int
    series: Series
    place: int
    curve: Curve


def curve_charts(panels: tuple[Panel, ...], runs: list[RunData]) -> list[Chart]:
    """The panels for which there is a number to draw."""
    found = [(panel, _lines(panel, runs)) for panel in panels]
    return [_chart(panel, lines, runs) for panel, lines in found if lines]


def _lines(panel: Panel, runs: list[RunData]) -> list[Line]:
    lines = []
    for place, run in enumerate(runs):
        found = [(series, curve) for series in panel.series for curve in series_curves(run.rows[series.kind], series)]
        lines += [Line(place, series, at, curve) for at, (series, curve) in enumerate(found)]
    return lines


def _fewer(lines: list[Line], limits: tuple[int, int]) -> list[Line]:
    points = max(LEAST, min(limits[0], limits[1] // len(lines)))
    return [Line(line.run, line.series, line.place, thinned(line.curve, points)) for line in lines]


def _chart(panel: Panel, lines: list[Line], runs: list[RunData]) -> Chart:
    words = [f"{runs[line.run].name}, {line.curve.label}: {_in_words(line.curve)}" for line in lines]
    described = clean(f"{panel.title} over training steps. {'; '.join(words[:CURVES_DESCRIBED])}.")
    log = panel.scale == "log" and ranges_widely(line.curve for line in lines)
    live = _fewer(lines, LIVE)
    return Chart(
        name=re.sub(r"[^a-z]+", "-", panel.title.lower()),
        title=panel.title,
        described=described,
        svg=_static(panel, _fewer(lines, STATIC), runs, log, described),
        traces=[_trace(panel, line, runs) for line in live],
        layout=_layout(panel, lines, log, [] if len(runs) > 1 else runs[0].events),
        runs=[line.run for line in live],
        legend=_legend(lines, len(runs) > 1),
    )


def _in_words(curve: Curve) -> str:
    values = finite(curve.y)
    return f"from {figure_text(float(values[0]))} to {figure_text(float(values[-1]))}"


def _marked(curve: Curve) -> bool:
    """Whether its points are marked: of few points, or many gaps, some may have no line."""
    return len(curve.x) <= MARKED or len(finite(curve.y)) < 0.9 * len(curve.y)


def _palette(line: Line, several: bool) -> int:
    """Several runs have a colour each, which the page explains; the lines of a single one are told apart by it."""
    return line.run if several else line.place


# --- for plotly -----------------------------------------------------------------------------------------------------------------


def _trace(panel: Panel, line: Line, runs: list[RunData]) -> Trace:
    several, curve = len(runs) > 1, line.curve
    label = clean(f"{runs[line.run].name}, {curve.label}") if several else curve.label
    value = "%{y:.2%}" if panel.scale == "share" else "%{y:.5~g}"
    return {
        "type": "scatter",
        "mode": "lines+markers" if _marked(curve) else "lines",
        "name": for_plot(label),
        "hovertemplate": f"%{{fullData.name}}<br>step %{{x:,}}: <b>{value}</b><extra></extra>",
        "x": listed(curve.x, 12),
        "y": listed(curve.y),
        "line": {
            "color": colour(_palette(line, several)),
            "dash": DASHES[line.series.line],
            "width": 1.2 if line.series.faint else 2,
        },
        "marker": {"size": 5 if len(curve.x) <= MARKED else 3},
        "opacity": 0.65 if line.series.faint else 1,
        "legendgroup": line.series.label if several else str(line.place),
    }


def _legend(lines: list[Line], several: bool) -> list[Key]:
    """Of several runs it says what each style of line is, for the page says their colours; of one, what each line is."""
    found = {}
    for line in lines:
        group, label = (line.series.label,) * 2 if several else (str(line.place), clean(line.curve.label))
        found[group] = Key(group, label, "var(--ink)" if several else colour(line.place), _sample(line.series))
    return list(found.values()) if 1 < len(found) <= NAMED else []


def _sample(series: Series) -> str:
    return DASHES[series.line] + (" faint" if series.faint else "")


def _layout(panel: Panel, lines: list[Line], log: bool, events: list[Row]) -> dict[str, Any]:
    low, high = _ends(lines, log)
    scale: dict[str, Any] = {"rangemode": "tozero"} if panel.scale == "zero" else {}
    if log:
        scale = log_axis(low, high)
    elif low == high and panel.scale != "zero":  # plotly would leave a lot of room
        scale = {"range": listed([low - 0.1 * abs(low), low + 0.1 * abs(low)])} if low else {}
    if panel.scale == "share":
        low = min(low, 0.98) if high > 0.98 else low  # a share that is always 100% is not to fill the chart with noise
        room = max(0.05 * (high - low), 0.002)
        top = max(high, min(high + room, 1.002))  # no ticks above 100%
        scale = {"tickformat": ".0%" if high - low > 0.05 else ".1%", "range": listed([low - room, top])}
    marks = [
        {"type": "line", "x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "var(--soft)", "dash": "dot"}}
        for step in event_steps(events)[:EVENTS_DRAWN]
    ]
    return {"xaxis": axis("step"), "yaxis": scale, "shapes": marks}


def event_steps(events: list[Row]) -> list[float]:
    """Where events were, as far as that is known."""
    return [step for event in events if (step := number(event.get("step"))) is not None]


def _ends(lines: list[Line], log: bool = False) -> tuple[float, float]:
    """The least and the largest value; a logarithmic axis has no zero."""
    values = np.concatenate([finite(line.curve.y) for line in lines])
    values = values[values > 0] if log else values
    return float(values.min()), float(values.max())


# --- for paper ------------------------------------------------------------------------------------------------------------------


def _static(panel: Panel, lines: list[Line], runs: list[RunData], log: bool, described: str) -> str:
    several = len(runs) > 1
    with drawing((4.3, 2.8)) as figure:
        axes = figure.subplots()
        for line in lines:
            alone = len(finite(line.curve.y)) == 1
            shade = COLOURS[_palette(line, several) % len(COLOURS)]
            marker = "o" if alone or (_marked(line.curve) and len(lines) <= BUSY) else ""
            axes.plot(line.curve.x, line.curve.y, color=shade, marker=marker, **_look(line.series))
        _scale(axes, panel, lines, log)
        for step in [] if several else event_steps(runs[0].events)[:EVENTS_DRAWN]:
            axes.axvline(step, color=INK, linewidth=0.8, linestyle=":")
        _static_legend(axes, lines, several)
        return as_svg(figure, described)


def _look(series: Series) -> dict[str, Any]:
    return {"linestyle": series.line, "linewidth": 0.9 if series.faint else 1.6, "alpha": 0.6 if series.faint else 1.0}


def _scale(axes: "Axes", panel: Panel, lines: list[Line], log: bool) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    low, high = _ends(lines)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if log:
        log_scale(axes)
    if panel.scale == "zero":
        axes.set_ylim(bottom=min(0.0, low))
    if panel.scale == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(top=max(high, min(axes.get_ylim()[1], 1.005)))  # no ticks above 100%


def _static_legend(axes: "Axes", lines: list[Line], several: bool) -> None:
    from matplotlib.lines import Line2D

    shown = {line.series.label if several else line.curve.label: line for line in lines}
    handles = [
        Line2D([], [], color=INK if several else COLOURS[at % len(COLOURS)], label=short(clean(label)), **_look(line.series))
        for at, (label, line) in enumerate(shown.items())
    ]
    columns = min(3, len(handles))
    if 1 < len(handles) <= NAMED:
        axes.figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=1.6, columnspacing=1.2)
