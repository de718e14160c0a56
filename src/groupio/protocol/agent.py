"""The agent machine of one node: admits groups to memory and walks their leases through it.

All jobs of the node share one ledger. A group is admitted as a whole, before any copy, in the
order of arrival; a state larger than the budget goes through in waves. An extent is used again
only after its writer acknowledged or its process is gone, never by time.

Orders of one controller come in the order in which it gave them: its channel sees to that. An
order that comes again while its group lives, and any event that comes again or too late, changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from groupio.errors import GroupIOError
from groupio.model import CHUNK_BYTES, PAGE_BYTES
from groupio.plan.layout import Layout, Wave, waves
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reasons
from groupio.protocol.ledger import EXTENT_ALIGN, Extent, Ledger, Use, extent_bytes

WINDOW_BYTES_MIN = 2 * CHUNK_BYTES + PAGE_BYTES
"""The smallest window of a lease that goes through in waves."""


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
    admitted: bool = False
    refused: bool = False
    started: bool = False
    aborting: bool = False


@dataclass(slots=True)
class AgentMachine:
    """The machine of one node; group numbers are unique over all of the node's jobs."""

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
            case ev.JobStored(group=number, report=report):
                return self._report(number, ev.NodeStored(number, self.node, report))
            case ev.JobFailed(group=number, error=error):
                return self._report(number, ev.NodeFailed(number, self.node, error))
            case ev.JobIdle(group=number):
                return self._on_idle(number)
            case ev.WriterStopped(client=client, save_id=save_id):
                return self._on_stopped(client, save_id)
            case ev.MemberGone():
                return self._on_gone(event)
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

    def forget(self, client: str, save_id: int) -> None:
        """The save was refused before it had a group."""
        self._asked.pop((client, save_id), None)

    # -- admission ---------------------------------------------------------

    def _on_admit(self, order: fx.AdmitGroup) -> list[fx.Effect]:
        if order.group in self.groups:
            return []
        waiting = bool(self._queue())
        leases: dict[int, Lease] = {}
        gone: list[int] = []
        for seat in order.seats:
            asked = self._asked.pop((seat.client, seat.save_id), None)
            if asked is None:
                gone.append(seat.rank)
            else:
                leases[seat.rank] = Lease(seat, asked.layout)
        group = NodeGroup(order, leases)
        self.groups[order.group] = group
        if gone:
            return [self._refuse(group, reasons.lost_peers(order.key.epoch, tuple(gone)))]
        need = sum(extent_bytes(x.layout.total_bytes) for x in leases.values())
        least = min(need, len(leases) * extent_bytes(WINDOW_BYTES_MIN))
        free, budget = self.ledger.available, self.ledger.budget
        if least > budget:
            full = reasons.no_room(order, least, budget, free, ever=False)
            return [self._refuse(group, full)]
        if order.when_full != "wait" and (need > free or waiting):
            full = reasons.no_room(order, need, budget, free, ever=True)
            return [self._refuse(group, full)]
        return self._admit_next()

    def _refuse(self, group: NodeGroup, error: GroupIOError) -> fx.Effect:
        group.refused = True
        return fx.Report(ev.NodeRefused(group.order.group, self.node, error))

    def _queue(self) -> list[NodeGroup]:
        return [g for g in self.groups.values() if not (g.admitted or g.refused or g.aborting)]

    def _admit_next(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        for group in self._queue():
            spare = self._fit(group)
            if spare < 0:
                break  # in order of arrival: a small group does not starve a large one
            group.admitted = True
            for lease in group.leases.values():
                effects += self._open_arena(lease.seat.client)
                spare -= self._take(lease, spare)
            for lease in group.leases.values():
                effects += self._end_standby(lease.seat.client)
            effects += self._give_way()
            effects.append(fx.Report(ev.NodeAdmitted(group.order.group, self.node)))
        return effects

    def _fit(self, group: NodeGroup) -> int:
        """Set the windows of the leases; the memory left over then, negative if there is none."""
        free, budget = self.ledger.available, self.ledger.budget
        sizes = {r: x.layout.total_bytes for r, x in group.leases.items()}
        need = sum(extent_bytes(size) for size in sizes.values())
        if need <= budget or free < budget:
            for rank, lease in group.leases.items():
                lease.window = max(WINDOW_BYTES_MIN, sizes[rank])
            return free - need
        left = budget - len(sizes) * extent_bytes(WINDOW_BYTES_MIN)
        for rank, lease in group.leases.items():
            share = left * sizes[rank] // sum(sizes.values()) // EXTENT_ALIGN * EXTENT_ALIGN
            lease.window = extent_bytes(WINDOW_BYTES_MIN) + share
        return budget - sum(lease.window for lease in group.leases.values())

    def _take(self, lease: Lease, spare: int) -> int:
        """Lease the memory of one member; how much more it got than it asked for."""
        lease.waves = waves(lease.layout, lease.window)
        length = max(wave.virt_hi - wave.virt_lo for wave in lease.waves)
        lease.extent = self.ledger.lease(self.arenas[lease.seat.client], length, spare)
        return lease.extent.length - extent_bytes(length)

    def _open_arena(self, client: str) -> list[fx.Effect]:
        if client in self.arenas:
            return []
        self._arena_count += 1
        self.arenas[client] = self._arena_count
        return [fx.OpenArena(self._arena_count, client)]

    # -- copying ---------------------------------------------------------

    def _on_start(self, number: int) -> list[fx.Effect]:
        group = self.groups.get(number)
        if group is None or group.started:
            return []
        group.started = True
        order = group.order
        effects: list[fx.Effect] = [fx.StartJob(order.group, order.key, order.store, order.door)]
        for lease in group.leases.values():
            effects.append(self._grant(group, lease, 0))
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

    def _find(self, client: str, save_id: int) -> tuple[NodeGroup, Lease] | None:
        for group in self.groups.values():
            for lease in group.leases.values():
                if (lease.seat.client, lease.seat.save_id) == (client, save_id):
                    return group, lease
        return None

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
            )
        ]
        if event.wave == len(lease.waves) - 1:
            lease.stopped = True
            effects.append(fx.Report(ev.MemberCopied(number, lease.seat.rank)))
        if all(x.copied == len(x.waves) - 1 for x in group.leases.values()):
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

    def _report(self, number: int, event: Any) -> list[fx.Effect]:
        """Report what the flush job said, unless its group is over."""
        return [fx.Report(event)] if number in self.groups else []

    def _on_abort(self, number: int) -> list[fx.Effect]:
        group = self.groups.get(number)
        if group is None or group.aborting:
            return []
        group.aborting = True
        if group.started:
            return [fx.CancelJob(number)]
        return [fx.Report(ev.NodeIdle(number, self.node)), *self._admit_next()]

    def _on_idle(self, number: int) -> list[fx.Effect]:
        return self._report(number, ev.NodeIdle(number, self.node))

    def _on_close(self, event: fx.CloseGroup) -> list[fx.Effect]:
        group = self.groups.pop(event.group, None)
        if group is None:
            return []
        for lease in group.leases.values():
            if lease.extent is None:
                continue
            if lease.stopped or lease.granted < 0 or lease.seat.client in self._gone:
                self.ledger.free(lease.extent)
            else:
                self.ledger.quarantine(lease.extent)
                self._quarantined(lease)
        effects: list[fx.Effect] = []
        if group.started:
            effects.append(fx.EndJob(event.group, not event.keep_segments))
        for lease in group.leases.values():
            effects += self._drop_if_gone(lease.seat.client)
        return effects + self._admit_next()

    def _quarantined(self, lease: Lease) -> None:
        assert lease.extent is not None
        self._held.setdefault((lease.seat.client, lease.seat.save_id), []).append(lease.extent)

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
                effects.append(self._refuse(group, lost))
        return [*effects, *self._drop_if_gone(client), *self._admit_next()]

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
        self.ledger.drop_arena(arena)
        self._ahead.pop(client, None)
        self._gone.discard(client)
        del self.arenas[client]
        return [fx.CloseArena(arena)]

    # -- standby ---------------------------------------------------------

    def _on_expected(self, client: str, total_bytes: int) -> list[fx.Effect]:
        """Give a client memory ahead of its first save, if there is room without taking any.

        It is free memory, which any group may take. A larger expectation replaces a smaller one.
        """
        length = extent_bytes(total_bytes)
        old = self._ahead.get(client)
        if old is None and client in self.arenas:
            return []  # it saved already, or others needed the memory
        held = 0 if old is None else old.length
        if length <= held or self.ledger.total() - held + length > self.ledger.budget:
            return []
        effects = [*self._end_standby(client), *self._open_arena(client)]
        arena = self.arenas[client]
        extent = self._ahead[client] = self.ledger.lease(arena, length)
        self.ledger.free(extent)
        return [*effects, fx.Populate(arena, extent.offset, extent.length, client)]

    def _on_mapped(self, event: ev.AheadMapped) -> list[fx.Effect]:
        """Mapping touches the memory: what was given back meanwhile has to go once more."""
        arena = self.arenas.get(event.client)
        if arena is None:
            return []
        end = event.offset + event.length
        for extent in self.ledger.extents:
            overlaps = extent.offset < end and event.offset < extent.offset + extent.length
            if extent.arena == arena and overlaps:
                return []
        return [fx.Punch(arena, event.offset, event.length)]

    def _end_standby(self, client: str) -> list[fx.Effect]:
        """The memory that the client got ahead is in use now, or not what it needs."""
        extent = self._ahead.pop(client, None)
        if extent is None or extent.use is not Use.FREE:
            return []
        self.ledger.discard(extent)
        return [_punch(extent)]

    def _give_way(self) -> list[fx.Effect]:
        """Give back free memory until the budget holds."""
        out = self.ledger.overcommit()
        self._ahead = {client: e for client, e in self._ahead.items() if e not in out}
        return [_punch(extent) for extent in out]


def _punch(extent: Extent) -> fx.Effect:
    return fx.Punch(extent.arena, extent.offset, extent.length)
