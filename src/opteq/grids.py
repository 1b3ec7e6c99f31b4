"""A grid of independent cells of work, run through any `concurrent.futures.Executor`: processes of this machine, or a Dask cluster.

Whatever happens, nothing finished is lost: each cell is a file of its own, written as soon as it is done, and is not run again.
"""

import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Literal, get_args

import torch

import opteq
from opteq.checks import check_instance, check_integer, invalid
from opteq.runs import write_atomic

__all__ = ["Outcome", "executor", "run_grid"]

Function = Callable[[dict[str, Any]], dict[str, Any]]
Kind = Literal["local", "dask"]

_PATIENCE = "10s"  # for the first answer of a Dask scheduler
_LONGEST = 100  # characters of a file name that are kept
_DIGEST = "sha256"
_FIELDS = {"name", "function", "settings", "version", "result", "error", "seconds"}  # of a finished cell


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its result, or its error in one line. `cached`: it was found finished; `seconds` are those it took.

    Examples:
        >>> from opteq.grids import Outcome
        >>> Outcome("seed=0", {"accuracy": 0.9}, None, 12.5, cached=False).result["accuracy"]
        0.9
    """

    name: str
    result: dict[str, Any] | None
    error: str | None
    seconds: float
    cached: bool


def run_grid(
    function: Function,
    cells: Mapping[str, dict[str, Any]],
    folder: str | Path,
    *,
    executor: Executor,
    retries: int = 1,
    tell: Callable[[Outcome], None] | None = None,
) -> dict[str, Outcome]:
    """function(settings) for each cell, by name; the outcomes in the order of `cells`.

    `function` must be at the top of a module that the workers can import; the settings and results are JSON objects (NaN and
    infinity in a result become null). Each cell that ends is written to folder/cells/NAME.json, with its settings. A cell that is
    there, finished, with the same settings and of this version of the package, is not run again; one that failed is. A cell whose
    worker process died is submitted again, at most `retries` times. `tell` is called here with each outcome as it is known. An
    interrupt (Ctrl-C) cancels the cells that are not finished; it waits for `executor.submit` to return, a second one does not.

    Examples:
        >>> from collections import Counter  # a function of a dict that gives one
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from opteq.grids import run_grid
        >>> with ThreadPoolExecutor(2) as threads:
        ...     outcomes = run_grid(Counter, {"one": {"a": 1}, "two": {"a": 2}}, "runs/grid", executor=threads)
        >>> {name: (outcome.result, outcome.error) for name, outcome in outcomes.items()}
        {'one': ({'a': 1}, None), 'two': ({'a': 2}, None)}
    """
    _check_function(function)
    check_instance("run_grid", "executor", executor, Executor, "a concurrent.futures.Executor")
    check_integer("run_grid", "retries", retries, 0)
    grid = _Grid(function, _plain_cells(cells), _paths(cells, Path(folder)), tell or (lambda outcome: None))
    grid.recall()
    (Path(folder) / "cells").mkdir(parents=True, exist_ok=True)
    for attempt in range(retries + 1):
        grid.attempt(executor, last=attempt == retries)
    return {name: grid.outcomes[name] for name in cells}


class _Grid:
    """The cells of a grid, and those of them that have an outcome."""

    def __init__(
        self, function: Function, cells: dict[str, dict[str, Any]], paths: dict[str, Path], tell: Callable[[Outcome], None]
    ) -> None:
        self.function, self.cells, self.paths, self.tell = function, cells, paths, tell
        self.title = f"{function.__module__}.{function.__qualname__}"
        self.outcomes: dict[str, Outcome] = {}
        self.deaths = dict.fromkeys(cells, 0)

    def about(self, name: str) -> dict[str, Any]:
        """All that a cell's outcome depends on."""
        return {"name": name, "function": self.title, "settings": self.cells[name], "version": opteq.__version__}

    def recall(self) -> None:
        """Take the cells that are finished on disk."""
        for name, path in self.paths.items():
            try:
                stored = _unsealed(json.loads(path.read_text(encoding="utf-8")))
                same = all(stored[key] == value for key, value in self.about(name).items())
                finished = Outcome(name, stored["result"], stored["error"], stored["seconds"], cached=True)
            except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue  # not there, or not as it was written: it is run, and written anew
            if same and finished.error is None:
                self.finish(finished)

    def attempt(self, executor: Executor, *, last: bool) -> None:
        """Submit every cell without an outcome, and collect; those whose worker died are left for the next attempt, if any."""
        left = [name for name in self.cells if name not in self.outcomes]
        futures: dict[Future[dict[str, Any]], str] = {}
        done: SimpleQueue[Future[dict[str, Any]]] = SimpleQueue()  # which waits without a lock that Ctrl-C could leave held
        try:
            for name in left:
                with _held(signal.SIGINT), _held(signal.SIGTERM):
                    future = _submit(executor, self.function, name, self.cells[name])
                    futures[future] = name
                    future.add_done_callback(done.put)
            for _ in left:
                future = done.get()
                self.collect(futures[future], future, last=last)
        finally:
            with _held(signal.SIGINT), _held(signal.SIGTERM):
                for future in futures:
                    future.cancel()

    def collect(self, name: str, future: "Future[dict[str, Any]]", *, last: bool) -> None:
        """Write what came of the cell; nothing, if its worker died and there is another attempt."""
        try:
            done = future.result()
        except BrokenExecutor:
            self.deaths[name] += 1
            if not last:
                return
            times = "once" if self.deaths[name] == 1 else f"{self.deaths[name]} times"
            done = _failed(f"its worker process died {times} (killed, out of memory, or a crash)")
        except Exception as error:  # such as Dask's KilledWorker
            done = _failed(_one_line(error))
        write_atomic(self.paths[name], json.dumps(_sealed(self.about(name) | done), indent=1, allow_nan=False) + "\n")
        self.finish(Outcome(name, done["result"], done["error"], done["seconds"], cached=False))

    def finish(self, outcome: Outcome) -> None:
        """The outcome is known."""
        self.outcomes[outcome.name] = outcome
        self.tell(outcome)


@contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    """A signal that comes in the block is heard at its end; a second one at once, for the block may be long."""
    # An exception of a handler, such as Ctrl-C's, may leave a lock of `threading` held: some worker would wait for it for ever.
    handler, came, process = signal.getsignal(number), list[FrameType | None](), os.getpid()
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        signal.signal(number, handler)
        came.append(frame)
        if os.getpid() != process:  # one that was forked in the block, and does not come to its end
            handler(number, frame)

    try:
        signal.signal(number, hold)
        yield
    finally:
        if signal.getsignal(number) is hold:
            signal.signal(number, handler)
        if came:
            handler(number, came[0])


def _submit(executor: Executor, function: Function, name: str, settings: dict[str, Any]) -> "Future[dict[str, Any]]":
    """The future of a cell; failed at once if the executor can take no work any more."""
    try:
        return executor.submit(_run_cell, function, name, settings)
    except BrokenExecutor as error:
        future: Future[dict[str, Any]] = Future()
        future.set_exception(error)
        return future


def _run_cell(function: Function, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a worker does: plain data come back, also from an error, for an exception need not survive the way."""
    begun = time.perf_counter()
    try:
        result = _plain(function(settings), f"The result of cell {name!r}")
    except (Exception, SystemExit) as error:
        return _failed(_one_line(error), traceback.format_exc(), time.perf_counter() - begun)
    return {"result": result, "error": None, "seconds": round(time.perf_counter() - begun, 3)}


def _failed(error: str, trace: str = "", seconds: float = 0.0) -> dict[str, Any]:
    return {"result": None, "error": error, "traceback": trace, "seconds": round(seconds, 3)}


def _sealed(cell: dict[str, Any]) -> dict[str, Any]:
    """With a digest of the rest."""
    return cell | {_DIGEST: hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()}


def _unsealed(stored: dict[str, Any]) -> dict[str, Any]:
    """What was sealed, or a ValueError. Cells written before there were digests have none, and no other field either."""
    cell = {key: value for key, value in stored.items() if key != _DIGEST}
    if stored not in (_sealed(cell), cell) or cell.keys() != _FIELDS:
        raise ValueError("not the cell that was written")
    return cell


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


# --- what goes in and out -------------------------------------------------------------------------------------------------------


def _check_function(function: Function) -> None:
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in getattr(function, "__qualname__", "?").split("."):
        found = getattr(found, part, None)
    if found is not function:
        expected = "a function at the top of a module, which workers can import; lambdas, inner functions and partials are not"
        raise TypeError(invalid("run_grid", "function", expected, function))


def _plain_cells(cells: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings as they come back from JSON, so that they can be compared with stored ones."""
    for name, settings in cells.items():
        check_instance("run_grid", "cells", name, str, "a mapping with names as keys")
        _plain(settings, f"The settings of cell {name!r}", finite=True)
    return {name: json.loads(json.dumps(settings)) for name, settings in cells.items()}


def _plain(value: Any, where: str, *, finite: bool = False) -> dict[str, Any]:
    """The JSON object that the value is, with lists for tuples, and null for NaN and infinity (refused if `finite`)."""

    def convert(part: Any, at: str) -> Any:
        if part is None or isinstance(part, (bool, int, str)):
            return part
        if isinstance(part, float) and (math.isfinite(part) or not finite):
            return float(part) if math.isfinite(part) else None
        if isinstance(part, (list, tuple)):
            return [convert(item, f"{at}[{i}]") for i, item in enumerate(part)]
        if isinstance(part, dict) and all(isinstance(key, str) for key in part):
            return {key: convert(item, f"{at}[{key!r}]") for key, item in part.items()}
        got = repr(part) if isinstance(part, float) else "other keys" if isinstance(part, dict) else type(part).__name__
        expected = "numbers, strings, booleans, None, lists, and dicts with string keys"
        raise TypeError(f"{where} must be JSON: {expected}. Got {got} at {at or 'the top'}.")

    if not isinstance(value, dict):
        raise TypeError(f"{where} must be a dict. Got {type(value).__name__} instead.")
    plain: dict[str, Any] = convert(value, "")
    return plain


def _paths(cells: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """The file of each cell: its name, with a hash where a file cannot be called so; no two that differ by case alone."""
    paths = {name: folder / "cells" / f"{safe_name(name)}.json" for name in cells}
    seen: dict[str, str] = {}
    for name, path in paths.items():
        other = seen.setdefault(path.name.casefold(), name)
        if other != name:
            raise ValueError(invalid("run_grid", "cells", f"a mapping whose names differ by more than case from {other!r}", name))
    return paths


def safe_name(name: str) -> str:
    """The name if a file can be called so; else what can be kept of it, and a hash."""
    kept = re.sub(r"[^A-Za-z0-9._=,+-]|^\.", "_", name)[:_LONGEST]
    return name if kept == name != "" else f"{kept}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


# --- executors ------------------------------------------------------------------------------------------------------------------


@contextmanager
def executor(kind: Kind, *, address: str | None = None, workers: int = 2, threads: int = 1) -> Iterator[Executor]:
    """An executor that outlives the death of a worker; it is shut down at the end, and work under way is ended by an exception.

    "local": `workers` processes of this machine with `threads` threads each. They are spawned: a script needs the usual
    `if __name__ == "__main__":`. "dask": the cluster whose scheduler is at `address`, where this package is installed; without
    an address, one of `workers` processes on this machine, for as long as it is needed. Dask itself runs the cells of a worker that
    died on others, and gives a cell up after a few deaths (`distributed.scheduler.allowed-failures`).

    Examples:
        >>> from opteq.grids import executor
        >>> with executor("local", workers=1) as workers:
        ...     workers.submit(abs, -3).result()
        3
    """
    if kind not in get_args(Kind):
        raise ValueError(invalid("executor", "kind", " or ".join(map(repr, get_args(Kind))), kind))
    check_integer("executor", "workers", workers, 1)
    check_integer("executor", "threads", threads, 1)
    if kind == "local" and address is not None:
        raise ValueError(invalid("executor", "address", "None unless the kind is 'dask'", address))
    with _dask(address, workers, threads) if kind == "dask" else _Processes(workers, threads) as found:
        yield found


@contextmanager
def _dask(address: str | None, workers: int, threads: int) -> Iterator[Executor]:
    try:
        distributed: Any = import_module("distributed")  # most of it has no annotations
    except ImportError as error:
        raise ImportError("Dask is not installed: pip install 'opteq[dask]'.") from error
    if address is None:
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        cluster = distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, env=limits)
        with cluster, distributed.Client(cluster) as client:
            yield client.get_executor(pure=False)
        return
    try:
        client = distributed.Client(address, timeout=_PATIENCE)
    except (OSError, ValueError) as error:
        text = f"No Dask scheduler answers at {address!r} ({_one_line(error)}): is it the address that `dask scheduler` printed?"
        raise ConnectionError(text) from None
    with client:
        yield client.get_executor(pure=False)


class _Processes(Executor):
    """Processes, each fed by a thread of its own: one that dies takes only the cell it was running with it, and is replaced.

    (In a ProcessPoolExecutor, all cells under way and waiting fail with the one that killed its process.)
    """

    def __init__(self, workers: int, threads: int) -> None:
        self._feeders = ThreadPoolExecutor(workers, thread_name_prefix="opteq-grid")
        self._threads, self._own, self._ended = threads, threading.local(), False
        self._pools: dict[int, ProcessPoolExecutor] = {}  # by the id of their one process

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return self._feeders.submit(self._call, fn, *args, **kwargs)

    def _call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            if getattr(self._own, "pid", None) is None:
                self._own.pid = self._start()
            if self._ended:  # while this process was starting
                raise CancelledError
            return self._pools[self._own.pid].submit(fn, *args, **kwargs).result()
        except BrokenExecutor:
            self._own.pid = None
            raise

    def _start(self) -> int:
        context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
        pool = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare, initargs=(self._threads,))
        pid = pool.submit(os.getpid).result()
        self._pools[pid] = pool
        return pid

    def terminate(self) -> None:
        """End the processes, whatever they are doing."""
        self._ended = True
        self._feeders.shutdown(wait=False, cancel_futures=True)
        for process in (child for child in multiprocessing.active_children() if child.pid in self._pools):
            process.terminate()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._feeders.shutdown(wait=wait, cancel_futures=cancel_futures)
        for pool in self._pools.values():
            pool.shutdown(wait=wait)

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self.terminate()
        self.shutdown()


def _prepare(threads: int) -> None:  # pragma: no cover - in a worker that is killed before it could tell
    """Make a process a worker: Ctrl-C is for the parent to handle, and the worker ends when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(threads)


def _follow_parent() -> None:  # pragma: no cover - likewise
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
