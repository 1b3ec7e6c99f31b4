"""How wide and how flat the minimum in the middle of a landscape is."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from opteq.checks import check_number, invalid

if TYPE_CHECKING:
    from opteq.diagnostics.landscape import Landscape

__all__ = ["Basin", "Flatness", "find_basin", "measure_flatness"]

Array = npt.NDArray[Any]

# The neighbours of a point in a grid whose squares are cut into triangles from their first corner to their last.
_NEIGHBOURS = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]])


@dataclass(frozen=True, eq=False)
class Basin:
    """The connected set around the middle where loss <= level, the loss being linear between grid points; lengths as of `axis`.

    `size`: its width in one dimension, its area in two. `diameter`: the width, or that of the disc of the same area.
    `points`: grid points in it; with few of them, `size` is rough. Points that did not converge, or whose loss is NaN, are outside,
    and the basin ends at its last point before them. `at_edge`, `at_failure`: whether it reaches the edge of the grid, or such
    points, or the middle is one; then the true one may be larger.

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import landscape
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> start = model.weight.detach().clone()
        >>> found = landscape(model, lambda m: (m.weight - start).norm() / start.norm(), steps=21, dims=1)  # |a| at theta + a d
        >>> basin = found.basin(level=0.5)
        >>> round(basin.size, 3), basin.at_edge
        (1.0, False)
    """

    level: float
    size: float
    diameter: float
    points: int
    at_edge: bool
    at_failure: bool
    outline: Array = field(repr=False)  # its ends [n], or the segments [n, 2, 2] of its border inside the grid


@dataclass(frozen=True)
class Flatness:
    """How the loss rises around the middle, over the grid points no further than `radius` from it.

    `sharpness`: 100 (max L - L0) / (1 + L0), with the maximum over the plane, a lower bound of that over all directions.
    `increase`: the mean of L - L0. `curvature`: (L(h) - 2 L0 + L(-h)) / h^2 along each direction, h the distance of grid points.
    `converged`: the share of points within the radius that did, with a loss that is a number; the other ones are left out, and
    what is unknown is NaN.
    Keskar et al., On large-batch training (2017), Metric 2.1.

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import data_loss, landscape
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> flatness = landscape(torch.nn.Linear(4, 1), data_loss(x, y), steps=5).flatness(radius=0.5)
        >>> flatness.converged, len(flatness.curvature)
        (1.0, 2)
    """

    radius: float
    sharpness: float
    increase: float
    curvature: tuple[float, ...]
    converged: float


def find_basin(found: "Landscape", level: float) -> Basin:
    """The basin of a landscape."""
    from scipy.ndimage import binary_dilation, label  # type: ignore[import-untyped]

    check_number("Landscape.basin", "level", level, -math.inf)
    middle = _middle("Landscape.basin", found)
    loss = _sound(found)
    neighbours = _NEIGHBOURS if loss.ndim == 2 else np.ones(3)
    regions, _ = label(loss <= level, neighbours)
    inside = (regions == regions[middle]) & (regions > 0)
    size, outline = (_area if loss.ndim == 2 else _width)(found.axis.numpy(), loss, inside, level)
    edge = any(inside.take(end, side).any() for side in range(loss.ndim) for end in (0, -1))
    diameter = size if loss.ndim == 1 else 2 * math.sqrt(size / math.pi)
    failed = _failed(found)
    beside = bool((binary_dilation(inside, neighbours) & failed).any() or failed[middle])
    return Basin(float(level), size, diameter, int(inside.sum()), edge, beside, outline)


def measure_flatness(found: "Landscape", radius: float | None) -> Flatness:
    """The flatness of a landscape."""
    middle = _middle("Landscape.flatness", found)
    step = float(found.axis[1] - found.axis[0])
    radius = max(found.span / 4, step) if radius is None else radius
    check_number("Landscape.flatness", "radius", radius, step * (1 - 1e-9), found.span)
    loss, converged = found.loss.numpy(), ~_failed(found)
    squares = np.meshgrid(*[found.axis.numpy() ** 2] * loss.ndim, indexing="ij")
    near = np.sqrt(sum(squares)) <= radius * (1 + 1e-9)  # rounding must not leave out the points on the circle
    known = np.where(converged & np.isfinite(loss), loss, math.nan)
    centre = float(known[middle])
    rise = loss[near & converged] - centre
    return Flatness(
        radius=float(radius),
        sharpness=float(100 * rise.max(initial=-math.inf) / (1 + centre)),
        increase=float(rise.mean()) if len(rise) else math.nan,
        curvature=tuple(_curvature(known, middle, side, step) for side in range(loss.ndim)),
        converged=float(converged[near].mean()),
    )


def _curvature(loss: Array, middle: tuple[int, ...], side: int, step: float) -> float:
    low, centre, high = np.moveaxis(loss, side, -1)[middle[1:]][middle[0] - 1 : middle[0] + 2]
    return float((low - 2 * centre + high) / step**2)


def _middle(owner: str, found: "Landscape") -> tuple[int, ...]:
    """The place of the model itself in the grid."""
    if len(found.axis) % 2 == 0:
        raise ValueError(invalid(owner, "steps", "odd: the point in the middle is the model", len(found.axis)))
    return (len(found.axis) // 2,) * found.loss.ndim


def _sound(found: "Landscape") -> Array:
    """The loss, infinite where it failed."""
    loss = found.loss.numpy()
    sound: Array = np.where(_failed(found) | np.isinf(loss), math.inf, loss)
    return sound


def _failed(found: "Landscape") -> Array:
    """Where a solve did not converge, or the loss is no number."""
    failed: Array = ~found.converged.numpy() | np.isnan(found.loss.numpy())
    return failed


def _crossing(inner: Array, outer: Array, level: float) -> Array:
    """How far it is from values <= level to values above it: 0 to 1, and 0 towards infinity."""
    part: Array = (level - inner) / (outer - inner)
    return part


def _width(axis: Array, loss: Array, inside: Array, level: float) -> tuple[float, Array]:
    """The length of an interval of points, and its ends inside the grid."""
    rows = np.flatnonzero(inside)
    if not len(rows):
        return 0.0, rows
    walls = [(i, j) for i, j in ((rows[0], rows[0] - 1), (rows[-1], rows[-1] + 1)) if 0 <= j < len(axis)]
    ends = np.array([axis[i] + _crossing(loss[i], loss[j], level) * (axis[j] - axis[i]) for i, j in walls])
    reach = np.concatenate([axis[rows], ends])
    return float(np.ptp(reach)), ends


def _area(axis: Array, loss: Array, inside: Array, level: float) -> tuple[float, Array]:
    """The area of a region of points, and its border, triangle by triangle."""
    nodes = np.arange(loss.size).reshape(loss.shape)
    a, b, c, d = (corner.ravel() for corner in (nodes[:-1, :-1], nodes[1:, :-1], nodes[:-1, 1:], nodes[1:, 1:]))
    triangles = np.concatenate([np.stack([a, b, d], 1), np.stack([a, c, d], 1)])
    triangles = np.take_along_axis(triangles, loss.ravel()[triangles].argsort(1), 1)  # those inside come first
    places = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    count = inside.ravel()[triangles].sum(1)
    area, border = float((count == 3).sum()), []
    for number, edges in ((1, ((0, 1), (0, 2))), (2, ((0, 2), (1, 2)))):
        corners = triangles[count == number]
        value, place = loss.ravel()[corners], places[corners]
        parts = [_crossing(value[:, i], value[:, j], level) for i, j in edges]
        area += float((parts[0] * parts[1] if number == 1 else 1 - (1 - parts[0]) * (1 - parts[1])).sum())
        ends = [place[:, i] + t[:, None] * (place[:, j] - place[:, i]) for t, (i, j) in zip(parts, edges, strict=True)]
        border.append(np.stack(ends, 1))
    return area * float(axis[1] - axis[0]) ** 2 / 2, np.concatenate(border)
