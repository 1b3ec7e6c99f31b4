"""Predict a training before it is run, by the tangent kernel, and compare with the training.

The tangent kernel K of a network at its first weights says how gradient descent will go as long as K does not change: the residual
r on the samples becomes (I - step K)^k r after k steps. The wider the network, the less K changes. Networks y = a'z,
z = relu(W z + U x), of growing width learn to tell threes from eights, each beside its own prediction; what the
widest will answer to digits that it has not seen is predicted too.

    python examples/tangent_kernel.py            # about 13 s on one core
    python examples/tangent_kernel.py --quick
"""

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from opteq.cells import GaussianDEQ
from opteq.data import load
from opteq.models import Readout
from opteq.theory import empirical_ntk, predicted_loss


def threes_and_eights(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Images about their mean, of norm sqrt(d), as the theory has them; -1 for a three and 1 for an eight."""
    rows = torch.cat([(y == digit).nonzero()[: count // 2, 0] for digit in (3, 8)])
    images = x[rows].double().flatten(1)
    images = images - images.mean(1, keepdim=True)
    return images * images.shape[1] ** 0.5 / images.norm(dim=1, keepdim=True), (y[rows] == 8).double() * 2 - 1


def train(model: Readout, X: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """The residuals y^ - y before each step of gradient descent on |y^ - y|^2 / 2, and after the last: [steps + 1, samples]."""
    optimizer = torch.optim.SGD(model.parameters(), step)
    residuals = []
    for _ in range(steps):
        residual = model(X) - y
        residuals.append(residual.detach())
        optimizer.zero_grad()
        residual.square().sum().div(2).backward()
        optimizer.step()
    return torch.stack([*residuals, (model(X) - y).detach()])


def predicted_answers(first: Readout, X: Tensor, y: Tensor, new: Tensor, step: float, steps: int) -> Tensor:
    """f_0(x) + K(x, X) (I - (I - step K)^k) K^-1 (y - f_0(X)): the outputs for new inputs after k steps, if the kernel stays."""
    values, Q = torch.linalg.eigh(empirical_ntk(first, X))
    weights = Q @ ((1 - (1 - step * values) ** steps) / values * (Q.T @ (y - first(X).detach())))
    return first(new).detach() + empirical_ntk(first, new, X) @ weights


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="narrower networks, fewer steps")
    steps, widths = (20, (50, 400)) if parser.parse_args(arguments).quick else (100, (50, 200, 800))
    training, test = load("digits")
    X, y = threes_and_eights(training.x, training.y, 20)
    X_test, y_test = threes_and_eights(test.x, test.y, 60)

    errors = []
    for width in widths:
        torch.manual_seed(0)
        model = Readout(GaussianDEQ(64, width)).double()
        first = copy.deepcopy(model)
        K = empirical_ntk(model, X)
        step = float(1 / torch.linalg.eigvalsh(K)[-1])
        predicted = [first(X).detach() - y]
        for _ in range(steps):
            predicted.append(predicted[-1] - step * K @ predicted[-1])
        loss = predicted_loss(K, predicted[0], step, steps)  # the same, as a number: 1/2 |r_k|^2
        found = train(model, X, y, step, steps)
        errors.append(float((found - torch.stack(predicted)).norm(dim=1).max() / found[0].norm()))
        print(
            f"Width {width:3}: the loss falls from {found[0].square().sum() / 2:.3g} to {found[-1].square().sum() / 2:.3g}, ",
            end="",
        )
        print(f"{loss:.3g} was predicted. The residuals are within {errors[-1]:.1%} of the prediction at all steps.")

    expected, answers = predicted_answers(first, X, y, X_test, step, steps), model(X_test).detach()  # of the widest
    error = float((answers - expected).norm() / answers.norm())
    right = float((answers.sign() == y_test).double().mean())
    print(f"New digits: its answers are within {error:.1%} of the prediction, and {right:.0%} of them are right.")
    return {"narrow": errors[0], "wide": errors[-1], "new": error, "right": right}


if __name__ == "__main__":
    main()
