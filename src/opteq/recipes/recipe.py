"""A recipe: data, model and training as settings; run it in a folder, resume it, load what it trained."""

import json
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from opteq.data import Dataset
from opteq.equilibrium import ConvergenceWarning
from opteq.models import Classifier, Standardize
from opteq.models import Segmenter as SegmenterNetwork
from opteq.recipes.data import Data
from opteq.recipes.fields import RecipeError, check_names, decode, encode
from opteq.recipes.inputs import standardization, unstandardized
from opteq.recipes.kinds import Deep, Dense, Gaussian, Monotone, MonotoneConv, Repeat, Residual, ScaledRelu, Wide
from opteq.recipes.others import Fcn, FeedForward, MdeqSmall, Multiscale, Ode, OpteqMid, OpteqSmall, Segmenter
from opteq.recipes.stating import statement
from opteq.runs import Checkpoint, Run, RunError, RunWarning, formats, write_atomic
from opteq.training import Callback, Objective, Result, TrainConfig, World, evaluate, fit, set_mode
from opteq.training.config import OPERATIONAL

__all__ = ["KINDS", "Model", "Recipe", "build", "load_model", "load_stages", "probe", "run", "write_statement"]

Model: TypeAlias = (
    Deep
    | Dense
    | Wide
    | Monotone
    | MonotoneConv
    | Residual
    | Repeat
    | Multiscale
    | FeedForward
    | Ode
    | Segmenter
    | Fcn
    | OpteqSmall
    | OpteqMid
    | MdeqSmall
    | Gaussian
    | ScaledRelu
)

KINDS: dict[str, type[Any]] = {
    "deep": Deep,
    "dense": Dense,
    "wide": Wide,
    "monotone": Monotone,
    "monotone-conv": MonotoneConv,
    "residual": Residual,
    "repeat": Repeat,
    "multiscale": Multiscale,
    "feed-forward": FeedForward,
    "ode": Ode,
    "segmenter": Segmenter,
    "fcn": Fcn,
    "opteq-small": OpteqSmall,
    "opteq-mid": OpteqMid,
    "mdeq-small": MdeqSmall,
    "gaussian": Gaussian,
    "scaled-relu": ScaledRelu,
}
"""The models by the names that JSON and the command have for them."""

_FREE = {*(f"train.{name}" for name in OPERATIONAL), "data.root", "data.verify", "data.download"}


@dataclass(frozen=True)
class Recipe:
    """All that a training is made of. As JSON it is the config.json of a run folder."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Deep)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, Repeat) and self.train.mode != "own":
            raise RecipeError(f"train.mode must be 'own' for repeat, whose depth is its own. Got {self.train.mode!r} instead.")

    @property
    def kind(self) -> str:
        """The name of the model."""
        return next(name for name, kind in KINDS.items() if type(self.model) is kind)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the model has one field more, its kind."""
        model = {"kind": self.kind, **encode(self.model)}
        return {"data": encode(self.data), "model": model, "train": encode(self.train)}

    @classmethod
    def from_json(cls, config: Any) -> "Recipe":
        """The recipe that `to_json` gave. RecipeError, in one line with the place, if it is anything else."""
        if not isinstance(config, Mapping):
            raise RecipeError(f"A configuration must be an object with data, model and train. Got {type(config).__name__} instead.")
        check_names(config, ("data", "model", "train"), "")
        model = config["model"]
        kind = model.get("kind") if isinstance(model, Mapping) else None
        if not isinstance(kind, str) or kind not in KINDS:
            raise RecipeError(f"model.kind must be one of {', '.join(KINDS)}. Got {reprlib.repr(kind)} instead.")
        settings = decode(KINDS[kind], {name: value for name, value in model.items() if name != "kind"}, "model")
        return cls(decode(Data, config["data"], "data"), settings, decode(TrainConfig, config["train"], "train"))

    @classmethod
    def read(cls, path: str | Path) -> "Recipe":
        """The recipe in a JSON file: one of your own, the config.json of a run, or what a dry run printed."""
        if Path(path).is_dir():
            raise RecipeError(f"{path} is a folder: give a file, such as the config.json of a run.")
        try:
            config = json.loads(Path(path).read_bytes())
            return cls.from_json(_settings(config) if isinstance(config, dict) else config)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{path} is not JSON: {error}") from error

    @classmethod
    def of_run(cls, folder: str | Path) -> "Recipe":
        """The recipe of a run folder."""
        config = _settings(Run.read(folder).config)
        if not {"data", "model"} <= config.keys():
            raise RunError(f"{folder} was not made from a recipe (no data and model in its config.json): go on with it from Python")
        try:
            return cls.from_json(config)
        except RecipeError as error:
            raise RunError(f"{Path(folder) / 'config.json'}: {error}") from error


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what runs and dry runs note beside it."""
    return {name: value for name, value in config.items() if name not in ("about", "fingerprint")}


def build(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """The network of a recipe, its weights drawn from train.seed; the caller's random numbers are left alone."""
    return _built(recipe, dataset, standardization)


def _built(recipe: Recipe, dataset: Dataset, standardize: Callable[[Dataset], Standardize]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.train.seed)  # those of GPUs are not forked, and stay as they are
        model = recipe.model.build(dataset)
    if recipe.data.standardize and isinstance(model, (Classifier, SegmenterNetwork)):
        model.standardize = standardize(dataset)
    return model


def probe(recipe: Recipe, dataset: Dataset, model: nn.Module) -> Tensor:
    """The output for two samples, if the model can take them and it fits the targets; ValueError otherwise."""
    x, y = dataset.train.x[torch.arange(min(2, len(dataset.train)))], dataset.train.y[:2]
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # before the training, it says little
            output: Tensor = model.eval()(x)
    except (RuntimeError, ValueError, TypeError) as error:
        shape = list(x.shape[1:])
        raise ValueError(f"The model {recipe.kind} cannot take the samples of {dataset.name}, of shape {shape}: {error}") from error
    finally:
        model.train(training)
    Objective(ignore=dataset.ignore).check(output, y)
    return output


def run(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback | Callable[[int], Any]] = (),
    state: bool = True,
    verbose: bool = True,
) -> Result:
    """Train what the recipe says in a run folder, or go on with the run in it; then add what the model is to the folder.

    A recipe to resume must be that of the run, but for the folder of the data and settings that do not change the result.
    `state=False` leaves out the problem that the equilibrium solves: upper bounds of norms belong to it, and take minutes where
    there are hundreds of channels. `write_statement` adds it later.
    """
    about = recipe.to_json()
    if resume:
        stored = Recipe.of_run(folder).to_json()
        if changes := [change for change in _changes(stored, about) if change.partition(":")[0] not in _FREE]:
            raise RunError(f"{folder} has another configuration ({'; '.join(changes)}): undo the changes, or start a new run")
        about = stored
    dataset = recipe.data.load()
    model = build(recipe, dataset)
    valid = dataset.test if dataset.valid is None else dataset.valid
    about = {name: about[name] for name in ("data", "model")}
    result = fit(
        model, dataset.train, valid, recipe.train, ignore=dataset.ignore, folder=folder, resume=resume, about=about,
        callbacks=callbacks, verbose=verbose,
    )  # fmt: skip
    if World.here(torch.device("cpu")).first:
        _describe(model, dataset, Path(folder), state=state)
    return result


def _changes(*configs: dict[str, Any]) -> Iterator[str]:
    """The settings that differ, "train.lr: 0.1 -> 0.2"."""
    kinds = [config["model"]["kind"] for config in configs]
    if kinds[0] != kinds[1]:  # the other settings are of another model
        configs = tuple({**config, "model": {"kind": kind}} for config, kind in zip(configs, kinds, strict=True))
    old, new = (formats.encode(config, "config") for config in configs)
    return formats.differences(old, new)


def _describe(model: nn.Module, dataset: Dataset, folder: Path, *, state: bool) -> None:
    """Write the score on the test data, where it is not the validation's, and `state` the problem that the equilibrium solves."""
    if dataset.valid is not None:
        scores = evaluate(model, *dataset.test, objective=Objective(ignore=dataset.ignore))
        with Run.open(folder) as run:
            run.write("result.json", run.read_json("result.json") | {f"test_{name}": value for name, value in scores.items()})
    if state:
        write_statement(model, folder)


def write_statement(model: nn.Module, folder: str | Path) -> None:
    """Write what the equilibrium solves into a run folder, for readers as problem.txt and for the report as problem.json."""
    if (found := statement(model)) is not None:
        write_atomic(Path(folder) / "problem.txt", f"{found}\n")
        write_atomic(Path(folder) / "problem.json", formats.pretty(found.to_json(), "problem.json"))


def load_model(folder: str | Path) -> tuple[nn.Module, Dataset]:
    """The trained model of a run folder, in eval mode, and its data. A run without a result gives its last checkpoint."""
    recipe = Recipe.of_run(folder)
    dataset = recipe.data.load()
    return _with(recipe, dataset, _weights(Path(folder))), dataset


def load_stages(folder: str | Path) -> tuple[dict[str, nn.Module], Dataset]:
    """The model of a run "before" its training, at the checkpoints that it still has ("step 40"), and "after"; and its data."""
    recipe, run = Recipe.of_run(folder), Run.read(folder)
    dataset, total = recipe.data.load(), max(run.steps(), default=0)
    stages = {"before": _in_mode(recipe, build(recipe, dataset))}
    for step in run.steps():
        if 0 < step < total:  # 0 is before, and the last is what the training ended with, or comes closest
            stages[f"step {step}"] = _with(recipe, dataset, _parameters(run.load(step)))
    return stages | {"after": _with(recipe, dataset, _weights(Path(folder)))}, dataset


def _with(recipe: Recipe, dataset: Dataset, weights: dict[str, Tensor]) -> nn.Module:
    # The weights hold the mean and the deviation of the training.
    model = _in_mode(recipe, _built(recipe, dataset, unstandardized))
    model.load_state_dict(weights)
    return model


def _in_mode(recipe: Recipe, model: nn.Module) -> nn.Module:
    """The model for evaluation, with the solver and the gradient that it is trained with."""
    set_mode(model, recipe.train.mode, recipe.train.unroll)
    return model.eval()


def _weights(folder: Path) -> dict[str, Tensor]:
    run = Run.read(folder)
    if (folder / "model.safetensors").exists():
        try:
            return run.read_tensors("model.safetensors")
        except RunError as error:
            warnings.warn(f"{error}. The last checkpoint is taken instead", RunWarning, stacklevel=2)
    checkpoint = run.latest()
    if checkpoint is None:
        raise RunError(f"{folder} has neither a trained model nor a checkpoint: train it first")
    return _parameters(checkpoint)


def _parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items() if name.startswith("model.")}
