"""Reports of hostile, empty and endless runs in Chromium: nothing of what they say is run, and the page stands."""

from pathlib import Path

import pytest
from chromium import Browser
from looking import PHONE, SIZE, TABS, check_fits, check_silent, picture, select

from opteq.report import write
from report_runs import MARKUP, hostile, make

pytestmark = pytest.mark.browser
BOX = """const chart = document.getElementById(arguments[0]);
  chart.scrollIntoView({block: 'center', behavior: 'instant'});
  const box = chart.getBoundingClientRect();
  return [box.x, box.y, box.width, box.height]"""


def test_nothing_that_a_run_says_is_run(browser: Browser, tmp_path: Path) -> None:
    # Runs of the same name are shown with their whole paths: these hold whole elements.
    parents = [tmp_path / "<script>window.hostile = 3<", tmp_path / "<img src=x onerror='window.hostile = 4'>"]
    path = write([hostile(parent / "script>") for parent in parents], tmp_path / "out.html")
    assert path.stat().st_size < SIZE
    browser.open(path.as_uri(), width=PHONE)
    for tab in browser.run(TABS):
        for chart in select(browser, tab):
            left, top, wide, high = browser.run(BOX, chart)
            for part in (0.3, 0.5, 0.7):
                browser.move(left + part * wide, top + high / 2)  # labels are made of what the run says
        check_fits(browser, PHONE, tab)
        picture(browser, f"hostile-{tab}")
    check_silent(browser, path)
    assert browser.run("return window.hostile ?? null") is None
    assert browser.run("return document.querySelectorAll('img, iframe, object').length") == 0
    text = browser.run("return document.querySelector('main').textContent")
    assert text.count(MARKUP) > 20
    for parent in parents:
        assert str(parent / "script>") in text


ENDLESS = [{"kind": "step", "step": at, "loss": 1 / at, "lr": 0.1, "grad_norm": at % 7} for at in range(1, 20_001)]
NOTHING = [{"kind": "step", "step": at, "loss": float("nan"), "lr": float("inf")} for at in range(9)]


def test_runs_of_any_length_are_shown(browser: Browser, tmp_path: Path) -> None:
    runs = {"empty": None, "no-numbers": NOTHING, "one-step": ENDLESS[:1], "endless": ENDLESS}
    folders = [make(tmp_path / name, rows) for name, rows in runs.items()]
    for shown, drawn in ((folders[:1], 0), (folders[1:2], 0), (folders, 3)):
        path = write(shown, tmp_path / "out.html")
        assert path.stat().st_size < SIZE
        browser.open(path.as_uri())
        assert sum(len(select(browser, tab)) for tab in browser.run(TABS)) == drawn
        for folder in shown:
            assert folder.name in browser.run("return document.body.textContent")
        check_silent(browser, path)
