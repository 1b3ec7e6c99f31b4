"""A small training that uses everything a checkpoint must hold, for tests that kill it: `python tests/survivor.py FOLDER`."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from opteq import Equilibrium, Stop
from opteq.cells import ConvOptEq, DeepOptEq
from opteq.runs import Run
from opteq.training import Callback, Result, TrainConfig, fit

CONFIG = TrainConfig(
    epochs=4,
    batch_size=20,
    optimizer="sgd",
    lr=0.05,
    weight_decay=1e-4,
    schedule="onecycle",
    clip=1.0,
    label_smoothing=0.1,
    ema=0.9,
    jacobian=0.01,
    warm_start=True,
    crop=1,
    flip=True,
    patience=3,
    checkpoint_every=2,
    log_every=3,
)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(50, 1, 6, 6, generator=generator)
    return x, (x[:, 0, :3].sum((1, 2)) > x[:, 0, 3:].sum((1, 2))).long()


def make_model() -> nn.Module:
    torch.manual_seed(1)
    cell = DeepOptEq([ConvOptEq(4, 4, 5), ConvOptEq(4, 4, 3, alpha=0.8)], learn_alpha=True)
    layer = Equilibrium(cell, stop=Stop(rtol=1e-3))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.1), layer, nn.Flatten(), nn.Linear(144, 2))


def train(folder: Path, callbacks: tuple[Callback, ...] = ()) -> Result:
    """Begin, or go on where a folder holds a run."""
    resume = (folder / "config.json").exists()
    return fit(make_model(), data(), data(), CONFIG, folder=folder, resume=resume, callbacks=callbacks, verbose=False)


def outcome(folder: Path) -> tuple[bytes, list[dict[str, object]]]:
    """The final weights, byte by byte, and the metrics but for the time."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in Run.read(folder).metrics()]
    return (folder / "model.safetensors").read_bytes(), rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]))
