"""What is solved: a cell, an input, a tolerance, and f written in plain PyTorch, as a user of another library would write it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, relu

from opteq import Cell, Equilibrium, Stop
from opteq.cells import ConvOptEq, DeepOptEq, GaussianDEQ, Monotone, OptEq
from opteq.gradients import Implicit
from opteq.spectral import operator_norm

Function: TypeAlias = Callable[[Tensor], Tensor]
Numbers: TypeAlias = list[Tensor]


@dataclass(frozen=True)
class Problem:
    """z = f(z, x) to a relative residual `tol`; `plain(cell, x)` is f with all that does not depend on z done beforehand."""

    title: str
    cell: Cell
    x: Tensor
    tol: float
    plain: Callable[[Any, Tensor], Function]
    train: bool = True
    goal: float | None = None  # how many times as fast as the first of the peers
    peers: tuple[str, ...] = ("torchdeq", "torchdeq-anderson", "torchdeq-iteration", "unrolled", "jax")

    def layer(self) -> Equilibrium:
        """Ours: nothing is chosen but the tolerance."""
        return Equilibrium(self.cell, stop=Stop(rtol=self.tol))

    def weights(self) -> Tensor:
        """The loss is <c, z>, with the same c for all."""
        torch.manual_seed(1)
        return torch.randn_like(self.cell.initial(self.x))

    @cached_property
    def exact(self) -> Tensor:
        """The gradient of the loss with respect to all parameters, to 1e-12 in float64."""
        cell, x = deepcopy(self.cell).double(), self.x.double()
        stop = Stop(rtol=1e-12, max_steps=20_000)
        z = Equilibrium(cell, stop=stop, gradient=Implicit(stop=stop), on_failure="raise")(x)
        (z * self.weights().double()).sum().backward()
        return flat_gradient(cell)

    def residual(self, z: Tensor) -> float:
        """The largest |f(z) - z| / |f(z)| of a sample, computed in float64 with the plain f."""
        cell, x, z = deepcopy(self.cell).double(), self.x.double(), z.detach().double()
        with torch.no_grad():
            fz = self.plain(cell, x)(z)
        size, scale = (fz - z).flatten(1).norm(dim=1), fz.flatten(1).norm(dim=1)
        return float((size / scale.clamp_min(1e-300)).max())

    def gradient_error(self) -> float:
        """How far the gradients that the cell's parameters have now are from the exact ones, relatively."""
        return float((flat_gradient(self.cell) - self.exact).norm() / self.exact.norm())


def flat_gradient(cell: Cell) -> Tensor:
    """The gradients of all parameters as one vector in float64."""
    return torch.cat([parameter.grad.double().flatten() for parameter in cell.parameters() if parameter.grad is not None])


# --- OptEq ----------------------------------------------------------------------------------------------------------------------


def plain_opteq(cell: OptEq, x: Tensor) -> Function:
    u = x @ cell.U.T + cell.b
    return lambda z: relu(torch.addmm(u, z, cell.W.T)) @ cell.W


def one_layer(
    title: str,
    features: int,
    hidden: int,
    batch: int,
    dtype: torch.dtype,
    tol: float,
    spectrum: tuple[float, float] | None,
    **kwargs: Any,
) -> Problem:
    """One layer. `spectrum`: singular values of W spread evenly between these two; else Gaussian, scaled to ||W|| = 0.99."""
    torch.manual_seed(0)
    cell = OptEq(features, features, hidden).to(dtype)
    with torch.no_grad():
        if spectrum is None:
            cell.W *= 0.99 / torch.linalg.matrix_norm(cell.W, 2)
        else:
            left, values, right = torch.linalg.svd(cell.W, full_matrices=False)
            cell.W.copy_(left * torch.linspace(*spectrum, values.numel(), dtype=dtype) @ right)
    return Problem(title, cell, torch.randn(batch, features, dtype=dtype), tol, plain_opteq, **kwargs)


def mixed(title: str, features: int, batch: int, tol: float, **kwargs: Any) -> Problem:
    """Samples of very different difficulty: most settle within a few steps, some need nearly as many as ||W|| = 0.999 allows.

    A sample is hard if its hidden units stay active, so that f is W'W there: a large bias of its own does that.
    """
    torch.manual_seed(0)
    cell = OptEq(features, features, features)
    left, values, right = torch.linalg.svd(cell.W.detach(), full_matrices=False)
    with torch.no_grad():
        cell.W.copy_(left * torch.linspace(0.5, 0.999, values.numel()) @ right)
        cell.U.copy_(torch.eye(features))
        x = torch.randn(batch, features) + torch.linspace(-1.5, 2.0, batch)[torch.randperm(batch), None]
    return Problem(title, cell, x, tol, plain_opteq, **kwargs)


def plain_deep(cell: DeepOptEq, x: Tensor) -> Function:
    layers: list[Any] = list(cell.layers)
    injections = [conv2d(x, one.U, one.b, padding=one.U.shape[-1] // 2) for one in layers]

    def f(z: Tensor) -> Tensor:
        for one, u in zip(layers, injections, strict=True):
            hidden = relu(conv2d(z, one.W, padding=1) + u)
            z = one.alpha * conv_transpose2d(hidden, one.W, padding=1) + (1 - one.alpha) * z
        return z

    return f


def deep(title: str, channels: int, hidden: tuple[int, ...], size: int, batch: int, tol: float, **kwargs: Any) -> Problem:
    """Convolutional layers of norm 0.95, as trained ones tend to have, one after the other."""
    torch.manual_seed(0)
    layers = [ConvOptEq(channels, channels, count, 3, alpha=0.8) for count in hidden]
    with torch.no_grad():
        for layer in layers:
            layer.W *= 0.95 / float(operator_norm(layer.operator(), (size, size)))
    cell = DeepOptEq(layers)
    return Problem(title, cell, torch.randn(batch, channels, size, size), tol, plain_deep, **kwargs)


# --- networks of one matrix -----------------------------------------------------------------------------------------------------


def plain_monotone(cell: Monotone, x: Tensor) -> Function:
    W = (1 - cell.m) * torch.eye(cell.width, dtype=x.dtype) - cell.A.T @ cell.A + cell.B - cell.B.T
    u = x @ cell.U.T + cell.b
    return lambda z: relu(torch.addmm(u, z, W.T))


def monotone(title: str, width: int, batch: int, dtype: torch.dtype, tol: float, **kwargs: Any) -> Problem:
    """A monotone network with m = 0.1."""
    torch.manual_seed(0)
    cell = Monotone(width, width, m=0.1).to(dtype)
    return Problem(title, cell, torch.randn(batch, width, dtype=dtype), tol, plain_monotone, **kwargs)


def plain_gaussian(cell: GaussianDEQ, x: Tensor) -> Function:
    u = x @ cell.U.T
    return lambda z: relu(torch.addmm(u, z, cell.W.T))


def gaussian(title: str, width: int, batch: int, dtype: torch.dtype, tol: float, **kwargs: Any) -> Problem:
    """A Gaussian-initialised network with ||W|| of about 0.8."""
    torch.manual_seed(0)
    cell = GaussianDEQ(784, width).to(dtype)
    return Problem(title, cell, torch.randn(batch, 784, dtype=dtype), tol, plain_gaussian, **kwargs)
