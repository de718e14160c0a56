"""Chunks from segments into memory, in threads, each verified before anybody uses it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.backend.base import Backend, RandomReader
from groupio.errors import IntegrityError, StorageError
from groupio.model import ChunkTable, SegmentRef

_RUN_BYTES = 4 << 20
_RUN_CHUNK_BYTES = 256 << 10
_RUN_GAP_BYTES = 64 << 10
"""Chunks smaller than _RUN_CHUNK_BYTES that lie no further apart than _RUN_GAP_BYTES are read
together, up to _RUN_BYTES at a time; larger ones go straight to their destination."""

THREADS_MAX = 8


def default_threads() -> int:
    """Threads of a load: reading and hashing overlap, more than a few do not help."""
    return min(THREADS_MAX, 2 * len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Wants:
    """What is to be read: chunk ``rows[i]`` of the table to byte ``offsets[i]`` of ``views``.

    ``rows``, ``views_index`` and ``offsets`` are int64[n]; ``views_index[i]`` picks the view. A
    chunk that is wanted several times leaves the store once.
    """

    rows: npt.NDArray[np.int64]
    views_index: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    views: Sequence[memoryview]


class _Piece(NamedTuple):
    """One chunk in its segment, and where it goes."""

    offset: int
    length: int
    digest: bytes
    targets: list[memoryview]


class _Job(NamedTuple):
    """Neighbouring chunks of one segment that one read brings."""

    segment: int
    pieces: list[_Piece]


@dataclass(slots=True)
class _Shared:
    """What the threads of one load have in common."""

    jobs: Iterator[_Job]
    open: _OpenSegments
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
    jobs = list(_jobs(table, wants))
    shared = _Shared(iter(jobs), _OpenSegments(backend, segments, jobs), deadline)
    shared.jobs_left = len(jobs)
    shared.running = min(threads, len(jobs))
    for number in range(shared.running):
        threading.Thread(
            target=_work, args=(shared,), name=f"groupio-load-{number}", daemon=True
        ).start()
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


class _OpenSegments:
    """Opens each segment when its first job comes and closes it after its last."""

    def __init__(
        self, backend: Backend, segments: Sequence[SegmentRef], jobs: Sequence[_Job]
    ) -> None:
        self._backend = backend
        self._segments = segments
        self._lock = threading.Lock()
        self._readers: dict[int, RandomReader | IntegrityError] = {}
        self._left: dict[int, int] = {}
        for job in jobs:
            self._left[job.segment] = self._left.get(job.segment, 0) + 1

    def reader(self, segment: int) -> RandomReader:
        """The open segment; IntegrityError when it is not there."""
        with self._lock:
            found = self._readers.get(segment)
            if found is None:
                try:
                    found = self._backend.reader("segments", self._segments[segment].name)
                except IntegrityError as error:
                    found = error
                self._readers[segment] = found
        if isinstance(found, IntegrityError):
            raise found.with_traceback(None)
        return found

    def path(self, segment: int) -> str:
        """Where the segment should be."""
        return f"{self._backend.path}/segments/{self._segments[segment].name}"

    def done(self, segment: int) -> None:
        """A job of the segment ended."""
        with self._lock:
            self._left[segment] -= 1
            last = self._left[segment] == 0
            found = self._readers.pop(segment, None) if last else None
        if found is not None and not isinstance(found, IntegrityError):
            found.close()


def _jobs(table: ChunkTable, wants: Wants) -> Iterator[_Job]:
    """The wanted chunks as jobs, segment by segment in the order of the file."""
    rows = np.unique(wants.rows)
    order = np.argsort(wants.rows, kind="stable")
    ends = np.searchsorted(wants.rows[order], rows, side="right").tolist()
    begins = [0, *ends[:-1]] if len(ends) else []
    place = np.lexsort((table.offsets[rows], table.segments[rows]))
    chosen = rows[place]
    columns = zip(
        place.tolist(),
        table.segments[chosen].tolist(),
        table.offsets[chosen].tolist(),
        table.lengths[chosen].tolist(),
        strict=True,
    )
    digests = table.digests[chosen].tobytes()
    order_list = order.tolist()
    views_index = wants.views_index.tolist()
    offsets = wants.offsets.tolist()
    run: list[_Piece] = []
    run_segment, run_start, run_end = -1, 0, 0
    for number, (index, segment, offset, length) in enumerate(columns):
        targets = []
        for at in order_list[begins[index] : ends[index]]:
            start = offsets[at]
            targets.append(wants.views[views_index[at]][start : start + length])
        piece = _Piece(offset, length, digests[number * 32 : number * 32 + 32], targets)
        joins = (
            segment == run_segment
            and length < _RUN_CHUNK_BYTES
            and run_end <= offset <= run_end + _RUN_GAP_BYTES
            and offset + length - run_start <= _RUN_BYTES
        )
        if run and not joins:
            yield _Job(run_segment, run)
            run = []
        if length >= _RUN_CHUNK_BYTES:
            yield _Job(segment, [piece])
            run_segment = -1
            continue
        if not run:
            run_segment, run_start = segment, offset
        run.append(piece)
        run_end = offset + length
    if run:
        yield _Job(run_segment, run)


def _work(shared: _Shared) -> None:
    """Take job after job until there is none, the time is up or another thread failed."""
    scratch = bytearray()
    try:
        while not shared.stopped and time.monotonic() < shared.deadline:
            with shared.condition:
                job = next(shared.jobs, None)
            if job is None:
                break
            if len(job.pieces) > 1 and not scratch:
                scratch = bytearray(_RUN_BYTES)
            bad = _do(shared.open, job, scratch)
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
            shared.condition.notify_all()


def _do(opened: _OpenSegments, job: _Job, scratch: bytearray) -> list[_Piece]:
    """Read and verify the pieces of a job; returns those that are damaged."""
    pieces = job.pieces
    try:
        reader = opened.reader(job.segment)
    except IntegrityError:
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
    return [piece for piece in pieces if not _read_piece(reader, piece)]


def _read_piece(reader: RandomReader, piece: _Piece) -> bool:
    target = piece.targets[0]
    try:
        reader.read_into(piece.offset, target)
    except IntegrityError:
        return False
    if blake3(target).digest() != piece.digest:
        return False
    for other in piece.targets[1:]:
        other[:] = target
    return True


def _deliver(piece: _Piece, data: memoryview) -> bool:
    if blake3(data).digest() != piece.digest:
        return False
    for target in piece.targets:
        target[:] = data
    return True
