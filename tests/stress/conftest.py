"""How much the stress tests do, and the line that each part prints about it.

Without OPTEQ_STRESS they take seconds, as part of all tests; `make stress` sets it to 1 for the full amount. Other numbers are
shares of that: OPTEQ_STRESS=0.1 for a tenth.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SHARE = float(os.environ.get("OPTEQ_STRESS", 0))
_KEY = "stress: "


@pytest.fixture(scope="session")
def amount() -> Callable[[int, int], int]:
    """amount(short, full): how many cases to run."""
    return lambda short, full: max(short, round(SHARE * full))


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """tally(what, count): say how many cases were run; the sums are printed at the end."""
    begun = time.perf_counter()

    def told(what: str, count: int) -> None:
        print(f"{count:,} {what} in {time.perf_counter() - begun:.1f} s")
        record_property(_KEY + what, count)

    return told


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """No test leaves a process behind, or a file where temporary ones are made."""
    before = _temporary(), _children()
    yield
    assert not _temporary() - before[0]
    assert not _children() - before[1]


def _children() -> set[str]:
    """The processes that this one has started, running or ended and not waited for."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for path in lists for pid in path.read_text().split()}


def _temporary() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.endswith(".tmp") or name.startswith("opteq")}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The sums over all tests, also of those that other processes ran."""
    total: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, count in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
                total[key] += count
    found = {key.removeprefix(_KEY): count for key, count in total.items() if key.startswith(_KEY)}
    if found:
        terminalreporter.section("stress")
        for what in sorted(found):
            terminalreporter.write_line(f"{found[what]:>10,} {what}")
