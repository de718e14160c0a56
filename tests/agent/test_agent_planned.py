"""A planned group on two nodes with real memory, a real store and a real fabric between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from agent_tools import WAIT_S, Saved, Store, blob, saved, tensor
from blake3 import blake3

from groupio.agent.arena import MemberArena
from groupio.agent.fetching import Fetched, Fetcher, Room
from groupio.agent.holdings import Holdings
from groupio.agent.links import Links
from groupio.agent.pipeline import FlushJob
from groupio.agent.planned import PlannedFlush, Source, Told
from groupio.agent.workers import WorkerPool
from groupio.fabric.tcp import TcpFabric
from groupio.model import CHUNK_BYTES, DecisionKey, NodeReport
from groupio.plan.dedup import build_manifest
from groupio.plan.grouped import GroupPlan
from groupio.plan.labels import label_moves
from groupio.plan.orders import Fetch, NodeOrder

KEY = DecisionKey(1, 5, 1)
NOTHING = np.empty(0, np.int64)
ROOM_BYTES = 4 * CHUNK_BYTES


@dataclass
class Node:
    """One node of the group, and what its flush said."""

    name: str
    store: Store
    pool: WorkerPool
    framed: bool = False
    said: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.arenas = [MemberArena()]
        self.holdings = Holdings(self.view)
        self.fabric = TcpFabric(token=b"of both nodes")
        self.address = self.fabric.serve(self.holdings)
        self.threads = ThreadPoolExecutor(4)
        self.orders = ThreadPoolExecutor(2)
        self.links = links = Links(
            self.name,
            self.name,
            uplink=None,
            fabric=None,
            engine=self.fabric,
            pool=self.threads,
            changed=lambda link: None,
        )
        say = self.said.put
        self.flush = PlannedFlush(
            backend=lambda: self.store.backend,
            store_id=self.store.store_id,
            key=KEY,
            node=self.name,
            framed=self.framed,
            workers=self.pool,
            fetcher=Fetcher(
                fabric=self.fabric,
                holdings=self.holdings,
                links=links,
                pool=self.threads,
                group=1,
                job=self.store.store_id,
            ),
            pool=self.orders,
            told=Told(
                lambda report: say(("hashed", report)),
                lambda number, copies: say(("replicated", (number, copies))),
                lambda number, report: say(("stored", (number, report))),
                lambda number, fetched, copies: say(("short", (fetched, copies))),
                lambda error: say(("failed", error)),
            ),
            wrote=links.wrote,
        )
        base = FlushJob(
            backend=self.store.backend,
            store_id=self.store.store_id,
            key=KEY,
            node=self.name,
            write=False,
            framed=self.framed,
            known=None,
            workers=self.pool,
            on_wave=lambda rank, wave: None,
            on_done=self.flush.hashed,
            on_error=lambda error: say(("failed", error)),
        )
        self.flush.begin(base)

    def view(self, arena: int, offset: int, length: int) -> memoryview | None:
        whole = self.arenas[arena].map(0, -(-(offset + length) // 4096) * 4096)
        return whole[offset : offset + length]

    def hash(self, *members: Saved) -> NodeReport:
        for rank, member in enumerate(members):
            self.arenas.append(member.arena)
            source = Source(member.items, member.layout, member.view(), len(self.arenas) - 1, 0)
            chunks = len(member.layout.chunk_start)
            self.flush.add_wave(
                rank, 0, source, 0, chunks, 0, eager=False, table_id=b"", shapes=None
            )
        self.flush.finish()
        report: NodeReport = self.next("hashed")
        places = self.flush.places()
        if places is not None:
            self.holdings.hold(1, self.store.store_id, places)
        return report

    def next(self, kind: str) -> Any:
        found, what = self.said.get(timeout=WAIT_S)
        if found == "failed" and kind != "failed":
            raise what
        assert found == kind, f"{found} instead of {kind}: {what}"
        return what

    def room(self, nbytes: int = ROOM_BYTES) -> Room:
        return Room(self.arenas[0].map(0, nbytes), 0, 0)

    def close(self) -> None:
        idle = threading.Event()
        self.flush.cancel(idle.set)
        assert idle.wait(WAIT_S)
        self.fabric.close()
        self.threads.shutdown()
        self.orders.shutdown()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def pair(store: Store, pool: WorkerPool) -> Iterator[tuple[Node, Node]]:
    nodes = Node("n0", store, pool), Node("n1", store, pool)
    yield nodes
    for node in nodes:
        node.close()


def moved(report: NodeReport, rows: list[int], *, keep: bool, write: bool) -> Fetch:
    """Rows of node n0 for another node."""
    chosen = np.array(rows, np.int64)
    flags = np.ones(len(rows), np.bool_)
    chunks = report.chunks
    return Fetch(
        "n0", chunks.digests[chosen], chunks.lengths[chosen], flags & keep, flags & write, ()
    )


def rows_of(report: NodeReport, rest: int) -> list[int]:
    return [row for row in range(len(report.chunks)) if row % 2 == rest]


def check(store: Store, reports: list[NodeReport], member: Saved) -> None:
    """The manifest of both nodes has every chunk of the member where it says."""
    manifest = build_manifest(
        reports,
        store_id=store.store_id,
        job="job",
        key=KEY,
        incarnation=1,
        world_size=1,
        fingerprint=b"f" * 32,
        write_id="w",
        created_at=0.0,
    )
    whole = NodeReport("all", manifest.segments, manifest.chunks, manifest.members)
    store.check(whole, [member])


def big(seed: int = 1) -> Saved:
    return saved([tensor("long", 5 * CHUNK_BYTES // 4), blob("raw", 1000), tensor("t", 3)], seed)


def test_two_nodes_write_the_chunks_of_one(store: Store, pair: tuple[Node, Node]) -> None:
    member = big()
    report, empty = pair[0].hash(member), pair[1].hash()
    assert empty.members == ()
    assert (report.chunks.segments == -1).all()
    own = NodeOrder(np.array(rows_of(report, 0), np.int64), (), False)
    pair[0].flush.run_order(1, own, {}, ())
    part = moved(report, rows_of(report, 1), keep=False, write=True)
    pair[1].flush.run_order(1, NodeOrder(NOTHING, (part,), False), {"n0": pair[0].address}, ())
    stored = [node.next("stored")[1] for node in pair]
    check(store, stored, member)


def test_copies_are_kept_served_and_written_when_their_owner_is_lost(
    store: Store, pair: tuple[Node, Node]
) -> None:
    member = big()
    report = pair[0].hash(member)
    pair[1].hash()
    every = list(range(len(report.chunks)))
    part = moved(report, every, keep=True, write=False)
    addresses = {"n0": pair[0].address}
    room = pair[1].room(8 * CHUNK_BYTES)
    pair[1].flush.run_order(1, NodeOrder(NOTHING, (part,), True), addresses, (room,))
    number, copies = pair[1].next("replicated")
    assert number == 1
    assert len(copies) == len(every)
    pair[1].next("stored")
    assert pair[1].holdings.has(store.store_id, report.chunks.digests).all()
    # The owner is gone: the next round writes from the copies, and asks nobody.
    again = moved(report, every, keep=False, write=True)
    own = Fetch("n1", again.digests, again.lengths, again.keep, again.write, ())
    pair[1].flush.run_order(2, NodeOrder(NOTHING, (own,), False), {}, (room,))
    number, written = pair[1].next("stored")
    assert number == 2
    unstored = NodeReport(report.node, (), report.chunks, report.members)
    check(store, [unstored, written], member)


def test_an_order_that_comes_again_writes_nothing_twice(
    store: Store, pair: tuple[Node, Node]
) -> None:
    member = big()
    report = pair[0].hash(member)
    order = NodeOrder(np.arange(len(report.chunks)), (), False)
    pair[0].flush.run_order(1, order, {}, ())
    _, first = pair[0].next("stored")
    pair[0].flush.run_order(2, order, {}, ())
    _, second = pair[0].next("stored")
    assert [s.name for s in second.segments] == [s.name for s in first.segments]
    check(store, [second], member)


def test_what_no_peer_has_is_said(pair: tuple[Node, Node]) -> None:
    report = pair[0].hash(big())
    pair[1].hash()
    part = moved(report, [0], keep=False, write=True)
    strange = Fetch("n0", part.digests ^ np.uint8(1), part.lengths, part.keep, part.write, ())
    addresses = {"n0": pair[0].address}
    pair[1].flush.run_order(1, NodeOrder(NOTHING, (strange,), False), addresses, ())
    fetched: Fetched
    fetched, _ = pair[1].next("short")
    assert fetched.missing.tolist() == strange.digests.tolist()
    assert fetched.asked == ("n0",)
    assert fetched.liars == ()


def test_what_finds_no_room_is_missing_and_nobody_is_to_blame(pair: tuple[Node, Node]) -> None:
    report = pair[0].hash(big())
    pair[1].hash()
    address = {"n0": pair[0].address}
    room = (pair[1].room(CHUNK_BYTES),)
    order = NodeOrder(NOTHING, (moved(report, [0], keep=True, write=False),), False)
    pair[1].flush.run_order(1, order, address, room)
    pair[1].next("replicated")
    pair[1].next("stored")
    order = NodeOrder(NOTHING, (moved(report, [0, 1, 2], keep=True, write=False),), False)
    pair[1].flush.run_order(2, order, address, room)
    fetched, copies = pair[1].next("short")
    assert fetched.missing.tolist() == report.chunks.digests[1:3].tolist()
    assert fetched.asked == fetched.liars == ()
    assert copies.tolist() == report.chunks.digests[:1].tolist()


def test_a_later_round_may_have_more_room(store: Store, pair: tuple[Node, Node]) -> None:
    member = big()
    report = pair[0].hash(member)
    pair[1].hash()
    every = list(range(len(report.chunks)))
    arena, far = pair[1].arenas[0], 8 * CHUNK_BYTES
    # The order of the rooms is not that of their places, and chunks fill neither to its end.
    first = Room(arena.map(far, CHUNK_BYTES + 4096), 0, far)
    more = Room(arena.map(0, 6 * CHUNK_BYTES), 0, 0)
    addresses = {"n0": pair[0].address}
    some = moved(report, every[:1], keep=True, write=False)
    pair[1].flush.run_order(1, NodeOrder(NOTHING, (some,), False), addresses, (first,))
    pair[1].next("replicated")
    pair[1].next("stored")
    rest = moved(report, every[1:], keep=True, write=False)
    pair[1].flush.run_order(2, NodeOrder(NOTHING, (rest,), False), addresses, (first, more))
    _, copies = pair[1].next("replicated")
    assert len(copies) == len(every)
    pair[1].next("stored")
    for row in every:
        served = pair[1].holdings.find(store.store_id, report.chunks.digests[row].tobytes(), 0)
        assert served is not None
        assert blake3(served.view).digest() == report.chunks.digests[row].tobytes()
    again = moved(report, every, keep=False, write=True)
    own = Fetch("n1", again.digests, again.lengths, again.keep, again.write, ())
    pair[1].flush.run_order(3, NodeOrder(NOTHING, (own,), False), {}, (first, more))
    _, written = pair[1].next("stored")
    unstored = NodeReport(report.node, (), report.chunks, report.members)
    check(store, [unstored, written], member)


def test_moved_tensors_get_frames(store: Store, pool: WorkerPool) -> None:
    nodes = Node("n0", store, pool, framed=True), Node("n1", store, pool, framed=True)
    try:
        member = big()
        report = nodes[0].hash(member)
        nodes[1].hash()
        every = list(range(len(report.chunks)))
        order = NodeOrder(NOTHING, (moved(report, every, keep=False, write=True),), False)
        plan = label_moves(GroupPlan({"n1": order}, 0.0, 0, 0, 0, (), False), [report])
        nodes[1].flush.run_order(1, plan.orders["n1"], {"n0": nodes[0].address}, ())
        _, written = nodes[1].next("stored")
        unstored = NodeReport(report.node, (), report.chunks, report.members)
        check(store, [unstored, written], member)
        raw = (store.path / "segments" / written.segments[0].name).read_bytes()
        assert raw.count(b"a/data/0") >= 2, "each tensor has the header that torch looks for"
    finally:
        for node in nodes:
            node.close()
