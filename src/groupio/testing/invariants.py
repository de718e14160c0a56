"""The invariants of groupio, as pure functions over what can be observed.

The simulator, the crash tests, the property tests and ``groupio verify`` all ask these functions,
so that there is one statement of what must hold. Each returns the violations it found, in the
order of the keys, and never raises on a broken store: that is what it is there to describe.

====  =================  ==========================================================
no.   name               function
====  =================  ==========================================================
1     atomic             :func:`check_atomic`
2     no lost ack        :func:`check_no_lost_ack`
3     no mixing          :func:`check_no_mixing`
5     no downgrade       :func:`check_no_downgrade`
6     idempotent         :func:`check_idempotent`
7     one decision       :func:`check_one_decision`, :func:`check_decisions_stand`
8     monotone           :func:`check_monotone`, :func:`check_retention`
10    bit exact          :func:`check_bit_exact`
11    bounded            :func:`check_bounded`
====  =================  ==========================================================

The other numbers of the design's list, and what levels promise on several nodes, are in
:mod:`groupio.testing.node_invariants`: 2, 4, 9, 12 and 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from groupio.format.records import parse_segment_name
from groupio.model import DecisionKey, EpochHeader, Level, Lineage, Manifest
from groupio.protocol import lineage as lines

if TYPE_CHECKING:
    import numpy.typing as npt

LEVEL_ORDER = (Level.STAGED, Level.REPLICATED, Level.REMOTE, Level.DURABLE)
"""Levels from the weakest to the strongest, as far as one store can tell them apart."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant: its number in the design, where, and what is wrong."""

    invariant: int
    detail: str
    key: DecisionKey | None = None
    path: str | None = None
    chunk: str | None = None
    """Hex digest of the chunk concerned, if it is one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What stands under one decision key: a commit, or an abort."""

    key: DecisionKey
    committed: bool
    incarnation: int
    write_id: str


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """What a segment file really holds, by its own header and index.

    ``digests`` uint8[n, 32], ``offsets`` int64[n] ascending, ``lengths`` int64[n]. ``bad`` holds
    the digests (as bytes) of chunks whose stored bytes were read and do not match.
    """

    name: str
    store_id: str
    key: DecisionKey
    total_bytes: int
    digests: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    bad: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Ack:
    """A level that a member was told its epoch has reached.

    ``write_id`` names the group's write when the observer knows it, else "".
    """

    lineage: int
    epoch: int
    rank: int
    world_size: int
    incarnation: int
    level: Level
    write_id: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """A store at one moment; what cannot be read is absent from the maps."""

    decisions: tuple[Decision, ...]
    manifests: Mapping[DecisionKey, Manifest]
    segments: Mapping[str, SegmentSummary] = field(default_factory=dict)
    lineages: tuple[Lineage, ...] = ()

    @property
    def committed(self) -> tuple[DecisionKey, ...]:
        """Keys of the committed epochs, ascending."""
        return tuple(sorted(d.key for d in self.decisions if d.committed))

    def latest(self) -> int | None:
        """The highest committed epoch of the current line, or None."""
        table = lines.by_number(self.lineages)
        return max(lines.visible(self.committed, table, lines.current(table)), default=None)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The agent's ledger at one moment, in bytes; ``in_flight`` counts undecided groups."""

    budget: int
    leased: int
    quarantined: int
    cached: int
    in_flight: int


# -- 1, 3, 5: one epoch ----------------------------------------------------------------------------


def check_atomic(store: Observed, keys: Iterable[DecisionKey] | None = None) -> list[Violation]:
    """1: every chunk of every committed epoch is where its manifest says, with its digest.

    Segments whose data was not read are compared by their index alone.
    """
    found = []
    for key in sorted(keys if keys is not None else store.committed):
        manifest = store.manifests.get(key)
        if manifest is None:
            found.append(Violation(1, "the committed epoch has no readable manifest", key))
        else:
            found += _chunks_in_place(manifest, key, store.segments)
    return found


def _chunks_in_place(
    manifest: Manifest, key: DecisionKey, segments: Mapping[str, SegmentSummary]
) -> Iterator[Violation]:
    chunks = manifest.chunks
    for number, ref in enumerate(manifest.segments):
        rows = np.flatnonzero(chunks.segments == number)
        summary = segments.get(ref.name)
        if summary is None:
            detail = f"a segment with {len(rows)} chunks of the epoch is missing or unreadable"
            yield Violation(1, detail, key, ref.name)
            continue
        if summary.total_bytes != ref.bytes:
            detail = f"the segment has {summary.total_bytes} bytes, the manifest says {ref.bytes}"
            yield Violation(1, detail, key, ref.name)
        for row in rows[_misplaced(manifest, rows, summary)]:
            digest = chunks.digests[row].tobytes().hex()
            detail = f"the chunk at byte {chunks.offsets[row]} is not in the segment's index"
            yield Violation(1, detail, key, ref.name, digest)
        if summary.bad:
            for row in rows:
                digest = chunks.digests[row].tobytes()
                if digest in summary.bad:
                    detail = f"the bytes at {chunks.offsets[row]} do not match their digest"
                    yield Violation(1, detail, key, ref.name, digest.hex())


def _misplaced(
    manifest: Manifest, rows: npt.NDArray[np.int64], summary: SegmentSummary
) -> npt.NDArray[np.bool_]:
    """Which of ``rows`` the segment does not have at that offset, length and digest."""
    chunks = manifest.chunks
    if not len(summary.offsets):
        return np.ones(len(rows), dtype=bool)
    place = np.searchsorted(summary.offsets, chunks.offsets[rows])
    place = np.minimum(place, len(summary.offsets) - 1)
    there = (summary.offsets[place] == chunks.offsets[rows]) & (
        summary.lengths[place] == chunks.lengths[rows]
    )
    same = (summary.digests[place] == chunks.digests[rows]).all(axis=1)
    return np.asarray(~(there & same))


def check_no_mixing(store: Observed) -> list[Violation]:
    """3: all parts of a committed epoch belong to the same job, incarnation, epoch and members."""
    found: list[Violation] = []
    owners: dict[str, set[tuple[str, str]]] = {}
    incarnations = {d.key: d.incarnation for d in store.decisions}
    for key, manifest in sorted(store.manifests.items()):
        header = manifest.header
        owners.setdefault("store", set()).add((header.store_id, header.job))
        stated = DecisionKey(header.lineage, header.epoch, header.attempt)
        if stated != key:
            found.append(Violation(3, f"its manifest says it is {stated}", key))
        if incarnations.get(key, header.incarnation) != header.incarnation:
            detail = f"decided by incarnation {incarnations[key]}, written by {header.incarnation}"
            found.append(Violation(3, detail, key))
        for ref in manifest.segments:
            found += _segment_owner(key, header, ref.name, ref.own, store.segments.get(ref.name))
    if len(owners.get("store", ())) > 1:
        found.append(
            Violation(3, f"epochs of several jobs in one store: {sorted(owners['store'])}")
        )
    return found


def _segment_owner(
    key: DecisionKey, header: EpochHeader, name: str, own: bool, summary: SegmentSummary | None
) -> Iterator[Violation]:
    parsed = parse_segment_name(name)
    if parsed is None:
        yield Violation(3, "not the name of a segment", key, name)
        return
    if own != (parsed[0] == key):
        detail = "counted as its own, but" if own else "counted as an older one, but"
        yield Violation(3, f"{detail} its name says {parsed[0]}", key, name)
    if summary is None:
        return
    if summary.store_id != header.store_id:
        yield Violation(3, f"the segment belongs to store {summary.store_id}", key, name)
    if summary.key != parsed[0]:
        yield Violation(3, f"the segment's header says it is of {summary.key}", key, name)


def check_no_downgrade(store: Observed, acks: Sequence[Ack] = ()) -> list[Violation]:
    """5: a committed epoch has every member of its group, and no ack was given to a smaller one."""
    found = []
    sizes: dict[tuple[int, int], int] = {}
    for key, manifest in sorted(store.manifests.items()):
        ranks = [member.rank for member in manifest.members]
        world_size = manifest.header.world_size
        if sorted(ranks) != list(range(world_size)):
            missing = sorted(set(range(world_size)) - set(ranks))
            detail = f"world size {world_size}, ranks {ranks[:20]}, missing {missing[:20]}"
            found.append(Violation(5, detail, key))
        sizes[key.lineage, key.epoch] = world_size
    for ack in acks:
        world_size = sizes.get((ack.lineage, ack.epoch), ack.world_size)
        if world_size != ack.world_size:
            detail = (
                f"rank {ack.rank} saved epoch {ack.epoch} in a group of {ack.world_size}, "
                f"which was committed by {world_size}"
            )
            found.append(Violation(5, detail))
    return found


# -- 2, 6: what members were told ------------------------------------------------------------------


def check_no_lost_ack(
    store: Observed, acks: Iterable[Ack], *, survives: Level = Level.DURABLE
) -> list[Violation]:
    """2: every ack at a level that the faults so far must spare has its committed epoch.

    ``survives`` is the weakest level that names those faults: STAGED when only training processes
    died (and the agent has since finished), DURABLE after a power cut.
    """
    kept = LEVEL_ORDER[LEVEL_ORDER.index(survives) :]
    committed = {(key.lineage, key.epoch): key for key in store.committed}
    found = []
    for ack in acks:
        if ack.level not in kept:
            continue
        key = committed.get((ack.lineage, ack.epoch))
        if key is None:
            detail = f"rank {ack.rank} was told {ack.level} for epoch {ack.epoch}, which is gone"
            found.append(Violation(2, detail))
            continue
        manifest = store.manifests.get(key)
        ranks = {member.rank for member in manifest.members} if manifest else set()
        if ack.rank not in ranks:
            detail = f"rank {ack.rank} was told {ack.level}, the epoch does not have its items"
            found.append(Violation(2, detail, key))
    return found


def check_idempotent(store: Observed, acks: Iterable[Ack] = ()) -> list[Violation]:
    """6: an epoch is committed once in its lineage, and all members were told of the same write."""
    found = []
    seen: dict[tuple[int, int], DecisionKey] = {}
    for key in store.committed:
        first = seen.setdefault((key.lineage, key.epoch), key)
        if first != key:
            found.append(Violation(6, f"committed twice: also as {first}", key))
    writes = {d.key: d.write_id for d in store.decisions}
    for ack in acks:
        committed = seen.get((ack.lineage, ack.epoch))
        if ack.level is not Level.DURABLE or not ack.write_id or committed is None:
            continue
        if writes[committed] != ack.write_id:
            detail = f"rank {ack.rank} was told of write {ack.write_id}, not {writes[committed]}"
            found.append(Violation(6, detail, committed))
    return found


# -- 7, 8: decisions over time ---------------------------------------------------------------------


def check_one_decision(store: Observed) -> list[Violation]:
    """7: one decision a key, an epoch commits at most once, and attempts follow aborts in order."""
    found = []
    attempts: dict[tuple[int, int], dict[int, Decision]] = {}
    for decision in store.decisions:
        key = decision.key
        earlier = attempts.setdefault((key.lineage, key.epoch), {})
        if earlier.setdefault(key.attempt, decision) != decision:
            found.append(Violation(7, "two decisions under one key", key))
    for of_epoch in attempts.values():
        ordered = [of_epoch[number] for number in sorted(of_epoch)]
        for before, after in pairwise(ordered):
            if before.committed:
                detail = f"decided after attempt {before.key.attempt} was committed"
                found.append(Violation(7, detail, after.key))
            if after.key.attempt != before.key.attempt + 1:
                detail = f"attempt {before.key.attempt} is the last one decided before it"
                found.append(Violation(7, detail, after.key))
            # 0: an abort by a recovery that could not tell whose attempt it was.
            if 0 < after.incarnation < before.incarnation:
                detail = f"incarnation {after.incarnation} decided after {before.incarnation}"
                found.append(Violation(7, detail, after.key))
    return sorted(found, key=lambda violation: violation.key or DecisionKey(0, 0, 0))


def check_decisions_stand(before: Observed, after: Observed) -> list[Violation]:
    """7: what was decided once is never decided otherwise later."""
    later = {d.key: d for d in after.decisions}
    return [
        Violation(7, f"was {_verdict(d)}, is now {_verdict(later[d.key])}", d.key)
        for d in before.decisions
        if d.key in later and later[d.key] != d
    ]


def _verdict(decision: Decision) -> str:
    verdict = "committed" if decision.committed else "aborted"
    return f"{verdict} by write {decision.write_id}"


def check_monotone(latest: Iterable[tuple[int, int]]) -> list[Violation]:
    """8: ``latest`` never goes back; ``latest`` holds (lineage, epoch) in the order of looking."""
    highest: dict[int, int] = {}
    found = []
    for number, epoch in latest:
        if epoch < highest.get(number, epoch):
            detail = f"latest of lineage {number} went from {highest[number]} back to {epoch}"
            found.append(Violation(8, detail))
        highest[number] = max(epoch, highest.get(number, epoch))
    return found


def check_retention(before: Observed, after: Observed) -> list[Violation]:
    """8: a committed epoch only ever leaves below a newer committed one of its lineage."""
    newest: dict[int, int] = {}
    for key in after.committed:
        newest[key.lineage] = max(key.epoch, newest.get(key.lineage, key.epoch))
    return [
        Violation(8, "the committed epoch is gone and no newer one is there", key)
        for key in before.committed
        if key not in after.committed and newest.get(key.lineage, -1) <= key.epoch
    ]


# -- 10, 11: bytes and memory ----------------------------------------------------------------------


def check_bit_exact(
    saved: Mapping[tuple[int, str], bytes], loaded: Mapping[tuple[int, str], bytes]
) -> list[Violation]:
    """10: every item of every member came back as it was saved.

    Both map (rank, item name) to anything that is equal only for equal type, shape and bytes,
    for instance a digest over all three.
    """
    found = []
    for rank, name in sorted(saved.keys() | loaded.keys()):
        if (rank, name) not in loaded:
            found.append(Violation(10, f"item {name!r} of rank {rank} did not come back"))
        elif (rank, name) not in saved:
            found.append(Violation(10, f"item {name!r} of rank {rank} was never saved"))
        elif saved[rank, name] != loaded[rank, name]:
            found.append(Violation(10, f"item {name!r} of rank {rank} came back different"))
    return found


def check_bounded(samples: Iterable[MemorySample]) -> list[Violation]:
    """11: memory is within the budget at every moment; with nothing in flight none is leased."""
    found = []
    for number, sample in enumerate(samples):
        used = sample.leased + sample.quarantined + sample.cached
        if used > sample.budget:
            found.append(Violation(11, f"sample {number}: {used} bytes of {sample.budget}"))
        if min(sample.leased, sample.quarantined, sample.cached) < 0:
            found.append(Violation(11, f"sample {number}: a negative account: {sample}"))
        if not sample.in_flight and sample.leased:
            detail = f"sample {number}: {sample.leased} bytes leased with nothing in flight"
            found.append(Violation(11, detail))
    return found


def check_store(store: Observed, acks: Sequence[Ack] = ()) -> list[Violation]:
    """All that one look at a store can show: 1, 3, 5, 6 and 7, and 2 for DURABLE acks."""
    return [
        *check_atomic(store),
        *check_no_lost_ack(store, acks),
        *check_no_mixing(store),
        *check_no_downgrade(store, acks),
        *check_idempotent(store, acks),
        *check_one_decision(store),
    ]
