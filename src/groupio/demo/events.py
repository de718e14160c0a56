"""Messages of ranks to the director of the demonstration: JSON lines, one file per rank."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class EventWriter:
    """Appends events to a file. Thread-safe; every event is in the file when ``write`` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._file = open(folder / f"rank{rank}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event with the time of the day."""
        line = json.dumps({"kind": kind, "rank": self._rank, "at": time.time(), **fields})
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventReader:
    """Follows the files of all ranks of one launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """Events written since the last call, by the time they were written."""
        found: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob("rank*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole, newline, _ = data.rpartition(b"\n")  # the last line may be half written
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda event: float(event["at"]))
