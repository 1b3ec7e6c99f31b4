"""Run folders for reports: as a training leaves them, and as nobody would."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opteq import Equilibrium
from opteq.cells import OptEq
from opteq.recipes.recipe import write_statement
from opteq.runs import Run

CONFIG = {
    "data": {"name": "digits", "batch": 64, "augment": None},
    "model": {"kind": "deep", "widths": [64, 64], "activation": "relu", "alpha": 0.5},
    "train": {"epochs": 10, "lr": 0.1, "seed": 0, "guard": {"clip": 1.0, "rollback": True}},
}
CERTIFICATE = {
    "theorem": "Scaled ReLU network, Theorem 4.4 (gradient descent)",
    "kind": "descent",
    "holds": True,
    "max_step": 1e-3,
    "rate": 0.99,
    "conditions": [
        {"name": "well-posed", "formula": "1 > gamma (||A|| + C2)", "lhs": 1.0, "rhs": 0.1, "slack": 10.0, "evidence": "exact"},
        {"name": "width", "formula": "width >= N", "lhs": 64.0, "rhs": 16.0, "slack": 4.0, "evidence": "exact"},
        {"name": "rank", "formula": "sigma_min(Z) > 0", "lhs": 27.4, "rhs": 0.0, "slack": None, "holds": True, "evidence": "bound"},
    ],
    "explain": "Verdict: CERTIFIED\nevery condition holds at the start",
    "trained": {"steps": 200, "loss_first": 1.5, "loss_last": 0.25, "bound_last": 0.75, "violation": None},
}
EVENT = {
    "kind": "event",
    "step": 60,
    "what": "nan_loss",
    "layer": "equilibrium",
    "message": "loss is NaN at step 60",
    "action": "rolled back",
}
ROWS = [{"kind": "step", "step": at, "loss": 1 / at, "grad_norm": 2 / at} for at in range(1, 41)]
TRAJECTORY, RESIDUALS = "stage sample label step pc1 pc2", "solver step worst high median low solved"
JACOBIAN, HESSIAN = "sample index real imag converged", "index eigenvalue error converged"
MARKUP = "<script>window.hostile = 1</script><img src=x onerror='window.hostile = 2'>"


PLAIN = {"data": {"name": "digits"}, "model": {"width": 16, "channels": [8, 16]}, "train": {"lr": 0.1, "seed": None}}


def make(folder: Path, rows: Iterable[Any] | None = None, config: Any = PLAIN, **files: Any) -> Path:
    """A run folder, written without the library. `files`: JSON by name; a text is written as it is."""
    folder.mkdir(parents=True)
    files = {"config": config, "environment": {"python": "3.11", "git": {"dirty": True}}, **files}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    if rows is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(folder: Path, seed: int = 0, steps: int = 400) -> Path:
    """A run as a training leaves it, with every finding, made up: its validation loss after epoch n is 1 / (n + seed + 1)."""
    random = np.random.default_rng(seed)
    with Run.create(folder, CONFIG | {"train": CONFIG["train"] | {"seed": seed}}) as run:
        for row in (*_steps(steps, random), *_epochs(steps, seed), *_monitored(steps), EVENT):
            run.log(row)
        run.write("result.json", _result(steps, seed))
        run.write("certificate.json", CERTIFICATE)
    torch.manual_seed(seed)
    write_statement(Equilibrium(OptEq(4, 3, 12)), folder)
    write_findings(folder, random)
    return folder


def write_findings(folder: Path, random: np.random.Generator) -> None:
    """The CSV files of the diagnostics."""
    _table(folder / "landscape.csv", "x y loss converged", _landscape())
    _table(folder / "trajectory.csv", TRAJECTORY, _trajectories(random))
    _table(folder / "residuals.csv", RESIDUALS, _residuals())
    _table(folder / "jacobian.csv", JACOBIAN, _eigenvalues(random))
    values = sorted(random.exponential(size=12), reverse=True)
    _table(folder / "hessian.csv", HESSIAN, [(i, v, 1e-6 * v, i < 10) for i, v in enumerate(values)])


def loss_at(x: float, y: float) -> float:
    """The landscape of `trained`."""
    return 0.05 + x * x + 2 * y * y


def hostile(folder: Path) -> Path:
    """A run in which every text is markup and the numbers are none: `window.hostile` tells whether any of it was run."""
    values = [math.nan, math.inf, -math.inf, 1e308, 10**400, MARKUP, None, [], {}, True, -5, 0, "x" * 1_000_000]
    keys = ("loss", "lr", "solver_steps", "converged", "grad_norm", MARKUP)
    rows: list[Any] = [{"kind": "step", "step": at, **dict.fromkeys(keys, value)} for at, value in enumerate(values, 1)]
    rows += [{"kind": "step", "step": 20 + at, "loss": 1.0 / at} for at in range(1, 9)]
    rows += [{"kind": "epoch", "step": at, "valid_loss": 0.5, "alpha": {MARKUP: 0.5, "%{x}": 1.0}} for at in (1, 2)]
    rows += [{"kind": "monitor", "step": at, "loss": 1.0, "bound": 2.0, f"norm {MARKUP}": 3.0} for at in (1, 2)]
    rows += [{**EVENT, "what": MARKUP, "message": MARKUP, "layer": MARKUP, "action": MARKUP}, [], MARKUP, {"kind": MARKUP}]
    condition = {"name": MARKUP, "formula": MARKUP, "lhs": math.nan, "slack": MARKUP, "evidence": MARKUP, "remedy": MARKUP}
    certificate = {"theorem": MARKUP, "holds": False, "conditions": [condition], "explain": MARKUP}
    problem = {"kind": MARKUP, "text": MARKUP, "latex": MARKUP, "requirements": [{"text": MARKUP}]}
    files = {"certificate": certificate, "problem": problem, "environment": {MARKUP: MARKUP}}
    make(folder, rows, {MARKUP: {MARKUP: MARKUP}}, result={"steps": MARKUP, "stopped": MARKUP, MARKUP: MARKUP}, **files)
    _table(folder / "trajectory.csv", TRAJECTORY, [(MARKUP, MARKUP, MARKUP, at, at, at) for at in range(3)])
    _table(folder / "residuals.csv", RESIDUALS, [(MARKUP, at, 1, 1, 0.5, "inf", MARKUP) for at in range(3)])
    _table(folder / "jacobian.csv", JACOBIAN, [(MARKUP, 0, 0.5, 0.5, MARKUP)])
    _table(folder / "hessian.csv", HESSIAN, [(MARKUP, 1.0, MARKUP, MARKUP)])
    _table(folder / "landscape.csv", "x loss converged", [(at, MARKUP if at else 1.0, MARKUP) for at in range(3)])
    return folder


def _steps(steps: int, random: np.random.Generator) -> Iterable[dict[str, Any]]:
    for at in range(1, steps + 1):
        loss = 2.0 * math.exp(-4 * at / steps) * math.exp(0.15 * random.standard_normal())
        solver = {"solver_steps": 6 + 4 * at / steps, "backward_steps": 7 + 3 * at / steps, "converged": 1.0 - 0.02 * (at % 7 == 0)}
        yield {"kind": "step", "step": at, "loss": loss, "accuracy": 1 - loss / 3, "lr": 0.1, "grad_norm": 2 * loss, **solver}


def _epochs(steps: int, seed: int) -> Iterable[dict[str, Any]]:
    for at in range(1, 11):
        loss = {"train_loss": 0.8 / (at + seed + 1), "valid_loss": 1 / (at + seed + 1)}
        accuracy = {"train_accuracy": 1 - 0.4 / at, "valid_accuracy": 1 - 0.5 / at}
        solver = {"valid_converged": 0.996, "valid_solver_steps": 8.25, "alpha": [0.5 - 0.01 * at, 0.25 + 0.02 * at]}
        norms = {"equilibrium.cell.layers.0": 0.8 + 0.01 * at, "equilibrium.cell.layers.1": 0.9}
        yield {"kind": "epoch", "step": at * steps // 10, "epoch": at, **loss, **accuracy, **solver, "norms": norms}


def _monitored(steps: int) -> Iterable[dict[str, Any]]:
    for part in range(21):
        losses = {"loss": 1.5 * 0.8**part, "bound": 1.5 * 0.99**part, "pl": 3.0 + 0.01 * part, "ntk_min": 2.0}
        moved = {"norm A": 1.0, "norm W": 2.0 + 0.01 * part, "moved A": 0.01 * part, "moved W": 0.02 * part}
        drift = {"kernel_drift": 0.01 * part, "pattern_change": 0.002 * part, "solver_steps": 9.0}
        yield {"kind": "monitor", "step": part * steps // 20, **losses, **moved, **drift}


def _result(steps: int, seed: int) -> dict[str, Any]:
    parameters = {"total": 12_340, "extractor": 340, "equilibrium": 12_000}
    scores = {"valid_accuracy": 0.95 - 0.01 * seed, "test_accuracy": 0.9412, "valid_loss": 1 / (11 + seed)}
    return {"stopped": None, "steps": steps, "epochs": 10, "seconds": 75.0, "parameters": parameters, **scores}


def _landscape() -> Iterable[Sequence[Any]]:
    places = np.linspace(-1, 1, 21).round(6).tolist()
    return [(x, y, loss_at(x, y), not (x > 0.6 and y > 0.6)) for x in places for y in places]


def _trajectories(random: np.random.Generator) -> Iterable[Sequence[Any]]:
    for stage in ("before", "epoch 5", "after"):
        for sample in range(40):
            end, start = 3 * np.array([math.cos(sample % 10), math.sin(sample % 10)]), random.standard_normal(2)
            for at in range(12):
                yield stage, sample, sample % 10, at, *(end + (start - end) * 0.7**at)


def _residuals() -> Iterable[Sequence[Any]]:
    for solver, rate in (("Picard()", 0.8), ("Anderson()", 0.5)):
        for at in range(25):
            yield solver, at, rate**at, 0.5 * rate**at, 0.1 * rate**at, 0.01 * rate**at, min(1.0, at / 20)


def _eigenvalues(random: np.random.Generator) -> Iterable[Sequence[Any]]:
    for sample in range(4):
        for index, (modulus, angle) in enumerate(zip(0.9 ** np.arange(16), random.uniform(-3, 3, 16), strict=True)):
            yield sample, index, modulus * math.cos(angle), modulus * math.sin(angle), index < 14


def _table(path: Path, heads: str, rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heads.split(), *rows])
