"""Everything that the rest of a training depends on, as flat tensors and JSON; and stores for it: a run folder, or memory."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from opteq.runs import Checkpoint, Run, RunError
from opteq.training.processes import World


class Store(Protocol):
    """Where checkpoints and metrics go."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row of metrics."""

    def metrics(self) -> list[dict[str, Any]]:
        """All rows."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint."""

    def steps(self) -> list[int]:
        """The steps of the checkpoints there are, ascending."""

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step."""

    def latest(self) -> Checkpoint | None:
        """The newest good one."""

    def rewind(self, step: int) -> None:
        """Forget rows and checkpoints after a step."""

    def close(self) -> None:
        """Release what is held."""


class Memory:
    """A store without files: the rows, and copies of the last checkpoints."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.rows: list[dict[str, Any]] = []
        self.kept: dict[int, Checkpoint] = {}

    def log(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def metrics(self) -> list[dict[str, Any]]:
        return list(self.rows)

    def save(self, checkpoint: Checkpoint) -> None:
        tensors = {name: tensor.detach().clone() for name, tensor in checkpoint.tensors.items()}
        self.kept[checkpoint.step] = Checkpoint(checkpoint.step, tensors, checkpoint.state)
        for step in self.steps()[: -self.keep]:
            del self.kept[step]

    def steps(self) -> list[int]:
        return sorted(self.kept)

    def load(self, step: int) -> Checkpoint:
        return self.kept[step]

    def latest(self) -> Checkpoint | None:
        return self.kept[self.steps()[-1]] if self.kept else None

    def rewind(self, step: int) -> None:
        self.rows = [row for row in self.rows if row["step"] <= step]
        self.kept = {s: kept for s, kept in self.kept.items() if s <= step}

    def close(self) -> None:
        """Nothing is held."""


class Follower(Memory):
    """The store of a process that is not the first: it reads the checkpoints of the run folder and writes nothing."""

    def __init__(self, run: Run) -> None:
        super().__init__(keep=1)
        self.run = run

    def save(self, checkpoint: Checkpoint) -> None:
        """The first process saves."""

    def steps(self) -> list[int]:
        return self.run.steps()

    def load(self, step: int) -> Checkpoint:
        return self.run.load(step)

    def latest(self) -> Checkpoint | None:
        return self.run.latest()

    def rewind(self, step: int) -> None:
        """The first process rewinds."""


def open_store(folder: Path | None, config: Mapping[str, Any], keep: int, resume: bool, free: Iterable[str], world: World) -> Store:
    """A new run folder, the one to be resumed, or memory. `free`: settings of config["train"] that may have changed."""
    if folder is None:
        return Memory(keep)
    run, refusal = None, None
    if world.first:
        try:
            run = Run.open(folder, _keeping(folder, config, free), keep=keep) if resume else Run.create(folder, config, keep=keep)
        except RunError as error:
            refusal = error
    told = world.first_message(None if refusal is None else str(refusal))  # the others must hear of it, or they would wait
    if told is not None:
        raise refusal or RunError(told[1])
    return Follower(Run.read(folder)) if run is None else run


def _keeping(folder: Path, config: Mapping[str, Any], free: Iterable[str]) -> dict[str, Any]:
    """The configuration to compare with the stored one: with its values of the settings that may change."""
    stored = Run.read(folder).config.get("train", {})
    kept = {name: stored[name] for name in free if name in stored}
    return {**config, "train": {**config["train"], **kept}}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under longer names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of each parameter; its settings are those of the configuration."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": value for i, values in state.items() for name, value in values.items() if isinstance(value, Tensor)}


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put the state back."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def seed_random_state(seed: int, world: World) -> None:
    """Seed the random numbers that this process uses, and no others."""
    torch.default_generator.manual_seed(seed)
    if world.device.type == "cuda":
        with torch.cuda.device(world.device):
            torch.cuda.manual_seed(seed)


def random_state(world: World) -> dict[str, Tensor]:
    """The state of the random numbers of every process."""
    found = {f"cpu.{rank}": state for rank, state in enumerate(world.gather(torch.get_rng_state().to(world.device)))}
    if world.device.type == "cuda":
        own = torch.cuda.get_rng_state(world.device).to(world.device)
        found |= {f"cuda.{rank}": state for rank, state in enumerate(world.gather(own))}
    return found


def load_random_state(tensors: Mapping[str, Tensor], world: World) -> None:
    """Put this process's state back."""
    torch.set_rng_state(tensors[f"cpu.{world.rank}"].cpu())
    if world.device.type == "cuda" and f"cuda.{world.rank}" in tensors:
        torch.cuda.set_rng_state(tensors[f"cuda.{world.rank}"].cpu(), world.device)
