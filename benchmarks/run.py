"""Ratios measured in one interleaved run: what the loop costs beside f, and what a train step costs beside plain unrolling.

`make bench`. Each round times every contestant once, in turn; a figure is the median over rounds, with its spread. Times depend on
the machine, ratios much less so; nothing is asserted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from opteq import Equilibrium, Solver, Stop, solve
from opteq.cells import OptEq
from opteq.gradients import Unrolled
from opteq.solvers import Anderson, Broyden, Newton, Picard


@dataclass(frozen=True)
class Figure:
    workload: str
    what: str
    ratio: float
    low: float
    high: float
    note: str


def interleaved(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant, round by round, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if i:
                times[name].append(time.perf_counter() - start)
    return times


def figure(workload: str, what: str, above: list[float], below: list[float], note: str) -> Figure:
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    quarter = len(ratios) // 4
    return Figure(workload, what, statistics.median(ratios), ratios[quarter], ratios[-1 - quarter], note)


def layer_of(norm: float, features: int = 512, hidden: int = 512) -> OptEq:
    torch.manual_seed(0)
    cell = OptEq(features, features, hidden)
    with torch.no_grad():
        cell.W *= norm / torch.linalg.matrix_norm(cell.W, 2)
    return cell


def overhead(rounds: int) -> list[Figure]:
    """Solve time over (evaluations x one bare f): 1 means that the loop and the method cost nothing."""
    workload, stop, figures = "OptEq 512 x 512, batch 256, ||W|| 0.99, float32, 1e-4", Stop(rtol=1e-4), []
    fn = layer_of(0.99).bind(torch.randn(256, 512)).detach()
    z0 = torch.zeros(256, 512)
    solvers: list[Solver] = [Picard(), Anderson(), Broyden(), Newton()]
    contestants: dict[str, Callable[[], object]] = {"f": lambda: [fn(z0) for _ in range(10)]}
    contestants |= {type(s).__name__: partial(solve, fn, z0, s, stop) for s in solvers}
    times = interleaved(contestants, rounds)
    for solver in solvers:
        evals = solve(fn, z0, solver, stop).evals
        bare = [t / 10 * evals for t in times["f"]]
        name = type(solver).__name__
        figures.append(figure(workload, f"{name}: solve / (evaluations x f)", times[name], bare, f"{evals} evaluations"))
    return figures


def train_step(rounds: int) -> list[Figure]:
    """Forward and backward: unrolling to the same residual, over the implicit layer."""
    workload, figures = "train step, OptEq 512 x 512, batch 256, 1e-4", []
    for norm in (0.9, 0.99):
        cell, x = layer_of(norm), torch.randn(256, 512)
        stop = Stop(rtol=1e-4, max_steps=1000)
        depth = int(Equilibrium(cell, Picard(), stop).solve(x).steps.max())
        implicit, unrolled = Equilibrium(cell, stop=stop), Equilibrium(cell, stop=stop, gradient=Unrolled(depth))
        models = {"implicit": implicit, "unrolled": unrolled}
        times = interleaved({name: partial(step, model, x) for name, model in models.items()}, rounds)
        note = f"unrolled {depth} deep"
        figures.append(figure(workload, f"||W|| {norm}: unrolled / implicit", times["unrolled"], times["implicit"], note))
    return figures


def step(model: Equilibrium, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    found: dict[int, list[Figure]] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        found[threads] = [*overhead(options.rounds), *train_step(options.rounds)]
        table = Table(title=f"{threads} thread{'s' if threads > 1 else ''}, medians of {options.rounds} interleaved rounds")
        for heading in ("workload", "ratio of times", "median", "quartiles", ""):
            table.add_column(heading)
        for f in found[threads]:
            table.add_row(f.workload, f.what, f"{f.ratio:.2f}", f"{f.low:.2f}-{f.high:.2f}", f.note)
        Console().print(table)
    if options.json:
        figures = {str(threads): [asdict(f) for f in rows] for threads, rows in found.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
