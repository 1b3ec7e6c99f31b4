"""The derivatives of an equilibrium are those of the implicit function theorem, and `record()` shows every solve behind them."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from cell_conformance import function_of
from opteq import Equilibrium, Map, Solution, Status, Stop, record
from opteq.cells import FunctionCell, OptEq
from opteq.equilibrium import observe
from opteq.gradients import Implicit, Unrolled
from opteq.linear import CG, GMRES, GMRESState, Neumann
from opteq.solvers import Anderson, Broyden, Newton, Picard
from problems import FEATURES, INPUTS, SOLVABLE, Affine, Problem, with_norm, zoo

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

TIGHT = Stop(rtol=1e-12, max_steps=2000)


def tight(cell, **options) -> Equilibrium:
    return Equilibrium(cell, **{"stop": TIGHT, "on_failure": "raise", **options})


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative_error(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The largest |a - b| / |b| of a list of tensors, NaN if one is NaN."""
    pairs = list(zip(found, wanted, strict=True))
    return torch.stack([torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b) for a, b in pairs]).max().item()


def dense_gradient(f: Callable[[Tensor, Tensor], Tensor], z: Tensor, x: Tensor, inputs: Sequence[Tensor], g: Tensor):
    """(df/dinput)' (I - J')^-1 g with J dense, sample by sample."""
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    v = torch.stack(
        [
            torch.linalg.solve(
                (eye - torch.autograd.functional.jacobian(lambda a, s=s: f(a[None], x[s : s + 1].detach())[0], z[s])).T, g[s]
            )
            for s in range(z.shape[0])
        ]
    )
    return torch.autograd.grad(f(z.detach(), x), inputs, v)


def small_tanh(seed: int = 0) -> tuple[Affine, Tensor]:
    """tanh(W z + U x) with 2 features and 2 inputs, and a batch of 2."""
    return Affine(with_norm(randn(2, 2, seed=seed), 0.7), randn(2, 2, seed=seed + 1), torch.tanh), randn(2, 2, seed=seed + 2)


def small_opteq(activation: str = "tanh", seed: int = 0, **options) -> tuple[OptEq, Tensor]:
    torch.manual_seed(seed)
    cell = OptEq(2, 2, 3, activation=activation, **options).double()
    with torch.no_grad():
        cell.W.copy_(with_norm(cell.W, 0.8))
    return cell, randn(2, 2, seed=seed + 1)


def as_function(layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The layer as a function of x and its parameters, and its parameters, which may be differentiated."""
    function, values = function_of(layer)
    return function, tuple(value.requires_grad_() for value in values)


def unrolled_tanh(x: Tensor, W: Tensor, U: Tensor, steps: int = 120) -> Tensor:
    z = x.new_zeros(x.shape[0], W.shape[0])
    for _ in range(steps):
        z = torch.tanh(z @ W.T + x @ U.T)
    return z


def captured_tanh(x: Tensor, W: Tensor, U: Tensor, **options) -> Tensor:
    return tight(FunctionCell(lambda z, x: torch.tanh(z @ W.T + x @ U.T), (W.shape[0],)), **options)(x)


def module_cell(problem: Problem) -> FunctionCell:
    return FunctionCell(problem.f, problem.state_shape)


def lambda_cell(problem: Problem) -> FunctionCell:
    return FunctionCell(lambda z, x: problem.f(z, x), problem.state_shape)


# First derivatives against dense linear algebra


@pytest.mark.parametrize("make", [module_cell, lambda_cell])
@pytest.mark.parametrize("name", SOLVABLE)
def test_gradient_is_that_of_the_implicit_function_theorem(name, make):
    problem = zoo()[name]
    x = problem.x.clone().requires_grad_()
    inputs = [x, *problem.f.parameters()]
    z = tight(make(problem))(x)
    exact = problem.exact()
    g = randn(*z.shape, seed=7)
    assert relative_error([z], [exact]) < 1e-9
    assert relative_error(torch.autograd.grad(z, inputs, g), dense_gradient(problem.f, exact, x, inputs, g)) < 1e-8


@pytest.mark.parametrize("mu", [1.0, 2.0])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "sigmoid", "identity"])
def test_gradient_of_opteq_is_that_of_the_implicit_function_theorem(activation, alpha, mu):
    torch.manual_seed(0)
    cell = OptEq(INPUTS, FEATURES, 12, activation=activation, alpha=alpha, mu=mu).double()
    sigma = {"leaky_relu": torch.nn.functional.leaky_relu, "identity": lambda a: a}.get(activation) or getattr(torch, activation)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return alpha / mu * sigma(z @ cell.W.T + x @ cell.U.T + cell.b) @ cell.W + (1 - alpha) * z

    with torch.no_grad():
        cell.W.copy_(with_norm(cell.W, 0.9))
    x = randn(4, INPUTS).requires_grad_()
    inputs = [x, *cell.parameters()]
    exact = Problem("opteq", f, x).exact()
    z = tight(cell)(x)
    g = randn(*z.shape, seed=7)
    assert relative_error([z], [exact]) < 1e-9
    assert relative_error(torch.autograd.grad(z, inputs, g), dense_gradient(f, exact, x, inputs, g)) < 1e-8


@pytest.mark.parametrize("linear", [CG(), GMRES(), GMRES(restart=3), Neumann(), Anderson(), Picard()])
def test_every_linear_solver_gives_the_same_gradient_where_the_jacobian_is_symmetric(linear):
    cell, x = small_opteq("tanh")
    wanted, found = (
        torch.autograd.grad(tight(cell, gradient=Implicit(linear=method))(x).square().sum(), list(cell.parameters()))
        for method in (None, linear)
    )
    assert relative_error(found, wanted) < 1e-10


@pytest.mark.parametrize("linear", [GMRES(), GMRES(restart=2), Neumann(), Anderson(), Broyden()])
@pytest.mark.parametrize("name", ["rotation 0.9", "tanh", "relu"])
def test_every_linear_solver_gives_the_same_gradient_where_the_jacobian_is_not_symmetric(name, linear):
    problem = zoo()[name]
    wanted, found = (
        torch.autograd.grad(tight(module_cell(problem), gradient=gradient)(problem.x).square().sum(), list(problem.f.parameters()))
        for gradient in (Implicit(), Implicit(Stop(rtol=1e-12, max_steps=1000), linear))
    )
    assert relative_error(found, wanted) < 1e-9


@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.5), Anderson(), Broyden(), Newton()])
def test_the_gradient_does_not_depend_on_the_forward_solver(solver):
    problem = zoo()["tanh"]
    wanted, found = (
        torch.autograd.grad(tight(module_cell(problem), solver=method)(problem.x).square().sum(), list(problem.f.parameters()))
        for method in (None, solver)
    )
    assert relative_error(found, wanted) < 1e-9


@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "sigmoid", "identity"])
def test_closed_form_linearisation_of_opteq_equals_autograd_and_is_symmetric(activation, alpha):
    cell, x = small_opteq(activation, alpha=alpha, mu=2.0)
    fn, z = cell.bind(x).detach(), randn(2, 2, seed=5)
    basis = torch.eye(2, dtype=torch.float64)
    closed, default = fn.linearize(z), Map.linearize(fn, z)

    def dense(product: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack([product(e.expand(2, 2).contiguous()) for e in basis], dim=2)

    J = dense(closed.jvp)
    assert closed.symmetric
    assert default.symmetric
    torch.testing.assert_close(J, J.mT, rtol=0, atol=1e-15)
    for other in (closed.vjp, default.jvp, default.vjp):
        torch.testing.assert_close(dense(other), J, rtol=0, atol=1e-15)


# Finite differences, first and second order


@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_opteq_passes_gradcheck_and_gradgradcheck(alpha):
    cell, x = small_opteq("tanh", alpha=alpha)
    function, parameters = as_function(tight(cell))
    inputs = (x.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_module_cell_passes_gradcheck_and_gradgradcheck():
    f, x = small_tanh()
    function, parameters = as_function(tight(FunctionCell(f, (2,))))
    inputs = (x.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_captured_tensors_pass_gradcheck_and_gradgradcheck():
    f, x = small_tanh()
    inputs = tuple(t.detach().clone().requires_grad_() for t in (x, f.W, f.U))
    assert torch.autograd.gradcheck(captured_tanh, inputs)
    assert torch.autograd.gradgradcheck(captured_tanh, inputs, fast_mode=True)


def smooth_relu_point(make: Callable[[int], tuple[Affine | OptEq, Tensor]]) -> tuple[Affine | OptEq, Tensor]:
    """The first seed whose pre-activations at the equilibrium are all at least 1e-3 away from the kink."""
    for seed in range(100):
        part, x = make(seed)
        z = tight(part if isinstance(part, OptEq) else FunctionCell(part, (2,)))(x)
        bias = part.b if isinstance(part, OptEq) else 0
        if (z @ part.W.T + x @ part.U.T + bias).abs().min() > 1e-3:
            return part, x
    raise AssertionError("no seed found")


def small_relu(seed: int) -> tuple[Affine, Tensor]:
    f, x = small_tanh(seed)
    f.sigma = torch.relu
    return f, x


@pytest.mark.parametrize("make", [small_relu, lambda seed: small_opteq("relu", seed)])
def test_relu_passes_gradcheck_and_gradgradcheck_away_from_its_kinks(make):
    part, x = smooth_relu_point(make)
    function, parameters = as_function(tight(part if isinstance(part, OptEq) else FunctionCell(part, (2,))))
    inputs = (x.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def penalised(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
    """A loss with a gradient penalty: |z|^2 + |d sum(z) / dx|^2."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    z = function(x, *parameters)
    (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return z.square().sum() + slope.square().sum()


@pytest.mark.parametrize("captured", [False, True])
def test_gradient_penalty_has_the_gradient_of_the_unrolled_iteration(captured):
    f, x = small_tanh()
    function, parameters = as_function(tight(FunctionCell(f, (2,))))
    function = captured_tanh if captured else function
    inputs = (x.requires_grad_(), *parameters)
    found = torch.autograd.grad(penalised(function, *inputs), inputs)
    wanted = torch.autograd.grad(penalised(unrolled_tanh, *inputs), inputs)
    assert relative_error(found, wanted) < 1e-9


def test_gradient_penalty_of_opteq_has_the_gradient_of_finite_differences():
    cell, x = small_opteq("tanh")
    function, parameters = as_function(tight(cell))
    assert torch.autograd.gradcheck(lambda *inputs: penalised(function, *inputs), (x.requires_grad_(), *parameters))


# Higher orders


def third(loss: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """A third derivative, by three reverse passes."""
    return grad(lambda b: grad(lambda a: grad(loss)(a).square().sum())(b).sum())(point)


def cubes(function: Callable[..., Tensor], *inputs: Tensor, wrt: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """sum z^3 as a function of one input, and that input."""

    def loss(value: Tensor) -> Tensor:
        return function(*inputs[:wrt], value, *inputs[wrt + 1 :]).pow(3).sum()

    return loss, inputs[wrt]


@pytest.mark.parametrize("wrt", [0, 1, 2])
def test_third_derivatives_through_operands_are_exact(wrt):
    f, x = small_tanh()
    function, _ = as_function(tight(FunctionCell(f, (2,))))
    inputs = (x, f.W.detach(), f.U.detach())
    found, wanted = third(*cubes(function, *inputs, wrt=wrt)), third(*cubes(unrolled_tanh, *inputs, wrt=wrt))
    assert relative_error([found], [wanted]) < 1e-9


def test_third_derivatives_of_opteq_are_exact():
    cell, x = small_opteq("tanh", alpha=0.4)

    def unrolled(x: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Tensor:
        z = x.new_zeros(x.shape[0], W.shape[1])
        for _ in range(150):
            z = torch.tanh(z @ W.T + x @ U.T + b) @ W
        return z

    function, _ = as_function(tight(cell))
    inputs = (x, *(p.detach() for p in cell.parameters()))
    found, wanted = third(*cubes(function, *inputs, wrt=1)), third(*cubes(unrolled, *inputs, wrt=1))
    assert relative_error([found], [wanted]) < 1e-9


def test_second_derivatives_through_captured_tensors_are_exact():
    f, x = small_tanh()
    inputs = (x, f.W.detach(), f.U.detach())

    def second(loss: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
        return grad(lambda a: grad(loss)(a).square().sum())(point)

    found, wanted = second(*cubes(captured_tanh, *inputs, wrt=1)), second(*cubes(unrolled_tanh, *inputs, wrt=1))
    assert relative_error([found], [wanted]) < 1e-9


@pytest.mark.parametrize("wrt", [0, 1, 2])
def test_third_derivatives_through_captured_tensors_are_refused(wrt):
    f, x = small_tanh()
    inputs = tuple(t.detach().clone().requires_grad_() for t in (x, f.W, f.U))
    first = torch.autograd.grad(captured_tanh(*inputs).pow(3).sum(), inputs[wrt], create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), inputs[wrt], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="up to the second order only") as failure:
        torch.autograd.grad(second.sum(), inputs[wrt])
    assert_names_the_remedies(failure.value)


@pytest.mark.parametrize("wrt", [1, 2])
def test_third_derivatives_through_captured_tensors_are_refused_by_torch_func_too(wrt):
    f, x = small_tanh()
    inputs = (x, f.W.detach(), f.U.detach())
    with pytest.raises(RuntimeError, match="up to the second order only") as failure:
        third(*cubes(captured_tanh, *inputs, wrt=wrt))
    assert_names_the_remedies(failure.value)


# What cannot be seen is refused, not guessed


def assert_names_the_remedies(error: BaseException) -> None:
    for remedy in ("Pass it through x", "an nn.Module that owns it", "a Cell whose Map has it as a field"):
        assert remedy in str(error)


def sum_captured(W: Tensor, x: Tensor, U: Tensor) -> Tensor:
    return captured_tanh(x, W, U).sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, W: vmap(f)(torch.stack([W, 0.5 * W])),
        lambda f, W: vmap(grad(f))(torch.stack([W, 0.5 * W])),
        lambda f, W: grad(lambda a: vmap(f)(torch.stack([a, 0.5 * a])).sum())(W),
    ],
)
def test_vmap_over_captured_tensors_is_refused(transform):
    f, x = small_tanh()
    with pytest.raises(RuntimeError, match="captures a tensor") as failure:
        transform(lambda W: sum_captured(W, x, f.U.detach()), f.W.detach())
    assert_names_the_remedies(failure.value)


def test_vmap_over_x_with_captured_tensors_that_have_derivatives_is_refused():
    f, x = small_tanh()
    with pytest.raises(RuntimeError, match="captures a tensor") as failure:
        vmap(lambda x: captured_tanh(x, f.W, f.U))(torch.stack([x, 2 * x]))
    assert_names_the_remedies(failure.value)


def test_vmap_over_x_with_captured_constants_is_right():
    f, x = small_tanh()
    W, U, xs = f.W.detach(), f.U.detach(), torch.stack([x, 2 * x, -x])
    found = vmap(lambda x: captured_tanh(x, W, U))(xs)
    torch.testing.assert_close(found, torch.stack([unrolled_tanh(x, W, U) for x in xs]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, W: jvp(f, (W,), (torch.ones_like(W),)),
        lambda f, W: jacfwd(f)(W),
        lambda f, W: jacfwd(jacrev(f))(W),
    ],
)
def test_forward_mode_over_captured_tensors_is_refused(transform):
    f, x = small_tanh()
    with pytest.raises(RuntimeError, match="captures a tensor") as failure:
        transform(lambda W: sum_captured(W, x, f.U.detach()), f.W.detach())
    assert_names_the_remedies(failure.value)


def test_dual_numbers_in_captured_tensors_are_refused():
    f, x = small_tanh()
    W, U = f.W.detach(), f.U.detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(W, torch.ones_like(W))
        with pytest.raises(RuntimeError, match="forward mode cannot follow f") as failure:
            captured_tanh(x, dual, U)
    assert_names_the_remedies(failure.value)


def test_jacrev_over_captured_tensors_is_refused():
    f, x = small_tanh()
    with pytest.raises(RuntimeError, match="captures a tensor") as failure:
        jacrev(lambda W: captured_tanh(x, W, f.U.detach()))(f.W.detach())
    assert_names_the_remedies(failure.value)


# The value


@pytest.mark.parametrize("make", [module_cell, lambda_cell])
@pytest.mark.parametrize("name", SOLVABLE)
def test_the_value_is_the_same_to_the_bit_with_and_without_gradients(name, make):
    problem = zoo()[name]
    layer = Equilibrium(make(problem), stop=Stop(rtol=1e-6, max_steps=1000), on_failure="raise")
    values = []
    for training in (True, False):
        layer.train(training)
        values.append(layer(problem.x).detach())
        values.append(layer(problem.x.clone().requires_grad_()).detach())
        with torch.no_grad():
            values.append(layer(problem.x))
        with torch.inference_mode():
            values.append(layer(problem.x).clone())
    assert all(torch.equal(z, values[0]) for z in values)


def test_the_value_of_opteq_is_the_same_to_the_bit_with_and_without_gradients():
    cell, x = small_opteq("relu")
    layer = Equilibrium(cell, on_failure="raise")
    with_graph = layer(x)
    assert with_graph.requires_grad
    assert torch.equal(with_graph.detach(), layer.eval()(x).detach())
    with torch.no_grad():
        without = layer(x)
    assert not without.requires_grad
    assert torch.equal(with_graph.detach(), without)


def test_solution_carries_derivatives_in_z_only():
    cell, x = small_opteq("tanh")
    solution = tight(cell).solve(x.requires_grad_())
    assert solution.z.requires_grad
    assert not solution.residual.requires_grad
    assert solution.status is Status.CONVERGED


# record()


def test_record_collects_forward_and_backward_solves_with_their_traces():
    problem = zoo()["tanh"]
    layer = tight(module_cell(problem))
    with record() as log:
        z = layer(problem.x)
        assert len(log) == 1
        z.sum().backward()
    forward, backward = log
    for solution in (forward, backward):
        assert solution.status is Status.CONVERGED
        assert solution.trace is not None
        for sample in range(problem.x.shape[0]):
            seen = solution.trace.of(sample)
            rounding = 1e-13 if solution is backward else 0.0  # measured by the pass that gives the gradients
            assert float(seen[-1]) == pytest.approx(float(solution.residual[sample]), rel=0, abs=rounding)
    assert torch.equal(forward.z, z.detach())
    assert all(len(forward.trace.of(i)) == forward.steps[i] + 1 for i in range(problem.x.shape[0]))


def test_record_collects_every_derivative_solve_in_turn():
    cell, x = small_opteq("tanh")
    layer = tight(cell)
    with record() as log:
        z = layer(x.requires_grad_())
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        assert len(log) == 2
        slope.square().sum().backward()
    assert len(log) > 3  # the second backward pass solves the adjoints of both
    with record() as log:
        jvp(layer, (x.detach(),), (torch.ones_like(x),))
    assert len(log) == 2


def test_a_backward_pass_in_its_own_record_is_seen_there():
    cell, x = small_opteq("tanh")
    z = tight(cell)(x)
    with record() as log:
        z.sum().backward()
    assert len(log) == 1
    assert log[0].z.shape == z.shape


def test_nested_records_each_collect_what_is_solved_inside_them():
    cell, x = small_opteq("tanh")
    layer = tight(cell)
    with record() as outer:
        layer(x)
        with record() as inner:
            z = layer(x)
        assert len(inner) == 1
        assert len(outer) == 2
        assert outer[1] is inner[0]
        z.sum().backward()
    assert len(inner) == 1
    assert len(outer) == 3


def test_a_closed_log_does_not_grow():
    cell, x = small_opteq("tanh")
    layer = tight(cell)
    with record() as log:
        z = layer(x)
    layer(x)
    z.sum().backward()
    assert len(log) == 1


def test_a_log_is_closed_by_an_exception_too():
    cell, x = small_opteq("tanh")
    layer = tight(cell)

    def fail() -> None:
        layer(x)
        raise KeyError

    with pytest.raises(KeyError), record() as log:
        fail()
    layer(x)
    assert len(log) == 1


def test_threads_do_not_see_each_others_logs():
    cell, x = small_opteq("tanh")
    layer = tight(cell)
    counts: dict[int, int] = {}
    both_open = threading.Barrier(2, timeout=60)

    def work(solves: int) -> None:
        with record() as log:
            both_open.wait()
            for _ in range(solves):
                layer(x)
            both_open.wait()
        counts[solves] = len(log)

    with record() as outside:
        threads = [threading.Thread(target=work, args=(solves,)) for solves in (2, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == {2: 2, 5: 5}
    assert len(outside) == 0


def test_without_record_no_trace_is_kept():
    cell, x = small_opteq("tanh")
    assert tight(cell).solve(x).trace is None


@pytest.mark.parametrize("captured", [False, True])
def test_a_log_keeps_no_graph_and_modules_keep_nothing(captured):
    f, x = small_tanh()
    cell = FunctionCell((lambda z, x: f(z, x)) if captured else f, (2,))
    layer = tight(cell)
    before = {name: set(vars(module)) for name, module in layer.named_modules()}
    with record() as log:
        z = layer(x)
        z.sum().backward()
    assert len(log) == 2  # one solve forward, one backward
    assert not any(solution.z.requires_grad for solution in log)
    assert {name: set(vars(module)) for name, module in layer.named_modules()} == before
    gone = weakref.ref(z)
    gc.disable()
    try:
        del z
        assert gone() is None
    finally:
        gc.enable()


# --- the cost of a backward pass ------------------------------------------------------------------------------------------------


def test_an_adjoint_whose_estimate_was_too_good_to_be_true_is_solved_on(monkeypatch):
    f, x = Counted([]), randn(6, 4, seed=1)
    layer = tight(FunctionCell(f, (4,)), gradient=Implicit(Stop(1e-8, 0.0, 200), GMRES()))
    wanted = torch.autograd.grad(layer(x).sum(), f.A)
    honest = GMRESState.estimate
    monkeypatch.setattr(GMRESState, "estimate", lambda state: (1e-4 * honest(state)[0], honest(state)[1]))
    with record() as log:
        found = torch.autograd.grad(layer(x).sum(), f.A)
    assert log[-1].converged.all()
    assert (log[-1].residual <= 1e-8).all()
    assert relative_error(found, wanted) < 1e-7


class Counted(nn.Module):
    """tanh(z A' + x), which notes its calls in a list."""

    def __init__(self, calls: list[Tensor]) -> None:
        super().__init__()
        self.A, self.note = nn.Parameter(with_norm(randn(4, 4), 0.8)), calls.append

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.note(z)
        return torch.tanh(z @ self.A.T + x)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plain_backward_pass_evaluates_f_at_most_once_and_one_that_is_differentiated_agrees(recompute):
    calls: list[Tensor] = []
    f, x, g = Counted(calls), randn(1, 4, seed=1), randn(1, 4, seed=2)
    layer = tight(FunctionCell(f, (4,)), gradient=Implicit(stop=TIGHT, recompute=recompute))
    found = {}
    for create_graph in (False, True):
        z = layer(x)
        calls.clear()
        found[create_graph] = torch.autograd.grad(z, f.A, g, create_graph=create_graph)[0]
        if not create_graph:
            assert len(calls) == recompute
    assert relative_error([found[False]], [found[True].detach()]) < 1e-12
    assert found[True].requires_grad


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        return 2 * a

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 2 * g


def test_the_graph_of_an_f_that_ends_in_a_function_in_python_outlives_its_value() -> None:
    x = randn(1, 4, seed=1).requires_grad_()
    z = tight(FunctionCell(lambda z, x: Doubled.apply(0.2 * z + x), (4,)), solver=Picard())(x)
    gc.collect()
    assert not isinstance(z.grad_fn.tape.value.node, torch._C._FunctionBase)  # which PyTorch before 2.9 does not keep
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], torch.full_like(x, 2 / 0.6))


def test_the_graph_of_the_last_evaluation_serves_as_often_as_the_caller_wants_and_is_let_go_then():
    f, x, g = Counted([]), randn(1, 4, seed=1).requires_grad_(), randn(1, 4, seed=2)
    z = tight(FunctionCell(f, (4,)), gradient=Implicit(stop=TIGHT))(x)
    node = z.grad_fn
    assert node.tape.value is not None
    first, second = (torch.autograd.grad(z, [x, f.A], g, retain_graph=True) for _ in range(2))
    assert node.tape is not None
    torch.autograd.grad(z, x, g)
    assert node.tape is None
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden()])
def test_samples_that_end_at_different_steps_have_no_graph_in_common_and_right_gradients(solver):
    calls: list[Tensor] = []
    f, x = Counted(calls), torch.cat([randn(1, 4, seed=1), torch.full((1, 4), 40.0, dtype=torch.float64)])
    layer = tight(FunctionCell(f, (4,)), solver=solver, gradient=Implicit(stop=TIGHT))
    z = layer(x)  # tanh saturates for the second sample, which is done at once
    assert z.grad_fn.tape is None
    (found,) = torch.autograd.grad(z.sum(), f.A)
    alone = [torch.autograd.grad(layer(x[i : i + 1]).sum(), f.A)[0] for i in range(2)]
    assert relative_error([found], [alone[0] + alone[1]]) < 1e-11


def test_no_graph_is_kept_where_nobody_will_differentiate():
    f, x = Counted([]), randn(1, 4, seed=1)
    layer = tight(FunctionCell(f, (4,)))
    with torch.no_grad():
        assert layer(x).grad_fn is None
    f.A.requires_grad_(False)
    assert layer(x).grad_fn is None
    tape = layer(x.requires_grad_()).grad_fn.tape
    assert sorted(operand.requires_grad for operand in tape.operands) == [False, True]  # A is fixed, x is not


class LearnedStart(OptEq):
    """An OptEq that begins at a parameter, which is 0 at first."""

    def __init__(self) -> None:
        super().__init__(3, 4, 5)
        self.start = nn.Parameter(torch.zeros(4))

    def initial(self, x: Tensor) -> Tensor:
        return self.start.expand(len(x), -1)


def test_a_start_of_zero_is_differentiated_and_mapped_over():
    torch.manual_seed(0)
    cell = LearnedStart()
    Equilibrium(cell, gradient=Unrolled(1))(torch.randn(2, 3)).sum().backward()
    assert cell.start.grad.abs().sum() > 0
    layer, x, z0 = Equilibrium(OptEq(3, 4, 5), gradient=Unrolled(2)), torch.randn(6, 2, 3), torch.zeros(6, 2, 4)
    mapped = vmap(lambda x, z: layer.solve(x, z).z)(x, z0)
    torch.testing.assert_close(mapped, torch.stack([layer(one) for one in x]))


def test_a_checkpoint_solves_forward_twice_and_no_more():
    f, solved = Counted([]), []
    layer = tight(FunctionCell(f, (4,)), gradient=Implicit(stop=TIGHT))
    with observe(lambda layer, solution, phase: solved.append(phase)):
        torch.utils.checkpoint.checkpoint(layer, randn(1, 4, seed=1).requires_grad_(), use_reentrant=False).sum().backward()
    assert sorted(solved) == ["backward", "forward", "forward"]


def test_a_solver_with_steps_of_its_own_is_given_the_map_itself():
    class Looking(Picard):
        def step(self, fn, state):
            fn.linearize(state.z)
            return super().step(fn, state)

    f, x = Counted([]), randn(1, 4, seed=1).requires_grad_()
    z = tight(FunctionCell(f, (4,)), solver=Looking())(x)
    assert z.grad_fn.tape is None


def test_an_adjoint_that_meets_its_tolerance_at_the_last_step_has_converged():
    f, x = Counted([]), randn(6, 4, seed=1).requires_grad_()

    def adjoint(steps: int, rtol: float) -> Solution:
        gradient = Implicit(Stop(rtol, 0.0, steps), GMRES(restart=2))
        with record() as log:
            tight(FunctionCell(f, (4,)), gradient=gradient, on_failure="ignore")(x).sum().backward()
        return log[-1]

    for steps in (1, 4, 7):
        found = adjoint(steps, 1e-3)
        assert torch.equal(found.converged, found.residual <= 1e-3)
        reached = adjoint(steps, 0.0).residual.max()
        assert adjoint(steps, 1.01 * float(reached)).converged.all()
