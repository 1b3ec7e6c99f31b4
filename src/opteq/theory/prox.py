"""Is a map the proximal operator of a convex function? A test at points."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.batch import flat, norm
from opteq.checks import check_floating, check_number, invalid
from opteq.maps import Map, as_map, first_value, pullback

__all__ = ["ProxTest", "is_prox"]


@dataclass(frozen=True)
class ProxTest:
    """J = J', 0 <= J <= 1, |f(y) - f(y')| <= |y - y'|: how far the points that were tried are from these.

    `holds`, and the test itself as a bool: whether all are met to the tolerance.

    Examples:
        >>> import torch
        >>> from opteq.theory import is_prox
        >>> test = is_prox(lambda z: 2 * z, torch.randn(4, 3, dtype=torch.float64))
        >>> test.holds, round(test.largest, 6)
        (False, 2.0)
    """

    asymmetry: float  # the largest |J - J'| / |J|
    smallest: float  # eigenvalue of (J + J') / 2
    largest: float
    expansion: float  # the largest |f(y) - f(y')| / |y - y'|, less rounding; 0 where there is one point only
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether no condition fails."""
        return not self.failures()

    def __bool__(self) -> bool:
        return self.holds

    def failures(self) -> tuple[str, ...]:
        """The conditions that fail, in words; in the order of the fields."""
        limit = 1 + self.tolerance
        checks = (
            (self.asymmetry <= self.tolerance, f"not a gradient: |J - J'| = {self.asymmetry:.2e} |J|"),
            (self.smallest >= -self.tolerance, f"not monotone: J has the eigenvalue {self.smallest:.6g} < 0"),
            (self.largest <= limit, f"expansive: J has the eigenvalue {self.largest:.6g} > 1"),
            (self.expansion <= limit, f"expansive: |f(y) - f(y')| = {self.expansion:.6g} |y - y'| for two of the points"),
        )
        return tuple(text for passed, text in checks if not passed)

    def explain(self) -> str:
        """Which conditions fail and by how much, or what their not failing means."""
        if self.holds:
            return (
                f"f may be a proximal operator: at the points tried J is symmetric with eigenvalues from {self.smallest:.6g} to "
                f"{self.largest:.6g}, and f does not expand (tolerance {self.tolerance:g}). Other points may still refute it."
            )
        return f"f is no proximal operator (tolerance {self.tolerance:g}); it is " + "; ".join(self.failures()) + "."


def is_prox(fn: Map | Callable[[Tensor], Tensor], z: Tensor, *, tolerance: float = 1e-6) -> ProxTest:
    """f = prox_g for a convex g if and only if f is the gradient of a convex function and nonexpansive.

    Tests both at the points z, [batch, ...]: whether J is symmetric with eigenvalues in [0, 1], and whether f expands the distance
    of any two of the points. A failure refutes; success is evidence at these points only. `fn` must treat each sample alone;
    a map that is bound to an x of each sample is tested for each of these x. The dense Jacobians are for small states: n vjps and
    [batch, n, n] numbers. Use float64, or a tolerance of about 1e-4 in float32.
    Optimization induced equilibrium networks, Lemma 5.

    Examples:
        >>> import torch
        >>> from opteq.theory import is_prox
        >>> z = torch.randn(4, 3, dtype=torch.float64)
        >>> bool(is_prox(torch.relu, z)), bool(is_prox(torch.neg, z))
        (True, False)
    """
    check_floating("is_prox", "z", z)
    if z.ndim == 0 or z.numel() == 0:
        raise ValueError(invalid("is_prox", "z", "of shape [batch, ...] and not empty", list(z.shape)))
    map_ = as_map("is_prox", fn).detach()
    check_number("is_prox", "tolerance", tolerance, 0.0)
    z = z.detach()
    value = first_value(map_, z).detach()
    J = _jacobians(map_, z)
    if not (value.isfinite().all() and J.isfinite().all()):
        raise ValueError(invalid("is_prox", "fn", "finite, with its derivatives, at all points of z", "NaN or infinity"))
    eigenvalues = torch.linalg.eigvalsh((J + J.mT) / 2)
    size, gap = norm(J), norm(J - J.mT)
    return ProxTest(
        asymmetry=float((gap / torch.where(size > 0, size, 1.0)).max()),
        smallest=float(eigenvalues.min()),
        largest=float(eigenvalues.max()),
        expansion=_expansion(map_, z, value),
        tolerance=tolerance,
    )


def _jacobians(fn: Map, z: Tensor) -> Tensor:
    """J of each sample, [batch, n, n] in float64: row i is J' e_i. By differentiation of f itself, not by what it declares."""
    pull = pullback(fn, z)
    rows = []
    for i in range(flat(z).shape[1]):
        e = torch.zeros_like(flat(z))
        e[:, i] = 1
        rows.append(flat(pull(e.view(z.shape))[0]).detach().double())
    return torch.stack(rows, dim=1)


def _expansion(fn: Map, z: Tensor, value: Tensor) -> float:
    """max |f(y) - f(y')| / |y - y'| over pairs, less what rounding may add. Both ends of a pair are put to the same sample's f."""
    worst, eps = 0.0, 8 * torch.finfo(z.dtype).eps
    for shift in range(1, len(z)):
        y = z.roll(shift, dims=0)
        fy = fn(y).detach()
        distance, noise = norm(y - z), eps * (norm(y) + norm(z) + norm(fy) + norm(value))
        ratio = (norm(fy - value) - noise) / torch.where(distance > 0, distance, torch.inf)
        if ratio.isnan().any():
            raise ValueError(invalid("is_prox", "fn", "finite at all points of z", "NaN or infinity"))
        worst = max(worst, float(ratio.max()))
    return worst
