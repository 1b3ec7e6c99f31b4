"""z <- (1 - damping) z + damping f(z)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opteq.checks import check_number, is_transformed
from opteq.maps import Map, first_value
from opteq.solver import Solver, State, ValueState


@dataclass(frozen=True)
class Picard(Solver):
    """Plain iteration, z <- (1 - damping) z + damping f(z): converges for contractions, and damped for nonexpansive maps.

    Examples:
        >>> import torch
        >>> from opteq import solve
        >>> from opteq.solvers import Picard
        >>> solve(lambda z: 3 - z, torch.zeros(1, 1), Picard(damping=0.5)).z  # plain steps would go to and fro
        tensor([[1.5000]])
    """

    differentiable: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True
    damping: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "damping", self.damping, 0.0, 1.0, open_low=True)

    def init(self, fn: Map, z0: Tensor) -> ValueState:
        return ValueState(z0, 1, first_value(fn, z0))

    def step(self, fn: Map, state: State) -> ValueState:
        assert isinstance(state, ValueState)
        z = state.fz if self.damping == 1 else torch.lerp(state.z, state.fz, self.damping)
        fz, evals = fn(z), state.evals + 1
        if not is_transformed(fz) and fz.data_ptr() == z.data_ptr():  # f answers in memory of its own: look again from a copy
            z = z.clone()
            fz, evals = fn(z), evals + 1
        return ValueState(z, evals, fz)
