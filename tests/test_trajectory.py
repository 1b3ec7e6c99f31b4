"""Trajectories: the principal components of the true iterates, their lengths, and recorders that leave no trace in a training."""

import copy
import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from opteq import Equilibrium, Stop, record
from opteq.cells import ConvOptEq, FunctionCell, GaussianDEQ, OptEq
from opteq.diagnostics.drawing import COLOURS
from opteq.diagnostics.trajectory import Trajectory, TrajectoryRecorder, trajectory
from opteq.equilibrium import observe
from opteq.gradients import Unrolled
from opteq.models import Classifier, Readout
from opteq.solvers import Anderson, Newton, Picard
from opteq.training import TrainConfig, fit
from opteq.training.callbacks import AfterStep

f64 = torch.float64
X = torch.randn(18, 4, generator=torch.Generator().manual_seed(0), dtype=f64)
Y = torch.arange(18) % 3


def opteq(norm: float = 0.9, **settings: Any) -> Equilibrium:
    torch.manual_seed(0)
    cell = OptEq(4, 12, 6).double()
    cell.W.data *= norm / torch.linalg.matrix_norm(cell.W.data, 2)
    return Equilibrium(cell, **settings)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), Equilibrium(OptEq(4, 12, 6)), nn.Linear(12, 3)
    ).double()


def paths_of(layer: Equilibrium, x: Tensor) -> list[Tensor]:
    with record(iterates=True) as log, torch.no_grad():
        layer(x)
    trace = log[0].trace
    assert trace is not None
    return [trace.path(i) for i in range(len(x))]


def dense_components(points: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first principal components and their shares, by a dense singular value decomposition in float64."""
    centred = (points - points.mean(dim=0)).double().numpy()
    _, sizes, basis = np.linalg.svd(centred, full_matrices=False)
    return centred @ basis[:count].T, sizes[:count] ** 2 / (sizes**2).sum()


# The data


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Newton()], ids=str)
@pytest.mark.parametrize("components", [2, 3])
def test_points_are_the_principal_components_of_the_iterates(solver: Any, components: int) -> None:
    layer = opteq(solver=solver)
    found = trajectory(layer, X, components=components)
    paths = paths_of(layer, X)
    wanted, shares = dense_components(torch.cat(paths), components)
    assert found.stages == ("after",)
    assert found.explained.numpy() == pytest.approx(shares, rel=1e-3)
    got = np.concatenate([found.points[0][i, : len(path)].numpy() for i, path in enumerate(paths)])
    signs = np.sign((got * wanted).sum(axis=0))  # a component is known up to its sign
    assert got * signs == pytest.approx(wanted, abs=1e-3 * np.abs(wanted).max())
    for i, path in enumerate(paths):
        assert found.points[0][i, len(path) :].isnan().all()
    assert found.points[0].shape == (18, max(map(len, paths)), components)
    assert found.converged[0].all()


@pytest.mark.parametrize(("start", "spread"), [(0.0, 1e-4), (1000.0, 1e-4), (1000.0, 1e-2)])
def test_components_far_smaller_than_the_way_to_them_or_their_offset_are_exact(start: float, spread: float) -> None:
    draw = torch.Generator().manual_seed(3)
    x = 3 + spread * torch.randn(60, 4, generator=draw) * torch.tensor([1.0, 0.5, 0.2, 0.1])
    layer = Equilibrium(FunctionCell(lambda z, x: 0.1 * z + x, (4,)), Picard(), Stop(rtol=1e-30, max_steps=12))

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, torch.full_like(x, start))

    found = trajectory(Started(), x)
    with record(iterates=True) as log, torch.no_grad():
        layer(x, torch.full_like(x, start))
    trace = log[0].trace
    assert trace is not None
    paths = [trace.path(i).double() for i in range(60)]
    wanted, shares = dense_components(torch.cat(paths), 2)
    got = np.concatenate([found.points[0][i, : len(path)].numpy() for i, path in enumerate(paths)])
    for column, true in zip(got.T, wanted.T, strict=True):
        assert column * np.sign(column @ true) == pytest.approx(true, abs=5e-3 * np.abs(true).max())
    assert found.explained.numpy() == pytest.approx(shares, rel=5e-3)


@settings(deadline=None, max_examples=10)
@given(norm=st.floats(0.1, 0.95), scale=st.floats(0.1, 10), solver=st.sampled_from([Picard(), Anderson(memory=2), Newton()]))
def test_lengths_are_those_of_the_paths_in_the_space_of_the_states(norm: float, scale: float, solver: Any) -> None:
    layer = opteq(norm, solver=solver)
    found = trajectory(layer, scale * X)
    wanted = [float(path.diff(dim=0).norm(dim=1).sum()) for path in paths_of(layer, scale * X)]
    assert found.lengths[0].tolist() == pytest.approx(wanted, rel=1e-5)
    mean, error = found.length[0]
    assert mean == pytest.approx(np.mean(wanted), rel=1e-5)
    assert error == pytest.approx(np.std(wanted, ddof=1) / math.sqrt(18), rel=1e-4)
    projected = found.points[0].diff(dim=1).norm(dim=2).nansum(dim=1)
    assert (projected <= found.lengths[0] * (1 + 1e-5)).all()


def test_separation_is_the_mean_silhouette_of_the_ends() -> None:
    layer = opteq()
    ends = torch.stack([path[-1] for path in paths_of(layer, X)])
    distances = torch.cdist(ends, ends)
    scores = []
    for i in range(18):
        members = [c == Y for c in range(3)]
        means = [distances[i, each].sum() / (each.sum() - each[i].long()) for each in members]
        own, other = means[int(Y[i])], min(mean for c, mean in enumerate(means) if c != Y[i])
        scores.append(float((other - own) / max(own, other)))
    assert trajectory(layer, X, Y).separation[0] == pytest.approx(np.mean(scores), rel=1e-4)


@pytest.mark.parametrize("labels", [None, torch.zeros(18, dtype=torch.long), torch.arange(18)])
def test_labels_that_tell_nothing_of_separation_give_nan(labels: Tensor | None) -> None:
    assert math.isnan(trajectory(opteq(), X, labels).separation[0])


def test_samples_that_fail_have_no_points_and_no_length() -> None:
    cell = FunctionCell(lambda z, x: x[:, :1] * z + x[:, 1:], (3,))
    rates = torch.tensor([0.1, 0.5, 3.0, 0.2, 0.99], dtype=f64)
    x = torch.cat([rates[:, None], torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=f64)], dim=1)
    x[3] = math.nan
    found = trajectory(Equilibrium(cell, Picard(), Stop(max_steps=20)), x, torch.tensor([0, 0, 1, 1, 1]))
    assert found.lengths[0].isfinite().tolist() == [True, True, False, False, True]
    assert found.points[0].isfinite().any(dim=2).any(dim=1).tolist() == [True, True, False, False, True]
    assert found.converged[0].tolist() == [True, True, False, False, False]
    assert found.length[0].mean == pytest.approx(float(found.lengths[0][[0, 1, 4]].mean()))
    assert set(found.columns()["sample"].tolist()) == {0, 1, 4}
    with pytest.raises(ValueError, match=r"samples that do not all diverge or meet NaN\. Got '2 that do' instead"):
        trajectory(Equilibrium(cell, Picard()), x[2:4])


def test_iterates_too_large_for_float32_are_left_out() -> None:
    cell = FunctionCell(lambda z, x: 0.5 * z + x, (4,))
    x = X[:4].clone()
    x[1] *= 1e39
    found = trajectory(Equilibrium(cell), x)
    assert found.lengths[0].isfinite().tolist() == [True, False, True, True]
    assert found.converged[0].all()


def test_iterates_that_do_not_move_have_no_variance_to_share() -> None:
    found = trajectory(Equilibrium(FunctionCell(lambda z, x: 0.5 * z, (4,))), X)
    assert found.explained.tolist() == [0, 0]
    assert found.lengths[0].tolist() == [0] * 18
    found.figure()


def test_one_sample_has_no_standard_error_and_a_stage_may_have_none_left() -> None:
    found = trajectory(opteq(), X[:1])
    assert math.isnan(found.length[0].error)
    lost = Equilibrium(FunctionCell(lambda z, x: 3 * z + x, (12,)), Picard())
    both = trajectory({"a": Equilibrium(FunctionCell(lambda z, x: 0.5 * z + x, (12,))), "b": lost}, X.repeat(1, 3))
    assert both.length[0].mean > 0
    assert math.isnan(both.length[1].mean)
    assert set(both.columns()["stage"].tolist()) == {"a"}
    both.figure()


def test_unrolled_networks_show_the_states_of_their_layers() -> None:
    found = trajectory(opteq(gradient=Unrolled(4)), X)
    assert found.points[0].isfinite().all()
    assert found.points[0].shape == (18, 5, 2)


def test_convolutional_states_are_flattened() -> None:
    torch.manual_seed(0)
    layer = Equilibrium(ConvOptEq(1, 3, 4), Picard())
    x = torch.randn(5, 1, 4, 4)
    found = trajectory(layer, x)
    wanted = [float(path.flatten(1).diff(dim=0).norm(dim=1).sum()) for path in paths_of(layer, x)]
    assert found.lengths[0].tolist() == pytest.approx(wanted, rel=1e-5)


# Stages and models


def test_stages_share_one_basis() -> None:
    before, after = opteq(0.3, solver=Picard()), opteq(0.9, solver=Picard())
    found = trajectory({"before": before, "after": after}, X, Y)
    assert found.stages == ("before", "after")
    every = [path for layer in (before, after) for path in paths_of(layer, X)]
    wanted, _ = dense_components(torch.cat(every), 2)
    got = np.concatenate([points[points.isfinite().all(dim=2)].numpy() for points in found.points])
    signs = np.sign((got * wanted).sum(axis=0))
    assert got * signs == pytest.approx(wanted, abs=1e-3 * np.abs(wanted).max())
    assert found.points[0][:, 0].numpy() == pytest.approx(found.points[1][:, 0].numpy(), abs=1e-6)  # both begin at zeros
    assert found.length[0].mean < found.length[1].mean


@pytest.mark.parametrize("kind", ["sequential", "classifier", "readout"])
def test_any_model_with_an_equilibrium_can_be_looked_at(kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module
    given: Callable[[Tensor], Tensor]
    if kind == "sequential":
        model, given = network(), lambda x: model[:3].eval()(x)  # type: ignore[index]
        layer = model[3]
    elif kind == "classifier":
        model = Classifier(nn.Linear(4, 4), opteq(), nn.Linear(12, 3)).double()
        layer, given = model.equilibrium, model.extractor
    else:
        model = Readout(GaussianDEQ(4, 12), stop=Stop(rtol=1e-3)).double()
        layer, given = Equilibrium(model.cell, stop=model.stop), lambda x: x
    found = trajectory(model, X)
    with torch.no_grad():
        wanted = trajectory(layer, given(X))
    assert torch.equal(found.lengths[0], wanted.lengths[0])
    assert torch.equal(found.points[0].nan_to_num(), wanted.points[0].nan_to_num())


def test_one_of_several_layers_is_chosen_by_its_name() -> None:
    model = nn.Sequential(opteq(), nn.Linear(12, 4).double(), opteq())
    with pytest.raises(ValueError, match=r"'layer' parameter of trajectory must be one of '0', '2'\. Got None instead"):
        trajectory(model, X)
    assert torch.equal(trajectory(model, X, layer="0").lengths[0], trajectory(opteq(), X).lengths[0])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": {}}, ValueError, "a model, or models by the names of their stages"),
        ({"model": {1: opteq()}}, ValueError, "a model, or models by the names of their stages"),
        ({"model": {"a": 3}}, TypeError, "'model' parameter of trajectory must be an nn.Module. Got 3"),
        ({"model": {"a": opteq(), "b": Equilibrium(GaussianDEQ(4, 5).double())}}, ValueError, r"states of one size. Got \[12, 5\]"),
        ({"x": [1.0]}, TypeError, "'x' parameter of trajectory must be a tensor"),
        ({"labels": [1, 2]}, TypeError, "a tensor of integers or None"),
        ({"labels": Y[:3]}, ValueError, r"18 integers, one a sample. Got 'torch.int64 \[3\]' instead"),
        ({"labels": Y.double()}, ValueError, "18 integers"),
        ({"components": 4}, ValueError, "2 or 3. Got 4"),
        ({"stage": 3}, ValueError, "names of their stages"),
        (
            {"model": Equilibrium(FunctionCell(lambda z, x: 0.5 * z, (1,)))},
            ValueError,
            "at most 1: there are 18 points of 1 numbers",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"model": opteq(), "x": X, **change}
    with pytest.raises(error, match=text):
        trajectory(**arguments)


def test_a_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(ImportError, match=r"pip install 'opteq\[train\]'"):
        trajectory(opteq(), X)


# Along a training


def train(model: nn.Module, steps: int, recorder: TrajectoryRecorder | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(1, steps + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
        if recorder is not None:
            recorder(k)


def test_training_is_the_same_with_and_without_a_recorder() -> None:
    model, alone = network(), network()
    model[1].eval()
    alone[1].eval()
    seen: list[Any] = []
    with torch.random.fork_rng():
        torch.manual_seed(3)
        train(alone, 4)
        expected = torch.rand(2)
        torch.manual_seed(3)
        recorder = TrajectoryRecorder(model, X, Y, every=1)
        with observe(lambda *call: seen.append(call)):
            recorder(1)
        assert seen == []
        train(model, 4, recorder)
        recorder.trajectory()
        assert torch.equal(torch.rand(2), expected)
    for (name, tensor), other in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)
    assert [part.training for part in model] == [True, False, True, True, True]


def test_a_recorder_keeps_the_stages_it_was_asked_for_and_the_model_as_it_is_now() -> None:
    model = network()
    copies = {0: copy.deepcopy(model)}
    recorder = TrajectoryRecorder(model, X, Y, at=(2, 3), components=3)
    for k in (1, 2, 3, 4):
        train(model, 1)
        recorder()
        copies[k] = copy.deepcopy(model)
    assert repr(recorder) == "TrajectoryRecorder(samples=18, k=4, recorded=[0, 2, 3])"
    found = recorder.trajectory()
    assert found.stages == ("step 0", "step 2", "step 3", "step 4")
    wanted = trajectory({f"step {k}": copies[k] for k in (0, 2, 3, 4)}, X, Y, components=3)
    for name in ("points", "lengths", "converged"):
        for got, other in zip(getattr(found, name), getattr(wanted, name), strict=True):
            assert torch.equal(got.nan_to_num(), other.nan_to_num())
    assert found.separation == wanted.separation
    assert recorder.trajectory().stages == found.stages


def test_a_recorder_looks_every_so_many_steps() -> None:
    recorder = TrajectoryRecorder(network(), X, every=2)
    for _ in range(5):
        recorder()
    assert list(recorder.records) == [0, 2, 4]


def test_a_step_made_again_forgets_what_came_after_it() -> None:
    recorder = TrajectoryRecorder(network(), X, every=1)
    for k in (1, 2, 3, 4, 2):
        recorder(k)
    assert list(recorder.records) == [0, 1, 2]
    assert recorder.trajectory().stages == ("step 0", "step 1", "step 2")


def test_a_step_made_again_is_looked_at_again_where_it_was_recorded_as_the_last() -> None:
    recorder = TrajectoryRecorder(network(), X)
    recorder(3)
    before = recorder.trajectory()
    with torch.no_grad():
        recorder.model[0].weight.mul_(2)
    recorder(3)
    assert list(recorder.records) == [0]
    assert not torch.equal(recorder.trajectory().lengths[1], before.lengths[1])


def test_a_recorder_is_a_callback_of_a_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classifier(nn.Linear(4, 4), OptEq(4, 8, 6), nn.Linear(8, 3))
    recorder = TrajectoryRecorder(model, X.float(), Y, at=(2,))
    config = TrainConfig(epochs=2, batch_size=9, lr=0.05)
    fit(model, (X.float(), Y), config=config, callbacks=[AfterStep(recorder)])
    assert recorder.trajectory().stages == ("step 0", "step 2", "step 4")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"at": (1, -1)}, ValueError, "'at' parameter of TrajectoryRecorder must be an integer >= 0. Got -1"),
        ({"every": 0}, ValueError, "'every' parameter of TrajectoryRecorder must be an integer >= 1"),
        ({"components": 1}, ValueError, "'components' parameter of TrajectoryRecorder must be 2 or 3"),
        (
            {"model": nn.Linear(4, 4).double()},
            ValueError,
            "'model' parameter of TrajectoryRecorder must be a model with an Equilibrium",
        ),
    ],
)
def test_bad_arguments_of_a_recorder_are_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"model": opteq(), "x": X, **change}
    with pytest.raises(error, match=text):
        TrajectoryRecorder(**arguments)


def test_a_recorder_counts_steps_from_one() -> None:
    with pytest.raises(ValueError, match=r"'k' parameter of TrajectoryRecorder must be an integer >= 1\. Got 0"):
        TrajectoryRecorder(opteq(), X)(0)


# Files and figures


@pytest.mark.parametrize("labels", [None, Y])
@pytest.mark.parametrize("components", [2, 3])
def test_the_columns_are_those_of_the_file(labels: Tensor | None, components: int, tmp_path: Path) -> None:
    found = trajectory({"before": opteq(0.3), "after": opteq(0.9)}, X, labels, components=components)
    columns = found.columns()
    assert list(columns) == ["stage", "sample", "label", "step", *["pc1", "pc2", "pc3"][:components]]
    assert set(columns["label"].tolist()) == ({-1} if labels is None else {0, 1, 2})
    with found.csv(tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(int(points[..., 0].isfinite().sum()) for points in found.points)
    assert list(dict.fromkeys(row["stage"] for row in rows)) == ["before", "after"]
    for row in rows[::7]:
        place = found.points[found.stages.index(row["stage"])][int(row["sample"]), int(row["step"])]
        assert [float(row[f"pc{i + 1}"]) for i in range(components)] == place.tolist()
        assert int(row["label"]) == (-1 if labels is None else int(labels[int(row["sample"])]))


def made(stages: int, labels: Tensor | None) -> Trajectory:
    """Paths of two steps, the second one missing for sample 0."""
    samples = 4 if labels is None else len(labels)
    points = torch.arange(samples * 3 * 2.0).view(samples, 3, 2)
    points[0, 2] = math.nan
    names = tuple(f"step {k}" for k in range(stages))
    lengths, converged = torch.ones(samples, dtype=f64), torch.arange(samples) > 0
    return Trajectory(
        names, (points,) * stages, (lengths,) * stages, (converged,) * stages, (0.5,) * stages, labels, torch.tensor([0.5, 0.25])
    )


@pytest.mark.parametrize(("stages", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3))])
def test_the_figure_has_a_panel_for_each_stage_on_shared_axes(stages: int, shape: tuple[int, int]) -> None:
    pytest.importorskip("matplotlib")
    figure = made(stages, torch.tensor([0, 0, 1, 1])).figure()
    assert len(figure.axes) == math.prod(shape)
    assert [axes.get_visible() for axes in figure.axes] == [True] * stages + [False] * (len(figure.axes) - stages)
    assert len({axes.get_xlim() + axes.get_ylim() for axes in figure.axes}) == 1
    assert [axes.get_xlabel() for axes in figure.axes[max(0, stages - shape[1]) : stages]] == ["PC 1 (50% of variance)"] * shape[1]
    assert figure.axes[0].get_ylabel() == "PC 2 (25% of variance)"
    assert figure.axes[0].get_title() == "step 0\nlength 1 ± 0, silhouette 0.50\n25.0% not converged"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["0", "1", "start"]


def test_paths_end_in_dots_of_the_colour_of_their_class() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = made(1, torch.tensor([0, 1, 1, 0])).figure().axes
    path, ends, *_, start = axes.lines
    assert ends.get_xydata().tolist() == [[2, 3], [22, 23]]  # sample 0 ends one step early
    assert ends.get_color() == path.get_color() == COLOURS[0]
    assert np.isnan(path.get_xydata()).any(axis=1).tolist() == [False, False, True, True, False, False, False, True]
    assert start.get_xydata().tolist() == [[0, 1], [6, 7], [12, 13], [18, 19]]


def test_without_labels_all_are_of_one_colour_and_beyond_ten_the_rarest_are_grey() -> None:
    pytest.importorskip("matplotlib")
    assert [text.get_text() for text in made(1, None).figure().legends[0].get_texts()] == ["end", "start"]
    many = made(1, torch.tensor([*range(12), *range(10)])).figure()
    assert [text.get_text() for text in many.legends[0].get_texts()] == ["others", *map(str, range(10)), "start"]


def test_the_files_of_a_trajectory_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = trajectory({"before": opteq(0.3), "after": opteq(0.9)}, X, Y, components=3)
    assert sorted(path.name for path in found.save(tmp_path)) == ["trajectory.csv", "trajectory.png", "trajectory.svg"]
