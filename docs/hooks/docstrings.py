"""Griffe extension: in docstrings, `<a, b>` and `z*` are mathematics, neither HTML nor emphasis.

Without it the page of the API loses them. Code, between backticks or after >>>, stays as it is.
"""

import re
from typing import Any

import griffe

CODE = re.compile(r"`+[^`]+`+|^[ \t]*>>>.*(?:\n[ \t]*\S.*)*", re.MULTILINE)
TAG = re.compile(r"<(?=[A-Za-z/!])")


def escaped(text: str) -> str:
    """The docstring as Markdown."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [prose(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, prose(text[end:])])


def prose(text: str) -> str:
    """What is no code."""
    return TAG.sub("&lt;", text.replace("*", r"\*"))


class Docstrings(griffe.Extension):
    """Escapes the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = escaped(obj.docstring.value)
