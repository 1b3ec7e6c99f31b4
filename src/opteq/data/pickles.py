"""The one pickle that is read, CIFAR-10's Python batches: arrays and plain types, nothing else.

A pickle may name any function and have it called. Here a name is never looked up in a module: the few that arrays are made of stand
for functions of this file, every other one is refused.
"""

import io
import pickle
import pickletools
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["load_plain"]

_BYTES: np.dtype[Any] = np.dtype(np.uint8)  # built in: the state that a pickle sets does not change it


class _Call(NamedTuple):
    """A function that a pickle may call. It may set attributes of what it names, too: those of a function, but not of a tuple."""

    function: Callable[..., Any]

    def __call__(self, *arguments: object) -> Any:
        return self.function(*arguments)


def _array(kind: object, shape: object, code: object) -> np.ndarray[Any, Any]:
    """What numpy pickles first for every array; shape, type and bytes follow as its state."""
    return np.empty(0, _BYTES)


def _array_from(buffer: object, dtype: object, shape: Any, order: object) -> np.ndarray[Any, Any]:
    """An array as protocol 5 writes it."""
    if not isinstance(buffer, (bytes, bytearray)) or dtype is not _BYTES:  # bytearray(n) would take n bytes
        raise pickle.UnpicklingError("it has an array that is not made of bytes")
    return np.frombuffer(bytearray(buffer), _BYTES).reshape(shape, order="F" if order == "F" else "C")


def _dtype(code: object, align: object = False, copy: object = True) -> np.dtype[Any]:
    """Bytes only: numpy believes the state of other types, and would follow pointers that a file makes up."""
    if not (isinstance(code, str) and code in ("u1", "|u1")):
        raise pickle.UnpicklingError(f"it has an array of type {reprlib.repr(code)}, and only bytes are admitted")
    return _BYTES


def _bytes(text: Any, encoding: object) -> Any:
    """Bytes as protocol 2 writes them."""
    return text.encode("latin1")


# numpy.core has been numpy._core since numpy 2
_ADMITTED = {
    ("numpy", "ndarray"): "ndarray",  # only ever handed to _array
    ("numpy", "dtype"): _Call(_dtype),
    ("_codecs", "encode"): _Call(_bytes),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Call(_array) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Call(_array_from) for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            asked = reprlib.repr(f"{module}.{name}")
            raise pickle.UnpicklingError(f"it asks for {asked}, and only arrays and plain types are admitted")
        return _ADMITTED[module, name]


def _check_claims(content: bytes) -> None:
    """Raise if a pickle claims more than it has: room is made for that, and for all objects up to the one to be remembered."""
    for opcode, argument, place in pickletools.genops(content):  # raises where an argument is longer than what is left
        if opcode.name in ("PUT", "LONG_BINPUT") and isinstance(argument, int) and argument > (place or 0):
            raise pickle.UnpicklingError(f"it has {place} bytes before the object that it counts as number {argument}")


def load_plain(path: Path) -> dict[Any, Any]:
    """The dictionary in a pickle of arrays and plain types; ValueError for anything else."""
    try:
        data = path.read_bytes()
        _check_claims(data)
        content = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"{path} cannot be read as a pickle: {str(error) or 'it is not whole'}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary. Got {type(content).__name__} instead.")
    return content
