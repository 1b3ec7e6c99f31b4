"""Algorithm 1's three ways of training an equilibrium: by implicit differentiation, by raw unrolling, by unrolling SAM."""

from typing import get_args

from torch import nn

from opteq.cells import DeepOptEq
from opteq.checks import check_choice
from opteq.equilibrium import Equilibrium
from opteq.gradients import Implicit, Unrolled
from opteq.solvers import SAM
from opteq.training.config import Mode


def set_mode(model: nn.Module, mode: Mode, steps: int) -> None:
    """Give every Equilibrium of the model the gradient of the mode, K = `steps`. Optimization induced equilibrium networks, Alg. 1.

    The unrolled modes put plain steps, or SAM's, in place of the layer's own solver.
    "sam" takes the regulariser R out of the map, T(T_R(z)), and gives it to the iteration, which selects by it among the fixed
    points of T.

    Examples:
        >>> from opteq.models import deep_opteq
        >>> from opteq.training import set_mode
        >>> model = deep_opteq(1, 10, channels=8, hidden=(8,), stride=1)
        >>> set_mode(model, "unrolled", steps=20)
        >>> model.equilibrium.gradient
        Unrolled(steps=20)
    """
    check_choice("set_mode", "mode", mode, get_args(Mode))
    if mode == "own":
        return
    layers = [part for part in model.modules() if isinstance(part, Equilibrium)]
    if not layers:
        raise ValueError(f"mode='{mode}' is about equilibria, and the model has none: take mode='own'.")
    for layer in layers:
        if mode == "implicit":
            layer.gradient = Implicit()
        else:
            layer.solver = _sam(layer) if mode == "sam" else None
            layer.gradient = Unrolled(steps)
        layer.gradient.check(layer.solver)


def _sam(layer: Equilibrium) -> SAM:
    if isinstance(layer.solver, SAM):
        return layer.solver
    cell = layer.cell
    if not isinstance(cell, DeepOptEq) or cell.regularizer is None:
        raise ValueError("mode='sam' needs a DeepOptEq with a regularizer, which says which of the fixed points to take.")
    regularizer, cell.regularizer = cell.regularizer, None
    return SAM(regularizer)
