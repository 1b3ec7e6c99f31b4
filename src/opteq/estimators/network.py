"""The network inside of an estimator: a function of a few plain values and of arrays, both of which can be written to a file."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.cells import DeepOptEq, Monotone, OptEq
from opteq.equilibrium import Cell, Equilibrium
from opteq.models import Standardize
from opteq.solution import Solution, Stop

Arrays = dict[str, NDArray[Any]]


class Network(nn.Sequential):
    """x -> C z + c, z = f(z, (x - mean) / std)."""

    standardize: Standardize
    equilibrium: Equilibrium
    head: nn.Linear

    def solve(self, x: Tensor) -> tuple[Tensor, Solution]:
        """The output, and the equilibrium that it was made of."""
        solution = self.equilibrium.solve(self.standardize(x))
        return self.head(solution.z), solution


@dataclass(frozen=True)
class Architecture:
    """What a network is but for its weights."""

    inputs: int
    outputs: int
    cell: str
    width: int
    hidden: int
    layers: int
    activation: str
    alpha: float
    constrained: bool
    margin: float = 0.2
    """How far from ill-posed a cell is kept: z moves by at most 1 / margin times what is injected."""

    def network(self, standardize: Standardize, stop: Stop) -> Network:
        """A network with new weights, in single precision."""
        equilibrium, head = Equilibrium(self._cell(), stop=stop, on_failure="ignore"), nn.Linear(self.width, self.outputs)
        return Network(OrderedDict(standardize=standardize, equilibrium=equilibrium, head=head))

    def _cell(self) -> Cell:
        if self.cell == "monotone":
            return Monotone(self.inputs, self.width, m=self.margin, activation=self.activation)
        cells = [self._layer() for _ in range(self.layers)]
        return cells[0] if len(cells) == 1 else DeepOptEq(cells)

    def _layer(self) -> OptEq:
        return OptEq(
            self.inputs, self.width, self.hidden, activation=self.activation, alpha=self.alpha, constrained=self.constrained,
            margin=self.margin,
        )  # fmt: skip

    def tolerance(self, rtol: float, dtype: torch.dtype) -> float:
        """The rtol of a layer with a skip connection, whose residual is alpha times that of the layer without one."""
        scale = 1.0 if self.cell == "monotone" else self.alpha
        return max(rtol * scale, 10 * torch.finfo(dtype).eps)


def arrays(network: nn.Module) -> Arrays:
    """The weights."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in network.state_dict().items()}


def exact_network(architecture: Architecture, weights: Mapping[str, NDArray[Any]]) -> Network:
    """The network with these weights, in double precision, solved so closely that no sample's output shows its batch-mates."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    stop = Stop(rtol=architecture.tolerance(1e-10, torch.float64), max_steps=1000)
    standardize = Standardize(tensors["standardize.mean"], tensors["standardize.std"])
    with torch.device("meta"):  # no weights are drawn
        network = architecture.network(standardize, stop)
    network.load_state_dict(tensors, assign=True)
    return network.double().eval().requires_grad_(False)
