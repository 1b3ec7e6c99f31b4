"""What may be told of a training as it goes: callbacks, among them TensorBoard and the certificate's Monitor."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from opteq.theory.certificates import Monitor

Row: TypeAlias = Mapping[str, Any]


class Callback:
    """Told of the training by the first process; override what you need.

    A callback that raises stops the training; one that returns a row from `step` has it written among the metrics.
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
            return {"kind": "monitor", "step": step, **found.row()}
        return None

    def rewind(self, step: int) -> None:
        if isinstance(self.function, Monitor):
            self.function.rewind(step)


class TensorBoard(Callback):
    """Writes the metrics as TensorBoard scalars into `folder`."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs the package tensorboard: pip install 'opteq[tensorboard]'.") from error
        self.writer: Any = SummaryWriter(str(folder))

    def row(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "epoch"):
                self.writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        if row["kind"] == "event":
            self.writer.add_text(f"event/{row['what']}", str(row["message"]), row["step"])

    def close(self) -> None:
        self.writer.close()
