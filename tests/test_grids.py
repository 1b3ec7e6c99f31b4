"""Grids: every finished cell is on disk and is not run again, whatever becomes of the others and of their workers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

import grid_work
import opteq
from conformance import write_verify
from opteq import grids
from opteq.grids import Outcome, executor, run_grid

TESTS = Path(__file__).parent


class Here(Executor):
    """Runs each cell when it is submitted, in this thread; or breaks at some of them, as a pool whose process died."""

    def __init__(self, breaks=()):
        self.breaks, self.submitted = list(breaks), []

    def submit(self, fn, /, *args, **kwargs):
        self.submitted.append(args[1])
        future = Future()
        if args[1] in self.breaks:
            self.breaks.remove(args[1])
            future.set_exception(BrokenExecutor("a process in the pool was terminated"))
        else:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
        return future


def square(log=None, values=(2, 3)):
    extra = {} if log is None else {"log": str(log)}
    return {f"a{a}-b{b}": {"a": a, "b": b, **extra} for a in values for b in values}


def stored(folder, name):
    return json.loads((folder / "cells" / f"{name}.json").read_text())


def lines(path):
    return path.read_text().split() if path.exists() else []


def test_each_cell_is_one_file_with_all_that_made_it(tmp_path):
    outcomes = run_grid(grid_work.product, square(), tmp_path, executor=Here())
    assert list(outcomes) == ["a2-b2", "a2-b3", "a3-b2", "a3-b3"]
    assert [outcome.result["product"] for outcome in outcomes.values()] == [4, 6, 6, 9]
    assert all(outcome.error is None and not outcome.cached and outcome.seconds >= 0 for outcome in outcomes.values())
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == sorted(f"{name}.json" for name in outcomes)
    file = stored(tmp_path, "a2-b3")
    assert file.pop("seconds") == outcomes["a2-b3"].seconds
    assert len(file.pop("sha256")) == 64
    assert file == {
        "name": "a2-b3",
        "function": "grid_work.product",
        "settings": {"a": 2, "b": 3},
        "version": opteq.__version__,
        "result": {"product": 6},
        "error": None,
    }


def test_a_finished_cell_is_not_run_again_and_changed_settings_are(tmp_path):
    log, told = tmp_path / "log", []
    first = run_grid(grid_work.product, square(log), tmp_path, executor=Here())
    again = run_grid(grid_work.product, square(log), tmp_path, executor=Here(), tell=told.append)
    assert lines(log) == ["22", "23", "32", "33"]
    assert again == {name: Outcome(name, o.result, None, o.seconds, cached=True) for name, o in first.items()}
    assert told == list(again.values())
    changed = square(log) | {"a2-b2": {"a": 5, "b": 5, "log": str(log)}}
    outcomes = run_grid(grid_work.product, changed, tmp_path, executor=Here())
    assert lines(log)[4:] == ["55"]
    assert [name for name, outcome in outcomes.items() if not outcome.cached] == ["a2-b2"]
    assert stored(tmp_path, "a2-b2")["settings"]["a"] == 5


def test_tuples_in_settings_are_the_lists_they_are_stored_as(tmp_path):
    cells = {"x": {"do": "nothing", "sizes": (1, 2)}}
    run_grid(grid_work.misbehave, cells, tmp_path, executor=Here())
    assert run_grid(grid_work.misbehave, cells, tmp_path, executor=Here())["x"].cached


def test_the_result_of_another_function_is_not_taken(tmp_path):
    run_grid(grid_work.product, {"x": {"a": 1, "b": 1, "do": "nothing"}}, tmp_path, executor=Here())
    outcomes = run_grid(grid_work.misbehave, {"x": {"a": 1, "b": 1, "do": "nothing"}}, tmp_path, executor=Here())
    assert outcomes["x"].result["done"] == "nothing"


def test_a_cell_of_another_version_of_the_package_is_run_again(tmp_path, monkeypatch):
    cells = {"x": {"a": 1, "b": 7}}
    run_grid(grid_work.product, cells, tmp_path, executor=Here())
    monkeypatch.setattr(opteq, "__version__", "99.0")
    assert not run_grid(grid_work.product, cells, tmp_path, executor=Here())["x"].cached
    assert stored(tmp_path, "x")["version"] == "99.0"


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"name": "x"}'])
def test_a_file_that_is_no_cell_is_replaced(tmp_path, content):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "x.json").write_text(content)
    assert run_grid(grid_work.product, {"x": {"a": 1, "b": 7}}, tmp_path, executor=Here())["x"].result == {"product": 7}
    assert stored(tmp_path, "x")["result"] == {"product": 7}


def test_a_cell_with_another_digest_is_run_again_and_one_of_before_there_were_digests_is_not(tmp_path):
    cells = {"x": {"a": 1, "b": 7}}
    run_grid(grid_work.product, cells, tmp_path, executor=Here())
    whole = stored(tmp_path, "x")
    earlier = {key: value for key, value in whole.items() if key != "sha256"}
    for content, cached in [(whole, True), (earlier, True), (whole | {"sha256": "0" * 64}, False), (earlier | {"more": 1}, False)]:
        (tmp_path / "cells" / "x.json").write_text(json.dumps(content))
        assert run_grid(grid_work.product, cells, tmp_path, executor=Here())["x"].cached == cached


@pytest.mark.parametrize(("do", "text"), [("raise", "LookupError: two lines"), ("exit", "SystemExit: gone")])
def test_a_cell_that_fails_does_not_sink_the_others_and_is_run_again(tmp_path, do, text):
    cells = {"bad": {"do": do}, "good": {"do": "well"}}
    outcomes = run_grid(grid_work.misbehave, cells, tmp_path, executor=Here())
    assert (outcomes["bad"].error, outcomes["bad"].result) == (text, None)
    assert outcomes["good"].result["done"] == "well"
    assert stored(tmp_path, "bad")["error"] == text
    assert "grid_work.py" in stored(tmp_path, "bad")["traceback"]
    again = Here()
    outcomes = run_grid(grid_work.misbehave, cells, tmp_path, executor=again)
    assert again.submitted == ["bad"]
    assert outcomes["good"].cached


def test_what_json_lacks_becomes_null(tmp_path):
    outcomes = run_grid(grid_work.returns, {"x": {"kind": "nan"}}, tmp_path, executor=Here())
    assert outcomes["x"].result == {"x": [None, None, [1, 2.5]]}
    assert run_grid(grid_work.returns, {"x": {"kind": "nan"}}, tmp_path, executor=Here())["x"].result == outcomes["x"].result


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("complex", "Got complex at ['deep'][1]"),
        ("keys", "Got other keys at the top"),
        ("list", "must be a dict. Got list"),
        ("set", "must be a dict. Got set"),
    ],
)
def test_a_result_that_is_no_json_is_an_error_that_names_the_cell(tmp_path, kind, words):
    outcome = run_grid(grid_work.returns, {"this one": {"kind": kind}}, tmp_path, executor=Here())["this one"]
    assert "The result of cell 'this one' must be" in outcome.error
    assert words in outcome.error


def test_a_broken_worker_is_tried_again_but_not_for_ever(tmp_path):
    cells = {name: {"do": name} for name in ("once", "twice", "never")}
    broken = Here(["once", "twice", "twice"])
    outcomes = run_grid(grid_work.misbehave, cells, tmp_path, executor=broken)
    assert broken.submitted == ["once", "twice", "never", "once", "twice"]
    assert [outcomes[name].error is None for name in cells] == [True, False, True]
    assert "its worker process died 2 times" in outcomes["twice"].error
    broken = Here(["twice"])
    outcomes = run_grid(grid_work.misbehave, cells, tmp_path, executor=broken, retries=0)
    assert broken.submitted == ["twice"]
    assert "died once" in outcomes["twice"].error
    assert run_grid(grid_work.misbehave, cells, tmp_path, executor=Here())["twice"].error is None


def test_an_executor_that_takes_no_more_work_fails_the_cells_and_keeps_the_rest(tmp_path):
    class Poisoned(Here):
        def submit(self, fn, /, *args, **kwargs):
            if args[1] == "b":
                raise BrokenExecutor("no")
            return super().submit(fn, *args, **kwargs)

    outcomes = run_grid(grid_work.misbehave, {"a": {"do": "x"}, "b": {"do": "x"}}, tmp_path, executor=Poisoned())
    assert outcomes["a"].error is None
    assert "died 2 times" in outcomes["b"].error


def test_an_error_of_the_executor_is_that_of_the_cell(tmp_path):
    class KilledWorkerError(Exception):
        pass

    class Failing(Here):
        def submit(self, fn, /, *args, **kwargs):
            future = super().submit(fn, *args, **kwargs)
            if args[1] == "b":
                future = Future()
                future.set_exception(KilledWorkerError("on 4\nworkers"))
            return future

    outcomes = run_grid(grid_work.misbehave, {"a": {"do": "x"}, "b": {"do": "x"}}, tmp_path, executor=Failing())
    assert (outcomes["a"].error, outcomes["b"].error) == (None, "KilledWorkerError: on 4 workers")
    assert stored(tmp_path, "b")["error"] == "KilledWorkerError: on 4 workers"


def test_a_process_that_was_starting_when_the_grid_ended_takes_no_work():
    processes = grids._Processes(1, 1)
    processes._start = lambda: processes.terminate() or 0
    future = processes.submit(grid_work.product, {"a": 1, "b": 1})
    assert isinstance(future.exception(timeout=60), CancelledError)
    processes.shutdown()


def test_an_interrupt_keeps_what_is_finished_and_cancels_the_rest(tmp_path):
    cells = {name: {"name": name, "folder": str(tmp_path), "waits": name == "second"} for name in ("first", "second", "third")}

    def interrupt(outcome):
        assert outcome.name == "first"
        grid_work.wait_for(tmp_path / "started-second")
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            run_grid(grid_work.rendezvous, cells, tmp_path, executor=pool, tell=interrupt)
        (tmp_path / "go").write_text("now")
    assert stored(tmp_path, "first")["result"]["name"] == "first"
    assert not (tmp_path / "started-third").exists()


def test_an_interrupt_of_a_worker_is_one_of_the_grid(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid_work.misbehave, {"x": {"do": "interrupt"}}, tmp_path, executor=Here())
    assert list((tmp_path / "cells").iterdir()) == []


def test_names_become_files_anywhere(tmp_path):
    names = ["../escape", "a/b", "a b", "a_b", ".hidden", "", "ü", "x" * 300, "x" * 299 + "y", "digits,m=100", "con:"]
    cells = {name: {"a": 1, "b": i} for i, name in enumerate(names)}
    run_grid(grid_work.product, cells, tmp_path, executor=Here())
    files = [path.name for path in (tmp_path / "cells").iterdir()]
    assert len(files) == len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells"]
    assert "digits,m=100.json" in files
    assert all(name.isascii() and len(name) < 130 and name[0] != "." and not set(' /:\\*?"<>|') & set(name) for name in files)
    assert all(outcome.cached for outcome in run_grid(grid_work.product, cells, tmp_path, executor=Here()).values())


@pytest.mark.parametrize(
    ("function", "cells", "options", "kind", "words"),
    [
        (lambda settings: {}, {}, {}, TypeError, "'function' parameter of run_grid must be a function at the top of a module"),
        (partial(grid_work.product), {}, {}, TypeError, "'function' parameter"),
        (grid_work.Holder().method, {}, {}, TypeError, "'function' parameter"),
        (grid_work.product, {"x": [1]}, {}, TypeError, "The settings of cell 'x' must be a dict. Got list"),
        (grid_work.product, {"x": {"a": Path()}}, {}, TypeError, "The settings of cell 'x' must be JSON.*Path at \\['a'\\]"),
        (grid_work.product, {"x": {"a": float("nan")}}, {}, TypeError, "The settings of cell 'x' must be JSON.*Got nan at"),
        (grid_work.product, {1: {}}, {}, TypeError, "'cells' parameter of run_grid must be a mapping with names"),
        (grid_work.product, {"a": {}, "A": {}}, {}, ValueError, "differ by more than case from 'a'"),
        (grid_work.product, {}, {"retries": -1}, ValueError, "'retries'"),
        (
            grid_work.product,
            {},
            {"executor": "local"},
            TypeError,
            "'executor' parameter of run_grid must be a concurrent",
        ),
    ],
)
def test_bad_arguments_are_named(tmp_path, function, cells, options, kind, words):
    with pytest.raises(kind, match=words):
        run_grid(function, cells, tmp_path, **{"executor": Here(), **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        ("slurm", {}, ValueError, "'kind' parameter of executor must be 'local' or 'dask'"),
        ("local", {"workers": 0}, ValueError, "'workers'"),
        ("local", {"threads": 0.5}, TypeError, "'threads'"),
        ("local", {"address": "tcp://x:1"}, ValueError, "'address'"),
    ],
)
def test_bad_executors_are_named(kind, options, error, words):
    with pytest.raises(error, match=words), executor(kind, **options):
        pass


# --- real processes -------------------------------------------------------------------------------------------------------------


def test_local_processes_that_are_killed_lose_nothing_and_an_interrupt_ends_them(tmp_path):
    cells = {
        "kills once": {"do": "kill once", "mark": str(tmp_path / "mark")},
        "kills always": {"do": "kill always"},
        "good": {"do": "well"},
        "better": {"do": "well"},
    }
    waiting = {name: {"name": name, "folder": str(tmp_path), "waits": name == "slow"} for name in ("quick", "slow")}

    def interrupt(outcome):
        grid_work.wait_for(tmp_path / "started-slow")
        raise KeyboardInterrupt

    def both_grids():
        with executor("local", workers=2, threads=3) as pool:  # as many as no default has
            outcomes.update(run_grid(grid_work.misbehave, cells, tmp_path, executor=pool))
            run_grid(grid_work.rendezvous, waiting, tmp_path, executor=pool, tell=interrupt)

    outcomes = {}
    with pytest.raises(KeyboardInterrupt):
        both_grids()
    assert "its worker process died 2 times" in outcomes.pop("kills always").error
    assert [outcome.error for outcome in outcomes.values()] == [None, None, None]
    assert os.getpid() not in {outcome.result["pid"] for outcome in outcomes.values()}
    assert stored(tmp_path, "quick")["result"]["threads"] == 3
    assert not (tmp_path / "cells" / "slow.json").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(lines(tmp_path / "started-slow")[0]), 0)


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import grid_work
    from pathlib import Path
    from opteq.grids import executor, run_grid
    if __name__ == "__main__":
        cells = {{name: {{"name": name, "folder": sys.argv[1], "waits": name != "quick"}} for name in ("quick", "slow", "never")}}
        with executor("local", workers=1) as pool:
            run_grid(grid_work.rendezvous, cells, Path(sys.argv[1]), executor=pool)
"""


@pytest.mark.verify
def test_a_grid_that_is_interrupted_or_killed_leaves_its_finished_cells_and_no_worker(tmp_path):
    script, left = tmp_path / "script.py", {}
    script.write_text(textwrap.dedent(SCRIPT).format(tests=str(TESTS)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        process = subprocess.Popen([sys.executable, script, folder], stderr=subprocess.PIPE, text=True)
        grid_work.wait_for(folder / "started-slow")
        grid_work.wait_for(folder / "cells" / "quick.json")
        process.send_signal(number)
        errors = process.communicate(timeout=30)[1]  # to its end, which comes when the worker, too, has closed it
        assert process.returncode != 0
        assert errors.count("Traceback") <= 1
        left[number.name] = [path.name for path in (folder / "cells").iterdir()]
        assert not (folder / "started-never").exists()
    assert set(map(tuple, left.values())) == {("quick.json",)}
    write_verify("grid_signals", {"cells left on disk": left, "workers left": 0})


def test_dask_runs_a_grid_and_a_killed_worker_loses_nothing(tmp_path):
    cells = {f"{a}{b}": {"name": f"{a}{b}", "folder": str(tmp_path), "waits": a == "x"} for a in "xy" for b in "12"}
    told = []

    def kill():
        grid_work.wait_for(tmp_path / "started-x1")
        os.kill(int(lines(tmp_path / "started-x1")[0]), signal.SIGKILL)
        (tmp_path / "go").write_text("now")

    with executor("dask", workers=2, threads=3) as cluster, executor("dask", address=cluster._client.scheduler.address) as pool:
        killer = threading.Thread(target=kill)
        killer.start()
        outcomes = run_grid(grid_work.rendezvous, cells, tmp_path, executor=pool, tell=told.append)
        killer.join()
    assert {name: outcome.result["name"] for name, outcome in outcomes.items()} == {name: name for name in cells}
    assert len(told) == 4
    started = lines(tmp_path / "started-x1")
    assert len(started) >= 2
    assert str(outcomes["x1"].result["pid"]) == started[-1] != started[0]
    assert {outcome.result["limit"] for outcome in outcomes.values()} == {"3"}  # Dask's own is 1
    assert max(outcome.result["threads"] for outcome in outcomes.values()) <= 3  # as many as there are cores


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x"])
def test_a_dask_scheduler_that_does_not_answer_is_one_line(monkeypatch, address):
    monkeypatch.setattr(grids, "_PATIENCE", "0.2s")
    with pytest.raises(ConnectionError, match="No Dask scheduler answers at") as error, executor("dask", address=address):
        pass
    assert "\n" not in str(error.value)


def test_without_dask_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'opteq\[dask\]'"), executor("dask"):
        pass


class SignalError(Exception):
    """What the handlers of these tests raise."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def raising(request):
    """A signal, whose handler raises, and is put back."""

    def handler(number, frame):
        raise SignalError

    before = signal.signal(request.param, handler)
    yield request.param
    assert signal.signal(request.param, before) is handler


@pytest.mark.parametrize("place", [(ThreadPoolExecutor, "submit"), (Future, "add_done_callback"), (Future, "cancel")])
def test_a_signal_in_the_midst_of_python_s_own_locks_is_heard_after_them(tmp_path, monkeypatch, raising, place):
    whole, done = getattr(*place), []

    def struck(*args, **kwargs):
        if not done:
            signal.raise_signal(raising)
        done.append(whole(*args, **kwargs))
        return done[-1]

    monkeypatch.setattr(*place, struck)
    with ThreadPoolExecutor(1) as pool, pytest.raises(SignalError):
        run_grid(grid_work.product, square(), tmp_path, executor=pool)
    assert len(done) == (4 if place[1] == "cancel" else 1)


def test_a_second_signal_is_heard_at_once(tmp_path, raising):
    heard = []

    class Twice(Here):
        def submit(self, fn, /, *args, **kwargs):
            signal.raise_signal(raising)
            heard.append(1)
            signal.raise_signal(raising)
            heard.append(2)

    with pytest.raises(SignalError):
        run_grid(grid_work.product, square(), tmp_path, executor=Twice())
    assert heard == [1]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_that_is_forked_as_a_cell_is_submitted_hears_signals_at_once(tmp_path):
    with ProcessPoolExecutor(1, get_context("fork")) as pool, pytest.raises(KeyboardInterrupt):
        run_grid(grid_work.misbehave, {"x": {"do": "Ctrl-C"}}, tmp_path, executor=pool)


def test_a_grid_runs_in_another_thread_than_the_main_one(tmp_path):
    with ThreadPoolExecutor(1) as caller, ThreadPoolExecutor(1) as pool:
        outcomes = caller.submit(run_grid, grid_work.product, square(), tmp_path, executor=pool).result()
    assert [outcome.result["product"] for outcome in outcomes.values()] == [4, 6, 6, 9]
