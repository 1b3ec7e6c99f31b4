"""Tangent kernels against dense Jacobians, and the papers' gradients as they are printed and as they are right."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn.utils import parametrize

import opteq.cells
from opteq import ConvergenceError, Equilibrium, Stop
from opteq.activations import find_activation
from opteq.cells import ConvOptEq, DeepOptEq, DepthwiseOptEq, FunctionCell, GaussianDEQ, Monotone, OptEq, ScaledReLU, WideOptEq
from opteq.linear import LinearizedMap
from opteq.models import Readout
from opteq.operators import Dense
from opteq.regularizers import Decorrelation
from opteq.splitting import ActivationMap
from opteq.theory import ntk
from opteq.theory.ntk import empirical_ntk

TIGHT = Stop(rtol=1e-13, max_steps=3000)
D_IN, WIDTH = 3, 5
ACTIVATIONS = ("relu", "tanh", "softplus", "soft_threshold")
CELLS = (
    "gaussian",
    "scaled_relu",
    "scaled_relu_half_normal",
    *(f"monotone_{name}" for name in ACTIVATIONS),
    "monotone_without_bias",
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(name: str, seed: int = 0, d: int = D_IN, n: int = WIDTH, **options) -> Readout:
    torch.manual_seed(seed)
    if name == "gaussian":
        cell = GaussianDEQ(d, n)
    elif name == "scaled_relu_half_normal":
        cell = ScaledReLU(d, n, gamma=0.6 / n, init="half_normal")
    elif name == "scaled_relu":
        cell = ScaledReLU(d, n, gamma=0.2)
        cell.A.data += 0.5 * torch.randn(n, n)
    elif name == "monotone_without_bias":
        cell = Monotone(d, n, m=0.3, bias=False, **options)
    else:
        cell = Monotone(d, n, m=0.3, activation=name.removeprefix("monotone_"), **options)
        nn.init.normal_(cell.b)
    readout = Readout(cell.double())
    nn.init.normal_(readout.a)
    return readout


def step(cell, z: Tensor, x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """f(z, x) of one sample, from the papers."""
    if isinstance(cell, GaussianDEQ):
        return torch.relu(p["W"] @ z + p["U"] @ x)
    if isinstance(cell, ScaledReLU):
        return torch.relu(cell.gamma * (z @ p["A"]) + torch.relu(x @ p["W"]))
    A, B = p["A"], p["B"]
    W = (1 - cell.m) * torch.eye(len(z), dtype=z.dtype) - A.T @ A + B - B.T
    return cell.activation(W @ z + p["U"] @ x + p.get("b", torch.zeros_like(z)))


def dense_jacobian(readout: Readout, X: Tensor) -> dict[str, Tensor]:
    """dy/dtheta by the implicit function theorem with dense matrices: a'(I - df/dz)^-1 df/dtheta. [N, numel] for each name."""
    cell, a = readout.cell, readout.a.detach()
    p = {name: value.detach() for name, value in cell.named_parameters()}
    rows: dict[str, list[Tensor]] = {name: [] for name in ("a", *(f"cell.{name}" for name in p))}
    start = readout.solve(X).z.detach()
    for x, z in zip(X, start, strict=True):
        for _ in range(2):
            J = jacobian(lambda z, x=x: step(cell, z, x, p), z)
            z = z + torch.linalg.solve(torch.eye(len(z), dtype=z.dtype) - J, step(cell, z, x, p) - z)
        assert torch.linalg.vector_norm(step(cell, z, x, p) - z) <= 1e-13 * (1 + torch.linalg.vector_norm(z))
        v = torch.linalg.solve(torch.eye(len(z), dtype=z.dtype) - J.T, a)
        rows["a"].append(z)
        for name in p:
            part = jacobian(lambda w, z=z, x=x, name=name: step(cell, z, x, {**p, name: w}), p[name])
            rows[f"cell.{name}"].append((v @ part.flatten(1)).flatten())
    return {name: torch.stack(parts) for name, parts in rows.items()}


def autograd_rows(model: nn.Module, y: Tensor) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    y = y + 0 * sum(p.sum() for p in parameters)
    found = [torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True, materialize_grads=True) for v in y.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in found])


def autograd_kernel(model: nn.Module, X: Tensor, X2: Tensor | None = None) -> Tensor:
    """J J' of one sample after the other."""
    J, J2 = (torch.cat([autograd_rows(model, model(x[None])) for x in side]) for side in (X, X if X2 is None else X2))
    return J @ J2.T


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == wanted.shape
    assert not found.requires_grad
    error = torch.linalg.vector_norm(found - wanted)
    assert error <= tolerance * torch.linalg.vector_norm(wanted), f"{error / torch.linalg.vector_norm(wanted):.1e}"


# The three networks of the theory


@pytest.mark.parametrize("name", CELLS)
def test_the_structured_kernel_is_the_product_of_dense_jacobians(name):
    readout, X, X2 = network(name), randn(3, D_IN), randn(2, D_IN, seed=1)
    J, J2 = dense_jacobian(readout, X), dense_jacobian(readout, X2)
    for other, right in ((None, J), (X2, J2)):
        wanted = {part: J[part] @ right[part].T for part in J}
        found = empirical_ntk(readout, X, other, blocks=True)
        assert list(found) == [part for part, _ in readout.named_parameters()]
        for part in wanted:
            assert_close(found[part], wanted[part])
        assert_close(empirical_ntk(readout, X, other), sum(wanted.values()))
        assert_close(empirical_ntk(readout, X, other), sum(found.values()), 1e-15)


@settings(deadline=None, max_examples=4)
@given(st.sampled_from(CELLS), st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9), st.integers(1, 6))
def test_the_structured_kernel_is_right_for_any_size(name, seed, d, n, N):
    readout, X = network(name, seed, d, n), randn(N, d, seed=seed)
    wanted = sum(J @ J.T for J in dense_jacobian(readout, X).values())
    assert torch.linalg.vector_norm(empirical_ntk(readout, X) - wanted) <= 1e-10 * torch.linalg.vector_norm(wanted) + 1e-14


@pytest.mark.parametrize("name", ["gaussian", "scaled_relu", "monotone_tanh"])
def test_the_structured_kernel_agrees_with_the_general_one(name, monkeypatch):
    readout, X, X2 = network(name), randn(2, D_IN), randn(1, D_IN, seed=1)
    structured = [empirical_ntk(readout, X, blocks=True), empirical_ntk(readout, X, X2, blocks=True)]
    monkeypatch.setattr(ntk, "has_formulas", lambda model: False)
    for found, other in zip(structured, (None, X2), strict=True):
        general = empirical_ntk(readout, X, other, blocks=True)
        assert set(found) == set(general)
        for part in found:
            assert_close(found[part], general[part])


@pytest.mark.parametrize("name", ["gaussian", "scaled_relu", "monotone_relu"])
def test_the_three_networks_have_no_jacobian_formed(name, monkeypatch):
    formed = []
    contracted = ntk._contracted
    monkeypatch.setattr(ntk, "_contracted", lambda *args: formed.append(args) or contracted(*args))
    empirical_ntk(network(name), randn(3, D_IN))
    assert not formed
    empirical_ntk(nn.Linear(D_IN, 1).double(), randn(3, D_IN))
    assert len(formed) == 1  # the other way is the one that is watched


@pytest.mark.parametrize("name", ["gaussian", "scaled_relu", "monotone_relu", "monotone_tanh"])
def test_the_kernel_is_symmetric_and_positive_semidefinite_in_every_block(name):
    readout, X = network(name, n=20), randn(40, D_IN)
    for part in empirical_ntk(readout, X, blocks=True).values():
        assert torch.equal(part, part.T)
        eigenvalues = torch.linalg.eigvalsh(part)
        assert eigenvalues[0] >= -1e-12 * eigenvalues[-1]
    K = empirical_ntk(readout, X)
    assert torch.equal(K, K.T)


@pytest.mark.parametrize("name", ["gaussian", "scaled_relu", "monotone_relu"])
def test_frozen_parameters_are_no_part_of_the_kernel(name):
    readout, X = network(name), randn(4, D_IN)
    parts = empirical_ntk(readout, X, blocks=True)
    first = list(parts)[1]
    readout.get_parameter(first).requires_grad_(False)
    readout.a.requires_grad_(False)
    found = empirical_ntk(readout, X, blocks=True)
    assert set(found) == set(parts) - {"a", first}
    assert_close(empirical_ntk(readout, X), sum(parts[part] for part in found), 1e-14)


def test_a_bias_is_one_more_input_that_is_always_1():
    readout, X = network("monotone_relu"), randn(6, D_IN)
    other = network("monotone_without_bias", d=D_IN + 1)
    with torch.no_grad():
        for name in ("A", "B"):
            getattr(other.cell, name).copy_(getattr(readout.cell, name))
        other.cell.U.copy_(torch.cat([readout.cell.U, readout.cell.b[:, None]], dim=1))
        other.a.copy_(readout.a)
    assert_close(empirical_ntk(readout, X), empirical_ntk(other, torch.cat([X, torch.ones(6, 1, dtype=X.dtype)], dim=1)))


@pytest.mark.parametrize(("name", "memory"), [("gaussian", 1), ("monotone_relu", 3000)])
def test_less_memory_changes_nothing_but_the_time(name, memory):
    readout, X, X2 = network(name), randn(3, D_IN), randn(2, D_IN, seed=1)
    for other in (None, X2):
        assert_close(empirical_ntk(readout, X, other, memory=memory), empirical_ntk(readout, X, other), 1e-12)


def test_where_gmres_is_slow_the_adjoint_is_found_by_elimination(monkeypatch):
    eliminated = []

    def counted(*args):
        eliminated.append(args)
        return plain(*args)

    plain = ntk._eliminated
    monkeypatch.setattr(ntk, "_eliminated", counted)
    readout, X = network("monotone_relu", n=60), randn(3, D_IN)
    readout.cell.m = 0.05
    with torch.no_grad():
        readout.cell.B.mul_(4)
    found = empirical_ntk(readout, X, blocks=True)
    assert eliminated
    for name, J in dense_jacobian(readout, X).items():
        assert_close(found[name], J @ J.T)


def test_an_adjoint_without_a_solution_raises():
    W, h = torch.eye(3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)  # I - D W' = 0
    fn = LinearizedMap(ActivationMap(Dense(W), find_activation("test", "relu"), h), False, torch.zeros_like(h), h)
    with pytest.raises(ConvergenceError):
        ntk._linear_equilibrium(fn, Stop(rtol=1e-13, max_steps=20))


@pytest.mark.parametrize("on_failure", ["warn", "ignore"])
@pytest.mark.parametrize("side", ["X", "X2"])
def test_an_equilibrium_that_is_not_found_raises_whatever_the_readout_does(on_failure, side):
    readout = network("gaussian")
    readout.on_failure, readout.stop = on_failure, Stop(rtol=1e-12, max_steps=2)
    X, zeros = randn(4, D_IN), torch.zeros(4, D_IN, dtype=torch.float64)  # x = 0 needs no step
    with pytest.raises(ConvergenceError):
        empirical_ntk(readout, *((X, zeros) if side == "X" else (zeros, X)))
    assert readout.on_failure == on_failure


class Halved(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return W / 2


def test_tied_and_parametrised_weights_are_left_to_the_general_way():
    X = randn(2, D_IN)
    tied = network("monotone_relu")
    tied.cell.B = tied.cell.A
    halved = network("gaussian")
    parametrize.register_parametrization(halved.cell, "W", Halved())

    class Twice(Readout):
        def forward(self, x, z0=None):
            return 2 * super().forward(x, z0)

    twice = Twice(network("gaussian").cell)
    extra = network("gaussian")
    extra.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for model in (tied, halved, twice, extra):
        found = empirical_ntk(model, X, blocks=True)
        assert list(found) == [name for name, _ in model.named_parameters()]
        assert_close(sum(found.values()), autograd_kernel(model, X))


# Any model


class Gate(nn.Module):
    """Its path depends on the data, so that vmap cannot follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D_IN, 1), nn.Linear(D_IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(row[None]) if row[0].item() > 0 else self.two(row[None]) for row in x])


class Captured(nn.Module):
    """A function that captured the very parameter: whoever swaps the module's parameters does not reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = w = nn.Parameter(randn(D_IN))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.f = lambda x: x @ w

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * self.f(x))


class CapturedCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Parameter(0.3 * randn(4, 4, seed=3)), nn.Parameter(randn(4, D_IN, seed=4))
        self.layer = Equilibrium(FunctionCell(lambda z, x: torch.tanh(z @ self.W.T + x @ self.U.T), (4,)), stop=TIGHT)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(dim=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(4, 4), nn.Linear(D_IN, 4, bias=False)
        with torch.no_grad():
            self.W.weight.mul_(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


def small(cell):
    """Contractive, in float64."""
    with torch.no_grad():
        for p in cell.parameters():
            p.mul_(0.5)
    return cell.double()


def layer(cell) -> Equilibrium:
    return Equilibrium(small(cell), stop=TIGHT)


def deep(outputs: int = 1, **options) -> nn.Module:
    cell = DeepOptEq([OptEq(4, 5, 3), OptEq(4, 5, 6, activation="tanh"), OptEq(4, 5, 5, alpha=0.5)], **options)
    return nn.Sequential(nn.Linear(D_IN, 4), nn.Tanh(), layer(cell), nn.Linear(5, outputs))


def images(cell, channels: int = 2) -> nn.Module:
    """[N, d] -> images 4 x 4 -> cell -> [N, 1]."""
    encoder = nn.Sequential(nn.Linear(D_IN, channels * 16), nn.Unflatten(1, (channels, 4, 4)))
    return nn.Sequential(encoder, Equilibrium(cell.double(), stop=TIGHT), nn.Flatten(), nn.LazyLinear(1))


def zoo() -> dict:
    made = {
        "mlp": lambda: nn.Sequential(nn.Linear(D_IN, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 1), nn.Flatten(0)),
        "deep": deep,
        "learned_alpha": lambda: deep(learn_alpha=True),
        "opteq_readout": lambda: Readout(small(OptEq(D_IN, 5, 4))),
        "wide": lambda: nn.Sequential(layer(WideOptEq([OptEq(D_IN, 5, 4), OptEq(D_IN, 5, 6)])), nn.Linear(5, 1)),
        "module": lambda: nn.Sequential(Equilibrium(FunctionCell(Block(), (4,)), stop=TIGHT), nn.Linear(4, 1)),
        "conv": lambda: images(small(ConvOptEq(2, 3, 4))),
        "depthwise": lambda: images(small(DepthwiseOptEq(2, 3, 4))),
        "eval_batch_norm": lambda: nn.Sequential(nn.Linear(D_IN, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).eval(),
        "gate": Gate,
        "captured": Captured,
        "captured_cell": CapturedCell,
    }
    made["residual"] = lambda: images(opteq.cells.Residual(4, 4, groups=2), channels=4)
    made["multiscale"] = multiscale
    return made


def multiscale() -> nn.Module:
    return images(opteq.cells.Multiscale((4, 4), groups=2), channels=4)


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = zoo()[name]().double()
    model(randn(2, D_IN))  # makes lazy layers
    return model


@pytest.mark.parametrize("name", zoo())
def test_the_general_kernel_is_the_product_of_autograd_jacobians(name):
    model, X, X2 = build(name), randn(2, D_IN), randn(1, D_IN, seed=1)
    assert_close(empirical_ntk(model, X), autograd_kernel(model, X))
    if name in ("mlp", "deep", "gate", "captured"):  # one of each way in which Jacobians are formed
        assert_close(empirical_ntk(model, X, X2), autograd_kernel(model, X, X2))


@pytest.mark.parametrize("name", ["deep", "gate"])
def test_the_blocks_of_the_general_kernel_are_those_of_each_parameter(name):
    model, X = build(name), randn(2, D_IN)
    parts = empirical_ntk(model, X, blocks=True)
    assert list(parts) == [part for part, _ in model.named_parameters()]
    for part in parts:
        for other, p in model.named_parameters():
            p.requires_grad_(other == part)
        assert_close(parts[part], autograd_kernel(model, X))
        assert torch.equal(parts[part], parts[part].T)


@pytest.mark.parametrize("memory", [1, 3000])
def test_several_outputs_give_a_kernel_of_four_indices(memory):
    model = nn.Sequential(nn.Linear(D_IN, 4), layer(DeepOptEq([OptEq(4, 5, 3), OptEq(4, 5, 6)])), nn.Linear(5, 3)).double()
    X, X2 = randn(2, D_IN), randn(1, D_IN, seed=1)
    for other, size in ((None, 2), (X2, 1)):
        K = empirical_ntk(model, X, other, memory=memory)
        assert K.shape == (2, 3, size, 3)
        assert_close(K.reshape(6, 3 * size), autograd_kernel(model, X, other))
        assert other is not None or torch.equal(K, K.permute(2, 3, 0, 1))


def test_vmap_is_taken_where_it_works_and_only_there(monkeypatch):
    X, taken = randn(2, D_IN), []
    plain = ntk._agree
    monkeypatch.setattr(ntk, "_agree", lambda *args: taken.append(plain(*args)) or taken[-1])
    wanted = {"mlp": True, "deep": True, "module": True, "conv": True, "gate": False, "captured": False, "captured_cell": False}
    for name, vmapped in wanted.items():
        empirical_ntk(build(name), X)
        assert taken.pop() is vmapped, name


def test_a_failure_inside_vmap_is_no_reason_to_go_row_by_row():
    torch.manual_seed(0)
    model = nn.Sequential(
        Equilibrium(OptEq(D_IN, 5, 4).double(), stop=Stop(rtol=1e-13, max_steps=1), on_failure="raise"), nn.Flatten()
    )
    with pytest.raises(ConvergenceError):
        empirical_ntk(model, 10 * randn(5, D_IN))


def test_a_convergence_error_that_vmap_alone_meets_is_raised():
    def fast(i, j):
        raise ConvergenceError("no", None)

    with pytest.raises(ConvergenceError):
        ntk._agree(fast, lambda i, j: {}, 1)


def coupled_deep() -> nn.Module:
    cell = small(DeepOptEq([OptEq(4, 5, 3), OptEq(4, 5, 6)], regularizer=Decorrelation(), gamma=0.001))
    return nn.Sequential(nn.Linear(D_IN, 4), Equilibrium(cell, stop=TIGHT), nn.Linear(5, 1)).double()


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x - x.mean(dim=0)))


class Running(nn.Linear):
    """Each output is of the samples so far, so that the first sample depends on no other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)).cumsum(dim=0)


class Coming(nn.Linear):
    """Each output is of the samples from its own on, so that the last sample depends on no other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)).flip(0).cumsum(dim=0).flip(0)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(D_IN, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def linear(kind: type[nn.Linear]):
    return lambda: kind(D_IN, 1).double()


@pytest.mark.parametrize("make", [batch_norm, coupled_deep, linear(Centred), linear(Running), linear(Coming)])
def test_coupled_samples_are_refused_unless_asked_for(make):
    torch.manual_seed(0)
    model, X = make(), randn(3, D_IN)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ValueError, match=r"couples the samples.*samples='coupled'"):
        empirical_ntk(model, X)
    X2 = randn(2, D_IN, seed=1)
    found, cross, tiny = (
        empirical_ntk(model, X, other, samples="coupled", memory=size) for other, size in ((None, 2**28), (X2, 2**28), (None, 1))
    )
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    J, J2 = autograd_rows(model, model(X)), autograd_rows(model, model(X2))
    assert_close(found.reshape(len(J), len(J)), J @ J.T)
    assert_close(cross.reshape(len(J), len(J2)), J @ J2.T)
    assert_close(tiny, found, 1e-13)


def test_batch_norm_without_running_statistics_couples_in_eval_mode_too():
    model = nn.Sequential(nn.BatchNorm1d(D_IN, track_running_stats=False), nn.Linear(D_IN, 1)).double().eval()
    with pytest.raises(ValueError, match="BatchNorm1d '0' couples the samples"):
        empirical_ntk(model, randn(4, D_IN))


def test_independent_samples_may_be_called_coupled():
    model, X = build("deep"), randn(4, D_IN)
    assert_close(empirical_ntk(model, X, samples="coupled"), empirical_ntk(model, X))


def test_dropout_in_training_is_refused():
    model = nn.Sequential(nn.Linear(D_IN, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    with pytest.raises(ValueError, match=r"Dropout '1' redraws its mask.*eval\(\)"):
        empirical_ntk(model, randn(4, D_IN))
    model.eval()
    assert empirical_ntk(model, randn(4, D_IN)).shape == (4, 4)


@pytest.mark.parametrize("name", ["gaussian", "scaled_relu", "monotone_relu", "deep", "gate"])
def test_the_model_and_the_inputs_are_left_alone(name):
    model = build(name) if name in zoo() else network(name)
    X = randn(4, D_IN).requires_grad_()
    with torch.no_grad():
        K = empirical_ntk(model, X, X)
    assert not K.requires_grad
    assert X.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert_close(K, empirical_ntk(model, X), 1e-13)


@pytest.mark.parametrize("name", ["gaussian", "scaled_relu", "monotone_relu", "mlp"])
def test_the_dtype_is_that_of_the_outputs(name):
    double = build(name) if name in zoo() else network(name)
    X = randn(4, D_IN)
    wanted = empirical_ntk(double, X)
    assert wanted.dtype == torch.float64
    found = empirical_ntk(double.float(), X.float())
    assert found.dtype == torch.float32
    assert_close(found.double(), wanted, 1e-4)
    if name not in zoo():
        assert empirical_ntk(double, X).dtype == torch.float64  # float32 parameters, float64 inputs


@pytest.mark.parametrize("name", ["gaussian", "scaled_relu", "monotone_relu", "mlp", "deep"])
def test_an_empty_batch_has_an_empty_kernel(name):
    model = build(name) if name in zoo() else network(name)
    X, none = randn(3, D_IN), torch.zeros(0, D_IN, dtype=torch.float64)
    assert empirical_ntk(model, none).shape == (0, 0)
    assert empirical_ntk(model, X, none).shape == (3, 0)
    assert empirical_ntk(model, none, X).shape == (0, 3)
    assert {part.shape for part in empirical_ntk(model, none, blocks=True).values()} == {(0, 0)}


def test_an_empty_batch_of_several_outputs():
    assert empirical_ntk(deep(3).double(), torch.zeros(0, D_IN, dtype=torch.float64)).shape == (0, 3, 0, 3)


X4 = torch.zeros(4, D_IN, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"model": 3}, TypeError, "'model' parameter of empirical_ntk must be an nn.Module"),
        ({"model": Monotone(D_IN, 4)}, TypeError, "wrap a Cell in Readout, or in Equilibrium and a head. Got 'Monotone'"),
        ({"model": nn.ReLU()}, ValueError, "with a parameter that requires gradients"),
        ({"X": [[1.0]]}, TypeError, "'X' parameter of empirical_ntk must be a floating-point tensor"),
        ({"X": X4.long()}, TypeError, "'X' parameter of empirical_ntk must be a floating-point tensor"),
        ({"X": torch.tensor(1.0)}, ValueError, r"'X' parameter .* of shape \[N, ...\]"),
        ({"X": X4 + math.nan}, ValueError, "'X' parameter of empirical_ntk must be finite"),
        ({"X2": X4 + math.inf}, ValueError, "'X2' parameter of empirical_ntk must be finite"),
        ({"X2": X4.int()}, TypeError, "'X2' parameter of empirical_ntk must be a floating-point tensor"),
        ({"X2": X4[:, :2]}, ValueError, r"'X2' parameter .* like X, of shape \[N2, 3\], torch.float64, on cpu. Got '\[4, 2\]"),
        ({"X2": X4.float()}, ValueError, "'X2' parameter .* like X"),
        ({"X": X4[:, :2]}, ValueError, r"'x' parameter of GaussianDEQ must be of shape \[batch, 3\]"),
        ({"samples": "alone"}, ValueError, "'samples' parameter .* 'independent' or 'coupled'"),
        ({"memory": 0}, ValueError, "'memory' parameter .* integer >= 1"),
        ({"memory": 1.5}, TypeError, "'memory' parameter .* integer >= 1"),
    ],
)
def test_bad_arguments_are_named(changes, error, text):
    arguments = {"model": network("gaussian"), "X": X4, "X2": None, **changes}
    with pytest.raises(error, match=text):
        empirical_ntk(**arguments)


class Odd(nn.Linear):
    def __init__(self, change) -> None:
        super().__init__(D_IN, 2, dtype=torch.float64)
        self.change = change

    def forward(self, x: Tensor):
        return self.change(super().forward(x))


@pytest.mark.parametrize("change", [lambda y: y[:, :, None], lambda y: y.sum(), lambda y: (y, y), lambda y: y[:1]])
def test_outputs_of_other_shapes_are_refused(change):
    with pytest.raises(ValueError, match=r"a model with an output of shape \[2\] or \[2, k\]"):
        empirical_ntk(Odd(change), X4)


def test_a_model_that_hides_its_parameters_from_autograd_is_refused():
    with pytest.raises(ValueError, match=r"must be differentiable\. Got 'an output that is a constant"):
        empirical_ntk(Odd(lambda y: y.detach()), X4)


# The papers' gradients, with explicit Kronecker products


def vec(matrix: Tensor) -> Tensor:
    """Column upon column."""
    return matrix.T.flatten()


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def kron(a: Tensor, b: Tensor) -> Tensor:
    return torch.kron(a.contiguous(), b.contiguous())


def commutation(n: int) -> Tensor:
    """K vec(A) = vec(A')."""
    return torch.stack([vec(e.reshape(n, n)) for e in eye(n * n)])


def slopes(matrix: Tensor) -> Tensor:
    """D = diag(vec(relu'))."""
    return torch.diag(vec((matrix > 0).double()))


class Case:
    """A readout on N = 4 samples, its loss |y - t|^2 / 2, the gradients by autograd, and its equilibria as columns."""

    def __init__(self, name: str, **options) -> None:
        self.N, self.n, self.d = 4, WIDTH, D_IN
        self.readout = network(name, seed=2, **options)
        X = randn(self.N, D_IN, seed=5)
        y = self.readout(X)
        self.error = (y - randn(self.N, seed=6)).detach()
        loss = 0.5 * (y - randn(self.N, seed=6)).square().sum()
        names = [part for part, _ in self.readout.named_parameters()]
        self.grad = dict(zip(names, torch.autograd.grad(loss, list(self.readout.parameters())), strict=True))
        self.X, self.Z, self.a = X.T, self.readout.solve(X).z.detach().T, self.readout.a.detach()
        self.p = {part: p.detach() for part, p in self.readout.cell.named_parameters()}
        self.kernel = empirical_ntk(self.readout, X)
        self.parts = empirical_ntk(self.readout, X, blocks=True)


def test_gaussian_lemma_2_is_the_gradient():
    case = Case("gaussian")
    W, U = case.p["W"], case.p["U"]
    D = slopes(W @ case.Z + U @ case.X)
    R = kron(eye(case.N), case.a[None]) @ torch.linalg.solve(eye(case.N * case.n) - D @ kron(eye(case.N), W), D)
    J_W, J_U = (R @ kron(side.T, eye(case.n)) for side in (case.Z, case.X))
    assert_close(J_W.T @ case.error, vec(case.grad["cell.W"]))
    assert_close(J_U.T @ case.error, vec(case.grad["cell.U"]))
    assert_close(case.Z @ case.error, case.grad["a"])
    assert_close(case.kernel, case.Z.T @ case.Z + J_W @ J_W.T + J_U @ J_U.T)


def test_erratum_gaussian_lemma_2_multiplies_by_the_readout_on_the_wrong_side():
    """R = (a x I_n) J^-1 D does not multiply; with a' for a it does, and is wrong; (I_n x a') J^-1 D is right."""
    case = Case("gaussian")
    D = slopes(case.p["W"] @ case.Z + case.p["U"] @ case.X)
    inverse = torch.linalg.solve(eye(case.N * case.n) - D @ kron(eye(case.N), case.p["W"]), D)
    printed = kron(case.a[:, None], eye(case.N))
    assert printed.shape[1] != inverse.shape[0]
    gradients = [
        kron(case.Z, eye(case.n)) @ (factor @ inverse).T @ case.error
        for factor in (kron(case.a[None], eye(case.N)), kron(eye(case.N), case.a[None]))
    ]
    errors = [float((g - vec(case.grad["cell.W"])).norm() / case.grad["cell.W"].norm()) for g in gradients]
    assert errors[0] > 0.1
    assert errors[1] < 1e-10


def test_scaled_relu_lemma_3_2_is_the_gradient():
    case = Case("scaled_relu")
    Z, X, A, W, gamma = case.Z.T, case.X.T, case.p["A"], case.p["W"], case.readout.cell.gamma  # rows are samples
    D, E = slopes(gamma * Z @ A + torch.relu(X @ W)), slopes(X @ W)
    Q = eye(case.N * case.n) - gamma * D @ kron(A.T, eye(case.N))
    back = torch.linalg.solve(Q.T, kron(case.a[None], eye(case.N)).T)
    Pi, M = (D @ E @ kron(eye(case.n), X)).T @ back, gamma * (D @ kron(eye(case.n), Z)).T @ back  # (13)', (12)'
    assert_close(Pi @ case.error, vec(case.grad["cell.W"]))
    assert_close(M @ case.error, vec(case.grad["cell.A"]))
    assert_close(Z.T @ case.error, case.grad["a"])
    assert_close(case.kernel, Z @ Z.T + M.T @ M + Pi.T @ Pi)


def monotone_jacobians(case: Case, readout: Tensor) -> dict[str, Tensor]:
    """J_A, J_B, J_U of Proposition 4, with the factor that stands for the readout."""
    A, B, n = case.p["A"], case.p["B"], case.n
    W = (1 - case.readout.cell.m) * eye(n) - A.T @ A + B - B.T
    D = slopes(W @ case.Z + case.p["U"] @ case.X)
    back = readout @ torch.linalg.solve(eye(case.N * n) - D @ kron(eye(case.N), W), D)
    K = commutation(n)
    P_A, P_B = -(eye(n * n) + K) @ kron(eye(n), A.T), eye(n * n) - K
    by_W = back @ kron(case.Z.T, eye(n))
    return {"cell.A": by_W @ P_A, "cell.B": by_W @ P_B, "cell.U": back @ kron(case.X.T, eye(n))}


def test_monotone_lemma_3_2_3_is_the_gradient():
    case = Case("monotone_without_bias")
    J = monotone_jacobians(case, kron(eye(case.N), case.a[None]))
    for name in J:
        assert_close(case.error @ J[name], vec(case.grad[name]))
    assert_close(case.Z @ case.error, case.grad["a"])


def test_erratum_monotone_lemma_3_2_3_multiplies_by_the_readout_on_the_wrong_side():
    """(u' x I_N) Q^-1 D ... should be (I_N x u') Q^-1 D ..., since vec[Z] has the n entries of a sample in a row."""
    case = Case("monotone_without_bias")
    J = monotone_jacobians(case, kron(case.a[None], eye(case.N)))
    for name in J:
        wanted = vec(case.grad[name])
        assert torch.linalg.vector_norm(case.error @ J[name] - wanted) > 0.1 * torch.linalg.vector_norm(wanted)


def test_erratum_monotone_proposition_4_has_the_transpose_on_the_wrong_factor():
    """K = J_A' J_A + ... + Z'Z adds matrices of different shapes; J_A J_A' + J_B J_B' + J_U J_U' + Z'Z is the kernel."""
    case = Case("monotone_without_bias")
    J = monotone_jacobians(case, kron(eye(case.N), case.a[None]))
    printed = {name: (part.T @ part).shape for name, part in J.items()}
    assert printed == {"cell.A": (25, 25), "cell.B": (25, 25), "cell.U": (15, 15)}
    for name, part in J.items():
        assert_close(case.parts[name], part @ part.T)
    assert_close(case.kernel, case.Z.T @ case.Z + sum(part @ part.T for part in J.values()))


def test_erratum_monotone_lemma_c_0_2_has_all_its_signs_wrong():
    """C.0.2 (samples are rows there) is the negative of Lemma 3.2.2 in all four derivatives; finite differences side with 3.2.2."""
    N, n, d, m = 3, 3, 2, 0.4
    p = {"A": 0.4 * randn(n, n, seed=1), "B": 0.4 * randn(n, n, seed=2), "U": randn(d, n, seed=3)}
    X = randn(N, d, seed=4)

    def weight(A: Tensor, B: Tensor) -> Tensor:
        return (1 - m) * eye(n) - A.T @ A + B - B.T

    def equilibrium(W: Tensor, U: Tensor) -> Tensor:
        Z = torch.zeros(N, n, dtype=torch.float64)
        for _ in range(400):
            Z = torch.relu(Z + 0.3 * (Z @ W + X @ U - Z))
        assert (torch.relu(Z @ W + X @ U) - Z).abs().max() < 1e-13
        return vec(Z)

    def difference(f, at: Tensor, h: float = 1e-5) -> Tensor:
        columns = [(h * e.reshape(at.T.shape).T) for e in eye(at.numel())]
        return torch.stack([(f(at + e) - f(at - e)) / (2 * h) for e in columns], dim=1)

    W = weight(p["A"], p["B"])
    Z = equilibrium(W, p["U"]).reshape(n, N).T
    true = {
        "W": difference(lambda W: equilibrium(W, p["U"]), W),
        "A": difference(lambda A: equilibrium(weight(A, p["B"]), p["U"]), p["A"]),
        "B": difference(lambda B: equilibrium(weight(p["A"], B), p["U"]), p["B"]),
        "U": difference(lambda U: equilibrium(W, U), p["U"]),
    }
    D = slopes(Z @ W + X @ p["U"])
    back = torch.linalg.solve(eye(N * n) - D @ kron(W.T, eye(N)), D)
    by_W, by_U = back @ kron(eye(n), Z), back @ kron(eye(n), X)
    P_A, P_B = (eye(n * n) + commutation(n)) @ kron(eye(n), p["A"].T), eye(n * n) - commutation(n)
    ours = {"W": by_W, "A": by_W @ -P_A, "B": by_W @ P_B, "U": by_U}  # Lemma 3.2.2
    printed = {"W": -by_W, "A": by_W @ P_A, "B": -by_W @ P_B, "U": -by_U}  # Lemma C.0.2, where P_A has no minus
    for name, wanted in true.items():
        assert wanted.norm() > 0.1
        assert_close(ours[name], wanted, 1e-7)
        assert (printed[name] - wanted).norm() > wanted.norm()


def monotone_matrix(A: Tensor, B: Tensor, m: float) -> Tensor:
    return (1 - m) * eye(len(A)) - A.T @ A + B - B.T


def test_erratum_monotone_lemma_3_3_2_is_false_without_d():
    """|(I - W'D)^-1 u| <= |u| / m fails by any factor where B is large; D (I - W'D)^-1 u obeys it, here with equality."""
    m, u, D = 0.5, torch.tensor([1.0, 0.0], dtype=torch.float64), torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    W = monotone_matrix(torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[0.0, 100.0], [0.0, 0.0]]).double(), m)
    v = torch.linalg.solve(eye(2) - W.T @ D, u)
    assert v.norm() > 50 * u.norm() / m
    assert float((D @ v).norm()) == pytest.approx(float(u.norm() / m), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(0.01, 2.0), st.floats(0.0, 30.0), st.booleans())
def test_monotone_lemma_3_3_2_holds_with_d(seed, n, m, scale, relu):
    W = monotone_matrix(randn(n, n, seed=seed), scale * randn(n, n, seed=seed + 1), m)
    u, slope = randn(n, seed=seed + 2), torch.rand(n, generator=torch.Generator().manual_seed(seed)).double()
    D = torch.diag(slope.round() if relu else slope)
    r = D @ torch.linalg.solve(eye(n) - W.T @ D, u)
    assert r.norm() <= u.norm() / m * (1 + 1e-9)
