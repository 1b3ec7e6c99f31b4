"""A zoo of cells in float64, their weights scaled so that each layer is a contraction with a factor of about 0.8."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from opteq import Cell, Solver
from opteq.cells import (
    AffineOptEq,
    ConvOptEq,
    DeepOptEq,
    DepthwiseOptEq,
    GaussianDEQ,
    Monotone,
    MonotoneConv,
    MonotoneMultiTier,
    MultivariateOptEq,
    OptEq,
    ScaledReLU,
    StackedOptEq,
    WideOptEq,
)
from opteq.cells.monotone import MonotoneCell
from opteq.cells.optimization import OptEqCell
from opteq.operators import Dense, Operator
from opteq.regularizers import HSIC, L1, L2, Decorrelation, Incay
from opteq.solvers import Anderson, ForwardBackward, Newton, PeacemanRachford, Picard

MONOTONE = ("relu", "leaky_relu", "tanh", "sigmoid", "softplus", "identity", "soft_threshold")
BATCH, INPUTS, FEATURES = 4, 3, 4
CHANNELS_IN, CHANNELS, SIZE = 2, 2, (4, 3)
FACTOR = 0.8


def random_matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seed_weights(seed: int) -> None:
    """torch.manual_seed for the CPU alone: for each accelerator that one would note down the whole stack, every time."""
    torch.default_generator.manual_seed(seed)


def matrix_of(operator: Operator, shape: tuple[int, ...]) -> Tensor:
    """The matrix of an operator on samples of a shape: its columns are the images of the unit vectors."""
    count = torch.Size(shape).numel()
    weight = operator.leaves()[0].tensor
    with torch.no_grad():
        return operator(torch.eye(count, dtype=weight.real.dtype).reshape(count, *shape)).flatten(1).T


def norm_of(cell: OptEqCell, size: tuple[int, int] = SIZE) -> float:
    """||W|| by a dense SVD."""
    operator = cell.operator()
    shape = (operator.W.shape[1],) if isinstance(operator, Dense) else (cell.channels, *size)
    return float(torch.linalg.matrix_norm(matrix_of(operator, shape), 2))


def scale_weights(cell: OptEqCell, factor: float) -> None:
    with torch.no_grad():
        if isinstance(cell, DepthwiseOptEq):
            cell.W2.mul_(factor)
        elif parametrize.is_parametrized(cell, "W"):
            cell.parametrizations.W.original.mul_(factor)
        else:
            cell.W.mul_(factor)


def contraction(cell: OptEqCell, seed: int, factor: float = FACTOR) -> OptEqCell:
    """The cell in float64 with L ||W||^2 = factor mu; with an injection of size about 1.5, so that no activation is idle."""
    cell = cell.double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in cell.named_parameters():
            if name[0] in "Ub":
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype))
    if cell.constrained:
        scale_weights(cell, 10.0)  # far outside of the ball
    else:
        scale_weights(cell, (factor * cell.mu / cell.activation.lipschitz) ** 0.5 / norm_of(cell))
    return cell


def dense(seed: int, *, hidden: int = 6, factor: float = FACTOR, **options) -> OptEq:
    seed_weights(seed)
    return contraction(OptEq(INPUTS, FEATURES, hidden, **options), seed, factor)


def conv(seed: int, kernel_size: int = 3, **options) -> ConvOptEq:
    seed_weights(seed)
    return contraction(ConvOptEq(CHANNELS_IN, CHANNELS, 3, kernel_size, **options), seed)


def depthwise(seed: int, kernel_size: int = 3, **options) -> DepthwiseOptEq:
    seed_weights(seed)
    return contraction(DepthwiseOptEq(CHANNELS_IN, CHANNELS, 3, kernel_size, **options), seed)


def random_S(hidden: int, seed: int) -> Tensor:
    """Symmetric, 0 < S < I."""
    Q = torch.linalg.qr(random_matrix(hidden, hidden, seed=seed))[0]
    return (Q * torch.linspace(0.05, 0.95, hidden, dtype=torch.float64)) @ Q.T


def multivariate(seed: int, *, hidden: int = 5, **options) -> MultivariateOptEq:
    seed_weights(seed)
    cell = contraction(MultivariateOptEq(INPUTS, FEATURES, hidden, **options), seed)
    cell.S = random_S(hidden, seed)
    return cell


def affine(seed: int, *, orthogonal: bool, base: OptEq | None = None) -> AffineOptEq:
    cell = AffineOptEq(dense(seed, activation="tanh") if base is None else base, orthogonal=orthogonal).double()
    A = torch.eye(FEATURES, dtype=torch.float64) + 0.4 * random_matrix(FEATURES, FEATURES, seed=seed)
    with torch.no_grad():
        if orthogonal:
            cell.A = torch.linalg.qr(A)[0]
        else:
            cell.A.copy_(A)
        cell.t.copy_(random_matrix(FEATURES, seed=seed + 1))
    return cell


def deep(*cells: OptEqCell, **options) -> DeepOptEq:
    return DeepOptEq(cells, **options).double()


@dataclass(frozen=True)
class Entry:
    name: str
    make: Callable[[], Cell]
    symmetric: bool = True
    image: bool = False
    coupled: bool = False
    blocks: int = 0  # of a stacked state
    smooth: bool = False  # twice differentiable
    inputs: tuple[int, ...] = ()  # where they are not those of the zoo
    state: tuple[int, ...] = ()
    solvers: tuple[Solver | None, ...] = (None, Anderson(), Picard())  # that find the equilibrium

    def x(self, batch: int = BATCH, seed: int = 1) -> Tensor:
        return random_matrix(batch, *(self.inputs or ((CHANNELS_IN, *SIZE) if self.image else (INPUTS,))), seed=seed)

    def state_shape(self) -> tuple[int, ...]:
        if self.state:
            return self.state
        one = (CHANNELS, *SIZE) if self.image else (FEATURES,)
        return (self.blocks, *one) if self.blocks else one


def _one_layer() -> list[Entry]:
    entries = []
    for i, activation in enumerate(MONOTONE):
        for alpha, mu, hidden in ((1.0, 1.0, 3), (0.4, 1.0, 6), (0.4, 2.0, 4)):
            relation = "<" if hidden < FEATURES else "=" if hidden == FEATURES else ">"

            def make(activation=activation, alpha=alpha, mu=mu, hidden=hidden, i=i) -> Cell:
                return dense(i, hidden=hidden, activation=activation, alpha=alpha, mu=mu)

            name = f"dense {activation} alpha={alpha:g} mu={mu:g} hidden{relation}features"
            entries.append(Entry(name, make, smooth=activation in ("tanh", "sigmoid", "softplus", "identity")))
    for i, kernel_size in enumerate((1, 2, 3, 5)):
        for padding, activation in (("zeros", ("relu", "tanh")[i % 2]), ("circular", ("softplus", "leaky_relu")[i % 2])):

            def make(i=i, kernel_size=kernel_size, padding=padding, activation=activation) -> Cell:
                return conv(i, kernel_size, padding=padding, activation=activation, alpha=(1.0, 0.4)[i // 2])

            smooth = activation in ("tanh", "softplus")
            entries.append(Entry(f"conv {kernel_size} {padding} {activation}", make, image=True, smooth=smooth))
    return [
        *entries,
        Entry("depthwise 3 zeros", lambda: depthwise(0, 3, activation="tanh", alpha=0.4, mu=2.0), image=True, smooth=True),
        Entry("depthwise 2 circular", lambda: depthwise(1, 2, padding="circular"), image=True),
    ]


def _constrained() -> list[Entry]:
    options = {"constrained": True, "margin": 0.2}
    return [
        Entry("constrained dense", lambda: dense(3, activation="tanh", mu=2.0, **options), smooth=True),
        Entry("constrained conv zeros", lambda: conv(3, activation="tanh", **options), image=True, smooth=True),
        Entry("constrained conv circular", lambda: conv(4, 2, padding="circular", activation="sigmoid", **options), image=True),
        Entry("constrained depthwise", lambda: depthwise(3, activation="softplus", **options), image=True, smooth=True),
        Entry("constrained multivariate", lambda: multivariate(3, **options)),
        Entry("constrained deep", lambda: deep(dense(3, **options), dense(4, alpha=0.4)), symmetric=False),
    ]


def _deep() -> list[Entry]:
    def two() -> tuple[OptEq, OptEq]:
        return dense(0, activation="tanh", alpha=0.6), dense(1, hidden=3, activation="softplus", mu=2.0)

    def three() -> tuple[OptEq, OptEq, OptEq]:
        return *two(), dense(2, activation="leaky_relu")

    asymmetric = {"symmetric": False}
    return [
        Entry("deep 1", lambda: deep(dense(0, activation="tanh", alpha=0.4)), smooth=True),
        Entry("deep 2", lambda: deep(*two()), **asymmetric, smooth=True),
        Entry("deep 3", lambda: deep(*three()), **asymmetric),
        Entry("deep 1 conv", lambda: deep(conv(0)), image=True),
        Entry("deep 2 conv", lambda: deep(conv(0, activation="tanh"), conv(1, 2, alpha=0.4)), **asymmetric, image=True),
        Entry("deep 3 conv, separable", lambda: deep(conv(0), depthwise(1), conv(2, 1)), **asymmetric, image=True),
        Entry("deep 2 learn_alpha", lambda: deep(*two(), learn_alpha=True), **asymmetric, smooth=True),
        Entry("deep 1 learn_alpha", lambda: deep(dense(0, alpha=0.5), learn_alpha=True)),
        Entry("deep conv learn_alpha", lambda: deep(conv(0), conv(1), learn_alpha=True), **asymmetric, image=True),
        Entry("deep 2 L2 gradient", lambda: deep(*two(), regularizer=L2()), **asymmetric, smooth=True),
        Entry("deep 2 L2 prox", lambda: deep(*two(), regularizer=L2(), mode="prox", gamma=0.3), **asymmetric),
        Entry("deep 2 L1 gradient", lambda: deep(*two(), regularizer=L1(), gamma=0.01), **asymmetric),
        Entry("deep 2 L1 prox", lambda: deep(*two(), regularizer=L1(), mode="prox", gamma=0.3), **asymmetric),
        Entry("deep conv L1 prox", lambda: deep(conv(0), regularizer=L1(), mode="prox", gamma=0.3), **asymmetric, image=True),
        Entry("deep 1 Incay", lambda: deep(dense(0, activation="tanh"), regularizer=Incay()), **asymmetric, smooth=True),
        Entry("deep 2 Incay", lambda: deep(*two(), regularizer=Incay(0.5), gamma=0.02), **asymmetric, smooth=True),
        Entry("deep Decorrelation", lambda: deep(*two(), regularizer=Decorrelation(0.5), gamma=0.1), **asymmetric, coupled=True),
        Entry(
            "deep conv Decorrelation",
            lambda: deep(conv(0, activation="softplus"), regularizer=Decorrelation(0.5)),
            **asymmetric,
            image=True,
            coupled=True,
        ),
        Entry("deep HSIC", lambda: deep(*two(), regularizer=HSIC(bandwidth=1.0), gamma=0.2), **asymmetric, coupled=True),
        Entry(
            "deep HSIC, random features",
            lambda: deep(*two(), regularizer=HSIC(bandwidth=1.0, features=50), gamma=0.1),
            **asymmetric,
            coupled=True,
        ),
        Entry("deep of multivariate", lambda: deep(multivariate(0), dense(1)), **asymmetric),
    ]


def _others() -> list[Entry]:
    def stacked(*cells: OptEqCell) -> StackedOptEq:
        return StackedOptEq(cells)

    def wide(*cells: OptEqCell) -> WideOptEq:
        return WideOptEq(cells)

    def shared_alpha() -> WideOptEq:  # alphas that a deep cell made learnable
        cells = (dense(0, activation="tanh", alpha=0.3), dense(1, activation="tanh", alpha=0.6))
        deep(*cells, learn_alpha=True)
        return wide(*cells)

    tanh = {"activation": "tanh"}
    return [
        Entry("stacked 2", lambda: stacked(dense(0, **tanh), dense(1, **tanh, alpha=0.4)), symmetric=False, blocks=2, smooth=True),
        Entry("stacked 3", lambda: stacked(dense(0), dense(1, hidden=3), dense(2, mu=2.0)), symmetric=False, blocks=3),
        Entry("stacked conv", lambda: stacked(conv(0), depthwise(1)), symmetric=False, image=True, blocks=2),
        Entry("wide dense, one matrix", lambda: wide(dense(0, **tanh), dense(1, **tanh, hidden=3)), smooth=True),
        Entry("wide dense, few rows", lambda: wide(dense(0, hidden=2), dense(1, hidden=3))),
        Entry("wide dense, activations", lambda: wide(dense(0, **tanh), dense(1, activation="softplus")), smooth=True),
        Entry("wide unequal alphas", lambda: wide(dense(0, alpha=0.2), dense(1, alpha=0.9), dense(2, mu=2.0, alpha=0.5))),
        Entry("wide conv", lambda: wide(conv(0), depthwise(1, alpha=0.5), conv(2, 5)), image=True),
        Entry("wide learnt alphas", shared_alpha, smooth=True),
        Entry("affine", lambda: affine(0, orthogonal=False), symmetric=False, smooth=True),
        Entry("affine orthogonal", lambda: affine(0, orthogonal=True), smooth=True),
        Entry("affine of multivariate", lambda: affine(1, orthogonal=False, base=multivariate(1)), symmetric=False),
        Entry("multivariate", lambda: multivariate(0), smooth=True),
        Entry("multivariate hidden<features", lambda: multivariate(1, hidden=3, alpha=0.4, mu=2.0), smooth=True),
    ]


def monotone(seed: int, cell: MonotoneCell, scale: float = 1.5) -> MonotoneCell:
    """The cell in float64, its weights scaled so that ||W|| is above 1, with an injection of size about 1.5."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in cell.double().named_parameters():
            values = torch.randn(p.shape, generator=g, dtype=p.dtype)
            p.copy_(values if name[0] in "Ub" else scale * values / p[0].numel() ** 0.5)
    return cell


def gaussian(seed: int) -> GaussianDEQ:
    seed_weights(seed)
    return GaussianDEQ(INPUTS, FEATURES, sigma_w2=0.06).double()


def scaled_relu(seed: int) -> ScaledReLU:
    seed_weights(seed)
    cell = ScaledReLU(INPUTS, FEATURES, gamma=0.4).double()
    with torch.no_grad():
        cell.A.add_(0.3 * random_matrix(FEATURES, FEATURES, seed=seed))
        cell.W.mul_(2)
    return cell


def _theory() -> list[Entry]:
    splitting = (None, PeacemanRachford(0.5), Newton())
    plain = (None, Anderson(), Newton())
    dense = {"symmetric": False, "solvers": splitting}
    image = {**dense, "image": True}

    def relu() -> MonotoneCell:
        return monotone(0, Monotone(INPUTS, FEATURES, m=1.0))

    def zeros() -> MonotoneCell:
        return monotone(2, MonotoneConv(CHANNELS_IN, CHANNELS, SIZE, m=1.0, padding="zeros", activation="tanh"), 0.7)

    def tiers() -> MonotoneCell:
        return monotone(4, MonotoneMultiTier(CHANNELS_IN, (1, 2), (4, 2), m=0.8, activation="tanh"), 0.8)

    return [
        Entry("gaussian", lambda: gaussian(0), symmetric=False),
        Entry("scaled relu", lambda: scaled_relu(0), symmetric=False),
        Entry("monotone relu", relu, **dense),
        Entry("monotone tanh", lambda: monotone(1, Monotone(INPUTS, FEATURES, m=0.8, activation="tanh", bias=False)), **dense),
        Entry("monotone conv 2", lambda: monotone(3, MonotoneConv(CHANNELS_IN, CHANNELS, SIZE, m=0.5, kernel_size=2)), **image),
        Entry("monotone conv zeros", zeros, symmetric=False, image=True, smooth=True, solvers=(*plain, ForwardBackward())),
        Entry("monotone tiers", tiers, **image, smooth=True, inputs=(CHANNELS_IN, 4, 2), state=(6, 2, 1)),
    ]


ZOO = {entry.name: entry for entry in (*_one_layer(), *_constrained(), *_deep(), *_others(), *_theory())}
