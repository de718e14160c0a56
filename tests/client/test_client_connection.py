"""Finding the agent, and what the client does when an agent misbehaves."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_agent import Background, FakeAgent

import groupio
from groupio import wire
from groupio.agent import spawn
from groupio.client import arena as client_arena
from groupio.client import connection
from groupio.client.arena import ClientArena
from groupio.client.connection import INTRODUCTIONS, Connection
from groupio.exhaustion import start_some
from groupio.model import DecisionKey
from groupio.plan.layout import waves
from groupio.protocol import messages as msg
from open_files import open_files

Connect = Callable[..., groupio.Client]
VALUE = np.arange(1 << 16)


@pytest.fixture
def arena() -> Iterator[ClientArena]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 64 << 20)
    made = ClientArena(fd)
    yield made
    made.close()


def connection_of(client: groupio.Client) -> Connection:
    return client._connections[0]


def becomes(holds: Callable[[], bool]) -> bool:
    """Whether it holds within 20 s."""
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return holds()


def refuses(client: groupio.Client) -> groupio.AgentLost:
    """The error of a save that finds no agent."""
    error = client.save({"a": 1}, epoch=1).error
    assert isinstance(error, groupio.AgentLost)
    return error


def test_an_agent_that_ended_just_now_is_looked_for_again(
    agent: FakeAgent, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "gone.sock", agent.path]
    monkeypatch.setattr(spawn, "ensure_agent", lambda settings, timeout_s: paths.pop(0))
    connect()
    assert agent.peer().hello.rank == 0


def test_nobody_listening_is_agent_lost_after_the_connect_timeout(
    agent: FakeAgent, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "ensure_agent", lambda settings, timeout_s: tmp_path / "gone.sock")
    error = refuses(connect(settings={"connect_timeout_s": 0.05}))
    assert "does not take connections" in str(error)
    assert error.log == str(spawn.agent_paths(groupio.Settings(runtime_dir=str(tmp_path))).log)


def test_a_runtime_directory_that_cannot_be_trusted_still_lets_read(
    agent: FakeAgent, connect: Connect
) -> None:
    agent.unavailable = groupio.InvalidInput("the runtime directory belongs to user 5")
    assert "user 5" in str(refuses(connect()))


@pytest.mark.parametrize("answer", [None, msg.Settled(1), "close"])
def test_an_agent_that_does_not_welcome(
    agent: FakeAgent,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    background: Background,
    answer: Any,
) -> None:
    path = tmp_path / "other.sock"
    listener = wire.listen(path)
    listener.setblocking(True)
    monkeypatch.setattr(spawn, "ensure_agent", lambda settings, timeout_s: path)
    channels = []

    def serve() -> None:
        while True:
            sock, _ = listener.accept()
            channels.append(wire.Channel(sock, msg.ToAgent))
            channels[-1].recv(5)
            if answer == "close":
                channels[-1].close()
            elif answer is not None:
                channels[-1].send(answer)

    background.submit(serve)
    error = refuses(connect(settings={"connect_timeout_s": 0.2}))
    assert "answer" in str(error)
    listener.close()
    for channel in channels:
        channel.close()


def test_a_grant_beyond_the_arena_never_touches_memory(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, {"w": VALUE}, epoch=1)
    opened = peer.take(msg.OpenSave)
    wave = waves(peer.layout(opened), 1 << 40)[0]
    peer.arena = os.memfd_create("short", os.MFD_CLOEXEC)
    peer.send(msg.Arena(), [peer.arena])
    peer.send(
        msg.Grant(
            save_id=opened.save_id,
            key=DecisionKey(1, 1, 1),
            wave=0,
            waves=1,
            offset=0,
            virt_lo=0,
            virt_hi=wave.virt_hi,
            chunk_lo=0,
            chunk_hi=wave.chunk_hi,
        )
    )
    assert isinstance(saved.result(20).error, groupio.AgentLost)
    assert peer.take(msg.SaveFailed).save_id == opened.save_id


@pytest.mark.parametrize("fds", [0, 2])
def test_an_arena_without_its_descriptor_ends_the_connection(
    agent: FakeAgent, connect: Connect, background: Background, fds: int
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, {"w": VALUE}, epoch=1)
    peer.take(msg.OpenSave)
    peer.arena = os.memfd_create("test", os.MFD_CLOEXEC)
    peer.send(msg.Arena(), [peer.arena] * fds)
    assert "descriptors" in str(saved.result(20).error)


def test_messages_for_saves_that_are_gone_are_answered_or_ignored(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, {"w": VALUE}, epoch=1)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    peer.reach(opened, "staged", "durable", "durable", "staged")
    saved.result(20).wait(timeout_s=20)
    peer.fail(opened, groupio.GroupAborted("late"))
    assert peer.take(msg.Released).save_id == opened.save_id
    peer.grant(opened, waves(peer.layout(opened), 1 << 40)[0])
    assert peer.take(msg.Released).save_id == opened.save_id
    peer.send(msg.Settled(12345))
    peer.send(msg.Answer(1, {}))
    assert saved.result().error is None
    assert client._connections[0].is_usable


def test_a_new_arena_replaces_the_old_one(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    for epoch in (1, 2):
        saved = background.submit(client.save, {"w": VALUE + epoch}, epoch=epoch)
        opened = peer.take(msg.OpenSave)
        assert peer.receive(opened)["w"] == (VALUE + epoch).tobytes()
        assert saved.result(20).error is None
        os.close(peer.arena)
        peer.arena = -1


def test_leases_are_reused_and_few_are_kept(arena: ClientArena) -> None:
    first, address = arena.address(0, 8 << 20)
    inner, inner_address = arena.address(1 << 20, 1 << 20)
    assert inner is first
    assert inner_address == address + (1 << 20)
    larger, _ = arena.address(0, 16 << 20)
    assert list(arena._leases.values()) == [larger]
    for number in range(20):
        arena.address((20 + number) << 20, 1 << 20)
    assert len(arena._leases) == client_arena._MAPS_MAX
    # A lease in use stays mapped although it was forgotten.
    arena.close()
    first.mapped[0:3] = b"abc"
    with pytest.raises(groupio.AgentLost):
        arena.address(0, 4096)
    arena.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOMEM, groupio.StagingFull), (errno.EPERM, OSError)]
)
def test_no_memory_for_a_lease_is_staging_full(
    arena: ClientArena, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(*args: Any) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(client_arena, "prefault", refuse)
    with pytest.raises(kind):
        arena.address(0, 4096)
    with pytest.raises(kind):
        arena.prepare(0, 4096)


def test_an_agent_that_reads_nothing_is_lost(
    agent: FakeAgent, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    peer = agent.peer()
    monkeypatch.setattr(peer.channel, "_read", lambda: time.sleep(60) or [])
    peer.send(msg.Standby(0, 4096))
    connection = client._connections[0]
    # Larger than any socket's buffer.
    with pytest.raises(groupio.AgentLost, match="cannot be reached"):
        connection.send(msg.Damaged((bytes(64 << 20),)), timeout_s=0.2)
    assert not connection.is_usable
    with pytest.raises(groupio.AgentLost):
        connection.settle(1, 1.0)


def test_memory_that_is_offered_while_the_client_leaves_keeps_no_thread(
    agent: FakeAgent, connect: Connect, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    peer = agent.peer()
    mappers: list[threading.Thread] = []
    reached, left = threading.Event(), threading.Event()

    def start_late(threads: Sequence[threading.Thread]) -> int:
        mappers.extend(threads)
        reached.set()
        assert left.wait(20)
        return start_some(threads)

    monkeypatch.setattr(connection, "start_some", start_late)
    peer.arena = os.memfd_create("test-arena", os.MFD_CLOEXEC)
    peer.send(msg.Arena(), [peer.arena])
    peer.send(msg.Standby(0, 1 << 16))
    assert reached.wait(20)
    listener = client._connections[0]._thread
    closed = background.submit(client.close)
    assert peer.take(msg.Bye)
    assert peer.take(type(None)) is None
    left.set()
    closed.result(20)
    for thread in (listener, *mappers):
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("frames", [1, 3])
def test_descriptors_that_arrive_while_the_client_leaves_are_closed(
    agent: FakeAgent, connect: Connect, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    real = wire.Channel._read_once
    clients: list[groupio.Client] = []

    def leave_before_taking(channel: wire.Channel) -> int:
        count = real(channel)
        if channel._incoming_fds and clients:  # the fake agent gets one with the Hello
            left = connection_of(clients[0])
            threading.Thread(target=clients[0].close).start()
            assert becomes(lambda: left._lost is not None)
        return count

    monkeypatch.setattr(wire.Channel, "_read_once", leave_before_taking)
    clients.append(connect())
    peer = agent.peer()
    listener = connection_of(clients[0])._thread
    peer.arena = os.memfd_create("left-arena", os.MFD_CLOEXEC)
    with contextlib.suppress(wire.ChannelClosed):  # it leaves at the first
        for _ in range(frames):
            peer.send(msg.Arena(), [peer.arena])
    listener.join(20)
    assert not listener.is_alive()
    assert list(open_files("left-arena")) == [peer.arena]


def test_descriptors_with_a_message_that_has_none_are_closed(
    agent: FakeAgent, connect: Connect
) -> None:
    client = connect()
    peer = agent.peer()
    peer.arena = os.memfd_create("stray-arena", os.MFD_CLOEXEC)
    peer.send(msg.Settled(7), [peer.arena])
    peer.send(msg.Arena(), [peer.arena])
    assert becomes(lambda: connection_of(client)._arena is not None)
    assert len(open_files("stray-arena")) == 2


def test_an_agent_that_ends_instead_of_an_answer_is_looked_for_again(
    agent: FakeAgent, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    agent.ends = INTRODUCTIONS - 1
    connect().close()
    assert (agent.starts, caplog.text) == (INTRODUCTIONS, "")
    agent.ends = INTRODUCTIONS + 1
    connect()
    assert "can be read only: the agent of this node does not answer" in caplog.text
    assert agent.ends == 1
