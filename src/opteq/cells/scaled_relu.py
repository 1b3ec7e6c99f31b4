"""The implicit network of the gamma-scaled ReLU."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from opteq.activations import find_activation
from opteq.checks import check_choice, check_integer, check_number, check_shape, invalid
from opteq.equilibrium import Cell
from opteq.operators import Dense
from opteq.splitting import ActivationMap

ScaledReLUInit = Literal["identity", "scaled_identity", "half_normal"]


class ScaledReLU(Cell):
    """z = relu(gamma z A + relu(x W)), rows are samples: a contraction when gamma ||A|| < 1.

    `init`: "identity" draws W ~ N(0, 1/m) and takes A = I (Section 7); "scaled_identity" the same W with A = ||W|| I
    (Section 5.1); "half_normal" draws W ~ N(0, 1) and A ~ |N(0, 1)| (Eq. 27), whose norm is about 0.8 m, so that gamma must be
    below 1.25 / m. Parameters W [in_features, width], A [width, width]. Gamma-scaled ReLU implicit networks.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import ScaledReLU
        >>> cell, x = ScaledReLU(4, 32, gamma=0.5), torch.randn(5, 4)
        >>> z = Equilibrium(cell, stop=Stop(rtol=1e-6))(x)  # with A = I: relu(x W) / (1 - gamma)
        >>> torch.allclose(z, 2 * cell.features(x), atol=1e-4)
        True
    """

    def __init__(self, in_features: int, width: int, *, gamma: float = 0.1, init: ScaledReLUInit = "identity") -> None:
        super().__init__()
        check_integer(self, "in_features", in_features, 1)
        check_integer(self, "width", width, 1)
        check_number(self, "gamma", gamma, 0.0, open_low=True)
        check_choice(self, "init", init, get_args(ScaledReLUInit))
        self.in_features, self.width, self.gamma, self.init = in_features, width, float(gamma), init
        self.state_shape = (width,)
        self.activation = find_activation(self, "relu")
        self.W = nn.Parameter(torch.empty(in_features, width))
        self.A = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W and A as `init` says."""
        nn.init.normal_(self.W, std=1.0 if self.init == "half_normal" else 1 / math.sqrt(self.width))
        if self.init == "half_normal":
            nn.init.normal_(self.A).abs_()
        else:
            nn.init.eye_(self.A).mul_(torch.linalg.matrix_norm(self.W, 2) if self.init == "scaled_identity" else 1.0)

    def features(self, x: Tensor) -> Tensor:
        """Phi = relu(x W)."""
        check_shape(self, "x", x, (self.in_features,))
        dtype = self.promoted(x)
        return torch.relu(x.to(dtype) @ self.W.to(dtype))

    def bind(self, x: Tensor) -> ActivationMap:
        return ActivationMap(Dense(self.gamma * self.A.T), self.activation, self.features(x))

    def closed_form(self, x: Tensor) -> Tensor:
        """Z = Phi (I - gamma A)^-1, the equilibrium when A >= 0 and the spectral radius of gamma A is below 1 (Lemma 5.1)."""
        if bool((self.A < 0).any()):
            raise ValueError(invalid("closed_form", "A", "nonnegative in every entry", f"a least entry of {self.A.min().item():g}"))
        radius = self.gamma * torch.linalg.eigvals(self.A.detach()).abs().max().item()
        if not radius < 1:
            raise ValueError(invalid("closed_form", "A", "of a spectral radius below 1 / gamma", f"gamma rho(A) = {radius:g}"))
        Phi = self.features(x)
        identity = torch.eye(self.width, dtype=Phi.dtype, device=Phi.device)
        Z: Tensor = torch.linalg.solve(identity - self.gamma * self.A.to(Phi.dtype), Phi, left=False)
        return Z

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, width={self.width}, gamma={self.gamma:g}, init={self.init!r}"
