"""The charts of residuals over the steps of a solver."""

from typing import Any

import numpy as np
import numpy.typing as npt

from opteq.report.charts import Chart, Key, Trace, as_svg, axis, colour, drawing, listed, log_axis, log_scale
from opteq.report.curves import finite
from opteq.report.findings import SOLVERS, Residual
from opteq.report.reading import RunData
from opteq.report.svg import COLOURS
from opteq.report.text import clean, for_legend, for_plot, short
from opteq.report.words import figure_text, percent

__all__ = ["residual_charts"]

Array = npt.NDArray[Any]
MARKED = 3  # a solver of no more steps has markers
POINTS = 8_000  # steps of all solvers of a page, which must stay small


def residual_charts(runs: list[RunData]) -> list[Chart]:
    """One chart for each run: the solvers have a colour each."""
    most = POINTS // max(SOLVERS, sum(len(run.findings.residuals) for run in runs))
    found = [(place, run.name, _drawable(run, most)) for place, run in enumerate(runs)]
    return [_chart(place, name, solvers, len(runs) > 1) for place, name, solvers in found if solvers]


def _drawable(run: RunData, most: int) -> list[Residual]:
    thin = [solver.thinned(most) for solver in run.findings.residuals]
    return [solver for solver in thin if len(finite(solver.median))]


def _all(solvers: list[Residual]) -> Array:
    """All values that may be drawn."""
    return np.concatenate([finite(part) for solver in solvers for part in (solver.worst, solver.high, solver.median, solver.low)])


def _floor(solvers: list[Residual]) -> float:
    """Where residuals of zero are drawn, for a logarithmic axis has none: below all others."""
    values = _all(solvers)
    return float(values[values > 0].min()) / 3 if (values > 0).any() else 1.0


def _raised(values: Array, floor: float) -> Array:
    return np.asarray(np.where(np.isfinite(values), np.maximum(values, floor), np.nan))


def _chart(place: int, name: str, solvers: list[Residual], several: bool) -> Chart:
    words = [f"{solver.solver}: {_in_words(solver)}" for solver in solvers]
    described = clean(f"Residuals over solver steps, {name}. {'; '.join(words)}.")
    floor = _floor(solvers)
    return Chart(
        name=f"residuals-{place}",
        title=f"Residuals, {short(name)}" if several else "Residuals over solver steps",
        described=described,
        svg=_static(solvers, floor, described),
        traces=[trace for at, solver in enumerate(solvers) for trace in _traces(at, solver, floor)],
        layout={"xaxis": axis("solver step"), "yaxis": axis("relative residual", **_scale(solvers, floor), exponentformat="power")},
        runs=[place] * 4 * len(solvers),
        legend=[Key(str(at), short(solver.solver), colour(at)) for at, solver in enumerate(solvers)],
        note=_note(solvers),
        shape="square",
    )


def _note(solvers: list[Residual]) -> str:
    parts = ["Line: the median sample. Band: from 10% to 90% of the samples. Dashed: the worst sample."]
    if (_all(solvers) <= 0).any():
        parts.append("Residuals of zero are drawn at the lower edge.")
    if len(solvers) < solvers[0].solvers:
        parts.append(f"{len(solvers)} of {solvers[0].solvers:,} solvers are shown: the first that have a finite residual.")
    return " ".join(parts)


def _scale(solvers: list[Residual], floor: float) -> dict[str, Any]:
    values = _raised(_all(solvers), floor)
    return log_axis(float(values.min()), float(values.max()))


def _in_words(solver: Residual) -> str:
    solved = finite(solver.solved)
    share = f", {percent(float(solved[-1]))} of the samples solved" if len(solved) else ""
    return f"the median goes from {_shown(solver.median[0])} to {_shown(solver.median[-1])}{share}"


def _traces(place: int, solver: Residual, floor: float) -> list[Trace]:
    shade, name, step = colour(place), for_plot(short(solver.solver)), listed(solver.step, 12)
    base = {"type": "scatter", "mode": "lines", "name": name, "x": step, "legendgroup": str(place)}
    silent = {**base, "hoverinfo": "skip", "line": {"width": 0, "color": shade}}
    dashed = {**silent, "line": {"color": shade, "dash": "dash", "width": 1.2}}
    known = np.isfinite(solver.evals).all()
    about = [
        [_shown(median), _shown(worst), _share(solved), *([f"{evals:,.0f}"] if known else [])]
        for median, worst, solved, evals in zip(solver.median, solver.worst, solver.solved, solver.evals, strict=True)
    ]
    hover = "%{fullData.name}, step %{x:,}<br>median <b>%{customdata[0]}</b>, worst %{customdata[1]}<br>solved %{customdata[2]}"
    hover += "<br>evaluations %{customdata[3]}" if known else ""
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
        {**silent, "y": listed(_raised(solver.low, floor))},
        {**silent, "y": listed(_raised(solver.high, floor)), "fill": "tonexty", "fillcolor": f"{shade}/0.18"},
        {**dashed, "y": listed(_raised(solver.worst, floor))},
        {**median, "y": listed(_raised(solver.median, floor))},
    ]


def _shown(value: float) -> str:
    return figure_text(float(value)) if np.isfinite(value) else "not finite"


def _share(value: float) -> str:
    return percent(float(value)) if np.isfinite(value) else "unknown"


def _static(solvers: list[Residual], floor: float, described: str) -> str:
    from matplotlib.ticker import LogLocator

    with drawing((4.3, 3.6)) as figure:
        axes = figure.subplots()
        for place, solver in enumerate(solvers):
            shade, marker = COLOURS[place], "o" if len(solver.step) <= MARKED else ""
            low, high, worst, median = (_raised(part, floor) for part in (solver.low, solver.high, solver.worst, solver.median))
            axes.fill_between(solver.step, low, high, color=shade, alpha=0.18, linewidth=0)
            axes.plot(solver.step, worst, color=shade, linestyle="--", linewidth=0.9)
            axes.plot(solver.step, median, color=shade, marker=marker, label=for_legend(short(solver.solver)))
        axes.set(xlabel="solver step", ylabel="relative residual")
        log_scale(axes)
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        figure.legend(loc="outside upper center", ncols=min(3, len(solvers)), handlelength=1.6, columnspacing=1.2)
        return as_svg(figure, described)
