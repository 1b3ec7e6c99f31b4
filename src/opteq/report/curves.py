"""Curves of metrics: taken from rows, thinned so that spikes and gaps stay."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from opteq.report.reading import Row, number

__all__ = ["Curve", "curve", "thinned"]

Array = npt.NDArray[np.float64]
POINTS = 300  # of a curve, about


@dataclass(frozen=True, eq=False)
class Curve:
    """y over the steps x; NaN is a gap."""

    x: Array
    y: Array

    @property
    def finite(self) -> Array:
        """The values without gaps."""
        values: Array = self.y[np.isfinite(self.y)]
        return values


def curve(rows: list[Row], key: str, index: int | None = None) -> Curve | None:
    """The values under the key (or of its list, at the index) over "step"; None without a single number."""
    points = [(number(row.get("step")), number(_at(row.get(key), index))) for row in rows if key in row]
    x = np.array([step for step, _ in points if step is not None], dtype=float)
    y = np.array([np.nan if value is None else value for step, value in points if step is not None], dtype=float)
    return thinned(Curve(x, y)) if np.isfinite(y).any() else None


def _at(value: Any, index: int | None) -> Any:
    if index is None:
        return value
    return value[index] if isinstance(value, list) and index < len(value) else None


def thinned(whole: Curve, points: int = POINTS) -> Curve:
    """The least and the largest of each of points/2 stretches, a gap where one held none or was cut, the first and the last."""
    if len(whole.x) <= points:
        return whole
    kept = {0, len(whole.x) - 1}
    for stretch in np.array_split(np.arange(len(whole.x)), points // 2):
        y = whole.y[stretch]
        gaps = stretch[np.isnan(y)]
        kept.update(gaps[:1].tolist())
        if len(gaps) < len(stretch):
            kept.update((int(stretch[np.nanargmin(y)]), int(stretch[np.nanargmax(y)])))
    chosen = np.array(sorted(kept))
    return Curve(whole.x[chosen], whole.y[chosen])
