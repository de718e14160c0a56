"""Reading through the node's agent, where a job spans nodes.

The agent brings chunks into memory that this process maps to read: from its own staging memory,
from other nodes, or from the store, each once for all who ask. It has verified them, so they are
only copied from there. What it does not bring, for whatever reason, is read from the store.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from groupio.backend.base import Backend
from groupio.client import nesting
from groupio.client.chunk_reader import Wants, place, read_chunks
from groupio.client.connection import Connection
from groupio.client.foreground import set_aside
from groupio.client.shared_work import Targets
from groupio.controller.discover import Kind
from groupio.errors import GroupIOError
from groupio.exhaustion import start_some
from groupio.format.manifest import ManifestReader
from groupio.model import ChunkTable, DecisionKey, SegmentRef
from groupio.protocol import messages as msg

if TYPE_CHECKING:
    from groupio.client.client import Client

log = logging.getLogger("groupio.client")

STALL_S = 60.0
"""An agent that brings nothing for so long is not waited for any more."""

COPYING_THREADS = 3

_LOOK_S = 0.5


def through_agent(client: Client, load: str = "", members: int = 1) -> AgentRead | None:
    """How ``client`` reads through its node's agent; None where the job is of one node, or there
    is no agent."""
    if client._where.kind is Kind.LOCAL:
        return None
    try:
        connection = client._connected()
    except GroupIOError as error:
        log.info("reading without the agent: %s", error.message)
        return None
    if not connection.welcome.reads or connection.is_own_thread():
        return None
    return AgentRead(connection, client._ids.__next__, load, members)


class AgentRead:
    """Reads through the agent at the other end of ``connection``; see the module.

    ``load`` names a grouped load of ``members`` members: the controller plans it once all of them
    have asked, or after a moment. ``bytes_read`` came from the store to this rank,
    ``bytes_forwarded`` from other nodes and from the agent's memory; both count whole chunks.
    ``notes`` say why the store was read without the agent.
    """

    def __init__(
        self,
        connection: Connection,
        next_id: Callable[[], int],
        load: str = "",
        members: int = 1,
    ) -> None:
        self.bytes_read = 0
        self.bytes_forwarded = 0
        self.notes: list[str] = []
        self._connection = connection
        self._next_id = next_id
        self._load = load
        self._members = members

    def fetch_of(self, manifest: ManifestReader) -> Fetching:
        """Reads chunks of the epoch, as :class:`groupio.client.store_reader.Fetch`."""
        header = manifest.header
        return Fetching(self, DecisionKey(header.lineage, header.epoch, header.attempt))

    @nesting.call
    def ask(
        self, key: DecisionKey, table: ChunkTable, wants: Wants, deadline: float
    ) -> npt.NDArray[np.bool_]:
        """Bring what is wanted to its places; which rows came, bool[n] of the table."""
        request = _Request(self._connection, self._next_id(), table, wants)
        try:
            with set_aside():
                return request.run(key, self._load, self._members, deadline)
        finally:
            self.bytes_read += request.bytes_read
            self.bytes_forwarded += request.bytes_forwarded
            if request.why:
                note = f"chunks were read from the store without the agent: {request.why}"
                log.info("%s", note)
                self.notes.append(note)


class Fetching:
    """Reads chunks of one epoch through the agent."""

    def __init__(self, read: AgentRead, key: DecisionKey) -> None:
        self._read = read
        self._key = key

    def __call__(
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
        """As :func:`groupio.client.chunk_reader.read_chunks`."""
        came = self._read.ask(self._key, table, wants, deadline)
        left = _without(wants, came)
        rows = left.all_rows()
        if not len(rows):
            return []
        self._read.bytes_read += int(table.lengths[rows].sum())
        return read_chunks(
            backend, segments, table, left, deadline=deadline, threads=threads, epoch=epoch
        )


class _Request:
    """One question to the agent; a few threads copy what it brings."""

    def __init__(
        self, connection: Connection, number: int, table: ChunkTable, wants: Wants
    ) -> None:
        self.bytes_read = 0
        self.bytes_forwarded = 0
        self.why = ""
        """Why the agent brings nothing more, once it does not."""
        self._connection = connection
        self._number = number
        self._lengths = table.lengths
        self._wants = wants
        self._targets = Targets(wants)
        self._rows = wants.all_rows()
        self._starts, self._stops = _spans(wants, self._rows, table)
        self._came = np.zeros(len(table), np.bool_)
        self._left = len(self._rows)
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()
        self._window: mmap.mmap | None = None
        self._copying = 0

    def run(
        self, key: DecisionKey, load: str, members: int, deadline: float
    ) -> npt.NDArray[np.bool_]:
        """Ask, copy, and say that it is over."""
        if not self._left and not load:
            return self._came
        news: queue.SimpleQueue[tuple[msg.ToRank, tuple[int, ...]] | None] = queue.SimpleQueue()
        part = bool((self._starts > 0).any() or (self._stops < self._lengths[self._rows]).any())
        question = msg.ReadOpen(
            request_id=self._number,
            key=key,
            rows=self._rows.astype("<i4").tobytes(),
            starts=self._starts.astype("<i8").tobytes() if part else b"",
            stops=self._stops.astype("<i8").tobytes() if part else b"",
            load=load,
            members=members,
        )
        threads: list[threading.Thread] = []
        try:
            self._connection.listen_for(self._number, news)
            self._connection.send(question)
            if self._left:
                made = [
                    threading.Thread(
                        target=self._work, args=(news,), name="groupio-take", daemon=True
                    )
                    for _ in range(COPYING_THREADS)
                ]
                threads = made[: start_some(made)]
                self._wait(deadline)
        except GroupIOError as error:
            self._give_up(error.message)
        finally:
            self._connection.listen_no_more(self._number)
            for _ in threads:
                news.put(None)
            for thread in threads:
                thread.join()
            if len(self._rows):
                with suppress(GroupIOError):
                    self._connection.send(msg.ReadClose(self._number))
            self._unmap(news)
        return self._came

    def _wait(self, deadline: float) -> None:
        with self._changed:
            while self._left and not self.why:
                now = time.monotonic()
                if now >= deadline:
                    self.why = "the time was up"
                elif now - self._progress_at >= STALL_S:
                    self.why = f"it brought nothing for {STALL_S:.0f} s"
                elif not self._connection.is_alive:
                    self.why = "it ended"
                else:
                    self._changed.wait(min(_LOOK_S, deadline - now))

    def _give_up(self, why: str) -> None:
        with self._changed:
            self.why = self.why or why
            self._changed.notify_all()

    def _work(self, news: queue.SimpleQueue[tuple[msg.ToRank, tuple[int, ...]] | None]) -> None:
        try:
            while not self.why and (received := news.get()) is not None:
                self._take(*received)
        except GroupIOError as error:
            self._give_up(error.message)
        except Exception as error:
            log.exception("copying what the agent brought failed")
            self._give_up(f"copying failed ({error!r})")

    def _take(self, message: msg.ToRank, fds: tuple[int, ...]) -> None:
        match message:
            case msg.ReadArena():
                self._map(fds)
            case msg.Pieces():
                self._copy(message)
            case msg.ReadDamaged(rows=rows, why=why):
                lost = len(rows) // 4
                log.warning("the agent cannot bring %d chunks: %s", lost, why)
                self._settle(lost)
            case msg.ReadRefused(why=why):
                self._give_up(why)

    def _map(self, fds: tuple[int, ...]) -> None:
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            self._give_up(f"it sent {len(fds)} descriptors instead of one")
            return
        try:
            with self._changed:
                if self._window is None:
                    size = os.fstat(fds[0]).st_size
                    self._window = mmap.mmap(fds[0], size, mmap.MAP_SHARED, mmap.PROT_READ)
                    self._window.madvise(mmap.MADV_DONTFORK)
                self._changed.notify_all()
        except (OSError, ValueError) as error:
            self._give_up(f"its memory cannot be mapped ({error})")
        finally:
            os.close(fds[0])

    def _copy(self, pieces: msg.Pieces) -> None:
        with self._changed:
            # The memory came before, but another thread may be about to map it.
            while self._window is None and not self.why:
                self._changed.wait(_LOOK_S)
            if self._window is None:
                return
            window = memoryview(self._window)
        rows = np.frombuffer(pieces.rows, "<i4").astype(np.int64)
        places = np.frombuffer(pieces.places, "<i8").tolist()
        at = np.searchsorted(self._rows, rows)
        starts, stops = self._starts[at].tolist(), self._stops[at].tolist()
        entries = self._targets.of(rows)
        for row, offset, start, stop, entry in zip(
            rows.tolist(), places, starts, stops, entries, strict=True
        ):
            length = int(self._lengths[row])
            targets, copies = self._targets.places(row, length, entry)
            data = window[offset : offset + stop - start]
            if len(data) != stop - start:
                raise ValueError("a chunk does not lie in the memory")
            if len(data) < length:
                whole = memoryview(bytearray(length))
                whole[start:stop] = data
                place(targets, copies, whole)
            else:
                place(targets, copies, data)
        if not self._connection.is_alive:
            return  # the memory may have been used again while it was copied
        self._connection.send(msg.Took(self._number, pieces.rows))
        with self._changed:
            self._came[rows] = True
            self.bytes_read += pieces.read
            self.bytes_forwarded += pieces.forwarded + pieces.cached
        self._settle(len(rows))

    def _settle(self, count: int) -> None:
        with self._changed:
            self._left -= count
            self._progress_at = time.monotonic()
            self._changed.notify_all()

    def _unmap(self, news: queue.SimpleQueue[tuple[msg.ToRank, tuple[int, ...]] | None]) -> None:
        with suppress(queue.Empty):
            while True:
                received = news.get_nowait()
                for fd in received[1] if received is not None else ():
                    os.close(fd)
        if self._window is not None:
            with suppress(BufferError):
                self._window.close()


def _spans(
    wants: Wants, rows: npt.NDArray[np.int64], table: ChunkTable
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which bytes of each chunk are wanted: from, to."""
    stops = table.lengths[rows].astype(np.int64)
    starts = np.zeros(len(rows), np.int64)
    if not wants.copies:
        return starts, stops
    whole = np.isin(rows, wants.rows)
    spans: dict[int, tuple[int, int]] = {}
    for row, copy in wants.copies:
        length = int(table.lengths[row])
        span = getattr(copy, "span", None)
        low, high = (0, length) if span is None else span()
        known = spans.get(row, (length, 0))
        spans[row] = (max(min(known[0], low), 0), min(max(known[1], high), length))
    for at in np.flatnonzero(~whole).tolist():
        low, high = spans[int(rows[at])]
        if low < high:
            starts[at], stops[at] = low, high
    return starts, stops


def _without(wants: Wants, came: npt.NDArray[np.bool_]) -> Wants:
    """What is wanted and did not come."""
    mask = ~came[wants.rows]
    copies = [(row, copy) for row, copy in wants.copies if not came[row]]
    return Wants(
        wants.rows[mask], wants.views_index[mask], wants.offsets[mask], wants.views, copies
    )
