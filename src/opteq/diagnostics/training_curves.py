"""The curves of a training: metrics, solver health and what the theory speaks of, over its steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np

from opteq.checks import invalid
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.diagnostics.finding import Columns, Finding
from opteq.diagnostics.panels import PANELS, Curve, Panel, Series, curves, number, ranges_widely, series_curves
from opteq.runs import Run
from opteq.theory.certificates import Monitor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["TrainingCurves", "training_curves"]

WIDTH, HEIGHT = 3.15, 2.2  # inches of one panel: 8 cm wide
EVENTS = 20  # lines for events, at most
MARKED = 40  # a curve of no more points has markers: it may be a single one
NAMED = 8  # curves with a name and a colour of their own; of more, the colours are a scale, and three have their names
LONGEST, ROW = 36, 60  # characters of a name, and of a row of names


@runtime_checkable
class HasHistory(Protocol):
    """What `fit` gives: its rows of metrics are `history`."""

    history: list[dict[str, Any]]


Source: TypeAlias = str | Path | Run | Monitor | HasHistory | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class TrainingCurves(Finding):
    """The rows of a training, of the kinds "step", "epoch", "monitor" and "event", as panels of curves; others are left out.

    Examples:
        >>> from opteq.diagnostics import training_curves
        >>> rows = [{"kind": "epoch", "step": 10 * epoch, "train_loss": 1 / epoch} for epoch in (1, 2)]
        >>> columns = training_curves(rows).columns()
        >>> columns["step"].tolist(), columns["value"].tolist()
        ([10, 20], [1.0, 0.5])
    """

    name: ClassVar[str] = "curves"
    rows: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Those for which there is a number to draw."""
        return tuple(panel for panel in PANELS if curves(self.rows, panel))

    def columns(self) -> Columns:
        """One row for each number: the panel, the series in it, the step, and the value."""
        found = [(panel.title, curve) for panel in self.panels for curve in curves(self.rows, panel)]
        kept = [np.isfinite(curve.y) for _, curve in found]
        counts = [int(finite.sum()) for finite in kept]
        steps = [curve.x[finite].astype(int) for (_, curve), finite in zip(found, kept, strict=True)]
        values = [curve.y[finite] for (_, curve), finite in zip(found, kept, strict=True)]
        return {
            "panel": np.repeat(np.array([title for title, _ in found], dtype=str), counts),
            "series": np.repeat(np.array([curve.label for _, curve in found], dtype=str), counts),
            "step": np.concatenate([np.empty(0, dtype=int), *steps]),
            "value": np.concatenate([np.empty(0), *values]),
        }

    def figure(self) -> "Figure":
        """All panels, two in a row."""
        return self._drawn(self.panels)

    def figure_of(self, panel: Panel | str) -> "Figure":
        """One panel, 8 cm wide: a Panel, or the title of one of `panels`."""
        titles = [known.title for known in self.panels]
        if isinstance(panel, str) and panel not in titles:
            raise ValueError(invalid(self, "panel", f"a Panel or one of {', '.join(map(repr, titles))}", panel))
        return self._drawn([self.panels[titles.index(panel)] if isinstance(panel, str) else panel])

    def _drawn(self, panels: Iterable[Panel]) -> "Figure":
        shown = list(panels)
        columns = min(2, max(1, len(shown)))
        rows = -(-len(shown) // columns)
        with new_figure((WIDTH * columns, HEIGHT * max(1, rows))) as figure:
            if not shown:
                figure.text(0.5, 0.5, "no numbers yet", ha="center", va="center")
            for place, panel in enumerate(shown, 1):
                _draw(figure.add_subplot(rows, columns, place), panel, self.rows)
        return figure


def training_curves(source: Source) -> TrainingCurves:
    """The curves of a training: loss, solver steps, norms, alpha, and what a Monitor recorded, whatever of them there is.

    `source`: a run folder (also while it is written), what `fit` gave, a Monitor, or a list of rows of metrics.

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import training_curves
        >>> from opteq.training import TrainConfig, fit
        >>> data = torch.randn(32, 4), torch.randint(2, (32,))
        >>> result = fit(torch.nn.Linear(4, 2), data, config=TrainConfig(epochs=2, batch_size=16), verbose=False)
        >>> "Loss" in [panel.title for panel in training_curves(result).panels]
        True
    """
    return TrainingCurves(tuple(_rows(source)))


def _rows(source: Source) -> Iterable[Mapping[str, Any]]:
    if isinstance(source, (str, Path)):
        return Run.read(source).metrics()
    if isinstance(source, (Run, Monitor)):
        return source.metrics()
    rows = source.history if isinstance(source, HasHistory) else source
    expected = "a run folder, what fit gave, a Monitor, or a list of rows of metrics"
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise TypeError(invalid("training_curves", "source", expected, type(source).__name__))
    found = list(rows)
    for row in found:
        if not isinstance(row, Mapping):
            raise TypeError(invalid("training_curves", "source", expected, f"a list with {row!r}"))
    return found


def _draw(axes: "Axes", panel: Panel, rows: tuple[Mapping[str, Any], ...]) -> None:
    found = [(series, curve) for series in panel.series for curve in series_curves(rows, series)]
    last = len(found) - 1
    named = range(len(found)) if len(found) <= NAMED else (0, last // 2, last)
    for place, ((series, curve), colour) in enumerate(zip(found, _colours(len(found)), strict=True)):
        label = _label(curve.label) if place in named else None
        marker = "." if len(curve.x) <= MARKED else ""
        axes.plot(curve.x, curve.y, color=colour, marker=marker, markersize=3.5, label=label, **_look(series))
    _scale(axes, panel, [curve for _, curve in found])
    events = [number(row.get("step")) for row in rows if row.get("kind") == "event"]
    known = [step for step in events if step is not None]
    name = "event" if len(known) <= EVENTS else f"event, the first {EVENTS}"
    for place, step in enumerate(known[:EVENTS]):
        axes.axvline(step, color="0.45", linewidth=0.8, linestyle=":", label=None if place else name)
    _head(axes, panel.title)


def _label(text: str) -> str:
    """Short, and not taken for a formula."""
    return (text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...").replace("$", r"\$")


def _colours(count: int) -> list[Any]:
    if count <= NAMED:
        return list(COLOURS[:count])
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.9, count)))


def _look(series: Series) -> dict[str, Any]:
    return {"linestyle": series.line, "linewidth": 0.7 if series.faint else 1.1, "alpha": 0.6 if series.faint else 1.0}


def _scale(axes: "Axes", panel: Panel, drawn: list[Curve]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    values = np.concatenate([np.empty(0), *(curve.y[np.isfinite(curve.y)] for curve in drawn)])
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    if panel.scale == "log" and ranges_widely(drawn):
        axes.set_yscale("log", nonpositive="mask")
        return
    axes.yaxis.set_major_formatter(PercentFormatter(1.0) if panel.scale == "share" else "{x:g}")
    low, high = axes.get_ylim()
    if panel.scale == "zero":
        bottom, top = values.min(initial=0.0), values.max(initial=0.0)
        axes.set_ylim(bottom, max(high, top + 0.05 * (top - bottom)))
    if panel.scale == "share":  # no ticks beyond 0% and 100%
        axes.set_ylim(max(low, values.min(initial=-0.005)), min(high, values.max(initial=1.005)))


def _head(axes: "Axes", title: str) -> None:
    """The title, and below it, above the data, what each line is."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        axes.set_title(title, loc="left", fontsize="medium")
        return
    columns = max(1, min(4, ROW // (max(map(len, labels)) + 6)))
    axes.legend(
        handles, labels, title=title, alignment="left", loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, borderpad=0.2,
        ncols=columns, frameon=False, fontsize="small", handlelength=1.6, columnspacing=1.0, labelspacing=0.2,
    )  # fmt: skip
