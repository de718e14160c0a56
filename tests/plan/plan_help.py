"""Builders for the tests of groupio.plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3

from groupio.model import ChunkTable, ItemKind, ItemSpec, MemberTable, NodeReport, SegmentRef
from groupio.plan.layout import lay_out


def tensor(
    name: str,
    shape: tuple[int, ...],
    *,
    of: tuple[int, ...] | None = None,
    at: tuple[int, ...] | None = None,
    item_bytes: int = 4,
    **rest: Any,
) -> ItemSpec:
    """A tensor of ``shape``, a part of one of shape ``of`` with its corner ``at``."""
    return ItemSpec(
        name,
        ItemKind.TENSOR,
        rest.pop("dtype", "float32"),
        shape,
        shape if of is None else of,
        (0,) * len(shape) if at is None else at,
        prod(shape) * item_bytes,
        **rest,
    )


def raw(name: str, nbytes: int, kind: ItemKind = ItemKind.BYTES, **rest: Any) -> ItemSpec:
    """An item that is not a tensor."""
    return ItemSpec(name, kind, "", (nbytes,), (nbytes,), (0,), nbytes, **rest)


def digest(value: object) -> bytes:
    """A digest that stands for ``value``."""
    return blake3(repr(value).encode()).digest()


def member(rank: int, items: Sequence[ItemSpec], refs: Sequence[int]) -> MemberTable:
    """A member whose chunks are rows ``refs`` of its report."""
    return MemberTable(
        rank=rank,
        items=tuple(items),
        items_id=digest(tuple(items)),
        refs=np.array(refs, np.int64),
        bytes_logical=sum(item.nbytes for item in items),
    )


def report(
    node: str,
    saved: Mapping[int, tuple[Sequence[ItemSpec], Sequence[object]]],
    *,
    stored: bool = True,
    older: Mapping[Any, tuple[SegmentRef, int]] | None = None,
) -> NodeReport:
    """What ``node`` reports when rank r saved the items and chunk contents ``saved[r]``.

    Contents found in ``older`` are in that segment at that offset, the others in an own segment
    (``stored``) or nowhere.
    """
    older = older or {}
    own = SegmentRef(f"{node}.seg", 0, True)
    segments: list[SegmentRef] = [own] if stored else []
    rows: dict[object, int] = {}
    lengths: list[int] = []
    places: list[int] = []
    offsets: list[int] = []
    end = 4096
    members = []
    for rank, (items, contents) in saved.items():
        layout = lay_out(items)
        assert len(contents) == len(layout.chunk_start)
        for content, length in zip(contents, layout.chunk_length.tolist(), strict=True):
            if content in rows:
                continue
            rows[content] = len(rows)
            lengths.append(length)
            if content in older:
                segment, offset = older[content]
                if segment not in segments:
                    segments.append(segment)
                places.append(segments.index(segment))
                offsets.append(offset)
            else:
                places.append(0 if stored else -1)
                offsets.append(end)
                end += length
        members.append(member(rank, items, [rows[content] for content in contents]))
    if stored:
        segments[0] = SegmentRef(own.name, end, True)
    digests = np.frombuffer(b"".join(map(digest, rows)), np.uint8).reshape(-1, 32)
    return NodeReport(
        node=node,
        segments=tuple(segments),
        chunks=ChunkTable(
            digests,
            np.array(lengths, np.int64),
            np.array(places, np.int32),
            np.array(offsets, np.int64),
        ),
        members=tuple(members),
    )
