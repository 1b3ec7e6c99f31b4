"""`opteq info`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from opteq.data.files import root_folder
from opteq.runs import environment

__all__ = ["info"]

_OPTIONAL = (
    "scipy", "scikit-learn", "pillow", "rich", "safetensors", "torchdiffeq", "tyro", "jinja2", "matplotlib", "plotly",
    "distributed", "tensorboard",
)  # fmt: skip


@dataclass(frozen=True)
class Info:
    """Versions, devices and threads: what a bug report needs, without names of hosts and users.

    $ opteq info --json
    """

    json: bool = False
    """As JSON."""


def info(arguments: Sequence[str]) -> int:
    """Print what this installation is; as JSON where it has neither a parser nor tables, which a bug report may be of, too."""
    facts = {**environment(), **{name: _version(name) for name in _OPTIONAL}, "data_folder": str(root_folder(None))}
    try:
        from opteq.cli.common import console, parse, table
    except ImportError:
        print(json.dumps(facts, indent=2))
        return 0
    options: Info = parse(Info, "info", arguments)
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        rows = [(name, ", ".join(value) or "CPU only" if isinstance(value, list) else value) for name, value in facts.items()]
        console().print(table(None, ("", ""), rows))
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
