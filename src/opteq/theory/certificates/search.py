"""The radii of a theorem are free: those with the best slack, and among those that certify the largest guaranteed progress."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from opteq.theory.certificates.scope import LARGEST
from opteq.theory.certificates.theorem import Radii, Theorem

__all__ = ["best_radii"]

_MARGIN = 0.01  # the least log slack that is left when radii are moved for a larger step
_CAP = 14.0  # of a log slack: a million is as good as infinite, which conditions without a right side have
_INFEASIBLE = 1e6


def best_radii(theorem: Theorem, *, progress: bool = True) -> Radii:
    """argmax over the radii of the least slack; with `progress`, where that is above 1, of the largest step that keeps it so.

    The right sides are posynomials, up to the factors 1/(1 - rho), so the first problem is convex in the logarithms of the radii.
    """
    limits, reference = theorem.limits(), theorem.reference()
    if any(limit <= 0 for limit in limits.values()) or not theorem.start.sigma > 0:
        return reference
    scale = _Scale(theorem)
    point = _maximise(
        lambda t: _least_slack(theorem, scale.radii(t)), [scale.start(f) for f in ((1.0, 1e-3) if progress else (1.0,))]
    )
    if theorem.flow or not progress or _least_slack(theorem, scale.radii(point)) <= _MARGIN:
        return scale.radii(point)
    return scale.radii(_maximise(lambda t: _progress(theorem, scale.radii(t)), [point]))


class _Scale:
    """Radii as numbers without bounds: logarithms, or logits of the part of a finite limit."""

    def __init__(self, theorem: Theorem) -> None:
        self.names, self.limits, self.reference = theorem.names, theorem.limits(), theorem.reference()
        self.floors = theorem.floors()

    def radii(self, point: Any) -> Radii:
        found = {}
        for name, t in zip(self.names, np.clip(point, -80.0, 80.0), strict=True):
            limit, part = self.limits[name], math.exp(float(t))
            value = self.reference[name] * part if math.isinf(limit) else limit * part / (1 + part)
            found[name] = min(max(value, min(self.floors[name], limit / 2)), LARGEST)
        return found

    def start(self, factor: float) -> Any:
        pairs = [(self.reference[name], self.limits[name]) for name in self.names]
        return np.array([math.log(factor * (value / (limit - value) if math.isfinite(limit) else 1.0)) for value, limit in pairs])


def _least_slack(theorem: Theorem, radii: Radii) -> float:
    """The smallest of the log slacks that depend on the radii."""
    return min(_log_slack(lhs, rhs) for lhs, rhs in theorem.sides(radii))


def _log_slack(lhs: float, rhs: float) -> float:
    if rhs == 0 < lhs:
        return _CAP
    return min(_CAP, math.log(lhs / rhs)) if 0 < lhs < math.inf and 0 < rhs < math.inf else -_INFEASIBLE


def _progress(theorem: Theorem, radii: Radii) -> float:
    """log of the largest step, or how far the radii are from certifying anything."""
    slack, step = _least_slack(theorem, radii), theorem.max_step(radii)
    return math.log(step) if slack >= _MARGIN and step > 0 else slack - _INFEASIBLE


def _maximise(value: Callable[[Any], float], starts: list[Any]) -> Any:
    """Nelder and Mead's method, twice from each start: the second simplex is a fresh one where the first collapsed."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    best = max(starts, key=value)
    for start in starts:
        point = start
        for size in (1.0, 0.1):
            simplex = np.vstack([point, point + size * np.eye(len(point))])
            options = {"initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-4, "maxfev": 400}
            point = minimize(lambda t: -value(t), point, method="Nelder-Mead", options=options).x
        best = max((best, point), key=value)
    return best
