"""Mutated run folders, configurations, checkpoints, estimators, grids and landscapes: what was written, or a clear error."""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutations import json_bytes, mutated, mutated_json
from torch import nn

import grid_work
import report_runs
from opteq.diagnostics import landscape
from opteq.estimators import EquilibriumRegressor
from opteq.grids import run_grid
from opteq.recipes import Recipe, RecipeError
from opteq.report.page import render
from opteq.report.reading import read_all
from opteq.runs import Checkpoint, Run, RunError, RunWarning, provenance

pytestmark = pytest.mark.stress


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(provenance, "_git", lambda *_: None)


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """The file with other content, and then as it was; a failure says what it was."""
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    except BaseException as error:
        error.add_note(f"{path.name}: {content[:2000]!r}")
        raise
    finally:
        path.write_bytes(whole)


def check_clear(error: Exception | Warning, folder: Path) -> None:
    """One line, not too long, that names the file."""
    text = str(error)
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 1000 + 2 * len(str(folder))


MODEL = {"W": torch.linspace(-1, 1, 12).reshape(3, 4), "b": torch.ones(3, dtype=torch.float64)}


def check_model(folder: Path) -> None:
    """The weights exactly, or an error."""
    found = Run.read(folder).read_tensors("model.safetensors")
    assert found.keys() == MODEL.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in MODEL.items())


def made_run(folder: Path) -> list[Checkpoint]:
    """A run with two checkpoints, metrics, a result and a model."""
    kept = []
    with Run.create(folder, {"lr": 0.1, "widths": [3, 4], "inf": float("inf")}) as run:
        for step in (1, 2):
            run.log({"kind": "step", "step": step, "loss": 1 / step})
            tensors = {"model.W": torch.randn(3, 4), "n": torch.tensor(step)}
            kept.append(Checkpoint(step, tensors, {"step": step, "nan": float("nan"), "list": [1, 2.5, None]}))
            run.save(kept[-1])
        run.write("result.json", {"steps": 2})
        run.write_tensors("model.safetensors", MODEL)
    return kept


def same(one: Checkpoint, other: Checkpoint) -> bool:
    tensors = [list(c.tensors.items()) for c in (one, other)]
    return repr(one.state) == repr(other.state) and all(
        a == b and torch.equal(x, y) for (a, x), (b, y) in zip(*tensors, strict=True)
    )


def check_checkpoint(folder: Path, kept: list[Checkpoint]) -> None:
    """The newest sound checkpoint, exactly; every refusal is told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = Run.read(folder).latest()
        except RunError as error:
            check_clear(error, folder)
            return
    for warning in told:
        assert isinstance(warning.message, RunWarning)
        check_clear(warning.message, folder)
    assert found is not None
    assert same(found, kept[found.step - 1])
    assert found.step == 2 or told  # an older one only with a reason


READERS: list[Callable[[Path], object]] = [
    lambda folder: Run.read(folder).metrics(),
    lambda folder: Run.read(folder).steps(),
    lambda folder: Run.read(folder).read_json("result.json"),
    lambda folder: Run.read(folder).read_json("environment.json"),
    lambda folder: read_all([folder]),
    check_model,
]


def test_files_of_a_run(tmp_path, amount, tally):
    folder, draw = tmp_path / "run", random.Random(1)
    kept, count = made_run(folder), amount(40, 1500)
    for _ in range(count):
        path = draw.choice([p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "run.lock"])
        with changed(path, mutated(path.read_bytes(), draw)):
            check_checkpoint(folder, kept)
            for read in READERS:
                try:
                    read(folder)
                except RunError as error:
                    check_clear(error, folder)
    check_checkpoint(folder, kept)
    tally("mutated files", count)


def test_a_run_whose_files_are_spoilt_still_opens_or_says_why(tmp_path, amount, tally):
    """For writing: what is tidied up is never a good checkpoint."""
    draw, count = random.Random(2), amount(5, 200)
    kept = made_run(tmp_path / "whole")
    for i in range(count):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", folder)
        path = draw.choice([p for p in sorted(folder.rglob("*")) if p.is_file()])
        path.write_bytes(mutated(path.read_bytes(), draw))
        try:
            Run.open(folder).close()
        except RunError as error:
            check_clear(error, folder)
        check_checkpoint(folder, kept)
        shutil.rmtree(folder)
    tally("mutated files", count)


@pytest.mark.skipif(not os.environ.get("OPTEQ_STRESS"), reason="seconds for each page")
def test_pages_of_spoilt_runs(tmp_path, amount, tally):
    folder, draw = report_runs.trained(tmp_path / "run", steps=40), random.Random(3)
    files, count = [p for p in sorted(folder.iterdir()) if p.suffix in (".json", ".jsonl", ".csv", ".txt")], amount(1, 25)
    for _ in range(count):
        path = draw.choice(files)
        content = mutated(path.read_bytes(), draw)
        if path.suffix == ".json" and draw.random() < 0.5:
            content = json_bytes(mutated_json(json.loads(path.read_bytes()), draw))
        with changed(path, content):
            try:
                assert render(read_all([folder])).startswith("<!DOCTYPE html>")
            except RunError as error:
                check_clear(error, folder)
    tally("mutated files", count)


def test_configurations(tmp_path, amount, tally):
    draw, count, path = random.Random(4), amount(60, 1500), tmp_path / "recipe.json"
    whole = Recipe().to_json()
    for _ in range(count):
        value = mutated_json(whole, draw)
        path.write_bytes(json_bytes(value) if draw.random() < 0.8 else mutated(json_bytes(whole), draw))
        try:
            recipe = Recipe.read(path)
        except RecipeError as error:
            check_clear(error, tmp_path)
        else:
            assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    tally("mutated files", count)


def test_estimators(tmp_path, amount, tally):
    draw, count, path = random.Random(5), amount(6, 400), tmp_path / "model.opteq"
    X = np.random.default_rng(0).standard_normal((20, 3))
    fitted = EquilibriumRegressor(width=4, max_iter=1, random_state=0).fit(X, X[:, 0])
    fitted.save(path)
    wanted, whole = fitted.predict(X), path.read_bytes()
    for _ in range(count):
        with changed(path, mutated(whole, draw)):
            try:
                assert np.array_equal(EquilibriumRegressor.load(path).predict(X), wanted)
            except ValueError as error:
                check_clear(error, path)
    tally("mutated files", count)


def surface(file: Path) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return landscape(model, lambda m: m.weight.square().sum(), steps=4, file=file).loss


def test_landscape_files(tmp_path, amount, tally):
    draw, count, file = random.Random(6), amount(20, 600), tmp_path / "grid.jsonl"
    wanted, whole = surface(file), file.read_bytes()
    for _ in range(count):
        file.write_bytes(mutated(whole, draw))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunWarning)
            try:
                assert torch.equal(surface(file), wanted)
            except RunError as error:
                check_clear(error, tmp_path)
    tally("mutated files", count)


def grid_results(folder: Path) -> dict[str, Any]:
    cells = {name: {"a": a, "b": 3} for name, a in (("one", 1), ("two", 2))}
    with ThreadPoolExecutor(1) as executor:
        return {name: outcome.result for name, outcome in run_grid(grid_work.product, cells, folder, executor=executor).items()}


def grid_fuzz(tmp_path: Path, count: int, change: Callable[[bytes, random.Random], bytes]) -> None:
    draw, wanted = random.Random(7), grid_results(tmp_path)
    assert wanted == {"one": {"product": 3}, "two": {"product": 6}}
    path = tmp_path / "cells" / "one.json"
    whole = path.read_bytes()
    for _ in range(count):
        with changed(path, change(whole, draw)):
            assert grid_results(tmp_path) == wanted


def test_grid_cells_that_are_torn_or_of_something_else_are_run_again(tmp_path, amount, tally):
    count = amount(10, 300)

    def torn(whole: bytes, draw: random.Random) -> bytes:
        return draw.choice([whole[: draw.randrange(len(whole) - 1)], draw.randbytes(50), b"{}", b"[1]", b"null"])

    grid_fuzz(tmp_path, count, torn)
    tally("mutated files", count)


def test_grid_cells_with_a_digit_changed_are_run_again(tmp_path):
    grid_fuzz(tmp_path, 1, lambda whole, draw: whole.replace(b'"product": 3', b'"product": 8'))


def test_a_trained_model_with_any_byte_changed_is_refused(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        run.write_tensors("model.safetensors", {"W": torch.ones(100)})
        path = run.folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(RunError):
            run.read_tensors("model.safetensors")
