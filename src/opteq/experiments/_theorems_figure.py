"""The figure of `opteq_theorems`: four series, one for each of Theorems 1, 2, 3 and 5."""

from typing import TYPE_CHECKING

import numpy as np

from opteq.diagnostics.drawing import COLOURS, new_figure
from opteq.experiments._harness import Result, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN, SHOWN = ("relu", "tanh", "softplus", "soft_threshold"), 60  # activations, and steps


def figure(result: Result) -> "Figure":
    """The four series of a result."""
    series = result["series"]
    with new_figure((5.5, 5.8)) as page:
        (a, b), (c, d) = page.subplots(2, 2)
        draw_objective(a, series["objective"])
        draw_inclusion(b, series["inclusion"])
        draw_wide(c, series["wide"])
        draw_sam(d, series["sam"])
        for axes in (a, b, c, d):
            axes.grid(visible=True)
            axes.set_axisbelow(True)
            columns = 3 if axes is b else 2
            axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=columns)  # below, where it can hide no data
    return page


def draw_objective(axes: "Axes", series: Series) -> None:
    """phi - phi(z*) against the evaluations: a colour for each activation, dashed for Anderson."""
    for i, name in enumerate(DRAWN):
        for title, line in {"plain": "-", "Anderson": "--"}.items():
            data = series[f"{name}, {title}"]
            axes.semilogy(data["k"], data["value"], line, color=COLOURS[i])
        axes.plot([], [], color=COLOURS[i], label=name.replace("_", " "))
    axes.plot([], [], "-", color="grey", label=r"$z \leftarrow f(z)$")
    axes.plot([], [], "--", color="grey", label="Anderson")
    axes.set(xlim=(0, SHOWN), ylim=(1e-11, None), xlabel=r"evaluations of $f$, $k$", ylabel=r"$\varphi(z^k) - \varphi(z^*)$")
    axes.set_title("(a) Theorem 1: objective", loc="left")


def draw_inclusion(axes: "Axes", series: Series) -> None:
    """The residual of the inclusion against k, for each depth."""
    for colour, (title, data) in zip(COLOURS, series.items(), strict=False):
        axes.semilogy(data["k"], data["value"], color=colour, label=f"${title}$")
    axes.set(
        xlim=(0, SHOWN / 2),
        ylim=(1e-14, None),
        xlabel=r"step $k$ of $z \leftarrow f(z)$",
        ylabel=r"$\|v^k + (I - P)\,\tilde z^k\| \;/\; \|z^*\|$",
    )
    axes.set_title("(b) Theorem 2: inclusion", loc="left")


def draw_wide(axes: "Axes", series: Series) -> None:
    """The distance to the wide limit against alpha, with a line of slope 1."""
    markers = ("o", "s", "^", "D")
    for colour, marker, (title, data) in zip(COLOURS, markers, series.items(), strict=False):
        label, alphas = title.replace("equal", r"equal $\alpha_l$"), np.array(data["alpha"])
        axes.loglog(alphas, data["value"], color=colour, marker=marker, markersize=4, markerfacecolor="none", label=label)
    lowest = min(data["value"][0] for data in series.values())
    axes.loglog(alphas, 0.5 * lowest * alphas / alphas[0], ":", color="grey", label="slope 1")
    axes.set(xlabel=r"$\alpha$", ylabel=r"$\|z^*_\alpha - z^*_{\mathrm{wide}}\| \;/\; \|z^*_{\mathrm{wide}}\|$")
    axes.set_title("(c) Theorem 3: wide limit", loc="left")


def draw_sam(axes: "Axes", series: Series) -> None:
    """The distance to z_R, the fixed point of least R, against k; each with a line of the slope that Theorem 5 gives."""
    for colour, (title, data) in zip(COLOURS, series.items(), strict=False):
        ks, rate = np.array(data["k"]), data["rate"]
        label = r"$z \leftarrow f(z)$" if title == "plain" else "$" + title.replace("rho", r"\rho").replace(", ", r",\; ") + "$"
        axes.loglog(ks, data["value"], color=colour, label=label)
        if rate:
            late = ks[ks >= ks[-1] / 30]
            axes.loglog(late, 0.85 * data["value"][-1] * (late / late[-1]) ** -rate, ":", color=colour)
    axes.plot([], [], ":", color="grey", label=r"slope $-\min(\rho, c)$")
    axes.set(xlabel="step $k$", ylabel=r"$\|z^k - z_R\| \;/\; \|z_R\|$")
    axes.set_title("(d) Theorem 5: SAM's selection", loc="left")
