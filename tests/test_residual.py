"""Residual: what every cell satisfies, its formula, and how its initialisation decides whether the iterates settle."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from cell_conformance import CellConformance, DerivativeConformance, IndependentCellConformance, ModuleConformance, equilibrium_of
from cell_zoo import Entry, random_matrix
from conformance import residual, write_verify
from opteq import Cell, Equilibrium, Status, Stop, solve
from opteq.cells.residual import Residual
from opteq.solvers import Anderson, Picard

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def image_entry(name: str, make: Callable[[], Cell], inputs: tuple[int, ...], state: tuple[int, ...]) -> Entry:
    return Entry(name, make, symmetric=False, image=True, inputs=inputs, state=state)


def with_uneven_norms(cell: Cell, seed: int) -> Cell:
    """The cell in float64 with gains that differ and shifts that are not 0, so that no parameter is idle."""
    cell = cell.double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in cell.modules():
            if isinstance(part, torch.nn.GroupNorm):
                part.weight.mul_(1 + 0.2 * torch.rand(part.weight.shape, generator=g, dtype=torch.float64))
                part.bias.add_(0.1 * torch.randn(part.bias.shape, generator=g, dtype=torch.float64))
    return cell


def block(seed: int, *sizes: int, **options) -> Residual:
    torch.manual_seed(seed)
    return with_uneven_norms(Residual(*sizes, **options), seed)


SMALL = image_entry("two groups", lambda: block(0, 2, 4, groups=2), (2, 2, 3), (2, 2, 3))
WIDE = image_entry("kernel 5, one group", lambda: block(1, 2, 3, 5, groups=1), (2, 2, 3), (2, 2, 3))


@pytest.mark.parametrize("entry", [SMALL, WIDE], ids=lambda entry: entry.name)
class TestResidual(CellConformance):
    pass


@pytest.mark.parametrize("entry", [SMALL], ids=lambda entry: entry.name)
class TestResidualModules(ModuleConformance, IndependentCellConformance, DerivativeConformance):
    pass


# The formula


def normalised(z: Tensor, groups: int, gain: Tensor, shift: Tensor) -> Tensor:
    rows = z.reshape(z.shape[0], groups, -1)
    rows = (rows - rows.mean(2, keepdim=True)) / (rows.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    return gain[:, None, None] * rows.reshape(z.shape) + shift[:, None, None]


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_f_is_equation_4_1(kernel_size):
    cell = block(3, 6, 9, kernel_size, groups=3)
    x, z = random_matrix(2, 6, 5, 4, seed=0), random_matrix(2, 6, 5, 4, seed=1)

    def norm(v: Tensor, part: torch.nn.GroupNorm) -> Tensor:
        return normalised(v, 3, part.weight, part.bias)

    def conv(v: Tensor, W: Tensor) -> Tensor:
        return conv2d(v, W, padding="same")

    inner = norm(conv(z, cell.W1).clamp(min=0), cell.norm1)
    wanted = norm((z + norm(x + conv(inner, cell.W2), cell.norm2)).clamp(min=0), cell.norm3)
    torch.testing.assert_close(cell.bind(x)(z), wanted, rtol=1e-12, atol=1e-12)
    assert cell.W1.shape == (9, 6, kernel_size, kernel_size)
    assert cell.W2.shape == (6, 9, kernel_size, kernel_size)


def test_the_state_has_the_wider_dtype_of_the_image_and_the_weights():
    for cell, x in (
        (block(0, 4, 4, groups=2), torch.ones(1, 4, 2, 2)),
        (Residual(4, 4, groups=2), torch.ones(1, 4, 2, 2).double()),
    ):
        assert cell.initial(x).dtype is Equilibrium(cell, on_failure="ignore")(x).dtype is torch.float64


def test_one_cell_takes_images_of_any_size():
    cell = block(0, 4, 4, groups=2)
    for size in ((4, 3), (7, 1), (2, 9)):
        x = random_matrix(2, 4, *size, seed=1)
        z = equilibrium_of(cell, x)
        assert z.shape == x.shape
        assert residual(cell.bind(x), z).max() <= 1e-11


# Figures 4.1 and 4.2


def residuals(cell: Residual, x: Tensor, solver: Picard | Anderson, steps: int) -> list[float]:
    """The mean of Eq. (4.2) after 0, 1, ..., `steps` steps."""
    found = solve(cell.bind(x), cell.initial(x), solver, Stop(rtol=0.0, max_steps=steps), record=True)
    return [float(r.mean()) for r in found.trace.residual]


def of_deviation(seed: int, deviation: float, *sizes: int) -> Residual:
    torch.manual_seed(seed)
    cell = Residual(*sizes)
    with torch.no_grad():
        cell.W1.normal_(std=deviation)
        cell.W2.normal_(std=deviation)
    return cell.double()


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=["picard", "anderson"])
@pytest.mark.parametrize("seed", [0, 1])
def test_small_weights_settle_and_standard_ones_do_not(seed, solver):
    x = random_matrix(8, 16, 8, 8, seed=seed)
    torch.manual_seed(seed)
    small = residuals(Residual(16, 32).double(), x, solver, 25)
    standard = residuals(Residual(16, 32, init="standard").double(), x, solver, 25)
    assert small[2] < 0.15 < 0.3 < standard[2]
    assert small[10] < 1e-2
    assert small[25] < 1e-3
    assert min(standard) > 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_a_variance_of_0_01_would_not_settle(seed):
    """N(0, 0.01) in the thesis can only mean a standard deviation of 0.01."""
    x = random_matrix(8, 16, 8, 8, seed=seed)
    for solver in (Picard(), Anderson()):
        assert min(residuals(of_deviation(seed, 0.1, 16, 32), x, solver, 25)) > 0.02
        assert residuals(of_deviation(seed, 0.01, 16, 32), x, solver, 25)[-1] < 1e-3


@pytest.mark.parametrize(("init", "deviation"), [("small", 0.01), ("standard", 1.0)])
def test_the_weights_are_drawn_as_init_says(init, deviation):
    torch.manual_seed(0)
    cell = Residual(32, 64, init=init)
    for W in (cell.W1.detach(), cell.W2.detach()):
        assert float(W.std()) == pytest.approx(deviation, rel=0.03)
        assert abs(float(W.mean())) < 0.03 * deviation
    for norm in (cell.norm1, cell.norm2, cell.norm3):
        assert norm.weight.unique().tolist() == [1.0]
        assert norm.bias.unique().tolist() == [0.0]


def test_the_scale_of_W1_does_not_matter():
    x = random_matrix(4, 16, 8, 8, seed=0)
    cell = of_deviation(0, 1.0, 16, 32)
    z = random_matrix(*x.shape, seed=1)
    before = cell.bind(x)(z)
    with torch.no_grad():
        cell.W1.mul_(0.1)
    torch.testing.assert_close(cell.bind(x)(z), before, rtol=1e-4, atol=1e-4)


@pytest.mark.verify
def test_the_residual_curves_of_figure_4_1():
    """At the size of the experiment, 48 channels and 64 inside, on images of 28 x 28."""
    x = random_matrix(16, 48, 28, 28, seed=0).float()
    curves = {
        f"{type(solver).__name__}, std {deviation:g}": residuals(of_deviation(0, deviation, 48, 64).float(), x, solver, 30)
        for solver in (Picard(), Anderson())
        for deviation in (0.01, 0.1, 1.0)
    }
    write_verify("residual_figure_4_1", {"curves": curves})
    for name, curve in curves.items():
        assert (curve[-1] < 1e-3) is name.endswith("0.01")


# Arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Residual(0, 8), ValueError, "'channels' parameter of Residual must be an integer >= 1"),
        (lambda: Residual(8, 2.0), TypeError, "'inner' parameter of Residual must be an integer >= 1"),
        (lambda: Residual(8, 8, 4), ValueError, "'kernel_size' parameter of Residual must be odd. Got 4"),
        (lambda: Residual(12, 8), ValueError, "'groups' parameter of Residual must be a divisor of channels, 12, and of inner, 8"),
        (lambda: Residual(8, 12), ValueError, "'groups' parameter of Residual must be a divisor of channels, 8, and of inner, 12"),
        (lambda: Residual(8, 8, groups=0), ValueError, "'groups' parameter of Residual must be an integer >= 1"),
        (lambda: Residual(8, 8, init="large"), ValueError, "'init' parameter of Residual must be one of 'small', 'standard'"),
    ],
)
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8)])
@pytest.mark.parametrize("batch", [1, 3])
def test_an_image_of_which_norms_leave_nothing_is_refused(sizes, batch):
    cell = Residual(*sizes)
    with pytest.raises(ValueError, match="'x' parameter of Residual must be larger, or the groups fewer"):
        Equilibrium(cell)(torch.ones(batch, sizes[0], 1, 1))
    with pytest.raises(ValueError, match="'x' parameter of Residual must be larger"):
        cell.bind(torch.ones(batch, sizes[0], 0, 3))
    found = Equilibrium(cell, on_failure="ignore").solve(torch.randn(batch, sizes[0], 1, 2))
    assert found.status in (Status.CONVERGED, Status.MAX_STEPS)
