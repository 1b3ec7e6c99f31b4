"""Theorems 2-5 of "Global convergence of over-parameterized deep equilibrium models": Gram matrices at the start, and their limits.

The network is y = a'z, z = relu(W z + U x), with W ~ N(0, 2 sigma_w^2 / m), U ~ N(0, 2 / d), a ~ N(0, 1 / m), sigma_w^2 = 0.08, and
inputs of norm sqrt(d). Its Gram matrix is G = Z'Z, that of its first l layers from z = 0 is G^(l); K and K^(l) are what G / m and
G^(l) / m become when m grows, lambda_* = lambda_min(K), H is the tangent kernel (Section 2.3). The paper says:

- Theorem 2: lambda_min(G) >= m lambda_* / 2 once m is of the order of (n / lambda_*)^2, up to a logarithm, and so |G / m - K|_F
  falls like m^(-1/2);
- Theorem 3: |K - K^(l)|_F = O(n l^(1/2) sigma_w^l). What is measured here is faster, sigma_w^2 a layer;
- Theorem 4: |G - G^(l)|_F / m = O(n (2 sqrt(2) sigma_w)^l);
- Theorem 5: |G^(l) / m - K^(l)|_F <= n (2 sqrt(2) sigma_w)^l but for a probability of n^2 exp(-Omega(m (8 sigma_w^2)^l) + O(l^2)).
  The constants are not printed; here it is tested at the layers where m (8 sigma_w^2)^l >= l^2.

Its proofs are in terms of G. That H / m has a limit, too, and which (`theory.tangent_limit`), is not in its text; at a finite width
it is compared with that limit and the part of U, which vanishes like d / m.

It prints no numbers. Run `python -m opteq.experiments.gaussian_gram --preset small --data-dir DATA`. Each data set at each width is
one cell of a grid, of several draws of the weights; the layers are those of the first draw. The data are those of the paper's
Section 5, of whose 1000 samples `small` takes n = 100.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from opteq import data
from opteq.cells import GaussianDEQ
from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments._claims import Measured, at_least, at_most, column, judged, ratios, within
from opteq.experiments._harness import Options, Result, Series, command, found, gather, grid, table
from opteq.models import Readout
from opteq.solvers import Picard
from opteq.theory import empirical_ntk, least_eigenvalue, population_kernel, tangent_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABOUT", "CLAIMS", "PRESETS", "Config", "figure", "main", "measure", "run"]

NAME = "gaussian_gram"
ABOUT = (__doc__ or "").split("\n")[0]
CLAIMS = {
    "rate": "|G/m - K|_F falls with the width like m^(-1/2), as the mean of m independent samples would.",
    "least": "lambda_min(G) >= m lambda_* / 2 in every draw of the widest networks (Theorem 2).",
    "depth": "|K - K^(l)|_F falls by a factor of at most sigma_w from layer to layer (Theorem 3).",
    "layers": "|G - G^(l)|_F falls by a factor of at most 2 sqrt(2) sigma_w from layer to layer (Theorem 4).",
    "both": "|G^(l)/m - K^(l)|_F <= n (2 sqrt(2) sigma_w)^l while m (8 sigma_w^2)^l >= l^2, in the widest networks (Theorem 5).",
    "tangent": "The tangent kernel H/m approaches its limit, with the part of U that a finite width adds, like m^(-1/2).",
}
NEAR = 0.1  # of an exponent to -1/2, whose standard error with 40 draws at each of 6 widths is about 0.04
TITLES = {"gram": r"$|G/m - K|_F \,/\, |K|_F$", "tangent": r"$|H/m - \lim|_F \,/\, |\lim|_F$"}
LAYERS = {"population": "$K^{(l)}$ and $K$", "finite": "$G^{(l)}/m$ and $G/m$", "between": "$G^{(l)}/m$ and $K^{(l)}$"}


@dataclass(frozen=True)
class Config:
    """The sizes. Data sets but the sphere must be there."""

    data: tuple[str, ...] = ("sphere", "mnist", "cifar10")
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    samples: int = 100
    dimension: int = 1000  # of the sphere
    sigma_w2: float = 0.08
    draws: int = 40
    depth: int = 10


PRESETS = {
    "smoke": Config(("sphere", "digits"), widths=(64, 128, 256), samples=12, dimension=30, draws=6),
    "small": Config(),
    "paper": Config(widths=(1000, 4000, 16000, 64000), samples=1000),
}

# --- one cell -------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Of every draw: distances of G and H to their limits, and lambda_min(G) / (m lambda_*); of the first: the layers."""
    x, m, sigma_w2 = samples(settings), settings["width"], settings["sigma_w2"]
    K, limit = population_kernel(x, sigma_w2), tangent_limit(x, sigma_w2, width=m)
    lowest = least_eigenvalue(K)
    rows: dict[str, list[float]] = {"gram": [], "tangent": [], "least": []}
    by_layer: dict[str, list[float]] = {}
    for i in range(settings["draws"]):
        model = network(settings, x.shape[1], i)
        parts = empirical_ntk(model, x, blocks=True)
        G, H = parts["a"] / m, torch.stack(list(parts.values())).sum(0) / m
        for name, value in zip(rows, (apart(G, K), apart(H, limit), least_eigenvalue(G) / lowest), strict=True):
            rows[name].append(value)
        by_layer = by_layer or layers(model, x, G, K, settings["depth"])
    return rows | {"layers": by_layer, "lowest": lowest}


def samples(settings: Mapping[str, Any]) -> Tensor:
    """Inputs [n, d] of norm sqrt(d)."""
    count, seed = settings["samples"], settings["seed"]
    if settings["data"] == "sphere":
        whole = data.sphere(count, settings["dimension"], seed=seed)
    else:
        whole = data.load(settings["data"], settings["root"])
    return data.theory_split(whole, train=count, test=2, norm="sqrt_d", size=None, seed=seed).train.x[:]


def network(settings: Mapping[str, Any], inputs: int, draw: int) -> Readout:
    """The network as Assumption 1 draws it, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(10**7 * settings["seed"] + 100 * settings["width"] + draw)
        cell = GaussianDEQ(inputs, settings["width"], sigma_w2=settings["sigma_w2"]).double()
        return Readout(cell, Picard())


def apart(found: Tensor, limit: Tensor) -> float:
    """|A - B|_F / |B|_F."""
    return float(torch.linalg.vector_norm(found - limit) / torch.linalg.vector_norm(limit))


def layers(model: Readout, x: Tensor, G: Tensor, K: Tensor, depth: int) -> dict[str, list[float]]:
    """|K - K^(l)|_F, |G - G^(l)|_F / m and |G^(l) / m - K^(l)|_F, each over n, for l = 1, ..., depth; G is given over m."""
    assert isinstance(model.cell, GaussianDEQ)
    fn, z = model.cell.bind(x), model.cell.initial(x)
    found: dict[str, list[float]] = {name: [] for name in LAYERS}
    for layer in range(1, depth + 1):
        z = fn(z)
        G_l, K_l = z @ z.T / model.cell.width, population_kernel(x, model.cell.sigma_w2, layer)
        for name, gap in zip(LAYERS, (K - K_l, G - G_l, G_l - K_l), strict=True):
            found[name].append(float(torch.linalg.vector_norm(gap)) / len(x))
    return found


# --- the grid and its claims ----------------------------------------------------------------------------------------------------


def run(options: Options) -> Result:
    """What was measured for each claim; and the series of the figure."""
    config = PRESETS[options.preset]
    files = [name for name in config.data if name != "sphere"]
    found(files, len(files), options.data_dir)
    shared = {key: getattr(config, key) for key in ("samples", "dimension", "sigma_w2", "draws", "depth")}
    cells = {
        f"{name}-m{width}-seed{options.seed}": shared | {"data": name, "root": options.root, "width": width, "seed": options.seed}
        for name in config.data
        for width in config.widths
    }
    outcomes = grid(NAME, measure, cells, options)
    results = iter(outcomes.values())
    series: Series = {name: collect(config, [next(results).result for _ in config.widths]) for name in config.data}
    measured = {name: {k: v for data in series for k, v in judge(name, config, data, series[data]).items()} for name in CLAIMS}
    tables = {"Networks at the start": summary(series), "From layer to layer": by_layer(series)}
    return gather(NAME, options, judged(CLAIMS, measured), outcomes=outcomes, tables=tables, series=series)


def collect(config: Config, cells: Sequence[dict[str, Any] | None]) -> Series:
    """Of one data set: each quantity by width and draw, and the layers of the widest network; NaN for cells that failed."""
    failed = {name: [float("nan")] for name in ("gram", "tangent", "least")}
    gaps = {"layers": {name: [float("nan")] * config.depth for name in LAYERS}, "lowest": float("nan")}
    rows = [failed | gaps if cell is None else cell for cell in cells]
    own = {name: [row[name] for row in rows] for name in failed}
    return {"m": list(config.widths), **own, "layers": rows[-1]["layers"], "lowest": rows[-1]["lowest"]}


def judge(name: str, config: Config, dataset: str, series: Series) -> Measured:
    """What one claim says of one data set."""
    gaps, sigma_w = series["layers"], config.sigma_w2**0.5
    match name:
        case "least":
            return {f"{dataset}: least lambda_min(G) / (m lambda_*)": at_least(series["least"][-1], 0.5)}
        case "depth":
            return {f"{dataset}: largest factor": at_most(ratios(gaps["population"]), sigma_w)}
        case "layers":
            return {f"{dataset}: largest factor": at_most(ratios(gaps["finite"]), 8**0.5 * sigma_w)}
        case "both":
            bounds = [(8 * config.sigma_w2) ** (layer / 2) for layer in range(1, config.depth + 1)]
            tested = [layer for layer in range(1, config.depth + 1) if series["m"][-1] * bounds[layer - 1] ** 2 >= layer**2]
            parts = [gaps["between"][layer - 1] / bounds[layer - 1] for layer in tested]
            return {f"{dataset}: distance over its bound, the largest of the first {len(parts)} layers": at_most(parts, 1.0)}
    found = exponent(series["m"], series["tangent" if name == "tangent" else "gram"])
    return {f"{dataset}: exponent of m": within(found, -0.5 - NEAR, -0.5 + NEAR)}


def exponent(widths: Sequence[int], draws: Sequence[Sequence[float]]) -> float:
    """The slope of the logarithm of the root mean square over the draws against log m; NaN if a width has none."""
    return float(np.polyfit(np.log(widths), np.log([rms(one) for one in draws]), 1)[0])


def rms(values: Sequence[float]) -> float:
    """The root of the mean of squares."""
    return float(np.sqrt(np.mean(np.square(values))))


def summary(series: Series) -> dict[str, Any]:
    """A row for each data set and width."""
    columns = ["", "lambda_*", "|G/m - K|_F / |K|_F", "H/m to its limit", "lambda_min(G) / (m lambda_*), the least"]
    rows = [
        [f"{name}, m = {m}", one["lowest"], rms(one["gram"][i]), rms(one["tangent"][i]), min(one["least"][i])]
        for name, one in series.items()
        for i, m in enumerate(one["m"])
    ]
    return table(columns, rows)


def by_layer(series: Series) -> dict[str, Any]:
    """A row for each data set: the geometric mean of the factors from layer to layer."""
    columns = ["", "|K - K^(l)|_F", "|G - G^(l)|_F"]
    means = {
        name: [float(np.exp(np.mean(np.log(ratios(one["layers"][gap]))))) for gap in ("population", "finite")]
        for name, one in series.items()
    }
    return table(columns, [[f"{name}: factor a layer", *found] for name, found in means.items()])


# --- the figure -----------------------------------------------------------------------------------------------------------------


def figure(result: Result) -> "Figure":
    """Distances to the limits and lambda_min(G) against the width, and the layers of the widest network."""
    series, config = result["series"], result["config"]
    with new_figure((6.5, 5.6)) as page:
        (gram, tangent), (least, deep) = page.subplots(2, 2)
        for axes, name, letter in ((gram, "gram", "a"), (tangent, "tangent", "b")):
            draw_rates(axes, series, name)
            axes.set_title(f"({letter}) {TITLES[name]}", loc="left")
        draw_least(least, series)
        draw_layers(deep, series, config["sigma_w2"])
        for axes in (gram, tangent, least, deep):
            axes.grid(visible=True)
            axes.set_axisbelow(True)
        page.legend(*gram.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return page


def draw_rates(axes: "Axes", series: Series, name: str) -> None:
    """Every draw and their root mean square, with a line of slope -1/2."""
    for colour, (label, one) in zip(COLOURS, series.items(), strict=False):
        scatter(axes, one, name, colour)
        axes.loglog(one["m"], [rms(draws) for draws in by_width(one, name)], color=colour, label=label)
    widths = np.array(one["m"], dtype=float)
    lowest = min(rms(by_width(one, name)[-1]) for one in series.values())
    axes.loglog(widths, 0.5 * lowest * (widths / widths[-1]) ** -0.5, ":", color="grey", label="slope -1/2")
    axes.set(xlabel="width $m$")


def scatter(axes: "Axes", one: Series, name: str, colour: str) -> None:
    """A point for each draw."""
    for m, draws in zip(one["m"], by_width(one, name), strict=True):
        axes.plot([m] * len(draws), draws, ".", color=colour, markersize=2, alpha=0.5)


def by_width(one: Series, name: str) -> list[list[float]]:
    """The draws at each width, as read back from JSON: NaN for null."""
    return [column({name: draws}, name) for draws in one[name]]


def draw_least(axes: "Axes", series: Series) -> None:
    """lambda_min(G) / (m lambda_*), every draw and the least of them, and the 1/2 of Theorem 2."""
    for colour, (_, one) in zip(COLOURS, series.items(), strict=False):
        scatter(axes, one, "least", colour)
        axes.semilogx(one["m"], [float(np.min(draws)) for draws in by_width(one, "least")], color=colour)
    axes.axhline(0.5, color="black", linestyle="--")
    axes.set(xlabel="width $m$", ylim=(0, None))
    axes.set_title(r"(c) $\lambda_{\min}(G) \,/\, (m \lambda_*)$", loc="left")


def draw_layers(axes: "Axes", series: Series, sigma_w2: float) -> None:
    """The three distances against the layer: a colour for each data set, a line for each distance."""
    for name, line in zip(LAYERS, ("-", "--", ":"), strict=True):
        for colour, one in zip(COLOURS, series.values(), strict=False):
            gaps = column(one["layers"], name)
            axes.semilogy(range(1, len(gaps) + 1), gaps, line, color=colour)
        axes.plot([], [], line, color="grey", label=LAYERS[name])
    ls = np.arange(1, len(gaps) + 1)
    axes.semilogy(ls, (8 * sigma_w2) ** (ls / 2), color="black", linewidth=0.8, label=r"$(2\sqrt{2}\,\sigma_w)^l$")
    axes.set(xlabel="layer $l$")
    axes.set_title("(d) distance of Gram matrices, $|\\cdot|_F / n$", loc="left")
    axes.legend(fontsize=6, loc="lower left")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a preset and write its result and figure; 0 if every claim is shown."""
    return command(NAME, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
