"""Times in one interleaved run, what they are held against, and the laws by which they grow."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from opteq.products import product


@dataclass(frozen=True)
class Ratio:
    """The median of ratios of times, turn by turn, and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> "Ratio":
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


def cores(run: Callable[[], Any]) -> float:
    """How many cores the process was busy on during a call: whether a limit on the threads was kept."""
    begun, worked = time.perf_counter(), time.process_time()
    run()
    return (time.process_time() - worked) / (time.perf_counter() - begun)


class Work(TorchDispatchMode):
    """What a call asks of the machine: operations of matrix products and convolutions by dtype, and how often torch is called.

    Calls that are no products are large if they read or write 8,192 numbers or more: that then takes longer than the call itself.
    Not for inference mode, in which torch does not say of what its operations are made.
    """

    LARGE = 2**13

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()
        self.products = self.large = self.small = 0  # calls

    @classmethod
    def of(cls, run: Callable[[], Any]) -> "Work":
        with cls() as work:
            run()
        return work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
        if (count := FLOPS.get(func.overloadpacket)) is not None:
            self.products += 1
            self.flops[tensors[-1].dtype] += count(*args, **kwargs, out_val=out)
        elif not func.is_view and max((one.numel() for one in tensors), default=0) >= self.LARGE:
            self.large += 1
        else:
            self.small += 1
        return out

    def calls(self) -> dict[str, int]:
        return {"products": self.products, "large": self.large, "small": self.small}

    def share(self, seconds: Sequence[float], rates: Mapping[torch.dtype, Sequence[float]]) -> float:
        """The part of the time that the products would take at these rates, turn by turn; 1 at most, for rates have noise."""
        limit = [sum(count / rates[dtype][turn] for dtype, count in self.flops.items()) for turn in range(len(seconds))]
        return min(1.0, Ratio.of(limit, seconds).median)


def product_flops(rows: torch.Tensor, *others: Any, out_val: torch.Tensor, **_: Any) -> int:
    """Of oneDNN's product, which torch does not count."""
    return 2 * rows.numel() * out_val.shape[-1]


FLOPS: dict[Any, Callable[..., int]] = dict(flop_registry)
if torch.backends.mkldnn.is_available():
    FLOPS[torch.ops.mkldnn._linear_pointwise] = product_flops


def operations(run: Callable[[], Any], most: int = 6) -> dict[str, float]:
    """The operations of torch that took most of the time of a call, each with its share."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    events = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(events.values())
    largest = sorted(events, key=events.__getitem__, reverse=True)[:most]
    return {key.removeprefix("aten::"): events[key] / total for key in largest}


class Gemm:
    """The product of square matrices, by `torch.mm` or, where that is faster, oneDNN: the limit that the machine sets.

    Of six sides from 768 to 1152, 960 came within 1.2% of the highest rate or had it where this was tried; 1024 had up to 12% less.
    """

    def __init__(self, dtype: torch.dtype, side: int = 960) -> None:
        torch.manual_seed(0)
        self.a, self.operations = torch.randn(side, side, dtype=dtype), 2 * side**3

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return product(self.a, self.a)


def beside_gemm(
    contestants: Mapping[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[float]], dict[torch.dtype, list[float]]]:
    """The seconds of the contestants, and the operations a second of products in float32 and float64 in the same turns."""
    limits = {dtype: Gemm(dtype) for dtype in (torch.float32, torch.float64)}
    times = interleaved({**contestants, **{str(dtype): limit for dtype, limit in limits.items()}}, rounds)
    rates = {dtype: [limit.operations / seconds for seconds in times.pop(str(dtype))] for dtype, limit in limits.items()}
    return times, rates


# --- laws -----------------------------------------------------------------------------------------------------------------------


def power_law(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """c and p of y = c x^p, by least squares in log-log."""
    p, log_c = np.polyfit(np.log(x), np.log(y), 1)
    return float(np.exp(log_c)), float(p)


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """a and b of y = a + b x, by least squares."""
    b, a = np.polyfit(x, y, 1)
    return float(a), float(b)


def linear_and_square(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """a, b >= 0 of y = a x + b x^2, by least squares of the relative errors."""
    x_, y_ = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    (a, b), _ = nnls(np.stack([x_ / y_, x_**2 / y_], axis=1), np.ones_like(y_))
    return float(a), float(b)


# --- the machine ----------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The class of the machine: what its processor can do, not which one it is."""
    return {
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
    }


def import_seconds(rounds: int) -> list[float]:
    """How long `import opteq` takes after `import torch`, in a process of its own, turn by turn."""
    code = "import time, torch; begun = time.perf_counter(); import opteq; print(time.perf_counter() - begun)"
    command = [sys.executable, "-c", code]
    found = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds + 1)]
    return found[1:]  # the first may have compiled the modules
