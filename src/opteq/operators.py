"""Linear maps on batches, each with its exact adjoint: <W z, s> = <z, W' s>."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from opteq.tree import Tree

__all__ = ["Conv", "Dense", "Operator", "Padding", "Separable"]

Padding: TypeAlias = Literal["zeros", "circular"]


class Operator(Tree, ABC):
    """W: a frozen dataclass of tensors with two products."""

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """W z."""

    @abstractmethod
    def adjoint(self, s: Tensor) -> Tensor:
        """W' s."""


@dataclass(frozen=True)
class Dense(Operator):
    """z -> W z for rows z."""

    W: Tensor  # [hidden, features]

    def __call__(self, z: Tensor) -> Tensor:
        return torch.nn.functional.linear(z, self.W)

    def adjoint(self, s: Tensor) -> Tensor:
        return s @ self.W


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
