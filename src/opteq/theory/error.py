"""How far is a returned z from the true equilibrium z*, and which predictions can no longer change? A posteriori.

Rigorous in exact arithmetic; for rounding there is an allowance (`rounding`, `_monotone`), generous but not proved.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from opteq.batch import flat, norm, sound_samples
from opteq.cells import DeepOptEq, StackedOptEq, WideOptEq
from opteq.cells.deep import DeepMap, StackedMap
from opteq.cells.optimization import OptEqMap
from opteq.cells.variants import AffineMap, AffineOptEq, MultivariateMap
from opteq.cells.wide import WideMap
from opteq.checks import check_finite, check_floating, check_instance, check_number, invalid
from opteq.equilibrium import Cell, Equilibrium
from opteq.maps import Map
from opteq.models import Readout
from opteq.solution import Solution
from opteq.spectral import Evidence
from opteq.splitting import ActivationMap, SplitMap
from opteq.theory.common import check_forward
from opteq.theory.contraction import (
    ROUNDING,
    Rates,
    UnknownFactorError,
    around,
    in_sequence,
    injection_operator,
    layer_rates,
    monotonicity,
    rates,
    ratio,
    side_by_side,
    weakest,
)

__all__ = ["CertifiedPredictions", "ErrorBound", "Interval", "certified_interval", "certified_predictions", "error_bound"]

_EPS = torch.finfo(torch.float64).eps
_Part = TypeVar("_Part", bound=nn.Module)


class ErrorBound(NamedTuple):
    """|z - z*| <= bound for each sample; an "estimate" rests on a norm that was only estimated.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import error_bound
        >>> layer, x = Equilibrium(OptEq(4, 8, 16)), torch.randn(5, 4)
        >>> bound, evidence = error_bound(layer, x, layer.solve(x))
        >>> bound.shape, evidence
        (torch.Size([5]), 'bound')
    """

    bound: Tensor  # [batch], float64
    evidence: Evidence


def error_bound(
    cell: Cell | Equilibrium | Readout, x: Tensor, solution: Solution | Tensor, *, factor: float | None = None
) -> ErrorBound:
    """|z - z*| <= |f(z) - z| / (1 - c) for each sample, z* the equilibrium and c a Lipschitz constant of f.

    `cell`: also in an Equilibrium or a Readout. `solution` is a Solution or any z. One evaluation of f at z, whatever the solver,
    in double precision, with an allowance for rounding, also of U x + b where these cancel; the injection of a cell of your own is
    taken as it is computed. z* is the equilibrium of the cell's stored parameters in double precision.

    - One OptEq layer: c = L ||W||^2 / mu. The skip connection multiplies both the residual and 1 - c by alpha, which drops out.
      With an invertible A: |f(y) - y| / ((1 - c) sigma_min(A)) at y = A z + t.
    - Layers one after the other: the product of their factors, times that of the regulariser's step; side by side: the mean.
    - sigma(W z + u), as in GaussianDEQ and ScaledReLU: c = L ||W||.
    - The same with a monotone sigma and m > 0, m = 1/L - the largest eigenvalue of (W + W')/2, as in monotone networks:
      |e| + |W e| / m, e = f(z) - z. Proof: for d = f(z) - z*, a monotone L-Lipschitz sigma has |d|^2 / L <= <W (d - e), d>, so
      m |d|^2 <= |W e| |d|. Where both apply, the smaller.

    The bound is infinite where the condition fails (c >= 1, m <= 0) and where x or z is not finite. `factor`: a c < 1 of your own,
    of f as the cell applies it (on the whole batch if f couples the samples), for cells of which none is known; f is then evaluated
    in the cell's own precision, and its injection taken as computed.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import error_bound
        >>> layer, x = Equilibrium(OptEq(4, 8, 16).double()), torch.randn(5, 4, dtype=torch.float64)
        >>> exact = Equilibrium(layer.cell, stop=Stop(rtol=1e-12))(x)
        >>> found = layer.solve(x)
        >>> bool(((found.z - exact).norm(dim=1) <= error_bound(layer, x, found).bound).all())
        True
    """
    cell = cell.cell if isinstance(cell, (Equilibrium, Readout)) else cell
    check_instance("error_bound", "cell", cell, Cell, "a Cell, or an Equilibrium or a Readout of one")
    check_floating("error_bound", "x", x)
    z = solution.z if isinstance(solution, Solution) else solution
    check_floating("error_bound", "solution", z)
    check_finite(cell, cell.named_parameters())
    x, z = x.detach(), z.detach()
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        expected = cell.initial(x).shape
        if z.shape != expected:
            raise ValueError(invalid("error_bound", "solution", f"of shape {list(expected)}", list(z.shape)))
        bound, evidence = _distance_of(cell, x, z.double()) if factor is None else _given(cell, x, z, factor)
    known = sound_samples(x) & sound_samples(z) & ~bound.isnan()
    return ErrorBound(torch.where(known, bound, math.inf), "estimate" if evidence == "estimate" else "bound")


def _given(cell: Cell, x: Tensor, z: Tensor, factor: float) -> tuple[Tensor, Evidence]:
    """|f(z) - z| / (1 - factor), in the precision of the cell: its f may know no other."""
    check_number("error_bound", "factor", factor, 0.0, 1.0, open_high=True)
    dtype = cell.promoted(x)
    fn, z = cell.bind(x).to(dtype), z.to(dtype)
    fz = fn(z)
    allowance = rounding(z, norm(z), norm(fz)) * torch.finfo(dtype).eps / _EPS
    return _whole(fn, norm((fz - z).double()) + allowance) / (1 - factor), "bound"


def _distance_of(cell: Cell, x: Tensor, z: Tensor) -> tuple[Tensor, Evidence]:
    double, x = in_double(cell), x.double()
    fn = double.bind(x).to(torch.float64)
    try:
        return _distance(fn, z, torch.stack([_injected(layer, x) for layer in _layers(double)]))
    except UnknownFactorError as error:
        raise TypeError(
            f"error_bound knows no contraction factor of {type(cell).__name__}: {error} If you know a c < 1 with "
            "|f(z) - f(z')| <= c |z - z'| for all z and z', (a) pass it as factor=c; otherwise (b) use a cell with one, such as "
            "Monotone or OptEq, or (c) compare with a solve to a tighter tolerance, which proves nothing."
        ) from None


def in_double(module: _Part) -> _Part:
    """The module in double precision: itself, or a copy."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(t.dtype == torch.float64 for t in tensors if t.is_floating_point()):
        return module
    return copy.deepcopy(module).double()


def rounding(z: Tensor, *sizes: Tensor) -> Tensor:
    """2 n eps times the sizes of what is added up in an evaluation, for each sample.

    A product W z of length n is off by about sqrt(n) eps ||W||_F |z| (Higham and Mary, 2019), and ||W||_F <= sqrt(n) ||W||.
    """
    return 2 * max(1, z[0].numel() if len(z) else 1) * _EPS * torch.stack([size.double() for size in sizes]).sum(0)


def _layers(cell: Cell) -> list[Cell]:
    """The cells with an injection, in the order in which they are applied."""
    if isinstance(cell, AffineOptEq):
        return [cell.cell]
    return list(cell.layers) if isinstance(cell, (DeepOptEq, StackedOptEq, WideOptEq)) else [cell]


def _injected(cell: Cell, x: Tensor) -> Tensor:
    """(k + 2) eps (|U| |x| + |b|) for sums of k terms, what rounding can do to u = U x + b: [batch]; 0 where U is not known."""
    U = injection_operator(cell)
    if U is None:
        return x.new_zeros(len(x))
    terms = sum(leaf.tensor[0].numel() for leaf in U.leaves())
    biases = [norm(b.detach().double()[None]) for name, b in cell.named_parameters() if name.split(".")[0] == "b"]
    size = norm(U.replace_leaves(lambda leaf: leaf.tensor.detach().double().abs())(x.abs()))
    return (terms + 2) * _EPS * (size + math.sqrt(math.prod(x.shape[2:])) * sum(biases))


def _whole(fn: Map, sizes: Tensor) -> Tensor:
    """The norm of each sample; that of the batch where the samples are coupled, for then c is a constant of the whole batch."""
    return torch.linalg.vector_norm(sizes).expand_as(sizes) if fn.coupled else sizes


def _distance(fn: Map, z: Tensor, injected: Tensor) -> tuple[Tensor, Evidence]:
    """A bound of |z - z*| for each sample; `injected` [layers, batch] is how far the injection of each layer may be off."""
    if isinstance(fn, AffineMap):
        return _affine(fn, z, injected)
    if isinstance(fn, StackedMap):
        return _stacked(fn, z, injected)
    if isinstance(fn, DeepMap):
        return _deep(fn, z, injected)
    if isinstance(fn, WideMap):
        return _wide(fn, z, injected)
    if isinstance(fn, (OptEqMap, MultivariateMap)):
        own, fz = layer_rates(fn, z.shape[1:]), fn.plain(z)
        return ratio(norm(fz - z) + _own_rounding(fn, own, z, fz, injected.sum(0)), own.gap), own.evidence
    if isinstance(fn, ActivationMap):
        return _activated(fn, z, injected.sum(0))
    raise UnknownFactorError(f"no Lipschitz constant of a {type(fn).__name__} is known.")


def _own_rounding(layer: Map, own: Rates, z: Tensor, fz: Tensor, injected: Tensor) -> Tensor:
    """How far fz may be from f(z)."""
    plain = rounding(z, norm(z), norm(fz))
    if isinstance(layer, (OptEqMap, MultivariateMap, ActivationMap)):
        return plain + own.gain * (rounding(z, norm(layer.u)) + injected)
    return plain


def _activated(fn: ActivationMap, z: Tensor, injected: Tensor) -> tuple[Tensor, Evidence]:
    """The smaller of |e| / (1 - c) and |e| + |W e| / m, where each of them is known."""
    fz = fn(z)
    found: list[tuple[Tensor, Evidence]] = []
    if not isinstance(fn, SplitMap):
        own = layer_rates(fn, z.shape[1:])
        found.append((ratio(norm(fz - z) + _own_rounding(fn, own, z, fz, injected), own.gap), own.evidence))
    m = monotonicity(fn)
    if m is not None:  # z* moves by at most |du| / m when u does by du
        found.append((_monotone(fn, z, fz, m) + ratio(injected, m), "bound"))
    return torch.stack([bound for bound, _ in found]).amin(0), weakest(*(evidence for _, evidence in found))


def _monotone(fn: ActivationMap, z: Tensor, fz: Tensor, m: Tensor) -> Tensor:
    """|e| + |W e| / m; rounding errors of e are taken to grow under W as e and z do."""
    e = fz - z
    We, Wz = fn.W(e), fn.W(z)
    allowance = rounding(z, norm(z), norm(fz), norm(Wz), norm(fn.u))
    growth = 1 + sum(norm(after) / norm(before).clamp(min=torch.finfo(z.dtype).tiny) for after, before in ((We, e), (Wz, z)))
    return norm(e) + allowance + ratio(norm(We) + growth * allowance, m)


def _affine(fn: AffineMap, z: Tensor, injected: Tensor) -> tuple[Tensor, Evidence]:
    """|z - z*| = |A^-1 (y - y*)| at y = A z + t, of which f is the map."""
    y = linear(z, fn.A, fn.t)
    bound, evidence = _distance(fn.base, y, injected)
    singular = torch.linalg.svdvals(fn.A)
    least = singular[-1] - ROUNDING * singular[0]
    return ratio(bound + rounding(z, singular[0] * norm(z), norm(y)), least), evidence


def _deep(fn: DeepMap, z: Tensor, injected: Tensor) -> tuple[Tensor, Evidence]:
    parts = [rates(layer, z.shape[1:]) for layer in fn.layers]
    path = fn.path(z)
    none = injected.new_zeros(len(fn.layers) - len(injected), len(z))  # the step of a regulariser, which is first, has no u
    allowance = torch.zeros_like(norm(z))
    for layer, part, before, after, off in zip(fn.layers, parts, path[:-1], path[1:], torch.cat([none, injected]), strict=True):
        allowance = (1 - part.gap) * allowance + _own_rounding(layer, part, before, after, off)
    whole = in_sequence(parts)
    return ratio(_whole(fn, norm(path[-1] - z) + allowance), whole.gap), whole.evidence


def _wide(fn: WideMap, z: Tensor, injected: Tensor) -> tuple[Tensor, Evidence]:
    parts, fz = [rates(layer, z.shape[1:]) for layer in fn.layers], fn(z)
    whole = side_by_side(parts, fn.weights)
    own = [_own_rounding(layer, part, z, fz, off) for layer, part, off in zip(fn.layers, parts, injected, strict=True)]
    return ratio(norm(fz - z) + torch.stack(own).sum(0), whole.gap), whole.evidence


def _stacked(fn: StackedMap, z: Tensor, injected: Tensor) -> tuple[Tensor, Evidence]:
    """The distances of the blocks obey d_l <= c_l d_{l-1} + r_l, r_l the residual of block l."""
    parts = [rates(layer, z.shape[2:]) for layer in fn.layers]
    fz, before = fn(z), z.roll(1, dims=1)
    r = [
        norm(fz[:, i] - z[:, i]) + _own_rounding(layer, part, before[:, i], fz[:, i], injected[i])
        for i, (layer, part) in enumerate(zip(fn.layers, parts, strict=True))
    ]
    blocks = around(parts, torch.stack(r, dim=1))
    return torch.linalg.vector_norm(blocks, dim=1), in_sequence(parts).evidence


class Interval(NamedTuple):
    """low <= y* <= high for each output.

    Examples:
        >>> import torch
        >>> from opteq.theory import certified_interval
        >>> low, high = certified_interval(torch.nn.Linear(8, 2), torch.randn(5, 8), torch.full((5,), 0.1))
        >>> low.shape, bool((low < high).all())
        (torch.Size([5, 2]), True)
    """

    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class CertifiedPredictions:
    """The class of each sample, and whether solving further could change it.

    Examples:
        >>> import torch
        >>> from opteq.theory import certified_predictions
        >>> head = torch.nn.Linear(2, 2, bias=False)
        >>> _ = head.load_state_dict({"weight": torch.eye(2)})
        >>> found = certified_predictions(head, torch.tensor([[1.0, 0.0], [0.6, 0.5]]), torch.tensor([0.1, 0.1]))
        >>> found.prediction.tolist(), found.certified.tolist()
        ([0, 0], [True, False])
    """

    prediction: Tensor  # [batch], the class at z
    certified: Tensor  # [batch], whether it is the class at z* for certain
    reach: Tensor  # [batch], an error |z - z*| below this leaves the class as it is


def certified_interval(head: nn.Linear | Readout, z: Tensor, bound: Tensor | ErrorBound) -> Interval:
    """|w_j'z + b_j - (w_j'z* + b_j)| <= |w_j| |z - z*|: where each output of a linear head is at the true equilibrium.

    `bound`: of |z - z*|, from error_bound. [batch, outputs]; [batch] for a Readout.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import certified_interval, error_bound
        >>> layer, head, x = Equilibrium(OptEq(4, 8, 16)), torch.nn.Linear(8, 2), torch.randn(5, 4)
        >>> solution = layer.solve(x)
        >>> low, high = certified_interval(head, solution.z, error_bound(layer, x, solution))
        >>> low.shape, bool((high - low).max() < 0.01)
        (torch.Size([5, 2]), True)
    """
    bound = bound.bound if isinstance(bound, ErrorBound) else bound
    W, b = _affine_head("certified_interval", head)
    rows = _rows("certified_interval", W, z, bound)
    y = linear(rows, W, b)
    spread = norm(W) * bound.double()[:, None] + _logit_rounding(W, b, rows)
    spread = torch.where(spread.isnan() | y.isnan(), math.inf, spread)
    y = y.nan_to_num()
    low, high = y - spread, y + spread
    return Interval(low[:, 0], high[:, 0]) if isinstance(head, Readout) else Interval(low, high)


def certified_predictions(head: nn.Linear | Readout, z: Tensor, bound: Tensor | ErrorBound) -> CertifiedPredictions:
    """The class of z is that of z* if y_top - y_j > |w_top - w_j| |z - z*| for every other class j, y = W z + b.

    By Cauchy and Schwarz the difference of the two logits moves by at most |w_top - w_j| |z - z*|, which is at most, and often much
    less than, the |w_top| + |w_j| by which the logits can move one by one. A head with a single output decides by its sign: class 1
    if y > 0, else 0. `bound`: of |z - z*|, from error_bound.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import certified_predictions, error_bound
        >>> layer, head, x = Equilibrium(OptEq(4, 8, 16), stop=Stop(rtol=1e-6)), torch.nn.Linear(8, 3), torch.randn(5, 4)
        >>> solution = layer.solve(x)
        >>> bool(certified_predictions(head, solution.z, error_bound(layer, x, solution)).certified.all())
        True
    """
    bound = bound.bound if isinstance(bound, ErrorBound) else bound
    prediction, reach = class_reach("certified_predictions", head, z, bound)
    return CertifiedPredictions(prediction, bound.double() < reach, reach)


def class_reach(owner: str, head: nn.Linear | Readout, z: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The class of z, and how far z can move without leaving it: the distance to the nearest boundary between two classes."""
    W, b = _affine_head(owner, head)
    rows = _rows(owner, W, z, bound)
    if len(W) == 1:
        W, b = torch.cat([torch.zeros_like(W), W]), torch.cat([torch.zeros_like(b), b])
    y = linear(rows, W, b)
    prediction = y.argmax(1)
    slack = _logit_rounding(W, b, rows)
    top = prediction[:, None]
    margin = y.gather(1, top) - slack.gather(1, top) - (y + slack)
    apart = torch.cdist(W, W, compute_mode="donot_use_mm_for_euclid_dist")[prediction] * (1 + ROUNDING)
    reach = torch.where(margin > 0, margin / apart, 0.0).scatter(1, top, math.inf)
    return prediction, torch.where(sound_samples(rows), reach.amin(1), 0.0)


def _logit_rounding(W: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """What rounding can do to each logit: [batch, outputs]."""
    return 2 * W.shape[1] * _EPS * (norm(W) * norm(rows)[:, None] + b.abs())


def _affine_head(owner: str, head: object) -> tuple[Tensor, Tensor]:
    """W and b of y = W z + b, in double precision."""
    if isinstance(head, Readout):
        check_forward(owner, head, Readout)
        W, b = head.a.detach().double()[None], None
    else:
        check_instance(owner, "head", head, nn.Linear, "an nn.Linear or a Readout")
        assert isinstance(head, nn.Linear)
        check_forward(owner, head, nn.Linear)
        W, b = head.weight.detach().double(), head.bias
    return W, W.new_zeros(len(W)) if b is None else b.detach().double()


def _rows(owner: str, W: Tensor, z: Tensor, bound: Tensor) -> Tensor:
    """z as rows, in double precision."""
    check_floating(owner, "z", z)
    check_floating(owner, "bound", bound)
    shapes: Sequence[tuple[str, Tensor, str, bool]] = (
        ("z", z, f"of shape [batch, ...] with {W.shape[1]} entries a sample", z.ndim > 1 and math.prod(z.shape[1:]) == W.shape[1]),
        ("bound", bound, f"of shape {list(z.shape[:1])}", bound.shape == z.shape[:1]),
    )
    for name, value, expected, right in shapes:
        if not right:
            raise ValueError(invalid(owner, name, expected, list(value.shape)))
    if bool((bound < 0).any()):
        raise ValueError(invalid(owner, "bound", ">= 0, or NaN where nothing is known", bound.min().item()))
    return flat(z.detach().double())
