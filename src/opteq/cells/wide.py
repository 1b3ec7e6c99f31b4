"""Wide OptEq: layers side by side, the limit of a deep OptEq as its steps alpha shrink."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from opteq.cells.deep import Layers
from opteq.cells.optimization import DenseOptEqMap, OptEqMap
from opteq.maps import Jacobian, Map
from opteq.operators import Dense


@dataclass(frozen=True)
class WideMap(Map):
    """z -> sum_l w_l f_l(z), f_l(z) = W_l' sigma(W_l z + u_l) / mu_l without a skip connection, the weights w_l of sum 1."""

    closed: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True
    layers: tuple[Map, ...]
    weights: tuple[float | Tensor, ...]

    def __call__(self, z: Tensor) -> Tensor:
        return _weighted(self.weights, [layer(z) for layer in self.layers])

    def linearize(self, z: Tensor) -> Jacobian:
        """J = sum_l (w_l / mu_l) W_l' D_l W_l: symmetric."""
        jacobians = [layer.linearize(z) for layer in self.layers]

        def product(v: Tensor) -> Tensor:
            return _weighted(self.weights, [jacobian.jvp(v) for jacobian in jacobians])

        return Jacobian(jvp=product, vjp=product, symmetric=True)


def _weighted(weights: tuple[float | Tensor, ...], parts: list[Tensor]) -> Tensor:
    total = weights[0] * parts[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total + weight * part
    return total


class WideOptEq(Layers):
    """sum_l alpha_l z = sum_l alpha_l W_l' sigma(W_l z + U_l x + b_l) / mu_l; for equal alpha, L z = sum_l W_l' sigma(...) / mu_l.

    The equilibrium to which that of DeepOptEq(cells) tends as all alpha_l shrink together, with fixed ratios; alpha_l here is
    only a weight. Optimization induced equilibrium networks, Theorem 3.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq, WideOptEq
        >>> print(Equilibrium(WideOptEq([OptEq(4, 8, 16), OptEq(4, 8, 12)])).solve(torch.randn(5, 4)).status)
        Status.CONVERGED
    """

    def bind(self, x: Tensor) -> Map:
        layers = self.bound(x)
        total = sum(layer.alpha for layer in layers)
        weights = tuple(layer.alpha / total for layer in layers)
        return _stacked(layers, weights) or WideMap(tuple(replace(layer, alpha=1.0) for layer in layers), weights)


def _stacked(layers: tuple[OptEqMap, ...], weights: tuple[float | Tensor, ...]) -> DenseOptEqMap | None:
    """One dense layer with the rows of all W_l, if all are dense, of one activation, and of one mu_l / w_l."""
    dense = [layer for layer in layers if isinstance(layer, DenseOptEqMap)]
    constant = [weight for weight in weights if not isinstance(weight, Tensor)]
    if len(dense) < len(layers) or len(constant) < len(layers) or len({layer.sigma for layer in dense}) > 1:
        return None
    ratios = {layer.mu / weight for layer, weight in zip(dense, constant, strict=True)}
    if len(ratios) > 1:
        return None
    W, u = torch.cat([layer.W.W for layer in dense]), torch.cat([layer.u for layer in dense], dim=1)
    return DenseOptEqMap(Dense(W), dense[0].sigma, 1.0, ratios.pop(), u)
