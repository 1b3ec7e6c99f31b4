"""Mutated data files: the data that the bytes say, or a clear error; nothing in them is run, and no claim takes memory."""

import gzip
import io
import os
import pickle
import random
import resource
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mutations import mutated
from PIL import Image
from scipy.io import savemat

from data_files import (
    cifar_arrays,
    python2_batch,
    random_bytes,
    write_camvid,
    write_cifar_binary,
    write_cifar_python,
    write_class_folders,
    write_idx,
    write_svhn,
)
from opteq.data import Dataset, check_split, load
from opteq.data.arrays import IDX_FILES
from processes import finish, in_child

pytestmark = [pytest.mark.stress, pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")]


def loaded(name: str, folder: Path) -> Dataset | None:
    """The data set, checked; None if there was an error, which must be short and name a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Pillow about odd files
        try:
            data = load(name, folder, verify=False)
        except (ValueError, FileNotFoundError) as error:
            text = str(error)
            assert str(folder) in text, text
            assert len(text) < 1000 + 2 * len(str(folder)), text
            return None
    for split in data:
        check_split(split, data.classes, data.ignore)
        assert 0 <= split.x[:].min() <= split.x[:].max() <= 1 if len(split) else True
    return data


def fuzz(folder: Path, files: list[Path], count: int, check: Callable[[], object], seed: int) -> int:
    """Change one of the files, check, put it back; a failure keeps the file and names it."""
    draw = random.Random(seed)
    for i in range(count):
        path = draw.choice(files)
        whole = path.read_bytes()
        changed = mutated(whole, draw)
        path.write_bytes(changed)
        try:
            check()
        except BaseException as error:
            error.add_note(f"file {i} of seed {seed}: {path.name}, {len(changed)} bytes")
            raise
        path.write_bytes(whole)
    return count


def plain_idx(path: Path) -> np.ndarray | None:
    """An IDX file, read without the library; None if it is none."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except Exception:
        return None
    dimensions = 3 if "idx3" in path.name else 1
    head = 4 * (1 + dimensions)
    if len(content) < head:
        return None
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:head])
    sound = magic == 0x800 + dimensions and len(content) == head + int(np.prod(shape, dtype=object))
    return np.frombuffer(content[head:], np.uint8).reshape(shape) if sound else None


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_idx_files(tmp_path, packed, amount, tally):
    write_idx(tmp_path, (6, 4), packed=packed)
    files = [tmp_path / f"{name}{'.gz' if packed else ''}" for name in IDX_FILES]

    def check() -> None:
        data, arrays = loaded("mnist", tmp_path), [plain_idx(path) for path in files]
        if any(array is None for array in arrays):
            assert data is None
        elif data is not None:
            for split, x, y in zip(data, arrays[::2], arrays[1::2], strict=True):
                assert torch.equal(split.x, torch.from_numpy(x.copy()).float()[:, None] / 255)
                assert torch.equal(split.y, torch.from_numpy(y.copy()).long())

    tally("mutated files", fuzz(tmp_path, files, amount(30, 600), check, 1))


def test_cifar_binary_files(tmp_path, amount, tally):
    write_cifar_binary(tmp_path, 2)
    files = sorted(tmp_path.iterdir())

    def check() -> None:
        data = loaded("cifar10", tmp_path)
        contents = [path.read_bytes() for path in files]
        sound = all(content and len(content) % 3073 == 0 and max(content[::3073]) < 10 for content in contents)
        assert (data is not None) == sound
        if data is not None:
            train = np.frombuffer(b"".join(contents[:-1]), np.uint8).reshape(-1, 3073)
            assert torch.equal(data.train.y, torch.from_numpy(train[:, 0].copy()).long())
            assert torch.equal(data.train.x.flatten(1), torch.from_numpy(train[:, 1:].copy()).float() / 255)

    tally("mutated files", fuzz(tmp_path, files, amount(20, 500), check, 2))


@pytest.mark.parametrize("kind", ["protocol 2", "protocol 5", "python 2"])
def test_cifar_python_batches(tmp_path, kind, amount, tally):
    write_cifar_python(tmp_path, 5 if kind == "protocol 5" else 2, 2)
    if kind == "python 2":
        for path, arrays in zip(sorted(tmp_path.iterdir()), cifar_arrays(2), strict=True):
            path.write_bytes(python2_batch(*arrays))
    tally("mutated files", fuzz(tmp_path, sorted(tmp_path.iterdir()), amount(20, 500), lambda: loaded("cifar10", tmp_path), 3))


@pytest.mark.parametrize("compressed", [False, True])
def test_mat_files(tmp_path, compressed, amount, tally):
    write_svhn(tmp_path, 3)
    if not compressed:
        labels = np.array([[1], [2], [10]], np.uint8)
        for part in ("train", "test"):
            savemat(tmp_path / f"{part}_32x32.mat", {"X": random_bytes(0, 32, 32, 3, 3), "y": labels})
    tally("mutated files", fuzz(tmp_path, sorted(tmp_path.iterdir()), amount(15, 400), lambda: loaded("svhn", tmp_path), 4))


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "ppm", "webp"])
def test_images(tmp_path, suffix, amount, tally):
    write_class_folders(tmp_path, size=(9, 7))
    for path in tmp_path.rglob("*.png"):
        Image.open(path).save(path.with_suffix(f".{suffix}"))
        if suffix != "png":
            path.unlink()
    files = sorted(tmp_path.rglob(f"*.{suffix}"))
    tally("mutated files", fuzz(tmp_path, files, amount(4, 200), lambda: loaded("imagenette64", tmp_path), 5))


def test_label_maps(tmp_path, amount, tally):
    write_camvid(tmp_path)
    files = sorted(tmp_path.rglob("*.png"))
    tally("mutated files", fuzz(tmp_path, files, amount(4, 200), lambda: loaded("camvid", tmp_path), 6))


# Pickles that want to run something

HOSTILE = [
    *(("os", "system"), ("posix", "mkdir"), ("nt", "system"), ("subprocess", "Popen"), ("importlib", "import_module")),
    *(("builtins", name) for name in ("exec", "eval", "getattr", "__import__", "open", "compile")),
    *(("torch", "load"), ("numpy", "load"), ("pickle", "loads"), ("copyreg", "__newobj__"), ("numpy", "ndarray.tofile")),
    *(("numpy.core.multiarray", "x"), ("numpy.core.multiarray", "_reconstruct.__globals__")),
]


def calling(module: str, name: str, argument: bytes, style: str) -> bytes:
    """Opcodes that name a function and call it with one text, in one of the ways there are."""
    text = b"X" + struct.pack("<I", len(argument)) + argument
    named = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    stacked = b"".join(b"X" + struct.pack("<I", len(part)) + part.encode() for part in (module, name)) + b"\x93"
    return {
        "reduce": named + text + b"\x85R",
        "stack global": stacked + text + b"\x85R",
        "inst": b"(" + text + b"i" + module.encode() + b"\n" + name.encode() + b"\n",
        "obj": b"(" + named + text + b"o",
        "newobj": named + text + b"\x85\x81",
        "newobj_ex": named + text + b"\x85}\x92",
        "build": named + b"N" + b"}" + text + b"Ns\x86b",
        "extension": b"\x82\x01" + text + b"\x85R",
        "persistent": b"P" + argument + b"\n",
    }[style]


STYLES = ["reduce", "stack global", "inst", "obj", "newobj", "newobj_ex", "build", "extension", "persistent"]


def test_hostile_pickles_are_refused_and_not_run(tmp_path, amount, tally):
    write_cifar_python(tmp_path, 2, 2)
    batch, trap, draw = tmp_path / "data_batch_2", tmp_path / "trap", random.Random(7)
    whole, count = batch.read_bytes(), amount(30, 600)
    for _ in range(count):
        module, name = draw.choice(HOSTILE)
        argument = draw.choice([str(trap), f"import os; os.mkdir({str(trap)!r})", f"mkdir {trap}"]).encode()
        call = calling(module, name, argument, draw.choice(STYLES))
        head, after = (b"\x80\x04", b"0" + whole[2:]) if draw.random() < 0.5 else (whole[:-1], b"0.")
        batch.write_bytes(head + call + after)
        assert loaded("cifar10", tmp_path) is None, call
        assert not trap.exists(), call
    tally("mutated files", count)


# Memory


def in_little_memory(work: Callable[[], object], spare: int) -> None:
    """Run in a fork that may take `spare` bytes more than it has, and check that it took less than that."""

    def limited() -> None:
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + 8 * spare, own + 8 * spare))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < spare, f"{grown / 2**20:.0f} MiB"

    assert os.waitstatus_to_exitcode(finish(in_child(limited))) == 0


def refused(name: str, folder: Path) -> None:
    assert loaded(name, folder) is None


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_header_that_claims_a_trillion_images_takes_no_memory(tmp_path, packed, tally):
    write_idx(tmp_path, (6, 4), packed=packed)
    path = tmp_path / f"{IDX_FILES[0]}{'.gz' if packed else ''}"
    content = struct.pack(">IIII", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1) + bytes(1000)
    path.write_bytes(gzip.compress(content) if packed else content)
    in_little_memory(lambda: refused("mnist", tmp_path), 64 << 20)
    tally("mutated files", 1)


@pytest.mark.parametrize("claim", [4 * 10**8, 2**32 - 8])
def test_a_mat_file_that_claims_more_than_it_has_takes_no_memory(tmp_path, claim, tally):
    write_svhn(tmp_path, 3)
    buffer = io.BytesIO()
    savemat(buffer, {"X": random_bytes(0, 32, 32, 3, 3), "y": np.ones((3, 1), np.uint8)})
    content = buffer.getvalue()
    (tmp_path / "train_32x32.mat").write_bytes(content.replace(struct.pack("<II", 2, 9216), struct.pack("<II", 2, claim), 1))
    in_little_memory(lambda: refused("svhn", tmp_path), 64 << 20)
    tally("mutated files", 1)


CLAIMS = {
    "bytes": b"\x8e" + struct.pack("<Q", 10**12),
    "a text": b"\x8d" + struct.pack("<Q", 3 * 10**8),
    "a bytearray": b"\x96" + struct.pack("<Q", 3 * 10**8),
    "a frame": b"\x95" + struct.pack("<Q", 3 * 10**8),
    "a number": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "a place in the memo": b"]r" + struct.pack("<I", 30_000_000),
    "a place in the memo, as text": b"]p30000000\n",
}


def claiming(folder: Path, claim: str) -> None:
    write_cifar_python(folder, 2, 2)
    (folder / "data_batch_2").write_bytes(b"\x80\x05" + CLAIMS[claim] + b"0" + pickle.dumps({}, 2)[2:])


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_pickle_that_claims_more_than_it_has_takes_no_memory(tmp_path, claim, tally):
    claiming(tmp_path, claim)
    in_little_memory(lambda: refused("cifar10", tmp_path), 64 << 20)
    tally("mutated files", 1)


def test_a_pickle_that_claims_a_trillion_bytes_is_refused_with_a_reason(tmp_path):
    claiming(tmp_path, "bytes")
    with pytest.raises(ValueError, match=r"data_batch_2 cannot be read as a pickle: \S"):
        load("cifar10", tmp_path, verify=False)
