"""Queue of the chunks that a node gets next, from where, and the memory that its read occupies."""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]


class Pulls:
    """Queues of one read, one per source: a peer's name, or "" for the store.

    Chunks are started in the order in which they were assigned, as far as limits let them: of
    bytes on their way from one source and from all peers, and of memory. One chunk always may.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        store_bytes: int,
        peer_bytes: int,
        peers_bytes: int,
        hold_bytes: int,
    ) -> None:
        self.held = 0
        self.stuck = False
        """Chunks wait for memory that others occupy."""
        self._lengths = lengths
        self.store_bytes = store_bytes
        self._limits = (peer_bytes, peers_bytes, hold_bytes)
        self._source: dict[int, str] = {}
        self._queues: dict[str, deque[tuple[int, int]]] = {}
        """Per source the turn and the row of what is to be started."""
        self._flying: dict[tuple[int, str], Span] = {}
        self._from: dict[str, int] = {}
        """Bytes on their way from each source."""
        self._peers = 0
        """Bytes on their way from all peers."""
        self._kept: dict[int, int] = {}
        self._turn = 0
        self._changed = False
        """Something may be started that could not be before."""

    @property
    def flying(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._flying)

    def assigned(self, row: int) -> bool:
        """Whether the row has a source that has not failed."""
        return row in self._source

    def assign(self, row: int, source: str) -> None:
        """Get the row from there, and from nowhere else."""
        if self._source.get(row) == source:
            return
        self._source[row] = source
        if (row, source) not in self._flying:
            self._turn += 1
            self._changed = True
            self._queues.setdefault(source, deque()).append((self._turn, row))

    def take_back(self, row: int, source: str) -> bool:
        """Do not get the row from there; False when it is on its way already, or never was to."""
        return (row, source) not in self._flying and self.unassign(row, source)

    def unassign(self, row: int, source: str) -> bool:
        """The row comes from there no more; False when it has another source."""
        if self._source.get(row) != source:
            return False
        del self._source[row]
        return True

    def again(self, row: int, source: str) -> None:
        """What came was not enough: get it from there again, if it is to come from there."""
        if self.unassign(row, source):
            self.assign(row, source)

    def drop(self, row: int) -> None:
        """The row is not wanted any more."""
        self._source.pop(row, None)

    def end(self, row: int, source: str) -> Span | None:
        """The row came or failed; which bytes of it were on their way, or None."""
        span = self._flying.pop((row, source), None)
        if span is not None:
            size = span[1] - span[0]
            self._changed = True
            self._from[source] -= size
            self._peers -= size if source else 0
            self.held -= size
        return span

    def settle(self, row: int, size: int) -> None:
        """So many bytes of the row are in memory now, and stay."""
        self._source.pop(row, None)
        self.hold(row, size)

    def hold(self, row: int, size: int) -> bool:
        """The row's memory is in use; False when it was already."""
        before = self._kept.get(row)
        self.held += size - (before or 0)
        self._kept[row] = size
        return before is None

    def free(self, row: int) -> bool:
        """The row's memory is not in use any more; False when it was not."""
        size = self._kept.pop(row, None)
        if size is not None:
            self.held -= size
            self._changed |= self.stuck
        return size is not None

    def next(self, spans: npt.NDArray[np.int64]) -> dict[str, tuple[int, ...]]:
        """The rows to start now, by source. ``spans`` int64[n, 2] are the bytes that are wanted
        of each row; the store is asked for whole chunks."""
        if not self._changed:
            return {}
        self._changed = self.stuck = False
        peer_bytes, peers_bytes, hold_bytes = self._limits
        started: dict[str, list[int]] = {}
        turns = [(self._head(source), source) for source in self._queues]
        heapq.heapify(turns)
        while turns:
            turn, source = turns[0]
            if turn < 0:  # its queue is empty
                heapq.heappop(turns)
                del self._queues[source]
                continue
            row = self._queues[source][0][1]
            low, high = spans[row].tolist()
            size = high - low
            busy = self._from.get(source, 0)
            full = busy and busy + size > (peer_bytes if source else self.store_bytes)
            if full or (source and self._peers and self._peers + size > peers_bytes):
                heapq.heappop(turns)
                continue
            if self.held and self.held + size > hold_bytes:
                self.stuck = True
                break
            self._queues[source].popleft()
            self._flying[row, source] = (low, high)
            self._from[source] = busy + size
            self._peers += size if source else 0
            self.held += size
            started.setdefault(source, []).append(row)
            heapq.heapreplace(turns, (self._head(source), source))
        return {source: tuple(rows) for source, rows in started.items()}

    def _head(self, source: str) -> int:
        """The turn of what is to be started next from there, or -1.

        What has another source by now, or is here, is passed over.
        """
        queue = self._queues[source]
        while queue:
            turn, row = queue[0]
            if self._source.get(row) == source and (row, source) not in self._flying:
                return turn
            queue.popleft()
        return -1
