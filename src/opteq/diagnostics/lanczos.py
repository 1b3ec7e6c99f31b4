"""Some eigenvalues of the Hessian of a loss, which is known by its products."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from opteq.checks import invalid
from opteq.diagnostics.arnoldi import Array, NotFiniteError, repeatable

__all__ = ["ARPACK", "Hessian", "Lanczos", "Loss", "Which"]

Loss: TypeAlias = Callable[[nn.Module], Tensor]
Which: TypeAlias = Literal["largest", "smallest", "modulus"]

ARPACK: dict[Which, str] = {"largest": "LA", "smallest": "SA", "modulus": "LM"}
SMALL, BASIS = 64, 20  # matrices up to SMALL are left to LAPACK; Krylov vectors, for few eigenvalues


class Hessian:
    """H by its products, all from one graph of the gradient: the loss is called once."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(invalid("hessian_spectrum", "model", "a model with parameters that require gradients", type(model)))
        self.sizes = [p.numel() for p in self.parameters]
        self.size = sum(self.sizes)
        value = loss(model)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"shape {list(value.shape)}, requires_grad={value.requires_grad}" if isinstance(value, Tensor) else value
            raise ValueError(invalid("hessian_spectrum", "loss", "a differentiable function that gives one number", got))
        # a sum, since an empty shape and [1] are both one number
        self.gradient = self._derivative(value.sum(), create_graph=True)

    def _derivative(self, value: Tensor, create_graph: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            value, self.parameters, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )

    def product(self, v: Array) -> Array:
        """H v."""
        parts = torch.tensor(v.ravel(), dtype=torch.float64).split(self.sizes)
        along = [
            (g * part.to(g.dtype).to(g.device).view_as(g)).sum().cpu()
            for g, part in zip(self.gradient, parts, strict=True)
            if g.requires_grad
        ]
        if not along:  # the loss is linear
            return np.zeros(self.size)
        found = self._derivative(torch.stack([part.double() for part in along]).sum(), create_graph=False)
        image: Array = torch.cat([g.detach().flatten().cpu().double() for g in found]).numpy()
        if not np.isfinite(image).all():
            raise NotFiniteError
        return image

    def times(self, vectors: Array) -> Array:
        """H V, column by column."""
        return np.stack([self.product(v) for v in vectors.T], axis=1)


@dataclass(frozen=True)
class Lanczos:
    """k eigenvalues of a symmetric matrix."""

    k: int
    which: Which
    restarts: int
    seed: int

    def chosen(self, values: Array) -> Array:
        """Where the k that are asked for are, the largest first."""
        order = np.argsort(-values)
        wanted = {"largest": -values, "smallest": values, "modulus": -np.abs(values)}[self.which]
        picked = np.argsort(wanted, kind="stable")[: self.k]
        return order[np.isin(order, picked)]

    def solve(self, hessian: Hessian, rtol: float) -> tuple[Array, Array, bool]:
        """Eigenvalues, eigenvectors, and whether these are all."""
        from scipy.sparse import linalg  # type: ignore[import-untyped]

        basis = min(hessian.size, max(BASIS, 2 * self.k + 8))
        if hessian.size <= max(SMALL, basis):
            matrix = hessian.times(np.eye(hessian.size))
            values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
            return values, vectors, True
        start = np.random.default_rng(self.seed).standard_normal(hessian.size)
        if not hessian.product(start).any():  # of a random vector, so that H = 0, which ARPACK does not take
            return np.zeros(self.k), np.eye(hessian.size, self.k), True
        try:
            values, vectors = linalg.eigsh(
                linalg.LinearOperator((hessian.size, hessian.size), matvec=hessian.product, dtype=np.float64),
                k=self.k,
                which=ARPACK[self.which],
                v0=start,
                ncv=basis,
                maxiter=self.restarts,
                tol=rtol / 100,
                **repeatable(linalg.eigsh, self.seed),
            )
        except linalg.ArpackError as stuck:
            none = np.zeros(0), np.zeros((hessian.size, 0))
            return getattr(stuck, "eigenvalues", none[0]), getattr(stuck, "eigenvectors", none[1]), False
        return values, vectors, True
