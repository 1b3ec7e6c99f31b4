"""Neural ordinary differential equations, the other networks without a depth."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from opteq.checks import check_choice, check_floating, check_instance, check_integer, check_number, invalid

ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")
FIXED = ("euler", "midpoint", "rk4")


class ConvField(nn.Module):
    """v(z) = W3 * relu(W2 * relu(W1 * z + b1) + b2) + b3 with kernels of 1, 3 and 1: the field of Dupont et al. (2019).

    Examples:
        >>> import torch
        >>> from opteq.models import ConvField
        >>> ConvField(4, 8)(torch.randn(2, 4, 6, 6)).shape
        torch.Size([2, 4, 6, 6])
    """

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        check_integer(self, "channels", channels, 1)
        check_integer(self, "filters", filters, 1)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, filters, 1),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(filters, channels, 1),
        )

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.layers(z)
        return out


class NeuralODE(nn.Module):
    """x -> z(1) with dz/dt = v(z), z(0) = (x, 0, ..., 0): `augment` channels of zeros are added to x.

    `field`: v, a module that keeps the shape of its argument. `method`: one of torchdiffeq's; those that choose their steps keep
    the error of each sample below `rtol` |z| + `atol` (root mean square; the worst sample of a batch decides on the step, so that
    a sample's z depends on its batch-mates, within the tolerance), in at most `max_steps`; "euler", "midpoint" and "rk4" take
    `steps` equal ones. `adjoint=True` differentiates by a second equation, solved backwards: flat memory, a gradient that is only
    as exact as the tolerance. Chen et al. (2018); augmented, Dupont et al. (2019). Needs torchdiffeq.

    Examples:
        >>> import torch
        >>> from opteq.models import ConvField, NeuralODE
        >>> NeuralODE(ConvField(3 + 2, 8), augment=2, method="rk4", steps=4)(torch.randn(2, 3, 6, 6)).shape
        torch.Size([2, 5, 6, 6])
    """

    def __init__(
        self,
        field: nn.Module,
        *,
        augment: int = 0,
        method: str = "dopri5",
        rtol: float = 1e-3,
        atol: float = 1e-3,
        steps: int = 10,
        max_steps: int = 1000,
        adjoint: bool = False,
    ) -> None:
        super().__init__()
        check_instance(self, "field", field, nn.Module, "an nn.Module")
        check_integer(self, "augment", augment, 0)
        check_choice(self, "method", method, (*ADAPTIVE, *FIXED))
        check_number(self, "rtol", rtol, 0.0, open_low=True)
        check_number(self, "atol", atol, 0.0, open_low=True)
        check_integer(self, "steps", steps, 1)
        check_integer(self, "max_steps", max_steps, 1)
        check_instance(self, "adjoint", adjoint, bool, "a bool")
        self.field, self.augment, self.method = field, augment, method
        self.rtol, self.atol, self.steps, self.max_steps, self.adjoint = rtol, atol, steps, max_steps, adjoint

    def initial(self, x: Tensor) -> Tensor:
        """z(0): x with its zeros."""
        check_floating(self, "x", x)
        if x.ndim < 2:
            raise ValueError(invalid(self, "x", "of shape [batch, channels, ...]", list(x.shape)))
        return pad(x, (0, 0) * (x.ndim - 2) + (0, self.augment)) if self.augment else x

    def forward(self, x: Tensor) -> Tensor:
        z = self.initial(x)
        if z.numel() == 0:
            return self._velocity(z.new_zeros(()), z)
        integrate: Any = _torchdiffeq().odeint
        parameters: dict[str, Any] = {}
        if self.adjoint:
            integrate, parameters = _torchdiffeq().odeint_adjoint, {"adjoint_params": tuple(self.field.parameters())}
        times = torch.tensor([0.0, 1.0], dtype=z.dtype, device=z.device)
        options = {"rtol": self.rtol, "atol": self.atol, "method": self.method, "options": self._options()}
        try:
            out: Tensor = integrate(self._velocity, z, times, **options, **parameters)[-1]
        except AssertionError as error:
            raise RuntimeError(
                f"NeuralODE could not be integrated by {self.method}: {str(error)[:99]}. (a) x or the weights may be NaN or "
                f"very large; (b) the field may be stiff: raise rtol, atol or max_steps, now {self.max_steps}; (c) try 'rk4'."
            ) from error
        return out

    def _velocity(self, t: Tensor, z: Tensor) -> Tensor:
        velocity: Tensor = self.field(z)
        if velocity.shape != z.shape:
            raise ValueError(invalid(self, "field", f"a module that keeps the shape {list(z.shape)}", list(velocity.shape)))
        return velocity

    def _options(self) -> dict[str, Any]:
        if self.method in ADAPTIVE:
            return {"norm": _worst_sample, "max_num_steps": self.max_steps}
        return {"grid_constructor": self._grid}

    def _grid(self, field: object, z: Tensor, times: Tensor) -> Tensor:
        return torch.linspace(times[0], times[-1], self.steps + 1, dtype=times.dtype, device=times.device)

    def extra_repr(self) -> str:
        work = f"rtol={self.rtol:g}, atol={self.atol:g}" if self.method in ADAPTIVE else f"steps={self.steps}"
        return f"augment={self.augment}, method={self.method!r}, {work}, adjoint={self.adjoint}"


def _worst_sample(v: Tensor) -> Tensor:
    """The largest root mean square of a sample; a constant for derivatives, as the choice of a step is."""
    return v.detach().flatten(1).square().mean(1).sqrt().max()


def _torchdiffeq() -> Any:
    try:
        return import_module("torchdiffeq")
    except ImportError as error:
        raise ImportError("NeuralODE needs torchdiffeq: pip install 'opteq[train]'.") from error
