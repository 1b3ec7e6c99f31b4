from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opteq.tree import Hole, Tree, per_sample


@dataclass(frozen=True)
class Inner(Tree):
    shared: Tensor
    own: Tensor = per_sample()


@dataclass(frozen=True)
class Outer(Tree):
    name: str
    weight: Tensor
    inner: Inner
    pair: tuple[Tensor, Tensor] = per_sample()
    table: Mapping[str, Any] = field(default_factory=dict)
    nothing: Tensor | None = None
    many: tuple[Inner, ...] = ()

    @cached_property
    def total(self) -> Tensor:
        return self.weight.sum()


def tree() -> Outer:
    def t(k: int) -> Tensor:
        return torch.full((2,), float(k))

    inner = Inner(t(1), t(2))
    return Outer("a", t(0), inner, (t(3), t(4)), {"x": t(5), "deep": {"y": [t(6), "text", 7]}}, None, (Inner(t(7), t(8)),))


NAMES = ["weight", "inner.shared", "inner.own", "pair.0", "pair.1", "table.x", "table.deep.y.0", "many.0.shared", "many.0.own"]


def test_leaves_come_in_the_order_of_the_fields_with_their_names() -> None:
    leaves = tree().leaves()
    assert [leaf.name for leaf in leaves] == NAMES
    assert [leaf.tensor[0].item() for leaf in leaves] == list(range(9))


def test_per_sample_is_the_mark_of_the_innermost_tree() -> None:
    marked = [leaf.name for leaf in tree().leaves() if leaf.per_sample]
    assert marked == ["inner.own", "pair.0", "pair.1", "many.0.own"]


def test_replacing_leaves_makes_a_new_tree_and_keeps_the_rest() -> None:
    old = tree()
    new = old.replace_leaves(lambda leaf: leaf.tensor + 10)
    assert [leaf.tensor[0].item() for leaf in new.leaves()] == list(range(10, 19))
    assert [leaf.tensor[0].item() for leaf in old.leaves()] == list(range(9))
    assert type(new) is Outer
    assert type(new.many[0]) is Inner
    assert (new.name, new.nothing) == ("a", None)
    assert new.table["deep"]["y"][1:] == ("text", 7)


def test_emptied_and_filled_is_a_round_trip() -> None:
    old = tree()
    empty = old.emptied()
    assert not any(isinstance(leaf.tensor, Tensor) for leaf in empty.leaves())
    assert all(isinstance(leaf.tensor, Hole) for leaf in empty.leaves())
    assert [leaf.name for leaf in empty.leaves()] == NAMES
    tensors = [leaf.tensor for leaf in old.leaves()]
    again = empty.filled(tensors)
    assert all(a.tensor is b for a, b in zip(again.leaves(), tensors, strict=True))
    assert [leaf.per_sample for leaf in again.leaves()] == [leaf.per_sample for leaf in old.leaves()]


def test_cached_values_are_not_carried_over() -> None:
    old = tree()
    assert old.total.item() == 0
    assert old.replace_leaves(lambda leaf: leaf.tensor + 1).total.item() == 2


def test_init_is_not_run_again() -> None:
    runs = []

    @dataclass(frozen=True)
    class Counting(Tree):
        a: Tensor

        def __post_init__(self) -> None:
            runs.append(1)

    Counting(torch.zeros(1)).emptied().filled([torch.ones(1)])
    assert len(runs) == 1


def test_trees_stay_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        tree().emptied().weight = torch.zeros(1)  # type: ignore[misc]


def test_a_subclass_that_is_no_dataclass_is_refused() -> None:
    class Bare(Inner):
        def __init__(self) -> None:
            pass

    with pytest.raises(
        TypeError, match=r"^Bare must be decorated with @dataclass\(frozen=True\): its fields tell which tensors it uses\.$"
    ):
        Bare().leaves()


def test_a_tree_without_tensors_has_no_leaves() -> None:
    @dataclass(frozen=True)
    class Plain(Tree):
        a: int = 3

    assert Plain().leaves() == []
    assert Plain().filled([]) == Plain()


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class WithPair(Tree):
    pair: Pair


def test_named_tuples_keep_their_names() -> None:
    tree = WithPair(Pair(torch.zeros(2), torch.ones(2)))
    assert tree.emptied().filled([torch.ones(1), torch.zeros(1)]).pair.second.item() == 0
