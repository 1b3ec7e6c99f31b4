"""The largest eigenvalues of the Hessian of a loss in the parameters: how sharp the minimum is."""

import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from opteq.checks import check_choice, check_finite, check_instance, check_integer, check_number, invalid
from opteq.diagnostics.arnoldi import NotFiniteError
from opteq.diagnostics.finding import Columns, Finding
from opteq.diagnostics.keeping import kept
from opteq.diagnostics.lanczos import ARPACK, Hessian, Lanczos, Loss, Which
from opteq.diagnostics.losses import check_callable
from opteq.equilibrium import ConvergenceWarning, Equilibrium, observe
from opteq.gradients import JacobianFree, Phantom
from opteq.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HessianSpectrum", "Which", "hessian_spectrum"]

_ASYMMETRY = 0.01  # far above what loose solves give, far below what a wrong gradient does


@dataclass(frozen=True, eq=False, repr=False)
class HessianSpectrum(Finding):
    """Eigenvalues of the Hessian, the largest first: float64, on the CPU; NaN if not found.

    `error`: |H v - lambda v|; some eigenvalue lies within it, since H is symmetric. `converged`: whether it is at most rtol times
    the largest modulus, but for rounding, and none was missed. `asymmetry`: |u'Hv - v'Hu| / |Hv| for random u and v, 0 but for
    errors of the solves.
    `trace`: of H, by Hutchinson's method, and its standard error; NaN if it was not asked for. `size`: the number of parameters.

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import hessian_spectrum
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> found = hessian_spectrum(model, lambda m: (m.weight**2 * torch.tensor([1.0, 3.0])).sum(), k=2)
        >>> found.eigenvalues.round(decimals=4).tolist(), found.converged.tolist(), found.size
        ([6.0, 2.0], [True, True], 2)
    """

    name: ClassVar[str] = "hessian"
    eigenvalues: Tensor
    error: Tensor
    converged: Tensor
    which: Which
    asymmetry: float
    trace: float
    trace_error: float
    size: int

    def columns(self) -> Columns:
        """One row for each eigenvalue: its place, itself, its error, and whether it converged."""
        found = {"eigenvalue": self.eigenvalues, "error": self.error, "converged": self.converged}
        return {"index": np.arange(len(self.error)), **{name: part.numpy() for name, part in found.items()}}

    def figure(self) -> "Figure":
        """The eigenvalues with their errors as bars."""
        from matplotlib.ticker import MaxNLocator

        from opteq.diagnostics.drawing import COLOURS, FAILED, new_figure

        values, error, good = self.eigenvalues.numpy(), self.error.numpy(), self.converged.numpy()
        place = np.arange(1, len(values) + 1)
        with new_figure((3.4, 2.6)) as figure:
            axes = figure.subplots()
            axes.axhline(0, color="0.7", linewidth=0.6, zorder=0)
            for chosen, marker, colour, label in ((good, "o", COLOURS[0], ""), (~good, "x", FAILED, "not converged")):
                shown = chosen & np.isfinite(values)
                if shown.any():
                    bars = np.where(np.isfinite(error), error, 0.0)[shown]
                    axes.errorbar(place[shown], values[shown], bars, fmt=marker, color=colour, markersize=4, capsize=2, label=label)
            axes.set(xlabel="number", ylabel="eigenvalue of the Hessian", xlim=(0.5, len(values) + 0.5))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if not good.all() and np.isfinite(values[~good]).any():
                axes.legend(frameon=False)
        return figure


def hessian_spectrum(
    model: nn.Module,
    loss: Loss,
    k: int = 5,
    *,
    which: Which = "largest",
    probes: int = 0,
    rtol: float = 1e-3,
    restarts: int = 30,
    seed: int = 0,
) -> HessianSpectrum:
    """The k largest eigenvalues of the Hessian of loss(model) in the parameters that require gradients, by Lanczos' method.

        hessian_spectrum(model, lambda m: cross_entropy(m(x), y), k=3)

    `loss(model)`: any differentiable function that gives one number, called once, in the mode that the model is in; its graph must
    fit into memory. Products with the Hessian are exact, by differentiating twice through the equilibria, but only as exact as
    their solves: for n digits let `Stop.rtol` be 10^-n, in float64 if n > 5. Phantom and JacobianFree gradients have no Hessian.
    At a kink, as that of a ReLU, the Hessian is that of the smooth pieces: it does not see how the slope jumps between them.
    `which`: "smallest" for the least ones, "modulus" for the largest in modulus. `probes`: how many random vectors estimate the
    trace. `restarts`: of Lanczos' method, some 20 products each. Whatever is not known to `rtol` is told by a ConvergenceWarning.
    The model is left as it was. Hutchinson (1990); Lehoucq, Sorensen and Yang, ARPACK users' guide (1998).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import data_loss, hessian_spectrum
        >>> model = torch.nn.Sequential(Equilibrium(OptEq(2, 4, 6), stop=Stop(rtol=1e-10)), torch.nn.Linear(4, 2)).double()
        >>> loss = data_loss(torch.randn(16, 2, dtype=torch.float64), torch.randint(2, (16,)))
        >>> found = hessian_spectrum(model, loss, k=2)
        >>> bool(found.converged.all()), bool(found.eigenvalues[0] > 0), found.asymmetry < 1e-6
        (True, True, True)
    """
    _check(model, loss, k, which, probes, rtol, restarts, seed)
    watch = _Watch()
    with kept(model, seed) as reset, torch.enable_grad(), observe(watch), warnings.catch_warnings():
        reset()
        warnings.simplefilter("ignore", ConvergenceWarning)  # told once, at the end
        hessian = Hessian(model, loss)
        find = Lanczos(min(k, hessian.size), which, rtol, restarts, seed)
        try:
            found = _found(hessian, find, probes)
        except NotFiniteError:
            found = _nothing(find, hessian.size)
    _warn(found, watch.failed, rtol)
    return found


def _check(model: nn.Module, loss: Loss, k: int, which: str, probes: int, rtol: float, restarts: int, seed: int) -> None:
    owner = "hessian_spectrum"
    check_instance(owner, "model", model, nn.Module, "an nn.Module")
    check_callable(owner, loss)
    for name, value, least in (("k", k, 1), ("probes", probes, 0), ("restarts", restarts, 1), ("seed", seed, 0)):
        check_integer(owner, name, value, least)
    check_number(owner, "rtol", rtol, 0.0, open_low=True)
    check_choice(owner, "which", which, tuple(ARPACK))
    if probes == 1:
        raise ValueError(invalid(owner, "probes", "0, or at least 2 for a standard error", probes))
    check_finite(model, model.named_parameters())


class _Watch:
    """Counts the solves that failed, and refuses gradients that are none."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()

    def __call__(self, layer: Equilibrium, solution: Solution, phase: str) -> None:
        if isinstance(layer.gradient, (Phantom, JacobianFree)):
            kind = type(layer.gradient).__name__
            raise ValueError(f"{kind} only approximates the gradient, so that there is no Hessian: take Implicit() or Unrolled.")
        if phase != "unrolled" and not bool(solution.converged.all()):
            self.failed[phase] += 1


def _found(hessian: Hessian, find: Lanczos, probes: int) -> HessianSpectrum:
    draw = np.random.default_rng(find.seed)
    u, v = draw.standard_normal((2, hessian.size))
    Hu, Hv = hessian.product(u), hessian.product(v)
    scale = float(max(np.linalg.norm(Hu), np.linalg.norm(Hv)))
    asymmetry = float(abs(u @ Hv - v @ Hu) / scale) if scale > 0 else 0.0
    values, vectors, complete = find.solve(hessian, scale)
    chosen = find.chosen(values)
    values, vectors = values[chosen], vectors[:, chosen]
    error = np.array([np.linalg.norm(hessian.product(v) - a * v) for a, v in zip(values, vectors.T, strict=True)])
    good = complete & (error <= find.tolerance(hessian, values, scale))
    signs = draw.choice((-1.0, 1.0), (probes, hessian.size))
    samples = np.array([sign @ hessian.product(sign) for sign in signs])
    trace, spread = (samples.mean(), samples.std(ddof=1) / math.sqrt(probes)) if probes else (math.nan, math.nan)
    missing = (0, find.k - len(values))
    return HessianSpectrum(
        torch.from_numpy(np.pad(values, missing, constant_values=math.nan)),
        torch.from_numpy(np.pad(error, missing, constant_values=math.inf)),
        torch.from_numpy(np.pad(good, missing)),
        find.which,
        asymmetry,
        float(trace),
        float(spread),
        hessian.size,
    )


def _nothing(find: Lanczos, size: int) -> HessianSpectrum:
    none = torch.full((find.k,), math.nan, dtype=torch.float64)
    unknown = torch.full_like(none, math.inf)
    return HessianSpectrum(none, unknown, none == 0, find.which, math.nan, math.nan, math.nan, size)


def _warn(found: HessianSpectrum, failed: Counter[str], rtol: float) -> None:
    """One warning for all that makes the eigenvalues less than exact."""
    troubles = []
    if math.isnan(found.asymmetry):
        troubles.append("a product with the Hessian has NaN or infinity.")
    elif not found.converged.all():
        worst = float(found.error.max())
        troubles.append(
            f"{int((~found.converged).sum())} of {len(found.error)} eigenvalues are not known to rtol {rtol:g}, errors are up to "
            f"{worst:.1e}: "
            "(a) raise restarts, (b) lower Stop.rtol of the equilibria, (c) take float64."
        )
    if found.asymmetry > _ASYMMETRY:
        troubles.append(f"the Hessian is not symmetric ({found.asymmetry:.1e}): lower Stop.rtol, and take exact gradients.")
    if failed:
        solves = " and ".join(f"{count} {phase}" for phase, count in failed.items())
        troubles.append(f"{solves} solves of equilibria did not converge.")
    if troubles:
        warnings.warn("hessian_spectrum: " + "\n".join(troubles), ConvergenceWarning, stacklevel=3)
