"""Numbers and verdicts in words."""

import math
from collections import Counter
from typing import Any

from opteq.diagnostics.panels import number
from opteq.report.reading import Row, RunData, entries, rows_of, shown

__all__ = [
    "EVENTS",
    "MISSING",
    "best",
    "certificate_words",
    "condition_verdict",
    "convexity_words",
    "duration",
    "figure_text",
    "last",
    "last_step",
    "percent",
    "remedies",
    "training_words",
    "verdict",
]

HEALTHY, POOR = 0.99, 0.9  # shares of converged samples
MISSING = "—"
EVENTS = {
    "nan_loss": "the loss was not finite",
    "nan_state": "an equilibrium was not finite",
    "nan_gradient": "a gradient was not finite",
    "nan_parameter": "a parameter was not finite",
    "not_converging": "too few samples converged",
    "norm": "the norm of W passed its limit",
}


def figure_text(value: Any) -> str:
    """A number with four digits, counts whole; what is no number as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return MISSING if value is None else shown(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**18 else "huge"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def percent(value: Any) -> str:
    """0.9827 as 98.27%."""
    share = number(value)
    return figure_text(value) if share is None else f"{100 * share:.2f}%"


def duration(value: Any) -> str:
    """Seconds as 12.3 s, 4 min 05 s or 2 h 03 min."""
    seconds = number(value)
    if seconds is None or seconds < 0:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def last(rows: list[Row], key: str) -> float | None:
    """The last number under the key."""
    return next((value for row in reversed(rows) if (value := number(row.get(key))) is not None), None)


def best(rows: list[Row], key: str) -> float | None:
    """The largest number under the key."""
    return max((value for row in rows if (value := number(row.get(key))) is not None), default=None)


def last_step(run: RunData) -> float | None:
    """The largest step at which something was measured."""
    return max((at for rows in run.rows.values() if (at := best(rows, "step")) is not None), default=None)


def verdict(run: RunData) -> list[str]:
    """What became of a run: how it ended, how well it does, whether its equilibria can be trusted."""
    return [sentence for sentence in (_ending(run), _accuracy(run), _solver(run), _events(run)) if sentence]


def _ending(run: RunData) -> str:
    if not run.result:
        at = last_step(run)
        if trained := entries(run.certificate.get("trained")):
            return training_words(trained)
        if at is None:
            return "Nothing has been measured yet."
        return f"No result yet: it goes on, or was interrupted after step {at:,.0f}."
    length = f"{figure_text(run.result.get('steps'))} steps ({figure_text(run.result.get('epochs'))} epochs)"
    if run.result.get("stopped"):
        return f"Stopped early, after {length}: {shown(run.result['stopped'])}"
    return f"Finished: {length} in {duration(run.result.get('seconds'))}."


def _accuracy(run: RunData) -> str:
    at_end, at_best = run.result.get("valid_accuracy", last(run.epochs, "valid_accuracy")), best(run.epochs, "valid_accuracy")
    if number(at_end) is None:
        return ""
    return f"Validation accuracy {percent(at_end)} at the end" + (f", {percent(at_best)} at best." if at_best is not None else ".")


def _solver(run: RunData) -> str:
    share, steps, whose = last(run.epochs, "valid_converged"), last(run.epochs, "valid_solver_steps"), "validation"
    if share is None:
        share, steps, whose = last(run.steps, "converged"), last(run.steps, "solver_steps"), "training"
    if share is None:
        return ""
    facts = f"{percent(share)} of the last {whose} samples reached their equilibrium"
    facts += f", in {figure_text(steps)} solver steps on average." if steps is not None else "."
    if share >= HEALTHY:
        return f"The solver is healthy: {facts}"
    return f"{'Beware' if share < POOR else 'Note'}: only {facts} What the network says of the others is not an equilibrium."


def _events(run: RunData) -> str:
    actions = Counter(shown(event.get("action")) for event in run.events)
    parts = ", ".join(f"{count} {action}" for action, count in actions.most_common(5))
    return f"Events of the guard: {parts}." if parts else ""


def certificate_words(certificate: Row) -> str:
    """The verdict of a certificate."""
    holds, conditions = certificate.get("holds"), rows_of(certificate.get("conditions"))
    failing = sum(condition_verdict(condition) != "holds" for condition in conditions)
    story = f"{failing} of {len(conditions)} conditions do not hold"
    if holds is True and failing:
        return f"Contradiction: it claims to hold, but {story}. Do not rely on it."
    if holds is True:
        held = f"all {len(conditions)} conditions hold" if conditions else "its conditions are not listed"
        return f"Certified: {held}. {_promise(certificate)}".strip()
    if holds is False:
        return f"Not certified: {story if failing else 'it says so itself'}, so that nothing is promised."
    return "No guarantee is claimed, whatever the conditions say."


def _promise(certificate: Row) -> str:
    step, rate = number(certificate.get("max_step")), number(certificate.get("rate"))
    if rate is None:
        return ""
    if certificate.get("kind") == "flow":
        return f"Under the gradient flow, the loss falls at least as exp(-{rate:.4g} t)."
    if step is None:
        return ""
    return f"Gradient descent with a step of {step:.4g} multiplies the loss by at most 1 - {1 - rate:.3g} at each step."


def condition_verdict(condition: Row) -> str:
    """Whether one condition holds; by how much it fails, where that is written."""
    if isinstance(condition.get("verdict"), str):
        return "holds" if condition["verdict"] == "ok" else shown(condition["verdict"])
    if isinstance(condition.get("holds"), bool):
        return "holds" if condition["holds"] else "FAILS"
    slack = number(condition.get("slack"))
    if slack is None:
        return "holds" if condition.get("slack") == math.inf else "not evaluated"
    return "holds" if slack >= 1 else "FAILS"


def convexity_words(problem: Row) -> str:
    """Whether the problem that a network solves is convex."""
    if problem.get("convex") is True:
        return "The problem is convex: all that this needs was shown to hold."
    return "The problem was not shown to be convex." if problem.get("convex") is False else ""


def remedies(certificate: Row) -> list[str]:
    """What to change about the conditions that do not hold."""
    failing = [condition for condition in rows_of(certificate.get("conditions")) if condition_verdict(condition) != "holds"]
    return list(dict.fromkeys(shown(condition["remedy"]) for condition in failing if condition.get("remedy")))


def training_words(trained: Row) -> str:
    """How a training under a certificate compares with what was promised."""
    if not trained:
        return ""
    first, final, bound = (figure_text(trained.get(key)) for key in ("loss_first", "loss_last", "bound_last"))
    steps = figure_text(trained.get("steps"))
    story = f"Trained for {steps} steps under the certificate: the loss went from {first} to {final}; promised was at most {bound}."
    broken = trained.get("violation")
    return f"{story} BROKEN: {shown(broken)}" if broken else f"{story} Every conclusion was kept."
