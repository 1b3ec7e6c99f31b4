"""The training callback: true numbers, an undisturbed training."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor

from opteq.cells import DeepOptEq, FunctionCell, GaussianDEQ, Monotone, OptEq, ScaledReLU
from opteq.models import Readout
from opteq.solve import Stop
from opteq.solvers import Picard
from opteq.theory.certificates import certified_init, certify
from opteq.theory.certificates.monitor import Monitor
from opteq.theory.certificates.run import check, descend

CELLS = {
    "gaussian": lambda: GaussianDEQ(3, 10, sigma_w2=0.02),
    "scaled_relu": lambda: ScaledReLU(3, 10),
    "monotone": lambda: Monotone(3, 10, m=0.8),
    "opteq": lambda: OptEq(3, 10, 12),
}


def network(kind: str = "gaussian", seed: int = 0) -> tuple[Readout, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        readout = Readout(CELLS[kind]()).double()
        with torch.no_grad():
            readout.a.normal_(std=0.3)
        return readout, torch.randn(3, 3).double(), torch.randn(3).double()


def jacobian(readout: Readout, X: Tensor) -> Tensor:
    """d y^ / d theta, [N, P], by autograd."""
    parameters = [p for p in readout.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(value, parameters, retain_graph=True) for value in readout(X)]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def train(readout: Readout, X: Tensor, y: Tensor, steps: int, lr: float, monitor: Monitor | None = None) -> None:
    optimizer = torch.optim.SGD(readout.parameters(), lr=lr, momentum=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        ((readout(X + 1e-3 * torch.randn_like(X)) - y).square().sum() / 2).backward()
        optimizer.step()
        if monitor is not None:
            monitor()


@pytest.mark.parametrize("kind", list(CELLS))
def test_every_number_is_what_its_name_says(kind: str) -> None:
    readout, X, y = network(kind)
    start = {name: p.detach().clone() for name, p in readout.named_parameters()}
    monitor = Monitor(readout, X, y)
    with torch.no_grad():
        for p in readout.parameters():
            p.mul_(0.9)
    record = monitor()
    assert record is not None
    J = jacobian(readout, X)
    r = readout(X).detach() - y
    loss = float(r.square().sum() / 2)
    row = record.row()
    assert row["k"] == 1
    assert row["bound"] is None
    assert row["loss"] == pytest.approx(loss, rel=1e-9)
    assert row["residual"] == pytest.approx(float(r.norm()), rel=1e-9)
    assert row["pl"] == pytest.approx(float((J.T @ r).square().sum()) / (2 * loss), rel=1e-8)
    assert row["ntk_min"] == pytest.approx(float(torch.linalg.eigvalsh(J @ J.T)[0]), rel=1e-6)
    assert 0 < row["ntk_min"] <= row["pl"]
    assert row["sigma_min Z"] == pytest.approx(float(torch.linalg.svdvals(readout.solve(X).z.detach())[-1]), rel=1e-8)
    for name, p in readout.named_parameters():
        short = name.removeprefix("cell.")
        norm = torch.linalg.matrix_norm(p, 2) if p.ndim == 2 else p.norm()
        assert row[f"norm {short}"] == pytest.approx(float(norm.detach()), rel=1e-9)
        assert row[f"moved {short}"] == pytest.approx(float((p.detach() - start[name]).norm()), rel=1e-9)


@pytest.mark.parametrize("kind", ["gaussian", "monotone"])
def test_training_is_the_same_with_and_without_a_monitor(kind: str) -> None:
    readout, X, y = network(kind)
    alone = copy.deepcopy(readout)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        train(alone, X, y, 4, 1e-3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        train(readout, X, y, 4, 1e-3, Monitor(readout, X, y))
        assert torch.equal(torch.rand(2), expected)
    for p, q in zip(readout.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)
    assert readout.training


def test_a_monitor_works_under_no_grad_and_with_frozen_parameters() -> None:
    readout, X, y = network()
    readout.cell.W.requires_grad_(False)
    expected = Monitor(readout, X, y).rows()
    J = jacobian(readout, X)
    with torch.no_grad():
        found = Monitor(readout, X, y).rows()
    assert found == expected
    assert found[0]["ntk_min"] == pytest.approx(float(torch.linalg.eigvalsh(J @ J.T)[0]), rel=1e-6)
    assert not readout.cell.W.requires_grad


def test_the_run_of_a_certified_network_passes_the_check() -> None:
    readout, X, y = network()
    readout = certified_init(readout, X, y)
    certificate = certify(readout, X, y)
    monitor = Monitor(readout, X, y, certificate, every=2, kernel=False)
    other = descend(copy.deepcopy(readout), X, y, certificate.max_step, 5, every=2)
    for _ in range(5):
        descend(readout, X, y, certificate.max_step, 1)
        monitor()
    assert monitor.run.at == (0, 2, 4)
    assert monitor.run.step == certificate.max_step
    assert monitor.run.losses == pytest.approx(other.losses[:3], rel=1e-10)
    assert check(certificate, monitor.run) is None
    columns = monitor.as_dict()
    assert columns["bound"] == [certificate.loss_bound(k) for k in (0, 2, 4)]
    assert columns["ntk_min"] == [None, None, None]
    assert json.loads(json.dumps(monitor.rows())) == monitor.rows()


def test_a_run_with_a_larger_step_is_caught_and_has_no_bound() -> None:
    readout, X, y = network()
    readout = certified_init(readout, X, y)
    certificate = certify(readout, X, y)
    monitor = Monitor(readout, X, y, certificate, step=1e7 * certificate.max_step, kernel=False)
    descend(readout, X, y, 1e7 * certificate.max_step, 1)
    record = monitor()
    assert record is not None
    assert monitor.as_dict()["bound"] == [None, None]
    broken = check(certificate, monitor.run)
    assert broken is not None
    assert broken.quantity == "loss"
    half = Monitor(readout, X, y, certificate, step=certificate.max_step / 2, kernel=False)
    assert half.records[0].bound == certificate.loss_bound(0)


def test_monitors_and_their_runs_are_shown_in_a_line() -> None:
    readout, X, y = network()
    monitor = Monitor(readout, X, y, kernel=False, step=0.1)
    monitor()
    loss = f"{monitor.records[0].measurement.loss:.4g}"
    assert repr(monitor) == f"Monitor(cell=GaussianDEQ, k=1, records=2, loss={loss})"
    assert repr(monitor.run) == f"Run(step=0.1, measurements=2, at=0...1, loss={loss}...{loss})"


@pytest.mark.parametrize("kind", ["gaussian", "scaled_relu", "monotone"])
def test_plain_sgd_with_the_default_solver_keeps_the_certificate(kind: str) -> None:
    """No part of the run is made for the test: solver, gradients and optimiser are those that everyone has."""
    readout, X, y = network(kind)
    readout = certified_init(readout, X, y)
    certificate = certify(readout, X, y, sharp=True)
    monitor = Monitor(readout, X, y, certificate, every=5, kernel=False)
    optimizer = torch.optim.SGD(readout.parameters(), lr=certificate.max_step)
    for _ in range(20):
        optimizer.zero_grad()
        ((readout(X) - y).square().sum() / 2).backward()
        optimizer.step()
        monitor()
    assert monitor.run.at[-1] == 20
    assert monitor.run.losses[-1] < monitor.run.losses[0]
    broken = check(certificate, monitor.run)
    assert broken is None, str(broken)


def test_steps_are_counted_or_given() -> None:
    readout, X, y = network()
    monitor = Monitor(readout, X, y, every=3, kernel=False, step=0.1)
    assert [monitor() is None for _ in range(3)] == [True, True, False]
    assert monitor(6) is not None
    assert monitor(8) is None
    assert monitor.run.at == (0, 3, 6)
    monitor.rewind(20)  # there is nothing that came after
    assert (monitor.k, monitor.run.at) == (8, (0, 3, 6))
    for k in (8, 0):
        with pytest.raises(ValueError, match="'k'"):
            monitor(k)
    with pytest.raises(TypeError, match="'k'"):
        monitor(9.0)  # type: ignore[arg-type]


def test_a_certificate_that_does_not_hold_gives_no_bound() -> None:
    readout, X, y = network()
    certificate = certify(readout, X, y)
    assert not certificate.holds
    monitor = Monitor(readout, X, y, certificate, kernel=False)
    assert monitor.records[0].bound is None
    with pytest.raises(ValueError, match="'step'"):
        _ = monitor.run
    assert Monitor(readout, X, y, certificate, kernel=False, step=0.5).run.step == 0.5


def test_at_the_solution_the_pl_constant_is_no_number() -> None:
    readout, X, _ = network()
    with torch.no_grad():
        readout.a.zero_()
    monitor = Monitor(readout, X, torch.zeros(3).double())
    assert math.isnan(monitor.records[0].pl)
    assert monitor.rows()[0]["pl"] is None


def test_bad_arguments_are_named() -> None:
    readout, X, y = network()
    flow = certify(certified_init(readout, X, y, flow=True), X, y, flow=True)
    for arguments, kind, name in [
        ({"certificate": flow}, ValueError, "certificate"),
        ({"certificate": 1}, TypeError, "certificate"),
        ({"every": 0}, ValueError, "every"),
        ({"step": -1.0}, ValueError, "step"),
        ({"kernel": 1}, TypeError, "kernel"),
    ]:
        with pytest.raises(kind, match=f"'{name}'"):
            Monitor(readout, X, y, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'y'"):
        Monitor(readout, X, y[:1])


# ---------------------------------------------------------------- what changes since the start


def preactivation(readout: Readout, X: Tensor) -> Tensor:
    """What sigma is applied to at the equilibrium, [N, units], from the formula of each cell."""
    cell, z = readout.cell, readout.solve(X).z.detach()
    if isinstance(cell, ScaledReLU):
        return cell.gamma * z @ cell.A.detach() + (X @ cell.W.detach()).relu()
    W = cell.matrix() if isinstance(cell, Monotone) else cell.W
    b = 0.0 if isinstance(cell, GaussianDEQ) else cell.b
    return (z @ W.T + X @ cell.U.T + b).detach()


@pytest.mark.parametrize("kind", list(CELLS))
def test_drift_and_change_of_patterns_are_those_since_the_start(kind: str) -> None:
    readout, X, y = network(kind)
    start, other = copy.deepcopy(readout.state_dict()), network(kind, seed=1)[0].state_dict()
    monitor = Monitor(readout, X, y)
    J = jacobian(readout, X)
    K0, active = J @ J.T, preactivation(readout, X) > 0
    if kind != "opteq":
        assert torch.equal(readout.solve(X).z > 1e-9, active)  # for a ReLU
    readout.load_state_dict(other)
    J = jacobian(readout, X)
    changed = (preactivation(readout, X) > 0) != active
    away = monitor()
    assert away is not None
    assert away.kernel_drift == pytest.approx(float((J @ J.T - K0).norm() / K0.norm()), rel=1e-6)
    assert away.pattern_change == pytest.approx(float(changed.double().mean()))
    assert 0.2 < away.pattern_change < 0.8
    monitor.rewind(0)
    readout.load_state_dict(start)
    back = monitor()
    assert back is not None
    assert back.kernel_drift == pytest.approx(0.0, abs=1e-10)
    assert back.pattern_change == 0.0
    assert (monitor.records[0].kernel_drift, monitor.records[0].pattern_change) == (0.0, 0.0)
    assert [(row["kind"], row["step"]) for row in monitor.metrics()] == [("monitor", 0), ("monitor", 1)]
    assert monitor.metrics()[1].items() >= back.row().items()


def test_units_that_rest_on_their_kinks_change_only_when_they_leave_them() -> None:
    readout, X, y = network("scaled_relu")  # with A = I, inactive units have a pre-activation of 0
    idle = X @ readout.cell.W.detach() < 0
    assert idle.any()
    for size, share in ((1e-15, 0.0), (1e-6, float(idle.double().mean()))):
        monitor = Monitor(readout, X, y, kernel=False)
        with torch.no_grad():
            readout.cell.A += size
        record = monitor()
        assert record is not None
        assert record.pattern_change == pytest.approx(share)


def test_solver_steps_are_those_of_the_model_itself() -> None:
    tight, X, y = network()
    tight.solver = Picard()
    loose, short = copy.deepcopy(tight), copy.deepcopy(tight)
    loose.stop, short.stop = Stop(rtol=1e-3, max_steps=100), Stop(rtol=1e-3, max_steps=1)
    short.on_failure = "raise"  # what it does not find by itself is told to no one
    found = [Monitor(readout, X, y, kernel=False).records[0] for readout in (short, loose, tight)]
    own = [float(readout.solve(X).steps.double().mean()) for readout in (loose, tight)]
    assert [record.solver_steps for record in found] == [1.0, *own]
    assert 1 < own[0] < own[1]
    for record in found[:2]:
        assert record.measurement.loss == pytest.approx(found[2].measurement.loss)
    assert short.on_failure == "raise"


class Damped(torch.nn.Module):
    """tanh(0.3 z + U x)."""

    def __init__(self) -> None:
        super().__init__()
        self.U = torch.nn.Parameter(torch.eye(3, 5))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * z + x @ self.U)


def test_cells_without_one_layer_of_activations_have_no_pattern() -> None:
    _, X, y = network()
    for cell in (FunctionCell(Damped(), (5,)), DeepOptEq([OptEq(3, 5, 4), OptEq(3, 5, 4)])):
        record = Monitor(Readout(cell).double(), X, y, kernel=False).records[0]
        assert record.pattern_change is None
        assert record.kernel_drift is None
        assert record.row()["pattern_change"] is None


def test_a_kernel_that_begins_at_zero_has_no_drift() -> None:
    readout, X, y = network()
    readout.a.requires_grad_(False).zero_()
    record = Monitor(readout, X, y).records[0]
    assert record.kernel_drift is not None
    assert math.isnan(record.kernel_drift)
    assert record.row()["kernel_drift"] is None
