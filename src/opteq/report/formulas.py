"""Formulas for a page without a network: LaTeX drawn as paths in the page's colour, by matplotlib."""

import re
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.path import Path

__all__ = ["drawn", "translated"]

LONGEST, GROUPS, LINES = 400, 30, 12  # characters and groups of a line, and lines: the parser is recursive
SIZE = 100.0  # of the letters, in the units of the drawing
_NUMBER: Final = re.compile(r"\\[td]?frac\s*(\{[^{}]*\}|\\[a-zA-Z]+|\w)\s*(\{[^{}]*\}|\\[a-zA-Z]+|\w)")
_BREAK: Final = re.compile(r"(?<=[;,])\s*\\quad|;\s*")


def drawn(latex: str) -> list[str]:
    r"""The formula as SVG elements, one for each line; broken at ";" and \quad, so that a phone can show it.

    No line for what cannot be read: then the plain text must do. The elements are hidden from who cannot see them.
    """
    lines = [part.strip() for part in _BREAK.split(latex) if part and part.strip(" ;")]
    if len(lines) > LINES:
        return []
    found = [_line(line) for line in lines]
    return [line for line in found if line] if all(found) else []


def translated(latex: str) -> str:
    r"""LaTeX in the words of matplotlib, which wants braces: \tfrac12 is \frac{1}{2}, \mathbf 1 is \mathbf{1}."""
    latex = _NUMBER.sub(lambda match: rf"\frac{{{match[1].strip('{}')}}}{{{match[2].strip('{}')}}}", latex)
    latex = re.sub(r"\\(mathbf|mathrm)\s+(\w)", r"\\\1{\2}", latex)
    return re.sub(r"\\([gl])e(?![a-zA-Z])", r"\\\1eq", latex)


def _line(latex: str) -> str:
    """One line, or nothing: the formula may be no formula at all."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if (
        len(latex) > LONGEST
        or len(re.findall(r"\{|\\left", latex)) > GROUPS
        or not latex.isprintable()
        or "$" in latex
        or latex.endswith("\\")
    ):
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            path = TextPath((0, 0), f"${translated(latex)}$", size=SIZE, prop=FontProperties(math_fontfamily="cm"))
        except Exception:  # whatever a parser may raise that was not made for all that a run may say
            return ""
    return _svg(path) if len(path.vertices) else ""


def _svg(path: "Path") -> str:
    box = path.get_extents()
    x, y, width, height = box.x0 - 2, -box.y1 - 2, box.width + 4, box.height + 4
    parts = []
    for points, code in path.iter_segments(simplify=False):
        numbers = " ".join(f"{value if at % 2 == 0 else -value:.0f}" for at, value in enumerate(points.tolist()))
        parts.append(f"{_LETTERS[int(code)]}{'' if code == 79 else numbers}")
    size = f'viewBox="{x:.0f} {y:.0f} {width:.0f} {height:.0f}" style="width: {width / SIZE:.2f}em"'
    return f'<svg aria-hidden="true" {size}><path d="{"".join(parts)}"/></svg>'


_LETTERS: Final = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}
