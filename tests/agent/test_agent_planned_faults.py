"""Planned flushes when something goes wrong, and who may use which memory when."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from agent_tools import WAIT_S, Saved, Store, blob, saved, tensor
from test_agent_pipeline import FaultyBackend
from test_agent_planned import KEY, NOTHING, Node, moved

from groupio.agent import fetching
from groupio.agent.planned import Source
from groupio.agent.segment_writer import SegmentWriter
from groupio.agent.workers import WorkerPool
from groupio.backend.posix import PosixBackend
from groupio.errors import GroupIOError, StorageError
from groupio.fabric import tcp
from groupio.model import CHUNK_BYTES, PACK_ITEM_BYTES, PAGE_BYTES, NodeReport
from groupio.plan.dedup import build_manifest
from groupio.plan.orders import Fetch, NodeOrder

MIB = 1 << 20


class Nodes:
    """Nodes of one group, each with a backend of its own that a test can hold up."""

    def __init__(self, store: Store, pool: WorkerPool) -> None:
        self.store, self.pool = store, pool
        self.made: list[Node] = []
        self.before_write: Callable[[int], None] = lambda offset: None

    def __call__(self, name: str, **options: Any) -> Node:
        own = Store(self.store.path, self.pool)
        backend: Any = FaultyBackend(own.backend, lambda at: self.before_write(at))
        own.backend = backend
        self.made.append(Node(name, own, self.pool, **options))
        return self.made[-1]


@pytest.fixture
def nodes(store: Store, pool: WorkerPool) -> Iterator[Nodes]:
    made = Nodes(store, pool)
    yield made
    for node in made.made:
        node.close()
        node.store.backend.close()


def check(store: Store, reports: list[NodeReport], *members: Saved) -> None:
    """Every chunk of all members is where the manifest of the reports says."""
    manifest = build_manifest(
        reports,
        store_id=store.store_id,
        job="job",
        key=KEY,
        incarnation=1,
        world_size=len(members),
        fingerprint=b"f" * 32,
        write_id="w",
        created_at=0.0,
    )
    store.check(
        NodeReport("all", manifest.segments, manifest.chunks, manifest.members), list(members)
    )


def hash_as(node: Node, rank: int, member: Saved) -> NodeReport:
    """Like ``node.hash``, for a member of another rank than 0."""
    node.arenas.append(member.arena)
    source = Source(member.items, member.layout, member.view(), len(node.arenas) - 1, 0)
    chunks = len(member.layout.chunk_start)
    node.flush.add_wave(rank, 0, source, 0, chunks, 0, eager=False, table_id=b"", shapes=None)
    node.flush.finish()
    report: NodeReport = node.next("hashed")
    return report


def unstored(report: NodeReport) -> NodeReport:
    return NodeReport(report.node, (), report.chunks, report.members)


def other(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Names of chunks that nobody has."""
    return digests ^ np.uint8(1)


def every(report: NodeReport) -> list[int]:
    return list(range(len(report.chunks)))


def large(seed: int, count: int = 8) -> Saved:
    """Items of which whole pages are written from where they lie."""
    return saved([blob(f"b{i}", PACK_ITEM_BYTES) for i in range(count)], seed)


def test_memory_is_not_used_again_before_it_is_written(
    store: Store, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "BATCH_BYTES", CHUNK_BYTES + 2 * MIB)
    source, target = nodes("n0"), nodes("n1")
    member = large(1)
    report = source.hash(member)
    target.hash()
    both = threading.Barrier(2)
    puts, put = iter(range(2)), SegmentWriter.put

    def put_together(self: SegmentWriter, *place: Any) -> None:
        put(self, *place)
        if next(puts, None) is not None:
            both.wait(WAIT_S)  # now one of the two threads writes both batches

    monkeypatch.setattr(SegmentWriter, "put", put_together)
    nodes.before_write = lambda offset: time.sleep(0.3)
    order = NodeOrder(NOTHING, (moved(report, every(report), keep=False, write=True),), False)
    target.flush.run_order(1, order, {"n0": source.address}, ())
    _, written = target.next("stored")
    check(store, [unstored(report), written], member)


def test_copies_are_there_before_anything_is_written(store: Store, nodes: Nodes) -> None:
    source, target = nodes("n0"), nodes("n1")
    theirs, mine = large(1, 3), large(2, 3)
    report = source.hash(theirs)
    own = hash_as(target, 1, mine)
    go_on = threading.Event()

    def hold(offset: int) -> None:
        go_on.wait(WAIT_S)

    nodes.before_write = hold
    part = moved(report, every(report), keep=True, write=True)
    order = NodeOrder(np.arange(len(own.chunks)), (part,), True)
    target.flush.run_order(1, order, {"n0": source.address}, (target.room(),))
    number, copies = target.next("replicated")
    assert (number, len(copies)) == (1, 3)
    assert target.said.empty()
    go_on.set()
    _, written = target.next("stored")
    check(store, [unstored(report), written], theirs, mine)


def test_what_was_written_before_a_round_fell_short_stays_written(
    store: Store, nodes: Nodes
) -> None:
    source, target = nodes("n0"), nodes("n1")
    theirs, mine = large(1, 2), large(2, 3)
    report = source.hash(theirs)
    own = hash_as(target, 1, mine)
    good = moved(report, every(report), keep=False, write=True)
    strange = Fetch("n0", other(good.digests), good.lengths, good.keep, good.write, ())
    addresses, rows = {"n0": source.address}, np.arange(len(own.chunks))
    target.flush.run_order(4, NodeOrder(rows, (good, strange), False), addresses, ())
    number, first = target.next("stored")
    assert number == 3, "round 4 itself is not done"
    assert len(target.next("short")[0].missing) == 2
    assert (first.chunks.segments[rows] >= 0).all()
    target.flush.run_order(5, NodeOrder(rows, (good,), False), addresses, ())
    number, second = target.next("stored")
    assert number == 5
    assert second.segments == first.segments, "nothing was written again"
    late = moved(report, [0], keep=False, write=True)
    target.flush.run_order(6, NodeOrder(rows[:1], (late,), False), addresses, ())
    assert target.next("stored")[1].segments == first.segments
    check(store, [unstored(report), second], theirs, mine)


def test_segments_are_numbered_over_all_rounds(store: Store, nodes: Nodes) -> None:
    node, member = nodes("n0"), large(1, 4)
    report = node.hash(member)
    for number, row in enumerate(every(report)):
        node.flush.run_order(number + 1, NodeOrder(np.array([row]), (), False), {}, ())
        _, written = node.next("stored")
        assert np.count_nonzero(written.chunks.segments >= 0) == number + 1
    names = [segment.name for segment in written.segments]
    assert names == store.segments()
    assert [name[-8:-4] for name in names] == ["0000", "0001", "0002", "0003"]
    check(store, [written], member)
    assert node.flush.counts().new_bytes == node.flush.counts().new_bytes >= 4 * PACK_ITEM_BYTES


def test_a_failed_round_leaves_nothing_and_may_come_again(store: Store, nodes: Nodes) -> None:
    source, target = nodes("n0"), nodes("n1")
    member = large(1)
    report = source.hash(member)
    target.hash()

    def fail(offset: int) -> None:
        raise StorageError("the store is away", path="/store")

    part = moved(report, every(report), keep=True, write=True)
    order, addresses = NodeOrder(NOTHING, (part,), False), {"n0": source.address}
    room = target.room(len(report.chunks) * PACK_ITEM_BYTES)  # not a byte more
    for number in (1, 2):
        nodes.before_write = fail
        target.flush.run_order(number, order, addresses, (room,))
        target.next("replicated")
        error: GroupIOError = target.next("failed")
        assert "the store is away" in error.message
        assert store.segments() == []
    nodes.before_write = lambda offset: None
    target.flush.run_order(3, order, addresses, (room,))
    target.next("replicated")
    number, written = target.next("stored")
    assert number == 3
    assert len(store.segments()) == 1
    check(store, [unstored(report), written], member)


def test_each_round_that_writes_has_a_backend_of_its_own(store: Store, nodes: Nodes) -> None:
    """What the round before used may be the handles of a mount that is gone."""
    source, target = nodes("n0"), nodes("n1")
    report = source.hash(large(1))
    target.hash()
    given: list[Any] = [
        StorageError("away", path="x", errno=errno.ESTALE),
        PosixBackend.open(store.path, create=True),
        PosixBackend.open(store.path, create=True),
    ]
    opened, asked = given[1:], []

    def give() -> Any:
        asked.append(given[0])
        if isinstance(given[0], StorageError):
            raise given.pop(0)
        return given.pop(0)

    target.flush._backend = give
    address = {"n0": source.address}
    # To keep copies takes no store, so it may be away.
    kept = NodeOrder(NOTHING, (moved(report, [0], keep=True, write=False),), True)
    target.flush.run_order(1, kept, address, (target.room(),))
    target.next("replicated")
    target.next("stored")
    assert not asked
    for number, row, answer in ((2, 1, "failed"), (2, 1, "stored"), (3, 2, "stored")):
        part = moved(report, [row], keep=False, write=True)
        target.flush.run_order(number, NodeOrder(NOTHING, (part,), False), address, ())
        target.next(answer)
    assert len(asked) == 3
    assert asked[1:] == opened
    for one in opened:
        one.close()


def test_room_of_what_did_not_come_is_used_again(store: Store, nodes: Nodes) -> None:
    poor, rich, target = nodes("n0"), nodes("n2"), nodes("n1")
    items = [blob(f"b{i}", 24 * PAGE_BYTES + n) for i, n in enumerate((0, 1, -2, 5, -5, 1))]
    report = poor.hash(saved(items, 1))
    rich.hash(saved(items, 1))
    target.hash()
    start = int(saved(items, 1).layout.chunk_start[1])
    poor.holdings.drop(1, start, 1)
    part = moved(report, every(report), keep=True, write=False)
    room = target.room(int(report.chunks.lengths.sum()))  # not a byte more
    addresses = {"n0": poor.address, "n2": rich.address}
    target.flush.run_order(1, NodeOrder(NOTHING, (part,), False), addresses, (room,))
    assert len(target.next("short")[0].missing) == 1
    again = Fetch("n2", part.digests, part.lengths, part.keep, part.write, ())
    target.flush.run_order(2, NodeOrder(NOTHING, (again,), False), addresses, (room,))
    assert len(target.next("replicated")[1]) == 6
    target.next("stored")
    content = saved(items, 1)
    for row, digest in enumerate(report.chunks.digests):
        served = target.holdings.find(store.store_id, digest.tobytes(), 0)
        assert served is not None
        assert bytes(served.view) == content.chunk(row)


def test_the_next_peer_is_asked_and_a_liar_is_named(store: Store, nodes: Nodes) -> None:
    liar, honest, target = nodes("n0"), nodes("n2"), nodes("n1")
    member = large(1, 2)
    report = liar.hash(member)
    honest.hash(large(1, 2))
    target.hash()
    view = liar.view(1, int(member.layout.chunk_start[1]), 10)
    assert view is not None
    view[3] ^= 1
    part = moved(report, every(report), keep=False, write=True)
    part = Fetch("n0", part.digests, part.lengths, part.keep, part.write, ("n2",))
    addresses = {"n0": liar.address, "n2": honest.address}
    target.flush.run_order(1, NodeOrder(NOTHING, (part,), False), addresses, ())
    _, written = target.next("stored")
    fetched = target.next("short")[0]
    assert (len(fetched.missing), fetched.liars) == (0, ("n0",))
    view[3] ^= 1
    check(store, [unstored(report), written], member)


def test_of_itself_a_node_asks_nobody(store: Store, nodes: Nodes) -> None:
    source, target = nodes("n0"), nodes("n1")
    member = large(1, 2)
    report = source.hash(member)
    target.hash()
    kept = moved(report, every(report), keep=True, write=False)
    room = target.room()
    target.flush.run_order(1, NodeOrder(NOTHING, (kept,), False), {"n0": source.address}, (room,))
    target.next("replicated")
    target.next("stored")
    source.fabric.close()
    target.fabric.close()
    own = moved(report, every(report), keep=True, write=True)
    own = Fetch("n1", own.digests, own.lengths, own.keep, own.write, ())
    target.flush.run_order(2, NodeOrder(NOTHING, (own,), False), {"n1": target.address}, (room,))
    assert target.next("replicated")[0] == 2
    _, written = target.next("stored")
    check(store, [unstored(report), written], member)


@pytest.mark.parametrize("own", [True, False])
def test_after_cancel_no_thread_uses_memory(nodes: Nodes, own: bool) -> None:
    source, target = nodes("n0"), nodes("n1")
    report = source.hash(large(1))
    writing, go_on = threading.Event(), threading.Event()

    def hold(offset: int) -> None:
        writing.set()
        go_on.wait(WAIT_S)

    target.hash()
    nodes.before_write = hold
    if own:
        node, order = source, NodeOrder(np.arange(len(report.chunks)), (), False)
    else:
        part = moved(report, every(report), keep=False, write=True)
        node, order = target, NodeOrder(NOTHING, (part,), False)
    node.flush.run_order(1, order, {"n0": source.address}, ())
    assert writing.wait(WAIT_S)
    idle = threading.Event()
    node.flush.cancel(idle.set)
    assert not idle.wait(0.2), "a thread still writes"
    go_on.set()
    assert idle.wait(WAIT_S)
    node.flush.delete_segments()
    node.flush.run_order(2, order, {}, ())
    with pytest.raises(queue.Empty):
        node.said.get(timeout=0.2)


@pytest.mark.parametrize("keep", [True, False])
def test_a_slow_link_is_waited_for(
    store: Store, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.setattr(fetching, "PEER_WAIT_S", 0.5)
    source, target = nodes("n0"), nodes("n1")
    member = large(1, 4)
    report = source.hash(member)
    target.hash()
    source.fabric.pace.set_rate(report.chunks.lengths.sum() / 2.0)
    part = moved(report, every(report), keep=keep, write=True)
    order = NodeOrder(NOTHING, (part,), False)
    target.flush.run_order(1, order, {"n0": source.address}, (target.room(),) if keep else ())
    if keep:
        target.next("replicated")
    _, written = target.next("stored")
    check(store, [unstored(report), written], member)
    assert target.links.link.fabric_ok


@pytest.mark.parametrize("keep", [True, False])
def test_cancel_does_not_wait_for_a_pull(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.setattr(fetching, "PEER_WAIT_S", 2 * WAIT_S)
    source, target = nodes("n0"), nodes("n1")
    strange, room = wait_for_nothing(source, target, keep=keep)
    pulling = spy_on_pulls(target, monkeypatch)
    target.flush.run_order(1, NodeOrder(NOTHING, (strange,), False), {"n0": source.address}, room)
    assert pulling.wait(WAIT_S)
    idle = threading.Event()
    target.flush.cancel(idle.set)
    assert idle.wait(WAIT_S)
    assert target.said.empty()
    assert target.links.link.fabric_ok, "the fabric is not to blame"


def test_a_fetch_that_fails_does_not_wait_for_a_pull(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "PEER_WAIT_S", 2 * WAIT_S)
    monkeypatch.setattr(fetching, "STAY_S", 0.2)
    source, target = nodes("n0"), nodes("n1")
    own = hash_as(target, 1, large(2, 2))
    strange, room = wait_for_nothing(source, target, keep=True)
    pulling = spy_on_pulls(target, monkeypatch)

    def fail(offset: int) -> None:
        pulling.wait(WAIT_S)
        raise StorageError("the store is away", path="/store")

    nodes.before_write = fail
    order = NodeOrder(np.arange(len(own.chunks)), (strange,), False)
    target.flush.run_order(1, order, {"n0": source.address}, room)
    assert "the store is away" in target.next("failed").message


def test_copies_come_though_nothing_can_be_written(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = nodes("n0"), nodes("n1")
    report, own = source.hash(large(1, 3)), hash_as(target, 1, large(2, 2))
    failed, pull = threading.Event(), target.fabric.pull

    def pull_late(*args: Any, **named: Any) -> Any:
        assert failed.wait(WAIT_S)
        time.sleep(0.1)  # so that the failure is known everywhere
        return pull(*args, **named)

    def fail(offset: int) -> None:
        failed.set()
        raise StorageError("the store is away", path="/store")

    monkeypatch.setattr(target.fabric, "pull", pull_late)
    nodes.before_write = fail
    part = moved(report, every(report), keep=True, write=False)
    order = NodeOrder(np.arange(len(own.chunks)), (part,), False)
    target.flush.run_order(1, order, {"n0": source.address}, (target.room(),))
    assert len(target.next("replicated")[1]) == 3
    assert "the store is away" in target.next("failed").message


def wait_for_nothing(source: Node, target: Node, *, keep: bool) -> tuple[Fetch, tuple[Any, ...]]:
    """A fetch of chunks that the source waits for and never gets, and room for them."""
    report = source.hash(large(1))
    strange = other(report.chunks.digests)
    source.holdings.expect(source.store.store_id, strange)  # so that it lets the other wait
    flags = np.ones(len(strange), np.bool_)
    part = Fetch("n0", strange, report.chunks.lengths, flags & keep, flags, ())
    return part, (target.room(8 * PACK_ITEM_BYTES),) if keep else ()


def spy_on_pulls(node: Node, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the node asks a peer for chunks."""
    began, ask = threading.Event(), tcp.ask

    def spy(stream: Any, *rest: Any) -> None:
        ask(stream, *rest)
        began.set()

    monkeypatch.setattr(tcp, "ask", spy)
    return began


def test_small_and_large_tensors_move_with_and_without_frames(store: Store, nodes: Nodes) -> None:
    items = [tensor("long", 3 * MIB), *(tensor(f"t{i}", 3 + i % 50) for i in range(3000))]
    items.append(blob("raw", CHUNK_BYTES + 7))
    member = saved(items, 1)
    source, target = nodes("n0"), nodes("n1")
    report = source.hash(member)
    target.hash()
    order = NodeOrder(NOTHING, (moved(report, every(report), keep=False, write=True),), False)
    target.flush.run_order(1, order, {"n0": source.address}, ())
    _, written = target.next("stored")
    check(store, [unstored(report), written], member)
