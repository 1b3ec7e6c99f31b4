"""What the two estimators have in common: their parameters, training, the solved network."""

import warnings
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from opteq.checks import invalid
from opteq.estimators.network import Architecture, Network, exact_network
from opteq.estimators.saving import read, write
from opteq.estimators.settings import Settings
from opteq.models import Standardize
from opteq.solution import Stop
from opteq.training import Result, TrainConfig, fit

FLOATS = (np.float64, np.float32)
_CHUNK = 256  # samples that are solved at a time: the memory of a prediction does not grow with X


class EquilibriumEstimator(BaseEstimator):  # type: ignore[misc]
    """A network x -> C z + c, z = f(z, x), trained by mini-batches. Not made by itself: see the two estimators."""

    _fitted: ClassVar[tuple[str, ...]] = (
        "n_features_in_",
        "architecture_",
        "n_iter_",
        "loss_curve_",
        "validation_scores_",
        "converged_",
    )

    def __init__(
        self,
        *,
        cell: Literal["opteq", "monotone"] = "opteq",
        width: int = 128,
        hidden: int | None = None,
        layers: int = 1,
        activation: str = "relu",
        alpha: float = 1.0,
        constrained: bool = True,
        standardize: bool = True,
        max_iter: int = 20,
        batch_size: int | Literal["auto"] = "auto",
        learning_rate: float = 5e-3,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        weight_decay: float = 1e-2,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        rtol: float = 1e-3,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        device: str = "cpu",
    ) -> None:
        self.cell = cell
        self.width = width
        self.hidden = hidden
        self.layers = layers
        self.activation = activation
        self.alpha = alpha
        self.constrained = constrained
        self.standardize = standardize
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.rtol = rtol
        self.random_state = random_state
        self.verbose = verbose
        self.device = device

    # ---------------------------------------------------------------- training

    def _train(self, X: NDArray[Any], y: NDArray[Any], outputs: int, stratify: NDArray[Any] | None) -> Network:
        """Train a network on X and y, set the attributes that both estimators have but the weights, and return it."""
        settings = Settings.of(self, len(X))
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        network = self._new_network(settings, X, outputs, seed)
        train, valid = self._divided(settings, X, y, stratify, seed)
        result = fit(network, train, valid, self._config(settings, len(train[1]), seed), verbose=settings.verbose)
        self._describe(result, settings)
        return network.cpu()

    def _new_network(self, settings: Settings, X: NDArray[Any], outputs: int, seed: int) -> Network:
        architecture = settings.architecture(X.shape[1], outputs)
        self.architecture_ = asdict(architecture)
        standardize = Standardize(*(self._scales("X", X) if settings.standardize else ([0.0] * X.shape[1], [1.0] * X.shape[1])))
        dtype = torch.float64 if X.dtype == np.float64 else torch.float32
        stop = Stop(rtol=architecture.tolerance(settings.rtol, dtype))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return architecture.network(standardize, stop).to(dtype)

    def _scales(self, name: str, values: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """The mean and the deviation of each column; a constant column is only shifted."""
        with np.errstate(all="ignore"):
            scaler = StandardScaler().fit(values.astype(np.float64, copy=False))
        if not np.isfinite(scaler.scale_).all():
            raise ValueError(invalid(self, name, "of numbers whose squares do not overflow", f"up to {np.abs(values).max():g}"))
        return torch.from_numpy(scaler.mean_), torch.from_numpy(scaler.scale_)

    def _divided(
        self, settings: Settings, X: NDArray[Any], y: NDArray[Any], stratify: NDArray[Any] | None, seed: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """All of the samples to train on, or those left after some are set aside for early stopping."""
        if not settings.early_stopping:
            return _tensors(X, y), None
        share = settings.validation_fraction
        X, X_valid, y, y_valid = train_test_split(X, y, test_size=share, random_state=seed, stratify=stratify)
        return _tensors(X, y), _tensors(X_valid, y_valid)

    def _config(self, settings: Settings, samples: int, seed: int) -> TrainConfig:
        return TrainConfig(
            epochs=settings.max_iter,
            batch_size=min(samples, settings.batch_size),
            optimizer=settings.optimizer,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            patience=settings.n_iter_no_change if settings.early_stopping else None,
            seed=seed,
            norms="off",
            on_divergence="rollback",
            log_every=10**9,
            device=settings.device,
        )

    def _describe(self, result: Result, settings: Settings) -> None:
        """The attributes about the training."""
        rows = [row for row in result.history if row["kind"] == "epoch"]
        self.n_iter_ = result.epochs
        self.loss_curve_ = [float(row["train_loss"]) for row in rows]
        scores = [row.get("valid_accuracy", -row["valid_loss"]) for row in rows if "valid_loss" in row]
        self.validation_scores_ = scores if settings.early_stopping else None
        self.converged_ = float(rows[-1]["converged"])
        if self.converged_ < 1:
            share = f"{1 - self.converged_:.2%} of the equilibria of the last epoch"
            _warn(f"{share} did not converge to rtol={settings.rtol:g}", stacklevel=5)

    # ---------------------------------------------------------------- the trained network

    def network(self) -> Network:
        """The trained network as a module in double precision: raw X to logits, or to predicted targets."""
        check_is_fitted(self)
        return exact_network(Architecture(**self.architecture_), self.weights_)

    def _output(self, X: Any) -> NDArray[np.float64]:
        """What the network makes of each sample, solved in double precision."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=FLOATS, reset=False)
        network = self.network().to(self.device)
        failed, outputs = 0, []
        with torch.no_grad():
            for x in torch.from_numpy(X.astype(np.float64)).split(_CHUNK):
                output, solution = network.solve(x.to(self.device))
                failed += int((~solution.converged).sum())
                outputs.append(output.cpu())
        if failed:
            _warn(f"the equilibria of {failed} of {len(X)} samples were not found", stacklevel=4)
        return torch.cat(outputs).numpy()

    # ---------------------------------------------------------------- files

    def save(self, path: str | PathLike[str]) -> None:
        """Write the fitted estimator to one file: weights as safetensors, the rest as JSON in its header. Nothing is pickled."""
        check_is_fitted(self)
        names = [*self._fitted, *(["feature_names_in_"] if hasattr(self, "feature_names_in_") else [])]
        write(Path(path), type(self).__name__, self.get_params(), {name: getattr(self, name) for name in names}, self.weights_)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """The estimator in a file of `save`. No code in the file is run; a file that is not as it was written is refused."""
        saved = read(Path(path), cls.__name__, cls().get_params(), cls._fitted)
        estimator = cls(**saved.parameters)
        for name, value in saved.attributes.items():
            setattr(estimator, name, value)
        estimator.weights_ = saved.weights
        return estimator


def _tensors(X: NDArray[Any], y: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """Copies: X and y may be read-only, and in any order of bytes and strides."""
    return torch.from_numpy(np.array(X, order="C")), torch.from_numpy(np.array(y, order="C"))


def _warn(what: str, stacklevel: int) -> None:
    remedy = "(a) keep constrained=True, (b) lower learning_rate, (c) raise rtol, the tolerance of the training."
    warnings.warn(f"{what}: {remedy}", ConvergenceWarning, stacklevel=stacklevel)
