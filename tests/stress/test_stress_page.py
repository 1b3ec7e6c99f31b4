"""docs/robustness.md says what was measured."""

import pytest
from stress_page import PAGE, split, stored, table

pytestmark = pytest.mark.stress


def test_the_page_has_the_numbers_of_the_last_full_run():
    assert split(PAGE.read_text())[1] == table()


def test_the_last_full_run_did_what_it_must():
    if (found := stored("stress")) is None:
        pytest.skip("there was none yet")
    assert {what: found["done"][what] >= least for what, least in found["least"].items()} == dict.fromkeys(
        ("randomised solves", "mutated files", "interruptions"), True
    )
