"""Time and memory of what a network does, for the tables that compare them."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["medians", "one_thread", "peak_bytes"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread, as in the cells of a grid."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def medians(runs: Mapping[str, Callable[[], float | None]], repeats: int) -> dict[str, float]:
    """The median seconds of each, run in turn so that what else the machine does is shared by all; the first turn does not count.

    A run that gives a number timed a part of itself: that number counts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begun = time.perf_counter()
            own = run()
            took = time.perf_counter() - begun if own is None else own
            if turn:
                seconds[name].append(took)
    return {name: median(found) for name, found in seconds.items()}


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most tensor memory on the CPU that was alive at one time during the call, beyond what was before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    live = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest
