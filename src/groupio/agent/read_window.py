"""The memory through which an agent hands chunks to its readers, and to other nodes.

Ranks map it to read only. It has two areas, so that neither use keeps the other from going on:
one for what arrives, one for chunks that already are in this node's staging memory and are only
copied for a reader.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, insort
from dataclasses import dataclass

from groupio.agent.arena import back, map_shared, sealed_memfd
from groupio.model import CHUNK_BYTES

WINDOW_BYTES_MAX = 128 << 20
"""Of one read of one node."""

WINDOW_BYTES_MIN = 8 * CHUNK_BYTES
"""With less memory readers do better without the agent."""

WINDOW_SHARE = 8
"""All windows together take at most one part in so many of the memory budget."""

_ALIGN = 64
_SMALL_BYTES = 1 << 20
"""Smaller pieces are placed from the end, so that they do not cut up the room of larger ones."""


@dataclass(slots=True, eq=False)
class Slot:
    """Memory of one chunk, or of bytes ``start`` to ``stop`` of it; ``users`` are those who look
    at it, besides the read itself."""

    area: Area
    offset: int
    start: int
    stop: int
    users: int = 0
    kept: bool = True
    """The read itself still needs it."""

    @property
    def length(self) -> int:
        """Bytes of the chunk that lie here."""
        return self.stop - self.start


class Area:
    """Gives out ranges of ``size`` bytes from ``begin`` on. To be used under one lock."""

    def __init__(self, begin: int, size: int) -> None:
        self.size = size
        self._free = [(begin, size)]

    def take(self, start: int, stop: int) -> Slot | None:
        """Room for bytes ``start`` to ``stop`` of a chunk; None when there is none now."""
        need = -(-max(stop - start, 1) // _ALIGN) * _ALIGN
        small = need < _SMALL_BYTES
        places = range(len(self._free))
        for place in reversed(places) if small else places:
            offset, length = self._free[place]
            if length < need:
                continue
            if length == need:
                del self._free[place]
            elif small:
                self._free[place] = (offset, length - need)
                offset += length - need
            else:
                self._free[place] = (offset + need, length - need)
            return Slot(self, offset, start, stop)
        return None

    def give(self, slot: Slot) -> None:
        """Take the memory of a slot back."""
        offset = slot.offset
        length = -(-max(slot.length, 1) // _ALIGN) * _ALIGN
        place = bisect_left(self._free, (offset, length))
        if place < len(self._free) and self._free[place][0] == offset + length:
            length += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            place -= 1
            before = self._free.pop(place)
            offset, length = before[0], before[1] + length
        insort(self._free, (offset, length))


class ReadWindow:
    """One memfd of ``size`` bytes, mapped here; ``fd`` lets others read it."""

    def __init__(self, size: int) -> None:
        """OSError when the system has no descriptor or address space for it."""
        made = sealed_memfd("groupio-read")
        try:
            os.ftruncate(made, size)
            self._mapped = map_shared(made, 0, size)
            self.fd = os.open(f"/proc/self/fd/{made}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(made)
            raise
        self._fd = made
        self._lock = threading.Lock()
        self._backed: set[int] = set()
        staged = size // 4
        self.arriving = Area(0, size - staged)
        self.staged = Area(size - staged, staged)

    def view(self, slot: Slot) -> memoryview:
        """The memory of a slot, writable. OSError when the system has none for it."""
        first, end = slot.offset, slot.offset + slot.length
        with self._lock:
            for block in range(first // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
                if block not in self._backed and self._fd >= 0:
                    back(self._fd, block * CHUNK_BYTES, CHUNK_BYTES)
                    self._backed.add(block)
        return memoryview(self._mapped)[slot.offset : slot.offset + slot.length]

    def close(self) -> None:
        """Give the memory back; where somebody still looks at it, that goes with the last view."""
        os.close(self.fd)
        with self._lock:
            os.close(self._fd)
            self._fd = -1
        try:
            self._mapped.close()
        except BufferError:
            pass  # a transfer is about to end


def window_bytes(budget: int, available: int, reserved: int) -> int:
    """How large a further window may be, in bytes; 0 when there is no room for one."""
    size = min(WINDOW_BYTES_MAX, budget // WINDOW_SHARE - reserved, available)
    return size // CHUNK_BYTES * CHUNK_BYTES if size >= WINDOW_BYTES_MIN else 0


def why_no_window(budget: int) -> str:
    """Why there is no room for a window with a memory budget of so many bytes."""
    if window_bytes(budget, budget, 0):
        return "the memory budget has no room now"
    return (
        f"the memory budget of {budget >> 20} MiB is too small for it; give the agent at least "
        f"{WINDOW_BYTES_MIN * WINDOW_SHARE >> 20} MiB"
    )
