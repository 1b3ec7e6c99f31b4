"""Have the weights left the region where an equilibrium is sure to exist? ||W||^2 L <= mu, followed from step to step."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from opteq.cells import GaussianDEQ, ScaledReLU
from opteq.cells.optimization import OptEqCell
from opteq.equilibrium import Cell
from opteq.operators import Dense, Operator
from opteq.spectral import operator_norm
from opteq.training.watch import Trouble, layers_of


@dataclass(frozen=True)
class _Weight:
    """An operator with the largest norm at which its equilibrium is sure to exist and be unique."""

    name: str
    layer: str  # the one that solves for its equilibrium
    cell: Cell
    limit: float

    def shape(self, shapes: Mapping[str, torch.Size]) -> tuple[int, ...] | None:
        """The shape of one sample that W is applied to: of images, as large as the layer has seen them; None before that."""
        own = getattr(self.cell, "state_shape", None)
        if isinstance(own, tuple):
            return own
        channels = getattr(self.cell, "channels", None)
        return (channels, *shapes[self.layer][-2:]) if self.layer in shapes and isinstance(channels, int) else None

    def operator(self) -> Operator:
        if isinstance(self.cell, OptEqCell):
            return self.cell.operator()
        return Dense(self.cell.A if isinstance(self.cell, ScaledReLU) else self.cell.W)  # type: ignore[arg-type]

    def excess(self, norm: float) -> str:
        if isinstance(self.cell, OptEqCell):
            L, mu = self.cell.activation.lipschitz, self.cell.mu
            return f"||W||^2 L >= {norm**2 * L:.4g} passed mu = {mu:g}"
        if isinstance(self.cell, ScaledReLU):
            return f"gamma ||A|| >= {norm * self.cell.gamma:.4g} passed 1"
        return f"||W|| >= {norm:.4g} passed 1"


class Norms:
    """Lower bounds of the norms of the weights, by two power iterations a step and weight, continued from step to step.

    A bound never exceeds the norm, so a limit that it passes is passed; it follows slow changes closely at the cost of
    two applications of W to one sample.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(_weights(model))
        self.vectors: dict[str, Tensor] = {}
        self.passed: set[str] = set()
        self.bounds: dict[str, float] = {}  # of the last step
        self.constrained = {name: part for name, part in _layers(model) if part.constrained}

    @torch.no_grad()
    def step(self, shapes: Mapping[str, torch.Size]) -> list[Trouble]:
        """Two iterations for each weight; those that newly passed their limit. `shapes`: one sample's z of each layer."""
        found = []
        for weight in self.weights:
            if (shape := weight.shape(shapes)) is None:
                continue
            norm = self.bounds[weight.name] = self._iterate(weight, shape)
            slack = 1 + 100 * torch.finfo(self.vectors[weight.name].dtype).eps  # for rounding
            if norm <= weight.limit * slack:
                self.passed.discard(weight.name)
            elif weight.name not in self.passed:
                self.passed.add(weight.name)
                found.append(_passed(weight, norm))
        return found

    @torch.no_grad()
    def by_layer(self) -> dict[str, float]:
        """The norms, for a log: the lower bounds of the last step, and upper bounds for constrained layers, at most 1% above.

        The latter are computed now, at the cost of what the constraint itself takes at a forward pass.
        """
        return {**self.bounds, **{name: float(operator_norm(part.operator())) for name, part in self.constrained.items()}}

    def _iterate(self, weight: _Weight, shape: tuple[int, ...]) -> float:
        W = weight.operator()
        v = self.vectors.get(weight.name)
        if v is None or tuple(v.shape[1:]) != shape or not v.any():  # W = 0 leaves no direction to go on with
            like = next(weight.cell.parameters())
            v = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(like)
        for _ in range(2):  # after a sudden change, the first only turns the vector
            image = W(v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny))
            v = W.adjoint(image)
        self.vectors[weight.name] = v
        return float(torch.linalg.vector_norm(image))


def alphas(model: nn.Module) -> dict[str, float]:
    """The learnable alpha of each layer."""
    return {name: float(part.alpha.detach()) for name, part in _layers(model) if isinstance(part.alpha, Tensor)}


def _layers(model: nn.Module) -> Iterator[tuple[str, OptEqCell]]:
    for name, part in model.named_modules():
        if isinstance(part, OptEqCell):
            yield name or type(part).__name__, part


def _weights(model: nn.Module) -> Iterator[_Weight]:
    layers = layers_of(model)
    root = next((name for name, part in layers.items() if part is model), "")
    for name, part in model.named_modules():
        limit = _limit(part)
        if limit is not None and isinstance(part, Cell):
            inside = [layer for layer in layers if name.startswith(f"{layer}.")]
            yield _Weight(name or type(part).__name__, max(inside, key=len, default=root), part, limit)


def _limit(part: nn.Module) -> float | None:
    """The largest norm; None for weights that are not watched, because another hand holds them."""
    if parametrize.is_parametrized(part, "W"):
        return None
    if isinstance(part, OptEqCell) and not part.constrained:
        return math.sqrt(part.mu / part.activation.lipschitz)
    if isinstance(part, ScaledReLU):
        return 1 / part.gamma
    return 1.0 if isinstance(part, GaussianDEQ) else None


def _passed(weight: _Weight, norm: float) -> Trouble:
    remedy = "(a) make the layer with constrained=True, (b) lower lr, (c) raise weight_decay."
    return Trouble("norm", weight.name, norm, f"{weight.excess(norm)} in layer '{weight.name}': {remedy}")
