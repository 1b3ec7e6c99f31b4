"""`opteq train`."""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opteq.cli.common import console, parse, table
from opteq.cli.processes import agree, process_group
from opteq.grids import safe_name
from opteq.models import count_parameters
from opteq.recipes import Data, Deep, Model, Recipe, build, probe, run
from opteq.runs import Run
from opteq.training import LostProcessError, Result, TensorBoard, TrainConfig

__all__ = ["train"]


@dataclass(frozen=True)
class Train:
    """Train a model on a data set, in a run folder: configuration, metrics, checkpoints, the trained weights.

    $ opteq train deep --data.name digits --train.epochs 8 --train.lr 0.01
    $ opteq train deep --channels 29 --hidden 16 32 64 64 128 --data.name cifar10 --train.crop 4 --train.flip --dry-run
    $ opteq train --resume runs/digits-deep-1
    $ torchrun --nproc-per-node 2 -m opteq train deep --data.name cifar10

    The model is one of the subcommands below; `opteq train MODEL --help` shows its options. A training that is killed, at any
    moment, goes on with --resume, to the same result.
    """

    model: Model = field(default_factory=Deep)
    data: Data = field(default_factory=Data)
    train: TrainConfig = field(default_factory=TrainConfig)
    folder: Path | None = None
    """The run folder, a new one; by default runs/DATA-MODEL-N with the first N that is free."""
    resume: Path | None = None
    """Go on with the run in this folder; all settings are those of its config.json."""
    config: Path | None = None
    """A JSON file with all settings, such as the config.json of a run; further options change them."""
    dry_run: bool = False
    """Print the settings as JSON, the shapes of the data and the parameters of each part; train nothing."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard, too."""
    quiet: bool = False
    """No progress."""


def train(arguments: Sequence[str]) -> int:
    """Train, resume, or only show what would be trained."""
    options: Train = parse(Train, "train", arguments, _defaults(arguments))
    recipe = Recipe(options.data, options.model, options.train)
    if options.dry_run:
        return show(recipe)
    with process_group(recipe.train.device) as world:
        folder = options.resume or options.folder or Path(agree(world, str(_free_folder(recipe))))
        told = [TensorBoard(folder / "tensorboard")] if options.tensorboard and world.first else []
        try:
            result = run(recipe, folder, resume=options.resume is not None, callbacks=told, verbose=not options.quiet)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; go on with: opteq train --resume {shlex.quote(str(folder))}") from None
        except LostProcessError as error:
            raise LostProcessError(f"{error} The run folder is {folder}.") from error
        if world.first:
            summarize(result, folder)
    return 0


def _defaults(arguments: Sequence[str]) -> Train | None:
    """What is not given is as in the run to be resumed, or in the file of --config."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--resume", "--config", "--folder"):
        parser.add_argument(name, nargs="?")
    given, _ = parser.parse_known_args(list(arguments))
    if given.resume and (given.config or given.folder):
        raise ValueError("--resume takes everything from the run folder: leave --config and --folder out.")
    if given.resume:
        recipe = Recipe.of_run(given.resume)
    elif given.config:
        recipe = Recipe.read(given.config)
    else:
        return None
    return Train(recipe.model, recipe.data, recipe.train)


def _free_folder(recipe: Recipe) -> Path:
    """runs/DATA-MODEL-N with the first N that is free."""
    n = 1
    while (folder := Path("runs") / f"{safe_name(recipe.data.name)}-{recipe.kind}-{n}").exists():
        n += 1
    return folder


def show(recipe: Recipe) -> int:
    """Print the settings as JSON, with what they come to; and a table of that for people, where errors go."""
    dataset = recipe.data.load()
    model = build(recipe, dataset)
    output = probe(recipe, dataset, model)
    counts = count_parameters(model)
    parts = {"train": dataset.train, "valid": dataset.valid, "test": dataset.test}
    shapes = {name: [len(part), *part.x.shape[1:]] for name, part in parts.items() if part is not None}
    about = {"parameters": counts, "shapes": {**shapes, "output": list(output.shape[1:])}, "classes": len(dataset.classes)}
    print(json.dumps({**recipe.to_json(), "about": about}, indent=2))
    rows = [*((f"data, {name}", _shape(shape)) for name, shape in shapes.items()), ("output", f"[{_shape(output.shape[1:])}]")]
    rows += [(f"parameters, {name}", f"{count:,}") for name, count in counts.items()]
    console(stderr=True).print(table(f"{recipe.kind} on {recipe.data.name} (dry run)", ("", ""), rows))
    return 0


def _shape(shape: Any) -> str:
    return " x ".join(f"{side:,}" for side in shape)


def summarize(result: Result, folder: Path) -> None:
    """What came of a training, and what to do next."""
    facts = Run.read(folder).read_json("result.json")
    ended = f"stopped early ({result.stopped})" if result.stopped else "finished"
    rows = [("ended", f"{ended} after {result.epochs} epochs, {result.steps} steps, {result.seconds:.1f} s")]
    rows += [(name.replace("_", " "), _figure(name, value)) for name, value in facts.items() if _is_score(name)]
    rows.append(("parameters", f"{facts['parameters']['total']:,}"))
    if result.rollbacks:
        rows.append(("roll-backs", str(result.rollbacks)))
    out = console()
    out.print(table(f"{folder}", ("", ""), rows))
    name = shlex.quote(str(folder))
    out.print(f"Next: opteq diagnose {name}    opteq report {name}    opteq landscape {name} --steps 21", soft_wrap=True)


def _is_score(name: str) -> bool:
    return name.startswith(("train_", "valid_", "test_"))


def _figure(name: str, value: float) -> str:
    share = name.endswith(("accuracy", "miou", "converged"))
    return f"{value:.2%}" if share else f"{value:.4g}"
