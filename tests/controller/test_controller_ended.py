"""A controller whose rule has ended: nothing that comes late does anything."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from groupio.agent.identity import Writer
from groupio.controller import messages as cm
from groupio.controller.host import Host
from groupio.controller.lines import Line, Lines
from groupio.controller.store import JobStore
from groupio.model import NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev


class Around:
    """The process: steps in order, in the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.steps: deque[Callable[[], None]] = deque()
        self.running = False
        self.ordered: list[Any] = []
        self.opened = 0
        self.posted = 0

    def do(self, step: Callable[[], None]) -> None:
        self.steps.append(step)
        if self.running:
            return
        self.running = True
        try:
            while self.steps:
                self.steps.popleft()()
        finally:
            self.running = False

    def post(self, step: Callable[[], None]) -> None:
        def counted() -> None:
            self.posted += 1
            self.do(step)

        self.loop.call_soon_threadsafe(counted)

    def order(self, host: Host, effect: Any) -> None:
        self.ordered.append(effect)

    def store_opened(self, host: Host) -> None:
        self.opened += 1


class Peer:
    def __init__(self) -> None:
        self.closed: list[str] = []
        self.sent: list[bytes] = []

    def send(self, payload: bytes) -> None:
        self.sent.append(payload)

    def close(self, reason: str = "") -> None:
        self.closed.append(reason)


def line(host: Host, node: str, life: str) -> tuple[Line, Peer]:
    peer = Peer()
    hello = cm.NodeHello(cm.CONTROL_VERSION, "1", node, life, "job", "/s", "5" * 32)
    return Line(host.lines, peer, hello), peer  # type: ignore[arg-type]


def joined(node: str, life: str, store_id: str) -> ev.NodeJoined:
    return ev.NodeJoined(node, life, "tcp://h:1", NodeLink(node, 1e9, 1e9, node), store_id)


def made(path: Path, around: Around) -> Host:
    store = JobStore(str(path / "store"), "job", "n0", Writer.of_this_process())
    store.follow(create=True)
    return Host(store.path, store, around, count(1), Lines("n0"), 3)  # type: ignore[arg-type]


def test_an_answer_of_the_store_that_comes_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, free = threading.Event(), threading.Event()
    opening = JobStore.open

    def slow(*arguments: Any, **more: Any) -> Any:
        reached.set()
        assert free.wait(10)
        return opening(*arguments, **more)

    monkeypatch.setattr(JobStore, "open", slow)

    async def play() -> None:
        around = Around()
        host = made(tmp_path, around)
        host.open_store()
        assert await asyncio.to_thread(reached.wait, 10)
        host.hang_up("it was deposed")
        free.set()
        await asyncio.to_thread(host.end)
        while not around.posted:
            await asyncio.sleep(0.005)
        assert not host.controller.store_open
        assert around.ordered == []
        # Nothing that it is told has an effect any more: its thread has ended.
        host.open_store()
        host.tell(ev.MemberGone("c", process_gone=True))
        host._fire("g1")
        assert host.timers == {}

    asyncio.run(play())


def test_all_lines_end_with_it_and_later_ones_too(tmp_path: Path) -> None:
    async def play() -> None:
        around = Around()
        host = made(tmp_path, around)
        store_id = host.store.store_id
        one, peer = line(host, "n1", "1" * 32)
        host.joined(one, joined("n1", "1" * 32, store_id))
        twin, twins_peer = line(host, "n1", "2" * 32)
        host.joined(twin, joined("n1", "2" * 32, store_id))
        assert host.controller.nodes.alive == ("n1",)
        assert twins_peer.sent, "it was told why"
        host._execute(fx.StartTimer("g1", 60.0))
        timer = host.timers["g1"]
        host.hang_up("it was deposed")
        assert timer.cancelled()
        assert peer.closed == ["it was deposed"]
        assert twins_peer.closed == ["it was deposed"]
        # One that had said Hello and not joined yet would follow it for ever.
        late, lates_peer = line(host, "n2", "3" * 32)
        host.joined(late, joined("n2", "3" * 32, store_id))
        assert lates_peer.closed == ["the controller has ended"]
        assert host.controller.nodes.alive == ("n1",)
        assert host.lines.by_node == {}
        await asyncio.to_thread(host.end)

    asyncio.run(play())
