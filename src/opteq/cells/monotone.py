"""Monotone networks: z = sigma(W z + U x + b) with W = (1 - m) I - A'A + B - B', so that I - W >= m I for any A and B."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from opteq.activations import Activation, find_activation
from opteq.checks import check_instance, check_integer, check_number, check_shape, invalid
from opteq.equilibrium import Cell
from opteq.operators import Dense
from opteq.splitting import SplitMap

MonotoneInit = Literal["linear", "normal"]


def _proximal(owner: object, given: str | Activation) -> Activation:
    """The activation, which must be the proximal operator of a convex function."""
    activation = find_activation(owner, given, monotone=True)
    if activation.lipschitz > 1:
        expected = "monotone and 1-Lipschitz, so that it is a proximal operator"
        raise ValueError(invalid(owner, "activation", expected, f"{activation.name} with lipschitz {activation.lipschitz:g}"))
    return activation


class Monotone(Cell):
    """z = sigma(W z + U x + b), W = (1 - m) I - A'A + B - B': one equilibrium for every A and B, also where ||W|| > 1.

    `init`: "linear" draws A, B and U as nn.Linear does (the reference implementation), "normal" from N(0, 1/n), U from N(0, 1/d);
    b begins at 0. Parameters A, B [width, width], U [width, in_features], b [width] (None with `bias=False`).
    Winston and Kolter (2020); the tangent kernel of monotone DEQs, Definition 3.2.1.
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
        super().__init__()
        check_integer(self, "in_features", in_features, 1)
        check_integer(self, "width", width, 1)
        check_number(self, "m", m, 0.0, open_low=True)
        check_instance(self, "bias", bias, bool, "a bool")
        if init not in get_args(MonotoneInit):
            raise ValueError(invalid(self, "init", " or ".join(map(repr, get_args(MonotoneInit))), init))
        self.in_features, self.width, self.m, self.init = in_features, width, float(m), init
        self.state_shape = (width,)
        self.activation = _proximal(self, activation)
        self.A = nn.Parameter(torch.empty(width, width))
        self.B = nn.Parameter(torch.empty(width, width))
        self.U = nn.Parameter(torch.empty(width, in_features))
        self.b = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A, B and U as `init` says; b = 0."""
        for parameter in (self.A, self.B, self.U):
            scale = 1 / math.sqrt(parameter.shape[1])
            if self.init == "normal":
                nn.init.normal_(parameter, std=scale)
            else:
                nn.init.uniform_(parameter, -scale, scale)
        if self.b is not None:
            nn.init.zeros_(self.b)

    def matrix(self) -> Tensor:
        """W = (1 - m) I - A'A + B - B'."""
        identity = torch.eye(self.width, dtype=self.A.dtype, device=self.A.device)
        return (1 - self.m) * identity - self.A.T @ self.A + self.B - self.B.T

    def injection(self, x: Tensor) -> Tensor:
        """U x + b, in the promoted dtype."""
        check_shape(self, "x", x, (self.in_features,))
        dtype = self.promoted(x)
        return linear(x.to(dtype), self.U.to(dtype), None if self.b is None else self.b.to(dtype))

    def bind(self, x: Tensor) -> SplitMap:
        return SplitMap(Dense(self.matrix()), self.activation, self.injection(x), m=self.m)

    def extra_repr(self) -> str:
        bias = "" if self.b is not None else ", bias=False"
        return (
            f"in_features={self.in_features}, width={self.width}, m={self.m:g}, activation={self.activation.name}{bias}, "
            f"init={self.init!r}"
        )
