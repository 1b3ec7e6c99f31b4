"""Operator splitting for monotone maps, z = sigma(W z + u) with I - W >= m I: forward-backward and Peaceman-Rachford.

Both solve the adjoint and the tangent of such a map as well, which are monotone again: with D = diag(sigma'),

    v = W'D v + g   is   v = W's + g   where  s = D (W's + g),
    v = D W v + g   is   v = s + g     where  s = D (W s + W g),

and v -> D v is the proximal operator of a quadratic, since 0 <= D <= 1.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from opteq.batch import norm
from opteq.checks import check_number, invalid
from opteq.convex import raised
from opteq.linear import LinearizedMap
from opteq.operators import Operator
from opteq.solve import Jacobian, Map, Solver, State, per_sample
from opteq.splitting import SplitMap


@dataclass(frozen=True)
class SplitForm(Map):
    """A monotone map made ready for its steps: s solves 0 in (I - W) s - u + dh(s), and the equilibrium is z = s."""

    closed: ClassVar[bool] = True
    fn: SplitMap | LinearizedMap
    step: float
    reflection: Operator | None  # 2 (I + step (I - W))^-1 - I
    shift: Tensor | None = per_sample()  # 2 step (I + step (I - W))^-1 u

    @property
    def base(self) -> SplitMap:
        """The map that is split."""
        assert isinstance(self.fn, SplitMap)
        return self.fn

    def __call__(self, z: Tensor) -> Tensor:
        return self.fn(z)

    def linearize(self, z: Tensor) -> Jacobian:
        return self.fn.linearize(z)

    def enter(self, z: Tensor) -> Tensor:
        """s of a first z."""
        return z

    def source(self) -> Tensor:
        """u."""
        return self.base.u

    def hidden(self, s: Tensor) -> Tensor:
        """W s + u."""
        return self.base.hidden(s)

    def activate(self, p: Tensor) -> Tensor:
        """sigma(p), so that s = activate(hidden(s)) at the solution."""
        return self.base.sigma(p)

    def prox(self, v: Tensor) -> Tensor:
        """prox_{step h}(v)."""
        return self.base.prox(v, self.step)

    def reflect(self, y: Tensor) -> Tensor:
        """2 w - y, where w + step ((I - W) w - u) = y."""
        assert self.reflection is not None
        assert self.shift is not None
        return self.reflection(y).add_(self.shift)

    def output(self, s: Tensor, p: Tensor) -> Tensor:
        """z, given s and p = W s + u."""
        return s

    def sizes(self, s: Tensor, p: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """(|f(z) - z|, |f(z)|), the second to within the first."""
        value = self.activate(p)
        scale = norm(value)
        return norm(value - s if value.requires_grad or value is p else value.sub_(s)), scale


@dataclass(frozen=True)
class LinearSplitForm(SplitForm):
    """The same for v = J v + g or v = J'v + g, J the Jacobian of a monotone map."""

    slope: Tensor = per_sample()  # D
    gain: Tensor = per_sample()  # D / (step + (1 - step) D)
    u: Tensor = per_sample()
    factor: float = 1.0  # |W'| for adjoints, whose residual is W'(D p - s)

    @property
    def base(self) -> SplitMap:
        assert isinstance(self.fn, LinearizedMap)
        assert isinstance(self.fn.base, SplitMap)
        return self.fn.base

    @property
    def transposed(self) -> bool:
        """Whether this is an adjoint."""
        assert isinstance(self.fn, LinearizedMap)
        return self.fn.transposed

    @property
    def g(self) -> Tensor:
        """The right-hand side."""
        assert isinstance(self.fn, LinearizedMap)
        return self.fn.g

    def __call__(self, z: Tensor) -> Tensor:
        """J'z + g or J z + g, without linearising once more."""
        W = self.base.W
        return (W.adjoint(self.slope * z) if self.transposed else W(z).mul_(self.slope)).add_(self.g)

    def enter(self, z: Tensor) -> Tensor:
        if not z.any():
            return torch.zeros_like(z)
        return self.slope * z if self.transposed else z - self.g

    def source(self) -> Tensor:
        return self.u

    def hidden(self, s: Tensor) -> Tensor:
        return (self.base.W.adjoint(s) if self.transposed else self.base.W(s)) + self.u

    def activate(self, p: Tensor) -> Tensor:
        return self.slope * p

    def prox(self, v: Tensor) -> Tensor:
        return self.gain * v

    def reflect(self, y: Tensor) -> Tensor:
        assert self.reflection is not None
        assert self.shift is not None
        return (self.reflection.adjoint(y) if self.transposed else self.reflection(y)).add_(self.shift)

    def output(self, s: Tensor, p: Tensor) -> Tensor:
        return p if self.transposed else s + self.g

    def sizes(self, s: Tensor, p: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return norm(self.activate(p).sub_(s)) * self.factor, norm(z)


def _form(solver: Solver, fn: Map, alpha: "float | Literal['auto']", resolved: bool) -> SplitForm:
    """The map made ready, or a TypeError that says what to do."""
    base = fn.base if isinstance(fn, LinearizedMap) else fn
    if not isinstance(base, SplitMap):
        name, kind = type(solver).__name__, type(base).__name__
        raise TypeError(
            f"{name} splits monotone maps z = sigma(W z + u), I - W >= m I: those of Monotone, MonotoneConv and MonotoneMultiTier. "
            f"Got {kind} instead; solvers that fit any map are Picard, Anderson, Broyden and Newton."
        )
    if resolved and not base.has_resolvent():
        raise TypeError(
            f"{type(solver).__name__} needs the resolvent (I + alpha (I - W))^-1, and none is known for this W, such as a "
            "convolution with zero padding. (a) Give the cell padding='circular', (b) take Anderson(), or (c) ForwardBackward(), "
            "which converges for certain, but slowly where ||I - W|| is many times m."
        )
    step = (_resolved_step if resolved else _forward_step)(base) if alpha == "auto" else float(alpha)
    reflection = base.reflection(step) if resolved else None
    if isinstance(fn, LinearizedMap):
        return _linear_form(fn, base, step, reflection)
    assert isinstance(fn, SplitMap)
    return SplitForm(fn, step, reflection, None if reflection is None else _shift(reflection(fn.u), fn.u, step))


def _shift(reflected: Tensor, u: Tensor, step: float) -> Tensor:
    """2 step (I + step (I - W))^-1 u = step (C u + u)."""
    return reflected.add_(u).mul_(step)


def _linear_form(fn: LinearizedMap, base: SplitMap, step: float, reflection: Operator | None) -> LinearSplitForm:
    slope = base.sigma.derivative(base.hidden(fn.z))
    gain = slope if step == 1 else slope / (slope * (1 - step)).add_(step)
    gain = slope if torch.equal(gain, slope) else gain  # as for ReLU, whose slopes are 0 and 1: less to keep
    u = fn.g if fn.transposed else base.W(fn.g)
    shift = None
    if reflection is not None:
        shift = _shift(reflection.adjoint(u) if fn.transposed else reflection(u), u, step)
    return LinearSplitForm(fn, step, reflection, shift, slope, gain, u, base.norms()[1] if fn.transposed else 1.0)


def _resolved_step(fn: SplitMap) -> float:
    """1 / sqrt(L max(m, 0.6)).

    1 / L has the best guaranteed rate; this is within a third of the best step measured, for L from 0.5 to 130 and m from 0.01
    to 3. The iteration converges for every step.
    """
    return 1 / math.sqrt(max(fn.norms()[0], torch.finfo(fn.u.dtype).tiny) * max(fn.m, 0.6))


def _forward_step(fn: SplitMap) -> float:
    """m / L^2, the middle of the interval in which the iteration contracts: L may be 1.4 times too small."""
    return fn.m / max(fn.norms()[0], fn.m) ** 2


@dataclass(frozen=True)
class SplitState(State):
    """The point s with its image, and the iterate z that they give. `trust`: how far the estimate was below the truth."""

    exact: ClassVar[bool] = False
    s: Tensor
    size: Tensor
    scale: Tensor
    trust: Tensor

    def estimate(self) -> tuple[Tensor, Tensor]:
        return self.size * self.trust, self.scale

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        """By rounding, or where a norm was estimated too small."""
        return replace(self, trust=raised(self.trust, rows, norm(fz - z), self.estimate()[0][rows]))


@dataclass(frozen=True)
class ForwardState(SplitState):
    """p = W s + u."""

    p: Tensor


@dataclass(frozen=True)
class ReflectedState(SplitState):
    """s = prox(t). Both change in place."""

    t: Tensor


def _first(form: SplitForm, z0: Tensor) -> tuple[Tensor, Tensor, int]:
    """s, p = W s + u at z0, and the products that they took."""
    if not z0.any() and form.source().shape == z0.shape:
        s = form.enter(z0)
        if not s.any():
            return s, form.source(), 0
    s = form.enter(z0)
    return s, form.hidden(s), 1


def _check_alpha(solver: Solver, alpha: object) -> None:
    if isinstance(alpha, str):
        if alpha != "auto":
            raise ValueError(invalid(solver, "alpha", "'auto' or a number > 0", alpha))
    else:
        check_number(solver, "alpha", alpha, 0.0, open_low=True)


@dataclass(frozen=True)
class ForwardBackward(Solver):
    """z <- prox_{alpha h}(z - alpha ((I - W) z - u)): one product a step; converges for alpha in (0, 2 m / L^2), L = ||I - W||.

    `alpha`: "auto" takes m / L^2, with L from a few power iterations. Linear convergence with a factor of sqrt(1 - m^2 / L^2),
    which is slow where L is many times m; PeacemanRachford is faster where the map has a resolvent.
    """

    differentiable: ClassVar[bool] = True
    alpha: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _check_alpha(self, self.alpha)

    def prepare(self, fn: Map) -> SplitForm:
        return _form(self, fn, self.alpha, resolved=False)

    def init(self, fn: Map, z0: Tensor) -> ForwardState:
        assert isinstance(fn, SplitForm)
        s, p, evals = _first(fn, z0)
        z = fn.output(s, p)
        size, scale = fn.sizes(s, p, z)
        return ForwardState(z, evals, s, size, scale, torch.ones_like(size), p)

    def step(self, fn: Map, state: State) -> ForwardState:
        assert isinstance(fn, SplitForm)
        assert isinstance(state, ForwardState)
        s = fn.prox(torch.lerp(state.s, state.p, fn.step))
        p = fn.hidden(s)
        z = fn.output(s, p)
        size, scale = fn.sizes(s, p, z)
        return ForwardState(z, state.evals + 1, s, size, scale, state.trust, p)


@dataclass(frozen=True)
class PeacemanRachford(Solver):
    """t <- C (2 prox(t) - t) + c with C = 2 (I + alpha (I - W))^-1 - I: one product a step, and a factorisation for all of them.

    Converges for every alpha > 0, also where ||W|| > 1. The factorisation is made once for a bound map and serves its backward
    solves. `alpha`: "auto" takes 1 / sqrt(L max(m, 0.6)), with L = ||I - W|| from a few power iterations.
    """

    alpha: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _check_alpha(self, self.alpha)

    def prepare(self, fn: Map) -> SplitForm:
        return _form(self, fn, self.alpha, resolved=True)

    def init(self, fn: Map, z0: Tensor) -> ReflectedState:
        assert isinstance(fn, SplitForm)
        s, p, evals = _first(fn, z0)
        z = fn.output(s, p)
        size, scale = fn.sizes(s, p, z)
        t = torch.lerp(s, p, fn.step)
        return ReflectedState(z, evals, _apart(fn.prox(t), t), size, scale, torch.ones_like(size), t)

    def step(self, fn: Map, state: State) -> ReflectedState:
        """With w the resolvent of y = 2 s - t the new t is 2 w - y, which is also w - alpha ((I - W) w - u).

        So W w + u needs no product of its own, and w, the iterate, comes with its residual.
        """
        assert isinstance(fn, SplitForm)
        assert isinstance(state, ReflectedState)
        t = fn.reflect(torch.sub(state.s, state.t).add_(state.s))
        w = state.t.neg_().add_(t).mul_(0.5).add_(state.s)
        p = torch.lerp(w, t, 1 / fn.step, out=state.s)
        z = fn.output(w, p)
        size, scale = fn.sizes(w, p, z)
        return ReflectedState(z, state.evals + 1, _apart(fn.prox(t), t), size, scale, state.trust, t)


def _apart(s: Tensor, t: Tensor) -> Tensor:
    """s in memory of its own, also for the identity."""
    return s.clone() if s is t else s
