"""`opteq diagnose`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import tyro
from torch import Tensor, nn

from opteq.cli.common import console, parse, tell_unfinished
from opteq.diagnostics import (
    Finding,
    data_loss,
    hessian_spectrum,
    residual_curve,
    spectrum_of,
    training_curves,
    trajectory,
)
from opteq.recipes import load_stages, sample

__all__ = ["diagnose"]

Look: TypeAlias = Literal["curves", "residuals", "trajectory", "jacobian", "hessian"]


@dataclass(frozen=True)
class Diagnose:
    """Look into a trained run: figures (SVG, PNG) and tables (CSV) in its folder, which `opteq report` shows.

    $ opteq diagnose runs/digits-deep-1
    $ opteq diagnose runs/digits-deep-1 --only residuals trajectory --samples 128

    curves: all that was measured over the training. residuals: how fast each solver finds the equilibria. trajectory: where the
    iterates go, before the training, at the checkpoints that it left, and after. jacobian: the eigenvalues of f' at the
    equilibria, below 1 where plain iteration converges. hessian: the largest curvatures of the loss.
    """

    run: tyro.conf.Positional[Path]
    """The run folder."""
    only: tuple[Look, ...] = get_args(Look)
    """Some of them only."""
    samples: int = 64
    """Training samples to look at, always the same ones."""
    seed: int = 0
    """Of which samples, and of random vectors."""
    out: Path | None = None
    """Where to write; by default the run folder."""


def diagnose(arguments: Sequence[str]) -> int:
    """Look into a run."""
    options: Diagnose = parse(Diagnose, "diagnose", arguments)
    if options.samples < 2:
        raise ValueError(f"--samples must be at least 2. Got {options.samples} instead.")
    if not options.only:
        raise ValueError(f"--only needs at least one of {', '.join(get_args(Look))}.")
    subject = Subject.of(options)
    tell_unfinished(options.run)
    out = console()
    for look in dict.fromkeys(options.only):
        try:
            found, words = LOOKS[look](subject)
        except ValueError as error:  # such as a network without an equilibrium, or with a gradient that is none
            out.print(f"{look}: left out. {error}", soft_wrap=True)
            continue
        paths = found.save(options.out or options.run)
        out.print("\n".join([f"{look}: {words}", *(f"  {path}" for path in paths)]), soft_wrap=True)
    return 0


@dataclass(frozen=True)
class Subject:
    """What is looked at: the model at the stages of its training, and some samples."""

    folder: Path
    stages: dict[str, nn.Module]
    x: Tensor
    y: Tensor
    ignore: int | None
    seed: int

    @classmethod
    def of(cls, options: Diagnose) -> "Subject":
        """As the options say."""
        stages, dataset = load_stages(options.run)
        return cls(options.run, stages, *sample(dataset.train, options.samples, options.seed), dataset.ignore, options.seed)

    @property
    def model(self) -> nn.Module:
        """The trained one."""
        return self.stages["after"]


def _curves(subject: Subject) -> tuple[Finding, str]:
    found = training_curves(subject.folder)
    if not found.panels:
        raise ValueError("Nothing has been measured yet.")
    return found, ", ".join(panel.title.lower() for panel in found.panels)


def _residuals(subject: Subject) -> tuple[Finding, str]:
    found = residual_curve(subject.model, subject.x)
    each = [f"{name} {float(c.solved[-1]):.0%} with {int(c.evals[-1])} evaluations" for name, c in found.curves.items()]
    return found, f"share solved to {found.stop.rtol:g} by {'; '.join(each)}"


def _trajectory(subject: Subject) -> tuple[Finding, str]:
    classes = subject.y if subject.y.ndim == 1 and not subject.y.is_floating_point() else None
    found = trajectory(subject.stages, subject.x, classes)
    return found, f"mean length {', '.join(f'{n.mean:.3g} {stage}' for stage, n in zip(found.stages, found.length, strict=True))}"


def _jacobian(subject: Subject) -> tuple[Finding, str]:
    found = spectrum_of(subject.model, subject.x, seed=subject.seed)
    radius = found.radius[found.radius.isfinite()]
    if not len(radius):
        return found, "no eigenvalue was found"
    return found, f"spectral radius {float(radius.mean()):.3g} on average, {float(radius.max()):.3g} at most"


def _hessian(subject: Subject) -> tuple[Finding, str]:
    loss = data_loss(subject.x, subject.y, ignore=subject.ignore)
    found = hessian_spectrum(subject.model, loss, seed=subject.seed)
    return found, f"largest eigenvalues {', '.join(f'{value:.4g}' for value in found.eigenvalues.tolist())}"


LOOKS: dict[Look, Callable[[Subject], tuple[Finding, str]]] = {
    "curves": _curves,
    "residuals": _residuals,
    "trajectory": _trajectory,
    "jacobian": _jacobian,
    "hessian": _hessian,
}
