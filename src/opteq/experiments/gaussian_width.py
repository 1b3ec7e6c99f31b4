"""Figure 1 of "Global convergence of over-parameterized deep equilibrium models": the width m of a Gaussian-initialised DEQ.

The network is y = a'z, z = relu(W z + U x), with W ~ N(0, 2 sigma_w^2 / m), U ~ N(0, 2 / d), a ~ N(0, 1 / m), sigma_w^2 = 0.08, all
three trained by gradient descent on |y^ - y|^2 / 2. The data are n = 1000 samples of norm sqrt(d): points of a sphere with labels
from N(0, 1), d = 1000, and 500 + 500 images of the classes 0 and 1 of MNIST and of CIFAR-10, as they are. The paper says (Section
5) that with m the convergence becomes faster and the final training loss smaller, which it puts down to Gram matrices Z'Z that
are more stable, and that ||W|| < 1 throughout. It prints no numbers.

Widths, step, number of steps and the numbers that stand for the two classes are not in its text. Here they are -1 and 1, and every
width gets the same step, 1 / lambda_max(H), with H the tangent kernel that theory gives for the widest network
(`theory.tangent_limit`): descent is stable below 2 / lambda_max(H). The bound (10) of the paper's Theorem 1 is of no use: its
conditions hold for no width with this a.

H is about m times its limit, but for the part of U, which no width changes: with one step for all, a wider network descends faster
by its parametrisation alone. The table tells how much of the fall that is: beside what was measured, it has what descent with H
fixed at its limit, e <- (I - step H) e, makes of the same error e at the start.

The gradients are those of Lemma 2: dL/dW = sum_i e_i r_i z_i', dL/dU = sum_i e_i r_i x_i', with e = y^ - y and the adjoint
equilibrium r_i = D_i (W'r_i + a), which changes as little from step to step as z_i does: both are begun where they ended.

Run `python -m opteq.experiments.gaussian_width --preset small --data-dir DATA`. Each data set at each width with each seed is one
cell of a grid. `small` has the paper's data in full, and four widths. The loss depends on the draw of a more than on the width,
where widths are near: there are several seeds, of data and weights, fewer of the widest network, and two widths are compared on the
seeds of both. A first run had one seed only, with which MNIST ends at 52.2 for m = 250 and at 55.4 for m = 500: hence the seeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from opteq import Stop, data, solve
from opteq.cells import GaussianDEQ
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments._claims import Measured, at_most, curve, judged, mean_error
from opteq.experiments._descent import half_square, spectral_norm
from opteq.experiments._harness import Options, Result, Series, command, found, gather, grid, table
from opteq.models import Readout
from opteq.products import product
from opteq.solvers import Picard
from opteq.theory import tangent_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "WHY", "Config", "figure", "main", "predict", "run", "train"]

NAME = "gaussian_width"
ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "speed": "The wider the network, the sooner it is at the loss that halves, in logarithms, the fall of the next narrower one.",
    "loss": "The wider the network, the lower the training loss at the end.",
    "norm": "||W|| < 1 throughout training, so that the equilibrium exists and is unique.",
    "gram": "The wider the network, the less its Gram matrix G = Z'Z changes in training: |G(end) - G(0)|_F / |G(0)|_F.",
}


@dataclass(frozen=True)
class Config:
    """The sizes. Data sets but the sphere must be there."""

    data: tuple[str, ...] = ("sphere", "mnist", "cifar10")
    widths: tuple[int, ...] = (250, 500, 1000, 2000)
    seeds: tuple[int, ...] = (5, 5, 5, 3)  # at each width
    samples: int = 1000
    dimension: int = 1000  # of the sphere
    targets: tuple[float, float] = (-1.0, 1.0)
    sigma_w2: float = 0.08
    steps: int = 300
    every: int = 10  # steps from one measurement to the next
    rtol: float = 1e-4  # of z, and ten times that of r: with 1e-5 and 1e-4 no curve changes by what can be seen


WHY = {
    "speed": "It is so on the sphere and on MNIST. On CIFAR-10 it is for m = 500 and 1000 alone: the draw of the weights decides "
    "more than the width there. Among the five seeds at m = 250 the loss at the start is between 723 and 1727, and how soon a "
    "wider network is at a level depends on where it starts.",
    "gram": "It is so on the sphere and on MNIST. On CIFAR-10 the change is the same at m = 250 and 500, and at 1000 and 2000, to "
    "within 3% on the seeds of both, where it varies threefold among the seeds of one width: 0.0115 to 0.0376 at m = 250.",
}
PRESETS = {
    "smoke": Config(("sphere", "digits"), widths=(30, 60, 120), seeds=(2, 2, 1), samples=60, dimension=40, steps=40, every=5),
    "small": Config(),
    "paper": Config(widths=(500, 1000, 2000, 4000, 8000), seeds=(5, 5, 5, 5, 5), steps=2000, every=20),
}

# --- one cell -------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Loss and ||W|| of one network on one data set after k = 0, every, 2 every, ... steps, the step, and how much G changes."""
    x, y = samples(settings)
    cell, a = network(settings, x.shape[1])
    step = step_size(x, settings)
    curves: dict[str, list[float]] = {"k": [], "loss": [], "norm": []}
    stop, zero = Stop(rtol=settings["rtol"]), x.new_zeros(len(x), settings["width"])
    z, r = equilibria(cell, a, x, zero, zero, stop)
    first = product(z, z.T)
    for k in range(settings["steps"] + 1):
        error = z @ a - y
        if k % settings["every"] == 0 or k == settings["steps"]:
            for name, value in zip(curves, (k, half_square(error), spectral_norm(cell.W)), strict=True):
                curves[name].append(value)
        if k < settings["steps"]:
            descend(cell, a, x, z, r, error, step)
            z, r = equilibria(cell, a, x, z, r, stop)
    drift = float(torch.linalg.vector_norm(product(z, z.T) - first) / torch.linalg.vector_norm(first))
    return {"curves": curves, "step": step, "drift": drift}


@torch.no_grad()
def predict(settings: dict[str, Any]) -> dict[str, Any]:
    """L(end) / L(0) of the same network on the same data, were its tangent kernel the limit throughout."""
    x, y = samples(settings)
    cell, a = network(settings, x.shape[1])
    zero = x.new_zeros(len(x), settings["width"])
    z = solve(cell.bind(x), zero, Picard(), Stop(rtol=settings["rtol"])).raise_if_failed().z
    H = settings["width"] * tangent_limit(x.double(), settings["sigma_w2"], width=settings["width"])
    rates, directions = torch.linalg.eigh(H)
    error = directions.T @ (z @ a - y).double()
    left = (1 - step_size(x, settings) * rates) ** settings["steps"] * error
    return {"limit": half_square(left) / half_square(error)}


def step_size(x: Tensor, settings: Mapping[str, Any]) -> float:
    """1 / lambda_max(H), H as theory gives it for the widest network."""
    widest: int = settings["widest"]
    largest = float(torch.linalg.eigvalsh(tangent_limit(x, settings["sigma_w2"], width=widest))[-1])
    return 1 / largest / widest


def samples(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The training data: x [n, d] of norm sqrt(d), y [n]."""
    count, seed = settings["samples"], settings["seed"]
    if settings["data"] == "sphere":
        whole = data.sphere(count, settings["dimension"], seed=seed)
    else:
        whole = data.load(settings["data"], settings["root"])
    chosen = data.theory_split(
        whole, train=count, test=2, norm="sqrt_d", size=None, targets=tuple(settings["targets"]), seed=seed, dtype=torch.float32
    )
    return chosen.train.x[:], chosen.train.y


def network(settings: Mapping[str, Any], inputs: int) -> tuple[GaussianDEQ, Tensor]:
    """W and U in their cell, and a, as Assumption 1 draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings["seed"])
        cell = GaussianDEQ(inputs, settings["width"], sigma_w2=settings["sigma_w2"])
        return cell, Readout(cell).a


def equilibria(cell: GaussianDEQ, a: Tensor, x: Tensor, z: Tensor, r: Tensor, stop: Stop) -> tuple[Tensor, Tensor]:
    """z = relu(W z + U x) and r = D (W'r + a), D = diag(z > 0), as rows, from those of the step before."""
    z = solve(cell.bind(x), z, Picard(), stop).raise_if_failed().z
    active, adjoint = z > 0, replace(stop, rtol=10 * stop.rtol)  # an error of r changes the loss less than one of z
    r = solve(lambda r: product(r, cell.W).add_(a).mul_(active), r, Picard(), adjoint).raise_if_failed().z
    return z, r


def descend(cell: GaussianDEQ, a: Tensor, x: Tensor, z: Tensor, r: Tensor, error: Tensor, step: float) -> None:
    """theta <- theta - step grad L, by Lemma 2."""
    pull = (error[:, None] * r).T
    cell.W.sub_(product(pull, z), alpha=step)
    cell.U.sub_(product(pull, x), alpha=step)
    a.addmv_(z.T, error, alpha=-step)


# --- the grid and its claims ----------------------------------------------------------------------------------------------------


def run(options: Options) -> Result:
    """What was measured for each claim; and the curves of every data set, width and seed."""
    config = PRESETS[options.preset]
    files = [name for name in config.data if name != "sphere"]
    found(files, len(files), options.data_dir)
    places = [
        (name, width, options.seed + i)
        for name in config.data
        for width, seeds in zip(config.widths, config.seeds, strict=True)
        for i in range(seeds)
    ]
    cells = {f"{name}-m{width}-seed{seed}": settings(config, name, width, seed, options) for name, width, seed in places}
    outcomes = grid(NAME, train, cells, options)
    limits = grid(NAME, predict, {f"limit-{cell}": one for cell, one in cells.items()}, options)
    series: Series = {name: {f"m = {width}": [] for width in config.widths} for name in config.data}
    for (name, width, _), outcome, limit in zip(places, outcomes.values(), limits.values(), strict=True):
        series[name][f"m = {width}"].append(outcome.result and outcome.result | (limit.result or {"limit": None}))
    claims = judged(CLAIMS, {name: judge(name, series) for name in CLAIMS})
    tables = {"At the end: means over the seeds": summary(series)}
    return gather(NAME, options, claims, outcomes=outcomes | limits, tables=tables, series=series, notes=notes(config))


def notes(config: Config) -> list[str]:
    """What a reader must know of the step and of the seeds."""
    step = (
        "All widths have the same step, and H grows with m: that a wider network is faster is in part due to the parametrisation "
        "alone, and the table has how much the loss would fall with H fixed at its limit."
    )
    seeds = [
        f"There is one seed at m = {width}: how it compares with the next narrower network has no error estimate."
        for width, count in zip(config.widths, config.seeds, strict=True)
        if count == 1
    ]
    return [step, *seeds]


def settings(config: Config, name: str, width: int, seed: int, options: Options) -> dict[str, Any]:
    """What `train` must know."""
    shared = ("samples", "dimension", "targets", "sigma_w2", "steps", "every", "rtol")
    own = {"data": name, "root": options.root, "width": width, "widest": max(config.widths), "seed": seed}
    return own | {key: getattr(config, key) for key in shared}


def judge(name: str, series: Series) -> Measured:
    """What one claim says of each data set; a cell that failed shows nothing."""
    measured: Measured = {}
    for dataset, by_width in series.items():
        if name == "norm":
            norms = [value for cells in by_width.values() for cell in cells for value in curve(cell, "norm")]
            measured[f"{dataset}: largest ||W||"] = at_most(norms, 1.0)
        else:
            text, ratio = COMPARED[name]
            pairs = pairwise(by_width.values())
            ratios = [ratio(narrow[: len(wide)], wide[: len(narrow)]) for narrow, wide in pairs]  # on the seeds of both
            measured[f"{dataset}: {text} the next narrower network, the largest"] = at_most(ratios, 1.0)
    return measured


Cells: TypeAlias = Sequence[dict[str, Any] | None]  # of one width, by seed


def mean_loss(cells: Cells) -> list[float]:
    """The mean over the seeds of the loss, after each measurement; NaN if one failed."""
    curves = [curve(cell, "loss") for cell in cells]
    same = all(len(one) == len(curves[0]) for one in curves)
    return [float(value) for value in np.mean(curves, axis=0)] if same else [float("nan")]


def drift(cells: Cells) -> float:
    """The mean over the seeds of how much the Gram matrix changed."""
    return float(np.mean([float("nan") if cell is None else cell["drift"] for cell in cells]))


def steps_to(level: float, losses: Sequence[float]) -> float:
    """After how many measurements the loss first comes down to the level; NaN if it never does."""
    for i, loss in enumerate(losses):
        if loss <= level:
            part = slice(max(0, i - 1), i + 1)  # in between, the logarithm of the loss is a line
            return float(np.interp(-np.log(level), -np.log(losses[part]), np.arange(len(losses))[part]))
    return float("nan")


def haste(narrow: Cells, wide: Cells) -> float:
    """The steps of the wide network to the geometric mean of the narrow one's first and last loss, over those of the narrow one."""
    losses = mean_loss(narrow)
    level = math.sqrt(losses[0] * losses[-1])
    return steps_to(level, mean_loss(wide)) / (steps_to(level, losses) or float("nan"))


COMPARED: dict[str, tuple[str, Callable[[Cells, Cells], float]]] = {
    "speed": ("steps to the middle of the fall, over those of", haste),
    "loss": ("last loss over that of", lambda narrow, wide: mean_loss(wide)[-1] / mean_loss(narrow)[-1]),
    "gram": ("change of G over that of", lambda narrow, wide: drift(wide) / drift(narrow)),
}


def summary(series: Series) -> dict[str, Any]:
    """The table of the page: a row for each data set and width."""
    columns = [
        "", "seeds", "training loss", "standard error", "L(end) / L(0)", "L(end) / L(0), H fixed at its limit", "largest ||W||",
        "change of G",
    ]  # fmt: skip
    return table(columns, [row(f"{data}, {label}", cells) for data, widths in series.items() for label, cells in widths.items()])


def row(title: str, cells: Cells) -> list[Any]:
    """One width on one data set; NaN where a seed failed."""
    losses = [curve(cell, "loss") for cell in cells]
    falls = [one[-1] / one[0] for one in losses], [None if cell is None else cell["limit"] for cell in cells]
    largest = float(np.max([np.max(curve(cell, "norm")) for cell in cells]))
    means = [mean_error(fall)[0] for fall in falls]
    return [title, len(cells), *mean_error([one[-1] for one in losses]), *means, largest, drift(cells)]


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """Training loss and ||W|| against the step: a column for each data set, a colour for each width."""
    series = result["series"]
    with new_figure((6.5, 4.2)) as page:
        panels = page.subplots(2, len(series), squeeze=False, sharex=True, sharey="row")
        for (top, bottom), (dataset, by_width) in zip(panels.T, series.items(), strict=True):
            draw(top, by_width, "loss")
            draw(bottom, by_width, "norm")
            bottom.axhline(1, color="grey", linestyle=":")
            top.set(yscale="log", title=dataset)
            bottom.set(xlabel="step $k$")
        panels[0, 0].set(ylabel="training loss")
        panels[1, 0].set(ylabel=r"$\|W(k)\|$", ylim=(None, 1.03))
        page.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    return page


def draw(axes: "Axes", by_width: Series, name: str) -> None:
    """One quantity of each width against the step, a line for each seed."""
    for colour, (label, cells) in zip(COLOURS, by_width.items(), strict=False):
        for i, cell in enumerate(cells):
            axes.plot(curve(cell, "k"), curve(cell, name), color=colour, linewidth=0.9, label=f"${label}$" if i == 0 else None)
    axes.grid(visible=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
