"""Equilibrium: the layer x -> z with z = f(z, x); Cell: the parameters of f."""

import math
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from opteq.batch import channels_together, laid_out, per_sample_like, sound_samples
from opteq.captures import underlying
from opteq.checks import all_finite, check_finite, check_floating, check_instance, invalid, undone
from opteq.gradients import Gradient, Implicit
from opteq.maps import Map
from opteq.solution import ConvergenceError, Solution, Status, Stop
from opteq.solver import Solver

__all__ = ["Cell", "ConvergenceWarning", "Equilibrium", "Observer", "OnFailure", "observe"]

OnFailure = Literal["warn", "raise", "ignore"]


class ConvergenceWarning(UserWarning):
    """Some samples, or their gradients, were not solved to the tolerance.

    Examples:
        >>> import torch, warnings
        >>> from opteq import ConvergenceWarning, Equilibrium, Stop
        >>> from opteq.cells import FunctionCell
        >>> layer = Equilibrium(FunctionCell(lambda z, x: 0.9 * torch.cos(z) + x, (1,)), stop=Stop(rtol=1e-6, max_steps=2))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", ConvergenceWarning)
        ...     z = layer(torch.zeros(1, 1))
        >>> "1 of 1 samples did not converge" in str(caught[0].message)
        True
    """


class Cell(nn.Module, ABC):
    """The parameters of one application of f. Subclasses define `bind`, and set `state_shape` or override `initial`.

    Inside f, layers that couple the batch (BatchNorm on batch statistics) or redraw randomness (Dropout) are refused.

    Examples:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from opteq import Cell, Equilibrium, Map, per_sample
        >>> @dataclass(frozen=True)
        ... class ScaledMap(Map):
        ...     scale: torch.Tensor
        ...     x: torch.Tensor = per_sample()
        ...     def __call__(self, z):
        ...         return self.scale * z + self.x
        >>> class Scaled(Cell):
        ...     state_shape = (3,)
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.tensor(0.5))
        ...     def bind(self, x):
        ...         return ScaledMap(self.scale, x)
        >>> Equilibrium(Scaled())(torch.ones(1, 3)).detach().round(decimals=2)
        tensor([[2., 2., 2.]])
    """

    state_shape: tuple[int, ...]

    @abstractmethod
    def bind(self, x: Tensor) -> Map:
        """f(., x): what the iteration need not repeat (injections, constrained weights, dropout masks) is done here, once."""

    def initial(self, x: Tensor) -> Tensor:
        """z0: zeros of shape [batch, *state_shape] in the promoted dtype of x and the parameters."""
        if getattr(self, "state_shape", None) is None:
            raise TypeError(f"{type(self).__name__} must set state_shape, the shape of the z of one sample, or override initial.")
        return torch.zeros(x.shape[0], *self.state_shape, dtype=self.promoted(x), device=x.device)

    def promoted(self, x: Tensor) -> torch.dtype:
        """The dtype that x and the floating-point parameters promote to."""
        dtype = x.dtype
        for parameter in self.parameters():
            if parameter.is_floating_point():
                dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype


Observer: TypeAlias = Callable[["Equilibrium", Solution, str], None]

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("opteq_observers", default=())


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Inside, `observer(layer, solution, phase)` is called after every solve of an Equilibrium, and after its backward solves.

    `phase`: "forward", "unrolled" (Unrolled, whose depth is fixed), "backward" or "tangent".
    Unlike `record`, it keeps nothing and costs nothing: for what runs at every step of a training.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.equilibrium import observe
        >>> layer = Equilibrium(OptEq(4, 8, 6))
        >>> with observe(lambda layer, solution, phase: print(phase, solution.status.name)):
        ...     layer(torch.randn(3, 4)).sum().backward()
        forward CONVERGED
        backward CONVERGED
    """
    before = _observers.get()
    with undone(lambda: _observers.set(before)):
        _observers.set((*before, observer))
        yield


@dataclass(frozen=True)
class _Policy:
    """Tells the observers, and reports failures as `on_failure` says."""

    layer: "Equilibrium"
    observers: tuple[Observer, ...]  # those of the forward solve: its backward may run in another thread
    on_failure: OnFailure

    def __call__(self, solution: Solution, phase: str) -> None:
        for observer in self.observers:
            observer(self.layer, solution, phase)
        if self.on_failure == "ignore" or solution.status is Status.CONVERGED:
            return
        if phase == "unrolled" and solution.status is Status.MAX_STEPS:  # the depth is part of the model
            return
        message = f"Equilibrium, {phase} solve: {solution.explain()}"
        if self.on_failure == "raise":
            raise ConvergenceError(message, solution)
        warnings.warn(message, ConvergenceWarning, stacklevel=_stacklevel())


def _stacklevel() -> int:
    """How many frames up the caller's own code is: the first frame that is neither ours nor PyTorch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level


_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (sys.modules[__package__], torch) if module.__file__)


def _set_aside(x: Tensor, z0: Tensor) -> tuple[Tensor, Tensor]:
    """Keep NaN and infinity in x out of the cell, where they would spoil the gradients of shared weights.

    Their x is replaced by zeros, and their start by NaN, which the loop answers with the status NONFINITE.
    """
    sound = sound_samples(x)
    x = torch.where(per_sample_like(sound, x), x, torch.zeros_like(x))
    return x, torch.where(per_sample_like(sound, z0), z0, torch.full_like(z0, math.nan))


@contextmanager
def _refusing_layers(cell: Cell) -> Iterator[None]:
    """While f is evaluated, layers whose output is no function of the sample raise; in `bind`, here or in another thread, not."""
    hooks: list[RemovableHandle] = []
    inside = {threading.get_ident()}

    def leave() -> None:
        inside.clear()
        for hook in hooks:
            hook.remove()

    with undone(leave):
        for name, part in cell.named_modules():
            if remedy := _remedy(part):
                message = f"{type(part).__name__} '{name}' inside f {remedy}"
                hooks.append(part.register_forward_pre_hook(partial(_refuse, inside, message)))
        yield


def _remedy(part: nn.Module) -> str | None:
    """What to do about a layer that f must not have; None for others."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or not part.track_running_stats):
        return "couples the batch: (a) use GroupNorm or LayerNorm, (b) call eval() on it, (c) move it outside of f."
    if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
        return "redraws its mask at every evaluation: (a) draw it once, in bind(), (b) move it outside of f, (c) set p = 0."
    return None


def _refuse(inside: set[int], message: str, *call: object) -> None:
    if threading.get_ident() in inside:
        raise ValueError(message)


class Equilibrium(nn.Module):
    """x -> z with z = f(z, x), f given by a cell. Works like any module: nn.Sequential, torch.func, double backward.

    `solver`: a Solver; None takes Newton on the dual for dense OptEq layers, Peaceman-Rachford for monotone ones with a
    resolvent, and Anderson for other maps; large ones in float64 by MixedPrecision.
    `stop`: the tolerance of each sample. `gradient`: Implicit() (exact) by default.
    `on_failure`: what to do about samples that do not converge, forward or backward: "warn", "raise" or "ignore".

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> layer = Equilibrium(OptEq(4, 8, 16))
        >>> model = torch.nn.Sequential(layer, torch.nn.Linear(8, 2))
        >>> model(torch.randn(32, 4)).sum().backward()
        >>> layer.cell.W.grad.shape, layer.solve(torch.randn(32, 4)).status.name
        (torch.Size([16, 8]), 'CONVERGED')
    """

    def __init__(
        self,
        cell: Cell,
        solver: Solver | None = None,
        stop: Stop | None = None,
        gradient: Gradient | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        check_instance(self, "cell", cell, Cell, "a Cell (wrap a function f(z, x) in FunctionCell)")
        check_instance(self, "solver", solver, (Solver, type(None)), "a Solver, such as Anderson(), or None")
        check_instance(self, "stop", stop, (Stop, type(None)), "a Stop")
        check_instance(self, "gradient", gradient, (Gradient, type(None)), "a gradient strategy, such as Implicit()")
        if on_failure not in ("warn", "raise", "ignore"):
            raise ValueError(invalid(self, "on_failure", "'warn', 'raise' or 'ignore'", on_failure))
        self.cell = cell
        self.solver = solver
        self.stop = Stop() if stop is None else stop
        self.gradient = Implicit() if gradient is None else gradient
        self.gradient.check(solver)
        self.on_failure: OnFailure = on_failure

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        """The equilibrium of every sample of x, begun at z0 (default: the cell's `initial`), a constant for derivatives."""
        return self.solve(x, z0).z

    def solve(self, x: Tensor, z0: Tensor | None = None) -> Solution:
        """The same with its status, residual and number of steps; `z` carries derivatives."""
        if torch.compiler.is_compiling():  # the loop depends on data: a compiled model calls it as it is
            solution: Solution = torch.compiler.disable(self._solve)(x, z0)
            return solution
        return self._solve(x, z0)

    def _solve(self, x: Tensor, z0: Tensor | None) -> Solution:
        check_floating(self, "x", x)
        if x.ndim == 0:
            raise ValueError(invalid(self, "x", "of shape [batch, ...]", list(x.shape)))
        for name, parameter in self.cell.named_parameters():
            if parameter.device != x.device:
                raise ValueError(invalid(self, "x", f"on {parameter.device}, where '{name}' of the cell is", str(x.device)))
        check_finite(self.cell, ((name, underlying(p)) for name, p in self.cell.named_parameters()))
        start = self._start(x, z0)
        if not all_finite(underlying(x)):
            x, start = _set_aside(x, start)
        fn: object = self.cell.bind(x)
        if not isinstance(fn, Map):
            owner, got = type(self.cell).__name__, type(fn).__name__
            raise TypeError(f"{owner}.bind must return a Map; FunctionCell makes one of any function. Got {got} instead.")
        fn = fn.to(start.dtype)
        with _refusing_layers(self.cell):
            solution = self.gradient.attach(fn, start, self.solver, self.stop, _Policy(self, _observers.get(), self.on_failure))
        return solution if channels_together(x) else replace(solution, z=solution.z.contiguous())

    def _start(self, x: Tensor, z0: Tensor | None) -> Tensor:
        initial = self.cell.initial(x)
        if z0 is None:
            return initial
        check_floating(self, "z0", z0)
        if z0.shape != initial.shape or z0.device != initial.device:
            expected = f"of shape {list(initial.shape)} on {initial.device}"
            raise ValueError(invalid(self, "z0", expected, f"{list(z0.shape)} on {z0.device}"))
        return laid_out(z0.detach(), initial)

    def extra_repr(self) -> str:
        return f"solver={self.solver}, stop={self.stop}, gradient={self.gradient}, on_failure={self.on_failure!r}"
