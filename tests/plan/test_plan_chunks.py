"""Chunks lie on a grid in global coordinates and cover the local buffer exactly."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_help import raw, tensor

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES, ItemKind, ItemSpec
from groupio.plan import chunks
from groupio.plan.chunks import chunk_boxes, chunk_grid, find_cuts

SMALL = 48
"""A chunk size at which every rule of the grid shows on tensors of a few elements."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", SMALL)


@st.composite
def shards(draw: st.DrawFn) -> ItemSpec:
    """A non-empty box somewhere in a global tensor of at most four dimensions."""
    extents = draw(st.lists(st.integers(1, 9), max_size=4))
    shape, at = [], []
    for extent in extents:
        lo = draw(st.integers(0, extent - 1))
        at.append(lo)
        shape.append(draw(st.integers(1, extent - lo)))
    item_bytes = draw(st.sampled_from([1, 2, 3, 8, 16, 47, 48, 49, 100]))
    return tensor("w", tuple(shape), of=tuple(extents), at=tuple(at), item_bytes=item_bytes)


def cells(spec: ItemSpec, limit: int) -> list[tuple[int, ...]]:
    """The grid cell of every byte of the local buffer, by the rule itself, byte for byte."""
    item_bytes = spec.nbytes // prod(spec.shape)
    extents = (*spec.global_shape, item_bytes)
    steps = list(extents)
    inner = 1
    for dim in reversed(range(len(extents))):
        if inner * extents[dim] > limit:
            steps[dim] = max(1, limit // inner)
            steps[:dim] = [1] * dim
            break
        inner *= extents[dim]
    box = np.indices((*spec.shape, item_bytes)).reshape(len(extents), -1).T
    places = box + np.array((*spec.offsets, 0))
    return [tuple(cell) for cell in (places // np.array(steps)).tolist()]


@given(spec=shards())
@settings(deadline=None)
@pytest.mark.usefixtures("small_chunks")
@example(spec=tensor("scalar", (), item_bytes=8))
@example(spec=tensor("long element", (2,), item_bytes=100))
def test_every_chunk_is_one_cell_and_one_run(spec: ItemSpec) -> None:
    of_byte = cells(spec, SMALL)
    lengths = chunk_grid(spec).tolist()
    assert sum(lengths) == spec.nbytes
    assert all(0 < length <= SMALL for length in lengths)
    assert find_cuts(spec).n_chunks == len(lengths)
    start = 0
    seen: set[tuple[int, ...]] = set()
    for length in lengths:
        in_chunk = set(of_byte[start : start + length])
        assert len(in_chunk) == 1
        assert not in_chunk & seen
        seen |= in_chunk
        start += length


@given(spec=shards().filter(lambda spec: spec.nbytes // prod(spec.shape) <= SMALL))
@settings(deadline=None)
@pytest.mark.usefixtures("small_chunks")
def test_boxes_partition_the_shard_in_buffer_order(spec: ItemSpec) -> None:
    starts, shapes = chunk_boxes(spec)
    ndim = len(spec.shape)
    assert starts.dtype == shapes.dtype == np.int64
    item_bytes = spec.nbytes // prod(spec.shape)
    assert (shapes.prod(axis=1) * item_bytes).tolist() == chunk_grid(spec).tolist()
    number = np.arange(prod(spec.shape)).reshape(spec.shape)
    reached: list[int] = []
    for corner, extent in zip(starts - np.array(spec.offsets, np.int64), shapes, strict=True):
        assert (corner >= 0).all()
        box = tuple(slice(corner[d], corner[d] + extent[d]) for d in range(ndim))
        reached.extend(np.asarray(number[box]).ravel().tolist())
    assert reached == list(range(prod(spec.shape)))


@given(data=st.data())
@settings(deadline=None)
@pytest.mark.usefixtures("small_chunks")
def test_inner_chunks_survive_a_resplit(data: st.DataObject) -> None:
    """Whatever the cut between two ranks, a grid cell inside a part is a chunk of that part."""
    whole = tensor("w", tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))))
    dim = data.draw(st.integers(0, len(whole.shape) - 1))
    extent = whole.shape[dim]
    borders = sorted({0, extent, *data.draw(st.lists(st.integers(0, extent), max_size=4))})

    def boxes(spec: ItemSpec) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        starts, shapes = chunk_boxes(spec)
        pairs = zip(starts.tolist(), shapes.tolist(), strict=True)
        return {(tuple(start), tuple(shape)) for start, shape in pairs}

    uncut = boxes(whole)
    for lo, hi in pairwise(borders):
        shape = (*whole.shape[:dim], hi - lo, *whole.shape[dim + 1 :])
        at = tuple(lo if d == dim else 0 for d in range(len(shape)))
        part = boxes(tensor("w", shape, of=whole.shape, at=at))
        inside = {
            (start, size)
            for start, size in uncut
            if lo <= start[dim] and start[dim] + size[dim] <= hi
        }
        assert inside <= part


def test_real_sizes() -> None:
    # 4096 x 4096 float32: 16 KiB rows, 256 rows to a chunk.
    assert chunk_grid(tensor("w", (4096, 4096))).tolist() == [CHUNK_BYTES] * 16
    part = tensor("w", (1000, 4096), of=(4096, 4096), at=(1000, 0))
    assert (chunk_grid(part) >> 14).tolist() == [24, 256, 256, 256, 208]
    column = tensor("w", (4096, 1024), of=(4096, 4096), at=(0, 1024))
    assert chunk_grid(column).tolist() == [CHUNK_BYTES // 4] * 16


@pytest.mark.parametrize("kind", [ItemKind.BYTES, ItemKind.PLAIN])
def test_other_items_are_plain_pieces(kind: ItemKind) -> None:
    item = raw("b", 2 * CHUNK_BYTES + 5, kind)
    assert chunk_grid(item).tolist() == [CHUNK_BYTES, CHUNK_BYTES, 5]
    starts, shapes = chunk_boxes(item)
    assert starts.tolist() == [[0], [CHUNK_BYTES], [2 * CHUNK_BYTES]]
    assert shapes.tolist() == [[CHUNK_BYTES], [CHUNK_BYTES], [5]]


def test_an_element_larger_than_a_chunk_is_cut() -> None:
    spec = tensor("s", (2,), item_bytes=CHUNK_BYTES + 1)
    assert chunk_grid(spec).tolist() == [CHUNK_BYTES, 1, CHUNK_BYTES, 1]
    starts, shapes = chunk_boxes(spec)
    assert starts.tolist() == [[0], [0], [1], [1]]
    assert shapes.tolist() == [[1], [1], [1], [1]]


@pytest.mark.parametrize(
    "item",
    [
        raw("b", 0),
        tensor("t", (0, 5)),
        tensor("t", (0, 5), of=(7, 5), at=(7, 0)),
        tensor("t", (3,), item_bytes=0),
        tensor("t", (3,), of=(4,), item_bytes=0),
    ],
)
def test_empty_items_have_no_chunks(item: ItemSpec) -> None:
    assert chunk_grid(item).tolist() == []
    starts, shapes = chunk_boxes(item)
    assert starts.shape == shapes.shape == (0, len(item.shape))


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (raw("bad", -1), "negative"),
        (raw("bad", -1, ItemKind.TENSOR), "negative"),
        (raw("bad", 1 << 60), "cut into"),
        (tensor("bad", (2,), of=(4, 4)), "dimensions"),
        (tensor("bad", (2,), of=(4,), at=(3,)), "outside"),
        (tensor("bad", (2,), of=(4,), at=(-1,)), "outside"),
        (tensor("bad", (-2, -3), of=(4, 4)), "outside"),
        (tensor("bad", (2,), of=(1 << 62,), at=(0,)), "2\\*\\*63"),
        (tensor("bad", (1 << 25, 1), of=(1 << 25, CHUNK_BYTES + 1), item_bytes=1), "cut into"),
        (ItemSpec("bad", ItemKind.TENSOR, "float32", (3,), (4,), (0,), 13), "multiple"),
        (ItemSpec("bad", ItemKind.TENSOR, "float32", (0,), (4,), (0,), 13), "multiple"),
    ],
)
def test_contradictions_are_named(item: ItemSpec, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"'bad'.*{problem}"):
        chunk_grid(item)
    with pytest.raises(InvalidInput, match="'bad'"):
        chunk_boxes(item)


def test_boxes_check_small_items_too() -> None:
    with pytest.raises(InvalidInput, match="outside"):
        chunk_boxes(tensor("bad", (2,), of=(2,), at=(1,)))
