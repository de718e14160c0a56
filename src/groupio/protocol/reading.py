"""One grouped read as one node sees it: gets chunks for its clients and passes them on to peers.

A chunk that several clients want is got once. It comes from the source that the swarm names, with
a bounded number of bytes on their way, and stays in memory until the node's clients have copied it
and the peers that are to get it from here have it. A peer that asks before the chunk is here waits
for it. Without a controller what has no source is read from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from groupio.model import CHUNK_BYTES
from groupio.plan.distribute import STORAGE
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.reading_queue import Pulls

REPORT_ROWS = 64
"""The swarm hears of so many new chunks at once, and of fewer when nothing is on its way."""

STORE_AHEAD_S = 0.02
"""The store is asked for what comes in this time: the more nodes read, the less each at once, or
the last chunks of all nodes would arrive together, with no time left to pass them on."""

HOLD_S = 5.0
"""So long chunks are kept for peers that do not come while their memory is needed."""


class NodeReader:
    """The machine of one read on one node; ``handle`` takes what happens, returns what to do.

    Effects are to be executed in order. ``held_bytes`` is memory that the read occupies now:
    chunks on their way, for clients that copy, and for peers. Nothing new is fetched beyond
    ``hold_bytes``, or one chunk; chunks that were here already and are wanted again come on top.
    """

    def __init__(
        self,
        key: str,
        node: str,
        lengths: npt.NDArray[np.int64],
        *,
        store_bytes: int = 16 * CHUNK_BYTES,
        peer_bytes: int = 4 * CHUNK_BYTES,
        peers_bytes: int = 16 * CHUNK_BYTES,
        hold_bytes: int = 1 << 40,
    ) -> None:
        """``lengths`` int64[n] of the epoch's chunks. On their way are at most ``store_bytes`` from
        the store, ``peer_bytes`` from one peer and ``peers_bytes`` from all of them; one chunk
        always may be."""
        n = len(lengths)
        self.key = key
        self.node = node
        self._lengths = lengths
        self._here = np.zeros(n, np.bool_)
        self._part = np.zeros((n, 2), np.int64)
        """What is here of a chunk of which only a part came: from, to."""
        self._want = np.zeros((n, 2), np.int64)
        """What this node has asked for of each chunk: from, to; nothing where it is settled."""
        self._dropped = np.zeros(n, np.bool_)
        """Chunks that were here, or turned out to be unreadable, since they were last wanted."""
        self._serves = np.zeros(n, np.int32)
        """How many peers are still to get each chunk; negative where they were sooner than the
        order that announces them."""
        self._takers: dict[int, dict[tuple[str, int], tuple[int, int]]] = {}
        """Per row who has still to copy it, and which bytes of it."""
        self._offered: dict[int, set[tuple[str, int]]] = {}
        """Those of them that were told that it is here."""
        self._tickets: dict[int, tuple[int, bool]] = {}
        """Requests of peers: the row, and whether it is being sent."""
        self._queued: dict[int, list[int]] = {}
        """Tickets that wait for a row."""
        self._store_bytes = store_bytes
        self._pulls = Pulls(lengths, store_bytes, peer_bytes, peers_bytes, hold_bytes)
        self._news: list[int] = []
        self._part_news: list[int] = []
        self._alone = False
        self._timer = f"hold {key} {node}"
        self._timing = False
        self._progress = 0
        self._seen = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the read occupies now."""
        return self._pulls.held

    @property
    def idle(self) -> bool:
        """Nothing is wanted, on its way, being copied or sent, or kept for a peer."""
        return not (self._want[:, 1].any() or self._takers or self._tickets or self._pulls.held)

    def expects(self, row: int) -> bool:
        """Whether a peer that asks for the chunk may wait for it."""
        wanted = bool(self._here[row] or self._want[row, 1])
        return wanted or not (self._alone or self._dropped[row])

    @property
    def _hoards(self) -> bool:
        """Chunks for peers are in the way of others, or are all that is left to do."""
        if self._pulls.stuck:
            return True
        return self._pulls.held > 0 and not (self._pulls.flying or self._takers or self._tickets)

    def handle(self, event: Any) -> list[Any]:
        """Take one event; what is told twice or too late changes nothing."""
        if isinstance(event, ev.TimerFired):
            return self._on_timer(event) + self._issue()
        return self._HANDLERS[type(event)](self, event) + self._issue()

    # -- clients ---------------------------------------------------------

    def _on_wants(self, event: rm.ClientWants) -> list[Any]:
        who = (event.client, event.request)
        ready, ask = [], []
        spans = zip(event.rows.tolist(), event.starts.tolist(), event.stops.tolist(), strict=True)
        for row, start, stop in spans:
            self._takers.setdefault(row, {})[who] = (start, stop)
            if self._covers(row, start, stop):
                ready.append(row)
                self._offered.setdefault(row, set()).add(who)
                self._pulls.hold(row, self._size_here(row))
            elif self._widen(row, start, stop):
                ask.append(row)
        effects: list[Any] = [rm.Deliver(*who, tuple(ready))] if ready else []
        if ask or event.load:
            effects += self._ask(ask, event.load, event.members)
        return effects

    def _covers(self, row: int, start: int, stop: int) -> bool:
        low, high = self._part[row].tolist()
        return bool(self._here[row]) or low <= start <= stop <= high > low

    def _size_here(self, row: int) -> int:
        low, high = self._part[row].tolist()
        return int(self._lengths[row]) if self._here[row] else high - low

    def _widen(self, row: int, start: int, stop: int) -> bool:
        """Whether the row has to be asked for, or for more of it than before."""
        low, high = self._want[row].tolist()
        if low <= start <= stop <= high > low:
            return False
        length = int(self._lengths[row])
        if high > low or self._part[row, 1]:
            # A second part of a chunk: likely more are to come.
            start, stop = 0, length
        self._want[row] = (start, stop)
        self._dropped[row] = False
        return True

    def _ask(self, rows: Sequence[int], load: str = "", members: int = 1) -> list[Any]:
        if self._alone:
            return self._from_storage(rows)
        wanted = np.array(rows, np.int32)
        whole = (
            self._want[wanted] == np.stack([np.zeros(len(rows)), self._lengths[wanted]], 1)
        ).all(1)
        asks = rm.Tell(rm.NodeAsks(self.key, self.node, wanted, whole, load, members))
        return [*self._report(), asks]

    def _on_took(self, event: rm.ClientTook) -> list[Any]:
        who = (event.client, event.request)
        for row in event.rows:
            self._forget_taker(row, who)
        return self._let_go(event.rows)

    def _on_left(self, event: rm.ClientLeft) -> list[Any]:
        rows = []
        for row, takers in list(self._takers.items()):
            for who in [who for who in takers if who[0] == event.client]:
                self._forget_taker(row, who)
                rows.append(row)
        return self._let_go(rows)

    def _forget_taker(self, row: int, who: tuple[str, int]) -> None:
        for table in (self._takers, self._offered):
            left = table.get(row)
            if left is None:
                continue
            if isinstance(left, dict):
                left.pop(who, None)
            else:
                left.discard(who)
            if not left:
                del table[row]

    # -- the swarm's orders ---------------------------------------------------------

    def _on_assign(self, event: rm.Assign) -> list[Any]:
        if event.store_bytes_per_s:
            ahead = event.store_bytes_per_s * STORE_AHEAD_S
            self._pulls.store_bytes = int(min(self._store_bytes, ahead))
        np.add.at(self._serves, event.rows, event.serves)
        here, kept, done, parts = [], [], [], []
        for row, source in zip(event.rows.tolist(), event.sources.tolist(), strict=True):
            if source >= STORAGE and self._here[row]:
                done.append(row)
            if source >= STORAGE and not self._here[row]:
                if self._part[row, 1] and not self._want[row, 1] and self._serves[row] <= 0:
                    parts.append(row)  # the part was here before the order
                    continue
                self._want_for_others(row, source)
                self._pulls.assign(row, event.names[source] if source >= 0 else "")
            elif self._here[row]:
                here.append(row)
                if self._serves[row] > 0 and self._pulls.hold(row, int(self._lengths[row])):
                    kept.append(row)
        effects: list[Any] = [rm.Keep(tuple(kept))] if kept else []
        if done or parts:
            # The swarm counts on each order: it has to hear which are not carried out.
            rows = (np.array(done, np.int32), np.array(parts, np.int32))
            effects.append(rm.Tell(rm.NodeHas(self.key, self.node, *rows)))
        return effects + self._let_go(here)

    def _want_for_others(self, row: int, source: int) -> None:
        # The store gives whole chunks only, and so do those that serve.
        if source == STORAGE or self._serves[row] > 0 or not self._want[row, 1]:
            self._want[row] = (0, self._lengths[row])
            self._dropped[row] = False

    def _on_yield(self, event: rm.Yield) -> list[Any]:
        rows = [row for row in event.rows.tolist() if self._pulls.take_back(row, "")]
        if not rows:
            return []
        return [rm.Tell(rm.Yielded(self.key, self.node, np.array(rows, np.int32)))]

    def _on_unreadable(self, event: rm.Unreadable) -> list[Any]:
        return self._fail(event.rows.tolist(), event.why)

    def _fail(self, rows: Iterable[int], why: str) -> list[Any]:
        effects: list[Any] = []
        told: dict[tuple[str, int], list[int]] = {}
        for row in rows:
            if self._here[row] or not self._want[row, 1]:
                continue
            self._want[row] = 0
            self._dropped[row] = True
            self._serves[row] = 0
            self._pulls.drop(row)
            waiting = self._takers.pop(row, {})
            offered = self._offered.pop(row, set())
            for who in waiting:
                if who not in offered:
                    told.setdefault(who, []).append(row)
            if offered:
                self._takers[row] = {who: waiting[who] for who in waiting if who in offered}
                self._offered[row] = offered
            effects += self._refuse(row)
        effects += [rm.Damaged(*who, tuple(lost), why) for who, lost in told.items()]
        return effects

    def _refuse(self, row: int) -> list[Any]:
        tickets = self._queued.pop(row, [])
        for ticket in tickets:
            del self._tickets[ticket]
        return [rm.Refuse(ticket, row) for ticket in tickets]

    def _on_swarm_lost(self, event: rm.SwarmLost) -> list[Any]:
        self._alone = True
        wanted = np.flatnonzero(self._want[:, 1]).tolist()
        return self._from_storage([row for row in wanted if not self._pulls.assigned(row)])

    def _on_swarm_back(self, event: rm.SwarmBack) -> list[Any]:
        self._alone = False
        self._news, self._part_news = [], []
        freed = self._keep_nothing()  # the new one says itself for whom
        here, wanted = np.flatnonzero(self._here), np.flatnonzero(self._want[:, 1]).tolist()
        none = np.empty(0, np.int32)
        has = rm.NodeHas(self.key, self.node, here.astype(np.int32), none)
        return [*freed, rm.Tell(has), *(self._ask(wanted) if wanted else [])]

    def _from_storage(self, rows: Iterable[int]) -> list[Any]:
        for row in rows:
            self._want[row] = (0, self._lengths[row])
            self._pulls.assign(row, "")
        return []

    # -- bytes come ---------------------------------------------------------

    def _on_arrived(self, event: rm.Arrived) -> list[Any]:
        effects: list[Any] = []
        useless, settled = [], []
        ready: dict[tuple[str, int], list[int]] = {}
        for row in event.rows:
            span = self._pulls.end(row, event.source)
            if span is None or self._here[row] or not self._want[row, 1]:
                useless.append(row)
                continue
            self._progress += 1
            whole = span == (0, int(self._lengths[row]))
            if whole:
                self._here[row] = True
                self._news.append(row)
            elif tuple(self._want[row].tolist()) == span:
                self._part_news.append(row)
            else:
                useless.append(row)  # more of it was asked for meanwhile
                self._pulls.again(row, event.source)
                continue
            self._part[row] = span
            self._want[row] = 0
            self._pulls.settle(row, span[1] - span[0])
            settled.append(row)
            offered = self._offered.setdefault(row, set())
            for who, (start, stop) in self._takers.get(row, {}).items():
                if who not in offered and self._covers(row, start, stop):
                    offered.add(who)
                    ready.setdefault(who, []).append(row)
            if not offered:
                del self._offered[row]
            if whole:
                effects += self._serve_waiting(row)
        if useless:
            effects.append(rm.Discard(event.source, tuple(useless)))
        effects += [rm.Deliver(*who, tuple(rows)) for who, rows in ready.items()]
        return effects + self._let_go(settled)

    def _on_failed(self, event: rm.Failed) -> list[Any]:
        rows = []
        for row in event.rows:
            self._pulls.end(row, event.source)
            if not self._here[row] and self._want[row, 1]:
                rows.append(row)
        # Where another source was named meanwhile it is queued there.
        rows = [row for row in rows if self._pulls.unassign(row, event.source)]
        if not rows:
            return []
        if not self._alone:
            lost = np.array(rows, np.int32)
            told = rm.NodeFailed(self.key, self.node, event.source, lost, event.why)
            return [rm.Tell(told)]
        return self._from_storage(rows) if event.source else self._fail(rows, event.why)

    def _on_here(self, event: rm.ChunksHere) -> list[Any]:
        self._here[event.rows] = True
        none = np.empty(0, np.int32)
        return [rm.Tell(rm.NodeHas(self.key, self.node, event.rows.astype(np.int32), none))]

    def _on_lost(self, event: rm.ChunksLost) -> list[Any]:
        rows = [row for row in event.rows if self._here[row] or self._part[row, 1]]
        again = []
        for row in rows:
            self._here[row] = False
            self._dropped[row] = True
            self._part[row] = 0
            self._pulls.free(row)
            self._offered.pop(row, None)
            if row in self._takers or row in self._queued:
                self._want[row] = (0, self._lengths[row])
                again.append(row)
        lost = np.array(rows, np.int32)
        if not rows:
            return []
        drops = rm.Tell(rm.NodeDrops(self.key, self.node, lost))
        return [*self._report(), drops, *(self._ask(again) if again else [])]

    # -- serving peers ---------------------------------------------------------

    def _on_peer_wants(self, event: rm.PeerWants) -> list[Any]:
        row = event.row
        if self._here[row]:
            self._tickets[event.ticket] = (row, True)
            self._pulls.hold(row, int(self._lengths[row]))
            return [rm.Serve(event.ticket, row)]
        if not self.expects(row):
            return [rm.Refuse(event.ticket, row)]
        # Not wanted here: the peer's orders were sooner than this node's.
        self._tickets[event.ticket] = (row, False)
        self._queued.setdefault(row, []).append(event.ticket)
        return []

    def _serve_waiting(self, row: int) -> list[Any]:
        tickets = self._queued.pop(row, [])
        for ticket in tickets:
            self._tickets[ticket] = (row, True)
        return [rm.Serve(ticket, row) for ticket in tickets]

    def _on_peer_done(self, event: rm.PeerDone) -> list[Any]:
        row, sending = self._tickets.pop(event.ticket, (-1, False))
        if row < 0:
            return []
        if not sending:
            self._queued[row].remove(event.ticket)
            if not self._queued[row]:
                del self._queued[row]
            return []
        if event.ok:
            self._serves[row] -= 1
            self._progress += 1
        return self._let_go([row])

    def _let_go(self, rows: Iterable[int]) -> list[Any]:
        """Release those of the rows that nobody waits for."""
        sending = {row for row, sent in self._tickets.values() if sent}
        free = [
            row
            for row in dict.fromkeys(rows)
            if row not in self._offered
            and row not in sending
            and self._serves[row] <= 0
            and self._pulls.free(row)
        ]
        return [rm.Release(tuple(free))] if free else []

    # -- what to get next ---------------------------------------------------------

    def _issue(self) -> list[Any]:
        effects: list[Any] = []
        for source, rows in self._pulls.next(self._want).items():
            spans = self._want[list(rows)]
            if source:
                starts, stops = tuple(spans[:, 0].tolist()), tuple(spans[:, 1].tolist())
                effects.append(rm.Pull(source, rows, starts, stops))
            else:
                effects.append(rm.ReadStorage(rows))
        if len(self._news) + len(self._part_news) >= REPORT_ROWS or not self._pulls.flying:
            effects += self._report()
        if self._hoards and not self._timing:
            self._timing = True
            self._seen = self._progress
            effects.append(fx.StartTimer(self._timer, HOLD_S))
        return effects

    def _report(self) -> list[Any]:
        if self._alone or not (self._news or self._part_news):
            return []
        rows, parts = np.array(self._news, np.int32), np.array(self._part_news, np.int32)
        self._news, self._part_news = [], []
        return [rm.Tell(rm.NodeHas(self.key, self.node, rows, parts))]

    def _on_timer(self, event: ev.TimerFired) -> list[Any]:
        """Peers that did not come for a while do not keep this node from reading on."""
        if event.name != self._timer:
            return []
        self._timing = False
        if not self._hoards or self._progress != self._seen:
            return []
        return self._keep_nothing()

    def _keep_nothing(self) -> list[Any]:
        kept = np.flatnonzero(self._serves)
        self._serves[kept] = 0
        return self._let_go(kept.tolist())

    _HANDLERS: dict[type, Callable[[Any, Any], list[Any]]] = {
        rm.ClientWants: _on_wants,
        rm.ClientTook: _on_took,
        rm.ClientLeft: _on_left,
        rm.Assign: _on_assign,
        rm.Yield: _on_yield,
        rm.Unreadable: _on_unreadable,
        rm.SwarmLost: _on_swarm_lost,
        rm.SwarmBack: _on_swarm_back,
        rm.Arrived: _on_arrived,
        rm.Failed: _on_failed,
        rm.ChunksHere: _on_here,
        rm.ChunksLost: _on_lost,
        rm.PeerWants: _on_peer_wants,
        rm.PeerDone: _on_peer_done,
    }
