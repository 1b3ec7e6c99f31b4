"""MkDocs hook: what stays on one line, and where long names may break.

Numbers such as 1e-4, 3 x 32 x 32, (2.49-2.66) and 2.1 ± 0.1, values such as m = 64, and words with hyphens in inline code and in
commands, such as --data.root, do not break. Names there that a telephone has no room for may break after a dot, a slash or an
underscore.
"""

import re
from typing import Any

VALUE = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
NUMBER = "|".join([
    rf"[+-]?{VALUE} ± {VALUE}",
    rf"\({VALUE}-{VALUE}\)",  # a range
    rf"{VALUE}(?: [x+] {VALUE})+",  # a size, or a sum
    rf"\b[A-Za-z]{{1,5}} = -?{VALUE}",
    r"-?\d[\d.]*e-\d+",
])  # fmt: skip
PART = re.compile(
    r'<div class="language-console[^>]*>(?P<console>.*?</pre>)|'
    rf"<(?P<left>pre|math|svg)\b.*?</(?P=left)>|<code>(?P<code>[^<]*)</code>|<[^>]*>|(?P<number>{NUMBER})",
    re.DOTALL,
)
WORD = re.compile(r"<[^>]*>|[^\s<>]+")
BREAK = re.compile(r"(?<=\w{3}[./_])(?=[A-Za-z]{3})")
WIDE = 37  # letters of code that fit into a line of a telephone


def on_page_content(content: str, **_: Any) -> str:
    """The page with these marks and breaks; blocks of code but for commands, and formulas, stay as they are."""

    def part(found: re.Match[str]) -> str:
        if found["console"] or found["code"]:
            return WORD.sub(word, found[0])
        return whole(found[0]) if found["number"] else found[0]

    return PART.sub(part, content)


def word(found: re.Match[str]) -> str:
    """A word of code, or a tag."""
    if found[0][0] == "<":
        return found[0]
    if len(found[0]) > WIDE:
        return BREAK.sub("<wbr>", found[0])
    return whole(found[0]) if "-" in found[0][:-1] else found[0]


def whole(text: str) -> str:
    """The text, on one line."""
    return f'<span class="whole">{text}</span>'
