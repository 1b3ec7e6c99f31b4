"""Train on two processes, and see that it is the same training as on one.

`fit` inside of a process group takes each process's part of every batch; `batch_size` is that of all processes together, so that
two processes take the same steps as one. Afterwards the first process repeats the training alone, and compares the weights.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py            # about 28 s of processor time in all
    python examples/distributed.py                                              # one process: nothing to compare
    torchrun --standalone --nproc-per-node 2 examples/distributed.py --quick

Two processes pay on two GPUs, or two machines; on two cores they have half of the threads each. On GPUs, call
`torch.cuda.set_device` in each process first, and take "nccl" for "gloo".
"""

import argparse
import gc
import os
from collections.abc import Sequence

import torch
from torch import distributed, nn

from opteq import Equilibrium, Stop
from opteq.cells import ConvOptEq, DeepOptEq
from opteq.data import load
from opteq.training import Result, TrainConfig, fit


def make_model() -> nn.Module:
    """No batch norm: it would see half of a batch in each of two processes, and the training would be another one."""
    torch.manual_seed(0)
    cell = DeepOptEq([ConvOptEq(8, 8, 12, constrained=True) for _ in range(2)])
    layer = Equilibrium(cell, stop=Stop(rtol=1e-8))
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), layer, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
    return model.double()  # so that what differs by rounding only is seen to be the same


def train(quick: bool) -> tuple[nn.Module, Result]:
    train, test = load("digits")
    model, samples = make_model(), 500 if quick else len(train.y)
    config = TrainConfig(epochs=3, batch_size=50, lr=2e-2, schedule="onecycle", device="cpu")
    return model, fit(model, (train.x[:samples], train.y[:samples]), test, config, verbose=False)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    quick = parser.parse_args(arguments).quick
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if processes > 1:  # started by torchrun
        distributed.init_process_group("gloo")
        try:
            model, result = train(quick)
        finally:
            gc.collect()  # without it gloo aborts at the end of some runs, also without opteq; why is not known
            distributed.destroy_process_group()
    else:
        model, result = train(quick)
    if rank > 0:
        return {}

    accuracy = result.scores["valid_accuracy"]
    print(f"{processes} process{'es' if processes > 1 else ''}: {result.steps} steps in {result.seconds:.1f} s, ", end="")
    print(f"{accuracy:.1%} of the test digits are right.")
    if processes == 1:
        print("For two: torchrun --standalone --nproc-per-node 2 examples/distributed.py")
        return {"accuracy": accuracy}
    alone, _ = train(quick)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    difference = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
    print(f"The same training on one process: the weights differ by {difference:.0e} of themselves at most.")
    return {"accuracy": accuracy, "difference": difference}


if __name__ == "__main__":
    main()
