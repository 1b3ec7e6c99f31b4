"""What every experiment shares: its options, thresholds, the style of figures, the result file and the command."""

import difflib
import json
import math
import pkgutil
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, get_args

import numpy as np

from opteq.checks import check_integer, invalid
from opteq.grids import Function, Kind, Outcome, executor, run_grid
from opteq.runs import write_atomic

Measured: TypeAlias = dict[str, dict[str, Any]]  # by name: the value, what it must be, and whether it is
Series: TypeAlias = dict[str, Any]  # what the figure draws
Result: TypeAlias = dict[str, Any]
Preset = Literal["smoke", "small", "paper"]


@dataclass(frozen=True)
class Options:
    """What the user chooses when an experiment is run."""

    preset: Preset = "small"
    """How large: smoke takes seconds, small up to half an hour on two cores, paper is the published configuration."""
    seed: int = 0
    """Of every random number."""
    out: Path = Path("results")
    """The folder of the result, NAME.json; the finished parts of a grid lie in its folder NAME, and are not run again."""
    figure: Path | None = None
    """Where the figure goes, a .png or .svg; by default next to the result."""
    executor: Kind = "local"
    """Where the cells of a grid run: processes of this machine, or a Dask cluster."""
    address: str | None = None
    """Of the scheduler of the Dask cluster; by default a cluster is started on this machine."""
    workers: int = 2
    """Processes on this machine."""
    data_dir: Path | None = None
    """The folder of the data sets; by default the environment variable OPTEQ_DATA, else ./data."""

    def __post_init__(self) -> None:
        if self.preset not in get_args(Preset):
            raise ValueError(invalid(self, "preset", " or ".join(map(repr, get_args(Preset))), self.preset))
        check_integer(self, "seed", self.seed, 0)
        check_integer(self, "workers", self.workers, 1)


class Experiment(Protocol):
    """What the file of an experiment offers.

    The result of `run` has "preset", "seed", and "claims": by name, what is claimed, what was measured, and whether that shows it.
    """

    ABOUT: str
    PRESETS: Mapping[str, Any]

    def run(self, options: Options, /) -> Result:
        """Everything that was measured, ready for JSON."""

    def figure(self, result: Result, path: Path, /) -> None:
        """Draw the result; the suffix of the path tells the format."""


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
    """The same with 6 significant digits, and null for what is no number."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def as_json(result: Result) -> str:
    """Indented, but with each list of numbers in one line."""
    text = json.dumps(rounded(result), indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}\"]*\]", lambda match: " ".join(match[0].split()), text) + "\n"


def claim(text: str, measured: Measured) -> dict[str, Any]:
    """A claim, which is shown if all that was measured shows it."""
    return {"claim": text, "shown": all(one["shown"] for one in measured.values()), "measured": measured}


def grid(function: Function, cells: Mapping[str, dict[str, Any]], folder: Path, options: Options) -> dict[str, Outcome]:
    """The cells of an experiment, where the options say; a line for each as it ends."""

    def tell(outcome: Outcome) -> None:
        state = f"FAILED: {outcome.error}" if outcome.error else "found" if outcome.cached else f"{outcome.seconds:.1f} s"
        print(f"{outcome.name:30}{state}", flush=True)

    with executor(options.executor, address=options.address, workers=options.workers) as pool:
        return run_grid(function, cells, folder, executor=pool, tell=tell)


# --- the experiments by name ----------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The experiments there are, by the names of their files."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.name.startswith("_"))


def load(name: str) -> Experiment:
    """The experiment of that name: its module."""
    if name not in names():
        near = difflib.get_close_matches(str(name), names(), 1, 0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(invalid("load", "name", f"one of {', '.join(names())}", name) + hint)
    return cast(Experiment, import_module(f"{__package__}.{name}"))


def run(name: str, options: Options) -> int:
    """Run an experiment, write its result and figure, and print its claims; 0 if every one is shown, else 1."""
    experiment, begun = load(name), time.perf_counter()
    result = experiment.run(options)
    result["seconds"] = round(time.perf_counter() - begun, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / f"{name}.json", as_json(result))
    experiment.figure(result, options.figure or options.out / f"{name}.png")
    for title, one in result["claims"].items():
        print(f"{title:20}{'shown' if one['shown'] else 'NOT SHOWN'}")
    return 0 if all(one["shown"] for one in result["claims"].values()) else 1


@dataclass(frozen=True)
class Status:
    """The result of an experiment that is in a folder: its preset (None if there is no result), and how many claims it shows."""

    name: str
    preset: str | None
    shown: int
    claims: int

    def __str__(self) -> str:
        if self.preset is None:
            return "no result"
        share = "all" if self.shown == self.claims else f"{self.shown} of"
        return f"{self.preset}: {share} {self.claims} claims shown"


def status(name: str, folder: Path) -> Status:
    """What folder/NAME.json holds; a file that cannot be read is none."""
    try:
        result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        shown = [bool(one["shown"]) for one in result["claims"].values()]
        return Status(name, str(result["preset"]), sum(shown), len(shown))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Status(name, None, 0, 0)


def command(name: str, arguments: Sequence[str] | None = None) -> int:
    """`python -m opteq.experiments.NAME`: run the experiment with the options of the command line."""
    try:
        import tyro
    except ImportError as error:
        raise ImportError("The command line needs tyro: pip install 'opteq[train]'.") from error
    options = tyro.cli(Options, prog=f"python -m opteq.experiments.{name}", description=load(name).ABOUT, args=arguments)
    return run(name, options)
