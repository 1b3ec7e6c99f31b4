"""What must hold of every solution, whatever the problem: checked in float64 by an f that is not the library's."""

import math
from dataclasses import dataclass

import numpy as np
import stress_networks  # noqa: F401 - adds its cells to `reference`
import torch
from stress_cases import Case, norm_of
from stress_reference import Rounded, alpha_of, reference
from torch import Tensor

from conformance import lengths
from opteq import Cell, Solution, Status
from opteq.cells import (
    AffineOptEq,
    DeepOptEq,
    FunctionCell,
    GaussianDEQ,
    Multiscale,
    MultivariateOptEq,
    Residual,
    ScaledReLU,
    StackedOptEq,
    WideOptEq,
)
from opteq.cells.monotone import MonotoneCell
from opteq.cells.optimization import OptEqCell


@dataclass(frozen=True)
class Truth:
    """Of each sample: |f(z) - z| and |f(z)| in float64, and how far rounding may take the library's f(z) from that one."""

    size: np.ndarray
    scale: np.ndarray
    margin: np.ndarray


def truth_of(cell: Cell, x: Tensor, z: Tensor) -> Truth:
    with torch.no_grad():
        at = Rounded.exact(z.flatten(1), z.dtype)
        value = reference(cell, x.nan_to_num(0.0, 0.0, 0.0), z.dtype)(at)
    return Truth(lengths(value.value - at.value), lengths(value.value), lengths(value.error))


@torch.no_grad()
def contraction(cell: Cell, size: tuple[int, int] = (1, 1)) -> float | None:
    """A Lipschitz constant of f in the Euclidean norm; None where there is no simple one."""
    if isinstance(cell, OptEqCell):
        alpha, spread = float(alpha_of(cell)), norm_of(cell, size) ** 2 / cell.mu
        steepest = cell.activation.lipschitz
        inner = float(torch.linalg.matrix_norm(cell.S.double(), 2)) if isinstance(cell, MultivariateOptEq) else steepest
        return alpha * inner * spread + 1 - alpha
    if isinstance(cell, DeepOptEq | StackedOptEq | WideOptEq):
        each = [contraction(layer, size) for layer in cell.layers]
        if isinstance(cell, DeepOptEq):
            return math.prod(each)  # T_R does not expand
        if isinstance(cell, StackedOptEq):
            return max(each)
        alphas = [float(alpha_of(layer)) for layer in cell.layers]
        return sum(a * (c - 1 + a) / a for a, c in zip(alphas, each, strict=True)) / sum(alphas)  # those of the plain layers
    if isinstance(cell, AffineOptEq):
        return contraction(cell.cell) if cell.orthogonal else None
    if isinstance(cell, MonotoneCell | Residual | Multiscale):
        return None
    W = {GaussianDEQ: lambda: cell.W, ScaledReLU: lambda: cell.gamma * cell.A, FunctionCell: lambda: cell.f.W}[type(cell)]()
    return float(torch.linalg.matrix_norm(W.double(), 2)) if len(W) < 500 else None


def check_solution(case: Case, found: Solution) -> Truth:
    """No NaN, no unflagged wrong answer, and residuals that are those of the z that is returned."""
    z, stop, eps = found.z.detach(), found.stop, torch.finfo(case.dtype).eps
    assert z.isfinite().all(), "z is not finite"
    assert z.dtype == case.dtype
    assert found.converged.tolist() == [status is Status.CONVERGED for status in found.statuses]
    truth = truth_of(case.cell, case.x.detach(), z)
    reported, converged = found.residual.detach().double().numpy(), found.converged.numpy()
    unsound = np.array([status is Status.NONFINITE for status in found.statuses])
    assert unsound[sorted(case.bad)].all(), "a sample with NaN or infinity in x has another status"
    summed = (z[0].numel() + 10) * eps  # of the norms
    allowed = (stop.atol + stop.rtol * truth.scale) * (1 + summed) + truth.margin * (1 + stop.rtol)
    wrong = converged & ~(truth.size <= allowed)
    assert not wrong.any(), f"CONVERGED, but |f(z) - z| = {truth.size[wrong]}, allowed {allowed[wrong]}"
    assert not np.isnan(reported[~unsound]).any(), f"residual {reported}, {found.statuses}"
    known = np.isfinite(reported)
    assert (truth.scale <= truth.margin)[~unsound & ~known].all(), "the residual is infinite where f(z) is not 0"
    told, size, scale, margin = (part[known] for part in (reported, truth.size, truth.scale, truth.margin))
    odd = ~(np.abs(told * scale - size) <= (margin + summed * scale) * (1 + told) + summed * size)
    assert not odd.any(), f"residual {told[odd]}, but |f(z) - z| = {size[odd]} and |f(z)| = {scale[odd]}"
    return truth


def check_easy(case: Case, found: Solution, truth: Truth, rate: float | None) -> bool:
    """Contractions with a factor of 0.9 or less are solved, by methods made for them, in 200 steps; whether this is one."""
    fast = type(case.solver).__name__ in ("NoneType", "Anderson", "Newton")
    enough = case.stop.max_steps >= 200 and case.stop.rtol >= 1e-6
    if rate is None or rate > 0.9 or not fast or not enough or (not case.direct and type(case.gradient).__name__ == "Unrolled"):
        return False
    possible = truth.margin <= 0.01 * case.stop.rtol * truth.scale  # rounding allows it
    possible[sorted(case.bad)] = False
    assert found.converged.numpy()[possible].all(), f"an easy problem, but {found.statuses}, residual {found.residual.tolist()}"
    return True


def check_alone(case: Case, found: Solution, truth: Truth, rate: float) -> None:
    """|z - z*| <= |f(z) - z| / (1 - rate), so that two solutions of a sample are no further apart than both bounds."""
    row = case.seed % len(case.x)
    if row in case.bad:
        return
    alone = case.run([row])
    other = truth_of(case.cell, case.x.detach()[[row]], alone.z.detach())
    bound = (truth.size[row] + truth.margin[row] + other.size[0] + other.margin[0]) / (1 - rate)
    apart = lengths(found.z.detach()[[row]].double() - alone.z.detach().double())[0]
    assert apart <= bound * (1 + 1e-6), f"sample {row} alone is {apart} from itself among others, and should be within {bound}"
