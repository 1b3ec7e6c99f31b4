"""The workloads on which opteq meets its peers, and what is measured of each."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import peer_cvxpylayers
import peer_jax
import peer_torchdeq
import torch
from contest import Contestant, LeftOut, ours, unrolled
from measure import Ratio, Work, beside_gemm, cores, operations
from workloads import Problem, deep, gaussian, mixed, monotone, one_layer

from opteq.experiments._measuring import peak_bytes

f32, f64 = torch.float32, torch.float64
IN_TORCH = ("torchdeq", "torchdeq-anderson", "torchdeq-iteration", "unrolled")
QP = ("cvxpylayers", "unrolled")
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
        "Deep OptEq, 64 channels, 16 x 16, batch 32, f32, 1e-4",
        64,
        (16, 32, 64, 128, 128),
        16,
        32,
        1e-4,
        goal=1.35,
        peers=IN_TORCH,
    ),
    "mixed": lambda: mixed("OptEq 512, 512 samples of mixed difficulty, 1e-4, forward only", 512, 512, 1e-4, goal=5, train=False),
    "qp-32": lambda: one_layer("OptEq 32 x 32 as a QP, batch 8, f64, 1e-6", 32, 32, 8, f64, 1e-6, None, peers=QP),
    "qp-128": lambda: one_layer("OptEq 128 x 128 as a QP, batch 16, f64, 1e-6", 128, 128, 16, f64, 1e-6, None, peers=QP),
}
PEERS: dict[str, Callable[[Problem], Contestant]] = {
    "torchdeq": peer_torchdeq.best,
    "torchdeq-anderson": partial(peer_torchdeq.as_used, peer_torchdeq.ANDERSON),
    "torchdeq-iteration": partial(peer_torchdeq.as_used, peer_torchdeq.ITERATION),
    "unrolled": unrolled,
    "jax": peer_jax.best,
    "cvxpylayers": peer_cvxpylayers.best,
}
NEEDS = {"torchdeq": ["torchdeq"], "jax": ["jax", "jaxopt"], "cvxpylayers": ["cvxpylayers", "diffcp"], "unrolled": []}


def field(problem: Problem, peers: tuple[str, ...]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Those who take part, by name, and the reasons of those who do not."""
    contestants, left_out = {"opteq": ours(problem)}, {}
    for name in peers:
        missing = [module for module in NEEDS[name.split("-")[0]] if find_spec(module) is None]
        try:
            if missing:
                raise LeftOut(f"not installed: {', '.join(missing)}")
            contestants[name] = PEERS[name](problem)
        except LeftOut as reason:
            left_out[name] = str(reason)
    return contestants, left_out


def race(problem: Problem, rounds: int, peers: tuple[str, ...]) -> dict[str, Any]:
    """One workload: every contestant in turn, and what each of them reached."""
    contestants, left_out = field(problem, peers)
    first = {(name.split("-")[0], one.settings): name for name, one in reversed(contestants.items())}
    same = {name: first[name.split("-")[0], one.settings] for name, one in contestants.items()}  # the best may be the usual
    runs = {name: contestants[name].run for name in same.values()}
    times, rates = beside_gemm(runs, rounds)
    same |= overtaken(same, times)
    rows = {name: row(problem, contestants[name], times[name], times["opteq"], rates) for name in dict.fromkeys(same.values())}
    return {
        "title": problem.title,
        "train": problem.train,
        "goal": problem.goal,
        "against": problem.peers[0],
        "rounds": rounds,
        "evaluations": problem.layer().solve(problem.x).evals,
        "contestants": {name: rows[which] for name, which in same.items()},
        "left_out": left_out,
        "operations": operations(contestants["opteq"].run),
    }


def overtaken(same: dict[str, str], times: dict[str, list[float]]) -> dict[str, str]:
    """The best of a library is the one that was fastest in the race, even if it was another before it."""
    usual = [which for name, which in same.items() if name.startswith("torchdeq")]
    return {"torchdeq": min(usual, key=lambda name: median(times[name]))} if "torchdeq" in same else {}


def row(
    problem: Problem, one: Contestant, own: list[float], opteq: list[float], rates: dict[torch.dtype, list[float]]
) -> dict[str, Any]:
    """What a contestant took, and what it reached: None is what cannot be seen."""
    z, state = one.result(), problem.cell.initial(problem.x)
    work = Work.of(one.run) if one.in_torch else None
    return {
        "settings": one.settings,
        "milliseconds": 1e3 * median(own),
        "over_opteq": asdict(Ratio.of(own, opteq)),
        "residual": problem.residual(z),
        "gradient_error": problem.gradient_error() if problem.train else None,
        "cores": cores(one.run),
        "states": peak_bytes(one.run) / (state.numel() * state.element_size()) if one.in_torch else None,
        "share_of_gemm": work.share(own, rates) if work else None,
        "calls": work.calls() if work else None,
    }
