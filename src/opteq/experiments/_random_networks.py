"""Small random networks in float64: their equilibria, how far points are from them, and the same problems solved by scipy."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from scipy.optimize import nnls  # type: ignore[import-untyped]
from torch import Tensor, nn

from opteq import Cell, Equilibrium, Map, Solver, Stop
from opteq.batch import dot
from opteq.cells import OptEq
from opteq.theory import objective

EXACT = Stop(rtol=1e-13, max_steps=20_000)


@dataclass(frozen=True)
class Config:
    """The sizes. Most claims are tried on `networks` random networks, with `samples` inputs and `points` random points a sample.

    Theorem 3 takes four networks, Theorem 5 one with one input, Lemma 3 one for each depth.
    """

    inputs: int = 4
    features: int = 8
    hidden: int = 6
    depths: tuple[int, ...] = (3, 5, 8)
    networks: int = 2
    samples: int = 3
    points: int = 200
    steps: int = 200  # of the plain iteration
    halvings: int = 4  # of alpha, from 0.1 on
    sam_steps: int = 3000


def randn(draw: torch.Generator, *shape: int) -> Tensor:
    """Gaussian numbers in float64, from the generator alone."""
    return torch.randn(*shape, generator=draw, dtype=torch.float64, device="cpu")


def filled(cell: OptEq, W: Tensor, U: Tensor, b: Tensor) -> OptEq:
    """The cell with these parameters."""
    cell.W, cell.U, cell.b = nn.Parameter(W), nn.Parameter(U), nn.Parameter(b)
    return cell


def layer(c: Config, draw: torch.Generator, *, norm: float = 0.95, **settings: Any) -> OptEq:
    """A random layer with L_sigma ||W||^2 = norm^2 mu: at a norm of 0.95 near the edge of Theorem 1's condition."""
    with torch.device("meta"):  # the parameters are replaced: drawing these takes none of the caller's random numbers
        cell = OptEq(c.inputs, c.features, c.hidden, **settings)
    W = randn(draw, c.hidden, c.features)
    W *= norm * math.sqrt(cell.mu / cell.activation.lipschitz) / torch.linalg.matrix_norm(W, 2)
    return filled(cell, W, randn(draw, c.hidden, c.inputs), randn(draw, c.hidden))


def layer_at_the_edge(c: Config, draw: torch.Generator) -> tuple[OptEq, Tensor]:
    """A linear layer with ||W|| = 1 whose fixed points are a plane, and an orthonormal basis of its directions, as columns.

    Half of the singular values of W are 1; U and b have no part in their directions, or there were no fixed point.
    """
    rank = min(c.features, c.hidden)
    free = rank // 2
    left, right = (torch.linalg.qr(randn(draw, size, rank))[0] for size in (c.hidden, c.features))
    values = torch.cat([torch.ones(free), torch.linspace(0.1, 0.6, rank - free)]).double()
    with torch.device("meta"):
        cell = OptEq(c.inputs, c.features, c.hidden, activation="identity")
    keep = torch.eye(c.hidden, dtype=torch.float64) - left[:, :free] @ left[:, :free].T
    W, U, b = (left * values) @ right.T, keep @ randn(draw, c.hidden, c.inputs), keep @ randn(draw, c.hidden)
    return filled(cell, W, U, b), right[:, :free]


def feedforward(c: Config, draw: torch.Generator) -> nn.Sequential:
    """A random network of 2 to 6 linear layers."""
    depth = int(torch.randint(2, 7, (), generator=draw))
    widths = torch.randint(3, 2 * c.features, (depth + 1,), generator=draw).tolist()
    widths[0] = c.inputs
    parts: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        linear = nn.Linear(before, after, device="meta")
        linear.weight, linear.bias = nn.Parameter(randn(draw, after, before) / before**0.5), nn.Parameter(randn(draw, after))
        parts += [linear, (nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.2))[i % 3]]
    return nn.Sequential(*parts[:-1])


def equilibrium(cell: Cell, x: Tensor) -> Tensor:
    """z = f(z) to rounding, or a ConvergenceError."""
    z: Tensor = Equilibrium(cell, stop=EXACT, on_failure="raise")(x)
    return z


def iterates(fn: Map, solver: Solver, z0: Tensor, steps: int) -> Iterator[Tensor]:
    """z^0, ..., z^steps."""
    state = solver.init(fn, z0)
    yield state.z
    for _ in range(steps):
        state = solver.step(fn, state)
        yield state.z


def per_size(length: Tensor, z: Tensor) -> Tensor:
    """length / |z| for each sample; length itself where z = 0, as it may be with ReLU."""
    size: Tensor = torch.linalg.vector_norm(z.flatten(1), dim=1)
    return length / size.where(size > 0, 1.0)


def distance(z: Tensor, other: Tensor) -> float:
    """|z - other| / |other|, the largest of the samples."""
    return float(per_size(torch.linalg.vector_norm((z - other).flatten(1), dim=1), other).max())


def evaluate(value: Callable[..., Tensor], x: Tensor, *points: Tensor) -> Tensor:
    """value(x, *y) at points [n, samples, features], as [n, samples]: a few at a time, for softplus's integral needs room."""
    blocks = zip(*(part.split(20) for part in points), strict=True)
    return torch.cat([value(x.repeat(len(y[0]), 1), *(part.flatten(0, 1) for part in y)).view(-1, len(x)) for y in blocks])


def least_excess(c: Config, draw: torch.Generator, value: Callable[..., Tensor], x: Tensor, *z: Tensor) -> float:
    """The least of value(x, *y) - value(x, *z), relative where |value| > 1, over c.points random y, 1e-3 to 10 from each z."""
    scale = 10 ** (4 * torch.rand(c.points, 1, 1, generator=draw, dtype=torch.float64, device="cpu") - 3)
    found = evaluate(value, x, *(part + scale * randn(draw, c.points, *part.shape) for part in z))
    least = value(x, *z)
    return float(((found - least) / least.abs().clamp_min(1)).min())


def objective_along(cell: OptEq, x: Tensor, z0: Tensor, solver: Solver, steps: int) -> Tensor:
    """phi(f(z^0)), ..., phi(f(z^steps)) of each sample, [steps + 1, samples]; for z <- f(z), f(z^k) = z^{k+1}."""
    return evaluate(partial(objective, cell), x, torch.stack(list(iterates(cell.bind(x), solver, z0, steps))))


def curve(values: Tensor, first: int = 0) -> dict[str, list[float]]:
    """The largest of the samples at each k = first, first + 1, ...; 0 for what is below 0 by rounding."""
    worst = values.amax(dim=1).clamp_min(0).tolist()
    return {"k": list(range(first, first + len(worst))), "value": worst}


def nonnegative_minimum(Q: Tensor, q: Tensor) -> Tensor:
    """argmin over s >= 0 of s'Qs/2 - <q, s> for each row of q, by scipy: |C's - C^-1 q|^2/2 with Q = CC'."""
    C = torch.linalg.cholesky(Q)
    targets = torch.linalg.solve_triangular(C, q.T, upper=False).T
    return torch.stack([torch.as_tensor(nnls(C.T.numpy(), target.numpy())[0]) for target in targets])


def regularized_by_scipy(cell: OptEq, x: Tensor, weight: float) -> Tensor:
    """argmin phi(z) + weight |z|^2/2 for a ReLU layer with mu = 1: z = W's, s >= 0."""
    G = cell.W @ cell.W.T
    return nonnegative_minimum(torch.eye(len(G), dtype=torch.float64) - (1 - weight) * G, cell.injection(x)) @ cell.W


def two_layers_by_scipy(first: OptEq, second: OptEq, x: Tensor, gamma: float = 0.0) -> tuple[Tensor, Tensor]:
    """argmin over z_0 and min of Corollary 1's objective for ReLU; with gamma (and alpha = 1), plus gamma |z_0|^2/2.

    By Eq. (4), phi_l(W_l's_l) = s_l'(I - W_l W_l')s_l/2 - <u_l, s_l> over s_l >= 0. With w_l = W_l's_l the minimum over (z_1, z_0)
    is in closed form: they share the mean of (w_1, w_2) and are k (w_1 - w_2) apart, k = alpha / (2 - alpha). What is left is a
    quadratic in (s_1, s_2) >= 0.
    """
    alpha, eye = float(first.alpha), torch.eye(len(first.W) + len(second.W), dtype=torch.float64)
    k, W = alpha / (2 - alpha), torch.block_diag(first.W, second.W)
    across = torch.cat([first.W, -second.W])
    penalty = gamma * torch.block_diag(0 * first.W @ first.W.T, second.W @ second.W.T)
    Q, q = (
        alpha * (eye - W @ W.T) + k * across @ across.T + penalty,
        alpha * torch.cat([first.injection(x), second.injection(x)], 1),
    )
    s = nonnegative_minimum(Q, q)
    w1, w2 = (s @ W).chunk(2, dim=1)
    return (w1 + w2) / 2 - k * (w1 - w2) / 2, dot(s @ Q, s) / 2 - dot(q, s)
