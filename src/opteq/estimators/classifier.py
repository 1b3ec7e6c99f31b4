"""EquilibriumClassifier."""

from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax  # type: ignore[import-untyped]
from sklearn.base import ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import validate_data  # type: ignore[import-untyped]

from opteq.estimators.base import FLOATS, EquilibriumEstimator
from opteq.estimators.network import arrays


class EquilibriumClassifier(ClassifierMixin, EquilibriumEstimator):  # type: ignore[misc]
    """P(y | x) = softmax(C z + c), z = f(z, x): an equilibrium network, trained by cross entropy.

    The network. `cell`: "opteq", z = f_L o ... o f_1 (z) with `layers` of f_l(z) = alpha W' sigma(W z + U x + b) + (1 - alpha) z,
    or "monotone", z = sigma(W z + U x + b). `width`: of z. `hidden`: rows of W, None as many as `width`. `activation`: the name of
    sigma. `constrained`: keep ||W|| below 1, so that there is one equilibrium. hidden, layers, alpha (a skip connection, not a
    penalty: that is `weight_decay`) and constrained are of "opteq" only. `standardize`: scale the features by their mean and
    deviation in the training set; else scale them yourself, by StandardScaler in a pipeline.

    Its training. `max_iter`: epochs, over which the step size falls from `learning_rate` to 0. `batch_size`: "auto" is a tenth of
    the samples, from 16 to 200.
    `optimizer`: "adamw", "adam" or "sgd". `weight_decay`: its decay of the weights. With `early_stopping` the share
    `validation_fraction` of the samples is set aside, the training ends after `n_iter_no_change` epochs without a better score on
    them, and the best weights are kept. `rtol`: the tolerance of the equilibria in training; predictions are always solved to
    1e-10 in double precision, so that they do not depend on which samples are predicted together. X in single precision is trained
    in single precision. `random_state`: with an integer every fit is the same, and no global random state is touched; None draws
    the seed from NumPy's. `verbose`: show the progress. `device`: such as "cpu" or "cuda".

    Fitted: `classes_`, `n_features_in_`, `feature_names_in_`, `n_iter_` (epochs), `loss_curve_` (of each epoch),
    `validation_scores_` (or None), `converged_` (the share of equilibria that converged in the last epoch), `weights_` (a dict of
    arrays) and `architecture_`. scikit-learn's ConvergenceWarning tells of equilibria that were not found, in `fit` or in a
    prediction.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> from opteq.estimators import EquilibriumClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = EquilibriumClassifier(width=16, max_iter=5, learning_rate=0.02, random_state=0).fit(X, y)
        >>> classifier.score(X, y) > 0.8, classifier.predict_proba(X[:2]).shape
        (True, (2, 3))
    """

    _fitted: ClassVar[tuple[str, ...]] = (*EquilibriumEstimator._fitted, "classes_")

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X [samples, features] and labels y [samples]: numbers or strings, two classes or more."""
        X, y = validate_data(self, X, y, dtype=FLOATS)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs samples of at least 2 classes. Got 1 class instead.")
        self.weights_ = arrays(self._train(X, labels, len(self.classes_), stratify=labels))
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """The logit of each class [samples, classes]; of two classes, that of the second less that of the first [samples]."""
        logits = self._output(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each sample."""
        best = self._output(X).argmax(1)
        found: NDArray[Any] = self.classes_[best]
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each class, in the order of `classes_`."""
        found: NDArray[np.float64] = softmax(self._output(X), axis=1)
        return found

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """The logarithm of the probability of each class."""
        found: NDArray[np.float64] = log_softmax(self._output(X), axis=1)
        return found
