"""The experiments on Gaussian-initialised DEQs: their cells against oracles that share no code with them, and their judges."""

import math

import numpy as np
import pytest
import torch

from opteq import Stop, data
from opteq.experiments import gaussian_gram as gram
from opteq.experiments import gaussian_width as width

NAN = float("nan")


def unrolled(W, U, a, x, steps=120):
    """y = a'z with z after many steps of z <- relu(W z + U x): all that autograd needs."""
    z = torch.zeros(len(x), len(W), dtype=x.dtype)
    for _ in range(steps):
        z = torch.relu(z @ W.T + x @ U.T)
    return z @ a


def small(name="sphere", m=12):
    return {
        "data": name, "root": None, "width": m, "widest": 24, "seed": 0, "samples": 8, "dimension": 6, "targets": (-1.0, 1.0),
        "sigma_w2": 0.08, "steps": 20, "every": 5, "rtol": 1e-6,
    }  # fmt: skip


def test_a_step_is_the_one_that_autograd_takes_through_the_unrolled_network():
    x, y = (part.double() for part in width.samples(small()))
    cell, a = width.network(small(), x.shape[1])
    cell, a = cell.double(), a.detach().double()
    before = [p.detach().clone().requires_grad_() for p in (cell.W, cell.U, a)]
    loss = (unrolled(*before, x) - y).square().sum() / 2
    wanted = [p - 0.01 * g for p, g in zip(before, torch.autograd.grad(loss, before), strict=True)]
    with torch.no_grad():
        zero = torch.zeros(len(x), 12, dtype=torch.float64)
        z, r = width.equilibria(cell, a, x, zero, zero, Stop(rtol=1e-13))
        error = z @ a - y
        width.descend(cell, a, x, z, r, error, 0.01)
    assert width.half_square(error) == pytest.approx(loss.item(), rel=1e-12)
    for found, expected in zip((cell.W, cell.U, a), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_whole_training_follows_plain_descent_in_double_precision():
    found = width.train(small())
    x, y = (part.double() for part in width.samples(small()))
    cell, a = width.network(small(), x.shape[1])
    theta = [p.detach().double().requires_grad_() for p in (cell.W, cell.U, a)]
    losses, norms = [], []
    for _ in range(21):
        loss = (unrolled(*theta, x, 40) - y).square().sum() / 2
        losses.append(loss.item())
        norms.append(torch.linalg.matrix_norm(theta[0].detach(), 2).item())
        slopes = torch.autograd.grad(loss, theta)
        theta = [(p - found["step"] * g).detach().requires_grad_() for p, g in zip(theta, slopes, strict=True)]
    assert found["curves"]["k"] == [0, 5, 10, 15, 20]
    assert found["curves"]["loss"] == pytest.approx(losses[::5], rel=1e-4)
    assert found["curves"]["norm"] == pytest.approx(norms[::5], rel=1e-4)
    assert losses[-1] < losses[0]


def test_every_width_makes_the_same_step():
    steps = [width.train(small(m=m) | {"steps": 0})["step"] for m in (6, 12)]
    assert steps[0] == steps[1]


def test_inputs_have_the_norm_of_the_theory_and_classes_their_targets(monkeypatch):
    split = data.Split(torch.rand(40, 1, 3, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4)
    monkeypatch.setattr(data, "load", lambda name, root: data.Dataset(name, split, split, ("a", "b", "c", "d")))
    for name in ("sphere", "images"):
        x, y = width.samples(small(name))
        torch.testing.assert_close(x.square().sum(1), torch.full((8,), float(x.shape[1])))
    assert sorted(y.tolist()) == [-1.0] * 4 + [1.0] * 4
    torch.testing.assert_close(gram.samples(small("images")).float(), x)


def cell(losses, norm=0.8, drift=0.1):
    ks = [10 * i for i in range(len(losses))]
    return {"curves": {"k": ks, "loss": losses, "norm": [norm] * len(ks)}, "step": 1.0, "drift": drift, "limit": 0.3}


NARROW, WIDE = cell([8.0, 4.0, 2.0], drift=0.2), cell([8.0, 2.0, 1.0])


def shown(name, narrow, wide):
    return all(one["shown"] for one in width.judge(name, {"sphere": {"m = 1": narrow, "m = 2": wide}}).values())


def test_claims_on_the_width_are_shown_by_the_right_order_only():
    for name in ("speed", "loss", "gram"):
        assert shown(name, [NARROW], [WIDE])
        assert not shown(name, [WIDE], [NARROW])
        assert not shown(name, [NARROW], [None])
        assert not shown(name, [NARROW, None], [WIDE, WIDE])
    assert shown("norm", [NARROW], [WIDE])
    assert not shown("norm", [NARROW], [cell([8.0, 2.0, 1.0], norm=1.01)])
    assert not shown("norm", [NARROW], [None])


def test_widths_are_compared_on_the_seeds_of_both():
    lucky = cell([8.0, 1.0, 0.5], drift=0.05)
    for name in ("speed", "loss", "gram"):
        assert shown(name, [NARROW, lucky, lucky], [WIDE])
        assert not shown(name, [NARROW, lucky, lucky], [WIDE, NARROW, NARROW])


def test_steps_are_counted_to_where_the_loss_first_comes_down_to_the_level():
    assert width.steps_to(4.0, [8.0, 2.0, 1.0]) == pytest.approx(0.5)
    assert width.steps_to(9.0, [8.0, 2.0]) == 0
    assert math.isnan(width.steps_to(1.0, [8.0, 2.0]))
    assert math.isnan(width.steps_to(1.0, [NAN]))
    assert math.isnan(width.haste([cell([2.0, 3.0])], [WIDE]))


def test_a_lower_loss_at_the_end_does_not_show_the_speed():
    narrow, wide = cell([9.0, 2.0, 1.9]), cell([9.0, 8.9, 1.8])
    assert shown("loss", [narrow], [wide])
    assert not shown("speed", [narrow], [wide])


def test_a_prediction_is_descent_with_the_limit_of_the_kernel_from_the_same_start():
    found = width.predict(small())["limit"]
    step = width.train(small() | {"steps": 0})["step"]
    x, y = (part.double() for part in width.samples(small()))
    net, a = width.network(small(), x.shape[1])
    start = (unrolled(net.W.detach().double(), net.U.detach().double(), a.detach().double(), x) - y).numpy()
    x = x.numpy()
    K, c = by_definition_1(x, 0.08, 40)
    k = 1 - np.arccos(np.clip(c, -1, 1)) / np.pi
    r = k / 2 / (1 - 0.08 * k)
    H, error = 12 * K * (1 + r) + r * (x @ x.T), start
    for _ in range(20):
        error = error - step * H @ error
    assert found == pytest.approx(error @ error / (start @ start), rel=1e-4)


def test_the_table_has_the_prediction_beside_the_fall_and_takes_failed_cells():
    rows = width.summary({"sphere": {"m = 1": [NARROW, NARROW], "m = 2": [None]}})["rows"]
    assert rows[0][4:6] == [0.25, 0.3]
    assert all(math.isnan(value) for value in rows[1][2:])


def test_a_width_with_one_seed_is_told():
    assert [note for note in width.notes(width.PRESETS["smoke"]) if "one seed at m = 120" in note]
    assert len(width.notes(width.PRESETS["paper"])) == 1


# --- gaussian_gram --------------------------------------------------------------------------------------------------------------

TINY = {
    "data": "sphere",
    "root": None,
    "width": 10,
    "seed": 0,
    "samples": 4,
    "dimension": 6,
    "sigma_w2": 0.08,
    "draws": 2,
    "depth": 4,
}


def arccosine(c):
    """2 E[relu(u) relu(v)] for unit Gaussians of correlation c, as Eq. (11) has it."""
    c = np.clip(c, -1, 1)
    return (np.sqrt(1 - c * c) + (np.pi - np.arccos(c)) * c) / np.pi


def by_definition_1(x, sigma_w2, depth):
    """K^(l) by the recursion, and the correlations before its last layer."""
    angles, K, c = x @ x.T / x.shape[1], np.zeros((len(x), len(x))), None
    for _ in range(depth):
        covariance = sigma_w2 * K + angles
        scale = np.sqrt(np.outer(covariance.diagonal(), covariance.diagonal()))
        c = covariance / scale
        K = scale * arccosine(c)
    return K, c


def test_a_draw_is_at_the_distances_to_its_limits_that_definitions_give():
    found = gram.measure(TINY)
    x = gram.samples(TINY)
    model = gram.network(TINY, 6, 0)
    theta = [p.detach().requires_grad_() for p in (model.cell.W, model.cell.U, model.a)]
    J = torch.autograd.functional.jacobian(lambda *theta: unrolled(*theta, x), tuple(theta))
    H = sum(part.flatten(1) @ part.flatten(1).T for part in J).numpy() / 10
    G = (J[2] @ J[2].T).numpy() / 10
    x = x.numpy()
    K, c = by_definition_1(x, 0.08, 40)
    k = 1 - np.arccos(np.clip(c, -1, 1)) / np.pi
    r = k / 2 / (1 - 0.08 * k)
    limit = K * (1 + r) + r * (x @ x.T) / 10
    assert found["gram"][0] == pytest.approx(np.linalg.norm(G - K) / np.linalg.norm(K), rel=1e-6)
    assert found["tangent"][0] == pytest.approx(np.linalg.norm(H - limit) / np.linalg.norm(limit), rel=1e-6)
    assert found["least"][0] == pytest.approx(np.linalg.eigvalsh(G)[0] / np.linalg.eigvalsh(K)[0], rel=1e-6)
    assert found["gram"][0] != found["gram"][1]


def test_the_layers_are_those_of_the_recursion_from_zero():
    found = gram.measure(TINY)["layers"]
    x, model = gram.samples(TINY), gram.network(TINY, 6, 0)
    W, U, z = model.cell.W.detach(), model.cell.U.detach(), torch.zeros(4, 10, dtype=torch.float64)
    K, _ = by_definition_1(x.numpy(), 0.08, 40)
    states = [z := torch.relu(z @ W.T + x @ U.T) for _ in range(60)]
    G = [(z @ z.T / 10).numpy() for z in states]
    K_l = [by_definition_1(x.numpy(), 0.08, layer)[0] for layer in range(1, 5)]
    assert found["population"] == pytest.approx([np.linalg.norm(K - one) / 4 for one in K_l], rel=1e-6)
    assert found["finite"] == pytest.approx([np.linalg.norm(G[-1] - one) / 4 for one in G[:4]], rel=1e-6)
    assert found["between"] == pytest.approx([np.linalg.norm(one - K) / 4 for one, K in zip(G[:4], K_l, strict=True)], rel=1e-6)


def limits(power=-0.5, least=0.6, factor=0.2, gap=0.01):
    """What `collect` makes of four widths."""
    widths = (16, 64, 256, 1024)
    rows = {name: [[m**power, m**power] for m in widths] for name in ("gram", "tangent")}
    falling = [factor**layer for layer in range(4)]
    layers = {"population": falling, "finite": falling, "between": [gap] * 4}
    return {"m": widths, **rows, "least": [[0.1, 0.1]] * 3 + [[least, 0.9]], "layers": layers, "lowest": 1.0}


def gram_shown(name, series):
    return all(one["shown"] for one in gram.judge(name, gram.Config(depth=4), "sphere", series).values())


@pytest.mark.parametrize("name", gram.CLAIMS)
def test_a_claim_on_limits_is_shown_by_what_it_says_only(name):
    assert gram_shown(name, limits())
    wrong = {"rate": limits(-0.3), "tangent": limits(-0.7), "least": limits(least=0.49), "both": limits(gap=0.9)}
    assert not gram_shown(name, wrong.get(name, limits(factor=0.85)))
    assert not gram_shown(name, gram.collect(gram.Config(depth=4), [None] * 6))
