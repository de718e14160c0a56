"""A segment while it is written: large sequential writes past the page cache, one flush."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from groupio.backend.faults import storage_error
from groupio.backend.folders import Folder, Modes
from groupio.backend.records import remove_quietly, write_all
from groupio.errors import GroupIOError, InvalidInput, StorageError, StorageFull
from groupio.model import PAGE_BYTES

DIRECT = "direct"
BUFFERED = "buffered"

_VECTOR_LIMIT = 1024
"""Buffers in one pwritev: IOV_MAX of Linux."""


class PosixSegment:
    """A new segment of a POSIX store; see :class:`groupio.backend.base.SegmentFile`."""

    def __init__(self, folder: Folder, name: str, modes: Modes) -> None:
        self.name = name
        self.path = os.path.join(folder.path, name)
        self._folder = folder
        self._lock = threading.Lock()
        self._writers = 0
        self._closing = False
        self._done = False
        self._fd, self.io_mode = _create(folder, name, modes, self.path)
        self._direct = self.io_mode == DIRECT
        folder.entry_made()

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write all bytes of ``views``, one after the other, at ``offset``.

        In direct mode the offset and the length of each view are multiples of ``PAGE_BYTES``
        and the memory is aligned so (else InvalidInput). Thread-safe for ranges that do not
        overlap. StorageFull names what was still to be written and what is free.
        """
        with _bytes_of(views) as rest:
            self._write_all(offset, rest)

    def _write_all(self, offset: int, rest: list[memoryview]) -> None:
        if self._direct and any(n % PAGE_BYTES for n in (offset, *map(len, rest))):
            raise InvalidInput(
                f"a direct write to {self.path} at {offset} is not a multiple of {PAGE_BYTES} "
                "bytes: pad it, or write it with write_tail"
            )
        start, total = offset, sum(map(len, rest))
        with self._open() as fd:
            while rest:
                count = self._write_some(fd, rest, offset, start + total - offset)
                offset += count
                _advance(rest, count)
            if not self._direct and total:
                # Start the write-back now, else the flush at the end does all of it alone.
                try:
                    os.posix_fadvise(fd, start, total, os.POSIX_FADV_DONTNEED)
                except OSError:
                    pass  # a hint; what cannot be written is reported by the flush

    def _write_some(self, fd: int, views: list[memoryview], offset: int, needed: int) -> int:
        try:
            count = os.pwritev(fd, views[:_VECTOR_LIMIT], offset)
        except OSError as error:
            if error.errno == errno.EINVAL and self._direct:
                _check_memory(views, self.path)
                self._leave_direct(fd)
                self.io_mode = BUFFERED
                return 0
            raise self._error(error, "write", needed) from error
        if self._direct:
            count -= count % PAGE_BYTES  # the rest of a cut write must stay aligned
        if count == 0:
            raise self._error(OSError(errno.EIO, "nothing written"), "write", needed)
        return count

    def write_tail(self, offset: int, data: bytes) -> None:
        """Write the end of the file: any offset, any length; through the page cache."""
        with self._open() as fd:
            try:
                self._leave_direct(fd)
                write_all(fd, data, offset)
            except OSError as error:
                raise self._error(error, "write", len(data)) from error

    def _leave_direct(self, fd: int) -> None:
        # Some file systems take O_DIRECT at open and refuse it at the first write.
        if self._direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False

    def sync_close(self, size: int) -> None:
        """Flush once, check that the file has ``size`` bytes, close.

        On return the bytes are durable; the name is after ``sync_folder``. Whatever fails, the
        file is closed and the flush is not repeated.
        """
        with self._open(closing=True) as fd:
            try:
                os.fsync(fd)
                found = os.fstat(fd).st_size
            except OSError as error:
                raise self._error(error, "flush", size) from error
        if found != size:
            raise StorageError(
                f"{self.path} has {found} bytes after the flush, {size} were written: the file "
                "system lost some or another process writes there",
                path=self.path,
                errno=errno.EIO,
            )
        self._done = True

    def abort(self) -> None:
        """Close and remove the file; never raises. Does nothing after a good ``sync_close``."""
        if self._done:
            return
        try:
            with self._open(closing=True):
                pass
        except GroupIOError:
            pass  # closed before, by a failed sync_close
        remove_quietly(self._folder, self.name)

    def _error(self, error: OSError, doing: str, needed: int) -> GroupIOError:
        full = storage_error(error, self.path, doing, needed=needed, near=self._folder.fd)
        if not isinstance(full, StorageFull):
            self._folder.doubt()
        return full

    @contextmanager
    def _open(self, *, closing: bool = False) -> Iterator[int]:
        # The last user closes: a descriptor closed under a writer could be another file by then.
        with self._lock:
            if self._closing:
                raise StorageError(
                    f"{self.path} is closed: a segment is written once, start another",
                    path=self.path,
                    errno=errno.EBADF,
                )
            self._writers += 1
            self._closing = closing
        try:
            yield self._fd
        finally:
            with self._lock:
                self._writers -= 1
                last = self._closing and self._writers == 0
            if last:
                try:
                    os.close(self._fd)
                except OSError as error:  # network file systems report late write errors here
                    raise self._error(error, "close", 0) from error


def _create(folder: Folder, name: str, modes: Modes, path: str) -> tuple[int, str]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = -1
    try:
        fd = os.open(name, flags, modes.asked[0], dir_fd=folder.fd)
        modes.settle(fd, folder.fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
            remove_quietly(folder, name)
        full = storage_error(error, path, "create the segment", near=folder.fd)
        if not isinstance(error, FileExistsError) and not isinstance(full, StorageFull):
            folder.doubt()
        raise full from error
    try:
        # Set after creation: an open that refuses O_DIRECT may leave the new file behind.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return fd, BUFFERED  # tmpfs and others have no direct mode; io_mode says so
    return fd, DIRECT


@contextmanager
def _bytes_of(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The non-empty ``views`` as bytes, released at the end.

    The traceback of an error would keep them, and with them the caller's memory mapped.
    """
    rest = [view.cast("B") for view in views if view.nbytes]
    try:
        yield rest
    finally:
        for view in rest:
            view.release()


def _advance(views: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of ``views``."""
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]


def _check_memory(views: list[memoryview], path: str) -> None:
    import numpy as np  # only to look at addresses after a refused write

    for view in views:
        if np.frombuffer(view, dtype=np.uint8).ctypes.data % PAGE_BYTES:
            raise InvalidInput(
                f"a direct write to {path} was refused because its memory is not aligned to "
                f"{PAGE_BYTES} bytes: write from page-aligned memory"
            )
