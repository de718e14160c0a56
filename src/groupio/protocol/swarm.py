"""One grouped read as its controller sees it: who gets which chunk from whom.

Nodes may come at any time. A grouped load is planned when all of its members have asked, any other
at once: what is on its way to one node already is passed on to the next. When a node is lost, does
not answer or gives wrong bytes, only the chunks that were to come from it get another source: a
node that has them or gets them some other way, else the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from groupio.plan.distribute import ASK_PART, ASK_WHOLE, NOT_ASKED, STORAGE, plan_read
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.swarm_book import Book, Mask, Rows

TOGETHER_S = 5.0
"""So long a grouped load waits for its members to ask before those that did are served."""

FAILURES_MAX = 4
"""A chunk that did not come from so many peers is read from the store by its asker."""

READERS_MAX = 2
"""So many nodes try to read a chunk from the store before it counts as unreadable."""

ACCUSERS_MIN = 2
"""So many nodes have to say that a peer lies before nobody takes anything from it."""

Deltas = npt.NDArray[np.int32]


class Swarm:
    """The machine of one read; ``handle`` takes what nodes say and returns what to tell them."""

    def __init__(
        self,
        key: str,
        lengths: npt.NDArray[np.int64],
        *,
        backend_bytes_per_s: float | None = None,
    ) -> None:
        """``lengths`` int64[n] of the chunks of the epoch's table."""
        self.key = key
        self._book = Book(lengths)
        self._backend = backend_bytes_per_s
        self._waiting: dict[str, list[rm.NodeAsks]] = {}
        self._begun: set[str] = set()
        """Grouped loads that have been planned: who still comes is late."""
        self._accusers: dict[int, set[int]] = {}
        self._readers: dict[int, set[int]] = {}
        """Who failed to read a chunk from the store."""

    def handle(self, event: Any) -> list[Any]:
        """Take one event; effects have a ``node`` to send them to, or are for the driver.

        Words of nodes that are not known, or known to be lost, are passed over.
        """
        if isinstance(event, rm.NodeKnown):
            self._book.add(event.link)
            return []
        if isinstance(event, ev.TimerFired):
            return self._begin(event.name)
        node = self._book.find(event.node)
        if node is None:
            return []
        match event:
            case rm.NodeAsks():
                self._book.has[node, event.rows] = False
                return self._on_asks(event)
            case rm.NodeHas(rows=rows, parts=parts):
                self._book.has[node, rows] = True
                self._book.settle(node, rows)
                # A node that passes a chunk on gets the whole of it, whatever part it had.
                passes_on = (self._book.source[:, parts] == node).any(axis=0)
                part_only = self._book.asked[node, parts] == ASK_PART
                self._book.settle(node, parts[part_only | ~passes_on])
                return []
            case rm.NodeDrops(rows=rows):
                self._book.has[node, rows] = False
                return []
            case rm.NodeFailed():
                return self._on_failed(node, event)
            case rm.NodeGone():
                return self._on_gone(node)
            case rm.Yielded(rows=rows):
                return self._on_yielded(node, rows.astype(np.int64))
        raise AssertionError(f"swarm got {event!r}")

    # -- asking ---------------------------------------------------------

    def _on_asks(self, event: rm.NodeAsks) -> list[Any]:
        if not event.load:
            return self._plan([event])
        name = f"read {self.key} {event.load}"
        if name in self._begun:
            return self._plan([event])
        first = name not in self._waiting
        waiting = self._waiting.setdefault(name, [])
        waiting.append(event)
        if len(waiting) < event.members:
            return [fx.StartTimer(name, TOGETHER_S)] if first else []
        stop = [] if first else [fx.StopTimer(name)]
        return [*stop, *self._begin(name)]

    def _begin(self, name: str) -> list[Any]:
        self._begun.add(name)
        return self._plan(self._waiting.pop(name, []))

    def _plan(self, asks: Sequence[rm.NodeAsks]) -> list[Any]:
        book = self._book
        wants = np.zeros(book.asked.shape, np.uint8)
        for one in asks:
            node = book.find(one.node)
            if node is not None:
                level = np.where(one.whole, ASK_WHOLE, ASK_PART).astype(np.uint8)
                wants[node, one.rows] = np.maximum(wants[node, one.rows], level)
        # What is on its way already is not asked for twice.
        wants[book.has | (book.asked >= wants)] = 0
        rows = np.flatnonzero(wants.any(axis=0))
        if not len(rows):
            return []
        late = bool((book.asked > 0).any())
        askers = np.flatnonzero(wants.any(axis=1))
        effects = self._place(rows, wants[:, rows], helpers=True)
        return effects + self._share_reading(askers) if late else effects

    def _place(self, rows: Rows, wants: npt.NDArray[np.uint8], *, helpers: bool) -> list[Any]:
        """Give sources for what nodes want of ``rows`` (uint8[nodes, rows])."""
        book = self._book
        askers = np.flatnonzero(wants.any(axis=1))
        wary = book.avoids[askers].any(axis=1)
        calm = askers[~wary].tolist()
        effects: list[Any] = []
        # A node that avoids some peer comes behind the others, by itself.
        for group in ([calm] if calm else []) + [[asker] for asker in askers[wary].tolist()]:
            left = wants.copy()
            left[np.setdiff1d(np.arange(len(wants)), group)] = 0
            givers = book.givers(rows, wants > 0)
            if group is not calm:
                givers &= ~book.avoids[group[0]][:, None]
            effects += self._assign(rows, left, givers, helpers=helpers and group is calm)
            wants = wants.copy()
            wants[group] = 0
        return effects

    def _assign(
        self, rows: Rows, wants: npt.NDArray[np.uint8], givers: Mask, *, helpers: bool
    ) -> list[Any]:
        book = self._book
        uplink, egress = book.loads()
        plan = plan_read(
            book.lengths[rows],
            givers,
            wants,
            book.plan_links(),
            backend_bytes_per_s=self._backend,
            uplink_loads=uplink,
            egress_loads=egress,
            helpers=helpers,
        )
        order = plan.order
        new = np.ascontiguousarray(plan.predecessors[plan.lanes[order]].T)
        return self._tell(rows[order], new, wants[:, order])

    def _tell(
        self, rows: Rows, new: npt.NDArray[np.int32], wants: npt.NDArray[np.uint8]
    ) -> list[Any]:
        """Note the new sources (int32[nodes, rows]; NOT_ASKED: unchanged) and send them out."""
        book = self._book
        changed = new != NOT_ASKED
        old = book.source[:, rows]
        serves = np.zeros(new.shape, np.int32)
        columns = np.broadcast_to(np.arange(len(rows)), new.shape)
        for table, sign in ((old, -1), (new, 1)):
            counts = changed & (table >= 0)
            np.add.at(serves, (table[counts], columns[counts]), sign)
        book.source[:, rows] = np.where(changed, new, old)
        # Who reads from the store reads, and has, the whole chunk.
        levels = np.where(new == STORAGE, ASK_WHOLE, wants).astype(np.uint8)
        book.asked[:, rows] = np.where(changed, levels, book.asked[:, rows])
        names = tuple(book.names)
        reading = int(((book.source == STORAGE) & (book.asked > 0)).any(axis=1).sum())
        share = np.inf if self._backend is None else self._backend / max(reading, 1)
        effects = []
        for node in np.flatnonzero((changed | (serves != 0)).any(axis=1) & book.alive).tolist():
            at = np.flatnonzero(changed[node] | (serves[node] != 0))
            effects.append(
                rm.Assign(
                    self.key,
                    names[node],
                    rows[at].astype(np.int32),
                    new[node, at],
                    serves[node, at],
                    names,
                    min(book.links[node].uplink_bytes_per_s, share),
                )
            )
        return effects

    # -- late askers take over reading --------------------------------------------------------

    def _share_reading(self, late: npt.NDArray[np.int64]) -> list[Any]:
        """Ask those that read for others to leave some to the uplinks of late askers."""
        book = self._book
        loads, _ = book.loads()
        rates = np.array([link.uplink_bytes_per_s for link in book.links])
        able = np.array([link.fabric_ok for link in book.links]) & book.alive & ~book.lying
        late = late[able[late]]
        reading = np.setdiff1d(np.flatnonzero(able & (loads > 0)), late)
        if not len(reading) or rates[reading].sum() >= (self._backend or np.inf):
            return []
        both = np.concatenate([reading, late])
        level = loads[both].sum() / rates[both].sum()
        effects = []
        for node in reading.tolist():
            mine = (book.asked[node] > 0) & (book.source[node] == STORAGE)
            rows = np.flatnonzero(mine & (book.asked[late] == ASK_WHOLE).any(axis=0))[::-1]
            spare = loads[node] - level * rates[node]
            # The last ones: those it has not begun.
            rows = rows[np.cumsum(book.lengths[rows]) <= spare][::-1]
            if len(rows):
                effects.append(rm.Yield(self.key, book.names[node], rows.astype(np.int32)))
        return effects

    def _on_yielded(self, node: int, rows: Rows) -> list[Any]:
        book = self._book
        rows = rows[(book.source[node, rows] == STORAGE) & (book.asked[node, rows] > 0)]
        loads = book.loads()[0].astype(np.float64)
        rates = np.array([link.uplink_bytes_per_s for link in book.links])
        able = np.array([link.fabric_ok for link in book.links]) & book.alive & ~book.lying
        able &= ~book.avoids[node]
        able[node] = False
        fetchers = np.full(len(rows), node, np.int64)
        for at, row in enumerate(rows.tolist()):
            choice = np.flatnonzero(able & (book.asked[:, row] == ASK_WHOLE))
            if len(choice):
                length = book.lengths[row]
                best = int(choice[np.argmin((loads[choice] + length) / rates[choice])])
                loads[best] += length
                fetchers[at] = best
        return self._hand_over(node, rows, fetchers)

    def _hand_over(self, node: int, rows: Rows, fetchers: npt.NDArray[np.int64]) -> list[Any]:
        """``fetchers`` read ``rows`` from the store now, and ``node`` gets them from there."""
        book = self._book
        columns = np.arange(len(rows))
        new = np.full((len(book.names), len(rows)), NOT_ASKED, np.int32)
        new[node] = fetchers
        new[fetchers, columns] = STORAGE
        return self._tell(rows, new, book.asked[:, rows])

    # -- failures ---------------------------------------------------------

    def _on_gone(self, node: int) -> list[Any]:
        book = self._book
        orphans = (book.source == node) & (book.asked > 0)
        effects = self._call_off(node)
        book.lose(node)
        self._accusers.pop(node, None)
        orphans[node] = False
        rows = np.flatnonzero(orphans.any(axis=0))
        if not len(rows):
            return effects
        wants = np.where(orphans[:, rows], book.asked[:, rows], 0).astype(np.uint8)
        return effects + self._place(rows, wants, helpers=False)

    def _call_off(self, node: int) -> list[Any]:
        """Tell those that keep chunks for a lost node."""
        book = self._book
        rows = np.flatnonzero((book.asked[node] > 0) & (book.source[node] >= 0))
        names = tuple(book.names)
        effects = []
        for peer in np.unique(book.source[node, rows]).tolist():
            mine = rows[book.source[node, rows] == peer].astype(np.int32)
            nothing = np.full(len(mine), NOT_ASKED, np.int32)
            less = np.full(len(mine), -1, np.int32)
            effects.append(rm.Assign(self.key, names[peer], mine, nothing, less, names))
        return effects

    def _on_failed(self, node: int, event: rm.NodeFailed) -> list[Any]:
        book = self._book
        rows = event.rows.astype(np.int64)
        peer = book.find(event.source)
        # Where another source was given meanwhile, or the peer is known to be lost, it is too late.
        told = STORAGE if not event.source else NOT_ASKED if peer is None else peer
        asked = book.asked[node, rows] > 0
        effects = self._on_unknown(event.node, rows[~asked])
        rows = rows[(book.source[node, rows] == told) & asked]
        if not len(rows) or told == NOT_ASKED:
            return effects
        if peer is None:
            return effects + self._on_unread(node, rows, event.why)
        book.failures[node, rows] += 1
        if event.why == "absent":
            book.has[peer, rows] = False
        else:
            book.avoids[node, peer] = True
        if event.why == "digest":
            effects.append(rm.PeerLies(self.key, event.source, event.node, int(rows[0])))
            accusers = self._accusers.setdefault(peer, set())
            accusers.add(node)
            book.lying[peer] |= len(accusers) >= ACCUSERS_MIN
        tired = book.failures[node, rows] >= FAILURES_MAX
        effects += self._resource(node, rows[tired], nobody=True)
        return effects + self._resource(node, rows[~tired], without=peer)

    def _on_unknown(self, node: str, rows: Rows) -> list[Any]:
        """The node still wants what it was thought to have."""
        if not len(rows):
            return []
        wanted = rows.astype(np.int32)
        return self._plan([rm.NodeAsks(self.key, node, wanted, np.ones(len(rows), np.bool_))])

    def _resource(
        self, node: int, rows: Rows, *, without: int | None = None, nobody: bool = False
    ) -> list[Any]:
        """Another source for one node: peers but ``without``, or the store if ``nobody``."""
        if not len(rows):
            return []
        book = self._book
        wants = np.zeros((len(book.names), len(rows)), np.uint8)
        wants[node] = book.asked[node, rows]
        givers = book.givers(rows, wants > 0) & ~book.avoids[node][:, None]
        if without is not None:
            givers[without] = False
        return self._assign(rows, wants, givers & (not nobody), helpers=False)

    def _on_unread(self, node: int, rows: Rows, why: str) -> list[Any]:
        """A node could not read from the store: another one may have the chunk, or read it."""
        book = self._book
        orphans = np.zeros((len(book.names), len(rows)), np.bool_)
        orphans[node] = True
        others = (book.givers(rows, orphans) & ~book.avoids[node][:, None]).any(axis=0)
        # Who may not use the fabric would be sent to the store again, for ever.
        others &= book.links[node].fabric_ok and not book.lying[node]
        effects = self._resource(node, rows[others])
        able = np.array([link.fabric_ok for link in book.links]) & book.alive & ~book.lying
        able &= ~book.avoids[node]
        moved, lost = [], []
        for row in rows[~others].tolist():
            tried = self._readers.setdefault(row, set())
            tried.add(node)
            choice = [other for other in np.flatnonzero(able).tolist() if other not in tried]
            if not choice or len(tried) >= READERS_MAX or not book.links[node].fabric_ok:
                lost.append(row)
                continue
            # One that waits for it anyhow, before others.
            moved.append((row, max(choice, key=lambda other: int(book.asked[other, row]))))
        if moved:
            pairs = np.array(moved, np.int64)
            effects += self._hand_over(node, pairs[:, 0], pairs[:, 1])
        return effects + self._give_up(np.array(lost, np.int64), why)

    def _give_up(self, rows: Rows, why: str) -> list[Any]:
        book = self._book
        effects: list[Any] = []
        for node in np.flatnonzero((book.asked[:, rows] > 0).any(axis=1)).tolist():
            mine = rows[book.asked[node, rows] > 0]
            book.settle(node, mine.astype(np.int32))
            name = book.names[node]
            effects.append(rm.Unreadable(self.key, name, mine.astype(np.int32), why))
        for row in rows.tolist():
            self._readers.pop(row, None)
        return effects
