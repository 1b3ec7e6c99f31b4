"""Figures 4.1 and 4.2 of the thesis on the tangent kernel of monotone DEQs: how the first weights shape the iterates.

The network is z = norm(relu(z + norm(x + W2 * norm(relu(W1 * z))))), with group norms, where x is a convolution of an MNIST image.
With W1 and W2 from N(0, 1), the thesis says (Section 4.1.1), "the sequence of z^[i] is more chaos", while with "a smaller variance
normal distribution", N(0, 0.01), "z^[i] stay quite steady after the first step". It shows |f(z) - z| / |f(z)| of the iterates of
Anderson's method for test images, and the iterates in their first two principal components; it prints no numbers.

Chaos is measured as it is defined: by the Lyapunov exponent of the plain iteration z <- f(z), the mean of log |J(z_k) v_k| for unit
vectors v_k that are carried along. It is positive where two starts that are near part, negative where they meet. Steady after the
first step: the rest of the path is shorter than that step.

Not in its text: the channels (those of the tutorial that the block is from, 48 and 64 inside), the number of images and steps, the
norm of x (here the tutorial's batch norm, with the statistics of training images: x must not be small beside W2 * (...), or nothing
settles). In the tutorial 0.01 is the deviation, as it is printed it is the variance, a deviation of 0.1: both are measured. `small`
has 32 images and three draws of the weights. Each size with each draw is one cell of a grid.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from opteq import Stop, data
from opteq.cells import Residual
from opteq.diagnostics import Trajectory, residual_curve, trajectory
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.equilibrium import Equilibrium
from opteq.experiments._claims import Measured, at_least, at_most, column, judged, mean_error
from opteq.experiments._harness import Options, Result, Series, command, found, gather, grid, rounded, table
from opteq.models import Classifier, residual_deq
from opteq.solvers import Anderson, Picard

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "WHY", "Config", "figure", "judge", "lyapunov", "main", "run", "settle"]

NAME = "monotone_fig41_42"
ABOUT = (__doc__ or "").split("\n")[0]
SMALL, MIDDLE, STANDARD = "N(0, 0.01²)", "N(0, 0.1²)", "N(0, 1)"
DEVIATIONS = {SMALL: 0.01, MIDDLE: 0.1, STANDARD: 1.0}
TOLERANCE = 1e-2  # of the thesis's solver, Section 4.1.2
CLAIMS = {
    "steady": "With N(0, 0.01²) every path is solved to 1e-2 within 50 steps, and the rest of it is shorter than its first step.",
    "printed": (
        "As printed, with the variance 0.01, N(0, 0.1²), the iterates settle: every path is solved to 1e-2 within 50 steps, "
        "and the rest of it is shorter than its first step."
    ),
    "restless": "With N(0, 1) no path is solved to 1e-2 within 50 steps, and the rest of each is longer than its first step.",
    "chaos": "Under z <- f(z), starts that are near part with N(0, 1), a Lyapunov exponent above 0, and meet with N(0, 0.01²).",
}


WHY = {
    "printed": (
        "The iterates settle only with the smaller weights: 0.01 must be their deviation, as it is in the tutorial that the thesis "
        "takes the block from, not their variance."
    ),
}


@dataclass(frozen=True)
class Config:
    """The sizes. `paths`: the images whose iterates are drawn. `orbits`: those of the Lyapunov exponents, over `orbit` steps."""

    data: str = "mnist"
    channels: int = 48
    inner: int = 64
    images: int = 32
    paths: int = 8
    orbits: int = 8
    orbit: int = 60
    steps: int = 50
    seeds: int = 3


PRESETS = {
    "smoke": Config("digits", 8, 8, images=4, paths=3, orbits=2, orbit=10, steps=20, seeds=2),
    "small": Config(),
    "paper": Config(images=1000, paths=50, orbits=100, orbit=500, seeds=5),
}

# --- one cell -------------------------------------------------------------------------------------------------------------------


def settle(settings: dict[str, Any]) -> dict[str, Any]:
    """The iterates for one draw of the weights: residuals of two solvers, paths of Anderson's, Lyapunov exponents."""
    dataset = data.load(settings["data"], settings["root"])
    model = network(settings, dataset.train.x[torch.arange(500)])
    x, labels = dataset.test.x[torch.arange(settings["images"])], dataset.test.y[: settings["paths"]]
    solvers = {"Anderson": Anderson(), "Picard": Picard()}
    residuals = residual_curve(model, x, solvers, stop=Stop(rtol=1e-5, max_steps=settings["steps"])).curves
    paths = trajectory(model, x[: settings["paths"]], labels)
    return {
        "residual": {name: curve.residual.mean(dim=0).tolist() for name, curve in residuals.items()},
        "least": residuals["Anderson"].residual.amin(dim=1).tolist(),
        "solved": first_below(residuals["Anderson"].residual),
        "rest": rest(paths, model, x[: settings["paths"]]),
        "lyapunov": lyapunov(model, x[: settings["orbits"]], settings["orbit"], settings["seed"]),
        "points": points(paths),
        "explained": paths.explained.tolist(),
    }


def network(settings: Mapping[str, Any], x: Tensor) -> Classifier:
    """The network with its first weights; its batch norm has the statistics of training images."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings["seed"])
        model = residual_deq(
            x.shape[1], 10, channels=settings["channels"], inner=settings["inner"], solver=Anderson(),
            stop=Stop(rtol=1e-5, max_steps=settings["steps"]), on_failure="ignore",
        )  # fmt: skip
        cell = block(model)
        for W in (cell.W1, cell.W2):
            nn.init.normal_(W, std=settings["deviation"])
    for norm in model.extractor.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 1.0
    with torch.no_grad():
        model.extractor.train()(x)
    return model.eval()


def block(model: Classifier) -> Residual:
    """The cell of the network."""
    layer = model.equilibrium
    assert isinstance(layer, Equilibrium)
    assert isinstance(layer.cell, Residual)
    return layer.cell


def first_below(residual: Tensor) -> list[int | None]:
    """For each sample the first step at which the residual is at most the thesis's tolerance; None if there is none."""
    below = residual <= TOLERANCE
    return [int(row.int().argmax()) if bool(row.any()) else None for row in below]


@torch.no_grad()
def rest(paths: Trajectory, model: Classifier, x: Tensor) -> list[float]:
    """How long each path is after its first step, in lengths of that step, which is |f(0)|."""
    injection, cell = model.extractor(x), block(model)
    first = cell.bind(injection)(cell.initial(injection)).flatten(1).double().norm(dim=1)
    ratio: list[float] = (paths.lengths[0] / first - 1).tolist()
    return ratio


@torch.no_grad()
def lyapunov(model: Classifier, x: Tensor, steps: int, seed: int) -> list[float]:
    """For each sample the mean of log |v_{k+1}| / |v_k|, v_{k+1} = J(z_k) v_k, over the second half of z_{k+1} = f(z_k), z_0 = 0.

    In float64; the vectors are carried along by the derivative itself, and need no small distance.
    """
    injection, cell = model.extractor(x).double(), deepcopy(block(model)).double()
    fn, z = cell.bind(injection), cell.initial(injection)
    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=z.dtype)
    growth = []
    for _ in range(steps):
        v = v / norms(v)
        z, v = fn(z), fn.linearize(z).jvp(v)
        growth.append(norms(v).flatten().log())
    mean: list[float] = torch.stack(growth[steps // 2 :]).mean(dim=0).tolist()
    return mean


def norms(v: Tensor) -> Tensor:
    """|v| of each sample, to broadcast."""
    lengths: Tensor = torch.linalg.vector_norm(v, dim=(1, 2, 3), keepdim=True)
    return lengths


def points(paths: Trajectory) -> list[list[list[float]]]:
    """The paths in their two components, [sample][step], without what comes after their end."""
    return [rounded(path[path[:, 0].isfinite()].tolist(), 4) for path in paths.points[0]]


# --- the grid and its claims ----------------------------------------------------------------------------------------------------


def run(options: Options) -> Result:
    """What the iterates do for three sizes of weights and several draws of each."""
    config = PRESETS[options.preset]
    found([config.data], 1, options.data_dir)
    cells = {
        f"{title}-seed{k}": settings(config, deviation, k, options)
        for title, deviation in DEVIATIONS.items()
        for k in range(options.seed, options.seed + config.seeds)
    }
    outcomes = grid(NAME, settle, cells, options)
    rows = iter(outcomes.values())
    by_title = {title: [next(rows).result for _ in range(config.seeds)] for title in DEVIATIONS}
    return gather(
        NAME,
        options,
        judged(CLAIMS, judge(by_title)),
        outcomes=outcomes,
        tables={"The iterates by the first weights: means over images and draws (standard error over draws)": summary(by_title)},
        series={title: thin(runs[0]) for title, runs in by_title.items()},
    )


def settings(config: Config, deviation: float, seed: int, options: Options) -> dict[str, Any]:
    """What `settle` must know."""
    shared = ("data", "channels", "inner", "images", "paths", "orbits", "orbit", "steps")
    return {"root": options.root, "deviation": deviation, "seed": seed, **{key: getattr(config, key) for key in shared}}


def thin(one: Series | None) -> Series | None:
    """What the figure draws of a cell."""
    return None if one is None else {key: one[key] for key in ("residual", "points", "explained")}


def judge(by_title: Mapping[str, Sequence[Series | None]]) -> dict[str, Measured | str]:
    """What was measured for each claim, over all images and draws; a cell that failed shows nothing."""

    def every(title: str, name: str) -> list[float]:
        return [value for one in by_title[title] for value in column(one, name)]

    def settled(title: str) -> Measured:
        return {
            "least residual of a path, the largest": at_most(every(title, "least"), TOLERANCE),
            "path after the first step over that step, the largest": at_most(every(title, "rest"), 1.0),
        }

    return {
        "steady": settled(SMALL),
        "printed": settled(MIDDLE),
        "restless": {
            "least residual of a path, the least": at_least(every(STANDARD, "least"), TOLERANCE),
            "path after the first step over that step, the least": at_least(every(STANDARD, "rest"), 1.0),
        },
        "chaos": {
            "Lyapunov exponent with N(0, 1), the least": at_least(every(STANDARD, "lyapunov"), 0.0),
            "Lyapunov exponent with N(0, 0.01²), the largest": at_most(every(SMALL, "lyapunov"), 0.0),
        },
    }


def summary(by_title: Mapping[str, Sequence[Series | None]]) -> dict[str, Any]:
    """The table: a row for each size of the weights."""
    columns = [
        "weights",
        "residual after 1 step",
        "last residual",
        "samples solved to 1e-2",
        "steps to 1e-2",
        "rest of the path / first step",
    ]
    return table([*columns, "Lyapunov exponent"], [row(title, runs) for title, runs in by_title.items()])


def row(title: str, runs: Sequence[Series | None]) -> list[Any]:
    """Means over draws, with their standard errors."""
    done = [one for one in runs if one]
    solved = [column(one, "solved") for one in done]
    steps = [float(np.nanmean(values)) for values in solved if np.isfinite(values).any()]
    curves = [one["residual"]["Anderson"] for one in done]
    return [
        title,
        mean([curve[1] for curve in curves]),
        mean([curve[-1] for curve in curves]),
        f"{100 * np.mean([np.isfinite(values).mean() for values in solved]):.0f}%" if done else None,
        mean(steps),
        mean([float(np.mean(one["rest"])) for one in done]),
        mean([float(np.mean(one["lyapunov"])) for one in done]),
    ]


def mean(values: Sequence[float]) -> str | None:
    """The mean and its standard error; None of nothing."""
    if not values:
        return None
    found, error = mean_error(values)
    return f"{found:.3g}" + (f" ({error:.1g})" if len(values) > 1 else "")


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """Residuals above, paths in their principal components below; a column for each size of the weights."""
    series = {title: one for title, one in result["series"].items() if one}
    with new_figure((6.3, 4.4)) as page:
        panels = page.subplots(2, max(1, len(series)), squeeze=False)
        for (above, below), (title, one) in zip(panels.T, series.items(), strict=False):
            for colour, (solver, curve) in zip(COLOURS, one["residual"].items(), strict=False):
                above.plot(curve, color=colour, label=solver, linewidth=1.2)
            above.axhline(TOLERANCE, color="0.4", linewidth=0.8, linestyle="--")
            above.set(yscale="log", xlim=(0, result["config"]["steps"]), ylim=(1e-6, 2), xlabel="step")
            above.set_title(f"weights from {title}", fontsize=8)
            above.grid(visible=True)
            draw_paths(below, one)
        panels[0, 0].set_ylabel("$|f(z) - z| \\,/\\, |f(z)|$, mean")
        if series:
            panels[0, -1].legend(loc="lower right", frameon=False)
    return page


def draw_paths(axes: "Axes", one: Series) -> None:
    """The iterates of Anderson's method, a colour for each image, a dot where it ends."""
    for path, colour in zip(one["points"], COLOURS, strict=False):
        x, y = np.array(path).T
        axes.plot(x, y, color=colour, linewidth=0.6, marker=".", markersize=1.5)
        axes.plot(x[-1], y[-1], color=colour, marker="o", markersize=3.5)
    axes.plot(*one["points"][0][0], color="black", marker="+", markersize=6, zorder=4)
    share = [f"PC {i} ({100 * part:.0f}%)" for i, part in enumerate(one["explained"], 1)]
    axes.set(xlabel=share[0], ylabel=share[1])
    axes.grid(visible=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
