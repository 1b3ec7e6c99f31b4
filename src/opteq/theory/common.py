"""What several parts of the theory share: checks of samples, kernels and modules, norms, and the matrix I - D W."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from opteq.checks import all_finite, check_floating, invalid
from opteq.operators import Conv, Dense, Operator, Separable
from opteq.spectral import Norm, operator_norm

__all__ = ["check_forward", "check_samples", "check_symmetric", "norm_by_formula", "system"]


def check_samples(
    owner: str, name: str, X: Tensor, expected: str = "of shape [N, ...]", fits: Callable[[Tensor], bool] = lambda X: X.ndim > 0
) -> None:
    """Raise unless X is a finite floating-point tensor of the shape that is expected."""
    check_floating(owner, name, X)
    if not fits(X):
        raise ValueError(invalid(owner, name, expected, list(X.shape)))
    if not all_finite(X):
        raise ValueError(invalid(owner, name, "finite", "NaN or infinity"))


def check_symmetric(owner: str, name: str, K: Tensor) -> None:
    """Raise unless K is finite, square and symmetric up to the half of its digits."""
    check_samples(owner, name, K, "of shape [N, N] with N >= 1", lambda K: K.ndim == 2 and K.shape[0] == K.shape[1] > 0)
    fixed = K.detach()
    gap = float((fixed - fixed.T).abs().max())
    if gap > math.sqrt(torch.finfo(K.dtype).eps) * float(fixed.abs().max()):
        raise ValueError(invalid(owner, name, "symmetric", f"entries that differ by {gap:.3g}"))


def check_forward(owner: str, module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Raise TypeError where a subclass of one of these has a forward of its own: it may compute something else."""
    known = {kind.forward: kind.__name__ for kind in kinds if isinstance(module, kind)}
    if known and type(module).forward not in known:
        name, kind = type(module).__name__, next(iter(known.values()))
        raise TypeError(f"{owner} does not know what {name} computes: it is of the kind {kind}, but has a forward of its own.")


def norm_by_formula(operator: Operator) -> Norm | None:
    """||W||, for images of every size; None for operators whose norm has no formula, such as chains of convolutions."""
    return operator_norm(operator) if isinstance(operator, (Dense, Conv, Separable)) else None


def system(W: Tensor, slope: Tensor) -> Tensor:
    """I - D W, D = diag(slope): [..., n, n] for slopes [..., n]."""
    return torch.eye(len(W), dtype=W.dtype, device=W.device) - slope[..., None] * W
