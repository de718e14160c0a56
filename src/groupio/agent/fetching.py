"""Chunks that a plan moves to this node: pulled from peers, checked, kept or handed on.

Memory is bounded: what is kept goes to the memory that was admitted for it, what is only written
goes through one buffer per peer.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.agent.holdings import Holdings, Places
from groupio.agent.links import Links
from groupio.fabric.base import DIGEST, Fabric, Stop, Want
from groupio.model import CHUNK_BYTES, DIGEST_BYTES
from groupio.plan.orders import Fetch

BATCH_BYTES = 16 << 20
"""So much is pulled at once from one peer, and written as one."""

PEER_WAIT_S = 60.0
"""A peer may send nothing for so long; one that sends is given up where it is too slow
(:data:`groupio.fabric.pulling.SLOWEST_BYTES_PER_S`)."""

STAY_S = 5.0
"""After a write that failed, what stays is pulled for so long: copies need no store."""

Write = Callable[[memoryview, npt.NDArray[np.int64], Fetch, npt.NDArray[np.int64]], None]
"""Write rows of a fetch that lie in memory: the view, their starts in it, the fetch, the rows."""


class Fetched(NamedTuple):
    """What came of a fetch; ``missing`` are digests, uint8[n, 32]."""

    missing: npt.NDArray[np.uint8]
    asked: tuple[str, ...]
    """The nodes that were asked for what is missing."""
    liars: tuple[str, ...]
    """Nodes that sent wrong bytes."""


class Room(NamedTuple):
    """Memory for chunks that stay: a view of ``arena`` from ``offset`` on."""

    view: memoryview
    arena: int
    offset: int


class _Batch(NamedTuple):
    """Chunks of a fetch, and the memory that each goes ``into``."""

    digests: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    into: list[memoryview]


@dataclass(slots=True)
class _Round:
    """One call of ``fetch``; ``left`` are the steps that bring what stays."""

    addresses: dict[str, str]
    rooms: Sequence[Room]
    write: Write
    stopped: Callable[[], bool]
    kept: Callable[[], None] | None
    left: int = 0
    stop: Stop = field(default_factory=Stop)
    """Ends the pulls under way, which are of no use."""
    no_writes: Stop = field(default_factory=Stop)
    """Ends the pulls of what would only be written."""
    thin: bool = False
    """Something that was to stay did not come."""

    def over(self) -> bool:
        """Nothing more is to be begun."""
        return self.stop.is_set or self.stopped()

    def write_no_more(self) -> bool:
        """Nothing more is to be written."""
        return self.no_writes.is_set or self.over()

    def end(self) -> None:
        """End all pulls under way."""
        self.no_writes.set()
        self.stop.set()


class Fetcher:
    """Fetches for one group. ``job`` is the id of its store, which scopes what peers give."""

    def __init__(
        self,
        *,
        fabric: Fabric,
        holdings: Holdings,
        links: Links,
        pool: Executor,
        group: int,
        job: str,
    ) -> None:
        self._fabric = fabric
        self._links = links
        self._holdings = holdings
        self._pool = pool
        self.group = group
        self._job = job
        self._lock = threading.Lock()
        self._stop = Stop()
        self._free: list[tuple[int, int]] = []
        """What is free of the rooms: an offset in the arena, how many bytes."""
        self._rooms: set[int] = set()
        """Where the rooms begin that were given so far."""
        self._kept: dict[bytes, int] = {}
        """Where in the arena each chunk that stays begins."""

    def cancel(self) -> None:
        """Fetch nothing more, and end what is under way at once."""
        self._stop.set()

    @property
    def copies(self) -> npt.NDArray[np.uint8]:
        """Digests of all chunks that are kept here, uint8[n, 32]."""
        with self._lock:
            joined = b"".join(self._kept)
        return np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)

    def fetch(
        self,
        parts: Sequence[Fetch],
        addresses: dict[str, str],
        rooms: Sequence[Room],
        write: Write,
        stopped: Callable[[], bool],
        *,
        kept: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Fetched:
        """Bring all of ``parts`` here; chunks to write are handed to ``write``, from any thread.

        ``write`` must be done with their memory when it returns. ``kept`` is called once all that
        stays is here, whatever is still to be written; ``meanwhile`` in this thread, while the
        others pull. On return, or after an error, no thread uses the memory any more.
        What does not fit into the ``rooms``, which are of one arena, is missing too. After a write
        that failed, what stays is still brought, for STAY_S at most.
        """
        self._enter(rooms)
        run = _Round(addresses, rooms, write, stopped, kept)
        stay: list[Callable[[], Fetched]] = []
        pass_on: list[Callable[[], Fetched]] = []
        for part in parts:
            absent = ~self._are_kept(part)
            rows = np.flatnonzero(part.keep & absent)
            if len(rows):
                stay.append(partial(self._bring, run, part, rows))
            batches = _cut(part, np.flatnonzero(~part.keep & absent))
            # One batch is pulled while the one before it is written.
            for mine in filter(None, (batches[::2], batches[1::2])):
                pass_on.append(partial(self._pass_on, run, part, mine))
        run.left = len(stay)
        coming = [part.digests[part.keep] for part in parts]
        for digests in coming:
            self._holdings.expect(self._job, digests)
        try:
            if kept is not None and not stay:
                kept()
            with self._stop.waking(run.end):
                results = self._run(run, stay, pass_on, meanwhile)
        finally:
            for digests in coming:
                self._holdings.expect_no_more(self._job, digests)
        for part in parts:
            self._write_kept(run, part)
        return _join(results)

    def _run(
        self,
        run: _Round,
        stay: Sequence[Callable[[], Fetched]],
        pass_on: Sequence[Callable[[], Fetched]],
        meanwhile: Callable[[], None],
    ) -> list[Fetched]:
        def guarded(step: Callable[[], Fetched], failed: Callable[[], None]) -> Fetched:
            try:
                return step()
            except BaseException:
                failed()
                raise

        staying: list[Future[Fetched]] = []
        passing: list[Future[Fetched]] = []
        try:
            for step in stay:
                staying.append(self._pool.submit(guarded, step, run.end))
            for step in pass_on:
                passing.append(self._pool.submit(guarded, step, run.no_writes.set))
            meanwhile()
        except BaseException:
            run.no_writes.set()
            raise
        finally:
            # Also after an error: the others still use the memory.
            wait(passing)
            if run.no_writes.is_set:
                wait(staying, STAY_S)
                run.end()
            wait(staying)
        return [done.result() for done in (*staying, *passing)]

    def _are_kept(self, part: Fetch) -> npt.NDArray[np.bool_]:
        with self._lock:
            return np.array([d.tobytes() in self._kept for d in part.digests], np.bool_)

    def _bring(self, run: _Round, part: Fetch, rows: npt.NDArray[np.int64]) -> Fetched:
        """Pull chunks that stay into the room."""
        peers = _peers(part, run)
        liars: set[str] = set()
        missing: list[npt.NDArray[np.uint8]] = []
        unfit: list[npt.NDArray[np.uint8]] = []
        for mine in _cut(part, rows):
            if run.over():
                break
            lengths = part.lengths[mine]
            starts = self._reserve(lengths)
            if starts is None:
                # An order that counts as lost may have brought more than the plan knows of.
                unfit.append(part.digests[mine])
                continue
            batch = _Batch(part.digests[mine], lengths, _places(run.rooms, starts, lengths))
            here = np.zeros(len(mine), np.bool_)
            try:
                here = self._pull(run, batch, peers, liars, run.stop)
            finally:
                self._keep(batch, starts, here, run.rooms[0].arena)
            missing.append(batch.digests[~here])
        found = _join((_fetched(missing, peers, liars), _fetched(unfit, (), set())))
        with self._lock:
            run.left -= 1
            run.thin |= len(found.missing) > 0
            complete = not run.left and not run.thin and not run.over()
        if complete and run.kept is not None:
            run.kept()
        return found

    def _pass_on(
        self, run: _Round, part: Fetch, batches: Sequence[npt.NDArray[np.int64]]
    ) -> Fetched:
        """Pull chunks and have them written; nothing of them stays."""
        peers = _peers(part, run)
        liars: set[str] = set()
        missing: list[npt.NDArray[np.uint8]] = []
        room = max(int(part.lengths[mine].sum()) for mine in batches)
        view = memoryview(mmap.mmap(-1, max(room, 1)))
        for mine in batches:
            if run.write_no_more():
                break
            lengths = part.lengths[mine]
            starts = np.cumsum(lengths) - lengths
            whole = [Room(view, -1, 0)]
            batch = _Batch(part.digests[mine], lengths, _places(whole, starts, lengths))
            here = self._pull(run, batch, peers, liars, run.no_writes)
            missing.append(batch.digests[~here])
            wanted = here & part.write[mine]
            if wanted.any() and not run.write_no_more():
                run.write(view, starts[wanted], part, mine[wanted])
        return _fetched(missing, peers, liars)

    def _keep(
        self,
        batch: _Batch,
        starts: npt.NDArray[np.int64],
        here: npt.NDArray[np.bool_],
        arena: int,
    ) -> None:
        """Hold what came; the memory of the rest is free again."""
        digests = batch.digests[here]
        if len(digests):
            arenas = np.full(len(digests), arena, np.int64)
            places = Places(digests, arenas, starts[here], batch.lengths[here])
            self._holdings.hold(self.group, self._job, places)
        unused = zip(starts[~here].tolist(), batch.lengths[~here].tolist(), strict=True)
        with self._lock:
            self._free += unused
            for digest, start in zip(digests, starts[here].tolist(), strict=True):
                self._kept[digest.tobytes()] = start

    def _write_kept(self, run: _Round, part: Fetch) -> None:
        """Write chunks that are here to stay, of this round or of an earlier one."""
        rows = np.flatnonzero(self._are_kept(part) & part.write)
        for mine in _cut(part, rows):
            if run.over():
                return
            starts = np.array([self._kept[part.digests[r].tobytes()] for r in mine], np.int64)
            number = _rooms_of(run.rooms, starts)
            for i in np.unique(number).tolist():
                room, there = run.rooms[i], number == i
                run.write(room.view, starts[there] - room.offset, part, mine[there])

    def _enter(self, rooms: Sequence[Room]) -> None:
        """What is new of the rooms is free."""
        with self._lock:
            for room in rooms:
                if room.offset not in self._rooms:
                    self._rooms.add(room.offset)
                    self._free.append((room.offset, len(room.view)))

    def _reserve(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Free memory for chunks of these ``lengths``: where in the arena each starts."""
        with self._lock:
            first = self._take_hole(int(lengths.sum()))
            if first >= 0:  # all of them one behind the other
                return first + np.cumsum(lengths) - lengths
            before = list(self._free)
            starts = np.array([self._take_hole(n) for n in lengths.tolist()], np.int64)
            if (starts < 0).any():
                self._free = before
                return None
            return starts

    def _take_hole(self, length: int) -> int:
        """Where ``length`` bytes fit into a hole, best one of just that size; -1: into none."""
        fitting = [hole for hole in self._free if hole[1] >= length]
        if not fitting:
            return -1
        start, size = hole = min(fitting, key=lambda one: one[1])
        self._free.remove(hole)
        if size > length:
            self._free.append((start + length, size - length))
        return start

    def _pull(
        self, run: _Round, batch: _Batch, peers: list[str], liars: set[str], stop: Stop
    ) -> npt.NDArray[np.bool_]:
        """Ask one peer after the other; which chunks came, bool[n]."""
        here = np.zeros(len(batch.lengths), np.bool_)
        for peer in peers:
            left = np.flatnonzero(~here)
            if not len(left) or stop.is_set or run.over():
                break
            wants = [
                Want(batch.digests[i].tobytes(), 0, size, batch.into[i])
                for i, size in zip(left.tolist(), batch.lengths[left].tolist(), strict=True)
            ]
            pace, changes, began = self._fabric.pace, self._fabric.pace.changes, time.monotonic()
            address, deadline = run.addresses[peer], began + PEER_WAIT_S
            outcomes = self._fabric.pull(
                address, self._job, wants, deadline=deadline, patience_s=PEER_WAIT_S, stop=stop
            )
            # A foreground interval says nothing of the link.
            steady = pace.share == 1 and pace.changes == changes
            seconds = time.monotonic() - began if steady else 0.0
            self._links.pulled(address, self._job, outcomes, seconds)
            here[left] = [outcome.ok for outcome in outcomes]
            if any(outcome.error == DIGEST for outcome in outcomes):
                liars.add(peer)
        return here


def _cut(part: Fetch, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """``rows`` in batches of BATCH_BYTES at most."""
    if not len(rows):
        return []
    # A batch may end with a chunk too many, and a chunk never exceeds CHUNK_BYTES.
    number = np.cumsum(part.lengths[rows]) // (BATCH_BYTES - CHUNK_BYTES)
    return np.split(rows, np.flatnonzero(np.diff(number)) + 1)


def _rooms_of(rooms: Sequence[Room], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """In which of the rooms, which come in any order, each offset of the arena lies."""
    offsets = np.array([room.offset for room in rooms], np.int64)
    order = np.argsort(offsets)
    return order[np.searchsorted(offsets[order], starts, side="right") - 1]


def _places(
    rooms: Sequence[Room], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> list[memoryview]:
    """The memory of chunks that start at these offsets of the arena."""
    found = []
    numbers = _rooms_of(rooms, starts).tolist()
    for number, start, size in zip(numbers, starts.tolist(), lengths.tolist(), strict=True):
        at = start - rooms[number].offset
        found.append(rooms[number].view[at : at + size])
    return found


def _peers(part: Fetch, run: _Round) -> list[str]:
    return [name for name in (part.source, *part.others) if name in run.addresses]


def _fetched(
    missing: Sequence[npt.NDArray[np.uint8]], peers: Sequence[str], liars: set[str]
) -> Fetched:
    lost = np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *missing])
    return Fetched(lost, tuple(peers) if len(lost) else (), tuple(sorted(liars)))


def _join(results: Sequence[Fetched]) -> Fetched:
    none = np.empty((0, DIGEST_BYTES), np.uint8)
    return Fetched(
        np.concatenate([none, *(r.missing for r in results)]),
        tuple(dict.fromkeys(name for r in results for name in r.asked)),
        tuple(dict.fromkeys(name for r in results for name in r.liars)),
    )
