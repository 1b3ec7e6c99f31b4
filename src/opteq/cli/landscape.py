"""`opteq landscape`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from torch import nn

from opteq import diagnostics
from opteq.cli.common import console, parse, tell_unfinished
from opteq.data import Dataset
from opteq.diagnostics import data_loss
from opteq.recipes import load_model, sample
from opteq.runs import RunError

__all__ = ["landscape"]


@dataclass(frozen=True)
class Landscape:
    """Draw the loss of a trained run around its weights, along random directions, hatched where a solve failed.

    $ opteq landscape runs/digits-deep-1 --steps 21 --samples 64
    """

    run: tyro.conf.Positional[Path]
    """The run folder."""
    steps: int = 51
    """Points in each direction; the loss is computed at steps x steps of them."""
    span: float = 1.0
    """How far to go, as a multiple of the weights."""
    samples: int = 256
    """Training samples in the loss, always the same ones."""
    dims: Literal[1, 2] = 2
    """1: along a line."""
    seed: int = 0
    """Of the directions."""
    biases: Literal["fixed", "scaled"] = "fixed"
    """scaled: biases and the parameters of normalisation move as well."""
    level: float | None = None
    """The loss at which the basin is measured; by default twice that of the trained network."""
    fresh: bool = False
    """Begin again instead of going on from landscape.jsonl."""
    out: Path | None = None
    """The folder of landscape.csv, .svg, .png, and of .jsonl, from which the same command goes on; by default the run folder."""


def landscape(arguments: Sequence[str]) -> int:
    """Draw a landscape."""
    options: Landscape = parse(Landscape, "landscape", arguments)
    if options.steps % 2 == 0:
        raise ValueError(f"--steps must be odd: the point in the middle is the trained network. Got {options.steps} instead.")
    if options.samples < 1:
        raise ValueError(f"--samples must be at least 1. Got {options.samples} instead.")
    if options.level is not None and not math.isfinite(options.level):
        raise ValueError(f"--level must be a number. Got {options.level} instead.")
    model, dataset = load_model(options.run)
    tell_unfinished(options.run)
    found = _compute(model, dataset, options)
    paths = found.save(options.out or options.run, found.figure(options.level))
    out = console()
    for line in _summary(found, options.level):
        out.print(line)
    out.print("\n".join(map(str, paths)), soft_wrap=True)
    return 0


def _compute(model: nn.Module, dataset: Dataset, options: Landscape) -> diagnostics.Landscape:
    file = (options.out or options.run) / "landscape.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        file.unlink(missing_ok=True)
    try:
        return diagnostics.landscape(
            model,
            data_loss(*sample(dataset.train, options.samples), ignore=dataset.ignore),
            steps=options.steps,
            span=options.span,
            seed=options.seed,
            dims=options.dims,
            biases=options.biases,
            file=file,
            progress=True,
        )
    except RunError as error:
        raise RunError(f"{error}; --out names another folder, --fresh begins again in this one") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on where it stopped") from None


def _summary(found: diagnostics.Landscape, level: float | None) -> Iterator[str]:
    """What a landscape says, in words."""
    middle = float(found.loss[(len(found.axis) // 2,) * found.loss.ndim])
    known = found.loss[found.loss.isfinite()]
    span = f"{float(known.min()):.4g} to {float(known.max()):.4g}" if len(known) else "unknown"
    yield f"loss {middle:.4g} in the middle, {span} around it;"
    yield f"every equilibrium was found at {float(found.converged.double().mean()):.1%} of the {found.loss.numel():,} points."
    if not bool(found.converged[(len(found.axis) // 2,) * found.loss.ndim]) or not math.isfinite(middle):
        yield "The trained network itself did not converge, so that its basin is not known."
        return
    basin = found.basin(2 * middle if level is None else level)
    bound = "at least " if basin.at_edge or basin.at_failure else ""
    size = f"{bound}{basin.diameter:.3g} wide" if found.loss.ndim == 1 else f"{bound}{basin.diameter:.3g} in diameter"
    which = " (twice that in the middle)" if level is None else ""
    yield f"basin where the loss is at most {basin.level:.4g}{which}: {size}, {basin.points:,} points;"
    flat = found.flatness()
    curvature = " and ".join(f"{value:.3g}" for value in flat.curvature)
    yield f"within {flat.radius:.3g}: sharpness {flat.sharpness:.3g}, mean increase {flat.increase:.3g}; curvature {curvature}."
