import math
import pickle
import random
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from opteq import Equilibrium, Stop
from opteq.activations import leaky_relu, soft_threshold
from opteq.cells import DeepOptEq, FunctionCell, OptEq
from opteq.regularizers import L1, L2, Incay
from opteq.theory.prox import ProxTest, is_prox
from opteq.theory.rewrite import WeightTied, from_feedforward, solve_factor, unit_layers, weight_tied

REWRITES: list[Callable[[nn.Sequential], nn.Module]] = [from_feedforward, unit_layers, weight_tied]
rewrites = pytest.mark.parametrize("rewrite", REWRITES, ids=lambda f: f.__name__)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def redrawn(net: nn.Sequential, seed: int = 0, gain: float = 1.5) -> nn.Sequential:
    """Weights large enough for the input to matter at the output of a deep network, too."""
    for k, parameter in enumerate(net.parameters()):
        scale = gain / math.sqrt(parameter.shape[1]) if parameter.ndim == 2 else 0.3
        parameter.data = scale * points(*parameter.shape, seed=1000 * seed + k)
    return net


def random_net(seed: int, depth: int | None = None) -> nn.Sequential:
    draw = random.Random(seed)
    depth = draw.randint(2, 6) if depth is None else depth
    widths = [draw.randint(3, 40) for _ in range(depth + 1)]
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        activation = draw.choice([nn.ReLU(), nn.Tanh(), nn.LeakyReLU(draw.choice([0.01, 0.2, 1.5]))])
        parts += [nn.Linear(before, after, bias=draw.random() < 0.6), activation]
    return redrawn(nn.Sequential(*parts[:-1]), seed)


def mlp(activation: type[nn.Module], *widths: int) -> nn.Sequential:
    parts = [part for before, after in pairwise(widths) for part in (nn.Linear(before, after), activation())]
    return redrawn(nn.Sequential(*parts[:-1]))


def error(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def input_gradient(net: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad((net(x) * v).sum(), x)[0]


def assert_same(made: nn.Module, net: nn.Sequential, x: Tensor, rtol: float = 1e-10) -> None:
    y = net(x)
    assert made(x).shape == y.shape
    assert made(x).dtype == y.dtype
    assert error(made(x), y) <= rtol
    assert y.var(dim=0).sum() > 1e-4 * y.square().mean()  # the test would not see much of a constant output
    v = points(*y.shape, seed=77, dtype=y.dtype)
    assert error(input_gradient(made, x, v), input_gradient(net, x, v)) <= 10 * rtol


@rewrites
@pytest.mark.parametrize("seed", range(20))
def test_a_rewritten_network_has_the_same_outputs_and_gradients(rewrite: Callable[..., nn.Module], seed: int) -> None:
    net = random_net(seed)
    x = points(7, net[0].in_features, seed=seed)
    made = rewrite(net)
    assert_same(made, net, x)
    made(x).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("seed", range(5))
def test_the_equilibrium_takes_one_evaluation_and_one_more_to_confirm_it(seed: int) -> None:
    net = random_net(seed)
    layer = from_feedforward(net)[0]
    assert isinstance(layer, Equilibrium)
    assert isinstance(layer.cell, DeepOptEq)
    x = points(5, net[0].in_features)
    assert layer.solve(x).residual.max() == 0
    solution = layer.solve(x, 10 * points(5, *layer.cell.layers[0].state_shape))
    assert solution.converged.all()
    assert solution.residual.max() <= 1e-14  # z0 + (f(z0) - z0) is f(z0) to rounding
    assert solution.steps.max() == 1
    assert solution.evals == 2


def test_the_state_is_as_small_as_the_lemma_lets_it_be() -> None:
    net = mlp(nn.ReLU, 9, 4, 7, 5, 30)
    deep, unit = from_feedforward(net), unit_layers(net)
    assert [tuple(cell.W.shape) for cell in deep[0].cell.cells] == [(1, 12), (4, 12), (7, 12), (5, 12)]
    assert unit.lift.weight.shape == (13, 9)
    assert [tuple(cell.W.shape) for cell in unit.cells] == [(4, 13), (7, 13), (5, 13)]
    assert all((cell.U == 0).all() for cell in unit.cells)


OTHERS = [
    [nn.Linear(4, 6), nn.Tanh()],
    [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Sigmoid()],
    [nn.Linear(4, 6)],
    [nn.Linear(4, 6, bias=False)],
    [nn.Linear(4, 6), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 1)],
    [nn.Linear(4, 6), nn.Identity(), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(6, 2), nn.Identity()],
    [nn.Linear(4, 6), nn.Softplus(beta=3.0), nn.Linear(6, 8), nn.Softshrink(0.3), nn.Linear(8, 2)],
    [nn.Linear(4, 6), nn.LeakyReLU(0.0), nn.Linear(6, 8), nn.Softshrink(0.0), nn.Linear(8, 2)],
    [nn.Linear(4, 6), nn.Sigmoid(), nn.Tanh(), nn.Linear(6, 2), nn.Tanh(), nn.LeakyReLU(0.3)],
    [nn.Tanh(), nn.Sigmoid(), nn.Linear(4, 6)],
    [nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Sequential(nn.Sequential(nn.Linear(6, 2)))],
    [nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 40)],
]


@rewrites
@pytest.mark.parametrize("parts", OTHERS, ids=lambda parts: "-".join(type(part).__name__ for part in parts))
def test_other_chains(rewrite: Callable[..., nn.Module], parts: list[nn.Module]) -> None:
    net = redrawn(nn.Sequential(*deepcopy(parts)), gain=2.5)
    assert_same(rewrite(net), net, points(9, 4))


@rewrites
def test_a_layer_that_occurs_twice(rewrite: Callable[..., nn.Module]) -> None:
    tied = nn.Linear(5, 5)
    net = redrawn(nn.Sequential(tied, nn.Tanh(), tied, nn.Tanh(), tied))
    made = rewrite(net)
    assert_same(made, net, points(6, 5))


@rewrites
def test_twenty_layers(rewrite: Callable[..., nn.Module]) -> None:
    net = random_net(3, depth=20)
    made = rewrite(net)
    assert_same(made, net, points(6, net[0].in_features))
    if rewrite is not weight_tied:  # the factors neither grow nor vanish: 1 <= sigma(W) <= sqrt(1 + |A|^2)
        largest = max(float(torch.linalg.matrix_norm(part.weight.detach(), 2)) for part in net if isinstance(part, nn.Linear))
        factors = [cell.W.detach() for cell in made.modules() if isinstance(cell, OptEq) and cell.hidden > 1]
        for values in map(torch.linalg.svdvals, factors):
            assert values.min() >= 1 - 1e-12
            assert values.max() <= math.sqrt(1 + largest**2) + 1e-12


@rewrites
def test_dead_layers_and_weights_of_low_rank(rewrite: Callable[..., nn.Module]) -> None:
    net = mlp(nn.Tanh, 5, 8, 6, 7, 3)
    net[5] = nn.ReLU()
    net[2].weight.data[2:] = net[2].weight.data[:1]
    assert_same(rewrite(net), net, points(6, 5))
    net[4].weight.data.zero_()
    net[4].bias.data.fill_(-1.0)  # all ReLUs are off
    torch.testing.assert_close(rewrite(net)(points(6, 5)), net[6].bias.expand(6, 3))


@rewrites
def test_float32_and_tensors_that_are_not_contiguous(rewrite: Callable[..., nn.Module]) -> None:
    net = random_net(4)
    for part in net:
        if isinstance(part, nn.Linear):
            part.weight.data = part.weight.data.T.contiguous().T
            assert part.weight.shape[0] == 1 or not part.weight.is_contiguous()
    x = points(net[0].in_features, 7).T
    assert_same(rewrite(net), net, x)
    single = net.float()
    made = rewrite(single)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert_same(made, single, x.float(), rtol=1e-5)


@rewrites
def test_the_network_and_the_random_numbers_are_left_alone(rewrite: Callable[..., nn.Module]) -> None:
    net = random_net(1)
    before, state, numbers = deepcopy(net), deepcopy(net.state_dict()), torch.random.get_rng_state()
    made = rewrite(net)
    assert torch.equal(torch.random.get_rng_state(), numbers)
    again = rewrite(net)
    for a, b in zip(made.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert str(net) == str(before)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1.0)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    theirs = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    assert not theirs & {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}


@rewrites
def test_it_can_be_trained(rewrite: Callable[..., nn.Module]) -> None:
    net = mlp(nn.Tanh, 4, 6, 6, 2)
    made, x, wanted = rewrite(net), points(16, 4), points(16, 2, seed=1)
    copy = pickle.loads(pickle.dumps(made))
    assert torch.equal(copy(x), made(x))
    assert [name for name, _ in made.named_parameters()] == list(made.state_dict())
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (made(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    if isinstance(made, nn.Sequential):
        assert (made[0].cell.cells[0].W == 0).all()
        assert made[0].solve(x).evals == 2


def test_the_parameters_get_the_gradients_of_the_unrolled_network() -> None:
    net = random_net(6)
    made, x = from_feedforward(net), points(5, net[0].in_features)
    made(x).square().sum().backward()
    layer, head = made
    parameters = list(layer.parameters())
    plain = head(layer.cell.bind(x)(layer.cell.initial(x))).square().sum()
    for parameter, expected in zip(parameters, torch.autograd.grad(plain, parameters), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9)


class GivenForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OwnLinear(nn.Linear):
    pass


BAD: list[tuple[Any, type[Exception], str]] = [
    (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), TypeError, r"GELU is not monotone.*Got GELU\("),
    (nn.Sequential(nn.Linear(3, 4), nn.SiLU()), TypeError, "SiLU is not monotone"),
    (nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), TypeError, "Dropout redraws its mask"),
    (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), TypeError, "BatchNorm1d couples the batch.*fuse_linear_bn_eval"),
    (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), TypeError, "LayerNorm is none of these"),
    (nn.Sequential(OwnLinear(3, 4)), TypeError, "OwnLinear may not compute what an nn.Linear does"),
    (nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.GELU())), TypeError, "GELU is not monotone"),
    (GivenForward(nn.Linear(3, 4)), TypeError, "an nn.Sequential"),
    (nn.Linear(3, 4), TypeError, r"an nn.Sequential\. Got Linear"),
    ([nn.Linear(3, 4)], TypeError, "an nn.Sequential"),
    (None, TypeError, "an nn.Sequential"),
    (nn.Sequential(), ValueError, "at least one nn.Linear"),
    (nn.Sequential(nn.ReLU(), nn.Tanh()), ValueError, "at least one nn.Linear"),
    (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2)), ValueError, "4 in_features after 4 out_features.*in_features=5"),
    (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).double()), ValueError, "of one dtype, on one device"),
]


@rewrites
@pytest.mark.parametrize(("net", "kind", "text"), BAD)
def test_what_cannot_be_rewritten(rewrite: Callable[..., nn.Module], net: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=rf"(?s)^The 'net' parameter of {rewrite.__name__} must be .*{text}.* instead\.$"):
        rewrite(net)


def test_parameters_of_layers_that_cannot_be_rewritten() -> None:
    with pytest.raises(ValueError, match="'threshold' parameter of Softplus must be >= 20"):
        from_feedforward(nn.Sequential(nn.Linear(3, 4), nn.Softplus(threshold=5.0)))
    with pytest.raises(ValueError, match="'slope' parameter of leaky_relu"):
        from_feedforward(nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(-0.1)))
    broken = nn.Sequential(nn.Linear(3, 4))
    broken[0].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="'weight' parameter of Linear must be finite"):
        from_feedforward(broken)


def test_the_biases_of_tanh_need_no_appended_one() -> None:
    """The paper's construction: [A c; 0 1] and x with a 1 appended, which tanh does not keep."""
    net = mlp(nn.Tanh, 3, 4, 2)
    x = points(5, 3)
    z = torch.cat([x, torch.ones(5, 1, dtype=x.dtype)], dim=1)
    for part in net:
        if isinstance(part, nn.Linear):
            top = torch.cat([part.weight.detach(), part.bias.detach()[:, None]], dim=1)
            z = z @ torch.cat([top, torch.eye(top.shape[1], dtype=x.dtype)[-1:]]).T
        else:
            z = part(z)
    assert error(z[:, :-1], net(x)) > 1e-2
    assert error(from_feedforward(net)(x), net(x)) < 1e-10


@pytest.mark.parametrize("seed", range(5))
def test_a_weight_tied_network_stays_where_it_is_after_its_last_step(seed: int) -> None:
    net = random_net(seed)
    made = weight_tied(net)
    x = points(4, net[0].in_features)
    z = [x.new_zeros(4, len(made.b))]
    for _ in range(2 * len(made.widths)):
        z.append(made.step(z[-1], x))
    depth = len(made.widths)
    assert not torch.equal(z[depth - 1], z[depth])
    assert torch.equal(z[depth], z[depth + 1])
    assert torch.equal(z[depth], z[-1])
    torch.testing.assert_close(z[depth][:, -made.widths[-1] :], net(x), rtol=1e-10, atol=1e-12)
    # Any start ends there: it is the only equilibrium.
    other = points(4, len(made.b), seed=5)
    for _ in range(depth):
        other = made.step(other, x)
    torch.testing.assert_close(other, z[depth])


def test_a_weight_tied_network_is_the_equilibrium_of_its_step() -> None:
    net = random_net(2)
    made = weight_tied(net)
    x = points(4, net[0].in_features)
    layer = Equilibrium(FunctionCell(made.step, (len(made.b),)), stop=Stop(rtol=1e-13))
    solution = layer.solve(x)
    assert solution.converged.all()
    torch.testing.assert_close(solution.z[:, -made.widths[-1] :], net(x), rtol=1e-10, atol=1e-12)


def test_weight_tied_matrices_are_blocks() -> None:
    net = redrawn(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    made = weight_tied(net)
    W = torch.zeros(8, 8, dtype=torch.float64)
    W[3:7, :3], W[7:, 3:7] = net[2].weight.detach(), net[4].weight.detach()
    assert torch.equal(made.W_z, W)
    assert torch.equal(made.W_x[:3], net[0].weight)
    assert (made.W_x[3:] == 0).all()
    assert "widths=(3, 4, 1), activations=(tanh, relu, identity)" in repr(made)
    with pytest.raises(ValueError, match=r"'widths' parameter of WeightTied must be 3 integers with the sum 8\. Got \[3, 4\]"):
        WeightTied(W, made.W_x, made.b, [3, 4], made.activations)
    with pytest.raises(ValueError, match=r"of shape \[batch, 2\]"):
        made(torch.zeros(4, 3))


@given(n=st.integers(1, 12), rows=st.integers(1, 12), extra=st.integers(0, 5), rank=st.integers(0, 12), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_solve_factor_is_exact_and_of_full_rank(n: int, rows: int, extra: int, rank: int, seed: int) -> None:
    W, A = points(n, n + rows + extra, seed=seed), points(rows, rank, seed=seed + 1) @ points(rank, n, seed=seed + 2)
    V = solve_factor(A, W)
    condition = 1 + A.norm() / torch.linalg.svdvals(W).min()
    torch.testing.assert_close(V @ W.T, A, rtol=0, atol=float(1e-13 * (1 + A.norm()) * (1 + W.norm())))
    assert V.shape == (rows, n + rows + extra)
    values = torch.linalg.svdvals(V)
    assert values.min() >= 1 - 1e-12 * condition
    assert values.max() <= (1 + (torch.linalg.matrix_norm(A, 2) / torch.linalg.svdvals(W).min()) ** 2).sqrt() * (1 + 1e-10)
    least = solve_factor(A, W, full_rank=False)
    torch.testing.assert_close(least, A @ torch.linalg.pinv(W.T), rtol=1e-8, atol=float(1e-11 * condition))
    torch.testing.assert_close(least @ W.T, A, rtol=0, atol=float(1e-13 * (1 + A.norm()) * (1 + W.norm())))
    assert least.norm() < V.norm()


def test_solve_factor_refuses_what_has_no_solution() -> None:
    A, W = points(3, 4), points(4, 7)
    assert solve_factor(A.float(), W).dtype == torch.float32
    with pytest.raises(ValueError, match=r"'W' parameter of solve_factor must be of shape \[4, m\], m >= 7\. Got \[4, 6\]"):
        solve_factor(A, W[:, :6])
    assert solve_factor(A, W[:, :4], full_rank=False).shape == (3, 4)
    with pytest.raises(ValueError, match="m >= 4"):
        solve_factor(A, W[:, :3], full_rank=False)
    with pytest.raises(ValueError, match=r"of shape \[4, m\]"):
        solve_factor(A, W[:3])
    with pytest.raises(ValueError, match=r"of full row rank, 4\. Got 'rank 3' instead"):
        solve_factor(A, torch.cat([W[:3], W[:1] + W[1:2]]))
    with pytest.raises(ValueError, match="'A' parameter of solve_factor must be a matrix"):
        solve_factor(A[0], W)
    with pytest.raises(TypeError, match="'W' parameter of solve_factor must be a floating-point tensor"):
        solve_factor(A, torch.ones(4, 7, dtype=torch.long))


def scaled_cell(size: float, seed: int = 0, **options: Any) -> OptEq:
    """A cell with ||W|| = size."""
    cell = OptEq(2, 4, 5, **options).double()
    with torch.no_grad():
        for k, parameter in enumerate(cell.parameters()):
            parameter.copy_(points(*parameter.shape, seed=seed + k))
        cell.W.mul_(size / torch.linalg.matrix_norm(cell.W, 2))
    return cell


@pytest.mark.parametrize("size", [0.3, 1.0])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "softplus", "identity", soft_threshold(0.2), leaky_relu(0.1)])
def test_an_optimization_layer_of_norm_one_is_a_prox(activation: Any, alpha: float, size: float) -> None:
    cell = scaled_cell(size, activation=activation, alpha=alpha)
    # The samples have an x each, far apart: two of them must not be compared as if they had the same f.
    test = is_prox(cell.bind(100 * points(6, 2)), points(6, 4, seed=1))
    assert test, test.explain()
    assert test.holds
    assert 0 < test.expansion <= 1
    assert "may be a proximal operator" in test.explain()
    assert "may still refute it" in test.explain()


def rotation(z: Tensor) -> Tensor:
    return torch.stack([-z[:, 1], z[:, 0], z[:, 2], z[:, 3]], dim=1)


EXPANDING = scaled_cell(1.5, activation="identity").bind(points(8, 2))
DEEP = DeepOptEq([scaled_cell(0.9, activation="tanh"), scaled_cell(0.9, activation="tanh", seed=9)]).bind(points(8, 2))
GRADIENT, MONOTONE, STEEP, SPREAD = "not a gradient", "not monotone", "expansive: J", "expansive: |f(y)"

REFUTED: list[tuple[str, Callable[[Tensor], Tensor], set[str]]] = [
    ("norm 1.5", EXPANDING, {STEEP, SPREAD}),
    ("two layers", DEEP, {GRADIENT, MONOTONE}),
    ("-z", torch.neg, {MONOTONE}),
    ("rotation", rotation, {GRADIENT}),
    ("rotation and damping", lambda z: (z + rotation(z)) / 2, {GRADIENT}),
    ("1.001 z", lambda z: 1.001 * z, {STEEP, SPREAD}),
    ("waves", lambda z: 0.9 * torch.sin(z), {MONOTONE}),
    ("repulsion", lambda z: z + Incay().gradient(z).neg(), {STEEP, SPREAD}),
    ("a jump, which no derivative sees", lambda z: z / 2 + 3 * (z > 0), {SPREAD}),
]


@pytest.mark.parametrize(("fn", "failing"), [case[1:] for case in REFUTED], ids=[case[0] for case in REFUTED])
def test_is_prox_refutes_and_names_what_fails(fn: Callable[[Tensor], Tensor], failing: set[str]) -> None:
    test = is_prox(fn, points(8, 4, seed=3))
    assert not test
    assert not test.holds
    assert test.explain().startswith("f is no proximal operator (tolerance 1e-06); it is ")
    assert {text for text in (GRADIENT, MONOTONE, STEEP, SPREAD) if text in test.explain()} == failing
    assert len(test.failures()) == len(failing)


def test_the_numbers_of_the_test() -> None:
    test = is_prox(torch.neg, points(3, 4))
    assert (test.asymmetry, test.smallest, test.largest) == (0.0, -1.0, -1.0)
    assert test.expansion == pytest.approx(1.0)
    matrix = points(4, 4)
    test = is_prox(lambda z: z @ matrix.T, points(50, 4, seed=1))
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
    assert test.asymmetry == pytest.approx(float((matrix - matrix.T).norm() / matrix.norm()))
    assert test.smallest == pytest.approx(float(values[0]))
    assert test.largest == pytest.approx(float(values[-1]))
    assert 0.8 * torch.linalg.matrix_norm(matrix, 2) < test.expansion <= torch.linalg.matrix_norm(matrix, 2)
    assert is_prox(lambda z: 1.001 * z, points(3, 4), tolerance=1e-2)
    assert is_prox(torch.zeros_like, points(3, 4)).asymmetry == 0


@pytest.mark.parametrize("gamma", [0.1, 3.0])
@pytest.mark.parametrize("regularizer", [L1(), L2()])
@pytest.mark.parametrize("shape", [(9, 5), (4, 2, 2, 2)], ids=str)
def test_proxes_of_convex_functions_are_proxes(regularizer: Any, gamma: float, shape: tuple[int, ...]) -> None:
    assert is_prox(lambda z: regularizer.prox(z, gamma), 2 * points(*shape))
    assert is_prox(lambda z: regularizer.prox(z, gamma), 2 * points(*shape, dtype=torch.float32), tolerance=1e-4)


def test_points_that_are_close_equal_or_alone() -> None:
    z = points(1, 4)
    assert is_prox(torch.relu, z).expansion == 0
    assert is_prox(torch.relu, z.expand(5, 4)).expansion == 0
    near = z + 1e-14 * points(5, 4, seed=1)
    W = scaled_cell(1.0).W.detach()
    assert is_prox(lambda y: 1e3 + torch.tanh(y @ W.T) @ W, near)
    assert is_prox(torch.relu, points(7))


def test_every_pair_of_points_is_compared() -> None:
    z = torch.tensor([[-0.1], [100.0], [0.1], [-100.0]], dtype=torch.float64)  # the jump shows between the first and the third
    assert is_prox(lambda y: y / 2 + 3 * (y > 0), z).expansion == pytest.approx(15.5)
    assert is_prox(lambda y: y / 2 + 3 * (y > 0), z[1:])


def test_is_prox_checks_its_arguments() -> None:
    z = points(3, 4)
    with pytest.raises(TypeError, match="'fn' parameter of is_prox must be a Map or a callable"):
        is_prox(3, z)  # type: ignore[arg-type]
    for bad in (torch.tensor(1.0), torch.zeros(0, 4), torch.zeros(3, 0)):
        with pytest.raises(ValueError, match=r"'z' parameter of is_prox must be of shape \[batch, \.\.\.\] and not empty"):
            is_prox(torch.relu, bad)
    with pytest.raises(TypeError, match="'z' parameter of is_prox must be a floating-point tensor"):
        is_prox(torch.relu, torch.zeros(3, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="'tolerance' parameter of is_prox"):
        is_prox(torch.relu, z, tolerance=-1.0)
    with pytest.raises(ValueError, match="must return a tensor of the shape of its state"):
        is_prox(lambda y: y[:, :2], z)
    with pytest.raises(ValueError, match="'fn' parameter of is_prox must be finite"):
        is_prox(lambda y: y.abs().log() / 0.0, z)
    sided = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="'fn' parameter of is_prox must be finite"):
        is_prox(lambda y: torch.sqrt(sided * y), sided)  # each sample is defined at its own point only
    with pytest.raises(AttributeError):
        is_prox(torch.relu, z).smallest = 0.0  # type: ignore[misc]


def test_a_rewritten_layer_is_no_prox() -> None:
    net = mlp(nn.Tanh, 3, 4, 5, 4, 2)
    cell = from_feedforward(net)[0].cell
    x = points(6, 3)
    z = 0.1 * points(6, *cell.layers[0].state_shape, seed=1)
    assert [is_prox(layer.bind(x), z).holds for layer in cell.layers] == [True, True, False, False]
    for layer in cell.layers[2:]:
        assert torch.linalg.matrix_norm(layer.W.detach(), 2) > 1.1
        test = is_prox(layer.bind(x), z)
        assert test.largest > 1
        assert test.asymmetry < 1e-12
        assert "expansive" in test.explain()
    later = DeepOptEq(cell.layers[1:]).bind(x)
    assert not is_prox(later, z)
    assert "not a gradient" in is_prox(later, z).explain()
    assert is_prox(cell.bind(x), z)  # the composition of all is constant in z


def test_a_result_with_nan_holds_not() -> None:
    assert not ProxTest(math.nan, 0.0, 1.0, 1.0, 1e-6)
