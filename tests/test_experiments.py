"""The experiments: at smoke size they show their claims, and what lies in results/ says so at full size."""

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from opteq import data, experiments
from opteq.experiments import Options, _harness, opteq_theorems, scaledrelu_width

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


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_offers_what_the_command_needs(name):
    module = experiments.load(name)
    assert module.ABOUT
    assert set(module.PRESETS) == {"smoke", "small", "paper"}
    assert callable(module.run)
    assert callable(module.figure)
    assert callable(module.main)


@pytest.mark.parametrize(("name", "near"), [("scaledrelu_widths", "scaledrelu_width"), ("theorems", "opteq_theorems")])
def test_an_unknown_name_suggests_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"Did you mean '{near}'"):
        experiments.load(name)
    with pytest.raises(ValueError, match=r"must be one of opteq_theorems, .*Got 'qqq' instead\.$"):
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
    assert experiments.status("opteq_theorems", tmp_path) == experiments.Status("opteq_theorems", "paper", 1, 1)
    assert str(experiments.status("opteq_theorems", tmp_path)) == "paper: all 1 claims shown"


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


def test_without_tyro_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(ImportError, match=r"pip install 'opteq\[train\]'"):
        opteq_theorems.main(["--preset", "smoke"])


def test_options_that_are_not_known_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        opteq_theorems.main(["--sead", "3"])
    assert end.value.code == 2
    assert "--sead" in capsys.readouterr().err


# --- scaledrelu_width -----------------------------------------------------------------------------------------------------------


@contextmanager
def in_this_process(kind, *, address, workers):
    """In place of processes, whose start takes longer than the work."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def widths(tmp_path_factory):
    """The folder after `scaledrelu_width --preset smoke`."""
    folder = tmp_path_factory.mktemp("widths")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_harness, "executor", in_this_process)
        before = torch.get_rng_state()
        assert experiments.run("scaledrelu_width", Options("smoke", out=folder)) == 0
        assert torch.equal(torch.get_rng_state(), before)
    return folder


def test_a_wider_network_ends_lower_and_its_norm_stays(widths):
    result = json.loads((widths / "scaledrelu_width.json").read_text())
    assert {name: claim["shown"] for name, claim in result["claims"].items()} == dict.fromkeys(scaledrelu_width.CLAIMS, True)
    assert result["not_found"] == []
    assert result["failed"] == {}
    curves = result["series"]["digits"]
    assert list(curves) == [f"m = {width}" for width in scaledrelu_width.PRESETS["smoke"].widths]
    for name in ("train", "test"):
        last = [curve[name][-1] for curve in curves.values()]
        assert last == sorted(last, reverse=True)
    for curve in curves.values():
        assert curve["k"] == [0, 10, 20, 30, 40]
        assert curve["train"][0] == 50  # |y|^2 / 2 of 100 labels 1 and 100 labels 0, for the network begins at 0
        assert curve["test"][0] == 15
        assert curve["norm"][0] == pytest.approx(0.1)
        assert all(0.1 <= norm < 0.15 for norm in curve["norm"])
    assert imread(widths / "scaledrelu_width.png").var() > 1e-3


def test_the_cells_of_an_experiment_are_not_run_again(widths, monkeypatch, capsys):
    monkeypatch.setattr(_harness, "executor", in_this_process)
    monkeypatch.setattr(data, "load", None)
    arguments = ["--preset", "smoke", "--out", str(widths), "--figure", str(widths / "again.svg")]
    assert scaledrelu_width.main(arguments) == 0
    assert capsys.readouterr().out.count("found") == 3
    assert str(experiments.status("scaledrelu_width", widths)) == "smoke: all 3 claims shown"


def test_gradient_descent_is_that_of_the_paper():
    """Two steps against an unrolling of the iteration, in float64."""
    settings = scaledrelu_width.settings(scaledrelu_width.PRESETS["smoke"], "digits", 5, Options(seed=3))
    found = scaledrelu_width.train({**settings, "samples": 20, "tests": 4, "steps": 2, "every": 1})
    (x, y), held_out = data.theory_split(data.load("digits"), train=20, test=4, targets=(0.0, 1.0), seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        W = (torch.randn(784, 5) / math.sqrt(5)).double().requires_grad_()
    A, b = torch.eye(5, dtype=torch.float64, requires_grad=True), torch.zeros(5, dtype=torch.float64, requires_grad=True)

    def loss(x, y):
        z = torch.relu(x @ W)
        for _ in range(30):
            z = torch.relu(0.1 * z @ A + torch.relu(x @ W))
        return (z @ b - y).square().sum() / 2

    for k in range(3):
        value = loss(x, y)
        assert found["train"][k] == pytest.approx(value.item(), rel=1e-5)
        assert found["test"][k] == pytest.approx(loss(*held_out).item(), rel=1e-5)
        assert found["norm"][k] == pytest.approx(0.1 * torch.linalg.matrix_norm(A, 2).item(), rel=1e-5)
        with torch.no_grad():
            for parameter, gradient in zip((W, A, b), torch.autograd.grad(value, (W, A, b)), strict=True):
                parameter -= 1e-3 * gradient


def test_a_cell_that_fails_shows_nothing_and_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_harness, "executor", in_this_process)
    monkeypatch.setattr(data, "load", None)
    assert experiments.run("scaledrelu_width", Options("smoke", out=tmp_path)) == 1
    result = json.loads((tmp_path / "scaledrelu_width.json").read_text())
    assert len(result["failed"]) == 3
    for claim in result["claims"].values():
        assert claim["shown"] is False
        assert all(measured["value"] is None for measured in claim["measured"].values())
    assert capsys.readouterr().out.count("FAILED: TypeError") == 3


def test_a_wrong_order_or_a_norm_that_grows_is_not_shown():
    config = scaledrelu_width.PRESETS["smoke"]
    good = {"train": [9.0, 1.0], "test": [9.0, 1.0], "norm": [0.1, 0.11]}
    for name, bad in {
        "training_loss": {"train": [9.0, 1.1]},
        "test_loss": {"test": [9.0, 1.1]},
        "norm": {"norm": [0.1, 0.16]},
    }.items():
        for claim in scaledrelu_width.CLAIMS:
            measured = scaledrelu_width.judge(claim, config, {"digits": {"m = 1": good, "m = 2": {**good, **bad}}})
            assert all(one["shown"] for one in measured.values()) == (claim != name)
    assert scaledrelu_width.end([*range(40), 5.0, 100.0, 6.0, 7.0]) == 6.5  # of the last four, so that one peak does not matter
    low = scaledrelu_width.judge("norm", config, {"digits": {"m = 1": {**good, "norm": [0.1, 0.04]}}})
    assert [one["shown"] for one in low.values()] == [True, False]


def test_data_that_are_not_there_are_left_out_unless_required(tmp_path):
    small = scaledrelu_width.Config(("digits", "mnist"))
    assert scaledrelu_width.found(small, tmp_path) == ["digits"]
    with pytest.raises(FileNotFoundError, match=r"^mnist .*train-images-idx3-ubyte"):
        scaledrelu_width.run(Options("small", data_dir=tmp_path))
