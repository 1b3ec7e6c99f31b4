"""Checkpoints: two files each, safetensors and a JSON header with digests over all bytes of both. The header makes it exist."""

import hashlib
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from opteq.checks import check_instance
from opteq.runs.files import RunError, RunWarning, delete_temporary, listing, read, sync, write_atomic
from opteq.runs.formats import deserialize, dumps, encode, parse, serialize

FORMAT, VERSION = "opteq checkpoint", 1
_HEADER = re.compile(r"step-([0-9]{8,})\.json")
_TENSORS = re.compile(r"step-([0-9]{8,})(-[0-9]+)?\.safetensors")
_METADATA = {"format": FORMAT}
_REMEDY = "delete it, or use an earlier checkpoint"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a training needs to go on from `step`.

    `tensors`: flat, any names but "__metadata__", any dtype that safetensors has, any device; they come back on the CPU.
    `state`: JSON (None, bool, int, float, str, list, dict with string keys). Floats come back bit by bit, infinities and NaN too;
    tuples come back as lists.

    Examples:
        >>> import torch
        >>> from opteq.runs import Checkpoint, Run
        >>> with Run.create("runs/kept", {"lr": 0.1}) as run:
        ...     run.save(Checkpoint(20, {"W": torch.eye(2)}, {"best": float("inf")}))
        >>> found = Run.read("runs/kept").latest()
        >>> found.step, found.tensors["W"].tolist(), found.state
        (20, [[1.0, 0.0], [0.0, 1.0]], {'best': inf})
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The folder of a run's checkpoints: step-00000120.safetensors and step-00000120.json."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def folder(self) -> Path:
        """The folder, which must not lead out of the run folder."""
        if os.path.islink(self.path):
            raise RunError(f"{self.path} is a link: checkpoints must lie inside the run folder; move them there")
        return self.path

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        found = (_HEADER.fullmatch(name) for name in listing(self.folder))
        return sorted(int(match[1]) for match in found if match and match[0] == f"{stem(int(match[1]))}.json")

    def save(self, checkpoint: Checkpoint, keep: int) -> None:
        """Write a checkpoint, then delete all but it and the newest `keep`.

        One of the same step is replaced: the new tensors get a name of their own, and the header, renamed last, says which.
        """
        check_instance("Checkpoint", "state", checkpoint.state, dict, "a dict")
        step, folder, tensors = checkpoint.step, self.folder, serialize("Checkpoint", checkpoint.tensors, _METADATA)
        folder.mkdir(exist_ok=True)
        name = _free_name(folder, step)
        described = {"file": name, "size": len(tensors), "sha256": _sha256(tensors), "names": list(checkpoint.tensors)}
        header = _seal({"format": FORMAT, "version": VERSION, "step": step, **described, "state": checkpoint.state})
        try:
            write_atomic(folder / name, tensors)
            write_atomic(self._header(step), header)
        finally:
            self._delete_orphans()
        self._delete(other for other in self.steps()[:-keep] if other != step)

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of this step. RunError if there is none, or if it is truncated, corrupted or foreign."""
        path = self._header(step)
        if not os.path.lexists(path):
            raise RunError(f"{self.path.parent} has no checkpoint of step {step}: there are {self.steps()}")
        header = _unseal(path)
        try:
            if header["step"] != step or _step_of(header["file"]) != step:
                raise RunError(f"{path} is foreign (it names step {header['step']!r} and {header['file']!r}): {_REMEDY}")
            tensors = _read_tensors(path.with_name(header["file"]), header["size"], header["sha256"])
            return Checkpoint(step, {name: tensors[name] for name in header["names"]}, header["state"])
        except (KeyError, TypeError) as error:
            raise RunError(f"{path} is foreign (a field is missing or wrong): {_REMEDY}") from error

    def latest(self) -> Checkpoint | None:
        """The newest good checkpoint; a RunWarning names each newer one that was refused, and why."""
        refused: set[int] = set()
        # Listed anew each time: another process may be saving.
        while left := [step for step in self.steps() if step not in refused]:
            try:
                return self.load(left[-1])
            except RunError as error:
                refused.add(left[-1])
                if left[-1] in self.steps():
                    warnings.warn(f"checkpoint refused: {error}", RunWarning, stacklevel=3)
        return None

    def rewind(self, step: int) -> None:
        """Delete the checkpoints after `step`, for good."""
        self._delete(later for later in self.steps() if later > step)
        sync(self.folder)

    def tidy(self) -> None:
        """Delete what a killed process left."""
        delete_temporary(self.folder)
        self._delete_orphans()

    def _header(self, step: int) -> Path:
        return self.folder / f"{stem(step)}.json"

    def _delete(self, steps: Iterable[int]) -> None:
        """Delete checkpoints; without its header, one does not exist."""
        for step in steps:
            self._header(step).unlink()
        self._delete_orphans()

    def _delete_orphans(self) -> None:
        """Delete the tensors that no header names. Those that a damaged header may have named stay."""
        found: dict[int, list[str]] = {}
        for name in listing(self.folder):
            if (step := _step_of(name)) is not None:
                found.setdefault(step, []).append(name)
        for step, names in found.items():
            for name in _orphans(self._header(step), names):
                (self.folder / name).unlink()


# Names


def stem(step: int) -> str:
    """What the names of the files of a step begin with."""
    return f"step-{step:08d}"


def _free_name(folder: Path, step: int) -> str:
    """step-N.safetensors, or another name for the tensors while that one is taken."""
    names = (f"{stem(step)}-{i}.safetensors" if i else f"{stem(step)}.safetensors" for i in count())
    return next(name for name in names if not os.path.lexists(folder / name))


def _step_of(name: object) -> int | None:
    match = _TENSORS.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) if match else None


def _orphans(header: Path, names: list[str]) -> list[str]:
    """Which of a step's files of tensors its header does not name."""
    if not os.path.lexists(header):
        return names
    if len(names) == 1:
        return []
    try:
        used = _unseal(header).get("file")
    except RunError:
        return []
    return [name for name in names if name != used]


# Digests


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _seal(header: dict[str, Any]) -> bytes:
    """The bytes of a header: one spelling only, and a digest of the rest, so that no changed byte goes unnoticed."""
    body = encode(header, "checkpoint")
    return (dumps({**body, "digest": _sha256(dumps(body).encode())}) + "\n").encode()


def _unseal(path: Path) -> dict[str, Any]:
    """The header in a file; RunError if it is not, byte by byte, what was written."""
    content = read(path)
    try:
        header = parse(content)
    except (ValueError, RecursionError):
        whole = content.endswith(b"}\n")
        raise RunError(f"{path} is {'corrupted' if whole else 'truncated'}: {_REMEDY}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RunError(f"{path} is foreign (not an {FORMAT}): {_REMEDY}")
    header.pop("digest", None)
    try:
        sealed = _seal(header)
    except (TypeError, ValueError):
        sealed = b""
    if sealed != content:
        raise RunError(f"{path} is {'truncated' if sealed.startswith(content) else 'corrupted'}: {_REMEDY}")
    if header.get("version") != VERSION:
        raise RunError(f"{path} is foreign (version {header.get('version')!r} of the format): use the opteq that wrote it")
    return header


def _read_tensors(path: Path, size: int, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file, if it has this size and digest."""
    content = read(path)
    if len(content) != size or _sha256(content) != sha256:
        raise RunError(f"{path} is {_blame(content, size)}: {_REMEDY}")
    return deserialize(path, content, _REMEDY)


def _blame(content: bytes, size: int) -> str:
    """What is wrong with a file of tensors that is not the one that was written."""
    # After its length, in 8 bytes, the header of our files begins like this.
    mark = dumps({"__metadata__": _METADATA}).encode()[:-1]
    if not mark.startswith(content[8 : 8 + len(mark)]):
        return "foreign"
    return "truncated" if len(content) < size else "corrupted"
