"""State of one node's agent machine: its groups, their leases, and its memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from groupio.model import CHUNK_BYTES, NodeReport
from groupio.plan.layout import Layout, Wave
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.ledger import Extent, Ledger

REPLICA_ARENA = 0
"""The arena of the agent itself, for chunks of other nodes."""


@dataclass(slots=True)
class Lease:
    """A member's share of its group's memory."""

    seat: fx.MemberSeat
    layout: Layout
    window: int = 0
    waves: list[Wave] = field(default_factory=list)
    extent: Extent | None = None
    granted: int = -1
    copied: int = -1
    stored: int = -1
    stopped: bool = False


@dataclass(slots=True)
class NodeGroup:
    """A group as this node sees it."""

    order: fx.AdmitGroup
    leases: dict[int, Lease]
    number: int
    """What its controller calls it now; here, and for the driver, it keeps its first number."""
    admitted: bool = False
    refused: bool = False
    started: bool = False
    aborting: bool = False
    idle: bool = False
    """The cancelled job touches nothing any more."""
    asked: dict[int, ev.LeaseAsked] = field(default_factory=dict)
    """What its members asked for, by rank."""
    replicas: list[Extent] = field(default_factory=list)
    """Memory for chunks of other nodes."""
    hashed: NodeReport | None = None
    stored: NodeReport | None = None
    copies: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))
    record: ev.SealedRecord | None = None
    round: int = 0
    """The newest round that was ordered."""
    orders: deque[fx.StoreChunks] = field(default_factory=deque)
    """Rounds that are not over, the first of them under way."""
    said: list[Any] = field(default_factory=list)
    """What was reported of a planned group, in order: a controller may not have heard it."""
    resting: bool = False
    """The job has stored all, and told so."""
    closing: fx.CloseGroup | None = None
    """The group is decided; its memory is given back once its job is idle."""

    @property
    def room(self) -> int:
        """Bytes of chunks of other nodes that are sure to fit: each extent may end with a gap."""
        gaps = CHUNK_BYTES * max(len(self.replicas) - 1, 0)
        return sum(extent.length for extent in self.replicas) - gaps

    @property
    def in_memory(self) -> bool:
        """Every byte of its members on this node is in memory at once, not wave by wave."""
        return all(len(lease.waves) == 1 for lease in self.leases.values())

    @property
    def all_copied(self) -> bool:
        """Its members on this node have handed over all that they save."""
        return all(x.copied == len(x.waves) - 1 for x in self.leases.values())

    @property
    def quiet(self) -> bool:
        """Nobody touches the group's memory or segments. Of a planned group peers may be getting
        chunks: only its cancelled job knows."""
        return not self.started or self.idle or (self.resting and not self.order.planned)


@dataclass(slots=True)
class NodeState(ABC):
    """The state of one node; :class:`groupio.protocol.agent.AgentMachine` is its machine."""

    node: str
    ledger: Ledger
    groups: dict[int, NodeGroup] = field(default_factory=dict)
    arenas: dict[str, int] = field(default_factory=dict)
    """The arena of each client."""
    _asked: dict[tuple[str, int], ev.LeaseAsked] = field(default_factory=dict)
    _ahead: dict[str, Extent] = field(default_factory=dict)
    """Free memory that clients got ahead of their first saves."""
    _gone: set[str] = field(default_factory=set)
    _held: dict[tuple[str, int], list[Extent]] = field(default_factory=dict)
    _arena_count: int = 0
    keeps_content: bool = False
    """Memory of committed groups serves readers until it is used again."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """Groups by the number that a later controller gave them."""
    _replicas_open: bool = False
    _orphans: set[int] = field(default_factory=set)
    """Arenas of clients that are gone, which still hold chunks of committed groups."""

    def _find(self, client: str, save_id: int) -> tuple[NodeGroup, Lease] | None:
        for group in self.groups.values():
            for lease in group.leases.values():
                if (lease.seat.client, lease.seat.save_id) == (client, save_id):
                    return group, lease
        return None

    def _by_number(self, number: int) -> NodeGroup | None:
        """The group that a controller calls so now."""
        group = self.groups.get(self._numbers.get(number, number))
        return None if group is None or group.number != number else group

    def _say(self, group: NodeGroup, event: Any) -> list[fx.Effect]:
        """Report something of a group, and remember it until the group is closed."""
        if group.closing is not None:
            return []
        group.said.append(event)
        return [fx.Report(event, group.order.group)]

    @abstractmethod
    def _admit_next(self) -> list[fx.Effect]: ...

    # -- arenas ---------------------------------------------------------

    def _open_arena(self, client: str) -> list[fx.Effect]:
        if client in self.arenas:
            return []
        self._arena_count += 1
        self.arenas[client] = self._arena_count
        return [fx.OpenArena(self._arena_count, client)]

    def _lease_replica(self, group: NodeGroup, nbytes: int) -> list[fx.Effect]:
        """Lease memory for chunks of other nodes."""
        effects: list[fx.Effect] = []
        if not self._replicas_open:
            self._replicas_open = True
            effects.append(fx.OpenArena(REPLICA_ARENA, ""))
        group.replicas.append(self.ledger.lease(REPLICA_ARENA, nbytes, sparing=True))
        return effects + drop_content(group.replicas[-1])

    def _drop_if_gone(self, client: str) -> list[fx.Effect]:
        """Give back the arena of a client whose process is gone, once nothing uses it."""
        arena = self.arenas.get(client)
        if client not in self._gone:
            return []
        if arena is None:
            self._gone.discard(client)
            return []
        if self.ledger.held(arena):
            return []
        self._ahead.pop(client, None)
        self._gone.discard(client)
        del self.arenas[client]
        useless = [e for e in self.ledger.extents if e.arena == arena and e.content is None]
        if len(useless) < sum(e.arena == arena for e in self.ledger.extents):
            # What the client saved serves readers until the memory is needed.
            self._orphans.add(arena)
            for extent in useless:
                self.ledger.discard(extent)
            return [punch(extent) for extent in useless]
        self.ledger.drop_arena(arena)
        return [fx.CloseArena(arena)]


def punch(extent: Extent) -> fx.Effect:
    """Give the extent's memory back."""
    return fx.Punch(extent.arena, extent.offset, extent.length)


def drop_content(extent: Extent) -> list[fx.Effect]:
    """Nothing is served from the extent any more."""
    if extent.content is None:
        return []
    extent.content = None
    return [fx.DropContent(extent.arena, extent.offset, extent.length)]
