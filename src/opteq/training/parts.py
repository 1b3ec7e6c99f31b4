"""The parts that a training is made of, and a look at what it is given."""

import hashlib
import json
import warnings
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from opteq.checks import all_finite, invalid
from opteq.equilibrium import Cell, ConvergenceWarning
from opteq.solution import ConvergenceError
from opteq.training.config import TrainConfig
from opteq.training.muon import Muon
from opteq.training.objective import Batches, Objective, check_labels, evaluating
from opteq.training.processes import World

Samples: TypeAlias = tuple[Batches, Tensor]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a configuration for all that is trained; its step size is set at every step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "muon":
        inside = {id(p) for p in _matrices(model)}
        matrices, others = [p for p in parameters if id(p) in inside], [p for p in parameters if id(p) not in inside]
        settings = {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
        return Muon(matrices, others, **settings, hold=config.hold)
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.lr, weight_decay=config.weight_decay)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon makes orthogonal steps for: matrices and kernels inside equilibria; without any, all but the first and the last."""
    cells = [part for part in model.modules() if isinstance(part, Cell)]
    if cells:
        return [p for cell in cells for p in cell.parameters() if p.ndim > 1]
    return [p for p in model.parameters() if p.ndim > 1][1:-1]


def autocast(config: TrainConfig, device: torch.device) -> Any:
    """The context of a forward pass in the precision of a configuration."""
    if config.precision == "float32":
        return nullcontext()
    if config.precision == "float16" and device.type != "cuda":
        raise ValueError(invalid("fit", "precision", "'float32' or 'bfloat16' without a GPU", config.precision))
    return torch.autocast(device.type, dtype=getattr(torch, config.precision))


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """The exponential moving average of a model's weights and buffers."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


def checked(name: str, split: Any, model: nn.Module, objective: Objective, device: torch.device, dtype: torch.dtype) -> Samples:
    """x and y, after a look at their values and at what the model makes of two samples."""
    try:
        x, y = split
    except (TypeError, ValueError):
        expected = "a Split or a pair (x, y) of tensors, of which fit makes the batches itself"
        raise TypeError(invalid("fit", name, expected, type(split).__name__)) from None
    if not isinstance(y, Tensor) or not hasattr(x, "dtype") or isinstance(x, np.ndarray):
        found = f"{type(x).__name__} and {type(y).__name__}"
        raise TypeError(invalid("fit", name, "a Split or a pair (x, y) of tensors (see torch.from_numpy)", found))
    if len(x) != len(y) or not len(y):
        raise ValueError(invalid("fit", name, "samples x with as many targets y, not none", f"{len(x)} and {len(y)}"))
    y = y.to(dtype) if y.is_floating_point() else y.long()
    if isinstance(x, Tensor):
        if not x.is_floating_point():
            raise TypeError(invalid("fit", name, "floating-point x", x.dtype))
        if not all_finite(x):
            bad = int((~x.flatten(1).isfinite().all(1)).nonzero()[0])
            raise ValueError(invalid("fit", name, "finite", f"NaN or infinity in sample {bad}"))
    output = _probe(name, x[torch.arange(min(2, len(y)))].to(device, dtype), model)
    objective.check(output, y[:2])
    if objective.own is None:
        check_labels("fit", y, output.shape[1] if output.ndim > 1 else 0, objective.ignore)
    return x, y


def _probe(name: str, x: Tensor, model: nn.Module) -> Tensor:
    """The output for x; random numbers and the model's modes are left as they were."""
    try:
        with torch.no_grad(), evaluating(model), torch.random.fork_rng(cuda_devices(x.device)), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            output = model(x)
    except ConvergenceError:  # a layer with on_failure="raise" has its say when the training begins
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        shape = list(x.shape[1:])
        raise ValueError(f"The model cannot take the samples of '{name}', of shape {shape}: {error}") from error
    if not isinstance(output, Tensor):
        raise TypeError(invalid("fit", "model", "one whose output is a tensor", type(output).__name__))
    return output


def find_device(name: str | None) -> torch.device:
    """The device of this name; None: a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            invalid("fit", "device", "a device of this machine, such as 'cpu', or None", f"{name}: {reason}")
        ) from error
    return device


def cuda_devices(device: torch.device) -> list[torch.device]:
    """The devices other than the CPU whose random numbers are used."""
    return [device] if device.type == "cuda" else []


def fingerprint(model: nn.Module, train: Samples, valid: Samples | None, objective: Objective, world: World) -> dict[str, Any]:
    """What tells another model, other data, another loss or another number of processes from those of a run."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    parts = [(name, list(t.shape), str(t.dtype), trained.get(name)) for name, t in model.state_dict().items()]
    return {
        "model": hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16],
        "train": _digest(*train),
        "valid": None if valid is None else _digest(*valid),
        "loss": {"own": objective.own is not None, "ignore": objective.ignore},
        "processes": world.size,
    }


def _digest(x: Batches, y: Tensor) -> str:
    """Of all values; of images that are decoded when they are used, of 16."""
    digest = hashlib.sha256()
    for tensor in (y, x if isinstance(x, Tensor) else x[torch.linspace(0, len(y) - 1, min(len(y), 16)).long()]):
        values: Any = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
        digest.update(values)
    return f"{len(y)} samples, {digest.hexdigest()[:16]}"
