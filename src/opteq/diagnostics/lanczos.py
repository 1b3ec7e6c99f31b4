"""Some eigenvalues of the Hessian of a loss, which is known by its products."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from opteq.checks import invalid
from opteq.diagnostics.arnoldi import Array, NotFiniteError, Product, repeatable

__all__ = ["ARPACK", "Hessian", "Lanczos", "Loss", "Which"]

Loss: TypeAlias = Callable[[nn.Module], Tensor]
Which: TypeAlias = Literal["largest", "smallest", "modulus"]

ARPACK: dict[Which, str] = {"largest": "LA", "smallest": "SA", "modulus": "LM"}
SMALL, BASIS = 64, 20  # matrices up to SMALL are left to LAPACK; Krylov vectors, for few eigenvalues
ROUNDING = 100  # times eps and the norm of H is what products and LAPACK lose


class Hessian:
    """H by its products, all from one graph of the gradient: the loss is called once."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            expected, got = "a model with parameters that require gradients", type(model).__name__
            raise ValueError(invalid("hessian_spectrum", "model", expected, got))
        self.sizes = [p.numel() for p in self.parameters]
        self.size = sum(self.sizes)
        self.precision = ROUNDING * max(torch.finfo(p.dtype).eps for p in self.parameters)
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
    """k eigenvalues of a symmetric matrix, each as often as it occurs."""

    k: int
    which: Which
    rtol: float
    restarts: int
    seed: int

    def chosen(self, values: Array) -> Array:
        """Where the k that are asked for are, the largest first."""
        order = np.argsort(-values)
        picked = np.argsort(-self._rank(values), kind="stable")[: self.k]
        return order[np.isin(order, picked)]

    def tolerance(self, hessian: Hessian, values: Array, size: float) -> float:
        """The error that is allowed: rtol times the largest of them, and rounding."""
        return self.rtol * float(np.abs(values).max(initial=0.0)) + hessian.precision * size

    def solve(self, hessian: Hessian, size: float) -> tuple[Array, Array, bool]:
        """Eigenvalues, eigenvectors, and whether these are all. `size`: about the Frobenius norm of H."""
        if hessian.size <= max(SMALL, self._basis):
            matrix = hessian.times(np.eye(hessian.size))
            values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
            return values, vectors, True
        if size == 0.0:  # H = 0, which ARPACK does not take
            return np.zeros(self.k), np.eye(hessian.size, self.k), True
        draw = np.random.default_rng(self.seed)
        start = draw.standard_normal(hessian.size)
        values, vectors, complete = self._arpack(hessian.product, start, self.k, ARPACK[self.which], self.rtol / 100)
        for _ in range(self.k + 1 if complete else 0):  # no more than k can be missing
            more, new, sure = self._missed(hessian, values, vectors, size, draw)
            if not more.size:
                return values, vectors, sure
            values, vectors = np.append(values, more), np.hstack([vectors, new])
        return values, vectors, False

    @property
    def _basis(self) -> int:
        return max(BASIS, 2 * self.k + 8)

    def _rank(self, values: Array) -> Array:
        """The higher, the sooner it is asked for."""
        return {"largest": values, "smallest": -values, "modulus": np.abs(values)}[self.which]

    def _missed(
        self, hessian: Hessian, values: Array, vectors: Array, size: float, draw: np.random.Generator
    ) -> tuple[Array, Array, bool]:
        """One that should be among the k, if there is: a Krylov space holds but one vector of a multiple eigenvalue.

        So those known are put in the k-th place, and the first one is looked for; and whether that worked.
        """
        rank, tolerance = self._rank(values), self.tolerance(hessian, values, size)
        last = np.sort(rank)[-self.k]
        for sign in {"largest": (1,), "smallest": (-1,), "modulus": (1, -1)}[self.which]:
            product, start = _deflated(hessian, sign, vectors, last, size), draw.standard_normal(hessian.size)
            ranks, found, sure = self._arpack(product, start, 1, "LA", tolerance / (4 * size))
            if sure and ranks[0] - size <= last + tolerance:
                continue
            if sure:  # with all digits, as it may be far smaller than those that the tolerance is of, and their vectors inexact
                better = vectors[:, rank >= ranks[0] - size - tolerance]
                product = _deflated(hessian, sign, better, last, size)
                ranks, found, sure = self._arpack(product, found[:, 0], 1, "LA", hessian.precision)
            return sign * (ranks - size), found, sure
        return values[:0], vectors[:, :0], True

    def _arpack(self, product: Product, start: Array, k: int, which: str, tolerance: float) -> tuple[Array, Array, bool]:
        """Eigenvalues, eigenvectors, and whether all k converged."""
        from scipy.sparse import linalg  # type: ignore[import-untyped]

        try:
            values, vectors = linalg.eigsh(
                linalg.LinearOperator((start.size, start.size), matvec=product, dtype=np.float64),
                k=k,
                which=which,
                v0=start,
                ncv=min(start.size, self._basis),
                maxiter=self.restarts,
                tol=tolerance,
                **repeatable(linalg.eigsh, self.seed),
            )
        except linalg.ArpackError as stuck:
            none = np.zeros(0), np.zeros((start.size, 0))
            return getattr(stuck, "eigenvalues", none[0]), getattr(stuck, "eigenvectors", none[1]), False
        return values, vectors, True


def _deflated(hessian: Hessian, sign: int, vectors: Array, place: float, shift: float) -> Product:
    """Products with P (+-H) P + place (I - P) + shift, P being the projection off the vectors.

    The shift makes it positive, so that ARPACK's tolerance, which is relative, means something where H has zeros.
    """

    def product(v: Array) -> Array:
        known = vectors @ (vectors.T @ v)
        image = hessian.product(v - known)
        moved: Array = sign * (image - vectors @ (vectors.T @ image)) + place * known + shift * v
        return moved

    return product
