"""The agent machine of one node: admits groups to memory and walks their leases through it.

All jobs of the node share one ledger. A group is admitted as a whole, before any copy, in the
order of arrival; a state larger than the budget goes through in waves. An extent is used again
only after its writer acknowledged or its process is gone, never by time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from groupio.errors import StagingFull
from groupio.model import CHUNK_BYTES, PAGE_BYTES
from groupio.plan.layout import Layout, Wave, waves
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.ledger import EXTENT_ALIGN, Extent, Ledger

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
    started: bool = False
    aborting: bool = False
    finished: bool = False
    closed: bool = False
    idle: bool = True


@dataclass(slots=True)
class AgentMachine:
    """The machine of one node; group numbers are unique over all of the node's jobs."""

    node: str
    ledger: Ledger
    groups: dict[int, NodeGroup] = field(default_factory=dict)
    arenas: dict[str, int] = field(default_factory=dict)
    """The arena of each client."""
    _asked: dict[tuple[str, int], ev.LeaseAsked] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    _held: dict[tuple[str, int], list[Extent]] = field(default_factory=dict)
    _arena_count: int = 0

    # -- events ---------------------------------------------------------

    def handle(self, event: Any) -> list[fx.Effect]:
        """Take one event, or one order of a controller; effects are to be executed in order."""
        match event:
            case ev.LeaseAsked():
                self._asked[event.client, event.save_id] = event
                return []
            case fx.AdmitGroup():
                return self._on_admit(event)
            case fx.StartCopy(group=number):
                return self._on_start(self.groups[number])
            case fx.AbortGroup(group=number):
                return self._on_abort(number)
            case fx.CloseGroup():
                return self._on_close(event)
            case ev.WaveCopied():
                return self._on_copied(event)
            case ev.WaveStored():
                return self._on_stored(event)
            case ev.JobStored(group=number, report=report):
                return [fx.Report(ev.NodeStored(number, self.node, report))]
            case ev.JobFailed(group=number, error=error):
                return [fx.Report(ev.NodeFailed(number, self.node, error))]
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
            if group.started and not group.aborting
            for lease in group.leases.values()
        )

    def forget(self, client: str, save_id: int) -> None:
        """The save was refused before it had a group."""
        self._asked.pop((client, save_id), None)

    # -- admission ---------------------------------------------------------

    def _on_admit(self, order: fx.AdmitGroup) -> list[fx.Effect]:
        leases = {
            seat.rank: Lease(seat, self._asked.pop((seat.client, seat.save_id)).layout)
            for seat in order.seats
        }
        group = NodeGroup(order, leases)
        self.groups[order.group] = group
        need = sum(_extent_bytes(x.layout.total_bytes) for x in leases.values())
        smallest = len(leases) * _extent_bytes(WINDOW_BYTES_MIN)
        if min(need, smallest) > self.ledger.budget:
            return [self._refuse(group, min(need, smallest), "can ever")]
        if order.when_full != "wait" and (need > self.ledger.available or self._queue()):
            return [self._refuse(group, need, "does")]
        return self._admit_next()

    def _refuse(self, group: NodeGroup, need: int, verb: str) -> fx.Effect:
        error = StagingFull(
            f"Epoch {group.order.key.epoch} needs {need} bytes of host memory on node {self.node}, "
            f"{'more than' if verb == 'can ever' else 'and'} the budget of {self.ledger.budget} "
            f"{verb} hold{'' if verb == 'can ever' else f' only {self.ledger.available} more now'};"
            " raise memory_bytes (GROUPIO_MEMORY_BYTES), or save with when_full='wait'.",
            needed=need,
            budget=self.ledger.budget,
            skipped=group.order.when_full == "skip",
            epoch=group.order.key.epoch,
        )
        return fx.Report(ev.NodeRefused(group.order.group, self.node, error))

    def _queue(self) -> list[NodeGroup]:
        return [g for g in self.groups.values() if not (g.admitted or g.aborting or g.closed)]

    def _admit_next(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        for group in self._queue():
            if not self._fits(group):
                break  # in order of arrival: a small group does not starve a large one
            group.admitted = True
            for lease in group.leases.values():
                effects += self._take(lease)
            effects += [
                fx.Punch(e.arena, e.offset, e.length) for e in self.ledger.overcommit()
            ]
            effects.append(fx.Report(ev.NodeAdmitted(group.order.group, self.node)))
        return effects

    def _fits(self, group: NodeGroup) -> bool:
        """Sets the windows of the leases when the group's memory is there."""
        sizes = {r: x.layout.total_bytes for r, x in group.leases.items()}
        need = sum(_extent_bytes(size) for size in sizes.values())
        if need <= self.ledger.available:
            for rank, lease in group.leases.items():
                lease.window = max(WINDOW_BYTES_MIN, sizes[rank])
            return True
        if need <= self.ledger.budget or self.ledger.available < self.ledger.budget:
            return False
        spare = self.ledger.budget - len(sizes) * _extent_bytes(WINDOW_BYTES_MIN)
        total = sum(sizes.values())
        for rank, lease in group.leases.items():
            share = spare * sizes[rank] // total // EXTENT_ALIGN * EXTENT_ALIGN
            lease.window = _extent_bytes(WINDOW_BYTES_MIN) + share
        return True

    def _take(self, lease: Lease) -> list[fx.Effect]:
        client = lease.seat.client
        effects = self._open_arena(client)
        lease.waves = waves(lease.layout, lease.window)
        length = max(wave.virt_hi - wave.virt_lo for wave in lease.waves)
        lease.extent, _ = self.ledger.lease(self.arenas[client], length)
        return effects

    def _open_arena(self, client: str) -> list[fx.Effect]:
        if client in self.arenas:
            return []
        self._arena_count += 1
        self.arenas[client] = self._arena_count
        return [fx.OpenArena(self._arena_count, client)]

    # -- copying ---------------------------------------------------------

    def _on_start(self, group: NodeGroup) -> list[fx.Effect]:
        if group.aborting:
            return []
        group.started, group.idle = True, False
        order = group.order
        effects: list[fx.Effect] = [fx.StartJob(order.group, order.key, order.store)]
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
            group.finished = True
            effects.append(fx.FinishJob(number))
        return effects

    def _on_stored(self, event: ev.WaveStored) -> list[fx.Effect]:
        group = self.groups.get(event.group)
        if group is None or group.aborting:
            return []
        lease = group.leases[event.rank]
        lease.stored = event.wave
        if event.wave + 1 == len(lease.waves):
            return []
        return [self._grant(group, lease, event.wave + 1)]

    # -- the end ---------------------------------------------------------

    def _on_abort(self, number: int) -> list[fx.Effect]:
        group = self.groups.get(number)
        if group is None:
            return [fx.Report(ev.NodeIdle(number, self.node))]
        if group.aborting:
            return []
        group.aborting = True
        if group.started:
            return [fx.CancelJob(number)]
        return [fx.Report(ev.NodeIdle(number, self.node)), *self._admit_next()]

    def _on_idle(self, number: int) -> list[fx.Effect]:
        group = self.groups.get(number)
        if group is None or not group.aborting:
            return []
        group.idle = True
        return [fx.Report(ev.NodeIdle(number, self.node))]

    def _on_close(self, event: fx.CloseGroup) -> list[fx.Effect]:
        group = self.groups.pop(event.group, None)
        if group is None:
            return []
        group.closed = True
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
            return []
        self._gone.add(client)
        for key in [key for key in self._held if key[0] == client]:
            for extent in self._held.pop(key):
                self.ledger.free(extent)
        return [*self._drop_if_gone(client), *self._admit_next()]

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
        self._gone.discard(client)
        del self.arenas[client]
        return [fx.CloseArena(arena)]

    # -- standby ---------------------------------------------------------

    def standby(self, client: str, length: int) -> list[fx.Effect]:
        """Give a client memory ahead of its first save, if there is room without taking any."""
        length = _extent_bytes(length)
        if client in self.arenas or self.ledger.total() + length > self.ledger.budget:
            return []
        effects = self._open_arena(client)
        arena = self.arenas[client]
        extent, _ = self.ledger.lease(arena, length)
        self.ledger.free(extent)
        return [*effects, fx.Populate(arena, extent.offset, extent.length, client)]


def _extent_bytes(length: int) -> int:
    return max(EXTENT_ALIGN, -(-length // EXTENT_ALIGN) * EXTENT_ALIGN)
