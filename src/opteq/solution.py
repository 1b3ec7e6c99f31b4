"""When to stop and what was found: Stop, Solution, a Status for each sample."""

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

from opteq.checks import check_integer, check_number, is_transformed


@dataclass(frozen=True)
class Stop:
    """Stop when |f(z) - z| <= atol + rtol |f(z)| for each sample, or after max_steps steps of the solver.

    Examples:
        >>> import torch
        >>> from opteq import Stop, solve
        >>> from opteq.solvers import Picard
        >>> found = solve(torch.cos, torch.zeros(1, 1), Picard(), Stop(rtol=1e-3, max_steps=50))
        >>> bool(found.residual <= 1e-3), int(found.steps) < 50
        (True, True)
    """

    rtol: float = 1e-4
    atol: float = 0.0
    max_steps: int = 100

    def __post_init__(self) -> None:
        check_number(self, "rtol", self.rtol, 0.0)
        check_number(self, "atol", self.atol, 0.0)
        check_integer(self, "max_steps", self.max_steps, 1)


class Status(Enum):
    """What became of a sample, from good to bad; the value is the message with the remedy.

    Examples:
        >>> from opteq import Status
        >>> [status.name for status in Status]
        ['CONVERGED', 'MAX_STEPS', 'DIVERGED', 'NONFINITE']
        >>> print(Status.CONVERGED.value)
        converged: the residual of the returned z meets the tolerance.
    """

    CONVERGED = "converged: the residual of the returned z meets the tolerance."
    MAX_STEPS = (
        "stopped at max_steps: (a) raise Stop.max_steps, (b) loosen Stop.rtol, (c) take a faster solver "
        "(Anderson, Broyden, Newton; PeacemanRachford for monotone cells), (d) if the residual stalls, the map may be no "
        "contraction: lower the norm of its weights."
    )
    DIVERGED = (
        "diverged: the iterates grow and the residual does not fall. (a) The equation may have no solution, "
        "(b) the map may be no contraction: lower the norm of its weights, (c) try Anderson or Newton, or damping below 1."
    )
    NONFINITE = (
        "met NaN or infinity: (a) look for NaN or infinity in this sample's input, "
        "(b) f may be undefined where the iteration went, (c) the iterates may overflow: lower the norm of the weights."
    )

    @property
    def code(self) -> int:
        """Its place in this list, by which `Solution.codes` names it."""
        return tuple(Status).index(self)


def finite(codes: Tensor) -> Tensor:
    """Which samples did not meet NaN or infinity."""
    return codes != Status.NONFINITE.code


@dataclass(frozen=True)
class Trace:
    """At each step: which samples were still being solved, how far each one was, what that had cost and, if asked for, where.

    `residual` is true for every solver: where a solver only estimates, f was evaluated once more, unknown to it and not counted.
    """

    rows: tuple[Tensor, ...] = ()
    residual: tuple[Tensor, ...] = ()
    evals: tuple[int, ...] = ()
    z: tuple[Tensor, ...] | None = None  # the iterates, in the order of the rows

    def of(self, sample: int) -> Tensor:
        """The residuals of one sample, one for each step until it was done."""
        return torch.cat([r[i == sample] for i, r in zip(self.rows, self.residual, strict=True)])

    def path(self, sample: int) -> Tensor:
        """The iterates of one sample from z0 on, [steps + 1, ...], where they were recorded."""
        if self.z is None:
            raise ValueError("The trace holds no iterates: ask for them with record(iterates=True).")
        return torch.cat([z[i == sample] for i, z in zip(self.rows, self.z, strict=True)])

    def then(self, rows: Tensor, residual: Tensor, evals: int, z: Tensor) -> "Trace":
        """The trace with one more step."""
        places = None if self.z is None else (*self.z, z)
        return Trace((*self.rows, rows), (*self.residual, residual), (*self.evals, evals), places)


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """The best z found for each sample and how good it is: `residual` is |f(z) - z| / |f(z)| of that very z.

    Examples:
        >>> import torch
        >>> from opteq import solve
        >>> from opteq.solvers import Anderson
        >>> found = solve(torch.cos, torch.tensor([[0.0], [float("nan")]]), Anderson())
        >>> found.status.name, found.converged.tolist()
        ('NONFINITE', [True, False])
        >>> print(round(found.z[0].item(), 3), bool(found.residual[0] <= found.stop.rtol))
        0.739 True
    """

    z: Tensor
    codes: Tensor  # per sample, Status.code
    residual: Tensor
    steps: Tensor
    evals: int
    stop: Stop
    trace: Trace | None = None

    @property
    def converged(self) -> Tensor:
        """Which samples meet the tolerance."""
        return self.codes == Status.CONVERGED.code

    @property
    def statuses(self) -> tuple[Status, ...]:
        """The status of each sample."""
        known = tuple(Status)
        return tuple(known[code] for code in self.codes.tolist())

    @property
    def status(self) -> Status:
        """The worst status of the batch."""
        return tuple(Status)[int(self.codes.max())] if self.codes.numel() else Status.CONVERGED

    def __repr__(self) -> str:
        shape = f"z {list(self.z.shape)} {self.z.dtype}"
        if is_transformed(self.codes):
            return f"Solution({shape})"
        counts = ", ".join(f"{count} {status.name}" for status, count in Counter(self.statuses).items())
        worst = f"worst residual {self.residual.max().item():.1e}, most steps {int(self.steps.max())}, " if len(self.codes) else ""
        return f"Solution({counts or 'empty'}; {worst}evals {self.evals}, {shape})"

    def explain(self) -> str:
        """What happened, how far it got, what to try."""
        counts = Counter(self.statuses)
        failed = [status for status in reversed(Status) if counts[status] and status is not Status.CONVERGED]
        total = len(self.codes)
        if not failed:
            return f"All {total} samples converged (rtol {self.stop.rtol:g}, atol {self.stop.atol:g})."
        residual = self.residual[~self.converged]
        known = residual[residual.isfinite()]
        reached = f"{known.max().item():.2e}" if known.numel() else "unknown"
        head = f"{total - counts[Status.CONVERGED]} of {total} samples did not converge. "
        how_far = (
            f"The worst relative residual is {reached} (rtol {self.stop.rtol:g}, atol {self.stop.atol:g}) "
            f"after {int(self.steps.max())} steps, {self.evals} evaluations."
        )
        drifting = int((residual <= self.stop.rtol).sum())
        drift = f" {drifting} met the tolerance only because |f(z)| is large: their residual did not fall." if drifting else ""
        return head + how_far + drift + "".join(f"\n{counts[status]} {status.value}" for status in failed)

    def raise_if_failed(self) -> Self:
        """This solution, or a ConvergenceError if a sample did not converge."""
        if self.status is not Status.CONVERGED:
            raise ConvergenceError(self.explain(), self)
        return self


class ConvergenceError(RuntimeError):
    """An equilibrium was not found; `solution` holds what was.

    Examples:
        >>> import torch
        >>> from opteq import ConvergenceError, Stop, solve
        >>> from opteq.solvers import Picard
        >>> try:
        ...     solve(torch.cos, torch.zeros(1, 1), Picard(), Stop(max_steps=3)).raise_if_failed()
        ... except ConvergenceError as error:
        ...     print(error.solution.status)
        Status.MAX_STEPS
    """

    def __init__(self, message: str, solution: "Solution") -> None:
        super().__init__(message)
        self.solution = solution

    def __reduce__(self) -> tuple[Any, ...]:
        """With the solution, but for its derivatives, so that it can be copied, and sent from a process to another."""
        plain = replace(self.solution, z=self.solution.z.detach())
        return type(self), (*self.args, plain), {name: value for name, value in vars(self).items() if name != "solution"}


def relative(size: Tensor, scale: Tensor) -> Tensor:
    """size / scale, and 0 / 0 = 0."""
    return torch.where(size == 0, torch.zeros_like(size), size / scale)
