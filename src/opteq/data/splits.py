"""A data set as tensors: samples x with their labels y, for training and for testing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opteq.checks import all_finite, check_instance
from opteq.data.images import Images

__all__ = ["Dataset", "Split", "check_labels", "check_split"]


@dataclass(frozen=True, eq=False)
class Split:
    """Samples x [n, ...] and labels y [n] (label maps [n, height, width]): `x, y = split`; `len(split)` is n.

    Images are float32 in [0, 1], or `Images` where that would be too large to hold; y is int64, or floating-point for regression.

    Examples:
        >>> import torch
        >>> from opteq.data import Split
        >>> split = Split(torch.rand(10, 1, 8, 8), torch.arange(10) % 2)
        >>> x, y = split
        >>> len(split), x.shape
        (10, torch.Size([10, 1, 8, 8]))
    """

    x: Tensor | Images
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.y))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: `train, test = dataset`.

    `classes` are the names of the labels 0, 1, ..., empty for regression. `ignore` is the label of pixels without a class (void).
    `valid` is a third part, where the data set has one.

    Examples:
        >>> import torch
        >>> from opteq.data import Dataset, Split
        >>> part = Split(torch.rand(10, 1, 8, 8), torch.arange(10) % 2)
        >>> train, test = Dataset("mine", part, part, classes=("even", "odd"))
        >>> len(train), len(test)
        (10, 10)
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    ignore: int | None = None
    valid: Split | None = None

    def __iter__(self) -> Iterator[Split]:
        return iter((self.train, self.test))


def check_split(split: Split, classes: int | Sequence[str], ignore: int | None = None) -> None:
    """Raise ValueError unless pixels are finite, every sample has its label, and labels are int64 below the number of classes.

    `classes`: their names or their number; 0 or none of them for regression, where labels must be finite floating-point numbers.
    `ignore` is a label that is allowed besides. Pixels of `Images` are not looked at: they are made of bytes.

    Examples:
        >>> import torch
        >>> from opteq.data import Split, check_split
        >>> check_split(Split(torch.rand(2, 1, 8, 8), torch.tensor([0, 1])), classes=2)
        >>> try:
        ...     check_split(Split(torch.rand(2, 1, 8, 8), torch.tensor([0, 2])), classes=2)
        ... except ValueError as error:
        ...     print(error)
        The split must have labels from 0 to 1. Got 2 instead, in sample 1.
    """
    check_instance("check_split", "split", split, Split, "a Split")
    if len(split.x) != len(split.y):
        raise ValueError(
            f"A split must have a label for each sample. Got {len(split.x)} samples and {len(split.y)} labels instead."
        )
    if isinstance(split.x, Tensor):
        _check_finite("x", split.x)
    count = classes if isinstance(classes, int) else len(classes)
    if count:
        check_labels("The split", split.y, count, ignore)
    elif not split.y.is_floating_point():
        raise ValueError(f"Labels of regression must be floating-point numbers. Got {split.y.dtype} instead.")
    else:
        _check_finite("y", split.y)


def check_labels(owner: object, y: Tensor, count: int, ignore: int | None = None) -> None:
    """Raise ValueError unless y are int64 labels from 0 to count - 1, or `ignore`."""
    if y.dtype != torch.int64:
        raise ValueError(f"{owner} must have labels of type torch.int64. Got {y.dtype} instead.")
    wrong = ((y < 0) | (y >= count)) & (y != ignore if ignore is not None else True)
    if wrong.any():
        sample = wrong.nonzero()[0].tolist()
        void = "" if ignore is None else f" (or {ignore}, void)"
        raise ValueError(
            f"{owner} must have labels from 0 to {count - 1}{void}. Got {int(y[tuple(sample)])} instead, in sample {sample[0]}."
        )


def _check_finite(name: str, values: Tensor) -> None:
    """Raise ValueError that names the first sample with NaN or infinity."""
    if not all_finite(values):
        sample = int((~values.flatten(1).isfinite().all(1) if values.ndim > 1 else ~values.isfinite()).nonzero()[0])
        raise ValueError(f"'{name}' of a split must be finite. Got NaN or infinity instead, in sample {sample}.")
