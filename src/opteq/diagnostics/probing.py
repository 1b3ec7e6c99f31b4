"""The equilibrium inside a model: which one it is, and what it is given."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from opteq.checks import check_instance, invalid
from opteq.equilibrium import Equilibrium
from opteq.models.readout import Readout, tight_stop

__all__ = ["Probe", "probe"]


class Probe(NamedTuple):
    """An equilibrium, and its arguments."""

    layer: Equilibrium
    x: Tensor
    z0: Tensor | None


class _ReachedError(Exception):
    """The forward pass has come to the layer."""


def probe(owner: str, model: nn.Module, x: Tensor, name: str | None = None) -> Probe:
    """The only equilibrium of a model, or the one of a name, and what model(x) gives it in its first call."""
    check_instance(owner, "model", model, nn.Module, "an nn.Module")
    check_instance(owner, "x", x, Tensor, "a tensor")
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(invalid(owner, "x", "of shape [samples, ...] with at least one sample", list(x.shape)))
    part = _chosen(owner, model, name)
    caught: list[tuple[Tensor, Tensor | None]] = []

    def catch(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = dict(zip(("x", "z0"), args, strict=False)) | options
        caught.append((given["x"], given.get("z0")))
        raise _ReachedError

    hook = part.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
    try:
        model(x)
    except _ReachedError:
        return Probe(_layer(part, caught[0][0]), *caught[0])
    finally:
        hook.remove()
    expected = "one whose forward calls its equilibrium: layer(x), not layer.solve(x)"
    raise ValueError(invalid(owner, "model", expected, type(model).__name__))


def _chosen(owner: str, model: nn.Module, name: str | None) -> nn.Module:
    parts = {label: part for label, part in model.named_modules() if isinstance(part, (Equilibrium, Readout))}
    if name is None and len(parts) == 1:
        return next(iter(parts.values()))
    if not parts:
        raise ValueError(invalid(owner, "model", "a model with an Equilibrium", type(model).__name__))
    if name not in parts:
        raise ValueError(invalid(owner, "layer", f"one of {', '.join(map(repr, parts))}", name))
    return parts[name]


def _layer(part: nn.Module, x: Tensor) -> Equilibrium:
    """The part as an Equilibrium that does not speak of failures; it shares the cell."""
    if isinstance(part, Readout):
        stop = tight_stop(part.cell.promoted(x)) if part.stop is None else part.stop
        return Equilibrium(part.cell, part.solver, stop, on_failure="ignore")
    assert isinstance(part, Equilibrium)
    return Equilibrium(part.cell, part.solver, part.stop, part.gradient, "ignore")
