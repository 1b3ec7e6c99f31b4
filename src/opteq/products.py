"""Products of a batch with a matrix, and their derivatives: by oneDNN where PyTorch's own are slow."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from opteq.batch import added
from opteq.checks import is_transformed

__all__ = ["affine", "inverse", "linear", "product"]

_LEAST = 2**21  # multiplications from which it pays: below, a call takes longer than the product

_SKEW = 10.0  # the largest |A - A'| / |A + A'| of a matrix that is inverted without pivots

_SMALL = 128  # the side of a matrix below which LAPACK inverts it faster


def product(a: Tensor, B: Tensor) -> Tensor:
    """Rows a [batch, n] times B: a B."""
    return _product(a, B) if _quick(a, B) else a @ B


def affine(u: Tensor, a: Tensor, B: Tensor) -> Tensor:
    """Rows u [batch, m] plus a B: oneDNN could do both at once, which takes longer than one after the other."""
    return added(_product(a, B), u) if _quick(a, B) else torch.addmm(u, a, B)


def linear(x: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
    """W x + b for rows x, as torch.nn.functional.linear."""
    if not _quick(x, W.T):
        return nn.functional.linear(x, W, b)
    out = product(x, W.T)
    return out if b is None else out + b


def inverse(A: Tensor) -> Tensor:
    """A^-1 of a matrix with A + A' positive definite, which needs no pivots: by halves, as products, where these are fast.

    Digits are lost where A - A' is many times A + A': LAPACK, which has pivots, inverts such an A.
    """
    plain = (torch.is_grad_enabled() and A.requires_grad) or not _quick(A, A)
    if plain or bool((A - A.T).norm() > _SKEW * (A + A.T).norm()):
        whole: Tensor = torch.linalg.inv(A)
        return whole
    return _inverse(A)


def _inverse(A: Tensor) -> Tensor:
    half = len(A) // 2
    if len(A) < _SMALL or not _quick(A, A):
        whole: Tensor = torch.linalg.inv(A)
        return whole
    above, below = A[:half], A[half:]
    first, right, low = above[:, :half].contiguous(), above[:, half:].contiguous(), below[:, :half].contiguous()
    first = _inverse(first)
    left = product(low, first)
    last = _inverse(below[:, half:] - product(left, right))  # of the Schur complement, which is positive definite again
    corner = product(product(first, right), last)
    out = torch.empty_like(A)
    out[:half, :half] = first + product(corner, left)
    out[:half, half:] = -corner
    out[half:, :half] = -product(last, left)
    out[half:, half:] = last
    return out


def _product(a: Tensor, B: Tensor) -> Tensor:
    """a B by oneDNN, with its derivatives."""
    if torch.is_grad_enabled() and (a.requires_grad or B.requires_grad):
        out: Tensor = _Product.apply(a.view_as(a), B.view_as(B))  # type: ignore[no-untyped-call]
        return out
    return _onednn(a, B)


class _Product(torch.autograd.Function):
    """a B, whose derivatives are such products again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, B: Tensor) -> Tensor:
        ctx.save_for_backward(a, B)
        return _onednn(a, B)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, B = ctx.saved_tensors
        return product(g, B.T) if _wanted(ctx, 0) else None, _outer(a, g, B) if _wanted(ctx, 1) else None


def _wanted(ctx: Any, i: int) -> bool:
    """Whether this very backward pass asks for a derivative: a linear solve asks for that in a many times, in B once.

    The operands are views, for the engine does not tell of leaves.
    """
    if not ctx.needs_input_grad[i]:
        return False
    asked: bool = torch._C._will_engine_execute_node(ctx.next_functions[i][0])
    return asked


def _outer(a: Tensor, g: Tensor, B: Tensor) -> Tensor:
    """a' g, laid out as B is."""
    return product(a.T, g) if B.is_contiguous() else product(g.T, a).T


def _onednn(a: Tensor, B: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a.contiguous(), B.T, None, "none", [], "")
    return out


def _quick(a: Tensor, B: Tensor) -> bool:
    """Whether oneDNN is to be asked: float32 on a processor on which it is faster, in ordinary tensors."""
    if a.dtype != torch.float32 or B.dtype != torch.float32 or a.ndim != 2 or B.ndim != 2 or a.shape[0] * B.numel() < _LEAST:
        return False
    if not (_prefers_onednn() and torch._C._get_mkldnn_enabled()) or torch.compiler.is_compiling():
        return False
    laid_out = all(matrix.is_contiguous() or matrix.T.is_contiguous() for matrix in (a, B))
    return laid_out and _plain(a) and _plain(B) and not torch.is_autocast_enabled("cpu")


def _plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor on a CPU, outside of torch.func and of forward mode."""
    ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return ordinary and forward_ad._current_level < 0 and not is_transformed(tensor)


@cache
def _prefers_onednn() -> bool:
    """Whether the processor is AMD's, on which MKL, and so `torch.mm`, makes half of the products a second that oneDNN does."""
    if "mkl" not in torch.__config__.show().lower() or not torch.backends.mkldnn.is_available():
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
