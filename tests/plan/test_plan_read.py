"""What has to be read for a wanted box: all of it, nothing twice, no chunk too many."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_help import tensor

from groupio.errors import InvalidInput
from groupio.model import ItemSpec
from groupio.plan import chunks as chunks_module
from groupio.plan.chunks import chunk_boxes
from groupio.plan.read import Box, box_of, common, cover, overlap


@st.composite
def boxes(draw: Any, extent: tuple[int, ...]) -> Box:
    offsets, shape = [], []
    for size in extent:
        lo = draw(st.integers(0, size))
        offsets.append(lo)
        shape.append(draw(st.integers(0, size - lo)))
    return Box(tuple(offsets), tuple(shape))


EXTENTS = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, lo + size) for lo, size in zip(*box, strict=True))


@given(st.data())
def test_a_cover_takes_every_element_once(data: st.DataObject) -> None:
    extent = data.draw(EXTENTS)
    wanted = data.draw(boxes(extent))
    saved = data.draw(st.lists(boxes(extent), max_size=6))
    taken = np.zeros(extent, np.int64)
    found = cover(wanted, saved)
    for number, piece in found.pieces:
        assert piece.size
        assert common(piece, saved[number]) == piece == common(piece, wanted)
        taken[cells(piece)] += 1
    there = np.zeros(extent, bool)
    for box in saved:
        there[cells(box)] = True
    need = np.zeros(extent, bool)
    need[cells(wanted)] = True
    assert np.array_equal(taken, need & there)
    assert (found.hole is None) == bool(there[need].all())
    if found.hole is not None:
        assert found.hole.size
        assert not there[cells(found.hole)].any()
        assert need[cells(found.hole)].all()


def test_the_first_box_is_preferred() -> None:
    whole = Box((0, 0), (4, 4))
    assert cover(whole, [whole, whole]).pieces == ((0, whole),)
    found = cover(whole, [Box((1, 1), (2, 2)), whole])
    assert found.pieces[0] == (0, Box((1, 1), (2, 2)))
    assert [piece.size for number, piece in found.pieces if number == 1] == [4, 4, 2, 2]
    assert cover(Box((), ()), [Box((), ())]).pieces == ((0, Box((), ())),)
    assert cover(Box((), ()), []).hole == Box((), ())
    assert cover(Box((2,), (0,)), []) == ((), None)


@given(st.data())
def test_the_chunks_of_a_box_are_all_that_have_a_part_of_it(data: st.DataObject) -> None:
    extent = data.draw(EXTENTS)
    local = data.draw(boxes(extent))
    spec = tensor("t", local.shape, of=extent, at=local.offsets)
    wanted = data.draw(boxes(extent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks_module, "CHUNK_BYTES", data.draw(st.sampled_from([4, 8, 20, 48, 400])))
        check(spec, wanted)


@pytest.mark.parametrize("chunk_bytes", [4, 20, 48])
def test_the_chunks_of_a_box_in_three_dimensions(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", chunk_bytes)
    check(tensor("t", (3, 4, 5)), Box((1, 1, 1), (2, 2, 3)))


def check(spec: ItemSpec, wanted: Box) -> None:
    starts, shapes = chunk_boxes(spec)
    expected = {}
    for number in range(len(starts)):
        chunk = Box(tuple(starts[number].tolist()), tuple(shapes[number].tolist()))
        part = common(chunk, wanted)
        if part is not None:
            expected[number] = (chunk, part)
    found = overlap(spec, wanted)
    assert found.chunks.tolist() == list(expected)
    rows = zip(
        found.chunk_offsets.tolist(),
        found.chunk_shapes.tolist(),
        found.offsets.tolist(),
        found.shapes.tolist(),
        strict=True,
    )
    for (chunk, part), (at, size, lo, extent) in zip(expected.values(), rows, strict=True):
        assert (tuple(at), tuple(size)) == chunk
        assert (tuple(lo), tuple(extent)) == part


def test_a_few_rows_of_a_large_tensor_need_a_few_chunks() -> None:
    spec = tensor("w", (1 << 16, 1 << 14))  # 4 GiB: 64 rows of 64 KiB in each chunk
    found = overlap(spec, Box((100, 5), (64, 7)))
    assert found.chunks.tolist() == [1, 2]
    assert found.offsets.tolist() == [[100, 5], [128, 5]]
    assert found.shapes.tolist() == [[28, 7], [36, 7]]
    assert found.chunk_shapes.tolist() == [[64, 1 << 14]] * 2
    assert overlap(spec, box_of(spec)).chunks.tolist() == list(range(1024))


def test_boxes_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InvalidInput, match="2 dimensions"):
        overlap(tensor("w", (2, 2)), Box((0,), (1,)))
    with pytest.raises(InvalidInput, match="2 dimensions"):
        overlap(tensor("w", (2, 2)), Box((0, 0), (1,)))
    with pytest.raises(InvalidInput, match="read it whole"):
        overlap(tensor("w", (2,), item_bytes=5 << 20), Box((0,), (1,)))
    with pytest.raises(InvalidInput, match="outside"):
        overlap(tensor("w", (2,), of=(3,), at=(2,)), Box((0,), (1,)))
    assert prod(overlap(tensor("w", (0, 2)), Box((0, 0), (1, 1))).chunks.shape) == 0
