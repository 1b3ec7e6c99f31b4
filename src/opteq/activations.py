"""Activations with what the theory needs to know of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from opteq.checks import invalid


@dataclass(frozen=True)
class Activation:
    """sigma, its derivative (a generalised one at kinks), and its Lipschitz constant; monotone, as the theory assumes."""

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    lipschitz: float

    def __call__(self, a: Tensor) -> Tensor:
        return self.function(a)


def _relu_slope(a: Tensor) -> Tensor:
    return (a > 0).to(a.dtype)


def _leaky_slope(a: Tensor) -> Tensor:
    return torch.where(a > 0, torch.ones_like(a), 0.01)


def _tanh_slope(a: Tensor) -> Tensor:
    return 1 - torch.tanh(a) ** 2


def _sigmoid_slope(a: Tensor) -> Tensor:
    s = torch.sigmoid(a)
    return s * (1 - s)


def _leaky_relu(a: Tensor) -> Tensor:
    return torch.nn.functional.leaky_relu(a, 0.01)


def _identity(a: Tensor) -> Tensor:
    return a


_TABLE: Final = {
    a.name: a
    for a in (
        Activation("relu", torch.relu, _relu_slope, 1.0),
        Activation("leaky_relu", _leaky_relu, _leaky_slope, 1.0),
        Activation("tanh", torch.tanh, _tanh_slope, 1.0),
        Activation("sigmoid", torch.sigmoid, _sigmoid_slope, 0.25),
        Activation("identity", _identity, torch.ones_like, 1.0),
    )
}


def find_activation(owner: object, given: str | Activation) -> Activation:
    """The activation of that name, or the one given."""
    if isinstance(given, Activation):
        return given
    if not isinstance(given, str):
        raise TypeError(invalid(owner, "activation", "a name or an Activation", given))
    if given not in _TABLE:
        raise ValueError(invalid(owner, "activation", f"one of {', '.join(map(repr, _TABLE))}, or an Activation", given))
    return _TABLE[given]
