"""What the tests look at in a report: its tabs and charts, what it says under the mouse, its colours, its faults."""

import os
import re
from pathlib import Path
from typing import Any

from chromium import Browser

AXE = Path(__file__).parents[2] / ".venv/axe/node_modules/axe-core/axe.min.js"
PHONE, DESK = 390, 1280
SIZE = 8_000_000  # bytes of a report

TABS = "return [...document.querySelectorAll('[role=tablist] [role=tab]')].map((tab) => tab.id)"
SELECTED = "return [...document.querySelectorAll('[role=tab][aria-selected=true]')].map((tab) => tab.id)"
PANELS = """return [...document.querySelectorAll('[role=tabpanel]')].filter((panel) => panel.checkVisibility())
  .map((panel) => panel.getAttribute('aria-labelledby'))"""
# The charts in sight, each with whether plotly has drawn it.
CHARTS = """return [...document.querySelectorAll('figure.chart')].filter((chart) => chart.checkVisibility())
  .map((chart) => [chart.id, chart.querySelector('.js-plotly-plot .main-svg')?.checkVisibility() ?? false])"""
# Where in the window a point of a chart is drawn, after it has been scrolled to.
PLACE = """
  const plot = document.querySelector(`#${arguments[0]} .js-plotly-plot`), {xaxis, yaxis} = plot._fullLayout;
  plot.scrollIntoView({block: 'center', behavior: 'instant'});
  const box = plot.getBoundingClientRect();
  return [box.x + xaxis._offset + xaxis.d2p(arguments[1]), box.y + yaxis._offset + yaxis.d2p(arguments[2])]"""
LABELS = "return [...document.querySelectorAll(`#${arguments[0]} .hoverlayer .hovertext`)].map((label) => label.textContent)"
IN_SIGHT = """
  const shown = (found) => [...document.querySelectorAll(found)].filter((part) => part.checkVisibility() &&
    part.getBoundingClientRect().height > 20).length;
  const all = (found) => document.querySelectorAll(found).length;
  return {sections: [shown('main section'), all('main section')], still: [shown('figure.chart .static svg'), all('figure.chart')],
    tables: [shown('main table'), all('main table')], plotly: shown('.js-plotly-plot')}"""


def select(browser: Browser, tab: str) -> list[str]:
    """Open a tab by a click: its charts, when all are drawn."""
    browser.run("document.getElementById(arguments[0]).click()", tab)
    return charts(browser)


def charts(browser: Browser) -> list[str]:
    """The charts in sight, when all are drawn."""
    browser.wait(lambda: all(drawn for _, drawn in browser.run(CHARTS)))
    return [name for name, _ in browser.run(CHARTS)]


def hover(browser: Browser, chart: str, x: Any, y: Any) -> str:
    """What the chart says of a point of it."""
    place = browser.run(PLACE, chart, x, y)
    browser.move(1, 1)
    browser.wait(lambda: not browser.run(LABELS, chart))
    browser.move(*place)
    return " ".join(browser.wait(lambda: browser.run(LABELS, chart), what=f"a label in {chart}"))


def numbers(text: str) -> list[float]:
    """The numbers in a text."""
    plain = text.replace("\N{MINUS SIGN}", "-").replace(",", "")
    return [float(found) for found in re.findall(r"-?\d+\.?\d*(?:e[-+]?\d+)?", plain)]


def lightness(browser: Browser, element: str, what: str) -> float:
    """Of a colour of the first such element: 0 is black, 1 white."""
    colour = browser.run("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", element, what)
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", colour)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def violations(browser: Browser, *, colours: bool = False) -> dict[str, list[str]]:
    """What axe-core calls serious or critical: the rules, or only those about colours, with the elements that break them.

    Drawings out of sight are not judged, but it takes four times as long with them: they are removed.
    """
    browser.run("document.querySelectorAll('[hidden] .chart svg, [data-live] .static svg').forEach((drawing) => drawing.remove())")
    if not browser.run("return 'axe' in window"):
        browser.run(AXE.read_text())
    rules = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}} if colours else {}
    found = browser.run("return axe.run(document, arguments[0])", {"resultTypes": ["violations"], **rules})["violations"]
    return {
        f"{rule['impact']} {rule['id']}": [f"{node['target']} {node['failureSummary']}" for node in rule["nodes"]]
        for rule in found
        if rule["impact"] in ("serious", "critical")
    }


def picture(browser: Browser, name: str) -> None:
    """Leave a picture where OPTEQ_PICTURES says, if it does."""
    if folder := os.environ.get("OPTEQ_PICTURES"):
        browser.picture(Path(folder) / f"{name}.png")


def check_silent(browser: Browser, page: Path) -> None:
    """Nothing complained, and nothing but the page itself was asked for."""
    assert browser.complaints() == []
    assert set(browser.requests()) <= {page.as_uri()}


def check_fits(browser: Browser, width: int, what: str = "") -> None:
    """The page is not wider than the window."""
    assert browser.run("return document.documentElement.scrollWidth") <= width, what


def check_everything_stands_still(browser: Browser) -> None:
    """All sections, tables and still figures are in sight, and no chart of plotly is."""
    found = browser.run(IN_SIGHT)
    for part in ("sections", "still", "tables"):
        shown, there = found[part]
        assert shown == there > 3, part
    assert found["plotly"] == 0
