r"""MkDocs hook: code and sentences in tables.

`\|` is a pipe, as it is on code hosts; Python-Markdown leaves the backslash there. Long names (20 letters) may break after a dot, a
slash or an underscore, and nowhere else. Cells with a sentence or many names in them are marked, so that they are not squeezed to a
word a line.
"""

import re
from typing import Any

CELL = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
NAME = re.compile(r"[^\s<>]{20,}")
BREAK = re.compile(r"(?<=\w{3}[./_]|.[a-z:]::)(?=[A-Za-z]{3})")
NO_PROSE = re.compile(r"<(math|code).*?</\1>|<[^>]*>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
LONG, LONGER = 30, 100  # characters: of prose; of prose and code


def on_page_content(content: str, **_: Any) -> str:
    """The page without these backslashes, with these breaks and marks."""

    def cell(found: re.Match[str]) -> str:
        return marked(CODE.sub(joints, found[0]))

    return CELL.sub(cell, content)


def joints(code: re.Match[str]) -> str:
    """The code with its pipes, and with breaks in its long names."""
    return NAME.sub(lambda name: BREAK.sub("<wbr>", name[0]), code[0].replace(r"\|", "|"))


def marked(cell: str) -> str:
    """The cell, in a class of its own if it has a sentence or many names."""
    longer = len(TAG.sub("", cell)) > LONGER
    if cell[2] == "h" or not (longer or len(NO_PROSE.sub("", cell)) > LONG):
        return cell
    return f'{cell[:3]} class="{"longer" if longer else "long"}"{cell[3:]}'
