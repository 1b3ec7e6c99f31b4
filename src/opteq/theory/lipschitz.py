"""How much can the output change with the input? Upper bounds of Lipschitz constants, and certified radii of classifiers."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch
from torch import Tensor, nn

from opteq.batch import sound_samples
from opteq.cells import (
    DeepOptEq,
    MonotoneConv,
    MonotoneMultiTier,
    StackedOptEq,
    WideOptEq,
)
from opteq.cells.deep import RegularizedStep
from opteq.cells.optimization import OptEqMap
from opteq.cells.variants import AffineOptEq, MultivariateMap
from opteq.checks import check_finite, check_floating, check_instance, invalid
from opteq.equilibrium import Cell, Equilibrium
from opteq.gradients import Unrolled
from opteq.maps import pullback
from opteq.models import Readout
from opteq.models.parts import Checked
from opteq.operators import Conv, Dense, Operator, Separable
from opteq.solvers import Picard
from opteq.spectral import Evidence, Norm, operator_norm
from opteq.splitting import ActivationMap, SplitMap
from opteq.theory.common import check_forward
from opteq.theory.contraction import (
    ROUNDING,
    Rates,
    around,
    in_sequence,
    injection_operator,
    layer_rates,
    measured,
    monotonicity,
    rates,
    ratio,
    side_by_side,
    weakest,
)
from opteq.theory.error import class_reach, error_bound, in_double

__all__ = ["CertifiedRadius", "LipschitzBound", "certified_radius", "lipschitz_bound"]


@dataclass(frozen=True)
class LipschitzBound:
    """|g(x) - g(x')| <= value |x - x'| for all x and x'; an "estimate" rests on a norm that was only estimated.

    Examples:
        >>> import torch
        >>> from opteq.theory import lipschitz_bound
        >>> found = lipschitz_bound(torch.nn.ReLU())
        >>> found.value.item(), found.evidence
        (1.0, 'exact')
    """

    value: Tensor  # 0-d, float64; infinite where nothing is known
    evidence: Evidence
    method: str

    def __float__(self) -> float:
        return float(self.value.detach())

    def __repr__(self) -> str:
        return f"LipschitzBound({float(self):.6g}, {self.evidence} by {self.method})"

    def times(self, factor: Tensor | float, evidence: Evidence = "exact") -> "LipschitzBound":
        """That of the map followed by another."""
        return LipschitzBound(_product(self.value, factor), weakest(self.evidence, evidence), self.method)


def _product(value: Tensor, factor: Tensor | float) -> Tensor:
    """Value times factor; infinity where one of them is infinite, and nothing is known, even if the other is 0."""
    found = value * factor
    return torch.where(found.isnan(), torch.inf, found)


def lipschitz_bound(model: nn.Module) -> LipschitzBound:
    """|g(x) - g(x')| <= value |x - x'|, g the equilibrium x -> z of a cell or an Equilibrium, or the output of a network.

    - z = sigma(W z + U x + b), sigma monotone: ||U|| / m if m > 0, m = 1/L - the largest eigenvalue of (W + W')/2.
    - A c-contraction in z that is l-Lipschitz in x: l / (1 - c). sigma(W z + U x): l = L ||U||, c = L ||W||. OptEq:
      l = L ||W|| ||U|| / mu, c = L ||W||^2 / mu; the skip connection multiplies both l and 1 - c by alpha, which drops out.
      Layers one after the other: l = sum_l l_l prod_{k > l} c_k, c = prod c_l, where alpha stays.
    - Readout: that of the cell times |a|. nn.Sequential: the product over its modules, which may also be Linear, Conv2d,
      activations, pooling without overlaps, and in eval mode Dropout and BatchNorm.

    A cell of your own that binds to an ActivationMap or a SplitMap is covered if it has a method injection(x) = U x + b, with ||U||
    estimated, and in_features, or in_channels and size. The norms of other convolutions hold for images of every size. The value
    can be differentiated by the parameters. It is infinite where the condition (m > 0, c < 1) fails. It speaks of exact equilibria:
    what a solver returns is off by up to its error_bound. Unrolled plain steps, of which z need not be an equilibrium, have the
    bound of contractions only.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import lipschitz_bound
        >>> layer, (x, y) = Equilibrium(OptEq(4, 8, 16)), torch.randn(2, 5, 4)
        >>> bound = lipschitz_bound(layer).value
        >>> bool(((layer(x) - layer(y)).norm(dim=1) <= bound * (x - y).norm(dim=1)).all())
        True
    """
    check_instance("lipschitz_bound", "model", model, nn.Module, "an nn.Module")
    check_finite(model, model.named_parameters())
    return _bound(model)


def _bound(module: nn.Module) -> LipschitzBound:
    if isinstance(module, Cell):
        return _equilibrium(module)
    check_forward("lipschitz_bound", module, *_KNOWN)
    if isinstance(module, Equilibrium):
        return _equilibrium(module.cell, _is_unrolled(module))
    if isinstance(module, Readout):
        return _equilibrium(module.cell).times(torch.linalg.vector_norm(module.a.double()))
    if isinstance(module, nn.Sequential):
        parts = [_bound(part) for part in _modules(module)]
        value = reduce(_product, (part.value for part in parts), torch.tensor(1.0, dtype=torch.float64))
        evidence: Evidence = weakest("bound" if len(parts) > 1 else "exact", *(part.evidence for part in parts))
        return LipschitzBound(value, evidence, f"product of {len(parts)} modules")
    if isinstance(module, nn.Linear):
        return _of_norm(measured(Dense(module.weight)), "||W||")
    if isinstance(module, nn.Conv2d):
        return _of_norm(_convolution(module), "||W||")
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
        return LipschitzBound(_scale(module), "exact", "max |gamma| / sqrt(var + eps)")
    return LipschitzBound(torch.tensor(_slope(module), dtype=torch.float64), "exact", "slope")


_SLOPE_1: Final = (nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.Softsign, nn.Softshrink, nn.Identity, nn.Flatten, nn.Unflatten)
_POOLING: Final = (nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)
_DROPOUT: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_LAYERS: Final = (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.LeakyReLU, nn.ELU, nn.Sigmoid)
_KNOWN: Final = (Equilibrium, Readout, nn.Sequential, Checked, *_LAYERS, *_SLOPE_1, *_POOLING, *_DROPOUT)


def _modules(model: nn.Sequential) -> Iterator[nn.Module]:
    """The modules of a network, of which a Cell is none: it has no output of its own."""
    check_forward("lipschitz_bound", model, *_KNOWN)
    for i, module in enumerate(model):
        if isinstance(module, Cell):
            raise TypeError(f"Module {i} of the nn.Sequential is a Cell, {type(module).__name__}: wrap it in Equilibrium.")
        yield module


def _scale(module: nn.BatchNorm1d | nn.BatchNorm2d) -> Tensor:
    """The largest |gamma| / sqrt(var + eps): the layer multiplies each channel by one such number."""
    if module.training or module.running_var is None:
        remedy = "call eval() on it" if module.training else "give it track_running_stats=True"
        raise TypeError(f"{type(module).__name__} couples the batch, so that no sample has a Lipschitz constant: {remedy}.")
    gains = (module.running_var.double() + module.eps).rsqrt()
    scaled: Tensor = gains if module.weight is None else gains * module.weight.double().abs()
    return scaled.max() * (1 + ROUNDING)


def _of_norm(norm: Norm, method: str) -> LipschitzBound:
    return LipschitzBound(norm.value, norm.evidence, f"{method}, {norm.method}")


def _slope(module: nn.Module) -> float:
    """The Lipschitz constant of an activation, of pooling, or of a module that only rearranges."""
    if isinstance(module, _SLOPE_1):
        return 1.0
    if isinstance(module, _DROPOUT):
        if module.training and module.p > 0:
            raise TypeError(f"{type(module).__name__} redraws its mask, so that it has no Lipschitz constant: call eval() on it.")
        return 1.0
    if isinstance(module, _POOLING):
        return _pooling(module)
    if isinstance(module, nn.LeakyReLU):
        return max(1.0, abs(module.negative_slope))
    if isinstance(module, nn.ELU):
        return max(1.0, abs(module.alpha))
    if isinstance(module, nn.Sigmoid):
        return 0.25
    raise TypeError(
        f"lipschitz_bound knows no Lipschitz constant of {type(module).__name__}: it takes cells of the library but FunctionCell, "
        "Equilibrium, Readout, and nn.Sequential of these with Linear, Conv2d, BatchNorm, Dropout, pooling, Flatten and "
        "activations."
    )


def _pooling(module: nn.AvgPool2d | nn.MaxPool2d | nn.AdaptiveAvgPool2d) -> float:
    """Windows that do not overlap: 1 for their largest entries, 1 / sqrt(k) for means of k of them; 1 for those of any number."""
    if isinstance(module, nn.AdaptiveAvgPool2d):
        known, value = module.output_size in (1, (1, 1)), 1.0
    else:
        size, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        known = padding == (0, 0) and all(k <= step for k, step in zip(size, stride, strict=True))
        if isinstance(module, nn.MaxPool2d):
            known, value = known and _pair(module.dilation) == (1, 1), 1.0
        else:
            known, value = known and not module.ceil_mode and module.divisor_override is None, 1 / math.sqrt(size[0] * size[1])
    if not known:
        raise TypeError(f"lipschitz_bound knows no Lipschitz constant of {module}: its windows must not overlap or be padded.")
    return value


def _pair(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _convolution(module: nn.Conv2d) -> Norm:
    """sup |K(w)| over all frequencies; zero padding of any width, strides and dilations leave it an upper bound.

    Zero padding and strides drop rows and columns of a convolution on a large torus, and dilation only renames frequencies.
    A circular padding that lengthens the image repeats rows of the output, so it is refused.
    """
    reach = [step * (size - 1) for step, size in zip(module.dilation, module.kernel_size, strict=True)]
    pads = (0, 0) if isinstance(module.padding, str) else tuple(module.padding)
    grows = any(2 * pad > length for pad, length in zip(pads, reach, strict=True))
    if module.padding_mode not in ("zeros", "circular") or (module.padding_mode == "circular" and grows):
        raise TypeError(f"lipschitz_bound knows no Lipschitz constant of {module}: its padding repeats parts of the image.")
    return measured(Conv(module.weight, "zeros", module.groups))


def _is_unrolled(layer: Equilibrium) -> bool:
    """Whether z is what a fixed number of steps gives: plain ones, from a z0 that is the same for all x."""
    if not isinstance(layer.gradient, Unrolled):
        return False
    if not isinstance(layer.solver, (Picard, type(None))):
        name = type(layer.solver).__name__
        raise TypeError(f"lipschitz_bound knows no Lipschitz constant of unrolled steps of {name}, only of those of Picard.")
    return True


def _equilibrium(cell: Cell, unrolled: bool = False) -> LipschitzBound:
    """That of x -> z: at the equilibrium or, of contractions, after any number of plain steps, which is no steeper."""
    if isinstance(cell, AffineOptEq):
        singular = torch.linalg.svdvals(cell.A.double())
        return _equilibrium(cell.cell).times(ratio(torch.ones_like(singular[0]), singular[-1] - ROUNDING * singular[0]))
    if isinstance(cell, (DeepOptEq, StackedOptEq, WideOptEq)):
        return _layers(cell)
    if injection_operator(cell) is None and not hasattr(cell, "injection"):
        raise TypeError(_unknown(cell))
    fn = cell.bind(_probe(cell)).to(torch.float64)
    if isinstance(fn, (OptEqMap, MultivariateMap)):
        own = layer_rates(fn).driven(_injection(cell))
        return LipschitzBound(ratio(own.gain, own.gap), _shown(own.evidence), "contraction")
    if isinstance(fn, ActivationMap):
        return _activated(cell, fn, unrolled)
    raise TypeError(_unknown(cell))


def _unknown(cell: Cell) -> str:
    return (
        f"lipschitz_bound knows no Lipschitz constant of {type(cell).__name__}: it needs a map that is monotone, or a "
        "contraction in z with a known factor, and linear in x, as those of OptEq, GaussianDEQ, ScaledReLU and Monotone are."
    )


def _shown(evidence: Evidence) -> Evidence:
    return weakest("bound", evidence)


def _activated(cell: Cell, fn: ActivationMap, unrolled: bool) -> LipschitzBound:
    """||U|| / m or L ||U|| / (1 - L ||W||), the smaller where both are known."""
    injection = _injection(cell)
    found = []
    if unrolled or not isinstance(fn, SplitMap):
        known = isinstance(fn.W, (Dense, Conv, Separable))  # for images of every size
        own = layer_rates(fn, None if known else fn.u.shape[1:]).driven(injection)
        found.append(LipschitzBound(ratio(own.gain, own.gap), _shown(own.evidence), "contraction"))
    m = None if unrolled else monotonicity(fn)
    if m is not None:
        found.append(LipschitzBound(ratio(injection.value, m), _shown(injection.evidence), "||U|| / m"))
    return min(found, key=float)


def _layers(cell: DeepOptEq | StackedOptEq | WideOptEq) -> LipschitzBound:
    parts = _driven(cell)
    if isinstance(cell, StackedOptEq):
        blocks = around(parts, torch.stack([part.gain for part in parts]))
        return LipschitzBound(torch.linalg.vector_norm(blocks), _shown(in_sequence(parts).evidence), "contractions in a cycle")
    if isinstance(cell, WideOptEq):
        alphas = [torch.as_tensor(layer.alpha, dtype=torch.float64) for layer in cell.layers]
        whole = side_by_side(parts, [alpha / sum(alphas) for alpha in alphas])
    else:
        whole = in_sequence(parts)
    return LipschitzBound(ratio(whole.gain, whole.gap), _shown(whole.evidence), f"contraction, {len(cell.layers)} layers")


def _driven(cell: DeepOptEq | StackedOptEq | WideOptEq) -> list[Rates]:
    """c and l of each layer, without skip connections where the layers are side by side; the regulariser's step first."""
    step = cell.step() if isinstance(cell, DeepOptEq) else None
    parts = [] if step is None else [_step(step)]
    for layer in cell.layers:
        fn = layer.bind(_probe(layer)).to(torch.float64)
        own = layer_rates(fn) if isinstance(cell, WideOptEq) else rates(fn)
        parts.append(own.driven(_injection(layer)))
    return parts


def _step(step: RegularizedStep) -> Rates:
    if step.coupled:
        raise TypeError(
            f"lipschitz_bound knows no Lipschitz constant of a sample when {type(step.regularizer).__name__} couples the batch."
        )
    return rates(step)


def _probe(cell: Cell) -> Tensor:
    """One x of zeros: as large as it must be to bind the cell."""
    device = next(cell.parameters(), torch.empty(0)).device
    features, channels, size = (getattr(cell, name, None) for name in ("in_features", "in_channels", "size"))
    if isinstance(features, int):
        return torch.zeros(1, features, dtype=torch.float64, device=device)
    if not isinstance(channels, int):
        raise TypeError(_unknown(cell))
    height, width = (size, size) if isinstance(size, int) else size if isinstance(size, tuple) else (1, 1)
    return torch.zeros(1, channels, height, width, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class _Injection(Operator):
    """U, the linear part of x -> U x + b."""

    cell: Cell
    injection: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor) -> Tensor:
        return self.injection(z) - self.injection(torch.zeros_like(z))

    def adjoint(self, s: Tensor) -> Tensor:
        return pullback(self.injection, _probe(self.cell))(s)[0]


def _injection(cell: Cell) -> Norm:
    """||U||, for x that enters as U x + b."""
    U = injection_operator(cell)
    if U is not None:
        return measured(U, (cell.in_channels, *cell.size) if isinstance(cell, (MonotoneConv, MonotoneMultiTier)) else None)
    double = copy.deepcopy(cell).to("cpu", torch.float64)
    injection: Callable[[Tensor], Tensor] = double.injection  # type: ignore[assignment]
    _check_affine(double, injection)
    return operator_norm(_Injection(double, injection), _probe(cell).shape[1:], method="lanczos")


def _check_affine(cell: Cell, injection: Callable[[Tensor], Tensor]) -> None:
    """Raise unless `bind` injects what `injection` says, and that is U x + b, for x of a known size."""
    x = _probe(cell)
    if x.ndim > 2 and getattr(cell, "size", None) is None:
        raise TypeError(_unknown(cell))
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    low, middle, high = (injection(scale * x) for scale in (0.0, 1.0, 2.0))
    found = getattr(cell.bind(x), "u", middle)
    allowed = 1e-6 * torch.linalg.vector_norm(torch.stack([low, middle, high]))
    for gap in (found - middle, high - 2 * middle + low):
        if not torch.linalg.vector_norm(gap) <= allowed:
            raise TypeError(_unknown(cell))


@dataclass(frozen=True, eq=False)
class CertifiedRadius:
    """No perturbation of a sample with |dx| < radius changes its predicted class.

    Examples:
        >>> import torch
        >>> from opteq.theory import certified_radius
        >>> head = torch.nn.Linear(2, 2, bias=False)
        >>> _ = head.load_state_dict({"weight": torch.eye(2)})
        >>> found = certified_radius(torch.nn.Sequential(torch.nn.ReLU(), head), torch.tensor([[3.0, 1.0]]))
        >>> found.prediction.tolist(), round(found.radius.item(), 3)  # (3 - 1) / sqrt(2)
        ([0], 1.414)
    """

    radius: Tensor  # [batch], float64; 0 where nothing is certified
    prediction: Tensor  # [batch]
    evidence: Evidence


@dataclass(frozen=True)
class _Passage:
    """What has come through a part of the network: the value, how far it is from the exact one, and the Lipschitz bound so far."""

    value: Tensor
    error: Tensor  # [batch]
    bound: LipschitzBound

    def through(self, module: nn.Module) -> "_Passage":
        """After one more module."""
        if isinstance(module, nn.Sequential):
            return reduce(_Passage.through, _modules(module), self)
        own = _bound(module)
        error = torch.where(self.error == 0, 0.0, _product(self.error, own.value))
        if not isinstance(module, (Equilibrium, Readout)):
            return _Passage(module(self.value), error, self.bound.times(own.value, own.evidence))
        value, further, evidence = self._solved(module)
        return _Passage(value, error + further, self.bound.times(own.value, weakest(own.evidence, evidence)))

    def _solved(self, module: Equilibrium | Readout) -> tuple[Tensor, Tensor, Evidence]:
        """The output, and how far the solver leaves it from that of the exact equilibrium; unrolled steps are the model."""
        z = module.solve(self.value).z
        if isinstance(module, Equilibrium) and _is_unrolled(module):
            return z, torch.zeros_like(self.error), "exact"
        error, evidence = error_bound(module, self.value, z)
        if isinstance(module, Equilibrium):
            return z, error, evidence
        return z @ module.a, _product(error, torch.linalg.vector_norm(module.a)), evidence


def certified_radius(model: nn.Module, x: Tensor) -> CertifiedRadius:
    """min_j (y_top - y_j) / (|w_top - w_j| Lip(z)): how far x can move, in the Euclidean norm, before the class can change.

    `model`: an nn.Sequential that ends in nn.Linear, y = W z + b, or a Readout, whose class is 1 if y > 0, else 0. Lip(z) is the
    lipschitz_bound of what comes before the head; |w_top - w_j| is at most sqrt 2 ||W||, and often much less. How far the solver's
    z may be from the equilibrium is taken off the margin: the claim is on the exact model, in double precision. The radius is 0
    where nothing is certified.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import certified_radius
        >>> model = torch.nn.Sequential(Equilibrium(OptEq(4, 8, 16)), torch.nn.Linear(8, 3)).double()
        >>> x, move = torch.randn(2, 5, 4, dtype=torch.float64)
        >>> found = certified_radius(model, x)
        >>> moved = x + 0.99 * found.radius[:, None] * move / move.norm(dim=1, keepdim=True)
        >>> bool((model(moved).argmax(1) == found.prediction).all())
        True
    """
    check_instance("certified_radius", "model", model, nn.Module, "an nn.Module")
    check_floating("certified_radius", "x", x)
    check_finite(model, model.named_parameters())
    with torch.no_grad():
        value = x.detach().to(torch.float64, copy=True)
        trunk, head = _before_head(in_double(model), value)
        prediction, reach = class_reach("certified_radius", head, trunk.value, trunk.error)
        radius = (reach - trunk.error) / trunk.bound.value
        known = (reach > trunk.error) & sound_samples(x) & ~radius.isnan()
    return CertifiedRadius(torch.where(known, radius, 0.0), prediction, _shown(trunk.bound.evidence))


def _before_head(model: nn.Module, x: Tensor) -> tuple[_Passage, nn.Linear | Readout]:
    """What the linear head is given, and the head."""
    if isinstance(model, Readout):
        z = model.solve(x).z
        error, evidence = error_bound(model.cell, x, z)
        return _Passage(z, error, _equilibrium(model.cell).times(1.0, evidence)), model
    check_forward("certified_radius", model, *_KNOWN)
    last = model[-1] if isinstance(model, nn.Sequential) and len(model) else None
    if not isinstance(model, nn.Sequential) or not isinstance(last, nn.Linear):
        expected = "an nn.Sequential that ends in nn.Linear, or a Readout"
        raise TypeError(invalid("certified_radius", "model", expected, type(model).__name__))
    start = _Passage(x, x.new_zeros(len(x)), LipschitzBound(x.new_ones(()), "exact", "identity"))
    return reduce(_Passage.through, _modules(nn.Sequential(*list(model)[:-1])), start), last
