"""Deep equilibrium networks whose output is a solution that you can trust: status, exact gradients, honest residuals."""

from opteq.autograd import record
from opteq.equilibrium import Cell, ConvergenceWarning, Equilibrium
from opteq.solve import ConvergenceError, Map, Solution, Solver, Status, Stop, per_sample, solve

__version__ = "0.1.0"

__all__ = [
    "Cell",
    "ConvergenceError",
    "ConvergenceWarning",
    "Equilibrium",
    "Map",
    "Solution",
    "Solver",
    "Status",
    "Stop",
    "per_sample",
    "record",
    "solve",
]
