"""The worker of one rank in a grouped read: fills slots for others, empties theirs, reads its
own."""

from __future__ import annotations

import heapq
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from groupio.backend.base import Backend
from groupio.client.chunk_reader import (
    RUN_BYTES,
    Job,
    OpenSegments,
    Wants,
    do_job,
    jobs_of,
    place,
)
from groupio.client.collection import collection_paused
from groupio.client.shared_window import Places, Window
from groupio.exhaustion import start_some
from groupio.model import ChunkTable, SegmentRef
from groupio.plan.sharing import Sharing

_JOIN_S = 0.5
"""After an error a thread may still be in a read; it then ends by itself later."""


class Source(NamedTuple):
    """What there is to read from."""

    backend: Backend
    segments: Sequence[SegmentRef]
    table: ChunkTable


class Filled(NamedTuple):
    """A batch that is verified in a slot; ``bad`` are the numbers of its damaged chunks."""

    reader: int
    batch: int
    slot: int
    bad: list[int]


class Voice(NamedTuple):
    """How the threads speak: to the other ranks, and to the rank's own main thread."""

    filled: Callable[[Filled], None]
    """One of this rank's batches can be copied by the others."""
    copied: Callable[[int, int], None]
    """Another reader's batch is needed no more by this rank."""
    ended: Callable[[], None]
    """The last thread has ended, or one has failed."""


class Work:
    """The threads of one rank in one round, from :meth:`start` to :meth:`stop`.

    ``finished`` is set when this rank has all it wants and has read all that it reads for others,
    ``error`` when a thread failed. ``damaged`` are rows of the table; ``bytes_read`` came from
    the store, ``bytes_forwarded`` from other ranks.
    """

    def __init__(
        self,
        source: Source,
        wants: Wants,
        sharing: Sharing,
        me: int,
        window: Window | None,
        voice: Voice,
    ) -> None:
        self._source = source
        self._sharing = sharing
        self._me = me
        self._window = window
        self._voice = voice
        places = Places(sharing)
        # A heap: the slot that is free and was touched before comes first.
        self._free = list(range(places.first[me], places.first[me] + places.counts[me]))
        self._slots: dict[int, int] = {}  # of own batches
        self._mine = sharing.shares[me]
        self._targets = Targets(wants)
        self._lock = threading.Condition()
        self._next_batch = 0
        self._in_slots: dict[int, int] = {}  # of own batches: who has not copied it yet
        self._filled: deque[Filled] = deque()
        self._expected = [int(share.wanters[me].sum()) for share in sharing.shares]
        self._expected[me] = 0
        with collection_paused():
            self._alone = deque(jobs_of(source.table, alone(wants, sharing)))
        uses = [job.segment for job in self._alone]
        for batch in range(self._mine.batches):
            uses += self._segments_of(batch)
        self._open = OpenSegments(source.backend, source.segments, uses)
        self._threads: list[threading.Thread] = []
        self._reads_left = len(self._alone) + self._mine.batches
        self._running = 0
        self._stopped = False
        self.finished = False
        self.error: BaseException | None = None
        self.damaged: list[int] = []
        self.bytes_read = 0
        self.bytes_forwarded = 0

    def start(self, threads: int) -> None:
        """Begin; at once finished when there is nothing to do."""
        tasks = len(self._alone) + self._mine.batches + sum(self._expected)
        self._running = min(threads, tasks)
        self.finished = not tasks
        made = [
            threading.Thread(target=self._run, name=f"groupio-read-{number}", daemon=True)
            for number in range(self._running)
        ]
        if made:
            started = start_some(made)
            with self._lock:
                self._running -= len(made) - started
            self._threads = made[:started]

    def take(self, filled: Filled) -> None:
        """Another reader's batch can be copied."""
        with self._lock:
            self._filled.append(filled)
            self._lock.notify()

    def release(self, batch: int) -> None:
        """The other ranks have copied this batch of this rank."""
        self._let_go(batch)

    def waits_for(self) -> set[int]:
        """The readers, by their place on the host, whose batches are still to come."""
        with self._lock:
            return {reader for reader, count in enumerate(self._expected) if count}

    @property
    def reads_left(self) -> bool:
        """Whether this rank itself has still to read from the store."""
        return self._reads_left > 0

    def stop(self) -> None:
        """End the threads, those that wait at once, the others after what they are at."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        end = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))

    # -- the threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        scratch = bytearray()
        try:
            while True:
                task = self._next()
                if task is None:
                    break
                if isinstance(task, Filled):
                    self._copy(task)
                    continue
                if not scratch and (isinstance(task, int) or task.needs_scratch):
                    scratch = bytearray(RUN_BYTES)
                if isinstance(task, int):
                    self._fill(task, scratch)
                else:
                    self._read_alone(task, scratch)
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            # The frames hold views of the window, which could not be unmapped.
            traceback.clear_frames(error.__traceback__)
            with self._lock:
                self.error = self.error or error
                self._stopped = True
                self._lock.notify_all()
            self._voice.ended()
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        with self._lock:
            self._running -= 1
            last = not self._running
            self.finished = last and not self._stopped
        if last:
            self._open.close()
            self._voice.ended()

    def _next(self) -> Filled | int | Job | None:
        """What to do next: others' batches first, since they wait for the slot; then the reading
        for others; None when all is handed out or the work is stopped."""
        with self._lock:
            while not self._stopped:
                if self._filled:
                    filled = self._filled.popleft()
                    self._expected[filled.reader] -= 1
                    if not any(self._expected):
                        self._lock.notify_all()
                    return filled
                left = self._next_batch < self._mine.batches
                if left and self._free:
                    batch = self._next_batch
                    self._next_batch += 1
                    self._in_slots[batch] = 2
                    self._slots[batch] = heapq.heappop(self._free)
                    return batch
                if self._alone:
                    return self._alone.popleft()
                if not left and not any(self._expected):
                    return None
                self._lock.wait()
        return None

    def _read_alone(self, job: Job, scratch: bytearray) -> None:
        bad = do_job(self._open, job, scratch)
        self._open.done(job.segment)
        with self._lock:
            self._reads_left -= 1
            self.bytes_read += sum(piece.length for piece in job.pieces)
            self.damaged += [piece.row for piece in bad]

    def _fill(self, batch: int, scratch: bytearray) -> None:
        """Read and verify a batch into its slot, tell the others, and take it oneself."""
        share = self._mine
        assert self._window is not None
        number = self._slots[batch]
        slot = self._window.view(number)
        at = slice(int(share.starts[batch]), int(share.starts[batch + 1]))
        rows = share.rows[at]
        into = Wants(rows, np.zeros(len(rows), np.int64), share.positions[at], [slot])
        damaged: set[int] = set()
        for job in jobs_of(self._source.table, into):
            damaged.update(piece.row for piece in do_job(self._open, job, scratch))
        for segment in self._segments_of(batch):
            self._open.done(segment)
        bad = [place for place, row in enumerate(rows.tolist()) if row in damaged]
        filled = Filled(self._me, batch, number, bad)
        self._voice.filled(filled)
        with self._lock:
            self._reads_left -= 1
            self.bytes_read += int(self._source.table.lengths[rows].sum())
        self._empty(filled, slot)
        self._let_go(batch)

    def _copy(self, filled: Filled) -> None:
        assert self._window is not None
        slot = self._window.view(filled.slot)
        count = self._empty(filled, slot)
        with self._lock:
            self.bytes_forwarded += count
        self._voice.copied(filled.reader, filled.batch)

    def _empty(self, filled: Filled, slot: memoryview) -> int:
        """Copy what this rank wants out of a slot; the bytes of those chunks."""
        share = self._sharing.shares[filled.reader]
        at = slice(int(share.starts[filled.batch]), int(share.starts[filled.batch + 1]))
        rows, positions = share.rows[at], share.positions[at]
        lengths = self._source.table.lengths[rows]
        bad = set(filled.bad)
        damaged, count = [], 0
        columns = zip(
            rows.tolist(),
            positions.tolist(),
            lengths.tolist(),
            self._targets.of(rows),
            strict=True,
        )
        for number, (row, start, length, entries) in enumerate(columns):
            targets, copies = self._targets.places(row, length, entries)
            if not targets and not copies:
                continue
            if number in bad:
                damaged.append(row)
                continue
            place(targets, copies, slot[start : start + length])
            count += length
        with self._lock:
            self.damaged += damaged
        return count

    def _let_go(self, batch: int) -> None:
        with self._lock:
            self._in_slots[batch] -= 1
            if not self._in_slots[batch]:
                del self._in_slots[batch]
                heapq.heappush(self._free, self._slots.pop(batch))
                self._lock.notify_all()

    def _segments_of(self, batch: int) -> list[int]:
        rows = self._mine.rows[self._mine.starts[batch] : self._mine.starts[batch + 1]]
        found: list[int] = np.unique(self._source.table.segments[rows]).tolist()
        return found


class Targets:
    """Where this rank wants the chunks that it gets out of slots."""

    def __init__(self, wants: Wants) -> None:
        self._wants = wants
        self._order = np.argsort(wants.rows, kind="stable")
        self._rows = wants.rows[self._order]
        self._copies: dict[int, list[Callable[[memoryview], None]]] = {}
        for row, copy in wants.copies:
            self._copies.setdefault(row, []).append(copy)

    def of(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
        """Per row the range of entries that want it; see :meth:`places`."""
        begins = np.searchsorted(self._rows, rows, side="left").tolist()
        ends = np.searchsorted(self._rows, rows, side="right").tolist()
        return list(zip(begins, ends, strict=True))

    def places(
        self, row: int, length: int, entries: tuple[int, int]
    ) -> tuple[list[memoryview], Sequence[Callable[[memoryview], None]]]:
        """The memory that a chunk goes to, and the calls that take parts of it."""
        wants, targets = self._wants, []
        if entries[0] < entries[1]:
            for at in self._order[entries[0] : entries[1]].tolist():
                start = int(wants.offsets[at])
                targets.append(wants.views[int(wants.views_index[at])][start : start + length])
        return targets, self._copies.get(row, ())


def alone(wants: Wants, sharing: Sharing) -> Wants:
    """What is wanted and comes to no slot."""
    mask = ~sharing.shared[wants.rows]
    copies = [(row, copy) for row, copy in wants.copies if not sharing.shared[row]]
    return Wants(
        wants.rows[mask], wants.views_index[mask], wants.offsets[mask], wants.views, copies
    )
