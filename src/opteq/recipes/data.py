"""Which data to train on, as settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from opteq.checks import check_integer, invalid
from opteq.data import Dataset, Images, Split, load, theory_split
from opteq.data.images import held

__all__ = ["Data"]

Theory: TypeAlias = Literal["off", "unit", "sqrt_d"]


@dataclass(frozen=True)
class Data:
    """The data. `opteq data list` shows which there are."""

    name: str = "digits"
    """The data set: digits, mnist, cifar10, ... (see `opteq data list`)."""
    root: str | None = None
    """The folder with its files; by default the environment variable OPTEQ_DATA, else ./data. May change at a resumption."""
    size: int | tuple[int, int] | None = None
    """Side, or height and width, to which images are resized; with `theory`, the side of the grey images."""
    classes: tuple[int, ...] | None = None
    """Only the samples with these labels, which become 0, 1, ...; with `theory`, the two classes (by default 0 1)."""
    limit: int | None = None
    """Only so many training samples, drawn at random, but always the same ones."""
    test_limit: int | None = None
    """The same for the test (and validation) samples."""
    theory: Theory = "off"
    """Vectors of norm 1 or sqrt(d) with targets -1 and 1 in float64, half of each of two classes: the data of the theorems."""
    standardize: bool = True
    """Begin the network with a layer that gives each channel mean 0 and deviation 1; not with `theory`."""
    verify: bool = True
    """Compare the files with their published checksums; no for a subset or a copy of your own."""
    download: bool = False
    """Fetch mnist, fashion-mnist or cifar10 from OpenML if the files are not there."""

    def __post_init__(self) -> None:
        for name in ("limit", "test_limit"):
            if getattr(self, name) is not None:
                check_integer(self, name, getattr(self, name), 1)

    def load(self) -> Dataset:
        """The data set, prepared."""
        theory = self.theory != "off"
        given = load(self.name, self.root, size=None if theory else self.size, verify=self.verify, download=self.download)
        if theory:
            return self._theory(given)
        given = given if self.classes is None else _only(given, self.classes)
        valid = [] if given.valid is None else [_limited(given.valid, self.test_limit)]
        train, test, *valid = _held(_limited(given.train, self.limit), _limited(given.test, self.test_limit), *valid)
        return replace(given, train=train, test=test, valid=valid[0] if valid else None)

    def _theory(self, given: Dataset) -> Dataset:
        if given.train.y.ndim > 1:
            raise ValueError(invalid(self, "theory", f"'off' for {given.name}, which has labels at each pixel", self.theory))
        if not given.classes and self.classes is not None:
            raise ValueError(invalid(self, "classes", f"left out for {given.name}, which has none", self.classes))
        classes = (0, 1) if self.classes is None else self.classes
        if len(classes) != 2:
            raise ValueError(invalid(self, "classes", "two labels with `theory`", classes))
        if isinstance(self.size, tuple):
            raise ValueError(invalid(self, "size", "one number with `theory`", self.size))
        pair, kept = (classes[0], classes[1]), bool(given.classes)
        for name in ("limit", "test_limit") if kept else ():
            if (count := getattr(self, name)) is not None and count % 2:
                raise ValueError(invalid(self, name, "even with `theory`: half of the samples are of each class", count))
        train = _all_of(given.train.y, pair, kept) if self.limit is None else self.limit
        test = _all_of(given.test.y, pair, kept) if self.test_limit is None else self.test_limit
        assert self.theory != "off"
        return theory_split(given, classes=pair, train=train, test=test, norm=self.theory, size=self.size)


def _all_of(y: Tensor, classes: tuple[int, int], labelled: bool) -> int:
    """How many samples there are, as many of one class as of the other."""
    return 2 * min(int((y == label).sum()) for label in classes) if labelled else len(y)


def _limited(split: Split, limit: int | None) -> Split:
    if limit is None or limit >= len(split):
        return split
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:limit].sort().values
    return Split(_taken(split.x, rows), split.y[rows])


def _taken(x: Tensor | Images, rows: Tensor) -> Tensor | Images:
    """Some samples; those of files that are read when they are needed stay so."""
    return x.take(rows) if isinstance(x, Images) else x[rows]


def _held(*splits: Split) -> list[Split]:
    """The parts with their images read at once if what is left of them fits in memory."""
    lazy = [split.x for split in splits if isinstance(split.x, Images)]
    xs = held(lazy) if len(lazy) == len(splits) else [split.x for split in splits]
    return [Split(x, split.y) for x, split in zip(xs, splits, strict=True)]


def _only(given: Dataset, classes: Sequence[int]) -> Dataset:
    """The samples of some classes, relabelled."""
    labels = range(len(given.classes))
    if given.train.y.ndim > 1 or len(set(classes)) < len(classes) or len(classes) < 2 or not set(classes) <= set(labels):
        expected = f"two or more different labels in 0..{len(labels) - 1}" if labels and given.train.y.ndim == 1 else "left out"
        raise ValueError(invalid("Data", "classes", f"{expected} for {given.name}", tuple(classes)))

    def part(split: Split) -> Split:
        rows = torch.isin(split.y, torch.tensor(classes)).nonzero()[:, 0]
        table = torch.zeros(len(labels), dtype=torch.int64)
        table[list(classes)] = torch.arange(len(classes))
        return Split(_taken(split.x, rows), table[split.y[rows]])

    valid = None if given.valid is None else part(given.valid)
    return replace(
        given, train=part(given.train), test=part(given.test), valid=valid, classes=tuple(given.classes[label] for label in classes)
    )
