"""Segments of version 2: every byte of frames, headers and gaps is checked, nonsense is refused."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from format_help import (
    KEY,
    SAMPLE_PIECES,
    STORE_ID,
    Piece,
    framed_rows,
    framed_segment,
    is_damage,
    reads,
    sample_segment,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format import segment_index, segment_scan
from groupio.format.columns import Section, pack_array, pack_bytes
from groupio.format.frames import LOCAL_HEADER, NO_FRAMES, FrameTable, Kind, encode_frames
from groupio.format.records import segment_name
from groupio.format.segment import SegmentHeader, SegmentReader, encode_footer, encode_header

PATH = f"store/segments/{segment_name(KEY, 'node0', 3)}"
DATA, OFFSETS, BODIES, TABLE = framed_rows(SAMPLE_PIECES)
LENGTHS = [len(body) for body in BODIES]
DIGESTS = np.array([list(blake3(body).digest()) for body in BODIES], np.uint8)


def reader_of(data: bytes) -> SegmentReader:
    return SegmentReader(reads(data), len(data), PATH)


def damage_of(data: bytes) -> list[IntegrityError]:
    """All that a reader finds, also what it raises."""
    found: list[IntegrityError] = []
    try:
        found.extend(reader_of(data).find_damage())
    except IntegrityError as error:
        found.append(error)
    assert all(is_damage(error, PATH) for error in found)
    return found


def test_the_frames_come_back() -> None:
    data = framed_segment()
    reader = reader_of(data)
    steps: list[int] = []
    reader.verify_data(steps.append)
    frames = reader.frames
    assert reader.header == SegmentHeader(STORE_ID, KEY, "node0", 3, framed=True)
    assert frames is not None
    assert frames.start == reader.index.data_end == len(DATA)
    assert reader.index.offsets.tolist() == OFFSETS
    for mine, given_ in zip(
        (frames.table.chunk_offsets, frames.table.run_offsets, frames.table.kinds),
        (TABLE.chunk_offsets, TABLE.run_offsets, TABLE.kinds),
        strict=True,
    ):
        assert mine.tolist() == given_.tolist()
    assert frames.table.kind_list == TABLE.kind_list
    region = data[frames.start : frames.start + frames.length]
    assert region == encode_frames(TABLE, frames.start)
    assert sum(steps) == len(DATA) - 4096 + len(region)


def test_rows_may_come_in_any_order_and_there_may_be_none() -> None:
    turned = FrameTable(
        TABLE.chunk_offsets[::-1], TABLE.run_offsets[::-1], TABLE.kinds[::-1], TABLE.kind_list
    )
    footer = encode_footer(np.array(OFFSETS), np.array(LENGTHS), DIGESTS, len(DATA), turned)
    assert DATA + footer == framed_segment()
    empty = encode_header(SegmentHeader(STORE_ID, KEY, "node0", 3, framed=True))
    none = np.zeros(0, np.int64)
    empty += encode_footer(none, none, np.zeros((0, 32), np.uint8), 4096, NO_FRAMES)
    reader = reader_of(empty)
    reader.verify_data()
    assert reader.frames is not None
    assert len(reader.frames.table) == 0


def test_the_bytes_of_version_2_stay_as_they_are() -> None:
    data = framed_segment()
    assert data[8:10].hex() == "0200"
    assert data[OFFSETS[0] - 38 : OFFSETS[0]] == LOCAL_HEADER
    assert data[len(DATA) :].startswith(encode_frames(TABLE, len(DATA)))


def test_every_flipped_bit_is_found() -> None:
    data = framed_segment((Piece((b"a" * 10, b"b" * 5), gap=50), Piece((b"c" * 9,), False, 60)))
    assert not damage_of(data)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        assert damage_of(bytes(changed)), position


pieces = st.lists(
    st.builds(
        Piece,
        st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4).map(tuple),
        st.booleans(),
        st.integers(0, 700),
    ),
    min_size=1,
    max_size=8,
).map(tuple)


@settings(max_examples=60, deadline=None)
@given(pieces, st.integers(300, 2000), st.data())
def test_any_changed_byte_is_found_whatever_the_segment(
    made: tuple[Piece, ...], scan_bytes: int, drawn: st.DataObject
) -> None:
    data = framed_segment(made)
    with pytest.MonkeyPatch.context() as patch:
        # Small pieces, so that their borders fall into gaps, headers and chunks.
        patch.setattr(segment_scan, "SCAN_BYTES", scan_bytes)
        steps: list[int] = []
        reader = reader_of(data)
        reader.verify_data(steps.append)
        assert reader.frames is not None
        assert sum(steps) == reader.frames.start + reader.frames.length - 4096
        for _ in range(8):
            position = drawn.draw(st.integers(0, len(data) - 1))
            changed = bytearray(data)
            changed[position] ^= drawn.draw(st.integers(1, 255))
            assert damage_of(bytes(changed))


def test_damage_is_told_by_part() -> None:
    data = bytearray(framed_segment())
    frames = reader_of(bytes(data)).frames
    assert frames is not None
    data[OFFSETS[0] - 38] ^= 1  # a header
    data[OFFSETS[0] - 39] ^= 1  # the gap before it
    data[OFFSETS[3] - 1] ^= 1  # a gap where a header may stand, but need not
    data[OFFSETS[1]] ^= 1
    data[frames.start + frames.length - 1] ^= 1
    found = damage_of(bytes(data))
    assert [error.chunk for error in found] == [
        None, None, blake3(BODIES[1]).hexdigest(), None, None
    ]  # fmt: skip
    words = ("bytes 4096 to 8096 are", f"header before the chunk at {OFFSETS[0]}", "digest")
    more = (f"bytes {OFFSETS[3] - 38} to {OFFSETS[3]} are not zero", "digest of its frames")
    for error, part in zip(found, (*words, *more), strict=True):
        assert part in error.message


def test_a_header_without_rows_is_no_damage_but_a_missing_one_is() -> None:
    """Rows beyond the limits are left out, and their runs keep the headers."""
    data = bytearray(framed_segment())
    start = OFFSETS[3] - 38
    data[start : OFFSETS[3]] = LOCAL_HEADER
    assert not damage_of(bytes(data))
    data[OFFSETS[0] - 38 : OFFSETS[0]] = bytes(38)
    (found,) = damage_of(bytes(data))
    assert "header before" in found.message


def test_header_and_index_must_be_of_one_version() -> None:
    plain, framed = sample_segment(), framed_segment()
    for data in (framed[:4096] + plain[4096:], plain[:4096] + framed[4096:]):
        with pytest.raises(IntegrityError, match="different versions"):
            reader_of(data).verify_structure()


def test_rows_beyond_the_limits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupio.format.frames.FRAMES_MAX", 2)
    reader = reader_of(framed_segment())
    reader.verify_data()
    assert reader.frames is not None
    assert reader.frames.table.chunk_offsets.tolist() == OFFSETS[:2]


U8 = (OFFSETS[0], OFFSETS[0], Kind("uint8", (36,), 0, 36))
"""A sound row: the whole first run."""


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((OFFSETS[0], OFFSETS[0] - 1, Kind("uint8", (1,), 1, 37)), "not made of chunks"),
        ((OFFSETS[0], OFFSETS[0], Kind("uint8", (35,), 0, 35)), "not made of chunks"),
        ((OFFSETS[0], OFFSETS[0], Kind("uint8", (0,), 0, 0)), "not made of chunks"),
        ((OFFSETS[0] + 1, OFFSETS[0], Kind("uint8", (35,), 1, 36)), "start with a chunk"),
        ((OFFSETS[0], OFFSETS[0], Kind("uint8", (9,), 0, OFFSETS[3] + 10 - OFFSETS[0])), "a gap"),
        ((OFFSETS[1], OFFSETS[1], Kind("uint8", (20,), 0, 20)), "no room for a header"),
        ((OFFSETS[1], OFFSETS[0], Kind("uint8", (36,), 0, 36)), "where its kind says"),
        ((OFFSETS[0], OFFSETS[0], Kind("uint8", (37,), 0, 36)), "inside its run"),
        ((OFFSETS[0], OFFSETS[0], Kind("uint8", (1, 1 << 62, 4), 0, 36)), "any tensor"),
        ((OFFSETS[0], OFFSETS[0], Kind("uint8", (1,), 0, 1 << 33)), "4 GiB"),
        ((OFFSETS[0], OFFSETS[0], Kind("uint8", (1,), 0, 1 << 20)), "before them"),
        ((1 << 62, 1 << 62, Kind("uint8", (36,), 0, 36)), "before them"),
        ((-1, -1, Kind("uint8", (36,), 0, 36)), "before them"),
    ],
)
def test_impossible_frames_are_neither_written_nor_read(
    row: tuple[int, int, Kind], words: str
) -> None:
    chunk, run, kind = row
    table = FrameTable(np.array([chunk]), np.array([run]), np.zeros(1, np.int32), (kind,))
    arrays = (np.array(OFFSETS), np.array(LENGTHS), DIGESTS, len(DATA))
    with pytest.raises(InvalidInput, match=words):
        encode_footer(*arrays, table)
    forged = forged_segment(rows=[row])
    with pytest.raises(IntegrityError, match=words):
        reader_of(forged).verify_structure()


def test_a_run_right_behind_the_header_has_no_room() -> None:
    table = FrameTable(
        np.array([4100]), np.array([4100]), np.zeros(1, np.int32), (Kind("uint8", (9,), 0, 9),)
    )
    with pytest.raises(InvalidInput, match="no room"):
        encode_footer(np.array([4100]), np.array([9]), DIGESTS[:1], 8192, table)


def forged_segment(**fields: Any) -> bytes:
    """The sample with other frames under right digests: ``rows`` (chunk, run, kind), or its parts:
    ``chunks``, ``runs``, ``kinds``, ``table`` (bytes), ``region``, ``stated`` (its length)."""
    rows = fields.get("rows", [U8])
    listed = [row[2] for row in rows]
    region: bytes = fields.get("region", b"")
    if not region:
        try:
            columns = np.array([row[:2] for row in rows])
            numbers = np.arange(len(rows), dtype=np.int32)
            sound = FrameTable(columns[:, 0], columns[:, 1], numbers, tuple(listed))
            region = encode_frames(sound, len(DATA))
        except InvalidInput:
            region = b"x" * 100
    stated = fields.get("stated", len(region))
    packed = [
        pack_array(np.array(OFFSETS, "<i8")),
        pack_array(np.array(LENGTHS, "<i8")),
        pack_array(DIGESTS.reshape(-1)),
        fields.get("chunks", pack_array(np.array([row[0] for row in rows], "<i8"))),
        fields.get("runs", pack_array(np.array([row[1] for row in rows], "<i8"))),
        fields.get("kinds", pack_array(np.arange(len(rows), dtype="<i4"))),
        pack_bytes(fields.get("table", msgspec.msgpack.encode(listed))),
        (Section(stated, stated, 0, blake3(region).digest()), b""),
    ][: fields.get("sections", 8)]
    sections = msgspec.msgpack.encode([section for section, _ in packed])
    body = struct.pack("<QI", len(OFFSETS), len(sections)) + sections
    body += b"".join(stored for _, stored in packed)
    size = len(DATA) + len(region) + len(body) + 64
    fixed = struct.pack("<8sQQ32s", b"GRPIOIDX", len(body), size, blake3(body).digest())
    return b"".join((DATA, region, body, fixed, blake3(fixed).digest(8)))


def packed_kinds(*values: Any) -> bytes:
    return msgspec.msgpack.encode([["uint8", [36], 0, 36], *values])


@pytest.mark.parametrize(
    "fields",
    [
        {"table": b""},
        {"table": b"\xc1"},
        {"table": msgspec.msgpack.encode([])},
        {"table": b"\x91" * 200},
        {"table": packed_kinds(["uint8", [-1], 0, 36])},
        {"table": packed_kinds(["uint8", [1] * 65, 0, 36])},
        {"table": packed_kinds(["uint8", [1 << 63], 0, 36])},
        {"table": packed_kinds(["uint8", [1], -1, 36])},
        {"table": packed_kinds(["u" * 65, [1], 0, 36])},
        {"table": packed_kinds(["uint8", [1], 0])},
        {"kinds": pack_array(np.array([1], "<i4"))},
        {"kinds": pack_array(np.array([-1], "<i4"))},
        {"kinds": pack_array(np.array([0, 0], "<i4"))},
        {"chunks": pack_array(np.zeros(2, "<i8"))},
        {"chunks": (Section(0, 1 << 62, 1, bytes(32)), b"")},
        {"chunks": (Section(0, 8 << 19, 1, bytes(32)), b"")},
        {"stated": 1 << 62},
        {"stated": 10},
        {"stated": 0},
        {"sections": 4},
        {"sections": 7},
    ],
    ids=str,
)
def test_nonsense_under_right_digests_is_found(fields: dict[str, Any]) -> None:
    reader_of(forged_segment()).verify_data()
    with pytest.raises(IntegrityError):
        reader_of(forged_segment(**fields)).verify_structure()


def test_limits_hold_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    # A section that would unpack to far more than its own bytes: its count alone refuses it.
    forged = forged_segment(chunks=(Section(1, 9 * 8, 1, bytes(32)), b"x"))
    monkeypatch.setattr(segment_index, "FRAMES_MAX", 8)
    with pytest.raises(IntegrityError, match="9 rows of frames are too many"):
        reader_of(forged).verify_structure()
    monkeypatch.setattr(segment_index, "FRAME_KINDS_BYTES_MAX", 3)
    with pytest.raises(IntegrityError, match="table of kinds"):
        reader_of(forged_segment()).verify_structure()
    with pytest.raises(InvalidInput, match="frame fewer"):
        framed_segment()


def test_a_dtype_of_a_later_release_is_not_damage() -> None:
    forged = forged_segment(table=packed_kinds(["float2_e1m0", [1], 0, 36]))
    with pytest.raises(FormatError, match="'float2_e1m0'") as caught:
        reader_of(forged).verify_structure()
    assert caught.value.path == PATH


def test_frames_that_are_not_those_of_the_rows_are_found() -> None:
    region = bytearray(encode_frames(FrameTable(
        np.array([U8[0]]), np.array([U8[1]]), np.zeros(1, np.int32), (U8[2],)
    ), len(DATA)))  # fmt: skip
    assert not damage_of(forged_segment(region=bytes(region)))
    region[60] ^= 1
    (found,) = damage_of(forged_segment(region=bytes(region)))
    assert "not those of its rows" in found.message


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_a_table_of_kinds_of_random_bytes_is_an_error(table: bytes) -> None:
    with pytest.raises((IntegrityError, FormatError)):
        reader_of(forged_segment(table=table)).verify_structure()
