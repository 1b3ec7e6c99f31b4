"""The others, each at its best: configurations are tried, and the fastest one that meets the tolerance runs the race."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from workloads import Problem

Run: TypeAlias = Callable[[], Tensor]  # one step; the parameters of the cell then have their gradients

TUNED_ON = 32  # samples


def differentiate(problem: Problem, forward: Run, weights: Tensor) -> Tensor:
    """A step of training: z, and the gradients of <c, z>."""
    problem.cell.zero_grad()
    z = forward()
    (z * weights).sum().backward()
    return z.detach()


def runs(problem: Problem, forward: Run) -> Run:
    """A step of what the problem asks for."""
    return partial(differentiate, problem, forward, problem.weights()) if problem.train else torch.no_grad()(forward)


def ours(problem: Problem) -> Run:
    """opteq by its defaults."""
    layer = problem.layer()
    return runs(problem, lambda: layer(problem.x))


def unrolled(problem: Problem, longest: int = 400) -> tuple[str, Run] | None:
    """Plain iteration, differentiated through: as many steps as the tolerance takes; None if they do not get there."""
    depth, z = 0, problem.cell.initial(problem.x)
    with torch.no_grad():
        f = problem.plain(problem.cell, problem.x)
        while problem.residual(z) > problem.tol:
            depth, z = depth + 1, f(z)
            if depth == longest or not bool(z.isfinite().all()):
                return None

    def forward() -> Tensor:
        f, z = problem.plain(problem.cell, problem.x), problem.cell.initial(problem.x)
        for _ in range(depth):
            z = f(z)
        return z

    return f"unrolled, {depth} steps", runs(problem, forward)


# --- torchdeq -------------------------------------------------------------------------------------------------------------------


def torchdeq_solvers() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Its solvers and their settings, by name."""
    from torchdeq.solver.anderson import anderson_solver
    from torchdeq.solver.broyden import broyden_solver
    from torchdeq.solver.fp_iter import fixed_point_iter

    for tau in (1.0, 0.7, 0.4):
        yield f"iteration, tau {tau}", partial(fixed_point_iter, tau=tau)
    for memory, ridge in ((4, 1e-10), (6, 1e-10), (10, 1e-10), (6, 1e-6)):
        yield f"anderson, m {memory}, lam {ridge:g}", partial(anderson_solver, m=memory, lam=ridge)
    yield "broyden", broyden_solver


def torchdeq_forward(problem: Problem, forward: str, backward: str, most: int = 500) -> Run:
    """Its forward pass; f is made anew, with the injection outside of it."""
    from torchdeq import get_deq

    deq = get_deq(
        f_solver=forward, f_max_iter=most, f_tol=problem.tol, f_stop_mode="rel", eval_f_max_iter=most, ift=True,
        b_solver=backward, b_max_iter=most, b_tol=problem.tol, b_stop_mode="rel",
    ).train(problem.train)  # fmt: skip

    def run() -> Tensor:
        z: Tensor = deq(problem.plain(problem.cell, problem.x), problem.cell.initial(problem.x))[0][-1]
        return z

    return run


def best_torchdeq(problem: Problem) -> tuple[str, Run]:
    """The fastest pair of solvers for which the residual, and the gradient, meet the tolerance."""
    from torchdeq.solver import register_solver

    names = []
    for name, solver in torchdeq_solvers():
        register_solver(name, solver)
        names.append(name)
    few, alone = (replace(problem, x=problem.x[:TUNED_ON], train=train) for train in (problem.train, False))
    forward = fastest({(name, name): runs(alone, torchdeq_forward(alone, name, name)) for name in names}, alone)[:2]
    pairs = product([pair[0] for pair in forward], names) if problem.train else forward
    for one, two in fastest({pair: runs(few, torchdeq_forward(few, *pair)) for pair in pairs}, few):
        run = runs(problem, torchdeq_forward(problem, one, two))
        if meets(problem, run):
            return f"torchdeq, {one}" if not problem.train or one == two else f"torchdeq, {one}; backward {two}", run
    raise RuntimeError(f"No setting of torchdeq meets the tolerance {problem.tol:g} on {problem.title}.")


def fastest(tried: dict[tuple[str, str], Run], problem: Problem) -> list[tuple[str, str]]:
    """Those that meet the tolerance, the fastest first."""
    found = {}
    for name, run in tried.items():
        if meets(problem, run):
            times = []
            for _ in range(3):
                begun = perf_counter()
                run()
                times.append(perf_counter() - begun)
            found[name] = min(times)
    return sorted(found, key=found.__getitem__)


def meets(problem: Problem, run: Run) -> bool:
    """Whether a run reaches the tolerance, its gradients within 100 times of it; its Anderson mixing may fail altogether."""
    try:
        z = run()
    except torch.linalg.LinAlgError:
        return False
    if not problem.residual(z) <= problem.tol:
        return False
    if not problem.train:
        return True
    return problem.gradient_error() <= 100 * problem.tol
