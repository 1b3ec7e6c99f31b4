"""A callback for training loops: what the theory speaks of, along the way."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from opteq.checks import check_instance, check_integer, check_number, invalid
from opteq.models import Readout
from opteq.theory.certificates.conditions import Certificate
from opteq.theory.certificates.measure import Measurement, check_data, measure
from opteq.theory.certificates.run import Run
from opteq.theory.flow import loss_gradient
from opteq.theory.kernels import least_eigenvalue
from opteq.theory.ntk import empirical_ntk

__all__ = ["Monitor", "Record"]


@dataclass(frozen=True)
class Record:
    """After k steps: the measurement, the guaranteed bound of the loss, lambda in |grad L|^2 = 2 lambda L, lambda_min of K."""

    k: int
    measurement: Measurement
    bound: float | None  # None without a certificate that holds for the step
    pl: float  # NaN where the loss is 0
    ntk_min: float | None  # None where the monitor does not compute kernels

    def row(self) -> dict[str, float | None]:
        """One flat row of numbers, NaN as None, which JSON has no word for."""
        numbers = {"k": self.k, "bound": self.bound, "pl": self.pl, "ntk_min": self.ntk_min, "residual": self.measurement.residual}
        return {name: None if v is None or math.isnan(v) else v for name, v in {**numbers, **self.measurement.quantities}.items()}


class Monitor:
    """Records loss, sigma_min(Z), norms, |grad L|^2 / (2 L) and lambda_min of the tangent kernel at k = 0, every, 2 every, ...

    Make it before the first step, where k = 0 is recorded, and call `monitor()` after each step (or `monitor(k)` after the k-th).
    Training is not disturbed: no `.grad`, parameter, mode or random state changes. `certificate`: its bound of the loss is
    recorded next to the loss, for steps of the size `step` (default: its max_step; above that there is no bound). `kernel=False`
    leaves the tangent kernel out, which costs more than the rest. `pl` is the Polyak-Lojasiewicz constant as measured, lambda in
    |grad L|^2 >= 2 lambda L; some papers' mu is 2 lambda. lambda_min(K) never exceeds it.
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
        found = loss_gradient(self.readout, self.X, self.y)
        measurement = measure(self.readout, self.X, self.y, self.start, found.z)
        bound = None
        if self.certificate is not None and self.step is not None and self.step <= self.certificate.max_step:
            bound = self.certificate.loss_bound(self.k, self.step)
        pl = found.squared_norm() / (2 * found.loss) if found.loss > 0 else math.nan
        ntk_min = least_eigenvalue(empirical_ntk(self.readout, self.X)) if self.kernel else None
        return Record(self.k, measurement, bound, pl, ntk_min)

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

    def as_dict(self) -> dict[str, list[float | None]]:
        """The same as one list a quantity, for plots."""
        rows = self.rows()
        return {name: [row.get(name) for row in rows] for name in rows[-1]}
