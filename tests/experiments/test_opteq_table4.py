"""Table 4 of the OptEq paper, and the long training of its first row: what their judges take for shown."""

import pytest

from opteq.experiments import opteq_cifar10 as cifar10
from opteq.experiments import opteq_table4 as table4

FIRST = "deep OptEq"


def not_shown(found):
    return {name for name, measured in found.items() if not all(one["shown"] for one in measured.values())}


# --- table 4 --------------------------------------------------------------------------------------------------------------------


def rows():
    """The paper's accuracies; that of OptEq after its trained steps is another, which must not count."""
    found = {name: {"test_accuracy": value / 100, "parameters": 165_000, "seconds": 540.0} for name, value in table4.PAPER.items()}
    found[FIRST] |= {"equilibrium_accuracy": found[FIRST]["test_accuracy"], "test_accuracy": 0.1}
    return found


def changed(name, **numbers):
    found = rows()
    found[name] |= numbers
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (rows(), set()),
        (changed("plain", test_accuracy=0.86), {"first"}),
        (changed(FIRST, equilibrium_accuracy=0.8), {"first"}),
        (changed("ODE", test_accuracy=0.61), {"order"}),
        (changed("MON", parameters=180_000), {"size"}),
        (changed("MON", seconds=601.0), {"time"}),
        (changed("MON", seconds=470.0), {"time"}),
        (rows() | {"MON": {}}, {"first", "order", "size", "time"}),
    ],
)
def test_accuracies_in_another_order_more_parameters_and_other_times_are_not_shown(given, expected):
    assert not_shown(table4.judge(table4.PRESETS["small"], given)) == expected


def test_without_a_limit_times_cannot_be_judged():
    assert table4.judge(table4.PRESETS["paper"], rows())["time"] == "This preset sets no time."


def test_a_training_that_diverged_says_so_in_the_table():
    found = table4.compared(rows() | {"MON": {"diverged": "at step 3", "step": 3}})
    assert found["rows"][0][-2:] == ["85.7", 85.7]
    assert found["rows"][2] == ["MON", None, None, None, "at step 3", 74.1]


# --- the long training ----------------------------------------------------------------------------------------------------------

LONG = {"equilibrium_accuracy": 0.86, "steps_accuracy": 0.86, "equilibrium_converged": 1.0, "parameters": 161_670, "seconds": 3750}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (LONG, set()),
        (LONG | {"equilibrium_accuracy": 0.85, "steps_accuracy": 0.85}, {"paper"}),
        (LONG | {"equilibrium_accuracy": 0.83, "steps_accuracy": 0.83}, {"paper", "accuracy"}),
        (LONG | {"steps_accuracy": 0.87}, {"equilibrium"}),
        (LONG | {"equilibrium_converged": 0.9999}, {"equilibrium"}),
        (LONG | {"parameters": 172_500}, {"size"}),
        (LONG | {"seconds": 9001.0}, {"time"}),
        ({"diverged": "at step 3", "step": 3}, set(cifar10.CLAIMS)),
    ],
)
def test_a_long_training_shows_what_it_reached_only(found, expected):
    assert not_shown(cifar10.judge(found)) == expected
