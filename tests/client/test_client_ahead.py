"""What a client does in the background ahead of its first save."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_agent import PAUSE_S, Background, FakeAgent

import groupio
from groupio.agent import spawn
from groupio.client.ahead import connect_ahead, expect_save
from groupio.client.client import unconnected
from groupio.errors import AgentLost
from groupio.protocol import messages as msg


@pytest.fixture
def ahead(agent: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("GROUPIO_CLOSE_TIMEOUT_S", "0.2")
    yield tmp_path / "store"
    wait_for_threads()


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "groupio-ahead":
            thread.join(PAUSE_S)
            assert not thread.is_alive()


def test_connecting_ahead_waits_for_no_agent_and_a_save_waits_for_it(
    agent: FakeAgent, ahead: Path, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def slow(settings: object, timeout_s: float) -> Path:
        assert started.wait(PAUSE_S)
        return agent.ensure(settings)

    monkeypatch.setattr(spawn, "ensure_agent", slow)
    with connect_ahead(unconnected(ahead, rank=1, world_size=2)) as client:
        assert client._connections == []
        saved = background.submit(client.save, {"a": 1}, epoch=1)
        started.set()
        peer = agent.peer()
        assert (peer.hello.rank, peer.hello.world_size) == (1, 2)
        peer.receive(peer.take(msg.OpenSave))
        assert saved.result(PAUSE_S).error is None
        assert agent.starts == 1
    assert not ahead.exists()


def test_an_expected_save_is_told_before_the_client_leaves(agent: FakeAgent, ahead: Path) -> None:
    client = connect_ahead(unconnected(ahead, rank=0, world_size=1))
    peer = agent.peer()
    expect_save(client, 5 << 20)
    wait_for_threads()
    client.close()
    assert peer.take(msg.Expect) == msg.Expect(5 << 20)
    assert peer.take(msg.Bye) == msg.Bye()
    expect_save(client, 5 << 20)  # too late: nothing is said, nothing is raised
    wait_for_threads()
    assert client._connections == []


def test_without_an_agent_nothing_is_raised_ahead(agent: FakeAgent, ahead: Path) -> None:
    agent.unavailable = AgentLost("there is none")
    with connect_ahead(unconnected(ahead, rank=0, world_size=1)) as client:
        expect_save(client, 1)
        wait_for_threads()
        agent.unavailable = None
        expect_save(client, 1)
        assert agent.peer().take(msg.Expect).total_bytes == 1


def test_wrong_arguments_are_said_at_once(ahead: Path) -> None:
    with pytest.raises(groupio.InvalidInput, match="rank=2"):
        connect_ahead(unconnected(ahead, rank=2, world_size=2))
