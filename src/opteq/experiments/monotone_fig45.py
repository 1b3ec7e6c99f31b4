"""Figure 4.5 of the thesis on the tangent kernel of monotone DEQs: the loss surface of a multiscale DEQ (MDEQ).

The thesis takes an MDEQ that was trained on ImageNet, and 1024 test images of 20 of its classes: L(theta + a d1 + b d2) for a, b in
[-1, 1] with random directions that are normalised filter by filter, as in figure 4.4. It says (Chapter 5) that "this model might
have only a minimum and an invex-like loss landscape", and that "the minimum is flat"; it prints no numbers.

Not in its text: which MDEQ, its training (here that of figure 4.4: Adam from 1e-3 on, a cosine, batches of 100), the resolution (51
x 51 in figure 4.4), and flat compared with what. Here it is compared with repeat-6, the first weight-tied network of figure 4.4,
trained on the same images for as many steps: by the basin, the connected set around the minimiser where the loss is at most halfway
between that at the minimiser and that of guessing; if that of repeat-6 reaches the edge of the grid, it may be wider than it looks,
and nothing is shown. An invex function has no minimum but the global one: so no other point of the
grid may be as low as all of its neighbours, and the points below any level must be one region. Where a sample does not reach its
equilibrium, the last iterate counts, as it would in use.

`small` has Imagenette at 64 x 64, ten classes of ImageNet, an MDEQ of two resolutions with 64,000 parameters, as many as repeat-6
has, few epochs, 17 x 17 points and 200 test images. Each network with its surface is one cell of a grid, which goes on where it was
interrupted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opteq.diagnostics.drawing import new_figure
from opteq.experiments._claims import Measured, at_least, at_most, judged
from opteq.experiments._harness import Options, Result, Series, command, gather, table
from opteq.experiments._thesis import (
    ONE_SEED,
    Array,
    Width,
    adam,
    colour_limits,
    draw_surface,
    drawable,
    halfway,
    matrix,
    surfaces,
    thinned,
    widths,
)
from opteq.recipes import Data, Multiscale, Recipe, Repeat, Solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "WHY", "Config", "figure", "judge", "main", "minima", "recipes", "regions", "run"]

NAME = "monotone_fig45"
ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "one_minimum": "On the plane the loss of the MDEQ has one local minimum, the minimiser or a point next to it.",
    "one_region": "Up to the loss of guessing, the points of the plane below a level are one region, whatever the level.",
    "flat": "The minimum is flat: its basin is at least as wide as that of repeat-6, trained on the same images.",
}
WHY = {
    "flat": "It is the other way round here: the basin of repeat-6 reaches the edge of the plane and is at least three times as "
    "wide. Away from its minimiser the small MDEQ loses its equilibria: at half of the points only do all samples converge. The "
    "thesis has a network of another size, and compares it with nothing.",
}
MODEL, REFERENCE = "MDEQ", "repeat-6"


@dataclass(frozen=True)
class Config:
    """The sizes. `lines`: directions besides the two of the plane. `stride`: of the reference, whose maps have side / stride."""

    data: str = "imagenet"
    limit: int | None = None
    epochs: int = 50
    channels: tuple[int, ...] = (32, 64, 128, 256)
    expand: int = 4
    head: tuple[int, ...] = (28, 56, 112, 224)
    final: int = 2048
    block: tuple[int, int] = (48, 64)  # channels of the reference, and those inside
    stride: int = 8
    rtol: float = 1e-2
    max_steps: int = 50
    steps: int = 51
    span: float = 1.0
    samples: int = 1024
    lines: int = 8


PRESETS = {
    "smoke": Config("digits", 100, 1, (8, 8), 1, (4, 4), 16, (8, 8), stride=1, max_steps=20, steps=5, samples=20, lines=1),
    "small": Config("imagenette64", None, 4, (16, 32), 1, (8, 16), 64, steps=17, samples=200, lines=4),
    "paper": Config(),
}


def recipes(config: Config, options: Options) -> dict[str, Recipe]:
    """The trainings of the MDEQ and of the network that it is compared with."""
    data = Data(config.data, options.root, limit=config.limit)
    solve = Solve("anderson", config.rtol, config.max_steps)
    mdeq = Multiscale(config.channels, config.expand, config.head, config.final, solve)
    channels, inner = config.block
    reference = Repeat(channels=channels, inner=inner, stride=config.stride, times=6)
    return {name: Recipe(data, model, adam(config.epochs, options.seed)) for name, model in ((MODEL, mdeq), (REFERENCE, reference))}


def run(options: Options) -> Result:
    """Two trainings, the surface around each network, the minima of the MDEQ's, and the basins of both."""
    config = PRESETS[options.preset]
    looking = {"steps": config.steps, "span": config.span, "samples": config.samples, "split": "test", "lines": config.lines}
    outcomes = surfaces(NAME, recipes(config, options), looking, options)
    series = {name: outcome.result for name, outcome in outcomes.items()}
    return gather(
        NAME,
        options,
        judged(CLAIMS, judge(series)),
        outcomes=outcomes,
        tables={"The surfaces, on test images; diameter and width are those of the basin": rows(series)},
        series=thinned(series),
        notes=["The level of a basin is halfway from the loss at the minimiser to that of guessing.", ONE_SEED],
    )


# --- the claims -----------------------------------------------------------------------------------------------------------------


def minima(loss: Array) -> list[tuple[int, int]]:
    """The points of a grid whose loss is no higher than that of their eight neighbours, one of each plateau; none if one is NaN."""
    from scipy.ndimage import label, minimum_filter  # type: ignore[import-untyped]

    if np.isnan(loss).any():
        return []
    plateaus, count = label(loss == minimum_filter(loss, size=3, mode="nearest"), np.ones((3, 3)))
    return [(int(i), int(j)) for i, j in (np.argwhere(plateaus == k)[0] for k in range(1, count + 1))]


def regions(loss: Array, guessing: float, levels: int = 40) -> int:
    """The most regions of {loss <= level}, over levels from the least loss to that of guessing; 0 if none is as low, or one NaN."""
    from scipy.ndimage import label

    if np.isnan(loss).any() or loss.min() > guessing:
        return 0
    return max(int(label(loss <= level, np.ones((3, 3)))[1]) for level in np.linspace(loss.min(), guessing, levels))


def judge(series: Series) -> dict[str, Measured | str]:
    """What was measured for each claim; a network that failed, or a loss that is NaN, shows nothing."""
    nan, mdeq = float("nan"), series[MODEL]
    loss = np.full((3, 3), nan) if mdeq is None else matrix(mdeq["loss"])
    places, middle = minima(loss), len(loss) // 2
    away = max(abs(place - middle) for place in places[0]) if places else nan
    parts = regions(loss, nan if mdeq is None else mdeq["guessing"])
    own, other = (basin(series[name]) for name in (MODEL, REFERENCE))
    diameter, width = (wide.over(narrow) for wide, narrow in zip(own, other, strict=True))
    return {
        "one_minimum": {
            "local minima on the grid": at_most(len(places) or nan, 1),
            "points of the grid from the minimiser to it": at_most(away, 1),
        },
        "one_region": {"regions, the most at any level": at_most(parts or nan, 1)},
        "flat": {
            "diameter of the basin over that of repeat-6": at_least(diameter, 1.0),
            "mean width of the basin along lines over that of repeat-6": at_least(width, 1.0),
        },
    }


def basin(one: Mapping[str, Any] | None) -> tuple[Width, Width]:
    """The diameter and the mean width along lines of the basin of a network."""
    return widths(one, halfway(one) if one else float("nan"))


def rows(series: Series) -> dict[str, Any]:
    """The table: a row for each network."""
    columns = ["network", "training loss", "test accuracy", "loss at the minimiser", "level", "diameter", "width (standard error)"]
    return table([*columns, "local minima", "points where all samples converged"], [row(*item) for item in series.items()])


def row(name: str, one: Mapping[str, Any] | None) -> list[Any]:
    """A row of the table; gaps where a cell failed."""
    if one is None:
        return [name, *[None] * 8]
    loss = matrix(one["loss"])
    middle = float(loss[len(loss) // 2, len(loss) // 2])
    converged = one["converged"] if name == MODEL else None
    scores = [one["train_loss"][-1], one["valid_accuracy"][-1]]
    return [name, *scores, middle, halfway(one), *(width.text() for width in basin(one)), len(minima(loss)), converged]


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """The surface of the MDEQ beside that of repeat-6, with the basins."""
    series = drawable(result["series"])
    with new_figure((6.3, 2.9)) as page:
        if not series:
            return page
        limits, panels = colour_limits(series), page.subplots(1, 2, sharex=True, sharey=True)
        for axes, (name, one) in zip(panels, series.items(), strict=False):
            level, diameter = halfway(one), basin(one)[0].text() or "unknown"
            filled = draw_surface(axes, one, f"{name}: diameter {diameter} at {level:.3g}", limits, level)
            axes.set_xlabel("first direction")
        panels[0].set_ylabel("second direction")
        page.colorbar(filled, ax=list(panels), format="%.3g", shrink=0.9).set_label("test loss")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
