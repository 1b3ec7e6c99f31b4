"""Settings of the tests: hypothesis draws the same examples on every machine, so that a failure is a change of the code."""

import gc

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What is there before the first test stays: no later search for garbage looks at it again."""
    gc.collect()
    gc.freeze()
