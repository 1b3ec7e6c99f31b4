r"""MkDocs hook: code and sentences in tables.

`\|` is a pipe, as it is on code hosts; Python-Markdown leaves the backslash there. Long names may break after a dot, a slash or an
underscore, and nowhere else. Cells with a sentence or many names in them are marked, so that they are not squeezed to a
word a line.
"""

import re
from typing import Any

CELL = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
BREAK = re.compile(r"(?<=[a-z:][./_:])(?=[A-Za-z]{3})")
NO_PROSE = re.compile(r"<(math|code).*?</\1>|<[^>]*>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
LONG, LONGER = 30, 100  # characters: of prose; of prose and code


def on_page_content(content: str, **_: Any) -> str:
    """The page without these backslashes, with these breaks and marks."""
    return CELL.sub(lambda cell: marked(CODE.sub(lambda code: BREAK.sub("<wbr>", code[0].replace(r"\|", "|")), cell[0])), content)


def marked(cell: str) -> str:
    """The cell, in a class of its own if it has a sentence or many names."""
    longer = len(TAG.sub("", cell)) > LONGER
    if cell[2] == "h" or not (longer or len(NO_PROSE.sub("", cell)) > LONG):
        return cell
    return f'{cell[:3]} class="{"longer" if longer else "long"}"{cell[3:]}'
