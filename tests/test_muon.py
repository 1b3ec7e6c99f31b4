"""Muon: its steps against a singular value decomposition and PyTorch's sgd; the norm that it holds; a run that resumes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from opteq import Equilibrium
from opteq.cells import ConvOptEq, DeepOptEq, OptEq
from opteq.models import deep_opteq, feed_forward
from opteq.training import TrainConfig, fit
from opteq.training.muon import Muon, orthogonalized
from opteq.training.parts import make_optimizer

MUON = TrainConfig(epochs=20, batch_size=10, optimizer="muon", lr=0.05, hold=0.6, schedule="constant", norms="off")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), Equilibrium(OptEq(5, 6, 7, constrained=True)), nn.Linear(6, 2))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 99), scale=st.sampled_from([1e-20, 1.0, 1e20]))
def test_an_orthogonalized_matrix_has_the_singular_vectors_of_the_matrix_and_values_near_one(rows, columns, seed, scale):
    torch.manual_seed(seed)
    k = min(rows, columns)
    left, right = torch.linalg.qr(torch.randn(rows, k))[0], torch.linalg.qr(torch.randn(columns, k))[0]
    values = torch.linspace(1.0, 0.05, k)
    x = orthogonalized(scale * (left * values) @ right.T)
    inner = left.T @ x @ right
    assert (inner - inner.diag().diag()).abs().max() < 1e-3
    assert inner.diag().min() > 0.6
    assert inner.diag().max() < 1.3
    torch.testing.assert_close((left * inner.diag()) @ right.T, x, rtol=0, atol=1e-3)


def test_a_matrix_of_zeros_stays_one():
    assert torch.equal(orthogonalized(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_a_kernel_moves_by_an_orthogonal_matrix_and_decays():
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(12, 2, 3, 3, dtype=torch.float64))
    before, gradients = kernel.detach().clone(), torch.randn(2, *kernel.shape, dtype=torch.float64)
    optimizer = Muon([kernel], [], lr=0.1, momentum=0.9, weight_decay=0.01)
    velocity = torch.zeros_like(before)
    for gradient in gradients:
        kernel.grad = gradient.clone()
        optimizer.step()
        velocity = 0.9 * velocity + gradient
        move = orthogonalized((gradient + 0.9 * velocity).flatten(1)).reshape(kernel.shape)
        before = before * (1 - 0.1 * 0.01) - 0.1 * move
    torch.testing.assert_close(kernel.detach(), before)
    tall = nn.Parameter(torch.zeros(18, 2, dtype=torch.float64))
    tall.grad = torch.randn(18, 2, dtype=torch.float64)
    Muon([tall], [], lr=0.1).step()
    assert torch.linalg.svdvals(tall.detach()).mean() / (0.1 * 3) == pytest.approx(1, abs=0.3)  # sqrt(18 / 2) = 3


def test_what_is_not_a_matrix_inside_an_equilibrium_moves_as_by_sgd():
    model, copy = make_model().double(), make_model().double()
    optimizer = make_optimizer(model, replace(MUON, weight_decay=0.01))
    sgd = torch.optim.SGD(copy.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    for seed in range(3):
        torch.manual_seed(seed)
        for one, two in zip(model.parameters(), copy.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        optimizer.step()
        sgd.step()
    for (name, one), two in zip(model.named_parameters(), copy.parameters(), strict=True):
        same = torch.allclose(one, two, rtol=1e-12)
        assert same == (name not in ("1.cell.U", "1.cell.parametrizations.W.original")), name


def test_the_norm_is_held_whatever_the_gradient():
    torch.manual_seed(0)
    layers = DeepOptEq([ConvOptEq(3, 4, 6), ConvOptEq(3, 4, 50)])
    matrices = [p for p in layers.parameters() if p.ndim > 1]
    for hold in (0.5, 1e3):
        optimizer = Muon(matrices, [], lr=1.0, hold=hold)
        for _ in range(5):
            for p in matrices:
                p.grad = p.detach().clone()
            optimizer.step()
        for p in matrices:
            size = torch.linalg.svdvals(p.detach().flatten(1)).square().mean().sqrt().item()
            assert size == pytest.approx(0.5) if hold == 0.5 else size < 10  # scaled down to it, and never up


def test_the_loss_of_a_closure_is_returned():
    w = nn.Parameter(torch.ones(2))
    optimizer = Muon([], [w], lr=0.1, momentum=0.0)

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    torch.testing.assert_close(w.detach(), torch.full((2,), 0.8))


def test_fit_learns_with_muon_and_resumes_to_the_same_weights(tmp_path):
    whole, killed = make_model(), make_model()
    result = fit(whole, data(), data(), MUON, folder=tmp_path / "whole", verbose=False)
    assert result.scores["valid_accuracy"] > 0.9

    class Stopped(Exception):
        pass

    def stop(step):
        if step == 7:
            raise Stopped

    folder = tmp_path / "killed"
    often = replace(MUON, checkpoint_every=2)
    with pytest.raises(Stopped):
        fit(killed, data(), data(), often, folder=folder, callbacks=[stop], verbose=False)
    resumed = make_model()
    fit(resumed, data(), data(), often, folder=folder, resume=True, verbose=False)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_networks_of_images_are_moved_in_both_ways():
    optimizer = make_optimizer(deep_opteq(3, 10, hidden=(4, 8)), MUON)
    kinds = {group["orthogonal"]: [p.ndim for p in group["params"]] for group in optimizer.param_groups}
    assert kinds[True] == [4, 4, 4, 4]  # W and U of two layers
    assert sorted(kinds[False]) == [1] * 7 + [2, 4]  # biases and norms; the head's matrix; the extractor's kernel


@pytest.mark.parametrize("frozen", [False, True])
def test_without_an_equilibrium_all_matrices_but_the_first_and_the_last_are_made_orthogonal(frozen):
    model = feed_forward(3, 10, hidden=(4, 8))
    model.extractor.requires_grad_(not frozen)
    found = {group["orthogonal"]: {id(p) for p in group["params"]} for group in make_optimizer(model, MUON).param_groups}
    names = {name for name, p in model.named_parameters() if id(p) in found[True]}
    assert names == {"equilibrium.W.0", "equilibrium.U.0", "equilibrium.U.1"}
    assert found[False] == {id(p) for p in model.parameters() if p.requires_grad} - found[True]


def test_a_network_of_two_matrices_moves_as_by_sgd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    assert [group["orthogonal"] for group in make_optimizer(model, MUON).param_groups] == [False]
    assert fit(model, data(), data(), MUON, verbose=False).scores["valid_accuracy"] > 0.9


@pytest.mark.parametrize(("changed", "message"), [({"hold": 0.0}, "'hold'"), ({"optimizer": "sgd"}, "it is a setting of muon")])
def test_settings_that_make_no_sense_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(MUON, **changed)
