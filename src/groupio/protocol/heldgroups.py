"""Groups that several nodes store together, and groups whose controller is lost.

Memory of such a group stays as it is until the group is closed: peers fetch from it. Rounds of the
store plan are done one after the other. A group keeps its first number here and towards the driver;
a controller that takes it over calls it by another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from groupio.model import CHUNK_BYTES
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.ledger import EXTENT_ALIGN, extent_bytes
from groupio.protocol.nodestate import REPLICA_ARENA, Lease, NodeGroup, NodeState
from groupio.protocol.standby import Standby


@dataclass(slots=True)
class HeldGroups(Standby, NodeState):
    """What the node holds for groups."""

    # -- rounds ---------------------------------------------------------

    def _on_hashed(self, event: ev.JobHashed) -> list[fx.Effect]:
        group = self.groups.get(event.group)
        if group is None or group.hashed is not None:
            return []
        group.hashed = event.report
        said = self._say(group, ev.NodeHashed(group.number, self.node, event.report))
        return said + self._run_order(group)

    def _on_order(self, event: fx.StoreChunks) -> list[fx.Effect]:
        """A round of the store plan; one that is known already changes nothing."""
        group = self._by_number(event.group)
        if group is None or group.aborting or event.round <= group.round:
            return []
        group.round = event.round
        group.record = event.record or group.record
        group.said = [e for e in group.said if not isinstance(e, ev.NodeFailed)]
        group.orders.append(event)
        return self._run_order(group) if len(group.orders) == 1 else []

    def _run_order(self, group: NodeGroup) -> list[fx.Effect]:
        """Begin with the first order, if there is one."""
        if not group.orders or group.aborting or group.hashed is None:
            return []
        order = group.orders[0]
        return [
            fx.RunOrder(
                group=group.order.group,
                round=order.round,
                order=order.order,
                addresses=order.addresses,
                arena=REPLICA_ARENA,
                room=tuple((extent.offset, extent.length) for extent in group.replicas),
            )
        ]

    def _on_take_room(self, event: fx.TakeRoom) -> list[fx.Effect]:
        """Take what there is of the memory that further copies need, before groups that wait."""
        group = self._by_number(event.group)
        if group is None or not group.started or group.aborting:
            return []
        effects: list[fx.Effect] = []
        gap = CHUNK_BYTES if group.replicas else 0
        free = self.ledger.available // EXTENT_ALIGN * EXTENT_ALIGN
        nbytes = min(extent_bytes(event.replica_bytes - group.room + gap), free)
        if event.replica_bytes > group.room and nbytes > gap:
            effects += [*self._lease_replica(group, nbytes), *self._give_way()]
        group.said = [e for e in group.said if not isinstance(e, ev.NodeRoom)]
        return effects + self._say(group, ev.NodeRoom(group.number, self.node, group.room))

    def _on_replicated(self, event: ev.JobReplicated) -> list[fx.Effect]:
        group = self.groups.get(event.group)
        if group is None:
            return []
        group.copies = event.copies
        return self._say(
            group, ev.NodeReplicated(group.number, self.node, event.round, event.copies)
        )

    def _on_job_stored(self, event: ev.JobStored) -> list[fx.Effect]:
        group = self.groups.get(event.group)
        if group is None:
            return []
        group.stored, group.resting = event.report, True
        said = ev.NodeStored(group.number, self.node, event.report, event.round)
        return self._say(group, said) + self._next_order(group, event.round)

    def _on_short(self, event: ev.JobShort) -> list[fx.Effect]:
        group = self.groups.get(event.group)
        if group is None:
            return []
        if event.copies is not None:
            group.copies = event.copies
        short = ev.NodeShort(
            group=group.number,
            node=self.node,
            round=event.round,
            digests=event.digests,
            asked=event.asked,
            liars=event.liars,
            copies=event.copies,
        )
        return self._say(group, short) + self._next_order(group, event.round)

    def _next_order(self, group: NodeGroup, ended: int) -> list[fx.Effect]:
        if not group.orders or group.orders[0].round != ended:
            return []
        group.orders.popleft()
        return self._run_order(group)

    def _on_job_failed(self, event: ev.JobFailed) -> list[fx.Effect]:
        """The controller decides whether what is left is tried again."""
        group = self.groups.get(event.group)
        if group is None:
            return []
        group.resting = False
        group.orders.clear()
        repeatable = group.order.store and not group.order.planned and group.in_memory
        failed = ev.NodeFailed(group.number, self.node, event.error, repeatable)
        return self._say(group, failed)

    def _on_store_again(self, number: int) -> list[fx.Effect]:
        """The store may be back: a job that failed begins anew."""
        group = self._by_number(number)
        if group is None or group.aborting or group.order.planned or not group.all_copied:
            return []
        left = [e for e in group.said if not isinstance(e, ev.NodeFailed)]
        if len(left) == len(group.said):
            return []
        group.said = left
        return [fx.RepeatJob(group.order.group)]

    # -- without a controller ---------------------------------------------------------

    def _on_left(self, event: ev.ControllerLeft) -> list[fx.Effect]:
        """Groups that have not begun are forgotten: their members will ask the next controller."""
        effects: list[fx.Effect] = []
        for number in event.groups:
            group = self.groups.get(number)
            if group is None:
                continue
            if not group.started:
                effects += self._give_back(group)
            while len(group.orders) > 1:
                group.orders.pop()
        return effects + self._admit_next()

    def _on_retract(self, event: fx.RetractGroup) -> list[fx.Effect]:
        group = self._by_number(event.group)
        if group is None or group.started:
            return []
        return self._give_back(group) + self._admit_next()

    def _give_back(self, group: NodeGroup) -> list[fx.Effect]:
        """Forget a group that has not begun; what its members asked for stands."""
        self._remove(group)
        for asked in group.asked.values():
            if asked.client not in self._gone:
                self._asked[asked.client, asked.save_id] = asked
        return self._free(group, None)

    def held(self, groups: tuple[int, ...]) -> tuple[ev.HeldGroup, ...]:
        """What NodeJoined says of these groups, which are named by their first numbers."""
        known = [self.groups[n] for n in groups if n in self.groups]
        return tuple(_held(group) for group in known if group.closing is None)

    def _on_adopt(self, event: fx.AdoptGroup) -> list[fx.Effect]:
        """A controller takes a group over: all that was said of it is said again."""
        group = self._with_key(event.key, event.group)
        if group is None:
            return []
        self._numbers.pop(group.number, None)
        self._numbers[event.group] = group.order.group
        group.number = event.group
        group.said = [msgspec.structs.replace(e, group=event.group) for e in group.said]
        return [fx.Report(e, group.order.group) for e in group.said]

    def _on_drop(self, event: fx.DropHeld) -> list[fx.Effect]:
        group = self._with_key(event.key, event.group)
        if group is None:
            return []
        close = fx.CloseGroup(self.node, group.number, event.committed, event.keep_segments)
        return self._on_close(close)

    def _with_key(self, key: object, number: int) -> NodeGroup | None:
        """The group of a key; the one of this number if there are several."""
        found = [g for g in self.groups.values() if g.order.key == key and g.closing is None]
        return min(found, key=lambda g: (g.number != number, not g.started), default=None)

    # -- the end ---------------------------------------------------------

    def _on_close(self, event: fx.CloseGroup) -> list[fx.Effect]:
        group = self._by_number(event.group)
        if group is None or group.closing is not None:
            return []
        if group.quiet:
            return self._close(group, event)
        group.closing = event
        if group.aborting:
            return []
        group.aborting = True
        return [fx.CancelJob(group.order.group)]

    def _on_idle(self, number: int) -> list[fx.Effect]:
        group = self.groups.get(number)
        if group is None:
            return []
        group.idle = True
        if group.closing is not None:
            return self._close(group, group.closing)
        return self._say(group, ev.NodeIdle(group.number, self.node))

    def _close(self, group: NodeGroup, event: fx.CloseGroup) -> list[fx.Effect]:
        """Nothing works on the group any more: its memory is free, and may serve readers."""
        self._remove(group)
        number = group.order.group
        content = group.order.key if event.committed and self.keeps_content else None
        effects: list[fx.Effect] = []
        if group.started and content is not None:
            effects.append(fx.KeepContent(number, content))
        freed = self._free(group, content)
        if group.started:
            effects.append(fx.EndJob(number, not event.keep_segments))
        return [*effects, *freed, *self._admit_next()]

    def _remove(self, group: NodeGroup) -> None:
        del self.groups[group.order.group]
        self._numbers.pop(group.number, None)

    def _free(self, group: NodeGroup, content: object) -> list[fx.Effect]:
        key = group.order.key if content is not None else None
        for extent in group.replicas:
            self.ledger.free(extent, key)
        for lease in group.leases.values():
            if lease.extent is None:
                continue
            if lease.stopped or lease.granted < 0 or lease.seat.client in self._gone:
                self.ledger.free(lease.extent, key if len(lease.waves) == 1 else None)
            else:
                self.ledger.quarantine(lease.extent)
                self._quarantined(lease)
        effects: list[fx.Effect] = []
        for lease in group.leases.values():
            effects += self._drop_if_gone(lease.seat.client)
        return effects

    def _quarantined(self, lease: Lease) -> None:
        assert lease.extent is not None
        self._held.setdefault((lease.seat.client, lease.seat.save_id), []).append(lease.extent)


def _held(group: NodeGroup) -> ev.HeldGroup:
    order = group.order
    whole = not group.aborting
    return ev.HeldGroup(
        key=order.key,
        incarnation=order.incarnation,
        world_size=order.world_size,
        group=group.number,
        opened=tuple(a.opened for a in group.asked.values() if a.opened is not None),
        copied=tuple(
            rank for rank, x in group.leases.items() if whole and x.copied == len(x.waves) - 1
        ),
        planned=order.planned,
        copies=group.copies,
        hashed=group.hashed,
        stored=group.stored,
        record=group.record if whole else None,
        round=group.round,
        replica_bytes=group.room,
        store=order.store,
    )
