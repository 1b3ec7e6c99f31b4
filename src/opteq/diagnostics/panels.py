"""What a report draws: panels of metrics over the steps of a training."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "SOLVER", "Panel", "Series"]


@dataclass(frozen=True)
class Series:
    """One metric: `key` in the rows of each step or of each epoch."""

    label: str
    kind: Literal["step", "epoch"]
    key: str
    line: str = "-"
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """One figure. `scale`: "log" where the values are positive and range widely; "zero" begins there; "share" is in percent."""

    title: str
    series: tuple[Series, ...]
    scale: Literal["log", "zero", "share", "linear"] = "log"


METRICS = (
    Panel(
        "Loss",
        (
            Series("validation", "epoch", "valid_loss"),
            Series("training", "epoch", "train_loss", "--"),
            Series("each step", "step", "loss", faint=True),
        ),
    ),
    Panel(
        "Accuracy",
        (
            Series("validation", "epoch", "valid_accuracy"),
            Series("training", "epoch", "train_accuracy", "--"),
            Series("each step", "step", "accuracy", faint=True),
        ),
        "share",
    ),
    Panel(
        "Mean intersection over union",
        (Series("validation", "epoch", "valid_miou"), Series("training", "epoch", "train_miou", "--")),
        "share",
    ),
    Panel("Learning rate", (Series("learning rate", "step", "lr"),)),
)
SOLVER = (
    Panel(
        "Mean solver steps",
        (
            Series("validation", "epoch", "valid_solver_steps"),
            Series("training", "step", "solver_steps", faint=True),
            Series("backward", "step", "backward_steps", ":"),
        ),
        "zero",
    ),
    Panel(
        "Share of samples that converged",
        (Series("validation", "epoch", "valid_converged"), Series("training", "step", "converged", faint=True)),
        "share",
    ),
    Panel("Gradient norm", (Series("gradient norm", "step", "grad_norm", faint=True),)),
    Panel("Alpha of each layer", (Series("alpha", "epoch", "alpha"),), "linear"),
)
