"""Spectra of Jacobians and Hessians against dense linear algebra; and what is not known is said to be unknown."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cell_zoo import ZOO, Entry
from conformance import TanhMap
from opteq import ConvergenceWarning, Equilibrium, Map, Stop
from opteq.cells import ConvOptEq, FunctionCell, GaussianDEQ, MonotoneConv, OptEq
from opteq.diagnostics import arnoldi, lanczos
from opteq.diagnostics.hessian import HessianSpectrum, hessian_spectrum
from opteq.diagnostics.spectrum import JacobianSpectrum, jacobian_spectrum, spectral_radius, spectrum_of
from opteq.gradients import Implicit, JacobianFree, Phantom, Unrolled
from opteq.models import Classifier, Readout
from opteq.solvers import Picard


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(random(n, n, seed=seed))[0]


def rotation(n: int = 2, rest: float = 0.0, seed: int = 0) -> Tensor:
    """0.9 x a rotation of a plane in n dimensions, with a random matrix of radius about `rest` in the others."""
    angle = torch.tensor(1.0, dtype=torch.float64)
    A = torch.zeros(n, n, dtype=torch.float64)
    A[:2, :2] = 0.9 * torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    A[2:, 2:] = rest * random(n - 2, n - 2, seed=seed) / max(1, n - 2) ** 0.5
    Q = orthogonal(n, seed)
    return Q @ A @ Q.T


def jordan(n: int, value: float = 0.5) -> Tensor:
    return value * torch.eye(n, dtype=torch.float64) + torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)


def linear(A: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda z: z @ A.T


@dataclass(frozen=True)
class Linear(Map):
    """Each sample alone, with a matrix of its own. Derivatives by autograd."""

    closed: ClassVar[bool] = True
    A: Tensor
    scale: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return z @ self.A.T


def moduli(matrix: Tensor) -> np.ndarray:
    return np.sort(np.abs(np.linalg.eigvals(matrix.detach().double().numpy())))[::-1]


def dense(fn: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """f'(z) of the whole batch by autograd, entry by entry: [batch n, batch n]."""
    full = torch.autograd.functional.jacobian(fn, z)
    return full.reshape(z.numel(), z.numel())


def blocks(fn: Callable[[Tensor], Tensor], z: Tensor) -> list[Tensor]:
    n = z[0].numel()
    whole = dense(fn, z)
    return [whole[i * n : (i + 1) * n, i * n : (i + 1) * n] for i in range(len(z))]


def check_radius(fn: Any, z: Tensor, rtol: float = 1e-4) -> None:
    expected = torch.tensor([moduli(block)[0] for block in blocks(fn, z)])
    torch.testing.assert_close(spectral_radius(fn, z).double(), expected, rtol=rtol, atol=1e-12)


# --- the spectral radius --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [2, 50, 150])
def test_the_radius_of_nine_tenths_of_a_rotation_is_nine_tenths(n: int, dtype: torch.dtype) -> None:
    A = rotation(n, rest=0.5).to(dtype)
    found = spectral_radius(linear(A), torch.zeros(2, n, dtype=dtype))
    assert found.dtype == dtype
    assert found.shape == (2,)
    torch.testing.assert_close(found.double(), torch.full((2,), 0.9, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_rotation_of_all_dimensions_has_no_eigenvalue_that_stands_out_and_is_right_still() -> None:
    found = spectral_radius(linear(0.9 * orthogonal(120)), torch.zeros(1, 120, dtype=torch.float64))
    assert abs(float(found) - 0.9) < 1e-9


def non_normal(n: int, seed: int) -> Tensor:
    kinds = (
        lambda: random(n, n, seed=seed) / n**0.5,
        lambda: random(n, n, seed=seed) / n**0.5 + 0.1 * random(n, n, seed=seed + 1).triu(1),
        lambda: (random(n, 1, seed=seed) > 0) * random(n, n, seed=seed + 1) / n**0.5,  # a ReLU layer: half of the rows are zero
        lambda: torch.diag(random(n, seed=seed)) + 0.3 * random(n, n, seed=seed + 1).triu(1) / n**0.5,
        lambda: random(n, 3, seed=seed) @ random(3, n, seed=seed + 1) / n,  # of rank 3
        lambda: rotation(n, 0.85, seed) + 0.1 * random(n, n, seed=seed + 1).triu(1) / n**0.5,
    )
    return kinds[seed % 6]()


@pytest.mark.parametrize("seed", range(30))
def test_the_radius_of_random_non_normal_maps_is_that_of_dense_eigenvalues(seed: int) -> None:
    n = (3, 20, 64, 65, 100, 180)[(seed // 6 + seed) % 6]
    A = non_normal(n, seed)
    found = spectral_radius(Linear(A, A), random(1, n))
    np.testing.assert_allclose(found, moduli(A)[:1], rtol=1e-4)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=20)
def test_small_random_maps_of_any_size_and_batch_agree_with_dense_eigenvalues(n: int, batch: int, seed: int) -> None:
    A, z = random(n, n, seed=seed), random(batch, n, seed=seed + 1)
    check_radius(lambda z: torch.tanh(z @ A.T), z, rtol=1e-6)


PICKED = [
    "dense relu alpha=0.4 mu=1 hidden>features",
    "conv 3 zeros relu",
    "deep 2",
    "deep 2 L1 prox",
    "stacked conv",
    "affine",
    "gaussian",
    "scaled relu",
    "monotone relu",
    "monotone conv 2",
    "monotone tiers",
]


@pytest.mark.parametrize("name", PICKED)
def test_cells_agree_with_dense_eigenvalues(name: str) -> None:
    entry: Entry = ZOO[name]
    x = entry.x()
    z = random(len(x), *entry.state_shape(), seed=5)
    check_radius(entry.make().bind(x).detach(), z)


def large_cells() -> dict[str, tuple[Map, Tensor]]:
    torch.manual_seed(0)
    made = {
        "symmetric": (OptEq(5, 90, 40).double(), random(2, 5)),
        "not symmetric": (GaussianDEQ(5, 90).double(), random(2, 5)),
        "conv": (ConvOptEq(2, 3, 4).double(), random(2, 2, 6, 5)),
        "monotone conv": (MonotoneConv(2, 3, (6, 6), m=0.5).double(), random(2, 2, 6, 6)),
    }
    return {name: (cell.bind(x).detach(), random(2, *cell.initial(x).shape[1:], seed=3)) for name, (cell, x) in made.items()}


@pytest.mark.parametrize("name", ["symmetric", "not symmetric", "conv", "monotone conv"])
def test_cells_with_large_states_agree_with_dense_eigenvalues(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", 0)  # ARPACK alone
    check_radius(*large_cells()[name])


def test_a_callable_of_several_steps_agrees_with_dense_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", 0)
    A, u = non_normal(70, 1), random(3, 70, seed=9)

    def unrolled(z: Tensor) -> Tensor:
        for _ in range(3):
            z = torch.tanh(z @ A.T + u)
        return z

    check_radius(unrolled, random(3, 70, seed=4))


def test_samples_have_jacobians_of_their_own_and_are_solved_without_the_others() -> None:
    W = torch.stack([non_normal(70, seed) for seed in range(3)])
    fn = TanhMap(W, torch.zeros(3, 70, dtype=torch.float64))
    found = spectral_radius(fn, torch.zeros(3, 70, dtype=torch.float64))
    np.testing.assert_allclose(found, [moduli(A)[0] for A in W], rtol=1e-6)
    assert fn.log.rows[1:] == []  # nothing but the first evaluation saw the whole batch


@pytest.mark.parametrize("n", [5, 30])
def test_a_map_that_couples_the_batch_has_the_radius_of_the_whole(n: int) -> None:
    A, z = random(n, n, seed=2) / n**0.5, random(4, n, seed=3)

    def coupled(z: Tensor) -> Tensor:
        return torch.tanh(z @ A.T) + 0.5 * z.mean(0)

    expected = moduli(dense(coupled, z))[0]
    np.testing.assert_allclose(spectral_radius(coupled, z), [expected] * 4, rtol=1e-6)
    z[2, 0] = math.nan
    with pytest.warns(ConvergenceWarning, match="4 of 4"):
        assert spectral_radius(coupled, z).isnan().all()


@pytest.mark.parametrize(("source", "target"), [(1, 4), (5, 0)])
def test_a_sample_that_depends_on_one_other_only_couples_the_batch(source: int, target: int) -> None:
    z = random(6, 3)

    def chain(z: Tensor) -> Tensor:
        factor = torch.arange(1, 19, dtype=torch.float64).view(6, 3)  # else the whole would be defective
        return torch.stack([z[i] if i != target else z[i] + z[source] ** 2 for i in range(6)]) * factor

    found = jacobian_spectrum(chain, z, k=3)
    np.testing.assert_allclose(found.eigenvalues[0].abs(), [18, 17, 16], rtol=1e-9)
    assert torch.equal(found.eigenvalues[0], found.eigenvalues[5])


def test_cells_that_say_that_they_couple_the_batch_are_taken_as_a_whole() -> None:
    entry = ZOO["deep Decorrelation"]
    fn, z = entry.make().bind(entry.x()).detach(), random(4, *entry.state_shape())
    np.testing.assert_allclose(spectral_radius(fn, z), [moduli(dense(fn, z))[0]] * 4, rtol=1e-6)


def test_results_repeat_whatever_the_state_of_the_random_numbers() -> None:
    U = random(100, 5)
    for A in (non_normal(100, 1), U @ U.T / 100):
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            found.append(jacobian_spectrum(Linear(A, A), torch.zeros(1, 100, dtype=torch.float64), k=4).eigenvalues)
            assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(*found)


@pytest.mark.parametrize("n", [3, 70])
def test_a_jacobian_of_zeros_has_radius_zero(n: int) -> None:
    assert spectral_radius(lambda z: torch.ones_like(z) + 0 * z, torch.zeros(2, n)).tolist() == [0.0, 0.0]


def test_states_may_be_empty_batches_or_single_numbers() -> None:
    assert spectral_radius(lambda z: 0.5 * z, torch.zeros(0, 3)).shape == (0,)
    assert jacobian_spectrum(lambda z: 0.5 * z, torch.zeros(0, 3), k=2).eigenvalues.shape == (0, 2)
    assert spectral_radius(lambda z: -0.5 * z, torch.zeros(3)).tolist() == [0.5] * 3


# --- honesty --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 70])
def test_nan_in_a_state_gives_nan_and_a_warning_for_that_sample_alone(n: int) -> None:
    A, z = non_normal(n, 0), random(3, n)
    z[1, 2] = math.nan
    for fn in (linear(A), Linear(A, A)):
        with pytest.warns(ConvergenceWarning, match=r"1 of 3 samples.*\n1 met NaN"):
            found = spectral_radius(fn, z)
        np.testing.assert_allclose(found, [moduli(A)[0], math.nan, moduli(A)[0]], rtol=1e-6)
    with pytest.warns(ConvergenceWarning, match="3 of 3"):
        assert spectral_radius(linear(A), z * math.nan).isnan().all()


@pytest.mark.parametrize("n", [5, 70])
def test_nan_in_a_jacobian_gives_nan_and_a_warning(n: int) -> None:
    A = non_normal(n, 0)
    z = torch.ones(2, n, dtype=torch.float64)
    z[0, 0] = 0.0  # where the derivative of the square root is infinite
    with pytest.warns(ConvergenceWarning, match="1 of 2"):
        found = spectral_radius(lambda z: z.sqrt() @ A.T, z)
    assert found.isnan().tolist() == [True, False]


def test_too_few_restarts_are_told_and_give_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", 0)
    A = 0.9 * orthogonal(150)
    with pytest.warns(ConvergenceWarning, match=r"spectral_radius.*2 of 2 samples.*\n2 did not converge.*restarts"):
        found = spectral_radius(linear(A), torch.zeros(2, 150, dtype=torch.float64), restarts=1)
    assert found.isnan().all()


def test_eigenvalues_found_before_the_restarts_ran_out_are_kept_but_not_called_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", 0)
    A = torch.block_diag(torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)), 0.9 * orthogonal(150))
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        found = jacobian_spectrum(linear(A), torch.zeros(1, 152, dtype=torch.float64), k=3, restarts=2)
    np.testing.assert_allclose(found.eigenvalues[0, :2], [3, 2], rtol=1e-6)
    assert found.eigenvalues[0, 2].isnan()
    assert not found.converged.any()
    assert found.radius.isnan().all()


@pytest.mark.parametrize("n", [2, 3, 10, 100])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("medium", [0, 1024])
def test_the_radius_of_a_jordan_block_is_right_or_flagged(
    n: int, turned: bool, medium: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", medium)
    Q = orthogonal(n) if turned else torch.eye(n, dtype=torch.float64)
    found = float(spectral_radius(linear(Q @ jordan(n) @ Q.T), torch.zeros(1, n, dtype=torch.float64), restarts=8))
    flagged = [w for w in recwarn.list if issubclass(w.category, ConvergenceWarning)]
    assert flagged or abs(found - 0.5) < 1e-4
    assert flagged or n < 10
    recwarn.clear()


def test_an_eigenvalue_that_is_found_for_the_transpose_only_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", 0)
    good = arnoldi.Arnoldi._arpack
    diagonal = torch.linspace(0, 1, 100, dtype=torch.float64)

    def blind(self: Any, matrix: Any, product: Any, start: Any) -> Any:
        start[-1] = 0.0 if product is matrix.forward else start[-1]  # no part of the eigenvector of the largest
        return good(self, matrix, product, start)

    monkeypatch.setattr(arnoldi.Arnoldi, "_arpack", blind)
    with pytest.warns(ConvergenceWarning, match="transpose"):
        found = jacobian_spectrum(lambda z: z * diagonal, torch.zeros(1, 100, dtype=torch.float64), k=2)
    assert found.radius.isnan().all()
    assert not found.converged.any()


def test_errors_are_at_least_as_large_as_the_distance_to_the_dense_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", 0)
    A = non_normal(100, 1).float()
    found = jacobian_spectrum(linear(A), torch.zeros(1, 100), k=4)
    true = np.linalg.eigvals(A.double().numpy())
    for value, error in zip(found.eigenvalues[0].tolist(), found.error[0].tolist(), strict=True):
        assert np.abs(true - value).min() <= error < 1e-4


def test_an_eigenvalue_that_is_too_ill_conditioned_for_its_precision_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arnoldi, "MEDIUM", 0)
    A = 0.3 * orthogonal(100, seed=1)
    A[:, 0] = 0.0
    A[0] = 20 * random(100)
    A[0, 0] = 1.0  # the eigenvalue, of condition number about 200
    Q = orthogonal(100)
    A = Q @ A @ Q.T
    with pytest.warns(ConvergenceWarning, match="ill-conditioned.*Errors are up to"):
        found = float(spectral_radius(linear(A.float()), torch.zeros(1, 100)))
    assert abs(found - 1) < 0.5


@pytest.mark.parametrize(("condition", "known"), [(2.0, True), (1e4, False)])
@pytest.mark.parametrize("n", [6, 30])
def test_small_states_in_single_precision_have_errors_that_cover_the_truth(n: int, condition: float, known: bool) -> None:
    P = orthogonal(n, 1) @ torch.diag(torch.logspace(0, math.log10(condition), n, dtype=torch.float64)) @ orthogonal(n, 2)
    D = torch.diag(torch.linspace(0.1, 0.9, n, dtype=torch.float64))
    left, right = P.float(), (D @ torch.linalg.inv(P)).float()
    true = moduli(left.double() @ right.double())[:3]
    if known:
        found = jacobian_spectrum(lambda z: z @ right.T @ left.T, torch.zeros(1, n), k=3)
    else:
        with pytest.warns(ConvergenceWarning, match="ill-conditioned"):
            found = jacobian_spectrum(lambda z: z @ right.T @ left.T, torch.zeros(1, n), k=3)
    assert found.converged.tolist() == [[known] * 3]
    assert (np.abs(found.eigenvalues[0].abs().numpy() - true) <= found.error[0].numpy()).all()


# --- the k largest --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [12, 90])
def test_the_k_largest_eigenvalues_come_in_the_order_of_their_moduli(n: int) -> None:
    A = non_normal(n, 5)
    found = jacobian_spectrum(linear(A), torch.zeros(2, n, dtype=torch.float64), k=5)
    assert found.eigenvalues.dtype == torch.complex128
    assert found.converged.all()
    np.testing.assert_allclose(found.eigenvalues[1].abs(), moduli(A)[:5], rtol=1e-6)
    true = np.linalg.eigvals(A.numpy())
    for value in found.eigenvalues[0].tolist():
        assert np.abs(true - value).min() < 1e-6
    np.testing.assert_allclose(found.radius, moduli(A)[[0, 0]], rtol=1e-6)


def test_there_are_at_most_as_many_eigenvalues_as_numbers_in_a_state() -> None:
    A = non_normal(3, 0)
    found = jacobian_spectrum(linear(A), torch.zeros(1, 3, dtype=torch.float64), k=10)
    np.testing.assert_allclose(found.eigenvalues[0].abs(), moduli(A), rtol=1e-9)


def test_the_csv_has_a_row_for_every_eigenvalue(tmp_path: Path) -> None:
    found = jacobian_spectrum(linear(non_normal(6, 5)), torch.zeros(2, 6, dtype=torch.float64), k=3)
    with found.csv(tmp_path / "jacobian.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["sample", "index", "real", "imag", "error", "converged"]
    assert [(int(row["sample"]), int(row["index"])) for row in rows] == [(i, j) for i in range(2) for j in range(3)]
    assert [complex(float(row["real"]), float(row["imag"])) for row in rows] == found.eigenvalues.flatten().tolist()
    assert {row["converged"] for row in rows} == {"1"}


def test_the_figure_shows_all_eigenvalues_and_the_unit_circle(tmp_path: Path) -> None:
    values = torch.tensor([[0.5 + 0.5j, 0.5 - 0.5j, 0.1], [1.2, math.nan, math.nan]], dtype=torch.complex128)
    error = torch.zeros(2, 3, dtype=torch.float64)
    found = JacobianSpectrum(values, error, torch.tensor([[True] * 3, [False] * 3]))
    (axes,) = found.figure().axes
    circle, good, bad = axes.lines
    np.testing.assert_allclose(np.hypot(*circle.get_data()), 1)
    assert [*zip(*good.get_data(), strict=True)] == [(0.5, 0.5), (0.5, -0.5), (0.1, 0.0)]
    assert [*zip(*bad.get_data(), strict=True)] == [(1.2, 0.0)]
    assert [path.suffix for path in found.save(tmp_path)] == [".csv", ".svg", ".png"]
    unknown = JacobianSpectrum(values * math.nan, error, torch.zeros(2, 3, dtype=torch.bool))
    assert len(unknown.figure().axes[0].lines) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"k": 0}, ValueError, "'k'"),
        ({"rtol": 0.0}, ValueError, "'rtol'"),
        ({"restarts": 0}, ValueError, "'restarts'"),
        ({"seed": -1}, ValueError, "'seed'"),
        ({"fn": 3}, TypeError, "'fn'"),
        ({"z": torch.zeros(2, 3, dtype=torch.long)}, TypeError, "'z'"),
        ({"z": torch.zeros(())}, ValueError, "'z'"),
        ({"z": torch.zeros(2, 0)}, ValueError, "'z'"),
        ({"fn": lambda z: z[:, :2]}, ValueError, "shape of its state"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        jacobian_spectrum(**{"fn": torch.tanh, "z": torch.zeros(2, 3), **arguments})


# --- models ---------------------------------------------------------------------------------------------------------------------


def deq(features: int = 3, **options: Any) -> Equilibrium:
    torch.manual_seed(0)
    cell = OptEq(3, features, 2, activation="tanh").double()
    with torch.no_grad():
        cell.W.mul_(0.8 / torch.linalg.matrix_norm(cell.W, 2))
    return Equilibrium(cell, **{"stop": Stop(rtol=1e-13, max_steps=500), **options})


def classifier(**options: Any) -> Classifier:
    return Classifier(nn.Identity(), deq(**options), nn.Linear(3, 2)).double()


@pytest.mark.parametrize(
    ("model", "name"),
    [(deq(), ""), (nn.Sequential(nn.Identity(), deq()), "1"), (classifier(), "equilibrium"), (Readout(deq().cell), "")],
    ids=["layer", "sequence", "classifier", "readout"],
)
def test_the_spectrum_of_a_model_is_that_of_its_cell_at_the_equilibrium(model: nn.Module, name: str) -> None:
    x = random(3, 3)
    found = spectrum_of(model, x, k=2)
    cell = deq().cell
    z = deq()(x).detach()
    expected = [moduli(block)[:2] for block in blocks(cell.bind(x).detach(), z)]
    np.testing.assert_allclose(found.eigenvalues.abs(), expected, rtol=1e-9)
    assert found.layer == name
    assert found.converged.all()


def test_several_equilibria_are_told_apart_by_their_names() -> None:
    model = nn.Sequential(deq(), deq(features=4))
    assert spectrum_of(model, random(2, 3), layer="1").layer == "1"
    with pytest.raises(ValueError, match="'layer'"):
        spectrum_of(model, random(2, 3))


def test_samples_whose_equilibrium_was_not_found_are_not_converged() -> None:
    x = random(3, 3)
    with pytest.warns(ConvergenceWarning, match="spectrum_of.*3 of 3"):
        found = spectrum_of(deq(solver=Picard(), stop=Stop(rtol=1e-12, max_steps=2)), x, k=1)
    assert not found.converged.any()
    assert found.radius.isfinite().all()
    x[1, 0] = math.nan
    with pytest.warns(ConvergenceWarning, match="1 of 3"):
        found = spectrum_of(deq(), x, k=1)
    assert found.converged[:, 0].tolist() == [True, False, True]
    assert found.radius.isnan().tolist() == [False, True, False]


# --- the Hessian ----------------------------------------------------------------------------------------------------------------

X, Y = random(6, 3, seed=1), torch.arange(6) % 2


def entropy(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(X), Y)


def dense_hessian(model: nn.Module, loss: Callable[[nn.Module], Tensor], step: float = 1e-5) -> np.ndarray:
    """By central differences of the gradient: no second derivative is used."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    vector = nn.utils.parameters_to_vector(parameters).detach().clone()
    columns = []
    for i in range(len(vector)):
        sides = []
        for sign in (1, -1):
            moved = vector.clone()
            moved[i] += sign * step
            nn.utils.vector_to_parameters(moved, parameters)
            sides.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss(model), parameters)]))
        columns.append((sides[0] - sides[1]) / (2 * step))
    nn.utils.vector_to_parameters(vector, parameters)
    return torch.stack(columns).numpy()


@pytest.fixture(scope="module")
def true_eigenvalues() -> np.ndarray:
    matrix = dense_hessian(classifier(), entropy)
    return np.sort(np.linalg.eigvalsh((matrix + matrix.T) / 2))[::-1]


@pytest.mark.parametrize(("which", "small"), [("largest", 0), ("modulus", 0), ("smallest", 64)])
def test_hessian_eigenvalues_of_a_deq_are_those_of_the_dense_hessian(
    which: Any, small: int, true_eigenvalues: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanczos, "SMALL", small)
    found = hessian_spectrum(classifier(), entropy, k=3, which=which, restarts=200)
    by_modulus = true_eigenvalues[np.argsort(-np.abs(true_eigenvalues))][:3]
    expected = {"largest": true_eigenvalues[:3], "smallest": true_eigenvalues[-3:], "modulus": np.sort(by_modulus)[::-1]}[which]
    np.testing.assert_allclose(found.eigenvalues, expected, rtol=1e-5, atol=1e-7)
    assert found.converged.all()
    assert (found.error >= 0).all()
    assert found.which == which
    assert found.asymmetry < 1e-8
    assert found.size == len(true_eigenvalues) == 22
    assert math.isnan(found.trace)


def test_the_trace_is_within_a_few_of_its_standard_errors() -> None:
    A = random(20, 20)

    def quadratic(m: nn.Module) -> Tensor:
        return (m.weight @ (A + A.T) @ m.weight.T).sum() / 4

    model = nn.Linear(20, 1, bias=False).double()
    first, other = (hessian_spectrum(model, quadratic, k=1, probes=100, seed=seed) for seed in (0, 1))
    spread = float((2 * (((A + A.T) / 2) ** 2).sum() - 2 * (A.diagonal() ** 2).sum()) ** 0.5) / 10  # Hutchinson's variance
    for found in (first, other):
        assert abs(found.trace - float(A.trace())) < 3 * spread
        assert 0.7 * spread < found.trace_error < 1.4 * spread
    assert first.trace != other.trace


def test_an_unrolled_deq_has_the_hessian_of_its_steps() -> None:
    model = classifier(gradient=Unrolled(2))
    matrix = dense_hessian(model, entropy)
    expected = np.sort(np.linalg.eigvalsh((matrix + matrix.T) / 2))[::-1]
    np.testing.assert_allclose(hessian_spectrum(model, entropy, k=2).eigenvalues, expected[:2], rtol=1e-5)


def test_only_parameters_that_require_gradients_count() -> None:
    model = classifier()
    for parameter in model.equilibrium.parameters():
        parameter.requires_grad_(False)
    matrix = dense_hessian(model, entropy)
    found = hessian_spectrum(model, entropy, k=3)
    assert found.size == 8
    np.testing.assert_allclose(found.eigenvalues, np.sort(np.linalg.eigvalsh(matrix))[::-1][:3], rtol=1e-5)


@pytest.mark.parametrize("small", [0, 64])
def test_the_hessian_of_a_linear_loss_is_zero(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanczos, "SMALL", small)
    found = hessian_spectrum(nn.Linear(10, 10, bias=False), lambda m: m.weight.sum(), k=2)
    assert found.eigenvalues.tolist() == [0.0, 0.0]
    assert found.converged.all()


def diagonal_spectrum(diagonal: Tensor, **options: Any) -> HessianSpectrum:
    """Of the loss w'Dw / 2, in coordinates that are turned."""
    A = orthogonal(len(diagonal)).T @ (diagonal[:, None] * orthogonal(len(diagonal)))
    model = nn.Linear(len(diagonal), 1, bias=False).double()
    return hessian_spectrum(model, lambda m: (m.weight @ A @ m.weight.T).sum() / 2, **options)


def test_the_eigenvalues_of_linear_regression_come_as_often_as_there_are_outputs() -> None:
    x, y = random(40, 20), random(40, 10, seed=1)
    model = nn.Linear(20, 10, bias=False).double()
    found = hessian_spectrum(model, lambda m: nn.functional.mse_loss(m(x), y), k=12)
    single = torch.linalg.eigvalsh(2 * x.T @ x / 400).flip(0)
    np.testing.assert_allclose(found.eigenvalues, [single[0]] * 10 + [single[1]] * 2, rtol=1e-6)
    assert found.converged.all()


@pytest.mark.parametrize(
    ("which", "above", "below"),
    [("largest", 10, 0), ("smallest", 0, 10), ("modulus", 10, 0), ("modulus", 0, 10), ("modulus", 5, 5)],
)
def test_a_multiple_eigenvalue_is_found_as_often_as_it_occurs(which: Any, above: int, below: int) -> None:
    rest = torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tops = [5.0] * above + [-5.0] * below
    found = diagonal_spectrum(torch.cat([rest, torch.tensor(tops, dtype=torch.float64)]), k=10, which=which)
    np.testing.assert_allclose(found.eigenvalues, tops, rtol=1e-6)
    assert found.converged.all()


def test_all_eigenvalues_may_be_equal_or_on_the_other_side_of_zero() -> None:
    np.testing.assert_allclose(diagonal_spectrum(2 * torch.ones(90, dtype=torch.float64), k=4).eigenvalues, [2.0] * 4)
    negative = diagonal_spectrum(torch.tensor([-1.0] * 3 + [-2.0] * 87, dtype=torch.float64), k=4)
    np.testing.assert_allclose(negative.eigenvalues, [-1.0] * 3 + [-2.0], rtol=1e-6)


@pytest.mark.parametrize("fails", ["the check", "the last digits", "every time"])
def test_eigenvalues_that_may_have_been_missed_are_told(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good, calls = lanczos.Lanczos._arpack, []

    def stuck(self: Any, product: Any, start: Any, k: int, *settings: Any) -> Any:
        calls.append(k)
        values, vectors, sure = good(self, product, start, k, *settings)
        if len(calls) > {"the check": 1, "the last digits": 2, "every time": 99}[fails]:
            return values[:0], vectors[:, :0], False
        return (values + (1.0 if k == 1 and fails == "every time" else 0.0)), vectors, sure

    solve, found_all = lanczos.Lanczos.solve, []

    def watched(self: Any, *arguments: Any) -> Any:
        *found, complete = solve(self, *arguments)
        found_all.append(complete)
        return *found, complete

    monkeypatch.setattr(lanczos.Lanczos, "_arpack", stuck)
    monkeypatch.setattr(lanczos.Lanczos, "solve", watched)
    with pytest.warns(ConvergenceWarning, match="8 of 8 eigenvalues are not known"):
        found = diagonal_spectrum(torch.cat([torch.full((8,), 5.0), torch.linspace(0, 1, 150)]).double(), k=8)
    assert not found.converged.any()
    assert found_all == [False]
    assert len(calls) == {"the check": 2, "the last digits": 3, "every time": 19}[fails]  # 1 + 2 (k + 1)


@pytest.mark.parametrize(("outputs", "dtype"), [(2, torch.float64), (5, torch.float64), (2, torch.float32)])
def test_the_zeros_of_softmax_regression_are_known(outputs: int, dtype: torch.dtype) -> None:
    x, y = random(200, 20, seed=1).to(dtype), torch.arange(200) % outputs
    model = nn.Linear(20, outputs).to(dtype)  # a vector added to all rows changes nothing: 21 zeros
    model.weight.data.copy_(0.2 * random(outputs, 20, seed=2))
    nn.init.zeros_(model.bias)
    found = hessian_spectrum(model, lambda m: nn.functional.cross_entropy(m(x), y), k=5, which="smallest")
    assert found.converged.all()
    assert found.eigenvalues.abs().max() < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("least", [0.02, 0.1])
def test_zeros_that_were_missed_at_first_are_found_with_all_digits(least: float) -> None:
    found = diagonal_spectrum(torch.cat([torch.zeros(20), torch.linspace(least, 1, 100)]).double(), k=5, which="smallest")
    assert found.converged.all()
    assert found.eigenvalues.abs().max() < 100 * torch.finfo(torch.float64).eps


def test_there_are_at_most_as_many_eigenvalues_as_parameters() -> None:
    found = hessian_spectrum(nn.Linear(2, 1, bias=False).double(), lambda m: (m.weight * m.weight).sum(), k=9)
    np.testing.assert_allclose(found.eigenvalues, [2.0, 2.0])


def test_a_wrong_second_derivative_is_told_by_its_asymmetry() -> None:
    class Half(torch.autograd.Function):
        """The identity, whose gradient is scaled by a constant that it is not allowed to be."""

        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            a, b = ctx.saved_tensors
            return grads[0] * b.detach(), grads[0] * a

    model = nn.Linear(5, 5, bias=True).double()
    with pytest.warns(ConvergenceWarning, match="not symmetric"):
        hessian_spectrum(model, lambda m: Half.apply(m.weight.sum(1), m.bias).square().sum(), k=1, rtol=10.0)


@pytest.mark.parametrize("gradient", [Phantom(), JacobianFree()])
def test_approximate_gradients_are_refused(gradient: Any) -> None:
    with pytest.raises(ValueError, match=rf"{type(gradient).__name__} only approximates"):
        hessian_spectrum(classifier(gradient=gradient), entropy)


def test_what_lanczos_does_not_find_is_nan_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanczos, "SMALL", 0)
    scale = torch.linspace(1, 1.001, 900, dtype=torch.float64)
    scale[7] = 5.0
    model = nn.Linear(900, 1, bias=False).double()
    with pytest.warns(ConvergenceWarning, match=r"2 of 2 eigenvalues are not known to rtol.*restarts"):
        found = hessian_spectrum(model, lambda m: (scale * m.weight**2).sum(), k=2, restarts=2, rtol=1e-7)
    assert abs(float(found.eigenvalues[0]) - 10.0) < 1e-6  # found, but who knows whether it is the largest
    assert found.error[0] < 1e-6
    assert found.eigenvalues[1].isnan()
    assert not found.converged.any()


def test_solves_that_fail_are_counted_in_one_warning() -> None:
    model = classifier(gradient=Implicit(Stop(rtol=1e-14, max_steps=1)))
    with pytest.warns(ConvergenceWarning) as told:
        hessian_spectrum(model, entropy, k=1)
    (warning,) = told
    assert "backward solves of equilibria did not converge" in str(warning.message)
    assert warning.filename == __file__


def test_products_that_are_not_finite_give_nan_and_a_warning() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    with pytest.warns(ConvergenceWarning, match="NaN or infinity"):
        found = hessian_spectrum(model, lambda m: (m.weight.abs() ** 1.5).sum(), k=2)
    assert found.eigenvalues.isnan().all()
    assert not found.converged.any()


class Nosy(nn.Module):
    """A model with buffers that a forward pass changes or replaces, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y: Tensor = self.body(x)
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_numbers_are_left_as_they_were(fails: bool) -> None:
    model = Nosy().double().train()
    model.body[0].eval()
    entropy(model).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads, state = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    def loss(m: nn.Module) -> Tensor:
        value = entropy(m)
        m.train()
        if fails:
            raise KeyError("the loss went wrong")
        return value

    if fails:
        with pytest.raises(KeyError, match="went wrong"):
            hessian_spectrum(model, loss, k=1)
    else:
        with torch.no_grad():
            first = hessian_spectrum(model, loss, k=1)
            torch.rand(3)
            again = hessian_spectrum(model, loss, k=1)
        assert torch.equal(first.eigenvalues, again.eigenvalues)
        torch.set_rng_state(state)
        hessian_spectrum(model, loss, k=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.body] == [False, True, True, True, True]


def test_the_csv_and_the_figure_of_a_hessian(tmp_path: Path) -> None:
    values = torch.tensor([3.0, 1.0, math.nan], dtype=torch.float64)
    error = torch.tensor([0.1, 0.5, math.inf], dtype=torch.float64)
    found = HessianSpectrum(values, error, torch.tensor([True, False, False]), "largest", 0.0, math.nan, math.nan, 9)
    with found.csv(tmp_path / "hessian.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["index", "eigenvalue", "error", "converged"]
    assert [(row["index"], float(row["eigenvalue"]), row["converged"]) for row in rows[:2]] == [("0", 3.0, "1"), ("1", 1.0, "0")]
    (axes,) = found.figure().axes
    bars = [segment for part in axes.collections for segment in part.get_segments()]
    np.testing.assert_allclose([segment[:, 1] for segment in bars], [[2.9, 3.1], [0.5, 1.5]])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["not converged"]
    assert [path.name for path in found.save(tmp_path)] == ["hessian.csv", "hessian.svg", "hessian.png"]
    sound = HessianSpectrum(values[:2], error[:2], torch.tensor([True, True]), "largest", 0.0, 1.0, 0.1, 9)
    assert sound.figure().axes[0].get_legend() is None


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"k": 0}, ValueError, "'k'"),
        ({"probes": -1}, ValueError, "'probes'"),
        ({"probes": 1}, ValueError, "'probes'.*at least 2"),
        ({"rtol": 0.0}, ValueError, "'rtol'"),
        ({"which": "LA"}, ValueError, "'which'"),
        ({"model": entropy}, TypeError, "'model'"),
        ({"model": nn.ReLU()}, ValueError, "'model'.*require gradients. Got 'ReLU' instead"),
        ({"loss": lambda m: m.weight}, ValueError, r"'loss'.*one number.*shape \[2, 3\]"),
        ({"loss": lambda m: m.weight.detach().sum()}, ValueError, r"'loss'.*requires_grad=False"),
        ({"loss": lambda m: 1.0}, ValueError, r"'loss'.*1\.0"),
    ],
)
def test_bad_arguments_of_a_hessian_are_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        hessian_spectrum(**{"model": nn.Linear(3, 2), "loss": lambda m: m.weight.square().sum(), **arguments})


def test_a_function_cell_that_captures_tensors_has_a_spectrum_and_a_hessian() -> None:
    A = nn.Parameter(0.5 * non_normal(4, 0))
    layer = Equilibrium(FunctionCell(lambda z, x: torch.tanh(z @ A.T + x), (4,)), stop=Stop(rtol=1e-13, max_steps=500))
    x = random(2, 4)
    z = layer(x).detach()
    expected = [moduli(block)[0] for block in blocks(lambda z: torch.tanh(z @ A.T + x), z)]
    np.testing.assert_allclose(spectrum_of(layer, x, k=1).radius, expected, rtol=1e-9)
