"""What a training watches at every step: solver health by layer, norms of the weights, and where a NaN came from."""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from opteq.autograd import finite
from opteq.cells import GaussianDEQ, ScaledReLU
from opteq.cells.optimization import OptEqCell
from opteq.checks import all_finite
from opteq.equilibrium import Cell, Equilibrium
from opteq.operators import Dense, Operator
from opteq.solve import Solution


@dataclass(frozen=True)
class Trouble:
    """What went wrong at a step, in which layer, by which figure."""

    what: str  # nan_loss, nan_state, nan_gradient, nan_parameter, not_converging, norm
    layer: str
    figure: float
    message: str  # a sentence with the layer, the figure and the remedy


@dataclass
class Health:
    """Sums over samples of one layer, or of all."""

    samples: float = 0.0
    converged: float = 0.0
    steps: float = 0.0
    backward_samples: float = 0.0
    backward_steps: float = 0.0
    nonfinite: float = 0.0

    def add(self, other: "Health") -> None:
        """Take the other's sums in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def means(self) -> dict[str, float | None]:
        """Mean steps and the share of converged samples; None where nothing was solved."""
        forward, backward = self.samples or math.nan, self.backward_samples or math.nan
        found = {
            "solver_steps": self.steps / forward,
            "converged": self.converged / forward,
            "backward_steps": self.backward_steps / backward,
        }
        return {name: None if math.isnan(value) else value for name, value in found.items()}


@dataclass
class Watch:
    """An observer of the equilibria of a model: `with observe(watch): ...`, then `layers` has the health of each since `clear`."""

    names: dict[int, str]  # of the cells, by identity
    layers: dict[str, Health] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of one sample's z

    @classmethod
    def of(cls, model: nn.Module) -> "Watch":
        """For the equilibria of a model, named as its modules are."""
        owners = ((name, part) for name, part in model.named_modules() if isinstance(getattr(part, "cell", None), Cell))
        return cls({id(part.cell): name or type(part).__name__ for name, part in owners})

    def __call__(self, layer: Equilibrium, solution: Solution, phase: str) -> None:
        name = self.names.get(id(layer.cell), type(layer.cell).__name__)
        health = self.layers.setdefault(name, Health())
        samples, steps = float(solution.steps.numel()), float(solution.steps.sum())
        if phase == "backward":
            health.add(Health(backward_samples=samples, backward_steps=steps))
            return
        fixed_depth = phase == "unrolled"  # there, a residual above the tolerance is no failure
        done = solution.z.flatten(1).isfinite().all(1) if fixed_depth else solution.converged
        bad = float((~finite(solution.codes)).sum())
        health.add(Health(samples, float(done.sum()), steps, nonfinite=bad))
        self.shapes[name] = solution.z.shape[1:]

    def clear(self) -> None:
        """Begin a new step."""
        self.layers = {}

    def total(self) -> Health:
        """The sums over all layers."""
        whole = Health()
        for health in self.layers.values():
            whole.add(health)
        return whole

    def nonfinite(self) -> tuple[str, float] | None:
        """The first layer with samples that met NaN or infinity, and how many."""
        return next(((name, health.nonfinite) for name, health in self.layers.items() if health.nonfinite), None)

    def not_converging(self, least: float) -> Trouble | None:
        """The first layer in which fewer than the share `least` of the samples converged."""
        for name, health in self.layers.items():
            share = health.converged / health.samples if health.samples else 1.0
            if share < least:
                return Trouble(
                    "not_converging",
                    name,
                    share,
                    f"only {share:.0%} of the samples converged in layer '{name}' (least_converged = {least:g}): "
                    "(a) keep the weights well-posed (constrained=True), (b) lower lr, (c) raise max_steps or rtol of its Stop.",
                )
        return None


@dataclass(frozen=True)
class _Weight:
    """An operator with the largest norm at which its equilibrium is sure to exist and be unique."""

    name: str
    cell: Cell
    limit: float

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
        self.weights = [weight for name, part in model.named_modules() if (weight := _weight(name, part)) is not None]
        self.vectors: dict[str, Tensor] = {}
        self.passed: set[str] = set()

    @torch.no_grad()
    def step(self, shapes: dict[str, torch.Size]) -> Trouble | None:
        """One iteration for each weight; the first that newly passed its limit. `shapes`: one sample's z of each layer."""
        found = None
        for weight in self.weights:
            shape = _state_shape(weight, shapes)
            if shape is None:
                continue
            norm = self._iterate(weight, shape)
            if norm <= weight.limit:
                self.passed.discard(weight.name)
            elif weight.name not in self.passed:
                self.passed.add(weight.name)
                found = found or _passed(weight, norm)
        return found

    def _iterate(self, weight: _Weight, shape: tuple[int, ...]) -> float:
        W = weight.operator()
        v = self.vectors.get(weight.name)
        if v is None or tuple(v.shape[1:]) != shape:
            like = next(weight.cell.parameters())
            v = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(like)
        for _ in range(2):  # after a sudden change, the first only turns the vector
            image = W(v / torch.linalg.vector_norm(v))
            v = W.adjoint(image)
        self.vectors[weight.name] = v
        return float(torch.linalg.vector_norm(image))


def _weight(name: str, part: nn.Module) -> _Weight | None:
    if isinstance(part, OptEqCell) and not part.constrained:
        return _Weight(name, part, math.sqrt(part.mu / part.activation.lipschitz))
    if isinstance(part, ScaledReLU):
        return _Weight(name, part, 1 / part.gamma)
    return _Weight(name, part, 1.0) if isinstance(part, GaussianDEQ) else None


def _state_shape(weight: _Weight, shapes: dict[str, torch.Size]) -> tuple[int, ...] | None:
    """The shape of one sample's z: the cell's own, or that of the layer which the cell is a part of."""
    own = getattr(weight.cell, "state_shape", None)
    if isinstance(own, tuple):
        return own
    return next((tuple(shape) for name, shape in shapes.items() if weight.name.startswith(name) or name == "Equilibrium"), None)


def _passed(weight: _Weight, norm: float) -> Trouble:
    name = weight.name or type(weight.cell).__name__
    remedy = "(a) make the layer with constrained=True, (b) lower lr, (c) raise weight_decay."
    return Trouble("norm", name, norm, f"{weight.excess(norm)} in layer '{name}': {remedy}")


_REMEDY = "(a) lower lr, (b) clip the gradient, (c) keep the weights well-posed (constrained=True)."


def nan_loss(model: nn.Module, x: Tensor, value: float) -> Trouble:
    """Where a loss that is not finite came from: the first parameter, or else the first module, that is not finite."""
    found = nan_parameter(model) or _first_output(copy.deepcopy(model), x)
    layer, cause = ("", "the loss itself, whose inputs are finite") if found is None else (found.layer, found.message)
    return Trouble("nan_loss", layer, value, f"the loss is {value:g}; it began in {cause}. {_REMEDY}")


def nan_state(model: nn.Module, x: Tensor, name: str, samples: float) -> Trouble:
    """Where the NaN or infinity that an equilibrium met came from: a module before it, or its own iteration."""
    found = nan_parameter(model) or _first_output(copy.deepcopy(model), x)
    layer, cause = (name, "its own iteration") if found is None else (found.layer, found.message)
    message = f"{samples:.0f} samples met NaN or infinity in layer '{name}'; it began in {cause}. {_REMEDY}"
    return Trouble("nan_state", layer, samples, message)


def nan_parameter(model: nn.Module) -> Trouble | None:
    """The first parameter with NaN or infinity."""
    for name, parameter in model.named_parameters():
        if not all_finite(parameter):
            share = 1 - float(parameter.detach().isfinite().float().mean())
            return Trouble("nan_parameter", name, share, f"parameter '{name}', {share:.0%} of which is not finite")
    return None


def nan_gradient(model: nn.Module) -> Trouble:
    """The last parameter, that is, the first one in the order of backward, whose gradient is not finite."""
    name = next((n for n, p in reversed(list(model.named_parameters())) if p.grad is not None and not all_finite(p.grad)), "")
    where = f"in the gradient of '{name}'" if name else "in the norm of the gradient, which overflows"
    return Trouble("nan_gradient", name, math.nan, f"NaN or infinity {where}: (a) lower lr, (b) clip the gradient.")


@torch.no_grad()
def _first_output(model: nn.Module, x: Tensor) -> Trouble | None:
    """The first module, in the order of evaluation, with a finite input and an output that is not. The model is used up."""
    found: list[Trouble] = []

    def look(name: str, part: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if found or not isinstance(output, Tensor) or all_finite(output):
            return
        if all(all_finite(i) for i in inputs if isinstance(i, Tensor)):
            share = 1 - float(output.isfinite().float().mean())
            kind = type(part).__name__
            found.append(Trouble("nan_output", name, share, f"layer '{name}' ({kind}), {share:.0%} of its output is not finite"))

    for name, part in model.named_modules():
        if isinstance(part, Equilibrium):
            part.on_failure = "ignore"
        part.register_forward_hook(lambda part, inputs, output, name=name: look(name, part, inputs, output))
    try:
        model(x)
    except (ValueError, RuntimeError) as error:
        return Trouble("nan_output", "", math.nan, f"the forward pass, which fails: {error}")
    return found[0] if found else None
