"""What goes to the stores and comes from them keeps to the stated rate and to its share of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_tools import WAIT_S, Store, add_all, become_idle, blob, saved, tensor
from test_agent_planned import NOTHING, Node, moved

from groupio.agent.read_sources import Epoch, Part, StoreSource
from groupio.agent.uplink import Uplink, Way
from groupio.agent.workers import WorkerPool
from groupio.fabric.base import Outcome, Want
from groupio.fabric.pacing import BURST_S
from groupio.model import CHUNK_BYTES
from groupio.plan.orders import NodeOrder
from groupio.testing.fabric_suite import eventually

MIB = 1 << 20


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def passes(way: Way, nbytes: int) -> bool:
    """Whether so many bytes may move at this moment."""
    waits: list[bool] = []

    def stopped() -> bool:
        waits.append(True)
        return True

    with way.moving(nbytes, stopped):
        return not waits


def moved_in(way: Way, clock: Clock, seconds: float, piece: int) -> int:
    total, end = 0, clock.now + seconds
    while clock.now < end:
        while passes(way, piece):
            total += piece
        clock.now += 0.001
    return total


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("direction", ["writes", "reads"])
def test_a_stated_rate_and_its_share_are_kept_each_way(direction: str, share: float) -> None:
    clock = Clock()
    uplink = Uplink(20_000.0, clock=clock)
    uplink.set_share(share)
    total = moved_in(getattr(uplink, direction), clock, 10.0, 1000)
    expected = 200_000 * share
    assert expected - 100 <= total <= expected + 20_000 * BURST_S + 1000


def test_a_pause_stops_all_with_a_rate_and_without() -> None:
    for rate in (None, 1e6):
        uplink = Uplink(rate, clock=Clock())
        uplink.set_share(0.0)
        assert not passes(uplink.writes, 1)
        assert not passes(uplink.reads, 1)


def test_without_a_rate_nothing_waits_and_no_lock_is_taken() -> None:
    way = Uplink().writes
    done = threading.Event()

    def move() -> None:
        for _ in range(1000):
            with way.moving(1 << 30, lambda: False):
                pass
        done.set()

    with way._bucket._changed, way._brake._changed, way._lock:
        threading.Thread(target=move, daemon=True).start()
        assert done.wait(10)
    assert way.held_s == 0


def waiting(uplink: Uplink, stopped: Callable[[], bool]) -> threading.Thread:
    def move() -> None:
        with uplink.writes.moving(10, stopped):
            pass

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    eventually(lambda: uplink.writes._waiting > 0)
    return thread


@pytest.mark.parametrize("rate", [None, 1.0])
def test_who_is_to_stop_wakes_up_and_takes_nothing(rate: float | None) -> None:
    uplink, stop = Uplink(rate), threading.Event()
    uplink.set_share(0.0)
    before = time.monotonic()
    thread = waiting(uplink, stop.is_set)
    assert uplink.writes.held_since(time.monotonic())
    stop.set()
    uplink.wake()
    thread.join(10)
    assert not thread.is_alive()
    assert uplink.held_s > 0
    assert uplink.writes.held_since(before)
    assert not uplink.writes.held_since(time.monotonic() + 1)


@pytest.mark.parametrize("rate", [None, 1.0])
def test_the_end_of_the_agent_wakes_everybody(rate: float | None) -> None:
    workers = WorkerPool(uplink=Uplink(rate))
    workers.uplink.set_share(0.0)
    thread = waiting(workers.uplink, lambda: False)
    assert workers.close(timeout_s=5.0)
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def soon() -> Iterator[None]:
    """Long before anybody looks by itself whether to stop."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 30


class Recorded(Uplink):
    """Notes what wants to move."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[int] = []
        moving = self.writes.moving

        def noted(nbytes: int, stopped: Callable[[], bool]) -> AbstractContextManager[None]:
            self.wanted.append(nbytes)
            return moving(nbytes, stopped)

        self.writes.moving = noted  # type: ignore[method-assign]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[Store, Recorded]]:
    uplink = Recorded()
    pool = WorkerPool(uplink=uplink)
    store = Store(tmp_path / "store", pool)
    yield store, uplink
    assert pool.close(timeout_s=30.0)
    store.backend.close()


ITEMS = [tensor("long", 5 * CHUNK_BYTES // 4), blob("raw", 1000), tensor("t", 3)]
BYTES = 5 * CHUNK_BYTES + 1012


def test_all_bytes_of_a_job_go_through_the_uplink(recorded: tuple[Store, Recorded]) -> None:
    store, uplink = recorded
    member = saved(ITEMS, seed=1)
    store.check(store.save(1, [member]), [member])
    assert BYTES <= sum(uplink.wanted) <= BYTES + MIB
    wrote = sum(uplink.wanted)
    store.save(2, [member], write=False)
    assert sum(uplink.wanted) == wrote, "hashing alone moves nothing"


def test_all_bytes_of_a_planned_job_go_through_the_uplink(
    recorded: tuple[Store, Recorded],
) -> None:
    store, uplink = recorded
    nodes = Node("n0", store, store.pool), Node("n1", store, store.pool)
    try:
        report = nodes[0].hash(saved(ITEMS, seed=1))
        nodes[1].hash()
        assert sum(uplink.wanted) == 0
        rows = list(range(len(report.chunks)))
        own = NodeOrder(np.array(rows[::2], np.int64), (), False)
        nodes[0].flush.run_order(1, own, {}, ())
        part = moved(report, rows[1::2], keep=False, write=True)
        order = NodeOrder(NOTHING, (part,), False)
        nodes[1].flush.run_order(1, order, {"n0": nodes[0].address}, ())
        for node in nodes:
            node.next("stored")
        assert BYTES <= sum(uplink.wanted) <= BYTES + MIB
    finally:
        for node in nodes:
            node.close()


def test_a_job_that_is_held_ends_at_once_when_it_is_cancelled(
    store: Store, pool: WorkerPool
) -> None:
    pool.uplink.set_share(0.0)
    job, outcomes = store.job(1)
    add_all(job, 0, saved(ITEMS, seed=1))
    job.finish()
    eventually(lambda: pool.uplink.writes._waiting > 0)
    with soon():
        become_idle(job)
    assert outcomes.report is None
    assert store.segments() == []
    pool.uplink.set_share(1.0)
    store.save(2, [saved(ITEMS, seed=1)])


def test_hashing_alone_is_not_held(store: Store, pool: WorkerPool) -> None:
    busy, _ = store.job(1)
    pool.uplink.set_share(0.0)
    add_all(busy, 0, saved(ITEMS, seed=1))
    eventually(lambda: pool.uplink.writes._waiting == 2)
    assert len(store.save(2, [saved(ITEMS, seed=2)], write=False).chunks) > 0
    become_idle(busy)


def test_a_job_that_fails_while_another_thread_is_held_wakes_it(
    store: Store, pool: WorkerPool
) -> None:
    pool.uplink.set_share(0.0)
    job, outcomes = store.job(1)
    add_all(job, 0, saved(ITEMS, seed=1))
    eventually(lambda: pool.uplink.writes._waiting == 2)
    job._attempt(lambda: 1 // 0)
    eventually(lambda: pool.uplink.writes._waiting == 0)
    assert len(outcomes.errors) == 1
    become_idle(job)


def test_a_planned_job_that_is_held_ends_at_once_when_it_is_cancelled(
    store: Store, pool: WorkerPool
) -> None:
    node = Node("n0", store, pool)
    report = node.hash(saved(ITEMS, seed=1))
    pool.uplink.set_share(0.0)
    node.flush.run_order(1, NodeOrder(np.arange(len(report.chunks)), (), False), {}, ())
    eventually(lambda: pool.uplink.writes._waiting > 0)
    with soon():
        node.close()  # waits until the job is idle
    assert node.said.empty()
    assert store.segments() == []


def test_a_link_is_not_measured_while_a_share_holds_it(
    store: Store, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Node("n0", store, pool), Node("n1", store, pool)
    seconds: list[float] = []
    try:
        report = nodes[0].hash(saved(ITEMS, seed=1))
        nodes[1].hash()
        fetcher: Any = nodes[1].flush._fetcher
        monkeypatch.setattr(
            fetcher._links, "pulled", lambda address, job, outcomes, took: seconds.append(took)
        )
        pull = nodes[1].fabric.pull
        shares: list[float] = []

        def slow(address: str, job: str, wants: Sequence[Want], **more: Any) -> list[Outcome]:
            for share in shares:
                nodes[1].fabric.pace.set_share(share)
            return pull(address, job, wants, **more)

        monkeypatch.setattr(nodes[1].fabric, "pull", slow)
        for number, during in enumerate(([], [0.0, 1.0], [0.9]), 1):
            shares[:] = during
            part = moved(report, [number - 1], keep=False, write=True)
            order = NodeOrder(NOTHING, (part,), False)
            nodes[1].flush.run_order(number, order, {"n0": nodes[0].address}, ())
            nodes[1].next("stored")
    finally:
        for node in nodes:
            node.close()
    assert seconds[0] > 0
    assert seconds[1:] == [0, 0]


class Reading:
    """A committed epoch, and what its source told."""

    def __init__(self, store: Store, uplink: Uplink) -> None:
        self.member = saved(ITEMS, seed=1)
        manifest = store.manifest(1, store.save(1, [self.member]))
        self.table = manifest.chunks
        data = self.table.digests.tobytes()
        rows = {data[32 * row : 32 * row + 32]: row for row in range(len(self.table))}
        epoch = Epoch(Store(store.path, store.pool).backend, manifest.segments, self.table, rows)
        self.threads = ThreadPoolExecutor(2)
        self.told: list[tuple[str, Sequence[int], str]] = []
        self.source = StoreSource(epoch, self.threads, lambda *what: self.told.append(what), uplink)

    def read(self) -> list[memoryview]:
        lengths = self.table.lengths.tolist()
        into = [memoryview(bytearray(length)) for length in lengths]
        self.source.read([Part(row, 0, n, into[row]) for row, n in enumerate(lengths)])
        return into

    def rows(self) -> list[int]:
        return sorted(row for _, rows, why in self.told for row in rows if not why)

    def close(self) -> None:
        self.source.close()
        self.threads.shutdown()


def test_reads_of_an_agent_are_held_too(store: Store, pool: WorkerPool) -> None:
    reading = Reading(store, pool.uplink)
    pool.uplink.set_share(0.0)
    into = reading.read()
    eventually(lambda: pool.uplink.reads._waiting > 0)
    time.sleep(0.05)
    assert reading.told == []
    assert not any(any(view[:100]) for view in into)
    pool.uplink.set_share(1.0)
    eventually(lambda: reading.rows() == list(range(len(reading.table))))
    reading.close()


def test_reads_pay_for_their_bytes(store: Store) -> None:
    clock = Clock()
    uplink = Uplink(float(BYTES), clock=clock)
    reading = Reading(store, uplink)
    into = reading.read()
    eventually(lambda: bool(reading.told) or uplink.reads._waiting > 0)
    debt = 0.0
    while len(reading.rows()) < len(reading.table):
        clock.now += 0.01
        debt += 0.01
        uplink.wake()
        time.sleep(0.001)
        assert debt < WAIT_S
    # What is paid for beforehand comes at once, and the last piece is on credit.
    assert debt >= 0.5
    assert sum(map(len, into)) == int(reading.table.lengths.sum())
    reading.close()


def test_a_read_that_is_held_ends_at_once_when_it_is_closed(store: Store, pool: WorkerPool) -> None:
    reading = Reading(store, pool.uplink)
    pool.uplink.set_share(0.0)
    reading.read()
    eventually(lambda: pool.uplink.reads._waiting == 2)
    with soon():
        reading.close()  # waits for the threads
    assert reading.told == []
