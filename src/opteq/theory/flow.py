"""Training as a flow: d theta/dt = -grad L, its gradient, and the loss curve that a constant kernel predicts."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor, nn

from opteq.checks import all_finite, check_floating, check_instance, check_integer, check_number, invalid
from opteq.models import Readout
from opteq.operators import Dense
from opteq.solve import Map
from opteq.splitting import ActivationMap

__all__ = ["Flow", "LossGradient", "gradient_flow", "loss_gradient", "predicted_loss", "trainable"]

Method = Literal["DOP853", "RK45", "Radau"]

_NEWTON_STEPS = 20
_TINY = 1e-200
_DENSE = 2**24  # entries of all matrices I - D W of a batch up to which they are factorised: 128 MB in float64


class LossGradient(NamedTuple):
    """L, its gradient under the names of the trainable parameters, and the equilibria [N, width] that it was taken at."""

    loss: float
    gradient: dict[str, Tensor]
    z: Tensor

    def squared_norm(self) -> float:
        """|grad L|^2."""
        return sum(float(g.square().sum()) for g in self.gradient.values())


def trainable(owner: str, readout: Readout) -> dict[str, nn.Parameter]:
    """The parameters with requires_grad, under their names."""
    check_instance(owner, "readout", readout, Readout, "a Readout")
    found = {name: parameter for name, parameter in readout.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError(invalid(owner, "readout", "a model with a trainable parameter", "requires_grad = False in all of them"))
    return found


def loss_gradient(readout: Readout, X: Tensor, y: Tensor, z0: Tensor | None = None) -> LossGradient:
    """grad L for L = |y^ - y|^2 / 2, with z and (I - J') v = a (y^ - y) found by dense factorisations where f is sigma(W z + u).

    That is quick for the sizes of the theory, and exact up to rounding; other maps go through Readout and autograd. `z0`: where
    the solve begins, such as the equilibria of the step before. No `.grad` is touched. Raises ConvergenceError if an equilibrium
    is not found.
    """
    parameters = trainable("loss_gradient", readout)
    _check_labels("loss_gradient", X, y)
    z, error = _states(readout, X, y, z0)
    gradient = _pull(readout, parameters, X, z, error)
    return LossGradient(float(error.square().sum() / 2), gradient, z)


def _check_labels(owner: str, X: Tensor, y: Tensor) -> None:
    check_floating(owner, "X", X)
    check_floating(owner, "y", y)
    if X.ndim < 1 or y.shape != X.shape[:1]:
        raise ValueError(invalid(owner, "y", "of shape [N], one label a row of X", f"{list(y.shape)} for X {list(X.shape)}"))
    for name, value in (("X", X), ("y", y)):
        if not all_finite(value):
            raise ValueError(invalid(owner, name, "finite", "NaN or infinity"))


def _states(readout: Readout, X: Tensor, y: Tensor, z0: Tensor | None) -> tuple[Tensor, Tensor]:
    """z, which must have been found, and y^ - y."""
    with torch.no_grad():
        z = _newton(readout.cell.bind(X), readout.cell.initial(X) if z0 is None else z0)
        z = readout.solve(X).raise_if_failed().z if z is None else z
        return z, z @ readout.a.to(z.dtype) - y


def _is_dense(fn: Map, z: Tensor) -> TypeGuard[ActivationMap]:
    """Whether f is sigma(W z + u) with a matrix W, and small enough for one factorisation a sample."""
    return isinstance(fn, ActivationMap) and isinstance(fn.W, Dense) and z.numel() * z.shape[1] <= _DENSE


def _newton(fn: Map, z: Tensor) -> Tensor | None:
    """z = f(z) by Newton steps with dense factorisations, to a hundredth of 1e-12 in float64; None where they do not lead there."""
    if not _is_dense(fn, z):
        return None
    tolerance = 50 * torch.finfo(z.dtype).eps
    for _ in range(_NEWTON_STEPS):
        r = fn(z) - z
        if not all_finite(r):
            return None
        if bool((torch.linalg.vector_norm(r, dim=1) <= tolerance * torch.linalg.vector_norm(z, dim=1)).all()):
            return z
        z = z + torch.linalg.solve_ex(_system(fn, z), r)[0]
    return None


def _system(fn: ActivationMap, z: Tensor) -> Tensor:
    """I - J with J = D W, [N, width, width]."""
    assert isinstance(fn.W, Dense)
    slope = fn.sigma.derivative(fn.hidden(z))
    return torch.eye(z.shape[1], dtype=z.dtype, device=z.device) - slope[:, :, None] * fn.W.W


def _pull(readout: Readout, parameters: Mapping[str, nn.Parameter], X: Tensor, z: Tensor, error: Tensor) -> dict[str, Tensor]:
    """J' error, J = d y^ / d theta, at the equilibria z."""
    with torch.enable_grad():
        fn = readout.cell.bind(X)
        if _is_dense(fn, z):
            with torch.no_grad():
                v = torch.linalg.solve(_system(fn, z).mT, error[:, None] * readout.a)
            value = error @ (z @ readout.a) + (v * fn(z)).sum()
        else:
            value = error @ readout(X, z)
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g.detach() for (name, p), g in zip(parameters.items(), found, strict=True)}


@dataclass(frozen=True, eq=False)
class Flow:
    """theta(t) at `times`: the losses [T] and every trainable parameter, [T, *shape]. `evals`: how many gradients it took."""

    times: Tensor
    losses: Tensor
    parameters: Mapping[str, Tensor]
    evals: int
    start: Readout

    def model_at(self, i: int) -> Readout:
        """A copy of the model with the parameters at times[i]."""
        model = copy.deepcopy(self.start)
        with torch.no_grad():
            for name, parameter in trainable("Flow", model).items():
                parameter.copy_(self.parameters[name][i])
        return model


def gradient_flow(
    readout: Readout,
    X: Tensor,
    y: Tensor,
    times: Sequence[float] | Tensor,
    *,
    rtol: float = 1e-6,
    method: Method = "DOP853",
    max_evals: int = 20_000,
) -> Flow:
    """d theta/dt = -grad L(theta), L = |y^ - y|^2 / 2, for all trainable parameters; the model given is left as it is.

    `times`: increasing, from 0 on. A sensible span is a few times 1 / decay, where decay is that of a flow certificate, or
    2 lambda_min of the tangent kernel K. `rtol`: each step may change y^ by an error of rtol |y^(0) - y|; the tolerance of each
    parameter follows from its derivative d y^ / d parameter, so that no scale of the parameters needs to be known.

    "DOP853" and "RK45" are explicit: stable only for steps of about 6 / lambda_max(K) and 3 / lambda_max(K), so that they take
    about 2 lambda_max(K) t gradients to reach t. That is affordable for condition numbers of K up to some thousands, whatever the
    scale of K. "Radau" is implicit and has no such limit, but factorises matrices of the size of all parameters together: for a
    thousand of them at most.

    Where a ReLU switches, grad L jumps. Every method then shrinks its steps until the jump is below the tolerance, which takes some
    hundreds of gradients, thousands for rtol = 1e-8; and where the field points to the kink from both sides the steps stay small.
    Certified networks switch little: for them the default suffices, also for a ScaledReLU with A = I, whose inactive units rest
    exactly on their kinks. Smooth activations have none. For others take a large rtol, or descent with small steps. Where
    `max_evals` gradients do not suffice, or the steps become too small, RuntimeError says how far it came. Computed on the CPU in
    float64 but for the gradients.
    """
    network = _Network(readout, X, y, max_evals)
    at = _check_times(times)
    check_number("gradient_flow", "rtol", rtol, 100 * network.eps, 0.1)
    if method not in get_args(Method):
        raise ValueError(invalid("gradient_flow", "method", " or ".join(map(repr, get_args(Method))), method))
    theta = network.theta0[:, None] if at[-1] == 0 else _integrate(network, at, rtol, method)
    columns = [network.unpack(column) for column in theta.T]
    losses = [network.loss(column) for column in theta.T]
    parameters = {name: torch.stack([column[name] for column in columns]) for name in columns[0]}
    numbers = torch.tensor([at, losses], dtype=torch.float64)
    return Flow(numbers[0], numbers[1], parameters, network.evals, network.start)


def _check_times(times: Sequence[float] | Tensor) -> list[float]:
    at = torch.as_tensor(times, dtype=torch.float64).detach().cpu()
    expected = "increasing numbers >= 0, at least one"
    if at.ndim != 1 or len(at) == 0 or not all_finite(at) or at[0] < 0 or bool((at.diff() <= 0).any()):
        raise ValueError(invalid("gradient_flow", "times", expected, times))
    found: list[float] = at.tolist()
    return found


class _Network:
    """grad L and J = d y^ / d theta as functions of one vector theta. Each solve begins where the last one ended."""

    def __init__(self, readout: Readout, X: Tensor, y: Tensor, max_evals: int) -> None:
        trainable("gradient_flow", readout)
        _check_labels("gradient_flow", X, y)
        check_integer("gradient_flow", "max_evals", max_evals, 1)
        self.start, self.model = copy.deepcopy(readout), copy.deepcopy(readout)
        self.parameters = trainable("gradient_flow", self.model)
        self.X, self.y, self.max_evals, self.evals = X, y, max_evals, 0
        self.z: Tensor | None = None
        self.eps = max(torch.finfo(p.dtype).eps for p in self.parameters.values())
        self.theta0 = _flat(p.detach() for p in self.parameters.values())

    def unpack(self, theta: Any) -> dict[str, Tensor]:
        """Theta as tensors like the parameters."""
        sizes = [p.numel() for p in self.parameters.values()]
        parts = torch.tensor(theta).split(sizes)
        return {name: part.view(p.shape).to(p) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def load(self, theta: Any) -> None:
        """Give the model these parameters."""
        with torch.no_grad():
            for name, value in self.unpack(theta).items():
                self.parameters[name].copy_(value)

    def loss(self, theta: Any) -> float:
        """L(theta)."""
        self.load(theta)
        return float(_states(self.model, self.X, self.y, self.z)[1].square().sum() / 2)

    def velocity(self, t: float, theta: Any) -> Any:
        """-grad L(theta)."""
        self.evals += 1
        if self.evals > self.max_evals:
            why = f"after max_evals = {self.max_evals} gradients: the flow is stiff, it meets kinks, or the span is long"
            raise RuntimeError(_stopped(t, why))
        if not np.isfinite(theta).all():
            raise RuntimeError(_stopped(t, "since the parameters are no longer finite"))
        self.load(theta)
        found = loss_gradient(self.model, self.X, self.y, self.z)
        self.z = found.z
        return -_flat(found.gradient.values())

    def jacobian(self, theta: Any) -> Any:
        """J [N, P], by one vjp a sample."""
        self.load(theta)
        self.z, error = _states(self.model, self.X, self.y, self.z)
        units = torch.eye(len(error), dtype=error.dtype, device=error.device)
        return np.stack([_flat(_pull(self.model, self.parameters, self.X, self.z, unit).values()) for unit in units])

    def tolerances(self, rtol: float) -> Any:
        """e / |J_b| / sqrt(P B) for each of the B parameters, so that such an error of all of them moves y^ by e = rtol r0 at most.

        At least by what rounding leaves of y^. Some derivatives vanish at the start, as all others do where a = 0; so they are also
        taken one step later.
        """
        first = self.jacobian(self.theta0)
        assert self.z is not None
        outputs = self.z @ self.model.a.detach()
        error = (outputs - self.y).double().cpu().numpy()
        later = self.jacobian(self.theta0 - error @ first / max((first**2).sum(), _TINY))
        allowed = max(rtol * float(np.linalg.norm(error)), 1e4 * self.eps * float(torch.linalg.vector_norm(outputs)), _TINY)
        sizes = [p.numel() for p in self.parameters.values()]
        blocks = [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
        norms = [max(float(np.linalg.norm(J[:, block])) for J in (first, later)) for block in blocks]
        scales = np.array([1 / norm if norm > 0 else 1.0 for norm in norms])  # what y^ does not depend on will not move
        return np.repeat(allowed * scales, sizes) / math.sqrt(sum(sizes) * len(sizes))


def _flat(tensors: Any) -> Any:
    """One vector of numpy in float64."""
    return torch.cat([t.detach().flatten().double().cpu() for t in tensors]).numpy()


def _integrate(network: _Network, times: list[float], rtol: float, method: Method) -> Any:
    """Theta at the times, [P, T], by scipy."""
    from scipy.integrate import solve_ivp  # type: ignore[import-untyped]

    def jacobian(t: float, theta: Any) -> Any:
        J = network.jacobian(theta)
        return -J.T @ J  # without the curvature of y^, which Newton's iteration can do without

    options = {"jac": jacobian} if method == "Radau" else {}
    t, theta, atol, found = 0.0, network.theta0, network.tolerances(rtol), []
    for end in times:  # a solve for each: between its steps scipy interpolates, with larger errors than it makes
        if end > t:  # rtol is scipy's least: the absolute tolerances decide
            piece = solve_ivp(network.velocity, (t, end), theta, method=method, rtol=2.5e-14, atol=atol, **options)
            if not piece.success:
                raise RuntimeError(_stopped(float(piece.t[-1]), f"since the solver failed: {piece.message}"))
            t, theta = end, piece.y[:, -1]
        found.append(theta)
    return np.stack(found, axis=1)


def _stopped(t: float, why: str) -> str:
    return (
        f"gradient_flow stopped near the time {t:g}, {why}. (a) Take times of a few 1 / lambda_min of the tangent kernel, (b) a "
        "larger rtol, above all where a ReLU switches, (c) method='Radau' if there are few parameters, (d) a larger max_evals."
    )


def predicted_loss(kernel: Tensor, residual: Tensor, step: float | None, k: int | float | Tensor) -> Tensor:
    """L_k = 1/2 sum_i (1 - step lambda_i)^(2k) (q_i'r)^2: the loss after k steps of descent if the kernel Q diag(lambda) Q' stays.

    `kernel` [N, N] is J J' with J = d y^ / d theta, as `empirical_ntk` gives it, `residual` [N] is y^(0) - y. `step=None` is the
    flow, L(t) = 1/2 sum_i exp(-2 lambda_i t) (q_i'r)^2 at the times k. The result has the shape of k. It is exact for models that
    are linear in their parameters, and the limit of wide networks.
    Monotone DEQs and their neural tangent kernel, (2.13) and (2.14).
    """
    _check_kernel(kernel, residual)
    powers = torch.as_tensor(k, device=kernel.device)
    if powers.is_complex() or powers.dtype == torch.bool or (step is not None and powers.is_floating_point()):
        raise TypeError(invalid("predicted_loss", "k", "whole numbers of steps, or times where step is None", k))
    if not all_finite(powers) or bool((powers < 0).any()):
        raise ValueError(invalid("predicted_loss", "k", "finite and >= 0", k))
    eigenvalues, Q = torch.linalg.eigh((kernel + kernel.T) / 2)
    shares = (residual.to(kernel) @ Q).square() / 2
    if step is None:
        factors = torch.exp(-2 * powers.to(kernel)[..., None] * eigenvalues)
    else:
        check_number("predicted_loss", "step", step, 0.0, open_low=True)
        factors = (1 - step * eigenvalues).square().pow(powers[..., None])
    found: Tensor = factors @ shares
    return found


def _check_kernel(kernel: Tensor, residual: Tensor) -> None:
    check_floating("predicted_loss", "kernel", kernel)
    check_floating("predicted_loss", "residual", residual)
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1]:
        raise ValueError(invalid("predicted_loss", "kernel", "a square matrix", list(kernel.shape)))
    if residual.shape != kernel.shape[:1]:
        raise ValueError(invalid("predicted_loss", "residual", f"of shape [{len(kernel)}]", list(residual.shape)))
    for name, value in (("kernel", kernel), ("residual", residual)):
        if not all_finite(value):
            raise ValueError(invalid("predicted_loss", name, "finite", "NaN or infinity"))
    size, gap = kernel.abs().max(), (kernel - kernel.T).abs().max()
    if float(gap) > math.sqrt(torch.finfo(kernel.dtype).eps) * float(size):
        raise ValueError(invalid("predicted_loss", "kernel", "symmetric", f"entries that differ by {float(gap):.3g}"))
