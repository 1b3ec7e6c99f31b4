"""Newton's method on the dual of a convex map, where the Hessian is symmetric positive definite."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from opteq.batch import dot, norm
from opteq.convex import DualForm, DualState
from opteq.products import product

_RISE = 2.0  # a Newton step may leave this multiple of the best residual: on hard problems it first rises
_CUTS = 8  # trials of a shorter step
_PATIENCE = 6  # Newton steps without a new best residual before plain steps are taken


@dataclass(frozen=True)
class DualNewtonState(DualState):
    """a -> G sigma(a) + u is iterated; `gap` = G sigma(a) + u - a."""

    a: Tensor
    gap: Tensor
    error: Tensor  # the residual at s = sigma(a)
    best: Tensor  # the smallest so far
    idle: Tensor  # Newton steps since `best` last fell
    rest: Tensor  # plain steps still to take before the next Newton step
    pause: Tensor  # how many the next rest will have

    def hidden(self, fn: DualForm, rows: Tensor | None) -> Tensor:
        a, gap = (self.a, self.gap) if rows is None else (self.a[rows], self.gap[rows])
        return fn.dual.sigma(a + gap)  # one plain step further than sigma(a), for nothing


def begin(fn: DualForm, z0: Tensor) -> DualNewtonState:
    """The state at z0."""
    a, s, Gs, size, scale, evals = fn.first(z0)
    gap = Gs + fn.dual.u - a
    error, none = fn.size(fn.dual.sigma(a + gap) - s), torch.zeros_like(size, dtype=torch.int32)
    return DualNewtonState(z0, evals, size, scale, torch.ones_like(size), False, a, gap, error, error, none, none, none + 2)


def advance(fn: DualForm, state: DualNewtonState, forcing: float, inner_steps: int) -> DualNewtonState:
    """One Newton step, shortened where it makes a sample much worse; a plain one for the samples that rest from them."""
    active = state.rest == 0
    delta, products = _newton_step(fn, state, active, forcing, inner_steps)
    trial = _evaluate(fn, state.a + delta)
    worse = active & ~(trial.size <= _RISE * state.best) & ~state.error.isnan()  # no length helps a sample of NaN
    stuck = torch.zeros_like(worse)
    products += 1
    if worse.any():
        trial, stuck, tries = _shortened(fn, state, delta, trial, worse.nonzero()[:, 0])
        products += tries
    fell = trial.size < state.best
    modes = _modes(state, active, fell, stuck)
    best = torch.where(fell, trial.size, state.best)
    return DualNewtonState(
        state.z,
        state.evals + products,
        trial.size,
        trial.scale,
        state.trust,
        True,
        trial.a,
        trial.gap,
        trial.size,
        best,
        *modes,
    )


class _Trial(NamedTuple):
    """What is to be known of a point a."""

    a: Tensor
    gap: Tensor
    size: Tensor
    scale: Tensor

    def put(self, rows: Tensor, other: "_Trial") -> "_Trial":
        """The same with some rows taken from another."""
        return _Trial(*(mine.index_copy(0, rows, its) for mine, its in zip(self, other, strict=True)))


def _evaluate(fn: DualForm, a: Tensor) -> _Trial:
    p = fn.dual.sigma(a)
    Gp = product(p, fn.dual.G)
    gap, scale = (Gp + fn.dual.u).sub_(a), fn.scale(p, Gp)
    del Gp  # makes room for what follows
    return _Trial(a, gap, fn.size(fn.dual.sigma(a + gap) - p), scale)


def _shortened(fn: DualForm, state: DualNewtonState, delta: Tensor, trial: _Trial, rows: Tensor) -> tuple[_Trial, Tensor, int]:
    """Newton's step for some rows, cut until the residual falls; who stays where it was; and the products this took.

    Along delta the residual begins to fall like 1 - t: a full step may be spoilt by kinks on the way, a short one is not.
    """
    stuck, tries, length = torch.zeros_like(state.rest, dtype=torch.bool), 0, 1.0
    while rows.numel() and tries < _CUTS:
        tries, length = tries + 1, length / 5
        found = _evaluate(fn.select(rows), state.a[rows] + length * delta[rows])
        good = found.size <= (1 - 0.1 * length) * state.error[rows]
        taken = good.nonzero()[:, 0]
        trial = trial.put(rows[taken], _Trial(*(part[taken] for part in found)))
        rows = rows[~good]
    old = _Trial(state.a, state.gap, state.error, state.scale)
    trial = trial.put(rows, _Trial(*(part[rows] for part in old)))
    return trial, stuck.index_fill(0, rows, True), tries


def _modes(state: DualNewtonState, active: Tensor, fell: Tensor, stuck: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Who takes plain steps next: samples that Newton's ceased to help, ever more of them."""
    idle = torch.where(active & ~fell, state.idle + 1, 0)
    tired = stuck | (idle >= _PATIENCE)
    rest = torch.where(tired, state.pause, (state.rest - 1).clamp_min(0))
    return torch.where(tired, 0, idle), rest, torch.where(tired, 2 * state.pause, state.pause)


def _newton_step(fn: DualForm, state: DualNewtonState, active: Tensor, forcing: float, inner_steps: int) -> tuple[Tensor, int]:
    """delta with (I - G D) delta = gap, D = diag(sigma'(a)), and the products it took; delta = gap for those not active.

    With D^1/2 delta = w: (I - D^1/2 G D^1/2) w = D^1/2 gap, which CG solves, and delta = gap + G D^1/2 w. r and p are D^1/2 times
    something. Samples that are done are dropped when they are half of the work.
    """
    G, sigma = fn.dual.G, fn.dual.sigma
    root = sigma.root(state.a)
    r = root * state.gap
    size = norm(r)
    live = active & (size > 0)
    unit = torch.where(live, size, 1)[:, None]
    r.mul_(live[:, None] / unit)  # of size 1, or 0: no scale overflows
    delta, p, found = None, r.clone(), torch.zeros_like(r)
    rr, rows, products = live.to(r.dtype), torch.arange(len(r), device=r.device), 0
    while products < inner_steps and live.any():
        if 2 * int(live.sum()) <= live.numel():
            delta = state.gap.clone() if delta is None else delta
            delta.index_add_(0, rows, found.mul_(unit[rows]))
            del found  # one after the other: the old one is freed before the next is made
            kept = live.nonzero()[:, 0]
            root = root[kept]
            r = r[kept]
            p = p[kept]
            rr, live, rows, found = rr[kept], live[kept], rows[kept], torch.zeros_like(r)
        Gp = product(p if sigma.binary else root * p, G)
        products += 1
        q = torch.addcmul(p, root, Gp, value=-1)
        curvature = dot(p, q)
        live = live & (curvature > 0)
        length = torch.where(live, rr / curvature, 0)[:, None]
        found.addcmul_(length, Gp)
        r.addcmul_(length, q, value=-1)
        del Gp, q  # make room
        before, rr = rr, dot(r, r)
        torch.addcmul(r, torch.where(live, rr / before, 0)[:, None], p, out=p)
        live = live & (rr > forcing**2)
    found.mul_(unit[rows])
    return found.add_(state.gap) if delta is None else delta.index_add_(0, rows, found), products
