"""Table 8 of "Optimization induced equilibrium networks": unrolling of K steps against implicit differentiation.

The network has the layers of Tables 3 and 5, a deep OptEq of 199k parameters with alpha = 0.8 and no regulariser, on CIFAR-10.
Here a batch norm stands behind the extractor and one before the pooling; the paper's equations have none. It is trained once for
each way to find and differentiate the equilibrium: K = 5, 10, 20, 40 unrolled steps z <- f(z) from 0, or an equilibrium of
relative residual 1e-3 or 1e-2 with the implicit function theorem. The paper gives the accuracy, the seconds of 80 inferences and of
80 backward passes for batches of 125 images on a GPU, and the relative residual |f(z) - z| / |z| at the end, here that over |f(z)|
in the mean of the first 125 test images; `PAPER` has its numbers. There, the implicit way, by Broyden's method, is as accurate as
K = 20 and takes four times as long for inference, as long for the backward pass.

Here the times are medians over turns of one process on one thread, all ways one after the other in each turn, and the memory is the
most that is alive during a step of training. "Equal residual": of the network trained implicitly, the least K whose unrolling from
0 gets as far as the equilibrium that the solver gives; both then take a step of training with the same weights and batch. The
memory of implicit steps is also measured with the same weights at tolerances from 0.1 to 1e-6.

Run `opteq experiment opteq_table8 --preset small --data-dir DATA`. `small` has a part of the images, smaller maps (by the stride of
the first convolution) and fewer epochs. The weights begin as nn.Conv2d draws them; Muon moves them, and holds the root mean square
of their singular values at 0.6 at most. These settings are the third that were tried: with SGD and ||W|| <= 1 the residual was that
of rounding from K = 5 on (accuracies 45.7 to 45.9%); with SGD and free weights five steps left 2e-6 (48.4 to 49.3%), and an
implicit step took 1.2 times as long as the unrolling of equal residual, which had two or three steps.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opteq import recipes
from opteq.batch import norm
from opteq.data import Dataset
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments import _training
from opteq.experiments._claims import Measured, at_least, at_most, judged, ratios
from opteq.experiments._harness import Options, Result, command, gather, grid, table
from opteq.experiments._measuring import medians, one_thread, peak_bytes
from opteq.recipes import Data, Deep, Recipe, Solve
from opteq.training import TrainConfig, set_mode
from opteq.training.config import Optimizer, Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PAPER", "PRESETS", "WHY", "Config", "figure", "main", "run"]

NAME = "opteq_table8"
ABOUT = (__doc__ or "").split("\n")[0]
PAPER = {  # accuracy in %, seconds of 80 inferences, of 80 backward passes, residual
    "K = 5": (83.52, 1.3, 1.8, 1.2e-2),
    "K = 10": (87.28, 2.2, 3.3, 4.9e-3),
    "K = 20": (87.71, 3.9, 6.4, 4.8e-4),
    "K = 40": (87.83, 7.5, 12.7, 1.2e-5),
    "implicit, 1e-3": (87.63, 16.3, 6.7, 7.3e-4),
    "implicit, 1e-2": (85.95, 15.6, 1.3, 9.5e-3),
}
CLAIMS = {
    "accuracy": "More unrolled steps give a higher accuracy, as far as K = 20; a tolerance of 1e-3 a higher one than 1e-2.",
    "residual": "The residual of the trained network falls with K, and is below the tolerance where there is one.",
    "time": "Inference and backward pass of an unrolled network take the longer the larger K is.",
    "implicit_accuracy": "The implicit way with 1e-3 is about as accurate as K = 20: the difference is at most one percent point.",
    "equal_residual": "Beyond the paper: a step of training takes less time implicitly than by the unrolling of equal residual.",
    "memory": "Beyond the paper: the memory of an implicit step is that of few states, however many steps the solver makes.",
}
_QUICK = (
    "After 400 steps of training, on maps of 4 x 4, f forgets z sooner than in the paper, whose network was trained for 80,000 "
    "steps: five steps leave a residual of 7e-4, there 1.2e-2. "
)
WHY = {
    "accuracy": f"{_QUICK}So all networks compute nearly the same, and their accuracies differ by 0.8 points at most.",
    "residual": f"{_QUICK}It falls to 1e-6 at K = 10; at K = 20 and 40 it is that of rounding, 1.5e-7.",
    "memory": "The most that is alive depends on how many samples are done at the same step. With the same weights it is between "
    "15.1 and 16.9 MB at tolerances from 0.1 to 1e-6, most at 0.1 (where gradients of a step before are freed first, 0.8 MB "
    "less), and does not grow with the evaluations, 4 to 13 (last table); each unrolled step adds 4.5 MB.",
}
IMPLICIT = {"implicit, 1e-3": 1e-3, "implicit, 1e-2": 1e-2}
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class Config:
    """The sizes."""

    data: str = "cifar10"
    limit: int | None = None  # images for training
    tests: int | None = None  # test images
    hidden: tuple[int, ...] = (16, 32, 64, 128, 128)
    channels: int = 29
    stride: int = 2
    pool: int = 4
    depths: tuple[int, ...] = (5, 10, 20, 40)
    epochs: int = 200
    batch: int = 125
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    hold: float | None = None  # of muon: the root mean square of singular values that a kernel may have
    schedule: Schedule = "step"  # times 0.7 every 20 epochs
    repeats: int = 80  # of the timing


PRESETS = {
    "smoke": Config("digits", 100, None, (4, 8), 4, 1, 4, (1, 2), 1, 50, "muon", 0.02, 0.6, "onecycle", 1),
    "small": Config(
        limit=10_000, tests=5000, stride=8, epochs=5, optimizer="muon", lr=0.02, hold=0.6, schedule="onecycle", repeats=9
    ),
    "paper": Config(),
}

# --- the trainings --------------------------------------------------------------------------------------------------------------


def ways(config: Config) -> dict[str, Solve]:
    """How the equilibrium is found and differentiated, by the name of its row."""
    unrolled = {f"K = {depth}": Solve(gradient="unrolled", steps=depth) for depth in config.depths}
    return unrolled | {name: Solve(rtol=rtol) for name, rtol in IMPLICIT.items()}


def recipe(config: Config, solve: Solve, options: Options) -> Recipe:
    """The training of one network."""
    model = Deep(
        config.channels, config.hidden, stride=config.stride, pool=config.pool, alpha=0.8, constrained=False, draw="conv2d",
        solve=solve,
    )  # fmt: skip
    train = TrainConfig(
        epochs=config.epochs, batch_size=config.batch, optimizer=config.optimizer, lr=config.lr, weight_decay=6e-4,
        hold=config.hold, schedule=config.schedule, norms="off", clip=1.0, crop=0 if config.data == "digits" else 4,
        flip=config.data != "digits", least_converged=0.0, seed=options.seed,
    )  # fmt: skip
    return Recipe(Data(config.data, options.root, limit=config.limit, test_limit=config.tests), model, train)


def run(options: Options) -> Result:
    """The accuracy of each trained network, then its times, residual and memory."""
    config = PRESETS[options.preset]
    places = {name: f"{name}-seed{options.seed}" for name in ways(config)}
    trainings = {places[name]: recipe(config, solve, options) for name, solve in ways(config).items()}
    outcomes = grid(NAME, _training.train, _training.cells(NAME, trainings, options), options)
    scores = {name: outcomes[place].result or {"diverged": "failed"} for name, place in places.items()}
    trained = {name: found for name, found in scores.items() if "diverged" not in found}
    networks = {name: recipes.load_model(_training.run_folder(NAME, places[name], options)) for name in trained}
    with one_thread():
        rows, equal, memory = measured_rows(config, networks), equal_residuals(config, networks), memories(config, networks)
    for name, found in trained.items():
        rows[name]["accuracy"] = 100 * found["valid_accuracy"]
    return gather(
        NAME, options, judged(CLAIMS, judge(config, rows, equal)), outcomes=outcomes,
        series={"rows": rows, "equal": equal, "memory": memory},
        tables={
            "Measured (the paper's number)": compared(rows),
            "At equal residual, with the same weights": against(equal),
            "Memory of an implicit step over its tolerance, with the same weights": remembered(memory),
        },
        notes=[
            f"Times are those of {config.batch} images on one thread; the paper's are of 80 batches on a GPU.",
            "One training of each kind: the order of the accuracies has no error estimate.",
        ],
    )  # fmt: skip


# --- what is measured of the trained networks -----------------------------------------------------------------------------------

Networks: TypeAlias = Mapping[str, tuple[nn.Module, Dataset]]


def measured_rows(config: Config, networks: Networks) -> dict[str, dict[str, float]]:
    """Residual, seconds of an inference and of a backward pass, and bytes of a step of training, by row."""
    batches = {name: tuple(part[: config.batch] for part in dataset.test) for name, (_, dataset) in networks.items()}
    inference = {name: partial(infer, model, batches[name][0]) for name, (model, _) in networks.items()}
    backward = {name: partial(step, model, *batches[name]) for name, (model, _) in networks.items()}
    forward_seconds, backward_seconds = (medians(runs, config.repeats) for runs in (inference, backward))
    return {
        name: {
            "residual": residual(model, batches[name][0]),
            "inference": forward_seconds[name],
            "backward": backward_seconds[name],
            "bytes": peak_bytes(backward[name]),
        }
        for name, (model, _) in networks.items()
    }


@torch.no_grad()
def infer(model: nn.Module, x: Tensor) -> None:
    """An inference."""
    model(x)


def step(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """A step of training without its update; the seconds of the backward pass."""
    model.zero_grad()
    loss = cross_entropy(model(x), y)
    begun = perf_counter()
    loss.backward()
    return perf_counter() - begun


def whole_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The same, timed as a whole."""
    step(model, x, y)


@torch.no_grad()
def residual(model: Any, x: Tensor) -> float:
    """|f(z) - z| / |f(z)| at the z that the network takes for its equilibrium, the mean over the samples."""
    return float(model.solve(x).residual.mean())


@torch.no_grad()
def depth_for(model: Any, x: Tensor, residual: float, most: int = 1000) -> int:
    """The least number of steps z <- f(z) from 0 that end with such a residual, but no more than `most`."""
    cell, features = model.equilibrium.cell, model.features(x)
    fn, z = cell.bind(features), cell.initial(features)
    for depth in range(most):
        fz = fn(z)
        if depth and float((norm(fz - z) / norm(fz)).mean()) <= residual:
            return depth
        z = fz
    return most


def equal_residuals(config: Config, networks: Networks) -> dict[str, dict[str, float]]:
    """Of each network that was trained implicitly: the K of equal residual, and seconds and bytes of a step in both ways."""
    found = {}
    for name in filter(networks.__contains__, IMPLICIT):
        model, dataset = networks[name]
        x, y = dataset.test.x[: config.batch], dataset.test.y[: config.batch]
        depth = depth_for(model, x, residual(model, x))
        unrolled = deepcopy(model)
        set_mode(unrolled, "unrolled", depth)
        runs = {"implicit": partial(whole_step, model, x, y), "unrolled": partial(whole_step, unrolled, x, y)}
        seconds = medians(runs, config.repeats)
        found[name] = {
            "depth": depth,
            **{f"{way}_seconds": took for way, took in seconds.items()},
            **{f"{way}_bytes": peak_bytes(run) for way, run in runs.items()},
        }
    return found


def memories(config: Config, networks: Networks) -> dict[str, list[dict[str, float]]]:
    """Of each network that was trained implicitly: the evaluations of a solve, and the bytes of a step, over the tolerance."""
    return {name: [used(config, *networks[name], rtol) for rtol in TOLERANCES] for name in filter(networks.__contains__, IMPLICIT)}


def used(config: Config, model: Any, dataset: Dataset, rtol: float) -> dict[str, float]:
    """The same at one tolerance."""
    x, y = dataset.test.x[: config.batch], dataset.test.y[: config.batch]
    looser = deepcopy(model)
    looser.equilibrium.stop = replace(model.equilibrium.stop, rtol=rtol)
    with torch.no_grad():
        evals = looser.solve(x).evals
    return {"tolerance": rtol, "evaluations": evals, "bytes": peak_bytes(partial(whole_step, looser, x, y))}


# --- the claims -----------------------------------------------------------------------------------------------------------------


def judge(config: Config, rows: Mapping[str, Mapping[str, float]], equal: Mapping[str, Mapping[str, float]]) -> dict[str, Measured]:
    """What was measured for each claim; a network that is missing shows nothing."""

    def of(name: str, what: str) -> float:
        return rows.get(name, {}).get(what, math.nan)

    def growth(what: str) -> list[float]:
        return ratios([of(name, what) for name in unrolled])

    unrolled = [f"K = {depth}" for depth in config.depths]
    upto = [f"K = {depth}" for depth in config.depths if depth <= 20]
    rises = [of(b, "accuracy") - of(a, "accuracy") for a, b in pairwise(upto)]
    tight, loose = IMPLICIT
    return {
        "accuracy": {
            "rise of the accuracy from one K to the next, the least": at_least(rises, 0.0),
            "accuracy with 1e-3 less that with 1e-2": at_least(of(tight, "accuracy") - of(loose, "accuracy"), 0.0),
        },
        "residual": {
            "residual over that of the next smaller K, the largest": at_most(growth("residual"), 1.0),
            "residual over the tolerance, the largest": at_most([of(row, "residual") / tol for row, tol in IMPLICIT.items()], 1.0),
        },
        "time": {
            f"{what}: seconds over those of the next smaller K, the least": at_least(growth(what), 1.0)
            for what in ("inference", "backward")
        },
        "implicit_accuracy": {
            f"difference to the accuracy of {upto[-1]}": at_most(abs(of(tight, "accuracy") - of(upto[-1], "accuracy")), 1.0)
        },
        "equal_residual": {
            f"{name}: seconds of a step over those of the unrolling": at_most(slowness(equal.get(name)), 1.0) for name in IMPLICIT
        },
        "memory": {
            "bytes of a step with 1e-3 over those with 1e-2": at_most(of(tight, "bytes") / of(loose, "bytes"), 1.05),
            f"bytes of a step with 1e-3 over those of {unrolled[0]}": at_most(of(tight, "bytes") / of(unrolled[0], "bytes"), 1.0),
        },
    }


def slowness(one: Mapping[str, float] | None) -> float:
    """The time of an implicit step over that of the unrolling of equal residual."""
    return math.nan if one is None else one["implicit_seconds"] / one["unrolled_seconds"]


def compared(rows: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A row for each way, with the paper's numbers in brackets."""
    columns = ("", "accuracy in %", "inference in s", "backward in s", "residual", "MB of a step")
    formats = {"accuracy": ".2f", "inference": ".3f", "backward": ".3f", "residual": ".1e"}
    lines = []
    for name, row in rows.items():
        printed = PAPER.get(name, ("",) * 4)
        cells = [f"{row[key]:{form}} ({number})" for (key, form), number in zip(formats.items(), printed, strict=True)]
        lines.append([name, *cells, f"{row['bytes'] / 1e6:.0f}"])
    return table(columns, lines)


def against(equal: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Implicit differentiation against the unrolling that gets as far."""
    columns = ("", "K of equal residual", "step in s", "unrolled", "MB of a step", "unrolled ")
    return table(columns, [
        [name, int(one["depth"]), one["implicit_seconds"], one["unrolled_seconds"],
         one["implicit_bytes"] / 1e6, one["unrolled_bytes"] / 1e6]
        for name, one in equal.items()
    ])  # fmt: skip


def remembered(memory: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Evaluations and memory of both networks, by tolerance."""
    trained = [f"trained with {name.removeprefix('implicit, ')}" for name in memory]
    columns = ["tolerance", *(f"{network}: {what}" for network in trained for what in ("evaluations", "MB of a step"))]
    numbers = [[(one["evaluations"], one["bytes"] / 1e6) for one in points] for points in memory.values()]
    rows = zip(*numbers, strict=True)
    return table(columns, [[rtol, *chain.from_iterable(row)] for rtol, row in zip(TOLERANCES, rows, strict=bool(numbers))])


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """Accuracy against the seconds of inference and backward pass, and residual and memory against K."""
    rows = result["series"]["rows"]
    with new_figure((6.5, 2.6)) as page:
        panels = page.subplots(1, 3)
        for name, row in rows.items():
            colour, marker = (COLOURS[1], "s") if name in IMPLICIT else (COLOURS[0], "o")
            x = row["inference"] + row["backward"]
            for axes, value in zip(panels, (row["accuracy"], row["residual"], row["bytes"] / 1e6), strict=True):
                if value is not None:
                    axes.plot(x, value, marker, color=colour, markersize=4)
                    side = (-3, "right") if name == list(IMPLICIT)[-1] else (3, "left")  # these two points are close together
                    label(axes, name.replace("implicit, ", ""), (x, value), *side)
        for axes, quantity in zip(panels, ("accuracy in %", "relative residual", "MB of a step"), strict=True):
            axes.set(ylabel=quantity, xscale="log")
            axes.xaxis.set_minor_formatter("")
            axes.margins(x=0.35, y=0.15)
            axes.grid(visible=True)
        panels[1].set_yscale("log")
        panels[1].set_xlabel("seconds of an inference and a backward pass")
        panels[0].plot([], [], "o", color=COLOURS[0], markersize=4, label="unrolled")
        panels[0].plot([], [], "s", color=COLOURS[1], markersize=4, label="implicit")
        page.legend(loc="outside lower center", ncols=2)
    return page


def label(axes: Any, name: str, point: tuple[float, float], shift: float, side: str) -> None:
    """A name beside a point."""
    axes.annotate(name, point, xytext=(shift, 3), textcoords="offset points", fontsize=6, ha=side)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
