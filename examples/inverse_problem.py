"""Recover how a rod conducts heat from temperatures measured along it: an inverse problem through an equilibrium.

A rod is heated by a source s(x), cooled at both ends, and loses heat at its surface: in the steady state

    -(k u')' + c u^3 = s(x),    u = 0 at both ends.

The conductivity k(x) is not known. Four experiments with different sources are made; in each the temperature is measured at every
fourth of the grid points, with an error of 0.1%. The steady state is the equilibrium u = u - P (A_k u + c u^3 - s), P a fixed
preconditioner, so that `Equilibrium` solves for u, and gives the exact gradient of the misfit in log k by the implicit function
theorem: one linear solve, whatever the number of unknowns. L-BFGS does the rest.

    python examples/inverse_problem.py            # about 6 s on one core
    python examples/inverse_problem.py --quick
"""

import argparse
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from opteq import Equilibrium, Stop
from opteq.cells import FunctionCell

DOUBLE = torch.float64


class Rod(nn.Module):
    """u - P (A_k u + c u^3 - s) at n inner points; log k is linear between `knots` points, where it is a parameter."""

    def __init__(self, n: int, knots: int, loss: float = 20.0) -> None:
        super().__init__()
        self.log_k = nn.Parameter(torch.zeros(knots, dtype=DOUBLE))
        self.n, self.loss = n, loss
        start = self.stiffness(torch.ones(n + 1, dtype=DOUBLE)) + loss * torch.eye(n, dtype=DOUBLE)  # k = 1, and u^3 about u
        self.register_buffer("P", torch.linalg.inv(start))

    def stiffness(self, k: Tensor) -> Tensor:
        """A_k, the finite differences of -(k u')' with k given on the n + 1 edges between the points."""
        return (self.n + 1) ** 2 * (torch.diag(k[:-1] + k[1:]) - torch.diag(k[1:-1], 1) - torch.diag(k[1:-1], -1))

    def conductivity(self) -> Tensor:
        """k on the edges."""
        line = nn.functional.interpolate(self.log_k[None, None], self.n + 1, mode="linear", align_corners=True)
        return line[0, 0].exp()

    def forward(self, u: Tensor, s: Tensor) -> Tensor:
        return u - (u @ self.stiffness(self.conductivity()) + self.loss * u**3 - s) @ self.P


def conductivity(x: Tensor) -> Tensor:
    """The truth: a rod with a worse conductor in its right half, and a flaw at 0.35."""
    return 1 + 0.4 * torch.sin(2 * math.pi * x) - 0.5 * torch.exp(-(((x - 0.35) / 0.1) ** 2))


def steady(rod: Rod) -> Equilibrium:
    """s -> u. The input of the layer is a batch of sources, one for each experiment."""
    return Equilibrium(FunctionCell(rod, (rod.n,)), stop=Stop(rtol=1e-9, max_steps=500), on_failure="raise")


def sources(n: int) -> Tensor:
    """Four of them, at different places."""
    x = torch.arange(1, n + 1, dtype=DOUBLE) / (n + 1)
    return torch.stack([20 * torch.exp(-(((x - place) / 0.15) ** 2)) for place in (0.15, 0.4, 0.6, 0.85)])


def measured(n: int) -> tuple[Tensor, Tensor]:
    """Temperatures at every fourth of n points, with noise, and its size. They are made on a finer grid, with the true k."""
    fine = 2 * n + 1
    rod = Rod(fine, fine + 1)
    rod.log_k = nn.Parameter(conductivity(edges(fine)).log())
    with torch.no_grad():
        u = steady(rod)(sources(fine))[:, 1::2][:, ::4]
    noise = 1e-3 * u.mean()
    return u + noise * torch.randn_like(u), noise


def edges(n: int) -> Tensor:
    """The middle of each of the n + 1 edges between the points, and between them and the ends."""
    return (torch.arange(n + 1, dtype=DOUBLE) + 0.5) / (n + 1)


def gradient_error(rod: Rod, misfit: Callable[[], Tensor], h: float = 1e-5) -> float:
    """The gradient, before it is relied on: along a random direction, against a central difference."""
    start, direction = rod.log_k.detach().clone(), torch.randn_like(rod.log_k)
    (gradient,) = torch.autograd.grad(misfit(), rod.log_k)
    values = []
    with torch.no_grad():
        for shift in (h, -h):
            rod.log_k.copy_(start + shift * direction)
            values.append(float(misfit()))
        rod.log_k.copy_(start)
    return abs(float(gradient @ direction) * 2 * h / (values[0] - values[1]) - 1)


def recover(rod: Rod, misfit: Callable[[], Tensor]) -> int:
    """Minimise the misfit in log k; how many gradients it took."""
    optimizer = torch.optim.LBFGS(rod.parameters(), max_iter=200, line_search_fn="strong_wolfe", tolerance_change=1e-9)
    gradients = 0

    def closure() -> Tensor:
        nonlocal gradients
        gradients += 1
        optimizer.zero_grad()
        value = misfit()
        value.backward()
        return value

    optimizer.step(closure)
    return gradients


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarser grid")
    n, knots = (63, 13) if parser.parse_args(arguments).quick else (255, 17)
    torch.manual_seed(0)
    data, noise = measured(n)
    s, truth = sources(n), conductivity(edges(n))
    rod = Rod(n, knots)
    layer = steady(rod)

    def misfit() -> Tensor:
        return ((layer(s)[:, ::4] - data) / noise).square().mean()

    agreement = gradient_error(rod, misfit)
    print(f"The implicit gradient and a central difference agree to {agreement:.0e}.")
    gradients = recover(rod, misfit)
    with torch.no_grad():
        found, last = rod.conductivity(), float(misfit())
    before, error = (float((k - truth).norm() / truth.norm()) for k in (torch.ones_like(found), found))
    print(f"{knots} unknowns from {data.numel()} measurements, {gradients} gradients.")
    print(f"Misfit in units of the noise: {last:.2f} (1 is what the true k would leave).")
    print(f"Error of k(x): {error:.1%} (k = 1, the start: {before:.0%}).")
    return {"error": error, "before": before, "misfit": last, "gradient": agreement}


if __name__ == "__main__":
    main()
