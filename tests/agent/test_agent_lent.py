"""Memory that peers are being sent from is used again only when they have it, or are cut off."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agent_tools import WAIT_S, Store, blob
from blake3 import blake3

from groupio.agent.flushing import Flushing
from groupio.agent.holdings import Holdings
from groupio.agent.lending import Memory
from groupio.agent.metrics import Metrics
from groupio.agent.workers import WorkerPool
from groupio.fabric import frames
from groupio.fabric.auth import key_of, prove_client
from groupio.fabric.pacing import Pacer
from groupio.fabric.stream import Stream, parse_address
from groupio.fabric.tcp import TcpFabric
from groupio.model import CHUNK_BYTES, DecisionKey
from groupio.plan.layout import lay_out
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.agent import AgentMachine
from groupio.protocol.ledger import Ledger, extent_bytes
from groupio.testing.holdings import TOKEN, soon

ITEMS = (blob("weights", CHUNK_BYTES),)
LAYOUT = lay_out(ITEMS)
CLIENT = "c"


class Agent:
    """The machine, the memory and the flush jobs of an agent with room for one save at a time."""

    def __init__(self, store: Store, pool: WorkerPool) -> None:
        self.node = "n0"
        self.machine = AgentMachine(self.node, Ledger(extent_bytes(LAYOUT.total_bytes)))
        self.machine.keeps_content = True
        self.clients: dict[str, Any] = {}
        self.workers = pool
        self.metrics = Metrics()
        self.memory = Memory(cast(Any, self))
        self.fabric = TcpFabric(token=TOKEN)
        self.holdings = Holdings(self.memory.view)
        self.address = self.fabric.serve(self.holdings)
        self.threads = ThreadPoolExecutor(2)
        self.network = SimpleNamespace(
            fabric=self.fabric,
            holdings=self.holdings,
            links=SimpleNamespace(wrote=lambda *_: None),
            fetching=self.threads,
            orders=self.threads,
        )
        self.store = store
        self.job = SimpleNamespace(store=store, run=lambda step: None)
        store.known = None  # type: ignore[attr-defined]
        self.flushing = Flushing(cast(Any, self))
        self.granted: list[fx.GrantLease] = []
        self.said: list[Any] = []
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def job_of_group(self, group: int) -> Any:
        return self.job

    def post(self, step: Callable[[], None]) -> None:
        self._posted.put(step)

    def tell_machine(self, event: Any) -> None:
        for effect in self.machine.handle(event):
            self._execute(effect)

    def _execute(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Report(event=event):
                self.said.append(event)
                if isinstance(event, ev.NodeAdmitted):
                    self.tell_machine(fx.StartCopy(self.node, event.group))
            case fx.GrantLease():
                self.granted.append(effect)
            case fx.KeepContent(group=group):
                self.holdings.settle(group)
            case fx.DropContent(arena=arena, offset=offset, length=length):
                self.holdings.drop(arena, offset, length)
            case fx.OpenArena() | fx.CloseArena() | fx.Punch() | fx.Populate():
                self.memory.execute(effect)
            case _:
                self.flushing.execute(effect)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._posted.get(timeout=WAIT_S)()

    def settle(self) -> None:
        """Do all that comes in a while."""
        try:
            while True:
                self._posted.get(timeout=0.3)()
        except queue.Empty:
            return

    def ask(self, group: int) -> None:
        """A member opens a save; its group waits for memory."""
        self.flushing.items[CLIENT, group] = (ITEMS, b"")
        self.tell_machine(ev.LeaseAsked(CLIENT, group, 0, LAYOUT))
        seats = (fx.MemberSeat(0, CLIENT, group),)
        key = DecisionKey(1, group, 1)
        order = fx.AdmitGroup(self.node, group, key, seats, True, "wait", planned=True)
        self.tell_machine(order)

    def copy(self, content: bytes) -> None:
        """The member copies to the newest lease."""
        grant = self.granted[-1]
        self.memory.arenas[grant.arena].map(grant.offset, extent_bytes(CHUNK_BYTES))[
            :CHUNK_BYTES
        ] = content

    def save(self, group: int, content: bytes) -> None:
        """A whole save, up to the names of its chunks."""
        self.ask(group)
        self.copy(content)
        self.tell_machine(ev.WaveCopied(CLIENT, group, 0))
        self.until(lambda: any(isinstance(event, ev.NodeHashed) for event in self.said))

    def end(self, group: int, *, committed: bool) -> None:
        """The controller has decided the group."""
        self.tell_machine(fx.CloseGroup(self.node, group, committed, True))

    def close(self) -> None:
        self.fabric.close()
        for group in list(self.machine.groups):
            self.end(group, committed=False)
        self.until(lambda: not self.machine.groups)
        self.threads.shutdown()
        self.memory.shut()
        self.memory.close()


@pytest.fixture
def agent(store: Store, pool: WorkerPool) -> Iterator[Agent]:
    made = Agent(store, pool)
    yield made
    made.close()


def ask_slowly(agent: Agent, content: bytes, wait_s: float) -> Stream:
    """A peer that has asked for a chunk and takes no more than the first bytes of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.connect(parse_address(agent.address))
    stream = Stream(sock, Pacer(), soon(2 * WAIT_S))
    prove_client(stream, key_of(TOKEN), agent.store.store_id)
    request = frames.REQUEST.pack(frames.PULL, 1, 0, int(wait_s * 1000), 0)
    stream.send(request + frames.WANT.pack(blake3(content).digest(), 0, CHUNK_BYTES, 1))
    answer = frames.ANSWER.unpack(stream.receive(frames.ANSWER.size))
    assert answer == (frames.OK, 0, CHUNK_BYTES)
    return stream


def rest_of(peer: Stream) -> bytes:
    """All that still comes until the connection ends."""
    came = bytearray()
    while len(came) < CHUNK_BYTES:
        try:
            came += peer.receive(4096)
        except ConnectionError:
            came += peer._buffer[peer._start : peer._end]
            break
    return bytes(came)


@pytest.mark.parametrize("committed", [True, False])
def test_slow_peer_gets_the_right_bytes_after_the_end_of_the_group(
    agent: Agent, committed: bool
) -> None:
    first, second = b"\x01" * CHUNK_BYTES, b"\x02" * CHUNK_BYTES
    agent.save(1, first)
    peer = ask_slowly(agent, first, 2 * WAIT_S)
    agent.end(1, committed=committed)
    agent.ask(2)
    agent.settle()
    if len(agent.granted) == 2:
        agent.copy(second)
    into = memoryview(bytearray(CHUNK_BYTES))
    peer.receive_into(into)
    right = into == first
    assert right, "other bytes came under the chunk's name"
    agent.until(lambda: len(agent.granted) == 2)
    agent.copy(second)
    peer.close()


def test_stuck_peer_is_cut_off_before_the_memory_is_used_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupio.fabric.serving.HOLD_S", 0.5)
    first, second = b"\x01" * CHUNK_BYTES, b"\x02" * CHUNK_BYTES
    agent.save(1, first)
    peer = ask_slowly(agent, first, 10 * WAIT_S)
    agent.end(1, committed=True)
    agent.ask(2)
    agent.until(lambda: len(agent.granted) == 2)
    agent.copy(second)
    came = rest_of(peer)
    assert len(came) < CHUNK_BYTES, "it was not cut off"
    right = came == first[: len(came)]
    assert right, "other bytes came under the chunk's name"
    peer.close()
