"""The problem that an equilibrium solves, and what follows from it."""

from opteq.theory.objective import envelope, inclusion_residual, objective
from opteq.theory.problem import Problem, Requirement, recover_problem

__all__ = ["Problem", "Requirement", "envelope", "inclusion_residual", "objective", "recover_problem"]
