"""`opteq diagnose`: all findings of a run in its folder, with words."""

import csv
from pathlib import Path

import pytest
import torch

from opteq import cli, recipes
from opteq.gradients import Unrolled
from opteq.recipes import Data, Deep, FeedForward, Recipe, Solve
from opteq.runs import Run
from opteq.training import TrainConfig

SMALL = Data(limit=24, test_limit=8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs, whose checkpoints are all there."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    model = Deep(channels=2, hidden=(2,), pool=1, solve=Solve(rtol=1e-6))
    recipes.run(Recipe(SMALL, model, TrainConfig(epochs=3, batch_size=12, lr=1e-2)), folder, verbose=False)
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_stages_of_a_run_are_the_untrained_model_its_checkpoints_and_the_trained_one(trained: Path) -> None:
    stages, dataset = recipes.load_stages(trained)
    assert list(stages) == ["before", "step 2", "step 4", "after"]
    assert not any(model.training for model in stages.values())
    untrained = recipes.build(Recipe.of_run(trained), dataset).state_dict()
    after = recipes.load_model(trained)[0].state_dict()
    step = Run.read(trained).load(4).tensors
    for name, tensor in stages["before"].state_dict().items():
        torch.testing.assert_close(tensor, untrained[name], rtol=0, atol=0)
        torch.testing.assert_close(stages["after"].state_dict()[name], after[name], rtol=0, atol=0)
        torch.testing.assert_close(stages["step 4"].state_dict()[name], step[f"model.{name}"], rtol=0, atol=0)
    assert any(not torch.equal(tensor, step[f"model.{name}"]) for name, tensor in after.items())


def test_every_stage_is_in_the_mode_of_the_training(tmp_path: Path) -> None:
    model = Deep(channels=2, hidden=(2,), pool=1)
    recipes.run(Recipe(SMALL, model, TrainConfig(epochs=1, mode="unrolled", unroll=3)), tmp_path / "run", verbose=False)
    stages, _ = recipes.load_stages(tmp_path / "run")
    assert [stage.equilibrium.gradient for stage in stages.values()] == [Unrolled(3)] * 2


def test_every_finding_is_written_and_put_into_words(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(trained), "--samples", "4", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("curves", "residuals", "trajectory", "jacobian", "hessian") for kind in ("csv", "svg", "png")
    }
    assert "curves: loss" in said
    assert "residuals: share solved to 1e-06 by" in said
    largest = float(rows(tmp_path / "hessian.csv")[0]["eigenvalue"])
    assert f"hessian: largest eigenvalues {largest:.4g}, " in said
    radii = [abs(complex(float(r["real"]), float(r["imag"]))) for r in rows(tmp_path / "jacobian.csv") if r["index"] == "0"]
    assert len(radii) == 4
    assert f"{max(radii):.3g} at most" in said
    assert list(dict.fromkeys(row["stage"] for row in rows(tmp_path / "trajectory.csv"))) == ["before", "step 2", "step 4", "after"]
    assert all(f" {stage}" in said for stage in ("before", "step 2", "after"))


def test_of_a_run_that_is_not_finished_the_checkpoint_is_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = trained / "model.safetensors", trained / "metrics.jsonl"
    kept = {path: path.read_bytes() for path in (model, rows)}
    look = [str(trained), "--samples", "4", "--out", str(trained / "out")]
    try:
        assert cli.main(["diagnose", *look, "--only", "jacobian"]) == 0
        assert capsys.readouterr().err == ""
        model.unlink()
        for command in (["diagnose", *look, "--only", "jacobian"], ["landscape", *look, "--steps", "3", "--dims", "1"]):
            assert cli.main(command) == 0
            assert f"{trained} has no trained model yet: this is its checkpoint of step 6" in capsys.readouterr().err
        rows.unlink()
        assert cli.main(["diagnose", *look, "--only", "curves"]) == 0
        assert "curves: left out. Nothing has been measured yet." in capsys.readouterr().out
        assert not (trained / "out" / "curves.csv").exists()
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_a_network_without_an_equilibrium_is_told_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "plain"
    recipes.run(Recipe(SMALL, FeedForward(channels=2), TrainConfig(epochs=1)), folder, verbose=False)
    assert cli.main(["diagnose", str(folder), "--samples", "4", "--only", "residuals", "hessian"]) == 0
    said = capsys.readouterr().out
    assert "residuals: left out. " in said
    assert not (folder / "residuals.csv").exists()
    assert (folder / "hessian.csv").exists()


def test_a_gradient_that_is_none_leaves_out_the_hessian_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "phantom"
    model = Deep(channels=2, hidden=(2,), pool=1, solve=Solve(gradient="phantom"))
    recipes.run(Recipe(SMALL, model, TrainConfig(epochs=1)), folder, verbose=False)
    assert cli.main(["diagnose", str(folder), "--samples", "4", "--only", "hessian", "trajectory"]) == 0
    assert "hessian: left out. Phantom only approximates the gradient" in capsys.readouterr().out
    stages = dict.fromkeys(row["stage"] for row in rows(folder / "trajectory.csv"))
    assert list(stages) == ["before", "after"], "the checkpoint of step 0 is there, but no other stage than before"
    assert Run.read(folder).steps() == [0, 1]


def test_bad_options_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(trained), "--samples", "1"]) == 2
    assert "--samples must be at least 2" in capsys.readouterr().err
    assert cli.main(["diagnose", str(trained), "--only"]) == 2
    assert "--only needs at least one of curves, " in capsys.readouterr().err
    assert cli.main(["landscape", str(trained), "--samples", "0"]) == 2
    assert "--samples must be at least 1" in capsys.readouterr().err
    assert cli.main(["landscape", str(trained), "--level", "nan"]) == 2
    assert "--level must be a number" in capsys.readouterr().err
    assert cli.main(["diagnose", "none"]) == 2
    assert "none holds no run" in capsys.readouterr().err
