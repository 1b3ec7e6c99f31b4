"""OptEq: Assumption 5, which can be checked, and why Theorem 6 gives no guarantee that can."""

import math

import torch
from torch import Tensor, nn

from opteq.cells.optimization import OptEqCell
from opteq.checks import all_finite, check_floating, invalid
from opteq.models import Readout
from opteq.operators import Dense
from opteq.spectral import Evidence
from opteq.theory.certificates.conditions import Certificate, Condition
from opteq.theory.certificates.measure import check_parameters
from opteq.theory.common import norm_by_formula

__all__ = ["check_assumption", "find_layers"]

_WHY = (
    "Theorem 6 gives no guarantee that can be checked, even where every condition above holds: (a) Lemma 16 bounds the largest "
    "singular value of dz/db from below where its proof needs the smallest, and the statement is false: two equal inputs with the "
    "labels y + 1 and y - 1 have a zero gradient and a positive loss; (b) its constants hide O(1)'s; (c) its Lemma 16 needs "
    "alpha K L < 1 for the K steps of the solver, and strongly monotone, smooth activations, so no ReLU.",
    "Measure instead |grad L|^2 / (2 L) along the training (a PL constant) and lambda_min of the tangent kernel (empirical_ntk).",
)


def find_layers(model: nn.Module) -> list[OptEqCell]:
    """The OptEq layers of a model, in order."""
    return [part for part in model.modules() if isinstance(part, OptEqCell)]


def check_assumption(model: nn.Module, X: Tensor, y: Tensor) -> Certificate:
    """Assumption 5: ||W_l|| <= 3/4, sigma_min(W_l) > 1/4 for each layer, a readout that is not 0, inf sigma' > 0. No guarantee.

    The bounds B_Ub, B_x and B_L of the assumption are free constants, which any parameters satisfy. For layers that are no matrices
    the smallest singular value is not known, and its condition is NaN; so is that of a norm which has no formula.
    """
    for name, value in (("X", X), ("y", y)):
        check_floating("certify", name, value)
        if not all_finite(value):
            raise ValueError(invalid("certify", name, "finite", "NaN or infinity"))
    check_parameters("certify", model)
    if y.shape[:1] != X.shape[:1]:
        raise ValueError(invalid("certify", "y", f"of shape [{len(X)}, ...], one label a row of X", list(y.shape)))
    layers = find_layers(model)
    conditions = [c for i, layer in enumerate(layers, 1) for c in _layer_conditions(layer, f"_{i}" if len(layers) > 1 else "")]
    conditions += _depth_conditions(layers)
    if isinstance(model, Readout):
        size = float(torch.linalg.vector_norm(model.a.detach()))
        conditions.append(Condition("sigma_min(W_{L+1})", "|a| > 0", size, 0.0, remedy="Begin with a readout a that is not 0."))
    loss = _loss(model, X, y)
    name = "Deep OptEq, Assumption 5 of Theorem 6"
    return Certificate(name, "assumption", None, tuple(conditions), 0.0, math.nan, 0.0, {}, (), loss, _WHY)


def _layer_conditions(layer: OptEqCell, i: str) -> list[Condition]:
    operator, sigma = layer.operator(), layer.activation
    norm = norm_by_formula(operator)
    size = math.nan if norm is None else float(norm)
    evidence: Evidence = "bound" if norm is None else norm.evidence
    least = float(torch.linalg.svdvals(operator.W.detach().double())[-1]) if isinstance(operator, Dense) else math.nan
    small = f"Scale W{i} to a norm of at most 3/4."
    spread = f"Draw W{i} with singular values in (1/4, 3/4], e.g. half an orthogonal matrix."
    steep = f"Take a strongly monotone activation, such as leaky_relu: {sigma.name} is flat somewhere."
    return [
        Condition(f"||W{i}||", f"3/4 >= ||W{i}||", 0.75, size, evidence, small),
        Condition(f"sigma_min(W{i})", f"sigma_min(W{i}) >= 1/4 + sigma_m, sigma_m > 0", least, 0.25, remedy=spread, strict=True),
        Condition(f"slope{i}", "inf sigma' > 0", sigma.strong, 0.0, remedy=steep),
        Condition(f"1-Lipschitz{i}", "1 >= sup sigma'", 1.0, sigma.lipschitz, remedy="Divide the activation by its constant."),
    ]


def _depth_conditions(layers: list[OptEqCell]) -> list[Condition]:
    """alpha K L < 1 cannot hold for an equilibrium, K -> infinity; alpha L < 1 is the least it asks for, with K = 1."""
    alpha = max(float(torch.as_tensor(layer.alpha).detach()) for layer in layers)
    remedy = "Lower alpha: Lemma 16 assumes alpha K L < 1 for K steps of the solver, here checked for K = 1 only."
    return [Condition("alpha K L", "1 > alpha K L at K = 1", 1.0, alpha * len(layers), remedy=remedy, strict=True)]


def _loss(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """|y^ - y|^2 / 2 where the model gives outputs of the shape of y; NaN otherwise."""
    if not isinstance(model, Readout):
        return math.nan
    with torch.no_grad():
        y_hat = model(X)
    return float((y_hat - y).square().sum()) / 2 if y_hat.shape == y.shape else math.nan
