"""Solve a small OptEq layer, differentiate it, and look at the Solution. Run by `make demo`; takes seconds on a laptop."""

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from opteq import Equilibrium, Solution, Stop, record
from opteq.cells import OptEq
from opteq.gradients import Implicit, JacobianFree, Phantom, Unrolled, gradient_error
from opteq.solvers import Accelerated, Anderson, Broyden, Newton, Picard
from opteq.theory import recover_problem


def solution_table(solution: Solution) -> Table:
    """One row for each sample."""
    table = Table(title="The Solution, sample by sample", caption=f"{solution.evals} evaluations of f for the whole batch")
    for heading in ("sample", "status", "steps", "|f(z) - z| / |f(z)|", "|z|"):
        table.add_column(heading, justify="right")
    rows = zip(solution.statuses, solution.steps.tolist(), solution.residual.tolist(), solution.z.detach(), strict=True)
    for i, (status, steps, residual, z) in enumerate(rows):
        table.add_row(str(i), status.name, str(steps), f"{residual:.1e}", f"{torch.linalg.vector_norm(z):.4f}")
    return table


def solver_table(cell: OptEq, x: torch.Tensor, stop: Stop) -> Table:
    """The same layer by each solver."""
    table = Table(title=f"Evaluations of f to reach {stop.rtol:g}")
    for heading in ("solver", "evaluations", "worst residual", "status"):
        table.add_column(heading)
    for solver in (Picard(), Anderson(), Broyden(), Accelerated(), Newton()):
        solution = Equilibrium(cell, solver, stop).solve(x)
        table.add_row(type(solver).__name__, str(solution.evals), f"{solution.residual.max():.1e}", solution.status.name)
    return table


def gradient_table(cell: OptEq, x: torch.Tensor, stop: Stop) -> Table:
    """The error of each gradient strategy, against the exact one in float64."""
    table = Table(title="Relative error of the gradient")
    for heading in ("gradient", "error"):
        table.add_column(heading)
    for gradient in (Implicit(), Unrolled(10), Phantom(5), JacobianFree()):
        table.add_row(repr(gradient), f"{gradient_error(Equilibrium(cell, stop=stop, gradient=gradient), x):.1e}")
    return table


def main() -> None:
    torch.manual_seed(0)
    console = Console()
    cell = OptEq(in_features=10, features=32, hidden=64, activation="relu")
    with torch.no_grad():
        cell.W *= 0.95 / torch.linalg.matrix_norm(cell.W, 2)  # near the edge of well-posedness, ||W|| = 1
    stop = Stop(rtol=1e-6, max_steps=500)
    layer = Equilibrium(cell, stop=stop)
    model = nn.Sequential(nn.Linear(4, 10), layer, nn.Linear(32, 1))

    x = torch.randn(8, 4)
    with record() as log:
        model(x).square().mean().backward()
    forward, backward = log
    console.print("f(z) = W' relu(W z + U x + b). Which problem does its equilibrium solve?", style="bold")
    console.print(f"{recover_problem(cell)}\n", markup=False, highlight=False)
    console.print(solution_table(forward))
    console.print(
        f"Backward: {backward.evals} products with I - J', solved to {backward.residual.max():.1e} by conjugate gradients.\n"
    )
    inputs = model[0](x).detach()
    console.print(solver_table(cell, inputs, stop))
    console.print(gradient_table(cell, inputs, stop))


if __name__ == "__main__":
    main()
