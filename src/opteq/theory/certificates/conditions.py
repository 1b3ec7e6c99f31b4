"""What a certificate is made of: conditions with both sides, the conclusions that follow, and a text that says so."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from opteq.checks import check_number, invalid
from opteq.spectral import Evidence

__all__ = ["Certificate", "Condition", "Guarantee", "Kind"]

Kind: TypeAlias = Literal["descent", "flow", "assumption"]


@dataclass(frozen=True)
class Condition:
    """lhs >= rhs, or lhs > rhs when `strict`: always written so that a larger lhs is better. NaN never holds.

    Nothing is concluded from 0 >= 0: a condition with rhs = 0 holds only if lhs > 0.

    Examples:
        >>> from opteq.theory.certificates import Condition
        >>> condition = Condition("width", "width >= N", lhs=64, rhs=8)
        >>> condition.holds, condition.slack
        (True, 8.0)
    """

    name: str
    formula: str
    lhs: float
    rhs: float
    evidence: Evidence = "exact"
    remedy: str = ""
    strict: bool = False

    @property
    def holds(self) -> bool:
        """Whether both sides are numbers, the right one finite, and the inequality is true."""
        return self.rhs < math.inf and (self.lhs > self.rhs or (self.lhs == self.rhs > 0 and not self.strict))

    @property
    def slack(self) -> float:
        """lhs / rhs: at least 1 when the condition holds; infinite when it asks for nothing but lhs > 0."""
        if math.isnan(self.lhs) or math.isnan(self.rhs) or (math.isinf(self.lhs) and math.isinf(self.rhs)):
            return math.nan
        if self.rhs <= 0:
            return math.inf if self.lhs > self.rhs else 0.0
        return self.lhs / self.rhs

    @property
    def verdict(self) -> str:
        """Ok, or by which factor it fails."""
        if self.holds:
            return "ok"
        if math.isnan(self.lhs) or math.isnan(self.rhs):
            return "not evaluated"
        if self.lhs == self.rhs:
            return "FAILS: not above"
        known = math.isfinite(self.slack) and self.slack > 0
        return f"FAILS by a factor of {1 / self.slack:.3g}" if known else "FAILS"

    def __str__(self) -> str:
        return f"{self.name}: {self.formula}: {self.lhs:.4g} against {self.rhs:.4g} ({self.evidence}), {self.verdict}"


@dataclass(frozen=True)
class Guarantee:
    """quantity <= bound, or >= bound, at every step: `quantity` is a key of Measurement.quantities.

    Examples:
        >>> import torch
        >>> from opteq.cells import ScaledReLU
        >>> from opteq.data import unit_norm
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import certified_init, certify
        >>> X, y = unit_norm(torch.randn(4, 8, dtype=torch.float64)), torch.randn(4, dtype=torch.float64)
        >>> certificate = certify(certified_init(Readout(ScaledReLU(8, 32)), X, y), X, y)
        >>> [guarantee.quantity for guarantee in certificate.guarantees if guarantee.sense == ">="]
        ['sigma_min Z']
    """

    quantity: str
    sense: Literal["<=", ">="]
    bound: float

    def __str__(self) -> str:
        return f"{self.quantity} {self.sense} {self.bound:.6g}"


@dataclass(frozen=True)
class Certificate:
    """Whether a theorem applies at theta(0), and what then holds for ever.

    `holds` is None when the conditions imply nothing that can be checked. `decay`: L(k) <= (1 - step decay)^k L(0) for every step
    in (0, max_step], or L(t) <= exp(-decay t) L(0) for flows. `rate`: 1 - max_step decay, or decay for flows. A certificate that
    does not hold has max_step = 0, decay = 0, rate = NaN, and no guarantees. `loss` bounds L(0) from above, rounding and the
    solver's error included; `measured` is L(0) as computed, which `check` knows a run by (None: `loss` is).

    Examples:
        >>> import torch
        >>> from opteq.cells import ScaledReLU
        >>> from opteq.data import unit_norm
        >>> from opteq.models import Readout
        >>> from opteq.theory.certificates import certified_init, certify
        >>> X, y = unit_norm(torch.randn(4, 8, dtype=torch.float64)), torch.randn(4, dtype=torch.float64)
        >>> certificate = certify(certified_init(Readout(ScaledReLU(8, 32)), X, y), X, y)
        >>> certificate.holds, certificate.kind, certificate.loss_bound(100) < certificate.loss
        (True, 'descent', True)
    """

    theorem: str
    kind: Kind
    holds: bool | None
    conditions: tuple[Condition, ...]
    max_step: float
    rate: float
    decay: float
    radii: Mapping[str, float]
    guarantees: tuple[Guarantee, ...]
    loss: float
    notes: tuple[str, ...] = field(default=())
    measured: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "radii", dict(self.radii))

    @property
    def failing(self) -> tuple[Condition, ...]:
        """The conditions that fail, worst first; those that could not be evaluated, because others fail, come last."""
        worst = sorted(self.conditions, key=lambda c: math.inf if math.isnan(c.slack) else c.slack)
        return tuple(c for c in worst if not c.holds)

    def loss_bound(self, k: float, step: float | None = None) -> float:
        """(1 - step decay)^k L(0) after k steps of size `step` (default: max_step); exp(-decay k) L(0) at the time k of a flow."""
        check_number("loss_bound", "k", k, 0.0)
        if not self.holds:
            raise ValueError(f"{self.theorem} does not hold here, so that it bounds no loss. Its explain() says why.")
        if self.kind == "flow":
            if step is not None:
                raise ValueError(invalid("loss_bound", "step", "None for a flow", step))
            return math.exp(-self.decay * k) * self.loss
        step = self.max_step if step is None else step
        check_number("loss_bound", "step", step, 0.0, self.max_step, open_low=True)
        return math.exp(k * math.log1p(-step * self.decay)) * self.loss

    @property
    def half_life(self) -> float:
        """After how many steps of size max_step, or how much time, the guarantee has halved the loss: infinite without one."""
        if not self.holds:
            return math.inf
        return math.log(2) / (self.decay if self.kind == "flow" else -math.log1p(-self.max_step * self.decay))

    def explain(self) -> str:
        """The certificate as a text: the verdict, a table of the conditions, what follows or what to change."""
        return "\n".join([self.theorem, f"Verdict: {self._verdict()}", "", *self._table(), "", *self._outcome(), *self.notes])

    def __str__(self) -> str:
        return self.explain()

    def _verdict(self) -> str:
        if self.holds:
            return "CERTIFIED. Every condition holds, and so does every conclusion below."
        if self.holds is None:
            return "no guarantee is claimed, whatever the conditions say."
        skipped = sum(c.verdict == "not evaluated" for c in self.failing)
        rest = f", and {skipped} more cannot be evaluated" if skipped else ""
        return f"not certified: {len(self.failing) - skipped} of {len(self.conditions)} conditions fail{rest}."

    def _table(self) -> list[str]:
        rows = [("condition", "left", "right", "slack", "", "left >= right")]
        for c in self.conditions:
            rows.append((c.name, f"{c.lhs:.4g}", f"{c.rhs:.4g}", f"{c.slack:.3g}", c.verdict, f"{c.formula}  [{c.evidence}]"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return ["  ".join([*(cell.ljust(n) for cell, n in zip(row, widths, strict=False)), row[5]]).rstrip() for row in rows]

    def _outcome(self) -> list[str]:
        radii = ", ".join(f"{name} = {value:.4g}" for name, value in self.radii.items())
        lines = [f"Radii: {radii}."] if radii else []
        if self.holds:
            return lines + self._conclusions()
        remedies = dict.fromkeys(c.remedy for c in self.failing if c.remedy)
        return lines + (["What to change:", *(f"- {remedy}" for remedy in remedies)] if remedies else [])

    def _conclusions(self) -> list[str]:
        if self.kind == "flow":
            first = f"L(t) <= exp(-{self.decay:.4g} t) L(0) with L(0) = {self.loss:.4g}: halved by the time {self.half_life:.4g}."
        else:
            first = (
                f"Every step in (0, {self.max_step:.4g}] gives L(k) <= (1 - step * {self.decay:.4g})^k L(0) with L(0) = "
                f"{self.loss:.4g}; the largest 1 - {self.max_step * self.decay:.4g} a step, halved in {self.half_life:.4g} steps."
            )
        return [first, "At every step:", *(f"- {guarantee}" for guarantee in self.guarantees)]
