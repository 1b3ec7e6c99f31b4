"""Argument checks with one wording: "The 'x' parameter of C must be .... Got ... instead."; and blocks that are undone for sure."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """At the end, `undo` is called, and once more if Ctrl-C came in the midst of it. What is to be undone belongs inside."""
    try:
        yield
    finally:
        try:
            undo()
        except BaseException:
            undo()
            raise


def invalid(owner: object, name: str, expected: str, got: object) -> str:
    """The text of every parameter error."""
    title = owner if isinstance(owner, str) else type(owner).__name__
    return f"The '{name}' parameter of {title} must be {expected}. Got {_shown(got)} instead."


def _shown(got: object) -> str:
    """Its repr; of a long one, such as that of a data set or a network, the beginning, on one line."""
    text = repr(got)
    return text if isinstance(got, str) or len(text) <= 200 else f"{' '.join(text[:200].split())} ..."


def check_integer(owner: object, name: str, value: object, least: int) -> None:
    """Raise unless `value` is an int (not a bool) of at least `least`."""
    expected = f"an integer >= {least}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(invalid(owner, name, expected, value))
    if value < least:
        raise ValueError(invalid(owner, name, expected, value))


def check_number(
    owner: object,
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless `value` is a real number in [low, high], without an end that is `open`; an infinite end is never included."""
    upper = f" and {'<' if open_high else '<='} {high:g}" if math.isfinite(high) else ""
    expected = f"a finite number {'>' if open_low else '>='} {low:g}{upper}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(invalid(owner, name, expected, value))
    excluded = (open_low and value == low) or (open_high and value == high)
    if not math.isfinite(value) or value < low or value > high or excluded:
        raise ValueError(invalid(owner, name, expected, value))


def check_choice(owner: object, name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(invalid(owner, name, f"one of {', '.join(map(repr, choices))}", value))


def check_instance(owner: object, name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(invalid(owner, name, expected, value))


def check_floating(owner: object, name: str, value: object) -> None:
    """Raise TypeError unless `value` is a dense tensor of real floating-point numbers."""
    if not isinstance(value, Tensor):
        raise TypeError(invalid(owner, name, "a floating-point tensor", type(value).__name__))
    if not value.is_floating_point():
        raise TypeError(invalid(owner, name, "a floating-point tensor", value.dtype))
    if value.layout is not torch.strided:
        raise TypeError(invalid(owner, name, "a dense tensor", value.layout))


def check_shape(owner: object, name: str, value: Tensor, trailing: Sequence[int]) -> None:
    """Raise ValueError unless `value` has the shape [batch, *trailing]."""
    if value.ndim != 1 + len(trailing) or tuple(value.shape[1:]) != tuple(trailing):
        wanted = ", ".join(["batch", *map(str, trailing)])
        raise ValueError(invalid(owner, name, f"of shape [{wanted}]", list(value.shape)))


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor belongs to a torch.func transform, so that its values cannot be looked at."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def all_finite(tensor: Tensor) -> bool:
    """Whether every entry is finite: one pass, no temporary of the tensor's size."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def check_finite(owner: object, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError naming the first tensor with NaN or infinity."""
    for name, tensor in tensors:
        if not all_finite(tensor):
            raise ValueError(f"The '{name}' parameter of {type(owner).__name__} must be finite. Got NaN or infinity instead.")
