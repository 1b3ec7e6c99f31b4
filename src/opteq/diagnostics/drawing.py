"""How findings draw themselves, with matplotlib: one style for all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opteq.checks import invalid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "FAILED", "new_figure", "save"]

# told apart by all eyes
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255", "#44AA99", "#999933")
FAILED = "#D55E00"
STYLE: Final[dict[Any, Any]] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.0,
    "lines.linewidth": 1.3,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.7,
    "pdf.fonttype": 42,  # fonts that journals accept
    "svg.fonttype": "none",
    "svg.hashsalt": "opteq",  # the same file at every run
    "savefig.dpi": 200,
}


# by suffix: what keeps the date out, which does not matter, and where a text about the figure goes
_METADATA: Final[dict[str, tuple[dict[str, Any], str]]] = {
    ".svg": ({"Date": None}, "Description"),
    ".pdf": ({"CreationDate": None}, "Subject"),
    ".png": ({}, "Description"),
}


@contextmanager
def new_figure(size: tuple[float, float]) -> "Iterator[Figure]":
    """A figure of so many inches in the style of all; what is drawn on it inside has it, too. Needs matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install 'opteq[report]'.") from error
    with rc_context(STYLE):
        yield Figure(figsize=size, layout="constrained")


def save(figure: "Figure", path: Path, about: str | None = None) -> Path:
    """The figure as a file, the same at every run; `about` is a text that the file carries unseen."""
    from matplotlib import rc_context

    kind = path.suffix.lower()
    if kind not in _METADATA:
        raise ValueError(invalid("draw", "path", "a file name with the suffix .svg, .pdf or .png", str(path)))
    metadata, key = _METADATA[kind]
    with rc_context(STYLE):
        figure.savefig(path, metadata=metadata if about is None else metadata | {key: about})
    return path
