"""A zoo of equilibria z = f(z, x) with solutions found without the library: dense linear algebra, or scipy's hybrid method."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn

FEATURES, INPUTS, BATCH = 8, 5, 6


class Affine(nn.Module):
    """sigma(W z + U x): parameters W [n, n] and U [n, d]."""

    def __init__(self, W: Tensor, U: Tensor, sigma: Callable[[Tensor], Tensor] = lambda a: a) -> None:
        super().__init__()
        self.W, self.U, self.sigma = nn.Parameter(W), nn.Parameter(U), sigma

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.sigma(z @ self.W.T + x @ self.U.T)


class OptEqFunction(nn.Module):
    """W' relu(W z + U x): parameters W [h, n] and U [h, d]."""

    def __init__(self, W: Tensor, U: Tensor) -> None:
        super().__init__()
        self.W, self.U = nn.Parameter(W), nn.Parameter(U)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(z @ self.W.T + x @ self.U.T) @ self.W


class Shift(nn.Module):
    """z + 1 + 0 x: no fixed point."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z + 1 + 0 * x[:, :1]


class Undefined(nn.Module):
    """sqrt(z - 1): NaN at z0 = 0 for every sample."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.sqrt(z - 1) + 0 * x[:, :1]


@dataclass(frozen=True)
class Problem:
    name: str
    f: nn.Module
    x: Tensor
    solvable: bool = True  # a unique fixed point exists
    contraction: bool = True  # plain iteration converges
    slow: bool = False  # plain iteration needs about a thousand steps
    state_shape: tuple[int, ...] = field(default=(FEATURES,))

    def z0(self) -> Tensor:
        return torch.zeros(self.x.shape[0], *self.state_shape, dtype=self.x.dtype)

    def map(self) -> Callable[[Tensor], Tensor]:
        return lambda z: self.f(z, self.x)

    def exact(self) -> Tensor:
        """The fixed point of each sample by scipy's hybrid Powell method, polished by dense Newton steps."""
        rows = []
        for i in range(self.x.shape[0]):
            x = self.x[i : i + 1].detach()

            def f(z: Tensor, x: Tensor = x) -> Tensor:
                return self.f(z[None], x)[0]

            def gap(z: np.ndarray, f: Callable[[Tensor], Tensor] = f) -> np.ndarray:
                with torch.no_grad():
                    return f(torch.from_numpy(z)).numpy() - z

            z = torch.from_numpy(scipy.optimize.root(gap, np.zeros(FEATURES), tol=1e-12).x)
            for _ in range(3):
                with torch.no_grad():
                    r = f(z) - z
                J = torch.autograd.functional.jacobian(f, z)
                z = z + torch.linalg.solve(torch.eye(FEATURES, dtype=z.dtype) - J, r)
            assert torch.linalg.vector_norm(f(z) - z) < 1e-11 * (1 + torch.linalg.vector_norm(z)), "the oracle failed"
            rows.append(z)
        return torch.stack(rows)


def with_norm(W: Tensor, norm: float) -> Tensor:
    """W rescaled to a spectral norm."""
    return W * (norm / torch.linalg.matrix_norm(W, 2))


def zoo(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Problem]:
    """The problems, by name."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n, eye = FEATURES, torch.eye(FEATURES, dtype=torch.float64)
    x = randn(BATCH, INPUTS)
    Q = torch.linalg.qr(randn(n, n))[0]
    angles = randn(n // 2)
    blocks = [torch.stack([torch.stack([t.cos(), -t.sin()]), torch.stack([t.sin(), t.cos()])]) for t in angles]
    rotation = 0.9 * torch.block_diag(*blocks)
    A, B = 0.3 * randn(n, n), randn(n, n)
    monotone = 0.7 * eye - A.T @ A + with_norm(B - B.T, 1.6)  # I - W >= 0.3 I, but |W| > 1
    assert torch.linalg.matrix_norm(monotone, 2) > 1.5
    U = randn(n, INPUTS)
    problems = [
        Problem("linear contraction", Affine(with_norm(randn(n, n), 0.8), U), x),
        Problem(
            "linear, spectral radius 0.97", Affine((Q * torch.linspace(-0.9, 0.97, n, dtype=torch.float64)) @ Q.T, U), x, slow=True
        ),
        Problem("rotation 0.9", Affine(rotation, U), x),
        Problem("relu", Affine(with_norm(randn(n, n), 0.9), U, torch.relu), x),
        Problem("tanh", Affine(with_norm(randn(n, n), 0.95), U, torch.tanh), x),
        Problem("optimization induced", OptEqFunction(with_norm(randn(12, n), 0.95), randn(12, INPUTS)), x),
        Problem("monotone, no contraction", Affine(monotone, U, torch.relu), x, contraction=False),
        Problem("no fixed point", Shift(), x, solvable=False, contraction=False),
        Problem("undefined", Undefined(), x, solvable=False, contraction=False),
    ]
    for problem in problems:
        problem.f.to(dtype)
    return {p.name: Problem(p.name, p.f, p.x.to(dtype), p.solvable, p.contraction, p.slow) for p in problems}


SOLVABLE = [name for name, p in zoo().items() if p.solvable]
