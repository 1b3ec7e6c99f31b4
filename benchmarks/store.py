"""The file of figures: it grows record by record, so that a run can be done in pieces, and broken off."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import opteq
from opteq.runs import environment, write_atomic


class Store:
    """Records by number of threads, kind and name; a new one replaces the old. With a path, each is written at once.

    `order`: in which the pieces of a run follow each other, whatever was measured first.
    """

    def __init__(self, machine: dict[str, Any], path: Path | None = None, order: Sequence[str] = ()) -> None:
        self.machine, self.path, self.place = machine, path, {name: i for i, name in enumerate(order)}
        self.revision = environment()["git_revision"]
        self.data: dict[str, Any] = {"opteq": opteq.__version__, "machine": machine, "threads": {}}
        self._read()

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        known = json.loads(self.path.read_text(encoding="utf-8"))
        if known["machine"] != self.machine:
            was, here = (json.dumps(one) for one in (known["machine"], self.machine))
            raise ValueError(f"{self.path} has figures of another machine, {was}, not {here}: name another file, or delete it.")
        self.data = known | {"opteq": opteq.__version__}

    def has(self, threads: int, piece: str) -> bool:
        """Whether there are records of this piece of the run."""
        return any(one["piece"] == piece for kept in self.records(threads).values() for one in kept)

    def records(self, threads: int) -> dict[str, list[dict[str, Any]]]:
        """The records for so many threads, by kind."""
        found: dict[str, list[dict[str, Any]]] = self.data["threads"].get(str(threads), {})
        return found

    def put(self, threads: int, kind: str, piece: str, record: dict[str, Any]) -> None:
        """Keep a record, with the day and the revision of which it is, beside what others put into the file meanwhile."""
        self._read()
        day = datetime.now(UTC).date().isoformat()
        record = {"name": record["name"], "piece": piece, "date": day, "revision": self.revision} | record
        kept = self.data["threads"].setdefault(str(threads), {}).setdefault(kind, [])
        place = next((i for i, one in enumerate(kept) if one["name"] == record["name"]), len(kept))
        kept[place : place + 1] = [record]
        kept.sort(key=lambda one: self.place.get(one["piece"], 0))
        self.data["threads"] = dict(sorted(self.data["threads"].items(), key=lambda item: int(item[0])))
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            write_atomic(self.path, json.dumps(self.data, indent=1) + "\n")
