r"""MkDocs hook: code in tables.

`\|` is a pipe, as it is on code hosts; Python-Markdown leaves the backslash there. Long names may break after a dot, a slash or an
underscore, and nowhere else.
"""

import re
from typing import Any

CELL = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
BREAK = re.compile(r"(?<=[a-z:][./_:])(?=[A-Za-z]{3})")


def on_page_content(content: str, **_: Any) -> str:
    """The page without these backslashes, and with these breaks."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: BREAK.sub("<wbr>", code[0].replace(r"\|", "|")), cell[0]), content)
