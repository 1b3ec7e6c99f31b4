"""Draw the figures of diagnostics.md, by running its own code: python docs/figures/make_diagnostics.py [FOLDER]."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = ("residuals", "trajectory", "landscape", "curves")


def main(folder: Path) -> None:
    """Run the blocks of the page one after the other, and keep what they have drawn."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (HERE.parent / "diagnostics.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    folder = folder.resolve()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        names: dict[str, object] = {}
        for block in blocks:
            exec(compile(block, "diagnostics.md", "exec"), names)
        for name in FIGURES:
            shutil.copy(f"{name}.svg", folder / f"diagnostics_{name}.svg")
        os.chdir(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
