"""A short soak, to see that the long one (`make soak`) works: memory is flat and no file stays open."""

import pytest
from soak import soak

pytestmark = pytest.mark.stress


def test_a_training_with_many_checkpoints_keeps_its_memory_and_its_files(tmp_path, amount, tally):
    seconds = amount(2, 60)
    found = soak(tmp_path, seconds, every=seconds / 10)
    assert found.handles[0] == found.handles[1]
    assert found.checkpoints >= 3
    assert found.grown < 1, found  # MB
    tally("seconds of soak", seconds)
