"""Table 10 of "Optimization induced equilibrium networks": segmentation by a deep OptEq and by an FCN of like size.

A deep OptEq of three layers with 256, 512 and 512 channels inside is the backbone; the paper compares it with a fully convolutional
network "with a similar number of parameters" on Cityscapes: SGD with momentum 0.9, weight decay 1e-3, the step 0.01 (1 - t)^0.9,
40,000 iterations, batch 8. `PAPER` has its numbers: the mean over the classes of intersection over union, the mean accuracy of the
classes, and the accuracy of all pixels; the OptEq is better in all three.

Nothing else is in the paper's text. Here, both networks begin with three strided 3 x 3 convolutions of 64, 128 and 256 channels and
end with scores at each of their pixels, enlarged to those of the image; the FCN has three 3 x 3 convolutions in the place of the
equilibrium, in the proportions 1 : 2 : 2 and as wide as the number of parameters allows. The equilibrium is differentiated
implicitly, at the relative residual 1e-3; images are flipped at random. The data are CamVid's: 367 images for training, 233 for the
test, 11 classes. Pixels without a class do not count.

Run `opteq experiment opteq_table10 --preset small --data-dir DATA`. `small` has fewer iterations and smaller images (and so smaller
maps), which are also those that are scored; two seeds. Each network with each seed is one cell of the grid. A difference between
the networks is a mean over the seeds, and counts only if it exceeds two standard errors; with one seed it has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from opteq import models
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments import _training
from opteq.experiments._claims import Measured, at_least, clear_gain, column, gain, judged, mean_error
from opteq.experiments._harness import Options, Result, command, folder, gather, grid, table
from opteq.experiments._images import digit_maps
from opteq.models import count_parameters
from opteq.recipes import Data, Fcn, Recipe, Segmenter, Solve
from opteq.training import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PAPER", "PRESETS", "WHY", "Config", "figure", "main", "run"]

NAME = "opteq_table10"
ABOUT = (__doc__ or "").split("\n")[0]
OPTEQ, FCN = "deep OptEq", "FCN"
SCORES = {"miou": "mean IoU", "mean_accuracy": "mean accuracy", "accuracy": "accuracy of pixels"}
PAPER = {  # in %, on Cityscapes
    OPTEQ: {"miou": 74.47, "mean_accuracy": 81.91, "accuracy": 95.93},
    FCN: {"miou": 71.47, "mean_accuracy": 79.23, "accuracy": 95.56},
}
CLAIMS = {
    "miou": "The deep OptEq has a higher mean intersection over union than the FCN of like size.",
    "mean_accuracy": "It has a higher mean accuracy of the classes.",
    "accuracy": "It has a higher accuracy over all pixels.",
}


@dataclass(frozen=True)
class Config:
    """The sizes."""

    data: str = "camvid"
    size: tuple[int, int] | None = (60, 80)  # of the images; None: as they are
    channels: tuple[int, ...] = (64, 128, 256)
    hidden: tuple[int, ...] = (256, 512, 512)
    epochs: int = 10  # of 46 iterations each on CamVid
    batch: int = 8
    seeds: int = 2
    rtol: float = 1e-3
    steps: int = 30  # of the solver, at most


_EARLY = (
    "After the ten epochs of `small` the FCN is {} percent points ahead, {} standard errors of two seeds, which tells little. Its "
    "training loss falls faster. The paper trains both for 40,000 iterations, on Cityscapes."
)
WHY = {
    "miou": _EARLY.format(0.7, 2.2),
    "mean_accuracy": _EARLY.format(0.7, 1.9),
    "accuracy": _EARLY.format(0.4, 1.6),
}
PRESETS = {
    "smoke": Config("digits", (16, 16), (4, 8), (4, 8, 8), 1, 8, 1),
    "small": Config(),
    "paper": Config(size=None, epochs=870, seeds=1),
}

# --- the trainings --------------------------------------------------------------------------------------------------------------


def networks(config: Config) -> dict[str, Segmenter | Fcn]:
    """Both, by the name of their row."""
    with torch.device("meta"):  # for its size alone
        opteq = models.opteq_segmenter(3, 11, channels=config.channels, hidden=config.hidden)
    solve = Solve(rtol=config.rtol, max_steps=config.steps)
    return {
        OPTEQ: Segmenter(config.channels, config.hidden, constrained=False, solve=solve),
        FCN: Fcn(config.channels, config.hidden, parameters=count_parameters(opteq)["total"]),
    }


def run(options: Options) -> Result:
    """The scores of both networks on the test images, with each seed."""
    config = PRESETS[options.preset]
    seeds = range(options.seed, options.seed + config.seeds)
    trainings = {
        f"{name}-seed{seed}": Recipe(images(config, options), network, training(config, seed))
        for seed in seeds
        for name, network in networks(config).items()
    }
    outcomes = grid(NAME, _training.train, _training.cells(NAME, trainings, options), options)
    by_network = {name: [outcomes[f"{name}-seed{seed}"].result for seed in seeds] for name in PAPER}
    scores = {name: {key: [score(one, key) for one in found] for key in SCORES} for name, found in by_network.items()}
    return gather(
        NAME, options, judged(CLAIMS, judge(scores)), outcomes=outcomes,
        tables={"Scores on the test images in %, with standard errors": compared(scores, by_network)},
        series={"scores": scores, "curves": {name: [curves(one) for one in found] for name, found in by_network.items()}},
        notes=["CamVid in the place of Cityscapes; scored at the size of the images that are given.", note(config)],
    )  # fmt: skip


def images(config: Config, options: Options) -> Data:
    """CamVid; the smoke preset makes such files of digits."""
    if config.data == "digits":
        return Data("camvid", digit_maps(folder(NAME, options).absolute() / "data", side=16, count=16), size=config.size)
    return Data(config.data, options.root, size=config.size)


def training(config: Config, seed: int) -> TrainConfig:
    """As the paper has it."""
    return TrainConfig(
        epochs=config.epochs, batch_size=config.batch, optimizer="sgd", lr=0.01, momentum=0.9, weight_decay=1e-3, schedule="poly",
        power=0.9, flip=True, seed=seed, least_converged=0.0, norms="off",
    )  # fmt: skip


# --- what it shows --------------------------------------------------------------------------------------------------------------


def note(config: Config) -> str:
    """How far the differences can be trusted."""
    if config.seeds == 1:
        return "One seed: the differences have no estimate of their error."
    return f"{config.seeds} seeds only: differences are between trainings of the same seed, and must reach 2 standard errors."


def score(result: Mapping[str, Any] | None, key: str) -> float:
    """On the test images, in %; NaN where the training failed or diverged."""
    value = (result or {}).get(f"test_{key}")
    return float("nan") if value is None else 100 * value


def curves(result: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """What the result keeps of a training, epoch by epoch; empty where it failed."""
    known = (result or {}).get("curves", {})
    return {name: column(known, name) for name in ("epoch", "valid_miou", "train_loss", "solver_steps") if name in known}


def judge(scores: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Measured | str]:
    """By how much each score is higher, in standard errors; in percent points where there is one seed."""

    def better(title: str, opteq: Sequence[float], fcn: Sequence[float]) -> Measured:
        if len(opteq) > 1:
            return {f"{title}, OptEq less FCN, in standard errors": clear_gain((opteq, fcn))}
        return {f"{title}, OptEq less FCN, in percent points, without error": at_least(gain(opteq, fcn)[0], 0.0)}

    return {key: better(title, scores[OPTEQ][key], scores[FCN][key]) for key, title in SCORES.items()}


def compared(
    scores: Mapping[str, Mapping[str, Sequence[float]]], results: Mapping[str, Sequence[Mapping[str, Any] | None]]
) -> dict[str, Any]:
    """The table, with the paper's numbers."""
    columns = ["network", "parameters", *(part for title in SCORES.values() for part in (title, "error", "paper")), "seconds"]
    rows = []
    for name, by_score in scores.items():
        first = results[name][0] or {}
        cells = [part for key in SCORES for part in (*mean_error(by_score[key]), PAPER[name][key])]
        rows.append([name, first.get("parameters"), *cells, first.get("seconds")])
    return table(columns, rows)


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """Mean IoU on the validation images and training loss by epoch, a line for each seed; and the test scores."""
    series = result["series"]
    titles = {"valid_miou": "mean IoU, validation", "train_loss": "training loss"}
    with new_figure((6.3, 2.6)) as page:
        *panels, last = page.subplots(1, 3)
        for axes, (key, title) in zip(panels, titles.items(), strict=True):
            for colour, (name, runs) in zip(COLOURS, series["curves"].items(), strict=False):
                for k, one in enumerate(runs):
                    axes.plot(one.get("epoch", []), one.get(key, []), ".-", color=colour, label=None if k else name)
            axes.set(xlabel="epoch")
            axes.set_title(title, loc="left")
            axes.grid(visible=True)
        for i, (colour, (name, scores)) in enumerate(zip(COLOURS, series["scores"].items(), strict=False)):
            heights, errors = zip(*(mean_error(scores[key]) for key in SCORES), strict=True)
            places = [place + 0.4 * i - 0.2 for place in range(len(SCORES))]
            last.bar(places, heights, yerr=errors, width=0.38, color=colour, label=name)
        last.set(xticks=range(len(SCORES)), xticklabels=["mean\nIoU", "mean\naccuracy", "pixel\naccuracy"])
        last.set_title("test images, %", loc="left")
        last.grid(visible=True, axis="y")
        last.set_axisbelow(True)
        page.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
