"""Run: the folder of one training."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from opteq.checks import check_instance, check_integer, invalid
from opteq.runs.checkpoint import Checkpoint, Checkpoints, stem
from opteq.runs.files import Lock, RunError, delete_temporary, read, remove, write_atomic, writing
from opteq.runs.formats import differences, encode, parse, pretty, read_json, seal, unseal
from opteq.runs.metrics import Metrics
from opteq.runs.provenance import environment


class Run:
    """A run folder: config.json, environment.json, metrics.jsonl, checkpoints/step-00000120.{safetensors,json}, run.lock.

    Made by `create`, `open` (to resume) or `read` (to look). One process writes at a time; the lock ends with it, however it ends.

    Examples:
        >>> from opteq.runs import Run
        >>> with Run.create("runs/mine", {"lr": 0.1}) as run:
        ...     run.log({"kind": "step", "step": 1, "loss": 2.5})
        >>> again = Run.read("runs/mine")
        >>> again.config, again.metrics()
        ({'lr': 0.1}, [{'kind': 'step', 'step': 1, 'loss': 2.5}])
    """

    def __init__(self, folder: Path, config: dict[str, Any], keep: int = 3) -> None:
        self.folder, self.config, self.keep = folder, config, keep
        self._metrics, self._checkpoints = Metrics(folder / "metrics.jsonl"), Checkpoints(folder / "checkpoints")
        self._lock: Lock | None = None

    @classmethod
    def create(cls, folder: str | os.PathLike[str], config: Mapping[str, Any], *, keep: int = 3) -> Self:
        """A new run, of which the newest `keep` checkpoints are kept. Nothing half-made is left behind if it fails."""
        check_integer("Run", "keep", keep, 1)
        check_instance("Run", "config", config, Mapping, "a dict")
        folder, content = Path(folder), pretty(config, "config")
        run = cls(folder, parse(content), keep)
        with writing(folder), ExitStack() as undo:
            run._refuse_second()
            for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                path.mkdir(exist_ok=True)
                undo.callback(remove, path)
            run._lock = Lock(folder)
            undo.callback(run.close)
            run._refuse_second()
            for name in ("run.lock", "checkpoints", "environment.json", "config.json"):
                undo.callback(remove, folder / name)
            (folder / "checkpoints").mkdir(exist_ok=True)
            write_atomic(folder / "environment.json", pretty(environment(), "environment"))
            write_atomic(folder / "config.json", content)  # last: with it, the run exists
            undo.pop_all()
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None, *, keep: int = 3) -> Self:
        """The run in `folder`, to resume it. With a `config`, every field that differs from the run's own is an error."""
        check_integer("Run", "keep", keep, 1)
        run = cls.read(folder)
        run.keep = keep
        if config is not None:
            run._refuse_changes(config)
        with writing(run.folder), ExitStack() as undo:
            run._lock = Lock(run.folder)
            undo.callback(run.close)
            # What a killed process left: temporary files, tensors without their header, half a row of metrics.
            delete_temporary(run.folder)
            run._checkpoints.tidy()
            run._metrics.trim()
            undo.pop_all()
        return run

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Self:
        """The run in `folder`, to look at, also while another process writes it: no lock, and nothing is ever written."""
        folder = Path(folder)
        if not os.path.lexists(folder / "config.json"):
            raise RunError(f"{folder} holds no run (no config.json): start one there, or give the folder of one")
        config = read_json(folder / "config.json")
        if not isinstance(config, dict):
            raise RunError(f"{folder / 'config.json'} is damaged (not a JSON object): put it back from a copy")
        return cls(folder, config)

    def close(self) -> None:
        """Release the lock; the run can still be read."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Metrics and further files

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl, at once. NaN and infinity become null."""
        with self._writer(self._metrics.path):
            self._metrics.append(row)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows so far: a torn line (the mark of a kill) is left out."""
        return self._metrics.rows()

    def write(self, name: str, payload: Any) -> None:
        """Write a further JSON file of the run, such as certificate.json, atomically."""
        self._write(self._further(name, ".json"), pretty(payload, name))

    def read_json(self, name: str) -> Any:
        """What `write` wrote under this name; None if nothing was."""
        path = self._further(name, ".json")
        return read_json(path) if os.path.lexists(path) else None

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file of the run, such as model.safetensors, atomically, with a digest. Tensors as in a Checkpoint."""
        self._write(self._further(name, ".safetensors"), seal("Run.write_tensors", tensors))

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """What `write_tensors` wrote under this name, on the CPU. RunError if nothing was, or if it was changed."""
        path = self._further(name, ".safetensors")
        return unseal(path, read(path), "put it back from a copy")

    # Checkpoints

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then delete all but it and the newest `keep`. Until it is whole on disk, the earlier ones stay.

        One of the same step is replaced.
        """
        check_integer("Checkpoint", "step", checkpoint.step, 0)
        with self._writer(self._checkpoints.path / stem(checkpoint.step), "; the earlier checkpoints are kept"):
            self._metrics.sync()  # the rows before a checkpoint are on disk before it is
            self._checkpoints.save(checkpoint, self.keep)

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        return self._checkpoints.steps()

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of this step. RunError if there is none, or if it is truncated, corrupted or foreign."""
        check_integer("Run.load", "step", step, 0)
        return self._checkpoints.load(step)

    def latest(self) -> Checkpoint | None:
        """The newest good checkpoint; a RunWarning names each newer one that was refused, and why."""
        return self._checkpoints.latest()

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: the checkpoints, and the rows of metrics whose "step" is larger."""
        check_integer("Run.rewind", "step", step, 0)
        with self._writer(self.folder):
            # Checkpoints first: a kill in between leaves rows too many, never too few, for the newest checkpoint.
            self._checkpoints.rewind(step)
            self._metrics.rewind(step)

    # What is refused

    @contextmanager
    def _writer(self, path: Path, comfort: str = "") -> Iterator[None]:
        """Refuse if the run was not opened for writing."""
        if self._lock is None or not self._lock.held:
            raise RunError(f"{self.folder} is open for reading only: use Run.open to write")
        with writing(path, comfort):
            yield

    def _write(self, path: Path, content: bytes | str) -> None:
        with self._writer(path):
            write_atomic(path, content)

    def _further(self, name: str, suffix: str) -> Path:
        """Where a further file lies: in the run folder, under a plain name."""
        if not re.fullmatch(rf"[A-Za-z0-9][\w.-]*{re.escape(suffix)}", name) or name == "config.json":
            expected = f"the name of a {suffix} file in the run folder, other than config.json"
            raise ValueError(invalid("Run", "name", expected, name))
        return self.folder / name

    def _refuse_second(self) -> None:
        if any(os.path.lexists(self.folder / name) for name in ("config.json", "metrics.jsonl")) or self.steps():
            raise RunError(f"{self.folder} already holds a run: resume it, or use another folder")

    def _refuse_changes(self, config: Mapping[str, Any]) -> None:
        if changes := list(differences(encode(self.config, "config"), encode(config, "config"))):
            raise RunError(f"{self.folder} has another configuration ({'; '.join(changes)}): undo the changes, or start a new run")
