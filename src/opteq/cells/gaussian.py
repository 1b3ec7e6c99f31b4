"""The ReLU DEQ with Gaussian weights."""

import math

import torch
from torch import Tensor, nn

from opteq.activations import find_activation
from opteq.checks import check_integer, check_number, check_shape
from opteq.equilibrium import Cell
from opteq.operators import Dense
from opteq.products import linear
from opteq.splitting import ActivationMap


class GaussianDEQ(Cell):
    """z = relu(W z + U x), a contraction when ||W|| < 1.

    Begins with W ~ N(0, 2 sigma_w2 / m) and U ~ N(0, 2 / d), so that ||W|| is about 2 sqrt(2 sigma_w2): below 1 for sigma_w2 < 1/8.
    Inputs of norm sqrt(d) give states of norm about sqrt(m). Parameters W [width, width], U [width, in_features].
    Gaussian-initialised DEQs, Assumption 1.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.data import norm_sqrt_d
        >>> z = Equilibrium(GaussianDEQ(16, 1024))(norm_sqrt_d(torch.randn(5, 16)))
        >>> bool((z.norm(dim=1) / 1024**0.5 - 1).abs().max() < 0.2)
        True
    """

    def __init__(self, in_features: int, width: int, *, sigma_w2: float = 0.08) -> None:
        super().__init__()
        check_integer(self, "in_features", in_features, 1)
        check_integer(self, "width", width, 1)
        check_number(self, "sigma_w2", sigma_w2, 0.0)
        self.in_features, self.width, self.sigma_w2 = in_features, width, float(sigma_w2)
        self.state_shape = (width,)
        self.activation = find_activation(self, "relu")
        self.W = nn.Parameter(torch.empty(width, width))
        self.U = nn.Parameter(torch.empty(width, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W and U as the paper does."""
        nn.init.normal_(self.W, std=math.sqrt(2 * self.sigma_w2 / self.width))
        nn.init.normal_(self.U, std=math.sqrt(2 / self.in_features))

    def bind(self, x: Tensor) -> ActivationMap:
        check_shape(self, "x", x, (self.in_features,))
        dtype = self.promoted(x)
        return ActivationMap(Dense(self.W), self.activation, linear(x.to(dtype), self.U.to(dtype)))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, width={self.width}, sigma_w2={self.sigma_w2:g}"
