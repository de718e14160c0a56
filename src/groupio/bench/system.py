"""The interface of a measured system."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from groupio.bench.options import SYSTEMS
from groupio.bench.place import Place
from groupio.bench.state import State


@dataclass(frozen=True, slots=True)
class Moments:
    """When a save got how far, as readings of time.monotonic; None where there is no such level.

    ``stall``: the caller may overwrite its tensors; ``durable``: the system says that it is done.
    """

    stall: float
    staged: float | None = None
    remote: float | None = None
    durable: float | None = None
    door: float | None = None
    note: str = ""


class System(ABC):
    """One way to save, on one rank. All ranks call the same methods in the same order."""

    rank_of_file: ClassVar[re.Pattern[str] | None] = None
    """Finds the rank that wrote a file in its path; None where the files do not tell."""

    def __init__(self, folder: Path, place: Place, timeout_s: float) -> None:
        self.folder = folder
        self.place = place
        self.timeout_s = timeout_s

    def directory(self, epoch: int) -> Path:
        """Where ``epoch`` is, for systems that give each one a directory."""
        return self.folder / f"epoch-{epoch}"

    def look(self, state: State) -> str:
        """Do untimed what a training script does before it trains; a note of the first epoch."""
        return ""

    @abstractmethod
    def save(self, state: State, epoch: int) -> Moments:
        """Save and return when the system says that it is done."""

    @abstractmethod
    def load(self, state: State, epoch: int) -> int | None:
        """Fill the tensors of ``state``; the bytes read from storage if the system counts them."""

    def forget(self, epoch: int) -> None:
        """Remove what only ``epoch`` needs, to save room; called on rank 0."""
        shutil.rmtree(self.directory(epoch), ignore_errors=True)

    def close(self) -> None:  # noqa: B027  most have nothing to give up
        """Give up what the system holds; called on all ranks at the end."""


def open_system(name: str, folder: Path, place: Place, timeout_s: float) -> System:
    """The adapter ``name`` of this rank, with its own directory below ``folder``."""
    entry = SYSTEMS[name]
    module = importlib.import_module(f"groupio.bench.{entry.module}")
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    adapter: Any = getattr(module, entry.adapter)
    made = adapter(own, place, timeout_s)
    assert isinstance(made, System)
    return made


def files_of(folder: Path) -> dict[str, int]:
    """Size in bytes (st_size) of every file below ``folder``, by its path."""
    found: dict[str, int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            try:
                found[path] = os.stat(path).st_size
            except FileNotFoundError:  # a temporary one that just went
                continue
    return found


def added(before: dict[str, int], after: dict[str, int]) -> int:
    """Bytes by which the files grew; removed ones do not count against them."""
    return sum(max(0, size - before.get(path, 0)) for path, size in after.items())


def hottest_rank(system: System, before: dict[str, int], after: dict[str, int]) -> int | None:
    """Bytes that the rank with the most of them wrote; None where the files do not tell."""
    if system.rank_of_file is None:
        return None
    by_rank: dict[str, int] = {}
    for path, size in after.items():
        found = system.rank_of_file.search(path)
        if found:
            grown = max(0, size - before.get(path, 0))
            by_rank[found[1]] = by_rank.get(found[1], 0) + grown
    return max(by_rank.values(), default=None)
