"""Training of monotone networks at a guaranteed rate: the cells against plain loops, and what shows a claim."""

import math

import numpy as np
import pytest
import torch

from opteq import data
from opteq.experiments import monotone_convergence as convergence


@pytest.fixture(autouse=True)
def images(monkeypatch):
    """Eight small images in place of a data set, so that nothing is read."""
    split = data.Split(torch.rand(8, 1, 3, 3, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2)
    monkeypatch.setattr(data, "load", lambda name, root: data.Dataset(name, split, split, ("a", "b")))


def settings(kind, steps=6):
    own = {"samples": 2, "m": 0.8, "span": 0.5, "points": 3, "root": None, "width": 6, "seed": 0}
    return own | {"data": "digits", "kind": kind, "steps": steps}


def output(A, B, U, a, x, m=0.8, steps=400):
    """y = a'z by damped steps z <- z + (relu(W z + U x) - z) / 5, which settle for the small W of a fresh network."""
    W = (1 - m) * torch.eye(len(A), dtype=A.dtype) - A.T @ A + B - B.T
    z = torch.zeros(len(x), len(A), dtype=A.dtype)
    for _ in range(steps):
        z = z + (torch.relu(z @ W.T + x @ U.T) - z) / 5
    return z @ a


def test_plain_descent_and_its_kernel_are_those_of_autograd():
    found = convergence.train(settings("plain"))
    x, y = convergence.samples(settings("plain"))
    model = convergence.network(settings("plain"), x.shape[1])
    theta = [p.detach() for p in (model.cell.A, model.cell.B, model.cell.U, model.a)]
    losses, kernels = [], []
    for _ in range(7):
        J = torch.autograd.functional.jacobian(lambda *theta: output(*theta, x), tuple(theta))
        error = output(*theta, x) - y
        losses.append(float(error.square().sum() / 2))
        kernels.append(sum(part.flatten(1) @ part.flatten(1).T for part in J).numpy())
        theta = [p - found["step"] * torch.tensordot(error, part, 1) for p, part in zip(theta, J, strict=True)]
    assert found["step"] == pytest.approx(1 / np.linalg.eigvalsh(kernels[0])[-1])
    assert found["at"] == [0, 2, 4, 6]
    assert found["loss"] == pytest.approx(losses[::2], rel=1e-6)
    assert found["ntk_min"] == pytest.approx([np.linalg.eigvalsh(K)[0] for K in kernels[::2]], rel=1e-6)
    drifts = [np.linalg.norm(K - kernels[0]) / np.linalg.norm(kernels[0]) for K in kernels[::2]]
    assert found["drift"] == pytest.approx(drifts, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", convergence.KINDS)
def test_bounds_are_those_of_the_theorem_and_are_kept(kind):
    found = convergence.train(settings(kind))
    lam0_squared = 4 * found["least"]
    if kind == "flow":
        bounds = [found["loss"][0] * math.exp(-lam0_squared * t / 2) for t in found["at"]]
    else:
        bounds = [found["loss"][0] * (1 - found["step"] * lam0_squared / 4) ** k for k in found["at"]]
    assert found["bound"] == pytest.approx(bounds, rel=1e-8)
    assert found["broken"] is None
    assert min(convergence.exponents(found)) >= 1


def training(losses, bounds=(4.0, 2.0, 1.0), ntk_min=2.0, broken=None, drift=0.1):
    curves = {"at": [0, 1, 2], "loss": list(losses), "bound": list(bounds), "ntk_min": [4.0, 3.0, ntk_min], "drift": [0, 0, drift]}
    return curves | {"broken": broken, "decay": 1.0, "least": 1.0, "step": 1.0}


def series(cell, wide=0.05):
    plain = {
        "8": [training([1, 1, 1], drift=drift) for drift in (0.1, 0.11)],
        "16": [cell and training([1, 1, 1], drift=drift) for drift in (wide, wide)],
    }
    return {"digits": {"certified": dict.fromkeys(convergence.KINDS, cell), "plain": plain}}


def shown(name, *args, **options):
    return all(one["shown"] for one in convergence.judge(name, series(*args, **options)).values())


GOOD = training([4.0, 1.0, 0.5])


def test_a_claim_is_shown_by_what_it_says_only():
    for name in convergence.CLAIMS:
        assert shown(name, GOOD)
        assert not shown(name, None)
    for name in ("flow", "descent"):
        assert not shown(name, training([4.0, 2.1, 0.5]))
        assert not shown(name, training([4.0, math.nan, 0.5]))
        assert not shown(name, training([4.0, 1.0, 0.5], broken="moved A"))
    assert not shown("kernel", training([4.0, 1.0, 0.5], ntk_min=0.9))
    assert not shown("width", GOOD, wide=0.2)


def test_tables_take_failed_trainings():
    assert len(convergence.summary(series(None))["rows"]) == 3
    assert convergence.summary(series(GOOD))["rows"][0][2] == pytest.approx(math.log(4))
    assert math.isnan(convergence.drift_table(series(None))["rows"][1][2])


def test_a_narrower_change_must_be_clear_to_show_the_claim_on_widths():
    (found,) = convergence.judge("width", series(GOOD, wide=0.05)).values()
    assert found["value"] == pytest.approx(11)  # 0.055 less, with an error of 0.005
    assert not shown("width", GOOD, wide=0.1)
    one = series(GOOD)
    one["digits"]["plain"] = {width: cells[:1] for width, cells in one["digits"]["plain"].items()}
    assert not any(found["shown"] for found in convergence.judge("width", one).values())


def test_a_difference_of_less_than_two_standard_errors_is_told():
    def widths(*by_width):
        plain = {str(8 * 2**i): [training([1, 1, 1], drift=drift) for drift in drifts] for i, drifts in enumerate(by_width)}
        return {"digits": {"certified": {}, "plain": plain}}

    assert convergence.doubts(widths([0.5, 0.6], [0.1, 0.21])) == []
    (told,) = convergence.doubts(widths([0.9, 1.0], [0.3, 0.5], [0.3, 0.4]))
    assert "16 to 32" in told


def test_how_little_the_theorems_step_moves_is_told_also_of_failed_trainings():
    (told,) = convergence.stillness(series(training([4.0, 3.9, 3.8], drift=1e-9)))
    assert "by at most 5%" in told
    assert "1e-09" in told
    assert convergence.stillness(series(None))
