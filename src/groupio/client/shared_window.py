"""The memory through which the ranks of one host hand chunks to each other."""

from __future__ import annotations

import errno
import mmap
import os
import threading

from groupio.agent.arena import map_shared, prefault, sealed_memfd
from groupio.errors import StagingFull
from groupio.model import CHUNK_BYTES
from groupio.plan.sharing import Sharing

SLOT_BYTES = CHUNK_BYTES
"""A slot holds any one chunk, or several small ones."""

WINDOW_BYTES = 32 << 20
"""All slots of a host together, but never fewer than SLOTS_MIN for a reader.

Each page is touched once by every rank: 64 MiB cost 4 ranks on 2 CPUs about 40 ms more a load.
"""

SLOTS_MIN = 2
"""Of one reader: it fills one while the others still copy from another."""


class Places:
    """Which slots each reader may fill; every rank computes the same."""

    def __init__(self, sharing: Sharing) -> None:
        batches = [share.batches for share in sharing.shares]
        readers = sum(count > 0 for count in batches)
        most = max(SLOTS_MIN, WINDOW_BYTES // SLOT_BYTES // max(readers, 1))
        self.counts = [min(most, count) for count in batches]
        """Slots of each reader."""
        self.first = [sum(self.counts[:reader]) for reader in range(len(batches))]
        """The first slot of each reader; the others follow it."""
        self.total_bytes = sum(self.counts) * SLOT_BYTES


class Window:
    """The mapped slots of one round. Thread-safe."""

    def __init__(self, fd: int, size: int) -> None:
        """Map ``size`` bytes of the memfd, which the caller closes."""
        if os.fstat(fd).st_size < size:
            # Touching memory beyond the end would kill this process.
            raise OSError(errno.EINVAL, "the window is smaller than the plan needs")
        self._mapped = map_shared(fd, 0, size)
        self._slots = [threading.Lock() for _ in range(size // SLOT_BYTES)]
        self._touched = [False] * len(self._slots)

    def view(self, slot: int) -> memoryview:
        """The memory of a slot, in this process's page table from the first call on.

        StagingFull when the system has no memory for it.
        """
        start = slot * SLOT_BYTES
        with self._slots[slot]:
            if not self._touched[slot]:
                _populate(self._mapped, start)
                self._touched[slot] = True
        return memoryview(self._mapped)[start : start + SLOT_BYTES]

    def close(self) -> None:
        """Unmap; where a thread still looks at it, the last view takes it along."""
        try:
            self._mapped.close()
        except BufferError:
            pass  # only after an error, when a thread hangs in a read


def new_window(size: int) -> int:
    """The descriptor of a new window; OSError when the system has none to give."""
    fd = sealed_memfd("groupio-read")
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _populate(mapped: mmap.mmap, start: int) -> None:
    try:
        prefault(mapped, start, SLOT_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.EFAULT):
            raise
        raise StagingFull(
            f"the system has no memory for {SLOT_BYTES} bytes through which the ranks of this "
            f"host read together ({error.strerror}); free some and load again",
            needed=SLOT_BYTES,
        ) from error
