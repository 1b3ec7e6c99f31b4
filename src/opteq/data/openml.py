"""Fetching through scikit-learn's client of OpenML, which checks and caches what it fetches."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from opteq.data.files import optional
from opteq.data.splits import Split, check_labels

__all__ = ["OPENML", "Entry", "fetch"]


@dataclass(frozen=True)
class Entry:
    """A data set of OpenML: the rows of the training part come first, and the test part is known by its classes."""

    number: int
    shape: tuple[int, int, int]
    train: int
    test_counts: tuple[int, ...]


OPENML = {
    "mnist": Entry(554, (1, 28, 28), 60000, (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)),
    "fashion-mnist": Entry(40996, (1, 28, 28), 60000, (1000,) * 10),
    "cifar10": Entry(40927, (3, 32, 32), 50000, (1000,) * 10),
}


def fetch(name: str, root: Path) -> tuple[Split, Split]:
    """Training and test part; OSError where there is no network."""
    entry = OPENML[name]
    parser = "pandas" if find_spec("pandas") else "liac-arff"  # the quicker one needs pandas
    client = optional("sklearn.datasets", "scikit-learn").fetch_openml
    bunch = client(data_id=entry.number, as_frame=False, data_home=str(root), parser=parser)
    x = torch.from_numpy(np.asarray(bunch.data, np.float32)).div_(255).reshape(-1, *entry.shape)
    y = torch.from_numpy(np.asarray(bunch.target).astype(np.float64).astype(np.int64))  # strings, or numbers
    check_labels(f"{name} of OpenML", y, 10)
    counts = tuple(torch.bincount(y[entry.train :], minlength=10).tolist())
    if counts != entry.test_counts:
        raise ValueError(f"{name} of OpenML must end with the test part, {entry.test_counts} of each class. Got {counts} instead.")
    return Split(x[: entry.train], y[: entry.train]), Split(x[entry.train :], y[entry.train :])
