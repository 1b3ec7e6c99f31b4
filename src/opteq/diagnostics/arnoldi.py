"""The eigenvalues of largest modulus of a real matrix that is known by its products, with an estimate of their errors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from opteq.checks import check_integer, check_number

__all__ = ["Arnoldi", "Array", "Eigenvalues", "Matrix", "NotFiniteError", "Product", "repeatable"]

Array: TypeAlias = npt.NDArray[Any]
Product: TypeAlias = Callable[[Array], Array]

SMALL, MEDIUM = 64, 1024  # matrices up to SMALL are left to LAPACK, those up to MEDIUM where ARPACK fails
SPARE, BASIS = 3, 60  # eigenvalues beyond those asked for, and Krylov vectors: with fewer, ARPACK often misses the largest

NONFINITE = "met NaN or infinity, in z or in f'(z)."
STUCK = "did not converge: (a) raise restarts, (b) if very many eigenvalues have the largest modulus, none may stand out."
ELSEWHERE = "had other eigenvalues for J than for its transpose, so that one may be missing: (a) change the seed, (b) raise k."
UNSURE = "have eigenvalues that are too ill-conditioned for rtol: (a) take float64, (b) raise rtol."


class NotFiniteError(ArithmeticError):
    """A product has NaN or infinity."""


@dataclass(frozen=True)
class Matrix:
    """J by its products J v and J' v with real vectors, which are exact to about `precision`."""

    size: int
    forward: Product
    backward: Product
    symmetric: bool
    precision: float

    def times(self, vectors: Array) -> Array:
        """The product with complex columns."""
        return np.stack([self.forward(v.real) + 1j * self.forward(v.imag) for v in vectors.T], axis=1)

    def dense(self) -> Array:
        """J itself."""
        return np.stack([self.forward(row) for row in np.eye(self.size)], axis=1)


@dataclass(frozen=True)
class Eigenvalues:
    """The largest first; NaN where one was not found. `error` is infinite where a larger one may have been missed.

    `trouble`: why they are not all known to the tolerance, if they are not.
    """

    values: Array
    error: Array
    good: Array
    trouble: str


@dataclass(frozen=True)
class Arnoldi:
    """The k eigenvalues of largest modulus, by ARPACK for J and for J', which must agree.

    The error is kappa (|J x - lambda x| + rounding), kappa = |y||x| / |y'x| with the right and left eigenvectors x and y: to first
    order, so that it is too small where many eigenvalues are almost defective, though far above any sensible rtol.
    """

    k: int
    rtol: float
    restarts: int
    seed: int

    def check(self, owner: str) -> None:
        """Raise unless the settings make sense."""
        check_integer(owner, "k", self.k, 1)
        check_number(owner, "rtol", self.rtol, 0.0, open_low=True)
        check_integer(owner, "restarts", self.restarts, 1)
        check_integer(owner, "seed", self.seed, 0)

    def is_small(self, size: int) -> bool:
        """Whether LAPACK should be asked at once."""
        return size <= max(SMALL, 4 * (self.k + SPARE))

    def solve(self, matrix: Matrix) -> Eigenvalues:
        """By ARPACK; by LAPACK if the matrix is small, or ARPACK fails and it is not large."""
        try:
            found = None if self.is_small(matrix.size) else self._iterate(matrix)
            if found is None or (found.trouble and matrix.size <= MEDIUM):
                return self.direct(matrix.dense(), matrix.symmetric, matrix.precision)
            return found
        except NotFiniteError:
            return self.nothing(NONFINITE)

    def direct(self, matrix: Array, symmetric: bool, precision: float) -> Eigenvalues:
        """By LAPACK, of a matrix whose columns are exact to about `precision`."""
        from scipy.linalg import eig, eigh  # type: ignore[import-untyped]

        if not np.isfinite(matrix).all():
            return self.nothing(NONFINITE)
        if symmetric:
            values, right = eigh((matrix + matrix.T) / 2)
            left = right
        else:
            values, left, right = eig(matrix, left=True, right=True)
        overlap = np.abs((left.conj() * right).sum(0))
        residual = np.linalg.norm(matrix @ right - right * values, axis=0)
        return self._judged(values, residual + precision * np.linalg.norm(matrix), overlap)

    def nothing(self, trouble: str) -> Eigenvalues:
        """NaN, for a reason."""
        none = np.full(self.k, math.nan)
        return Eigenvalues(none.astype(complex), np.full(self.k, math.inf), np.zeros(self.k, bool), trouble)

    def _iterate(self, matrix: Matrix) -> Eigenvalues:
        starts = np.random.default_rng(self.seed).standard_normal((2, matrix.size))
        image = matrix.forward(starts[0])
        if not image.any():  # that of a random vector, so that J = 0, which ARPACK does not take
            return self._judged(np.zeros(self.k), np.zeros(self.k), np.ones(self.k))
        values, right = self._arpack(matrix, matrix.forward, starts[0])
        others, left = (values, None) if right is None else self._arpack(matrix, matrix.backward, starts[1])
        if right is None or left is None:
            return replace(self._judged(values, np.full(values.shape, math.inf), np.ones(values.shape)), trouble=STUCK)
        overlap = np.linalg.norm(left.T @ right, axis=0)  # y'x = 0 unless both belong to the same eigenvalue
        rounding = np.finfo(float).eps * np.linalg.norm(image)  # about the Frobenius norm, as the vector is random
        found = self._judged(values, np.linalg.norm(matrix.times(right) - right * values, axis=0) + rounding, overlap)
        return self._compared(found, np.sort(np.abs(others))[::-1])

    def _arpack(self, matrix: Matrix, product: Product, start: Array) -> tuple[Array, Array | None]:
        """Some more than k eigenvalues and their vectors; no vectors if it did not converge, but the eigenvalues that did."""
        from scipy.sparse import linalg  # type: ignore[import-untyped]

        find, count = linalg.eigsh if matrix.symmetric else linalg.eigs, self.k + SPARE
        try:
            values, vectors = find(
                linalg.LinearOperator((matrix.size, matrix.size), matvec=product, dtype=np.float64),
                k=count,
                which="LM",
                v0=start,
                ncv=min(matrix.size, max(BASIS, 4 * count)),
                maxiter=self.restarts if matrix.size > MEDIUM else min(self.restarts, 2 + matrix.size // BASIS),  # as LAPACK costs
                tol=max(1e-10, 8 * matrix.precision),
                **repeatable(find, self.seed),
            )
        except linalg.ArpackError as stuck:
            return getattr(stuck, "eigenvalues", np.zeros(0)), None
        return values, vectors

    def _judged(self, values: Array, residual: Array, overlap: Array) -> Eigenvalues:
        """The k largest, with their errors."""
        order = np.lexsort((-values.imag, -np.abs(values)))[: self.k]
        with np.errstate(divide="ignore"):
            error = residual[order] / np.minimum(overlap[order], 1.0)  # of several equal eigenvalues it may be above 1
        missing = (0, self.k - order.size)
        found = np.pad(values[order].astype(complex), missing, constant_values=math.nan)
        error = np.pad(error, missing, constant_values=math.inf)
        good = error <= self.rtol * np.nanmax(np.abs(found), initial=0.0)
        return Eigenvalues(found, error, good, "" if good.all() else UNSURE)

    def _compared(self, found: Eigenvalues, moduli: Array) -> Eigenvalues:
        """With an infinite error where J' has an eigenvalue of another modulus in that place."""
        gap = np.abs(np.abs(found.values) - moduli[: self.k])
        differs = gap > self.rtol * moduli[0] + found.error
        if not differs.any():
            return found
        return Eigenvalues(found.values, np.where(differs, math.inf, found.error), found.good & ~differs, ELSEWHERE)


def repeatable(find: Callable[..., Any], seed: int) -> dict[str, Any]:
    """What makes ARPACK draw the same random numbers each time, where SciPy has it (1.17)."""
    return {"rng": np.random.default_rng(seed)} if "rng" in signature(find).parameters else {}
