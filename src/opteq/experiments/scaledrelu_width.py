"""Figures 1 and 4 of "Gradient descent optimizes infinite-depth ReLU implicit networks with linear widths": the width m.

The network is y = b'z, z = relu(gamma z A + relu(x W)), with gamma = 0.1, trained by gradient descent on |y^ - y|^2 / 2 with the
step 1e-3 = 1/N, from A = I, b = 0 and W ~ N(0, 1/m). The data: 500 + 500 images of the classes 0 and 1 for training, as many for
testing, grey, 28 x 28 pixels, of norm 1. The paper says (Section 7.1) that as m grows the training loss falls faster and the test
loss ends lower, and that gamma ||A(k)|| stays approximately gamma. It prints no numbers; the widths are not in its text, nor how
near is near (here: within half of gamma), nor which numbers stand for the classes. Here they are 0 and 1: with -1 and 1, twice as
far apart, the step 1e-3 is too large for CIFAR-10 and SVHN: the loss goes up and down. On SVHN it does so with 0 and 1 as well, in
the second half of the run: single values are decided by rounding there, and another machine has others. That is why the loss at
the end is a median.

Run `python -m opteq.experiments.scaledrelu_width --preset small --data-dir DATA`. Each data set at each width with each seed, which
draws the samples and W, is one cell of a grid. `small` takes MNIST and those of the other data sets that are found; a subset of
a data set will do. `paper` wants all four, complete, and has one width more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments._claims import CLEAR, Measured, at_least, at_most, clearness, column, judged, ratios
from opteq.experiments._harness import Options, Result, Series, command, found, gather, grid, rounded, table
from opteq.experiments._scaledrelu import absent, draw_row, end, settings, shown, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "WHY", "Config", "figure", "main", "run"]

NAME = "scaledrelu_width"
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
    seeds: int = 5
    samples: int = 1000  # for training
    tests: int = 1000
    targets: tuple[float, float] = (0.0, 1.0)
    gamma: float = 0.1
    step: float = 1e-3
    steps: int = 500
    every: int = 10  # steps from one measurement to the next
    verify: bool = False  # a subset of a data set will do


WHY = {
    "test_loss": "In the mean it is so on MNIST, Fashion-MNIST and SVHN. On CIFAR-10 the widths 100 and 1000 end 0.8% apart, with "
    "a standard error of 2%: they cannot be told apart, in the training loss neither.",
    "norm": "On SVHN ||A|| reaches 1.54, just past the 1.5 that is called near here. gamma ||A|| itself stays below 0.16, so that "
    "the equilibrium exists and is unique throughout on all four data sets.",
}
PRESETS = {
    "smoke": Config(("digits",), widths=(2, 8, 64), seeds=2, samples=200, tests=60, steps=40),
    "small": Config(),
    "paper": Config(required=4, widths=(100, 300, 1000, 3000), verify=True),
}


def run(options: Options) -> Result:
    """What was measured for each claim, and the curves of every data set, width and seed."""
    config = PRESETS[options.preset]
    chosen = found(config.data, config.required, options.data_dir)
    seeds = range(options.seed, options.seed + config.seeds)
    cells = {
        f"{name}-m{width}-seed{seed}": settings(
            config, options, data=name, width=width, gamma=config.gamma, step=config.step, seed=seed
        )
        for name in chosen
        for width in config.widths
        for seed in seeds
    }
    outcomes = grid(NAME, train, cells, options)
    results = iter([outcome.result for outcome in outcomes.values()])
    series = {name: {f"m = {width}": [curves(next(results)) for _ in seeds] for width in config.widths} for name in chosen}
    return gather(
        NAME,
        options,
        judged(CLAIMS, {name: judge(name, config, series) for name in CLAIMS}),
        outcomes=outcomes,
        tables={f"Losses |y^ - y|^2 / 2 at the end, mean and standard error of {config.seeds} seeds": losses(config, series)},
        series=rounded(series, 4),  # as many curves as these would make a large file
        notes=[*unclear(series), *absent(config.data, chosen)],
    )


def unclear(series: Series) -> list[str]:
    """A sentence for each pair of widths whose losses are not two standard errors apart, seed by seed."""
    return [
        f"{dataset}: the {words} losses of {narrow} and {wide} are less than two standard errors apart."
        for dataset, by_width in series.items()
        for narrow, wide in pairwise(by_width)
        for words, name in {"training": "train", "test": "test"}.items()
        if not abs(clearness(final(by_width[narrow], name), final(by_width[wide], name))) >= CLEAR
    ]


def curves(result: Mapping[str, Any] | None) -> Any:
    """The curves of a cell; None if it failed, or stopped before its end because no equilibrium was found."""
    return None if result is None or result["stopped"] is not None else result["curves"]


def final(seeds: Sequence[Any], name: str) -> list[float]:
    """The end of a curve for each seed."""
    return [end(column(one, name)) for one in seeds]


def judge(name: str, config: Config, series: Series) -> Measured:
    """What one claim says of each data set; a cell that failed shows nothing."""
    measured: Measured = {}
    for dataset, by_width in series.items():
        if name == "norm":
            norms = [value / config.gamma for seeds in by_width.values() for one in seeds for value in column(one, "norm")]
            measured[f"{dataset}: largest gamma ||A|| / gamma"] = at_most(norms, 1 + NEAR)
            measured[f"{dataset}: least gamma ||A|| / gamma"] = at_least(norms, 1 - NEAR)
        else:
            key = "train" if name == "training_loss" else "test"
            means = [float(np.mean(final(seeds, key))) for seeds in by_width.values()]
            text = f"{dataset}: mean loss at the end over that of the next narrower network, the largest"
            measured[text] = at_most(ratios(means), 1.0)
    return measured


def losses(config: Config, series: Series) -> dict[str, Any]:
    """The table: the losses of each data set and width, and how far gamma ||A|| went."""
    rows = [
        [
            dataset,
            label,
            shown(final(seeds, "train")),
            shown(final(seeds, "test")),
            shown([x / config.gamma for x in final(seeds, "norm")]),
        ]
        for dataset, by_width in series.items()
        for label, seeds in by_width.items()
    ]
    return table(["data", "width", "training loss", "test loss", "||A|| at the end"], rows)


def figure(result: Result) -> "Figure":
    """Training loss, test loss and gamma ||A|| against the step: a row for each data set, a colour for each width."""
    series = result["series"]
    with new_figure((6.3, 1.9 * len(series) + 0.5)) as page:
        panels = page.subplots(len(series), 3, squeeze=False)
        for row, (dataset, by_width) in zip(panels, series.items(), strict=True):
            draw_row(row, dataset, {f"${label}$": seeds for label, seeds in by_width.items()})
        page.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
