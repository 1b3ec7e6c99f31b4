"""The metrics of a run: a file of JSON lines."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from opteq.runs.files import opened, read, sync, write_atomic
from opteq.runs.formats import dumps, encode


class Metrics:
    """Rows, one line each. A kill can tear the last line only; a line that holds no JSON object is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row at once, or nothing of it. NaN and infinity become null."""
        line = (dumps(encode(row, "row", lambda _: None)) + "\n").encode()
        with opened(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
            try:
                if os.write(file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self.trim()
                raise

    def rows(self) -> list[dict[str, Any]]:
        """All rows."""
        return [row for _, row in self._lines()]

    def rewind(self, step: int) -> None:
        """Forget the rows whose "step" is larger."""
        lines = list(self._lines())
        kept = [line for line, row in lines if not (isinstance(row.get("step"), (int, float)) and row["step"] > step)]
        if len(kept) < len(lines):
            write_atomic(self.path, b"".join(kept))

    def trim(self) -> None:
        """Cut the file after its last complete line."""
        content = self._content()
        if content and not content.endswith(b"\n"):
            with opened(self.path, os.O_WRONLY) as file:
                os.ftruncate(file, content.rfind(b"\n") + 1)

    def sync(self) -> None:
        """Make the rows durable."""
        if os.path.lexists(self.path):
            sync(self.path)

    def _content(self) -> bytes:
        return read(self.path) if os.path.lexists(self.path) else b""

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Each complete line that holds a JSON object, and the object."""
        for line in self._content().split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield line + b"\n", row
