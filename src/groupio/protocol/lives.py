"""Which life of a job its members belong to: incarnations, and the lines they follow."""

from __future__ import annotations

from dataclasses import dataclass

from groupio.errors import GroupIOError
from groupio.model import Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.group import BEFORE_STAGED, Phase
from groupio.protocol.jobstate import JobState
from groupio.protocol.members import Client, Incarnation


@dataclass(slots=True)
class Lives(JobState):
    """The lives of a job: a restart of its processes begins a new one."""

    # -- incarnations ---------------------------------------------------------

    def _settle_incarnation(
        self, event: ev.MemberOpened, known: Client
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        """Decide which life of the job this member belongs to; a restart begins a new one."""
        now = self.incarnation
        if now is None:
            return self._raise(event, known, "the job began")
        if known.incarnation and known.incarnation < now.number:
            return [], reasons.late(event, known.incarnation, now.number)
        if event.launch_id != now.launch_id:
            return self._raise(event, known, "the job was launched again")
        if event.world_size != now.world_size:
            return self._other_world(event, known)
        holder = now.clients.get(event.rank)
        if holder is None and event.rewind_to != now.rewind_to:
            return [], reasons.other_rewind(event, now.rewind_to)
        if holder is not None and holder != event.client:
            other = self._clients[holder]
            if other.alive:
                return [], reasons.twins(event.rank, other.process, event.process)
            if other.process != event.process:
                return self._raise(event, known, f"rank {event.rank} restarted")
            if event.rewind_to is not None and event.rewind_to != self._newest_staged():
                return self._raise(event, known, f"rank {event.rank} connected to rewind")
        self._seat(event, known)
        return [], None

    def _seat(self, event: ev.MemberOpened, known: Client) -> None:
        assert self.incarnation is not None
        self.incarnation.clients[event.rank] = event.client
        known.incarnation = self.incarnation.number

    def _other_world(
        self, event: ev.MemberOpened, known: Client
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        gathering = [g for g in self.groups.values() if g.phase is Phase.GATHERING]
        if not gathering:
            return self._raise(event, known, f"the world size changed to {event.world_size}")
        error = reasons.disagreement("world_size", gathering[0].first, event)
        return self._give_up(gathering, lambda _: error), error

    def _raise(
        self, event: ev.MemberOpened, known: Client, why: str
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        """Begin a new incarnation: unstaged groups of the old one end, staged ones go on."""
        rewind, line = event.rewind_to, None
        if rewind is not None and rewind != self._newest_staged():
            if rewind not in self._visible():
                return [], reasons.unknown_epoch(rewind)
            line = Lineage(max(self.lineages) + 1, self.lineage, rewind)
        self._incarnation_max += 1
        self.incarnation = Incarnation(
            self._incarnation_max, event.world_size, rewind, event.launch_id
        )
        # Of the old life nobody is asked for any more.
        self._clients = {
            n: c for n, c in self._clients.items() if not (c.process_gone or c.node_lost)
        }
        self._seat(event, known)
        unstaged = [g for g in self.groups.values() if g.phase in BEFORE_STAGED]
        effects = self._give_up(
            unstaged, lambda g: reasons.new_incarnation(g.epoch, event.rank, why)
        )
        self.missed.forget(event.launch_id)
        if line is not None:
            self._new_lineage = True
            effects.append(fx.CreateLineage(line))
        return effects, None

    def _newest_staged(self) -> int:
        """The newest epoch of the line that is committed, or may be soon."""
        staged = [g.epoch for g in self.in_flight() if g.lineage == self.lineage]
        return max([self.latest, *staged])

    def _on_lineage(self, event: ev.LineageCreated) -> list[fx.Effect]:
        if not self._new_lineage:
            return []
        assert self.incarnation is not None
        self._new_lineage = False
        if event.lineage is not None:
            self.lineages[event.lineage.number] = event.lineage
            return self._retry_waiting()
        assert event.error is not None
        error = event.error
        for known in self._clients.values():
            if known.incarnation == self.incarnation.number:
                known.incarnation = 0
        # The next try begins with a look at the store, where the number may be taken.
        self.incarnation, self.store_open = None, False
        self.missed.refused(self.waiting.opens, error)
        return self.waiting.refuse(lambda _: error)
