"""The panels of a training, the curves that rows of metrics give, and their figures."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes

from opteq.cells import ScaledReLU
from opteq.diagnostics.panels import METRICS, PANELS, SOLVER, THEORY, Panel, Series, curves, number, series_curves
from opteq.diagnostics.training_curves import TrainingCurves, training_curves
from opteq.models import Readout
from opteq.recipes.certified import log_monitor, train_certified
from opteq.runs import Run
from opteq.theory.certificates import Monitor, certified_init, certify

TITLES = {panel.title: panel for panel in PANELS}


def step(at: Any, **values: Any) -> dict[str, Any]:
    return {"kind": "step", "step": at, **values}


def epoch(at: Any, **values: Any) -> dict[str, Any]:
    return {"kind": "epoch", "step": at, **values}


def check_curve(found: Any, label: str, x: list[float], y: list[float]) -> None:
    assert found.label == label
    np.testing.assert_array_equal(found.x, x)
    np.testing.assert_array_equal(found.y, y)


# ---------------------------------------------------------------- panels


def test_a_series_takes_the_rows_of_its_kind_and_a_value_that_is_no_number_is_a_gap() -> None:
    values = [1.0, None, math.nan, math.inf, -math.inf, "2", True, 1e101, 10**400, 3]
    rows = [*(step(at, loss=value) for at, value in enumerate(values)), epoch(3, loss=9.0), step(30), step(None, loss=7.0), {}]
    (found,) = series_curves(rows, Series("each", "step", "loss"))
    check_curve(found, "each", list(range(10)), [1.0, *[math.nan] * 8, 3.0])
    assert series_curves(rows, Series("lr", "step", "lr")) == []
    assert series_curves([step(1, lr=None)], Series("lr", "step", "lr")) == []
    assert number(2) == 2.0
    assert number(-1e100) is None


def test_lists_have_a_curve_for_each_place_and_dicts_for_each_name() -> None:
    series = Series("alpha", "epoch", "alpha")
    first, second = series_curves([epoch(1, alpha=[0.5, 0.25]), epoch(2, alpha=[0.75])], series)
    check_curve(first, "alpha 1", [1, 2], [0.5, 0.75])
    check_curve(second, "alpha 2", [1, 2], [0.25, math.nan])
    named = [epoch(1, alpha={"model.cells.0": 0.5, "model.cells.1": 0.25}), epoch(2, alpha={"model.cells.0": 0.75})]
    first, second = series_curves(named, series)
    check_curve(first, "alpha cells.0", [1, 2], [0.5, 0.75])
    check_curve(second, "alpha cells.1", [1, 2], [0.25, math.nan])
    assert [found.label for found in series_curves([epoch(1, alpha={"net.cell": 0.5})], series)] == ["alpha cell"]
    assert [found.label for found in series_curves([epoch(1, alpha={"a.cell": 0.5, "b": 0.5})], series)] == [
        "alpha a.cell",
        "alpha b",
    ]
    assert series_curves([epoch(1, alpha=[]), epoch(2, alpha={})], series) == []


def test_a_series_of_every_key_with_a_prefix_has_a_curve_for_each_and_not_too_many() -> None:
    series = Series("norm of", "monitor", "norm ", every=True)
    rows = [{"kind": "monitor", "step": 0, "norm W": 1.0, "norm [U b]": 2.0, "gamma norm A": 3.0, "norm": 4.0}]
    found = series_curves(rows, series)
    assert [(each.label, each.y.tolist()) for each in found] == [("norm of W", [1.0]), ("norm of [U b]", [2.0])]
    many = [{"kind": "monitor", "step": 0, **{f"norm {at}": 1.0 for at in range(1000)}}]
    assert len(series_curves(many, series)) == 50


def test_the_curves_of_a_panel_are_those_of_its_series_in_order() -> None:
    rows = iter([step(1, loss=2.0), epoch(2, train_loss=1.0, valid_loss=3.0)])  # read once
    assert [found.label for found in curves(rows, TITLES["Loss"])] == ["validation", "training", "each step"]


def test_panels_have_one_title_each() -> None:
    assert len(TITLES) == len(PANELS) == len(METRICS) + len(SOLVER) + len(THEORY)


# ---------------------------------------------------------------- sources


def certified() -> tuple[Monitor, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        X = torch.nn.functional.normalize(torch.randn(4, 6, dtype=torch.float64))
        y = torch.randn(4, dtype=torch.float64)
        readout = certified_init(Readout(ScaledReLU(6, 16)).double(), X, y)
        certificate = certify(readout, X, y, sharp=True)
        return train_certified(readout, X, y, certificate, 4, kernel=True)


def test_a_certified_training_has_all_panels_of_the_theory(tmp_path: Path) -> None:
    monitor, violation = certified()
    assert violation is None
    found = training_curves(monitor)
    assert found.panels == THEORY
    loss, bound = curves(found.rows, THEORY[0])
    check_curve(loss, "loss", [0, 1, 2, 3, 4], [record.measurement.loss for record in monitor.records])
    assert bound.y.tolist() == [record.bound for record in monitor.records]
    assert {each.label for each in curves(found.rows, THEORY[1])} == {
        "norm a",
        "norm W",
        "norm A",
        "gamma norm A",
    }
    with Run.create(tmp_path / "run", {}) as run:
        log_monitor(run, monitor)
        assert training_curves(run) == found
    for source in (tmp_path / "run", str(tmp_path / "run"), SimpleNamespace(history=monitor.metrics()), iter(monitor.metrics())):
        assert training_curves(source) == found
    assert "loss" not in repr(found)


@pytest.mark.parametrize("source", [3, None, {"kind": "step"}, [3], [{}, "row"]])
def test_a_source_that_is_none_is_named(source: Any) -> None:
    with pytest.raises(TypeError, match="'source' parameter of training_curves must be a run folder"):
        training_curves(source)


# ---------------------------------------------------------------- the finding

ROWS = [
    *(step(at, loss=1 / at, accuracy=0.9, lr=0.1, solver_steps=7.0) for at in range(1, 61)),
    *(epoch(20 * at, valid_loss=math.nan if at == 2 else 0.5 / at, alpha=[0.5, 0.1]) for at in (1, 2, 3)),
    {"kind": "event", "step": 30, "what": "nan_loss"},
    {"kind": "event", "step": None},
    {"kind": "callback", "step": 3, "loss": 8.0},
]


def test_the_table_has_a_row_for_each_number(tmp_path: Path) -> None:
    columns = training_curves(ROWS).columns()
    assert list(columns) == ["panel", "series", "step", "value"]
    assert {len(column) for column in columns.values()} == {60 * 4 + 2 + 6}
    chosen = (columns["panel"] == "Loss") & (columns["series"] == "validation")
    assert list(zip(columns["step"][chosen], columns["value"][chosen], strict=True)) == [(20.0, 0.5), (60.0, 0.5 / 3)]
    assert columns["value"][(columns["series"] == "alpha 2")].tolist() == [0.1, 0.1, 0.1]
    training_curves(ROWS).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"curves.csv", "curves.svg", "curves.png"}
    with (tmp_path / "curves.csv").open(newline="") as file:
        assert [float(row["value"]) for row in csv.DictReader(file)] == columns["value"].tolist()


def axes_of(found: TrainingCurves, title: str) -> Axes:
    (axes,) = found.figure_of(title).axes
    return axes


def test_the_figure_has_a_panel_for_all_that_has_a_number() -> None:
    found = training_curves(ROWS)
    titles = [panel.title for panel in found.panels]
    assert titles == ["Loss", "Accuracy", "Learning rate", "Mean solver steps", "Alpha of each layer"]
    figure = found.figure()
    assert len(figure.axes) == 5
    assert figure.axes[0].get_legend().get_title().get_text() == "Loss"
    one = training_curves([step(1, lr=0.1)])
    assert axes_of(one, "Learning rate").get_title("left") == "Learning rate"  # a single line needs no legend
    assert axes_of(one, "Learning rate").get_legend() is None


def test_lines_are_the_curves_with_a_dotted_line_at_each_event() -> None:
    axes = axes_of(training_curves(ROWS), "Loss")
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"validation", "each step", "event"}
    assert lines["each step"].get_ydata().tolist() == [1 / at for at in range(1, 61)]
    assert lines["event"].get_xdata() == [30, 30]
    assert lines["event"].get_linestyle() == ":"
    assert (lines["validation"].get_marker(), lines["each step"].get_marker()) == (".", "")  # three points, and sixty
    many = [{"kind": "event", "step": at} for at in range(100)]
    assert len(axes_of(training_curves([*ROWS, *many]), "Learning rate").get_lines()) == 1 + 20


def test_axes_suit_their_values() -> None:
    rows = [step(at, loss=loss, accuracy=1.0, solver_steps=5 + at) for at, loss in ((1, 0.0), (2, 1.0), (3, 30.0))]
    found = training_curves(rows)
    assert axes_of(found, "Loss").get_yscale() == "log"  # from 1 on: what is 0 is left out
    assert axes_of(training_curves(rows[1:2]), "Loss").get_yscale() == "linear"
    assert axes_of(training_curves([*rows, step(4, loss=-1.0)]), "Loss").get_yscale() == "linear"
    assert axes_of(training_curves([step(1, loss=0.0)]), "Loss").get_yscale() == "linear"
    ended = training_curves([step(at, loss=loss) for at, loss in enumerate([100.0, 1.0, 0.01, 0.0, 0.0], 1)])
    assert axes_of(ended, "Loss").get_yscale() == "linear"  # else it would end at 0.01
    assert axes_of(found, "Mean solver steps").get_ylim() == (0, pytest.approx(8 * 1.05))
    assert axes_of(found, "Accuracy").get_ylim()[1] == pytest.approx(1.005)
    none = training_curves([step(1, accuracy=0.0)])
    assert axes_of(none, "Accuracy").get_ylim()[0] == pytest.approx(-0.005)


def test_many_layers_are_coloured_in_order_and_three_are_named() -> None:
    found = training_curves([epoch(1, alpha=[0.1 * at for at in range(12)])])
    axes = axes_of(found, "Alpha of each layer")
    lines = axes.get_lines()
    assert len({tuple(line.get_color()) for line in lines}) == 12
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["alpha 1", "alpha 6", "alpha 12"]


def test_names_of_any_kind_can_be_drawn(tmp_path: Path) -> None:
    names = {"$x_$": 0.5, "<script>": 0.25, "x" * 10_000: 0.75, "": 1.0, "\n": 0.1}
    found = training_curves(json.loads(json.dumps([epoch(1, alpha=names)])))
    texts = [text.get_text() for text in axes_of(found, "Alpha of each layer").get_legend().get_texts()]
    assert texts[:2] == [r"alpha \$x_\$", "alpha <script>"]
    assert max(map(len, texts)) == 36
    assert found.draw(tmp_path / "names.png").exists()


def test_a_training_without_numbers_has_an_empty_table_and_a_figure_that_says_so(tmp_path: Path) -> None:
    found = training_curves([{}, {"kind": "step"}, {"kind": "event", "step": 3}])
    assert found.panels == ()
    assert all(len(column) == 0 for column in found.columns().values())
    assert [text.get_text() for text in found.figure().texts] == ["no numbers yet"]
    assert len(found.save(tmp_path)) == 3


def test_a_panel_of_ones_own_is_drawn_and_an_unknown_title_refused() -> None:
    own = Panel("Mine", (Series("mine", "step", "mine"),), "linear")
    found = training_curves([step(1, mine=1.0), step(2, mine=2.0, lr=0.1)])
    assert [line.get_ydata().tolist() for line in found.figure_of(own).axes[0].get_lines()] == [[1.0, 2.0]]
    assert found.figure_of(TITLES["Loss"]).axes[0].get_lines() == []  # nothing to draw
    with pytest.raises(ValueError, match="'panel' parameter of TrainingCurves must be a Panel or one of 'Learning rate'"):
        found.figure_of("Loss")


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
KEYS = ["kind", "step", *{series.key for panel in PANELS for series in panel.series}, "norm W", "moved A"]
KINDS = st.sampled_from(["step", "epoch", "monitor", "event"])
SOME = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)
ANY = st.builds(lambda kind, step, row: {"kind": kind, "step": step, **row}, KINDS, st.integers(0, 9), SOME)


@settings(deadline=None, max_examples=100)
@given(st.lists(ANY, max_size=6))
def test_no_rows_can_break_the_table_and_all_of_it_are_numbers(rows: list[dict[str, Any]]) -> None:
    found = training_curves(rows)
    columns = found.columns()
    assert np.isfinite(columns["value"]).all()
    assert set(columns["panel"]) == {panel.title for panel in found.panels}


def test_a_table_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training_curves([step(1, loss=0.5)]).csv(tmp_path / "curves.csv")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="killed"):
        training_curves([step(1, loss=0.25)]).csv(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_events_the_first_are_drawn_and_the_legend_says_so() -> None:
    rows = [step(1, loss=0.5), *({"kind": "event", "step": at} for at in range(25))]
    axes = axes_of(training_curves(rows), "Loss")
    assert len(axes.get_lines()) == 21
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["each step", "event, the first 20"]
