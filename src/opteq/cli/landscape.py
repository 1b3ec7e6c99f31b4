"""`opteq landscape`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

from opteq.cli.common import console, parse
from opteq.data import Dataset

__all__ = ["landscape"]


@dataclass(frozen=True)
class Landscape:
    """Draw the loss of a trained run around its weights, along random directions, hatched where a solve failed.

    $ opteq landscape runs/digits-deep-1 --steps 21 --batch 64
    """

    run: tyro.conf.Positional[Path]
    """The run folder."""
    steps: int = 51
    """Points in each direction; the loss is computed at steps x steps of them."""
    span: float = 1.0
    """How far to go, as a multiple of the weights."""
    batch: int = 64
    """Training samples in the loss, always the same ones."""
    dims: Literal[1, 2] = 2
    """1: along a line."""
    seed: int = 0
    """Of the directions."""
    out: Path | None = None
    """The folder of landscape.png, .svg and .csv; by default the run folder."""


def landscape(arguments: Sequence[str]) -> int:
    """Draw a landscape."""
    options: Landscape = parse(Landscape, "landscape", arguments)
    if options.steps % 2 == 0:
        raise ValueError(f"--steps must be odd: the point in the middle is the trained network. Got {options.steps} instead.")
    from opteq import diagnostics
    from opteq.recipes import load_model
    from opteq.training import Objective

    model, dataset = load_model(options.run)
    x, y = _batch(dataset, options.batch)
    objective = Objective(ignore=dataset.ignore)

    def loss(network: nn.Module) -> Tensor:
        return objective(network(x), y)[0]

    found = diagnostics.landscape(model, loss, steps=options.steps, span=options.span, seed=options.seed, dims=options.dims)
    folder = options.out or options.run
    folder.mkdir(parents=True, exist_ok=True)
    paths = [found.csv(folder / "landscape.csv"), *(found.draw(folder / f"landscape.{kind}") for kind in ("png", "svg"))]
    at = options.steps // 2
    middle = found.loss[(at,) * options.dims]
    out = console()
    out.print(f"loss {float(middle):.4g} in the middle, {float(found.loss.min()):.4g} to {float(found.loss.max()):.4g} around it;")
    out.print(f"every equilibrium was found at {float(found.converged.double().mean()):.1%} of the {found.loss.numel():,} points.")
    out.print("\n".join(map(str, paths)), soft_wrap=True)
    return 0


def _batch(dataset: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """So many training samples, drawn at random but always the same."""
    rows = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(0))[:count]
    return dataset.train.x[rows], dataset.train.y[rows]
