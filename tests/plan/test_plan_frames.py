"""Frames of runs, against the boxes that chunks have."""

from __future__ import annotations

import sys
import time
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import raw, tensor

from groupio.format.frames import FrameTable, Kind
from groupio.model import CHUNK_BYTES, ItemKind, ItemSpec
from groupio.plan import chunks
from groupio.plan.chunks import chunk_boxes, find_cuts
from groupio.plan.frames import Runs, framable, frame_table, run_kinds, shapes_of

SMALL_CHUNK = 64


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> object:
    """Chunks of 64 bytes, so that tiny tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", SMALL_CHUNK)
        yield


@st.composite
def cut_items(draw: st.DrawFn) -> ItemSpec:
    """A float32 tensor of a few hundred elements, often a part of a larger one."""
    extent = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    shape = tuple(draw(st.integers(1, n)) for n in extent)
    at = tuple(draw(st.integers(0, n - m)) for n, m in zip(extent, shape, strict=True))
    return tensor("w", shape, of=extent, at=at)


@st.composite
def runs(draw: st.DrawFn) -> tuple[ItemSpec, int, int]:
    spec = draw(cut_items())
    n = find_cuts(spec).n_chunks
    first = draw(st.integers(0, n - 1))
    return spec, first, draw(st.integers(1, n - first))


def chunk_elements(spec: ItemSpec) -> list[range]:
    """Which elements of the local buffer each chunk has."""
    sizes = chunks.chunk_grid(spec) // 4
    ends = np.cumsum(sizes).tolist()
    return [range(end - size, end) for size, end in zip(sizes.tolist(), ends, strict=True)]


@settings(max_examples=300, deadline=None)
@given(runs())
def test_a_frame_is_a_box_at_its_chunk(case: tuple[ItemSpec, int, int]) -> None:
    spec, first, count = case
    corners, _ = chunk_boxes(spec)
    elements = chunk_elements(spec)
    local = np.arange(prod(spec.shape)).reshape(spec.shape)
    start, end = elements[first].start, elements[first + count - 1].stop
    kinds = run_kinds(spec, find_cuts(spec), first, count)
    assert len(kinds) == count
    for chunk, kind in enumerate(kinds, first):
        assert (kind.dtype, kind.record) == ("float32", end - start)
        assert kind.skip == elements[chunk].start - start
        corner = (corners[chunk] - spec.offsets).tolist()
        box = local[tuple(slice(c, c + n) for c, n in zip(corner, kind.shape, strict=True))]
        assert box.shape == kind.shape, "the box lies in the item"
        stop = elements[chunk].start + box.size
        assert box.ravel().tolist() == list(range(elements[chunk].start, stop))
        assert stop <= end
        assert stop in {e.stop for e in elements}, "the box is whole chunks"


@settings(max_examples=300, deadline=None)
@given(runs())
def test_no_larger_box_along_the_innermost_dimension_outside_the_cut(
    case: tuple[ItemSpec, int, int],
) -> None:
    spec, first, count = case
    corners, extents = chunk_boxes(spec)
    fixed = max(find_cuts(spec).dim - 1, 0)
    for chunk, kind in enumerate(run_kinds(spec, find_cuts(spec), first, count), first):
        largest = 0
        for end in range(chunk + 1, first + count + 1):
            lo, hi = corners[chunk:end].min(axis=0), (corners + extents)[chunk:end].max(axis=0)
            volume = int(extents[chunk:end].prod(axis=1).sum())
            if prod((hi - lo).tolist()) == volume and (hi - lo)[:fixed].tolist() == [1] * fixed:
                largest = volume
        assert prod(kind.shape) == largest or find_cuts(spec).n_chunks == 1


def test_the_frames_of_a_stack_of_matrices() -> None:
    # Rows of 40 bytes: one fits into a chunk, so each matrix is 3 chunks.
    spec = tensor("w", (2, 2, 3, 10))
    kinds = run_kinds(spec, find_cuts(spec), 2, 8)
    assert [(k.shape, k.skip) for k in kinds] == [
        ((1, 1, 1, 10), 0),
        ((1, 1, 3, 10), 10),  # the other matrices lie behind another outer index
        ((1, 1, 2, 10), 20),
        ((1, 1, 1, 10), 30),
        ((1, 1, 3, 10), 40),  # of the next one only a part is in the run
        ((1, 1, 2, 10), 50),
        ((1, 1, 1, 10), 60),
        ((1, 1, 1, 10), 70),
    ]
    whole = run_kinds(spec, find_cuts(spec), 0, 12)
    assert whole[0] == Kind("float32", (1, 2, 3, 10), 0, 120)


def test_what_torch_can_read() -> None:
    items = [
        tensor("yes", (3, 4)),
        tensor("scalar", ()),
        tensor("text", (3,), dtype="<U1"),
        tensor("other order", (3,), dtype=">f4"),
        tensor("fp8", (3,), dtype="float8_e4m3fn", item_bytes=1),
        tensor("another size", (3,), item_bytes=8),
        raw("bytes", 12),
        raw("plain", 12, ItemKind.PLAIN),
    ]
    assert [item.name for item in np.array(items, object)[framable(items)]] == [
        "yes", "scalar", "fp8"
    ]  # fmt: skip
    assert framable([]).tolist() == []


def test_a_table_has_a_row_for_each_chunk_and_each_kind_once() -> None:
    rows = tensor("rows", (3, 10))
    items = [
        rows,
        tensor("small", (2, 2), dtype="int32"),
        tensor("like rows", (3, 10)),
        tensor("as small", (2, 2), dtype="int32"),
    ]
    placed = [(0, 0, 3, 1000), (1, 0, 1, 2000), (2, 0, 3, 3000), (0, 2, 1, 4000), (3, 0, 1, 5000)]
    table = frame_table([runs_of(items, placed)])
    halves = [runs_of(items, placed[:2]), runs_of([rows], []), runs_of(items, placed[2:])]
    assert_equal(frame_table(halves), table)
    assert table.run_offsets.tolist() == [1000] * 3 + [2000] + [3000] * 3 + [4000, 5000]
    assert table.chunk_offsets.tolist() == [
        1000, 1040, 1080, 2000, 3000, 3040, 3080, 4000, 5000
    ]  # fmt: skip
    assert table.kinds.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 3]
    assert table.kind_list == (
        Kind("float32", (3, 10), 0, 30),
        Kind("float32", (2, 10), 10, 30),
        Kind("float32", (1, 10), 20, 30),
        Kind("int32", (2, 2), 0, 4),
        Kind("float32", (1, 10), 0, 10),
    )
    assert len(frame_table([])) == 0


@given(st.data())
def test_a_table_of_many_runs_is_that_of_each_of_them(data: st.DataObject) -> None:
    shapes = [(3, 10), (4, 5), (2, 3, 10), ()]
    items = [
        tensor(f"{n}", data.draw(st.sampled_from(shapes)))
        for n in range(data.draw(st.integers(1, 4)))
    ]
    placed = []
    for number in range(data.draw(st.integers(0, 8))):
        item = data.draw(st.integers(0, len(items) - 1))
        chunks_of_item = find_cuts(items[item]).n_chunks
        first = data.draw(st.integers(0, chunks_of_item - 1))
        count = data.draw(st.integers(1, chunks_of_item - first))
        placed.append((item, first, count, 1000 * (number + 1)))
    table = frame_table([runs_of(items, placed)])
    row = 0
    for item, first, count, offset in placed:
        for kind in run_kinds(items[item], find_cuts(items[item]), first, count):
            assert table.kind_list[table.kinds[row]] == kind
            assert table.run_offsets[row] == offset
            assert table.chunk_offsets[row] == offset + 4 * kind.skip
            row += 1
    assert row == len(table)
    assert len(set(table.kind_list)) == len(table.kind_list)


def runs_of(items: list[ItemSpec], placed: list[tuple[int, int, int, int]]) -> Runs:
    """Runs from (item, first chunk, count, offset)."""
    numbers = shapes_of(items)
    rows = [(item, numbers[item], *rest) for item, *rest in placed]
    return Runs(items, np.array(rows, np.int64).reshape(-1, 5))


def assert_equal(table: FrameTable, other: FrameTable) -> None:
    """The same rows and kinds."""
    assert table.kind_list == other.kind_list
    for name in ("chunk_offsets", "run_offsets", "kinds"):
        assert getattr(table, name).tolist() == getattr(other, name).tolist()


def test_twenty_thousand_tiny_tensors_take_a_tenth_of_a_second() -> None:
    items = [tensor(f"layer.{i}.bias", (i % 50 + 1,)) for i in range(20_000)]
    best = 9.9
    for _ in range(3):
        started = time.thread_time()
        placed = [(i, 0, 1, 4096 + 100 * i) for i in np.flatnonzero(framable(items)).tolist()]
        table = frame_table([runs_of(items, placed)])
        best = min(best, time.thread_time() - started)
    assert len(table) == 20_000
    assert best < (0.1 if sys.gettrace() is None else 1.0)


def test_the_chunk_size_of_these_tests_is_not_the_real_one() -> None:
    assert chunks.CHUNK_BYTES == SMALL_CHUNK != CHUNK_BYTES
