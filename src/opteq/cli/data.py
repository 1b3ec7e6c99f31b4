"""`opteq data`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import tyro
from torch import Tensor

from opteq.cli.common import console, parse, table
from opteq.data import Split, describe, load
from opteq.data.files import root_folder

__all__ = ["data"]


@dataclass(frozen=True)
class List:
    """The data sets there are, and whether their files are found.

    $ opteq data list --root ~/data
    """

    root: Path | None = None
    """The folder with the files; by default the environment variable OPTEQ_DATA, else ./data."""


@dataclass(frozen=True)
class Show:
    """Shapes, classes, label counts and the range of the values of a data set.

    $ opteq data show digits
    $ opteq data show imagenette --root ~/data --size 64
    """

    name: tyro.conf.Positional[str]
    """The data set."""
    root: Path | None = None
    """The folder with the files; by default the environment variable OPTEQ_DATA, else ./data."""
    size: int | None = None
    """The side to which images are resized."""
    verify: bool = True
    """Compare the files with their published checksums."""


_Commands: TypeAlias = Annotated[List, tyro.conf.subcommand("list")] | Annotated[Show, tyro.conf.subcommand("show")]


def data(arguments: Sequence[str]) -> int:
    """List the data sets, or look at one."""
    options: List | Show = parse(_Commands, "data", arguments, description="The data sets that `opteq train` can use.")
    return _list(options) if isinstance(options, List) else _show(options)


def _list(options: List) -> int:
    rows = [(d.name, "yes" if d.found else "no", d.shape, d.samples, d.source, d.terms) for d in describe(options.root)]
    title = f"Data sets; files are looked for in {root_folder(options.root)}"
    console().print(table(title, ("name", "found", "sample", "train + test", "source", "terms"), rows))
    return 0


def _show(options: Show) -> int:
    found = load(options.name, options.root, size=options.size, verify=options.verify)
    parts = [(name, part) for name, part in (("train", found.train), ("valid", found.valid), ("test", found.test)) if part]
    out = console()
    rows = [(name, f"{len(part):,}", " x ".join(map(str, part.x.shape[1:])), *_values(part)) for name, part in parts]
    out.print(table(found.name, ("part", "samples", "sample", "values", "targets"), rows))
    if found.classes:
        counts = [_counts(part.y, len(found.classes)) for _, part in parts]
        shown = [(i, label, *(f"{count[i]:,}" for count in counts)) for i, label in enumerate(found.classes)]
        unit = "pixels" if found.train.y.ndim > 1 else "samples"
        out.print(table(f"Labels ({unit} of each)", ("label", "class", *(name for name, _ in parts)), shown))
    return 0


def _values(part: Split) -> tuple[str, str]:
    """The range of x and what y is; of images that stay in their files, the first hundred are looked at."""
    x: Tensor = part.x if isinstance(part.x, Tensor) else part.x[: min(100, len(part))]
    low, high = x.aminmax()
    y = part.y
    targets = (
        f"labels {int(y.min())}..{int(y.max())}" if not y.is_floating_point() else f"{float(y.min()):.3g}..{float(y.max()):.3g}"
    )
    return f"{float(low):.3g}..{float(high):.3g}", targets


def _counts(y: Tensor, classes: int) -> list[int]:
    found: list[int] = torch.bincount(y[(y >= 0) & (y < classes)].flatten(), minlength=classes).tolist()
    return found
