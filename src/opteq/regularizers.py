"""R(z): what a network's hidden problem asks of the equilibrium itself, through the step z -> z - gamma grad R(z).

For a convex R whose gradient is L-Lipschitz the step is nonexpansive when gamma L <= 2, so a cell that is a contraction stays
one. For the others there is no such promise: the loop that solves the equation tells.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from opteq.batch import at_least_single, flat, per_sample_like
from opteq.checks import check_floating, check_integer, check_number, check_shape, invalid
from opteq.tree import Tree

__all__ = ["HSIC", "L1", "L2", "Decorrelation", "FrozenDecorrelation", "FrozenHSIC", "Incay", "Regularizer"]


class Regularizer(Tree, ABC):
    r"""R(z) = value(z).sum() of a state z, [batch, features, ...], with its gradient and, where it is known, its prox.

    Examples:
        >>> import torch
        >>> from opteq.regularizers import Regularizer
        >>> class Quartic(Regularizer):
        ...     formula, latex, convex = "|z|_4^4 / 4", r"\tfrac14 \|z\|_4^4", True
        ...     def value(self, z):
        ...         return z.pow(4).flatten(1).sum(1) / 4
        >>> Quartic().gradient(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 8.]])
    """

    formula: ClassVar[str]  # R in plain text
    latex: ClassVar[str]
    convex: ClassVar[bool] = False
    couples_batch: ClassVar[bool] = False  # whether the gradient of a sample depends on the others
    prox: Callable[[Tensor, float | Tensor], Tensor] | None = None  # argmin_v gamma R(v) + |v - z|^2 / 2; None: no closed form

    @property
    def smoothness(self) -> float | None:
        """The Lipschitz constant of the gradient, or None where there is no useful one."""
        return None

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """R of each sample, [batch]; one number, [], for those that couple the batch."""

    def gradient(self, z: Tensor) -> Tensor:
        """grad R(z), exact, of the shape of z: the gradient of `value(z).sum()`, by automatic differentiation unless overridden."""
        self._check(z)
        slope: Tensor = torch.func.grad(lambda v: self.value(v).sum())(z)
        return slope

    def frozen(self, reference: Tensor) -> "Regularizer":
        """R for evaluation: each sample alone, against the statistics of a fixed batch. This one where no samples are coupled."""
        return self

    def _check(self, z: Tensor, name: str = "z") -> None:
        check_floating(self, name, z)
        if z.ndim < 2:
            raise ValueError(invalid(self, name, "of shape [batch, features, ...]", list(z.shape)))

    def _check_step(self, gamma: float | Tensor) -> None:
        if not isinstance(gamma, Tensor):  # looking into a tensor would wait for the device
            check_number(self, "gamma", gamma, 0.0)


@dataclass(frozen=True)
class L2(Regularizer):
    """R(z) = |z|^2 / 2: weight decay on the equilibrium.

    Examples:
        >>> import torch
        >>> from opteq.regularizers import L2
        >>> z = torch.tensor([[3.0, 4.0]])
        >>> L2().value(z), L2().prox(z, 1.0)
        (tensor([12.5000]), tensor([[1.5000, 2.0000]]))
    """

    formula: ClassVar[str] = "|z|^2 / 2"
    latex: ClassVar[str] = r"\tfrac{1}{2} \|z\|^2"
    convex: ClassVar[bool] = True

    @property
    def smoothness(self) -> float | None:
        return 1.0

    def value(self, z: Tensor) -> Tensor:
        self._check(z)
        return flat(z).square().sum(1) / 2

    def gradient(self, z: Tensor) -> Tensor:
        self._check(z)
        return z

    def prox(self, z: Tensor, gamma: float | Tensor) -> Tensor:
        """z / (1 + gamma)."""
        self._check(z)
        self._check_step(gamma)
        return z / (1 + gamma)


@dataclass(frozen=True)
class L1(Regularizer):
    """R(z) = |z|_1: sparse equilibria. Its gradient jumps at 0, where `gradient` is the subgradient 0: prefer the prox.

    Examples:
        >>> import torch
        >>> from opteq.regularizers import L1
        >>> z = torch.tensor([[3.0, -0.5]])
        >>> L1().value(z), L1().prox(z, 1.0)
        (tensor([3.5000]), tensor([[2., 0.]]))
    """

    formula: ClassVar[str] = "|z|_1"
    latex: ClassVar[str] = r"\|z\|_1"
    convex: ClassVar[bool] = True

    def value(self, z: Tensor) -> Tensor:
        self._check(z)
        return flat(z).abs().sum(1)

    def gradient(self, z: Tensor) -> Tensor:
        self._check(z)
        return z.sign()

    def prox(self, z: Tensor, gamma: float | Tensor) -> Tensor:
        """sign(z) max(|z| - gamma, 0)."""
        self._check(z)
        self._check_step(gamma)
        return torch.relu(z - gamma) - torch.relu(-z - gamma)


@dataclass(frozen=True)
class Incay(Regularizer):
    """R(z) = 2 / (|z|^2 + 2 eps) for each sample, which drives features away from 0.

    Its step z - gamma grad R(z) = (1 + 4 gamma / (|z|^2 + 2 eps)^2) z expands (the paper prints a minus). The gradient is
    1/eps^2-Lipschitz, but without convexity that bounds no step, so `smoothness` is None.

    Examples:
        >>> import torch
        >>> from opteq.regularizers import Incay
        >>> z = torch.tensor([[0.0, 1.0], [3.0, 4.0]])
        >>> [round(value, 3) for value in Incay().value(z).tolist()]
        [0.667, 0.074]
    """

    formula: ClassVar[str] = "2 / (|z|^2 + 2 eps)"
    latex: ClassVar[str] = r"\frac{2}{\|z\|^2 + 2 \varepsilon}"
    eps: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "eps", self.eps, 0.0, open_low=True)

    def value(self, z: Tensor) -> Tensor:
        self._check(z)
        return 2 / (flat(z).square().sum(1) + 2 * self.eps)

    def gradient(self, z: Tensor) -> Tensor:
        return -per_sample_like(self.value(z).square(), z) * z


@dataclass(frozen=True)
class Decorrelation(Regularizer):
    """R(Z) = 1/2 sum_{i != j} cos^2(z_i, z_j) of the rows of Z, features x batch (channels x batch and positions for images).

    The gradient is g_i = 2 (I - Proj(z_i)) sum_{j != i} Proj(z_j) z_i / |z_i|^2 (the paper prints I + Proj), computed in
    O(features^2 batch). A feature that is 0 all over the batch has cosine 0 with the others, and gradient 0. Near 0 the gradient
    grows like 1 / |z_i|; `eps` > 0 bounds it: |z_i| becomes sqrt(|z_i|^2 + eps), and R no longer ignores the scale of a feature.

    Examples:
        >>> import torch
        >>> from opteq.regularizers import Decorrelation
        >>> same, apart = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> [round(Decorrelation().value(z).item(), 3) for z in (same, apart)]
        [1.0, 0.0]
    """

    formula: ClassVar[str] = "1/2 sum_{i != j} cos^2(z_i, z_j) over pairs of features"
    latex: ClassVar[str] = r"\tfrac{1}{2} \sum_{i \neq j} \cos^2(z_i, z_j)"
    couples_batch: ClassVar[bool] = True
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "eps", self.eps, 0.0)

    def value(self, z: Tensor) -> Tensor:
        self._check(z)
        units, _ = self._units(_rows(z))
        return (_cosines(units).square().sum() / 2).to(z.dtype)

    def gradient(self, z: Tensor) -> Tensor:
        self._check(z)
        units, inverse = self._units(_rows(z))
        slope = 2 * inverse * (_pull(units) @ units)
        batch, features, *rest = z.shape
        return slope.reshape(features, batch, *rest).transpose(0, 1).to(z.dtype)

    def frozen(self, reference: Tensor) -> "FrozenDecorrelation":
        self._check(reference, "reference")
        units, inverse = self._units(_rows(reference.detach()))
        return FrozenDecorrelation(2 * inverse * _pull(units) * inverse.T)

    def _units(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """z_i / |z_i| and 1 / |z_i|, both 0 for a zero feature."""
        square = rows.square().sum(1, keepdim=True) + self.eps
        alive = square > torch.finfo(rows.dtype).tiny
        inverse = torch.where(alive, square, 1).rsqrt() * alive  # no 1/0 even in the branch not taken: its derivative is NaN
        return rows * inverse, inverse


@dataclass(frozen=True, eq=False)
class FrozenDecorrelation(Regularizer):
    """R(z) = z' M z / 2 for each sample: Decorrelation with the matrix M of its gradient, grad R(Z) = M Z, held fixed.

    This is the linearised statistic: on the batch that M was made of, the gradient is that of Decorrelation, but the values are
    not; they even sum to 0 there (for eps = 0), because R ignores the scale of z.

    Examples:
        >>> import torch
        >>> from opteq.regularizers import Decorrelation
        >>> batch = torch.randn(16, 4)
        >>> frozen = Decorrelation().frozen(batch)
        >>> frozen.value(batch[:1]).shape, torch.allclose(frozen.gradient(batch), Decorrelation().gradient(batch), atol=1e-5)
        (torch.Size([1]), True)
    """

    formula: ClassVar[str] = "z' M z / 2 with the M of a fixed batch"
    latex: ClassVar[str] = r"\tfrac{1}{2} z^\top M z"
    M: Tensor  # [features, features], symmetric

    @property
    def smoothness(self) -> float | None:
        return float(torch.linalg.matrix_norm(self.M, 2))

    def value(self, z: Tensor) -> Tensor:
        return flat(z * self.gradient(z)).sum(1) / 2

    def gradient(self, z: Tensor) -> Tensor:
        self._check(z)
        check_shape(self, "z", z, (self.M.shape[0], *z.shape[2:]))
        return torch.einsum("ij,bj...->bi...", self.M.to(z.dtype), z)


@dataclass(frozen=True)
class HSIC(Regularizer):
    """R(Z) = (B-1)^-2 sum_{i < j} tr(K_i H K_j H), H = I - 11'/B, over the pairs of features: small when they are independent.

    K_i = exp(-|z_i^b - z_i^c|^2 / (2 sigma_i^2)) compares feature i (of an image: the map of channel i) between the samples b and c
    of the batch of B. sigma_i is `bandwidth`, or the median of the distances between pairs of samples (the lower one where there
    are two; 1 where it is 0, as for a feature that is mostly 0); the gradient goes through the median too.

    The exact form takes O(features B^2) memory, and so does the median. `features=D` replaces K_i by Phi_i Phi_i', with D random
    Fourier features sqrt(2/D) cos(w z + p) of its own for each i: an unbiased estimate for a given bandwidth, the same at every
    call, with an error like 1 / sqrt(D).

    Examples:
        >>> import torch
        >>> from opteq.regularizers import HSIC
        >>> z = torch.randn(64, 1)
        >>> dependent, independent = torch.cat([z, z**2], 1), torch.randn(64, 2)
        >>> bool(HSIC().value(dependent) > 3 * HSIC().value(independent))
        True
    """

    formula: ClassVar[str] = "sum_{i < j} tr(K_i H K_j H) / (B-1)^2 over pairs of features"
    latex: ClassVar[str] = r"(B-1)^{-2} \sum_{i < j} \mathrm{tr}(K_i H K_j H)"
    couples_batch: ClassVar[bool] = True
    bandwidth: float | str = "median"
    features: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.bandwidth, str):
            check_number(self, "bandwidth", self.bandwidth, 0.0, open_low=True)
        elif self.bandwidth != "median":
            raise ValueError(invalid(self, "bandwidth", "'median' or a finite number > 0", self.bandwidth))
        if self.features is not None:
            check_integer(self, "features", self.features, 1)
        check_integer(self, "seed", self.seed, 0)

    def value(self, z: Tensor) -> Tensor:
        self._check(z)
        batch = z.shape[0]
        if batch < 2:
            return z.sum() * 0  # nothing to compare, and (B-1)^-2 is 1/0
        points = _points(z)
        total = self._exact(points) if self.features is None else self._random(points, self.features)
        return (total / (batch - 1) ** 2).to(z.dtype)

    def frozen(self, reference: Tensor) -> "FrozenHSIC":
        """Of the exact kernels, also when this one estimates them."""
        self._check(reference, "reference")
        if reference.shape[0] == 0:
            raise ValueError(invalid(self, "reference", "of at least one sample", list(reference.shape)))
        points = _points(reference.detach())
        squares = _squared_distances(points, points)
        widths = self._squared_widths(points, squares)
        kernels = _kernels(squares, widths)
        means = kernels.mean(1, keepdim=True)
        base = _pair_products(_centred(kernels)).sum()
        return FrozenHSIC(points, widths, means, means.mean(2, keepdim=True), base, tuple(reference.shape[1:]))

    def _exact(self, points: Tensor) -> Tensor:
        squares = _squared_distances(points, points)
        kernels = _kernels(squares, self._squared_widths(points, squares))
        return _pair_products(_centred(kernels)).sum()

    def _random(self, points: Tensor, count: int) -> Tensor:
        """sum_{i<j} |Phi_i' H Phi_j|^2 = (|Phi' H Phi|^2 - sum_i |Phi_i' H Phi_i|^2) / 2, Phi the Phi_i side by side."""
        squares = _squared_distances(points, points) if self.bandwidth == "median" else None
        directions, phases = self._draw(points, count)
        angles = points / self._squared_widths(points, squares).sqrt() @ directions + phases
        waves = math.sqrt(2 / count) * torch.cos(angles)
        waves = waves - waves.mean(1, keepdim=True)
        together = waves.transpose(0, 1).flatten(1)
        return (_gram_square(together) - _gram_square(waves).sum()) / 2

    def _draw(self, points: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """w of N(0, 1) and p of U(0, 2 pi), for each feature its own: shared ones would bias the products of two kernels."""
        features, _, length = points.shape
        with temporarily_clear_interpreter_stack():  # vmap refuses to draw numbers; these depend on the seed alone
            source = torch.Generator().manual_seed(self.seed)
            directions = torch.randn(features, length, count, generator=source, dtype=torch.float64, device="cpu")
            phases = 2 * math.pi * torch.rand(features, 1, count, generator=source, dtype=torch.float64, device="cpu")
        return directions.to(points.device, points.dtype), phases.to(points.device, points.dtype)

    def _squared_widths(self, points: Tensor, squares: Tensor | None) -> Tensor:
        """sigma_i^2, [features, 1, 1], from the squared distances: only the median needs them."""
        if squares is None or not isinstance(self.bandwidth, str):
            return points.new_full((points.shape[0], 1, 1), float(self.bandwidth) ** 2)
        batch = squares.shape[-1]
        if batch < 2:
            return torch.ones_like(squares)
        first, second = torch.triu_indices(batch, batch, 1, device=squares.device)
        median = squares[:, first, second].median(1).values[:, None, None]
        return torch.where(median > 0, median, 1)


@dataclass(frozen=True, eq=False)
class FrozenHSIC(Regularizer):
    """R(z) = HSIC of the reference batch with z as one more sample, for each sample; bandwidths and kernels of the reference.

    With A_i the centred kernel of the n reference samples, a_i that of z with them and c_i that of z with itself, all centred at
    the mean of the reference, tr(K_i H K_j H) = <A_i, A_j> + 2 t <a_i, a_j> + t^2 c_i c_j, t = n / (n+1).

    Examples:
        >>> import torch
        >>> from opteq.regularizers import HSIC
        >>> frozen = HSIC().frozen(torch.randn(32, 4))
        >>> frozen.value(torch.randn(5, 4)).shape, frozen.couples_batch
        (torch.Size([5]), False)
    """

    formula: ClassVar[str] = "sum_{i < j} tr(K_i H K_j H) / n^2 over pairs of features, z joined to n fixed samples"
    latex: ClassVar[str] = r"n^{-2} \sum_{i < j} \mathrm{tr}(K_i(z) H K_j(z) H)"
    reference: Tensor  # [features, n, length]
    squared_widths: Tensor  # [features, 1, 1]
    means: Tensor  # of the columns of the reference's kernels, [features, 1, n]
    mean: Tensor  # of these, [features, 1, 1]
    base: Tensor  # sum_{i < j} <A_i, A_j>
    shape: tuple[int, ...]  # of a sample

    def value(self, z: Tensor) -> Tensor:
        self._check(z)
        check_shape(self, "z", z, self.shape)
        count = self.reference.shape[1]
        shrink = count / (count + 1)
        kernels = _kernels(_squared_distances(_points(z).to(self.reference.dtype), self.reference), self.squared_widths)
        means = kernels.mean(2, keepdim=True)
        across = _pair_products(kernels - means - self.means + self.mean).sum(1)
        alone = _pair_products(self.mean - 2 * means)[:, 0]
        return ((self.base + 2 * shrink * across + shrink**2 * alone) / count**2).to(z.dtype)


def _rows(z: Tensor) -> Tensor:
    """One row a feature: [batch, features, ...] -> [features, batch and positions]."""
    return at_least_single(z).transpose(0, 1).flatten(1)


def _points(z: Tensor) -> Tensor:
    """One list of vectors a feature: [batch, features, ...] -> [features, batch, length]."""
    z = at_least_single(z)
    return (z[..., None] if z.ndim == 2 else z.flatten(2)).transpose(0, 1)


def _cosines(units: Tensor) -> Tensor:
    """cos(z_i, z_j) off the diagonal, 0 on it."""
    return (units @ units.T) * (1 - torch.eye(units.shape[0], dtype=units.dtype, device=units.device))


def _pull(units: Tensor) -> Tensor:
    """cos_ij off the diagonal, -sum_{j != i} cos_ij^2 on it: half of M for features of norm 1."""
    cosines = _cosines(units)
    return cosines - torch.diag(cosines.square().sum(1))


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_b - y_c|^2 for each feature: [features, batch, length], [features, n, length] -> [features, batch, n]."""
    if x.shape[-1] == 1:
        return (x - y.mT).square()
    middle = y.mean(1, keepdim=True)
    x, y = x - middle, y - middle
    sizes = x.square().sum(2, keepdim=True) + y.square().sum(2)[:, None]
    squares = sizes - 2 * x @ y.mT
    # Differences of the size of the rounding count as 0: equal maps, such as those of a dead channel, must not set the median.
    return torch.where(squares > 32 * torch.finfo(x.dtype).eps * sizes, squares, 0)


def _kernels(squares: Tensor, squared_widths: Tensor) -> Tensor:
    """K - 1: centring removes the 1, and without it nothing is lost when all entries are near 1."""
    return torch.expm1(-squares / (2 * squared_widths))


def _centred(kernels: Tensor) -> Tensor:
    """H K H of each feature."""
    return kernels - kernels.mean(1, keepdim=True) - kernels.mean(2, keepdim=True) + kernels.mean((1, 2), keepdim=True)


def _pair_products(items: Tensor) -> Tensor:
    """sum_{i < j} x_i x_j, entry by entry. |sum_i x_i|^2 - sum_i |x_i|^2 would cancel where the sum of the products is small."""
    return (items[1:] * items[:-1].cumsum(0)).sum(0)


def _gram_square(x: Tensor) -> Tensor:
    """|X' X|^2 = |X X'|^2, by the smaller of the two."""
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return gram.square().sum((-2, -1))
