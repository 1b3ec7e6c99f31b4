"""What an experiment says of a claim: what was measured, what it must be, and whether that shows the claim."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

__all__ = [
    "CLEAR", "Measured", "at_least", "at_most", "claim", "clear_gain", "clearness", "column", "curve", "gain", "judged",
    "mean_error", "ratios", "untestable", "verdict", "within",
]  # fmt: skip

CLEAR = 2.0  # standard errors that an effect must exceed
Measured: TypeAlias = dict[str, dict[str, Any]]  # by name: the value, what it must be, and whether it is


def at_most(values: float | Sequence[float], limit: float) -> dict[str, Any]:
    """A measurement, the largest of the values, that must not exceed the limit; NaN does."""
    value = float(np.max(values))  # unlike max, it does not lose a NaN
    return {"value": value, "at_most": limit, "shown": value <= limit}


def at_least(values: float | Sequence[float], limit: float) -> dict[str, Any]:
    """A measurement, the least of the values, that must reach the limit; NaN does not."""
    value = float(np.min(values))
    return {"value": value, "at_least": limit, "shown": value >= limit}


def within(value: float, low: float, high: float) -> dict[str, Any]:
    """A measurement that must be in [low, high]; NaN is not."""
    return {"value": float(value), "at_least": low, "at_most": high, "shown": low <= value <= high}


def claim(text: str, measured: Measured) -> dict[str, Any]:
    """A claim, which is shown if something was measured and all of it shows it."""
    return {"claim": text, "shown": bool(measured) and all(one["shown"] for one in measured.values()), "measured": measured}


def untestable(text: str, reason: str) -> dict[str, Any]:
    """A claim that cannot be tested at this scale, and why."""
    return {"claim": text, "shown": None, "measured": {}, "reason": reason}


def judged(claims: Mapping[str, str], measured: Mapping[str, Measured | str]) -> dict[str, dict[str, Any]]:
    """Each claim with what was measured for it, or with the reason why it could not be."""
    return {
        name: untestable(text, found) if isinstance(found := measured[name], str) else claim(text, found)
        for name, text in claims.items()
    }


def verdict(one: Mapping[str, Any]) -> str:
    """Of a claim, in words."""
    return "not testable" if one["shown"] is None else "shown" if one["shown"] else "not shown"


def column(curves: Mapping[str, Sequence[float | None]] | None, name: str) -> list[float]:
    """A curve as numbers; NaN for what is missing, and for all of it where the cell failed."""
    values = [None] if curves is None else curves[name]
    return [float("nan") if value is None else value for value in values]


def curve(cell: Mapping[str, Any] | None, name: str) -> list[float]:
    """One of the "curves" in the result of a cell, as numbers; NaN if the cell failed."""
    return column(None if cell is None else cell["curves"], name)


def mean_error(values: Sequence[float | None]) -> tuple[float, float]:
    """The mean over the seeds and its standard error, NaN for one seed; a seed that failed, None or NaN, makes both NaN."""
    found = np.array(values, dtype=float)  # None becomes NaN
    return float(found.mean()), float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else float("nan")


def gain(high: Sequence[float | None], low: Sequence[float | None]) -> tuple[float, float]:
    """high - low, seed by seed: the mean and its standard error."""
    return mean_error([None if a is None or b is None else a - b for a, b in zip(high, low, strict=True)])


def clearness(high: Sequence[float | None], low: Sequence[float | None]) -> float:
    """The gain of the first over the second in standard errors; NaN for one seed, which has no error."""
    mean, error = gain(high, low)
    return mean / error if error else float("nan")


def clear_gain(*pairs: tuple[Sequence[float | None], Sequence[float | None]]) -> dict[str, Any]:
    """The least of the gains of the first over the second, in standard errors, which must reach 2."""
    return at_least([clearness(high, low) for high, low in pairs], CLEAR)


def ratios(values: Sequence[float]) -> list[float]:
    """Each value over the one before; NaN where that is 0."""
    return [after / before if before else float("nan") for before, after in pairwise(values)]
