"""OptEq layers: maps z -> W' sigma(W z + U x + b) whose equilibrium minimises a convex function."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from opteq.activations import Activation, find_activation
from opteq.batch import added, begins_at_zero, blank_images, quick_images
from opteq.checks import check_choice, check_instance, check_integer, check_number, check_shape, invalid
from opteq.convex import ConvexMap, DualMap
from opteq.equilibrium import Cell
from opteq.maps import Jacobian, Map
from opteq.operators import Conv, Dense, Factors, Operator, Padding, Separable
from opteq.products import linear, product
from opteq.spectral import NormBall, scale_to
from opteq.tree import per_sample


@dataclass(frozen=True)
class OptEqMap(Map):
    """z -> (alpha / mu) W' sigma(W z + u) + (1 - alpha) z, with u = U x + b."""

    closed: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True
    fresh: ClassVar[bool] = True
    W: Operator
    sigma: Activation
    alpha: float | Tensor
    mu: float
    u: Tensor = per_sample()

    def hidden(self, z: Tensor) -> Tensor:
        """W z + u."""
        return added(self.W(z), self.u)

    def lift(self, s: Tensor) -> Tensor:
        """W' s / mu."""
        out = self.W.adjoint(s)
        return out if self.mu == 1 else out / self.mu

    def plain(self, z: Tensor) -> Tensor:
        """f(z) = W' sigma(W z + u) / mu: the layer without its skip connection."""
        return self.lift(self.sigma.over(self.hidden(z)))

    def __call__(self, z: Tensor) -> Tensor:
        return blend(self.alpha, self.plain(z), z)

    def begin(self, z0: Tensor) -> Tensor:
        return self.alpha * self.lift(self.sigma(self.u)) if begins_at_zero(z0) else self(z0)

    def linearize(self, z: Tensor) -> Jacobian:
        """J = (alpha / mu) W' D W + (1 - alpha) I, D = diag(sigma'(W z + u)): symmetric."""
        return self._jacobian(self.hidden(z))

    def value_and_jacobian(self, z: Tensor) -> tuple[Tensor, Jacobian]:
        a = self.hidden(z)
        return blend(self.alpha, self.lift(self.sigma(a)), z), self._jacobian(a)

    def _jacobian(self, a: Tensor) -> Jacobian:
        slope = self.sigma.derivative(a)

        def product(v: Tensor) -> Tensor:
            return blend(self.alpha, self.lift(slope * self.W(v)), v)

        return Jacobian(jvp=product, vjp=product, symmetric=True)


def blend(alpha: float | Tensor, fz: Tensor, z: Tensor) -> Tensor:
    """alpha f(z) + (1 - alpha) z."""
    if isinstance(alpha, Tensor):
        return alpha * fz + (1 - alpha) * z
    return fz if alpha == 1 else torch.lerp(z, fz, alpha)


@dataclass(frozen=True)
class DenseOptEqMap(OptEqMap, ConvexMap):
    """An OptEqMap with a matrix W, which has a dual."""

    W: Dense
    u: Tensor = per_sample()  # [batch, hidden]
    factors: Factors = field(default_factory=Factors, compare=False, repr=False, kw_only=True)

    def to(self, dtype: torch.dtype) -> Self:
        other = super().to(dtype)  # with the same rounded W each time, so that what is made of it is made once
        return replace(other, W=self.factors.get(("rounded", dtype), self.W, lambda: other.W))

    def project(self, z: Tensor) -> Tensor:
        return self.W(z)

    def dual(self) -> DualMap:
        """s -> sigma(G s + u); G is made once for the solves of this map, forward and backward."""
        G: Tensor = self.factors.get(("gram", self.mu), self.W, lambda: product(self.W.W, (self.W.W / self.mu).T))
        return DualMap(G, self.sigma, self.u)

    def dual_pays(self) -> bool:
        hidden, features = self.W.W.shape
        return hidden <= 2 * features


class OptEqCell(Cell):
    """z = (1 / mu) W' sigma(W z + U x + b): what the layers have in common; they differ in what W and U are.

    `alpha` < 1 adds a skip connection, alpha f(z) + (1 - alpha) z, with the same equilibrium; its residual is alpha times that
    of f, so a small alpha asks for a tolerance that is as much smaller.
    `constrained=True` keeps L_sigma ||W||^2 <= (1 - margin) mu, with ||W|| the norm of the operator, so that the equilibrium
    exists and is unique: W is scaled down whenever it leaves that ball.
    """

    alpha: float | Tensor

    def __init__(
        self, sizes: dict[str, int], activation: str | Activation, alpha: float, mu: float, constrained: bool, margin: float
    ) -> None:
        super().__init__()
        for name, size in sizes.items():
            check_integer(self, name, size, 1)
        check_number(self, "alpha", alpha, 0.0, 1.0, open_low=True)
        check_number(self, "mu", mu, 0.0, open_low=True)
        check_number(self, "margin", margin, 0.0, 1.0, open_high=True)
        check_instance(self, "constrained", constrained, bool, "a bool")
        self.sizes = sizes
        self.activation = find_activation(self, activation, monotone=True)
        self.alpha, self.mu = float(alpha), float(mu)
        self.constrained, self.margin = constrained, margin

    @property
    def norm_limit(self) -> float:
        """The largest ||W|| with L_sigma ||W||^2 <= (1 - margin) mu."""
        return math.sqrt((1 - self.margin) * self.mu / self.activation.lipschitz)

    @abstractmethod
    def operator(self) -> Operator:
        """W."""

    @abstractmethod
    def injection(self, x: Tensor) -> Tensor:
        """U x + b, in the promoted dtype."""

    def bind(self, x: Tensor) -> OptEqMap:
        return OptEqMap(self.operator(), self.activation, self.alpha, self.mu, self.injection(x))

    def extra_repr(self) -> str:
        values = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        value = self.alpha.detach() if isinstance(self.alpha, Tensor) else self.alpha
        alpha = "?" if isinstance(value, Tensor) and value.is_meta else f"{float(value):g}"
        limit = f", constrained=True, margin={self.margin:g}" if self.constrained else ""
        return f"{values}, activation={self.activation.name}, alpha={alpha}, mu={self.mu:g}{limit}"


class OptEq(OptEqCell):
    """z = (1 / mu) W' sigma(W z + U x + b), the minimiser of a convex function when mu > L_sigma ||W||^2.

    `alpha` < 1 adds a skip connection, alpha f(z) + (1 - alpha) z, with the same equilibrium. W begins with a norm of about 1/2.
    `constrained=True` keeps L_sigma ||W||^2 <= (1 - margin) mu in training. Parameters W [hidden, features],
    U [hidden, in_features], b [hidden]. Optimization induced equilibrium networks, Theorem 1.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.theory import recover_problem
        >>> cell = OptEq(4, 8, 16, activation="tanh", constrained=True)
        >>> Equilibrium(cell)(torch.randn(5, 4)).shape, recover_problem(cell).convex
        (torch.Size([5, 8]), True)
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        hidden: int,
        *,
        activation: str | Activation = "relu",
        alpha: float = 1.0,
        mu: float = 1.0,
        constrained: bool = False,
        margin: float = 1e-3,
    ) -> None:
        sizes = {"in_features": in_features, "features": features, "hidden": hidden}
        super().__init__(sizes, activation, alpha, mu, constrained, margin)
        self.in_features, self.features, self.hidden = in_features, features, hidden
        self.state_shape = (features,)
        self.W = nn.Parameter(torch.empty(hidden, features))
        self.U = nn.Parameter(torch.empty(hidden, in_features))
        self.b = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()
        if constrained:
            parametrize.register_parametrization(self, "W", NormBall(self.norm_limit, Dense))

    def reset_parameters(self) -> None:
        """Draw W of norm about 1/2, U and b as nn.Linear does."""
        _draw(self, _half_norm(self.hidden, self.features))
        _uniform(self.in_features, self.U, self.b)

    def operator(self) -> Dense:
        return Dense(self.W)

    def injection(self, x: Tensor) -> Tensor:
        check_shape(self, "x", x, (self.in_features,))
        dtype = self.promoted(x)
        return linear(x.to(dtype), self.U.to(dtype), self.b.to(dtype))

    def bind(self, x: Tensor) -> DenseOptEqMap:
        return DenseOptEqMap(self.operator(), self.activation, self.alpha, self.mu, self.injection(x))


def _half_norm(rows: int, columns: int) -> float:
    """The standard deviation at which a Gaussian matrix has a norm of about 1/2."""
    return 0.5 / (math.sqrt(rows) + math.sqrt(columns))


@torch.no_grad()
def _draw(cell: "OptEq | ConvOptEq", std: float) -> None:
    """A Gaussian W, also where W is parametrised."""
    setattr(cell, "W", nn.init.normal_(cell.W, std=std))  # noqa: B010 - a tensor may be assigned to a parametrised W


def _uniform(fan_in: int, *parameters: Tensor) -> None:
    """U and b as nn.Linear and nn.Conv2d draw them."""
    for parameter in parameters:
        nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


class _ImageCell(OptEqCell):
    """A layer on images: x is [batch, in_channels, height, width] and z [batch, channels, height, width]."""

    b: nn.Parameter

    def __init__(
        self,
        in_channels: int,
        channels: int,
        hidden: int,
        kernel_size: int = 3,
        *,
        activation: str | Activation = "relu",
        alpha: float = 1.0,
        mu: float = 1.0,
        constrained: bool = False,
        margin: float = 1e-3,
        padding: Padding = "zeros",
    ) -> None:
        sizes = {"in_channels": in_channels, "channels": channels, "hidden": hidden, "kernel_size": kernel_size}
        super().__init__(sizes, activation, alpha, mu, constrained, margin)
        check_choice(self, "padding", padding, get_args(Padding))
        self.in_channels, self.channels, self.hidden = in_channels, channels, hidden
        self.kernel_size, self.padding = kernel_size, padding
        self._make_parameters()
        self.reset_parameters()

    @abstractmethod
    def _make_parameters(self) -> None:
        """Register W, U and b, empty."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw W of norm about 1/2 as an operator, U and b as nn.Conv2d does."""

    def initial(self, x: Tensor) -> Tensor:
        self._check_image(x)
        return blank_images(x, self.channels, self.promoted(x))

    def injection(self, x: Tensor) -> Tensor:
        self._check_image(x)
        dtype = self.promoted(x)
        return self._inject(quick_images(x.to(dtype))) + self.b.to(dtype)[:, None, None]

    @abstractmethod
    def _inject(self, x: Tensor) -> Tensor:
        """U x, cast to the dtype of x."""

    def _check_image(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_channels or 0 in x.shape[2:]:
            raise ValueError(invalid(self, "x", f"of shape [batch, {self.in_channels}, height, width]", list(x.shape)))


class ConvOptEq(_ImageCell):
    """z = (1 / mu) W' * sigma(W * z + U * x + b): convolutions of stride 1, W' the exact adjoint of W.

    Parameters W [hidden, channels, k, k], U [hidden, in_channels, k, k], b [hidden]. `padding`: "zeros" or "circular".
    With `constrained=True` the norm that is kept is a certified bound of the convolution's own, for images of every size.
    Optimization induced equilibrium networks, Section 7.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import ConvOptEq
        >>> Equilibrium(ConvOptEq(3, 6, 12))(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 6, 8, 8])
    """

    def _make_parameters(self) -> None:
        size = (self.kernel_size, self.kernel_size)
        self.W = nn.Parameter(torch.empty(self.hidden, self.channels, *size))
        self.U = nn.Parameter(torch.empty(self.hidden, self.in_channels, *size))
        self.b = nn.Parameter(torch.empty(self.hidden))
        if self.constrained:
            nn.init.zeros_(self.W)  # reading an empty W through its constraint would look at garbage
            parametrize.register_parametrization(self, "W", NormBall(self.norm_limit, _Kernel(self.padding)))

    def reset_parameters(self) -> None:
        _draw(self, _half_norm(self.hidden, self.channels) / self.kernel_size)  # k^2 Gaussian matrices add up at each frequency
        _uniform(self.in_channels * self.kernel_size**2, self.U, self.b)

    def operator(self) -> Conv:
        return Conv(self.W, self.padding)

    def _inject(self, x: Tensor) -> Tensor:
        return Conv(self.U.to(x.dtype), self.padding)(x)


@dataclass(frozen=True)
class _Kernel:
    """Builds the convolution of a kernel."""

    padding: Padding

    def __call__(self, W: Tensor) -> Conv:
        return Conv(W, self.padding)


class DepthwiseOptEq(_ImageCell):
    """ConvOptEq with separable convolutions: W z = W2 (W1 * z), W1 one kernel a channel, W2 a matrix across channels; U alike.

    Parameters W1 [channels, 1, k, k], W2 [hidden, channels, 1, 1], U1 [in_channels, 1, k, k], U2 [hidden, in_channels, 1, 1],
    b [hidden]. `constrained=True` scales W2 as it is used. Optimization induced equilibrium networks, Section 7.4.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import DepthwiseOptEq
        >>> cell = DepthwiseOptEq(3, 6, 12)
        >>> Equilibrium(cell)(torch.randn(2, 3, 8, 8)).shape, cell.W1.shape, cell.W2.shape
        (torch.Size([2, 6, 8, 8]), torch.Size([6, 1, 3, 3]), torch.Size([12, 6, 1, 1]))
    """

    def _make_parameters(self) -> None:
        size = (self.kernel_size, self.kernel_size)
        self.W1 = nn.Parameter(torch.empty(self.channels, 1, *size))
        self.W2 = nn.Parameter(torch.empty(self.hidden, self.channels, 1, 1))
        self.U1 = nn.Parameter(torch.empty(self.in_channels, 1, *size))
        self.U2 = nn.Parameter(torch.empty(self.hidden, self.in_channels, 1, 1))
        self.b = nn.Parameter(torch.empty(self.hidden))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.W1, std=1 / self.kernel_size)
        nn.init.normal_(self.W2, std=_half_norm(self.hidden, self.channels))
        with torch.no_grad():
            self.W2.mul_(scale_to(self._unconstrained(), 0.5))
        _uniform(self.kernel_size**2, self.U1)
        _uniform(self.in_channels, self.U2, self.b)

    def operator(self) -> Separable:
        W = self._unconstrained()
        return Separable(W.D, W.P * scale_to(W, self.norm_limit), W.padding) if self.constrained else W

    def _unconstrained(self) -> Separable:
        return Separable(self.W1, self.W2[:, :, 0, 0], self.padding)

    def _inject(self, x: Tensor) -> Tensor:
        return Separable(self.U1.to(x.dtype), self.U2[:, :, 0, 0].to(x.dtype), self.padding)(x)
