"""The numbers in the README are those of the result files."""

import json
from pathlib import Path

from opteq.experiments._page import summary

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_summary_of_the_reproduction_is_that_of_the_results():
    assert summary(ROOT / "results") in README, f"put this into the README:\n{summary(ROOT / 'results')}"


def test_the_accuracy_on_cifar10_is_the_measured_one():
    found = json.loads((ROOT / "results" / "opteq_cifar10.json").read_text(encoding="utf-8"))["tables"]["Measured, and printed"]
    parameters, _, minutes, _, accuracy, paper = found["rows"][0]
    words = " ".join(README.split())
    assert f"a deep OptEq of {parameters:,} parameters has {accuracy:.2f}% of the test images right" in words
    assert f"after {minutes:.0f} minutes of training on two cores; the paper has {paper}%" in words


def test_the_summary_counts_claims_by_paper(tmp_path):
    claims = {name: {"claim": "", "shown": shown, "measured": {}} for name, shown in zip("abc", (True, False, True), strict=True)}
    (tmp_path / "gaussian_gram.json").write_text(json.dumps({"claims": claims}))
    lines = summary(tmp_path).splitlines()
    assert lines[-1] == "| Gaussian-initialised DEQs | 1 | 2 | 1 | 0 |"
    assert lines[2] == "| Optimization induced equilibrium networks | 0 | 0 | 0 | 0 |"


def test_the_benchmarks_are_those_of_the_figures(monkeypatch):
    path = ROOT / "results" / "benchmarks.json"
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import page

    for line in page.readme(json.loads(path.read_text(encoding="utf-8"))).splitlines():
        assert line in README, f"put this into the README:\n{line}"
