"""Every experiment at smoke size: it runs, nothing in it fails, and all that the page wants of it is there."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread

from opteq import experiments
from opteq.experiments import Options, _harness, _page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
LARGEST = 100_000  # bytes of a committed result


@contextmanager
def in_this_process(kind, *, address, workers):
    """In place of processes, whose start takes longer than the work."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("name", experiments.names())
def test_the_smoke_preset_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_harness, "executor", in_this_process)
    before = torch.get_rng_state()
    code = experiments.run(name, Options("smoke", out=tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    module, text = experiments.load(name), (tmp_path / f"{name}.json").read_text()
    result = json.loads(text)
    assert (result["experiment"], result["preset"], result["seed"]) == (name, "smoke", 0)
    assert result["failed"] == {}
    assert {key: one["claim"] for key, one in result["claims"].items()} == dict(module.CLAIMS)
    assert code == int(any(one["shown"] is False for one in result["claims"].values()))
    assert result["config"] == json.loads(json.dumps(_harness.rounded(_harness.asdict(module.PRESETS["smoke"]))))
    for one in result["claims"].values():
        assert bool(one["measured"]) == (one["shown"] is not None)
        assert one["measured"] or one["reason"]
    assert imread(tmp_path / f"{name}.png").var() > 1e-4
    page = "\n".join(_page.section(name, module, result))
    assert all(_page.escaped(one["claim"]) in page for one in result["claims"].values())
    assert capsys.readouterr().out.count("FAILED") == 0


WITHOUT_FILES = {"opteq_table9", "opteq_theorems"}  # random numbers are all they need


@pytest.mark.parametrize("name", sorted(set(experiments.names()) - WITHOUT_FILES))
def test_data_that_are_not_there_are_told_before_anything_is_trained(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^(mnist|cifar10|imagenette64|camvid) .* not found\b"):
        experiments.run(name, Options("small", out=tmp_path / "out", data_dir=tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_offers_what_the_command_and_the_page_need(name):
    module = experiments.load(name)
    assert re.fullmatch(r"[^\n]+\.", module.ABOUT)
    assert set(module.PRESETS) == {"smoke", "small", "paper"}
    assert getattr(module, "WHY", {}).keys() <= module.CLAIMS.keys()
    for part in ("run", "figure", "main"):
        assert callable(getattr(module, part))


@pytest.mark.parametrize("name", sorted({path.stem for path in RESULTS.glob("*.json")} - {"benchmarks"}))
def test_a_result_in_the_repository_is_of_the_present_experiment(name):
    text = (RESULTS / f"{name}.json").read_text()
    result, module = json.loads(text), experiments.load(name)
    assert len(text) < LARGEST
    assert result["preset"] != "smoke"
    assert result["seconds"] > 0
    assert result["failed"] == {}
    assert {key: one["claim"] for key, one in result["claims"].items()} == dict(module.CLAIMS)
    assert result["config"] == json.loads(json.dumps(_harness.rounded(_harness.asdict(module.PRESETS[result["preset"]]))))
    for key, one in result["claims"].items():
        assert one["shown"] or one.get("reason") or getattr(module, "WHY", {}).get(key), f"{key} is not shown: WHY?"


def test_the_page_of_results_is_up_to_date():
    text = (ROOT / "docs" / "reproduction.md").read_text()
    assert text == experiments.page(RESULTS), "run `opteq experiment page`"
    for name in experiments.names():
        figure = ROOT / "docs" / "figures" / f"{name}.png"
        if (RESULTS / f"{name}.json").exists():
            known = _harness.digest((RESULTS / f"{name}.json").read_text())
            assert known.encode() in figure.read_bytes(), f"{figure} is of another result: run `opteq experiment page`"


def test_a_page_without_results_says_how_to_get_them(tmp_path):
    path = experiments.write_page(tmp_path / "results", tmp_path)
    text = path.read_text()
    for name in experiments.names():
        assert f"| [`{name}`](#{name}) | not run yet | | | |" in text
        assert f"`opteq experiment {name} --preset small`" in text
    assert not (tmp_path / "figures").exists()


def test_a_section_says_what_was_measured_and_why_it_was_not_shown():
    result = {
        "preset": "small",
        "seed": 3,
        "seconds": 180.0,
        "workers": 2,
        "machine": {"cores": 2, "processor": "x86_64", "cuda": False},
        "versions": {"opteq": "0.1.0", "torch": "2.13.0"},
        "config": {"data": "cifar10", "epochs": [1, 2]},
        "notes": ["A note."],
        "claims": {
            "good": {"claim": "It is.", "shown": True, "measured": {"x": {"value": 0.123456, "at_most": 1.0, "shown": True}}},
            "bad": {
                "claim": "It is, too.",
                "shown": False,
                "measured": {
                    "y": {"value": None, "at_least": 1, "at_most": 2.0, "shown": False},
                    "z": {"value": 161670.0, "at_most": 0.5, "shown": False},
                },
            },
            "open": {"claim": "Who knows.", "shown": None, "measured": {}, "reason": "no time"},
        },
        "tables": {"A table": {"columns": ["a", "|b|"], "rows": [["x", 1.23456], [None, 7], [True, 12345], [9999, 12345.6]]}},
        "series": {},
    }

    module = SimpleNamespace(
        __doc__="About.\n\nOf |x|_2 and `a|b_c`.\n",
        ABOUT="About.",
        WHY={"bad": "The reason.", "good": "not said"},
        PRESETS={"paper": experiments.load("opteq_table4").Config()},
    )
    text = "\n".join(_page.section("name", module, result))
    for part in (
        "## name\n\nAbout.\n\nOf \\|x\\|\\_2 and `a|b_c`.\n",
        "**Shown:** It is.\n\n- x: 0.1235, must be at most 1\n",
        "**Not shown:** It is, too. *The reason.*\n\n- y: unknown, must be at least 1 and at most 2\n",
        "- z: 161,670, must be at most 0.5 **(is not)**\n",
        "**Not testable:** Who knows. *no time*\n",
        "A table:\n\n| a | \\|b\\| |\n|---|---|\n| x | 1.235 |\n|  | 7 |\n| True | 12,345 |\n| 9999 | 1.235e+04 |\n",
        "![name](figures/name.png)",
        "Preset `small`, seed 3, 3.0 minutes of computing in all by 2 processes at a time, 2 cores (x86_64), no GPU, "
        "opteq 0.1.0, torch 2.13.0.",
        "A note. Settings that differ: `epochs` [1, 2] (`paper`: [200, 200, 200, 200, 200]).",
    ):
        assert part in text
    assert "not said" not in text
