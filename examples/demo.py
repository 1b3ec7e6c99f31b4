"""Train a deep OptEq on digits, look into it, train a network under a certificate, and write a report of both. Run by `make demo`.

Two cores need about a minute; the network has 16,650 parameters and gets at least 98% of the 360 test digits right.
"""

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path

from opteq import report
from opteq.diagnostics import data_loss, landscape, residual_curve, spectrum_of, trajectory
from opteq.recipes import (
    Data,
    Deep,
    Recipe,
    ScaledRelu,
    build,
    certificate_json,
    load_stages,
    log_monitor,
    run,
    sample,
    train_certified,
    trained_json,
    write_statement,
)
from opteq.runs import Run
from opteq.theory.certificates import certified_init, certify
from opteq.training import TrainConfig


def train_digits(folder: Path, quick: bool) -> None:
    """z = f(z, x) with f of two convolutional layers, constrained so that the equilibrium exists at every step."""
    data = Data("digits", limit=128, test_limit=64) if quick else Data("digits")
    training = TrainConfig(epochs=1 if quick else 8, batch_size=64, lr=1e-2, schedule="onecycle", crop=1)
    result = run(Recipe(data, Deep(channels=16, hidden=(16, 32)), training), folder)
    accuracy, steps, share = (result.scores[f"valid_{name}"] for name in ("accuracy", "solver_steps", "converged"))
    print(f"{accuracy:.2%} of the test digits are right, after {result.seconds:.0f} s of training.")
    print(f"{share:.0%} of the equilibria were found, in {steps:.1f} solver steps on average. The problem that they solve:")
    print((folder / "problem.txt").read_text())


def look(folder: Path, quick: bool) -> None:
    """What the solvers do, where the iterates go, the spectrum at the equilibria, and the loss around the weights."""
    stages, dataset = load_stages(folder)
    model, (x, y) = stages["after"], sample(dataset.train, 64)
    residual_curve(model, x).save(folder)
    trajectory({"before": stages["before"], "after": model}, x, y).save(folder)
    spectrum_of(model, x[:8]).save(folder)
    found = landscape(model, data_loss(x, y), steps=3 if quick else 11, progress=True)
    found.save(folder)
    print(f"The loss around the weights: every equilibrium was found at {found.converged.double().mean():.0%} of the points.\n")


def train_certified_network(folder: Path, quick: bool) -> None:
    """y = a'z, z = relu(gamma z A + relu(x W)), on two classes of digits: weights with a certificate, then gradient descent."""
    data = Data("digits", theory="unit", limit=8 if quick else 16, test_limit=2)
    X, y = (dataset := data.load()).train
    model = certified_init(build(Recipe(data, ScaledRelu(width=64)), dataset), X, y)
    certificate = certify(model, X, y, sharp=True)
    print(certificate.explain().partition("\n\n")[0])
    monitor, violation = train_certified(model, X, y, certificate, steps=5 if quick else 100, kernel=True)
    trained = trained_json(monitor, violation)
    print("{steps} steps under the certificate: the loss went from {loss_first:.4g} to {loss_last:.4g}; ".format(**trained), end="")
    print("at most {bound_last:.4g} was promised, and".format(**trained), violation or "everything promised was kept.", end="\n\n")
    with Run.create(folder, {"data": asdict(data), "model": {"kind": "scaled-relu", "width": 64}}) as files:
        files.write("certificate.json", certificate_json(certificate, trained))
        log_monitor(files, monitor)
    write_statement(model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="the run folder; an earlier one is replaced")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything works")
    options = parser.parse_args()
    if (options.folder / "config.json").exists():  # a run, and nothing else
        shutil.rmtree(options.folder)
    train_digits(options.folder, options.quick)
    look(options.folder, options.quick)
    certified = options.folder / "certified"
    train_certified_network(certified, options.quick)
    print(f"The report: {report.write([options.folder, certified], options.folder / 'report.html')}")
    print(f"Next: opteq landscape {options.folder} --steps 21    opteq train --help")


if __name__ == "__main__":
    main()
