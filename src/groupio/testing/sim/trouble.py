"""Injects the faults of processes, nodes and links while they last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupio.testing.sim.engine import Process
from groupio.testing.sim.faults import PROCESSES, STORES
from groupio.testing.sim.store import Segment

if TYPE_CHECKING:
    from groupio.testing.sim.node import Node
    from groupio.testing.sim.world import Sim

LINKS = ("partition", "one_way", "swizzle_clog")
MEDIA = ("bit_rot", "lost_unsynced", "torn_write", "lost_rename")
KINDS = (*PROCESSES, *LINKS, *MEDIA, *STORES)


class Trouble:
    """Strikes between two events, at any step of the protocol, and lets things come back later."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.active = False

    def begin(self) -> None:
        """Strike from now on."""
        self.active = True
        engine = self.sim.engine
        if self.sim.options.chaos_events and any(k in self.sim.options.rows for k in KINDS):
            engine.chaos = self.strike
            self._next()

    def _next(self) -> None:
        engine, mean = self.sim.engine, self.sim.options.chaos_events
        engine.next_chaos = engine.events + 1 + round(self.sim.rng.expovariate(1 / mean))

    def end(self) -> None:
        """Everything comes back and stays."""
        sim = self.sim
        self.active = False
        sim.engine.next_chaos = 1 << 62
        sim.network.join(list(sim.network.blocked))
        sim.network.clogged.clear()
        sim.away_until = 0.0
        for node in sim.nodes.values():
            node.slow, node.liar = 1.0, False
            if node.process.paused:
                sim.engine.resume(node.process)
            node.process.slow = 1.0
            if not node.up:
                node.start()
            node.see(None)
        for rank in sim.ranks.values():
            rank.process.slow = 1.0
            if rank.process.paused:
                sim.engine.resume(rank.process)

    def strike(self) -> None:
        """One fault happens."""
        sim = self.sim
        self._next()
        row = sim.options.pick(sim.rng, KINDS)
        if row:
            getattr(self, f"_{row}")()

    def _later(self, low: float, high: float) -> float:
        """A delay between the two, small ones as likely as large ones."""
        return float(low * (high / low) ** self.sim.rng.random())

    def _some_node(self, *, up: bool = True) -> Node | None:
        nodes = [node for node in self.sim.nodes.values() if node.up == up]
        return self.sim.rng.choice(nodes) if nodes else None

    # -- processes -------------------------------------------------

    def _agent_crash(self) -> None:
        node = self._some_node()
        if node is not None:
            self._crash(node, "agent_crash")

    def _crash(self, node: Node, row: str) -> None:
        self.sim.hit(row)
        node.crash(row)
        self.sim.engine.post(self._later(0.01, 30), None, self._start, node)

    def _start(self, node: Node) -> None:
        if not node.up:
            node.start()

    def _controller_crash(self) -> None:
        if self.sim.controls:
            self._crash(self.sim.controls[-1].node, "controller_crash")

    def _node_loss(self) -> None:
        node = self._some_node()
        if node is not None:
            self.sim.hit("node_loss")
            self.power_off(node, self._later(1, 60))

    def power_off(self, node: Node, away_s: float) -> None:
        """A node loses its power for so long: its processes, and what its disk had not flushed."""
        sim = self.sim
        ranks = [r for r in set(sim.ranks.values()) if r.node is node and r.process.alive]
        node.crash("its power failed", power=False)
        for rank in sorted(ranks, key=lambda r: r.process.name):
            sim.kill(rank)
        for row in sim.disk.cut(sim.rng, [node.name]):
            sim.hit(row)
        sim.oracle.after_cut()
        sim.engine.post(away_s, None, self._start, node)

    def _member_exit(self) -> None:
        sim = self.sim
        if sim.launch is None or not sim.launch.alive:
            return
        rank = sim.rng.choice(sim.launch.alive)
        sim.hit("member_exit")
        draw = sim.rng.random()
        if draw < 0.6:
            sim.kill(rank)
        elif draw < 0.8:
            rank.withdraw()
        elif rank.connected:
            sim.say_gone(rank, process_gone=False)
            sim.engine.post(0.0, rank.process, rank.agent_lost)

    def _pause(self) -> None:
        sim = self.sim
        if sim.rng.random() < 0.3 and sim.launch is not None and sim.launch.alive:
            process = sim.rng.choice(sim.launch.alive).process
        else:
            node = self._some_node()
            if node is None:
                return
            process = node.process
        if process.paused:
            return
        sim.hit("pause")
        sim.trace("pause", process.name)
        process.paused = True
        sim.network.watch(process, lambda: process.paused)
        sim.engine.post(self._later(0.01, 60), None, self._resume, process)

    def _resume(self, process: Process) -> None:
        if process.paused:
            self.sim.trace("resume", process.name)
            self.sim.engine.resume(process)

    def _slow_node(self) -> None:
        node = self._some_node()
        if node is not None:
            self.sim.hit("slow_node")
            node.slow = node.process.slow = self._later(2, 200)
            self.sim.engine.post(self._later(0.1, 60), None, self._fast, node)

    def _fast(self, node: Node) -> None:
        node.slow = node.process.slow = 1.0

    def _clock_jump(self) -> None:
        node = self._some_node()
        if node is not None:
            self.sim.hit("clock_jump")
            node.clock += self.sim.rng.choice((-1e4, -1.0, 1.0, 1e4))

    def _away(self) -> None:
        """The backend is away, often for longer than any deadline."""
        sim = self.sim
        sim.hit("away")
        sim.away_until = max(sim.away_until, sim.engine.now + self._later(5, 1500))

    # -- stores -------------------------------------------------

    def _copied_store(self) -> None:
        """A node takes a copy of the store for the store, from now on and for a while."""
        sim = self.sim
        original = [node for node in sim.nodes.values() if node.copy is None]
        if len(original) > 1:
            node = sim.rng.choice(original)
            sim.hit("copied_store")
            node.see(sim.disk.copy())
            sim.engine.post(self._later(1, 120), None, node.see, None)

    # -- links -------------------------------------------------

    def _partition(self) -> None:
        names = list(self.sim.nodes)
        if len(names) < 2:
            return
        side = set(self.sim.rng.sample(names, self.sim.rng.randint(1, len(names) - 1)))
        pairs = [(a, b) for a in names for b in names if (a in side) != (b in side)]
        self._cut("partition", pairs)

    def _one_way(self) -> None:
        names = list(self.sim.nodes)
        if len(names) < 2:
            return
        side = set(self.sim.rng.sample(names, self.sim.rng.randint(1, len(names) - 1)))
        self._cut("one_way", [(a, b) for a in side for b in names if b not in side])

    def _cut(self, row: str, pairs: list[tuple[str, str]]) -> None:
        sim = self.sim
        sim.hit(row)
        pairs = sorted(pairs)
        sim.network.cut(pairs)
        sim.engine.post(self._later(0.05, 40), None, sim.network.join, pairs)

    def _swizzle_clog(self) -> None:
        """Connections are clogged one after the other and freed in another order."""
        sim = self.sim
        names = list(sim.nodes)
        if len(names) < 2:
            return
        sim.hit("swizzle_clog")
        for a in names:
            for b in names:
                if a != b and sim.rng.random() < 0.5:
                    sim.network.clogged[a, b] = sim.engine.now + self._later(0.05, 4)

    # -- media -------------------------------------------------

    def _bit_rot(self) -> None:
        sim = self.sim
        if sim.rng.random() < 0.3:
            node = self._some_node()
            if node is not None:
                sim.hit("bit_rot")
                node.liar = not node.liar
            return
        files = [
            (name, file)
            for name, file in sorted(sim.disk.folders["segments"].items())
            if isinstance(file.content, Segment) and file.content.digests and file.synced
        ]
        if files:
            name, file = sim.rng.choice(files)
            victim = sim.rng.choice(file.content.digests)
            file.content.bad.add(victim)
            sim.oracle.rotted.add((name, victim))
            sim.hit("bit_rot")

    def _lost_unsynced(self) -> None:
        self._power_off_one({file.host for file in self.sim.disk.unsynced.values()})

    def _lost_rename(self) -> None:
        pending = self.sim.disk.pending.values()
        self._power_off_one({change[0] for changes in pending for change in changes})

    _torn_write = _lost_unsynced

    def _power_off_one(self, hosts: set[str]) -> None:
        """A node with something to lose loses its power; when there is none, wait for one."""
        sim = self.sim
        nodes = [node for node in sim.nodes.values() if node.up and node.name in hosts]
        if nodes and (sim.steps() != ["idle"] or sim.rng.random() < 0.02):
            self.power_off(self.sim.rng.choice(nodes), self._later(1, 60))
        else:
            self.sim.engine.next_chaos = self.sim.engine.events + 5
