"""Peaceman-Rachford on the dual of a convex map, and Newton's method for the samples that it does not help."""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from opteq.batch import norm
from opteq.convex import ConvexMap, DualForm
from opteq.products import affine, definite_inverse, product
from opteq.solve import Map, Solver, State, per_sample
from opteq.solvers.dual import DualNewtonState, advance, begin, evaluate

_STEP = 1.2  # over the mean eigenvalue of I - G is the step: best for eight spectra, and 20% off either way costs a step in ten
_SLOW = 0.55  # a sample whose steps leave more than this part of the residual, in the mean, goes on by Newton's method
_TERM = 8  # steps after which that is asked, of all at once: a batch in two parts costs two products a step


@dataclass(frozen=True)
class ReflectedForm(DualForm):
    """A dual form made ready: 0 in (I - G) s - u + dh(s), with sigma = prox_h."""

    step: float
    C: Tensor  # 2 (I + step (I - G))^-1 - I, symmetric
    shift: Tensor = per_sample()  # 2 step (I + step (I - G))^-1 u

    @classmethod
    def over(cls, form: DualForm) -> DualForm:
        """The form with a reflection; as it is where there is none: sigma no known prox, or ||W||^2 far above mu."""
        G, u = form.dual.G, form.dual.u
        gap = 1 - float(G.diagonal().mean())
        if not (gap > 0 and form.dual.sigma.has_prox() and G.dtype in (torch.float32, torch.float64)):
            return form
        step, unit = _STEP / gap, torch.eye(len(G), dtype=G.dtype, device=G.device)
        R = definite_inverse((unit - G).mul_(step).add_(unit))
        if R is None:
            return form
        C = R.mul_(2).sub_(unit)
        return cls(form.base, form.dual, step, C, product(u, C).add_(u).mul_(step))


@dataclass(frozen=True)
class ReflectedState(DualNewtonState):
    """A sample that is `reflected` has t in the place of the gap, a = G w + u at w, its point in the dual, and in the place of the
    best residual that of the last time it was asked. `idle` > 0: it is to be turned to Newton's method.
    """

    reflected: Tensor
    age: int

    def hidden(self, fn: DualForm, rows: Tensor | None) -> Tensor:
        a, gap, reflected = (part if rows is None else part[rows] for part in (self.a, self.gap, self.reflected))
        if reflected.all():
            return fn.dual.sigma(a)
        return fn.dual.sigma(torch.where(reflected[:, None], a, a + gap))

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        """Where the truth is above the sure bound, C and c are rounded too much: Newton's method goes on."""
        beyond = rows[norm(fz - z) > self.error[rows]]
        return replace(super().corrected(rows, z, fz), idle=self.idle.index_fill(0, beyond, 1))


@dataclass(frozen=True)
class DualSplitting(Solver):
    """t <- C (2 prox(t) - t) + c with C = 2 (I + alpha (I - G))^-1 - I, G = W W' / mu: Peaceman-Rachford on the dual of an OptEq.

    One product of the size of G a step, and one factorisation. alpha is 1.2 over the mean eigenvalue of I - G. With ReLU an error
    is multiplied by C S, S = diag(sign t): where the signs have nothing to do with C, the spectral radius of that is about
    |C|_F / sqrt(hidden), not ||C||, so that 1e-4 takes about eight steps even for ||W|| = 0.99. A sample whose residual falls more
    slowly goes on by Newton's method in the dual; so do all where sigma has no known prox, or W is too large.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.solvers import DualSplitting
        >>> layer = Equilibrium(OptEq(4, 8, 16), DualSplitting())
        >>> print(layer.solve(torch.randn(5, 4)).status)
        Status.CONVERGED
    """

    def prepare(self, fn: Map) -> DualForm:
        if not isinstance(fn, ConvexMap):
            raise TypeError(
                "DualSplitting needs a map that has a dual, such as that of a dense OptEq. "
                f"Got {type(fn).__name__} instead; solvers that fit any map are Picard, Anderson, Broyden and Newton."
            )
        return ReflectedForm.over(DualForm(fn, fn.dual()))

    def init(self, fn: Map, z0: Tensor) -> DualNewtonState:
        assert isinstance(fn, DualForm)
        if not isinstance(fn, ReflectedForm):
            return begin(fn, z0)
        first = fn.first(z0)
        a = first.Gs + fn.dual.u
        error = fn.size(fn.dual.sigma(a) - first.s)
        none = torch.zeros_like(error, dtype=torch.int32)
        return ReflectedState(
            z0, first.evals, first.size, first.scale, torch.ones_like(error), False, a, torch.lerp(first.s, a, fn.step), error,
            error, none, none, none + 2, torch.ones_like(none, dtype=torch.bool), 0,
        )  # fmt: skip

    def step(self, fn: Map, state: State) -> DualNewtonState:
        assert isinstance(fn, DualForm)
        assert isinstance(state, DualNewtonState)
        if not isinstance(state, ReflectedState):
            return advance(fn, state)
        assert isinstance(fn, ReflectedForm)
        state = _turned(fn, state, (state.reflected & (state.idle > 0)).nonzero()[:, 0])
        if state.reflected.all():
            return _reflect(fn, state)
        if not state.reflected.any():
            return advance(fn, state)
        near, far = state.reflected.nonzero()[:, 0], (~state.reflected).nonzero()[:, 0]
        parts = _reflect(fn.select(near), state.select(near)), advance(fn.select(far), state.select(far))
        return _joined(state, (near, far), parts)


def _reflect(fn: ReflectedForm, state: ReflectedState) -> ReflectedState:
    """One step: with w the resolvent of y = 2 prox(t) - t the new t is 2 w - y, and a = G w + u needs no product of its own."""
    y = fn.dual.sigma.prox(state.gap, fn.step).mul(2).sub_(state.gap)
    t = affine(fn.shift, y, fn.C)
    w = y.add_(t).mul_(0.5)
    a = torch.lerp(w, t, 1 / fn.step)
    scale = fn.scale(w, a - fn.dual.u)
    error = fn.size(fn.dual.sigma(a).sub(w))
    rate = error / state.error
    size = torch.where(rate < 1, rate * error, error)  # what is returned, sigma(a), is one plain step further than w
    age, idle, asked = state.age + 1, state.idle, state.best
    if age % _TERM == 0:
        idle, asked = (error > _SLOW**_TERM * asked).to(idle.dtype), error
    return replace(
        state, evals=state.evals + 1, size=size, scale=scale, moved=True, a=a, gap=t, error=error, best=asked, idle=idle, age=age
    )


def _turned(fn: ReflectedForm, state: ReflectedState, rows: Tensor) -> ReflectedState:
    """Some samples made ready for Newton's method, from where they are."""
    if not rows.numel():
        return state
    point, none = evaluate(fn.select(rows), state.a[rows]), torch.zeros_like(rows, dtype=torch.int32)
    changed = {
        "a": point.a, "gap": point.gap, "size": point.size, "scale": point.scale, "error": point.size, "best": point.size,
        "idle": none, "reflected": none.bool(),
    }  # fmt: skip
    placed = {name: getattr(state, name).index_copy(0, rows, value) for name, value in changed.items()}
    return replace(state, evals=state.evals + 1, **placed)


def _joined(state: ReflectedState, rows: tuple[Tensor, ...], parts: tuple[ReflectedState, ...]) -> ReflectedState:
    """The state whose samples are those of the parts."""
    changed = {}
    for item in fields(state):
        old = getattr(state, item.name)
        if isinstance(old, Tensor) and item.name != "z":
            new = torch.empty_like(old)
            for where, part in zip(rows, parts, strict=True):
                new[where] = getattr(part, item.name)
            changed[item.name] = new
    evals = state.evals + sum(part.evals - state.evals for part in parts)
    return replace(state, evals=evals, moved=True, age=state.age + 1, **changed)
