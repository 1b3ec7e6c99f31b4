"""How an equilibrium is differentiated: exactly (Implicit), through a fixed depth (Unrolled), or approximately."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opteq.autograd import Problem, Report, call, equilibrium, quarantined
from opteq.batch import norm, per_sample_like, sound_samples
from opteq.captures import underlying
from opteq.checks import all_finite, check_instance, check_integer, check_number
from opteq.convex import ConvexMap
from opteq.linear import linear_solver
from opteq.logs import new_trace
from opteq.maps import Map, first_value
from opteq.solution import ConvergenceError, Solution, Stop, Trace, finite, relative
from opteq.solver import Solver, State, ValueState
from opteq.solvers import Anderson, MixedPrecision, Newton, PeacemanRachford, Picard
from opteq.solvers.splitting import SplitLinear
from opteq.splitting import SplitMap

if TYPE_CHECKING:
    from opteq.equilibrium import Equilibrium

__all__ = ["Gradient", "Implicit", "JacobianFree", "Phantom", "Unrolled", "gradient_error"]


class Gradient(ABC):
    """A strategy that solves z = f(z) and attaches the solution to the autograd graph.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import FunctionCell
        >>> from opteq.gradients import Implicit, JacobianFree, Phantom, Unrolled
        >>> cell, x = FunctionCell(lambda z, x: 0.5 * z + x, (1,)), torch.ones(1, 1, requires_grad=True)
        >>> for gradient in (Implicit(), Unrolled(20), Phantom(), JacobianFree()):
        ...     (slope,) = torch.autograd.grad(Equilibrium(cell, gradient=gradient)(x).sum(), x)
        ...     print(type(gradient).__name__, round(slope.item(), 2))
        Implicit 2.0
        Unrolled 2.0
        Phantom 1.53
        JacobianFree 1.0
    """

    @abstractmethod
    def attach(self, fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report) -> Solution:
        """The solution, its z carrying derivatives."""

    def check(self, solver: Solver | None) -> None:  # noqa: B027 - most strategies go with any solver
        """Raise TypeError if the strategy cannot go with the solver."""


def default_solver(fn: Map) -> Solver:
    """The method taken when none is named: Newton on the dual of a convex map, where that is cheaper; Peaceman-Rachford for a
    monotone map with a resolvent; else Anderson. Large maps in float64 take it `in_mixed_precision`.

    It depends on the map only, never on the batch, so that a sample is solved in the same way alone and among others.
    """
    if isinstance(fn, ConvexMap) and fn.dual_pays():
        return Newton()
    return PeacemanRachford() if isinstance(fn, SplitMap) and fn.has_resolvent() else Anderson()


def default_linear(fn: Map, rtol: float) -> Solver:
    """The method for the adjoint and the tangent of a map: the splitting for a monotone map with a resolvent; else CG or GMRES."""
    return SplitLinear(rtol) if isinstance(fn, SplitMap) and fn.has_resolvent() else linear_solver(fn)


_LARGE = 2**16  # numbers in its weights from which a map in float64 is solved in float32 first


def in_mixed_precision(fn: Map, solver: Solver, stop: Stop) -> Solver:
    """The solver itself or, where the weights of a map are many and in float64, the same in float32 with corrections."""
    shared = [leaf.tensor for leaf in fn.leaves() if not leaf.per_sample]
    tensors = [leaf.tensor for leaf in fn.leaves() if leaf.tensor.is_floating_point()]
    large = sum(tensor.numel() for tensor in shared) >= _LARGE and all(tensor.dtype == torch.float64 for tensor in tensors)
    if not (large and fn.closed and fn.independent and not fn.coupled):
        return solver
    return MixedPrecision(solver, default_linear(fn, 1e-5), stop.rtol, stop.max_steps)


def _refuse_selective(gradient: Gradient, solver: Solver | None) -> None:
    if solver is not None and solver.selective:
        own, given = type(gradient).__name__, type(solver).__name__
        raise TypeError(
            f"{own} differentiates the equilibrium as the only solution of z = f(z); {given} is for maps with several, where "
            "I - J is singular, and it stops before it has found one. Take gradient=Unrolled(20), which differentiates its steps."
        )


@dataclass(frozen=True)
class Implicit(Gradient):
    """Exact: v = J'v + dloss/dz, then one vjp through f (implicit function theorem). Memory does not grow with the steps.

    `stop`: for the linear solve; by default its rtol is a tenth of the forward one, but at least 50 times the precision.
    `linear`: CG(), GMRES(), Neumann() or any solver; by default CG for symmetric Jacobians (in the dual for
    dense OptEq layers), Peaceman-Rachford for monotone maps with a resolvent, and GMRES for others.
    `recompute`: True evaluates f once more in the backward pass, instead of keeping the graph of one evaluation from the forward
    pass: for networks of many equilibria that do not fit into memory.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import FunctionCell
        >>> from opteq.gradients import Implicit
        >>> from opteq.linear import GMRES
        >>> layer = Equilibrium(FunctionCell(lambda z, x: 0.5 * z + x, (1,)), gradient=Implicit(Stop(rtol=1e-6), GMRES()))
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> round(torch.autograd.grad(layer(x).sum(), x)[0].item(), 4)  # 1 / (1 - 0.5)
        2.0
    """

    stop: Stop | None = None
    linear: Solver | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        check_instance(self, "stop", self.stop, (Stop, type(None)), "a Stop or None")
        check_instance(self, "linear", self.linear, (Solver, type(None)), "a Solver, such as GMRES(), or None")
        check_instance(self, "recompute", self.recompute, bool, "a bool")

    def check(self, solver: Solver | None) -> None:
        _refuse_selective(self, solver)

    def attach(self, fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report) -> Solution:
        self.check(solver)
        return equilibrium(fn, z0, self.problem(fn, solver, stop, report))[0]

    def problem(self, fn: Map, solver: Solver | None, stop: Stop, report: Report) -> Problem:
        """What autograd must know: the solver and the stop of the equilibrium and of its derivatives."""

        def linear_stop(dtype: torch.dtype) -> Stop:
            rtol = max(0.1 * stop.rtol, 50 * torch.finfo(dtype).eps)
            return Stop(rtol=rtol, max_steps=max(200, stop.max_steps)) if self.stop is None else self.stop

        def linear(base: Map, dtype: torch.dtype) -> Solver:
            if self.linear is not None:
                return self.linear
            return in_mixed_precision(base, default_linear(base, linear_stop(dtype).rtol), linear_stop(dtype))

        aim = part_aimed_at(fn, stop)
        if solver is None:
            solver = in_mixed_precision(fn, default_solver(fn), replace(stop, rtol=aim * stop.rtol))
        return Problem(solver, stop, linear, linear_stop, report, aim=aim, taped=not self.recompute)


def part_aimed_at(fn: Map, stop: Stop) -> float:
    """The part of the tolerance to aim at, with derivatives or without, so that the value is the same.

    A unit of a ReLU that is on the wrong side of 0 by less than the tolerance makes an error in the gradient that may be many
    times as large: at 0.3 of the tolerance it was up to 400 times smaller, for one step in ten more.
    """
    if stop.rtol == 0 or stop.atol > 0:
        return 1.0
    eps = max((torch.finfo(leaf.tensor.dtype).eps for leaf in fn.leaves() if leaf.tensor.is_floating_point()), default=0.0)
    return min(1.0, max(0.3, 50 * eps / stop.rtol))


@dataclass(frozen=True)
class _Hold(Solver):
    """Stays where it is: for judging a given z."""

    def init(self, fn: Map, z0: Tensor) -> State:
        return ValueState(z0, 1, first_value(fn, z0))

    def step(self, fn: Map, state: State) -> State:
        return state


@dataclass(frozen=True)
class Unrolled(Gradient):
    """z after exactly `steps` steps of the solver (Picard by default), differentiated through every one: a weight-tied network.

    The depth is part of the model, so a residual above the tolerance is no failure: it is told in the Solution, without a
    warning. NaN and infinity are failures as ever.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import FunctionCell
        >>> from opteq.gradients import Unrolled
        >>> layer = Equilibrium(FunctionCell(lambda z, x: 0.5 * z + x, (1,)), gradient=Unrolled(3))
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> layer(x).item(), torch.autograd.grad(layer(x).sum(), x)[0].item()  # 1 + 1/2 + 1/4
        (1.75, 1.75)
    """

    steps: int

    def __post_init__(self) -> None:
        check_integer(self, "steps", self.steps, 1)

    def check(self, solver: Solver | None) -> None:
        if solver is not None and not solver.differentiable:
            name = type(solver).__name__
            raise TypeError(f"Unrolled needs a solver whose steps can be differentiated, such as Picard. Got {name} instead.")

    def attach(self, fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report) -> Solution:
        self.check(solver)
        solver = Picard() if solver is None else solver
        z0, sound = _without_nan(z0)
        trace = new_trace()
        with torch.autocast(z0.device.type, enabled=False):
            ready = solver.prepare(fn)
            state = solver.init(ready, z0)
            trace = _traced(trace, ready, state, sound)
            for _ in range(self.steps):
                state = solver.step(ready, state)
                trace = _traced(trace, ready, state, sound)
        z, judged_at = state.z, state.z
        if sound is not None:
            z = torch.where(sound, z, z.detach())
            judged_at = torch.where(sound, z, torch.full_like(z, math.nan))

        def told(solution: Solution, phase: str) -> None:
            report(solution, "unrolled")

        def unrolled(judged: Solution) -> Solution:
            steps = torch.full_like(judged.steps, self.steps)
            return replace(judged, steps=steps, evals=state.evals + judged.evals, trace=trace)

        judged = _value(fn, judged_at, _Hold(), replace(stop, max_steps=1), told, unrolled)[0]
        return replace(unrolled(judged), z=z)


@dataclass(frozen=True)
class Phantom(Gradient):
    """Approximate: solve, then differentiate through `steps` damped steps z <- (1 - damping) z + damping f(z) from the solution.

    The value is the solver's z. Geng et al. (2021), "On training implicit models".

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import FunctionCell
        >>> from opteq.gradients import Phantom
        >>> layer = Equilibrium(FunctionCell(lambda z, x: 0.5 * z + x, (1,)), gradient=Phantom(steps=2, damping=0.5))
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> round(layer(x).item(), 2), torch.autograd.grad(layer(x).sum(), x)[0].item()  # the exact derivative is 2
        (2.0, 0.875)
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_integer(self, "steps", self.steps, 1)
        check_number(self, "damping", self.damping, 0.0, 1.0, open_low=True)

    def check(self, solver: Solver | None) -> None:
        _refuse_selective(self, solver)

    def attach(self, fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report) -> Solution:
        self.check(solver)
        solution, nonfinite = _value(fn, z0, solver, stop, report)
        z = solution.z
        if nonfinite:
            operands, z, _ = quarantined(fn, [leaf.tensor for leaf in fn.leaves()], z, z, solution.codes)
            fn = fn.filled(operands)
        carrier = z
        with torch.autocast(z.device.type, enabled=False):
            for _ in range(self.steps):
                carrier = torch.lerp(carrier, fn(carrier), self.damping)
        if nonfinite:
            carrier = torch.where(per_sample_like(finite(solution.codes), z), carrier, z)
        return replace(solution, z=call(_Carried, solution.z, carrier))


@dataclass(frozen=True)
class JacobianFree(Gradient):
    """Approximate: (I - J')^-1 is replaced by I, so the gradient is that of one step f(z) at the solution. Fung et al. (2022).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import FunctionCell
        >>> from opteq.gradients import JacobianFree
        >>> layer = Equilibrium(FunctionCell(lambda z, x: 0.5 * z + x, (1,)), gradient=JacobianFree())
        >>> x = torch.ones(1, 1, requires_grad=True)
        >>> torch.autograd.grad(layer(x).sum(), x)[0].item()  # the exact derivative is 2
        1.0
    """

    def check(self, solver: Solver | None) -> None:
        _refuse_selective(self, solver)

    def attach(self, fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report) -> Solution:
        return Phantom(steps=1, damping=1.0).attach(fn, z0, solver, stop, report)


def _value(
    fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report, amend: Callable[[Solution], Solution] | None = None
) -> tuple[Solution, bool]:
    """The solution as a constant, and whether a sample met NaN or infinity."""
    problem = replace(Implicit().problem(fn, solver, stop, report), amend=amend)
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        solution, found = equilibrium(fn.detach(), z0.detach(), problem)
    return solution, found.nonfinite


def _without_nan(z0: Tensor) -> tuple[Tensor, Tensor | None]:
    """z0 with its unsound samples replaced by zeros, and a mask of the sound ones; no mask if all are."""
    if all_finite(underlying(z0)):
        return z0, None
    sound = per_sample_like(sound_samples(z0), z0)
    return torch.where(sound, z0, torch.zeros_like(z0)), sound


def _traced(trace: Trace | None, fn: Map, state: State, sound: Tensor | None) -> Trace | None:
    """The trace, if there is one, with the state's iterate and its residual as constants; unsound samples are in no step."""
    if trace is None:
        return None
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        at = state.candidate(fn)
        z, value = underlying(at), underlying(state.value() if state.exact else fn(at))
        if value.shape != at.shape:  # torch.func.vmap maps over it: samples are not told apart
            return None
        residual, rows = relative(norm(value - z), norm(value)), torch.arange(z.shape[0], device=z.device)
        if sound is not None:
            rows = underlying(sound).flatten().nonzero()[:, 0]
        return trace.then(underlying(rows), underlying(residual[rows]), state.evals, underlying(z[rows]))


class _Carried(torch.autograd.Function):
    """z in value, the carrier in derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, carrier: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[1]
        return tangent.clone()


def gradient_error(equilibrium: "Equilibrium", x: Tensor, seed: int = 0) -> float:
    """|g - g*| / |g*|: the layer's gradient in x and its parameters for a random cotangent, against the exact implicit one.

    The exact one is computed in float64 at a relative residual of 1e-12, by the layer's own solver; where float64 is out of
    reach, because f captures tensors of another dtype, in the dtype of x as well as that allows. Raises ConvergenceError if
    even the exact solve does not converge.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.gradients import JacobianFree, gradient_error
        >>> cell, x = OptEq(4, 8, 16), torch.randn(5, 4)
        >>> gradient_error(Equilibrium(cell), x) < 1e-3 < gradient_error(Equilibrium(cell, gradient=JacobianFree()), x)
        True
    """
    given = _gradient(equilibrium, x, seed)
    try:
        wanted = _gradient(_tightened(deepcopy(equilibrium).double(), 1e-12), x.double(), seed)
    except ConvergenceError:
        raise
    except (RuntimeError, ValueError):
        wanted = _gradient(_tightened(deepcopy(equilibrium), 50 * torch.finfo(x.dtype).eps), x, seed)
    difference = torch.cat([(a - b).flatten() for a, b in zip(given, wanted, strict=True)])
    error, size = torch.linalg.vector_norm(difference), torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted]))
    return float(error / size) if error > 0 else 0.0


def _tightened(layer: "Equilibrium", rtol: float) -> "Equilibrium":
    """The layer with its gradient exact and its tolerances tight."""
    stop = Stop(rtol=rtol, max_steps=max(10_000, layer.stop.max_steps))
    solver = None if isinstance(layer.gradient, Unrolled) else layer.solver
    layer.stop, layer.gradient, layer.solver, layer.on_failure = stop, Implicit(stop), solver, "raise"
    return layer


def _gradient(layer: "Equilibrium", x: Tensor, seed: int) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        z = layer(x)
        cotangent = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
        found = torch.autograd.grad(z, inputs, cotangent.to(z), allow_unused=True, materialize_grads=True)
    return [g.double() for g in found]
