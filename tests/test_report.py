"""Reports: what they say, that hostile runs cannot break them, that the page is sound, self-contained and accessible."""

import base64
import csv
import hashlib
import json
import math
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

import opteq.regularizers
from opteq.diagnostics.panels import METRICS, SOLVER, Curve
from opteq.report import findings, page, reading, write
from opteq.report.charts import Chart, listed
from opteq.report.curves import finite, thinned
from opteq.report.figures import curve_charts
from opteq.report.formulas import drawn, translated
from opteq.report.landscapes import landscape_charts
from opteq.report.page import render
from opteq.report.reading import RunData, flattened, read_all
from opteq.report.residuals import residual_charts
from opteq.report.spectra import hessian_charts, jacobian_charts
from opteq.report.svg import COLOURS, GRID, INK, for_page
from opteq.report.tables import conditions, events, facts, parameters, requirements, results
from opteq.report.text import clean, for_plot, short, to_json
from opteq.report.trajectories import trajectory_charts
from opteq.report.words import (
    MISSING,
    certificate_words,
    condition_verdict,
    convexity_words,
    duration,
    figure_text,
    percent,
    training_words,
    verdict,
)
from opteq.runs import RunError
from opteq.theory import formulas
from report_runs import EVENT, make
from report_runs import PLAIN as CONFIG

VOID = {"meta", "br", "img", "link", "input", "hr"}
CERTIFICATE = {
    "theorem": "Theorem 1",
    "holds": True,
    "conditions": [
        {"name": "width", "formula": "lhs >= rhs", "lhs": 4.0, "rhs": 2.0, "slack": 2.0, "evidence": "exact"},
        {"name": "norm", "formula": "1 >= g", "lhs": 1.0, "rhs": 0.5, "slack": 2.0, "evidence": "bound"},
    ],
    "max_step": 1e-3,
    "rate": 0.99,
    "explain": "Verdict: CERTIFIED",
    "trained": {"steps": 200, "loss_first": 1.5, "loss_last": 0.25, "bound_last": 0.75, "violation": None},
}
RESULT = {
    "stopped": None,
    "steps": 120,
    "epochs": 3,
    "seconds": 75.0,
    "valid_accuracy": 0.95,
    "test_accuracy": 0.9412,
    "valid_loss": 0.625,
    "parameters": {"total": 1234, "extractor": 34, "equilibrium": 1200},
}


def step(at: int, **other: Any) -> dict[str, Any]:
    row = {
        "loss": 1.0 / at,
        "accuracy": 0.5,
        "lr": 0.1,
        "grad_norm": 1.0,
        "solver_steps": 7.5,
        "backward_steps": 9.0,
        "converged": 1.0,
    }
    return {"kind": "step", "step": at, "epoch": at / 40, **row, **other}


def epoch(at: int, **other: Any) -> dict[str, Any]:
    row = {"train_loss": 0.5, "train_accuracy": 0.9, "valid_loss": 0.625, "valid_accuracy": 0.875, "valid_converged": 0.996}
    return {"kind": "epoch", "step": 40 * at, "epoch": at, **row, "valid_solver_steps": 8.25, "alpha": [0.5, 0.25], **other}


ROWS = [*(step(at) for at in range(1, 121)), epoch(1, valid_accuracy=0.9625), epoch(2), epoch(3)]


def table(folder: Path, name: str, heads: str, rows: Iterable[Iterable[Any]]) -> None:
    """A finding, written without the library."""
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        writer = csv.writer(file)
        writer.writerow(heads.split())
        writer.writerows(rows)


LANDSCAPE, LINE = "x y loss converged", "x loss converged"
TRAJECTORY = "stage sample label step pc1 pc2"
RESIDUALS = "solver step worst high median low solved"
JACOBIAN, HESSIAN = "sample index real imag converged", "index eigenvalue error converged"
PLANE = [(x, y, 0.5 + x * x + 2 * y * y, int((x, y) != (2, 1))) for x in (-2, -1, 0, 1, 2) for y in (-2, -1, 0, 1, 2)]


def add_findings(folder: Path, name: str = "picard") -> None:
    table(folder, "landscape", LANDSCAPE, PLANE)
    stages, labels = ("before", "after"), (3, 7, -1)
    table(
        folder,
        "trajectory",
        TRAJECTORY,
        ((s, i, labels[i], k, k / (i + 1), -k) for s in stages for i in range(3) for k in range(4)),
    )
    table(folder, "residuals", RESIDUALS, ((name, k, 4 * 0.5**k, 2 * 0.5**k, 0.5**k, 0.25 * 0.5**k, k / 20) for k in range(20)))
    table(folder, "jacobian", JACOBIAN, [(0, 0, 0.6, 0.7, 1), (0, 1, 0.6, -0.7, 1), (1, 0, -0.5, 0.0, 0)])
    table(folder, "hessian", HESSIAN, [(0, 4.0, 0.1, 1), (1, -2.5, 0.2, 0)])


class Page(HTMLParser):
    """Elements, ids and texts of a page; raises where tags are not balanced."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


PLOTLY = get_plotlyjs()


def check_scripts(page: Page, live: bool = False) -> None:
    """Exactly our scripts and plotly may run, and nothing may be fetched."""
    kinds = [script.get("type") for script in page.all("script")]
    assert kinds == [None, "application/json", None, "text/plain", *([None] if live else [])]
    theme, data, ours, *rest = page.scripts
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (theme, ours, *rest, PLOTLY))
    directives = dict(part.strip().split(" ", 1) for part in (policy or "").split(";"))
    assert directives == {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in hashes),
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    charts = [figure["id"] for figure in page.all("figure")]
    assert sorted(json.loads(data, parse_constant=pytest.fail)) == sorted(charts)
    assert not set("<>&") & set(data)


def check_sound(path: Path) -> Page:
    """Balanced tags, unique ids, links that lead somewhere, nothing from elsewhere, labels for all figures and tables."""
    html = path.read_text(encoding="utf-8")
    assert html.count(PLOTLY) == 1
    assert len(html.encode()) < 8_000_000
    page = Page(html.replace(PLOTLY, ""))
    check_scripts(page)
    ids = [value for _, attributes in page.elements if (value := attributes.get("id")) is not None]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert not {"iframe", "object", "embed", "link", "base", "img"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "xlink:href")]
        if (link := attributes.get("href")) is not None:
            assert link[0] == "#"
            assert link[1:] in ids
        for used in re.findall(r"url\(([^)]*)\)", " ".join(value or "" for value in attributes.values())):
            assert used[1:] in ids
    styles = re.findall(r"<style>(.*?)</style>", html, re.S)
    assert len(styles) == 1
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]
    assert len(page.all("h1")) == 1
    assert page.all("html") == [{"lang": "en"}]
    for figure in page.all("svg"):
        assert figure.get("aria-hidden") == "true" or (figure["role"] == "img" and figure["aria-labelledby"] in ids)
    for part in page.all("section"):
        assert part["aria-labelledby"] in ids
        assert part["data-tab"]
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(head["scope"] in ("col", "row") for head in page.all("th"))
    return page


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = make(tmp_path_factory.mktemp("runs") / "demo", [*ROWS, EVENT], result=RESULT, certificate=CERTIFICATE)
    (folder / "problem.txt").write_text("min phi(z) with W'W < I\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": "monitor", "step": at, "loss": 1 / at, "bound": 2 / at}) + "\n" for at in range(1, 50))
    add_findings(folder)
    path = write([folder])
    return path, check_sound(path)


def test_the_report_of_one_run_is_report_html_in_its_folder_and_holds_all_sections(full: tuple[Path, Page]) -> None:
    path, page = full
    assert path.name == "report.html"
    assert path.parent.name == "demo"
    sections = [part["id"] for part in page.all("section")]
    assert sections == ["result", "metrics", "solver", "landscape", "trajectories", "problem", "certificate", "run"]
    curves = len(METRICS) + len(SOLVER) - 1 + 1  # images are classified, not segmented; one panel of the theory
    assert len(page.all("svg")) == len(page.all("figure")) == curves + 6  # one landscape, two stages, residuals, two spectra
    for text in (
        "Finished: 120 steps (3 epochs) in 1 min 15 s.",
        "Validation accuracy 95.00% at the end, 96.25% at best.",
        "The solver is healthy: 99.60% of the last validation samples reached their equilibrium, in 8.25 solver steps on average.",
        "Events of the guard: 1 rolled back.",
        "60 the loss was not finite equilibrium loss is NaN at step 60 rolled back",
        "extractor 34 equilibrium 1,200 total 1,234",
        "min phi(z) with W'W < I",
        "Certified: all 2 conditions hold. Gradient descent with a step of 0.001 multiplies the loss by at most 1 - 0.01",
        "the loss went from 1.5 to 0.25; promised was at most 0.75. Every conclusion was kept.",
        "width holds lhs >= rhs 4 2 2 exact",
        "Crosses mark the 4.00% of the points where a solve did not converge",
        "Spectral radius unknown: 1 of 3 eigenvalues are not converged (crosses) or not finite. The largest modulus found is 0.922",
        "Dotted vertical lines mark events.",
        "Pale bars are not converged.",
        "model.channels [8, 16] train.lr 0.1 train.seed none",
        "git.dirty true",
        "test accuracy 94.12%",
    ):
        assert text in page.text
    for text in (  # figures for who cannot see them
        "demo, validation: from 0.9625 to 0.875",
        "Loss around the parameters of demo: from 0.5 to 12.5; 4.00% of the points did not converge.",
        "picard: the median goes from 1 to 1.907e-06, 95.00% of the samples solved",
    ):
        assert any(text in part for part in page.texts)


def test_the_page_suits_phones_dark_screens_and_paper(full: tuple[Path, Page]) -> None:
    path, page = full
    html = path.read_text().replace(PLOTLY, "")
    assert len(html) < 1_000_000
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "@media screen and (prefers-color-scheme: dark)" in html
    assert "@media print" in html
    assert page.all("a")[0] == {"class": "skip", "href": "#result"}
    for colour in (INK, GRID, *COLOURS):
        assert colour not in html
    assert html.count("currentColor") > 100
    assert "</script" not in PLOTLY.lower()  # else it would end its element
    assert all(f"--c{index}:" in html for index in range(len(COLOURS)))


def test_the_same_run_gives_the_same_page_wherever_it_is_written(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", [{"kind": "step", "step": 1, "loss": 0.5}])
    again = write([folder], tmp_path / "deep" / "again.html")
    assert again == tmp_path / "deep" / "again.html"
    assert again.read_bytes() == write([str(folder)]).read_bytes()


def test_several_runs_stand_side_by_side_and_their_differences_are_marked(full: tuple[Path, Page], tmp_path: Path) -> None:
    other = make(tmp_path / "other", [step(5), step(6)], {**CONFIG, "train": {"lr": 0.2, "seed": None}})
    path = write([full[0].parent, other], tmp_path / "both.html")
    page = check_sound(path)
    html = path.read_text()
    assert not (other / "report.html").exists()
    assert "2 runs" in page.text
    assert "quantity demo other" in page.text
    assert "steps 120 6" in page.text
    assert "No result yet: it goes on, or was interrupted after step 6." in page.text
    assert re.search(r'<tr class="differs"><th scope="row">train.lr</th><td>0.1</td><td>0.2</td></tr>', html)
    assert re.search(r'<tr><th scope="row">train.seed</th><td>none</td><td>none</td></tr>', html)
    assert html.count('class="swatch"') == 6  # two runs with curves in two sections, one in the landscapes and the theory
    assert html.count('data-run="0"') == 6  # and without a colour, for those are of classes, twice in the trajectories
    assert "var(--c1)" in html
    charts = json.loads(page.scripts[1])
    assert set(charts["chart-gradient-norm"]["runs"]) == {0, 1}
    assert charts["chart-landscape-0"]["runs"] == [0, 0, 0]
    assert [key["label"] for key in charts["chart-loss"]["legend"]] == ["validation", "training", "each step"]


HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}$x_$%{x}<b>\x00\ud800"
SHOWN = HOSTILE.replace("\x00", "\N{REPLACEMENT CHARACTER}").replace("\ud800", "\N{REPLACEMENT CHARACTER}")
BAD = [math.nan, math.inf, -math.inf, None, "0.5", HOSTILE, True, [], {}, 1e308, -(10**400), 0.25]


def hostile_rows() -> list[Any]:
    keys = [key for key in {**step(1), **epoch(1)} if key not in ("kind", "step")]
    rows: list[Any] = [
        {"kind": kind, "step": 1 + at, **dict.fromkeys(keys, value)}
        for kind in ("step", "epoch", "monitor")
        for at, value in enumerate(BAD)
    ]
    rows += [{"kind": kind, "step": value, "loss": 1.0} for kind in ("step", "epoch", "event") for value in BAD]
    rows += [{"kind": "event", "step": 3, **dict.fromkeys(("what", "layer", "message", "action"), value)} for value in BAD]
    rows += [{"kind": "monitor", "step": 3, f"norm {HOSTILE}": 1.0, "norm b": 1.0}]
    return [*rows, [], "text", 5, {"kind": HOSTILE}, {"kind": {}}, {}]


def hostile_findings(folder: Path) -> None:
    bad = ["nan", "inf", "-inf", "", "1e999", SHOWN, "1"]
    table(folder, "landscape", LANDSCAPE, ((x, y, bad[x], bad[y]) for x in range(7) for y in range(7)))
    table(folder, "trajectory", TRAJECTORY, ((SHOWN, SHOWN, SHOWN, bad[k], bad[k], 1) for k in range(7)))
    table(folder, "residuals", RESIDUALS, ((SHOWN, k, bad[k], bad[k], 0.5, "-1", bad[k]) for k in range(7)))
    table(folder, "jacobian", JACOBIAN, [*((SHOWN, k, bad[k], 0.5, bad[k]) for k in range(7)), (SHOWN, 8, 1, 1, 1)])
    table(folder, "hessian", HESSIAN, [(k, bad[k], bad[k], bad[k]) for k in range(7)])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    config = {HOSTILE: {HOSTILE: HOSTILE, "list": [HOSTILE]}, "nothing": {}, "long": "x" * 10_000}
    certificate = {"theorem": HOSTILE, "holds": False, "explain": HOSTILE, "trained": {"steps": HOSTILE, "violation": HOSTILE}}
    certificate["conditions"] = [{"name": HOSTILE, "formula": HOSTILE, "lhs": HOSTILE, "slack": HOSTILE, "evidence": None}, HOSTILE]
    result = {"stopped": HOSTILE, "steps": HOSTILE, "parameters": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE, "seconds": -1}
    problem = {"text": HOSTILE, "latex": HOSTILE, "requirements": [HOSTILE, {"name": HOSTILE}], "convex": HOSTILE}
    parts = {"result": result, "certificate": certificate, "problem": problem, "environment": {HOSTILE: 1}}
    folder = make(tmp_path_factory.mktemp("runs") / "<b>&name%{x}", hostile_rows(), config, **parts)
    hostile_findings(folder)
    path = write([folder])
    return path, check_sound(path)


def test_hostile_content_is_shown_as_text(hostile: tuple[Path, Page]) -> None:
    path, page = hostile
    assert page.text.count(SHOWN) > 25
    assert "49" not in page.text  # the template language does not run
    assert "<script>alert" not in path.read_text()
    assert f"Stopped early, after {SHOWN} steps" in page.text
    assert f"BROKEN: {SHOWN}" in page.text
    assert "Not certified: 1 of 1 conditions do not hold" in page.text
    assert "<b>&name%{x}" in page.text
    assert "x" * 300 + " ..." in page.text
    assert "x" * 301 not in page.text
    assert "Could not be read" not in page.text


def test_the_good_values_among_the_bad_are_drawn(hostile: tuple[Path, Page]) -> None:
    charts = json.loads(hostile[1].scripts[1])
    assert len(charts) == len(METRICS) + len(SOLVER) - 1 + 3 + 5  # three panels of the theory, five findings
    (residual,) = [trace for trace in charts["chart-residuals-0"]["data"] if "customdata" in trace]
    assert residual["y"] == [0.5] * 7
    assert len(charts["chart-jacobian"]["data"][1]["x"]) == 2
    assert charts["chart-hessian"]["data"][0]["y"] == [1]
    assert charts["chart-landscape-0"]["data"][0]["z"][0] == [None] * 6 + [1]
    assert len(charts["chart-landscape-0"]["data"][1]["x"]) == 42  # only "1" says that a point converged


def test_no_name_is_read_as_html_or_as_a_template_by_plotly(hostile: tuple[Path, Page]) -> None:
    for chart in json.loads(hostile[1].scripts[1]).values():
        for trace in chart["data"]:
            assert not re.search(r"<(?!br>)", trace.get("name", ""))
            assert "alert" not in trace["hovertemplate"] if "hovertemplate" in trace else True
            assert "meta" not in trace  # names would be templates
    assert for_plot("<b>&amp;</b>") == "&lt;b&gt;&amp;amp;&lt;/b&gt;"
    assert for_plot("a\nb" + "c" * 50, width=20, lines=2) == "a b" + "c" * 17 + "<br>" + "c" * 20 + "…"
    assert for_plot("") == ""
    assert short("x" * 28) == "x" * 28
    assert short("abcdefghij", 6) == "abc…ij"
    assert clean("a\x00\ud800\x1b\tb\n") == "a\ufffd\ufffd\ufffd\tb\n"


def test_data_for_the_script_is_json_without_a_sign_of_html() -> None:
    value = {"</script>": ["<!--", "&amp;", "\u2028", "\ud800"]}
    assert json.loads(to_json(value)) == value
    assert not set("<>&\u2028") & set(to_json(value))
    with pytest.raises(ValueError, match="JSON"):
        to_json([math.nan])
    assert listed([1.0, math.nan, math.inf, 1 / 3, 1e300]) == [1, None, None, 0.333333, 1e300]
    assert listed([[0.5], [2.0]]) == [[0.5], [2]]


def test_a_live_page_may_ask_where_it_came_from(tmp_path: Path) -> None:
    runs = read_all([make(tmp_path / "run")])
    page = Page(render(runs, live=True).replace(PLOTLY, ""))
    check_scripts(page, live=True)
    assert "/version" in page.scripts[-1]


@pytest.mark.parametrize("rows", [None, []], ids=["no metrics", "empty metrics"])
def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path, rows: list[Any] | None) -> None:
    folder = make(tmp_path / "run", rows, {})
    (folder / "environment.json").unlink()
    page = check_sound(write([folder]))
    assert page.all("svg") == []
    assert "Nothing has been measured yet." in page.text
    assert "configuration is empty" in page.text
    assert [part["id"] for part in page.all("section")] == ["result", "run"]


def test_a_damaged_file_is_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", [{"kind": "step", "step": 1, "loss": 0.5}], result='{"steps": ', certificate="[1, 2]")
    (folder / "problem.txt").mkdir()
    page = check_sound(write([folder]))
    assert "Could not be read in run" in page.text
    assert "result.json" in page.text
    assert "problem.txt" in page.text
    assert "interrupted after step 1." in page.text
    assert len(page.all("svg")) == 1  # one step is enough for a figure


def test_a_folder_without_a_run_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run"):
        write([tmp_path], tmp_path / "out.html")
    assert list(tmp_path.iterdir()) == []


def test_folders_must_be_a_list_with_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"The 'folders' parameter of report.write must be a list of run folders. Got .* instead."):
        write(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="folders"):
        write("runs/demo")
    with pytest.raises(ValueError, match="at least one run folder"):
        write([])


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib", "plotly"])
def test_a_missing_library_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    folder = make(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "plotly.offline" if missing == "plotly" else missing, None)
    with pytest.raises(ImportError, match=rf"A report needs {missing}.*: pip install 'opteq\[report\]'"):
        write([folder])


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    a, b, c = (make(tmp_path / parent / name) for parent, name in (("a", "run"), ("b", "run"), ("a", "third")))
    assert [run.name for run in read_all([a, b])] == [str(a), str(b)]
    assert [run.name for run in read_all([a, c])] == ["run", "third"]


# --- curves ---------------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.just(math.nan), st.floats(-1e6, 1e6)), min_size=1, max_size=400),
    st.integers(4, 60),
)
@settings(max_examples=60)
def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_gaps(values: list[float], points: int) -> None:
    whole = Curve("", np.arange(len(values), dtype=float), np.array(values))
    thin = thinned(whole, points)
    assert len(thin.x) <= max(points, 3 * (points // 2) + 2)
    assert thin.x[0] == 0
    assert thin.x[-1] == len(values) - 1
    assert (np.diff(thin.x) > 0).all()
    np.testing.assert_array_equal(thin.y, whole.y[thin.x.astype(int)])
    assert np.isnan(thin.y).any() == np.isnan(whole.y).any()
    if len(finite(whole.y)):
        assert finite(thin.y).min() == finite(whole.y).min()
        assert finite(thin.y).max() == finite(whole.y).max()


def traces(chart: Chart) -> list[tuple[list[Any], list[Any]]]:
    return [(trace["x"], trace["y"]) for trace in chart.traces]


def of_rows(folder: Path, rows: list[Any]) -> RunData:
    (run,) = read_all([make(folder, rows)])
    return run


def test_thousands_of_steps_are_thinned_but_spikes_stay(tmp_path: Path) -> None:
    rows = [step(at, loss=50.0 if at == 7777 else 1.0) for at in range(1, 20_001)]
    (chart,) = curve_charts(METRICS[:1], [of_rows(tmp_path / "run", rows)])
    ((x, y),) = traces(chart)
    assert len(x) < 2500
    assert y[x.index(7777)] == 50
    assert len(chart.svg) < 20_000


def test_a_long_gap_stays_a_gap(tmp_path: Path) -> None:
    rows = [step(at, loss=None if 2000 < at < 3000 else 1.0) for at in range(1, 5001)]
    ((x, y),) = traces(curve_charts(METRICS[:1], [of_rows(tmp_path / "run", rows)])[0])
    inside = [value for at, value in zip(x, y, strict=True) if 2000 < at < 3000]
    assert inside
    assert set(inside) == {None}
    assert {value for at, value in zip(x, y, strict=True) if not 2000 < at < 3000} == {1}


# --- figures --------------------------------------------------------------------------------------------------------------------


def test_a_figure_is_logarithmic_only_where_values_are_positive_and_range_widely(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [])])
    wide = replace(run, steps=[step(1, loss=100.0), step(2, loss=1.0)])
    narrow = replace(run, steps=[step(1, loss=2.0), step(2, loss=1.0)])
    negative = replace(run, steps=[step(1, loss=100.0), step(2, loss=-1.0)])
    begun = replace(run, steps=[step(1, loss=0.0), step(2, loss=1.0), step(3, loss=100.0)])
    constant = replace(run, steps=[step(1, loss=0.5), step(2, loss=0.5)])
    ended = replace(run, steps=[step(at, loss=loss) for at, loss in enumerate([100.0, 1.0, 0.01, 0.0, 0.0], 1)])
    charts = [curve_charts(METRICS[:1], [part])[0] for part in (wide, narrow, negative, begun, constant, ended)]
    ticks = [re.findall(r">([^<>]+)</text>", chart.svg) for chart in charts]
    assert {"1", "10", "100"} <= set(ticks[0])
    assert "10" not in ticks[1]
    assert "10" not in ticks[2]
    assert [chart.layout["yaxis"].get("type") for chart in charts] == ["log", None, None, "log", None, None]
    assert charts[4].layout["yaxis"]["range"] == [0.45, 0.55]


def test_shares_end_at_a_hundred_percent(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [step(1), step(2)])])
    (chart,) = curve_charts(SOLVER[1:2], [run])
    ticks = re.findall(r">([\d.]+)%</text>", chart.svg)
    assert max(map(float, ticks)) == 100.0
    assert chart.layout["yaxis"]["range"][1] <= 1.002


def test_an_alternative_text_is_escaped_and_ids_differ_between_figures() -> None:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" viewBox="0 0 9 9">'
        "<metadata/>"
        '<defs><style>*{}</style><path id="m" d="M 0.123456 1\nL 2 3"/></defs>'
        f'<g id="unused" clip-path="url(#m)"><use xlink:href="#m" style="fill: {INK}; stroke: {COLOURS[3]}"/>'
        '<g style="fill: url(#m)"/>'
        '<text style="font-size: 9px; font-family: \'DejaVu Sans\', serif; fill: none" transform="rotate(-0 1 2)">a</text>'
        "</g></svg>"
    )
    one, two = for_page(svg, "<b>one"), for_page(svg, "two")
    assert re.search(r"fill: url\(#(f\w+)m\)", one)[1] in one.split('id="')[2]  # type: ignore[index]
    assert "&lt;b&gt;one</title>" in one
    assert "fill: currentColor; stroke: var(--c3)" in one
    assert "font-family" not in one
    assert "<style" not in one
    assert "metadata" not in one
    assert "unused" not in one
    assert "width" not in one
    assert 'd="M 0.1 1 L 2 3"' in one
    assert "rotate" not in one
    assert set(re.findall(r'id="([^"]*)"', one)).isdisjoint(re.findall(r'id="([^"]*)"', two))


# --- findings -------------------------------------------------------------------------------------------------------------------


def with_table(folder: Path, name: str, heads: str, rows: Iterable[Iterable[Any]]) -> RunData:
    table(make(folder), name, heads, rows)
    (run,) = read_all([folder])
    return run


def test_a_landscape_is_drawn_as_it_was_measured(tmp_path: Path) -> None:
    (chart,) = landscape_charts([with_table(tmp_path / "run", "landscape", LANDSCAPE, PLANE)])
    contour, crosses, _ = chart.traces
    for x, y, loss, good in PLANE:
        at = contour["y"].index(y), contour["x"].index(x)
        assert contour["z"][at[0]][at[1]] == pytest.approx(math.log10(loss), rel=1e-4)
        assert contour["text"][at[0]][at[1]] == figure_text(float(loss)) + ("" if good else "<br>NOT converged")
    assert (crosses["x"], crosses["y"]) == ([2], [1])
    assert contour["colorbar"]["ticktext"] == ["0.5", "1", "2", "5", "10"]
    assert chart.shape == "square"


def test_planes_share_one_scale_of_colours_which_is_linear_where_a_loss_is_not_positive(tmp_path: Path) -> None:
    low = with_table(tmp_path / "low", "landscape", LANDSCAPE, ((x, y, x - 1, 1) for x in range(3) for y in range(3)))
    high = with_table(tmp_path / "high", "landscape", LANDSCAPE, ((x, y, 7, 1) for x in range(3) for y in range(3)))
    charts = landscape_charts([low, high])
    assert [(chart.traces[0]["zmin"], chart.traces[0]["zmax"]) for chart in charts] == [(-1, 7), (-1, 7)]
    assert charts[0].traces[0]["z"] == [[-1, 0, 1]] * 3
    assert [chart.title for chart in charts] == ["Loss landscape, low", "Loss landscape, high"]
    assert charts[0].note == "The trained network is at the white plus. Every point converged."
    assert len(landscape_charts([high])) == 1  # a loss that is the same everywhere


@pytest.mark.parametrize(("loss", "scale"), [([4.0, 0.1, 4.0], "log"), ([2.0, 1.0, math.nan], None)], ids=["wide", "narrow"])
def test_a_landscape_along_one_direction_is_a_line(tmp_path: Path, loss: list[float], scale: str | None) -> None:
    run = with_table(tmp_path / "run", "landscape", LINE, zip((-1, 0, 1), loss, (1, 1, 0), strict=True))
    (chart,) = landscape_charts([run])
    (trace,) = chart.traces
    assert trace["y"] == listed(loss)
    assert trace["marker"]["symbol"] == ["circle", "circle", "x"]
    assert chart.layout["yaxis"].get("type") == scale
    assert chart.note.startswith("The trained network is at 0. Crosses mark the 33.33% of the points")


def test_large_landscapes_are_thinned_to_their_corners_and_say_so(tmp_path: Path) -> None:
    run = with_table(tmp_path / "run", "landscape", LANDSCAPE, ((x, y, x + 1, 1) for x in range(150) for y in range(3)))
    (chart,) = landscape_charts([run])
    contour = chart.traces[0]
    assert len(contour["x"]) == 141
    assert (contour["x"][0], contour["x"][-1], contour["z"][0][-1]) == (0, 149, pytest.approx(math.log10(150), rel=1e-4))
    assert chart.note.endswith("Every point converged. Not every point is shown.")
    assert len(landscape_charts([run] * 8)[7].traces[0]["x"]) == 50
    assert contour["colorbar"]["ticktext"] == ["1", "2", "5", "10", "20", "50", "100"]


def test_a_landscape_over_many_decades_has_powers_of_ten_as_ticks(tmp_path: Path) -> None:
    run = with_table(tmp_path / "run", "landscape", LANDSCAPE, ((x, y, 10.0**x, 1) for x in range(7) for y in range(2)))
    assert landscape_charts([run])[0].traces[0]["colorbar"]["ticktext"] == ["1", "10", "100", "1e+04", "1e+05", "1e+06"]


def test_a_landscape_without_a_finite_loss_has_no_chart_and_a_thin_one_has(tmp_path: Path) -> None:
    run = with_table(tmp_path / "run", "landscape", LANDSCAPE, [(0, 0, "nan", 0), (0, 1, "inf", 0)])
    assert landscape_charts([run]) == []
    for name, row in (("x", [(0, 0, 1, 0), (0, 1, 2, 1)]), ("y", [(0, 0, 1, 0), (1, 0, 2, 1)])):
        (chart,) = landscape_charts([with_table(tmp_path / name, "landscape", LANDSCAPE, row)])
        assert chart.traces[0]["x"] == [0, 1]  # too thin for contours: a line
        assert chart.traces[0]["y"] == [1, 2]


def test_trajectories_are_paths_by_stage_and_class(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add_findings(folder)
    (run,) = read_all([folder])
    before, after = trajectory_charts([run])
    assert (before.title, after.title) == ("before", "after")
    line, end = before.traces[:2]
    assert [key.label for key in before.legend] == ["3", "7", "none"]
    assert line["x"] == [0, 1, 2, 3, None]
    assert line["y"] == [0, -1, -2, -3, None]
    assert line["customdata"] == [["0", 0], ["0", 1], ["0", 2], ["0", 3], ["0", None]]
    assert (end["x"], end["y"]) == ([3], [-3])
    assert before.layout["xaxis"]["range"] == after.layout["xaxis"]["range"] == pytest.approx([-0.18, 3.18])
    assert before.traces[-1]["marker"]["color"] == "var(--soft)"


def test_of_many_samples_stages_and_steps_some_are_shown(tmp_path: Path) -> None:
    rows = ((stage, i, 0, k, k, i) for stage in range(9) for i in range(90) for k in range(70))
    run = with_table(tmp_path / "run", "trajectory", TRAJECTORY, rows)
    found = run.findings.trajectory
    assert [part.stage for part in found] == ["0", "2", "3", "5", "6", "8"]
    assert {len(part.paths) for part in found} == {findings.PATHS}
    assert found[0].samples == 90
    assert found[0].paths[0].steps[[0, -1]].tolist() == [0, 69]
    assert len(found[0].paths[0].steps) == findings.STEPS
    (chart,) = trajectory_charts([replace(run, findings=replace(run.findings, trajectory=found[:1]))])
    assert chart.legend == []
    assert chart.note == "80 of 90 samples are shown. 1 of 9 stages are shown."
    assert found[0].thinned(8).paths[-1] is found[0].paths[-1]


def test_a_stage_without_a_class_of_another_has_no_trace_of_it(tmp_path: Path) -> None:
    rows = [("a", 0, 1, 0, 1, 1), ("b", 0, 2, 0, 1, 1), ("c", 0, 1, 0, "nan", 1)]
    charts = trajectory_charts([with_table(tmp_path / "run", "trajectory", TRAJECTORY, rows)])
    assert [[trace["name"] for trace in chart.traces] for chart in charts] == [["1", "1"], ["2", "2"]]
    assert charts[0].layout["xaxis"]["range"] == [0.5, 1.5]  # a single point


def test_residuals_have_a_median_a_band_and_a_worst_sample(tmp_path: Path) -> None:
    rows = [(name, k, 8 * 0.5**k, 4 * 0.5**k, 0.5**k, 0.0, 0.5) for name in ("a", "b") for k in range(4)]
    run = with_table(tmp_path / "run", "residuals", RESIDUALS, [*rows, ("never", 0, "inf", "inf", "inf", 0, 0)])
    (chart,) = residual_charts([run])
    low, high, worst, median = chart.traces[:4]
    assert [key.label for key in chart.legend] == ["a", "b"]
    assert low["y"] == [pytest.approx(0.125 / 3, rel=1e-4)] * 4  # a logarithmic axis has no zero
    assert high["y"] == [4, 2, 1, 0.5]
    assert worst["line"]["dash"] == "dash"
    assert median["customdata"][0] == ["1", "8", "50.00%"]
    assert chart.note.endswith("drawn at the lower edge. 2 of 3 solvers are shown: the first that have a finite residual.")
    assert len(chart.runs) == len(chart.traces) == 8
    assert [part.title for part in residual_charts([run, run])] == ["Residuals, run", "Residuals, run"]


def test_residuals_are_told_as_they_went(tmp_path: Path) -> None:
    ways = {"worse": [1.0, 1e5], "exact": [0.0, 0.0], "newton": [1.0, 0.0], "burst": [1.0, math.inf], "_late": [math.nan, 0.5]}
    rows = [(name, k, value, value, value, value, 0, 3 * k) for name, way in ways.items() for k, value in enumerate(way)]
    (chart,) = residual_charts([with_table(tmp_path / "run", "residuals", f"{RESIDUALS} evals", rows)])
    for words in (
        "worse: the median goes from 1 to 1e+05, 0.00% of the samples solved",
        "exact: the median goes from 0 to 0",
        "newton: the median goes from 1 to 0",
        "burst: the median goes from 1 to not finite",
        "_late: the median goes from not finite to 0.5",
    ):
        assert words in chart.described
    drawn = [trace for trace in chart.traces if "customdata" in trace]
    floor = pytest.approx(0.5 / 3, rel=1e-4)
    assert [trace["y"] for trace in drawn] == [[1, 100_000], [floor, floor], [1, floor], [1, None], [None, 0.5]]
    assert [about[0] for trace in drawn for about in trace["customdata"]][4:6] == ["1", "0"]  # what it was, not where it is drawn
    assert drawn[0]["customdata"][1][3] == "3"
    assert "<br>evaluations %{customdata[3]}" in drawn[0]["hovertemplate"]
    assert all(f"{name}</text>" in chart.svg for name in ways)  # also what begins with an underscore


def test_residuals_that_are_zero_throughout_and_a_lone_number_among_thousands_of_none_do_not_stop_a_report(tmp_path: Path) -> None:
    exact = with_table(tmp_path / "exact", "residuals", RESIDUALS, [("a", k, 0, 0, 0, 0, 1) for k in range(2)])
    rows = [("a", k, *(["1"] * 4 if k == 1 else ["nan"] * 4), 0) for k in range(3000)]
    lone = with_table(tmp_path / "lone", "residuals", RESIDUALS, rows)
    (chart,) = residual_charts([exact, lone])
    assert [trace["y"] for trace in chart.traces] == [[1, 1]] * 4
    many = [(f"solver {name}", k, 1, 1, 1, 1, 0) for name in range(12) for k in range(2)]
    (chart,) = residual_charts([with_table(tmp_path / "many", "residuals", RESIDUALS, many)])
    assert "8 of 12 solvers are shown" in chart.note


def radius_words(folder: Path, rows: list[Any]) -> str:
    (chart,) = jacobian_charts([with_table(folder, "jacobian", JACOBIAN, rows)])
    return chart.note


def test_the_iteration_is_said_to_converge_only_if_all_eigenvalues_are_known_and_below_one(tmp_path: Path) -> None:
    inside = (0, 0, 0.5, 0.0, 1)
    assert radius_words(tmp_path / "inside", [inside]) == (
        "Spectral radius 0.5, inside the unit circle: near the equilibrium the iteration converges."
    )
    late = [(at, 0, 0.5, 0.0, 1) for at in range(4000)] + [(9999, 0, 0.0, 7.0, 1), (9999, 1, 0.0, 0.0, 1)]
    assert radius_words(tmp_path / "late", late) == "Spectral radius 7, not below 1. 4,000 of 4,002 are drawn."
    for name, unknown in (("nan", ("nan", 0.0, 1)), ("open", (0.9, 0.0, 0))):
        words = radius_words(tmp_path / name, [inside, (0, 1, *unknown)])
        assert words.startswith("Spectral radius unknown: 1 of 2 eigenvalues are not converged (crosses) or not finite.")
        assert "the iteration converges" not in words
    assert "Spectral radius 1 - 1e-05, inside" in radius_words(tmp_path / "close", [(0, 0, 0.99999, 0.0, 1)])
    assert "Spectral radius 1, not below 1" in radius_words(tmp_path / "one", [(0, 0, 1.0, 0.0, 1)])


def test_errors_of_the_hessian_that_are_unknown_are_not_zero_and_the_largest_is_found_wherever_it_is(tmp_path: Path) -> None:
    rows = [(0, 3.0, "inf", 0), (1, -5.0, "nan", 1), (2, 9.0, 0.5, 1), (3, "nan", 0.5, 1)]
    (chart,) = hessian_charts([with_table(tmp_path / "run", "hessian", HESSIAN, rows)])
    assert chart.traces[0]["error_y"]["array"] == [None, None, 0.5]
    assert [about[0] for about in chart.traces[0]["customdata"]] == ["unknown", "unknown", "0.5"]
    assert "the largest is 9" in chart.described
    assert chart.title == "Eigenvalues of the Hessian"
    assert "Unknown bounds: 2. Pale bars are not converged. 3 of 4 eigenvalues are shown" in chart.note
    many = [(at, at, 0, 1) for at in range(250)]
    (chart,) = hessian_charts([with_table(tmp_path / "many", "hessian", HESSIAN, many)])
    assert "the largest is 249" in chart.described
    assert chart.note.endswith("200 of 250 eigenvalues are shown: the first that are finite.")


def test_spectra_stand_side_by_side(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add_findings(folder)
    (run,) = read_all([folder])
    outside = with_table(tmp_path / "out", "jacobian", JACOBIAN, [(0, 0, 0.0, 1.5, 1)])
    (circle,) = jacobian_charts([run, outside])
    assert circle.runs == [None, 0, 1]
    assert circle.traces[1]["marker"]["symbol"] == ["circle", "circle", "x"]
    assert circle.note.endswith("out: spectral radius 1.5, not below 1.")
    np.testing.assert_allclose(np.hypot(circle.traces[0]["x"], circle.traces[0]["y"]), 1, atol=1e-3)
    (bars,) = hessian_charts([run, run])
    assert bars.traces[1]["y"] == [4, -2.5]
    assert bars.traces[0]["error_y"]["array"] == [0.1, 0.2]
    assert bars.traces[0]["marker"]["opacity"] == [1, 0.4]
    assert hessian_charts([outside]) == jacobian_charts([of_rows(tmp_path / "none", [])]) == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("landscape", "x,y,loss\n1,2,3\n", "has no column converged"),
        ("landscape", "x,y,loss,converged\n", "has no rows"),
        ("landscape", "", "is damaged"),
        ("landscape", "x,y,loss,converged\n1,2\n", "differ in length"),
        ("landscape", "x,y,loss,converged\nnan,2,1,1\n", "a coordinate is not a number"),
        ("landscape", "x,y,loss,converged\n1,2,1,1\n2,3,1,1\n3,4,1,1\n", "no grid"),
        ("jacobian", "sample,real,imag,converged\n0,nan,1,1\n", "no eigenvalue"),
        ("hessian", "eigenvalue,error,converged\ninf,1,1\n", "no eigenvalue"),
        ("landscape", "x,y,loss,converged\n0,0,1,1\n0,1,1,1\n1,0,1,1\n", "some are missing"),  # cut short
        ("landscape", "x,y,loss,converged\n0,0,1,1\n0,1,1,1\n1,0,1,1\n1,0,2,1\n", "there twice"),
        ("hessian", "eigenvalue,error,converged\n1,1," + "x" * 200_000, "field larger than field limit"),
        ("trajectory", "\xff\x00,,,,", "has no column stage"),
    ],
)
def test_a_damaged_finding_is_noted(tmp_path: Path, name: str, content: str, words: str) -> None:
    folder = make(tmp_path / "run")
    (folder / f"{name}.csv").write_text(content)
    (run,) = read_all([folder])
    assert [words in note and f"{name}.csv" in note for note in run.notes] == [True]
    assert run.findings == findings.Findings()


def test_a_finding_that_is_too_large_or_no_file_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "run")
    (folder / "hessian.csv").mkdir()
    add = "eigenvalue,error,converged\n" + "1,1,1\n" * 5
    (folder / "jacobian.csv").write_text(add)
    monkeypatch.setattr(findings, "BYTES", 20)
    assert "too large" in read_all([folder])[0].notes[0]
    monkeypatch.undo()
    monkeypatch.setattr(findings, "ROWS", 4)
    (folder / "jacobian.csv").write_text("sample,real,imag,converged\n" + "1,1,1,1\n" * 5)
    notes = read_all([folder])[0].notes
    assert "more than 4 rows" in notes[0]
    assert "hessian.csv" in notes[1]


FOREIGN = {  # what may lie where a file is expected; a FIFO would be waited for without an end
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "nowhere": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["landscape.csv", "hessian.csv", "problem.txt"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str, name: str) -> None:
    folder = make(tmp_path / "run")
    FOREIGN[kind](folder / name)
    (run,) = read_all([folder])
    assert run.notes == [f"{folder / name} is foreign (a link, or no file): delete it"]
    assert run.problem == {}
    assert run.findings == findings.Findings()


def test_a_long_text_is_cut_and_a_huge_one_is_not_read(tmp_path: Path) -> None:
    (folder := make(tmp_path / "run", certificate={"explain": "y" * 30_000})).joinpath("problem.txt").write_text("x" * 30_000)
    page = check_sound(write([folder]))
    for sign in "xy":
        assert f"{sign * 20_000} ..." in page.text
        assert sign * 20_001 not in page.text
    (folder / "problem.txt").write_text("x" * 1_000_001)
    (run,) = read_all([folder])
    assert "problem.txt is too large to be shown: 1,000,001 bytes" in run.notes[0]


# --- the problem ----------------------------------------------------------------------------------------------------------------


class Layer:
    """What a formula needs of a cell."""

    alpha = 0.5

    def __init__(self, name: str) -> None:
        self.activation = type("Activation", (), {"name": name})()


REGULARIZERS = sorted(
    (
        part
        for part in vars(opteq.regularizers).values()
        if isinstance(part, type) and isinstance(getattr(part, "latex", None), str)
    ),
    key=lambda part: part.__name__,
)


def statements() -> Iterable[str]:
    yield formulas.one_layer(Layer("relu"))[1]  # type: ignore[arg-type]
    yield from (latex for _, latex in formulas._SIGMA.values())
    yield formulas.affine(Layer("relu"))[1]  # type: ignore[arg-type]
    yield formulas.multivariate(Layer("relu"))[1]  # type: ignore[arg-type]
    yield formulas.TWO_LAYERS[1]
    yield formulas.WIDE[1]
    yield formulas.inclusion(3, None)[1]
    yield from (part.latex for part in REGULARIZERS)
    for mode in ("gradient", "prox"):
        step = type("Step", (), {"regularizer": REGULARIZERS[0], "gamma": 0.5, "mode": mode})()
        yield formulas.regularized("h", r"\varphi(z)", step)[1]
        yield formulas.inclusion(5, step)[1]


def test_every_formula_of_the_library_can_be_drawn() -> None:
    assert len(REGULARIZERS) >= 6
    for latex in dict.fromkeys(statements()):
        lines = drawn(latex)
        assert lines, latex
        for line in lines:
            width = re.search(r"width: ([\d.]+)em", line)
            assert width is not None
            assert 0.5 < float(width[1]) < 32, latex  # fits a phone, somewhat smaller
            Page(line)


def test_a_formula_is_translated_and_broken_into_lines() -> None:
    assert translated(r"\tfrac12 a + \tfrac1\mu \mathbf 1 + \tfrac1{2\mu} + \frac{a}{b}") == (
        r"\frac{1}{2} a + \frac{1}{\mu} \mathbf{1} + \frac{1}{2\mu} + \frac{a}{b}"
    )
    assert translated(r"a \ge b \le c \geq \left(") == r"a \geq b \leq c \geq \left("
    assert len(drawn(r"a = b,\quad b = c;\quad c = d; e")) == 4
    (a,), (b,) = drawn("x"), drawn("xx")
    assert len(b) > 1.5 * len(a)


@pytest.mark.parametrize(
    "latex",
    [
        "",
        ";",
        r"\quad",
        "{}",
        r"\rm",
        r"\hspace{1}",
        r"\foo",
        "$",
        "a$b",
        "{" * 300,
        r"\frac{1}",
        "x" * 500,
        "a\nb",
        "<script>;" * 20,
        r"\href{x}{y}",
        r"\\",
        " ",
    ],
)
def test_what_is_no_formula_is_not_drawn(latex: str) -> None:
    assert drawn(latex) == []


def test_unknown_signs_are_drawn_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawn("\N{HIRAGANA LETTER A}")


def test_the_problem_is_stated_as_a_formula_with_its_text_and_its_conditions(tmp_path: Path) -> None:
    holding = {"name": "L ||W||^2 <= mu", "lhs": 0.5, "rhs": 1.0, "evidence": "bound", "purpose": "convexity", "holds": True}
    problem = {"text": "minimise <phi>", "latex": r"\min_z\ \varphi(z);\quad z", "requirements": [holding], "convex": True}
    folder = make(tmp_path / "run", problem=problem)
    (folder / "problem.txt").write_text("not this")
    page = check_sound(write([folder]))
    assert {"class": "formula", "role": "img", "aria-label": "minimise <phi>", "tabindex": "0"} in page.all("div")
    assert len([svg for svg in page.all("svg") if svg.get("aria-hidden")]) == 2
    for text in ("The problem is convex", "L ||W||^2 <= mu holds 0.5 1 bound convexity", "The problem as a text minimise <phi>"):
        assert text in page.text
    assert "not this" not in page.text
    both = check_sound(
        write([folder, make(tmp_path / "same", problem=problem), make(tmp_path / "other", problem={"text": "x"})], tmp_path)
    )
    assert both.text.count("The problem as a text minimise <phi>") == 1
    assert "run, same The problem is convex" in both.text
    failing = requirements({"requirements": [{**holding, "holds": False}]})
    assert failing is not None
    assert failing.lines[0].differs
    assert requirements({}) is None
    assert convexity_words({"convex": False}) == "The problem was not shown to be convex."


# --- tables and words -----------------------------------------------------------------------------------------------------------


def test_tables_have_a_cell_for_every_run_and_leave_out_what_no_run_has(tmp_path: Path) -> None:
    a, b = read_all([make(tmp_path / "a", ROWS, result=RESULT), make(tmp_path / "b", [], config={"only": 1})])
    table = results([a, b])
    cells = {line.head: line.cells for line in table.lines}
    assert cells["steps"] == ("120", MISSING)
    assert cells["test accuracy"] == ("94.12%", MISSING)
    assert cells["validation accuracy at best"] == ("96.25%", MISSING)
    assert "certificate" not in cells
    assert parameters([b]) is None
    assert [line.head for line in parameters([a, b]).lines] == ["extractor", "equilibrium", "total"]  # type: ignore[union-attr]
    assert facts("c", [a, b], lambda run: run.config).lines[-1].cells == (MISSING, "1")
    assert not any(line.differs for line in table.lines if MISSING in line.cells)
    assert facts("c", [a, b], lambda run: run.config).lines[-1].differs


def test_a_training_under_a_certificate_is_told_by_what_its_monitor_saw(tmp_path: Path) -> None:
    trained = {"steps": 20, "loss_first": 8.0, "loss_last": 1.5, "bound_last": 7.9, "violation": None}
    rows = [{"kind": "monitor", "step": at, "loss": 8 - 0.325 * at, "solver_steps": 2.0} for at in (0, 10, 20)]
    (run,) = read_all([make(tmp_path / "run", rows, certificate={**CERTIFICATE, "trained": trained})])
    assert verdict(run)[0].startswith("Trained for 20 steps under the certificate: the loss went from 8 to 1.5")
    cells = {line.head: line.cells for line in results([run]).lines}
    assert (cells["steps"], cells["training loss at the end"], cells["solver steps at the end"]) == (("20",), ("1.5",), ("2",))


def test_a_single_number_of_parameters_is_the_total_and_segmentations_are_scored_in_percent(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [epoch(1, valid_miou=0.5)], result={"parameters": 1200, "valid_miou": 0.4375})])
    table = parameters([run])
    assert table is not None
    assert [(line.head, line.cells) for line in table.lines] == [("total", ("1,200",))]
    cells = {line.head: line.cells for line in results([run]).lines}
    assert cells["parameters"] == ("1,200",)
    assert cells["valid miou"] == ("43.75%",)
    assert "Mean intersection over union" in [chart.title for chart in curve_charts(METRICS[2:3], [run])]


def test_a_problem_without_a_text_is_told_by_its_formula_and_a_formula_is_drawn_once(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, problem={"latex": "x^2", "convex": name == "a"}) for name in "ab"]
    page = check_sound(write(runs, tmp_path))
    assert "a The problem is convex: all that this needs was shown to hold. The problem as a text x^2" in page.text
    assert "b The problem was not shown to be convex. x^2" in page.text
    assert len(page.all("svg")) == 1


def test_what_to_change_is_said_once_for_all_conditions_that_fail(tmp_path: Path) -> None:
    failing = {"name": "n", "verdict": "FAILS", "remedy": "widen it & wait"}
    certificate = {"holds": False, "conditions": [failing, failing, {**failing, "verdict": "ok", "remedy": "keep it"}]}
    page = check_sound(write([make(tmp_path / "run", certificate=certificate)]))
    assert page.text.count("What to change: widen it & wait") == 1
    assert "keep it" not in page.text


def test_names_that_differ_in_the_middle_only_are_whole_in_the_tables(tmp_path: Path) -> None:
    names = [f"{'a' * 40}{sign}{'b' * 40}" for sign in "12"]
    runs = read_all([make(tmp_path / name) for name in names])
    assert results(runs).heads == ("quantity", *names)
    assert results(runs[:1]).heads == ("quantity", short(names[0], 40))


def test_of_many_runs_some_have_charts_and_all_are_in_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "CHARTED", 2)
    monkeypatch.setattr(reading, "WITH_FINDINGS", 1)
    folders = [make(tmp_path / f"run-{at}", [step(1), step(2)], certificate=CERTIFICATE) for at in range(4)]
    for folder in folders[1:]:
        table(folder, "hessian", HESSIAN, [(0, 4.0, 0.1, 1)])
    found = check_sound(write(folders, tmp_path))
    charts = json.loads(found.scripts[1])
    assert set(charts["chart-loss"]["runs"]) == {0, 1}
    assert charts["chart-hessian"]["runs"] == [1]
    for text in (
        "quantity run-0 run-1 run-2 run-3",
        "those of the first 2 of 4 runs; the tables of results and settings hold all.",
        "are those of the first runs that have them; those of 2 more are left out.",
    ):
        assert text in found.text
    assert found.text.count("CERTIFIED") == 2


def test_many_events_are_cut_and_counted(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [{**EVENT, "what": "new kind", "layer": None}] * 105)])
    table = events(run)
    assert table is not None
    assert len(table.lines) == 100
    assert table.note == "5 more are in metrics.jsonl."
    assert page._marks([run]) == "Dotted vertical lines mark the first 20 of 105 events."
    assert table.lines[0].cells == ("new kind", MISSING, "loss is NaN at step 60", "rolled back")


@pytest.mark.parametrize(
    ("share", "word"),
    [(1.0, "The solver is healthy"), (0.95, "Note: only"), (0.5, "Beware: only")],
)
def test_the_verdict_on_the_solver_depends_on_how_many_converged(tmp_path: Path, share: float, word: str) -> None:
    (run,) = read_all([make(tmp_path / "run", [epoch(1, valid_converged=share)])])
    (sentence,) = [part for part in verdict(run) if "equilibrium" in part]
    assert sentence.startswith(f"{word}")
    assert f"{100 * share:.2f}% of the last validation samples" in sentence


def test_without_validation_the_solver_is_judged_by_the_last_step(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [step(1, converged=0.99, solver_steps=None)])])
    assert "The solver is healthy: 99.00% of the last training samples reached their equilibrium." in verdict(run)


def test_the_accuracy_of_the_result_is_shown_without_epochs(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [], result={"valid_accuracy": 0.5})])
    assert "Validation accuracy 50.00% at the end." in verdict(run)


def test_a_certificate_is_put_into_words() -> None:
    assert certificate_words({"holds": None}).startswith("No guarantee is claimed")
    flow = {**CERTIFICATE, "kind": "flow", "rate": 0.25}
    assert certificate_words(flow).endswith("Under the gradient flow, the loss falls at least as exp(-0.25 t).")
    for unknown in ({"rate": None}, {"max_step": None}):
        assert certificate_words({**CERTIFICATE, **unknown}) == "Certified: all 2 conditions hold."
    failing = [{"slack": 0.5}, {"slack": 2.0}, {"slack": None}]
    assert certificate_words({"holds": False, "conditions": failing}).startswith("Not certified: 2 of 3 conditions do not hold")
    assert certificate_words({"holds": True, "conditions": [*CERTIFICATE["conditions"], {"slack": 0.5}]}) == (  # type: ignore[misc]
        "Contradiction: it claims to hold, but 1 of 3 conditions do not hold. Do not rely on it."
    )
    assert certificate_words({"holds": True}) == "Certified: its conditions are not listed."
    assert certificate_words({"holds": False, "conditions": [{"holds": True}]}).startswith("Not certified: it says so itself")
    assert training_words({}) == ""
    assert training_words({"violation": "loss at step 3"}).endswith("BROKEN: loss at step 3")
    assert conditions({"conditions": None}) is None


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"slack": 1.0}, "holds"),
        ({"slack": 0.999}, "FAILS"),
        ({"slack": None}, "not evaluated"),
        ({"slack": math.nan}, "not evaluated"),
        ({"slack": math.inf}, "holds"),
        ({"slack": 1.0, "holds": False}, "FAILS"),
        ({"slack": None, "holds": True, "verdict": "ok"}, "holds"),
        ({"slack": 0.5, "holds": False, "verdict": "FAILS by a factor of 2"}, "FAILS by a factor of 2"),
        ({"slack": None, "holds": True}, "holds"),
    ],
)
def test_a_condition_holds_where_the_left_side_is_the_larger(condition: dict[str, Any], words: str) -> None:
    assert condition_verdict(condition) == words


def test_numbers_shares_and_times_are_readable() -> None:
    assert [figure_text(value) for value in (None, 12345, 0.000123456, math.nan, math.inf, True, "a", 10**400)] == [
        MISSING,
        "12,345",
        "0.0001235",
        "nan",
        "inf",
        "true",
        "a",
        "huge",
    ]
    assert [percent(value) for value in (0.98765, None, math.nan, "x")] == ["98.77%", MISSING, "nan", "x"]
    assert [duration(value) for value in (0, 59.94, 60, 3599.4, 3600, 90_000, -1, None)] == [
        "0.0 s",
        "59.9 s",
        "1 min 00 s",
        "59 min 59 s",
        "1 h 00 min",
        "25 h 00 min",
        MISSING,
        MISSING,
    ]


def test_a_configuration_is_flattened_with_dots() -> None:
    assert flattened({"a": {"b": {"c": 1.5}, "d": {}}, "e": [1, None], "f": math.inf, "g": "t"}) == {
        "a.b.c": "1.5",
        "a.d": "{}",
        "e": "[1, null]",
        "f": "inf",
        "g": "t",
    }
    assert flattened([1]) == {}
