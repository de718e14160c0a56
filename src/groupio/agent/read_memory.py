"""Book of a read window: where each chunk lies, who uses it, and what may be evicted.

The event loop decides; the threads that serve other nodes only look chunks up and hold them while
they send.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from groupio.agent.read_window import ReadWindow, Slot
from groupio.fabric.base import Served


class ReadMemory:
    """The window of one read at work; ``changed`` is notified when peers can get more chunks."""

    def __init__(self, window: ReadWindow, changed: threading.Condition) -> None:
        self.window = window
        self._lock = threading.Lock()
        self._changed = changed
        self._coming: dict[tuple[int, str], Slot] = {}
        self._here: dict[int, Slot] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Chunks that nobody waits for, those that did so longest first."""
        self._used = 0
        """Slots that somebody looks at."""
        self._evicted: list[int] = []

    @property
    def busy(self) -> bool:
        """Something is on its way, or being looked at."""
        with self._lock:
            return bool(self._coming) or self._used > 0

    def rows(self) -> list[int]:
        """The chunks, and parts of chunks, that lie here."""
        with self._lock:
            return list(self._here)

    def evicted(self) -> list[int]:
        """The chunks that had to make room since this was asked last."""
        with self._lock:
            rows, self._evicted = self._evicted, []
            return rows

    # -- what comes -------------------------------------------------------------------------------

    def reserve(self, row: int, source: str, start: int, stop: int) -> memoryview | None:
        """Memory for bytes of a chunk that are to come from ``source``; None: not now."""
        with self._lock:
            area = self.window.arriving
            while (slot := area.take(start, stop)) is None:
                if not self._idle:
                    return None
                old, _ = self._idle.popitem(last=False)
                self._evicted.append(old)
                self._drop(self._here.pop(old))
            self._coming[row, source] = slot
            return self.window.view(slot)

    def land(self, row: int, source: str, *, keep: bool) -> int:
        """The bytes came and are needed, or are of no use; how many there are."""
        with self._lock:
            slot = self._coming.pop((row, source), None)
            if slot is None:
                return 0
            if not keep:
                self._drop(slot)
                return slot.length
            before = self._here.get(row)
            self._here[row] = slot
            self._idle.pop(row, None)
            if before is not None:
                self._drop(before)
        with self._changed:
            self._changed.notify_all()
        return slot.length

    def release(self, rows: Iterable[int]) -> None:
        """Nobody waits for these chunks any more."""
        with self._lock:
            self._idle.update((row, None) for row in rows if row in self._here)

    def keep(self, rows: Iterable[int]) -> None:
        """Somebody will come for these chunks."""
        with self._lock:
            for row in rows:
                self._idle.pop(row, None)

    # -- who looks at it --------------------------------------------------------------------------

    def lend(self, row: int) -> Slot | None:
        """Keep the chunk in place until :meth:`take_back`; None when it is not here."""
        with self._lock:
            slot = self._here.get(row)
            if slot is None:
                return None
            self._idle.pop(row, None)
            self._use(slot)
            return slot

    def take_back(self, slot: Slot) -> None:
        """One of those who looked at it is done. From any thread."""
        with self._lock:
            slot.users -= 1
            if not slot.users:
                self._used -= 1
                self._free(slot)

    def share(self, slot: Slot) -> None:
        """One more looks at it."""
        with self._lock:
            self._use(slot)

    def stage(self, nbytes: int) -> Slot | None:
        """Memory for a copy of a chunk of ``nbytes``, which is gone after its last user."""
        with self._lock:
            slot = self.window.staged.take(0, nbytes)
            if slot is not None:
                slot.kept = False
                self._use(slot)
            return slot

    def serve(self, row: int, length: int) -> Served | None:
        """The whole chunk of ``length`` bytes, for another node; from any thread."""
        with self._lock:
            slot = self._here.get(row)
            if slot is None or slot.length != length:
                return None
            self._use(slot)
            view = self.window.view(slot).toreadonly()
        return Served(view, lambda: self.take_back(slot))

    def _use(self, slot: Slot) -> None:
        self._used += not slot.users
        slot.users += 1

    def _drop(self, slot: Slot) -> None:
        slot.kept = False
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        if not slot.kept and not slot.users:
            slot.area.give(slot)
