"""`opteq bench`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import opteq

__all__ = ["bench"]


def bench(arguments: Sequence[str]) -> int:
    """Run benchmarks/run.py of the source checkout with these arguments; --help shows its own options."""
    script = Path(opteq.__file__).parents[2] / "benchmarks" / "run.py"
    if not script.is_file():
        raise FileNotFoundError(
            f"the benchmarks are not part of an installed package ({script} is not there): clone the repository, and there "
            "pip install -e '.[dev]'"
        )
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode
