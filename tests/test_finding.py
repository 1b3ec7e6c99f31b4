"""What every diagnostic gives: columns, figures as files, a short name of itself."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from opteq.diagnostics import Finding, TrajectoryRecorder, hessian_spectrum, landscape
from opteq.diagnostics.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Plain(Finding):
    """Two columns and a line."""

    name: ClassVar[str] = "plain"

    def columns(self) -> dict[str, np.ndarray]:
        return {"value": np.array([0.1, math.nan, math.inf]), "good": np.array([True, False, True])}

    def figure(self, width: float = 1.0) -> "Figure":
        with new_figure((2, 2)) as figure:
            figure.subplots().plot([0, 1], linewidth=width, label="a label")
        return figure


def test_a_file_holds_every_digit_and_flags_as_numbers(tmp_path: Path) -> None:
    with Plain().csv(tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["value", "good"], ["0.1", "1"], ["nan", "0"], ["inf", "1"]]


def test_a_finding_says_what_it_holds_in_a_line() -> None:
    assert repr(Plain()) == "Plain(3 rows of value, good)"


@pytest.mark.parametrize("name", ["a.svg", "a.pdf", "a.png", "a.SVG"])
def test_the_same_figure_is_the_same_file(tmp_path: Path, name: str) -> None:
    first = Plain().draw(tmp_path / name).read_bytes()
    assert b"Date" not in first
    assert Plain().draw(tmp_path / name).read_bytes() == first
    assert b"/Type3" not in first
    assert Plain().draw(tmp_path / name, Plain().figure(width=5.0)).read_bytes() != first


@pytest.mark.parametrize("name", ["a", "a.txt"])
def test_files_of_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"'path' parameter of draw must be a file name with the suffix .svg, .pdf or .png"):
        Plain().draw(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_made_and_holds_the_data_and_the_figure(tmp_path: Path) -> None:
    paths = Plain().save(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["plain.csv", "plain.svg", "plain.png"]
    assert all(path.stat().st_size for path in paths)


@pytest.mark.parametrize("look", [landscape, hessian_spectrum])
def test_data_in_place_of_a_loss_are_refused_with_what_to_give(look: object) -> None:
    data = (torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(TypeError, match=r"'loss' parameter of \w+ must be a function of the model .*data_loss\(x, y\)"):
        look(nn.Linear(3, 1), data)  # type: ignore[operator]


def test_the_steps_of_a_recorder_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"'at' parameter of TrajectoryRecorder must be a list of steps"):
        TrajectoryRecorder(nn.Linear(3, 1), torch.zeros(2, 3), at=10)  # type: ignore[arg-type]
