"""Content that simulated ranks save: chunks that are known by name only, with true digests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from groupio.model import (
    ChunkTable,
    ItemKind,
    ItemSpec,
    MemberTable,
    NodeReport,
    SegmentRef,
)
from groupio.plan.layout import Layout, lay_out

NO_CHUNKS = np.zeros(0, np.int64)


@lru_cache(1 << 16)
def digest(word: str) -> bytes:
    """The digest of the chunk that this word stands for."""
    return blake3(word.encode()).digest()


class Shape(NamedTuple):
    """The item table of a member: its items have one chunk each."""

    items: tuple[ItemSpec, ...]
    items_id: bytes
    layout: Layout


@lru_cache(1 << 10)
def shape_of(chunks: int, chunk_bytes: int) -> Shape:
    """A member with so many items of so many bytes."""
    size = (chunk_bytes,)
    items = tuple(
        ItemSpec(f"x{i}", ItemKind.BYTES, "", size, size, (0,), chunk_bytes) for i in range(chunks)
    )
    return Shape(items, blake3(f"{chunks}/{chunk_bytes}".encode()).digest(), lay_out(items))


class Member(NamedTuple):
    """What one member saves in one epoch."""

    rank: int
    shape: Shape
    chunks: tuple[bytes, ...]
    """Digests in the order of the layout."""


def member(rank: int, epoch: int, variant: int, chunks: int, chunk_bytes: int) -> Member:
    """The state of a rank at an epoch; two lives of the job may differ in it by ``variant``.

    The first chunk is equal on pairs of ranks, the second never changes, the rest are the rank's.
    """
    words = [f"pair/{rank // 2}/{epoch}/{variant}", f"fixed/{rank}"]
    words += [f"own/{rank}/{epoch}/{variant}/{i}" for i in range(chunks)]
    own = words[2:3] if chunks == 1 else words[:chunks]
    return Member(
        rank, shape_of(chunks, chunk_bytes), tuple(digest(f"{w}:{chunk_bytes}") for w in own)
    )


class Place(NamedTuple):
    """Where a chunk stands in the store."""

    segment: SegmentRef
    offset: int


def report_of(
    node: str,
    members: Sequence[Member],
    lengths: dict[bytes, int],
    places: dict[bytes, Place],
    extra: Sequence[SegmentRef] = (),
) -> NodeReport:
    """The node-merged report of these members; chunks without a place are not stored.

    ``lengths`` names all chunks of the report in their order, those of other nodes too; ``extra``
    are own segments, listed even when they hold nothing.
    """
    order = {name: row for row, name in enumerate(lengths)}
    segments: dict[str, SegmentRef] = {ref.name: ref for ref in extra}
    for name in lengths:
        place = places.get(name)
        if place is not None:
            segments.setdefault(place.segment.name, place.segment)
    numbers = {name: i for i, name in enumerate(segments)}
    at = [places.get(name) for name in lengths]
    tables = []
    for one in members:
        refs = np.array([order[name] for name in one.chunks], np.int64)
        size = sum(lengths[name] for name in one.chunks)
        tables.append(MemberTable(one.rank, one.shape.items, one.shape.items_id, refs, size))
    return NodeReport(
        node=node,
        segments=tuple(segments.values()),
        chunks=ChunkTable(
            np.frombuffer(b"".join(lengths), np.uint8).reshape(-1, 32),
            np.array(list(lengths.values()), np.int64),
            np.array([-1 if p is None else numbers[p.segment.name] for p in at], np.int32),
            np.array([0 if p is None else p.offset for p in at], np.int64),
        ),
        members=tuple(tables),
    )
