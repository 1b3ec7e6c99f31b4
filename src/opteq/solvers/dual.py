"""Newton's method on the dual of a convex map, where the Hessian is symmetric positive definite."""

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.batch import norm
from opteq.convex import DualForm, DualState

_SLOW = 0.3  # a plain step that leaves more than this of the residual calls for Newton steps
_PATIENCE = 6  # Newton steps without a new best residual before plain steps are taken again


@dataclass(frozen=True)
class DualNewtonState(DualState):
    """a -> G sigma(a) + u is iterated; `gap` = G sigma(a) + u - a."""

    a: Tensor
    gap: Tensor
    gap_size: Tensor  # |gap|
    best: Tensor  # the smallest |gap| so far
    slow: Tensor  # bool: take Newton steps
    idle: Tensor  # Newton steps since `best` last fell
    rest: Tensor  # plain steps still to take before the next Newton step
    pause: Tensor  # how many the next rest will have

    def hidden(self, fn: DualForm) -> Tensor:
        return fn.dual.sigma(self.a + self.gap)  # one plain step further than sigma(a), for nothing


def begin(fn: DualForm, z0: Tensor) -> DualNewtonState:
    """The state at z0."""
    a, _, Gs, size, scale, evals = fn.first(z0)
    gap = Gs + fn.dual.u - a
    gap_size, ones, no = norm(gap), torch.ones_like(size), torch.zeros_like(size, dtype=torch.bool)
    none = torch.zeros_like(size, dtype=torch.int32)
    return DualNewtonState(z0, evals, size, scale, ones, False, a, gap, gap_size, gap_size, no, none, none, none + 2)


def advance(fn: DualForm, state: DualNewtonState, forcing: float, inner_steps: int) -> DualNewtonState:
    """One step: plain where the residual falls fast, Newton's elsewhere; what makes a sample much worse is undone."""
    delta, products = state.gap, 0
    if state.slow.any():
        delta, products = _newton_step(fn, state, forcing, inner_steps)
    a = state.a + delta
    del delta  # here and below: what is no longer needed makes room for what follows
    p = fn.dual.sigma(a)
    Gp = p @ fn.dual.G
    gap = (Gp + fn.dual.u).sub_(a)
    gap_size = norm(gap)
    fell = gap_size < state.best
    refused = state.slow & ~(gap_size <= 1e9 * state.best)
    scale = fn.scale(p, Gp)
    del Gp
    size = fn.size(fn.dual.sigma(a + gap) - p)
    del p
    modes = _modes(state, gap_size, fell, refused)
    if refused.any():
        keep = refused[:, None]
        a, gap = torch.where(keep, state.a, a), torch.where(keep, state.gap, gap)
        gap_size = torch.where(refused, state.gap_size, gap_size)
        size, scale = torch.where(refused, state.size, size), torch.where(refused, state.scale, scale)
    best, evals = torch.where(fell, gap_size, state.best), state.evals + products + 1
    return DualNewtonState(state.z, evals, size, scale, state.trust, True, a, gap, gap_size, best, *modes)


def _modes(state: DualNewtonState, gap_size: Tensor, fell: Tensor, refused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Who takes Newton steps next: samples that are slow, but for a rest of ever more plain steps when these ceased to help."""
    idle = torch.where(state.slow & ~fell, state.idle + 1, 0)
    tired = refused | (idle >= _PATIENCE)
    rest = torch.where(tired, state.pause, (state.rest - 1).clamp_min(0))
    slow = (state.slow | (state.rest > 0) | (gap_size > _SLOW * state.gap_size)) & (rest == 0)
    return slow, torch.where(tired, 0, idle), rest, torch.where(tired, 2 * state.pause, state.pause)


def _newton_step(fn: DualForm, state: DualNewtonState, forcing: float, inner_steps: int) -> tuple[Tensor, int]:
    """delta with (I - G D) delta = gap, D = diag(sigma'(a)), and the products it took.

    With D^1/2 delta = w: (I - D^1/2 G D^1/2) w = D^1/2 gap, which CG solves, and delta = gap + G D^1/2 w.
    """
    G, unit = fn.dual.G, torch.where(state.gap_size > 0, state.gap_size, torch.ones_like(state.gap_size))[:, None]
    root = fn.dual.sigma.derivative(state.a).clamp_(min=0).sqrt_()
    r = root * state.gap * (state.slow[:, None] / unit)  # near 1 in size: no scale overflows
    p, found = r.clone(), torch.zeros_like(r)
    rr = (r * r).sum(1)
    live, products = state.slow & (rr > forcing**2), 0
    while products < inner_steps and live.any():
        pp, q = (p * p).sum(1), root * p
        Gq = q @ G
        products += 1
        curvature = pp - q.mul_(Gq).sum(1)
        del q
        live = live & (curvature > 0)
        length = torch.where(live, rr / curvature, 0)[:, None]
        found.addcmul_(length, Gq)
        r.addcmul_(length, p, value=-1).addcmul_(length, Gq.mul_(root))
        before, rr = rr, (r * r).sum(1)
        p.mul_(torch.where(live, rr / before, 0)[:, None]).add_(r)
        live = live & (rr > forcing**2)
    return state.gap + found.mul_(unit), products
