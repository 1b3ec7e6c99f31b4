"""What a report needs from a run folder, read so that no content can break the page: a damaged part becomes a note."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from opteq.checks import invalid
from opteq.report.findings import Findings, has_findings, read_findings
from opteq.report.text import file_text
from opteq.runs import Run, RunError

__all__ = ["TEXT", "Row", "RunData", "entries", "flattened", "read_all", "rows_of", "run_folders", "shown"]

Row: TypeAlias = dict[str, Any]
LONGEST, TEXT = 300, 20_000  # characters that are shown: of a value, and of a text with a place of its own
BYTES = 1_000_000  # of a text file
WITH_FINDINGS = 8  # runs whose findings are read: the page must stay small


@dataclass(frozen=True)
class RunData:
    """One run. `steps`, `epochs`, `monitors` and `events` are the rows of its metrics; what is missing is empty."""

    name: str
    config: dict[str, str]
    environment: dict[str, str]
    steps: list[Row]
    epochs: list[Row]
    monitors: list[Row]
    events: list[Row]
    result: Row
    certificate: Row
    problem: Row
    findings: Findings
    notes: list[str]

    @property
    def rows(self) -> dict[str, list[Row]]:
        """All that has been measured, by its kind."""
        return {"step": self.steps, "epoch": self.epochs, "monitor": self.monitors}


def run_folders(owner: str, folders: Sequence[str | Path]) -> list[Path]:
    """The folders as paths; raise unless they are a list with one at least."""
    if isinstance(folders, (str, Path)):
        raise TypeError(invalid(owner, "folders", "a list of run folders", folders))
    if not folders:
        raise ValueError(invalid(owner, "folders", "at least one run folder", folders))
    return [Path(folder) for folder in folders]


def read_all(folders: Sequence[Path]) -> list[RunData]:
    """The runs, with names that tell them apart: of the folders, or their whole paths where two are the same.

    Of many runs, only the first that have findings have them here; those of others are `left_out`.
    """
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    looked_into = [folder for folder in folders if has_findings(folder)][:WITH_FINDINGS]
    return [
        _read(folder, name if unique else str(folder), folder in looked_into) for folder, name in zip(folders, names, strict=True)
    ]


def _read(folder: Path, name: str, with_findings: bool) -> RunData:
    run, notes = Run.read(folder), list[str]()
    noting = partial(_noting, notes)
    metrics = noting(run.metrics, [])
    rows = {kind: [row for row in metrics if row.get("kind") == kind] for kind in ("step", "epoch", "monitor", "event")}
    files = {part: noting(partial(run.read_json, f"{part}.json"), None) for part in _FILES}
    text = noting(partial(_text, folder / "problem.txt"), "").strip()
    findings = read_findings(folder, noting) if with_findings else Findings(left_out=has_findings(folder))
    return RunData(
        name=name,
        config=flattened(run.config),
        environment=flattened(files["environment"]),
        steps=rows["step"],
        epochs=rows["epoch"],
        monitors=rows["monitor"],
        events=rows["event"],
        result=entries(files["result"]),
        certificate=entries(files["certificate"]),
        problem=entries(files["problem"]) or ({"text": text} if text else {}),
        findings=findings,
        notes=notes,
    )


_FILES = ("environment", "result", "certificate", "problem")


def _noting(notes: list[str], read: Callable[[], Any], otherwise: Any) -> Any:
    """What `read` gives; if the file is damaged or not to be read, `otherwise` and a note."""
    try:
        return read()
    except (RunError, OSError, ValueError) as error:
        notes.append(str(error))
        return otherwise


def _text(path: Path) -> str:
    return file_text(path, BYTES) if os.path.lexists(path) else ""


def entries(value: Any) -> Row:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def rows_of(value: Any) -> list[Row]:
    """The JSON objects of a list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def flattened(value: Any) -> dict[str, str]:
    """Nested JSON objects as one, {"train.lr": "0.1"}, with the values as text."""
    return dict(_leaves(value, "")) if isinstance(value, dict) else {}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and (value or not path):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, shown(value)


def shown(value: Any, most: int = LONGEST) -> str:
    """A JSON value as a short text."""
    if value is None:
        return "none"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]} ..."
