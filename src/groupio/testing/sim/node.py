"""A node of the simulated cluster: its agent process, the memory it holds, and its connections."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from groupio.controller.messages import FROM_SWARM
from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Level, NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.agent import AgentMachine
from groupio.protocol.ledger import Ledger, Use
from groupio.testing.node_invariants import Arena, ArenaStep
from groupio.testing.sim.content import Place
from groupio.testing.sim.disk import Disk
from groupio.testing.sim.engine import Process, Violated, brief
from groupio.testing.sim.flush import FlushJob
from groupio.testing.sim.following import Follower
from groupio.testing.sim.reading import Asks, Reads, Took
from groupio.testing.sim.store import Marks, Procedure, Records, Steps

if TYPE_CHECKING:
    from groupio.testing.sim.control import Control
    from groupio.testing.sim.ranks import Rank
    from groupio.testing.sim.world import Sim

TO_CONTROLLER = (ev.ClientArrived, ev.MemberOpened, ev.MemberFailed)
RATE = 1e9


class Node:
    """A machine with at most one agent process at a time."""

    def __init__(self, sim: Sim, name: str, domain: str) -> None:
        self.sim = sim
        self.name = name
        self.domain = domain
        self.clock = 0.0
        """How far the node's clock is off, in seconds."""
        self.slow = 1.0
        self.lives = 0
        self.process = Process(f"{name}.0")
        self.process.alive = False
        self.liar = False
        """It serves wrong bytes."""
        self.copy: Disk | None = None
        """The copy that it takes for the store."""

    # -- the store -------------------------------------------------

    @property
    def disk(self) -> Disk:
        """Where the node's path of the store leads to."""
        return self.sim.disk if self.copy is None else self.copy

    def see(self, copy: Disk | None) -> None:
        """Take a copy for the store from now on, or see the store itself again (None)."""
        if copy is self.copy:
            return
        self.copy = copy
        self.sim.loads.spoil()
        self.sim.trace(self.name, "sees the store" if copy is None else "sees a copy of the store")
        if self.up and not self.sim.options.local:
            # Whoever opens the store anew by its path says so before anything that it does there.
            self.follower.report(ev.NodeReopened(self.name))

    def _show(self, order: fx.ShowStore) -> Procedure:
        """What the node sees of the controller's mark; where it does, it leaves one of its own."""
        marks = Marks(self.sim, self.disk, self.name)
        found = yield from marks.find(order.name)
        if not found:
            return ev.StoreShown(order.node, order.name)
        own, content = yield from marks.leave()
        return ev.StoreShown(order.node, order.name, found, own, content)

    # -- life -------------------------------------------------

    @property
    def up(self) -> bool:
        """An agent runs here and answers."""
        return self.process.alive

    @property
    def host(self) -> str:
        """Its name, as those at the other end of a connection call it."""
        return self.name

    def start(self) -> None:
        """Start an agent, with empty memory."""
        sim = self.sim
        self.lives += 1
        self.life = f"{self.lives:032x}"
        self.process = Process(f"{self.name}.{self.lives}", self.slow)
        self.machine = AgentMachine(self.name, Ledger(sim.options.budget))
        self.jobs: dict[int, FlushJob] = {}
        self.arenas: set[int] = set()
        self.memory: dict[tuple[int, int], tuple[bytes, ...]] = {}
        """Chunks in memory by arena and offset: those of a wave, or replicas of other nodes."""
        self.wrong: set[bytes] = set()
        """Chunks of which it has taken wrong bytes for right."""
        self.clients: dict[str, ev.ClientArrived] = {}
        self.seen: set[str] = set()
        """Every client of this life; the ends of their processes are watched for ever."""
        self.opens: dict[tuple[str, int], ev.MemberOpened] = {}
        self.steps = Steps(sim, self.process, self.name)
        self.records = Records(sim, self.name)
        self.hosted: Control | None = None
        self._known: list[dict[bytes, Place]] = []
        self.follower = Follower(sim, self)
        self.reads = Reads(self)
        self.grants: dict[tuple[str, int, int], ArenaStep] = {}
        self.arena_steps: list[ArenaStep] = []
        sim.oracle.arenas.append(self.arena_steps)
        self.learn()
        self.follower.begin()

    def crash(self, why: str, *, power: bool = True) -> None:
        """The agent process ends at once; what it held in memory is gone.

        Without ``power`` nothing on the node says so to others.
        """
        if not self.process.alive:
            return
        sim = self.sim
        self.process.alive = False
        if self.hosted is not None:
            self.hosted.stop()
        sim.loads.spoil()
        sim.network.process_ended(self.process, silent=not power)
        for rank in sim.ranks_on(self):
            sim.engine.post(sim.rng.random() * 0.01, rank.process, rank.agent_lost)
        for peer in sim.nodes.values():
            if peer is not self and peer.up:
                sim.engine.post(0.01 * sim.rng.random(), peer.process, peer.reads.peer_ended, self)
        sim.oracle.agent_lost(self)
        sim.trace(self.name, f"the agent ends: {why}")

    def address(self) -> str:
        """Where peers find this life of the agent."""
        return f"{self.name}/{self.lives}"

    def link(self) -> NodeLink:
        """What a plan may assume of the node's links."""
        return NodeLink(self.name, RATE / self.slow, RATE / self.slow, self.domain)

    # -- ranks -------------------------------------------------

    def from_rank(self, rank: Rank, client: str, event: Any) -> None:
        """A message of a rank, or the end of its connection, arrives."""
        if self.sim.engine.tracing:
            self.sim.trace(self.name, f"<= {client} {brief(event)}")
        match event:
            case ev.WaveCopied(save_id=save_id, wave=wave):
                step = self.grants.pop((client, save_id, wave), None)
                if step is not None:
                    self.arena_steps.append(replace(step, what=Arena.COPIED))
            case ev.WriterStopped(save_id=save_id):
                self.arena_steps.append(ArenaStep(Arena.STOPPED, (client, save_id)))
            case Asks() | Took():
                self.reads.ask(client, event)
                return
            case ev.ClientArrived():
                self.clients[client] = event
                self.seen.add(client)
            case ev.MemberOpened():
                self.opens[client, event.save_id] = event
                if (known := self.clients.get(client)) is not None:
                    self.clients[client] = structs.replace(known, has_saved=True)
            case ev.MemberGone():
                self.reads.client_left(client)
                if event.process_gone:
                    for save_id in self.sim.ranks[client].saves:
                        self.arena_steps.append(ArenaStep(Arena.STOPPED, (client, save_id)))
                self.clients.pop(client, None)
                for key in [key for key in self.opens if key[0] == client]:
                    del self.opens[key]
            case _:
                pass
        if isinstance(event, (*TO_CONTROLLER, ev.MemberGone)):
            self.follower.report(event)
        if not isinstance(event, TO_CONTROLLER):
            self.feed(event)

    def written(self, rank: Rank, grant: fx.GrantLease, chunks: tuple[bytes, ...]) -> None:
        """A rank has copied a wave into its arena."""
        use = self.use_of(grant.arena, grant.offset)
        if use not in (Use.LEASED, Use.QUARANTINED):
            raise Violated(12, f"{rank.name} writes to {use} memory of {self.name}")
        self.memory[grant.arena, grant.offset] = chunks

    def use_of(self, arena: int, offset: int) -> Use | None:
        """What the extent that starts there is for, None when there is none."""
        for extent in self.machine.ledger.extents:
            if extent.arena == arena and extent.offset == offset:
                return Use(extent.use)
        return None

    # -- the machine -------------------------------------------------

    def feed(self, event: Any) -> None:
        """Give an event or an order to the machine and execute its effects."""
        for effect in self.machine.handle(event):
            self._execute(effect)
        ledger = self.machine.ledger
        if ledger.total() > ledger.budget:
            raise Violated(11, f"{self.name} holds {ledger.total()} bytes of {ledger.budget}")

    def process_soon(self, event: Any) -> None:
        """Give an event to the machine once the present one is done with."""
        self.sim.engine.post(0.0, self.process, self.feed, event)

    def _execute(self, effect: Any) -> None:
        if self.sim.engine.tracing:
            self.sim.trace(self.name, brief(effect))
        match effect:
            case fx.Report(event=event):
                self.follower.report(event)
            case fx.GrantLease(client=client):
                self._note_grant(effect)
                if self.memory.pop((effect.arena, effect.offset), None) is not None:
                    self.reads.staging_changed()
                self.to_rank(client, "granted", effect)
            case fx.StartJob(group=group):
                planned = getattr(effect, "planned", False)
                self.jobs[group] = FlushJob(
                    self, group, effect.key, store=effect.store, planned=planned
                )
            case fx.AddWave(group=group):
                self.jobs[group].add(effect)
            case fx.FinishJob(group=group):
                self.jobs[group].finish()
            case fx.RepeatJob(group=group):
                self.jobs[group].repeat()
            case fx.RunOrder(group=group):
                self.jobs[group].order(effect)
            case fx.CancelJob(group=group):
                self.jobs[group].cancel()
            case fx.EndJob(group=group):
                self._end_job(self.jobs.pop(group), delete=effect.delete_segments)
            case fx.OpenArena(arena=arena):
                self.arenas.add(arena)
            case fx.CloseArena(arena=arena):
                self.arenas.discard(arena)
                for place in [place for place in self.memory if place[0] == arena]:
                    del self.memory[place]
                self.reads.staging_changed()
            case fx.Punch(arena=arena, offset=offset) | fx.DropContent(arena=arena, offset=offset):
                end = offset + effect.length
                for place in list(self.memory):
                    if place[0] == arena and offset <= place[1] < end:
                        del self.memory[place]
                self.reads.staging_changed()
            case fx.Populate(client=client):
                self.to_rank(client, "populated", effect)
            case fx.KeepContent():
                pass
            case _:
                self._rename_job(effect)

    def _note_grant(self, grant: fx.GrantLease) -> None:
        length = next(
            extent.length
            for extent in self.machine.ledger.extents
            if (extent.arena, extent.offset) == (grant.arena, grant.offset)
        )
        writer = (grant.client, grant.save_id)
        step = ArenaStep(Arena.GRANTED, writer, grant.arena, grant.offset, length)
        self.grants[grant.client, grant.save_id, grant.number] = step
        self.arena_steps.append(step)

    def _rename_job(self, effect: Any) -> None:
        old, new = effect.old, effect.new
        job = self.jobs.pop(old)
        job.group = new
        self.jobs[new] = job

    def _end_job(self, job: FlushJob, *, delete: bool) -> None:
        if not job.ended and not job.planned:
            raise Violated(12, f"{self.name}: the job of group {job.group} ends while it works")
        if job.running:
            raise Violated(12, f"{self.name}: the job of group {job.group} ends while it works")
        job.ended = True
        if delete:
            for name in job.names:
                self.disk.unlink(self.name, "segments", name)

    def to_rank(self, client: str, what: str, effect: Any) -> None:
        """Tell a rank something, after what it was told before."""
        rank = self.sim.ranks.get(client)
        if rank is None or not rank.connected or rank.name != client:
            return
        at = max(rank.told_at, self.sim.engine.now + self.sim.hop(self.process))
        rank.told_at = at
        self.sim.engine.post_at(at, rank.process, self._hand_over, rank, client, what, effect)

    def _hand_over(self, rank: Rank, client: str, what: str, effect: Any) -> None:
        if rank.connected and rank.name == client:
            getattr(rank, what)(effect)

    # -- orders -------------------------------------------------

    def execute(self, effect: Any) -> None:
        """Do what a controller orders."""
        match effect:
            case fx.TellReached(seat=seat):
                if effect.level is Level.DURABLE:
                    self.opens.pop((seat.client, seat.save_id), None)
                self.to_rank(seat.client, "reached", effect)
            case fx.TellFailed(seat=seat):
                self.opens.pop((seat.client, seat.save_id), None)
                self.to_rank(seat.client, "failed", effect)
                self.machine.forget(seat.client, seat.save_id)
            case fx.TellUnreachable():
                self.sim.oracle.unreachable(effect)
            case fx.ShowStore(node=node, name=name):

                def shown(answer: Any, error: GroupIOError | None) -> None:
                    failed = ev.StoreShown(node, name, error=error)
                    self.follower.report(answer if error is None else failed)

                self.steps.start(self._show(effect), shown)
            case _ if isinstance(effect, FROM_SWARM):
                self.reads.take(effect)
            case _:
                self.feed(effect)
                if isinstance(effect, fx.CloseGroup):
                    self.learn()

    # -- what peers and jobs ask -------------------------------------------------

    def learn(self) -> None:
        """Look which chunks the newest epochs in the store have."""
        if self.copy is not None:
            return
        self._known = self.sim.newest_chunks()

    def known(self, name: bytes) -> Place | None:
        """Where an older epoch has this chunk."""
        for table in self._known:
            if name in table:
                return table[name]
        return None

    def fits(self, run: Any, copies: int) -> bool:
        """There is room for one more replica."""
        chunk = self.sim.options.chunk_bytes
        return bool(copies < sum(length // chunk for _, length in run.room))

    def keep(self, run: Any, names: list[bytes], copies: Collection[bytes]) -> None:
        """Put replicas into memory; ``copies`` are all that the group has there."""
        if not names:
            return
        size = self.sim.options.chunk_bytes * len(names)
        room = sum(length for _, length in run.room)
        if size > room:
            raise Violated(11, f"{self.name}: replicas of {size} bytes for {room}")
        if any(self.use_of(run.arena, offset) is not Use.LEASED for offset, _ in run.room):
            raise Violated(12, f"{self.name}: replicas go to memory that is not leased")
        there = {at: self.memory.get((run.arena, at), ()) for at, _ in run.room}
        # What lies there of an earlier group is overwritten.
        there = {at: tuple(n for n in old if n in copies) for at, old in there.items()}
        here = {name for old in there.values() for name in old}
        left = [name for name in dict.fromkeys(names) if name not in here]
        for offset, length in run.room:
            fits = max(length // self.sim.options.chunk_bytes - len(there[offset]), 0)
            self.memory[run.arena, offset] = (*there[offset], *left[:fits])
            del left[:fits]
        if left:
            raise Violated(11, f"{self.name}: {len(left)} replicas find no room any more")

    def holds(self, name: bytes) -> bool:
        """The chunk is in memory here."""
        return any(name in chunks for chunks in self.memory.values())

    def pull(self, source: str, address: str, name: bytes) -> str:
        """Ask a peer for a chunk: right, wrong, missing or silent."""
        sim = self.sim
        peer = sim.nodes.get(source)
        if peer is None or not peer.up or peer.process.paused or peer.address() != address:
            return "silent"
        if not (sim.network.reaches(source, self.name) and sim.network.reaches(self.name, source)):
            return "silent"
        if not peer.holds(name):
            return "missing"
        return "wrong" if peer.liar or name in peer.wrong else "right"

    def held_key(self, key: DecisionKey) -> bool:
        """A group of this key is in memory here."""
        return any(group.order.key == key for group in self.machine.groups.values())
