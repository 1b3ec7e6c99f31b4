"""What all experiments share: names, options, files, claims, measures; and `opteq_theorems`, whose claims show at every size."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from opteq import experiments
from opteq.experiments import Options, _claims, _harness, _measuring, opteq_theorems

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def result():
    return opteq_theorems.run(Options("smoke"))


def test_names_lists_the_files():
    assert "opteq_theorems" in experiments.names()
    assert experiments.names() == sorted(path.stem for path in Path(experiments.__file__).parent.glob("[!_]*.py"))


def test_every_claim_has_a_check():
    assert list(opteq_theorems.CHECKS) == list(opteq_theorems.CLAIMS)


@pytest.mark.parametrize("name", opteq_theorems.CLAIMS)
def test_the_claim_is_shown(result, name):
    claim = result["claims"][name]
    assert claim["claim"] == opteq_theorems.CLAIMS[name]
    assert claim["measured"]
    assert claim["shown"], claim["measured"]


def test_a_measurement_shows_its_threshold_and_NaN_shows_nothing(result):
    for claim in result["claims"].values():
        for measured in claim["measured"].values():
            assert math.isfinite(measured["value"])
            assert len({"at_most", "at_least"} & set(measured)) == 1
    for judge in (_claims.at_most, _claims.at_least):
        assert judge(1.0, 1.0)["shown"] is True
        for values in (math.nan, [math.nan, 1.0], [1.0, math.nan]):
            assert judge(values, 1.0)["shown"] is False
    assert _claims.at_most(1.1, 1.0)["shown"] is _claims.at_least(0.9, 1.0)["shown"] is False


def test_a_wrong_equilibrium_is_noticed(monkeypatch):
    exact = opteq_theorems.equilibrium
    monkeypatch.setattr(opteq_theorems, "equilibrium", lambda cell, x: 1.01 * exact(cell, x))
    config = opteq_theorems.PRESETS["smoke"]
    for name in ("theorem_1", "theorem_2", "corollary_1", "theorem_4_gradient", "theorem_4_prox", "lemma_3"):
        with torch.no_grad():
            measured, _ = opteq_theorems.CHECKS[name](config, torch.Generator().manual_seed(0))
        assert not all(m["shown"] for m in measured.values()), name


def test_the_same_seed_gives_the_same_result_whatever_the_global_state(result):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float32)
    again = opteq_theorems.run(Options("smoke", seed=0))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert json.loads(json.dumps(again, allow_nan=False)) == json.loads(json.dumps(result, allow_nan=False))


def test_another_seed_draws_other_networks(result):
    check, config = opteq_theorems.theorem_3, opteq_theorems.PRESETS["smoke"]
    with torch.no_grad():
        _, series = check(config, torch.Generator().manual_seed(1004))
    assert series["wide"] != result["series"]["wide"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"preset": "huge"}, ValueError, "'preset' parameter of Options must be 'smoke' or"),
        ({"seed": -1}, ValueError, "'seed'"),
        ({"seed": "1"}, TypeError, "'seed'"),
        ({"workers": 0}, ValueError, "'workers'"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        Options(**options)


@pytest.mark.parametrize(("name", "near"), [("scaledrelu_widths", "scaledrelu_width"), ("theorems", "opteq_theorems")])
def test_an_unknown_name_suggests_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"Did you mean '{near}'"):
        experiments.load(name)
    with pytest.raises(ValueError, match=r"^The name of an experiment must be one of .*opteq_theorems, .*Got 'qqq' instead\.$"):
        experiments.run("qqq", Options())


def test_the_status_tells_the_preset_and_the_claims_of_a_result(tmp_path):
    assert str(experiments.status("opteq_theorems", tmp_path)) == "no result"
    path = tmp_path / "opteq_theorems.json"
    for content in ("{", "[]", '{"preset": "small"}', '{"claims": {"a": 1}, "preset": "small"}'):
        path.write_text(content)
        assert experiments.status("opteq_theorems", tmp_path).preset is None
    path.write_text(json.dumps({"preset": "small", "claims": {"a": {"shown": True}, "b": {"shown": False}}}))
    assert str(experiments.status("opteq_theorems", tmp_path)) == "small: 1 of 2 claims shown"
    path.write_text(json.dumps({"preset": "paper", "claims": {"a": {"shown": True}}}))
    assert experiments.status("opteq_theorems", tmp_path) == experiments.Status("opteq_theorems", "paper", 1, 1, complete=True)
    assert str(experiments.status("opteq_theorems", tmp_path)) == "paper: all 1 claims shown"


def test_the_figure_is_drawn(result, tmp_path):
    path = tmp_path / "new" / "figure.png"
    _harness.draw("opteq_theorems", _harness.as_json(result), path)
    pixels = imread(path)[:, :, :3]
    height, width = pixels.shape[:2]
    assert min(height, width) >= 1000
    for panel in (pixels[a : a + height // 2, b : b + width // 2] for a in (0, height // 2) for b in (0, width // 2)):
        assert panel.var() > 1e-3
        assert (np.ptp(panel, axis=2) > 0.5).sum() > 500  # colours


def test_main_writes_the_result_and_the_figure(result, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(opteq_theorems, "run", lambda options: {**result, "preset": options.preset, "seed": options.seed})
    assert opteq_theorems.main(["--preset", "smoke", "--seed", "3", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["opteq_theorems.json", "opteq_theorems.png"]
    written = json.loads((tmp_path / "out" / "opteq_theorems.json").read_text())
    assert (written["preset"], written["seed"]) == ("smoke", 3)
    assert written["seconds"] >= 0
    assert written["claims"].keys() == opteq_theorems.CLAIMS.keys()
    assert capsys.readouterr().out.count(" shown") == len(opteq_theorems.CLAIMS)


def test_main_reports_a_claim_that_is_not_shown(result, tmp_path, monkeypatch, capsys):
    failed = {**result, "claims": {**result["claims"], "lemma_1": {**result["claims"]["lemma_1"], "shown": False}}}
    monkeypatch.setattr(opteq_theorems, "run", lambda options: failed)
    assert opteq_theorems.main(["--out", str(tmp_path), "--figure", str(tmp_path / "f.svg")]) == 1
    assert "NOT SHOWN" in capsys.readouterr().out
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")


def test_numbers_are_written_with_six_digits():
    assert _harness.rounded({"a": [1 / 3, 2, True, "x", math.nan], "b": (1e-15 / 3,)}) == {
        "a": [0.333333, 2, True, "x", None],
        "b": [3.33333e-16],
    }


def test_the_result_in_the_repository_shows_every_claim(result):
    stored = json.loads((ROOT / "results" / "opteq_theorems.json").read_text())
    assert all(claim["shown"] for claim in stored["claims"].values())
    for name, claim in result["claims"].items():  # made by the present checks
        assert stored["claims"][name]["measured"].keys() == claim["measured"].keys()


def test_without_tyro_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(ImportError, match=r"pip install 'opteq\[train\]'"):
        opteq_theorems.main(["--preset", "smoke"])


def test_options_that_are_not_known_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        opteq_theorems.main(["--sead", "3"])
    assert end.value.code == 2
    assert "--sead" in capsys.readouterr().err


# --- what is kept ---------------------------------------------------------------------------------------------------------------


def write_status(folder, preset, failed=None):
    claims = {"a": {"shown": True}}
    (folder / "opteq_theorems.json").write_text(json.dumps({"preset": preset, "claims": claims, "failed": failed or {}}))


def test_the_result_of_a_larger_preset_is_not_replaced(tmp_path, monkeypatch):
    write_status(tmp_path, "small")
    monkeypatch.setattr(opteq_theorems, "run", None)
    words = r"'out' parameter of Options must be another folder: .*opteq_theorems\.json has the result of the larger preset small"
    with pytest.raises(ValueError, match=words):
        experiments.run("opteq_theorems", Options("smoke", out=tmp_path))


@pytest.mark.parametrize(("before", "kept"), [({}, True), ({"other": "bad"}, False)])
def test_a_complete_result_is_not_replaced_by_one_with_failed_cells(result, tmp_path, monkeypatch, capsys, before, kept):
    write_status(tmp_path, "smoke", before)
    text = (tmp_path / "opteq_theorems.json").read_text()
    broken = {**result, "failed": {"cell": "Error"}, "cell_seconds": {"cell": 7.0}}
    monkeypatch.setattr(opteq_theorems, "run", lambda options: dict(broken))
    assert experiments.run("opteq_theorems", Options("smoke", out=tmp_path)) == int(kept)
    assert ((tmp_path / "opteq_theorems.json").read_text() == text) is kept
    assert ("is left as it is: cells failed" in capsys.readouterr().out) is kept
    if not kept:
        assert json.loads((tmp_path / "opteq_theorems.json").read_text())["seconds"] >= 7.0


# --- measures -------------------------------------------------------------------------------------------------------------------


def test_a_mean_has_its_standard_error_and_a_lost_seed_loses_both():
    assert _claims.mean_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx((3.0, math.sqrt((4 + 1 + 0 + 9) / 3) / 2))
    mean, error = _claims.mean_error([2.0])
    assert mean == 2.0
    assert math.isnan(error)
    for lost in (None, math.nan):
        assert all(map(math.isnan, _claims.mean_error([1.0, lost])))


def test_a_ratio_to_nothing_is_unknown():
    assert _claims.ratios([2.0, 1.0, 3.0]) == [0.5, 3.0]
    assert math.isnan(_claims.ratios([0.0, 1.0])[0])


def test_within_wants_both_bounds():
    assert [_claims.within(value, 1.0, 2.0)["shown"] for value in (0.9, 1.0, 2.0, 2.1, math.nan)] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_a_claim_without_a_measurement_is_not_shown():
    assert _claims.claim("It is.", {})["shown"] is False
    assert _claims.verdict(_claims.untestable("It is.", "no time")) == "not testable"


def test_times_are_medians_of_turns_and_a_run_may_time_itself():
    calls = []
    found = _measuring.medians({"own": lambda: calls.append("own") or 0.5, "other": lambda: calls.append("other")}, repeats=3)
    assert found["own"] == 0.5
    assert 0 <= found["other"] < 0.5
    assert calls == ["own", "other"] * 4


def test_memory_is_the_peak_of_what_is_alive():
    def run():
        kept = [torch.zeros(1000) for _ in range(3)]
        del kept
        return torch.ones(1000)

    assert 12_000 <= _measuring.peak_bytes(run) < 13_000


def test_one_thread_is_for_a_while():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with _measuring.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
