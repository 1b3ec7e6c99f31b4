"""The progress of a training: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any, TextIO

from opteq.training.callbacks import Callback, Row


def display(stream: TextIO | None = None) -> Callback:
    """A bar where there is a terminal and rich is installed, else lines."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        try:
            return Bar(stream)
        except ImportError:
            pass
    return Lines(stream)


def summary(row: Row) -> str:
    """The figures of a row, in the order in which one asks for them."""
    parts = [text.format(row[name]) for name, text in _FIGURES.items() if row.get(name) is not None]
    return ", ".join(parts)


_FIGURES = {
    "loss": "loss {:.4g}",
    "accuracy": "accuracy {:.2%}",
    "train_loss": "loss {:.4g}",
    "train_accuracy": "accuracy {:.2%}",
    "valid_loss": "validation loss {:.4g}",
    "valid_accuracy": "validation accuracy {:.2%}",
    "valid_miou": "mIoU {:.2%}",
    "solver_steps": "{:.1f} solver steps",
    "converged": "{:.1%} converged",
}


class Lines(Callback):
    """One line an epoch, one for each event, and one a minute in between."""

    def __init__(self, stream: TextIO, every: float = 60.0) -> None:
        self.stream, self.every = stream, every
        self.begun = self.told = time.monotonic()
        self.first = self.total = 0

    def begin(self, config: Row, total: int) -> None:
        self.total = total
        self.begun = self.told = time.monotonic()
        self.first = -1

    def step(self, step: int) -> None:
        self.first = step - 1 if self.first < 0 else self.first

    def row(self, row: Row) -> None:
        now = time.monotonic()
        if row["kind"] == "event":
            self._say(f"step {row['step']}: {row['action']}: {row['message']}")
        elif row["kind"] == "epoch":
            self._say(f"epoch {row['epoch']}, step {row['step']}/{self.total}: {summary(row)}{self._left(row['step'], now)}")
        elif row["kind"] == "step" and now - self.told >= self.every:
            self._say(f"step {row['step']}/{self.total}: {summary(row)}{self._left(row['step'], now)}")

    def _say(self, text: str) -> None:
        self.told = time.monotonic()
        print(text, file=self.stream, flush=True)

    def _left(self, step: int, now: float) -> str:
        done = step - self.first
        seconds = (now - self.begun) / max(done, 1) * (self.total - step)
        return f", {seconds:.0f} s left" if step < self.total else f", {now - self.begun:.0f} s"


class Bar(Callback):
    """A live bar by rich: loss, accuracy, solver steps, share converged, time left; epochs and events stay above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(file=stream), transient=True)
        self.task: Any = None

    def begin(self, config: Row, total: int) -> None:
        self.task = self.progress.add_task("", total=total)
        self.progress.start()

    def step(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def row(self, row: Row) -> None:
        if row["kind"] == "step":
            self.progress.update(self.task, completed=row["step"], description=summary(row))
        elif row["kind"] == "epoch":
            self.progress.console.print(f"epoch {row['epoch']}: {summary(row)}", highlight=False, markup=False)
        elif row["kind"] == "event":
            self.progress.console.print(
                f"step {row['step']}: {row['action']}: {row['message']}", style="red", markup=False, highlight=False
            )

    def close(self) -> None:
        self.progress.stop()
