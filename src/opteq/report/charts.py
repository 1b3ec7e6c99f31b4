"""A chart of the page: a drawing of matplotlib for paper and for pages without scripts, and the same for plotly."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from opteq.report.svg import GRID, INK, for_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chart", "Key", "Trace", "as_svg", "axis", "colour", "drawing", "listed", "log_axis", "log_scale"]

Trace: TypeAlias = dict[str, Any]
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
    "hatch.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "text.parse_math": False,  # names of runs are no formulas
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "opteq",  # the same file at every run
}


@dataclass(frozen=True)
class Key:
    """An entry of a legend: the traces of the group are switched on and off by it. `line`: a class of the page's style."""

    group: str
    label: str
    color: str
    line: str = "solid"


@dataclass(frozen=True)
class Chart:
    """One figure of the page. `runs`: to which run each trace belongs, None for all; colours are those of `colour`.

    `described` says in words what is to be seen; `shape` is "wide" or "square". Traces belong to their `legendgroup`.
    """

    name: str
    title: str
    described: str
    svg: str
    traces: list[Trace]
    layout: dict[str, Any]
    runs: Sequence[int | None]
    legend: list[Key] = field(default_factory=list)
    note: str = ""
    shape: str = "wide"


@contextmanager
def drawing(size: tuple[float, float]) -> "Iterator[Figure]":
    """A figure of so many inches in the style of the page; it is to be saved inside, with `as_svg`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name with characters that the font lacks: the page's font may have them
        yield Figure(figsize=size, layout="constrained")


def as_svg(figure: "Figure", described: str) -> str:
    """The figure as an element of the page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return for_page(file.getvalue(), described)


def colour(place: int) -> str:
    """The colour of the place in the palette, as plotly gets it: the page says what it looks like in light and in dark."""
    return f"var(--c{place % 10})"


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis from low to high, with ticks at 1, 2, 5 or at powers of ten; for still more, plotly knows."""
    ticks = ((150, {"dtick": "D2", "tickformat": "~g"}), (1e8, {"dtick": 1}))
    return {"type": "log", **next((found for ratio, found in ticks if high / ratio < low), {})}


def log_scale(axes: "Axes") -> None:
    """The same for matplotlib, with plain numbers at its ticks."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def listed(values: Sequence[float] | npt.NDArray[Any], digits: int = 6) -> list[Any]:
    """Numbers for JSON, null where there is none; nested as the array is."""
    array = np.asarray(values, dtype=float)
    if array.ndim > 1:
        return [listed(part, digits) for part in array]
    return [_plain(value, digits) for value in array.tolist()]


def _plain(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{digits}g}")


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis of plotly."""
    return {"title": {"text": title}, **options}
