"""The page: what was run, what came of it, and what it means."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from opteq import __version__
from opteq.diagnostics.panels import METRICS, SOLVER, THEORY
from opteq.report.charts import Chart
from opteq.report.figures import EVENTS_DRAWN, curve_charts, event_steps
from opteq.report.formulas import drawn
from opteq.report.landscapes import landscape_charts
from opteq.report.reading import TEXT, RunData, entries, read_all, run_folders, shown
from opteq.report.residuals import residual_charts
from opteq.report.spectra import hessian_charts, jacobian_charts
from opteq.report.tables import Table, conditions, events, facts, parameters, requirements, results
from opteq.report.text import clean, to_json
from opteq.report.trajectories import trajectory_charts
from opteq.report.words import certificate_words, convexity_words, figure_text, remedies, training_words, verdict
from opteq.runs import write_atomic

__all__ = ["render", "script", "source_hash", "write"]

CHARTED = 24  # runs with curves, events, a problem and a certificate on the page, which must stay small; the tables hold all


def write(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one or more run folders as a single HTML file, and return where it is.

    `out`: a file, or a folder for report.html; by default the first run's. The file needs no network; it suits phones, light and
    dark screens, and paper; without JavaScript its figures stand still. A folder without a run is a RunError; what is missing in
    a run is left out, and what is damaged noted.

    Examples:
        >>> import torch
        >>> from opteq import report
        >>> from opteq.training import TrainConfig, fit
        >>> data = torch.randn(32, 4), torch.randint(2, (32,))
        >>> result = fit(torch.nn.Linear(4, 2), data, config=TrainConfig(epochs=2), folder="runs/linear", verbose=False)
        >>> report.write(["runs/linear"]).as_posix()
        'runs/linear/report.html'
    """
    paths = run_folders("report.write", folders)
    target = paths[0] if out is None else Path(out)
    target = target / "report.html" if target.is_dir() else target
    page = render(read_all(paths))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, page.encode())
    return target


@dataclass(frozen=True)
class Certified:
    """The part of one certificate."""

    run: str
    theorem: str
    verdict: str
    training: str
    remedies: list[str]
    table: Table | None
    text: str


@dataclass(frozen=True)
class Stated:
    """The problem that one network solves."""

    run: str
    text: str
    formula: list[str]
    convexity: str
    table: Table | None


def render(runs: list[RunData], live: bool = False) -> str:
    """The page as a text. A live one may fetch from where it came, and asks there for its next version."""
    jinja2, plotly = _libraries()
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("opteq.report"), autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    content = _content(runs)
    scripts = {name: script(f"{name}.js") for name in ("theme", "report", *(["live"] if live else []))}
    page: str = environment.get_template("report.html.jinja").render(
        **content,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        version=__version__,
        runs=runs,
        runs_of=runs_of,
        data=to_json(_data(content)),
        scripts=scripts,
        policy=_policy([*scripts.values(), plotly], live),
    )
    return clean(page).replace("<!-- plotly -->", f'<script type="text/plain" id="plotly">{plotly}</script>', 1)


def _content(runs: list[RunData]) -> dict[str, Any]:
    some = runs[:CHARTED]
    found = {
        "verdicts": [(run.name, verdict(run)) for run in runs],
        "results": results(runs),
        "configuration": facts("Configuration", runs, lambda run: run.config),
        "environment": facts("Environment", runs, lambda run: run.environment),
        "parameters": parameters(runs),
        "events": [table for run in some if (table := events(run)) is not None],
        "problems": _merged([_stated(run) for run in some if run.problem]),
        "certificates": [_certified(run) for run in some if run.certificate],
        "metrics": curve_charts(METRICS, some),
        "solver": curve_charts(SOLVER, some),
        "equilibria": [*residual_charts(runs), *jacobian_charts(runs)],
        "theory": curve_charts(THEORY, some),
        "landscapes": [*landscape_charts(runs), *hessian_charts(runs)],
        "trajectories": _by_run(trajectory_charts(runs)),
    }
    return {**found, "marks": _marks(runs), "cut": _cut(runs), "unread": _unread(runs)}


def _by_run(charts: list[Chart]) -> dict[int, list[Chart]]:
    found: dict[int, list[Chart]] = {}
    for chart in charts:
        found.setdefault(runs_of([chart])[0], []).append(chart)
    return found


def runs_of(charts: list[Chart]) -> list[int]:
    """The places of the runs that have something in the charts."""
    return sorted({place for chart in charts for place in chart.runs if place is not None})


def _marks(runs: list[RunData]) -> str:
    """What the lines for events mean; there are some only for a single run."""
    count = len(event_steps(runs[0].events)) if len(runs) == 1 else 0
    which = "events" if count <= EVENTS_DRAWN else f"the first {EVENTS_DRAWN} of {count:,} events"
    return f"Dotted vertical lines mark {which}." if count else ""


def _cut(runs: list[RunData]) -> str:
    rest = f"of the first {CHARTED} of {len(runs):,} runs; the tables of results and settings hold all"
    return f"Curves, events, problems and certificates are those {rest}." if len(runs) > CHARTED else ""


def _unread(runs: list[RunData]) -> str:
    count = sum(run.findings.left_out for run in runs)
    rest = f"of the first runs that have them; those of {count:,} more are left out"
    return f"Residuals, spectra, landscapes and trajectories are those {rest}." if count else ""


def _data(content: dict[str, Any]) -> dict[str, Any]:
    """What the script draws, by the id of the figure."""
    charts = [chart for name in ("metrics", "solver", "equilibria", "theory", "landscapes") for chart in content[name]]
    charts += [chart for part in content["trajectories"].values() for chart in part]
    return {
        f"chart-{chart.name}": {
            "data": chart.traces,
            "layout": chart.layout,
            "runs": list(chart.runs),
            "legend": [asdict(key) for key in chart.legend],
            "described": chart.described,
        }
        for chart in charts
    }


def _certified(run: RunData) -> Certified:
    certificate = run.certificate
    return Certified(
        run=run.name,
        theorem=figure_text(certificate.get("theorem")),
        verdict=certificate_words(certificate),
        training=training_words(entries(certificate.get("trained"))),
        remedies=remedies(certificate),
        table=conditions(certificate),
        text=shown(certificate["explain"], TEXT) if isinstance(certificate.get("explain"), str) else "",
    )


def _stated(run: RunData) -> Stated:
    latex = run.problem.get("latex")
    return Stated(
        run=run.name,
        text=shown(run.problem.get("text") or latex, TEXT),
        formula=drawn(latex) if isinstance(latex, str) else [],
        convexity=convexity_words(run.problem),
        table=requirements(run.problem),
    )


def _merged(problems: list[Stated]) -> list[Stated]:
    """What is the same for several runs once, for all of them; a formula is drawn once, and then its text must do."""
    found: dict[str, list[Stated]] = {}
    for part in problems:
        found.setdefault(repr(replace(part, run="")), []).append(part)
    merged, drawings = [], set[str]()
    for first, *others in found.values():
        drawing = "".join(first.formula)
        runs = ", ".join(part.run for part in (first, *others))
        merged.append(replace(first, run=runs, formula=[] if drawing in drawings else first.formula))
        drawings.add(drawing)
    return merged


def script(name: str) -> str:
    """A script of the page."""
    return (files("opteq.report") / "templates" / name).read_text(encoding="utf-8")


def source_hash(script: str) -> str:
    """What a content security policy calls the script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _policy(scripts: list[str], live: bool) -> str:
    """Only these scripts run, and nothing is fetched; plotly sets styles, and makes images to be saved."""
    allowed = " ".join(map(source_hash, scripts))
    source = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; connect-src {source}; "
        "base-uri 'none'; form-action 'none'"
    )


def _libraries() -> tuple[Any, str]:
    """jinja2, and plotly's script."""
    try:
        import jinja2
        import matplotlib  # noqa: F401 - the figures need it
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"A report needs {error.name}: pip install 'opteq[report]'.") from error
    return jinja2, get_plotlyjs()
