"""Who listens: `record()`, and the traces that it asks for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from opteq.checks import undone
from opteq.solution import Solution, Trace

_logs: ContextVar[tuple["Log", ...]] = ContextVar("opteq_logs", default=())


class Log(list[Solution]):
    """The solutions collected by `record()`, in the order in which they were solved; backward solves come in turn."""

    open: bool = True
    iterates: bool = False


@contextmanager
def record(*, iterates: bool = False) -> Iterator[Log]:
    """`with record() as log:` collects every Solution, with its trace, that is solved inside: backward ones too.

    `iterates=True`: the traces hold the iterates as well: in all, samples x steps x state numbers for each solve.

    Examples:
        >>> import torch, opteq
        >>> from opteq.cells import OptEq
        >>> layer = opteq.Equilibrium(OptEq(4, 8, 16))
        >>> with opteq.record() as log:
        ...     layer(torch.randn(2, 4)).sum().backward()
        >>> [(solution.status.name, solution.z.shape[0]) for solution in log]
        [('CONVERGED', 2), ('CONVERGED', 2)]
    """
    log = Log()
    log.iterates = iterates
    before = _logs.get()

    def undo() -> None:
        log.open = False
        _logs.set(before)

    with undone(undo):
        _logs.set((*before, log))
        yield log


def heard_by(logs: Sequence[Log]) -> tuple[Log, ...]:
    """The logs that are open here, and these, each once."""
    return tuple({id(log): log for log in (*_logs.get(), *logs)}.values())


def new_trace() -> Trace | None:
    """An empty trace, if someone records here."""
    return empty_trace(_logs.get())


def empty_trace(logs: Sequence[Log]) -> Trace | None:
    """A trace to be filled, if a log is open."""
    wanted = [log.iterates for log in logs if log.open]
    return Trace(z=() if any(wanted) else None) if wanted else None
