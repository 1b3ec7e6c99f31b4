"""||W||, the largest of |W z| / |z|, of linear maps, and the ball {W : ||W|| <= limit}.

A convolution is a multiplication by K(w) = sum_t K_t exp(-i w.t), a [hidden, channels] matrix, at each frequency w.
The norm of the kernel reshaped to a matrix is another number: it can be too small by the square root of the kernel's size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from opteq.batch import own_precision
from opteq.checks import check_instance, check_integer, check_number, invalid
from opteq.operators import Conv, Dense, Operator, Separable

__all__ = ["Evidence", "Norm", "NormBall", "operator_norm", "scale_to"]

Evidence: TypeAlias = Literal["exact", "bound", "estimate"]

_CHUNK = 2**17  # complex numbers of a batch of matrices: 1 MB in single precision, to stay in the cache
_FIRST = 8  # how many of the most promising frequencies get their eigenvalues computed at a time
_RATIO = 32  # points of the grid of frequencies per degree of the kernel: 1 / cos(pi / 32)^2 < 1.01


@dataclass(frozen=True)
class Norm:
    """||W||: `exact` up to rounding; a `bound` is never below it, an `estimate` never above it.

    Examples:
        >>> import torch
        >>> from opteq.spectral import Norm
        >>> Norm(torch.tensor(0.5), "bound", "fft")
        Norm(<= 0.5, bound by fft)
    """

    value: Tensor  # 0-d
    evidence: Evidence
    method: str

    def __float__(self) -> float:
        return float(self.value.detach())

    def __repr__(self) -> str:
        sign = {"exact": "=", "bound": "<=", "estimate": ">="}[self.evidence]
        return f"Norm({sign} {float(self):.6g}, {self.evidence} by {self.method})"


@dataclass(frozen=True)
class _Grid:
    """The frequencies 2 pi (i / rows, j / columns); the norm is at most the largest |K(w)| on them times `factor`."""

    rows: int
    columns: int
    factor: float
    evidence: Evidence
    method: str


def operator_norm(operator: Operator, size: Sequence[int] | None = None, *, method: Literal["lanczos"] | None = None) -> Norm:
    """max |W z| / |z|, for convolutions on images of `size` (height, width).

    Dense: exact, the largest singular value. Convolutions, also separable ones:

    - circular, with a size: exact, max |K(w)| over the frequencies of the image.
    - zeros, with a size: a bound, the norm on the torus of size + kernel - 1. No product wraps around there, so that
      the padded convolution is a part of that one.
    - without a size: a bound for images of every size, at most 1% above the supremum of |K(w)|, see `_everywhere`.

    `method="lanczos"` estimates the norm of any operator from its products, in double precision, without gradients.
    It can only be too small. An operator that is none of the above takes the shape of one sample as its `size`.

    Examples:
        >>> import torch
        >>> from opteq.operators import Conv, Dense
        >>> from opteq.spectral import operator_norm
        >>> operator_norm(Dense(torch.diag(torch.tensor([3.0, 1.0]))))
        Norm(= 3, exact by svd)
        >>> sum_of_nine = Conv(torch.ones(1, 1, 3, 3), "circular")
        >>> operator_norm(sum_of_nine, (8, 8)).evidence, operator_norm(sum_of_nine).evidence
        ('exact', 'bound')
    """
    check_instance("operator_norm", "operator", operator, Operator, "an Operator")
    _check_size(operator, size)
    if method == "lanczos":
        return Norm(_lanczos(operator, _sample(operator, size)), "estimate", "lanczos")
    if method is not None:
        raise ValueError(invalid("operator_norm", "method", "None or 'lanczos'", method))
    if isinstance(operator, Dense):
        return Norm(torch.linalg.matrix_norm(_computable(operator.W), 2), "exact", "svd")
    if not isinstance(operator, (Conv, Separable)):
        kind = type(operator).__name__
        raise TypeError(invalid("operator_norm", "method", f"'lanczos' for a {kind}, whose norm has no formula here", method))
    kernel = _kernel(operator)
    grid = _grid(kernel, operator.padding, size)
    return Norm(torch.linalg.matrix_norm(_at_peak(kernel, grid), 2) * grid.factor, grid.evidence, grid.method)


def scale_to(operator: Operator, limit: float) -> Tensor:
    """min(1, limit / ||W||), by an upper bound of ||W|| that holds for images of every size; differentiable.

    A weight multiplied by it has ||W|| <= limit, its own rounding included: the bound is enlarged by some units in the
    last place (1e-5 for 64 channels in single precision), and the factor is exactly 1 below that.

    Examples:
        >>> import torch
        >>> from opteq.operators import Dense
        >>> from opteq.spectral import scale_to
        >>> [round(scale_to(Dense(size * torch.eye(2)), 1.0).item(), 3) for size in (0.5, 4.0)]
        [1.0, 0.25]
    """
    check_number("scale_to", "limit", limit, 0, open_low=True)
    if isinstance(operator, Dense):
        weight, matrix = operator.W, _computable(operator.W)
        factor = _slack(weight.dtype, matrix.dtype, min(matrix.shape), 1)
    elif isinstance(operator, (Conv, Separable)):
        weight, kernel = operator.W if isinstance(operator, Conv) else operator.P, _kernel(operator)
        grid = _grid(kernel, operator.padding, None)
        factor = grid.factor * _slack(weight.dtype, kernel.dtype, kernel.shape[2], kernel.shape[3] * kernel.shape[4])
        matrix = _at_peak(kernel, grid, floor=limit / factor)
    else:
        raise TypeError(invalid("scale_to", "operator", "a Dense, Conv or Separable", type(operator).__name__))
    fixed = matrix.detach()
    outside = torch.linalg.matrix_norm(fixed, 2) * factor > limit
    # Second derivatives of the norm are not finite where singular values are equal, as in zero weights; inside nobody needs them.
    bound = (torch.linalg.matrix_norm(torch.where(outside, matrix, fixed), 2) * factor).clamp(min=limit)
    ratio: Tensor = torch.full_like(bound, limit) / bound
    return ratio.to(weight.dtype)


class NormBall(nn.Module):
    """W -> W min(1, limit / ||W||): a parametrization for torch.nn.utils.parametrize.

    `build` makes the operator of a weight, e.g. `Dense`, `Conv` or `lambda W: Conv(W, "circular")`. The norm holds for
    images of every size. Weights inside the ball are returned as they are; see `scale_to` for the rounding at its edge.
    A weight is assigned as it is (`right_inverse`) and read scaled.

    Examples:
        >>> import torch
        >>> from opteq.spectral import NormBall
        >>> layer = torch.nn.utils.parametrize.register_parametrization(torch.nn.Linear(4, 4), "weight", NormBall(0.9))
        >>> layer.weight = 10 * torch.eye(4)
        >>> round(torch.linalg.matrix_norm(layer.weight, 2).item(), 3)
        0.9
    """

    def __init__(self, limit: float, build: Callable[[Tensor], Operator] = Dense) -> None:
        super().__init__()
        check_number(self, "limit", limit, 0, open_low=True)
        if not callable(build):
            raise TypeError(invalid(self, "build", "a function from a weight to an Operator", build))
        self.limit = float(limit)
        self.build = build

    def forward(self, W: Tensor) -> Tensor:
        """W min(1, limit / ||W||)."""
        return W * scale_to(self.build(W), self.limit)

    def right_inverse(self, W: Tensor) -> Tensor:
        """W: what is assigned is stored."""
        return W

    def extra_repr(self) -> str:
        return f"limit={self.limit:g}, build={getattr(self.build, '__name__', self.build)}"


def _check_size(operator: Operator, size: object) -> None:
    """Raise unless `size` is what the operator needs: nothing, (height, width) or the shape of a sample."""
    if size is None:
        return
    if isinstance(operator, Dense):
        raise ValueError(invalid("operator_norm", "size", "None for a Dense operator", size))
    expected = "a pair (height, width) of integers >= 1" if isinstance(operator, (Conv, Separable)) else "integers >= 1"
    if not isinstance(size, (tuple, list)):
        raise TypeError(invalid("operator_norm", "size", expected, size))
    for length in size:
        check_integer("operator_norm", "size", length, 1)
    if isinstance(operator, (Conv, Separable)) and len(size) != 2:
        raise ValueError(invalid("operator_norm", "size", expected, size))


def _sample(operator: Operator, size: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of one input of the operator, without the batch."""
    if isinstance(operator, Dense):
        return (operator.W.shape[-1],)
    if size is None:
        raise ValueError(invalid("operator_norm", "size", "given when the method is 'lanczos'", size))
    if isinstance(operator, Conv):
        return (operator.W.shape[1] * operator.groups, *size)
    return (operator.D.shape[0], *size) if isinstance(operator, Separable) else tuple(size)


def _lanczos(operator: Operator, shape: tuple[int, ...]) -> Tensor:
    """|W v| / |v| for the v that Lanczos' method finds for W'W: a lower bound whatever v is."""
    import numpy as np
    from scipy.sparse.linalg import LinearOperator, eigsh  # type: ignore[import-untyped]

    devices = {leaf.tensor.device for leaf in operator.leaves()}
    exact = operator.replace_leaves(lambda leaf: leaf.tensor.detach().to("cpu", torch.float64))
    count = math.prod(shape)

    def gram(v: Any) -> Any:
        return exact.adjoint(exact(torch.as_tensor(v, dtype=torch.float64).view(1, *shape))).flatten().numpy()

    with torch.no_grad():
        v = np.random.default_rng(0).standard_normal(count)  # a constant image would miss eigenvectors of other symmetries
        if count > 1 and np.any(gram(v)):
            v = eigsh(LinearOperator((count, count), matvec=gram, dtype=np.float64), k=1, which="LA", v0=v)[1][:, 0]
        z = torch.as_tensor(v).view(1, *shape)
        value: Tensor = torch.linalg.vector_norm(exact(z)) / torch.linalg.vector_norm(z)
    return value.to(devices.pop()) if devices else value


def _computable(weight: Tensor) -> Tensor:
    """The weight in a precision that torch.linalg knows."""
    return weight if weight.dtype == torch.float64 else weight.float()


def _kernel(operator: Conv | Separable) -> Tensor:
    """K: [groups, hidden, channels, k, k] with hidden >= channels; exchanging the two leaves every |K(w)| as it is."""
    if isinstance(operator, Separable):
        kernel = (_computable(operator.P)[:, :, None, None] * _computable(operator.D)[:, 0])[None]
    else:
        kernel = _computable(operator.W).unflatten(0, (operator.groups, -1))
    return kernel if kernel.shape[1] >= kernel.shape[2] else kernel.transpose(1, 2)


def _grid(kernel: Tensor, padding: str, size: Sequence[int] | None) -> _Grid:
    """The frequencies that give the norm, or a bound of it."""
    height, width = kernel.shape[-2:]
    if height == width == 1:  # K(w) is the same at every frequency
        return _Grid(1, 1, 1.0, "exact", "svd")
    if size is None:
        return _everywhere(height, width)
    if padding == "circular":
        return _Grid(size[0], size[1], 1.0, "exact", "fft")
    return _Grid(size[0] + height - 1, size[1] + width - 1, 1.0, "bound", "fft of a larger torus")


def _everywhere(height: int, width: int) -> _Grid:
    """sup |K(w)| <= max |K(w)| on N points per axis / cos(pi r / N), one such factor per axis.

    With the kernel centred, f(w) = Re u*K(w)v is a real trigonometric polynomial of degree r = (k - 1) / 2 along each
    axis (of degree k - 1 in w / 2 when k is even). M. Riesz: at a distance d < pi / r from a maximum f is at least
    max f cos(r d), and some point of the grid is at a distance of pi / N or less.
    """
    rows, columns = (max(1, _RATIO * (k - 1) // 2) for k in (height, width))
    least = math.cos(math.pi * (height - 1) / 2 / rows) * math.cos(math.pi * (width - 1) / 2 / columns)
    return _Grid(rows, columns, 1 / least, "bound", "fft on a grid of all frequencies")


def _slack(stored: torch.dtype, computed: torch.dtype, rank: int, taps: int) -> float:
    """1 + the relative error of a norm, of a factor made of it and of a weight times the factor.

    Rounding moves each entry by half an eps of itself at most, and so the norm by sqrt(taps) |K| eps / 2, where the Frobenius
    norm |K| <= sqrt(rank) ||K|| (Parseval). The error of singular values and of `_peak` is some sqrt(rank) eps.
    """
    entries = torch.finfo(stored).eps * (1 + math.sqrt(rank * taps) / 2)
    return 1 + entries + 8 * math.sqrt(rank) * torch.finfo(computed).eps


def _at_peak(kernel: Tensor, grid: _Grid, floor: float = 0.0) -> Tensor:
    """K(w) of the group and the frequency of the grid where |K(w)| is largest, or any when all of them are below `floor`."""
    with own_precision(kernel):  # products of less precision would let weights leave their ball
        peak = torch.ops.opteq.peak(kernel.detach(), grid.rows, grid.columns, floor)
        group, row, column = _places(peak[None], grid.rows, grid.columns)
        block = kernel.index_select(0, group).flatten(-2)[0]  # [hidden, channels, taps]
        angles = _angles(row, column, kernel.shape[-2:], grid.rows, grid.columns).to(kernel)[0]
        return torch.complex(block @ angles.cos(), block @ angles.sin())


def _places(index: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(group, i, j) of a position among the frequencies; K(-w) is the conjugate of K(w), so half of the columns suffice."""
    half = columns // 2 + 1
    return index // (rows * half), index // half % rows, index % half


def _angles(row: Tensor, column: Tensor, size: Sequence[int], rows: int, columns: int, shift: Sequence[int] = (0, 0)) -> Tensor:
    """w.t for frequencies w and the taps t of a kernel: [frequencies, taps].

    Taken modulo the grid, which is what wraps a kernel larger than the image.
    """
    down = torch.arange(size[0], device=row.device) - shift[0]
    across = torch.arange(size[1], device=row.device) - shift[1]
    vertical = (row[:, None] * down % rows).double() / rows
    horizontal = (column[:, None] * across % columns).double() / columns
    return 2 * math.pi * (vertical[:, :, None] + horizontal[:, None, :]).flatten(1)


def _peak(kernel: Tensor, rows: int, columns: int, floor: float) -> Tensor:
    """argmax |K(w)| over groups and frequencies, up to rounding; any place when all are below `floor`."""
    scale = float(kernel.abs().max())
    peak = 0
    if 0 < scale < math.inf:  # otherwise every place is as good
        # No kernel with entries up to 1 has a norm of 1e15, and single precision holds its square.
        best = min(floor / scale, 1e15) ** 2
        count = rows * (columns // 2 + 1)
        step = min(count, max(1, _CHUNK // kernel.shape[2] ** 2))
        space = _Space(step, kernel.shape[2], kernel)
        for group, block in enumerate(kernel / scale):
            correlation = _correlation(block)
            for start in range(0, count, step):
                places = torch.arange(start, min(start + step, count), device=kernel.device)
                found, best = _search(_minus_gram(correlation, places, rows, columns, space), best, space)
                peak = peak if found is None else group * count + start + found
    return torch.tensor(peak, device=kernel.device)


def _peak_shape(kernel: Tensor, rows: int, columns: int, floor: float) -> Tensor:
    return kernel.new_empty((), dtype=torch.int64)


def _peak_of_each(info: Any, in_dims: Any, kernel: Tensor, rows: int, columns: int, floor: float) -> tuple[Tensor, int]:
    return torch.stack([torch.ops.opteq.peak(each, rows, columns, floor) for each in kernel.unbind(in_dims[0])]), 0


# An operator of its own is opaque to torch.func and torch.compile, so that it may look at values under their transforms.
# (torch.library.custom_op would do the same and import torch._dynamo at the first call, which takes seconds.)
_LIBRARY = torch.library.Library("opteq", "FRAGMENT")
_LIBRARY.define("peak(Tensor kernel, int rows, int columns, float floor) -> Tensor")
_LIBRARY.impl("peak", _peak, "CompositeExplicitAutograd")
torch.library.register_fake("opteq::peak", _peak_shape, lib=_LIBRARY)
torch.library.register_vmap("opteq::peak", _peak_of_each, lib=_LIBRARY)


def _correlation(block: Tensor) -> Tensor:
    """C_d = -sum_t K_t' K_(t + d), the taps of -K(w)* K(w): [2 k - 1, 2 k - 1, channels, channels]."""
    taps = block.transpose(0, 1)  # [channels, hidden, k, k]
    height, width = taps.shape[-2:]
    return torch.nn.functional.conv2d(taps, -taps, padding=(height - 1, width - 1)).permute(2, 3, 1, 0).contiguous()


class _Space:
    """Memory for one batch of matrices, used again for the next: new pages would cost as much time as the arithmetic."""

    def __init__(self, step: int, channels: int, like: Tensor) -> None:
        dtype = like.dtype.to_complex()
        self.parts = like.new_empty(2, step, channels**2)
        self.matrices = like.new_empty(step, channels, channels, dtype=dtype)
        self.factors = like.new_empty(step, channels, channels, dtype=dtype).mT  # the order of LAPACK
        self.info = like.new_empty(step, dtype=torch.int32)


def _minus_gram(correlation: Tensor, places: Tensor, rows: int, columns: int, space: _Space) -> Tensor:
    """-K(w)* K(w) at some frequencies, up to conjugation: [frequencies, channels, channels]."""
    height, width = correlation.shape[:2]
    _, row, column = _places(places, rows, columns)
    angles = _angles(row, column, (height, width), rows, columns, (height // 2, width // 2)).to(correlation)
    taps = correlation.view(height * width, -1)
    real, imaginary = space.parts[:, : len(places)]
    torch.mm(angles.cos(), taps, out=real)
    torch.mm(angles.sin(), taps, out=imaginary)
    matrices = space.matrices[: len(places)]
    torch.complex(real, imaginary, out=matrices.flatten(1))
    return matrices


def _search(minus: Tensor, best: float, space: _Space) -> tuple[int | None, float]:
    """The place and value of the largest eigenvalue of the matrices G = -minus, or (None, best) when none is above `best`.

    A Cholesky factor of t I - G exists if and only if all eigenvalues of G are below t. It costs a fifth of the eigenvalues,
    which are left for the matrices that a few power steps make look largest, and for those that fail the test.
    """
    margin = 1 + 4 * math.sqrt(minus.shape[-1]) * torch.finfo(minus.dtype).eps  # equal ones are not computed one by one
    left = torch.arange(len(minus), device=minus.device)
    if best > 0:
        left = left[_reaches(minus, best * margin, space)]
    left = left[_power(minus[left]).argsort(descending=True)] if len(left) > _FIRST else left
    found = None
    while len(left):
        top, left = left[:_FIRST], left[_FIRST:]
        value, place = torch.linalg.eigvalsh(minus[top])[:, 0].neg().max(0)
        if float(value) > best:
            found, best = int(top[place]), float(value)
        left = left[_reaches(minus[left], best * margin, space)] if len(left) else left
    return found, best


def _reaches(minus: Tensor, level: float, space: _Space) -> Tensor:
    """Whether an eigenvalue of each G = -minus is `level` or more."""
    diagonal = minus.diagonal(dim1=-2, dim2=-1)
    kept = diagonal.clone()
    diagonal.add_(level)
    info = space.info[: len(minus)]
    torch.linalg.cholesky_ex(minus.mT, upper=True, out=(space.factors[: len(minus)], info))
    diagonal.copy_(kept)
    return info != 0


def _power(gram: Tensor, steps: int = 3) -> Tensor:
    """|G^p x| / |G^(p - 1) x|, at most the largest eigenvalue, for an x without symmetries."""
    x = torch.arange(1, gram.shape[-1] + 1, device=gram.device).sin().to(gram)[:, None]
    for _ in range(steps - 1):
        y = gram @ x
        x = y / y.abs().amax(-2, keepdim=True).clamp(min=torch.finfo(gram.dtype).tiny)
    before: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    after: Tensor = torch.linalg.vector_norm(gram @ x, dim=(-2, -1))
    return after / before.clamp(min=torch.finfo(gram.dtype).tiny)
