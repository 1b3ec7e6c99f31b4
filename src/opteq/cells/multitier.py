"""Monotone networks on several resolutions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from opteq.activations import Activation
from opteq.cells.monotone import MonotoneCell, MonotoneInit, image_size
from opteq.cells.tiers import Tiers
from opteq.checks import check_shape
from opteq.operators import Conv, Operator, rotated, symbol
from opteq.splitting import SplitMap

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class MonotoneTiers(Operator):
    """W = (1 - m) I - A'A + B - B' on packed tiers: (A z)_t = A_t * z_t + K_t * up(z_{t+1}) and (B z)_t = B_t * z_t.

    `up` puts zeros between the pixels of the coarser tier. A'A links neighbouring tiers in both directions.
    """

    m: float
    tiers: Tiers
    A: tuple[Conv, ...]
    B: tuple[Conv, ...]
    K: tuple[Conv, ...]  # one less: from each tier but the finest into the next finer one

    def __call__(self, z: Tensor) -> Tensor:
        return self._product(z, 1.0)

    def adjoint(self, s: Tensor) -> Tensor:
        return self._product(s, -1.0)

    def _product(self, z: Tensor, sign: float) -> Tensor:
        parts = self.tiers.unpack(z)
        gram = self._gram(parts)
        turned = [B(part) - B.adjoint(part) for B, part in zip(self.B, parts, strict=True)]
        out = [turn.mul_(sign) - g for turn, g in zip(turned, gram, strict=True)]
        return torch.add(self.tiers.pack(out), z, alpha=1 - self.m)

    def _gram(self, parts: Parts) -> list[Tensor]:
        """A'A z."""
        images = [A(part) for A, part in zip(self.A, parts, strict=True)]
        images[:-1] = [image + K(_up(part)) for image, K, part in zip(images, self.K, parts[1:], strict=False)]
        gram = [A.adjoint(image) for A, image in zip(self.A, images, strict=True)]
        gram[1:] = [g + K.adjoint(image)[..., ::2, ::2] for g, K, image in zip(gram[1:], self.K, images, strict=False)]
        return gram

    def has_resolvent(self) -> bool:
        return True

    def resolvent(self, step: float, shape: Sequence[int]) -> "TierResolvent":
        """I + step (I - W) is block tridiagonal over the tiers, and each block is a matrix for each frequency.

        Elimination from the finest tier on keeps that: from a tier to the next finer one and back, frequencies do not mix.
        """
        inverses, left, right = [], [], []
        scales, last = self.tiers.scales, len(self.A) - 1
        carried = torch.zeros(())  # what the finer tiers add to the block of this one
        for t, (A, B) in enumerate(zip(self.A, self.B, strict=True)):
            size = (shape[1] * scales[t], shape[2] * scales[t])
            Ahat, Bhat = symbol(A, size, full=True), symbol(B, size, full=True)
            identity = torch.eye(Ahat.shape[-1], dtype=Ahat.dtype, device=Ahat.device)
            block = (1 + step * self.m) * identity + step * (Ahat.mH @ Ahat - Bhat + Bhat.mH)
            inverse = torch.linalg.inv(block + carried.to(block))
            inverses.append(inverse)
            if t < last:
                Khat = symbol(self.K[t], size, full=True)
                link = step * (Ahat.mH @ Khat)
                right.append(inverse @ link)
                left.append(link.mH @ inverse)
                carried = _fold(step * (Khat.mH @ Khat) - link.mH @ right[-1], (0, 1))
        return TierResolvent(self.tiers, tuple(inverses), tuple(left), tuple(right))


def _up(z: Tensor) -> Tensor:
    """Zeros between the pixels."""
    wide = torch.stack((z, torch.zeros_like(z)), dim=-1).flatten(-2)
    return torch.stack((wide, torch.zeros_like(wide)), dim=-2).flatten(-3, -2)


def _fold(spectrum: Tensor, dims: tuple[int, int]) -> Tensor:
    """The spectrum of every second pixel: the mean over the four frequencies that look alike on the coarser grid."""
    for dim in dims:
        spectrum = spectrum.unflatten(dim, (2, -1)).mean(dim)
    return spectrum


def _tile(spectrum: Tensor) -> Tensor:
    """The spectrum of an image with zeros between its pixels."""
    return spectrum.repeat(1, 1, 2, 2)


@dataclass(frozen=True)
class TierResolvent(Operator):
    """(I + step (I - W))^-1 by the factors of a block elimination, each a matrix for each frequency of its tier."""

    tiers: Tiers
    inverses: tuple[Tensor, ...]  # of the blocks on the diagonal, after elimination
    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]

    def __call__(self, z: Tensor) -> Tensor:
        return self._solve(z, self.inverses, self.left, self.right)

    def adjoint(self, s: Tensor) -> Tensor:
        inverses, left, right = ([m.mH for m in part] for part in (self.inverses, self.right, self.left))
        return self._solve(s, inverses, left, right)

    def _solve(self, y: Tensor, inverses: Parts, left: Parts, right: Parts) -> Tensor:
        spectra = [torch.fft.fft2(part) for part in self.tiers.unpack(y)]
        for t, factor in enumerate(left):
            spectra[t + 1] = spectra[t + 1] - _fold(rotated(factor, spectra[t]), (2, 3))
        spectra = [rotated(inverse, spectrum) for inverse, spectrum in zip(inverses, spectra, strict=True)]
        for t in reversed(range(len(right))):
            spectra[t] = spectra[t] - rotated(right[t], _tile(spectra[t + 1]))
        return self.tiers.pack([torch.fft.ifft2(spectrum).real for spectrum in spectra])


class MonotoneMultiTier(MonotoneCell):
    """z = sigma(W z + U * x + b) on several resolutions, each half as high and wide as the one before; circular convolutions.

    z is packed into one tensor at the coarsest resolution; `pack` and `unpack` go between it and the tiers. x enters the finest
    tier. `size`: height and width of the finest, multiples of 2^(tiers - 1). I - W >= m I, and the resolvent is exact.
    Parameters, one for each tier t: A[t], B[t] [c_t, c_t, k, k], b[t] [c_t]; from each tier into the next finer one
    K[t] [c_t, c_(t+1), k, k]; U [c_0, in_channels, k, k]. Winston and Kolter (2020), Section 5 and appendix.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import MonotoneMultiTier
        >>> cell = MonotoneMultiTier(3, (4, 8), size=8)
        >>> [tuple(tier.shape) for tier in cell.unpack(Equilibrium(cell)(torch.randn(2, 3, 8, 8)))]
        [(2, 4, 8, 8), (2, 8, 4, 4)]
    """

    def __init__(
        self,
        in_channels: int,
        channels: tuple[int, ...],
        size: int | tuple[int, int],
        *,
        kernel_size: int = 3,
        m: float = 0.1,
        activation: str | Activation = "relu",
        init: MonotoneInit = "linear",
    ) -> None:
        super().__init__({"in_channels": in_channels, "kernel_size": kernel_size}, m, activation, init)
        self.tiers = Tiers(channels, type(self).__name__)
        self.in_channels, self.channels = in_channels, self.tiers.channels
        self.size = image_size(self, size)
        self.state_shape = self.tiers.shape(self.size)
        k, c = (kernel_size, kernel_size), self.channels
        self.A = nn.ParameterList(torch.empty(count, count, *k) for count in c)
        self.B = nn.ParameterList(torch.empty(count, count, *k) for count in c)
        self.K = nn.ParameterList(torch.empty(fine, coarse, *k) for fine, coarse in pairwise(c))
        self.U = nn.Parameter(torch.empty(c[0], in_channels, *k))
        self.b = nn.ParameterList(torch.empty(count) for count in c)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A, B, K and U as `init` says; b = 0."""
        self.draw((*self.A, *self.B, *self.K, self.U), self.b)

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """One state of the tiers, from the finest to the coarsest."""
        return self.tiers.pack(parts)

    def unpack(self, z: Tensor) -> tuple[Tensor, ...]:
        """The tiers of a state, from the finest to the coarsest."""
        return self.tiers.unpack(z)

    def operator(self) -> MonotoneTiers:
        """W."""
        A, B, K = (tuple(Conv(kernel, "circular") for kernel in kernels) for kernels in (self.A, self.B, self.K))
        return MonotoneTiers(self.m, self.tiers, A, B, K)

    def injection(self, x: Tensor) -> Tensor:
        """U * x + b, in the promoted dtype, packed."""
        check_shape(self, "x", x, (self.in_channels, *self.size))
        dtype = self.promoted(x)
        first = Conv(self.U.to(dtype), "circular")(x.to(dtype))
        parts = [first]
        for t, count in enumerate(self.channels[1:], start=1):
            parts.append(first.new_zeros(len(x), count, self.size[0] >> t, self.size[1] >> t))
        return self.pack([part + b.to(dtype)[:, None, None] for part, b in zip(parts, self.b, strict=True)])

    def bind(self, x: Tensor) -> SplitMap:
        return SplitMap(self.operator(), self.activation, self.injection(x), m=self.m)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, channels={self.channels}, size={self.size}"
