"""Cells: the parameters of one application of f."""

from opteq.cells.deep import DeepOptEq, StackedOptEq
from opteq.cells.function import FunctionCell
from opteq.cells.gaussian import GaussianDEQ
from opteq.cells.monotone import Monotone, MonotoneConv
from opteq.cells.multiscale import Multiscale
from opteq.cells.multitier import MonotoneMultiTier
from opteq.cells.optimization import ConvOptEq, DepthwiseOptEq, OptEq
from opteq.cells.residual import Residual
from opteq.cells.scaled_relu import ScaledReLU
from opteq.cells.variants import AffineOptEq, MultivariateOptEq
from opteq.cells.wide import WideOptEq

__all__ = [
    "AffineOptEq",
    "ConvOptEq",
    "DeepOptEq",
    "DepthwiseOptEq",
    "FunctionCell",
    "GaussianDEQ",
    "Monotone",
    "MonotoneConv",
    "MonotoneMultiTier",
    "Multiscale",
    "MultivariateOptEq",
    "OptEq",
    "Residual",
    "ScaledReLU",
    "StackedOptEq",
    "WideOptEq",
]
