"""One residual block with group norm, iterated to its equilibrium."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from opteq.cells.function import NetworkMap
from opteq.cells.norms import GroupNorm
from opteq.checks import check_choice, check_integer, invalid
from opteq.equilibrium import Cell

ResidualInit = Literal["small", "standard"]


class Residual(Cell):
    """z = norm(relu(z + norm(x + W2 * norm(relu(W1 * z))))) for images x and z of the same shape, of any size.

    `init` "small" draws the weights from N(0, 0.01^2), so that x outweighs W2 * (...) and the iterates settle at once; "standard"
    from N(0, 1), where they keep wandering. Only W2 matters for that: the norm after W1 cancels its scale. The thesis writes
    N(0, 0.01); read as a variance of 0.01, its iterates do not settle. Parameters W1 [inner, channels, k, k],
    W2 [channels, inner, k, k]; norm1, norm2, norm3 are group norms. The tangent kernel of monotone DEQs, Eq. (4.1).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import Residual
        >>> print(Equilibrium(Residual(8, 16)).solve(torch.randn(2, 8, 6, 6)).status)
        Status.CONVERGED
    """

    def __init__(self, channels: int, inner: int, kernel_size: int = 3, *, groups: int = 8, init: ResidualInit = "small") -> None:
        super().__init__()
        for name, value in (("channels", channels), ("inner", inner), ("kernel_size", kernel_size), ("groups", groups)):
            check_integer(self, name, value, 1)
        if kernel_size % 2 == 0:
            raise ValueError(invalid(self, "kernel_size", "odd", kernel_size))
        if channels % groups or inner % groups:
            raise ValueError(invalid(self, "groups", f"a divisor of channels, {channels}, and of inner, {inner}", groups))
        check_choice(self, "init", init, get_args(ResidualInit))
        self.channels, self.inner, self.kernel_size, self.groups, self.init = channels, inner, kernel_size, groups, init
        self.W1 = nn.Parameter(torch.empty(inner, channels, kernel_size, kernel_size))
        self.W2 = nn.Parameter(torch.empty(channels, inner, kernel_size, kernel_size))
        self.norm1 = GroupNorm(groups, inner)
        self.norm2 = GroupNorm(groups, channels)
        self.norm3 = GroupNorm(groups, channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W1 and W2 as `init` says; the gains of the norms are 1, their shifts 0."""
        for W in (self.W1, self.W2):
            nn.init.normal_(W, std=0.01 if self.init == "small" else 1.0)
        for norm in (self.norm1, self.norm2, self.norm3):
            norm.reset_parameters()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), zeros around the image."""
        padding = self.kernel_size // 2
        inner = self.norm1(relu(conv2d(z, self.W1, padding=padding)))
        out: Tensor = self.norm3(relu(z + self.norm2(x + conv2d(inner, self.W2, padding=padding))))
        return out

    def initial(self, x: Tensor) -> Tensor:
        self._check(x)
        return torch.zeros_like(x, dtype=self.promoted(x))

    def bind(self, x: Tensor) -> NetworkMap:
        self._check(x)
        return NetworkMap.of(self, x)

    def _check(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(invalid(self, "x", f"of shape [batch, {self.channels}, height, width]", list(x.shape)))
        if min(self.channels, self.inner) // self.groups * x.shape[2] * x.shape[3] < 2:
            raise ValueError(invalid(self, "x", "larger, or the groups fewer: each must hold two numbers or more", list(x.shape)))

    def extra_repr(self) -> str:
        return f"channels={self.channels}, inner={self.inner}, kernel_size={self.kernel_size}, init={self.init!r}"
