"""fit: the training loop."""

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opteq.checks import check_instance, invalid
from opteq.equilibrium import ConvergenceWarning
from opteq.models import count_parameters
from opteq.runs import Checkpoint, Run, RunError
from opteq.solution import ConvergenceError
from opteq.training.batches import Loader, Plan, check_images
from opteq.training.callbacks import AfterStep, Callback
from opteq.training.config import OPERATIONAL, TrainConfig, step_size
from opteq.training.display import display
from opteq.training.learner import Learner
from opteq.training.norms import alphas
from opteq.training.objective import Loss, Objective, Tally, evaluate
from opteq.training.parts import Samples, checked, cuda_devices, find_device, fingerprint
from opteq.training.processes import World, naming_lost_processes
from opteq.training.state import (
    Memory,
    Store,
    load_random_state,
    open_store,
    prefixed,
    random_state,
    seed_random_state,
    within,
)
from opteq.training.watch import Health, Trouble, raised


class DivergenceError(RuntimeError):
    """A training went wrong; `trouble` has the layer and the figure, `step` the step at which it was caught.

    Examples:
        >>> import torch
        >>> from opteq.training import DivergenceError, TrainConfig, fit
        >>> data = torch.randn(32, 4), torch.randn(32, 1)
        >>> try:
        ...     fit(torch.nn.Linear(4, 1), data, loss=lambda y, t: (y - t).mean() * float("nan"), verbose=False)
        ... except DivergenceError as error:
        ...     print(error.trouble.what, error.step)
        nan_loss 0
    """

    def __init__(self, message: str, trouble: Trouble, step: int) -> None:
        super().__init__(message)
        self.trouble, self.step = trouble, step


@dataclass(frozen=True)
class Result:
    """What a training came to; the model that was given holds the trained weights.

    Examples:
        >>> import torch
        >>> from opteq.training import TrainConfig, fit
        >>> data = torch.randn(32, 4), torch.randint(2, (32,))
        >>> result = fit(torch.nn.Linear(4, 2), data, data, TrainConfig(epochs=3, batch_size=16), verbose=False)
        >>> result.steps, result.epochs, result.stopped, "valid_accuracy" in result.scores
        (6, 3, None, True)
    """

    steps: int
    epochs: int
    seconds: float
    stopped: str | None  # "patience", or None: it ran to its end
    rollbacks: int
    scores: dict[str, float]  # of the last epoch, or the best one with `patience`: train_loss, valid_accuracy, ...
    history: list[dict[str, Any]] = field(repr=False)  # the rows of metrics


def fit(
    model: nn.Module,
    train: Any,
    valid: Any = None,
    config: TrainConfig | None = None,
    *,
    loss: Loss | None = None,
    ignore: int | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | Callable[[int], Any]] = (),
    verbose: bool = True,
) -> Result:
    """Train the model in place on `train`, a Split or (x, y).

    Integer y trains by cross entropy (labels `ignore` left out), floating y by the mean square; `loss(output, y)` is another.
    `valid`: scored after every epoch. `folder`: a run folder for configuration, metrics and checkpoints; with `resume` the run in
    it goes on, to the same result as if it had never stopped. `about`: JSON that says what the data and the model are.
    `callbacks`: Callback objects, or functions of the number of steps made, such as a Monitor.
    In a process group (torchrun), each process takes its part of every batch. Raises DivergenceError when the training goes wrong.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.training import TrainConfig, fit
        >>> model = torch.nn.Sequential(Equilibrium(OptEq(4, 8, 16, constrained=True)), torch.nn.Linear(8, 2))
        >>> x = torch.randn(256, 4)
        >>> result = fit(model, (x, (x[:, 0] > 0).long()), config=TrainConfig(epochs=5, batch_size=32, lr=0.02), verbose=False)
        >>> result.scores["train_accuracy"] > 0.9, model[0].solve(x).status.name
        (True, 'CONVERGED')
    """
    config, about = TrainConfig() if config is None else config, {} if about is None else about
    _check(model, config, loss, about, callbacks)
    training = Training(model, train, valid, config, loss, ignore)
    folder = None if folder is None else Path(folder)
    if resume and folder is None:
        raise ValueError(invalid("fit", "folder", "given, to resume the run in it", None))
    told = [c if isinstance(c, Callback) else AfterStep(c) for c in callbacks] if training.world.first else []
    with ExitStack() as stack, torch.random.fork_rng(cuda_devices(training.world.device)), warnings.catch_warnings():
        stack.enter_context(naming_lost_processes())
        warnings.simplefilter("ignore", ConvergenceWarning)  # the share of converged samples is a metric, and guarded
        training.callbacks = [*told, *([display()] if verbose and training.world.first else [])]
        stack.callback(training.close)
        training.open(folder, resume, dict(about))
        return training.run()


def _check(model: Any, config: Any, loss: Any, about: Any, callbacks: Any) -> None:
    """Raise if an argument of `fit` is of a type that it cannot be."""
    check_instance("fit", "model", model, nn.Module, "a torch.nn.Module")
    check_instance("fit", "config", config, TrainConfig, "a TrainConfig")
    if loss is not None and not callable(loss):
        raise TypeError(invalid("fit", "loss", "a function of (output, y)", loss))
    check_instance("fit", "about", about, Mapping, "a dict")
    if own := sorted({"train", "fingerprint"} & about.keys()):
        raise ValueError(invalid("fit", "about", "without 'train' and 'fingerprint', which fit writes itself", own))
    expected = "a list of Callbacks and of functions of the number of steps made"
    check_instance("fit", "callbacks", callbacks, Sequence, expected)
    for callback in callbacks:
        if not isinstance(callback, Callback) and not callable(callback):
            raise TypeError(invalid("fit", "callbacks", expected, callback))


class Training:
    """One training: its parts and its state. `run` is the loop."""

    def __init__(
        self, model: nn.Module, train: Any, valid: Any, config: TrainConfig, loss: Loss | None, ignore: int | None
    ) -> None:
        self.config, self.model = config, model
        self.world = World.here(find_device(config.device))
        self.objective = Objective(config.label_smoothing, ignore, loss)
        self.learner = Learner(model, config, self.objective, self.world)
        self.train, self.valid = self._checked("train", train), None if valid is None else self._checked("valid", valid)
        if config.patience is not None and valid is None:
            raise ValueError(invalid("fit", "valid", "given, for patience to look at", None))
        check_images(*self.train, config, ignore)
        if config.label_smoothing and loss is None and self.train[1].is_floating_point():
            raise ValueError(invalid("fit", "label_smoothing", "0 for real targets, which have no classes", config.label_smoothing))
        if config.warm_start:
            self.learner.start_warm(len(self.train[1]))
        self.plan = Plan(len(self.train[1]), config.batch_size, config.seed, config.drop_last)
        self.total = self.plan.per_epoch * config.epochs
        self.loader = Loader(self.plan, *self.train, config, ignore, self.learner.dtype, self.world)
        self.step, self.seconds, self.scale, self.rollbacks, self.restored = 0, 0.0, 1.0, 0, -1
        self.window, self.epoch = Tally(), Tally()
        self.best: dict[str, Any] = {"value": None, "epoch": 0, "scores": {}}
        self.best_tensors: dict[str, Tensor] = {}
        self.scores: dict[str, float] = {}
        self.stopped: str | None = None
        self.callbacks: list[Callback] = []
        self.store: Store = Memory(1)

    def _checked(self, name: str, split: Any) -> Samples:
        return checked(name, split, self.model, self.objective, self.world.device, self.learner.dtype)

    # ---------------------------------------------------------------- the loop

    def run(self) -> Result:
        """Train to the end, and give the model its final weights."""
        for callback in self.callbacks:
            callback.begin(asdict(self.config), self.total)
        self.model.train()
        while self.step < self.total and self.stopped is None:
            begun = time.perf_counter()
            trouble = self.advance()
            self.seconds += time.perf_counter() - begun
            if trouble is not None:
                self.recover(trouble)
                continue
            self.step += 1
            self.after_step()
        return self.finish()

    def advance(self) -> Trouble | None:
        """One step of the optimizer, or what kept it from being made."""
        rows, x, y, weight = self.loader(self.step)
        try:
            output, value, terms = self.learner.forward(rows, x, y)
        except ConvergenceError as error:
            return self.agreed(raised(error))
        loss, terms = float(value.detach()), terms * weight
        if trouble := self.agreed(self.learner.after_forward(x, loss)) or self.learner.not_converging():
            return trouble
        share = terms * self.world.size / max(self.world.sum([terms])[0], 1.0)  # DDP averages over the processes
        try:
            norm = self.learner.backward(value, share)
        except ConvergenceError as error:
            if self.world.size > 1:  # the others wait inside of their backward: only the end of this process ends them
                raise
            return raised(error)
        if trouble := self.learner.after_backward(norm):
            return trouble
        self.learner.update(self.scale * step_size(self.config, self.step, self.plan.per_epoch))
        health = self.learner.watch.total() if weight else Health()
        for tally in (self.window, self.epoch):
            tally.add(self.objective, output, y, loss, terms, health, norm)
        for trouble in self.learner.after_update():
            if trouble.what != "norm" or self.config.norms == "stop":
                return trouble
            self.log({"kind": "event", "step": self.step + 1, **asdict(trouble), "action": "warned"})
        return None

    def agreed(self, trouble: Trouble | None) -> Trouble | None:
        """The same answer on all processes: the trouble of the first that has any."""
        if self.world.size == 1 or not self.world.sum([float(trouble is not None)])[0]:
            return trouble
        told = self.world.first_message(None if trouble is None else json.dumps(asdict(trouble)))
        assert told is not None
        rank, text = told
        found = json.loads(text)
        return Trouble(found["what"], found["layer"], found["figure"], f"process {rank}: {found['message']}")

    # ---------------------------------------------------------------- after a step

    def after_step(self) -> None:
        """Rows of metrics, validation, checkpoints."""
        for callback in self.callbacks:
            if row := callback.step(self.step):
                self.log({"kind": "callback", "step": self.step, **row})
        ends = self.step % self.plan.per_epoch == 0
        if self.step % self.config.log_every == 0 or ends:
            self.log({"kind": "step", "step": self.step, **self.position(), **self.window.means(self.world)})
            self.window = Tally()
        if ends:
            self.end_epoch()
        every = self.config.checkpoint_every or self.plan.per_epoch
        if self.step % every == 0 or self.step == self.total or self.stopped is not None:
            self.save()

    def position(self) -> dict[str, float]:
        """Where we are."""
        lr = self.scale * step_size(self.config, self.step - 1, self.plan.per_epoch)
        return {"epoch": self.step / self.plan.per_epoch, "lr": lr, "seconds": round(self.seconds, 3)}

    def end_epoch(self) -> None:
        """Score the model, log it, and see whether it still gets better."""
        begun = time.perf_counter()
        train = self.epoch.means(self.world)
        scores = {f"train_{name}": train[name] for name in ("loss", "accuracy", "miou") if train.get(name) is not None}
        if self.valid is not None:
            self.learner.share_buffers()
            batch = max(1, self.config.batch_size // self.world.size)
            judged = self.learner.judged()
            found = evaluate(judged, *self.valid, batch_size=batch, objective=self.objective, world=self.world)
            scores |= {f"valid_{name}": value for name, value in found.items()}
        self.seconds += time.perf_counter() - begun
        self.scores, self.epoch = scores, Tally()
        health = {name: train.get(name) for name in ("solver_steps", "backward_steps", "converged")}
        layers = {"alpha": alphas(self.model), "norms": {} if self.config.norms == "off" else self.learner.norms.by_layer()}
        layers = {name: found for name, found in layers.items() if found}
        epoch = self.step // self.plan.per_epoch
        self.log({"kind": "epoch", "step": self.step, **self.position(), "epoch": epoch, **scores, **health, **layers})
        if self.config.patience is not None:
            self.judge(epoch, scores)

    def judge(self, epoch: int, scores: dict[str, float]) -> None:
        """Keep the best weights; stop when it has been too long since."""
        assert self.config.patience is not None
        value = -scores["valid_loss"]
        if self.objective.own is None:  # of another loss, we do not know what is right
            value = scores.get("valid_miou", scores.get("valid_accuracy", value))
        value = -math.inf if math.isnan(value) else value
        if self.best["value"] is None or value > self.best["value"]:
            self.best = {"value": value, "epoch": epoch, "scores": scores}
            self.best_tensors = {name: tensor.detach().clone() for name, tensor in self.learner.judged().state_dict().items()}
        elif epoch - self.best["epoch"] >= self.config.patience:
            self.stopped = "patience"

    def finish(self) -> Result:
        """Give the model its final weights, write them and the result."""
        self.learner.share_buffers()
        final = self.best_tensors or self.learner.judged().state_dict()
        scores = self.best["scores"] or self.scores
        self.model.load_state_dict(final)
        epochs = self.step // self.plan.per_epoch
        result = Result(self.step, epochs, self.seconds, self.stopped, self.rollbacks, scores, self.store.metrics())
        if isinstance(self.store, Run):
            self.store.write_tensors("model.safetensors", self.model.state_dict())
            facts = {"stopped": self.stopped, "steps": self.step, "epochs": epochs, "rollbacks": self.rollbacks}
            parameters = count_parameters(self.model)
            self.store.write("result.json", {**facts, "seconds": round(self.seconds, 3), "parameters": parameters, **scores})
        self.world.meet()
        for callback in self.callbacks:
            callback.end(result)
        return result

    def log(self, row: Mapping[str, Any]) -> None:
        """Write a row of metrics and tell it."""
        self.store.log(row)
        for callback in self.callbacks:
            callback.row(row)

    # ---------------------------------------------------------------- state

    def open(self, folder: Path | None, resume: bool, about: dict[str, Any]) -> None:
        """Begin a run or go on with one."""
        config = {
            "train": asdict(self.config),
            **about,
            "fingerprint": fingerprint(self.model, self.train, self.valid, self.objective, self.world),
        }
        self.store = open_store(folder, config, self.config.keep, resume, OPERATIONAL, self.world)
        checkpoint = self.store.latest() if resume else None
        if checkpoint is None and self.store.steps():
            raise RunError(f"{folder} has no checkpoint that can be used: start a new run in another folder")
        if checkpoint is None:
            seed_random_state(self.config.seed + 1_000_003 * self.world.rank, self.world)
            self.save()
            return
        self.world.meet()  # all have read it
        self.store.rewind(checkpoint.step)
        self.restore(checkpoint)

    def close(self) -> None:
        """Release the run folder and the loader, whatever happened."""
        with ExitStack() as stack:
            stack.callback(self.store.close)
            stack.callback(self.loader.close)
            for callback in self.callbacks:
                stack.callback(callback.close)

    def save(self) -> None:
        """Write a checkpoint of everything that the rest depends on."""
        self.window, self.epoch = self.window.gathered(self.world), self.epoch.gathered(self.world)
        tensors = self.learner.tensors() | prefixed("random", random_state(self.world)) | prefixed("best", self.best_tensors)
        own = {name: getattr(self, name) for name in _PLAIN}
        state = {**own, "window": asdict(self.window), "epoch": asdict(self.epoch), "learner": self.learner.state()}
        self.store.save(Checkpoint(self.step, tensors, state))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Everything as it was when the checkpoint was saved."""
        tensors, state = checkpoint.tensors, checkpoint.state
        self.step = checkpoint.step
        self.learner.restore(tensors, state["learner"])
        load_random_state(within("random", tensors), self.world)
        self.best_tensors = {name: tensor.clone() for name, tensor in within("best", tensors).items()}
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.window, self.epoch = (Tally.restored(state[name], self.world) for name in ("window", "epoch"))

    def recover(self, trouble: Trouble) -> None:
        """Go back to the last good checkpoint with a smaller step size, or stop."""
        event = {"kind": "event", "step": self.step, "epoch": self.step / self.plan.per_epoch, **asdict(trouble)}
        at = f"step {self.step} (epoch {self.step / self.plan.per_epoch:.2f})"
        if self.config.on_divergence == "stop" or self.rollbacks >= self.config.rollbacks:
            tried = f" after {self.rollbacks} roll-backs" if self.rollbacks else ""
            self.log({**event, "action": "stopped"})
            step = self.step
            self.restore(self.last_good(trouble))
            back = f"The model has the weights of step {self.step} again."
            raise DivergenceError(f"Training stopped at {at}{tried}: {trouble.message} {back}", trouble, step)
        target = self.last_good(trouble)
        self.world.meet()  # all have read it
        scale, rollbacks, seconds = self.scale * self.config.shrink, self.rollbacks + 1, self.seconds
        events = [row for row in self.store.metrics() if row["kind"] == "event" and row["step"] > target.step]
        self.store.rewind(target.step)
        for row in events:  # what happened stays known
            self.store.log({**row, "step": target.step, "from": row.get("from", row["step"])})
        self.restore(target)
        self.scale, self.rollbacks, self.seconds, self.restored = scale, rollbacks, seconds, target.step
        self.save()
        for callback in self.callbacks:
            callback.rewind(target.step)
        message = f"{trouble.message} Back from {at} to step {target.step}, step size times {self.scale:g}."
        self.log({**event, "step": target.step, "from": event["step"], "message": message, "action": "rolled back"})

    def last_good(self, trouble: Trouble) -> Checkpoint:
        """The newest checkpoint that is not known to lead to this trouble, or else the oldest."""
        steps = self.store.steps()
        at_fault = self.step if trouble.what in _BEFORE_UPDATE else None  # a checkpoint of these very weights is no good
        again = steps[-1] in (self.restored, at_fault) and len(steps) > 1  # nor is one that has led here before
        return self.store.load(steps[-2] if again else steps[-1])


_BEFORE_UPDATE = ("nan_loss", "nan_state", "nan_gradient", "not_converging")
_PLAIN = ("seconds", "scale", "rollbacks", "restored", "best", "scores", "stopped")
