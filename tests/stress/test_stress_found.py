"""What the random problems found, as small as it goes."""

import pytest
import torch

from opteq import Equilibrium, Stop
from opteq.cells import Monotone

pytestmark = pytest.mark.stress


@pytest.mark.xfail(strict=True, reason="I + step (I - W) is formed as (1 + step) I - step W, which is 0 to rounding where W is I")
def test_a_monotone_layer_without_weights_and_with_a_small_m_is_solved_or_said_not_to_be():
    cell = Monotone(3, 2, m=1e-12)
    with torch.no_grad():
        cell.A.zero_()
        cell.B.zero_()
        cell.U.fill_(-1.0)
    solution = Equilibrium(cell, stop=Stop(rtol=1e-5)).solve(torch.ones(1, 3))
    assert solution.z.isfinite().all()
