"""Frozen dataclasses as trees of tensors: what a Map hands to autograd and what the loop compacts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeAlias

from torch import Tensor


def per_sample() -> Any:
    """Mark a dataclass field whose tensors have the batch as their first dimension.

    Examples:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from opteq import Map, per_sample
        >>> @dataclass(frozen=True)
        ... class Affine(Map):
        ...     W: torch.Tensor
        ...     u: torch.Tensor = per_sample()
        ...     def __call__(self, z):
        ...         return z @ self.W.T + self.u
        >>> one = Affine(torch.eye(3), torch.zeros(8, 3)).select(torch.tensor([5]))
        >>> one.W.shape, one.u.shape
        (torch.Size([3, 3]), torch.Size([1, 3]))
    """
    return field(metadata={"per_sample": True})


class Hole:
    """The place of a tensor in a tree that was emptied."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a tree: where it stands, and whether its first dimension is the batch."""

    name: str
    tensor: Tensor
    per_sample: bool


Replace: TypeAlias = Callable[[Leaf], Any]


class Tree:
    """Base of frozen dataclasses whose tensors, also inside tuples, dicts and nested trees, can be listed and replaced."""

    def leaves(self) -> list[Leaf]:
        """Every tensor, in a fixed order."""
        found: list[Leaf] = []
        self.replace_leaves(found.append)
        return found

    def replace_leaves(self, replace: Replace) -> Self:
        """The same tree with each tensor exchanged; `__init__` is not run again and cached values are not carried over."""
        if "__dataclass_fields__" not in type(self).__dict__:
            name = type(self).__name__
            raise TypeError(f"{name} must be decorated with @dataclass(frozen=True): its fields tell which tensors it uses.")
        other = object.__new__(type(self))
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            batched = bool(item.metadata.get("per_sample", False))
            object.__setattr__(other, item.name, _replace(value, item.name, batched, replace))
        return other

    def emptied(self) -> Self:
        """The same tree without its tensors, for code that must not keep them alive."""
        return self.replace_leaves(lambda leaf: Hole())

    def filled(self, tensors: Iterable[Any]) -> Self:
        """The same tree holding `tensors`, given in the order of `leaves()`."""
        supply: Iterator[Any] = iter(tensors)
        return self.replace_leaves(lambda leaf: next(supply))


def _replace(value: Any, name: str, batched: bool, replace: Replace) -> Any:
    if isinstance(value, (Tensor, Hole)):
        return replace(Leaf(name, value, batched))  # type: ignore[arg-type]
    if isinstance(value, Tree):
        return value.replace_leaves(lambda leaf: replace(Leaf(f"{name}.{leaf.name}", leaf.tensor, leaf.per_sample)))
    if isinstance(value, Mapping):
        return {key: _replace(item, f"{name}.{key}", batched, replace) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = (_replace(item, f"{name}.{i}", batched, replace) for i, item in enumerate(value))
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
