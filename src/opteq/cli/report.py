"""`opteq report`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from opteq.cli.common import parse

__all__ = ["report"]


@dataclass(frozen=True)
class Report:
    """Write one or more run folders as a single HTML page, side by side; it needs no network, and can be read without JavaScript.

    $ opteq report runs/digits-deep-1
    $ opteq report runs/* --out comparison.html
    $ opteq report runs/digits-deep-1 --serve --open
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The run folders."""
    out: Path | None = None
    """The file; by default report.html in the first folder."""
    serve: bool = False
    """Write nothing, but show the page to this machine, at an address that is printed, and follow the runs until Ctrl-C."""
    port: int | None = None
    """The port to serve at; by default any that is free."""
    open: bool = False
    """Open the page in a browser."""


def report(arguments: Sequence[str]) -> int:
    """Write a report, or serve it."""
    options: Report = parse(Report, "report", arguments)
    if not options.runs:
        raise ValueError("opteq report needs a run folder: opteq report runs/NAME")
    if options.serve and options.out is not None:
        raise ValueError("--serve writes no file: leave out --out, or --serve")
    if options.port is not None and not options.serve:
        raise ValueError("--port is for --serve: add it, or leave out --port")
    if options.serve:
        _serve(options)
    else:
        _write(options)
    return 0


def _write(options: Report) -> None:
    from opteq.report import write

    path = write(options.runs, options.out)
    print(path)
    _open(options, path.resolve().as_uri())


def _serve(options: Report) -> None:
    """Until an interrupt, which is how a server is meant to end."""
    from opteq.report import serve

    with serve(options.runs, options.port or 0) as server:
        try:
            print(f"The report is at {server.address} until Ctrl-C", flush=True)
            _open(options, server.address)
            server.wait()
        except KeyboardInterrupt:
            print()


def _open(options: Report, address: str) -> None:
    import webbrowser

    if options.open and not webbrowser.open(address):
        print(f"No browser was found: open {address} yourself")
