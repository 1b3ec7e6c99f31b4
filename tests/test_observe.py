"""observe(): what a training loop hears of every solve."""

import torch

from opteq import Equilibrium
from opteq.cells import OptEq
from opteq.equilibrium import observe
from opteq.gradients import Unrolled


def test_observers_are_told_of_every_solve_and_of_its_backward():
    torch.manual_seed(0)
    layer, deep = Equilibrium(OptEq(3, 4, 5)), Equilibrium(OptEq(4, 4, 5), gradient=Unrolled(2), on_failure="raise")
    told = []
    with observe(lambda owner, solution, phase: told.append((owner, phase, solution.steps.shape[0]))):
        loss = deep(layer(torch.randn(6, 3))).sum()
        layer(torch.randn(2, 3))
    loss.backward()  # told as well: its forward solve was inside
    layer(torch.randn(2, 3))
    assert told == [(layer, "forward", 6), (deep, "unrolled", 6), (layer, "forward", 2), (layer, "backward", 6)]


def test_observers_nest_and_end_with_their_block():
    layer, outer, inner = Equilibrium(OptEq(3, 4, 5)), [], []
    with observe(lambda *told: outer.append(told)):
        with observe(lambda *told: inner.append(told)):
            layer(torch.randn(2, 3))
        layer(torch.randn(2, 3))
    layer(torch.randn(2, 3))
    assert (len(outer), len(inner)) == (2, 1)
