"""Saving, against an agent that the test plays."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_agent import Background, FakeAgent, bytes_of

import groupio
from groupio.client import saving
from groupio.format.codec import decode_plain
from groupio.format.items import decode_items
from groupio.model import CHUNK_BYTES
from groupio.plan.layout import Wave, waves
from groupio.protocol import messages as msg

Connect = Callable[..., groupio.Client]
ARRAY = np.arange(3 << 20, dtype=np.uint8)


def whole(peer: Any, opened: msg.OpenSave) -> Wave:
    return waves(peer.layout(opened), 1 << 40)[0]


def test_a_save_brings_every_item_to_the_arena_and_tells_each_level(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(rank=2, world_size=4, job="llm")
    peer = agent.peer()
    assert (peer.hello.rank, peer.hello.world_size, peer.hello.job) == (2, 4, "llm")
    items = {"w": ARRAY, "t": ARRAY[::3], "step": 7, "raw": b"xyz", "tied": ARRAY}
    saved = background.submit(
        client.save, items, epoch=7, replicated=["w*", "b"], metadata={"loss": 0.5}
    )
    opened = peer.take(msg.OpenSave)
    assert (opened.epoch, opened.replicated, opened.metadata) == (7, ("b", "w*"), {"loss": 0.5})
    specs = {spec.name: spec for spec in decode_items(opened.items)}
    assert specs["w"].replicated
    assert not specs["t"].replicated
    got = peer.receive(opened)
    handle = saved.result(20)
    assert got["w"] == bytes_of(ARRAY)
    assert got["t"] == bytes_of(ARRAY[::3])
    assert decode_plain(got["step"]) == 7
    assert got["raw"] == b"xyz"
    assert opened.bytes_logical == sum(spec.nbytes for spec in specs.values())
    assert handle.times.released is not None
    assert handle.times.staged is None
    assert handle.outcome == "unknown"
    peer.reach(opened, "staged", "remote", "durable")
    times = handle.wait(timeout_s=20)
    assert (times.staged, times.remote, times.durable) == pytest.approx((1, 2, 3))
    assert (times.first_arrival, times.last_arrival) == pytest.approx((-0.25, 0.5))
    assert times.replicated is None
    assert times.notes == ("staged", "remote", "durable")
    assert handle.outcome == "committed"
    assert "durable" in repr(handle)


def test_a_state_larger_than_the_window_goes_through_in_waves(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    random = np.random.default_rng(0)
    big = random.standard_normal((1500, 1999))
    items = {
        "flat": big,
        "turned": big.T,
        "odd": np.frombuffer(big.tobytes()[: 12 * 700_001], "<U3")[::-1],
        "small": np.arange(9),
    }
    saved = background.submit(client.save, items, epoch=1)
    opened = peer.take(msg.OpenSave)
    got = peer.receive(opened, window=2 * CHUNK_BYTES)
    assert saved.result(20).error is None
    assert {name: got[name] == bytes_of(items[name]) for name in items} == dict.fromkeys(
        items, True
    )


def test_a_lease_that_is_granted_again_is_reused_and_standby_maps_ahead(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    for epoch in range(1, 4):
        value = ARRAY + np.uint8(epoch)
        saved = background.submit(client.save, {"w": value}, epoch=epoch)
        opened = peer.take(msg.OpenSave)
        assert peer.receive(opened)["w"] == bytes_of(value)
        assert saved.result(20).times.released
        peer.send(msg.Standby(0, 2 << 20))
        peer.send(msg.Standby(1 << 40, 4096))  # not there: only an advance, so no harm
        assert peer.take(msg.Mapped) == msg.Mapped(0, 2 << 20)
    assert len(client._connections[0]._arena._leases) == 1


def test_two_epochs_in_flight_and_two_threads(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    saves = {e: background.submit(client.save, {"w": ARRAY + np.uint8(e)}, epoch=e) for e in (1, 2)}
    opened = {o.epoch: o for o in (peer.take(msg.OpenSave), peer.take(msg.OpenSave))}
    wave = whole(peer, opened[1])
    size = wave.virt_hi - wave.virt_lo
    peer.grant(opened[2], wave, offset=size)
    assert peer.take(msg.Copied).save_id == opened[2].save_id
    peer.grant(opened[1], wave)
    assert peer.take(msg.Copied).save_id == opened[1].save_id
    assert b"".join(peer.chunks(opened[1], wave)) == bytes_of(ARRAY + np.uint8(1))
    assert b"".join(peer.chunks(opened[2], wave, size)) == bytes_of(ARRAY + np.uint8(2))
    handles = {epoch: saved.result(20) for epoch, saved in saves.items()}
    peer.reach(opened[1], "staged", "durable")
    handles[1].wait(timeout_s=20)
    assert handles[2].times.staged is None
    with pytest.raises(groupio.WaitTimeout) as caught:
        handles[2].wait("staged", timeout_s=0.01)
    assert caught.value.epoch == 2
    assert handles[2].error is None


def test_a_failure_before_the_grant_stands_on_the_handle(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(rank=0, world_size=2)
    peer = agent.peer()
    saved = background.submit(client.save, {"w": ARRAY}, epoch=1, wait_for="durable")
    opened = peer.take(msg.OpenSave)
    peer.fail(opened, groupio.GroupTimeout("rank 1 did not come", missing=[1], epoch=1))
    handle = saved.result(20)
    assert isinstance(handle.error, groupio.GroupTimeout)
    assert handle.error.missing == (1,)
    assert handle.outcome == "not_committed"
    assert handle.times.released is None
    assert peer.take(msg.Released).save_id == opened.save_id
    with pytest.raises(groupio.GroupTimeout):
        handle.wait("staged")


def test_a_failure_during_the_copy_is_answered_only_after_the_last_write(
    agent: FakeAgent,
    connect: Connect,
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = connect()
    peer = agent.peer()
    copying, go_on = threading.Event(), threading.Event()
    original = saving.copy_range

    def slow(*args: Any) -> bool:
        copying.set()
        assert go_on.wait(20)
        return original(*args)

    monkeypatch.setattr(saving, "copy_range", slow)
    saved = background.submit(client.save, {"w": ARRAY}, epoch=1)
    opened = peer.take(msg.OpenSave)
    peer.grant(opened, whole(peer, opened))
    assert copying.wait(20)
    peer.fail(opened, groupio.GroupAborted("rank 1 died", members=[1]))
    with pytest.raises(queue.Empty):
        peer.take(msg.Released, timeout_s=0.2)
    go_on.set()
    assert peer.take(msg.Released).save_id == opened.save_id
    assert isinstance(saved.result(20).error, groupio.GroupAborted)
    assert peer.chunks(opened, whole(peer, opened)) == [bytes(len(ARRAY))]


def test_an_error_of_the_copy_is_told_to_the_group(
    agent: FakeAgent,
    connect: Connect,
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = connect(rank=1, world_size=2)
    peer = agent.peer()

    def broken(*args: Any) -> bool:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(saving, "copy_range", broken)
    saved = background.submit(client.save, {"w": ARRAY}, epoch=3)
    opened = peer.take(msg.OpenSave)
    peer.grant(opened, whole(peer, opened))
    failed = peer.take(msg.SaveFailed)
    assert failed.error["kind"] == "GroupAborted"
    handle = saved.result(20)
    assert handle.error.members == (1,)
    assert "device-side assert" in str(handle.error)
    assert handle.outcome == "unknown"
    peer.fail(opened, groupio.GroupAborted("aborted", members=[1]))
    peer.take(msg.Released)
    assert handle.outcome == "not_committed"


def test_the_death_of_the_agent_ends_every_wait_and_the_next_call_starts_another(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    first = background.submit(client.save, {"w": ARRAY}, epoch=1)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    handle = first.result(20)
    waiting = background.submit(handle.wait)
    ungranted = background.submit(client.save, {"w": ARRAY}, epoch=2)
    peer.take(msg.OpenSave)
    peer.die()
    with pytest.raises(groupio.AgentLost) as caught:
        waiting.result(20)
    assert caught.value.log == agent.log
    assert agent.log in str(caught.value)
    assert handle.outcome == "unknown"
    assert isinstance(ungranted.result(20).error, groupio.AgentLost)

    again = background.submit(client.save, {"w": ARRAY}, epoch=3)
    peer = agent.peer()
    opened = peer.take(msg.OpenSave)
    assert peer.receive(opened)["w"] == bytes_of(ARRAY)
    assert again.result(20).error is None
    assert agent.starts == 2


def test_a_durable_save_survives_the_death_of_the_agent(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, {"w": ARRAY}, epoch=1)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    peer.reach(opened, "staged", "durable")
    saved.result(20).wait(timeout_s=20)
    peer.die()
    assert saved.result().wait() == saved.result().times
    assert saved.result().error is None


def test_a_draining_agent_is_left_for_its_successor(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    old = agent.peer()
    first = background.submit(client.save, {"w": ARRAY}, epoch=1)
    opened = old.take(msg.OpenSave)
    old.receive(opened)
    second = background.submit(client.save, {"w": ARRAY}, epoch=2)
    old.fail(old.take(msg.OpenSave), groupio.AgentLost("draining", outcome="not_committed"))
    assert second.result(20).error.outcome == "not_committed"
    third = background.submit(client.save, {"w": ARRAY}, epoch=2)
    new = agent.peer()
    reopened = new.take(msg.OpenSave)
    new.receive(reopened)
    assert third.result(20).error is None
    old.reach(opened, "staged", "durable")
    assert first.result(20).wait(timeout_s=20).durable


def test_an_agent_that_hangs_costs_no_more_than_the_deadline_and_a_margin(
    agent: FakeAgent, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "ANSWER_MARGIN_S", 0.1)
    client = connect()
    peer = agent.peer()
    handle = client.save({"w": ARRAY}, epoch=1, deadline_s=0.05)
    assert isinstance(handle.error, groupio.AgentLost)
    assert handle.error.log == agent.log
    assert handle.outcome == "unknown"
    peer.take(msg.OpenSave)
    assert peer.take(msg.SaveFailed).error["kind"] == "AgentLost"


def test_without_an_agent_a_save_fails_on_its_handle(agent: FakeAgent, connect: Connect) -> None:
    agent.unavailable = groupio.AgentLost("it does not start", log="/var/log/agent")
    client = connect()
    assert "without an agent" in repr(client)
    handle = client.save({"w": ARRAY}, epoch=1, wait_for="durable")
    assert isinstance(handle.error, groupio.AgentLost)
    assert handle.outcome == "not_committed"
    agent.unavailable = None
    assert client._connected() is client._connections[-1]


def test_a_refused_client_is_told_why(agent: FakeAgent, connect: Connect) -> None:
    agent.refusal = groupio.InvalidInput("the world sizes 2 and 3 differ")
    with pytest.raises(groupio.InvalidInput, match="2 and 3"):
        connect()
    agent.refusal = groupio.StorageError("read-only", path="/s", errno=30)
    handle = connect().save({"w": ARRAY}, epoch=1)
    assert isinstance(handle.error, groupio.StorageError)


def test_an_item_that_cannot_be_stored_raises_and_frees_the_other_members(
    agent: FakeAgent, connect: Connect
) -> None:
    client = connect(rank=1, world_size=2)
    peer = agent.peer()
    with pytest.raises(groupio.InvalidInput, match=r"'opt'\['hook'\]"):
        client.save({"opt": {"hook": object()}}, epoch=4)
    opened = peer.take(msg.OpenSave)
    assert (opened.epoch, opened.total_bytes) == (4, 0)
    failed = peer.take(msg.SaveFailed)
    assert (failed.save_id, failed.error["kind"]) == (opened.save_id, "InvalidInput")
    peer.fail(opened, groupio.GroupAborted("rank 1 failed", members=[1]))
    assert peer.take(msg.Released).save_id == opened.save_id


def test_close_waits_bounded_says_goodbye_and_is_final(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(settings={"close_timeout_s": 20.0})
    peer = agent.peer()
    saved = background.submit(client.save, {"w": ARRAY}, epoch=1)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    saved.result(20)
    closing = background.submit(client.close)
    time.sleep(0.05)
    assert not closing.done()
    peer.reach(opened, "staged", "durable")
    closing.result(20)
    peer.take(msg.Bye)
    client.close()
    assert "closed" in repr(client)
    for call in (lambda: client.save({}, epoch=2), client.load, client.epochs):
        with pytest.raises(groupio.InvalidInput, match="closed"):
            call()


def test_close_leaves_what_is_not_decided_in_time(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(settings={"close_timeout_s": 0.05})
    peer = agent.peer()
    saved = background.submit(client.save, {"w": ARRAY}, epoch=1)
    peer.receive(peer.take(msg.OpenSave))
    client.close()
    peer.take(msg.Bye)
    assert isinstance(saved.result(20).error, groupio.WaitTimeout)
    assert saved.result().outcome == "unknown"


def test_an_interrupt_ends_the_save_and_tells_the_agent(
    agent: FakeAgent, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    peer = agent.peer()

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saving.Save, "_next_grant", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.save({"w": ARRAY}, epoch=1)
    peer.take(msg.OpenSave)
    assert "interrupted" in peer.take(msg.SaveFailed).error["message"]


def test_many_small_tensors_are_one_message(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    items = {f"layer.{i}": np.full(16, i, np.int32) for i in range(20_000)}
    saved = background.submit(client.save, items, epoch=1)
    opened = peer.take(msg.OpenSave)
    got = peer.receive(opened)
    assert saved.result(20).error is None
    assert all(got[name] == bytes_of(value) for name, value in items.items())
