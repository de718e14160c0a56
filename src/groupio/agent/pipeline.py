"""One group's bytes on this node: hash, drop duplicates, write what is new, report.

A wave is cut into tasks of some MiB of adjacent chunks. A hash thread names the chunks of a task,
looks them up among those of this job and of older epochs, gives the new ones a place in the
segment and hands their bytes to the writer threads. Hashing and writing thus overlap, and a wave
is finished when each of its tasks is.
"""

from __future__ import annotations

import logging
import mmap
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from groupio.agent.flush import gather
from groupio.agent.found import IN_NO_SEGMENT, FoundChunks, older_segment
from groupio.agent.hashing import are_many, digest_chunks, digest_of_all, split_tasks
from groupio.agent.known import KnownChunks, KnownIndex
from groupio.agent.placing import NewChunks, find_runs
from groupio.agent.segment_writer import Place, Segment, SegmentWriter, Tensors
from groupio.agent.workers import WorkerPool
from groupio.backend.base import Backend
from groupio.errors import GroupIOError
from groupio.exhaustion import exhausted, is_exhaustion
from groupio.format.items import encode_items, items_id
from groupio.model import DIGEST_BYTES, DecisionKey, ItemSpec, MemberTable, NodeReport
from groupio.plan.frames import shapes_of
from groupio.plan.layout import Layout

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class FlushCounts:
    """What a job has done so far, in bytes (and chunks)."""

    hashed_bytes: int = 0
    hashed_chunks: int = 0
    duplicate_bytes: int = 0
    """Bytes that another chunk of this job has too."""
    known_bytes: int = 0
    """Bytes that an older epoch stored."""
    new_bytes: int = 0
    """Bytes that this job writes."""


@dataclass(slots=True)
class _Member:
    """A member's chunk references, filled as its waves are hashed."""

    rank: int
    items: tuple[ItemSpec, ...]
    layout: Layout
    refs: npt.NDArray[np.int64]
    table_id: bytes
    shapes: npt.NDArray[np.int64] | None = None
    """Numbers of the items' shapes, -1 for those that get no frames; None: not known yet."""


@dataclass(slots=True)
class _Wave:
    """A wave on its way; ``starts`` and ``lengths`` int64[n] are its chunks, relative to view."""

    member: _Member
    number: int
    chunk_lo: int
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    view: memoryview | None
    write: bool
    pending: int
    """Tasks that are not hashed and written yet."""


class _Task(NamedTuple):
    """Hashed chunks of a wave, the first of them chunk ``first`` of the member."""

    wave: _Wave
    first: int
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    digests: list[bytes]


class FlushJob:
    """Hashes and stores the waves of one group's members on this node.

    The callbacks come from worker threads, without any lock held: ``on_wave(rank, wave)`` when
    each chunk of the wave is hashed and, if new, written (its memory may be reused, nothing is
    durable yet); then once either ``on_done(report)`` (everything the report names is durable) or
    ``on_error(error)`` (the job has stopped; ``cancel`` it). With ``write=False`` chunks are only
    hashed: the report names no segments but older ones. With ``framed=True`` the segments of this
    job also have the frames through which torch reads the tensors in them
    (:mod:`groupio.format.frames`).
    """

    def __init__(
        self,
        *,
        backend: Backend | Callable[[], Backend],
        store_id: str,
        key: DecisionKey,
        node: str,
        write: bool,
        framed: bool = False,
        known: KnownChunks | None,
        workers: WorkerPool,
        on_wave: Callable[[int, int], None],
        on_done: Callable[[NodeReport], None],
        on_error: Callable[[GroupIOError], None],
        first_seq: int = 0,
    ) -> None:
        """``first_seq`` is the number of its first segment: those before it are of other jobs."""
        self._key = key
        self._node = node
        self._write = write
        self._known: KnownIndex | None = known.index if known is not None else None
        self._workers = workers
        self._on_wave = on_wave
        self._on_done = on_done
        self._on_error = on_error
        self.framed = framed
        self._writer = SegmentWriter(
            backend, store_id=store_id, key=key, node=node, framed=framed, first_seq=first_seq
        )
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._table = FoundChunks()
        self._many_lock = threading.Lock()
        self._many: dict[bytes, npt.NDArray[np.int64]] = {}
        """The rows of many small chunks that were hashed before, by the digest of all of them."""
        self._counts = FlushCounts()
        self._outstanding = 0
        self._finishing = False
        self._completing = False
        self._stopped = False
        self._on_idle: list[Callable[[], None]] = []

    # -- for the driver ------------------------------------------------------------------------

    def add_wave(
        self,
        rank: int,
        wave: int,
        items: tuple[ItemSpec, ...],
        layout: Layout,
        chunk_lo: int,
        chunk_hi: int,
        view: memoryview,
        virt_lo: int,
        *,
        table_id: bytes = b"",
        shapes: npt.NDArray[np.int64] | None = None,
        write: bool | None = None,
    ) -> None:
        """Take over chunks ``chunk_lo:chunk_hi`` of a member; does not wait.

        ``view`` is page-aligned memory that holds the virtual bytes from ``virt_lo`` on; it must
        not change until ``on_wave``, or until the job is idle after ``cancel``. ``table_id`` is
        the verified id of the encoded items, if the caller has it: it takes 4 us an item to
        compute; ``shapes`` is :func:`groupio.plan.frames.shapes_of` them, for a framed job.
        ``write`` says whether to write what is new in this wave (None: as the job does). A stopped
        job ignores the call.
        """
        starts = layout.chunk_start[chunk_lo:chunk_hi] - virt_lo
        lengths = layout.chunk_length[chunk_lo:chunk_hi]
        tasks = split_tasks(lengths, layout.chunk_item[chunk_lo:chunk_hi])
        with self._lock:
            if self._finishing:
                raise ValueError(f"rank {rank} has another wave after the job's end was announced")
            if self._stopped:
                return
            member = self._members.get(rank)
            if member is None:
                refs = np.full(len(layout.chunk_start), -1, np.int64)
                member = self._members[rank] = _Member(rank, items, layout, refs, table_id, shapes)
            self._outstanding += len(tasks)
        write = self._write if write is None else write
        work = _Wave(member, wave, chunk_lo, starts, lengths, view, write, len(tasks))
        for lo, hi in tasks:
            self._workers.submit_hash(partial(self._run_hash, work, lo, hi))

    def finish(self) -> None:
        """All waves of all members were added; ``on_done`` comes when they are stored."""
        with self._lock:
            self._finishing = True
            self._outstanding += 1
        self._submit_end(self._settle)

    def cancel(self, on_idle: Callable[[], None]) -> None:
        """Stop; ``on_idle`` is called once when no thread touches the views any more.

        That may be at once, from this thread. Another callback that is just under way may still
        come before it, none after it.
        """
        with self._lock:
            self._stopped = True
            working = self._outstanding > 0
            if working:
                self._on_idle.append(on_idle)
        self._workers.uplink.wake()
        if not working:
            on_idle()

    def delete_segments(self) -> None:
        """Remove the segments made so far; only when the job is idle or done. Blocks."""
        self._writer.delete()

    @property
    def next_seq(self) -> int:
        """The number that the next segment of this attempt on this node has."""
        return self._writer.first_seq + self._writer.count

    def counts(self) -> FlushCounts:
        """What was done so far; final once ``on_done`` came."""
        return self._counts

    # -- hash threads --------------------------------------------------------------------------

    def _run_hash(self, wave: _Wave, lo: int, hi: int) -> None:
        if not self._attempt(partial(self._hash, wave, lo, hi)):
            self._task_done(wave)

    def _hash(self, wave: _Wave, lo: int, hi: int) -> bool:
        """Hash chunks ``lo:hi`` of the wave; True when writer threads now have the rest of it."""
        self._workers.give_way()
        view = wave.view
        if lo == hi or view is None:
            return False
        starts, lengths = wave.starts[lo:hi], wave.lengths[lo:hi]
        if are_many(lengths):
            where = self._place_many(wave, view, wave.chunk_lo + lo, starts, lengths)
        else:
            digests = digest_chunks(view, starts, lengths)
            where = self._record(_Task(wave, wave.chunk_lo + lo, starts, lengths, digests))
        if where is None:
            return False
        gathered = gather(view, where.placement, self._take_bounce)
        if gathered is None:
            return False
        self._writer.put(where, gathered.views, gathered.bounce, wave)
        self._workers.submit_write(self._run_write)
        return True

    def _place_many(
        self,
        wave: _Wave,
        view: memoryview,
        first: int,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> Place | None:
        """Hash and :meth:`_record` many small chunks, or find that a member had all of them.

        One thread does so at a time: it has the interpreter to itself anyway, and members that
        are alike come in one after the other.
        """
        with self._many_lock:
            name = digest_of_all(view, starts, lengths)
            rows = self._many.get(name)
            refs = wave.member.refs[first : first + len(lengths)]
            if rows is None:
                digests = digest_chunks(view, starts, lengths)
                where = self._record(_Task(wave, first, starts, lengths, digests))
                self._many[name] = refs.copy()
                return where
        with self._lock:
            refs[:] = rows
            self._count(int(lengths.sum()), len(rows), 0, 0)
        return None

    def _record(self, task: _Task) -> Place | None:
        """Enter the chunks into the table; the place of those to write, if there are any."""
        digests, lengths, member = task.digests, task.lengths, task.wave.member
        known = np.full(len(digests), -1, np.int64)
        if self._known is not None and len(self._known.prefix):
            raw = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
            known = self._known.find(raw, lengths)
        if self.framed and member.shapes is None:
            member.shapes = shapes_of(member.items)
        where: Place | None = None
        with self._lock:
            found, new_list = self._table.claim(digests)
            new = np.array(new_list, np.int64)
            own = new[known[new] < 0]
            segments = np.full(len(new), IN_NO_SEGMENT, np.int32)
            offsets = np.zeros(len(new), np.int64)
            if self._known is not None and len(own) < len(new):
                hit = known[new] >= 0
                rows = known[new][hit]
                segments[hit] = older_segment(self._known.segments[rows])
                offsets[hit] = self._known.offsets[rows]
            if task.wave.write and len(own):
                where = self._append(task, own)
                segments[known[new] < 0] = where.segment.seq - self._writer.first_seq
                offsets[known[new] < 0] = where.offsets
            self._table.fill(lengths[new], segments, offsets)
            member.refs[task.first : task.first + len(found)] = found
            unique, unknown = int(lengths[new].sum()), int(lengths[own].sum())
            self._count(int(lengths.sum()), len(found), unique, unknown)
            self._counts.new_bytes += unknown if task.wave.write else 0
        return where

    def _append(self, task: _Task, own: npt.NDArray[np.int64]) -> Place:
        """Give places to the chunks ``own`` of a task."""
        member, layout = task.wave.member, task.wave.member.layout
        numbers = task.first + own
        items = layout.chunk_item[numbers]
        first = find_runs(numbers, items)
        owners = items[first]
        shapes = np.full(len(first), -1) if member.shapes is None else member.shapes[owners]
        return self._writer.append(
            [task.digests[i] for i in own.tolist()],
            NewChunks(task.starts[own], task.lengths[own], first, shapes >= 0),
            Tensors(member.items, owners, shapes, numbers[first] - layout.item_chunk[owners]),
        )

    def _count(self, total: int, chunks: int, unique: int, unknown: int) -> None:
        counts = self._counts
        counts.hashed_bytes += total
        counts.hashed_chunks += chunks
        counts.duplicate_bytes += total - unique
        counts.known_bytes += unique - unknown

    def _take_bounce(self) -> mmap.mmap | None:
        return self._workers.bounce.take(lambda: self._stopped)

    # -- writer threads ------------------------------------------------------------------------

    def _run_write(self) -> None:
        run = self._writer.take()
        if not run:
            return  # an earlier call took this batch along with its own
        with self._turn(sum(batch.nbytes for batch in run)):
            full = self._attempt(partial(self._writer.write, run))
        if full is not None:
            with self._lock:
                self._outstanding += 1
            self._workers.submit_write(partial(self._run_seal, full))
        for batch in run:
            batch.views.clear()
            if batch.bounce is not None:
                self._workers.bounce.give_back(batch.bounce)
            self._task_done(batch.owner)

    def _run_seal(self, segment: Segment) -> None:
        with self._turn(0):
            self._attempt(partial(self._writer.seal, segment))
        self._settle()

    def _turn(self, nbytes: int) -> AbstractContextManager[None]:
        """Around what brings so many bytes to the store."""
        return self._workers.uplink.writes.moving(nbytes, lambda: self._stopped)

    # -- the end -------------------------------------------------------------------------------

    def _task_done(self, wave: _Wave) -> None:
        with self._lock:
            wave.pending -= 1
            complete = wave.pending == 0
        if complete:
            wave.view = None
            self._attempt(partial(self._on_wave, wave.member.rank, wave.number))
        self._settle()

    def _settle(self) -> None:
        """One piece of work is over; when it was the last one, go on to the end."""
        with self._lock:
            self._outstanding -= 1
            if self._outstanding:
                return
            if self._finishing and not self._stopped and not self._completing:
                self._completing = True
                self._outstanding = 1
                self._submit_end(self._run_complete)
                return
            idle, self._on_idle = self._on_idle, []
        for on_idle in idle:
            on_idle()

    def _submit_end(self, step: Callable[[], None]) -> None:
        """Where nothing was written the end does not wait for what other jobs write."""
        wrote = self._writer.count > 0
        (self._workers.submit_write if wrote else self._workers.submit_hash)(step)

    def _run_complete(self) -> None:
        with self._turn(0) if self._writer.count else nullcontext():
            report = self._attempt(self._complete)
        if report is not None:
            self._attempt(partial(self._on_done, report))
        self._settle()

    def _complete(self) -> NodeReport:
        own = self._writer.finish()
        known = self._known.refs if self._known is not None else ()
        segments, chunks = self._table.finish(own, known)
        members = []
        logical: dict[bytes, int] = {}
        for rank in sorted(self._members):
            member = self._members[rank]
            if len(member.refs) and int(member.refs.min()) < 0:
                raise GroupIOError(
                    f"rank {rank} ended epoch {self._key.epoch} with chunk "
                    f"{int(member.refs.argmin())} of {len(member.refs)} never handed over; save "
                    "again"
                )
            table_id = member.table_id or items_id(encode_items(member.items))
            if table_id not in logical:
                logical[table_id] = sum(item.nbytes for item in member.items)
            members.append(
                MemberTable(rank, member.items, table_id, member.refs, logical[table_id])
            )
        return NodeReport(self._node, segments, chunks, tuple(members))

    def _attempt(self, step: Callable[[], _T]) -> _T | None:
        """Do ``step`` unless the job has stopped; a fault stops it."""
        if self._stopped:
            return None
        try:
            return step()
        except GroupIOError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a worker thread must outlive any fault
            # As text: a log handler that kept the frames would keep views into the arena.
            _log.error("flush of %s on %s\n%s", self._key, self._node, traceback.format_exc())
            flush = f"the flush of epoch {self._key.epoch} on node {self._node}"
            if is_exhaustion(error):
                self._fail(exhausted(error, f"go on with {flush}"))
            else:
                self._fail(
                    GroupIOError(
                        f"{flush} met an internal error ({type(error).__name__}: {error}); the "
                        "agent's log has the details"
                    )
                )
        return None

    def _fail(self, error: GroupIOError) -> None:
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._workers.uplink.wake()
        _log.warning("flush of %s on %s failed: %s", self._key, self._node, error)
        drop_frames(error)
        self._on_error(error)


def drop_frames(error: BaseException | None) -> None:
    """Forget the stack frames of an error: they would keep views into the arena alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
