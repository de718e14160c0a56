"""The grouped read of all ranks of a process group, over all nodes, by its own operations.

For clusters in which nothing but the job's collectives crosses between nodes
(``GROUPIO_FABRIC=torch``). Each chunk leaves the store once: one of the ranks that want it reads
and verifies it and sends it to the others, who verify it again. Threads read ahead; only the
calling thread talks to the process group.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from blake3 import blake3

from groupio.backend.base import Backend
from groupio.client.chunk_reader import (
    RUN_BYTES,
    OpenSegments,
    Wants,
    do_job,
    jobs_of,
    place,
    read_chunks,
)
from groupio.client.shared_read import identity_of, in_file_order
from groupio.client.shared_window import SLOT_BYTES
from groupio.client.shared_work import Source, Targets, alone
from groupio.errors import (
    FormatError,
    GroupAborted,
    GroupIOError,
    IntegrityError,
    StorageError,
)
from groupio.exhaustion import ThreadPool
from groupio.model import ChunkTable, SegmentRef
from groupio.plan.exchange import plan_rounds
from groupio.plan.sharing import Share, Sharing, share_reading
from groupio.torch.exchange import Bytes, Mover
from groupio.torch.members import Council

log = logging.getLogger("groupio.torch")

WINDOW_BYTES = 64 << 20
"""What a rank receives at once."""

AHEAD = 8
"""Batches, of at most SLOT_BYTES, that a rank has read and not yet sent."""

_GOOD, _DAMAGED, _FAILED = 0, 1, 2
"""What the reader says of each chunk, one byte each behind the bytes of a batch."""

_DAMAGE = (IntegrityError, FormatError)


class CollectiveRead:
    """One rank's part; used like :class:`groupio.client.shared_read.GroupedRead`.

    ``bytes_read`` came from the store to this rank, ``bytes_forwarded`` from other ranks, over
    all fills so far; both count whole chunks.
    """

    def __init__(self, council: Council, group: dist.ProcessGroup | None) -> None:
        """``council`` of the same ranks is for this reading alone; its deadline bounds how long
        they wait for the slowest one to come to a fill."""
        self.bytes_read = 0
        self.bytes_forwarded = 0
        self._council = council
        self._mover = Mover(group)
        self._me = council.members.rank
        self._asked = False
        self.notes = [
            f"chunks moved between ranks by the process group ({self._mover.backend}), each read "
            "by one rank of all"
        ]

    def close(self) -> None:
        """Nothing is open between fills."""

    @contextmanager
    def fill(self, epoch: int, deadline: float) -> Iterator[None]:
        """Within it this rank fills its state, and calls :meth:`fetch` once or not at all.

        When it does not, because it wants nothing or met damage before, the others read without
        it; when it leaves with any other error they raise one that names this rank.
        """
        self._asked = False
        try:
            yield
        except _DAMAGE:
            self._sit_out()
            raise
        except BaseException as error:
            if not self._asked:
                self._asked = True
                self._give_up(error, epoch)
            raise
        self._sit_out()

    def fetch(
        self,
        backend: Backend,
        segments: Sequence[SegmentRef],
        table: ChunkTable,
        wants: Wants,
        *,
        deadline: float,
        threads: int,
        epoch: int,
    ) -> list[bytes]:
        """As :func:`groupio.client.chunk_reader.read_chunks`, together with all other ranks.

        Damage is returned to every rank that wanted the chunk. GroupTimeout names ranks that did
        not come; GroupAborted: a rank ended in between. A rank whose reading fails raises its own
        error after the others got what they want from the store.
        """
        self._asked = True
        source = Source(backend, segments, table)
        mine = {"table": identity_of(table).hex(), "chunks": len(table)}
        verdict = self._council.decide(mine, _judge)
        if verdict["note"]:
            self.notes.append(verdict["note"])
            bad = read_chunks(*source, wants, deadline=deadline, threads=threads, epoch=epoch)
            self.bytes_read += int(table.lengths[wants.all_rows()].sum())
            return bad
        mask = np.zeros(len(table), np.bool_)
        mask[wants.all_rows()] = True
        sharing = self._share(mask, table)
        work = _Round(source, wants, sharing, self._me, deadline, threads, epoch)
        try:
            with work:
                self._exchange(work)
                return work.finish()
        finally:
            self.bytes_read += work.bytes_read
            self.bytes_forwarded += work.bytes_forwarded

    def _share(self, mask: npt.NDArray[np.bool_], table: ChunkTable) -> Sharing:
        wanted = self._gather(mask)
        return share_reading(wanted, table, SLOT_BYTES)

    def _gather(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        packed = self._mover.gather(np.packbits(mask)) if len(mask) else [np.empty(0, np.uint8)]
        rows = [np.unpackbits(one, count=len(mask)).astype(np.bool_) for one in packed]
        return np.array(rows, np.bool_).reshape(len(packed), len(mask))

    def _exchange(self, work: _Round) -> None:
        """Send and receive, round by round; what came in one is put into place during the next."""
        sharing = work.sharing
        sizes = [_sizes(share, work.source.table) for share in sharing.shares]
        rounds = plan_rounds(sharing, sizes, WINDOW_BYTES)
        for transfers in rounds.of(sharing, self._me):
            sends, receives = [], []
            for reader, batch in transfers:
                if reader == self._me:
                    others = np.flatnonzero(sharing.shares[reader].wanters[:, batch])
                    ranks = others[others != self._me].tolist()
                    sends.append((work.take(batch), ranks))
                else:
                    receives.append((reader, int(sizes[reader][batch])))
            arrived = self._mover.move(sends, receives)
            came = [pair for pair in transfers if pair[0] != self._me]
            work.deliver(list(zip(came, arrived, strict=True)))

    def _sit_out(self) -> None:
        """Take part without wanting anything."""
        if self._asked:
            return
        self._asked = True
        verdict = self._council.decide({"table": "", "chunks": 0}, _judge)
        if not verdict["note"]:
            self._gather(np.zeros(verdict["chunks"], np.bool_))

    def _give_up(self, error: BaseException, epoch: int) -> None:
        if not isinstance(error, GroupIOError):
            error = GroupAborted(
                f"reading epoch {epoch} failed: {type(error).__name__}: {error}; see its output",
                epoch=epoch,
            )
        try:
            self._council.decide(error, _judge)
        except GroupIOError:
            pass  # it is on its way to the caller already


class _Round:
    """What one rank reads ahead for others, takes from them, and reads for itself alone."""

    def __init__(
        self,
        source: Source,
        wants: Wants,
        sharing: Sharing,
        me: int,
        deadline: float,
        threads: int,
        epoch: int,
    ) -> None:
        self.source = source
        self.sharing = sharing
        self.bytes_read = 0
        self.bytes_forwarded = 0
        self._wants = wants
        self._targets = Targets(wants)
        self._me = me
        self._mine = sharing.shares[me]
        self._deadline = deadline
        self._threads = threads
        self._epoch = epoch
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._damaged: list[int] = []
        self._again: list[int] = []
        uses = source.table.segments[self._mine.rows].tolist()
        self._open = OpenSegments(source.backend, source.segments, uses)
        self._reading = ThreadPool(max(threads, 1), "groupio-read")
        self._placing = ThreadPool(1, "groupio-place")
        self._batches: dict[int, Future[Bytes]] = {}
        self._placed: Future[None] | None = None
        self._next = 0
        self._alone: Future[list[bytes]] = self._reading.submit(self._read_alone)
        for _ in range(AHEAD):
            self._read_ahead()

    def __enter__(self) -> _Round:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._placing.shutdown(wait=True, cancel_futures=True)
        self._open.close()

    # -- the calling thread ----------------------------------------------------------------------

    def take(self, batch: int) -> Bytes:
        """A batch of this rank, read or failed, with what it says of its chunks."""
        data = self._batches.pop(batch).result()
        self._read_ahead()
        return data

    def deliver(self, arrived: list[tuple[tuple[int, int], Bytes]]) -> None:
        """Put what came into place, in another thread; waits for what came before."""
        if self._placed is not None:
            self._placed.result()
        self._placed = self._placing.submit(self._deliver, arrived)

    def finish(self) -> list[bytes]:
        """Digests of the damaged chunks that this rank wanted; raises what went wrong here."""
        if self._placed is not None:
            self._placed.result()
        bad = self._alone.result()
        if self._error is not None:
            raise self._error
        if self._again:
            log.warning(
                "%d chunks did not come from other ranks as they should; read again from %s",
                len(self._again),
                self.source.backend.path,
            )
            bad = bad + self._read(_only(self._wants, self._again))
            self.bytes_read += int(self.source.table.lengths[self._again].sum())
        return in_file_order(self.source.table, self._damaged) + bad

    # -- threads ---------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        if self._next < self._mine.batches:
            batch, self._next = self._next, self._next + 1
            self._batches[batch] = self._reading.submit(self._read_batch, batch)

    def _read_alone(self) -> list[bytes]:
        mine = alone(self._wants, self.sharing)
        bad = self._read(mine)
        with self._lock:
            self.bytes_read += int(self.source.table.lengths[mine.all_rows()].sum())
        return bad

    def _read(self, wants: Wants) -> list[bytes]:
        return read_chunks(
            *self.source, wants, deadline=self._deadline, threads=self._threads, epoch=self._epoch
        )

    def _read_batch(self, batch: int) -> Bytes:
        """A batch, of which this rank has taken what it wants itself. Never raises: others wait."""
        rows, positions = _batch(self._mine, batch)
        table = self.source.table
        data = np.zeros(int(_sizes(self._mine, table)[batch]), np.uint8)
        said = data[len(data) - len(rows) :]
        try:
            self._check_time()
            into = Wants(rows, np.zeros(len(rows), np.int64), positions, [data.data])
            scratch = bytearray(RUN_BYTES)
            damaged: set[int] = set()
            for job in jobs_of(table, into):
                damaged.update(piece.row for piece in do_job(self._open, job, scratch))
            said[:] = np.isin(rows, np.fromiter(damaged, np.int64)) * _DAMAGED
            for segment in table.segments[rows].tolist():
                self._open.done(segment)
            with self._lock:
                self.bytes_read += int(table.lengths[rows].sum())
            self._put(self._me, batch, data)
        except Exception as error:  # noqa: BLE001 - raised by `finish`
            said[:] = _FAILED
            self._fail(error)
        return data

    def _deliver(self, arrived: list[tuple[tuple[int, int], Bytes]]) -> None:
        for (reader, batch), data in arrived:
            try:
                count = self._put(reader, batch, data)
            except Exception as error:  # noqa: BLE001 - raised by `finish`
                self._fail(error)
                return
            with self._lock:
                self.bytes_forwarded += count

    def _put(self, reader: int, batch: int, data: Bytes) -> int:
        """Copy what this rank wants out of a batch; the bytes of those chunks."""
        rows, positions = _batch(self.sharing.shares[reader], batch)
        table, view, count = self.source.table, data.data, 0
        said = data[len(data) - len(rows) :].tolist()
        columns = zip(
            rows.tolist(),
            positions.tolist(),
            table.lengths[rows].tolist(),
            self._targets.of(rows),
            said,
            strict=True,
        )
        for row, start, length, entries, state in columns:
            targets, copies = self._targets.places(row, length, entries)
            if not targets and not copies:
                continue
            chunk = view[start : start + length]
            if state == _DAMAGED:
                with self._lock:
                    self._damaged.append(row)
            elif reader != self._me and (
                state != _GOOD or blake3(chunk).digest() != table.digests[row].tobytes()
            ):
                with self._lock:
                    self._again.append(row)
            else:
                place(targets, copies, chunk)
                count += length
        return count

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            path = self.source.backend.path
            raise StorageError(
                f"the store {path} did not deliver epoch {self._epoch} in time; look at the "
                "storage, then load again",
                path=path,
                errno=errno.ETIMEDOUT,
            )


def _judge(opinions: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether all that want anything see the same chunks."""
    tables = {one["table"] for one in opinions if one["table"]}
    note = ""
    if len(tables) > 1:
        note = "the ranks read by themselves: they see different tables of chunks"
    return {"note": note, "chunks": max(one["chunks"] for one in opinions)}


def _batch(share: Share, batch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows of a batch and where in it they lie."""
    at = slice(int(share.starts[batch]), int(share.starts[batch + 1]))
    return share.rows[at], share.positions[at]


def _sizes(share: Share, table: ChunkTable) -> npt.NDArray[np.int64]:
    """Bytes of each batch of a reader, with a byte for each chunk behind them; int64[batches]."""
    last = share.starts[1:] - 1
    ends = share.positions[last] + table.lengths[share.rows[last]]
    sizes: npt.NDArray[np.int64] = ends + np.diff(share.starts)
    return sizes


def _only(wants: Wants, rows: Sequence[int]) -> Wants:
    """What is wanted of these rows."""
    chosen = set(rows)
    mask = np.isin(wants.rows, np.array(rows, np.int64))
    copies = [(row, copy) for row, copy in wants.copies if row in chosen]
    return Wants(
        wants.rows[mask], wants.views_index[mask], wants.offsets[mask], wants.views, copies
    )
