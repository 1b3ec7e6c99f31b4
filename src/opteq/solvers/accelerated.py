"""Accelerated proximal gradients: plain steps with momentum, which is dropped where it turns against the step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.batch import dot, norm, per_sample_like
from opteq.checks import check_number
from opteq.convex import DualForm, DualState
from opteq.maps import Map, first_value
from opteq.products import product
from opteq.solver import ResidualState, Solver, State, residual_at


@dataclass(frozen=True)
class AcceleratedState(ResidualState):
    """The extrapolated point z, its residual, and what momentum needs."""

    before: Tensor  # f at the point before
    t: Tensor  # Nesterov's t_k
    worst: Tensor  # |r| above which momentum is dropped


@dataclass(frozen=True)
class DualAcceleratedState(DualState):
    """The same in the dual: y is the extrapolated point and s = sigma(G y + u)."""

    s: Tensor
    y: Tensor
    before: Tensor
    t: Tensor
    worst: Tensor
    r_size: Tensor  # |s - y|

    def hidden(self, fn: DualForm, rows: Tensor | None) -> Tensor:
        return self.s if rows is None else self.s[rows]


@dataclass(frozen=True)
class Accelerated(Solver):
    """z <- f(z) + beta (f(z) - f(z_before)): FISTA, for maps that are a gradient step or a prox, such as one-layer and wide OptEq.

    `modulus`: m if f is a contraction with factor 1 - m (a dense OptEq: m = 1 - L ||W||^2 / mu), for the constant
    beta = (1 - sqrt(m)) / (1 + sqrt(m)); None takes Nesterov's growing beta_k, begun anew for each sample when momentum
    opposes the step or its residual grows. Other contractions are solved too, by these restarts, but more slowly than by Picard.
    A convex map with a dual (a dense OptEq) is solved in its dual form, one product a step.
    Beck and Teboulle (2009); O'Donoghue and Candes (2015).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.solvers import Accelerated
        >>> print(Equilibrium(OptEq(4, 8, 16, constrained=True), Accelerated()).solve(torch.randn(5, 4)).status)
        Status.CONVERGED
    """

    modulus: float | None = None

    def __post_init__(self) -> None:
        if self.modulus is not None:
            check_number(self, "modulus", self.modulus, 0.0, 1.0, open_low=True)

    def prepare(self, fn: Map) -> Map:
        return DualForm.of(fn)

    def init(self, fn: Map, z0: Tensor) -> AcceleratedState | DualAcceleratedState:
        if isinstance(fn, DualForm):
            _, y, Gy, size, scale, evals = fn.first(z0)
            s = fn.dual.sigma(Gy + fn.dual.u)
            r_size, one = norm(s - y), torch.ones_like(size)
            return DualAcceleratedState(z0, evals, size, scale, one, False, s, y, y, one, r_size, r_size)
        fields = residual_at(z0, first_value(fn, z0))
        return AcceleratedState(evals=1, **fields, before=z0, t=torch.ones_like(fields["size"]), worst=fields["size"])

    def step(self, fn: Map, state: State) -> AcceleratedState | DualAcceleratedState:
        if isinstance(fn, DualForm):
            assert isinstance(state, DualAcceleratedState)
            return self._dual_step(fn, state)
        assert isinstance(state, AcceleratedState)
        value = state.value()
        z, t = self._extrapolate(value, state.before, state.r, state.t, state.size > state.worst)
        fields = residual_at(z, fn(z))
        return replace(state, evals=state.evals + 1, **fields, before=value, t=t, worst=torch.minimum(state.worst, state.size))

    def _dual_step(self, fn: DualForm, state: DualAcceleratedState) -> DualAcceleratedState:
        y, t = self._extrapolate(state.s, state.before, state.s - state.y, state.t, state.r_size > state.worst)
        Gy = product(y, fn.dual.G)
        s = fn.dual.sigma(Gy + fn.dual.u)
        r = s - y
        size, scale, worst = fn.size(r), fn.scale(y, Gy), torch.minimum(state.worst, state.r_size)
        return DualAcceleratedState(state.z, state.evals + 1, size, scale, state.trust, True, s, y, state.s, t, worst, norm(r))

    def _extrapolate(self, value: Tensor, before: Tensor, r: Tensor, t: Tensor, worse: Tensor) -> tuple[Tensor, Tensor]:
        """The next point, and t_{k+1}."""
        move = value - before
        opposed = dot(r, move) < 0
        t = torch.where(opposed | worse, 1.0, t)
        following = (1 + torch.sqrt(1 + 4 * t * t)) / 2
        beta = (t - 1) / following
        if self.modulus is not None:
            root = self.modulus**0.5
            beta = torch.where(worse, 0.0, torch.full_like(t, (1 - root) / (1 + root)))
        return torch.addcmul(value, per_sample_like(beta, value), move), following
