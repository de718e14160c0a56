"""Delivers the chunks of a read to the ranks of its node through shared memory.

Chunks that came for the read are handed out where they lie. Those of this node's staging memory
are copied first, a few at a time: that memory may be used again at any moment.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.agent.read_incoming import Incoming
from groupio.agent.read_memory import ReadMemory
from groupio.agent.read_sources import Epoch
from groupio.agent.read_window import Slot
from groupio.exhaustion import why
from groupio.model import CHUNK_BYTES
from groupio.protocol import messages as msg
from groupio.protocol import reading_messages as rm

if TYPE_CHECKING:
    from groupio.agent.peer import Peer
    from groupio.agent.read_node import NodeRead

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Request:
    """What a rank asked for; ``starts`` are the first bytes that it wants of parts of chunks."""

    peer: Peer
    number: int
    starts: dict[int, int] = field(default_factory=dict)
    lent: dict[int, Slot] = field(default_factory=dict)


class Handing:
    """Brings chunks to ranks; in the event loop, but for ``_copy``.

    ``staged_here`` bool[n] are the chunks that lie in this node's staging memory.
    """

    def __init__(
        self,
        read: NodeRead,
        epoch: Epoch,
        memory: ReadMemory,
        incoming: Incoming,
        staged_here: npt.NDArray[np.bool_],
    ) -> None:
        self.staged_here = staged_here
        self._read = read
        self._epoch = epoch
        self._memory = memory
        self._incoming = incoming
        self._to_stage: deque[tuple[str, int]] = deque()
        self._staging: dict[int, list[str]] = {}
        """Chunks that are being copied, and who waits for them."""

    def deliver(self, who: str, rows: Sequence[int]) -> None:
        """Tell a request where these rows of it lie."""
        request = self._read.requests.get(who)
        if request is None:
            return
        ready: list[tuple[int, Slot]] = []
        lost = []
        for row in rows:
            slot = self._memory.lend(row)
            if slot is not None:
                ready.append((row, slot))
            elif self.staged_here[row]:
                self._to_stage.append((who, row))
            else:
                lost.append(row)
        self._hand_out(request, ready)
        if lost:
            self._read.run(rm.ChunksLost(tuple(lost)))

    def _hand_out(self, request: Request, ready: Sequence[tuple[int, Slot]]) -> None:
        if not ready:
            return
        lengths = self._epoch.table.lengths
        places, counts = [], {"read": 0, "forwarded": 0, "cached": 0}
        for row, slot in ready:
            request.lent[row] = slot
            places.append(slot.offset + request.starts.get(row, 0) - slot.start)
            origin = self._incoming.origin.pop(row, None)
            kind = "cached" if origin is None else "forwarded" if origin else "read"
            counts[kind] += int(lengths[row])
        rows = np.array([row for row, _ in ready], "<i4").tobytes()
        where = np.array(places, "<i8").tobytes()
        self._read.driver.send(request.peer, msg.Pieces(request.number, rows, where, **counts))

    def stage_more(self) -> None:
        """Copy chunks of the staging memory for ranks, as far as there is room."""
        batch: list[tuple[int, Slot]] = []
        size = 0
        while self._to_stage:
            who, row = self._to_stage[0]
            waiting = self._staging.get(row)
            if waiting is not None:
                waiting.append(who)
            elif who in self._read.requests:
                length = int(self._epoch.table.lengths[row])
                slot = self._memory.stage(length)
                if slot is None:
                    break
                self._staging[row] = [who]
                batch.append((row, slot))
                size += length
            self._to_stage.popleft()
            if size >= CHUNK_BYTES:
                self._read.reads.pool.submit(self._copy, batch)
                batch, size = [], 0
        if batch:
            self._read.reads.pool.submit(self._copy, batch)

    def _copy(self, batch: Sequence[tuple[int, Slot]]) -> None:
        copied = []
        for row, slot in batch:
            digest = self._epoch.digest(row)
            here = False
            try:
                view = self._memory.window.view(slot)
                scope = self._read.job.store.store_id
                here = self._read.reads.holdings.read_into(scope, digest, view)
            except OSError as error:
                log.warning("chunk %s is not handed out: %s", digest.hex(), why(error))
            if here and blake3(view).digest() != digest:
                log.error("chunk %s was damaged in memory", digest.hex())
                here = False
            copied.append((row, slot, here))
        self._read.driver.post(self._read.guarded(partial(self._copied, copied)))

    def _copied(self, copied: Sequence[tuple[int, Slot, bool]]) -> None:
        if self._read.ended:
            return
        ready: dict[str, list[tuple[int, Slot]]] = {}
        lost = []
        for row, slot, here in copied:
            waiting = self._staging.pop(row)
            if not here:
                self.staged_here[row] = False
                lost.append(row)
                waiting = []
            else:
                self._read.count("memory", slot.length)
            for who in waiting:
                if who in self._read.requests:
                    self._memory.share(slot)
                    ready.setdefault(who, []).append((row, slot))
            self._memory.take_back(slot)
        for who, mine in ready.items():
            self._hand_out(self._read.requests[who], mine)
        if lost:
            self._read.run(rm.ChunksLost(tuple(lost)))
        else:
            self._read.go_on()

    def staging_changed(self, here: npt.NDArray[np.bool_]) -> None:
        """Chunks of the staging memory may be gone; ``here`` bool[n] are those that are there."""
        lost = np.flatnonzero(self.staged_here & ~here)
        if len(lost):
            self.staged_here &= here
            self._read.run(rm.ChunksLost(tuple(lost.tolist())))
