"""Files of a run folder: replaced atomically, read without following links, locked; and the errors that say what went wrong."""

import errno
import os
import re
import secrets
import stat
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: runs are not locked there
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


class RunError(RuntimeError):
    """A run folder could not be used: one line that says what happened, and the remedy.

    Examples:
        >>> from opteq.runs import Run, RunError
        >>> try:
        ...     Run.read("runs/nowhere")
        ... except RunError as error:
        ...     print("runs/nowhere" in str(error))
        True
    """


class RunWarning(UserWarning):
    """A run folder was usable, but not as it should be.

    Examples:
        >>> import warnings
        >>> from opteq.runs import Checkpoint, Run, RunWarning
        >>> with Run.create("runs/damaged", {}) as run:
        ...     for step in (1, 2):
        ...         run.save(Checkpoint(step, {}, {}))
        >>> _ = (run.folder / "checkpoints" / "step-00000002.json").write_text("what is this?")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", RunWarning)
        ...     found = Run.read("runs/damaged").latest()
        >>> found.step, caught[0].category.__name__
        (1, 'RunWarning')
    """


@contextmanager
def writing(path: Path, comfort: str = "") -> Iterator[None]:
    """Turn a failure of the system into a RunError about `path`."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        remedy = "free some space" if full else "check the folder and its permissions"
        raise RunError(f"{path} could not be written ({error.strerror or error}): {remedy}{comfort}") from error


def write_atomic(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Replace the file as a whole: after a kill or a failure at any moment there is the old one or the new one.

    A callable is given the open temporary file, which lies in the same folder and is removed on failure.

    Examples:
        >>> from pathlib import Path
        >>> from opteq.runs import write_atomic
        >>> write_atomic(Path("figures.json"), "{}")
        >>> Path("figures.json").read_text()
        '{}'
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
    sync(path.parent.resolve())  # the folder may be a link


def delete_temporary(folder: Path) -> None:
    """Delete the temporary files of a process that was killed."""
    for name in filter(_TEMPORARY.fullmatch, listing(folder)):
        (folder / name).unlink()


def remove(path: Path) -> None:
    """Undo the making of a file or folder; a folder in which something else lies stays."""
    with suppress(OSError):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def _descriptor(path: Path, flags: int) -> int:
    """Open without following a link, which might lead out of the run folder."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of a file that is no link, closed at the end."""
    file = _descriptor(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable, where the system can."""
    if os.name != "nt":  # pragma: no branch - Windows syncs no folders, and files only while they are open for writing
        with opened(path, os.O_RDONLY) as file:
            os.fsync(file)


def read(path: Path) -> bytes:
    """The content of a regular file that is no link."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise RunError(f"{path} is foreign (a link, or no file): delete it")
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} could not be read ({error.strerror or error}): put it back, or check the permissions") from error


def listing(folder: Path) -> list[str]:
    """The names in a folder, none if there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"{folder} could not be read ({error.strerror or error}): check the permissions") from error


class Lock:
    """The lock of a folder, on its file run.lock: held until `release` or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        file = os.fdopen(_descriptor(folder / "run.lock", os.O_RDWR | os.O_CREAT), "r+b")
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunError(f"another process is writing to {folder}: wait for it or stop it, or use another folder") from None
        except OSError as error:
            # Some network file systems have no locks.
            reason = error.strerror or error
            warnings.warn(f"{folder} could not be locked ({reason}): let no other process write there", RunWarning, stacklevel=3)
        self._file: BinaryIO | None = file
        _LOCKS.add(self)

    @property
    def held(self) -> bool:
        """Whether this process still has it."""
        return self._file is not None

    def release(self) -> None:
        """Let others write; nothing happens if it is no longer held."""
        if self._file is not None:
            with suppress(OSError):
                if fcntl is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the file only: in a forked child, the lock on it is the parent's."""
        if self._file is not None:
            self._file.close()
            self._file = None


_LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget_locks() -> None:
    """A forked child (a data loader's worker) must not keep a lock that its parent has lost by being killed."""
    for lock in list(_LOCKS):
        lock.forget()


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_forget_locks)
