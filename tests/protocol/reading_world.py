"""A grouped read of many nodes in one process: the real machines, a model of memory, peers and
store, and a random order of events. Messages of one pair stay in order; all else may overtake."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from groupio.model import NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.reading import NodeReader
from groupio.protocol.swarm import Swarm

KEY = "read"


@dataclass
class Client:
    """A client of a node and what it still wants: rows and their bytes."""

    left: dict[int, tuple[int, int]]
    damaged: dict[int, str] = field(default_factory=dict)


class Host:
    """One node: its machine and a driver with a model of its memory."""

    def __init__(self, world: ReadingWorld, link: NodeLink, **limits: int) -> None:
        self.world = world
        self.link = link
        self.name = link.node
        self.reader = NodeReader(KEY, link.node, world.lengths, **limits)
        self.memory: dict[int, tuple[int, int]] = {}
        self.released: set[int] = set()
        self.clients: dict[str, Client] = {}
        self.alive = True
        self.lies = False
        self.deaf: set[str] = set()
        """Peers whose answers do not come through."""
        self.bad_rows: set[int] = set()
        """Rows that this node cannot read from the store."""
        self.timer = ""

    def handle(self, event: Any) -> None:
        if not self.alive:
            return
        for effect in self.reader.handle(event):
            self.execute(effect)
        assert self.reader.held_bytes >= 0

    def execute(self, effect: Any) -> None:
        world = self.world
        match effect:
            case rm.Tell(message=message):
                world.send(self.name, "", message)
            case rm.Pull(peer=peer, rows=rows, starts=starts, stops=stops):
                assert peer != self.name
                for row, start, stop in zip(rows, starts, stops, strict=True):
                    assert 0 <= start < stop <= world.lengths[row]
                    world.later(world.pull, self, peer, row, (start, stop))
            case rm.ReadStorage(rows=rows):
                for row in rows:
                    world.later(world.read, self, row)
            case rm.Deliver(client=client, request=request, rows=rows):
                for row in rows:
                    start, stop = self.clients[client].left.pop(row)
                    low, high = self.memory[row]
                    assert low <= start < stop <= high
                    self.released.discard(row)
                world.later(self.handle, rm.ClientTook(client, request, rows))
            case rm.Damaged(client=client, rows=rows, why=why):
                for row in rows:
                    del self.clients[client].left[row]
                    self.clients[client].damaged[row] = why
            case rm.Serve(ticket=ticket, row=row):
                assert self.memory[row] == (0, world.lengths[row])
                self.released.discard(row)
                world.later(world.answer, ticket, self)
            case rm.Refuse(ticket=ticket):
                world.later(world.refuse, ticket)
            case rm.Release(rows=rows):
                assert not self.released & set(rows), (self.name, self.released & set(rows))
                self.released.update(rows)
            case rm.Keep(rows=rows):
                assert set(rows) <= self.released & set(self.memory)
                self.released -= set(rows)
            case rm.Discard(rows=rows):
                self.world.discarded += len(rows)
            case fx.StartTimer(name=name):
                self.timer = name

    def forget(self) -> None:
        """The memory of some released chunks is used again."""
        rows = tuple(sorted(self.released))[:3]
        self.released -= set(rows)
        for row in rows:
            del self.memory[row]
        if rows:
            self.handle(rm.ChunksLost(rows))


class ReadingWorld:
    """All nodes, the swarm, and what is on its way between them."""

    def __init__(self, lengths: list[int], seed: int = 0, backend: float | None = None) -> None:
        self.lengths = np.array(lengths, np.int64)
        self.random = random.Random(seed)
        self.backend = backend
        self.swarm: Swarm | None = Swarm(KEY, self.lengths, backend_bytes_per_s=backend)
        self.hosts: dict[str, Host] = {}
        self.channels: dict[tuple[str, str], deque[Any]] = {}
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.tickets: dict[int, tuple[Host, str, int, tuple[int, int]]] = {}
        self.next_ticket = 0
        self.reads: list[tuple[str, int]] = []
        self.lies: list[rm.PeerLies] = []
        self.discarded = 0
        self.swarm_timers: set[str] = set()
        self.waited = 0
        """How often nothing happened until a timer ran out."""

    # -- setting it up ---------------------------------------------------------

    def add(self, name: str, *, ok: bool = True, uplink: float = 1e9, **limits: int) -> Host:
        link = NodeLink(name, uplink, 2e9, name, ok)
        host = self.hosts[name] = Host(self, link, **limits)
        self.send(name, "", rm.NodeKnown(KEY, link))
        return host

    def keep(self, name: str, rows: list[int]) -> None:
        """The node has these chunks in memory from the beginning."""
        host = self.hosts[name]
        for row in rows:
            host.memory[row] = (0, int(self.lengths[row]))
            host.released.add(row)
        host.handle(rm.ChunksHere(np.array(rows, np.int32)))

    def want(
        self,
        name: str,
        client: str,
        spans: dict[int, tuple[int, int]] | None = None,
        *,
        load: str = "",
        members: int = 1,
    ) -> Client:
        """A new client wants these bytes of chunks; without ``spans`` everything."""
        if spans is None:
            spans = {row: (0, int(size)) for row, size in enumerate(self.lengths)}
        host = self.hosts[name]
        host.clients[client] = asked = Client(dict(spans))
        bounds = np.array(list(spans.values()), np.int64).reshape(-1, 2)
        rows = np.array(list(spans), np.int32)
        self.later(
            host.handle,
            rm.ClientWants(client, 1, rows, bounds[:, 0], bounds[:, 1], load, members),
        )
        return asked

    # -- what happens ---------------------------------------------------------

    def later(self, call: Any, *args: Any) -> None:
        self.calls.append((call, args))

    def send(self, sender: str, to: str, message: Any) -> None:
        self.channels.setdefault((sender, to), deque()).append(message)

    def step(self) -> bool:
        """Let one thing happen, if there is any."""
        ready = sorted(pair for pair, queue in self.channels.items() if queue)
        if not ready and not self.calls:
            return False
        at = self.random.randrange(len(ready) + len(self.calls))
        if at < len(ready):
            self.transmit(*ready[at])
        else:
            call, args = self.calls.pop(at - len(ready))
            call(*args)
        return True

    def run(self, steps: int = 200_000) -> None:
        """Until nothing happens any more, with the timers when all else is done."""
        while steps:
            steps -= 1
            if self.step():
                continue
            if not self.fire_timers():
                return
        raise AssertionError("the read does not come to an end")

    def fire_timers(self) -> bool:
        fired = False
        for host in self.hosts.values():
            if host.timer:
                name, host.timer = host.timer, ""
                fired = True
                self.waited += 1
                host.handle(ev.TimerFired(name))
        if not fired and self.tickets:
            ticket = min(self.tickets)
            asker, peer, row, _ = self.tickets.pop(ticket)
            fired = True
            self.waited += 1
            self.hosts[peer].handle(rm.PeerDone(ticket, ok=False))
            asker.handle(rm.Failed(peer, (row,), "timeout"))
        for name in sorted(self.swarm_timers):
            fired = True
            self.swarm_timers.discard(name)
            self.to_swarm(ev.TimerFired(name))
        return fired

    def transmit(self, sender: str, to: str) -> None:
        message = self.channels[sender, to].popleft()
        if not to:
            self.to_swarm(message)
        elif to in self.hosts:
            self.hosts[to].handle(message)

    def to_swarm(self, message: Any) -> None:
        if self.swarm is None:
            return
        for effect in self.swarm.handle(message):
            match effect:
                case fx.StartTimer(name=name):
                    self.swarm_timers.add(name)
                case fx.StopTimer(name=name):
                    self.swarm_timers.discard(name)
                case rm.PeerLies():
                    self.lies.append(effect)
                case _:
                    self.send("", effect.node, effect)

    def pull(self, asker: Host, peer: str, row: int, span: tuple[int, int]) -> None:
        server = self.hosts[peer]
        if not server.alive or peer in asker.deaf:
            self.later(asker.handle, rm.Failed(peer, (row,), "timeout"))
            return
        self.next_ticket += 1
        self.tickets[self.next_ticket] = (asker, peer, row, span)
        server.handle(rm.PeerWants(self.next_ticket, row))

    def answer(self, ticket: int, server: Host) -> None:
        if ticket not in self.tickets:
            return
        asker, peer, row, span = self.tickets.pop(ticket)
        if not server.lies and asker.alive:
            if row not in asker.memory or asker.memory[row] != (0, self.lengths[row]):
                asker.memory[row] = span
                asker.released.discard(row)
            asker.handle(rm.Arrived(peer, (row,)))
        else:
            asker.handle(rm.Failed(peer, (row,), "digest"))
        server.handle(rm.PeerDone(ticket, ok=not server.lies))

    def refuse(self, ticket: int) -> None:
        if ticket in self.tickets:
            asker, peer, row, _ = self.tickets.pop(ticket)
            asker.handle(rm.Failed(peer, (row,), "absent"))

    def read(self, host: Host, row: int) -> None:
        if not host.alive:
            return
        self.reads.append((host.name, row))
        if row in host.bad_rows:
            host.handle(rm.Failed("", (row,), "storage"))
            return
        whole = (0, int(self.lengths[row]))
        if host.memory.get(row) != whole:
            host.memory[row] = whole
            host.released.discard(row)
        host.handle(rm.Arrived("", (row,)))

    def kill(self, name: str) -> None:
        """The agent of a node dies; those that pull from it hear of it."""
        self.hosts[name].alive = False
        for ticket, (asker, peer, row, _) in list(self.tickets.items()):
            if peer == name:
                del self.tickets[ticket]
                self.later(asker.handle, rm.Failed(peer, (row,), "lost"))
            elif asker.name == name:
                del self.tickets[ticket]
                self.later(self.hosts[peer].handle, rm.PeerDone(ticket, False))
        self.send(name, "", rm.NodeGone(KEY, name))

    def lose_swarm(self) -> None:
        """The controller dies, with all that was on its way to and from it."""
        self.swarm = None
        for queue in self.channels.values():
            queue.clear()
        for host in self.hosts.values():
            host.handle(rm.SwarmLost())

    def new_swarm(self) -> None:
        """Another controller takes over and knows nothing."""
        for queue in self.channels.values():
            queue.clear()
        self.swarm = Swarm(KEY, self.lengths, backend_bytes_per_s=self.backend)
        for host in self.hosts.values():
            if host.alive:
                self.send(host.name, "", rm.NodeKnown(KEY, host.link))
                host.handle(rm.SwarmBack())

    # -- what must be true ---------------------------------------------------------

    def check_done(self, *, damaged: bool = False) -> None:
        """All clients of live nodes have everything, and no memory is in use any more."""
        for host in self.hosts.values():
            if not host.alive:
                continue
            for client in host.clients.values():
                assert not client.left, (host.name, client.left)
                assert damaged or not client.damaged
            assert host.reader.idle, (host.name, host.reader._want[:, 1].nonzero())
            assert host.reader.held_bytes == 0, host.name

    def check_once(self) -> None:
        """No chunk left the store twice."""
        rows = [row for _, row in self.reads]
        assert len(rows) == len(set(rows))
