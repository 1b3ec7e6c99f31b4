"""Activations with what the theory needs to know of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Final, TypeAlias

import torch
from torch import Tensor

from opteq.checks import check_instance, check_number, invalid, is_transformed

Elementwise: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, init=False)
class Activation:
    """sigma with 0 <= strong <= (sigma(a) - sigma(b)) / (a - b) <= lipschitz, applied to each entry.

    `name`, `function` and `lipschitz` must be given. What else is not given is derived: the `derivative` by automatic
    differentiation; the `integral` sigma~(a) = int_0^a sigma(t) dt by a Gauss-Legendre rule of some 200 values of sigma for each
    entry, accurate to rounding when sigma is smooth away from 0, and only to a few digits when it has kinks elsewhere; the
    `conjugate` sigma~*(s) = sup_a s a - sigma~(a) by bisection for sigma(a) = s. An end of the range that sigma reaches to
    rounding belongs to the domain of the derived conjugate; where sigma nears it slowly, like atan, the value there means nothing.

    At a kink the derivative is a generalised one. `strong` is the infimum of sigma'. An activation that is not `monotone` has
    |sigma'| <= lipschitz, strong = 0, and no derived conjugate; the theory is silent on it. `proximal(v, step)` is what `prox`
    computes, by Newton's method if it is not given.

    Examples:
        >>> import torch
        >>> from opteq.activations import Activation
        >>> from opteq.cells import OptEq
        >>> atan = Activation("atan", torch.atan, lipschitz=1.0)
        >>> one = torch.ones((), dtype=torch.float64)
        >>> round(atan.derivative(one).item(), 4), round(atan.integral(one).item(), 4)  # pi / 4 - log(2) / 2
        (0.5, 0.4388)
        >>> OptEq(4, 8, 6, activation=atan).bind(torch.randn(3, 4)).sigma.name
        'atan'
    """

    name: str
    function: Elementwise = field(repr=False)
    derivative: Elementwise = field(repr=False)
    lipschitz: float
    strong: float
    integral: Elementwise = field(repr=False)
    conjugate: Elementwise = field(repr=False)  # +inf outside of its domain
    monotone: bool
    proximal: Callable[[Tensor, float], Tensor] = field(repr=False)

    def __init__(
        self,
        name: str,
        function: Elementwise,
        derivative: Elementwise | None = None,
        lipschitz: float = math.nan,  # must be given: no finite number of values of sigma bounds its slope
        strong: float = 0.0,
        integral: Elementwise | None = None,
        conjugate: Elementwise | None = None,
        monotone: bool = True,
        proximal: Callable[[Tensor, float], Tensor] | None = None,
    ) -> None:
        check_instance(self, "name", name, str, "a string")
        check_instance(self, "monotone", monotone, bool, "True or False")
        check_number(self, "lipschitz", lipschitz, 0.0, open_low=True)
        check_number(self, "strong", strong, 0.0, lipschitz)
        if strong > 0 and not monotone:
            raise ValueError(invalid(self, "strong", "0 for an activation that is not monotone", strong))
        if not callable(function):
            raise TypeError(invalid(self, "function", "a function of a tensor", function))
        given_parts = {"derivative": derivative, "integral": integral, "conjugate": conjugate, "proximal": proximal}
        for part, given in given_parts.items():
            if given is not None and not callable(given):
                raise TypeError(invalid(self, part, "a function of a tensor or None", given))
        probe = torch.tensor([-0.5, 0.5])
        function(probe)
        if probe.tolist() != [-0.5, 0.5]:
            raise ValueError(invalid(self, "function", "one that leaves its argument as it is", f"{name}, which writes to it"))
        if derivative is None:
            derivative = partial(_slope, function)
        if integral is None:
            integral = partial(_integrate, function)
        if conjugate is None:
            conjugate = partial(_conjugate, function, derivative, integral) if monotone else partial(_no_conjugate, name)
        if proximal is None:
            proximal = partial(_proximal, function, derivative)
        values = (name, function, derivative, float(lipschitz), float(strong), integral, conjugate, monotone, proximal)
        for item, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, item.name, value)  # the class is frozen

    def __call__(self, a: Tensor) -> Tensor:
        return self.function(a)

    def over(self, a: Tensor) -> Tensor:
        """sigma(a), written over a where that can be: for an a that is not used again."""
        if self.function is torch.relu and not torch.is_grad_enabled() and not is_transformed(a):
            return torch.relu_(a)
        return self.function(a)

    @property
    def binary(self) -> bool:
        """Whether all slopes are 0 or 1, as those of ReLU: they are their own roots, and to multiply by them twice is as once."""
        return self.derivative is _relu_slope

    def root(self, a: Tensor) -> Tensor:
        """The square root of sigma'(a), for a monotone sigma."""
        slope = self.derivative(a)
        return slope if self.binary else slope.clamp_min(0).sqrt()  # that of 0 is slow on CPU

    def prox(self, v: Tensor, step: float) -> Tensor:
        """prox_{step h}(v) for the penalty h of sigma = prox_h: sigma(t) with (1 - step) sigma(t) + step t = v."""
        return self.function(v) if step == 1 else self.proximal(v, step)

    def penalty(self, s: Tensor) -> Tensor:
        """h(s) = sigma~*(s) - s^2 / 2, the convex function with sigma(a) = prox_h(a) = argmin_s h(s) + (s - a)^2 / 2."""
        check_monotone("penalty", self)
        if self.lipschitz > 1:
            raise ValueError(
                f"penalty needs an activation with lipschitz <= 1: {self.name!r} has {self.lipschitz:g}, so it is the proximal "
                f"operator of no convex function. (a) Divide it by {self.lipschitz:g}; or (b) keep it, with the layer scaled by "
                f"mu > {self.lipschitz:g} ||W||^2, and do without the penalty."
            )
        return self.conjugate(s) - s**2 / 2


def _slope(function: Elementwise, a: Tensor) -> Tensor:
    """sigma'(a), differentiable again; reverse mode, because forward modes do not nest everywhere."""
    pull: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(function, a)[1]
    return pull(torch.ones_like(a))[0]


def _gauss_legendre(count: int) -> tuple[list[float], list[float]]:
    """Nodes x and weights w with int_0^1 f = sum w f(x) for polynomials f of degree < 2 count: Newton's method on P_count."""
    nodes, weights = [], []
    for i in range(count):
        x = math.cos(math.pi * (i + 0.75) / (count + 0.5))
        for _ in range(6):
            p, q = 1.0, 0.0
            for k in range(count):
                p, q = ((2 * k + 1) * x * p - k * q) / (k + 1), p
            slope = count * (x * p - q) / (x * x - 1)
            x -= p / slope
        nodes.append((1 + x) / 2)
        weights.append(1 / ((1 - x * x) * slope * slope))
    return nodes, weights


# Constants, not a cache of tensors: one that was made under torch.inference_mode or torch.compile would be of no use later.
_NODES, _WEIGHTS = _gauss_legendre(16)
_EDGES: Final = [*(4.0**k for k in range(-3, 11)), math.inf]


def _integrate(function: Elementwise, a: Tensor) -> Tensor:
    """int_0^a sigma(t) dt on panels that grow away from 0, so that a large |a| costs no digits; in float64."""
    nodes, weights = (torch.tensor(v, dtype=torch.float64, device=a.device) for v in (_NODES, _WEIGHTS))
    wide = a.to(torch.float64)
    start = total = torch.zeros_like(wide)
    for edge in _EDGES:  # panel by panel, for the sake of memory
        end = wide.clamp(-edge, edge)
        width = end - start
        total = total + width * (function(start.unsqueeze(-1) + width.unsqueeze(-1) * nodes) @ weights)
        start = end
    return total.to(a.dtype)


def _conjugate(function: Elementwise, slope: Elementwise, area: Elementwise, s: Tensor) -> Tensor:
    """sigma~*(s) = s a - sigma~(a) at sigma(a) = s, in float64."""
    wide = s.to(torch.float64)
    fixed = wide.detach()
    with torch.no_grad():
        a, found = _invert(function, fixed)
        steep = slope(a)
        gain = torch.where(steep > torch.finfo(steep.dtype).tiny, 1 / steep, 0.0)  # finite
    a = a + gain * (wide - fixed)  # no change of a, but its derivative da/ds, for derivatives of the second order
    return torch.where(found | fixed.isnan(), wide * a - area(a), math.inf).to(s.dtype)


def _invert(function: Elementwise, s: Tensor) -> tuple[Tensor, Tensor]:
    """The a nearest to 0 with sigma(a) = s, and whether there is one with |a| <= 2^100."""
    side = torch.where(s < function(torch.zeros_like(s)), -torch.ones_like(s), 1.0)

    def reached(radius: Tensor) -> Tensor:
        return side * (function(side * radius) - s) >= 0

    low = torch.zeros_like(s)
    high = torch.where(reached(low), low, 1.0)
    for _ in range(100):
        high = torch.where(reached(high), high, 2 * high)
    found = reached(high)
    for _ in range(64):
        middle = (low + high) / 2
        enough = reached(middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return side * high, found


def _proximal(function: Elementwise, slope: Elementwise, v: Tensor, step: float) -> Tensor:
    """sigma(t) with g(t) = (1 - step) sigma(t) + step t = v, for 0 <= sigma' <= 1: Newton's method between brackets.

    g' is between 1 and step, so that an error of g brackets t. The last step carries the derivative dt/dv = 1 / g'(t).
    """

    def gap(t: Tensor) -> Tensor:
        s = function(t)
        return s + step * (t - s) - v

    def steepness(t: Tensor) -> Tensor:
        return (1 - step) * slope(t) + step

    with torch.no_grad():
        t = v.detach().clone()
        low, high = torch.full_like(t, -math.inf), torch.full_like(t, math.inf)
        for _ in range(60):
            g = gap(t)
            if not is_transformed(g) and not (g.abs() > 4 * torch.finfo(t.dtype).eps * (v.abs() + step * t.abs())).any():
                break
            low, high = torch.where(g < 0, torch.maximum(low, t), low), torch.where(g > 0, torch.minimum(high, t), high)
            new = t - g / steepness(t)
            middle = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, t - g / max(1.0, step))
            t = torch.where((new > low) & (new < high), new, middle)
        steep = steepness(t)
    return function(t - gap(t) / steep)


def _no_conjugate(name: str, s: Tensor) -> Tensor:
    raise ValueError(_not_monotone("conjugate", name))


def _relu_slope(a: Tensor) -> Tensor:
    return torch.relu(a).sign()  # six times as fast on CPU as a comparison and its conversion


def _relu_integral(a: Tensor) -> Tensor:
    return torch.relu(a) ** 2 / 2


def _relu_conjugate(s: Tensor) -> Tensor:
    return torch.where(s < 0, math.inf, s**2 / 2)


def _relu_proximal(v: Tensor, step: float) -> Tensor:
    return torch.relu(v)


def _leaky_slope(slope: float, a: Tensor) -> Tensor:
    return torch.where(a > 0, torch.ones_like(a), slope)


def _leaky_integral(slope: float, a: Tensor) -> Tensor:
    return _leaky_slope(slope, a) * a**2 / 2


def _leaky_conjugate(slope: float, s: Tensor) -> Tensor:
    return s**2 / (2 * _leaky_slope(slope, s))


def _leaky_proximal(slope: float, v: Tensor, step: float) -> Tensor:
    return torch.where(v > 0, v, v * (slope / (slope + step * (1 - slope))))


def leaky_relu(slope: float) -> Activation:
    """max(a, 0) + slope min(a, 0).

    Examples:
        >>> import torch
        >>> from opteq.activations import leaky_relu
        >>> leaky_relu(0.1).function(torch.tensor([-1.0, 2.0])).tolist(), leaky_relu(0.1).strong
        ([-0.10000000149011612, 2.0], 0.1)
    """
    check_number("leaky_relu", "slope", slope, 0.0, open_low=True)
    return Activation(
        f"leaky_relu({slope:g})",
        partial(torch.nn.functional.leaky_relu, negative_slope=slope),
        partial(_leaky_slope, slope),
        max(1.0, slope),
        min(1.0, slope),
        partial(_leaky_integral, slope),
        partial(_leaky_conjugate, slope),
        proximal=partial(_leaky_proximal, slope),
    )


def _tanh_slope(a: Tensor) -> Tensor:
    return 1 - torch.tanh(a) ** 2


def _tanh_integral(a: Tensor) -> Tensor:
    """log cosh a."""
    return torch.logaddexp(a, -a) - math.log(2)


def _tanh_conjugate(s: Tensor) -> Tensor:
    """((1 + s) log(1 + s) + (1 - s) log(1 - s)) / 2 on [-1, 1]."""
    value = (torch.special.xlog1py(1 + s, s) + torch.special.xlog1py(1 - s, -s)) / 2
    return torch.where(s.abs() > 1, math.inf, value)


def _sigmoid_slope(a: Tensor) -> Tensor:
    s = torch.sigmoid(a)
    return s * (1 - s)


# Beyond the threshold torch returns a itself; at its default of 20 that is a step down of 2e-9, and softplus not monotone.
_softplus: Final = partial(torch.nn.functional.softplus, threshold=40.0)


def _sigmoid_integral(a: Tensor) -> Tensor:
    return _softplus(a) - math.log(2)


def _sigmoid_conjugate(s: Tensor) -> Tensor:
    """s log s + (1 - s) log(1 - s) + log 2 on [0, 1]."""
    value = torch.special.xlogy(s, s) + torch.special.xlog1py(1 - s, -s) + math.log(2)
    return torch.where((s < 0) | (s > 1), math.inf, value)


def _softplus_slope(beta: float, a: Tensor) -> Tensor:
    return torch.sigmoid(beta * a)


def _softplus_integral(beta: float, a: Tensor) -> Tensor:
    return _integrate(_softplus, beta * a) / beta**2


def _softplus_conjugate(beta: float, s: Tensor) -> Tensor:
    """s a - sigma~(a) at a = log(exp(s) - 1), for beta = 1; s log(...) is 0 at s = 0, where a = -inf."""
    t = beta * s.to(torch.float64).clamp(min=0.0)
    log_argument = -torch.expm1(-t)
    a = (t + torch.log(log_argument)).clamp(min=-800.0)  # sigma is 0 there, to rounding
    value = t**2 + torch.special.xlogy(t, log_argument) - _integrate(_softplus, a)
    return torch.where(s < 0, math.inf, value / beta**2).to(s.dtype)


def softplus(beta: float) -> Activation:
    """log(1 + exp(beta a)) / beta, a smooth ReLU.

    Examples:
        >>> import torch
        >>> from opteq.activations import softplus
        >>> softplus(10.0).derivative(torch.tensor([-1.0, 0.0, 1.0])).round(decimals=2).tolist()
        [0.0, 0.5, 1.0]
    """
    check_number("softplus", "beta", beta, 0.0, open_low=True)
    return Activation(
        f"softplus({beta:g})",
        partial(torch.nn.functional.softplus, beta=beta, threshold=40.0),
        partial(_softplus_slope, beta),
        1.0,
        0.0,
        partial(_softplus_integral, beta),
        partial(_softplus_conjugate, beta),
    )


def _identity(a: Tensor) -> Tensor:
    return a


def _identity_proximal(v: Tensor, step: float) -> Tensor:
    return v


def _half_square(a: Tensor) -> Tensor:
    return a**2 / 2


def _threshold_slope(width: float, a: Tensor) -> Tensor:
    return (a.abs() > width).to(a.dtype)


def _threshold_integral(width: float, a: Tensor) -> Tensor:
    return torch.nn.functional.softshrink(a, width) ** 2 / 2


def _threshold_conjugate(width: float, s: Tensor) -> Tensor:
    return s**2 / 2 + width * s.abs()


def _threshold_proximal(width: float, v: Tensor, step: float) -> Tensor:
    return torch.nn.functional.softshrink(v, step * width)


def soft_threshold(width: float) -> Activation:
    """sign(a) max(|a| - width, 0), the proximal operator of width |s|.

    Examples:
        >>> import torch
        >>> from opteq.activations import soft_threshold
        >>> soft_threshold(0.5).function(torch.tensor([-1.0, 0.25, 2.0])).tolist()
        [-0.5, 0.0, 1.5]
    """
    check_number("soft_threshold", "width", width, 0.0, open_low=True)
    return Activation(
        f"soft_threshold({width:g})",
        partial(torch.nn.functional.softshrink, lambd=width),
        partial(_threshold_slope, width),
        1.0,
        0.0,
        partial(_threshold_integral, width),
        partial(_threshold_conjugate, width),
        proximal=partial(_threshold_proximal, width),
    )


def _gelu_slope(a: Tensor) -> Tensor:
    """Phi(a) + a phi(a)."""
    return _gauss_integral(a) + a * _gauss(a)


def _gelu_integral(a: Tensor) -> Tensor:
    """((a^2 - 1) Phi(a) + a phi(a)) / 2 + 1 / 4."""
    return ((a**2 - 1) * _gauss_integral(a) + a * _gauss(a)) / 2 + 0.25


def _gauss(a: Tensor) -> Tensor:
    return torch.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)


def _gauss_integral(a: Tensor) -> Tensor:
    return torch.erfc(-a / math.sqrt(2)) / 2


def _silu_slope(a: Tensor) -> Tensor:
    s = torch.sigmoid(a)
    return s * (1 + a * (1 - s))


_GELU_LIPSCHITZ: Final = 1.12890414519  # sigma' at a = sqrt 2: (1 + erf 1) / 2 + 1 / (e sqrt pi), rounded up
_SILU_LIPSCHITZ: Final = 1.09983932013  # sigma' at a = 2 x with x tanh x = 1: (1 + x) / 2, rounded up

_TABLE: Final = {
    a.name: a
    for a in (
        Activation("relu", torch.relu, _relu_slope, 1.0, 0.0, _relu_integral, _relu_conjugate, proximal=_relu_proximal),
        replace(leaky_relu(0.01), name="leaky_relu"),
        Activation("tanh", torch.tanh, _tanh_slope, 1.0, 0.0, _tanh_integral, _tanh_conjugate),
        Activation("sigmoid", torch.sigmoid, _sigmoid_slope, 0.25, 0.0, _sigmoid_integral, _sigmoid_conjugate),
        replace(softplus(1.0), name="softplus"),
        Activation("identity", _identity, torch.ones_like, 1.0, 1.0, _half_square, _half_square, proximal=_identity_proximal),
        replace(soft_threshold(1.0), name="soft_threshold"),
        Activation("gelu", torch.nn.functional.gelu, _gelu_slope, _GELU_LIPSCHITZ, integral=_gelu_integral, monotone=False),
        Activation("silu", torch.nn.functional.silu, _silu_slope, _SILU_LIPSCHITZ, monotone=False),
    )
}


def find_activation(owner: object, given: str | Activation, *, monotone: bool = False) -> Activation:
    """The activation of that name, or the one given; `monotone` asks for Assumption 1."""
    if not isinstance(given, (str, Activation)):
        raise TypeError(invalid(owner, "activation", "a name or an Activation", given))
    if isinstance(given, str) and given not in _TABLE:
        names = ", ".join(repr(a.name) for a in _TABLE.values() if a.monotone or not monotone)
        raise ValueError(invalid(owner, "activation", f"one of {names}, or an Activation", given))
    found = _TABLE[given] if isinstance(given, str) else given
    if monotone:
        check_monotone(owner, found)
    return found


def check_monotone(owner: object, activation: Activation) -> None:
    """Raise ValueError unless sigma is monotone, as Assumption 1 of the theory says."""
    if not activation.monotone:
        title = owner if isinstance(owner, str) else type(owner).__name__
        raise ValueError(_not_monotone(title, activation.name))


def _not_monotone(title: str, name: str) -> str:
    names = ", ".join(repr(a.name) for a in _TABLE.values() if a.monotone)
    return (
        f"{title} needs an activation that is monotone (Assumption 1): {name!r} is not, so its layer is the gradient of no convex "
        f"function. (a) Take one of {names}, or an Activation of your own that is monotone; or (b) use {name!r} in a FunctionCell, "
        "which is solved and trained as well, but without what the theory promises."
    )
