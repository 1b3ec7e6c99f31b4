"""Who takes part in a race: opteq by its defaults, plain unrolling, and what it takes to hold others to the same accuracy."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from workloads import Problem

Run: TypeAlias = Callable[[], Tensor]  # one step; the parameters of the cell then have their gradients
Key = TypeVar("Key", bound=Hashable)


class LeftOut(Exception):
    """A peer does not take part; the text says why."""


@dataclass(frozen=True)
class Contestant:
    """`run` is what is timed; `result` gives z and leaves the gradients in the cell."""

    settings: str
    run: Callable[[], Any]
    result: Run
    in_torch: bool = True  # so that torch sees its memory and its operations


def contestant(settings: str, run: Run) -> Contestant:
    """One that computes with torch, on the parameters of the cell."""
    return Contestant(settings, run, run)


def differentiate(problem: Problem, forward: Run, weights: Tensor) -> Tensor:
    """A step of training: z, and the gradients of <c, z>."""
    problem.cell.zero_grad()
    z = forward()
    (z * weights).sum().backward()
    return z.detach()


def runs(problem: Problem, forward: Run) -> Run:
    """A step of what the problem asks for."""
    return partial(differentiate, problem, forward, problem.weights()) if problem.train else torch.no_grad()(forward)


def ours(problem: Problem) -> Contestant:
    """opteq by its defaults."""
    layer = problem.layer()
    return contestant("opteq", runs(problem, lambda: layer(problem.x)))


def unrolled(problem: Problem, longest: int = 400) -> Contestant:
    """Plain iteration, differentiated through: as many steps as the tolerance takes."""
    depth, z = 0, problem.cell.initial(problem.x)
    with torch.no_grad():
        f = problem.plain(problem.cell, problem.x)
        while not problem.residual(z) <= problem.tol:
            depth, z = depth + 1, f(z)
            if depth == longest or not bool(z.isfinite().all()):
                raise LeftOut(f"misses {problem.tol:g} in {depth} steps")

    def forward() -> Tensor:
        f, z = problem.plain(problem.cell, problem.x), problem.cell.initial(problem.x)
        for _ in range(depth):
            z = f(z)
        return z

    return contestant(f"{depth} steps", runs(problem, forward))


def fastest(tried: Mapping[Key, Run], problem: Problem) -> list[Key]:
    """Those that meet the tolerance, the fastest first; what is clearly slow is timed once only."""
    found: dict[Key, float] = {}
    for key, run in tried.items():
        if meets(problem, run):
            best = min(found.values(), default=inf)
            found[key] = seconds(run)
            if found[key] < 1.5 * best:
                found[key] = min(found[key], *(seconds(run) for _ in range(2)))
    return sorted(found, key=found.__getitem__)


def seconds(run: Callable[[], Any]) -> float:
    begun = perf_counter()
    run()
    return perf_counter() - begun


def meets(problem: Problem, run: Run) -> bool:
    """Whether a run reaches the tolerance, its gradients within 100 times of it; Anderson mixing of others may fail altogether."""
    try:
        z = run()
    except torch.linalg.LinAlgError:
        return False
    if not problem.residual(z) <= problem.tol:
        return False
    return not problem.train or problem.gradient_error() <= 100 * problem.tol
