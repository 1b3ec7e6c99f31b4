"""Networks of a fixed depth, to compare equilibria with."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from opteq.activations import Activation, find_activation
from opteq.checks import check_integer, check_shape, invalid
from opteq.equilibrium import Cell, Equilibrium, OnFailure
from opteq.gradients import Unrolled
from opteq.models.classifier import Segmenter
from opteq.models.parts import NormKind, Scores, Strided, check_images, check_kernel, check_widths, make_norm
from opteq.solver import Solver


class FeedForward(nn.Module):
    """z_k = sigma(W_k z_{k-1} + U_k x + b_k), k = 1, ..., L, z_0 = 0: a network whose every layer is given x. forward(x) is z_L.

    Dense, x [batch, in_features], or, with a `kernel_size`, convolutional, x [batch, in_features, height, width], zeros around.
    `hidden` are the widths of the layers. Parameters W (a list: W_2, ..., W_L; z_0 = 0 needs no W_1), U and b, all begun by He's
    rule for both inputs of a layer together. Optimization induced equilibrium networks, Eq. (1).

    Examples:
        >>> import torch
        >>> from opteq.models import FeedForward
        >>> FeedForward(4, (16, 8))(torch.randn(5, 4)).shape
        torch.Size([5, 8])
        >>> FeedForward(3, (16, 8), kernel_size=3)(torch.randn(2, 3, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    def __init__(
        self,
        in_features: int,
        hidden: tuple[int, ...],
        *,
        kernel_size: int | None = None,
        activation: str | Activation = "relu",
    ) -> None:
        super().__init__()
        check_integer(self, "in_features", in_features, 1)
        self.hidden = check_widths(self, "hidden", hidden)
        if kernel_size is not None:
            check_kernel(self, kernel_size)
        self.in_features, self.kernel_size = in_features, kernel_size
        self.activation = find_activation(self, activation)
        kernel = () if kernel_size is None else (kernel_size, kernel_size)
        self.W = nn.ParameterList(torch.empty(after, before, *kernel) for before, after in pairwise(self.hidden))
        self.U = nn.ParameterList(torch.empty(width, in_features, *kernel) for width in self.hidden)
        self.b = nn.ParameterList(torch.zeros(width) for width in self.hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W and U, of variance 2 / (number of inputs of their layer); b = 0."""
        for k, U in enumerate(self.U):
            weights = [U] if k == 0 else [U, self.W[k - 1]]
            std = math.sqrt(2 / sum(weight[0].numel() for weight in weights))
            for weight in weights:
                nn.init.normal_(weight, std=std)
            nn.init.zeros_(self.b[k])

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel_size is None:
            check_shape(self, "x", x, (self.in_features,))
        else:
            check_images(self, x, self.in_features, 1)
        z = self.activation(self._product(self.U[0], x, self.b[0]))
        for k, W in enumerate(self.W, start=1):
            z = self.activation(self._product(W, z) + self._product(self.U[k], x, self.b[k]))
        return z

    def _product(self, weight: Tensor, z: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(z, weight, bias) if self.kernel_size is None else conv2d(z, weight, bias, padding=self.kernel_size // 2)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, hidden={self.hidden}"
        return f"{sizes}, kernel_size={self.kernel_size}, activation={self.activation.name}"


class Repeated(Equilibrium):
    """z_k = f(z_{k-1}, x), k = 1, ..., `times`: the cell of an equilibrium as a weight-tied network of that depth.

    Its z carries the derivatives of all `times` steps. `solve` says how far from an equilibrium it ends.
    The tangent kernel of monotone DEQs, Section 4.2.1: repeat-6, repeat-11 and repeat-18.

    Examples:
        >>> import torch
        >>> from opteq.cells import OptEq
        >>> from opteq.models import Repeated
        >>> tied = Repeated(OptEq(4, 8, 16), times=6)
        >>> tied(torch.randn(5, 4)).shape, tied.solve(torch.randn(5, 4)).steps.tolist()
        (torch.Size([5, 8]), [6, 6, 6, 6, 6])
    """

    def __init__(self, cell: Cell, times: int, solver: Solver | None = None, on_failure: OnFailure = "warn") -> None:
        check_integer("Repeated", "times", times, 1)
        super().__init__(cell, solver, gradient=Unrolled(times), on_failure=on_failure)


class FCN(Segmenter):
    """A fully convolutional network: `Strided`, then relu(norm(W_k * .)) of the widths `hidden`, scores, bilinear upsampling.

    The extractor is that of `opteq_segmenter`; plain convolutions are in the place of the equilibrium, and the scores have no norm
    of their own, for the last of these convolutions has one. With the widths as they are the two have the same size to 1%;
    `parameters` gives another one: the whole has at most that many, with widths in the proportions of `hidden`.
    Shelhamer, Long and Darrell (2017).

    Examples:
        >>> import torch
        >>> from opteq.models import FCN
        >>> FCN(3, 5, channels=(8, 16), hidden=(16,))(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 5, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        *,
        channels: tuple[int, ...] = (64, 128, 256),
        hidden: tuple[int, ...] = (310, 620, 620),
        kernel_size: int = 3,
        norm: NormKind | None = "batch",
        parameters: int | None = None,
    ) -> None:
        widths = check_widths(self, "hidden", hidden)
        check_kernel(self, kernel_size)
        extractor = Strided(in_channels, channels, norm=norm)

        def behind(widths: tuple[int, ...]) -> nn.Sequential:
            layers: list[nn.Module] = []
            for before, after in zip((channels[-1], *widths), widths, strict=False):
                conv = nn.Conv2d(before, after, kernel_size, padding=kernel_size // 2, bias=norm is None)
                layers += [conv, make_norm(self, norm, after), nn.ReLU()]
            return nn.Sequential(nn.Sequential(*layers), Scores(widths[-1], classes))

        if parameters is not None:
            widths = fit_widths(widths, parameters - sum(p.numel() for p in extractor.parameters()), behind)
        middle, head = behind(widths)
        super().__init__(extractor, middle, head)


def fit_widths(widths: tuple[int, ...], parameters: int, build: Callable[[tuple[int, ...]], nn.Module]) -> tuple[int, ...]:
    """The largest multiple of the widths, rounded down, of which `build` makes a module of at most so many parameters.

    Examples:
        >>> from torch import nn
        >>> from opteq.models import fit_widths
        >>> fit_widths((1, 2), 100, lambda widths: nn.Linear(*widths))
        (6, 13)
    """
    check_widths("fit_widths", "widths", widths)
    check_integer("fit_widths", "parameters", parameters, 1)

    def scaled(factor: float) -> tuple[int, ...]:
        return tuple(max(1, math.floor(factor * width + 1e-9)) for width in widths)

    def fits(factor: float) -> bool:
        with torch.device("meta"):
            return sum(p.numel() for p in build(scaled(factor)).parameters()) <= parameters

    low, high = 0.0, 1.0
    if not fits(low):
        raise ValueError(invalid("fit_widths", "parameters", "enough for layers of width 1", parameters))
    while fits(high):
        low, high = high, 2 * high
    while max(widths) * (high - low) > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return scaled(low)
