"""Gradients of random problems against dense linear algebra in float64: no further from it than the residual of the adjoint allows.

With J = df/dz and K = df/d(x, parameters) at the z that was returned, the exact derivative for a cotangent g is K'v*, with
v* = (I - J')^-1 g. The library has K'v with |J'v + g - v| = r, so that |v - v*| <= |(I - J')^-1| r and

    |K'v - K'v*| <= |K| |(I - J')^-1| r.

r is that of the v that the library found, computed here; beyond it, only rounding is allowed: 1e3 eps |K| |(I - J')^-1| |v*|.
"""

import copy
from dataclasses import replace

import pytest
import torch
from stress_cases import Case, make_case
from stress_checks import check_solution
from stress_reference import Rounded, reference
from torch import Tensor

from opteq import Cell, Equilibrium, Solver, Stop, record
from opteq.gradients import Implicit
from opteq.linear import CG, GMRES, Neumann

pytestmark = pytest.mark.stress
KINKED = ("relu", "ReLU", "Gaussian", "threshold", "L1", "Residual", "Multiscale", "MultiTier")
FACTORS = (0.0, 0.5, 0.9, 0.99, 1 - 1e-4, 1 - 1e-8)


def smooth_case(seed: int) -> Case | None:
    """A small problem in float64 whose layers are differentiable; None if the seed gives another."""
    factor, scale = FACTORS[seed % len(FACTORS)], (1.0, 1e-30, 1e20)[seed % 3]
    case = make_case(seed, dtype=torch.float64, batch=1 + seed % 3, factor=factor, scale=scale)
    kinked = any(name in f"{case.cell} {getattr(getattr(case.cell, 'f', None), 'sigma', '')}" for name in KINKED)
    if kinked or case.bad or case.cell.initial(case.x).numel() > 100:
        return None
    for parameter in case.cell.parameters():
        parameter.requires_grad_()
    x = case.x.detach().clone().requires_grad_()
    stop = replace(case.stop, rtol=max(case.stop.rtol, 1e-10), max_steps=200)
    return replace(case, x=x, gradient=Implicit(), mode="grad", direct=False, stop=stop, solver=None)


def dense_parts(cell: Cell, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """J [n, n] and K [n, all of x and the parameters] of the whole batch, from the f of these tests."""
    twin, x = copy.deepcopy(cell), x.detach().clone().requires_grad_()
    z = z.detach().flatten(1).requires_grad_()
    value = reference(twin, x, z.dtype)(Rounded(z, torch.zeros_like(z), z.dtype)).value.flatten()
    inputs = [z, x, *twin.parameters()]
    each = torch.eye(len(value), dtype=z.dtype)
    rows = torch.autograd.grad(value, inputs, each, is_grads_batched=True, materialize_grads=True, allow_unused=True)
    return rows[0].flatten(1), torch.cat([part.reshape(len(value), -1) for part in rows[1:]], 1)


def linear_for(seed: int, symmetric: bool) -> Solver | None:
    return [None, None, GMRES(), Neumann(), *([CG()] if symmetric else [])][seed % (4 + symmetric)]


def check_gradient(case: Case) -> bool:
    """Whether there was a gradient to check: the equilibrium must have been found."""
    symmetric = bool(case.cell.bind(case.x).symmetric)
    gradient = Implicit(linear=linear_for(case.seed // 7, symmetric), stop=Stop(rtol=10.0 ** -(2 + case.seed % 9), max_steps=300))
    layer = Equilibrium(case.cell, case.solver, case.stop, gradient, on_failure="ignore")
    with record() as log:
        solution = layer.solve(case.x)
        check_solution(case, solution)
        if not bool(solution.converged.all()):
            return False
        g = torch.randn(solution.z.shape, generator=torch.Generator().manual_seed(case.seed), dtype=torch.float64)
        inputs = [case.x, *case.cell.parameters()]
        found = torch.autograd.grad(solution.z, inputs, g, materialize_grads=True, allow_unused=True)
    adjoint = log[-1].z.detach().flatten()
    J, K = dense_parts(case.cell, case.x, solution.z)
    system = torch.eye(len(J), dtype=J.dtype) - J.T
    exact, inverse = torch.linalg.solve(system, g.flatten()), 1 / torch.linalg.svdvals(system)[-1]
    residual = torch.linalg.vector_norm(J.T @ adjoint + g.flatten() - adjoint)
    lever = torch.linalg.matrix_norm(K, 2) * inverse
    error = torch.linalg.vector_norm(torch.cat([part.flatten() for part in found]) - K.T @ exact)
    rounding = 1e3 * torch.finfo(torch.float64).eps * (torch.linalg.vector_norm(exact) + torch.linalg.vector_norm(adjoint))
    assert error <= lever * (residual + rounding), f"{case}\nerror {error:.3e}, allowed {lever * (residual + rounding):.3e}"
    if log[-1].converged.all():
        allowed = log[-1].stop.rtol * torch.linalg.vector_norm(J.T @ adjoint + g.flatten()) * 1.001 + rounding
        assert residual <= allowed, f"{case}\nthe adjoint is called converged with a residual of {residual:.3e}, not {allowed:.3e}"
    return True


def test_gradients_are_within_the_bound_of_their_residual(amount, tally):
    wanted, seed, solved = amount(8, 1000), 0, 0
    while solved < wanted:
        case = smooth_case(seed)
        solved += case is not None and check_gradient(case)
        seed += 1
    tally("gradients", solved)
