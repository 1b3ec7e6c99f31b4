"""Products of a batch with a matrix inside of solvers, where no derivative is taken: by oneDNN where PyTorch's own are slow."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opteq.checks import is_transformed

__all__ = ["affine", "product"]

_LEAST = 2**21  # multiplications from which it pays: below, a call takes longer than the product


def product(a: Tensor, B: Tensor) -> Tensor:
    """Rows a [batch, n] times B: a B."""
    return torch.ops.mkldnn._linear_pointwise(a, B.T, None, "none", [], "") if _quick(a, B) else a @ B


def affine(u: Tensor, a: Tensor, B: Tensor) -> Tensor:
    """Rows u [batch, m] plus a B."""
    if _quick(a, B) and _plain(u) and u.dtype == a.dtype and u.is_contiguous():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(a, u, B.T, None, "add")
        return out
    return torch.addmm(u, a, B)


def _quick(a: Tensor, B: Tensor) -> bool:
    """Whether oneDNN is to be asked: float32 on a processor on which it is faster, no derivative, no transform."""
    if a.dtype != torch.float32 or B.dtype != torch.float32 or a.ndim != 2 or B.ndim != 2 or a.shape[0] * B.numel() < _LEAST:
        return False
    if not (_prefers_onednn() and torch._C._get_mkldnn_enabled()) or torch.compiler.is_compiling():
        return False
    laid_out = a.is_contiguous() and (B.is_contiguous() or B.T.is_contiguous())
    return laid_out and _plain(a) and _plain(B) and not torch.is_autocast_enabled("cpu")


def _plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor on a CPU, of which no derivative can be asked: oneDNN's operation has none."""
    wanted = torch.is_grad_enabled() and tensor.requires_grad
    return tensor.device.type == "cpu" and not (wanted or forward_ad._current_level >= 0 or is_transformed(tensor))


@cache
def _prefers_onednn() -> bool:
    """Whether the processor is AMD's, on which MKL, and so `torch.mm`, makes half of the products a second that oneDNN does."""
    if "mkl" not in torch.__config__.show().lower() or not torch.backends.mkldnn.is_available():
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
