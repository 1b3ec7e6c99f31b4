"""What every experiment shares: its options, the grid that it runs, its result file with its figure, and the command."""

import difflib
import hashlib
import json
import math
import os
import pkgutil
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast, get_args

import torch

import opteq
from opteq import data
from opteq.checks import check_integer, invalid
from opteq.diagnostics.drawing import save
from opteq.experiments._claims import verdict
from opteq.grids import Function, Kind, Outcome, executor, run_grid
from opteq.runs import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series: TypeAlias = dict[str, Any]  # what the figure draws
Result: TypeAlias = dict[str, Any]
Preset = Literal["smoke", "small", "paper"]


@dataclass(frozen=True)
class Options:
    """What the user chooses when an experiment is run."""

    preset: Preset = "small"
    """How large: smoke takes seconds, small up to an hour on two cores (3 hours with CIFAR-10); paper, as published."""
    seed: int = 0
    """Of every random number; an experiment of several seeds takes this one and the next."""
    out: Path = Path("results")
    """The folder of the result, NAME.json; the finished parts of a grid lie in its folder NAME, and are not run again."""
    figure: Path | None = None
    """Where the figure goes, a .png, .svg or .pdf; by default next to the result."""
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

    @property
    def root(self) -> str | None:
        """The folder of the data sets, for a cell: its worker may be in another folder."""
        return None if self.data_dir is None else str(self.data_dir.absolute())


class Experiment(Protocol):
    """What the file of an experiment offers; `command` and the page of results want no more.

    `WHY`, which a file may leave out, says of claims that its committed result does not show what the reason is.
    """

    ABOUT: str
    CLAIMS: Mapping[str, str]
    PRESETS: Mapping[str, Any]

    def run(self, options: Options, /) -> Result:
        """Everything that was measured, as `gather` puts it together."""

    def figure(self, result: Result, /) -> "Figure":
        """The result as a matplotlib figure."""


def gather(
    name: str,
    options: Options,
    claims: Mapping[str, Any],
    *,
    outcomes: Mapping[str, Outcome] | None = None,
    tables: Mapping[str, Any] | None = None,
    series: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """What `run` gives: the claims, tables (see `table`) and curves, with all that it takes to repeat them.

    `outcomes`: of the grid. `notes`: sentences on how this run differs from the published one, beyond its configuration.
    """
    outcomes = outcomes or {}
    return {
        "experiment": name,
        "preset": options.preset,
        "config": asdict(load(name).PRESETS[options.preset]),
        "seed": options.seed,
        "versions": {"opteq": opteq.__version__, "torch": torch.__version__},
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "cuda": torch.cuda.is_available()},
        "failed": {one.name: one.error for one in outcomes.values() if one.error},
        "workers": min(options.workers, len(outcomes)) if options.executor == "local" else None,
        "cell_seconds": {one.name: round(one.seconds, 1) for one in outcomes.values()},
        "notes": list(notes),
        "claims": dict(claims),
        "tables": dict(tables or {}),
        "series": dict(series or {}),
    }


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A table of the result, for the page: a first column of names, then numbers or text; None is a gap."""
    return {"columns": list(columns), "rows": [list(row) for row in rows]}


def rounded(value: Any, digits: int = 6) -> Any:
    """The same with so many significant digits, and null for what is no number."""
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part, digits) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def as_json(result: Result) -> str:
    """Indented, but with each list of numbers, or of such lists, in one line."""
    text = json.dumps(rounded(result), indent=1, allow_nan=False)
    return re.sub(r"\[(?:[^][{}\"]|\[[^][{}\"]*\])*\]", lambda match: " ".join(match[0].split()), text) + "\n"


# --- data and grids -------------------------------------------------------------------------------------------------------------


def found(wanted: Sequence[str], required: int, root: Path | None) -> list[str]:
    """The data sets that are there; if one of the first `required` is not, the error of `load`, which says what to put where."""
    there = {one.name for one in data.describe(root) if one.found}
    for name in wanted[:required]:
        if name not in there:
            data.load(name, root)
    return [name for name in wanted if name in there]


def folder(name: str, options: Options) -> Path:
    """Where the parts of an experiment's result are kept: its cells, and the run folders of its trainings."""
    return options.out / name / options.preset


def grid(name: str, function: Function, cells: Mapping[str, dict[str, Any]], options: Options) -> dict[str, Outcome]:
    """The cells of an experiment, where the options say; a line for each as it ends."""

    def tell(outcome: Outcome) -> None:
        state = f"FAILED: {outcome.error}" if outcome.error else "found" if outcome.cached else f"{outcome.seconds:.1f} s"
        print(f"{outcome.name:30} {state}", flush=True)

    with executor(options.executor, address=options.address, workers=options.workers) as pool:
        return run_grid(function, cells, folder(name, options), executor=pool, tell=tell)


# --- the experiments by name ----------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The experiments there are, by the names of their files."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.name.startswith("_"))


def load(name: str) -> Experiment:
    """The experiment of that name: its module."""
    if name not in names():
        near = difflib.get_close_matches(str(name), names(), 1, 0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"The name of an experiment must be one of {', '.join(names())}. Got {name!r} instead.{hint}")
    return cast(Experiment, import_module(f"{__package__}.{name}"))


def run(name: str, options: Options) -> int:
    """Run an experiment, write its result and figure, and print its claims; 1 if one is not shown, else 0.

    The result of a larger preset is not replaced, and a complete one not by one with cells that failed.
    """
    experiment, begun, path = load(name), time.perf_counter(), options.out / f"{name}.json"
    known = status(name, options.out)
    if known.preset in get_args(Preset) and _rank(known.preset) > _rank(options.preset):
        expected = f"another folder: {path} has the result of the larger preset {known.preset}"
        raise ValueError(invalid(options, "out", expected, str(options.out)))
    result = experiment.run(options)
    computed = sum(result["cell_seconds"].values())  # cells that were found finished count with the time that they took
    result["seconds"] = round(max(time.perf_counter() - begun, computed), 1)
    for title, one in result["claims"].items():
        print(f"{title:20}{verdict(one).replace('not shown', 'NOT SHOWN')}")
    if result["failed"] and known.complete and known.preset == options.preset:
        print(f"{path} is left as it is: cells failed.")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    text = as_json(result)
    write_atomic(path, text)
    draw(name, text, options.figure or options.out / f"{name}.png")
    return 1 if any(one["shown"] is False for one in result["claims"].values()) else 0


def _rank(preset: str | None) -> int:
    return get_args(Preset).index(preset)


def draw(name: str, text: str, path: Path) -> None:
    """Draw the figure of a result file with this text, which the figure names by its hash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(load(name).figure(json.loads(text)), path, digest(text))


def digest(text: str) -> str:
    """The hash of a result file, by which its figure knows it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Status:
    """The result of an experiment in a folder: its preset (None: no result), the claims it shows, and whether no cell failed."""

    name: str
    preset: str | None
    shown: int
    claims: int
    complete: bool = False

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
        return Status(name, str(result["preset"]), sum(shown), len(shown), not result.get("failed"))
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
