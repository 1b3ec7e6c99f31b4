"""Reports in Chromium: they draw, answer to mouse and keys, follow the theme, fit phones and paper, and are accessible.

With OPTEQ_PICTURES=folder, pictures of every tab are left there.
"""

import csv
import json
import os
import re
import statistics
from pathlib import Path

import pytest
from chromium import Browser
from looking import (
    DESK,
    PANELS,
    PHONE,
    SELECTED,
    SIZE,
    TABS,
    charts,
    check_everything_stands_still,
    check_fits,
    check_silent,
    hover,
    lightness,
    numbers,
    picture,
    select,
    violations,
)
from selenium.webdriver.common.keys import Keys

from report_runs import loss_at

pytestmark = pytest.mark.browser
SECONDS = 3.0
# How many lines of a colour are drawn in the first chart in sight.
DRAWN = """
  const colour = getComputedStyle(document.documentElement).getPropertyValue(arguments[0].slice(4, -1)).trim();
  return document.querySelector('#chart-loss .js-plotly-plot')._fullData
    .filter((trace) => trace.visible === true && trace.line.color === colour).length"""
# A point in the middle of the first trace of a chart that has something to say.
POINT = """
  const traces = document.querySelector(`#${arguments[0]} .js-plotly-plot`)._fullData;
  const {x, y, type} = traces.find((trace) => trace.visible === true && trace.hoverinfo !== 'skip' && trace.x[0] !== null);
  const good = [...x.keys()].filter((at) => typeof x[at] === 'number' && typeof y[at] === 'number');
  const at = good[good.length >> 1];
  return [x[at], type === 'bar' ? y[at] / 2 : y[at]]"""


# --- drawing and speed ----------------------------------------------------------------------------------------------------------


def test_a_page_is_small_and_ready_in_three_seconds(browser: Browser, comparison: Path) -> None:
    assert comparison.stat().st_size < SIZE
    taken = []
    for _ in range(3):
        browser.open(f"{comparison.as_uri()}#metrics")
        taken.append(browser.run("return watched.ready") / 1000)
    print(f"ready after {taken} s; {comparison.stat().st_size / 1e6:.2f} MB")
    assert statistics.median(taken) < SECONDS


def test_every_tab_opens_by_a_click_and_its_charts_are_drawn_and_speak(browser: Browser, comparison: Path) -> None:
    browser.open(comparison.as_uri())
    tabs, seen = browser.run(TABS), list[str]()
    assert len(tabs) >= 6
    for tab in tabs:
        found = select(browser, tab)
        seen += found
        assert browser.run(SELECTED) == [tab]
        assert browser.run(PANELS) == [tab]
        assert browser.run("return `tab-${location.hash.slice(1)}`") == tab
        assert browser.run("return [...document.querySelectorAll('.static')].some((still) => still.checkVisibility())") is False
        for chart in found:
            assert numbers(hover(browser, chart, *browser.run(POINT, chart))), chart
    assert len(seen) == len(set(seen)) > 15
    assert len(seen) == browser.run("return document.querySelectorAll('figure.chart').length")
    check_silent(browser, comparison)


# --- the mouse ------------------------------------------------------------------------------------------------------------------


def test_the_mouse_shows_the_values_of_the_data(browser: Browser, report: Path, folders: list[Path]) -> None:
    browser.open(report.as_uri())
    select(browser, "tab-metrics")
    check_curves(browser, folders[0])
    select(browser, "tab-landscape")
    check_landscape(browser)
    select(browser, "tab-trajectories")
    check_trajectory(browser, folders[0])
    check_silent(browser, report)


def check_curves(browser: Browser, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["kind"] == "epoch" and row["epoch"] == 5)
    said = numbers(hover(browser, "chart-loss", row["step"], row["valid_loss"]))
    assert row["step"] in said
    assert any(found == pytest.approx(row["valid_loss"], rel=1e-3) for found in said)
    said = numbers(hover(browser, "chart-accuracy", row["step"], row["valid_accuracy"]))
    assert any(found == pytest.approx(100 * row["valid_accuracy"], rel=1e-3) for found in said)


def check_landscape(browser: Browser) -> None:
    for x, y in ((0.5, -0.3), (0.9, 0.8)):
        said = hover(browser, "chart-landscape-0", x, y)
        assert any(found == pytest.approx(loss_at(x, y), rel=1e-3) for found in numbers(said))
        assert ("NOT converged" in said) == (x > 0.6 and y > 0.6)


def check_trajectory(browser: Browser, folder: Path) -> None:
    with (folder / "trajectory.csv").open() as file:
        points = [row for row in csv.DictReader(file) if row["stage"] == "after" and row["step"] == "0"]
    lowest = min(points, key=lambda row: float(row["pc2"]))  # alone at the edge
    said = hover(browser, "chart-trajectory-0-2", float(lowest["pc1"]), float(lowest["pc2"]))
    assert f"class {lowest['label']}" in said
    assert f"sample {lowest['sample']}, step 0" in said


def test_runs_can_be_switched_off_and_on(browser: Browser, comparison: Path) -> None:
    browser.open(f"{comparison.as_uri()}#metrics")
    charts(browser)
    for expected in (0, 3):
        browser.run("document.querySelector('#metrics .key button').click()")
        browser.wait(lambda expected=expected: browser.run(DRAWN, "var(--c0)") == expected)
        assert browser.run(DRAWN, "var(--c1)") == 3
        assert violations(browser, colours=True) == {}
    check_silent(browser, comparison)


def test_a_run_that_is_switched_off_takes_its_charts_and_its_heading_along(browser: Browser, comparison: Path) -> None:
    browser.open(f"{comparison.as_uri()}#trajectories")
    shown = "return [...document.querySelectorAll('#trajectories h3')].filter((head) => head.checkVisibility()).length"
    both = charts(browser)
    browser.run("document.querySelector('#trajectories .key button').click()")
    assert browser.run(shown) == 1
    others = [name for name in both if name.startswith("chart-trajectory-1-")]
    assert len(both) == 2 * len(others) > 0
    assert charts(browser) == others
    residuals = select(browser, "tab-solver")  # what was never drawn while it was hidden
    assert "chart-residuals-1" in residuals
    assert "chart-residuals-0" not in residuals
    browser.run("document.querySelector('#solver .key button').click()")
    assert "chart-residuals-0" in charts(browser)
    plot = "return document.querySelector('#chart-residuals-0 .main-svg').getBoundingClientRect().width"
    browser.wait(lambda: 0 < browser.run(plot) <= 600)
    assert select(browser, "tab-trajectories") == both
    check_silent(browser, comparison)


# --- tabs by keys and by address ------------------------------------------------------------------------------------------------


def test_tabs_are_moved_by_keys_around_the_ends(browser: Browser, short: Path) -> None:
    browser.open(short.as_uri())
    tabs = browser.run(TABS)
    browser.run("document.getElementById(arguments[0]).focus()", tabs[0])

    def press(key: str) -> str:
        browser.driver.switch_to.active_element.send_keys(key)
        found: str = browser.run("return document.activeElement.id")
        assert browser.run(SELECTED) == browser.run(PANELS) == [found]
        return found

    assert [press(Keys.ARROW_RIGHT) for _ in tabs] == [*tabs[1:], tabs[0]]
    assert press(Keys.ARROW_LEFT) == tabs[-1]
    assert press(Keys.HOME) == tabs[0]
    assert press(Keys.END) == tabs[-1]
    assert browser.run("return [...document.querySelectorAll('[role=tab]')].filter((tab) => tab.tabIndex === 0).length") == 1
    charts(browser)
    check_silent(browser, short)


def test_an_address_opens_its_tab_and_back_returns(browser: Browser, short: Path) -> None:
    browser.open(f"{short.as_uri()}#solver")
    assert browser.run(SELECTED) == ["tab-solver"]
    assert charts(browser)
    select(browser, "tab-metrics")
    browser.driver.back()
    browser.wait(lambda: browser.run(SELECTED) == ["tab-solver"])
    assert browser.run(PANELS) == ["tab-solver"]
    browser.driver.forward()
    browser.wait(lambda: browser.run(SELECTED) == ["tab-metrics"])
    browser.run("location.hash = '#nothing-of-that-name'")
    browser.wait(lambda: browser.run(SELECTED) == browser.run(TABS)[:1])


# --- light and dark -------------------------------------------------------------------------------------------------------------


def check_theme(browser: Browser, chart: str, dark: bool) -> None:
    browser.wait(lambda: (lightness(browser, f"#{chart} .xtick text", "fill") > 0.5) == dark)
    assert (lightness(browser, "body", "backgroundColor") < 0.5) == dark
    assert (lightness(browser, "body", "color") > 0.5) == dark


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_has_the_theme_of_the_device_until_its_button_is_used(browser: Browser, short: Path, dark: bool) -> None:
    browser.open(f"{short.as_uri()}#metrics", dark=dark)
    charts(browser)
    check_theme(browser, "chart-loss", dark)
    for changed in (not dark, dark):
        browser.media(dark=changed)
        check_theme(browser, "chart-loss", changed)
    browser.run("document.getElementById('theme').click()")
    assert browser.run("return document.documentElement.dataset.theme") == ("light" if dark else "dark")
    check_theme(browser, "chart-loss", not dark)
    select(browser, "tab-solver")
    check_theme(browser, "chart-gradient-norm", not dark)
    browser.run("document.getElementById('theme').click()")
    check_theme(browser, "chart-gradient-norm", dark)
    check_silent(browser, short)


# --- accessible, on any screen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("report", DESK, True), ("comparison", PHONE, False)],
)
def test_every_tab_is_accessible_and_fits(
    browser: Browser, request: pytest.FixtureRequest, name: str, width: int, dark: bool
) -> None:
    page: Path = request.getfixturevalue(name)
    browser.open(page.as_uri(), width=width, dark=dark)
    found = {}
    for tab in browser.run(TABS):
        select(browser, tab)
        check_fits(browser, width, tab)
        picture(browser, f"{page.stem}-{width}-{'dark' if dark else 'light'}-{tab}")
        found |= {f"{tab}: {rule}": places for rule, places in violations(browser, colours=dark).items()}
    assert found == {}
    check_silent(browser, page)


# --- without scripts, and on paper ----------------------------------------------------------------------------------------------


def test_without_scripts_the_tables_and_still_figures_are_there(browser: Browser, report: Path) -> None:
    for width in (DESK, PHONE):
        browser.open(report.as_uri(), width=width, scripts=False)
        assert browser.run("return document.documentElement.dataset.js ?? null") is None
        check_everything_stands_still(browser)
        check_fits(browser, width)
        picture(browser, f"{report.stem}-{width}-without-scripts")
    check_silent(browser, report)


def test_paper_shows_every_section_with_still_figures(browser: Browser, comparison: Path) -> None:
    browser.open(f"{comparison.as_uri()}#metrics", dark=True)
    charts(browser)
    browser.media(dark=True, medium="print")
    check_everything_stands_still(browser)
    assert lightness(browser, "body", "color") < 0.5  # dark on white, from a dark screen too
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 4
    if folder := os.environ.get("OPTEQ_PICTURES"):
        (Path(folder) / f"{comparison.stem}.pdf").write_bytes(printed)
    browser.media()
    assert charts(browser)  # they are back
    check_silent(browser, comparison)
