"""error_bound is never below the true distance, and what it certifies does not change by solving further."""

import copy
import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bound_zoo import KINDS, ActivationCell, equilibrium, gaussian, image_split, monotone
from cell_zoo import affine, conv, deep, dense, random_matrix
from conformance import write_verify
from opteq import Cell, Equilibrium, Stop, solve
from opteq.cells import (
    AffineOptEq,
    ConvOptEq,
    DepthwiseOptEq,
    FunctionCell,
    GaussianDEQ,
    Monotone,
    MonotoneConv,
    OptEq,
    ScaledReLU,
    StackedOptEq,
    WideOptEq,
)
from opteq.cells.deep import RegularizedStep
from opteq.models import Readout
from opteq.regularizers import HSIC, L1, L2, Incay, Regularizer
from opteq.solve import CallableMap
from opteq.solvers import Anderson, Broyden, Newton, Picard
from opteq.spectral import operator_norm
from opteq.theory.contraction import UnknownFactorError, in_sequence, rates
from opteq.theory.error import ErrorBound, certified_interval, certified_predictions, error_bound

SOLVERS = (Picard(), Anderson(), Broyden(), Newton())


def lengths(z: Tensor) -> Tensor:
    return z.flatten(1).norm(dim=1)


def stopped(cell: Cell, x: Tensor, seed: int) -> Tensor:
    """What some solver returns at some tolerance between 1e-1 and 1e-8, begun somewhere."""
    fn = cell.bind(x).to(torch.float64)
    g = torch.Generator().manual_seed(seed)
    rtol = 10 ** (-1 - 7 * float(torch.rand(1, generator=g)))
    solver = SOLVERS[int(torch.randint(len(SOLVERS), (1,), generator=g))]
    shape = cell.initial(x).shape
    z0 = torch.randn(shape, generator=g, dtype=torch.float64) * float(torch.rand(1, generator=g))
    return solve(fn, z0, solver, Stop(rtol=rtol, max_steps=40)).z


def assert_never_below(name: str, seeds: range) -> list[float]:
    """bound >= |z - z*| at every stopped solve; the ratios bound / |z - z*|."""
    ratios = []
    for seed in seeds:
        cell, x = KINDS[name].make(seed), KINDS[name].x(seed)
        z = stopped(cell, x, seed)
        found = error_bound(cell, x, z)
        true = lengths(z - equilibrium(cell, x, z))
        assert found.evidence == "bound"
        assert (true <= found.bound).all(), f"{name}, seed {seed}: {true} > {found.bound}"
        ratios += (found.bound / true)[true > 1e-12].tolist()
    return ratios


@pytest.mark.parametrize("name", KINDS)
def test_the_bound_is_never_below_the_true_distance(name: str) -> None:
    ratios = assert_never_below(name, range(2))
    assert ratios
    assert max(ratios) < math.inf


@pytest.mark.verify
def test_verify_2000_stopped_solves() -> None:
    each = -(-2000 // len(KINDS))
    ratios = {name: assert_never_below(name, range(each)) for name in KINDS}
    write_verify(
        "error_bound",
        {
            "what": "bound / |z - z*| for solves stopped at tolerances from 1e-1 to 1e-8, 4 samples each; never below 1",
            "solves": each * len(KINDS),
            "tightness": {name: {"median": statistics.median(r), "least": min(r), "samples": len(r)} for name, r in ratios.items()},
            "textbook (1 + ||I - W||) r / m over ours, Monotone": statistics.median(textbook_ratios(range(each))),
        },
    )


def textbook_ratios(seeds: range) -> list[float]:
    """(1 + ||I - W||) |f(z) - z| / m divided by |e| + |W e| / m."""
    found = []
    for seed in seeds:
        cell, x = monotone(seed), KINDS["Monotone relu"].x(seed)
        z = stopped(cell, x, seed)
        W = cell.matrix().detach()
        with torch.no_grad():
            r = lengths(cell.bind(x)(z) - z)
        textbook = (1 + torch.linalg.matrix_norm(torch.eye(len(W)) - W, 2)) * r / cell.m
        found += (textbook / error_bound(cell, x, z).bound)[r > 1e-11].tolist()
    return found


def test_the_textbook_bound_is_looser() -> None:
    ratios = textbook_ratios(range(8))
    assert min(ratios) > 1
    assert statistics.median(ratios) > 1.3


@settings(max_examples=6)
@given(
    name=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 10_000),
    size=st.floats(-9, 2),
)
def test_the_bound_holds_at_any_point(name: str, seed: int, size: float) -> None:
    cell, x = KINDS[name].make(seed), KINDS[name].x(seed, batch=2)
    z = equilibrium(cell, x)
    moved = z + 10**size * random_matrix(*z.shape, seed=seed)
    assert (lengths(moved - z) <= error_bound(cell, x, moved).bound).all()


@pytest.mark.parametrize("alpha", [1.0, 0.3, 1e-4])
def test_the_bound_of_a_linear_layer_is_attained(alpha: float) -> None:
    """sigma = I: e = -(I - W'W) d, and d along the largest singular vector has |e| = (1 - c) |d|."""
    cell = dense(0, activation="identity", alpha=alpha)
    x = random_matrix(3, 3, seed=1)
    z = equilibrium(dense(0, activation="identity"), x)
    top = torch.linalg.svd(cell.W.detach()).Vh[0]
    assert torch.allclose(error_bound(cell, x, z + 0.1 * top).bound, torch.full((3,), 0.1).double(), rtol=1e-9)


def test_the_skip_connection_leaves_the_bound_as_it_is() -> None:
    x, z = random_matrix(3, 3, seed=1), random_matrix(3, 4, seed=2)
    bounds = [error_bound(dense(0, activation="tanh", alpha=alpha), x, z).bound for alpha in (1.0, 0.5, 1e-6)]
    assert torch.equal(bounds[0], bounds[1])
    assert torch.equal(bounds[0], bounds[2])


def test_the_factor_of_deep_cells_is_the_product_of_those_of_the_layers() -> None:
    cell = deep(dense(0), dense(1, factor=0.5), dense(2, factor=0.9, alpha=0.5))
    parts = [rates(layer) for layer in cell.bind(random_matrix(1, 3, seed=0)).layers]
    assert 1 - float(in_sequence(parts).gap.detach()) == pytest.approx(0.8 * 0.5 * 0.95, rel=1e-9)


def test_the_factor_of_deep_cells_keeps_its_digits_when_alpha_is_small() -> None:
    cell = deep(*(dense(i, alpha=1e-9) for i in range(3)))
    parts = [rates(layer) for layer in cell.bind(random_matrix(1, 3, seed=0)).layers]
    exact = sum(1e-9 * (1 - 0.8) for _ in range(3))  # the products of two are below 1e-18
    assert float(in_sequence(parts).gap.detach()) == pytest.approx(exact, rel=1e-7)


def test_an_affine_cell_is_bounded_also_where_its_own_map_is_no_contraction() -> None:
    cell = affine(0, orthogonal=False)
    with torch.no_grad():
        cell.A.copy_(torch.diag(torch.tensor([0.02, 1.0, 3.0, 50.0])))
    x = random_matrix(4, 3, seed=1)
    z = equilibrium(cell, x)
    moved = z + 1e-3 * random_matrix(4, 4, seed=3)
    bound = error_bound(cell, x, moved).bound
    assert bound.isfinite().all()
    assert (lengths(moved - z) <= bound).all()


def test_a_gaussian_cell_gets_the_smaller_of_its_two_bounds() -> None:
    cell, x = gaussian(3, factor=0.9), random_matrix(5, 3, seed=1)
    z = random_matrix(5, 12, seed=2)
    W = cell.W.detach()
    with torch.no_grad():
        e = cell.bind(x)(z) - z
    m = 1 - torch.linalg.eigvalsh((W + W.T) / 2)[-1]
    by_norm, by_sign = lengths(e) / (1 - 0.9), lengths(e) + lengths(e @ W.T) / m
    assert torch.allclose(error_bound(cell, x, z).bound, torch.minimum(by_norm, by_sign), rtol=1e-9)


def test_solutions_and_tensors_are_taken_alike() -> None:
    cell, x = dense(0), random_matrix(3, 3, seed=1)
    solution = Equilibrium(cell, Anderson(), Stop(rtol=1e-2)).solve(x)
    bound, evidence = error_bound(cell, x, solution)
    again = error_bound(cell, x, solution.z.detach())
    assert isinstance(again, ErrorBound)
    assert torch.equal(bound, again.bound)
    assert evidence == "bound"
    assert bound.dtype == torch.float64
    assert not bound.requires_grad


def _single(cell: Cell) -> Cell:
    return copy.deepcopy(cell).float()


@pytest.mark.parametrize("name", ["OptEq relu", "ConvOptEq zeros", "DeepOptEq 2", "GaussianDEQ", "ScaledReLU", "Monotone relu"])
def test_single_precision_states_are_bounded_in_double(name: str) -> None:
    """The distance is to the equilibrium of the stored parameters, however loosely single precision solves it."""
    cell = _single(KINDS[name].make(1))
    x = KINDS[name].x(1).float()
    z = equilibrium(copy.deepcopy(cell).double(), x.double())
    with torch.no_grad():
        rounded = solve(cell.bind(x), cell.initial(x), Newton(), Stop(rtol=1e-7, max_steps=60)).z
    bound = error_bound(cell, x, rounded).bound
    assert bound.dtype == torch.float64
    true = lengths(rounded.double() - z)
    assert (true > 1e-10).any()  # there is something to bound
    assert (true <= bound).all()
    assert (bound <= 1e-2).all()
    assert next(cell.parameters()).dtype == torch.float32


def test_rounding_is_allowed_for_at_the_equilibrium_itself() -> None:
    for name in ("OptEq relu", "Monotone relu", "StackedOptEq", "WideOptEq", "AffineOptEq"):
        cell, x = KINDS[name].make(0), KINDS[name].x(0)
        bound = error_bound(cell, x, equilibrium(cell, x)).bound
        assert (bound > 0).all()
        assert (bound < 1e-10).all()


# Injections that cancel, against 40 digits


def exact_matrix(tensor: Tensor) -> mp.matrix:
    tensor = tensor.detach()
    return mp.matrix((tensor if tensor.ndim == 2 else tensor[:, None]).tolist())


def layer_of(cell: Cell, x: Tensor):
    """z -> W' relu(W z + U x + b) of one OptEq layer with dense weights, or of a convolution of one pixel."""
    if isinstance(cell, OptEq):
        W, U = cell.W, cell.U
    elif isinstance(cell, ConvOptEq):
        W, U = cell.W[:, :, 0, 0], cell.U[:, :, 0, 0]
    else:
        W, U = cell.W2[:, :, 0, 0], cell.U2[:, :, 0, 0]
    W, U = exact_matrix(W), exact_matrix(U)
    if isinstance(cell, DepthwiseOptEq):
        W, U = (M * mp.diag(list(exact_matrix(d.flatten()))) for M, d in ((W, cell.W1), (U, cell.U1)))
    u = U * exact_matrix(x.flatten()) + exact_matrix(cell.b)
    return lambda z: W.T * (W * z + u).apply(lambda t: max(t, mp.mpf(0)))


def relu_of(cell: Cell, x: Tensor):
    """z -> relu(W z + u)."""
    x = exact_matrix(x.flatten())
    if isinstance(cell, GaussianDEQ):
        W, u = exact_matrix(cell.W), exact_matrix(cell.U) * x
    elif isinstance(cell, ScaledReLU):
        W, u = mp.mpf(cell.gamma) * exact_matrix(cell.A.T), (exact_matrix(cell.W.T) * x).apply(lambda t: max(t, mp.mpf(0)))
    else:
        A, B, U = (exact_matrix(p.flatten(1)) for p in (cell.A, cell.B, cell.U))
        W, u = (1 - mp.mpf(cell.m)) * mp.eye(A.rows) - A.T * A + B - B.T, U * x + exact_matrix(cell.b)
    return lambda z: (W * z + u).apply(lambda t: max(t, mp.mpf(0)))


def cancelled(cell: Cell) -> Cell:
    """With U x, or U x + b, of about 1e-6 times its terms for x = (1/3, 1/3, ...)."""
    for layer in cell.modules():
        pixel = next((getattr(layer, name) for name in ("U", "U2") if hasattr(layer, name)), None)
        pixel = layer.W.T if isinstance(layer, ScaledReLU) else pixel
        if pixel is not None:
            with torch.no_grad():
                pixel[:, 1] = -pixel[:, 0] * (1 + 1e-6 * torch.rand(pixel[:, 0].shape).double())
                pixel[:, :2].mul_(1e6)
    return cell


def pixelwise(kind: type[Cell], *sizes: int, scale: float, **options) -> Cell:
    """Kernels of one pixel, each layer a contraction."""
    cell = kind(*sizes, kernel_size=1, **options).double()
    with torch.no_grad():
        for name, p in cell.named_parameters():
            p.normal_().mul_(scale if name[0] in "WAB" else 1.0)
            if name[0] in "UW" and name[1:] == "1":
                p.fill_(1.0 if name[0] == "W" else 1.25)
    return cell


def biased() -> Monotone:
    """U x + b, with b that cancels U x."""
    cell = Monotone(3, 5, m=0.9).double()
    with torch.no_grad():
        cell.A.mul_(0.3)
        cell.B.mul_(0.3)
        cell.b.copy_(0.5 - 1e6 * (cell.U @ torch.tensor([1 / 3, 1 / 3, 0.3]).double()))
        cell.U.mul_(1e6)
    return cell


CANCELLING = {
    "gaussian": lambda: (cancelled(gaussian(0, factor=0.4)), relu_of),
    "scaled": lambda: (cancelled(ScaledReLU(3, 5, gamma=0.3).double()), relu_of),
    "monotone": lambda: (biased(), relu_of),
    "monotone conv": lambda: (cancelled(pixelwise(MonotoneConv, 3, 4, 1, scale=0.1, m=0.9)), relu_of),
    "layer": lambda: (cancelled(dense(0, factor=0.4)), layer_of),
    "conv": lambda: (cancelled(pixelwise(ConvOptEq, 3, 4, 4, scale=0.2)), layer_of),
    "depthwise": lambda: (cancelled(pixelwise(DepthwiseOptEq, 3, 3, 4, scale=0.2)), layer_of),
    "affine": lambda: (cancelled(AffineOptEq(dense(0, factor=0.4)).double()), lambda cell, x: layer_of(cell.cell, x)),
    "deep": lambda: (cancelled(deep(dense(0, factor=0.4), dense(1, factor=0.4))), composed),
    "stacked": lambda: (cancelled(StackedOptEq([dense(0, factor=0.4), dense(1, factor=0.4)])), composed),
    "wide": lambda: (cancelled(WideOptEq([dense(0, factor=0.4), dense(1, factor=0.4, mu=1.0, alpha=0.5)])), averaged),
    "wide, one matrix": lambda: (cancelled(WideOptEq([dense(0, factor=0.4), dense(1, factor=0.4)])), averaged),
}


def composed(cell: Cell, x: Tensor):
    first, second = (layer_of(layer, x) for layer in cell.layers)
    return lambda z: second(first(z))


def averaged(cell: Cell, x: Tensor):
    maps, alphas = [layer_of(layer, x) for layer in cell.layers], [mp.mpf(layer.alpha) for layer in cell.layers]
    return lambda z: sum((a * f(z) for a, f in zip(alphas[1:], maps[1:], strict=True)), alphas[0] * maps[0](z)) / sum(alphas)


@pytest.mark.parametrize("name", CANCELLING)
def test_rounding_of_an_injection_that_cancels_is_allowed_for(name: str) -> None:
    torch.manual_seed(0)
    cell, oracle = CANCELLING[name]()
    x = torch.tensor([[1 / 3, 1 / 3, 0.3]]).double()
    x = x[:, :, None, None] if "conv" in name or name == "depthwise" else x
    z = equilibrium(cell, x)
    with mp.workdps(40):
        f, point = oracle(cell, x), mp.zeros(z.reshape(-1, z.shape[-1] if z.ndim < 4 else z.numel()).shape[1], 1)
        for _ in range(150):
            point = f(point)
        last = exact_matrix((z[:, -1] if name == "stacked" else z).flatten())
        true = float(mp.norm(last - point))
    bound = float(error_bound(cell, x, z).bound)
    assert 1e-13 < true <= bound <= 1e4 * true  # without the allowance the bound would be some 1e-15


def ill_posed() -> dict[str, Cell]:
    torch.manual_seed(0)
    split, scaled = Monotone(3, 4, m=0.1).double(), ScaledReLU(3, 4, gamma=1.0).double()
    split.m = -0.1
    growing = dense(0, factor=1.1)
    relu = GaussianDEQ(3, 4).double()
    with torch.no_grad():
        relu.W.copy_(1.5 * torch.eye(4))
    bad = affine(0, orthogonal=False, base=dense(0, factor=1.0))
    return {
        "monotone, m < 0": split,
        "scaled, gamma ||A|| = 1": scaled,
        "one layer": growing,
        "edge": dense(0, factor=1.0),
        "gaussian": relu,
        "deep": deep(growing, dense(1, factor=1.0)),
        "stacked": StackedOptEq([growing, dense(1, factor=1.0)]),
        "affine": bad,
        "gradient step too long": deep(dense(0), regularizer=L2(), gamma=2.5),
    }


@pytest.mark.parametrize("name", ill_posed())
def test_where_the_condition_fails_the_bound_is_infinite(name: str) -> None:
    cell = ill_posed()[name]
    x = random_matrix(2, 3, seed=0)
    bound, evidence = error_bound(cell, x, cell.initial(x) + 1)
    assert bound.tolist() == [math.inf, math.inf]
    assert evidence == "bound"


def test_one_growing_layer_is_no_harm_where_the_product_contracts() -> None:
    cells = [dense(0, factor=1.1, activation="tanh"), dense(1, factor=0.5)]
    x = random_matrix(3, 3, seed=0)
    for cell in (deep(*cells), StackedOptEq(cells)):
        z = equilibrium(cell, x)
        moved = z + 0.1 * random_matrix(*z.shape, seed=1)
        bound = error_bound(cell, x, moved).bound
        assert bound.isfinite().all()
        assert (lengths(moved - z) <= bound).all()


@pytest.mark.parametrize("name", ["OptEq tanh", "Monotone tanh", "DeepOptEq 2", "ConvOptEq zeros"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_finite_get_infinity_and_leave_the_others_alone(name: str, bad: float) -> None:
    cell, x = KINDS[name].make(0), KINDS[name].x(0)
    z = cell.initial(x) + 0.5
    clean = error_bound(cell, x, z).bound
    x[(1, *[0] * (x.ndim - 1))] = bad
    z[(2, *[0] * (z.ndim - 1))] = bad
    bound = error_bound(cell, x, z).bound
    assert bound[1:3].tolist() == [math.inf, math.inf]
    assert torch.allclose(bound[[0, 3]], clean[[0, 3]], rtol=1e-12)


def test_an_empty_batch_has_empty_bounds() -> None:
    for name in ("OptEq relu", "Monotone relu", "DeepOptEq 2", "StackedOptEq"):
        cell, x = KINDS[name].make(0), KINDS[name].x(0)[:0]
        assert error_bound(cell, x, cell.initial(x)).bound.shape == (0,)


def test_a_norm_that_is_only_estimated_says_so() -> None:
    torch.manual_seed(0)
    cell, x = ActivationCell("tanh", 0.8, wrapped=True), random_matrix(3, 3, seed=0)
    z = equilibrium(cell, x)
    bound, evidence = error_bound(cell, x, z + 0.1)
    assert evidence == "estimate"
    assert (bound >= 0.1 * math.sqrt(6)).all()


def test_images_are_measured_at_their_own_size() -> None:
    """A circular kernel has a smaller norm on some sizes than on others: there the bound is the smaller."""
    cell, x = conv(0, padding="circular"), random_matrix(2, 2, 4, 3, seed=1)
    z = random_matrix(2, 2, 4, 3, seed=2)
    with torch.no_grad():
        r = lengths(cell.bind(x)(z) - z)
        everywhere = float(operator_norm(cell.operator()))
    exact = r / (1 - 0.8)  # conv() scales ||W||^2 to 0.8 at this size
    assert torch.allclose(error_bound(cell, x, z).bound, exact, rtol=1e-9)
    assert everywhere**2 > 0.8


@dataclass(frozen=True)
class Together(Regularizer):
    """R(Z) = |sum of the samples|^2 / (2 batch): 1-smooth, convex, and couples the batch."""

    couples_batch: ClassVar[bool] = True
    convex: ClassVar[bool] = True

    @property
    def smoothness(self) -> float:
        return 1.0

    def value(self, z: Tensor) -> Tensor:
        return z.sum(0).square().sum() / (2 * len(z))


def test_where_samples_are_coupled_the_residual_of_the_batch_bounds_each() -> None:
    """Sample 0 is exactly where f puts it, and yet not at its equilibrium, which the others move."""
    cell = deep(dense(0, activation="tanh"), regularizer=Together(), gamma=0.9)
    x = random_matrix(4, 3, seed=1)
    z = equilibrium(cell, x)
    moved = z.clone()
    moved[1:] += 0.5
    fn = cell.bind(x)
    with torch.no_grad():
        for _ in range(100):
            moved[0] = fn(moved)[0]
        alone = lengths(fn(moved) - moved)[0] / (1 - 0.8)
    true, bound = lengths(moved - z), error_bound(cell, x, moved).bound
    assert alone < 1e-12 < true[0]
    assert (true <= bound).all()
    assert torch.equal(bound, bound[:1].expand(4))


@dataclass(frozen=True)
class Bowl(Regularizer):
    """R(z) = smoothness z_0^2 / 2, convex or said not to be."""

    convex: bool = True  # type: ignore[misc]
    smoothness: float = 1.0  # type: ignore[assignment]

    def value(self, z: Tensor) -> Tensor:
        return self.smoothness * z[:, 0] ** 2 / 2


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (RegularizedStep(Bowl(True, 1.0), 0.5, "gradient"), 1.0),
        (RegularizedStep(Bowl(True, 6.0), 0.5, "gradient"), 2.0),
        (RegularizedStep(Bowl(False, 6.0), 0.5, "gradient"), 4.0),
        (RegularizedStep(L2(), 0.25, "gradient"), 0.75),
        (RegularizedStep(L2(), 1.75, "gradient"), 0.75),
        (RegularizedStep(L2(), 0.25, "prox"), 0.8),
        (RegularizedStep(L1(), 0.25, "prox"), 1.0),
    ],
    ids=str,
)
def test_the_step_of_a_regulariser_has_the_factor_of_its_kind(step: RegularizedStep, factor: float) -> None:
    assert 1 - float(rates(step).gap) == pytest.approx(factor, rel=1e-12)
    z, other = 3 * random_matrix(50, 2, seed=0), 3 * random_matrix(50, 2, seed=1)
    assert (lengths(step(z) - step(other)) <= factor * lengths(z - other) * (1 + 1e-12)).all()


def test_cells_without_a_factor_are_refused_with_the_remedy() -> None:
    x = random_matrix(2, 3, seed=0)
    unknown = {
        "FunctionMap": FunctionCell(lambda z, x: 0.5 * torch.cos(z) + x, (3,)),
        "Incay": deep(dense(0), regularizer=Incay()),
        "HSIC": deep(dense(0), regularizer=HSIC()),
        "L1": deep(dense(0), regularizer=L1()),
    }
    for word, cell in unknown.items():
        with pytest.raises(TypeError, match=rf"(?s)no contraction factor of {type(cell).__name__}.*{word}.*factor=c"):
            error_bound(cell, x, cell.initial(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_can_be_given(dtype: torch.dtype) -> None:
    shift = torch.linspace(0, 1, 3, dtype=dtype)  # captured: f works in one precision only
    cell = FunctionCell(lambda z, x: 0.5 * torch.cos(z) + x + shift, (3,))
    x = random_matrix(4, 3, seed=0).to(dtype)
    z = x
    for _ in range(100):  # to the last bit, nearly: then rounding is all that there is
        z = cell.bind(x)(z)
    exact = solve(lambda z: 0.5 * torch.cos(z) + x.double() + shift.double(), z.double(), Picard(), Stop(rtol=1e-15)).z
    for size in (0.3, 0.0):
        bound, evidence = error_bound(cell, x, z + size, factor=0.5)
        assert evidence == "bound"
        assert (lengths((z + size).double() - exact) <= bound).all()
        assert (bound <= 2 * 1.5 * size * 3**0.5 + 100 * torch.finfo(dtype).eps).all()
    bound = error_bound(cell, x, torch.full_like(z, math.nan), factor=0.5).bound
    assert bound.isinf().all()


def test_wrong_arguments_are_named() -> None:
    cell, x = dense(0), random_matrix(2, 3, seed=0)
    z = cell.initial(x)
    with pytest.raises(TypeError, match="'cell' parameter of error_bound must be a Cell"):
        error_bound(nn.Linear(3, 4), x, z)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'x' parameter"):
        error_bound(cell, [1.0], z)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'solution' parameter"):
        error_bound(cell, x, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'solution' parameter of error_bound must be of shape \[2, 4\]"):
        error_bound(cell, x, z[:, :2])
    for factor in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="'factor' parameter"):
            error_bound(cell, x, z, factor=factor)
    with torch.no_grad():
        cell.W[0, 0] = math.nan
    with pytest.raises(ValueError, match="'W' parameter of OptEq must be finite"):
        error_bound(cell, x, z)


# Through the readout


def classifier(seed: int, classes: int = 4) -> tuple[OptEq, nn.Linear, Tensor]:
    torch.manual_seed(seed)
    return dense(seed, activation="tanh"), nn.Linear(4, classes).double(), random_matrix(200, 3, seed=seed)


def test_certified_predictions_never_change_and_others_do() -> None:
    changed = certified = 0
    for seed in range(4):
        cell, head, x = classifier(seed)
        exact = head(equilibrium(cell, x)).argmax(1)
        for rtol in (0.5, 0.1, 1e-2):
            fn = cell.bind(x)
            z = solve(fn, 2 * random_matrix(200, 4, seed=seed), Picard(), Stop(rtol=rtol)).z
            found = certified_predictions(head, z, error_bound(cell, x, z).bound)
            assert torch.equal(found.prediction, head(z).argmax(1))
            differ = found.prediction != exact
            assert not (differ & found.certified).any()
            changed += int(differ.sum())
            certified += int(found.certified.sum())
            assert not found.certified.all()
    assert changed > 50
    assert certified > 500


@pytest.mark.parametrize("classes", [1, 2, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_the_reach_is_the_distance_to_the_nearest_other_class(classes: int, bias: bool) -> None:
    torch.manual_seed(classes)
    head = nn.Linear(6, classes, bias=bias).double()
    z = random_matrix(20, 6, seed=1)
    found = certified_predictions(head, z, torch.zeros(20))
    assert found.certified.all()
    W = head.weight.detach() if classes > 1 else torch.cat([torch.zeros(1, 6), head.weight.detach()])
    for i in range(20):
        moves = []
        for j in range(len(W)):
            across = W[j] - W[found.prediction[i]]
            if across.norm() > 0:
                moves.append(across / across.norm() * found.reach[i])
        inside = z[i] + 0.999 * torch.stack(moves)
        outside = z[i] + 1.001 * torch.stack(moves)
        same, other = (certified_predictions(head, p, torch.zeros(len(p))).prediction for p in (inside, outside))
        assert (same == found.prediction[i]).all()
        assert (other != found.prediction[i]).any()


def test_differences_of_rows_certify_more_than_rows_one_by_one() -> None:
    cell, head, x = classifier(1)
    with torch.no_grad():
        head.weight += 3  # a common part moves all logits together
    z = solve(cell.bind(x), cell.initial(x), Picard(), Stop(rtol=0.1)).z
    bound = error_bound(cell, x, z).bound
    logits = head(z).detach()
    top = logits.topk(2).values
    slack = bound * head.weight.detach().norm(dim=1).max()
    naive = top[:, 0] - top[:, 1] > 2 * slack
    ours = certified_predictions(head, z, bound).certified
    assert (ours | ~naive).all()
    assert ours.sum() > 3 * naive.sum() + 20


@pytest.mark.parametrize("cell", [gaussian(0), monotone(0)], ids=["gaussian", "monotone"])
def test_the_interval_of_a_readout_holds_the_true_output(cell: Cell) -> None:
    torch.manual_seed(1)
    model = Readout(cell)
    x = random_matrix(30, 3, seed=2)
    exact = equilibrium(cell, x) @ model.a.detach()
    for rtol in (0.3, 1e-3, 1e-14):
        z = solve(cell.bind(x), cell.initial(x), Newton(), Stop(rtol=rtol)).z
        low, high = certified_interval(model, z, error_bound(cell, x, z).bound)
        assert low.shape == (30,)
        assert ((low <= exact) & (exact <= high)).all()
        assert (low < high).all()


def test_the_interval_of_each_logit_holds_the_true_one_and_is_attained() -> None:
    _, head, _ = classifier(0)
    z = random_matrix(5, 4, seed=1)
    low, high = certified_interval(head, z, torch.full((5,), 0.25))
    W = head.weight.detach()
    for j in range(4):
        pushed = head(z + 0.25 * W[j] / W[j].norm()).detach()[:, j]
        assert (pushed <= high[:, j]).all()
        assert torch.allclose(pushed, high[:, j], rtol=1e-12)
    assert torch.allclose(low + high, 2 * head(z).detach(), rtol=1e-12)


def test_what_is_not_finite_certifies_nothing() -> None:
    head = nn.Linear(2, 3).double()
    with torch.no_grad():
        head.weight[1] = head.weight[0]  # two classes that no z tells apart
        head.bias.copy_(torch.tensor([1.0, 0.0, -9.0]))
    z = torch.tensor([[0.1, 0.2], [math.nan, 0.0], [0.1, 0.2]], dtype=torch.float64)
    bound = torch.tensor([0.01, 0.01, math.inf], dtype=torch.float64)
    found = certified_predictions(head, z, bound)
    assert found.certified.tolist() == [True, False, False]
    low, high = certified_interval(head, z, bound)
    assert low[1:].isinf().all()
    assert high[1:].isinf().all()
    with torch.no_grad():
        head.bias.zero_()  # a tie
    assert not certified_predictions(head, z, 0 * bound.nan_to_num(0, 0, 0)).certified[0]


def test_wrong_heads_are_named() -> None:
    head, z, bound = nn.Linear(4, 3), random_matrix(2, 4, seed=0), torch.zeros(2)
    with pytest.raises(TypeError, match=r"'head' parameter of certified_predictions must be an nn.Linear or a Readout"):
        certified_predictions(nn.ReLU(), z, bound)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'z' parameter of certified_interval .* 4 entries a sample"):
        certified_interval(head, z[:, :3], bound)
    with pytest.raises(ValueError, match=r"'bound' parameter .* of shape \[2\]"):
        certified_predictions(head, z, bound[:1])
    with pytest.raises(TypeError, match="'bound' parameter"):
        certified_predictions(head, z, 0.1)  # type: ignore[arg-type]
    for certify in (certified_predictions, certified_interval):
        with pytest.raises(ValueError, match=r"'bound' parameter of certified_.* must be >= 0.* Got -1.0"):
            certify(head, z, torch.tensor([0.5, -1.0]))


def test_a_bound_that_is_no_number_is_an_infinite_one() -> None:
    head, z, bound = nn.Linear(4, 3), random_matrix(2, 4, seed=0), torch.tensor([math.nan, 0.0])
    assert certified_predictions(head, z, bound).certified.tolist() == [False, True]
    low, high = certified_interval(head, z, bound)
    assert low[0].tolist() == [-math.inf] * 3
    assert high[0].tolist() == [math.inf] * 3


def test_the_layer_or_the_model_around_a_cell_is_as_good_as_the_cell() -> None:
    cell = gaussian(0)
    x = random_matrix(2, 3, seed=0)
    z = cell.initial(x) + 0.1
    expected = error_bound(cell, x, z)
    for around in (Equilibrium(cell), Readout(cell)):
        assert torch.equal(error_bound(around, x, z).bound, expected.bound)


def test_any_map_that_splits_is_covered() -> None:
    cell, x = image_split(1), random_matrix(3, 2, 4, 4, seed=0)
    z = random_matrix(3, 2, 4, 4, seed=1)
    fn = cell.bind(x)
    with torch.no_grad():
        e = fn(z) - z
        expected = lengths(e) + lengths(fn.W(e)) / cell.m
    bound, evidence = error_bound(cell, x, z)
    assert torch.allclose(bound, expected, rtol=1e-9)
    assert evidence == "bound"


def test_a_layer_of_another_kind_has_no_known_factor():
    with pytest.raises(UnknownFactorError, match="no Lipschitz constant of a CallableMap is known"):
        rates(CallableMap(torch.tanh))
