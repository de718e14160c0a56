"""What a new controller finds in a store, and what the agents that only follow one see of it."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from plan_help import raw, report

from groupio.agent.identity import Writer
from groupio.backend.posix import PosixBackend
from groupio.controller.recovery import listed, recover
from groupio.controller.store import JobStore
from groupio.errors import NotFound, StorageError
from groupio.format.items import encode_items, items_id
from groupio.format.records import (
    InflightRecord,
    RecordKind,
    decode_inflight,
    decode_record_kind,
    encode_inflight,
    segment_name,
)
from groupio.model import DecisionKey, Lineage, NodeReport, SegmentRef
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

WRITER = Writer.of_this_process()
ITEMS = [raw("a", 100), raw("b", 200)]
BODY = b"s" * 8192


def key(epoch: int) -> DecisionKey:
    return DecisionKey(1, epoch, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    """A store with a line of epochs, open for its controller."""
    made = JobStore(str(tmp_path / "store"), "job", "n0", WRITER)
    made.open(())
    made.create_lineage(Lineage(1, 0, -1, 0.0))
    yield made
    made.close()


def announce(store: JobStore, epoch: int, *nodes: str, host: str = "") -> None:
    """An attempt of a controller elsewhere that is under way on ``nodes``."""
    name = str(key(epoch))
    record = InflightRecord(
        key=key(epoch),
        incarnation=epoch,
        world_size=2,
        write_id="w",
        at=1.5,
        boot_id=WRITER.boot_id,
        pid=1 << 30,
        pid_start=1,
        host=host or WRITER.host,
        segments=(),
        nodes=nodes,
    )
    store.backend.put("inflight", name, encode_inflight(record), durable=False)


def announce_again(store: JobStore, epoch: int, **other: Any) -> None:
    """As :func:`announce`, with other fields in the record."""
    announce(store, epoch)
    name = str(key(epoch))
    record = decode_inflight(store.backend.read("inflight", name), "")
    store.backend.delete("inflight", name)
    made = encode_inflight(msgspec.structs.replace(record, **other))
    store.backend.put("inflight", name, made, durable=False)


def segment(store: JobStore, epoch: int, node: str) -> str:
    """A segment of the attempt; nothing here looks at what is in it."""
    name = segment_name(key(epoch), node, 0)
    Path(store.path, "segments", name).write_bytes(BODY)
    return name


def prepare(store: JobStore, epoch: int) -> bytes:
    """Bring an attempt of two nodes as far as its prepared record."""
    reports = []
    for rank, node in enumerate(("n0", "n1")):
        name = segment(store, epoch, node)
        one = report(node, {rank: (ITEMS, [f"{node} {epoch} a", f"{node} {epoch} b"])})
        (member,) = one.members
        member = replace(member, items_id=items_id(encode_items(member.items)))
        whole = SegmentRef(name, len(BODY), True)
        reports.append(NodeReport(node, (whole,), one.chunks, (member,)))
    effect = fx.PrepareEpoch(
        group=1,
        key=key(epoch),
        incarnation=1,
        world_size=2,
        reports=tuple(reports),
        replicated=(),
        metadata={},
    )
    return store.prepare(effect, lambda *place: None)


def again(store: JobStore, **how: bool) -> ev.StoreState:
    how = {"fence": True, "resume": True, **how}
    return recover(store.backend, WRITER, "job", frozenset(), **how)


def test_attempts_that_nodes_hold_are_left_to_them(store: JobStore) -> None:
    announce(store, 7, "n1", "n2")
    name = segment(store, 7, "n1")
    state = again(store)
    assert state.undecided == (ev.UndecidedAttempt(key(7), 7, 2, ("n1", "n2")),)
    assert (state.aborted, state.committed) == ((), ())
    assert state.incarnation == 7, "the next life of the job is not taken for this one"
    assert store.backend.exists("inflight", str(key(7)))
    assert store.backend.list("segments") == [name]
    assert again(store) == state, "and again, for the controller after this one"
    # Without a term nobody will ask the nodes: the attempt ends.
    state = again(store, resume=False)
    assert (state.undecided, state.aborted) == ((), (key(7),))
    assert store.backend.list("segments") == []
    assert not store.backend.exists("inflight", str(key(7)))


def test_nobody_else_decides_for_those_nodes(store: JobStore) -> None:
    announce(store, 7, "n1", "n2", host="far")
    with pytest.raises(StorageError, match="in flight on host far"):
        again(store, fence=False, resume=False)
    assert again(store, fence=False).undecided[0].key == key(7)


def test_an_attempt_without_nodes_is_aborted(store: JobStore) -> None:
    announce(store, 7)
    kept = segment(store, 8, "n1")  # of this one not even the announcement is left
    state = again(store)
    assert state.undecided == ()
    assert state.aborted == (key(7), key(8))
    assert kept not in store.backend.list("segments")
    with store.backend.reader("epochs", str(key(7))) as reader:
        assert decode_record_kind(reader.read(0, 64)) is RecordKind.ABORT


@pytest.mark.parametrize(
    "other",
    [
        {"host": "another"},
        {"boot_id": "of another machine of this name, or of an earlier boot"},
        {"pid_space": WRITER.pid_space + 1},
    ],
    ids=str,
)
def test_what_may_live_where_nobody_can_look_is_left_alone_until_a_save(
    store: JobStore, other: dict[str, Any]
) -> None:
    announce_again(store, 7, **other)
    with pytest.raises(StorageError, match="left alone until a save begins here"):
        again(store, fence=False)
    assert again(store).aborted == (key(7),)


@pytest.mark.parametrize("pid_space", [0, WRITER.pid_space])
def test_a_process_of_this_namespace_that_has_ended_is_not_waited_for(
    store: JobStore, pid_space: int
) -> None:
    announce_again(store, 7, pid_space=pid_space)
    assert again(store, fence=False).aborted == (key(7),)


def test_what_was_prepared_is_committed_whoever_holds_it(store: JobStore) -> None:
    announce(store, 7, "n0", "n1")
    content = prepare(store, 7)
    state = again(store)
    assert state.committed == (ev.CommittedEpoch(key(7), 1, content),)
    assert state.undecided == ()
    assert not store.backend.exists("inflight", str(key(7)))


def test_a_prepared_record_without_its_segments_is_left_to_the_nodes(store: JobStore) -> None:
    announce(store, 7, "n0", "n1")
    prepare(store, 7)
    store.backend.delete("segments", segment_name(key(7), "n1", 0))
    assert again(store).undecided == (ev.UndecidedAttempt(key(7), 7, 2, ("n0", "n1")),)


def test_what_is_held_here_is_not_looked_at(store: JobStore) -> None:
    announce(store, 7, "n1")
    announce(store, 8, "n1")
    state = recover(store.backend, WRITER, "job", frozenset([key(7)]), fence=True, resume=True)
    assert [one.key for one in state.undecided] == [key(8)]


def test_opening_says_what_is_undecided(store: JobStore) -> None:
    announce(store, 7, "n1")
    state = store.open((), resume=True)
    assert [one.key for one in state.undecided] == [key(7)]
    assert state.store_id == store.store_id
    assert store.open(()).aborted == (key(7),)


def decide(store: JobStore, epoch: int, *, commit: bool) -> None:
    effect = fx.Decide(group=1, key=key(epoch), incarnation=1, commit=commit)
    assert store.decide(effect) == (commit, True)


def test_followers_see_decisions_and_touch_nothing(store: JobStore) -> None:
    content = prepare(store, 1)
    decide(store, 1, commit=True)
    decide(store, 2, commit=False)
    announce(store, 7, "n1")
    announce(store, 8)
    name = segment(store, 8, "n0")
    prepare(store, 9)
    state = listed(store.backend, "job")
    assert state.committed == (ev.CommittedEpoch(key(1), 1, content),)
    assert state.aborted == (key(2),)
    assert (state.undecided, state.incarnation) == ((), 1)
    assert [line.number for line in state.lineages] == [1]
    assert store.backend.exists("inflight", str(key(8)))
    assert store.backend.exists("prepared", str(key(9)))
    assert name in store.backend.list("segments")


def test_a_follower_knows_the_newest_epoch_and_learns_the_next(store: JobStore) -> None:
    prepare(store, 1)
    decide(store, 1, commit=True)
    follower = JobStore(store.path, "job", "n1", WRITER)
    assert follower.follow(create=False) == store.store_id
    assert follower.lease_bytes.keys() == {0, 1}

    def known(epoch: int) -> list[bool]:
        one = report("n", {0: (ITEMS, [f"n1 {epoch} a", f"n1 {epoch} b"])}, stored=False)
        found = follower.known.index.find(one.chunks.digests, one.chunks.lengths)
        return [bool(row >= 0) for row in found]

    assert (known(1), known(2)) == ([True, True], [False, False])
    prepare(store, 2)
    decide(store, 2, commit=True)
    follower.learn(key(2))
    assert known(2) == [True, True]
    follower.close()


def test_an_epoch_that_cannot_be_learned_costs_deduplication_only(
    store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    follower = JobStore(store.path, "job", "n1", WRITER)
    follower.follow(create=False)
    with caplog.at_level(logging.WARNING):
        follower.learn(key(5))
    assert "epoch 5 is not used for deduplication" in caplog.text
    follower.close()


def test_following_creates_a_store_only_when_asked(tmp_path: Path) -> None:
    follower = JobStore(str(tmp_path / "none"), "job", "n1", WRITER)
    with pytest.raises(NotFound):
        follower.follow(create=False)
    assert not (tmp_path / "none").exists()
    name = follower.follow(create=True)
    assert len(bytes.fromhex(name)) == 16
    assert follower.follow(create=False) == name
    follower.close()
    other = JobStore(str(tmp_path / "none"), "another name", "n2", WRITER)
    assert other.follow(create=True) == name
    assert other.job == "job", "the store knows whose it is"
    other.close()


def test_a_follower_goes_on_after_a_failed_flush(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = JobStore(store.path, "job", "n1", WRITER)
    follower.follow(create=True)
    follower.renew()
    before: PosixBackend = follower.backend

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(StorageError):
            before.sync_folder("segments", force=True)
    with pytest.raises(StorageError, match="reopen the store"):
        before.sync_folder("segments", force=True)
    follower.renew()
    assert follower.backend is not before
    follower.backend.sync_folder("segments", force=True)
    follower.close()


def test_attempts_are_announced_with_their_nodes(store: JobStore) -> None:
    effect = fx.PublishInflight(1, key(3), 4, 2, nodes=("n1", "n2"))
    store.publish(effect)
    assert again(store).undecided == (ev.UndecidedAttempt(key(3), 4, 2, ("n1", "n2")),)
    store.publish(fx.PublishInflight(2, key(4), 4, 1))
    assert again(store).aborted == (key(4),), "of one node: nobody else can have its bytes"
