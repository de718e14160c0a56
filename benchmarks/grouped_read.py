"""Measures grouped reads of many nodes on simulated links: ``python benchmarks/grouped_read.py``.

The machines are those of production (``protocol.swarm``, ``protocol.reading``); only the links and
the clock are simulated. A link serves its transfers in turn, one piece at a time, at its rate: the
backend in all, each node's uplink, and each fabric port, in and out. What leaves a port waits in
the network until the port of its receiver takes it. Processors and memory cost nothing, clients
take what they get at once. Prints one JSON object; ``ratio`` is the time of the slowest node over
what the bottleneck alone needs for the state.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from groupio.model import NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import reading_messages as rm
from groupio.protocol.reading import NodeReader
from groupio.protocol.swarm import Swarm

GB = 10**9
KEY = "store/epoch"
CONTROL_S = 0.0002
"""A message between a node and the controller."""
REQUEST_S = 0.0001
"""A request of one node to another."""
STORAGE_S = 0.002
"""The first byte of a read from the store."""


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.events += 1
        heapq.heappush(self._heap, (self.now + delay, self.events, call, args))

    def run(self) -> None:
        while self._heap:
            self.now, _, call, args = heapq.heappop(self._heap)
            call(*args)


class Port:
    """A link: one piece at a time, transfers take turns."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self.clock = clock
        self.rate = rate
        self.carried = 0
        self._queue: deque[Transfer] = deque()
        self._busy = False

    def take(self, transfer: Transfer) -> None:
        self._queue.append(transfer)
        if not self._busy:
            self._start()

    def _start(self) -> None:
        self._busy = True
        transfer = self._queue.popleft()
        self.clock.after(transfer.piece / self.rate, self._done, transfer)

    def _done(self, transfer: Transfer) -> None:
        self.carried += transfer.piece
        self._busy = False
        transfer.passed(self)
        if self._queue and not self._busy:
            self._start()


class Transfer:
    """Bytes through one link and then through another, in pieces."""

    __slots__ = ("done", "first", "left_first", "left_second", "piece", "second")

    def __init__(
        self, size: int, pieces: int, first: Port, second: Port, done: Callable[[], None]
    ) -> None:
        self.piece = size / pieces
        self.left_first = self.left_second = pieces
        self.first, self.second, self.done = first, second, done
        first.take(self)

    def passed(self, port: Port) -> None:
        if port is self.first:
            self.left_first -= 1
            if self.left_first:
                port.take(self)
            self.second.take(self)
            return
        self.left_second -= 1
        if not self.left_second:
            self.done()


class Node:
    """One node: its machine, its links, and a driver that executes the machine's effects."""

    def __init__(self, world: World, link: NodeLink) -> None:
        self.world = world
        self.name = link.node
        self.uplink = Port(world.clock, link.uplink_bytes_per_s)
        self.out = Port(world.clock, link.fabric_bytes_per_s)
        self.into = Port(world.clock, link.fabric_bytes_per_s)
        self.reader = NodeReader(KEY, link.node, world.lengths)
        self.left = 0
        self.finished = 0.0

    def handle(self, event: Any) -> None:
        for effect in self.reader.handle(event):
            self.execute(effect)

    def execute(self, effect: Any) -> None:
        world = self.world
        match effect:
            case rm.Tell(message=message):
                world.clock.after(CONTROL_S, world.tell, message)
            case rm.Pull(peer=peer, rows=rows):
                for row in rows:
                    world.clock.after(REQUEST_S, world.ask, self, peer, row)
            case rm.ReadStorage(rows=rows):
                for row in rows:
                    world.clock.after(STORAGE_S, world.fetch, self, row)
            case rm.Serve(ticket=ticket, row=row):
                asker = world.tickets[ticket]
                Transfer(
                    int(world.lengths[row]),
                    world.pieces,
                    self.out,
                    asker.into,
                    lambda: world.served(ticket, self, asker, row),
                )
            case rm.Deliver(client=client, request=request, rows=rows):
                self.left -= len(rows)
                if not self.left:
                    self.finished = world.clock.now
                self.handle(rm.ClientTook(client, request, rows))
            case rm.Release() | rm.Keep() | fx.StartTimer():
                pass  # memory costs nothing here; what is kept too long shows in the result
            case _:
                raise AssertionError(f"nothing fails here, but the reader said {effect!r}")


class World:
    """All nodes, their swarm and the store."""

    def __init__(
        self, links: list[NodeLink], lengths: np.ndarray, backend: float, pieces: int
    ) -> None:
        self.clock = Clock()
        self.lengths = lengths
        self.pieces = pieces
        self.backend = Port(self.clock, backend)
        self.swarm = Swarm(KEY, lengths, backend_bytes_per_s=backend)
        self.nodes = {link.node: Node(self, link) for link in links}
        self.tickets: dict[int, Node] = {}
        for link in links:
            self.swarm.handle(rm.NodeKnown(KEY, link))

    def tell(self, message: Any) -> None:
        for effect in self.swarm.handle(message):
            if isinstance(effect, fx.StartTimer | fx.StopTimer):
                continue  # all members ask, well before it runs out
            self.clock.after(CONTROL_S, self.nodes[effect.node].handle, effect)

    def ask(self, asker: Node, peer: str, row: int) -> None:
        ticket = len(self.tickets)
        self.tickets[ticket] = asker
        self.nodes[peer].handle(rm.PeerWants(ticket, row))

    def served(self, ticket: int, server: Node, asker: Node, row: int) -> None:
        asker.handle(rm.Arrived(server.name, (row,)))
        server.handle(rm.PeerDone(ticket, True))

    def fetch(self, node: Node, row: int) -> None:
        size = int(self.lengths[row])
        done = rm.Arrived("", (row,))
        Transfer(size, self.pieces, self.backend, node.uplink, lambda: node.handle(done))

    def load(self, askers: list[Node], at: float = 0.0) -> None:
        """All of ``askers`` want everything, in one grouped load."""
        rows = np.arange(len(self.lengths), dtype=np.int32)
        for node in askers:
            node.left = len(rows)
            zeros = np.zeros(len(rows), np.int64)
            want = rm.ClientWants("client", 1, rows, zeros, self.lengths, "load", len(askers))
            self.clock.after(at, node.handle, want)


def scenario(
    name: str,
    askers: int,
    args: argparse.Namespace,
    *,
    cached: bool,
    uplink: float,
    fabric: float,
    backend: float,
) -> dict[str, Any]:
    """One load by ``askers`` nodes; ``cached``: one more node has everything in memory."""
    lengths = np.full(args.chunks, args.chunk_bytes, np.int64)
    count = askers + cached
    links = [NodeLink(f"n{i}", uplink, fabric, f"n{i}") for i in range(count)]
    world = World(links, lengths, backend, args.pieces)
    nodes = list(world.nodes.values())
    if cached:
        nodes[-1].handle(rm.ChunksHere(np.arange(args.chunks, dtype=np.int32)))
    started = time.process_time()
    world.clock.after(0.001, world.load, nodes[:askers])
    world.clock.run()
    size = int(lengths.sum())
    limits = {"fabric": size / fabric} if cached else {"backend": size / backend}
    if not cached:
        limits["uplinks"] = size / (uplink * askers)
        if askers > 1:
            limits["fabric"] = size * (askers - 1) / askers / fabric
    bottleneck = max(limits, key=lambda one: limits[one])
    taken = max(node.finished for node in nodes[:askers]) - 0.001
    return {
        "scenario": name,
        "nodes": askers,
        "state_bytes": size,
        "uplink_bytes_per_s": uplink,
        "fabric_bytes_per_s": fabric,
        "backend_bytes_per_s": backend,
        "bottleneck": bottleneck,
        "limit_s": round(limits[bottleneck], 4),
        "slowest_node_s": round(taken, 4),
        "ratio": round(taken / limits[bottleneck], 4),
        "backend_bytes_over_state": round(world.backend.carried / size, 4),
        "complete": all(not node.left for node in nodes[:askers]),
        "held_bytes_left": sum(node.reader.held_bytes for node in nodes),
        "simulated_events": world.clock.events,
        "cpu_s": round(time.process_time() - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--chunk-bytes", type=int, default=4 << 20)
    parser.add_argument(
        "--pieces", type=int, default=2, help="of a chunk, in which links take turns"
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 8, 64])
    args = parser.parse_args()
    fast = {"uplink": 12.5 * GB, "fabric": 25.0 * GB}
    results = []
    for count in [n for n in args.nodes if n > 1]:
        results.append(
            scenario("cached on one node", count, args, cached=True, backend=10.0 * GB, **fast)
        )
    for count in args.nodes:
        results.append(
            scenario("cold, backend-bound", count, args, cached=False, backend=10.0 * GB, **fast)
        )
    slow = {"uplink": 2.5 * GB, "fabric": 25.0 * GB}
    results.append(
        scenario("cold, uplink-bound", 8, args, cached=False, backend=100.0 * GB, **slow)
    )
    conditions = {
        "chunks": args.chunks,
        "chunk_bytes": args.chunk_bytes,
        "pieces_per_chunk": args.pieces,
        "control_latency_s": CONTROL_S,
        "request_latency_s": REQUEST_S,
        "storage_latency_s": STORAGE_S,
        "links": "simulated; full duplex ports, transfers take turns; processors cost nothing",
        "machines": "groupio.protocol.swarm.Swarm, groupio.protocol.reading.NodeReader",
    }
    print(json.dumps({"conditions": conditions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
