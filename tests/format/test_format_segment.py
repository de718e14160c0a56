from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from format_help import KEY, STORE_ID, is_damage, reads, sample_segment
from hypothesis import example, given, settings
from hypothesis import strategies as st

from groupio.errors import FormatError, IntegrityError, InvalidInput
from groupio.format import segment_scan
from groupio.format.columns import Section, pack_array
from groupio.format.records import segment_name
from groupio.format.segment import (
    SegmentHeader,
    SegmentReader,
    decode_header,
    encode_footer,
    encode_header,
)
from groupio.model import CHUNK_BYTES, DecisionKey

PATH = f"store/segments/{segment_name(KEY, 'node0', 3)}"
HEADER = SegmentHeader(STORE_ID, KEY, "node0", 3)


def reader_of(data: bytes, path: str = PATH) -> SegmentReader:
    return SegmentReader(reads(data), len(data), path)


@settings(max_examples=30)
@example([b"x" * 250] * 9, 300)
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20), st.integers(300, 2000))
def test_a_segment_comes_back(chunks: list[bytes], scan_bytes: int) -> None:
    data = sample_segment(chunks)
    with pytest.MonkeyPatch.context() as patch:
        # Small pieces, so that pieces end before, at and in the middle of chunks.
        patch.setattr(segment_scan, "SCAN_BYTES", scan_bytes)
        reader = reader_of(data)
        steps: list[int] = []
        reader.verify_data(steps.append)
    index = reader.index
    assert reader.header == HEADER
    assert [data[o : o + n] for o, n in zip(index.offsets, index.lengths, strict=True)] == chunks
    assert sum(steps) == index.data_end - 4096
    assert max(steps, default=0) <= scan_bytes


def test_the_bytes_of_version_1_stay_as_they_are() -> None:
    data = sample_segment()
    assert data[:112].hex() == (
        "47525049"
        "4f534547"
        "0100"
        "0500"
        "03000000"
        "01000000"
        "00000000"
        "0500000000000000"
        "00112233445566778899aabbccddeeff" + b"node0".hex().ljust(128, "0")
    )
    assert data[112:144] == blake3(data[:112]).digest()
    assert not any(data[144:4096])
    assert data[-64:-56] == b"GRPIOIDX"
    assert int.from_bytes(data[-48:-40], "little") == len(data)


def test_every_flipped_bit_is_found() -> None:
    data = sample_segment((b"a" * 10, b"b" * 100))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(IntegrityError) as caught:
            reader_of(bytes(changed)).verify_data()
        assert is_damage(caught.value, PATH)
        if not 4096 <= position < 8192:
            with pytest.raises(IntegrityError):
                reader_of(bytes(changed)).verify_structure()


def test_damage_is_told_by_chunk_and_gap() -> None:
    data = bytearray(sample_segment((b"a" * 10, b"b" * 100, b"c" * 5000)))
    data[4096] ^= 1
    data[4096 + 20] = 1
    data[4096 + 256] ^= 1
    data[12287] = 5
    found = list(reader_of(bytes(data)).find_damage())
    digests = [None if e.chunk is None else bytes.fromhex(e.chunk) for e in found]
    expected = [blake3(b"a" * 10).digest(), None, blake3(b"c" * 5000).digest(), None]
    assert digests == expected
    assert "bytes 4106 to 4160 are not zero" in found[1].message


def test_every_truncation_and_extension_is_found() -> None:
    data = sample_segment((b"a" * 10,))
    for length in [*range(0, len(data), 97), *range(8000, len(data))]:
        with pytest.raises(IntegrityError):
            reader_of(data[:length]).verify_structure()
    with pytest.raises(IntegrityError):
        reader_of(data + b"\0").verify_structure()


@given(st.binary(max_size=300))
def test_random_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        reader_of(data).verify_structure()
    with pytest.raises(IntegrityError):
        _ = reader_of(bytes(4096) + data).index


def test_a_reader_that_gets_too_little_says_so() -> None:
    data = sample_segment()
    with pytest.raises(IntegrityError, match="ends before"):
        _ = SegmentReader(lambda at, n: data[at : at + n - 1], len(data), PATH).header


def test_a_segment_under_the_name_of_another_is_found() -> None:
    for key, node, seq in ((DecisionKey(1, 6, 0), "node0", 3), (KEY, "n", 3), (KEY, "node0", 4)):
        with pytest.raises(IntegrityError, match="node0-0003"):
            _ = reader_of(sample_segment(), segment_name(key, node, seq)).header
    assert reader_of(sample_segment(), "elsewhere.tmp").header == HEADER


def test_chunks_may_be_recorded_in_any_order() -> None:
    offsets = np.array([8192, 4096, 4200])
    lengths = np.array([5, 100, 3000])
    digests = np.arange(96, dtype=np.uint8).reshape(3, 32)
    footer = encode_footer(offsets, lengths, digests, 12288)
    index = reader_of(encode_header(HEADER) + bytes(8192) + footer).index
    assert index.offsets.tolist() == [4096, 4200, 8192]
    assert index.lengths.tolist() == [100, 3000, 5]
    assert np.array_equal(index.digests, digests[[1, 2, 0]])
    assert index.data_end == 12288


@given(st.builds(DecisionKey, *[st.integers(1, 999)] * 3), st.integers(0, 999))
def test_headers_come_back(key: DecisionKey, seq: int) -> None:
    header = SegmentHeader(STORE_ID, key, "n" * 64, seq)
    assert decode_header(encode_header(header), "p") == header


@pytest.mark.parametrize(
    "fields",
    [{"store_id": "x"}, {"store_id": "00"}, {"store_id": STORE_ID.upper()}, {"node": "a/b"},
     {"seq": -1}, {"key": DecisionKey(0, 0, 0)}],
)  # fmt: skip
def test_headers_that_cannot_be_written(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        encode_header(msgspec.structs.replace(HEADER, **fields))


HEADER_FIELDS = (
    "magic", "version", "node_length", "seq", "lineage", "attempt", "epoch", "store_id", "node"
)  # fmt: skip


def forged_header(**fields: Any) -> bytes:
    layout = struct.Struct("<8sHHIIIQ16s64s")
    values = layout.unpack(encode_header(HEADER)[:112])
    fixed = layout.pack(*(dict(zip(HEADER_FIELDS, values, strict=True)) | fields).values())
    return (fixed + blake3(fixed).digest()).ljust(4096, b"\0")


def test_headers_with_right_digests_and_impossible_content() -> None:
    assert forged_header() == encode_header(HEADER)
    with pytest.raises(FormatError, match="version 3"):
        decode_header(forged_header(version=3), PATH)
    for fields in ({"magic": b"GRPIOSEX"}, {"lineage": 0}, {"node": b"\xff"}, {"node_length": 0}):
        with pytest.raises(IntegrityError):
            decode_header(forged_header(**fields), "p")


GOOD = ([4096, 4200], [100, 50], 8192)


@pytest.mark.parametrize(
    ("offsets", "lengths", "data_end"),
    [
        ([4095, 4200], [100, 50], 8192),
        ([4096, 4195], [100, 50], 8192),
        ([4096, 4200], [0, 50], 8192),
        ([4096, 4200], [100, -1], 8192),
        ([4096, 4200], [100, CHUNK_BYTES + 1], 1 << 30),
        ([4096, 8143], [100, 50], 8192),
        ([4096, (1 << 63) - 1], [100, 50], 8192),
        ([-1, 4200], [100, 50], 8192),
        ([], [], 4095),
        ([4096, 4200], [100, 50], 1 << 50),
        ([4096, 4200], [100], 8192),
    ],
)
def test_impossible_indexes_are_neither_written_nor_read(
    offsets: list[int], lengths: list[int], data_end: int
) -> None:
    digests = np.arange(32 * len(offsets), dtype=np.uint8).reshape(-1, 32)
    with pytest.raises(InvalidInput):
        encode_footer(np.array(offsets, np.int64), np.array(lengths, np.int64), digests, data_end)
    if len(offsets) == len(lengths) == 2 and data_end == 8192:
        good = encode_footer(np.array(GOOD[0]), np.array(GOOD[1]), digests, 8192)
        header = encode_header(HEADER)
        reader_of(header + bytes(4096) + good).verify_structure()
        bad = forged_index(offsets, lengths, digests)
        with pytest.raises(IntegrityError, match="chunk"):
            reader_of(header + bytes(4096) + bad).verify_structure()


def trailer(body: bytes, **fields: Any) -> bytes:
    size = 8192 + len(body) + 64
    values = {"magic": b"GRPIOIDX", "length": len(body), "size": size} | fields
    fixed = struct.pack("<8sQQ32s", *values.values(), blake3(body).digest())
    return fixed + blake3(fixed).digest(8)


def forged_index(offsets: Any, lengths: Any, digests: Any, **fields: Any) -> bytes:
    packed = [
        pack_array(np.array(offsets, "<i8")),
        pack_array(np.array(lengths, "<i8")),
        pack_array(digests.reshape(-1)),
    ]
    rows: Any = fields.get("rows", [row for row, _ in packed])
    sections = msgspec.msgpack.encode(rows)
    count = fields.get("count", len(offsets))
    body = struct.pack("<QI", count, fields.get("length", len(sections))) + sections
    body += b"".join(stored for _, stored in packed) + fields.get("more", b"")
    return body + trailer(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"count": 1},
        {"count": 1 << 60},
        {"length": 1 << 31},
        {"length": 0},
        {"rows": []},
        {"rows": [[]] * 3},
        {"rows": [Section(1 << 60, 16, 0, bytes(32))] * 3},
        {"rows": [Section(16, 16, 0, bytes(32))] * 3},
        {"more": b"x"},
    ],
    ids=str,
)
def test_nonsense_under_right_digests_is_found(fields: dict[str, Any]) -> None:
    digests = np.arange(64, dtype=np.uint8).reshape(2, 32)
    start = encode_header(HEADER) + bytes(4096)
    reader_of(start + forged_index(*GOOD[:2], digests)).verify_structure()
    with pytest.raises(IntegrityError):
        reader_of(start + forged_index(*GOOD[:2], digests, **fields)).verify_structure()


@pytest.mark.parametrize(
    "fields", [{"magic": b"GRPIOIDY"}, {"length": 1 << 62}, {"length": 4200}, {"size": 9000}]
)
def test_trailers_with_right_digests_and_impossible_content(fields: dict[str, Any]) -> None:
    body = forged_index(*GOOD[:2], np.zeros((2, 32), np.uint8))[:-64]
    data = encode_header(HEADER) + bytes(4096) + body
    _ = reader_of(data + trailer(body)).index
    with pytest.raises(IntegrityError):
        _ = reader_of(data + trailer(body, **fields)).index


@given(st.binary(max_size=40))
def test_an_index_of_random_bytes_is_damage(body: bytes) -> None:
    data = encode_header(HEADER) + bytes(4096) + body + trailer(body)
    with pytest.raises(IntegrityError):
        _ = reader_of(data).index


def test_large_chunks_are_read_once_in_large_pieces() -> None:
    chunks = [bytes([k]) * CHUNK_BYTES for k in range(5)]
    data = sample_segment(chunks)
    asked: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return data[offset : offset + length]

    reader = SegmentReader(read, len(data), PATH)
    reader.verify_structure()
    asked.clear()
    steps: list[int] = []
    reader.verify_data(steps.append)
    sizes = [length for _, length in asked]
    assert sizes == steps == [2 * CHUNK_BYTES, 2 * CHUNK_BYTES, CHUNK_BYTES]
