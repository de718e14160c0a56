"""A process that dies is noticed by its connection; one that stands still is not taken for dead.

Silence ends no session here within the time of a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from transport_tools import KEYS, PATIENT, Pair, Proxy, Side, until

from groupio.controller.transport import ControlClient

PEER = Path(__file__).with_name("transport_peer.py")
SOON_S = 30.0
"""Far less than the patience of the links."""


@contextlib.contextmanager
def peer_process(*how: str) -> Iterator[subprocess.Popen[str]]:
    """A process with the other end; it is gone afterwards."""
    process = subprocess.Popen([sys.executable, str(PEER), *how], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def told_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def stands_still(process: subprocess.Popen[str], side: Side) -> None:
    """It is paused for longer than a dead one is given, and the session goes on."""
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2 * PATIENT.doubt_s)
    assert not side.lost
    process.send_signal(signal.SIGCONT)


async def is_killed(process: subprocess.Popen[str], side: Side) -> None:
    process.kill()
    await until(lambda: side.lost, SOON_S)
    assert side.lost[0].startswith("its connection was closed")
    assert side.peer is not None
    assert side.peer.vanished


def test_the_listening_side_notices_that_an_agent_died() -> None:
    async def main() -> None:
        async with Pair(config=PATIENT) as pair:
            _, told, _ = await pair.connected()
            with peer_process("dial", pair.server.address) as process:
                await until(lambda: len(pair.links) == 2, SOON_S)
                await stands_still(process, pair.links[1])
                await is_killed(process, pair.links[1])
            assert not told.lost, "the other agent lives"
            assert not pair.links[0].lost

    asyncio.run(main())


def test_an_agent_notices_that_the_controller_died() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with peer_process("listen") as process:
            side = Side()
            ControlClient(
                loop,
                await asyncio.to_thread(told_address, process),
                KEYS,
                life="a" * 32,
                on_open=side.opened,
                on_lost=side.lost.append,
                config=PATIENT,
            )
            await until(lambda: side.peer, SOON_S)
            await stands_still(process, side)
            await is_killed(process, side)

    asyncio.run(main())


def test_a_controller_that_stands_still_takes_the_connection_that_is_made_anew() -> None:
    async def main() -> None:
        with peer_process("listen") as process:
            address = await asyncio.to_thread(told_address, process)
            async with Pair(config=PATIENT) as pair, Proxy(address) as proxy:
                client, side = pair.client(address=proxy.address)
                await until(lambda: side.peer, SOON_S)
                process.send_signal(signal.SIGSTOP)
                proxy.break_all()
                await asyncio.sleep(3 * PATIENT.doubt_s)
                assert not side.lost
                process.send_signal(signal.SIGCONT)
                client.send(b"still here")
                await until(lambda: not client.peer.backlog_bytes, SOON_S)

    asyncio.run(main())


def test_a_connection_that_does_not_come_back_ends_both_sides() -> None:
    async def main() -> None:
        async with (
            Pair(config=PATIENT) as pair,
            Proxy(pair.server.address) as proxy,
        ):
            _, told, link = await pair.connected(proxy.address)
            proxy.server.close()
            proxy.break_all()
            await until(lambda: told.lost and link.lost, SOON_S)
            assert told.peer is not None
            assert link.peer is not None
            assert told.peer.vanished
            assert link.peer.vanished

    asyncio.run(main())


def test_a_connection_that_comes_back_keeps_the_session() -> None:
    async def main() -> None:
        async with Pair(config=PATIENT) as pair, Proxy(pair.server.address) as proxy:
            client, told, link = await pair.connected(proxy.address)
            assert link.peer is not None
            for number in range(3):
                proxy.break_all()
                client.send(b"up %d" % number)
                link.peer.send(b"down %d" % number)
                await until(lambda n=number: len(link.messages) > n < len(told.messages), SOON_S)
            await asyncio.sleep(2 * PATIENT.doubt_s)
            assert client.peer.open
            assert link.peer.open

    asyncio.run(main())


def test_an_end_that_says_goodbye_did_not_vanish() -> None:
    async def main() -> None:
        async with Pair(config=PATIENT) as pair:
            client, _, link = await pair.connected()
            client.close("the agent ends")
            await until(lambda: link.lost)
            assert link.peer is not None
            assert not link.peer.vanished

    asyncio.run(main())
