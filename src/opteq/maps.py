"""f, bound to its inputs: Map, its Jacobian, and what an f must keep to."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from opteq.batch import taken
from opteq.checks import check_floating, invalid, is_transformed
from opteq.tree import Tree

Pullback: TypeAlias = Callable[..., tuple[Tensor, ...]]


def pullback(f: Callable[..., Any], *primals: Tensor) -> Pullback:
    """v -> J' v for each of the primals, differentiable itself: torch.func.vjp without the value."""
    pull: Pullback = torch.func.vjp(f, *primals)[1]
    return pull


@dataclass(frozen=True)
class Jacobian:
    """J = f'(z) as two products, `jvp(v) = J v` and `vjp(v) = J' v`, each sample with its own J."""

    jvp: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor], Tensor]
    symmetric: bool = False


@dataclass(frozen=True)
class Map(Tree, ABC):
    """f, bound to its inputs: a frozen dataclass whose tensor fields are its operands, the per-sample ones marked `per_sample()`.

    Subclasses define `__call__`; the rest is derived. Tensors that f uses but that are no fields still get gradients, at the
    cost of one more evaluation a solve; declare `closed = True` when there are none.

    Examples:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from opteq import Map, per_sample, solve
        >>> from opteq.solvers import Picard
        >>> @dataclass(frozen=True)
        ... class Shrink(Map):
        ...     u: torch.Tensor = per_sample()
        ...     def __call__(self, z):
        ...         return 0.5 * z + self.u
        >>> fn = Shrink(torch.tensor([[1.0], [2.0]]))
        >>> solve(fn, torch.zeros(2, 1), Picard()).z.round(decimals=2)
        tensor([[2.],
                [4.]])
        >>> fn.linearize(torch.zeros(2, 1)).vjp(torch.ones(2, 1))
        tensor([[0.5000],
                [0.5000]])
    """

    closed: ClassVar[bool] = False  # every tensor that f uses is a field
    symmetric: ClassVar[bool] = False  # J = J' at every z
    independent: ClassVar[bool] = True  # f acts on each sample alone, so that some samples can be solved without the others
    fresh: ClassVar[bool] = False  # f(z) is in memory of its own, to which its caller may write
    coupled: ClassVar[bool] = False  # f(z) of a sample depends on the others, so that the batch is solved as a whole or not at all

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """f(z), of the shape and dtype of z: [batch, ...]."""

    def linearize(self, z: Tensor) -> Jacobian:
        """The Jacobian at z, by automatic differentiation; maps with structure override this with closed forms."""
        pull = cache(lambda: pullback(self, z))  # made when first needed; J'v is linear in v, so its own transpose is J
        push = cache(lambda: pullback(lambda w: pullback(self, z)(w)[0], torch.zeros_like(z)))
        return Jacobian(jvp=lambda v: push()(v)[0], vjp=lambda v: pull()(v)[0], symmetric=self.symmetric)

    def begin(self, z0: Tensor) -> Tensor:
        """f(z0); maps that know f(0) without a product override this."""
        return self(z0)

    def value_and_jacobian(self, z: Tensor) -> tuple[Tensor, Jacobian]:
        """f(z) and the Jacobian at z; maps whose two have a part in common override this."""
        return self(z), self.linearize(z)

    def select(self, rows: Tensor) -> Self:
        """The map of some samples only."""
        return self.replace_leaves(lambda leaf: taken(leaf.tensor, rows) if leaf.per_sample else leaf.tensor)

    def to(self, dtype: torch.dtype) -> Self:
        """The same map with its floating-point tensors in a dtype."""
        return self.replace_leaves(lambda leaf: leaf.tensor.to(dtype) if leaf.tensor.is_floating_point() else leaf.tensor)

    def detach(self) -> Self:
        """The same map outside of the autograd graph."""
        return self.replace_leaves(lambda leaf: leaf.tensor.detach())


@dataclass(frozen=True)
class CallableMap(Map):
    """Any callable z -> f(z). What it captures is unknown, so its samples are never separated."""

    independent: ClassVar[bool] = False
    f: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor) -> Tensor:
        return self.f(z)


def as_map(owner: str, fn: object) -> Map:
    """The map that was given, or made of any other callable."""
    if not callable(fn):
        raise TypeError(invalid(owner, "fn", "a Map or a callable", fn))
    return fn if isinstance(fn, Map) else CallableMap(fn)


def check_states(owner: str, name: str, z: Tensor) -> None:
    """Raise unless z is a batch of states, each of at least one number."""
    check_floating(owner, name, z)
    if z.ndim == 0 or 0 in z.shape[1:]:
        raise ValueError(invalid(owner, name, "of shape [batch, ...] with no empty dimension but the batch", list(z.shape)))


def first_value(fn: Map, z0: Tensor) -> Tensor:
    """f(z0), checked: f must keep the shape, dtype and device of its state, and leave the state itself alone."""
    before, version = z0.clone(), _version(z0)
    fz = fn.begin(z0)
    check_tensor(fz)
    if not is_transformed(fz) and (_version(z0) != version or not _equal(before, z0)):
        raise ValueError("The map f must not change its input z in place. (In-place layers such as ReLU(inplace=True) do.)")
    for name in ("shape", "dtype", "device"):
        got, expected = getattr(fz, name), getattr(z0, name)
        if got != expected:
            raise ValueError(f"The map f must return a tensor of the {name} of its state, {expected}. Got {got} instead.")
    return fz


def check_tensor(value: object) -> None:
    """f must return a tensor."""
    if not isinstance(value, Tensor):
        name = type(value).__name__
        raise TypeError(f"The map f must return a tensor. Got {name} instead; pack several tensors into one.")


def _version(z: Tensor) -> int:
    """How often z was written to (a ReLU in place does not change z0 = 0); 0 for tensors that do not know."""
    return 0 if is_transformed(z) or z.is_inference() else z._version


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether all entries are the same; NaN is NaN."""
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())  # the first needs no memory
