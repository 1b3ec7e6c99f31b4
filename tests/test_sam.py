"""SAM: of many fixed points the one of least R (Theorem 5), and the gradient of its unrolling (Lemma 11)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from opteq import Equilibrium, Status, Stop, record, solve
from opteq.cells import DeepOptEq, OptEq
from opteq.gradients import Implicit, JacobianFree, Phantom, Unrolled
from opteq.regularizers import L1, L2, Decorrelation, Incay, Regularizer
from opteq.solve import CallableMap
from opteq.solvers import SAM, Anderson
from problems import with_norm


@dataclass(frozen=True)
class ToTarget(Regularizer):
    """weight |z - target|^2 / 2."""

    convex: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = False
    formula: ClassVar[str] = "weight |z - target|^2/2"
    latex: ClassVar[str] = r"\tfrac w2 |z - t|^2"
    target: Tensor
    weight: float = 1.0

    @property
    def smoothness(self) -> float:
        return self.weight

    def value(self, z: Tensor) -> Tensor:
        return self.weight * ((z - self.target) ** 2).sum(1) / 2

    def gradient(self, z: Tensor) -> Tensor:
        return self.weight * (z - self.target)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plane(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Orthonormal rows A [3, 8] and b [3]: the plane of z with A z = b."""
    return torch.linalg.qr(randn(8, 3, seed=seed))[0].T, randn(3, seed=seed + 1)


def toward(A: Tensor, b: Tensor, rate: float = 0.6):
    """z -> z - rate A'(A z - b): nonexpansive, its fixed points are the plane A z = b."""
    return lambda z: z - rate * (z @ A.T - b) @ A


def errors_along(f, z0: Tensor, solver: SAM, counts: list[int], goal: Tensor) -> list[float]:
    """The distance to the goal after each of these numbers of steps, by the solver's own steps."""
    fn, found = CallableMap(f), []
    state = solver.init(fn, z0)
    for k in range(1, counts[-1] + 1):
        state = solver.step(fn, state)
        if k in counts:
            found.append((state.z - goal).norm(dim=1).max().item())
    return found


@pytest.mark.parametrize("kind", ["L2", "target", "curved target"])
def test_of_a_plane_of_fixed_points_the_one_of_least_R_is_approached(kind):
    A, b = plane()
    target = randn(8, seed=7)
    R = {"L2": L2(), "target": ToTarget(target), "curved target": ToTarget(target, 4.0)}[kind]
    goal = torch.zeros(8, dtype=torch.float64) if kind == "L2" else target
    least = goal - A.T @ (A @ goal - b)  # the projection of the minimiser of R onto the plane
    z0 = 3 * randn(2, 8, seed=3)
    counts = [30, 100, 300, 1000, 3000]
    errors = errors_along(toward(A, b), z0, SAM(R), counts, least)
    found = solve(toward(A, b), z0, SAM(R), Stop(rtol=1e-9, max_steps=300))
    assert found.steps.tolist() == [300, 300]
    assert (found.z - least).norm(dim=1).max().item() == pytest.approx(errors[2], rel=1e-9)
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert errors == sorted(errors, reverse=True)
    assert -0.75 <= slope <= -0.12, slope  # about k^-min(rho, c) = k^-0.2, faster when lambda's pull has no part in the plane
    plain = solve(toward(A, b), z0, Anderson(), Stop(rtol=1e-9, max_steps=200)).z
    assert (plain - least).norm(dim=1).min() > 5 * errors[-1]  # another fixed point
    assert (R.value(found.z) < R.value(plain)).all()


@pytest.mark.parametrize(("rho", "c"), [(0.5, 0.2), (0.3, 0.3), (0.2, 0.1)])
def test_the_rate_is_about_k_to_the_minus_min_rho_c(rho, c):
    A, b = plane()
    R = ToTarget(randn(8, seed=7))
    least = R.target - A.T @ (A @ R.target - b)
    counts = [300, 1000, 3000]
    errors = errors_along(toward(A, b), torch.zeros(1, 8, dtype=torch.float64), SAM(R, rho=rho, c=c), counts, least)
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert 0.85 <= -slope / min(rho, c) <= 1.2, (slope, errors)


def test_a_start_at_a_fixed_point_is_left_all_the_same():
    A, b = plane()
    fixed = (A.T @ b)[None] + 5 * (torch.eye(8, dtype=torch.float64) - A.T @ A)[:1]
    assert (toward(A, b)(fixed) - fixed).norm() < 1e-12
    found = solve(toward(A, b), fixed, SAM(L2()), Stop(rtol=0.5, max_steps=40))
    assert found.steps.tolist() == [40]
    assert found.z.norm() < 0.9 * fixed.norm()
    assert found.status is Status.CONVERGED  # of the z that is returned, judged at the end
    moved = toward(A, b)(found.z)
    assert found.residual[0].item() == pytest.approx(((moved - found.z).norm() / moved.norm()).item(), rel=1e-9)


def contraction(alpha: float = 1.0) -> DeepOptEq:
    torch.manual_seed(0)
    cells = [OptEq(4, 6, 5 + i, activation="tanh", alpha=alpha) for i in range(2)]
    for cell in cells:
        cell.double()
        with torch.no_grad():
            cell.W.copy_(with_norm(cell.W, 0.7))
    return DeepOptEq(cells)


def test_on_a_contraction_it_tends_to_the_equilibrium():
    cell, x = contraction(), randn(5, 4)
    exact = Equilibrium(cell, stop=Stop(rtol=1e-12, max_steps=500))(x)
    errors = []
    for steps in (20, 200, 2000):
        layer = Equilibrium(cell, SAM(L2()), gradient=Unrolled(steps))
        with torch.no_grad():
            errors.append((layer(x) - exact).norm().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.15 * errors[0]


def test_unrolled_takes_exactly_the_steps_of_the_formula():
    cell, x, K = contraction(), randn(5, 4), 7
    layer = Equilibrium(cell, SAM(L2(), rho=0.3, c=0.25), gradient=Unrolled(K))
    solution = layer.solve(x)
    fn, z = cell.bind(x), torch.zeros(5, 6, dtype=torch.float64)
    for k in range(1, K + 1):
        beta, decay = 0.5 * k**-0.3, 0.5 * k**-0.25  # L = 1: gamma = 1/2, eta = 1/2
        z = beta * ((1 - 0.5 * decay) * z - 0.5 * z) + (1 - beta) * fn(z)
    torch.testing.assert_close(solution.z, z, rtol=1e-13, atol=1e-13)
    assert solution.steps.tolist() == [K] * 5


def test_the_schedule_follows_from_the_smoothness():
    wide = ToTarget(torch.zeros(1), 0.02)
    assert SAM(wide).schedule == (1 / 0.04, min(math.sqrt(0.04), 0.01, 0.5))
    assert SAM(ToTarget(torch.zeros(1), 8.0)).schedule == (1 / 16, 0.5)
    assert SAM(L1()).schedule == (0.1, 0.5)  # no smoothness: gamma is free
    assert SAM(Incay(), gamma=0.3).schedule == (0.3, 0.5)


@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), JacobianFree(), None])
def test_gradients_of_the_only_fixed_point_are_refused(gradient):
    with pytest.raises(TypeError, match=r"several, where I - J is singular.*Unrolled\(20\)"):
        Equilibrium(contraction(), SAM(L2()), gradient=gradient)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"rho": 0.6, "c": 0.2}, ValueError, r"rho \+ 2 c < 1"),
        ({"rho": 0.5, "c": 0.25}, ValueError, r"rho \+ 2 c < 1"),
        ({"rho": 0.0}, ValueError, "'rho' parameter of SAM"),
        ({"c": -0.1}, ValueError, "'c' parameter of SAM"),
        ({"gamma": 2.0}, ValueError, "'gamma' parameter of SAM"),
        ({"regularizer": 3}, TypeError, "'regularizer' parameter of SAM"),
    ],
)
def test_bad_arguments(settings, error, words):
    with pytest.raises(error, match=words):
        SAM(**{"regularizer": L2(), **settings})


# --- Lemma 11 -----------------------------------------------------------------------------------------------------------------


def vec(matrix: Tensor) -> Tensor:
    return matrix.T.flatten()


def commutation(rows: int, columns: int) -> Tensor:
    """K vec(W) = vec(W') for W of that shape."""
    K = torch.zeros(rows * columns, rows * columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            K[i * columns + j, j * rows + i] = 1
    return K


def lemma_11(cell: DeepOptEq, x: Tensor, steps: int, sam: SAM, *, printed: bool = False) -> list[dict[str, Tensor]]:
    """d z^K / d vec(W_l), vec(U_l), b_l of one sample by Eq. (18), (19); R = |z|^2/2.

    `printed`: as in the paper, where the factor 1 - beta of the step at which the parameter acts is missing.
    """
    eye, gamma, eta = torch.eye(6, dtype=torch.float64), *sam.schedule
    z, total = torch.zeros(6, dtype=torch.float64), [{} for _ in cell.layers]
    for k in range(1, steps + 1):
        beta, decay = eta * k**-sam.rho, eta * k**-sam.c
        at, A, local = z, [], []
        for layer in cell.layers:
            a = layer.W @ at + layer.U @ x + layer.b
            D = torch.diag(1 - torch.tanh(a) ** 2)
            A.append(layer.alpha * layer.W.T @ D @ layer.W + (1 - layer.alpha) * eye)
            outer = torch.kron(torch.tanh(a)[None], eye) @ commutation(*layer.W.shape)
            inner = layer.W.T @ D
            local.append(
                {
                    "W": layer.alpha * (outer + inner @ torch.kron(at[None], torch.eye(len(a), dtype=torch.float64))),
                    "U": layer.alpha * inner @ torch.kron(x[None], torch.eye(len(a), dtype=torch.float64)),
                    "b": layer.alpha * inner,
                }
            )
            at = layer.alpha * layer.W.T @ torch.tanh(a) + (1 - layer.alpha) * at
        V = (1 - gamma * decay - gamma) * eye  # the Jacobian of S
        step = beta * V + (1 - beta) * torch.linalg.multi_dot([*reversed(A), eye])
        for i in range(len(total)):
            after = eye
            for part in A[i + 1 :]:
                after = part @ after
            for name, d in local[i].items():
                direct = (1.0 if printed else 1 - beta) * after @ d
                total[i][name] = direct if k == 1 else step @ total[i][name] + direct
        z = beta * ((1 - gamma * decay) * z - gamma * z) + (1 - beta) * at
    return total


@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_lemma_11_is_what_autograd_finds_through_the_unrolling(alpha):
    cell, x, sam, K = contraction(alpha), randn(1, 4), SAM(L2()), 9
    z = Equilibrium(cell, sam, gradient=Unrolled(K))(x)
    with torch.no_grad():
        closed, printed = lemma_11(cell, x[0], K, sam), lemma_11(cell, x[0], K, sam, printed=True)
    for i, layer in enumerate(cell.layers):
        for name in ("W", "U", "b"):
            parameter = getattr(layer, name)
            rows = [torch.autograd.grad(z[0, j], parameter, retain_graph=True)[0] for j in range(6)]
            found = torch.stack([vec(row) if row.ndim == 2 else row for row in rows])
            torch.testing.assert_close(found, closed[i][name], rtol=1e-10, atol=1e-12)
            assert (found - printed[i][name]).norm() > 0.05 * found.norm()  # Eq. (18) as printed lacks 1 - beta


def test_a_regulariser_without_curvature_takes_the_free_gamma():
    assert SAM(Decorrelation().frozen(torch.zeros(3, 4))).schedule == (0.1, 0.5)


def test_the_log_tells_of_the_unrolled_steps():
    layer = Equilibrium(contraction(), SAM(L2()), gradient=Unrolled(7))
    with record() as log:
        solution = layer.solve(randn(5, 4))
    (told,) = log
    assert told.steps.tolist() == solution.steps.tolist() == [7] * 5
    assert told.evals == solution.evals >= 8
