"""What the full runs counted, as the table of docs/robustness.md: `python tests/stress/stress_page.py` writes it anew."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conformance import ROOT

PAGE = ROOT / "docs" / "robustness.md"
BEGIN, END = "<!-- written by tests/stress/stress_page.py -->\n", "<!-- end -->\n"


def stored(name: str) -> dict[str, Any] | None:
    """results/verify/<name>.json, if it is there."""
    path = ROOT / "results" / "verify" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table() -> str:
    """One line for each count of results/verify/stress.json, then the soak."""
    found, soaked = stored("stress"), stored("stress_soak")
    lines = ["| what | done | asked for |", "|---|---:|---:|"]
    for what, count in found["done"].items() if found else ():
        least = found["least"].get(what)
        lines.append(f"| {what} | {count:,} | {'' if least is None else f'{least:,}'} |")
    if found:
        lines += ["", f"All {found['tests']} tests passed, in {found['seconds'] / 60:.0f} minutes, with torch {found['torch']}."]
    if soaked:
        lines += ["", _soak(soaked)]
    return "\n".join(lines) + "\n"


def _soak(found: dict[str, Any]) -> str:
    work = f"{found['seconds'] / 60:.0f} minutes of training, {found['steps']:,} steps and {found['checkpoints']:,} checkpoints"
    memory = f"{found['slope']:+.3f} MB a minute after warm-up, where {found['limit']:g} are allowed"
    return f"`make soak`: {work}; resident memory {memory}; {found['handles'][0]} to {found['handles'][1]} open files."


def split(text: str) -> tuple[str, str, str]:
    """What is before the table, the table, and what is after it."""
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    return head + BEGIN, old, END + tail


def write() -> None:
    head, _, tail = split(PAGE.read_text())
    PAGE.write_text(head + table() + tail)


if __name__ == "__main__":
    write()
