"""Certificates: formulas against a second writing of them, conclusions against descent, and refusals."""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import write_verify
from opteq import ConvergenceError, Equilibrium, Stop
from opteq.activations import Activation
from opteq.cells import ConvOptEq, DeepOptEq, GaussianDEQ, Monotone, OptEq, ScaledReLU
from opteq.equilibrium import Cell
from opteq.models import Readout
from opteq.models.separable import TwofoldOptEq
from opteq.solvers import Picard
from opteq.theory import gradient_flow
from opteq.theory.certificates import Certificate, Condition, Guarantee, Monitor, certified_init, certify, measure
from opteq.theory.certificates.gaussian import GaussianTheorem
from opteq.theory.certificates.initial import _growth as growth
from opteq.theory.certificates.monotone import MonotoneTheorem
from opteq.theory.certificates.run import descend as run_of
from opteq.theory.certificates.scaled_relu import ScaledReLUTheorem
from opteq.theory.certificates.search import best_radii
from opteq.theory.certificates.start import Start, observe, upper_norm
from opteq.theory.certificates.theorem import Theorem

KINDS = ("gaussian", "scaled_relu", "monotone")
RADII = {
    "gaussian": {"d": 0.05},
    "scaled_relu": {"C1": 0.3, "C2": 0.2, "C3": 0.1},
    "monotone": {"R_A": 0.3, "R_U": 0.2, "R_u": 0.1},
}

BALLS = {  # which radius bounds how far a weight moves
    "gaussian": {"W": "d", "U": "d", "a": "d"},
    "scaled_relu": {"W": "C1", "A": "C2", "a": "C3"},
    "monotone": {"A": "R_A", "[U b]": "R_U", "a": "R_u"},
}


def data(N: int, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, d, generator=g).double(), torch.randn(N, generator=g).double()


def make(kind: str, d: int = 5, width: int = 30, seed: int = 0, **options: object) -> Readout:
    torch.manual_seed(seed)
    if kind == "gaussian":
        return Readout(GaussianDEQ(d, width, **options).double())  # type: ignore[arg-type]
    if kind == "scaled_relu":
        return Readout(ScaledReLU(d, width, **options).double())  # type: ignore[arg-type]
    return Readout(Monotone(d, width, **{"m": 0.8, **options}).double())  # type: ignore[arg-type]


@functools.cache
def _certified(kind: str, N: int, flow: bool) -> Readout:
    X, y = data(N)
    return certified_init(make(kind, width=40), X, y, flow=flow)


def certified(kind: str, N: int = 3, flow: bool = False) -> Readout:
    """A copy of the certified start for data(N)."""
    return copy.deepcopy(_certified(kind, N, flow))


def norm(value: Tensor) -> float:
    return float(np.linalg.norm(value.detach().numpy(), 2))


def sides(found: Certificate) -> np.ndarray:
    return np.array([[c.lhs, c.rhs] for c in found.conditions if c.name.startswith("(")])


def slack_of(found: Certificate, name: str) -> Condition:
    (condition,) = (c for c in found.conditions if c.name == name)
    return condition


# Conditions and certificates as such


@pytest.mark.parametrize(
    ("lhs", "rhs", "strict", "holds", "slack"),
    [
        (2.0, 1.0, False, True, 2.0),
        (1.0, 1.0, False, True, 1.0),
        (1.0, 1.0, True, False, 1.0),
        (1.0, 2.0, False, False, 0.5),
        (1.0, 0.0, False, True, math.inf),
        (0.0, 0.0, False, False, 0.0),
        (-1.0, 0.0, True, False, 0.0),
        (math.nan, 1.0, False, False, math.nan),
        (1.0, math.nan, False, False, math.nan),
        (math.inf, math.inf, True, False, math.nan),
        (math.inf, math.inf, False, False, math.nan),
        (1.0, math.inf, False, False, 0.0),
    ],
)
def test_a_condition_holds_when_its_left_side_is_the_larger(
    lhs: float, rhs: float, strict: bool, holds: bool, slack: float
) -> None:
    condition = Condition("c", "a >= b", lhs, rhs, strict=strict)
    assert condition.holds is holds
    assert condition.slack == slack or (math.isnan(slack) and math.isnan(condition.slack))
    assert ("ok" in condition.verdict) is holds
    assert str(condition).startswith("c: a >= b")


def test_a_condition_that_fails_says_by_which_factor() -> None:
    assert "FAILS by a factor of 4" in Condition("c", "", 1.0, 4.0).verdict
    assert Condition("c", "", math.nan, 4.0).verdict == "not evaluated"
    assert Condition("c", "", 1.0, 1.0, strict=True).verdict == "FAILS: not above"
    assert Condition("c", "", -1.0, 4.0).verdict == "FAILS"


def certificate(**changes: object) -> Certificate:
    values = {
        "theorem": "T",
        "kind": "descent",
        "holds": True,
        "conditions": (Condition("c", "a >= b", 2.0, 1.0),),
        "max_step": 0.5,
        "rate": 0.9,
        "decay": 0.2,
        "radii": {"R": 1.0},
        "guarantees": (Guarantee("norm W", "<=", 3.0),),
        "loss": 4.0,
    }
    return Certificate(**{**values, **changes})  # type: ignore[arg-type]


def test_the_bound_of_the_loss_is_geometric_for_descent_and_exponential_for_flows() -> None:
    descent, flow = certificate(), certificate(kind="flow", rate=0.2, max_step=0.0)
    assert descent.loss_bound(3) == pytest.approx(4 * 0.9**3)
    assert descent.loss_bound(3, 0.25) == pytest.approx(4 * 0.95**3)
    assert flow.loss_bound(2.5) == pytest.approx(4 * math.exp(-0.5))
    assert descent.loss_bound(descent.half_life) == pytest.approx(2)
    assert flow.loss_bound(flow.half_life) == pytest.approx(2)
    tiny = certificate(max_step=1e-20, decay=1.0)
    assert 4 - tiny.loss_bound(1e19) == pytest.approx(4 * -math.expm1(-0.1))  # where 1 - step decay rounds to 1


def test_the_bound_of_the_loss_refuses_what_is_not_guaranteed() -> None:
    with pytest.raises(ValueError, match=r"'step' parameter.*<= 0.5. Got 0.6"):
        certificate().loss_bound(1, 0.6)
    with pytest.raises(ValueError, match="'k'"):
        certificate().loss_bound(-1)
    with pytest.raises(ValueError, match="'step' parameter of loss_bound must be None for a flow"):
        certificate(kind="flow").loss_bound(1, 0.1)
    failed = certificate(holds=False, max_step=0.0)
    with pytest.raises(ValueError, match="does not hold"):
        failed.loss_bound(1)
    assert failed.half_life == math.inf


def test_failing_conditions_are_listed_worst_first_and_unknown_ones_last() -> None:
    parts = [Condition(str(i), "", lhs, 1.0, remedy=f"fix {i}") for i, lhs in enumerate((0.5, math.nan, 0.1, 2.0))]
    found = certificate(holds=False, conditions=tuple(parts), guarantees=())
    assert [c.name for c in found.failing] == ["2", "0", "1"]
    text = str(found)
    assert "2 of 4 conditions fail, and 1 more cannot be evaluated." in text
    assert text.index("fix 2") < text.index("fix 0")
    assert "fix 3" not in text


def test_a_certificate_is_copied_and_shown() -> None:
    found = certificate()
    assert copy.deepcopy(found) == found
    assert "CERTIFIED" in found.explain()
    assert "norm W <= 3" in found.explain()
    assert "no guarantee is claimed" in certificate(holds=None, radii={}).explain()


# The formulas, written a second time from the papers


def gaussian_sides(readout: Readout, X: Tensor, y: Tensor, d: float, flow: bool) -> tuple[list[list[float]], float, float]:
    Z = readout.solve(X).z.detach()
    cell = readout.cell
    rw, ru, ra = norm(cell.W) + d, norm(cell.U) + d, norm(readout.a[:, None]) + d
    cw, cu, ca = ru * ra / (1 - rw) ** 2, ra / (1 - rw), ru / (1 - rw)
    lam0 = float(np.linalg.eigvalsh((Z @ Z.T).numpy())[0])
    XF, r0 = float(X.norm()), float((Z @ readout.a.detach() - y).norm())
    k = 2 if flow else 4
    found = [
        [lam0, k / d * max(cw, cu, ca) * XF * r0],
        [lam0**1.5, k * (2 + math.sqrt(2)) * (cw**2 + cu**2) * XF**2 * r0 / ra],
        [lam0, 8 * (cw**2 + cu**2) * XF**2],
    ]
    step = min(2 / lam0, 2 * (cw**2 + cu**2) / ((cw**2 + cu**2 + ca**2) ** 2 * XF**2))
    return found[: 2 if flow else 3], step, lam0 if flow else lam0 / 2


def scaled_relu_sides(readout: Readout, X: Tensor, y: Tensor, flow: bool, **C: float) -> tuple[list[list[float]], float, float]:
    Z, cell = readout.solve(X).z.detach(), readout.cell
    l1, l2, l3 = norm(cell.W) + C["C1"], norm(cell.A) + C["C2"], norm(readout.a[:, None]) + C["C3"]
    g0, alpha0 = cell.gamma * l2, float(np.linalg.svd(Z.numpy(), compute_uv=False)[-1])
    XF, r0 = float(X.norm()), float((Z @ readout.a.detach() - y).norm())
    l0 = max(l1 / C["C3"], g0 * l1 * l3 / ((1 - g0) * C["C2"] * l2), l3 / C["C1"])
    K = 1 + g0**2 / (1 - g0) ** 2 * l1**2 / l2**2
    k = 4 if flow else 8
    found = [
        [alpha0**2, k / (1 - g0) * l0 * XF * r0],
        [alpha0**3, K * 2 * k * l3 / (1 - g0) ** 2 * XF**2 * r0],
        [alpha0**2, K * 16 * l3**2 / (1 - g0) ** 2 * XF**2],
    ]
    bar = K * (K * l1**-2 + l3**-2) ** -2
    step = min(4 / alpha0**2, 2 * (1 - g0) ** 2 * bar * l1**-4 * l3**-2 * XF**-2)
    return found[: 2 if flow else 3], step, alpha0**2 / (2 if flow else 4)


def monotone_sides(readout: Readout, X: Tensor, y: Tensor, flow: bool, **R: float) -> tuple[list[list[float]], float, float]:
    Z, cell, m = readout.solve(X).z.detach(), readout.cell, readout.cell.m
    U = cell.U
    if cell.b is not None:
        X, U = torch.cat([X, torch.ones(len(X), 1).double()], 1), torch.cat([cell.U, cell.b[:, None]], 1)
    lA, lU, lu = norm(cell.A) + R["R_A"], norm(U) + R["R_U"], norm(readout.a[:, None]) + R["R_u"]
    lam0, XF = float(np.linalg.svd(Z.numpy(), compute_uv=False)[-1]), float(X.norm())
    r0 = float((Z @ readout.a.detach() - y).norm())
    terms = [
        2 * lU * lu * lA / (m**2 * R["R_A"]),
        lu / (m * R["R_U"]),
        lU / (m * R["R_u"]),
        2 * lU * lu / (m**2 * R.get("R_B", math.inf)),
    ]
    k = 4 if flow else 8
    Q2 = XF**2 * (lu**2 / m**2) * (1 + (4 * lA**2 + 4) * lU**2 / m**2)
    Q1 = XF**2 / m**2 * (lu**2 + lU**2 + lu**2 * lU**2 * (4 * lA**2 + 4) / m**2)
    found = [
        [lam0**2, k * XF * r0 * max(terms)],
        [lam0**3, 2 * k * XF**2 * r0 * (lu / m**2) * (1 + (4 * lA**2 + 4) * lU**2 / m**2)],
        [lam0**2, 16 * Q2],
    ]
    return found[: 2 if flow else 3], min(4 / lam0**2, 2 * Q2 / Q1**2), lam0**2 / (2 if flow else 4)


def by_hand(
    readout: Readout, X: Tensor, y: Tensor, radii: Mapping[str, float], flow: bool = False
) -> tuple[list[list[float]], float, float]:
    """(sides, step, decay)."""
    if isinstance(readout.cell, GaussianDEQ):
        return gaussian_sides(readout, X, y, radii["d"], flow)
    call: Callable[..., tuple[list[list[float]], float, float]] = (
        scaled_relu_sides if isinstance(readout.cell, ScaledReLU) else monotone_sides
    )
    return call(readout, X, y, flow, **radii)


@pytest.mark.parametrize("flow", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_every_condition_are_those_of_the_paper(kind: str, flow: bool) -> None:
    X, y = data(3)
    readout = make(kind)
    with torch.no_grad():
        readout.a.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    found = certify(readout, X, y, RADII[kind], flow=flow)
    np.testing.assert_allclose(sides(found), by_hand(readout, X, y, RADII[kind], flow)[0], rtol=1e-8)
    assert {name: found.radii[name] for name in RADII[kind]} == RADII[kind]
    assert found.kind == ("flow" if flow else "descent")
    assert not found.holds
    assert (found.max_step, found.decay, found.guarantees) == (0.0, 0.0, ())
    assert math.isnan(found.rate)
    assert found.loss == pytest.approx(measure(readout, X, y).loss, rel=1e-9)


def letters(readout: Readout, X: Tensor, radii: Mapping[str, float], found: Certificate) -> dict[str, float]:
    """What the letters of the formulas stand for, where the readout, the data and their residual are as in `found`."""
    cell, Z = readout.cell, readout.solve(X).z.detach()
    sizes = {name: norm(p if p.ndim == 2 else p[:, None]) for name, p in {**dict(cell.named_parameters()), "a": readout.a}.items()}
    known = {"XF": float(X.norm()), "r0": math.sqrt(2 * found.loss), **radii}
    least = float(np.linalg.svd(Z.numpy(), compute_uv=False)[-1])
    if isinstance(cell, GaussianDEQ):
        rho_w, rho_u, rho_a = (sizes[name] + radii["d"] for name in ("W", "U", "a"))
        c = {"c_w": rho_u * rho_a / (1 - rho_w) ** 2, "c_u": rho_a / (1 - rho_w), "c_a": rho_u / (1 - rho_w)}
        return {**known, **c, "rho_a": rho_a, "lam0": least**2}
    if isinstance(cell, ScaledReLU):
        l1, l2, l3 = sizes["W"] + radii["C1"], sizes["A"] + radii["C2"], sizes["a"] + radii["C3"]
        return {**known, "l1": l1, "l3": l3, "gamma": cell.gamma, "gamma_0": cell.gamma * l2, "alpha0": least}
    lA, lU, lu = sizes["A"] + radii["R_A"], sizes["U"] + radii["R_U"], sizes["a"] + radii["R_u"]
    return {**known, "lA": lA, "lU": lU, "lu": lu, "m": cell.m, "R_B": math.inf, "lam0": least}


@pytest.mark.parametrize("flow", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_that_is_shown_is_the_one_that_is_computed(kind: str, flow: bool) -> None:
    X, y = data(3)
    readout = make(kind, **({"bias": False} if kind == "monotone" else {}))
    with torch.no_grad():
        readout.a.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    found = certify(readout, X, y, RADII[kind], flow=flow)
    known = {**letters(readout, X, RADII[kind], found), "sqrt2": math.sqrt(2), "max": max}
    spelling = {" / ": "/", ", ": ",", " + ": "+", "sqrt 2": "sqrt2", "|X|_F": "XF", "[": "(", "]": ")", "^": "**", " ": "*"}
    own = [condition for condition in found.conditions if condition.name.startswith("(")]
    assert len(own) == 3 - flow
    for condition in own:
        shown = condition.formula
        for text, python in spelling.items():
            shown = shown.replace(text, python)
        sides = [eval(side, dict(known)) for side in shown.split("*>=*")]
        assert sides == pytest.approx([condition.lhs, condition.rhs], rel=1e-8), condition


@pytest.mark.parametrize("kind", KINDS)
def test_each_radius_counts_in_the_maximum_of_the_first_condition(kind: str) -> None:
    X, y = data(3)
    readout = make(kind)
    with torch.no_grad():
        readout.a.fill_(1.0)
    for name in RADII[kind]:
        radii = {**RADII[kind], name: 1e-9}
        np.testing.assert_allclose(sides(certify(readout, X, y, radii)), by_hand(readout, X, y, radii)[0], rtol=1e-8)


def test_a_radius_of_B_can_be_asked_for_and_a_bias_of_zero_that_is_frozen_does_not_count() -> None:
    X, y = data(3)
    readout = make("monotone", bias=False)
    radii = {**RADII["monotone"], "R_B": 1e-6}
    np.testing.assert_allclose(sides(certify(readout, X, y, radii)), by_hand(readout, X, y, radii)[0], rtol=1e-8)
    biased = make("monotone")
    with torch.no_grad():
        biased.a.copy_(readout.a)
    biased.cell.b.requires_grad_(False)
    found = certify(biased, X, y, radii)
    np.testing.assert_allclose(sides(found), sides(certify(readout, X, y, radii)), rtol=1e-8)
    assert any("Frozen: b" in note for note in found.notes)
    with torch.no_grad():
        biased.cell.b.fill_(1.0)
    np.testing.assert_allclose(sides(certify(biased, X, y, radii)), by_hand(biased, X, y, radii)[0], rtol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_certified_start_has_the_step_rate_and_conclusions_of_its_theorem(kind: str) -> None:
    X, y = data(3)
    readout = certified(kind)
    found = certify(readout, X, y)
    assert found.holds
    assert found.failing == ()
    _, step, decay = by_hand(readout, X, y, found.radii)
    assert found.max_step == pytest.approx(step, rel=1e-6)
    assert found.max_step <= step
    assert found.decay == pytest.approx(decay, rel=1e-6)
    assert found.rate == 1 - found.max_step * found.decay < 1
    now = measure(readout, X, y, dict(readout.named_parameters()))
    assert found.loss == pytest.approx(now.loss, rel=1e-9)
    for guarantee in found.guarantees:
        value = now.quantities[guarantee.quantity]
        assert value <= guarantee.bound if guarantee.sense == "<=" else value >= guarantee.bound
    names = {g.quantity for g in found.guarantees}
    assert {"sigma_min Z", "norm a", "moved a"} < names
    least = now.sigma_min / (math.sqrt(2) if kind == "gaussian" else 2)
    bounds = {g.quantity: g.bound for g in found.guarantees}
    assert bounds["sigma_min Z"] == pytest.approx(least, rel=1e-9)
    for weight, radius in BALLS[kind].items():
        assert bounds[f"moved {weight}"] == found.radii[radius]
        assert bounds[f"norm {weight}"] == pytest.approx(now.quantities[f"norm {weight}"] + found.radii[radius], rel=1e-9)
    if kind == "monotone":  # what (3.16) asks of R_B
        lU, lu, XF = bounds["norm [U b]"], bounds["norm a"], float(torch.cat([X, torch.ones(3, 1)], 1).norm())
        path = 16 * XF * now.residual * lU * lu / (readout.cell.m * now.sigma_min) ** 2
        assert bounds["moved B"] == pytest.approx(path, rel=1e-6)
    again = certify(readout, X, y, found.radii)
    assert again.holds
    assert again.max_step == found.max_step
    text = found.explain()
    assert "CERTIFIED" in text
    assert "tangent kernel" in text
    assert "halved in" in text


# What descent does


def descend(readout: Readout, X: Tensor, y: Tensor, step: float) -> None:
    loss = (readout(X) - y).square().sum() / 2
    parts = torch.autograd.grad(loss, list(readout.parameters()))
    with torch.no_grad():
        for parameter, part in zip(readout.parameters(), parts, strict=True):
            parameter -= step * part


def check_descent(readout: Readout, X: Tensor, y: Tensor, found: Certificate, steps: int) -> float:
    """Every conclusion at every step; the ratio of the last loss to the first."""
    assert found.holds
    start = {name: p.detach().clone() for name, p in readout.named_parameters()}
    for k in range(steps + 1):
        now = measure(readout, X, y, start)
        assert now.loss <= found.loss_bound(k) * (1 + 1e-9)
        for guarantee in found.guarantees:
            value = now.quantities[guarantee.quantity]
            slack = 1e-9 * guarantee.bound
            assert value <= guarantee.bound + slack if guarantee.sense == "<=" else value >= guarantee.bound - slack, guarantee
        descend(readout, X, y, found.max_step)
    return now.loss / found.loss


@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_descent_from_a_certified_start_obeys_every_conclusion(kind: str, sharp: bool) -> None:
    X, y = data(3)
    readout = certified(kind)
    found = certify(readout, X, y, sharp=sharp)
    assert check_descent(readout, X, y, found, 4) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_sharp_step_is_larger_and_has_the_same_conditions(kind: str) -> None:
    X, y = data(3)
    readout = certified(kind)
    printed = certify(readout, X, y)
    sharp = certify(readout, X, y, printed.radii, sharp=True)
    assert sides(sharp).tolist() == sides(printed).tolist()
    assert sharp.max_step > 8 * printed.max_step
    cell, radii = readout.cell, printed.radii
    if kind == "gaussian":
        size = (norm(cell.U) + radii["d"]) / (1 - norm(cell.W) - radii["d"]) * X.norm()
    elif kind == "scaled_relu":
        size = (norm(cell.W) + radii["C1"]) / (1 - cell.gamma * (norm(cell.A) + radii["C2"])) * X.norm()
    else:
        joined = torch.cat([cell.U, cell.b[:, None]], 1)
        size = (norm(joined) + radii["R_U"]) / cell.m * torch.cat([X, torch.ones(3, 1)], 1).norm()
    assert sharp.max_step == pytest.approx(1 / float(size) ** 2, rel=1e-9)  # 1 / ||Z||_F^2 within the radii
    assert any("sharp=True" in note for note in printed.notes)


@settings(max_examples=60)
@given(st.floats(-3, 3), st.floats(0, 4), st.floats(0, 4), st.floats(0, 1))
def test_the_last_step_of_the_induction_gives_the_claimed_factor(scale: float, above: float, size: float, part: float) -> None:
    """1 - eta (decay + ...) <= 1 - eta decay, printed and sharp, for all lam0 >= 8 S or 16 Q2 and all admissible steps."""
    Q = 10.0**scale  # S or Q2
    s2 = 4 * Q * 10.0**above  # the decay: lam0/2 or lam0^2/4; sigma_min(Z(0))^2 is at least 2 s2
    Z2 = 2 * s2 * 10.0**size  # sup ||Z||^2
    C = Q + Z2
    eta = part * min(1 / s2, 2 * Q / C**2)
    assert 1 - 2 * eta * s2 + 2 * eta * Q + eta**2 * C**2 <= 1 - eta * s2 + 1e-12
    eta = part / Z2
    assert (1 - eta * s2 + eta * Q) ** 2 <= 1 - eta * s2 + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_flows_need_less_than_descent(kind: str) -> None:
    X, y = data(3)
    descent = certify(certified(kind), X, y)
    readout = certified(kind, flow=True)
    found = certify(readout, X, y, flow=True)
    assert found.holds
    assert found.rate == found.decay > 0
    assert found.max_step == 0
    assert not certify(readout, X, y).holds or kind == "gaussian"
    assert len(found.conditions) == len(descent.conditions) - 1
    assert "the time" in found.explain()
    with pytest.raises(ValueError, match="'sharp' parameter of certify must be False for a flow"):
        certify(readout, X, y, flow=True, sharp=True)


def test_the_gaussian_flow_says_that_the_paper_has_none() -> None:
    X, y = data(2)
    assert "The paper states descent only" in certify(make("gaussian"), X, y, flow=True).explain()


def test_a_frozen_weight_of_the_cell_is_harmless_and_a_frozen_readout_is_refused() -> None:
    X, y = data(3)
    readout = certified("scaled_relu")
    readout.cell.W.requires_grad_(False)
    found = certify(readout, X, y)
    assert found.holds
    assert any("Frozen: W" in note for note in found.notes)
    readout.a.requires_grad_(False)
    with pytest.raises(TypeError, match="'a' is trained"):
        certify(readout, X, y)


# The search for radii


def theorem_of(readout: Readout, X: Tensor, y: Tensor, flow: bool = False) -> Theorem:
    kinds: dict[type, type[Theorem]] = {GaussianDEQ: GaussianTheorem, ScaledReLU: ScaledReLUTheorem, Monotone: MonotoneTheorem}
    return kinds[type(readout.cell)](observe(readout, X, y), flow)


def least_slack(theorem: Theorem, radii: Mapping[str, float]) -> float:
    return min(lhs / rhs for lhs, rhs in theorem.sides(radii))


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_radii_have_a_better_slack(kind: str) -> None:
    X, y = data(3)
    readout = make(kind)
    with torch.no_grad():
        readout.a.zero_()
    theorem = theorem_of(readout, X, y)
    best = best_radii(theorem)
    rng, limits = np.random.default_rng(0), theorem.limits()
    for spread in (3.0, 0.3, 0.03):
        for t in spread * rng.normal(size=(200, len(theorem.names))):
            other = {n: min(best[n] * math.exp(s), 0.999 * limits[n]) for n, s in zip(theorem.names, t, strict=True)}
            assert least_slack(theorem, other) <= least_slack(theorem, best) * 1.01


@pytest.mark.parametrize("kind", KINDS)
def test_where_there_is_room_the_radii_give_a_larger_step_than_those_of_the_best_slack(kind: str) -> None:
    X, y = data(3)
    readout = certified(kind)
    with torch.no_grad():
        (readout.cell.W if kind == "scaled_relu" else readout.cell.U).mul_(30)
    theorem = theorem_of(readout, X, y)
    slackest, fastest = best_radii(theorem, progress=False), best_radii(theorem)
    assert least_slack(theorem, slackest) > least_slack(theorem, fastest) > 1
    assert theorem.max_step(fastest) > 1.05 * theorem.max_step(slackest)


def test_no_radius_is_so_small_that_rounding_would_leave_its_ball() -> None:
    X, y = data(3)
    found = certify(certified("monotone"), X, y)
    sizes = {g.quantity: g.bound for g in found.guarantees}
    assert sizes["moved [U b]"] >= 0.99e-6 * sizes["norm [U b]"]


@pytest.mark.parametrize(
    ("radii", "text"),
    [
        ({"d": 1.0}, "the keys R_A, R_U, R_u"),
        ({"R_A": 1.0, "R_U": 1.0}, "the keys R_A, R_U, R_u"),
        ([1.0], "the keys R_A, R_U, R_u"),
        ({"R_A": 1.0, "R_U": -1.0, "R_u": 1.0}, r"positive finite numbers in \[1e-40, 1e\+40\], also for R_U"),
        ({"R_A": 1.0, "R_U": 1e-200, "R_u": 1.0}, "also for R_U"),
        ({"R_A": 1.0, "R_U": 1.0, "R_u": 1e200}, "also for R_u"),
        ({"R_A": math.inf, "R_U": 1.0, "R_u": 1.0}, "also for R_A"),
        ({"R_A": True, "R_U": 1.0, "R_u": 1.0}, "also for R_A"),
        ({"R_A": 1.0, "R_U": 1.0, "R_u": math.nan}, "also for R_u"),
    ],
)
def test_radii_of_the_caller_are_checked(radii: object, text: str) -> None:
    X, y = data(2)
    with pytest.raises(ValueError, match=f"'radii' parameter of certify must be .*{text}"):
        certify(make("monotone"), X, y, radii)  # type: ignore[arg-type]


# Rounding and the solver's error are on the safe side


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_at_the_start_are_on_the_safe_side(kind: str) -> None:
    X, y = data(4)
    for seed in range(5):
        readout = make(kind, seed=seed)
        start = observe(readout, X, y)
        exact = Equilibrium(readout.cell, stop=Stop(rtol=1e-15, max_steps=3000), on_failure="ignore").solve(X).z.detach()
        sigma = float(np.linalg.svd(exact.numpy(), compute_uv=False)[-1])
        assert sigma * (1 - 1e-9) < start.sigma < sigma
        r0 = float((exact @ readout.a.detach() - y).norm())
        assert r0 < start.r0 < r0 * (1 + 1e-9)
        for name, value in start.norms.items():
            weight = readout.a[:, None] if name == "a" else getattr(readout.cell, name, None)
            if weight is not None:
                assert norm(weight) <= value <= norm(weight) * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_an_equilibrium_that_is_not_found_certifies_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sigma_min is lowered, and |y^ - y| raised, by the distance to the equilibrium: a crude solve costs the certificate alone."""
    X, y = data(3)
    readout, loud = certified(kind), certified(kind)
    loud.a.data.fill_(1.0)
    true, residual = measure(readout, X, y).sigma_min, measure(loud, X, y).residual
    for steps in (1, 5, 20):
        crude = Equilibrium(readout.cell, stop=Stop(rtol=0.0, max_steps=steps), on_failure="ignore")
        monkeypatch.setattr("opteq.theory.certificates.start.tight_solution", lambda r, X, crude=crude: crude.solve(X))
        assert observe(readout, X, y).sigma <= true
        assert observe(loud, X, y).r0 >= residual
    monkeypatch.setattr(
        "opteq.theory.certificates.start.tight_solution",
        lambda r, X: Equilibrium(readout.cell, stop=Stop(rtol=0.0, max_steps=1), on_failure="ignore").solve(X),
    )
    assert not certify(readout, X, y).holds


# Models that are not well-posed, and data that no width can tell apart


def with_attribute(kind: str, name: str, value: float) -> Readout:
    readout = make(kind)
    setattr(readout.cell, name, value)
    return readout


@pytest.mark.parametrize(
    ("readout", "condition", "number"),
    [
        (with_attribute("monotone", "m", -0.1), "well-posed", "-0.1"),
        (with_attribute("monotone", "m", 0.0), "well-posed", "it is 0"),
        (with_attribute("scaled_relu", "gamma", -0.1), "well-posed", "-0.1"),
        (make("scaled_relu", gamma=1.0), "well-posed", "1/||A|| = 1"),
        (make("scaled_relu", gamma=0.1, init="half_normal"), "well-posed", "1/(2 ||A||)"),
        (make("gaussian", sigma_w2=0.2), "well-posed", "sigma_w2 = 0.2"),
        (make("gaussian", width=3), "width", "N = 4"),
        (make("scaled_relu", width=3), "width", "N = 4"),
        (make("monotone", width=3), "width", "N = 4"),
    ],
)
@pytest.mark.parametrize("flow", [False, True])
def test_an_ill_posed_model_gets_a_failing_condition_with_its_numbers(
    readout: Readout, condition: str, number: str, flow: bool
) -> None:
    X, y = data(4)
    found = certify(readout, X, y, flow=flow)
    assert found.holds is False
    assert not slack_of(found, condition).holds
    assert condition in (c.name for c in found.failing)
    assert number in found.explain()
    assert found.guarantees == ()


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_inputs_are_found_and_named(kind: str) -> None:
    X, y = data(5)
    X[3] = 2.5 * X[1]
    readout = make(kind, **({"bias": False} if kind == "monotone" else {}))
    with torch.no_grad():
        readout.a.zero_()
        (readout.cell.W if kind == "scaled_relu" else readout.cell.U).mul_(1e6)
    found = certify(readout, X, y)
    assert found.holds is False
    assert not slack_of(found, "inputs").holds
    assert not slack_of(found, "rank").holds
    assert "x_1 and x_3 give parallel rows" in found.explain()
    with pytest.raises(ValueError, match="x_1 and x_3 give parallel rows"):
        certified_init(readout, X, y)


def test_opposite_inputs_are_no_obstacle_and_zero_or_equal_ones_are() -> None:
    X, y = data(3)
    X[2] = -X[0]
    assert certify(certified_init(make("scaled_relu", width=60), X, y), X, y).holds
    X[2] = 0
    assert "x_2 = 0 gives a row of zeros" in certify(make("scaled_relu"), X, y).explain()
    biased = make("monotone")
    assert "begin with a bias b that is not 0: x_2 = 0 gives" in certify(biased, X, y).explain()
    with torch.no_grad():
        biased.cell.b.fill_(0.1)
    assert slack_of(certify(biased, X, y), "inputs").holds
    assert slack_of(certify(biased, X, y), "rank").holds
    X[2] = X[0]
    for activation in ("relu", "tanh"):
        assert not slack_of(certify(make("monotone", activation=activation), X, y), "rank").holds
    one = certify(make("scaled_relu"), X[:1], y[:1])
    assert "inputs" not in (c.name for c in one.conditions)


def test_no_width_suffices_for_the_readout_of_the_gaussian_paper() -> None:
    X, y = data(3)
    for width in (50, 200):
        text = certify(make("gaussian", width=width), X, y).explain()
        assert "no width suffices" in text
        assert "(1 - rho_w)/sqrt(8 n)" in text
        assert "a = 0" in text


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_the_limits_on_the_readout_are_those_that_explain_prints(seed: int) -> None:
    """Even at the largest sigma_min that ||Z||_F allows, the last condition fails once |a| + radius is above the limit."""
    rng = np.random.default_rng(seed)
    N, XF, R = int(rng.integers(1, 20)), *np.exp(rng.normal(size=2)).tolist()
    w = dict(zip("WUAB", np.exp(rng.normal(size=4)), strict=True))

    def at(theorem: type[Theorem], a: float, constant: float, size: float, radii: dict[str, float]) -> float:
        start = Start(N, N, XF, {**w, "a": a}, constant, math.inf, (0, 0), 0.0, size / math.sqrt(N), 1.0)
        lhs, rhs = theorem(start, False).sides(radii)[2]
        return lhs / rhs

    w["W"] = 0.6
    limit = (1 - 0.7) / math.sqrt(8 * N)
    assert at(GaussianTheorem, limit * 1.001 - 0.1, 0.08, (w["U"] + 0.1) * XF / 0.3, {"d": 0.1}) < 1
    m, radii = 0.7, {"R_A": R, "R_U": R, "R_u": 0.01}
    limit = m / (4 * math.sqrt(N * (4 * (w["A"] + R) ** 2 + 4)))
    assert at(MonotoneTheorem, limit * 1.001 - 0.01, m, (w["U"] + R) * XF / m, radii) < 1
    gamma = 0.5 / (w["A"] + R)
    limit = 0.5 / (4 * gamma * math.sqrt(N))
    radii = {"C1": R, "C2": R, "C3": 0.01}
    assert at(ScaledReLUTheorem, limit * 1.001 - 0.01, gamma, (w["W"] + R) * XF / 0.5, radii) < 1


@pytest.mark.parametrize("kind", ["scaled_relu", "monotone"])
def test_a_readout_that_is_too_large_is_said_to_be(kind: str) -> None:
    X, y = data(3)
    readout = make(kind)
    with torch.no_grad():
        readout.a.fill_(10.0)
    assert "no width and no scale of" in certify(readout, X, y).explain()
    with torch.no_grad():
        readout.a.zero_()
    text = certify(readout, X, y).explain()
    assert "no width" not in text
    assert "scaled up (certified_init)" in text


# certified_init


@pytest.mark.parametrize("kind", KINDS)
def test_certified_init_finds_the_smallest_scale_and_leaves_the_original_alone(kind: str) -> None:
    X, y = data(3)
    readout = make(kind, width=40)
    injection = {"gaussian": ("U",), "scaled_relu": ("W",), "monotone": ("U", "b")}[kind]
    if kind == "monotone":
        readout.cell.b.data.fill_(0.1)
    before = {name: p.detach().clone() for name, p in readout.named_parameters()}
    made = certified_init(readout, X, y)
    assert certify(made, X, y).holds
    assert all(torch.equal(p, before[name]) for name, p in readout.named_parameters())
    assert not made.a.detach().any()
    scale = norm(getattr(made.cell, injection[0])) / norm(getattr(readout.cell, injection[0]))
    for name, p in made.cell.named_parameters():
        torch.testing.assert_close(p.detach(), (scale if name in injection else 1.0) * before[f"cell.{name}"])
    with torch.no_grad():
        for name in injection:
            getattr(made.cell, name).div_(1.12)
    assert not certify(made, X, y).holds


def test_certified_init_repairs_gamma_and_the_norm_of_W() -> None:
    X, y = data(2)
    made = certified_init(make("scaled_relu", gamma=0.5, init="half_normal", width=40), X, y)
    assert made.cell.gamma == pytest.approx(1 / (2 * norm(made.cell.A)))
    assert certify(made, X, y).holds
    made = certified_init(make("gaussian", sigma_w2=0.5, width=60), X, y)
    assert norm(made.cell.W) == pytest.approx(0.5)
    assert certify(made, X, y).holds


def test_certified_init_says_what_stands_in_the_way() -> None:
    X, y = data(4)
    with pytest.raises(ValueError, match=r"(?s)no scale.*Take a width of at least N = 4"):
        certified_init(make("scaled_relu", width=3), X, y)
    with pytest.raises(ValueError, match=r"(?s)no scale up to 8 .*scale U up"):
        certified_init(make("monotone"), X, y, max_scale=8.0)
    with pytest.raises(ValueError, match=r"(?s)Choose m > 0"):
        certified_init(with_attribute("monotone", "m", -1.0), X, y)
    with pytest.raises(TypeError, match="'readout' parameter of certified_init must be a Readout on"):
        certified_init(Readout(OptEq(5, 6, 4).double()), X, y)


def test_labels_that_are_already_met_need_no_scale() -> None:
    X, _ = data(3)
    made = certified_init(make("monotone"), X, torch.zeros(3).double())
    found = certify(made, X, torch.zeros(3).double())
    assert found.holds
    assert found.loss == 0
    assert slack_of(found, "(3.16)").slack == math.inf


@pytest.mark.parametrize("seed", range(2))
def test_the_scaling_recipe_of_the_scaled_relu_paper_reaches_a_certificate(seed: int) -> None:
    """Section 5.1 at N = 8, m = 64, beta = 1000: theta(0) times beta, A = ||W|| I, gamma = 1/(2 lambda_2)."""
    X, y = data(8, 10, seed)
    X = X / X.norm(dim=1, keepdim=True)
    readout = make("scaled_relu", d=10, width=64, seed=seed, init="scaled_identity", gamma=1e-3)
    with torch.no_grad():
        readout.cell.W.mul_(1000)
        readout.cell.A.mul_(1000)
    readout.cell.gamma = 1 / (2 * (norm(readout.cell.A) + 1))
    found = certify(readout, X, y)
    assert found.holds
    assert found.max_step < 1e-9


def test_a_monotone_network_scaled_by_1e5_is_certified() -> None:
    X, y = data(4, 10)
    readout = make("monotone", d=10, width=40, m=0.8, bias=False)
    with torch.no_grad():
        readout.cell.U.mul_(1e5)
        readout.a.zero_()
    found = certify(readout, X, y)
    assert found.holds
    assert 0 < found.max_step < 1e-12


# Refusals


class Other(Monotone):
    """A subclass may be another network."""


def shifted() -> Activation:
    return Activation("shifted", lambda a: torch.relu(a + 1), lipschitz=1.0)


@pytest.mark.parametrize(
    ("make_cell", "text"),
    [
        (lambda: Monotone(5, 20, activation="softplus"), r"sigma\(0\) = 0.693"),
        (lambda: Monotone(5, 20, activation=shifted()), r"sigma\(0\) = 1"),
        (lambda: Other(5, 20), "Readout on Other"),
    ],
)
def test_a_network_that_the_proofs_do_not_cover_is_refused(make_cell: Callable[[], Cell], text: str) -> None:
    X, y = data(3)
    with pytest.raises(TypeError, match=f"'readout' parameter of certify must be .*{text}"):
        certify(Readout(make_cell().double()), X, y)


def test_other_activations_that_the_proof_covers_are_certified() -> None:
    X, y = data(2)
    readout = certified_init(make("monotone", activation="leaky_relu", width=40), X, y)
    assert check_descent(readout, X, y, certify(readout, X, y, sharp=True), 3) < 1


@pytest.mark.parametrize("call", [certify, certified_init, measure])
def test_data_and_models_that_make_no_sense_are_refused_by_name(call: Callable[..., object]) -> None:
    X, y = data(3)
    nan = torch.full_like(y, math.nan)
    broken = make("monotone")
    with torch.no_grad():
        broken.cell.A[0, 0] = math.nan
    cases: list[tuple[object, object, object, type[Exception], str]] = [
        (make("monotone"), X, y[:, None], ValueError, "'y' .*of shape \\[3\\]"),
        (make("monotone"), X, y[:2], ValueError, "'y' "),
        (make("monotone"), X, nan, ValueError, "'y' .*finite"),
        (make("monotone"), X * math.inf, y, ValueError, "'X' .*finite"),
        (make("monotone"), X[0], y, ValueError, "'X' .*of shape \\[N, 5\\]"),
        (make("monotone"), X[:0], y[:0], ValueError, "'X' .*N >= 1"),
        (make("monotone"), X[:, :4], y, ValueError, "'X' .*of shape \\[N, 5\\]"),
        (make("monotone"), X.long(), y, TypeError, "'X' .*floating"),
        (make("monotone"), X, y.long(), TypeError, "'y' .*floating"),
        (broken, X, y, ValueError, "'readout' .*finite in 'cell.A'"),
        ("a network", X, y, TypeError, "'readout' "),
    ]
    for readout, inputs, labels, error, text in cases:
        with pytest.raises(error, match=f"The {text}" if text.startswith("'readout'") else text):
            call(readout, inputs, labels)


class Louder(Readout):
    """A subclass may be another network, too."""

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, z0)


def test_subclasses_and_shared_parameters_are_refused() -> None:
    X, y = data(3)
    louder = Louder(Monotone(5, 20).double())
    for call in (certify, certified_init):
        with pytest.raises(TypeError, match=f"'readout' parameter of {call.__name__} must be .*no subclasses"):
            call(louder, X, y)
    for owner, measured in {
        "measure": lambda: measure(louder, X, y),
        "Monitor": lambda: Monitor(louder, X, y),
        "descend": lambda: run_of(louder, X, y, 0.1, 1),
        "gradient_flow": lambda: gradient_flow(louder, X, y, [0.0]),
    }.items():
        with pytest.raises(TypeError, match=f"{owner} does not know what Louder computes: .* a forward of its own"):
            measured()
    shared = make("monotone")
    shared.cell.B = shared.cell.A
    with pytest.raises(TypeError, match="parameters are not shared"):
        certify(shared, X, y)


def test_single_precision_certifies_nothing_and_is_measured_by_nobody() -> None:
    X, y = data(3)
    single = certified("scaled_relu").float()
    found = certify(single, X.float(), y.float())
    assert [c.name for c in found.failing] == ["precision"]
    assert slack_of(found, "precision").lhs == 24
    assert "Call .double()" in found.explain()
    assert next(single.parameters()).dtype == torch.float32
    with pytest.raises(TypeError, match=r"must be in float64 \(call .double\(\)\) in 'a'.*Got torch.float32 instead"):
        measure(single, X, y)
    made = certified_init(single, X, y)
    assert made.a.dtype == torch.float64
    assert certify(made, X, y).holds


def times(readout: Readout, name: str, factor: float) -> Readout:
    with torch.no_grad():
        readout.get_parameter(name).mul_(factor)
    return readout


@pytest.mark.parametrize("factor", [1e-165, 1e-60, 1e60, 1e165])
@pytest.mark.parametrize("call", [certify, certified_init])
def test_sizes_whose_powers_leave_float64_are_refused_by_name(call: Callable[..., object], factor: float) -> None:
    """Norms that square underflow below 1e-162: all right sides were 0 there, and everything was certified."""
    X, y = data(3)
    readout = certified("gaussian")
    for name, inputs, labels in (("X", factor * X, y), ("y", X, factor * y)):
        with pytest.raises(ValueError, match=rf"The '{name}' parameter of certify must be .* 0 or in \[1e-40, 1e\+40\]"):
            call(readout, inputs, labels)
    for kind, name in (("gaussian", "U"), ("monotone", "B"), ("scaled_relu", "W")):
        with pytest.raises(ValueError, match=rf"'readout' .* size of '{name}' is 0 or in \[1e-40"):
            call(times(make(kind, **({"bias": False} if kind == "monotone" else {})), f"cell.{name}", factor), X, y)
    for kind, name in (("scaled_relu", "gamma"), ("monotone", "m")):
        with pytest.raises(ValueError, match=f"'readout' .* size of 'cell.{name}' is 0 or in"):
            call(with_attribute(kind, name, factor), X, y)


def test_tiny_inputs_with_huge_weights_are_not_certified() -> None:
    X, y = data(3)
    with pytest.raises(ValueError, match="'X' parameter of certify"):
        certify(times(certified("gaussian"), "cell.U", 1e146), 1e-165 * X, y)
    frozen = times(certified("monotone"), "cell.U", 1e146)
    frozen.cell.b.requires_grad_(False)
    with pytest.raises(ValueError, match="'X' parameter of certify"):
        certify(frozen, 1e-162 * X, 1e-20 * y, flow=True)


def test_norms_are_right_where_squares_underflow() -> None:
    for size in (1e-165, 1e-200, 1e200):
        assert upper_norm(torch.tensor([3 * size, 4 * size], dtype=torch.float64)) == pytest.approx(5 * size, rel=1e-10, abs=0)
        assert upper_norm(size * torch.eye(2).double()) == pytest.approx(size, rel=1e-10, abs=0)


def test_outputs_far_from_the_labels_are_refused_and_a_tiny_residual_is_rounded_up() -> None:
    X, y = data(3)
    far = times(times(make("monotone"), "a", 1e30), "cell.U", 1e30)
    with pytest.raises(ValueError, match=r"'y' parameter of certify must be within 1e\+40 of the outputs"):
        certify(far, X, y)
    near = times(certified("scaled_relu"), "a", 0.0)
    with torch.no_grad():
        near.a[0] = 1e-39
    assert observe(near, 1e-10 * X, 0 * y).r0 == 1e-40
    assert observe(times(near, "a", 0.0), X, 0 * y).r0 == 0


def test_states_too_small_to_be_cubed_have_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = data(3)
    monkeypatch.setattr("opteq.theory.certificates.start._TINY", 1e-70)
    readout = times(make("gaussian"), "cell.U", 1e-30)
    assert observe(readout, 1e-35 * X, y).sigma > 0
    assert observe(readout, 1e-39 * X, y).sigma > 0
    assert observe(times(readout, "cell.U", 1e-8), 1e-39 * X, y).sigma == 0
    assert not certify(readout, 1e-39 * X, 0 * y).holds


CORNERS = st.sampled_from([1e-40, 1e-25, 1.0, 1e25, 1e40])


@settings(max_examples=200)
@given(st.sampled_from([GaussianTheorem, ScaledReLUTheorem, MonotoneTheorem]), st.booleans(), st.booleans(), st.data())
def test_no_size_in_the_range_makes_a_right_side_or_a_step_wrong(
    theorem: type[Theorem], flow: bool, sharp: bool, draw: st.DataObject
) -> None:
    """The same formulas in numbers of any exponent: no right side is smaller, no left side or step larger, than they are."""
    values = {name: draw.draw(CORNERS, label=name) for name in (*"AUBW", "a", "X", "sigma", "constant", *theorem.names)}
    values["r0"] = draw.draw(st.one_of(CORNERS, st.just(0.0)), label="r0")
    if theorem is GaussianTheorem:
        values |= {"W": min(values["W"], 0.5), "d": min(values["d"], 0.25)}
    if theorem is ScaledReLUTheorem:
        values["constant"] = min(values["constant"], 0.25 / max(values["A"], values["C2"]))

    def at(number: Callable[[float], Any]) -> tuple[Theorem, dict[str, Any]]:
        v = {name: number(value) for name, value in values.items()}
        norms = {name: v[name] for name in (*"AUBW", "a")}
        start = Start(3, 3, v["X"], norms, v["constant"], math.inf, (0, 0), 0.0, v["sigma"], v["r0"])
        return theorem(start, flow, sharp and not flow), {name: v[name] for name in theorem.names}

    (found, radii), (true, true_radii) = at(float), at(mpmath.mpf)
    for (lhs, rhs), (true_lhs, true_rhs) in zip(found.sides(radii), true.sides(true_radii), strict=True):
        assert lhs <= true_lhs * (1 + 1e-9) or true_lhs > 1e308
        assert rhs >= true_rhs * (1 - 1e-9)
    step = found.max_step(radii)
    if not flow and all(c.holds for c in found.conditions(radii)[-3:]) and step >= 1e-290:
        assert step <= true.max_step(true_radii) * (1 + 1e-9)


def test_a_step_that_vanishes_in_float64_certifies_nothing() -> None:
    X, y = data(3)
    X, y = 1e39 * X, 0 * y
    readout = times(make("scaled_relu", gamma=1e-39), "cell.W", 1e39)
    radii = {"C1": 1.0, "C2": 1.0, "C3": 1e-40}
    found = certify(readout, X, y, radii)
    assert [c.name for c in found.failing] == ["step"]
    assert (found.holds, found.max_step) == (False, 0.0)
    assert "the admissible step is too small for float64" in found.explain()
    assert found.half_life == math.inf
    for option in ("flow", "sharp"):
        assert certify(readout, X, y, radii, **{option: True}).holds  # type: ignore[arg-type]


def test_the_search_goes_on_where_the_step_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = data(3)
    readout = certified("gaussian")
    monkeypatch.setattr(GaussianTheorem, "stated_step", lambda self, radii: 0.0)
    assert [c.name for c in certify(readout, X, y).failing] == ["step"]
    with pytest.raises(ValueError, match=r"(?s)certified_init found no scale that is certified.*too small for float64"):
        certified_init(readout, X, y)


def test_certified_init_ends_at_the_largest_norm_and_where_nothing_is_known_of_the_slack() -> None:
    X, y = data(3)
    with pytest.raises(ValueError, match=r"(?s)certified_init found no scale up to .*condition"):
        certified_init(make("scaled_relu"), X, 1e39 * y, max_scale=1e300)
    with pytest.raises(ValueError, match=r"(?s)certified_init found no scale.*condition"):
        certified_init(make("monotone", m=1e-40), X, 1e39 * y, max_scale=1e4)
    empty = times(make("scaled_relu"), "cell.W", 0.0)
    with pytest.raises(ValueError, match=r"(?s)certified_init found no scale.*rank"):
        certified_init(empty, X, y)


def test_a_right_side_that_overflows_asks_for_the_largest_growth() -> None:
    assert growth(certificate(holds=False, conditions=(Condition("c", "", 1.0, math.inf),))) == 64
    assert growth(certificate(holds=False, conditions=(Condition("c", "", 1.0, 9.0),))) == 9


@pytest.mark.parametrize("theorem", [GaussianTheorem, ScaledReLUTheorem, MonotoneTheorem])
def test_the_stated_step_is_right_where_its_denominator_would_underflow(theorem: type[Theorem]) -> None:
    def step(number: Callable[[float], Any]) -> Any:
        tiny = number(1e-40)
        start = Start(3, 3, tiny, dict.fromkeys("AUBWa", tiny), number(1e40), math.inf, (0, 0), 0.0, number(1e-95), tiny)
        start = replace(start, constant=number(1.0)) if theorem is ScaledReLUTheorem else start
        return theorem(start, False).stated_step(dict.fromkeys(theorem.names, tiny))

    assert step(float) == pytest.approx(float(step(mpmath.mpf)), rel=1e-9)


@pytest.mark.parametrize("call", [certify, certified_init])
@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    [
        ("scaled_relu", "gamma", nn.Parameter(torch.tensor(0.1)), TypeError),
        ("scaled_relu", "gamma", torch.tensor(0.1), TypeError),
        ("scaled_relu", "gamma", math.inf, ValueError),
        ("monotone", "m", nn.Parameter(torch.tensor(0.8)), TypeError),
        ("monotone", "m", "0.8", TypeError),
        ("monotone", "m", True, TypeError),
        ("monotone", "m", math.nan, ValueError),
        ("gaussian", "sigma_w2", "a", TypeError),
        ("gaussian", "sigma_w2", math.nan, ValueError),
        ("gaussian", "sigma_w2", -1.0, ValueError),
    ],
)
def test_a_constant_that_is_no_number_is_named(
    kind: str, name: str, value: Any, error: type[Exception], call: Callable[..., object]
) -> None:
    X, y = data(3)
    with pytest.raises(error, match=f"'readout' parameter of {call.__name__} must be .*'cell.{name}'"):
        call(with_attribute(kind, name, value), X, y)


def normalized(readout: Readout) -> Readout:
    nn.utils.parametrizations.weight_norm(readout.cell, "U")
    return readout


def buffered(readout: Readout) -> Readout:
    value = readout.cell.U.detach()
    del readout.cell.U
    readout.cell.register_buffer("U", value)
    return readout


def extended(readout: Readout) -> Readout:
    readout.more = nn.Parameter(torch.zeros(2).double())
    return readout


def overlaid(readout: Readout) -> Readout:
    readout.cell.B = nn.Parameter(readout.cell.A.data)
    return readout


@pytest.mark.parametrize("call", [certify, certified_init])
@pytest.mark.parametrize(
    ("change", "text"),
    [(normalized, "Readout"), (buffered, "not made from others"), (extended, "and no more"), (overlaid, "not shared")],
)
def test_parameters_that_are_not_those_of_the_theorem_are_refused(
    change: Callable[[Readout], Readout], text: str, call: Callable[..., object]
) -> None:
    X, y = data(3)
    with pytest.raises(TypeError, match=f"'readout' parameter of {call.__name__} must be .*{text}"):
        call(change(make("monotone")), X, y)


@pytest.mark.parametrize("call", [certify, certified_init, measure])
def test_a_readout_of_another_length_is_refused(call: Callable[..., object]) -> None:
    X, y = data(3)
    for a in (torch.zeros(3), torch.zeros(1, 30)):
        readout = make("monotone")
        readout.a = nn.Parameter(a.double())
        with pytest.raises(ValueError, match=rf"'readout' parameter of {call.__name__} must be .*'a' of shape \[30\]"):
            call(readout, X, y)


def test_inputs_in_single_precision_are_taken_as_they_are() -> None:
    X, y = data(3)
    found = certify(make("monotone"), X.float(), y.float())
    np.testing.assert_allclose(sides(found), sides(certify(make("monotone"), X.float().double(), y.float().double())))


def test_a_readout_that_solves_loosely_is_told_so() -> None:
    X, y = data(3)
    made = certified("scaled_relu")
    loose = Readout(made.cell, stop=Stop(rtol=1e-3, max_steps=1), on_failure="ignore")
    found = certify(loose, X, y)
    assert found.holds
    assert any("to rtol 0.001 only" in note for note in found.notes)
    assert not any("tangent kernel" in note for note in found.notes)


# OptEq


def test_assumption_5_is_checked_layer_by_layer_and_promises_nothing() -> None:
    X, y = data(3)
    deep = DeepOptEq([OptEq(5, 8, 6), OptEq(5, 8, 4, activation="leaky_relu", alpha=0.3)]).double()
    found = certify(nn.Sequential(Equilibrium(deep), nn.Linear(8, 1).double()), X, y)
    assert found.holds is None
    assert found.kind == "assumption"
    assert slack_of(found, "||W_2||").rhs == pytest.approx(norm(deep.cells[1].W))
    least = float(np.linalg.svd(deep.cells[0].W.detach().numpy(), compute_uv=False)[-1])
    assert slack_of(found, "sigma_min(W_1)").lhs == pytest.approx(least)
    assert slack_of(found, "alpha K L").rhs == 2.0
    assert not slack_of(found, "slope_1").holds
    assert slack_of(found, "slope_2").holds
    assert math.isnan(found.loss)
    text = found.explain()
    assert "no guarantee is claimed" in text
    assert "largest singular value" in text
    assert "alpha K L < 1" in text


def test_assumption_5_of_a_readout_a_cell_and_a_convolution() -> None:
    X, y = data(3)
    readout = Readout(OptEq(5, 8, 6).double())
    found = certify(readout, X, y)
    assert found.loss == pytest.approx(float((readout(X) - y).square().sum().detach()) / 2)
    assert "|a| > 0" in found.explain()
    assert math.isnan(certify(readout, X, y[:, None]).loss)
    conv = certify(ConvOptEq(2, 3, 4), torch.randn(2, 2, 5, 5), torch.zeros(2))
    assert math.isnan(slack_of(conv, "sigma_min(W)").lhs)
    assert slack_of(conv, "||W||").evidence == "bound"
    unknown = certify(TwofoldOptEq(2, 3, 4), torch.randn(2, 2, 5, 5), torch.zeros(2))
    assert slack_of(unknown, "||W||").verdict == slack_of(unknown, "sigma_min(W)").verdict == "not evaluated"


def test_assumption_5_refuses_radii_and_bad_data() -> None:
    X, y = data(3)
    readout = Readout(OptEq(5, 8, 6).double())
    with pytest.raises(ValueError, match="'radii' parameter of certify must be None"):
        certify(readout, X, y, {"d": 1.0})
    for option in ("flow", "sharp"):
        with pytest.raises(ValueError, match=f"'{option}' parameter of certify must be False for OptEq"):
            certify(readout, X, y, **{option: True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'y' parameter of certify must be of shape"):
        certify(readout, X, y[:2])
    with pytest.raises(ValueError, match="'X' parameter of certify must be finite"):
        certify(readout, X * math.nan, y)
    with pytest.raises(TypeError, match="Got 'Linear' instead"):
        certify(nn.Linear(5, 1), X, y)
    readout.a = nn.Parameter(torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"'readout' parameter of certify must be .*'a' of shape \[8\]"):
        certify(readout, X, y)
    with pytest.raises(ValueError, match=r"'readout' parameter of certify must be finite in 'cell\.W'"):
        certify(times(Readout(OptEq(5, 8, 6).double()), "cell.W", math.nan), X, y)


# measure


@pytest.mark.parametrize("kind", KINDS)
def test_measurements_equal_dense_linear_algebra(kind: str) -> None:
    X, y = data(4)
    readout = make(kind)
    start = {name: p.detach() + 0.1 for name, p in readout.named_parameters()}
    found = measure(readout, X, y, start)
    Z = readout.solve(X).z.detach()
    assert found.sigma_min == pytest.approx(float(np.linalg.svd(Z.numpy(), compute_uv=False)[-1]), rel=1e-9)
    assert found.residual == pytest.approx(float((Z @ readout.a.detach() - y).norm()))
    assert found.loss == pytest.approx(found.residual**2 / 2)
    assert found.quantities["lambda_min Z'Z"] == pytest.approx(found.sigma_min**2)
    for name, parameter in readout.named_parameters():
        short = name.removeprefix("cell.")
        matrix = parameter if parameter.ndim == 2 else parameter[:, None]
        assert found.quantities[f"norm {short}"] == pytest.approx(norm(matrix))
        assert found.quantities[f"moved {short}"] == pytest.approx(0.1 * math.sqrt(parameter.numel()))
    if kind == "monotone":
        joined = torch.cat([readout.cell.U, readout.cell.b[:, None]], 1)
        assert found.quantities["norm [U b]"] == pytest.approx(norm(joined))
        assert found.quantities["moved [U b]"] == pytest.approx(0.1 * math.sqrt(joined.numel()))
    if kind == "scaled_relu":
        assert found.quantities["gamma norm A"] == pytest.approx(0.1 * norm(readout.cell.A))
    assert measure(make(kind, width=3), X, y).sigma_min == 0
    assert not any(name.startswith("moved") for name in measure(readout, X, y).quantities)


def test_measure_refuses_a_start_that_is_not_that_of_the_model() -> None:
    X, y = data(3)
    readout = make("monotone", bias=False)
    for start in ({}, {name: p.detach()[:1] for name, p in readout.named_parameters()}):
        with pytest.raises(ValueError, match="'start' parameter of measure must be a mapping"):
            measure(readout, X, y, start)


def test_measure_takes_newton_where_the_solver_fails_and_raises_where_nothing_helps() -> None:
    X, y = data(3)
    readout = make("gaussian", sigma_w2=0.02)
    slow = Readout(readout.cell, solver=Picard(damping=1e-6))
    with torch.no_grad():
        slow.a.copy_(readout.a)
    assert measure(slow, X, y).loss == pytest.approx(measure(readout, X, y).loss)
    hopeless = make("gaussian", sigma_w2=0.02)
    with torch.no_grad():
        hopeless.cell.W.fill_(1.0)
        hopeless.cell.U.fill_(1.0)
    with pytest.raises(ConvergenceError):
        measure(hopeless, X[:1].abs(), y[:1])


@pytest.mark.verify
def test_certified_init_succeeds_on_twenty_random_data_sets_for_each_theorem() -> None:
    payload: dict[str, object] = {}
    for kind in KINDS:
        steps, drops, scales = [], [], []
        for seed in range(20):
            N = 2 + seed % 3 if kind == "gaussian" else 3 + seed % 6
            X, y = data(N, (3, 6, 12)[seed % 3], seed)
            readout = make(kind, d=X.shape[1], width=100 + 10 * seed if kind == "gaussian" else 64, seed=seed)
            made = certified_init(readout, X, y)
            found, sharp = certify(made, X, y), certify(made, X, y, sharp=True)
            assert found.holds
            assert sharp.holds
            name = "W" if kind == "scaled_relu" else "U"
            scales.append(norm(getattr(made.cell, name)) / norm(getattr(readout.cell, name)))
            steps.append(found.max_step)
            drops.append([found.max_step * found.decay, sharp.max_step * sharp.decay])
        median = np.median(drops, axis=0).tolist()
        payload[kind] = {
            "certified": len(steps),
            "scale": [min(scales), float(np.median(scales)), max(scales)],
            "max_step": [min(steps), float(np.median(steps)), max(steps)],
            "median drop of the loss a step, printed and sharp": median,
        }
    write_verify("certified_init", payload)


def test_bounded_activations_are_told_that_scaling_does_not_help() -> None:
    torch.manual_seed(0)
    X = torch.nn.functional.normalize(torch.randn(4, 5, dtype=torch.float64))
    readout = Readout(Monotone(5, 12, activation="tanh")).double()
    text = certify(readout, X, 10 * torch.ones(4, dtype=torch.float64)).explain()
    assert "make the labels smaller, or take an activation that is not bounded" in text
    assert "scale U up" not in text
    with pytest.raises(ValueError, match="found no scale up to 1e\\+04 that is certified"):
        certified_init(readout, X, 1e3 * torch.ones(4, dtype=torch.float64))
