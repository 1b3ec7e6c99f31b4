"""`opteq certify`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
from torch import Tensor, nn

from opteq.cli.common import console, parse, table, tell_unfinished
from opteq.models import Readout
from opteq.recipes import (
    Data,
    Dense,
    Gaussian,
    Monotone,
    Recipe,
    ScaledRelu,
    Wide,
    build,
    certificate_json,
    load_model,
    train_certified,
    trained_json,
)
from opteq.runs import write_atomic
from opteq.theory.certificates import Certificate, certified_init
from opteq.theory.certificates import certify as certificate_of
from opteq.training import TrainConfig

__all__ = ["certify"]

Certifiable: TypeAlias = ScaledRelu | Gaussian | Monotone | Dense | Wide


@dataclass(frozen=True)
class Certify:
    """Ask whether gradient descent on the square loss is sure to converge: which conditions of a theorem hold, and by what factor.

    $ opteq certify scaled-relu --width 64 --data.limit 8
    $ opteq certify scaled-relu --init --sharp --train 50 --out certificate.json
    $ opteq certify --run runs/digits-scaled-relu-1

    The exit code is 1 where nothing is certified, or where a training broke what was promised.
    """

    model: Certifiable = field(default_factory=ScaledRelu)
    data: Data = field(default_factory=lambda: Data(limit=16, test_limit=16))
    """Two classes as vectors with targets -1 and 1; of norm sqrt(d) for gaussian, else 1, unless data.theory says which."""
    run: Path | None = None
    """Certify the trained model of this run folder, on its data, instead."""
    init: bool = False
    """Find initial weights for which the certificate holds."""
    sharp: bool = False
    """The same conclusions for a larger step, by a closer look at the proof."""
    flow: bool = False
    """For the gradient flow instead of descent."""
    train: int | None = None
    """Train so many steps under the certificate, and check that everything promised was kept."""
    seed: int = 0
    """Of the weights."""
    out: Path | None = None
    """Write the certificate as JSON: to this file, or as certificate.json into this folder."""


def certify(arguments: Sequence[str]) -> int:
    """Certify a model, perhaps train it."""
    options: Certify = parse(Certify, "certify", arguments)
    if options.train is not None and (options.flow or options.train < 1):
        raise ValueError("--train N needs N >= 1 and a certificate of descent: leave --flow out.")
    model, X, y = _problem(options)
    certificate = certificate_of(model, X, y, flow=options.flow, sharp=options.sharp)
    out = console()
    if options.init:
        try:
            model = certified_init(model, X, y, flow=options.flow)  # type: ignore[arg-type]
        except ValueError as error:  # the model and the data are sound, as `certify` took them
            out.print(str(error), soft_wrap=True)
            return 1
        certificate = certificate_of(model, X, y, flow=options.flow, sharp=options.sharp)
    _print(out, certificate)
    trained = _train(out, model, X, y, certificate, options.train) if options.train is not None else None
    if options.out is not None:
        _write(options.out, certificate_json(certificate, trained))
    broken = trained is not None and trained["violation"] is not None
    return 0 if certificate.holds and not broken else 1


def _problem(options: Certify) -> tuple[nn.Module, Tensor, Tensor]:
    """The model with its X and y."""
    if options.run is not None:
        _refuse_more(options)
        model, dataset = load_model(options.run)
        tell_unfinished(options.run)
    else:
        norm: Literal["sqrt_d", "unit"] = "sqrt_d" if isinstance(options.model, Gaussian) else "unit"
        data = replace(options.data, theory=norm) if options.data.theory == "off" else options.data
        dataset = data.load()
        model = build(Recipe(data, options.model, TrainConfig(seed=options.seed)), dataset)
    X, y = dataset.train.x[:], dataset.train.y
    return (model.double(), X.double(), y.double()) if isinstance(model, Readout) else (model, X, y.to(X.dtype))


def _refuse_more(options: Certify) -> None:
    """Raise if something is asked of a run that it has already."""
    usual = Certify()
    if given := [name for name in ("model", "data", "seed") if getattr(options, name) != getattr(usual, name)]:
        raise ValueError(f"--run takes the model and its data from the run folder: leave {' and '.join(given)} out.")


def _print(out: Console, certificate: Certificate) -> None:
    """The explanation, with its table as one that fits the terminal."""
    head, _, *rest = certificate.explain().split("\n\n")
    out.print(head, soft_wrap=True)
    rows = [
        (c.name, c.formula, f"{c.lhs:.4g}", f"{c.rhs:.4g}", f"{c.slack:.3g}", c.verdict, c.evidence) for c in certificate.conditions
    ]
    out.print(table(None, ("condition", "left >= right", "left", "right", "factor", "", "evidence"), rows))
    out.print("\n\n".join(rest), soft_wrap=True)


def _train(out: Console, model: nn.Module, X: Tensor, y: Tensor, certificate: Certificate, steps: int) -> dict[str, Any] | None:
    if not certificate.holds:
        out.print("\nNot trained: nothing is certified to train under. --init looks for weights that are.", soft_wrap=True)
        return None
    assert isinstance(model, Readout)
    monitor, violation = train_certified(model, X, y, certificate, steps)
    trained = trained_json(monitor, violation)
    story = "the loss went from {loss_first:.6g} to {loss_last:.6g}, at most {bound_last:.6g} was promised".format(**trained)
    kept = "everything promised was kept." if violation is None else f"BROKEN: {violation.explain()}"
    if violation is None and not trained["loss_last"] < (1 - 1e-9) * trained["loss_first"]:
        kept += " The steps are too small to see: --sharp allows larger ones."
    out.print(f"\nTrained {steps} steps of size {certificate.max_step:.4g}: {story}; {kept}", soft_wrap=True)
    return trained


def _write(path: Path, content: dict[str, Any]) -> None:
    target = path / "certificate.json" if path.is_dir() else path
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, json.dumps(content, indent=2, allow_nan=False) + "\n")
