"""The way in for agents, over real sockets: who gets to a job's controller, and who is cut off."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_controller_lines import opened
from transport_tools import KEYS, until

from groupio.agent.identity import Writer
from groupio.agent.network import Network
from groupio.controller import gate as gates
from groupio.controller import messages as cm
from groupio.controller.gate import Gate
from groupio.controller.host import Host
from groupio.controller.lines import Lines
from groupio.controller.service import Duty, Service
from groupio.controller.store import JobStore
from groupio.controller.transport import ControlClient
from groupio.errors import ControllerLost, GroupIOError, InvalidInput, from_wire
from groupio.model import ChunkTable, NodeLink, NodeReport
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.wireform import WireForm

TERM = 3
PROCESS = ev.Process(10, 1)


class Around:
    """The process around a host: steps one after the other, nobody to order anything."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.steps: deque[Callable[[], None]] = deque()
        self.running = False

    def do(self, step: Callable[[], None]) -> None:
        self.steps.append(step)
        if self.running:
            return
        self.running = True
        while self.steps:
            self.steps.popleft()()
        self.running = False

    def post(self, step: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(self.do, step)

    def order(self, host: Host, effect: Any) -> None:
        pass

    def store_opened(self, host: Host) -> None:
        pass

    def delete_segments(self, host: Host, group: int) -> None:
        pass

    def see(self, group: int, rank: int, place: int, length: int) -> memoryview | None:
        return None


class Agent:
    """A client of the gate, and what it was told."""

    def __init__(self, world: World, life: str) -> None:
        self.told: list[Any] = []
        self.lost: list[str] = []
        self.out, self.form = WireForm(cm.FROM_NODE), WireForm(cm.FROM_CONTROLLER)
        self.client = ControlClient(
            world.loop,
            world.gate.address,
            KEYS,
            life=life,
            on_message=lambda payload: self.told.append(self.form.decode(payload)),
            on_lost=self.lost.append,
        )

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.client.send(self.out.encode(message))

    async def answer(self) -> Any:
        """The next message that it gets."""
        await until(lambda: self.told)
        return self.told.pop(0)

    async def show(self, store: JobStore) -> None:
        """Answer the controller, which asks which store this node sees."""
        order = await self.answer()
        assert isinstance(order, fx.ShowStore)
        self.say(await asyncio.to_thread(lambda: store.show(order)))

    async def refusal(self) -> GroupIOError:
        refused = await self.answer()
        assert isinstance(refused, cm.NodeRefused)
        return from_wire(refused.error)


class World:
    """A host with a store, and a gate that leads to it."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.get_running_loop()
        writer = Writer.of_this_process()
        store = JobStore(str(path), "job", "n0", writer)
        self.store_id = store.follow(create=True)
        store.close()
        store.store_id = self.store_id
        self.host = Host(str(path), store, Around(), count(1), Lines("n0"), TERM)
        self.gate = Gate("tcp://127.0.0.1:0", KEYS, "n0", "0" * 32, self.find)
        self.agents: list[Agent] = []

    def find(self, hello: cm.NodeHello) -> Host:
        # As the agent that has the controller does it.
        network: Any = SimpleNamespace(hosts={self.store_id: self.host})
        return Network._find(network, "", hello)

    def hello(self, node: str = "n1", **changes: Any) -> cm.NodeHello:
        hello = cm.NodeHello(
            version=cm.CONTROL_VERSION,
            release="1",
            node=node,
            life="1" * 32,
            job="job",
            store="/store",
            store_id=self.store_id,
            term=TERM,
        )
        return replace(hello, **changes)

    def join(self, node: str = "n1", life: str = "1" * 32, **more: Any) -> ev.NodeJoined:
        link = NodeLink(node, 1e9, 1e9, node)
        return ev.NodeJoined(node, life, "tcp://127.0.0.1:1", link, self.store_id, **more)

    def agent(self, life: str = "1" * 32) -> Agent:
        self.agents.append(Agent(self, life))
        return self.agents[-1]

    async def joined(self, node: str = "n1", life: str = "1" * 32) -> Agent:
        agent = self.agent(life)
        agent.say(self.hello(node, life=life))
        assert await agent.answer() == cm.NodeWelcome(TERM, "n0")
        agent.say(self.join(node, life))
        await until(lambda: node in self.alive)
        return agent

    @property
    def alive(self) -> tuple[str, ...]:
        return self.host.controller.nodes.alive


def world(path: Path, play: Callable[[World], Any]) -> None:
    """Run ``play`` in a loop of its own."""

    async def main() -> None:
        it = World(path)
        try:
            await play(it)
        finally:
            for agent in it.agents:
                agent.client.close()
            it.gate.close()
            await asyncio.to_thread(it.host.end)

    asyncio.run(main())


def test_an_agent_is_welcomed_joins_and_is_missed(tmp_path: Path) -> None:
    async def play(it: World) -> None:
        agent = await it.joined()
        assert it.host.lines.by_node["n1"].hello.node == "n1"
        agent.say(cm.StatusAsked(7))
        status = await agent.answer()
        assert status.request_id == 7
        assert status.body["term"] == TERM
        assert [(n["node"], n["has_controller"]) for n in status.body["nodes"]] == [("n1", False)]
        agent.say(ev.LinkMeasured(NodeLink("n1", 5e9, 6e9, "n1")))
        await until(lambda: it.host.describe()["nodes"][0]["uplink_bytes_per_s"] == 5e9)
        agent.say(cm.ClientSettles("c", 8))
        assert await agent.answer() == cm.ClientSettled("c", 8)
        agent.client.close("it ends")
        await until(lambda: not it.alive)
        assert it.host.lines.by_node == {}

    world(tmp_path, play)


def test_agents_hear_that_the_controller_ends(tmp_path: Path) -> None:
    async def play(it: World) -> None:
        agents = [await it.joined("n1"), await it.joined("n2", "2" * 32)]
        it.host.hang_up("it was deposed")
        for agent in agents:
            assert await agent.answer() == cm.ControllerEnds()
            await until(lambda agent=agent: agent.lost)  # type: ignore[misc]
            assert agent.lost == ["it was deposed"]
        assert it.host.lines.by_node == {}

    world(tmp_path, play)


def test_a_controller_begins_without_the_one_before(tmp_path: Path) -> None:
    async def play(it: World) -> None:
        it.host.begin(None)
        assert it.host.controller.resume.gone == set()
        it.host.begin(("n9", "9" * 32))
        assert it.host.controller.resume.gone == {"n9"}

    world(tmp_path, play)


def test_the_same_life_may_join_over_another_link(tmp_path: Path) -> None:
    async def play(it: World) -> None:
        first = await it.joined()
        second = it.agent()
        second.say(it.hello(), it.join())
        await until(lambda: first.lost)
        assert it.alive == ("n1",)
        second.told.clear()
        second.say(cm.StatusAsked(1))
        assert isinstance(await second.answer(), cm.StatusAnswer)

    world(tmp_path, play)


def test_another_life_of_a_node_that_is_alive_is_told_so(tmp_path: Path) -> None:
    async def play(it: World) -> None:
        first = await it.joined()
        second = it.agent("2" * 32)
        second.say(it.hello(life="2" * 32))
        assert isinstance(await second.answer(), cm.NodeWelcome)
        second.say(it.join(life="2" * 32))
        # A save of its rank is under way already: nobody may take it for one on the other node n1.
        save = opened("c9", "n1")
        second.say(save)
        error = await second.refusal()
        assert "Two agents call themselves node n1" in error.message
        second.say(cm.StatusAsked(2))
        assert isinstance(await second.answer(), cm.StatusAnswer)
        assert it.host.controller.groups == {}
        assert not it.host.controller.waiting
        first.say(save)
        await first.show(it.host.store)
        order = await first.answer()
        assert isinstance(order, fx.AdmitGroup), "the first one goes on"

    world(tmp_path, play)


def test_who_does_not_fit_is_refused_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gates, "REFUSED_S", 0.2)

    async def play(it: World) -> None:
        version = cm.CONTROL_VERSION
        cases: list[tuple[Any, type[GroupIOError], tuple[str, ...]]] = [
            (it.hello(version=99), InvalidInput, ("control version 99", f"({version})", "n1")),
            (it.hello(job="other"), InvalidInput, ("'other'", "'job'", it.store_id)),
            (it.hello(store_id="f" * 32), ControllerLost, ("f" * 32, "not here")),
            (it.join(), InvalidInput, ("NodeJoined came before NodeHello",)),
        ]
        for message, kind, words in cases:
            agent = it.agent()
            agent.say(message)
            error = await agent.refusal()
            assert type(error) is kind
            for word in words:
                assert word in error.message
            # A second try over the same link is not heard.
            agent.say(it.hello())
            await until(lambda agent=agent: agent.lost)  # type: ignore[misc]
            assert agent.told == []
        assert it.alive == ()

    world(tmp_path, play)
    refusals = [r.getMessage() for r in caplog.records if r.name == "groupio.controller.gate"]
    assert len(refusals) == 4
    assert all("127.0.0.1" in text for text in refusals)


def test_what_is_no_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "REFUSED_S", 0.1)

    async def play(it: World) -> None:
        agent = it.agent()
        agent.client.send(b"\xc1 no message")
        assert (await agent.refusal()).message
        await until(lambda: agent.lost)
        good = await it.joined()
        good.client.send(b"\xc1 no message")
        await until(lambda: good.lost)
        await until(lambda: not it.alive)

    world(tmp_path, play)


def test_a_silent_link_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "HELLO_WAIT_S", 0.2)

    async def play(it: World) -> None:
        silent, good = it.agent("3" * 32), await it.joined()
        await until(lambda: silent.lost)
        assert it.gate._waiting == {}
        await asyncio.sleep(0.3)
        assert good.lost == [], "who said hello stays"

    world(tmp_path, play)


def report(node: str) -> NodeReport:
    none = np.empty(0, np.int64)
    chunks = ChunkTable(np.empty((0, 32), np.uint8), none, none.astype(np.int32), none)
    return NodeReport(node, (), chunks, ())


def arrived(client: str, node: str) -> ev.ClientArrived:
    return ev.ClientArrived(client, PROCESS, 0, 1, node=node)


@pytest.mark.parametrize(
    "lie",
    [
        lambda it: ev.NodeLost("n2", "2" * 32, "I say so"),
        lambda it: ev.NodeStored(1, "n2", report("n2")),
        lambda it: ev.NodeStored(1, "n1", report("n2")),
        lambda it: ev.NodeHashed(1, "n1", report("n2")),
        lambda it: ev.LinkMeasured(NodeLink("n2", 1.0, 1.0, "n2")),
        lambda it: ev.MemberGone("theirs", process_gone=True),
        lambda it: it.join("n2", "2" * 32),
        lambda it: it.join(clients=(arrived("theirs", "n1"),)),
    ],
    ids=range(8),
)
def test_who_speaks_for_another_is_cut_off(tmp_path: Path, lie: Callable[[World], Any]) -> None:
    async def play(it: World) -> None:
        honest = await it.joined("n2", "2" * 32)
        honest.say(arrived("theirs", "n2"))
        await until(lambda: it.host.lines.clients.get("theirs") == "n2")
        liar = await it.joined()
        message = lie(it)
        form = WireForm((*cm.FROM_NODE, ev.NodeLost))
        liar.client.send(form.encode(message))
        await until(lambda: liar.lost)
        assert it.alive == ("n2",)
        assert honest.lost == []
        assert it.host.lines.clients["theirs"] == "n2"

    world(tmp_path, play)


def test_a_controller_of_its_own_knows_its_job_and_store(tmp_path: Path) -> None:
    async def play(it: World) -> None:
        where: Any = None
        service = Service(Duty(str(tmp_path), "job", "n0", "127.0.0.1", 0, where))
        with pytest.raises(ControllerLost, match="look it up again"):
            service._find(it.hello())
        service._host = it.host
        assert service._find(it.hello()) is it.host
        with pytest.raises(InvalidInput, match=r"means job 'other', .* job 'job'"):
            service._find(it.hello(job="other"))
        with pytest.raises(ControllerLost, match=r"f{32}") as caught:
            service._find(it.hello(store_id="f" * 32))
        assert it.store_id not in caught.value.message, "what else is here is not told"

    world(tmp_path, play)
