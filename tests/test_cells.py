"""The cells: what every one must satisfy, over a zoo of them, and the mathematics of each."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils import parametrize

from cell_conformance import (
    CellConformance,
    IndependentCellConformance,
    ModuleConformance,
    assert_same,
    check_ensemble,
    check_forward_mode,
    dense_jacobian,
    equilibrium_of,
    function_of,
    layer_of,
    relative_error,
)
from cell_zoo import (
    CHANNELS_IN,
    FEATURES,
    INPUTS,
    MONOTONE,
    SIZE,
    ZOO,
    Entry,
    affine,
    conv,
    deep,
    dense,
    depthwise,
    matrix_of,
    multivariate,
    norm_of,
    random_matrix,
    random_S,
    scale_weights,
)
from conformance import check_honest, lengths, residual
from opteq import Cell, Equilibrium, Status, Stop, record, solve
from opteq.cells import (
    AffineOptEq,
    ConvOptEq,
    DeepOptEq,
    DepthwiseOptEq,
    FunctionCell,
    Monotone,
    MonotoneConv,
    MultivariateOptEq,
    OptEq,
    Residual,
    StackedOptEq,
    WideOptEq,
)
from opteq.cells.optimization import DenseOptEqMap
from opteq.cells.wide import WideMap
from opteq.convex import ConvexMap
from opteq.gradients import Implicit, default_solver
from opteq.linear import CG, GMRES
from opteq.operators import Factors
from opteq.regularizers import HSIC, L1, L2, Decorrelation, Incay
from opteq.solvers import Accelerated, Newton, Picard

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

EYE = torch.eye(FEATURES, dtype=torch.float64)

# Of a dense layer each activation has one alpha, mu and shape here: on these alone no sample comes to depend on another.
ONE_OF_EACH = {n: entry for n, entry in ZOO.items() if "dense" not in n or "alpha=0.4 mu=1" in n or "alpha" not in n}
UNCOUPLED = {name: entry for name, entry in ONE_OF_EACH.items() if not entry.coupled}
# As modules, layers that differ only in their activation or in the size of their kernel are the same.
ALIKE = (*(f"dense {name} " for name in MONOTONE if name not in ("relu", "tanh")), "conv 1 ", "conv 5 ")
MODULES = {name: entry for name, entry in ONE_OF_EACH.items() if not name.startswith(ALIKE)}


@pytest.mark.parametrize("entry", ZOO.values(), ids=list(ZOO))
class TestCells(CellConformance):
    pass


@pytest.mark.parametrize("entry", MODULES.values(), ids=list(MODULES))
class TestModules(ModuleConformance):
    pass


@pytest.mark.parametrize("entry", UNCOUPLED.values(), ids=list(UNCOUPLED))
class TestIndependentCells(IndependentCellConformance):
    pass


# Derivatives of representatives, in every mode

SMOOTH = {name: entry for name, entry in ZOO.items() if entry.smooth}
REPRESENTATIVES = [
    "dense tanh alpha=0.4 mu=1 hidden>features",
    "conv 2 zeros tanh",
    "depthwise 3 zeros",
    "constrained dense",
    "constrained conv zeros",
    "constrained depthwise",
    "deep 2 learn_alpha",
    "deep 1 Incay",
    "stacked 2",
    "wide dense, activations",
    "wide learnt alphas",
    "affine",
    "affine orthogonal",
    "multivariate",
]
COUPLED = [name for name, entry in ZOO.items() if entry.coupled]


def checkable(entry: Entry) -> tuple[Callable[..., Tensor], list[Tensor]]:
    function, parameters = function_of(layer_of(entry.make(), stop=Stop(rtol=1e-13, max_steps=500)))
    return function, [t.requires_grad_() for t in (entry.x(1), *parameters)]


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_gradcheck(name):
    function, inputs = checkable(SMOOTH[name])
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["conv 2 zeros tanh", "constrained dense", "deep 2 learn_alpha", "affine", "multivariate"])
def test_gradgradcheck(name):
    function, inputs = checkable(SMOOTH[name])
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", [*REPRESENTATIVES, *COUPLED])
def test_forward_mode_is_the_transpose_of_reverse_mode(name):
    check_forward_mode(ZOO[name])


@pytest.mark.parametrize("name", [*REPRESENTATIVES, *COUPLED])
def test_vmap_is_the_loop(name):
    entry = ZOO[name]
    layer, xs = layer_of(entry.make()), torch.stack([entry.x(3, seed=i) for i in range(2)])
    torch.testing.assert_close(vmap(lambda x: layer(x))(xs), torch.stack([layer(x) for x in xs]), rtol=1e-9, atol=1e-10)
    function, parameters = function_of(layer)
    slopes = vmap(torch.func.grad(lambda x: function(x, *parameters).square().sum()))(xs)
    loop = torch.stack([torch.func.grad(lambda x: function(x, *parameters).square().sum())(x) for x in xs])
    torch.testing.assert_close(slopes, loop, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["dense tanh alpha=0.4 mu=1 hidden>features", "constrained conv zeros", "deep 2 learn_alpha", "affine"]
)
def test_an_ensemble_under_vmap_is_the_loop(name):
    check_ensemble(ZOO[name])


# Regularisers that couple the batch


def coupled_cells() -> tuple[OptEq, OptEq]:
    return dense(0, activation="tanh", alpha=0.6), dense(1, hidden=3, activation="softplus", mu=2.0)


both_couplings = pytest.mark.parametrize("regularizer", [Decorrelation(0.5), HSIC(bandwidth=1.0)], ids=["Decorrelation", "HSIC"])


@both_couplings
def test_a_coupled_sample_depends_on_its_batch_mates(regularizer):
    cell, x = deep(*coupled_cells(), regularizer=regularizer), random_matrix(6, INPUTS, seed=1)
    assert not cell.bind(x).independent
    among, alone = equilibrium_of(cell, x)[:3], equilibrium_of(cell, x[:3])
    assert (lengths(among - alone) > 1e-5 * lengths(alone)).all()
    evaluated = cell.eval()
    assert not evaluated.bind(x).independent  # evaluation="batch"
    assert torch.equal(equilibrium_of(evaluated, x)[:3], among)


@both_couplings
def test_evaluation_none_is_the_unregularised_cell(regularizer):
    cell, x = deep(*coupled_cells(), regularizer=regularizer, evaluation="none"), random_matrix(6, INPUTS, seed=1)
    plain = deep(*coupled_cells())
    trained = equilibrium_of(cell, x)
    assert not torch.allclose(trained, equilibrium_of(plain, x), rtol=1e-5, atol=1e-6)
    assert cell.eval().bind(x).independent
    assert torch.equal(equilibrium_of(cell, x), equilibrium_of(plain, x))
    assert torch.equal(equilibrium_of(cell.train(), x), trained)


@both_couplings
def test_evaluation_frozen_needs_statistics_and_then_treats_each_sample_alone(regularizer):
    cell, x = deep(*coupled_cells(), regularizer=regularizer, evaluation="frozen"), random_matrix(6, INPUTS, seed=1)
    trained = equilibrium_of(cell, x)
    cell.eval()
    with pytest.raises(RuntimeError, match=r"no statistics yet: call freeze\(z\)"):
        layer_of(cell)(x)
    kept = trained.clone()
    cell.freeze(kept)
    kept.zero_()  # what was frozen is a copy
    assert torch.equal(cell.reference, trained)
    fn = cell.bind(x)
    assert fn.independent
    frozen = equilibrium_of(cell, x)
    assert residual(fn, frozen).max() <= 1e-11
    assert not torch.allclose(frozen, equilibrium_of(deep(*coupled_cells()), x), rtol=1e-5, atol=1e-6)
    for i in range(6):
        assert_same(frozen[i : i + 1], equilibrium_of(cell, x[i : i + 1]), 1e-10)
    assert torch.equal(equilibrium_of(cell.train(), x), trained)


def test_frozen_decorrelation_has_the_equilibrium_of_the_batch_that_it_was_frozen_on():
    """There its gradient is that of Decorrelation."""
    cell, x = deep(*coupled_cells(), regularizer=Decorrelation(0.5), evaluation="frozen"), random_matrix(6, INPUTS, seed=1)
    trained = equilibrium_of(cell, x)
    cell.freeze(trained)
    assert_same(equilibrium_of(cell.eval(), x), trained, 1e-10)


@both_couplings
def test_the_frozen_statistics_are_part_of_the_state_dict(regularizer):
    def make() -> DeepOptEq:
        return deep(*coupled_cells(), regularizer=regularizer, evaluation="frozen")

    cell, x = make(), random_matrix(6, INPUTS, seed=1)
    cell.freeze(equilibrium_of(cell, x))
    other = make()
    other.load_state_dict(cell.state_dict())
    assert torch.equal(equilibrium_of(other.eval(), x), equilibrium_of(cell.eval(), x))
    other.freeze(equilibrium_of(cell, x[:3]))  # of another batch size
    other.load_state_dict(cell.state_dict())
    assert torch.equal(equilibrium_of(other, x), equilibrium_of(cell, x))


@pytest.mark.parametrize("gamma", [0.1, 0.15, 0.2])
def test_the_backward_solve_of_a_coupled_batch_converges_where_plain_iteration_does(gamma):
    """Its Jacobian joins the samples: a solver that treats each sample alone must not break down on that."""
    torch.manual_seed(0)
    cell = deep(dense(5, activation="tanh", hidden=8, factor=0.9), regularizer=Decorrelation(0.1), gamma=gamma)
    x = random_matrix(16, INPUTS, seed=3)
    z = layer_of(cell, Picard(), Stop(rtol=1e-12, max_steps=20000))(x)
    J = dense_jacobian(cell.bind(x), z)
    assert float(torch.linalg.eigvals(J).abs().max()) < 0.99
    g = random_matrix(*z.shape, seed=4)
    with record() as log:
        found = torch.autograd.grad(z, cell.cells[0].W, g)[0]
    v = torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - J.T, g.flatten()).reshape(z.shape)
    wanted = torch.autograd.grad(cell.bind(x)(z.detach()), cell.cells[0].W, v)[0]
    assert relative_error(found, wanted) < 1e-8
    assert log[0].status is Status.CONVERGED


# The backward solver


def realistic(cell: OptEq, square: float) -> OptEq:
    cell = cell.double()
    with torch.no_grad():
        cell.W.mul_(math.sqrt(square) / torch.linalg.matrix_norm(cell.W, 2))
    return cell


def wide_cell(make: Callable[..., OptEq]) -> WideOptEq:
    return WideOptEq([make(activation="leaky_relu"), make(alpha=0.5)])


@pytest.mark.parametrize("kind", ["relu", "tanh", "softplus", "identity", "alpha", "deep 1", "wide", "orthogonal", "multivariate"])
def test_symmetric_cells_take_cg_backward_with_as_few_products_as_full_gmres(kind):
    torch.manual_seed(0)
    features, hidden = 60, 80

    def make(**options) -> OptEq:
        return realistic(OptEq(20, features, hidden, **options), 0.98)

    if kind == "alpha":
        cell = make(alpha=0.5)
    elif kind == "deep 1":
        cell = deep(make())
    elif kind == "wide":
        cell = wide_cell(make)
    elif kind == "orthogonal":
        cell = AffineOptEq(make(), orthogonal=True).double()
        cell.A = torch.linalg.qr(random_matrix(features, features, seed=0))[0]
    elif kind == "multivariate":
        cell = realistic(MultivariateOptEq(20, features, hidden), 0.98)
        cell.S = random_S(hidden, 0)
    else:
        cell = make(activation=kind)
    x = random_matrix(8, 20, seed=1)
    backward = Stop(rtol=1e-8, max_steps=1000)
    products = {}
    for linear in (None, CG(), GMRES(restart=200)):
        z = layer_of(cell, stop=Stop(rtol=1e-10, max_steps=5000), gradient=Implicit(backward, linear))(x)
        g = random_matrix(*z.shape, seed=2)
        with record() as log:
            torch.autograd.grad(z, list(cell.parameters()), g, allow_unused=True)
        (solution,) = log
        assert solution.status is Status.CONVERGED
        products[type(linear).__name__] = solution.evals
    print(f"products of {kind}: CG {products['NoneType']}, full GMRES {products['GMRES']}")
    assert abs(products["NoneType"] - products["CG"]) <= 2  # in the dual, where there is one
    assert products["NoneType"] <= math.ceil(1.1 * products["GMRES"]) + 1


def test_cells_that_are_not_symmetric_take_gmres():
    cell, x = ZOO["stacked 2"].make(), random_matrix(4, INPUTS, seed=1)
    counts = {}
    for linear in (None, GMRES(), CG()):
        z = layer_of(cell, gradient=Implicit(Stop(rtol=1e-10, max_steps=300), linear), on_failure="ignore")(x)
        with record() as log:
            z.sum().backward()
        counts[type(linear).__name__] = log[0].evals
        assert (log[0].status is Status.CONVERGED) is not isinstance(linear, CG)
    assert counts["NoneType"] == counts["GMRES"] < counts["CG"]


# The norm ball


def assert_in_the_ball(cell: Cell) -> None:
    """L ||W||^2 <= (1 - margin) mu, ||W|| by dense SVDs in double precision, for two sizes of images."""
    twin = deepcopy(cell)
    for size in (SIZE, (7, 7)):
        operator = twin.operator().replace_leaves(lambda leaf: leaf.tensor.detach().double())
        shape = (cell.features,) if isinstance(cell, OptEq) else (cell.channels, *size)
        norm = float(torch.linalg.matrix_norm(matrix_of(operator, shape), 2))
        assert cell.activation.lipschitz * norm**2 <= (1 - cell.margin) * cell.mu * (1 + 1e-12)


CONSTRAINED: dict[str, Callable[..., Cell]] = {
    "dense": lambda **o: OptEq(INPUTS, FEATURES, 6, activation="sigmoid", mu=2.0, **o),
    "dense relu": lambda **o: OptEq(INPUTS, FEATURES, 3, **o),
    **{
        f"conv {k} {padding}": lambda k=k, padding=padding, **o: ConvOptEq(CHANNELS_IN, 3, 4, k, padding=padding, **o)
        for k in (1, 2, 3, 5)
        for padding in ("zeros", "circular")
    },
    "depthwise zeros": lambda **o: DepthwiseOptEq(CHANNELS_IN, 3, 4, mu=0.5, **o),
    "depthwise circular": lambda **o: DepthwiseOptEq(CHANNELS_IN, 3, 4, 5, padding="circular", activation="sigmoid", **o),
    "multivariate": lambda **o: MultivariateOptEq(INPUTS, FEATURES, 6, **o),
}
constrained = pytest.mark.parametrize("make", CONSTRAINED.values(), ids=list(CONSTRAINED))


def input_of(cell: Cell, batch: int = 4) -> Tensor:
    shape = (INPUTS,) if isinstance(cell, OptEq) else (CHANNELS_IN, *SIZE)
    return random_matrix(batch, *shape, seed=5).to(next(cell.parameters()).dtype)


@constrained
@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 1e-3), (torch.float64, 0.5)])
def test_a_constrained_cell_never_leaves_the_ball(make, margin, dtype):
    torch.manual_seed(0)
    cell = make(constrained=True, margin=margin).to(dtype)
    assert_in_the_ball(cell)
    scale_weights(cell, 100.0)
    assert_in_the_ball(cell)
    edge = math.sqrt((1 - margin) * cell.mu / cell.activation.lipschitz)
    assert norm_of(cell, (7, 7)) > 0.75 * edge  # scaled to the edge: that of images of every size


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_autocast_rounds_no_weight(name):
    """Less precision is for what is made of x: rounded W leave their ball, rounded A are not orthogonal."""
    entry = ZOO[name]
    cell, x = entry.make().float(), entry.x(1).float()
    exact = cell.bind(x).leaves()
    with torch.autocast("cpu", torch.bfloat16):
        found = cell.bind(x).leaves()
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(found, exact, strict=True) if not a.per_sample)


@pytest.mark.parametrize("regularizer", [Decorrelation(), HSIC()])
def test_autocast_rounds_no_frozen_statistics(regularizer):
    cell = DeepOptEq([dense(0)], regularizer=regularizer, evaluation="frozen").float().eval()
    cell.freeze(random_matrix(6, FEATURES, seed=0).float())
    exact = cell.step().leaves()
    with torch.autocast("cpu", torch.bfloat16):
        found = cell.step().leaves()
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(found, exact, strict=True))


@constrained
def test_training_never_leaves_the_ball(make):
    torch.manual_seed(0)
    cell = make(constrained=True).double()
    x = input_of(cell)
    layer = layer_of(cell, stop=Stop(rtol=1e-5, max_steps=3000))
    optimizer = torch.optim.SGD(cell.parameters(), 1.0)
    losses = []
    for _ in range(4):
        loss = -layer(x).square().mean()  # away from 0: the weights grow
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in cell.parameters())
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimizer.step()
        assert_in_the_ball(cell)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@constrained
def test_inside_the_ball_the_constraint_changes_nothing(make):
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    cell = make(constrained=True).double()
    x = input_of(cell)
    for factor in (1.0, 0.1):
        scale_weights(plain, factor)
        scale_weights(cell, factor)
        assert torch.equal(equilibrium_of(cell, x), equilibrium_of(plain, x))
    scale_weights(plain, 1000.0)
    assert norm_of(plain) > 1.5 * plain.norm_limit  # nobody scales an unconstrained cell
    assert not plain.constrained


@pytest.mark.parametrize("make", [m for n, m in CONSTRAINED.items() if "depthwise" not in n])
def test_a_constrained_weight_can_be_assigned_drawn_anew_and_saved(make):
    torch.manual_seed(0)
    cell, other = make(constrained=True).double(), make(constrained=True).double()
    wanted = random_matrix(*cell.W.shape, seed=9)
    cell.W = wanted
    ratio = cell.W / wanted
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))  # scaled as a whole
    assert ratio.flatten()[0] < 1
    assert_in_the_ball(cell)
    small = 1e-3 * wanted
    cell.W = small
    assert torch.equal(cell.W, small)
    cell.W = wanted
    assert not torch.equal(other.W, cell.W)
    other.load_state_dict(cell.state_dict())
    assert torch.equal(other.W, cell.W)
    cell.reset_parameters()
    assert 0.1 < norm_of(cell) < 0.999
    assert not torch.equal(other.W, cell.W)


# The mathematics of wide, deep and stacked cells


def plain_layer(cell: OptEq, z: Tensor, x: Tensor) -> Tensor:
    """W' sigma(W z + U x + b) / mu."""
    return cell.activation(z @ cell.W.T + x @ cell.U.T + cell.b) @ cell.W / cell.mu


def three_cells(alphas: tuple[float, ...] = (0.5, 0.5, 0.5), **options) -> list[OptEq]:
    return [dense(i, hidden=3 + i, alpha=alpha, **{"activation": "tanh", **options}) for i, alpha in enumerate(alphas)]


def test_wide_is_the_solution_of_the_sum_of_all_layers():
    cells, x = three_cells(), random_matrix(5, INPUTS, seed=1)
    cell = WideOptEq(cells)
    z = torch.zeros(5, FEATURES, dtype=torch.float64)
    for _ in range(300):
        total = torch.zeros_like(z)
        for layer in cells:
            total = total + plain_layer(layer, z, x)
        z = (total / 3).detach()
    assert_same(equilibrium_of(cell, x), z, 1e-10)


@pytest.mark.parametrize("mus", [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0)])
@pytest.mark.parametrize("alphas", [(0.4, 0.4, 0.4), (0.1, 0.5, 1.0)])
def test_wide_weights_its_layers_by_alpha(alphas, mus):
    """sum alpha_l z = sum alpha_l W_l' sigma(W_l z + u_l) / mu_l."""
    cells = [dense(i, hidden=3 + i, alpha=a, mu=m, activation="softplus") for i, (a, m) in enumerate(zip(alphas, mus, strict=True))]
    x = random_matrix(5, INPUTS, seed=1)
    z = equilibrium_of(WideOptEq(cells), x)
    right = sum(cell.alpha * plain_layer(cell, z, x) for cell in cells)
    torch.testing.assert_close(sum(alphas) * z, right, rtol=1e-10, atol=1e-11)


def test_wide_maps_as_one_matrix_and_as_a_sum_agree():
    cells, x = three_cells(), random_matrix(5, INPUTS, seed=1)
    one = WideOptEq(cells).bind(x)
    assert isinstance(one, DenseOptEqMap)
    assert one.W.W.shape == (3 + 4 + 5, FEATURES)
    plain = tuple(replace(cell.bind(x), alpha=1.0) for cell in cells)
    general = WideMap(plain, (1 / 3, 1 / 3, 1 / 3))
    z, v = random_matrix(5, FEATURES, seed=2), random_matrix(5, FEATURES, seed=3)
    torch.testing.assert_close(one(z), general(z), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(one.linearize(z).jvp(v), general.linearize(z).jvp(v), rtol=1e-13, atol=1e-14)
    # alphas, activations or mus that differ need the sum; mus that go with the alphas do not
    assert isinstance(WideOptEq(three_cells((0.5, 0.5, 0.4))).bind(x), WideMap)
    assert isinstance(WideOptEq([dense(0), dense(1, activation="tanh")]).bind(x), WideMap)
    assert isinstance(WideOptEq([dense(0), dense(1, mu=2.0)]).bind(x), WideMap)
    assert isinstance(WideOptEq([dense(0, alpha=0.5), dense(1, mu=2.0)]).bind(x), DenseOptEqMap)


def test_wide_is_the_limit_of_deep_for_small_alphas():
    x = random_matrix(5, INPUTS, seed=1)
    wide = equilibrium_of(WideOptEq(three_cells((1.0, 0.5, 0.25))), x)
    gaps = []
    for step in (0.1, 0.01, 0.001):
        z = equilibrium_of(deep(*three_cells((step, step / 2, step / 4))), x)
        gaps.append(float(torch.linalg.vector_norm(z - wide) / torch.linalg.vector_norm(wide)))
    assert gaps[1] < 0.2 * gaps[0]
    assert gaps[2] < 0.2 * gaps[1] < 1e-2


def test_a_wide_layer_of_multivariate_cells_is_solved():
    cells = [multivariate(i) for i in range(2)]
    x = random_matrix(5, INPUTS, seed=1)
    z = equilibrium_of(WideOptEq(cells), x)
    right = sum((z @ c.W.T + x @ c.U.T + c.b) @ c.S @ c.W for c in cells)
    torch.testing.assert_close(2 * z, right, rtol=1e-10, atol=1e-11)


def test_deep_is_the_composition_of_its_layers():
    cells, x = three_cells((1.0, 0.4, 0.7)), random_matrix(5, INPUTS, seed=1)
    z = torch.zeros(5, FEATURES, dtype=torch.float64)
    for _ in range(200):
        for cell in cells:
            z = (cell.alpha * plain_layer(cell, z, x) + (1 - cell.alpha) * z).detach()
    assert_same(equilibrium_of(deep(*cells), x), z, 1e-10)


@pytest.mark.parametrize(
    ("regularizer", "mode", "step"),
    [
        (L2(), "gradient", lambda z, g: z - g * z),
        (L2(), "prox", lambda z, g: z / (1 + g)),
        (L1(), "prox", lambda z, g: z.sign() * (z.abs() - g).clamp(min=0)),
        (Incay(0.5), "gradient", lambda z, g: z * (1 + 4 * g / (z.square().sum(1, keepdim=True) + 1.0) ** 2)),
    ],
    ids=["L2 gradient", "L2 prox", "L1 prox", "Incay"],
)
def test_the_regulariser_comes_before_the_first_layer(regularizer, mode, step):
    cells, x = three_cells((1.0, 0.4, 0.7)), random_matrix(5, INPUTS, seed=1)
    z = torch.zeros(5, FEATURES, dtype=torch.float64)
    for _ in range(200):
        z = step(z, 0.05)
        for cell in cells:
            z = (cell.alpha * plain_layer(cell, z, x) + (1 - cell.alpha) * z).detach()
    assert_same(equilibrium_of(deep(*cells, regularizer=regularizer, mode=mode, gamma=0.05), x), z, 1e-10)


@pytest.mark.parametrize("alphas", [(1.0, 1.0, 1.0), (0.4, 0.4, 0.4), (0.3, 1.0, 0.6)])
def test_stacked_is_the_path_of_deep(alphas):
    """Lemma 3: z~ = (z_1, ..., z_{L-1}, z_0)."""
    cells, x = three_cells(alphas), random_matrix(5, INPUTS, seed=1)
    z0 = equilibrium_of(deep(*cells), x)
    stacked = equilibrium_of(StackedOptEq(cells), x)
    path = deep(*cells).bind(x).path(z0)
    assert_same(stacked, torch.stack([*path[1:-1], z0], dim=1), 1e-9)
    assert_same(stacked[:, -1], z0, 1e-9)


def test_stacked_is_the_one_layer_of_block_matrices():
    cells, x, alpha = three_cells(), random_matrix(5, INPUTS, seed=1), 0.5
    W = torch.block_diag(*(cell.W for cell in cells)).detach()
    P = torch.kron(torch.eye(3, dtype=torch.float64).roll(1, 0), EYE)
    u = torch.cat([x @ cell.U.T + cell.b for cell in cells], dim=1).detach()
    assert torch.equal(P @ torch.arange(12.0, dtype=torch.float64), torch.arange(12.0, dtype=torch.float64).roll(FEATURES))
    fn = StackedOptEq(cells).bind(x)
    z = random_matrix(5, 3 * FEATURES, seed=2)

    def by_hand(z: Tensor) -> Tensor:
        return alpha * torch.tanh(z @ P.T @ W.T + u) @ W + (1 - alpha) * z @ P.T

    torch.testing.assert_close(fn(z.reshape(5, 3, FEATURES)).flatten(1), by_hand(z), rtol=1e-13, atol=1e-13)
    found = equilibrium_of(StackedOptEq(cells), x).flatten(1)
    torch.testing.assert_close(found, by_hand(found), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("make", [dense, conv, depthwise, multivariate])
def test_alpha_does_not_change_the_equilibrium_of_one_layer(make):
    shape = (INPUTS,) if make in (dense, multivariate) else (CHANNELS_IN, *SIZE)
    x = random_matrix(5, *shape, seed=1)
    first = equilibrium_of(make(0, alpha=1.0), x)
    for alpha in (0.7, 0.1):
        assert_same(equilibrium_of(make(0, alpha=alpha), x), first, 1e-9)


# The other cells


@pytest.mark.parametrize("orthogonal", [False, True])
def test_affine_moves_the_equilibrium(orthogonal):
    """z = A^-1 (z_f - t)."""
    cell, x = affine(0, orthogonal=orthogonal), random_matrix(5, INPUTS, seed=1)
    inner = equilibrium_of(cell.cell, x)
    wanted = torch.linalg.solve(cell.A, (inner - cell.t).T).T.detach()
    assert_same(equilibrium_of(cell, x), wanted, 1e-9)
    gram = (cell.A @ cell.A.T).detach()
    assert torch.allclose(gram, EYE, rtol=0, atol=1e-12) is orthogonal
    assert not torch.allclose(cell.A, EYE, rtol=0, atol=0.1)


def test_affine_begins_as_the_cell_itself():
    base, x = dense(0), random_matrix(5, INPUTS, seed=1)
    for orthogonal in (False, True):
        cell = AffineOptEq(base, orthogonal=orthogonal)
        assert torch.equal(cell.A.detach().double(), EYE)
        assert not cell.t.any()
        assert_same(equilibrium_of(cell, x), equilibrium_of(base, x), 1e-9)


def test_orthogonal_affine_stays_orthogonal_in_training():
    cell, x = affine(0, orthogonal=True), random_matrix(5, INPUTS, seed=1)
    before = cell.A.detach().clone()
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (layer_of(cell)(x) - 1).square().sum().backward()
        optimizer.step()
    A = cell.A.detach()
    torch.testing.assert_close(A @ A.T, EYE, rtol=0, atol=1e-12)
    assert not torch.allclose(A, before, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("hidden", "mu"), [(3, 1.0), (4, 2.0), (7, 1.0)])
def test_multivariate_is_a_linear_solve(hidden, mu):
    cell, x = multivariate(0, hidden=hidden, mu=mu, alpha=0.6), random_matrix(5, INPUTS, seed=1)
    W, S, u = cell.W.detach(), cell.S.detach(), (x @ cell.U.T + cell.b).detach()
    wanted = torch.linalg.solve(EYE - W.T @ S @ W / mu, W.T @ S @ u.T / mu).T
    assert_same(equilibrium_of(cell, x), wanted, 1e-10)
    assert_same(S, random_S(hidden, 0), 1e-12)  # as assigned


def test_multivariate_keeps_S_symmetric_between_0_and_I():
    torch.manual_seed(0)
    cell = MultivariateOptEq(INPUTS, FEATURES, 5).double()
    torch.testing.assert_close(cell.S.detach(), torch.eye(5, dtype=torch.float64) / 2)
    for scale in (0.0, 1.0, 1e3):
        with torch.no_grad():
            cell.parametrizations.S.original.copy_(scale * random_matrix(5, 5, seed=1))
        assert torch.equal(cell.S, cell.S.T)
        values = torch.linalg.eigvalsh(cell.S)
        assert values.min() >= -1e-12
        assert values.max() <= 1 + 1e-12
    cell.S = torch.eye(5, dtype=torch.float64)  # the edge
    torch.testing.assert_close(cell.S.detach(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-5)
    cell.S = torch.zeros(5, 5, dtype=torch.float64)
    assert cell.S.abs().max() < 1e-6
    for wrong in (random_matrix(5, 5, seed=2), torch.eye(5, 4, dtype=torch.float64), torch.ones(5, dtype=torch.float64)):
        with pytest.raises(ValueError, match="'S' parameter of MultivariateOptEq must be symmetric"):
            cell.S = wrong
    with pytest.raises(ValueError, match=r"'S' parameter of MultivariateOptEq must be of eigenvalues in \[0, 1\]"):
        cell.S = 2 * torch.eye(5, dtype=torch.float64)
    Q = torch.linalg.qr(random_matrix(32, 32, seed=3)[:, :16])[0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # a projection, rounded
        wide = MultivariateOptEq(INPUTS, FEATURES, 32).to(dtype)
        wide.S = (Q @ Q.T).to(dtype)
        torch.testing.assert_close(wide.S.detach().double(), Q @ Q.T, rtol=0, atol=4 * torch.finfo(dtype).eps + 1e-3)
    half = cell.to(torch.bfloat16)
    half.S = torch.eye(5, dtype=torch.bfloat16) / 4
    torch.testing.assert_close(half.S.detach(), torch.eye(5, dtype=torch.bfloat16) / 4)


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_a_1x1_convolution_is_the_dense_layer_at_each_pixel(padding):
    image = conv(0, 1, padding=padding, activation="tanh", alpha=0.4, mu=2.0)
    pixel = OptEq(CHANNELS_IN, 2, 3, activation="tanh", alpha=0.4, mu=2.0).double()
    with torch.no_grad():
        pixel.W.copy_(image.W[:, :, 0, 0])
        pixel.U.copy_(image.U[:, :, 0, 0])
        pixel.b.copy_(image.b)
    x = random_matrix(5, CHANNELS_IN, *SIZE, seed=1)
    by_pixel = equilibrium_of(pixel, x.movedim(1, 3).reshape(-1, CHANNELS_IN)).reshape(5, *SIZE, 2).movedim(3, 1)
    assert_same(equilibrium_of(image, x), by_pixel, 1e-9)


@pytest.mark.parametrize("kernel_size", [1, 2, 3])
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_depthwise_is_the_convolution_with_the_product_kernel(padding, kernel_size):
    cell = depthwise(0, kernel_size, padding=padding, activation="softplus")
    full = ConvOptEq(CHANNELS_IN, 2, 3, kernel_size, padding=padding, activation="softplus").double()
    with torch.no_grad():
        full.W.copy_(cell.W2 * cell.W1[:, 0])
        full.U.copy_(cell.U2 * cell.U1[:, 0])
        full.b.copy_(cell.b)
    x = random_matrix(5, CHANNELS_IN, *SIZE, seed=1)
    assert_same(equilibrium_of(cell, x), equilibrium_of(full, x), 1e-9)


# Initial weights


FRESH: dict[str, Callable[[], Cell]] = {
    "dense": lambda: OptEq(10, 30, 40),
    "dense, few hidden": lambda: OptEq(10, 64, 8),
    "dense, many hidden": lambda: OptEq(10, 8, 64),
    "dense constrained": lambda: OptEq(10, 30, 40, constrained=True),
    "conv 1": lambda: ConvOptEq(3, 8, 16, 1),
    "conv 3": lambda: ConvOptEq(3, 8, 16, 3),
    "conv 5 circular": lambda: ConvOptEq(3, 8, 8, 5, padding="circular"),
    "conv constrained": lambda: ConvOptEq(3, 8, 16, 3, constrained=True),
    "depthwise 3": lambda: DepthwiseOptEq(3, 8, 16, 3),
    "depthwise 5 circular": lambda: DepthwiseOptEq(3, 8, 16, 5, padding="circular", constrained=True),
    "multivariate": lambda: MultivariateOptEq(10, 30, 40),
}


@pytest.mark.parametrize("name", FRESH)
def test_fresh_weights_are_small(name):
    norms = []
    for seed in range(2):
        torch.manual_seed(seed)
        cell = FRESH[name]()
        norms.append(norm_of(cell, (6, 6)))
        cell.reset_parameters()
        norms.append(norm_of(cell, (6, 6)))
    assert len(set(norms)) == 4
    assert min(norms) > 0.2
    assert max(norms) < 0.8
    fan = {"U": math.prod(cell.U.shape[1:])} if hasattr(cell, "U") else {"U1": cell.kernel_size**2, "U2": cell.in_channels}
    fan["b"] = fan.get("U", cell.sizes.get("in_channels"))
    for part, fan_in in fan.items():
        largest = float(getattr(cell, part).detach().abs().max())
        assert (0.5 if getattr(cell, part).numel() > 9 else 0.1) / math.sqrt(fan_in) < largest <= 1 / math.sqrt(fan_in)


# alpha as a parameter


@pytest.mark.parametrize("raw", [-1000.0, -50.0, -3.0, 0.0, 3.0, 50.0, 1000.0])
def test_a_learnt_alpha_is_in_the_unit_interval_whatever_its_parameter(raw):
    cell = deep(*coupled_cells(), learn_alpha=True)
    for layer in cell.layers:
        with torch.no_grad():
            layer.parametrizations.alpha.original.fill_(raw)
        assert 0 < float(layer.alpha.detach()) <= 1
        assert float(layer.alpha.detach()) == pytest.approx(max(1e-6, 1 / (1 + math.exp(min(-raw, 700.0)))))
    x = random_matrix(3, INPUTS, seed=1)
    layer_of(cell, stop=Stop(rtol=1e-6), on_failure="ignore")(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in cell.parameters())


@pytest.mark.parametrize("name", ["deep 2 learn_alpha", "deep conv learn_alpha"])
def test_the_gradient_of_alpha_is_that_of_finite_differences(name):
    entry = ZOO[name]
    cell, x = entry.make(), entry.x()
    layer = layer_of(cell, stop=Stop(rtol=1e-13, max_steps=500))
    layer(x).square().sum().backward()
    for part in cell.layers:
        raw, gap = part.parametrizations.alpha.original, 1e-5
        values = []
        for shift in (gap, -2 * gap):
            with torch.no_grad():
                raw.add_(shift)
                values.append(float(layer(x).square().sum()))
        with torch.no_grad():
            raw.add_(gap)
        assert abs(float(raw.grad)) > 1e-6
        assert float(raw.grad) == pytest.approx((values[0] - values[1]) / (2 * gap), rel=1e-5)


def test_alpha_is_made_learnable_once_and_begins_where_it_was():
    first, second = dense(0, alpha=0.4), dense(1)
    cell = DeepOptEq([first, second, first], learn_alpha=True)
    assert first.alpha.item() == pytest.approx(0.4)
    assert second.alpha.item() == pytest.approx(0.999)
    again = DeepOptEq([first], learn_alpha=True)
    assert len(first.parametrizations.alpha) == 1
    assert first.alpha.item() == pytest.approx(0.4)
    assert sum("alpha" in name for name, _ in cell.named_parameters()) == 2
    assert sum("alpha" in name for name, _ in again.named_parameters()) == 1
    assert isinstance(dense(2, alpha=0.4).alpha, float)
    alone, x = layer_of(first), random_matrix(3, INPUTS, seed=1)  # a learnt alpha outside of a deep cell
    assert_same(alone(x), equilibrium_of(dense(0), x), 1e-9)


def test_a_learnt_alpha_can_be_printed_without_a_warning():
    cell = deep(*coupled_cells(), learn_alpha=True)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        text = repr(cell)
    finally:
        torch.set_warn_always(always)
    assert "alpha=0.6" in text


@pytest.mark.parametrize("make", [lambda c: DeepOptEq([c], learn_alpha=True), AffineOptEq], ids=["learn_alpha", "affine"])
def test_new_parameters_are_where_those_of_the_cell_are(make):
    torch.manual_seed(0)
    cell = make(OptEq(INPUTS, FEATURES, 5).double().to("meta"))
    assert {p.device.type for p in cell.parameters()} == {"meta"}
    assert {p.dtype for p in cell.parameters()} == {torch.float64}


BLANK: dict[str, Callable[[], Cell]] = {
    "dense": lambda: OptEq(INPUTS, FEATURES, 5, constrained=True),
    "conv": lambda: ConvOptEq(INPUTS, FEATURES, 5, constrained=True),
    "depthwise": lambda: DepthwiseOptEq(INPUTS, FEATURES, 5, constrained=True),
    "learnt alpha": lambda: DeepOptEq([OptEq(INPUTS, FEATURES, 5, alpha=0.5)], learn_alpha=True),
    "affine": lambda: AffineOptEq(OptEq(INPUTS, FEATURES, 5)),
    "multivariate": lambda: MultivariateOptEq(INPUTS, FEATURES, 5),
    "monotone": lambda: Monotone(INPUTS, FEATURES),
    "monotone conv": lambda: MonotoneConv(INPUTS, FEATURES, size=4),
    "residual": lambda: Residual(FEATURES, 8, groups=4),
}


@pytest.mark.parametrize("make", BLANK.values(), ids=BLANK)
def test_cells_are_made_and_shown_without_numbers_and_filled_later(make):
    torch.manual_seed(0)
    cell = make()
    with torch.device("meta"):
        blank = make()
        assert type(cell).__name__ in repr(blank)
    assert all(p.is_meta for p in blank.parameters())
    assert repr(blank).replace("alpha=?", "alpha=0.5") == repr(cell)
    blank.to_empty(device="cpu").load_state_dict(cell.state_dict())
    assert repr(blank) == repr(cell)


# The dual form


def hard_cell(seed: int, square: float = 0.999, **options) -> OptEq:
    """OptEq with L ||W||^2 = square mu; hidden <, = and > features in turn."""
    torch.manual_seed(seed)
    activation = options.pop("activation", MONOTONE[seed % len(MONOTONE)])
    cell = OptEq(INPUTS, 8, (5, 8, 12)[seed % 3], activation=activation, **options).double()
    with torch.no_grad():
        cell.W.mul_(math.sqrt(square * cell.mu / cell.activation.lipschitz) / torch.linalg.matrix_norm(cell.W, 2))
        cell.U.normal_()
        cell.b.normal_()
    return cell


@pytest.mark.parametrize("activation", MONOTONE)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_equilibrium_of_the_dual_lifts_to_that_of_the_primal(activation, seed):
    cell, x = (
        hard_cell(seed, 0.8, activation=activation, mu=(1.0, 2.0, 0.5)[seed], alpha=(1.0, 0.4, 0.7)[seed]),
        random_matrix(5, 3, seed=1),
    )
    fn = cell.bind(x).detach()
    assert isinstance(fn, ConvexMap)
    dual = fn.dual()
    torch.testing.assert_close(dual.G, dual.G.T, rtol=1e-14, atol=1e-16)
    torch.testing.assert_close(dual.G, fn.W.W @ fn.W.W.T / cell.mu, rtol=1e-13, atol=1e-14)
    s = solve(dual, torch.zeros_like(dual.u), Picard(), Stop(rtol=1e-12, max_steps=3000)).raise_if_failed().z
    z = fn.lift(s)
    assert residual(fn, z).max() <= 1e-10
    assert_same(z, equilibrium_of(cell, x), 1e-9)
    torch.testing.assert_close(cell.activation(fn.hidden(z)), s, rtol=1e-9, atol=1e-10)
    v = random_matrix(*s.shape, seed=2)
    J, jacobian = dense_jacobian(dual, s), dual.linearize(s)
    assert relative_error(jacobian.jvp(v).flatten(), J @ v.flatten()) <= 1e-12
    assert relative_error(jacobian.vjp(v).flatten(), J.T @ v.flatten()) <= 1e-12


def plain_iteration(cells: list[OptEq], x: Tensor) -> list[Tensor]:
    """The equilibria by 40000 plain steps of all cells at once, their matrices filled up with zeros."""
    height, width = max(c.hidden for c in cells), max(c.features for c in cells)
    W = torch.zeros(len(cells), height, width, dtype=x.dtype)
    u = torch.zeros(len(cells), x.shape[0], height, dtype=x.dtype)
    groups: dict[str, list[int]] = {}
    order = sorted(range(len(cells)), key=lambda i: cells[i].activation.name)
    for row, i in enumerate(order):
        cell = cells[i]
        W[row, : cell.hidden, : cell.features] = cell.W.detach()
        u[row, :, : cell.hidden] = (x @ cell.U.T + cell.b).detach()
        groups.setdefault(cell.activation.name, []).append(row)
    parts = [(slice(rows[0], rows[-1] + 1), cells[order[rows[0]]].activation) for rows in groups.values()]
    s, z = torch.empty_like(u), torch.zeros(len(cells), x.shape[0], width, dtype=x.dtype)
    for step in range(40000):
        a = torch.baddbmm(u, z, W.mT)
        for rows, activation in parts:
            s[rows] = activation(a[rows])
        before, z = z, torch.bmm(s, W)
        if step % 100 == 0 and (z - before).abs().max() < 1e-13:
            break
    found = [torch.empty(0)] * len(cells)
    for row, i in enumerate(order):
        found[i] = z[row, :, : cells[i].features]
    return found


def test_newton_and_acceleration_agree_with_plain_iteration_on_hard_problems():
    cells, x = [hard_cell(seed) for seed in range(24)], random_matrix(3, 3, seed=1)
    for seed, (cell, plain) in enumerate(zip(cells, plain_iteration(cells, x), strict=True)):
        fn = cell.bind(x).detach()
        assert residual(fn, plain).max() <= 1e-11
        zeros, other = torch.zeros_like(plain), random_matrix(*plain.shape, seed=seed)
        runs = [(Newton(), zeros, 1e-10), (Newton(), other, 1e-10), (Accelerated(), other if seed % 2 else zeros, 1e-6)]
        for solver, z0, rtol in runs:
            found = solve(fn, z0, solver, Stop(rtol=rtol, max_steps=20000))
            assert found.status is Status.CONVERGED, (seed, solver, found)
            check_honest(found, fn)
            assert_same(found.z, plain, 1100 * rtol)  # (I - J)^-1 is at most 1000
        for solver in (Newton(), Accelerated()):
            again = solve(fn, plain, solver, Stop(rtol=1e-9))
            assert again.steps.tolist() == [0, 0, 0]
            assert torch.equal(again.z, plain)


@pytest.mark.parametrize("seed", [13, 27, 41, 48, 55, 69])
def test_the_default_solver_needs_no_more_steps_than_are_allowed_by_default(seed):
    """Soft thresholds, L ||W||^2 = 0.999 mu: Newton's steps meet many kinks."""
    cell, x = hard_cell(seed), random_matrix(3, 3, seed=1)
    assert cell.activation.name == "soft_threshold"
    assert Equilibrium(cell, on_failure="ignore").solve(x).status is Status.CONVERGED


def test_the_gram_matrix_is_made_once_for_both_solves_and_has_derivatives_where_they_are_wanted(monkeypatch):
    torch.manual_seed(0)
    cell, x = OptEq(3, 6, 5), torch.randn(4, 3)
    fn, kept = cell.bind(x), []
    get = Factors.get

    def noted(self, key, *args):
        found = get(self, key, *args)
        return kept.append(found) or found if key[0] == "gram" else found

    monkeypatch.setattr(Factors, "get", noted)
    layer_of(cell, None, Stop()).solve(x).z.sum().backward()
    assert len(kept) == 2
    assert kept[0] is kept[1]
    with torch.no_grad():
        assert not fn.dual().G.requires_grad
    assert fn.dual().G.requires_grad


def test_the_dual_is_the_default_up_to_twice_as_many_hidden_units_as_features():
    maps = [OptEq(3, 4, hidden).bind(torch.zeros(1, 3)) for hidden in (1, 8, 9)]
    assert [default_solver(fn) == Newton() for fn in maps] == [True, True, False]


@pytest.mark.parametrize(("low", "high", "most"), [(0.1, 0.5, 7), (0.8, 0.99, 26), (0.985, 0.99, 10), (0.9, 0.9999, 30)])
def test_the_default_solver_takes_few_evaluations_on_even_spectra(low, high, most):
    torch.manual_seed(0)
    cell, x = OptEq(128, 128, 128), torch.randn(64, 128)
    left, values, right = torch.linalg.svd(cell.W.detach())
    cell.W.data = left * torch.linspace(low, high, values.numel()) @ right
    fn = cell.bind(x)
    found = solve(fn, cell.initial(x), default_solver(fn)).raise_if_failed()
    assert found.evals <= most


@pytest.mark.parametrize("solver", [Newton(), Accelerated()])
@pytest.mark.parametrize("activation", MONOTONE)
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_no_scale_overflows_or_vanishes_in_the_dual(scale, activation, solver):
    for seed in range(2):
        cell = hard_cell(seed, 0.9, activation=activation)
        with torch.no_grad():
            cell.U.mul_(scale)
            cell.b.mul_(scale)
        x = random_matrix(4, 3, seed=1)
        wanted = equilibrium_of(cell, x, Stop(rtol=1e-10, max_steps=2000))
        single = deepcopy(cell).float()
        fn = single.bind(x.float()).detach()
        found = solve(fn, torch.zeros(4, 8), solver, Stop(rtol=1e-5, max_steps=500))
        assert found.status is Status.CONVERGED
        check_honest(found, fn)
        assert_same(found.z.double(), wanted, 2e-3)


@pytest.mark.parametrize("solver", [Newton(), Accelerated()])
def test_a_nonfinite_sample_costs_the_dual_at_most_one_product(solver):
    layer = layer_of(hard_cell(0, 0.9), solver, Stop(rtol=1e-8), on_failure="ignore")
    x = random_matrix(8, 3, seed=0)
    clean = layer.solve(x)
    others = [0, 1, 2, 4, 5, 6, 7]
    x[3, 1] = math.nan
    found = layer.solve(x)
    assert found.statuses[3] is Status.NONFINITE
    assert_same(found.z[others], clean.z[others], 1e-10)
    assert found.evals <= clean.evals + 1  # W z0, which is 0 for the others


@pytest.mark.parametrize("solver", [Newton(), Accelerated()])
def test_a_sample_takes_the_same_steps_in_the_dual_alone_and_among_others(solver):
    layer, x = layer_of(hard_cell(0, 0.9), solver, Stop(rtol=1e-10, max_steps=1000)), random_matrix(8, 3, seed=0)
    among = layer.solve(x)
    for i in range(8):
        alone = layer.solve(x[i : i + 1])
        assert alone.steps[0] == among.steps[i]
        assert_same(alone.z[0], among.z[i], 1e-12)


@pytest.mark.parametrize("solver", [Newton(), Accelerated()])
@pytest.mark.parametrize("activation", MONOTONE)
def test_an_ill_posed_cell_is_never_called_solved_wrongly(activation, solver):
    solved = 0
    for seed in range(2):
        cell = hard_cell(seed, 1.5**2, activation=activation, mu=(1.0, 2.0)[seed % 2], alpha=(1.0, 0.5)[seed % 2])
        x = random_matrix(5, 3, seed=seed)
        fn = cell.bind(x).detach()
        for rtol in (1e-3, 1e-9):
            with torch.no_grad():
                found = layer_of(cell, solver, Stop(rtol=rtol, max_steps=80), on_failure="ignore").solve(x)
            check_honest(found, fn)
            assert found.z.isfinite().all()
            true = residual(fn, found.z)
            assert (true[found.converged.numpy()] <= rtol * (1 + 1e-3)).all()
            solved += int(found.converged.sum())
    if activation == "identity":  # linear and unstable, but I - J is regular: only true solutions count
        assert solved == 0 or isinstance(solver, Newton)


# Bad arguments

LAYERS: dict[str, Callable[..., Cell]] = {
    "OptEq": lambda **o: OptEq(**{"in_features": 3, "features": 4, "hidden": 5, **o}),
    "MultivariateOptEq": lambda **o: MultivariateOptEq(**{"in_features": 3, "features": 4, "hidden": 5, **o}),
    "ConvOptEq": lambda **o: ConvOptEq(**{"in_channels": 3, "channels": 4, "hidden": 5, **o}),
    "DepthwiseOptEq": lambda **o: DepthwiseOptEq(**{"in_channels": 3, "channels": 4, "hidden": 5, **o}),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *((size, value, error) for size in ("input", "state", "hidden") for value, error in ((0, ValueError), (2.0, TypeError))),
        ("hidden", True, TypeError),
        ("alpha", 0.0, ValueError),
        ("alpha", 1.1, ValueError),
        ("alpha", math.nan, ValueError),
        ("alpha", "1", TypeError),
        ("mu", 0.0, ValueError),
        ("mu", -1.0, ValueError),
        ("mu", math.inf, ValueError),
        ("margin", -0.1, ValueError),
        ("margin", 1.5, ValueError),
        ("constrained", 1, TypeError),
        ("kernel_size", 0, ValueError),
        ("kernel_size", (3, 3), TypeError),
        ("padding", "reflect", ValueError),
        ("activation", "step", ValueError),
        ("activation", torch.relu, TypeError),
    ],
)
def test_layers_refuse_bad_arguments_by_name(kind, name, value, error):
    image = kind in ("ConvOptEq", "DepthwiseOptEq")
    if (name in ("kernel_size", "padding") and not image) or (name == "activation" and kind == "MultivariateOptEq"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            LAYERS[kind](**{name: value})
        return
    names = {"input": "in_channels" if image else "in_features", "state": "channels" if image else "features"}
    name = names.get(name, name)
    with pytest.raises(error, match=f"The '{name}' parameter of {kind} must be"):
        LAYERS[kind](**{name: value})


@pytest.mark.parametrize("kind", ["OptEq", "ConvOptEq", "DepthwiseOptEq"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activations_that_are_not_monotone_are_refused(kind, activation):
    with pytest.raises(ValueError, match=rf"{kind} needs an activation that is monotone .*'{activation}' is not"):
        LAYERS[kind](activation=activation)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_margin_of_one_leaves_no_ball_to_stay_in(kind):
    with pytest.raises(ValueError, match=f"The 'margin' parameter of {kind} must be"):
        LAYERS[kind](margin=1.0, constrained=True)


@pytest.mark.parametrize("kind", [DeepOptEq, StackedOptEq, WideOptEq])
@pytest.mark.parametrize(
    ("cells", "error", "said"),
    [
        ([], ValueError, "not empty"),
        (OptEq(3, 4, 5), TypeError, "a sequence of OptEq"),
        (None, TypeError, "a sequence of OptEq"),
        ([nn.Linear(4, 4)], TypeError, "a sequence of OptEq"),
        ([OptEq(3, 4, 5), FunctionCell(lambda z, x: z, (4,))], TypeError, "a sequence of OptEq"),
        ([AffineOptEq(OptEq(3, 4, 5))], TypeError, "a sequence of OptEq"),
        ([OptEq(3, 4, 5), OptEq(3, 6, 5)], ValueError, r"the same state. Got \['4 features', '6 features'\]"),
        ([OptEq(3, 4, 5), OptEq(2, 4, 5)], ValueError, r"the same input. Got \['2 in_features', '3 in_features'\]"),
        ([ConvOptEq(3, 4, 5), ConvOptEq(3, 2, 5)], ValueError, r"the same state. Got \['2 channels', '4 channels'\]"),
        ([ConvOptEq(3, 4, 5), DepthwiseOptEq(1, 4, 5)], ValueError, r"the same input. Got \['1 in_channels', '3 in_channels'\]"),
        ([ConvOptEq(3, 4, 5), OptEq(3, 4, 5)], ValueError, r"the same state. Got \['4 channels', '4 features'\]"),
    ],
)
def test_cells_of_cells_refuse_what_does_not_fit(kind, cells, error, said):
    with pytest.raises(error, match=rf"The 'cells' parameter of {kind.__name__} must be .*{said}"):
        kind(cells)


@pytest.mark.parametrize("kind", [DeepOptEq, StackedOptEq, WideOptEq])
def test_cells_of_cells_take_any_sequence_and_layers_of_different_hidden_sizes(kind):
    cells = [OptEq(3, 4, 5), OptEq(3, 4, 7, activation="tanh", mu=2.0, alpha=0.5)]
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    first, second, third = (layer_of(kind(given), stop=Stop(rtol=1e-4))(x) for given in (cells, tuple(cells), nn.ModuleList(cells)))
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("mode", {"mode": "proximal"}, ValueError),
        ("mode", {"mode": None, "regularizer": L2()}, ValueError),
        ("evaluation", {"evaluation": "eval"}, ValueError),
        ("gamma", {"gamma": 0.0}, ValueError),
        ("gamma", {"gamma": -1.0}, ValueError),
        ("gamma", {"gamma": "0.1"}, TypeError),
        ("regularizer", {"regularizer": "L2"}, TypeError),
        ("regularizer", {"regularizer": L2}, TypeError),
        ("regularizer", {"regularizer": lambda z: z}, TypeError),
        *(("mode", {"mode": "prox", "regularizer": r}, ValueError) for r in (Incay(), Decorrelation(), HSIC())),
    ],
)
def test_deep_refuses_bad_arguments_by_name(name, options, error):
    with pytest.raises(error, match=f"The '{name}' parameter of DeepOptEq must be"):
        DeepOptEq([OptEq(3, 4, 5)], **options)


def test_deep_names_the_regulariser_without_a_prox():
    with pytest.raises(ValueError, match="'prox' with Incay"):
        DeepOptEq([OptEq(3, 4, 5)], regularizer=Incay(), mode="prox")


@pytest.mark.parametrize("cell", [ConvOptEq(3, 4, 5), nn.Linear(3, 3), None, [OptEq(3, 4, 5)]])
def test_affine_takes_dense_cells_only(cell):
    with pytest.raises(TypeError, match="The 'cell' parameter of AffineOptEq must be an OptEq"):
        AffineOptEq(cell)


def test_freeze_takes_tensors_only():
    cell = DeepOptEq([OptEq(3, 4, 5)], regularizer=Decorrelation())
    for wrong in (None, [1.0], torch.zeros(3, 4, dtype=torch.int64)):
        with pytest.raises(TypeError, match="The 'z' parameter of DeepOptEq must be a floating-point tensor"):
            cell.freeze(wrong)


@pytest.mark.parametrize("kind", ["ConvOptEq", "DepthwiseOptEq"])
def test_images_without_pixels_are_refused(kind):
    with pytest.raises(ValueError, match="The 'x' parameter"):
        layer_of(LAYERS[kind]())(torch.zeros(2, 3, 0, 4))


def test_parametrised_weights_are_listed_as_such():
    assert parametrize.is_parametrized(LAYERS["OptEq"](constrained=True), "W")
    assert not parametrize.is_parametrized(LAYERS["OptEq"]())


@pytest.mark.parametrize("rtol", [1e-4, 1e-8])
def test_a_coupled_batch_converges_as_a_whole(rtol):
    """Samples of different difficulty: the residual is that of the batch that is returned, not of a mixture of iterates."""
    torch.manual_seed(10)
    cell = DeepOptEq([OptEq(4, 5, 6)], regularizer=Decorrelation(eps=0.1)).double()
    scale = torch.tensor([10.0, 1, 1, 1, 1, 1, 0.1, 0.01], dtype=torch.float64)[:, None]
    x = (torch.randn(8, 4).double() * scale).requires_grad_()
    with record() as log:
        solution = layer_of(cell, stop=Stop(rtol=rtol, max_steps=500)).solve(x)
        solution.z.sum().backward()
    fn = cell.bind(x)
    assert fn.coupled
    assert solution.converged.all()
    assert len(set(solution.steps.tolist())) == 1
    gap = (fn(solution.z) - solution.z).norm(dim=1) / fn(solution.z).norm(dim=1)
    assert gap.max() <= rtol * (1 + 1e-6)
    torch.testing.assert_close(solution.residual, gap.detach(), rtol=1e-6, atol=1e-15)
    assert log[1].converged.all()
    short = layer_of(cell, stop=Stop(rtol=rtol, max_steps=2), on_failure="ignore").solve(x)
    gap = (fn(short.z) - short.z).norm(dim=1) / fn(short.z).norm(dim=1)
    torch.testing.assert_close(short.residual, gap.detach(), rtol=1e-6, atol=1e-15)


def test_half_precision_reaches_every_cell():
    torch.manual_seed(0)
    for cell in (AffineOptEq(OptEq(3, 4, 5)), MultivariateOptEq(3, 4, 5), DeepOptEq([OptEq(3, 4, 5).half()], learn_alpha=True)):
        z = Equilibrium(cell.half(), stop=Stop(rtol=0.1))(torch.randn(2, 3).half())
        assert z.dtype == torch.float16
        assert z.isfinite().all()


def test_a_learnt_alpha_is_finite_where_0_999_rounds_to_1():
    deep = DeepOptEq([OptEq(3, 4, 5).bfloat16()], learn_alpha=True)
    assert all(p.isfinite().all() for p in deep.parameters())
    assert deep.cells[0].alpha.dtype == torch.bfloat16


def test_a_loaded_reference_takes_the_dtype_of_the_cell():
    frozen = DeepOptEq([dense(0)], regularizer=HSIC(1.0), evaluation="frozen")
    frozen.freeze(random_matrix(5, FEATURES, seed=0))
    single = DeepOptEq([dense(0)], regularizer=HSIC(1.0), evaluation="frozen").float()
    single.load_state_dict(frozen.state_dict())
    assert single.reference is not None
    assert single.reference.dtype == torch.float32


def test_frozen_needs_statistics_only_where_the_batch_is_coupled():
    cell = DeepOptEq([dense(0)], regularizer=L2(), evaluation="frozen").eval()
    assert cell.step().regularizer == L2()
    coupled = DeepOptEq([dense(0)], regularizer=Decorrelation(), evaluation="frozen")
    with pytest.raises(
        ValueError, match=rf"'z' parameter of DeepOptEq must be a batch of equilibria, of shape \[batch, {FEATURES}"
    ):
        coupled.freeze(torch.randn(5, FEATURES + 1))
    with pytest.raises(ValueError, match="'z' parameter of DeepOptEq must be finite"):
        coupled.freeze(torch.full((5, FEATURES), torch.nan))


def test_an_unknown_activation_is_answered_with_those_that_fit():
    with pytest.raises(ValueError, match="must be one of") as caught:
        OptEq(3, 4, 5, activation="cube")
    assert "gelu" not in str(caught.value)
