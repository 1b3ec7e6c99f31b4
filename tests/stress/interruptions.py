"""Interrupts at chosen moments: after a time, or before the k-th line of the library that is run."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import opteq

LIBRARY = str(Path(opteq.__file__).parent)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as sent by these tests: none of theirs is taken for one of the user's."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A KeyboardInterrupt after so many seconds, unless the block is done by then."""

    def strike(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of the library a piece of work runs."""
    return _traced(work, None)


def interrupt_at(work: Callable[[], Any], k: int) -> bool:
    """Do the work with a KeyboardInterrupt before the k-th line of the library; whether it came so far."""
    try:
        _traced(work, k)
    except Interrupted:
        return True
    return False


def _traced(work: Callable[[], Any], k: int | None) -> int:
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == k:
                sys.settrace(None)
                raise Interrupted
        return local

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(LIBRARY) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def killed_after(seconds: float, pid: int) -> bool:
    """End a child after a time; whether it was still running."""
    time.sleep(seconds)
    done, _ = os.waitpid(pid, os.WNOHANG)
    if done:
        return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True
