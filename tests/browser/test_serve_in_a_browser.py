"""Served reports in Chromium: the page follows its run, keeps where its reader was, and says when the server is gone."""

import json
from pathlib import Path

import pytest
from chromium import Browser
from looking import PHONE, SELECTED, charts, hover, violations

from opteq.report.serving import serve
from report_runs import ROWS, make

pytestmark = pytest.mark.browser
STATUS = "return document.querySelector('.live')?.textContent ?? ''"


def wait_for_another_page(browser: Browser) -> None:
    """Until the page in which `window.first` was set is no more."""
    browser.wait("return window.first === undefined && document.documentElement.dataset.ready === '1'")


def append(folder: Path, step: int, value: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": step, "grad_norm": value}) + "\n")


def test_a_served_page_follows_its_run_and_keeps_where_the_reader_was(browser: Browser, tmp_path: Path) -> None:
    folder = make(tmp_path / "going-on", [row | {"solver_steps": 7.5, "converged": 1.0} for row in ROWS])
    with serve([folder, tmp_path / "late"]) as server:
        browser.open(f"{server.address}#solver", width=PHONE)
        charts(browser)
        browser.run(
            "document.getElementById('theme').click(); window.first = true;"
            "document.getElementById('tab-solver').focus(); scrollTo({top: 100, behavior: 'instant'})"
        )
        append(folder, 1234, 7.0)
        wait_for_another_page(browser)
        assert browser.run(SELECTED) == ["tab-solver"]
        assert browser.run("return document.activeElement.id") == "tab-solver"
        assert browser.run("return document.documentElement.dataset.theme") == "dark"
        browser.wait("return Math.abs(scrollY - 100) < 3")
        charts(browser)
        assert "1,234" in hover(browser, "chart-gradient-norm", 1234, 7.0)
        assert f"Waiting for {tmp_path / 'late'}" in browser.run(STATUS)
        assert violations(browser) == {}
        assert browser.complaints() == []
        assert {address.split("#")[0] for address in browser.requests()} == {server.address, f"{server.address}version"}
    browser.wait(lambda: "does not answer" in browser.run(STATUS))


def test_a_paused_page_stays_until_it_goes_on(browser: Browser, tmp_path: Path) -> None:
    folder = make(tmp_path / "going-on", ROWS)
    with serve([folder]) as server:
        browser.open(server.address)
        browser.run("window.first = true; document.getElementById('live-pause').click()")
        append(folder, 1234, 7.0)
        browser.wait(lambda: "something new" in browser.run(STATUS))
        assert browser.run("return window.first")
        browser.run("document.getElementById('live-pause').click()")
        wait_for_another_page(browser)


BLOCKED = """for (const name of ['sessionStorage', 'localStorage'])
  Object.defineProperty(window, name, {get() { throw new DOMException('blocked', 'SecurityError') }})"""


def test_a_served_page_follows_its_run_where_storage_is_blocked(browser: Browser, tmp_path: Path) -> None:
    folder = make(tmp_path / "going-on", ROWS)
    script = browser.command("Page.addScriptToEvaluateOnNewDocument", source=BLOCKED)["identifier"]
    try:
        with serve([folder]) as server:
            browser.open(server.address)
            browser.run("window.first = true")
            append(folder, 1234, 7.0)
            wait_for_another_page(browser)
            browser.wait(lambda: "Live, as of" in browser.run(STATUS))
            assert browser.complaints() == []
    finally:
        browser.command("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_a_served_page_waits_for_its_run(browser: Browser, tmp_path: Path) -> None:
    with serve([tmp_path / "later"]) as server:
        browser.open(server.address, ready=False)
        assert f"There is no run yet in {tmp_path / 'later'}" in browser.run("return document.body.innerText")
        assert violations(browser) == {}
        browser.run("window.first = true")
        make(tmp_path / "later", ROWS)
        wait_for_another_page(browser)
        assert browser.run("return document.querySelector('h1').innerText") == "later"
        assert browser.complaints() == []
