"""Landscapes as figures: contours or a curve, hatched where a solve failed."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from opteq.diagnostics.drawing import COLOURS, FAILED, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opteq.diagnostics.basin import Basin
    from opteq.diagnostics.landscape import Landscape

__all__ = ["contour_levels", "draw_landscape", "is_log"]

Array = npt.NDArray[Any]
_HALO = (("black", 2.2), ("white", 1.2))  # a line that is seen on every ground
LEVELS, LOG_RATIO = 24, 10.0  # above this ratio of the largest to the least loss the levels are logarithmic


def draw_landscape(landscape: "Landscape", basin: "Basin | None" = None) -> "Figure":
    """The contours, or the curve, of a landscape, with hatches where a solve failed, and the border of a basin."""
    axis, loss, failed = landscape.axis.numpy(), landscape.loss.numpy(), ~landscape.converged.numpy()
    with new_figure((3.4, 2.9) if loss.ndim == 2 else (3.4, 2.2)) as figure:
        if loss.ndim == 2:
            figure.set_layout_engine("compressed")  # the scale as high as the square
        axes = figure.subplots()
        (_contours if loss.ndim == 2 else _curve)(axes, axis, loss, failed)
        titles = [f"hatched: not converged ({failed.mean():.1%} of the points)"] if failed.any() else []
        if basin is not None:
            (_border if loss.ndim == 2 else _interval)(axes, basin)
            titles.append(_words(basin, "diameter" if loss.ndim == 2 else "width"))
        axes.set_title("\n".join(titles), fontsize=8)
    return figure


def _words(basin: "Basin", measure: str) -> str:
    """What the line around a basin means."""
    least = "at least " if basin.at_edge or basin.at_failure else ""
    return f"line: loss = {basin.level:.3g}, {measure} {least}{basin.diameter:.3g}"


def _border(axes: "Axes", basin: "Basin") -> None:
    from matplotlib.collections import LineCollection

    for colour, width in _HALO:
        axes.add_collection(LineCollection(list(basin.outline), colors=colour, linewidths=width, capstyle="round", zorder=4))


def _interval(axes: "Axes", basin: "Basin") -> None:
    axes.axhline(basin.level, color="0.4", linewidth=0.8, linestyle="--", zorder=1)
    axes.plot(basin.outline, [basin.level] * len(basin.outline), linestyle="none", marker="|", color="black", zorder=4)


def _contours(axes: "Axes", axis: Array, loss: Array, failed: Array) -> None:
    axes.set(xlabel="first direction", ylabel="second direction", aspect="equal", xlim=axis[[0, -1]], ylim=axis[[0, -1]])
    axes.locator_params(nbins=5)
    for colour, width in _HALO:
        axes.plot(0, 0, marker="+", color=colour, markersize=6 + width / 2, markeredgewidth=width, zorder=5)
    shown = np.ma.masked_invalid(loss)
    if shown.count():
        _fill(axes, axis, shown)
    hatched = np.ma.masked_array(np.ones_like(loss), mask=~failed).T
    if failed.any():
        axes.pcolor(axis, axis, hatched, shading="nearest", facecolor="none", edgecolor=FAILED, linewidth=0, hatch="//////")


def _fill(axes: "Axes", axis: Array, shown: Any) -> None:
    """The contours and their colours."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    levels, log = contour_levels(shown.compressed()), is_log(shown.compressed())
    scale: Any = "log" if log else "linear"
    filled = axes.contourf(axis, axis, shown.T, levels=levels, norm=scale, cmap="viridis")
    axes.contour(filled, levels=levels[::3], colors="white", linewidths=0.4)
    bar = axes.figure.colorbar(filled, ax=axes, label="loss", format="%.3g")
    bar.set_ticks(LogLocator(subs=_subs(levels)) if log else MaxNLocator(6))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _subs(levels: Array) -> tuple[float, ...]:
    """The leading digits of the ticks of a logarithmic scale: the fewer, the wider it is."""
    return (1.0, 2.0, 5.0) if levels[-1] / levels[0] < 1e4 else (1.0,)


def _curve(axes: "Axes", axis: Array, loss: Array, failed: Array) -> None:
    axes.plot(axis, np.where(np.isfinite(loss), loss, np.nan), color=COLOURS[0], marker=".", markersize=3, linewidth=1.2)
    axes.set(xlabel="direction", ylabel="loss", xlim=axis[[0, -1]])
    if np.isfinite(loss).any() and is_log(loss[np.isfinite(loss)]):
        axes.set_yscale("log")
    half = (axis[1] - axis[0]) / 2
    for place in axis[failed]:
        axes.axvspan(place - half, place + half, facecolor="none", edgecolor=FAILED, linewidth=0, hatch="//////")


def is_log(finite: Array) -> bool:
    """Whether the values range so widely that a logarithmic scale suits them."""
    return bool(finite.min() > 0 and finite.max() / LOG_RATIO > finite.min())


def contour_levels(finite: Array) -> Array:
    """Increasing levels from the least to the largest value: in equal ratios where the range is wide, else in equal steps."""
    low, high = float(finite.min()), float(finite.max())
    if not high > low:
        high = low + max(abs(low), 1.0) * 1e-3
    return np.geomspace(low, high, LEVELS) if is_log(finite) else np.linspace(low, high, LEVELS)
