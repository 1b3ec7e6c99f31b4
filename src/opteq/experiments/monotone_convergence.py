"""Theorems 3.3.1 and 3.3.5 of "An analysis of applying neural tangent kernels for deep equilibrium models": training at a rate.

The network is y = u'z, z = relu(W z + U x), W = (1 - m) I - A'A + B - B', so that I - W >= m I (`Readout` calls the thesis's u
`a`). It is trained on L = |y^ - y|^2 / 2 by the gradient flow or by gradient descent. With lam0 = sigma_min(Z(0)), the theorems say
that, if lam0 is large enough against norms of the parameters and of the data, and the width at least the number N of samples,

- flow (3.3.1): L(t) <= exp(-lam0^2 t / 2) L(0);
- descent with a small step eta (3.3.5): L(k) <= (1 - eta lam0^2 / 4)^k L(0);

that no parameter leaves its ball around its start, and that sigma_min(Z) >= lam0 / 2. So the tangent kernel K = Z'Z + ... keeps
lambda_min(K) >= lam0^2 / 4. The thesis has no experiment on it, and prints no numbers.

Theorem 3.3.1 is taken as printed. The conditions of 3.3.5 drop powers of m and a factor of 2, and (3.18) has a term that no network
with N > 1/(20 m^2) meets; here they are the re-derived ones of `theory.certificates`. Its step is tiny. `sharp` makes
another, for which the same is proved, a thousand times as large or more; the table has both. No usual start meets the conditions:
here u = 0 and U is scaled up, by the least factor that does (`certified_init`). Next to these are networks as they are usually
drawn, of which nothing is proved, with the step 1 / lambda_max(K(0)): how their tangent kernel changes, by their width.

The data: N = 8 images of two classes, grey, 28 x 28 pixels, of norm sqrt(784), with labels -1 and 1; m = 0.8; no bias.
Run `python -m opteq.experiments.monotone_convergence --preset small --data-dir DATA`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from opteq import Stop, data
from opteq.cells import Monotone
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments._claims import CLEAR, Measured, at_least, at_most, clear_gain, clearness, column, judged, mean_error
from opteq.experiments._harness import Options, Result, Series, command, found, gather, grid, table
from opteq.models import Readout
from opteq.theory import empirical_ntk, gradient_flow, least_eigenvalue
from opteq.theory.certificates import Certificate, Monitor, Run, certified_init, certify, check, measure_flow
from opteq.theory.flow import loss_gradient

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "WHY", "Config", "figure", "main", "run", "train"]

NAME = "monotone_convergence"
ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "flow": "Where Theorem 3.3.1 applies, the loss of the flow falls at least at its rate, and its other conclusions hold.",
    "descent": (
        "Where Theorem 3.3.5 applies, so it is with descent, at the sharp step and at the theorem's own, "
        "which is so small that next to nothing moves."
    ),
    "kernel": (
        "Throughout these trainings lambda_min of the tangent kernel is at least lam0^2 / 4; "
        "the kernel hardly moves in them, so this is tested at the start above all."
    ),
    "width": (
        "Of networks as they are usually drawn, the wider ones change their tangent kernel less in training, "
        "by more than 2 standard errors from each width to the next."
    ),
}
WHY = {
    "width": (
        "On MNIST it is clear. On CIFAR-10 the mean falls from width to width, too, but from seed to seed, with the 8 images and "
        "the weights, the change of K varies more than that: five seeds do not tell."
    ),
}
KINDS = {"flow": "flow", "descent": "descent, the theorem's step", "sharp": "descent, the sharp step"}


@dataclass(frozen=True)
class Config:
    """The sizes. All data sets must be there."""

    data: tuple[str, ...] = ("mnist", "cifar10")
    samples: int = 8
    width: int = 64
    widths: tuple[int, ...] = (16, 64, 256)  # of the networks that no theorem speaks of
    seeds: int = 5  # of these
    m: float = 0.8
    span: float = 4.0  # of the flow, in units of 2 / lam0^2
    steps: int = 3000
    plain_steps: int = 200  # of the networks that no theorem speaks of
    points: int = 30  # measurements along a training


PRESETS = {
    "smoke": Config(("digits",), samples=2, width=8, widths=(8, 32), seeds=1, span=0.5, steps=20, plain_steps=20, points=4),
    "small": Config(),
    "paper": Config(("mnist", "cifar10"), samples=32, width=256, widths=(64, 256, 1024, 4096), steps=100_000, points=100),
}

# --- one cell -------------------------------------------------------------------------------------------------------------------


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One training: loss, bound, lambda_min and drift of K, in units of the guaranteed time; and the conclusion broken, if any."""
    x, y = samples(settings)
    model = network(settings, x.shape[1])
    match settings["kind"]:
        case "plain":
            return descent(model, x, y, None, 1 / float(torch.linalg.eigvalsh(empirical_ntk(model, x))[-1]), settings)
        case "flow":
            model = certified_init(model, x, y, flow=True)
            return flow(model, x, y, certify(model, x, y, flow=True), settings)
    model = certified_init(model, x, y)
    certificate = certify(model, x, y, sharp=settings["kind"] == "sharp")
    return descent(model, x, y, certificate, certificate.max_step, settings)


def samples(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """x [N, d] of norm sqrt(d), y [N] of -1 and 1."""
    whole = data.load(settings["data"], settings["root"])
    size = None if settings["data"] == "digits" else 28
    chosen = data.theory_split(whole, train=settings["samples"], test=2, norm="sqrt_d", size=size, seed=settings["seed"]).train
    return chosen.x[:], chosen.y


def network(settings: Mapping[str, Any], inputs: int) -> Readout:
    """The network as it is usually drawn, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings["seed"])
        cell = Monotone(inputs, settings["width"], m=settings["m"], bias=False).double()
        return Readout(cell, stop=Stop(rtol=1e-11, max_steps=5000))


def flow(model: Readout, x: Tensor, y: Tensor, certificate: Certificate, settings: Mapping[str, Any]) -> dict[str, Any]:
    """d theta / dt = -grad L, measured at times that are close at the start, where the loss falls fastest."""
    times = settings["span"] / certificate.decay * np.linspace(0, 1, settings["points"] + 1) ** 2
    path = gradient_flow(model, x, y, times.tolist())
    kernels = [empirical_ntk(path.model_at(i), x) for i in range(len(times))]
    drifts = [float(torch.linalg.vector_norm(K - kernels[0]) / torch.linalg.vector_norm(kernels[0])) for K in kernels]
    curves = {
        "at": times.tolist(),
        "loss": path.losses.tolist(),
        "bound": [certificate.loss_bound(t) for t in times],
        "ntk_min": [least_eigenvalue(K) for K in kernels],
        "drift": drifts,
    }
    return curves | judgement(certificate, measure_flow(path, x, y))


def descent(
    model: Readout, x: Tensor, y: Tensor, certificate: Certificate | None, step: float, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """theta <- theta - step grad L, on a copy."""
    model, z = copy.deepcopy(model), None
    monitor = Monitor(model, x, y, certificate, step=step, every=settings["steps"] // settings["points"])
    for _ in range(settings["steps"]):
        found = loss_gradient(model, x, y, z)
        z = found.z
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(step * found.gradient[name])
        monitor()
    rows = monitor.as_dict()
    curves = {name: rows[key] for name, key in (("at", "k"), ("loss", "loss"), ("bound", "bound"), ("ntk_min", "ntk_min"))}
    curves["drift"] = rows["kernel_drift"]
    return curves | ({"step": step} if certificate is None else judgement(certificate, monitor.run) | {"step": step})


def judgement(certificate: Certificate, run: Run) -> dict[str, Any]:
    """Which conclusion was broken, the exponent that is guaranteed, and lam0^2 / 4."""
    violation = check(certificate, run)
    lam0 = run.measurements[0].sigma_min
    return {"broken": None if violation is None else violation.explain(), "decay": certificate.decay, "least": lam0**2 / 4}


# --- the grid and its claims ----------------------------------------------------------------------------------------------------


def run(options: Options) -> Result:
    """What was measured for each claim; and the curves of every training."""
    config = PRESETS[options.preset]
    found(config.data, len(config.data), options.data_dir)
    outcomes = grid(NAME, train, cells(config, options), options)
    results = {name: outcome.result for name, outcome in outcomes.items()}
    series: Series = {name: collect(config, name, options.seed, results) for name in config.data}
    claims = judged(CLAIMS, {name: judge(name, series) for name in CLAIMS})
    tables = {"Certified networks": summary(series), "Networks as usually drawn": drift_table(series)}
    notes = [*stillness(series), *doubts(series)]
    return gather(NAME, options, claims, outcomes=outcomes, tables=tables, series=series, notes=notes)


def cells(config: Config, options: Options) -> dict[str, dict[str, Any]]:
    """The settings of every training."""
    shared = {key: getattr(config, key) for key in ("samples", "m", "span", "points")} | {"root": options.root}
    made: dict[str, dict[str, Any]] = {}
    for name in config.data:
        for kind in KINDS:
            made[f"{name}-{kind}"] = {
                "data": name,
                "kind": kind,
                "width": config.width,
                "seed": options.seed,
                "steps": config.steps,
            }
        for width in config.widths:
            for seed in range(options.seed, options.seed + config.seeds):
                own = {"data": name, "kind": "plain", "width": width, "seed": seed, "steps": config.plain_steps}
                made[f"{name}-width{width}-seed{seed}"] = own
    return {cell: shared | own for cell, own in made.items()}


def collect(config: Config, name: str, first: int, results: Mapping[str, Any]) -> Series:
    """Of one data set: the certified trainings by kind, and by width the plain ones of all seeds; None where a cell failed."""
    seeds = range(first, first + config.seeds)
    plain = {str(width): [results[f"{name}-width{width}-seed{seed}"] for seed in seeds] for width in config.widths}
    return {"certified": {kind: results[f"{name}-{kind}"] for kind in KINDS}, "plain": plain}


def judge(name: str, series: Series) -> Measured:
    """What one claim says of each data set; a training that failed shows nothing."""
    measured: Measured = {}
    for dataset, one in series.items():
        certified = one["certified"]
        match name:
            case "width":
                drifts = [last(cells, "drift") for cells in one["plain"].values()]
                text = f"{dataset}: how much less K changes than at the next smaller width, in standard errors, the least"
                measured[text] = clear_gain(*pairwise(drifts))
            case "kernel":
                margins = [margin(cell) for cell in certified.values()]
                measured[f"{dataset}: least lambda_min(K) / (lam0^2 / 4)"] = at_least(margins, 1.0)
            case _:
                kinds = ("flow",) if name == "flow" else ("descent", "sharp")
                for kind in kinds:
                    measured |= kept(f"{dataset}, {KINDS[kind]}", certified[kind])
    return measured


def kept(title: str, cell: dict[str, Any] | None) -> Measured:
    """Whether a training keeps what its certificate guarantees: the exponent of the loss, and all conclusions."""
    broken = math.nan if cell is None else float(cell["broken"] is not None)
    return {
        f"{title}: exponent of the loss over the guaranteed one, the least": at_least(exponents(cell), 1.0),
        f"{title}: conclusions broken": at_most(broken, 0.0),
    }


def exponents(cell: dict[str, Any] | None) -> list[float]:
    """log(L / L(0)) over log(bound / L(0)) after the start, which is as telling where the bound is next to L(0)."""
    falls, bounds = logarithms(column(cell, "loss")), logarithms(column(cell, "bound"))
    return [fall / bound for fall, bound in zip(falls[1:], bounds[1:], strict=True)] or [math.nan]


def logarithms(values: Sequence[float]) -> list[float]:
    """Of the values over the first."""
    return [math.log(max(value / values[0], 1e-300)) for value in values]


def margin(cell: dict[str, Any] | None) -> float:
    """The least lambda_min(K) over lam0^2 / 4."""
    return math.nan if cell is None else float(np.min(column(cell, "ntk_min"))) / cell["least"]


def last(cells: Sequence[dict[str, Any] | None], name: str) -> list[float]:
    """The last value of a curve of each."""
    return [column(cell, name)[-1] for cell in cells]


def summary(series: Series) -> dict[str, Any]:
    """A row for each certified training."""
    columns = ["", "step", "log(L(0) / L(end)), guaranteed", "measured", "least lambda_min(K) / (lam0^2 / 4)", "change of K"]
    rows = []
    for dataset, one in series.items():
        for kind, cell in one["certified"].items():
            falls = [-logarithms(column(cell, name))[-1] for name in ("bound", "loss")]
            step = None if cell is None else cell.get("step")
            rows.append([f"{dataset}, {KINDS[kind]}", step, *falls, margin(cell), *last([cell], "drift")])
    return table(columns, rows)


def drift_table(series: Series) -> dict[str, Any]:
    """A row for each width: means over the seeds, and the standard error of the drift."""
    rows = []
    for dataset, one in series.items():
        for width, cells in one["plain"].items():
            falls = [math.exp(logarithms(column(cell, "loss"))[-1]) for cell in cells]
            rows.append([f"{dataset}, width {width}", mean_error(falls)[0], *mean_error(last(cells, "drift"))])
    return table(["", "L(end) / L(0)", "change of K", "its standard error"], rows)


def stillness(series: Series) -> list[str]:
    """How little moves with the theorem's own step."""
    cells = [one["certified"]["descent"] for one in series.values()]
    steps = [math.nan if cell is None else cell["step"] for cell in cells]
    falls = [-math.expm1(logarithms(column(cell, "loss"))[-1]) for cell in cells]
    changes = [float(np.max(last([one["certified"][kind] for one in series.values()], "drift"))) for kind in KINDS]
    return [
        f"The theorem's own steps, at most {np.max(steps):.1g}, lower the loss by at most {100 * np.max(falls):.1g}% in all; "
        f"K changes by at most {np.max(changes):.1g} of its norm in any certified training."
    ]


def doubts(series: Series) -> list[str]:
    """Which widths next to each other do not differ clearly in how much K changes."""
    return [
        f"{dataset}: from width {narrow} to {wide} the change of K falls by {fall:.1f} standard errors."
        for dataset, one in series.items()
        for (narrow, cells), (wide, others) in pairwise(one["plain"].items())
        if (fall := clearness(last(cells, "drift"), last(others, "drift"))) < CLEAR
    ]


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """A row for each data set: the loss of the flow, that of descent with the sharp step, and how the tangent kernel changes."""
    series = result["series"]
    with new_figure((6.5, 2.1 * len(series) + 0.6)) as page:
        panels = page.subplots(len(series), 3, squeeze=False)
        for row, (dataset, one) in zip(panels, series.items(), strict=True):
            draw_loss(row[0], one["certified"]["flow"], r"time $t \cdot \lambda_0^2 / 2$")
            draw_loss(row[1], one["certified"]["sharp"], "step $k$")
            draw_drift(row[2], one["plain"])
            for axes, title in zip(row, ("flow", "descent", "change of $K$"), strict=True):
                axes.set_title(f"{dataset}: {title}", loc="left")
                axes.grid(visible=True)
        handles = [*panels[0, 0].get_legend_handles_labels()[0], *panels[0, 2].get_legend_handles_labels()[0]]
        page.legend(handles=handles, loc="outside lower center", ncols=3 + len(handles) // 2)
    return page


def draw_loss(axes: "Axes", cell: dict[str, Any] | None, label: str) -> None:
    """The loss and its bound; time in units of the guaranteed decay."""
    unit = cell["decay"] if cell is not None and "step" not in cell else 1.0
    at = [t * unit for t in column(cell, "at")]
    first = column(cell, "loss")[0]
    axes.semilogy(at, [v / first for v in column(cell, "bound")], "--", color="grey", label="guaranteed")
    axes.semilogy(at, [v / first for v in column(cell, "loss")], color=COLOURS[0], label="$L / L(0)$")
    axes.set(xlabel=label)


def draw_drift(axes: "Axes", plain: Mapping[str, Sequence[dict[str, Any] | None]]) -> None:
    """|K - K(0)|_F / |K(0)|_F of networks as usually drawn, a line for each seed."""
    for colour, (width, cells) in zip(COLOURS[1:], plain.items(), strict=False):
        for i, cell in enumerate(cells):
            label = f"width {width}, usual start" if i == 0 else None
            axes.plot(column(cell, "at"), column(cell, "drift"), color=colour, linewidth=0.9, label=label)
    axes.set(xlabel="step $k$", ylim=(0, None))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
