"""Training as a flow: d theta/dt = -grad L, its gradient, and the loss curve that a constant kernel predicts."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor, nn

from opteq.checks import all_finite, check_choice, check_floating, check_instance, check_integer, check_number, invalid
from opteq.maps import Map
from opteq.models import Readout
from opteq.operators import Dense
from opteq.solution import ConvergenceError
from opteq.splitting import ActivationMap
from opteq.theory.common import check_forward, check_samples, check_symmetric, system

__all__ = ["Flow", "LossGradient", "gradient_flow", "loss_gradient", "predicted_loss", "trainable"]

Method = Literal["DOP853", "RK45", "Radau"]

_NEWTON_STEPS = 20
_TINY = 1e-200
_PATIENCE = 1000  # gradients in which the time must advance by _PROGRESS of what stability allows explicit methods
_PROGRESS = 1e-4
_ATTEMPTS = 5  # steps that may lead to points without an equilibrium: each attempt is a fifth of the one before
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
    check_forward(owner, readout, Readout)
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
    _check_start(readout, X, z0)
    z, error = _states(readout, X, y, z0)
    gradient = _pull(readout, parameters, X, z, error)
    return LossGradient(float(error.square().sum() / 2), gradient, z)


def _check_labels(owner: str, X: Tensor, y: Tensor) -> None:
    check_samples(owner, "X", X, "of shape [N, ...] with N >= 1", lambda X: X.ndim > 0 and len(X) > 0)
    check_samples(owner, "y", y, f"of shape {list(X.shape[:1])}, one label a row of X", lambda y: y.shape == X.shape[:1])


def _check_start(readout: Readout, X: Tensor, z0: Tensor | None) -> None:
    if z0 is not None:
        expected = readout.cell.initial(X).shape
        check_samples("loss_gradient", "z0", z0, f"of shape {list(expected)}", lambda z0: z0.shape == expected)


def _states(readout: Readout, X: Tensor, y: Tensor, z0: Tensor | None) -> tuple[Tensor, Tensor]:
    """z, which must have been found, and y^ - y."""
    dtype = readout.cell.promoted(X)
    with torch.no_grad():
        start = readout.cell.initial(X) if z0 is None else z0.to(dtype)
        z = _newton(readout.cell.bind(X).to(dtype), start)
        z = _strict(readout).solve(X).z if z is None else z
        return z, z @ readout.a.to(dtype) - y.to(dtype)


def _strict(readout: Readout) -> Readout:
    """The same parameters; raises where an equilibrium, or its adjoint, is not found."""
    strict = copy.copy(readout)
    strict.on_failure = "raise"
    return strict


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
    return system(fn.W.W, fn.sigma.derivative(fn.hidden(z)))


def _pull(readout: Readout, parameters: Mapping[str, nn.Parameter], X: Tensor, z: Tensor, error: Tensor) -> dict[str, Tensor]:
    """J' error, J = d y^ / d theta, at the equilibria z."""
    with torch.enable_grad():
        fn, a = readout.cell.bind(X).to(z.dtype), readout.a.to(z.dtype)
        if _is_dense(fn, z):
            with torch.no_grad():
                v = torch.linalg.solve(_system(fn, z).mT, error[:, None] * a)
            value = error @ (z @ a) + (v * fn(z)).sum()
        else:
            value = error @ _strict(readout)(X, z)
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g.detach() for (name, p), g in zip(parameters.items(), found, strict=True)}


@dataclass(frozen=True, eq=False)
class Flow:
    """theta(t) at `times`: the losses [T] and every trainable parameter, [T, *shape]. `evals`: how many gradients it took.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory import gradient_flow
        >>> readout = Readout(GaussianDEQ(2, 8)).double()
        >>> X, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        >>> flow = gradient_flow(readout, X, y, [0.0, 0.1], rtol=1e-3)
        >>> torch.allclose(flow.model_at(0)(X), readout(X)), flow.parameters["cell.W"].shape
        (True, torch.Size([2, 8, 8]))
    """

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
    rtol: float | None = None,
    method: Method = "DOP853",
    max_evals: int = 20_000,
) -> Flow:
    """d theta/dt = -grad L(theta), L = |y^ - y|^2 / 2, for all trainable parameters; the model given is left as it is.

    `times`: increasing, from 0 on. A sensible span is a few times 1 / decay, where decay is that of a flow certificate, or
    2 lambda_min of the tangent kernel K. `rtol`: each step may change y^ by an error of rtol |y^(0) - y|, by default
    1e-6, or 1000 units of precision where that is more, as for float32; the tolerance of each parameter follows from its derivative
    d y^ / d parameter, so that no scale of the parameters needs to be known.

    "DOP853" and "RK45" are explicit: stable only for steps of about 6 / lambda_max(K) and 3 / lambda_max(K), so that they take
    about 2 lambda_max(K) t gradients to reach t. That is affordable for condition numbers of K up to some thousands, whatever the
    scale of K. "Radau" is implicit and has no such limit, but factorises matrices of the size of all parameters together: for a
    thousand of them at most.

    Where a ReLU switches, grad L jumps. Every method then shrinks its steps until the jump is below the tolerance, which takes some
    hundreds of gradients, thousands for rtol = 1e-8; and where the field points to the kink from both sides the steps stay small.
    Certified networks switch little: for them the default suffices, also for a ScaledReLU with A = I, whose inactive units rest
    exactly on their kinks. Smooth activations have none. For others take a large rtol, or descent with small steps. Where
    `max_evals` gradients do not suffice, or the steps become too small, RuntimeError says how far it came; where an equilibrium is
    not found, so does ConvergenceError. Computed on the CPU in float64 but for the gradients.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory import gradient_flow
        >>> readout = Readout(GaussianDEQ(2, 8)).double()
        >>> X, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        >>> losses = gradient_flow(readout, X, y, [0.0, 0.1, 0.2], rtol=1e-3).losses
        >>> bool((losses.diff() < 0).all())
        True
    """
    network = _Network(readout, X, y, max_evals)
    at = _check_times(times)
    rtol = max(1e-6, 1000 * network.eps) if rtol is None else rtol
    check_number("gradient_flow", "rtol", rtol, 100 * network.eps, 0.1)
    check_choice("gradient_flow", "method", method, get_args(Method))
    try:
        theta = network.theta0[:, None] if at[-1] == 0 else _integrate(network, at, rtol, method)
        losses = [network.loss(column) for column in theta.T]
    except ConvergenceError as error:
        raise ConvergenceError(_lost(network.t, error), error.solution) from error
    columns = [network.unpack(column) for column in theta.T]
    parameters = {name: torch.stack([column[name] for column in columns]) for name in columns[0]}
    numbers = torch.tensor([at, losses], dtype=torch.float64)
    return Flow(numbers[0], numbers[1], parameters, network.evals, network.start)


def _check_times(times: Sequence[float] | Tensor) -> list[float]:
    expected = "increasing numbers >= 0, at least one"
    try:
        at = torch.as_tensor(times, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(invalid("gradient_flow", "times", expected, times)) from None
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
        self.X, self.y, self.max_evals, self.evals = X.detach(), y.detach(), max_evals, 0
        self.z: Tensor | None = None
        self.t, self.mark = 0.0, (0.0, 0)  # the last time, and the time and gradients from which progress is judged
        self.lost: list[ConvergenceError] = []  # what happened at points without an equilibrium
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
        """-grad L(theta); NaN, by which the solver knows that its step was too long, where there is no equilibrium."""
        self.evals += 1
        if self.evals > self.max_evals:
            why = f"after max_evals = {self.max_evals} gradients: the flow is stiff, it meets kinks, or the span is long"
            raise self.stopped(why)
        if self.evals - self.mark[1] > _PATIENCE:
            self.check_progress(t)
        if not np.isfinite(theta).all():
            if not self.lost:
                raise self.stopped("since the parameters are no longer finite")
            return np.full_like(theta, math.nan)
        self.load(theta)
        try:
            found = loss_gradient(self.model, self.X, self.y, self.z)
        except ConvergenceError as error:
            self.lost.append(error)
            if len(self.lost) == _ATTEMPTS:
                raise
            return np.full_like(theta, math.nan)
        self.t, self.z = t, found.z
        return -_flat(found.gradient.values())

    def check_progress(self, t: float) -> None:
        """Raise where the last gradients advanced the time by less than a small share of 1 / lambda_max(K) each."""
        largest = float(np.linalg.norm(self.jacobian(_flat(self.parameters.values())), 2)) ** 2
        if t - self.mark[0] < _PROGRESS * _PATIENCE / max(largest, _TINY):
            why = f"since the last {_PATIENCE} gradients advanced it by {t - self.mark[0]:.3g} only: it meets kinks of a ReLU"
            raise self.stopped(why)
        self.begin(t)

    def begin(self, t: float) -> None:
        """Judge the progress from here on."""
        self.mark, self.lost = (t, self.evals), []

    def stopped(self, why: str) -> Exception:
        """What to raise: that there was no equilibrium, if so, is the reason for all else."""
        return self.lost[-1] if self.lost else RuntimeError(_stopped(self.t, why))

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
        outputs = self.z @ self.model.a.detach().to(self.z.dtype)
        error = (outputs - self.y).double().cpu().numpy()
        try:
            later = self.jacobian(self.theta0 - error @ first / max((first**2).sum(), _TINY))
        except ConvergenceError:
            later = first
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
            network.begin(t)
            piece = solve_ivp(network.velocity, (t, end), theta, method=method, rtol=2.5e-14, atol=atol, **options)
            if not piece.success:
                raise network.stopped(f"since the solver failed: {piece.message}")
            t, theta = end, piece.y[:, -1]
        found.append(theta)
    return np.stack(found, axis=1)


def _stopped(t: float, why: str) -> str:
    return (
        f"gradient_flow stopped near the time {t:g}, {why}. (a) Take times of a few 1 / lambda_min of the tangent kernel, (b) a "
        "larger rtol, above all where a ReLU switches, (c) method='Radau' if there are few parameters, (d) a larger max_evals."
    )


def _lost(t: float, error: ConvergenceError) -> str:
    return (
        f"gradient_flow stopped near the time {t:g}, since an equilibrium was not found: the flow may have left the parameters for "
        "which there is one (||W|| < 1 of GaussianDEQ, gamma ||A|| < 1 of ScaledReLU). (a) Take shorter times, (b) begin with "
        f"smaller weights, as certified_init does, (c) Monotone has one for all parameters. {error}"
    )


def predicted_loss(kernel: Tensor, residual: Tensor, step: float | None, k: int | float | Tensor) -> Tensor:
    """L_k = 1/2 sum_i (1 - step lambda_i)^(2k) (q_i'r)^2: the loss after k steps of descent if the kernel Q diag(lambda) Q' stays.

    `kernel` [N, N] is J J' with J = d y^ / d theta, as `empirical_ntk` gives it, `residual` [N] or [N, 1] is y^(0) - y; for k
    outputs they are [N, k, N, k] and [N, k]. `step=None` is the flow, L(t) = 1/2 sum_i exp(-2 lambda_i t) (q_i'r)^2 at the times k.
    The result has the shape of k. It is exact for models that are linear in their parameters, and the limit of wide networks.
    Monotone DEQs and their neural tangent kernel, (2.13) and (2.14).

    Examples:
        >>> import torch
        >>> from opteq.theory import predicted_loss
        >>> kernel, residual = torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 1.0])
        >>> predicted_loss(kernel, residual, step=0.5, k=torch.tensor([0, 1, 2])).round(decimals=3)
        tensor([1.0000, 0.1250, 0.0310])
    """
    K, r = _flattened(kernel, residual)
    powers = _powers(k, step, K.device)
    values, Q = torch.linalg.eigh((K + K.T) / 2)
    values = torch.where(values.abs() <= 10 * len(K) * torch.finfo(K.dtype).eps * values[-1], values.clamp(min=0), values)
    shares = (r.to(K) @ Q).square() / 2
    values, shares = values[shares > 0], shares[shares > 0]  # a factor of 0 times infinity is no number
    if step is None:
        factors = torch.exp(-2 * powers.to(K)[..., None] * values)
    else:
        factors = (1 - step * values).square().pow(powers[..., None])
    found: Tensor = factors @ shares
    return found


def _flattened(kernel: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel as a matrix and the residual as a vector, over samples and outputs."""
    owner = "predicted_loss"
    check_floating(owner, "kernel", kernel)
    if kernel.ndim == 4 and kernel.shape[:2] == kernel.shape[2:]:
        shapes, K = [kernel.shape[:2]], kernel.flatten(2).flatten(0, 1)
    else:
        shapes, K = [kernel.shape[:1], torch.Size((*kernel.shape[:1], 1))], kernel
    check_symmetric(owner, "kernel", K)
    expected = " or ".join(f"of shape {list(shape)}" for shape in shapes)
    check_samples(owner, "residual", residual, expected, lambda r: r.shape in shapes)
    return K, residual.flatten()


def _powers(k: int | float | Tensor, step: float | None, device: torch.device) -> Tensor:
    """The numbers of steps, or the times."""
    expected = "times, finite and >= 0" if step is None else "whole numbers of steps, >= 0 and below 2^63"
    if step is not None:
        check_number("predicted_loss", "step", step, 0.0, open_low=True)
    try:
        powers = torch.as_tensor(k, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(invalid("predicted_loss", "k", expected, k)) from None
    if powers.is_complex() or powers.dtype == torch.bool or (step is not None and powers.is_floating_point()):
        raise TypeError(invalid("predicted_loss", "k", expected, k))
    if not all_finite(powers) or bool((powers < 0).any()):
        raise ValueError(invalid("predicted_loss", "k", expected, k))
    return powers
