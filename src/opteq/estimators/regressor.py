"""EquilibriumRegressor."""

from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.validation import validate_data  # type: ignore[import-untyped]

from opteq.estimators.base import FLOATS, EquilibriumEstimator
from opteq.estimators.network import Network, arrays


class EquilibriumRegressor(RegressorMixin, EquilibriumEstimator):  # type: ignore[misc]
    """y = C z + c, z = f(z, x): an equilibrium network, trained by the mean square error.

    Parameters and fitted attributes are those of EquilibriumClassifier, but for `classes_`. Targets of one output or more are
    scaled inside, and `loss_curve_` is that of the scaled ones.

    Examples:
        >>> import numpy as np
        >>> from opteq.estimators import EquilibriumRegressor
        >>> X = np.linspace(-1, 1, 100)[:, None]
        >>> regressor = EquilibriumRegressor(width=8, max_iter=10, learning_rate=0.05, random_state=0).fit(X, np.abs(X[:, 0]))
        >>> regressor.score(X, np.abs(X[:, 0])) > 0.9
        True
    """

    _fitted: ClassVar[tuple[str, ...]] = (*EquilibriumEstimator._fitted, "target_ndim_")

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X [samples, features] and targets y [samples] or [samples, outputs]."""
        X, y = validate_data(self, X, y, dtype=FLOATS, multi_output=True, y_numeric=True)
        self.target_ndim_ = y.ndim
        targets = y.reshape(len(y), -1).astype(np.float64)
        mean, std = (each.numpy() for each in self._scales("y", targets))
        network = self._train(X, ((targets - mean) / std).astype(X.dtype), targets.shape[1], stratify=None)
        self.weights_ = arrays(_unscaled(network, mean, std))
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The targets, in the shape of y at `fit`."""
        output = self._output(X)
        return output[:, 0] if self.target_ndim_ == 1 else output

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


@torch.no_grad()
def _unscaled(network: Network, mean: NDArray[Any], std: NDArray[Any]) -> Network:
    """The network whose output is std times that of the given one, plus mean, in double precision."""
    network = network.double()
    scale = torch.from_numpy(std)
    network.head.weight.mul_(scale[:, None])
    network.head.bias.mul_(scale).add_(torch.from_numpy(mean))
    return network
