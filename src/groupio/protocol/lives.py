"""The incarnations of a job, and the lineages that they follow."""

from __future__ import annotations

from dataclasses import dataclass

from groupio.errors import GroupIOError
from groupio.model import Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.group import BEFORE_STAGED, Group, Phase
from groupio.protocol.jobstate import JobState
from groupio.protocol.members import Client, FormedLaunch, Incarnation

LAUNCHES_REMEMBERED = 256
"""So many launches that were replaced are remembered."""

LOST_REMEMBERED = 4096
"""How many clients of lost nodes are remembered, the newest ones: no more is known of their end."""

STALE_REMEMBERED = 16
"""For how many epochs the first member that was refused as stale is remembered."""


@dataclass(slots=True)
class Lives(JobState):
    """The lives of a job: a restart of its processes begins a new one."""

    # -- clients ---------------------------------------------------------

    def _on_arrived(self, event: ev.ClientArrived) -> list[fx.Effect]:
        if event.has_saved:
            # It is a member of some incarnation, whether or not this controller saw it save.
            self._client(event).has_saved = True
        return self._watch(event.rank) if self.presence.arrive(event) else []

    def _client(self, event: ev.ClientArrived | ev.MemberOpened) -> Client:
        new = Client(event.process, rank=event.rank, node=event.node)
        return self._clients.setdefault(event.client, new)

    # -- incarnations ---------------------------------------------------------

    def _settle_incarnation(
        self, event: ev.MemberOpened, known: Client
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        """Decide which life of the job this member belongs to; a restart begins a new one."""
        now = self.incarnation
        if now is None:
            return self._raise(event, known, "the job began")
        formed = FormedLaunch.parse(event.launch_id)
        if formed is None and 0 < known.incarnation < now.number:
            return [], reasons.late(event, known.incarnation, now.number)
        if event.launch_id != now.launch_id:
            if formed is not None and self._is_replaced(formed, now):
                return [], reasons.replaced(event, now.number)
            return self._raise(event, known, "the job was launched again")
        if event.world_size != now.world_size:
            return self._other_world(event, known)
        holder = now.clients.get(event.rank)
        if holder is None and event.rewind_to != now.rewind_to:
            return [], reasons.other_rewind(event, now.rewind_to)
        if holder is None and formed is None and (gone := self._gone_before(event, now)):
            self._divide(now, gone, event)
            return self._raise(event, known, f"rank {gone[0]} ended")
        if holder is not None and holder != event.client:
            other = self._clients[holder]
            if other.alive:
                return [], reasons.twins(event.rank, other.process, event.process)
            if not self._is_of(other, event):
                self._divide(now, [event.rank], event)
                return self._raise(event, known, f"rank {event.rank} restarted")
            if event.rewind_to is not None and event.rewind_to != self._newest_staged():
                return self._raise(event, known, f"rank {event.rank} connected to rewind")
        self._seat(event, known)
        return [], None

    def _seat(self, event: ev.MemberOpened, known: Client) -> None:
        assert self.incarnation is not None
        self.incarnation.clients[event.rank] = event.client
        known.incarnation = self.incarnation.number
        known.opened_at = self.presence.moment

    def _is_replaced(self, formed: FormedLaunch, now: Incarnation) -> bool:
        """These processes gave way to the present members.

        The order of a series is certain. Of launches that have no process in common only the order
        of their first saves here is known: a leftover of an old one that saves first with a new
        controller cannot keep those away for whom it will never be complete.
        """
        present = FormedLaunch.parse(now.launch_id)
        if present is not None and present.series == formed.series:
            return formed.number < present.number
        return formed.launch_id in self._replaced and now.is_complete

    # -- restarts that the launcher's id does not tell ---------------------------

    def _gone_before(self, event: ev.MemberOpened, now: Incarnation) -> list[int]:
        """The ranks of this life that were known to be gone when this process came.

        It cannot have been one of their peers: with it the next life begins.
        """
        came = self.presence.came(event.client)
        gone = {r: self._clients[name].gone_at for r, name in now.clients.items()}
        gone = {rank: at for rank, at in gone.items() if at}
        return sorted(gone) if all(at < came for at in gone.values()) else []

    def _divide(self, old: Incarnation, replaced: list[int], by: ev.MemberOpened) -> None:
        """Tell those of the life that ends from those who may be of the next one.

        Whoever was connected when a member of the old life opened a save belongs to it, even
        without a save of its own. A member that came after the last such moment was restarted
        with the others, before the end of their old processes was known here.
        """
        seats = {rank: self._clients[name] for rank, name in old.clients.items()}
        last = max(seats[rank].opened_at for rank in replaced)
        free = {rank: name for rank, name in old.clients.items() if seats[rank].alive}
        while peers := [rank for rank, name in free.items() if self.presence.came(name) <= last]:
            last = max(last, *(seats[rank].opened_at for rank in peers))
            for rank in peers:
                del free[rank]
        for rank in free:
            seats[rank].incarnation = 0
        for peer in self.presence.until(last, self._life()):
            if peer.rank not in old.clients and not self._is_of(peer, by):
                self._client(peer).incarnation = old.number

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
            if (error := self._not_visible(event, rewind)) is not None:
                return [], error
            line = self._next_lineage(rewind)
        if self.incarnation is not None:
            self._note_replaced(self.incarnation.launch_id, event.launch_id)
        self._incarnation_max += 1
        self.incarnation = Incarnation(
            self._incarnation_max, event.world_size, rewind, event.launch_id
        )
        # Clients whose end is proven are forgotten; those of lost nodes may still run.
        lost = [name for name, client in self._clients.items() if client.node_lost]
        forgotten = set(lost[:-LOST_REMEMBERED])
        self._clients = {
            n: c for n, c in self._clients.items() if not c.process_gone and n not in forgotten
        }
        self._stale_opens.clear()
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

    def _note_replaced(self, old: str | None, new: str | None) -> None:
        if old is not None and FormedLaunch.parse(old) is not None:
            self._replaced[old] = None
        self._replaced.pop(new or "", None)
        if len(self._replaced) > LAUNCHES_REMEMBERED:
            del self._replaced[next(iter(self._replaced))]

    def _newest_staged(self) -> int:
        """The newest epoch of the line that is committed, or may be soon."""
        staged = [g.epoch for g in self.in_flight() if g.lineage == self.lineage]
        return max([self.latest, *staged])

    # -- going on after an older epoch -----------------------------------------

    def _goes_back(self, event: ev.MemberOpened) -> int | None:
        """The epoch after which the save needs a new line; None: it goes on in the present one.

        A member that loaded an older epoch and saves next an epoch that the line has passed goes
        back. What this incarnation has saved itself is rewound only when a caller asks for it.
        """
        newest, asked, origin = self._newest_going(), event.begin_after, event.resumed_from
        if asked is not None:
            loaded = origin is not None and origin.epoch == asked
            begun = self.lineages[self.lineage].after_epoch == asked and event.epoch >= newest
            return None if asked == newest or (begun and not loaded) else asked
        if origin is None or not origin.epoch < event.epoch <= newest:
            return None
        assert self.incarnation is not None
        number = self.incarnation.number
        own = [g.epoch for g in self.in_flight() if g.incarnation == number and not g.doomed]
        return origin.epoch if max([self.incarnation.newest, *own]) <= origin.epoch else None

    def _newest_going(self) -> int:
        """The newest epoch of the line that is committed, or in flight and not given up."""
        going = [g.epoch for g in self.in_flight() if g.lineage == self.lineage and not g.doomed]
        return max([self.latest, *going])

    def _other_origin(self, event: ev.MemberOpened, group: Group | None) -> GroupIOError | None:
        """The member and one before it do not go on after the same epoch, where that matters."""
        first = self._first_stale(event) if group is None else group.first
        if first is None:
            return None
        alike = (first.begin_after, first.resumed_from) == (event.begin_after, event.resumed_from)
        if alike or (self._goes_back(event) is None and self._goes_back(first) is None):
            return None
        error = reasons.other_origin(first, event)
        if group is None:
            del self._stale_opens[event.epoch]
            self.missed.disagreed(event, first, error)
        return error

    def _first_stale(self, event: ev.MemberOpened) -> ev.MemberOpened | None:
        """The member that was refused as stale and that this one belongs to, if there is one."""
        opens = self._stale_opens.get(event.epoch, {})
        if event.rank in opens:
            del self._stale_opens[event.epoch]  # that was an earlier call of all ranks
            return None
        return next(iter(opens.values()), None)

    def _refused_stale(self, event: ev.MemberOpened) -> None:
        """A later member of the same epoch may say that it goes on after an older one."""
        opens = self._stale_opens.setdefault(event.epoch, {})
        opens[event.rank] = event
        if len(opens) == event.world_size:
            del self._stale_opens[event.epoch]
        elif len(self._stale_opens) > STALE_REMEMBERED:
            del self._stale_opens[min(self._stale_opens)]

    def _not_visible(self, event: ev.MemberOpened, after: int) -> GroupIOError | None:
        """Why no line can begin after this epoch, or None."""
        key = self._visible().get(after)
        if key is None:
            return reasons.unknown_epoch(event, after)
        return None if self.committed[key] else reasons.damaged_epoch(event, key)

    def _begin_line(self, group: Group, after: int) -> list[fx.Effect]:
        """All members have come, and go on after an older epoch: their epoch begins a new line."""
        event = group.first
        error = self._not_visible(event, after)
        if event.begin_after is None:
            if self._visible().get(after) != event.resumed_from:
                error = reasons.not_in_line(event)
            error = error or self._not_ended(event)
        if error is not None:
            del self.groups[group.number]
            return group.fail(error)
        self._new_lineage, self._begins = True, group.number
        group.notes = (reasons.new_line(event, self._next_lineage(after), self._newest_going()),)
        return [fx.CreateLineage(self._next_lineage(after))]

    def _next_lineage(self, after: int) -> Lineage:
        return Lineage(max(self.lineages) + 1, self.lineage, after)

    def _not_ended(self, event: ev.MemberOpened) -> GroupIOError | None:
        """A client of another incarnation whose end is not proven.

        Its process ended, as its agent saw, or it said goodbye. That its node is lost, or its
        connection, proves nothing.
        """
        now = self.incarnation
        assert now is not None
        own = {self._place(name) for name in now.clients.values()}
        for name, other in self._clients.items():
            is_member = other.has_saved or other.incarnation not in (0, now.number)
            if not is_member or other.process_gone or other.closed or self._place(name) in own:
                continue
            how = "is still connected"
            if not other.alive:
                lost = f"node {other.node} was" if other.node_lost else "its connection was"
                how = f"may still run: {lost} lost"
            newest = self._newest_going()
            return reasons.not_ended(event, newest, other.rank, other.process, how)
        return None

    def _place(self, name: str) -> tuple[str, object]:
        """What the clients of one process have in common; a hidden process has only one."""
        client = self._clients[name]
        node = client.node if self.nodes.known else ""  # one agent's clients do not name it
        return node, client.process if client.process.pid > 0 else name

    def _is_of(self, client: Client | ev.ClientArrived, event: ev.MemberOpened) -> bool:
        """The client is one of the process that opens a save; pids are those of a node."""
        is_here = not self.nodes.known or client.node == event.node
        return is_here and client.process == event.process

    def _note_ended(self, name: str) -> None:
        """The end of a client is that of its process's earlier clients, too."""
        ended = self._clients[name]
        if ended.process_gone or ended.closed:
            for other, client in self._clients.items():
                if not client.alive and self._place(other) == self._place(name):
                    client.process_gone |= ended.process_gone
                    client.closed |= ended.closed

    def _on_line_begun(self, event: ev.LineageCreated) -> list[fx.Effect]:
        """The answer for the line of a save: with it, its members and others may go on."""
        begins, self._begins = self.groups.get(self._begins), 0
        if event.lineage is None:
            assert event.error is not None
            error = event.error
            # The next try begins with a look at the store, where the number may be taken.
            self.store_open = False
            failed = [begins] if begins is not None else []
            return self._give_up(failed, lambda _: error) + self._retry_waiting()
        self.lineages[event.lineage.number] = event.lineage
        for group in self.groups.values():
            if group.key is None:
                group.lineage = self.lineage
                group.stands = group.epoch in self._visible()
        return self._advance() + self._retry_waiting()

    def _on_lineage(self, event: ev.LineageCreated) -> list[fx.Effect]:
        if not self._new_lineage:
            return []
        assert self.incarnation is not None
        self._new_lineage = False
        if self._begins:
            return self._on_line_begun(event)
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
