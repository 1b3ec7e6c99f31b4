"""What the papers do to images before they train on them."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from opteq.batch import norm as sample_norms
from opteq.checks import check_floating, check_instance, check_integer, invalid
from opteq.data.images import height_width
from opteq.data.splits import Dataset, Split

__all__ = ["flat", "grey", "norm_sqrt_d", "resize", "theory_split", "two_classes", "unit_norm"]

_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow


def two_classes(split: Split, classes: tuple[int, int] = (0, 1), per_class: int | None = None, seed: int = 0) -> Split:
    """The samples of two classes, labelled 0 and 1 in the order given, in the order of the data.

    `per_class`: so many of each, drawn at random; by default all.

    Examples:
        >>> import torch
        >>> from opteq.data import Split, two_classes
        >>> pair = two_classes(Split(torch.rand(30, 4), torch.arange(30) % 3), classes=(2, 0), per_class=5)
        >>> len(pair), pair.y.bincount().tolist()
        (10, [5, 5])
    """
    check_instance("two_classes", "split", split, Split, "a Split")
    if len(classes) != 2 or classes[0] == classes[1]:
        raise ValueError(invalid("two_classes", "classes", "two different labels", classes))
    _check_labels("two_classes", "split", split)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat([_rows(split.y, label, per_class, generator) for label in classes]).sort().values
    return Split(split.x[rows], (split.y[rows] == classes[1]).long())


def _rows(y: Tensor, label: int, count: int | None, generator: torch.Generator) -> Tensor:
    """The samples of one class, or some of them drawn without replacement."""
    rows = (y == label).nonzero()[:, 0]
    if not len(rows):
        raise ValueError(invalid("two_classes", "classes", "labels that samples have", label))
    if count is None:
        return rows
    check_integer("two_classes", "per_class", count, 1)
    if count > len(rows):
        raise ValueError(invalid("two_classes", "per_class", f"at most the {len(rows)} samples that class {label} has", count))
    return rows[torch.randperm(len(rows), generator=generator)[:count].to(rows.device)]


def grey(x: Tensor) -> Tensor:
    """0.299 red + 0.587 green + 0.114 blue: [n, 1, height, width]; images of one channel stay as they are.

    Examples:
        >>> import torch
        >>> from opteq.data import grey
        >>> grey(torch.ones(2, 3, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
    """
    _check_images("grey", x)
    if x.shape[1] == 1:
        return x
    if x.shape[1] != 3:
        raise ValueError(invalid("grey", "x", "images of 1 or 3 channels", list(x.shape)))
    return torch.einsum("nchw,c->nhw", x, x.new_tensor(_LUMINANCE))[:, None]


def resize(x: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Images of another size, a number or (height, width): bilinear, with antialiasing.

    Examples:
        >>> import torch
        >>> from opteq.data import resize
        >>> resize(torch.rand(2, 3, 8, 8), (4, 6)).shape
        torch.Size([2, 3, 4, 6])
    """
    _check_images("resize", x)
    shape = height_width("resize", size)
    if tuple(x.shape[2:]) == shape:
        return x
    return interpolate(x, shape, mode="bilinear", antialias=True, align_corners=False)


def flat(x: Tensor) -> Tensor:
    """Samples as vectors: [n, d].

    Examples:
        >>> import torch
        >>> from opteq.data import flat
        >>> flat(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 192])
    """
    return x.flatten(1)


def unit_norm(x: Tensor) -> Tensor:
    """x_i/|x_i|. A sample of norm zero is an error.

    Examples:
        >>> import torch
        >>> from opteq.data import unit_norm
        >>> unit_norm(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """
    return _scaled("unit_norm", x, 1.0)


def norm_sqrt_d(x: Tensor) -> Tensor:
    """sqrt(d) x_i/|x_i|, d the number of entries of a sample. A sample of norm zero is an error.

    Examples:
        >>> import torch
        >>> from opteq.data import norm_sqrt_d
        >>> norm_sqrt_d(torch.tensor([[2.0, 0.0, 0.0, 0.0]]))
        tensor([[2., 0., 0., 0.]])
    """
    return _scaled("norm_sqrt_d", x, math.sqrt(x[:1].numel()))


def _scaled(owner: str, x: Tensor, length: float) -> Tensor:
    check_floating(owner, "x", x)
    norms = sample_norms(x)
    bad = ~(norms.isfinite() & (norms > 0))
    if bad.any():
        sample = int(bad.nonzero()[0])
        raise ValueError(invalid(owner, "x", f"samples of a finite norm > 0; look at sample {sample}", float(norms[sample])))
    return x * (length / norms).reshape(-1, *[1] * (x.ndim - 1))


def theory_split(
    dataset: Dataset,
    *,
    classes: tuple[int, int] = (0, 1),
    train: int = 1000,
    test: int = 1000,
    norm: Literal["unit", "sqrt_d"] = "unit",
    size: int | None = 28,
    targets: tuple[float, float] = (-1.0, 1.0),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Dataset:
    """The data of the convergence theory: vectors x [n, d] of one norm with real labels y [n].

    Half of the samples are drawn from each of two classes. "unit" with size 28 (grey images of 28 x 28 pixels) is the preparation
    of the gamma-scaled ReLU networks (Section 7 of their paper), "sqrt_d" with size None (images as they are) that of
    Gaussian-initialised DEQs (Assumption 2 and Section 5). Neither paper says which numbers stand for the classes, only that
    |y| = O(1): `targets` are -1 and 1 by default, so that a readout that begins at 0 begins in the middle. The points of `sphere`
    have neither classes nor pixels: the first `train` and `test` of them are taken, with their own labels.

    Examples:
        >>> from opteq.data import load, theory_split
        >>> train, test = theory_split(load("digits"), train=100, test=50, size=None)
        >>> train.x.shape, train.x.norm(dim=1).round(decimals=6).unique().tolist(), train.y.unique().tolist()
        (torch.Size([100, 64]), [1.0], [-1.0, 1.0])
    """
    check_instance("theory_split", "dataset", dataset, Dataset, "a Dataset")
    if norm not in ("unit", "sqrt_d"):
        raise ValueError(invalid("theory_split", "norm", "'unit' or 'sqrt_d'", norm))

    def part(name: str, split: Split, count: int) -> Split:
        check_integer("theory_split", name, count, 2)
        _check_labels("theory_split", "dataset", split)
        chosen = _chosen(name, split, count, classes, targets, seed) if dataset.classes else _first(name, split, count)
        x = chosen.x[:].to(dtype)
        if size is not None and x.ndim == 4:
            x = resize(grey(x), size)
        return Split((unit_norm if norm == "unit" else norm_sqrt_d)(flat(x)), chosen.y.to(dtype))

    return Dataset(dataset.name, part("train", dataset.train, train), part("test", dataset.test, test), ())


def _chosen(name: str, split: Split, count: int, classes: tuple[int, int], targets: tuple[float, float], seed: int) -> Split:
    """Half of the samples from each class, with their targets."""
    if count % 2:
        raise ValueError(invalid("theory_split", name, "even: half of the samples are of each class", count))
    if len(targets) != 2:
        raise ValueError(invalid("theory_split", "targets", "two numbers", targets))
    chosen = two_classes(split, classes, count // 2, seed)
    return Split(chosen.x, torch.tensor(targets, dtype=torch.float64)[chosen.y])


def _first(name: str, split: Split, count: int) -> Split:
    if count > len(split):
        raise ValueError(invalid("theory_split", name, f"at most {len(split)}, the samples that there are", count))
    return Split(split.x[:count], split.y[:count])


def _check_labels(owner: str, name: str, split: Split) -> None:
    if split.y.ndim != 1:
        raise ValueError(invalid(owner, name, "one label a sample, not a map of them: y of shape [n]", list(split.y.shape)))


def _check_images(owner: str, x: Tensor) -> None:
    check_floating(owner, "x", x)
    if x.ndim != 4:
        raise ValueError(invalid(owner, "x", "of shape [n, channels, height, width]", list(x.shape)))
