"""What is measured beside the races: overhead, memory, the tangent kernel, curves, and the time of an import."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from contest import ours
from measure import Ratio, Work, import_seconds, interleaved, line, linear_and_square, power_law
from races import field
from tangent import Kernel
from workloads import Problem, monotone, one_layer

from opteq import Solver, Stop, solve
from opteq.experiments._measuring import peak_bytes
from opteq.solvers import Anderson, Broyden, Newton, PeacemanRachford, Picard

f32, f64 = torch.float32, torch.float64


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

        whole = partial(solve, fn, z0, solver, stop)
        with torch.no_grad():
            times = interleaved({"solve": whole, "f": bare}, rounds)
            calls, own = Work.of(whole).calls(), Work.of(bare).calls()
        name = type(solver).__name__
        record = {"name": name, "title": f"{problem.title}: {name}", "evaluations": evals}
        record["over_bare_f"] = asdict(Ratio.of(times["solve"], times["f"]))
        record["beside_f"] = {kind: (count - own[kind]) / evals for kind, count in calls.items()}  # calls an evaluation
        found.append(record)
    return found


def memory() -> list[dict[str, Any]]:
    """The peak of a train step in states, over tolerances: more steps must not take more memory.

    Weights are small beside a state here.
    """
    problems = {
        "opteq": one_layer("OptEq 256 x 256, batch 4096, ||W|| 0.99, f64", 256, 256, 4096, f64, 1e-2, None),
        "monotone": monotone("Monotone 256, batch 4096, m 0.1, f64", 256, 4096, f64, 1e-2),
    }
    return [{"name": name, "title": one.title, "points": [used(one, tol) for tol in TOLERANCES]} for name, one in problems.items()]


TOLERANCES = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)


def used(problem: Problem, tol: float) -> dict[str, Any]:
    problem = replace(problem, tol=tol)
    state = problem.cell.initial(problem.x)
    states = peak_bytes(ours(problem).run) / (state.numel() * state.element_size())
    return {"tolerance": tol, "evaluations": problem.layer().solve(problem.x).evals, "states": states}


def imports(rounds: int) -> dict[str, Any]:
    found = sorted(import_seconds(rounds))
    return {"name": "import", "median": median(found), "low": found[len(found) // 4], "high": found[-1 - len(found) // 4]}


# --- the tangent kernel ---------------------------------------------------------------------------------------------------------


def kernel(rounds: int, small: Iterable[int] = (10, 20, 40), large: int = 1000, width: int = 1000) -> dict[str, Any]:
    """Against torch.func where its Jacobians fit into memory; at the large N by the growth of its time."""
    points = [Kernel(width, N).against_torch_func(rounds) for N in small]
    own = Kernel(width, large).alone(rounds)
    ways = {way: [one["torch_func"][way]["milliseconds"] for one in points] for way in points[0]["torch_func"]}
    return {
        "name": "kernel",
        "title": f"Tangent kernel of a Gaussian DEQ, width {width}, 784 inputs, f64",
        "goal": 60,
        "rounds": rounds,
        "N": large,
        "milliseconds": own,
        "share_of_gemm": Kernel(width, large).share(rounds),
        "points": points,
        "extrapolated": {way: extrapolated([one["N"] for one in points], times, large, own) for way, times in ways.items()},
    }


def extrapolated(Ns: list[int], times: list[float], large: int, own: float) -> dict[str, float]:
    """The time at the large N by three laws, and the smallest ratio to ours.

    Jacobians grow with N and their products with N^2; noise in the exponents of both laws is large so far away, so that the time
    of one sample, at the largest N that was measured, is the third.
    """
    (c, p), (a, b) = power_law(Ns, times), linear_and_square(Ns, times)
    laws = {"power_law": c * large**p, "linear_and_square": a * large + b * large**2, "linear": times[-1] / Ns[-1] * large}
    return {"exponent": p, **laws, "over_opteq": min(laws.values()) / own}


# --- curves ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """The time of a train step over one quantity; `fit` is the law: a power, or a line in log10 of the quantity."""

    title: str
    axis: str
    values: tuple[float, ...]
    problem: Callable[[float], Problem]
    fit: str = "power"


def layer(features: int = 256, batch: int = 128, dtype: torch.dtype = f32, tol: float = 1e-4, top: float = 0.99) -> Problem:
    """OptEq with singular values from 0 to `top`."""
    return one_layer("OptEq", features, features, batch, dtype, tol, (0.0, top))


CURVES = {
    "curve-batch": Curve("OptEq 256, f32, 1e-4", "batch", (32, 64, 128, 256, 512, 1024), lambda v: layer(batch=int(v))),
    "curve-width": Curve("OptEq n, batch 128, f32, 1e-4", "width n", (64, 128, 256, 512, 1024), lambda v: layer(int(v))),
    "curve-condition": Curve(
        "OptEq 256, batch 128, f64, 1e-6", "1 / (1 - ||W||^2)", (3, 10, 30, 100, 300, 1000, 3000),
        lambda v: layer(dtype=f64, tol=1e-6, top=(1 - 1 / v) ** 0.5),
    ),
    "curve-tolerance": Curve(
        "OptEq 256, batch 128, f64", "1 / tolerance", (1e2, 1e4, 1e6, 1e8, 1e10),
        lambda v: layer(dtype=f64, tol=1 / v), fit="decades",
    ),
}  # fmt: skip
COMPARED = ("torchdeq-anderson",)


def curve(name: str, rounds: int) -> dict[str, Any]:
    """Our time, and that of torchdeq with Anderson both ways where it meets the tolerance."""
    what, lines = CURVES[name], {}
    for value in what.values:
        problem = what.problem(value)
        contestants, _ = field(problem, COMPARED)
        for who, times in interleaved({who: one.run for who, one in contestants.items()}, rounds).items():
            if who != "opteq" or problem.residual(contestants[who].result()) <= problem.tol:
                lines.setdefault(who, []).append((value, 1e3 * median(times)))
    return {"name": name, "title": what.title, "axis": what.axis, "fit": what.fit, "lines": fitted(lines, what.fit)}


def kernel_curve(rounds: int, Ns: tuple[int, ...] = (125, 250, 500, 1000), width: int = 1000) -> dict[str, Any]:
    """The time of the tangent kernel over the number of samples."""
    lines = {"opteq": [(N, Kernel(width, N).alone(rounds)) for N in Ns]}
    title = f"Tangent kernel, width {width}, f64"
    return {"name": "curve-kernel", "title": title, "axis": "samples N", "fit": "power", "lines": fitted(lines, "power")}


def fitted(lines: dict[str, list[tuple[float, float]]], fit: str) -> dict[str, Any]:
    """Each line with its law, if it has three points or more."""
    found = {}
    for who, points in lines.items():
        x, y = ([float(point[i]) for point in points] for i in range(2))
        found[who] = {"x": x, "milliseconds": y, "law": law(x, y, fit) if len(x) >= 3 else None}
    return found


def law(x: list[float], y: list[float], fit: str) -> dict[str, float]:
    assert all(a < b for a, b in pairwise(x))
    if fit == "power":
        c, p = power_law(x, y)
        return {"constant": c, "exponent": p}
    a, b = line([float(torch.tensor(v).log10()) for v in x], y)
    return {"constant": a, "per_decade": b}
