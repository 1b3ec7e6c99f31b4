"""Images whose channels lie together in memory: the same numbers as others, in the order in which they were given."""

import pytest
import torch

from opteq import Equilibrium, Stop, solve
from opteq.batch import channels_together, laid_out, lined, norm, quick_images, taken, unlined
from opteq.cells import ConvOptEq, DeepOptEq, FunctionCell
from opteq.gradients import Implicit
from opteq.linear import CG, GMRES, LinearizedMap, Neumann
from opteq.solvers import Accelerated, Anderson, Broyden, Newton, Picard

LAST = torch.channels_last
TIGHT = Stop(rtol=1e-10, max_steps=500)


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def deep():
    torch.manual_seed(0)
    return DeepOptEq([ConvOptEq(3, 5, hidden, 3, alpha=0.8) for hidden in (4, 7)]).double()


def test_rows_are_those_of_memory_and_go_back():
    z = images(4, 3, 5, 2)
    last = z.to(memory_format=LAST)
    assert channels_together(last)
    assert not channels_together(z)
    assert lined(last).data_ptr() == last.data_ptr()
    assert torch.equal(unlined(lined(z, last), last), z)
    assert torch.equal(lined(z, last), lined(last))
    assert torch.equal(unlined(lined(last, z), z), z)
    assert torch.allclose(norm(last), norm(z), rtol=1e-14)
    assert torch.equal(laid_out(z, last), z)
    assert channels_together(laid_out(z, last))
    assert laid_out(last, z).is_contiguous()
    rows = torch.tensor([0, 3])
    assert channels_together(taken(last, rows))
    assert torch.equal(taken(last, rows), z[rows])


@pytest.mark.parametrize("shape", [(2, 1, 3, 3), (2, 3, 1, 1), (1, 3, 2, 2), (0, 3, 2, 2)])
def test_shapes_that_are_both_lie_in_one_order(shape):
    z = images(*shape)
    for a in (z, z.to(memory_format=LAST)):
        for b in (z, z.to(memory_format=LAST)):
            assert torch.equal(unlined(lined(a, b).contiguous(), b), z)


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton(), Accelerated()], ids=lambda s: type(s).__name__)
def test_a_solver_takes_the_same_steps_in_either_order(solver):
    cell, x = deep(), images(8, 3, 6, 6) * torch.linspace(0.01, 20, 8, dtype=torch.float64)[:, None, None, None]
    fn, z0 = cell.bind(x), torch.zeros(8, 5, 6, 6, dtype=torch.float64)
    plain, last = (solve(fn, start, solver, TIGHT) for start in (z0, z0.to(memory_format=LAST)))
    assert torch.equal(plain.steps, last.steps)
    assert bool(last.converged.all())
    assert torch.allclose(plain.z, last.z, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("solver", [CG(), GMRES(), GMRES(restart=3), Neumann()], ids=str)
def test_a_linear_solver_takes_the_same_steps_in_either_order(solver):
    torch.manual_seed(0)
    cell, x = ConvOptEq(3, 5, 4, 3, alpha=0.8).double(), images(8, 3, 6, 6)
    fn, z, g = cell.bind(x), images(8, 5, 6, 6), images(8, 5, 6, 6).flip(0)
    plain = solve(LinearizedMap(fn, True, z, g), torch.zeros_like(g), solver, TIGHT)
    z, g = (t.to(memory_format=LAST) for t in (z, g))
    last = solve(LinearizedMap(fn, True, z, g), torch.zeros_like(g), solver, TIGHT)
    assert torch.equal(plain.steps, last.steps)
    assert bool(last.converged.all())
    assert torch.allclose(plain.z, last.z, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_the_answer_and_its_gradient_are_laid_out_as_the_input_is(last):
    layer = Equilibrium(deep(), stop=TIGHT, gradient=Implicit(TIGHT))
    x = images(3, 3, 6, 6)
    x = (x.to(memory_format=LAST) if last else x).requires_grad_()
    z = layer(x)
    assert channels_together(z) == last
    assert z.is_contiguous() != last
    z.square().sum().backward()
    other = x.detach().contiguous().requires_grad_()
    layer(other).square().sum().backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_a_map_that_answers_in_the_other_order_is_solved_all_the_same():
    x = images(6, 3, 4, 4)
    f = FunctionCell(lambda z, x: (0.9 * z.roll(1, dims=1) + x).contiguous(), (3, 4, 4))
    found = Equilibrium(f, Anderson(), TIGHT).solve(x, x.to(memory_format=LAST))
    assert bool(found.converged.all())
    assert torch.allclose(found.z, 0.9 * found.z.roll(1, dims=1) + x, atol=1e-8)


def test_quick_images_are_the_same_images():
    x = images(2, 3, 4, 5)
    assert torch.equal(quick_images(x), x)
    assert channels_together(quick_images(x))
    assert torch.equal(quick_images(x[0]), x[0])
    assert torch.func.vmap(lambda one: quick_images(one[None])[0])(x).equal(x)
