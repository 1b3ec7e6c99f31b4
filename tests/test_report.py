"""Reports: what they say, that hostile runs cannot break them, that the page is sound, self-contained and accessible."""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq.diagnostics.panels import METRICS, SOLVER
from opteq.report import write
from opteq.report.curves import Curve, curve, thinned
from opteq.report.figures import drawings
from opteq.report.reading import flattened, number, read_all
from opteq.report.svg import COLOURS, GRID, INK, for_page
from opteq.report.tables import conditions, events, facts, parameters, results
from opteq.report.words import (
    MISSING,
    certificate_words,
    condition_verdict,
    duration,
    figure_text,
    percent,
    training_words,
    verdict,
)
from opteq.runs import RunError

VOID = {"meta", "br", "img", "link", "input", "hr"}
CONFIG = {"data": {"name": "digits"}, "model": {"width": 16, "channels": [8, 16]}, "train": {"lr": 0.1, "seed": None}}
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
EVENT = {
    "kind": "event",
    "step": 60,
    "what": "nan_loss",
    "layer": "equilibrium",
    "message": "loss is NaN at step 60",
    "action": "rolled back",
}


def make(folder: Path, rows: list[Any] | None = None, config: Any = CONFIG, **files: Any) -> Path:
    """A run folder, written without the library. `files`: JSON by name; a text is written as it is."""
    folder.mkdir(parents=True)
    files = {"config": config, "environment": {"python": "3.11", "git": {"dirty": True}}, **files}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    if rows is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Page(HTMLParser):
    """Elements, ids and texts of a page; raises where tags are not balanced."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
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
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_sound(path: Path) -> Page:
    """Balanced tags, unique ids, links that lead somewhere, nothing from elsewhere, no code, labels for all figures and tables."""
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    ids = [value for _, attributes in page.elements if (value := attributes.get("id")) is not None]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert not {"script", "iframe", "object", "embed", "link", "base", "img"} & {tag for tag, _ in page.elements}
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
        assert figure["role"] == "img"
        assert figure["aria-labelledby"] in ids
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(head["scope"] in ("col", "row") for head in page.all("th"))
    return page


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = make(tmp_path_factory.mktemp("runs") / "demo", [*ROWS, EVENT], result=RESULT, certificate=CERTIFICATE)
    (folder / "problem.txt").write_text("min phi(z) with W'W < I\n")
    path = write([folder])
    return path, check_sound(path)


def test_the_report_of_one_run_is_report_html_in_its_folder_and_holds_all_sections(full: tuple[Path, Page]) -> None:
    path, page = full
    assert path.name == "report.html"
    assert path.parent.name == "demo"
    sections = [part["id"] for part in page.all("section")]
    assert sections == ["result", "metrics", "solver", "parameters", "problem", "certificate", "run"]
    assert len(page.all("svg")) == len(METRICS) + len(SOLVER) - 1  # images are classified, not segmented
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
        "width lhs >= rhs 4 2 2 holds exact",
        "model.channels [8, 16] train.lr 0.1 train.seed none",
        "git.dirty true",
        "test accuracy 94.12%",
    ):
        assert text in page.text
    assert any("demo, validation: from 0.9625 to 0.875" in text for text in page.texts)  # a figure for who cannot see it


def test_the_page_is_small_suits_phones_dark_screens_and_paper_and_admits_no_code(full: tuple[Path, Page]) -> None:
    path, page = full
    html = path.read_text()
    assert len(html) < 1_000_000
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert any((meta.get("content") or "").startswith("default-src 'none'") for meta in page.all("meta"))
    assert "@media screen and (prefers-color-scheme: dark)" in html
    assert "@media print" in html
    assert page.all("a")[0] == {"class": "skip", "href": "#result"}
    for colour in (INK, GRID, *COLOURS):
        assert colour not in html
    assert html.count("currentColor") > 100
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
    assert html.count('class="swatch"') == 4  # two runs, in two sections
    assert "var(--c1)" in html


HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}$x_$\x00\ud800"


def hostile_rows() -> list[Any]:
    values = [math.nan, math.inf, -math.inf, None, "0.5", HOSTILE, True, [], {}, 1e308, -(10**400), 0.25]
    keys = [key for key in {**step(1), **epoch(1)} if key not in ("kind", "step")]
    rows: list[Any] = [
        {"kind": kind, "step": 1 + at, **dict.fromkeys(keys, value)}
        for kind in ("step", "epoch")
        for at, value in enumerate(values)
    ]
    rows += [{"kind": kind, "step": value, "loss": 1.0} for kind in ("step", "epoch", "event") for value in values]
    rows += [{"kind": "event", "step": 3, **dict.fromkeys(("what", "layer", "message", "action"), value)} for value in values]
    return [*rows, [], "text", 5, {"kind": HOSTILE}, {"kind": {}}, {}]


def test_hostile_content_is_shown_as_text(tmp_path: Path) -> None:
    config = {HOSTILE: {HOSTILE: HOSTILE, "list": [HOSTILE]}, "nothing": {}, "long": "x" * 10_000}
    certificate = {"theorem": HOSTILE, "holds": False, "explain": HOSTILE, "trained": {"steps": HOSTILE, "violation": HOSTILE}}
    certificate["conditions"] = [{"name": HOSTILE, "formula": HOSTILE, "lhs": HOSTILE, "slack": HOSTILE, "evidence": None}, HOSTILE]
    result = {"stopped": HOSTILE, "steps": HOSTILE, "parameters": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE, "seconds": -1}
    folder = make(tmp_path / "<b>&name", hostile_rows(), config, result=result, certificate=certificate, environment={HOSTILE: 1})
    (folder / "problem.txt").write_bytes(b"<script>\xff</script>")
    path = write([folder], tmp_path / "out.html")
    page = check_sound(path)
    shown = HOSTILE.replace("\x00", "\N{REPLACEMENT CHARACTER}").replace("\ud800", "?")
    assert page.text.count(shown) > 20
    assert "49" not in page.text  # the template language does not run
    assert len(page.all("svg")) == len(METRICS) + len(SOLVER) - 1  # the good values among the bad ones are drawn
    assert "<script" not in path.read_text()
    assert f"Stopped early, after {shown} steps" in page.text
    assert f"BROKEN: {shown}" in page.text
    assert "Not certified: 1 of 1 conditions do not hold" in page.text
    assert "<b>&name" in page.text
    assert "x" * 300 + " ..." in page.text
    assert "x" * 301 not in page.text


@pytest.mark.parametrize("rows", [None, []], ids=["no metrics", "empty metrics"])
def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path, rows: list[Any] | None) -> None:
    folder = make(tmp_path / "run", rows, {})
    (folder / "environment.json").unlink()
    page = check_sound(write([folder]))
    assert page.all("svg") == []
    for text in (
        "Nothing has been measured yet.",
        "No metrics were written.",
        "Nothing about the solver",
        "no events",
        "configuration is empty",
    ):
        assert text in page.text
    assert [part["id"] for part in page.all("section")] == ["result", "metrics", "solver", "run"]


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


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_library_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    folder = make(tmp_path / "run")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"A report needs {missing}: pip install 'opteq\[report\]'"):
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
    whole = Curve(np.arange(len(values), dtype=float), np.array(values))
    thin = thinned(whole, points)
    assert len(thin.x) <= max(points, 3 * (points // 2) + 2)
    assert thin.x[0] == 0
    assert thin.x[-1] == len(values) - 1
    assert (np.diff(thin.x) > 0).all()
    np.testing.assert_array_equal(thin.y, whole.y[thin.x.astype(int)])
    assert np.isnan(thin.y).any() == np.isnan(whole.y).any()
    if len(whole.finite):
        assert thin.finite.min() == whole.finite.min()
        assert thin.finite.max() == whole.finite.max()


def test_thousands_of_steps_are_thinned_but_spikes_stay() -> None:
    rows = [step(at, loss=50.0 if at == 7777 else 1.0) for at in range(1, 20_001)]
    found = curve(rows, "loss")
    assert found is not None
    assert len(found.x) < 500
    assert 7777 in found.x
    assert found.finite.max() == 50.0


def test_a_long_gap_stays_a_gap() -> None:
    rows = [step(at, loss=None if 2000 < at < 3000 else 1.0) for at in range(1, 5001)]
    found = curve(rows, "loss")
    assert found is not None
    inside = (found.x > 2000) & (found.x < 3000)
    assert inside.any()
    assert np.isnan(found.y[inside]).all()
    assert np.isfinite(found.y[~inside]).all()


def test_curves_have_gaps_where_there_is_no_number_and_leave_out_rows_without_a_step() -> None:
    rows = [step(1), {"step": None, "loss": 3.0}, step(2, loss=None), {"step": 3}, step(4, loss=math.inf)]
    found = curve(rows, "loss")
    assert found is not None
    np.testing.assert_array_equal(found.x, [1, 2, 4])
    np.testing.assert_array_equal(found.y, [1, np.nan, np.nan])
    assert curve(rows, "unknown") is None
    np.testing.assert_array_equal(curve([epoch(1), epoch(2, alpha=[1.0])], "alpha", 1).y, [0.25, np.nan])  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 1e200, 10**400, "1", True, [1], {}])
def test_what_cannot_be_drawn_is_no_number(value: object) -> None:
    assert number(value) is None


def test_numbers_are_numbers() -> None:
    assert number(3) == 3.0
    assert number(-0.5) == -0.5


# --- figures --------------------------------------------------------------------------------------------------------------------


def test_a_figure_is_logarithmic_only_where_values_are_positive_and_range_widely(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [])])
    wide = replace(run, steps=[step(1, loss=100.0), step(2, loss=1.0)])
    narrow = replace(run, steps=[step(1, loss=2.0), step(2, loss=1.0)])
    negative = replace(run, steps=[step(1, loss=100.0), step(2, loss=-1.0)])
    ticks = [re.findall(r">([^<>]+)</text>", drawings(METRICS[:1], [part])[0].svg) for part in (wide, narrow, negative)]
    assert {"1", "10", "100"} <= set(ticks[0])
    assert "10" not in ticks[1]
    assert "10" not in ticks[2]


def test_shares_end_at_a_hundred_percent(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [step(1), step(2)])])
    ticks = re.findall(r">([\d.]+)%</text>", drawings(SOLVER[1:2], [run])[0].svg)
    assert max(map(float, ticks)) == 100.0


def test_an_alternative_text_is_escaped_and_ids_differ_between_figures() -> None:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" viewBox="0 0 9 9">'
        "<metadata/>"
        '<defs><style>*{}</style><path id="m" d="M 0.123456 1\nL 2 3"/></defs>'
        f'<g id="unused" clip-path="url(#m)"><use xlink:href="#m" style="fill: {INK}; stroke: {COLOURS[3]}"/>'
        "<text style=\"font-size: 9px; font-family: 'DejaVu Sans', serif; fill: none\">a</text></g></svg>"
    )
    one, two = for_page(svg, "<b>one"), for_page(svg, "two")
    assert "&lt;b&gt;one</title>" in one
    assert "fill: currentColor; stroke: var(--c3)" in one
    assert "font-family" not in one
    assert "<style" not in one
    assert "metadata" not in one
    assert "unused" not in one
    assert "width" not in one
    assert 'd="M 0.12 1 L 2 3"' in one
    assert set(re.findall(r'id="([^"]*)"', one)).isdisjoint(re.findall(r'id="([^"]*)"', two))


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


def test_a_single_number_of_parameters_is_the_total_and_segmentations_are_scored_in_percent(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [epoch(1, valid_miou=0.5)], result={"parameters": 1200, "valid_miou": 0.4375})])
    table = parameters([run])
    assert table is not None
    assert [(line.head, line.cells) for line in table.lines] == [("total", ("1,200",))]
    cells = {line.head: line.cells for line in results([run]).lines}
    assert cells["parameters"] == ("1,200",)
    assert cells["valid miou"] == ("43.75%",)
    assert "Mean intersection over union" in [drawing.title for drawing in drawings(METRICS[2:3], [run])]


def test_what_to_change_is_said_once_for_all_conditions_that_fail(tmp_path: Path) -> None:
    failing = {"name": "n", "verdict": "FAILS", "remedy": "widen it & wait"}
    certificate = {"holds": False, "conditions": [failing, failing, {**failing, "verdict": "ok", "remedy": "keep it"}]}
    page = check_sound(write([make(tmp_path / "run", certificate=certificate)]))
    assert page.text.count("What to change: widen it & wait") == 1
    assert "keep it" not in page.text


def test_many_events_are_cut_and_counted(tmp_path: Path) -> None:
    (run,) = read_all([make(tmp_path / "run", [{**EVENT, "what": "new kind", "layer": None}] * 105)])
    table = events(run)
    assert table is not None
    assert len(table.lines) == 100
    assert table.note == "5 more are in metrics.jsonl."
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
