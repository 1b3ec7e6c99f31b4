"""Data sets that are folders of image files, a folder a class."""

import os
from pathlib import Path

import torch

from opteq.data.images import Images, held, image_files, image_size
from opteq.data.splits import Dataset, Split

__all__ = ["class_folders", "subfolders"]

# The ten classes of Imagenette, which are named by their WordNet numbers
_WORDNET = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player", "n03000684": "chain saw",
    "n03028079": "church", "n03394916": "French horn", "n03417042": "garbage truck", "n03425413": "gas pump",
    "n03445777": "golf ball", "n03888257": "parachute",
}  # fmt: skip


def class_folders(folder: Path, name: str, size: tuple[int, int] | None) -> Dataset:
    """train/CLASS/* and val/CLASS/*; the classes are the folders in the order of their names, and the test part is val.

    Without a size, the images get that of the first.
    """
    classes, others = (subfolders(folder / part) for part in ("train", "val"))
    if classes != others:
        odd = ", ".join(sorted(set(classes) ^ set(others))[:5])
        raise ValueError(f"{folder} must have the same classes in train and val. Got {odd} in only one of them instead.")
    found = [[image_files(folder / part / label) for label in classes] for part in ("train", "val")]
    size = size or image_size(found[0][0][0])
    xs = held([Images([path for files in part for path in files], size) for part in found])
    ys = [torch.arange(len(classes)).repeat_interleave(torch.tensor([len(files) for files in part])) for part in found]
    train, test = (Split(x, y) for x, y in zip(xs, ys, strict=True))
    return Dataset(name, train, test, tuple(_WORDNET.get(label, label) for label in classes))


def subfolders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted; at least one."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise FileNotFoundError(f"{folder} must hold folders of images, and has none.")
    return names
