"""Forked processes for tests that kill them, or that need several."""

import os
import sys
import warnings
from collections.abc import Callable

import torch


def import_optimizers() -> None:
    """The first optimizer of a process imports seconds' worth of PyTorch: better once, before the children are forked."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def in_child(function: Callable[[], object]) -> int:
    """Start a function in a forked process, which exits with 0 if it returns."""
    with warnings.catch_warnings():  # of JAX, where a benchmark has imported it: the child does not use it
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        function()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def finish(pid: int) -> int:
    return os.waitpid(pid, 0)[1]
