"""What may be told of a training as it goes: callbacks, among them TensorBoard and the certificate's Monitor."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from opteq.theory.certificates import Monitor

if TYPE_CHECKING:
    from opteq.diagnostics.panels import Panel

Row: TypeAlias = Mapping[str, Any]


class Callback:
    """Told of the training by the first process; override what you need.

    A callback that raises stops the training; one that returns a row from `step` has it written among the metrics.

    Examples:
        >>> import torch
        >>> from opteq.training import Callback, TrainConfig, fit
        >>> class Steps(Callback):
        ...     def begin(self, config, total):
        ...         print("of", total)
        ...     def step(self, step):
        ...         print("step", step)
        >>> data = torch.randn(32, 4), torch.randn(32, 1)
        >>> config = TrainConfig(epochs=1, batch_size=16)
        >>> result = fit(torch.nn.Linear(4, 1), data, config=config, callbacks=[Steps()], verbose=False)
        of 2
        step 1
        step 2
    """

    def begin(self, config: Row, total: int) -> None:
        """Before the first step of `total`."""

    def step(self, step: int) -> Row | None:
        """After every step, which is the `step`-th: 1, 2, ..."""

    def row(self, row: Row) -> None:
        """A row of metrics was written: its kind is "step", "epoch" or "event"."""

    def rewind(self, step: int) -> None:
        """The training went back to where it had made `step` steps."""

    def end(self, result: Any) -> None:
        """After the last step."""

    def close(self) -> None:
        """At the very end, also when the training failed."""


class AfterStep(Callback):
    """Calls a function with the number of steps made: for a Monitor, or a function of your own."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self.function = function

    def step(self, step: int) -> Row | None:
        found = self.function(step)
        if isinstance(self.function, Monitor) and found is not None:
            return dict(found.metrics())
        return None

    def rewind(self, step: int) -> None:
        if isinstance(self.function, Monitor):
            self.function.rewind(step)


class TensorBoard(Callback):
    """Writes the metrics as TensorBoard scalars into `folder`, events as texts; one scalar for each entry of a list or a dict.

    "Custom scalars" there shows the panels that reports show. The folder is made with the first row. After a roll-back, and when a
    training is resumed into the same folder, the steps that are made again replace those that were there.

    Examples:
        >>> import torch
        >>> from pathlib import Path
        >>> from opteq.training import TensorBoard, TrainConfig, fit
        >>> data = torch.randn(32, 4), torch.randn(32, 1)
        >>> _ = fit(torch.nn.Linear(4, 1), data, config=TrainConfig(epochs=1), callbacks=[TensorBoard("logs")], verbose=False)
        >>> any("tfevents" in file.name for file in Path("logs").iterdir())
        True
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs the package tensorboard: pip install 'opteq[tensorboard]'.") from error
        self.open = partial(SummaryWriter, str(folder))
        self.writer: Any = None
        self.first: int | None = None  # the step from which on rows replace older ones
        self.tags: set[str] = set()

    def row(self, row: Row) -> None:
        if self.writer is None:
            self.writer = self.open(purge_step=row["step"] if self.first is None else self.first)
        found = dict(_scalars(row))
        for tag, value in found.items():
            self.writer.add_scalar(tag, value, row["step"])
        if row["kind"] == "event":
            self.writer.add_text(f"event/{row['what']}", str(row["message"]), row["step"])
        if not self.tags.issuperset(found):
            self.tags.update(found)
            self.writer.add_custom_scalars(_layout(self.tags))

    def rewind(self, step: int) -> None:
        self.close()
        self.writer, self.first = None, step + 1

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row under their tags: "epoch/valid_loss", "epoch/alpha/cell.layers.0"."""
    for name, value in row.items():
        listed = dict(enumerate(value, 1)) if isinstance(value, (list, tuple)) else {"": value}
        for key, number in (value if isinstance(value, Mapping) else listed).items():
            if isinstance(number, (int, float)) and not isinstance(number, bool) and name not in ("step", "epoch", "k"):
                yield _tag(row["kind"], name, key), number


def _tag(*names: object) -> str:
    return re.sub(r"[^\w./-]+", "_", "/".join(filter(None, map(str, names))))


def _layout(tags: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """The panels that have a tag, as charts; each line of a chart is a regular expression."""
    from opteq.diagnostics.panels import METRICS, SOLVER, THEORY

    groups = {"Metrics": METRICS, "Solver": SOLVER, "Theory": THEORY}
    charts = {
        group: {panel.title: ["Multiline", lines] for panel in panels if (lines := _lines(panel, tags))}
        for group, panels in groups.items()
    }
    return {group: found for group, found in charts.items() if found}


def _lines(panel: "Panel", tags: Iterable[str]) -> list[str]:
    patterns = [f"{re.escape(_tag(series.kind, series.key))}{'.*' if series.every else '(/.*)?'}$" for series in panel.series]
    return [pattern for pattern in patterns if any(re.match(pattern, tag) for tag in tags)]
