"""Data sets that need no files: digits, which come with scikit-learn, and random points of a sphere."""

import math

import torch

from opteq.checks import check_integer, check_number
from opteq.data.files import optional
from opteq.data.splits import Dataset, Split

__all__ = ["digits", "sphere"]


def digits() -> Dataset:
    """The 1,797 images of 8 x 8 pixels of scikit-learn's load_digits: 1,437 for training, 360 for testing, always the same."""
    bunch = optional("sklearn.datasets", "scikit-learn").load_digits()
    x = torch.from_numpy(bunch.images).float().div_(16)[:, None]
    y = torch.from_numpy(bunch.target).long()
    divide = optional("sklearn.model_selection", "scikit-learn").train_test_split
    train, test = divide(torch.arange(len(y)).numpy(), test_size=360, stratify=bunch.target, random_state=0)
    return Dataset("digits", Split(x[train], y[train]), Split(x[test], y[test]), tuple("0123456789"))


def sphere(n: int = 1000, d: int = 1000, *, test: int = 1000, radius: float | None = None, seed: int = 0) -> Dataset:
    """Points drawn uniformly from a sphere of R^d, float32 [n, d], with labels drawn from N(0, 1): nothing but the points to learn.

    `radius`: sqrt(d) by default, as in the synthetic data of the theory of Gaussian-initialised DEQs (its Section 5).

    Examples:
        >>> from opteq.data import sphere
        >>> train, test = sphere(100, 16, test=10)
        >>> train.x.shape, train.x.norm(dim=1).round(decimals=3).unique().tolist()
        (torch.Size([100, 16]), [4.0])
    """
    check_integer("sphere", "n", n, 1)
    check_integer("sphere", "d", d, 1)
    check_integer("sphere", "test", test, 1)
    length = math.sqrt(d) if radius is None else radius
    check_number("sphere", "radius", length, 0.0, open_low=True)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Split:
        x = torch.randn(count, d, generator=generator, dtype=torch.float64)
        x *= length / torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return Split(x.float(), torch.randn(count, generator=generator))

    return Dataset("sphere", draw(n), draw(test), ())
