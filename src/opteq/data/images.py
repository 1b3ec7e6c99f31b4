"""Images from files, through Pillow: decoded at once where they are few, when they are indexed where they are many."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opteq.checks import check_instance, check_integer, invalid
from opteq.data.files import optional

__all__ = ["IN_MEMORY", "Images", "decode", "height_width", "held", "image_files", "image_size", "in_chunks", "opened"]

IN_MEMORY = 2 * 2**30
"""Folders whose images take more bytes than this, as float32 and all parts together, stay lazy."""

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
_WORKERS = min(8, os.cpu_count() or 1)  # Pillow decodes outside the interpreter's lock


@dataclass(frozen=True, eq=False)
class Images:
    """Image files as if they were a float32 tensor [n, 3, height, width] in [0, 1].

    Indexed by an int, a slice, or a tensor or list of indices (or a mask), it gives that tensor, decoded by a few threads. Each
    image is cropped around its centre to the shape of `size` (height, width), then resized. `take` chooses without decoding.

    Examples:
        >>> from PIL import Image
        >>> from opteq.data import Images
        >>> Image.new("RGB", (20, 10), "white").save("white.png")
        >>> images = Images(["white.png"], size=(8, 8))
        >>> images.shape, images[0].mean().item()
        (torch.Size([1, 3, 8, 8]), 1.0)
    """

    paths: Sequence[str] = field(repr=False)
    size: tuple[int, int]
    dtype = torch.float32

    def __post_init__(self) -> None:
        if isinstance(self.paths, (str, bytes, os.PathLike)):
            raise TypeError(invalid(self, "paths", "a list of paths", self.paths))
        check_instance(self, "size", self.size, tuple, "a tuple (height, width)")
        height_width(self, self.size)

    @property
    def shape(self) -> torch.Size:
        """[n, 3, height, width]."""
        return torch.Size((len(self.paths), 3, *self.size))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Tensor:
        rows = torch.arange(len(self))[index]  # a tensor's own rules and errors
        positions = rows.flatten().tolist()
        x = torch.empty(len(positions), *self.shape[1:])

        def fill(start: int, stop: int) -> None:
            pixels = np.stack([decode(self.paths[position], self.size) for position in positions[start:stop]])
            x[start:stop] = torch.from_numpy(pixels).permute(0, 3, 1, 2)

        in_chunks(fill, len(positions))
        return x.div_(255).reshape(*rows.shape, *self.shape[1:])

    def take(self, rows: slice | Tensor | Sequence[int]) -> "Images":
        """The images of these rows, a slice, indices or a mask, in their order; nothing is decoded."""
        chosen = torch.arange(len(self))[rows]
        if chosen.ndim != 1:
            raise ValueError(invalid(self, "rows", "a slice, or indices or a mask of one dimension", list(chosen.shape)))
        return Images([self.paths[row] for row in chosen.tolist()], self.size)


def height_width(owner: object, size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a `size` parameter, which may be a number for both."""
    pair = size if isinstance(size, tuple) else (size, size)
    for side in pair:
        check_integer(owner, "size", side, 1)
    if len(pair) != 2:
        raise ValueError(invalid(owner, "size", "a number or (height, width)", size))
    return pair


def in_chunks(work: Callable[[int, int], None], count: int) -> None:
    """work(start, stop) for pieces of range(count), in a few threads; the first error is raised."""
    step = max(1, min(64, count // (4 * _WORKERS)))  # few enough for all threads to end together, many enough to be cheap
    starts = range(0, count, step)
    with ThreadPoolExecutor(_WORKERS) as pool:
        futures = [pool.submit(work, start, min(start + step, count)) for start in starts]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # of those that are left after an error


def held(parts: Sequence[Images]) -> list[Tensor | Images]:
    """The parts of one data set as tensors if they fit in memory together, else as they are."""
    size = sum(4 * part.shape.numel() for part in parts)
    return [part[:] for part in parts] if size <= IN_MEMORY else list(parts)


def image_files(folder: Path) -> list[str]:
    """The image files of a folder, sorted; at least one."""
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith(_SUFFIXES) and name[0] != ".")
    if not names:
        raise FileNotFoundError(f"{folder} holds no images ({', '.join(_SUFFIXES)}).")
    return [os.path.join(folder, name) for name in names]


def opened(path: str, read: Callable[[Any], Any]) -> Any:
    """read(image) of an image file; ValueError if that is not what it is."""
    image = optional("PIL.Image", "Pillow")
    try:
        with image.open(path) as file:
            return read(file)
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:  # all of them occur for broken files
        raise ValueError(f"{path} is not an image that can be read: {error}") from error


def image_size(path: str) -> tuple[int, int]:
    """(height, width) of an image file."""
    size: tuple[int, int] = opened(path, lambda file: (file.height, file.width))
    return size


def _eight_bits(file: Any) -> Any:
    """An image as RGB; 16 bits a pixel are scaled, where Pillow would cut them off."""
    if file.mode == "F":
        raise ValueError("its pixels are floating-point numbers of no known range; save it with 8 or 16 bits a pixel")
    if not file.mode.startswith("I"):
        return file.convert("RGB")
    pixels = np.asarray(file).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError(f"its pixels are from {pixels.min()} to {pixels.max()}; save it with 8 or 16 bits a pixel")
    scaled = ((pixels * 255 + 32767) // 65535).astype(np.uint8)
    return optional("PIL.Image", "Pillow").fromarray(scaled).convert("RGB")


def decode(path: str, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """uint8 [height, width, 3] of an image file, cropped around its centre and resized."""
    fit = optional("PIL.ImageOps", "Pillow").fit
    height, width = size

    def read(file: Any) -> np.ndarray[Any, Any]:
        file.draft(None, (width, height))  # a JPEG much larger than needed is decoded at a half, a quarter or an eighth
        return np.array(fit(_eight_bits(file), (width, height), optional("PIL.Image", "Pillow").Resampling.BILINEAR))

    pixels: np.ndarray[Any, Any] = opened(path, read)
    return pixels
