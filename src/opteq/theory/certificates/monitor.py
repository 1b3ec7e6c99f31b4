"""A callback for training loops: what the theory speaks of, along the way."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opteq.cells.optimization import OptEqMap
from opteq.checks import check_instance, check_integer, check_number, invalid
from opteq.models import Readout
from opteq.solution import Solution
from opteq.splitting import ActivationMap
from opteq.theory.certificates.conditions import Certificate
from opteq.theory.certificates.measure import Measurement, check_data, measure
from opteq.theory.certificates.run import Run
from opteq.theory.flow import loss_gradient
from opteq.theory.kernels import least_eigenvalue
from opteq.theory.ntk import empirical_ntk

__all__ = ["Monitor", "Record"]


@dataclass(frozen=True)
class Record:
    """After k steps: the measurement, the guaranteed bound of the loss, lambda in |grad L|^2 = 2 lambda L, lambda_min of K.

    Then what has changed since k = 0: `kernel_drift` is ||K - K(0)||_F / ||K(0)||_F, `pattern_change` the share of the units and
    samples whose pre-activation lies on another side of 0. `solver_steps`: the model's own, from its own start to its own
    tolerance, the mean over the samples.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import Monitor
        >>> X, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        >>> record = Monitor(Readout(GaussianDEQ(8, 32)).double(), X, y)()
        >>> record.k, record.pattern_change, record.ntk_min <= record.pl
        (1, 0.0, True)
    """

    k: int
    measurement: Measurement
    bound: float | None  # None without a certificate that holds for the step
    pl: float  # NaN where the loss is 0
    ntk_min: float | None  # None where the monitor does not compute kernels
    kernel_drift: float | None  # likewise; NaN where K(0) is 0
    pattern_change: float | None  # None for cells that are not of one layer of activations
    solver_steps: float

    def row(self) -> dict[str, float | None]:
        """One flat row of numbers, NaN as None, which JSON has no word for."""
        own = {name: getattr(self, name) for name in _NUMBERS}
        numbers = {**own, "residual": self.measurement.residual, **self.measurement.quantities}
        return {name: None if v is None or math.isnan(v) else v for name, v in numbers.items()}

    def metrics(self) -> dict[str, Any]:
        """The same as a row of the metrics of a run: of the kind "monitor", at the step k."""
        return {"kind": "monitor", "step": self.k, **self.row()}


_NUMBERS = ("k", "bound", "pl", "ntk_min", "kernel_drift", "pattern_change", "solver_steps")


class Monitor:
    """Records loss, sigma_min(Z), norms, |grad L|^2 / (2 L), lambda_min and drift of the tangent kernel at k = 0, every, 2 every...

    Make it before the first step, where k = 0 is recorded, and call `monitor()` after each step (or `monitor(k)` after the k-th).
    Training is not disturbed: no `.grad`, parameter, mode or random state changes. `certificate`: its bound of the loss is
    recorded next to the loss, for steps of the size `step` (default: its max_step; above that there is no bound). `kernel=False`
    leaves the tangent kernel out, which costs more than the rest. `pl` is the Polyak-Lojasiewicz constant as measured, lambda in
    |grad L|^2 >= 2 lambda L; some papers' mu is 2 lambda. lambda_min(K) never exceeds it.

    `pattern_change` compares the signs of what sigma is applied to at the equilibrium, gamma z A + relu(x W) of ScaledReLU,
    W z + U x + b of the others: whether it is above 0, by more than 1e-12 of all of them. For ReLU that is whether the unit is
    active, z > 0 (but for OptEq, whose units are those inside, relu(W z + U x + b)). None for cells of several layers or of a
    function of your own.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import Monitor
        >>> X, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        >>> readout = Readout(GaussianDEQ(8, 32)).double()
        >>> monitor, optimizer = Monitor(readout, X, y, step=0.01), torch.optim.SGD(readout.parameters(), 0.01)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     (readout(X) - y).square().sum().div(2).backward()
        ...     optimizer.step()
        ...     _ = monitor()
        >>> monitor.run.at, monitor.run.losses[-1] < monitor.run.losses[0]
        ((0, 1, 2, 3), True)
    """

    def __init__(
        self,
        readout: Readout,
        X: Tensor,
        y: Tensor,
        certificate: Certificate | None = None,
        *,
        step: float | None = None,
        every: int = 1,
        kernel: bool = True,
    ) -> None:
        self.X, self.y = check_data("Monitor", readout, X, y)
        check_instance(self, "certificate", certificate, (Certificate, type(None)), "a Certificate or None")
        if certificate is not None and certificate.kind == "flow":
            raise ValueError(invalid(self, "certificate", "one of descent: a training loop makes steps", certificate.theorem))
        if step is not None:
            check_number(self, "step", step, 0.0, open_low=True)
        check_integer(self, "every", every, 1)
        check_instance(self, "kernel", kernel, bool, "a bool")
        self.readout, self.certificate = readout, certificate if certificate is not None and certificate.holds else None
        self.step = self.certificate.max_step if step is None and self.certificate is not None else step
        self.every, self.kernel, self.k = every, kernel, 0
        self.start: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in readout.named_parameters()}
        self._first: dict[str, Tensor | None] = {}  # the kernel and the pattern at k = 0
        self.records: tuple[Record, ...] = (self._record(),)

    def __call__(self, k: int | None = None) -> Record | None:
        """Count one step, or the k steps made so far; the record, if one is due."""
        k = self.k + 1 if k is None else k
        check_integer(self, "k", k, self.k + 1)
        self.k = k
        if k % self.every != 0:
            return None
        self.records = (*self.records, self._record())
        return self.records[-1]

    def rewind(self, k: int) -> None:
        """Forget what came after k steps: the training went back there."""
        check_integer(self, "k", k, 0)
        self.k = min(self.k, k)
        self.records = tuple(record for record in self.records if record.k <= self.k)

    def _record(self) -> Record:
        own = self._solve()
        found = loss_gradient(self.readout, self.X, self.y, own.z if bool(own.converged.all()) else None)
        K = empirical_ntk(self.readout, self.X) if self.kernel else None
        pattern = _pattern(self.readout, self.X, found.z)
        K0, pattern0 = self._first.setdefault("kernel", K), self._first.setdefault("pattern", pattern)
        return Record(
            k=self.k,
            measurement=measure(self.readout, self.X, self.y, self.start, found.z),
            bound=self._bound(),
            pl=found.squared_norm() / (2 * found.loss) if found.loss > 0 else math.nan,
            ntk_min=None if K is None else least_eigenvalue(K),
            kernel_drift=None if K is None or K0 is None else _drift(K, K0),
            pattern_change=None if pattern is None or pattern0 is None else float((pattern != pattern0).double().mean()),
            solver_steps=float(own.steps.double().mean()),
        )

    @torch.no_grad()
    def _solve(self) -> Solution:
        """What the model itself does at a forward pass; failures are left in its status."""
        quiet = copy.copy(self.readout)
        quiet.on_failure = "ignore"
        return quiet.solve(self.X)

    def _bound(self) -> float | None:
        if self.certificate is None or self.step is None or self.step > self.certificate.max_step:
            return None
        return self.certificate.loss_bound(self.k, self.step)

    def __repr__(self) -> str:
        cell, loss = type(self.readout.cell).__name__, self.records[-1].measurement.loss
        return f"Monitor(cell={cell}, k={self.k}, records={len(self.records)}, loss={loss:.4g})"

    @property
    def run(self) -> Run:
        """What `check` takes."""
        if self.step is None:
            raise ValueError(invalid(self, "step", "given, since there is no certificate that holds to take it from", None))
        return Run(self.step, tuple(r.k for r in self.records), tuple(r.measurement for r in self.records))

    def rows(self) -> list[dict[str, float | None]]:
        """The records as plain numbers, one dict each: for JSON and tables."""
        return [record.row() for record in self.records]

    def metrics(self) -> list[dict[str, Any]]:
        """The records as rows of the metrics of a run."""
        return [record.metrics() for record in self.records]

    def as_dict(self) -> dict[str, list[float | None]]:
        """The same as one list a quantity, for plots."""
        rows = self.rows()
        return {name: [row.get(name) for row in rows] for name in rows[-1]}


def _drift(K: Tensor, start: Tensor) -> float:
    """||K - K(0)||_F / ||K(0)||_F; 0 / 0 is NaN."""
    return float(torch.linalg.vector_norm(K - start) / torch.linalg.vector_norm(start))


@torch.no_grad()
def _pattern(readout: Readout, X: Tensor, z: Tensor) -> Tensor | None:
    """Whether each unit's pre-activation is above 0, [N, units], by more than the error of z: units may rest on their kinks."""
    fn = readout.cell.bind(X).to(z.dtype)
    if not isinstance(fn, (ActivationMap, OptEqMap)):
        return None
    hidden: Tensor = fn.hidden(z)
    error: Tensor = _ERROR * torch.linalg.vector_norm(hidden, dim=1, keepdim=True)
    return hidden > error


_ERROR = 1e-12  # to which equilibria are solved here
