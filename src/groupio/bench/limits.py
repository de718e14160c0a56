"""Measures the limits of the machine: copy, hash, write and read the same bytes, and nothing
else."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from groupio.bench.place import Place

MIB = 1 << 20
ALIGN = 4096
BUFFER_BYTES = 256 * MIB
"""Raw writes take their bytes from a buffer of at most this size, again and again: no processor
cache holds it, and no file system finds the repetition unless it deduplicates."""

WRITES = {
    "buffered 4 MiB": (4 * MIB, False),
    "buffered 16 MiB": (16 * MIB, False),
    "O_DIRECT 4 MiB": (4 * MIB, True),
    "O_DIRECT 16 MiB": (16 * MIB, True),
}


class Copy:
    """A memcpy of ``nbytes`` from this rank's tensors into memory that was touched before."""

    def __init__(self, source: np.ndarray[Any, Any]) -> None:
        self._source = source
        self._mapping = mmap.mmap(-1, len(source))
        self._warm = np.frombuffer(self._mapping, np.uint8)
        self._warm[:] = source

    def measure(self, place: Place) -> float:
        """Seconds from a common start to the end of this rank's copy."""
        start = place.start()
        ctypes.memmove(self._warm.ctypes.data, self._source.ctypes.data, len(self._source))
        return time.monotonic() - start

    def measure_tensors(self, place: Place, sizes: Sequence[int]) -> float:
        """The same, one memcpy for each tensor.

        It takes longer where tensors are smaller than about a third of the last-level cache: only
        larger copies write past it.
        """
        source, target = self._source.ctypes.data, self._warm.ctypes.data
        at = 0
        start = place.start()
        for size in sizes:
            ctypes.memmove(target + at, source + at, size)
            at += size
        return time.monotonic() - start

    def measure_hash(self, place: Place) -> float:
        """Seconds from a common start to the end of hashing this rank's copy, on its CPUs."""
        threads = max(1, len(os.sched_getaffinity(0)) // place.ranks)
        view = memoryview(self._mapping)
        pieces = [view[at : at + 4 * MIB] for at in range(0, len(view), 4 * MIB)]
        with ThreadPoolExecutor(threads) as pool:
            start = place.start()
            for _ in pool.map(lambda piece: blake3.blake3(piece).digest(), pieces):
                pass
            return time.monotonic() - start


class RawWrite:
    """Sequential writes of a file by one process, with fsync; the others wait meanwhile."""

    def __init__(self, folder: Path, nbytes_most: int) -> None:
        self._path = folder / "raw.bin"
        size = min(_aligned(nbytes_most), BUFFER_BYTES)
        self._buffer = mmap.mmap(-1, size)  # O_DIRECT needs memory on page borders
        words = np.frombuffer(self._buffer, np.uint64)
        words[:] = np.random.Generator(np.random.SFC64(7)).integers(0, 1 << 64, len(words), "u8")

    def fastest(self, nbytes: int, settle_s: float) -> tuple[float, str]:
        """Seconds of the fastest way to write ``nbytes``, and which one it is."""
        found: dict[str, float] = {}
        for name, (block, direct) in WRITES.items():
            settle(settle_s)
            try:
                found[name] = self._write(nbytes, block, direct=direct)
            except OSError:
                if not direct:
                    raise  # not every file system takes O_DIRECT
        name = min(found, key=lambda one: found[one])
        return found[name], name

    def _write(self, nbytes: int, block: int, *, direct: bool) -> float:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct else 0)
        view = memoryview(self._buffer)
        end = _aligned(nbytes) if direct else nbytes
        block = min(block, len(view))
        last_start = (len(view) - block) // ALIGN * ALIGN
        fd = os.open(self._path, flags, 0o600)
        try:
            start = time.monotonic()
            at = source = 0
            while at < end:
                at += os.pwrite(fd, view[source : source + min(block, end - at)], at)
                source = 0 if source + block > last_start else source + block
            os.fsync(fd)
            return time.monotonic() - start
        finally:
            os.close(fd)
            self._path.unlink()

    def keep(self, nbytes: int) -> Path:
        """Leave a file of ``nbytes`` (rounded up to pages) for raw reads; its path."""
        path = self._path.with_name("read.bin")
        view = memoryview(self._buffer)
        with open(path, "wb") as file:
            left = _aligned(nbytes)
            while left:
                left -= file.write(view[: min(left, len(view))])
            file.flush()
            os.fsync(file.fileno())
        return path


class RawRead:
    """Every rank reads its share of one file, all at once."""

    def __init__(self, path: Path, place: Place) -> None:
        self._path = path
        self._place = place
        self._buffer = mmap.mmap(-1, 16 * MIB)

    def fastest(self, *, cold: bool) -> float:
        """Seconds from a common start to the end of this rank's share; the fastest of its ways.

        ``cold``: not from the page cache, buffered and with O_DIRECT; else from the page cache.
        """
        if not cold:
            if self._place.rank == 0:
                warm_up([self._path])
            return self._read(direct=False)
        found = []
        for direct in (False, True):
            if self._place.rank == 0:
                drop_cache([self._path])
            try:
                seconds = self._read(direct=direct)
            except OSError:
                if not direct:
                    raise
                seconds = float("inf")  # not every file system takes O_DIRECT
            found.append(self._slowest(seconds))
        return min(found)

    def _slowest(self, seconds: float) -> float:
        return self._place.largest(seconds)

    def _read(self, *, direct: bool) -> float:
        size, ranks, rank = os.stat(self._path).st_size, self._place.ranks, self._place.rank
        begin = size * rank // ranks // ALIGN * ALIGN
        end = size if rank == ranks - 1 else size * (rank + 1) // ranks // ALIGN * ALIGN
        start = self._place.start()
        fd = os.open(self._path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        view = memoryview(self._buffer)
        try:
            while begin < end:
                begin += os.preadv(fd, [view[: min(len(view), end - begin)]], begin)
            return time.monotonic() - start
        finally:
            os.close(fd)


def settle(seconds: float) -> None:
    """Let the disk finish what came before: writes, and the removal of large files."""
    os.sync()
    time.sleep(seconds)


def drop_cache(paths: list[Path]) -> None:
    """Take the pages of the files out of the page cache, after writing what is dirty."""
    os.sync()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm_up(paths: list[Path]) -> None:
    """Read the files once, so that the page cache has them."""
    buffer = bytearray(4 * MIB)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def bytes_read_so_far() -> int:
    """What this process has read by system calls since it began (rchar)."""
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar"))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
