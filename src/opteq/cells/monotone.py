"""Monotone networks: z = sigma(W z + U x + b) with W = (1 - m) I - A'A + B - B', so that I - W >= m I for any A and B."""

import math
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from opteq.activations import Activation, find_activation
from opteq.checks import check_choice, check_instance, check_integer, check_number, check_shape, invalid
from opteq.equilibrium import Cell
from opteq.operators import Conv, Dense, MonotoneOperator, Padding
from opteq.products import linear, product
from opteq.splitting import SplitMap

MonotoneInit = Literal["linear", "normal"]


def image_size(owner: object, size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a size given as one number or two."""
    pair = (size, size) if isinstance(size, int) and not isinstance(size, bool) else size
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(invalid(owner, "size", "an integer or a pair (height, width)", size))
    for side in pair:
        check_integer(owner, "size", side, 1)
    return pair[0], pair[1]


class MonotoneCell(Cell):
    """What monotone networks have in common: the constant m > 0, an activation that is a proximal operator, the first weights.

    `init`: "linear" draws the weights as nn.Linear and nn.Conv2d do (the reference implementation), "normal" from
    N(0, 1 / fan_in); b begins at 0.
    """

    def __init__(self, sizes: dict[str, int], m: float, activation: str | Activation, init: MonotoneInit) -> None:
        super().__init__()
        for name, size in sizes.items():
            check_integer(self, name, size, 1)
        check_number(self, "m", m, 0.0, open_low=True)
        check_choice(self, "init", init, get_args(MonotoneInit))
        self.sizes, self.m, self.init = sizes, float(m), init
        self.activation = find_activation(self, activation)
        if not self.activation.monotone or self.activation.lipschitz > 1:
            expected = "monotone and 1-Lipschitz, so that it is a proximal operator"
            got = f"{self.activation.name}, of Lipschitz constant {self.activation.lipschitz:g}"
            raise ValueError(invalid(self, "activation", expected, got))

    def draw(self, weights: Iterable[Tensor], biases: Iterable[Tensor | None]) -> None:
        """The weights as `init` says; the biases 0."""
        for weight in weights:
            scale = 1 / math.sqrt(weight[0].numel())
            if self.init == "normal":
                nn.init.normal_(weight, std=scale)
            else:
                nn.init.uniform_(weight, -scale, scale)
        for bias in biases:
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        values = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{values}, m={self.m:g}, activation={self.activation.name}, init={self.init!r}"


class Monotone(MonotoneCell):
    """z = sigma(W z + U x + b), W = (1 - m) I - A'A + B - B': one equilibrium for every A and B, also where ||W|| > 1.

    `init`: "linear" or "normal", see MonotoneCell. Parameters A, B [width, width], U [width, in_features], b [width] (None with
    `bias=False`). Winston and Kolter (2020); the tangent kernel of monotone DEQs, Definition 3.2.1.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import Monotone
        >>> cell = Monotone(4, 8, m=0.5)
        >>> W = cell.matrix()
        >>> bool(torch.linalg.eigvalsh((W + W.T) / 2).max() <= 0.5 + 1e-5), Equilibrium(cell).solve(torch.randn(5, 4)).status.name
        (True, 'CONVERGED')
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        m: float = 0.1,
        activation: str | Activation = "relu",
        bias: bool = True,
        init: MonotoneInit = "linear",
    ) -> None:
        super().__init__({"in_features": in_features, "width": width}, m, activation, init)
        check_instance(self, "bias", bias, bool, "a bool")
        self.in_features, self.width = in_features, width
        self.state_shape = (width,)
        self.A = nn.Parameter(torch.empty(width, width))
        self.B = nn.Parameter(torch.empty(width, width))
        self.U = nn.Parameter(torch.empty(width, in_features))
        self.b = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A, B and U as `init` says; b = 0."""
        self.draw((self.A, self.B, self.U), (self.b,))

    def matrix(self) -> Tensor:
        """W = (1 - m) I - A'A + B - B', in the precision of the parameters: rounding to less could make I - W indefinite."""
        with torch.autocast(self.A.device.type, enabled=False):
            identity = torch.eye(self.width, dtype=self.A.dtype, device=self.A.device)
            return (1 - self.m) * identity - product(self.A.T, self.A) + self.B - self.B.T

    def injection(self, x: Tensor) -> Tensor:
        """U x + b, in the promoted dtype."""
        check_shape(self, "x", x, (self.in_features,))
        dtype = self.promoted(x)
        return linear(x.to(dtype), self.U.to(dtype), None if self.b is None else self.b.to(dtype))

    def bind(self, x: Tensor) -> SplitMap:
        return SplitMap(Dense(self.matrix()), self.activation, self.injection(x), m=self.m)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.b is not None else ", bias=False")


class MonotoneConv(MonotoneCell):
    """z = sigma(W z + U * x + b), W z = (1 - m) z - A'A z + B z - B'z with convolutions A and B, on images of a fixed size.

    `size`: height and width, or one number for both. With `padding="circular"` the resolvent is a small inverse for each
    frequency and Peaceman-Rachford applies; with "zeros" it is not known, and other solvers must do.
    Parameters A, B [channels, channels, k, k], U [channels, in_channels, k, k], b [channels]. Winston and Kolter (2020).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import MonotoneConv
        >>> Equilibrium(MonotoneConv(3, 6, size=8))(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 6, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        size: int | tuple[int, int],
        *,
        kernel_size: int = 3,
        m: float = 0.1,
        activation: str | Activation = "relu",
        padding: Padding = "circular",
        init: MonotoneInit = "linear",
    ) -> None:
        sizes = {"in_channels": in_channels, "channels": channels, "kernel_size": kernel_size}
        super().__init__(sizes, m, activation, init)
        check_choice(self, "padding", padding, get_args(Padding))
        self.in_channels, self.channels, self.padding = in_channels, channels, padding
        self.size = image_size(self, size)
        self.state_shape = (channels, *self.size)
        k = (kernel_size, kernel_size)
        self.A = nn.Parameter(torch.empty(channels, channels, *k))
        self.B = nn.Parameter(torch.empty(channels, channels, *k))
        self.U = nn.Parameter(torch.empty(channels, in_channels, *k))
        self.b = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A, B and U as `init` says; b = 0."""
        self.draw((self.A, self.B, self.U), (self.b,))

    def injection(self, x: Tensor) -> Tensor:
        """U * x + b, in the promoted dtype."""
        check_shape(self, "x", x, (self.in_channels, *self.size))
        dtype = self.promoted(x)
        return Conv(self.U.to(dtype), self.padding)(x.to(dtype)) + self.b.to(dtype)[:, None, None]

    def bind(self, x: Tensor) -> SplitMap:
        W = MonotoneOperator(self.m, Conv(self.A, self.padding), Conv(self.B, self.padding))
        return SplitMap(W, self.activation, self.injection(x), m=self.m)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, size={self.size}, padding={self.padding!r}"
