"""The figures drawn: ratios as bars, costs as curves."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter
from show import LABELS
from summary import Data

from opteq.diagnostics.drawing import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PEERS = ("torchdeq", "torchdeq-anderson", "unrolled", "jax", "cvxpylayers")
COLOUR = dict(zip(("opteq", *PEERS), COLOURS, strict=False))


def figure(data: Data) -> "Figure":
    """Bars for each thread count above, curves below."""
    counts, curves = list(data["threads"]), [one for records in data["threads"].values() for one in records.get("curves", [])]
    races = {name: None for count in counts for name in (one["name"] for one in data["threads"][count].get("races", []))}
    height, below = 1.2 + 0.42 * len(races), 2.9 * -(-len(curves) // 3)
    with new_figure((7.2, height + below)) as drawn:
        upper, lower = drawn.subfigures(2, 1, height_ratios=[height, below]) if curves else (drawn, None)
        axes = upper.subplots(1, len(counts), sharex=True, sharey=True, squeeze=False)[0]
        for ax, count in zip(axes, counts, strict=True):
            bars(ax, data["threads"][count].get("races", []), list(races), f"{count} thread{'s' if count != '1' else ''}")
        handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        upper.legend(handles.values(), handles, loc="outside upper center", ncols=5)
        if lower is not None:
            small_multiples(lower, curves, data)
    return drawn


def bars(ax: "Axes", races: list[dict[str, Any]], names: list[str], title: str) -> None:
    """How many times as long as opteq each peer takes, with quartiles."""
    for one in races:
        present = [peer for peer in PEERS if peer in one["contestants"]]
        thick = 0.8 / max(4, len(present))
        for i, peer in enumerate(present):
            ratio, y = one["contestants"][peer]["over_opteq"], names.index(one["name"]) + (i - (len(present) - 1) / 2) * thick
            spread = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
            known = LABELS[peer] in ax.get_legend_handles_labels()[1]
            ax.barh(y, ratio["median"] - 1, thick, left=1, xerr=spread, color=COLOUR[peer], label=None if known else LABELS[peer],
                    error_kw={"elinewidth": 0.7})  # fmt: skip
        if one["goal"]:
            place = names.index(one["name"])
            ax.plot([one["goal"]] * 2, [place - 0.42, place + 0.42], color="black", linewidth=0.8, linestyle=":")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set(xscale="log", title=title, xlabel="time / time of opteq (dotted: goal against the first bar)")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    plain_ticks(ax.xaxis)
    ax.grid(axis="x")
    ax.set_axisbelow(True)


def small_multiples(part: Any, curves: list[dict[str, Any]], data: Data) -> None:
    """The time of a step over one quantity each."""
    columns = min(3, len(curves))
    axes = list(part.subplots(-(-len(curves) // columns), columns, squeeze=False).flat)
    for ax, one in zip(axes, curves, strict=False):
        for who, line in one["lines"].items():
            points(ax, line, one["fit"], COLOUR[who], f"{LABELS[who]}{number(line['law'])}")
        if one["name"] == "curve-kernel":
            torch_func(ax, data)
        power = one["fit"] == "power"
        ax.set(xscale="log", yscale="log" if power else "linear", xlabel=one["axis"], ylabel="ms", title=one["title"])
        if power:
            plain_ticks(ax.yaxis)
        ax.xaxis.set_minor_formatter(NullFormatter())
        if one["lines"]["opteq"]["x"][-1] < 2000:
            plain_ticks(ax.xaxis)
        ax.grid()
        ax.legend(title="exponents" if power else "ms a decade", loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=1)
    for ax in axes[len(curves) :]:
        ax.set_visible(False)


def plain_ticks(axis: "Axis") -> None:
    """1, 2, 5, 10, ... as they are."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def number(found: dict[str, float] | None) -> str:
    return "" if found is None else f": {found.get('exponent', found.get('per_decade')):.3g}"


def points(ax: "Axes", line: dict[str, Any], fit: str, colour: str, label: str) -> None:
    """What was measured, and the law that was fitted to it."""
    ax.plot(line["x"], line["milliseconds"], "o", markersize=3.5, color=colour, label=label)
    if line["law"]:
        x = np.geomspace(line["x"][0], line["x"][-1], 50)
        c = line["law"]["constant"]
        y = c * x ** line["law"]["exponent"] if fit == "power" else c + line["law"]["per_decade"] * np.log10(x)
        ax.plot(x, y, color=colour, linewidth=0.8)


def torch_func(ax: "Axes", data: Data) -> None:
    """The points at which torch.func was measured."""
    kernels = data["threads"].get("1", {}).get("kernels", [])
    for one in kernels:
        for (way, row), colour in zip(one["extrapolated"].items(), COLOURS[6:], strict=False):
            found = [(point["N"], point["torch_func"][way]["milliseconds"]) for point in one["points"]]
            x, y = zip(*found, strict=True)
            ax.plot(x, y, "s", markersize=3, color=colour, label=f"torch.func, {way}: {row['exponent']:.2g}")
