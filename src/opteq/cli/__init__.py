"""The command `opteq`: what it can do, and how it ends."""

import difflib
import os
import select
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, TextIO

__all__ = ["main"]


class Command(NamedTuple):
    """A command, which the module of its name does: a line about it, and an example."""

    about: str
    example: str


COMMANDS = {
    "train": Command("Train a model, in a run folder.", "opteq train deep --data.name digits --train.epochs 8"),
    "certify": Command("Ask whether training is sure to converge.", "opteq certify scaled-relu --init --train 50"),
    "experiment": Command("Repeat an experiment of the papers.", "opteq experiment opteq_theorems --preset smoke"),
    "landscape": Command("Draw the loss around the weights of a run.", "opteq landscape runs/digits-deep-1 --steps 21"),
    "diagnose": Command("Look into a trained run: solvers, iterates, spectra.", "opteq diagnose runs/digits-deep-1"),
    "report": Command("Write or serve run folders as one HTML page.", "opteq report runs/digits-deep-1 runs/digits-deep-2"),
    "bench": Command("Measure the library on this machine.", "opteq bench --rounds 3"),
    "data": Command("List the data sets, or look at one.", "opteq data show digits"),
    "info": Command("Versions and devices, for a bug report.", "opteq info"),
}

EXITS = """exit codes:
  0  done                                       3    the training diverged
  1  a negative verdict: not certified,         4    another process of the job was lost
     or a claim that was not shown              130  interrupted
  2  wrong usage or bad input                   70   a fault of the library, to be reported"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (by default those of the process), and give its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            return dispatch([argument for argument in given if argument != "--debug"])
        except SystemExit as ended:  # the parser has printed the help, or what is wrong
            return ended.code if isinstance(ended.code, int) else 2
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, BrokenPipeError) and _reader_left():  # `opteq ... | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0
            if debug:
                traceback.print_exc()
            return fail(error, debug)


def _reader_left() -> bool:
    """Whether nobody reads any more what is printed: a pipe to another process, such as a worker, may break as well."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are always told
    except (AttributeError, OSError, ValueError):  # not on Windows; stdout may be none of the system's files
        return False
    return bool(poll.poll(0))


def dispatch(arguments: list[str]) -> int:
    """Hand the arguments to the command that they begin with."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        from opteq import __version__

        print(f"opteq {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], 1)
        raise ValueError(f"there is no command {name!r}: {f'did you mean {near[0]!r}?' if near else 'see opteq --help'}")
    module = import_module(f"opteq.cli.{name}")
    code: int = getattr(module, name)(rest)
    return code


def overview() -> str:
    """The help of the command as a whole."""
    lines = [
        "usage: opteq COMMAND [options]",
        "",
        "Deep equilibrium networks: train them, and know what you have.",
        "",
        "commands:",
    ]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<12}{command.about}", f"  {'':<12}$ {command.example}"]
    tail = "opteq COMMAND --help tells more. With --debug, errors come with their traceback; --version prints the version."
    return "\n".join([*lines, "", EXITS, "", tail])


def fail(error: BaseException, debug: bool = False) -> int:
    """Say in one line what happened and what to do, and give the exit code."""
    code, text = _verdict(error)
    line = " ".join(text.split())
    if code == 70 and not debug:
        line += " (again with --debug for the traceback; please report it with the output of opteq info)"
    rank = os.environ.get("RANK", "0")
    if rank == "0" or code in (4, 70) or isinstance(error, OSError):  # what all processes see, the first one says
        print(f"opteq: error: {'' if rank == '0' else f'process {rank}: '}{line}", file=sys.stderr)
    return code


def _verdict(error: BaseException) -> tuple[int, str]:
    from opteq.runs import RunError

    if isinstance(error, KeyboardInterrupt):
        return 130, str(error) or "interrupted"
    training = sys.modules.get("opteq.training")  # without it, no training has failed
    if training is not None and isinstance(error, training.DivergenceError):
        return 3, str(error)
    if training is not None and isinstance(error, training.LostProcessError):
        return 4, str(error)
    if isinstance(error, ImportError):
        known = "pip install" in str(error)
        return 2, str(error) if known else f"{error}: pip install 'opteq[train,report]'"
    if isinstance(error, (RunError, ValueError, TypeError, OSError)):
        return 2, str(error)
    return 70, f"{type(error).__name__}: {error}"


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    """One line a warning."""
    print(f"opteq: warning: {' '.join(str(message).split())}", file=sys.stderr)
