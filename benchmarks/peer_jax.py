"""JAX with jaxopt: jitted, compiled before the race, with the fastest of its solvers that meets the tolerance.

The batch is one state (a while loop under vmap would be slower), so that jaxopt stops at a norm over all samples; how tight it must
be for the worst sample is found beforehand. optimistix has plain iteration only, and was slower than jaxopt's.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from contest import Contestant, LeftOut, fastest, seconds
from torch import Tensor
from workloads import Problem

from opteq.cells import GaussianDEQ, Monotone, OptEq

Arrays: TypeAlias = dict[str, Any]
TIGHTER = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03)
MOST = 1000  # steps


def limit_threads(count: int) -> None:
    """XLA reads this once, when JAX is first used: other counts need other processes. `cores` says whether it was kept."""
    if find_spec("jax") and "jax" not in sys.modules:
        os.environ["NPROC"] = str(count)  # the size of its pool
        if count == 1:
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"


# --- the maps -------------------------------------------------------------------------------------------------------------------


def prepared(cell: Any, p: Arrays, x: Any) -> tuple[Any, Any]:
    """The matrix of f and the injection, which do not depend on z."""
    import jax.numpy as jnp

    u = x @ p["U"].T + p.get("b", 0)
    if isinstance(cell, Monotone):
        return (1 - cell.m) * jnp.eye(cell.width, dtype=x.dtype) - p["A"].T @ p["A"] + p["B"] - p["B"].T, u
    return p["W"], u


def function(cell: Any) -> Callable[[Any, tuple[Any, Any]], Any]:
    """f(z, (W, u))."""
    import jax

    if isinstance(cell, OptEq):
        return lambda z, wu: jax.nn.relu(wu[1] + z @ wu[0].T) @ wu[0]
    assert isinstance(cell, (Monotone, GaussianDEQ))
    return lambda z, wu: jax.nn.relu(wu[1] + z @ wu[0].T)


def solvers() -> Iterator[tuple[str, Callable[..., Any]]]:
    """jaxopt's, by name."""
    import jaxopt

    yield "iteration", partial(jaxopt.FixedPointIteration, maxiter=MOST)
    for memory, ridge in ((5, 1e-5), (5, 1e-10), (10, 1e-10)):
        kind = partial(jaxopt.AndersonAcceleration, maxiter=MOST, history_size=memory, ridge=ridge)
        yield f"Anderson, m {memory}, ridge {ridge:g}", kind


def linear_solvers(cell: Any, tol: float) -> Iterator[tuple[str, Callable[..., Any]]]:
    """For the backward pass, by name; CG where the Jacobian is symmetric."""
    from jaxopt import linear_solve

    if isinstance(cell, OptEq):
        yield "CG", partial(linear_solve.solve_cg, tol=tol, maxiter=MOST)
    yield "BiCGSTAB", partial(linear_solve.solve_bicgstab, tol=tol, maxiter=MOST)
    yield "GMRES", partial(linear_solve.solve_gmres, tol=tol, restart=20, maxiter=50)
    yield "normal CG", partial(linear_solve.solve_normal_cg, tol=tol, maxiter=MOST)


# --- the race -------------------------------------------------------------------------------------------------------------------


class Data:
    """The tensors of a problem as arrays."""

    def __init__(self, problem: Problem) -> None:
        import jax

        self.problem = problem
        # jaxopt's mixing makes float64 of float32 wherever float64 is allowed
        self.precision: Callable[[], AbstractContextManager[Any]] = partial(jax.enable_x64, problem.x.dtype == torch.float64)
        with self.precision():
            self.p = {name: array(value) for name, value in problem.cell.named_parameters()}
            self.x, self.c = array(problem.x), array(problem.weights())
            self.z0 = array(problem.cell.initial(problem.x))
        with torch.no_grad():
            self.size = float(torch.linalg.vector_norm(problem.layer()(problem.x)))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The value of a jitted function, when it is there."""
        import jax

        with self.precision():
            return jax.block_until_ready(function(self.p, *arguments))


def array(value: Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(value.detach().numpy())


def tensor(value: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(value))


def jitted_forward(data: Data, kind: Callable[..., Any]) -> Callable[..., Any]:
    """z to an absolute tolerance, which is an argument."""
    import jax

    cell = data.problem.cell

    def forward(p: Arrays, x: Any, tol: Any) -> Any:
        return kind(function(cell), tol=tol, implicit_diff=False, unroll=False).run(data.z0, prepared(cell, p, x)).params

    return jax.jit(forward)


def jitted_step(data: Data, kind: Callable[..., Any], linear: Callable[..., Any], tol: float) -> Callable[..., Any]:
    """(loss, z), gradients."""
    import jax

    cell = data.problem.cell
    solver = kind(function(cell), tol=tol, implicit_diff=True, implicit_diff_solve=linear)

    def loss(p: Arrays, x: Any) -> Any:
        z = solver.run(data.z0, prepared(cell, p, x)).params
        return (z * data.c).sum(), z

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def stepped(data: Data, run: Callable[[], Any]) -> Tensor:
    """z, with the gradients in the cell."""
    (_, z), gradients = run()
    for name, parameter in data.problem.cell.named_parameters():
        parameter.grad = tensor(gradients[name])
    return tensor(z)


def best(problem: Problem) -> Contestant:
    """The fastest forward solver, then with it the fastest backward solver, for which the tolerance is met."""
    data = Data(problem)
    found: dict[str, tuple[float, Callable[[], Any]]] = {}
    kinds = dict(solvers())
    for name, kind in kinds.items():
        forward = jitted_forward(data, kind)
        for factor in TIGHTER:
            tol = factor * problem.tol * data.size
            run = partial(data.call, forward, data.x, tol)
            if problem.residual(tensor(run())) <= problem.tol:
                found[name] = tol, run
                break
    if not found:
        raise LeftOut(f"misses {problem.tol:g} with all settings")
    name = min(found, key=lambda name: min(seconds(found[name][1]) for _ in range(3)))
    tol, run = found[name]
    if not problem.train:
        return Contestant(name, run, lambda: tensor(run()), in_torch=False)
    return with_backward(data, name, kinds[name], tol)


def with_backward(data: Data, name: str, kind: Callable[..., Any], tol: float) -> Contestant:
    problem, steps, results = data.problem, {}, {}
    for linear, solver in linear_solvers(problem.cell, problem.tol):
        steps[linear] = partial(data.call, jitted_step(data, kind, solver, tol), data.x)
        results[linear] = partial(stepped, data, steps[linear])
    for linear in fastest(results, problem):
        return Contestant(f"{name}; backward {linear}", steps[linear], results[linear], in_torch=False)
    raise LeftOut(f"misses {100 * problem.tol:g} in the gradient with all settings")
