"""Thinning curves so that spikes and gaps stay."""

import numpy as np
import numpy.typing as npt

from opteq.diagnostics.panels import Curve

__all__ = ["finite", "spread", "thinned"]

Array = npt.NDArray[np.float64]


def finite(values: Array) -> Array:
    """The values without gaps."""
    kept: Array = values[np.isfinite(values)]
    return kept


def spread(size: int, most: int) -> npt.NDArray[np.intp]:
    """Places from the first to the last, at most so many."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.intp))


def thinned(whole: Curve, points: int) -> Curve:
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
    return Curve(whole.label, whole.x[chosen], whole.y[chosen])
