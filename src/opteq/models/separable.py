"""OptEq layers of separable convolutions with as many channels as ImageNet needs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.activations import Activation
from opteq.batch import blank_images, quick_images
from opteq.cells import DepthwiseOptEq
from opteq.cells.optimization import OptEqCell
from opteq.models.parts import check_images
from opteq.operators import Conv, Operator


@dataclass(frozen=True)
class Chain(Operator):
    """z -> W_n ... W_1 z."""

    parts: tuple[Operator, ...]

    def __call__(self, z: Tensor) -> Tensor:
        for part in self.parts:
            z = part(z)
        return z

    def adjoint(self, s: Tensor) -> Tensor:
        for part in reversed(self.parts):
            s = part.adjoint(s)
        return s


@dataclass(frozen=True)
class Stack(Operator):
    """z -> (W_1 z, ..., W_n z), one below the other, all with as many channels."""

    parts: tuple[Operator, ...]

    def __call__(self, z: Tensor) -> Tensor:
        return torch.cat([part(z) for part in self.parts], dim=1)

    def adjoint(self, s: Tensor) -> Tensor:
        first, *others = (part.adjoint(piece) for part, piece in zip(self.parts, s.chunk(len(self.parts), dim=1), strict=True))
        return sum(others, start=first)


@torch.no_grad()
def estimated_norm(operator: Operator, channels: int, like: Tensor, *, side: int = 8, steps: int = 10) -> Tensor:
    """About ||W||, from below: the power method on W'W, from a random image of side x side."""
    z = torch.randn(1, channels, side, side, dtype=like.dtype, device=like.device)
    for _ in range(steps):
        z = operator.adjoint(operator(z / torch.linalg.vector_norm(z)))
    norm: Tensor = torch.linalg.vector_norm(z).sqrt()
    return norm


def _draw_injection(kernels: Iterable[Tensor], b: Tensor) -> None:
    """U such that U x is about as long as x, however many factors it has: what follows them has no norm that would mend it."""
    for kernel in kernels:
        nn.init.normal_(kernel, std=kernel[0].numel() ** -0.5)
    nn.init.zeros_(b)


class QuickDepthwiseOptEq(DepthwiseOptEq):
    """DepthwiseOptEq whose ||W|| begins at an estimated 1/2: a certified one takes ten seconds for 512 channels."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.W1, std=1 / self.kernel_size)
        nn.init.normal_(self.W2, std=self.channels**-0.5)
        with torch.no_grad():
            self.W2.mul_(0.5 / estimated_norm(self._unconstrained(), self.channels, self.W2))
        _draw_injection((self.U1, self.U2), self.b)


class TwofoldOptEq(OptEqCell):
    """z = W' sigma(W z + U x + b) with W = P2 D2 P1 D1: D1 two kernels of 5 x 5 a channel, D2 one of 3 x 3, P1 and P2 matrices
    across channels; U alike.

    Parameters W, a list of D1 [2 channels, 1, 5, 5], P1 [hidden, 2 channels, 1, 1], D2 [hidden, 1, 3, 3] and
    P2 [hidden, hidden, 1, 1]; U, the same for in_channels; b [hidden]. ||W|| begins at an estimated 1/2.
    Optimization induced equilibrium networks, Table 6, OptEq-Middle.
    """

    def __init__(
        self, in_channels: int, channels: int, hidden: int, *, activation: str | Activation = "relu", alpha: float = 1.0
    ) -> None:
        sizes = {"in_channels": in_channels, "channels": channels, "hidden": hidden}
        super().__init__(sizes, activation, alpha, mu=1.0, constrained=False, margin=0.0)
        self.in_channels, self.channels, self.hidden = in_channels, channels, hidden
        self.W = nn.ParameterList(_kernels(channels, hidden))
        self.U = nn.ParameterList(_kernels(in_channels, hidden))
        self.b = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W and scale its last factor to a norm of about 1/2."""
        for kernel in self.W:
            nn.init.normal_(kernel, std=kernel[0].numel() ** -0.5)
        with torch.no_grad():
            self.W[-1].mul_(0.5 / estimated_norm(self.operator(), self.channels, self.b))
        _draw_injection(self.U, self.b)

    def operator(self) -> Chain:
        return _chain(list(self.W), self.channels)

    def injection(self, x: Tensor) -> Tensor:
        check_images(self, x, self.in_channels, 1)
        dtype = self.promoted(x)
        product: Tensor = _chain([kernel.to(dtype) for kernel in self.U], self.in_channels)(quick_images(x.to(dtype)))
        return product + self.b.to(dtype)[:, None, None]

    def initial(self, x: Tensor) -> Tensor:
        check_images(self, x, self.in_channels, 1)
        return blank_images(x, self.channels, self.promoted(x))


def _kernels(channels: int, hidden: int) -> list[Tensor]:
    """D1, P1, D2, P2, empty."""
    shapes = [(2 * channels, 1, 5, 5), (hidden, 2 * channels, 1, 1), (hidden, 1, 3, 3), (hidden, hidden, 1, 1)]
    return [torch.empty(shape) for shape in shapes]


def _chain(kernels: list[Tensor], channels: int) -> Chain:
    D1, P1, D2, P2 = kernels
    twice = Stack(tuple(Conv(kernel, groups=channels) for kernel in D1.chunk(2)))  # one kernel a channel at a time is fastest
    return Chain((twice, Conv(P1), Conv(D2, groups=len(D2)), Conv(P2)))
