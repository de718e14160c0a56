"""Rounds of a planned group, and reads, when the store's mount dies and comes back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from agent_tools import Store
from test_agent_planned import NOTHING, Node, moved
from test_agent_planned_faults import check, every, large, unstored
from test_agent_read_again import read_all
from test_agent_uplink import Reading

from dead_handles import DeadHandles
from fuse_mount import FuseMount
from groupio.agent.identity import Writer
from groupio.agent.segment_writer import SegmentWriter
from groupio.agent.workers import WorkerPool
from groupio.controller.store import JobStore
from groupio.plan.orders import NodeOrder
from open_files import open_files


def cut_short(
    store: Store, pool: WorkerPool, patch: pytest.MonkeyPatch, die: Callable[[], None]
) -> None:
    """The mount dies when all bytes of a round are written and none is durable; the next works."""
    job = JobStore(str(store.path), "job", "n1", Writer.of_this_process())
    job.follow(create=True)
    nodes = Node("n0", store, pool), Node("n1", store, pool)
    nodes[1].flush._backend = job.current
    real = SegmentWriter.finish
    lives = [True]

    def finish(self: SegmentWriter) -> object:
        if lives and self.count:
            lives.pop()
            die()
        return real(self)

    patch.setattr(SegmentWriter, "finish", finish)
    try:
        member = large(1)
        report = nodes[0].hash(member)
        nodes[1].hash()
        part = moved(report, every(report), keep=False, write=True)
        order, address = NodeOrder(NOTHING, (part,), False), {"n0": nodes[0].address}
        nodes[1].flush.run_order(1, order, address, ())
        nodes[1].next("failed")
        assert not lives
        nodes[1].flush.run_order(1, order, address, ())
        _, written = nodes[1].next("stored")
    finally:
        for node in nodes:
            node.close()
        job.close()
    after = Store(store.path, pool)
    # Nothing is left of what was cut off.
    assert after.segments() == [ref.name for ref in written.segments]
    check(after, [unstored(report), written], member)
    after.backend.close()


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOTCONN, errno.ENODEV])
def test_a_round_that_was_cut_off_is_written_anew(
    store: Store, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    with monkeypatch.context() as patch:
        dead = DeadHandles(patch, store.path, error)
        cut_short(store, pool, patch, dead.cut)


@pytest.mark.root
def test_a_round_is_written_through_the_new_mount(
    mount: FuseMount, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(mount.where / "store", pool)

    def die() -> None:
        mount.die()
        mount.again()

    with monkeypatch.context() as patch:
        cut_short(store, pool, patch, die)
    store.backend.close()


@pytest.mark.root
def test_chunks_are_read_through_the_new_mount(mount: FuseMount, pool: WorkerPool) -> None:
    store = Store(mount.where / "store", pool)
    reading = Reading(store, pool.uplink)
    assert read_all(reading) == set()
    for number in open_files(str(store.path / "segments")):
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)  # else no process is asked for them
    mount.die()
    assert read_all(reading) == {"storage"}
    mount.again()
    for _ in range(2):
        assert read_all(reading) == set()
    reading.close()
    store.backend.close()
