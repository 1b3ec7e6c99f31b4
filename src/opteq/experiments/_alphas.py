"""The trainings of Tables 3 and 5 of "Optimization induced equilibrium networks": deep OptEq over alpha and the regularisers R.

The network is f_L o ... o f_1, f_l(z) = alpha W_l' relu(W_l z + U_l x + b_l) + (1 - alpha) z, with x = W_0 * x_0 a convolution of
the image, K steps unrolled and a linear map of pooled z. R enters in two ways. The paper's star is Section 5.1: T_R, a step of R,
begins f. Its dagger is Section 5.2: SAM, whose step is a mean of f(z) and z - gamma (grad R(z) + lambda_k z). Nothing is added to
the loss.

The tables have rows in common, so their cells lie in one folder, that of `GRID`: what one of them has trained, the other finds. So
run them one after the other: at the same time they would train in the same run folders.

What the paper does not print, and what is taken here. No normalisation is in its equations, so there is none. That decides the
effect of alpha: first trials with a batch norm behind the extractor and one before the pooling showed none (36.9%, 36.5% and 36.5%
at 0.01, 0.1 and 0.8, one seed), those without it did; a row of its own has the norms, so that the page shows both. gamma is 0.1,
and for SAM with L2 that of Theorem 5, 1/2. z begins at 0 (Algorithm 1: at x). Momentum is 0.9. SAM's schedule has rho = 0.5, c =
0.2. lambda |z|_1 and lambda |z|^2 enter by their prox with gamma = 1. HSIC compares the maps of channels, with the median rule;
decorrelation takes the channels as features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from opteq.cells.deep import Mode as Step
from opteq.experiments import _training
from opteq.experiments._claims import gain, mean_error
from opteq.experiments._harness import Options, grid
from opteq.grids import Outcome
from opteq.models.parts import NormKind
from opteq.recipes import Data, Deep, FeedForward, Recipe, load_model
from opteq.recipes.kinds import RegularizerName
from opteq.training import TrainConfig
from opteq.training.config import Mode, Schedule

__all__ = [
    "GRID",
    "HIGH",
    "LAMBDAS",
    "LOW",
    "NOTES",
    "PRESETS",
    "ROWS",
    "Config",
    "Plan",
    "Row",
    "Scores",
    "by_seed",
    "cell_name",
    "penalised",
    "pooled",
    "recipe",
    "relative",
    "spread",
    "train",
    "trained",
    "with_error",
]

GRID = "opteq_alphas"
# for each row, how z is regularised (None: DNN), and its alphas
Plan: TypeAlias = Mapping[str, tuple["Row | None", Sequence[float]]]
LAMBDAS: dict[RegularizerName, tuple[float, ...]] = {"l1": (0.01, 0.15, 0.5), "l2": (0.01, 1.0, 10.0)}
LOW, HIGH = "0.01", "0.8"  # the alphas at which `small` trains each regulariser
NOTES = (
    "Gains are differences between trainings of the same seed, in standard errors of their mean: they must reach 2.",
    "Trainings that both Table 3 and Table 5 have are the same ones.",
    "No norm stands around the equilibrium, as in the paper's equations; first trials with batch norms showed no effect of alpha.",
)

# by row and by alpha: one number a seed, None where the training failed
Scores: TypeAlias = dict[str, dict[str, list[float | None]]]


@dataclass(frozen=True)
class Config:
    """The sizes of both tables. Of the rows with a regulariser only the alphas in `regularised` are trained."""

    data: str = "cifar10"
    samples: int | None = 16_000
    tests: int | None = 2000
    verify: bool = False
    seeds: int = 3
    alphas: tuple[float, ...] = (0.01, 0.1, 0.4, 0.8, 1.0)
    regularised: tuple[float, ...] = (0.01, 0.8)
    penalised: float = 0.1  # the alpha at which lambda is varied
    unroll: int = 20
    channels: int = 29
    hidden: tuple[int, ...] = (16, 32, 64, 128, 128)
    stride: int = 8
    pool: int = 2
    parameters: int = 202_363  # what the sizes above come to, and the DNN must not exceed
    epochs: int = 1
    batch_size: int = 40
    lr: float = 0.1
    schedule: Schedule = "onecycle"
    clip: float | None = 1.0
    crop: int = 0


PRESETS = {
    "smoke": Config(
        "digits", samples=48, tests=24, seeds=1, unroll=2, channels=4, hidden=(4, 6), stride=2, pool=1, parameters=848,
        batch_size=24,
    ),
    "small": Config(),
    "paper": Config(
        samples=None, tests=None, verify=True, regularised=(0.01, 0.1, 0.4, 0.8, 1.0), penalised=0.4, stride=2, pool=4,
        parameters=198_535, epochs=200, batch_size=125, schedule="step", clip=None, crop=4,
    ),
}  # fmt: skip


# --- the trainings --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """How z is regularised: R, and whether SAM ("sam", the dagger) or T_R, by a step of size gamma (the star), brings it in."""

    regularizer: RegularizerName = "none"
    mode: Mode = "unrolled"
    step: Step = "gradient"
    gamma: float = 0.1
    norm: NormKind | None = None


ROWS = {
    "no R": Row(),
    "no R, batch norm": Row(norm="batch"),
    "L2, dagger": Row("l2", "sam"),
    "incay, dagger": Row("incay", "sam"),
    "incay, star": Row("incay"),
    "decorrelation, dagger": Row("decorrelation", "sam"),
    "decorrelation, star": Row("decorrelation"),
    "HSIC, dagger": Row("hsic", "sam"),
    "HSIC, star": Row("hsic"),
}


def penalised(name: RegularizerName, weight: float) -> Row:
    """R = weight |z|_1, with the prox of |z|_1, or R = weight |z|^2, with z / (1 + 2 weight)."""
    return Row(name, step="prox", gamma=weight if name == "l1" else 2 * weight)


def recipe(config: Config, row: Row | None, alpha: float, seed: int, root: str | None) -> Recipe:
    """One training; without a row, that of the DNN of the same size."""
    model: Deep | FeedForward
    if row is None:
        model = FeedForward(
            channels=config.channels, hidden=config.hidden, stride=config.stride, pool=config.pool, norm=None,
            parameters=config.parameters,
        )  # fmt: skip
    else:
        model = Deep(
            channels=config.channels, hidden=config.hidden, stride=config.stride, pool=config.pool, norm=row.norm, alpha=alpha,
            constrained=False, regularizer=row.regularizer, regularizer_mode=row.step, gamma=row.gamma,
        )  # fmt: skip
    training = TrainConfig(
        epochs=config.epochs, batch_size=config.batch_size, optimizer="sgd", lr=config.lr, weight_decay=6e-4,
        schedule=config.schedule, mode="own" if row is None else row.mode, unroll=config.unroll, clip=config.clip, crop=config.crop,
        flip=config.data != "digits", drop_last=True, seed=seed, least_converged=0.0, norms="off", keep=1,
    )  # fmt: skip
    data = Data(config.data, root, limit=config.samples, test_limit=config.tests, verify=config.verify)
    return Recipe(data, model, training)


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Accuracy on the test data, in %, parameters and, with "norms" in the settings, the mean of |z| and z^2 there."""
    found = _training.train(settings)
    if "diverged" in found:
        return {"diverged": found["diverged"]}
    kept = {"accuracy": 100 * found["valid_accuracy"], "parameters": found["parameters"]}
    return kept | (norms(Path(settings["folder"])) if settings["norms"] else {})


@torch.no_grad()
def norms(folder: Path) -> dict[str, float]:
    """The mean of |z| and of z^2 over the features of (at most) 500 test images, of the network that was trained there."""
    model, dataset = load_model(folder)
    images = dataset.test.x[torch.arange(min(500, len(dataset.test)))]
    z: torch.Tensor = model.states(images.to(next(model.parameters())))  # type: ignore[operator]
    return {"l1": float(z.abs().mean()), "l2": float(z.square().mean())}


def trained(plan: Plan, config: Config, options: Options) -> dict[str, Outcome]:
    """The trainings of a plan, by the names of their cells."""
    recipes, norms = {}, {}
    for (name, (row, alphas)), seed in product(plan.items(), range(options.seed, options.seed + config.seeds)):
        for alpha in alphas:
            cell = cell_name(name, alpha, seed)
            recipes[cell] = recipe(config, row, alpha, seed, options.root)
            norms[cell] = alpha == config.penalised and row is not None and (row == Row() or row.step == "prox")
    cells = _training.cells(GRID, recipes, options)
    return grid(GRID, train, {cell: {**settings, "norms": norms[cell]} for cell, settings in cells.items()}, options)


def cell_name(row: str, alpha: float, seed: int) -> str:
    """Also the name of its file, so without blanks."""
    return f"{row.replace(', ', '-').replace(' ', '-')}-alpha{alpha:g}-seed{seed}"


# --- what they show -------------------------------------------------------------------------------------------------------------


def by_seed(plan: Plan, outcomes: Mapping[str, Outcome], options: Options, what: str) -> Scores:
    """Of each row at each of its alphas, by seed: what was measured, None where the training failed or diverged."""
    seeds = range(options.seed, options.seed + PRESETS[options.preset].seeds)

    def value(row: str, alpha: float, seed: int) -> float | None:
        return (outcomes[cell_name(row, alpha, seed)].result or {}).get(what)

    return {
        row: {f"{alpha:g}": [value(row, alpha, seed) for seed in seeds] for alpha in alphas} for row, (_, alphas) in plan.items()
    }


def relative(scores: Scores, name: str) -> float:
    """|change of the accuracy by R at alpha = 0.8| / |change at alpha = 0.01|, of a row."""
    low, high = (abs(gain(scores[name][alpha], scores["no R"][alpha])[0]) for alpha in (LOW, HIGH))
    return high / low if low else float("nan")


def pooled(scores: Scores, rows: Sequence[str], alphas: Sequence[str]) -> list[float | None]:
    """The mean of several rows at several alphas, seed by seed."""
    seeds = zip(*(scores[row][alpha] for row in rows for alpha in alphas), strict=True)
    return [None if None in seed else float(np.mean(np.array(seed, dtype=float))) for seed in seeds]


def spread(values: Sequence[float | None] | None) -> str | None:
    """The mean and its standard error, for a table; None where nothing was run."""
    return None if values is None else with_error(*mean_error(values))


def with_error(mean: float, error: float, sign: str = "") -> str:
    """A number with its standard error, if there is one."""
    text = "failed" if np.isnan(mean) else f"{mean:{sign}.1f}"
    return text if np.isnan(error) else f"{text} ± {error:.1f}"
