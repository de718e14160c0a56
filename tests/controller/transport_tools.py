"""A listening and a connecting side in one loop, and a proxy between them that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from groupio.controller.keys import Keys
from groupio.controller.sockets import join_address, split_address
from groupio.controller.transport import ControlClient, ControlServer, Peer
from groupio.protocol.linkconfig import LinkConfig

KEYS = Keys.from_token(b"the token of all transport tests")
STORE_KEYS = replace(Keys.from_token(b"what is in the store of the tests"), of_store=True)
FAST = LinkConfig(
    heartbeat_s=0.1, silence_s=1.0, probe_s=0.2, retry_s=0.1, retry_max_s=0.3, ack_delay_s=0.01
)
PATIENT = LinkConfig(silence_s=120.0)
"""Silence ends no session during a test."""


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait for ``condition``; TimeoutError when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the control sockets logged."""
    return [r.getMessage() for r in caplog.records if r.name == "groupio.control"]


class Side:
    """What one connection told its user."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.messages: list[bytes] = []
        self.lost: list[str] = []

    def take(self, peer: Peer) -> None:
        assert self.peer is None
        self.peer = peer
        peer.on_message = self.messages.append
        peer.on_lost = self.lost.append

    def opened(self, peer: Peer) -> None:
        assert self.peer is None
        self.peer = peer


class Pair:
    """A server with all its links, and clients of it."""

    def __init__(
        self, *, keys: Keys = KEYS, address: str = "tcp://127.0.0.1:0",
        config: LinkConfig = FAST,
    ) -> None:  # fmt: skip
        self.loop = asyncio.get_running_loop()
        self.keys = keys
        self.config = config
        self.links: list[Side] = []
        self.clients: list[ControlClient] = []
        self.server = ControlServer(
            self.loop, address, keys, self._on_link, life="b" * 32, hello=b"I rule", config=config
        )

    def _on_link(self, peer: Peer) -> None:
        side = Side()
        side.take(peer)
        self.links.append(side)

    def client(self, *, address: str = "", keys: Keys | None = None) -> tuple[ControlClient, Side]:
        side = Side()
        client = ControlClient(
            self.loop,
            address or self.server.address,
            keys or self.keys,
            life="a" * 32,
            hello=b"I follow",
            on_open=side.opened,
            on_message=side.messages.append,
            on_lost=side.lost.append,
            config=self.config,
        )
        self.clients.append(client)
        return client, side

    async def connected(self, address: str = "") -> tuple[ControlClient, Side, Side]:
        """A client, what it was told, and what the server was told of it."""
        before = len(self.links)
        client, side = self.client(address=address)
        await until(lambda: side.peer and len(self.links) > before)
        return client, side, self.links[-1]

    async def __aenter__(self) -> Pair:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        await asyncio.sleep(0)


class Proxy:
    """TCP between a client and a server; ``deaf`` sides hear nothing any more.

    ``heard`` is what each side heard. A side in ``flips`` hears that byte of each connection with
    another bit.
    """

    def __init__(self, target: str) -> None:
        self.host, self.port = split_address(target)
        self.deaf: set[str] = set()
        self.flips: dict[str, int] = {}
        self.heard = {"client": bytearray(), "server": bytearray()}
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = join_address(*self.server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.break_all()
        await asyncio.sleep(0)  # only then the sockets are closed

    def break_all(self) -> None:
        """End every connection; new ones may come."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        accepting = asyncio.current_task()
        assert accepting is not None
        self.tasks.add(accepting)
        far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
        self.writers.append(far_writer)
        for side, source, target in (
            ("server", reader, far_writer),
            ("client", far_reader, writer),
        ):
            task = asyncio.ensure_future(self._carry(side, source, target))
            self.tasks.add(task)

    async def _carry(
        self, side: str, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        done = 0
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if side in self.flips and done <= (spot := self.flips[side]) < done + len(data):
                    changed = bytearray(data)
                    changed[spot - done] ^= 1
                    data = bytes(changed)
                done += len(data)
                if side not in self.deaf:
                    self.heard[side] += data
                    target.write(data)
                    await target.drain()
        target.transport.abort()
