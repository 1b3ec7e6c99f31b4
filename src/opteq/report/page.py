"""The page: what was run, what came of it, and what it means."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from opteq import __version__
from opteq.checks import invalid
from opteq.diagnostics.panels import METRICS, SOLVER
from opteq.report.figures import drawings
from opteq.report.reading import RunData, entries, read_all
from opteq.report.tables import Table, conditions, events, facts, parameters, results
from opteq.report.words import certificate_words, figure_text, remedies, training_words, verdict
from opteq.runs import write_atomic

__all__ = ["write"]


def write(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one or more run folders as a single HTML file, and return where it is.

    `out`: a file, or a folder for report.html; by default the first run's. The file needs no network and no JavaScript; it suits
    phones, light and dark screens, and paper. A folder without a run is a RunError; what is missing in a run is left out, and
    what is damaged noted.
    """
    if isinstance(folders, (str, Path)):
        raise TypeError(invalid("report.write", "folders", "a list of run folders", folders))
    if not folders:
        raise ValueError(invalid("report.write", "folders", "at least one run folder", folders))
    paths = [Path(folder) for folder in folders]
    target = paths[0] if out is None else Path(out)
    target = target / "report.html" if target.is_dir() else target
    page = render(read_all(paths))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, page.encode(errors="replace"))  # JSON may hold half a surrogate pair
    return target


@dataclass(frozen=True)
class Certified:
    """The section of one certificate."""

    run: str
    theorem: str
    verdict: str
    training: str
    remedies: list[str]
    table: Table | None
    text: str


def render(runs: list[RunData]) -> str:
    """The page as a text."""
    jinja2 = _jinja2()
    loader = jinja2.PackageLoader("opteq.report")
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.get_template("report.html.jinja").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        version=__version__,
        runs=runs,
        verdicts=[(run.name, verdict(run)) for run in runs],
        results=results(runs),
        configuration=facts("Configuration", runs, lambda run: run.config),
        environment=facts("Environment", runs, lambda run: run.environment),
        metrics=drawings(METRICS, runs),
        solver=drawings(SOLVER, runs),
        events=[table for run in runs if (table := events(run)) is not None],
        parameters=parameters(runs),
        problems=[(run.name, run.problem) for run in runs if run.problem],
        certificates=[_certified(run) for run in runs if run.certificate],
    )
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", page)  # not allowed in HTML


def _certified(run: RunData) -> Certified:
    certificate = run.certificate
    return Certified(
        run=run.name,
        theorem=figure_text(certificate.get("theorem")),
        verdict=certificate_words(certificate),
        training=training_words(entries(certificate.get("trained"))),
        remedies=remedies(certificate),
        table=conditions(certificate),
        text=certificate["explain"] if isinstance(certificate.get("explain"), str) else "",
    )


def _jinja2() -> ModuleType:
    try:
        import jinja2
        import matplotlib  # noqa: F401 - the figures need it
    except ImportError as error:
        raise ImportError(f"A report needs {error.name}: pip install 'opteq[report]'.") from error
    return jinja2
