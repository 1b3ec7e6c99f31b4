r"""MkDocs hook: `\|` in the code of a table is a pipe, as it is on code hosts; Python-Markdown leaves the backslash there."""

import re
from typing import Any

CELL = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """The page without these backslashes."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: code[0].replace(r"\|", "|"), cell[0]), content)
