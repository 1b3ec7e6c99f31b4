"""The training that the experiments on gamma-scaled ReLU networks share: full-batch gradient descent, and what it measures.

The network is y = b'z, z = relu(gamma z A + relu(x W)), trained on |y^ - y|^2 / 2 from A = I, b = 0 and W ~ N(0, 1/m). Rows of the
matrices Z, Phi, V are samples. It is written out here, not left to autograd, because all of the time goes into products of
1000 x 1000 matrices, and two facts save most of them:

- With gamma < 1 and E = gamma (A - I) / (1 - gamma), the equation Z = relu(gamma Z A + Phi) has the same solutions as
  Z = relu(Z E + Phi / (1 - gamma)): where Z > 0 the two are the same linear equation, and where Z = 0 both say that the rest of the
  sum is not positive. The second iteration contracts by ||E||, which is small near A = I, not by gamma ||A||. So does its adjoint.
  Far from A = I it may be the other way round: where the second does not converge, the first is taken.
- One step of descent moves Z and its adjoint V little, and smoothly: both solves begin at 2 Z(k) - Z(k-1).

The iterations of the forward propagation that the paper counts are another matter: `forward_iterations` runs them as they stand.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from opteq import data
from opteq.cells import ScaledReLU
from opteq.diagnostics.drawing import COLOURS
from opteq.experiments._claims import column, mean_error
from opteq.experiments._descent import half_square, spectral_norm
from opteq.experiments._harness import Options
from opteq.products import affine, product

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Network", "absent", "draw_row", "end", "forward_iterations", "settings", "shown", "train"]

MOST = 300  # iterations of a solve of the training
LIMIT, CHANGE = 100, 1e-2  # of the paper: the iterations of a forward pass, and the |Z_{l+1} - Z_l| at which it ends
SHARED = ("samples", "tests", "targets", "steps", "every", "verify")


def settings(config: Any, options: Options, **own: Any) -> dict[str, Any]:
    """What `train` must know: `own` are data, width, gamma, step and seed, and what else differs from the configuration."""
    shared = {name: getattr(config, name) for name in SHARED}
    return {"root": options.root, "tolerance": 1e-6, "early": 0, "counted": False, **shared, **own}


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Gradient descent on one data set: `curves` of what is measured after k = 0, every, 2 every, ..., steps steps.

    The curves: training loss, test loss and gamma ||A||; if `counted`, also the iterations of a forward pass, by two norms. They
    are also measured after each of the first `early` steps. `rise` is the largest L(k) / L(k - 1) of all steps, and `peak` the
    largest L(k) / L(0), k > 0; `sharpness`, the largest eigenvalue of Z Z' at the start, is the curvature of the loss in b.
    `stopped` is the step at which the loss was not finite, or no equilibrium was found; there the curves end.
    """
    (x, y), (unseen, labels) = split(settings)
    network = Network(x.shape[1], settings["width"], settings["gamma"], settings["seed"], settings["tolerance"])
    names = ("k", "train", "test", "norm", *(("operator", "frobenius") if settings["counted"] else ()))
    curves: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, Any] = {"curves": curves, "rise": 0.0, "peak": 0.0, "sharpness": None, "stopped": None}
    first = before = math.nan
    for k in range(settings["steps"] + 1):
        residual = network.solve(x) @ network.b - y
        loss = half_square(residual)
        if not math.isfinite(loss):
            return found | {"stopped": k}
        if k == 0:
            first, found["sharpness"] = loss, spectral_norm(network.Z) ** 2
        else:
            found["rise"], found["peak"] = max(found["rise"], loss / before), max(found["peak"], loss / first)
        if k % settings["every"] == 0 or k == settings["steps"] or k <= settings["early"]:
            counts = forward_iterations(network, x) if settings["counted"] else ()
            test = half_square(network.predict(unseen) - labels)
            for name, value in zip(names, (k, loss, test, network.gamma * spectral_norm(network.A), *counts), strict=True):
                curves[name].append(value)
        network.descend(x, residual, settings["step"])
        before = loss
    return found


def split(settings: Mapping[str, Any]) -> data.Dataset:
    """Samples of two classes for training, and as many others for testing, grey, 28 x 28 pixels, of norm 1."""
    return data.theory_split(
        data.load(settings["data"], settings["root"], verify=settings["verify"]),
        train=settings["samples"],
        test=settings["tests"],
        targets=tuple(settings["targets"]),
        seed=settings["seed"],
        dtype=torch.float32,
    )


class Network:
    """y = Z b, Z = relu(gamma Z A + relu(X W)), with the equilibrium and the adjoint of the last two steps of its training."""

    def __init__(self, inputs: int, width: int, gamma: float, seed: int, tolerance: float) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            cell = ScaledReLU(inputs, width, gamma=gamma)
        self.W, self.A, self.b = cell.W.detach(), cell.A.detach(), torch.zeros(width)
        self.gamma, self.tolerance = gamma, tolerance
        self.Z = self.V = self.next_Z = self.next_V = torch.zeros(0)

    def equilibrium(self, Phi: Tensor, start: Tensor) -> Tensor:
        """Z = relu(gamma Z A + Phi), from a start."""
        E, u, scaled = self.excess(), Phi / (1 - self.gamma), self.gamma * self.A
        return settle(start, self.tolerance, lambda Z: affine(u, Z, E).relu_(), lambda Z: affine(Phi, Z, scaled).relu_())

    def excess(self) -> Tensor:
        """E = gamma (A - I) / (1 - gamma)."""
        E = self.A * (self.gamma / (1 - self.gamma))
        E.diagonal().sub_(self.gamma / (1 - self.gamma))
        return E

    def predict(self, x: Tensor) -> Tensor:
        """The outputs for other inputs."""
        Phi = product(x, self.W).relu_()
        return self.equilibrium(Phi, Phi / (1 - self.gamma)) @ self.b

    def solve(self, x: Tensor) -> Tensor:
        """The equilibrium of the training data, begun where the last two point to; NaN if it is not found."""
        self.Phi = product(x, self.W).relu_()
        Z = self.equilibrium(self.Phi, self.next_Z if len(self.next_Z) else self.Phi / (1 - self.gamma))
        self.next_Z = (2 * Z - self.Z).relu_() if len(self.Z) else Z
        self.Z = Z
        return Z

    def adjoint(self, residual: Tensor) -> Tensor:
        """V = D * (r b' + gamma V A'), D = 1[Z > 0]: the gradient of the loss with respect to gamma Z A + Phi."""
        E, scaled, D, u = self.excess(), self.gamma * self.A, self.Z > 0, torch.outer(residual, self.b)
        source = u / (1 - self.gamma)
        V = settle(
            self.next_V if len(self.next_V) else u * D,
            10 * self.tolerance,  # an error of V changes the loss less than one of Z
            lambda V: affine(source, V, E.T).mul_(D),
            lambda V: affine(u, V, scaled.T).mul_(D),
        )
        self.next_V = 2 * V - self.V if len(self.V) else V
        self.V = V
        return V

    def descend(self, x: Tensor, residual: Tensor, step: float) -> None:
        """One step of gradient descent in W, A and b; `solve` was called before."""
        V = self.adjoint(residual)
        self.b -= step * (self.Z.T @ residual)
        self.A.sub_(product(self.Z.T, V), alpha=step * self.gamma)
        self.W.sub_(product(x.T, V * (self.Phi > 0)), alpha=step)


def settle(start: Tensor, tolerance: float, *updates: Callable[[Tensor], Tensor]) -> Tensor:
    """start, update(start), ... until a change is within the tolerance, relative, by the first update for which that happens.

    One whose changes grow tenfold is given up for the next. NaN if none is left: after MOST iterations, or at infinity.
    """
    for update in updates:
        z, least = start, math.inf
        for _ in range(MOST):
            new = update(z)
            change, size = float(torch.linalg.vector_norm(new - z)), float(torch.linalg.vector_norm(new))
            z, least = new, min(least, change)
            if not math.isfinite(size) or (change > 10 * least and update is not updates[-1]):
                break
            if change <= tolerance * size:
                return z
    return torch.full_like(start, math.nan)


def forward_iterations(network: Network, x: Tensor) -> tuple[int, int]:
    """How many times Z <- relu(gamma Z A + Phi) is applied, from Z = 0, until a change is at most 1e-2; at most 100.

    The change is that of the whole matrix: in the operator norm, which is how the paper writes it, and in the Frobenius norm. The
    first takes longer to compute, but it lies between |.|_F / sqrt(rank) and |.|_F: only in between is it computed.
    """
    Phi = product(x, network.W).relu_()
    scaled, change, Z, count, operator = network.gamma * network.A, Phi, Phi, 1, 0
    while not (size := float(torch.linalg.matrix_norm(change))) <= CHANGE and count < LIMIT:  # NaN is no end
        if not operator and size <= CHANGE * math.sqrt(min(change.shape)) and spectral_norm(change) <= CHANGE:
            operator = count
        new = affine(Phi, Z, scaled).relu_()
        change, Z, count = new - Z, new, count + 1
    return operator or count, count


# --- what is made of the curves -------------------------------------------------------------------------------------------------


def end(losses: Sequence[float]) -> float:
    """The median of the last tenth: near the largest stable step a single loss may be one of those that go up."""
    return float(np.median(losses[-max(1, len(losses) // 10) :]))


def absent(wanted: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """A note on the data sets that were not found, if there are any."""
    missing = [name for name in wanted if name not in chosen]
    return [f"Data sets that were not found: {', '.join(missing)}."] if missing else []


def shown(values: Sequence[float]) -> str:
    """The mean, with its standard error where there is one, as text for a table."""
    mean, error = mean_error(values)
    return f"{mean:.4g}" if math.isnan(error) else f"{mean:.4g} ± {error:.1g}"


def draw_row(row: "Sequence[Axes]", title: str, trainings: Mapping[str, Sequence[Mapping[str, Any] | None]]) -> None:
    """Training loss, test loss and gamma ||A|| against the step, by label: the mean of the seeds and its standard error."""
    panels = {"train": "training loss", "test": "test loss", "norm": r"$\gamma\,\|A(k)\|$"}
    for axes, (name, words) in zip(row, panels.items(), strict=True):
        for colour, (label, seeds) in zip(COLOURS, trainings.items(), strict=False):
            lines = [column(one, name) for one in seeds if one is not None]
            k: list[float] = min((one["k"] for one in seeds if one is not None), key=len, default=[])
            points = [mean_error(values) for values in zip(*lines, strict=False)]
            mean, error = np.array([one[0] for one in points]), np.nan_to_num([one[1] for one in points])
            axes.plot(k, mean, color=colour, label=label, marker="o" if len(k) == 1 else None, markersize=3)
            axes.fill_between(k, mean - error, mean + error, color=colour, alpha=0.3, linewidth=0)
        axes.set(xlabel="step $k$", yscale="linear" if name == "norm" else "log")
        axes.set_title(words, loc="left")
        axes.grid(visible=True)
        axes.set_axisbelow(True)
    row[0].set_ylabel(title)
