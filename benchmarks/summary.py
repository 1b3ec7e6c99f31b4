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
    """What was to be reached, what was, and whether that is enough; where it is not, what is in the way."""

    what: str
    goal: str
    measured: str
    met: bool
    bound: str = ""


def geometric_mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def train_ratios(records: Data, peer: str) -> dict[str, float]:
    """How many times as long the peer takes for a train step, by workload; where it takes part."""
    races = [one for one in records.get("races", []) if one["train"] and peer in one["contestants"]]
    return {one["name"]: one["contestants"][peer]["over_opteq"]["median"] for one in races}


def reachable(found: float, share: float) -> float:
    """A ratio if nothing but our products took time, and these ran at the machine's limit."""
    return found / share


def bound(found: float, goal: float, share: float, beside: str = "what is done") -> str:
    """What keeps a ratio from its goal: how many products are made, or what takes time beside them at the limit."""
    if (reach := reachable(found, share)) < goal:
        return f"the number of products: with nothing but these, at the machine's limit, it would be {reach:.2f} x"
    return f"{beside} beside the products, which at the machine's limit would take {share:.0%} of the time"


def calls(counts: dict[str, float]) -> str:
    """The calls of PyTorch that are no products, in words."""
    return f"{counts['large']:g} large and {counts['small']:g} small calls of PyTorch"


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
                counts = {kind: round(count, 1) for kind, count in one["beside_f"].items()}
                why = f"an evaluation comes with {counts['products']:g} products, {calls(counts)} beside those of f"
                yield Goal(f"solve time / bare f, {one['name']}, {where}", f"at most {most:g}", f"{found:.2f}", found <= most, why)
        yield from cost_goals(records)


def race_goals(records: Data, where: str) -> Iterator[Goal]:
    for one in records.get("races", []):
        row, own = one["contestants"].get(one["against"]), one["contestants"]["opteq"]
        if row is None or not one["goal"]:
            continue
        found, goal = row["over_opteq"]["median"], one["goal"]
        yield Goal(f"{one['title']}, {where}", f"{goal:g} x", f"{found:.2f} x", found >= goal, race_bound(one, goal))
        if one["train"]:
            what, most = f"its gradient error at most that of {one['against']}", row["gradient_error"]
            yield Goal(
                f"{one['name']}, {where}: {what}", f"{most:.1e}", f"{own['gradient_error']:.1e}", own["gradient_error"] <= most
            )


def race_bound(one: dict[str, Any], goal: float) -> str:
    """What keeps a workload from its goal."""
    own, other = one["contestants"]["opteq"], one["contestants"][one["against"]]
    return bound(other["over_opteq"]["median"], goal, own["share_of_gemm"], calls(own["calls"]))


def mean_goals(records: Data, where: str) -> Iterator[Goal]:
    races = {one["name"]: one for one in records.get("races", []) if "torchdeq" in one["contestants"]}
    ratios = {name: one["contestants"]["torchdeq"]["over_opteq"]["median"] for name, one in races.items()}
    if trained := train_ratios(records, "torchdeq"):
        what, mean = f"geometric mean over train steps, {where}", geometric_mean(list(trained.values()))
        share = geometric_mean([races[name]["contestants"]["opteq"]["share_of_gemm"] for name in trained])
        yield Goal(what, f"{MEAN:g} x", f"{mean:.2f} x", mean >= MEAN, bound(mean, MEAN, share))
    if ratios:
        least = min(ratios, key=ratios.__getitem__)
        what, found = f"smallest ratio ({least}), {where}", ratios[least]
        yield Goal(what, f"{SMALLEST:g} x", f"{found:.2f} x", found >= SMALLEST, race_bound(races[least], SMALLEST))


def kernel_goals(records: Data, where: str) -> Iterator[Goal]:
    for one in records.get("kernels", []):
        for way, row in one["extrapolated"].items():
            what, found = f"tangent kernel, N {one['N']}, against torch.func by {way}, {where}", row["over_opteq"]
            why = bound(found, one["goal"], one["share_of_gemm"])
            yield Goal(what, f"{one['goal']:g} x", f"{found:.0f} x, extrapolated", found >= one["goal"], why)


def cost_goals(records: Data) -> Iterator[Goal]:
    for one in records.get("memory", []):
        states = [point["states"] for point in one["points"]]
        flat = states[-1] <= states[0] + 1  # the solver, and with it the memory, may be another at another tolerance
        found = f"{max(states):.1f}, {'flat' if flat else 'growing'}"
        yield Goal(f"states in memory, {one['name']}", f"at most {MEMORY}, flat", found, flat and max(states) <= MEMORY)
    for one in records.get("imports", []):
        yield Goal("import opteq after torch", f"at most {IMPORT:g} s", f"{one['median']:.2f} s", one["median"] <= IMPORT)
