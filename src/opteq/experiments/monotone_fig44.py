"""Figure 4.4 of the thesis on the tangent kernel of monotone DEQs: the loss surface of a DEQ and of weight-tied networks.

The DEQ is z = norm(relu(z + norm(x + W2 * norm(relu(W1 * z))))), with group norms, between a convolution and a linear map;
repeat-6, 11 and 18 apply f so many times to z = 0 instead. All are trained on CIFAR-10 with Adam from 1e-3 on, a cosine schedule
and batches of 100 for 50 epochs. The surface is L(theta + a d1 + b d2) for a, b in [-1, 1], 51 x 51 points, with random directions
d1, d2 that are normalised filter by filter. The thesis says (Section 4.2.1) that "the small-loss neighborhood around the minimizer
is expanded as we increase the number of repetitions"; it prints no numbers.

Not in its text: the channels (those of the tutorial that the block is from, 48 and 64 inside), the data of the loss (here training
samples), the solver in this section (that of Section 4.1: Anderson to 1e-2, at most 50 steps), and how the width is measured. Here
it is that of the basin, the connected set around the minimiser where the loss is at most a level: the diameter of the disc of its
area on the plane, and its mean width along the lines of several random directions. The level is halfway between the loss at the
minimiser and that of guessing, log 10; a network with a lower loss then has a lower level. Or the level is the same for all
networks, the highest of these. A basin that reaches the edge of the grid may be wider than it looks: against such a one nothing is
shown. Where a sample does not reach its equilibrium, the last iterate counts, as it would in use.

`small` has the same networks on maps of 8 x 8 instead of 32 x 32 (a first convolution of stride 4), fewer epochs on a part of the
training set, and 17 x 17 points. Each network with its surface is one cell of a grid, which goes on where it was interrupted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from opteq.diagnostics.drawing import new_figure
from opteq.experiments._claims import Measured, at_least, judged
from opteq.experiments._harness import Options, Result, Series, command, gather, table
from opteq.experiments._thesis import (
    ONE_SEED,
    Width,
    adam,
    colour_limits,
    draw_surface,
    drawable,
    halfway,
    surfaces,
    thinned,
    widths,
)
from opteq.recipes import Data, Recipe, Repeat, Residual, Solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "WHY", "Config", "figure", "judge", "main", "recipes", "run"]

NAME = "monotone_fig44"
ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "basin": "The more often f is applied, in the order 6, 11, 18, DEQ, the wider the basin below half of the way to guessing.",
    "same_level": "So it is when the level is the same for all networks.",
}
WHY = {
    "basin": "The DEQ has the widest basin, 1.26 against the 1.08, 1.11 and 1.09 of 6, 11 and 18 applications, and that of the "
    "largest diameter. Those of 11 and 18 are 1% apart and the wrong way round, where the standard error of a width is 4%. There "
    "is one seed.",
    "same_level": "At one level the DEQ's is the widest, too, 1.26 against 1.20, 1.23 and 1.20, with standard errors of 0.04 to "
    "0.07; by the diameter, 1.16 against 1.15, 1.17 and 1.15, they cannot be told apart. After the same 400 steps the DEQ has a "
    "training loss of 0.85, the others of 0.5, so that the level is less far above its minimum.",
}


@dataclass(frozen=True)
class Config:
    """The sizes. `limit`: training samples. `lines`: directions besides the two of the plane. `stride`: 32 / side of the maps."""

    data: str = "cifar10"
    limit: int | None = None
    epochs: int = 50
    channels: int = 48
    inner: int = 64
    stride: int = 1
    pool: int = 4
    repeats: tuple[int, ...] = (6, 11, 18)
    rtol: float = 1e-2
    max_steps: int = 50
    steps: int = 51
    span: float = 1.0
    samples: int = 1000  # over which the loss is the mean
    lines: int = 8


PRESETS = {
    "smoke": Config("digits", 100, 1, 8, 8, steps=5, samples=20, lines=1),
    "small": Config(limit=4000, epochs=10, stride=4, steps=17, samples=200, lines=4),
    "paper": Config(),
}


def recipes(config: Config, options: Options) -> dict[str, Recipe]:
    """The trainings of the weight-tied networks and of the DEQ, by name, the shallowest first."""
    data = Data(config.data, options.root, limit=config.limit, test_limit=None if config.limit is None else config.limit // 4)
    deq = Residual(
        config.channels,
        config.inner,
        stride=config.stride,
        pool=config.pool,
        solve=Solve("anderson", config.rtol, config.max_steps),
    )
    block = {field.name: getattr(deq, field.name) for field in fields(deq) if field.name != "solve"}
    models: dict[str, Repeat | Residual] = {f"repeat-{times}": Repeat(**block, times=times) for times in config.repeats}
    models["DEQ"] = deq
    return {name: Recipe(data, model, adam(config.epochs, options.seed)) for name, model in models.items()}


def run(options: Options) -> Result:
    """Four trainings, the surface around each network, and how wide its basin is."""
    config = PRESETS[options.preset]
    looking = {"steps": config.steps, "span": config.span, "samples": config.samples, "split": "train", "lines": config.lines}
    outcomes = surfaces(NAME, recipes(config, options), looking, options)
    series = {name: outcome.result for name, outcome in outcomes.items()}
    measured = measure(series)
    return gather(
        NAME,
        options,
        judged(CLAIMS, judge(measured)),
        outcomes=outcomes,
        tables={"The basins: diameter on the plane, mean width along lines (standard error)": rows(measured, series)},
        series=thinned(series),
        notes=[
            "The level of a basin is halfway from the loss at the minimiser to log 10; the same level is the highest of these.",
            ONE_SEED,
        ],
    )


# --- the claims -----------------------------------------------------------------------------------------------------------------


def measure(series: Series) -> dict[str, dict[str, Any]]:
    """Of each network: its level, and its diameter and width along lines at its own (`basin`) and at the same level."""
    levels = {name: halfway(one) if one else float("nan") for name, one in series.items()}
    same = float(np.max(list(levels.values())))  # NaN if one is
    return {
        name: {"level": levels[name], "basin": widths(one, levels[name]), "same_level": widths(one, same)}
        for name, one in series.items()
    }


def judge(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Measured | str]:
    """Each network's basin against that of the next shallower one, which it must not fall below."""

    def least(claim: str, kind: int) -> float:
        found: list[Width] = [one[claim][kind] for one in measured.values()]
        return float(np.min([wide.over(narrow) for narrow, wide in pairwise(found)]))

    return {
        claim: {
            "diameter over that of the next shallower network, the least": at_least(least(claim, 0), 1.0),
            "mean width along lines over that of the next shallower network, the least": at_least(least(claim, 1), 1.0),
        }
        for claim in CLAIMS
    }


def rows(measured: Mapping[str, Mapping[str, Any]], series: Series) -> dict[str, Any]:
    """The table: a row for each network."""
    columns = [
        "network", "training loss", "test accuracy", "level", "diameter", "width", "diameter, same level", "width, same level",
        "points where all samples converged",
    ]  # fmt: skip
    return table(columns, [row(name, one, series[name] or {}) for name, one in measured.items()])


def row(name: str, one: Mapping[str, Any], found: Mapping[str, Any]) -> list[Any]:
    """A row of the table; gaps where a cell failed."""
    last = [found[key][-1] if key in found else None for key in ("train_loss", "valid_accuracy")]
    texts = [width.text() for width in (*one["basin"], *one["same_level"])]
    converged = None if name.startswith("repeat") else found.get("converged")
    return [name, *last, one["level"], *texts, converged]


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """The surfaces with one scale of colours, the basin of each at the same level, and the widths by depth."""
    series = drawable(result["series"])
    with new_figure((6.3, 6.0)) as page:
        if not series:
            return page
        limits, level = colour_limits(series), max(halfway(one) for one in series.values())
        panels = page.subplots(2, 2, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, (name, one) in zip(panels, series.items(), strict=False):
            diameter = widths(one, level)[0].text() or "unknown"
            filled = draw_surface(axes, one, f"{name}: diameter {diameter}", limits, level)
        bar = page.colorbar(filled, ax=list(panels), format="%.3g", shrink=0.8)
        bar.set_label(f"training loss; the orange line is at {level:.3g}")
        page.supxlabel("first direction", fontsize=8)
        page.supylabel("second direction", fontsize=8)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
