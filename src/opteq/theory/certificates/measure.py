"""What the theorems speak of, measured at the present parameters: loss, sigma_min(Z), norms and how far they have moved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.cells import Monotone, ScaledReLU
from opteq.checks import all_finite, check_floating, check_instance, invalid
from opteq.equilibrium import Equilibrium
from opteq.models import Readout
from opteq.solution import Solution, Stop
from opteq.solvers import Newton
from opteq.theory.common import check_forward

__all__ = ["Measurement", "check_data", "check_parameters", "measure", "parameters", "sigma_min", "tight_solution"]

_TIGHT = 1e-12


@dataclass(frozen=True)
class Measurement:
    """The loss |y^ - y|^2 / 2, the residual |y^ - y|, sigma_min(Z) of Z [N, width], and named quantities.

    "norm W" is ||W||_2 of the parameter W, "moved W" is ||W - W(0)||_F; "[U b]" is the matrix U with the bias as one more column.

    Examples:
        >>> import torch
        >>> from opteq.cells import ScaledReLU
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import measure
        >>> X, y = torch.randn(4, 8, dtype=torch.float64), torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        >>> found = measure(Readout(ScaledReLU(8, 32)).double(), X, y)  # which begins at y^ = 0
        >>> found.loss, found.residual, found.sigma_min > 0
        (2.0, 2.0, True)
    """

    loss: float
    residual: float
    sigma_min: float
    quantities: Mapping[str, float]


def measure(
    readout: Readout, X: Tensor, y: Tensor, start: Mapping[str, Tensor] | None = None, z0: Tensor | None = None
) -> Measurement:
    """Loss, sigma_min(Z), ||W||_2 and ||W - W(0)||_F of every parameter, at the equilibrium solved to 1e-12.

    `start`: the parameters at step 0 under the names of `readout.named_parameters()`, for the "moved ..." quantities; `z0`:
    where the solve begins, such as states that are almost the equilibrium. Raises ConvergenceError when it is not found.
    Quantities: "loss", "sigma_min Z", "lambda_min Z'Z", "norm P" and "moved P" for each parameter P ("cell." is left out),
    "gamma norm A" for ScaledReLU, and "norm [U b]" for a Monotone with a bias.

    Examples:
        >>> import torch
        >>> from opteq.cells import ScaledReLU
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import measure
        >>> X, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        >>> sorted(measure(Readout(ScaledReLU(8, 32)).double(), X, y).quantities)
        ['gamma norm A', "lambda_min Z'Z", 'loss', 'norm A', 'norm W', 'norm a', 'sigma_min Z']
    """
    X, y = check_data("measure", readout, X, y)
    Z = tight_solution(readout, X, z0).raise_if_failed().z
    residual = float(torch.linalg.vector_norm(Z @ readout.a.detach() - y))
    least = sigma_min(Z)
    quantities = {"loss": residual * residual / 2, "sigma_min Z": least, "lambda_min Z'Z": least * least}
    now = parameters(readout)
    quantities |= {f"norm {name}": _norm(value) for name, value in now.items()}
    if isinstance(readout.cell, ScaledReLU):
        quantities["gamma norm A"] = readout.cell.gamma * quantities["norm A"]
    if start is not None:
        before = parameters(readout, start)
        quantities |= {f"moved {name}": float(torch.linalg.vector_norm(now[name] - before[name])) for name in now}
    return Measurement(quantities["loss"], residual, least, quantities)


def parameters(readout: Readout, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The parameters, or `values` given under their names, without the prefix "cell."; "[U b]" joins U and b of a Monotone."""
    own = dict(readout.named_parameters())
    if values is not None and (set(own) - set(values) or any(values[name].shape != own[name].shape for name in own)):
        expected = f"a mapping with tensors of the shapes of {', '.join(own)}"
        raise ValueError(invalid("measure", "start", expected, {name: list(v.shape) for name, v in values.items()}))
    chosen = own if values is None else {name: values[name] for name in own}
    found = {name.removeprefix("cell."): value.detach() for name, value in chosen.items()}
    if isinstance(readout.cell, Monotone) and readout.cell.b is not None:
        found["[U b]"] = torch.cat([found["U"], found["b"][:, None]], dim=1)
    return found


def _norm(value: Tensor) -> float:
    """||W||_2 of a matrix, |a| of a vector."""
    return float(torch.linalg.matrix_norm(value, 2) if value.ndim == 2 else torch.linalg.vector_norm(value))


def sigma_min(Z: Tensor) -> float:
    """The smallest of the N singular values of Z [N, width]: 0 when N > width."""
    if Z.shape[0] > Z.shape[1]:
        return 0.0
    return float(torch.linalg.svdvals(Z)[-1]) if all_finite(Z) else math.nan


def tight_solution(readout: Readout, X: Tensor, z0: Tensor | None = None) -> Solution:
    """The equilibrium to 1e-12, by the solver of the readout, and by Newton where that fails; failures are left in its status."""
    stop = Stop(rtol=_TIGHT, max_steps=2000)
    with torch.no_grad():
        found = Equilibrium(readout.cell, readout.solver, stop, on_failure="ignore").solve(X, z0)
        if not bool(found.converged.all()):
            again = Equilibrium(readout.cell, Newton(), Stop(rtol=_TIGHT, max_steps=200), on_failure="ignore").solve(X)
            found = again if int(again.converged.sum()) > int(found.converged.sum()) else found
    return found


def check_parameters(owner: str, model: nn.Module) -> None:
    """Raise ValueError unless every parameter is finite, and the a of a Readout as long as its states."""
    for name, parameter in model.named_parameters():
        if not all_finite(parameter):
            raise ValueError(invalid(owner, "readout", f"finite in '{name}'", "NaN or infinity"))
    if isinstance(model, Readout) and model.a.shape != model.cell.state_shape:
        expected = f"a Readout with 'a' of shape {list(model.cell.state_shape)}"
        raise ValueError(invalid(owner, "readout", expected, list(model.a.shape)))


def check_data(owner: str, readout: Readout, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """X [N, d] and y [N] in float64, without NaN; a Readout in another dtype is refused, or rounding would be part of the claim."""
    check_instance(owner, "readout", readout, Readout, "a Readout")
    check_forward(owner, readout, Readout)
    for name, parameter in readout.named_parameters():
        if parameter.dtype != torch.float64:
            expected = f"in float64 (call .double()) in '{name}': the theorems speak of exact arithmetic"
            raise TypeError(invalid(owner, "readout", expected, parameter.dtype))
    check_parameters(owner, readout)
    check_floating(owner, "X", X)
    check_floating(owner, "y", y)
    width = getattr(readout.cell, "in_features", X.shape[-1] if X.ndim else 0)
    if X.ndim != 2 or X.shape[0] == 0 or X.shape[1] != width:
        raise ValueError(invalid(owner, "X", f"of shape [N, {width}] with N >= 1", list(X.shape)))
    if tuple(y.shape) != (X.shape[0],):
        raise ValueError(invalid(owner, "y", f"of shape [{X.shape[0]}], one label a row of X", list(y.shape)))
    for name, value in (("X", X), ("y", y)):
        if not all_finite(value):
            raise ValueError(invalid(owner, name, "finite", "NaN or infinity"))
    return X.detach().double(), y.detach().double()
