"""Readers of files that hold arrays: IDX (MNIST), the binary and Python batches of CIFAR-10, and SVHN's .mat."""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from opteq.data.checksums import MD5
from opteq.data.files import check_md5, md5, present
from opteq.data.pickles import load_plain
from opteq.data.splits import Split, check_labels

__all__ = ["CIFAR_BINARY", "CIFAR_PYTHON", "IDX_FILES", "SVHN_FILES", "cifar", "idx", "svhn"]

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_PYTHON = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_BINARY = tuple(f"{name}.bin" for name in CIFAR_PYTHON)
SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")

_Array = np.ndarray[Any, Any]


def idx(folder: Path, name: str, verify: bool) -> tuple[Split, Split]:
    """Training and test part of MNIST and its like."""
    _refuse_other(folder, name)
    arrays = [_idx_array(folder, file, MD5[name] if verify else {}) for file in IDX_FILES]
    return _idx_split(folder, IDX_FILES[:2], *arrays[:2]), _idx_split(folder, IDX_FILES[2:], *arrays[2:])


def _refuse_other(folder: Path, name: str) -> None:
    """Both data sets have files of the same names and sizes: the smallest one, if it is a published one, says which these are."""
    found = md5(present(folder, IDX_FILES[3], True) or folder / IDX_FILES[3])
    other = next((other for other in ("mnist", "fashion-mnist") if found in MD5[other].values()), name)
    if other != name:
        raise ValueError(f"{folder} holds {other}, not {name}: load it by that name, or name another folder.")


def _idx_split(folder: Path, files: Sequence[str], images: _Array, labels: _Array) -> Split:
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {files[0]} holds {len(images)} images, but {files[1]} holds {len(labels)} labels.")
    return Split(_pixels([images[:, None]]), _labels(folder / files[1], labels))


def _idx_array(folder: Path, name: str, published: dict[str, str]) -> _Array:
    """The array of one IDX file: a magic number that says bytes in 1 or 3 dimensions, the sizes, the bytes."""
    path = present(folder, name, True) or folder / name
    check_md5(path, published)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _idx_content(path, file, 3 if "idx3" in name else 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error


def _idx_content(path: Path, file: BinaryIO | gzip.GzipFile, dimensions: int) -> _Array:
    start = 4 * (1 + dimensions)
    head = _bytes(file, start)
    magic, *shape = struct.unpack(f">{1 + dimensions}I", head.ljust(start, b"\0"))
    if magic != 0x800 + dimensions:
        raise ValueError(f"{path} is not an IDX file of bytes: its magic number must be {0x800 + dimensions}. Got {magic} instead.")
    if len(head) < start or 0 in shape[1:]:
        got = f"the sizes {shape}" if len(head) == start else f"{len(head)} bytes"
        raise ValueError(f"{path} must begin with {start} bytes: how many items there are, and their sizes. Got {got} instead.")
    size = math.prod(shape)
    data = _bytes(file, size + 1)
    if len(data) != size:
        found = "more" if len(data) > size else start + len(data)
        raise ValueError(f"{path} must have {start + size} bytes for its {shape[0]} items. Got {found} instead.")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _bytes(file: BinaryIO | gzip.GzipFile, most: int) -> bytearray:
    """The next bytes of a file, at most so many, writable as torch wants them.

    In pieces: memory grows with what is there, whatever a damaged header promises and however far a .gz would unpack.
    """
    data = bytearray()
    while piece := file.read(min(most - len(data), 2**20)):
        data += piece
    return data


def cifar(folder: Path, name: str, verify: bool) -> tuple[Split, Split]:
    """Training and test part of CIFAR-10, from *.bin files or Python batches."""
    binary = all((folder / file).exists() for file in CIFAR_BINARY)
    files = [folder / file for file in (CIFAR_BINARY if binary else CIFAR_PYTHON)]
    parts = [_cifar_batch(path, MD5[name] if verify else {}) for path in files]
    return _cifar_split(parts[:-1]), _cifar_split(parts[-1:])


def _cifar_split(parts: Sequence[tuple[_Array, Tensor]]) -> Split:
    return Split(_pixels([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def _cifar_batch(path: Path, published: dict[str, str]) -> tuple[_Array, Tensor]:
    """uint8 [n, 3, 32, 32] and the labels of one file."""
    check_md5(path, published)
    x, y = _cifar_records(path) if path.suffix == ".bin" else _cifar_pickle(path)
    return x.reshape(-1, 3, 32, 32), _labels(path, y)


def _cifar_records(path: Path) -> tuple[_Array, _Array]:
    """Records of one label and 3,072 pixels."""
    data = np.fromfile(path, np.uint8)
    if len(data) == 0 or len(data) % 3073:
        raise ValueError(f"{path} must hold records of 3073 bytes. Got {len(data)} bytes instead.")
    records = data.reshape(-1, 3073)
    return records[:, 1:], records[:, 0]


def _cifar_pickle(path: Path) -> tuple[_Array, _Array]:
    """{"data": uint8 [n, 3072], "labels": n numbers}."""
    batch = load_plain(path)
    entries = {str(key, "latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    x, y = entries.get("data"), np.asarray(entries.get("labels", []))
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape[1:] != (3072,):
        raise ValueError(f"{path} must hold 'data', an array of bytes [n, 3072]. Got {getattr(x, 'shape', None)} instead.")
    if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise ValueError(f"{path} must hold 'labels', {len(x)} whole numbers. Got {y.dtype} {list(y.shape)} instead.")
    return x, y


def svhn(folder: Path, name: str, verify: bool) -> tuple[Split, Split]:
    """Training and test part of SVHN, cropped digits; its label 10 is the digit 0."""
    train, test = (_svhn_part(folder / file, MD5[name] if verify else {}) for file in SVHN_FILES)
    return train, test


def _svhn_part(path: Path, published: dict[str, str]) -> Split:
    from scipy.io import loadmat  # type: ignore[import-untyped]

    check_md5(path, published)
    try:
        content = loadmat(path, variable_names=["X", "y"])
        x, y = content["X"], content["y"].reshape(-1)
    except Exception as error:  # whatever the reader meets in a broken file: it has no error of its own for that
        raise ValueError(f"{path} is not a MATLAB file with X and y: {error!r}") from error
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, len(y)):
        raise ValueError(
            f"{path} must hold bytes X [32, 32, 3, {len(y)}] for its {len(y)} labels. Got {x.dtype} {list(x.shape)} instead."
        )
    return Split(_pixels([x.transpose(3, 2, 0, 1)]), _labels(path, np.where(y == 10, 0, y)))


def _pixels(parts: Sequence[_Array]) -> Tensor:
    """float32 in [0, 1] of bytes, without a second copy of all of them."""
    x = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    for rows, part in zip(x.split([len(part) for part in parts]), parts, strict=True):
        rows.copy_(torch.from_numpy(part)).div_(255)
    return x


def _labels(path: Path, labels: _Array) -> Tensor:
    """int64 labels of ten classes."""
    y = torch.from_numpy(labels.astype(np.int64))
    check_labels(path, y, 10)
    return y
