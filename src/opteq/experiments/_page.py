"""docs/reproduction.md, generated: what the result files say of each claim, with the tables and figures."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opteq.experiments._claims import verdict
from opteq.experiments._harness import Experiment, Result, draw, load, names, rounded
from opteq.runs import write_atomic

__all__ = ["page", "summary", "write_page"]

_HEAD = """# Reproduction

What this package measured of every table and figure of the papers, on the machine that each section names. This page is generated
by `opteq experiment page` from the files in `results/`; a test fails if they differ. Each section says what the experiment is,
gives the claims of the paper (and some of ours, such as those about sizes and times, and those that begin with "beyond the paper"),
what was measured for them, and the verdict:

- **shown**: everything that was measured meets its threshold;
- **not shown**: something does not, and the reason as far as it is known;
- **not testable**: this scale cannot tell, and why.

`opteq experiment NAME --preset small --data-dir DATA` runs one again. `--preset paper` has the published settings where they are
printed, and ours where they are not; what differs from it is listed below each section. What is finished is kept, and not run again
with the same settings: delete its folder in `results/` after a change of the code.
"""


_MARKS = re.compile(r"([|*_\[\]\\])")


def write_page(results: Path, docs: Path) -> Path:
    """Write docs/reproduction.md and its figures, docs/figures/NAME.png, from results/NAME.json."""
    for name in names():
        if (path := results / f"{name}.json").exists():
            draw(name, path.read_text(encoding="utf-8"), docs / "figures" / f"{name}.png")
    write_atomic(docs / "reproduction.md", page(results))
    return docs / "reproduction.md"


def page(results: Path) -> str:
    """The text of the page."""
    found = {name: read(results / f"{name}.json") for name in names()}
    sections = [text for name, result in found.items() for text in section(name, load(name), result)]
    return "\n".join([_HEAD, *overview(found), *sections]).rstrip("\n") + "\n"


def read(path: Path) -> Result | None:
    """A result file; None if there is none."""
    if not path.exists():
        return None
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def overview(found: Mapping[str, Result | None]) -> Iterator[str]:
    """A table with a row for each experiment."""
    yield "| experiment | preset | shown | not shown | not testable |"
    yield "|---|---|---|---|---|"
    for name, result in found.items():
        if result is None:
            yield f"| [`{name}`](#{name}) | not run yet | | | |"
            continue
        count = Counter(verdict(one) for one in result["claims"].values())
        numbers = " | ".join(str(count[word] or "") for word in ("shown", "not shown", "not testable"))
        yield f"| [`{name}`](#{name}) | {result['preset']} | {numbers} |"
    yield ""


_PAPERS = {
    "opteq": "Optimization induced equilibrium networks",
    "monotone": "Monotone DEQs and their tangent kernel",
    "scaledrelu": "Scaled-ReLU implicit networks",
    "gaussian": "Gaussian-initialised DEQs",
}


def summary(results: Path) -> str:
    """A table with a row for each paper: the lines for the README."""
    lines = ["| paper | experiments | claims shown | not shown | not testable |", "|---|---|---|---|---|"]
    for prefix, title in _PAPERS.items():
        found = [result for name in names() if name.startswith(prefix) and (result := read(results / f"{name}.json"))]
        count = Counter(verdict(one) for result in found for one in result["claims"].values())
        numbers = " | ".join(str(count[word]) for word in ("shown", "not shown", "not testable"))
        lines.append(f"| {title} | {len(found)} | {numbers} |")
    return "\n".join(lines)


def section(name: str, experiment: Experiment, result: Result | None) -> Iterator[str]:
    """All about one experiment."""
    yield f"## {name}\n\n{escaped((experiment.__doc__ or experiment.ABOUT).rstrip())}\n"
    if result is None:
        yield f"Not run yet: `opteq experiment {name} --preset small`.\n"
        return
    why = getattr(experiment, "WHY", {})
    for key, one in result["claims"].items():
        yield from claim_lines(one, "" if one["shown"] else str(one.get("reason") or why.get(key, "")))
    for title, table in result["tables"].items():
        yield f"{escaped(title)}:\n"
        yield from table_lines(table)
    yield f"![{name}](figures/{name}.png)\n"
    yield " ".join([*provenance(result), *map(escaped, result["notes"]), *differences(experiment, result)]) + "\n"


def claim_lines(one: Mapping[str, Any], reason: str) -> Iterator[str]:
    """A claim, its verdict, the reason where it is not shown, and what was measured."""
    yield f"**{verdict(one).capitalize()}:** {escaped(one['claim'])}" + (f" *{escaped(reason)}*" if reason else "") + "\n"
    for what, measured in one["measured"].items():
        mark = " **(is not)**" if not measured["shown"] and measured["value"] is not None else ""
        yield f"- {escaped(what)}: {number(measured['value'])}, must be {bounds(measured)}{mark}"
    if one["measured"]:
        yield ""


def bounds(measured: Mapping[str, Any]) -> str:
    """What a measurement must be, in words."""
    words = {"at_least": "at least", "at_most": "at most"}
    return " and ".join(f"{word} {number(measured[key])}" for key, word in words.items() if key in measured)


def table_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(map(escaped, table["columns"])) + " |"
    yield "|" + "---|" * len(table["columns"])
    for row in table["rows"]:
        yield "| " + " | ".join(map(cell, row)) + " |"
    yield ""


def cell(value: Any) -> str:
    """An entry of a table."""
    if isinstance(value, float) or type(value) is int:
        return number(value)
    return "" if value is None else escaped(str(value))


def escaped(text: str) -> str:
    """Text in which Markdown sees no marks, but for code between backticks."""
    parts = text.split("`")
    return "`".join(part if i % 2 else _MARKS.sub(r"\\\1", part).replace("<", "&lt;") for i, part in enumerate(parts))


def number(value: float | None) -> str:
    """With 4 significant digits, or all of those of a whole number; what is no number was lost on the way."""
    if value is None:
        return "unknown"
    if 10_000 <= abs(value) < 1e12 and value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def provenance(result: Result) -> Iterator[str]:
    """How, where and by which version it was measured."""
    machine, versions = result["machine"], result["versions"]
    accelerator = "with CUDA" if machine["cuda"] else "no GPU"
    together = f" by {result['workers']} processes at a time" if (result.get("workers") or 1) > 1 else ""
    yield f"Preset `{result['preset']}`, seed {result['seed']}, {result['seconds'] / 60:.1f} minutes of computing in all{together},"
    yield f"{machine['cores']} cores ({machine['processor']}), {accelerator}, opteq {versions['opteq']}, torch {versions['torch']}."


def differences(experiment: Experiment, result: Result) -> Iterator[str]:
    """The settings that are not those of the preset `paper`."""
    published = rounded(asdict(experiment.PRESETS["paper"]))
    changed = [f"`{key}` {json.dumps(value)} (`paper`: {json.dumps(published.get(key))})"
               for key, value in result["config"].items() if value != published.get(key)]  # fmt: skip
    if changed:
        yield "Settings that differ: " + "; ".join(changed) + "."
