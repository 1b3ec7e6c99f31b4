"""The tables of a report: one row a quantity, one column a run, so that runs stand side by side."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opteq.diagnostics.panels import number
from opteq.report.reading import Row, RunData, entries, rows_of
from opteq.report.text import short
from opteq.report.words import (
    EVENTS,
    MISSING,
    best,
    certificate_words,
    condition_verdict,
    duration,
    figure_text,
    last,
    last_step,
    percent,
)

__all__ = ["Line", "Table", "conditions", "events", "facts", "parameters", "requirements", "results"]

EVENTS_SHOWN = 100


@dataclass(frozen=True)
class Line:
    """One row: its head, its cells, and whether the cells differ from run to run."""

    head: str
    cells: tuple[str, ...]
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose rows and columns all have heads."""

    caption: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    note: str = ""


def _line(head: str, cells: Iterable[str]) -> Line:
    """A row with one cell for each run."""
    found = tuple(cells)
    return Line(head, found, differs=len(set(found)) > 1)


def _heads(runs: Sequence[RunData]) -> list[str]:
    """The names, short where that tells them apart."""
    names = [run.name for run in runs]
    shorter = [short(name, 40) for name in names]
    return shorter if len(set(shorter)) == len(set(names)) else names


def facts(caption: str, runs: Sequence[RunData], of: Callable[[RunData], dict[str, str]]) -> Table:
    """A text for every key that any run has."""
    found = [of(run) for run in runs]
    keys = dict.fromkeys(key for part in found for key in part)
    lines = tuple(_line(key, (part.get(key, MISSING) for part in found)) for key in keys)
    return Table(caption, ("setting", *_heads(runs)), lines)


KNOWN = {"stopped", "steps", "epochs", "seconds", "parameters"}
KNOWN |= {"train_loss", "valid_loss", "valid_accuracy", "valid_converged", "valid_solver_steps"}  # rows of their own


def results(runs: Sequence[RunData]) -> Table:
    """How each run ended, and what it reached."""
    rows: dict[str, Callable[[RunData], str]] = {
        "steps": lambda run: figure_text(run.result.get("steps", _count(last_step(run)))),
        "epochs": lambda run: figure_text(run.result.get("epochs", _count(last(run.epochs, "epoch")))),
        "time": lambda run: duration(run.result.get("seconds")),
        "validation accuracy at the end": lambda run: percent(run.result.get("valid_accuracy", last(run.epochs, "valid_accuracy"))),
        "validation accuracy at best": lambda run: percent(best(run.epochs, "valid_accuracy")),
        "validation loss at the end": lambda run: figure_text(last(run.epochs, "valid_loss")),
        "training loss at the end": lambda run: figure_text(_last(run, "train_loss", "loss")),
        "samples converged at the end": lambda run: percent(_last(run, "valid_converged", "converged")),
        "solver steps at the end": lambda run: figure_text(_last(run, "valid_solver_steps", "solver_steps")),
        "events": lambda run: figure_text(len(run.events)),
        "parameters": lambda run: figure_text(_counts(run).get("total")),
        "certificate": lambda run: certificate_words(run.certificate).partition(":")[0] if run.certificate else MISSING,
    }
    lines = [_line(head, (cell(run) for run in runs)) for head, cell in rows.items()]
    found = [line for line in [*lines, *_further(runs)] if set(line.cells) != {MISSING}]
    kept = tuple(replace(line, differs=len({*line.cells} - {MISSING}) > 1) for line in found)  # not where one has no such thing
    return Table("Results", ("quantity", *_heads(runs)), kept)


def _further(runs: Sequence[RunData]) -> Iterator[Line]:
    """What else is in result.json."""
    results = [{key: value for key, value in run.result.items() if not isinstance(value, dict)} for run in runs]
    for key in dict.fromkeys(key for result in results for key in result if key not in KNOWN):
        text = percent if key.endswith(("accuracy", "miou")) else figure_text
        yield _line(key.replace("_", " "), (text(result.get(key)) for result in results))


def _last(run: RunData, of_epoch: str, of_step: str) -> float | None:
    """The last number of the epochs; before the first epoch has ended, of the steps; or what a Monitor saw."""
    found = (last(run.epochs, of_epoch), last(run.steps, of_step), last(run.monitors, of_step))
    return next((value for value in found if value is not None), None)


def _count(value: float | None) -> Any:
    return int(value) if value is not None and value.is_integer() else value


def _counts(run: RunData) -> Row:
    """The number of parameters by part; a single number is the total."""
    counts = run.result.get("parameters")
    return entries(counts) or ({} if number(counts) is None else {"total": counts})


def parameters(runs: Sequence[RunData]) -> Table | None:
    """The number of parameters of each part; the total comes last."""
    found = [_counts(run) for run in runs]
    keys = sorted(dict.fromkeys(key for part in found for key in part), key=lambda key: key == "total")
    lines = tuple(_line(key, (figure_text(part.get(key)) for part in found)) for key in keys)
    return Table("Number of parameters", ("part", *_heads(runs)), lines) if lines else None


def events(run: RunData) -> Table | None:
    """What the guard saw and did."""
    lines = tuple(_event(row) for row in run.events[:EVENTS_SHOWN])
    rest = len(run.events) - len(lines)
    note = f"{rest:,} more are in metrics.jsonl." if rest else ""
    return Table(f"Events of {run.name}", ("step", "what", "layer", "message", "action"), lines, note) if lines else None


def _event(row: Row) -> Line:
    step, what, *rest = (figure_text(row.get(key)) for key in ("step", "what", "layer", "message", "action"))
    return Line(step, (EVENTS.get(what, what), *rest))


def conditions(certificate: Row) -> Table | None:
    """Both sides of each condition: it holds where the left one is the larger."""
    lines = tuple(
        Line(
            figure_text(row.get("name")),
            (condition_verdict(row), *(figure_text(row.get(key)) for key in ("formula", "lhs", "rhs", "slack", "evidence"))),
            differs=condition_verdict(row) != "holds",
        )
        for row in rows_of(certificate.get("conditions"))
    )
    heads = ("condition", "verdict", "left ≥ right", "left", "right", "slack", "evidence")
    return Table("Conditions", heads, lines) if lines else None


def requirements(problem: Row) -> Table | None:
    """What a problem needs to be convex, and its iteration to converge."""
    lines = tuple(
        Line(
            figure_text(row.get("name")),
            (
                condition_verdict({"holds": row.get("holds")}),
                *(figure_text(row.get(key)) for key in ("lhs", "rhs", "evidence", "purpose")),
            ),
            differs=row.get("holds") is not True,
        )
        for row in rows_of(problem.get("requirements"))
    )
    return Table("Conditions", ("condition", "verdict", "left", "right", "evidence", "for"), lines) if lines else None
