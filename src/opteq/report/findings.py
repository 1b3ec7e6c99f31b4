"""The findings in a run folder: CSV files of diagnostics, read so that no content can break the page."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from opteq.report.text import clean

__all__ = ["Eigenvalues", "Findings", "Landscape", "Path2", "Residual", "Spectrum", "Trajectory", "read_findings"]

Array = npt.NDArray[Any]
Columns = dict[str, list[str]]
BYTES, ROWS = 100_000_000, 1_000_000  # of one file
PATHS, STAGES, STEPS = 80, 6, 60  # of trajectories: samples in each stage, stages, steps of one path
SOLVERS, EIGENVALUES, BARS = 8, 4_000, 200
LARGEST = 1e100  # larger values are taken for infinite: axes overflow


@dataclass(frozen=True, eq=False)
class Landscape:
    """loss[i, j] at (x[i], y[j]), or loss[i] along one direction; NaN where there is none."""

    x: Array
    y: Array | None
    loss: Array
    converged: Array

    def thinned(self, most: int) -> "Landscape":
        """At most so many points in each direction, from the first to the last."""
        kept = [_spread(size, most) for size in self.loss.shape]
        y = None if self.y is None else self.y[kept[-1]]
        return Landscape(self.x[kept[0]], y, self.loss[np.ix_(*kept)], self.converged[np.ix_(*kept)])


@dataclass(frozen=True, eq=False)
class Path2:
    """The way of one sample in the plane: points [steps, 2]."""

    sample: str
    label: str
    steps: Array
    points: Array


@dataclass(frozen=True)
class Trajectory:
    """The paths of one stage of a training, and of how many samples they were chosen."""

    stage: str
    paths: list[Path2]
    samples: int

    def thinned(self, most: int) -> "Trajectory":
        """At most so many paths."""
        return Trajectory(self.stage, [self.paths[place] for place in _spread(len(self.paths), most)], self.samples)


@dataclass(frozen=True, eq=False)
class Residual:
    """Residuals over the steps of one solver: quantiles over samples, and the share of samples solved."""

    solver: str
    step: Array
    worst: Array
    high: Array
    median: Array
    low: Array
    solved: Array


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues of the Jacobian at the equilibria of some samples."""

    sample: list[str]
    real: Array
    imag: Array
    converged: Array

    @property
    def radius(self) -> float:
        """The largest modulus."""
        return float(np.hypot(self.real, self.imag).max())


@dataclass(frozen=True, eq=False)
class Eigenvalues:
    """Eigenvalues of the Hessian, with bounds on their errors."""

    value: Array
    error: Array
    converged: Array


@dataclass(frozen=True)
class Findings:
    """What there is of a run; the rest is empty."""

    landscape: Landscape | None = None
    trajectory: tuple[Trajectory, ...] = ()
    residuals: tuple[Residual, ...] = ()
    jacobian: Spectrum | None = None
    hessian: Eigenvalues | None = None


def read_findings(folder: Path, noting: Callable[[Callable[[], Any], Any], Any]) -> Findings:
    """All findings in the folder. `noting(read, otherwise)` calls `read` and takes care of its OSErrors and ValueErrors."""

    def found(name: str, parse: Callable[[Columns], Any], needed: str, otherwise: Any = None) -> Any:
        path = folder / f"{name}.csv"
        return noting(lambda: parse(_columns(path, needed.split())), otherwise) if path.exists() else otherwise

    return Findings(
        landscape=found("landscape", _landscape, "x loss converged"),
        trajectory=found("trajectory", _trajectory, "stage sample label step pc1 pc2", ()),
        residuals=found("residuals", _residuals, "solver step worst high median low solved", ()),
        jacobian=found("jacobian", _jacobian, "sample real imag converged"),
        hessian=found("hessian", _hessian, "eigenvalue error converged"),
    )


def _columns(path: Path, needed: Sequence[str]) -> Columns:
    if path.stat().st_size > BYTES:
        raise ValueError(f"{path} is too large to be shown: {path.stat().st_size:,} bytes")
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        try:
            head, *rows = (row for row, _ in zip(csv.reader(file), range(ROWS + 2), strict=False))
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    if missing := [name for name in needed if name not in head]:
        raise ValueError(f"{path} is damaged: it has no column {', '.join(missing)}")
    if not rows or len(rows) > ROWS:
        raise ValueError(f"{path} has no rows" if not rows else f"{path} has more than {ROWS:,} rows")
    if any(len(row) != len(head) for row in rows):
        raise ValueError(f"{path} is damaged: its rows differ in length")
    return {name: [row[place] for row in rows] for place, name in enumerate(head)}


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
    axes, at = zip(*(np.unique(place, return_inverse=True) for place in places), strict=True)
    shape = tuple(len(axis) for axis in axes)
    if math.prod(shape) > 2 * len(columns["x"]):
        raise ValueError("landscape.csv is damaged: its points are no grid")
    loss, converged = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    loss[at], converged[at] = _numbers(columns["loss"]), _flags(columns["converged"])
    return Landscape(axes[0], axes[1] if len(axes) == 2 else None, loss, converged)


def _spread(size: int, most: int) -> Array:
    """Places from the first to the last, at most so many."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))


def _groups(keys: list[str]) -> dict[str, list[int]]:
    """The places of each key, in the order of their first ones."""
    found: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def _trajectory(columns: Columns) -> tuple[Trajectory, ...]:
    stages = list(_groups(columns["stage"]).items())
    kept = [stages[place] for place in _spread(len(stages), STAGES)]
    step, points = _numbers(columns["step"]), np.stack([_numbers(columns["pc1"]), _numbers(columns["pc2"])], axis=1)
    return tuple(_stage(name, rows, columns, step, points) for name, rows in kept)


def _stage(name: str, rows: list[int], columns: Columns, step: Array, points: Array) -> Trajectory:
    samples = list(_groups([columns["sample"][row] for row in rows]).items())
    paths = []
    for place in _spread(len(samples), PATHS):
        sample, inside = samples[place]
        at = np.array(rows)[inside][_spread(len(inside), STEPS)]
        paths.append(Path2(clean(sample), clean(columns["label"][at[0]]), step[at], points[at]))
    return Trajectory(clean(name), paths, len(samples))


def _residuals(columns: Columns) -> tuple[Residual, ...]:
    values = {name: _numbers(columns[name]) for name in ("step", "worst", "high", "median", "low", "solved")}
    solvers = list(_groups(columns["solver"]).items())[:SOLVERS]
    return tuple(Residual(clean(name), **{key: value[rows] for key, value in values.items()}) for name, rows in solvers)


def _jacobian(columns: Columns) -> Spectrum:
    real, imag = _numbers(columns["real"])[:EIGENVALUES], _numbers(columns["imag"])[:EIGENVALUES]
    good = np.isfinite(real) & np.isfinite(imag)
    if not good.any():
        raise ValueError("jacobian.csv is damaged: it has no eigenvalue")
    sample = [clean(name) for name, fine in zip(columns["sample"], good, strict=False) if fine]
    return Spectrum(sample, real[good], imag[good], _flags(columns["converged"])[:EIGENVALUES][good])


def _hessian(columns: Columns) -> Eigenvalues:
    value, error = _numbers(columns["eigenvalue"])[:BARS], _numbers(columns["error"])[:BARS]
    good = np.isfinite(value)
    if not good.any():
        raise ValueError("hessian.csv is damaged: it has no eigenvalue")
    return Eigenvalues(value[good], np.nan_to_num(np.abs(error[good])), _flags(columns["converged"])[:BARS][good])
