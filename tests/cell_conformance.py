"""What every cell must satisfy, as classes that test modules parametrise with entries of a zoo."""

import functools
import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap

from cell_zoo import BATCH, Entry, random_matrix
from conformance import lengths, residual
from opteq import Cell, Equilibrium, Map, Solver, Status, Stop
from opteq.gradients import default_solver
from opteq.solvers import Anderson
from opteq.tree import Hole

TIGHT = Stop(rtol=1e-12, max_steps=2000)
MATES = Stop(rtol=1e-10, max_steps=2000)  # at which a sample is the same alone and among others, to 1e-12


def layer_of(cell: Cell, solver: Solver | None = None, stop: Stop = TIGHT, **options) -> Equilibrium:
    return Equilibrium(cell, solver, stop, **{"on_failure": "raise", **options})


def dense_jacobian(fn: Map, z: Tensor) -> Tensor:
    """df/dz of the whole batch, as a matrix."""
    return jacrev(fn.detach())(z.detach()).reshape(z.numel(), z.numel())


def exact_equilibrium(fn: Map, z: Tensor) -> Tensor:
    """z polished by dense Newton steps."""
    fn = fn.detach()
    for _ in range(2):
        J = dense_jacobian(fn, z)
        z = z + torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - J, (fn(z) - z).flatten()).reshape(z.shape)
    return z


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|a - b| / |b|, 0 where both vanish to rounding."""
    size = float(torch.linalg.vector_norm(wanted))
    error = float(torch.linalg.vector_norm(found - wanted))
    return error / size if size > 1e-12 else error


def assert_same(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Each sample within the tolerance, relative to its size; equal where that is 0."""
    error, size = lengths(found - wanted), lengths(wanted)
    worst = int((error - tolerance * size).argmax())
    assert (error <= tolerance * size).all(), f"sample {worst}: |a - b| = {error[worst]:.2e}, |b| = {size[worst]:.2e}"


def equilibrium_of(cell: Cell, x: Tensor, stop: Stop = TIGHT, solver: Solver | None = None) -> Tensor:
    with torch.no_grad():
        return layer_of(cell, solver, stop)(x)


def steady(cell: Cell, x: Tensor) -> Solver | None:
    """The default solver; where that is Anderson, with a memory shorter than these states of few numbers.

    n differences of n numbers are all but dependent: rounding then decides the path, and z varies as the residual allows.
    """
    return Anderson(memory=2) if default_solver(cell.bind(x)) == Anderson() else None


@functools.cache
def solved(entry: Entry) -> Tensor:
    """The equilibrium of an entry of the zoo, as made; to be read only."""
    return equilibrium_of(entry.make(), entry.x())


@functools.cache
def among_mates(entry: Entry) -> Tensor:
    """The same, to MATES by the steady solver."""
    cell, x = entry.make(), entry.x()
    return equilibrium_of(cell, x, MATES, steady(cell, x))


def function_of(layer: nn.Module) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """layer(x) as a function of x and its parameters; and its parameters."""
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    return function, [p.detach().clone() for p in layer.parameters()]


class CellConformance:
    """What every cell must satisfy: parametrised with entries of the zoo."""

    # The state and the equilibrium

    def test_the_state_begins_at_zeros_and_f_keeps_its_shape(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        z0 = cell.initial(x)
        assert z0.shape == (BATCH, *entry.state_shape())
        assert z0.dtype is torch.float64
        assert not z0.any()
        fn = cell.bind(x)
        assert isinstance(fn, Map)
        for z in (z0, random_matrix(*z0.shape, seed=2)):
            fz = fn(z)
            assert fz.shape == z.shape
            assert fz.dtype is torch.float64
            with torch.no_grad():
                torch.testing.assert_close(fn.begin(z), fz, rtol=1e-14, atol=1e-14)
                before, value = z.clone(), fn(z).clone()
                if fn.fresh:  # who has f(z) may write to it
                    fn(z).fill_(math.nan)
                assert torch.equal(z, before)
                assert torch.equal(fn(z), value)
        assert not torch.equal(fn(z0), z0)

    def test_every_solver_finds_the_same_equilibrium(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        fn = cell.bind(x)
        found = [layer_of(cell, solver, Stop(rtol=1e-11, max_steps=2000)).solve(x) for solver in entry.solvers]
        for solution in found:
            assert solution.status is Status.CONVERGED
            assert residual(fn, solution.z).max() <= 1e-10
        exact = exact_equilibrium(fn, found[0].z.detach())
        assert residual(fn, exact).max() <= 1e-13
        for solution in found:
            assert_same(solution.z, exact, 2e-9)

    # The closed forms

    def test_linearize_is_the_dense_jacobian(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        fn = cell.bind(x).detach()
        z, v = random_matrix(BATCH, *entry.state_shape(), seed=2), random_matrix(BATCH, *entry.state_shape(), seed=3)
        J, jacobian = dense_jacobian(fn, z), fn.linearize(z)
        assert relative_error(jacobian.jvp(v).flatten(), J @ v.flatten()) <= 1e-12
        assert relative_error(jacobian.vjp(v).flatten(), J.T @ v.flatten()) <= 1e-12
        assert fn.closed
        blocks = J.reshape(BATCH, z[0].numel(), BATCH, -1)
        apart = max(float(blocks[i, :, j].abs().max()) for i in range(BATCH) for j in range(BATCH) if i != j)
        assert (apart == 0) is fn.independent is not entry.coupled

    def test_symmetric_is_declared_exactly_where_the_jacobian_is(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        fn = cell.bind(x).detach()
        z = solved(entry)
        J = dense_jacobian(fn, z)
        asymmetry = float(torch.linalg.matrix_norm(J - J.T) / torch.linalg.matrix_norm(J))
        assert fn.symmetric is fn.linearize(z).symmetric is entry.symmetric
        assert asymmetry <= 1e-12 if entry.symmetric else asymmetry > 1e-4
        assert entry.symmetric or float((J - J.T).norm()) > 1e-3

    def test_the_map_holds_all_of_its_tensors(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        fn, z = cell.bind(x), random_matrix(BATCH, *entry.state_shape(), seed=2)
        leaves = fn.leaves()
        hollow = fn.emptied()
        assert all(isinstance(leaf.tensor, Hole) for leaf in hollow.leaves())
        assert [leaf.per_sample for leaf in hollow.leaves()] == [leaf.per_sample for leaf in leaves]
        assert any(leaf.per_sample for leaf in leaves)
        again = hollow.filled([leaf.tensor.clone() for leaf in leaves])
        assert torch.equal(again(z), fn(z))
        assert fn(z).requires_grad
        detached = fn.detach()
        assert torch.equal(detached(z), fn(z))
        assert not detached(z).requires_grad  # nothing but the leaves carries derivatives
        assert not detached.linearize(z).jvp(z).requires_grad
        assert not detached.linearize(z).vjp(z).requires_grad

    # Derivatives

    def test_gradients_are_those_of_the_implicit_function_theorem(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x().requires_grad_()
        inputs = {"x": x, **dict(cell.named_parameters())}
        z = layer_of(cell)(x)
        g = random_matrix(*z.shape, seed=4)
        found = torch.autograd.grad(z, list(inputs.values()), g, materialize_grads=True)
        fn = cell.bind(x)
        exact = exact_equilibrium(fn, z.detach())
        J = dense_jacobian(fn, exact)
        v = torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - J.T, g.flatten()).reshape(z.shape)
        wanted = torch.autograd.grad(fn(exact), list(inputs.values()), v, materialize_grads=True)
        errors = {name: relative_error(a, b) for name, a, b in zip(inputs, found, wanted, strict=True)}
        worst = max(errors, key=errors.__getitem__)
        print(f"gradient error {errors[worst]:.1e} in {worst} of {entry.name}")
        assert errors[worst] < 1e-8
        assert (wanted[0] != 0).any()


class ModuleConformance:
    """A cell is a module like any other."""

    def test_state_dict_and_deepcopy(self, entry: Entry) -> None:
        cell, other, x = entry.make(), entry.make(), entry.x()
        z = random_matrix(BATCH, *entry.state_shape(), seed=2)
        wanted = cell.bind(x)(z)
        twin = deepcopy(cell)
        assert torch.equal(twin.bind(x)(z), wanted)
        with torch.no_grad():
            for p in (*other.parameters(), *twin.parameters()):
                p.mul_(0.5).add_(0.01)
        assert not torch.allclose(other.bind(x)(z), wanted, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(twin.bind(x)(z), wanted, rtol=1e-3, atol=1e-3)
        assert torch.equal(cell.bind(x)(z), wanted)  # the copy shares nothing
        assert not other.load_state_dict(cell.state_dict()).missing_keys
        assert torch.equal(other.bind(x)(z), wanted)
        assert torch.equal(equilibrium_of(other, x), solved(entry))

    def test_single_precision(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        wanted = solved(entry)
        cell = cell.float()
        layer = layer_of(cell, stop=Stop(rtol=1e-5, max_steps=500))
        z = layer(x.float())
        assert z.dtype is torch.float32
        assert_same(z, wanted, 1e-3)
        z.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in cell.parameters())
        assert cell.initial(x).dtype is torch.float64  # promoted
        mixed = layer(x)
        assert mixed.dtype is torch.float64
        assert_same(mixed, wanted, 1e-3)

    @pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # said once a process; its own test below
    def test_repr_and_modes(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        layer = layer_of(cell)
        assert f"{type(cell).__name__}(" in repr(cell)
        assert f"{type(cell).__name__}(" in repr(layer)
        train, evaluated = layer.train()(x), layer.eval()(x)
        assert torch.equal(train, evaluated)
        with torch.inference_mode():
            assert_same(layer(x), train, 1e-11)

    def test_batches_of_one_and_none(self, entry: Entry) -> None:
        cell = entry.make()
        x = entry.x(1)
        assert residual(cell.bind(x), equilibrium_of(cell, x)).max() <= 1e-11
        x = entry.x(0).requires_grad_()
        z = layer_of(cell)(x)
        assert z.shape == (0, *entry.state_shape())
        z.sum().backward()
        assert x.grad.shape == x.shape
        assert all(p.grad is None or not p.grad.any() for p in cell.parameters())

    def test_it_works_in_sequential(self, entry: Entry) -> None:
        torch.manual_seed(0)
        cell = entry.make()
        head = nn.Linear(math.prod(entry.state_shape()), 1).double()
        model = nn.Sequential(layer_of(cell), nn.Flatten(), head)
        x = entry.x()
        wanted = head(solved(entry).flatten(1))
        out = model(x)
        torch.testing.assert_close(out, wanted)
        before = out.square().mean().item()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        out.square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        assert model(x).square().mean().item() < before

    def test_inputs_of_another_shape_are_refused(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        layer = layer_of(cell)
        for wrong in (x[:, :1], torch.cat([x, x], 1), x[0], x[None], x.flatten(1)[:, :, None], x.flatten()):
            with pytest.raises(ValueError, match=r"The 'x' parameter of \w+ must be"):
                layer(wrong)
            with pytest.raises(ValueError, match=r"The 'x' parameter of \w+ must be"):
                cell.bind(wrong)


class IndependentCellConformance:
    """What every cell that acts on each sample alone must satisfy."""

    def test_select_is_the_map_of_these_samples(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        fn, z, rows = cell.bind(x), random_matrix(BATCH, *entry.state_shape(), seed=2), torch.tensor([2, 0])
        some = fn.select(rows)(z[rows])
        torch.testing.assert_close(some, cell.bind(x[rows])(z[rows]), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(some, fn(z)[rows], rtol=1e-13, atol=1e-13)

    def test_a_sample_does_not_depend_on_its_batch_mates(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        solver, among = steady(cell, x), among_mates(entry)
        for i in (0, 3):
            assert_same(among[i : i + 1], equilibrium_of(cell, x[i : i + 1], MATES, solver), 1e-12)
        other = x.clone()
        other[1:] = 10 * entry.x(BATCH - 1, seed=8)
        assert_same(among[:1], equilibrium_of(cell, other, MATES, solver)[:1], 1e-12)

    def test_nonfinite_samples_are_set_aside(self, entry: Entry) -> None:
        cell, x = entry.make(), entry.x()
        spoilt, rest = x.clone(), [1, 3]
        spoilt[2].view(-1)[0] = math.nan
        spoilt[0].view(-1)[-1] = math.inf
        solver = steady(cell, x)
        solution = layer_of(cell, solver, MATES, on_failure="ignore").solve(spoilt)
        assert [s is Status.NONFINITE for s in solution.statuses] == [True, False, True, False]
        assert solution.converged[rest].all()
        assert solution.z.isfinite().all()
        assert_same(solution.z[rest], among_mates(entry)[rest], 1e-12)
        found = torch.autograd.grad(solution.z.sum(), list(cell.parameters()), materialize_grads=True)
        wanted = torch.autograd.grad(layer_of(cell, solver, MATES)(x[rest]).sum(), list(cell.parameters()), materialize_grads=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def few_inputs(entry: Entry, count: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The equilibrium as a function of x and some parameters, as many as finite differences can afford."""
    function, parameters = function_of(layer_of(entry.make(), stop=Stop(rtol=1e-13, max_steps=500)))
    chosen = [0, len(parameters) // 2, len(parameters) - 1][:count]

    def of_few(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(chosen, values, strict=True))
        return function(x, *(given.get(i, p) for i, p in enumerate(parameters)))

    return of_few, [t.requires_grad_() for t in (entry.x(1), *(parameters[i].clone() for i in chosen))]


def check_forward_mode(entry: Entry) -> None:
    """Forward mode is the transpose of reverse mode."""
    function, parameters = function_of(layer_of(entry.make()))
    inputs = (entry.x(), *parameters)
    tangents = tuple(random_matrix(*t.shape, seed=i) for i, t in enumerate(inputs))
    z, tangent = jvp(function, inputs, tangents)
    cotangent = random_matrix(*z.shape, seed=99)
    pulled = torch.func.vjp(function, *inputs)[1](cotangent)
    forward, backward = (cotangent * tangent).sum(), sum((t * p).sum() for t, p in zip(tangents, pulled, strict=True))
    torch.testing.assert_close(forward, backward, rtol=1e-8, atol=1e-9)


def check_ensemble(entry: Entry) -> None:
    """Mapping over weights is the loop over them."""
    function, parameters = function_of(layer_of(entry.make()))
    others = [torch.stack([p, 0.9 * p]) for p in parameters]
    x = entry.x(2)
    found = vmap(function, in_dims=(None, *[0] * len(others)))(x, *others)
    wanted = torch.stack([function(x, *(p[i] for p in others)) for i in range(2)])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


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
        check_forward_mode(entry)

    def test_vmap_and_jacrev_are_the_loop(self, entry: Entry) -> None:
        layer, xs = layer_of(entry.make()), torch.stack([entry.x(2, seed=i) for i in range(2)])
        torch.testing.assert_close(vmap(layer)(xs), torch.stack([layer(x) for x in xs]), rtol=1e-9, atol=1e-10)
        x, w = xs[0, :1], random_matrix(3, *entry.state_shape(), seed=5)
        rows = jacrev(lambda x: torch.einsum("kcij,cij->k", w, layer(x)[0]))(x)
        y = x.clone().requires_grad_()
        wanted = torch.stack([torch.autograd.grad(layer(y), y, v[None])[0] for v in w])
        torch.testing.assert_close(rows, wanted, rtol=1e-8, atol=1e-9)

    def test_an_ensemble_under_vmap_is_the_loop(self, entry: Entry) -> None:
        check_ensemble(entry)
