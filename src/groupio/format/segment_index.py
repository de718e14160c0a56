"""The end of a segment: frames if it has them, index and trailer.

The index says where the chunks lie and, in version 2, which tensors the frames describe. It is
decoded with nothing but the end of the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec import Meta

from groupio.errors import FormatError, InvalidInput
from groupio.format.columns import (
    RAW,
    Section,
    damaged,
    pack_array,
    pack_bytes,
    unpack_array,
    unpack_bytes,
)
from groupio.format.frames import DTYPE_BYTES, LOCAL_HEADER, Frames, FrameTable, Kind, fitting
from groupio.format.limits import (
    CHUNKS_MAX,
    DTYPE_NAME_MAX,
    FRAME_KINDS_BYTES_MAX,
    FRAME_KINDS_MAX,
    FRAMES_MAX,
    INDEX_BYTES_MAX,
    SEGMENT_BYTES_MAX,
)
from groupio.model import CHUNK_BYTES, DIGEST_BYTES, PAGE_BYTES

SEGMENT_HEADER_BYTES = PAGE_BYTES
"""Size of a segment's header; chunks start behind it."""

TRAILER_BYTES = 64
"""Size of a segment's trailer."""

_TRAILER_MAGIC = b"GRPIOIDX"
_TRAILER = struct.Struct("<8sQQ32s")
_CHECK_BYTES = 8
_COUNT = struct.Struct("<QI")
_PLAIN, _FRAMED = 3, 8  # sections of an index without and with frames


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """The chunks of a segment: ``offsets`` int64[n] ascending, ``lengths`` int64[n], ``digests``
    uint8[n, 32]. Behind ``data_end`` come the frames, if there are any, and the index itself."""

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint8]
    data_end: int

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True, slots=True)
class Footer:
    """What the end of a segment says; ``frames_digest`` is the BLAKE3 of the frames region."""

    index: SegmentIndex
    frames: Frames | None = None
    frames_digest: bytes = b""


_Sections = Annotated[tuple[Section, ...], Meta(min_length=_PLAIN, max_length=_FRAMED)]
_Kinds = Annotated[tuple[Kind, ...], Meta(max_length=FRAME_KINDS_MAX)]


def encode_footer(
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    digests: npt.NDArray[np.uint8],
    data_end: int,
    frames: FrameTable | None = None,
) -> bytes:
    """Frames region, index and trailer, to be written at ``data_end``, where the file then ends
    with them. ``frames`` is not None in a segment whose header says ``framed``; rows beyond the
    limits of a file are left out.

    Rows may come in any order (writers finish in any). InvalidInput when chunks overlap, or do
    not lie between the header and ``data_end``; when a run is not made of chunks, or there is no
    room for the header before it; and for what :class:`groupio.format.frames.Frames` refuses.
    """
    n = len(offsets)
    framed = None
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
        if not wrong and frames is not None:
            framed = Frames(fitting(_in_order(frames)), data_end)
            wrong = _wrong_runs(index, framed)
    if wrong:
        raise InvalidInput(f"the index of a segment cannot be written: {wrong}")
    packed = [
        pack_array(index.offsets),
        pack_array(index.lengths),
        pack_array(index.digests.reshape(-1), compress=False),
    ]
    region = b""
    if framed is not None:
        region = framed.encode()
        packed += _frames_sections(framed.table)
        packed.append((Section(len(region), len(region), RAW, blake3(region).digest()), b""))
    sections = msgspec.msgpack.encode([section for section, _ in packed])
    body = b"".join(
        (_COUNT.pack(len(index), len(sections)), sections, *(stored for _, stored in packed))
    )
    size = data_end + len(region) + len(body) + TRAILER_BYTES
    fixed = _TRAILER.pack(_TRAILER_MAGIC, len(body), size, blake3(body).digest())
    return b"".join((region, body, fixed, blake3(fixed).digest(_CHECK_BYTES)))


def decode_trailer(trailer: bytes, size: int, path: str) -> tuple[int, bytes]:
    """Length and BLAKE3 of the index that stands before the last 64 bytes of a file of ``size``
    bytes; IntegrityError(path) for damage."""
    fixed = trailer[: _TRAILER.size]
    if not trailer or blake3(fixed).digest(_CHECK_BYTES) != trailer[_TRAILER.size :]:
        raise damaged(path, "it does not end with the trailer of a segment")
    magic, length, stated, digest = _TRAILER.unpack(fixed)
    if magic != _TRAILER_MAGIC or stated != size:
        raise damaged(path, f"it has {size} bytes and not {stated}")
    if length > min(size - TRAILER_BYTES - SEGMENT_HEADER_BYTES, INDEX_BYTES_MAX):
        raise damaged(path, f"its index of {length} bytes does not fit into it")
    return length, digest


def decode_index(body: bytes, start: int, path: str) -> Footer:
    """What the index ``body``, which stands at byte ``start`` of a segment, says.

    IntegrityError(path) for contradictions, FormatError for tensors that this release does not
    know.
    """
    count, sections_length = _COUNT.unpack_from(body.ljust(_COUNT.size, b"\0"))
    at = _COUNT.size + sections_length
    try:
        sections = msgspec.msgpack.decode(body[_COUNT.size : at], type=_Sections)
    except (msgspec.DecodeError, RecursionError) as error:
        raise damaged(path, f"its index cannot be read ({error})") from None
    region = sections[-1] if len(sections) == _FRAMED else None
    inside = sections if region is None else sections[:-1]
    if (
        len(sections) not in (_PLAIN, _FRAMED)
        or count > CHUNKS_MAX
        or at + sum(section.stored for section in inside) != len(body)
    ):
        raise damaged(path, f"its index does not fit {count} chunks")
    stored = []
    for section in inside:
        stored.append((section, body[at : at + section.stored]))
        at += section.stored
    columns: list[npt.NDArray[Any]] = []
    forms = (("offsets", "<i8", count), ("lengths", "<i8", count))
    for (section, raw), (what, form, n) in zip(
        stored[:_PLAIN], (*forms, ("digests", "u1", count * DIGEST_BYTES)), strict=True
    ):
        columns.append(unpack_array(section, raw, form, n, path, f"index of {what}"))
    data_end = start if region is None else start - region.stored
    digests = columns[2].reshape(count, DIGEST_BYTES)
    index = SegmentIndex(columns[0], columns[1], digests, data_end)
    wrong = _wrong_index(index)
    if wrong:
        raise damaged(path, wrong)
    if region is None:
        return Footer(index)
    return _decode_frames(index, region, stored[_PLAIN:], path)


def _decode_frames(
    index: SegmentIndex, region: Section, stored: list[tuple[Section, bytes]], path: str
) -> Footer:
    rows = stored[0][0].raw // 8
    if rows > FRAMES_MAX:
        raise damaged(path, f"{rows} rows of frames are too many")
    columns: list[npt.NDArray[Any]] = [
        unpack_array(section, raw, form, rows, path, "index of frames")
        for (section, raw), form in zip(stored[:3], ("<i8", "<i8", "<i4"), strict=True)
    ]
    table = unpack_bytes(*stored[3], FRAME_KINDS_BYTES_MAX, path, "table of kinds")
    try:
        kinds = msgspec.msgpack.decode(table, type=_Kinds)
    except (msgspec.DecodeError, RecursionError) as error:
        raise damaged(path, f"its table of kinds cannot be read ({error})") from None
    for kind in kinds:
        if kind.dtype not in DTYPE_BYTES:
            raise FormatError(
                f"{path} frames tensors of dtype {kind.dtype[:DTYPE_NAME_MAX]!r}, which this "
                "release does not know; use a newer one",
                path=path,
            )
    try:
        frames = Frames(FrameTable(columns[0], columns[1], columns[2], kinds), index.data_end)
    except InvalidInput as error:
        raise damaged(path, error.message) from None
    wrong = _wrong_runs(index, frames)
    if wrong or region.stored != frames.length:
        raise damaged(path, wrong or "its frames have another length than its rows say")
    return Footer(index, frames, region.digest)


def _in_order(table: FrameTable) -> FrameTable:
    order = np.argsort(table.chunk_offsets, kind="stable")
    return FrameTable(
        np.ascontiguousarray(table.chunk_offsets[order], "<i8"),
        np.ascontiguousarray(table.run_offsets[order], "<i8"),
        np.ascontiguousarray(table.kinds[order], "<i4"),
        table.kind_list,
    )


def _frames_sections(table: FrameTable) -> list[tuple[Section, bytes]]:
    kinds = msgspec.msgpack.encode(table.kind_list)
    if len(kinds) > FRAME_KINDS_BYTES_MAX:
        raise InvalidInput(
            f"the kinds of the tensors in a segment take {len(kinds)} bytes, more than "
            f"{FRAME_KINDS_BYTES_MAX}; frame fewer of them"
        )
    return [
        pack_array(table.chunk_offsets),
        pack_array(table.run_offsets),
        pack_array(table.kinds),
        pack_bytes(kinds),
    ]


def _wrong_index(index: SegmentIndex) -> str:
    """Why ``index`` is impossible, or ""."""
    starts, lengths = index.offsets, index.lengths
    if index.data_end < SEGMENT_HEADER_BYTES:
        return "its data ends in the header"
    if not len(index):
        return ""
    if not 0 < int(lengths.min()) <= int(lengths.max()) <= CHUNK_BYTES:
        return f"a chunk is not 1 to {CHUNK_BYTES} bytes long"
    # Bounded first, so that the sums below cannot overflow.
    if int(starts[0]) < SEGMENT_HEADER_BYTES or int(starts.max()) > index.data_end:
        return "a chunk does not lie inside the data"
    ends = starts + lengths
    if (starts[1:] < ends[:-1]).any():
        return "two chunks overlap or are not in order"
    return "" if int(ends[-1]) <= index.data_end else "a chunk does not lie inside the data"


def _wrong_runs(index: SegmentIndex, frames: Frames) -> str:
    """Why the runs of ``frames`` cannot be made of the chunks of ``index``, or ""."""
    table = frames.table
    ends = index.offsets + index.lengths
    first = _rows_of(index.offsets, table.run_offsets)
    last = _rows_of(ends, frames.run_ends)
    if (first < 0).any() or (last < first).any():
        return "a run of its frames is not made of chunks"
    if (_rows_of(index.offsets, table.chunk_offsets) < 0).any():
        return "a tensor in its frames does not start with a chunk"
    before = np.concatenate((np.array([SEGMENT_HEADER_BYTES]), ends))[: len(ends)]
    breaks = np.cumsum(index.offsets != before)
    if (breaks[first] != breaks[last]).any():
        return "a run of its frames has a gap"
    if (table.run_offsets - before[first] < len(LOCAL_HEADER)).any():
        return "there is no room for a header before a run of its frames"
    return ""


def _rows_of(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> Any:
    """Where each of ``values`` stands in ``ascending``, or -1."""
    found = np.searchsorted(ascending, values)
    there = np.append(ascending, -1)[found] == values
    return np.where(there, found, -1)
