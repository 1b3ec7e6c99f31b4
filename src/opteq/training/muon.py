"""Muon: momentum whose matrices are made orthogonal before they are used as a step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

QUINTIC = (3.4445, -4.7750, 2.0315)  # five steps take singular values from 0.01 to 1 into [0.6, 1.3]


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """About U V' for a matrix U S V': by p(x) = a x + b x^3 + c x^5, `steps` times, in the precision of the matrix.

    Singular values below a thousandth of the Frobenius norm stay smaller. A matrix of zeros stays one.
    """
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().max().clamp_min(tiny)  # first, so that no square overflows or vanishes
    x = x / x.norm().clamp_min(tiny)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """W <- W - lr (c O + weight_decay W): O is the orthogonalised momentum of W, a matrix, and c = max(1, rows / columns)^1/2.

    `matrices`: matrices, and kernels [out, in, k, k], which count as matrices [out, in k k]. `others`: what is not to be made
    orthogonal, such as biases, norms and the last layer; sgd with Nesterov's momentum moves them, by the same lr.
    `hold`: the largest root mean square of the singular values of a matrix after a step; it is scaled down to that. The norm itself
    may be several times as large: the kernels of the experiment `opteq_cifar10`, held at 0.6, end at 2.4 to 5.4 as convolutions.
    PyTorch's own has no kernels and computes in bfloat16. Jordan et al. (2024), "Muon: an optimizer for hidden layers".
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        hold: float | None = None,
    ) -> None:
        groups = [{"params": list(matrices), "orthogonal": True}, {"params": list(others), "orthogonal": False}]
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "hold": hold}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` evaluates the loss again, as for every optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        lr, beta, decay = group["lr"], group["momentum"], group["weight_decay"]
        if not group["orthogonal"] and decay:
            grad = grad + decay * parameter
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        ahead = grad + beta * state["momentum_buffer"].mul_(beta).add_(grad)
        if not group["orthogonal"]:
            parameter.add_(ahead, alpha=-lr)
            return
        matrix = ahead.reshape(len(ahead), -1)
        rows, columns = matrix.shape
        parameter.mul_(1 - lr * decay)
        parameter.add_(orthogonalized(matrix).reshape(parameter.shape), alpha=-lr * max(1.0, rows / columns) ** 0.5)
        if group["hold"] is not None:
            largest = group["hold"] * min(rows, columns) ** 0.5
            parameter.mul_((largest / parameter.norm()).clamp(max=1.0))
