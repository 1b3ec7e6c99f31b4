"""Figures 1 and 4 of "Gradient descent optimizes infinite-depth ReLU implicit networks with linear widths": the width m.

The network is y = b'z, z = relu(gamma z A + relu(x W)), with gamma = 0.1, trained by gradient descent on |y^ - y|^2 / 2 with the
step 1e-3 = 1/N, from A = I, b = 0 and W ~ N(0, 1/m) (`Readout` calls the paper's b `a`). The data: 500 + 500 images of the classes
0 and 1 for training, as many for testing, grey, 28 x 28 pixels, of norm 1. The paper says (Section 7.1) that as m grows the
training loss falls faster and the test loss ends lower, and that gamma ||A(k)|| stays approximately gamma. It prints no numbers;
the widths are not in its text, nor how near is near (here: within half of gamma), nor which numbers stand for the classes. Here
they are 0 and 1: with -1 and 1, twice as far apart, the step 1e-3 is too large for CIFAR-10 and SVHN: the loss goes up and down.

Run `python -m opteq.experiments.scaledrelu_width --preset small --data-dir DATA`. Each data set at each width is one cell of a
grid. `small` takes MNIST and those of the other data sets that are found; `paper` wants all four.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import opteq
from opteq import Stop, data
from opteq.cells import ScaledReLU
from opteq.experiments._harness import (
    COLOURS,
    STYLE,
    Measured,
    Options,
    Result,
    Series,
    at_least,
    at_most,
    claim,
    command,
    grid,
)
from opteq.grids import Outcome
from opteq.models import Readout

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "Config", "figure", "main", "run", "train"]

ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "training_loss": "The wider the network, the lower the training loss at the end: the median of the last tenth of the run.",
    "test_loss": "The wider the network, the lower the test loss at the end, taken likewise.",
    "norm": "gamma ||A|| stays near gamma throughout training, and so below 1, where the equilibrium exists and is unique.",
}
NEAR = 0.5  # relative: how far gamma ||A|| may be from gamma


@dataclass(frozen=True)
class Config:
    """The sizes. The first `required` of the data sets must be there; of the others, those that are found are taken."""

    data: tuple[str, ...] = ("mnist", "fashion-mnist", "cifar10", "svhn")
    required: int = 1
    widths: tuple[int, ...] = (10, 100, 1000)
    samples: int = 1000  # for training, and as many for testing
    tests: int = 1000
    targets: tuple[float, float] = (0.0, 1.0)
    gamma: float = 0.1
    step: float = 1e-3
    steps: int = 500
    every: int = 10  # steps from one measurement to the next
    verify: bool = False  # a subset of a data set will do


PRESETS = {
    "smoke": Config(("digits",), widths=(2, 8, 64), samples=200, tests=60, steps=40),
    "small": Config(),
    "paper": Config(required=4, widths=(100, 300, 1000, 3000), verify=True),
}

# --- one cell -------------------------------------------------------------------------------------------------------------------


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Training loss, test loss and gamma ||A|| of one network on one data set, after k = 0, every, 2 every, ..., steps steps."""
    whole = data.load(settings["data"], settings["root"], verify=settings["verify"])
    (x, y), held_out = data.theory_split(
        whole,
        train=settings["samples"],
        test=settings["tests"],
        targets=tuple(settings["targets"]),
        seed=settings["seed"],
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings["seed"])
        cell = ScaledReLU(x.shape[1], settings["width"], gamma=settings["gamma"])
        model = Readout(cell, stop=Stop(rtol=1e-6, atol=1e-6), on_failure="raise")
    descent = torch.optim.SGD(model.parameters(), lr=settings["step"])
    curves: dict[str, list[float]] = {"k": [], "train": [], "test": [], "norm": []}
    z = None
    for k in range(settings["steps"] + 1):
        solution = model.solve(x, z)
        loss = half_square(solution.z @ model.a - y)
        if k % settings["every"] == 0 or k == settings["steps"]:
            for name, value in zip(curves, (k, loss.item(), test_loss(model, *held_out), norm(cell)), strict=True):
                curves[name].append(value)
        z = solution.z.detach()  # the next equilibrium is near
        descent.zero_grad()
        loss.backward()
        descent.step()
    return curves


def half_square(error: Tensor) -> Tensor:
    """|y^ - y|^2 / 2."""
    return error.square().sum() / 2


@torch.no_grad()
def test_loss(model: Readout, x: Tensor, y: Tensor) -> float:
    """|y^ - y|^2 / 2 on data that were held out."""
    return half_square(model(x) - y).item()


@torch.no_grad()
def norm(cell: ScaledReLU) -> float:
    """gamma ||A||_2."""
    return cell.gamma * float(torch.linalg.matrix_norm(cell.A, 2))


# --- the grid and its claims ----------------------------------------------------------------------------------------------------


def run(options: Options) -> Result:
    """What was measured for each claim, and whether it shows the claim; and the curves of every data set and width."""
    config = PRESETS[options.preset]
    chosen = found(config, options.data_dir)
    cells = {
        f"{name}-m{width}-seed{options.seed}": settings(config, name, width, options) for name in chosen for width in config.widths
    }
    outcomes = grid(train, cells, options.out / "scaledrelu_width" / options.preset, options)
    series = collect(config, chosen, list(outcomes.values()))
    return {
        "experiment": "scaledrelu_width",
        "preset": options.preset,
        "config": asdict(config),
        "seed": options.seed,
        "versions": {"opteq": opteq.__version__, "torch": torch.__version__},
        "not_found": [name for name in config.data if name not in chosen],
        "failed": {outcome.name: outcome.error for outcome in outcomes.values() if outcome.error},
        "cell_seconds": {outcome.name: outcome.seconds for outcome in outcomes.values()},
        "claims": {name: claim(text, judge(name, config, series)) for name, text in CLAIMS.items()},
        "series": series,
    }


def found(config: Config, root: Path | None) -> list[str]:
    """The data sets that are there; a required one that is not is the error of `load`, which says what to put where."""
    there = {one.name for one in data.describe(root) if one.found}
    for name in config.data[: config.required]:
        if name not in there:
            data.load(name, root)
    return [name for name in config.data if name in there]


def settings(config: Config, name: str, width: int, options: Options) -> dict[str, Any]:
    """What `train` must know."""
    shared = ("samples", "tests", "targets", "gamma", "step", "steps", "every", "verify")
    root = None if options.data_dir is None else str(options.data_dir.absolute())  # a worker may be in another folder
    return {"data": name, "root": root, "width": width, "seed": options.seed, **{key: getattr(config, key) for key in shared}}


def collect(config: Config, chosen: Sequence[str], outcomes: Sequence[Outcome]) -> Series:
    """The curves by data set and width; None for a cell that failed."""
    rows = iter(outcomes)
    return {name: {f"m = {width}": next(rows).result for width in config.widths} for name in chosen}


def judge(name: str, config: Config, series: Series) -> Measured:
    """What one claim says of each data set; a cell that failed shows nothing."""
    measured: Measured = {}
    for dataset, by_width in series.items():
        curves = list(by_width.values())
        if name == "norm":
            norms = [value / config.gamma for curve in curves for value in column(curve, "norm")]
            measured[f"{dataset}: largest gamma ||A|| / gamma"] = at_most(norms, 1 + NEAR)
            measured[f"{dataset}: least gamma ||A|| / gamma"] = at_least(norms, 1 - NEAR)
        else:
            ends = [end(column(curve, "train" if name == "training_loss" else "test")) for curve in curves]
            ratios = [wide / narrow for narrow, wide in pairwise(ends)]
            measured[f"{dataset}: loss at the end over that of the next narrower network, the largest"] = at_most(ratios, 1.0)
    return measured


def column(curve: dict[str, list[float]] | None, name: str) -> list[float]:
    """A curve as numbers; NaN for what is missing."""
    values = [None] if curve is None else curve[name]
    return [float("nan") if value is None else value for value in values]


def end(losses: Sequence[float]) -> float:
    """The median of the last tenth: near the largest stable step a single loss may be one of those that go up."""
    return float(np.median(losses[-max(1, len(losses) // 10) :]))


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result, path: str | Path) -> None:
    """Training loss, test loss and gamma ||A|| against the step: a row for each data set, a colour for each width."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series, path = result["series"], Path(path)
    titles = {"train": "training loss", "test": "test loss", "norm": r"$\gamma\,\|A(k)\|$"}
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=(6.5, 1.9 * len(series) + 0.5), layout="constrained")
        FigureCanvasAgg(page)
        panels = page.subplots(len(series), 3, squeeze=False)
        for row, (dataset, by_width) in zip(panels, series.items(), strict=True):
            for axes, (name, title) in zip(row, titles.items(), strict=True):
                for colour, (label, curve) in zip(COLOURS, by_width.items(), strict=False):
                    axes.plot((curve or {"k": []})["k"], column(curve, name) if curve else [], color=colour, label=f"${label}$")
                axes.set(xlabel="step $k$", yscale="linear" if name == "norm" else "log")
                axes.set_title(f"{dataset}: {title}", loc="left")
                axes.grid(visible=True)
        page.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
        path.parent.mkdir(parents=True, exist_ok=True)
        page.savefig(path, dpi=250, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command("scaledrelu_width", arguments)


if __name__ == "__main__":
    raise SystemExit(main())
