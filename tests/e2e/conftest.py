"""Real ranks and a real agent for the end-to-end tests; nothing outlives a test."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from netns_help import Net, usable
from nodes_help import Cluster
from rank_control import RankControl

from groupio import wire
from groupio.agent import process
from groupio.errors import GroupIOError
from groupio.protocol import messages as msg

on_loopback: set[str] = set()
"""Tests whose nodes should have a network of their own, and had none."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where tests of several nodes proved less than they could."""
    if on_loopback:
        terminalreporter.write_line(
            f"{len(on_loopback)} tests of several nodes ran on loopback: network namespaces need "
            "root"
        )


class Node:
    """One runtime directory: its agent, when one runs, and the ranks that use it."""

    def __init__(self, runtime: Path, settings: dict[str, str]) -> None:
        self.paths = process.runtime_paths(str(runtime), _version())
        self.environ = {
            **os.environ,
            "GROUPIO_RUNTIME_DIR": str(runtime),
            "GROUPIO_IDLE_S": "0.3",
            "GROUPIO_MEMORY_BYTES": "512M",
            "GROUPIO_CLOSE_TIMEOUT_S": "10",
            "PYTHONUNBUFFERED": "1",
            **settings,
        }
        self.ranks: list[RankControl] = []

    def rank(self, rank: int, world: int, store: Path | str, **connect: Any) -> RankControl:
        """Start a rank and connect it."""
        return self.start(rank).ask_connected(rank, world, store, connect)

    def start(self, rank: int, prefix: tuple[str, ...] = ()) -> _Starting:
        one = _Starting(rank, self.environ, prefix)
        self.ranks.append(one)
        return one

    def world(self, size: int, store: Path | str, **connect: Any) -> list[RankControl]:
        """A whole job: ``size`` connected ranks."""
        ranks = [self.start(r) for r in range(size)]
        for r, one in enumerate(ranks):
            one.send("connect", store=str(store), rank=r, world_size=size, **connect)
        for one in ranks:
            one.answer()
        return list(ranks)

    def agent_pid(self) -> int | None:
        if not self.paths.alive.exists() or not process.is_alive(self.paths):
            return None
        return process.holder_pid(self.paths)

    def status(self) -> dict[str, Any]:
        channel = wire.Channel(wire.connect(self.paths.socket, timeout_s=5), msg.ToRank)
        try:
            channel.send(msg.Ask(1, "status"))
            return channel.recv(10).message.body
        finally:
            channel.close()

    def log(self) -> str:
        return self.paths.log.read_text(encoding="utf-8") if self.paths.log.exists() else ""

    def until(self, test: Callable[[dict[str, Any]], Any], timeout_s: float = 20.0) -> Any:
        """The first true answer of ``test`` to the agent's status."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = test(self.status())
            if found:
                return found
            time.sleep(0.002)
        raise TimeoutError(f"the agent's status never passed: {self.status()}")

    def kill_agent(self) -> None:
        pid = self.agent_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.wait_agent_gone()

    def wait_agent_gone(self, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.agent_pid() is not None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the agent does not end: {self.log()[-2000:]}")
            time.sleep(0.01)

    def end(self) -> None:
        for one in self.ranks:
            one.end()
        pid = self.agent_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            self.wait_agent_gone()


class _Starting(RankControl):
    def ask_connected(
        self, rank: int, world: int, store: Path | str, connect: dict[str, Any]
    ) -> RankControl:
        self.ask("connect", store=str(store), rank=rank, world_size=world, **connect)
        return self


def _version() -> str:
    import groupio

    return groupio.__version__


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Makes nodes with settings of their own; ends them all."""
    made: list[Node] = []

    def make(**settings: str) -> Node:
        environ = {f"GROUPIO_{name.upper()}": value for name, value in settings.items()}
        made.append(Node(tmp_path / f"runtime{len(made)}", environ))
        return made[-1]

    yield make
    for node in made:
        node.end()
        assert "a defect" not in node.log(), node.log()[-4000:]


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


@pytest.fixture
def make_cluster(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of so many nodes; in network namespaces as root, else on loopback."""
    made: list[Cluster] = []

    def make(size: int, *, loopback: bool = False, **settings: Any) -> Cluster:
        if not usable() and not loopback:
            on_loopback.add(request.node.nodeid)
        net = Net(size) if usable() and not loopback else None
        made.append(Cluster(tmp_path / f"cluster{len(made)}", size, net, **settings))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def raises() -> Callable[[type[GroupIOError], Callable[[], Any]], Any]:
    """The error of this very type that a call raises."""

    def check(kind: type[GroupIOError], call: Callable[[], Any]) -> Any:
        with pytest.raises(kind) as caught:
            call()
        return caught.value

    return check
