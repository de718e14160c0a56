"""State of one job's controller: clients, nodes, groups, and what stands in the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol.group import BEFORE_STAGED, HOLDS_MEMORY, Group
from groupio.protocol.members import Client, Incarnation
from groupio.protocol.missed import Missed
from groupio.protocol.nodes import Nodes
from groupio.protocol.presence import Life, Presence
from groupio.protocol.proving import Proofs
from groupio.protocol.resume import Refusals, Resume
from groupio.protocol.waiting import WaitingRoom

EPOCHS_IN_FLIGHT = 2
"""How many epochs may hold memory at once; a third one waits before its copy."""


@dataclass(slots=True)
class JobState(ABC):
    """The state of a job; :class:`groupio.protocol.controller.Controller` is its machine."""

    epochs_in_flight: int = EPOCHS_IN_FLIGHT
    incarnation: Incarnation | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    draining: bool = False
    lineages: dict[int, Lineage] = field(default_factory=dict)
    committed: dict[DecisionKey, bytes] = field(default_factory=dict)
    store_open: bool = False
    node_local: bool = True
    job: str = ""
    store_id: str = ""
    node: str = ""
    """The node of the agent that hosts this controller, if one does."""
    resumes: bool = False
    """Other agents may hold what an earlier controller of the job left undecided."""
    proves: bool = False
    """Agents have to prove that they see this controller's store."""
    nodes: Nodes = field(default_factory=Nodes)
    proofs: Proofs = field(default_factory=Proofs)
    resume: Resume = field(default_factory=Resume)
    refusals: Refusals = field(default_factory=Refusals)
    _opening: bool = False
    _store_away: bool = False
    """The store could not be reached; a timer runs until it is tried again."""
    _creating: bool = False
    _new_lineage: bool = False
    _begins: int = 0
    """The group for whose epoch the new lineage is made; 0: it is made for an incarnation."""
    _stale_opens: dict[int, dict[int, ev.MemberOpened]] = field(default_factory=dict)
    """By epoch and rank, members of this incarnation that were refused as stale, until all are."""
    _attempts: dict[tuple[int, int], int] = field(default_factory=dict)
    _incarnation_max: int = 0
    _replaced: dict[str, None] = field(default_factory=dict)
    """Formed launches that gave way to another one, oldest first."""
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
        """Groups that a reader should wait for: staged, or doomed, and not the reader's own.

        0 stands for attempts of an earlier controller that may still be resumed.
        """
        earlier = [0] if self.resume.attempts else []
        return earlier + [
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

    def _note_attempt(self, key: DecisionKey) -> None:
        at = (key.lineage, key.epoch)
        self._attempts[at] = max(self._attempts.get(at, 0), key.attempt)

    def _life(self) -> Life:
        assert self.incarnation is not None
        return Life(self.job, self.incarnation.world_size, self.incarnation.launch_id)

    def _current(self, client: str) -> int | None:
        """The rank of a client in the present life of the job, or None."""
        return None if self.incarnation is None else self.incarnation.rank_of(client)

    # -- the machine ---------------------------------------------------------

    @abstractmethod
    def _give_up(
        self, groups: Sequence[Group], reason: Callable[[Group], GroupIOError]
    ) -> list[fx.Effect]: ...

    @abstractmethod
    def _advance(self, *changed: Group) -> list[fx.Effect]: ...

    @abstractmethod
    def _retry_waiting(self) -> list[fx.Effect]: ...

    @abstractmethod
    def _on_opened(self, event: ev.MemberOpened) -> list[fx.Effect]: ...

    @abstractmethod
    def _on_gone(self, event: ev.MemberGone) -> list[fx.Effect]: ...

    @abstractmethod
    def _watch(self, rank: int | None) -> list[fx.Effect]: ...

    @abstractmethod
    def open_store(self, *, create: bool) -> list[fx.Effect]:
        """Open and recover the store now; without ``create`` only if there is one."""
        ...
