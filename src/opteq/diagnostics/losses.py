"""The loss of a whole data set as a function of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

from opteq.checks import check_instance, check_integer, invalid, undone

__all__ = ["check_callable", "data_loss"]

Terms: TypeAlias = tuple[Tensor, float]  # a sum, and the number of its terms


class Samples(Protocol):
    """A tensor, or images that are read when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Tensor, /) -> Any: ...


def data_loss(
    x: Samples,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    batch_size: int = 256,
    ignore: int | None = None,
) -> Callable[[nn.Module], Tensor]:
    """model -> the mean of loss(model(x_i), y_i) over all samples, computed batch by batch: the same for every batch size.

    `loss(output, y)`: a mean over the samples of a batch. By default the cross entropy of integer y, where the label `ignore` is
    left out, and the mean square for floating y. The model runs in the mode that it is in: in training mode, batch norm makes it
    depend on the batches. Batches go where the model is. Constrained weights are computed once, not once a batch.

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import data_loss
        >>> x, y = torch.randn(100, 4), torch.randint(3, (100,))
        >>> model = torch.nn.Linear(4, 3)
        >>> torch.isclose(data_loss(x, y, batch_size=32)(model), torch.nn.functional.cross_entropy(model(x), y)).item()
        True
    """
    check_instance("data_loss", "y", y, Tensor, "a tensor")
    check_integer("data_loss", "batch_size", batch_size, 1)
    if not len(y) or len(x) != len(y):
        raise ValueError(invalid("data_loss", "x", f"as many samples as y, {len(y)}, and at least 1", len(x)))
    if loss is not None and not callable(loss):
        raise TypeError(invalid("data_loss", "loss", "a function of (output, y), or None", loss))

    def terms(output: Tensor, target: Tensor) -> Terms:
        if loss is not None:
            return _number(loss(output, target)) * len(target), float(len(target))
        return _square(output, target) if target.is_floating_point() else _entropy(output, target, ignore)

    def mean(model: nn.Module) -> Tensor:
        with _computed_once(model):
            sums, counts = zip(*(terms(model(given), target) for given, target in _batches(model, x, y, batch_size)), strict=True)
        total: Tensor = torch.stack(sums).sum() / max(sum(counts), 1.0)
        return total

    return mean


class _Once(parametrize.ParametrizationList):
    """A constrained weight that is computed once while `_values` is there, which it is in one thread only.

    `parametrize.cached` would keep the weights of all models for all threads.
    """

    def forward(self) -> Tensor:
        values = _values.get()
        if values is None:
            return super().forward()
        if self not in values:
            values[self] = super().forward()
        return values[self]


_values: ContextVar[dict[nn.Module, Tensor] | None] = ContextVar("opteq_values", default=None)


@contextmanager
def _computed_once(model: nn.Module) -> Iterator[None]:
    """Inside, in this thread, each constrained weight of the model is computed once."""
    weights = [part for part in model.modules() if type(part) is parametrize.ParametrizationList]
    before = _values.get()

    def undo() -> None:
        _values.set(before)
        for weight in weights:  # where another thread is not done with them, it computes them as often as it needs them
            weight.__class__ = parametrize.ParametrizationList

    with undone(undo):
        _values.set({})
        for weight in weights:
            weight.__class__ = _Once
        yield


def check_callable(owner: str, loss: object) -> None:
    """A loss of a model must be a function of it."""
    if not callable(loss):
        raise TypeError(invalid(owner, "loss", "a function of the model that gives one number, such as data_loss(x, y)", loss))


def _batches(model: nn.Module, x: Samples, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    like = next(model.parameters(), torch.empty(0))
    for rows in torch.arange(len(y)).split(size):
        given, target = x[rows], y[rows].to(like.device)
        yield given.to(like) if given.is_floating_point() else given.to(like.device), target


def _number(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = list(value.shape) if isinstance(value, Tensor) else value
        raise ValueError(invalid("data_loss", "loss", "a function that gives the mean of a batch, one number in a tensor", got))
    return value.reshape(())


def _square(output: Tensor, target: Tensor) -> Terms:
    if output.shape != target.shape:  # it would broadcast
        raise ValueError(invalid("data_loss", "y", f"of the shape of the model's output, {list(output.shape)}", list(target.shape)))
    return (output - target.to(output.dtype)).square().sum(), float(target.numel())


def _entropy(output: Tensor, target: Tensor, ignore: int | None) -> Terms:
    ignore = -100 if ignore is None else ignore
    total = cross_entropy(output, target.long(), ignore_index=ignore, reduction="sum")
    return total, float((target != ignore).sum())
