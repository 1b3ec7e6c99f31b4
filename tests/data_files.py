"""Makers of tiny data sets in the formats of the real ones."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from opteq.data.arrays import CIFAR_BINARY, CIFAR_PYTHON, IDX_FILES


def random_bytes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, counts: tuple[int, int] = (20, 10), *, packed: bool = True) -> list[np.ndarray]:
    """The four files of MNIST with a few random images; the arrays in the order of IDX_FILES."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    for part, count in enumerate(counts):
        arrays += [random_bytes(part, count, 28, 28), (np.arange(count) % 10).astype(np.uint8)]
    for name, array in zip(IDX_FILES, arrays, strict=True):
        data = idx_bytes(array)
        (folder / f"{name}{'.gz' if packed else ''}").write_bytes(gzip.compress(data, 1) if packed else data)
    return arrays


def cifar_arrays(count: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and labels of the six files of CIFAR-10."""
    return [(random_bytes(i, count, 3072), (np.arange(count) + i).astype(np.uint8) % 10) for i in range(6)]


def write_cifar_binary(folder: Path, count: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in zip(CIFAR_BINARY, cifar_arrays(count), strict=True):
        (folder / name).write_bytes(np.concatenate([y[:, None], x], 1).tobytes())


def write_cifar_python(folder: Path, protocol: int = 2, count: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in zip(CIFAR_PYTHON, cifar_arrays(count), strict=True):
        batch = {b"batch_label": b"a batch", b"labels": y.tolist(), b"data": x, b"filenames": [b"a.png"] * count}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))


def python2_batch(x: np.ndarray, y: np.ndarray) -> bytes:
    """A batch as Python 2 and an old numpy pickled it: byte strings as such, numpy.core, and 0 and 1 for booleans."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R" + b"(K\x03" + short(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    blank = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + short(b"b") + b"\x87R"
    raw = b"T" + struct.pack("<i", x.size) + x.tobytes()
    array = blank + b"(K\x01" + number(x.shape[0]) + number(x.shape[1]) + b"\x86" + dtype + b"\x89" + raw + b"tb"
    labels = b"](" + b"".join(number(int(label)) for label in y) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"labels") + labels + b"u."


def write_svhn(folder: Path, count: int = 12) -> None:
    """Labels 1 to 10, as SVHN has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, part in enumerate(("train", "test")):
        labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
        savemat(folder / f"{part}_32x32.mat", {"X": random_bytes(seed, 32, 32, 3, count), "y": labels}, do_compression=True)


def write_image(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_class_folders(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), size: tuple[int, int] = (8, 8)) -> None:
    """Three images a class in train and two in val."""
    for part, count in (("train", 3), ("val", 2)):
        for label in classes:
            for i in range(count):
                write_image(folder / part / label / f"{i}.png", random_bytes(i, *size, 3))


def write_camvid(folder: Path, size: tuple[int, int] = (6, 8), count: int = 2) -> None:
    for part in ("train", "val", "test"):
        for i in range(count):
            write_image(folder / part / f"frame{i}.png", random_bytes(i, *size, 3))
            write_image(folder / f"{part}annot" / f"frame{i}.png", random_bytes(i, *size) % 12)


def write_cityscapes(folder: Path, kind: str = "labelIds", size: tuple[int, int] = (8, 16)) -> None:
    for part in ("train", "val"):
        for city in ("aachen", "bonn"):
            stem = f"{city}_000000_000019"
            write_image(folder / "leftImg8bit" / part / city / f"{stem}_leftImg8bit.png", random_bytes(0, *size, 3))
            labels = np.arange(size[0] * size[1], dtype=np.uint8).reshape(size)
            masks = {"labelIds": labels % 34, "labelTrainIds": np.where(labels % 20 == 19, 255, labels % 20).astype(np.uint8)}
            for name in ["labelIds", kind]:
                write_image(folder / "gtFine" / part / city / f"{stem}_gtFine_{name}.png", masks[name])
