"""Models are left as they were: parameters, buffers, modes, and the random numbers of others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from opteq.checks import undone

__all__ = ["kept", "undisturbed"]


@contextmanager
def kept(model: nn.Module, seed: int = 0) -> Iterator[Callable[[], None]]:
    """Gives a function that puts parameters, buffers and modes back as they are now, and random numbers to the seed.

    At the end it is called in any case, and the random numbers outside go on as if nothing had been drawn.
    Values are written through `.data`, which leaves the version counters alone: a graph built before can still be differentiated.
    """
    modes = [(part, part.training) for part in model.modules()]
    buffers = [(part, name, buffer) for part in model.modules() for name, buffer in part._buffers.items()]
    values = [(tensor, tensor.detach().clone()) for tensor in [*model.parameters(), *model.buffers()]]
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    generators = [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]
    numbers = [(generator, generator.get_state()) for generator in generators]

    def reset() -> None:
        for generator in generators:
            generator.manual_seed(seed)
        for part, training in modes:
            part.training = training
        for part, name, buffer in buffers:
            part._buffers[name] = buffer  # a forward pass may have put another tensor in its place
        for tensor, value in values:
            tensor.data.copy_(value)

    def undo() -> None:
        reset()
        for generator, state in numbers:
            generator.set_state(state)

    with undone(undo):
        yield reset


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and nothing is differentiated."""
    with kept(model), torch.no_grad():
        model.eval()
        yield
