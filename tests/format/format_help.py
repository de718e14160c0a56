"""Builders for the tests of groupio.format, and a way to forge records with valid digests."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from groupio.errors import IntegrityError
from groupio.format.columns import Section, pack_array, pack_bytes
from groupio.format.envelope import HEADER_BYTES, RecordKind, wrap
from groupio.format.frames import LOCAL_HEADER, FrameTable, Kind
from groupio.format.items import encode_items, items_id
from groupio.format.manifest import encode_manifest
from groupio.format.records import segment_name
from groupio.format.segment import SegmentHeader, encode_footer, encode_header
from groupio.model import (
    ChunkTable,
    DecisionKey,
    EpochHeader,
    ItemKind,
    ItemSpec,
    Manifest,
    MemberTable,
    SegmentRef,
)
from groupio.plan.layout import lay_out

KEY = DecisionKey(1, 5, 0)
STORE_ID = "00112233445566778899aabbccddeeff"
SECTIONS = ("segments", "digests", "lengths", "homes", "offsets", "members", "blocks")


def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32", **rest: Any) -> ItemSpec:
    """A whole tensor; ``of`` and ``at`` make it a shard."""
    itemsize = rest.pop("itemsize", 4)
    whole = rest.pop("of", shape)
    corner = rest.pop("at", (0,) * len(shape))
    nbytes = prod(shape) * itemsize
    return ItemSpec(name, ItemKind.TENSOR, dtype, shape, whole, corner, nbytes, **rest)


def plain(name: str, nbytes: int, **rest: Any) -> ItemSpec:
    """An item that is no tensor."""
    return ItemSpec(name, ItemKind.PLAIN, "", (), (), (), nbytes, origin="plain", **rest)


def sample_items(rank: int) -> tuple[ItemSpec, ...]:
    """Three items: a shard, a replica that all ranks have, and an alias of it."""
    return (
        tensor("weight", (2, 3), of=(64, 3), at=(2 * rank, 0), origin="torch"),
        plain("step", 10, replicated=True),
        plain("step again", 10, replicated=True, alias=1),
    )


def sample_manifest(ranks: int = 2, **header: Any) -> Manifest:
    """A whole, consistent manifest: chunk 0 is the shared replica, in an older segment."""
    tables = [sample_items(rank) for rank in range(ranks)]
    members = []
    for rank, items in enumerate(tables):
        # In chunk order the replica comes first: its pack lies before that of the shard.
        refs = np.array([0, rank + 1], np.int64)
        table_id = items_id(encode_items(items))
        members.append(MemberTable(rank, items, table_id, refs, 34))
    own = SegmentRef(segment_name(KEY, "node0", 0), 20480, True)
    old = SegmentRef(segment_name(DecisionKey(1, 4, 0), "node0", 0), 8192, False, 3)
    chunks = ChunkTable(
        digests=np.array([list(blake3(bytes([i])).digest()) for i in range(ranks + 1)], np.uint8),
        lengths=np.array([10, *[24] * ranks], np.int64),
        segments=np.array([1, *[0] * ranks], np.int32),
        offsets=np.array([4096, *range(4096, 4096 + 64 * ranks, 64)], np.int64),
    )
    fields: dict[str, Any] = {
        "store_id": STORE_ID,
        "job": "job",
        "lineage": KEY.lineage,
        "epoch": KEY.epoch,
        "attempt": KEY.attempt,
        "incarnation": 2,
        "world_size": ranks,
        "fingerprint": bytes(range(32)),
        "content_id": bytes(range(32, 64)),
        "write_id": "w1",
        "created_at": 1.5,
        "bytes_logical": 34 * ranks,
        "bytes_unique": 10 + 24 * ranks,
        "bytes_stored": 20480,
        "metadata": {"loss": 0.5, "tag": ("a", None)},
        "replicated": ("step*",),
    }
    return Manifest(EpochHeader(**{**fields, **header}), (own, old), chunks, tuple(members))


def layout_lengths(items: Sequence[ItemSpec]) -> list[int]:
    """The chunk lengths that the planner asks for."""
    return [int(n) for n in lay_out(items).chunk_length]


_SECTIONS_AT = 18
"""Where in the root its sections are listed."""


class Forgery:
    """A manifest taken apart: change ``root``, ``sections`` or ``blocks``, then ``build``.

    All digests are right again in what it builds, as in a file of a hostile or faulty writer.
    """

    def __init__(self, manifest: Manifest) -> None:
        data = encode_manifest(manifest)
        length = int.from_bytes(data[12:16], "little")
        at = HEADER_BYTES + length
        self.root: list[Any] = msgspec.msgpack.decode(data[HEADER_BYTES:at])
        rows = [Section(*row) for row in self.root[_SECTIONS_AT]]
        self.sections: dict[str, tuple[Section, bytes]] = {}
        for name, row in zip(SECTIONS, rows, strict=True):
            self.sections[name] = (row, data[at : at + row.stored])
            at += row.stored
        self.tail = data[at:]

    def array(self, name: str, values: Any, form: str) -> None:
        """Replace a section by an array."""
        self.sections[name] = pack_array(np.array(values, form).reshape(-1))

    def table(self, name: str, value: Any) -> None:
        """Replace a section by a table."""
        self.sections[name] = pack_bytes(msgspec.msgpack.encode(value))

    def blocks(self, *blocks: tuple[Section, bytes]) -> None:
        """Replace all blocks."""
        self.table("blocks", [section for section, _ in blocks])
        self.tail = b"".join(stored for _, stored in blocks)

    def build(self, kind: RecordKind = RecordKind.COMMIT) -> bytes:
        """The file."""
        if self.root:
            self.root[_SECTIONS_AT] = [section for section, _ in self.sections.values()]
        body = [stored for _, stored in self.sections.values()]
        return wrap(kind, msgspec.msgpack.encode(self.root), [*body, self.tail])


def sample_segment(chunks: Sequence[bytes] = (b"a" * 10, b"b" * 100, b"c" * 5000)) -> bytes:
    """A whole segment; each chunk starts at the next multiple of 64."""
    data = bytearray(encode_header(SegmentHeader(STORE_ID, KEY, "node0", 3)))
    offsets = []
    for chunk in chunks:
        data.extend(bytes(-len(data) % 64))
        offsets.append(len(data))
        data.extend(chunk)
    data.extend(bytes(-len(data) % 4096))
    footer = encode_footer(
        np.array(offsets, np.int64),
        np.array([len(chunk) for chunk in chunks], np.int64),
        np.array([list(blake3(c).digest()) for c in chunks], np.uint8).reshape(-1, 32),
        len(data),
    )
    return bytes(data) + footer


class Piece(NamedTuple):
    """What a framed segment is made of: a run of chunks, or (``framed`` False) other chunks."""

    chunks: Sequence[bytes]
    framed: bool = True
    gap: int = 0


SAMPLE_PIECES = (
    Piece((b"a" * 16, b"b" * 16, b"c" * 4), gap=4000),
    Piece((b"d" * 10,), framed=False, gap=64),
    Piece((b"e" * 100,)),
)


def framed_rows(pieces: Sequence[Piece]) -> tuple[bytes, list[int], list[bytes], FrameTable]:
    """The bytes of a framed segment up to its data's end; its chunks' offsets and bytes; rows.

    Each piece starts after ``gap`` more bytes. A run is one tensor of bytes, and a row shows what
    follows in it from each of its chunks on.
    """
    data = bytearray(encode_header(SegmentHeader(STORE_ID, KEY, "node0", 3, framed=True)))
    offsets: list[int] = []
    bodies: list[bytes] = []
    rows: list[tuple[int, int, int]] = []
    kinds: dict[Kind, int] = {}
    for piece in pieces:
        data.extend(bytes(piece.gap) + (LOCAL_HEADER if piece.framed else b""))
        run, record = len(data), sum(map(len, piece.chunks))
        for chunk in piece.chunks:
            if piece.framed:
                skip = len(data) - run
                kind = Kind("uint8", (record - skip,), skip, record)
                rows.append((len(data), run, kinds.setdefault(kind, len(kinds))))
            offsets.append(len(data))
            bodies.append(chunk)
            data.extend(chunk)
    data.extend(bytes(-len(data) % 4096))
    columns = np.array(rows, np.int64).reshape(-1, 3)
    table = FrameTable(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int32), tuple(kinds))
    return bytes(data), offsets, bodies, table


def framed_segment(pieces: Sequence[Piece] = SAMPLE_PIECES) -> bytes:
    """A whole segment of version 2."""
    data, offsets, bodies, table = framed_rows(pieces)
    return data + encode_footer(
        np.array(offsets, np.int64),
        np.array([len(body) for body in bodies], np.int64),
        np.array([list(blake3(b).digest()) for b in bodies], np.uint8).reshape(-1, 32),
        len(data),
        table,
    )


def reads(data: bytes) -> Callable[[int, int], bytes]:
    """A ``read`` function over ``data``."""
    return lambda at, length: data[at : at + length]


def flips(data: bytes, positions: Sequence[int]) -> list[bytes]:
    """``data`` with one bit flipped at each of ``positions`` (another bit each time)."""
    result = []
    for count, position in enumerate(positions):
        changed = bytearray(data)
        changed[position] ^= 1 << count % 8
        result.append(bytes(changed))
    return result


def error_of(call: Callable[[], object]) -> Exception | None:
    """What ``call`` raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (the caller judges it)
        return error
    return None


def is_damage(error: IntegrityError, path: str) -> bool:
    """Whether ``error`` is the one that readers promise: it names the path, twice."""
    return error.path == path and path in error.message


def reheaded(data: bytes, **fields: Any) -> bytes:
    """A record with another header (magic, version, kind, root, total) under a right digest."""
    names = ("magic", "version", "kind", "root", "total", "digest")
    layout = struct.Struct("<8sHHIQ32s")
    values = dict(zip(names, layout.unpack(data[:56]), strict=True)) | fields
    fixed = layout.pack(*values.values())
    return fixed + blake3(fixed).digest(8) + data[HEADER_BYTES:]
