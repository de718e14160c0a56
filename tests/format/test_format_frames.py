"""Frames: the archives are where the rows say, and what cannot be framed is refused.

Python's zipfile stands for torch here; tests/torch has torch itself read them.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from groupio.errors import InvalidInput
from groupio.format import frames as frames_module
from groupio.format.frames import (
    DTYPE_BYTES,
    LOCAL_HEADER,
    NO_FRAMES,
    TRAILER_BYTES,
    Frames,
    FrameTable,
    Kind,
    encode_frames,
    fitting,
    tensor_pickle,
    value_zip,
)
from groupio.format.opcodes import integer, text


def table_of(*rows: tuple[int, Kind]) -> FrameTable:
    """Rows of (run offset, kind)."""
    kinds = tuple(dict.fromkeys(kind for _, kind in rows))
    return FrameTable(
        np.array([run + k.skip * DTYPE_BYTES[k.dtype] for run, k in rows], np.int64),
        np.array([run for run, _ in rows], np.int64),
        np.array([kinds.index(kind) for _, kind in rows], np.int32),
        kinds,
    )


def test_the_constant_bytes() -> None:
    assert len(LOCAL_HEADER) == 38
    assert LOCAL_HEADER.hex() == "504b0304" + "00" * 22 + "0800" + "0000" + b"a/data/0".hex()
    assert TRAILER_BYTES == 187


GOLDEN = (
    Kind("float32", (4, 6), 0, 24),
    Kind("uint16", (2, 0, 3), 5, 12),
    Kind("bfloat16", (), 70000, 1 << 20),
    Kind("float8_e4m3fn", (300, 1), 0, 300),
)


def test_the_bytes_stay_as_they_are() -> None:
    """Segments that were written keep their frames, so a release may not write others."""
    region = encode_frames(table_of(*((4134, kind) for kind in GOLDEN)), 1 << 24)
    assert blake3(region).hexdigest() == (
        "37f8eda4084306f850ff4f47461bad2d943225a1c482f13559019fdacb519e5b"
    )
    assert tensor_pickle(GOLDEN[0]) == (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n"
        b"FloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x18tQK\x00K\x04K\x06\x86"
        b"K\x06K\x01\x86\x89ccollections\nOrderedDict\n)RtR."
    )


@given(st.lists(st.binary(min_size=1, max_size=90), min_size=1, max_size=5), st.integers(0, 50))
def test_each_row_is_an_archive_of_its_run(runs: list[bytes], gap: int) -> None:
    data = bytearray(gap)
    rows = []
    for run in runs:
        data += LOCAL_HEADER
        rows += [(len(data), Kind("uint8", (len(run) - skip,), skip, len(run)))
                 for skip in {0, len(run) // 2}]  # fmt: skip
        data += run
    frames = Frames(table_of(*rows), len(data))
    data += encode_frames(frames.table, len(data)) + b"more"
    assert frames.start + frames.length == len(data) - 4
    for row, (run_at, kind) in enumerate(rows):
        offset, length = frames.slice_of(row)
        assert (offset, length) == (frames.slice_offsets[row], frames.slice_lengths[row])
        archive = zipfile.ZipFile(io.BytesIO(data[offset : offset + length]))
        found = {info.filename: info for info in archive.infolist()}
        assert list(found) == ["a/data.pkl", "a/version", "a/data/0"]
        pieces = {}
        for name, info in found.items():
            assert info.file_size == info.compress_size
            at = offset + info.header_offset
            assert data[at + 30 : at + 30 + len(name)] == name.encode()
            pieces[name] = bytes(data[at + 30 + len(name) :][: info.file_size])
        assert pieces["a/data.pkl"] == tensor_pickle(kind)
        assert pieces["a/version"] == b"3\n"
        assert pieces["a/data/0"] == bytes(data[run_at : run_at + kind.record])
        assert frames.run_ends[row] == run_at + kind.record


def test_rows_are_found_by_the_chunk_that_they_start_at() -> None:
    kinds = [Kind("int16", (4,), 4, 8), Kind("int16", (8,), 0, 8), Kind("int16", (2, 4), 0, 8)]
    frames = Frames(table_of(*((100, kind) for kind in kinds)), 4096)
    assert frames.find(100).tolist() == [1, 2]
    assert frames.find(108).tolist() == [0]
    assert frames.find(101).tolist() == frames.find(99).tolist() == frames.find(999).tolist() == []
    empty = Frames(NO_FRAMES, 4096)
    assert empty.find(100).tolist() == []
    assert empty.encode() == encode_frames(NO_FRAMES, 0)
    assert len(empty.encode()) == empty.length


SOUND = Kind("float32", (4,), 0, 4)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Kind(">f4", (4,), 0, 4), "does not know"),
        (Kind("float32", (1,) * 65, 0, 4), "no tensor"),
        (Kind("float32", (-1,), 0, 4), "no tensor"),
        (Kind("float32", (1,), -1, 4), "no tensor"),
        (Kind("float32", (0, 1 << 62, 2), 0, 4), "any tensor"),
        (Kind("float32", (4,), 1, 4), "inside its run"),
        (Kind("float32", (4,), 0, 1 << 30), "4 GiB"),
    ],
)
def test_kinds_that_cannot_be_framed(kind: Kind, words: str) -> None:
    one = np.array([100])
    table = FrameTable(one, one, np.zeros(1, np.int32), (kind,))
    with pytest.raises(InvalidInput, match=words):
        encode_frames(table, 4096)


@pytest.mark.parametrize(
    ("chunks", "runs", "kinds", "at", "words"),
    [
        ([100, 100], [100], [0], 4096, "1 rows"),
        ([100], [100], [0, 0], 4096, "1 rows"),
        ([100], [100], [1], 4096, "not listed"),
        ([100], [100], [-1], 4096, "not listed"),
        ([37], [37], [0], 4096, "before them"),
        ([4081], [4081], [0], 4096, "before them"),
        ([1 << 62], [1 << 62], [0], 4096, "before them"),
        ([101], [100], [0], 4096, "where its kind says"),
        ([100], [100], [0], 1 << 32, "archive reaches 4 GiB"),
        ([100], [100], [0], 1 << 50, "too many"),
    ],
)
def test_rows_that_cannot_be_framed(
    chunks: list[int], runs: list[int], kinds: list[int], at: int, words: str
) -> None:
    good = np.array([100])
    encode_frames(FrameTable(good, good, np.zeros(1, np.int32), (SOUND,)), 4096)
    table = FrameTable(np.array(chunks), np.array(runs), np.array(kinds, np.int32), (SOUND,))
    with pytest.raises(InvalidInput, match=words):
        encode_frames(table, at)


def test_an_archive_may_end_just_below_4_gib() -> None:
    table = table_of((100, SOUND))
    length = Frames(table, 4096).length
    last = (1 << 32) - 2 - length + 100 - len(LOCAL_HEADER)
    assert Frames(table, last).slice_of(0) == (62, (1 << 32) - 2)
    with pytest.raises(InvalidInput, match="4 GiB"):
        Frames(table, last + 1)


def test_limits_and_what_fits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [Kind("uint8", (n,), 0, 9) for n in range(1, 8)]
    table = table_of(*((100, kinds[row % 7]) for row in range(21)))
    assert fitting(table) is table
    assert fitting(NO_FRAMES) is NO_FRAMES
    monkeypatch.setattr(frames_module, "FRAMES_MAX", 9)
    with pytest.raises(InvalidInput, match="21 rows"):
        Frames(table, 4096)
    fewer = fitting(table)
    assert fewer.kinds.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    monkeypatch.setattr(frames_module, "FRAME_KINDS_MAX", 3)
    with pytest.raises(InvalidInput, match="7 kinds"):
        Frames(fewer, 4096)
    fewest = fitting(table)
    assert fewest.kinds.tolist() == [0, 1, 2] * 3
    assert fewest.kind_list == tuple(kinds[:3])
    Frames(fewest, 4096)


@pytest.mark.parametrize("most", [100, 900, 1500, 4000])
def test_a_region_that_would_be_too_large(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    kinds = [Kind("complex128", (1,) * n, 0, 1 << 20) for n in range(20, 30)]
    table = table_of(*((100, kinds[row % 10]) for row in range(30)))
    monkeypatch.setattr(frames_module, "FRAMES_BYTES_MAX", most)
    with pytest.raises(InvalidInput, match=f"more than {most}"):
        Frames(table, 1 << 30)
    fewer = Frames(fitting(table), 1 << 30)
    assert fewer.length <= most
    assert (len(fewer.table) > 0) == (most > 1800)


def test_the_room_that_is_reckoned_for_a_pickle_is_enough() -> None:
    for dtype in DTYPE_BYTES:
        kind = Kind(dtype, (1 << 20,) * 3 + (0,) * 61, 1 << 40, 1 << 40)
        size = len(tensor_pickle(kind)) + 40
        assert size <= frames_module._KIND_BYTES + 64 * frames_module._KIND_DIM_BYTES
        least = len(tensor_pickle(Kind(dtype, (), 1 << 40, 1 << 40))) + 40
        assert least <= frames_module._KIND_BYTES


@given(st.binary(max_size=200))
def test_a_value_is_a_whole_archive(pickled: bytes) -> None:
    archive = zipfile.ZipFile(io.BytesIO(value_zip(pickled)))
    assert archive.testzip() is None
    assert archive.namelist() == ["a/data.pkl", "a/version"]
    assert archive.read("a/data.pkl") == pickled
    assert archive.read("a/version") == b"3\n"


def test_a_value_of_4_gib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "_ZIP_MAX", 2000)
    value_zip(bytes(900))
    with pytest.raises(InvalidInput, match="976 bytes"):
        value_zip(bytes(976))


@given(st.integers() | st.sampled_from([1 << n for n in range(70)]))
def test_ints_unpickle(value: int) -> None:
    assert unpickled(integer(value)) == value


@given(st.text(st.characters()) | st.just("\ud800"))
def test_text_unpickles(value: str) -> None:
    assert unpickled(text(value)) == value


def test_an_int_that_is_too_large() -> None:
    assert unpickled(integer(1 - (1 << 2039))) == 1 - (1 << 2039)
    with pytest.raises(InvalidInput, match="256 bytes"):
        integer(1 << 2039)


def unpickled(one: bytes) -> Any:
    """What an opcode makes; only the test reads a pickle, and it wrote it."""
    import pickle

    return pickle.loads(b"\x80\x02" + one + b".")  # noqa: S301
