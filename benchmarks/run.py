"""How fast the library is, as ratios of times in one interleaved run: against torchdeq, plain unrolling, and the matrix product.

`make bench`, or `opteq bench`. In each turn every contestant runs once; a figure is the median over the turns, with its quartiles.
opteq runs by its defaults; torchdeq by the fastest of its settings that meets the same tolerance (it is left out if it is not
installed: pip install -e '.[bench]'). The residual and the error of the gradient are measured in float64 and printed. Times depend
on the machine, ratios much less so; nothing is asserted.
"""

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import Gemm, Ratio, flops, interleaved
from peers import best_torchdeq, ours, unrolled
from rich.console import Console
from rich.table import Table
from workloads import Problem, deep, gaussian, mixed, monotone, one_layer

import opteq
from opteq import Solver, Stop, solve
from opteq.experiments._measuring import peak_bytes
from opteq.solvers import Anderson, Broyden, Newton, PeacemanRachford, Picard

f32, f64 = torch.float32, torch.float64
RACES: dict[str, Callable[[], Problem]] = {
    "opteq": lambda: one_layer(
        "OptEq 512 x 512, batch 256, ||W|| 0.99, Gaussian, f32, 1e-4", 512, 512, 256, f32, 1e-4, None, goal=4
    ),
    "opteq-even": lambda: one_layer("OptEq, singular values 0.8-0.99, f32, 1e-4", 512, 512, 256, f32, 1e-4, (0.8, 0.99), goal=8),
    "opteq-even-f64": lambda: one_layer(
        "OptEq, singular values 0.8-0.99, f64, 1e-6", 512, 512, 256, f64, 1e-6, (0.8, 0.99), goal=10
    ),
    "opteq-forward": lambda: one_layer(
        "OptEq 1024 -> 256 hidden, batch 256, f32, 1e-4, forward only", 1024, 256, 256, f32, 1e-4, None, goal=8, train=False
    ),
    "monotone": lambda: monotone("Monotone 512, batch 128, m 0.1, f32, 1e-4", 512, 128, f32, 1e-4, goal=8),
    "monotone-f64": lambda: monotone("Monotone 512, batch 128, m 0.1, f64, 1e-6", 512, 128, f64, 1e-6, goal=12),
    "gaussian": lambda: gaussian("Gaussian 1000, batch 1000, f32, 1e-4", 1000, 1000, f32, 1e-4, goal=1.6),
    "gaussian-f64": lambda: gaussian("Gaussian 1000, batch 1000, f64, 1e-6", 1000, 1000, f64, 1e-6, goal=2.5),
    "deep": lambda: deep(
        "Deep OptEq, 64 channels, 16 x 16, batch 32, f32, 1e-4", 64, (16, 32, 64, 128, 128), 16, 32, 1e-4, goal=1.35
    ),
    "mixed": lambda: mixed("OptEq 512, 512 samples of mixed difficulty, 1e-4, forward only", 512, 512, 1e-4, goal=5, train=False),
}
QUICK = ("opteq", "opteq-forward", "monotone")


def race(problem: Problem, rounds: int) -> dict[str, Any]:
    """One workload: every contestant in turn, and what each of them reached."""
    contestants = {"opteq": ours(problem)}
    names = {"opteq": "opteq"}
    if find_spec("torchdeq"):
        names["torchdeq"], contestants["torchdeq"] = best_torchdeq(problem)
    if (plain := unrolled(problem)) is not None:
        names["unrolled"], contestants["unrolled"] = plain
    limit = Gemm(problem.x.dtype)
    times = interleaved(contestants | {"torch.mm": limit}, rounds)
    rate = [limit.operations / seconds for seconds in times["torch.mm"]]
    state = problem.cell.initial(problem.x)
    rows = {}
    for name, run in contestants.items():
        z, own = run(), times[name]
        rows[name] = {
            "settings": names[name],
            "milliseconds": 1e3 * sorted(own)[len(own) // 2],
            "over_opteq": asdict(Ratio.of(own, times["opteq"])),
            "residual": problem.residual(z),
            "gradient_error": problem.gradient_error() if problem.train else None,
            "states": peak_bytes(run) / (state.numel() * state.element_size()),
            "share_of_gemm": Ratio.of([flops(run) / seconds for seconds in own], rate).median,
        }
    evaluations = problem.layer().solve(problem.x).evals
    return {"title": problem.title, "goal": problem.goal, "evaluations": evaluations, "contestants": rows}


def overhead(rounds: int) -> list[dict[str, Any]]:
    """Solve time over (evaluations x one bare f): 1 means that the loop and the method cost nothing."""
    layer = one_layer("OptEq 512 x 512, batch 256", 512, 512, 256, f32, 1e-4, None)
    split = monotone("Monotone 512, batch 128", 512, 128, f32, 1e-4)
    pairs: list[tuple[Problem, Solver]] = [(layer, solver) for solver in (Picard(), Anderson(), Broyden(), Newton())]
    found = []
    for problem, solver in [*pairs, (split, PeacemanRachford())]:
        fn, z0, stop = problem.cell.bind(problem.x).detach(), problem.cell.initial(problem.x), Stop(rtol=problem.tol)
        evals = solve(fn, z0, solver, stop).evals

        def bare(fn: Callable[[torch.Tensor], torch.Tensor] = fn, z0: torch.Tensor = z0, count: int = evals) -> None:
            for _ in range(count):
                fn(z0)

        with torch.no_grad():
            times = interleaved({"solve": partial(solve, fn, z0, solver, stop), "f": bare}, rounds)
        ratio = asdict(Ratio.of(times["solve"], times["f"]))
        found.append({"title": f"{problem.title}: {type(solver).__name__}", "evaluations": evals, "over_bare_f": ratio})
    return found


def shown(races: list[dict[str, Any]], overheads: list[dict[str, Any]], title: str) -> Table:
    """The figures of one thread count."""
    table = Table(title=title)
    for heading in ("workload", "", "ms", "times opteq", "goal", "residual", "gradient error", "states", "share of mm"):
        table.add_column(heading)
    for one in races:
        for i, row in enumerate(one["contestants"].values()):
            gradient = "" if row["gradient_error"] is None else f"{row['gradient_error']:.1e}"
            goal = f"{one['goal']:g}" if i == 1 else ""
            times = (f"{row['milliseconds']:.0f}", str(Ratio(**row["over_opteq"])), goal)
            reached = (f"{row['residual']:.1e}", gradient, f"{row['states']:.1f}", f"{row['share_of_gemm']:.0%}")
            table.add_row(one["title"] if i == 0 else "", row["settings"], *times, *reached)
    for one in overheads:
        table.add_row(one["title"], f"{one['evaluations']} evaluations", "", f"{Ratio(**one['over_bare_f'])} of bare f")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"workloads, all by default: {', '.join(RACES)}, overhead")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each workload (7)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="three workloads, three turns, one thread")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if unknown := set(options.names) - {*RACES, "overhead"}:
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    names = options.names or (QUICK if options.quick else [*RACES, "overhead"])
    rounds, threads = (3, [1]) if options.quick else (options.rounds, options.threads)
    found: dict[str, Any] = {"opteq": opteq.__version__, "torch": torch.__version__, "machine": platform.machine(), "threads": {}}
    for count in threads:
        torch.set_num_threads(count)
        races = [race(RACES[name](), rounds) for name in names if name in RACES]
        overheads = overhead(rounds) if "overhead" in names else []
        found["threads"][str(count)] = {"races": races, "overheads": overheads}
        Console(width=200).print(shown(races, overheads, f"{count} thread{'s' if count > 1 else ''}, {rounds} turns"))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
