"""Linear maps on batches, each with its exact adjoint: <W z, s> = <z, W' s>; and what is made of one once, for many solves."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor

from opteq.batch import added
from opteq.checks import is_transformed
from opteq.products import affine, inverse, product
from opteq.tree import Tree

__all__ = [
    "Conv",
    "Dense",
    "Factors",
    "Fourier",
    "MonotoneOperator",
    "Operator",
    "Padding",
    "Reflection",
    "Separable",
    "Transposed",
    "rotated",
    "symbol",
]

Padding: TypeAlias = Literal["zeros", "circular"]


class Operator(Tree, ABC):
    """W: a frozen dataclass of tensors with two products, whose results are in memory of their own."""

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """W z."""

    @abstractmethod
    def adjoint(self, s: Tensor) -> Tensor:
        """W' s."""

    def affine(self, u: Tensor, z: Tensor) -> Tensor:
        """W z + u; operators that can do both at once override this."""
        return added(self(z), u)

    def adjoint_affine(self, u: Tensor, s: Tensor) -> Tensor:
        """W' s + u, likewise."""
        return added(self.adjoint(s), u)

    def resolvent(self, step: float, shape: Sequence[int]) -> "Operator":
        """(I + step (I - W))^-1 on samples of a shape, factorised once; TypeError where no factorisation is known."""
        raise TypeError(f"{type(self).__name__} has no known resolvent.")

    def has_resolvent(self) -> bool:
        """Whether `resolvent` knows a factorisation."""
        return False

    def reflection(self) -> "Operator":
        """2 W - I."""
        return Reflection(self)


@dataclass(frozen=True)
class Reflection(Operator):
    """2 R - I."""

    R: Operator

    def __call__(self, z: Tensor) -> Tensor:
        return 2 * self.R(z) - z

    def adjoint(self, s: Tensor) -> Tensor:
        return 2 * self.R.adjoint(s) - s


@dataclass(frozen=True)
class Transposed(Operator):
    """W'."""

    W: Operator

    def __call__(self, z: Tensor) -> Tensor:
        return self.W.adjoint(z)

    def adjoint(self, s: Tensor) -> Tensor:
        return self.W(s)

    def affine(self, u: Tensor, z: Tensor) -> Tensor:
        return self.W.adjoint_affine(u, z)

    def adjoint_affine(self, u: Tensor, s: Tensor) -> Tensor:
        return self.W.affine(u, s)


@dataclass(frozen=True)
class Dense(Operator):
    """z -> W z for rows z."""

    W: Tensor  # [hidden, features]

    def __call__(self, z: Tensor) -> Tensor:
        return product(z, self.W.T) if z.ndim == 2 else torch.nn.functional.linear(z, self.W)

    def adjoint(self, s: Tensor) -> Tensor:
        return product(s, self.W)

    def affine(self, u: Tensor, z: Tensor) -> Tensor:
        return affine(u, z, self.W.T) if z.ndim == 2 else super().affine(u, z)

    def adjoint_affine(self, u: Tensor, s: Tensor) -> Tensor:
        return affine(u, s, self.W) if s.ndim == 2 else super().adjoint_affine(u, s)

    def resolvent(self, step: float, shape: Sequence[int]) -> "Dense":
        """The inverse as a matrix, for I - W >= 0: one product is then as cheap as one with W."""
        identity = torch.eye(len(self.W), dtype=self.W.dtype, device=self.W.device)
        A = identity + step * (identity - self.W)  # I - W first: W may be close to I, and step large
        return Dense(inverse(A))

    def has_resolvent(self) -> bool:
        return True

    def reflection(self) -> "Dense":
        return Dense(2 * self.W - torch.eye(len(self.W), dtype=self.W.dtype, device=self.W.device))


@dataclass(frozen=True)
class Conv(Operator):
    """z -> W * z, a convolution of stride 1 that keeps the size of the image, whatever the size of the kernel."""

    W: Tensor  # [hidden, channels / groups, k, k]
    padding: Padding = "zeros"
    groups: int = 1

    def __call__(self, z: Tensor) -> Tensor:
        return self._convolve(z, self.W, self._margins())

    def adjoint(self, s: Tensor) -> Tensor:
        """The convolution with the flipped kernel, its channels exchanged; the margins change sides."""
        hidden, channels, *size = self.W.shape
        blocks = self.W.reshape(self.groups, hidden // self.groups, channels, *size).transpose(1, 2)
        flipped = blocks.reshape(self.groups * channels, hidden // self.groups, *size).flip(-2, -1)
        left, right, top, bottom = self._margins()
        return self._convolve(s, flipped, (right, left, bottom, top))

    def _margins(self) -> tuple[int, int, int, int]:
        """(left, right, top, bottom): one less on the near side when the kernel is even."""
        height, width = self.W.shape[-2:]
        return (width - 1) // 2, width // 2, (height - 1) // 2, height // 2

    def _convolve(self, z: Tensor, kernel: Tensor, margins: tuple[int, int, int, int]) -> Tensor:
        left, right, top, bottom = margins
        if self.padding == "circular":
            z = _wrapped(z, margins)
        elif left == right and top == bottom:
            return torch.nn.functional.conv2d(z, kernel, padding=(top, left), groups=self.groups)
        else:
            z = torch.nn.functional.pad(z, margins)
        return torch.nn.functional.conv2d(z, kernel, groups=self.groups)


def _wrapped(z: Tensor, margins: tuple[int, int, int, int]) -> Tensor:
    """z continued periodically, also by more than its own size."""
    left, right, top, bottom = margins
    height, width = z.shape[-2:]
    if max(top, bottom) <= height and max(left, right) <= width:
        return torch.nn.functional.pad(z, margins, mode="circular")
    rows = torch.arange(-top, height + bottom, device=z.device) % height
    columns = torch.arange(-left, width + right, device=z.device) % width
    return z[..., rows, :][..., columns]


@dataclass(frozen=True)
class Separable(Operator):
    """z -> P (D * z): a convolution of each channel with a kernel of its own, then a matrix across channels."""

    D: Tensor  # [channels, 1, k, k]
    P: Tensor  # [hidden, channels]
    padding: Padding = "zeros"

    def __call__(self, z: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(self._depthwise()(z), self.P[:, :, None, None])

    def adjoint(self, s: Tensor) -> Tensor:
        return self._depthwise().adjoint(torch.nn.functional.conv2d(s, self.P.T[:, :, None, None]))

    def _depthwise(self) -> Conv:
        return Conv(self.D, self.padding, groups=self.D.shape[0])


def symbol(operator: Conv, size: Sequence[int], *, full: bool = False) -> Tensor:
    """The matrices by which a circular convolution multiplies the frequencies of images of a size.

    [height, width / 2 + 1, hidden, channels] or, where `full`, of all frequencies. Each column is the transform of what the
    convolution makes of one bright pixel.
    """
    kernel = operator.W
    pixels = torch.eye(kernel.shape[1], dtype=kernel.dtype, device=kernel.device)[:, :, None, None]
    images = torch.nn.functional.pad(pixels, (0, size[1] - 1, 0, size[0] - 1))
    spectra: Tensor = (torch.fft.fft2 if full else torch.fft.rfft2)(operator(images))
    return spectra.permute(2, 3, 1, 0)


def rotated(matrices: Tensor, spectrum: Tensor) -> Tensor:
    """Each frequency of a batch of spectra [batch, channels, ...] multiplied by its own matrix [..., hidden, channels]."""
    return torch.matmul(matrices, spectrum.movedim((0, 1), (-1, -2))).movedim((-1, -2), (0, 1))


@dataclass(frozen=True)
class Fourier(Operator):
    """A linear map of images that commutes with cyclic shifts, given by a matrix for each frequency."""

    matrices: Tensor  # complex [height, width / 2 + 1, channels, channels]
    size: tuple[int, int]

    def __call__(self, z: Tensor) -> Tensor:
        return self._filter(self.matrices, z)

    def adjoint(self, s: Tensor) -> Tensor:
        return self._filter(self.matrices.mH, s)

    def _filter(self, matrices: Tensor, z: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfft2(rotated(matrices, torch.fft.rfft2(z)), s=self.size)
        return out

    def reflection(self) -> "Fourier":
        identity = torch.eye(self.matrices.shape[-1], dtype=self.matrices.dtype, device=self.matrices.device)
        return Fourier(2 * self.matrices - identity, self.size)


@dataclass(frozen=True)
class MonotoneOperator(Operator):
    """W = (1 - m) I - A'A + B - B', so that I - W >= m I whatever A and B are."""

    m: float
    A: Operator
    B: Operator

    def __call__(self, z: Tensor) -> Tensor:
        return torch.add(self.B(z) - self.B.adjoint(z) - self.A.adjoint(self.A(z)), z, alpha=1 - self.m)

    def adjoint(self, s: Tensor) -> Tensor:
        return torch.add(self.B.adjoint(s) - self.B(s) - self.A.adjoint(self.A(s)), s, alpha=1 - self.m)

    def resolvent(self, step: float, shape: Sequence[int]) -> Fourier:
        """For circular convolutions: one small inverse for each frequency."""
        A, B = self.A, self.B
        if not (isinstance(A, Conv) and isinstance(B, Conv) and self.has_resolvent()):
            raise TypeError("A convolution has a known resolvent only where its padding is circular: others mix the frequencies.")
        channels, height, width = shape
        Ahat, Bhat = symbol(A, (height, width)), symbol(B, (height, width))
        identity = torch.eye(channels, dtype=Ahat.dtype, device=Ahat.device)
        matrices = torch.linalg.inv((1 + step * self.m) * identity + step * (Ahat.mH @ Ahat - Bhat + Bhat.mH))
        return Fourier(matrices, (height, width))

    def has_resolvent(self) -> bool:
        return all(isinstance(part, Conv) and part.padding == "circular" for part in (self.A, self.B))


class Factors:
    """What solvers computed from the tensors of a bound map, once, for its forward and its backward solves.

    It lives as long as the graph of the solution. Writes that PyTorch does not count (`.data`, fused optimizers) go unnoticed: a
    map that is bound before and solved after one may not converge, and says so.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[list[tuple[Tensor, int]], Any]] = {}

    def get(self, key: Any, operator: Operator, make: Callable[[], Any]) -> Any:
        """What `make` gives; made anew only if a tensor of the operator is not the one, or not as it was, the last time."""
        tensors = [leaf.tensor for leaf in operator.leaves()]
        if any(_unknown(tensor) for tensor in tensors):
            return make()
        sources, value = self._made.get(key, ([], None))
        if len(sources) != len(tensors) or not all(_same(*old, new) for old, new in zip(sources, tensors, strict=True)):
            value = make()
            self._made[key] = ([(t, t._version) for t in tensors], value)  # while we keep them, no other has their memory
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()


def _unknown(tensor: Tensor) -> bool:
    """Whether writes to the tensor are not recorded, or what is made of it must have derivatives."""
    return is_transformed(tensor) or tensor.is_inference() or (tensor.requires_grad and torch.is_grad_enabled())


def _same(old: Tensor, version: int, new: Tensor) -> bool:
    """Whether `new` is the memory of `old`, which has not been written to since."""
    alike = old.shape == new.shape and old.stride() == new.stride() and old.dtype == new.dtype and old.device == new.device
    return alike and old.data_ptr() == new.data_ptr() and old._version == version == new._version
