"""Messages of ranks to the launcher: one JSON object a line, in a file for each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class News:
    """The file of one rank, written line by line."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = open(path_of(folder, rank), "a", encoding="utf-8")  # noqa: SIM115  kept open

    def tell(self, kind: str, **fields: Any) -> None:
        """Add one line at once."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def path_of(folder: Path, rank: int) -> Path:
    """The file of ``rank``."""
    return folder / f"rank-{rank}.jsonl"


def read(folder: Path, rank: int) -> list[dict[str, Any]]:
    """All complete lines that ``rank`` has written so far."""
    try:
        text = path_of(folder, rank).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]
