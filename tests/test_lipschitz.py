import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bound_zoo import KINDS, ActivationCell, equilibrium, gaussian, image_split, monotone
from cell_zoo import affine, conv, deep, dense, matrix_of, random_matrix
from conformance import write_verify
from opteq import Cell, Equilibrium, Stop
from opteq.cells import ConvOptEq, FunctionCell, GaussianDEQ, Monotone, OptEq, ScaledReLU, StackedOptEq, WideOptEq
from opteq.gradients import Unrolled
from opteq.models import Readout, Repeated, Stem
from opteq.models.separable import TwofoldOptEq
from opteq.operators import Operator
from opteq.regularizers import L2, Decorrelation, Incay
from opteq.solvers import SAM, Anderson, Newton, Picard
from opteq.theory.error import certified_predictions, error_bound
from opteq.theory.lipschitz import LipschitzBound, certified_radius, lipschitz_bound

COVERED = sorted(name for name, kind in KINDS.items() if kind.lipschitz)
TIGHT = Stop(rtol=1e-8, max_steps=400)


def tight(cell: Cell) -> Equilibrium:
    return Equilibrium(cell, Anderson(), TIGHT, on_failure="raise")


def slopes(cell: Cell, x: Tensor) -> tuple[Tensor, Tensor]:
    """||dz/dx|| of each sample, (I - f_z)^-1 f_x by automatic differentiation, and the direction that attains it."""
    z = equilibrium(cell, x)
    n = z[0].numel()
    norms, directions = [], []
    for i in range(len(x)):

        def f(z: Tensor, x: Tensor) -> Tensor:
            return cell.bind(x)(z)

        Jz, Jx = torch.func.jacrev(f, argnums=(0, 1))(z[i : i + 1], x[i : i + 1])
        J = torch.linalg.solve(torch.eye(n) - Jz.reshape(n, n), Jx.reshape(n, -1))
        _, s, vh = torch.linalg.svd(J.detach())
        norms.append(s[0])
        directions.append(vh[0].reshape(x.shape[1:]))
    return torch.stack(norms), torch.stack(directions)


def worst_ratio(cell: Cell, x: Tensor, seed: int, ascents: int = 1) -> float:
    """The largest |z(x) - z(x')| / |x - x'| found: random pairs, then steps along the steepest direction, small and large."""
    z = equilibrium(cell, x)
    found = []
    for size in (1e-2, 10.0):
        other = x + size * random_matrix(*x.shape, seed=seed)
        found.append(distance_ratio(x, other, z, equilibrium(cell, other)))
    for k in range(ascents):
        norms, direction = slopes(cell, x)
        found.append(norms)
        other = x + (0.1, 3.0)[k % 2] * direction
        moved = equilibrium(cell, other)
        found.append(distance_ratio(x, other, z, moved))
        x, z = other, moved
    return float(torch.cat(found).max())


def distance_ratio(x: Tensor, other: Tensor, z: Tensor, moved: Tensor) -> Tensor:
    return (moved - z).flatten(1).norm(dim=1) / (other - x).flatten(1).norm(dim=1)


@settings(max_examples=5)
@given(name=st.sampled_from(COVERED), seed=st.integers(0, 10_000))
def test_no_pair_of_inputs_exceeds_the_bound(name: str, seed: int) -> None:
    cell, x = KINDS[name].make(seed), KINDS[name].x(seed, batch=1)
    assert worst_ratio(cell, x, seed) <= float(lipschitz_bound(cell))


@pytest.mark.parametrize("name", COVERED)
def test_each_cell_has_a_finite_bound_above_its_steepest_slope(name: str) -> None:
    cell, x = KINDS[name].make(0), KINDS[name].x(0, batch=1)
    bound = lipschitz_bound(cell)
    assert bound.evidence == ("estimate" if name == "monotone convolution" else "bound")
    assert float(slopes(cell, x)[0].max()) <= float(bound) < math.inf


@pytest.mark.verify
def test_verify_lipschitz_bounds_of_every_cell() -> None:
    tightness = {}
    for name in COVERED:
        shares = []
        for seed in range(5):
            cell, x = KINDS[name].make(seed), KINDS[name].x(seed, batch=2)
            shares.append(worst_ratio(cell, x, seed, ascents=3) / float(lipschitz_bound(cell)))
        assert max(shares) <= 1, name
        tightness[name] = {"largest": max(shares), "median": sorted(shares)[len(shares) // 2]}
    write_verify("lipschitz", {"what": "steepest slope found / lipschitz_bound, 5 cells a kind; never above 1", "share": tightness})


def aligned(**options) -> Cell:
    """An OptEq with sigma = I whose W and U have their largest singular vectors in line, so that its bound is attained."""
    cell = dense(0, hidden=4, activation="identity", factor=0.64, **options)
    with torch.no_grad():
        u = torch.linalg.svd(cell.W)[0][:, 0]
        cell.U.copy_(torch.outer(u, torch.tensor([3.0, 0.0, 0.0]).double()))
    return cell


@pytest.mark.parametrize("alpha", [1.0, 0.2])
def test_the_bound_of_an_aligned_linear_layer_is_attained(alpha: float) -> None:
    cell = aligned(alpha=alpha)
    exact = 0.8 * 3 / (1 - 0.64)  # ||W|| ||U|| / (1 - ||W||^2)
    assert float(lipschitz_bound(cell)) == pytest.approx(exact, rel=1e-9)
    assert worst_ratio(cell, random_matrix(2, 3, seed=0), 0) == pytest.approx(exact, rel=1e-9)


def test_the_closed_forms_of_the_papers_networks() -> None:
    torch.manual_seed(0)
    split = Monotone(3, 6, m=0.4).double()
    assert float(lipschitz_bound(split)) == pytest.approx(svd(split.U) / 0.4, rel=1e-9)
    relu = GaussianDEQ(3, 6).double()
    with torch.no_grad():
        relu.W.copy_(0.7 * torch.eye(6).double())  # symmetric: ||W|| is its largest eigenvalue, and the two bounds agree
    assert float(lipschitz_bound(relu)) == pytest.approx(svd(relu.U) / 0.3, rel=1e-9)
    scaled = ScaledReLU(3, 6, gamma=0.25).double()
    assert float(lipschitz_bound(scaled)) == pytest.approx(svd(scaled.W) / 0.75, rel=1e-9)
    model = Readout(split)
    assert float(lipschitz_bound(model)) == pytest.approx(float(model.a.detach().norm()) * svd(split.U) / 0.4, rel=1e-9)
    assert float(lipschitz_bound(Equilibrium(split))) == float(lipschitz_bound(split))


def svd(W: Tensor) -> float:
    return float(torch.linalg.matrix_norm(W.detach(), 2))


def test_deep_layers_add_up() -> None:
    first, second = dense(0, alpha=0.5), dense(1, mu=2.0)
    c = [0.5 * 0.8 + 0.5, 0.8]
    ell = [0.5 * svd(first.W) * svd(first.U), svd(second.W) * svd(second.U) / 2]
    assert float(lipschitz_bound(deep(first, second))) == pytest.approx((c[1] * ell[0] + ell[1]) / (1 - c[0] * c[1]), rel=1e-9)
    stretched = deep(first, regularizer=L2(), gamma=0.5)  # its step has the factor 1 - gamma
    assert float(lipschitz_bound(stretched)) == pytest.approx(ell[0] / (1 - 0.5 * c[0]), rel=1e-9)


def test_layers_side_by_side_count_by_their_alpha() -> None:
    first, second = dense(0, alpha=0.2), dense(1, alpha=0.6, mu=2.0, factor=0.5)
    ell = 0.25 * svd(first.W) * svd(first.U) + 0.75 * svd(second.W) * svd(second.U) / 2
    assert float(lipschitz_bound(WideOptEq([first, second]))) == pytest.approx(ell / (1 - 0.25 * 0.8 - 0.75 * 0.5), rel=1e-9)


def test_an_affine_map_of_the_state_divides_by_its_least_singular_value() -> None:
    cell = affine(0, orthogonal=False)
    least = float(torch.linalg.svdvals(cell.A.detach())[-1])
    assert float(lipschitz_bound(cell)) == pytest.approx(float(lipschitz_bound(cell.cell)) / least, rel=1e-9)


def test_the_bound_is_differentiable() -> None:
    for cell in (dense(0), gaussian(0), monotone(0), affine(0, orthogonal=False), WideOptEq([dense(0), dense(1)])):
        lipschitz_bound(cell).value.backward()
        U = next(p for name, p in cell.named_parameters() if name.endswith("U"))
        assert U.grad is not None
        assert U.grad.abs().max() > 0
        before = float(lipschitz_bound(cell))
        with torch.no_grad():
            U -= 1e-3 * U.grad / U.grad.norm()
        assert float(lipschitz_bound(cell)) < before


@pytest.mark.parametrize(
    "cell",
    [dense(0, factor=1.0), deep(dense(0, factor=1.1), dense(1, factor=1.0)), gaussian(0, factor=5.0)],
    ids=["edge", "deep", "gaussian"],
)
def test_the_bound_is_infinite_where_the_condition_fails(cell: Cell) -> None:
    assert float(lipschitz_bound(cell)) == math.inf


def test_single_precision_cells_are_measured_in_double() -> None:
    cell = dense(0).float()
    bound = lipschitz_bound(cell)
    assert bound.value.dtype == torch.float64
    assert float(bound) == pytest.approx(float(lipschitz_bound(dense(0))), rel=1e-5)


def test_the_repr_says_what_is_known() -> None:
    assert repr(LipschitzBound(torch.tensor(2.0), "bound", "||U|| / m")) == "LipschitzBound(2, bound by ||U|| / m)"


# Networks


def network(cell: Cell, seed: int = 0, classes: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    width = cell.state_shape[0]
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), tight(cell), nn.Linear(width, classes)).double()


def test_a_sequential_is_the_product_and_never_exceeded() -> None:
    model = network(monotone(2))
    bound = lipschitz_bound(model)
    parts = [float(lipschitz_bound(part)) for part in model]
    assert float(bound) == pytest.approx(math.prod(parts), rel=1e-9)
    assert bound.evidence == "bound"
    x = random_matrix(3, 5, seed=1)
    jacobian = torch.func.jacrev(lambda row: model(row[None])[0])
    steepest = max(svd(jacobian(row)) for row in x)
    assert steepest <= float(bound)


def test_a_linear_map_and_nothing_at_all_are_exact() -> None:
    layer = nn.Linear(4, 3)
    bound = lipschitz_bound(nn.Sequential(layer))
    assert bound.evidence == "exact"
    assert float(bound) == pytest.approx(svd(layer.weight), rel=1e-6)
    assert float(lipschitz_bound(nn.Sequential())) == 1


@pytest.mark.parametrize(
    ("module", "least"),
    [
        (nn.ReLU(), 1.0),
        (nn.LeakyReLU(3.0), 3.0),
        (nn.LeakyReLU(0.1), 1.0),
        (nn.LeakyReLU(-3.0), 3.0),
        (nn.ELU(2.0), 2.0),
        (nn.Sigmoid(), 0.25),
        (nn.Tanh(), 1.0),
        (nn.Softshrink(), 1.0),
        (nn.Hardtanh(), 1.0),
        (nn.Flatten(), 1.0),
        (nn.Dropout(0.5).eval(), 1.0),
    ],
    ids=lambda value: str(value),
)
def test_activations_have_the_largest_of_their_slopes(module: nn.Module, least: float) -> None:
    a = torch.linspace(-6, 6, 20001, dtype=torch.float64)[None]
    slope = (module(a).diff() / a.diff()).abs().max()
    bound = float(lipschitz_bound(module))
    assert float(slope) <= bound * (1 + 1e-9)
    assert bound == least == pytest.approx(float(slope), rel=1e-3)


def normalised(kind: type, **options) -> nn.Module:
    torch.manual_seed(0)
    module = kind(3, **options).double()
    with torch.no_grad():
        module.running_var.copy_(torch.tensor([0.5, 2.0, 0.125]))
        module.running_mean.normal_()
        if module.weight is not None:
            module.weight.copy_(torch.tensor([1.0, -8.0, 0.5]))
            module.bias.normal_()
    return module.eval()


@pytest.mark.parametrize(
    ("module", "shape", "least"),
    [
        (normalised(nn.BatchNorm1d), (3,), 8 / (2 + 1e-5) ** 0.5),
        (normalised(nn.BatchNorm1d, affine=False), (3, 2), 1 / (0.125 + 1e-5) ** 0.5),
        (normalised(nn.BatchNorm2d, eps=0.1), (3, 2, 2), 8 / 2.1**0.5),
        (nn.AvgPool2d(2), (2, 4, 5), 1 / 2),
        (nn.AvgPool2d((2, 3), stride=3), (2, 6, 6), 1 / 6**0.5),
        (nn.MaxPool2d(2), (2, 4, 5), 1.0),
        (nn.MaxPool2d((2, 3), ceil_mode=True), (2, 3, 4), 1.0),
        (nn.AdaptiveAvgPool2d(1), (2, 1, 1), 1.0),
        (nn.Dropout2d(0.5).eval(), (2, 2, 2), 1.0),
        (nn.Dropout(0.0), (3,), 1.0),
        (nn.Identity(), (3,), 1.0),
    ],
    ids=lambda value: str(value),
)
def test_layers_between_have_the_norm_of_their_jacobian(module: nn.Module, shape: tuple[int, ...], least: float) -> None:
    x = random_matrix(1, *shape, seed=0)
    jacobian = torch.autograd.functional.jacobian(lambda row: module(row).flatten(), x).flatten(1)
    assert float(lipschitz_bound(module)) == pytest.approx(least, rel=1e-9)
    assert svd(jacobian) == pytest.approx(least, rel=1e-9)


def test_the_mean_of_an_image_of_any_size_is_no_steeper_than_1() -> None:
    pool = nn.AdaptiveAvgPool2d((1, 1))
    jacobian = torch.autograd.functional.jacobian(lambda row: pool(row).flatten(), random_matrix(1, 2, 3, 4, seed=0)).flatten(1)
    assert svd(jacobian) == pytest.approx(12**-0.5)
    assert float(lipschitz_bound(pool)) == 1


@pytest.mark.parametrize(
    "module",
    [
        nn.AvgPool2d(3, stride=2),
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=1),
        nn.MaxPool2d(3, stride=1),
        nn.MaxPool2d(2, dilation=2),
        nn.AdaptiveAvgPool2d(2),
    ],
    ids=str,
)
def test_pooling_of_windows_that_overlap_is_refused(module: nn.Module) -> None:
    with pytest.raises(TypeError, match=rf"{type(module).__name__}.* must not overlap"):
        lipschitz_bound(module)


def test_layers_that_change_with_the_batch_are_refused_with_the_remedy() -> None:
    cases = [
        (nn.BatchNorm1d(2), "eval"),
        (nn.Dropout2d(0.5), "eval"),
        (nn.BatchNorm2d(2, track_running_stats=False).eval(), "track"),
    ]
    for module, remedy in cases:
        with pytest.raises(TypeError, match=rf"{type(module).__name__}.*: .*{remedy}"):
            lipschitz_bound(nn.Sequential(module))


def test_a_classifier_with_norms_and_pooling_has_a_radius() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8, 3),
        tight(monotone(2)),
        nn.Linear(10, 2),
    )
    model = model.double().eval()
    x = random_matrix(4, 1, 4, 4, seed=0)
    found = certified_radius(model, x)
    assert (found.radius > 0).all()
    rows = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), model)
    assert not attacked(rows, x.flatten(1), 0.99 * found.radius, found.prediction, 0, steps=3).any()


class _Linear(Operator):
    """The linear part of a module, for matrix_of."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def leaves(self) -> list:
        return [type("Leaf", (), {"tensor": next(self.module.parameters())})]

    def __call__(self, z: Tensor) -> Tensor:
        return self.module(z)

    def adjoint(self, s: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"padding": 3},
        {"padding": 0, "stride": 2},
        {"padding": 2, "dilation": 2},
        {"padding": 1, "groups": 2},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 0, "padding_mode": "circular", "stride": 2},
        {"padding": "same", "padding_mode": "circular"},
        {"padding": "valid"},
    ],
    ids=str,
)
def test_convolutions_are_bounded_with_any_padding_stride_and_dilation(options: dict) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(2, 4, 3, bias=False, **options).double()
    exact = svd(matrix_of(_Linear(module), (2, 7, 6)))
    bound = lipschitz_bound(module)
    assert bound.evidence == "bound"
    assert exact <= float(bound) <= 1.6 * exact


@pytest.mark.parametrize(
    "options", [{"padding": 2, "padding_mode": "circular"}, {"padding": 1, "padding_mode": "reflect"}], ids=["circular", "reflect"]
)
def test_paddings_that_repeat_the_image_are_refused(options: dict) -> None:
    module = nn.Conv2d(2, 4, 3, bias=False, **options).double()
    with pytest.raises(TypeError, match="padding repeats"):
        lipschitz_bound(nn.Sequential(module))


def test_unknown_parts_are_named() -> None:
    class Own(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.state_shape = (2,)

        def injection(self, x: Tensor) -> Tensor:
            return x

        def bind(self, x: Tensor):  # type: ignore[no-untyped-def]
            return FunctionCell(lambda z, x: x, (2,)).bind(x)

    own = Own()
    unknown = {
        "GELU": nn.Sequential(nn.Linear(2, 2), nn.GELU()),
        "Dropout": nn.Dropout(0.5),
        "BatchNorm1d": nn.BatchNorm1d(2),
        "FunctionCell": FunctionCell(lambda z, x: x, (2,)),
        "Incay": deep(dense(0), regularizer=Incay()),
        "Decorrelation": deep(dense(0), regularizer=Decorrelation()),
        "ActivationCell": ActivationCell("tanh", 0.5),
        "Own": own,
    }
    for name, model in unknown.items():
        with pytest.raises(TypeError, match=name):
            lipschitz_bound(model)
    own.in_features = 2
    with pytest.raises(TypeError, match="Own"):
        lipschitz_bound(own)
    with pytest.raises(TypeError, match=r"'model' parameter of lipschitz_bound must be an nn.Module"):
        lipschitz_bound(3)  # type: ignore[arg-type]


def test_a_map_that_splits_with_an_unknown_injection_is_estimated() -> None:
    cell = image_split(1)

    class Injection(_Linear):
        def __call__(self, z: Tensor) -> Tensor:
            return cell.injection(z) - cell.injection(torch.zeros_like(z))

    exact = svd(matrix_of(Injection(cell), (2, 4, 4))) / cell.m
    bound = lipschitz_bound(cell)
    assert bound.evidence == "estimate"
    assert float(bound) == pytest.approx(exact, rel=1e-6)


class Driven(ActivationCell):
    """A cell of one's own, with an injection."""

    def injection(self, x: Tensor) -> Tensor:
        return x @ self.U.T


@pytest.mark.parametrize(("activation", "wrapped"), [("tanh", True), ("silu", False), ("silu", True)])
def test_a_cell_of_ones_own_with_an_injection_is_estimated(activation: str, wrapped: bool) -> None:
    torch.manual_seed(0)
    cell = Driven(activation, 0.8, wrapped=wrapped)
    bound = lipschitz_bound(cell)
    assert bound.evidence == "estimate"
    assert float(bound) == pytest.approx(cell.activation.lipschitz * svd(cell.U) / (1 - 0.8), rel=1e-6)
    assert worst_ratio(cell, random_matrix(2, 3, seed=0), 0) <= float(bound)


# A fixed number of steps


def unrolled(cell: Cell, steps: int = 6, damping: float = 1.0) -> Equilibrium:
    return Equilibrium(cell, Picard(damping), gradient=Unrolled(steps)).double()


def test_unrolled_steps_of_a_monotone_network_have_no_bound_where_they_do_not_contract() -> None:
    """At the equilibrium it has one, but six steps lead elsewhere: they are five times as steep as that here."""
    torch.manual_seed(0)
    cell = Monotone(3, 6, m=0.5).double()
    with torch.no_grad():
        cell.B.normal_().mul_(1.5)
    x, d = torch.randn(2, 200, 3, dtype=torch.float64)
    for layer in (unrolled(cell), Repeated(cell, 6), Equilibrium(cell, gradient=Unrolled(6))):
        with torch.no_grad():
            steepest = distance_ratio(x, x + d, layer(x), layer(x + d)).max()
        assert float(steepest) > 3 * float(lipschitz_bound(cell))
        assert float(lipschitz_bound(layer)) == math.inf
        model = nn.Sequential(layer, nn.Linear(6, 3)).double()
        assert not certified_radius(model, x).radius.any()
    with pytest.raises(TypeError, match="unrolled steps of SAM, only of those of Picard"):
        lipschitz_bound(Equilibrium(cell, SAM(L2()), gradient=Unrolled(6)))


@pytest.mark.parametrize("name", [name for name in COVERED if "monotone" not in name])
def test_unrolled_steps_of_contractions_keep_their_bound(name: str) -> None:
    cell, x = KINDS[name].make(0), KINDS[name].x(0, batch=4)
    other = x + 0.1 * random_matrix(*x.shape, seed=1)
    for steps, damping in ((1, 1.0), (3, 0.5), (10, 1.0)):
        layer = unrolled(cell, steps, damping)
        with torch.no_grad():
            steepest = distance_ratio(x, other, layer(x), layer(other)).max()
        assert float(steepest) <= float(lipschitz_bound(layer))


def test_the_radius_of_unrolled_steps_is_that_of_the_network_that_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(unrolled(dense(0, activation="tanh", factor=0.5), steps=2), nn.Linear(4, 3)).double()
    x = random_matrix(5, 3, seed=0)
    found = certified_radius(model, x)
    assert (found.radius > 0).all()
    assert torch.equal(found.prediction, model(x).argmax(1))
    assert not attacked(model, x, 0.99 * found.radius, found.prediction, 0).any()


# Subclasses that compute something else


class Steep(Monotone):
    """x is injected seven times as strongly."""

    def injection(self, x: Tensor) -> Tensor:
        return 7 * super().injection(x)


class Before(OptEq):
    """Something is made of x before it is bound."""

    def bind(self, x: Tensor):  # type: ignore[no-untyped-def]
        return super().bind(9 * x)


class Curved(OptEq):
    def injection(self, x: Tensor) -> Tensor:
        return 9 * torch.sin(super().injection(x))


class Loud(GaussianDEQ):
    def bind(self, x: Tensor):  # type: ignore[no-untyped-def]
        return super().bind(9 * x)


class Brighter(ConvOptEq):
    def injection(self, x: Tensor) -> Tensor:
        return 9 * super().injection(x)


def test_a_subclass_with_its_own_way_with_x_is_measured_by_it() -> None:
    torch.manual_seed(0)
    cell = Steep(3, 6, m=0.5).double()
    plain = Monotone(3, 6, m=0.5).double()
    plain.load_state_dict(cell.state_dict())
    bound = lipschitz_bound(cell)
    assert bound.evidence == "estimate"
    assert float(bound) == pytest.approx(7 * float(lipschitz_bound(plain)), rel=1e-6)
    x = random_matrix(3, 3, seed=0)
    assert worst_ratio(cell, x, 0) <= float(bound)
    assert error_bound(cell, x, equilibrium(cell, x)).bound.max() < 1e-6


@pytest.mark.parametrize("cell", [Before(3, 4, 5), Curved(3, 4, 5), Loud(3, 8), Brighter(2, 3, 4), TwofoldOptEq(2, 3, 4)])
def test_a_subclass_whose_injection_is_not_known_is_refused(cell: Cell) -> None:
    with pytest.raises(TypeError, match=f"no Lipschitz constant of {type(cell).__name__}|norm of a Chain on images of every size"):
        lipschitz_bound(cell)


class Added(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 5 * super().forward(x)


class Doubled(Equilibrium):
    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, z0)


class Twice(Readout):
    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, z0)


@pytest.mark.parametrize(
    "module", [Added(nn.Linear(3, 3)), Scaled(3, 3), Doubled(gaussian(0)), Twice(gaussian(0))], ids=lambda m: type(m).__name__
)
def test_a_module_with_a_forward_of_its_own_is_refused(module: nn.Module) -> None:
    said = rf"does not know what {type(module).__name__} computes: .* a forward of its own"
    x = random_matrix(2, 3, seed=0)
    for model in (module, nn.Sequential(nn.Sequential(module))):
        with pytest.raises(TypeError, match=f"lipschitz_bound {said}"):
            lipschitz_bound(model)
    for model in (module if isinstance(module, Readout) else Added(nn.Linear(3, 3)), nn.Sequential(module, nn.Linear(3, 2))):
        with pytest.raises(TypeError, match=r"does not know what .* computes"):
            certified_radius(model.double(), x)
    if isinstance(module, (Scaled, Readout)):
        with pytest.raises(TypeError, match=f"certified_predictions {said}"):
            certified_predictions(module, torch.zeros(2, 12 if isinstance(module, Readout) else 3), torch.zeros(2))


def test_a_network_that_only_looks_at_its_input_first_is_taken_as_it_is() -> None:
    torch.manual_seed(0)
    stem = Stem(2, 3)
    assert float(lipschitz_bound(stem)) == float(lipschitz_bound(stem[0]))


# Certified radii


def attacked(model: nn.Module, x: Tensor, radius: Tensor, prediction: Tensor, seed: int, steps: int = 5) -> Tensor:
    """Whether gradient ascent on the margin of the other classes, on the sphere of the radius, changes the class."""
    g = torch.Generator().manual_seed(seed)
    d = torch.randn(x.shape, generator=g, dtype=torch.float64)
    changed = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(steps):
        d = (d / d.norm(dim=1, keepdim=True)).requires_grad_()
        y = scores(model, x + radius[:, None] * d)
        changed |= y.argmax(1) != prediction
        top = y.gather(1, prediction[:, None])[:, 0]
        other = y.scatter(1, prediction[:, None], -math.inf).amax(1)
        (grad,) = torch.autograd.grad((other - top).sum(), d)
        d = (d + 2 * grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-300)).detach()
    return changed


def scores(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return torch.stack([torch.zeros_like(y), y], 1) if y.ndim == 1 else y


def models() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    split = monotone(2)  # m = 0.5
    return {
        "monotone": network(split),
        "OptEq": network(dense(0, activation="tanh", factor=0.5)),
        "deep": network(deep_with_shape()),
        "two equilibria": nn.Sequential(
            nn.Sequential(nn.Linear(5, 3), tight(gaussian(1, 0.5)), nn.Linear(12, 3)), tight(split), nn.ReLU(), nn.Linear(10, 4)
        ).double(),
        "readout": nn.Sequential(nn.Linear(5, 3), tight(split), nn.Linear(10, 1)).double(),
    }


def deep_with_shape() -> Cell:
    cell = deep(dense(0, factor=0.4), dense(1, factor=0.5))
    cell.state_shape = (4,)
    return cell


@pytest.mark.parametrize("name", models())
def test_no_attack_within_the_certified_radius_changes_the_class(name: str) -> None:
    model = models()[name]
    x = random_matrix(6, 5, seed=4)
    with torch.no_grad():
        model[-1].bias -= model(x).mean(0)  # so that each class has its share
    found = certified_radius(model, x)
    assert found.evidence == "bound"
    y = model(x).detach()
    assert torch.equal(found.prediction, (y[:, 0] > 0).long() if y.shape[1] == 1 else y.argmax(1))
    assert (found.radius > 0).all()
    plain = nn.Sequential(model, nn.Flatten(0)) if y.shape[1] == 1 else model
    assert not attacked(plain, x, 0.99 * found.radius, found.prediction, 0).any()
    assert attacked(plain, x, 100 * found.radius, found.prediction, 0, steps=3).any()  # attacks do succeed further out


def test_the_radius_of_a_readout_by_its_sign() -> None:
    torch.manual_seed(0)
    model = Readout(monotone(3), Anderson())
    model.stop = TIGHT
    x = random_matrix(12, 3, seed=4)
    found = certified_radius(model, x)
    y = model(x).detach()
    assert torch.equal(found.prediction, (y > 0).long())
    expected = y.abs() / float(lipschitz_bound(model))
    assert torch.allclose(found.radius, expected, rtol=1e-6)
    assert not attacked(model, x, 0.99 * found.radius, found.prediction, 0).any()


def test_the_radius_of_a_linear_classifier_is_attained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5)).double()
    x = random_matrix(10, 6, seed=0)
    found = certified_radius(model, x)
    assert not attacked(model, x, 0.99999 * found.radius, found.prediction, 0).any()
    W = model[0].weight.detach()
    across = W[None] - W[found.prediction][:, None]  # [batch, class, feature]
    steps = found.radius[:, None, None] * 1.00001 * across / across.norm(dim=2, keepdim=True).clamp(min=1e-300)
    assert (model(x[:, None] + steps).argmax(2) != found.prediction[:, None]).any(1).all()


def test_an_aligned_equilibrium_attains_its_radius() -> None:
    cell = aligned()
    head = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        head.weight.copy_(torch.linalg.svd(cell.W).Vh[:1])
    model = nn.Sequential(Equilibrium(cell, Newton(), Stop(rtol=1e-13, max_steps=100)), head, nn.Flatten(0))
    x = random_matrix(4, 3, seed=0)
    found = certified_radius(model[:2], x)
    assert attacked(model, x, 1.0001 * found.radius, found.prediction, 0, steps=12).all()
    assert not attacked(model, x, 0.9999 * found.radius, found.prediction, 0, steps=12).any()


def test_differences_of_rows_certify_farther_than_the_norm_of_the_head() -> None:
    model = network(monotone(2))
    with torch.no_grad():
        model[-1].weight += 2.0
    x = random_matrix(10, 5, seed=1)
    found = certified_radius(model, x)
    top = model(x).detach().topk(2).values
    naive = (top[:, 0] - top[:, 1]) / (2**0.5 * float(lipschitz_bound(model)))
    assert (found.radius >= naive).all()
    assert (found.radius > 3 * naive).any()


def test_a_loose_solve_takes_its_error_off_the_radius() -> None:
    cell = monotone(3)
    torch.manual_seed(0)
    head = nn.Linear(10, 3).double()
    x = random_matrix(30, 3, seed=1)
    loose = nn.Sequential(Equilibrium(cell, Anderson(), Stop(rtol=0.05, max_steps=50), on_failure="ignore"), head)
    exact = nn.Sequential(tight(cell), head)
    rough, fine = certified_radius(loose, x), certified_radius(exact, x)
    sure = rough.radius > 0
    assert sure.any()
    assert not sure.all()
    assert torch.equal(rough.prediction[sure], fine.prediction[sure])
    z = loose[0](x).detach()
    bound = error_bound(cell, x, z).bound
    left = certified_predictions(head, z, bound).reach - bound
    assert torch.allclose(rough.radius, left.clamp(min=0) / float(lipschitz_bound(cell)), rtol=1e-9)
    assert not attacked(exact, x[sure], 0.99 * rough.radius[sure], rough.prediction[sure], 0).any()


def test_the_error_of_a_loose_solve_grows_with_the_layers_behind_it() -> None:
    cell = monotone(3)
    torch.manual_seed(0)
    middle, head = nn.Linear(10, 4).double(), nn.Linear(4, 3).double()
    with torch.no_grad():
        middle.weight.mul_(3)
    x = random_matrix(30, 3, seed=1)
    loose = Equilibrium(cell, Anderson(), Stop(rtol=0.01, max_steps=50), on_failure="ignore")
    found = certified_radius(nn.Sequential(loose, middle, head), x)
    with torch.no_grad():
        z = loose(x)
        off = svd(middle.weight) * error_bound(cell, x, z).bound
        left = certified_predictions(head, middle(z), off).reach - off
    assert (found.radius > 0).any()
    expected = left.clamp(min=0) / (svd(middle.weight) * float(lipschitz_bound(cell)))
    torch.testing.assert_close(found.radius, expected, rtol=1e-9, atol=0)


def test_the_error_of_a_readout_on_the_way_is_taken_off_too() -> None:
    """The class of the loose model is wrong for some samples, and none of these is certified."""
    cell = gaussian(0, factor=0.5)
    torch.manual_seed(0)
    loose = Readout(cell, Anderson(), Stop(rtol=0.3), on_failure="ignore").double()
    exact = Readout(cell, Newton(), Stop(rtol=1e-12, max_steps=100)).double()
    exact.a = loose.a
    x, head = random_matrix(200, 3, seed=1), nn.Linear(1, 2).double()
    with torch.no_grad():
        y, true = loose(x), exact(x)
        middle = (y + true)[(y - true).abs().argmax()] / 2
        head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        head.bias.copy_(torch.stack([-middle, middle]))
    rough, fine = (certified_radius(nn.Sequential(model, nn.Unflatten(0, (-1, 1)), head), x) for model in (loose, exact))
    assert (rough.prediction != fine.prediction).any()
    sure = rough.radius > 0
    assert sure.any()
    assert torch.equal(rough.prediction[sure], fine.prediction[sure])
    assert (rough.radius <= fine.radius + 1e-9).all()
    with torch.no_grad():
        z = loose.solve(x).z
        off = error_bound(cell, x, z).bound * loose.a.norm()
        expected = (y - middle).abs() - off
    bound = float(lipschitz_bound(loose))
    assert torch.allclose(rough.radius, expected.clamp(min=0) / bound, rtol=1e-9, atol=1e-12)


def test_errors_before_a_module_that_is_unknown_are_unknown_after_it() -> None:
    torch.manual_seed(0)
    last = Readout(gaussian(0, factor=5.0), on_failure="ignore", stop=Stop(max_steps=3)).double()
    with torch.no_grad():
        last.a.zero_()  # 0 times infinity
    assert float(lipschitz_bound(last)) == math.inf
    assert float(lipschitz_bound(nn.Sequential(nn.Linear(3, 3), last))) == math.inf
    head = nn.Linear(1, 2).double()
    model = nn.Sequential(tight(gaussian(1)), nn.Linear(12, 3).double(), last, nn.Unflatten(0, (-1, 1)), head)
    assert certified_radius(model, random_matrix(3, 3, seed=0)).radius.tolist() == [0, 0, 0]


def test_a_module_that_is_used_twice_counts_twice() -> None:
    layer = nn.Linear(3, 3).double()
    assert float(lipschitz_bound(nn.Sequential(layer, layer))) == pytest.approx(svd(layer.weight) ** 2, rel=1e-9)


def test_a_cell_that_is_no_layer_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), gaussian(0), nn.Linear(12, 2)).double()
    for call in (lipschitz_bound, lambda model: certified_radius(model, random_matrix(2, 3, seed=0))):
        with pytest.raises(TypeError, match=r"Module 1 .* is a Cell, GaussianDEQ: wrap it in Equilibrium"):
            call(model)


def test_nothing_is_certified_where_nothing_is_known() -> None:
    x = random_matrix(3, 5, seed=0)
    model = network(dense(0, activation="tanh", factor=1.0))
    assert certified_radius(model, x).radius.tolist() == [0, 0, 0]
    model = network(dense(0, activation="tanh")).float()
    spoilt = x.float()
    spoilt[1, 0] = math.nan
    model[2].on_failure = "ignore"
    model[2].stop = Stop(rtol=1e-9, max_steps=100)
    found = certified_radius(model, spoilt)
    assert (found.radius > 0).tolist() == [True, False, True]
    assert model[0].weight.dtype == torch.float32
    squashed = nn.Sequential(nn.Tanh(), nn.Linear(2, 2)).double()
    assert certified_radius(squashed, torch.tensor([[math.inf, 0.0]], dtype=torch.float64)).radius.tolist() == [0]


def test_the_input_is_left_as_it_was() -> None:
    x = random_matrix(3, 3, seed=0)
    before = x.clone()
    certified_radius(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2).double()), x)
    assert torch.equal(x, before)


def test_models_without_a_linear_head_are_refused() -> None:
    x = random_matrix(3, 3, seed=0)
    for model in (nn.ReLU(), nn.Sequential(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), Equilibrium(dense(0))):
        with pytest.raises(
            TypeError, match=r"'model' parameter of certified_radius must be an nn.Sequential that ends in nn.Linear"
        ):
            certified_radius(model, x)


def test_an_image_classifier_has_a_radius() -> None:
    torch.manual_seed(0)
    cell = conv(0, padding="circular", activation="tanh")
    with torch.no_grad():
        cell.W.mul_(0.6)
    stack = StackedOptEq([cell])
    assert float(lipschitz_bound(stack)) == pytest.approx(float(lipschitz_bound(cell)), rel=1e-9)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), tight(cell), nn.Flatten(), nn.Linear(24, 3)).double()
    x = random_matrix(4, 1, 4, 3, seed=0)
    found = certified_radius(model, x)
    assert (found.radius > 0).all()
    flat = nn.Sequential(nn.Unflatten(1, (1, 4, 3)), model)
    assert not attacked(flat, x.flatten(1), 0.99 * found.radius, found.prediction, 0, steps=6).any()
