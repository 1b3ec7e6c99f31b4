"""What the workers of test_grids.py run. They import this module, so it imports nothing heavy."""

import os
import signal
import sys
import time
from pathlib import Path


def wait_for(path, seconds=300):
    """Wait until the file is there and written, not only made; a test that went wrong must not leave a worker behind."""
    end = time.monotonic() + seconds
    while not Path(path).exists() or not Path(path).stat().st_size:
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.02)


def product(settings):
    """a * b; counts its runs in a file, if one is given."""
    if "log" in settings:
        with open(settings["log"], "a") as log:
            log.write(f"{settings['a']}{settings['b']}\n")
    return {"product": settings["a"] * settings["b"]}


def misbehave(settings):
    """Do what the settings say, and return."""
    match settings["do"]:
        case "raise":
            raise LookupError("two\nlines")
        case "exit":
            sys.exit("gone")
        case "interrupt":
            raise KeyboardInterrupt
        case "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        case "kill always":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill once":
            if not Path(settings["mark"]).exists():
                Path(settings["mark"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
    return {"done": settings["do"], "pid": os.getpid()}


def returns(settings):
    """Something that is no JSON object."""
    return {
        "complex": {"deep": [1, 1j]},
        "set": {1},
        "keys": {1: 2},
        "list": [1],
        "nan": {"x": [float("nan"), -float("inf"), (1, 2.5)]},
    }[settings["kind"]]


def rendezvous(settings):
    """Say who runs this cell, then wait for the file `go`, if one is given."""
    folder = Path(settings["folder"])
    with open(folder / f"started-{settings['name']}", "a") as started:
        started.write(f"{os.getpid()}\n")
    if settings["waits"]:
        wait_for(folder / "go")
    return {"name": settings["name"], "pid": os.getpid(), "threads": threads(), "limit": os.environ.get("OMP_NUM_THREADS")}


def threads():
    """The threads of torch, which run_grid has imported here."""
    return sys.modules["torch"].get_num_threads()


class Holder:
    def method(self, settings):
        return settings
