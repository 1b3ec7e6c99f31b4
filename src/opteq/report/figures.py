"""The figures of a report: matplotlib draws them, the page colours them, so that they suit light and dark."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from opteq.diagnostics.panels import Panel, Series
from opteq.report.curves import Curve, curve
from opteq.report.reading import Row, RunData, number
from opteq.report.svg import COLOURS, GRID, INK, for_page
from opteq.report.words import figure_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Drawing", "drawings"]

EVENTS_DRAWN, CURVES_DESCRIBED, LAYERS_DRAWN = 20, 8, 50
MARKED = 40  # a curve of no more points has markers: it may be a single one
LOG_RATIO = 20.0  # above this ratio of the largest to the least value, a logarithmic axis
STYLE: Final[dict[Any, Any]] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "opteq",  # the same file at every run
}


@dataclass(frozen=True)
class Drawing:
    """A figure as an SVG element for the page."""

    title: str
    svg: str


@dataclass(frozen=True, eq=False)
class Line:
    """One curve of a panel: of which run, and which of its series."""

    run: int
    series: int
    curve: Curve


def drawings(panels: tuple[Panel, ...], runs: list[RunData]) -> list[Drawing]:
    """The panels for which there is a number to draw."""
    found = [(panel, _lines(panel, runs)) for panel in panels]
    return [_drawing(panel, lines, runs) for panel, lines in found if lines]


def _lines(panel: Panel, runs: list[RunData]) -> list[Line]:
    return [
        Line(run, place, found)
        for run in range(len(runs))
        for place, series in enumerate(panel.series)
        for found in _curves(runs[run], series)
    ]


def _curves(run: RunData, series: Series) -> list[Curve]:
    """One curve; of a metric that is a list, one for each place."""
    rows = run.steps if series.kind == "step" else run.epochs
    places = max((len(row[series.key]) for row in rows if isinstance(row.get(series.key), list)), default=0)
    indices = [None, *range(min(places, LAYERS_DRAWN))]
    return [found for index in indices if (found := curve(rows, series.key, index)) is not None]


def _drawing(panel: Panel, lines: list[Line], runs: list[RunData]) -> Drawing:
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context(STYLE):
        _draw(panel, lines, runs).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    words = [f"{runs[line.run].name}, {panel.series[line.series].label}: {_in_words(line.curve)}" for line in lines]
    described = f"{panel.title} over training steps. {'; '.join(words[:CURVES_DESCRIBED])}."
    return Drawing(panel.title, for_page(file.getvalue(), described))


def _in_words(found: Curve) -> str:
    return f"from {figure_text(float(found.finite[0]))} to {figure_text(float(found.finite[-1]))}"


def _draw(panel: Panel, lines: list[Line], runs: list[RunData]) -> "Figure":
    """Several runs have a colour each, which the page explains; the lines of a single one are coloured by what they are."""
    from matplotlib.figure import Figure

    several = len(runs) > 1
    figure = Figure(figsize=(4.3, 2.8), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        series, colour = panel.series[line.series], COLOURS[(line.run if several else line.series) % len(COLOURS)]
        marker = "o" if len(line.curve.finite) <= MARKED else ""
        axes.plot(line.curve.x, line.curve.y, color=colour, marker=marker, **_look(series))
    _scale(axes, panel, [line.curve for line in lines])
    _mark(axes, [] if several else runs[0].events)
    _legend(axes, {line.series: panel.series[line.series] for line in lines}, several)
    return figure


def _look(series: Series) -> dict[str, Any]:
    return {"linestyle": series.line, "linewidth": 0.9 if series.faint else 1.6, "alpha": 0.6 if series.faint else 1.0}


def _scale(axes: "Axes", panel: Panel, curves: list[Curve]) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

    low, high = min(found.finite.min() for found in curves), max(found.finite.max() for found in curves)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.scale == "log" and low > 0 and high / LOG_RATIO > low:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.scale == "zero":
        axes.set_ylim(bottom=min(0.0, low))
    if panel.scale == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(top=max(high, min(axes.get_ylim()[1], 1.005)))  # no ticks above 100%


def _mark(axes: "Axes", events: list[Row]) -> None:
    """A dotted line at each event."""
    for event in events[:EVENTS_DRAWN]:
        if (step := number(event.get("step"))) is not None:
            axes.axvline(step, color=INK, linewidth=0.8, linestyle=":")


def _legend(axes: "Axes", shown: dict[int, Series], several: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=INK if several else COLOURS[place], label=series.label, **_look(series))
        for place, series in sorted(shown.items())
    ]
    if len(handles) > 1:
        axes.figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handlelength=1.6, columnspacing=1.2)
