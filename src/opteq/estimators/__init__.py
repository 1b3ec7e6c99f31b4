"""Equilibrium networks as scikit-learn estimators."""

try:
    import sklearn as _sklearn  # type: ignore[import-untyped] # noqa: F401
except ImportError as error:
    raise ImportError("Estimators need the package scikit-learn: pip install 'opteq[train]'.") from error

from opteq.estimators.classifier import EquilibriumClassifier
from opteq.estimators.regressor import EquilibriumRegressor

__all__ = ["EquilibriumClassifier", "EquilibriumRegressor"]
