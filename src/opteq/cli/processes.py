"""One training on several processes, as torchrun starts them."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import distributed

from opteq.training import LostProcessError, World
from opteq.training.parts import find_device

__all__ = ["agree", "process_group"]


@contextmanager
def process_group(device: str | None) -> Iterator[World]:
    """Join the other processes of the job, if there are any: by gloo on CPUs, by nccl on GPUs, one for each process."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield World(device=find_device(device))
        return
    gpus = torch.cuda.is_available() if device is None else device.startswith("cuda")
    place = torch.device(device or "cuda") if gpus else find_device(device)
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with _told_by_the_launcher():
        distributed.init_process_group("nccl" if gpus else "gloo")
        try:
            yield World.here(place)
        finally:
            gc.collect()  # without it gloo aborts at the end of some runs, also without opteq; why is not known
            distributed.destroy_process_group()


@contextmanager
def _told_by_the_launcher() -> Iterator[None]:
    """torchrun ends all processes as soon as one dies: say so."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise LostProcessError(
            "the launcher is ending this process, as it does when another one of the job died; the run folder has the last "
            "checkpoint: start the job again with --resume."
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def agree(world: World, choice: str) -> str:
    """The choice of the first process, for all."""
    told = world.first_message(choice if world.first else None)
    return choice if told is None else told[1]
