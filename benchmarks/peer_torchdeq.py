"""torchdeq: with the fastest of its settings that meets the tolerance, and as it is mostly used."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

from contest import Contestant, LeftOut, Run, contestant, fastest, meets, runs
from torch import Tensor
from workloads import Problem

TUNED_ON = 32  # samples
ANDERSON, ITERATION = "Anderson, m 6, lam 1e-10", "iteration"


def settings() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Its solvers and their settings, by name."""
    from torchdeq.solver.anderson import anderson_solver
    from torchdeq.solver.broyden import broyden_solver
    from torchdeq.solver.fp_iter import fixed_point_iter

    for tau in (1.0, 0.7, 0.4):
        yield ITERATION if tau == 1 else f"iteration, tau {tau}", partial(fixed_point_iter, tau=tau)
    for memory, ridge in ((4, 1e-10), (6, 1e-10), (10, 1e-10), (6, 1e-6)):
        yield f"Anderson, m {memory}, lam {ridge:g}", partial(anderson_solver, m=memory, lam=ridge)
    yield "Broyden", broyden_solver


@cache
def solvers() -> tuple[str, ...]:
    """The names of these settings, by which it knows them from here on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its docstrings, when it is compiled
        from torchdeq.solver import register_solver

    known = dict(settings())
    for name, solver in known.items():
        register_solver(name, solver)
    return tuple(known)


def forward_pass(problem: Problem, forward: str, backward: str, most: int = 500) -> Run:
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


def called(problem: Problem, forward: str, backward: str) -> str:
    return forward if not problem.train or forward == backward else f"{forward}; backward {backward}"


def as_used(solver: str, problem: Problem) -> Contestant:
    """One solver both ways."""
    solvers()
    run = runs(problem, forward_pass(problem, solver, solver))
    if not meets(problem, run):
        raise LeftOut(f"misses {problem.tol:g}")
    return contestant(solver, run)


def best(problem: Problem) -> Contestant:
    """The fastest pair of solvers for which the residual, and the gradient, meet the tolerance: of all pairs on a few samples,
    then of the first of them, and of those that are mostly used, on all.
    """
    few, alone = (replace(problem, x=problem.x[:TUNED_ON], train=train) for train in (problem.train, False))
    forward = fastest({(name, name): runs(alone, forward_pass(alone, name, name)) for name in solvers()}, alone)[:2]
    pairs = list(product([pair[0] for pair in forward], solvers())) if problem.train else forward
    first = fastest({pair: runs(few, forward_pass(few, *pair)) for pair in pairs}, few)[:3]
    tried = {pair: runs(problem, forward_pass(problem, *pair)) for pair in [*first, (ANDERSON,) * 2, (ITERATION,) * 2]}
    for pair in fastest(tried, problem):
        return contestant(called(problem, *pair), tried[pair])
    raise LeftOut(f"misses {problem.tol:g} with all settings")
