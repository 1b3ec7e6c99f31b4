"""One training on several processes: who am I, sums over all, and messages, without pickle."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


class LostProcessError(RuntimeError):
    """Another process of the job died.

    Examples:
        >>> from opteq.training import LostProcessError
        >>> def answer():
        ...     raise LostProcessError("another process of the job died")  # as fit does where a job has several processes
        >>> try:
        ...     answer()
        ... except LostProcessError:
        ...     print("start the job again, with resume=True")
        start the job again, with resume=True
    """


@dataclass(frozen=True)
class World:
    """The processes of a training: `size` of them, this one being `rank`.

    Examples:
        >>> import torch
        >>> from opteq.training import World
        >>> world = World.here(torch.device("cpu"))
        >>> world.rank, world.size, world.first
        (0, 1, True)
        >>> World(rank=1, size=2).share(torch.arange(5))
        tensor([1, 3])
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def here(cls, device: torch.device) -> "World":
        """Of the default process group, if there is one."""
        if distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size(), device)
        return cls(device=device)

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with gradients averaged over the processes."""
        return DistributedDataParallel(model) if self.size > 1 else model

    def share(self, rows: Tensor) -> Tensor:
        """This process's part of a batch; perhaps empty."""
        return rows[self.rank :: self.size]

    def sum(self, values: list[float]) -> list[float]:
        """The sums over all processes, in double precision."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def largest(self, value: int) -> int:
        """The largest value of any process."""
        return max(int(given) for given in self.gather(torch.tensor([value], device=self.device)))

    def first_message(self, message: str | None) -> tuple[int, str] | None:
        """The message of the lowest rank that has one, and that rank; None if no process has one."""
        if self.size == 1:
            return None if message is None else (0, message)
        raw = (message or "").encode()[:_LONGEST]
        mine = torch.zeros(_LONGEST + 4, dtype=torch.uint8, device=self.device)
        mine[:4] = torch.tensor(list(len(raw).to_bytes(4, "little")), dtype=torch.uint8)
        mine[4 : 4 + len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        for rank, given in enumerate(self.gather(mine)):
            size = int.from_bytes(bytes(given[:4].tolist()), "little")
            if size:
                return rank, bytes(given[4 : 4 + size].tolist()).decode(errors="replace")
        return None

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Everyone's tensor, of the same shape, in the order of ranks."""
        if self.size == 1:
            return [mine]
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(all_of_them, mine)
        return all_of_them

    def copy_from_first(self, tensor: Tensor) -> None:
        """Put the first process's values into everyone's tensor."""
        if self.size > 1:
            distributed.broadcast(tensor, 0)

    def meet(self) -> None:
        """Wait for all."""
        self.sum([0.0])


_LOST = (  # what gloo and NCCL say
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "Watchdog caught collective operation timeout",
)
_LONGEST = 2000  # bytes of a message


@contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Turn the many texts of a broken connection into one."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in _LOST):
            raise LostProcessError(
                "another process of the job died or no longer answers; the run folder has the last checkpoint: "
                "start the job again with resume=True (--resume)."
            ) from error
        raise
