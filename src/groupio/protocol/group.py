"""One group: the collective that writes one epoch, from its first member to its decision.

::

    GATHERING -> QUEUED -> ADMITTING -> COPYING -> STORING -> PREPARING -> DECIDING -> DONE
        |          |           |           |           |          |           |
        +----------+-----------+-----------+---------->ABORTING -> ABORT_DECIDING -> DONE

STAGED is the step from COPYING to STORING: every member's bytes are in an agent's memory and the
group is sealed. Before it, a lost member or the deadline aborts the group; after it, only the
content or the store can.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from groupio.errors import GroupIOError, Outcome, StorageFull
from groupio.model import DecisionKey, Level, NodeReport
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons

DECIDE_TRIES = 5
"""How often an abort decision is tried before the outcome is reported as unknown."""

DECIDE_BACKOFF_S = 0.2


class Phase(StrEnum):
    """Where a group stands."""

    GATHERING = "gathering"
    QUEUED = "queued"
    ADMITTING = "admitting"
    COPYING = "copying"
    STORING = "storing"
    PREPARING = "preparing"
    DECIDING = "deciding"
    ABORTING = "aborting"
    ABORT_DECIDING = "abort_deciding"
    DONE = "done"


BEFORE_STAGED = (Phase.GATHERING, Phase.QUEUED, Phase.ADMITTING, Phase.COPYING)
HOLDS_MEMORY = tuple(p for p in Phase if p not in (Phase.GATHERING, Phase.QUEUED, Phase.DONE))

_AGREED = ("deadline_s", "replicated", "when_full", "door")
"""What all members of a group have to say alike; their incarnation agrees on the rest."""


@dataclass(slots=True)
class Seat:
    """A member in its group."""

    opened: ev.MemberOpened
    copied: bool = False

    @property
    def seat(self) -> fx.MemberSeat:
        """Where to tell the member what becomes of its save."""
        return fx.MemberSeat(self.opened.rank, self.opened.client, self.opened.save_id)


@dataclass(slots=True)
class Group:
    """The machine of one group; its controller calls it and sends its effects."""

    number: int
    epoch: int
    incarnation: int
    lineage: int
    world_size: int
    node_local: bool = True
    phase: Phase = Phase.GATHERING
    seats: dict[int, Seat] = field(default_factory=dict)
    key: DecisionKey | None = None
    store: bool = True
    outcome: Outcome = Outcome.NOT_COMMITTED
    content_id: bytes = b""
    timer: str = ""
    """The name of this group's timer: its own, or the one under which its first member waited."""
    published: bool = False
    """The attempt is visible in the store, and its number is used up."""
    error: GroupIOError | None = None
    """Why the group was given up."""
    overruled: bool = False
    """Another controller decided the attempt: it knows more of the store than this one."""
    _admitted: set[str] = field(default_factory=set)
    _publishing: bool = False
    _reports: dict[str, NodeReport] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)
    _maybe_prepared: bool = False
    _retrying: bool = False
    _tries: int = 0

    # -- questions ---------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that the group still waits for."""
        if self.phase is Phase.GATHERING:
            return tuple(r for r in range(self.world_size) if r not in self.seats)
        if self.phase is Phase.COPYING:
            return tuple(sorted(r for r, seat in self.seats.items() if not seat.copied))
        return ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that members run on, in rank order."""
        return tuple(dict.fromkeys(self.seats[r].opened.node for r in sorted(self.seats)))

    @property
    def first(self) -> ev.MemberOpened:
        """The member that opened the group."""
        return next(iter(self.seats.values())).opened

    @property
    def ready(self) -> bool:
        """All nodes have stored their parts."""
        return self.phase is Phase.STORING and set(self._reports) == set(self.nodes)

    @property
    def doomed(self) -> bool:
        """The group was given up; its attempt will be decided abort."""
        return self.phase in (Phase.ABORTING, Phase.ABORT_DECIDING)

    def rank_of(self, client: str) -> int | None:
        """The rank of a client in this group, or None."""
        for rank, seat in self.seats.items():
            if seat.opened.client == client:
                return rank
        return None

    # -- gathering ---------------------------------------------------------

    def join(self, event: ev.MemberOpened, timer: str = "") -> list[fx.Effect]:
        """Take a member in; the first one starts the deadline. Disagreement fails the group.

        ``timer`` runs since the call of a member that had to wait before it could join.
        """
        assert self.phase is Phase.GATHERING
        effects: list[fx.Effect] = []
        if self.seats:
            effects += [fx.StopTimer(timer)] if timer else []
        else:
            self.timer = timer or f"group-{self.number}"
            effects += [] if timer else [fx.StartTimer(self.timer, event.remaining_s)]
        self.seats[event.rank] = Seat(event)
        for name in _AGREED:
            if getattr(self.first, name) != getattr(event, name):
                return effects + self.fail(reasons.disagreement(name, self.first, event))
        if not self.missing:
            self.phase = Phase.QUEUED
        return effects

    def admit(self, key: DecisionKey, *, store: bool) -> list[fx.Effect]:
        """Begin: reserve memory on all nodes and make the attempt visible in the store."""
        assert self.phase is Phase.QUEUED
        self.phase, self.key, self.store = Phase.ADMITTING, key, store
        effects: list[fx.Effect] = []
        if store:
            self._publishing = True
            effects.append(fx.PublishInflight(self.number, key, self.incarnation, self.world_size))
        self._busy = set(self.nodes)
        for node in self.nodes:
            seats = tuple(self.seats[r].seat for r in sorted(self.seats) if self._node(r) == node)
            effects.append(
                fx.AdmitGroup(
                    node, self.number, key, seats, store, self.first.when_full, self.first.door
                )
            )
        return effects

    def _node(self, rank: int) -> str:
        return self.seats[rank].opened.node

    # -- events ---------------------------------------------------------

    def handle(self, event: Any) -> list[fx.Effect]:
        """The effects of an event that names this group. Late and repeated ones change nothing."""
        match event:
            case ev.NodeAdmitted(node=node):
                return self._on_admitted(node)
            case ev.InflightPublished(error=error):
                return self._on_published(error)
            case ev.NodeRefused(error=error) | ev.NodeFailed(error=error):
                return self.fail(error)
            case ev.MemberCopied(rank=rank):
                return self._on_copied(rank)
            case ev.NodeStored(node=node, report=report):
                if self.phase in (Phase.COPYING, Phase.STORING):
                    self._reports[node] = report
                return []
            case ev.NodeIdle(node=node):
                self._busy.discard(node)
                return self._maybe_decide_abort()
            case ev.Prepared() | ev.Compared():
                return self._on_prepared(event)
            case ev.Decided():
                return self._on_decided(event)
            case ev.TimerFired():
                return self._on_timer()
        raise AssertionError(f"group {self.number} got {event!r}")

    def _on_admitted(self, node: str) -> list[fx.Effect]:
        self._admitted.add(node)
        return self._maybe_copy()

    def _on_published(self, error: GroupIOError | None) -> list[fx.Effect]:
        self._publishing = False
        if error is None:
            self.published = True
            return self._maybe_copy() + self._maybe_decide_abort()
        if self.phase is Phase.ABORTING:
            return self._maybe_decide_abort()
        return self.fail(error)

    def _maybe_copy(self) -> list[fx.Effect]:
        if self.phase is not Phase.ADMITTING or self._admitted != set(self.nodes):
            return []
        if self.store and not self.published:
            return []
        self.phase = Phase.COPYING
        return [fx.StartCopy(node, self.number) for node in self.nodes]

    def _on_copied(self, rank: int) -> list[fx.Effect]:
        if self.phase is not Phase.COPYING:
            return []
        self.seats[rank].copied = True
        if self.missing:
            return []
        self.phase = Phase.STORING
        arrivals = [seat.opened.at - seat.opened.elapsed_s for seat in self.seats.values()]
        told = [
            fx.TellReached(s.seat, Level.STAGED, min(arrivals), max(arrivals))
            for s in self.seats.values()
        ]
        return [fx.StopTimer(self.timer), *told]

    def withdraw(self, rank: int, error: GroupIOError) -> list[fx.Effect]:
        """A member says that it cannot go on. One whose bytes are all in memory need not."""
        if self.seats[rank].copied:
            return []
        return self.fail(reasons.gave_up(self.epoch, rank, error.message))

    def lose(self, rank: int, how: str) -> list[fx.Effect]:
        """A member is gone. One whose bytes are all in memory is no longer needed."""
        seat = self.seats.get(rank)
        if seat is not None and seat.copied:
            return []
        return self.fail(reasons.gone(self.epoch, rank, how))

    def _on_timer(self) -> list[fx.Effect]:
        if self._retrying:
            self._retrying = False
            return self._decide_abort()
        if self.phase not in BEFORE_STAGED:
            return []
        missing = self.missing
        crowded = self._admitted != set(self.nodes)
        slow = "there was no room in host memory" if crowded else "the store did not answer"
        what = {
            Phase.GATHERING: f"rank(s) {reasons.ranks(missing)} did not call save",
            Phase.QUEUED: "earlier epochs were still in flight",
            Phase.ADMITTING: slow,
            Phase.COPYING: f"rank(s) {reasons.ranks(missing)} did not finish copying",
        }[self.phase]
        return self.fail(reasons.overdue(self.epoch, self.first.deadline_s, what, missing))

    # -- decision ---------------------------------------------------------

    def prepare(self) -> list[fx.Effect]:
        """All parts are stored and earlier epochs are decided: write the epoch record."""
        assert self.ready
        assert self.key is not None
        self.phase = Phase.PREPARING
        reports = tuple(self._reports[node] for node in self.nodes)
        if not self.store:
            return [fx.CompareEpoch(self.number, self.key, self.world_size, reports)]
        self._maybe_prepared = True
        by_rank = sorted(self.seats)
        metadata = next(
            (m for r in by_rank if (m := self.seats[r].opened.metadata)), dict[str, Any]()
        )
        return [
            fx.PrepareEpoch(
                self.number,
                self.key,
                self.incarnation,
                self.world_size,
                reports,
                self.first.replicated,
                metadata,
                self.first.door,
            )
        ]

    def _on_prepared(self, event: ev.Prepared | ev.Compared) -> list[fx.Effect]:
        if self.phase is not Phase.PREPARING:
            return []
        assert self.key is not None
        if event.error is not None:
            # A record that did not fit is not there; after any other error it may be.
            self._maybe_prepared &= not isinstance(event.error, StorageFull)
            return self.fail(event.error)
        if isinstance(event, ev.Compared):
            return self._committed() if event.equal else self.fail(reasons.conflict(self.epoch))
        self.content_id = event.content_id
        self.phase = Phase.DECIDING
        effects = [] if self.node_local else self._tell(Level.REMOTE)
        return [*effects, fx.Decide(self.number, self.key, True, self.incarnation)]

    def _tell(self, level: Level, *notes: str) -> list[fx.Effect]:
        return [fx.TellReached(seat.seat, level, notes=notes) for seat in self.seats.values()]

    def fail(self, error: GroupIOError) -> list[fx.Effect]:
        """Give the group up with this error; later reasons do not replace the first."""
        if self.phase in (Phase.ABORTING, Phase.ABORT_DECIDING, Phase.DECIDING, Phase.DONE):
            return []
        self.error = error
        effects: list[fx.Effect] = [fx.StopTimer(self.timer)]
        if self.phase in (Phase.GATHERING, Phase.QUEUED):
            return effects + self._failed(delete=False)
        self.phase = Phase.ABORTING
        effects += [fx.AbortGroup(node, self.number) for node in self.nodes]
        return effects

    def _maybe_decide_abort(self) -> list[fx.Effect]:
        if self.phase is not Phase.ABORTING or self._busy or self._publishing:
            return []
        if not self.published:
            # Nobody has seen this attempt: there is nothing to decide.
            return self._failed(delete=self.store)
        self.phase = Phase.ABORT_DECIDING
        return self._decide_abort()

    def _decide_abort(self) -> list[fx.Effect]:
        assert self.key is not None
        assert self.error is not None
        self._tries += 1
        return [
            fx.Decide(
                self.number,
                self.key,
                False,
                self.incarnation,
                self.error.message,
                reasons.causes(self.error),
                drop_segments_if_full=not self._maybe_prepared,
            )
        ]

    def _on_decided(self, event: ev.Decided) -> list[fx.Effect]:
        if self.phase is Phase.ABORT_DECIDING:
            return self._on_abort_decided(event)
        if self.phase is not Phase.DECIDING:
            return []
        if event.error is not None:
            return self._unknown(event.error)
        if event.committed and event.ours:
            return self._committed()
        return self._overruled(event)

    def _on_abort_decided(self, event: ev.Decided) -> list[fx.Effect]:
        assert self.error is not None
        if self._retrying:
            return []
        if event.error is not None:
            if self._tries == DECIDE_TRIES:
                return self._unknown(self.error)
            self._retrying = True
            return [fx.StartTimer(self.timer, DECIDE_BACKOFF_S * 2 ** (self._tries - 1))]
        # A commit may stand here when another controller found a record that this one prepared.
        return self._overruled(event) if event.committed else self._failed(delete=True)

    def _overruled(self, event: ev.Decided) -> list[fx.Effect]:
        """Another controller decided this attempt."""
        assert self.key is not None
        self.overruled = True
        self.error = reasons.overruled(self.key, committed=event.committed)
        return self._failed(delete=not event.committed)

    def _unknown(self, error: GroupIOError) -> list[fx.Effect]:
        # A copy: the same error may have been told to others, of whom more is known.
        self.error = copy.copy(error).with_outcome(Outcome.UNKNOWN)
        self.outcome = Outcome.UNKNOWN
        return self._failed(delete=False)

    def _committed(self) -> list[fx.Effect]:
        assert self.key is not None
        self.phase, self.outcome = Phase.DONE, Outcome.COMMITTED
        same = f"epoch {self.epoch} was committed before with the same content"
        notes = () if self.store else (same,)
        effects: list[fx.Effect] = []
        if self.node_local or not self.store:
            effects += self._tell(Level.REMOTE)
        effects += self._tell(Level.DURABLE, *notes)
        effects += [
            fx.CloseGroup(node, self.number, committed=self.store, keep_segments=self.store)
            for node in self.nodes
        ]
        if self.store:
            effects.append(fx.ForgetInflight(self.number, self.key))
        return effects

    def _failed(self, *, delete: bool) -> list[fx.Effect]:
        assert self.error is not None
        if self.key is not None and not self.store:
            # The epoch stands, whatever became of this comparison with it.
            self.error = copy.copy(self.error).with_outcome(Outcome.COMMITTED)
        had_memory = self.phase not in (Phase.GATHERING, Phase.QUEUED)
        self.phase = Phase.DONE
        effects: list[fx.Effect] = [
            fx.TellFailed(seat.seat, self.error) for seat in self.seats.values()
        ]
        if had_memory:
            effects += [
                fx.CloseGroup(node, self.number, committed=False, keep_segments=not delete)
                for node in self.nodes
            ]
        if self.key is not None and self.store and self.outcome is not Outcome.UNKNOWN:
            # Also when its publication failed: the record may be there all the same.
            effects.append(fx.ForgetInflight(self.number, self.key))
        return effects
