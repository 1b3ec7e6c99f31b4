"""The figures as a table for the terminal."""

from collections.abc import Iterator
from typing import Any

from measure import Ratio
from rich.table import Table

LABELS = {
    "opteq": "opteq",
    "torchdeq": "torchdeq, best",
    "torchdeq-anderson": "torchdeq, Anderson",
    "torchdeq-iteration": "torchdeq, iteration",
    "unrolled": "unrolled",
    "jax": "JAX, jaxopt",
    "cvxpylayers": "cvxpylayers",
}


def scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def shown(records: dict[str, list[dict[str, Any]]], title: str) -> Table:
    """The figures of one thread count."""
    table = Table(title=title)
    for heading in ("workload", "", "settings", "ms", "times opteq", "goal", "residual", "gradient error", "states", "mm", "cores"):
        table.add_column(heading)
    for one in records.get("races", []):
        for row in race_rows(one):
            table.add_row(*row)
        table.add_section()
    for row in other_rows(records):
        table.add_row(*row)
    return table


def race_rows(one: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for i, (name, row) in enumerate(one["contestants"].items()):
        goal = f"{one['goal']:g}" if name == one["against"] and one["goal"] else ""
        times = (f"{row['milliseconds']:.0f}", str(Ratio(**row["over_opteq"])), goal)
        states = "" if row["states"] is None else f"{row['states']:.1f}"
        share = "" if row["share_of_gemm"] is None else f"{row['share_of_gemm']:.0%}"
        reached = (scientific(row["residual"]), scientific(row["gradient_error"]), states, share, f"{row['cores']:.1f}")
        yield (one["title"] if i == 0 else "", LABELS[name], "" if name == "opteq" else row["settings"], *times, *reached)
    for name, reason in one["left_out"].items():
        yield "", LABELS[name], f"left out: {reason}"


def other_rows(records: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    for one in records.get("overheads", []):
        yield one["title"], "", f"{one['evaluations']} evaluations", "", f"{Ratio(**one['over_bare_f'])} of bare f"
    for one in records.get("kernels", []):
        for point in one["points"]:
            for way, row in point["torch_func"].items():
                ratio = str(Ratio(**row["over_opteq"]))
                yield f"{one['title']}, N {point['N']}", f"torch.func, {way}", "", f"{row['milliseconds']:.0f}", ratio
        for way, row in one["extrapolated"].items():
            ratio, goal = f"{row['over_opteq']:.1f}, extrapolated", f"{one['goal']:g}"
            yield f"N {one['N']}", f"torch.func, {way}", f"opteq {one['milliseconds']:.0f} ms", "", ratio, goal
    for one in records.get("memory", []):
        states = ", ".join(f"{point['states']:.1f}" for point in one["points"])
        yield one["title"], "", "states over tolerances", "", states
    for one in records.get("curves", []):
        for name, line in one["lines"].items():
            yield f"{one['title']} over {one['axis']}", LABELS[name], "", "", law(line["law"])
    for one in records.get("imports", []):
        yield "import opteq after import torch", "", "", f"{1e3 * one['median']:.0f}"


def law(found: dict[str, float] | None) -> str:
    """The law of a curve in words."""
    if found is None:
        return "too few points"
    return f"exponent {found['exponent']:.2f}" if "exponent" in found else f"{found['per_decade']:.1f} ms a decade"
