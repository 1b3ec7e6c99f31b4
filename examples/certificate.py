"""Ask whether a training must converge, make it so, train, and check that every promise was kept.

A network y = a'z, z = relu(gamma z A + relu(x W)), learns to tell threes from eights. `certify` says which conditions of a
convergence theorem fail at its weights; `certified_init` finds weights for which all hold; gradient descent then keeps the
promised rate at every step, and a run with a step that is too large is caught.

    python examples/certificate.py            # about 5 s on one core
    python examples/certificate.py --quick
"""

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from opteq import certify
from opteq.cells import ScaledReLU
from opteq.data import load
from opteq.models import Readout
from opteq.theory.certificates import certified_init, check, descend


def threes_and_eights(count: int) -> tuple[Tensor, Tensor]:
    """Images of norm 1, as the theorem has them, with y = -1 for a three and 1 for an eight."""
    train, _ = load("digits")
    rows = torch.cat([(train.y == digit).nonzero()[: count // 2, 0] for digit in (3, 8)])
    X = torch.nn.functional.normalize(train.x[rows].double().flatten(1))
    return X, (train.y[rows] == 8).double() * 2 - 1


def main(arguments: Sequence[str] | None = None) -> dict[str, float | bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples and steps")
    quick = parser.parse_args(arguments).quick
    X, y = threes_and_eights(4 if quick else 8)
    steps = 60 if quick else 3000

    torch.manual_seed(0)
    model = Readout(ScaledReLU(64, 64)).double()
    before = certify(model, X, y)
    print(before.explain(), end="\n\n")

    model = certified_init(model, X, y)
    certificate = certify(model, X, y, sharp=True)  # the same conclusions for larger steps than the paper's
    print(certificate.explain(), end="\n\n")

    run = descend(copy.deepcopy(model), X, y, certificate.max_step, steps, every=steps // 20)
    violation = check(certificate, run)
    promised = certificate.loss_bound(steps)
    print(f"{steps} steps of {certificate.max_step:.3g}: L fell from {run.losses[0]:.4g} to {run.losses[-1]:.4g}.")
    print(f"At most {promised:.4g} was promised. Broken: {violation or 'nothing, at any step that was measured'}.")

    reckless = descend(copy.deepcopy(model), X, y, 1e6 * certificate.max_step, steps=5)
    caught = check(certificate, reckless)
    print(f"With steps a million times as large: {caught}")
    return {
        "before": bool(before.holds),
        "certified": bool(certificate.holds),
        "kept": violation is None,
        "caught": caught is not None,
        "loss": run.losses[-1] / run.losses[0],
        "promised": promised / run.losses[0],
    }


if __name__ == "__main__":
    main()
