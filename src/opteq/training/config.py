"""TrainConfig: every setting of a training, checked when it is made, the same for Python, the command and config.json."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from opteq.checks import check_choice, check_instance, check_integer, check_number, invalid

Optimizer: TypeAlias = Literal["sgd", "adam", "adamw", "muon"]
Schedule: TypeAlias = Literal["constant", "step", "cosine", "onecycle", "poly"]
Mode: TypeAlias = Literal["own", "implicit", "unrolled", "sam"]
Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
OnDivergence: TypeAlias = Literal["stop", "rollback"]
NormsRule: TypeAlias = Literal["off", "warn", "stop"]

_CHOICES = {
    "optimizer": Optimizer, "schedule": Schedule, "mode": Mode, "precision": Precision, "on_divergence": OnDivergence,
    "norms": NormsRule,
}  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """How to train. A run can be resumed only with the same settings, but for those of the last group.

    Examples:
        >>> from opteq.training import TrainConfig
        >>> config = TrainConfig(epochs=8, optimizer="muon", lr=0.02, hold=0.9)
        >>> config.schedule, config.batch_size
        ('cosine', 128)
        >>> try:
        ...     TrainConfig(lr=-1)
        ... except ValueError as error:
        ...     print(error)
        The 'lr' parameter of TrainConfig must be a finite number > 0. Got -1 instead.
    """

    epochs: int = 10
    """Passes over the training set."""
    batch_size: int = 128
    """Samples of a step, over all processes together."""
    optimizer: Optimizer = "adamw"
    """The method; its other settings are PyTorch's own. muon: orthogonal steps for matrices and kernels inside equilibria or, in
    a model that has none, for all but the first and the last of the model; sgd's steps for all else."""
    lr: float = 1e-3
    """The step size: the peak of the schedule."""
    momentum: float = 0.9
    """Of sgd and muon."""
    hold: float | None = None
    """Of muon: the largest root mean square of the singular values of a matrix that it moves, so that norms do not grow on."""
    weight_decay: float = 0.0
    """Of all parameters, as PyTorch's optimizers mean it (for a penalty R_w = c |w|^2 with sgd: 2 c)."""
    schedule: Schedule = "cosine"
    """constant; step (times `decay` every `decay_every` epochs); cosine to 0; onecycle (up to lr for 30%, then down); poly."""
    warmup: float = 0.0
    """Epochs in which the step size grows linearly from 0 (not for onecycle)."""
    decay: float = 0.7
    """Of step: the factor."""
    decay_every: float = 20.0
    """Of step: the epochs between two factors."""
    power: float = 0.9
    """Of poly: (1 - t)^power."""
    mode: Mode = "own"
    """Algorithm 1 of the OptEq paper: implicit differentiation, raw unrolling, or unrolling with SAM; own: as the model has it."""
    unroll: int = 20
    """K, the steps of the unrolled modes."""
    clip: float | None = None
    """Largest norm of the gradient."""
    label_smoothing: float = 0.0
    """The share of the target that cross entropy spreads over all classes; a loss of your own knows nothing of it."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, which is then validated and kept."""
    precision: Precision = "float32"
    """Autocast around the equilibria, which are always solved in their own dtype. float16 needs a GPU."""
    jacobian: float = 0.0
    """Weight of |J|_F^2 / n at the equilibrium (Bai, Koltun and Kolter, 2021)."""
    warm_start: bool = False
    """Begin each sample's equilibrium at that of the epoch before."""
    crop: int = 0
    """Random shifts by up to so many pixels."""
    flip: bool = False
    """Random left-right flips."""
    sizes: tuple[int, ...] = ()
    """Shorter sides to which the images are shrunk in equal parts of the training, such as 16 24 32: the first steps cost less."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""
    patience: int | None = None
    """Stop after so many epochs without a better validation, and keep the best weights."""
    seed: int = 0
    """Of the order of samples, the augmentation and what the model draws."""
    least_converged: float = 0.5
    """The share of converged samples below which a step counts as gone wrong; 0 turns it off."""
    norms: NormsRule = "warn"
    """What to do when a weight leaves the region where its equilibrium is sure to exist (||W||^2 L > mu)."""

    on_divergence: OnDivergence = "stop"
    """stop, or go back to the last good checkpoint with a smaller step."""
    rollbacks: int = 5
    """At most so many."""
    shrink: float = 0.5
    """What a roll-back multiplies the step size by."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: once an epoch."""
    keep: int = 3
    """Checkpoints to keep."""
    log_every: int = 10
    """Steps between two rows of metrics."""
    device: str | None = None
    """cpu, cuda, cuda:1; None: a GPU if there is one."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(self, name, getattr(self, name), get_args(choices))
        for name in ("epochs", "batch_size", "unroll", "keep", "log_every"):
            check_integer(self, name, getattr(self, name), 1)
        for name in ("patience", "checkpoint_every"):
            if getattr(self, name) is not None:
                check_integer(self, name, getattr(self, name), 1)
        for name in ("rollbacks", "crop", "seed"):
            check_integer(self, name, getattr(self, name), 0)
        for name in ("epochs", "batch_size", "seed", "unroll"):
            if getattr(self, name) >= 2**31:
                raise ValueError(invalid(self, name, "an integer below 2^31", getattr(self, name)))
        check_instance(self, "sizes", self.sizes, tuple, "a tuple of integers")
        for size in self.sizes:
            check_integer(self, "sizes", size, 1)
        if self.sizes and self.warm_start:
            raise ValueError(invalid(self, "warm_start", "False with sizes, which change the equilibria's", True))
        for name in ("warm_start", "flip", "drop_last"):
            check_instance(self, name, getattr(self, name), bool, "a bool")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("lr", "decay_every"):
            check_number(self, name, getattr(self, name), 0.0, open_low=True)
        for name in ("weight_decay", "warmup", "jacobian", "power"):
            check_number(self, name, getattr(self, name), 0.0)
        for name in ("momentum", "label_smoothing"):
            check_number(self, name, getattr(self, name), 0.0, 1.0, open_high=True)
        check_number(self, "decay", self.decay, 0.0, 1.0, open_low=True)
        check_number(self, "shrink", self.shrink, 0.0, 1.0, open_low=True, open_high=True)
        check_number(self, "least_converged", self.least_converged, 0.0, 1.0)
        if self.ema is not None:
            check_number(self, "ema", self.ema, 0.0, 1.0, open_low=True, open_high=True)
        for name in ("clip", "hold"):
            if getattr(self, name) is not None:
                check_number(self, name, getattr(self, name), 0.0, open_low=True)
        if self.hold is not None and self.optimizer != "muon":
            raise ValueError(invalid(self, "hold", f"None with {self.optimizer}: it is a setting of muon", self.hold))


def image_side(config: TrainConfig, step: int, steps_per_epoch: int) -> int | None:
    """The shorter side of the images of step 0, 1, ...; None: as they are."""
    parts = len(config.sizes)
    return config.sizes[min(step * parts // (config.epochs * steps_per_epoch), parts - 1)] if parts else None


OPERATIONAL = ("on_divergence", "rollbacks", "shrink", "checkpoint_every", "keep", "log_every", "device")
"""Settings that may change between a run and its resumption: without a divergence, none changes the result."""


def step_size(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The step size of step 0, 1, ...: a function of the step alone, so that a resumed run has nothing to restore.

    Examples:
        >>> from opteq.training import TrainConfig, step_size
        >>> config = TrainConfig(epochs=2, lr=0.1, schedule="cosine")
        >>> [round(step_size(config, step, steps_per_epoch=2), 4) for step in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
    """
    total, lr = config.epochs * steps_per_epoch, config.lr
    if config.schedule == "onecycle":
        return lr * _one_cycle(step, total)
    warmup = config.warmup * steps_per_epoch
    if step < warmup:
        return lr * (step + 1) / (math.floor(warmup) + 1)
    if config.schedule == "step":
        return float(lr * config.decay ** math.floor(step / (config.decay_every * steps_per_epoch)))
    t = (step - math.ceil(warmup)) / max(1.0, total - math.ceil(warmup))  # in [0, 1)
    if config.schedule == "cosine":
        return lr * (1 + math.cos(math.pi * t)) / 2
    return float(lr * (1 - t) ** config.power) if config.schedule == "poly" else lr


def _one_cycle(step: int, total: int, *, up: float = 0.3, begin: float = 1 / 25, end: float = 1e-5) -> float:
    """From `begin` to 1 by a cosine in the first `up` of the steps, then to `end` by another, as PyTorch's OneCycleLR."""
    top = max(up * total - 1, 1e-9)
    low, t = (begin, 1 - step / top) if step <= top else (end, (step - top) / (total - 1 - top))
    return low + (1 - low) * (1 + math.cos(math.pi * t)) / 2
