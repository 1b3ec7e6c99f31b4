"""Photographs for experiments that train on files of images; their smoke presets make them of the embedded digits."""

from pathlib import Path

import torch
from torch import Tensor

from opteq import data
from opteq.data import Split
from opteq.data.files import optional

__all__ = ["digit_classes", "digit_maps"]


def digit_classes(root: Path, *, side: int, count: int) -> str:
    """The folder `root`, with `count` zeros and ones of side x side pixels in each of the folders train and val of Imagenette64."""
    for part, split in zip(("train", "val"), data.load("digits"), strict=True):
        for i, (image, label) in enumerate(some(split, count, classes=2)):
            write(root / "imagenette64" / part / f"n{label}" / f"{i}.png", enlarged(image, side))
    return str(root)


def digit_maps(root: Path, *, side: int, count: int) -> str:
    """The folder `root`, with `count` digits in each folder of CamVid; the label of a pixel is that of its digit, or 10."""
    digits = data.load("digits")
    for part, split in (("train", digits.train), ("val", digits.test), ("test", digits.test)):
        for i, (image, label) in enumerate(some(split, count)):
            pixels = enlarged(image, side)
            write(root / "camvid" / part / f"{i}.png", pixels)
            write(root / "camvid" / f"{part}annot" / f"{i}.png", torch.where(pixels > 100, label, 10).to(torch.uint8))
    return str(root)


def some(split: Split, count: int, classes: int = 10) -> list[tuple[Tensor, int]]:
    """The first images of the first classes, and their labels."""
    rows = (split.y < classes).nonzero()[:count, 0]
    return list(zip(split.x[rows], split.y[rows].tolist(), strict=True))


def enlarged(image: Tensor, side: int) -> Tensor:
    """A grey image of side x side pixels, as bytes."""
    found = torch.nn.functional.interpolate(image[None], size=side, mode="bilinear")
    return found[0, 0].mul(255).round().to(torch.uint8)


def write(path: Path, pixels: Tensor) -> None:
    """An image file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    optional("PIL.Image", "Pillow").fromarray(pixels.numpy()).save(path)
