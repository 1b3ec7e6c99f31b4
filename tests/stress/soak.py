"""A long training with a checkpoint every few seconds: does memory grow, are files left open? `make soak` takes 30 minutes."""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import stress_page
import torch

import survivor
from conformance import write_verify
from opteq.training import Callback, fit

WARM = 0.2  # of the time, before memory is looked at
LIMIT = 1.0  # MB a minute


@dataclass(frozen=True)
class Soaked:
    """What was measured, once a second."""

    seconds: float
    steps: int
    checkpoints: int
    slope: float  # of the resident memory after warm-up, MB a minute
    grown: float  # MB, between the middle and the end of what was looked at
    handles: tuple[int, int]  # the fewest and the most open files

    @property
    def sound(self) -> bool:
        return self.slope < LIMIT and self.handles[0] == self.handles[1]


class _Enough(Exception):
    pass


class Watch(Callback):
    """Notes memory and open files once a second, and ends the training when its time is over and it has made enough steps."""

    def __init__(self, seconds: float, least: int) -> None:
        self.begun, self.seconds, self.least = time.monotonic(), seconds, least
        self.rows: list[tuple[float, float, int]] = []
        self.steps = 0

    def step(self, step: int) -> None:
        self.steps, now = step, time.monotonic() - self.begun
        if not self.rows or now - self.rows[-1][0] >= min(1.0, self.seconds / 20):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.rows.append((now, pages * resource.getpagesize() / 2**20, len(os.listdir("/proc/self/fd"))))
        if now > self.seconds and step >= self.least:
            raise _Enough


def steps_a_second(folder: Path) -> float:
    begun = time.monotonic()
    fit(survivor.make_model(), survivor.data(), survivor.data(), survivor.CONFIG, folder=folder, verbose=False)
    return 12 / (time.monotonic() - begun)


def soak(folder: Path, seconds: float, every: float = 5.0) -> Soaked:
    """Train for so long, with a checkpoint about every `every` seconds."""
    often = max(1, round(every * steps_a_second(folder / "first")))
    endless = {
        "epochs": 2**30,
        "patience": None,
        "schedule": "constant",
        "lr": 1e-6,
    }  # at 1e-3, ||W|| leaves its ball within the hour
    config = replace(survivor.CONFIG, checkpoint_every=often, log_every=often, **endless)
    watch, data = Watch(seconds, 4 * often), survivor.data()
    with suppress(_Enough):
        fit(survivor.make_model(), data, data, config, folder=folder / "run", callbacks=(watch,), verbose=False)
    rows = np.array([row for row in watch.rows if row[0] > WARM * seconds])
    slope = float(np.polyfit(rows[:, 0] / 60, rows[:, 1], 1)[0])
    half = len(rows) // 2
    grown = float(np.median(rows[half:, 1]) - np.median(rows[:half, 1]))
    handles = int(rows[:, 2].min()), int(rows[:, 2].max())
    return Soaked(float(rows[-1, 0]), watch.steps, watch.steps // often, slope, grown, handles)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), 60 * arguments.minutes)
    told = {**asdict(found), "limit": LIMIT, "sound": found.sound}
    print(json.dumps(told, indent=2))
    if arguments.minutes >= 30:
        write_verify("stress_soak", told)
        stress_page.write()
    return 0 if found.sound else 1


if __name__ == "__main__":
    sys.exit(main())
