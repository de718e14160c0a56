"""Fetches the chunks of a read from the store and from peers, as its machine directs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupio.agent.read_memory import ReadMemory
from groupio.agent.read_sources import Epoch, Part, PeerSource, StoreSource
from groupio.protocol import reading_messages as rm

if TYPE_CHECKING:
    from groupio.agent.read_node import NodeRead

ROOM_S = 10.0
"""A chunk that found no memory for so long is asked for again."""


@dataclass(slots=True)
class _Late:
    """A chunk that is to be got and found no memory."""

    source: str
    row: int
    start: int
    stop: int
    since: float


class Incoming:
    """The sources of one read; in the event loop, but for ``_told``."""

    def __init__(self, read: NodeRead, epoch: Epoch, memory: ReadMemory) -> None:
        self.origin: dict[int, str] = {}
        """Where chunks came from that no rank has got yet."""
        self._read = read
        self._epoch = epoch
        self._memory = memory
        self._store = StoreSource(epoch, read.reads.storage, self._told, read.driver.uplink)
        self._peers: dict[str, PeerSource] = {}
        self._late: deque[_Late] = deque()
        self._inbox: list[tuple[str, Sequence[int], str]] = []
        self._inbox_lock = threading.Lock()

    @property
    def waits(self) -> bool:
        """Something waits for memory."""
        return bool(self._late)

    def close(self) -> None:
        """End all pulls; close the store, once no thread reads any more."""
        for peer in self._peers.values():
            peer.close()
        self._store.close()

    def give_up_late(self) -> None:
        """What waits for memory too long counts as not having come."""
        now = time.monotonic()
        old = [one for one in self._late if now - one.since >= ROOM_S]
        for late in old:
            self._late.remove(late)
            self._read.run(rm.Failed(late.source, (late.row,), "timeout"))

    def get(self, source: str, spans: Iterable[tuple[int, int, int]]) -> None:
        """Begin to get bytes ``start`` to ``stop`` of rows from a peer, or the store ("")."""
        parts = []
        now = time.monotonic()
        for row, start, stop in spans:
            view = self._memory.reserve(row, source, start, stop)
            if view is None:
                self._late.append(_Late(source, row, start, stop, now))
            else:
                parts.append(Part(row, start, stop, view))
        if parts:
            self._start(source, parts)

    def _start(self, source: str, parts: list[Part]) -> None:
        if not source:
            self._store.read(parts)
            return
        address = self._read.reads.address(self._read.job, source)
        if not address:
            self._told(source, [part.row for part in parts], "lost")
            return
        peer = self._peers.get(source)
        if peer is None or peer.address != address:
            scope = self._read.job.store.store_id
            fabric = self._read.reads.fabric
            peer = PeerSource(source, self._epoch, scope, fabric, address, self._told)
            self._peers[source] = peer
        peer.pull(parts)

    def _told(self, source: str, rows: Sequence[int], why: str) -> None:
        """What came of rows; from any thread."""
        with self._inbox_lock:
            self._inbox.append((source, rows, why))
            first = len(self._inbox) == 1
        if first:
            self._read.driver.post(self._empty_inbox)

    def _empty_inbox(self) -> None:
        with self._inbox_lock:
            inbox, self._inbox = self._inbox, []
        together: dict[tuple[str, str], list[int]] = {}
        for source, rows, why in inbox:
            together.setdefault((source, why), []).extend(rows)
        for (source, why), rows in together.items():
            if not why:
                self._read.run(rm.Arrived(source, tuple(rows)))
                continue
            for row in rows:
                self._memory.land(row, source, keep=False)
            self._read.run(rm.Failed(source, tuple(rows), why))

    def land(self, event: rm.Arrived, effects: Sequence[Any]) -> None:
        """Settle the memory of what arrived before anything is done with it."""
        useless = {row for one in effects if isinstance(one, rm.Discard) for row in one.rows}
        nbytes = 0
        for row in event.rows:
            nbytes += self._memory.land(row, event.source, keep=row not in useless)
            if row not in useless:
                self.origin[row] = event.source
        self._read.count("peer" if event.source else "store", nbytes)

    def get_late(self) -> None:
        """Memory may have become free: get what waits for it."""
        late, self._late = self._late, deque()
        while late:
            one = late.popleft()
            view = self._memory.reserve(one.row, one.source, one.start, one.stop)
            if view is None:
                self._late.extend([one, *late])
                break
            self._start(one.source, [Part(one.row, one.start, one.stop, view)])
