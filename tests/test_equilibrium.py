"""Equilibrium and Cell: the layer, what it refuses, and what it says when a sample fails."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from opteq import Cell, ConvergenceError, ConvergenceWarning, Equilibrium, Map, Status, Stop, per_sample
from opteq.cells import FunctionCell, OptEq
from opteq.gradients import Implicit, JacobianFree, Phantom, Unrolled
from opteq.solvers import Anderson, Broyden, Newton, Picard
from problems import Affine, Shift, with_norm, zoo

TIGHT = Stop(rtol=1e-11, max_steps=500)


def tanh_cell(n: int = 4, d: int = 3) -> FunctionCell:
    torch.manual_seed(0)
    W, U = torch.randn(n, n, dtype=torch.float64), torch.randn(n, d, dtype=torch.float64)
    return FunctionCell(Affine(with_norm(W, 0.8), U, torch.tanh), (n,))


def inputs(batch: int = 5, d: int = 3) -> Tensor:
    return torch.randn(batch, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# what it returns


def test_forward_is_the_z_of_solve():
    layer, x = Equilibrium(tanh_cell(), stop=TIGHT), inputs()
    solution = layer.solve(x)
    assert torch.equal(layer(x), solution.z)
    assert solution.status is Status.CONVERGED
    assert solution.converged.all()
    f = layer.cell.bind(x)
    gap = torch.linalg.vector_norm(f(solution.z) - solution.z, dim=1) / torch.linalg.vector_norm(f(solution.z), dim=1)
    torch.testing.assert_close(gap, solution.residual, rtol=1e-6, atol=1e-16)
    assert gap.max() <= 1e-11


def test_it_drops_into_sequential_and_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Equilibrium(OptEq(4, 6, 8)), nn.Linear(6, 1))
    x, y = torch.randn(32, 3), torch.randn(32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_warm_start_costs_no_step_and_changes_no_result():
    layer, x = Equilibrium(tanh_cell(), stop=TIGHT), inputs()
    cold = layer.solve(x)
    warm = layer.solve(x, z0=cold.z)
    assert warm.steps.max() == 0
    torch.testing.assert_close(warm.z, cold.z, rtol=0, atol=0)


def test_the_solve_runs_in_the_dtype_of_z0():
    cell = tanh_cell()
    x = inputs()
    assert Equilibrium(cell)(x.float()).dtype is torch.float64  # promoted with the parameters
    assert Equilibrium(cell)(x, z0=torch.zeros(5, 4)).dtype is torch.float32


def test_mixed_precisions_promote():
    torch.manual_seed(0)
    cell, x = OptEq(3, 4, 5), inputs()
    assert Equilibrium(cell)(x).dtype is torch.float64
    assert Equilibrium(cell)(x.float()).dtype is torch.float32
    assert Equilibrium(cell.double())(x.float()).dtype is torch.float64


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton()], ids=lambda s: type(s).__name__)
def test_half_precision_all_through(solver):
    torch.manual_seed(0)
    cell = OptEq(3, 4, 5, activation="tanh").half()
    x = torch.randn(6, 3).half().requires_grad_()
    solution = Equilibrium(cell, solver, Stop(rtol=1e-2), on_failure="raise").solve(x)
    solution.z.sum().backward()
    exact = Equilibrium(deepcopy(cell).double(), stop=TIGHT)(x.detach().double())
    assert solution.z.dtype is torch.float16
    assert (solution.z - exact).abs().max() < 2e-2 * exact.abs().max()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(batch):
    layer = Equilibrium(tanh_cell())
    x = inputs(batch).requires_grad_()
    z = layer(x)
    assert z.shape == (batch, 4)
    z.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4)])
@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton()], ids=lambda s: type(s).__name__)
def test_any_state_shape(shape, solver):
    layer = Equilibrium(FunctionCell(lambda z, x: 0.5 * torch.cos(z) + x, shape), solver, TIGHT)
    x = torch.linspace(-1, 1, 3 * math.prod(shape), dtype=torch.float64).reshape(3, *shape).requires_grad_()
    z = layer(x)
    torch.testing.assert_close(z, 0.5 * torch.cos(z) + x)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(gradient, 1 / (1 + 0.5 * torch.sin(z)), rtol=1e-9, atol=0)


# your own cell, as the documentation shows it


@dataclass(frozen=True)
class LogisticMap(Map):
    W: Tensor
    u: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z @ self.W.T + self.u)


class LogisticCell(Cell):
    def __init__(self, n: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.W = nn.Parameter(with_norm(torch.randn(n, n, dtype=torch.float64), 2.0))
        self.norm = nn.Identity() if norm is None else norm
        self.state_shape = (n,)

    def bind(self, x: Tensor) -> LogisticMap:
        return LogisticMap(self.W, self.norm(x))


def test_an_own_cell_gets_exact_gradients():
    torch.manual_seed(0)
    layer = Equilibrium(LogisticCell(3), stop=Stop(rtol=1e-13))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


class CapturingCell(LogisticCell):
    """Hides its weight from the map's fields: gradients must still be right."""

    def bind(self, x: Tensor) -> Map:
        return HidingMap(lambda z: z @ self.W.T, self.norm(x))


@dataclass(frozen=True)
class HidingMap(Map):
    product: object
    u: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.product(z) + self.u)


def test_a_tensor_that_a_map_hides_still_gets_its_gradient():
    torch.manual_seed(0)
    open_, hidden = LogisticCell(3), CapturingCell(3)
    hidden.load_state_dict(open_.state_dict())
    x = inputs()
    for cell in (open_, hidden):
        Equilibrium(cell, stop=Stop(rtol=1e-13))(x).square().sum().backward()
    torch.testing.assert_close(hidden.W.grad, open_.W.grad, rtol=1e-10, atol=0)


def test_a_map_that_claims_to_be_closed_costs_no_extra_evaluation():
    calls = []

    @dataclass(frozen=True)
    class Counting(LogisticMap):
        def __call__(self, z):
            calls.append(z.shape[0])
            return super().__call__(z)

    class Declared(LogisticCell):
        def bind(self, x):
            return Counting(self.W, x)

    layer = Equilibrium(Declared(3))
    x = inputs()
    Counting.closed = True
    assert layer.solve(x).evals == len(calls)
    calls.clear()
    Counting.closed = False
    assert layer.solve(x).evals == len(calls) - 1
    assert calls[0] == 1  # on one sample


def test_finding_captured_tensors_evaluates_f_where_it_is_defined():
    """f may have a domain, here invertible matrices: it must not be probed at zeros."""

    def f(z, x):
        return 0.3 * torch.tanh(torch.linalg.solve(x, z))

    layer = Equilibrium(FunctionCell(f, (3,)), on_failure="raise")
    x = torch.eye(3).repeat(4, 1, 1).requires_grad_()
    layer(x).sum().backward()
    assert torch.func.vmap(layer)(x.detach()[:, None]).shape == (4, 1, 3)


# what f may contain


def test_batch_norm_and_dropout_inside_f_are_refused_in_train_mode_and_fine_in_eval():
    for part, words in ((nn.BatchNorm1d(4), "couples the batch"), (nn.Dropout(0.5), "redraws its mask")):

        class F(nn.Module):
            def __init__(self, part=part):
                super().__init__()
                self.linear, self.part = nn.Linear(4, 4), part

            def forward(self, z, x):
                return 0.3 * torch.tanh(self.part(self.linear(z))) + x

        layer, x = Equilibrium(FunctionCell(F(), (4,))), torch.randn(6, 4)
        with pytest.raises(ValueError, match=words):
            layer(x)
        layer.eval()
        assert layer.solve(x).status is Status.CONVERGED
        assert not part._forward_pre_hooks
    part.p = 0.0  # a dropout that drops nothing
    assert layer.train().solve(x).status is Status.CONVERGED


def test_batch_norm_without_running_statistics_is_refused_in_eval_too():
    class F(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, track_running_stats=False)

        def forward(self, z, x):
            return 0.3 * self.norm(z) + x

    with pytest.raises(ValueError, match=r"BatchNorm1d 'f.norm' inside f couples the batch"):
        Equilibrium(FunctionCell(F(), (4,))).eval()(torch.randn(6, 4))


def test_batch_norm_in_bind_is_welcome():
    cell = LogisticCell(3, norm=nn.BatchNorm1d(3).double())
    assert Equilibrium(cell).solve(inputs()).status is Status.CONVERGED


def test_batch_norm_in_bind_is_welcome_in_one_thread_while_f_is_evaluated_in_another():
    @dataclass(frozen=True)
    class Crowded(LogisticMap):
        def __call__(self, z):
            with ThreadPoolExecutor(1) as other:
                other.submit(cell.bind, inputs()).result()
            return LogisticMap.__call__(self, z)

    class CrowdedCell(LogisticCell):
        def bind(self, x):
            return Crowded(self.W, self.norm(x))

    cell = CrowdedCell(3, norm=nn.BatchNorm1d(3).double())
    assert Equilibrium(cell).solve(inputs()).status is Status.CONVERGED


# never silent: arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"cell": lambda z, x: z}, TypeError, "'cell' parameter of Equilibrium must be a Cell"),
        ({"solver": "anderson"}, TypeError, "'solver' parameter of Equilibrium must be a Solver"),
        ({"solver": Anderson}, TypeError, "'solver' parameter of Equilibrium must be a Solver"),
        ({"stop": 1e-3}, TypeError, "'stop' parameter of Equilibrium must be a Stop"),
        ({"gradient": "implicit"}, TypeError, "'gradient' parameter of Equilibrium must be a gradient strategy"),
        ({"on_failure": "explode"}, ValueError, "'on_failure' parameter of Equilibrium must be 'warn', 'raise' or 'ignore'"),
        ({"tol": 1e-3}, TypeError, "unexpected keyword"),
    ],
)
def test_bad_constructor_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        Equilibrium(**{"cell": tanh_cell(), **arguments})


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Unrolled(0), ValueError, "'steps' parameter of Unrolled"),
        (lambda: Unrolled(), TypeError, "steps"),
        (lambda: Phantom(steps=0), ValueError, "'steps' parameter of Phantom"),
        (lambda: Phantom(damping=0.0), ValueError, "'damping' parameter of Phantom"),
        (lambda: Implicit(stop=1e-3), TypeError, "'stop' parameter of Implicit"),
        (lambda: Implicit(linear="cg"), TypeError, "'linear' parameter of Implicit"),
        (lambda: JacobianFree(steps=2), TypeError, "unexpected keyword"),
        (lambda: FunctionCell(3, (4,)), TypeError, "'f' parameter of FunctionCell"),
        (lambda: FunctionCell(torch.cos, 4), TypeError, "'state_shape' parameter of FunctionCell"),
        (lambda: FunctionCell(torch.cos, (0,)), ValueError, "'state_shape' parameter of FunctionCell"),
        (lambda: FunctionCell(torch.cos, (2.0,)), TypeError, "'state_shape' parameter of FunctionCell"),
        (lambda: OptEq(0, 4, 4), ValueError, "'in_features' parameter of OptEq must be an integer >= 1. Got 0 instead"),
        (lambda: OptEq(3, 4, 4, alpha=0.0), ValueError, "'alpha' parameter of OptEq"),
        (lambda: OptEq(3, 4, 4, alpha=1.5), ValueError, "'alpha' parameter of OptEq must be a finite number > 0 and <= 1"),
        (lambda: OptEq(3, 4, 4, mu=-1.0), ValueError, "'mu' parameter of OptEq"),
        (lambda: OptEq(3, 4, 4, activation="cube"), ValueError, "'activation' parameter of OptEq must be one of 'relu'"),
        (lambda: OptEq(3, 4, 4, activation="gelu"), ValueError, "OptEq needs an activation that is monotone .* 'gelu' is not"),
        (lambda: OptEq(3, 4, 4, activation=torch.relu), TypeError, "'activation' parameter of OptEq"),
    ],
)
def test_bad_parts(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (
            torch.zeros(2, 3, dtype=torch.long),
            TypeError,
            "must be a floating-point tensor. Got torch.int64",
        ),
        ([[0.0, 1.0]], TypeError, "'x' parameter of Equilibrium must be a floating-point tensor. Got 'list'"),
        (torch.tensor(1.0), ValueError, r"'x' parameter of Equilibrium must be of shape \[batch, ...\]"),
        (torch.zeros(2, 4), ValueError, r"'x' parameter of OptEq must be of shape \[batch, 3\]. Got \[2, 4\]"),
        (torch.zeros(2, 3, 1), ValueError, r"'x' parameter of OptEq must be of shape \[batch, 3\]"),
        (torch.zeros(2, 3, device="meta"), ValueError, "'x' parameter of Equilibrium must be on cpu"),
    ],
)
def test_bad_inputs(x, error, words):
    with pytest.raises(error, match=words):
        Equilibrium(OptEq(3, 4, 5))(x)


@pytest.mark.parametrize(
    ("z0", "error", "words"),
    [
        (torch.zeros(2, 5), ValueError, r"'z0' parameter of Equilibrium must be of shape \[2, 4\]"),
        (torch.zeros(3, 4), ValueError, r"'z0' parameter of Equilibrium must be of shape \[2, 4\]"),
        (torch.zeros(2, 4, dtype=torch.int), TypeError, "'z0' parameter of Equilibrium must be a floating-point tensor"),
        (torch.zeros(2, 4, device="meta"), ValueError, "'z0' parameter of Equilibrium must be of shape .* on cpu"),
    ],
)
def test_bad_starts(z0, error, words):
    with pytest.raises(error, match=words):
        Equilibrium(OptEq(3, 4, 5))(torch.zeros(2, 3), z0)


def test_f_of_the_wrong_shape_or_dtype():
    with pytest.raises(ValueError, match=r"of the shape of its state, torch.Size\(\[2, 4\]\). Got torch.Size\(\[2, 3\]\) instead"):
        Equilibrium(FunctionCell(lambda z, x: z[:, :3], (4,)))(torch.ones(2, 4))
    with pytest.raises(ValueError, match="of the dtype of its state"):
        Equilibrium(FunctionCell(lambda z, x: 0.5 * z.double() + 1, (4,)))(torch.ones(2, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["W", "U", "b"])
def test_non_finite_parameters_are_named(name, value):
    cell = OptEq(3, 4, 5)
    with torch.no_grad():
        getattr(cell, name).view(-1)[1] = value
    with pytest.raises(ValueError, match=f"'{name}' parameter of OptEq must be finite. Got NaN or infinity"):
        Equilibrium(cell)(torch.ones(2, 3))


def test_non_finite_parameters_of_a_module_are_named():
    cell = tanh_cell()
    with torch.no_grad():
        cell.f.W[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"'f.W' parameter of FunctionCell must be finite"):
        Equilibrium(cell)(inputs())


# never silent: samples


def failing(case: str) -> tuple[FunctionCell, Tensor, Status]:
    problems = zoo()
    if case == "no fixed point":
        return FunctionCell(Shift(), (8,)), problems["relu"].x, Status.MAX_STEPS
    if case == "diverges":
        return FunctionCell(lambda z, x: 2 * z + 1 + 0 * x[:, :1], (8,)), problems["relu"].x, Status.DIVERGED
    x = problems["relu"].x.clone()
    x[2] = math.nan
    return FunctionCell(problems["relu"].f, (8,)), x, Status.NONFINITE


CASES = ["no fixed point", "diverges", "one NaN sample"]


@pytest.mark.parametrize("case", CASES)
def test_warn(case):
    cell, x, status = failing(case)
    with pytest.warns(ConvergenceWarning) as caught:
        solution = Equilibrium(cell, Picard(), Stop(max_steps=60)).solve(x)
    assert solution.status is status
    message = str(caught[0].message)
    count = int((~solution.converged).sum())
    assert f"Equilibrium, forward solve: {count} of 6 samples did not converge" in message  # what happened
    assert "relative residual is" in message  # how far it got
    assert "(a)" in message  # what to try
    assert "rtol 0.0001" in message
    assert status.value in message


@pytest.mark.parametrize("case", CASES)
def test_raise(case):
    cell, x, status = failing(case)
    with pytest.raises(ConvergenceError, match="did not converge") as caught:
        Equilibrium(cell, Picard(), Stop(max_steps=60), on_failure="raise")(x)
    assert caught.value.solution.status is status


@pytest.mark.parametrize("case", CASES)
def test_ignore_is_quiet_but_honest(case):
    cell, x, status = failing(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = Equilibrium(cell, Picard(), Stop(max_steps=60), on_failure="ignore").solve(x)
    assert solution.status is status
    with pytest.raises(ConvergenceError):
        solution.raise_if_failed()


def test_a_nan_sample_leaves_the_others_alone():
    cell, x, _ = failing("one NaN sample")
    solution = Equilibrium(cell, Picard(), TIGHT, on_failure="ignore").solve(x)
    clean = torch.cat([x[:2], x[3:]])
    other = Equilibrium(cell, Picard(), TIGHT).solve(clean)
    keep = torch.tensor([0, 1, 3, 4, 5])
    torch.testing.assert_close(solution.z[keep], other.z, rtol=1e-12, atol=1e-14)
    assert solution.statuses[2] is Status.NONFINITE
    assert solution.z[2].isfinite().all()
    assert solution.residual[2].isnan()
    assert solution.evals <= other.evals + 1


@pytest.mark.parametrize("rtol", [0.5, 1e-1, 1e-3, 1e-8, 0.0])
@pytest.mark.parametrize("solver", [Picard(), Picard(0.5), Anderson(), Broyden(), Newton()], ids=repr)
def test_no_fixed_point_is_never_called_converged(solver, rtol):
    cell, x, _ = failing("no fixed point")
    max_steps = 8 if isinstance(solver, Newton) else 50
    solution = Equilibrium(cell, solver, Stop(rtol=rtol, max_steps=max_steps), on_failure="ignore").solve(x)
    assert Status.CONVERGED not in solution.statuses


def test_solution_says_that_all_is_well():
    solution = Equilibrium(tanh_cell()).solve(inputs())
    assert solution.raise_if_failed() is solution
    assert solution.explain() == "All 5 samples converged (rtol 0.0001, atol 0)."


def test_repr_tells_the_settings():
    text = repr(Equilibrium(OptEq(3, 4, 5, alpha=0.5), Anderson(memory=3)))
    for part in (
        "memory=3",
        "rtol=0.0001",
        "Implicit",
        "on_failure='warn'",
        "in_features=3, features=4, hidden=5, activation=relu, alpha=0.5, mu=1",
    ):
        assert part in text


def test_the_warning_points_at_the_callers_code():
    cell, x, _ = failing("diverges")
    with pytest.warns(ConvergenceWarning) as caught:
        nn.Sequential(Equilibrium(cell, Picard()))(x)
    assert caught[0].filename == __file__


def test_repr_of_a_solution():
    layer, x = Equilibrium(tanh_cell(), stop=TIGHT), inputs()
    assert "5 CONVERGED; worst residual" in repr(layer.solve(x))
    assert repr(layer.solve(x[:0])) == "Solution(empty; evals 0, z [0, 4] torch.float64)"
    texts = []

    def f(x):
        texts.append(repr(layer.solve(x)))
        return x

    torch.func.vmap(f)(x[:, None])
    assert texts == ["Solution(z [1, 4] torch.float64)"]


# the user's module is his own


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, dtype=torch.float64)
        self.b = self.a
        self.bias = self.a.bias
        with torch.no_grad():
            self.a.weight *= 0.5

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.a(z)) + 0.3 * torch.tanh(self.b(z)) + self.bias + x


def test_shared_modules_and_parameters_keep_their_identity_and_get_exact_gradients():
    torch.manual_seed(0)
    f = Tied()
    weight, bias = f.a.weight, f.a.bias
    x = torch.randn(4, 3, dtype=torch.float64)
    Equilibrium(FunctionCell(f, (3,)), stop=Stop(rtol=1e-12), on_failure="raise")(x).square().sum().backward()
    found = weight.grad.clone(), bias.grad.clone()
    assert f.a.weight is weight
    assert f.b.weight is weight
    assert f.bias is bias
    z = torch.zeros(4, 3, dtype=torch.float64)
    for _ in range(200):
        z = f(z, x)
    expected = torch.autograd.grad(z.square().sum(), [weight, bias])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_mode_changed_between_forward_and_backward_changes_nothing():
    torch.manual_seed(0)

    class F(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)

        def forward(self, z, x):
            return 0.5 * torch.tanh(self.dropout(self.linear(z))) + x

    layer, x = Equilibrium(FunctionCell(F(), (3,)), stop=Stop(rtol=1e-6)).eval(), torch.randn(4, 3)
    layer(x).sum().backward()
    expected = layer.cell.f.linear.weight.grad.clone()
    layer.zero_grad()
    z = layer(x)
    layer.train()
    z.sum().backward()
    torch.testing.assert_close(layer.cell.f.linear.weight.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), JacobianFree()], ids=lambda g: type(g).__name__)
@pytest.mark.parametrize("captured", [False, True])
def test_a_sample_where_f_breaks_down_adds_nothing_to_shared_gradients(gradient, captured):
    """f is undefined at zero too, so nothing may be evaluated there."""

    class F(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

        def forward(self, z, x):
            return self.w * torch.log(0.1 * z + x)

    f = F()
    cell = FunctionCell((lambda z, x: f(z, x)) if captured else f, (1,))
    layer = Equilibrium(cell, stop=TIGHT, gradient=gradient, on_failure="ignore")
    x = torch.tensor([[2.0], [-1.0], [3.0]], dtype=torch.float64)
    solution = layer.solve(x)
    assert solution.statuses == (Status.CONVERGED, Status.NONFINITE, Status.CONVERGED)
    assert solution.z.isfinite().all()
    solution.z.sum().backward()
    found, f.w.grad = f.w.grad, None
    layer(x[[0, 2]]).sum().backward()
    torch.testing.assert_close(found, f.w.grad, rtol=1e-12, atol=0)


def test_f_that_returns_a_tuple_or_writes_to_z_is_refused():
    with pytest.raises(TypeError, match=r"must return a tensor\. Got tuple"):
        Equilibrium(FunctionCell(lambda z, x: (z, x), (3,)))(torch.ones(2, 3))
    with pytest.raises(ValueError, match="must not change its input z in place"):
        Equilibrium(FunctionCell(lambda z, x: z.mul_(0.5).add_(x), (3,)))(torch.ones(2, 3))


def test_a_cell_that_is_not_complete_says_what_is_missing():
    class Shapeless(FunctionCell):
        def __init__(self):
            super().__init__(lambda z, x: 0.5 * z + x, (3,))
            del self.state_shape

    class Tuple(FunctionCell):
        def bind(self, x):
            return (x, x)

    with pytest.raises(TypeError, match=r"^Shapeless must set state_shape, .* or override initial\.$"):
        Equilibrium(Shapeless())(torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"^Tuple\.bind must return a Map; .* Got tuple instead\.$"):
        Equilibrium(Tuple(lambda z, x: z, (3,)))(torch.ones(2, 3))


def test_a_single_precision_layer_under_a_double_default():
    layer, x = Equilibrium(OptEq(3, 4, 5)), torch.randn(2, 3)
    torch.set_default_dtype(torch.float64)
    try:
        assert layer(x).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_empty_container_inside_f_is_no_obstacle():
    class F(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.extra, self.absent = nn.Linear(3, 3), nn.ModuleList(), None
            self.register_module("nothing", None)

        def forward(self, z, x):
            assert self.nothing is None
            return 0.3 * torch.tanh(self.linear(z)) + x + len(self.extra)

    layer = Equilibrium(FunctionCell(F(), (3,)), on_failure="raise")
    layer(torch.randn(2, 3)).sum().backward()
    assert layer.cell.f.linear.weight.grad.isfinite().all()
