"""Sizes are limited before anybody has proved a key."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path

import pytest
from transport_tools import Pair, refused, until

from groupio.controller.sockets import split_address

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_COMMAND = 6
HUGE = 1 << 40


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def announce(pair: Pair, greeting: bytes) -> None:
    """A stranger that sends a frame of HUGE bytes until it is cut off."""
    host, port = split_address(pair.server.address)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(greeting + bytes([LONG_COMMAND]) + HUGE.to_bytes(8, "big"))
    with contextlib.suppress(OSError):
        for _ in range(64):
            writer.write(bytes(1 << 20))
            await asyncio.wait_for(writer.drain(), 5)
    with contextlib.suppress(OSError):
        await asyncio.wait_for(reader.read(), 5)  # until the other side closes
    writer.close()


@pytest.mark.parametrize("greeting", [GREETING, GREETING[:12] + bytes(52)], ids=["CURVE", "none"])
def test_a_stranger_cannot_announce_much(caplog: pytest.LogCaptureFixture, greeting: bytes) -> None:
    async def main() -> None:
        async with Pair() as pair:
            before = resident()
            await announce(pair, greeting)
            await until(lambda: refused(caplog))
            assert resident() - before < 16 << 20
            await pair.connected()

    asyncio.run(main())
