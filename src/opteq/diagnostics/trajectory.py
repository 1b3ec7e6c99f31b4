"""The iterates on their way to the equilibrium: over samples, and over a training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from opteq.autograd import Report
from opteq.checks import check_instance, check_integer, invalid
from opteq.diagnostics.finding import Columns, Finding
from opteq.diagnostics.keeping import undisturbed
from opteq.diagnostics.probing import probe
from opteq.equilibrium import Equilibrium
from opteq.gradients import Gradient
from opteq.logs import record
from opteq.maps import Map
from opteq.solution import Solution, Status, Stop
from opteq.solver import Solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Length", "Trajectory", "TrajectoryRecorder", "trajectory"]


class Length(NamedTuple):
    """The mean length of the paths of a stage, and its standard error (NaN for fewer than two samples).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import trajectory
        >>> length = trajectory(Equilibrium(OptEq(4, 8, 16)), torch.randn(10, 4)).length[0]
        >>> length.mean > length.error > 0
        True
    """

    mean: float
    error: float


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory(Finding):
    """The principal components of the iterates of every sample, one basis for all stages: tensors on the CPU, per stage.

    `points`: [samples, steps + 1, components], NaN after a sample was done. `lengths`: [samples], sum_k |z_{k+1} - z_k| in the
    space of the states. `separation`: the mean silhouette of the classes among the end points, in the space of the states: near 1
    where they are far apart, near 0 where they overlap; NaN where labels do not tell (Rousseeuw, 1987).
    Samples that diverged or met NaN have no points, and a length of NaN. `converged`: those that reached their equilibrium.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import trajectory
        >>> found = trajectory(Equilibrium(OptEq(4, 8, 16)), torch.randn(10, 4), torch.arange(10) % 2)
        >>> found.stages, found.lengths[0].shape, bool(found.converged[0].all()), -1 <= found.separation[0] <= 1
        (('after',), torch.Size([10]), True, True)
    """

    name: ClassVar[str] = "trajectory"
    stages: tuple[str, ...]
    points: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...]
    converged: tuple[Tensor, ...]
    separation: tuple[float, ...]
    labels: Tensor | None  # [samples]
    explained: Tensor  # [components], the share of the variance of all iterates

    @property
    def length(self) -> tuple[Length, ...]:
        """The mean length of the paths with its standard error, per stage."""
        return tuple(_mean(lengths[lengths.isfinite()].numpy()) for lengths in self.lengths)

    def figure(self) -> "Figure":
        """One panel a stage on the same axes: the paths in their first two components, a dot where each ends."""
        from opteq.diagnostics.trajectory_figure import draw_trajectory

        return draw_trajectory(self)

    def columns(self) -> Columns:
        """One row for each stage, sample and step: the label (-1 where unknown) and the components."""
        places = [points[..., 0].isfinite().nonzero().numpy() for points in self.points]
        sample, step = np.concatenate(places).T
        labels = np.full(len(self.points[0]), -1) if self.labels is None else self.labels.numpy()
        rows = np.concatenate([points.numpy()[tuple(place.T)] for points, place in zip(self.points, places, strict=True)])
        stage = np.repeat(self.stages, [len(place) for place in places])
        components = {f"pc{i + 1}": column for i, column in enumerate(rows.T)}
        return {"stage": stage, "sample": sample, "label": labels[sample], "step": step, **components}


def trajectory(
    model: nn.Module | Mapping[str, nn.Module],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    stage: str = "after",
    components: int = 2,
    layer: str | None = None,
) -> Trajectory:
    """The iterates of the equilibrium of a model, or of a layer, for every sample of x, in their principal components.

    `model`: one, called `stage`, or several by their stage in the order of training, {"before": untrained, "after": trained}:
    they share one basis. `labels`: integers [samples]. `components`: 2 or 3. `layer`: its name, where a model has several.
    The model runs in evaluation mode, as its solver and its `stop` say, and is left as it was. Memory: samples x steps x state
    numbers of float32 a stage, three times that while the components are found. Needs scikit-learn.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import trajectory
        >>> models = {"before": Equilibrium(OptEq(4, 8, 16)), "after": Equilibrium(OptEq(4, 8, 16))}
        >>> found = trajectory(models, torch.randn(10, 4))
        >>> found.stages, [(points.shape[0], points.shape[2]) for points in found.points]
        (('before', 'after'), [(10, 2), (10, 2)])
    """
    models = model if isinstance(model, Mapping) else {stage: model}
    if not models or not all(isinstance(name, str) for name in models):
        raise ValueError(invalid("trajectory", "model", "a model, or models by the names of their stages", models))
    labels = _checked("trajectory", x, labels, components)
    paths = {name: _paths("trajectory", each, x, layer) for name, each in models.items()}
    return _projected("trajectory", paths, labels, components)


def _checked(owner: str, x: Tensor, labels: Tensor | None, components: int) -> Tensor | None:
    check_instance(owner, "x", x, Tensor, "a tensor")
    if components not in (2, 3):
        raise ValueError(invalid(owner, "components", "2 or 3", components))
    if labels is None:
        return None
    check_instance(owner, "labels", labels, Tensor, "a tensor of integers or None")
    if labels.is_floating_point() or labels.shape != x.shape[:1]:
        raise ValueError(invalid(owner, "labels", f"{len(x)} integers, one a sample", f"{labels.dtype} {list(labels.shape)}"))
    return labels.detach().cpu().long()


class _Paths(NamedTuple):
    """The iterates of one stage: float32 on the CPU, NaN after a sample was done and where it diverged."""

    z: Tensor  # [samples, steps + 1, n]
    ends: Tensor  # [samples], the last step, -1 where there is none
    converged: Tensor  # [samples]


class _Recorded(Gradient):
    """The layer's own strategy, its iterates recorded, without a word to observers."""

    def __init__(self, own: Gradient) -> None:
        self.own = own

    def attach(self, fn: Map, z0: Tensor, solver: Solver | None, stop: Stop, report: Report) -> Solution:
        with record(iterates=True) as log:
            self.own.attach(fn, z0, solver, stop, lambda solution, phase: None)
        return log[0]


def _paths(owner: str, model: nn.Module, x: Tensor, layer: str | None) -> _Paths:
    check_instance(owner, "model", model, nn.Module, "an nn.Module")
    with undisturbed(model):
        found = probe(owner, model, x, layer)
        own = found.layer
        recorded = Equilibrium(own.cell, own.solver, own.stop, _Recorded(own.gradient), "ignore")
        return _padded(recorded.solve(found.x, found.z0))


def _padded(solution: Solution) -> _Paths:
    assert solution.trace is not None
    assert solution.trace.z is not None
    samples, n = solution.z.shape[0], solution.z[0].numel()
    z = torch.full((samples, len(solution.trace.z), n), torch.nan)
    for step, (rows, at) in enumerate(zip(solution.trace.rows, solution.trace.z, strict=True)):
        z[rows.cpu(), step] = at.reshape(len(rows), n).to("cpu", torch.float32)
    lost = torch.tensor([status in (Status.DIVERGED, Status.NONFINITE) for status in solution.statuses])
    z[lost | z.isinf().flatten(1).any(dim=1)] = torch.nan
    ends = z[..., 0].isfinite().sum(dim=1) - 1
    return _Paths(z, ends, solution.converged.cpu())


def _projected(owner: str, paths: Mapping[str, _Paths], labels: Tensor | None, components: int) -> Trajectory:
    """All stages in the principal components of all their points."""
    if len({path.z.shape[2] for path in paths.values()}) > 1:
        raise ValueError(invalid(owner, "model", "models with states of one size", [path.z.shape[2] for path in paths.values()]))
    points, explained = _components(owner, paths, components)
    lengths = tuple(_lengths(path) for path in paths.values())
    separation = tuple(_separation(path, labels) for path in paths.values())
    return Trajectory(tuple(paths), points, lengths, tuple(p.converged for p in paths.values()), separation, labels, explained)


def _components(owner: str, paths: Mapping[str, _Paths], components: int) -> tuple[tuple[Tensor, ...], Tensor]:
    try:
        from sklearn.decomposition import PCA  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("Trajectories need scikit-learn: pip install 'opteq[train]'.") from error
    masks = [path.z[..., 0].isfinite() for path in paths.values()]
    count, size = sum(int(mask.sum()) for mask in masks), next(iter(paths.values())).z.shape[2]
    if count == 0:
        raise ValueError(invalid(owner, "x", "samples that do not all diverge or meet NaN", f"{len(masks[0])} that do"))
    if min(count, size) < components:
        expected = f"at most {min(count, size)}: there are {count} points of {size} numbers"
        raise ValueError(invalid(owner, "components", expected, components))
    every, filled = torch.empty(count, size, dtype=torch.float64), 0  # float32 loses components a thousandth as large as others
    for path, mask in zip(paths.values(), masks, strict=True):
        for z, known in zip(path.z.unbind(1), mask.unbind(1), strict=True):  # one step at a time, to save memory
            every[filled : (filled := filled + int(known.sum()))] = z[known]
    middle = every.mean(dim=0)
    every -= middle  # as PCA would subtract it after squaring
    with np.errstate(invalid="ignore"):  # iterates that do not move have no variance to share
        basis = PCA(components, copy=False, random_state=0).fit(every.numpy())
    turn = torch.from_numpy(basis.components_).T
    points = tuple(torch.stack([(z - middle) @ turn for z in path.z.unbind(1)], dim=1).float() for path in paths.values())
    return points, torch.from_numpy(basis.explained_variance_ratio_).double().nan_to_num()


def _lengths(path: _Paths) -> Tensor:
    """sum_k |z_{k+1} - z_k|; one step after the other, so that memory never holds the paths twice."""
    total = torch.zeros(len(path.z), dtype=torch.float64)
    for before, after in zip(path.z.unbind(1), path.z[:, 1:].unbind(1), strict=False):
        total += torch.linalg.vector_norm(after - before, dim=1).double().nan_to_num()
    return torch.where(path.ends >= 0, total, torch.nan)


def _mean(values: npt.NDArray[np.float64]) -> Length:
    if len(values) == 0:
        return Length(math.nan, math.nan)
    return Length(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan)


def _separation(path: _Paths, labels: Tensor | None) -> float:
    from sklearn.metrics import silhouette_score  # type: ignore[import-untyped]

    sound = path.ends >= 0
    if labels is None or not 2 <= len(labels[sound].unique()) < int(sound.sum()):
        return math.nan
    ends = path.z[sound, path.ends[sound]]
    return float(silhouette_score(ends.numpy(), labels[sound].numpy()))


class TrajectoryRecorder:
    """Records the iterates of fixed samples along a training: at step 0, when it is made, at the steps `at`, or `every` so many.

    Make it before the first step and call `recorder(step)` after each, or `recorder()`, which counts; `fit(callbacks=[recorder])`
    does. `recorder.trajectory()` gives all stages in one basis, and records the model as it then is. A step that was made
    before means that the training went back: what came after it is forgotten.
    Training is not disturbed: no `.grad`, parameter, buffer, mode or random state changes. The model runs in evaluation mode, so
    that samples are not coupled and stages can be compared. Memory: samples x steps x state numbers of float32 a stage.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import TrajectoryRecorder
        >>> layer, x = Equilibrium(OptEq(4, 8, 16)), torch.randn(10, 4)
        >>> recorder, optimizer = TrajectoryRecorder(layer, x, at=(1, 2)), torch.optim.SGD(layer.parameters(), 0.1)
        >>> for step in (1, 2):
        ...     layer(x).square().sum().backward()
        ...     optimizer.step()
        ...     _ = recorder(step)
        >>> recorder.trajectory().stages
        ('step 0', 'step 1', 'step 2')
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        labels: Tensor | None = None,
        *,
        at: Sequence[int] = (0, 10, 100),
        every: int | None = None,
        components: int = 2,
        layer: str | None = None,
    ) -> None:
        self.labels = _checked("TrajectoryRecorder", x, labels, components)
        check_instance(self, "at", at, Sequence, "a list of steps")
        for step in at:
            check_integer(self, "at", step, 0)
        if every is not None:
            check_integer(self, "every", every, 1)
        self.model, self.x, self.components, self.layer = model, x.detach(), components, layer
        self.at, self.every, self.k = frozenset(at), every, 0
        self.records: dict[int, _Paths] = {}
        self._visit()

    def __call__(self, k: int | None = None) -> None:
        """Count one step, or the k steps made so far, and record if it is time."""
        k = self.k + 1 if k is None else k
        check_integer(self, "k", k, 1)
        self.records = {step: paths for step, paths in self.records.items() if step < k}
        self.k = k
        self._visit()

    def _visit(self) -> None:
        if self.k == 0 or (self.k in self.at if self.every is None else self.k % self.every == 0):
            self._record()

    def _record(self) -> None:
        self.records[self.k] = _paths("TrajectoryRecorder", self.model, self.x, self.layer)

    def trajectory(self) -> Trajectory:
        """The stages "step 0", "step 10", ..., and the model as it is now."""
        if self.k not in self.records:
            self._record()
        stages = {f"step {k}": paths for k, paths in self.records.items()}
        return _projected("TrajectoryRecorder", stages, self.labels, self.components)

    def __repr__(self) -> str:
        return f"TrajectoryRecorder(samples={len(self.x)}, k={self.k}, recorded={list(self.records)})"
