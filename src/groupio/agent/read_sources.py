"""Sources of a read's chunks, in threads: the store and the agents of other nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from groupio.agent.uplink import Uplink
from groupio.backend.base import EPOCHS, RandomReader
from groupio.backend.posix import PosixBackend
from groupio.client.chunk_reader import RUN_BYTES, Job, Wants, do_job, jobs_of
from groupio.errors import GroupIOError, IntegrityError, StorageError
from groupio.exhaustion import start_some
from groupio.fabric.base import DEADLINE, DIGEST, MISSING, RANGE, Fabric, Outcome, Stop, Want
from groupio.format.manifest import ManifestReader
from groupio.model import ChunkTable, DecisionKey, SegmentRef
from groupio.protocol.reasons import is_away

log = logging.getLogger(__name__)

PULL_S = 30.0
"""A peer may send nothing for so long, while it gets chunks that it is to pass on; one that sends
is given up where it is too slow (:data:`groupio.fabric.pulling.SLOWEST_BYTES_PER_S`)."""

PULLS_MAX = 4
"""From one peer at a time: further chunks wait for one of them to end."""

SEGMENTS_OPEN_MAX = 128
"""Segments that are kept open between reads."""

_WHY = {MISSING: "absent", DIGEST: "digest", RANGE: "digest", DEADLINE: "timeout"}

Told = Callable[[str, Sequence[int], str], None]
"""What came of rows: their source ("" is the store), the rows, and why not ("": they came)."""


class Part(NamedTuple):
    """A chunk, or bytes of it, to be brought to ``into``."""

    row: int
    start: int
    stop: int
    into: memoryview


class Epoch(NamedTuple):
    """An epoch in its store, open to be read."""

    backend: PosixBackend
    segments: Sequence[SegmentRef]
    table: ChunkTable
    rows: dict[bytes, int]
    """The row of each chunk by its digest."""

    @classmethod
    def open(cls, path: str, key: DecisionKey) -> Epoch:
        """Open the epoch's manifest; NotFound, IntegrityError, FormatError or StorageError."""
        backend = PosixBackend.open(path, create=False)
        try:
            backend.store_record()  # by which the store is known again
            with backend.reader(EPOCHS, str(key)) as reader:
                manifest = ManifestReader(reader.read, reader.size, reader.path)
                segments, table = manifest.segments, manifest.chunks
        except BaseException:
            backend.close()
            raise
        data = table.digests.tobytes()
        rows = {data[32 * row : 32 * row + 32]: row for row in range(len(table))}
        return cls(backend, segments, table, rows)

    def digest(self, row: int) -> bytes:
        """The name of a chunk."""
        name: bytes = self.table.digests[row].tobytes()
        return name


class _Opened:
    """An epoch's segments as long as somebody reads them, through one backend; thread-safe."""

    def __init__(self, backend: PosixBackend, segments: Sequence[SegmentRef]) -> None:
        self.backend = backend
        self._segments = segments
        self._lock = threading.Lock()
        self._open: dict[int, RandomReader] = {}
        self._busy: dict[int, int] = {}
        self._closed = False

    def use(self, segment: int, more: int) -> bool:
        """One more, or one less, reads the segment. False, and nothing, when it is too late."""
        with self._lock:
            if more > 0 and self._closed:
                return False
            self._busy[segment] = self._busy.get(segment, 0) + more
            if self._busy[segment]:
                return True
            del self._busy[segment]
            idle = [number for number in self._open if number not in self._busy]
            closing = idle if self._closed else idle[: max(len(self._open) - SEGMENTS_OPEN_MAX, 0)]
            readers = [self._open.pop(number) for number in closing]
            over = self._closed and not self._open and not self._busy
        for reader in readers:
            reader.close()
        if over:
            self.backend.close()
        return True

    def reader(self, segment: int) -> RandomReader | None:
        """The open segment, which the caller uses; None when it is not there."""
        with self._lock:
            there = self._open.get(segment)
        if there is not None:
            return there
        # Without the lock: the store may take long, and the event loop must not wait for it.
        try:
            mine = self.backend.reader("segments", self._segments[segment].name)
        except IntegrityError:
            return None
        with self._lock:
            there = self._open.setdefault(segment, mine)
        if there is not mine:
            mine.close()
        return there

    def path(self, segment: int) -> str:
        """Where the segment should be."""
        return f"{self.backend.path}/segments/{self._segments[segment].name}"

    def close(self) -> None:
        """Close the segments and the store, once no thread reads any more."""
        with self._lock:
            self._closed = True
            busy = bool(self._busy)
            readers = [] if busy else list(self._open.values())
            if not busy:
                self._open.clear()
        for reader in readers:
            reader.close()
        if not busy:
            self.backend.close()


class StoreSource:
    """Reads and verifies whole chunks of an epoch; neighbours in one go.

    A store that was away is opened anew by its path, if it is the same one.
    """

    def __init__(self, epoch: Epoch, pool: ThreadPoolExecutor, told: Told, uplink: Uplink) -> None:
        """Threads of ``pool`` sleep while ``uplink`` holds them back."""
        self._epoch = epoch
        self._pool = pool
        self._told = told
        self._uplink = uplink
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._opened = _Opened(epoch.backend, epoch.segments)
        self._scratch = threading.local()
        self._closed = False

    def read(self, parts: Sequence[Part]) -> None:
        """Bring whole chunks here."""
        rows = np.array([part.row for part in parts], np.int64)
        numbers = np.arange(len(rows))
        wants = Wants(rows, numbers, np.zeros(len(rows), np.int64), [p.into for p in parts])
        for job in jobs_of(self._epoch.table, wants):
            self._pool.submit(self._read, job)

    def _read(self, job: Job) -> None:
        first, last = job.pieces[0], job.pieces[-1]
        nbytes = last.offset + last.length - first.offset
        with self._uplink.reads.moving(nbytes, lambda: self._closed):
            self._read_now(job)

    def _read_now(self, job: Job) -> None:
        rows = [piece.row for piece in job.pieces]
        why, bad = "", set[int]()
        try:
            found = self._read_job(job)
            if found is None:
                return  # nobody waits for it any more
            bad = found
        except GroupIOError as error:
            log.warning("reading for other nodes failed: %s", error.message)
            why, bad = "storage", set(rows)
        except Exception:
            log.exception("reading segment %s failed", self._opened.path(job.segment))
            why, bad = "storage", set(rows)
        good = [row for row in rows if row not in bad]
        if good:
            self._told("", good, "")
        if bad:
            self._told("", sorted(bad), why or "digest")

    def _read_job(self, job: Job) -> set[int] | None:
        """The rows whose bytes are not what they should be; None when it is too late."""
        opened = self._use(job.segment)
        if opened is None:
            return None
        try:
            return self._read_through(opened, job)
        except StorageError as error:
            if not is_away(error):
                raise
        self._renew(opened)
        opened = self._use(job.segment)
        return None if opened is None else self._read_through(opened, job)

    def _use(self, segment: int) -> _Opened | None:
        """What is open now, with one more reader of the segment; None when all is closed."""
        while True:
            opened = self._opened
            if opened.use(segment, 1):
                return opened
            if self._opened is opened:
                return None  # and not only renewed by another thread meanwhile

    def _read_through(self, opened: _Opened, job: Job) -> set[int]:
        try:
            return {piece.row for piece in do_job(opened, job, self._memory(job))}
        finally:
            opened.use(job.segment, -1)

    def _renew(self, failed: _Opened) -> None:
        """Open the store anew after ``failed``, in whichever thread comes first."""
        with self._renewing:
            if self._opened is not failed or self._closed:
                return
            fresh = _Opened(failed.backend.anew(), self._epoch.segments)
            # The event loop takes this lock: no call to the store is made under it.
            with self._lock:
                if not self._closed:
                    self._opened, fresh = fresh, failed
        fresh.close()

    def _memory(self, job: Job) -> bytearray:
        if not job.needs_scratch:
            return bytearray()
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = bytearray(RUN_BYTES)
        memory: bytearray = self._scratch.memory
        return memory

    def close(self) -> None:
        """Close the segments and the store, once no thread reads any more."""
        with self._lock:
            self._closed = True
        self._uplink.wake()
        self._opened.close()


class PeerSource:
    """Pulls chunks from one node's agent; a few pulls at a time, each of all that waits."""

    def __init__(
        self, peer: str, epoch: Epoch, job: str, fabric: Fabric, address: str, told: Told
    ) -> None:
        """``job`` is the id of the store, which scopes what the peer gives."""
        self._peer = peer
        self._epoch = epoch
        self._job = job
        self._fabric = fabric
        self.address = address
        self._told = told
        self._lock = threading.Lock()
        self._waiting: deque[Part] = deque()
        self._active = 0
        self._stop = Stop()

    def pull(self, parts: Sequence[Part]) -> None:
        """Bring these here, in this order."""
        with self._lock:
            self._waiting.extend(parts)
            if self._active == PULLS_MAX:
                return
            self._active += 1
        try:
            start_some([threading.Thread(target=self._run, name="read-pull", daemon=True)])
        except GroupIOError as error:
            self._go_without(error)

    def _go_without(self, error: GroupIOError) -> None:
        """No further thread can be had: those that run take the parts, or they count as lost."""
        log.warning("pulling from node %s: %s", self._peer, error.message)
        with self._lock:
            self._active -= 1
            left = [] if self._active else list(self._waiting)
            if left:
                self._waiting.clear()
        if left:
            self._told(self._peer, [part.row for part in left], "lost")

    def close(self) -> None:
        """Pull nothing more; what is under way counts as lost, at once."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                parts = list(self._waiting)
                self._waiting.clear()
                if not parts:
                    self._active -= 1
                    return
            try:
                self._pull(parts)
            except Exception:
                log.exception("pulling from node %s failed", self._peer)
                self._told(self._peer, [part.row for part in parts], "lost")

    def _pull(self, parts: Sequence[Part]) -> None:
        lengths = self._epoch.table.lengths
        wants = [
            Want(
                self._epoch.digest(part.row),
                part.start,
                part.stop - part.start,
                part.into,
                part.start == 0 and part.stop == int(lengths[part.row]),
            )
            for part in parts
        ]

        def done(index: int, outcome: Outcome) -> None:
            if outcome.ok:
                self._told(self._peer, (parts[index].row,), "")

        deadline = time.monotonic() + PULL_S
        outcomes = self._fabric.pull(
            self.address,
            self._job,
            wants,
            deadline=deadline,
            patience_s=PULL_S,
            on_done=done,
            stop=self._stop,
        )
        failed: dict[str, list[int]] = {}
        for part, outcome in zip(parts, outcomes, strict=True):
            if not outcome.ok:
                failed.setdefault(_WHY.get(outcome.error, "lost"), []).append(part.row)
        for why, rows in failed.items():
            self._told(self._peer, rows, why)
