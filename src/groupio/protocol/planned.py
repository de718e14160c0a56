"""The part of a group's machine that several nodes make necessary.

Admission on all of them, the rounds in which a planned group is stored, nodes that are lost or come
back, and a store that is away for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Level
from groupio.plan.copies import domains_of, replica_shares
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.resume import Rest
from groupio.protocol.state import BEFORE_STAGED, GroupState, Phase, Seat
from groupio.protocol.storing import Storing

AWAY_BACKOFF_S = 1.0
AWAY_BACKOFF_MAX_S = 30.0
"""While the store of a sealed group cannot be reached, it is tried again and again, never given up:
after so long at first, then after twice as long each time up to the maximum."""


@dataclass(slots=True)
class PlannedGroup(GroupState):
    """What groups do because of other nodes."""

    # -- admission ---------------------------------------------------------

    def _to_be_planned(self) -> bool:
        """Other nodes can help, or have to."""
        return self.table.known and len(self._wanted()) > 1

    def _wanted(self) -> tuple[str, ...]:
        """The nodes to admit the group on: those of members, then helpers."""
        helpers = [n for n in self.table.alive if n not in self.table.unproved and self.store]
        return tuple(dict.fromkeys((*self.nodes, *helpers)))

    def _new_storing(self) -> Storing:
        wanted = self._wanted()
        links = self.table.links(wanted)
        reserved = dict.fromkeys(self.nodes, 0)
        for seat in self.seats.values():
            reserved[seat.opened.node] += seat.opened.total_bytes
        replicas = min(self.first.replicas, len(domains_of(links)))
        shares = replica_shares(reserved, links, replicas) if replicas > 1 else {}
        return Storing(
            number=self.number,
            epoch=self.epoch,
            members=self.nodes,
            replicas=self.first.replicas,
            node_local=self.node_local,
            holders=set(wanted),
            shares=shares,
            reserved=reserved,
        )

    def _order(self, node: str) -> fx.AdmitGroup:
        assert self.key is not None
        return fx.AdmitGroup(
            node=node,
            group=self.number,
            key=self.key,
            seats=tuple(self.seats[r].seat for r in sorted(self.seats) if self._node(r) == node),
            store=self.store,
            when_full=self.first.when_full,
            door=self.first.door,
            planned=self.storing is not None,
            replica_bytes=0 if self.storing is None else self.storing.shares.get(node, 0),
            wait=not self.table.known or len(self._wanted()) == 1,
            incarnation=self.incarnation,
            world_size=self.world_size,
        )

    def _on_busy(self, node: str) -> list[fx.Effect]:
        if self.phase is Phase.ADMITTING:
            effects = self.admission.busy(node)
            self._busy = set(self.admission.asked)
            return effects
        self._busy.discard(node)
        return self._maybe_decide_abort()

    # -- planned groups ---------------------------------------------------------

    def _on_stored(self, event: ev.NodeStored) -> list[fx.Effect]:
        if self.phase not in (Phase.COPYING, Phase.STORING):
            return []
        if foreign := self._foreign(event.node, (m.rank for m in event.report.members)):
            return self.fail(reasons.not_its_ranks(self.epoch, event.node, foreign))
        self.away, self._waits = None, 0
        if self.storing is None:
            self._reports[event.node] = event.report
            return []
        self.storing.on_stored(event)
        return self._maybe_replicated()

    def _on_planned_step(
        self, event: ev.NodeHashed | ev.NodeReplicated | ev.NodeShort | ev.Planned
    ) -> list[fx.Effect]:
        """What nodes and the planner say while a planned group is stored."""
        storing = self.storing
        if storing is None or self.phase not in (Phase.COPYING, Phase.STORING, Phase.PREPARING):
            return []
        match event:
            case ev.NodeHashed(node=node, report=report):
                if foreign := self._foreign(node, (m.rank for m in report.members)):
                    return self.fail(reasons.not_its_ranks(self.epoch, node, foreign))
                if node in storing.members and node not in storing.hashed:
                    storing.hashed[node] = report
                return self._maybe_plan()
            case ev.NodeReplicated():
                storing.on_replicated(event)
                return self._maybe_replicated()
            case ev.NodeShort():
                return self._next_round() if storing.on_short(event, self.table) else []
        assert isinstance(event, ev.Planned)
        if self.phase is not Phase.STORING or not storing.awaits(event.round):
            return []
        if event.error is not None:
            return self.fail(event.error)
        if self._failed_nodes:
            return self._next_round()  # the plan counts on orders that failed meanwhile
        effects: list[fx.Effect] = list(storing.take_plan(event.plan, self.table))
        return effects + self._unreachable() + self._maybe_replicated()

    def _on_room(self, event: ev.NodeRoom) -> list[fx.Effect]:
        """A node took what room it has for further copies."""
        storing = self.storing
        if storing is None or self.phase is not Phase.STORING or not storing.on_room(event):
            return []
        if not storing.gained:
            storing.stay_short()
            return self._unreachable()
        # Once all is durable, only members that were not told of copies yet wait for them.
        late = storing.complete and Level.REPLICATED in self.levels
        return [] if late else self._next_round(counted=False)

    def _maybe_plan(self) -> list[fx.Effect]:
        """Everything is copied and hashed: have the first round planned."""
        storing = self.storing
        sealed = self.phase is Phase.STORING and storing is not None
        if not sealed or storing is None or storing.planned or not storing.all_hashed:
            return []
        storing.record = self._record(storing)
        return self._next_round()

    def _record(self, storing: Storing) -> ev.SealedRecord:
        assert self.key is not None
        return ev.SealedRecord(
            key=self.key,
            incarnation=self.incarnation,
            world_size=self.world_size,
            opened=tuple(self.seats[rank].opened for rank in sorted(self.seats)),
            reports=tuple(storing.hashed[node] for node in storing.members),
        )

    def _next_round(self, *, counted: bool = True) -> list[fx.Effect]:
        assert self.storing is not None
        self.storing.replan(self._failed_nodes)
        self._failed_nodes = set()
        plan = self.storing.next_round(self.table, counted=counted)
        if isinstance(plan, GroupIOError):
            return self.fail(plan)
        return plan + self._unreachable()

    def _maybe_replicated(self) -> list[fx.Effect]:
        storing = self.storing
        early = self.phase is Phase.STORING or self.phase is Phase.PREPARING
        if storing is None or not early or self._told_of(Level.REPLICATED):
            return []
        if self.first.replicas == 1 or not storing.replicated(self.table):
            return []
        return self._tell(Level.REPLICATED)

    def _on_node_failed(self, event: ev.NodeFailed) -> list[fx.Effect]:
        node, error = event.node, event.error
        if self.storing is not None and node not in self.storing.holders:
            return []  # it was lost, and is only back to be told the end
        if self.storing is None:
            repeatable = event.repeatable and self._may_store_again(error)
        else:
            repeatable = self._may_repeat(node) and reasons.is_away(error)
        if not repeatable:
            return self.fail(error)
        self._failed_nodes.add(node)
        return self._wait_for_store(error)

    def _may_store_again(self, error: GroupIOError) -> bool:
        """A group that writes at once can wait, sealed or not, for the store that it began with."""
        if self.phase is Phase.COPYING:
            return reasons.may_return(error)
        return self.phase is Phase.STORING and reasons.is_away(error)

    def _may_repeat(self, node: str) -> bool:
        """What failed on the node was an order, which can be given again.

        Before its chunks are named there is none: a state that goes through in waves is written
        meanwhile, and what was written is in memory no more.
        """
        if self.phase is not Phase.STORING or self.storing is None:
            return False
        return node not in self.storing.members or node in self.storing.hashed

    def _maybe_wait(self) -> list[fx.Effect]:
        """The store went away while members copied: wait for it, now that all have."""
        return [] if self.away is None else self._wait_for_store(self.away)

    def _wait_for_store(self, error: GroupIOError) -> list[fx.Effect]:
        """The store of a sealed group is away: nothing is lost by trying again later."""
        self.away = error
        if self._retrying or self.phase is Phase.COPYING:
            return []  # the timer runs already, or the group has not got so far
        self._retrying = True
        self.timer = f"away-{self.number}"
        delay_s = min(AWAY_BACKOFF_S * 2**self._waits, AWAY_BACKOFF_MAX_S)
        self._waits += 1
        return [fx.StartTimer(self.timer, delay_s)]

    def _try_again(self) -> list[fx.Effect]:
        self._retrying = False
        if self.phase is Phase.ABORT_DECIDING:
            return self._decide_abort()
        if (
            self.away is not None
            and self.unproved
            and self.phase in (Phase.PREPARING, Phase.DECIDING)
        ):
            return self._wait_for_store(self.away)
        if self.phase is Phase.PREPARING:
            return self._prepare()
        if self.phase is Phase.DECIDING:
            return self._decide_commit()
        nodes, self._failed_nodes = sorted(self._failed_nodes), set()
        if self.storing is None:
            return [fx.StoreAgain(node, self.number) for node in nodes]
        return [effect for node in nodes for effect in self.storing.retry(node)]

    # -- nodes that go and come ---------------------------------------------------------

    def lose_node(self, node: str, why: str) -> list[fx.Effect]:
        """A node is gone, with all that is in its memory."""
        ranks = tuple(r for r in sorted(self.seats) if self._node(r) == node)
        self._returned.discard(node)
        if self.phase in BEFORE_STAGED:
            if ranks:
                return self.fail(reasons.node_lost(self.epoch, node, ranks, why))
            return self._lose_helper(node)
        self._busy.discard(node)
        if self.phase is Phase.ABORTING:
            self.admission.lose(node)
            return self._maybe_decide_abort()
        known = node in self.admission.orders
        self.admission.lose(node)
        if self.phase is not Phase.STORING or not known:
            return []
        return self._lose_bytes(node, ranks, why)

    def _lose_helper(self, node: str) -> list[fx.Effect]:
        if self.storing is None:
            return []
        self.storing.lose(node)
        return self.admission.lose(node) + self._maybe_copy()

    def _lose_bytes(self, node: str, ranks: tuple[int, ...], why: str) -> list[fx.Effect]:
        """A node of a sealed group is gone: others have its bytes, or nobody has."""
        if self.storing is None:
            kept = node in self._reports and not self.node_local
            return [] if kept else self.fail(reasons.node_lost(self.epoch, node, ranks, why))
        self.storing.lose(node)
        if ranks and node not in self.storing.hashed:
            return self.fail(reasons.node_lost(self.epoch, node, ranks, why))
        return self._next_round() if self.storing.planned else self._maybe_plan()

    def rejoin(self, node: str, held: ev.HeldGroup | None) -> list[fx.Effect]:
        """A living node was cut off for a while: take what it says, repeat what it may have missed.

        ``held`` is the group as the node knows it, None when it does not know it.
        """
        if node not in self.admission.orders:
            if held is None:
                return []
            self._returned.add(node)
            for opened in held.opened:
                # Nobody else knew of its members, who have to hear the end as well.
                copied = opened.rank in held.copied
                self.seats.setdefault(opened.rank, Seat(opened, copied=copied))
            return [fx.AdoptGroup(node, held.key, self.number)]
        if held is None:
            if not self.admission.holds(node):
                self._busy.discard(node)
                return (
                    self.admission.again(node)
                    if self.phase is Phase.ADMITTING
                    else (self._maybe_decide_abort())
                )
            return self.lose_node(node, "its agent does not know the group any more")
        effects: list[fx.Effect] = [fx.AdoptGroup(node, held.key, self.number)]
        effects += self.admission.again(node)
        if self.phase is Phase.ABORTING and node in self._busy:
            return [*effects, fx.AbortGroup(node, self.number)]
        if self.phase in (Phase.COPYING, Phase.STORING):
            effects.append(fx.StartCopy(node, self.number))
        if self.storing is not None and self.phase is Phase.STORING:
            effects += self.storing.again(node)
        return effects + [told for told in self._levels if self._node(told.seat.rank) == node]

    # -- groups of an earlier controller ---------------------------------------------------------

    def restore(self, key: DecisionKey, rest: Rest) -> None:
        """Become the group of an attempt of which this is left."""
        self.phase, self.key = Phase.STORING, key
        self.published = self.resumed = self._maybe_prepared = True
        self.timer = f"group-{self.number}"
        self.seats = {rank: Seat(opened, copied=True) for rank, opened in rest.opened().items()}
        orders = [fx.AdmitGroup(node, self.number, key, (), True, "wait") for node in rest.holders]
        self.admission.begin(orders)
        for node in rest.holders:
            self.admission.admitted(ev.NodeAdmitted(self.number, node))
        if any(held.planned for held in rest.holders.values()):
            self.storing = self._restored(rest)

    def _restored(self, rest: Rest) -> Storing:
        holders = rest.holders
        reserved = dict.fromkeys(self.nodes, 0)
        for seat in self.seats.values():
            reserved[seat.opened.node] += seat.opened.total_bytes
        storing = Storing(
            number=self.number,
            epoch=self.epoch,
            members=self.nodes,
            replicas=max((s.opened.replicas for s in self.seats.values()), default=1),
            node_local=self.node_local,
            holders=set(holders),
            shares={node: held.replica_bytes for node, held in holders.items()},
            reserved=reserved,
            copies={node: held.copies for node, held in holders.items()},
            round=max((held.round for held in holders.values()), default=0),
        )
        if rest.record is not None:
            storing.hashed = {report.node: report for report in rest.record.reports}
        for node, held in holders.items():
            if held.hashed is not None:
                storing.hashed[node] = held.hashed
            if held.stored is not None:
                storing.stored[node] = held.stored
        copied = {rank for held in holders.values() for rank in held.copied}
        storing.lost = {s.opened.node for rank, s in self.seats.items() if rank not in copied}
        return storing

    def _adopt(self) -> list[fx.Effect]:
        assert self.key is not None
        return [fx.AdoptGroup(node, self.key, self.number) for node in self.admission.orders]

    def take_over(self) -> list[fx.Effect]:
        """Everything is there: go on from where the group was sealed."""
        return [*self._adopt(), *self.staged(), *self._maybe_plan()]

    def give_up_earlier(self, why: str) -> list[fx.Effect]:
        """Too little is left: have the nodes stop, then decide."""
        return [*self._adopt(), *self.fail(reasons.not_resumed(self.epoch, why))]
