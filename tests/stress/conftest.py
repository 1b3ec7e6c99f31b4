"""How much the stress tests do, and the line that each part prints about it.

Without OPTEQ_STRESS they take seconds, as part of all tests; `make stress` sets it to 1 for the full amount. Other numbers are
shares of that: OPTEQ_STRESS=0.1 for a tenth. What a full run counted is kept in
results/verify/stress.json and shown in docs/robustness.md.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stress_page

from conformance import write_verify

SHARE = float(os.environ.get("OPTEQ_STRESS", 0))
LEAST = {"randomised solves": 20_000, "mutated files": 5_000, "interruptions": 200}  # of a full run
_KEY = "stress: "
_BEGUN = time.monotonic()


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


def _totals(terminalreporter: pytest.TerminalReporter) -> dict[str, int]:
    """The sums over all tests, also of those that other processes ran."""
    total: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, count in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
                if key.startswith(_KEY):
                    total[key.removeprefix(_KEY)] += count
    return dict(sorted(total.items()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums; those of a full run that passed are kept."""
    totals, stats = _totals(terminalreporter), terminalreporter.stats
    if not totals:
        return
    terminalreporter.section("stress")
    for what, count in totals.items():
        terminalreporter.write_line(f"{count:>10,} {what}")
    if SHARE >= 1 and not stats.get("failed") and not stats.get("error") and totals.keys() >= LEAST.keys():
        short = {what: (totals[what], least) for what, least in LEAST.items() if totals[what] < least}
        assert not short, f"fewer than there must be: {short}"
        seconds = round(time.monotonic() - _BEGUN)
        write_verify("stress", {"least": LEAST, "done": totals, "tests": len(stats["passed"]), "seconds": seconds})
        stress_page.write()
