"""The flush job of a group on a node: it hashes what was copied, writes, and fetches from peers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from groupio.errors import GroupIOError
from groupio.format.records import segment_name
from groupio.model import DecisionKey, SegmentRef
from groupio.protocol import events as ev
from groupio.protocol.ledger import Use
from groupio.protocol.reasons import is_away
from groupio.testing.sim.content import Member, Place, report_of
from groupio.testing.sim.disk import File
from groupio.testing.sim.engine import Violated
from groupio.testing.sim.store import Procedure, Segment, failed

if TYPE_CHECKING:
    from groupio.testing.sim.node import Node

SEGMENT_ALIGN = 4096


class FlushJob:
    """One group's job in one agent process."""

    def __init__(
        self, node: Node, group: int, key: DecisionKey, *, store: bool, planned: bool
    ) -> None:
        self.node = node
        self.group = group
        self.key = key
        self.store = store
        self.planned = planned
        self.waves: deque[Any] = deque()
        self.added: list[Any] = []
        self.orders: deque[Any] = deque()
        self.finished = False
        self.cancelled = False
        self.ended = False
        self.hashed = False
        self.running = False
        self.lengths: dict[bytes, int] = {}
        """All chunks of the node's members, then those written for others, in report order."""
        self.members: dict[int, Member] = {}
        self.places: dict[bytes, Place] = {}
        self.own: list[SegmentRef] = []
        self.names: list[str] = []
        """Every segment that it made."""
        self.copies: dict[bytes, int] = {}
        """Replicas that it holds, with their lengths."""
        self._file: File | None = None
        self._name = ""
        self._wrote: list[tuple[bytes, int]] = []

    # -- orders -------------------------------------------------

    def add(self, wave: Any) -> None:
        """A copied wave is in memory."""
        if self.finished:
            raise Violated(6, f"{self.node.name}: a wave came after the last one: {wave}")
        self.waves.append(wave)
        self.added.append(wave)
        self.run()

    def finish(self) -> None:
        """All waves of all members are there."""
        self.finished = True
        self.run()

    def repeat(self) -> None:
        """What failed is done anew from memory, in other segments."""
        if not (self.ended and self.whole):
            raise Violated(6, f"{self.node.name}: group {self.group} is at work, or was in waves")
        self.ended = self.hashed = False
        self.waves = deque(self.added)
        for known in (self.lengths, self.members, self.places, self.own):
            known.clear()
        self.run()

    @property
    def whole(self) -> bool:
        """All of it is in memory at once."""
        return self.node.machine.groups[self.group].in_memory

    def order(self, order: Any) -> None:
        """A round of the plan."""
        self.orders.append(order)
        self.run()

    def cancel(self) -> None:
        """Stop as soon as possible."""
        self.cancelled, self.ended = True, False
        if not self.running:
            self._idle()

    def _idle(self) -> None:
        self.ended = True
        self.node.process_soon(ev.JobIdle(self.group))

    def run(self) -> None:
        """Go on, unless it is under way or there is nothing to do."""
        if self.running or self.cancelled or self.ended:
            return
        work = self.waves or self.orders or (self.finished and not self.hashed)
        if work:
            self.running = True
            self.node.steps.start(self._work(), self._done)

    def _done(self, result: Any, error: GroupIOError | None) -> None:
        self.running = False
        if self.cancelled:
            self._idle()
        elif error is not None:
            if not (self.hashed if self.planned else self.whole and is_away(error)):
                self.node.sim.oracle.unwritten.add(self.key)
            self.ended = not self.planned
            self.orders.clear()
            self._drop_file()
            if self.planned:
                self.hashed = True
            self.node.feed(ev.JobFailed(self.group, error))
            if self.planned:
                self.run()
        else:
            self.run()

    # -- work -------------------------------------------------

    def stopped(self) -> bool:
        """The group was given up meanwhile."""
        return self.cancelled

    def _work(self) -> Procedure:
        while self.waves and not self.stopped():
            yield from self._hash(self.waves.popleft())
        if self.stopped():
            return
        if self.finished and not self.hashed and not self.waves:
            self.hashed = True
            if self.planned:
                if self._wrote:
                    yield from self._close_segment()
                if not self.stopped():
                    self.node.feed(ev.JobHashed(self.group, self.report()))
            else:
                yield from self._close_segment()
                if not self.stopped():
                    self.ended = True
                    self.node.feed(ev.JobStored(self.group, self.report()))
        while self.orders and not self.stopped() and not self.waves:
            yield from self._round(self.orders.popleft())

    def _hash(self, wave: Any) -> Procedure:
        cell = self._look(wave)
        yield "hash"
        if self.stopped():
            return
        if self._look(wave) != cell:
            raise Violated(12, f"{self.node.name}: the bytes of {wave.client} changed under way")
        rank = self.node.sim.ranks[wave.client]
        shape = rank.saves[wave.save_id].member.shape
        before = self.members.get(wave.rank)
        chunks = (*(before.chunks if before is not None else ()), *cell)
        self.members[wave.rank] = Member(wave.rank, shape, chunks)
        size = self.node.sim.options.chunk_bytes
        new = []
        for name in cell:
            if name not in self.lengths:
                self.lengths[name] = size
                place = self.node.known(name) if self.store else None
                if place is not None:
                    self.places[name] = place
                elif self.store:
                    new.append((name, size))
        if self.store and (not self.planned or getattr(wave, "eager", False)):
            yield from self._write(new)
        if self.stopped():
            return
        self.node.feed(ev.WaveStored(self.group, wave.rank, wave.number))

    def _look(self, wave: Any) -> tuple[bytes, ...]:
        """The bytes of a wave, which must still be leased to it."""
        node = self.node
        use = node.use_of(wave.arena, wave.offset)
        if use is not Use.LEASED:
            raise Violated(12, f"{node.name}: group {self.group} works on {use} memory")
        return node.memory.get((wave.arena, wave.offset), ())

    def _write(self, chunks: list[tuple[bytes, int]]) -> Procedure:
        if not chunks:
            return
        fault = yield "write"
        if fault == "short_write":
            yield "write"
        if self._file is None:
            self._open_segment()
        assert self._file is not None
        if not isinstance(self._file.content, Segment):
            raise failed("write", "eio")
        content = self._file.content
        for name, size in chunks:
            content.offsets.append(self._file.size)
            content.digests.append(name)
            content.lengths.append(size)
            if name in self.node.wrong:
                content.bad.add(name)
            self._wrote.append((name, self._file.size))
            self._file.size += -(-size // SEGMENT_ALIGN) * SEGMENT_ALIGN
        if fault == "misdirected_write":
            victim = self.node.sim.rng.choice(content.digests)
            content.bad.add(victim)
            self.node.sim.oracle.rotted.add((self._name, victim))

    def _open_segment(self) -> None:
        disk, seq = self.node.disk, len(self.own)
        while disk.get("segments", name := segment_name(self.key, self.node.name, seq)) is not None:
            seq += 1
        self._name = name
        self.names.append(name)
        self._file = disk.create(self.node.name, "segments", name, Segment(self.key), SEGMENT_ALIGN)
        self._wrote = []

    def _close_segment(self) -> Procedure:
        if self._file is None:
            return
        records = self.node.records
        if "fsync" not in self.node.sim.guards:
            yield from records.flush(self._file)
        yield from records.sync("segments")
        assert self._file is not None
        ref = SegmentRef(self._name, self._file.size, True)
        self.own.append(ref)
        for name, offset in self._wrote:
            self.places[name] = Place(ref, offset)
        self._file, self._wrote = None, []

    def _drop_file(self) -> None:
        """A segment that could not be finished is worthless."""
        if self._file is not None:
            self.node.disk.unlink(self.node.name, "segments", self._name)
            self._file, self._wrote = None, []

    def report(self) -> Any:
        """What the node found and stored so far."""
        members = [self.members[rank] for rank in sorted(self.members)]
        return report_of(self.node.name, members, self.lengths, self.places, self.own)

    # -- rounds of a plan -------------------------------------------------

    def _round(self, run: Any) -> Procedure:
        order = run.order
        names = list(self.lengths)
        rows = [names[row] for row in np.asarray(order.write).tolist()]
        writes = [(n, self.lengths[n]) for n in rows if n not in self.places]
        short: list[bytes] = []
        asked: set[str] = set()
        liars: set[str] = set()
        kept: list[bytes] = []
        lacking = False
        for fetch in order.fetch:
            got = yield from self._fetch(fetch, run.addresses, asked, liars)
            if self.stopped():
                return
            for i, name in enumerate(_digests(fetch.digests)):
                if name not in got:
                    lacking = True
                    short.append(name)
                    continue
                size = int(fetch.lengths[i])
                if fetch.keep[i]:
                    if name not in self.copies and not self.node.fits(run, len(self.copies)):
                        short.append(name)
                        continue
                    self.copies[name] = size
                    kept.append(name)
                if fetch.write[i] and name not in self.places:
                    writes.append((name, size))
        self.node.keep(run, kept, self.copies)
        copies = np.frombuffer(b"".join(self.copies), np.uint8).reshape(-1, 32)
        if short:
            missing = np.frombuffer(b"".join(short), np.uint8).reshape(-1, 32)
            self.node.feed(
                ev.JobShort(
                    self.group,
                    run.round,
                    missing,
                    tuple(sorted(asked)) if lacking else (),
                    tuple(sorted(liars)),
                    copies,
                )
            )
            return
        self.node.feed(ev.JobReplicated(self.group, run.round, copies))
        yield from self._write(writes)
        yield from self._close_segment()
        if self.stopped():
            return
        for name, size in writes:
            self.lengths.setdefault(name, size)
        self.node.feed(ev.JobStored(self.group, self.report(), run.round))

    def _fetch(
        self, fetch: Any, addresses: dict[str, str], asked: set[str], liars: set[str]
    ) -> Any:
        """The digests that some peer gave; peers are tried one after the other."""
        got: set[bytes] = set()
        wanted = _digests(fetch.digests)
        for source in (fetch.source, *fetch.others):
            left = [name for name in wanted if name not in got]
            if not left:
                break
            yield "pull"
            if self.stopped():
                return got
            asked.add(source)
            for name in left:
                answer = self.node.pull(source, addresses.get(source, ""), name)
                if answer == "wrong":
                    if "digest check" not in self.node.sim.guards:
                        liars.add(source)
                        continue
                    self.node.wrong.add(name)
                if answer in ("right", "wrong"):
                    got.add(name)
        return got


def _digests(table: Any) -> list[bytes]:
    return [row.tobytes() for row in np.asarray(table)]
