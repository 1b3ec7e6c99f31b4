"""Operator splitting for monotone maps, z = sigma(W z + u) with I - W >= m I: forward-backward and Peaceman-Rachford.

Both solve the adjoint and the tangent of such a map as well, which are monotone again: with D = diag(sigma'),

    v = W'D v + g   is   v = W's + g   where  s = D (W's + g),
    v = D W v + g   is   v = s + g     where  s = D (W s + W g),

and v -> D v is the proximal operator of a quadratic, since 0 <= D <= 1.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, TypeAlias, cast

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.batch import is_zero, norm, nothing
from opteq.checks import check_number, invalid
from opteq.convex import raised
from opteq.linear import GMRES, GMRESState, LinearizedMap
from opteq.maps import Map
from opteq.operators import Operator, Transposed
from opteq.solver import Solver, State, ValueState
from opteq.splitting import Diagonal, SplitMap
from opteq.tree import per_sample

Alpha: TypeAlias = float | Literal["auto"]


@dataclass(frozen=True)
class SplitForm(Map):
    """A monotone map, or the adjoint or tangent of one, made ready for its steps: 0 in (I - W) s - u + dh(s) in `split`."""

    closed: ClassVar[bool] = True
    split: SplitMap
    kind: Literal["map", "adjoint", "tangent"]
    step: float
    reflection: Operator | None  # 2 (I + step (I - W))^-1 - I
    factor: float  # |W'| for adjoints, whose residual is W'(D p - s)
    shift: Tensor | None = per_sample()  # 2 step (I + step (I - W))^-1 u
    g: Tensor | None = per_sample()  # of a tangent

    def __call__(self, z: Tensor) -> Tensor:
        """The map itself, for the loop."""
        if self.kind == "map":
            return self.split(z)
        if self.kind == "adjoint":
            return self.split.hidden(self.split.sigma(z))
        return self.split.sigma(self.split.W(z)) + self._g()

    def _g(self) -> Tensor:
        assert self.g is not None
        return self.g

    def enter(self, z: Tensor) -> Tensor:
        """s of a first z."""
        if self.kind == "map" or is_zero(z):
            return z
        return self.split.sigma(z) if self.kind == "adjoint" else z - self._g()

    def output(self, s: Tensor, p: Tensor) -> Tensor:
        """z, given s and p = W s + u."""
        if self.kind == "map":
            return s
        return p if self.kind == "adjoint" else s + self._g()

    def prox(self, v: Tensor, spare: Tensor | None = None) -> Tensor:
        """prox_{step h}(v), for an adjoint or a tangent written over a spare tensor."""
        sigma = cast(Activation | Diagonal, self.split.sigma)
        if spare is not None and isinstance(sigma, Diagonal):
            return torch.mul(v, sigma.ratio, out=spare)
        return self.split.prox(v, self.step)

    def reflect(self, y: Tensor) -> Tensor:
        """2 w - y, where w + step ((I - W) w - u) = y."""
        assert self.reflection is not None
        assert self.shift is not None
        return self.reflection.affine(self.shift, y)

    def sizes(self, s: Tensor, p: Tensor, z: Tensor, *, spare: bool = False) -> tuple[Tensor, Tensor]:
        """(|f(z) - z|, |f(z)|), the second to within the first. `spare`: s of an adjoint or a tangent may be written over."""
        sigma = cast(Activation | Diagonal, self.split.sigma)
        if spare and isinstance(sigma, Diagonal):
            return norm(s.neg_().addcmul_(sigma.D, p)) * self.factor, norm(z)
        value = sigma(p)
        scale = norm(value if self.kind == "map" else z)
        gap = value - s if _shares(value, p) else value.sub_(s)
        return norm(gap) * self.factor, scale

    def sourced(self, g: Tensor) -> Self:
        """The same adjoint or tangent with another g, not yet shifted."""
        assert self.kind != "map"
        adjoint = self.kind == "adjoint"
        split = replace(self.split, u=g if adjoint else self.split.W(g))
        return replace(self, split=split, shift=None, g=None if adjoint else g)

    def shifted(self) -> Self:
        """The same with what each reflection adds: 2 step (I + step (I - W))^-1 u = step (C u + u)."""
        assert self.reflection is not None
        u = self.split.u
        return replace(self, shift=nothing(u) if is_zero(u) else self.reflection.affine(u, u).mul_(self.step))

    def first(self, z0: Tensor) -> tuple[Tensor, Tensor, int]:
        """s and p = W s + u at z0, and the products that they took."""
        s = self.enter(z0)
        return (s, self.split.hidden(s), 1) if not is_zero(s) else (s, self.split.u, 0)


def _shares(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin in the same memory: an activation may answer with its argument, or a view of it."""
    return a.numel() > 0 and a.data_ptr() == b.data_ptr()


def _base(solver: Solver, fn: Map) -> SplitMap:
    """The map that is split, or a TypeError that names the solvers that fit."""
    base = fn.base if isinstance(fn, LinearizedMap) else fn
    if not isinstance(base, SplitMap):
        name, kind = type(solver).__name__, type(base).__name__
        raise TypeError(
            f"{name} splits monotone maps z = sigma(W z + u), I - W >= m I: those of Monotone, MonotoneConv and MonotoneMultiTier. "
            f"Got {kind} instead; solvers that fit any map are Picard, Anderson, Broyden and Newton."
        )
    return base


def _form(fn: Map, base: SplitMap, step: float, reflection: Operator | None) -> SplitForm:
    """The map, adjoint or tangent made ready; `reflection` is that of the base."""
    if not isinstance(fn, LinearizedMap):
        return SplitForm(base, "map", step, reflection, 1.0, None, None)
    diagonal = cast(Activation, Diagonal.of(base.sigma.derivative(base.hidden(fn.z)), step))  # it has what a split needs of one
    if not fn.transposed:
        split = replace(base, sigma=diagonal, u=base.W(fn.g))
        return SplitForm(split, "tangent", step, reflection, 1.0, None, fn.g)
    turned = None if reflection is None else Transposed(reflection)
    split = replace(base, W=Transposed(base.W), sigma=diagonal, u=fn.g)
    return SplitForm(split, "adjoint", step, turned, base.norms()[1], None, None)


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


def _check_alpha(solver: Solver, alpha: object) -> None:
    if isinstance(alpha, (int, float)):
        check_number(solver, "alpha", alpha, 0.0, open_low=True)
    elif alpha != "auto":
        raise (ValueError if isinstance(alpha, str) else TypeError)(invalid(solver, "alpha", "'auto' or a number > 0", alpha))


@dataclass(frozen=True)
class ForwardState(ValueState):
    """z and f(z) = sigma(p), p = W z + u."""

    p: Tensor


@dataclass(frozen=True)
class LinearForwardState(SplitState):
    """The same of an adjoint or a tangent: p = W s + u."""

    p: Tensor


@dataclass(frozen=True)
class ForwardBackward(Solver):
    """z <- prox_{alpha h}(z - alpha ((I - W) z - u)): one product a step; converges for alpha in (0, 2 m / L^2), L = ||I - W||.

    `alpha`: "auto" takes m / L^2, with L from a few power iterations. Linear convergence with a factor of sqrt(1 - m^2 / L^2),
    which is slow where L is many times m: a larger alpha may be faster there, without the guarantee, and PeacemanRachford is where
    the map has a resolvent.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import Monotone
        >>> from opteq.solvers import ForwardBackward
        >>> layer = Equilibrium(Monotone(4, 8, m=0.5), ForwardBackward(), Stop(max_steps=500))
        >>> print(layer.solve(torch.randn(5, 4)).status)
        Status.CONVERGED
    """

    differentiable: ClassVar[bool] = True
    alpha: Alpha = "auto"

    def __post_init__(self) -> None:
        _check_alpha(self, self.alpha)

    def prepare(self, fn: Map) -> SplitForm:
        if isinstance(fn, SplitForm):
            return fn
        base = _base(self, fn)
        return _form(fn, base, base.forward_step() if isinstance(self.alpha, str) else float(self.alpha), None)

    def init(self, fn: Map, z0: Tensor) -> ForwardState | LinearForwardState:
        assert isinstance(fn, SplitForm)
        if fn.kind == "map":
            return self._exact(fn, z0, 1)
        s, p, evals = fn.first(z0)
        z = fn.output(s, p)
        size, scale = fn.sizes(s, p, z)
        return LinearForwardState(z, evals, s, size, scale, torch.ones_like(size), p)

    def step(self, fn: Map, state: State) -> ForwardState | LinearForwardState:
        assert isinstance(fn, SplitForm)
        if isinstance(state, ForwardState):
            return self._exact(fn, fn.prox(torch.lerp(state.z, state.p, fn.step)), state.evals + 1)
        assert isinstance(state, LinearForwardState)
        s = fn.prox(torch.lerp(state.s, state.p, fn.step))
        p = fn.split.hidden(s)
        z = fn.output(s, p)
        size, scale = fn.sizes(s, p, z)
        return LinearForwardState(z, state.evals + 1, s, size, scale, state.trust, p)

    def _exact(self, fn: SplitForm, z: Tensor, evals: int) -> ForwardState:
        p = fn.split.hidden(z)
        return ForwardState(z, evals, fn.split.sigma(p), p)


@dataclass(frozen=True)
class ReflectedState(SplitState):
    """s = prox(t). Both change in place."""

    history: ClassVar[tuple[str, ...]] = ("s", "t")
    t: Tensor


@dataclass(frozen=True)
class PeacemanRachford(Solver):
    """t <- C (2 prox(t) - t) + c with C = 2 (I + alpha (I - W))^-1 - I: one product a step, and a factorisation for all of them.

    Converges for every alpha > 0, also where ||W|| > 1. The factorisation is made once for a bound map and serves its backward
    solves. `alpha`: "auto" takes 1 / sqrt(L max(m, min(0.6, L))), with L = ||I - W|| from a few power iterations. Rounding limits
    the residual to about eps L / alpha.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import Monotone
        >>> from opteq.solvers import PeacemanRachford
        >>> layer = Equilibrium(Monotone(4, 8), PeacemanRachford(alpha=1.0))
        >>> print(layer.solve(torch.randn(5, 4)).status)
        Status.CONVERGED
    """

    alpha: Alpha = "auto"

    def __post_init__(self) -> None:
        _check_alpha(self, self.alpha)

    def prepare(self, fn: Map) -> SplitForm:
        if isinstance(fn, SplitForm):
            return fn.shifted()
        base = _base(self, fn)
        if not base.has_resolvent():
            raise TypeError(
                f"PeacemanRachford needs the resolvent (I + alpha (I - W))^-1, and none is known for this W in {base.u.dtype}: "
                "half precision has none, nor has a convolution with zero padding. (a) Take float32 or float64, and for a "
                "convolution padding='circular', (b) take Anderson(), or (c) ForwardBackward(), which converges for certain, "
                "but slowly where ||I - W|| is many times m."
            )
        step = base.resolved_step() if isinstance(self.alpha, str) else float(self.alpha)
        return _form(fn, base, step, base.reflection(step)).shifted()

    def init(self, fn: Map, z0: Tensor) -> ReflectedState:
        assert isinstance(fn, SplitForm)
        s, p, evals = fn.first(z0)
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
        y = torch.lerp(state.t, state.s, 2.0, out=state.s)
        t = fn.reflect(y)
        w = torch.lerp(y, t, 0.5, out=state.t)
        p = torch.lerp(w, t, 1 / fn.step, out=y)
        z = fn.output(w, p)
        size, scale = fn.sizes(w, p, z, spare=True)
        return ReflectedState(z, state.evals + 1, _apart(fn.prox(t, spare=w), t), size, scale, state.trust, t)


def _apart(s: Tensor, t: Tensor) -> Tensor:
    """s in memory of its own."""
    return s.clone() if _shares(s, t) else s


@dataclass(frozen=True)
class SplitLinear(Solver):
    """Peaceman-Rachford for the adjoint or tangent of a monotone map, or GMRES where rounding would keep it from `rtol`.

    z = p = w + (t - w) / alpha has an error of eps |w| / alpha, which its residual, W'(D p - s), multiplies by |W|.
    """

    estimates: ClassVar[bool] = True
    rtol: float

    def prepare(self, fn: Map) -> Map:
        if isinstance(fn, SplitForm):
            return PeacemanRachford().prepare(fn)
        base = _base(self, fn)
        noise = torch.finfo(base.u.dtype).eps * max(1.0, base.norms()[1]) / base.resolved_step()
        return fn if noise > self.rtol else PeacemanRachford().prepare(fn)

    def init(self, fn: Map, z0: Tensor) -> State:
        return PeacemanRachford().init(fn, z0) if isinstance(fn, SplitForm) else GMRES().init(fn, z0)

    def step(self, fn: Map, state: State) -> State:
        return GMRES().step(fn, state) if isinstance(state, GMRESState) else PeacemanRachford().step(fn, state)
