"""Run folders: what is saved comes back bit by bit, and no kill, full disk or damaged file loses an earlier checkpoint."""

import builtins
import errno
import itertools
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import opteq
from conformance import write_verify
from opteq import runs
from opteq.runs import Checkpoint, Run, RunError, RunWarning, environment, write_atomic

fsync = os.fsync
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2, torch.float8_e4m3fn),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
]


def numbered(step: int, content: int | None = None, size: int = 4) -> Checkpoint:
    """A checkpoint whose every part says which one it is."""
    content = step if content is None else content
    tensors = {name: torch.full((size,), content, dtype=torch.float64) for name in ("a", "b")}
    return Checkpoint(step, tensors, {"content": content})


def check_numbered(checkpoint: Checkpoint | None, step: int, content: int | None = None) -> None:
    assert checkpoint is not None
    content = step if content is None else content
    assert (checkpoint.step, checkpoint.state, list(checkpoint.tensors)) == (step, {"content": content}, ["a", "b"])
    assert all(bool((tensor == content).all()) and len(tensor) > 0 for tensor in checkpoint.tensors.values())


def started(folder: Path, *steps: int, keep: int = 3) -> Run:
    """An open run with these checkpoints."""
    run = Run.create(folder, {"lr": 0.1}, keep=keep)
    for step in steps:
        run.log({"step": step})
        run.save(numbered(step))
    return run


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in sorted(folder.rglob("*"))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def in_child(work: Callable[[], int]) -> int:
    """The exit code of `work`, run in a fork: quick, where a new interpreter would import torch."""
    if (pid := os.fork()) == 0:
        code = 99
        with suppress(BaseException):
            code = work()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def struck(k: int, strike: Callable[[], None]) -> Iterator[list[str]]:
    """Call `strike` in place of the k-th call that changes something on disk; yields the names of the calls so far."""
    calls: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == k:
                strike()
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", watched("open", open))
        for name in ("open", "write", "fsync", "replace", "unlink", "mkdir", "ftruncate"):
            patch.setattr(os, name, watched(f"os.{name}", getattr(os, name)))
        yield calls


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(autouse=True)
def _quick(monkeypatch, request):
    """The kill of a process, unlike that of a machine, does not need fsync; and git is asked only where it matters."""
    if "environment" not in request.node.name:
        monkeypatch.setattr(os, "fsync", lambda file: os.fstat(file))
        monkeypatch.setattr(runs.provenance, "_git", lambda *_: None)


# Round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_bit_by_bit(tmp_path, dtype, shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = (data.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)
    with Run.create(tmp_path, {}) as run:
        run.save(Checkpoint(1, {"x": tensor}, {}))
        loaded = run.load(1).tensors["x"]
    assert (loaded.dtype, loaded.shape, loaded.device.type) == (dtype, tensor.shape, "cpu")
    assert raw(loaded) == raw(tensor)


def test_views_tied_weights_and_odd_names_are_each_kept_in_their_order(tmp_path):
    w = torch.randn(3, 4, dtype=torch.complex64)
    tied = torch.nn.Parameter(torch.randn(5))
    tensors = {"z": tied, "a": tied, "": w.T, "é\n/..": w[:, 1], "c": w.conj(), "n": w.conj().imag, "e": torch.ones(1).expand(9)}
    with Run.create(tmp_path, {}) as run:
        run.save(Checkpoint(0, tensors, {}))
        loaded = run.load(0).tensors
        run.save(Checkpoint(1, {}, {}))
        assert run.load(1).tensors == {}
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert not loaded[name].requires_grad
    loaded["z"].zero_()
    assert not torch.equal(loaded["a"], loaded["z"])


def test_later_changes_of_the_callers_tensors_do_not_reach_a_checkpoint_nor_the_other_way_round(tmp_path):
    x = torch.zeros(3)
    with Run.create(tmp_path, {}) as run:
        run.save(Checkpoint(0, {"x": x}, {}))
        x += 1
        run.load(0).tensors["x"].add_(7)
        assert torch.equal(run.load(0).tensors["x"], torch.zeros(3))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.zeros(2, dtype=torch.complex128)}, r"tensors\['x'\].*dtype that safetensors has.*complex128"),
        ({"x": torch.zeros(2).to_sparse()}, r"dense, .*Got torch\.sparse_coo"),
        ([torch.zeros(2)], "'tensors' parameter of Checkpoint must be a dict"),
        ({"x": [1.0]}, "a tensor"),
        ({"__metadata__": torch.zeros(2)}, "__metadata__"),
        ({3: torch.zeros(2)}, "strings"),
    ],
)
def test_tensors_that_could_not_be_read_back_are_refused_before_anything_is_written(tmp_path, tensors, message):
    with started(tmp_path / "run", 1) as run:
        before = snapshot(tmp_path)
        with pytest.raises((TypeError, ValueError), match=message):
            run.save(Checkpoint(2, tensors, {}))
        assert snapshot(tmp_path) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=4),
    max_leaves=12,
)


def spelled(value: Any) -> Any:
    """The value with each float as its bits (one NaN for all) and each type named, so that == is identity."""
    if isinstance(value, float):
        return "float", "nan" if value != value else struct.pack(">d", value)
    if isinstance(value, list):
        return [spelled(item) for item in value]
    if isinstance(value, dict):
        return [(key, spelled(item)) for key, item in value.items()]
    return type(value).__name__, value


@given(st.dictionaries(st.text(), JSON, max_size=4))
@settings(max_examples=40)
def test_any_json_state_comes_back_bit_by_bit(state):
    with tempfile.TemporaryDirectory() as folder, Run.create(Path(folder) / "run", {"given": state}) as run:
        run.save(Checkpoint(3, {}, state))
        run.write("result.json", state)
        assert spelled(run.load(3).state) == spelled(state)
        assert spelled(run.read_json("result.json")) == spelled(state)
        assert spelled(Run.read(run.folder).config) == spelled({"given": state})
        json.loads((run.folder / "checkpoints/step-00000003.json").read_text(), parse_constant=pytest.fail)


def test_what_json_has_no_word_for_is_refused_by_its_path_and_tuples_become_lists(tmp_path):
    with started(tmp_path / "run", 1) as run:
        before = snapshot(tmp_path)
        for state, message in [
            ({"a": {1: 2}}, r"state\.a.*keys are strings.*\[1\]"),
            ({"a": [0, {"b": torch.zeros(1)}]}, r"state\.a\[1\]\.b.*Tensor"),
            ({"a": {"__float__": "inf"}}, "__float__"),
            ({"a": {1, 2}}, "set"),
            ([], "dict"),
        ]:
            with pytest.raises(TypeError, match=message):
                run.save(Checkpoint(2, {}, state))
        assert snapshot(tmp_path) == before
        run.save(Checkpoint(2, {}, {"betas": (0.9, (1, 2))}))
        assert run.load(2).state == {"betas": [0.9, [1, 2]]}


# Damaged checkpoints


def check_refused(run: Run, *words: str, previous: int = 1, bad: int = 2) -> None:
    """The bad one is refused, with one of the words, and the previous one used."""
    with pytest.raises(RunError) as caught:
        run.load(bad)
    assert any(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.warns(RunWarning, match="refused") as seen:
        check_numbered(run.latest(), previous)
    assert [warning.filename for warning in seen] == [__file__]  # the caller's line


@pytest.fixture
def pair(tmp_path):
    """A run with steps 1 and 2, and the two files of step 2."""
    with started(tmp_path / "run", 1, 2) as run:
        folder = run.folder / "checkpoints"
        yield run, folder / "step-00000002.json", folder / "step-00000002.safetensors"


def test_a_checkpoint_truncated_anywhere_is_refused_and_the_previous_one_used(pair):
    run, *files = pair
    for file in files:
        whole = file.read_bytes()
        for length in [*range(0, len(whole), 10), len(whole) - 1]:
            file.write_bytes(whole[:length])
            check_refused(run, "truncated")
        file.write_bytes(whole)
    check_numbered(run.latest(), 2)


def test_a_checkpoint_with_any_one_byte_changed_is_refused_and_the_previous_one_used(pair):
    run, *files = pair
    draw = random.Random(0)
    for file in files:
        whole = file.read_bytes()
        for place in range(len(whole)):
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
            # Without its last brace and line end, a JSON file looks cut off.
            with pytest.raises(RunError, match=r"corrupted|foreign" if place < len(whole) - 2 else r"corrupted|truncated"):
                run.load(2)
        for longer in (whole + b"\n", b" " + whole):
            file.write_bytes(longer)
            check_refused(run, "corrupted", "foreign")
        file.write_bytes(whole)
    check_numbered(run.latest(), 2)


def forge(header: Path, **changes: Any) -> None:
    """The header with other fields, and the digest that fits them; None takes a field away."""
    fields = {**json.loads(header.read_text()), **changes}
    fields.pop("digest")
    header.write_bytes(runs.checkpoint._seal({key: value for key, value in fields.items() if value is not None}))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{}", "foreign"),
        (b"[1, 2]", "foreign"),
        (b'{"format": "pt"}', "foreign"),
        (b'{"format": ["opteq checkpoint"]}\n', "foreign"),
        (b'{"format": "opteq checkpoint", "step": NaN, "state": 1e999}\n', "corrupted"),
        (b'{"format": "opteq checkpoint", "state": {"__float__": 1}}\n', "corrupted"),
        (b"[" * 100_000 + b"}\n", "corrupted"),
    ],
    ids=range(7),
)
def test_json_of_something_else_is_refused(pair, content, word):
    run, header, _ = pair
    header.write_bytes(content)
    check_refused(run, word)


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "../../outside.safetensors"},
        {"file": "/etc/passwd"},
        {"file": "step-00000001.safetensors"},
        {"file": 7},
        {"file": None},
        {"step": 1},
        {"step": None},
        {"version": 2},
        {"version": None},
        {"names": ["a", "c"]},
        {"names": 3},
        {"state": None},
    ],
    ids=str,
)
def test_a_header_with_the_right_digest_but_fields_of_something_else_is_foreign(pair, tmp_path, changes):
    run, header, tensors = pair
    shutil.copy(tensors, tmp_path / "outside.safetensors")
    forge(header, **changes)
    check_refused(run, "foreign")


def test_a_foreign_safetensors_file_is_refused(pair):
    run, header, tensors = pair
    from safetensors.torch import save

    whole = tensors.read_bytes()
    tensors.write_bytes(save({"w": torch.zeros(500)}))
    check_refused(run, "foreign")
    tensors.write_bytes(whole.replace(b'"a"', b'"q"'))
    check_refused(run, "corrupted")
    tensors.write_bytes(b"PK" * 300)
    check_refused(run, "foreign")
    forge(header, size=600, sha256=runs.checkpoint._sha256(b"PK" * 300))
    check_refused(run, "foreign")


def test_without_one_of_its_two_files_a_checkpoint_is_refused_or_does_not_exist(pair):
    run, header, tensors = pair
    kept = tensors.read_bytes()
    tensors.unlink()
    check_refused(run, "could not be read (No such file")
    tensors.write_bytes(kept)
    header.unlink()
    assert run.steps() == [1]
    with pytest.raises(RunError, match=r"no checkpoint of step 2: there are \[1\]"):
        run.load(2)
    check_numbered(run.latest(), 1)


def test_links_are_not_followed(pair, tmp_path):
    run, header, tensors = pair
    for file in (tensors, header):
        moved = tmp_path / file.name
        file.rename(moved)
        file.symlink_to(moved)
        check_refused(run, "link")
        file.unlink()
        moved.rename(file)
    check_numbered(run.latest(), 2)
    header.unlink()
    header.mkdir()
    check_refused(run, "foreign")


def test_a_folder_of_checkpoints_metrics_or_lock_that_leads_outside_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("checkpoints", "metrics.jsonl", "run.lock"):
        folder = tmp_path / f"of {name}"
        run = started(folder, 1)
        (folder / name).rename(tmp_path / f"old {name}")
        (folder / name).symlink_to(outside / name)
        if name == "run.lock":
            run.close()
            with pytest.raises(RunError, match="symbolic link"):
                Run.open(folder)
        with pytest.raises(RunError, match=r"link|reading only"):
            run.save(numbered(2))
        if name == "metrics.jsonl":
            with pytest.raises(RunError, match="symbolic link"):
                run.log({"step": 2})
        run.close()
    assert names(outside) == []


def test_a_run_folder_that_is_itself_a_link_is_written_where_it_leads(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there")
    with started(link, 1, 2) as run:
        run.write("more.json", [1])
        run.rewind(1)
    with Run.open(link) as run:
        run.save(numbered(3))
        assert run.metrics() == [{"step": 1}]
    check_numbered(Run.read(tmp_path / "there").latest(), 3)
    write_atomic(link / "file", b"x")
    assert (tmp_path / "there" / "file").read_bytes() == b"x"
    assert link.is_symlink()
    (tmp_path / "there" / "checkpoints").rename(tmp_path / "outside")
    (tmp_path / "there" / "checkpoints").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match="is a link: checkpoints must lie inside"):
        Run.open(link)


def test_when_every_checkpoint_is_bad_there_is_no_latest_and_each_is_named(tmp_path):
    with started(tmp_path, 1, 2) as run:
        for header in (tmp_path / "checkpoints").glob("*.json"):
            header.write_text("")
        with pytest.warns(RunWarning) as seen:
            assert run.latest() is None
    assert [("00002" in str(w.message), "00001" in str(w.message)) for w in seen] == [(True, False), (False, True)]


def test_a_checkpoint_that_a_writer_replaces_while_a_reader_looks_is_not_called_bad(tmp_path, monkeypatch):
    with started(tmp_path, 1, keep=1) as run:
        reader, read = Run.read(tmp_path), runs.checkpoint._unseal

        def slow(path: Path) -> dict[str, Any]:
            header = read(path)
            if run.steps() == [1]:
                run.save(numbered(2))
            return header

        monkeypatch.setattr(runs.checkpoint, "_unseal", slow)
        check_numbered(reader.latest(), 2)


# Saving


def test_the_newest_are_kept_and_one_of_the_same_step_is_replaced(tmp_path):
    with started(tmp_path, *range(5), keep=2) as run:
        assert run.steps() == [3, 4]
        for content in (40, 41, 42):
            run.save(numbered(4, content))
            check_numbered(run.latest(), 4, content)
            assert len(names(tmp_path / "checkpoints")) == 4
        run.save(numbered(1))
        assert run.steps() == [1, 3, 4]  # what was just saved is never deleted
        check_numbered(run.load(1), 1)
        run.save(numbered(123456789))
        assert run.steps() == [4, 123456789]
    with pytest.raises(ValueError, match="'keep' parameter of Run"):
        Run.open(tmp_path, keep=0)
    with pytest.raises(ValueError, match="'step' parameter of Checkpoint"), Run.open(tmp_path) as run:
        run.save(numbered(-1))


def test_files_with_other_names_are_no_checkpoints_and_stay(tmp_path):
    with started(tmp_path, 1) as run:
        others = ["step-000000002.json", "step-3.json", "notes.json", "best.safetensors", "step-00000001.json.bak", ".mine.tmp"]
        for name in others:
            (tmp_path / "checkpoints" / name).write_text("{}")
        run.save(numbered(2))
        assert run.steps() == [1, 2]
    with Run.open(tmp_path) as run:
        assert set(others) < set(names(tmp_path / "checkpoints"))


SAVES = {"a new step": (3, 3), "the same step again": (2, 20)}


def interrupt() -> None:
    """What Ctrl-C does, also where the process ignores the signal, as jobs in the background do."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", SAVES)
@pytest.mark.parametrize("error", [full_disk, interrupt], ids=["full disk", "interrupt"])
def test_a_failure_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint_and_no_litter(tmp_path, what, error):
    step, content = SAVES[what]
    reached = []
    for k in itertools.count(1):
        with started(tmp_path / str(k), 1, 2, keep=2) as run:
            raised = None
            with struck(k, error) as calls:
                try:
                    run.save(numbered(step, content))
                except (RunError, KeyboardInterrupt) as caught:
                    raised = caught
            if len(calls) < k:
                break
            reached.append(calls[k - 1])
            if not isinstance(raised, KeyboardInterrupt) and reached[-1] != "os.mkdir":  # of a folder that is there
                assert "No space left on device): free some space; the earlier checkpoints are kept" in str(raised)
            latest = run.latest()
            assert latest is not None
            check_numbered(latest, *((step, content) if latest.state["content"] == content else (2, 2)))
            assert latest.state["content"] == 2 or calls.count("os.replace") == 2
            if reached[-1] != "os.unlink":
                assert len(names(run.folder / "checkpoints")) == 2 * len(run.steps())
            run.save(numbered(step, content))
            check_numbered(run.latest(), step, content)
        with Run.open(run.folder, keep=2):
            assert len(names(run.folder / "checkpoints")) == 4
    assert {"open", "os.open", "os.fsync", "os.replace", "os.unlink"} <= set(reached)


@forks
@pytest.mark.parametrize("what", SAVES)
def test_a_kill_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, what):
    step, content = SAVES[what]
    started(tmp_path / "start", 1, 2, keep=2).close()
    for k in itertools.count(1):
        folder = tmp_path / str(k)
        shutil.copytree(tmp_path / "start", folder)

        def work(folder: Path = folder, k: int = k) -> int:
            run = Run.open(folder, keep=2)
            with struck(k, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                run.save(numbered(step, content))
            return 0

        code = in_child(work)
        for run in (Run.read(folder), Run.open(folder, keep=2)):
            latest = run.latest()
            assert latest is not None
            check_numbered(latest, *((step, content) if latest.state["content"] == content else (2, 2)))
            run.close()
        assert not [name for name in names(folder / "checkpoints") if name.endswith(".tmp")]
        assert len(list(folder.glob("checkpoints/*.json"))) == len(list(folder.glob("checkpoints/*.safetensors")))
        if code == 0:
            check_numbered(latest, step, content)
            break
        assert code == -signal.SIGKILL
    assert k > 8


def save_forever(folder: Path, report: int) -> int:
    """In a fork: save numbered checkpoints, every third one twice, and report each content once it is saved."""
    os.fsync = fsync
    with Run.open(folder, keep=2) as run:
        last = run.latest()
        start = last.state["content"] + 1 if last else 1
        for content in itertools.count(start):
            run.log({"step": content - content % 3 // 2, "content": content})
            run.save(numbered(content - content % 3 // 2, content, size=20_000))
            os.write(report, struct.pack("q", content))
    return 1


def check_kills(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill a saving process at random moments: the newest checkpoint is always whole, and no older than the last one reported."""
    Run.create(folder, {}).close()
    draw, last, saved, midway = random.Random(seed), 0, 0, 0
    for _ in range(kills):
        receiver, sender = os.pipe()
        if (pid := os.fork()) == 0:
            with suppress(BaseException):
                save_forever(folder, sender)
            os._exit(1)
        os.close(sender)
        assert select.select([receiver], [], [], 60)[0]
        time.sleep(draw.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        with open(receiver, "rb") as pipe:
            reported = [number for (number,) in struct.iter_unpack("q", pipe.read())]
        midway += any(name.endswith(".tmp") for name in names(folder / "checkpoints"))
        with Run.open(folder, keep=2) as run:
            latest = run.latest()
            assert latest is not None
            content = latest.state["content"]
            check_numbered(latest, content - content % 3 // 2, content)
            assert content >= max(last, *reported)
            assert {row["content"] for row in run.metrics()} >= set(range(1, content + 1))
            last, saved = content, saved + len(reported)
    return {"kills": kills, "saves": saved, "kills_during_a_write": midway}


@forks
def test_a_process_killed_while_saving_loses_nothing_that_it_reported_as_saved(tmp_path):
    check_kills(tmp_path / "run", kills=10, seed=0)


@forks
@pytest.mark.verify
def test_three_hundred_kills_lose_nothing(tmp_path):
    write_verify("runs_kills", check_kills(tmp_path / "run", kills=300, seed=1))


# Full disks and unwritable folders


@forks
@pytest.mark.parametrize("limit", [0, 100, 1_000, 50_000])
def test_a_file_that_may_not_grow_is_reported_and_loses_nothing(tmp_path, limit):
    started(tmp_path, 1, 2).close()

    def work() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Run.open(tmp_path) as run:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            for act in (lambda: run.save(numbered(3, size=10_000)), lambda: run.log({"step": 3, "text": "x" * 60_000})):
                with pytest.raises(
                    RunError, match=r"could not be written \((File too large|No space left on device)\): free some space"
                ):
                    act()
            assert run.metrics() == [{"step": 1}, {"step": 2}]
            check_numbered(run.latest(), 2)
        return 0

    assert in_child(work) == 0
    with Run.open(tmp_path) as run:
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
        assert len(names(tmp_path / "checkpoints")) == 4
        run.save(numbered(3))
        check_numbered(run.latest(), 3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_device_that_is_full_is_reported_and_loses_nothing(tmp_path, monkeypatch):
    with started(tmp_path, 1) as run:
        real = open
        monkeypatch.setattr(builtins, "open", lambda path, mode: real("/dev/full", "wb"))
        with pytest.raises(RunError, match=r"No space left on device.*earlier checkpoints are kept"):
            run.save(numbered(2))
        check_numbered(run.latest(), 1)


def test_a_row_that_is_written_in_part_is_reported_and_taken_back(tmp_path, monkeypatch):
    with started(tmp_path, 1) as run:
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(RunError, match=r"metrics.jsonl could not be written \(No space left"):
            run.log({"step": 2})
        monkeypatch.undo()
        run.log({"step": 3})
        assert run.metrics() == [{"step": 1}, {"step": 3}]


def test_a_file_in_the_way_of_a_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(RunError, match=r"could not be written \(Not a directory\): check the folder"):
            Run.create(folder, {})
    with started(tmp_path / "run", 1) as run:
        (run.folder / "checkpoints").rename(tmp_path / "kept")
        (run.folder / "checkpoints").write_text("in the way")
        with pytest.raises(RunError, match=r"step-00000002 could not be written \(File exists\)"):
            run.save(numbered(2))
        assert run.steps() == []
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", ["listdir", "lstat"])
def test_what_cannot_be_read_is_reported(tmp_path, monkeypatch, call):
    def deny(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with started(tmp_path, 1) as run, monkeypatch.context() as patch:
        patch.setattr(*((os, "listdir", deny) if call == "listdir" else (Path, "lstat", deny)))
        with pytest.raises(RunError, match=r"could not be read \(Permission denied\)"):
            run.steps() if call == "listdir" else run.load(1)


# Creating, opening, reading


def test_a_new_run_has_its_configuration_and_environment(tmp_path):
    config = {"lr": 0.1, "betas": (0.9, 0.99), "limit": float("inf"), "data": {"name": "digits"}}
    with Run.create(str(tmp_path / "a" / "b"), config, keep=5) as run:
        assert run.config == {**config, "betas": [0.9, 0.99]}
        assert (run.folder, run.keep, run.steps(), run.latest(), run.metrics()) == (tmp_path / "a" / "b", 5, [], None, [])
        assert run.read_json("environment.json") == environment()
    assert names(run.folder) == ["checkpoints", "config.json", "environment.json", "run.lock"]
    assert Run.read(run.folder).config == run.config


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    started(tmp_path / "run", 1).close()
    for missing in (None, "config.json", "metrics.jsonl"):
        if missing:
            (tmp_path / "run" / missing).unlink()
        before = snapshot(tmp_path)
        with pytest.raises(RunError, match="already holds a run: resume it, or use another folder"):
            Run.create(tmp_path / "run", {})
        assert snapshot(tmp_path) == before


def test_a_run_that_another_process_makes_just_before_the_lock_is_taken_is_left_alone(tmp_path, monkeypatch):
    def late(folder: Path) -> Any:
        monkeypatch.undo()
        started(folder, 1).close()
        return runs.files.Lock(folder)

    monkeypatch.setattr(runs.folder, "Lock", late)
    with pytest.raises(RunError, match="already holds a run"):
        Run.create(tmp_path / "run", {})
    with Run.open(tmp_path / "run") as run:
        check_numbered(run.latest(), 1)


def test_a_failure_at_any_call_of_create_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.folder, "environment", dict)
    own = tmp_path / "own"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    for folder in (tmp_path / "deep" / "run", own):
        for k in itertools.count(1):
            before = {path: entry[1] for path, entry in snapshot(tmp_path).items()}
            with struck(k, full_disk) as calls, suppress(RunError):
                run = Run.create(folder, {"a": 1})
            if len(calls) < k:
                break
            assert {path: entry[1] for path, entry in snapshot(tmp_path).items()} == before
        run.close()
        assert k > 5
        assert Run.read(folder).config == {"a": 1}


@forks
def test_a_kill_at_any_call_of_create_leaves_a_run_or_a_folder_that_can_hold_one(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.folder, "environment", dict)
    for k in itertools.count(1):
        folder = tmp_path / str(k) / "run"

        def work(folder: Path = folder, k: int = k) -> int:
            with struck(k, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                Run.create(folder, {"a": 1})
            return 0

        code = in_child(work)
        done = (folder / "config.json").exists()
        with Run.open(folder) if done else Run.create(folder, {"a": 1}) as run:
            assert run.config == {"a": 1}
        if code == 0:
            break
    assert k > 8
    assert done


def test_bad_configurations_are_refused_before_anything_is_made(tmp_path):
    for none in ([1, 2], "lr=0.1", None):
        with pytest.raises(TypeError, match="'config' parameter of Run must be a dict"):
            Run.create(tmp_path / "run", none)
    with pytest.raises(TypeError, match=r"config\.path.*PosixPath"):
        Run.create(tmp_path / "run", {"path": tmp_path})
    assert names(tmp_path) == []


def test_opening_with_another_configuration_names_every_field_that_differs(tmp_path):
    nan = float("nan")
    old = {"lr": 0.1, "limit": nan, "flag": True, "data": {"name": "digits", "size": {"h": 8}}, "sizes": (1, 2), "gone": None}
    Run.create(tmp_path, old).close()
    Run.open(tmp_path, old).close()
    Run.open(tmp_path, dict(reversed(old.items()))).close()
    new = {"lr": 0.2, "limit": 3.0, "flag": 1, "data": {"name": "digits", "size": {"h": 9}}, "sizes": [1, 3], "new": {"a": nan}}
    with pytest.raises(RunError) as caught:
        Run.open(tmp_path, new)
    changes = "lr: 0.1 -> 0.2; limit: nan -> 3.0; flag: True -> 1; data.size.h: 8 -> 9; sizes: [1, 2] -> [1, 3]"
    assert f"({changes}; gone: None -> absent; new: absent -> {{'a': nan}})" in str(caught.value)
    Run.open(tmp_path, old).close()


def test_a_folder_without_a_run_or_with_a_damaged_configuration_is_refused(tmp_path):
    for opener in (Run.open, Run.read):
        with pytest.raises(RunError, match="holds no run"):
            opener(tmp_path / "none")
    started(tmp_path / "run").close()
    for content in ('{"lr": ', "[" * 100_000, "[]", "null", "3", '{"__float__": "inf"}'):
        (tmp_path / "run" / "config.json").write_text(content)
        with pytest.raises(RunError, match=r"config\.json is damaged"):
            Run.read(tmp_path / "run")
    assert not (tmp_path / "none").exists()


def test_reading_writes_nothing_and_needs_no_lock(tmp_path):
    with started(tmp_path, 1, 2) as run:
        (tmp_path / "checkpoints" / ".step-00000003.json.0123abcd.tmp").write_text("")
        (tmp_path / "checkpoints" / "step-00000003.safetensors").write_text("")
        before = snapshot(tmp_path)
        with Run.read(tmp_path) as reader:
            check_numbered(reader.latest(), 2)
            assert (reader.metrics(), reader.steps(), reader.read_json("none.json")) == (run.metrics(), [1, 2], None)
            for act in (
                lambda: reader.save(numbered(3)),
                lambda: reader.log({}),
                lambda: reader.rewind(0),
                lambda: reader.write("a.json", 1),
                lambda: reader.write_tensors("a.safetensors", {}),
            ):
                with pytest.raises(RunError, match=r"open for reading only: use Run\.open"):
                    act()
        assert snapshot(tmp_path) == before
    with pytest.raises(RunError, match="reading only"):
        run.log({})
    check_numbered(run.latest(), 2)


def test_opening_removes_what_a_killed_process_left(tmp_path):
    started(tmp_path, 1, 2).close()
    before = {path: entry[1] for path, entry in snapshot(tmp_path).items()}
    checkpoints = tmp_path / "checkpoints"
    for path in (
        tmp_path / ".metrics.jsonl.0123abcd.tmp",
        checkpoints / ".step-00000003.json.0123abcd.tmp",
        checkpoints / "step-00000003.safetensors",
        checkpoints / "step-00000002-1.safetensors",
    ):
        path.write_bytes(b"left")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3')
    Run.open(tmp_path).close()
    assert {path: entry[1] for path, entry in snapshot(tmp_path).items()} == before


def test_the_tensors_that_a_damaged_header_may_have_named_stay(tmp_path):
    with started(tmp_path, 1) as run:
        run.save(numbered(1, 10))
        (tmp_path / "checkpoints" / "step-00000001.safetensors").write_bytes(b"left")
        (tmp_path / "checkpoints" / "step-00000001.json").write_text("damaged")
    with Run.open(tmp_path):
        assert names(tmp_path / "checkpoints") == ["step-00000001-1.safetensors", "step-00000001.json", "step-00000001.safetensors"]


# The lock


def test_only_one_can_write(tmp_path):
    with started(tmp_path, 1) as run:
        with pytest.raises(RunError, match=f"another process is writing to {tmp_path}: wait"):
            Run.open(tmp_path)
        (tmp_path / "config.json").rename(tmp_path / "away")
        (tmp_path / "metrics.jsonl").unlink()
        shutil.rmtree(tmp_path / "checkpoints")
        with pytest.raises(RunError, match="another process is writing"):
            Run.create(tmp_path, {})
        (tmp_path / "away").rename(tmp_path / "config.json")
    run.close()
    Run.open(tmp_path).close()


def test_an_opening_that_fails_releases_the_lock(tmp_path, monkeypatch):
    started(tmp_path, 1).close()
    (tmp_path / "checkpoints" / "step-00000009.safetensors").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *_, **__: full_disk())
        with pytest.raises(RunError, match="No space left"):
            Run.open(tmp_path)
    Run.open(tmp_path).close()


@forks
def test_the_lock_ends_with_a_killed_process_even_if_its_children_live_on(tmp_path):
    Run.create(tmp_path, {}).close()
    receiver, sender = os.pipe()
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            run = Run.open(tmp_path)
            if (worker := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            os.write(sender, struct.pack("q", worker))
            time.sleep(60)
            run.close()
        os._exit(1)
    assert select.select([receiver], [], [], 60)[0]
    (worker,) = struct.unpack("q", os.read(receiver, 8))
    with pytest.raises(RunError, match="another process"):
        Run.open(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        deadline = time.monotonic() + 20
        while True:  # the worker may not have run yet
            with suppress(RunError):
                Run.open(tmp_path).close()
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(receiver)
        os.close(sender)


@forks
def test_a_forked_child_cannot_write_and_leaves_its_parents_lock_alone(tmp_path):
    with started(tmp_path, 1) as run:

        def work() -> int:
            with pytest.raises(RunError, match="reading only"):
                run.log({})
            run.close()
            return 0

        assert in_child(work) == 0
        with pytest.raises(RunError, match="another process"):
            Run.open(tmp_path)
        run.save(numbered(2))
    runs.files._forget_locks()
    with started(tmp_path / "second") as run:
        runs.files._forget_locks()  # as in a child, where coverage does not look
        with pytest.raises(RunError, match="reading only"):
            run.log({})


def test_where_files_cannot_be_locked_it_is_said_and_where_the_module_is_missing_done_without(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(runs.files.fcntl, "flock", refuse)
        with pytest.warns(RunWarning, match="could not be locked") as seen:
            run = Run.create(tmp_path / "a", {})
        assert seen[0].filename == __file__
        run.save(numbered(1))
        run.close()
    monkeypatch.setattr(runs.files, "fcntl", None)
    with started(tmp_path / "b", 1), Run.open(tmp_path / "b") as run:
        check_numbered(run.latest(), 1)


# Metrics


def test_rows_come_back_with_null_for_what_is_not_finite(tmp_path):
    with Run.create(tmp_path, {}) as run:
        run.log({"step": 1, "loss": float("nan"), "parts": [float("inf"), {"x": -float("inf")}], "lr": 0.1, "name": "a\nb\u2028"})
        assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 1  # at once, and one line
        run.log({"step": 2})
        assert run.metrics() == [
            {"step": 1, "loss": None, "parts": [None, {"x": None}], "lr": 0.1, "name": "a\nb\u2028"},
            {"step": 2},
        ]
        with pytest.raises(TypeError, match=r"row\.loss.*Tensor"):
            run.log({"loss": torch.zeros(())})
        assert len(run.metrics()) == 2


def test_torn_lines_are_left_out(tmp_path):
    with started(tmp_path) as run:
        (tmp_path / "metrics.jsonl").write_bytes(
            b'{"step": 1}\n{"st\n[3]\n\xff\n\n' + b"[" * 100_000 + b'\n{"step": 2}\n{"step": 3}'
        )
        assert run.metrics() == [{"step": 1}, {"step": 2}]
    with Run.open(tmp_path) as run:
        run.log({"step": 4})
        assert run.metrics() == [{"step": 1}, {"step": 2}, {"step": 4}]


def test_a_rewind_drops_later_rows_and_checkpoints_only(tmp_path):
    with started(tmp_path, 1, 2, 3, keep=9) as run:
        for row in ({"note": "no step"}, {"step": "three"}, {"step": 2.5}, {"step": 2, "x": 1}):
            run.log(row)
        run.rewind(3)
        assert len(run.metrics()) == 7
        run.rewind(2)
        assert run.steps() == [1, 2]
        assert run.metrics() == [{"step": 1}, {"step": 2}, {"note": "no step"}, {"step": "three"}, {"step": 2, "x": 1}]
        check_numbered(run.latest(), 2)
        run.log({"step": 3})
        run.save(numbered(3, 30))
        check_numbered(run.latest(), 3, 30)
        run.rewind(0)
        assert run.steps() == []
        assert run.metrics() == [{"note": "no step"}, {"step": "three"}]


def test_a_rewind_has_the_checkpoints_off_the_disk_before_it_touches_the_rows(tmp_path):
    with started(tmp_path, 1, 2) as run, struck(0, full_disk) as calls:
        run.rewind(1)
    assert calls == ["os.unlink", "os.unlink", "os.open", "os.fsync", "open", "os.fsync", "os.replace", "os.open", "os.fsync"]


@forks
def test_a_kill_at_any_call_of_a_rewind_never_leaves_a_checkpoint_without_its_rows(tmp_path):
    started(tmp_path / "start", 1, 2, 3, 4, keep=9).close()
    for k in itertools.count(1):
        folder = tmp_path / str(k)
        shutil.copytree(tmp_path / "start", folder)

        def work(folder: Path = folder, k: int = k) -> int:
            run = Run.open(folder)
            with struck(k, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                run.rewind(2)
            return 0

        code = in_child(work)
        with Run.open(folder) as run:
            latest = run.latest()
            assert latest is not None
            check_numbered(latest, latest.step)
            assert {"step": latest.step} in run.metrics()
            run.rewind(2)
            assert (run.steps(), run.metrics()) == ([1, 2], [{"step": 1}, {"step": 2}])
        if code == 0:
            break
    assert k > 8


# Further files


def test_further_files_lie_in_the_folder_under_plain_names(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        run.write("certificate.json", {"holds": None, "slack": float("inf")})
        assert run.read_json("certificate.json") == {"holds": None, "slack": float("inf")}
        assert run.read_json("other.json") is None
        for name in ("../x.json", "a/b.json", "config.json", "run.lock", ".x.json", "metrics.jsonl", ""):
            with pytest.raises(ValueError, match="'name' parameter of Run"):
                run.write(name, {})
            with pytest.raises(ValueError, match="'name' parameter of Run"):
                run.read_json(name)
        (run.folder / "certificate.json").write_text("{")
        with pytest.raises(RunError, match=r"certificate\.json is damaged"):
            run.read_json("certificate.json")


def test_files_of_tensors_come_back_bit_by_bit_and_need_no_checkpoint(tmp_path):
    from safetensors.torch import load_file

    tied = torch.nn.Parameter(torch.randn(3, 2))
    tensors = {"a": tied, "b": tied, "t": tied.T, "n": torch.tensor(float("nan"), dtype=torch.float64), "i": torch.arange(3)[::2]}
    with Run.create(tmp_path / "run", {}) as run:
        for _ in range(2):
            run.write_tensors("model.safetensors", tensors)
        for found in (Run.read(run.folder).read_tensors("model.safetensors"), load_file(run.folder / "model.safetensors")):
            assert found.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert (found[name].dtype, found[name].shape, found[name].requires_grad) == (tensor.dtype, tensor.shape, False)
                assert raw(found[name]) == raw(tensor.detach())
        assert (run.steps(), len(names(run.folder))) == ([], 5)


def test_files_of_tensors_have_plain_names_and_what_is_missing_or_something_else_is_refused(tmp_path):
    from safetensors.torch import save

    with Run.create(tmp_path / "run", {}) as run:
        run.write_tensors("model.safetensors", {"x": torch.zeros(2)})
        path = run.folder / "model.safetensors"
        for name in ("../x.safetensors", "a/b.safetensors", ".x.safetensors", "x.json", "x.safetensors\n", "model_safetensors", ""):
            with pytest.raises(ValueError, match="'name' parameter of Run"):
                run.write_tensors(name, {})
            with pytest.raises(ValueError, match="'name' parameter of Run"):
                run.read_tensors(name)
        for bad, message in [(torch.zeros(1, dtype=torch.complex128), "dtype"), (3, "a tensor")]:
            with pytest.raises(TypeError, match=rf"tensors\['x'\]' parameter of Run\.write_tensors.*{message}"):
                run.write_tensors("model.safetensors", {"x": bad})
        with pytest.raises(RunError, match=r"other\.safetensors could not be read \(No such file"):
            run.read_tensors("other.safetensors")
        whole = path.read_bytes()
        header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}).encode()  # torch has no such dtype
        for content in (b"", whole[:-1], b"PK" * 300, struct.pack("<Q", len(header)) + header + bytes(6)):
            path.write_bytes(content)
            with pytest.raises(RunError, match=r"model\.safetensors is foreign \(not safetensors\): put it back"):
                run.read_tensors("model.safetensors")
        for i in range(8, len(whole)):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
            with pytest.raises(RunError, match=r"model\.safetensors is (foreign|corrupted)"):
                run.read_tensors("model.safetensors")
        path.write_bytes(save({"x": torch.ones(2)}, metadata={"format": "pt"}))
        with pytest.raises(RunError, match=r"model\.safetensors is corrupted \(its digest differs\): put it back"):
            run.read_tensors("model.safetensors")
        path.write_bytes(save({"x": torch.ones(2)}))  # without metadata, as before there were digests
        assert run.read_tensors("model.safetensors")["x"].tolist() == [1, 1]
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        with pytest.raises(RunError, match="link"):
            run.read_tensors("model.safetensors")


def test_a_failure_at_any_call_of_writing_tensors_leaves_the_old_file_or_the_new_one_and_no_litter(tmp_path):
    with Run.create(tmp_path, {}) as run:
        for k in itertools.count(1):
            run.write_tensors("model.safetensors", {"x": torch.zeros(3)})
            with struck(k, full_disk) as calls, suppress(RunError):
                run.write_tensors("model.safetensors", {"x": torch.ones(3)})
            value = run.read_tensors("model.safetensors")["x"]
            assert torch.equal(value, torch.full((3,), float("os.replace" in calls[: k - 1])))
            assert len(names(tmp_path)) == 5
            if len(calls) < k:
                break
        assert k == 6


def test_write_atomic_takes_bytes_text_or_a_function_and_keeps_the_old_file_if_that_fails(tmp_path):
    path = tmp_path / "file"
    for content in (b"\x00\xff", "text é", lambda file: file.write(b"by hand")):
        write_atomic(path, content)
    assert path.read_bytes() == b"by hand"

    def fail(file: Any) -> None:
        file.write(b"half")
        raise KeyError("its own error")

    with pytest.raises(KeyError, match="its own error"):
        write_atomic(path, fail)
    assert (path.read_bytes(), names(tmp_path)) == (b"by hand", ["file"])
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode  # as the umask says, not private


def test_the_content_is_on_disk_before_it_gets_its_name_and_the_name_before_the_call_returns(tmp_path):
    with struck(0, full_disk) as calls:
        write_atomic(tmp_path / "file", b"x")
    assert calls == ["open", "os.fsync", "os.replace", "os.open", "os.fsync"]


def test_all_of_the_content_is_written_when_the_disk_is_asked_to_keep_it(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    write_atomic(tmp_path / "file", b"x" * 100)
    assert sizes[0] == 100


def test_the_rows_before_a_checkpoint_are_on_disk_before_it_is(tmp_path, monkeypatch):
    with started(tmp_path) as run:
        run.log({"step": 1})
        kept = []
        monkeypatch.setattr(os, "fsync", lambda file: kept.append(os.fstat(file).st_ino))
        run.save(numbered(1))
    assert kept.index((tmp_path / "metrics.jsonl").stat().st_ino) == 0 < len(kept) - 1


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    with Run.create(tmp_path, {}) as run:
        monkeypatch.setitem(sys.modules, "safetensors", None)
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(RunError, match=r"pip install 'opteq\[train\]'"):
            run.save(numbered(1))


# The environment


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_environment_has_the_revision_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert (environment()["git_revision"], environment()["git_dirty"]) == (None, None)
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "runs").write_text("untracked")
    assert (environment()["git_revision"], environment()["git_dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("2")
    assert environment()["git_dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert (environment()["git_revision"], environment()["git_dirty"]) == (None, None)


def test_the_environment_runs_no_program_that_a_repository_names_as_its_monitor(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch '{tmp_path}/trap'\n")
    monitor.chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(monitor))
    monkeypatch.chdir(tmp_path)
    assert environment()["git_dirty"] is False
    assert not (tmp_path / "trap").exists()
    git(tmp_path, "status")
    assert (tmp_path / "trap").exists()  # the trap works


def test_the_environment_names_versions_and_devices_but_no_host_or_user(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    found = environment()
    versions = {"python", "torch", "numpy", "opteq", "platform", "git_revision", "git_dirty"}
    assert set(found) == versions | {"cpus", "torch_threads", "devices"}
    assert (found["opteq"], found["torch"], found["cpus"]) == (opteq.__version__, torch.__version__, os.cpu_count())
    assert (found["torch_threads"], found["devices"]) == (torch.get_num_threads(), ["GPU 0", "GPU 1"])
    text = json.dumps(found)
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
