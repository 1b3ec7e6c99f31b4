"""The parameters of f: cells for Equilibrium."""

from opteq.cells.function import FunctionCell

__all__ = ["FunctionCell"]
