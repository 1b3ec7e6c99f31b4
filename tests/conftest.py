"""Settings of the tests: hypothesis draws the same examples on every machine, so that a failure is a change of the code."""

import gc
import os
import signal
import sys

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; but tests press Ctrl-C themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Where Python is told to keep no bytecode beside its sources, keep it in pytest's cache.

    Otherwise each process that a test starts compiles PyTorch from its sources again, which takes longer than what most of them do.
    The workers, and what they start, have this from the environment.
    """
    if sys.dont_write_bytecode and hasattr(config, "cache"):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(config.cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What is there before the first test stays: no later search for garbage looks at it again."""
    gc.collect()
    gc.freeze()
