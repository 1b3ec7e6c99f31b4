"""What learns: a model with its optimizer and all that looks at its equilibria or starts them. One step, and its tensors."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from opteq.checks import invalid
from opteq.equilibrium import observe
from opteq.training.blame import nan_gradient, nan_loss, nan_parameter, nan_state
from opteq.training.config import TrainConfig
from opteq.training.extras import JacobianPenalty, WarmStart
from opteq.training.modes import set_mode
from opteq.training.norms import Norms
from opteq.training.objective import Objective
from opteq.training.parts import autocast, averaged, make_optimizer
from opteq.training.processes import World
from opteq.training.state import load_optimizer, optimizer_tensors, prefixed, within
from opteq.training.watch import Trouble, Watch


class Learner:
    """A model that takes steps. `watch` has the solver health of the last one."""

    def __init__(self, model: nn.Module, config: TrainConfig, objective: Objective, world: World) -> None:
        self.model, self.config, self.objective, self.world = model, config, objective, world
        model.to(world.device)
        set_mode(model, config.mode, config.unroll)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(invalid("fit", "model", "one with parameters to train", "none"))
        self.dtype = self.parameters[0].dtype
        self.optimizer = make_optimizer(model, config)
        self.wrapped = world.wrap(model)
        self.ema = None if config.ema is None else averaged(model, config.ema)
        self.autocast = autocast(config, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "float16")
        self.watch, self.norms = Watch.of(model), Norms(model)
        self.penalty = JacobianPenalty(model) if config.jacobian else None
        self.warm: WarmStart | None = None

    def start_warm(self, samples: int) -> None:
        """Keep the equilibria of so many samples, for their next solves to begin at."""
        if self.world.size > 1:
            raise ValueError(invalid("fit", "warm_start", "False with several processes, which see other samples each epoch", True))
        self.warm = WarmStart(self.model, samples)

    def forward(self, rows: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
        """The output, the mean loss and the number of its terms, for the samples `rows` of the training set."""
        self.watch.clear()
        with ExitStack() as stack:
            stack.enter_context(self.autocast)
            stack.enter_context(observe(self.watch))
            if self.warm is not None:
                stack.enter_context(self.warm.of(rows))
            if self.penalty is not None:
                stack.enter_context(self.penalty.watching())
            output = self.wrapped(x)
            return output, *self.objective(output, y)

    def after_forward(self, x: Tensor, loss: float) -> Trouble | None:
        """Whether the loss and the equilibria of this process are finite."""
        if not math.isfinite(loss):
            return nan_loss(self.model, x, loss)
        bad = self.watch.nonfinite()
        return None if bad is None else nan_state(self.model, x, *bad)

    def not_converging(self) -> Trouble | None:
        """Whether enough samples of all processes converged."""
        return self.watch.not_converging(self.config.least_converged, self.config.batch_size / 2, self.world)

    def backward(self, loss: Tensor, share: float) -> float:
        """The gradient of this process's share of the loss; its norm, to which it is clipped if it is to be."""
        total = loss if self.penalty is None else loss + self.config.jacobian * self.penalty.value()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(total * share).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.config.clip is not None and math.isfinite(float(norm)):
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        return float(norm)

    def after_backward(self, norm: float) -> Trouble | None:
        """Whether the gradient is sound; a scaler skips a step that is not, and scales down."""
        return None if math.isfinite(norm) or self.scaler.is_enabled() else nan_gradient(self.model)

    def update(self, lr: float) -> None:
        """Change the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def after_update(self) -> list[Trouble]:
        """What is wrong with the new weights."""
        if not math.isfinite(float(nn.utils.get_total_norm(self.parameters))) and (found := nan_parameter(self.model)):
            return [found]
        return [] if self.config.norms == "off" else self.norms.step(self.watch.shapes)

    def judged(self) -> nn.Module:
        """The model that is scored and kept: with averaged weights, where they are averaged."""
        return self.model if self.ema is None else self.ema.module

    def share_buffers(self) -> None:
        """Give all processes the first one's buffers: the statistics of batch norms differ with the part of the batch."""
        for module in (self.model, self.judged()):
            for buffer in module.buffers():
                self.world.copy_from_first(buffer)

    def tensors(self) -> dict[str, Tensor]:
        """All that its next steps depend on."""
        found = prefixed("model", self.model.state_dict()) | prefixed("optimizer", optimizer_tensors(self.optimizer))
        found |= prefixed("norms", self.norms.vectors)
        if self.ema is not None:
            found |= prefixed("ema", self.ema.state_dict())
        if self.warm is not None and self.warm.states is not None:
            found["warm.states"] = self.warm.states
        return found

    def state(self) -> dict[str, Any]:
        """The rest of it, as JSON."""
        unjudged = dict(self.watch.unjudged)
        return {"passed": sorted(self.norms.passed), "unjudged": unjudged, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Everything as it was when `tensors` and `state` were taken."""
        self.model.load_state_dict(within("model", tensors))
        load_optimizer(self.optimizer, within("optimizer", tensors))
        self.norms.vectors = {name: v.to(self.world.device) for name, v in within("norms", tensors).items()}
        self.norms.passed = set(state["passed"])
        self.watch.unjudged = dict(state["unjudged"])
        if self.ema is not None:
            self.ema.load_state_dict(within("ema", tensors))
        if self.warm is not None:
            self.warm.states = tensors["warm.states"].clone() if "warm.states" in tensors else None
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
