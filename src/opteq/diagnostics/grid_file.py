"""The file of an unfinished landscape: JSON lines, a header and then one line for each point, appended as soon as it is known."""

import errno
import hashlib
import math
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import opteq
from opteq.runs import RunError, RunWarning, write_atomic
from opteq.runs.files import opened, read, writing
from opteq.runs.formats import differences, dumps, encode, parse

__all__ = ["GridFile", "Point", "fingerprint"]

Point: TypeAlias = tuple[float, bool]  # the loss, and whether all converged
Row: TypeAlias = dict[str, Any]

_DIGESTS = ("model", "parameters", "buffers", "directions")
_CLOSE = 1e-6  # losses further apart than this are of different functions, not of different roundings


class GridFile:
    """The points of a landscape that are known so far. A kill at any moment loses at most the point being computed.

    Each line ends with a checksum: the torn last line of a killed process, and damaged ones, are computed again. A file of other
    settings, another model, another version or something else altogether is refused and left alone.
    """

    def __init__(self, path: Path, settings: Row, count: int) -> None:
        self.path, self.settings = path, settings
        self.points: dict[int, Point] = {}
        self._centre: Point | None = None  # that of an earlier process
        self._sound = True
        content = read(path) if os.path.lexists(path) else b""
        if content:
            first, *lines = content.split(b"\n")
            self._centre = self._header(first)
            self._read(lines[:-1], count)
            self._sound = self._sound and lines[-1:] == [b""]  # else its last line is torn

    def begin(self, centre: Point) -> None:
        """Compare the loss in the middle with that of the earlier process, since a function has no fingerprint."""
        if self._centre is None:
            self._centre = centre
            self._write()
            return
        if not _same(self._centre, centre):
            known, now = (f"{loss!r} ({'' if converged else 'not '}converged)" for loss, converged in (self._centre, centre))
            if not _close(self._centre, centre):
                raise RunError(
                    f"{self.path} is of another loss (in the middle {known} -> {now}): (a) use the same loss and the same data, "
                    "(b) delete the file to begin again"
                )
            message = f"{self.path}: the loss in the middle was rounded differently before ({known} -> {now}), and so is the grid"
            warnings.warn(message, RunWarning, stacklevel=3)
        elif math.isnan(centre[0]) and self.points:
            message = f"{self.path}: the loss in the middle is NaN, so that a change of the loss or its data cannot be noticed"
            warnings.warn(message, RunWarning, stacklevel=3)
        if not self._sound:
            self._write()

    def append(self, index: int) -> None:
        """Keep a new one of the points."""
        line = _line(_row(index, self.points[index]))
        with writing(self.path, "; the points before are safe"), opened(self.path, os.O_WRONLY | os.O_APPEND) as file:
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write(self) -> None:
        """All that is known, as a whole."""
        lines = [_line({**self.settings, "centre": self._centre})]
        lines += [_line(_row(index, point)) for index, point in self.points.items()]
        with writing(self.path):
            write_atomic(self.path, b"".join(lines))

    def _header(self, line: bytes) -> Point:
        """The loss in the middle, of a header that fits."""
        row = _unline(line)
        if row is None or row.get("kind") != self.settings["kind"] or not _is_point(row.get("centre")):
            raise RunError(f"{self.path} is no file of a landscape, or its first line is damaged: delete it, or name another file")
        loss, converged = row.pop("centre")
        changed = list(differences(encode(row, "file"), encode(self.settings, "file")))
        if changed:
            told = [change for change in changed if not change.startswith(_DIGESTS)]  # digests follow from them, and tell little
            what = ", ".join(told) or f"other {', '.join(change.partition(':')[0] for change in changed)}"
            raise RunError(f"{self.path} is of another landscape ({what}): undo the changes, or begin another file")
        return loss, converged

    def _read(self, lines: Iterable[bytes], count: int) -> None:
        bad = 0
        for row in map(_unline, lines):
            point = None if row is None else (row.get("loss"), row.get("converged"))
            if row is not None and row.get("point") in range(count) and _is_point(point):
                self.points[row["point"]] = row["loss"], row["converged"]
            else:
                bad += 1
        if bad:
            self._sound = False
            warnings.warn(f"{self.path}: {bad} damaged lines are computed again", RunWarning, stacklevel=4)


def _row(index: int, point: Point) -> Row:
    return {"point": index, "loss": point[0], "converged": point[1]}


def _line(row: Row) -> bytes:
    encoded = encode(row, "landscape")
    return (dumps({**encoded, "crc": zlib.crc32(dumps(encoded).encode())}) + "\n").encode()


def _unline(line: bytes) -> Row | None:
    """The row, or None if it is damaged."""
    try:
        row = parse(line)
        return row if isinstance(row, dict) and row.pop("crc", None) is not None and _line(row) == line + b"\n" else None
    except (ValueError, TypeError, RecursionError):
        return None


def _is_point(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], float) and isinstance(value[1], bool)


def _same(one: Point, other: Point) -> bool:
    return one[1] == other[1] and (one[0] == other[0] or (math.isnan(one[0]) and math.isnan(other[0])))


def _close(one: Point, other: Point) -> bool:
    return one[1] == other[1] and math.isclose(one[0], other[0], rel_tol=_CLOSE)


def fingerprint(model: nn.Module, plane: Mapping[str, Iterable[Tensor]], settings: Row) -> Row:
    """What a grid depends on, but for its loss: settings, versions, and digests of the model and of the directions."""
    moves = ((f"{name} {i}", part) for name, parts in plane.items() for i, part in enumerate(parts))
    return {
        "kind": "opteq landscape",
        "version": opteq.__version__,
        "torch": str(torch.__version__),
        **settings,
        "model": _structure(model),
        "parameters": _digest(model.named_parameters()),
        "buffers": _digest(model.named_buffers()),
        "directions": _digest(moves),
    }


def _structure(model: nn.Module) -> str:
    """Layers, solvers, tolerances and modes, as far as the model says them; where in memory its functions lie does not count."""
    modes = [part.training for part in model.modules()]
    return hashlib.sha256(f"{re.sub(r' at 0x[0-9A-Fa-f]+', '', repr(model))} {modes}".encode()).hexdigest()


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
