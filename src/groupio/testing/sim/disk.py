"""A file system that forgets what was not flushed, as far as a store's safety depends on it.

Files are objects, not bytes. Each has a view that processes see and one that survives a power cut:
the data of a file is lost, torn or whole unless it was flushed, and a name comes or goes unless
its directory was. A failed flush marks the pages clean: the data is lost at the next cut, and a
second flush of the file reports success.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

FOLDERS = ("epochs", "prepared", "inflight", "segments", "lineages", "controllers", "temporary")


class Torn:
    """What a reader finds in a file whose data was lost or torn."""

    def __repr__(self) -> str:
        return "torn"


TORN = Torn()


class File:
    """One file; ``content`` is what a reader gets, ``size`` in bytes."""

    __slots__ = ("content", "host", "safe", "size", "synced")

    def __init__(self, content: Any, size: int, host: str) -> None:
        self.content = content
        self.size = size
        self.host = host
        """The node whose page cache holds what is not flushed."""
        self.synced = False
        self.safe = True
        """False once a flush failed: what it should have flushed is gone from the cache."""


class Disk:
    """Folders of files; all changes are single steps of whoever makes them."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, File]] = {name: {} for name in FOLDERS}
        self.pending: dict[str, list[tuple[str, str, File | None, File | None]]] = {
            name: [] for name in FOLDERS
        }
        """Changes of names that are not durable: host, name, before and after."""
        self.unsynced: dict[int, File] = {}
        self.on_name: Callable[[str, str, File], None] = lambda folder, name, file: None
        """Told of each new name, for those who watch."""
        self.on_unlink: Callable[[str, str], None] = lambda folder, name: None

    # -- what processes do -------------------------------------------------

    def create(self, host: str, folder: str, name: str, content: Any, size: int) -> File:
        """A new file under this name, or in the place of the one that has it."""
        file = File(content, size, host)
        self.unsynced[id(file)] = file
        self._rename(host, folder, name, file)
        return file

    def link(self, host: str, folder: str, name: str, file: File) -> bool:
        """Give a file this name unless it is taken; False when another file has it."""
        there = self.folders[folder].get(name)
        if there is not None:
            return there is file
        self._rename(host, folder, name, file)
        return True

    def replace(self, host: str, folder: str, name: str, file: File) -> None:
        """Give a file this name, whoever had it."""
        self._rename(host, folder, name, file)

    def _rename(self, host: str, folder: str, name: str, file: File) -> None:
        before = self.folders[folder].get(name)
        self.folders[folder][name] = file
        self.pending[folder].append((host, name, before, file))
        self.on_name(folder, name, file)

    def unlink(self, host: str, folder: str, name: str) -> None:
        """Take a name away, if it is there."""
        before = self.folders[folder].pop(name, None)
        if before is not None:
            self.on_unlink(folder, name)
            self.pending[folder].append((host, name, before, None))

    def get(self, folder: str, name: str) -> File | None:
        """The file of that name, as processes see it."""
        return self.folders[folder].get(name)

    def names(self, folder: str) -> list[str]:
        """The names in a folder, ascending."""
        return sorted(self.folders[folder])

    def fsync(self, file: File) -> None:
        """Flush a file's data; after a failed flush this does nothing any more."""
        if file.safe:
            file.synced = True
            self.unsynced.pop(id(file), None)

    def fsync_fails(self, file: File) -> None:
        """A flush that reports an error, and whose pages count as clean from now on."""
        file.safe = False

    def sync_folder(self, folder: str) -> None:
        """Make the names of a folder durable."""
        self.pending[folder].clear()

    def copy(self) -> Disk:
        """Another disk with what this one has now, as ``cp -a`` makes it; they share no name."""
        made = Disk()
        for folder, names in self.folders.items():
            for name, file in names.items():
                one = File(file.content if file.synced else TORN, file.size, file.host)
                one.synced = True
                made.folders[folder][name] = one
        return made

    # -- what survives -------------------------------------------------

    def durable(self, folder: str, name: str) -> File | None:
        """What certainly stands under a name after a power cut now, None when nothing does."""
        file = self.folders[folder].get(name)
        if file is None or not file.synced:
            return None
        if any(name == changed for _, changed, _, _ in self.pending[folder]):
            return None
        return file

    def cut(self, rng: random.Random, hosts: Iterable[str] | None = None) -> list[str]:
        """The power of these hosts (None: all) fails; says which rows of the fault table it hit."""
        chosen = None if hosts is None else set(hosts)
        rows = set()
        for folder, changes in self.pending.items():
            keep = []
            for change in reversed(changes):
                host, name, before, after = change
                if chosen is not None and host not in chosen:
                    keep.append(change)
                elif rng.random() < 0.5 and self._undo(folder, name, before, after):
                    rows.add("lost_rename")
            changes[:] = reversed(keep)
        for key, file in list(self.unsynced.items()):
            if chosen is not None and file.host not in chosen:
                continue
            del self.unsynced[key]
            draw = rng.random()
            if draw < 0.6:
                file.content, file.size = TORN, 0 if draw < 0.4 else file.size
                rows.add("lost_unsynced" if draw < 0.4 else "torn_write")
            else:
                file.synced = True
        return sorted(rows)

    def _undo(self, folder: str, name: str, before: File | None, after: File | None) -> bool:
        """Undo a change of names, unless a later one stands; False when it does."""
        names = self.folders[folder]
        if names.get(name) is not after:
            return False
        if before is None:
            names.pop(name, None)
        else:
            names[name] = before
        return True
