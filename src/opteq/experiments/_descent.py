"""What the trainings by plain gradient descent measure: the loss |y^ - y|^2 / 2, and ||W||."""

from torch import Tensor

from opteq.operators import Dense
from opteq.spectral import operator_norm

__all__ = ["half_square", "spectral_norm"]


def half_square(error: Tensor) -> float:
    """|y^ - y|^2 / 2."""
    return float(error.square().sum()) / 2


def spectral_norm(matrix: Tensor) -> float:
    """||M||_2, by Lanczos' method: ten times as fast as all singular values."""
    return float(operator_norm(Dense(matrix), method="lanczos"))
