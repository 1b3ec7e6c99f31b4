"""Maps z -> sigma(W z + u), and those among them that are monotone inclusions, which splitting methods solve."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.operators import Dense, Operator
from opteq.solve import Jacobian, Map, per_sample

__all__ = ["ActivationMap", "Factors", "SplitMap"]


@dataclass(frozen=True)
class ActivationMap(Map):
    """z -> sigma(W z + u), with u = U x + b."""

    closed: ClassVar[bool] = True
    W: Operator
    sigma: Activation
    u: Tensor = per_sample()

    def hidden(self, z: Tensor) -> Tensor:
        """W z + u."""
        if isinstance(self.W, Dense):
            return torch.addmm(self.u, z, self.W.W.T)
        return self.W(z) + self.u

    def __call__(self, z: Tensor) -> Tensor:
        return self.sigma(self.hidden(z))

    def linearize(self, z: Tensor) -> Jacobian:
        """J = D W, D = diag(sigma'(W z + u))."""
        slope = self.sigma.derivative(self.hidden(z))
        return Jacobian(jvp=lambda v: slope * self.W(v), vjp=lambda v: self.W.adjoint(slope * v))


class Factors:
    """What solvers computed from the tensors of a bound map, once, for its forward and its backward solves."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[list[tuple[Tensor, int]], Any]] = {}

    def get(self, key: Any, tensors: list[Tensor], make: Callable[[], Any]) -> Any:
        """What `make` gives, made anew only if a tensor is not the one, or not as it was, when it was made before."""
        if key in self._made:
            sources, value = self._made[key]
            if all(_same(old, version, new) for (old, version), new in zip(sources, tensors, strict=True)):
                return value
        value = make()
        self._made[key] = ([(t, t._version) for t in tensors], value)  # a source that is kept cannot be overlaid by another
        return value


def _same(old: Tensor, version: int, new: Tensor) -> bool:
    """Whether `new` shares its memory with `old`, which has not been written to since."""
    alike = old.shape == new.shape and old.stride() == new.stride() and old.dtype == new.dtype and old.device == new.device
    return alike and old.data_ptr() == new.data_ptr() and old._version == version == new._version


@dataclass(frozen=True)
class SplitMap(ActivationMap):
    """z -> sigma(W z + u) with sigma = prox_h and I - W >= m I: its equilibrium solves 0 in (I - W) z - u + dh(z).

    It exists and is unique for m > 0, whatever the norm of W. Winston and Kolter (2020), "Monotone operator equilibrium networks".
    """

    m: float = field(kw_only=True)
    factors: Factors = field(default_factory=Factors, compare=False, repr=False, kw_only=True)

    def linear(self, z: Tensor) -> Tensor:
        """(I - W) z - u."""
        return z - self.hidden(z)
