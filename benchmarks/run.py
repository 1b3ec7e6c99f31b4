"""How fast the library is, as ratios of times in one interleaved run: against other libraries, unrolling, and the matrix product.

`make bench`, or `opteq bench`. In each turn every contestant runs once; a figure is the median over the turns, with its quartiles.
opteq runs by its defaults; the others by the fastest of their settings that meets the same tolerance, and torchdeq also as it is
mostly used. What is not installed is left out: pip install -e '.[bench]'. The residual and the error of the gradient are measured
in float64 and printed. Times depend on the machine, ratios much less so; nothing is asserted.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import others
import torch
from measure import machine
from peer_jax import limit_threads
from races import RACES, race
from rich.console import Console
from show import shown
from store import Store

OTHERS: dict[str, tuple[str, Callable[[int], list[dict[str, Any]]]]] = {
    "overhead": ("overheads", others.overhead),
    "memory": ("memory", lambda rounds: others.memory()),
    "kernel": ("kernels", lambda rounds: [others.kernel(rounds)]),
    **{name: ("curves", lambda rounds, name=name: [others.curve(name, rounds)]) for name in others.CURVES},
    "curve-kernel": ("curves", lambda rounds: [others.kernel_curve(rounds)]),
    "import": ("imports", lambda rounds: [others.imports(rounds)]),
}
NAMES = (*RACES, *OTHERS)
ONCE = {name for name in OTHERS if name.startswith("curve") or name in ("memory", "import")}  # not for each thread count
QUICK = ("opteq", "opteq-forward", "monotone")


def raced(name: str, rounds: int, few: bool) -> dict[str, Any]:
    """A race; of a few, JAX takes part in the first only, because it takes long to compile."""
    problem = RACES[name]()
    left = tuple(peer for peer in problem.peers if not few or peer != "jax" or name == QUICK[0])
    return {"name": name} | race(problem, rounds, left)


def measured(name: str, rounds: int, few: bool) -> tuple[str, list[dict[str, Any]]]:
    """The kind of record, and the records."""
    if name in RACES:
        return "races", [raced(name, rounds, few)]
    kind, run = OTHERS[name]
    return kind, run(rounds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure, all by default: {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each workload (7)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="1 2; each has a process of its own")
    parser.add_argument("--quick", action="store_true", help="three workloads, three turns, one thread: within two minutes")
    parser.add_argument("--json", type=Path, help="also put the figures into this file, each as soon as it is there")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    if options.resume and not options.json:
        parser.error("--resume needs --json")
    if options.quick:
        options.rounds, options.threads, options.names = 3, options.threads[:1], options.names or list(QUICK)
    return options


def wanted(options: argparse.Namespace, count: int) -> list[str]:
    """What to measure with so many threads: curves, memory and the import once only, unless they were named."""
    return options.names or [name for name in NAMES if name not in ONCE or count == options.threads[0]]


def in_a_process(options: argparse.Namespace, count: int) -> None:
    """Everything for one thread count in a process of its own: XLA takes a number of threads but once."""
    command = [sys.executable, __file__, *wanted(options, count), "--threads", str(count), "--rounds", str(options.rounds)]
    command += ["--json", str(options.json)] if options.json else []
    subprocess.run(command + (["--resume"] if options.resume else []), check=True)


def here(options: argparse.Namespace, count: int) -> None:
    """Everything for one thread count; then the table of what was measured now."""
    torch.set_num_threads(count)
    limit_threads(count)
    store, now = Store(machine(), options.json, NAMES), Store(machine(), None, NAMES)
    for name in wanted(options, count):
        if options.resume and store.has(count, name):
            continue
        begun = perf_counter()
        kind, records = measured(name, options.rounds, options.quick)
        for record in records:
            store.put(count, kind, name, record)
            now.put(count, kind, name, record)
        print(f"{name}: {perf_counter() - begun:.0f} s", file=sys.stderr)
    title = f"{count} thread{'s' if count > 1 else ''}, {options.rounds} turns"
    Console(width=220).print(shown(now.records(count), title))


def main() -> None:
    options = arguments()
    for count in options.threads:
        (here if len(options.threads) == 1 else in_a_process)(options, count)


if __name__ == "__main__":
    main()
