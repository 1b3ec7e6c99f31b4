r"""MkDocs hook: code and sentences in tables.

`\|` is a pipe, as it is on code hosts; Python-Markdown leaves the backslash there. Long names may break after a dot, a slash or an
underscore, and nowhere else. Cells with a sentence in them are marked, so that they are not squeezed to a word a line.
"""

import re
from typing import Any

CELL = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
BREAK = re.compile(r"(?<=[a-z:][./_:])(?=[A-Za-z]{3})")
NO_PROSE = re.compile(r"<(math|code).*?</\1>|<[^>]*>", re.DOTALL)
LONG = 30  # characters


def on_page_content(content: str, **_: Any) -> str:
    """The page without these backslashes, with these breaks and marks."""
    return CELL.sub(lambda cell: marked(CODE.sub(lambda code: BREAK.sub("<wbr>", code[0].replace(r"\|", "|")), cell[0])), content)


def marked(cell: str) -> str:
    """The cell, in a class of its own if it has a sentence."""
    return cell[:3] + ' class="long"' + cell[3:] if cell[2] == "d" and len(NO_PROSE.sub("", cell)) > LONG else cell
