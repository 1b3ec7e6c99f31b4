"""Draw the figures of concepts.md and regularized.md: python docs/figures/make_concepts.py [FOLDER].

Nothing in them is made up but the diagram: each curve is computed by the library. They have no background, and colours for a
light and a dark page.
"""

import re
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor, nn

from opteq import Equilibrium, Stop, record, solve
from opteq.cells import DeepOptEq, FunctionCell, OptEq
from opteq.gradients import Implicit, Unrolled
from opteq.regularizers import L1, L2, Incay
from opteq.solvers import Anderson, Broyden, Newton, Picard
from opteq.theory import objective

INK, FAINT = "#4b5159", "#9aa0a8"
BLUE, ORANGE, GREEN, RED = "#2f7fd0", "#d9731a", "#2f9e63", "#d0455b"
ON_DARK = {INK: "#c8cdd4", FAINT: "#7d848d", BLUE: "#5ea8f2", ORANGE: "#f2974a", GREEN: "#4fc487", RED: "#f0717f"}
STYLE = {
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.transparent": True,
    "svg.hashsalt": "opteq",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
TIGHT = Stop(rtol=1e-10, max_steps=1000)


def save(figure: Figure, path: Path) -> None:
    """As SVG, with a style sheet that exchanges the colours on a dark page."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    rules = "".join(
        f'[style*="{key}: {light}"]{{{key}:{dark}!important}}' for light, dark in ON_DARK.items() for key in ("fill", "stroke")
    )
    text = re.sub(r"[ \t]+$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    path.write_text(re.sub(r"(<svg [^>]*>)", rf"\1\n {style}", text, count=1), encoding="utf-8")


def box(axes: Axes, x: float, y: float, text: str, color: str, width: float = 0.9) -> None:
    """A labelled box with its centre at x, y."""
    corner = (x - width / 2, y - 0.35)
    axes.add_patch(FancyBboxPatch(corner, width, 0.7, boxstyle="round,pad=0,rounding_size=0.12", fc="none", ec=color, lw=1.8))
    axes.text(x, y, text, ha="center", va="center", fontsize=12)


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], bend: float = 0.0, color: str = INK) -> None:
    """From one point to the other."""
    props = {"arrowstyle": "-|>", "color": color, "lw": 1.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, begin, arrowprops=props | {"connectionstyle": f"arc3,rad={bend}"})


def depth() -> Figure:
    """A network of many equal layers, and the layer that it becomes."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6.4, 4.4))
    for axes, title in ((top, "The same layer again and again ..."), (bottom, "... is one equation: an equilibrium layer")):
        axes.set(xlim=(-0.2, 7.7), ylim=(-0.75, 1.95), aspect="equal", title=title)
        axes.axis("off")
    for i, name in enumerate(["$f$", "$f$", "$f$"]):
        middle = 1.4 + 1.9 * i
        box(top, middle, 0, name, BLUE)
        arrow(top, (middle - 0.95, 0), (middle - 0.45, 0))
        top.text(middle - 1.2, 0, f"$z_{i}$", ha="center", va="center")
        arrow(top, (middle, 1.2), (middle, 0.35), color=FAINT)
        top.text(middle, 1.42, "$x$", ha="center", va="center")
        if i < 2:
            top.plot([middle + 0.45, middle + 0.5], [0, 0], color=INK, lw=1.5)
    arrow(top, (5.65, 0), (6.15, 0))
    top.text(6.85, 0, "$z_3,\\ z_4,\\ \\ldots$", ha="center", va="center")
    box(bottom, 3.1, 0, "$z = f(z, x)$", ORANGE, width=2.6)
    arrow(bottom, (0.6, 0), (1.8, 0))
    bottom.text(0.3, 0, "$x$", ha="center", va="center")
    arrow(bottom, (4.4, 0), (5.6, 0))
    bottom.text(5.95, 0, "$z^\\star$", ha="center", va="center")
    arrow(bottom, (4.0, 0.35), (2.2, 0.35), bend=0.75, color=ORANGE)
    bottom.text(3.1, 1.4, "a solver, until $|f(z, x) - z|$ is small", ha="center", va="center")
    return figure


def scalar(z: Tensor, x: Tensor) -> Tensor:
    """f of the one-dimensional examples."""
    return 1 + torch.tanh(x - 0.85 * z)


class Step(nn.Module):
    """f(z, x) = tanh(W z + x), ||W|| = 1.8."""

    def __init__(self, features: int) -> None:
        super().__init__()
        W = torch.randn(features, features, dtype=torch.float64)
        self.W = nn.Parameter(1.8 * W / torch.linalg.matrix_norm(W, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """One evaluation."""
        return torch.tanh(z @ self.W.T + x)


def solving() -> Figure:
    """A fixed point in one dimension, and the residuals of four solvers in 64."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.4))
    grid = torch.linspace(-0.1, 2.1, 200, dtype=torch.float64)
    left.plot(grid, grid, color=FAINT, lw=1.2)
    for value, color in ((-0.2, BLUE), (1.4, ORANGE)):
        x = torch.tensor([[value]], dtype=torch.float64)
        left.plot(grid, scalar(grid, x[0]), color=color)
        left.text(2.15, float(scalar(grid[-1], x[0])), f"$x = {value}$", color=color, va="center")
        z, path = 0.0, [(0.0, 0.0)]
        for _ in range(12):
            value_of_f = float(scalar(torch.tensor(z, dtype=torch.float64), x[0, 0]))
            path += [(z, value_of_f), (value_of_f, value_of_f)]
            z = value_of_f
        left.plot(*zip(*path, strict=True), color=color, lw=0.9)
        fixed = float(solve(lambda z, x=x: scalar(z, x), torch.zeros_like(x), Anderson(), TIGHT).z)
        left.plot(fixed, fixed, "o", color=color, ms=7)
    left.set(xlabel="$z$", title="$f(z, x)$ meets the diagonal", xlim=(-0.1, 2.1), ylim=(-0.1, 2.1), aspect="equal")
    torch.manual_seed(0)
    cell, x = FunctionCell(Step(64), (64,)), 0.1 * torch.randn(1, 64, dtype=torch.float64)
    for solver, color in ((Picard(), FAINT), (Anderson(), BLUE), (Broyden(), ORANGE), (Newton(), GREEN)):
        with record() as log:
            Equilibrium(cell, solver, Stop(rtol=1e-9, max_steps=100), on_failure="ignore")(x)
        trace = log[0].trace
        assert trace is not None
        right.semilogy(
            trace.evals, [float(r[0]) for r in trace.residual], ".-", color=color, ms=5, lw=1.4, label=type(solver).__name__
        )
    right.set(xlabel="evaluations of $f$", title="$|f(z) - z|\\, /\\, |f(z)|$, 64 numbers", ylim=(1e-10, 3), xlim=(-3, 119))
    right.legend(fontsize=9)
    return figure


def gradient() -> Figure:
    """The slope of the equilibrium, and what is kept to compute it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.3))
    layer = Equilibrium(FunctionCell(scalar, (1,)), stop=TIGHT)
    grid = torch.linspace(-2.5, 3.5, 200, dtype=torch.float64)[:, None]
    left.plot(grid, layer(grid).detach(), color=BLUE)
    at = torch.tensor([[-1.4], [0.5], [2.4]], dtype=torch.float64, requires_grad=True)
    z = layer(at)
    (slope,) = torch.autograd.grad(z.sum(), at)
    for x0, z0, s in zip(at.flatten().tolist(), z.flatten().tolist(), slope.flatten().tolist(), strict=True):
        left.plot([x0 - 0.9, x0 + 0.9], [z0 - 0.9 * s, z0 + 0.9 * s], color=ORANGE)
        left.plot(x0, z0, "o", color=ORANGE, ms=6)
    left.set(xlabel="$x$", title="$z^\\star(x)$, and its implicit gradient")
    torch.manual_seed(0)
    cell, x = FunctionCell(Step(64), (64,)), 0.1 * torch.randn(8, 64, dtype=torch.float64)
    steps = [1, 5, 10, 15, 20, 25, 30]
    unrolled = [kept(Equilibrium(cell, gradient=Unrolled(k)), x) for k in steps]
    implicit = [
        kept(Equilibrium(cell, stop=Stop(rtol=0.0, max_steps=k), gradient=Implicit(), on_failure="ignore"), x) for k in steps
    ]
    right.plot(steps, unrolled, "o-", color=FAINT, label="through the steps")
    right.plot(steps, implicit, "o-", color=ORANGE, label="implicit")
    right.set(xlabel="steps of the solver", title="kept for the backward pass, in $z$", ylim=(0, None))
    right.legend(fontsize=10)
    return figure


def kept(layer: Equilibrium, x: Tensor) -> float:
    """What autograd saves, beyond the input and the parameters, in states."""
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = layer(x)
    assert output.requires_grad
    return sum(found.values()) / (x.numel() * x.element_size())


def example() -> tuple[OptEq, Tensor]:
    """An OptEq layer on the plane, and its input."""
    cell = OptEq(2, 2, 2, activation="tanh").double()
    with torch.no_grad():
        cell.W.copy_(torch.tensor([[0.9, 0.2], [-0.3, 0.85]]))
        cell.U.copy_(torch.eye(2))
        cell.b.zero_()
    return cell, torch.tensor([[0.4, 0.3]], dtype=torch.float64)


def level_lines(axes: Axes, cell: OptEq, x: Tensor) -> None:
    """Of phi, which is known at v = f(y)."""
    side = torch.linspace(-3.5, 3.5, 61, dtype=torch.float64)
    y = torch.cartesian_prod(side, side)
    many = x.expand(len(y), 2)
    v = cell.bind(many)(y).detach()
    phi = objective(cell, many, y).detach()
    levels = phi.min() + (phi.max() - phi.min()) * torch.linspace(0.03, 1, 12, dtype=torch.float64) ** 2
    axes.tricontour(v[:, 0], v[:, 1], phi, levels=levels.tolist(), colors=FAINT, linewidths=0.9, linestyles="solid")


def problem() -> Figure:
    """The function that a layer minimises, and the iterates on their way."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.5))
    cell, x = example()
    level_lines(left, cell, x)
    fn = cell.bind(x)
    for start, color in (((-3.0, -1.0), BLUE), ((2.0, -3.0), ORANGE), ((-2.0, 3.0), GREEN)):
        z = torch.tensor([start], dtype=torch.float64)
        z = fn(z)
        solution = solve(fn, z, Picard(), TIGHT, record=True, iterates=True)
        assert solution.trace is not None
        assert solution.trace.z is not None
        path = torch.cat(solution.trace.z).detach()
        left.plot(path[:, 0], path[:, 1], ".-", color=color, ms=6, lw=1.2)
        right.semilogy([float(r) for r in path_values(cell, x, path)], color=color)
    left.plot(*solution.z[0].detach(), "o", color=RED, ms=8)
    left.set(xlabel="$z_1$", ylabel="$z_2$", title="Level lines of $\\varphi$; steps of $z \\leftarrow f(z)$")
    right.set(xlabel="step", title="$\\varphi(z) - \\min \\varphi$", ylim=(1e-9, None), xlim=(0, 18))
    return figure


def path_values(cell: OptEq, x: Tensor, path: Tensor) -> Tensor:
    """phi along the iterates z_1, z_2, ... above its minimum: z_k = f(z_{k-1}), so that their pre-images are known."""
    values = objective(cell, x.expand(len(path), 2), path).detach()
    return (values - values[-1]).clamp_min(1e-16)[:-1]


def regularized() -> Figure:
    """Where the equilibrium goes as the weight of R grows."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    cell, x = example()
    level_lines(axes, cell, x)
    for name, regularizer, mode, weights, color in (
        ("L2", L2(), "gradient", torch.linspace(1e-6, 1.5, 31), BLUE),
        ("L1, by its prox", L1(), "prox", torch.linspace(1e-6, 0.4, 81), ORANGE),
        ("Incay", Incay(), "gradient", torch.linspace(1e-6, 0.5, 41), GREEN),
    ):
        ends = []
        for weight in weights.tolist():
            deep = DeepOptEq([cell], regularizer=regularizer, gamma=weight, mode=mode)
            ends.append(Equilibrium(deep, stop=TIGHT)(x)[0].detach())
        path = torch.stack(ends)
        axes.plot(path[:, 0], path[:, 1], color=color, label=f"{name}, $\\gamma \\leq {float(weights[-1]):g}$", lw=2.2)
        axes.plot(*path[-1], "s", color=color, ms=6)
    axes.plot(*path[0], "o", color=RED, ms=8)
    axes.plot(0, 0, "+", color=INK, ms=9)
    axes.set(xlabel="$z_1$", ylabel="$z_2$", title="The equilibrium, as the weight of R grows", aspect="equal")
    axes.legend(fontsize=9, loc="lower left", bbox_to_anchor=(1, 0.3))
    return figure


FIGURES = {
    "concept_depth.svg": depth,
    "concept_solve.svg": solving,
    "concept_gradient.svg": gradient,
    "concept_problem.svg": problem,
    "concept_regularized.svg": regularized,
}


def main(folder: Path) -> None:
    """All figures."""
    with mpl.rc_context(STYLE):
        for name, draw in FIGURES.items():
            save(draw(), folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
