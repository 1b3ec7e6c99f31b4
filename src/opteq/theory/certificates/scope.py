"""What the theorems cover: the papers' own parameters, constants that are numbers, and sizes whose powers float64 can hold."""

import math
from collections.abc import Mapping

import torch

from opteq.cells import GaussianDEQ, Monotone, ScaledReLU
from opteq.checks import invalid
from opteq.models import Readout
from opteq.theory.ntk import has_formulas

__all__ = ["LARGEST", "SMALLEST", "check_scope", "check_sizes", "constant", "covered"]

# What is 0 or between these, as are the radii, has no power in any condition that vanishes on its right side.
SMALLEST, LARGEST = 1e-40, 1e40
_RANGE = f"0 or in [{SMALLEST:g}, {LARGEST:g}], where no power of it leaves float64"
_CONSTANTS = {GaussianDEQ: "sigma_w2", ScaledReLU: "gamma", Monotone: "m"}


def covered(readout: Readout) -> GaussianDEQ | ScaledReLU | Monotone:
    """The cell, one of those that the theorems are about."""
    assert isinstance(readout.cell, (GaussianDEQ, ScaledReLU, Monotone))
    return readout.cell


def constant(cell: GaussianDEQ | ScaledReLU | Monotone) -> float:
    """The gamma of ScaledReLU, m of Monotone, sigma_w2 of GaussianDEQ."""
    return float(getattr(cell, _CONSTANTS[type(cell)]))


def check_scope(owner: str, readout: Readout) -> None:
    """The proofs need sigma(0) = 0, slopes in [0, 1], descent on a, a constant gamma or m, and parameters of their own."""
    cell = covered(readout)
    _check_constant(owner, cell)
    activation = cell.activation
    at_zero = float(activation(torch.zeros(1, dtype=torch.float64)))
    if at_zero != 0 or activation.lipschitz > 1 or not activation.monotone:
        expected = "on a cell whose activation has sigma(0) = 0 and slopes in [0, 1], as the proofs need"
        raise TypeError(invalid(owner, "readout", expected, f"{activation.name} with sigma(0) = {at_zero:g}"))
    _check_parameters(owner, readout)
    if not readout.a.requires_grad:
        expected = "a Readout whose 'a' is trained: descent on it is what lowers the loss"
        raise TypeError(invalid(owner, "readout", expected, "a frozen 'a'"))


def _check_constant(owner: str, cell: GaussianDEQ | ScaledReLU | Monotone) -> None:
    name = _CONSTANTS[type(cell)]
    value = getattr(cell, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        expected = f"a Readout whose 'cell.{name}' is a plain number: the theorem has no step on it"
        raise TypeError(invalid(owner, "readout", expected, type(value).__name__))
    if not math.isfinite(value) or (name == "sigma_w2" and value < 0):
        expected = f"a Readout whose 'cell.{name}' is finite{' and >= 0' if name == 'sigma_w2' else ''}"
        raise ValueError(invalid(owner, "readout", expected, value))
    if name != "sigma_w2" and value > 0:
        check_sizes({f"cell.{name}": float(value)})


def _check_parameters(owner: str, readout: Readout) -> None:
    every = [p for _, p in readout.named_parameters(remove_duplicate=False)]
    if len({p.untyped_storage().data_ptr() for p in every}) < len(every):
        raise TypeError(invalid(owner, "readout", "a Readout whose parameters are not shared", "two with one memory"))
    if not has_formulas(readout):
        expected = "a Readout whose parameters are the weights of the theorem themselves, not made from others, and no more"
        raise TypeError(invalid(owner, "readout", expected, ", ".join(name for name, _ in readout.named_parameters())))


def check_sizes(sizes: Mapping[str, float]) -> None:
    """Raise ValueError naming the first size, of X, y or a weight, whose powers may leave float64."""
    for name, size in sizes.items():
        if size != 0 and not SMALLEST <= size <= LARGEST:
            data = name in ("X", "y")
            expected = f"such that its norm is {_RANGE}" if data else f"a Readout in which the size of '{name}' is {_RANGE}"
            raise ValueError(invalid("certify", name if data else "readout", expected, size))
