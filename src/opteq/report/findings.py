"""The findings in a run folder: CSV files of diagnostics, read so that no content can break the page."""

import csv
import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from opteq.diagnostics.panels import LARGEST
from opteq.report.curves import spread
from opteq.report.text import clean, file_text

__all__ = [
    "Eigenvalues",
    "Findings",
    "Landscape",
    "Residual",
    "SamplePath",
    "Spectrum",
    "Trajectory",
    "has_findings",
    "read_findings",
]

Array = npt.NDArray[Any]
Columns = dict[str, list[str]]
BYTES, ROWS = 100_000_000, 1_000_000  # of one file
PATHS, STAGES, STEPS = 80, 6, 60  # of trajectories: samples in each stage, stages, steps of one path
SOLVERS, BARS = 8, 200
NAMES = ("landscape", "trajectory", "residuals", "jacobian", "hessian")


@dataclass(frozen=True, eq=False)
class Landscape:
    """loss[i, j] at (x[i], y[j]), or loss[i] along one direction; NaN where there is none."""

    x: Array
    y: Array | None
    loss: Array
    converged: Array

    def thinned(self, most: int) -> "Landscape":
        """At most so many points in each direction, from the first to the last."""
        kept = [spread(size, most) for size in self.loss.shape]
        y = None if self.y is None else self.y[kept[-1]]
        return Landscape(self.x[kept[0]], y, self.loss[np.ix_(*kept)], self.converged[np.ix_(*kept)])


@dataclass(frozen=True, eq=False)
class SamplePath:
    """The way of one sample in the plane: points [steps, 2]."""

    sample: str
    label: str
    steps: Array
    points: Array


@dataclass(frozen=True)
class Trajectory:
    """The paths of one stage of a training, and of how many samples and stages they were chosen."""

    stage: str
    paths: list[SamplePath]
    samples: int
    stages: int

    def thinned(self, most: int) -> "Trajectory":
        """At most so many paths."""
        return replace(self, paths=[self.paths[place] for place in spread(len(self.paths), most)])


@dataclass(frozen=True, eq=False)
class Residual:
    """Residuals over the steps of one solver: quantiles over samples, and the share of samples solved.

    `evals`: the evaluations so far, NaN where unknown; `solvers`: of how many this is one.
    """

    solver: str
    step: Array
    worst: Array
    high: Array
    median: Array
    low: Array
    solved: Array
    evals: Array
    solvers: int

    def thinned(self, most: int) -> "Residual":
        """At most so many steps."""
        at = spread(len(self.step), most)
        names = ("step", "worst", "high", "median", "low", "solved", "evals")
        return replace(self, **{name: getattr(self, name)[at] for name in names})


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The finite eigenvalues of the Jacobian at the equilibria of some samples; `count`: how many there are, others included."""

    sample: list[str]
    real: Array
    imag: Array
    converged: Array
    count: int

    @property
    def modulus(self) -> Array:
        """Of each; the largest is the spectral radius if none is `unsure`."""
        return np.asarray(np.hypot(self.real, self.imag))

    @property
    def unsure(self) -> int:
        """How many are not finite or not converged."""
        return self.count - int(self.converged.sum())

    def thinned(self, most: int) -> "Spectrum":
        """At most so many, and the largest."""
        at = np.union1d(spread(len(self.real), most), self.modulus.argmax())
        return Spectrum([self.sample[place] for place in at], self.real[at], self.imag[at], self.converged[at], self.count)


@dataclass(frozen=True, eq=False)
class Eigenvalues:
    """Eigenvalues of the Hessian to be drawn, with bounds on their errors, NaN where unknown; the largest of all, and how many."""

    value: Array
    error: Array
    converged: Array
    largest: float
    count: int


@dataclass(frozen=True)
class Findings:
    """What there is of a run; the rest is empty. `left_out`: there is something that was not read."""

    landscape: Landscape | None = None
    trajectory: tuple[Trajectory, ...] = ()
    residuals: tuple[Residual, ...] = ()
    jacobian: Spectrum | None = None
    hessian: Eigenvalues | None = None
    left_out: bool = False


def has_findings(folder: Path) -> bool:
    """Whether there is a file of one."""
    return any(os.path.lexists(folder / f"{name}.csv") for name in NAMES)


def read_findings(folder: Path, noting: Callable[[Callable[[], Any], Any], Any]) -> Findings:
    """All findings in the folder. `noting(read, otherwise)` calls `read` and takes care of its RunErrors and ValueErrors."""

    def found(name: str, parse: Callable[[Columns], Any], needed: str, otherwise: Any = None, useful: str = "") -> Any:
        path = folder / f"{name}.csv"
        if not os.path.lexists(path):
            return otherwise
        return noting(lambda: parse(_columns(path, needed.split(), useful)), otherwise)

    return Findings(
        landscape=found("landscape", _landscape, "x loss converged", useful="y"),
        trajectory=found("trajectory", _trajectory, "stage sample label step pc1 pc2", ()),
        residuals=found("residuals", _residuals, "solver step worst high median low solved", (), useful="evals"),
        jacobian=found("jacobian", _jacobian, "sample real imag converged"),
        hessian=found("hessian", _hessian, "eigenvalue error converged"),
    )


def _columns(path: Path, needed: Sequence[str], useful: str) -> Columns:
    """The columns that are needed, and the useful one if there is any."""
    lines = csv.reader(io.StringIO(file_text(path, BYTES), newline=""))
    try:
        head = next(lines, [])
        if missing := [name for name in needed if name not in head]:
            raise ValueError(f"it has no column {', '.join(missing)}")
        places = {name: head.index(name) for name in (*needed, useful) if name in head}
        rows = [[row[place] for place in places.values()] for row in islice(lines, ROWS + 1) if _whole(row, head)]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not rows or len(rows) > ROWS:
        raise ValueError(f"{path} has no rows" if not rows else f"{path} has more than {ROWS:,} rows")
    return dict(zip(places, map(list, zip(*rows, strict=True)), strict=True))


def _whole(row: list[str], head: list[str]) -> bool:
    if len(row) != len(head):
        raise ValueError("its rows differ in length")
    return True


def _numbers(column: list[str]) -> Array:
    """NaN where there is no number that can be drawn."""
    return np.array([_number(value) for value in column], dtype=float)


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number if abs(number) < LARGEST else math.nan


_TRUE: Final = {"1", "true", "1.0"}


def _flags(column: list[str]) -> Array:
    return np.array([value.strip().lower() in _TRUE for value in column])


def _landscape(columns: Columns) -> Landscape:
    places = [_numbers(columns[name]) for name in ("x", "y") if name in columns]
    if any(np.isnan(place).any() for place in places):
        raise ValueError("landscape.csv is damaged: a coordinate is not a number")
    if len(places) == 2 and any(np.ptp(place) == 0 for place in places):  # a plane of one row is a line
        places = [max(places, key=np.ptp)]
    axes, at = zip(*(np.unique(place, return_inverse=True) for place in places), strict=True)
    shape = tuple(len(axis) for axis in axes)
    if math.prod(shape) != len(places[0]):
        raise ValueError("landscape.csv is damaged: its points are no grid, or some are missing")
    seen, loss, converged = np.zeros(shape, dtype=bool), np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    seen[at], loss[at], converged[at] = True, _numbers(columns["loss"]), _flags(columns["converged"])
    if not seen.all():
        raise ValueError("landscape.csv is damaged: a point is there twice, and another is missing")
    return Landscape(axes[0], axes[1] if len(axes) == 2 else None, loss, converged)


def _groups(keys: list[str]) -> dict[str, list[int]]:
    """The places of each key, in the order of their first ones."""
    found: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def _trajectory(columns: Columns) -> tuple[Trajectory, ...]:
    stages = list(_groups(columns["stage"]).items())
    kept = [stages[place] for place in spread(len(stages), STAGES)]
    step, points = _numbers(columns["step"]), np.stack([_numbers(columns["pc1"]), _numbers(columns["pc2"])], axis=1)
    return tuple(Trajectory(clean(name), *_paths(rows, columns, step, points), len(stages)) for name, rows in kept)


def _paths(rows: list[int], columns: Columns, step: Array, points: Array) -> tuple[list[SamplePath], int]:
    """Those of some samples of a stage, and how many there are."""
    samples = list(_groups([columns["sample"][row] for row in rows]).items())
    all_rows, paths = np.array(rows), []
    for place in spread(len(samples), PATHS):
        sample, inside = samples[place]
        at = all_rows[np.array(inside)[spread(len(inside), STEPS)]]
        paths.append(SamplePath(clean(sample), clean(columns["label"][at[0]]), step[at], points[at]))
    return paths, len(samples)


def _residuals(columns: Columns) -> tuple[Residual, ...]:
    values = {name: _numbers(columns[name]) for name in ("step", "worst", "high", "median", "low", "solved")}
    values["evals"] = _numbers(columns["evals"]) if "evals" in columns else np.full(len(values["step"]), np.nan)
    found = _groups(columns["solver"])
    parts = ((name, {key: value[rows] for key, value in values.items()}) for name, rows in list(found.items())[:SOLVERS])
    return tuple(Residual(clean(name), **part, solvers=len(found)) for name, part in parts)


def _jacobian(columns: Columns) -> Spectrum:
    real, imag = _numbers(columns["real"]), _numbers(columns["imag"])
    (good,) = np.nonzero(np.isfinite(real) & np.isfinite(imag))
    if not len(good):
        raise ValueError("jacobian.csv is damaged: it has no eigenvalue")
    sample = [clean(columns["sample"][place]) for place in good]
    return Spectrum(sample, real[good], imag[good], _flags(columns["converged"])[good], len(real))


def _hessian(columns: Columns) -> Eigenvalues:
    value, error = _numbers(columns["eigenvalue"]), np.abs(_numbers(columns["error"]))
    (good,) = np.nonzero(np.isfinite(value))
    if not len(good):
        raise ValueError("hessian.csv is damaged: it has no eigenvalue")
    drawn = good[:BARS]
    return Eigenvalues(value[drawn], error[drawn], _flags(columns["converged"])[drawn], float(value[good].max()), len(value))
