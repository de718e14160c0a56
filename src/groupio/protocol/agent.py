"""The agent machine of one node: admits groups to memory and walks their leases through it.

All jobs of the node share one ledger. A group is admitted as a whole, before any copy, in the
order of arrival; a state larger than the budget goes through in waves. An extent is used again
only after its writer acknowledged or its process is gone, never by time.

Orders of one controller come in the order in which it gave them: its channel sees to that. An
order that comes again while its group lives, and any event that comes again or too late, changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from groupio.errors import GroupIOError
from groupio.model import CHUNK_BYTES, PAGE_BYTES
from groupio.plan.layout import waves
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.heldgroups import HeldGroups
from groupio.protocol.ledger import EXTENT_ALIGN, extent_bytes
from groupio.protocol.nodestate import REPLICA_ARENA, Lease, NodeGroup, drop_content

__all__ = ["REPLICA_ARENA", "WINDOW_BYTES_MIN", "AgentMachine", "Lease", "NodeGroup"]

WINDOW_BYTES_MIN = 2 * CHUNK_BYTES + PAGE_BYTES
"""The smallest window of a lease that goes through in waves."""


@dataclass(slots=True)
class AgentMachine(HeldGroups):
    """The machine of one node; group numbers are unique over all of the node's jobs."""

    # -- events ---------------------------------------------------------

    def handle(self, event: Any) -> list[fx.Effect]:
        """Take one event, or one order of a controller; effects are to be executed in order."""
        match event:
            case ev.SaveExpected(client=client, total_bytes=total_bytes):
                return self._on_expected(client, total_bytes)
            case ev.AheadMapped():
                return self._on_mapped(event)
            case ev.LeaseAsked():
                self._asked[event.client, event.save_id] = event
                return []
            case fx.AdmitGroup():
                return self._on_admit(event)
            case fx.StartCopy(group=number):
                return self._on_start(number)
            case fx.AbortGroup(group=number):
                return self._on_abort(number)
            case fx.CloseGroup():
                return self._on_close(event)
            case ev.WaveCopied():
                return self._on_copied(event)
            case ev.WaveStored():
                return self._on_stored(event)
            case ev.JobStored():
                return self._on_job_stored(event)
            case ev.JobFailed():
                return self._on_job_failed(event)
            case ev.JobIdle(group=number):
                return self._on_idle(number)
            case ev.WriterStopped(client=client, save_id=save_id):
                return self._on_stopped(client, save_id)
            case ev.MemberGone():
                return self._on_gone(event)
        return self._handle_planned(event)

    def _handle_planned(self, event: Any) -> list[fx.Effect]:
        """What only groups of several nodes, and changes of the controller, bring about."""
        match event:
            case fx.RetractGroup():
                return self._on_retract(event)
            case fx.StoreChunks():
                return self._on_order(event)
            case fx.StoreAgain(group=number):
                return self._on_store_again(number)
            case fx.TakeRoom():
                return self._on_take_room(event)
            case fx.AdoptGroup():
                return self._on_adopt(event)
            case fx.DropHeld():
                return self._on_drop(event)
            case ev.JobHashed():
                return self._on_hashed(event)
            case ev.JobReplicated():
                return self._on_replicated(event)
            case ev.JobShort():
                return self._on_short(event)
            case ev.ControllerLeft():
                return self._on_left(event)
            case ev.MemoryReserved(nbytes=nbytes):
                self.ledger.reserved += nbytes
                return self._give_way() if nbytes > 0 else self._admit_next()
        raise AssertionError(f"agent machine got {event!r}")

    @property
    def copies_active(self) -> int:
        """How many ranks are copying into their leases now."""
        return sum(
            lease.granted > lease.copied
            for group in self.groups.values()
            if not group.aborting
            for lease in group.leases.values()
        )

    def has_save(self, client: str) -> bool:
        """A group that the node holds memory for has a save of the client."""
        return any(
            lease.seat.client == client
            for group in self.groups.values()
            for lease in group.leases.values()
        )

    def forget(self, client: str, save_id: int) -> None:
        """The save was refused before it had a group."""
        self._asked.pop((client, save_id), None)

    # -- admission ---------------------------------------------------------

    def _on_admit(self, order: fx.AdmitGroup) -> list[fx.Effect]:
        known = self.groups.get(order.group)
        if known is not None:
            return self._admit_again(known, order)
        waiting = bool(self._queue())
        group = NodeGroup(order, {}, order.group)
        gone: list[int] = []
        for seat in order.seats:
            asked = self._asked.pop((seat.client, seat.save_id), None)
            if asked is None:
                gone.append(seat.rank)
            else:
                group.leases[seat.rank] = Lease(seat, asked.layout)
                group.asked[seat.rank] = asked
        self.groups[order.group] = group
        if gone:
            return self._refuse(group, reasons.lost_peers(order.key.epoch, tuple(gone)))
        need = self._need(group)
        least = min(need, len(group.leases) * extent_bytes(WINDOW_BYTES_MIN))
        free, budget = self.ledger.available, self.ledger.budget
        if least > budget:
            full = reasons.no_room(order, least, budget, free, ever=False)
            return self._refuse(group, full)
        crowded = need > free or (waiting and need > 0)
        if order.when_full != "wait" and (need > free or waiting):
            full = reasons.no_room(order, need, budget, free, ever=True)
            return self._refuse(group, full)
        if crowded and not order.wait:
            busy = ev.NodeBusy(order.group, self.node)
            return [*self._give_back(group), fx.Report(busy, order.group)]
        return self._admit_next()

    def _admit_again(self, group: NodeGroup, order: fx.AdmitGroup) -> list[fx.Effect]:
        """The order is known: answer once more where the first answer may not have arrived."""
        asked_again = order.again or order.wait != group.order.wait
        if not asked_again or group.number != order.group:
            return []
        group.order = msgspec.structs.replace(order, again=False)
        answers = (ev.NodeAdmitted, ev.NodeRefused)
        said = [e for e in group.said if isinstance(e, answers)]
        for i, answer in enumerate(said):
            if isinstance(answer, ev.NodeAdmitted):
                said[i] = msgspec.structs.replace(answer, waited=order.wait)
        return [fx.Report(answer, order.group) for answer in said]

    def _refuse(self, group: NodeGroup, error: GroupIOError) -> list[fx.Effect]:
        group.refused = True
        return self._say(group, ev.NodeRefused(group.number, self.node, error))

    def _queue(self) -> list[NodeGroup]:
        return [g for g in self.groups.values() if not (g.admitted or g.refused or g.aborting)]

    def _need(self, group: NodeGroup) -> int:
        """All that the group would like to have: room for its members and for copies."""
        own = sum(extent_bytes(x.layout.total_bytes) for x in group.leases.values())
        return own + self._replica_bytes(group, own)

    def _replica_bytes(self, group: NodeGroup, own: int) -> int:
        """The extent for chunks of others; none where it can never fit beside the members."""
        wanted = group.order.replica_bytes
        nbytes = extent_bytes(wanted) if wanted else 0
        return nbytes if own + nbytes <= self.ledger.budget else 0

    def _admit_next(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        for group in self._queue():
            spare = self._fit(group)
            if spare < 0:
                break  # in order of arrival: a small group does not starve a large one
            group.admitted = True
            effects += self._take_replica(group)
            for lease in group.leases.values():
                effects += self._open_arena(lease.seat.client)
                more, taken = self._take(group, lease, spare)
                effects += taken
                spare -= more
            for lease in group.leases.values():
                effects += self._end_standby(lease.seat.client)
            effects += self._give_way()
            admitted = ev.NodeAdmitted(
                group=group.number,
                node=self.node,
                waited=group.order.wait,
                replica_bytes=group.order.replica_bytes if group.replicas else 0,
                in_memory=group.in_memory,
            )
            effects += self._say(group, admitted)
        return effects

    def _fit(self, group: NodeGroup) -> int:
        """Set the windows of the leases; the memory left over then, negative if there is none."""
        free, budget = self.ledger.available, self.ledger.budget
        sizes = {r: x.layout.total_bytes for r, x in group.leases.items()}
        own = sum(extent_bytes(size) for size in sizes.values())
        whole = budget - self.ledger.reserved
        if own <= budget or free < whole:
            for rank, lease in group.leases.items():
                lease.window = max(WINDOW_BYTES_MIN, sizes[rank])
            return free - own - self._replica_bytes(group, own)
        left = whole - len(sizes) * extent_bytes(WINDOW_BYTES_MIN)
        if left < 0:
            return left  # until the agent itself needs less
        for rank, lease in group.leases.items():
            share = left * sizes[rank] // sum(sizes.values()) // EXTENT_ALIGN * EXTENT_ALIGN
            lease.window = extent_bytes(WINDOW_BYTES_MIN) + share
        return whole - sum(lease.window for lease in group.leases.values())

    def _take_replica(self, group: NodeGroup) -> list[fx.Effect]:
        """Lease the memory for chunks of other nodes, where there can be any."""
        own = sum(extent_bytes(x.layout.total_bytes) for x in group.leases.values())
        if not self._replica_bytes(group, own):
            return []
        return self._lease_replica(group, group.order.replica_bytes)

    def _take(self, group: NodeGroup, lease: Lease, spare: int) -> tuple[int, list[fx.Effect]]:
        """Lease the memory of one member; how much more it got than it asked for."""
        lease.waves = waves(lease.layout, lease.window)
        length = max(wave.virt_hi - wave.virt_lo for wave in lease.waves)
        arena = self.arenas[lease.seat.client]
        lease.extent = self.ledger.lease(arena, length, spare, sparing=group.order.planned)
        return lease.extent.length - extent_bytes(length), drop_content(lease.extent)

    # -- copying ---------------------------------------------------------

    def _on_start(self, number: int) -> list[fx.Effect]:
        group = self._by_number(number)
        if group is None or group.started or not group.admitted or group.aborting:
            return []
        group.started = True
        order = group.order
        effects: list[fx.Effect] = [
            fx.StartJob(order.group, order.key, order.store, order.door, order.planned)
        ]
        for lease in group.leases.values():
            effects.append(self._grant(group, lease, 0))
        if not group.leases:
            effects.append(fx.FinishJob(order.group))
        return effects

    def _grant(self, group: NodeGroup, lease: Lease, number: int) -> fx.Effect:
        assert lease.extent is not None
        lease.granted = number
        return fx.GrantLease(
            client=lease.seat.client,
            save_id=lease.seat.save_id,
            group=group.order.group,
            key=group.order.key,
            arena=lease.extent.arena,
            offset=lease.extent.offset,
            number=number,
            waves=len(lease.waves),
            wave=lease.waves[number],
        )

    def _on_copied(self, event: ev.WaveCopied) -> list[fx.Effect]:
        found = self._find(event.client, event.save_id)
        if found is None:
            return []
        group, lease = found
        if group.aborting or event.wave != lease.granted or lease.copied == event.wave:
            return []
        assert lease.extent is not None
        lease.copied = event.wave
        number = group.order.group
        effects: list[fx.Effect] = [
            fx.AddWave(
                group=number,
                client=lease.seat.client,
                save_id=lease.seat.save_id,
                rank=lease.seat.rank,
                number=event.wave,
                arena=lease.extent.arena,
                offset=lease.extent.offset,
                wave=lease.waves[event.wave],
                eager=not group.order.planned or len(lease.waves) > 1,
            )
        ]
        if event.wave == len(lease.waves) - 1:
            lease.stopped = True
            copied = ev.MemberCopied(group.number, lease.seat.rank, self.node)
            effects += self._say(group, copied)
        if group.all_copied:
            effects.append(fx.FinishJob(number))
        return effects

    def _on_stored(self, event: ev.WaveStored) -> list[fx.Effect]:
        group = self.groups.get(event.group)
        if group is None or group.aborting:
            return []
        lease = group.leases[event.rank]
        if event.wave <= lease.stored:
            return []
        lease.stored = event.wave
        if event.wave + 1 == len(lease.waves):
            return []
        return [self._grant(group, lease, event.wave + 1)]

    # -- the end ---------------------------------------------------------

    def _on_abort(self, number: int) -> list[fx.Effect]:
        group = self._by_number(number)
        if group is None or group.aborting:
            return []
        group.aborting = True
        group.orders.clear()
        if group.started:
            return [fx.CancelJob(group.order.group)]
        idle = self._say(group, ev.NodeIdle(group.number, self.node))
        return [*idle, *self._admit_next()]

    def _on_stopped(self, client: str, save_id: int) -> list[fx.Effect]:
        found = self._find(client, save_id)
        if found is not None:
            found[1].stopped = True
        for extent in self._held.pop((client, save_id), []):
            self.ledger.free(extent)
        return self._admit_next()

    def _on_gone(self, event: ev.MemberGone) -> list[fx.Effect]:
        client = event.client
        for asked in [key for key in self._asked if key[0] == client]:
            del self._asked[asked]
        if not event.process_gone:
            return self._end_standby(client)
        self._gone.add(client)
        for key in [key for key in self._held if key[0] == client]:
            for extent in self._held.pop(key):
                self.ledger.free(extent)
        effects: list[fx.Effect] = []
        for group in self._queue():
            ranks = tuple(r for r, x in group.leases.items() if x.seat.client == client)
            if ranks:
                lost = reasons.lost_peers(group.order.key.epoch, ranks)
                effects += self._refuse(group, lost)
        return [*effects, *self._drop_if_gone(client), *self._admit_next()]
