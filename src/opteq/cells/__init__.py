"""The parameters of f: cells for Equilibrium."""

from opteq.cells.function import FunctionCell
from opteq.cells.optimization import OptEq

__all__ = ["FunctionCell", "OptEq"]
