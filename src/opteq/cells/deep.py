"""Deep OptEq: a composition of layers, optionally regularised; and Lemma 3's form of it, all layers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from opteq.batch import at_least_single
from opteq.cells.optimization import OptEqCell, OptEqMap
from opteq.checks import check_choice, check_finite, check_floating, check_instance, check_number, invalid
from opteq.equilibrium import Cell
from opteq.maps import Jacobian, Map, pullback
from opteq.regularizers import Regularizer

Mode: TypeAlias = Literal["gradient", "prox"]
Evaluation: TypeAlias = Literal["batch", "none", "frozen"]


@dataclass(frozen=True)
class RegularizedStep(Map):
    """T_R: z -> z - gamma grad R(z), or z -> prox_{gamma R}(z)."""

    closed: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True
    regularizer: Regularizer
    gamma: float
    mode: Mode

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return not self.coupled

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        return self.regularizer.couples_batch

    def __call__(self, z: Tensor) -> Tensor:
        if self.mode == "gradient":
            return z - self.gamma * self.regularizer.gradient(z)
        assert self.regularizer.prox is not None
        return self.regularizer.prox(z, self.gamma)

    def linearize(self, z: Tensor) -> Jacobian:
        """A gradient map and a prox are both gradients of functions, so J = J'."""
        pull = pullback(self, z)

        def product(v: Tensor) -> Tensor:
            return pull(v)[0]

        return Jacobian(jvp=product, vjp=product, symmetric=True)


@dataclass(frozen=True)
class DeepMap(Map):
    """f_L o ... o f_1; a RegularizedStep, if there is one, comes first."""

    closed: ClassVar[bool] = True
    layers: tuple[Map, ...]

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """A product of symmetric Jacobians is not symmetric."""
        return len(self.layers) == 1 and self.layers[0].symmetric

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return all(layer.independent for layer in self.layers)

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        return any(layer.coupled for layer in self.layers)

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        return self.layers[-1].fresh

    def path(self, z: Tensor) -> list[Tensor]:
        """z_0 = z, z_l = f_l(z_{l-1})."""
        points = [z]
        for layer in self.layers:
            points.append(layer(points[-1]))
        return points

    def __call__(self, z: Tensor) -> Tensor:
        for layer in self.layers:
            z = layer(z)
        return z

    def begin(self, z0: Tensor) -> Tensor:
        z = self.layers[0].begin(z0)
        for layer in self.layers[1:]:
            z = layer(z)
        return z

    def linearize(self, z: Tensor) -> Jacobian:
        """J = J_L ... J_1, each at its own z_{l-1}."""
        parts = []
        for layer in self.layers[:-1]:
            z, part = layer.value_and_jacobian(z)
            parts.append(part)
        parts.append(self.layers[-1].linearize(z))

        def jvp(v: Tensor) -> Tensor:
            for part in parts:
                v = part.jvp(v)
            return v

        def vjp(v: Tensor) -> Tensor:
            for part in reversed(parts):
                v = part.vjp(v)
            return v

        return Jacobian(jvp=jvp, vjp=vjp, symmetric=self.symmetric)


class UnitInterval(nn.Module):
    """alpha = sigmoid(a), kept in [1e-6, 1]."""

    def forward(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a).clamp_min(1e-6)

    def right_inverse(self, alpha: Tensor) -> Tensor:
        """The a of a given alpha; an alpha of 1, which no a has, begins at 0.999."""
        return torch.logit(at_least_single(alpha).clamp(1e-6, 0.999)).to(alpha.dtype)  # 0.999 is 1 in bfloat16


class Layers(Cell):
    """A cell made of OptEq layers that share the state z and the input x."""

    def __init__(self, cells: Sequence[OptEqCell]) -> None:
        super().__init__()
        wanted = "a sequence of OptEq, ConvOptEq or DepthwiseOptEq"
        check_instance(self, "cells", cells, (Sequence, nn.ModuleList), wanted)
        for cell in cells:
            check_instance(self, "cells", cell, OptEqCell, wanted)
        if not len(cells):
            raise ValueError(invalid(self, "cells", "not empty", []))
        for name in ("state", "input"):
            found = {_describe(cell, name) for cell in cells}
            if len(found) > 1:
                raise ValueError(invalid(self, "cells", f"layers with the same {name}", sorted(found)))
        self.cells = nn.ModuleList(cells)
        if isinstance(getattr(cells[0], "state_shape", None), tuple):  # that of images depends on x
            self.state_shape = self._shape(cells[0].state_shape)

    def _shape(self, one: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a state, given that of a layer's."""
        return one

    @property
    def layers(self) -> list[OptEqCell]:
        """The cells, with their type."""
        return [cell for cell in self.cells if isinstance(cell, OptEqCell)]

    def initial(self, x: Tensor) -> Tensor:
        return self.layers[0].initial(x).to(self.promoted(x))

    def bound(self, x: Tensor) -> tuple[OptEqMap, ...]:
        """The map of each layer at x, which all get in the promoted dtype."""
        x = x.to(self.promoted(x))
        return tuple(cell.bind(x) for cell in self.layers)


def _describe(cell: OptEqCell, part: str) -> str:
    """What the state or the input of a layer is, in words."""
    key = {"state": ("features", "channels"), "input": ("in_features", "in_channels")}[part]
    return ", ".join(f"{cell.sizes[name]} {name}" for name in key if name in cell.sizes)


class DeepOptEq(Layers):
    """z = f_L o ... o f_1 (z), f_l(z) = (alpha_l / mu_l) W_l' sigma(W_l z + U_l x + b_l) + (1 - alpha_l) z.

    `regularizer`: R, which enters as T_R before the first layer, z = f_L o ... o f_1 (T_R(z)), by `mode`:
    "gradient", T_R(z) = z - gamma grad R(z), or "prox", T_R = prox_{gamma R}.
    `learn_alpha` makes each alpha_l a parameter, alpha_l = sigmoid(a_l).
    `evaluation`: what R does in eval mode. "batch": the same as in training, so that with a regulariser that couples the batch
    a sample's equilibrium depends on its batch-mates; "none": R is left out; "frozen": R uses the statistics of the batch that
    was given to `freeze`. Optimization induced equilibrium networks, Eq. (5), Theorems 2 and 4.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import DeepOptEq, OptEq
        >>> from opteq.regularizers import L1
        >>> deep = DeepOptEq([OptEq(4, 8, 16), OptEq(4, 8, 12)], regularizer=L1(), mode="prox")
        >>> print(Equilibrium(deep).solve(torch.randn(5, 4)).status)
        Status.CONVERGED
    """

    def __init__(
        self,
        cells: Sequence[OptEqCell],
        *,
        regularizer: Regularizer | None = None,
        mode: Mode = "gradient",
        learn_alpha: bool = False,
        gamma: float = 0.1,
        evaluation: Evaluation = "batch",
    ) -> None:
        super().__init__(cells)
        check_instance(self, "regularizer", regularizer, (Regularizer, type(None)), "a Regularizer, such as L2(), or None")
        check_number(self, "gamma", gamma, 0.0, open_low=True)
        check_choice(self, "mode", mode, get_args(Mode))
        check_choice(self, "evaluation", evaluation, get_args(Evaluation))
        if mode == "prox" and regularizer is not None and regularizer.prox is None:
            expected = "'gradient' for a regularizer whose prox has no closed form"
            raise ValueError(invalid(self, "mode", expected, f"'prox' with {type(regularizer).__name__}"))
        self.regularizer, self.mode, self.gamma, self.evaluation = regularizer, mode, float(gamma), evaluation
        self.register_buffer("reference", None)
        self.reference: Tensor | None
        check_instance(self, "learn_alpha", learn_alpha, bool, "a bool")
        if learn_alpha:
            for cell in self.layers:
                _make_learnable(cell)

    def freeze(self, z: Tensor) -> None:
        """Keep the batch of equilibria z as the one whose statistics R uses in eval mode, with evaluation="frozen"."""
        check_floating(self, "z", z)
        size = next(self.layers[0].sizes[name] for name in ("features", "channels") if name in self.layers[0].sizes)
        if z.ndim < 2 or z.shape[1] != size:
            raise ValueError(invalid(self, "z", f"a batch of equilibria, of shape [batch, {size}, ...]", list(z.shape)))
        check_finite(self, [("z", z)])  # one NaN would be in the statistics of all samples to come
        self.reference = z.detach().clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make room for the reference batch of the state, whatever its size."""
        stored = state_dict.get(f"{prefix}reference")
        self.reference = None if stored is None else stored.detach().to(next(self.parameters()), copy=True)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def bind(self, x: Tensor) -> DeepMap:
        step = self.step()
        layers = self.bound(x)
        return DeepMap(layers if step is None else (step, *layers))

    def step(self) -> RegularizedStep | None:
        """T_R in the present mode, train or eval; None if there is none."""
        regularizer = self.regularizer
        if regularizer is None or (not self.training and self.evaluation == "none"):
            return None
        if not self.training and self.evaluation == "frozen" and regularizer.couples_batch:
            if self.reference is None:
                raise RuntimeError(
                    'DeepOptEq with evaluation="frozen" has no statistics yet: call freeze(z) with a batch of equilibria.'
                )
            with torch.autocast(self.reference.device.type, enabled=False):
                regularizer = regularizer.frozen(self.reference)
        return RegularizedStep(regularizer, self.gamma, self.mode)

    def extra_repr(self) -> str:
        if self.regularizer is None:
            return ""
        return f"regularizer={self.regularizer}, mode={self.mode}, gamma={self.gamma:g}, evaluation={self.evaluation}"


def _make_learnable(cell: OptEqCell) -> None:
    """Put a parameter in place of the constant alpha, once for a layer that is used twice."""
    if parametrize.is_parametrized(cell, "alpha"):
        return
    like = next(cell.parameters())
    alpha = torch.as_tensor(cell.alpha, dtype=like.dtype, device=like.device)
    del cell.alpha
    cell.alpha = nn.Parameter(alpha)
    parametrize.register_parametrization(cell, "alpha", UnitInterval())


@dataclass(frozen=True)
class StackedMap(Map):
    """z~ -> f~(P z~): block l is f_l of block l - 1, and block 1 that of block L."""

    closed: ClassVar[bool] = True
    layers: tuple[OptEqMap, ...]

    def __call__(self, z: Tensor) -> Tensor:
        before = z.roll(1, dims=1)
        return torch.stack([layer(before[:, i]) for i, layer in enumerate(self.layers)], dim=1)

    def linearize(self, z: Tensor) -> Jacobian:
        """J = diag(J_1, ..., J_L) P, and J' = P' diag(J_1, ..., J_L)."""
        before = z.roll(1, dims=1)
        parts = [layer.linearize(before[:, i]) for i, layer in enumerate(self.layers)]

        def blocks(v: Tensor) -> Tensor:
            return torch.stack([part.jvp(v[:, i]) for i, part in enumerate(parts)], dim=1)

        return Jacobian(jvp=lambda v: blocks(v.roll(1, dims=1)), vjp=lambda v: blocks(v).roll(-1, dims=1))


class StackedOptEq(Layers):
    """z~ = alpha W~' sigma(W~ P z~ + U~ x + b~) + (1 - alpha) P z~, W~ block diagonal, P the cyclic shift of the blocks.

    State [batch, L, ...]; its equilibrium is (z_1, ..., z_{L-1}, z_0) of the deep OptEq of the same cells: the last block is
    the equilibrium of DeepOptEq(cells). Optimization induced equilibrium networks, Lemma 3 and Eq. (15).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium, Stop
        >>> from opteq.cells import DeepOptEq, OptEq, StackedOptEq
        >>> cells, x, stop = [OptEq(4, 8, 16), OptEq(4, 8, 12)], torch.randn(5, 4), Stop(rtol=1e-6)
        >>> stacked = Equilibrium(StackedOptEq(cells), stop=stop)(x)
        >>> stacked.shape, torch.allclose(stacked[:, -1], Equilibrium(DeepOptEq(cells), stop=stop)(x), atol=1e-4)
        (torch.Size([5, 2, 8]), True)
    """

    def _shape(self, one: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.cells), *one)

    def initial(self, x: Tensor) -> Tensor:
        one = super().initial(x)
        return one[:, None].expand(-1, len(self.cells), *one.shape[1:]).contiguous()

    def bind(self, x: Tensor) -> StackedMap:
        return StackedMap(self.bound(x))
