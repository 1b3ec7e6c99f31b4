"""Readout: a linear output on an equilibrium, the network of the convergence theory."""

import torch
from torch import Tensor, nn

from opteq.cells import ScaledReLU
from opteq.checks import check_instance, invalid
from opteq.equilibrium import Cell, Equilibrium, OnFailure
from opteq.solution import Solution, Stop
from opteq.solver import Solver

__all__ = ["Readout"]


def tight_stop(dtype: torch.dtype) -> Stop:
    """How far a Readout solves by default: to 1e-12 in float64, else to 100 times the precision, in at most 2000 steps."""
    return Stop(rtol=1e-12 if dtype == torch.float64 else 100 * torch.finfo(dtype).eps, max_steps=2000)


class Readout(nn.Module):
    """y = a'z with z = f(z, x): the network of the convergence theory. forward(x) gives [batch].

    a [width] begins as the paper of its cell has it: 0 for ScaledReLU (but for its Eq. 27), N(0, 1/width) for others.
    `stop`: by default the equilibrium is solved to 1e-12 (100 times the precision for dtypes other than float64), so that theorems
    can be checked on it.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> readout = Readout(GaussianDEQ(4, 32)).double()
        >>> x = torch.randn(5, 4, dtype=torch.float64)
        >>> readout(x).shape, bool(readout.solve(x).residual.max() <= 1e-12)
        (torch.Size([5]), True)
    """

    def __init__(self, cell: Cell, solver: Solver | None = None, stop: Stop | None = None, on_failure: OnFailure = "warn") -> None:
        super().__init__()
        check_instance(self, "cell", cell, Cell, "a Cell")
        if len(getattr(cell, "state_shape", ())) != 1:
            expected = "a cell whose states are vectors; put nn.Flatten and nn.Linear behind others"
            raise ValueError(invalid(self, "cell", expected, type(cell).__name__))
        Equilibrium(cell, solver, stop, on_failure=on_failure)  # checks the rest
        self.cell = cell
        self.solver, self.stop, self.on_failure = solver, stop, on_failure
        like = next(cell.parameters(), torch.empty(0))
        self.a = nn.Parameter(torch.empty(cell.state_shape, dtype=like.dtype, device=like.device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a; the cell is left alone."""
        if isinstance(self.cell, ScaledReLU) and self.cell.init != "half_normal":
            nn.init.zeros_(self.a)
        else:
            nn.init.normal_(self.a, std=self.a.numel() ** -0.5)

    def solve(self, x: Tensor, z0: Tensor | None = None) -> Solution:
        """The equilibrium with its status; z carries derivatives."""
        stop = tight_stop(self.cell.promoted(x)) if self.stop is None else self.stop
        return Equilibrium(self.cell, self.solver, stop, on_failure=self.on_failure).solve(x, z0)

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        """y, one number a sample."""
        z = self.solve(x, z0).z
        return z @ self.a.to(z.dtype)
