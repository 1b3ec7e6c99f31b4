"""What the figures say in all: means, extremes, and which goals are met."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from typing import Any, TypeAlias

Data: TypeAlias = dict[str, Any]
MEMORY, IMPORT, MEAN, SMALLEST = 12, 0.3, 4, 1.15
OVERHEADS = {"Picard": 1.10, "PeacemanRachford": 1.10, "Anderson": 1.35}


@dataclass(frozen=True)
class Goal:
    """What was to be reached, what was, and whether that is enough."""

    what: str
    goal: str
    measured: str
    met: bool


def geometric_mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def train_ratios(records: Data, peer: str) -> dict[str, float]:
    """How many times as long the peer takes for a train step, by workload; where it takes part."""
    races = [one for one in records.get("races", []) if one["train"] and peer in one["contestants"]]
    return {one["name"]: one["contestants"][peer]["over_opteq"]["median"] for one in races}


def goals(data: Data) -> Iterator[Goal]:
    """All of them, for each thread count."""
    for count, records in data["threads"].items():
        where = f"{count} thread{'s' if count != '1' else ''}"
        yield from race_goals(records, where)
        yield from mean_goals(records, where)
        yield from kernel_goals(records, where)
        for one in records.get("overheads", []):
            if one["name"] in OVERHEADS:
                found, most = one["over_bare_f"]["median"], OVERHEADS[one["name"]]
                yield Goal(f"solve time / bare f, {one['name']}, {where}", f"at most {most:g}", f"{found:.2f}", found <= most)
        yield from cost_goals(records)


def race_goals(records: Data, where: str) -> Iterator[Goal]:
    for one in records.get("races", []):
        row, own = one["contestants"].get(one["against"]), one["contestants"]["opteq"]
        if row is None or not one["goal"]:
            continue
        found = row["over_opteq"]["median"]
        yield Goal(f"{one['title']}, {where}", f"{one['goal']:g} x", f"{found:.2f} x", found >= one["goal"])
        if one["train"]:
            what, most = f"its gradient error at most that of {one['against']}", row["gradient_error"]
            yield Goal(
                f"{one['name']}, {where}: {what}", f"{most:.1e}", f"{own['gradient_error']:.1e}", own["gradient_error"] <= most
            )


def mean_goals(records: Data, where: str) -> Iterator[Goal]:
    if ratios := list(train_ratios(records, "torchdeq").values()):
        mean = geometric_mean(ratios)
        yield Goal(f"geometric mean over train steps, {where}", f"{MEAN:g} x", f"{mean:.2f} x", mean >= MEAN)
    rows = {one["name"]: one["contestants"].get("torchdeq") for one in records.get("races", [])}
    if everything := {name: row["over_opteq"]["median"] for name, row in rows.items() if row}:
        least = min(everything, key=everything.__getitem__)
        found = everything[least]
        yield Goal(f"smallest ratio ({least}), {where}", f"{SMALLEST:g} x", f"{found:.2f} x", found >= SMALLEST)


def kernel_goals(records: Data, where: str) -> Iterator[Goal]:
    for one in records.get("kernels", []):
        for way, row in one["extrapolated"].items():
            what = f"tangent kernel, N {one['N']}, against torch.func by {way}, {where}"
            yield Goal(what, f"{one['goal']:g} x", f"{row['over_opteq']:.0f} x, extrapolated", row["over_opteq"] >= one["goal"])


def cost_goals(records: Data) -> Iterator[Goal]:
    for one in records.get("memory", []):
        states = [point["states"] for point in one["points"]]
        flat = states[-1] <= states[0] + 1  # the solver, and with it the memory, may be another at another tolerance
        found = f"{max(states):.1f}, {'flat' if flat else 'growing'}"
        yield Goal(f"states in memory, {one['name']}", f"at most {MEMORY}, flat", found, flat and max(states) <= MEMORY)
    for one in records.get("imports", []):
        yield Goal("import opteq after torch", f"at most {IMPORT:g} s", f"{one['median']:.2f} s", one["median"] <= IMPORT)
