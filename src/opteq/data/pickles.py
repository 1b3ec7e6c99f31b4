"""The one pickle that is read, CIFAR-10's Python batches: arrays and plain types, nothing else.

A pickle may name any function and have it called. Here a name is never looked up in a module: the few that arrays are made of stand
for functions of this file, every other one is refused.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["load_plain"]


def _array(kind: object, shape: object, code: object) -> np.ndarray[Any, Any]:
    """What numpy pickles first for every array; shape, type and bytes follow as its state."""
    return np.empty(0, np.int8)


def _array_from(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> np.ndarray[Any, Any]:
    """An array as protocol 5 writes it."""
    return np.frombuffer(bytearray(buffer), dtype).reshape(shape, order="F" if order == "F" else "C")


def _dtype(code: str, align: object = False, copy: object = True) -> np.dtype[Any]:
    return np.dtype(str(code))


def _bytes(text: str, encoding: str) -> bytes:
    """Bytes as protocol 2 writes them."""
    return text.encode("latin1")


# numpy.core has been numpy._core since numpy 2
_ADMITTED = {
    ("numpy", "ndarray"): "ndarray",  # only ever handed to _array
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array_from for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays and plain types are admitted")
        return _ADMITTED[module, name]


def load_plain(path: Path) -> dict[Any, Any]:
    """The dictionary in a pickle of arrays and plain types; ValueError for anything else."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"{path} cannot be read as a pickle: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary. Got {type(content).__name__} instead.")
    return content
