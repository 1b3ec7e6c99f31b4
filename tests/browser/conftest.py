"""One browser for all tests, and the reports that they open."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser

from opteq.report import write
from report_runs import ROWS, make, trained


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    return [trained(base / f"digits-deep-{seed + 1}", seed) for seed in range(2)]


@pytest.fixture(scope="session")
def report(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one run."""
    return write(folders[:1], tmp_path_factory.mktemp("pages") / "one.html")


@pytest.fixture(scope="session")
def comparison(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs, side by side."""
    return write(folders, tmp_path_factory.mktemp("pages") / "two.html")


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with few charts, for what does not depend on them."""
    return write([make(tmp_path_factory.mktemp("pages") / "short", ROWS)])
