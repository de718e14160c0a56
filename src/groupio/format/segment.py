"""Segments: one large file of chunks, written from front to back.

::

    header    4096 bytes: magic "GRPIOSEG", version u16, node length u16, sequence number u32,
              lineage u32, attempt u32, epoch u64, store id (16), node (64), BLAKE3 of the 112
              bytes so far (32), zeros
    data      chunks in ascending order; what lies between them is zero, but for the header of
              ``groupio.format.frames`` that stands directly before a run (version 2)
    frames    the frames region (version 2)
    index     number of chunks u64, length of the Section headers u32, these (msgpack) and the
              stored bytes of offsets i64, lengths i64 and digests; in version 2 also of the rows
              of the frames (chunk offsets i64, run offsets i64, kinds i32) and of the table of
              kinds (msgpack); the last Section then describes the frames region itself
    trailer   64 bytes: magic "GRPIOIDX", index length u64, file size u64, BLAKE3 of the index (32),
              first 8 bytes of the BLAKE3 of the 56 bytes so far

The index stands at the end, so that a segment needs no seek while it is written, and with it a
segment can be verified without any manifest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cached_property

import msgspec
from blake3 import blake3

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format.columns import damaged
from groupio.format.frames import Frames
from groupio.format.limits import FRAMED_SEGMENT_VERSION, SEGMENT_VERSION
from groupio.format.records import file_name, parse_segment_name, segment_name
from groupio.format.segment_index import (
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    Footer,
    SegmentIndex,
    decode_index,
    decode_trailer,
    encode_footer,
)
from groupio.format.segment_scan import Scan
from groupio.model import DecisionKey

__all__ = [
    "SEGMENT_HEADER_BYTES",
    "SegmentHeader",
    "SegmentIndex",
    "SegmentReader",
    "decode_header",
    "encode_footer",
    "encode_header",
]

_MAGIC = b"GRPIOSEG"
_HEADER = struct.Struct("<8sHHIIIQ16s64s")


class SegmentHeader(msgspec.Struct, frozen=True):
    """Which segment a file is; ``store_id`` is 32 hexadecimal digits. ``framed`` segments are of
    version 2 and have frames, others of version 1."""

    store_id: str
    key: DecisionKey
    node: str
    seq: int
    framed: bool = False


def encode_header(header: SegmentHeader) -> bytes:
    """The first 4096 bytes of a segment; InvalidInput when a field is out of range."""
    segment_name(header.key, header.node, header.seq)
    try:
        store_id = bytes.fromhex(header.store_id)
    except ValueError:
        store_id = b""
    if store_id.hex() != header.store_id or len(store_id) != 16:
        raise InvalidInput(f"{header.store_id[:80]!r} is not the id of a store (32 hex digits)")
    node = header.node.encode()
    key = header.key
    fixed = _HEADER.pack(
        _MAGIC,
        FRAMED_SEGMENT_VERSION if header.framed else SEGMENT_VERSION,
        len(node),
        header.seq,
        key.lineage,
        key.attempt,
        key.epoch,
        store_id,
        node,
    )
    return (fixed + blake3(fixed).digest()).ljust(SEGMENT_HEADER_BYTES, b"\0")


def decode_header(data: bytes, path: str) -> SegmentHeader:
    """The header in the first 4096 bytes of a segment; FormatError for another version,
    IntegrityError(path) for damage or a file under the name of another segment."""
    fixed = data[: _HEADER.size]
    rest = (fixed + blake3(fixed).digest()).ljust(SEGMENT_HEADER_BYTES, b"\0")
    if data != rest or not fixed.startswith(_MAGIC):
        raise damaged(path, "it does not start with the header of a segment")
    _, version, node_length, seq, lineage, attempt, epoch, store_id, node = _HEADER.unpack(fixed)
    if version not in (SEGMENT_VERSION, FRAMED_SEGMENT_VERSION):
        raise FormatError(
            f"{path} is a segment of version {version}; this release reads {SEGMENT_VERSION} and "
            f"{FRAMED_SEGMENT_VERSION}, use a newer one",
            path=path,
        )
    header = SegmentHeader(
        store_id.hex(),
        DecisionKey(lineage, epoch, attempt),
        node[:node_length].decode("latin-1"),
        seq,
        version == FRAMED_SEGMENT_VERSION,
    )
    named = (header.key, header.node, header.seq)
    try:
        name = segment_name(*named)
    except InvalidInput as error:
        raise damaged(path, f"its header is impossible: {error.message}") from None
    if parse_segment_name(file_name(path)) not in (None, named):
        raise damaged(path, f"it is the segment {name}")
    return header


class SegmentReader:
    """Opens one segment; each part is verified when it is first used.

    ``read(offset, length)`` returns exactly that many bytes of the file of ``size`` bytes;
    ``path`` stands in errors, and when its last part is the name of a segment it must be the
    file's own. Every damage is IntegrityError(path), for a chunk with its digest; another version
    is FormatError. What ``read`` raises passes through.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, path: str) -> None:
        self._read_bytes = read
        self._size = size
        self.path = path

    @cached_property
    def header(self) -> SegmentHeader:
        """Which segment it is; reads 4096 bytes."""
        return decode_header(self._read(0, SEGMENT_HEADER_BYTES), self.path)

    @property
    def index(self) -> SegmentIndex:
        """Its chunks, in ascending order; reads the end of the file."""
        return self._footer.index

    @property
    def frames(self) -> Frames | None:
        """How torch reads its tensors, None in a segment without frames; reads its end."""
        return self._footer.frames

    def verify_structure(self) -> None:
        """Check the header, the trailer and the index; data and frames are not read."""
        if self.header.framed != (self.frames is not None):
            raise damaged(self.path, "its header and its index are of different versions")

    def verify_data(self, progress: Callable[[int], None] | None = None) -> None:
        """Check the whole file, reading each byte once; IntegrityError for the first damage.

        ``progress(n)`` is called when ``n`` more bytes of data or frames have been checked.
        """
        for damage in self.find_damage(progress):
            raise damage

    def find_damage(
        self, progress: Callable[[int], None] | None = None
    ) -> Iterator[IntegrityError]:
        """As :func:`verify_data`, but yields an error for each damaged chunk, gap and header of
        a run, and for the frames.

        Damage of the header, trailer or index is raised: without them there are no chunks to
        name.
        """
        self.verify_structure()
        footer, index = self._footer, self._footer.index
        scan = Scan(
            index.offsets,
            index.lengths,
            index.digests,
            SEGMENT_HEADER_BYTES,
            index.data_end,
            self.path,
            footer.frames,
            footer.frames_digest,
        )
        yield from scan.damage(self._read, progress)

    @cached_property
    def _footer(self) -> Footer:
        body, end = self._index_bytes()
        return decode_index(body, end, self.path)

    def _index_bytes(self) -> tuple[bytes, int]:
        """The verified bytes of the index, and where they start."""
        end = self._size - TRAILER_BYTES
        trailer = self._read(end, TRAILER_BYTES) if end > SEGMENT_HEADER_BYTES else b""
        length, digest = decode_trailer(trailer, self._size, self.path)
        body = self._read(end - length, length)
        if blake3(body).digest() != digest:
            raise damaged(self.path, "the digest of its index does not match")
        return body, end - length

    def _read(self, offset: int, length: int) -> bytes:
        if offset + length > self._size:
            raise damaged(self.path, f"it ends before byte {offset + length}")
        data = bytes(self._read_bytes(offset, length))
        if len(data) != length:
            raise damaged(self.path, f"it ends before byte {offset + length}")
        return data
