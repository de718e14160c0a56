"""Grouped reads on a node: what drives the reading machines, and the chunks that they hold.

Bytes are names here: a chunk in memory is its digest, or ``WRONG``. Every pull and every read from
the store has exactly one outcome, as the machine asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from groupio.errors import GroupIOError, IntegrityError
from groupio.format.records import parse_key
from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.reading import NodeReader
from groupio.testing.sim.engine import Violated, brief
from groupio.testing.sim.store import Commit, Procedure, Segment

if TYPE_CHECKING:
    from groupio.testing.sim.node import Node

PULL_S = 6.0
"""A pull without an answer fails after so long; the server gives up a little later."""

LINGER_S = 20.0
"""A read that nobody uses is closed after so long."""

JOIN_S = 3.0
"""A read begins without a controller when there is none for so long."""

REFUSED_S = 0.01
DRAM_RATE = 1e9
"""Bytes/s from one node's memory to another's."""

WRONG = b"wrong bytes"


class Asks(NamedTuple):
    """A rank wants chunks of an epoch."""

    key: DecisionKey
    wants: rm.ClientWants


class Took(NamedTuple):
    """A rank has copied chunks."""

    key: DecisionKey
    took: rm.ClientTook
    done: bool = False
    """It wants nothing more."""


class Pieces(NamedTuple):
    """A rank may copy these rows of its request, or cannot have them when there is a ``why``."""

    key: DecisionKey
    rows: tuple[int, ...]
    why: str = ""
    read: Read | None = None
    """In whose memory they are."""


class Here(NamedTuple):
    """A chunk, or a part of one, in memory."""

    content: bytes
    start: int
    stop: int


class Flight(NamedTuple):
    """One chunk on its way from a node to a read."""

    read: Read
    source: str
    row: int
    start: int
    stop: int
    number: int


class Read:
    """One read on one node."""

    def __init__(self, reads: Reads, key: DecisionKey, record: Commit) -> None:
        self.reads = reads
        self.node = reads.node
        self.sim = reads.node.sim
        self.key = key
        self.name = str(key)
        self.manifest = record.manifest
        table = self.manifest.chunks
        self.digests = [row.tobytes() for row in table.digests]
        self.lengths = table.lengths
        small = "queue_of_one" in self.sim.options.rows
        limits = dict.fromkeys(("store_bytes", "peer_bytes", "peers_bytes", "hold_bytes"), 1)
        self.machine = NodeReader(
            self.name, self.node.name, self.lengths, **(limits if small else {})
        )
        self.limit = max(1, int(self.lengths.max(initial=0))) if small else 1 << 60
        self.memory: dict[int, Here] = {}
        self.free: set[int] = set()
        """Rows in memory that the machine has released."""
        self.staged: set[int] = set()
        """Rows that the machine knows to be in the staging memory."""
        self.flights: dict[tuple[str, int], Flight] = {}
        self.tickets: dict[int, Flight] = {}
        self.begun = False
        self.clients: set[str] = set()
        self.ended = False
        self._used = self.sim.engine.now
        self._pending: list[Any] = []
        self._events: deque[Any] = deque()
        self._timer: object = None
        if not self.node.follower.seeking:
            self.joined()
        else:
            self.sim.engine.post(JOIN_S, self.node.process, self._alone)
        self.sim.engine.post(LINGER_S, self.node.process, self._look)

    # -- the controller -------------------------------------------------

    def joined(self) -> None:
        """There is a controller that knows this node."""
        self._tell(rm.ReadOpened(self.name, self.node.name, self.lengths.astype(np.int32)))
        if self.begun:
            self.sim.loads.spoiled.add(self.name)
            self.run(rm.SwarmBack())
        else:
            self._begin()

    def left(self) -> None:
        """There is no controller now."""
        if self.begun:
            self.sim.loads.spoiled.add(self.name)
            self.run(rm.SwarmLost())

    def _alone(self) -> None:
        if not self.begun:
            self.sim.loads.spoiled.add(self.name)
            self._begin(alone=True)

    def _begin(self, *, alone: bool = False) -> None:
        self.begun = True
        if alone:
            self.run(rm.SwarmLost())
        self.staged = {row for row, name in enumerate(self.digests) if self.node.holds(name)}
        self.run(rm.ChunksHere(np.array(sorted(self.staged), np.int32)))
        pending, self._pending = self._pending, []
        for event in pending:
            self.run(event)

    def take(self, event: Any) -> None:
        """What the swarm or a rank says; it waits until the read has begun."""
        if self.begun:
            self.run(event)
        else:
            self._pending.append(event)

    def _tell(self, message: Any) -> None:
        self.node.follower.report(message)

    def _look(self) -> None:
        """Close the read once nobody has used it for a while."""
        engine = self.sim.engine
        busy = bool(self.clients or self.tickets or self._pending) or not self.machine.idle
        if busy or engine.now - self._used < LINGER_S / 2:
            engine.post(LINGER_S, self.node.process, self._look)
            return
        self.ended = True
        self.sim.loads.spoiled.add(self.name)
        self.reads.forget(self)
        self._tell(rm.ReadClosed(self.name, self.node.name))

    # -- the machine -------------------------------------------------

    def run(self, event: Any) -> None:
        """Feed an event to the machine, after those before it, and execute its effects."""
        if self.ended:
            return
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            event = self._events[0]
            landed = event if isinstance(event, _Landed) else None
            effects = self.machine.handle(landed.event if landed else event)
            if landed is not None and not any(isinstance(e, rm.Discard) for e in effects):
                self.memory[landed.event.rows[0]] = landed.here
            self._check(effects)
            for effect in effects:
                self._execute(effect)
            self._events.popleft()
        self._used = self.sim.engine.now

    def _check(self, effects: list[Any]) -> None:
        """11: nothing more is got while the memory of the read is full."""
        if any(isinstance(effect, rm.Pull | rm.ReadStorage) for effect in effects):
            held = self.machine.held_bytes
            if held > self.limit:
                raise Violated(11, f"{self.node.name} reads {self.name} with {held} bytes held")

    def _execute(self, effect: Any) -> None:
        if self.sim.engine.tracing:
            shown = effect.message if isinstance(effect, rm.Tell) else effect
            self.sim.trace(self.node.name, f"read {self.name}: {brief(shown)} {_rows(shown)}")
        match effect:
            case rm.Tell(message=message):
                self._tell(message)
            case rm.Pull(peer=peer, rows=rows, starts=starts, stops=stops):
                for row, start, stop in zip(rows, starts, stops, strict=True):
                    self._pull(peer, row, start, stop)
            case rm.ReadStorage(rows=rows):
                for row in rows:
                    self._fetch(row)
            case rm.Deliver(client=client, rows=rows):
                self._deliver(client, rows)
            case rm.Damaged(client=client, rows=rows, why=why):
                self.node.to_rank(client, "pieces", Pieces(self.key, rows, why))
            case rm.Serve(ticket=ticket, row=row):
                self._serve(ticket, row)
            case rm.Refuse(ticket=ticket):
                flight = self.tickets.pop(ticket, None)
                if flight is not None:
                    self._answer(flight, None)
            case rm.Release(rows=rows):
                self._release(rows)
            case rm.Keep(rows=rows):
                self._lost(row for row in rows if not self._use(row))
            case rm.Discard():
                pass
            case fx.StartTimer(name=name, delay_s=delay):
                self.sim.engine.post(delay, self.node.process, self.run, ev.TimerFired(name))
            case _:
                raise AssertionError(f"a reader asks for {effect!r}")

    # -- memory -------------------------------------------------

    def _use(self, row: int) -> Here | None:
        """The chunk, which is in use from now on; None when it is gone."""
        self.free.discard(row)
        if row not in self.memory and self.node.holds(self.digests[row]):
            self.memory[row] = Here(self.digests[row], 0, int(self.lengths[row]))
        return self.memory.get(row)

    def _release(self, rows: Iterable[int]) -> None:
        sim = self.sim
        self.free.update(rows)
        if not sim.healed and sim.rng.random() < sim.options.evictions:
            delay = sim.rng.random()
            sim.engine.post(delay, self.node.process, self._evict, tuple(rows))

    def _evict(self, rows: tuple[int, ...]) -> None:
        gone = [row for row in rows if row in self.free]
        for row in gone:
            self.free.discard(row)
            self.memory.pop(row, None)
        self._lost(gone)

    def _lost(self, rows: Iterable[int]) -> None:
        gone = tuple(rows)
        if gone:
            self.sim.loads.spoiled.add(self.name)
            self.staged.difference_update(gone)
            self.run(rm.ChunksLost(gone))

    def staging_changed(self) -> None:
        """Chunks of the staging memory may be gone."""
        holds = self.node.holds
        gone = [r for r in self.staged if r not in self.memory and not holds(self.digests[r])]
        self._lost(sorted(gone))

    def _deliver(self, client: str, rows: tuple[int, ...]) -> None:
        here = tuple(row for row in rows if self._use(row) is not None)
        self._lost(row for row in rows if row not in here)
        if here:
            self.node.to_rank(client, "pieces", Pieces(self.key, here, read=self))

    # -- bytes come -------------------------------------------------

    def _fly(self, source: str, row: int, start: int, stop: int) -> Flight:
        if (source, row) in self.flights:
            raise Violated(6, f"{self.node.name} gets row {row} twice from {source or 'the store'}")
        flight = Flight(self, source, row, start, stop, self.sim.network.number())
        self.flights[source, row] = flight
        return flight

    def _fetch(self, row: int) -> None:
        self.sim.loads.leaves_store(self, row)
        flight = self._fly("", row, 0, int(self.lengths[row]))

        def done(content: bytes | None, error: GroupIOError | None) -> None:
            self.land(flight, content, "storage" if error is not None else "")

        self.node.steps.start(self._from_store(row), done)

    def _from_store(self, row: int) -> Procedure:
        yield "read"
        table = self.manifest.chunks
        name = self.manifest.segments[int(table.segments[row])].name
        file = self.sim.disk.get("segments", name)
        if file is None or not isinstance(file.content, Segment):
            raise IntegrityError(f"segment {name} is gone", path=name)
        digest = self.digests[row]
        return WRONG if digest in file.content.bad else digest

    def _pull(self, peer: str, row: int, start: int, stop: int) -> None:
        flight = self._fly(peer, row, start, stop)
        sim, node = self.sim, self.node
        target = sim.nodes[peer]
        address = self.reads.addresses.get(peer)
        sim.engine.post(PULL_S, node.process, self.land, flight, None, "timeout")
        if not target.up or target.address() != address:
            sim.engine.post(REFUSED_S, node.process, self.land, flight, None, "lost")
        elif sim.network.reaches(node.name, peer):
            delay = sim.network.delay(node.process, node.name, peer)
            sim.engine.post(delay, target.process, target.reads.wanted, flight)

    def land(self, flight: Flight, content: bytes | None, why: str = "") -> None:
        """What came of a chunk on its way; what comes later changes nothing."""
        at = flight.source, flight.row
        if self.flights.get(at) is not flight:
            return
        del self.flights[at]
        sim = self.sim
        if not why and content == WRONG and "digest check" not in sim.guards:
            why = "digest"
            sim.oracle.detected += 1
        if why:
            sim.loads.spoiled.add(self.name)
            self.run(rm.Failed(flight.source, (flight.row,), why))
        else:
            assert content is not None
            arrived = rm.Arrived(flight.source, (flight.row,))
            self.run(_Landed(arrived, Here(content, flight.start, flight.stop)))

    # -- bytes go to peers -------------------------------------------------

    def wanted(self, flight: Flight) -> None:
        """A peer asks for a chunk."""
        ticket = next(self.reads.numbers)
        self.tickets[ticket] = flight
        self.sim.engine.post(PULL_S + 1, self.node.process, self.over, ticket, False)
        self.take(rm.PeerWants(ticket, flight.row))

    def over(self, ticket: int, ok: bool) -> None:
        """A peer's request is over."""
        if self.tickets.pop(ticket, None) is not None:
            self.take(rm.PeerDone(ticket, ok))

    def _serve(self, ticket: int, row: int) -> None:
        flight = self.tickets.get(ticket)
        if flight is None:
            return
        here = self._use(row)
        if here is None:
            self.over(ticket, False)
            self._answer(flight, None)
            self._lost((row,))
            return
        if here.stop - here.start < int(self.lengths[row]):
            raise Violated(10, f"{self.node.name} serves row {row} and has a part of it")
        delay = self._answer(flight, WRONG if self.node.liar else here.content)
        self.sim.engine.post(delay, self.node.process, self._sent, ticket)

    def _sent(self, ticket: int) -> None:
        flight = self.tickets.get(ticket)
        if flight is not None:
            asker = flight.read.node
            ok = asker.up and self.sim.network.reaches(self.node.name, asker.name)
            self.over(ticket, ok)

    def _answer(self, flight: Flight, content: bytes | None) -> float:
        """Send a chunk, or that there is none; the seconds that it takes."""
        network, asker = self.sim.network, flight.read.node
        delay = network.delay(self.node.process, self.node.name, asker.name)
        why = "absent"
        if content is not None:
            why = ""
            delay += (flight.stop - flight.start) / DRAM_RATE * self.node.slow
        if network.reaches(self.node.name, asker.name):
            self.sim.engine.post(delay, asker.process, flight.read.land, flight, content, why)
        return delay


class _Landed(NamedTuple):
    """An arrival, with what has arrived."""

    event: rm.Arrived
    here: Here


def _rows(effect: Any) -> str:
    rows = getattr(effect, "rows", ())
    return str(list(rows)[:12]) if len(rows) else ""


class Reads:
    """All reads of one agent process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.numbers = count(1)
        self.addresses: dict[str, str] = {}
        self.open: dict[DecisionKey, Read] = {}

    def ask(self, client: str, event: Asks | Took) -> None:
        """A message of a rank."""
        read = self._read(event.key)
        if read is None:
            rows = () if isinstance(event, Took) else tuple(event.wants.rows.tolist())
            self.node.to_rank(client, "pieces", Pieces(event.key, rows, "refused"))
        elif isinstance(event, Asks):
            if len(event.wants.rows):
                read.clients.add(client)
            read.take(event.wants)
        else:
            read.take(event.took)
            if event.done:
                self._leave(read, client)

    def client_left(self, client: str) -> None:
        """A rank is gone."""
        for read in self.open.values():
            self._leave(read, client)

    def _leave(self, read: Read, client: str) -> None:
        if client in read.clients:
            read.clients.discard(client)
            read.take(rm.ClientLeft(client))

    def take(self, message: Any) -> None:
        """A message of the job's swarms."""
        if isinstance(message, rm.Peers):
            self.addresses = message.addresses
            return
        key = parse_key(message.key)
        assert key is not None
        read = self._read(key)
        if read is not None and not isinstance(message, rm.ReadSought):
            read.take(message)

    def joined(self) -> None:
        """There is a controller that knows this node."""
        for read in list(self.open.values()):
            read.joined()

    def left(self) -> None:
        """There is no controller now."""
        for read in list(self.open.values()):
            read.left()

    def staging_changed(self) -> None:
        """Chunks of the staging memory may be gone."""
        for read in list(self.open.values()):
            read.staging_changed()

    def wanted(self, flight: Flight) -> None:
        """A peer asks for a chunk; a node that does not read the epoch has nothing to give."""
        read = self.open.get(flight.read.key)
        if read is not None:
            read.wanted(flight)
            return
        delay = self.node.sim.network.delay(self.node.process, self.node.name, flight.source)
        asker = flight.read
        self.node.sim.engine.post(delay, asker.node.process, asker.land, flight, None, "absent")

    def forget(self, read: Read) -> None:
        """A read has ended."""
        del self.open[read.key]

    def peer_ended(self, peer: Node) -> None:
        """The connections to an agent that ended break."""
        for read in list(self.open.values()):
            read.sim.loads.spoiled.add(read.name)
            for flight in [f for f in read.flights.values() if f.source == peer.name]:
                read.land(flight, None, "lost")
            for ticket, flight in list(read.tickets.items()):
                if flight.read.reads is peer.reads:
                    read.over(ticket, False)

    def _read(self, key: DecisionKey) -> Read | None:
        """The read of an epoch, begun if need be; None when the epoch is not there."""
        read = self.open.get(key)
        if read is None:
            file = self.node.sim.disk.get("epochs", str(key))
            if file is None or not isinstance(file.content, Commit):
                return None
            read = self.open[key] = Read(self, key, file.content)
        return read
