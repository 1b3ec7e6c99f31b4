"""The problem that an equilibrium solves, kernels of training, bounds; `certificates` is a package of its own."""

from importlib import import_module
from typing import Any

from opteq.theory.error import (
    CertifiedPredictions,
    ErrorBound,
    Interval,
    certified_interval,
    certified_predictions,
    error_bound,
)
from opteq.theory.flow import Flow, gradient_flow, predicted_loss
from opteq.theory.kernels import (
    KernelRegression,
    kernel_regression,
    least_eigenvalue,
    population_kernel,
    scaled_relu_kernel,
    tangent_limit,
)
from opteq.theory.lipschitz import CertifiedRadius, LipschitzBound, certified_radius, lipschitz_bound
from opteq.theory.ntk import empirical_ntk
from opteq.theory.objective import envelope, inclusion_residual, objective
from opteq.theory.problem import Problem, Requirement, recover_problem
from opteq.theory.prox import ProxTest, is_prox
from opteq.theory.rewrite import UnitLayers, WeightTied, from_feedforward, solve_factor, unit_layers, weight_tied

__all__ = [
    "CertifiedPredictions",
    "CertifiedRadius",
    "ErrorBound",
    "Flow",
    "Interval",
    "KernelRegression",
    "LipschitzBound",
    "Problem",
    "ProxTest",
    "Requirement",
    "UnitLayers",
    "WeightTied",
    "certified_interval",
    "certified_predictions",
    "certified_radius",
    "empirical_ntk",
    "envelope",
    "error_bound",
    "from_feedforward",
    "gradient_flow",
    "inclusion_residual",
    "is_prox",
    "kernel_regression",
    "least_eigenvalue",
    "lipschitz_bound",
    "objective",
    "population_kernel",
    "predicted_loss",
    "recover_problem",
    "scaled_relu_kernel",
    "solve_factor",
    "tangent_limit",
    "unit_layers",
    "weight_tied",
]


def __getattr__(name: str) -> Any:
    """Import the certificates when they are first used."""
    if name == "certificates":
        return import_module("opteq.theory.certificates")
    raise AttributeError(f"module 'opteq.theory' has no attribute {name!r}")
