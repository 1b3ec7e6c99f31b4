"""Figures 2 and 6 and Table 1 of "Gradient descent optimizes infinite-depth ReLU implicit networks with linear widths": gamma.

The network is y = b'z, z = relu(gamma z A + relu(x W)), of width m = 1000, trained by 500 steps of gradient descent on
|y^ - y|^2 / 2 from A = I, b = 0 and W ~ N(0, 1/m). The data: 500 + 500 images of the classes 0 and 1 for training, as many for
testing, grey, 28 x 28 pixels, of norm 1. The paper says (Section 7.2) that the larger gamma is, the lower are the training loss and
the test loss, and the more iterations Z <- relu(gamma Z A + relu(X W)) the forward propagation needs, from Z = 0, until a change of
Z is at most 1e-2, or 100 are done: 6, 9, 15 and 47.5 on average for gamma = 0.1, 0.3, 0.5 and 0.8 on MNIST; and that their number
grows in training.

What to expect of the iterations: at the start A = I, and the l-th change is gamma^(l-1) Phi, Phi = relu(X W), so that there are 1
+ log(||Phi|| / 1e-2) / log(1 / gamma) of them, rounded up. In the wide limit |Phi|_F^2 = N/2: 5, 8, 13 and 36. More come as ||A||
grows. And of the step eta: at the start b = 0, and the loss is quadratic in b with the curvature c = ||Z||^2 = ||Phi||^2 / (1 -
gamma)^2, for which steps above 2 / c are unstable. For images, no two of which are at more than a right angle, c >= N / (2 pi (1 -
gamma)^2) in the wide limit. At gamma = 0.8 that is 3979: the step 1e-3, which the paper gives for all of its experiments, cannot
be stable there, whatever the data. Its text does not say what was done instead. Here Table 1 is counted at the largest stable step
of 1e-3, 5e-4, 2e-4 and 1e-4, the one nearest to the paper's (5e-4 and 2e-4 were added after early counts at 1e-4; the table has
every stable step: at gamma = 0.8 the mean at 1e-4 is 61, above the 20%), and losses are compared at equal steps. (On MNIST at
gamma = 0.8, there is no equilibrium after 14 steps of 1e-3, nor after 7 of 5e-4; with 2e-4 gamma ||A|| passes 1 towards the end,
where Lemma 3.1 promises nothing, but the iterations still converge. At gamma = 0.8 rounding decides more than elsewhere: the same
training on SVHN lost its equilibrium on another machine, and here does not.) Nor does the paper say which numbers stand for the
classes: 0 and 1 here, as in `scaledrelu_width`.

The change of the whole matrix Z [N, m] is measured in the operator norm, as the paper writes it, and in the Frobenius norm. The
iterations are counted apart from the training, once in 20 steps; see `_scaledrelu` for both.

The paper also says that it multiplies the first weights by a large number where they do not satisfy its conditions (17) to (19); it
does not say by which, and that is not done here.

Run `python -m opteq.experiments.scaledrelu_gamma --preset small --data-dir DATA`. Each data set, gamma and step is one cell of a
grid. `small` has the paper's sizes; the data sets after MNIST, those that are found, get the step 1e-4 only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments._claims import Measured, at_least, at_most, curve, judged, ratios, within
from opteq.experiments._harness import Options, Result, Series, command, found, gather, grid, table
from opteq.experiments._scaledrelu import CHANGE, absent, draw_row, end, settings, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PAPER", "PRESETS", "Config", "figure", "main", "run"]

NAME = "scaledrelu_gamma"
ABOUT = (__doc__ or "").split("\n")[0]
PAPER = {0.1: 6.0, 0.3: 9.0, 0.5: 15.0, 0.8: 47.5}  # Table 1: mean number of forward iterations
CLAIMS = {
    "iterations": "The mean number of forward iterations is within 20% of Table 1 for each gamma.",
    "more": "The larger gamma, the more forward iterations.",
    "growth": "gamma ||A|| grows in training, and the number of forward iterations with it, or it stays.",
    "training_loss": "The larger gamma, the lower the training loss at the end, at equal steps that are stable.",
    "test_loss": "The larger gamma, the lower the test loss at the end, at equal steps that are stable.",
}


@dataclass(frozen=True)
class Config:
    """The sizes. The first `required` of the data sets must be there; of the others, those that are found are taken."""

    data: tuple[str, ...] = ("mnist", "fashion-mnist", "cifar10", "svhn")
    required: int = 1
    gammas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.8)
    etas: tuple[float, ...] = (1e-3, 5e-4, 2e-4, 1e-4)  # the data sets after the first get the last only
    alone: tuple[float, ...] = (5e-4, 2e-4)  # steps for the largest gamma only: the others are stable with a larger one
    width: int = 1000
    samples: int = 1000  # for training
    tests: int = 1000
    targets: tuple[float, float] = (0.0, 1.0)
    steps: int = 500
    every: int = 20  # steps from one measurement to the next
    tolerance: float = 1e-5  # of the equilibria of the training, relative
    verify: bool = False  # a subset of a data set will do


PRESETS = {
    "smoke": Config(("digits",), gammas=(0.1, 0.8), etas=(5e-4, 2e-4), alone=(), width=32, samples=100, tests=60, steps=40),
    "small": Config(),
    "paper": Config(required=4, verify=True),
}

# --- the grid and its claims ----------------------------------------------------------------------------------------------------


def run(options: Options) -> Result:
    """What was measured for each claim, Table 1, and the curves of every data set, step and gamma."""
    config = PRESETS[options.preset]
    chosen = found(config.data, config.required, options.data_dir)
    trainings = [
        (name, eta, gamma)
        for name in chosen
        for eta in (config.etas if name == chosen[0] else config.etas[-1:])
        for gamma in (config.gammas[-1:] if eta in config.alone else config.gammas)
    ]
    cells = {
        f"{name}-step{eta:g}-gamma{gamma:g}-seed{options.seed}": cell(config, options, name, eta, gamma, first=name == chosen[0])
        for name, eta, gamma in trainings
    }
    outcomes = grid(NAME, train, cells, options)
    series: Series = {}
    for (name, eta, gamma), outcome in zip(trainings, outcomes.values(), strict=True):
        series.setdefault(name, {}).setdefault(f"{eta:g}", {})[f"{gamma:g}"] = outcome.result
    return gather(
        NAME,
        options,
        judged(CLAIMS, judge(series)),
        outcomes=outcomes,
        tables={"Table 1: forward iterations": iterations(config, series), "Losses at the end": losses(series)},
        series=series,
        notes=absent(config.data, chosen),
    )


def cell(config: Config, options: Options, name: str, eta: float, gamma: float, *, first: bool) -> dict[str, Any]:
    """The settings of one training; the iterations are counted on the first data set."""
    own = {"data": name, "gamma": gamma, "step": eta, "width": config.width, "seed": options.seed, "tolerance": config.tolerance}
    return settings(config, options, **own, counted=first)


def stable(result: Any) -> bool:
    """Whether a training came to its end and its loss was never above the first; also true of a cell that failed.

    (So that what was not measured is seen to be missing, and is not left out as if it had diverged.)
    """
    return result is None or (result["stopped"] is None and result["peak"] <= 1)


def counted(series: Series) -> dict[str, tuple[str, Any]]:
    """By gamma: the largest step with which its training on the first data set is stable, and its result; None if none is."""
    by_eta = next(iter(series.values()))
    smallest = min(by_eta, key=float)
    found: dict[str, tuple[str, Any]] = {}
    for gamma in sorted(by_eta[smallest], key=float):
        tried = [(eta, by_gamma[gamma]) for eta, by_gamma in by_eta.items() if gamma in by_gamma]
        found[gamma] = next((one for one in tried if stable(one[1])), (smallest, None))
    return found


def judge(series: Series) -> dict[str, Measured]:
    """What was measured for each claim; a cell that failed shows nothing."""
    measured: dict[str, Measured] = {name: {} for name in CLAIMS}
    means = {}
    for gamma, (eta, result) in counted(series).items():
        means[gamma], about = float(np.mean(curve(result, "operator"))), f"gamma = {gamma}, step {eta}"
        if float(gamma) in PAPER:
            ratio = means[gamma] / PAPER[float(gamma)]
            measured["iterations"][f"{about}: mean iterations over those of Table 1"] = within(ratio, 0.8, 1.2)
        for name, title in {"norm": "gamma ||A||", "operator": "iterations"}.items():
            values = curve(result, name)
            measured["growth"][f"{about}: {title}, last over first"] = at_least(values[-1] / values[0], 1.0)
    measured["more"]["mean iterations over those of the next smaller gamma, the least"] = at_least(
        ratios(list(means.values())) or [math.nan], 1.0
    )
    for name, key in {"training_loss": "train", "test_loss": "test"}.items():
        for dataset, by_eta in series.items():
            for eta, by_gamma in by_eta.items():
                if len(by_gamma) == 1:  # there is none to compare with
                    continue
                ends = [end(curve(result, key)) for result in by_gamma.values() if stable(result)]
                about = f"{dataset}, step {eta}: loss over that of the next smaller gamma, the largest of {len(ends)} gammas"
                measured[name][about] = at_most(ratios(ends) or [math.nan], 1.0)
    return measured


# --- tables ---------------------------------------------------------------------------------------------------------------------


def iterations(config: Config, series: Series) -> dict[str, Any]:
    """Table 1: what the paper has, what was measured at each stable step, and what A = I has in the wide limit."""
    start = math.sqrt(config.samples / 2) / CHANGE  # |Phi|_F / 1e-2
    by_eta, rows = next(iter(series.values())), []
    for gamma, (chosen, _) in counted(series).items():
        expected = 1 + math.ceil(math.log(start) / math.log(1 / float(gamma)))
        for eta, by_gamma in by_eta.items():
            if gamma not in by_gamma or not stable(by_gamma[gamma]):
                continue
            operator, frobenius = (curve(by_gamma[gamma], name) for name in ("operator", "frobenius"))
            means = [float(np.mean(operator)), float(np.mean(frobenius))]
            printed = PAPER.get(float(gamma)) if eta == chosen else None
            rows.append([float(gamma), printed, eta, *means, operator[0], operator[-1], expected])
    names = ["gamma", "paper", "step", "mean, operator norm", "mean, Frobenius norm", "first", "last", "at A = I, wide limit"]
    return table(names, rows)


def losses(series: Series) -> dict[str, Any]:
    """The losses at the end; what says that a training diverged, and what foretells it."""
    rows = [
        [dataset, eta, float(gamma), *measured(eta, result)]
        for dataset, by_eta in series.items()
        for eta, by_gamma in by_eta.items()
        for gamma, result in by_gamma.items()
    ]
    names = ["data", "step eta", "gamma", "training loss", "test loss", "gamma ||A||", "largest L(k) / L(0)", "stopped at step"]
    return table([*names, "eta ||Z(0)||^2 (stable: < 2)"], rows)


def measured(eta: str, result: Any) -> list[Any]:
    """What the table says of one training."""
    if result is None:
        return [None] * 6
    ends = [end(curve(result, name)) if stable(result) else None for name in ("train", "test", "norm")]
    return [*ends, result["peak"], result["stopped"], float(eta) * result["sharpness"]]


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """A row of losses and gamma ||A|| for each data set and step, a colour for each gamma; below, the forward iterations."""
    series = result["series"]
    rows = [
        (rf"{dataset}, $\eta = {eta}$", by_gamma)
        for dataset, by_eta in series.items()
        for eta, by_gamma in by_eta.items()
        if len(by_gamma) > 1
    ]
    with new_figure((6.3, 1.8 * len(rows) + 2.6)) as page:
        panels = page.subplots(len(rows) + 1, 3, squeeze=False)
        for row, (title, by_gamma) in zip(panels, rows, strict=False):
            draw_row(row, title, {rf"$\gamma = {gamma}$": [one and one["curves"]] for gamma, one in by_gamma.items()})
        draw_iterations(panels[-1], counted(series))
        page.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    return page


def draw_iterations(row: "Sequence[Axes]", found: dict[str, tuple[str, Any]]) -> None:
    """The forward iterations against the step of the training, and their means beside Table 1."""
    for colour, (gamma, (_, one)) in zip(COLOURS, found.items(), strict=False):
        counts = curve(one, "operator")
        row[0].plot([] if one is None else one["curves"]["k"], [] if one is None else counts, color=colour)
        row[1].plot(float(gamma), np.mean(counts), "o", color=colour)
    row[1].plot(list(PAPER), list(PAPER.values()), "kx", label="Table 1")
    row[0].set(xlabel="step $k$", ylim=(0, None))
    row[0].set_title("forward iterations", loc="left")
    row[1].set(xlabel=r"$\gamma$", ylim=(0, None))
    row[1].set_title("their mean", loc="left")
    row[1].legend(loc="upper left")
    row[2].set_axis_off()
    for axes in row[:2]:
        axes.grid(visible=True)
        axes.set_axisbelow(True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
