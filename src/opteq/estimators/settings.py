"""The parameters of an estimator, looked at when it is fitted, as scikit-learn has it."""

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np
import torch

from opteq.checks import check_choice, check_instance, check_integer, check_number, invalid
from opteq.estimators.network import Architecture
from opteq.training.config import Optimizer

_CHOICES = {"cell": ("opteq", "monotone"), "optimizer": ("adamw", "adam", "sgd")}


@dataclass(frozen=True)
class Settings:
    """The checked parameters, as Python's own types."""

    cell: Literal["opteq", "monotone"]
    width: int
    hidden: int
    layers: int
    activation: str
    alpha: float
    constrained: bool
    standardize: bool
    max_iter: int
    batch_size: int
    learning_rate: float
    optimizer: Optimizer
    weight_decay: float
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    rtol: float
    verbose: bool
    device: str

    @classmethod
    def of(cls, estimator: Any, samples: int) -> Self:
        """The parameters of an estimator for so many samples, or an error that names the first that is not as it must be."""
        given = {field.name: plain(getattr(estimator, field.name)) for field in fields(cls)}
        given["hidden"] = given["width"] if given["hidden"] is None else given["hidden"]
        given["batch_size"] = min(200, max(16, samples // 10)) if given["batch_size"] == "auto" else given["batch_size"]
        given["verbose"] = bool(given["verbose"])
        _check(type(estimator).__name__, given)
        return cls(**given)

    def architecture(self, inputs: int, outputs: int) -> Architecture:
        """Of a network for data with so many features and outputs."""
        own = {field.name: getattr(self, field.name) for field in fields(Architecture) if hasattr(self, field.name)}
        return Architecture(inputs, outputs, **own)


def plain(value: Any) -> Any:
    """Python's own number for one of NumPy's, which is what a search over an array of values sets."""
    return value.item() if isinstance(value, np.generic) else value


def _check(owner: str, given: dict[str, Any]) -> None:
    for name, choices in _CHOICES.items():
        check_choice(owner, name, given[name], choices)
    for name in ("width", "hidden", "layers", "max_iter", "batch_size", "n_iter_no_change"):
        check_integer(owner, name, given[name], 1)
    for name in ("constrained", "standardize", "early_stopping"):
        check_instance(owner, name, given[name], bool, "a bool")
    check_instance(owner, "activation", given["activation"], str, "the name of an activation")
    check_number(owner, "alpha", given["alpha"], 0.0, 1.0, open_low=True)
    check_number(owner, "learning_rate", given["learning_rate"], 0.0, open_low=True)
    check_number(owner, "weight_decay", given["weight_decay"], 0.0)
    check_number(owner, "rtol", given["rtol"], 0.0, 1.0, open_low=True, open_high=True)
    check_number(owner, "validation_fraction", given["validation_fraction"], 0.0, 1.0, open_low=True, open_high=True)
    _check_device(owner, given["device"])


def _check_device(owner: str, device: Any) -> None:
    check_instance(owner, "device", device, str, "the name of a device, such as 'cpu' or 'cuda'")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{invalid(owner, 'device', 'a device of this machine', device)} {reason}") from error
