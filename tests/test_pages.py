"""The pages for users: every Python block runs, in order, and prints what the page shows."""

import math
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?%?(?![\w])")


def agree(shown: str, printed: str) -> bool:
    """The same words; numbers within a tenth, or 2 evaluations: another processor rounds otherwise, and takes another step."""
    words = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    numbers = [[float(found.rstrip("%")) for found in NUMBER.findall(text)] for text in (shown, printed)]
    if words[0] != words[1] or len(numbers[0]) != len(numbers[1]):
        return False
    return all(math.isclose(a, b, rel_tol=0.1, abs_tol=2 if a > 2 and a == int(a) else 0) for a, b in zip(*numbers, strict=True))


@pytest.mark.parametrize("page", ["cells.md", "choose.md", "migration.md", "faq.md"])
def test_a_page_runs_and_prints_what_it_shows(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed, checked = "", 0
    for kind, text in BLOCK.findall((DOCS / page).read_text()):
        if kind == "python":
            exec(compile(text, page, "exec"), names)
            printed = capsys.readouterr().out
        else:
            assert agree(text, printed), f"{page} shows\n{text}\nbut this was printed:\n{printed}"
            checked += 1
    assert checked >= 3


def test_outputs_agree_up_to_rounding_only():
    assert agree("Anderson 47  0.31 CONVERGED", "Anderson  46 0.312 CONVERGED")
    assert not agree("Anderson 47", "Anderson 60")
    assert not agree("Anderson 1 CONVERGED", "Anderson 2 CONVERGED")
    assert not agree("Anderson 47 CONVERGED", "Anderson 47 MAX_STEPS")
    assert not agree("error 1e-06", "error 1e-03")
