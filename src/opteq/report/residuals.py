"""The charts of residuals over the steps of a solver."""

from typing import Any

import numpy as np
import numpy.typing as npt

from opteq.report.charts import Chart, Key, Trace, as_svg, axis, colour, drawing, listed, log_axis
from opteq.report.curves import finite
from opteq.report.findings import Residual
from opteq.report.reading import RunData
from opteq.report.svg import COLOURS
from opteq.report.text import clean, for_plot, short
from opteq.report.words import figure_text, percent

__all__ = ["residual_charts"]

Array = npt.NDArray[Any]
MARKED = 3  # a solver of no more steps has markers
POINTS = 1_000  # steps of one solver


def residual_charts(runs: list[RunData]) -> list[Chart]:
    """One chart for each run: the solvers have a colour each."""
    found = [(place, run.name, _drawable(run)) for place, run in enumerate(runs)]
    return [_chart(place, name, solvers, len(runs) > 1) for place, name, solvers in found if solvers]


def _drawable(run: RunData) -> list[Residual]:
    return [_thinned(solver) for solver in run.findings.residuals if (_positive(solver.median) > 0).any()]


def _thinned(solver: Residual) -> Residual:
    at = np.unique(np.linspace(0, len(solver.step) - 1, min(len(solver.step), POINTS)).round().astype(int))
    parts = (solver.step, solver.worst, solver.high, solver.median, solver.low, solver.solved)
    return Residual(solver.solver, *(part[at] for part in parts))


def _positive(values: Array) -> Array:
    """A logarithmic axis has no zero."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(values > 0, values, np.nan))


def _chart(place: int, name: str, solvers: list[Residual], several: bool) -> Chart:
    words = [f"{solver.solver}: {_in_words(solver)}" for solver in solvers]
    described = clean(f"Residuals over solver steps, {name}. {'; '.join(words)}.")
    return Chart(
        name=f"residuals-{place}",
        title=f"Residuals, {short(name)}" if several else "Residuals over solver steps",
        described=described,
        svg=_static(solvers, described),
        traces=[trace for at, solver in enumerate(solvers) for trace in _traces(at, solver)],
        layout={"xaxis": axis("solver step"), "yaxis": axis("relative residual", **_scale(solvers), exponentformat="power")},
        runs=[place] * 4 * len(solvers),
        legend=[Key(str(at), short(solver.solver), colour(at)) for at, solver in enumerate(solvers)],
        note="Line: the median sample. Band: from 10% to 90% of the samples. Dashed: the worst sample.",
        shape="square",
    )


def _scale(solvers: list[Residual]) -> dict[str, Any]:
    values = np.concatenate([finite(_positive(part)) for solver in solvers for part in (solver.worst, solver.median, solver.low)])
    return log_axis(float(values.min()), float(values.max()))


def _in_words(solver: Residual) -> str:
    end = finite(_positive(solver.median))
    solved = finite(solver.solved)
    share = f", {percent(float(solved[-1]))} of the samples solved" if len(solved) else ""
    return f"the median falls to {figure_text(float(end[-1]))}{share}"


def _traces(place: int, solver: Residual) -> list[Trace]:
    shade, name, step = colour(place), for_plot(short(solver.solver)), listed(solver.step, 12)
    base = {"type": "scatter", "mode": "lines", "name": name, "x": step, "legendgroup": str(place)}
    silent = {**base, "hoverinfo": "skip", "line": {"width": 0, "color": shade}}
    about = [[_shown(worst), _share(solved)] for worst, solved in zip(solver.worst, solver.solved, strict=True)]
    hover = "%{fullData.name}, step %{x:,}<br>median <b>%{y:.3~g}</b>, worst %{customdata[0]}<br>solved %{customdata[1]}"
    mode = "lines+markers" if len(step) <= MARKED else "lines"
    median = {
        **base,
        "mode": mode,
        "marker": {"size": 5},
        "line": {"color": shade, "width": 2},
        "customdata": about,
        "hovertemplate": f"{hover}<extra></extra>",
    }
    return [
        {**silent, "y": listed(_positive(solver.low))},
        {**silent, "y": listed(_positive(solver.high)), "fill": "tonexty", "fillcolor": f"{shade}/0.18"},
        {**base, "y": listed(_positive(solver.worst)), "line": {"color": shade, "dash": "dash", "width": 1.2}, "hoverinfo": "skip"},
        {**median, "y": listed(_positive(solver.median))},
    ]


def _shown(value: float) -> str:
    return figure_text(float(value)) if np.isfinite(value) else "not finite"


def _share(value: float) -> str:
    return percent(float(value)) if np.isfinite(value) else "unknown"


def _static(solvers: list[Residual], described: str) -> str:
    from matplotlib.ticker import LogLocator, NullFormatter

    with drawing((4.3, 3.6)) as figure:
        axes = figure.subplots()
        for place, solver in enumerate(solvers):
            shade = COLOURS[place]
            axes.fill_between(solver.step, _positive(solver.low), _positive(solver.high), color=shade, alpha=0.18, linewidth=0)
            axes.plot(solver.step, _positive(solver.worst), color=shade, linestyle="--", linewidth=0.9)
            axes.plot(
                solver.step,
                _positive(solver.median),
                color=shade,
                marker="o" if len(solver.step) <= MARKED else "",
                label=short(solver.solver),
            )
        axes.set(xlabel="solver step", ylabel="relative residual", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        figure.legend(loc="outside upper center", ncols=min(3, len(solvers)), handlelength=1.6, columnspacing=1.2)
        return as_svg(figure, described)
