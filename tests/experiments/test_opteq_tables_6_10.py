"""Tables 6 to 10 of the OptEq paper: their networks and cells against what is known of them, and their judges."""

import json
import math

import pytest
import torch
from torch import nn

from opteq import Equilibrium, Stop, data, models
from opteq.experiments import _images as images
from opteq.experiments import opteq_table6_7 as table67
from opteq.experiments import opteq_table8 as table8
from opteq.experiments import opteq_table9 as table9
from opteq.experiments import opteq_table10 as table10
from opteq.experiments._harness import Options, as_json
from opteq.gradients import Unrolled
from opteq.grids import Outcome
from opteq.models import count_parameters
from opteq.recipes import Data, OpteqSmall
from opteq.training import set_mode

NAN = float("nan")


def shown(measured):
    return all(one["shown"] for one in measured.values())


def tiny(**settings):
    torch.manual_seed(0)
    return models.deep_opteq(2, 3, channels=4, hidden=(3, 5), stride=1, norm=None, **settings).double()


def batch():
    return torch.randn(3, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def stub(monkeypatch, experiment, result):
    """Put results in the place of cells; the settings that they were asked for, by name."""
    asked = {}

    def grid(name, function, cells, options):
        asked.update(cells)
        return {cell: Outcome(cell, result(cell), None, 1.0, cached=False) for cell in cells}

    monkeypatch.setattr(experiment, "grid", grid)
    return asked


# --- table 8 --------------------------------------------------------------------------------------------------------------------


def test_the_depth_of_equal_residual_is_the_least_that_gets_as_far():
    model, found = tiny(), []
    depth = table8.depth_for(model, batch(), 1e-4)
    for steps in (depth - 1, depth):
        set_mode(model, "unrolled", steps)
        found.append(table8.residual(model, batch()))
    assert found[1] <= 1e-4 < found[0]
    assert table8.depth_for(model, batch(), 0.0, most=3) == 3


def rows_of_table_8(name=None, **numbers):
    """The paper's numbers, and bytes for which it claims nothing; those of one row changed."""
    keys = ("accuracy", "inference", "backward", "residual")
    rows = {row: {**dict(zip(keys, printed, strict=True)), "bytes": 10.0} for row, printed in table8.PAPER.items()}
    if name is not None:
        rows[name] |= numbers
    return rows


SAME = {name: {"implicit_seconds": 1.0, "unrolled_seconds": 1.0} for name in table8.IMPLICIT}


@pytest.mark.parametrize(
    ("rows", "equal", "expected"),
    [
        (rows_of_table_8(), SAME, set()),
        (rows_of_table_8("K = 20", accuracy=87.0), SAME, {"accuracy"}),
        (rows_of_table_8("implicit, 1e-3", accuracy=86.0), SAME, {"implicit_accuracy"}),
        (rows_of_table_8("K = 40", residual=5e-4), SAME, {"residual"}),
        (rows_of_table_8("implicit, 1e-2", residual=1.1e-2), SAME, {"residual"}),
        (rows_of_table_8("K = 5", residual=0.0), SAME, {"residual"}),
        (rows_of_table_8("K = 10", backward=1.7), SAME, {"time"}),
        (rows_of_table_8("implicit, 1e-3", bytes=10.6), SAME, {"memory"}),
        (rows_of_table_8(), SAME | {"implicit, 1e-2": {"implicit_seconds": 1.2, "unrolled_seconds": 1.0}}, {"equal_residual"}),
        ({}, {}, set(table8.CLAIMS)),
    ],
)
def test_the_papers_own_numbers_show_its_claims_on_unrolling_and_others_do_not(rows, equal, expected):
    found = table8.judge(table8.PRESETS["paper"], rows, equal)
    assert {name for name, measured in found.items() if not shown(measured)} == expected


def test_the_memory_of_an_implicit_step_is_measured_at_every_tolerance(monkeypatch):
    monkeypatch.setattr(table8, "TOLERANCES", (1e-1, 1e-6))
    model = tiny()
    part, before = data.Split(batch(), torch.tensor([0, 1, 2])), model.equilibrium.stop
    pair = model, data.Dataset("test", part, part, classes=("a", "b", "c"))
    found = table8.memories(table8.Config(batch=3), {"implicit, 1e-3": pair, "K = 5": pair})
    assert found.keys() == {"implicit, 1e-3"}
    loose, tight = found["implicit, 1e-3"]
    assert loose["tolerance"] == 1e-1
    assert loose["evaluations"] < tight["evaluations"]
    assert min(loose["bytes"], tight["bytes"]) > 0
    assert model.equilibrium.stop == before
    rows = table8.remembered(found)["rows"]
    assert rows == [[one["tolerance"], one["evaluations"], one["bytes"] / 1e6] for one in (loose, tight)]
    assert table8.remembered({})["rows"] == []


# --- table 9 --------------------------------------------------------------------------------------------------------------------


def test_unrolling_makes_the_steps_of_the_library_and_has_their_gradient():
    model = tiny(gradient=Unrolled(5))
    plain = table9.Unrolling(model.equilibrium.cell, 5)
    x = model.features(batch()).detach()
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    one, other = model.equilibrium(x1), plain(x2)
    torch.testing.assert_close(other, one)
    for z in (one, other):
        z.square().sum().backward()
    torch.testing.assert_close(x2.grad, x1.grad)


def test_an_implicit_copy_gives_what_a_long_unrolling_gives_and_shares_no_weights():
    model = tiny()
    copy = table9.implicit(model, Stop(rtol=1e-12, max_steps=100))
    long = models.Classifier(model.extractor, table9.Unrolling(model.equilibrium.cell, 200), model.head)
    for network in (copy, long):
        network(batch()).square().sum().backward()
    torch.testing.assert_close(copy(batch()), long(batch()))
    for mine, theirs in zip(copy.parameters(), long.parameters(), strict=True):
        assert mine is not theirs
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-9)


def test_raw_convolutions_have_the_size_of_the_separable_ones_to_a_channel():
    model = models.opteq_small(10, stages=1)
    raw = table9.with_raw_convolutions(model)
    before, after = (count_parameters(one)["equilibrium"] for one in (model, raw))
    assert 0 <= before - after < 5 * (9 * (256 + 512) + 1)
    assert count_parameters(raw)["head"] == count_parameters(model)["head"]


def test_a_step_counts_evaluations_and_leaves_the_weights_as_they_are():
    model = table9.implicit(tiny(), Stop(rtol=0.0, max_steps=3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = table9.Step(model, batch(), torch.tensor([0, 1, 2]))
    step()
    step()
    assert all(len(step.evaluations[phase]) == 2 and min(step.evaluations[phase]) > 3 for phase in ("forward", "backward"))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_the_papers_own_speeds_show_its_claims():
    rows = {name: {"images": float(speed)} for name, speed in table9.PAPER.items()}
    found = table9.judge(rows)
    assert {name for name, measured in found.items() if shown(measured)} == set(table9.CLAIMS) - {"implicit"}


@pytest.mark.parametrize("name", table9.PAPER)
def test_a_speed_that_is_not_known_shows_nothing(name):
    rows = {one: {"images": float(speed)} for one, speed in table9.PAPER.items() if one != name}
    assert not shown(table9.judge(rows)["explicit"])


# --- table 10 -------------------------------------------------------------------------------------------------------------------


def test_both_segmenters_have_the_same_size_to_a_hundredth():
    chosen = table10.networks(table10.PRESETS["small"])[table10.FCN]
    with torch.device("meta"):
        fcn = models.FCN(3, 11, channels=chosen.channels, hidden=chosen.hidden, parameters=chosen.parameters)
    assert 0.99 * chosen.parameters < count_parameters(fcn)["total"] <= chosen.parameters


def scores(opteq, fcn):
    return {table10.OPTEQ: dict.fromkeys(table10.SCORES, opteq), table10.FCN: dict.fromkeys(table10.SCORES, fcn)}


@pytest.mark.parametrize(
    ("opteq", "fcn", "expected"),
    [
        ([5.0, 6.2], [2.0, 3.0], True),
        ([2.0, 4.0], [2.0, 3.0], False),  # by one standard error
        ([2.0, 3.0], [5.0, 6.2], False),
        ([5.0, NAN], [2.0, 3.0], False),
        ([5.0], [2.0], True),
        ([5.0], [NAN], False),
    ],
)
def test_a_segmenter_is_better_if_that_is_clear_or_if_there_is_one_seed(opteq, fcn, expected):
    found = table10.judge(scores(opteq, fcn))
    assert [shown(measured) for measured in found.values()] == [expected] * 3


def test_a_training_that_diverged_has_no_scores():
    assert math.isnan(table10.score({"diverged": "at step 3", "step": 3}, "miou"))
    assert table10.curves(None) == {}


@pytest.mark.parametrize(
    ("experiment", "result"), [(table67, {"diverged": "at step 3", "step": 3}), (table9, None), (table10, None)]
)
def test_cells_that_failed_or_diverged_are_gaps_in_tables_and_figure(monkeypatch, tmp_path, experiment, result):
    asked = stub(monkeypatch, experiment, lambda name: result)
    found = json.loads(as_json(experiment.run(Options("smoke", seed=5, out=tmp_path))))
    assert all("seed5" in name for name in asked)
    trained = {name for name, one in found["claims"].items() if name not in ("shapes", "sizes", "reading")}
    assert not any(found["claims"][name]["shown"] for name in trained)
    assert experiment.figure(found).axes


def test_a_seed_that_diverged_leaves_what_the_other_has(monkeypatch):
    done = {"parameters": 7, "seconds": 1.0, "curves": {"epoch": [1, 2], "valid_miou": [0.1, None], "train_loss": [2.0, 1.0]}}
    monkeypatch.setattr(table10, "images", lambda config, options: Data())
    done |= {f"test_{key}": 0.5 for key in table10.SCORES}
    asked = stub(monkeypatch, table10, lambda name: done if "seed4" in name else {"diverged": "early"})
    found = json.loads(as_json(table10.run(Options("small", seed=3))))
    assert {settings["recipe"]["train"]["seed"] for name, settings in asked.items() if name.endswith("seed4")} == {4}
    assert found["series"]["scores"]["FCN"]["miou"] == [None, 50.0]
    assert not any(one["shown"] for one in found["claims"].values())
    assert table10.figure(found).axes


def test_digits_as_label_maps_have_the_label_of_the_digit_or_of_what_is_around_it(tmp_path):
    pytest.importorskip("PIL")
    found = data.load("camvid", images.digit_maps(tmp_path, side=16, count=3), size=(16, 16))
    digits = data.load("digits").train
    for x, y, label in zip(*found.train, digits.y, strict=False):
        assert set(y.unique().tolist()) == {int(label), 10}
        assert x[0][y == label].mean() > x[0][y == 10].mean()


# --- tables 6 and 7 -------------------------------------------------------------------------------------------------------------


def test_without_its_equilibrium_the_recipe_has_the_head_on_the_extractor():
    blank = torch.zeros(2, 3, 32, 32)
    split = data.Split(blank, torch.tensor([0, 1]))
    network = OpteqSmall(equilibrium=False).build(data.Dataset("none", split, split, ("a", "b")))
    assert isinstance(network.equilibrium, nn.Identity)
    assert network.eval()(blank).shape == (2, 2)


def test_sizes_and_shapes_of_a_network_are_taken_part_by_part():
    network = table67.drawn(table67.SMALL, 2)
    found = table67.millions(network)
    assert found["total"] == pytest.approx(8.788520)
    assert found["head without linear map"] == pytest.approx(4.673512 - (2048 * 1000 + 1000) / 1e6)
    assert table67.shapes(network, 64) == [[3, 64, 64], [512, 8, 8], [512, 8, 8], [1000]]


def measured(rows, counted=None, path=(512, 28, 28)):
    part = {"extractor": 8.5, "total": 18.2, "head without linear map": 2.6}
    counted = counted or {
        table67.SMALL: {"2 stages": part, "3 stages": part},
        table67.MID: {"2 stages": part | {"total": 40.0}, "3 stages": part | {"extractor": 24.9}},
    }
    return table67.judge(counted, {name: [[3, 224, 224], list(path)] for name in table67.PRINTED}, rows)


def trained(**alphas):
    rows = {name: {"valid_accuracy": value / 100} for name, value in table67.PAPER.items()}
    rows[table67.SMALL]["alphas"] = [[0.8] * 5, alphas.get("alphas", list(table67.ALPHAS))]
    return rows


def test_the_papers_own_numbers_show_all_that_it_claims():
    assert all(shown(found) for found in measured(trained()).values())


def test_what_differs_from_the_paper_is_not_shown():
    rows = trained(alphas=[0.63, 0.82, 0.86, 0.9, 0.87])
    rows[table67.MID_BARE]["valid_accuracy"] = 0.9
    found = measured(rows, path=(1024, 14, 14))
    assert {name for name, one in found.items() if not shown(one)} == {"mid", "alpha", "shapes"}


def test_trainings_that_failed_show_nothing():
    found = measured({name: {} for name in table67.PAPER})
    assert {name for name, one in found.items() if not shown(one)} == {"small", "mid", "larger", "alpha"}


def test_how_equilibria_converge_is_told_of_networks_that_have_one():
    found = table67.convergence(tiny(gradient=Unrolled(1)), batch())
    assert found["residual"] > 1e-3
    assert found["solved"] == 1.0
    assert found["steps_needed"] >= 1.0
    assert table67.convergence(models.without_equilibrium(tiny()), batch()) == {}
    assert isinstance(tiny().equilibrium, Equilibrium)
