"""Each invariant finds what breaks it, and nothing in a store that keeps it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from groupio.model import (
    ChunkTable,
    DecisionKey,
    EpochHeader,
    Level,
    Lineage,
    Manifest,
    MemberTable,
    SegmentRef,
)
from groupio.testing import invariants as inv

STORE = "ab" * 16
FIRST = DecisionKey(1, 10, 1)
SECOND = DecisionKey(1, 20, 1)


def digests(*numbers: int) -> np.ndarray:
    return np.array([[number] * 32 for number in numbers], dtype=np.uint8)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def manifest_of(key: DecisionKey, *names: str, world_size: int = 2, **header: Any) -> Manifest:
    """Two chunks in each segment, named by segment number; every member has all of them."""
    count = 2 * len(names)
    table = ChunkTable(
        digests=digests(*(int(name[-5]) * 10 + i for name in names for i in range(2))),
        lengths=np.full(count, 100, dtype=np.int64),
        segments=np.repeat(np.arange(len(names), dtype=np.int32), 2),
        offsets=np.tile(ints(4096, 8192), len(names)),
    )
    fields: dict[str, Any] = {
        "store_id": STORE,
        "job": "job",
        "lineage": key.lineage,
        "epoch": key.epoch,
        "attempt": key.attempt,
        "incarnation": 1,
        "world_size": world_size,
        "fingerprint": b"f" * 32,
        "content_id": b"c" * 32,
        "write_id": f"w{key.epoch}",
        "created_at": 1.0,
        "bytes_logical": 0,
        "bytes_unique": 0,
        "bytes_stored": 0,
    }
    refs = np.arange(count, dtype=np.int64)
    return Manifest(
        header=EpochHeader(**fields | header),
        segments=tuple(SegmentRef(name, 16384, name.startswith(str(key))) for name in names),
        chunks=table,
        members=tuple(MemberTable(rank, (), b"i" * 32, refs, 0) for rank in range(2)),
    )


def segment_of(name: str, key: DecisionKey, **changes: Any) -> inv.SegmentSummary:
    number = int(name[-5]) * 10
    summary = inv.SegmentSummary(
        name, STORE, key, 16384, digests(number, number + 1), ints(4096, 8192), ints(100, 100)
    )
    return dataclasses.replace(summary, **changes)


def commit(key: DecisionKey, **changes: Any) -> inv.Decision:
    return dataclasses.replace(inv.Decision(key, True, 1, f"w{key.epoch}"), **changes)


NAME_1 = f"{FIRST}-node-0001.seg"
NAME_2 = f"{SECOND}-node-0002.seg"


def good_store() -> inv.Observed:
    """Epoch 10 with its own segment; epoch 20 with its own and that of epoch 10."""
    return inv.Observed(
        decisions=(commit(FIRST), commit(SECOND)),
        manifests={FIRST: manifest_of(FIRST, NAME_1), SECOND: manifest_of(SECOND, NAME_2, NAME_1)},
        segments={NAME_1: segment_of(NAME_1, FIRST), NAME_2: segment_of(NAME_2, SECOND)},
    )


def ack(epoch: int, rank: int = 0, level: Level = Level.DURABLE, **changes: Any) -> inv.Ack:
    return dataclasses.replace(inv.Ack(1, epoch, rank, 2, 1, level), **changes)


def with_manifest(store: inv.Observed, key: DecisionKey, manifest: Manifest) -> inv.Observed:
    return dataclasses.replace(store, manifests={**store.manifests, key: manifest})


def with_segment(store: inv.Observed, summary: inv.SegmentSummary) -> inv.Observed:
    return dataclasses.replace(store, segments={**store.segments, summary.name: summary})


def test_a_sound_store_has_no_violations() -> None:
    store = good_store()
    acks = [ack(10), ack(20, rank=1, write_id="w20")]
    assert inv.check_store(store, acks) == []
    assert store.committed == (FIRST, SECOND)
    assert store.latest() == 20
    assert inv.Observed((), {}).latest() is None


def test_atomic_finds_missing_resized_moved_and_rotten() -> None:
    store = good_store()
    gone = dataclasses.replace(store, segments={NAME_2: store.segments[NAME_2]})
    assert {(v.key, v.path) for v in inv.check_atomic(gone)} == {(FIRST, NAME_1), (SECOND, NAME_1)}

    short = with_segment(store, segment_of(NAME_2, SECOND, total_bytes=16000))
    assert [v.path for v in inv.check_atomic(short)] == [NAME_2]

    moved = with_segment(store, segment_of(NAME_2, SECOND, offsets=ints(4096, 8256)))
    assert [v.chunk for v in inv.check_atomic(moved)] == [digests(21).tobytes().hex()]

    empty = segment_of(
        NAME_2, SECOND, digests=digests()[:0].reshape(0, 32), offsets=ints(), lengths=ints()
    )
    assert len(inv.check_atomic(with_segment(store, empty))) == 2

    rotten = segment_of(NAME_1, FIRST, bad=frozenset([digests(11).tobytes()]))
    found = inv.check_atomic(with_segment(store, rotten))
    assert {(v.key, v.chunk) for v in found} == {
        (key, digests(11).tobytes().hex()) for key in (FIRST, SECOND)
    }
    assert inv.check_atomic(with_segment(store, rotten), [FIRST]) == found[:1]

    blank = dataclasses.replace(store, manifests={})
    assert [v.invariant for v in inv.check_atomic(blank)] == [1, 1]


@pytest.mark.parametrize(
    "header",
    [{"epoch": 11}, {"attempt": 2}, {"job": "other"}, {"store_id": "cd" * 16}, {"incarnation": 2}],
)
def test_no_mixing_finds_parts_of_another(header: dict[str, Any]) -> None:
    store = with_manifest(good_store(), FIRST, manifest_of(FIRST, NAME_1, **header))
    assert {v.invariant for v in inv.check_no_mixing(store)} == {3}


def test_no_mixing_finds_foreign_segments() -> None:
    store = good_store()
    claimed = manifest_of(SECOND, NAME_2, NAME_1)
    claimed = dataclasses.replace(
        claimed, segments=tuple(msgspec.structs.replace(s, own=True) for s in claimed.segments)
    )
    assert [v.path for v in inv.check_no_mixing(with_manifest(store, SECOND, claimed))] == [NAME_1]
    for swapped in (
        segment_of(NAME_1, SECOND),
        segment_of(NAME_1, FIRST, store_id="cd" * 16),
    ):
        assert inv.check_no_mixing(with_segment(store, swapped))
    strange = manifest_of(FIRST, "x0001.seg")
    assert "not the name" in inv.check_no_mixing(with_manifest(store, FIRST, strange))[0].detail


def test_no_downgrade_finds_smaller_groups() -> None:
    store = with_manifest(good_store(), FIRST, manifest_of(FIRST, NAME_1, world_size=3))
    assert "missing [2]" in inv.check_no_downgrade(store)[0].detail
    assert inv.check_no_downgrade(good_store(), [ack(10, world_size=4)])
    assert not inv.check_no_downgrade(good_store(), [ack(10), ack(30, world_size=4)])


def test_lost_acks_are_found_from_the_level_that_had_to_survive() -> None:
    store = good_store()
    lost = ack(30, level=Level.STAGED)
    assert not inv.check_no_lost_ack(store, [lost])
    assert inv.check_no_lost_ack(store, [lost], survives=Level.STAGED)
    assert not inv.check_no_lost_ack(store, [ack(30, level=Level.RELEASED)], survives=Level.STAGED)
    assert inv.check_no_lost_ack(store, [ack(30)])
    assert inv.check_no_lost_ack(store, [ack(20, lineage=2)])
    assert inv.check_no_lost_ack(store, [ack(20, rank=5)])


def test_idempotent_finds_a_second_commit_and_a_foreign_write() -> None:
    store = good_store()
    again = dataclasses.replace(
        store, decisions=(*store.decisions, commit(DecisionKey(1, 20, 2), write_id="x"))
    )
    assert [v.key for v in inv.check_idempotent(again)] == [DecisionKey(1, 20, 2)]
    assert inv.check_idempotent(store, [ack(20, write_id="another")])
    assert not inv.check_idempotent(store, [ack(20, level=Level.STAGED, write_id="another")])


def test_one_decision_finds_double_late_and_gapped_attempts() -> None:
    def attempt(number: int, committed: bool, incarnation: int = 1) -> inv.Decision:
        return inv.Decision(DecisionKey(1, 10, number), committed, incarnation, f"w{number}")

    def found(*decisions: inv.Decision) -> list[inv.Violation]:
        return inv.check_one_decision(inv.Observed(decisions, {}))

    assert not found(attempt(1, False), attempt(2, False, 2), attempt(3, True, 2))
    assert not found(attempt(1, False, 3), attempt(2, False, 0))
    assert found(attempt(1, True), attempt(1, False))
    assert found(attempt(1, True), attempt(2, False))
    assert found(attempt(1, False), attempt(3, True))
    assert found(attempt(1, False, 2), attempt(2, True, 1))


def test_decisions_stand_and_epochs_stay() -> None:
    before = good_store()
    assert not inv.check_decisions_stand(before, before)
    turned = dataclasses.replace(before, decisions=(commit(FIRST, committed=False), commit(SECOND)))
    assert [v.key for v in inv.check_decisions_stand(before, turned)] == [FIRST]
    retained = dataclasses.replace(before, decisions=(commit(SECOND),))
    assert not inv.check_decisions_stand(before, retained)
    assert not inv.check_retention(before, retained)
    cut = dataclasses.replace(before, decisions=(commit(FIRST),))
    assert [v.key for v in inv.check_retention(before, cut)] == [SECOND]


def test_latest_follows_the_newest_line() -> None:
    rewound = DecisionKey(2, 15, 1)
    store = good_store()
    store = dataclasses.replace(
        store,
        decisions=(*store.decisions, commit(rewound)),
        lineages=(Lineage(number=2, parent=1, after_epoch=10),),
    )
    assert store.latest() == 15


def test_monotone_looks_at_each_lineage() -> None:
    assert not inv.check_monotone([(1, 10), (1, 10), (1, 20), (2, 15), (2, 16)])
    assert len(inv.check_monotone([(1, 20), (1, 10), (1, 15), (1, 21)])) == 2


def test_bit_exact_compares_all_items() -> None:
    saved = {(0, "w"): b"1", (1, "w"): b"2"}
    assert not inv.check_bit_exact(saved, dict(saved))
    found = inv.check_bit_exact(saved, {(0, "w"): b"x", (2, "w"): b"3"})
    assert [v.detail.split(" of ")[1] for v in found] == [
        "rank 0 came back different",
        "rank 1 did not come back",
        "rank 2 was never saved",
    ]


def test_bounded_checks_every_sample() -> None:
    good = inv.MemorySample(budget=100, leased=50, quarantined=20, cached=30, in_flight=1)
    idle = inv.MemorySample(budget=100, leased=0, quarantined=0, cached=100, in_flight=0)
    assert not inv.check_bounded([good, idle])
    for bad in (
        dataclasses.replace(good, cached=31),
        dataclasses.replace(good, leased=-1),
        dataclasses.replace(good, in_flight=0),
    ):
        assert len(inv.check_bounded([bad])) == 1
