"""Train a deep equilibrium network on the digits of scikit-learn, and look at the equilibria behind its answers.

The features are the solution z of z = f(z, x), f two convolutional OptEq layers. Their norms are constrained, so that there is
exactly one solution: solves from random starts end at the same z, and give the same answers.

    python examples/classification.py            # about 11 s on one core
    python examples/classification.py --quick
"""

import argparse
from collections.abc import Sequence

import torch

from opteq import Stop
from opteq.data import load
from opteq.models import count_parameters, deep_opteq
from opteq.training import TrainConfig, fit


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples, one small network")
    quick = parser.parse_args(arguments).quick

    train, test = load("digits")
    samples = 600 if quick else len(train.y)
    torch.manual_seed(0)
    model = deep_opteq(1, 10, channels=12, hidden=(12, 16) if quick else (16, 32), stride=1, pool=4, constrained=True)
    config = TrainConfig(epochs=3 if quick else 6, batch_size=50, lr=1e-2, schedule="onecycle", crop=1)
    result = fit(model, (train.x[:samples], train.y[:samples]), test, config, verbose=False)
    accuracy = result.scores["valid_accuracy"]
    print(f"{count_parameters(model)['total']:,} parameters, {result.steps} steps in {result.seconds:.0f} s.")
    print(f"{accuracy:.1%} of {len(test.y)} test digits are right.")

    model.eval().equilibrium.stop = Stop(rtol=1e-5)
    with torch.no_grad():
        found = model.solve(test.x)
        print(f"Equilibria of the test digits: {found}")
        logits, moved, same = model(test.x), 0.0, 1.0
        for _ in range(3):
            z0 = torch.randn_like(found.z)
            again = model.solve(test.x, z0)
            moved = max(moved, float((again.z - found.z).norm() / found.z.norm()))
            same = min(same, float((model(test.x, z0).argmax(1) == logits.argmax(1)).double().mean()))
    print(f"From random starts: z differs by {moved:.0e} at most, {same:.1%} of the answers are the same.")
    return {"accuracy": accuracy, "converged": float(found.converged.double().mean()), "moved": moved, "same": same}


if __name__ == "__main__":
    main()
