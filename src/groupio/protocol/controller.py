"""The controller of one job: incarnations, lineages, the order of epochs, and its groups.

Soft state: what must survive stands in the store. A controller that starts anew reads it back
(``StoreOpened``) and goes on with a higher incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from groupio.errors import GroupIOError, Outcome
from groupio.model import DecisionKey, Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol import reasons
from groupio.protocol.group import BEFORE_STAGED, HOLDS_MEMORY, Group, Phase
from groupio.protocol.members import Client, Incarnation
from groupio.protocol.missed import Missed
from groupio.protocol.presence import Life, Presence, Watch
from groupio.protocol.waiting import WaitingRoom, refuse

EPOCHS_IN_FLIGHT = 2
"""How many epochs may hold memory at once; a third one waits before its copy."""


@dataclass(slots=True)
class Controller:
    """The machine of one job in one store."""

    epochs_in_flight: int = EPOCHS_IN_FLIGHT
    incarnation: Incarnation | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    draining: bool = False
    lineages: dict[int, Lineage] = field(default_factory=dict)
    committed: dict[DecisionKey, bytes] = field(default_factory=dict)
    store_open: bool = False
    node_local: bool = True
    job: str = ""
    _opening: bool = False
    _creating: bool = False
    _new_lineage: bool = False
    _attempts: dict[tuple[int, int], int] = field(default_factory=dict)
    _incarnation_max: int = 0
    missed: Missed = field(default_factory=Missed)
    waiting: WaitingRoom = field(default_factory=WaitingRoom)
    presence: Presence = field(default_factory=Presence)
    _clients: dict[str, Client] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Where group numbers come from; controllers that share an agent share it."""

    # -- questions ---------------------------------------------------------

    @property
    def lineage(self) -> int:
        """The lineage that new epochs go to."""
        return lines.current(self.lineages)

    @property
    def latest(self) -> int:
        """The newest committed epoch of the line, -1 when there is none."""
        return max(self._visible(), default=-1) if self.lineages else -1

    def in_flight(self) -> list[Group]:
        """The groups that hold memory, oldest epoch first."""
        held = [g for g in self.groups.values() if g.phase in HOLDS_MEMORY]
        return sorted(held, key=lambda g: (g.lineage, g.epoch, g.number))

    def undecided_for(self, client: str) -> list[int]:
        """Groups that a reader should wait for: staged, or doomed, and not the reader's own."""
        return [
            g.number
            for g in self.groups.values()
            if g.rank_of(client) is None
            and (g.phase not in BEFORE_STAGED or any(map(self._is_gone, self._names(g))))
        ]

    def find(self, client: str, save_id: int) -> tuple[int, int] | None:
        """The group and the rank of a client's save, or None when it has no group (yet)."""
        for group in self.groups.values():
            for rank, seat in group.seats.items():
                if (seat.opened.client, seat.opened.save_id) == (client, save_id):
                    return group.number, rank
        return None

    def _names(self, group: Group) -> list[str]:
        return [seat.opened.client for seat in group.seats.values()]

    def _is_gone(self, client: str) -> bool:
        known = self._clients.get(client)
        return known is None or not known.alive

    def _visible(self) -> dict[int, DecisionKey]:
        return lines.visible(self.committed, self.lineages, self.lineage)

    # -- events ---------------------------------------------------------

    def handle(self, event: ev.ControllerEvent) -> list[fx.Effect]:
        """Take one event; the effects are to be executed in order."""
        match event:
            case ev.ClientArrived():
                return self._watch(event.rank) if self.presence.arrive(event) else []
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
            case ev.Drain():
                return self._on_drain(event)
            case ev.TimerFired(name=name):
                if (refused := self.waiting.expire(name)) is not None:
                    return refused
                if (over := self.presence.expire(name)) is not None:
                    return self._on_absent(over)
                group = next((g for g in self.groups.values() if g.timer == name), None)
            case ev.InflightPublished(error=error) if error is not None:
                # The store may have been replaced or lost: look at it anew before the next save.
                self.store_open = False
                group = self.groups.get(event.group)
            case _:
                group = self.groups.get(event.group)
        if group is None:
            return []
        return group.handle(event) + self._advance(group)

    def open_store(self, *, create: bool) -> list[fx.Effect]:
        """Open and recover the store now; without ``create`` only if there is one."""
        if self.store_open or self._opening:
            return []
        self._opening, self._creating = True, create
        held = tuple(g.key for g in self.in_flight() if g.key is not None)
        return [fx.OpenStore(held, create)]

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
        self._opening, self.store_open = False, True
        self.node_local, self.job = state.node_local, state.job
        self.lineages = lines.by_number(state.lineages)
        self.committed = {c.key: c.content_id for c in state.committed}
        self._attempts = {}
        for key in [*self.committed, *state.aborted]:
            self._note_attempt(key)
        self._incarnation_max = max(self._incarnation_max, state.incarnation)
        return self._advance() + self._retry_waiting()

    def _on_unavailable(self, error: GroupIOError) -> list[fx.Effect]:
        if not self._opening:
            return []
        self._opening = False
        stuck = [g for g in self.groups.values() if g.phase is Phase.QUEUED or g.ready]
        if (self.waiting or stuck) and not self._creating:
            return self.open_store(create=True)
        self.missed.refused(self.waiting.opens, error)
        return self.waiting.refuse(lambda _: error) + self._give_up(stuck, lambda _: error)

    def _note_attempt(self, key: DecisionKey) -> None:
        at = (key.lineage, key.epoch)
        self._attempts[at] = max(self._attempts.get(at, 0), key.attempt)

    # -- opening ---------------------------------------------------------

    def _on_opened(self, event: ev.MemberOpened) -> list[fx.Effect]:
        known = self._clients.setdefault(event.client, Client(event.process))
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
        if event.job is not None and event.job != self.job:
            return refuse(event, timer, reasons.other_job(event, self.job))
        effects, error = self._settle_incarnation(event, self._clients[event.client])
        if self._line_pending():
            return effects + self.waiting.enter(event, timer)
        group = self._gathering(event)
        stale = self._stale(event.epoch) if error is None else None
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
        return effects + self._advance(group)

    def _line_pending(self) -> bool:
        """A new lineage is being made; opens wait until it is known."""
        return self._new_lineage

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
        )
        self.groups[group.number] = group
        return group

    def _stale(self, epoch: int) -> GroupIOError | None:
        shown = self._visible()
        going = [g for g in self.in_flight() if g.lineage == self.lineage and not g.doomed]
        newest = max([*shown, *(g.epoch for g in going)], default=-1)
        if epoch >= newest or epoch in shown:
            return None
        return reasons.stale(epoch, newest)

    def _lost_peer(self, event: ev.MemberOpened) -> GroupIOError | None:
        """A member of this incarnation whose process is gone will never come."""
        assert self.incarnation is not None
        members = sorted(self.incarnation.clients.items())
        gone = tuple(rank for rank, name in members if self._clients[name].process_gone)
        return reasons.lost_peers(event.epoch, gone) if gone else None

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
        self._clients = {n: c for n, c in self._clients.items() if not c.process_gone}
        self._seat(event, known)
        unstaged = [g for g in self.groups.values() if g.phase in BEFORE_STAGED]
        effects = self._give_up(
            unstaged, lambda g: reasons.new_incarnation(g.epoch, event.rank, why)
        )
        self.missed.forget()
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

    # -- losses ---------------------------------------------------------

    def _on_gone(self, event: ev.MemberGone) -> list[fx.Effect]:
        away = self.presence.lose(event.client, process_gone=event.process_gone)
        known = self._clients.get(event.client)
        if known is None:
            return [] if away is None else self._watch(away)
        known.alive = False
        known.process_gone = known.process_gone or event.process_gone
        how = "ended" if event.process_gone else "closed its connection"
        self.missed.lose(event.client)
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

    def _life(self) -> Life:
        assert self.incarnation is not None
        return Life(self.job, self.incarnation.world_size, self.incarnation.launch_id)

    def _current(self, client: str) -> int | None:
        """The rank of a client in the present life of the job, or None."""
        return None if self.incarnation is None else self.incarnation.rank_of(client)

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
        self._note_attempt(group.key)

    def _admit_next(self) -> list[fx.Effect]:
        """Admit what has gathered, in the order of epochs."""
        queued = [g for g in self.groups.values() if g.phase is Phase.QUEUED]
        if queued and not self.store_open:
            return self.open_store(create=True)
        effects: list[fx.Effect] = []
        for group in sorted(queued, key=lambda g: (g.epoch, g.number)):
            held = self.in_flight()
            if len(held) >= self.epochs_in_flight:
                break
            if any(g.epoch == group.epoch and g.lineage == group.lineage for g in held):
                break
            stale = self._stale(group.epoch)
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
        if oldest is not None and oldest.ready:
            if not self.store_open:
                return effects + self.open_store(create=True)
            effects += oldest.prepare()
        return effects
