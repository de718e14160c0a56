"""Frames over a socket: whole messages, the right descriptors, limits, and deadlines."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupio import wire
from groupio.wire import Channel, ChannelClosed
from open_files import open_files


class Text(msgspec.Struct, frozen=True, tag=True):
    body: str


class Blob(msgspec.Struct, frozen=True, tag=True):
    data: bytes


Either = Text | Blob


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = (Channel(sock, Either) for sock in socket.socketpair())
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    sock, other = socket.socketpair()
    channel = Channel(other, Either)
    yield sock, channel
    sock.close()
    channel.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    sent = [Text("x"), Blob(os.urandom(3 << 20)), Text(""), Blob(b"")]
    sender = threading.Thread(target=lambda: [a.send(message) for message in sent])
    sender.start()
    assert [b.recv(10).message for _ in sent] == sent
    sender.join()


@given(st.lists(st.binary(max_size=300), max_size=5), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_frames_may_be_cut_anywhere(bodies: list[bytes], data: st.DataObject) -> None:
    sock, other = socket.socketpair()
    channel = Channel(other, Either)
    stream = b"".join(channel.encode(Blob(body)) for body in bodies)
    received: list[Any] = []
    with sock, contextlib.closing(channel):
        while stream:
            n = data.draw(st.integers(1, len(stream)))
            sock.sendall(stream[:n])
            stream = stream[n:]
            received += [r.message for r in channel.feed()]
        assert received == [Blob(body) for body in bodies]
        assert channel.feed() == []


def test_descriptors_come_with_their_message(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    made = [os.memfd_create(f"m{i}", os.MFD_CLOEXEC) for i in range(3)]
    for number, fd in enumerate(made):
        os.write(fd, b"%d" % number)
    a.send(Text("none"))
    a.send(Text("one"), [made[0]])
    a.send(Blob(bytes(1 << 16)))
    a.send(Text("two"), made[1:])
    for fd in made:
        os.close(fd)
    got = [b.recv(10) for _ in range(4)]
    assert [len(r.fds) for r in got] == [0, 1, 0, 2]
    contents = [os.pread(fd, 9, 0) for r in got for fd in r.fds]
    assert contents == [b"0", b"1", b"2"]
    assert not any(os.get_inheritable(fd) for r in got for fd in r.fds)
    for fd in (fd for r in got for fd in r.fds):
        os.close(fd)


def test_no_descriptor_leaks_when_nobody_takes_it() -> None:
    ends = socket.socketpair()
    sockets = [os.readlink(f"/proc/self/fd/{sock.fileno()}") for sock in ends]
    a, b = (Channel(sock, Either) for sock in ends)
    fd = os.memfd_create("m")
    a.send(Text("taken in, never read"), [fd])
    assert b._read()  # now in this process
    b._ready.extend([wire.Received(Text("x"), (os.dup(fd),))])
    a.send(Text("never taken in"), [fd])
    while a.enqueue(Blob(bytes(1 << 18)), [fd]):
        pass
    os.close(fd)
    a.close()
    b.close()
    # What _read gave is the caller's.
    (leaked,) = open_files("memfd:m ")
    os.close(leaked)
    assert not any(open_files(name) for name in sockets)


def test_last_words_count_though_the_peer_left_ours_unread(
    pair: tuple[Channel, Channel],
) -> None:
    a, b = pair
    b.send(Text("never read"))  # the kernel then says "reset", not "end"
    a.send(Text("last words"))
    a.close()
    assert b.feed() == [wire.Received(Text("last words"), ())]
    with pytest.raises(ChannelClosed):
        b.feed()


def test_the_last_messages_of_a_peer_that_ended_are_received(
    pair: tuple[Channel, Channel],
) -> None:
    a, b = pair
    a.send(Text("last words"))
    a.close()
    assert b.feed() == [wire.Received(Text("last words"), ())]
    with pytest.raises(ChannelClosed, match="closed the connection"):
        b.feed()
    with pytest.raises(ChannelClosed, match="closed the connection"):
        b.recv(10)


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (b"\x01\x00\x00\x00\xc1", "broken message"),
        (b"\x03\x00\x00\x00\x81\xa4ty", "broken message"),
        (b"\x00\x00\x00\x00", "broken message"),
        (b"\x01\x00\x00\x10\xc0", "descriptors that it did not send"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_given_up(
    raw: tuple[socket.socket, Channel], stream: bytes, complaint: str
) -> None:
    sock, channel = raw
    sock.sendall(stream)
    with pytest.raises(ChannelClosed, match=complaint):
        channel.recv(10)


def test_an_announced_length_takes_no_memory(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    sock.sendall(b"\xff\xff\xff\x0f" + b"x" * 1000)
    assert channel.feed() == []
    assert len(channel._incoming) == 1004
    sock.close()
    with pytest.raises(ChannelClosed):
        channel.feed()


def test_undeclared_descriptors_are_bounded(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    with open(os.devnull) as null:
        for _ in range(4):
            socket.send_fds(sock, [b"\x10"], [null.fileno()] * 5)
    with pytest.raises(ChannelClosed, match="more descriptors"):
        list(iter(channel.feed, None))


def test_waits_have_deadlines(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    with pytest.raises(TimeoutError, match="no message came"):
        b.recv(0.01)
    with pytest.raises(TimeoutError, match="did not read"):
        a.send(Blob(bytes(16 << 20)), timeout_s=0.05)
    a.close()
    with pytest.raises(ChannelClosed):
        a.recv(1)


def test_an_event_loop_never_waits_and_its_backlog_is_bounded() -> None:
    ours, theirs = socket.socketpair()
    a, b = Channel(ours, Either, backlog_bytes_max=8 << 20), Channel(theirs, Either)
    message = Blob(bytes(1 << 20))
    count = 0
    while a._outgoing_bytes < 7 << 20:
        a.enqueue(message)
        count += 1
    with pytest.raises(ChannelClosed, match="bytes unread"):
        a.enqueue(Blob(bytes(3 << 20)))
    assert not a.flush()
    received = []
    while len(received) < count:
        received += b.feed()
        a.flush()
    assert {r.message for r in received} == {message}
    assert a.enqueue(Text("there is room again"))
    b.close()
    with pytest.raises(ChannelClosed, match="sending failed"):
        a.send(Text("to nobody"))
    a.close()


def test_a_message_over_the_limit_is_refused_before_it_is_sent(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match=r"Blob message of \d+ bytes exceeds the limit of 1000"):
        a.send(Blob(bytes(1000)))
    with pytest.raises(ValueError, match="0 to 15 descriptors"):
        a.send(Text("x"), [0] * 16)
    a.send(Text("still usable"))
    assert b.recv(10).message == Text("still usable")


def test_a_forked_copy_can_be_dropped_without_ending_the_connection(
    pair: tuple[Channel, Channel],
) -> None:
    a, b = pair
    copy = Channel(socket.socket(fileno=os.dup(a.fileno())), Either)
    copy.abandon()
    a.send(Text("still here"))
    assert b.recv(10).message == Text("still here")


@pytest.mark.parametrize("long", [False, True])
def test_listener_is_private_and_path_length_does_not_matter(tmp_path: Path, long: bool) -> None:
    directory = tmp_path / ("d" * 120 if long else "d")
    directory.mkdir()
    path = directory / "agent.sock"
    listener = wire.listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    client = Channel(wire.connect(path, timeout_s=5), Either)
    server = Channel(listener.accept()[0], Either)
    assert server.peer() == (os.getpid(), os.getuid())
    client.send(Text("hello"))
    assert server.recv(5).message == Text("hello")
    with pytest.raises(OSError, match="in use"):
        wire.listen(path)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        wire.connect(path, timeout_s=5)
    client.close()
    server.close()
