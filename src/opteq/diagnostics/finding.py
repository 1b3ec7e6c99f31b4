"""What every diagnostic gives: its data as columns, and itself as a figure."""

import csv
import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from opteq.runs import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Columns", "Finding"]

Columns = dict[str, npt.NDArray[Any]]


class Finding(ABC):
    """The data of a diagnostic, in frozen dataclasses: `pandas.DataFrame(finding.columns())` is its table.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import residual_curve
        >>> finding = residual_curve(Equilibrium(OptEq(4, 8, 16)), torch.randn(5, 4))
        >>> finding.csv("curve.csv").name, sorted(finding.columns())
        ('curve.csv', ['evals', 'high', 'low', 'median', 'solved', 'solver', 'step', 'worst'])
    """

    name: ClassVar[str]  # of its files

    @abstractmethod
    def columns(self) -> Columns:
        """The data as a table: one-dimensional arrays of one length, by name."""

    @abstractmethod
    def figure(self) -> "Figure":
        """The figure, a matplotlib one."""

    def draw(self, path: str | Path, figure: "Figure | None" = None) -> Path:
        """The figure as a file: .svg, .pdf or .png, as its name says. The same data give the same file.

        `figure`: one made with other options, such as `found.figure(level=0.1)`.
        """
        from opteq.diagnostics.drawing import save

        return save(self.figure() if figure is None else figure, Path(path))

    def csv(self, path: str | Path) -> Path:
        """The columns as a file, replaced as a whole; numbers with all their digits, true and false as 1 and 0."""
        columns, file = self.columns(), io.StringIO(newline="")
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*(_plain(column) for column in columns.values()), strict=True))
        write_atomic(Path(path), file.getvalue())
        return Path(path)

    def save(self, folder: str | Path, figure: "Figure | None" = None) -> list[Path]:
        """`<name>.csv`, `<name>.svg` and `<name>.png` in the folder, which is made: what a report of a run folder shows."""
        stem = Path(folder) / self.name
        stem.parent.mkdir(parents=True, exist_ok=True)
        figure = self.figure() if figure is None else figure
        return [self.csv(stem.with_suffix(".csv")), *(self.draw(stem.with_suffix(kind), figure) for kind in (".svg", ".png"))]

    def __repr__(self) -> str:
        columns = self.columns()
        rows = len(next(iter(columns.values()), ()))
        return f"{type(self).__name__}({rows} rows of {', '.join(columns)})"


def _plain(column: npt.NDArray[Any]) -> list[Any]:
    return list((column.astype(int) if column.dtype == np.bool_ else column).tolist())
