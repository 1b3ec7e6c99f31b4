"""OptEq: a layer whose equilibrium minimises a convex function."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from opteq.activations import Activation, find_activation
from opteq.checks import check_integer, check_number, check_shape
from opteq.equilibrium import Cell
from opteq.solve import Jacobian, Map, per_sample


@dataclass(frozen=True)
class OptEqMap(Map):
    """z -> (alpha / mu) W' sigma(W z + u) + (1 - alpha) z, with u = U x + b."""

    closed: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True
    W: Tensor  # [hidden, features]
    sigma: Activation
    alpha: float
    mu: float
    u: Tensor = per_sample()  # [batch, hidden]

    def __call__(self, z: Tensor) -> Tensor:
        return self._blend(self.sigma(torch.nn.functional.linear(z, self.W) + self.u), z)

    def linearize(self, z: Tensor) -> Jacobian:
        """J = (alpha / mu) W' D W + (1 - alpha) I, D = diag(sigma'(W z + u)): symmetric."""
        slope = self.sigma.derivative(torch.nn.functional.linear(z, self.W) + self.u)

        def product(v: Tensor) -> Tensor:
            return self._blend(slope * torch.nn.functional.linear(v, self.W), v)

        return Jacobian(jvp=product, vjp=product, symmetric=True)

    def _blend(self, s: Tensor, z: Tensor) -> Tensor:
        out = s @ self.W
        out = out if self.alpha == self.mu else out * (self.alpha / self.mu)
        return out if self.alpha == 1 else out + (1 - self.alpha) * z


class OptEq(Cell):
    """z = (1 / mu) W' sigma(W z + U x + b), the minimiser of a convex function when mu > L_sigma ||W||^2.

    `alpha` < 1 adds a skip connection, alpha f(z) + (1 - alpha) z, with the same equilibrium. W begins with a norm of about 1/2.
    Optimization induced equilibrium networks, Theorem 1.
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        hidden: int,
        *,
        activation: str | Activation = "relu",
        alpha: float = 1.0,
        mu: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("features", features), ("hidden", hidden)):
            check_integer(self, name, value, 1)
        check_number(self, "alpha", alpha, 0.0, 1.0, open_low=True)
        check_number(self, "mu", mu, 0.0, open_low=True)
        self.in_features, self.features, self.hidden = in_features, features, hidden
        self.activation = find_activation(self, activation)
        self.alpha, self.mu = alpha, mu
        self.state_shape = (features,)
        self.W = nn.Parameter(torch.empty(hidden, features))
        self.U = nn.Parameter(torch.empty(hidden, in_features))
        self.b = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W of norm about 1/2, U and b as nn.Linear does."""
        nn.init.normal_(self.W, std=0.5 / (math.sqrt(self.hidden) + math.sqrt(self.features)))
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.U, -bound, bound)
        nn.init.uniform_(self.b, -bound, bound)

    def bind(self, x: Tensor) -> OptEqMap:
        check_shape(self, "x", x, (self.in_features,))
        dtype = self.promoted(x)
        u = torch.nn.functional.linear(x.to(dtype), self.U.to(dtype), self.b.to(dtype))
        return OptEqMap(self.W, self.activation, self.alpha, self.mu, u)

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.features}, {self.hidden}"
        return f"{sizes}, activation={self.activation.name}, alpha={self.alpha}, mu={self.mu}"
