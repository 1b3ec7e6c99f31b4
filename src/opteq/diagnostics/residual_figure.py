"""Residual curves as figures."""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from opteq.diagnostics.drawing import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opteq.diagnostics.residuals import ResidualCurve, SolverCurve

__all__ = ["draw_residuals"]

Array = npt.NDArray[Any]


def draw_residuals(found: "ResidualCurve", over: Literal["steps", "evals"]) -> "Figure":
    """For each solver the median, the band from 10% to 90% of the samples, and the worst, on a logarithmic scale."""
    floor = _floor(found)
    columns = 2 if max(len(_label(*item)) for item in found.curves.items()) < 36 else 1
    rows = -(-len(found.curves) // columns)
    with new_figure((3.4, 2.3 + 0.16 * rows)) as figure:
        axes = figure.subplots()
        for place, (name, curve) in enumerate(found.curves.items()):
            _draw(axes, _label(name, curve), curve, over, floor, COLOURS[place % len(COLOURS)])
        if found.stop.rtol > 0:
            axes.axhline(found.stop.rtol, color="black", linewidth=0.6, linestyle=":", zorder=1)
            edge = axes.get_yaxis_transform()  # x from 0 to 1 along the axis, y in the units of the data
            axes.text(0.01, found.stop.rtol, "tolerance", transform=edge, va="bottom", fontsize=7)
        axes.set(xlabel="step" if over == "steps" else "evaluations of f", yscale="log")
        axes.set_ylabel("true residual |f(z) - z| / |f(z)|")
        axes.locator_params(axis="x", integer=True)
        axes.set_title("median, 10% to 90% of the samples, worst dashed", fontsize=7)
        figure.legend(loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
    return figure


def _floor(found: "ResidualCurve") -> float:
    """Where residuals of exactly zero are drawn: below all others."""
    values = np.concatenate([curve.residual.numpy().ravel() for curve in found.curves.values()])
    positive = values[(values > 0) & np.isfinite(values)]
    least = min([*([positive.min()] if positive.size else []), *([found.stop.rtol] if found.stop.rtol > 0 else [])], default=1.0)
    return float(least) / 3


def _label(name: str, curve: "SolverCurve") -> str:
    share = float(curve.solved[-1])
    return f"{name}: {int(curve.evals[-1])} evaluations" + (f", {share:.0%} solved" if share < 1 else "")


def _draw(axes: "Axes", label: str, curve: "SolverCurve", over: str, floor: float, colour: str) -> None:
    place = curve.evals.numpy() if over == "evals" else np.arange(len(curve.evals))
    low, median, high, worst = (_shown(curve.quantile(share).numpy(), floor) for share in (0.1, 0.5, 0.9, 1.0))
    axes.plot(place, median, color=colour, linewidth=1.2, label=label, marker="." if len(place) == 1 else "")
    axes.fill_between(place, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(place, worst, color=colour, linewidth=0.5, linestyle="--")


def _shown(values: Array, floor: float) -> Array:
    return np.where(np.isfinite(values), np.maximum(values, floor), np.nan)
