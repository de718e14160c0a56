"""Damaged and unreadable stores: found, located, never returned."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from client_store import StoreBuilder, flip, same, state
from fake_agent import Background, FakeAgent, answer_settles

import groupio
from groupio.backend.records import PosixReader
from groupio.client.store_reader import StoreReader
from groupio.protocol import messages as msg

Connect = Callable[..., groupio.Client]


def test_damage_is_located_told_to_the_agent_and_never_returned(
    store: StoreBuilder, connect: Connect, agent: FakeAgent
) -> None:
    key = store.commit(3, [state()])
    flip(store.segment_path(key), 4096 + 4_300_000)
    client = connect()
    peer = agent.peer()
    with pytest.raises(groupio.IntegrityError) as caught:
        client.load(3)
    assert caught.value.path == str(store.segment_path(key))
    assert caught.value.epoch == 3
    assert peer.take(msg.Damaged).digests == (bytes.fromhex(caught.value.chunk or ""),)
    assert client.load(3, names=["none"]) == {"none": None}


def test_a_damaged_small_chunk_is_found_among_its_neighbours(
    store: StoreBuilder, connect: Connect
) -> None:
    items = {f"small.{i}": np.full(16, i) for i in range(300)}
    key = store.commit(1, [items])
    flip(store.segment_path(key), 4096 + 128 * 7 + 3)
    with pytest.raises(groupio.IntegrityError):
        connect().load(1)
    names = [name for name in items if name != "small.7"]
    got = connect().load(1, names=names)
    assert all(same(got[name], items[name]) for name in names)


@pytest.mark.parametrize("how", ["missing", "truncated", "swapped", "empty"])
def test_a_whole_segment_lost(
    store: StoreBuilder, connect: Connect, agent: FakeAgent, how: str
) -> None:
    key = store.commit(3, [state()], segments=2)
    path, other = store.segment_path(key, 0), store.segment_path(key, 1)
    if how == "missing":
        path.unlink()
    elif how == "swapped":
        path.rename(path.with_suffix(".x"))
        other.rename(path)
        path.with_suffix(".x").rename(other)
    else:
        os.truncate(path, 0 if how == "empty" else path.stat().st_size // 2)
    client = connect()
    peer = agent.peer()
    with pytest.raises(groupio.IntegrityError) as caught:
        client.load(3)
    assert str(caught.value.path).startswith(str(store.path / "segments"))
    assert len(peer.take(msg.Damaged).digests) > 1


def test_every_byte_of_a_manifest_counts(store: StoreBuilder, connect: Connect) -> None:
    key = store.commit(3, [{"a": np.arange(5), "b": 2}])
    path = store.record_path(key)
    whole = path.read_bytes()
    client = connect()
    for at in range(0, len(whole), 7):
        flip(path, at)
        with pytest.raises((groupio.IntegrityError, groupio.FormatError)) as caught:
            client.load(3)
        assert caught.value.path == str(path)
        path.write_bytes(whole)
    assert client.load(3)["b"] == 2


def test_fallback_takes_the_newest_intact_epoch_and_says_why(
    store: StoreBuilder, connect: Connect, agent: FakeAgent, background: Background
) -> None:
    store.commit(1, [{"a": 1}])
    middle = store.commit(2, [{"a": np.arange(99)}])
    newest = store.commit(3, [{"a": 3}])
    store.segment_path(middle).unlink()
    flip(store.record_path(newest), 70)
    client = connect()
    answer_settles(agent, background, None, None)
    with pytest.raises((groupio.IntegrityError, groupio.FormatError)):
        client.load()
    assert client.load(fallback=True) == {"a": 1}
    assert [epoch for epoch, _ in client.skipped_epochs] == [3, 2]
    assert str(store.segment_path(middle)) in client.skipped_epochs[1][1]
    with pytest.raises(groupio.IntegrityError):
        client.load(2)
    assert client.load(2, fallback=True) == {"a": 1}
    assert [epoch for epoch, _ in client.skipped_epochs] == [2]
    assert client.load(1) == {"a": 1}
    assert client.skipped_epochs == []


def test_without_an_intact_epoch_the_newest_damage_is_raised(
    store: StoreBuilder, connect: Connect
) -> None:
    keys = [store.commit(epoch, [{"a": epoch}]) for epoch in (1, 2)]
    for key in keys:
        store.segment_path(key).unlink()
    with pytest.raises(groupio.IntegrityError) as caught:
        connect().load(2, fallback=True)
    assert caught.value.epoch == 2


def test_unreadable_is_not_absent(
    store: StoreBuilder, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(1, [{"a": 1}])
    store.commit(2, [{"a": np.arange(10)}])

    def broken(self: PosixReader, offset: int, view: memoryview) -> None:
        number = errno.EIO if "E00000000000000000002" in self.path else errno.ESTALE
        raise groupio.StorageError("broken", path=self.path, errno=number)

    read_into = PosixReader.read_into

    def only_segments(self: PosixReader, offset: int, view: memoryview) -> None:
        (broken if "/segments/" in self.path else read_into)(self, offset, view)

    monkeypatch.setattr(PosixReader, "read_into", only_segments)
    client = connect()
    with pytest.raises(groupio.StorageError) as caught:
        client.load(2)
    assert caught.value.errno == errno.EIO
    # Bad sectors of one epoch are damage; a store that went away is not.
    for parts in (None, (None,)):
        with pytest.raises(groupio.StorageError) as caught:
            client.load(2, fallback=True, parts=parts)
        assert caught.value.errno == errno.ESTALE


def test_a_slow_store_ends_at_the_deadline(
    store: StoreBuilder, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(1, [state()])
    done = threading.Event()
    read_into = PosixReader.read_into

    def slow(self: PosixReader, offset: int, view: memoryview) -> None:
        if "/segments/" in self.path:
            done.wait(20)
        read_into(self, offset, view)

    monkeypatch.setattr(PosixReader, "read_into", slow)
    with pytest.raises(groupio.StorageError, match="in time") as caught:
        connect().load(1, deadline_s=0.2)
    done.set()
    assert caught.value.errno == errno.ETIMEDOUT


def test_a_manifest_that_contradicts_itself_is_damage(
    store: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groupio.client import store_reader

    store.commit(1, [{"a": np.arange(30_000), "b": np.arange(7)}])
    lay_out = store_reader.lay_out
    with StoreReader.open(store.path) as reader:
        manifest = reader.resolve(1)
        for specs in (slice(0, 1), slice(None, None, -1)):
            monkeypatch.setattr(store_reader, "lay_out", lambda items, s=specs: lay_out(items[s]))
            with pytest.raises(groupio.IntegrityError) as caught:
                reader.read_items(manifest, 0)
            assert caught.value.path == manifest.path
