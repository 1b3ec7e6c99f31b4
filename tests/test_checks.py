import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from opteq import Stop
from opteq.checks import (
    check_choice,
    check_finite,
    check_floating,
    check_instance,
    check_integer,
    check_number,
    check_shape,
    invalid,
    undone,
)
from opteq.linear import CG, GMRES, Neumann
from opteq.solvers import Anderson, Broyden, Newton, Picard

COUNTS = [
    (Stop, "max_steps", 1),
    (Anderson, "memory", 1),
    (Broyden, "memory", 1),
    (Newton, "inner_steps", 1),
    (Newton, "halvings", 0),
]
COUNTS += [(GMRES, "restart", 1)]

BAD_NUMBERS: list[tuple[type, str, Any]] = [
    *[(Stop, name, value) for name in ("rtol", "atol") for value in (-1, -1e-300, math.nan, math.inf)],
    *[(Picard, "damping", value) for value in (0, 0.0, -0.5, 1.5, math.nan, math.inf)],
    *[(Anderson, "mixing", value) for value in (0, -1.0, 1.01, math.nan)],
    *[(Anderson, "ridge", value) for value in (-1, math.nan, math.inf)],
    *[(Anderson, "restart", value) for value in (1, 0.5, 0, -2, math.nan, -math.inf)],
    *[(Broyden, "growth", value) for value in (1, 0.5, 0, math.nan, math.inf)],
    *[(Newton, "forcing", value) for value in (0, -1, 0.6, 1, math.nan)],
]


def template(kind: type, name: str) -> str:
    return rf"^The '{name}' parameter of {kind.__name__} must be .+\. Got .+ instead\.$"


@pytest.mark.parametrize(("kind", "name", "least"), COUNTS)
def test_counts_are_integers_from_a_least_one(kind: type, name: str, least: int) -> None:
    assert getattr(kind(**{name: least}), name) == least
    for value in (least - 1, -5):
        with pytest.raises(ValueError, match=template(kind, name)):
            kind(**{name: value})
    for value in (True, 2.5, 2.0, "2", None, [2], math.nan):
        with pytest.raises(TypeError, match=template(kind, name)):
            kind(**{name: value})


@pytest.mark.parametrize(("kind", "name", "value"), BAD_NUMBERS)
def test_numbers_out_of_range(kind: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=template(kind, name)):
        kind(**{name: value})


@pytest.mark.parametrize(("kind", "name"), sorted({(k, n) for k, n, _ in BAD_NUMBERS}, key=str))
@pytest.mark.parametrize("value", ["x", True, [1.0], 1j, torch.tensor(0.5)], ids=str)
def test_what_is_no_number(kind: type, name: str, value: object) -> None:
    with pytest.raises(TypeError, match=template(kind, name)):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Stop, {"rtol": 0, "atol": 0, "max_steps": 1}),
        (Stop, {"rtol": np.float64(1e-3)}),
        (Picard, {"damping": 1}),
        (Anderson, {"mixing": 1e-3, "ridge": 0, "restart": math.inf}),
        (Anderson, {"ridge": None, "restart": 1.0001}),
        (Broyden, {"growth": 1.0001}),
        (Newton, {"forcing": 0.5, "halvings": 0}),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(kind: type, values: dict[str, Any]) -> None:
    made = kind(**values)
    assert all(getattr(made, name) == value for name, value in values.items())


@pytest.mark.parametrize("kind", [Stop, Picard, Anderson, Broyden, Newton, CG, GMRES, Neumann])
def test_misspelt_options_and_assignments_are_errors(kind: type) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_step'"):
        kind(max_step=3)
    made = kind()
    for item in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, item.name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.other = 1


def test_the_text_names_what_was_expected_and_what_came() -> None:
    with pytest.raises(ValueError, match=r"^The 'memory' parameter of Anderson must be an integer >= 1\. Got 0 instead\.$"):
        Anderson(memory=0)
    with pytest.raises(
        ValueError, match=r"^The 'damping' parameter of Picard must be a finite number > 0 and <= 1\. Got 1\.5 instead\.$"
    ):
        Picard(damping=1.5)
    with pytest.raises(TypeError, match=r"^The 'rtol' parameter of Stop must be a finite number >= 0\. Got 'x' instead\.$"):
        Stop(rtol="x")  # type: ignore[arg-type]
    assert invalid("solve", "z0", "a tensor", 3) == "The 'z0' parameter of solve must be a tensor. Got 3 instead."
    assert invalid(Picard(), "a", "b", "c") == "The 'a' parameter of Picard must be b. Got 'c' instead."
    assert invalid("f", "a", "b", "c" * 300) == f"The 'a' parameter of f must be b. Got '{'c' * 300}' instead."
    some = list(range(40))
    assert invalid("f", "a", "b", some) == f"The 'a' parameter of f must be b. Got {some} instead."
    of_a_network = invalid("f", "a", "b", torch.nn.Sequential(*[torch.nn.Linear(2, 2)] * 9))
    assert "\n" not in of_a_network
    assert len(of_a_network) < 300
    assert "Got Sequential( (0): Linear(" in of_a_network
    assert of_a_network.endswith(" ... instead.")


def test_check_integer_and_check_number_pass_good_values() -> None:
    check_integer("C", "x", 3, 3)
    check_number("C", "x", 0, 0)
    check_number("C", "x", 1.0, 0, 1.0)
    check_number("C", "x", 1e-300, 0, open_low=True)


def test_check_instance() -> None:
    check_instance("C", "x", 3, (int, str), "an int or a str")
    with pytest.raises(TypeError, match=r"^The 'x' parameter of C must be an int or a str\. Got 3\.0 instead\.$"):
        check_instance("C", "x", 3.0, (int, str), "an int or a str")


def test_check_floating() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        check_floating("C", "x", torch.zeros(2, dtype=dtype))
    with pytest.raises(TypeError, match=r"must be a floating-point tensor\. Got torch\.int64 instead\.$"):
        check_floating("C", "x", torch.zeros(2, dtype=torch.long))
    with pytest.raises(TypeError, match=r"must be a floating-point tensor\. Got 'ndarray' instead\.$"):
        check_floating("C", "x", np.zeros(2))
    with pytest.raises(TypeError, match=r"^The 'x' parameter of C must be a dense tensor\. Got torch\.sparse_coo instead\.$"):
        check_floating("C", "x", torch.eye(2).to_sparse())


def test_check_shape() -> None:
    check_shape("C", "x", torch.zeros(7, 3, 4), (3, 4))
    check_shape("C", "x", torch.zeros(0), ())
    for shape in ((7, 3), (7, 4, 3), (7, 3, 4, 1), (3, 4)):
        with pytest.raises(ValueError, match=r"^The 'x' parameter of C must be of shape \[batch, 3, 4\]\. Got \[.*\] instead\.$"):
            check_shape("C", "x", torch.zeros(shape), (3, 4))


def test_check_finite_names_the_first_bad_tensor() -> None:
    sound = [
        ("a", torch.zeros(3)),
        ("b", torch.zeros(0)),
        ("c", torch.tensor(1.0)),
        ("d", torch.tensor([1, 2])),
        ("e", torch.tensor([True])),
    ]
    check_finite(Picard(), [])
    check_finite(Picard(), sound)
    check_finite(Picard(), [("w", torch.ones(2, requires_grad=True))])
    for value in (math.nan, math.inf, -math.inf):
        for place in range(3):
            bad = torch.zeros(3)
            bad[place] = value
            with pytest.raises(ValueError, match=r"^The 'w' parameter of Picard must be finite\. Got NaN or infinity instead\.$"):
                check_finite(Picard(), [*sound, ("w", bad), ("later", bad)])


def test_a_choice_is_one_of_several():
    check_choice("f", "kind", "a", ("a", "b"))
    for value in ("c", None, 1, ["a"]):
        with pytest.raises(ValueError, match=r"^The 'kind' parameter of f must be one of 'a', 'b'\. Got .+ instead\.$"):
            check_choice("f", "kind", value, ("a", "b"))


@pytest.mark.parametrize("interrupts", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_undone_is_undone_also_where_that_is_interrupted(fails, interrupts):
    state, calls = [1, 2, 3], []

    def undo() -> None:
        for i in range(3):
            if i == 1 and len(calls) < interrupts:
                calls.append(i)
                raise KeyboardInterrupt
            state[i] = i + 1

    def work() -> None:
        with undone(undo):
            state[:] = [0, 0, 0]
            if fails:
                raise LookupError

    if interrupts or fails:
        with pytest.raises(KeyboardInterrupt if interrupts else LookupError):
            work()
    else:
        work()
    assert state == [1, 2, 3]
