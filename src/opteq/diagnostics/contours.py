"""Landscapes as figures: contours or a curve, hatched where a solve failed."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from opteq.diagnostics.drawing import COLOURS, FAILED, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from opteq.diagnostics.landscape import Landscape

__all__ = ["draw_landscape"]

Array = npt.NDArray[Any]
LEVELS, LOG_RATIO = 24, 10.0  # above this ratio of the largest to the least loss the levels are logarithmic


def draw_landscape(landscape: "Landscape") -> "Figure":
    """The contours, or the curve, of a landscape, with hatches where a solve failed."""
    axis, loss, failed = landscape.axis.numpy(), landscape.loss.numpy(), ~landscape.converged.numpy()
    with new_figure((4.4, 3.6) if loss.ndim == 2 else (4.4, 2.8)) as figure:
        axes = figure.subplots()
        (_contours if loss.ndim == 2 else _curve)(axes, axis, loss, failed)
        if failed.any():
            axes.set_title(f"hatched: not converged ({failed.mean():.1%} of the points)", fontsize=8)
    return figure


def _contours(axes: "Axes", axis: Array, loss: Array, failed: Array) -> None:
    shown = np.ma.masked_invalid(loss)
    axes.set(xlabel="first direction", ylabel="second direction", aspect="equal", xlim=axis[[0, -1]], ylim=axis[[0, -1]])
    axes.plot(0, 0, marker="+", color="white", markeredgecolor="black", zorder=5)
    if shown.count():
        levels = contour_levels(shown.compressed())
        scale: Any = "log" if _is_log(shown.compressed()) else "linear"
        filled = axes.contourf(axis, axis, shown.T, levels=levels, norm=scale, cmap="viridis", extend="both")
        axes.contour(filled, levels=levels[::3], colors="white", linewidths=0.4)
        axes.figure.colorbar(filled, ax=axes, label="loss", format="%.3g")
    hatched = np.ma.masked_array(np.ones_like(loss), mask=~failed).T
    if failed.any():
        axes.pcolor(axis, axis, hatched, shading="nearest", facecolor="none", edgecolor=FAILED, linewidth=0, hatch="//////")


def _curve(axes: "Axes", axis: Array, loss: Array, failed: Array) -> None:
    axes.plot(axis, np.where(np.isfinite(loss), loss, np.nan), color=COLOURS[0], marker=".", markersize=3, linewidth=1.2)
    axes.set(xlabel="direction", ylabel="loss", xlim=axis[[0, -1]])
    if np.isfinite(loss).any() and _is_log(loss[np.isfinite(loss)]):
        axes.set_yscale("log")
    half = (axis[1] - axis[0]) / 2
    for place in axis[failed]:
        axes.axvspan(place - half, place + half, facecolor="none", edgecolor=FAILED, linewidth=0, hatch="//////")


def _is_log(finite: Array) -> bool:
    return bool(finite.min() > 0 and finite.max() / LOG_RATIO > finite.min())


def contour_levels(finite: Array) -> Array:
    """Increasing levels from the least to the largest value: in equal ratios where the range is wide, else in equal steps."""
    low, high = float(finite.min()), float(finite.max())
    if not high > low:
        high = low + max(abs(low), 1.0) * 1e-3
    return np.geomspace(low, high, LEVELS) if _is_log(finite) else np.linspace(low, high, LEVELS)
