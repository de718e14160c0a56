"""The catalogue of a store: what its older decisions say, in one file that is derived from them.

::

    header    that of every record (see :mod:`groupio.format.envelope`)
    root      msgpack: store id, number of entries, the Section of the table
    table     msgpack: an entry for each decision, ascending by key

It saves opening thousands of records. A decision is an entry's file name; an entry whose file is
not there, or is another file by its inode, says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format.codec import decode_plain, encode_plain
from groupio.format.columns import Count, Section, damaged, pack_bytes, unpack_bytes
from groupio.format.envelope import HEADER_BYTES, RecordKind, check_kind, read_envelope, wrap
from groupio.format.limits import (
    CATALOGUE_BYTES_MAX,
    CATALOGUE_ENTRY_BYTES_MAX,
    ITEMS_MAX,
    METADATA_BYTES_MAX,
)
from groupio.format.records import Seconds, StoreId, Text, WorldSize, key_is_valid
from groupio.model import DIGEST_BYTES, DecisionKey, EpochHeader

_Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """The fields of EpochHeader, by the same names, that the key of an entry does not have."""

    job: Text
    incarnation: Count
    world_size: WorldSize
    fingerprint: _Digest
    content_id: _Digest
    write_id: Text
    created_at: Seconds
    bytes_logical: Count
    bytes_unique: Count
    bytes_stored: Count
    metadata: Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)]
    replicated: Annotated[tuple[Text, ...], Meta(max_length=ITEMS_MAX)]
    door: Text


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One decision. ``inode`` is that of its file; ``content`` is None for an abort."""

    key: DecisionKey
    inode: int
    content: _Header | None = None

    @classmethod
    def of(cls, key: DecisionKey, inode: int, header: EpochHeader | None) -> Entry:
        """The entry of the commit with ``header``, or of an abort."""
        if header is None:
            return cls(key, inode)
        fields = {name: getattr(header, name) for name in _Header.__struct_fields__}
        metadata = encode_plain(header.metadata, name="metadata")
        return cls(key, inode, _Header(**{**fields, "metadata": metadata}))

    def header(self, store_id: str, path: str) -> EpochHeader:
        """The header of the commit; IntegrityError(path) when its metadata cannot be read."""
        assert self.content is not None
        content, key = self.content, self.key
        try:
            metadata = decode_plain(content.metadata)
        except FormatError as error:
            raise damaged(path, f"the metadata of {key}: {error.message}") from None
        if type(metadata) is not dict:
            raise damaged(path, f"the metadata of {key} is not a dict")
        fields = {name: getattr(content, name) for name in _Header.__struct_fields__}
        return EpochHeader(
            store_id=store_id,
            lineage=key.lineage,
            epoch=key.epoch,
            attempt=key.attempt,
            **{**fields, "metadata": metadata},
        )


class _Root(msgspec.Struct, array_like=True, frozen=True):
    store_id: StoreId
    count: Count
    table: Section


_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode_catalogue(store_id: str, entries: Iterable[Entry]) -> bytes:
    """The catalogue as the bytes of a file.

    Entries with large metadata are left out, and the oldest ones where there are too many.
    InvalidInput when a field is out of range.
    """
    kept: list[bytes] = []
    room = CATALOGUE_BYTES_MAX - 16
    try:
        for entry in sorted(entries, key=lambda entry: entry.key, reverse=True):
            packed = msgspec.msgpack.encode(entry)
            if len(packed) > CATALOGUE_ENTRY_BYTES_MAX:
                continue
            room -= len(packed)
            if room < 0:
                break
            kept.append(packed)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidInput(f"the catalogue cannot be written: {error}") from None
    raws = [msgspec.Raw(packed) for packed in reversed(kept)]
    section, stored = pack_bytes(msgspec.msgpack.encode(raws))
    root = msgspec.msgpack.encode(_Root(store_id, len(kept), section))
    data = wrap(RecordKind.CATALOGUE, root, [stored])
    try:
        decode_catalogue(data, store_id, "the new catalogue")
    except (IntegrityError, FormatError) as error:
        raise InvalidInput(f"the catalogue cannot be written: {error.message}") from None
    return data


def decode_catalogue(data: bytes, store_id: str, path: str) -> list[Entry]:
    """The entries in ``data``, ascending by key.

    FormatError for another version, IntegrityError(path) for damage and for the catalogue of a
    store that is not ``store_id``.
    """
    envelope = read_envelope(data, path)
    check_kind(envelope, RecordKind.CATALOGUE, path)
    if envelope.total_length != len(data):
        raise damaged(path, f"it has {len(data)} bytes and not {envelope.total_length}")
    start = HEADER_BYTES + envelope.root_length
    try:
        content = envelope.checked_root(data[HEADER_BYTES:start], path)
        root = msgspec.msgpack.decode(content, type=_Root)
        if root.store_id != store_id:
            raise damaged(path, f"it is of the store {root.store_id}")
        if root.table.stored != len(data) - start:
            raise damaged(path, "its table does not end where it ends")
        table = unpack_bytes(root.table, data[start:], CATALOGUE_BYTES_MAX, path, "its table")
        entries = msgspec.msgpack.decode(table, type=list[Entry])
    except _BROKEN as error:
        raise damaged(path, f"it is not a catalogue ({error})") from None
    if len(entries) != root.count:
        raise damaged(path, f"it has {len(entries)} entries and not {root.count}")
    before = DecisionKey(0, 0, 0)
    for entry in entries:
        if not before < entry.key or not key_is_valid(entry.key):
            raise damaged(path, f"{entry.key} is not a key, or not in order")
        before = entry.key
    return entries
