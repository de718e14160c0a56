"""The controller of one job: incarnations, lineages, the order of epochs, and its groups.

Soft state: what must survive stands in the store. A controller that starts anew reads it back
(``StoreOpened``) and goes on with a higher incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupio.errors import GroupIOError, Outcome
from groupio.model import DecisionKey
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol import reasons
from groupio.protocol.group import BEFORE_STAGED, Group, Phase
from groupio.protocol.jobstate import EPOCHS_IN_FLIGHT
from groupio.protocol.joining import AgentsOfJob
from groupio.protocol.presence import Watch
from groupio.protocol.resume import RESUME_TIMER
from groupio.protocol.waiting import refuse

__all__ = ["EPOCHS_IN_FLIGHT", "Controller"]

REOPEN_TIMER = "away-store"
REOPEN_S = 5.0
"""While the store cannot be reached, and saves wait for it, it is opened again so often."""


@dataclass(slots=True)
class Controller(AgentsOfJob):
    """The machine of one job in one store."""

    # -- events ---------------------------------------------------------

    def handle(self, event: ev.ControllerEvent) -> list[fx.Effect]:
        """Take one event; the effects are to be executed in order."""
        effects = self._handle(event)
        if self.nodes.known:
            self.refusals.note(effects)
        return effects

    def _handle(self, event: ev.ControllerEvent) -> list[fx.Effect]:
        match event:
            case ev.NodeJoined():
                return self._on_joined(event)
            case ev.NodeLost():
                return self._on_node_lost(event)
            case ev.LinkMeasured(link=link):
                self.nodes.measure(link)
                return []
            case ev.ClientArrived():
                return self._on_arrived(event)
            case ev.MemberOpened():
                return self._on_opened(event)
            case ev.MemberFailed(client=client, save_id=save_id, error=error):
                return self._on_failed(client, save_id, error)
            case ev.MemberGone():
                return self._on_gone(event)
            case ev.StoreOpened(state=state):
                return self._on_store_opened(state)
            case ev.StoreUnavailable(error=error):
                return self._on_unavailable(error)
            case ev.LineageCreated():
                return self._on_lineage(event)
            case ev.MarkLeft() | ev.StoreShown() | ev.MarkFound():
                return self._on_proof(event)
            case ev.NodeReopened(node=node):
                return self._unprove(node)
            case ev.StoreRenewed():
                return [e for node in self.nodes.alive for e in self._unprove(node)]
            case ev.Drain():
                return self._on_drain(event)
            case ev.TimerFired(name=name):
                if (refused := self.waiting.expire(name)) is not None:
                    return refused
                if (again := self.proofs.on_timer(name)) is not None:
                    return again
                if (over := self.presence.expire(name)) is not None:
                    return self._on_absent(over)
                if name == RESUME_TIMER:
                    return self._judge(over=True)
                if name == REOPEN_TIMER:
                    self._store_away = False
                    return self.open_store(create=True)
                return self._on_group_timer(event)
            case ev.InflightPublished(error=error) if error is not None:
                # The store may have been replaced or lost: look at it anew before the next save.
                self.store_open = False
                group = self.groups.get(event.group)
                if group is not None and group.can_wait(error):
                    return group.handle(event) + self._look_later()
            case _:
                group = self.groups.get(event.group)
                if self.nodes.gone(getattr(event, "node", "")) and hasattr(event, "node"):
                    group = None  # it was on its way when its node was lost
        if group is None:
            return []
        return group.handle(event) + self._advance(group)

    def open_store(self, *, create: bool) -> list[fx.Effect]:
        """Open and recover the store now; without ``create`` only if there is one."""
        if self.store_open or self._opening or self._store_away:
            return []
        self._opening, self._creating = True, create
        held = tuple(g.key for g in self.in_flight() if g.key is not None)
        return [fx.OpenStore(held, create, self.resumes)]

    @property
    def opening(self) -> bool:
        """The answer of the store is outstanding."""
        return self._opening

    def store_closed(self) -> None:
        """The driver closed the store: the next save opens it again."""
        self.store_open = False

    def _on_drain(self, event: ev.Drain) -> list[fx.Effect]:
        self.draining = True
        effects = self.waiting.refuse(lambda opened: reasons.draining(opened.epoch))
        # A group that is not complete would wait in vain: its other members are refused now.
        incomplete = [g for g in self.groups.values() if g.phase is Phase.GATHERING]
        effects += self._give_up(incomplete, lambda g: reasons.draining(g.epoch))
        if event.abort_unstaged:
            unstaged = [g for g in self.groups.values() if g.phase in BEFORE_STAGED]
            effects += self._give_up(unstaged, lambda g: reasons.stopped(g.epoch))
        return effects

    def _on_store_opened(self, state: ev.StoreState) -> list[fx.Effect]:
        if not self._opening:
            return []
        self._opening, self.store_open, self._store_away = False, True, False
        self.node_local, self.job = state.node_local, state.job
        self.store_id = state.store_id
        self.lineages = lines.by_number(state.lineages)
        self.committed = {c.key: c.content_id for c in state.committed}
        self._attempts = {}
        for key in [*self.committed, *state.aborted]:
            self._note_attempt(key)
        self._incarnation_max = max(self._incarnation_max, state.incarnation)
        effects = self._begin_resume(state)
        for group in self.in_flight():
            effects += group.publish_again()
        return effects + self._advance() + self._retry_waiting()

    def _on_unavailable(self, error: GroupIOError) -> list[fx.Effect]:
        if not self._opening:
            return []
        self._opening = False
        stuck = [g for g in self.groups.values() if g.stuck]
        if (self.waiting or stuck) and not self._creating:
            return self.open_store(create=True)
        if reasons.is_away(error):
            # Saves wait until their deadlines, but not for what is in the store's place to go;
            # what is sealed is not given up for time alone.
            effects = [] if reasons.may_return(error) else self._refuse_waiting(error)
            wanted = self.waiting or self.resume.held or stuck
            return effects + (self._look_later() if wanted else [])
        # Of held groups nobody is told anything before the store is open, whatever its error.
        effects = self._look_later() if self.resume.held else []
        effects += self._refuse_waiting(error)
        return effects + self._give_up(stuck, lambda _: error)

    def _refuse_waiting(self, error: GroupIOError) -> list[fx.Effect]:
        self.missed.refused(self.waiting.opens, error)
        return self.waiting.refuse(lambda _: error)

    def _look_later(self) -> list[fx.Effect]:
        """Open the store again after a while, and not before."""
        if self._store_away:
            return []
        self._store_away = True
        return [fx.StartTimer(REOPEN_TIMER, REOPEN_S)]

    # -- opening ---------------------------------------------------------

    def _on_opened(self, event: ev.MemberOpened) -> list[fx.Effect]:
        if self.nodes.gone(event.node):
            return []  # it was on its way when its node was lost
        known = self._client(event)
        known.node = event.node
        if event.save_id in known.opened:
            return []
        known.opened.append(event.save_id)
        error = reasons.draining(event.epoch) if self.draining else reasons.absurd(event)
        return self._open(event, "") if error is None else refuse(event, "", error)

    def _open(self, event: ev.MemberOpened, timer: str) -> list[fx.Effect]:
        """Take an open in; ``timer`` runs already if it had to wait before."""
        if not self.store_open:
            return self.waiting.enter(event, timer) + self.open_store(create=True)
        if self._line_pending():
            return self.waiting.enter(event, timer)
        if event.node in self.nodes.unproved:
            return self.waiting.enter(event, timer) + self._prove(event.node)
        if event.job is not None and event.job != self.job:
            return refuse(event, timer, reasons.other_job(event, self.job))
        effects, error = self._settle_incarnation(event, self._clients[event.client])
        if self._line_pending():
            return effects + self.waiting.enter(event, timer)
        group = self._gathering(event)
        differs = self._other_origin(event, group) if error is None else None
        if differs is not None and group is not None:
            effects += self._give_up([group], lambda _: differs)
        error = error or differs
        stale = self._stale(event) if error is None else None
        if stale is not None and group is None:
            self._refused_stale(event)
        if stale is not None and group is not None:
            # Newer epochs went past it: all who are still to come are refused like this one.
            effects += self._give_up([group], lambda _: stale)
        error = error or stale or self._lost_peer(event)
        if group is None and error is None:
            error = self.missed.tell(event)
        if error is not None:
            return effects + refuse(event, timer, error)
        group = group or self._new_group(event)
        effects += group.join(event, timer) + self._watch(None)
        assert self.incarnation is not None
        self.incarnation.is_complete |= len(group.seats) == group.world_size
        return effects + self._advance(group)

    def _line_pending(self) -> bool:
        """A new lineage is being made, or attempts of an earlier controller are looked for."""
        return self._new_lineage or bool(self.resume.attempts)

    def _retry_waiting(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        for timer, waiter in self.waiting.leave().items():
            event = waiter.event
            effects += self._open(event, timer)
            if waiter.failed is not None:
                effects += self._on_failed(event.client, event.save_id, waiter.failed)
        return effects

    def _on_failed(self, client: str, save_id: int, error: GroupIOError) -> list[fx.Effect]:
        self.waiting.withdraw(client, save_id, error)
        found = self.find(client, save_id)
        if found is None:
            return []
        group = self.groups[found[0]]
        return group.withdraw(found[1], error) + self._advance(group)

    def _gathering(self, event: ev.MemberOpened) -> Group | None:
        """The group that the member completes; all that gather are of this incarnation."""
        for group in self.groups.values():
            if (
                group.phase is Phase.GATHERING
                and group.epoch == event.epoch
                and event.rank not in group.seats
            ):
                return group
        return None

    def _new_group(self, event: ev.MemberOpened) -> Group:
        assert self.incarnation is not None
        group = Group(
            number=next(self.numbers),
            epoch=event.epoch,
            incarnation=self.incarnation.number,
            lineage=self.lineage,
            world_size=event.world_size,
            node_local=self.node_local,
            table=self.nodes,
            stands=event.epoch in self._visible() and self._goes_back(event) is None,
        )
        self.groups[group.number] = group
        return group

    def _stale(self, event: ev.MemberOpened) -> GroupIOError | None:
        newest = self._newest_going()
        if event.epoch >= newest or event.epoch in self._visible():
            return None
        return reasons.stale(event, newest) if self._goes_back(event) is None else None

    def _lost_peer(self, event: ev.MemberOpened) -> GroupIOError | None:
        """A member of this incarnation whose process is gone will never come."""
        assert self.incarnation is not None
        members = sorted(self.incarnation.clients.items())
        gone = tuple(rank for rank, name in members if self._clients[name].process_gone)
        return reasons.lost_peers(event.epoch, gone) if gone else None

    # -- losses ---------------------------------------------------------

    def _on_gone(self, event: ev.MemberGone) -> list[fx.Effect]:
        away = self.presence.lose(event.client, process_gone=event.process_gone)
        self.missed.lose(event.client)
        known = self._clients.get(event.client)
        if known is None:
            return [] if away is None else self._watch(away)
        known.alive = False
        if event.process_gone:
            known.process_gone = True
            known.gone_at = known.gone_at or self.presence.moment
        known.closed = known.closed or event.closed
        self._note_ended(event.client)
        how = "ended" if event.process_gone else "closed its connection"
        effects = self.waiting.lose(event.client)
        touched = []
        for group in self.groups.values():
            rank = group.rank_of(event.client)
            if rank is None and known.process_gone and group.phase is Phase.GATHERING:
                rank = self._current(event.client)
            if rank is not None:
                effects += group.lose(rank, how)
                touched.append(group)
        if event.process_gone and self._current(event.client) is None:
            # A member of an earlier life: nothing will ask for it again.
            self._clients.pop(event.client, None)
        effects += [] if away is None else self._watch(away)
        return effects + self._advance(*touched)

    def _watch(self, rank: int | None) -> list[fx.Effect]:
        """Groups give a rank that goes away now, or all that are away, some time to come back."""
        gathering = [g for g in self.groups.values() if g.phase is Phase.GATHERING]
        return [e for g in gathering for e in self.presence.watch(g, self._life(), rank)]

    def _on_absent(self, over: Watch) -> list[fx.Effect]:
        """The time of a rank to come back to a group is over."""
        group = self.groups.get(over.group)
        if group is None or group.phase is not Phase.GATHERING:
            return []
        ways = self.presence.given_up(over, group, self._life())
        return self._give_up([group], lambda g: reasons.absent(g.epoch, ways)) if ways else []

    # -- progress ---------------------------------------------------------

    def _give_up(
        self, groups: Sequence[Group], reason: Callable[[Group], GroupIOError]
    ) -> list[fx.Effect]:
        """Fail groups, all of them before any other goes on in their place."""
        effects: list[fx.Effect] = []
        for group in groups:
            effects += group.fail(reason(group))
        return effects + self._advance(*groups)

    def _advance(self, *changed: Group) -> list[fx.Effect]:
        """After groups changed: note what was decided, admit and prepare what may go on."""
        for group in changed:
            if group.phase is Phase.DONE:
                del self.groups[group.number]
                self._note_done(group)
        return self._admit_next() + self._prepare_next()

    def _note_done(self, group: Group) -> None:
        self.missed.note(group)
        if not group.published:
            return  # nobody saw the attempt: its number is free
        assert group.key is not None
        if group.overruled or group.outcome is Outcome.UNKNOWN:
            # Only a new look at the store can tell what stands there.
            self.store_open = False
            return
        if group.outcome is Outcome.COMMITTED:
            self.committed[group.key] = group.content_id
            if self.incarnation is not None and group.incarnation == self.incarnation.number:
                self.incarnation.newest = max(self.incarnation.newest, group.epoch)
            for other in self.groups.values():
                other.stands |= (other.lineage, other.epoch) == (group.lineage, group.epoch)
        self._note_attempt(group.key)

    def _on_group_timer(self, event: ev.TimerFired) -> list[fx.Effect]:
        group = next((g for g in self.groups.values() if g.timer == event.name), None)
        if group is None:
            return []
        effects = group.handle(event) + self._advance(group)
        if group.unproved:
            # A proof that failed for another reason than the store's absence is not under way.
            effects += [e for node in sorted(self.nodes.unproved) for e in self._prove(node)]
        return effects

    def _admit_next(self) -> list[fx.Effect]:
        """Admit what has gathered, in the order of epochs."""
        queued = [g for g in self.groups.values() if g.phase is Phase.QUEUED]
        if self._new_lineage:
            return []
        if queued and not self.store_open:
            return self.open_store(create=True)
        effects: list[fx.Effect] = []
        for group in sorted(queued, key=lambda g: (g.epoch, g.number)):
            held = self.in_flight()
            if len(held) >= self.epochs_in_flight:
                break
            if (after := self._goes_back(group.first)) is not None:
                effects += self._begin_line(group, after)
                if self._begins:
                    break
                continue
            if any(g.epoch == group.epoch and g.lineage == group.lineage for g in held):
                break
            stale = self._stale(group.first)
            if stale is None:
                effects += self._admit(group)
            else:
                del self.groups[group.number]
                effects += group.fail(stale)
        return effects

    def _admit(self, group: Group) -> list[fx.Effect]:
        key = self._visible().get(group.epoch)
        if key is not None:
            return group.admit(key, store=False)
        attempt = self._attempts.get((group.lineage, group.epoch), 0) + 1
        return group.admit(DecisionKey(group.lineage, group.epoch, attempt), store=True)

    def _prepare_next(self) -> list[fx.Effect]:
        """Epochs are decided in order: of those in flight, only the oldest one may prepare.

        One that is only compared with its commit decides nothing and does not wait.
        """
        held = self.in_flight()
        effects: list[fx.Effect] = []
        for group in held:
            if group.ready and not group.store:
                effects += group.prepare()
        oldest = next((g for g in held if g.store), None)
        if oldest is None or not oldest.stuck:
            return effects
        if not self.store_open:
            return effects + self.open_store(create=True)
        if oldest.unproved:
            # Of those without a proof under way one failed, before the group was taken over.
            again = sorted(self.nodes.unproved) if oldest.ready else []
            return effects + [effect for node in again for effect in self._prove(node)]
        return effects + (oldest.prepare() if oldest.ready else [])
