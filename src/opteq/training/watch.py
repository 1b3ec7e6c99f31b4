"""What a training sees of its equilibria at every step: solver health, layer by layer."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from opteq.equilibrium import Cell, Equilibrium
from opteq.solution import ConvergenceError, Solution, finite
from opteq.training.processes import World


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


def raised(error: ConvergenceError) -> Trouble:
    """What a layer with on_failure="raise" has to say."""
    return Trouble("not_converging", "", math.nan, str(error))


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that solve for an equilibrium, by name; the model itself has the name of its class."""
    parts = model.named_modules()
    return {name or type(part).__name__: part for name, part in parts if isinstance(getattr(part, "cell", None), Cell)}


@dataclass
class Watch:
    """An observer of the equilibria of a model: `with observe(watch): ...`, then `layers` has the health of each since `clear`."""

    names: dict[int, str]  # of the layers and, for those that are made anew at each call, of their cells, by identity
    layers: dict[str, Health] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of one sample's z
    unjudged: dict[str, list[float]] = field(default_factory=dict)  # converged and all samples of batches too small to judge by

    @classmethod
    def of(cls, model: nn.Module) -> "Watch":
        """For the equilibria of a model, named as its modules are."""
        found = layers_of(model)
        return cls({id(part.cell): name for name, part in found.items()} | {id(part): name for name, part in found.items()})

    def __call__(self, layer: Equilibrium, solution: Solution, phase: str) -> None:
        name = self.names.get(id(layer)) or self.names.get(id(layer.cell)) or type(layer.cell).__name__
        health = self.layers.setdefault(name, Health())
        samples, steps = float(solution.steps.numel()), float(solution.steps.sum())
        if phase == "backward":
            health.add(Health(backward_samples=samples, backward_steps=steps))
            return
        sound = finite(solution.codes)
        done = sound if phase == "unrolled" else solution.converged  # a fixed depth has no tolerance to meet
        health.add(Health(samples, float(done.sum()), steps, nonfinite=float((~sound).sum())))
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

    def not_converging(self, least: float, enough: float, world: World) -> Trouble | None:
        """The first layer in which fewer than the share `least` of the samples of all processes converged.

        A batch with fewer than `enough` samples is judged together with the next.
        """
        for name in dict.fromkeys(self.names.values()):
            health = self.layers.get(name, Health())
            before = self.unjudged.pop(name, [0.0, 0.0])
            now = world.sum([health.converged, health.samples])
            converged, samples = before[0] + now[0], before[1] + now[1]
            if samples < enough:
                self.unjudged[name] = [converged, samples]
            elif (share := converged / samples) < least:
                return Trouble("not_converging", name, share, _slow(name, share, least))
        return None


def _slow(name: str, share: float, least: float) -> str:
    remedy = "(a) keep the weights well-posed (constrained=True), (b) lower lr, (c) raise max_steps or rtol of its Stop."
    return f"only {share:.0%} of the samples converged in layer '{name}' (least_converged = {least:g}): {remedy}"
