"""What a run depends on outside of its configuration."""

import os
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import torch


def environment() -> dict[str, Any]:
    """What a run depends on outside of its configuration, without names of hosts and users.

    Examples:
        >>> from opteq.runs import environment
        >>> sorted(environment())[:4]
        ['cpus', 'devices', 'git_dirty', 'git_revision']
    """
    revision, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "opteq": sys.modules["opteq"].__version__,  # an import would go up the layers
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git_revision": revision,
        "git_dirty": None if changes is None else bool(changes),
    }


def _git(*arguments: str) -> str | None:
    """What git says about the working directory; None where there is no git or no repository."""
    # A repository's own configuration may name a program as its file system monitor: never run that.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
