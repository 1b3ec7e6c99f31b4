"""The networks of the papers' experiments on small images, as functions of their sizes."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from torch import nn

from opteq.activations import Activation
from opteq.cells import ConvOptEq, DeepOptEq, MonotoneConv, Residual
from opteq.cells.deep import Evaluation, Mode
from opteq.cells.monotone import image_size
from opteq.cells.residual import ResidualInit
from opteq.checks import check_instance, invalid
from opteq.equilibrium import Equilibrium, OnFailure
from opteq.gradients import Gradient
from opteq.models.baselines import FeedForward, Repeated, fit_widths
from opteq.models.classifier import Classifier, Segmenter
from opteq.models.ode import ConvField, NeuralODE
from opteq.models.parts import NormKind, Pooled, Scores, Stem, Strided, check_widths
from opteq.regularizers import Regularizer
from opteq.solution import Stop
from opteq.solver import Solver

Draw: TypeAlias = Literal["half", "conv2d"]


def _draw(layers: Sequence[ConvOptEq], draw: Draw, constrained: bool) -> None:
    """W as nn.Conv2d draws it, if that was asked for."""
    if draw not in get_args(Draw):
        raise ValueError(invalid("deep_opteq", "draw", " or ".join(map(repr, get_args(Draw))), draw))
    if draw == "conv2d":
        if constrained:
            raise ValueError(invalid("deep_opteq", "draw", "'half' for constrained layers, whose norm is at most 1", draw))
        for layer in layers:
            nn.init.kaiming_uniform_(layer.W, a=math.sqrt(5))


def deep_opteq(
    in_channels: int,
    classes: int,
    *,
    channels: int = 29,
    hidden: tuple[int, ...] = (16, 32, 64, 64, 128),
    kernel_size: int = 3,
    stride: int = 2,
    extractor_kernel: int | None = None,
    pool: int = 2,
    norm: NormKind | None = "batch",
    alpha: float = 0.8,
    activation: str | Activation = "relu",
    regularizer: Regularizer | None = None,
    mode: Mode = "gradient",
    gamma: float = 0.1,
    evaluation: Evaluation = "batch",
    learn_alpha: bool = False,
    constrained: bool = False,
    draw: Draw = "half",
    solver: Solver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = None,
    on_failure: OnFailure = "warn",
) -> Classifier:
    """Deep OptEq on images: a single convolution, `channels` at the equilibrium of layers of the widths `hidden`, pooling, linear.

    With the sizes as they are it has 161,670 parameters on CIFAR-10, for Table 4's 162k; `hidden=(16, 32, 64, 128, 128), pool=4`
    has 198,622, for the 199k of Tables 3, 5 and 8; `channels=84, hidden=(48, 96, 192, 192, 384)` has 1,387,594, for 1.4M.
    `stride` and `extractor_kernel` are those of the extractor (28 x 28 or 32 x 32 images: 2; 8 x 8: 1), `norm` one behind the
    extractor and one before the pooling, never inside f: "batch" learns much faster than None. `draw`: how W begins, at norms of
    about 1/2, where f forgets z within two steps, or as nn.Conv2d draws it, at 1 to 1.8 with these sizes, where it does not but
    nothing promises an equilibrium. The rest is as in DeepOptEq, ConvOptEq and Equilibrium.
    Optimization induced equilibrium networks, Section 7.

    Examples:
        >>> import torch
        >>> from opteq.models import deep_opteq
        >>> model = deep_opteq(1, 10, channels=8, hidden=(8, 16), stride=1, constrained=True)
        >>> x = torch.randn(2, 1, 8, 8)
        >>> model(x).shape, model.solve(x).status.name
        (torch.Size([2, 10]), 'CONVERGED')
    """
    layers = [
        ConvOptEq(channels, channels, width, kernel_size, activation=activation, alpha=alpha, constrained=constrained)
        for width in check_widths("deep_opteq", "hidden", hidden)
    ]
    _draw(layers, draw, constrained)
    cell = DeepOptEq(layers, regularizer=regularizer, mode=mode, learn_alpha=learn_alpha, gamma=gamma, evaluation=evaluation)
    return Classifier(
        Stem(in_channels, channels, kernel_size=extractor_kernel, stride=stride, norm=norm),
        Equilibrium(cell, solver, stop, gradient, on_failure),
        Pooled(channels, classes, pool=pool, norm=norm),
    )


def feed_forward(
    in_channels: int,
    classes: int,
    *,
    channels: int = 29,
    hidden: tuple[int, ...] = (11, 22, 44, 88, 88),
    kernel_size: int = 3,
    stride: int = 2,
    extractor_kernel: int | None = None,
    pool: int = 4,
    norm: NormKind | None = "batch",
    activation: str | Activation = "relu",
    parameters: int | None = None,
) -> Classifier:
    """The DNN that Table 3 compares with deep OptEq: its extractor and head, `FeedForward` layers between them.

    At equal widths such layers have more parameters: the network as it is has 197,436 on CIFAR-10, as near as widths in the
    proportions of Table 3 get to the size of its deep OptEq. `parameters` gives another size, for which `hidden` is scaled; the
    whole has at most that many.

    Examples:
        >>> import torch
        >>> from opteq.models import count_parameters, feed_forward
        >>> model = feed_forward(3, 10, parameters=50_000)
        >>> model(torch.randn(2, 3, 32, 32)).shape, count_parameters(model)["total"] <= 50_000
        (torch.Size([2, 10]), True)
    """
    extractor = Stem(in_channels, channels, kernel_size=extractor_kernel, stride=stride, norm=norm)
    widths = check_widths("feed_forward", "hidden", hidden)

    def behind(widths: tuple[int, ...]) -> nn.Sequential:
        layers = FeedForward(channels, widths, kernel_size=kernel_size, activation=activation)
        return nn.Sequential(layers, Pooled(widths[-1], classes, pool=pool, norm=norm))

    if parameters is not None:
        widths = fit_widths(widths, parameters - sum(p.numel() for p in extractor.parameters()), behind)
    layers, head = behind(widths)
    return Classifier(extractor, layers, head)


def residual_deq(
    in_channels: int,
    classes: int,
    *,
    channels: int = 48,
    inner: int = 64,
    kernel_size: int = 3,
    groups: int = 8,
    init: ResidualInit = "small",
    stride: int = 1,
    pool: int = 4,
    norm: NormKind | None = "batch",
    repeat: int | None = None,
    solver: Solver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = None,
    on_failure: OnFailure = "warn",
) -> Classifier:
    """A residual block with group norms at its equilibrium or, with `repeat`, applied so many times: repeat-6, 11, 18.

    The tangent kernel of monotone DEQs, Chapter 4; its sizes are not printed, these are those of the tutorial it takes the block
    from (Duvenaud, Kolter and Johnson, 2020).

    Examples:
        >>> import torch
        >>> from opteq.models import residual_deq
        >>> x = torch.randn(2, 1, 8, 8)
        >>> residual_deq(1, 10, channels=8, inner=8)(x).shape, residual_deq(1, 10, channels=8, inner=8, repeat=6)(x).shape
        (torch.Size([2, 10]), torch.Size([2, 10]))
    """
    cell = Residual(channels, inner, kernel_size, groups=groups, init=init)
    if repeat is not None:
        for name, value in (("stop", stop), ("gradient", gradient)):
            check_instance("residual_deq", name, value, type(None), "None with `repeat`, which fixes the depth")
        middle: Equilibrium = Repeated(cell, repeat, solver, on_failure)
    else:
        middle = Equilibrium(cell, solver, stop, gradient, on_failure)
    stem = Stem(in_channels, channels, kernel_size=None, stride=stride, norm=norm)
    return Classifier(stem, middle, Pooled(channels, classes, pool=pool, norm=norm))


def monotone_conv(
    in_channels: int,
    classes: int,
    *,
    size: int | tuple[int, int],
    channels: int = 81,
    kernel_size: int = 3,
    m: float = 1.0,
    pool: int = 8,
    solver: Solver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = None,
    on_failure: OnFailure = "warn",
) -> Classifier:
    """A single convolution MON on the image itself, then pooling and a linear map.

    81 channels on CIFAR-10 have 172,216 parameters and 200 have 853,610, for the 172k and 854k of Table 4 (Winston and Kolter,
    2020, have two more: the scales of normalised weights). Padding is circular, so that Peaceman-Rachford applies.

    Examples:
        >>> import torch
        >>> from opteq.models import monotone_conv
        >>> model = monotone_conv(1, 10, size=8, channels=8, pool=4)
        >>> x = torch.randn(2, 1, 8, 8)
        >>> model(x).shape, model.solve(x).status.name
        (torch.Size([2, 10]), 'CONVERGED')
    """
    cell = MonotoneConv(in_channels, channels, size, kernel_size=kernel_size, m=m)
    middle = Equilibrium(cell, solver, stop, gradient, on_failure)
    return Classifier(nn.Identity(), middle, Pooled(channels, classes, pool=pool))


def neural_ode(
    in_channels: int,
    classes: int,
    *,
    size: int | tuple[int, int],
    filters: int = 125,
    augment: int = 0,
    method: str = "dopri5",
    rtol: float = 1e-3,
    atol: float = 1e-3,
    steps: int = 10,
    max_steps: int = 1000,
    adjoint: bool = False,
) -> Classifier:
    """The image as the start of a neural ODE, and a linear map of its end.

    On CIFAR-10, 125 filters have 172,358 parameters, and 64 with `augment=10` have 171,799: the 172k of Table 4's Neural ODE and
    augmented Neural ODE (Dupont et al., 2019).

    Examples:
        >>> import torch
        >>> from opteq.models import neural_ode
        >>> neural_ode(1, 10, size=8, filters=8, augment=2)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    height, width = image_size("neural_ode", size)
    if height != width:
        raise ValueError(invalid("neural_ode", "size", "that of a square image", (height, width)))
    ode = NeuralODE(
        ConvField(in_channels + augment, filters), augment=augment, method=method, rtol=rtol, atol=atol, steps=steps,
        max_steps=max_steps, adjoint=adjoint,
    )  # fmt: skip
    return Classifier(nn.Identity(), ode, Pooled(in_channels + augment, classes, pool=height))


def opteq_segmenter(
    in_channels: int,
    classes: int,
    *,
    channels: tuple[int, ...] = (64, 128, 256),
    hidden: tuple[int, ...] = (256, 512, 512),
    kernel_size: int = 3,
    norm: NormKind | None = "batch",
    alpha: float = 0.8,
    activation: str | Activation = "relu",
    learn_alpha: bool = False,
    constrained: bool = False,
    solver: Solver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = None,
    on_failure: OnFailure = "warn",
) -> Segmenter:
    """A deep OptEq of layers of the widths `hidden` between strided convolutions of these channels and scores at each pixel.

    Its equilibrium has channels[-1] channels. `FCN` has the same extractor.
    Optimization induced equilibrium networks, Section 7.5; only `hidden` is printed.

    Examples:
        >>> import torch
        >>> from opteq.models import opteq_segmenter
        >>> opteq_segmenter(3, 5, channels=(8, 16), hidden=(16, 16))(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 5, 16, 16])
    """
    extractor = Strided(in_channels, channels, norm=norm)
    width = channels[-1]
    layers = [
        ConvOptEq(width, width, count, kernel_size, activation=activation, alpha=alpha, constrained=constrained)
        for count in check_widths("opteq_segmenter", "hidden", hidden)
    ]
    cell = DeepOptEq(layers, learn_alpha=learn_alpha)
    return Segmenter(extractor, Equilibrium(cell, solver, stop, gradient, on_failure), Scores(width, classes, norm=norm))
