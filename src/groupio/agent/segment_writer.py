"""The segments of one flush job: where chunks are appended, and how they come to rest.

Places are given in order, under a lock, before the bytes are ready; writes then go to disjoint
ranges from any thread, neighbours joined into one large write.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.agent.placing import NewChunks, Placement, place
from groupio.backend.base import SEGMENTS, Backend, SegmentFile
from groupio.errors import GroupIOError
from groupio.format.records import segment_name
from groupio.format.segment import SegmentHeader, encode_footer, encode_header
from groupio.model import PAGE_BYTES, DecisionKey, ItemSpec, SegmentRef
from groupio.plan.frames import Runs, frame_table
from groupio.protocol.reasons import is_away

SEGMENT_BYTES = 4 << 30
"""A segment that reaches this size is closed and another one started."""

FRAMED_SEGMENT_BYTES = 3 << 30
"""The same for a framed one: with its frames it has to stay below 4 GiB."""

FRAMED_CHUNKS_MAX = 200_000
"""So many chunks of one segment get a frame: below 100 MB, which are made in memory."""

WRITE_BYTES = 16 << 20
"""Neighbouring batches are joined up to this size of one write."""


class Tensors(NamedTuple):
    """What the runs of new chunks are: the chunks of ``items[owners[k]]`` from ``numbers[k]`` on.

    ``owners``, ``shapes`` (:func:`groupio.plan.frames.shapes_of`) and ``numbers`` int64[r] have an
    entry for each run, framed or not.
    """

    items: tuple[ItemSpec, ...]
    owners: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


@dataclass(slots=True)
class Segment:
    """One segment file on its way; ``end`` is where the next chunk goes."""

    seq: int
    name: str
    end: int = PAGE_BYTES
    pending: int = 0
    """Places given whose bytes are not written yet."""
    full: bool = False
    file: SegmentFile | None = None
    size: int | None = None
    """Bytes of the finished, flushed file."""
    digests: list[bytes] = field(default_factory=list)
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    offsets: list[npt.NDArray[np.int64]] = field(default_factory=list)
    framed_runs: list[Runs] = field(default_factory=list)
    """The runs that need frames, in the order of their places."""
    framed_chunks: int = 0
    opening: threading.Lock = field(default_factory=threading.Lock)
    unheard: bool = False
    """The store went away while the file was made: it may be there."""


class Place(NamedTuple):
    """Where appended chunks go: ``offsets`` int64[n] in the segment, ``start`` of the first."""

    segment: Segment
    start: int
    offsets: npt.NDArray[np.int64]
    placement: Placement


class Batch(NamedTuple):
    """Whole pages for one range of a segment; ``owner`` is the pipeline's."""

    seq: int
    start: int
    nbytes: int
    number: int
    """Tells batches apart in a heap."""
    views: list[memoryview]
    bounce: mmap.mmap | None
    owner: Any
    segment: Segment


class SegmentWriter:
    """Appends chunks to ``<key>-<node>-<seq>.seg`` files; thread-safe.

    Nothing is created before the first chunk comes. With ``framed`` the segments have frames, for
    those runs that ask for them.
    """

    def __init__(
        self,
        backend: Backend | Callable[[], Backend],
        *,
        store_id: str,
        key: DecisionKey,
        node: str,
        framed: bool = False,
        first_seq: int = 0,
    ) -> None:
        """``first_seq`` is the number of the first segment: those before it are of others.

        A callable ``backend`` is asked for one, in a writer thread, when the first segment is made.
        """
        self.first_seq = first_seq
        self._take_backend = backend if callable(backend) else lambda: backend
        self._taking = threading.Lock()
        self._taken: Backend | None = None
        self._framed = framed
        self._store_id = store_id
        self._key = key
        self._node = node
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._waiting: list[Batch] = []
        self._number = 0

    @property
    def count(self) -> int:
        """How many segments were begun."""
        return len(self._segments)

    @property
    def names(self) -> list[str]:
        """The files made so far, and those that may have been."""
        return [s.name for s in self._segments if s.file is not None or s.unheard]

    def append(self, digests: Sequence[bytes], new: NewChunks, tensors: Tensors) -> Place:
        """Give places to new chunks (at least one); their bytes follow with :meth:`put`."""
        placement = place(new)
        counts = np.diff(new.first, append=len(new.lengths))
        framed_chunks = int(counts[new.framed].sum())
        with self._lock:
            segment = self._with_room(placement.total, framed_chunks)
            start = segment.end
            offsets = start + placement.offsets
            segment.end += placement.total
            segment.pending += 1
            segment.digests.extend(digests)
            segment.lengths.append(new.lengths)
            segment.offsets.append(offsets)
            if framed_chunks:
                where = (tensors.owners, tensors.shapes, tensors.numbers, counts)
                rows = np.stack((*where, offsets[new.first]), axis=1)[new.framed]
                segment.framed_runs.append(Runs(tensors.items, rows))
                segment.framed_chunks += framed_chunks
        return Place(segment, start, offsets, placement)

    def put(
        self, where: Place, views: list[memoryview], bounce: mmap.mmap | None, owner: Any
    ) -> None:
        """Queue the bytes of a place; each view is whole pages."""
        segment = where.segment
        with self._lock:
            self._number += 1
            batch = Batch(
                segment.seq,
                where.start,
                where.placement.total,
                self._number,
                views,
                bounce,
                owner,
                segment,
            )
            heappush(self._waiting, batch)

    def take(self) -> list[Batch]:
        """The next neighbouring batches, WRITE_BYTES at most; none when nothing is queued."""
        with self._lock:
            if not self._waiting:
                return []
            run = [heappop(self._waiting)]
            nbytes = run[0].nbytes
            while self._waiting:
                last, following = run[-1], self._waiting[0]
                touches = (following.seq, following.start) == (last.seq, last.start + last.nbytes)
                nbytes += following.nbytes
                if not touches or nbytes > WRITE_BYTES:
                    break
                run.append(heappop(self._waiting))
            return run

    def write(self, run: list[Batch]) -> Segment | None:
        """Write what :meth:`take` gave; the segment, when it is now ready for :meth:`seal`.

        Nothing is durable yet. Raises the backend's typed errors.
        """
        segment = run[0].segment
        file = self._open(segment)
        start = run[0].start
        views = [view for batch in run for view in batch.views]
        if start == PAGE_BYTES:
            start = 0
            views.insert(0, self._header_page(segment.seq))
        file.write(start, views)
        with self._lock:
            segment.pending -= len(run)
            return segment if segment.full and not segment.pending else None

    def seal(self, segment: Segment) -> None:
        """Write the footer and flush; the bytes are durable, the name after :meth:`finish`."""
        assert segment.file is not None
        footer = encode_footer(
            np.concatenate(segment.offsets),
            np.concatenate(segment.lengths),
            np.frombuffer(b"".join(segment.digests), np.uint8).reshape(-1, 32),
            segment.end,
            frame_table(segment.framed_runs) if self._framed else None,
        )
        segment.file.write_tail(segment.end, footer)
        segment.file.sync_close(segment.end + len(footer))
        segment.size = segment.end + len(footer)

    def finish(self) -> tuple[SegmentRef, ...]:
        """Seal the last segment; on return all segments and their names are durable.

        Call it once, when every place given is written.
        """
        for segment in self._segments:
            if segment.size is None:
                self.seal(segment)
        if self._segments:
            self._backend().sync_folder(SEGMENTS)
        return tuple(
            SegmentRef(segment.name, segment.size or 0, own=True) for segment in self._segments
        )

    def delete(self) -> None:
        """Remove every file made so far; raises the first error after trying all."""
        first: GroupIOError | None = None
        for segment in self._segments:
            if segment.file is None and not segment.unheard:
                continue
            if segment.file is not None:
                segment.file.abort()
            try:
                # Those through which it was made may be of a mount that is gone.
                self._take_backend().delete(SEGMENTS, segment.name)
            except GroupIOError as error:
                first = first or error
        if first is not None:
            raise first

    def _with_room(self, nbytes: int, framed_chunks: int) -> Segment:
        if self._segments:
            last = self._segments[-1]
            limit = FRAMED_SEGMENT_BYTES if self._framed else SEGMENT_BYTES
            crowded = last.framed_chunks + framed_chunks > FRAMED_CHUNKS_MAX
            if last.end + nbytes <= limit and not crowded:
                return last
            last.full = True
        seq = self.first_seq + len(self._segments)
        segment = Segment(seq, segment_name(self._key, self._node, seq))
        self._segments.append(segment)
        return segment

    def _open(self, segment: Segment) -> SegmentFile:
        with segment.opening:
            if segment.file is None:
                backend = self._backend()
                try:
                    segment.file = backend.create_segment(segment.name)
                except GroupIOError as error:
                    segment.unheard |= is_away(error)
                    raise
            return segment.file

    def _backend(self) -> Backend:
        """The one backend of all segments: through another one their names are not made durable."""
        with self._taking:
            if self._taken is None:
                self._taken = self._take_backend()
            return self._taken

    def _header_page(self, seq: int) -> memoryview:
        header = encode_header(
            SegmentHeader(
                store_id=self._store_id,
                key=self._key,
                node=self._node,
                seq=seq,
                framed=self._framed,
            )
        )
        page = mmap.mmap(-1, PAGE_BYTES)  # page-aligned, as a direct write needs it
        page[: len(header)] = header
        return memoryview(page)
