"""Manifests: the record of one epoch, whose appearance in the store is the commit.

After the 64-byte header of every record (see :mod:`groupio.format.envelope`) come the root and,
without a gap, the sections that the root lists::

    root      msgpack: the EpochHeader, the counts, and a Section for each of
    segments  msgpack, one row per segment
    digests, lengths, homes (segment of a chunk), offsets   one array of all chunks each
    members   i64[4, members]: rank, block of its items, block of its refs, logical bytes
    blocks    msgpack, one Section per block
    block 0, block 1, ...    item tables and arrays of refs (i32), equal ones stored once

The header and the root are a few KB whatever the size of the epoch: listing epochs reads no more.
Nothing in the file stands under no digest, and nothing else may stand in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec import Meta

from groupio.errors import FormatError, IntegrityError, InvalidInput, NotFound
from groupio.format.blocks import Blocks, PackedTables
from groupio.format.codec import decode_plain, encode_plain
from groupio.format.columns import (
    DELTA,
    RAW,
    Count,
    Section,
    check_stored,
    damaged,
    pack_array,
    pack_bytes,
    unpack_array,
    unpack_bytes,
)
from groupio.format.envelope import (
    HEADER_BYTES,
    Envelope,
    RecordKind,
    check_kind,
    read_envelope,
    wrap,
)
from groupio.format.items import (
    ItemColumns,
    decode_stored_columns,
    decode_stored_items,
    items_id,
)
from groupio.format.limits import (
    AGE_MAX,
    CHUNKS_MAX,
    FIRST_READ_BYTES,
    ITEM_TABLE_BYTES_MAX,
    ITEMS_MAX,
    METADATA_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    SEGMENTS_MAX,
    TABLE_BYTES_MAX,
)
from groupio.format.records import (
    Seconds,
    StoreId,
    Text,
    WorldSize,
    check_key,
    parse_segment_name,
)
from groupio.model import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    PAGE_BYTES,
    WORLD_SIZE_MAX,
    ChunkTable,
    DecisionKey,
    EpochHeader,
    ItemSpec,
    Manifest,
    MemberTable,
    SegmentRef,
)

_SECTIONS = ("segments", "digests", "lengths", "homes", "offsets", "members", "blocks")


class _Root(msgspec.Struct, array_like=True, frozen=True):
    """The root as it is stored: the fields of EpochHeader, by the same names, and the counts."""

    store_id: StoreId
    job: Text
    lineage: Count
    epoch: Count
    attempt: Count
    incarnation: Count
    world_size: WorldSize
    fingerprint: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
    content_id: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
    write_id: Text
    created_at: Seconds
    bytes_logical: Count
    bytes_unique: Count
    bytes_stored: Count
    metadata: Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)]
    replicated: Annotated[tuple[Text, ...], Meta(max_length=ITEMS_MAX)]
    chunks: Annotated[int, Meta(ge=0, le=CHUNKS_MAX)]
    members: Annotated[int, Meta(ge=0, le=WORLD_SIZE_MAX)]
    sections: Annotated[
        tuple[Section, ...], Meta(min_length=len(_SECTIONS), max_length=len(_SECTIONS))
    ]
    door: Text = ""
    """Behind the rest, since older manifests end without it."""


class _SegmentRow(msgspec.Struct, array_like=True, frozen=True):
    name: Text
    bytes: Annotated[int, Meta(ge=PAGE_BYTES, le=SEGMENT_BYTES_MAX)]
    own: bool
    age: Annotated[int, Meta(ge=0, le=AGE_MAX)]


_SegmentRows = Annotated[tuple[_SegmentRow, ...], Meta(max_length=SEGMENTS_MAX)]
_BlockRows = Annotated[tuple[Section, ...], Meta(max_length=2 * WORLD_SIZE_MAX)]


def encode_manifest(manifest: Manifest, packed_tables: PackedTables | None = None) -> bytes:
    """``manifest`` as the bytes of a file; the same manifest gives the same bytes.

    ``packed_tables`` has what an earlier call made of item tables, by their ids, and afterwards
    has the ones of this manifest: a job's epochs repeat them.
    InvalidInput when something in it is out of range or contradicts itself, so that a reader
    would refuse it.
    """
    header = manifest.header
    chunks = _checked_chunks(manifest)
    earlier = {} if packed_tables is None else packed_tables
    blocks = Blocks(earlier)
    rows = np.empty((4, len(manifest.members)), "<i8")
    for column, member in enumerate(manifest.members):
        rows[:, column] = (
            member.rank,
            blocks.items(member),
            blocks.refs(member, len(manifest.chunks)),
            member.bytes_logical,
        )
    earlier.clear()
    earlier.update(blocks.tables)
    segments = [(s.name, s.bytes, s.own, s.age) for s in manifest.segments]
    packed = [
        pack_bytes(_pack(segments)),
        pack_array(chunks[0].reshape(-1), compress=False),
        *(pack_array(column) for column in chunks[1:]),
        pack_array(rows.reshape(-1)),
        pack_bytes(_pack(blocks.sections)),
    ]
    root = _pack(
        _Root(
            **{
                **{name: getattr(header, name) for name in EpochHeader.__struct_fields__},
                "metadata": encode_plain(header.metadata, name="metadata"),
            },
            chunks=len(manifest.chunks),
            members=len(manifest.members),
            sections=tuple(section for section, _ in packed),
        )
    )
    body = [stored for _, stored in packed] + blocks.stored
    data = wrap(RecordKind.COMMIT, root, body)
    try:
        # What is cheap to read back is read back: nothing is committed that no one could open.
        reader = ManifestReader(lambda at, n: data[at : at + n], len(data), "the new manifest")
        _ = reader.header, reader.chunks, reader._members
    except (IntegrityError, FormatError) as error:
        raise InvalidInput(f"the manifest cannot be written: {error.message}") from None
    return data


def _pack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidInput(f"the manifest cannot be written: {error}") from None


def _checked_chunks(manifest: Manifest) -> tuple[npt.NDArray[Any], ...]:
    """Digests, lengths, homes and offsets in their stored dtypes."""
    chunks = manifest.chunks
    n = len(chunks)
    shapes = [chunks.digests.shape, chunks.segments.shape, chunks.offsets.shape]
    if shapes != [(n, DIGEST_BYTES), (n,), (n,)] or chunks.digests.dtype != np.uint8:
        raise InvalidInput(
            f"the manifest cannot be written: its chunk arrays have the shapes {shapes} for {n} "
            "chunks"
        )
    return (
        chunks.digests,
        np.ascontiguousarray(chunks.lengths, "<i8"),
        np.ascontiguousarray(chunks.segments, "<i4"),
        np.ascontiguousarray(chunks.offsets, "<i8"),
    )


class _Members(NamedTuple):
    """Which blocks each member uses, by rank ascending, and where the blocks lie."""

    ranks: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    refs: npt.NDArray[np.int64]
    bytes_logical: npt.NDArray[np.int64]
    blocks: tuple[Section, ...]
    starts: list[int]


@dataclass(frozen=True, slots=True)
class SharedTables:
    """What several readers of manifests share: a job's epochs have the same item tables.

    ``tables`` are decoded item tables and their ids, ``chunk_lengths`` the lengths of the chunks
    that the items of such a table are cut into, int64[n], by the id of the table.
    """

    tables: dict[Section, tuple[tuple[ItemSpec, ...], bytes]] = field(default_factory=dict)
    chunk_lengths: dict[bytes, npt.NDArray[np.int64]] = field(default_factory=dict)


class ManifestReader:
    """Opens a manifest part by part, each verified when it is first used.

    ``read(offset, length)`` returns exactly that many bytes of the file of ``size`` bytes;
    ``path`` stands in errors, and when its last part is a key it must be the manifest's own.
    Every damage is IntegrityError(path). FormatError(path) is another version or kind of record,
    and an item of a dtype that is not known here. What ``read`` raises passes through. Readers with
    one ``shared`` decode item tables that are equal once; the bytes of each are verified.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        size: int,
        path: str,
        shared: SharedTables | None = None,
    ) -> None:
        self._read_bytes = read
        self._size = size
        self.path = path
        self._shared = SharedTables() if shared is None else shared
        self._tables: dict[int, tuple[tuple[ItemSpec, ...], bytes]] = {}
        self._columns: dict[int, ItemColumns] = {}
        self._names: dict[tuple[bytes, bytes], tuple[str, ...]] = {}
        self._refs: dict[int, npt.NDArray[np.int64]] = {}

    @cached_property
    def header(self) -> EpochHeader:
        """Who saved what and when; reads a few KB."""
        root = self._root
        check_key(DecisionKey(root.lineage, root.epoch, root.attempt), self.path)
        try:
            metadata = decode_plain(root.metadata)
        except FormatError as error:
            raise damaged(self.path, f"its metadata: {error.message}") from None
        if type(metadata) is not dict:
            raise damaged(self.path, "its metadata is not a dict")
        fields = {name: getattr(root, name) for name in EpochHeader.__struct_fields__}
        return EpochHeader(**{**fields, "metadata": metadata})

    @cached_property
    def segments(self) -> tuple[SegmentRef, ...]:
        """The segments that the epoch uses."""
        rows = self._table("segments", _SegmentRows)
        key = (self.header.lineage, self.header.epoch)
        for row in rows:
            parsed = parse_segment_name(row.name)
            if parsed is None:
                raise damaged(self.path, f"{row.name[:120]!r} is not the name of a segment")
            if row.own and (parsed[0].lineage, parsed[0].epoch) != key:
                raise damaged(self.path, f"segment {row.name} is not of this epoch")
        if len({row.name for row in rows}) != len(rows):
            raise damaged(self.path, "it lists a segment twice")
        return tuple(SegmentRef(row.name, row.bytes, row.own, row.age) for row in rows)

    @cached_property
    def chunks(self) -> ChunkTable:
        """The unique chunks; lengths, segments and offsets are in range."""
        n = self._root.chunks
        table = ChunkTable(
            digests=self._array("digests", "u1", n * DIGEST_BYTES).reshape(n, DIGEST_BYTES),
            lengths=self._array("lengths", "<i8", n),
            segments=self._array("homes", "<i4", n),
            offsets=self._array("offsets", "<i8", n),
        )
        if not n:
            return table
        homes = table.segments
        if not 0 <= int(homes.min()) <= int(homes.max()) < len(self.segments):
            raise damaged(self.path, "a chunk lies in a segment that is not listed")
        if not 0 < int(table.lengths.min()) <= int(table.lengths.max()) <= CHUNK_BYTES:
            raise damaged(self.path, f"a chunk is not 1 to {CHUNK_BYTES} bytes long")
        ends = np.array([segment.bytes for segment in self.segments], np.int64)[homes]
        # The difference cannot overflow, the sum of offset and length could.
        if int(table.offsets.min()) < PAGE_BYTES or (table.offsets > ends - table.lengths).any():
            raise damaged(self.path, "a chunk does not lie inside its segment")
        return table

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members of the epoch, ascending."""
        return tuple(self._members.ranks.tolist())

    def member(self, rank: int) -> MemberTable:
        """What ``rank`` saved; NotFound when it is no member."""
        members, row = self._members, self._row(rank)
        items, table_id = self._items_block(int(members.items[row]))
        refs = self._refs_block(int(members.refs[row]))
        return MemberTable(rank, items, table_id, refs, int(members.bytes_logical[row]))

    def columns(self, rank: int) -> ItemColumns:
        """The item table of ``rank``, without an object for each item; NotFound as above.

        Members with equal tables get the same object.
        """
        index = int(self._members.items[self._row(rank)])
        if index not in self._columns:
            table = self._item_table(index)
            self._columns[index] = decode_stored_columns(table, self.path, self._names)
        return self._columns[index]

    def tables(self) -> Iterator[tuple[list[int], ItemColumns]]:
        """Each item table once, with the ranks that have it, ascending; no table is kept."""
        members = self._members
        for block in np.unique(members.items).tolist():
            columns = decode_stored_columns(self._item_table(block), self.path, {})
            yield members.ranks[members.items == block].tolist(), columns

    def _row(self, rank: int) -> int:
        members = self._members
        row = int(np.searchsorted(members.ranks, rank))
        if row == len(members.ranks) or members.ranks[row] != rank:
            raise NotFound(
                f"epoch {self.header.epoch} in {self.path} has no member {rank}; it was saved by "
                f"{len(members.ranks)} members",
                path=self.path,
                epoch=self.header.epoch,
                member=rank,
            )
        return row

    def manifest(self) -> Manifest:
        """The whole manifest; every byte of the file has been read and its digest compared."""
        members = tuple(map(self.member, self.ranks))
        return Manifest(self.header, self.segments, self.chunks, members)

    def verify_structure(self) -> None:
        """Check all that can be checked without the segments; IntegrityError says what is wrong.

        Beyond the digests: the members are complete, sums agree, no two chunks overlap, and the
        chunks of each item are exactly those that its shape asks for.
        """
        # Imported here: only this check needs the planner.
        from groupio.format.checks import check_manifest

        check_manifest(self.manifest(), self.path, self._shared.chunk_lengths)

    @cached_property
    def _opened(self) -> tuple[Envelope, bytes]:
        first = self._read(0, min(self._size, FIRST_READ_BYTES))
        envelope = read_envelope(first, self.path)
        check_kind(envelope, RecordKind.COMMIT, self.path)
        if envelope.total_length != self._size:
            raise damaged(self.path, f"it has {self._size} bytes and not {envelope.total_length}")
        end = HEADER_BYTES + envelope.root_length
        root = first[HEADER_BYTES:end]
        if end > len(first):
            root += self._read(len(first), end - len(first))
        return envelope, envelope.checked_root(root, self.path)

    @cached_property
    def _root(self) -> _Root:
        envelope, data = self._opened
        root: _Root = self._parsed(data, _Root, "root")
        stored = sum(section.stored for section in root.sections)
        if stored > self._size - HEADER_BYTES - envelope.root_length:
            raise damaged(self.path, "its sections do not fit into it")
        return root

    def _parsed(self, data: bytes, form: Any, what: str) -> Any:
        try:
            return msgspec.msgpack.decode(data, type=form)
        except (msgspec.DecodeError, RecursionError) as error:
            raise damaged(self.path, f"its {what} cannot be read ({error})") from None

    def _section(self, name: str, bytes_max: int) -> tuple[Section, bytes]:
        index = _SECTIONS.index(name)
        section = self._root.sections[index]
        check_stored(section, bytes_max, self.path, f"section {name}")
        return section, self._read(self._starts[index], section.stored)

    @cached_property
    def _starts(self) -> list[int]:
        """Where each section starts, and behind them the first block."""
        return _starts_of(HEADER_BYTES + self._opened[0].root_length, self._root.sections)

    def _array(self, name: str, form: str, count: int) -> npt.NDArray[Any]:
        stored = self._section(name, count * np.dtype(form).itemsize)
        return unpack_array(*stored, form, count, self.path, f"section {name}")

    def _table(self, name: str, form: Any) -> Any:
        stored = self._section(name, TABLE_BYTES_MAX)
        raw = unpack_bytes(*stored, TABLE_BYTES_MAX, self.path, f"section {name}")
        return self._parsed(raw, form, f"section {name}")

    @cached_property
    def _members(self) -> _Members:
        n = self._root.members
        rows = self._array("members", "<i8", 4 * n).reshape(4, n)
        blocks = self._table("blocks", _BlockRows)
        starts = _starts_of(self._starts[-1], blocks)
        if starts[-1] != self._size:
            raise damaged(self.path, "its blocks do not end where it ends")
        ranks, items, refs, sizes = rows
        if n and (int(ranks[0]) < 0 or (ranks[1:] <= ranks[:-1]).any()):
            raise damaged(self.path, "its members are not in order")
        # Each block has a user: what no member leads to would never be compared with its digest.
        if np.unique(rows[1:3]).tolist() != list(range(len(blocks))):
            raise damaged(self.path, "its members and its blocks do not fit")
        if n and (int(ranks[-1]) >= self._root.world_size or int(sizes.min()) < 0):
            raise damaged(self.path, "a member is out of range")
        return _Members(ranks, items, refs, sizes, blocks, starts)

    def _block(self, index: int, bytes_max: int) -> tuple[Section, bytes]:
        members = self._members
        section = members.blocks[index]
        check_stored(section, bytes_max, self.path, f"block {index}")
        return section, self._read(members.starts[index], section.stored)

    def _items_block(self, index: int) -> tuple[tuple[ItemSpec, ...], bytes]:
        if index not in self._tables:
            section, stored = self._block(index, ITEM_TABLE_BYTES_MAX)
            known = self._shared.tables.get(section)
            # A section says all of how its bytes are read, so equal ones hold equal tables.
            if known is None or blake3(stored).digest() != section.digest:
                table = self._unpacked_table(index, section, stored)
                known = decode_stored_items(table, self.path), items_id(table)
                self._shared.tables[section] = known
            self._tables[index] = known
        return self._tables[index]

    def _item_table(self, index: int) -> bytes:
        return self._unpacked_table(index, *self._block(index, ITEM_TABLE_BYTES_MAX))

    def _unpacked_table(self, index: int, section: Section, stored: bytes) -> bytes:
        what = f"item table {index}"
        return unpack_bytes(section, stored, ITEM_TABLE_BYTES_MAX, self.path, what)

    def _refs_block(self, index: int) -> npt.NDArray[np.int64]:
        if index not in self._refs:
            what = f"refs {index}"
            section, stored = self._block(index, 4 * CHUNKS_MAX)
            count = section.raw // 4
            if count > CHUNKS_MAX or section.encoding not in (RAW, DELTA):
                raise damaged(self.path, f"{what} cannot be an array")
            refs = unpack_array(section, stored, "<i4", count, self.path, what).astype(np.int64)
            if count and not 0 <= int(refs.min()) <= int(refs.max()) < self._root.chunks:
                raise damaged(self.path, f"{what} leads to a chunk that is not listed")
            self._refs[index] = refs
        return self._refs[index]

    def _read(self, offset: int, length: int) -> bytes:
        data = bytes(self._read_bytes(offset, length))
        if len(data) != length:
            raise damaged(self.path, f"it ends before byte {offset + length}")
        return data


def _starts_of(first: int, sections: Sequence[Section]) -> list[int]:
    return list(accumulate((section.stored for section in sections), initial=first))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """The manifest in ``data``, with every digest compared; raises as ManifestReader does."""
    return ManifestReader(lambda at, n: data[at : at + n], len(data), path).manifest()
