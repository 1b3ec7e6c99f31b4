"""The loss of a batch and how well a model does on a whole data set: classification, segmentation, regression."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opteq.checks import all_finite, check_integer, invalid, undone
from opteq.equilibrium import observe
from opteq.training.processes import World
from opteq.training.watch import Health, Watch

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Batches: TypeAlias = Any  # a Tensor or a lazy sequence of images, indexed by rows


@dataclass(frozen=True)
class Objective:
    """A loss with the number of terms that it is the mean of, so that the parts of a batch add up to the whole.

    Integer y: cross entropy of [batch, classes, ...] against [batch, ...], labels `ignore` left out. Floating y: mean square.
    `own`: any function of (output, y) that is a mean over the samples.

    Examples:
        >>> import torch
        >>> from opteq.training import Objective
        >>> loss, terms = Objective(ignore=255)(torch.zeros(3, 2), torch.tensor([0, 1, 255]))
        >>> round(loss.item(), 4), terms  # log 2, over the two that count
        (0.6931, 2.0)
    """

    label_smoothing: float = 0.0
    ignore: int | None = None
    own: Loss | None = None

    def __call__(self, output: Tensor, y: Tensor) -> tuple[Tensor, float]:
        """The mean loss and the number of its terms."""
        if self.own is not None:
            return _single(self.own(output, y)), float(y.shape[0])
        if y.is_floating_point():
            return (output - y.to(output.dtype)).square().mean(), float(y.numel())
        skip = -100 if self.ignore is None else self.ignore
        terms = float((y != skip).sum()) if self.ignore is not None else float(y.numel())
        total = cross_entropy(output, y, ignore_index=skip, label_smoothing=self.label_smoothing, reduction="sum")
        return total / max(terms, 1.0), terms

    def check(self, output: Tensor, y: Tensor) -> None:
        """Raise unless the model's output fits the targets."""
        if self.own is not None:
            return
        if y.is_floating_point():
            if output.shape != y.shape:
                raise ValueError(invalid("fit", "model", f"one whose output has the shape of y, {_shape(y)}", _shape(output)))
            return
        if output.ndim != y.ndim + 1 or output.shape[2:] != y.shape[1:]:
            expected = f"one whose output is [batch, classes{''.join(f', {n}' for n in y.shape[1:])}], for labels {_shape(y)}"
            raise ValueError(invalid("fit", "model", expected, _shape(output)))


def _single(loss: object) -> Tensor:
    """The value of a loss of one's own, if it is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(invalid("fit", "loss", "a function whose value is a tensor of one number, the mean over the samples", got))
    return loss


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(["batch", *map(str, tensor.shape[1:])]) + "]"


@dataclass
class Score:
    """Sums over samples: of the loss, and of what was right; label maps are counted pixel by pixel in a confusion matrix."""

    loss: float = 0.0
    terms: float = 0.0
    right: float = 0.0
    judged: float = 0.0
    confusion: list[list[float]] = field(default_factory=list)  # [true, predicted]

    @torch.no_grad()
    def add(self, objective: Objective, output: Tensor, y: Tensor, loss: float, terms: float) -> None:
        """Take one batch in."""
        self.loss += loss * terms
        self.terms += terms
        if y.is_floating_point() or output.ndim != y.ndim + 1 or output.shape[1] < 2:  # the last two: of a loss of one's own
            return
        predicted, kept = output.argmax(1), (y >= 0) & (y < output.shape[1])
        if objective.ignore is not None:
            kept &= y != objective.ignore
        self.right += float(((predicted == y) & kept).sum())
        self.judged += float(kept.sum())
        if y.ndim > 1:
            self._count(predicted[kept], y[kept], output.shape[1])

    def _count(self, predicted: Tensor, y: Tensor, classes: int) -> None:
        table = torch.bincount(y * classes + predicted, minlength=classes**2).reshape(classes, classes)
        so_far = self.confusion or [[0.0] * classes for _ in range(classes)]
        self.confusion = (torch.tensor(so_far, dtype=torch.float64) + table.cpu()).tolist()

    def summed(self, world: World) -> "Score":
        """The score over all processes."""
        classes = world.largest(len(self.confusion))  # a process without samples has none
        flat = [v for row in self.confusion or [[0.0] * classes] * classes for v in row]
        loss, terms, right, judged, *cells = world.sum([self.loss, self.terms, self.right, self.judged, *flat])
        return Score(loss, terms, right, judged, [cells[i * classes : (i + 1) * classes] for i in range(classes)])

    def means(self) -> dict[str, float]:
        """loss; accuracy; and of label maps miou and mean_accuracy, over the classes that occur."""
        found = {"loss": self.loss / self.terms if self.terms else math.nan}
        if self.judged:
            found["accuracy"] = self.right / self.judged
        if self.confusion:
            table = torch.tensor(self.confusion, dtype=torch.float64)
            hits, true, said = table.diagonal(), table.sum(1), table.sum(0)
            found["miou"] = float((hits / (true + said - hits))[true + said > 0].mean())
            found["mean_accuracy"] = float((hits / true)[true > 0].mean())
        return found


@dataclass
class Tally:
    """Sums over some steps: scores, solver health, norms of gradients."""

    score: Score = field(default_factory=Score)
    health: Health = field(default_factory=Health)
    norms: float = 0.0
    steps: int = 0

    @classmethod
    def restored(cls, state: Mapping[str, Any], world: World) -> "Tally":
        """From asdict of a gathered one."""
        found = cls(Score(**state["score"]), Health(**state["health"]), state["norms"], state["steps"])
        return found if world.first else cls(norms=found.norms, steps=found.steps)

    def add(self, objective: Objective, output: Tensor, y: Tensor, loss: float, terms: float, health: Health, norm: float) -> None:
        """Take one step in."""
        if terms:
            self.score.add(objective, output, y, loss, terms)
        self.health.add(health)
        self.norms += norm
        self.steps += 1

    def gathered(self, world: World) -> "Tally":
        """The same sums over all processes, held by the first of them alone: what a checkpoint can keep."""
        health = Health(*world.sum(list(vars(self.health).values())))
        score = self.score.summed(world)
        return Tally(score, health, self.norms, self.steps) if world.first else Tally(norms=self.norms, steps=self.steps)

    def means(self, world: World) -> dict[str, Any]:
        """Over the steps and the processes."""
        health = Health(*world.sum(list(vars(self.health).values())))
        return self.score.summed(world).means() | health.means() | {"grad_norm": self.norms / max(self.steps, 1)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; after it, every module is in its own mode again."""
    modes = [(part, part.training) for part in model.modules()]

    def undo() -> None:
        for part, training in modes:
            part.training = training

    with undone(undo):
        model.eval()
        yield


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: Batches,
    y: Tensor,
    *,
    batch_size: int = 256,
    objective: Objective | None = None,
    world: World | None = None,
) -> dict[str, float]:
    """Loss, accuracy and solver health of the model, in eval mode, on the samples x, y; the model is left as it was.

    Examples:
        >>> import torch
        >>> from opteq.training import evaluate
        >>> model = torch.nn.Identity()
        >>> scores = evaluate(model, torch.eye(3), torch.tensor([0, 1, 1]))
        >>> round(scores["accuracy"], 4)
        0.6667
    """
    check_integer("evaluate", "batch_size", batch_size, 1)
    if len(x) != len(y):
        raise ValueError(invalid("evaluate", "y", f"{len(x)} targets, one for each sample", len(y)))
    objective = Objective() if objective is None else objective
    like = next(model.parameters(), torch.empty(0))
    world = World(device=like.device) if world is None else world
    score, watch = Score(), Watch.of(model)
    y = y if y.is_floating_point() else y.long()
    with evaluating(model), observe(watch):
        for rows in world.share(torch.arange(len(y))).split(batch_size):
            if len(rows):
                given, wanted = x[rows].to(like), y[rows].to(world.device)
                output = model(given)
                loss, terms = objective(output, wanted)
                score.add(objective, output, wanted, float(loss), terms)
    health = watch.total()
    health = Health(*world.sum(list(vars(health).values())))
    means = {name: value for name, value in health.means().items() if value is not None and name != "backward_steps"}
    return score.summed(world).means() | means


def check_labels(owner: str, y: Tensor, classes: int, ignore: int | None) -> None:
    """Raise unless integer labels are in range; and unless floating targets are finite."""
    if y.is_floating_point():
        if not all_finite(y):
            raise ValueError(invalid(owner, "y", "finite", "NaN or infinity"))
        return
    kept = y if ignore is None else y[y != ignore]
    low, high = (int(kept.min()), int(kept.max())) if kept.numel() else (0, 0)
    if low < 0 or high >= classes:
        raise ValueError(invalid(owner, "y", f"labels in 0..{classes - 1}, the classes of the model's output", f"{low}..{high}"))
