"""Sequential averaging: of all fixed points, the one of least R."""

import math
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from opteq.checks import check_instance, check_number, invalid
from opteq.maps import Map, first_value
from opteq.regularizers import Regularizer
from opteq.solver import Solver, State, ValueState


@dataclass(frozen=True)
class SAMState(ValueState):
    """z, f(z), and the number of steps so far."""

    k: int


@dataclass(frozen=True)
class SAM(Solver):
    """z <- beta_k S_k(z) + (1 - beta_k) f(z), S_k(z) = (1 - gamma lambda_k) z - gamma grad R(z): tends to argmin R over Fix(f).

    beta_k = eta k^-rho and lambda_k = eta k^-c with rho + 2 c < 1. For an R whose gradient is L-Lipschitz, gamma = 1 / (2 L) and
    eta = min(sqrt(2 L), L / 2, 1 / 2), as Theorem 5 asks; an R without such a constant takes `gamma` (0.1) and eta = 1/2.

    The error falls like k^-min(rho, c) only, and any fixed point has residual 0: so every step of `Stop.max_steps` is taken,
    whatever the residual. Differentiate it with Unrolled(steps); where fixed points are not unique, Implicit has no meaning.
    Optimization induced equilibrium networks, Eq. (11) and Theorem 5.

    Examples:
        >>> import torch
        >>> from opteq import Stop, solve
        >>> from opteq.regularizers import L2
        >>> from opteq.solvers import SAM
        >>> fn = lambda z: z.mean(1, keepdim=True) + torch.tensor([1.0, -1.0])  # (t + 1, t - 1) is a fixed point for every t
        >>> found = solve(fn, torch.tensor([[5.0, 1.0]]), SAM(L2()), Stop(max_steps=300))
        >>> bool((found.z - torch.tensor([1.0, -1.0])).norm() < 0.3)  # the one of least norm
        True
    """

    differentiable: ClassVar[bool] = True
    selective: ClassVar[bool] = True
    regularizer: Regularizer
    _: KW_ONLY
    rho: float = 0.5
    c: float = 0.2
    gamma: float | None = None

    def __post_init__(self) -> None:
        check_instance(self, "regularizer", self.regularizer, Regularizer, "a Regularizer, such as L2()")
        check_number(self, "rho", self.rho, 0.0, open_low=True)
        check_number(self, "c", self.c, 0.0, open_low=True)
        if self.rho + 2 * self.c >= 1:
            raise ValueError(invalid(self, "rho", "such that rho + 2 c < 1 (Theorem 5)", f"{self.rho} + 2 * {self.c}"))
        if self.gamma is not None:
            check_number(self, "gamma", self.gamma, 0.0, 1.0)

    @cached_property
    def schedule(self) -> tuple[float, float]:
        """(gamma, eta)."""
        L = self.regularizer.smoothness
        gamma, eta = (0.1, 0.5) if not L else (1 / (2 * L), min(math.sqrt(2 * L), L / 2, 0.5))
        return gamma if self.gamma is None else self.gamma, eta

    def init(self, fn: Map, z0: Tensor) -> SAMState:
        return SAMState(z0, 1, first_value(fn, z0), 0)

    def step(self, fn: Map, state: State) -> SAMState:
        assert isinstance(state, SAMState)
        k, (gamma, eta) = state.k + 1, self.schedule
        beta, decay = eta * k**-self.rho, eta * k**-self.c
        toward = (1 - gamma * decay) * state.z - gamma * self.regularizer.gradient(state.z)
        z = beta * toward + (1 - beta) * state.fz
        return replace(state, z=z, fz=fn(z), evals=state.evals + 1, k=k)
