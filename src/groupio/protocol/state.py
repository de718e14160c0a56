"""State of one group, and what its members are told of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from groupio.errors import GroupIOError, Outcome
from groupio.model import DecisionKey, Level, NodeReport
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.admission import Admission
from groupio.protocol.nodes import Nodes
from groupio.protocol.storing import Storing


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
class GroupState(ABC):
    """The state of one group; :class:`groupio.protocol.group.Group` is its machine."""

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
    stands: bool = False
    """The epoch is committed already, whatever becomes of this group."""
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
    table: Nodes = field(default_factory=Nodes)
    admission: Admission = field(default_factory=Admission)
    storing: Storing | None = None
    """What is known of the bytes of a planned group; None where each node writes at once."""
    resumed: bool = False
    """An earlier controller of the job began the attempt, and may even have decided it."""
    away: GroupIOError | None = None
    """The store cannot be reached now; it is tried again."""
    notes: tuple[str, ...] = ()
    """What all members are told with STAGED."""
    unpublished: bool = False
    """The store was away when the attempt was to be made visible; it will be when it is back."""
    _publishing: bool = False
    _reports: dict[str, NodeReport] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)
    _returned: set[str] = field(default_factory=set)
    """Lost nodes that are back and still have the group in memory."""
    _levels: list[fx.TellReached | fx.TellUnreachable] = field(default_factory=list)
    """What all members were told, for nodes that may not have heard it."""
    _maybe_prepared: bool = False
    _retrying: bool = False
    _tries: int = 0
    _waits: int = 0
    _failed_nodes: set[str] = field(default_factory=set)

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
    def waits_for(self) -> tuple[str, ...]:
        """The nodes whose bytes a sealed group still waits for."""
        if self.phase is not Phase.STORING:
            return ()
        if self.storing is not None:
            return self.storing.waits_for
        return tuple(node for node in self.nodes if node not in self._reports)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that the members were told of, the first one first."""
        reached = (told.level for told in self._levels if isinstance(told, fx.TellReached))
        return tuple(dict.fromkeys(reached))

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
        if self.phase is not Phase.STORING:
            return False
        if self.storing is not None:
            return self.storing.complete
        return set(self._reports) == set(self.nodes)

    @property
    def stuck(self) -> bool:
        """It needs an open store to go on."""
        waits = self.phase in (Phase.PREPARING, Phase.DECIDING) and self.unproved
        return self.phase is Phase.QUEUED or self.ready or self.unpublished or waits

    @property
    def unproved(self) -> bool:
        """Some living node of the group has still to prove that it sees the controller's store."""
        return not self.table.unproved.isdisjoint(self.admission.orders)

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

    # -- what members are told ---------------------------------------------------------

    def staged(self) -> list[fx.Effect]:
        """Tell all members that the group is sealed, and what level it cannot reach."""
        arrivals = [seat.opened.at - seat.opened.elapsed_s for seat in self.seats.values()]
        told = [
            fx.TellReached(s.seat, Level.STAGED, min(arrivals), max(arrivals), self.notes)
            for s in self.seats.values()
        ]
        self._levels += told
        return [*told, *self._unreachable()]

    def _unreachable(self) -> list[fx.Effect]:
        """Tell the members once when the group cannot be REPLICATED; what was told stays told."""
        if self.first.replicas == 1 or not self.store:
            return []
        why = self._why_not_replicated()
        if why and self.storing is not None and Level.REPLICATED in self.levels:
            self.storing.note_fewer(why)
        if not why or self._told_of(Level.REPLICATED):
            return []
        error = reasons.not_replicated(self.epoch, why)
        told = [fx.TellUnreachable(s.seat, Level.REPLICATED, error) for s in self.seats.values()]
        self._levels += told
        return list(told)

    def _why_not_replicated(self) -> str:
        if self.storing is None:
            return reasons.few_domains(self.first.replicas, 1)
        return self.storing.obstacle(self.table)

    def _told_of(self, level: Level) -> bool:
        return any(told.level is level for told in self._levels)

    def _tell(self, level: Level, *notes: str) -> list[fx.Effect]:
        told = [fx.TellReached(seat.seat, level, notes=notes) for seat in self.seats.values()]
        self._levels += told
        return list(told)

    # -- nodes ---------------------------------------------------------

    def _node(self, rank: int) -> str:
        return self.seats[rank].opened.node

    def _foreign(self, node: str, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of ``ranks`` that are no members on this node."""
        own = {rank for rank, seat in self.seats.items() if seat.opened.node == node}
        return tuple(sorted(set(ranks) - own))

    def _in_order(self, nodes: Collection[str]) -> list[str]:
        return [node for node in self.admission.orders if node in nodes]

    def _to_close(self) -> list[str]:
        """The living nodes that may have the group in memory."""
        here = [*self._in_order(self.admission.asked), *sorted(self._returned)]
        return [node for node in here if not self.table.gone(node)]

    # -- the machine ---------------------------------------------------------

    @abstractmethod
    def fail(self, error: GroupIOError) -> list[fx.Effect]:
        """Give the group up."""
        ...

    @abstractmethod
    def _maybe_decide_abort(self) -> list[fx.Effect]: ...

    @abstractmethod
    def _maybe_copy(self) -> list[fx.Effect]: ...

    @abstractmethod
    def _prepare(self) -> list[fx.Effect]: ...

    @abstractmethod
    def _decide_commit(self) -> list[fx.Effect]: ...

    @abstractmethod
    def _decide_abort(self) -> list[fx.Effect]: ...
