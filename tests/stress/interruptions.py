"""Ctrl-C at chosen moments: after a time, or once the k-th line of the library is run.

It is a signal, which Python hears as always: between two instructions of ours, of PyTorch or of the standard library.
"""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import opteq

LIBRARY = str(Path(opteq.__file__).parent)
_SOON = 5e-5  # seconds: a hundred instructions or so
# A signal that comes in one of these waits until it is left: it would be heard before a file or a `with` block is ours to undo, or
# while PyTorch puts a mode back that `torch.no_grad` and its like have changed.
_LATER = {__file__, contextlib.__file__, torch.autograd.grad_mode.__file__, torch.amp.autocast_mode.__file__}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as sent by these tests: none of theirs is taken for one of the user's."""


@contextmanager
def _listening() -> Iterator[None]:
    """Inside, an alarm is a Ctrl-C wherever it comes."""
    open_, pressed = [True], list[bool]()

    def press(number: int, frame: FrameType | None) -> None:
        if not open_:
            return
        if frame is not None and frame.f_code.co_filename in _LATER:
            signal.setitimer(signal.ITIMER_REAL, _SOON)
            return
        pressed.append(True)
        signal.raise_signal(signal.SIGINT)

    def strike(number: int, frame: FrameType | None) -> None:
        if not pressed:  # by us, but by the user
            signal.default_int_handler(number, frame)
        pressed.clear()
        if open_:
            open_.clear()
            raise Interrupted

    before = signal.signal(signal.SIGINT, strike), signal.signal(signal.SIGALRM, press)
    try:
        yield
    finally:
        open_.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before[1])
        signal.signal(signal.SIGINT, before[0])


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A KeyboardInterrupt after so many seconds, unless the block is done by then."""
    with _listening():
        signal.setitimer(signal.ITIMER_REAL, max(seconds, _SOON))
        yield


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of the library a piece of work runs."""
    return _traced(work, None)


def interrupt_at(work: Callable[[], Any], k: int) -> bool:
    """Do the work with a KeyboardInterrupt at the k-th line of the library; whether it came so far."""
    try:
        with _listening():
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
                signal.setitimer(signal.ITIMER_REAL, _SOON)
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


def interrupt_within(files: Collection[str], work: Callable[[], Any], k: int) -> bool:
    """Do the work with a KeyboardInterrupt at the k-th line or return of these files, exactly; whether it came so far."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event in ("line", "return")
        if count == k:
            sys.settrace(None)
            count += 1
            signal.raise_signal(signal.SIGINT)
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename in files else None)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def moments(draw: random.Random, seconds: float) -> Iterator[float]:
    """Random moments within about so many seconds, later and later: a machine that is busy gets there in the end."""
    return (draw.uniform(0, seconds) * (1 + i / 5) for i in count())


def killed_after(seconds: float, pid: int) -> bool:
    """End a child after a time; whether it was still running."""
    time.sleep(seconds)
    done, _ = os.waitpid(pid, os.WNOHANG)
    if done:
        return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def ended_within(seconds: float, pid: int) -> bool:
    """Wait for a child, and end it after a time; whether it was done, and well."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
