"""Stores a sealed group of several nodes, round by round.

A round is one plan of who writes, moves and keeps which chunks. A new round is planned when a node
is lost or cannot get chunks that it was told to fetch. What nodes have done, and what living nodes
are still about to do, stands: only the rest is planned anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from groupio.errors import GroupIOError
from groupio.model import NodeReport
from groupio.plan.cache import PlanCache
from groupio.plan.copies import domains_of
from groupio.plan.grouped import GroupPlan, NodeOrder, missing_chunks, plan_group
from groupio.plan.write import FlushPlan
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.nodes import Nodes

ROUNDS_MAX = 8
"""So many plans are made for one group at most, those that only make copies not counted."""

ROOM_ASKS_MAX = 8
"""So often are nodes asked for more room for the copies of one group."""


@dataclass(slots=True)
class Storing:
    """The planned part of one group; ``members`` are the nodes of its members, in rank order."""

    number: int
    epoch: int
    members: tuple[str, ...]
    replicas: int
    node_local: bool
    holders: set[str]
    """Living nodes that the group has memory on."""
    shares: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    """Bytes of the members of each node, from which the shares were made."""
    cramped: tuple[str, ...] = ()
    """Nodes without the memory that copies need; there will be none then."""
    hashed: dict[str, NodeReport] = field(default_factory=dict)
    stored: dict[str, NodeReport] = field(default_factory=dict)
    """The newest of each node: it covers all that the node did."""
    copies: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Nodes whose memory is gone, or not to be trusted any more."""
    notes: list[str] = field(default_factory=list)
    round: int = 0
    """The newest number that an order or a plan got."""
    planned: bool = False
    """A plan was asked for; the orders of the newest one may be still to come."""
    thin: str = ""
    """Why the newest plan does not make so many copies of every chunk, or ""."""
    record: ev.SealedRecord | None = None
    gained: bool = False
    """Some node has more room for copies than when the newest plan was made."""
    _plans: int = 0
    _planning: int = 0
    _shunned: set[str] = field(default_factory=set)
    _orders: dict[str, list[fx.StoreChunks]] = field(default_factory=dict)
    """What nodes were told and have not finished, oldest first."""
    _keeps: dict[str, int] = field(default_factory=dict)
    """The round up to which a node has to say that it keeps what it was told to keep."""
    _recorded: set[str] = field(default_factory=set)
    """Nodes that keep the sealed record: it is long, and sent once."""
    _asks: int = 0
    _asked: dict[str, int] = field(default_factory=dict)
    """Replica bytes that nodes are asked to have in all, and have not answered."""
    _short: GroupPlan | None = None
    """The newest plan, if it lacked the room that nodes are asked for."""

    # -- questions ---------------------------------------------------------

    @property
    def all_hashed(self) -> bool:
        """Every chunk of the group is known."""
        return all(node in self.hashed for node in self.members)

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The nodes that have not hashed all they have, then those with orders to finish."""
        hashing = tuple(node for node in self.members if node not in self.hashed)
        return hashing or tuple(sorted(node for node, orders in self._orders.items() if orders))

    @property
    def complete(self) -> bool:
        """Every chunk is durable."""
        told = any(self._orders.values()) or self._asked
        return self.planned and not self._planning and not told

    def replicated(self, table: Nodes) -> bool:
        """So many nodes hold every chunk, and the sealed record, as the members asked for."""
        settled = self.planned and not (self._planning or self._keeps or self._asked)
        return settled and not self.obstacle(table)

    def obstacle(self, table: Nodes) -> str:
        """Why there will not be ``replicas`` copies of every chunk, or ""."""
        domains = len(domains_of(table.links(self.holders - self.lost)))
        if domains < self.replicas:
            return reasons.few_domains(self.replicas, domains)
        return reasons.cramped(self.replicas, self.cramped) if self.cramped else self.thin

    def reports(self) -> tuple[NodeReport, ...]:
        """One report of each node, from which the manifest is made; everything is durable."""
        durable = self._durable()
        whole = [durable.get(n, _without_own(self.hashed[n])) for n in self.members]
        helpers = [durable[n] for n in sorted(durable.keys() - set(self.members))]
        return (*whole, *(r for r in helpers if len(r.chunks)))

    def _durable(self) -> dict[str, NodeReport]:
        """What stands in the store whatever becomes of the nodes."""
        if not self.node_local:
            return self.stored
        return {node: r for node, r in self.stored.items() if node in self.holders}

    # -- rounds ---------------------------------------------------------

    def next_round(self, table: Nodes, *, counted: bool = True) -> list[fx.Effect] | GroupIOError:
        """Have the rest planned; an error when bytes are lost or there were too many rounds."""
        if counted and self._plans == ROUNDS_MAX:
            return reasons.rounds_over(self.epoch, ROUNDS_MAX, self.notes)
        reports = tuple(self.hashed[node] for node in self.members)
        trusted = self.holders - self.lost
        done = tuple(report for _, report in sorted(self._durable().items()))
        copies = {n: self.copies[n] for n in sorted(trusted & self.copies.keys())}
        if self.lost:  # else all that was hashed is in some node's memory, or stored
            missing = missing_chunks(reports, frozenset(self.lost), done, copies)
            if missing.chunks:
                return reasons.bytes_lost(self.epoch, missing, self.notes)
        self._plans += counted
        self.round += 1
        self._planning, self.planned = self.round, True
        self.thin, self._short = "", None
        self._asked.clear()
        links = table.links(trusted, self._shunned)
        replicas = 1 if self.cramped else min(self.replicas, len(domains_of(links)))
        return [
            fx.MakePlan(
                group=self.number,
                round=self.round,
                reports=reports,
                nodes=links,
                replicas=replicas,
                shares={n: s for n, s in self.shares.items() if n in trusted},
                lost=tuple(sorted(self.lost)),
                done=done,
                copies=copies,
                earlier=tuple(self._under_way()),
                reserved=self.reserved,
            )
        ]

    def _under_way(self) -> Iterable[GroupPlan]:
        """The plans of earlier rounds, as far as living nodes still carry them out."""
        depth = max(map(len, self._orders.values()), default=0)
        for i in range(depth):
            orders = {node: told[i].order for node, told in self._orders.items() if i < len(told)}
            yield GroupPlan(orders, 0.0, 0, 0, 0, (), False)

    def awaits(self, number: int) -> bool:
        """The plan of this round is the one that is waited for."""
        return number == self._planning and number > 0

    def take_plan(self, plan: GroupPlan, table: Nodes) -> list[fx.Effect]:
        """A plan is made: tell the nodes."""
        self._planning = 0
        self._short = plan
        effects = self._ask_room(plan)
        if not effects:
            self.stay_short()
        nothing = NodeOrder(np.zeros(0, np.int64), (), False)
        orders = {
            node: self._without_record(node, plan.orders.get(node, nothing))
            for node in self.holders - self.lost
        }
        # An order with the record takes long on its way: it keeps no other one waiting.
        for node, order in sorted(orders.items(), key=lambda pair: (pair[1].record, pair[0])):
            busy = len(order.write) or order.fetch or order.record
            if not busy and (node in self.stored or node not in self.members):
                continue
            effects.append(self._tell(node, order, table))
        return effects

    def _ask_room(self, plan: GroupPlan) -> list[fx.Effect]:
        """Ask nodes for the room that some copies lack, as after the loss of a node."""
        if not plan.room or self._asks == ROOM_ASKS_MAX:
            return []
        self._asks += 1
        self.gained = False
        self._asked = {n: plan.room[n] for n in sorted(plan.room.keys() & self.holders)}
        return [fx.TakeRoom(node, self.number, room) for node, room in self._asked.items()]

    def on_room(self, event: ev.NodeRoom) -> bool:
        """A node says how much room it has; True when it is the last one that was asked."""
        if event.node not in self.holders:
            return False
        before = self.shares.get(event.node, 0)
        self.shares[event.node] = max(before, event.replica_bytes)
        self.gained |= self.shares[event.node] > before
        return self._asked.pop(event.node, None) is not None and not self._asked

    def stay_short(self) -> None:
        """There is no more room: what the newest plan says stands."""
        plan, self._short = self._short, None
        assert plan is not None
        if plan.short_bytes:
            self.thin = reasons.thin(self.replicas, plan.short_bytes)
        self.notes += [note for note in plan.notes if note not in self.notes]

    def note_fewer(self, why: str) -> None:
        """Members were told of copies that are gone, and there will be no others."""
        note = reasons.fewer(self.replicas, sorted(self.lost), why)
        self.notes += [note] if note not in self.notes else []

    def _without_record(self, node: str, order: NodeOrder) -> NodeOrder:
        """The order without the record, where the node has it or will have it."""
        coming = any(told.record is not None for told in self._orders.get(node, ()))
        return replace(order, record=order.record and not coming and node not in self._recorded)

    def _tell(self, node: str, order: NodeOrder, table: Nodes) -> fx.StoreChunks:
        sources = {name for part in order.fetch for name in (part.source, *part.others)}
        told = fx.StoreChunks(
            node=node,
            group=self.number,
            round=self.round,
            order=order,
            addresses=table.addresses(sources),
            record=self.record if order.record else None,
        )
        self._orders.setdefault(node, []).append(told)
        if order.record or any(part.keep.any() for part in order.fetch):
            self._keeps[node] = told.round
        return told

    def again(self, node: str) -> list[fx.Effect]:
        """A node may not have heard its orders; it knows those that it did hear by their round."""
        asked = [fx.TakeRoom(node, self.number, n) for n in (self._asked.get(node),) if n]
        return [*asked, *self._orders.get(node, ())]

    def retry(self, node: str) -> list[fx.Effect]:
        """A node failed for a while: it is told once more what it has not finished."""
        effects: list[fx.Effect] = []
        for i, told in enumerate(self._orders.get(node, ())):
            self.round += 1
            self._orders[node][i] = msgspec.structs.replace(told, round=self.round)
            if node in self._keeps:
                self._keeps[node] = self.round
            effects.append(self._orders[node][i])
        return effects

    # -- what nodes say ---------------------------------------------------------

    def on_replicated(self, event: ev.NodeReplicated) -> None:
        """A node keeps what it was told to keep up to this round."""
        if event.node not in self.holders:
            return
        self.copies[event.node] = event.copies
        told = [t for t in self._orders.get(event.node, ()) if t.round <= event.round]
        if any(t.record is not None for t in told):
            self._recorded.add(event.node)
        if event.round >= self._keeps.get(event.node, event.round + 1):
            del self._keeps[event.node]

    def on_stored(self, event: ev.NodeStored) -> None:
        """A node has stored what it was told up to this round."""
        if event.node not in self.holders:
            return
        self.stored[event.node] = event.report
        left = [told for told in self._orders.get(event.node, ()) if told.round > event.round]
        self._orders[event.node] = left

    def on_short(self, event: ev.NodeShort, table: Nodes) -> bool:
        """Peers gave a node nothing, or wrong bytes; True when that needs another round."""
        told = [t for t in self._orders.get(event.node, ()) if t.round == event.round]
        if not told:
            return False
        self._orders[event.node].remove(told[0])
        if event.copies is not None:
            self.copies[event.node] = event.copies
        if self._keeps.get(event.node) == event.round:
            del self._keeps[event.node]
        for liar in event.liars:
            table.liars.add(liar)
            self.lost.add(liar)
            self._forget(liar)
            self.notes.append(f"node {liar} sent node {event.node} wrong bytes")
        self._shunned.update(event.asked)
        return True

    def replan(self, nodes: Iterable[str]) -> None:
        """These nodes failed at their orders: the next plan gives out anew what was in them.

        A node that is told of a later round answers for all rounds up to it, and those that it
        failed at would count as done.
        """
        for node in nodes:
            self._orders.pop(node, None)
            self._keeps.pop(node, None)

    def lose(self, node: str) -> None:
        """A node is gone."""
        self.holders.discard(node)
        self.lost.add(node)
        self._forget(node)

    def _forget(self, node: str) -> None:
        for table in (self.copies, self._orders, self._keeps, self._asked):
            table.pop(node, None)


def _without_own(report: NodeReport) -> NodeReport:
    """A report as far as it names older segments: new ones are not known to be durable."""
    own = np.array([segment.own for segment in report.segments], np.bool_)
    if not own.any():
        return report
    chunks = report.chunks
    placed = chunks.segments >= 0
    new = placed & own[np.where(placed, chunks.segments, 0)]
    segments = np.where(new, np.int32(-1), chunks.segments)
    kept = np.cumsum(~own).astype(np.int32) - 1
    segments = np.where(segments >= 0, kept[np.maximum(segments, 0)], np.int32(-1))
    return replace(
        report,
        segments=tuple(s for s in report.segments if not s.own),
        chunks=replace(chunks, segments=segments),
    )


def make_plan(
    effect: fx.MakePlan,
    *,
    backend_bytes_per_s: float | None = None,
    cache: PlanCache[FlushPlan] | None = None,
) -> ev.Planned:
    """The answer to a MakePlan: what drivers run, in a thread if they like."""
    try:
        plan = plan_group(
            effect.reports,
            effect.nodes,
            replicas=effect.replicas,
            shares=effect.shares,
            backend_bytes_per_s=backend_bytes_per_s,
            lost=frozenset(effect.lost),
            done=effect.done,
            copies=effect.copies,
            earlier=effect.earlier,
            reserved=effect.reserved,
            cache=cache,
        )
    except GroupIOError as error:
        return ev.Planned(effect.group, effect.round, error=error)
    return ev.Planned(effect.group, effect.round, plan)
