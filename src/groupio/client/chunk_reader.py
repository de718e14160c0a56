"""Chunks from segments into memory, in threads, each verified before anybody uses it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.ma  # np.unique imports it; a signal handler may come between
import numpy.typing as npt
from blake3 import blake3

from groupio.backend.base import Backend, RandomReader
from groupio.client.collection import collection_paused
from groupio.errors import IntegrityError, StorageError
from groupio.exhaustion import start_some
from groupio.model import CHUNK_BYTES, ChunkTable, SegmentRef

RUN_BYTES = CHUNK_BYTES
_RUN_CHUNK_BYTES = 256 << 10
_RUN_GAP_BYTES = 64 << 10
"""Chunks smaller than _RUN_CHUNK_BYTES that lie no further apart than _RUN_GAP_BYTES are read
together, up to RUN_BYTES at a time; larger ones go straight to their destination."""

_FREEING_BYTES = 64 << 10
"""From this size on a copy gives up the interpreter lock."""

THREADS_MAX = 8


def default_threads() -> int:
    """Threads of a load: reading and hashing overlap, more than a few do not help."""
    return min(THREADS_MAX, 2 * len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Wants:
    """What is to be read: chunk ``rows[i]`` of the table to byte ``offsets[i]`` of ``views``.

    ``rows``, ``views_index`` and ``offsets`` are int64[n]; ``views_index[i]`` picks the view.
    ``copies`` are for chunks of which only a part is wanted, or whose elements do not lie side by
    side in the memory to be filled: each is a row and a call that gets all bytes of the chunk,
    verified, and takes what it needs before it returns. The calls come from several threads.
    A chunk that is wanted several times leaves the store once.
    """

    rows: npt.NDArray[np.int64]
    views_index: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    views: Sequence[memoryview]
    copies: Sequence[tuple[int, Callable[[memoryview], None]]] = ()

    def all_rows(self) -> npt.NDArray[np.int64]:
        """The rows of all chunks that are wanted in either way, each once, ascending."""
        copied = np.fromiter((row for row, _ in self.copies), np.int64, len(self.copies))
        return np.unique(np.concatenate((self.rows, copied)))


class Piece(NamedTuple):
    """One chunk, its row in the table, where it is in its segment, and where it goes."""

    row: int
    offset: int
    length: int
    digest: bytes
    targets: list[memoryview]
    copies: Sequence[Callable[[memoryview], None]] = ()


class Job(NamedTuple):
    """Neighbouring chunks of one segment that one read brings."""

    segment: int
    pieces: list[Piece]

    @property
    def needs_scratch(self) -> bool:
        """Whether :func:`do_job` needs RUN_BYTES of scratch memory for it."""
        return len(self.pieces) > 1 or not self.pieces[0].targets


@dataclass(slots=True)
class _Shared:
    """What the threads of one load have in common."""

    jobs: Iterator[Job]
    open: OpenSegments
    deadline: float
    stopped: bool = False
    jobs_left: int = 0
    running: int = 0
    done_bytes: int = 0
    error: BaseException | None = None
    damaged: list[tuple[str, int, bytes]] = field(default_factory=list)
    condition: threading.Condition = field(default_factory=threading.Condition)


def read_chunks(
    backend: Backend,
    segments: Sequence[SegmentRef],
    table: ChunkTable,
    wants: Wants,
    *,
    deadline: float,
    threads: int,
    epoch: int,
) -> list[bytes]:
    """Read and verify all that is wanted; returns the digests of damaged chunks, none if all is
    well. The views of damaged chunks have undefined content.

    ``deadline`` is a reading of ``time.monotonic``; StorageError (ETIMEDOUT) after it, when
    threads may still be writing to the views. Other StorageErrors as they come.
    """
    with collection_paused():
        jobs = list(jobs_of(table, wants))
    opened = OpenSegments(backend, segments, [job.segment for job in jobs])
    shared = _Shared(iter(jobs), opened, deadline)
    shared.jobs_left = len(jobs)
    shared.running = min(threads, len(jobs))
    workers = [
        threading.Thread(target=_work, args=(shared,), name=f"groupio-load-{number}", daemon=True)
        for number in range(shared.running)
    ]
    started = start_some(workers)
    with shared.condition:
        shared.running -= len(workers) - started
    try:
        with shared.condition:
            while shared.running:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                shared.condition.wait(left)
    finally:
        shared.stopped = True
    if shared.error is not None:
        raise shared.error
    if shared.jobs_left:
        raise StorageError(
            f"the store {backend.path} did not deliver epoch {epoch} in time "
            f"({shared.done_bytes} bytes came); give a larger deadline_s or look at the storage",
            path=backend.path,
            errno=errno.ETIMEDOUT,
        )
    return [digest for _, _, digest in sorted(shared.damaged)]


def damage(path: str, digest: bytes, count: int, epoch: int) -> IntegrityError:
    """The error that says which chunk of which file is damaged."""
    more = f" and {count - 1} more" if count > 1 else ""
    return IntegrityError(
        f"chunk {digest.hex()}{more} of epoch {epoch} is missing or damaged in {path}; load an "
        "older epoch (fallback=True) or restore the file",
        path=path,
        chunk=digest.hex(),
        epoch=epoch,
    )


class Segments(Protocol):
    """Gives open segments by their number."""

    def reader(self, segment: int) -> RandomReader | None:
        """The open segment; None when it is not there."""
        ...


class OpenSegments:
    """Opens each segment when it is first used and closes it after its last use.

    ``uses`` has the number of a segment once for each use that will come.
    """

    def __init__(
        self, backend: Backend, segments: Sequence[SegmentRef], uses: Iterable[int]
    ) -> None:
        self._backend = backend
        self._segments = segments
        self._lock = threading.Lock()
        self._readers: dict[int, RandomReader | None] = {}
        self._left: dict[int, int] = {}
        for segment in uses:
            self._left[segment] = self._left.get(segment, 0) + 1

    def reader(self, segment: int) -> RandomReader | None:
        """The open segment; None when it is not there."""
        with self._lock:
            if segment not in self._readers:
                try:
                    found = self._backend.reader("segments", self._segments[segment].name)
                except IntegrityError:
                    self._readers[segment] = None
                else:
                    self._readers[segment] = found
            return self._readers[segment]

    def path(self, segment: int) -> str:
        """Where the segment should be."""
        return f"{self._backend.path}/segments/{self._segments[segment].name}"

    def done(self, segment: int) -> None:
        """A use of the segment ended."""
        with self._lock:
            self._left[segment] -= 1
            last = self._left[segment] == 0
            found = self._readers.pop(segment, None) if last else None
        if found is not None:
            found.close()

    def close(self) -> None:
        """Close what is open, after an error; nobody may be reading any more."""
        with self._lock:
            found = list(self._readers.values())
            self._readers.clear()
        for reader in found:
            if reader is not None:
                reader.close()


def jobs_of(table: ChunkTable, wants: Wants) -> Iterator[Job]:
    """The wanted chunks as jobs, segment by segment in the order of the file."""
    rows = wants.all_rows()
    copies: dict[int, list[Callable[[memoryview], None]]] = {}
    for row, copy in wants.copies:
        copies.setdefault(row, []).append(copy)
    order = np.argsort(wants.rows, kind="stable")
    ends = np.searchsorted(wants.rows[order], rows, side="right").tolist()
    begins = [0, *ends[:-1]] if len(ends) else []
    place = np.lexsort((table.offsets[rows], table.segments[rows]))
    chosen = rows[place]
    columns = zip(
        place.tolist(),
        chosen.tolist(),
        table.segments[chosen].tolist(),
        table.offsets[chosen].tolist(),
        table.lengths[chosen].tolist(),
        strict=True,
    )
    digests = table.digests[chosen].tobytes()
    order_list = order.tolist()
    views_index = wants.views_index.tolist()
    offsets = wants.offsets.tolist()
    run: list[Piece] = []
    run_segment, run_start, run_end = -1, 0, 0
    for number, (index, row, segment, offset, length) in enumerate(columns):
        targets = []
        for at in order_list[begins[index] : ends[index]]:
            start = offsets[at]
            targets.append(wants.views[views_index[at]][start : start + length])
        digest = digests[number * 32 : number * 32 + 32]
        piece = Piece(row, offset, length, digest, targets, copies.get(row, ()))
        joins = (
            segment == run_segment
            and length < _RUN_CHUNK_BYTES
            and run_end <= offset <= run_end + _RUN_GAP_BYTES
            and offset + length - run_start <= RUN_BYTES
        )
        if run and not joins:
            yield Job(run_segment, run)
            run = []
        if length >= _RUN_CHUNK_BYTES:
            yield Job(segment, [piece])
            run_segment = -1
            continue
        if not run:
            run_segment, run_start = segment, offset
        run.append(piece)
        run_end = offset + length
    if run:
        yield Job(run_segment, run)


def _work(shared: _Shared) -> None:
    """Take job after job until there is none, the time is up or another thread failed."""
    scratch = bytearray()
    try:
        while not shared.stopped and time.monotonic() < shared.deadline:
            with shared.condition:
                job = next(shared.jobs, None)
            if job is None:
                break
            if not scratch and job.needs_scratch:
                scratch = bytearray(RUN_BYTES)
            bad = do_job(shared.open, job, scratch)
            shared.open.done(job.segment)
            path = shared.open.path(job.segment)
            with shared.condition:
                shared.jobs_left -= 1
                shared.done_bytes += sum(piece.length for piece in job.pieces)
                shared.damaged += [(path, piece.offset, piece.digest) for piece in bad]
    except BaseException as error:  # noqa: BLE001  handed to the thread that waits
        with shared.condition:
            shared.error = shared.error or error
            shared.stopped = True
    finally:
        with shared.condition:
            shared.running -= 1
            if not shared.running:
                shared.open.close()
            shared.condition.notify_all()


def do_job(opened: Segments, job: Job, scratch: bytearray) -> list[Piece]:
    """Read and verify the pieces of a job; returns those that are damaged."""
    pieces = job.pieces
    reader = opened.reader(job.segment)
    if reader is None:
        return pieces
    if len(pieces) > 1:
        start = pieces[0].offset
        length = pieces[-1].offset + pieces[-1].length - start
        view = memoryview(scratch)[:length]
        try:
            reader.read_into(start, view)
        except IntegrityError:
            pass  # the file ends too early: some of the pieces may still be there
        else:
            return [p for p in pieces if not _deliver(p, view[p.offset - start :][: p.length])]
    return [piece for piece in pieces if not _read_piece(reader, piece, scratch)]


def _read_piece(reader: RandomReader, piece: Piece, scratch: bytearray) -> bool:
    target = piece.targets[0] if piece.targets else memoryview(scratch)[: piece.length]
    try:
        reader.read_into(piece.offset, target)
    except IntegrityError:
        return False
    if blake3(target).digest() != piece.digest:
        return False
    place(piece.targets[1:], piece.copies, target)
    return True


def _deliver(piece: Piece, data: memoryview) -> bool:
    if blake3(data).digest() != piece.digest:
        return False
    place(piece.targets, piece.copies, data)
    return True


def place(
    targets: Sequence[memoryview],
    copies: Sequence[Callable[[memoryview], None]],
    data: memoryview,
) -> None:
    """Bring the bytes of a verified chunk to all places that want it."""
    for target in targets:
        if len(data) < _FREEING_BYTES:
            target[:] = data
        else:
            # Unlike an assignment this lets other threads of the interpreter run.
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
    for copy in copies:
        copy(data)
