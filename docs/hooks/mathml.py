"""MkDocs hook: the formulas of a page, which pymdownx.arithmatex has marked, become MathML. Browsers need no script for it."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

BARS = re.compile('<mo(?: stretchy="false")?>(&#x0007C;|&#x02016;|&#x022C6;)</mo>')  # |z|, ||z|| and z*, not meant as relations
NAMES = re.compile("<mo>([A-Za-z]{2,})</mo>")  # max, prox
MARKED = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>([.,;:)]*)', re.DOTALL)


def mathml(latex: str, *, block: bool = False) -> str:
    r"""The formula as <math>; a ValueError where something in it is not known, such as \arg or an environment."""
    found = convert(latex, display="block" if block else "inline")
    if "\\" in found or "<mi>&</mi>" in found:
        raise ValueError(f"This formula cannot be written as MathML: {latex}")
    found = NAMES.sub(r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', found)
    return BARS.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', found)


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """The page with its formulas as MathML; an error names the page."""

    def replaced(match: re.Match[str]) -> str:
        tag, delimiter, latex, after = match.groups()  # what comes after it, such as a comma, stays on its line
        try:
            formula = mathml(html.unescape(latex).strip(), block=delimiter == "[")
        except Exception as error:
            raise ValueError(f"{page.file.src_path}: {error}") from error
        return f'<{tag} class="formula">{formula}{after}</{tag}>'

    return MARKED.sub(replaced, content)
