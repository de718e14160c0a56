"""Executes the agent machine's orders about flush jobs."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from groupio.agent.eager import EagerFlush
from groupio.agent.fetching import Fetched, Fetcher, Room
from groupio.agent.pipeline import FlushJob
from groupio.agent.planned import PlannedFlush, Source, Told
from groupio.errors import GroupIOError, InvalidInput
from groupio.format.items import decode_items, items_id
from groupio.model import ItemSpec, NodeReport
from groupio.plan.frames import shapes_of
from groupio.plan.layout import Layout, lay_out
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job

log = logging.getLogger(__name__)

TABLES_KEPT = 64
"""Decoded item tables that are kept: the ranks of a job send the same few again and again."""


@dataclass(slots=True)
class Tables:
    """Item tables and their layouts by id, the least recently used ones forgotten."""

    _kept: OrderedDict[bytes, tuple[tuple[ItemSpec, ...], Layout]] = field(
        default_factory=OrderedDict
    )

    _shapes: dict[bytes, npt.NDArray[np.int64]] = field(default_factory=dict)

    def get(self, encoded: bytes, claimed_id: bytes) -> tuple[tuple[ItemSpec, ...], Layout]:
        """The items and layout of an encoded table. FormatError or InvalidInput if it is bad."""
        kept = self._kept.get(claimed_id)
        if kept is None:
            if items_id(encoded) != claimed_id:
                raise InvalidInput("the item table does not have the id that came with it")
            items = decode_items(encoded)
            kept = self._kept[claimed_id] = (items, lay_out(items))
            if len(self._kept) > TABLES_KEPT:
                self._shapes.pop(self._kept.popitem(last=False)[0], None)
        self._kept.move_to_end(claimed_id)
        return kept

    def shapes(self, items: tuple[ItemSpec, ...], table_id: bytes) -> npt.NDArray[np.int64]:
        """:func:`groupio.plan.frames.shapes_of` the items of this id."""
        found = self._shapes.get(table_id)
        if found is None:
            found = shapes_of(items)
            if table_id in self._kept:
                self._shapes[table_id] = found
        return found


class Flushing:
    """The flush jobs of the node, by group."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._jobs: dict[int, tuple[EagerFlush | PlannedFlush, Job]] = {}
        self.tables = Tables()
        self.items: dict[tuple[str, int], tuple[tuple[ItemSpec, ...], bytes]] = {}
        """The items of each client's save that is not over, and the id of their table."""

    def execute(self, effect: fx.Effect) -> None:
        """Execute one effect that concerns a flush job."""
        match effect:
            case fx.StartJob():
                self._start(effect)
            case fx.AddWave():
                self._add(effect)
            case fx.FinishJob(group=group):
                self._jobs[group][0].finish()
            case fx.CancelJob(group=group):
                self._cancel(group)
            case fx.RepeatJob(group=group):
                flush = self._jobs[group][0]
                assert isinstance(flush, EagerFlush)
                flush.repeat()
            case fx.RunOrder():
                self._order(effect)
            case fx.EndJob(group=group, delete_segments=delete):
                self._end(group, delete)

    def forget(self, client: str) -> None:
        """The client is gone, and no group has a save of it."""
        for key in [key for key in self.items if key[0] == client]:
            del self.items[key]

    def _cancel(self, group: int) -> None:
        """Stop the job; it is idle when nobody uses its memory, peers included."""
        flush, network = self._jobs[group][0], self._driver.network

        def idle() -> None:
            self._post(ev.JobIdle(group))

        if isinstance(flush, PlannedFlush) and network is not None:
            flush.cancel(lambda: network.holdings.seal(group, idle))
        else:
            flush.cancel(idle)

    def delete_segments(self, group: int) -> None:
        """Delete what an idle job wrote; called from the store's thread."""
        found = self._jobs.get(group)
        if found is not None:
            found[0].delete_segments()

    def see(self, group: int, rank: int, place: int, length: int) -> memoryview | None:
        """``length`` bytes at virtual offset ``place`` of a lease, before its group is decided.

        Called from the store's thread: nothing about the lease changes any more. None when the
        bytes are not there, because a later wave took their place or the member is elsewhere.
        """
        node_group = self._driver.machine.groups.get(group)
        lease = node_group.leases.get(rank) if node_group is not None else None
        if lease is None or lease.extent is None:
            return None
        wave = lease.waves[-1]
        if not wave.virt_lo <= place <= place + length <= wave.virt_hi:
            return None
        offset = lease.extent.offset + place - wave.virt_lo
        return self._driver.memory.view(lease.extent.arena, offset, length)

    def _post(self, event: object) -> None:
        self._driver.post(lambda: self._driver.tell_machine(event))

    def _start(self, effect: fx.StartJob) -> None:
        group = effect.group
        job = self._driver.job_of_group(group)
        store = job.store

        def done(report: NodeReport) -> None:
            self._post(ev.JobStored(group, report))

        def failed(error: GroupIOError) -> None:
            store.doubt(error)
            self._post(ev.JobFailed(group, error))

        if effect.planned:
            self._jobs[group] = (self._planned(effect, job, failed), job)
            return

        def make(first_seq: int) -> FlushJob:
            return FlushJob(
                backend=store.current,
                store_id=store.store_id,
                key=effect.key,
                node=self._driver.node,
                write=effect.store,
                framed=effect.door == "dcp",
                known=store.known if effect.store else None,
                workers=self._driver.workers,
                on_wave=lambda rank, wave: self._post(ev.WaveStored(group, rank, wave)),
                on_done=done,
                on_error=failed,
                first_seq=first_seq,
            )

        flush = EagerFlush(make, look=store.current, run=job.run, failed=failed)
        self._jobs[group] = (flush, job)

    def _planned(
        self, effect: fx.StartJob, job: Job, failed: Callable[[GroupIOError], None]
    ) -> PlannedFlush:
        """The flush job of a group that a plan divides among nodes."""
        driver, store, group = self._driver, job.store, effect.group
        network = driver.network
        assert network is not None
        framed = effect.door == "dcp"

        def hashed(report: NodeReport) -> None:
            places = weak.places()
            if places is not None:
                network.holdings.hold(group, store.store_id, places)
            self._post(ev.JobHashed(group, report))

        def short(number: int, fetched: Fetched, copies: npt.NDArray[np.uint8]) -> None:
            self._post(ev.JobShort(group, number, *fetched, copies))

        flush = PlannedFlush(
            backend=store.current,
            store_id=store.store_id,
            key=effect.key,
            node=driver.node,
            framed=framed,
            workers=driver.workers,
            fetcher=Fetcher(
                fabric=network.fabric,
                holdings=network.holdings,
                links=network.links,
                pool=network.fetching,
                group=group,
                job=store.store_id,
            ),
            pool=network.orders,
            wrote=network.links.wrote,
            told=Told(
                hashed,
                lambda number, copies: self._post(ev.JobReplicated(group, number, copies)),
                lambda number, report: self._post(ev.JobStored(group, report, number)),
                short,
                failed,
            ),
        )
        # The job and its base must not keep each other, with all that they know of their chunks:
        # whether a garbage collector comes by before the next epoch is not certain.
        weak = weakref.proxy(flush)
        flush.begin(
            FlushJob(
                backend=store.current,
                store_id=store.store_id,
                key=effect.key,
                node=driver.node,
                write=False,
                framed=framed,
                known=store.known if effect.store else None,
                workers=driver.workers,
                on_wave=lambda rank, wave: self._post(ev.WaveStored(group, rank, wave)),
                on_done=lambda report: weak.hashed(report),
                on_error=failed,
            )
        )
        return flush

    def _order(self, effect: fx.RunOrder) -> None:
        flush = self._jobs[effect.group][0]
        assert isinstance(flush, PlannedFlush)
        rooms = []
        for offset, length in effect.room:
            view = self._driver.memory.arenas[effect.arena].back(offset, length)
            rooms.append(Room(view, effect.arena, offset))
        flush.run_order(effect.round, effect.order, effect.addresses, rooms)

    def _add(self, effect: fx.AddWave) -> None:
        wave = effect.wave
        items, table_id = self.items[effect.client, effect.save_id]
        machine = self._driver.machine.groups[effect.group]
        layout = machine.leases[effect.rank].layout
        length = wave.virt_hi - wave.virt_lo
        # A rank that says that it has copied may not have touched all of it.
        view = (
            self._driver.memory.arenas[effect.arena].back(effect.offset, length)
            if length
            else memoryview(b"")
        )
        flush = self._jobs[effect.group][0]
        if isinstance(flush, PlannedFlush):
            flush.add_wave(
                effect.rank,
                effect.number,
                Source(items, layout, view, effect.arena, effect.offset),
                wave.chunk_lo,
                wave.chunk_hi,
                wave.virt_lo,
                eager=effect.eager,
                table_id=table_id,
                shapes=self.tables.shapes(items, table_id) if flush.framed else None,
            )
            return
        flush.add_wave(
            effect.rank,
            effect.number,
            items,
            layout,
            wave.chunk_lo,
            wave.chunk_hi,
            view,
            wave.virt_lo,
            table_id=table_id,
            shapes=self.tables.shapes(items, table_id) if flush.framed else None,
        )

    def _end(self, group: int, delete: bool) -> None:
        flush, job = self._jobs.pop(group)
        if isinstance(flush, EagerFlush):
            # Its last reference may wait for a garbage collector, and its views would keep
            # mappings of arenas that are closed.
            flush.forget_waves()
        counts, metrics = flush.counts(), self._driver.metrics
        metrics.add("groupio_hashed_bytes", counts.hashed_bytes)
        metrics.add("groupio_hashed_chunks", counts.hashed_chunks)
        metrics.add("groupio_duplicate_bytes", counts.duplicate_bytes, "epoch")
        metrics.add("groupio_duplicate_bytes", counts.known_bytes, "store")
        metrics.add("groupio_written_bytes", counts.new_bytes)
        if self._driver.network is not None:
            self._driver.network.holdings.release(group)
        if delete:
            job.run(flush.delete_segments)
            job.run(job.store.renew)
        elif isinstance(flush, EagerFlush) and not flush.swept:
            job.run(flush.sweep)
