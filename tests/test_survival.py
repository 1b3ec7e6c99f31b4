"""A training that is killed, starved of disk or given a spoilt checkpoint goes on to the same result, bit by bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import survivor
from conformance import write_verify
from opteq.runs import Run, RunError, RunWarning
from opteq.training import Callback
from processes import finish, import_optimizers, in_child


def train_to_the_end(folder: Path) -> None:
    assert finish(in_child(lambda: survivor.train(folder))) == 0


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_optimizers()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_to_the_end(folder)
    return survivor.outcome(folder)


class KillAtStep(Callback):
    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(name: str, number: int) -> None:
    """Let the process die in the `number`-th call of os.`name`."""
    calls, real = 0, getattr(os, name)

    def deadly(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(os, name, deadly)


def test_two_whole_runs_are_identical(tmp_path, wanted):
    train_to_the_end(tmp_path / "run")
    assert survivor.outcome(tmp_path / "run") == wanted


@pytest.mark.parametrize("steps", [(1,), (6,), (3, 7, 11)])
def test_a_run_killed_after_any_step_ends_as_if_it_had_not_been(tmp_path, wanted, steps):
    for step in steps:
        status = finish(in_child(lambda step=step: survivor.train(tmp_path / "run", (KillAtStep(step),))))
        assert os.WTERMSIG(status) == signal.SIGKILL
    train_to_the_end(tmp_path / "run")
    assert survivor.outcome(tmp_path / "run") == wanted


@pytest.mark.parametrize(("call", "number"), [("replace", 5), ("replace", 8), ("fsync", 12), ("unlink", 3)])
def test_a_run_killed_within_a_checkpoint_write_ends_as_if_it_had_not_been(tmp_path, wanted, call, number):
    def doomed() -> None:
        kill_at_call(call, number)
        survivor.train(tmp_path / "run")

    assert os.WTERMSIG(finish(in_child(doomed))) == signal.SIGKILL
    train_to_the_end(tmp_path / "run")
    assert survivor.outcome(tmp_path / "run") == wanted


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "corrupted":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.write_bytes(b"not one of ours")


@pytest.mark.parametrize(("how", "suffix"), [("truncated", ".safetensors"), ("corrupted", ".json"), ("foreign", ".safetensors")])
def test_a_spoilt_checkpoint_is_refused_and_the_one_before_is_used(tmp_path, wanted, how, suffix):
    folder = tmp_path / "run"
    finish(in_child(lambda: survivor.train(folder, (KillAtStep(9),))))
    last = Run.read(folder).steps()[-1]
    spoil(next(p for p in (folder / "checkpoints").iterdir() if f"{last:08d}" in p.name and p.suffix == suffix), how)
    with pytest.warns(RunWarning, match=f"checkpoint refused: .*{last:08d}"):
        survivor.train(folder)
    assert survivor.outcome(folder) == wanted


def test_a_full_disk_is_reported_and_loses_no_earlier_state(tmp_path, wanted, monkeypatch):
    folder = tmp_path / "run"
    real, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*the earlier checkpoints are kept"):
        survivor.train(folder)
    monkeypatch.undo()
    assert Run.read(folder).latest() is not None
    survivor.train(folder)
    assert survivor.outcome(folder) == wanted


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="could not be written"):
        survivor.train(tmp_path / "file" / "run")


@pytest.mark.verify
def test_thirty_runs_killed_at_random_moments_end_bit_identical(tmp_path):
    """Fresh interpreters, each killed at a random moment until one gets to the end."""
    command = [sys.executable, str(Path(survivor.__file__)), "FOLDER"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    begun = time.monotonic()
    subprocess.run([*command[:-1], str(tmp_path / "whole")], env=environment, check=True)
    duration = time.monotonic() - begun
    wanted, moments, kills = survivor.outcome(tmp_path / "whole"), random.Random(0), 0
    for run in range(30):
        folder = tmp_path / str(run)
        while True:
            process = subprocess.Popen([*command[:-1], str(folder)], env=environment)
            try:
                process.wait(timeout=moments.uniform(0.3, 1.1) * duration)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
        assert process.returncode == 0
        assert survivor.outcome(folder) == wanted
    write_verify("kill", {"runs": 30, "kills": kills, "identical": 30})
