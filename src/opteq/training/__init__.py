"""Training that survives: one loop, run folders that resume exactly, a guard against divergence, several processes."""

from opteq.training.callbacks import Callback, TensorBoard
from opteq.training.config import TrainConfig, step_size
from opteq.training.loop import DivergenceError, Result, fit
from opteq.training.modes import set_mode
from opteq.training.objective import Objective, evaluate
from opteq.training.processes import LostProcessError, World

__all__ = [
    "Callback",
    "DivergenceError",
    "LostProcessError",
    "Objective",
    "Result",
    "TensorBoard",
    "TrainConfig",
    "World",
    "evaluate",
    "fit",
    "set_mode",
    "step_size",
]
