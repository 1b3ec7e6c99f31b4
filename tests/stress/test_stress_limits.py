"""Little memory, full disks, read-only folders, clocks that jump, two processes in one run: said clearly, nothing lost."""

import ctypes
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_stress_interruptions import litter, small_fit

import survivor
from opteq import Equilibrium, Stop, solve
from opteq.cells import OptEq
from opteq.runs import Checkpoint, Run, RunError, provenance
from opteq.solvers import Anderson
from processes import finish, import_optimizers, in_child

pytestmark = [pytest.mark.stress, pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")]
_USERS, _MOUNTS = 0x10000000, 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS
_READ_ONLY, _REMOUNT, _BIND = 1, 32, 4096


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr(provenance, "_git", lambda *_: None)


def mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), str(target).encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind}")


def in_namespace(work: Callable[[], None]) -> None:
    """Run in a child that may mount what nobody else sees; skip where the system does not allow it."""

    def inside() -> None:
        users, groups = os.getuid(), os.getgid()
        if ctypes.CDLL(None, use_errno=True).unshare(_USERS | _MOUNTS):
            os._exit(77)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {users} 1"), ("gid_map", f"0 {groups} 1")):
            Path(f"/proc/self/{name}").write_text(text)
        try:
            mount("none", Path("/"), "", 1 << 18 | 1 << 14)  # private, recursively: nothing is seen outside
        except OSError:
            os._exit(77)
        work()

    code = os.waitstatus_to_exitcode(finish(in_child(inside)))
    if code == 77:
        pytest.skip("no namespaces for users and mounts here")
    assert code == 0


def numbered(step: int, size: int = 20_000) -> Checkpoint:
    return Checkpoint(step, {"a": torch.full((size,), step)}, {"step": step})


def fill(run: Run) -> None:
    for step in range(1, 100):
        run.log({"step": step})
        run.save(numbered(step))


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs")
def test_a_disk_that_fills_up_is_reported_at_any_moment_and_loses_nothing(tmp_path, tally):
    """A file system of one megabyte, filled by checkpoints until no more fit, then freed."""

    def work() -> None:
        mount("tmpfs", tmp_path, "tmpfs", options="size=1m")
        with Run.create(tmp_path / "run", {}, keep=100) as run:
            with pytest.raises(RunError, match=r"No space left on device.*free some space"):
                fill(run)
            assert run.latest().step == run.metrics()[-1]["step"] - 1 > 1  # the one that did not fit was logged before
            assert not litter(tmp_path)
            (tmp_path / "run" / "checkpoints" / "step-00000001.json").unlink()
            (tmp_path / "run" / "checkpoints" / "step-00000001.safetensors").unlink()
            run.save(numbered(200))
            assert run.latest().step == 200

    in_namespace(work)
    tally("limits", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="bind mounts")
def test_a_folder_that_cannot_be_written_is_reported_and_can_still_be_read(tmp_path, tally):
    """Mounted read-only, which holds for root, too."""
    small_fit(tmp_path / "run")

    def work() -> None:
        mount(str(tmp_path), tmp_path, "", _BIND)
        mount("none", tmp_path, "", _BIND | _REMOUNT | _READ_ONLY)
        for act in (lambda: Run.open(tmp_path / "run"), lambda: Run.create(tmp_path / "other", {})):
            with pytest.raises(RunError, match=r"Read-only file system.*check the folder and its permissions"):
                act()
        assert Run.read(tmp_path / "run").latest() is not None
        assert len(Run.read(tmp_path / "run").metrics()) > 1

    in_namespace(work)
    tally("limits", 1)


def test_a_solve_that_needs_too_much_memory_is_an_error_and_the_next_one_works(tally):
    def work() -> None:
        torch.manual_seed(0)
        layer = Equilibrium(OptEq(3, 8, 8), Anderson(), Stop(rtol=1e-5))
        small = torch.randn(4, 3)
        wanted = layer(small)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20),) * 2)
        for _ in range(2):
            with pytest.raises((RuntimeError, MemoryError), match=r"(?i)memory|allocate"):
                layer(torch.ones(1, 3).expand(1_000_000, 3))
            assert torch.equal(layer(small), wanted)
        with pytest.raises((RuntimeError, MemoryError), match=r"(?i)memory|allocate"):
            solve(lambda z: 0.5 * z + 1, torch.zeros(3, 2**22), Anderson())

    assert finish(in_child(work)) == 0
    tally("limits", 3)


def test_a_training_that_runs_out_of_memory_goes_on_with_more(tmp_path, amount, tally):
    import_optimizers()
    small_fit(tmp_path / "whole")
    wanted, draw, count = survivor.outcome(tmp_path / "whole"), random.Random(0), amount(1, 12)

    def starved(folder: Path, spare: int) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare,) * 2)
        small_fit(folder)

    for i in range(count):
        folder = tmp_path / str(i)
        finish(in_child(lambda f=folder: starved(f, draw.randrange(0, 4 << 20))))  # whatever comes of it
        assert not litter(folder)
        small_fit(folder)
        assert survivor.outcome(folder) == wanted
    tally("limits", count)


def test_clocks_that_jump_change_nothing(tmp_path, monkeypatch, tally):
    small_fit(tmp_path / "whole")
    draw, real = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + draw.choice([-1e9, -3600.0, 0.0, 3600.0, 1e9]))
    small_fit(tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):  # files of the future, and of the past
        os.utime(path, (draw.choice([0, 2**31]),) * 2)
    small_fit(tmp_path / "run")
    assert survivor.outcome(tmp_path / "run") == survivor.outcome(tmp_path / "whole")
    assert Run.read(tmp_path / "run").latest().step == Run.read(tmp_path / "whole").latest().step
    tally("limits", 1)


def test_of_two_processes_that_resume_the_same_run_one_is_told_of_the_other(tmp_path, amount, tally):
    import_optimizers()
    small_fit(tmp_path / "whole")
    wanted, count = survivor.outcome(tmp_path / "whole"), amount(1, 20)

    def resume(folder: Path, gate: int) -> None:
        os.read(gate, 1)
        try:
            small_fit(folder)
        except RunError as error:
            os._exit(3 if any(reason in str(error) for reason in ("another process is writing", "already holds a run")) else 4)

    for i in range(count):
        folder = tmp_path / str(i)
        if i % 2:
            finish(in_child(lambda f=folder: small_fit(f)))
        gate, opener = os.pipe()
        pids = [in_child(lambda f=folder, g=gate: resume(f, g)) for _ in range(3)]
        os.write(opener, b"xxx")
        codes = [os.waitstatus_to_exitcode(finish(pid)) for pid in pids]
        os.close(gate)
        os.close(opener)
        assert set(codes) <= {0, 3}, codes
        assert 0 in codes
        assert survivor.outcome(folder) == wanted
        assert not litter(folder)
    tally("limits", count)
