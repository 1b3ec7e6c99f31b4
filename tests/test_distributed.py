"""DistributedDataParallel on two processes equals one process with the same global batch."""

from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opteq import Equilibrium, Stop
from opteq.cells import FunctionCell, OptEq
from problems import Affine

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


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    try:
        x, y = (t[rank::PROCESSES] for t in data())
        for kind in KINDS:
            torch.save(train(DistributedDataParallel(make_model(kind)), x, y), f"{folder}/{kind}-{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_train_like_one_with_the_same_global_batch(tmp_path: Path):
    torch.multiprocessing.spawn(worker, args=(str(tmp_path),), nprocs=PROCESSES)
    for kind in KINDS:
        wanted = train(make_model(kind), *data())
        for rank in range(PROCESSES):
            found = torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=True)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
