"""A cell of a grid that trains a recipe in a run folder of its own, and goes on with it after an interruption."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opteq import recipes
from opteq.experiments._harness import Options, folder, found
from opteq.recipes import Recipe
from opteq.runs import Run
from opteq.training import DivergenceError

__all__ = ["cells", "run_folder", "train"]

_CURVES = (
    "epoch", "seconds", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy", "valid_miou", "solver_steps",
    "backward_steps", "converged",
)  # fmt: skip


def run_folder(name: str, cell: str, options: Options) -> Path:
    """Where the training of a cell lies."""
    return (folder(name, options) / "runs" / cell).absolute()


def cells(name: str, trainings: Mapping[str, Recipe], options: Options) -> dict[str, dict[str, Any]]:
    """The settings of `train` for each recipe, by the name of its cell; the error of `load` if the data are not there."""
    for dataset, root in {(recipe.data.name, recipe.data.root) for recipe in trainings.values()}:
        found((dataset,), 1, None if root is None else Path(root))
    return {
        cell: {"recipe": recipe.to_json(), "folder": str(run_folder(name, cell, options))} for cell, recipe in trainings.items()
    }


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Scores, parameters and seconds of the recipe's training, and a row for each epoch; "diverged" says why it ended early."""
    recipe, place = Recipe.from_json(settings["recipe"]), Path(settings["folder"])
    try:
        trained = recipes.run(recipe, place, resume=(place / "config.json").exists(), state=False, verbose=False)
    except DivergenceError as error:
        return {"diverged": str(error), "step": error.step}
    epochs = [row for row in trained.history if row["kind"] == "epoch"]
    scores = Run.read(place).read_json("result.json")
    return {
        **scores,
        "parameters": scores["parameters"]["total"],
        "curves": {name: [row.get(name) for row in epochs] for name in _CURVES if any(name in row for row in epochs)},
    }
