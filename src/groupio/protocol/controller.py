"""The controller of one job: incarnations, lineages, the order of epochs, and its groups.

Soft state: what must survive stands in the store. A controller that starts anew reads it back
(``StoreOpened``) and goes on with a higher incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from groupio.errors import (
    AgentLost,
    GroupAborted,
    GroupIOError,
    InvalidInput,
    LateMember,
    NotFound,
    Outcome,
    StaleEpoch,
)
from groupio.model import DecisionKey, Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol.group import BEFORE_STAGED, HOLDS_MEMORY, Group, Phase

EPOCHS_IN_FLIGHT = 2
"""How many epochs may hold memory at once; a third one waits before its copy."""

OPENS_WAITING_MAX = 1 << 16
"""How many opens may wait for the store or a new lineage."""


@dataclass(slots=True)
class Incarnation:
    """One life of the job's processes."""

    number: int
    world_size: int
    rewind_to: int | None
    launch_id: str | None
    clients: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Client:
    process: ev.Process
    incarnation: int
    alive: bool = True
    process_gone: bool = False


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
    _opening: bool = False
    _creating: bool = False
    _new_lineage: bool = False
    _attempts: dict[tuple[int, int], int] = field(default_factory=dict)
    _incarnation_max: int = 0
    _waiting: list[ev.MemberOpened] = field(default_factory=list)
    _clients: dict[str, _Client] = field(default_factory=dict)
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
            and (g.phase in HOLDS_MEMORY[2:] or any(self._is_gone(s) for s in self._names(g)))
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
        return known is not None and not known.alive

    def _visible(self) -> dict[int, DecisionKey]:
        return lines.visible(self.committed, self.lineages, self.lineage)

    # -- events ---------------------------------------------------------

    def handle(self, event: ev.ControllerEvent) -> list[fx.Effect]:
        """Take one event; the effects are to be executed in order."""
        match event:
            case ev.MemberOpened():
                return self._on_opened(event)
            case ev.MemberGone():
                return self._on_gone(event)
            case ev.StoreOpened(state=state):
                return self._on_store_opened(state)
            case ev.StoreUnavailable(error=error):
                self._opening = False
                if self._waiting and not self._creating:
                    return self.open_store(create=True)
                return self._fail_waiting(error)
            case ev.LineageCreated():
                return self._on_lineage(event)
            case ev.Drain():
                return self._on_drain(event)
            case ev.TimerFired(name=name):
                number = int(name.removeprefix("group-"))
            case _:
                number = event.group
        group = self.groups.get(number)
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
        effects: list[fx.Effect] = []
        for group in list(self.groups.values()):
            if event.abort_unstaged and group.phase in BEFORE_STAGED:
                effects += group.fail(
                    AgentLost(
                        f"The agent was stopped before epoch {group.epoch} was staged; save it "
                        "again, a new agent is started for it.",
                        outcome=Outcome.NOT_COMMITTED,
                    )
                ) + self._advance(group)
        return effects

    def _on_store_opened(self, state: ev.StoreState) -> list[fx.Effect]:
        self._opening, self.store_open = False, True
        self.node_local = state.node_local
        self.lineages = lines.by_number(state.lineages)
        self.committed = {c.key: c.content_id for c in state.committed}
        self._attempts = {}
        for key in [*self.committed, *state.aborted]:
            self._note_attempt(key)
        self._incarnation_max = max(self._incarnation_max, state.incarnation)
        return self._admit_next() + self._retry_waiting()

    def _note_attempt(self, key: DecisionKey) -> None:
        at = (key.lineage, key.epoch)
        self._attempts[at] = max(self._attempts.get(at, 0), key.attempt)

    def _retry_waiting(self) -> list[fx.Effect]:
        waiting, self._waiting = self._waiting, []
        effects: list[fx.Effect] = []
        for event in waiting:
            if not self._is_gone(event.client):
                effects += self._on_opened(event)
        return effects

    def _fail_waiting(self, error: GroupIOError) -> list[fx.Effect]:
        waiting, self._waiting = self._waiting, []
        return [_refuse(event, error) for event in waiting]

    # -- opening ---------------------------------------------------------

    def _on_opened(self, event: ev.MemberOpened) -> list[fx.Effect]:
        if self.draining:
            return [
                _refuse(
                    event,
                    AgentLost(
                        f"The agent is draining and takes no new save of epoch {event.epoch}; "
                        "call save again, a new agent is started for it.",
                        outcome=Outcome.NOT_COMMITTED,
                    ),
                )
            ]
        known = self._clients.setdefault(event.client, _Client(event.process, 0))
        if not self.store_open or self._line_pending():
            assert len(self._waiting) < OPENS_WAITING_MAX
            self._waiting.append(event)
            return self.open_store(create=True) if not self.store_open else []
        effects, error = self._settle_incarnation(event, known)
        if error is not None:
            return [*effects, _refuse(event, error)]
        if self._line_pending():
            self._waiting.append(event)
            return effects
        error = self._stale(event.epoch) or self._lost_peer(event)
        if error is not None:
            return [*effects, _refuse(event, error)]
        group = self._gathering(event) or self._new_group(event)
        return effects + group.join(event) + self._advance(group)

    def _line_pending(self) -> bool:
        """A new lineage is being made; opens wait until it is known."""
        return self._new_lineage

    def _gathering(self, event: ev.MemberOpened) -> Group | None:
        assert self.incarnation is not None
        for group in self.groups.values():
            if (
                group.phase is Phase.GATHERING
                and group.epoch == event.epoch
                and group.incarnation == self.incarnation.number
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

    def _stale(self, epoch: int) -> StaleEpoch | None:
        shown = self._visible()
        newest = max([*shown, *(g.epoch for g in self.in_flight())], default=-1)
        if epoch >= newest or epoch in shown:
            return None
        return StaleEpoch(
            f"Epoch {epoch} is older than epoch {newest} of this lineage; save a newer epoch, or "
            f"connect(rewind_to=E) to start a new line after an older epoch E.",
            epoch=epoch,
            latest=newest,
        )

    def _lost_peer(self, event: ev.MemberOpened) -> GroupAborted | None:
        """A member of this incarnation whose process is gone will never come."""
        assert self.incarnation is not None
        gone = tuple(
            rank
            for rank, name in sorted(self.incarnation.clients.items())
            if (known := self._clients.get(name)) is not None and known.process_gone
        )
        if not gone:
            return None
        return GroupAborted(
            f"Rank(s) {', '.join(map(str, gone))} of this job ended, so epoch {event.epoch} cannot "
            "be saved by the whole group; restart the job from its latest epoch.",
            members=gone,
            epoch=event.epoch,
        )

    # -- incarnations ---------------------------------------------------------

    def _settle_incarnation(
        self, event: ev.MemberOpened, known: _Client
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        """Decide which life of the job this member belongs to; a restart begins a new one."""
        now = self.incarnation
        if now is None:
            return self._raise(event, known, "the job began")
        holder = now.clients.get(event.rank)
        if known.incarnation and known.incarnation < now.number:
            return [], LateMember(
                f"Rank {event.rank} (pid {event.process.pid}) belongs to incarnation "
                f"{known.incarnation}, the job is at {now.number}; end this process.",
                member=event.rank,
                epoch=event.epoch,
            )
        if event.world_size != now.world_size:
            return self._other_world(event, known)
        if event.launch_id != now.launch_id:
            return self._raise(event, known, "the job was launched again")
        if holder is None or holder == event.client:
            return self._seat(event, known)
        other = self._clients[holder]
        if other.alive:
            return [], InvalidInput(
                f"Two processes call themselves rank {event.rank}: pid {other.process.pid} and "
                f"pid {event.process.pid}; give each rank its own number, or end the old process."
            )
        if other.process == event.process:
            return self._seat(event, known)
        return self._raise(event, known, f"rank {event.rank} restarted")

    def _seat(
        self, event: ev.MemberOpened, known: _Client
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        assert self.incarnation is not None
        if event.rewind_to != self.incarnation.rewind_to:
            return [], InvalidInput(
                f"Rank {event.rank} connected with rewind_to={event.rewind_to}, the others with "
                f"{self.incarnation.rewind_to}; give all ranks the same."
            )
        self.incarnation.clients[event.rank] = event.client
        known.incarnation = self.incarnation.number
        return [], None

    def _other_world(
        self, event: ev.MemberOpened, known: _Client
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        assert self.incarnation is not None
        effects: list[fx.Effect] = []
        error: InvalidInput | None = None
        for group in list(self.groups.values()):
            if group.phase is not Phase.GATHERING or group.world_size == event.world_size:
                continue
            error = InvalidInput(
                f"Members disagree on world_size: rank {group.first.rank} says "
                f"{group.world_size}, rank {event.rank} says {event.world_size}; "
                "give all ranks the same."
            )
            effects += group.fail(error) + self._advance(group)
        if error is not None:
            return effects, error
        return self._raise(event, known, f"the world size changed to {event.world_size}")

    def _raise(
        self, event: ev.MemberOpened, known: _Client, why: str
    ) -> tuple[list[fx.Effect], GroupIOError | None]:
        """Begin a new incarnation: unstaged groups of the old one end, staged ones go on."""
        line: Lineage | None = None
        if event.rewind_to is not None and event.rewind_to != self.latest:
            if event.rewind_to not in self._visible():
                return [], NotFound(
                    f"connect(rewind_to={event.rewind_to}): this lineage has no committed epoch "
                    f"{event.rewind_to}; see `groupio ls`.",
                    epoch=event.rewind_to,
                )
            line = Lineage(max(self.lineages) + 1, self.lineage, event.rewind_to)
        self._incarnation_max += 1
        self.incarnation = Incarnation(
            self._incarnation_max, event.world_size, event.rewind_to, event.launch_id
        )
        effects: list[fx.Effect] = []
        for group in list(self.groups.values()):
            error = GroupAborted(
                f"A new incarnation of the job began ({why}) before epoch {group.epoch} was "
                "staged; restart from the latest epoch.",
                members=(event.rank,),
                epoch=group.epoch,
            )
            if group.phase in BEFORE_STAGED:
                effects += group.fail(error) + self._advance(group)
        seated, error_ = self._seat(event, known)
        if line is not None:
            self._new_lineage = True
            effects.append(fx.CreateLineage(line))
        return effects + seated, error_

    def _on_lineage(self, event: ev.LineageCreated) -> list[fx.Effect]:
        self._new_lineage = False
        if event.lineage is None:
            assert event.error is not None
            self.incarnation = None
            return self._fail_waiting(event.error)
        self.lineages[event.lineage.number] = event.lineage
        return self._retry_waiting()

    # -- losses ---------------------------------------------------------

    def _on_gone(self, event: ev.MemberGone) -> list[fx.Effect]:
        known = self._clients.get(event.client)
        if known is None:
            return []
        known.alive = False
        known.process_gone = known.process_gone or event.process_gone
        why = "ended" if event.process_gone else "closed its connection"
        effects: list[fx.Effect] = []
        for group in list(self.groups.values()):
            rank = group.rank_of(event.client)
            if rank is None and known.process_gone and group.phase is Phase.GATHERING:
                rank = self._awaited_rank(group, event.client)
            if rank is not None:
                effects += group.lose(rank, why) + self._advance(group)
        if not event.process_gone:
            return effects
        if self._current(event.client) is None:
            # A member of an earlier life: nothing will ask for it again.
            self._clients.pop(event.client, None)
        return effects

    def _awaited_rank(self, group: Group, client: str) -> int | None:
        rank = self._current(client)
        if self.incarnation is None or group.incarnation != self.incarnation.number:
            return None
        return rank if rank is not None and rank not in group.seats else None

    def _current(self, client: str) -> int | None:
        if self.incarnation is None:
            return None
        for rank, name in self.incarnation.clients.items():
            if name == client:
                return rank
        return None

    # -- progress ---------------------------------------------------------

    def _advance(self, changed: Group) -> list[fx.Effect]:
        """After a group changed: note what was decided, admit and prepare what may go on."""
        effects: list[fx.Effect] = []
        if changed.phase is Phase.DONE and self.groups.pop(changed.number, None) is not None:
            self._note_done(changed)
        progress: list[Callable[[], list[fx.Effect]]] = [self._admit_next, self._prepare_next]
        for step in progress:
            effects += step()
        return effects

    def _note_done(self, group: Group) -> None:
        if group.key is None or not group.store:
            return
        if group.outcome is Outcome.UNKNOWN:
            # Only a new look at the store can tell what stands there.
            self.store_open = False
            return
        if group.outcome is Outcome.COMMITTED:
            self.committed[group.key] = group.content_id
        self._note_attempt(group.key)

    def _admit_next(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        queued = sorted(
            (g for g in self.groups.values() if g.phase is Phase.QUEUED),
            key=lambda g: (g.epoch, g.number),
        )
        for group in queued:
            if not self.store_open:
                return effects + self.open_store(create=True)
            held = self.in_flight()
            if len(held) >= self.epochs_in_flight:
                break
            if any(g.epoch == group.epoch and g.lineage == group.lineage for g in held):
                continue
            stale = self._stale(group.epoch)
            if stale is not None:
                effects += group.fail(stale) + self._advance(group)
                continue
            effects += self._admit(group)
        return effects

    def _admit(self, group: Group) -> list[fx.Effect]:
        key = self._visible().get(group.epoch)
        if key is not None:
            return group.admit(key, store=False)
        attempt = self._attempts.get((group.lineage, group.epoch), 0) + 1
        return group.admit(DecisionKey(group.lineage, group.epoch, attempt), store=True)

    def _prepare_next(self) -> list[fx.Effect]:
        """Epochs are decided in order: only the oldest one in flight may prepare."""
        held = self.in_flight()
        if held and held[0].ready:
            return held[0].prepare()
        return []


def _refuse(event: ev.MemberOpened, error: GroupIOError) -> fx.Effect:
    return fx.TellFailed(fx.MemberSeat(event.rank, event.client, event.save_id), error)
