"""An agent's driver in a loop of a test, with everything at its edges replaced: sockets, the
coordinator, the fabric. Its machines, its desk and the store are the real ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupio.agent import joining
from groupio.agent.driver import Driver
from groupio.agent.job import Job
from groupio.agent.joining import Joining
from groupio.controller import messages as cm
from groupio.controller.coordinator import Rule
from groupio.controller.discover import Kind, Where
from groupio.controller.keys import Keys
from groupio.controller.store import JobStore
from groupio.errors import ControllerLost, GroupIOError, from_wire
from groupio.model import NodeLink
from groupio.protocol import events as ev
from groupio.protocol import messages as msg
from groupio.protocol.wireform import WireForm
from groupio.settings import Settings

LIFE = "a" * 32
OTHER = "b" * 32
WAIT_S = 20.0
STORE = Where(Kind.STORE, "", "the settings")
PROCESS = ev.Process(10, 1)


def away() -> ControllerLost:
    return ControllerLost("nobody answers")


async def until(holds: Callable[[], Any]) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.002)


class Coordinator:
    """Says what the test says: ``rule`` rules, and a campaign wins if ``wins``."""

    def __init__(self) -> None:
        self.rule: Rule | None = None
        self.wins = True
        self.error: GroupIOError | None = None
        self.kept = True
        self.asked: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.resign_error: GroupIOError | None = None
        self.on_lost: Callable[[str], None] = lambda why: None

    def _say(self, what: Any) -> None:
        self.asked.append(what)
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    def current(self, deadline: float) -> Rule | None:
        self._say("current")
        return self.rule

    def campaign(self, node: str, life: str, address: str, deadline: float, *, over: int) -> Rule:
        self._say((address, over))
        if self.wins:
            self.rule = Rule(over + 1, address, node, life)
        assert self.rule is not None
        return self.rule

    def keep(self) -> bool:
        self._say("keep")
        return self.kept

    def resign(self) -> None:
        self.asked.append("resign")
        if self.resign_error is not None:
            raise self.resign_error

    def watch(self, term: int, timeout_s: float) -> Rule | None:
        return None

    def close(self) -> None:
        self.asked.append("close")


class Client:
    """A link to a controller; the test speaks for the other end."""

    def __init__(self, world: World, address: str, options: dict[str, Any]) -> None:
        self.world, self.address = world, address
        self.life = options["life"]
        self.on_message: Callable[[bytes], None] = options["on_message"]
        self.on_lost: Callable[[str], None] = options["on_lost"]
        self.locked_out = False
        self.peer = SimpleNamespace(vanished=False)
        self.closed: str | None = None
        self.sent: list[Any] = []

    def send(self, payload: bytes) -> None:
        if self.closed is None:
            self.sent.append(WireForm(cm.FROM_NODE).decode(payload))

    def close(self, reason: str) -> None:
        assert threading.get_ident() == self.world.thread, "sockets are the loop's"
        self.closed = reason

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.on_message(WireForm(cm.FROM_CONTROLLER).encode(message))

    def lose(self, why: str = "it is gone", *, locked_out: bool = False) -> None:
        self.closed, self.locked_out = why, locked_out
        self.on_lost(why)

    def got(self, kind: type) -> list[Any]:
        return [one for one in self.sent if isinstance(one, kind)]


class Reads:
    """The reads of the agent: what they were told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def joined(self, job: Job) -> None:
        self.said.append("joined")

    def left(self, job: Job) -> None:
        self.said.append("left")

    def leave(self, job: Job) -> bool:
        return False

    def client_left(self, client: str, *, fenced: bool) -> None:
        pass

    def take(self, job: Job, effect: Any) -> None:
        self.said.append(type(effect).__name__)


class Network:
    """The doors to other nodes, none of which is open."""

    def __init__(self) -> None:
        self.life = LIFE
        self.keys = Keys.make()
        self.links = SimpleNamespace(link=NodeLink("n0", 1e9, 1e9, "n0"))
        self.fabric_address = "tcp://127.0.0.1:9"
        self.hosts: dict[str, Any] = {}
        self.reads = Reads()
        self.fabric = SimpleNamespace(pace=SimpleNamespace(set_share=lambda share: None))
        self.error: GroupIOError | None = None

    def keys_of(self, store: JobStore) -> Keys:
        return self.keys

    def claim(self, store_id: str, path: str) -> None:
        pass

    def release(self, store_id: str, path: str) -> None:
        pass

    def close_gate(self, store_id: str) -> None:
        pass

    def gate_address(self, store_id: str, keys: Keys) -> str:
        if self.error is not None:
            raise self.error
        return "tcp://127.0.0.1:5"


class World:
    """One agent with one job."""

    def __init__(self, path: Path, where: Where) -> None:
        self.path = str(path / "store")
        self.thread = threading.get_ident()
        self.coordinator = Coordinator()
        self.clients: list[Client] = []
        self.network = Network()
        self.told: list[Any] = []
        self.driver = Driver(Settings(node="n0", memory_bytes=64 << 20), _residence())
        self.driver._loop = asyncio.get_running_loop()
        self.driver._done = self.driver._loop.create_future()
        self.driver.network = self.network  # type: ignore[assignment]
        self.driver.send = self._send  # type: ignore[method-assign]
        store = JobStore(self.path, "job", "n0", self.driver.writer)
        self.job = Job(self.path, store)
        self.driver.jobs[self.path] = self.job
        self.job.joining = self.joining = Joining(self.driver, self.job, where)

    def _send(self, peer: Any, message: Any, fds: tuple[int, ...] = ()) -> None:
        self.told.append((peer.client, message))

    def coordinate(
        self, where: Where, store: Any, scope: str, *, by_token: bool, on_lost: Any, after: Any
    ) -> Coordinator:
        self.coordinator.on_lost = on_lost
        return self.coordinator

    def connect(self, loop: Any, address: str, keys: Any, **options: Any) -> Client:
        self.clients.append(Client(self, address, options))
        return self.clients[-1]

    @property
    def client(self) -> Client:
        return self.clients[-1]

    @property
    def ended(self) -> bool:
        """The agent ended because of a defect."""
        assert self.driver._done is not None
        return self.driver._done.done()

    def come(self, name: str = "c0", rank: int = 0) -> None:
        """A client says Hello."""
        self.driver.clients[name] = SimpleNamespace(  # type: ignore[assignment]
            client=name,
            called_at={},
            notes=(),
            job=self.job,
            connected=True,
            hello=None,
            seated=True,
        )
        arrived = ev.ClientArrived(name, PROCESS, rank, 2, node="n0")
        self.job.tell(arrived)

    def open(self, name: str = "c0", save_id: int = 1, **changes: Any) -> ev.MemberOpened:
        fields: dict[str, Any] = {
            "node": "n0",
            "client": name,
            "process": PROCESS,
            "rank": 0,
            "world_size": 2,
            "save_id": save_id,
            "epoch": 7,
            "deadline_s": 60.0,
            "elapsed_s": 0.0,
            "at": asyncio.get_running_loop().time(),
            "total_bytes": 4096,
            "bytes_logical": 4096,
            "items_id": b"i" * 32,
        }
        opened = ev.MemberOpened(**{**fields, **changes})
        self.job.tell(opened)
        return opened

    def failures(self, name: str = "c0") -> list[GroupIOError]:
        """The errors that the client was told of its saves."""
        return [from_wire(m.error) for to, m in self.told if to == name and type(m) is msg.Failed]

    async def follow(self, term: int = 1, *, create: bool = True) -> Client:
        """Join a controller elsewhere that rules in ``term``."""
        self.coordinator.rule = Rule(term, "tcp://10.0.0.1:7", "n1", OTHER)
        if create:
            self.make_store()
        self.come()
        await until(lambda: self.clients)
        self.client.say(cm.NodeWelcome(term, "n1"))
        await until(lambda: self.joining.joined)
        return self.client

    def make_store(self) -> None:
        store = JobStore(self.path, "job", "n1", self.driver.writer)
        store.follow(create=True)
        store.close()


def _residence() -> Any:
    return SimpleNamespace()


def agent(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    play: Callable[[World], Awaitable[None]],
    where: Where = STORE,
) -> World:
    """Run ``play`` with an agent; it must not have ended because of a defect."""

    async def main() -> World:
        it = World(path, where)
        monkeypatch.setattr(joining, "open_coordinator", it.coordinate)
        monkeypatch.setattr(joining, "ControlClient", it.connect)
        try:
            async with asyncio.timeout(WAIT_S):
                await play(it)
            assert not it.ended
        finally:
            it.coordinator.gate.set()
            if it.path in it.driver.jobs:
                it.driver._let_go(it.path)
            await asyncio.to_thread(it.driver._closing.shutdown)
            await asyncio.sleep(0)
            it.driver.doors.close()
            it.driver.memory.shut()
            it.driver.workers.close(timeout_s=5.0)
        return it

    return asyncio.run(main())
