"""Runs of training, and whether they keep what a certificate guarantees."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.checks import check_instance, check_integer, check_number, invalid
from opteq.models import Readout
from opteq.solution import ConvergenceError
from opteq.theory.certificates.conditions import Certificate
from opteq.theory.certificates.measure import Measurement, check_data, measure
from opteq.theory.flow import Flow, loss_gradient, trainable

__all__ = ["Run", "Violation", "check", "descend", "measure_flow"]

# No equilibrium, a singular equation for the gradient, or no numbers any more.
_LOST = (ConvergenceError, torch.linalg.LinAlgError, ValueError)  # type: ignore[attr-defined]
_FLOOR = 1e-24  # of L(0): below that, the loss is what solves to 1e-12 leave of it
_DIVERGED = 1e6  # times L(0)
_SAME = 1e-6  # how far apart two computations of |y^ - y| at one start may be, besides the error of the solver


@dataclass(frozen=True)
class Run:
    """What was measured after `at` steps of the size `step`, or at the times `at` of a flow (step None). Begins at 0.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import descend
        >>> X, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        >>> run = descend(Readout(GaussianDEQ(8, 32)).double(), X, y, step=0.01, steps=20, every=10)
        >>> run.at, run.losses[0] > run.losses[1] > run.losses[2]
        ((0, 10, 20), True)
    """

    step: float | None
    at: tuple[float, ...]
    measurements: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        if self.step is not None:
            check_number(self, "step", self.step, 0.0, open_low=True)
        if len(self.at) == 0 or len(self.at) != len(self.measurements):
            expected = f"as long as measurements ({len(self.measurements)}), and not empty"
            raise ValueError(invalid(self, "at", expected, len(self.at)))
        if self.at[0] != 0 or any(not earlier < later for earlier, later in zip(self.at, self.at[1:], strict=False)):
            raise ValueError(invalid(self, "at", "increasing, from 0 on", self.at))

    @property
    def losses(self) -> tuple[float, ...]:
        """L at each of `at`."""
        return tuple(measurement.loss for measurement in self.measurements)

    def __repr__(self) -> str:
        first, last = self.losses[0], self.losses[-1]
        return f"Run(step={self.step}, measurements={len(self.at)}, at=0...{self.at[-1]:g}, loss={first:.4g}...{last:.4g})"


@dataclass(frozen=True)
class Violation:
    """A conclusion that did not hold: `quantity` after `at` steps (or at that time) was `value`, against `bound`.

    "start": the run begins with another loss than the certificate was made at. "step": nothing else was broken, but the step size
    is not admissible, so that the theorem does not speak of the run.

    Examples:
        >>> from opteq.theory.certificates import Violation
        >>> violation = Violation("loss", at=3, value=2.0, sense="<=", bound=1.0)
        >>> violation.factor
        2.0
        >>> print(violation.explain())
        loss <= 1 is broken at 3: 2, beyond the bound by a factor of 2.
    """

    quantity: str
    at: float
    value: float
    sense: str
    bound: float
    note: str = ""

    @property
    def factor(self) -> float:
        """By what factor the value is beyond the bound; infinite where that is no number."""
        over, under = (self.value, self.bound) if self.sense == "<=" else (self.bound, self.value)
        return over / under if under > 0 and math.isfinite(over / under) else math.inf

    def explain(self) -> str:
        """One or two sentences with the numbers."""
        if self.quantity == "step":
            return f"Nothing measured breaks a bound, but it need not stay so. {self.note}"
        claim = f"{self.quantity} {self.sense} {self.bound:.6g} is broken at {self.at:g}: {self.value:.6g}"
        return f"{claim}, beyond the bound by a factor of {self.factor:.6g}.{' ' + self.note if self.note else ''}"

    def __str__(self) -> str:
        return self.explain()


def descend(readout: Readout, X: Tensor, y: Tensor, step: float, steps: int, *, every: int = 1) -> Run:
    """theta <- theta - step grad L(theta), L = |y^ - y|^2 / 2, on all trainable parameters of `readout` itself.

    Measured before the first step, after each `every` of them, and after the last. It ends early where an equilibrium is no longer
    found or the parameters are no longer finite: the last measurement then has a loss of NaN. It also ends, with a measurement,
    where the loss is above a million times L(0) (or, where it begins near 0, a millionth of |y|^2).

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import descend
        >>> readout = Readout(GaussianDEQ(8, 32)).double()
        >>> X, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        >>> run = descend(readout, X, y, step=0.01, steps=100, every=100)
        >>> run.losses[-1] < 0.1 * run.losses[0]
        True
    """
    parameters = trainable("descend", readout)
    X, y = check_data("descend", readout, X, y)
    check_number("descend", "step", step, 0.0, open_low=True)
    check_integer("descend", "steps", steps, 0)
    check_integer("descend", "every", every, 1)
    start = {name: parameter.detach().clone() for name, parameter in readout.named_parameters()}
    at, measurements, z = [0], [measure(readout, X, y, start)], None
    limit = _DIVERGED * max(measurements[0].loss, 1e-12 * float(y.square().sum()))
    for k in range(1, steps + 1):
        try:
            loss, gradient, z = loss_gradient(readout, X, y, z)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.sub_(step * gradient[name])
            due = k % every == 0 or k == steps or loss > limit
            found = measure(readout, X, y, start, z) if due else None
        except _LOST:
            at.append(k)
            measurements.append(Measurement(math.nan, math.nan, math.nan, {}))
            break
        if found is not None:
            at.append(k)
            measurements.append(found)
            if max(loss, found.loss) > limit:
                break
    return Run(float(step), tuple(at), tuple(measurements))


def measure_flow(flow: Flow, X: Tensor, y: Tensor) -> Run:
    """The run of a flow that begins at the time 0, measured at each of its times.

    Examples:
        >>> import torch
        >>> from opteq.cells import GaussianDEQ
        >>> from opteq.models import Readout
        >>> from opteq.theory import gradient_flow
        >>> from opteq.theory.certificates import measure_flow
        >>> X, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        >>> flow = gradient_flow(Readout(GaussianDEQ(2, 8)).double(), X, y, [0.0, 0.1], rtol=1e-3)
        >>> run = measure_flow(flow, X, y)
        >>> run.step, run.at
        (None, (0.0, 0.1))
    """
    start = {name: parameter.detach() for name, parameter in flow.start.named_parameters()}
    found = tuple(measure(flow.model_at(i), X, y, start) for i in range(len(flow.times)))
    return Run(None, tuple(flow.times.tolist()), found)


def check(certificate: Certificate, run: Run, *, slack: float = 1e-9) -> Violation | None:
    """The first conclusion of the certificate that the run broke by more than the relative `slack`; None if it kept all of them.

    Conclusions: L <= the bound of the certificate, and each of its guarantees, at every point measured. A run with a step above
    `max_step` is compared with the bounds at max_step, and where it keeps them it is still reported, as not covered. A loss below
    1e-24 L(0), or below the solver's error in L(0), is taken for 0. Not a number is a violation. The certificate must hold, and be
    of the kind of the run.

    Examples:
        >>> import torch
        >>> from opteq.cells import ScaledReLU
        >>> from opteq.data import unit_norm
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import certified_init, certify, check, descend
        >>> X, y = unit_norm(torch.randn(4, 8, dtype=torch.float64)), torch.randn(4, dtype=torch.float64)
        >>> readout = certified_init(Readout(ScaledReLU(8, 32)), X, y)
        >>> certificate = certify(readout, X, y, sharp=True)
        >>> check(certificate, descend(readout, X, y, certificate.max_step, 10)) is None
        True
    """
    check_instance("check", "certificate", certificate, Certificate, "a Certificate")
    check_instance("check", "run", run, Run, "a Run, as `descend`, `measure_flow` and `Monitor.run` give it")
    check_number("check", "slack", slack, 0.0)
    if not certificate.holds:
        raise ValueError(invalid("check", "certificate", "one that holds: others conclude nothing", certificate.theorem))
    if (certificate.kind == "flow") != (run.step is None):
        expected = "a flow (step None)" if certificate.kind == "flow" else "a descent, with its step size"
        raise ValueError(invalid("check", "run", f"{expected}, as the certificate is", f"step {run.step}"))
    return next(_violations(certificate, run, slack), None)


def _violations(certificate: Certificate, run: Run, slack: float) -> Iterator[Violation]:
    wanted, doubt = _residual(certificate)
    first = run.measurements[0].loss
    if not abs(math.sqrt(2 * first) - wanted) <= max(slack, _SAME) * wanted + 2 * doubt:
        yield Violation("start", 0, first, "==", wanted * wanted / 2, "The run begins at other parameters, or with other data.")
    note, step = "", run.step
    if step is not None and step > certificate.max_step * (1 + slack):
        note = f"The step {step:.6g} is above the admissible {certificate.max_step:.6g}: the theorem does not cover this run."
    step = None if step is None else min(step, certificate.max_step)
    floor = max(_FLOOR * certificate.loss, doubt * doubt / 2)
    for at, measurement in zip(run.at, run.measurements, strict=True):
        loss = 0.0 if measurement.loss <= floor else measurement.loss
        claims = [("loss", loss, "<=", certificate.loss_bound(at, step))]
        claims += [(g.quantity, measurement.quantities.get(g.quantity, math.nan), g.sense, g.bound) for g in certificate.guarantees]
        for quantity, value, sense, bound in claims:
            if not (value <= bound * (1 + slack) if sense == "<=" else value >= bound * (1 - slack)):
                yield Violation(quantity, at, value, sense, bound, note)
    if note:
        assert run.step is not None
        yield Violation("step", 0, run.step, "<=", certificate.max_step, note)


def _residual(certificate: Certificate) -> tuple[float, float]:
    """|y^ - y| at the start as computed, and how far from it the truth may be."""
    bound = math.sqrt(2 * certificate.loss)
    measured = bound if certificate.measured is None else math.sqrt(2 * certificate.measured)
    return measured, bound - measured
