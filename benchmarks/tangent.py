"""The tangent kernel of a Gaussian DEQ by opteq, and by torch.func in two ways.

`adjoint`: the adjoint equilibrium is written by hand, and a vjp gives the row of the Jacobian. `jacrev`: the network is written as
plain iteration, and torch.func differentiates through it. Both take as many steps as 1e-12 needs, counted before the race.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from measure import Ratio, Work, beside_gemm, interleaved
from torch import Tensor
from torch.func import jacrev, vjp, vmap
from torch.nn.functional import relu

from opteq.cells import GaussianDEQ
from opteq.models import Readout
from opteq.theory import empirical_ntk

INPUTS, EXACT = 784, 1e-12


@dataclass(frozen=True)
class Kernel:
    """K [N, N] of y = a'z, z = relu(W z + U x), in float64."""

    width: int
    N: int

    @cached_property
    def model(self) -> Readout:
        torch.manual_seed(0)
        return Readout(GaussianDEQ(INPUTS, self.width).double())

    @cached_property
    def X(self) -> Tensor:
        return torch.randn(self.N, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def ours(self) -> Tensor:
        """By its defaults."""
        return empirical_ntk(self.model, self.X)

    def alone(self, rounds: int) -> float:
        """Milliseconds of ours."""
        return 1e3 * median(interleaved({"opteq": self.ours}, rounds)["opteq"])

    def share(self, rounds: int) -> float:
        """The part of them that its products would take at the machine's limit."""
        times, rates = beside_gemm({"opteq": self.ours}, rounds)
        return Work.of(self.ours).share(times["opteq"], rates)

    def against_torch_func(self, rounds: int) -> dict[str, Any]:
        """Times in turn, and how far the kernels are from ours."""
        peers = {"adjoint": partial(self.contracted, self.by_adjoint), "jacrev": partial(self.contracted, self.by_jacrev)}
        assert self.depths
        times, K = interleaved({"opteq": self.ours, **peers}, rounds), self.ours()
        found = {
            name: {
                "milliseconds": 1e3 * median(times[name]),
                "over_opteq": asdict(Ratio.of(times[name], times["opteq"])),
                "difference": float((K - run()).norm() / K.norm()),
            }
            for name, run in peers.items()
        }
        return {"N": self.N, "milliseconds": 1e3 * median(times["opteq"]), "torch_func": found}

    # --- torch.func -------------------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        cell = self.model.cell
        assert isinstance(cell, GaussianDEQ)
        return self.model.a.detach(), cell.W.detach(), cell.U.detach()

    @cached_property
    def depths(self) -> tuple[int, int]:
        """How many plain steps the equilibria and the adjoints take to 1e-12: counted before the race."""
        a, W, U = self.parameters
        u = self.X @ U.T
        forward, z = steps(lambda z: relu(z @ W.T + u), torch.zeros_like(u))
        slope = (z @ W.T + u > 0).to(u.dtype)
        backward, _ = steps(lambda v: a + (slope * v) @ W, torch.zeros_like(u))
        return forward, backward

    def contracted(self, jacobian: Callable[[], Iterable[Tensor]]) -> Tensor:
        """The sum of J J' over the parameters."""
        K = self.X.new_zeros(self.N, self.N)
        for J in jacobian():
            K += J.flatten(1) @ J.flatten(1).T
        return K

    def by_adjoint(self) -> tuple[Tensor, ...]:
        """The rows for a, W and U."""
        (a, W, U), (forward, backward) = self.parameters, self.depths
        z, u = self.X.new_zeros(self.N, self.width), self.X @ U.T
        for _ in range(forward):
            z = relu(z @ W.T + u)

        def row(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
            _, through_z = vjp(lambda z: relu(W @ z + U @ x), z)
            v = a
            for _ in range(backward):
                v = a + through_z(v)[0]
            _, through_weights = vjp(lambda W, U: relu(W @ z + U @ x), W, U)
            return z, *through_weights(v)

        return vmap(row)(self.X, z)

    def by_jacrev(self) -> tuple[Tensor, ...]:
        """The rows for a, W and U."""

        def network(a: Tensor, W: Tensor, U: Tensor, x: Tensor) -> Tensor:
            z, u = torch.zeros_like(a), U @ x
            for _ in range(self.depths[0]):
                z = relu(W @ z + u)
            return a @ z

        return vmap(jacrev(network, (0, 1, 2)), (None, None, None, 0))(*self.parameters, self.X)


def steps(f: Callable[[Tensor], Tensor], z: Tensor, most: int = 5000) -> tuple[int, Tensor]:
    """The number of steps to a relative residual of 1e-12, and where they lead."""
    for count in range(1, most):
        following = f(z)
        if float((following - z).norm() / following.norm()) <= EXACT:
            return count, following
        z = following
    raise RuntimeError("the iteration does not converge")
