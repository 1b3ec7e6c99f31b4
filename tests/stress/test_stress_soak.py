"""A short soak, to see that the long one (`make soak`) works: memory is flat and no file stays open."""

import pytest
import soak as soaking
from soak import soak

pytestmark = pytest.mark.stress


def test_a_training_with_many_checkpoints_keeps_its_memory_and_its_files(tmp_path, amount, tally):
    seconds = amount(2, 60)
    found = soak(tmp_path, seconds, every=seconds / 10)
    assert found.handles[0] == found.handles[1]
    assert found.checkpoints >= 3
    assert found.grown < 1, found  # MB
    tally("seconds of soak", seconds)


def test_a_machine_that_slows_down_makes_its_checkpoints_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(soaking, "steps_a_second", lambda folder: 500.0)
    assert soak(tmp_path, 0.01, every=0.02).checkpoints >= 3
