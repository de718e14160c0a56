"""What stands on a handle, and what a call refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from fake_agent import Background, FakeAgent

import groupio
from groupio.model import Level
from groupio.protocol import messages as msg

Connect = Callable[..., groupio.Client]
ARRAY = np.arange(3 << 20, dtype=np.uint8)


def test_a_skipped_save_is_no_error_but_reaches_nothing(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(
        client.save, {"w": ARRAY}, epoch=1, when_full="skip", wait_for="staged"
    )
    opened = peer.take(msg.OpenSave)
    assert opened.when_full == "skip"
    peer.fail(opened, groupio.StagingFull("no room", needed=9, budget=1, skipped=True))
    handle = saved.result(20)
    assert handle.error is None
    assert handle.skipped
    assert "skipped" in repr(handle)
    with pytest.raises(groupio.StagingFull):
        handle.wait()


def test_callbacks_come_once_for_levels_failures_and_what_is_over(
    agent: FakeAgent,
    connect: Connect,
    background: Background,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = connect()
    peer = agent.peer()
    calls: list[str] = []
    deadlock: Future[BaseException] = Future()

    def note(name: str) -> Callable[[groupio.SaveHandle], None]:
        return lambda handle: calls.append(name)

    def wait_inside(handle: groupio.SaveHandle) -> None:
        try:
            handle.wait()
        except groupio.InvalidInput as error:
            deadlock.set_result(error)
        raise RuntimeError("a mistake in a callback")

    saved = background.submit(client.save, {"w": ARRAY}, epoch=1)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    handle = saved.result(20)
    handle.add_done_callback("released", note("released"))
    assert calls == ["released"]
    handle.add_done_callback("staged", wait_inside)
    handle.add_done_callback("replicated", note("replicated"))
    handle.add_done_callback("durable", note("durable"))
    with caplog.at_level(logging.ERROR, "groupio.client"):
        peer.reach(opened, "staged")
        assert "callback" in str(deadlock.result(20))
        handle.wait("staged", timeout_s=20)
        peer.fail(opened, groupio.StorageFull("full", path="/s", needed=2, free=1))
        peer.take(msg.Released)
    assert calls == ["released", "replicated", "durable"]
    assert "a mistake in a callback" in caplog.text
    handle.add_done_callback(Level.STAGED, note("late"))
    assert calls[-1] == "late"
    assert isinstance(handle.error, groupio.StorageFull)


def test_replicas_on_one_node_are_unreachable_at_once(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect(settings={"replicas": 2})
    peer = agent.peer()
    handle = client.save({"w": ARRAY}, epoch=1, wait_for="replicated")
    assert isinstance(handle.error, groupio.LevelUnreachable)
    saved = background.submit(client.save, {"w": ARRAY}, epoch=1)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    with pytest.raises(groupio.LevelUnreachable):
        saved.result(20).wait("replicated")
    assert saved.result().error is None


def test_replicated_is_staged_when_one_replica_is_asked(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, {"w": ARRAY}, epoch=1, wait_for="replicated")
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    assert not saved.done()
    peer.reach(opened, "staged")
    assert saved.result(20).times.replicated is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"epoch": -1},
        {"epoch": True},
        {"epoch": 1.0},
        {"epoch": 1 << 63},
        {"epoch": 1, "deadline_s": 0},
        {"epoch": 1, "deadline_s": float("nan")},
        {"epoch": 1, "deadline_s": "10"},
        {"epoch": 1, "wait_for": "saved"},
        {"epoch": 1, "when_full": "drop"},
        {"epoch": 1, "replicated": [1]},
        {"epoch": 1, "replicated": 5},
        {"epoch": 1, "metadata": [("a", 1)]},
        {"epoch": 1, "metadata": {1: 2}},
        {"epoch": 1, "metadata": {"a": object()}},
        {"epoch": 1, "metadata": {"a": 1 << 70}},
        {"epoch": 1, "metadata": {"a": "x" * 70_000}},
        {"epoch": 1, "metadata": {"a": "\ud800"}},
        {"epoch": 1, "items": [1]},
        {"epoch": 1, "items": {1: 2}},
        {"epoch": 1, "items": {"": 2}},
        {"epoch": 1, "items": {"a" * 5000: 2}},
    ],
)
def test_wrong_arguments_raise_and_save_nothing(
    agent: FakeAgent, connect: Connect, arguments: dict[str, Any]
) -> None:
    client = connect()
    peer = agent.peer()
    with pytest.raises(groupio.InvalidInput):
        client.save(arguments.pop("items", {"w": ARRAY}), **arguments)
    client.close()
    peer.take(msg.Bye)


def test_a_handle_refuses_levels_and_times_that_there_are_not() -> None:
    handle = groupio.SaveHandle(3, 0.0)
    for call in (handle.wait, lambda level: handle.add_done_callback(level, print)):
        with pytest.raises(groupio.InvalidInput, match="no level 'saved'"):
            call("saved")
    with pytest.raises(groupio.InvalidInput, match="timeout_s"):
        handle.wait(timeout_s=-1)
    with pytest.raises(groupio.WaitTimeout):
        handle.wait(timeout_s=0)


def test_the_first_error_stays_and_a_late_commit_outweighs_it() -> None:
    handle = groupio.SaveHandle(3, 0.0)
    handle._fail(groupio.AgentLost("first"))
    handle._fail(groupio.GroupAborted("second"))
    handle._reach(Level.STAGED, 1.0)
    assert str(handle.error) == "first"
    assert handle.outcome == "not_committed"
    assert handle.times.staged is None
    assert "AgentLost" in repr(handle)
    handle._reach(Level.DURABLE, 2.0)
    handle._fail(groupio.GroupAborted("third"))
    assert handle.error is None
    assert handle.outcome == "committed"
    assert handle.wait("staged").durable == 2.0
