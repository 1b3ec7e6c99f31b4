"""Which samples make up step k: a function of the seed and the step alone, so that there is no sampler to restore."""

import hashlib
import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from opteq.checks import invalid
from opteq.data import Augment, resize
from opteq.training.config import TrainConfig, image_side
from opteq.training.objective import Batches
from opteq.training.processes import World

Batch: TypeAlias = tuple[Tensor, Tensor, Tensor, float]  # rows, x, y, and the weight of this process's part


def seeded(seed: int, purpose: str, n: int) -> torch.Generator:
    """A generator of its own for each purpose and number."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{n}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> Tensor:
    return torch.randperm(samples, generator=seeded(seed, "order", epoch))


@dataclass(frozen=True)
class Plan:
    """The batches of all steps."""

    samples: int
    batch_size: int
    seed: int
    drop_last: bool

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        whole = self.samples // self.batch_size
        return max(1, whole if self.drop_last else math.ceil(self.samples / self.batch_size))

    def rows(self, step: int) -> Tensor:
        """The samples of a step, over all processes."""
        epoch, position = divmod(step, self.per_epoch)
        begin = position * self.batch_size
        return _order(self.seed, epoch, self.samples)[begin : begin + self.batch_size]


class Loader:
    """This process's part of each batch, on its device; lazily decoded images are prepared one step ahead."""

    def __init__(
        self, plan: Plan, x: Batches, y: Tensor, config: TrainConfig, ignore: int | None, dtype: torch.dtype, world: World
    ) -> None:
        self.plan, self.x, self.y, self.config, self.world = plan, x, y, config, world
        self.augment, self.void, self.dtype = Augment(crop=config.crop, flip=config.flip), ignore, dtype
        self.ahead = None if isinstance(x, Tensor) else ThreadPoolExecutor(1)
        self.next: tuple[int, Future[Batch]] | None = None

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""
        if self.ahead is None:
            return self._load(step)
        waiting = self.next
        batch = waiting[1].result() if waiting is not None and waiting[0] == step else self._load(step)
        self.next = (step + 1, self.ahead.submit(self._load, step + 1))
        return batch

    def _load(self, step: int) -> Batch:
        rows = self.plan.rows(step)
        mine = self.world.share(torch.arange(len(rows)))
        weight = float(len(mine) > 0)  # a process without a sample takes one that does not count, so that all stay in step
        mine = mine if len(mine) else torch.arange(1)
        x, y = self.x[rows[mine]], self.y[rows[mine]]
        if self.augment.crop or self.augment.flip:
            draws = self.augment.draw(len(rows), seeded(self.plan.seed, "augment", step))[mine]
            x, y = self._augmented(x, y, draws)
        device = self.world.device
        x = shrunk(x.to(device, self.dtype), image_side(self.config, step, self.plan.per_epoch))
        return rows[mine], x, y.to(device), weight

    def _augmented(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        if y.ndim < 3:
            return self.augment.apply(x, draws), y
        return self.augment.apply(x, draws, y, void=self.void)

    def close(self) -> None:
        """End the thread."""
        if self.ahead is not None:
            self.ahead.shutdown(cancel_futures=True)


def check_images(x: Batches, y: Tensor, config: TrainConfig, ignore: int | None) -> None:
    """Raise unless what a configuration does to images can be done to these samples and their targets."""
    if not (config.sizes or config.crop or config.flip):
        return
    size = x[torch.arange(1)].shape[2:]
    images = len(size) == 2
    if config.sizes and not (images and y.ndim == 1):
        raise ValueError(invalid("fit", "sizes", "() for data that are not images with one label each", config.sizes))
    for name, off in (("crop", 0), ("flip", False)):
        given = getattr(config, name)
        if given and not (images and (y.ndim < 3 or y.shape[1:] == size)):
            raise ValueError(invalid("fit", name, f"{off} for data that are not images with labels or label maps", given))
    if config.crop and y.ndim > 2 and ignore is None:
        raise ValueError(invalid("fit", "ignore", "given, to label the pixels that crop moves in", None))


def shrunk(x: Tensor, side: int | None) -> Tensor:
    """The images [n, channels, height, width] with this shorter side; as they are if it is None or not smaller."""
    if side is None or side >= min(x.shape[2:]):
        return x
    height, width = (max(1, round(length * side / min(x.shape[2:]))) for length in x.shape[2:])
    return resize(x, (height, width))
