"""What every experiment shares: thresholds, the style of figures, the result file and the command."""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

Measured: TypeAlias = dict[str, dict[str, Any]]  # by name: the value, what it must be, and whether it is
Series: TypeAlias = dict[str, Any]  # what the figure draws
Result: TypeAlias = dict[str, Any]


def at_most(values: float | Sequence[float], limit: float) -> dict[str, Any]:
    """A measurement, the largest of the values, that must not exceed the limit; NaN does."""
    value = float(np.max(values))  # unlike max, it does not lose a NaN
    return {"value": value, "at_most": limit, "shown": value <= limit}


def at_least(values: float | Sequence[float], limit: float) -> dict[str, Any]:
    """A measurement, the least of the values, that must reach the limit; NaN does not."""
    value = float(np.min(values))
    return {"value": value, "at_least": limit, "shown": value >= limit}


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")  # of Okabe and Ito: told apart by the colour-blind, too
STYLE: Final[dict[Any, Any]] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.0,
    "lines.linewidth": 1.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "svg.hashsalt": "opteq",  # the same file at every run
}


def rounded(value: Any) -> Any:
    """The same with 6 significant digits."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(result: Result, path: Path) -> None:
    """The result as JSON; a reader finds the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(as_json(result), encoding="utf-8")
    os.replace(part, path)


def as_json(result: Result) -> str:
    """Indented, but with each list of numbers in one line."""
    text = json.dumps(rounded(result), indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}\"]*\]", lambda match: " ".join(match[0].split()), text) + "\n"


def command(
    name: str,
    about: str,
    presets: Iterable[str],
    run: Callable[[str, int], Result],
    figure: Callable[[Result, Path], None],
    arguments: Sequence[str] | None,
) -> int:
    """Run a preset, write its result and figure; 0 if every claim is shown."""
    parser = argparse.ArgumentParser(prog=f"python -m opteq.experiments.{name}", description=about)
    parser.add_argument("--preset", choices=list(presets), default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help=f"the folder of {name}.json")
    parser.add_argument("--figure", type=Path, help="a .png or .svg; by default next to the JSON")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    result = run(options.preset, options.seed)
    result["seconds"] = round(time.perf_counter() - begun, 1)
    write(result, options.out / f"{name}.json")
    figure(result, options.figure or options.out / f"{name}.png")
    for title, claim in result["claims"].items():
        print(f"{title:20}{'shown' if claim['shown'] else 'NOT SHOWN'}")
    return 0 if all(claim["shown"] for claim in result["claims"].values()) else 1
