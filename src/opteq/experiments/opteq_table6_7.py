"""Tables 6 and 7 of "Optimization induced equilibrium networks": OptEq-Small and OptEq-Middle for ImageNet, sizes and accuracy.

Both networks are the first stages of a residual network, a deep OptEq of separable convolutions (five layers, or three of two such
convolutions each) and a head of two convolutions; Table 6 draws them, and `opteq.models` has what it draws. The paper trains them
on ImageNet for 300 epochs with AdamW, weight decay 0.05, the step 1e-3 falling as a cosine, batch 1024, K = 5 unrolled steps and
the decorrelation regulariser; `PAPER` has its accuracies. The equilibrium adds 5 percent points to what extractor and head reach
alone. Learned from 0.8 on, the alphas of OptEq-Small end near `ALPHAS`.

The printed sizes do not follow from the printed layers. The first table of the result has both, part by part: the extractors that
are described, of two stages with 28 x 28 x 512 numbers of an image of 224 x 224, have a sixth of the printed size, which is that of
three stages, with 14 x 14 x 1024 numbers; the head's leaves out its last linear map; the layers' is 2.6 times what their kernels
have, for both networks. What is trained here are the networks as they are drawn and described, with two stages.

Here the data are Imagenette64's, ten classes of ImageNet at 64 x 64: the accuracies are those of another task, the differences are
what can be compared. OptEq-Small has learned alphas, OptEq-Middle the fixed 0.8. Images are flipped at random. The paper prints
neither how the weights are drawn nor whether gradients are clipped: here U x begins about as long as x, ||W|| at 1/2, the step size
grows for half an epoch, and gradients are clipped at 1. Without these, OptEq-Middle ended two epochs with the loss of a guess.

Run `opteq experiment opteq_table6_7 --preset small --data-dir DATA`. `small` has four epochs, images of 32 x 32 and batches of 32.
Each of the four networks is one cell of the grid. There is one seed, so that the order of the accuracies has no estimate of its
error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from opteq import Equilibrium, Stop, models
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments import _training
from opteq.experiments._claims import Measured, at_least, at_most, judged, within
from opteq.experiments._harness import Options, Result, command, folder, gather, grid, table
from opteq.experiments._images import digit_classes
from opteq.models import Classifier, count_parameters
from opteq.recipes import Data, OpteqMid, OpteqSmall, Recipe, load_model
from opteq.runs import Run
from opteq.training import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "ALPHAS", "CLAIMS", "PAPER", "PRESETS", "WHY", "Config", "figure", "main", "run", "train"]

NAME = "opteq_table6_7"
ABOUT = (__doc__ or "").split("\n")[0]
SMALL, MID, SMALL_BARE, MID_BARE = "OptEq-Small", "OptEq-Middle", "its extractor and head", "the wide extractor and head"
PAPER = {SMALL: 76.7, SMALL_BARE: 71.2, MID: 78.3, MID_BARE: 73.4}  # top-1 accuracy in %; OptEq-Small with fixed alpha: 76.9
ALPHAS = (0.63, 0.72, 0.86, 0.9, 0.87)
PRINTED = {  # millions of parameters
    SMALL: {"extractor": 8, "equilibrium": 7, "head": 3, "total": 18},
    MID: {"extractor": 24, "equilibrium": 13, "head": 3, "total": 40},
}
READINGS = {
    "extractor": "three stages, cut to whole millions",
    "equilibrium": "2.6 times what the drawn kernels have",
    "head": "the head without its last linear map",
    "total": "the sum of the printed parts",
}
CLAIMS = {
    "small": "OptEq-Small is more accurate than its extractor with the head alone.",
    "mid": "OptEq-Middle is more accurate than its extractor with the head alone.",
    "larger": "OptEq-Middle is more accurate than OptEq-Small.",
    "alpha": "Learned from 0.8, the alphas of the first two layers fall and those of the last three grow.",
    "shapes": "Both extractors make 28 x 28 x 512 numbers of an image of 224 x 224.",
    "sizes": "OptEq-Small has 18M parameters and OptEq-Middle 40M.",
    "reading": "Beyond the paper: the printed extractors are those of three stages, the printed head is without its linear map.",
}
_EARLY = (
    "After four epochs of 9,469 images. The residual blocks, which have batch norms, learn faster than the layers of the "
    "equilibrium, which have none; that this is the cause was not tested. The paper has 300 epochs of 1.3 million images."
)
_CLOSER = "The gap closes: trainings of two, three and four epochs ended"
WHY = {
    "small": f"{_EARLY} {_CLOSER} 5.2, 3.8 and 2.8 points behind.",
    "mid": f"{_EARLY} {_CLOSER} 13.7, 11.2 and 10.1 points behind.",
    "larger": _EARLY,
    "alpha": "In four epochs the alphas move by at most 0.02 from 0.8, all of them down.",
    "sizes": "What Table 6 draws has fewer parameters, and no reading of it gives all the printed sizes: those of the extractors "
    "belong to three stages, which do not have the printed shape, and those of the layers are 2.6 times what their kernels have.",
}
BEGIN = 0.8  # alpha


@dataclass(frozen=True)
class Config:
    """The sizes."""

    data: str = "imagenette64"
    side: int = 32  # of the images
    networks: tuple[str, ...] = (SMALL, SMALL_BARE, MID, MID_BARE)
    epochs: int = 4
    batch: int = 32


PRESETS = {
    "smoke": Config("digits", 32, (SMALL, SMALL_BARE), 1, 8),
    "small": Config(),
    "paper": Config("imagenet", 224, epochs=300, batch=1024),
}

# --- sizes and shapes -----------------------------------------------------------------------------------------------------------


def drawn(name: str, stages: int) -> Classifier:
    """A network for ImageNet, without numbers in it."""
    with torch.device("meta"):
        return {SMALL: models.opteq_small, MID: models.opteq_mid}[name](stages=stages)


def sizes(networks: Mapping[str, Mapping[int, Classifier]]) -> dict[str, Any]:
    """Millions of parameters of each part of each network, by the stages of its extractor."""
    return {
        name: {f"{stages} stages": millions(network) for stages, network in by_stages.items()}
        for name, by_stages in networks.items()
    }


def millions(network: Classifier) -> dict[str, float]:
    """Of parameters, part by part."""
    counts = count_parameters(network)
    last = count_parameters(list(network.head.children())[-1])["total"]
    return {part: count / 1e6 for part, count in counts.items()} | {"head without linear map": (counts["head"] - last) / 1e6}


def shapes(network: Classifier, side: int = 224) -> list[list[int]]:
    """What the network makes of an image of side x side, from part to part: channels, height and width."""
    assert isinstance(network.equilibrium, Equilibrium)
    x = torch.empty(1, 3, side, side, device="meta")
    g = network.extractor(x)
    z = network.equilibrium.cell.initial(g)
    return [list(part.shape[1:]) for part in (x, g, z, network.head(z))]


# --- the trainings --------------------------------------------------------------------------------------------------------------


def network(name: str) -> OpteqSmall | OpteqMid:
    """The model of a row."""
    kind = OpteqSmall if name in (SMALL, SMALL_BARE) else OpteqMid
    return kind(alpha=BEGIN, learn_alpha=name == SMALL, regularizer="decorrelation", equilibrium=name in PRINTED)


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Scores, size and time of a training, the alphas after each epoch, and how the equilibria of some test images converge."""
    scores = _training.train(settings)
    if "diverged" in scores:
        return scores
    model, dataset = load_model(settings["folder"])
    assert isinstance(model, Classifier)
    some = dataset.test.x[torch.arange(min(32, len(dataset.test)))]
    alphas = [list(row["alpha"].values()) for row in Run.read(settings["folder"]).metrics() if "alpha" in row]
    return {**scores, "alphas": alphas, **convergence(model, some)}


@torch.no_grad()
def convergence(model: Classifier, x: torch.Tensor) -> dict[str, float]:
    """The mean residual after K steps, and the mean steps of the default solver to 1e-3 (30 at most), if it has an equilibrium."""
    if not isinstance(model.equilibrium, Equilibrium):
        return {}
    g = model.features(x)
    exact = Equilibrium(model.equilibrium.cell, stop=Stop(rtol=1e-3, max_steps=30), on_failure="ignore").eval()
    solution = exact.solve(g)
    return {
        "residual": float(model.equilibrium.solve(g).residual.mean()),
        "steps_needed": float(solution.steps.float().mean()),
        "solved": float(solution.converged.float().mean()),
    }


def run(options: Options) -> Result:
    """Sizes and shapes of the networks, and the accuracy of each on the test images."""
    config = PRESETS[options.preset]
    training = TrainConfig(
        epochs=config.epochs, batch_size=config.batch, optimizer="adamw", lr=1e-3, weight_decay=0.05, schedule="cosine", flip=True,
        warmup=0.5, clip=1.0, seed=options.seed, least_converged=0.0, norms="off", keep=1,
    )  # fmt: skip
    cells = {name: f"{name}-seed{options.seed}" for name in config.networks}
    trainings = {cell: Recipe(images(config, options), network(name), training) for name, cell in cells.items()}
    outcomes = grid(NAME, train, _training.cells(NAME, trainings, options), options)
    rows = {name: outcomes[cell].result or {} for name, cell in cells.items()}
    networks = {name: {stages: drawn(name, stages) for stages in (2, 3)} for name in PRINTED}
    counted, paths = sizes(networks), {name: shapes(by_stages[2]) for name, by_stages in networks.items()}
    tables = {
        "Millions of parameters": size_table(counted),
        "Shapes of one image, as drawn": table(["network", "image", "extractor", "equilibrium", "logits"], shape_rows(paths)),
        "Accuracy on the test images in %; the paper's on ImageNet": accuracy_table(rows),
        "Learned alphas of OptEq-Small": alpha_table(rows),
    }
    notes = [
        *([] if config.data == "imagenet" else ["Imagenette64 in the place of ImageNet."]),
        "OptEq-Small with learned alphas, OptEq-Middle with alpha = 0.8.",
        "One seed: the order of the accuracies has no estimate of its error.",
    ]
    series = {"sizes": counted, "shapes": paths, "rows": rows}
    claims = judged(CLAIMS, judge(counted, paths, rows))
    return gather(NAME, options, claims, outcomes=outcomes, tables=tables, series=series, notes=notes)


def images(config: Config, options: Options) -> Data:
    """The data set of the preset; that of smoke has files like Imagenette64's, made of digits."""
    if config.data == "digits":
        root = digit_classes(folder(NAME, options).absolute() / "data", side=config.side, count=config.batch)
        return Data("imagenette64", root, size=config.side)
    return Data(config.data, options.root, size=config.side)


# --- what it shows --------------------------------------------------------------------------------------------------------------


def judge(counted: Mapping[str, Any], paths: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Measured | str]:
    """What was measured for each claim."""

    def better(name: str, other: str) -> Measured:
        gain = accuracy(rows, name) - accuracy(rows, other)
        return {f"accuracy of {name} less that of {other}, in percent points": at_least(gain, 0.0)}

    alphas = last_alphas(rows)
    return {
        "small": better(SMALL, SMALL_BARE),
        "mid": better(MID, MID_BARE),
        "larger": better(MID, SMALL),
        "alpha": {
            "the largest of the first two alphas": at_most(alphas[:2], BEGIN),
            "the least of the last three": at_least(alphas[2:], BEGIN),
        },
        "shapes": {
            f"{name}, {what}": within(value, wanted, wanted)
            for name, path in paths.items()
            for what, value, wanted in zip(("channels", "height", "width"), path[1], (512, 28, 28), strict=True)
        },
        "sizes": {
            f"{name}, millions": within(counted[name]["2 stages"]["total"], printed["total"] - 0.5, printed["total"] + 0.5)
            for name, printed in PRINTED.items()
        },
        "reading": readings(counted),
    }


def readings(counted: Mapping[str, Any]) -> Measured:
    """How the printed sizes of the parts may come about."""
    found = {}
    for name, printed in PRINTED.items():
        extractor, head = counted[name]["3 stages"]["extractor"], counted[name]["2 stages"]["head without linear map"]
        found[f"{name}, extractor of three stages"] = within(extractor, printed["extractor"], printed["extractor"] + 1)
        found[f"{name}, head without its linear map"] = within(head, printed["head"] - 0.5, printed["head"] + 0.5)
    return found


def accuracy(rows: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """On the test images in %; NaN where it is not known."""
    value = rows.get(name, {}).get("valid_accuracy")
    return float("nan") if value is None else 100 * value


def last_alphas(rows: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Those of OptEq-Small after its training; NaN where they are not known."""
    found = rows.get(SMALL, {}).get("alphas") or [[float("nan")] * len(ALPHAS)]
    return [float(alpha) for alpha in found[-1]]


def size_table(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Part by part: printed, as drawn, with a stage more, and what explains the printed number."""
    columns = ["part", "printed", "as drawn, two stages", "with three stages", "the printed number is"]
    return table(
        columns,
        [
            [f"{name}, {part}", printed, counted[name]["2 stages"][part], counted[name]["3 stages"][part], READINGS[part]]
            for name, parts in PRINTED.items()
            for part, printed in parts.items()
        ],
    )


def shape_rows(paths: Mapping[str, Sequence[Sequence[int]]]) -> list[list[str]]:
    """The shapes in words."""
    return [[name, *(" x ".join(map(str, shape)) for shape in path)] for name, path in paths.items()]


def accuracy_table(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The accuracies, the sizes for these classes, the time, and how the equilibria converge."""
    columns = [
        "network", "accuracy", "paper", "training loss", "parameters", "seconds", "residual, K = 5", "steps to 1e-3", "solved",
    ]  # fmt: skip
    others = ("train_loss", "parameters", "seconds", "residual", "steps_needed", "solved")
    return table(columns, [[name, accuracy(rows, name), PAPER[name], *map(row.get, others)] for name, row in rows.items()])


def alpha_table(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The alphas, layer by layer."""
    pairs = zip(last_alphas(rows), ALPHAS, strict=True)
    return table(["layer", "here", "paper"], [[str(i), *pair] for i, pair in enumerate(pairs, start=1)])


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """Sizes by part, accuracies, and learned alphas."""
    series = result["series"]
    with new_figure((6.3, 2.9)) as page:
        size, score, alpha = page.subplots(1, 3, width_ratios=(1.25, 1.1, 1))
        draw_sizes(size, series["sizes"])
        names = list(series["rows"])
        bars = [accuracy(series["rows"], name) for name in names]
        score.bar(range(len(names)), bars, color=[COLOURS[0] if name in PRINTED else COLOURS[5] for name in names])
        ticks = [name if name in PRINTED else "extractor\nand head" for name in names]
        score.set_xticks(range(len(names)), ticks, rotation=60)
        score.set_title("test accuracy, %", loc="left")
        layers = range(1, len(ALPHAS) + 1)
        alpha.plot(layers, last_alphas(series["rows"]), "o-", color=COLOURS[0], label="here")
        alpha.plot(layers, ALPHAS, "s--", color=COLOURS[1], label="paper")
        alpha.axhline(BEGIN, color="grey", linewidth=0.6)
        alpha.set(xlabel="layer", xticks=layers)
        alpha.set_title(r"learned $\alpha$", loc="left")
        alpha.legend()
        for axes in (size, score, alpha):
            axes.grid(visible=True, axis="y")
            axes.set_axisbelow(True)
    return page


def draw_sizes(axes: Any, counted: Mapping[str, Any]) -> None:
    """Stacked bars: printed, with two and with three stages, for both networks."""
    bars = [(f"{name}\n{label}", parts) for name in PRINTED for label, parts in {"printed": PRINTED[name], **counted[name]}.items()]
    below = [0.0] * len(bars)
    for colour, part in zip(COLOURS, ("extractor", "equilibrium", "head"), strict=False):
        heights = [parts[part] for _, parts in bars]
        axes.bar(range(len(bars)), heights, bottom=below, color=colour, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(bars)), [label for label, _ in bars], rotation=60)
    axes.set_title("million parameters", loc="left")
    axes.legend(loc="upper left")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
