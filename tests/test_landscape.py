"""The loss landscape: exact on a quadratic, invariant to rescaling, honest about failed solves; the model is left as it was.

An interrupted one goes on bit for bit; basins and flatness are those of known functions.
"""

import csv
import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import opteq
from conformance import ROOT, write_verify
from opteq import Equilibrium, Stop, cli
from opteq.cells import (
    AffineOptEq,
    ConvOptEq,
    DeepOptEq,
    DepthwiseOptEq,
    GaussianDEQ,
    Monotone,
    MonotoneConv,
    MonotoneMultiTier,
    Multiscale,
    MultivariateOptEq,
    OptEq,
    Residual,
    ScaledReLU,
)
from opteq.diagnostics import Landscape, landscape
from opteq.diagnostics.directions import directions
from opteq.diagnostics.landscape_figure import contour_levels
from opteq.diagnostics.losses import data_loss
from opteq.diagnostics.progress import reporting
from opteq.models import Readout, Repeated
from opteq.recipes import load_model
from opteq.runs import RunError, RunWarning
from opteq.solvers import Picard
from opteq.spectral import NormBall


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


IMAGES = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
FACTORS = st.lists(st.floats(0.05, 20.0), min_size=4, max_size=4).map(lambda list_: torch.tensor(list_, dtype=torch.float64))


def image_loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(IMAGES), torch.arange(6) % 3)


def convnet_of(second: nn.Module) -> nn.Module:
    """Convolution, relu, `second` (or a normalisation before the relu), relu, linear."""
    first = [nn.Conv2d(2, 4, 3), second, nn.ReLU()] if isinstance(second, nn.GroupNorm) else [nn.Conv2d(2, 4, 3), nn.ReLU(), second]
    body = nn.Sequential(*first, nn.ReLU(), nn.Flatten()).double()
    return fill(nn.Sequential(*body, nn.Linear(body(IMAGES).shape[1], 3)))


def scale_filters(layer: nn.Module, factors: Tensor) -> None:
    layer.weight.data *= factors[:, None, None, None]
    layer.bias.data *= factors


@settings(deadline=None, max_examples=8)
@given(factors=FACTORS)
def test_a_factor_for_each_filter_that_a_depthwise_layer_or_a_normalisation_undoes_changes_nothing(factors: Tensor) -> None:
    with torch.no_grad():
        depthwise, normalised = nn.Conv2d(4, 4, 3, groups=4), nn.GroupNorm(4, 4, eps=0.0)
        for second in (depthwise, normalised):
            model = convnet_of(second)
            plain = landscape(model, image_loss, steps=3)
            scale_filters(model[0], factors)
            if second is depthwise:
                second.weight.data /= factors[:, None, None, None]
            scaled = landscape(model, image_loss, steps=3)
            torch.testing.assert_close(plain.loss, scaled.loss, rtol=1e-9, atol=0)


@settings(deadline=None, max_examples=8)
@given(factors=FACTORS)
def test_a_factor_for_each_convolution_that_the_next_one_undoes_changes_nothing(factors: Tensor) -> None:
    model = convnet_of(nn.Conv2d(4, 5, 3))
    plain = landscape(model, image_loss, steps=3)
    first, second = factors[0], factors[1]
    scale_filters(model[0], first.expand(4))
    scale_filters(model[2], second.expand(5))
    model[2].weight.data /= first
    model[5].weight.data /= second
    torch.testing.assert_close(plain.loss, landscape(model, image_loss, steps=3).loss, rtol=1e-9, atol=0)


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


CELLS = [
    (lambda: OptEq(3, 4, 5), {"W", "U"}),
    (lambda: OptEq(3, 4, 5, constrained=True), {"parametrizations.W.original", "U"}),
    (lambda: DeepOptEq([ConvOptEq(2, 3, 4)], learn_alpha=True), {"cells.0.W", "cells.0.U"}),  # the alpha is one number
    (lambda: ConvOptEq(2, 3, 4, constrained=True), {"parametrizations.W.original", "U"}),
    (lambda: DepthwiseOptEq(2, 3, 4), {"W1", "W2", "U1", "U2"}),
    (lambda: MultivariateOptEq(3, 4, 5), {"W", "U", "parametrizations.S.original"}),
    (lambda: AffineOptEq(OptEq(3, 4, 5)), {"A", "cell.W", "cell.U"}),
    (lambda: Monotone(3, 4), {"A", "B", "U"}),
    (lambda: MonotoneConv(2, 3, 4), {"A", "B", "U"}),
    (lambda: MonotoneMultiTier(2, (3, 4), 4), {"A.0", "A.1", "B.0", "B.1", "K.0", "U"}),
    (lambda: Residual(4, 6, groups=2), {"W1", "W2"}),
    (lambda: GaussianDEQ(3, 4), {"W", "U"}),
    (lambda: ScaledReLU(3, 4), {"W", "A"}),
    (lambda: Multiscale((2, 4)), None),  # all of its convolutions
]


@pytest.mark.parametrize(("build", "weights"), CELLS)
def test_the_weights_of_every_cell_move_and_its_biases_scales_and_norms_do_not(
    build: Callable[[], nn.Module], weights: set[str] | None
) -> None:
    model = build()
    if weights is None:
        weights = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Conv2d)}
    moved = directions(model, 1, 0)
    assert set(moved) == weights
    for name, (d,) in moved.items():
        weight = model.get_parameter(name)
        side = 1 if isinstance(model, ScaledReLU) else 0  # there z is a row
        torch.testing.assert_close(norms(d, side), norms(weight, side))
    everything = directions(model, 1, 0, "scaled")
    assert set(everything) == {name for name, _ in model.named_parameters()}
    for name in set(everything) - weights:
        torch.testing.assert_close(everything[name][0].abs(), model.get_parameter(name).detach().abs())


def test_scaled_biases_go_either_way_and_readouts_and_weight_norms_keep_their_filters() -> None:
    model = fill(nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), parametrizations.weight_norm(nn.Linear(40, 3))))
    found = directions(model, 2, 0, "scaled")
    d, e = (part / model[0].bias.detach() for part in found["0.bias"])
    assert set(d.round(decimals=9).tolist()) == {-1.0, 1.0}
    assert not torch.allclose(d, e)
    (first, _), v = found["2.parametrizations.weight.original1"], model[2].parametrizations.weight.original1
    torch.testing.assert_close(norms(first, 0), norms(v, 0))
    readout = fill(Readout(OptEq(4, 5, 6)))
    torch.testing.assert_close(directions(readout, 1, 0, "scaled")["a"][0].norm(), readout.a.detach().norm())


def test_biases_move_in_a_landscape_where_they_are_asked_to() -> None:
    model = fill(nn.Linear(4, 3))
    found = landscape(model, lambda m: m.bias.square().sum(), steps=3, dims=1, biases="scaled")
    d = directions(model, 1, 0, "scaled")["bias"][0]
    expected = [float((model.bias.detach() + a * d).square().sum()) for a in (-1, 0, 1)]
    np.testing.assert_allclose(found.loss, expected, rtol=1e-12)
    assert landscape(model, lambda m: m.bias.square().sum(), steps=3, dims=1).loss.unique().numel() == 1
    assert landscape(nn.BatchNorm1d(3), lambda m: m.weight.sum(), steps=3, dims=1, biases="scaled").loss.unique().numel() == 3


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


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_scales_of_the_older_weight_norm_do_not_move() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 6, 3)), nn.utils.weight_norm(nn.Linear(4, 3), dim=None))
    assert sorted(directions(model, 1, 0)) == ["0.weight_v", "1.weight_v"]
    d, g = directions(model, 1, 0, "scaled")["0.weight_g"][0], model[0].weight_g.detach()
    torch.testing.assert_close(d.abs(), g.abs())


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


def test_a_network_of_a_fixed_depth_fails_where_its_states_are_not_finite_only() -> None:
    model = Repeated(layer().cell, 3)
    assert not model.solve(X).converged.any()  # of no equilibrium
    found = landscape(model, lambda m: m(X).square().sum(), steps=3)
    assert found.converged.all()
    assert found.basin(level=2 * float(found.loss[1, 1])).points > 0
    far = landscape(model, lambda m: m(1e200 * X).square().sum(), steps=3, span=1e80)
    assert far.converged.tolist() == [[False] * 3, [False, True, False], [False] * 3]


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
        ({"biases": "free"}, ValueError, "'biases'.*'fixed' or 'scaled'"),
        ({"progress": "yes"}, TypeError, "'progress'"),
        ({"model": entropy}, TypeError, "'model'"),
        ({"model": nn.BatchNorm1d(3)}, ValueError, "'model'.*with weights"),
        ({"loss": lambda m: m(X)}, ValueError, r"'loss'.*one number.*\[10, 3\]"),
        ({"loss": lambda m: None}, ValueError, r"'loss'.*one number. Got None instead"),
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


# --- the loss of a data set -----------------------------------------------------------------------------------------------------


def absolute(output: Tensor, y: Tensor) -> Tensor:
    return (output - y[:, None]).abs().mean()


@settings(deadline=None, max_examples=20)
@given(batch_size=st.integers(1, 12), kind=st.sampled_from(["entropy", "square", "own"]))
def test_the_loss_of_a_data_set_and_its_gradient_are_those_of_the_whole_whatever_the_batches(batch_size: int, kind: str) -> None:
    model = mlp()
    targets = {"entropy": Y, "square": X[:, :3], "own": X[:, 0]}[kind]
    whole = {"entropy": nn.functional.cross_entropy, "square": nn.functional.mse_loss, "own": absolute}[kind]
    value = data_loss(X, targets, absolute if kind == "own" else None, batch_size=batch_size)(model)
    expected = whole(model(X), targets)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (value, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_labels_to_be_ignored_are_no_terms_of_the_mean() -> None:
    model = fill(nn.Conv2d(2, 3, 1))
    y = torch.arange(6 * 25).reshape(6, 5, 5) % 3
    y[0], y[1, 0] = 9, 9
    value = data_loss(IMAGES, y, batch_size=1, ignore=9)(model)
    torch.testing.assert_close(value, nn.functional.cross_entropy(model(IMAGES), y, ignore_index=9), rtol=1e-13, atol=0)
    assert data_loss(IMAGES, torch.full_like(y, 9), ignore=9)(model) == 0


class Lazy:
    """Samples that are read when they are asked for."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, rows: Tensor) -> Tensor:
        self.read.append(len(rows))
        return X[rows].float()


def test_samples_are_read_batch_by_batch_in_the_dtype_of_the_model() -> None:
    lazy = Lazy()
    value = data_loss(lazy, Y.int(), batch_size=4)(mlp())
    assert lazy.read == [4, 4, 2]
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, entropy(mlp()), rtol=1e-6, atol=0)
    table = nn.Sequential(nn.Embedding(5, 3))
    words = torch.arange(10) % 5
    torch.testing.assert_close(data_loss(words, Y, batch_size=3)(table), nn.functional.cross_entropy(table(words), Y))


def test_constrained_weights_are_computed_once_and_afresh_at_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Readout(fill(OptEq(4, 5, 5, constrained=True)))
    calls: list[int] = []
    forward = NormBall.forward
    monkeypatch.setattr(NormBall, "forward", lambda self, W: calls.append(1) or forward(self, W))
    loss = data_loss(X, X[:, 0], batch_size=2)
    found = landscape(model, loss, steps=3, dims=1)
    assert len(calls) == 3
    whole = landscape(model, data_loss(X, X[:, 0]), steps=3, dims=1)
    torch.testing.assert_close(found.loss, whole.loss, rtol=1e-10, atol=0)
    assert found.loss.unique().numel() == 3


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"y": Y[:9]}, ValueError, "'x'.*as many samples as y, 9"),
        ({"x": X[:0], "y": Y[:0]}, ValueError, "at least 1"),
        ({"y": [0, 1]}, TypeError, "'y'.*a tensor"),
        ({"batch_size": 0}, ValueError, "'batch_size'"),
        ({"loss": "mse"}, TypeError, "'loss'.*a function"),
        ({"loss": lambda output, y: output}, ValueError, r"'loss'.*one number.*\[10, 3\]"),
        ({"loss": lambda output, y: 1.0}, ValueError, "'loss'.*tensor.*1.0"),
        ({"y": X[:, 0]}, ValueError, r"'y'.*\[10, 3\].*\[10\]"),
    ],
)
def test_bad_data_are_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        data_loss(**{"x": X, "y": Y, **arguments})(mlp())


# --- progress -------------------------------------------------------------------------------------------------------------------


def test_a_function_is_told_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    landscape(mlp(), entropy, steps=2, progress=lambda *pair: told.append(pair))
    assert told == [(done, 4) for done in range(5)]
    told.clear()
    interrupted(mlp(), tmp_path / "grid", 3)
    landscape(mlp(), entropy, steps=3, file=tmp_path / "grid", progress=lambda *pair: told.append(pair))
    assert told == [(done, 9) for done in range(2, 10)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_and_a_file_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.StringIO, every: float = 0.0) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with reporting("landscape", True, 9, every=every) as tell:
            for done in (4, 5, 9):
                tell(done)
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    assert "9/9" in shown(Terminal())
    lines = shown(io.StringIO()).splitlines()
    assert [line.split(",")[0] for line in lines] == ["landscape: 5/9 points", "landscape: 9/9 points"]
    assert lines[-1].endswith(" 0 s left")
    assert shown(io.StringIO(), every=60.0) == ""
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert shown(Terminal()).splitlines()[-1].startswith("landscape: 9/9 points")


def test_the_time_that_is_left_is_judged_by_the_points_of_this_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    clock = iter([0.0, 0.0, 120.0])  # as it begins, and each time that it is told something
    monkeypatch.setattr("opteq.diagnostics.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with reporting("landscape", True, 9) as tell:
        tell(4)  # of an earlier run
        tell(5)
    assert capsys.readouterr().err == "landscape: 5/9 points, 480 s left\n"


# --- restarting -----------------------------------------------------------------------------------------------------------------


def interrupted(model: nn.Module, path: Path, calls: int, steps: int = 3) -> None:
    """A landscape whose loss is interrupted at one of its calls; the first is for the middle."""
    left = calls

    def loss(m: nn.Module) -> Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return entropy(m)

    with pytest.raises(KeyboardInterrupt):
        landscape(model, loss, steps=steps, file=path)


def counted(log: list[int], loss: Callable[[nn.Module], Tensor] = entropy) -> Callable[[nn.Module], Tensor]:
    def wrapped(model: nn.Module) -> Tensor:
        log.append(1)
        return loss(model)

    return wrapped


def assert_same(one: Landscape, other: Landscape) -> None:
    """Bit for bit, NaN included."""
    for name in ("axis", "loss", "converged"):
        assert getattr(one, name).numpy().tobytes() == getattr(other, name).numpy().tobytes()
    assert (one.seed, one.span) == (other.seed, other.span)


@settings(deadline=None, max_examples=10)
@given(stops=st.lists(st.integers(0, 3), max_size=4))
def test_an_interrupted_landscape_goes_on_to_the_same_grid_bit_for_bit(tmp_path_factory: Any, stops: list[int]) -> None:
    path, model = tmp_path_factory.mktemp("grid") / "grid.jsonl", mlp()
    before = snapshot(model)
    for calls in stops:
        interrupted(model, path, calls)
        assert snapshot(model) == before
    log: list[int] = []
    assert_same(landscape(model, counted(log), steps=3, file=path), landscape(model, entropy, steps=3))
    assert len(log) == 1 + 9 - sum(max(calls - 1, 0) for calls in stops)  # the middle, and what was not yet known
    log.clear()
    landscape(model, counted(log), steps=3, file=str(path))
    assert len(log) == 1


KILLED = """
import os, signal, sys
import torch
from torch import nn
from opteq.diagnostics import landscape

model, calls, last = nn.Linear(4, 3).double(), 0, None
model.weight.data = torch.arange(12, dtype=torch.float64).reshape(3, 4).sin()
model.bias.data = torch.ones(3, dtype=torch.float64)

def loss(m):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return m.weight.exp().sum().sin()

if __name__ == "__main__":
    last = 6
    landscape(model, loss, steps=4, file=sys.argv[1])
"""


def test_a_killed_process_leaves_a_file_that_another_one_goes_on_from(tmp_path: Path) -> None:
    script, path = tmp_path / "killed.py", tmp_path / "grid.jsonl"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run([sys.executable, str(script), str(path)], env=environment, timeout=120, check=False)
    assert ended.returncode == -9
    assert len(path.read_text().splitlines()) == 1 + 4
    here: dict[str, Any] = {"__name__": "here"}
    exec(compile(KILLED, "killed.py", "exec"), here)
    found = landscape(here["model"], here["loss"], steps=4, file=path)
    assert here["calls"] == 1 + 12
    assert_same(found, landscape(here["model"], here["loss"], steps=4))


@settings(deadline=None, max_examples=15)
@given(cut=st.floats(0, 1), keep_header=st.booleans())
def test_a_torn_file_gives_the_same_grid_and_is_mended(tmp_path_factory: Any, cut: float, keep_header: bool) -> None:
    path, model = tmp_path_factory.mktemp("grid") / "grid.jsonl", mlp()
    whole = landscape(model, entropy, steps=2, file=path)
    content = path.read_bytes()
    header = content.index(b"\n") if keep_header else 1
    path.write_bytes(content[: header + int(cut * (len(content) - header))])
    if len(path.read_bytes()) < content.index(b"\n"):
        with pytest.raises(RunError, match="damaged: delete it"):
            landscape(model, entropy, steps=2, file=path)
    else:
        assert_same(landscape(model, entropy, steps=2, file=path), whole)
        assert path.read_bytes() == content


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_no_changed_byte_changes_the_grid(tmp_path_factory: Any, data: st.DataObject) -> None:
    path, model = tmp_path_factory.mktemp("grid") / "grid.jsonl", mlp()
    whole = landscape(model, entropy, steps=2, file=path)
    content = bytearray(path.read_bytes())
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    place = data.draw(st.sampled_from(digits) | st.integers(0, len(content) - 2))
    content[place] ^= data.draw(st.just(1) | st.sampled_from([2**bit for bit in range(8)]))  # 1 makes a digit of a digit
    path.write_bytes(content)
    if place <= content.index(b"\n"):
        with pytest.raises(RunError, match=r"damaged|of another"):
            landscape(model, entropy, steps=2, file=path)
        assert path.read_bytes() == content
    else:
        with pytest.warns(RunWarning, match="damaged lines are computed again"):
            assert_same(landscape(model, entropy, steps=2, file=path), whole)
        assert_same(landscape(model, entropy, steps=2, file=path), whole)  # without a warning: it was mended


def test_failed_points_and_losses_that_are_no_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    model = layer("raise")

    def loss(m: nn.Module) -> Tensor:
        value = m(X).square().mean()
        return value if value < 1 else value / 0 if value < 100 else -value.log() * math.nan

    found = [landscape(model, loss, steps=9, span=3.0, dims=1, file=tmp_path / "grid") for _ in range(2)]
    assert_same(*found)
    assert_same(found[0], landscape(model, loss, steps=9, span=3.0, dims=1))
    assert not found[0].converged.all()
    assert found[0].loss.isinf().any()
    assert found[0].loss[found[0].converged].isfinite().any()


def test_every_nan_is_the_same(tmp_path: Path) -> None:
    found = landscape(mlp(), lambda m: -math.nan, steps=3, dims=1, file=tmp_path / "grid")
    with pytest.warns(RunWarning, match="the loss in the middle is NaN, so that a change") as caught:
        again = landscape(mlp(), lambda m: -math.nan, steps=3, dims=1, file=tmp_path / "grid")
    assert Path(caught[0].filename).name == "test_landscape.py"
    assert_same(found, again)
    assert found.loss.isnan().all()


def test_a_file_without_points_cannot_be_of_another_loss(tmp_path: Path) -> None:
    landscape(mlp(), lambda m: math.nan, steps=3, dims=1, file=tmp_path / "grid")
    header = (tmp_path / "grid").read_bytes().partition(b"\n")[0]
    (tmp_path / "grid").write_bytes(header + b"\n")
    assert landscape(mlp(), lambda m: math.nan, steps=3, dims=1, file=tmp_path / "grid").loss.isnan().all()


def other_weights(model: nn.Module) -> None:
    model[0].weight.data[0, 0] += 1e-9


def train_mode(model: nn.Module) -> None:
    model.train(not model.training)


@pytest.mark.parametrize(
    ("arguments", "change", "match"),
    [
        ({"steps": 5}, None, r"\(steps: 3 -> 5\): undo"),
        ({"span": 0.5}, None, r"span: 1.0 -> 0.5"),
        ({"seed": 1}, None, r"\(seed: 0 -> 1\)"),
        ({"dims": 1}, None, r"\(dims: 2 -> 1\)"),
        ({"biases": "scaled"}, None, r"biases: 'fixed' -> 'scaled'"),
        ({}, other_weights, r"\(other parameters, directions\)"),
        ({}, train_mode, r"\(other model\)"),
        ({}, lambda model: model[1].register_buffer("more", torch.ones(1)), r"\(other buffers\)"),
        ({}, lambda model: setattr(model[1], "inplace", True), r"\(other model\)"),
    ],
)
def test_a_file_of_another_landscape_is_refused_and_left_alone(
    tmp_path: Path, arguments: dict[str, Any], change: Callable[[nn.Module], None] | None, match: str
) -> None:
    path, model = tmp_path / "grid", mlp()
    interrupted(model, path, 3)
    content = path.read_bytes()
    if change is not None:
        change(model)
    with pytest.raises(RunError, match=match):
        landscape(model, entropy, file=path, **{"steps": 3, **arguments})
    assert path.read_bytes() == content


def test_a_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(mlp(), tmp_path / "grid", 3)
    monkeypatch.setattr(opteq, "__version__", "99.0")
    with pytest.raises(RunError, match=r"version: .* -> '99.0'"):
        landscape(mlp(), entropy, steps=3, file=tmp_path / "grid")


def test_where_the_functions_of_a_model_lie_in_memory_makes_no_difference(tmp_path: Path) -> None:
    class Shown(nn.Linear):
        def extra_repr(self) -> str:
            return f"{object()!r}"

    def loss(m: nn.Module) -> Tensor:
        return m.weight.sum()

    model = fill(Shown(3, 2))
    assert_same(*(landscape(model, loss, steps=3, file=tmp_path / "grid") for _ in range(2)))


def test_another_loss_is_found_out_and_another_rounding_is_told(tmp_path: Path) -> None:
    path, model = tmp_path / "grid", mlp()
    interrupted(model, path, 3)
    with pytest.raises(RunError, match=r"another loss \(in the middle [0-9.]+ \(converged\) -> .*same data"):
        landscape(model, lambda m: 1.01 * entropy(m), steps=3, file=path)
    with pytest.raises(RunError, match=r"another loss .*nan"):
        landscape(model, lambda m: entropy(m) * math.nan, steps=3, file=path)
    with pytest.warns(RunWarning, match="rounded differently") as caught:
        landscape(model, lambda m: entropy(m) * (1 + 1e-12), steps=3, file=path)
    assert Path(caught[0].filename).name == "test_landscape.py"


@pytest.mark.parametrize("content", [b"import torch\n", b"{}\n", b"[1]\n", b'{"kind":"opteq landscape","crc":{"__float__":"x"}}\n'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"model\.py is no file of a landscape"):
        landscape(mlp(), entropy, steps=2, file=path)
    assert path.read_bytes() == content


def test_an_empty_file_is_begun_and_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    (tmp_path / "grid").touch()
    assert_same(landscape(mlp(), entropy, steps=2, file=tmp_path / "grid"), landscape(mlp(), entropy, steps=2))
    with pytest.raises(RunError, match="could not be written"):
        landscape(mlp(), entropy, steps=2, file=tmp_path / "none" / "grid")


def test_a_full_disk_is_told_and_what_was_written_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "grid"
    interrupted(mlp(), path, 3)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, line: write(file, line[:9]))
        with pytest.raises(RunError, match="free some space; the points before are safe"):
            landscape(mlp(), entropy, steps=3, file=path)
    log: list[int] = []
    assert_same(landscape(mlp(), counted(log), steps=3, file=path), landscape(mlp(), entropy, steps=3))
    assert len(log) == 1 + 7


# --- basins and flatness --------------------------------------------------------------------------------------------------------


def grid_of(function: Callable[..., Tensor], steps: int, dims: int = 2, span: float = 1.0) -> Landscape:
    axis = (torch.arange(steps, dtype=torch.float64) - (steps - 1) / 2) * (2 * span / (steps - 1))
    loss = function(*torch.meshgrid(*[axis] * dims, indexing="ij"))
    return Landscape(axis, loss, torch.ones_like(loss, dtype=torch.bool), 0, span)


def failing_where(found: Landscape, failed: Tensor) -> Landscape:
    return Landscape(found.axis, found.loss, ~failed, found.seed, found.span)


def cone(x: Tensor, y: Tensor, at: tuple[float, float] = (0.0, 0.0), slopes: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Linear in each quadrant around a grid point: the interpolation is exact."""
    return slopes[0] * (x - at[0]).abs() + slopes[1] * (y - at[1]).abs()


@settings(deadline=None, max_examples=25)
@given(level=st.floats(0.01, 0.9), slopes=st.tuples(st.floats(1.0, 4.0), st.floats(1.0, 4.0)))
def test_the_basin_of_a_cone_is_exact(level: float, slopes: tuple[float, float]) -> None:
    basin = grid_of(lambda x, y: 3 + cone(x, y, slopes=slopes), 21).basin(3 + level)
    assert basin.size == pytest.approx(2 * level**2 / (slopes[0] * slopes[1]), rel=1e-9)
    assert basin.diameter == pytest.approx(2 * math.sqrt(basin.size / math.pi))
    ends = torch.from_numpy(basin.outline)
    np.testing.assert_allclose(cone(ends[..., 0], ends[..., 1], slopes=slopes), level, rtol=1e-9)
    rim = 4 * level * math.hypot(1 / slopes[0], 1 / slopes[1])
    assert float((ends[:, 0] - ends[:, 1]).norm(dim=1).sum()) == pytest.approx(rim, rel=1e-9)
    line = grid_of(lambda x: slopes[0] * x.clamp(min=0) - slopes[1] * x.clamp(max=0), 21, 1).basin(level)
    assert line.size == line.diameter == pytest.approx(level / slopes[0] + level / slopes[1], rel=1e-9)
    np.testing.assert_allclose(sorted(line.outline), [-level / slopes[1], level / slopes[0]], rtol=1e-9)
    assert [part.at_edge or part.at_failure for part in (basin, line)] == [False, False]


def test_the_basin_of_a_quadratic_is_its_ellipse_to_second_order() -> None:
    def quadratic(x: Tensor, y: Tensor) -> Tensor:
        u, v = 0.8 * x + 0.6 * y, -0.6 * x + 0.8 * y
        return 0.25 + (u / 0.7) ** 2 + (v / 0.3) ** 2

    errors = [abs(grid_of(quadratic, steps).basin(1.25).size / (math.pi * 0.7 * 0.3) - 1) for steps in (21, 41, 81, 161)]
    assert errors[0] < 0.05
    assert errors[-1] < 5e-4
    np.testing.assert_allclose(np.log2(np.divide(errors[:-1], errors[1:])), 2, atol=0.35)
    widths = [abs(grid_of(lambda x: x**2, steps, 1).basin(0.3).size / (2 * math.sqrt(0.3)) - 1) for steps in (21, 41, 81)]
    assert max(np.array(widths) * np.array([1, 4, 16])) < 0.01


@pytest.mark.parametrize("mirror", [False, True])
def test_a_second_basin_is_not_counted_until_it_is_joined(mirror: bool) -> None:
    away = (0.5, -0.5) if mirror else (0.5, 0.5)
    found = grid_of(lambda x, y: torch.minimum(cone(x, y), cone(x, y, away)), 41)
    alone = found.basin(0.3)
    assert alone.size == pytest.approx(2 * 0.3**2, rel=1e-9)
    assert np.abs(alone.outline).sum(-1).max() <= 0.3 + 1e-9
    assert found.basin(0.7).size > 2 * 0.7**2
    line = grid_of(lambda x: torch.minimum(x.abs(), (x - 0.5).abs()), 41, 1)
    assert line.basin(0.2).size == pytest.approx(0.4)
    assert line.basin(0.3).size == pytest.approx(1.1)


def test_points_are_neighbours_along_the_sides_and_one_diagonal_of_a_square() -> None:
    for place, count in (((3, 3), 2), ((1, 1), 2), ((1, 3), 1), ((3, 1), 1), ((2, 3), 2), ((1, 2), 2), ((4, 4), 1)):
        found = grid_of(lambda x, y: torch.ones_like(x), 5)
        found.loss[2, 2] = found.loss[place] = 0
        assert found.basin(0.5).points == count


def test_points_that_failed_are_outside_and_the_basin_ends_before_them() -> None:
    found = grid_of(cone, 21)
    x = found.axis[:, None].expand(21, 21)
    half = failing_where(found, x > 0.05).basin(0.5)
    assert half.size == pytest.approx(0.5**2, rel=1e-9)
    assert half.at_failure
    assert not half.at_edge
    assert half.outline[..., 0].max() == 0
    unknown = Landscape(found.axis, found.loss.where(x < 0.05, math.nan), found.converged, 0, 1.0)
    broken = unknown.basin(0.5)
    assert broken.size == pytest.approx(0.5**2, rel=1e-9)
    assert broken.at_failure
    known = failing_where(found, x > 0.05)
    assert repr(unknown.flatness(0.5)) == repr(known.flatness(0.5))
    infinite = Landscape(found.axis, found.loss.where(x < 0.05, math.inf), found.converged, 0, 1.0)
    assert not infinite.basin(0.5).at_failure  # the loss is known: it is too large
    assert infinite.flatness(0.5).sharpness == math.inf
    hole = Landscape(found.axis, found.loss.where(found.loss > 0, math.nan), found.converged, 0, 1.0).basin(0.5)
    assert (hole.size, hole.at_failure) == (0.0, True)
    line = grid_of(lambda x: x.abs(), 21, 1)
    ended = failing_where(line, line.axis < -0.25).basin(0.5)
    assert ended.size == pytest.approx(0.7)
    assert ended.at_failure
    middle = failing_where(found, found.loss == 0).basin(0.5)
    assert (middle.size, middle.points, len(middle.outline)) == (0.0, 0, 0)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_basin_at_the_edge_is_a_lower_bound_and_a_level_too_low_has_none(dims: int) -> None:
    found = grid_of(cone if dims == 2 else torch.abs, 21, dims)
    assert found.basin(1.0).at_edge
    everything = found.basin(9.0)
    assert (everything.size, everything.points, len(everything.outline)) == (pytest.approx(2.0**dims), 21**dims, 0)
    nothing = found.basin(-1.0)
    assert (nothing.size, nothing.diameter, nothing.points, nothing.at_edge) == (0.0, 0.0, 0, False)
    assert len(nothing.outline) == 0


def test_the_flatness_of_a_quadratic_is_known() -> None:
    a, b, tilt, base = 3.0, 0.5, 0.2, 0.4
    found = grid_of(lambda x, y: base + a * x**2 / 2 + b * y**2 / 2 + tilt * x, 81)
    flat = found.flatness(0.5)
    assert flat.curvature == pytest.approx((a, b), rel=1e-9)
    assert flat.sharpness == pytest.approx(100 * (a * 0.5**2 / 2 + tilt * 0.5) / (1 + base), rel=1e-9)  # at (0.5, 0)
    assert flat.increase == pytest.approx((a + b) * 0.5**2 / 8, rel=0.01)  # the mean over the disc
    assert (flat.converged, flat.radius) == (1.0, 0.5)
    assert found.flatness().radius == 0.25
    assert grid_of(torch.square, 21, 1).flatness(0.3).sharpness == pytest.approx(9.0)  # 3 x 0.1 is more than 0.3
    line = grid_of(lambda x: base + a * x**2 / 2, 21, 1).flatness(1.0)
    assert line.curvature == pytest.approx((a,))
    assert line.sharpness == pytest.approx(100 * a / 2 / (1 + base))
    assert line.increase == pytest.approx(a / 2 * (torch.linspace(-1, 1, 21) ** 2).mean().item(), rel=1e-6)
    assert grid_of(torch.square, 3, 1).flatness().radius == 1.0


def test_flatness_leaves_failed_points_out_and_says_how_many_are_left() -> None:
    found = grid_of(lambda x, y: x**2 + y**2, 21)
    x = found.axis[:, None].expand(21, 21)
    flat = failing_where(found, x > 0.05).flatness(0.5)
    near = found.loss.sqrt() <= 0.5 + 1e-9
    kept = near & (x <= 0.05)
    assert flat.converged == pytest.approx(float(kept.sum() / near.sum()))
    assert flat.increase == pytest.approx(float(found.loss[kept].mean()))
    assert math.isnan(flat.curvature[0])
    assert flat.curvature[1] == pytest.approx(2.0)
    without = failing_where(found, found.loss == 0).flatness()
    assert math.isnan(without.sharpness)
    assert math.isnan(without.increase)
    found.loss[10, 10] = math.inf
    assert [math.isnan(value) for value in found.flatness().curvature] == [True, True]
    nothing = failing_where(found, found.loss >= 0).flatness()
    assert math.isnan(nothing.sharpness)
    assert math.isnan(nothing.increase)
    assert nothing.converged == 0


def test_basins_and_flatness_need_the_middle_and_sensible_numbers() -> None:
    even, odd = grid_of(cone, 4), grid_of(cone, 5)
    with pytest.raises(ValueError, match=r"'steps'.*odd.*4"):
        even.basin(0.5)
    with pytest.raises(ValueError, match=r"'steps'.*odd.*4"):
        even.flatness()
    for level in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"'level'.*finite"):
            odd.basin(level)
    for radius in (0.4, 1.1):
        with pytest.raises(ValueError, match=r"'radius'.*>= 0\.5 and <= 1"):
            odd.flatness(radius)


def test_a_figure_shows_the_basin_and_says_how_wide_it_is() -> None:
    found = grid_of(lambda x, y: 0.01 + cone(x, y), 21)
    plain, drawn = (found.figure(level).axes[0] for level in (None, 0.31))
    assert len(drawn.collections) == len(plain.collections) + 2
    points = np.concatenate([path.vertices for path in drawn.collections[-1].get_paths()])
    np.testing.assert_allclose(np.abs(points).sum(1), 0.3)
    assert plain.get_title() == ""
    assert drawn.get_title() == f"line: loss = 0.31, diameter {2 * math.sqrt(2 * 0.09 / math.pi):.3g}"
    line = grid_of(lambda x: x.abs(), 21, 1)
    failed = failing_where(line, line.axis < -0.25).figure(0.5).axes[0]
    assert failed.get_title().splitlines()[1] == "line: loss = 0.5, width at least 0.7"
    np.testing.assert_allclose(failed.lines[-1].get_xdata(), [-0.2, 0.5])


# --- the command ----------------------------------------------------------------------------------------------------------------


def test_the_command_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Landscape, "draw", lambda self, path, figure: path)  # slow, and tested above
    tiny = ["--channels", "4", "--hidden", "4", "--data.limit", "24", "--data.test-limit", "12", "--train.epochs", "1"]
    assert cli.main(["train", "deep", *tiny, "--quiet", "--folder", "run"]) == 0
    file, drawn = tmp_path / "drawn" / "landscape.jsonl", ["landscape", "run", "--steps", "3", "--samples", "8", "--out", "drawn"]
    assert cli.main([*drawn, "--out", "whole"]) == 0
    out = capsys.readouterr().out
    assert "(twice that in the middle): " in out
    assert "in diameter" in out
    assert "sharpness" in out
    assert out.split()[-3:] == [f"whole/landscape.{kind}" for kind in ("csv", "svg", "png")]

    assert not file.exists()
    forward, calls = Equilibrium.forward, 0

    def interrupting(self: Equilibrium, *args: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return forward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Equilibrium, "forward", interrupting)
        assert cli.main(drawn) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err
    assert len(file.read_bytes().splitlines()) == 1 + 3
    assert cli.main([*drawn, "--level", "1e9"]) == 0
    assert "at most 1e+09: at least" in capsys.readouterr().out
    assert (tmp_path / "drawn" / "landscape.csv").read_bytes() == (tmp_path / "whole" / "landscape.csv").read_bytes()

    assert cli.main([*drawn, "--dims", "1"]) == 2
    assert "dims: 2 -> 1" in (error := capsys.readouterr().err)
    assert "directions" not in error
    assert "--out names another folder, --fresh begins again" in error
    assert cli.main([*drawn, "--dims", "1", "--fresh", "--level", "0"]) == 0
    assert "at most 0: 0 wide, 0 points" in capsys.readouterr().out
    monkeypatch.setattr("opteq.diagnostics.losses._entropy", lambda *args: (torch.tensor(math.nan), 1.0))
    assert cli.main([*drawn, "--fresh"]) == 0
    out = capsys.readouterr().out
    assert "loss nan in the middle, unknown around it" in out
    assert "its basin is not known" in out


# --- at full size ---------------------------------------------------------------------------------------------------------------


@pytest.mark.verify
def test_a_51_by_51_grid_of_the_digits_model(tmp_path: Path) -> None:
    assert cli.main(["train", "deep", "--train.epochs", "8", "--quiet", "--folder", str(tmp_path / "run")]) == 0
    model, data = load_model(tmp_path / "run")
    loss, file = data_loss(data.test.x, data.test.y), tmp_path / "landscape.jsonl"
    begun, cpu = time.perf_counter(), time.process_time()

    def stop(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        landscape(model, loss, file=file, progress=stop)
    first: list[int] = []
    found = landscape(model, loss, file=file, progress=lambda done, total: first.append(done))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    assert first[0] == 51 * 51 // 2
    assert found.loss.shape == (51, 51)
    rows = torch.randint(51, (10, 2), generator=torch.Generator().manual_seed(0)).tolist()
    axis, moves = found.axis.tolist(), directions(model, 2, 0)
    for i, j in [*rows, [25, 25]]:
        moved = deepcopy(model)
        for name, (d, e) in moves.items():
            moved.get_parameter(name).data.add_(d, alpha=axis[i]).add_(e, alpha=axis[j])
        with torch.no_grad():
            assert float(loss(moved)) == pytest.approx(float(found.loss[i, j]), rel=1e-6)
    centre = float(found.loss[25, 25])
    basin, flat = found.basin(2 * centre), found.flatness()
    assert basin.points > 1
    payload = {
        "model": "opteq train deep --train.epochs 8, on digits",
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 1),
        "processor_seconds": round(cpu, 1),
        "points": found.loss.numel(),
        "samples": len(data.test.y),
        "share_converged": float(found.converged.double().mean()),
        "centre_loss": centre,
        "basin_level": basin.level,
        "basin_diameter": basin.diameter,
        "basin_points": basin.points,
        "sharpness": flat.sharpness,
        "curvature": list(flat.curvature),
    }
    write_verify("landscape", payload)
