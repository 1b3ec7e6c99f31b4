"""Training under a certificate, and certificates as JSON."""

from typing import Any

import torch
from torch import Tensor

from opteq.models import Readout
from opteq.runs import Run
from opteq.runs.formats import encode
from opteq.theory.certificates import Certificate, Monitor, Violation, check

__all__ = ["certificate_json", "log_monitor", "train_certified", "trained_json"]


def train_certified(
    readout: Readout, X: Tensor, y: Tensor, certificate: Certificate, steps: int, *, kernel: bool = False
) -> tuple[Monitor, Violation | None]:
    """Gradient descent on |y^ - y|^2 / 2 with the certificate's largest step, watched by a Monitor: what it saw, and what broke.

    `kernel`: whether it looks at the tangent kernel, too, which costs more than the rest.
    """
    every = next(n for n in range(max(1, steps // 50), 0, -1) if steps % n == 0)  # the last step is recorded, too
    monitor = Monitor(readout, X, y, certificate, every=every, kernel=kernel)
    optimizer = torch.optim.SGD(readout.parameters(), lr=certificate.max_step)
    for _ in range(steps):
        optimizer.zero_grad()
        (readout(X) - y).square().sum().div(2).backward()
        optimizer.step()
        monitor()
    return monitor, check(certificate, monitor.run)


def log_monitor(run: Run, monitor: Monitor) -> None:
    """Write what a Monitor saw among the metrics of a run that is open: rows of the kind "monitor", for its report."""
    for row in monitor.metrics():
        run.log(row)


def trained_json(monitor: Monitor, violation: Violation | None) -> dict[str, Any]:
    """What became of a training under a certificate."""
    first, last = monitor.records[0], monitor.records[-1]
    return {
        "steps": last.k,
        "step_size": monitor.step,
        "loss_first": first.measurement.loss,
        "loss_last": last.measurement.loss,
        "bound_last": last.bound,
        "violation": None if violation is None else violation.explain(),
    }


def certificate_json(certificate: Certificate, trained: dict[str, Any] | None = None) -> dict[str, Any]:
    """A certificate as JSON, the certificate.json of a run folder: NaN and infinity are null. `trained`: what came of it."""
    conditions = [{name: getattr(condition, name) for name in _CONDITION} for condition in certificate.conditions]
    facts = {name: getattr(certificate, name) for name in _CERTIFICATE}
    found = {**facts, "conditions": conditions, "explain": certificate.explain()}
    whole = found if trained is None else {**found, "trained": trained}
    encoded: dict[str, Any] = encode(whole, "certificate", lambda number: None)
    return encoded


_CONDITION = ("name", "formula", "lhs", "rhs", "slack", "holds", "verdict", "evidence", "remedy")
_CERTIFICATE = ("theorem", "kind", "holds", "max_step", "rate", "decay", "radii", "loss")
