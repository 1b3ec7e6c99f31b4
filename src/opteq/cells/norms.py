"""Group norm for the cells and models."""

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm


class GroupNorm(nn.GroupNorm):
    """nn.GroupNorm, also where images with their channels together need the derivatives of its gain and shift alone.

    PyTorch's backward for a CPU then writes the derivative of the images, which nobody asked for, to no memory, and the process
    dies (torch 2.13). With gain and shift apart from the norm, it is not called.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.is_contiguous() or not self._learns():
            return super().forward(input)
        gain, shift = (parameter.view(-1, *[1] * (input.ndim - 2)) for parameter in (self.weight, self.bias))
        return torch.addcmul(shift, group_norm(input, self.num_groups, eps=self.eps), gain)

    def _learns(self) -> bool:
        return torch.is_grad_enabled() and self.affine and (self.weight.requires_grad or self.bias.requires_grad)
