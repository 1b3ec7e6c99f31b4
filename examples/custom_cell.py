"""An equilibrium on a graph, written as a cell of its own in under 40 lines, checked by finite differences, then trained.

The state has a vector at every node, and each node listens to its neighbours: Z = tanh(S Z W' + X U'), S the normalised adjacency.
At the equilibrium every node knows of every other, however far. The task asks for that: a chain of nodes, of which only the first
one sees its class, and only the last one is asked for it.

    python examples/custom_cell.py            # about 11 s on one core
    python examples/custom_cell.py --quick
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq import Cell, Equilibrium, Map, Stop, per_sample
from opteq.gradients import Unrolled
from opteq.solvers import Picard


@dataclass(frozen=True)
class GraphMap(Map):
    """All that f uses, as fields; those with the batch as first dimension are marked."""

    S: Tensor
    W: Tensor
    u: Tensor = per_sample()

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(self.S @ z @ self.W.T + self.u)


class Graph(Cell):
    """Z = tanh(S Z W' + X U'), with ||S|| <= 1 and ||W|| <= `norm` < 1: a contraction, so that there is one equilibrium."""

    def __init__(self, adjacency: Tensor, inputs: int, features: int, norm: float = 0.98) -> None:
        super().__init__()
        degree = adjacency.sum(1).rsqrt()
        self.register_buffer("S", degree[:, None] * adjacency * degree)
        self.W = nn.Parameter(torch.eye(features) + 0.1 * torch.randn(features, features))
        self.U = nn.Linear(inputs, features, bias=False)  # none: a bias at every node would drown what one of them says
        self.norm = norm
        self.state_shape = (len(adjacency), features)

    def bind(self, x: Tensor) -> GraphMap:
        """What need not be repeated at every step: the norm of W, and what the nodes are told."""
        W = self.W * (self.norm / torch.linalg.matrix_norm(self.W, 2)).clamp(max=1)
        return GraphMap(self.S, W, self.U(x))


def chain(nodes: int) -> Tensor:
    """The adjacency of a path, with loops."""
    return torch.eye(nodes) + torch.diag(torch.ones(nodes - 1), 1) + torch.diag(torch.ones(nodes - 1), -1)


def check_gradients() -> bool:
    """First and second derivatives, in the input and in every parameter, against finite differences."""
    torch.manual_seed(0)
    layer = Equilibrium(Graph(chain(4), 2, 3), stop=Stop(rtol=1e-12, max_steps=500), on_failure="raise").double()
    names, values = zip(*layer.named_parameters(), strict=True)

    def solve(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True), *values)
    return torch.autograd.gradcheck(solve, inputs) and torch.autograd.gradgradcheck(solve, inputs)


def labelled_chains(count: int, nodes: int) -> tuple[Tensor, Tensor]:
    """The first node sees its class, more or less clearly; the others see nothing."""
    y = torch.arange(count) % 2
    x = torch.zeros(count, nodes, 2)
    x[:, 0] = nn.functional.one_hot(y, 2) * (0.5 + torch.rand(count, 1))
    return x, y


def train(layer: Equilibrium, nodes: int, steps: int) -> float:
    """The share of new chains whose last node gives the right answer."""
    head = nn.Linear(layer.cell.state_shape[1], 2)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=2e-2)
    for _ in range(steps):
        x, y = labelled_chains(32, nodes)
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(layer(x)[:, -1]), y).backward()
        optimizer.step()
    x, y = labelled_chains(200, nodes)
    with torch.no_grad():
        return float((head(layer(x)[:, -1]).argmax(1) == y).double().mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, float | bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a shorter chain")
    nodes, steps = (6, 40) if parser.parse_args(arguments).quick else (12, 150)
    right = check_gradients()
    print(f"Derivatives equal finite differences, first and second, in x, W and U: {right}")

    scores = {}
    for name, gradient in {"at the equilibrium": None, "after 4 steps": Unrolled(4)}.items():
        torch.manual_seed(0)
        layer = Equilibrium(Graph(chain(nodes), 2, 8), Picard() if gradient else None, Stop(rtol=1e-6, max_steps=300), gradient)
        scores[name] = train(layer, nodes, steps)
        print(f"{nodes} nodes, {name}: the last one is right about the class of the first in {scores[name]:.0%} of the chains.")
    return {"gradients": right, **scores}


if __name__ == "__main__":
    main()
