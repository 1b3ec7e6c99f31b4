"""What a network solves, as a statement that a report can show: the recovered problem, or else the equation of its cell."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from opteq.cells import GaussianDEQ, Monotone, MonotoneConv, MonotoneMultiTier, Residual, ScaledReLU
from opteq.equilibrium import Cell
from opteq.theory import recover_problem
from opteq.theory.problem import Problem

__all__ = ["Statement", "statement"]

_MONOTONE = (
    "find z with 0 in (I - W) z - (U x + b) + df(z), sigma the proximal operator of f: "
    "z = sigma(W z + U x + b), W = (1 - m) I - A'A + B - B', monotone with the constant m",
    r"0 \in (I - W)z - (Ux + b) + \partial f(z),\quad \sigma = \mathrm{prox}_f;\quad "
    r"z = \sigma(Wz + Ux + b),\quad W = (1 - m)I - A^\top A + B - B^\top",
)
_EQUATIONS: dict[type[Cell], tuple[str, str]] = {
    Monotone: _MONOTONE,
    MonotoneConv: _MONOTONE,
    MonotoneMultiTier: _MONOTONE,
    GaussianDEQ: ("solve z = relu(W z + U x)", r"z = \mathrm{relu}(Wz + Ux)"),
    ScaledReLU: (
        "solve z = relu(gamma z A + relu(x W)), the samples being rows",
        r"z = \mathrm{relu}(\gamma\,zA + \mathrm{relu}(xW))",
    ),
    Residual: (
        "solve z = norm(relu(z + norm(x + W2 * norm(relu(W1 * z)))))",
        r"z = \mathrm{norm}(\mathrm{relu}(z + \mathrm{norm}(x + W_2 * \mathrm{norm}(\mathrm{relu}(W_1 * z)))))",
    ),
}


@dataclass(frozen=True)
class Statement:
    """`kind`: "minimisation", "inclusion", or "equation" where no convex problem is known to be behind it.

    `text` and `latex` say the same. `requirements`: the fields of each condition, whether it `holds`, and all that as a `text`.
    """

    kind: str
    text: str
    latex: str
    requirements: tuple[dict[str, Any], ...] = ()
    convex: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """As the problem.json of a run folder."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([self.text, *(condition["text"] for condition in self.requirements)])


def statement(model: nn.Module) -> Statement | None:
    """What the equilibrium of a model solves; None for a network without one, or with one that we have no words for."""
    cell = getattr(getattr(model, "equilibrium", model), "cell", None)
    if not isinstance(cell, Cell):
        return None
    try:
        return _of_problem(recover_problem(cell))
    except TypeError:
        known = next((words for kind, words in _EQUATIONS.items() if isinstance(cell, kind)), None)
    if known is None:
        return None
    return Statement("inclusion" if known is _MONOTONE else "equation", *known)


def _of_problem(problem: Problem) -> Statement:
    requirements = tuple(
        {**asdict(requirement), "holds": requirement.holds, "text": str(requirement)} for requirement in problem.requirements
    )
    return Statement(problem.kind, problem.text, problem.latex, requirements, problem.convex)
