"""Options of a training that need a look inside of the model: warm-started equilibria and the Jacobian penalty."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from opteq.checks import undone
from opteq.equilibrium import Equilibrium


def equilibria(model: nn.Module) -> list[Equilibrium]:
    """The Equilibrium layers of a model."""
    return [part for part in model.modules() if isinstance(part, Equilibrium)]


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The x of layer(x), or of layer(x=x)."""
    x: Tensor = args[0] if args else kwargs["x"]
    return x


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class WarmStart:
    """z of each training sample, kept from one epoch to the next, where its solve begins."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        found = equilibria(model)
        if len(found) != 1:
            raise ValueError(f"warm_start needs a model with one Equilibrium. Got one with {len(found)} instead.")
        self.layer, self.samples = found[0], samples
        self.states: Tensor | None = None

    @contextmanager
    def of(self, rows: Tensor) -> Iterator[None]:
        """Inside, the layer begins at what it found for these samples last, and what it finds is kept."""

        def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self.states is None:
                return args, kwargs
            x = _input(args, kwargs)
            return (x,), {"z0": self.states[rows].to(x.device)}

        def after(layer: nn.Module, args: tuple[Any, ...], z: Tensor) -> None:
            if self.states is None:
                self.states = torch.zeros(self.samples, *z.shape[1:], dtype=z.dtype)
            found = z.detach().cpu()
            sound = found.flatten(1).isfinite().all(1)
            self.states[rows[sound]] = found[sound]

        hooks = [self.layer.register_forward_pre_hook(before, with_kwargs=True), self.layer.register_forward_hook(after)]
        with undone(partial(_remove, hooks)):
            yield
        if self.states is None:
            raise ValueError("warm_start needs a model that calls its Equilibrium: layer(x), not layer.solve(x).")


class JacobianPenalty:
    """|J|_F^2 / n at the equilibria that were solved inside `watching()`, by one random vector v: |J'v|^2 / n.

    Its gradient reaches the parameters of f, not z. Bai, Koltun and Kolter (2021), "Stabilizing equilibrium models by Jacobian
    regularization".
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = equilibria(model)
        if not self.layers:
            raise ValueError("jacobian is about equilibria, and the model has no Equilibrium: take jacobian=0.")
        self.seen: list[tuple[Equilibrium, Tensor, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the input and the equilibrium of each layer are noted."""
        self.seen = []

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> None:
            assert isinstance(layer, Equilibrium)
            self.seen.append((layer, _input(args, kwargs), z.detach()))

        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in self.layers]
        with undone(partial(_remove, hooks)):
            yield

    def value(self) -> Tensor:
        """The mean over the samples."""
        if not self.seen:
            raise ValueError("jacobian needs a model that calls its Equilibrium: layer(x), not layer.solve(x).")
        return torch.stack([self._of(*seen) for seen in self.seen]).sum()

    @staticmethod
    def _of(layer: Equilibrium, x: Tensor, z: Tensor) -> Tensor:
        z = z.requires_grad_()
        fz = layer.cell.bind(x).to(z.dtype)(z)
        product = torch.autograd.grad(fz, z, torch.randn_like(z), create_graph=True)[0]
        return product.square().mean()
