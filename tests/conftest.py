"""Settings of the tests: hypothesis draws the same examples on every machine, so that a failure is a change of the code."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
