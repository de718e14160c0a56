"""The memory that ranks copy into: one memfd per member, shared with the agent.

A memfd needs no /dev/shm and dies with its last user. Which extents of it are leased, cached or
quarantined is decided in the agent machine; here they are only mapped, filled and given back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from groupio.exhaustion import exhausted
from groupio.model import PAGE_BYTES

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_FALLOC_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_MFD_NOEXEC_SEAL = 0x0008

_SLICE_BYTES = 64 << 20
"""Memory is given in slices of this size, between which a caller can stop."""

# CDLL frees the interpreter lock during a call (PyDLL would not), and these calls take long.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def map_shared(fd: int, offset: int, length: int) -> mmap.mmap:
    """Map a page-aligned range of an arena for reading and writing; forked children lack it."""
    mapped = mmap.mmap(fd, length, mmap.MAP_SHARED, offset=offset)
    mapped.madvise(mmap.MADV_DONTFORK)
    return mapped


def prefault(mapped: mmap.mmap | memoryview, start: int, length: int) -> bool:
    """Enter the pages of a mapped range into this process's page table, with the GIL released.

    False when the kernel (before 5.14) cannot: the pages then come in at first use, slower.
    OSError when there is no memory for them.
    """
    anchor = ctypes.c_char.from_buffer(mapped)
    try:
        address = ctypes.addressof(anchor) + start
        if _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
            return True
        number = ctypes.get_errno()
    finally:
        del anchor
    if number == errno.EINVAL:
        return False
    raise OSError(number, os.strerror(number))


def back(fd: int, offset: int, length: int) -> None:
    """Give memory to those pages of a range of a memfd that have none; content stays.

    Touching such a page kills the process (SIGBUS) where the system has no memory for it; here that
    is an OSError. One cheap call where the whole file has its memory.
    """
    if not has_holes(fd):
        return
    end = offset + length
    hole = os.lseek(fd, offset, os.SEEK_HOLE)
    if hole < end:
        os.posix_fallocate(fd, hole, end - hole)


def has_holes(fd: int) -> bool:
    """Whether some pages of a memfd have no memory."""
    status = os.fstat(fd)
    return status.st_blocks * 512 < status.st_size


class MemberArena:
    """One memfd; offsets and lengths are bytes, multiples of PAGE_BYTES. Thread-safe."""

    def __init__(self, name: str = "groupio-arena") -> None:
        self._name = name
        self._fd = -1
        self._users = 0
        """Calls that are using the descriptor outside the lock."""
        self._closed = False
        self._size = 0
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """The descriptor to hand to the rank; owned by the arena. -1 after ``close``.

        Made when it is first needed: OSError when the system has none to give, and the next save
        tries again.
        """
        with self._lock:
            if self._fd < 0 and not self._closed:
                self._fd = sealed_memfd(self._name)
            return self._fd

    @property
    def is_closed(self) -> bool:
        """``close`` was called."""
        return self._closed

    def map(self, offset: int, length: int) -> memoryview:
        """The bytes of an extent, writable; from the cache when a cached map covers it."""
        self._check(offset, length)
        with self._lock:
            return self._covering(offset, length)

    def populate(
        self, offset: int, length: int, *, should_stop: Callable[[], bool] | None = None
    ) -> None:
        """Give memory to an extent and enter it into the agent's page table; takes long.

        Call it from a background thread: the interpreter lock is free meanwhile. Content that is
        there stays. StagingFull when the system has no memory; the extent is then partly filled.
        ValueError when the arena is closed meanwhile.
        """
        view = self.map(offset, length)
        fd = self._use()
        try:
            for start in range(0, length, _SLICE_BYTES):
                if should_stop is not None and should_stop():
                    return
                size = min(_SLICE_BYTES, length - start)
                os.posix_fallocate(fd, offset + start, size)
                prefault(view, start, size)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
                raise
            raise exhausted(error, "fill the arena with memory", needed=length) from error
        finally:
            self._use_no_more()

    def back(self, offset: int, length: int) -> memoryview:
        """As :meth:`map`, with memory for every page: see :func:`back`. Content stays."""
        view = self.map(offset, length)
        fd = self._use()
        try:
            back(fd, offset, length)
        finally:
            self._use_no_more()
        return view

    def punch(self, offset: int, length: int) -> None:
        """Give the memory of an extent back to the system; its bytes read as zero afterwards.

        Maps that touch it leave the cache. A view that is still in use stays valid.
        """
        self._check(offset, length)
        with self._lock:
            for start, size in list(self._maps):
                if start < offset + length and offset < start + size:
                    _drop(self._maps.pop((start, size)))
            length = min(length, self._size - offset)
            if length <= 0 or self._closed:
                return  # it has no memory there
        fd = self._use()
        try:
            if _libc.fallocate(fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, offset, length):
                number = ctypes.get_errno()
                raise OSError(number, f"punching an arena: {os.strerror(number)}")
        finally:
            self._use_no_more()

    def _use(self) -> int:
        """The descriptor, which stays open until :meth:`_use_no_more`.

        Its number could else be given to another file while a call takes long. ValueError when it
        is closed.
        """
        with self._lock:
            if self._fd < 0 or self._closed:
                raise ValueError("the arena was closed")
            self._users += 1
            return self._fd

    def _use_no_more(self) -> None:
        with self._lock:
            self._users -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and self._fd >= 0 and not self._users:
            os.close(self._fd)
            self._fd = -1

    def resident_bytes(self) -> int:
        """The memory that the arena has now, in bytes."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Drop the maps and the descriptor; the memory goes with its last user."""
        with self._lock:
            while self._maps:
                _drop(self._maps.popitem()[1])
            self._closed = True
            self._close_unused()

    def _covering(self, offset: int, length: int) -> memoryview:
        for (start, size), mapped in self._maps.items():
            if start <= offset and offset + length <= start + size:
                return memoryview(mapped)[offset - start : offset - start + length]
        if self._closed:
            raise ValueError("the arena was closed")
        if self._fd < 0:  # a map of -1 would be of no file: zeros
            self._fd = sealed_memfd(self._name)
        if offset + length > self._size:
            # Touching a page beyond the end would kill the process.
            os.ftruncate(self._fd, offset + length)
            self._size = offset + length
        mapped = map_shared(self._fd, offset, length)
        for start, size in list(self._maps):
            if offset <= start and start + size <= offset + length:
                _drop(self._maps.pop((start, size)))
        self._maps[offset, length] = mapped
        return memoryview(mapped)

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length <= 0 or offset % PAGE_BYTES or length % PAGE_BYTES:
            raise ValueError(f"an extent of whole pages is needed, not {length} at {offset}")


def sealed_memfd(name: str) -> int:
    """A memfd that cannot be made smaller: a rank that did so would kill the agent by SIGBUS."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)  # a kernel before 6.3
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _drop(mapped: mmap.mmap) -> None:
    try:
        mapped.close()
    except BufferError:
        pass  # somebody still looks at it: the last view takes it along
