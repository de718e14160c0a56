"""One group: the collective that writes one epoch, from its first member to its decision.

::

    GATHERING -> QUEUED -> ADMITTING -> COPYING -> STORING -> PREPARING -> DECIDING -> DONE
        |          |           |           |           |          |           |
        +----------+-----------+-----------+---------->ABORTING -> ABORT_DECIDING -> DONE

STAGED is the step from COPYING to STORING: every member's bytes are in an agent's memory and the
group is sealed. Before it, a lost member, a lost node or the deadline aborts the group; after it,
only the content, the store, or the loss of all nodes that hold some bytes can.

A group of one node writes while its members copy. Where other nodes can help, the group is
*planned*: bytes stay in memory until all is known, then each node gets orders (:mod:`.storing`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from groupio.errors import GroupIOError, Outcome, StorageFull
from groupio.model import DecisionKey, Level
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.planned import PlannedGroup
from groupio.protocol.state import BEFORE_STAGED, HOLDS_MEMORY, GroupState, Phase, Seat

__all__ = ["BEFORE_STAGED", "HOLDS_MEMORY", "Group", "GroupState", "Phase", "Seat"]

DECIDE_TRIES = 5
"""How often an abort decision is tried before the outcome is reported as unknown."""

DECIDE_BACKOFF_S = 0.2

_AGREED = ("deadline_s", "replicated", "when_full", "door", "replicas")
"""What all members of a group have to say alike; their incarnation agrees on the rest."""


@dataclass(slots=True)
class Group(PlannedGroup):
    """The machine of one group; its controller calls it and sends its effects."""

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
        effects = self._publish() if store else []
        if store and self._to_be_planned():
            self.storing = self._new_storing()
        effects += self.admission.begin(self._order(node) for node in self._wanted())
        self._busy = set(self.admission.asked)
        return effects + self._unreachable()

    # -- events ---------------------------------------------------------

    def handle(self, event: Any) -> list[fx.Effect]:
        """The effects of an event that names this group. Late and repeated ones change nothing."""
        match event:
            case ev.NodeAdmitted():
                return self.admission.admitted(event) + self._maybe_copy()
            case ev.NodeBusy(node=node):
                return self._on_busy(node)
            case ev.InflightPublished(error=error):
                return self._on_published(error)
            case ev.NodeRefused(error=error):
                return self.fail(error) if self.phase is Phase.ADMITTING else []
            case ev.NodeFailed():
                return self._on_node_failed(event)
            case ev.MemberCopied(rank=rank, node=node):
                return self._on_copied(rank, node)
            case ev.NodeStored():
                return self._on_stored(event)
            case ev.NodeHashed() | ev.NodeReplicated() | ev.NodeShort() | ev.Planned():
                return self._on_planned_step(event)
            case ev.NodeRoom():
                return self._on_room(event)
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

    def _publish(self) -> list[fx.Effect]:
        assert self.key is not None
        self._publishing, self.unpublished = True, False
        life = (self.incarnation, self.world_size, self.nodes)
        return [fx.PublishInflight(self.number, self.key, *life)]

    def can_wait(self, error: GroupIOError) -> bool:
        """The attempt could not be made visible: there is time to do it when the store is back."""
        return self.phase is Phase.ADMITTING and reasons.may_return(error)

    def publish_again(self) -> list[fx.Effect]:
        """The store is back."""
        return self._publish() if self.unpublished else []

    def _on_published(self, error: GroupIOError | None) -> list[fx.Effect]:
        self._publishing = False
        if error is not None and self.can_wait(error):
            self.unpublished = True
            return []
        if error is None:
            self.published = True
            return self._maybe_copy() + self._maybe_decide_abort()
        if self.phase is Phase.ABORTING:
            return self._maybe_decide_abort()
        return self.fail(error)

    def _maybe_copy(self) -> list[fx.Effect]:
        if self.phase is not Phase.ADMITTING:
            return []
        self._busy = set(self.admission.asked)
        if not self.admission.complete or (self.store and not self.published):
            return []
        self.phase = Phase.COPYING
        if self.storing is not None:
            self.storing.shares = dict(self.admission.shares)
            self.storing.cramped = tuple(sorted(self.admission.cramped))
        started = [fx.StartCopy(node, self.number) for node in self.admission.orders]
        return [*started, *self._unreachable()]

    def _on_copied(self, rank: int, node: str) -> list[fx.Effect]:
        if self.phase is not Phase.COPYING:
            return []
        if foreign := self._foreign(node, (rank,)):
            return self.fail(reasons.not_its_ranks(self.epoch, node, foreign))
        self.seats[rank].copied = True
        if self.missing:
            return []
        self.phase = Phase.STORING
        return [fx.StopTimer(self.timer), *self.staged(), *self._maybe_plan(), *self._maybe_wait()]

    # -- losses ---------------------------------------------------------

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
            return self._try_again()
        if self.phase not in BEFORE_STAGED:
            return []
        missing = self.missing
        crowded = not self.admission.complete
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
        self.phase = Phase.PREPARING
        stopped = [fx.StopTimer(self.timer)] if self._retrying else []
        self._retrying = False
        return [*stopped, *self._prepare()]

    def _prepare(self) -> list[fx.Effect]:
        assert self.key is not None
        if self.storing is None:
            reports = tuple(self._reports[node] for node in self.nodes)
        else:
            reports = self.storing.reports()
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
        if self.phase is not Phase.PREPARING or self._retrying:
            return []
        if event.error is not None:
            if reasons.is_away(event.error):
                return self._wait_for_store(event.error)
            # A record that did not fit is not there; after any other error it may be.
            self._maybe_prepared &= not isinstance(event.error, StorageFull)
            return self.fail(event.error)
        if isinstance(event, ev.Compared):
            return self._committed() if event.equal else self.fail(reasons.conflict(self.first))
        self.content_id = event.content_id
        self.phase, self.away, self._waits = Phase.DECIDING, None, 0
        effects = [] if self.node_local else self._tell(Level.REMOTE)
        return [*effects, *self._decide_commit()]

    def _decide_commit(self) -> list[fx.Effect]:
        assert self.key is not None
        return [fx.Decide(self.number, self.key, True, self.incarnation)]

    def fail(self, error: GroupIOError) -> list[fx.Effect]:
        """Give the group up with this error; later reasons do not replace the first."""
        if self.phase in (Phase.ABORTING, Phase.ABORT_DECIDING, Phase.DECIDING, Phase.DONE):
            return []
        self.error, self._retrying = error, False
        effects: list[fx.Effect] = [fx.StopTimer(self.timer)]
        if self.phase in (Phase.GATHERING, Phase.QUEUED):
            return effects + self._failed(delete=False)
        self.phase, self.unpublished = Phase.ABORTING, False
        self.admission.over = True
        lost = [node for node in self.admission.asked if self.table.gone(node)]
        self._busy = self.admission.asked.difference(lost)
        effects += [fx.AbortGroup(node, self.number) for node in self._in_order(self._busy)]
        return effects + self._maybe_decide_abort()

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
        if self.phase is not Phase.DECIDING or self._retrying:
            return []
        if event.error is not None:
            if reasons.is_away(event.error):
                return self._wait_for_store(event.error)
            return self._unknown(event.error)
        if event.committed and (event.ours or self.resumed):
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
        if event.committed and self.resumed:
            # The earlier controller had it committed after all; its members are the same.
            self.overruled = True
            return self._committed()
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
        notes: tuple[str, ...] = () if self.store else (same,)
        if self.storing is not None:
            notes = tuple(self.storing.notes)
        effects: list[fx.Effect] = []
        if self.node_local or not self.store:
            effects += self._tell(Level.REMOTE)
        effects += self._tell(Level.DURABLE, *notes)
        effects += [
            fx.CloseGroup(node, self.number, committed=self.store, keep_segments=self.store)
            for node in self._to_close()
        ]
        if self.store:
            effects.append(fx.ForgetInflight(self.number, self.key))
        return effects

    def doubt(self, error: GroupIOError) -> list[fx.Effect]:
        """A node of the group sees another store than the controller.

        A decision that is tried again, as the store was opened anew, may stand in either of them.
        """
        if self.phase is not Phase.DECIDING or not self._retrying:
            return []
        self._retrying = False
        return [fx.StopTimer(self.timer), *self._unknown(error)]

    def _failed(self, *, delete: bool) -> list[fx.Effect]:
        assert self.error is not None
        if self.stands if self.key is None else not self.store:
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
                for node in self._to_close()
            ]
        if self.key is not None and self.store and self.outcome is not Outcome.UNKNOWN:
            # Also when its publication failed: the record may be there all the same.
            effects.append(fx.ForgetInflight(self.number, self.key))
        return effects
