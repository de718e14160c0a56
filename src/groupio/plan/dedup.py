"""From what the nodes report to what the epoch is: duplicates by content, across ranks.

Replicas are compared, the content gets its id, and the manifest is built; :mod:`groupio.plan.merge`
finds which chunks are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.errors import IntegrityError, InvalidInput, Retry
from groupio.model import (
    ChunkTable,
    DecisionKey,
    EpochHeader,
    ItemKind,
    ItemSpec,
    Manifest,
    MemberTable,
    NodeLink,
    NodeReport,
    SegmentRef,
)
from groupio.plan.layout import lay_out
from groupio.plan.merge import Merged, merge

__all__ = [
    "Divergence",
    "Merged",
    "build_manifest",
    "content_id",
    "divergence",
    "fingerprint",
    "merge",
]


@dataclass(frozen=True, slots=True)
class Divergence:
    """One item declared replicated whose holders do not agree.

    ``ranks`` are the members that differ from the majority; all its holders when there is none.
    ``groups`` are the members by what they hold, each group of equal content.
    """

    item: str
    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def divergence(reports: Sequence[NodeReport], merged: Merged | None = None) -> list[Divergence]:
    """The items declared replicated on which their holders do not agree, by first appearance.

    All holders of a name must agree in kind, dtype and global shape, and those of the same part
    of it (offsets and shape) in every byte. ``merged`` is ``merge(reports)`` if it is known.
    Raises InvalidInput when a member's chunks do not match its item table.
    """
    merged = merged or merge(reports)
    tables: dict[bytes, list[tuple[MemberTable, npt.NDArray[np.int64]]]] = {}
    for report, rows in zip(reports, merged.rows, strict=True):
        for member in report.members:
            tables.setdefault(member.items_id, []).append((member, rows[member.refs]))
    held: dict[str, list[_Held]] = {}
    for same_table in tables.values():
        # Members with equal tables are compared column by column; when there is one table only,
        # its even items have no one else to agree with.
        for name, one in _held_of_table(same_table, uneven_only=len(tables) == 1):
            held.setdefault(name, []).append(one)
    found = (_judge(name, all_held) for name, all_held in held.items())
    return [one for one in found if one is not None]


def content_id(reports: Sequence[NodeReport], world: int) -> bytes:
    """BLAKE3 over every member's item table and chunk digests, by rank.

    It does not depend on which node a member is on, nor on where chunks are stored: equal content
    has an equal id. Raises InvalidInput unless the members are exactly ranks 0..world-1.
    """
    hasher = blake3(b"groupio content 1")
    hasher.update(world.to_bytes(8, "little"))
    for r, member in _members_by_rank(reports, world):
        hasher.update(member.items_id)
        hasher.update(len(member.refs).to_bytes(8, "little"))
        hasher.update(np.ascontiguousarray(reports[r].chunks.digests[member.refs]).data)
    return hasher.digest()


def fingerprint(
    items_ids: Mapping[int, bytes],
    topology: Mapping[str, Sequence[int]],
    live: Iterable[str] | None = None,
    links: Sequence[NodeLink] = (),
) -> bytes:
    """BLAKE3 over all that a plan depends on besides the content.

    ``items_ids`` are the ids of the item tables (names, shapes, dtypes, offsets) by rank,
    ``topology`` the ranks on each node, ``live`` the nodes that are alive (None: all of them),
    ``links`` the nodes' links in the order in which plans number them.
    """
    hasher = blake3(b"groupio fingerprint 1")

    def put(*texts: bytes) -> None:
        # Every part carries its length, so that no two inputs write the same bytes.
        for text in texts:
            hasher.update(len(text).to_bytes(8, "little"))
            hasher.update(text)

    put(b"items", str(len(items_ids)).encode())
    for rank in sorted(items_ids):
        put(str(rank).encode(), items_ids[rank])
    put(b"topology", str(len(topology)).encode())
    for node in sorted(topology):
        put(node.encode(), ",".join(map(str, topology[node])).encode())
    alive = sorted(topology if live is None else set(live))
    put(b"live", *(node.encode() for node in alive))
    put(b"links", *(repr(msgspec.structs.astuple(link)).encode() for link in links))
    return hasher.digest()


def build_manifest(
    reports: Sequence[NodeReport],
    *,
    store_id: str,
    job: str,
    key: DecisionKey,
    incarnation: int,
    world_size: int,
    fingerprint: bytes,
    write_id: str,
    created_at: float,
    metadata: Mapping[str, Any] | None = None,
    replicated: Sequence[str] = (),
    door: str = "",
    merged: Merged | None = None,
) -> Manifest:
    """The manifest of the epoch that ``reports`` describe; ``merged`` if it is known already.

    A chunk that several nodes stored is taken from the first of them. Older segments that nothing
    refers to are left out; own ones stay, since they are files of this epoch. An older segment's
    ``age`` in a report is what the newest manifest that uses it says; here it becomes one more.

    Raises InvalidInput unless the members are exactly ranks 0..world_size-1, IntegrityError when a
    chunk is in no segment or reports contradict each other about a segment.
    """
    merged = merged or merge(reports)
    members = tuple(
        replace(member, refs=merged.rows[r][member.refs])
        for r, member in _members_by_rank(reports, world_size)
    )
    segments, chunks = _place_chunks(reports, merged)
    header = EpochHeader(
        store_id=store_id,
        job=job,
        lineage=key.lineage,
        epoch=key.epoch,
        attempt=key.attempt,
        incarnation=incarnation,
        world_size=world_size,
        fingerprint=fingerprint,
        content_id=content_id(reports, world_size),
        write_id=write_id,
        created_at=created_at,
        bytes_logical=sum(member.bytes_logical for member in members),
        bytes_unique=int(chunks.lengths.sum()),
        bytes_stored=sum(segment.bytes for segment in segments if segment.own),
        metadata=dict(metadata or {}),
        replicated=tuple(replicated),
        door=door,
    )
    return Manifest(header=header, segments=segments, chunks=chunks, members=members)


class _Held(NamedTuple):
    """What ``ranks`` hold under one replicated name: its description, part and chunks."""

    facts: tuple[Any, ...]
    part: tuple[Any, ...]
    content: bytes
    ranks: tuple[int, ...]


def _held_of_table(
    same_table: Sequence[tuple[MemberTable, npt.NDArray[np.int64]]], *, uneven_only: bool
) -> Iterable[tuple[str, _Held]]:
    """What the members of one item table hold of its replicated items."""
    items = same_table[0][0].items
    chosen = [i for i, item in enumerate(items) if item.replicated]
    if not chosen:
        return
    layout = lay_out(items)
    for member, refs in same_table:
        if len(refs) != len(layout.chunk_start):
            raise InvalidInput(
                f"member {member.rank} reports {len(refs)} chunks for a table of"
                f" {len(layout.chunk_start)}; its agent is of another version or damaged"
            )
    ranks = tuple(member.rank for member, _ in same_table)
    first = same_table[0][1]
    uneven = np.zeros(len(first), np.bool_)
    for _, refs in same_table[1:]:
        uneven |= refs != first
    before = np.concatenate(([0], np.cumsum(uneven)))
    lo = layout.item_chunk[chosen]
    hi = lo + layout.item_chunks[chosen]
    splits = before[hi] != before[lo]
    bounds = zip(chosen, lo.tolist(), hi.tolist(), splits.tolist(), strict=True)
    for i, start, stop, split in bounds:
        if split:
            for (_, refs), rank in zip(same_table, ranks, strict=True):
                content = refs[start:stop].tobytes()
                yield items[i].name, _Held(*_describe(items[i]), content, (rank,))
        elif not uneven_only:
            content = first[start:stop].tobytes()
            yield items[i].name, _Held(*_describe(items[i]), content, ranks)


def _describe(item: ItemSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What all holders of the name share, and the part of it that this one holds."""
    if item.kind is ItemKind.TENSOR:
        return (item.kind, item.dtype, item.global_shape), (item.offsets, item.shape)
    return (item.kind, item.nbytes), ()


def _judge(name: str, all_held: Sequence[_Held]) -> Divergence | None:
    known = all_held[0][:3]
    if all(held[:3] == known for held in all_held):
        return None  # by far the most common case, and there may be 20,000 items
    if len({held.facts for held in all_held}) > 1:
        parts = [_groups((held.facts, held.ranks) for held in all_held)]
    else:
        by_part: dict[tuple[Any, ...], list[_Held]] = {}
        for held in all_held:
            by_part.setdefault(held.part, []).append(held)
        parts = [
            _groups((held.content, held.ranks) for held in part_held)
            for part_held in by_part.values()
        ]
    parts = [groups for groups in parts if len(groups) > 1]
    if not parts:
        return None
    ranks: set[int] = set()
    for groups in parts:
        largest = max(groups, key=len)
        majority = 2 * len(largest) > sum(map(len, groups))
        for group in groups:
            if not (majority and group is largest):
                ranks.update(group)
    return Divergence(name, tuple(sorted(ranks)), tuple(g for groups in parts for g in groups))


def _groups(keyed: Iterable[tuple[object, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    by_key: dict[object, list[int]] = {}
    for key, ranks in keyed:
        by_key.setdefault(key, []).extend(ranks)
    return [tuple(sorted(ranks)) for ranks in by_key.values()]


def _members_by_rank(reports: Sequence[NodeReport], world: int) -> list[tuple[int, MemberTable]]:
    """The members by rank, each with the index of its report."""
    members = [(r, member) for r, report in enumerate(reports) for member in report.members]
    members.sort(key=lambda pair: pair[1].rank)
    ranks = [member.rank for _, member in members]
    if ranks != list(range(world)):
        missing = sorted(set(range(world)) - set(ranks))[:16]
        extra = sorted(r for r, n in Counter(ranks).items() if n > 1 or not 0 <= r < world)[:16]
        raise InvalidInput(
            f"the reports do not make a group of {world} members: missing are {missing},"
            f" repeated or unknown are {extra}"
        )
    return members


def _place_chunks(
    reports: Sequence[NodeReport], merged: Merged
) -> tuple[tuple[SegmentRef, ...], ChunkTable]:
    """One segment list, and where in it each unique chunk is."""
    by_name, numbers = _join_segments(reports)
    n = len(merged.lengths)
    segments = np.full(n, -1, np.int32)
    offsets = np.zeros(n, np.int64)
    # Backwards, so that what the first report says is written last and stays.
    for report, rows, number in reversed(list(zip(reports, merged.rows, numbers, strict=True))):
        placed = np.flatnonzero(report.chunks.segments >= 0)[::-1]
        segments[rows[placed]] = number[report.chunks.segments[placed]]
        offsets[rows[placed]] = report.chunks.offsets[placed]
    homeless = np.flatnonzero(segments < 0)
    if len(homeless):
        name = merged.digests[homeless[0]].tobytes().hex()
        raise IntegrityError(
            f"{len(homeless)} chunks, {name} first, are in no segment; save the epoch again",
            chunk=name,
            retry=Retry.WHOLE,
        )
    uses = np.bincount(segments, minlength=len(by_name))
    kept = [i for i, segment in enumerate(by_name.values()) if segment.own or uses[i]]
    renumber = np.zeros(len(by_name), np.int32)
    renumber[kept] = np.arange(len(kept), dtype=np.int32)
    listed = list(by_name.values())
    return (
        tuple(listed[i] for i in kept),
        ChunkTable(merged.digests, merged.lengths, renumber[segments], offsets),
    )


def _join_segments(
    reports: Sequence[NodeReport],
) -> tuple[dict[str, SegmentRef], list[npt.NDArray[np.int32]]]:
    """The reports' segments by name, as of this epoch, and each report's numbers in that order."""
    by_name: dict[str, SegmentRef] = {}
    index: dict[str, int] = {}
    numbers = []
    for report in reports:
        for segment in report.segments:
            age = 0 if segment.own else segment.age + 1
            mine = SegmentRef(segment.name, segment.bytes, segment.own, age)
            other = by_name.setdefault(segment.name, mine)
            if (other.bytes, other.own) != (mine.bytes, mine.own):
                raise IntegrityError(
                    f"segment {segment.name} is reported with {other.bytes} and with"
                    f" {mine.bytes} bytes, or as new and as old; save the epoch again",
                    path=segment.name,
                    retry=Retry.WHOLE,
                )
            if mine.age > other.age:
                by_name[segment.name] = mine
            index.setdefault(segment.name, len(index))
        numbers.append(np.array([index[s.name] for s in report.segments], np.int32))
    return by_name, numbers
