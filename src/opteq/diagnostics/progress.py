"""How far a long computation is: a bar on a terminal, plain lines elsewhere, or the caller's own function."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from opteq.checks import invalid

__all__ = ["Progress", "Tell", "reporting"]

Progress: TypeAlias = bool | Callable[[int, int], object]
Tell: TypeAlias = Callable[[int], object]


@contextmanager
def reporting(owner: str, progress: Progress, total: int, *, every: float = 60.0) -> Iterator[Tell]:
    """Gives a function of the number of points that are done; its first call tells how many were done before.

    `progress`: True for a bar on stderr (rich, on a terminal) or a line every so many seconds; a function of (done, total); False.
    """
    if callable(progress):
        yield lambda done: progress(done, total)
    elif not isinstance(progress, bool):
        raise TypeError(invalid(owner, "progress", "a bool or a function of (done, total)", progress))
    elif not progress:
        yield lambda done: None
    else:
        with _bar(owner, total, every) as tell:
            yield tell


@contextmanager
def _bar(title: str, total: int, every: float) -> Iterator[Tell]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _lines(title, total, every)
        return
    if not sys.stderr.isatty():
        yield _lines(title, total, every)
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        tasks: list[Any] = []

        def tell(done: int) -> None:
            if not tasks:
                tasks.append(bar.add_task(title, total=total, completed=done))  # what was done before took no time
            bar.update(tasks[0], completed=done)

        yield tell


def _lines(title: str, total: int, every: float) -> Tell:
    begun = told = time.monotonic()
    first: int | None = None

    def tell(done: int) -> None:
        nonlocal first, told
        first = done if first is None else first
        now = time.monotonic()
        if now - told >= every and done > first:
            left = (now - begun) / (done - first) * (total - done)
            print(f"{title}: {done}/{total} points, {left:.0f} s left", file=sys.stderr, flush=True)
            told = now

    return tell
