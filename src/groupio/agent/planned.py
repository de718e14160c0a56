"""The bytes of a planned group on this node: hash and report, then do what the plan says.

While waves come they are only hashed. The plan then says, round by round, which chunks this node
writes from its own memory, and which it fetches from peers, to keep them or to write them over its
own uplink. Where the members' state goes through memory in waves, its bytes cannot wait for a
plan: such a node writes at once, as in a group of one node, and reports what it stored.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.agent.fetching import Fetched, Fetcher, Room
from groupio.agent.flush import gather
from groupio.agent.hashing import split_tasks
from groupio.agent.holdings import Places
from groupio.agent.pipeline import FlushCounts, FlushJob, drop_frames
from groupio.agent.placing import NewChunks, find_runs
from groupio.agent.segment_writer import Batch, Place, Segment, SegmentWriter, Tensors
from groupio.agent.stored import Row, Stored, find_tensors
from groupio.agent.workers import WorkerPool
from groupio.backend.base import SEGMENTS, Backend
from groupio.errors import GroupIOError, StorageError
from groupio.exhaustion import exhausted, is_exhaustion
from groupio.model import ChunkTable, DecisionKey, ItemSpec, NodeReport
from groupio.plan.frames import shapes_of
from groupio.plan.layout import Layout
from groupio.plan.orders import Fetch, NodeOrder

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where the bytes of a member lie until the group is closed."""

    items: tuple[ItemSpec, ...]
    layout: Layout
    view: memoryview
    arena: int
    offset: int


@dataclass(frozen=True, slots=True)
class Told:
    """Whom a planned flush tells what; called from worker threads without any lock held."""

    hashed: Callable[[NodeReport], None]
    replicated: Callable[[int, npt.NDArray[np.uint8]], None]
    """The round, and the digests of all replicas that are here now, uint8[n, 32]."""
    stored: Callable[[int, NodeReport], None]
    """The round, and everything that this node has stored of the group so far.

    Where a round falls short it is told under the round before: what was written stays written.
    """
    short: Callable[[int, Fetched, npt.NDArray[np.uint8]], None]
    """The round, which chunks came from no peer (maybe none, where a peer lied), and the digests
    of all replicas that are here."""
    failed: Callable[[GroupIOError], None]


class PlannedFlush:
    """One group's flush by plan. ``base`` hashes (or, with waves, writes) what members bring.

    Memory of the members and of the replicas must stay as it is until the job is idle after
    ``cancel``, or its group is closed.
    """

    def __init__(
        self,
        *,
        backend: Callable[[], Backend],
        store_id: str,
        key: DecisionKey,
        node: str,
        framed: bool,
        workers: WorkerPool,
        fetcher: Fetcher,
        pool: Executor,
        told: Told,
        wrote: Callable[[int, float], None],
    ) -> None:
        """``backend`` gives each round that writes its own: the store may have been away since.
        ``wrote`` is told of bytes written and the seconds that they took.
        """
        self._backend = backend
        self._store_id = store_id
        self._key = key
        self._node = node
        self.framed = framed
        self._workers = workers
        self._fetcher = fetcher
        self._pool = pool
        self._told = told
        self._wrote = wrote
        self._lock = threading.Lock()
        self._sources: dict[int, Source] = {}
        self._base: FlushJob | None = None
        self._report: NodeReport | None = None
        self._where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        self._stored = Stored(node)
        self._round_lock = threading.Lock()
        """Rounds come one after the other: a later one leaves out what an earlier one did."""
        self._done: set[bytes] = set()
        """Digests of the chunks that this node wrote."""
        self._writers: list[SegmentWriter] = []
        self._unfinished: list[str] = []
        """Segments of rounds that failed which could not be removed at once."""
        self._written_bytes = 0
        self._running = 0
        self._stopped = False
        self._on_idle: list[Callable[[], None]] = []

    # -- hashing ----------------------------------------------------------------------------------

    def begin(self, base: FlushJob) -> None:
        """Use ``base`` for what members bring; its ``on_done`` must be :meth:`hashed`."""
        self._base = base

    def add_wave(
        self,
        rank: int,
        number: int,
        source: Source,
        chunk_lo: int,
        chunk_hi: int,
        virt_lo: int,
        *,
        eager: bool,
        table_id: bytes,
        shapes: npt.NDArray[np.int64] | None,
    ) -> None:
        """Take over a wave of a member; one that is not ``eager`` stays in memory, whole."""
        assert self._base is not None
        if not eager:
            self._sources[rank] = source
        self._base.add_wave(
            rank,
            number,
            source.items,
            source.layout,
            chunk_lo,
            chunk_hi,
            source.view,
            virt_lo,
            table_id=table_id,
            shapes=shapes,
            write=eager,
        )

    def hashed(self, report: NodeReport) -> None:
        """All chunks of the node are named."""
        self._report = report
        self._told.hashed(report)

    @property
    def report(self) -> NodeReport | None:
        """What was hashed, once all of it is."""
        return self._report

    def places(self) -> Places | None:
        """Where the chunks of the report that stay in memory lie."""
        if self._report is None or not self._sources:
            return None
        chunks = self._report.chunks
        arenas, offsets = np.full(len(chunks), -1, np.int64), np.zeros(len(chunks), np.int64)
        for member in reversed(self._report.members):
            source = self._sources.get(member.rank)
            if source is not None:
                arenas[member.refs] = source.arena
                offsets[member.refs] = source.offset + source.layout.chunk_start
        if (arenas >= 0).all():
            return Places(chunks.digests, arenas, offsets, chunks.lengths)
        rows = np.flatnonzero(arenas >= 0)
        return Places(chunks.digests[rows], arenas[rows], offsets[rows], chunks.lengths[rows])

    def _locations(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each row of the report: a rank whose lease has it, and its chunk there; -1: none."""
        if self._where is None:
            assert self._report is not None
            ranks = np.full(len(self._report.chunks), -1, np.int64)
            numbers = np.full(len(self._report.chunks), -1, np.int64)
            for member in reversed(self._report.members):
                if member.rank in self._sources:
                    ranks[member.refs] = member.rank
                    numbers[member.refs] = np.arange(len(member.refs))
            self._where = ranks, numbers
        return self._where

    # -- orders -----------------------------------------------------------------------------------

    def run_order(
        self, number: int, order: NodeOrder, addresses: dict[str, str], rooms: Sequence[Room]
    ) -> None:
        """Do round ``number``: fetch, keep and write; answers come through ``told``.

        ``rooms`` are the memory for fetched chunks that stay, those of earlier rounds included.
        """
        with self._lock:
            if self._stopped:
                return
            self._running += 1
        self._pool.submit(self._guarded, partial(self._run, number, order, addresses, rooms))

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except GroupIOError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a worker thread must outlive any fault
            # As text: a log handler that kept the frames would keep views into the arena.
            log.error("storing %s on %s\n%s", self._key, self._node, traceback.format_exc())
            storing = f"storing epoch {self._key.epoch} on node {self._node}"
            if is_exhaustion(error):
                self._fail(exhausted(error, f"go on with {storing}"))
            else:
                self._fail(
                    StorageError(
                        f"S{storing[1:]} met an internal error ({type(error).__name__}: {error}); "
                        "the agent's log has the details."
                    )
                )
        self._end_step()

    def _run(
        self, number: int, order: NodeOrder, addresses: dict[str, str], rooms: Sequence[Room]
    ) -> None:
        with self._round_lock:
            self._run_alone(number, order, addresses, rooms)

    def _run_alone(
        self, number: int, order: NodeOrder, addresses: dict[str, str], rooms: Sequence[Room]
    ) -> None:
        if self._ended():
            return
        writer = SegmentWriter(
            self._backend,
            store_id=self._store_id,
            key=self._key,
            node=self._node,
            framed=self.framed,
            first_seq=self._seq(),
        )
        self._writers.append(writer)
        rows: list[Row] = []
        keeps = order.record or any(part.keep.any() for part in order.fetch)
        try:
            fetched = self._fetcher.fetch(
                order.fetch,
                addresses,
                rooms,
                partial(self._write_moved, writer, rows),
                self._ended,
                kept=partial(self._tell_kept, number) if keeps else None,
                meanwhile=partial(self._write_own, writer, order.write, rows),
            )
            with self._turn(0):
                if self._ended():
                    return
                self._done |= self._stored.enter(writer, rows)
        except BaseException:
            self._discard(writer)
            raise
        if not len(fetched.missing) and not fetched.liars:
            self._told.stored(number, self._stored.report(self._report))
            self._sweep()
            return
        if rows:
            self._told.stored(number - 1, self._stored.report(self._report))
        self._told.short(number, fetched, self._fetcher.copies)

    def _tell_kept(self, number: int) -> None:
        if not self._stopped:
            self._told.replicated(number, self._fetcher.copies)

    def _discard(self, writer: SegmentWriter) -> None:
        """Remove the segments of a round that failed: the same order may come again."""
        try:
            writer.delete()
        except GroupIOError as error:
            log.warning("a segment of no use stays in the store for now: %s", error.message)
            self._unfinished += writer.names

    def _sweep(self) -> None:
        """Remove what rounds before this one left, now that the store is back."""
        names, self._unfinished = self._unfinished, []
        for name in names:
            try:
                self._backend().delete(SEGMENTS, name)
            except GroupIOError as error:
                log.warning("a segment of no use stays in the store: %s", error.message)

    def _seq(self) -> int:
        """Segments of later rounds, and those that the waves wrote, keep their numbers."""
        own = 0 if self._report is None else sum(s.own for s in self._report.segments)
        return own + sum(writer.count for writer in self._writers)

    # -- writing ----------------------------------------------------------------------------------

    def _write_own(
        self, writer: SegmentWriter, wanted: npt.NDArray[np.int64], rows: list[Row]
    ) -> None:
        """Append the rows ``wanted`` of this node's own table, in the order of their memory."""
        if not len(wanted):
            return
        assert self._report is not None
        ranks, numbers = self._locations()
        chunks = self._report.chunks
        if self._done:
            old = [chunks.digests[row].tobytes() in self._done for row in wanted.tolist()]
            wanted = wanted[~np.array(old, np.bool_)]
        for rank, source in self._sources.items():
            mine = wanted[ranks[wanted] == rank]
            mine = mine[np.argsort(numbers[mine])]
            shapes = shapes_of(source.items) if self.framed else None
            items = source.layout.chunk_item[numbers[mine]]
            for lo, hi in split_tasks(chunks.lengths[mine], items) if len(mine) else ():
                self._workers.give_way()
                part = mine[lo:hi]
                self._append(writer, source, chunks, part, numbers[part], shapes, rows)

    def _append(
        self,
        writer: SegmentWriter,
        source: Source,
        chunks: ChunkTable,
        part: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
        shapes: npt.NDArray[np.int64] | None,
        rows: list[Row],
    ) -> None:
        if self._stopped:
            return
        layout = source.layout
        items = layout.chunk_item[numbers]
        first = find_runs(numbers, items)
        owners = items[first]
        kinds = np.full(len(first), -1) if shapes is None else shapes[owners]
        starts = layout.chunk_start[numbers]
        where = writer.append(
            [chunks.digests[row].tobytes() for row in part.tolist()],
            NewChunks(starts, chunks.lengths[part], first, kinds >= 0),
            Tensors(source.items, owners, kinds, numbers[first] - layout.item_chunk[owners]),
        )
        rows.append(
            Row(chunks.digests[part], chunks.lengths[part], where.segment.seq, where.offsets)
        )
        self._put(writer, where, source.view)

    def _write_moved(
        self,
        writer: SegmentWriter,
        rows: list[Row],
        buffer: memoryview,
        starts: npt.NDArray[np.int64],
        part: Fetch,
        chosen: npt.NDArray[np.int64],
    ) -> None:
        """Write rows ``chosen`` of a fetch, which lie at ``starts`` of ``buffer``; any thread."""
        if self._done:
            new = [part.digests[row].tobytes() not in self._done for row in chosen.tolist()]
            starts, chosen = starts[np.array(new, np.bool_)], chosen[np.array(new, np.bool_)]
        if self._stopped or not len(chosen):
            return
        # Headers of frames may make more of small tensors than a bounce buffer holds.
        for lo, hi in split_tasks(part.lengths[chosen], np.arange(len(chosen))):
            at, rows_of_part = starts[lo:hi], chosen[lo:hi]
            digests, lengths = part.digests[rows_of_part], part.lengths[rows_of_part]
            first, tensors = find_tensors(part.labels, rows_of_part, at, lengths)
            where = writer.append(
                [digest.tobytes() for digest in digests],
                NewChunks(at, lengths, first, tensors.shapes >= 0),
                tensors,
            )
            rows.append(Row(digests, lengths, where.segment.seq, where.offsets))
            self._put(writer, where, buffer)

    def _put(self, writer: SegmentWriter, where: Place, memory: memoryview) -> None:
        """Write what was given a place; on return no thread uses its memory any more."""
        gathered = gather(memory, where.placement, self._take_bounce)
        if gathered is None:
            return
        over = threading.Event()
        writer.put(where, gathered.views, gathered.bounce, over)
        self._drain(writer)
        over.wait()  # another thread may have taken it along with its own

    def _drain(self, writer: SegmentWriter) -> None:
        """Write what is queued; a segment that is full then is sealed."""
        while run := writer.take():
            try:
                with self._turn(sum(batch.nbytes for batch in run)):
                    full = None if self._stopped else self._write(writer, run)
            finally:
                for batch in run:
                    batch.views.clear()
                    if batch.bounce is not None:
                        self._workers.bounce.give_back(batch.bounce)
                    batch.owner.set()
            if full is not None:
                with self._turn(0):
                    writer.seal(full)

    def _turn(self, nbytes: int) -> AbstractContextManager[None]:
        """Around what brings so many bytes to the store."""
        return self._workers.uplink.writes.moving(nbytes, self._ended)

    def _write(self, writer: SegmentWriter, run: list[Batch]) -> Segment | None:
        nbytes = sum(batch.nbytes for batch in run)
        began = time.monotonic()
        full = writer.write(run)
        self._wrote(nbytes, time.monotonic() - began)
        with self._lock:
            self._written_bytes += nbytes
        return full

    def _take_bounce(self) -> Any:
        return self._workers.bounce.take(lambda: self._stopped)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """All waves of all members were added."""
        if self._base is not None:
            self._base.finish()

    def cancel(self, on_idle: Callable[[], None]) -> None:
        """Stop; ``on_idle`` is called once when no thread touches the views any more."""
        with self._lock:
            self._stopped = True
            self._running += 1
            self._on_idle.append(on_idle)
        self._workers.uplink.wake()
        self._fetcher.cancel()
        if self._base is None:
            self._end_step()
        else:
            self._base.cancel(self._end_step)

    def _end_step(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running or not self._stopped:
                return
            idle, self._on_idle = self._on_idle, []
        for on_idle in idle:
            on_idle()

    def delete_segments(self) -> None:
        """Remove the segments made so far; only when the job is idle or done. Blocks."""
        if self._base is not None:
            self._base.delete_segments()
        for writer in self._writers:
            writer.delete()

    def counts(self) -> FlushCounts:
        """What was done so far."""
        counts = FlushCounts() if self._base is None else self._base.counts()
        return replace(counts, new_bytes=counts.new_bytes + self._written_bytes)

    def _ended(self) -> bool:
        return self._stopped

    def _fail(self, error: GroupIOError) -> None:
        with self._lock:
            if self._stopped:
                return
        log.warning("storing %s on %s failed: %s", self._key, self._node, error.message)
        drop_frames(error)
        self._told.failed(error)
