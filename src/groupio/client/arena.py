"""This rank's view of its arena: mappings of the leases that the agent granted."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from groupio.agent.arena import back, has_holes, map_shared, prefault
from groupio.errors import AgentLost
from groupio.exhaustion import exhausted, is_exhaustion

_MAPS_MAX = 8
"""Mappings kept: epochs in flight reuse the same few extents."""

_SLICE_BYTES = 64 << 20
"""A page table is filled in slices of this size, so that a save can take over in between."""


class Lease:
    """A mapped range; its memory stays while this object lives, whatever happens to the agent."""

    __slots__ = ("__weakref__", "_anchor", "address", "mapped", "offset", "ready", "size")

    def __init__(self, mapped: mmap.mmap, offset: int, size: int) -> None:
        self.mapped = mapped
        self.offset = offset
        self.size = size
        self.ready = threading.Lock()
        self._anchor = ctypes.c_char.from_buffer(mapped)
        self.address = ctypes.addressof(self._anchor)
        """Where the range starts in this process."""
        _live.add(self)


_live: weakref.WeakSet[Lease] = weakref.WeakSet()


def lease_at(address: int) -> Lease | None:
    """The mapped range that ``address`` lies in, if it is one."""
    for lease in list(_live):
        if lease.address <= address < lease.address + lease.size:
            return lease
    return None


class ClientArena:
    """The arena's descriptor and the mappings of recent leases. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._leases: OrderedDict[tuple[int, int], Lease] = OrderedDict()

    def address(self, offset: int, length: int) -> tuple[Lease, int]:
        """Where ``offset`` of the arena is in this process, mapped and ready to be written.

        Keep the lease as long as the address is used. StagingFull when the system has no memory
        for it, AgentLost when the arena is not that large.
        """
        lease, is_new = self._lease(offset, length)
        with lease.ready:
            if is_new:
                _populate(lease)
            self._back(offset, length)
        return lease, lease.address + offset - lease.offset

    def prepare(self, offset: int, length: int) -> None:
        """Map a range and fill its page table ahead of time; for a background thread."""
        lease, _ = self._lease(offset, length)
        with lease.ready:
            _populate(lease, lambda: self._fd < 0)

    def _back(self, offset: int, length: int) -> None:
        """The agent may have taken the memory of a mapped range back since it was used last."""
        try:
            with self._lock:
                if self._fd < 0 or not has_holes(self._fd):
                    return
                fd = os.dup(self._fd)  # it takes long, and another thread may close the arena
            try:
                back(fd, offset, length)
            finally:
                os.close(fd)
        except OSError as error:
            if not is_exhaustion(error):
                raise
            raise exhausted(error, "fill staging memory", needed=length) from error

    def _lease(self, offset: int, length: int) -> tuple[Lease, bool]:
        with self._lock:
            for key, lease in self._leases.items():
                if lease.offset <= offset and offset + length <= lease.offset + lease.size:
                    self._leases.move_to_end(key)
                    return lease, False
            if self._fd < 0 or os.fstat(self._fd).st_size < offset + length:
                # Touching memory beyond the end would kill this process.
                raise AgentLost(
                    f"the agent granted {length} bytes at {offset} of an arena that does not have "
                    "them; save again, another agent is started if this one is gone"
                )
            try:
                lease = Lease(map_shared(self._fd, offset, length), offset, length)
            except OSError as error:
                raise exhausted(error, "map staging memory", needed=length) from error
            for key, other in list(self._leases.items()):
                if offset <= other.offset and other.offset + other.size <= offset + length:
                    del self._leases[key]
            self._leases[offset, length] = lease
            while len(self._leases) > _MAPS_MAX:
                self._leases.popitem(last=False)
            return lease, True

    def close(self) -> None:
        """Forget the mappings; those that a copy still uses go with it."""
        with self._lock:
            self._leases.clear()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def abandon_in_child(self) -> None:
        """In a forked child: give up the descriptor, touch no memory.

        The child does not have the mappings. Freeing the objects would unmap whatever lies at
        their addresses now, so they are kept for good.
        """
        for lease in self._leases.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lease.mapped))
        self._lock = threading.Lock()
        self._leases = OrderedDict()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _populate(lease: Lease, should_stop: Callable[[], bool] = lambda: False) -> None:
    try:
        for start in range(0, lease.size, _SLICE_BYTES):
            if should_stop():
                return
            prefault(lease.mapped, start, min(_SLICE_BYTES, lease.size - start))
    except OSError as error:
        if not is_exhaustion(error):
            raise
        raise exhausted(error, "fill staging memory", needed=lease.size) from error
