"""Data sets of images beside label maps, a class for each pixel."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opteq.data.files import optional
from opteq.data.folders import subfolders
from opteq.data.images import Images, held, image_files, image_size, in_chunks, opened
from opteq.data.splits import Dataset, Split, check_labels

__all__ = ["MASKS_IN_MEMORY", "camvid", "cityscapes"]

MASKS_IN_MEMORY = 4 * 2**30
"""Label maps are always held; more bytes than this, as int64, are refused."""

# The 11 classes of the SegNet version of CamVid, in the order of their ids
_CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")

# name: id. The train ids 0 to 18 are their places in this list (cityscapesscripts/helpers/labels.py)
_CITYSCAPES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19, "traffic sign": 20,
    "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27, "bus": 28, "train": 31,
    "motorcycle": 32, "bicycle": 33,
}  # fmt: skip

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Pair:
    """An image and its label map; `raw` if that has ids to be turned into labels."""

    image: str
    mask: str
    raw: bool = False


@dataclass(frozen=True)
class _Labels:
    """Which labels there are. `table` gives the label of each id, where files have ids."""

    count: int
    void: int
    table: Tensor | None = None


def camvid(folder: Path, name: str, size: tuple[int, int] | None) -> Dataset:
    """train, val and test with their label maps of the same file names in trainannot, valannot and testannot; 11 is void."""
    parts = []
    for part in ("train", "val", "test"):
        images, masks = (_by_stem(image_files(folder / f"{part}{end}")) for end in ("", "annot"))
        parts.append([_Pair(*pair) for pair in _paired(folder / part, images, masks)])
    train, valid, test = _splits(parts, size, _Labels(len(_CAMVID), 11))
    return Dataset(name, train, test, _CAMVID, ignore=11, valid=valid)


def cityscapes(folder: Path, name: str, size: tuple[int, int] | None) -> Dataset:
    """leftImg8bit/{train,val}/CITY/*_leftImg8bit.png, gtFine/{train,val}/CITY/*_gtFine_labelTrainIds.png or *_labelIds.png.

    The labels of its own test part are not public: the test part is val. 255 is void.
    """
    table = torch.full((256,), 255)
    table[list(_CITYSCAPES.values())] = torch.arange(len(_CITYSCAPES))
    parts = [_cityscapes_pairs(folder, part) for part in ("train", "val")]
    train, test = _splits(parts, size, _Labels(len(_CITYSCAPES), 255, table))
    return Dataset(name, train, test, tuple(_CITYSCAPES), ignore=255)


def _cityscapes_pairs(folder: Path, part: str) -> list[_Pair]:
    images: dict[str, str] = {}
    masks: dict[str, str] = {}
    for city in subfolders(folder / "leftImg8bit" / part):
        images |= _by_stem(image_files(folder / "leftImg8bit" / part / city), "_leftImg8bit")
        files = image_files(folder / "gtFine" / part / city)
        for kind in ("_gtFine_labelIds", "_gtFine_labelTrainIds"):  # the second, where it is there, replaces the first
            masks |= _by_stem([path for path in files if Path(path).stem.endswith(kind)], kind)
    pairs = _paired(folder / "leftImg8bit" / part, images, masks)
    return [_Pair(image, mask, raw=Path(mask).stem.endswith("_labelIds")) for image, mask in pairs]


def _by_stem(paths: Sequence[str], suffix: str = "") -> dict[str, str]:
    return {Path(path).stem.removesuffix(suffix): path for path in paths}


def _paired(folder: Path, images: dict[str, str], masks: dict[str, str]) -> list[tuple[str, str]]:
    odd = sorted(set(images) ^ set(masks))
    if odd:
        lacks, there = ("label map", "image") if odd[0] in images else ("image", "label map")
        raise FileNotFoundError(f"{folder} must have a label map for every image. There is no {lacks} for the {there} {odd[0]}.")
    return [(images[stem], masks[stem]) for stem in images]


def _splits(parts: Sequence[Sequence[_Pair]], size: tuple[int, int] | None, labels: _Labels) -> list[Split]:
    """Images with their label maps; without a size all must have that of the first."""
    height, width = size or image_size(parts[0][0].image)
    total = 8 * sum(map(len, parts)) * height * width
    if total > MASKS_IN_MEMORY:
        raise ValueError(f"Label maps of {height} x {width} pixels would take {total / 2**30:.1f} GiB. Give a smaller size=.")
    ys = [_masks(part, (height, width), size is None, labels) for part in parts]
    xs = held([Images([pair.image for pair in part], (height, width)) for part in parts])
    return [Split(x, y) for x, y in zip(xs, ys, strict=True)]


def _masks(pairs: Sequence[_Pair], size: tuple[int, int], exact: bool, labels: _Labels) -> Tensor:
    """int64 [n, height, width]."""
    y = torch.empty(len(pairs), *size, dtype=torch.int64)

    def fill(start: int, stop: int) -> None:
        for row in range(start, stop):
            pair, found = pairs[row], image_size(pairs[row].image)
            if exact and found != size:
                raise ValueError(f"{pair.image} is {found[0]} x {found[1]}, others {size[0]} x {size[1]}: give the size= of all.")
            ids = torch.from_numpy(_mask(pair.mask, found, size)).long()
            y[row] = labels.table[ids] if pair.raw and labels.table is not None else ids
            check_labels(pair.mask, y[row : row + 1], labels.count, labels.void)

    in_chunks(fill, len(pairs))
    return y


def _mask(path: str, expected: tuple[int, int], size: tuple[int, int]) -> _Array:
    """The bytes of a label map, which must have the size of its image, cropped and resized as that is, without mixing ids."""
    fit, nearest = optional("PIL.ImageOps", "Pillow").fit, optional("PIL.Image", "Pillow").Resampling.NEAREST

    def read(file: Any) -> tuple[str, tuple[int, int], _Array]:
        return file.mode, (file.height, file.width), np.array(fit(file, (size[1], size[0]), nearest))

    mode, found, pixels = opened(path, read)
    if mode not in ("L", "P"):
        raise ValueError(f"{path} must be a label map, one byte a pixel. Got an image of mode {mode} instead.")
    if found != expected:
        raise ValueError(f"{path} must be {expected[0]} x {expected[1]}, as its image. Got {found[0]} x {found[1]} instead.")
    return np.asarray(pixels)
