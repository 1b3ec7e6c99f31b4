"""Kernels of ReLU equilibrium networks of infinite width, and regression with a kernel.

The networks are positively homogeneous, so a kernel is |x| |x'| times a function of the angle between x and x'. An angle t is kept
as the pair (1 - cos t, 1 + cos t): cos t alone would lose half of the digits of t near 0 and pi, where arccos is not smooth.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from opteq.batch import norm
from opteq.checks import all_finite, check_floating, check_integer, check_number, invalid
from opteq.spectral import Evidence
from opteq.theory.common import check_samples, check_symmetric

__all__ = ["KernelRegression", "kernel_regression", "least_eigenvalue", "population_kernel", "scaled_relu_kernel", "tangent_limit"]

_EPS = torch.finfo(torch.float64).eps
_CHUNK = 2**14
_TERMS = 9  # of the series of sin t - t cos t: enough for double precision at |t| < 1


def _sine_gap(t: Tensor) -> Tensor:
    """sin t - t cos t, by its series where the difference cancels."""
    square, series = t * t, torch.ones_like(t)
    for n in range(_TERMS, 0, -1):
        series = 1 - square / (2 * n * (2 * n + 3)) * series
    return torch.where(t < 1, t * square / 3 * series, torch.sin(t) - t * torch.cos(t))


@dataclass(frozen=True)
class _Angles:
    """Angles t as 1 - cos t and 1 + cos t."""

    minus: Tensor
    plus: Tensor

    @cached_property
    def theta(self) -> Tensor:
        """t."""
        return 2 * torch.atan2(self.minus.sqrt(), self.plus.sqrt())

    @cached_property
    def k(self) -> Tensor:
        """1 - t/pi = 2 P(u > 0, v > 0) for unit Gaussians u, v at the angle t; also Q'(c)."""
        return 2 / math.pi * torch.atan2(self.plus.sqrt(), self.minus.sqrt())

    def slope(self, sigma_w2: float) -> Tensor:
        """1 - sigma_w2 k, also for both near 1."""
        return (1 - sigma_w2) + sigma_w2 * self.theta / math.pi

    @property
    def Q(self) -> Tensor:
        """2 E[relu(u) relu(v)] = (sin t + (pi - t) cos t)/pi."""
        return _sine_gap(math.pi * self.k) / math.pi

    @property
    def one_minus_Q(self) -> Tensor:
        """1 - Q, which keeps its digits near t = 0."""
        return self.minus - _sine_gap(self.theta) / math.pi


class _Inputs(NamedTuple):
    """Two sets of inputs in double precision: their angles and |x_i| |x_j|/d."""

    angles: _Angles
    size: Tensor
    dtype: torch.dtype


def _inputs(owner: str, X: Tensor, X2: Tensor | None) -> _Inputs:
    """The inputs, after a look at them; zeros get some angle."""
    _check_inputs(owner, "X", X, None)
    if X2 is not None:
        _check_inputs(owner, "X2", X2, X)
    rows = X.detach().double()
    columns = rows if X2 is None else X2.detach().double()
    lengths, lengths2 = norm(rows), norm(columns)
    e = rows / lengths.where(lengths > 0, 1.0)[:, None]
    e2 = columns / lengths2.where(lengths2 > 0, 1.0)[:, None]
    root = math.sqrt(X.shape[1])
    size = torch.outer(lengths / root, lengths2 / root)
    dtype = X.dtype if X2 is None else torch.promote_types(X.dtype, X2.dtype)
    return _Inputs(_Angles(_half_square(e, e2), _half_square(e, -e2)), size, dtype)


def _check_inputs(owner: str, name: str, X: Tensor, like: Tensor | None) -> None:
    if like is None:
        check_samples(owner, name, X, "of shape [N, d] with d >= 1", lambda X: X.ndim == 2 and X.shape[1] > 0)
        return
    if isinstance(X, Tensor) and X.device != like.device:
        raise ValueError(invalid(owner, name, f"on {like.device}, as X is", str(X.device)))
    d = like.shape[1]
    check_samples(owner, name, X, f"of shape [N2, {d}], as X is", lambda X: X.ndim == 2 and X.shape[1] == d)


def _half_square(e: Tensor, e2: Tensor) -> Tensor:
    """|e_i - e2_j|^2/2 = 1 - cos t for unit vectors, by differences: 1 - e_i.e2_j would cancel."""
    return torch.cdist(e, e2, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / 2


def _limit(inputs: _Angles, sigma_w2: float) -> _Angles:
    """The t with cos t = sigma_w2 Q(cos t) + (1 - sigma_w2) cos t_x, some entries at a time to stay in the cache."""
    chunks = zip(inputs.minus.flatten().split(_CHUNK), inputs.plus.flatten().split(_CHUNK), strict=True)
    solved = [_newton(_Angles(*chunk), sigma_w2) for chunk in chunks]
    minus, plus = (torch.cat(parts).view_as(inputs.minus) for parts in zip(*((t.minus, t.plus) for t in solved), strict=True))
    return _Angles(minus, plus)


def _newton(inputs: _Angles, sigma_w2: float) -> _Angles:
    """Newton's method in cos t, where the equation is concave and increasing and cos t_x left of its root: no step goes too far."""
    now, moving, steps = inputs, True, 0
    while moving and steps < 100:  # 3 to 5 are needed, up to 28 for sigma_w2 next to 1
        left = (1 - sigma_w2) * (now.minus - inputs.minus) + sigma_w2 * _sine_gap(now.theta) / math.pi
        right = (1 - sigma_w2) * inputs.plus + sigma_w2 * (1 + now.Q) - now.plus
        step = torch.where(now.minus < now.plus, left, right) / now.slope(sigma_w2)  # equal but for their rounding
        now = _Angles((now.minus - step).clamp(min=0), (now.plus + step).clamp(min=0))
        moving, steps = bool((step.abs() > 4 * _EPS * torch.minimum(now.minus, now.plus)).any()), steps + 1
    return now


def _layers(inputs: _Angles, sigma_w2: float, depth: int) -> tuple[_Angles, float]:
    """The angles before the activation of layer `depth` >= 1, and rho = 1 + sigma_w2 + ... + sigma_w2^(depth - 1)."""
    now, rho = inputs, 1.0
    for _ in range(depth - 1):
        rho = 1 + sigma_w2 * rho
        w = 1 / rho
        now = _Angles((1 - w) * now.one_minus_Q + w * inputs.minus, (1 - w) * (1 + now.Q) + w * inputs.plus)
    return now, rho


def population_kernel(X: Tensor, sigma_w2: float, depth: int | None = None, X2: Tensor | None = None) -> Tensor:
    """K = lim Z'Z/m of a GaussianDEQ: K_ij = |x_i| |x_j| Q(c)/(d (1 - sigma_w2)), c = sigma_w2 Q(c) + (1 - sigma_w2) cos(x_i, x_j).

    Q(c) = (sqrt(1 - c^2) + (pi - arccos c) c)/pi. With a `depth` l it is K^(l) of the first l layers from z = 0, so K^(0) = 0;
    |K - K^(l)| falls by sigma_w2 a layer. X [N, d] has inputs of any norm in its rows, X2 [N2, d] others for the columns
    (default: X); an input 0 has the kernel 0. The limit needs sigma_w2 < 1, a depth none of it; a finite network is known to be
    well-posed below 1/8 only. Computed in double precision, returned in the dtype of X, without gradients.
    Gaussian-initialised DEQs, Definition 1 and Theorem 3 (i), there for |x|^2 = d.

    Examples:
        >>> import torch
        >>> from opteq.theory import population_kernel
        >>> X = torch.eye(2) * 2**0.5  # |x|^2 = d
        >>> population_kernel(X, sigma_w2=0.1).round(decimals=3)
        tensor([[1.1110, 0.3730],
                [0.3730, 1.1110]])
    """
    owner = "population_kernel"
    inputs = _inputs(owner, X, X2)
    if depth is None:
        check_number(owner, "sigma_w2", sigma_w2, 0.0, 1.0, open_high=True)
        K = inputs.size * (_limit(inputs.angles, sigma_w2).Q / (1 - sigma_w2))
        return K.to(inputs.dtype)
    check_number(owner, "sigma_w2", sigma_w2, 0.0)
    check_integer(owner, "depth", depth, 0)
    if depth == 0:
        return torch.zeros_like(inputs.size, dtype=inputs.dtype)
    angles, rho = _layers(inputs.angles, sigma_w2, depth)
    return (inputs.size * (rho * angles.Q)).to(inputs.dtype)


def tangent_limit(X: Tensor, sigma_w2: float, X2: Tensor | None = None, *, width: int | None = None) -> Tensor:
    """lim H/m = K (1 + r), r = (k/2)/(1 - sigma_w2 k), k = 1 - arccos(c)/pi: the tangent kernel of a wide GaussianDEQ readout.

    K and c are those of `population_kernel`, for inputs of any norm; a ~ N(0, 1/m). The three parts of H are those of a (K), of
    W (r K) and of U, which is r x_i.x_j/m and so vanishes: `width` = m keeps it, as a comparison at a finite width should.

    Examples:
        >>> import torch
        >>> from opteq.theory import population_kernel, tangent_limit
        >>> X = torch.eye(2) * 2**0.5
        >>> bool((tangent_limit(X, 0.1) > population_kernel(X, 0.1)).all()), tangent_limit(X, 0.1).round(decimals=3)
        (True, tensor([[1.7280, 0.4730],
                [0.4730, 1.7280]]))
    """
    owner = "tangent_limit"
    inputs = _inputs(owner, X, X2)
    check_number(owner, "sigma_w2", sigma_w2, 0.0, 1.0, open_high=True)
    angles = _limit(inputs.angles, sigma_w2)
    r = angles.k / 2 / angles.slope(sigma_w2)  # lim R'R
    H = inputs.size * (angles.Q / (1 - sigma_w2)) * (1 + r)
    if width is not None:
        check_integer(owner, "width", width, 1)
        H = H + r * (X.detach().double() @ (X if X2 is None else X2).detach().double().T) / width
    return H.to(inputs.dtype)


def scaled_relu_kernel(X: Tensor, X2: Tensor | None = None) -> Tensor:
    """G_* = E[relu(Xw) relu(Xw)'], w ~ N(0, I): the mean of Phi Phi'/m for ScaledReLU's features Phi = relu(XW), W ~ N(0, 1).

    `least_eigenvalue` of it is the paper's lambda_*. It is |x_i| |x_j| Q(cos(x_i, x_j))/2, so that lambda_* <= |X|_F^2/(2 N).
    Gamma-scaled ReLU implicit networks, Section 5.2.

    Examples:
        >>> import torch
        >>> from opteq.theory import scaled_relu_kernel
        >>> scaled_relu_kernel(torch.eye(2)).round(decimals=4)  # 1/2 and 1/(2 pi)
        tensor([[0.5000, 0.1592],
                [0.1592, 0.5000]])
    """
    inputs = _inputs("scaled_relu_kernel", X, X2)
    return (inputs.size * (X.shape[1] / 2) * inputs.angles.Q).to(inputs.dtype)


def least_eigenvalue(K: Tensor) -> float:
    """lambda_* = lambda_min(K): positive for the kernels here unless an input is 0 or a positive multiple of another.

    Examples:
        >>> import torch
        >>> from opteq.theory import least_eigenvalue
        >>> round(least_eigenvalue(torch.tensor([[2.0, 1.0], [1.0, 2.0]])), 6)
        1.0
    """
    check_symmetric("least_eigenvalue", "K", K)
    return float(torch.linalg.eigvalsh(_symmetric(K))[0])


def _symmetric(K: Tensor) -> Tensor:
    """(K + K')/2 in double precision."""
    halves = K.detach().double() / 2
    return halves + halves.T


@dataclass(frozen=True, eq=False)
class KernelRegression:
    """f(x) = sum_i k(x, x_i) alpha_i with (K + ridge I) alpha = y; where that is singular, the alpha of least norm.

    `leave_one_out` holds y_i - f_i(x_i), f_i being fitted to all samples but i. `condition` is that of K + ridge I: exact, or an
    upper bound as `evidence` says. `parallel` is a pair of inputs that the kernel cannot tell apart, when it is singular.

    Examples:
        >>> import torch
        >>> from opteq.theory import kernel_regression
        >>> fit = kernel_regression(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 0.0]))
        >>> fit.singular, round(fit.condition, 3)
        (False, 3.0)
        >>> fit.predict(torch.tensor([[2.0, 1.0]])).round(decimals=3)
        tensor([1.])
    """

    coefficients: Tensor  # [N] or [N, k], as y
    fitted: Tensor
    leave_one_out: Tensor
    ridge: float
    condition: float
    evidence: Evidence
    rank: int
    parallel: tuple[int, int] | None = None

    @property
    def leave_one_out_error(self) -> Tensor:
        """The mean of the squared leave-one-out residuals, one for each column of y."""
        return (self.leave_one_out**2).mean(0)

    @property
    def singular(self) -> bool:
        """Whether K + ridge I is singular to rounding."""
        return self.rank < len(self.coefficients)

    def predict(self, K_cross: Tensor) -> Tensor:
        """K_cross alpha; K_cross [M, N] has the kernel of new inputs (rows) with those of the fit."""
        check_floating(self, "K_cross", K_cross)
        if K_cross.ndim != 2 or K_cross.shape[1] != len(self.coefficients):
            raise ValueError(invalid(self, "K_cross", f"of shape [M, {len(self.coefficients)}]", list(K_cross.shape)))
        return K_cross @ self.coefficients.to(K_cross.dtype)

    def explain(self) -> str:
        """How well K determines the fit, and what to do if it does not."""
        total, sign = len(self.coefficients), "at most " if self.evidence == "bound" else ""
        if not self.singular:
            return f"K + {self.ridge:g} I has full rank {total}, and a condition number of {sign}{self.condition:.3g}."
        pair = f" Inputs {self.parallel[0]} and {self.parallel[1]} are parallel to the kernel." if self.parallel else ""
        return (
            f"K + {self.ridge:g} I is singular: rank {self.rank} of {total}.{pair} The coefficients of least norm are given, "
            "and `fitted` is the part of y that the kernel can express. (a) Remove or merge inputs that are positive multiples of "
            "each other, and zero inputs, (b) use a larger ridge, (c) compute K in float64."
        )


def kernel_regression(K: Tensor, y: Tensor, *, ridge: float = 0.0) -> KernelRegression:
    """alpha = (K + ridge I)^-1 y, and y_i - f_i(x_i) = alpha_i/((K + ridge I)^-1)_ii: the fit and its leave-one-out residuals.

    K [N, N] is symmetric positive semi-definite, y [N] or [N, k]. A singular K, such as that of parallel inputs, gets a
    RuntimeWarning and the solution of least norm, the limit ridge -> 0, leave-one-out residuals included. A network that begins at
    f_0 and is trained in its tangent kernel's regime predicts f_0 + `kernel_regression(K, y - f_0(X)).predict(K_cross)`.

    Examples:
        >>> import torch
        >>> from opteq.theory import kernel_regression, population_kernel
        >>> X, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
        >>> fit = kernel_regression(population_kernel(X, 0.1), y)
        >>> torch.allclose(fit.fitted, y), fit.leave_one_out.shape
        (True, torch.Size([6]))
    """
    _check_regression(K, y, ridge)
    dtype, tolerance = torch.promote_types(K.dtype, y.dtype), len(K) * torch.finfo(K.dtype).eps
    plain = _symmetric(K)
    unit = max(plain.abs().max().item(), ridge) or 1.0  # so that no K is too small or too large to be factorised
    plain = plain / unit
    A = plain + torch.diag(torch.full_like(plain[0], ridge / unit))
    targets = y.detach().double().reshape(len(K), -1)
    found = _by_cholesky(A, targets, tolerance) or _by_eigenvalues(A, targets, tolerance)
    coefficients = (found.alpha / unit).reshape(y.shape).to(dtype)
    if not all_finite(coefficients):
        expected = f"larger: the coefficients overflow {dtype}"
        raise ValueError(invalid("kernel_regression", "K", expected, f"a largest entry of {unit:.3g}"))
    result = KernelRegression(
        coefficients=coefficients,
        fitted=(plain @ found.alpha).reshape(y.shape).to(dtype),
        leave_one_out=found.leave_one_out.reshape(y.shape).to(dtype),
        ridge=float(ridge),
        condition=found.condition,
        evidence=found.evidence,
        rank=found.rank,
        parallel=_parallel(plain, tolerance) if found.rank < len(K) else None,
    )
    if result.singular:
        warnings.warn(result.explain(), RuntimeWarning, stacklevel=2)
    return result


def _check_regression(K: Tensor, y: Tensor, ridge: float) -> None:
    owner = "kernel_regression"
    check_symmetric(owner, "K", K)
    check_floating(owner, "y", y)
    if y.ndim not in (1, 2) or len(y) != len(K) or y.device != K.device:
        expected = f"of shape [{len(K)}] or [{len(K)}, k] on {K.device}"
        raise ValueError(invalid(owner, "y", expected, f"{list(y.shape)} on {y.device}"))
    if not all_finite(y):
        raise ValueError(invalid(owner, "y", "finite", "NaN or infinity"))
    check_number(owner, "ridge", ridge, 0.0)


class _Fit(NamedTuple):
    alpha: Tensor
    leave_one_out: Tensor
    condition: float
    evidence: Evidence
    rank: int


def _by_cholesky(A: Tensor, y: Tensor, tolerance: float) -> _Fit | None:
    """The fit by A = L L', or None if A is singular to rounding. ||A||_1 ||A^-1||_1 bounds the condition number."""
    L, info = torch.linalg.cholesky_ex(A)
    if info.item():
        return None
    inverse = torch.cholesky_inverse(L)
    condition = (torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(inverse, 1)).item()
    if not condition * tolerance < 1:
        return None
    alpha = torch.cholesky_solve(y, L)
    return _Fit(alpha, alpha / inverse.diagonal()[:, None], condition, "bound", len(A))


def _by_eigenvalues(A: Tensor, y: Tensor, tolerance: float) -> _Fit:
    """alpha = A^+ y, for A = 0 on the range of N. (A + s I)^-1 = N/s + A^+ + O(s) gives the leave-one-out residuals for s -> 0."""
    values, V = torch.linalg.eigh(A)
    largest = values.abs().max().item()
    if values[0] < -tolerance * largest:
        expected = "positive semi-definite with its ridge"
        raise ValueError(
            invalid("kernel_regression", "K", expected, f"a least eigenvalue of {values[0].item():.3g} times its largest entry")
        )
    kept = values > tolerance * largest
    inverse = (V[:, kept] / values[kept]) @ V[:, kept].T
    null = V[:, ~kept] @ V[:, ~kept].T
    alpha, share = inverse @ y, null.diagonal()[:, None]
    inside = share <= 100 * len(A) * _EPS  # the sample is determined by A^+ alone
    left_out = torch.where(inside, alpha / inverse.diagonal()[:, None], null @ y / share)
    condition = largest / values[0].item() if kept.all() else math.inf
    return _Fit(alpha, left_out, condition, "exact", int(kept.sum()))


def _parallel(K: Tensor, tolerance: float) -> tuple[int, int] | None:
    """The pair of inputs with the largest kernel correlation, if that is 1 to rounding."""
    scale = K.diagonal().clamp(min=0).sqrt()
    correlation = (K / torch.outer(scale, scale)).nan_to_num(0.0, 0.0, 0.0).fill_diagonal_(0)
    best = int(correlation.argmax())
    i, j = divmod(best, len(K))
    return (i, j) if correlation[i, j] >= 1 - 10 * tolerance else None
