"""Interrupts and kills at random points: nothing half-written stays, nothing finished is lost, and all goes on as before."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, _base, thread
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
import torch
from interruptions import (
    Interrupted,
    ended_within,
    interrupt_at,
    interrupt_within,
    interrupted_after,
    killed_after,
    lines_of,
    moments,
)
from stress_cases import make_case
from test_stress_threads import everything, same
from torch import Tensor, nn

import grid_work
import report_runs
import survivor
from opteq import Equilibrium, Stop
from opteq.cells import DeepOptEq, OptEq
from opteq.diagnostics import data_loss, landscape
from opteq.equilibrium import _observers
from opteq.grids import run_grid
from opteq.logs import _logs
from opteq.report import write
from opteq.runs import Run, provenance, write_atomic
from opteq.training import TrainConfig, fit
from processes import finish, import_optimizers, in_child

pytestmark = [
    pytest.mark.stress,
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    # Between the opening of a file and the `with` that closes it, Python itself may be interrupted: it is closed a moment later.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The kill of a process, unlike that of a machine, does not need fsync."""
    monkeypatch.setattr(os, "fsync", lambda file: os.fstat(file))
    monkeypatch.setattr(provenance, "_git", lambda *_: None)


def litter(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*.tmp")]


def check_undisturbed() -> None:
    """What a block may change and must put back."""
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert _observers.get() == ()
    assert _logs.get() == ()


def test_solves(amount, tally):
    struck, draw = 0, random.Random(0)
    for seed in range(amount(2, 60)):
        case = make_case(seed + 3000, batch=3)
        wanted = everything(case)
        lines = lines_of(lambda case=case: everything(case))
        for _ in range(5):
            struck += interrupt_at(lambda case=case: everything(case), draw.randrange(1, lines))
            check_undisturbed()
            assert not any(part._forward_pre_hooks for part in case.cell.modules())
        assert same(everything(case), wanted), case
    tally("interruptions", struck)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Equilibrium(OptEq(3, 2, 3, constrained=True), stop=Stop(rtol=1e-6)), nn.BatchNorm1d(2))


X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(0, 1, 16).reshape(8, 2)


def surface(model: nn.Module, file: Path) -> Tensor:
    return landscape(model, data_loss(X, Y), steps=3, file=file).loss


def test_landscapes_go_on_where_they_were_and_leave_the_model_as_it_was(tmp_path, amount, tally):
    model, draw, struck = small_model(), random.Random(1), 0
    state, numbers = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    wanted = surface(model, tmp_path / "whole")
    lines = lines_of(lambda: surface(model, tmp_path / "counted"))
    for run in range(amount(1, 12)):
        file = tmp_path / str(run)
        while interrupt_at(lambda file=file: surface(model, file), draw.randrange(1, lines)):
            struck += 1
            check_undisturbed()
            assert torch.equal(torch.get_rng_state(), numbers)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, state[name]), f"{name} was left elsewhere"
        assert torch.equal(surface(model, file), wanted)
    assert not litter(tmp_path)
    tally("interruptions", struck)


def test_landscapes_that_are_killed_go_on_where_they_were(tmp_path, amount, tally):
    model, draw, killed = small_model(), random.Random(2), 0
    begun = time.perf_counter()
    wanted = surface(model, tmp_path / "whole")
    seconds = time.perf_counter() - begun
    for run in range(amount(1, 15)):
        file, times = tmp_path / str(run), moments(draw, 1.5 * seconds)
        while killed_after(next(times), in_child(lambda file=file: surface(model, file))):
            killed += 1
        assert torch.equal(surface(model, file), wanted)
    assert not [name for name in litter(tmp_path) if not name.startswith(str(tmp_path / "."))]
    tally("interruptions", killed)


SMALL = TrainConfig(epochs=3, batch_size=4, lr=0.05, checkpoint_every=2, log_every=2, patience=2, ema=0.9)


def small_fit(folder: Path) -> None:
    resume = (folder / "config.json").exists()
    torch.manual_seed(0)
    cell = DeepOptEq([OptEq(3, 4, 4), OptEq(3, 4, 3, alpha=0.5)], learn_alpha=True)
    model = nn.Sequential(Equilibrium(cell, stop=Stop(rtol=1e-4)), nn.Dropout(0.1), nn.Linear(4, 2))
    fit(model, (X, Y), (X, Y), SMALL, folder=folder, resume=resume, verbose=False)


def sound(folder: Path) -> None:
    """The run is whole or not there, and nobody holds it."""
    if (folder / "config.json").exists():
        with Run.open(folder) as run:
            assert run.latest() is not None or not run.steps()
    assert not litter(folder)


def test_trainings_that_are_interrupted_end_as_if_they_had_not_been(tmp_path, amount, tally):
    draw, struck = random.Random(3), 0
    small_fit(tmp_path / "whole")
    wanted = survivor.outcome(tmp_path / "whole")
    lines = lines_of(lambda: small_fit(tmp_path / "counted"))
    for run in range(amount(1, 25)):
        folder = tmp_path / str(run)
        while interrupt_at(lambda folder=folder: small_fit(folder), draw.randrange(1, int(1.3 * lines))):
            struck += 1
            check_undisturbed()
            sound(folder)
        assert survivor.outcome(folder) == wanted
    tally("interruptions", struck)


def test_trainings_that_are_killed_end_as_if_they_had_not_been(tmp_path, amount, tally):
    import_optimizers()
    draw, killed = random.Random(4), 0
    small_fit(tmp_path / "whole")
    wanted, begun = survivor.outcome(tmp_path / "whole"), time.perf_counter()
    assert finish(in_child(lambda: small_fit(tmp_path / "timed"))) == 0
    seconds = time.perf_counter() - begun
    for run in range(amount(1, 20)):
        folder, times = tmp_path / str(run), moments(draw, 1.4 * seconds)
        while killed_after(next(times), in_child(lambda folder=folder: small_fit(folder))):
            killed += 1
            if (folder / "config.json").exists():
                Run.read(folder).latest()
        assert survivor.outcome(folder) == wanted
        assert not litter(folder)
    tally("interruptions", killed)


def test_reports_that_are_interrupted_are_the_old_ones_or_the_new(tmp_path, amount, tally):
    folder, draw = report_runs.make(tmp_path / "run", [{"kind": "step", "step": 1, "loss": 1.0}]), random.Random(5)
    (folder / "report.html").write_text("old")
    for library in ("jinja2", "matplotlib.pyplot", "plotly.offline"):  # half an import cannot be taken up again
        import_module(library)
    struck = 0
    for _ in range(amount(1, 20)):
        try:
            with interrupted_after(draw.uniform(0, 0.5)):
                write([folder])
            (folder / "report.html").write_text("old")  # it was quicker
        except Interrupted:
            struck += 1
            text = (folder / "report.html").read_text()
            assert text == "old" or text.rstrip().endswith("</html>")
        assert not litter(folder)
    tally("interruptions", struck)


def test_a_file_that_is_interrupted_at_any_line_of_what_writes_it_is_the_old_one_or_the_new(tmp_path, tally):
    path = tmp_path / "report.html"
    write_atomic(path, "old")
    lines, struck = lines_of(lambda: write_atomic(path, "old")), 0
    for k in range(1, lines + 1):
        struck += interrupt_at(lambda: write_atomic(path, "new"), k)
        assert path.read_text() in ("old", "new")
        assert not litter(tmp_path), f"line {k}"
    assert struck >= 5
    tally("interruptions", struck)


def test_grids_that_are_interrupted_keep_what_was_finished(tmp_path, amount, tally):
    draw, struck = random.Random(6), 0
    for run in range(amount(2, 20)):
        folder, log, times = tmp_path / str(run), tmp_path / f"log{run}", moments(draw, 0.01)
        cells = {f"{a}{b}": {"a": a, "b": b, "log": str(log)} for a in range(5) for b in range(4)}
        while True:
            finished = {path.name for path in (folder / "cells").glob("*.json")}
            before = log.read_text().splitlines() if log.exists() else []
            try:
                with ThreadPoolExecutor(1) as executor, interrupted_after(next(times)):
                    found = run_grid(grid_work.product, cells, folder, executor=executor)
                break
            except Interrupted:
                struck += 1
                assert not litter(folder)
                again = set(log.read_text().splitlines()[len(before) :]) if log.exists() else set()
                assert not {f"{name}.json" for name in again} & finished  # what was finished is not run again
        assert {name: outcome.result for name, outcome in found.items()} == {
            n: {"product": c["a"] * c["b"]} for n, c in cells.items()
        }
    tally("interruptions", struck)


def test_a_grid_that_is_interrupted_at_any_line_of_python_s_own_locks_does_not_hang(tmp_path, tally):
    files, told = {threading.__file__, thread.__file__, _base.__file__}, tmp_path / "told"
    cells = {name: {"a": 2, "b": 3} for name in "xy"}

    def interrupt_each():
        for k in count(1):
            with ThreadPoolExecutor(1) as executor:  # waits for its thread, which waits for ever if a lock was left held
                work = partial(run_grid, grid_work.product, cells, tmp_path / str(k), executor=executor)
                if not interrupt_within(files, work, k):
                    return
            told.write_text(str(k))

    assert ended_within(60, in_child(interrupt_each)), f"it hangs after {told.read_text()}"
    assert int(told.read_text()) > 50
    tally("interruptions", int(told.read_text()))
