"""Times in one interleaved run, and what they are held against."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Ratio:
    """The median of ratios of times, turn by turn, and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: list[float], below: list[float]) -> "Ratio":
        ratios = sorted(a / b for a, b in zip(above, below, strict=True))
        quarter = len(ratios) // 4
        return cls(statistics.median(ratios), ratios[quarter], ratios[-1 - quarter])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def interleaved(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant, turn by turn: each runs once in a turn, and the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            begun = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - begun)
    return times


def flops(run: Callable[[], Any]) -> int:
    """Floating-point operations of the matrix products and convolutions of a call."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


class Gemm:
    """`torch.mm` of square matrices: the limit that the machine sets."""

    def __init__(self, dtype: torch.dtype, side: int = 1024) -> None:
        torch.manual_seed(0)
        self.a, self.operations = torch.randn(side, side, dtype=dtype), 2 * side**3

    def __call__(self) -> torch.Tensor:
        return self.a @ self.a
