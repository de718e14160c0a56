"""Segments: one large file of chunks, written from front to back.

::

    header    4096 bytes: magic "GRPIOSEG", version u16, node length u16, sequence number u32,
              lineage u32, attempt u32, epoch u64, store id (16), node (64), BLAKE3 of the 112
              bytes so far (32), zeros
    data      chunks in ascending order; what lies between them is zero
    index     number of chunks u64, then Section headers (msgpack) and the stored bytes of
              offsets i64, lengths i64 and digests
    trailer   64 bytes: magic "GRPIOIDX", index length u64, file size u64, BLAKE3 of the index (32),
              first 8 bytes of the BLAKE3 of the 56 bytes so far

The index stands at the end, so that a segment needs no seek while it is written, and with it a
segment can be verified without any manifest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec import Meta

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format.columns import Section, damaged, pack_array, unpack_array
from groupio.format.limits import (
    CHUNKS_MAX,
    SCAN_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_VERSION,
)
from groupio.format.records import file_name, parse_segment_name, segment_name
from groupio.model import CHUNK_BYTES, DIGEST_BYTES, PAGE_BYTES, DecisionKey

SEGMENT_HEADER_BYTES = PAGE_BYTES
"""Size of a segment's header; chunks start behind it."""

TRAILER_BYTES = 64
"""Size of a segment's trailer."""

_MAGIC = b"GRPIOSEG"
_HEADER = struct.Struct("<8sHHIIIQ16s64s")
_TRAILER_MAGIC = b"GRPIOIDX"
_TRAILER = struct.Struct("<8sQQ32s")
_CHECK_BYTES = 8
_COUNT = struct.Struct("<QI")
_COLUMNS = 3


class SegmentHeader(msgspec.Struct, frozen=True):
    """Which segment a file is; ``store_id`` is 32 hexadecimal digits."""

    store_id: str
    key: DecisionKey
    node: str
    seq: int


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """The chunks of a segment: ``offsets`` int64[n] ascending, ``lengths`` int64[n], ``digests``
    uint8[n, 32]. Behind ``data_end`` comes the index itself."""

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint8]
    data_end: int

    def __len__(self) -> int:
        return len(self.offsets)


_Sections = Annotated[tuple[Section, ...], Meta(min_length=_COLUMNS, max_length=_COLUMNS)]


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
        SEGMENT_VERSION,
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
    if version != SEGMENT_VERSION:
        raise FormatError(
            f"{path} is a segment of version {version}; this release reads {SEGMENT_VERSION}, use "
            "a newer one",
            path=path,
        )
    header = SegmentHeader(
        store_id.hex(),
        DecisionKey(lineage, epoch, attempt),
        node[:node_length].decode("latin-1"),
        seq,
    )
    named = (header.key, header.node, header.seq)
    try:
        name = segment_name(*named)
    except InvalidInput as error:
        raise damaged(path, f"its header is impossible: {error.message}") from None
    if parse_segment_name(file_name(path)) not in (None, named):
        raise damaged(path, f"it is the segment {name}")
    return header


def encode_footer(
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    digests: npt.NDArray[np.uint8],
    data_end: int,
) -> bytes:
    """Index and trailer, to be written at ``data_end``, where the file then ends with them.

    Rows may come in any order (writers finish in any). InvalidInput when chunks overlap, or do
    not lie between the header and ``data_end``.
    """
    n = len(offsets)
    if lengths.shape != (n,) or digests.shape != (n, DIGEST_BYTES):
        wrong = f"its arrays do not all have {n} rows"
    elif n > CHUNKS_MAX or data_end > SEGMENT_BYTES_MAX:
        wrong = f"{n} chunks up to byte {data_end} are too many"
    else:
        order = np.argsort(offsets, kind="stable")
        index = SegmentIndex(
            np.ascontiguousarray(offsets[order], "<i8"),
            np.ascontiguousarray(lengths[order], "<i8"),
            np.ascontiguousarray(digests[order], "u1"),
            data_end,
        )
        wrong = _wrong_index(index)
    if wrong:
        raise InvalidInput(f"the index of a segment cannot be written: {wrong}")
    packed = [
        pack_array(index.offsets),
        pack_array(index.lengths),
        pack_array(index.digests.reshape(-1), compress=False),
    ]
    sections = msgspec.msgpack.encode([section for section, _ in packed])
    body = b"".join(
        (_COUNT.pack(len(index), len(sections)), sections, *(stored for _, stored in packed))
    )
    size = data_end + len(body) + TRAILER_BYTES
    fixed = _TRAILER.pack(_TRAILER_MAGIC, len(body), size, blake3(body).digest())
    return b"".join((body, fixed, blake3(fixed).digest(_CHECK_BYTES)))


def _wrong_index(index: SegmentIndex) -> str:
    """Why ``index`` is impossible, or ""."""
    starts, lengths = index.offsets, index.lengths
    if not len(index):
        return "" if index.data_end >= SEGMENT_HEADER_BYTES else "its data ends in the header"
    if not 0 < int(lengths.min()) <= int(lengths.max()) <= CHUNK_BYTES:
        return f"a chunk is not 1 to {CHUNK_BYTES} bytes long"
    # Bounded first, so that the sums below cannot overflow.
    if int(starts[0]) < SEGMENT_HEADER_BYTES or int(starts.max()) > index.data_end:
        return "a chunk does not lie inside the data"
    ends = starts + lengths
    if (starts[1:] < ends[:-1]).any():
        return "two chunks overlap or are not in order"
    return "" if int(ends[-1]) <= index.data_end else "a chunk does not lie inside the data"


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

    @cached_property
    def index(self) -> SegmentIndex:
        """Its chunks, in ascending order; reads the end of the file."""
        body, data_end = self._index_bytes()
        count, sections_length = _COUNT.unpack_from(body.ljust(_COUNT.size, b"\0"))
        at = _COUNT.size + sections_length
        try:
            sections = msgspec.msgpack.decode(body[_COUNT.size : at], type=_Sections)
        except (msgspec.DecodeError, RecursionError) as error:
            raise damaged(self.path, f"its index cannot be read ({error})") from None
        if count > CHUNKS_MAX or at + sum(s.stored for s in sections) != len(body):
            raise damaged(self.path, f"its index does not fit {count} chunks")
        columns: list[npt.NDArray[Any]] = []
        forms = (("offsets", "<i8", count), ("lengths", "<i8", count))
        for section, (what, form, n) in zip(
            sections, (*forms, ("digests", "u1", count * DIGEST_BYTES)), strict=True
        ):
            stored = body[at : at + section.stored]
            columns.append(unpack_array(section, stored, form, n, self.path, f"index of {what}"))
            at += section.stored
        index = SegmentIndex(
            columns[0], columns[1], columns[2].reshape(count, DIGEST_BYTES), data_end
        )
        wrong = _wrong_index(index)
        if wrong:
            raise damaged(self.path, wrong)
        return index

    def verify_structure(self) -> None:
        """Check the header, the trailer and the index; the data is not read."""
        _ = self.header, self.index

    def verify_data(self, progress: Callable[[int], None] | None = None) -> None:
        """Check the whole file, reading each byte once; IntegrityError for the first damage.

        ``progress(n)`` is called when ``n`` more bytes of data have been checked.
        """
        for damage in self.find_damage(progress):
            raise damage

    def find_damage(
        self, progress: Callable[[int], None] | None = None
    ) -> Iterator[IntegrityError]:
        """As :func:`verify_data`, but yields an error for each damaged chunk and gap.

        Damage of the header, trailer or index is raised: without them there are no chunks to
        name.
        """
        self.verify_structure()
        index = self.index
        ends = index.offsets + index.lengths
        at, row = SEGMENT_HEADER_BYTES, 0
        while at < index.data_end:
            end = min(at + SCAN_BYTES, index.data_end)
            # Whole chunks only: the piece ends before a chunk that does not fit into it. A piece
            # is larger than a chunk, so each makes progress.
            last = int(np.searchsorted(ends, end, "right"))
            if last < len(index):
                end = min(end, int(index.offsets[last]))
            piece = memoryview(self._read(at, end - at))
            yield from self._check_piece(piece, at, row, last)
            if progress is not None:
                progress(end - at)
            at, row = end, last

    def _check_piece(
        self, piece: memoryview, at: int, row: int, last: int
    ) -> Iterator[IntegrityError]:
        """The damage in ``piece``, which starts at ``at`` and has the chunks row to last."""
        index = self.index
        done = 0
        for k in range(row, last):
            start = int(index.offsets[k]) - at
            end = start + int(index.lengths[k])
            yield from self._check_gap(piece, at, done, start)
            expected = index.digests[k].tobytes()
            if blake3(piece[start:end]).digest() != expected:
                where = f"the chunk of {end - start} bytes at {at + start} has another digest"
                yield damaged(self.path, where, expected)
            done = end
        yield from self._check_gap(piece, at, done, len(piece))

    def _check_gap(
        self, piece: memoryview, at: int, start: int, end: int
    ) -> Iterator[IntegrityError]:
        if bytes(piece[start:end]).count(0) != end - start:
            yield damaged(self.path, f"bytes {at + start} to {at + end} are not zero")

    def _index_bytes(self) -> tuple[bytes, int]:
        """The verified bytes of the index, and where they start."""
        end = self._size - TRAILER_BYTES
        trailer = self._read(end, TRAILER_BYTES) if end > SEGMENT_HEADER_BYTES else b""
        fixed = trailer[: _TRAILER.size]
        if not trailer or blake3(fixed).digest(_CHECK_BYTES) != trailer[_TRAILER.size :]:
            raise damaged(self.path, "it does not end with the trailer of a segment")
        magic, length, size, digest = _TRAILER.unpack(fixed)
        if magic != _TRAILER_MAGIC or size != self._size:
            raise damaged(self.path, f"it has {self._size} bytes and not {size}")
        if length > end - SEGMENT_HEADER_BYTES:
            raise damaged(self.path, f"its index of {length} bytes does not fit into it")
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
