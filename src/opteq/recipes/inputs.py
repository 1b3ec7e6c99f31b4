"""What a model needs to know of its data."""

import torch
from torch import Tensor, nn

from opteq.checks import invalid
from opteq.data import Dataset, Split
from opteq.equilibrium import Cell
from opteq.models import Classifier, Readout, Standardize
from opteq.models.readout import tight_stop
from opteq.recipes.solving import Solve

__all__ = ["features", "images", "labels", "sample", "standardization", "unstandardized", "vectors"]

_ENOUGH, _LARGEST = 10_000, 2**25  # samples, and numbers in all, for the mean and the deviation of a channel


def images(kind: str, dataset: Dataset) -> tuple[int, tuple[int, int]]:
    """Channels, and (height, width)."""
    shape = tuple(dataset.train.x.shape[1:])
    if len(shape) != 3:
        raise ValueError(
            f"The model {kind} needs images [channels, height, width]; the samples of {dataset.name} are {list(shape)}."
        )
    return shape[0], (shape[1], shape[2])


def labels(kind: str, dataset: Dataset) -> int:
    """How many classes there are."""
    if not dataset.classes:
        raise ValueError(f"The model {kind} is a classifier; {dataset.name} has real targets: take dense, monotone, gaussian, ...")
    if len(dataset.classes) < 2:
        raise ValueError(f"The model {kind} tells classes apart; {dataset.name} has only {', '.join(dataset.classes)!r}.")
    return len(dataset.classes)


def features(dataset: Dataset) -> int:
    """The numbers of a sample."""
    return int(dataset.train.x.shape[1:].numel())


def vectors(cell: Cell, dataset: Dataset, solve: Solve) -> nn.Module:
    """The cell on samples as vectors: a'z for real targets, class scores of z for labels."""
    if dataset.classes:
        return Classifier(nn.Flatten(), solve.layer(cell), nn.Linear(cell.state_shape[0], len(dataset.classes)))
    if solve.gradient != "implicit":
        raise ValueError(invalid(solve, "gradient", "'implicit' with real targets", solve.gradient))
    dtype = dataset.train.x.dtype
    return Readout(cell, solve.method(), solve.stop(tight_stop(dtype))).to(dtype)


def standardization(dataset: Dataset) -> Standardize:
    """The layer that gives the channels of the training samples mean 0 and deviation 1."""
    count = len(dataset.train)
    some = min(count, _ENOUGH, max(1, _LARGEST // features(dataset)))
    x: Tensor = dataset.train.x[torch.linspace(0, count - 1, some).long()]
    return Standardize.of(x)


def unstandardized(dataset: Dataset) -> Standardize:
    """A layer of that shape that does nothing yet."""
    like = torch.zeros(dataset.train.x.shape[1], dtype=dataset.train.x.dtype)
    return Standardize(like, like + 1)


def sample(split: Split, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """So many samples, drawn at random but always the same."""
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:count]
    return split.x[rows], split.y[rows]
