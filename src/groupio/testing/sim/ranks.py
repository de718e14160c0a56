"""Training processes and their launcher: what is outside of groupio.

A launch starts all ranks; each trains and saves, epoch after epoch. When one dies the launcher
notices after a while, ends the others and starts all again after the newest epoch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groupio.errors import AgentLost, GroupAborted, GroupIOError, Outcome
from groupio.model import DecisionKey, Level
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.testing.sim.content import Member, member
from groupio.testing.sim.engine import Process, Violated
from groupio.testing.sim.loading import Loading, newest
from groupio.testing.sim.reading import Pieces

if TYPE_CHECKING:
    from groupio.testing.sim.node import Node
    from groupio.testing.sim.world import Sim

ORDER = {Level.STAGED: 1, Level.REPLICATED: 2, Level.REMOTE: 2, Level.DURABLE: 3}
"""What is told later is not lower; REPLICATED and REMOTE may come in any order."""


@dataclass(slots=True, eq=False)
class Save:
    """One save of a rank, and what it was told."""

    save_id: int
    epoch: int
    member: Member
    launch: int
    world: int
    opened: ev.MemberOpened
    key: DecisionKey | None = None
    grants: deque[fx.GrantLease] = field(default_factory=deque)
    copied: bool = False
    levels: list[Level] = field(default_factory=list)
    error: GroupIOError | None = None
    withdrawn: bool = False
    lost: bool = False
    """Its agent is gone: nobody will tell it any more."""
    at: float = 0.0

    @property
    def over(self) -> bool:
        """Nothing is told of it any more."""
        return self.error is not None or self.lost or Level.DURABLE in self.levels

    @property
    def released(self) -> bool:
        """The rank goes on training."""
        return self.copied or self.over


class Rank:
    """A client in its process; it copies wave after wave and answers failures."""

    def __init__(self, sim: Sim, process: Process, pid: int, launch: Launch, rank: int) -> None:
        self.sim = sim
        self.process = process
        self.identity = ev.Process(pid, 1)
        self.launch = launch
        self.rank = rank
        self.node: Node = launch.placement[rank]
        self.name = ""
        self.saves: dict[int, Save] = {}
        self.copying: fx.GrantLease | None = None
        self.next_epoch = launch.first_epoch
        self.connected = False
        self.last_at = 0.0
        """When the last message to the agent arrives; the socket keeps the order."""
        self.told_at = 0.0
        self.loading = Loading(self)
        self._began = False
        self._agent = 0
        """The life of the agent to which it is connected."""
        self._gave_up: list[int] = []
        self._repeat = 0
        self._save_ids = 0

    # -- the socket -------------------------------------------------

    def send(self, event: Any) -> None:
        """Send to the agent of the node; lost when there is none."""
        if self.connected:
            at = max(self.last_at, self.sim.engine.now + self.sim.hop(self.process))
            self.last_at = at
            node = self.node
            self.sim.engine.post_at(at, node.process, node.from_rank, self, self.name, event)

    def connect(self) -> None:
        """Connect to the node's agent, or try again in a while when there is none."""
        if self.connected or not self.process.alive:
            return
        if not self.node.up:
            self.sim.engine.post(1.0, self.process, self.connect)
            return
        self.name = self.sim.new_name(self)
        self.connected = True
        self._agent = self.node.lives
        gave_up, self._gave_up = tuple(self._gave_up), []
        self.send(
            ev.ClientArrived(
                self.name,
                self.identity,
                self.rank,
                self.launch.world,
                "job",
                launch_id=str(self.launch.number),
                gave_up=gave_up,
                has_saved=bool(self.saves),
            )
        )
        if self.launch.loads is not None and not self._began:
            self._began = True
            self.loading.begin(self.launch.loads, f"start {self.launch.number}")
        elif not self._busy:
            self.train()

    def agent_lost(self) -> None:
        """The socket broke: saves that were not released are failed, the rank connects again."""
        self.connected = False
        busy = self._busy
        for save in self.saves.values():
            if not save.over:
                if not save.copied:
                    self._gave_up.append(save.epoch)
                save.lost = True
                save.grants.clear()
        self.copying = None
        self.loading.broken()
        self.sim.engine.post(0.05, self.process, self.connect)
        if busy:
            self._next()

    @property
    def _busy(self) -> bool:
        return any(not save.released for save in self.saves.values())

    @property
    def idle(self) -> bool:
        """All its saves are over; before its first connection there are none."""
        if self.loading or self.copying is not None:
            return False
        return all(save.over for save in self.saves.values())

    # -- training -------------------------------------------------

    def train(self) -> None:
        """Work for a while, then save."""
        options = self.sim.options
        self.sim.engine.post(
            options.train_s * (0.5 + self.sim.rng.random()) * self.process.slow,
            self.process,
            self._save,
        )

    def _next(self) -> None:
        """A save released the rank; now and then it reads an epoch before it goes on."""
        rereads = self.sim.options.rereads
        if rereads and self.connected and self.sim.rng.random() < rereads:
            key = newest(self.sim)
            if key is not None and not self.loading:
                self.loading.begin(key)
                return
        self.train()

    def pieces(self, pieces: Pieces) -> None:
        """Chunks of a load are there, or will not come."""
        self.loading.pieces(pieces)

    def loaded(self) -> None:
        """A load came to its end."""
        if not self._busy:
            self.train()

    def _save(self) -> None:
        if not self.connected or self._busy or self.loading:
            return
        options = self.sim.options
        if self.next_epoch > self.sim.last_epoch:
            self.launch.finished(self)
            return
        self._save_ids += 1
        epoch = self.next_epoch
        self.next_epoch += 1
        content = member(self.rank, epoch, self.launch.variant, options.chunks, options.chunk_bytes)
        size = content.shape.layout.total_bytes
        opened = ev.MemberOpened(
            node=self.node.name,
            client=self.name,
            process=self.identity,
            rank=self.rank,
            world_size=self.launch.world,
            save_id=self._save_ids,
            epoch=epoch,
            deadline_s=self.launch.deadline_s,
            elapsed_s=0.0,
            at=self.sim.engine.now + self.node.clock,
            total_bytes=size,
            bytes_logical=options.chunks * options.chunk_bytes,
            items_id=content.shape.items_id,
            when_full=self.launch.when_full,
            rewind_to=self.launch.rewind_to,
            launch_id=str(self.launch.number),
            replicas=options.replicas,
            resumed_from=self._origin,
        )
        save = Save(
            self._save_ids,
            epoch,
            content,
            self.launch.number,
            self.launch.world,
            opened,
            at=self.sim.engine.now,
        )
        self.saves[save.save_id] = save
        self.sim.oracle.saving(self, save)
        layout = content.shape.layout
        self.send(ev.LeaseAsked(self.name, save.save_id, self.rank, layout, opened))
        self.send(opened)

    @property
    def _origin(self) -> DecisionKey | None:
        """The epoch that it loaded by its number, as long as it has saved nothing since."""
        saves = self.saves.values()
        if all(s.error is not None and s.error.outcome is Outcome.NOT_COMMITTED for s in saves):
            return self.launch.resumed_from
        return None

    def withdraw(self) -> bool:
        """The rank is interrupted in its open save; False when it has none."""
        for save in self.saves.values():
            if not save.released and self.copying is None and self.connected:
                save.withdrawn = True
                save.grants.clear()
                self.send(ev.WriterStopped(self.name, save.save_id))
                error = GroupAborted("it was interrupted")
                self.send(ev.MemberFailed(self.name, save.save_id, error))
                return True
        return False

    # -- what the agent tells -------------------------------------------------

    def granted(self, grant: fx.GrantLease) -> None:
        """A lease for one wave came."""
        save = self.saves.get(grant.save_id)
        if save is None or save.lost:
            return
        if save.over or save.withdrawn:
            self.send(ev.WriterStopped(self.name, save.save_id))
            return
        save.key = grant.key
        save.grants.append(grant)
        self._copy()

    def _copy(self) -> None:
        if self.copying is not None:
            return
        for save in self.saves.values():
            if save.grants and not save.over:
                self.copying = save.grants.popleft()
                options = self.sim.options
                delay = options.copy_s * (0.5 + self.sim.rng.random()) * self.process.slow
                self.sim.engine.post(delay, self.process, self._copied, self.copying)
                return

    def _copied(self, grant: fx.GrantLease) -> None:
        if self.copying is not grant:
            return
        self.copying = None
        if self.node.lives != self._agent:
            return  # it wrote to memory of an agent that is gone, and will soon hear of that
        save = self.saves[grant.save_id]
        wave = grant.wave
        self.node.written(self, grant, save.member.chunks[wave.chunk_lo : wave.chunk_hi])
        if save.over:
            self.send(ev.WriterStopped(self.name, save.save_id))
        else:
            self.send(ev.WaveCopied(self.name, save.save_id, grant.number))
            if grant.number + 1 == grant.waves:
                save.copied = True
                self._next()
        self._copy()

    def reached(self, effect: fx.TellReached) -> None:
        """The group reached a level."""
        save = self.saves.get(effect.seat.save_id)
        if save is None or save.lost or effect.level in save.levels:
            return
        if Level.DURABLE in save.levels:
            return  # the handle is closed
        if save.error is not None and save.error.outcome is not Outcome.NOT_COMMITTED:
            return  # nothing that was said before is contradicted
        if save.error is not None:
            raise Violated(6, f"{self.name}: {effect.level} was told after {save.error!r}")
        if save.levels and ORDER[effect.level] < ORDER[save.levels[-1]]:
            raise Violated(2, f"{self.name}: {effect.level} was told after {save.levels}")
        save.levels.append(effect.level)
        self.sim.oracle.reached(self, save, effect.level)

    def failed(self, effect: fx.TellFailed) -> None:
        """The save failed."""
        save = self.saves.get(effect.seat.save_id)
        if save is None or save.lost or save.error is not None:
            return
        if Level.DURABLE in save.levels:
            raise Violated(6, f"{self.name}: {effect.error!r} was told after DURABLE")
        busy = not save.released
        save.error = effect.error
        save.grants.clear()
        if self.copying is None or self.copying.save_id != save.save_id:
            self.send(ev.WriterStopped(self.name, save.save_id))
        self.sim.oracle.failed(self, save, effect.error)
        if busy:
            again = effect.error.outcome is Outcome.NOT_COMMITTED and self._repeat != save.epoch
            if again and self.launch.retries and not isinstance(effect.error, AgentLost):
                self._repeat = save.epoch
                self.next_epoch = save.epoch
            self._next()


class Launch:
    """One life of the job's processes."""

    def __init__(
        self,
        sim: Sim,
        number: int,
        placement: list[Node],
        *,
        first_epoch: int,
        rewind: int | None,
        resumed_from: DecisionKey | None,
    ) -> None:
        rng = sim.rng
        self.sim = sim
        self.number = number
        self.placement = placement
        self.first_epoch = first_epoch
        self.rewind_to = rewind
        self.resumed_from = resumed_from
        """The older epoch that all ranks loaded by its number."""
        self.variant = number if rng.random() < 0.5 else 0
        self.when_full = "wait" if rng.random() < 0.9 else "fail"
        self.deadline_s = sim.options.deadline_s
        self.retries = rng.random() < sim.options.retries
        self.loads = newest(sim) if rng.random() < 0.7 and not sim.options.local else None
        """The epoch with which all ranks begin."""
        self.parts = rng.random() < 0.3
        """They read parts of chunks."""
        self.done: set[int] = set()
        self.ranks = [
            Rank(sim, Process(f"r{number}.{rank}"), sim.new_pid(), self, rank)
            for rank in range(len(placement))
        ]
        for rank in self.ranks:
            sim.engine.post(rng.random() * 0.01, rank.process, rank.connect)

    @property
    def world(self) -> int:
        """How many ranks it has."""
        return len(self.placement)

    @property
    def alive(self) -> list[Rank]:
        """Those whose processes have not ended."""
        return [rank for rank in self.ranks if rank.process.alive]

    def finished(self, rank: Rank) -> None:
        """A rank has saved its last epoch."""
        self.done.add(rank.rank)
