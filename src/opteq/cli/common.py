"""What the commands share: parsing by tyro, and tables by rich."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from opteq.runs import Run

__all__ = ["console", "parse", "table", "tell_unfinished"]

_CONFIG = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.CascadeSubcommandArgs)


def parse(kind: Any, command: str, arguments: Sequence[str], default: Any = None, description: str | None = None) -> Any:
    """The settings of a command, a dataclass or a union of them; wrong ones end the process with code 2 and a suggestion."""
    options = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=f"opteq {command}", args=arguments, config=_CONFIG, description=description, **options)


def console(*, stderr: bool = False) -> Console:
    """Where people read: as wide as their terminal, or wide enough for a file."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 120, highlight=False, markup=False)


def table(title: str | None, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table of texts."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=any(heads), pad_edge=False)
    for head in heads:
        made.add_column(head, overflow="fold")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def tell_unfinished(folder: Path) -> None:
    """Say that a run has no trained model yet, if it has none, and what is looked at in its place."""
    if not (folder / "model.safetensors").exists():
        step = max(Run.read(folder).steps(), default=0)
        print(f"opteq: warning: {folder} has no trained model yet: this is its checkpoint of step {step}", file=sys.stderr)
