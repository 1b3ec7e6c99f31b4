"""Random equilibrium problems, each a function of its seed: cells, sizes, conditioning, scales, layouts, solvers, tolerances."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from stress_reference import Affine, convolution, depthwise
from torch import Tensor

from cell_zoo import random_S, scale_weights, seed_weights
from opteq import Cell, Equilibrium, Solution, Solver, Stop, solve
from opteq.cells import (
    AffineOptEq,
    ConvOptEq,
    DeepOptEq,
    DepthwiseOptEq,
    FunctionCell,
    GaussianDEQ,
    Monotone,
    MonotoneConv,
    MonotoneMultiTier,
    Multiscale,
    MultivariateOptEq,
    OptEq,
    Residual,
    ScaledReLU,
    StackedOptEq,
    WideOptEq,
)
from opteq.cells.monotone import MonotoneCell
from opteq.cells.optimization import OptEqCell
from opteq.gradients import Gradient, Implicit, JacobianFree, Phantom, Unrolled
from opteq.regularizers import L1, L2
from opteq.solvers import SAM, Accelerated, Anderson, Broyden, ForwardBackward, Newton, PeacemanRachford, Picard

ACTIVATIONS = ("relu", "leaky_relu", "tanh", "sigmoid", "softplus", "identity", "soft_threshold")
FACTORS = (0.0, 0.5, 0.9, 0.9, 0.99, 1 - 1e-4, 1 - 1e-8, 1 - 1e-12, 1.0, 1.001, 1.5, 10.0)
SCALES = (0.0, 1e-320, 1e-42, 1e-30, 1e-12, 1e-3, 1.0, 1.0, 1.0, 1e3, 1e12, 1e30)
STOPS = (0.0, 1e-14, 1e-10, 1e-6, 1e-4, 1e-4, 1e-2, 0.5)


@dataclass(frozen=True)
class Case:
    seed: int
    cell: Cell
    x: Tensor
    z0: Tensor | None
    solver: Solver | None
    stop: Stop
    gradient: Gradient
    mode: str  # "grad", "no_grad", "inference"
    bad: frozenset[int]  # the samples with NaN or infinity
    direct: bool  # through solve() on the bound map, not through a layer

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def run(self, rows: list[int] | None = None) -> Solution:
        """The solution, or that of some samples alone."""
        x, z0 = (t if t is None or rows is None else t[rows] for t in (self.x, self.z0))
        with _mode(self.mode):
            if self.direct:
                return solve(self.cell.bind(x), self.cell.initial(x) if z0 is None else z0, self.solver or Anderson(), self.stop)
            return Equilibrium(self.cell, self.solver, self.stop, self.gradient, on_failure="ignore").solve(x, z0)

    def __str__(self) -> str:
        shape, bad = list(self.x.shape), f", bad {sorted(self.bad)}" if self.bad else ""
        how = "solve" if self.direct else self.gradient
        return f"seed {self.seed}: {self.cell} x {shape} {self.dtype}{bad}, {self.solver}, {self.stop}, {how}, {self.mode}"


@contextmanager
def _mode(name: str) -> Iterator[None]:
    with {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]():
        yield


def make_case(seed: int, **fixed: object) -> Case:
    """The problem of a seed. `fixed`: width, batch, factor, scale or dtype where they are not to be drawn."""
    draw = random.Random(seed)
    seed_weights(seed)
    dtype = fixed.get("dtype") or draw.choice([torch.float32, torch.float64])
    cell, shape = draw.choice(list(KINDS.values()))(draw, {**fixed, "dtype": dtype})
    _inject(cell, draw)
    cell = cell.to(dtype)
    for parameter in cell.parameters():
        parameter.requires_grad_(draw.random() < 0.8)
    batch = fixed.get("batch") or draw.choice([1, 2, 3, 7, 33])
    scale = fixed["scale"] if "scale" in fixed else draw.choice(SCALES)
    scale = min(scale, 1e12) if isinstance(cell, Residual | Multiscale) else scale  # PyTorch's group norm squares in float32
    solver, gradient, direct = _method(draw, cell, dtype)
    x = _laid_out(torch.randn(batch, *shape, dtype=torch.float64).mul_(scale).to(dtype), draw)
    x, bad = (x, frozenset[int]()) if direct else _planted(x, draw)  # it is the layer that sets such samples aside
    mode = draw.choice(["grad", "grad", "no_grad", "inference"])
    x = x.requires_grad_() if mode == "grad" and draw.random() < 0.5 else x
    z0 = None if draw.random() < 0.8 else torch.randn(cell.initial(x).shape, dtype=torch.float64).mul_(min(scale, 1e3)).to(dtype)
    most = draw.choice([1, 5, 50, 200])
    most = min(most, 20) if isinstance(solver, Newton) and x.ndim == 4 else most  # with rtol = 0 each step takes its 60 products
    stop = Stop(draw.choice(STOPS), draw.choice([0.0, 0.0, 0.0, 1e-8, 1e-3]), most)
    return Case(seed, cell, x, z0, solver, stop, gradient, mode, bad, direct)


def _method(draw: random.Random, cell: Cell, dtype: torch.dtype) -> tuple[Solver | None, Gradient, bool]:
    solvers = [None, None, Picard(), Picard(0.5), Anderson(), Anderson(memory=2), Broyden(), Newton(), Accelerated(), SAM(L2())]
    if isinstance(cell, MonotoneCell):
        resolvent = dtype in (torch.float32, torch.float64) and getattr(cell, "padding", "circular") == "circular"
        solvers += [ForwardBackward(), *([PeacemanRachford(), PeacemanRachford(0.7)] if resolvent else [])]
    solver = draw.choice(solvers)
    gradient = draw.choice([Implicit(), Implicit(), Phantom(), JacobianFree(), Unrolled(4)])
    if isinstance(gradient, Unrolled) and not (solver is None or solver.differentiable):
        gradient = Implicit()
    return solver, gradient, draw.random() < 0.2 or (solver is not None and solver.selective)


def _laid_out(x: Tensor, draw: random.Random) -> Tensor:
    """The same numbers in another order in memory."""
    layout = draw.choice(["plain", "plain", "turned", "strided", "expanded"])
    if layout == "turned":
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.T.contiguous().T
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, math.nan)], 1)[:, 0]
    return x[:1].expand(x.shape) if layout == "expanded" else x


def _planted(x: Tensor, draw: random.Random) -> tuple[Tensor, frozenset[int]]:
    """Sometimes NaN or infinity in some samples; where x was too large for its dtype, that is so already."""
    if draw.random() < 0.1:
        x = x.clone(memory_format=torch.contiguous_format)
        for row in draw.sample(range(len(x)), max(1, len(x) // 3)):
            x[row].view(-1)[draw.randrange(x[0].numel())] = draw.choice([math.nan, math.inf, -math.inf])
    return x, frozenset((~x.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist())


def _inject(cell: Cell, draw: random.Random) -> None:
    """Biases of 0, or of size 1: with them x of 1e-30 is lost in rounding, without them it alone counts."""
    with torch.no_grad():
        factor = draw.choice([0.0, 0.0, 1.0])
        for name, parameter in cell.named_parameters():
            if name.split(".")[-1] in ("b", "t") or ".b." in f".{name}.":
                parameter.normal_().mul_(factor)


# Cells of every kind in float64, each with the shape of its input

Made = tuple[Cell, tuple[int, ...]]


def _factor(draw: random.Random, fixed: dict[str, object]) -> float:
    return fixed["factor"] if "factor" in fixed else draw.choice(FACTORS)


def _width(draw: random.Random, fixed: dict[str, object]) -> int:
    return fixed.get("width") or draw.choice([1, 2, 3, 5, 8, 17, 40])


def _options(draw: random.Random) -> dict[str, object]:
    return {"alpha": draw.choice([1.0, 1.0, 0.4, 1e-3]), "mu": draw.choice([1.0, 1.0, 2.0, 0.25])}


def norm_of(cell: OptEqCell, size: tuple[int, int]) -> float:
    """||W|| by a dense SVD in float64."""
    if isinstance(cell, OptEq):
        matrix = cell.W.double()
    elif isinstance(cell, ConvOptEq):
        matrix = convolution(cell.W, size, cell.padding)
    else:
        spread = depthwise(cell.W1, size, cell.padding)
        matrix = torch.kron(cell.W2[:, :, 0, 0].double().contiguous(), torch.eye(size[0] * size[1], dtype=torch.float64)) @ spread
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


def _scaled(cell: OptEqCell, factor: float, size: tuple[int, int] = (1, 1)) -> OptEqCell:
    """With L ||W||^2 = factor mu."""
    cell = cell.double()
    if not cell.constrained:
        scale_weights(cell, (factor * cell.mu / cell.activation.lipschitz) ** 0.5 / norm_of(cell, size))
    return cell


def _dense(draw: random.Random, fixed: dict[str, object], width: int, inputs: int, **options: object) -> OptEq:
    hidden = draw.choice([1, 3, width, 2 * width]) if width < 100 else 64
    constrained = draw.random() < 0.1
    options = {"activation": draw.choice(ACTIVATIONS), **_options(draw), "constrained": constrained, **options}
    return _scaled(OptEq(inputs, width, hidden, **options), _factor(draw, fixed))


def _one(draw: random.Random, fixed: dict[str, object]) -> Made:
    width, inputs = _width(draw, fixed), draw.choice([1, 3])
    return _dense(draw, fixed, width, inputs), (inputs,)


def _image(draw: random.Random, fixed: dict[str, object]) -> Made:
    size, channels = draw.choice([(1, 1), (4, 3), (5, 5)]), draw.choice([1, 2])
    make = draw.choice([ConvOptEq, DepthwiseOptEq])
    kernel, padding = draw.choice([1, 2, 3]), draw.choice(["zeros", "circular"])
    cell = make(channels, 2, 3, kernel, activation=draw.choice(ACTIVATIONS), padding=padding, **_options(draw))
    return _scaled(cell, _factor(draw, fixed), size), (channels, *size)


def _several(make: Callable[[list[OptEq], random.Random], Cell]) -> Callable[..., Made]:
    def made(draw: random.Random, fixed: dict[str, object]) -> Made:
        width, inputs = min(_width(draw, fixed), 64), draw.choice([1, 3])
        return make([_dense(draw, fixed, width, inputs) for _ in range(draw.choice([1, 2, 3]))], draw), (inputs,)

    return made


def _deep(cells: list[OptEq], draw: random.Random) -> Cell:
    R, mode = draw.choice([(None, "gradient"), (L2(), "gradient"), (L2(), "prox"), (L1(), "prox")])
    return DeepOptEq(cells, regularizer=R, mode=mode, gamma=draw.choice([0.01, 0.3]), learn_alpha=draw.random() < 0.3).double()


def _multivariate(draw: random.Random, fixed: dict[str, object]) -> Made:
    width, hidden = min(_width(draw, fixed), 64), draw.choice([1, 3, 8])
    cell = _scaled(MultivariateOptEq(3, width, hidden, **_options(draw)), _factor(draw, fixed))
    with torch.no_grad():
        cell.S = random_S(hidden, draw.randrange(100))
    return cell, (3,)


def _affine(draw: random.Random, fixed: dict[str, object]) -> Made:
    width = min(_width(draw, fixed), 17)
    cell = AffineOptEq(_dense(draw, fixed, width, 3), orthogonal=draw.random() < 0.5).double()
    with torch.no_grad():
        A = torch.eye(width, dtype=torch.float64) + 0.3 * torch.randn(width, width, dtype=torch.float64) / width**0.5
        if cell.orthogonal:
            cell.A = torch.linalg.qr(A)[0]
        else:
            cell.A.copy_(A)
    return cell, (3,)


def _square(draw: random.Random, fixed: dict[str, object]) -> Made:
    """sigma(W z + U x) with ||W|| = factor."""
    width, factor = _width(draw, fixed), _factor(draw, fixed)
    W = torch.randn(width, width, dtype=torch.float64)
    W *= factor / (float(torch.linalg.matrix_norm(W, 2)) if width < 500 else 2 * width**0.5)  # to a few percent, for the largest
    kind = draw.choice(["gaussian", "scaled", "function"])
    if kind == "function":
        sigma = draw.choice(["relu", "tanh", "sigmoid", "identity"])
        return FunctionCell(Affine(W, torch.randn(width, 3, dtype=torch.float64), sigma), (width,)), (3,)
    cell = GaussianDEQ(3, width).double() if kind == "gaussian" else ScaledReLU(3, width, gamma=0.4).double()
    with torch.no_grad():
        if isinstance(cell, GaussianDEQ):
            cell.W.copy_(W)
        else:
            cell.A.copy_(W / 0.4)
    return cell, (3,)


def _monotone(draw: random.Random, fixed: dict[str, object]) -> Made:
    m, activation = draw.choice([1e-12, 1e-3, 0.1, 1.0]), draw.choice(["relu", "tanh", "sigmoid", "softplus", "soft_threshold"])
    kind, options = draw.choice(["dense", "conv", "tiers"]), {"m": m, "activation": activation}
    if kind == "dense":
        width = min(_width(draw, fixed), 256)
        cell, shape = Monotone(3, width, bias=draw.random() < 0.5, **options), (3,)
    elif kind == "conv":
        size = draw.choice([(2, 2), (4, 3)])
        padding, kernel = draw.choice(["circular", "zeros"]), draw.choice([1, 2, 3])
        cell, shape = MonotoneConv(2, 2, size, kernel_size=kernel, padding=padding, **options), (2, *size)
    else:
        cell, shape = MonotoneMultiTier(1, (1, 2), (4, 2), **options), (1, 4, 2)
    scale = draw.choice([0.0, 1.0, 1.0, 3.0])
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            if name[0] in "ABK":
                parameter.mul_(scale)
    return cell.double(), shape


def _normed(draw: random.Random, fixed: dict[str, object]) -> Made:
    """The networks with group norms: the scale of x does not matter there, nor that of most weights."""
    if draw.random() < 0.5:
        cell: Cell = Residual(4, draw.choice([2, 4]), draw.choice([1, 3]), groups=2, init=draw.choice(["small", "standard"]))
        return cell.double(), (4, 3, 2)
    return Multiscale((2, 4), groups=2, init=draw.choice(["damped", "mdeq"])).double(), (2, 4, 4)


KINDS: dict[str, Callable[..., Made]] = {
    "dense": _one,
    "image": _image,
    "deep": _several(_deep),
    "stacked": _several(lambda cells, draw: StackedOptEq(cells)),
    "wide": _several(lambda cells, draw: WideOptEq(cells)),
    "multivariate": _multivariate,
    "affine": _affine,
    "square": _square,
    "monotone": _monotone,
    "normed": _normed,
}
