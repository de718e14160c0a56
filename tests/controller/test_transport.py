"""Control messages over real sockets: sealed, in order, once, or lost on both sides."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq
from transport_tools import FAST, KEYS, STORE_KEYS, Pair, Proxy, refused, until

from groupio.controller.keys import Keys
from groupio.controller.sockets import (
    new_socket,
    show_client_key,
)
from groupio.controller.transport import ControlClient, ControlServer, Peer
from groupio.errors import InvalidInput
from groupio.protocol import link as lk
from groupio.protocol.linkframe import Frame, FrameKind, encode_frame


@pytest.mark.parametrize("keys", [KEYS, STORE_KEYS], ids=["token", "store"])
def test_messages_go_both_ways(keys: Keys) -> None:
    async def main() -> None:
        async with Pair(keys=keys) as pair:
            client, told, link = await pair.connected()
            assert told.peer is client.peer
            assert told.peer.hello == b"I rule"
            assert link.peer is not None
            assert link.peer.hello == b"I follow"
            assert (told.peer.life, link.peer.life) == ("b" * 32, "a" * 32)
            assert link.peer.address == "127.0.0.1"
            assert client.address == pair.server.address
            big = os.urandom(9_000_000)
            for number in range(200):
                client.send(b"up %d" % number)
                link.peer.send(b"down %d" % number)
            client.send(big)
            await until(lambda: len(link.messages) == 201 and len(told.messages) == 200)
            assert link.messages == [b"up %d" % n for n in range(200)] + [big]
            assert told.messages == [b"down %d" % n for n in range(200)]
            await until(lambda: client.peer.backlog_bytes == link.peer.backlog_bytes == 0)
            await asyncio.sleep(1.2 * FAST.silence_s)
            assert client.peer.open
            assert link.peer.open

    asyncio.run(main())


def test_a_message_sent_before_the_connection_stands() -> None:
    async def main() -> None:
        async with Pair() as pair:
            client, _ = pair.client(address=pair.server.address.replace("127.0.0.1", "localhost"))
            client.send(b"early")
            await until(lambda: pair.links and pair.links[0].messages == [b"early"])

    asyncio.run(main())


def test_many_clients_share_a_server() -> None:
    async def main() -> None:
        async with Pair() as pair:
            sides = [pair.client() for _ in range(20)]
            for number, (client, _) in enumerate(sides):
                client.send(b"%d" % number)
            await until(lambda: sum(len(link.messages) for link in pair.links) == 20)
            for link in pair.links:
                assert link.peer is not None
                link.peer.send(link.messages[0])
            await until(lambda: all(side.messages for _, side in sides))
            assert [side.messages for _, side in sides] == [[b"%d" % n] for n in range(20)]

    asyncio.run(main())


def test_ipv6() -> None:
    async def main() -> None:
        async with Pair(address="tcp://[::1]:0") as pair:
            assert pair.server.address.startswith("tcp://[::1]:")
            _, _, link = await pair.connected()
            assert link.peer is not None
            assert link.peer.address == "::1"

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        with pytest.raises(InvalidInput, match="cannot listen"):
            asyncio.run(main())
    else:
        asyncio.run(main())


# -- the end ---------------------------------------------------------


def test_each_side_learns_that_the_other_closed() -> None:
    async def main() -> None:
        async with Pair() as pair:
            client, told, link = await pair.connected()
            client.close("the agent ends")
            await until(lambda: link.lost)
            assert link.lost == ["the agent ends"]
            assert told.lost == []
            _, second, other = await pair.connected()
            assert other.peer is not None
            other.peer.close("another store")
            await until(lambda: second.lost)
            assert second.lost == ["another store"]
            third, told, _ = await pair.connected()
            pair.server.close()
            pair.server.close()
            await until(lambda: told.lost)
            assert told.lost == ["the controller ends"]
            third.send(b"into the void")
            third.close()

    asyncio.run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        async with Pair() as pair:
            _, told = pair.client(address="tcp://127.0.0.1:1")
            at = time.monotonic()
            await until(lambda: told.lost)
            assert time.monotonic() - at < 2 * FAST.silence_s
            assert "is tcp://127.0.0.1:1 right" in told.lost[0]

    asyncio.run(main())


def test_a_broken_connection_comes_back_and_nothing_is_lost_or_doubled() -> None:
    async def main() -> None:
        async with Pair() as pair, Proxy(pair.server.address) as proxy:
            client, told, link = await pair.connected(proxy.address)
            assert link.peer is not None
            for number in range(300):
                client.send(b"%d" % number)
                link.peer.send(b"%d" % number)
                if number % 100 == 50:
                    await asyncio.sleep(0.05)
                    proxy.break_all()
            expected = [b"%d" % n for n in range(300)]
            await until(lambda: len(link.messages) >= 300 and len(told.messages) >= 300)
            assert link.messages == expected
            assert told.messages == expected
            assert not told.lost
            assert not link.lost

    asyncio.run(main())


@pytest.mark.parametrize(
    "deaf", [{"server"}, {"client"}, {"server", "client"}], ids=["server", "client", "both"]
)
def test_a_cut_in_any_direction_ends_both_sides(deaf: set[str]) -> None:
    async def main() -> None:
        async with Pair() as pair, Proxy(pair.server.address) as proxy:
            _, told, link = await pair.connected(proxy.address)
            proxy.deaf = deaf
            at = time.monotonic()
            await until(lambda: told.lost and link.lost)
            assert time.monotonic() - at < 2 * FAST.silence_s + 1.0
            assert len(told.lost) == len(link.lost) == 1

    asyncio.run(main())


# -- what peers and users may do wrong ---------------------------------------------------------


def test_an_authenticated_peer_that_sends_noise(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Pair() as pair:
            context = zmq.Context()
            noisy = new_socket(context, zmq.DEALER, "127.0.0.1")
            show_client_key(noisy, KEYS)
            noisy.connect(pair.server.address)
            noisy.send(b"\xc1 noise")
            noisy.send_multipart([b"two", b"parts"])
            noisy.send(encode_frame(Frame("x.1", "y.2", FrameKind.ACK)))
            noisy.send(encode_frame(Frame("x.1", "y.2", FrameKind.BYE)))
            noisy.send(bytes(2 << 20))  # over the limit: the connection is closed
            await until(lambda: refused(caplog))
            await pair.connected()
            noisy.close()
            context.term()

    asyncio.run(main())
    line = refused(caplog)[0]  # on a slow machine a later one is logged too
    assert line.startswith("dropped a control frame from 127.0.0.1: a frame of 7 bytes cannot")


def test_a_client_drops_noise_of_its_server(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        context = zmq.Context()
        fake = context.socket(zmq.ROUTER)
        fake.setsockopt(zmq.CURVE_SERVER, 1)
        fake.setsockopt(zmq.CURVE_SECRETKEY, KEYS.server_secret)
        port = fake.bind_to_random_port("tcp://127.0.0.1")
        loop = asyncio.get_running_loop()
        client = ControlClient(loop, f"tcp://127.0.0.1:{port}", KEYS, life="a", config=FAST)
        await until(lambda: fake.getsockopt(zmq.EVENTS) & zmq.POLLIN)
        route, _ = fake.recv_multipart()
        fake.send_multipart([route, b"noise"])
        fake.send_multipart([route, b"two", b"parts"])
        await until(lambda: refused(caplog))
        assert not client.peer.open
        client.close()
        fake.close(linger=0)
        context.term()

    asyncio.run(main())
    assert len(refused(caplog)) == 1


def test_callbacks_may_send_close_and_fail() -> None:
    async def main() -> None:
        async with Pair() as pair:
            failures: list[dict[str, object]] = []
            pair.loop.set_exception_handler(lambda _, context: failures.append(context))
            client, told, link = await pair.connected()
            assert link.peer is not None
            peer = link.peer

            def answer(payload: bytes) -> None:
                link.messages.append(payload)
                if payload == b"fail":
                    raise ValueError("a defect")
                if payload == b"close":
                    peer.close("enough")
                else:
                    peer.send(b"re: " + payload)

            peer.on_message = answer
            for payload in (b"one", b"fail", b"two", b"close", b"three"):
                client.send(payload)
            await until(lambda: told.lost)
            assert told.lost == ["enough"]
            assert told.messages == [b"re: one", b"re: two"]
            assert link.messages == [b"one", b"fail", b"two", b"close"]
            assert link.lost == []
            (failure,) = failures
            assert "127.0.0.1" in str(failure["message"])

    asyncio.run(main())


def test_what_came_behind_the_close_is_not_told() -> None:
    async def main() -> None:
        async with Pair() as pair:
            client, _, link = await pair.connected()
            peer = link.peer
            assert peer is not None
            peer.on_message = lambda payload: (link.messages.append(payload), peer.close())
            for seq in (2, 1):
                frame = Frame(client.peer.link.own, peer.link.own, FrameKind.DATA, seq)
                peer.feed(lk.Received(pair.loop.time(), frame))
            assert link.messages == [b""]
            peer.send(b"ignored")

    asyncio.run(main())


def test_too_long_a_message_is_refused() -> None:
    async def main() -> None:
        async with Pair() as pair:
            client, _, _ = await pair.connected()

            class Long(bytes):
                def __len__(self) -> int:
                    return FAST.message_bytes + 1

            with pytest.raises(InvalidInput, match="exceeds the limit"):
                client.send(Long())
            assert client.peer.open

    asyncio.run(main())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_leaks() -> None:
    async def main() -> None:
        async with Pair() as pair:
            for _ in range(3):
                client, _, link = await pair.connected()
                client.close()
                await until(lambda link=link: link.lost)
            assert pair.server._peers == {}
            assert pair.server._routes == {}
            assert len(pair.server._listener) == 0

    asyncio.run(main())  # what is made once for the process
    files, threads = open_files(), threading.active_count()
    for _ in range(3):
        asyncio.run(main())
    until_s = time.monotonic() + 5
    while threading.active_count() > threads or open_files() > files:
        assert time.monotonic() < until_s, f"{threading.enumerate()}, {files} files before"
        time.sleep(0.02)


def test_a_peer_is_quiet_until_it_has_an_owner() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        links: list[Peer] = []
        server = ControlServer(loop, "tcp://127.0.0.1:0", KEYS, links.append, life="b", config=FAST)
        client = ControlClient(loop, server.address, KEYS, life="a", config=FAST)
        client.send(b"nobody listens")
        await until(lambda: links and client.peer.open and not client.peer.backlog_bytes)
        client.close()
        await until(lambda: not links[0].open)
        server.close()

    asyncio.run(main())
