"""`opteq report`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from opteq.cli.common import parse

__all__ = ["report"]


@dataclass(frozen=True)
class Report:
    """Write one or more run folders as a single HTML page, side by side; it needs neither a network nor JavaScript.

    $ opteq report runs/digits-deep-1
    $ opteq report runs/* --out comparison.html
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The run folders."""
    out: Path | None = None
    """The file; by default report.html in the first folder."""


def report(arguments: Sequence[str]) -> int:
    """Write a report."""
    from opteq.report import write

    options: Report = parse(Report, "report", arguments)
    if not options.runs:
        raise ValueError("opteq report needs a run folder: opteq report runs/NAME")
    print(write(options.runs, options.out))
    return 0
