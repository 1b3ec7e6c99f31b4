"""The charts of spectra: eigenvalues of the Jacobian at the equilibrium, and of the Hessian of the loss."""

import numpy as np

from opteq.report.charts import Chart, Trace, as_svg, axis, colour, drawing, listed
from opteq.report.findings import Eigenvalues, Spectrum
from opteq.report.reading import RunData
from opteq.report.svg import COLOURS, INK
from opteq.report.text import clean, for_plot, short
from opteq.report.words import figure_text

__all__ = ["hessian_charts", "jacobian_charts"]

EIGENVALUES = 4_000  # of all runs: the page must stay small
_X, _Y = np.cos(np.linspace(0, 2 * np.pi, 121)), np.sin(np.linspace(0, 2 * np.pi, 121))  # the unit circle


def jacobian_charts(runs: list[RunData]) -> list[Chart]:
    """The eigenvalues of all runs in the complex plane, with the unit circle; none without a run that has them."""
    found = [(place, run.name, run.findings.jacobian) for place, run in enumerate(runs) if run.findings.jacobian is not None]
    if not found:
        return []
    radii = "; ".join(f"{name}: the largest modulus is {_modulus(part.modulus.max())}" for _, name, part in found)
    described = clean(f"Eigenvalues of the Jacobian at the equilibrium. {radii}.")
    parts = [(place, name, part.thinned(EIGENVALUES // len(found))) for place, name, part in found]
    notes = [
        _radius_words(name, part, len(thin.real), len(runs) > 1) for (_, name, part), (_, _, thin) in zip(found, parts, strict=True)
    ]
    return [
        Chart(
            name="jacobian",
            title="Eigenvalues of the Jacobian at the equilibrium",
            described=described,
            svg=_static_circle(parts, described),
            traces=[_circle(), *(_points(*part) for part in parts)],
            layout={
                "xaxis": axis("real part", zeroline=True, constrain="domain"),
                "yaxis": axis("imaginary part", zeroline=True, scaleanchor="x", constrain="domain"),
            },
            runs=[None, *(place for place, _, _ in parts)],
            note=" ".join(notes),
            shape="square",
        )
    ]


def _radius_words(name: str, part: Spectrum, drawn: int, several: bool) -> str:
    where, largest = f"{short(name)}: spectral radius" if several else "Spectral radius", float(part.modulus.max())
    inside = "inside the unit circle" if largest < 1 else "not below 1"
    if part.unsure:
        count = f"{part.unsure:,} of {part.count:,} eigenvalues are not converged (crosses) or not finite"
        words = f"{where} unknown: {count}. The largest modulus found is {_modulus(largest)}, {inside}."
    else:
        promise = ": near the equilibrium the iteration converges" if largest < 1 else ""
        words = f"{where} {_modulus(largest)}, {inside}{promise}."
    return words if drawn == len(part.real) else f"{words} {drawn:,} of {len(part.real):,} are drawn."


def _modulus(value: float) -> str:
    """What is below 1 is not rounded to it."""
    text = figure_text(float(value))
    return f"1 - {1 - value:.2g}" if value < 1 and float(text) >= 1 else text


def _doubts(part: Spectrum | Eigenvalues) -> list[str]:
    """What the hover adds for each eigenvalue."""
    return ["" if good else "<br>NOT converged" for good in part.converged]


def _circle() -> Trace:
    line = {"color": "var(--soft)", "width": 1.2, "dash": "dash"}
    return {"type": "scatter", "mode": "lines", "x": listed(_X, 4), "y": listed(_Y, 4), "line": line, "hoverinfo": "skip"}


def _points(place: int, name: str, part: Spectrum) -> Trace:
    symbols = ["circle" if good else "x" for good in part.converged]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": for_plot(name),
        "x": listed(part.real),
        "y": listed(part.imag),
        "customdata": [
            [for_plot(short(s)), _modulus(m), d] for s, m, d in zip(part.sample, part.modulus, _doubts(part), strict=True)
        ],
        "hovertemplate": "%{fullData.name}, sample %{customdata[0]}<br>modulus <b>%{customdata[1]}</b>%{customdata[2]}"
        "<br>(%{x:.4~g}, %{y:.4~g})<extra></extra>",
        "marker": {"color": colour(place), "size": 6, "opacity": 0.75, "symbol": symbols},
    }


def _static_circle(parts: list[tuple[int, str, Spectrum]], described: str) -> str:
    with drawing((4.3, 3.6)) as figure:
        axes = figure.subplots()
        axes.plot(_X, _Y, color=INK, linestyle="--", linewidth=0.8)
        for place, _, part in parts:
            for marker, chosen in (("o", part.converged), ("x", ~part.converged)):
                shade = COLOURS[place % len(COLOURS)]
                axes.plot(part.real[chosen], part.imag[chosen], marker, color=shade, markersize=3.5, alpha=0.75)
        axes.set(xlabel="real part", ylabel="imaginary part", aspect="equal")
        return as_svg(figure, described)


def hessian_charts(runs: list[RunData]) -> list[Chart]:
    """Some eigenvalues of the Hessian, in bars side by side."""
    parts = [(place, run.name, run.findings.hessian) for place, run in enumerate(runs) if run.findings.hessian is not None]
    if not parts:
        return []
    largest = "; ".join(f"{name}: the largest is {figure_text(part.largest)}" for _, name, part in parts)
    described = clean(f"Eigenvalues of the Hessian of the loss. {largest}.")
    return [
        Chart(
            name="hessian",
            title="Eigenvalues of the Hessian",
            described=described,
            svg=_static_bars(parts, described),
            traces=[_bars(*part) for part in parts],
            layout={
                "xaxis": axis("index", dtick=1 if max(len(part.value) for _, _, part in parts) <= 20 else None),
                "yaxis": axis("eigenvalue"),
                "barmode": "group",
            },
            runs=[place for place, _, _ in parts],
            note=_bar_words([part for _, _, part in parts]),
        )
    ]


def _bar_words(parts: list[Eigenvalues]) -> str:
    sentences = ["Lines on the bars: bounds on the errors."]
    if unknown := sum(int(np.isnan(part.error).sum()) for part in parts):
        sentences.append(f"Unknown bounds: {unknown:,}.")
    if any(not part.converged.all() for part in parts):
        sentences.append("Pale bars are not converged.")
    if (shown := sum(len(part.value) for part in parts)) < (count := sum(part.count for part in parts)):
        sentences.append(f"{shown:,} of {count:,} eigenvalues are shown: the first that are finite.")
    return " ".join(sentences)


def _bars(place: int, name: str, part: Eigenvalues) -> Trace:
    return {
        "type": "bar",
        "x": list(range(1, len(part.value) + 1)),
        "y": listed(part.value),
        "name": for_plot(name),
        "customdata": [
            [figure_text(float(e)) if np.isfinite(e) else "unknown", d] for e, d in zip(part.error, _doubts(part), strict=True)
        ],
        "hovertemplate": "%{fullData.name}<br>eigenvalue %{x}: <b>%{y:.5~g}</b> ± %{customdata[0]}%{customdata[1]}<extra></extra>",
        "error_y": {"type": "data", "array": listed(part.error), "color": "var(--ink)", "thickness": 1.2, "width": 3},
        "marker": {"color": colour(place), "opacity": [1 if good else 0.4 for good in part.converged]},
    }


def _static_bars(parts: list[tuple[int, str, Eigenvalues]], described: str) -> str:
    from matplotlib.ticker import MaxNLocator

    width = 0.8 / len(parts)
    with drawing((4.3, 2.8)) as figure:
        axes = figure.subplots()
        axes.grid(False, axis="x")
        for at, (place, _, part) in enumerate(parts):
            x = np.arange(1, len(part.value) + 1) - 0.4 + width * (at + 0.5)
            shade = COLOURS[place % len(COLOURS)]
            for good, alpha in ((part.converged, 1.0), (~part.converged, 0.4)):
                axes.bar(x[good], part.value[good], width, color=shade, alpha=alpha)
            axes.errorbar(x, part.value, part.error, fmt="none", ecolor=INK, elinewidth=0.8)
        axes.set(xlabel="index", ylabel="eigenvalue")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return as_svg(figure, described)
