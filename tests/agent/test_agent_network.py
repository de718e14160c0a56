"""What an agent opens once a job spans nodes, and that all of it is closed again."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupio.agent import network
from groupio.agent.driver import Driver
from groupio.agent.identity import Writer
from groupio.agent.network import Network, _listen
from groupio.controller import messages as cm
from groupio.controller.keys import Keys
from groupio.controller.store import JobStore
from groupio.controller.transport import ControlClient
from groupio.errors import ControllerLost, GroupIOError, InvalidInput, StorageError, from_wire
from groupio.fabric.auth import key_of
from groupio.fabric.open import open_fabric
from groupio.fabric.tcp import TcpFabric
from groupio.model import NodeLink
from groupio.protocol import events as ev
from groupio.protocol import messages as msg
from groupio.protocol.wireform import WireForm
from groupio.settings import Settings

TOKEN = "t" * 32
STORE = "5" * 32
STORE_KEYS = replace(Keys.make(), of_store=True)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUPIO_TOKEN", raising=False)
    monkeypatch.delenv("GROUPIO_TOKEN_FILE", raising=False)


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as there:
        return int(there.getsockname()[1])


class Around:
    """What a network sees of its driver."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.node, self.budget = settings, "n0", 1 << 30
        self.memory = SimpleNamespace(view=lambda arena, offset, length: None)
        self.jobs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()

    def post(self, step: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(step)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.is_alive()}


def play(script: Callable[[Network, Around], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        around = Around(Settings(**settings))
        it = Network(around)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                await script(it, around)
        finally:
            it.close()
            it.close()  # safe to repeat

    asyncio.run(main())


@pytest.mark.parametrize(
    ("configured", "token", "host", "port"),
    [
        (None, False, "127.0.0.1", 0),
        (None, True, "0.0.0.0", 0),
        ("10.0.0.1", True, "10.0.0.1", 0),
        ("10.0.0.1:7000", True, "10.0.0.1", 7000),
        ("[fd00::1]", True, "[fd00::1]", 0),
        ("[fd00::1]:7000", True, "[fd00::1]", 7000),
    ],
)
def test_where_an_agent_listens(configured: str | None, token: bool, host: str, port: int) -> None:
    assert _listen(configured, token) == (host, port)


def test_the_way_in_is_opened_once_and_only_when_it_is_needed() -> None:
    async def script(it: Network, around: Around) -> None:
        assert it._gates == {}
        address = it.gate_address(STORE, STORE_KEYS)
        assert address == it.gate_address(STORE, STORE_KEYS)
        assert address.startswith("tcp://127.0.0.1:")
        assert not address.endswith(":0")
        assert len(it._gates) == 1
        assert len(it.life) == 32
        other = it.gate_address("6" * 32, replace(Keys.make(), of_store=True))
        assert other != address, "who has the key of one store is let in there only"
        it.close_gate(STORE)
        it.close_gate(STORE)
        assert list(it._gates) == ["6" * 32]

    play(script)


def test_with_a_token_all_jobs_have_one_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPIO_TOKEN", TOKEN)

    async def script(it: Network, around: Around) -> None:
        assert it.token is not None
        assert it.gate_address("5" * 32, it.token) == it.gate_address("6" * 32, it.token)
        it.close_gate("5" * 32)
        assert len(it._gates) == 1

    play(script)


def test_a_stated_port_is_of_the_first_store(unused_port: int) -> None:
    async def script(it: Network, around: Around) -> None:
        assert it.gate_address(STORE, STORE_KEYS) == f"tcp://127.0.0.1:{unused_port}"
        assert it.gate_address("6" * 32, replace(Keys.make(), of_store=True)).count(":") == 2

    play(script, listen=f"127.0.0.1:{unused_port}")


def test_a_store_with_another_key_has_another_way_in() -> None:
    async def script(it: Network, around: Around) -> None:
        before = it.gate_address(STORE, STORE_KEYS)
        assert it.gate_address(STORE, replace(Keys.make(), of_store=True)) != before
        assert len(it._gates) == 1

    play(script)


def test_without_a_token_the_key_is_in_the_store(tmp_path: Path) -> None:
    async def script(it: Network, around: Around) -> None:
        store = JobStore(str(tmp_path / "store"), "job", "n0", Writer.of_this_process())
        store.follow(create=True)
        keys = it.keys_of(store)
        assert keys.of_store
        assert (tmp_path / "store" / "controllers" / "key").stat().st_mode & 0o777 == 0o600
        tcp = it.fabric
        assert isinstance(tcp, TcpFabric)
        assert tcp._keys.of(store.store_id) == key_of(keys.fabric_key)
        store.close()

    play(script)


def test_agents_are_brought_to_the_controller_of_their_job() -> None:
    async def script(it: Network, around: Around) -> None:
        host = SimpleNamespace(store=SimpleNamespace(job="job", store_id="5" * 32))
        hello = cm.NodeHello(cm.CONTROL_VERSION, "1", "n1", "1" * 32, "job", "/s", "5" * 32)
        with pytest.raises(ControllerLost, match="not here; look"):
            it._find("", hello)
        it.hosts["6" * 32] = host  # type: ignore[assignment]
        with pytest.raises(ControllerLost) as caught:
            it._find("", hello)
        assert "6666" not in caught.value.message, "what else is here is not told"
        it.hosts["5" * 32] = host  # type: ignore[assignment]
        assert it._find("", hello) is host
        assert it._find("5" * 32, hello) is host
        with pytest.raises(ControllerLost):
            it._find("6" * 32, hello)
        host.store.job = "other"
        with pytest.raises(InvalidInput, match=r"means job 'job', and store .* job 'other'"):
            it._find("", hello)

    play(script)


def test_the_way_in_says_that_the_controller_is_not_here() -> None:
    async def script(it: Network, around: Around) -> None:
        told: list[Any] = []
        form = WireForm(cm.FROM_CONTROLLER)
        client = ControlClient(
            around.loop,
            it.gate_address(STORE, STORE_KEYS),
            STORE_KEYS,
            life="1" * 32,
            on_message=lambda payload: told.append(form.decode(payload)),
        )
        hello = cm.NodeHello(cm.CONTROL_VERSION, "1", "n1", "1" * 32, "job", "/s", "5" * 32)
        client.send(WireForm(cm.FROM_NODE).encode(hello))
        while not told:
            await asyncio.sleep(0.01)
        assert isinstance(from_wire(told[0].error), ControllerLost)
        client.close()

    play(script)


def test_controllers_hear_of_changed_links() -> None:
    async def script(it: Network, around: Around) -> None:
        heard: list[Any] = []
        around.jobs = {
            "a": SimpleNamespace(joining=SimpleNamespace(tell=heard.append)),
            "b": SimpleNamespace(joining=None),
        }
        assert it.links.link == NodeLink("n0", 1e9, 2e9, "rack")
        await asyncio.to_thread(it.links.wrote, 64 << 20, 1.0)
        while not heard:
            await asyncio.sleep(0.01)
        assert heard == [ev.LinkMeasured(it.links.link)]
        assert heard[0].link.uplink_bytes_per_s < 1e9

    play(script, uplink_bytes_per_s=1e9, fabric_bytes_per_s=2e9, failure_domain="rack")


def test_all_is_closed_at_the_end() -> None:
    before = threads()

    async def script(it: Network, around: Around) -> None:
        host, _, port = it.gate_address(STORE, STORE_KEYS).removeprefix("tcp://").rpartition(":")
        it.fetching.submit(int)
        it.orders.submit(int)
        socket.create_connection((host, int(port))).close()
        fabric_port = int(it.fabric_address.rpartition(":")[2])
        socket.create_connection((host, fabric_port)).close()
        it.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, fabric_port))
        with pytest.raises(RuntimeError):
            it.fetching.submit(int)
        with pytest.raises(RuntimeError):
            it.orders.submit(int)
        until = around.loop.time() + 10
        while threads() - before and around.loop.time() < until:
            await asyncio.sleep(0.02)
        assert threads() - before == set()

    play(script)


# -- what cannot be opened ---------------------------------------------------------------------


def made(**settings: Any) -> None:
    async def main() -> None:
        Network(Around(Settings(**settings)))  # type: ignore[arg-type]

    asyncio.run(main())


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which parts were closed."""
    said: list[str] = []
    for kind in (TcpFabric, network.Reads):
        close = kind.close

        def closing(self: Any, kind: Any = kind, close: Any = close) -> None:
            said.append(kind.__name__)
            close(self)

        monkeypatch.setattr(kind, "close", closing)
    return said


def test_without_a_token_only_this_machine_is_let_in(closed: list[str]) -> None:
    with pytest.raises(InvalidInput, match="GROUPIO_TOKEN"):
        made(listen="0.0.0.0:0")
    assert sorted(closed) == ["Reads", "TcpFabric"]


def test_an_engine_without_a_key_serves_others_only_when_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mooncake.engine", reason="peer not installed: mooncake")
    monkeypatch.setenv("GROUPIO_TOKEN", TOKEN)
    for listen in (None, "0.0.0.0:0", "10.0.0.7", "node7:9"):
        with pytest.raises(InvalidInput, match="GROUPIO_FABRIC=mooncake-keyless"):
            made(fabric="mooncake", listen=listen)
    for host in ("127.0.0.1", "[::1]", "localhost"):
        open_fabric(Settings(fabric="mooncake"), host, host, b"t", 64 << 20).close()
    told = Settings(fabric="mooncake-keyless")
    open_fabric(told, "10.0.0.7", "127.0.0.1", b"t", 64 << 20).close()


def test_an_address_of_another_machine_is_an_error_of_the_settings(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUPIO_TOKEN", TOKEN)
    before = threads()
    with pytest.raises(InvalidInput, match=r"cannot listen on 192\.0\.2\.77.*GROUPIO_LISTEN"):
        made(listen="192.0.2.77")
    assert sorted(closed) == ["Reads", "TcpFabric"]
    deadline = time.monotonic() + 20
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threads() - before == set()


def test_a_node_that_does_not_know_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPIO_TOKEN", TOKEN)

    def unknown(host: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(network, "reachable", unknown)
    with pytest.raises(InvalidInput, match="GROUPIO_LISTEN"):
        made()


def test_a_client_is_refused_where_no_network_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its job leaves nothing half made: the agent serves others, and can drain."""

    async def main() -> None:
        settings = Settings(node="n0", listen="192.0.2.77", memory_bytes=64 << 20)
        driver = Driver(settings, SimpleNamespace())  # type: ignore[arg-type]
        driver._loop = asyncio.get_running_loop()
        try:
            hello = msg.Hello(
                version=msg.PROTOCOL_VERSION,
                client_id="c0",
                pid=1,
                rank=0,
                world_size=2,
                store=str(tmp_path / "store"),
                controller="store",
            )
            for _ in range(2):
                with pytest.raises(GroupIOError, match=r"192\.0\.2\.77"):
                    driver.job_of(hello.store, None, hello)
            assert driver.jobs == {}
            assert driver.network is None
            driver.drain()
        finally:
            driver._closing.shutdown()
            driver.doors.close()
            driver.workers.close(timeout_s=5.0)

    asyncio.run(main())


def test_one_of_two_copies_of_a_store_is_in_use_at_a_time() -> None:
    async def script(it: Network, around: Around) -> None:
        it.claim("5" * 32, "/store")
        it.claim("5" * 32, "/store")
        with pytest.raises(StorageError, match="/copy and /store have the same id"):
            it.claim("5" * 32, "/copy")
        it.release("5" * 32, "/copy")
        with pytest.raises(StorageError):
            it.claim("5" * 32, "/copy")
        it.release("5" * 32, "/store")
        it.claim("5" * 32, "/copy")

    play(script)
