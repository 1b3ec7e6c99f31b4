"""The problem that an equilibrium solves, and what follows from it."""

from opteq.theory.objective import envelope, inclusion_residual, objective
from opteq.theory.problem import Problem, Requirement, recover_problem
from opteq.theory.rewrite import ProxTest, UnitLayers, WeightTied, from_feedforward, is_prox, solve_factor, unit_layers, weight_tied

__all__ = [
    "Problem",
    "ProxTest",
    "Requirement",
    "UnitLayers",
    "WeightTied",
    "envelope",
    "from_feedforward",
    "inclusion_residual",
    "is_prox",
    "objective",
    "recover_problem",
    "solve_factor",
    "unit_layers",
    "weight_tied",
]
