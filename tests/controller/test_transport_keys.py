"""Who may listen, who may connect, and where: keys and addresses of the control sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket

import pytest
import zmq
from transport_tools import KEYS, STORE_KEYS, Pair, Proxy, Side, refused, until

from groupio.controller import transport
from groupio.controller.keys import Keys
from groupio.controller.sockets import (
    LoopSocket,
    Refusals,
    _peer_of,
    is_loopback,
    join_address,
    split_address,
)
from groupio.controller.transport import ControlClient, ControlServer
from groupio.errors import InvalidInput
from groupio.protocol.linkframe import Frame, FrameKind, encode_frame

OTHER = Keys.from_token(b"another token, not that of the job")


def test_another_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Pair() as pair:
            _, told = pair.client(keys=OTHER)
            await until(lambda: told.lost)
            assert "the peer did not answer" in told.lost[0]
            assert "the same token there?" in told.lost[0]
            assert pair.links == []
            _, good, _ = await pair.connected()
            assert not good.lost

    asyncio.run(main())
    assert refused(caplog)
    assert set(refused(caplog)) <= {
        "refused a control connection from 127.0.0.1: wrong or missing key",
        "refused a control connection from a peer that was gone at once: wrong or missing key",
    }
    assert len(refused(caplog)) <= 2, "once for an address, not for every try"


def test_the_right_listener_but_a_wrong_client_key(caplog: pytest.LogCaptureFixture) -> None:
    mixed = Keys(
        KEYS.server_public, KEYS.server_secret, OTHER.client_public, OTHER.client_secret, b""
    )

    async def main() -> None:
        async with Pair() as pair:
            _, told = pair.client(keys=mixed)
            await until(lambda: told.lost)
            assert pair.links == []

    asyncio.run(main())
    assert refused(caplog) == ["refused a control connection from 127.0.0.1: wrong or missing key"]


def test_no_key_where_one_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Pair() as pair:
            context = zmq.Context()
            plain = context.socket(zmq.DEALER)
            plain.connect(pair.server.address)
            plain.send(encode_frame(Frame("a" * 32 + ".1", "", FrameKind.OPEN)))
            await until(lambda: refused(caplog))
            assert not plain.poll(200), "not a word comes back"
            assert pair.links == []
            plain.close(linger=0)
            context.term()

    asyncio.run(main())
    assert refused(caplog)
    assert all(line.endswith("wrong or missing key") for line in refused(caplog))


def test_a_recorded_handshake_lets_in_whoever_replays_it_no_more() -> None:
    async def main() -> None:
        async with Pair() as pair, Proxy(pair.server.address) as proxy:
            client, _, link = await pair.connected(proxy.address)
            client.send(b"secret")
            await until(lambda: link.messages == [b"secret"])
            recorded = bytes(proxy.heard["server"])
            assert b"secret" not in recorded
            assert b"secret" not in proxy.heard["client"]
            host, port = split_address(pair.server.address)
            for end in (64, 64 + 200, len(recorded)):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(recorded[:end])
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(0.5):
                        while await reader.read(1 << 16):
                            pass
                writer.close()
            assert len(pair.links) == 1
            assert link.messages == [b"secret"]
            assert not link.lost

    asyncio.run(main())


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("place", [150, 200, 270])
def test_a_handshake_that_is_changed_on_the_way_comes_to_nothing(side: str, place: int) -> None:
    """The first 64 bytes of each side are ZeroMQ's greeting; what follows is under a key."""

    async def main() -> None:
        async with Pair() as pair, Proxy(pair.server.address) as proxy:
            proxy.flips[side] = place
            _, told = pair.client(address=proxy.address)
            await until(lambda: len(proxy.heard[side]) > place)
            with pytest.raises(TimeoutError):
                await until(lambda: told.peer, 0.5)
            assert pair.links == []
            proxy.flips.clear()
            await pair.connected(proxy.address)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "192.0.2.7"])
def test_no_listening_to_the_world_without_a_token(host: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(InvalidInput, match=r"will not listen on .* without a token"):
            ControlServer(loop, f"tcp://{host}:0", STORE_KEYS, print, life="b")

    asyncio.run(main())


def test_no_connecting_to_the_world_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(InvalidInput, match=r"will not connect to tcp://192\.0\.2\.7:7400 "):
            ControlClient(loop, "tcp://192.0.2.7:7400", STORE_KEYS, life="a")

        async def found(*_: object, **__: object) -> object:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 7400))]

        monkeypatch.setattr(loop, "getaddrinfo", found)
        side = Side()
        ControlClient(loop, "tcp://node7:7400", STORE_KEYS, life="a", on_lost=side.lost.append)
        await until(lambda: side.lost)
        assert "will not connect to tcp://node7:7400" in side.lost[0]

    asyncio.run(main())


def test_with_a_key_it_listens_to_the_world() -> None:
    async def main() -> None:
        async with Pair(address="tcp://*:0") as pair:
            host, port = split_address(pair.server.address)
            assert host == "0.0.0.0"
            assert port > 0
            await pair.connected(join_address("127.0.0.1", port))

    asyncio.run(main())


# -- addresses ---------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "tcp://host", "tcp://:1", "ipc://x:1", "tcp://h:x", "tcp://h:65536",
     "tcp://::1:80", "tcp:// h:1", "tcp://h:٣"],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidInput, match="is no address; expected tcp://host:port"):
        split_address(address)


def test_addresses_come_apart_and_together() -> None:
    for address in ("tcp://10.0.0.1:7400", "tcp://[fd00::1]:1", "tcp://node-7.rack:65535"):
        assert join_address(*split_address(address)) == address


def test_what_is_known_of_addresses() -> None:
    loopback = [is_loopback(host) for host in ("127.0.0.9", "::1", "10.0.0.1", "::", "localhost")]
    assert loopback == [True, True, False, False, False]
    assert _peer_of(-1) == ""
    assert transport._host(zmq.Frame(b"x")) == "unknown"


def test_an_address_in_use_or_of_another_machine() -> None:
    async def main() -> None:
        async with Pair() as pair:
            for address in (pair.server.address, "tcp://192.0.2.7:0", "tcp://no.such.invalid:0"):
                with pytest.raises(InvalidInput, match="cannot listen on"):
                    ControlServer(pair.loop, address, KEYS, print, life="b")

    asyncio.run(main())


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def unknown(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(loop, "getaddrinfo", unknown)
        side = Side()
        ControlClient(loop, "tcp://nobody:1", KEYS, life="a", on_lost=side.lost.append)
        await until(lambda: side.lost)
        assert side.lost == ["the name nobody is not known: Name or service not known"]

    asyncio.run(main())


def test_a_client_that_closes_while_it_looks_a_name_up() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        side = Side()
        client = ControlClient(loop, "tcp://localhost:1", KEYS, life="a", on_lost=side.lost.append)
        client.close()
        await asyncio.sleep(0.1)
        assert side.lost == []

    asyncio.run(main())


def test_refusals_are_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = Refusals()
    with caplog.at_level(logging.WARNING):
        for number in (*range(1500), 1499):
            refusals.add(f"10.0.{number // 256}.{number % 256}")
    assert len(refused(caplog)) == 1500
    assert len(refusals._logged._said) <= 1024
    monkeypatch.setattr("groupio.controller.sockets.REFUSED_LOG_S", 0.0)
    refusals = Refusals()
    refusals.add("10.0.0.1")
    refusals.add("10.0.0.1")
    assert len(refused(caplog)) == 1502


def test_a_closed_socket_sends_nothing() -> None:
    async def main() -> None:
        context = zmq.Context()
        plain = LoopSocket(asyncio.get_running_loop(), context.socket(zmq.PULL), print)
        with pytest.raises(zmq.ZMQError):  # a defect is no lost message
            plain.send([b"x"])
        plain.close()
        plain.close()
        assert plain.send([b"x"]) == errno.ENOTSOCK
        await asyncio.sleep(0)
        context.term()

    asyncio.run(main())
