"""Loading and listing, from stores that were made without an agent."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_store import StoreBuilder, flip, same, state
from fake_agent import Background, FakeAgent, answer_settles

import groupio
from groupio.backend.posix import PosixBackend
from groupio.client.store_reader import StoreReader
from groupio.protocol import messages as msg

Connect = Callable[..., groupio.Client]


@pytest.mark.parametrize("threads", [None, 1])
def test_everything_comes_back_as_it_was(
    store: StoreBuilder, connect: Connect, threads: int | None
) -> None:
    saved = [state(0), state(1)]
    store.commit(3, saved, segments=3)
    client = connect(rank=1, world_size=2, settings={"read_threads": threads})
    for member in (0, 1, None):
        got = client.load(3, member=member)
        expected = saved[1 if member is None else member]
        assert list(got) == list(expected)
        assert [name for name in got if not same(got[name], expected[name])] == []
    got["big"][:] = 0
    got["tied.a"][0] = 9
    assert got["tied.b"][0] == 0
    assert got["big"].flags.owndata


def test_names_pick_items_and_a_wrong_name_gets_help(store: StoreBuilder, connect: Connect) -> None:
    store.commit(3, [state()])
    client = connect()
    assert list(client.load(3, names=["raw", "own"])) == ["own", "raw"]
    assert list(client.load(3, names="none")) == ["none"]
    assert client.load(3, names=[]) == {}
    with pytest.raises(groupio.NotFound, match=r"'smal\.7'.*'small\.7'") as caught:
        client.load(3, names=["own", "smal.7"])
    assert caught.value.items == ("smal.7",)
    with pytest.raises(groupio.NotFound, match="'nothere'"):
        client.load(3, into={"nothere": bytearray(3)})


def test_into_fills_the_given_memory_in_place(store: StoreBuilder, connect: Connect) -> None:
    saved = state()
    store.commit(3, [saved])
    client = connect()
    wide = np.zeros((1200, 2000))
    into = {
        "big": wide[:, ::2],
        "own": np.zeros_like(saved["own"]),
        "raw": bytearray(len(saved["raw"])),
        "nan": memoryview(bytearray(24)),
        "scalar": np.zeros((), np.float16),
        "empty": np.zeros(0, np.uint16),
        "tied.a": np.zeros(50_000, np.int32),
    }
    got = client.load(3, into=into)
    assert all(got[name] is into[name] for name in into)
    assert np.array_equal(into["big"], saved["big"])
    assert not wide[:, 1::2].any()
    assert same(into["own"], saved["own"])
    assert into["raw"] == saved["raw"]
    assert bytes(into["nan"]) == saved["nan"].tobytes()
    assert same(into["scalar"], saved["scalar"])
    assert same(got["turned"], saved["turned"])
    assert list(client.load(3, names=["own", "none"], into={"own": into["own"]})) == ["own", "none"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("own", np.zeros(70_000, np.int32)),
        ("own", np.zeros(69_999, np.float32)),
        ("own", bytearray(4)),
        ("own", bytes(280_000)),
        ("own", "text"),
        ("own", np.broadcast_to(np.float32(0), 70_000)),
        ("plain", bytearray(10)),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_before_anything_is_read(
    store: StoreBuilder, connect: Connect, name: str, given: Any
) -> None:
    store.commit(3, [state()])
    big = np.zeros((1200, 1000))
    with pytest.raises(groupio.InvalidInput, match=name):
        connect().load(3, into={"big": big, name: given})
    assert not big.any()


def test_into_must_be_among_names(store: StoreBuilder, connect: Connect) -> None:
    store.commit(3, [state()])
    with pytest.raises(groupio.InvalidInput, match="not among"):
        connect().load(3, names=["raw"], into={"own": np.zeros(70_000, np.float32)})
    with pytest.raises(groupio.InvalidInput, match="mapping"):
        connect().load(3, into=[bytearray(3)])  # type: ignore[arg-type]


def test_absent_things_are_not_found(
    store: StoreBuilder, connect: Connect, agent: FakeAgent, background: Background
) -> None:
    client = connect()
    answer_settles(agent, background, None, None)
    with pytest.raises(groupio.NotFound, match="nothing is committed"):
        client.load()
    store.abort(1)
    with pytest.raises(groupio.NotFound, match="nothing is committed"):
        client.load()
    store.commit(4, [{"a": 1}])
    with pytest.raises(groupio.NotFound, match=r"no epoch 5.*committed are 4") as caught:
        client.load(5)
    assert caught.value.epoch == 5
    with pytest.raises(groupio.NotFound, match="no member 3"):
        client.load(4, member=3)
    for epoch in (8, 9, 10, 11, 12, 13, 14, 15, 16):
        store.commit(epoch, [{"a": 1}])
    with pytest.raises(groupio.NotFound, match="10 epochs are committed, the newest are 9, 10"):
        client.load(5)


def test_a_store_that_is_not_there_yet_has_no_epochs(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    assert client.epochs() == []
    for _ in range(2):
        with pytest.raises(groupio.NotFound, match="no store"):
            client.load()
        assert not (tmp_path / "store").exists()
    (tmp_path / "store").mkdir()
    assert client.epochs() == []
    with pytest.raises(groupio.NotFound, match="not a groupio store"):
        client.load(1)


def test_latest_waits_for_what_earlier_runs_staged(
    store: StoreBuilder, connect: Connect, agent: FakeAgent, background: Background
) -> None:
    store.commit(1, [{"a": 1}])
    client = connect()
    peer = agent.peer()
    loading = background.submit(client.load)
    asked = peer.take(msg.Settle)
    assert not loading.done()
    store.abort(2, attempt=1)
    store.commit(2, [{"a": 2}], attempt=2)
    store.abort(3)
    peer.send(msg.Settled(asked.request_id))
    assert loading.result(20) == {"a": 2}
    assert client.load(1) == {"a": 1}


def test_latest_says_so_when_staged_epochs_stay_undecided(
    store: StoreBuilder, connect: Connect, agent: FakeAgent
) -> None:
    store.commit(1, [{"a": 1}])
    client = connect()
    with pytest.raises(groupio.WaitTimeout, match="not decided"):
        client.load(deadline_s=0.05)


def test_latest_is_read_without_an_agent_and_when_the_agent_cannot_settle(
    store: StoreBuilder,
    connect: Connect,
    agent: FakeAgent,
    background: Background,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.commit(1, [{"a": 1}])
    agent.unavailable = groupio.AgentLost("it cannot start")
    client = connect()
    assert client.load() == {"a": 1}
    assert "it cannot start" in caplog.text
    agent.unavailable = None
    error = {"kind": "StorageError", "message": "read-only", "outcome": "unknown", "retry": "none"}
    answer_settles(agent, background, error)
    assert client.load() == {"a": 1}
    assert "read-only" in caplog.text


def test_an_agent_that_dies_while_asked_is_asked_anew(
    store: StoreBuilder, connect: Connect, agent: FakeAgent, background: Background
) -> None:
    store.commit(1, [{"a": 1}])
    client = connect()
    peer = agent.peer()
    loading = background.submit(client.load)
    peer.take(msg.Settle)
    peer.die()
    answer_settles(agent, background, None)
    assert loading.result(20) == {"a": 1}


def test_epochs_are_listed_ascending_with_metadata_and_damage_apart(
    store: StoreBuilder, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    store.commit(20, [{"a": np.arange(10)}] * 2, metadata={"loss": 0.5})
    store.commit(3, [{"a": 1}])
    store.abort(7)
    bad = store.commit(5, [{"a": 1}])
    flip(store.record_path(bad), 80)
    (store.path / "epochs" / "readme").write_text("not ours")
    client = connect()
    listed = client.epochs()
    assert [info.epoch for info in listed] == [3, 20]
    assert (listed[1].members, listed[1].metadata) == (2, {"loss": 0.5})
    assert (listed[1].bytes_logical, listed[1].bytes_unique) == (160, 80)
    assert listed[1].committed_at == 1.7e9 + 20
    assert [name for name, _ in client.damaged_epochs] == [str(bad)]
    assert "epoch 5" in caplog.text


def test_a_rewind_hides_later_epochs_until_the_new_line_grows(
    store: StoreBuilder, connect: Connect, agent: FakeAgent, background: Background
) -> None:
    for epoch in (1, 2, 3):
        store.commit(epoch, [{"a": epoch}])
    client = connect(rewind_to=2)
    peer = agent.peer()
    assert peer.hello.rewind_to == 2
    background.submit(
        lambda: [peer.send(msg.Settled(peer.take(msg.Settle).request_id)) for _ in range(2)]
    )
    assert client.load() == {"a": 2}
    store.rewind(2, 1, 2)
    assert client.load() == {"a": 2}
    assert [info.abandoned for info in client.epochs()] == [False, False, True]
    saved = background.submit(client.save, {"a": 33}, epoch=3)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    store.commit(3, [{"a": 33}], lineage=2)
    peer.reach(opened, "staged", "durable")
    saved.result(20).wait(timeout_s=20)
    loading = background.submit(client.load)
    peer.send(msg.Settled(peer.take(msg.Settle).request_id))
    assert loading.result(20) == {"a": 33}
    assert client.load(3) == {"a": 33}
    listed = [(info.epoch, info.lineage, info.abandoned) for info in client.epochs()]
    assert listed == [(1, 1, False), (2, 1, False), (3, 1, True), (3, 2, False)]
    peer.die()
    # The first call may still find the dead connection, and says AgentLost on its handle.
    background.submit(lambda: [client.save({"a": 1}, epoch=4) for _ in range(2)])
    assert agent.peer().hello.rewind_to is None


def test_loads_saves_and_close_in_a_callback_do_not_wait_for_its_thread(
    store: StoreBuilder, connect: Connect, agent: FakeAgent, background: Background
) -> None:
    store.commit(1, [{"a": 1}])
    client = connect(settings={"close_timeout_s": 20})
    peer = agent.peer()
    saved = background.submit(client.save, {"a": 1}, epoch=2)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    outcome: Future[list[Any]] = Future()

    def inside(handle: groupio.SaveHandle) -> None:
        found: list[Any] = [client.load(1), client.load(), [e.epoch for e in client.epochs()]]
        found.append(client.save({"b": b"xyz"}, epoch=3, wait_for="durable"))
        try:
            found[-1].wait()
        except groupio.InvalidInput as error:
            found.append(error)
        client.close()
        outcome.set_result(found)

    saved.result(20).add_done_callback("staged", inside)
    answer_settles(agent, background, None)
    peer.reach(opened, "staged", "durable")
    loaded, latest, epochs, queued, refused = outcome.result(20)
    assert (loaded, latest, epochs) == ({"a": 1}, {"a": 1}, [1])
    assert "in another thread" in str(refused)
    assert queued.times.released is not None
    assert any("signal handler" in note for note in queued.times.notes)
    opened = peer.take(msg.OpenSave)
    assert opened.epoch == 3
    assert peer.receive(opened) == {"b": b"xyz"}
    peer.reach(opened, "staged", "durable")
    assert queued.wait(timeout_s=20).durable
    peer.take(msg.Bye)
    with pytest.raises(groupio.InvalidInput, match="closed"):
        client.save({"a": 1}, epoch=4)


def test_a_reader_works_without_a_client(store: StoreBuilder) -> None:
    store.commit(1, [{"a": 1}])
    key = store.commit(2, [{"a": 2}, {"b": np.arange(3)}])
    with StoreReader.open(f"file://{store.path}") as reader:
        assert reader.keys()[-1] == key
        manifest = reader.resolve()
        assert manifest.header.epoch == 2
        assert reader.read_items(manifest, 1)["b"].tolist() == [0, 1, 2]
        assert reader.resolve(rewind_to=1).header.epoch == 1
        assert reader.resolve(1) is reader.resolve(1)
        with pytest.raises(groupio.NotFound, match="up to 0"):
            reader.resolve(rewind_to=0)
    with pytest.raises(groupio.InvalidInput, match="s3://"):
        StoreReader.open("s3://bucket")


def test_a_store_that_is_a_file_is_refused_at_once(agent: FakeAgent, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(groupio.StorageError) as caught:
            groupio.connect(path)
        assert caught.value.errno == errno.ENOTDIR
    assert agent.starts == 0


def test_the_store_may_be_closed_while_it_is_replaced(
    store: StoreBuilder, connect: Connect, tmp_path: Path
) -> None:
    store.commit(1, [{"a": 1}])
    client = connect()
    assert client.load(1) == {"a": 1}
    other = StoreBuilder(tmp_path / "other")
    other.commit(1, [{"a": "other"}])
    other.close()
    (tmp_path / "store").rename(tmp_path / "old")
    (tmp_path / "other").rename(tmp_path / "store")
    with pytest.raises(groupio.StorageError, match="leads to another store now"):
        client.load(1)
    assert connect().load(1) == {"a": "other"}
    assert PosixBackend.open(tmp_path / "old", create=False).list("epochs")
