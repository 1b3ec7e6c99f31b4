"""A run folder: configuration, environment, metrics and checkpoints of one training, safe against a kill at any moment.

Files are replaced atomically; checkpoints are safetensors and JSON, with digests over all of their bytes. Nothing is pickled.
"""

import errno
import hashlib
import json
import math
import os
import platform
import re
import reprlib
import secrets
import stat
import subprocess
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from opteq.checks import check_instance, check_integer, invalid

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: runs are not locked there
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "Run", "RunError", "RunWarning", "environment", "write_atomic"]

FORMAT, VERSION = "opteq checkpoint", 1
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_HEADER = re.compile(r"step-([0-9]{8,})\.json")
_TENSORS = re.compile(r"step-([0-9]{8,})(-[0-9]+)?\.safetensors")
_FLOAT = "__float__"  # JSON has no infinity: {"__float__": "inf"} stands for it
_REMEDY = "delete it, or use an earlier checkpoint"


class RunError(RuntimeError):
    """A run folder could not be used: one line that says what happened, and the remedy."""


class RunWarning(UserWarning):
    """A run folder was usable, but not as it should be."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a training needs to go on from `step`.

    `tensors`: flat, any names but "__metadata__", any dtype that safetensors has, any device; they come back on the CPU.
    `state`: JSON (None, bool, int, float, str, list, dict with string keys). Floats come back bit by bit, infinities and NaN too;
    tuples come back as lists.
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Run:
    """A run folder: config.json, environment.json, metrics.jsonl, checkpoints/step-00000120.{safetensors,json}, run.lock.

    Made by `create`, `open` (to resume) or `read` (to look). One process writes at a time; the lock ends with it, however it ends.
    """

    def __init__(self, folder: Path, config: dict[str, Any], keep: int = 3) -> None:
        self.folder, self.config, self.keep = folder, config, keep
        self._lock: BinaryIO | None = None

    @classmethod
    def create(cls, folder: str | os.PathLike[str], config: Mapping[str, Any], *, keep: int = 3) -> Self:
        """A new run, of which the newest `keep` checkpoints are kept. Nothing half-made is left behind if it fails."""
        check_integer("Run", "keep", keep, 1)
        folder, content = Path(folder), _pretty(config, "config")
        with _writing(folder), ExitStack() as undo:
            _refuse_second(folder)
            for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                path.mkdir(exist_ok=True)
                undo.callback(_remove, path)
            lock = undo.enter_context(_locked(folder))
            _refuse_second(folder)
            for name in ("run.lock", "checkpoints", "environment.json", "config.json"):
                undo.callback(_remove, folder / name)
            (folder / "checkpoints").mkdir(exist_ok=True)
            write_atomic(folder / "environment.json", _pretty(environment(), "environment"))
            write_atomic(folder / "config.json", content)  # last: with it, the run exists
            undo.pop_all()
        run = cls(folder, _parse(content), keep)
        run._hold(lock)
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None, *, keep: int = 3) -> Self:
        """The run in `folder`, to resume it. With a `config`, every field that differs from the run's own is an error."""
        check_integer("Run", "keep", keep, 1)
        run = cls.read(folder)
        run.keep = keep
        if config is not None:
            _refuse_changes(run.folder, run.config, config)
        with _writing(run.folder), ExitStack() as undo:
            run._hold(undo.enter_context(_locked(run.folder)))
            run._tidy()
            undo.pop_all()
        return run

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Self:
        """The run in `folder`, to look at, also while another process writes it: no lock, and nothing is ever written."""
        folder = Path(folder)
        if not os.path.lexists(folder / "config.json"):
            raise RunError(f"{folder} holds no run (no config.json): start one there, or give the folder of one")
        return cls(folder, _read_json(folder / "config.json"))

    def close(self) -> None:
        """Release the lock; the run can still be read."""
        if self._lock is not None:
            with self._lock as lock, suppress(OSError):
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_UN)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Metrics and further files

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl, at once. NaN and infinity become null."""
        line = (_dumps(_encode(row, "row", lambda _: None)) + "\n").encode()
        path = self.folder / "metrics.jsonl"
        with self._writer(path):
            file = _descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                if os.write(file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._trim()
                raise
            finally:
                os.close(file)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows so far: a torn line (the mark of a kill) is left out."""
        return [row for _, row in self._rows()]

    def write(self, name: str, payload: Any) -> None:
        """Write a further JSON file of the run, such as certificate.json, atomically."""
        path = self._further(name)
        content = _pretty(payload, name)
        with self._writer(path):
            write_atomic(path, content)

    def read_json(self, name: str) -> Any:
        """What `write` wrote under this name; None if nothing was."""
        path = self._further(name)
        return _read_json(path) if os.path.lexists(path) else None

    # Checkpoints

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then delete all but it and the newest `keep`. Until it is whole on disk, the earlier ones stay.

        One of the same step is replaced: the new tensors get a name of their own, and the JSON, renamed last, says which.
        """
        step, folder = checkpoint.step, self._checkpoints()
        check_integer("Checkpoint", "step", step, 0)
        check_instance("Checkpoint", "state", checkpoint.state, dict, "a dict")
        tensors = _serialize(checkpoint.tensors)
        with self._writer(folder / _stem(step), "; the earlier checkpoints are kept"):
            folder.mkdir(exist_ok=True)
            name = next(name for name in _tensor_names(step) if not os.path.lexists(folder / name))
            header = _seal(_header(checkpoint, name, tensors))
            try:
                self._sync_metrics()
                write_atomic(folder / name, tensors)
                write_atomic(folder / f"{_stem(step)}.json", header)
            finally:
                self._delete_orphans()
            self._delete(other for other in self.steps()[: -self.keep] if other != step)

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        found = (_HEADER.fullmatch(name) for name in _listing(self._checkpoints()))
        return sorted(int(match[1]) for match in found if match and match[0] == f"{_stem(int(match[1]))}.json")

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of this step. RunError if there is none, or if it is truncated, corrupted or foreign."""
        check_integer("Run.load", "step", step, 0)
        path = self._checkpoints() / f"{_stem(step)}.json"
        if not os.path.lexists(path):
            raise RunError(f"{self.folder} has no checkpoint of step {step}: there are {self.steps()}")
        header = _unseal(path)
        try:
            if header["step"] != step or _step_of(header["file"]) != step:
                raise RunError(f"{path} is foreign (it names step {header['step']!r} and {header['file']!r}): {_REMEDY}")
            tensors = _deserialize(path.with_name(header["file"]), header["size"], header["sha256"])
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
                    warnings.warn(f"checkpoint refused: {error}", RunWarning, stacklevel=2)
        return None

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: the checkpoints, and the rows of metrics whose "step" is larger."""
        check_integer("Run.rewind", "step", step, 0)
        with self._writer(self.folder):
            # Checkpoints first: a kill in between leaves rows too many, never too few, for the newest checkpoint.
            self._delete(later for later in self.steps() if later > step)
            _sync_folder(self._checkpoints())
            rows = list(self._rows())
            kept = [line for line, row in rows if not _is_after(row, step)]
            if len(kept) < len(rows):
                write_atomic(self.folder / "metrics.jsonl", b"".join(kept))

    # What only the process with the lock does

    def _hold(self, lock: BinaryIO) -> None:
        self._lock = lock
        _WRITERS.add(self)

    @contextmanager
    def _writer(self, path: Path, comfort: str = "") -> Iterator[None]:
        """Refuse if the run was not opened for writing."""
        if self._lock is None:
            raise RunError(f"{self.folder} is open for reading only: use Run.open to write")
        with _writing(path, comfort):
            yield

    def _tidy(self) -> None:
        """Remove what a killed process left: temporary files, tensors without their JSON, half a row of metrics."""
        for folder in (self.folder, self._checkpoints()):
            for name in filter(_TEMPORARY.fullmatch, _listing(folder)):
                (folder / name).unlink()
        self._delete_orphans()
        self._trim()

    def _delete(self, steps: Iterator[int]) -> None:
        """Delete checkpoints; without its JSON, one does not exist."""
        for step in steps:
            (self._checkpoints() / f"{_stem(step)}.json").unlink()
        self._delete_orphans()

    def _delete_orphans(self) -> None:
        """Delete the tensors that no JSON names. Those that a damaged JSON may have named stay."""
        folder = self._checkpoints()
        found: dict[int, list[str]] = {}
        for name in _listing(folder):
            if (step := _step_of(name)) is not None:
                found.setdefault(step, []).append(name)
        for step, names in found.items():
            for name in _orphans(folder / f"{_stem(step)}.json", names):
                (folder / name).unlink()

    def _trim(self) -> None:
        """Cut metrics.jsonl after its last complete line."""
        content = self._metrics()
        if content and not content.endswith(b"\n"):
            file = _descriptor(self.folder / "metrics.jsonl", os.O_WRONLY)
            try:
                os.ftruncate(file, content.rfind(b"\n") + 1)
            finally:
                os.close(file)

    def _sync_metrics(self) -> None:
        """The rows before a checkpoint are on disk before it is."""
        if os.path.lexists(path := self.folder / "metrics.jsonl"):
            _sync(path)

    # Where things are

    def _checkpoints(self) -> Path:
        """The folder of the checkpoints, which must not lead out of the run folder."""
        path = self.folder / "checkpoints"
        if os.path.islink(path):
            raise RunError(f"{path} is a link: checkpoints must lie inside the run folder; move them there")
        return path

    def _further(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*\.json", name) or name == "config.json":
            raise ValueError(invalid("Run", "name", "the name of a JSON file in the run folder, other than config.json", name))
        return self.folder / name

    def _metrics(self) -> bytes:
        path = self.folder / "metrics.jsonl"
        return _read(path) if os.path.lexists(path) else b""

    def _rows(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Each complete line that holds a JSON object, and the object."""
        for line in self._metrics().split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield line + b"\n", row


# Files


def write_atomic(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Replace the file as a whole: after a kill or a failure at any moment there is the old one or the new one.

    A callable is given the open temporary file, which lies in the same folder and is removed on failure.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "nt":  # pragma: no branch - Windows cannot open folders
        _sync(folder)


def _sync(path: Path) -> None:
    file = _descriptor(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _descriptor(path: Path, flags: int) -> int:
    """Open without following a link, which might lead out of the run folder."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


def _read(path: Path) -> bytes:
    """The content of a regular file that is no link."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise RunError(f"{path} is foreign (a link, or no file): delete it")
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} could not be read ({error.strerror or error}): put it back, or check the permissions") from error


def _listing(folder: Path) -> list[str]:
    """The names in a folder, none if there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"{folder} could not be read ({error.strerror or error}): check the permissions") from error


def _remove(path: Path) -> None:
    """Undo the making of a file or folder; a folder in which something else lies stays."""
    with suppress(OSError):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path, comfort: str = "") -> Iterator[None]:
    """Turn a failure of the system into a RunError about `path`."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        remedy = "free some space" if full else "check the folder and its permissions"
        raise RunError(f"{path} could not be written ({error.strerror or error}): {remedy}{comfort}") from error


# The lock

_WRITERS: "weakref.WeakSet[Run]" = weakref.WeakSet()


def _locked(folder: Path) -> BinaryIO:
    """The open run.lock, locked until it is closed, also by the end of the process."""
    lock = os.fdopen(_descriptor(folder / "run.lock", os.O_RDWR | os.O_CREAT), "r+b")
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunError(f"another process is writing to {folder}: wait for it or stop it, or use another folder") from None
    except OSError as error:
        # Some network file systems have no locks.
        reason = error.strerror or error
        warnings.warn(f"{folder} could not be locked ({reason}): let no other process write there", RunWarning, stacklevel=3)
    return lock


def _forget_locks() -> None:
    """A forked child (a data loader's worker) must not keep a lock that its parent has lost by being killed."""
    for run in list(_WRITERS):
        if run._lock is not None:
            run._lock.close()
            run._lock = None


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_forget_locks)


# JSON


def _encode(value: Any, where: str, special: Callable[[float], Any]) -> Any:
    """The value as strict JSON, with `special(x)` for a float x that is not finite."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else special(value)
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{i}]", special) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise TypeError(invalid("Run", where, "JSON (None, bool, int, float, str, list, dict)", type(value).__name__))
    if not all(isinstance(key, str) and key != _FLOAT for key in value):
        raise TypeError(invalid("Run", where, f"a dict whose keys are strings, other than {_FLOAT!r}", list(value)))
    return {key: _encode(item, f"{where}.{key}", special) for key, item in value.items()}


def _exact(value: Any, where: str) -> Any:
    return _encode(value, where, lambda number: {_FLOAT: repr(float(number))})


def _decode(item: dict[str, Any]) -> Any:
    return float(item[_FLOAT]) if item.keys() == {_FLOAT} and item[_FLOAT] in ("inf", "-inf", "nan") else item


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _pretty(value: Any, where: str) -> str:
    return json.dumps(_exact(value, where), allow_nan=False, indent=2) + "\n"


def _parse(text: str | bytes) -> Any:
    return json.loads(text, object_hook=_decode)


def _read_json(path: Path) -> Any:
    try:
        return _parse(_read(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}): put it back from a copy") from error


def _refuse_second(folder: Path) -> None:
    if any(os.path.lexists(folder / name) for name in ("config.json", "metrics.jsonl")) or Run(folder, {}).steps():
        raise RunError(f"{folder} already holds a run: resume it, or use another folder")


def _refuse_changes(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if changes := list(_differences(_exact(old, "config"), _exact(new, "config"), "")):
        raise RunError(f"{folder} has another configuration ({'; '.join(changes)}): undo the changes, or start a new run")


def _differences(old: Any, new: Any, where: str) -> Iterator[str]:
    """The fields that differ, by dotted path."""
    if isinstance(old, dict) and isinstance(new, dict) and _FLOAT not in {*old, *new}:
        for key in {**old, **new}:
            yield from _differences(old.get(key, ...), new.get(key, ...), f"{where}.{key}" if where else key)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        shown = ("absent" if side is ... else reprlib.repr(_parse(_dumps(side))) for side in (old, new))
        yield f"{where}: {' -> '.join(shown)}"


def _is_after(row: dict[str, Any], step: int) -> bool:
    return isinstance(row.get("step"), (int, float)) and row["step"] > step


# The format of checkpoints


def _stem(step: int) -> str:
    return f"step-{step:08d}"


def _tensor_names(step: int) -> Iterator[str]:
    """step-N.safetensors, and what to use while that name is taken."""
    yield f"{_stem(step)}.safetensors"
    yield from (f"{_stem(step)}-{i}.safetensors" for i in count(1))


def _step_of(name: object) -> int | None:
    match = _TENSORS.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) if match else None


def _orphans(header: Path, names: list[str]) -> list[str]:
    """Which of a step's tensor files its JSON does not name."""
    if not os.path.lexists(header):
        return names
    if len(names) == 1:
        return []
    try:
        used = _unseal(header).get("file")
    except RunError:
        return []
    return [name for name in names if name != used]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _seal(header: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint's JSON: one spelling only, and a digest of the rest, so that no changed byte goes unnoticed."""
    body = _exact(header, "checkpoint")
    return (_dumps({**body, "digest": _sha256(_dumps(body).encode())}) + "\n").encode()


def _header(checkpoint: Checkpoint, file: str, tensors: bytes) -> dict[str, Any]:
    """What a checkpoint's JSON says."""
    described = {"file": file, "size": len(tensors), "sha256": _sha256(tensors), "names": list(checkpoint.tensors)}
    return {"format": FORMAT, "version": VERSION, "step": checkpoint.step, **described, "state": checkpoint.state}


def _unseal(path: Path) -> dict[str, Any]:
    """The header in a checkpoint's JSON; RunError if it is not, byte by byte, what was written."""
    content = _read(path)
    try:
        header = _parse(content)
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


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise RunError("checkpoints need safetensors: pip install 'opteq[train]'") from error
    return safetensors


@cache
def _storable(dtype: torch.dtype) -> bool:
    """Whether safetensors can write this dtype and read it back."""
    library = _safetensors()
    try:
        return bool(library.torch.load(library.torch.save({"x": torch.empty(0, dtype=dtype)}))["x"].dtype == dtype)
    except Exception:
        return False


def _serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file; tensors that share memory are each written whole."""
    library, copies = _safetensors(), {}
    for name, tensor in tensors.items():
        check_instance("Checkpoint", f"tensors[{name!r}]", tensor, Tensor, "a tensor")
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(invalid("Checkpoint", "tensors", "named by strings other than '__metadata__'", name))
        if tensor.layout != torch.strided or not _storable(tensor.dtype):
            raise TypeError(invalid("Checkpoint", f"tensors[{name!r}]", "dense, of a dtype that safetensors has", tensor.dtype))
        copies[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return bytes(library.torch.save(copies, metadata={"format": FORMAT}))


def _deserialize(path: Path, size: int, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file, if it has this size and digest."""
    library, content = _safetensors(), _read(path)
    if len(content) != size or _sha256(content) != sha256:
        raise RunError(f"{path} is {_blame(content, size)}: {_REMEDY}")
    try:
        return dict(library.torch.load(content))
    except library.SafetensorError as error:
        raise RunError(f"{path} is foreign (not safetensors): {_REMEDY}") from error


def _blame(content: bytes, size: int) -> str:
    """What is wrong with a file of tensors that is not the one that was written."""
    # After its length, in 8 bytes, the header of our files begins like this.
    mark = _dumps({"__metadata__": {"format": FORMAT}}).encode()[:-1]
    if not mark.startswith(content[8 : 8 + len(mark)]):
        return "foreign"
    return "truncated" if len(content) < size else "corrupted"


# The environment


def environment() -> dict[str, Any]:
    """What a run depends on outside of its configuration, without names of hosts and users."""
    from opteq import __version__

    revision, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "opteq": __version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git_revision": revision,
        "git_dirty": None if changes is None else bool(changes),
    }


def _git(*arguments: str) -> str | None:
    """What git says about the working directory; None where there is no git or no repository."""
    command = ["git", "--no-optional-locks", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
