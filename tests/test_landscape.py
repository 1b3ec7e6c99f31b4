"""The loss landscape: exact on a quadratic, invariant to rescaling, honest about failed solves; the model is left as it was."""

import csv
import math
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from opteq import Equilibrium, Stop
from opteq.cells import MonotoneMultiTier, OptEq, ScaledReLU
from opteq.diagnostics import Landscape, landscape
from opteq.diagnostics.contours import contour_levels
from opteq.diagnostics.directions import directions
from opteq.models import Readout
from opteq.solvers import Picard


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gaussian parameters in float64, none of them zero."""
    draw = torch.Generator().manual_seed(seed)
    model.double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def mlp(scale: float = 1.0) -> nn.Module:
    """Two ReLU layers, the first multiplied by `scale` and the second divided by it: the same function."""
    model = fill(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    model[0].weight.data *= scale
    model[0].bias.data *= scale
    model[2].weight.data /= scale
    return model


X = torch.randn(10, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(10) % 3


def entropy(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(X), Y)


def snapshot(model: nn.Module) -> list[tuple[str, bytes]]:
    """Every byte of the parameters and buffers, signs of zeros and NaN included."""
    return [(name, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]


def layer(on_failure: Any = "warn") -> Equilibrium:
    """z = W' relu(W z + U x + b) by plain iteration: it converges where |W| < 1."""
    cell = fill(OptEq(4, 5, 5))
    cell.W.data *= 0.7 / torch.linalg.matrix_norm(cell.W.data, 2)
    return Equilibrium(cell, Picard(), Stop(rtol=1e-6, max_steps=200), on_failure=on_failure)


# --- values ---------------------------------------------------------------------------------------------------------------------


def test_the_landscape_of_a_quadratic_loss_is_the_quadratic() -> None:
    model = fill(nn.Linear(5, 3))
    target = torch.randn(3, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    found = landscape(model, lambda m: ((m.weight - target) ** 2).sum(), steps=7, span=2.0, seed=3)
    d, e = directions(model, 2, 3)["weight"]
    gap = model.weight.detach() - target
    axis = np.linspace(-2, 2, 7)
    a, b = axis[:, None], axis[None]
    dot = lambda u, v: float((u * v).sum())  # noqa: E731
    expected = (
        dot(gap, gap) + 2 * a * dot(gap, d) + 2 * b * dot(gap, e) + a**2 * dot(d, d) + 2 * a * b * dot(d, e) + b**2 * dot(e, e)
    )
    np.testing.assert_allclose(found.axis, axis, atol=1e-15)
    np.testing.assert_allclose(found.loss, expected, rtol=1e-12)
    assert found.converged.all()
    assert found.loss.dtype == torch.float64
    assert (found.seed, found.span) == (3, 2.0)


def test_the_middle_of_an_odd_grid_is_the_loss_of_the_model_exactly() -> None:
    model = mlp()
    found = landscape(model, entropy, steps=5)
    assert found.axis[2] == 0
    assert found.loss[2, 2] == entropy(model).detach()
    assert found.loss.shape == found.converged.shape == (5, 5)


def test_one_dimension_is_the_line_along_the_first_direction() -> None:
    line, plane = (landscape(mlp(), entropy, steps=5, dims=dims) for dims in (1, 2))
    torch.testing.assert_close(line.loss, plane.loss[:, 2], rtol=0, atol=0)
    assert line.converged.shape == (5,)


def test_the_same_seed_gives_the_same_grid_and_another_seed_another() -> None:
    torch.manual_seed(5)
    first = landscape(mlp(), entropy, steps=3, seed=1)
    torch.manual_seed(6)
    again, other = (landscape(mlp(), entropy, steps=3, seed=seed) for seed in (1, 2))
    torch.testing.assert_close(first.loss, again.loss, rtol=0, atol=0)
    assert not torch.allclose(first.loss, other.loss)


@pytest.mark.parametrize("scale", [0.25, 8.0, 1.7])
def test_rescaling_consecutive_relu_layers_changes_nothing(scale: float) -> None:
    plain, scaled = (landscape(mlp(factor), entropy, steps=5) for factor in (1.0, scale))
    torch.testing.assert_close(plain.loss, scaled.loss, rtol=1e-11, atol=0)


def test_random_numbers_in_the_loss_are_the_same_at_every_point_and_the_callers_are_untouched() -> None:
    model, state = mlp(), torch.get_rng_state()
    found = landscape(model, lambda m: torch.rand(()), steps=3)
    assert found.loss.unique().numel() == 1
    assert torch.equal(torch.get_rng_state(), state)


# --- directions -----------------------------------------------------------------------------------------------------------------


def norms(tensor: Tensor, filters: int) -> Tensor:
    """The norm of each filter, found by moving its dimension to the front."""
    return tensor.detach().movedim(filters, 0).flatten(1).norm(dim=1)


@pytest.mark.parametrize(
    ("model", "name", "filters"),
    [
        (nn.Linear(4, 6), "weight", 0),
        (nn.Conv2d(3, 5, 3), "weight", 0),
        (nn.ConvTranspose2d(3, 5, 3), "weight", 1),
        (OptEq(4, 5, 6), "W", 0),
        (OptEq(4, 5, 6, constrained=True), "parametrizations.W.original", 0),
        (ScaledReLU(4, 6), "W", 1),
        (ScaledReLU(4, 6), "A", 1),
        (MonotoneMultiTier(2, (3, 4), 4), "K.0", 0),
        (parametrizations.weight_norm(nn.Linear(4, 6)), "parametrizations.weight.original1", 0),
        (parametrizations.spectral_norm(nn.Linear(4, 6)), "parametrizations.weight.original", 0),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, nn.Module) else str(part),
)
def test_each_filter_of_a_direction_is_as_long_as_the_models(model: nn.Module, name: str, filters: int) -> None:
    weight = dict(fill(model).named_parameters())[name]
    d, e = directions(model, 2, 0)[name]
    for part in (d, e):
        torch.testing.assert_close(norms(part, filters), norms(weight, filters), rtol=1e-12, atol=0)
        assert not torch.allclose(norms(part, 1 - filters), norms(weight, 1 - filters))
    assert not torch.allclose(d, e)


def test_the_filters_of_a_grouped_transposed_convolution_belong_to_their_groups() -> None:
    model = fill(nn.ConvTranspose1d(4, 6, 3, groups=2))  # weight [4, 3, 3]: outputs 0-2 read inputs 0 and 1, outputs 3-5 the others
    (d,) = directions(model, 1, 0)["weight"]
    for group in (slice(0, 2), slice(2, 4)):
        torch.testing.assert_close(norms(d[group], 1), norms(model.weight[group], 1), rtol=1e-12, atol=0)


def test_the_readout_is_one_filter() -> None:
    model = fill(Readout(OptEq(4, 5, 6)))
    (d,) = directions(model, 1, 0)["a"]
    torch.testing.assert_close(d.norm(), model.a.detach().norm())
    assert sorted(directions(model, 1, 0)) == ["a", "cell.U", "cell.W"]


def test_a_filter_of_zeros_stays_zero() -> None:
    model = fill(nn.Linear(4, 3))
    model.weight.data[1] = 0
    (d,) = directions(model, 1, 0)["weight"]
    assert (d[1] == 0).all()
    assert (d[0] != 0).all()


class Odd(nn.Module):
    """Biases and scales that are no vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.position_bias = nn.Parameter(torch.ones(3, 2))
        self.b = nn.Parameter(torch.ones(2, 2))
        self.counts = nn.Parameter(torch.ones(2, 2, dtype=torch.long), requires_grad=False)
        self.norm = nn.LayerNorm([2, 3])
        self.W = nn.Parameter(torch.ones(2, 2))


def test_biases_and_normalisation_parameters_do_not_move() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.PReLU(), Odd())
    assert sorted(directions(model, 1, 0)) == ["0.weight", "3.weight", "5.W"]
    assert list(directions(parametrizations.weight_norm(nn.Linear(4, 6)), 1, 0)) == ["parametrizations.weight.original1"]
    seen: list[dict[str, Tensor]] = []

    def look(m: nn.Module) -> float:
        seen.append({name: parameter.detach().clone() for name, parameter in m.named_parameters()})
        return 0.0

    landscape(model, look, steps=2)
    assert len(seen) == 4
    for name, parameter in model.named_parameters():
        moved = [not torch.equal(point[name], parameter) for point in seen]
        assert moved == [name in ("0.weight", "3.weight", "5.W")] * 4


def test_shared_weights_move_once_and_directions_do_not_depend_on_the_device_or_the_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(directions(model, 1, 0)) == ["0.weight"]
    single, double = (directions(deepcopy(model).to(dtype), 1, 0)["0.weight"][0] for dtype in (torch.float32, torch.float64))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)


# --- convergence ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")  # the landscape itself must silence them
def test_the_mask_marks_the_points_where_the_solver_failed() -> None:
    model = layer()
    found = landscape(model, lambda m: m(X).square().mean(), steps=5, span=3.0, dims=1)
    (d,) = directions(model, 1, 0)["cell.W"]
    (e,) = directions(model, 1, 0)["cell.U"]
    expected = []
    for a in found.axis.tolist():
        W, U = model.cell.W.detach() + a * d, model.cell.U.detach() + a * e
        z = torch.zeros(10, 5, dtype=torch.float64)
        for _ in range(200):
            before, z = z, torch.relu(z @ W.T + X @ U.T + model.cell.b.detach()) @ W
        expected.append(bool(((z - before).norm(dim=1) < 1e-4 * z.norm(dim=1)).all()))
    assert found.converged.tolist() == expected
    assert set(expected) == {True, False}


def test_a_layer_that_raises_gives_nan_where_it_fails_and_the_same_mask() -> None:
    warned, raised = (
        landscape(layer(kind), lambda m: m(X).square().mean(), steps=5, span=3.0, dims=1) for kind in ("warn", "raise")
    )
    assert torch.equal(warned.converged, raised.converged)
    assert torch.equal(raised.loss.isnan(), ~raised.converged)


def test_one_failing_sample_of_one_of_several_solves_is_enough() -> None:
    model = layer("ignore")

    def loss(m: nn.Module, bad: float) -> float:
        x = X.clone()
        x[3, 0] = bad
        m(x)
        m(X)
        return 0.0

    assert landscape(model, lambda m: loss(m, 0.0), steps=2, span=1e-3, dims=1).converged.all()
    assert not landscape(model, lambda m: loss(m, math.nan), steps=2, span=1e-3, dims=1).converged.any()


def test_readouts_are_watched_too() -> None:
    model = Readout(layer().cell, Picard(), Stop(rtol=1e-6, max_steps=1))
    assert not landscape(model, lambda m: m(X).square().mean(), steps=2, dims=1).converged.any()


# --- the model is left as it was ------------------------------------------------------------------------------------------------


class Nosy(nn.Module):
    """A model with buffers of all kinds, one of which a forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
        self.register_buffer("calls", torch.tensor([0.0, -0.0, math.nan]))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y: Tensor = self.body(x)
        return y


def restless(model: nn.Module) -> Tensor:
    loss = entropy(model)
    model.train(not model.training)
    return loss


def failing(model: nn.Module) -> Tensor:
    restless(model)
    raise KeyError("the loss went wrong")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("loss", [restless, failing])
def test_parameters_buffers_and_modes_are_restored_bit_for_bit(training: bool, loss: Callable[[nn.Module], Tensor]) -> None:
    model = Nosy().double().train(training)
    model.body[2].eval()
    before, tensors = snapshot(model), [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    modes = [part.training for part in model.modules()]
    if loss is failing:
        with pytest.raises(KeyError, match="went wrong"):
            landscape(model, loss, steps=3)
    else:
        found = landscape(model, loss, steps=3)
        again = landscape(model, loss, steps=3)
        assert torch.equal(found.loss, again.loss)
    assert snapshot(model) == before
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == tensors
    assert [part.training for part in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_point_meets_the_same_mode_and_the_same_buffers() -> None:
    model = Nosy().double().train()
    seen: list[tuple[bool, float]] = []

    def loss(m: nn.Module) -> Tensor:
        seen.append((m.training, float(m.calls[0])))
        return restless(m)

    landscape(model, loss, steps=3, dims=1)
    assert seen == [(True, 0.0)] * 3


def test_a_graph_built_before_can_still_be_differentiated() -> None:
    model = mlp()
    loss = entropy(model)
    landscape(model, entropy, steps=2)
    loss.backward()
    assert model[0].weight.grad is not None


def test_the_loss_runs_without_gradients() -> None:
    modes: list[bool] = []

    def loss(m: nn.Module) -> float:
        modes.append(torch.is_grad_enabled())
        return 0.0

    landscape(mlp(), loss, steps=2, dims=1)
    assert modes == [False, False]
    assert torch.is_grad_enabled()


# --- bad arguments --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"steps": 1}, ValueError, "'steps'"),
        ({"steps": 3.0}, TypeError, "'steps'"),
        ({"span": 0.0}, ValueError, "'span'"),
        ({"span": math.inf}, ValueError, "'span'"),
        ({"seed": -1}, ValueError, "'seed'"),
        ({"dims": 3}, ValueError, "'dims'.*1 or 2"),
        ({"model": entropy}, TypeError, "'model'"),
        ({"model": nn.BatchNorm1d(3)}, ValueError, "'model'.*with weights"),
        ({"loss": lambda m: m(X)}, ValueError, r"'loss'.*one number.*\[10, 3\]"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        landscape(**{"model": mlp(), "loss": entropy, "steps": 2, **arguments})


def test_parameters_that_are_not_finite_are_refused() -> None:
    model = mlp()
    model[2].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"2\.weight.*finite"):
        landscape(model, entropy, steps=2)


# --- files ----------------------------------------------------------------------------------------------------------------------


def bowl(dims: int = 2, lift: float = 0.01) -> Landscape:
    axis = torch.linspace(-1, 1, 9, dtype=torch.float64)
    loss = lift + (axis[:, None] ** 2 + 4 * axis[None] ** 2 if dims == 2 else axis**2)
    return Landscape(axis, loss, loss < 1 + lift, 0, 1.0)


@pytest.mark.parametrize("dims", [1, 2])
def test_the_csv_has_a_row_for_every_point(tmp_path: Path, dims: int) -> None:
    found = bowl(dims)
    with found.csv(tmp_path / "landscape.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9**dims
    assert list(rows[0]) == [*("x", "y")[:dims], "loss", "converged"]
    for row in rows:
        place = tuple(found.axis.tolist().index(float(row[key])) for key in ("x", "y")[:dims])
        assert float(row["loss"]) == float(found.loss[place])
        assert row["converged"] == str(int(found.converged[place]))


@pytest.mark.parametrize("dims", [1, 2])
def test_a_figure_says_where_solves_failed(dims: int) -> None:
    (axes, *_) = bowl(dims).figure().axes
    hatches = [part.get_hatch() for part in (*axes.collections, *axes.patches)]
    assert [hatch for hatch in hatches if hatch]
    assert "not converged" in axes.get_title()
    sound = bowl(dims)
    (axes, *_) = Landscape(sound.axis, sound.loss, torch.ones_like(sound.converged), 0, 1.0).figure().axes
    assert not any(part.get_hatch() for part in (*axes.collections, *axes.patches))
    assert axes.get_title() == ""


def test_the_first_direction_runs_along_the_x_axis() -> None:
    flat = bowl()
    rows = flat.axis[:, None].expand(9, 9).exp()  # changes along the first direction only
    axes = Landscape(flat.axis, rows, torch.ones(9, 9, dtype=torch.bool), 0, 1.0).figure().axes[0]
    paths = [path for part in axes.collections for path in part.get_paths() if len(path.vertices) > 1]
    lines = [path.vertices for path in paths if np.ptp(path.vertices[:, 0]) < 1e-9 < np.ptp(path.vertices[:, 1])]
    assert axes.get_xlabel() == "first direction"
    assert lines  # contours are vertical


CASES = [(1, "broken"), (1, "empty"), (2, "negative"), (2, "constant"), (2, "broken"), (2, "empty")]


@pytest.mark.parametrize(("dims", "values"), CASES)
def test_every_landscape_can_be_drawn(tmp_path: Path, dims: int, values: str) -> None:
    found = bowl(dims, lift=-0.5 if values == "negative" else 0.01)
    if values == "constant":
        found.loss.fill_(3.0)
    if values == "broken":
        found.loss[0], found.loss[2] = math.nan, math.inf
    if values == "empty":
        found.loss.fill_(math.nan)
    path = found.draw(tmp_path / "landscape.svg")
    assert path == tmp_path / "landscape.svg"
    assert "<svg" in path.read_text()


def test_a_landscape_gives_the_same_file_every_time(tmp_path: Path) -> None:
    one, two = (bowl(1).draw(tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two
    assert bowl(1).draw(str(tmp_path / "a.png")).read_bytes()[:4] == b"\x89PNG"


def test_levels_are_in_equal_ratios_where_the_loss_ranges_widely() -> None:
    wide, narrow, flat = (contour_levels(np.array(values)) for values in ([0.01, 100.0], [1.0, 2.0], [5.0, 5.0]))
    np.testing.assert_allclose(wide[1:] / wide[:-1], wide[1] / wide[0])
    np.testing.assert_allclose(np.diff(narrow), narrow[1] - narrow[0])
    assert (np.diff(flat) > 0).all()
    assert (np.diff(contour_levels(np.array([-1.0, 50.0]))) > 0).all()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'opteq\[report\]'"):
        bowl().figure()
