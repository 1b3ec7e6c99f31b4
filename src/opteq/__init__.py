"""Deep equilibrium networks whose output is a solution that you can trust: status, exact gradients, honest residuals."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from opteq.equilibrium import Cell, ConvergenceWarning, Equilibrium
from opteq.logs import record
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
    "certify",
    "per_sample",
    "record",
    "solve",
]

_SUBMODULES = (
    "activations",
    "cells",
    "data",
    "diagnostics",
    "estimators",
    "experiments",
    "gradients",
    "grids",
    "linear",
    "models",
    "recipes",
    "regularizers",
    "report",
    "runs",
    "solvers",
    "spectral",
    "theory",
    "training",
)


if TYPE_CHECKING:
    from opteq.theory.certificates import certify


def __getattr__(name: str) -> Any:
    """Import a submodule when it is first used, so that `import opteq` stays quick."""
    if name == "certify":
        return import_module("opteq.theory.certificates").certify
    if name in _SUBMODULES:
        return import_module(f"opteq.{name}")
    raise AttributeError(f"module 'opteq' has no attribute {name!r}")
