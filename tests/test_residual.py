"""Residual: what every cell satisfies, its formula, and how its initialisation decides whether the iterates settle."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import jacrev, jvp, vmap
from torch.nn.functional import conv2d

from cell_zoo import Entry, random_matrix
from conformance import residual, write_verify
from opteq import Cell, Equilibrium, Status, Stop, solve
from opteq.cells.residual import Residual
from opteq.solvers import Anderson, Picard
from test_cells import (
    CellConformance,
    IndependentCellConformance,
    ModuleConformance,
    equilibrium_of,
    exact_equilibrium,
    function_of,
    layer_of,
    relative_error,
)

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


def few_inputs(entry: Entry, count: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The equilibrium as a function of x and some parameters, as many as finite differences can afford."""
    function, parameters = function_of(layer_of(entry.make(), stop=Stop(rtol=1e-13, max_steps=500)))
    chosen = [0, len(parameters) // 2, len(parameters) - 1][:count]

    def of_few(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(chosen, values, strict=True))
        return function(x, *(given.get(i, p) for i, p in enumerate(parameters)))

    return of_few, [t.requires_grad_() for t in (entry.x(1), *(parameters[i].clone() for i in chosen))]


class DerivativeConformance:
    """Derivatives in every mode."""

    def test_gradients_of_x_and_of_every_parameter_are_the_dense_ones_to_1e_9(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x(2).requires_grad_()
        inputs = [x, *cell.parameters()]
        z = layer_of(cell, stop=Stop(rtol=1e-13, max_steps=500))(x)
        g = random_matrix(*z.shape, seed=4)
        found = torch.autograd.grad(z, inputs, g)
        fn = cell.bind(x)
        exact = exact_equilibrium(fn, z.detach())
        J = jacrev(fn.detach())(exact).reshape(z.numel(), z.numel())
        v = torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - J.T, g.flatten()).reshape(z.shape)
        wanted = torch.autograd.grad(fn(exact), inputs, v)
        assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-9
        assert all(b.norm() > 1e-9 for b in wanted)

    def test_gradcheck(self, entry: Entry) -> None:
        function, inputs = few_inputs(entry, 3)
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)

    def test_gradgradcheck(self, entry: Entry) -> None:
        function, inputs = few_inputs(entry, 1)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)

    def test_forward_mode_is_the_transpose_of_reverse_mode(self, entry: Entry) -> None:
        function, parameters = function_of(layer_of(entry.make()))
        inputs = (entry.x(), *parameters)
        tangents = tuple(random_matrix(*t.shape, seed=i) for i, t in enumerate(inputs))
        z, tangent = jvp(function, inputs, tangents)
        cotangent = random_matrix(*z.shape, seed=99)
        pulled = torch.func.vjp(function, *inputs)[1](cotangent)
        backward = sum((t * p).sum() for t, p in zip(tangents, pulled, strict=True))
        torch.testing.assert_close((cotangent * tangent).sum(), backward, rtol=1e-8, atol=1e-9)

    def test_vmap_and_jacrev_are_the_loop(self, entry: Entry) -> None:
        layer, xs = layer_of(entry.make()), torch.stack([entry.x(2, seed=i) for i in range(2)])
        torch.testing.assert_close(vmap(layer)(xs), torch.stack([layer(x) for x in xs]), rtol=1e-9, atol=1e-10)
        x, w = xs[0, :1], random_matrix(3, *entry.state_shape(), seed=5)
        rows = jacrev(lambda x: torch.einsum("kcij,cij->k", w, layer(x)[0]))(x)
        y = x.clone().requires_grad_()
        wanted = torch.stack([torch.autograd.grad(layer(y), y, v[None])[0] for v in w])
        torch.testing.assert_close(rows, wanted, rtol=1e-8, atol=1e-9)

    def test_an_ensemble_under_vmap_is_the_loop(self, entry: Entry) -> None:
        function, parameters = function_of(layer_of(entry.make()))
        others = [torch.stack([p, 0.9 * p]) for p in parameters]
        x = entry.x(2)
        found = vmap(function, in_dims=(None, *[0] * len(others)))(x, *others)
        wanted = torch.stack([function(x, *(p[i] for p in others)) for i in range(2)])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


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
        (lambda: Residual(8, 8, init="large"), ValueError, "'init' parameter of Residual must be 'small' or 'standard'"),
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
