"""Texts from run folders, made safe for where they are shown."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from opteq.runs.files import read

__all__ = ["clean", "file_text", "for_legend", "for_plot", "short", "to_json"]

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # not allowed in HTML and XML


def clean(text: str) -> str:
    """The text without characters that no page may hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def file_text(path: Path, most: int) -> str:
    """The content of a file: a ValueError if it has more bytes, a RunError if it is no regular file: a link may lead anywhere."""
    if (size := path.lstat().st_size) > most:
        raise ValueError(f"{path} is too large to be shown: {size:,} bytes")
    return read(path).decode(errors="replace")


def short(text: str, most: int = 28) -> str:
    """The text; of a long one, its beginning and its end, by which names of runs differ."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) + 1 :]}"


def for_plot(text: str, width: int = 40, lines: int = 4) -> str:
    """The text for a label of plotly, which reads some HTML there: as it is, in lines that fit a phone."""
    text = " ".join(clean(text).split())
    parts = [text[at : at + width] for at in range(0, len(text), width)] or [""]
    return "<br>".join(escape(part, quote=False) for part in parts[:lines]) + ("…" if len(parts) > lines else "")


def for_legend(text: str) -> str:
    """The text for a legend of matplotlib, which leaves out what begins with an underscore."""
    return f"\N{ZERO WIDTH SPACE}{text}" if text.startswith("_") else text


def to_json(value: Any) -> str:
    """JSON for a script element: no character of it means anything to HTML; there are no NaN and no infinities in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})
