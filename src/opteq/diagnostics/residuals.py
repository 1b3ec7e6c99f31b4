"""How the residual falls, step by step, for several solvers of one equilibrium."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from opteq.autograd import Report
from opteq.checks import check_instance, invalid
from opteq.convex import ConvexMap
from opteq.diagnostics.finding import Columns, Finding
from opteq.diagnostics.keeping import undisturbed
from opteq.diagnostics.probing import Probe, probe
from opteq.equilibrium import Equilibrium
from opteq.gradients import Gradient, default_solver, part_aimed_at
from opteq.maps import Map
from opteq.solution import Solution, Stop, Trace
from opteq.solve import solve_map
from opteq.solver import Solver
from opteq.solvers import Accelerated, Anderson, Broyden, ForwardBackward, Newton, PeacemanRachford, Picard
from opteq.splitting import SplitMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ResidualCurve", "SolverCurve", "residual_curve"]


@dataclass(frozen=True, eq=False)
class SolverCurve:
    """One solver: the true residual |f(z) - z| / |f(z)| of each sample at the iterate of each step, 0 being z0.

    A sample that is done, solved or not, is held at its last residual; one that met NaN or infinity is infinitely far.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import residual_curve
        >>> from opteq.solvers import Picard
        >>> curve = residual_curve(Equilibrium(OptEq(4, 8, 16)), torch.randn(5, 4), {"plain": Picard()}).curves["plain"]
        >>> curve.residual.shape[0], curve.solved[-1].item(), dict(curve.statuses)
        (5, 1.0, {'CONVERGED': 5})
    """

    residual: Tensor  # [samples, steps + 1], float64
    evals: Tensor  # [steps + 1], evaluations of f, and products with its Jacobian, until then
    solved: Tensor  # [steps + 1], the share of samples that are converged
    statuses: Mapping[str, int]  # how many samples ended how, by the names of Status

    def quantile(self, share: float) -> Tensor:
        """The residual that this share of the samples is at or below, at each step."""
        found = np.quantile(self.residual.numpy(), share, axis=0, method="inverted_cdf")  # between samples may lie infinity
        return torch.from_numpy(found)


@dataclass(frozen=True, eq=False, repr=False)
class ResidualCurve(Finding):
    """The curve of each solver by its name, the reasons of those that cannot solve this map, and the tolerance of all.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import residual_curve
        >>> from opteq.solvers import PeacemanRachford, Picard
        >>> found = residual_curve(Equilibrium(OptEq(4, 8, 16)), torch.randn(5, 4), [Picard(), PeacemanRachford()])
        >>> sorted(found.curves), sorted(found.left_out)
        (['Picard'], ['PeacemanRachford'])
    """

    name: ClassVar[str] = "residuals"
    curves: Mapping[str, SolverCurve]
    left_out: Mapping[str, str]
    stop: Stop

    def figure(self, over: Literal["steps", "evals"] = "steps") -> "Figure":
        """The median with a band of 10% to 90% of the samples, the worst one dashed; over steps, or over evaluations of f."""
        from opteq.diagnostics.residual_figure import draw_residuals

        if over not in ("steps", "evals"):
            raise ValueError(invalid("figure", "over", "'steps' or 'evals'", over))
        return draw_residuals(self, over)

    def columns(self) -> Columns:
        """One row for each solver and step: the largest residual, its 90%, 50% and 10% quantiles, share solved, cost."""
        shares = {"worst": 1.0, "high": 0.9, "median": 0.5, "low": 0.1}
        curves = self.curves.values()
        return {
            "solver": np.repeat(list(self.curves), [len(curve.evals) for curve in curves]),
            "step": np.concatenate([np.arange(len(curve.evals)) for curve in curves]),
            **{name: np.concatenate([curve.quantile(share).numpy() for curve in curves]) for name, share in shares.items()},
            "solved": np.concatenate([curve.solved.numpy() for curve in curves]),
            "evals": np.concatenate([curve.evals.numpy() for curve in curves]),
        }


def residual_curve(
    model: nn.Module,
    x: Tensor,
    solvers: Mapping[str, Solver] | Sequence[Solver] | None = None,
    *,
    stop: Stop | None = None,
    layer: str | None = None,
) -> ResidualCurve:
    """|f(z) - z| / |f(z)| of every sample at every step of each solver, for the equilibrium of a model, or a layer, at x.

    `solvers`: by name, or named by themselves; None takes the layer's own, which comes first, and the usual ones that fit the map.
    One that cannot solve this map is left out, its reason kept. `stop`: the layer's own by default.
    `layer`: the name of the Equilibrium, where the model has several; its first call is the one that counts.
    The model runs in evaluation mode, without gradients, and is left as it was. Where a solver only estimates residuals, f is
    evaluated for the curve; this is not among its `evals`.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import Monotone
        >>> from opteq.diagnostics import residual_curve
        >>> found = residual_curve(Equilibrium(Monotone(4, 8, m=0.5)), torch.randn(5, 4))
        >>> all(curve.residual[:, -1].max() < curve.residual[:, 0].min() for curve in found.curves.values())
        True
    """
    check_instance("residual_curve", "model", model, nn.Module, "an nn.Module")
    check_instance("residual_curve", "stop", stop, (Stop, type(None)), "a Stop or None")
    curves, left_out = {}, {}
    with undisturbed(model):
        found = probe("residual_curve", model, x, layer)
        stop = found.layer.stop if stop is None else stop
        for name, solver in _named(found, solvers).items():
            try:
                solution = Equilibrium(found.layer.cell, solver, stop, _Plain(), "ignore").solve(found.x, found.z0)
            except TypeError as error:  # how solvers refuse maps
                left_out[name] = str(error)
            else:
                curves[name] = _curve(solution)
    if not curves:
        raise TypeError("No solver fits this map. " + " ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    return ResidualCurve(curves, left_out, stop)


class _Plain(Gradient):
    """Solves and records, without derivatives, logs or observers."""

    def attach(self, fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report) -> Solution:
        assert solver is not None
        return solve_map(fn, z0, solver, stop, Trace(), aim=part_aimed_at(fn, stop))


def _named(found: Probe, solvers: Mapping[str, Solver] | Sequence[Solver] | None) -> Mapping[str, Solver]:
    if solvers is None:
        fn = found.layer.cell.bind(found.x).to(found.layer.cell.promoted(found.x))
        own = default_solver(fn) if found.layer.solver is None else found.layer.solver
        solvers = [own, *_usual(fn)]
    check_instance("residual_curve", "solvers", solvers, Iterable, "Solvers by name, a list of Solvers, or None")
    named = solvers if isinstance(solvers, Mapping) else {solver_title(solver): solver for solver in solvers}
    if not named:
        raise ValueError(invalid("residual_curve", "solvers", "at least one Solver, or None", solvers))
    for solver in named.values():
        check_instance("residual_curve", "solvers", solver, Solver, "Solvers, such as Anderson()")
    return named


def _usual(fn: Map) -> list[Solver]:
    """The methods that fit a map, with their default settings."""
    fitting: list[Solver] = [Picard(), Anderson(), Broyden(), Newton()]
    if isinstance(fn, ConvexMap) or fn.symmetric:
        fitting.append(Accelerated())
    if isinstance(fn, SplitMap):
        fitting += [ForwardBackward(), PeacemanRachford()] if fn.has_resolvent() else [ForwardBackward()]
    return fitting


def solver_title(solver: Solver) -> str:
    """The name of a solver's class, with the settings that are not the default: "Anderson(memory=3)"."""
    name = type(solver).__name__
    settings: tuple[Field[Any], ...] = fields(solver) if is_dataclass(solver) else ()
    values = {setting.name: getattr(solver, setting.name) for setting in settings}
    given = [f"{s.name}={values[s.name]!r}" for s in settings if s.default is MISSING or values[s.name] != s.default]
    return f"{name}({', '.join(given)})" if given else name


def _curve(solution: Solution) -> SolverCurve:
    trace = solution.trace
    assert trace is not None
    last = torch.empty_like(solution.residual)
    held = []
    for rows, residual in zip(trace.rows, trace.residual, strict=True):
        last = last.index_copy(0, rows, residual)
        held.append(last)
    table = torch.stack(held, dim=1).double().cpu().nan_to_num(nan=torch.inf, posinf=torch.inf)
    done = torch.where(solution.converged, solution.steps, len(held)).cpu()
    solved = (done[:, None] <= torch.arange(len(held))).double().mean(dim=0)
    counts = Counter(status.name for status in solution.statuses)
    return SolverCurve(table, torch.tensor(trace.evals), solved, dict(counts))
