"""Whenever a certificate holds, descent (or the flow) keeps every conclusion of it; and `check` says so when one is broken.

Equilibria are found by dense Newton steps to rounding, far below the 1e-12 that the library asks for: the relative slack of 1e-9
is then left for the rounding of norms and singular values alone.
"""

import copy
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import write_verify
from opteq import Map, Solver
from opteq.activations import leaky_relu
from opteq.cells import GaussianDEQ, Monotone, ScaledReLU
from opteq.models import Readout
from opteq.solve import State, ValueState, first_value
from opteq.theory.certificates import Certificate, Guarantee, Measurement, certified_init, certify
from opteq.theory.certificates.run import Run, Violation, check, descend, measure_flow
from opteq.theory.flow import gradient_flow
from opteq.theory.ntk import empirical_ntk

SLACK = 1e-9
STEPS = 200
THEOREMS = ("gaussian", "scaled_relu", "monotone")


@dataclass(frozen=True)
class Direct(Solver):
    """Newton with dense factorisations, for z = sigma(W z + u): quick, and exact up to rounding."""

    def init(self, fn: Map, z0: Tensor) -> ValueState:
        return ValueState(z0, 1, first_value(fn, z0))

    def step(self, fn: Any, state: State) -> ValueState:
        assert isinstance(state, ValueState)
        z, fz, evals = state.z, state.fz, state.evals
        identity = torch.eye(z.shape[1], dtype=z.dtype)
        for _ in range(10):
            slope = fn.sigma.derivative(fn.hidden(z))
            z = z + torch.linalg.solve(identity - slope[:, :, None] * fn.W.W, fz - z)
            fz, evals = fn(z), evals + 1
            if bool(((fz - z).norm(dim=1) <= 1e-15 * fz.norm(dim=1)).all()):
                break
        return ValueState(z, evals, fz)


@dataclass(frozen=True)
class Case:
    """A network, its data, and which certificate to ask for."""

    theorem: str
    readout: Readout
    X: Tensor
    y: Tensor
    radii: dict[str, float] | None
    sharp: bool
    flow: bool

    def certificate(self) -> Certificate:
        return certify(self.readout, self.X, self.y, self.radii, flow=self.flow, sharp=self.sharp)


def cells(draw: Any, theorem: str, d: int, width: int) -> GaussianDEQ | ScaledReLU | Monotone:
    if theorem == "gaussian":
        return GaussianDEQ(d, width, sigma_w2=draw(st.sampled_from([0.002, 0.02, 0.06])))
    if theorem == "scaled_relu":
        init = draw(st.sampled_from(["identity", "scaled_identity", "half_normal"]))
        gamma = draw(st.sampled_from([0.02, 0.1, 0.4])) / (width if init == "half_normal" else 1)
        return ScaledReLU(d, width, gamma=gamma, init=init)
    sigma = draw(st.sampled_from(["relu", leaky_relu(0.1), "tanh"]))
    m = draw(st.sampled_from([0.3, 0.8, 3.0]))
    init = draw(st.sampled_from(["normal", "linear"]))
    return Monotone(d, width, m=m, activation=sigma, bias=draw(st.booleans()), init=init)


@st.composite
def cases(draw: Any, most: int = 40, flow: bool = False) -> Case:
    """Certified networks: of each theorem, over sizes, scales, readouts, radii and kinds of step."""
    theorem = draw(st.sampled_from(THEOREMS))
    N, d = draw(st.integers(1, most // 8)), draw(st.integers(2, 6))
    width = draw(st.integers(3 * N + 2, max(most, 3 * N + 2)))
    x_scale, y_scale = draw(st.sampled_from([0.1, 1.0, 10.0])), draw(st.sampled_from([0.01, 1.0, 30.0]))
    seed = draw(st.integers(0, 10**6))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        cell = cells(draw, theorem, d, width).double()
        readout = Readout(cell, Direct()).double()
        X, y = x_scale * torch.randn(N, d).double(), y_scale * torch.randn(N).double()
        direction = torch.randn(width).double()
    if cell.activation.name == "tanh":  # no scale of U moves a saturated state: there the labels must be small
        with torch.no_grad():
            readout.a.zero_()
        y = small_labels(readout, X, y, flow)
    else:
        readout = scaled_up(readout, X, y, flow)
    if draw(st.booleans()):
        readout = with_small_readout(readout, X, y, direction, flow)
    case = Case(theorem, readout, X, y, None, not flow and draw(st.booleans()), flow)
    return with_radii(case, draw(st.sampled_from([0.9, 1.0, 1.1]))) if draw(st.booleans()) else case


def scaled_up(readout: Readout, X: Tensor, y: Tensor, flow: bool) -> Readout:
    """The initialisation that is certified; inputs that no scale can separate are drawn again."""
    try:
        return certified_init(readout, X, y, flow=flow)
    except ValueError as error:
        if "rank" not in str(error):
            raise
        reject()


def small_labels(readout: Readout, X: Tensor, y: Tensor, flow: bool) -> Tensor:
    """The labels of this direction, as large as they may be, to a factor of 10."""
    for _ in range(30):
        if certify(readout, X, y, flow=flow).holds:
            return y
        y = y / 10
    reject()


@torch.no_grad()
def with_small_readout(readout: Readout, X: Tensor, y: Tensor, direction: Tensor, flow: bool) -> Readout:
    """An a(0) that changes y^ by up to |y| / 2, if that is still certified, else a tenth of it, and so on."""
    Z = readout.solve(X).z
    size = float(y.norm() / torch.linalg.matrix_norm(Z, 2)) / 2
    for _ in range(6):
        made = copy.deepcopy(readout)
        made.a.copy_(size * direction / direction.norm())
        if certify(made, X, y, flow=flow).holds:
            return made
        size /= 10
    return readout


def with_radii(case: Case, factor: float) -> Case:
    """The radii given instead of searched: the best ones times a factor, if these are good enough as well."""
    best = {name: radius for name, radius in case.certificate().radii.items() if math.isfinite(radius)}
    given = replace(case, radii={name: factor * radius for name, radius in best.items()})
    return given if given.certificate().holds else replace(case, radii=best)


def drop(certificate: Certificate) -> float:
    """The part of L(0) that is guaranteed to be gone after 200 steps of the largest size."""
    return -math.expm1(STEPS * math.log1p(-certificate.max_step * certificate.decay))


def slacks(certificate: Certificate, run: Run) -> dict[str, float]:
    """value / bound, or bound / value, of each conclusion, the largest of the run: at most 1 where it is kept."""
    worst: dict[str, float] = defaultdict(float)
    for at, measurement in zip(run.at, run.measurements, strict=True):
        worst["loss"] = max(worst["loss"], measurement.loss / certificate.loss_bound(at, run.step))
        for g in certificate.guarantees:
            value = measurement.quantities[g.quantity]
            ratio = value / g.bound if g.sense == "<=" else g.bound / value
            worst[g.quantity] = max(worst[g.quantity], ratio)
    return dict(worst)


def check_descent(case: Case, every: int) -> tuple[Certificate, Run]:
    certificate = case.certificate()
    assert certificate.holds
    run = descend(copy.deepcopy(case.readout), case.X, case.y, certificate.max_step, STEPS, every=every)
    assert run.at[-1] == STEPS
    broken = check(certificate, run, slack=SLACK)
    assert broken is None, str(broken)
    return certificate, run


QUIETLY = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=6, suppress_health_check=QUIETLY, phases=[Phase.generate])
@given(cases(most=16))
def test_a_certified_network_keeps_every_conclusion_for_200_steps(case: Case) -> None:
    check_descent(case, every=20)


@settings(max_examples=2, suppress_health_check=QUIETLY, phases=[Phase.generate])
@given(cases(most=16, flow=True))
def test_a_certified_flow_keeps_every_conclusion(case: Case) -> None:
    check_flow(case)


# The flow is followed with errors of 1e-6 in y^: the bounds are met by far, and a smaller tolerance stops at the kinks of ReLU.
def check_flow(case: Case) -> tuple[Certificate, Run]:
    certificate = case.certificate()
    assert certificate.holds
    span = min(3 / certificate.decay, 60 / float(torch.linalg.eigvalsh(empirical_ntk(case.readout, case.X))[-1]))
    flow = gradient_flow(case.readout, case.X, case.y, torch.linspace(0, span, 5))
    run = measure_flow(flow, case.X, case.y)
    broken = check(certificate, run, slack=SLACK)
    assert broken is None, str(broken)
    return certificate, run


def certified(theorem: str, seed: int = 0, N: int = 3, width: int = 16) -> tuple[Readout, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        cell = {
            "gaussian": lambda: GaussianDEQ(4, width, sigma_w2=0.02),
            "scaled_relu": lambda: ScaledReLU(4, width),
            "monotone": lambda: Monotone(4, width, m=0.8),
        }[theorem]()
        readout = Readout(cell, Direct()).double()
        X, y = torch.randn(N, 4).double(), torch.randn(N).double()
    return certified_init(readout, X, y), X, y


@pytest.mark.parametrize("theorem", THEOREMS)
def test_ten_times_the_stable_step_is_caught(theorem: str) -> None:
    readout, X, y = certified(theorem)
    certificate = certify(readout, X, y)
    limit = 2 / float(torch.linalg.eigvalsh(empirical_ntk(readout, X))[-1])
    assert certificate.max_step < limit
    broken = check(certificate, descend(readout, X, y, 10 * limit, 3))
    assert broken is not None
    assert broken.quantity == "loss"
    assert broken.at == 1
    assert broken.value > certificate.loss
    assert broken.factor > 2
    assert "does not cover" in broken.explain()


@pytest.mark.parametrize("theorem", THEOREMS)
def test_a_decay_that_the_run_does_not_have_is_caught(theorem: str) -> None:
    """The bound of the loss is compared at every step, with the step that was made."""
    readout, X, y = certified(theorem)
    certificate = certify(readout, X, y, sharp=True)
    run = descend(readout, X, y, certificate.max_step / 2, 20)
    assert check(certificate, run) is None
    observed = (1 - (run.losses[1] / run.losses[0])) / (certificate.max_step / 2)
    assert observed > certificate.decay
    first = Run(run.step, run.at[:2], run.measurements[:2])
    assert check(replace(certificate, decay=0.99 * observed), first) is None
    broken = check(replace(certificate, decay=1.01 * observed), run)
    assert broken is not None
    assert (broken.quantity, broken.at, broken.note) == ("loss", 1, "")


def claim(bound: float, sense: Any = "<=", **changes: Any) -> Certificate:
    guarantees = (Guarantee("norm W", sense, bound),)
    fields = {"holds": True, "conditions": (), "max_step": 0.1, "rate": 0.9, "decay": 1.0, "radii": {}, "loss": 2.0}
    return Certificate("theorem", **{"kind": "descent", "guarantees": guarantees, **fields, **changes})


def made(*values: float, step: float | None = 0.1, loss: float = 2.0) -> Run:
    """Runs with the loss 2, 2 * 0.9, ... and these norms of W."""
    points = [Measurement(loss * 0.9**k, 1.0, 1.0, {"norm W": value}) for k, value in enumerate(values)]
    return Run(step, tuple(range(len(values))), tuple(points))


def test_each_guarantee_is_compared_with_the_relative_slack() -> None:
    assert check(claim(3.0), made(1, 2, 3 * (1 + 0.9e-9))) is None
    assert check(claim(3.0), made(1, 2, 3 * (1 + 1.1e-9), 9)) == Violation("norm W", 2, 3 * (1 + 1.1e-9), "<=", 3.0)
    assert check(claim(3.0), made(1, 3.1), slack=0.1) is None
    assert check(claim(3.0, ">="), made(4, 3 * (1 - 0.9e-9))) is None
    below = check(claim(3.0, ">="), made(4, 2))
    assert below == Violation("norm W", 1, 2, ">=", 3.0)
    assert below.factor == 1.5
    assert below.explain() == "norm W >= 3 is broken at 1: 2, beyond the bound by a factor of 1.5."


def test_what_is_not_a_number_or_was_not_measured_is_a_violation() -> None:
    broken = check(claim(3.0), made(1, math.nan))
    assert broken is not None
    assert broken.at == 1
    assert broken.factor == math.inf
    missing = Run(0.1, (0,), (Measurement(2.0, 2.0, 1.0, {}),))
    broken = check(claim(3.0), missing)
    assert broken is not None
    assert math.isnan(broken.value)
    lost = Run(0.1, (0, 1), (*made(1).measurements, Measurement(math.nan, math.nan, math.nan, {})))
    broken = check(claim(3.0), lost)
    assert broken is not None
    assert broken.quantity == "loss"


def test_the_start_must_be_the_one_of_the_certificate() -> None:
    broken = check(claim(3.0), made(1, 1, loss=2.1))
    assert broken is not None
    assert (broken.quantity, broken.value, broken.bound) == ("start", 2.1, 2.0)


def test_a_step_that_is_not_admissible_is_reported_even_if_nothing_else_breaks() -> None:
    broken = check(claim(3.0), made(1, 1, step=0.2))
    assert broken is not None
    assert (broken.quantity, broken.value, broken.bound) == ("step", 0.2, 0.1)
    text = "The step 0.2 is above the admissible 0.1: the theorem does not cover this run."
    assert str(broken) == f"Nothing measured breaks a bound, but it need not stay so. {text}"


def test_what_rounding_leaves_of_the_loss_is_no_violation() -> None:
    end = Measurement(1e-25, 1.0, 1.0, {"norm W": 1.0})
    run = Run(0.1, (0, 10**4), (*made(1).measurements, end))
    assert check(claim(3.0), run) is None
    broken = check(claim(3.0), replace(run, measurements=(run.measurements[0], replace(end, loss=1e-20))))
    assert broken is not None
    assert broken.at == 10**4


def test_check_refuses_what_it_cannot_judge() -> None:
    with pytest.raises(ValueError, match="one that holds"):
        check(claim(3.0, holds=False), made(1))
    with pytest.raises(ValueError, match="one that holds"):
        check(claim(3.0, holds=None, kind="assumption"), made(1))
    with pytest.raises(ValueError, match="a flow"):
        check(claim(3.0, kind="flow"), made(1))
    with pytest.raises(ValueError, match="a descent"):
        check(claim(3.0), made(1, step=None))
    with pytest.raises(TypeError, match="'certificate'"):
        check("certificate", made(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'run'"):
        check(claim(3.0), [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'slack'"):
        check(claim(3.0), made(1), slack=-1.0)


@pytest.mark.parametrize("at", [(), (0,), (1, 2), (0, 0), (0, math.nan)])
def test_a_run_begins_at_0_and_goes_on(at: tuple[float, ...]) -> None:
    points = made(1, 1).measurements
    with pytest.raises(ValueError, match="'at'"):
        Run(0.1, at, points)
    with pytest.raises(ValueError, match="'step'"):
        Run(0.0, (0, 1), points)


def test_descend_is_gradient_descent_on_the_model_given() -> None:
    readout, X, y = certified("monotone")
    step = 100 * certify(readout, X, y).max_step
    oracle = copy.deepcopy(readout)
    run = descend(readout, X, y, step, 5, every=2)
    assert run.at == (0, 2, 4, 5)
    assert run.step == step
    optimizer = torch.optim.SGD(oracle.parameters(), lr=step)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (oracle(X) - y).square().sum() / 2
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step() if len(losses) < 6 else None
    assert run.losses == pytest.approx([losses[k] for k in run.at], rel=1e-9)
    for ours, theirs in zip(readout.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
        assert ours.grad is None


@pytest.mark.parametrize("theorem", ["gaussian", "scaled_relu"])
def test_a_run_that_leaves_the_numbers_ends_with_an_infinite_loss(theorem: str) -> None:
    readout, X, y = certified(theorem)
    certificate = certify(readout, X, y)
    run = descend(readout, X, y, 1e300, 200)
    assert run.at[-1] <= 3
    assert run.losses[-1] == math.inf
    broken = check(certificate, run)
    assert broken is not None
    assert broken.quantity == "loss"


def test_a_run_whose_equilibrium_is_lost_ends_with_a_loss_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    readout, X, y = certified("gaussian")

    def lose(*_: object) -> None:
        raise torch.linalg.LinAlgError("singular")

    monkeypatch.setattr("opteq.theory.certificates.run.loss_gradient", lose)
    run = descend(readout, X, y, 1.0, 200)
    assert run.at == (0, 1)
    assert math.isnan(run.losses[-1])


@pytest.mark.parametrize(("every", "at"), [(1, (0, 1)), (50, (0, 2))])
def test_a_run_that_diverges_ends_early_with_its_last_measurement(every: int, at: tuple[int, ...]) -> None:
    readout, X, y = certified("monotone")
    certificate = certify(readout, X, y)
    limit = 2 / float(torch.linalg.eigvalsh(empirical_ntk(readout, X))[-1])
    run = descend(readout, X, y, 1e4 * limit, 200, every=every)
    assert run.at == at
    assert run.losses[-1] > 1e6 * run.losses[0]
    assert run.measurements[-1].quantities["moved a"] > 0
    broken = check(certificate, run)
    assert broken is not None
    assert broken.quantity == "loss"


@pytest.mark.parametrize("theorem", THEOREMS)
@pytest.mark.parametrize("off", [0.0, 1e-11, 1e-6])
def test_a_run_that_begins_at_its_labels_is_known_by_the_measured_loss(theorem: str, off: float) -> None:
    """The loss of the certificate is a bound: near interpolation, far above the measured one."""
    readout, X, y = certified(theorem)
    with torch.no_grad():
        readout.a.copy_(1e-6 * torch.sin(torch.arange(16.0).double()))
        labels = readout(X) + off * y
    certificate = certify(readout, X, labels, sharp=True)
    assert certificate.holds
    run = descend(copy.deepcopy(readout), X, labels, certificate.max_step, 3)
    assert certificate.measured == run.losses[0]
    assert certificate.loss > certificate.measured
    assert check(certificate, run) is None
    with torch.no_grad():
        readout.a.add_(1e-6)
    broken = check(certificate, descend(readout, X, labels, certificate.max_step, 1))
    assert broken is not None
    assert broken.quantity == "start"


def test_a_run_at_the_labels_may_stay_at_the_error_of_the_solver() -> None:
    certificate = claim(3.0, loss=2.0, measured=1.0)  # |y^ - y| is 1.41, the truth at most 2
    low = (2 - math.sqrt(2)) ** 2 / 2
    end = Measurement(0.99 * low, 1.0, 1.0, {"norm W": 1.0})
    run = Run(0.1, (0, 10**4), (*made(1, loss=1.0).measurements, end))
    assert check(certificate, run) is None
    broken = check(certificate, replace(run, measurements=(run.measurements[0], replace(end, loss=1.01 * low))))
    assert broken is not None
    assert (broken.quantity, broken.at) == ("loss", 10**4)


def test_descend_leaves_frozen_parameters_and_checks_its_arguments() -> None:
    readout, X, y = certified("gaussian")
    readout.cell.W.requires_grad_(False)
    run = descend(readout, X, y, 1e-12, 1)
    assert run.measurements[1].quantities["moved W"] == 0
    assert run.measurements[1].quantities["moved a"] > 0
    with pytest.raises(ValueError, match="'step'"):
        descend(readout, X, y, 0.0, 1)
    with pytest.raises(ValueError, match="'steps'"):
        descend(readout, X, y, 1.0, -1)
    with pytest.raises(ValueError, match="'every'"):
        descend(readout, X, y, 1.0, 1, every=0)
    with pytest.raises(TypeError, match=r"'readout' parameter of descend must be in float64 .*Got torch.float32 instead"):
        descend(copy.deepcopy(readout).float(), X, y, 1.0, 1)
    with pytest.raises(ValueError, match="trainable"):
        descend(readout.requires_grad_(False), X, y, 1.0, 1)


# The full size.


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {"count": len(values), "median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(kept: list[tuple[Case, Certificate, Run]]) -> dict[str, Any]:
    """For each theorem: how many networks, the guaranteed drops, the rates, how close each conclusion came to its bound."""
    found: dict[str, Any] = {}
    for theorem in THEOREMS:
        chosen = [(case, certificate, run) for case, certificate, run in kept if case.theorem == theorem]
        worst: dict[str, float] = defaultdict(float)
        for _, certificate, run in chosen:
            for quantity, ratio in slacks(certificate, run).items():
                worst[quantity] = max(worst[quantity], ratio)
        found[theorem] = {
            "networks": len(chosen),
            "nonzero readout": sum(bool(case.readout.a.detach().any()) for case, _, _ in chosen),
            "radii given": sum(case.radii is not None for case, _, _ in chosen),
            "sharp step": sum(case.sharp for case, _, _ in chosen),
            "largest value/bound of each conclusion": dict(worst),
            # a smaller change of the loss is not seen above its rounding
            "observed / guaranteed exponent, where that is above 1e-9": spread(
                [exponent_ratio(c, run) for _, c, run in chosen if guaranteed_exponent(c, run) > 1e-9]
            ),
        }
        drops = [drop(c) for _, c, _ in chosen if c.kind == "descent"]
        if drops:
            found[theorem]["guaranteed drop of the loss in 200 steps"] = spread(drops)
    return found


def guaranteed_exponent(certificate: Certificate, run: Run) -> float:
    """The log of L(0) / the bound at the end."""
    if run.step is None:
        return certificate.decay * run.at[-1]
    return -run.at[-1] * math.log1p(-run.step * certificate.decay)


def exponent_ratio(certificate: Certificate, run: Run) -> float:
    """The observed log(L(0) / L(end)) over the guaranteed one."""
    observed = math.log(run.losses[0] / max(run.losses[-1], 1e-24 * run.losses[0]))
    return observed / guaranteed_exponent(certificate, run)


@pytest.mark.verify
def test_200_certified_networks_keep_every_conclusion() -> None:
    kept: list[tuple[Case, Certificate, Run]] = []
    flows: list[tuple[Case, Certificate, Run]] = []

    @settings(max_examples=200, suppress_health_check=QUIETLY, phases=[Phase.generate], database=None)
    @given(cases())
    def check_one(case: Case) -> None:
        kept.append((case, *check_descent(case, every=1)))

    @settings(max_examples=20, suppress_health_check=QUIETLY, phases=[Phase.generate], database=None)
    @given(cases(most=24, flow=True))
    def check_one_flow(case: Case) -> None:
        flows.append((case, *check_flow(case)))

    check_one()
    check_one_flow()
    drops = [drop(certificate) for _, certificate, _ in kept]
    payload = {
        "networks": len(kept),
        "steps": STEPS,
        "relative slack allowed": SLACK,
        "networks with a guaranteed drop above 1e-6": sum(d > 1e-6 for d in drops),
        "descent": summary(kept),
        "flow": {"networks": len(flows), **summary(flows)},
    }
    write_verify("guarantees", payload)
    assert len(kept) >= 200
    assert sum(d > 1e-6 for d in drops) >= len(kept) / 4
    assert all(payload["descent"][theorem]["networks"] >= 30 for theorem in THEOREMS)
