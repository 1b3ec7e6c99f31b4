"""What is drawn of a training: panels of metrics over its steps, the same for figures, reports and TensorBoard."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "METRICS",
    "PANELS",
    "SOLVER",
    "THEORY",
    "Curve",
    "Panel",
    "Series",
    "curves",
    "number",
    "ranges_widely",
    "series_curves",
]

Array = npt.NDArray[np.float64]
Row = Mapping[str, Any]
LARGEST = 1e100  # larger values are taken for infinite: axes overflow
LOG_RATIO = 20.0  # above this ratio of the largest to the least value, a logarithmic axis
MOST = 50  # curves of one series: of so many layers


@dataclass(frozen=True)
class Series:
    """One metric: `key` in the rows of a kind: of each step, of each epoch, or of a Monitor.

    With `every`, all keys that begin with `key`. A value that is a list or a dict has a curve for each of its entries.
    """

    label: str
    kind: Literal["step", "epoch", "monitor"]
    key: str
    line: str = "-"
    faint: bool = False
    every: bool = False


@dataclass(frozen=True)
class Panel:
    """One figure. `scale`: "log" where the values are positive and range widely; "zero" begins there; "share" is in percent.

    Examples:
        >>> from opteq.diagnostics import training_curves
        >>> rows = [{"kind": "epoch", "step": 10 * epoch, "train_loss": 1 / epoch} for epoch in (1, 2)]
        >>> [(panel.title, panel.scale) for panel in training_curves(rows).panels]
        [('Loss', 'log')]
    """

    title: str
    series: tuple[Series, ...]
    scale: Literal["log", "zero", "share", "linear"] = "log"


class Curve(NamedTuple):
    """y over the steps x; NaN is a gap."""

    label: str
    x: Array
    y: Array


def curves(rows: Iterable[Row], panel: Panel) -> list[Curve]:
    """The curves of a panel, from all rows of a training: none for what the rows do not have."""
    rows = list(rows)
    return [curve for series in panel.series for curve in series_curves(rows, series)]


def series_curves(rows: Iterable[Row], series: Series) -> list[Curve]:
    """The curves of one series that have a number: one, or one for each name; a row without the name is a gap there."""
    own = [row for row in rows if row.get("kind") == series.kind and (series.every or series.key in row)]
    if not series.every and all(row[series.key] is None or isinstance(row[series.key], (int, float)) for row in own):
        return _single(own, series)
    found = [(number(row.get("step")), _entries(row, series)) for row in own]
    points = [(step, entries) for step, entries in found if step is not None and entries]
    names = list(dict.fromkeys(name for _, entries in points for name in entries))[:MOST]
    x = np.array([step for step, _ in points], dtype=float)
    drawn = []
    for name, short in zip(names, _short(names), strict=True):
        values = (number(entries.get(name)) for _, entries in points)
        y = np.array([np.nan if value is None else value for value in values], dtype=float)
        if np.isfinite(y).any():
            drawn.append(Curve(f"{series.label} {short}".strip(), x, y))
    return drawn


def _single(rows: list[Row], series: Series) -> list[Curve]:
    """The curve of plain numbers: there may be hundreds of thousands."""
    x, y = (np.array([number(row.get(key)) for row in rows], dtype=float) for key in ("step", series.key))
    known = ~np.isnan(x)
    return [Curve(series.label, x[known], y[known])] if np.isfinite(y[known]).any() else []


def number(value: Any) -> float | None:
    """The value if it is a number that can be drawn; else None: null, NaN, infinity, text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
        return None
    return float(value)


def ranges_widely(drawn: Iterable[Curve]) -> bool:
    """Whether a logarithmic axis suits all of the curves: one may begin at 0, and is drawn from its next value on."""
    kept = [np.trim_zeros(curve.y[np.isfinite(curve.y)], "f") for curve in drawn]
    values = np.concatenate([np.empty(0), *kept])
    return bool(kept and all(map(len, kept)) and values.min() > 0 and values.max() / LOG_RATIO > values.min())


def _entries(row: Row, series: Series) -> dict[str, Any]:
    """The values of a series by name: a single one has none; those of a list have their places, from 1."""
    if series.every:
        return {str(key)[len(series.key) :]: value for key, value in row.items() if str(key).startswith(series.key)}
    value = row[series.key]
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(place): part for place, part in enumerate(value, 1)}
    return {"": value}


def _short(names: list[str]) -> list[str]:
    """The names of layers without what all begin with, but for its last part: "model.layers.0", ".1" become "layers.0", ".1"."""
    parts = [name.split(".") for name in names]
    shared = list(takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))
    return [".".join(part[max(len(shared) - 1, 0) :]) for part in parts]


METRICS = (
    Panel(
        "Loss",
        (
            Series("validation", "epoch", "valid_loss"),
            Series("training", "epoch", "train_loss", "--"),
            Series("each step", "step", "loss", faint=True),
        ),
    ),
    Panel(
        "Accuracy",
        (
            Series("validation", "epoch", "valid_accuracy"),
            Series("training", "epoch", "train_accuracy", "--"),
            Series("each step", "step", "accuracy", faint=True),
        ),
        "share",
    ),
    Panel(
        "Mean intersection over union",
        (Series("validation", "epoch", "valid_miou"), Series("training", "epoch", "train_miou", "--")),
        "share",
    ),
    Panel("Learning rate", (Series("learning rate", "step", "lr"),)),
)
SOLVER = (
    Panel(
        "Mean solver steps",
        (
            Series("validation", "epoch", "valid_solver_steps"),
            Series("training", "step", "solver_steps", faint=True),
            Series("backward", "step", "backward_steps", ":"),
        ),
        "zero",
    ),
    Panel(
        "Share of samples that converged",
        (Series("validation", "epoch", "valid_converged"), Series("training", "step", "converged", faint=True)),
        "share",
    ),
    Panel("Gradient norm", (Series("gradient norm", "step", "grad_norm", faint=True),)),
    Panel("Alpha of each layer", (Series("alpha", "epoch", "alpha"),), "linear"),
)
THEORY = (
    Panel("Loss and its guaranteed bound", (Series("loss", "monitor", "loss"), Series("bound", "monitor", "bound", "--"))),
    Panel(
        "Spectral norms",
        (
            Series("norm", "monitor", "norm ", every=True),
            Series("gamma norm A", "monitor", "gamma norm A", "--"),
            Series("norm", "epoch", "norms"),
        ),
    ),
    Panel(
        "Polyak-Lojasiewicz constant",
        (Series("measured", "monitor", "pl"), Series("least eigenvalue of the kernel", "monitor", "ntk_min", "--")),
    ),
    Panel("Drift of the tangent kernel", (Series("drift", "monitor", "kernel_drift"),), "zero"),
    Panel("Change of activation patterns", (Series("change", "monitor", "pattern_change"),), "share"),
    Panel("Distance moved", (Series("moved", "monitor", "moved ", every=True),)),
    Panel("Solver steps on the monitored samples", (Series("solver steps", "monitor", "solver_steps"),), "zero"),
)
PANELS = (*METRICS, *SOLVER, *THEORY)
