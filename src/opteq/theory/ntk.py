"""The tangent kernel K(x, x') = <dy(x)/dtheta, dy(x')/dtheta> of a network with the weights that it has."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, TypeAlias, get_args, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from opteq.batch import flat
from opteq.cells import GaussianDEQ, Monotone, ScaledReLU
from opteq.checks import check_instance, check_integer, invalid
from opteq.equilibrium import Cell
from opteq.gradients import default_linear
from opteq.linear import GMRES, LinearizedMap
from opteq.models import Readout
from opteq.operators import Dense
from opteq.solution import ConvergenceError, Status, Stop
from opteq.solve import solve
from opteq.splitting import ActivationMap
from opteq.theory.common import check_samples, system

__all__ = ["empirical_ntk"]

Samples = Literal["independent", "coupled"]
Blocks: TypeAlias = dict[str, Tensor]
_OWNER = "empirical_ntk"


@overload
def empirical_ntk(
    model: nn.Module, X: Tensor, X2: Tensor | None = ..., *, blocks: Literal[False] = ..., samples: Samples = ..., memory: int = ...
) -> Tensor: ...
@overload
def empirical_ntk(
    model: nn.Module, X: Tensor, X2: Tensor | None = ..., *, blocks: Literal[True], samples: Samples = ..., memory: int = ...
) -> Blocks: ...
def empirical_ntk(
    model: nn.Module,
    X: Tensor,
    X2: Tensor | None = None,
    *,
    blocks: bool = False,
    samples: Samples = "independent",
    memory: int = 2**28,
) -> Tensor | Blocks:
    """K_ij = <dy_i/dtheta, dy_j/dtheta> over the parameters that require gradients: [N, N], or [N, N2] between X and X2.

    For a Readout on GaussianDEQ, ScaledReLU or Monotone by closed formulas: one adjoint equilibrium a sample, then products of
    N x n matrices, no Jacobians. Other models give y of shape [N], [N, 1] or [N, k] (then K is [N, k, N2, k]); their Jacobians are
    contracted a few samples at a time, by torch.func.vmap, or row by row with models on which that fails.

    `blocks=True` gives the part of each parameter, in the order of named_parameters; they sum to K. `samples`: "independent" if
    y_i depends on x_i only, which is checked on the first two samples; "coupled" differentiates the outputs of the whole batch row
    by row, as layers on batch statistics need (X2 is then a batch of its own). `memory`: about how many bytes of Jacobian rows, or
    of vectors of the adjoint solve, to hold at a time. The kernel is a constant for autograd, and as exact as the tolerance to
    which the model solves its equilibria: 1e-12 for a Readout in float64; set it in the Stop of others. An equilibrium of a Readout
    that is not found raises ConvergenceError, whatever its `on_failure`; other models do as theirs says.
    Gaussian-initialised DEQs, Section 2.3; gamma-scaled ReLU implicit networks, Lemma 4.1; monotone DEQs, Proposition 4.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory import empirical_ntk
        >>> readout, X = Readout(GaussianDEQ(4, 32)).double(), torch.randn(5, 4, dtype=torch.float64)
        >>> K = empirical_ntk(readout, X)
        >>> K.shape, torch.allclose(K, sum(empirical_ntk(readout, X, blocks=True).values()))
        (torch.Size([5, 5]), True)
    """
    _check(model, X, X2, samples, memory)
    parts = _structured(model, X, X2, memory) if has_formulas(model) else _contracted(model, X, X2, samples, memory, blocks)
    if not blocks:
        return reduce(torch.add, (part for _, part in parts))
    found = dict(parts)
    return {name: found[name] for name, _ in model.named_parameters() if name in found}


def _check(model: object, X: Tensor, X2: Tensor | None, samples: object, memory: object) -> None:
    check_instance(_OWNER, "model", model, nn.Module, "an nn.Module")
    if isinstance(model, Cell):
        expected = "a model x -> y: wrap a Cell in Readout, or in Equilibrium and a head"
        raise TypeError(invalid(_OWNER, "model", expected, type(model).__name__))
    if not any(p.requires_grad for p in model.parameters()):  # type: ignore[attr-defined]
        raise ValueError(invalid(_OWNER, "model", "a model with a parameter that requires gradients", type(model).__name__))
    check_samples(_OWNER, "X", X)
    if X2 is not None:
        check_samples(_OWNER, "X2", X2)
        _check_alike(X, X2)
    if samples not in get_args(Samples):
        raise ValueError(invalid(_OWNER, "samples", " or ".join(map(repr, get_args(Samples))), samples))
    check_integer(_OWNER, "memory", memory, 1)


def _check_alike(X: Tensor, X2: Tensor) -> None:
    wanted, given = ((list(x.shape[1:]), x.dtype, x.device) for x in (X, X2))
    if given != wanted:
        shape, dtype, device = wanted
        expected = f"like X, of shape [N2{''.join(f', {n}' for n in shape)}], {dtype}, on {device}"
        raise ValueError(invalid(_OWNER, "X2", expected, f"{list(X2.shape)}, {X2.dtype}, on {X2.device}"))


# The networks of the theory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """One side of the kernel, a row for each sample: inputs, equilibria, and dy/du for the injection u of z = sigma(W z + u)."""

    X: Tensor  # [N, d]
    Z: Tensor  # [N, n]
    R: Tensor  # [N, n]


def has_formulas(model: nn.Module) -> bool:
    """Whether the parameters are those of the formulas themselves: none is tied to another, or made from others."""
    if type(model) is not Readout or type(model.cell) not in _FORMULAS:
        return False
    letters = [letter for letter in _LETTERS[type(model.cell)] if getattr(model.cell, letter) is not None]
    return {name for name, _ in model.named_parameters()} == {"a", *(f"cell.{letter}" for letter in letters)}


@torch.no_grad()
def _structured(model: nn.Module, X: Tensor, X2: Tensor | None, memory: int) -> Iterator[tuple[str, Tensor]]:
    """The part of each parameter that requires gradients."""
    assert isinstance(model, Readout)
    cell, one = model.cell, _side(model, X, memory)
    two = one if X2 is None else _side(model, X2, memory)
    for name, part in _FORMULAS[type(cell)](cell, one, two):
        if model.get_parameter(name).requires_grad:
            yield name, part if X2 is not None else _symmetric(part)


def _symmetric(K: Tensor) -> Tensor:
    """Free of the rounding by which products of a matrix with its own transpose are not symmetric."""
    return (K + K.T).div_(2)


def _side(model: Readout, X: Tensor, memory: int) -> _Side:
    dtype = model.cell.promoted(X)
    vector = model.a.numel() * torch.finfo(dtype).bits // 8
    pieces = [_equilibrium(model, x) for x in X.split(max(1, memory // (40 * vector)))]  # GMRES holds 33 vectors a sample
    Z, R = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return _Side(X.to(dtype), Z, R)


def _equilibrium(model: Readout, X: Tensor) -> tuple[Tensor, Tensor]:
    """z, and r = dy/du = D (I - W'D)^-1 a, D = diag(sigma'(W z + u)), as the equilibrium of r = D (W'r + a).

    Solved for r, not for v = a + W'r: |r| <= |a| / m on a monotone map, while v has no such bound.
    """
    strict = copy(model)
    strict.on_failure = "raise"
    found = strict.solve(X)
    fn = model.cell.bind(X).to(found.z.dtype)
    assert isinstance(fn, ActivationMap)
    assert isinstance(fn.W, Dense)
    adjoint = replace(fn, W=Dense(fn.W.W.T), u=fn.hidden(found.z))  # its Jacobian at 0 is D W'
    g = fn.sigma.derivative(adjoint.u) * model.a.to(found.z.dtype)
    stop = Stop(rtol=max(0.1 * found.stop.rtol, 50 * torch.finfo(g.dtype).eps), max_steps=150)
    return found.z, _linear_equilibrium(LinearizedMap(adjoint, False, torch.zeros_like(g), g), stop)


def _linear_equilibrium(fn: LinearizedMap, stop: Stop) -> Tensor:
    """r = D W'r + g: by iteration and, where that is slow, by elimination, at the cost of about 100 steps for n from 1000 on."""
    first = solve(fn, torch.zeros_like(fn.g), default_linear(fn.base, stop.rtol), stop)
    if first.status is Status.CONVERGED:
        return first.z
    r = first.z
    for i in (~first.converged).nonzero()[:, 0]:
        r[i] = _eliminated(fn, i)
    return solve(fn, r, GMRES(), replace(stop, rtol=10 * stop.rtol)).raise_if_failed().z  # judges r; mends it, if need be


def _eliminated(fn: LinearizedMap, i: Tensor) -> Tensor:
    """(I - D W') r = g for one sample; where D = 0 so is r, and these rows and columns are left out."""
    assert isinstance(fn.base, ActivationMap)
    assert isinstance(fn.base.W, Dense)
    slope = fn.base.sigma.derivative(fn.base.u[i])
    active = slope.nonzero()[:, 0]
    M = system(fn.base.W.W[active][:, active], slope[active])
    x = torch.linalg.solve_ex(M, fn.g[i, active])[0]  # not finite if singular
    return torch.zeros_like(slope).index_copy(0, active, x)


def _gaussian(cell: GaussianDEQ, one: _Side, two: _Side) -> Iterator[tuple[str, Tensor]]:
    """z = relu(W z + U x): dy/dW = r z', dy/dU = r x'."""
    ZZ, RR = one.Z @ two.Z.T, one.R @ two.R.T
    yield "a", ZZ
    yield "cell.W", RR * ZZ
    yield "cell.U", RR * (one.X @ two.X.T)


def _scaled_relu(cell: ScaledReLU, one: _Side, two: _Side) -> Iterator[tuple[str, Tensor]]:
    """Rows z = relu(gamma z A + relu(x W)): dy/dA = gamma z' r, dy/dW = x' (r * e) with e = 1[x W > 0]."""
    ZZ = one.Z @ two.Z.T
    yield "a", ZZ
    yield "cell.A", cell.gamma**2 * (one.R @ two.R.T) * ZZ
    E1, E2 = (side.R * (cell.features(side.X) > 0) for side in (one, two))
    yield "cell.W", (E1 @ E2.T) * (one.X @ two.X.T)


def _monotone(cell: Monotone, one: _Side, two: _Side) -> Iterator[tuple[str, Tensor]]:
    """W = (1 - m) I - A'A + B - B': dy/dA = -A (r z' + z r'), dy/dB = r z' - z r', dy/dU = r x', dy/db = r."""
    ZZ, RR, RZ, ZR = one.Z @ two.Z.T, one.R @ two.R.T, one.R @ two.Z.T, one.Z @ two.R.T
    yield "a", ZZ
    AR1, AZ1, AR2, AZ2 = (V @ cell.A.T.to(V.dtype) for V in (one.R, one.Z, two.R, two.Z))
    yield "cell.A", (AR1 @ AR2.T) * ZZ + (AZ1 @ AZ2.T) * RR + (AR1 @ AZ2.T) * ZR + (AZ1 @ AR2.T) * RZ
    yield "cell.B", 2 * (RR * ZZ - RZ * ZR)
    yield "cell.U", RR * (one.X @ two.X.T)
    if cell.b is not None:
        yield "cell.b", RR


_FORMULAS: dict[type[Cell], Callable[[Any, _Side, _Side], Iterator[tuple[str, Tensor]]]] = {
    GaussianDEQ: _gaussian,
    ScaledReLU: _scaled_relu,
    Monotone: _monotone,
}
_LETTERS: dict[type[Cell], str] = {GaussianDEQ: "WU", ScaledReLU: "WA", Monotone: "ABUb"}


# Any model --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Network:
    """x -> y [N, k] as a function of the parameters that require gradients; the model's buffers are read, never written to."""

    model: nn.Module
    parameters: Blocks

    def __call__(self, parameters: Blocks, X: Tensor) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        y = functional_call(self.model, {**buffers, **parameters}, (X,))
        if not isinstance(y, Tensor) or y.ndim not in (1, 2) or len(y) != len(X):
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(invalid(_OWNER, "model", f"a model with an output of shape [{len(X)}] or [{len(X)}, k]", got))
        return y[:, None] if y.ndim == 1 else y


Rows: TypeAlias = Callable[[int, int], Blocks]  # the Jacobian of the samples i ... j - 1: [(j - i) k, numel] for each parameter


@torch.enable_grad()
def _contracted(
    model: nn.Module, X: Tensor, X2: Tensor | None, samples: Samples, memory: int, blocks: bool
) -> Iterator[tuple[str, Tensor]]:
    """J J' of each parameter, or summed over them, in pairs of chunks of samples."""
    _refuse_layers(model, samples)
    net = _Network(model, {name: p for name, p in model.named_parameters() if p.requires_grad})
    like = _probe(net, X, samples)
    (N, k), N2 = (len(X), like.shape[1]), len(X if X2 is None else X2)
    K = {name: like.new_zeros(N * k, N2 * k) for name in (net.parameters if blocks else ["all"])}
    if N and N2:
        left = _rows(net, X, samples)
        right = left if X2 is None else _rows(net, X2, samples)
        row = k * like.element_size() * sum(p.numel() for p in net.parameters.values())
        for (i, J), (j, J2) in _pairs(left, right, (N, N2), max(1, memory // (2 * row))):
            for name in net.parameters:
                part = J[name].to(like.dtype) @ J2[name].to(like.dtype).T
                block = K[name if blocks else "all"]
                block[i * k : i * k + len(part), j * k : j * k + part.shape[1]] += part
                if right is left and i != j:
                    block[j * k : j * k + part.shape[1], i * k : i * k + len(part)] += part.T
    for name, kernel in K.items():
        kernel = _symmetric(kernel) if X2 is None else kernel
        yield name, kernel if k == 1 else kernel.reshape(N, k, N2, k)


def _pairs(left: Rows, right: Rows, sizes: tuple[int, int], chunk: int) -> Iterator[tuple[tuple[int, Blocks], tuple[int, Blocks]]]:
    """The Jacobians of all pairs of chunks; of each pair once, if both sides are the same."""
    for i in range(0, sizes[0], chunk):
        J = left(i, min(i + chunk, sizes[0]))
        for j in range(i if right is left else 0, sizes[1], chunk):
            yield (i, J), (j, J if right is left and i == j else right(j, min(j + chunk, sizes[1])))


def _refuse_layers(model: nn.Module, samples: Samples) -> None:
    for name, part in model.named_modules():
        title = f"{type(part).__name__} '{name}'"
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            raise ValueError(f"{title} redraws its mask at every call, so that the model has no kernel: call eval() on it.")
        on_batch = isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or not part.track_running_stats)
        if on_batch and samples == "independent":
            raise ValueError(f"{title} couples the samples of a batch: {_COUPLED}")


_COUPLED = "(a) call eval() on the model, or (b) take samples='coupled' for the kernel of the outputs on this very batch."


def _probe(net: _Network, X: Tensor, samples: Samples) -> Tensor:
    """An output of the model, after a look whether dy_1/dx_2 = dy_2/dx_1 = 0 (exactly, where samples are treated alone)."""
    x = (X[:2] if len(X) else X.new_zeros(2, *X.shape[1:])).detach().clone().requires_grad_()
    y = net(net.parameters, x.clone())
    if not y.requires_grad:
        raise ValueError(invalid(_OWNER, "model", "differentiable", "an output that is a constant for autograd"))
    for own, other in ((0, 1), (1, 0)) if samples == "independent" and len(x) == 2 else ():
        g = torch.autograd.grad(y[own].sum(), x, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
        if g[other].any():
            raise ValueError(f"The model couples the samples of a batch (an output depends on another sample's input): {_COUPLED}")
    return y.detach()


def _rows(net: _Network, X: Tensor, samples: Samples) -> Rows:
    X = X.detach()
    if samples == "coupled":
        y = net(net.parameters, X)
        return lambda i, j: _differentiated(net, y[i:j])
    fast, slow = _vmapped(net, X), _one_by_one(net, X)
    return fast if _agree(fast, slow, min(2, len(X))) else slow


def _vmapped(net: _Network, X: Tensor) -> Rows:
    """All outputs of all samples at once."""
    parameters = {name: p.detach() for name, p in net.parameters.items()}
    jacobian = vmap(jacrev(lambda p, x: net(p, x[None])[0]), in_dims=(None, 0))

    def rows(i: int, j: int) -> Blocks:
        return {name: flat(J.detach().flatten(0, 1)) for name, J in jacobian(parameters, X[i:j]).items()}

    return rows


def _one_by_one(net: _Network, X: Tensor) -> Rows:
    """Each sample as a batch of its own."""

    def rows(i: int, j: int) -> Blocks:
        parts = [_differentiated(net, net(net.parameters, x[None])) for x in X[i:j]]
        return {name: torch.cat([part[name] for part in parts]) for name in net.parameters}

    return rows


def _differentiated(net: _Network, y: Tensor) -> Blocks:
    """The gradients of all entries of y, one after the other."""
    inputs = list(net.parameters.values())
    y = y if y.requires_grad else y + 0 * sum(p.sum() for p in inputs)  # no parameter had a part in it
    found = [torch.autograd.grad(v, inputs, retain_graph=True, allow_unused=True, materialize_grads=True) for v in y.flatten()]
    return {name: torch.stack([g[p].flatten() for g in found]) for p, name in enumerate(net.parameters)}


def _agree(fast: Rows, slow: Rows, count: int) -> bool:
    """Whether vmap works on the first samples and sees all that autograd does: not so for tensors that a function captured."""
    wanted = slow(0, count)
    try:
        found = fast(0, count)
    except ConvergenceError:
        raise
    except (RuntimeError, TypeError, ValueError):
        return False
    return all(_close(found[name], J) for name, J in wanted.items())


def _close(found: Tensor, wanted: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(found - wanted) <= torch.finfo(wanted.dtype).eps ** 0.5 * torch.linalg.vector_norm(wanted))
