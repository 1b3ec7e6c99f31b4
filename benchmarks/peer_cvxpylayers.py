"""cvxpylayers: the equilibrium of a one-layer OptEq with ReLU as the quadratic program that it solves."""

from typing import Any

import torch
from contest import Contestant, LeftOut, Run, fastest, runs
from torch import Tensor
from workloads import Problem

from opteq.cells import OptEq


def program(hidden: int) -> Any:
    """s = argmin over s >= 0 of |L s|^2 / 2 - <u, s>; with L'L = I - W W' this is s = relu(W W's + u), and z = W's."""
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    s, L, u = cp.Variable(hidden), cp.Parameter((hidden, hidden)), cp.Parameter(hidden)
    objective = cp.Minimize(0.5 * cp.sum_squares(L @ s) - u @ s)
    return CvxpyLayer(cp.Problem(objective, [s >= 0]), parameters=[L, u], variables=[s])


def forward_pass(problem: Problem, layer: Any, eps: float, mode: str) -> Run:
    """Its forward pass: the conic solver SCS to `eps`, to be differentiated by `mode`."""
    cell, jobs = problem.cell, torch.get_num_threads()
    assert isinstance(cell, OptEq)
    arguments = {"solve_method": "SCS", "eps": eps, "mode": mode, "n_jobs_forward": jobs, "n_jobs_backward": jobs}

    def run() -> Tensor:
        eye = torch.eye(cell.W.shape[0], dtype=cell.W.dtype)
        L = torch.linalg.cholesky(eye - cell.W @ cell.W.T).mT
        (s,) = layer(L, problem.x @ cell.U.T + cell.b, solver_args=arguments)
        z: Tensor = s @ cell.W
        return z

    return run


def best(problem: Problem) -> Contestant:
    """The fastest of its settings that meets the tolerance."""
    layer = program(problem.cell.W.shape[0])
    tried = {
        f"SCS to {eps:g}, derivative by {mode}": runs(problem, forward_pass(problem, layer, eps, mode))
        for eps in (problem.tol, 1e-1 * problem.tol, 1e-2 * problem.tol)
        for mode in ("lsqr", "dense")
    }
    for name in fastest(tried, problem):
        return Contestant(name, tried[name], tried[name], in_torch=False)
    raise LeftOut(f"misses {problem.tol:g} with all settings")
