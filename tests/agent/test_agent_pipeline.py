"""What a flush job promises: right bytes, once, and no touch after it said so."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from agent_tools import WAIT_S, Saved, Store, add_all, become_idle, blob, saved, tensor

from groupio.agent import segment_writer
from groupio.agent.arena import map_shared
from groupio.agent.known import KnownChunks
from groupio.errors import GroupIOError, StorageError, StorageFull
from groupio.format.manifest import ManifestReader, encode_manifest
from groupio.format.segment import SegmentReader
from groupio.model import CHUNK_BYTES, PAGE_BYTES, Manifest
from groupio.plan.layout import lay_out, waves

MIXED = (
    tensor("aligned", 3 << 20),
    tensor("rows of 12000 bytes", 900, 3000),
    blob("one page less a byte", PAGE_BYTES - 1),
    blob("odd", (1 << 20) + 1),
    blob("empty", 0),
    tensor("tied", 3 << 20, alias=0),
    *(blob(f"small {i}", 17 * i + 1) for i in range(300)),
    blob("middle", 300_000, replicated=True),
)


class FaultyFile:
    """A segment whose ``write`` does what the test says first."""

    def __init__(self, inner: Any, before_write: Any) -> None:
        self._inner = inner
        self._before_write = before_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        self._before_write(offset)
        self._inner.write(offset, views)


class FaultyBackend:
    """A store whose segments are faulty."""

    def __init__(self, inner: Any, before_write: Any) -> None:
        self._inner = inner
        self._before_write = before_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_segment(self, name: str) -> FaultyFile:
        return FaultyFile(self._inner.create_segment(name), self._before_write)


def reread(manifest: Manifest) -> Manifest:
    data = encode_manifest(manifest)
    reader = ManifestReader(lambda at, n: data[at : at + n], len(data), "manifest")
    reader.verify_structure()
    return reader.manifest()


def test_all_kinds_of_chunks_are_stored_where_the_report_says(store: Store) -> None:
    members = [saved(MIXED, seed) for seed in range(3)]
    report = store.save(1, members)
    store.check(report, members)
    assert [ref.name for ref in report.segments] == store.segments()
    assert reread(store.manifest(1, report)).header.bytes_unique == sum(
        int(m.layout.chunk_length.sum()) for m in members
    )


def test_chunks_of_an_item_stay_together(store: Store) -> None:
    items = [tensor("rows of 12000 bytes", 4000, 3000), blob("raw", (9 << 20) + 5)]
    member = saved(items, seed=1)
    report = store.save(1, [member])
    store.check(report, [member])
    refs = report.members[0].refs
    ends = report.chunks.offsets[refs] + report.chunks.lengths[refs]
    together = report.chunks.offsets[refs][1:] == ends[:-1]
    # 46 MiB are three runs of at most 16 MiB.
    assert int((~together).sum()) == 2 + 1
    data = int(report.chunks.lengths.sum())
    assert report.segments[0].bytes < data + 16 * PAGE_BYTES


@pytest.mark.parametrize("options", [{"framed": True}, {"framed": True, "write": False}])
def test_framed_segments_are_sound(store: Store, options: dict[str, bool]) -> None:
    members = [saved(MIXED, seed) for seed in (1, 1, 2)]
    report = store.save(1, members, **options)
    if options.get("write", True):
        store.check(report, members)
        file = store.backend.reader("segments", report.segments[0].name)
        frames = SegmentReader(file.read, file.size, "x").frames
        file.close()
        assert frames is not None
        # The first two items of two members, in chunks; the tied one and the replicas have none.
        assert len(frames.table) == 2 * (3 + 3)


def test_equal_members_are_stored_once(store: Store) -> None:
    members = [saved(MIXED, seed=7) for _ in range(4)]
    report = store.save(1, members)
    store.check(report, members)
    once = int(members[0].layout.chunk_length.sum())
    assert int(report.chunks.lengths.sum()) == once
    assert sum(ref.bytes for ref in report.segments) < 1.01 * once


def test_an_unchanged_epoch_writes_nothing_and_refers_to_the_older_segment(store: Store) -> None:
    members = [saved(MIXED, seed) for seed in range(2)]
    first = store.manifest(1, store.save(1, members))
    known = KnownChunks()
    known.add_epoch(first)
    report = store.save(2, members, known=known)
    assert store.segments() == [first.segments[0].name]
    assert [(ref.name, ref.own, ref.age) for ref in report.segments] == [
        (first.segments[0].name, False, 0)
    ]
    store.check(report, members)
    assert store.manifest(2, report).segments[0].age == 1


def test_only_what_changed_is_written(store: Store) -> None:
    member = saved(MIXED, seed=1)
    known = KnownChunks()
    known.add_epoch(store.manifest(1, store.save(1, [member])))
    view = member.view()
    changed = int(member.layout.chunk_start[2])
    view[changed] ^= 1
    member.content = bytes(view)
    report = store.save(2, [member], known=known)
    store.check(report, [member])
    own = [ref.own for ref in report.segments]
    assert own == [True, False]
    assert int((report.chunks.segments == 0).sum()) == 1


def test_a_damaged_chunk_is_written_anew(store: Store) -> None:
    member = saved([tensor("w", 3 << 20)], seed=1)
    first = store.manifest(1, store.save(1, [member]))
    known = KnownChunks()
    known.add_epoch(first)
    damaged = first.chunks.digests[first.members[0].refs[1]].tobytes()
    known.discard(damaged)
    report = store.save(2, [member], known=known)
    store.check(report, [member])
    assert report.chunks.segments[report.members[0].refs].tolist() == [1, 0, 1]


@pytest.mark.parametrize("framed", [False, True])
def test_memory_may_be_reused_once_a_wave_is_stored(store: Store, framed: bool) -> None:
    items = [*MIXED, tensor("more", 5, 1 << 20)]
    member = saved(items, seed=3)
    stored = threading.Event()
    job, outcomes = store.job(1, framed=framed, on_wave=lambda rank, wave: stored.set())
    parts = waves(member.layout, 2 * CHUNK_BYTES)
    assert len(parts) > 3
    window = saved([blob("window", 2 * CHUNK_BYTES)], seed=0).view()
    for number, wave in enumerate(parts):
        size = wave.virt_hi - wave.virt_lo
        window[:size] = member.content[wave.virt_lo : wave.virt_hi]
        stored.clear()
        job.add_wave(
            0, number, member.items, member.layout, *(wave.chunk_lo, wave.chunk_hi),
            window[:size], wave.virt_lo,
        )  # fmt: skip
        assert stored.wait(WAIT_S)
        window[:] = b"\xee" * len(window)
    job.finish()
    store.check(outcomes.result(), [member])


def test_segments_are_rolled_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 18 << 20)
    members = [saved(MIXED, seed) for seed in range(3)]
    report = store.save(1, members)
    assert len(report.segments) > 3
    assert all(ref.bytes <= 19 << 20 for ref in report.segments)
    store.check(report, members)


def test_twenty_thousand_tiny_items_make_one_dense_segment(store: Store) -> None:
    items = [blob(f"t{i}", 64) for i in range(20_000)]
    members = [saved(items, seed) for seed in range(2)]
    report = store.save(1, members)
    store.check(report, members)
    index_bytes = 2 * 20_000 * 48
    assert sum(ref.bytes for ref in report.segments) < 2 * 20_000 * 64 + index_bytes + (1 << 16)


def test_without_writing_the_digests_are_the_same(store: Store) -> None:
    members = [saved(MIXED, seed) for seed in (1, 1, 2)]
    written = store.save(1, members)
    compared = store.save(2, members, write=False)
    assert len(store.segments()) == 1
    assert not compared.segments
    assert set(compared.chunks.segments.tolist()) == {-1}
    for mine, theirs in zip(written.members, compared.members, strict=True):
        a, b = written.chunks.digests[mine.refs], compared.chunks.digests[theirs.refs]
        assert np.array_equal(a, b)


def test_members_without_bytes_are_reported_and_make_no_segment(store: Store) -> None:
    items = (blob("nothing", 0),)
    job, outcomes = store.job(1)
    job.add_wave(0, 0, items, lay_out(items), 0, 0, memoryview(b""), 0)
    job.finish()
    report = outcomes.result()
    assert report.segments == ()
    assert [(m.rank, m.items, len(m.refs)) for m in report.members] == [(0, items, 0)]
    assert outcomes.waves == [(0, 0)]
    assert store.segments() == []


def test_a_full_disk_fails_the_job_once_and_leaves_nothing(store: Store) -> None:
    def full(offset: int) -> None:
        if offset > 4 << 20:
            raise StorageFull("no room", path="x", needed=1, free=0)

    members = [saved(MIXED, seed) for seed in range(3)]
    job, outcomes = store.job(1, backend=FaultyBackend(store.backend, full))
    for rank, member in enumerate(members):
        add_all(job, rank, member)
    job.finish()
    assert outcomes.over.wait(WAIT_S)
    become_idle(job)
    assert [type(e) for e in outcomes.errors] == [StorageFull]
    assert outcomes.report is None
    assert store.segments()
    job.delete_segments()
    assert store.segments() == []
    store.check(store.save(2, members), members)


def test_a_failed_flush_is_not_repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class BadSync(FaultyFile):
        def sync_close(self, size: int) -> None:
            calls.append(size)
            raise StorageError("flush failed", path="x", errno=errno.EIO)

    backend = FaultyBackend(store.backend, lambda offset: None)
    monkeypatch.setattr(
        backend,
        "create_segment",
        lambda name: BadSync(store.backend.create_segment(name), lambda offset: None),
        raising=False,
    )
    with pytest.raises(StorageError, match="flush failed"):
        store.save(1, [saved(MIXED, 1)], backend=backend)
    assert len(calls) == 1


def test_a_segment_that_cannot_be_deleted_does_not_keep_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 18 << 20)
    job, outcomes = store.job(1)
    add_all(job, 0, saved(MIXED, 1))
    add_all(job, 1, saved(MIXED, 2))
    job.finish()
    first, *_ = [ref.name for ref in outcomes.result().segments]
    delete = store.backend.delete

    def refuse_one(folder: str, name: str) -> None:
        if name == first:
            raise StorageError("busy", path=name, errno=errno.EBUSY)
        delete(folder, name)

    monkeypatch.setattr(store.backend, "delete", refuse_one)
    with pytest.raises(StorageError, match="busy"):
        job.delete_segments()
    assert store.segments() == [first]


def test_an_unexpected_fault_becomes_a_typed_error_that_names_the_epoch(store: Store) -> None:
    def broken(rank: int, wave: int) -> None:
        raise KeyError("defect")

    job, outcomes = store.job(41, on_wave=broken)
    add_all(job, 0, saved(MIXED, 1))
    job.finish()
    with pytest.raises(GroupIOError, match=r"epoch 41 on node n0.*KeyError: 'defect'"):
        outcomes.result()
    become_idle(job)


def test_a_chunk_that_was_never_handed_over_is_an_error(store: Store) -> None:
    member = saved(MIXED, 1)
    job, outcomes = store.job(1)
    job.add_wave(3, 0, member.items, member.layout, 0, 2, member.view(), 0)
    job.finish()
    with pytest.raises(GroupIOError, match=r"rank 3 .* chunk 2 of"):
        outcomes.result()


def test_after_idle_no_thread_looks_at_the_memory(store: Store) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(offset: int) -> None:
        entered.set()
        assert leave.wait(WAIT_S)

    member = saved([tensor("w", 16 << 20)], seed=1)
    mapped = map_shared(member.arena.fd, 0, member.layout.total_bytes)
    view = memoryview(mapped)
    job, outcomes = store.job(1, backend=FaultyBackend(store.backend, block))
    job.add_wave(0, 0, member.items, member.layout, 0, len(member.layout.chunk_start), view, 0)
    assert entered.wait(WAIT_S)
    idle = threading.Event()
    job.cancel(idle.set)
    assert not idle.wait(0.2), "a write is still running"
    leave.set()
    assert idle.wait(WAIT_S)
    view.release()
    mapped.close()  # would be a BufferError if a view were left
    assert (outcomes.report, outcomes.errors, outcomes.waves) == (None, [], [])
    job.delete_segments()
    assert store.segments() == []


def test_an_error_keeps_no_memory_either(store: Store) -> None:
    def broken(offset: int) -> None:
        raise OSError(errno.EIO, "broken")

    member = saved([tensor("rows", 900, 3000)], seed=1)
    mapped = map_shared(member.arena.fd, 0, member.layout.total_bytes)
    view = memoryview(mapped)
    job, outcomes = store.job(1, backend=FaultyBackend(store.backend, broken))
    job.add_wave(0, 0, member.items, member.layout, 0, len(member.layout.chunk_start), view, 0)
    assert outcomes.over.wait(WAIT_S)
    become_idle(job)
    view.release()
    mapped.close()
    assert "Input/output error" in str(outcomes.errors[0]) or "broken" in str(outcomes.errors[0])


def test_a_stopped_job_ignores_waves_and_a_finished_one_refuses_them(store: Store) -> None:
    member = saved(MIXED, 1)
    job, outcomes = store.job(1)
    become_idle(job)
    add_all(job, 0, member)
    job.finish()
    assert not outcomes.over.wait(0.1)
    other, others = store.job(2)
    add_all(other, 0, member)
    other.finish()
    with pytest.raises(ValueError, match="rank 1 has another wave"):
        add_all(other, 1, member)
    others.result()


def test_jobs_share_the_threads_without_mixing(store: Store) -> None:
    members = [[saved(MIXED, 10 * epoch + rank) for rank in range(2)] for epoch in range(4)]
    jobs = [store.job(epoch) for epoch in range(4)]
    for (job, _), ours in zip(jobs, members, strict=True):
        for rank, member in enumerate(ours):
            add_all(job, rank, member)
    for job, _ in jobs:
        job.finish()
    for (_, outcomes), ours in zip(jobs, members, strict=True):
        store.check(outcomes.result(), ours)


def test_counts_add_up(store: Store) -> None:
    members: list[Saved] = [saved(MIXED, 1), saved(MIXED, 1)]
    known = KnownChunks()
    known.add_epoch(store.manifest(1, store.save(1, [saved([MIXED[0]], 1)])))
    job, outcomes = store.job(2, known=known)
    for rank, member in enumerate(members):
        add_all(job, rank, member)
    job.finish()
    outcomes.result()
    counts = job.counts()
    once = int(members[0].layout.chunk_length.sum())
    assert counts.hashed_bytes == 2 * once
    assert counts.duplicate_bytes == once
    assert counts.known_bytes == MIXED[0].nbytes
    assert counts.new_bytes == once - MIXED[0].nbytes
