"""Randomised solves: no crash, no unflagged wrong answer, the same sample alone and in a batch."""

import pytest
import torch
from stress_cases import Case, make_case
from stress_checks import check_alone, check_easy, check_solution, contraction

pytestmark = pytest.mark.stress
PARTS = 8  # so that two workers share them


def checked(case: Case) -> int:
    """Solve and check one problem; how many solves that took. A failure names the seed."""
    try:
        found = case.run()
        truth = check_solution(case, found)
        size = tuple(case.x.shape[2:]) if case.x.ndim == 4 else (1, 1)
        rate = contraction(case.cell, size)
        check_easy(case, found, truth, rate)
        if case.seed % 4 or rate is None or rate >= 1:
            return 1
        check_alone(case, found, truth, rate)
        return 2
    except Exception as error:
        raise AssertionError(f"{case}\n{type(error).__name__}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_every_solution_is_what_it_says(part, amount, tally):
    count = amount(8, 2500)
    tally("randomised solves", sum(checked(make_case(seed)) for seed in range(part * 1_000_000, part * 1_000_000 + count)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, amount, tally):
    tally("randomised solves", sum(checked(make_case(seed, dtype=dtype)) for seed in range(amount(4, 250))))


def test_large_batches_of_few_numbers(amount, tally):
    seeds = range(amount(1, 30))
    tally("randomised solves", sum(checked(make_case(seed, batch=10_000, width=1 + seed % 4)) for seed in seeds))


def test_the_widest_layers(amount, tally):
    seeds = range(amount(1, 30))
    tally("randomised solves", sum(checked(make_case(seed, batch=1 + seed % 2, width=4096, dtype=torch.float32)) for seed in seeds))
