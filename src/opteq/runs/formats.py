"""What the files of a run folder hold: JSON that gives every float back bit by bit, and safetensors."""

import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from opteq.checks import check_instance, invalid
from opteq.runs.files import RunError, read

_DIGEST = "sha256"
_BLANK = b"0" * 64  # stands for the digest in what it is a digest of
_FLOAT = "__float__"  # JSON has no infinity: {"__float__": "inf"} stands for it


# JSON


def _tagged(number: float) -> dict[str, str]:
    return {_FLOAT: repr(float(number))}


def encode(value: Any, where: str, special: Callable[[float], Any] = _tagged) -> Any:
    """The value as strict JSON, with `special(x)` for a float x that is not finite."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else special(value)
    if isinstance(value, (list, tuple)):
        return [encode(item, f"{where}[{i}]", special) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise TypeError(invalid("Run", where, "JSON (None, bool, int, float, str, list, dict)", type(value).__name__))
    if not all(isinstance(key, str) and key != _FLOAT for key in value):
        raise TypeError(invalid("Run", where, f"a dict whose keys are strings, other than {_FLOAT!r}", list(value)))
    return {key: encode(item, f"{where}.{key}", special) for key, item in value.items()}


def dumps(encoded: Any) -> str:
    """On one line, in one spelling only."""
    return json.dumps(encoded, allow_nan=False, separators=(",", ":"))


def pretty(value: Any, where: str) -> str:
    """For people to read."""
    return json.dumps(encode(value, where), allow_nan=False, indent=2) + "\n"


def parse(text: str | bytes) -> Any:
    """The value that was encoded."""
    return json.loads(text, object_hook=_decode)


def _decode(item: dict[str, Any]) -> Any:
    return float(item[_FLOAT]) if item.keys() == {_FLOAT} and item[_FLOAT] in ("inf", "-inf", "nan") else item


def read_json(path: Path) -> Any:
    """The value in a file; RunError if it is no JSON."""
    try:
        return parse(read(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}): put it back from a copy") from error


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """The fields in which two encoded values differ, by dotted path."""
    if isinstance(old, dict) and isinstance(new, dict) and _FLOAT not in {*old, *new}:
        for key in {**old, **new}:
            yield from differences(old.get(key, ...), new.get(key, ...), f"{where}.{key}" if where else key)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        shown = ("absent" if side is ... else reprlib.repr(parse(dumps(side))) for side in (old, new))
        yield f"{where}: {' -> '.join(shown)}"


# Tensors


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise RunError("files of tensors need safetensors: pip install 'opteq[train]'") from error
    return safetensors


@cache
def _storable(dtype: torch.dtype) -> bool:
    """Whether safetensors can write this dtype and read it back."""
    library = _safetensors()
    try:
        return bool(library.torch.load(library.torch.save({"x": torch.empty(0, dtype=dtype)}))["x"].dtype == dtype)
    except Exception:
        return False


def serialize(owner: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file; tensors that share memory are each written whole."""
    check_instance(owner, "tensors", tensors, Mapping, "a dict")
    library, copies = _safetensors(), {}
    for name, tensor in tensors.items():
        check_instance(owner, f"tensors[{name!r}]", tensor, Tensor, "a tensor")
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(invalid(owner, "tensors", "named by strings other than '__metadata__'", name))
        if tensor.layout != torch.strided or not _storable(tensor.dtype):
            got = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise TypeError(invalid(owner, f"tensors[{name!r}]", "dense, of a dtype that safetensors has", got))
        copies[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return bytes(library.torch.save(copies, metadata=metadata))


def deserialize(path: Path, content: bytes, remedy: str) -> dict[str, Tensor]:
    """The tensors in the content of the file `path`; RunError if it is not safetensors."""
    library = _safetensors()
    try:
        return dict(library.torch.load(content))
    except (library.SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise RunError(f"{path} is foreign (not safetensors): {remedy}") from error


def seal(owner: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file with a digest of all of them in its metadata, which come first."""
    content = serialize(owner, tensors, {_DIGEST: _BLANK.decode()})
    return content.replace(_BLANK, hashlib.sha256(content).hexdigest().encode(), 1)


def unseal(path: Path, content: bytes, remedy: str) -> dict[str, Tensor]:
    """The tensors that were sealed; RunError if a byte was changed. Files without metadata, which others write, are believed."""
    tensors = deserialize(path, content, remedy)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if "__metadata__" in header:
        digest = str(header["__metadata__"].get(_DIGEST)).encode()
        if hashlib.sha256(content.replace(digest, _BLANK, 1)).hexdigest().encode() != digest:
            raise RunError(f"{path} is corrupted (its digest differs): {remedy}")
    return tensors
