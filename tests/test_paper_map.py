"""The map from the papers to the code names what is there."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from opteq import experiments

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| where |")]
EXPERIMENT = "opteq.experiments."


def symbols(text: str) -> list[str]:
    return [name for name in re.findall(r"`(opteq(?:\.\w+)+)`", text) if not name.startswith(EXPERIMENT)]


def imported(name: str) -> Any:
    """The object of a dotted name, each part an attribute, or else a module to import."""
    parts = name.split(".")
    found: Any = import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            import_module(".".join(parts[:end]))
        found = getattr(found, part)
    return found


def test_every_row_has_its_four_columns_and_none_is_empty() -> None:
    assert len(ROWS) > 100
    for row in ROWS:
        columns = [column.strip() for column in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(columns) == 4, row
        assert all(columns), row
        assert symbols(columns[2]) or columns[2].startswith(("not implemented: ", "see ")), row
        assert "::test_" in columns[3] or EXPERIMENT in columns[3] or columns[3].startswith(("-", "none of ", "see ")), row


@pytest.mark.parametrize("name", sorted(set(symbols(PAGE))))
def test_a_symbol_can_be_imported_and_its_file_is_named_beside_it(name: str) -> None:
    found = imported(name)
    found = found.fget if isinstance(found, property) else found
    file = Path(inspect.getsourcefile(inspect.unwrap(found)) or "").relative_to(ROOT).as_posix()
    for row in ROWS:
        code = re.split(r"(?<!\\)\|", row)[3]
        if name in symbols(code) and not code.strip().startswith("not implemented"):
            assert f"`{file}`" in code, row


def test_every_file_exists() -> None:
    files = set(re.findall(r"`((?:src|tests)/[\w/]+\.py)", PAGE))
    assert len(files) > 50
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_every_test_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 100
    assert len(re.findall(r"::test_", PAGE)) == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", PAGE))
    text = {file: (ROOT / file).read_text() for file, _ in named}
    assert [f"{file}::{name}" for file, name in sorted(named) if f"def {name}(" not in text[file]] == []


def test_every_experiment_is_on_the_page_and_no_other() -> None:
    assert set(re.findall(r"`opteq\.experiments\.(\w+)`", PAGE)) == set(experiments.names())


def test_every_erratum_has_its_paper() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "errata.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\(errata\.md#([\w-]+)\)", PAGE)) == anchors
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == headings
