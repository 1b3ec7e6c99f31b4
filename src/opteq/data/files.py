"""Where the files of a data set are looked for, and whether they are the published ones."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["Layout", "check_md5", "locate", "md5", "optional", "present", "root_folder"]


@dataclass(frozen=True)
class Layout:
    """The files (or folders) that must all be in one of some folders under the root; with `packed`, each plain or as .gz."""

    folders: tuple[str, ...]
    files: tuple[str, ...]
    packed: bool = False

    def place(self, root: Path, itself: bool) -> tuple[Path, list[str]]:
        """The folder that has most of the files, the first one for equal numbers, and which files it lacks.

        `itself`: the root may be that folder, too.
        """
        places = [*(root / folder for folder in self.folders), *[root] * itself]
        lacking = [[name for name in self.files if present(place, name, self.packed) is None] for place in places]
        best = min(range(len(places)), key=lambda i: len(lacking[i]))
        return places[best], lacking[best]


def root_folder(root: str | Path | None) -> Path:
    """The argument, else the environment variable OPTEQ_DATA, else ./data."""
    return Path(root if root is not None else os.environ.get("OPTEQ_DATA") or "data").expanduser()


def present(folder: Path, name: str, packed: bool) -> Path | None:
    """The path of a file that is there, plain or, if `packed`, as .gz."""
    paths = [folder / name, folder / f"{name}.gz"]
    return next((path for path in paths[: 1 + packed] if path.exists()), None)


def locate(layouts: Sequence[Layout], root: Path, itself: bool) -> Path | None:
    """The folder with all the files of the first layout that is complete."""
    found = (layout.place(root, itself) for layout in layouts)
    return next((folder for folder, lacking in found if not lacking), None)


def md5(path: Path) -> str:
    """The MD5 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def check_md5(path: Path, published: dict[str, str]) -> None:
    """Raise ValueError unless the file has its published MD5; a file that has none passes."""
    expected = published.get(path.name)
    if expected is None:
        return
    found = md5(path)
    if found != expected:
        raise ValueError(
            f"{path} is not the published file: its MD5 must be {expected}. Got {found} instead. "
            "Fetch it again, or load a subset or a copy of your own with verify=False."
        )


def optional(module: str, package: str) -> Any:
    """A module of an optional dependency, or an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"This data set needs {package}: pip install 'opteq[train]'") from error
