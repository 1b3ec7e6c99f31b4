"""Randomised solves: no crash, no unflagged wrong answer, the same sample alone and in a batch."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from stress_cases import Case, make_case
from stress_checks import check_alone, check_easy, check_solution, contraction

from opteq.gradients import Implicit
from opteq.solvers import Anderson, Newton

pytestmark = pytest.mark.stress
PARTS = 8  # so that two workers share them


def checked(case: Case) -> tuple[int, bool]:
    """Solve and check one problem: how many solves that took, and whether it was easy. A failure names the seed."""
    try:
        found = case.run()
        truth = check_solution(case, found)
        size = tuple(case.x.shape[2:]) if case.x.ndim == 4 else (1, 1)
        rate = contraction(case.cell, size)
        easy = check_easy(case, found, truth, rate)
        if case.seed % 4 or rate is None or rate >= 1:
            return 1, easy
        check_alone(case, found, truth, rate)
        return 2, easy
    except Exception as error:
        raise AssertionError(f"{case}\n{type(error).__name__}: {error}") from error


def solves(cases: Iterable[Case]) -> int:
    """How many it took to check them all."""
    return sum(checked(case)[0] for case in cases)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_solution_is_what_it_says(part, amount, tally):
    count = amount(8, 2500)
    tally("randomised solves", solves(make_case(seed) for seed in range(part * 1_000_000, part * 1_000_000 + count)))


def easy_case(seed: int) -> Case:
    """A contraction, wherever the cell of the seed is one, and a method that must solve it."""
    case = make_case(seed, factor=0.5, scale=1.0)
    stop = replace(case.stop, rtol=max(case.stop.rtol, 1e-6), max_steps=200)
    return replace(case, solver=(None, Anderson(), Newton())[seed % 3], gradient=Implicit(), stop=stop)


def test_easy_problems_are_solved(amount, tally):
    """Among those above, one in sixty is easy."""
    wanted, seed, easy, count = amount(12, 500), 0, 0, 0
    while easy < wanted:
        found = checked(easy_case(seed))
        seed, easy, count = seed + 1, easy + found[1], count + found[0]
    tally("randomised solves", count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, amount, tally):
    tally("randomised solves", solves(make_case(seed, dtype=dtype) for seed in range(amount(4, 250))))


def test_large_batches_of_few_numbers(amount, tally):
    seeds = range(amount(1, 30))
    tally("randomised solves", solves(make_case(seed, batch=10_000, width=1 + seed % 4) for seed in seeds))


def test_the_widest_layers(amount, tally):
    seeds = range(amount(1, 30))
    tally("randomised solves", solves(make_case(seed, batch=1 + seed % 2, width=4096, dtype=torch.float32) for seed in seeds))
