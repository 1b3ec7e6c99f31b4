"""Mixed precision: a float64 equilibrium from steps in float32, corrected until its residual in float64 is small."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor

from opteq.batch import is_zero, nothing, per_sample_like, sound_samples
from opteq.checks import check_instance, check_integer, check_number, invalid
from opteq.linear import LinearizedMap
from opteq.maps import Map, first_value
from opteq.solution import Stop
from opteq.solve import solve_map
from opteq.solver import ResidualState, Solver, State, residual_at

_COARSE = 1e-5  # the relative residual that float32 reaches with ease
_FINE = 1e-9  # the tolerance from which a sample must have the same z alone and among others, to much less than this
_LEAST = 1e-14  # what is then gone on to: rounding in float32, which depends on the batch, is not seen in it


@runtime_checkable
class Equation(Protocol):
    """A linear equilibrium in float32, made ready, for one right-hand side after the other."""

    def sourced(self, g: Tensor) -> Map:
        """The same with another g."""


@dataclass(frozen=True)
class MixedMap(Map):
    """A map in float64 and the same in float32; of a linear equation the latter without its g, made ready for a solver."""

    full: Map
    single: Map
    solver: Solver

    @classmethod
    def of(cls, fn: Map, solver: Solver, linear: Solver) -> Self:
        if not isinstance(fn, LinearizedMap):
            return cls(fn, fn.to(torch.float32), solver)
        base, z, g = fn.base.to(torch.float32), fn.z.float(), nothing(fn.g, torch.float32)
        equation = LinearizedMap(base, fn.transposed, z, g)
        ready = linear.prepare(equation)
        return cls(fn, ready if isinstance(ready, Equation) else equation, solver)

    @property
    def closed(self) -> bool:  # type: ignore[override]
        return self.full.closed

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.full.independent

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        return self.full.coupled

    def __call__(self, z: Tensor) -> Tensor:
        return self.full(z)

    def select(self, rows: Tensor) -> Self:
        return replace(self, full=self.full.select(rows), single=self.single.select(rows))

    @cached_property
    def prepared(self) -> Map:
        """The float64 map as the solver wants it, for when float32 does not do."""
        return self.solver.prepare(self.full)

    def coarse(self) -> Map:
        """All of it in float32."""
        return self._equation(self.full.g.float()) if isinstance(self.full, LinearizedMap) else self.single

    def correction(self, z: Tensor, g: Tensor) -> Map:
        """c = J c + g in float32, J the Jacobian at z."""
        linear = isinstance(self.full, LinearizedMap)
        return self._equation(g) if linear else LinearizedMap(self.single, False, z.float(), g)

    def _equation(self, g: Tensor) -> Map:
        return cast(Equation, self.single).sourced(g)


@dataclass(frozen=True)
class FullState(State):
    """The state of the solver that goes on in float64."""

    inner: State

    @classmethod
    def of(cls, inner: State, evals: int = 0) -> Self:
        inner = replace(inner, evals=inner.evals + evals)
        return cls(inner.z, inner.evals, inner)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.inner.exact

    def estimate(self) -> tuple[Tensor, Tensor]:
        return self.inner.estimate()

    def value(self) -> Tensor:
        return self.inner.value()

    def candidate(self, fn: Map, rows: Tensor | None = None) -> Tensor:
        assert isinstance(fn, MixedMap)
        return self.inner.candidate(fn.prepared, rows)

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        return self.of(self.inner.corrected(rows, z, fz))

    def select(self, rows: Tensor) -> Self:
        return self.of(self.inner.select(rows))


@dataclass(frozen=True)
class MixedPrecision(Solver):
    """Solve in float32, then z <- z + c with c = J c + (f(z) - z): the residual in float64, the correction in float32.

    A step of float32 takes half of the time of one in float64, or less, and two or three evaluations in float64 remain. Each step
    is one correction. Where they cease to help, since float32 does not hold the numbers or J is too close to I, `solver` goes on in
    float64. The default for float64 where matrices are large. `solver`: for z = f(z), in float32 first; `linear`: for the
    corrections; `rtol`, `max_steps`: those of the Stop that is to be met. f is called in both: what it captures stays in float64.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.linear import GMRES
        >>> from opteq.solvers import Anderson, MixedPrecision
        >>> layer = Equilibrium(GaussianDEQ(4, 64).double(), MixedPrecision(Anderson(), GMRES(), rtol=1e-10), Stop(rtol=1e-10))
        >>> found = layer.solve(torch.randn(5, 4, dtype=torch.float64))
        >>> found.status.name, bool(found.residual.max() < 1e-10)
        ('CONVERGED', True)
    """

    solver: Solver
    linear: Solver
    rtol: float = 1e-4
    max_steps: int = 100

    def __post_init__(self) -> None:
        check_instance(self, "solver", self.solver, Solver, "a Solver, such as Anderson()")
        check_instance(self, "linear", self.linear, Solver, "a Solver of linear equations, such as GMRES()")
        check_number(self, "rtol", self.rtol, 0.0)
        check_integer(self, "max_steps", self.max_steps, 1)
        for name, part in (("solver", self.solver), ("linear", self.linear)):
            if part.selective:  # a correction leads to a fixed point, not to the one that it seeks
                raise TypeError(invalid(self, name, "a Solver for maps with one fixed point", part))

    @property
    def aim(self) -> float:  # type: ignore[override]
        """At small tolerances a correction more, while it helps."""
        return min(1.0, _LEAST / self.rtol) if 0 < self.rtol <= _FINE else 1.0

    def prepare(self, fn: Map) -> MixedMap:
        return MixedMap.of(fn, self.solver, self.linear)

    def init(self, fn: Map, z0: Tensor) -> ResidualState:
        """The solution in float32, and its residual in float64; z0 itself where float32 fails, or z0 is as good."""
        assert isinstance(fn, MixedMap)
        given, fine = None, torch.zeros(len(z0), dtype=torch.bool, device=z0.device)
        if not is_zero(z0):
            given = residual_at(z0, first_value(fn, z0))
            fine = given["size"] <= _COARSE * given["scale"]
            if fine.all():
                return ResidualState(evals=1, **given)
        stop = Stop(rtol=max(_COARSE, 0.3 * self.rtol), max_steps=self.max_steps)
        coarse = self.linear if isinstance(fn.full, LinearizedMap) else self.solver
        start = nothing(z0, torch.float32) if given is None else z0.float()
        found = solve_map(fn.coarse(), start, coarse, stop, verified=False)
        better = sound_samples(found.z) & sound_samples(z0) & ~fine  # a z0 of NaN says that there is nothing to solve
        z = torch.where(per_sample_like(better, z0), found.z.to(z0.dtype), z0)
        return ResidualState(evals=found.evals + 1 + (given is not None), **residual_at(z, fn(z)))

    def step(self, fn: Map, state: State) -> State:
        assert isinstance(fn, MixedMap)
        if isinstance(state, FullState):
            return FullState.of(self.solver.step(fn.prepared, state.inner))
        assert isinstance(state, ResidualState)
        far = state.size > (0 if self.aim < 1 else self.rtol) * state.scale
        return self._corrected(fn, state, far if far.any() else state.size > 0)  # the loop wants more, or it would not ask

    def _corrected(self, fn: MixedMap, state: ResidualState, far: Tensor) -> "ResidualState | FullState":
        """One correction of the samples that are far, kept where it helps; the solver in float64 where one does not."""
        move, evals = self._correction(fn, state, far)
        z, evals = move.add_(state.z), state.evals + evals + 1
        found = residual_at(z, fn(z), fresh=fn.full.fresh)
        worse = far & ~(found["size"] <= 0.5 * state.size)
        if not worse.any():
            return ResidualState(evals=evals, **found)
        z = torch.where(per_sample_like(worse, z), state.z, z)
        if (worse & (state.size > self.rtol * state.scale)).any():
            return FullState.of(self.solver.init(fn.prepared, z), evals)
        return ResidualState(evals=evals + 1, **residual_at(z, fn(z), fresh=fn.full.fresh))

    def _correction(self, fn: MixedMap, state: ResidualState, far: Tensor) -> tuple[Tensor, int]:
        """c for the samples that are far, 0 for the others, written over the residual of the state; and what it took."""
        unit = torch.where(far & (state.size > 0), state.size, 1)
        g = torch.where(per_sample_like(far, state.r), state.r, 0).div_(per_sample_like(unit, state.r)).float()
        stop = Stop(rtol=min(max(0.25 * self.rtol / _COARSE, _COARSE), 0.1), max_steps=self.max_steps)
        found = solve_map(fn.correction(state.z, g), nothing(g), self.linear, stop, verified=False)
        move = torch.where(per_sample_like(sound_samples(found.z), g), found.z, 0)
        return torch.mul(move, per_sample_like(unit, move), out=state.r), found.evals
