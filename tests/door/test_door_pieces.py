"""Pieces of tensors: they cover each box exactly, and what torch would read in them is right."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupio.door.pieces import Finder, Piece
from groupio.format.frames import Frames, Kind
from groupio.model import ChunkTable, ItemKind, ItemSpec
from groupio.plan.chunks import chunk_grid
from groupio.plan.frames import Runs, frame_table

LEAD = 38


def spec_of(shape: tuple[int, ...], whole: tuple[int, ...], at: tuple[int, ...]) -> ItemSpec:
    return ItemSpec("x", ItemKind.TENSOR, "int32", shape, whole, at, 4 * prod(shape))


class Store:
    """Segments of numbers: a chunk's elements are those of the tensor that it is cut from."""

    def __init__(self) -> None:
        self.data: list[np.ndarray[Any, Any]] = []  # int32, one array per segment
        self.frames: dict[int, Frames] = {}
        self.rows: list[tuple[int, int, int]] = []  # segment, offset, length

    def add(
        self, spec: ItemSpec, values: np.ndarray[Any, Any], chunks: list[int], run: int
    ) -> None:
        """A segment with these chunks of the item, adjacent ones in runs of at most ``run``."""
        sizes = chunk_grid(spec)
        starts = np.cumsum(sizes) - sizes
        at, parts, runs = 4096, [], []
        before = -2
        for chunk in chunks:
            if chunk != before + 1 or runs[-1][3] == run:
                gap = -(-(at + LEAD) // 4096) * 4096 - at
                parts.append(np.zeros(gap // 4, np.int32))
                at += gap
                runs.append([0, 0, chunk, 0, at])
            runs[-1][3] += 1
            first, size = starts[chunk] // 4, sizes[chunk] // 4
            parts.append(values.reshape(-1)[first : first + size])
            self.rows.append((len(self.data), at, int(sizes[chunk])))
            at += int(sizes[chunk])
            before = chunk
        table = frame_table([Runs([spec], np.array(runs, np.int64).reshape(-1, 5))])
        self.frames[len(self.data)] = Frames(table, at)
        self.data.append(np.concatenate([np.zeros(1024, np.int32), *parts]))

    def finder(self, *, framed: bool = True) -> Finder:
        segments, offsets, lengths = np.array(self.rows, np.int64).reshape(-1, 3).T
        digests = np.zeros((len(self.rows), 32), np.uint8)
        table = ChunkTable(digests, lengths, segments.astype(np.int32), offsets)
        names = [SimpleNamespace(name=f"{number}") for number in range(len(self.data))]
        manifest: Any = SimpleNamespace(chunks=table, segments=names)
        return Finder(manifest, self.frames if framed else {})

    def read(self, piece: Piece) -> np.ndarray[Any, Any]:
        """What torch reads of a piece: the row's tensor, narrowed."""
        sizes = piece.box[1]
        if piece.place is None:
            parts = [
                self.data[segment][offset // 4 : (offset + length) // 4]
                for segment, offset, length in map(self.rows.__getitem__, piece.rows)
            ]
            return np.concatenate(parts).reshape(sizes)
        path, offset, length = piece.place
        segment = int(path.rpartition("/")[2])
        frames = self.frames[segment]
        rows = [row for row in range(len(frames.table)) if frames.slice_of(row) == (offset, length)]
        kind: Kind = frames.table.kind_list[frames.table.kinds[rows[0]]]
        start = (offset + LEAD) // 4 + kind.skip
        tensor = self.data[segment][start : start + prod(kind.shape)].reshape(kind.shape)
        return tensor[tuple(slice(size) for size in sizes)]


def check(store: Store, spec: ItemSpec, values: np.ndarray[Any, Any], pieces: list[Piece]) -> None:
    """Together the pieces are ``values``, each element once."""
    found = np.full(spec.shape, -1, np.int64)
    times = np.zeros(spec.shape, np.int64)
    for piece in pieces:
        corner = [at - origin for at, origin in zip(piece.box[0], spec.offsets, strict=True)]
        where = tuple(slice(a, a + n) for a, n in zip(corner, piece.box[1], strict=True))
        found[where] = store.read(piece)
        times[where] += 1
    assert (times == 1).all()
    assert np.array_equal(found, values)


SHAPES = [
    ((2500, 1100), (2500, 1100), (0, 0)),
    ((2000, 1100), (5000, 1100), (777, 0)),
    ((3, 2, 700_000), (3, 2, 700_000), (0, 0, 0)),
    ((5, 3, 300, 1000), (5, 3, 900, 1000), (0, 0, 250, 0)),
    ((3, 2_500_000), (3, 2_500_000), (0, 0)),
    ((7,), (7,), (0,)),
    ((), (), ()),
]


@pytest.mark.parametrize(("shape", "whole", "at"), SHAPES)
def test_first_save_is_read_where_it_lies(shape: Any, whole: Any, at: Any) -> None:
    spec = spec_of(shape, whole, at)
    values = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    store = Store()
    count = len(chunk_grid(spec))
    store.add(spec, values, list(range(count)), 4)
    pieces = store.finder().pieces(spec, list(range(count)), "int32")
    check(store, spec, values, pieces)
    assert all(piece.place is not None for piece in pieces)
    if len(shape) < 3:
        assert len(pieces) == -(-count // 4) or shape == (3, 2_500_000)
    copied = store.finder(framed=False).pieces(spec, list(range(count)), "int32")
    assert all(piece.place is None for piece in copied)
    check(store, spec, values, copied)
    assert store.finder().pieces(spec, list(range(count)), "float32")[0].place is None


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_chunks_spread_over_segments(data: st.DataObject) -> None:
    shape, whole, at = data.draw(st.sampled_from(SHAPES[:5]))
    spec = spec_of(shape, whole, at)
    values = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    count = len(chunk_grid(spec))
    homes = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    store = Store()
    rows = [0] * count
    for segment in range(3):
        chunks = [chunk for chunk in range(count) if homes[chunk] == segment]
        for number, chunk in enumerate(chunks, len(store.rows)):
            rows[chunk] = number
        store.add(spec, values, chunks, data.draw(st.integers(1, 5)))
    pieces = store.finder().pieces(spec, rows, "int32")
    assert all(piece.place is not None for piece in pieces)
    check(store, spec, values, pieces)


def test_equal_bytes_of_another_shape_are_copied_unless_rows_agree() -> None:
    values = np.arange(6000, dtype=np.int32)
    store = Store()
    saved = spec_of((60, 100), (60, 100), (0, 0))
    store.add(saved, values, [0], 4)
    finder = store.finder()
    for shape, fits in (
        ((60, 100), True),
        ((100, 60), False),
        ((6000,), False),
        ((30, 200), False),
    ):
        spec = spec_of(shape, shape, (0,) * len(shape))
        piece = finder.pieces(spec, [0], "int32")[0]
        assert (piece.place is not None) == fits, shape
        assert np.array_equal(store.read(piece).reshape(-1), values)
    assert finder.pieces(spec_of((0, 3), (0, 3), (0, 0)), [], "int32") == []
