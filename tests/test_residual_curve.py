"""Residual curves: the residuals of plain re-computations, honest quantiles, every model; nothing of the model changes."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance import residual
from opteq import Cell, Equilibrium, Map, Solver, Stop, per_sample, record
from opteq.cells import FunctionCell, GaussianDEQ, Monotone, MonotoneConv, OptEq
from opteq.diagnostics.residuals import ResidualCurve, SolverCurve, residual_curve, solver_title
from opteq.equilibrium import observe
from opteq.gradients import Unrolled
from opteq.linear import GMRES
from opteq.models import Classifier, Readout
from opteq.regularizers import L2
from opteq.solve import State, ValueState
from opteq.solvers import SAM, Accelerated, Anderson, Broyden, ForwardBackward, Newton, PeacemanRachford, Picard

f64 = torch.float64
X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=f64)


def opteq(norm: float = 0.9, **settings: Any) -> Equilibrium:
    torch.manual_seed(0)
    cell = OptEq(4, 16, 6).double()
    cell.W.data *= norm / torch.linalg.matrix_norm(cell.W.data, 2)
    return Equilibrium(cell, **settings)


def rates(*numbers: float) -> tuple[Equilibrium, Tensor]:
    """z = rate z + 1, the rate of each sample being its x: plain iteration leaves |1 - rate| rate^k of a step."""
    cell = FunctionCell(lambda z, x: x * z + 1, (1,))
    return Equilibrium(cell, Picard(), Stop(rtol=1e-3, max_steps=20)), torch.tensor(numbers, dtype=f64)[:, None]


def test_the_curve_of_plain_iteration_is_what_plain_iteration_sees() -> None:
    layer = opteq(solver=Picard(), stop=Stop(rtol=1e-8))
    curve = residual_curve(layer, X, [Picard()]).curves["Picard"]
    fn, z = layer.cell.bind(X).detach(), torch.zeros(20, 16, dtype=f64)
    solution = layer.solve(X)
    for step in range(len(curve.evals)):
        live = (solution.steps >= step).numpy()
        assert curve.residual[live, step].tolist() == pytest.approx(residual(fn, z)[live].tolist(), rel=1e-9)
        assert (curve.residual[~live, step] == solution.residual[~live]).all()  # held
        assert float(curve.solved[step]) == pytest.approx(float((solution.steps <= step).double().mean()))
        z = fn(z)
    assert curve.evals.tolist() == list(range(1, len(curve.evals) + 1))
    assert len(curve.evals) == int(solution.steps.max()) + 1
    assert curve.statuses == {"CONVERGED": 20}


@pytest.mark.parametrize("solver", [Newton(), Accelerated()], ids=str)
def test_residuals_are_true_also_where_the_solver_only_estimates_them(solver: Solver) -> None:
    layer = opteq(0.999, solver=solver, stop=Stop(rtol=1e-6))
    found = residual_curve(layer, X, {"it": solver})
    with record(iterates=True) as log:
        layer(X)
    fn = layer.cell.bind(X).detach()
    for i in range(20):
        single = fn.select(torch.tensor([i]))
        wanted = [residual(single, z[None])[0] for z in log[0].trace.path(i)]
        assert found.curves["it"].residual[i, : len(wanted)].tolist() == pytest.approx(wanted, rel=1e-6)
    assert int(found.curves["it"].evals[-1]) <= layer.solve(X).evals


def test_quantiles_are_residuals_that_so_many_samples_are_at_or_below() -> None:
    table = torch.tensor([[5.0], [1.0], [3.0], [2.0], [4.0], [math.inf], [6.0], [7.0], [8.0], [9.0]], dtype=f64)
    curve = SolverCurve(table, torch.tensor([1]), torch.zeros(1, dtype=f64), {})
    assert [float(curve.quantile(q)) for q in (0.1, 0.5, 0.9, 1.0)] == [1, 5, 9, math.inf]


def test_the_columns_are_those_of_the_file() -> None:
    found = residual_curve(opteq(), X, [Picard(), Newton()])
    columns = found.columns()
    assert list(columns) == ["solver", "step", "worst", "high", "median", "low", "solved", "evals"]
    steps = [len(curve.evals) for curve in found.curves.values()]
    assert columns["solver"].tolist() == ["Picard"] * steps[0] + ["Newton"] * steps[1]
    assert columns["step"].tolist() == [*range(steps[0]), *range(steps[1])]
    table = found.curves["Newton"].residual.numpy()
    ordered = np.sort(table, axis=0)
    for name, place in (("worst", 19), ("high", 17), ("median", 9), ("low", 1)):
        assert columns[name][steps[0] :].tolist() == ordered[place].tolist()
    assert columns["solved"][[0, steps[0] - 1, -1]].tolist() == [0, 1, 1]
    assert columns["evals"].tolist() == [cost for curve in found.curves.values() for cost in curve.evals.tolist()]


def test_failures_are_counted_and_nan_is_infinitely_far() -> None:
    layer, x = rates(0.1, 0.5, 0.999, 3.0, 0.5)
    x[4] = math.nan
    curve = residual_curve(layer, x, [Picard()]).curves["Picard"]
    assert curve.statuses == {"CONVERGED": 2, "MAX_STEPS": 1, "DIVERGED": 1, "NONFINITE": 1}
    assert curve.residual[4].tolist() == [math.inf] * 21
    assert float(curve.solved[-1]) == pytest.approx(0.4)
    assert float(curve.quantile(1.0)[-1]) == math.inf
    ResidualCurve({"Picard": curve}, {}, Stop()).figure()


def test_the_own_solver_comes_first_and_then_those_that_fit_the_map() -> None:
    anderson = ["Anderson", "Picard", "Broyden", "Newton"]
    cell = FunctionCell(lambda z, x: torch.tanh(0.5 * z + x[:, :3]), (3,))
    assert list(residual_curve(Equilibrium(cell), X).curves) == anderson
    own = opteq(solver=Anderson(memory=3))
    assert list(residual_curve(own, X, stop=Stop(max_steps=3)).curves) == [
        "Anderson(memory=3)",
        "Picard",
        "Anderson",
        "Broyden",
        "Newton",
        "Accelerated",
    ]
    split = ["PeacemanRachford", "Picard", "Anderson", "Broyden", "Newton", "ForwardBackward"]
    torch.manual_seed(0)
    assert list(residual_curve(Equilibrium(Monotone(4, 6)), X.float(), stop=Stop(max_steps=3)).curves) == split
    without = residual_curve(
        Equilibrium(MonotoneConv(1, 2, 4, padding="zeros")), X.float().view(5, 1, 4, 4), stop=Stop(max_steps=4)
    )
    assert list(without.curves) == [*anderson, "ForwardBackward"]


@pytest.mark.parametrize(
    ("solver", "title"),
    [
        (Newton(), "Newton"),
        (Anderson(memory=3, mixing=0.5), "Anderson(memory=3, mixing=0.5)"),
        (SAM(L2()), "SAM(regularizer=L2())"),
    ],
)
def test_solvers_are_named_by_what_is_not_default(solver: Solver, title: str) -> None:
    assert solver_title(solver) == title


class Still(Solver):
    """A solver that is no dataclass, and stays where it is."""

    def init(self, fn: Map, z0: Tensor) -> State:
        return ValueState(z0, 1, fn(z0))

    def step(self, fn: Map, state: State) -> State:
        return state


def test_any_solver_can_be_given_also_one_that_seeks_a_certain_fixed_point() -> None:
    found = residual_curve(opteq(), X, [Still(), SAM(L2()), Broyden()], stop=Stop(max_steps=5))
    assert list(found.curves) == ["Still", "SAM(regularizer=L2())", "Broyden"]
    assert found.curves["Still"].statuses == {"MAX_STEPS": 20}
    assert len(found.curves["SAM(regularizer=L2())"].evals) == 6
    assert found.stop == Stop(max_steps=5)


def test_a_solver_that_cannot_solve_this_map_is_left_out_with_its_reason() -> None:
    found = residual_curve(opteq(), X, {"plain": Picard(), "split": PeacemanRachford(), "linear": GMRES()})
    assert list(found.curves) == ["plain"]
    assert list(found.left_out) == ["split", "linear"]
    assert "splits monotone maps" in found.left_out["split"]
    with pytest.raises(TypeError, match=r"No solver fits this map\. ForwardBackward: .* splits monotone maps"):
        residual_curve(opteq(), X, [ForwardBackward()])


# Models


def inside(kind: str) -> tuple[nn.Module, Equilibrium, Callable[[Tensor], Tensor]]:
    """A model, its layer, and what that layer is given."""
    layer = opteq()
    if kind == "layer":
        return layer, layer, lambda x: x
    if kind == "sequential":
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), layer, nn.Linear(16, 2)).double()
        model(X)  # gives the normalisation its statistics
        return model, layer, lambda x: model[:3].eval()(x)
    if kind == "classifier":
        classifier = Classifier(nn.Linear(4, 4), layer, nn.Linear(16, 3)).double()
        return classifier, layer, classifier.extractor
    readout = Readout(GaussianDEQ(4, 8), stop=Stop(rtol=1e-4)).double()
    return readout, Equilibrium(readout.cell, stop=readout.stop), lambda x: x


@pytest.mark.parametrize("kind", ["layer", "sequential", "classifier", "readout"])
def test_the_equilibrium_is_found_in_any_model_and_given_what_the_model_gives_it(kind: str) -> None:
    model, layer, given = inside(kind)
    found = residual_curve(model, X, [Picard()])
    with torch.no_grad():
        wanted = residual_curve(layer, given(X), [Picard()])
    assert torch.equal(found.curves["Picard"].residual, wanted.curves["Picard"].residual)
    assert found.stop == layer.stop


def test_a_readout_is_solved_as_tightly_as_it_solves_itself() -> None:
    torch.manual_seed(0)
    found = residual_curve(Readout(GaussianDEQ(4, 8)).double(), X)
    assert found.stop.rtol == 1e-12
    assert all(curve.statuses == {"CONVERGED": 20} for curve in found.curves.values())


class Twice(nn.Module):
    """Two layers, the second given a start by name; its input is the first one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = opteq(), opteq(0.5)
        self.between = nn.Linear(16, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        given = self.between(self.first(x))
        out: Tensor = self.second(x=given, z0=torch.ones(len(x), 16, dtype=f64))
        return out


def test_one_of_several_layers_is_chosen_by_its_name() -> None:
    model = Twice()
    with pytest.raises(ValueError, match=r"'layer' parameter of residual_curve must be one of 'first', 'second'\. Got None"):
        residual_curve(model, X)
    with pytest.raises(ValueError, match="Got 'third' instead"):
        residual_curve(model, X, layer="third")
    found = residual_curve(model, X, [Picard()], layer="second").curves["Picard"]
    with torch.no_grad():
        given = model.between(model.first(X))
        fn = model.second.cell.bind(given)
        assert found.residual[:, 0].tolist() == pytest.approx(residual(fn, torch.ones(20, 16, dtype=f64)).tolist(), rel=1e-9)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = opteq()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.solve(x).z


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((nn.Linear(4, 2).double(), X), ValueError, "must be a model with an Equilibrium. Got 'Linear' instead"),
        ((Silent(), X), ValueError, r"layer\(x\), not layer.solve\(x\). Got 'Silent' instead"),
        ((torch.cos, X), TypeError, "'model' parameter of residual_curve must be an nn.Module"),
        ((opteq(), [1.0]), TypeError, "'x' parameter of residual_curve must be a tensor"),
        ((opteq(), X[:0]), ValueError, "with at least one sample"),
        ((opteq(), torch.tensor(1.0)), ValueError, "with at least one sample"),
        ((opteq(), X, []), ValueError, "at least one Solver"),
        ((opteq(), X, Picard()), TypeError, "'solvers' parameter of residual_curve must be Solvers by name, a list of"),
        ((opteq(), X, ["Picard"]), TypeError, "must be Solvers, such as Anderson"),
        ((opteq(), X, {"a": "Picard"}), TypeError, "must be Solvers, such as Anderson"),
    ],
)
def test_bad_arguments_are_named(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        residual_curve(*arguments)


def test_the_stop_must_be_one() -> None:
    with pytest.raises(TypeError, match="must be a Stop or None"):
        residual_curve(opteq(), X, stop=1e-3)  # type: ignore[arg-type]


class Restless(Cell):
    """A cell that draws random numbers and moves a buffer even in evaluation mode; its map wants no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.state_shape = (4,)
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=f64))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("nothing", None)

    def bind(self, x: Tensor) -> Map:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.count += torch.rand(())
        self.count = self.count + 1
        return _Halves(self.weight, x)


@dataclass(frozen=True)
class _Halves(Map):
    weight: Tensor
    x: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return self.weight * z + self.x


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_changes(training: bool) -> None:
    layer = Equilibrium(Restless(), gradient=Unrolled(3))
    model = nn.Sequential(nn.BatchNorm1d(4), layer, nn.Dropout(0.5)).double().train(training)
    model[2].eval()
    count = model[1].cell.count
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    seen: list[Any] = []
    with record() as log, observe(lambda *call: seen.append(call)):
        residual_curve(model, X)
    assert torch.equal(torch.rand(3), expected)
    assert [part.training for part in model] == [training, training, False]
    assert model[1].cell.count is count
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(log) == len(seen) == 0
    assert not model[1]._forward_pre_hooks


# Figures


def lines(figure: Any) -> list[Any]:
    return [line for line in figure.axes[0].lines if len(line.get_xdata()) > 0]


def test_the_figure_shows_median_worst_and_tolerance_of_every_solver() -> None:
    pytest.importorskip("matplotlib")
    found = residual_curve(opteq(stop=Stop(rtol=1e-5)), X, [Picard(), Newton()])
    figure = found.figure()
    (axes,) = figure.axes
    picard = found.curves["Picard"]
    assert axes.get_yscale() == "log"
    assert "true" in axes.get_ylabel()
    assert axes.lines[0].get_ydata().tolist() == picard.quantile(0.5).tolist()
    assert axes.lines[1].get_ydata().tolist() == picard.quantile(1.0).tolist()
    assert axes.lines[-1].get_ydata() == [1e-5, 1e-5]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [f"{name}: {int(curve.evals[-1])} evaluations" for name, curve in found.curves.items()]
    over = found.figure("evals").axes[0]
    assert over.lines[2].get_xdata().tolist() == found.curves["Newton"].evals.tolist()
    assert over.get_xlabel() == "evaluations of f"
    with pytest.raises(ValueError, match="'steps' or 'evals'"):
        found.figure("time")  # type: ignore[arg-type]


def test_residuals_of_zero_are_drawn_below_all_others() -> None:
    pytest.importorskip("matplotlib")
    layer, x = rates(0.0, 0.0, 0.5)
    axes = residual_curve(layer, x, [Picard()]).figure().axes[0]
    median = axes.lines[0].get_ydata()
    assert (median > 0).all()
    assert median[-1] < 1e-3
    assert axes.get_ylim()[0] <= median[-1]


@pytest.mark.parametrize("rtol", [0.0, 1e-3])
def test_a_curve_of_one_point_and_of_zeros_only_can_be_drawn(rtol: float) -> None:
    pytest.importorskip("matplotlib")
    curve = SolverCurve(torch.zeros(2, 1, dtype=f64), torch.tensor([1]), torch.ones(1, dtype=f64), {"CONVERGED": 2})
    figure = ResidualCurve({"a very long name of a solver, with its settings": curve}, {}, Stop(rtol=rtol)).figure()
    figure.canvas.draw()
    assert figure.axes[0].lines[0].get_marker() == "."


def test_solvers_that_did_not_solve_all_say_so_and_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    layer, x = rates(0.5, 0.999)
    found = residual_curve(layer, x, [Picard()])
    assert found.figure().legends[0].get_texts()[0].get_text() == "Picard: 21 evaluations, 50% solved"
    assert sorted(path.name for path in found.save(tmp_path)) == ["residuals.csv", "residuals.png", "residuals.svg"]
    with (tmp_path / "residuals.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 21
    assert float(rows[-1]["worst"]) == float(found.curves["Picard"].residual[1, -1])
