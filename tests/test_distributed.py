"""DistributedDataParallel on two processes equals one process with the same global batch."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conformance import write_verify
from opteq import Equilibrium, Stop
from opteq.cells import ConvOptEq, FunctionCell, OptEq
from opteq.runs import Run
from opteq.training import Callback, DivergenceError, LostProcessError, TrainConfig, fit
from problems import Affine
from processes import finish, import_optimizers, in_child

BATCH, STEPS, PROCESSES = 8, 3, 2
KINDS = ("opteq", "module")


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    f = Affine(0.2 * torch.randn(5, 5), torch.randn(5, 4), torch.tanh)
    cell = OptEq(4, 5, 6, activation="tanh") if kind == "opteq" else FunctionCell(f, (5,))
    layer = Equilibrium(cell, stop=Stop(rtol=1e-13), on_failure="raise")
    return nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(5, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, 2, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.1, 3, BATCH, dtype=torch.float64)[:, None], y  # samples that need different numbers of steps


def train(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """A few steps of training; the gradients of each and, last, the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*seen, *(p.detach() for p in model.parameters())]


def test_two_processes_train_like_one_with_the_same_global_batch(tmp_path: Path):
    def train_parts(rank: int) -> None:
        x, y = (t[rank::PROCESSES] for t in data())
        for kind in KINDS:
            found = train(DistributedDataParallel(make_model(kind)), x, y)
            save_file({str(i): tensor.clone() for i, tensor in enumerate(found)}, tmp_path / f"{kind}-{rank}.safetensors")

    assert in_each(train_parts, tmp_path) == [0, 0]
    for kind in KINDS:
        wanted = train(make_model(kind), *data())
        for rank in range(PROCESSES):
            found = load_file(tmp_path / f"{kind}-{rank}.safetensors")
            torch.testing.assert_close([found[str(i)] for i in range(len(wanted))], wanted, rtol=1e-10, atol=1e-10)


CONFIG = TrainConfig(
    epochs=5,
    batch_size=10,
    optimizer="sgd",
    lr=0.1,
    clip=1.0,
    label_smoothing=0.1,
    crop=1,
    flip=True,
    ema=0.9,
    jacobian=0.01,
    log_every=4,
)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(31, 1, 4, 4, generator=generator, dtype=torch.float64)  # the last batch of an epoch has one sample only
    return x, (x[:, 0, :2].sum((1, 2)) > x[:, 0, 2:].sum((1, 2))).long()


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layer = Equilibrium(ConvOptEq(3, 3, 4, activation="tanh"), stop=Stop(rtol=1e-12, max_steps=500))
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), layer, nn.Flatten(), nn.Linear(48, 2)).double()


@contextmanager
def joined(rank: int, folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def in_each(function: Callable[[int], object], folder: Path) -> list[int]:
    """Run function(rank) in two processes of one group; their exit statuses."""

    def one(rank: int) -> None:
        with joined(rank, folder):
            function(rank)

    import_optimizers()
    return [finish(pid) for pid in [in_child(partial(one, rank)) for rank in range(PROCESSES)]]


def without_times(folder: Path) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in Run.read(folder).metrics()]


def test_fit_on_two_processes_is_fit_on_one(tmp_path: Path):
    model = convolutional()
    # The Jacobian penalty draws random vectors, process by process: its sum is the same in distribution only.
    config = replace(CONFIG, jacobian=0.0)
    result = fit(model, images(), images(), config, folder=tmp_path / "one", verbose=False)
    assert result.steps == 20
    statuses = in_each(
        lambda rank: fit(convolutional(), images(), images(), config, folder=tmp_path / "two", verbose=False), tmp_path
    )
    assert statuses == [0, 0]
    found, wanted = load_file(tmp_path / "two" / "model.safetensors"), model.state_dict()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9)
    for one, two in zip(without_times(tmp_path / "one"), without_times(tmp_path / "two"), strict=True):
        assert one.pop("kind") == two.pop("kind")
        assert two.pop("norms", {}) == pytest.approx(one.pop("norms", {}), rel=1e-6)
        assert two == pytest.approx(one, rel=1e-6)


class Die(Callback):
    def step(self, step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_ends_the_others_and_the_run_resumes_to_the_same_end(tmp_path: Path):
    config = replace(CONFIG, checkpoint_every=3)

    def train(name: str, callbacks: tuple[Callback, ...], resume: bool) -> None:
        folder = tmp_path / name
        fit(convolutional(), images(), images(), config, folder=folder, callbacks=callbacks, resume=resume, verbose=False)

    def orphaned(rank: int) -> None:
        with pytest.raises(LostProcessError, match=r"another process of the job died .* resume=True"):
            train("killed", (Die(),) if rank == 0 else (), False)
        os._exit(3)  # the group cannot be left in order any more

    for part in ("a", "b", "c"):
        (tmp_path / part).mkdir()
    first, second = in_each(orphaned, tmp_path / "a")
    assert os.WTERMSIG(first) == signal.SIGKILL
    assert os.waitstatus_to_exitcode(second) == 3
    assert in_each(lambda rank: train("killed", (), True), tmp_path / "b") == [0, 0]
    assert in_each(lambda rank: train("whole", (), False), tmp_path / "c") == [0, 0]
    read = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert read[0] == read[1]
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")


def test_trouble_in_one_process_stops_both_and_names_it(tmp_path: Path):
    def train(rank: int) -> None:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            return output.square().mean() * (math.nan if rank == 1 else 1.0)

        with pytest.raises(DivergenceError, match=r"step 0 .*process 1: the loss is nan; it began in the loss itself"):
            fit(convolutional(), images(), None, CONFIG, loss=loss, verbose=False)

    assert in_each(train, tmp_path) == [0, 0]


def test_warm_starts_are_refused_on_several_processes(tmp_path: Path):
    def train(rank: int) -> None:
        with pytest.raises(ValueError, match="'warm_start' parameter of fit must be False with several processes"):
            fit(convolutional(), images(), None, replace(CONFIG, warm_start=True), verbose=False)

    assert in_each(train, tmp_path) == [0, 0]


@pytest.mark.verify
def test_the_command_under_torchrun_trains_like_one_process(tmp_path: Path):
    command = ["-m", "opteq", "train", "dense", "--data.name", "digits", "--data.limit", "200", "--data.test-limit", "50"]
    settings = ["--train.epochs", "5", "--train.batch-size", "50", "--quiet", "--folder"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name, prefix in (("one", []), ("two", torchrun)):
        done = [sys.executable, *prefix, *command, *settings, str(tmp_path / name)]
        subprocess.run(done, env=environment, check=True, timeout=300)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    worst = max(float((two[name] - one[name]).abs().max() / one[name].abs().max()) for name in one)
    assert worst < 1e-4  # 20 steps in float32
    write_verify("torchrun", {"steps": 20, "processes": 2, "dtype": "float32", "worst_relative_difference": worst})
