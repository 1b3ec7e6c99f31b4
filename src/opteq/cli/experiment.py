"""`opteq experiment`."""

from collections.abc import Sequence
from pathlib import Path

from opteq import experiments
from opteq.cli.common import console, parse, table

__all__ = ["experiment"]

_USAGE = """usage: opteq experiment list
       opteq experiment NAME [options]
       opteq experiment page

Repeat an experiment of the papers: its result goes to results/NAME.json with a figure beside it, and each claim is said to be shown
or not (exit code 1). The cells of a grid that are finished are not run again. `page` writes docs/reproduction.md with its figures
from what is in results/.

  $ opteq experiment opteq_theorems --preset smoke --out runs/experiments
  $ opteq experiment opteq_theorems --help"""


def experiment(arguments: Sequence[str]) -> int:
    """List the experiments, or run one."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name in _OTHERS:
        if rest:
            raise ValueError(f"opteq experiment {name} takes no options. Got {' '.join(rest)} instead.")
        return _OTHERS[name]()
    about = experiments.load(name).ABOUT
    options: experiments.Options = parse(experiments.Options, f"experiment {name}", rest, description=about)
    return experiments.run(name, options)


def _list() -> int:
    rows = []
    for name in experiments.names():
        found = experiments.load(name)
        rows.append((name, found.ABOUT.split("\n")[0], ", ".join(found.PRESETS), experiments.status(name, Path("results"))))
    console().print(table("Experiments; results are looked for in ./results", ("name", "what", "presets", "result"), rows))
    return 0


def _page() -> int:
    print(experiments.write_page(Path("results"), Path("docs")))
    return 0


_OTHERS = {"list": _list, "page": _page}
