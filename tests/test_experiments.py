"""The experiments: at smoke size they show their claims, and what lies in results/ says so at full size."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from opteq import experiments
from opteq.experiments import _harness, opteq_theorems

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def result():
    return opteq_theorems.run("smoke")


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
    for judge in (_harness.at_most, _harness.at_least):
        assert judge(1.0, 1.0)["shown"] is True
        for values in (math.nan, [math.nan, 1.0], [1.0, math.nan]):
            assert judge(values, 1.0)["shown"] is False
    assert _harness.at_most(1.1, 1.0)["shown"] is _harness.at_least(0.9, 1.0)["shown"] is False


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
    again = opteq_theorems.run("smoke", seed=0)
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
    ("preset", "seed", "words"), [("huge", 0, "'preset' parameter of run must be 'smoke' or"), ("smoke", -1, "'seed'")]
)
def test_bad_arguments(preset, seed, words):
    with pytest.raises(ValueError, match=words):
        opteq_theorems.run(preset, seed=seed)


def test_the_figure_is_drawn(result, tmp_path):
    path = tmp_path / "new" / "figure.png"
    opteq_theorems.figure(result, path)
    pixels = imread(path)[:, :, :3]
    height, width = pixels.shape[:2]
    assert width >= 1200
    assert height >= 1200
    for panel in (pixels[a : a + height // 2, b : b + width // 2] for a in (0, height // 2) for b in (0, width // 2)):
        assert panel.var() > 1e-3
        assert (np.ptp(panel, axis=2) > 0.5).sum() > 500  # colours


def test_main_writes_the_result_and_the_figure(result, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(opteq_theorems, "run", lambda preset, seed: {**result, "preset": preset, "seed": seed})
    assert opteq_theorems.main(["--preset", "smoke", "--seed", "3", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["opteq_theorems.json", "opteq_theorems.png"]
    written = json.loads((tmp_path / "out" / "opteq_theorems.json").read_text())
    assert (written["preset"], written["seed"]) == ("smoke", 3)
    assert written["seconds"] >= 0
    assert written["claims"].keys() == opteq_theorems.CLAIMS.keys()
    assert capsys.readouterr().out.count(" shown") == len(opteq_theorems.CLAIMS)


def test_main_reports_a_claim_that_is_not_shown(result, tmp_path, monkeypatch, capsys):
    failed = {**result, "claims": {**result["claims"], "lemma_1": {**result["claims"]["lemma_1"], "shown": False}}}
    monkeypatch.setattr(opteq_theorems, "run", lambda preset, seed: failed)
    assert opteq_theorems.main(["--out", str(tmp_path), "--figure", str(tmp_path / "f.svg")]) == 1
    assert "NOT SHOWN" in capsys.readouterr().out
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")


def test_numbers_are_written_with_six_digits():
    assert _harness.rounded({"a": [1 / 3, 2, True, "x"], "b": (1e-15 / 3,)}) == {
        "a": [0.333333, 2, True, "x"],
        "b": [3.33333e-16],
    }


def test_the_result_in_the_repository_shows_every_claim(result):
    path = ROOT / "results" / "opteq_theorems.json"
    stored = json.loads(path.read_text())
    assert path.stat().st_size < 60_000
    assert {name: claim["claim"] for name, claim in stored["claims"].items()} == opteq_theorems.CLAIMS
    assert all(claim["shown"] for claim in stored["claims"].values())
    assert stored["preset"] != "smoke"
    config = opteq_theorems.PRESETS[stored["preset"]]
    assert stored["config"] == _harness.rounded(opteq_theorems.asdict(config))
    for name, claim in result["claims"].items():  # made by the present checks
        assert stored["claims"][name]["measured"].keys() == claim["measured"].keys()
    for suffix in ("png", "svg"):
        assert 10_000 < (ROOT / "docs" / "figures" / f"opteq_theorems.{suffix}").stat().st_size < 500_000
