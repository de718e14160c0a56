"""Jobs of several nodes: an agent and ranks on each, in network namespaces or on loopback.

Node ``i`` is called ``n<i>`` and has a runtime directory, an address and test holds of its own.
Ranks are numbered node by node.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from netns_help import Net
from rank_control import RankControl

import groupio
from groupio import wire
from groupio.agent import process
from groupio.protocol import messages as msg

HERE = Path(__file__).parent
TOKEN = "7f" * 32
READY_S = 40.0


class RankOf(RankControl):
    """A rank process on a node."""

    def __init__(self, node: MachineNode, rank: int) -> None:
        super().__init__(rank, node.environ, node.prefix, node.output)
        self.node = node

    def logs(self) -> str:
        return self.node.cluster.logs()


class MachineNode:
    """One node: its agent, which the test starts and kills, and its ranks."""

    script = "agent_process.py"

    def __init__(self, cluster: Cluster, number: int, settings: dict[str, str]) -> None:
        self.cluster = cluster
        self.number = number
        self.name = f"n{number}"
        self.store = cluster.store
        base = cluster.folder / self.name
        self.holds = base / "holds"
        self.holds.mkdir(parents=True)
        (base / "run").mkdir(mode=0o700)
        self.paths = process.runtime_paths(str(base / "run"), groupio.__version__)
        self.prefix = () if cluster.net is None else cluster.net.prefix(number)
        self.output = (base / "output").open("ab")
        listen = "127.0.0.1" if cluster.net is None else cluster.net.address(number)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GROUPIO_")}
        self.environ = {
            **clean,
            "GROUPIO_NODE": self.name,
            "GROUPIO_RUNTIME_DIR": str(base / "run"),
            "GROUPIO_LISTEN": listen,
            "GROUPIO_TOKEN": TOKEN,
            "GROUPIO_CONTROLLER": "store",
            "GROUPIO_MEMORY_BYTES": "256M",
            "GROUPIO_IDLE_S": "30",
            "GROUPIO_CLOSE_TIMEOUT_S": "10",
            "GROUPIO_LOG_LEVEL": "debug",
            "TEST_HOLDS": str(self.holds),
            "TEST_HURRY": "1" if cluster.hurry else "",
            "TEST_PATIENT": "1" if cluster.patient else "",
            "TEST_EQUAL_LINKS": "1" if cluster.equal_links else "",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **settings,
        }
        self.agent: subprocess.Popen[bytes] | None = None
        self.ranks: list[RankOf] = []

    # -- the agent --------------------------------------------------------------------------------

    def start_agent(self) -> MachineNode:
        """Start the agent; :meth:`wait_agent` waits until it answers."""
        self.agent = subprocess.Popen(
            [*self.prefix, sys.executable, str(HERE / self.script)],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env=self.environ,
        )
        return self

    def wait_agent(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            assert self.agent is not None
            assert self.agent.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            with contextlib.suppress(OSError):
                wire.connect(self.paths.socket, timeout_s=1).close()
                return
            time.sleep(0.02)

    def agent_pid(self) -> int | None:
        """The process that is the node's agent now, whoever started it."""
        if not self.paths.alive.exists() or not process.is_alive(self.paths):
            return None
        return process.holder_pid(self.paths)

    def signal_agent(self, number: int) -> None:
        pid = self.agent_pid()
        assert pid is not None
        os.kill(pid, number)

    def drain_agent(self) -> None:
        """End the agent when it has nothing in flight any more."""
        self.signal_agent(signal.SIGTERM)
        assert self.agent is not None
        assert self.agent.wait(20) == 0, self.log()

    def kill_agent(self) -> None:
        """End the agent as a crash does."""
        self.signal_agent(signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait(10)
        deadline = time.monotonic() + 10
        while self.agent_pid() is not None and time.monotonic() < deadline:
            time.sleep(0.01)

    @contextlib.contextmanager
    def stopped_agent(self, seconds: float) -> Iterator[None]:
        """The agent stands still for so long; the block runs meanwhile."""
        began = time.monotonic()
        self.signal_agent(signal.SIGSTOP)
        try:
            yield
            time.sleep(max(0.0, began + seconds - time.monotonic()))
        finally:
            self.signal_agent(signal.SIGCONT)

    def lose(self) -> None:
        """End everything on the node at once, as a power cut does."""
        self.kill_agent()
        for one in self.ranks:
            one.kill()

    def status(self) -> dict[str, Any]:
        channel = wire.Channel(wire.connect(self.paths.socket, timeout_s=5), msg.ToRank)
        try:
            channel.send(msg.Ask(1, "status"))
            return dict(channel.recv(10).message.body)
        finally:
            channel.close()

    def log(self) -> str:
        """What the agents of this node logged."""
        texts = [
            path.read_text(encoding="utf-8", errors="replace")
            for path in (self.paths.log, Path(self.output.name))
            if path.exists()
        ]
        return "\n".join(texts)

    def rules(self) -> bool:
        """The last controller that this node heard of is its own."""
        told = [line for line in self.log().splitlines() if "controller, term" in line]
        heard = [line for line in self.log().splitlines() if "controller at" in line]
        return bool(told) and (not heard or told[-1][:23] > heard[-1][:23])

    # -- holds ------------------------------------------------------------------------------------

    def hold(self, point: str) -> None:
        """Whoever comes to the point waits there from now on."""
        (self.holds / f"{point}.reached").unlink(missing_ok=True)
        (self.holds / point).touch()

    def let(self, point: str) -> None:
        (self.holds / point).unlink(missing_ok=True)

    def write_slowly(self, bytes_per_s: float) -> None:
        (self.holds / "slow").write_text(str(bytes_per_s))

    def await_hold(self, point: str, timeout_s: float = 30.0) -> None:
        until(lambda: (self.holds / f"{point}.reached").exists(), timeout_s, self.cluster.logs)

    # -- the end ----------------------------------------------------------------------------------

    def end_ranks(self) -> None:
        for one in self.ranks:
            one.end()
        self.ranks = []

    def end(self) -> None:
        for path in self.holds.iterdir():
            path.unlink()
        pid = self.agent_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
        self.end_ranks()
        if self.agent is not None:
            try:
                self.agent.wait(10)
            except subprocess.TimeoutExpired:
                self.agent.kill()
                self.agent.wait(10)
        deadline = time.monotonic() + 10
        while (pid := self.agent_pid()) is not None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.output.close()


MIB = 1 << 20


def items(rank: int, epoch: int) -> dict[str, Any]:
    """What a rank saves: 2 MiB that all ranks have, and as much of its own, new each epoch."""
    return {
        "shared": {"seed": 7, "bytes": 2 * MIB},
        "own": {"seed": 1000 * epoch + rank, "bytes": 2 * MIB + 3},
    }


def call_save(ranks: list[RankOf], epoch: int, **more: Any) -> None:
    """All of ``ranks`` call save; nothing waits."""
    for one in ranks:
        one.send("save", epoch=epoch, items=items(one.rank, epoch), **{"deadline_s": 40, **more})


def released(ranks: list[RankOf]) -> None:
    """Their calls return; errors come with :func:`outcomes`."""
    for one in ranks:
        one.answer()


def outcomes(ranks: list[RankOf], epoch: int, timeout_s: float = 60) -> list[Any]:
    """What became of the save on each rank: its answer or its typed error."""
    for one in ranks:
        one.send("wait", epoch=epoch, timeout_s=timeout_s)
    return [one.outcome(timeout_s + 10) for one in ranks]


def save(ranks: list[RankOf], epoch: int, **more: Any) -> list[Any]:
    """All of ``ranks`` save ``epoch``, until it is decided."""
    call_save(ranks, epoch, **more)
    released(ranks)
    return outcomes(ranks, epoch)


def committed(found: list[Any]) -> bool:
    """Every rank was told DURABLE."""
    return all(isinstance(one, dict) and one["times"]["durable"] for one in found)


def restored(by: RankOf, world: int, epoch: int) -> None:
    """A rank gets every member's bytes of the epoch, equal to what was saved."""
    for member in range(world):
        by.ask("load", epoch=epoch, member=member, expect=items(member, epoch))


class Cluster:
    """Nodes that share a store path and, where there is one, a network."""

    def __init__(
        self,
        folder: Path,
        size: int,
        net: Net | None,
        *,
        hurry: bool = False,
        patient: bool = False,
        equal_links: bool = False,
        **settings: str,
    ) -> None:
        """``settings`` of all agents and ranks, such as ``replicas="2"``.

        With ``hurry`` agents give others up sooner than real ones do; with ``patient`` silence
        tells them nothing. With ``equal_links`` plans
        take all links to be equal, whatever a loaded machine makes of them.
        """
        self.folder = folder
        self.net = net
        self.hurry = hurry
        self.patient = patient
        self.equal_links = equal_links
        self.store = folder / "store"
        environ = {f"GROUPIO_{name.upper()}": value for name, value in settings.items()}
        self.nodes = [MachineNode(self, i, environ) for i in range(size)]

    def up(self) -> Cluster:
        """Start all agents."""
        for node in self.nodes:
            node.start_agent()
        for node in self.nodes:
            node.wait_agent()
        return self

    def connect(self, per_node: int = 1, nodes: Sequence[int] | None = None) -> list[RankOf]:
        """Start a job: ``per_node`` connected ranks on each node, or on some of them at first."""
        world = per_node * len(self.nodes)
        made = []
        for node in self.nodes:
            if nodes is None or node.number in nodes:
                first = node.number * per_node
                node.ranks += [RankOf(node, first + i) for i in range(per_node)]
                made += node.ranks[-per_node:]
        for one in made:
            one.send("connect", store=str(one.node.store), rank=one.rank, world_size=world)
        for one in made:
            one.answer(READY_S)
        return made

    @property
    def ruler(self) -> MachineNode:
        """The node whose agent has the controller."""
        until(lambda: any(n.rules() for n in self.nodes if n.agent_pid()), 20, self.logs)
        return next(n for n in self.nodes if n.rules() and n.agent_pid())

    @property
    def others(self) -> list[MachineNode]:
        """The living nodes that follow the controller of another one."""
        ruler = self.ruler
        return [n for n in self.nodes if n is not ruler and n.agent_pid()]

    def logs(self) -> str:
        """The end of each node's log, for a test that failed."""
        return "\n".join(f"---- {n.name}\n{n.log()[-2500:]}" for n in self.nodes)

    def close(self) -> None:
        """End all; a defect in any agent fails the test."""
        for node in self.nodes:
            node.end()
        if self.net is not None:
            self.net.close()
        for node in self.nodes:
            log = node.log()
            for sign in ("a defect", "Traceback", "internal error"):
                assert sign not in log, f"{node.name}: {log[-6000:]}"


def until(
    test: Callable[[], Any], timeout_s: float = 20.0, why: Callable[[], str] = lambda: ""
) -> Any:
    """The first true answer of ``test``."""
    deadline = time.monotonic() + timeout_s
    while not (found := test()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"it never came true\n{why()}")
        time.sleep(0.01)
    return found


def bytes_from(node: MachineNode, source: str) -> int:
    """What the node's agent read for its ranks from the store, from peers or from memory."""
    channel = wire.Channel(wire.connect(node.paths.socket, timeout_s=5), msg.ToRank)
    try:
        channel.send(msg.Ask(1, "metrics"))
        text = channel.recv(10).message.body["text"]
    finally:
        channel.close()
    found = re.search(rf'groupio_read_bytes_total{{source="{source}"}} (\S+)', text)
    return int(float(found.group(1))) if found else 0


def total(cluster: Cluster, source: str) -> int:
    """The same of all agents that live."""
    return sum(bytes_from(node, source) for node in cluster.nodes if node.agent_pid())
