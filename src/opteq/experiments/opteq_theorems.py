"""Theorems 1-5, Lemmas 1-3 and Corollary 1 of "Optimization induced equilibrium networks", checked numerically.

An OptEq layer is f(z) = (alpha / mu) W' sigma(W z + U x + b) + (1 - alpha) z; the paper says which problem z = f(z) solves. Each
function below takes one claim, draws small random networks in float64, and compares the equilibrium that the library finds with
what the claim says: with random points, or with a solution by scipy that knows nothing of equilibria. `CLAIMS` has the words.

Two statements of the paper are checked in a corrected form:

- Theorem 4, prox form: z = f(prox_{gamma R}(z)) minimises phi plus the Moreau envelope of gamma R, not phi + gamma R.
- Theorem 4, several layers: Phi + R(z_L) is minimised for L = 1 only. For L > 1 the gradient form adds gamma grad R(z_0) to the
  first row of the inclusion, while the gradient of that sum would have it in the last.

Left to the tests are Lemma 11, the gradient of SAM's unrolling, and two misprints of Table 2, which `opteq.regularizers` mends:

- incay: z - gamma grad R(z) = (1 + 4 gamma / (|z|^2 + 2 eps)^2) z, with a plus for the printed minus;
- decorrelation: the gradient has I - Proj(z_i), not I + Proj(z_i).

Run `python -m opteq.experiments.opteq_theorems --preset small --out results`. Any computer will do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from opteq import Equilibrium
from opteq.batch import dot
from opteq.cells import DeepOptEq, OptEq, StackedOptEq, WideOptEq
from opteq.experiments._claims import Measured, at_least, at_most, claim
from opteq.experiments._harness import Options, Result, Series, command, gather
from opteq.experiments._random_networks import (
    Config,
    curve,
    distance,
    equilibrium,
    evaluate,
    feedforward,
    iterates,
    layer,
    layer_at_the_edge,
    least_excess,
    nonnegative_minimum,
    objective_along,
    per_size,
    randn,
    regularized_by_scipy,
    two_layers_by_scipy,
)
from opteq.experiments._theorems_figure import DRAWN, SHOWN, figure
from opteq.regularizers import L1, L2, Regularizer
from opteq.solvers import SAM, Anderson, Picard
from opteq.theory import from_feedforward, inclusion_residual, objective, recover_problem, unit_layers

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "Config", "figure", "main", "run"]

ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "theorem_1": "The equilibrium of a layer minimises phi, for every monotone activation; no step z <- f(z) raises phi.",
    "table_1": "A skip connection leaves the equilibrium where it is, for all alpha in (0, 1]; it minimises the envelope of phi.",
    "theorem_2": "The equilibrium of L layers solves the monotone inclusion 0 in dPhi(z~) + (I - P) z~, and no other point does.",
    "corollary_1": "The equilibrium of two layers minimises h_1(z_1) + h_2(z_0) + |z_1 - z_0|^2/2.",
    "theorem_3": "As all alpha_l tend to 0 in fixed ratios, the deep equilibrium tends to the wide one, as fast as alpha.",
    "theorem_4_gradient": "One layer after z - gamma grad R(z) minimises phi + gamma R.",
    "theorem_4_prox": "Corrected: one layer after prox_{gamma R} minimises phi + the envelope of gamma R, not phi + gamma R.",
    "theorem_4_layers": "Corrected: two layers after z - gamma grad R(z) solve their inclusion, but do not minimise Phi + gamma R.",
    "theorem_5": "Of many fixed points SAM finds the one of least R, as fast as k^-min(rho, c) or faster; z <- f(z) does not.",
    "lemma_1": "A feed-forward network is a chain of unit layers z -> W' sigma(W z + b): its outputs are the same.",
    "lemma_2": "A feed-forward network is a deep OptEq with a linear head: its outputs are the same.",
    "lemma_3": "The layers of a deep OptEq side by side have the equilibrium (z_1, ..., z_{L-1}, z_0).",
}

MONOTONE = ("relu", "leaky_relu", "tanh", "sigmoid", "softplus", "identity", "soft_threshold")
ROUNDING, SOLVED = 1e-12, 1e-9  # relative: of sums in float64, and of two solutions of one problem
ELSEWHERE = 1e-3  # relative: two points that differ by more than this are not the same

PRESETS = {
    "smoke": Config(),
    "small": Config(10, 32, 24, networks=10, samples=8, points=1000, steps=400, halvings=7, sam_steps=30_000),
    "paper": Config(50, 128, 96, networks=20, samples=32, points=2000, steps=1000, halvings=8, sam_steps=300_000),
}

# --- Theorem 1 and Table 1: one layer -------------------------------------------------------------------------------------------


def theorem_1(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """phi is least at z*, among points of the range of f, and z* is what scipy finds for the dual problem."""
    gaps, far, rises, errors = [], [], [], []
    for i in range(c.networks):
        for name in MONOTONE:
            cell, x = layer(c, draw, activation=name, mu=(1.0, 1.5)[i % 2]), randn(draw, c.samples, c.inputs)
            z = equilibrium(cell, x)
            least = objective(cell, x, z)
            gaps.append(least_excess(c, draw, partial(objective, cell), x, z))
            far.append(float((objective(cell, x, z + randn(draw, *z.shape)) - least).min()))
            path = objective_along(cell, x, 0 * z, Picard(), c.steps)
            rises.append(float((path.diff(dim=0) / least.abs().clamp_min(1)).max()))
            if name == "relu":  # its dual is a quadratic program: s >= 0, z = W's/mu
                Q, W = torch.eye(c.hidden, dtype=torch.float64) - cell.W @ cell.W.T / cell.mu, cell.W / cell.mu
                errors.append(distance(z, nonnegative_minimum(Q, cell.injection(x)) @ W))
    measured = {
        "least phi(v) - phi(z*) over random points": at_least(gaps, -ROUNDING),
        "the same at distance 1, so that the test can fail": at_least(far, 1e-6),
        "largest rise of phi along z <- f(z)": at_most(rises, ROUNDING),
        "ReLU: distance to scipy's solution of the dual": at_most(errors, SOLVED),
    }
    return measured, {"objective": descents(c, draw)}


def descents(c: Config, draw: torch.Generator) -> Series:
    """phi - phi(z*) after k evaluations of f, along two iterations from 0."""
    found = {}
    for name in DRAWN:
        cell, x = layer(c, draw, activation=name), randn(draw, c.samples, c.inputs)
        z = equilibrium(cell, x)
        for title, solver in {"plain": Picard(), "Anderson": Anderson()}.items():
            path = objective_along(cell, x, 0 * z, solver, SHOWN)
            found[f"{name}, {title}"] = curve(path - objective(cell, x, z), first=1)
    return found


def table_1(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """alpha f(z) + (1 - alpha) z has the equilibrium of f, which minimises alpha M_phi^{1-alpha}."""
    distances, gaps = [], []
    for i in range(c.networks):
        cell, x = layer(c, draw, activation=MONOTONE[i % len(MONOTONE)]), randn(draw, c.samples, c.inputs)
        z = equilibrium(cell, x)
        for alpha in (0.9, 0.5, 0.1, 0.01):
            cell.alpha = alpha
            distances.append(distance(equilibrium(cell, x), z))
            gaps.append(least_excess(c, draw, recover_problem(cell).value, x, z))
    return {
        "distance between the equilibria of alpha < 1 and alpha = 1": at_most(distances, SOLVED),
        "least excess of the envelope over random points": at_least(gaps, -ROUNDING),
    }, {}


# --- Theorem 2, Corollary 1 and Theorem 3: several layers -----------------------------------------------------------------------


def theorem_2(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """v + (I - P) z~ = 0 at the equilibrium, where v really is in dPhi(z~): it meets the inequality of subgradients."""
    residuals, elsewhere, slacks, series = [], [], [], {}
    for depth in c.depths:
        for i in range(c.networks):
            cells = [layer(c, draw, activation=MONOTONE[j % 3], alpha=(0.5, 1.0)[i % 2]) for j in range(depth)]
            deep, x = DeepOptEq(cells), randn(draw, c.samples, c.inputs)
            z = equilibrium(deep, x)
            residuals.append(float(per_size(inclusion_residual(deep, x, z), z).max()))
            elsewhere.append(float(per_size(inclusion_residual(deep, x, z + 0.1 * randn(draw, *z.shape)), z).min()))
            slacks += [
                subgradient_slack(c, draw, cell, x, before) for cell, before in zip(cells, deep.bind(x).path(z), strict=False)
            ]
            if i == 0:
                path = torch.stack(list(iterates(deep.bind(x), Picard(), 0 * z, SHOWN)))
                series[f"L = {depth}"] = curve(per_size(evaluate(partial(inclusion_residual, deep), x, path), z))
    return {
        "residual of the inclusion at equilibria": at_most(residuals, SOLVED),
        "the same 0.1 away, so that the test can fail": at_least(elsewhere, ELSEWHERE),
        "least slack of the inequality of subgradients": at_least(slacks, -ROUNDING),
    }, {"inclusion": series}


def subgradient_slack(c: Config, draw: torch.Generator, cell: OptEq, x: Tensor, before: Tensor) -> float:
    """The least h(w) - h(v) - <z_{l-1} - v, w - v> over random w, v = f_l(z_{l-1}) and h = alpha M_phi^{1-alpha} of the layer."""
    problem = recover_problem(cell)
    slope = before - problem.point(x, before)[0]

    def tilted(x: Tensor, y: Tensor) -> Tensor:
        return problem.value(x, y) - dot(slope.repeat(len(y) // len(slope), 1), problem.point(x, y)[0])

    return least_excess(c, draw, tilted, x, before)


def corollary_1(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """Two layers: no random point is lower, and scipy finds the same minimum at the same place."""
    gaps, values, places = [], [], []
    for i in range(c.networks):
        alpha = (1.0, 0.6, 0.1)[i % 3]
        first, second, x = layer(c, draw, alpha=alpha), layer(c, draw, alpha=alpha), randn(draw, c.samples, c.inputs)
        deep = DeepOptEq([first, second])
        z, problem = equilibrium(deep, x), recover_problem(deep)
        at = problem.preimage(x, z)
        value = problem.value(x, *at)
        gaps.append(least_excess(c, draw, problem.value, x, *at))
        z0, least = two_layers_by_scipy(first, second, x)
        places.append(distance(z, z0))
        values.append(float(((value - least).abs() / least.abs().clamp_min(1)).max()))
    return {
        "least excess of the objective over random points": at_least(gaps, -ROUNDING),
        "difference to the minimum by scipy": at_most(values, SOLVED),
        "distance to the minimiser by scipy": at_most(places, SOLVED),
    }, {}


def theorem_3(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """Halving every alpha_l halves the distance to the wide equilibrium, which minimises a function of its own."""
    alphas, ratios, gaps, series = [0.1 / 2**i for i in range(c.halvings + 1)], [], [], {}
    for title, weights in {"equal": (1.0, 1.0, 1.0), "unequal": (1.0, 0.5, 0.25)}.items():
        for name in ("relu", "tanh"):
            cells, x = [layer(c, draw, norm=0.9, activation=name) for _ in weights], randn(draw, c.samples, c.inputs)
            set_alphas(cells, weights, 1.0)
            wide = WideOptEq(cells)
            limit = equilibrium(wide, x)
            gaps.append(least_excess(c, draw, partial(objective, wide), x, limit))
            distances = []
            for alpha in alphas:
                set_alphas(cells, weights, alpha)
                distances.append(distance(equilibrium(DeepOptEq(cells), x), limit))
            ratios += [a / b for a, b in pairwise(distances)]
            series[f"{name}, {title}"] = {"alpha": alphas, "value": distances}
    return {
        "least ratio of distances when alpha is halved": at_least(ratios, 1.8),
        "least excess of the wide objective over random points": at_least(gaps, -ROUNDING),
    }, {"wide": series}


def set_alphas(cells: Sequence[OptEq], weights: Sequence[float], alpha: float) -> None:
    """alpha_l = weight_l alpha."""
    for cell, weight in zip(cells, weights, strict=True):
        cell.alpha = weight * alpha


# --- Theorem 4: regularised layers ----------------------------------------------------------------------------------------------


def theorem_4_gradient(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """z = f(z - gamma grad R(z)) with R = |z|^2/2."""
    errors, gaps, gamma = [], [], 0.8
    for _ in range(c.networks):
        cell, x = layer(c, draw), randn(draw, c.samples, c.inputs)
        deep = DeepOptEq([cell], regularizer=L2(), gamma=gamma)
        z = equilibrium(deep, x)
        errors.append(distance(z, regularized_by_scipy(cell, x, gamma)))
        gaps.append(excess(c, draw, deep, x, z))
    return {
        "distance to the minimiser of phi + gamma R by scipy": at_most(errors, SOLVED),
        "least excess of phi + gamma R over random points": at_least(gaps, -ROUNDING),
    }, {}


def excess(c: Config, draw: torch.Generator, deep: DeepOptEq, x: Tensor, z: Tensor) -> float:
    """By how much the recovered objective at the lowest random point exceeds that at the equilibrium."""
    problem = recover_problem(deep)
    return least_excess(c, draw, problem.value, x, *problem.preimage(x, z))


def theorem_4_prox(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """z = f(prox_{gamma R}(z)); for R = |z|^2/2 the envelope is gamma / (1 + gamma) |z|^2/2."""
    errors, wrong, gaps, gamma = [], [], [], 0.8
    for _ in range(c.networks):
        cell, x = layer(c, draw), randn(draw, c.samples, c.inputs)
        deep = DeepOptEq([cell], regularizer=L2(), mode="prox", gamma=gamma)
        z = equilibrium(deep, x)
        errors.append(distance(z, regularized_by_scipy(cell, x, gamma / (1 + gamma))))
        wrong.append(distance(z, regularized_by_scipy(cell, x, gamma)))
        sparse = DeepOptEq([cell], regularizer=L1(), mode="prox", gamma=gamma)
        gaps += [excess(c, draw, deep, x, z), excess(c, draw, sparse, x, equilibrium(sparse, x))]
    return {
        "distance to the minimiser of phi + envelope by scipy": at_most(errors, SOLVED),
        "distance to the minimiser of phi + gamma R by scipy": at_least(wrong, ELSEWHERE),
        "least excess of phi + envelope over random points, L2 and L1": at_least(gaps, -ROUNDING),
    }, {}


def theorem_4_layers(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """z_0 = f_2 o f_1 (z_0 - gamma grad R(z_0)) with R = |z|^2/2, against Corollary 1's objective + gamma R(z_0)."""
    residuals, wrong, gamma = [], [], 0.8
    for _ in range(c.networks):
        first, second, x = layer(c, draw), layer(c, draw), randn(draw, c.samples, c.inputs)
        deep = DeepOptEq([first, second], regularizer=L2(), gamma=gamma)
        z = equilibrium(deep, x)
        residuals.append(float(per_size(inclusion_residual(deep, x, z), z).max()))
        wrong.append(distance(z, two_layers_by_scipy(first, second, x, gamma)[0]))
    return {
        "residual of the inclusion at equilibria": at_most(residuals, SOLVED),
        "distance to the minimiser of Phi + gamma R by scipy": at_least(wrong, ELSEWHERE),
    }, {}


# --- Theorem 5: SAM -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToTarget(Regularizer):
    """R(z) = |z - target|^2/2: unlike |z|^2/2 it disagrees with SAM's decay of z to 0, so that all of the error is seen."""

    formula: ClassVar[str] = "|z - target|^2 / 2"
    latex: ClassVar[str] = r"\tfrac12 \|z - t\|^2"
    convex: ClassVar[bool] = True
    target: Tensor

    @property
    def smoothness(self) -> float | None:
        return 1.0

    def value(self, z: Tensor) -> Tensor:
        return (z - self.target).square().sum(1) / 2

    def gradient(self, z: Tensor) -> Tensor:
        return z - self.target


def theorem_5(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """The distance to the fixed point of least R, for three pairs (rho, c) and for the plain iteration."""
    cell, plane = layer_at_the_edge(c, draw)
    x, R = randn(draw, 1, c.inputs), ToTarget(randn(draw, c.features))
    fn, z0 = cell.bind(x), randn(draw, 1, c.features)
    least = nearest_fixed_point(cell, x, plane, R.target)
    counts = sorted({round(k) for k in np.geomspace(1, c.sam_steps, 50)})
    plain = selected(iterates(fn, Picard(), z0, c.sam_steps), counts)
    stays = [distance(z, least) for z in plain]
    series: Series = {}
    slopes, nearer, excesses = [], [], []
    for rho, power in ((0.5, 0.2), (0.3, 0.3), (0.2, 0.1)):
        path = selected(iterates(fn, SAM(R, rho=rho, c=power), z0, c.sam_steps), counts)
        errors = [distance(z, least) for z in path]
        slopes.append(late_slope(counts, errors) / -min(rho, power))
        nearer.append(errors[-1] / stays[-1])
        excesses.append(abs(float(R.value(path[-1]) - R.value(least))) / float(R.value(plain[-1]) - R.value(least)))
        series[f"rho = {rho:g}, c = {power:g}"] = {"rate": min(rho, power), "k": counts, "value": errors}
    series["plain"] = {"rate": 0.0, "k": counts, "value": stays}
    return {
        # a ratio, because -0.1 is too near to a slope of 0 for an absolute tolerance; above 1 is faster than the bound
        "slope of log error against log k, over -min(rho, c)": at_least(slopes, 0.85),
        "distance of SAM to z_R, the fixed point of least R, over that of the plain iteration": at_most(nearer, 0.5),
        "|R(SAM) - R(z_R)| / (R(plain iteration) - R(z_R)), rho and c as by default": at_most(excesses[0], 0.5),
        "distance of the plain iteration to z_R": at_least(stays[-1], 0.1),
        "residual of the plain iteration: it is at a fixed point": at_most(distance(fn(plain[-1]), plain[-1]), ROUNDING),
    }, {"sam": series}


def nearest_fixed_point(cell: OptEq, x: Tensor, plane: Tensor, target: Tensor) -> Tensor:
    """Of the fixed points of a linear layer, which are a plane with these directions, the one nearest to the target."""
    start, eye = torch.zeros_like(target)[None], torch.eye(len(target), dtype=torch.float64)
    some = cell.bind(x)(start) @ torch.linalg.pinv(eye - cell.W.T @ cell.W)
    nearest: Tensor = some + (target - some) @ plane @ plane.T
    return nearest


def selected(path: Iterator[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The z^k with k in counts; the others are not kept."""
    wanted = set(counts)
    return [z for k, z in enumerate(path) if k in wanted]


def late_slope(counts: Sequence[int], errors: Sequence[float]) -> float:
    """The slope of the logarithm of the error against log k, from a thirtieth of the last k on."""
    late = np.log([(k, error) for k, error in zip(counts, errors, strict=True) if k >= counts[-1] / 30])
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0])


# --- Lemmas 1 to 3: other forms of the same network -----------------------------------------------------------------------------


def lemma_1(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """The outputs of `unit_layers` against those of the network."""
    errors = []
    for _ in range(2 * c.networks):
        net, x = feedforward(c, draw), randn(draw, c.samples, c.inputs)
        errors.append(distance(unit_layers(net)(x), net(x)))
    return {"worst relative error of an output": at_most(errors, SOLVED)}, {}


def lemma_2(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """The outputs of `from_feedforward` against those of the network; one evaluation finds z, another confirms it."""
    errors, evals = [], []
    for _ in range(2 * c.networks):
        net, x = feedforward(c, draw), randn(draw, c.samples, c.inputs)
        deep = from_feedforward(net)
        errors.append(distance(deep(x), net(x)))
        assert isinstance(deep[0], Equilibrium)
        evals.append(deep[0].solve(x).evals)
    return {
        "worst relative error of an output": at_most(errors, SOLVED),
        "most evaluations of f": at_most(evals, 2),
    }, {}


def lemma_3(c: Config, draw: torch.Generator) -> tuple[Measured, Series]:
    """The stacked equilibrium against the path of the deep one, and against its equation with the large matrices written out."""
    distances, residuals, alpha = [], [], 0.7
    for depth in c.depths:
        cells, x = [layer(c, draw, activation="tanh", alpha=alpha) for _ in range(depth)], randn(draw, c.samples, c.inputs)
        deep, z = DeepOptEq(cells), equilibrium(StackedOptEq(cells), x)
        path = deep.bind(x).path(equilibrium(deep, x))
        distances.append(distance(z, torch.stack(path[1:], dim=1)))
        W, u = torch.block_diag(*(cell.W for cell in cells)), torch.cat([cell.injection(x) for cell in cells], dim=1)
        P = torch.eye(depth * c.features, dtype=torch.float64).roll(c.features, dims=0)
        shifted = z.flatten(1) @ P.T
        right = alpha * torch.tanh(shifted @ W.T + u) @ W + (1 - alpha) * shifted
        residuals.append(distance(right, z.flatten(1)))
    return {
        "distance between the stacked equilibrium and the path of the deep one": at_most(distances, SOLVED),
        "residual of the stacked equation, written out": at_most(residuals, SOLVED),
    }, {}


# --- all of them ----------------------------------------------------------------------------------------------------------------


CHECKS: dict[str, Callable[[Config, torch.Generator], tuple[Measured, Series]]] = {
    "theorem_1": theorem_1,
    "table_1": table_1,
    "theorem_2": theorem_2,
    "corollary_1": corollary_1,
    "theorem_3": theorem_3,
    "theorem_4_gradient": theorem_4_gradient,
    "theorem_4_prox": theorem_4_prox,
    "theorem_4_layers": theorem_4_layers,
    "theorem_5": theorem_5,
    "lemma_1": lemma_1,
    "lemma_2": lemma_2,
    "lemma_3": lemma_3,
}


def run(options: Options) -> Result:
    """What was measured for each claim, its threshold, and whether it shows the claim; and the series of the figure."""
    config, claims, seed = PRESETS[options.preset], {}, options.seed
    series: Series = {}
    with torch.no_grad():
        for i, (name, check) in enumerate(CHECKS.items()):
            draw = torch.Generator("cpu").manual_seed(1000 * seed + i)  # its own, so that a claim can be run alone
            measured, curves = check(config, draw)
            claims[name] = claim(CLAIMS[name], measured)
            series |= curves
    return gather("opteq_theorems", options, claims, series=series)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command("opteq_theorems", arguments)


if __name__ == "__main__":
    raise SystemExit(main())
