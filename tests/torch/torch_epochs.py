"""Manifests of epochs that were never saved: members' items with the digests of their chunks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from blake3 import blake3

from groupio.backend.base import Backend
from groupio.client.chunk_reader import Wants
from groupio.client.copying import copy_range
from groupio.client.outgoing import Outgoing, Packer
from groupio.format.items import decode_stored_columns
from groupio.model import ChunkTable, MemberTable, SegmentRef


def lease_of(outgoing: Outgoing) -> bytes:
    """The bytes of a save as an agent gets them."""
    end = outgoing.layout.total_bytes
    lease = bytearray(max(end, 1))
    address = ctypes.addressof(ctypes.c_char.from_buffer(lease))
    assert copy_range(outgoing.prepared, outgoing.layout, 0, end, address, lambda: False)
    return bytes(lease)


class Epoch(SimpleNamespace):
    """What a load uses of a manifest. ``contents[row]`` are the bytes of a chunk; ``fetched`` the
    rows that :meth:`fetch` delivered."""

    def fetch(
        self,
        backend: Backend,
        segments: Sequence[SegmentRef],
        table: ChunkTable,
        wants: Wants,
        *,
        deadline: float,
        threads: int,
        epoch: int,
    ) -> list[bytes]:
        """Deliver from memory, as :func:`groupio.client.chunk_reader.read_chunks` does."""
        self.fetched = wants.all_rows().tolist()
        rows = zip(wants.rows, wants.views_index, wants.offsets, strict=True)
        for row, view, offset in rows:
            data = self.contents[row]
            wants.views[view][offset : offset + len(data)] = data
        for row, copy in wants.copies:
            copy(memoryview(self.contents[row]))
        return []


def saved_by(*members: Mapping[str, Any]) -> Any:
    """An epoch in which rank r saved ``members[r]``; equal item tables are one object."""
    rows: dict[bytes, int] = {}
    contents: list[bytes] = []
    specs: dict[Any, Any] = {}
    tables, columns = [], []
    known: dict[Any, Any] = {}
    decoded: dict[bytes, Any] = {}
    for rank, items in enumerate(members):
        out = Packer().pack(items, ())
        lease = lease_of(out)
        refs = []
        spans = zip(out.layout.chunk_start.tolist(), out.layout.chunk_length.tolist(), strict=True)
        for start, length in spans:
            data = lease[start : start + length]
            row = rows.setdefault(blake3(data).digest(), len(rows))
            if row == len(contents):
                contents.append(data)
            refs.append(row)
        own = specs.setdefault(out.prepared.specs, out.prepared.specs)
        if out.items_id not in decoded:
            decoded[out.items_id] = decode_stored_columns(out.table, "a table", known)
        columns.append(decoded[out.items_id])
        tables.append(MemberTable(rank, own, out.items_id, np.array(refs, np.int64), len(lease)))
    n = len(contents)
    table = ChunkTable(
        np.frombuffer(b"".join(rows), np.uint8).reshape(n, 32),
        np.array([len(data) for data in contents], np.int64),
        np.zeros(n, np.int32),
        np.zeros(n, np.int64),
    )
    return Epoch(
        ranks=tuple(range(len(members))),
        member=tables.__getitem__,
        columns=columns.__getitem__,
        chunks=table,
        contents=contents,
        segments=(),
        header=SimpleNamespace(epoch=1, world_size=len(members)),
        path="the manifest",
        fetched=[],
    )
