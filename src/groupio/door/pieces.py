"""Finds the stretches of segments that are pieces of a tensor which torch can read in place.

A *piece* is a box of a tensor whose chunks follow each other in one segment and start where a row
of the segment's frames makes a tensor readable. What has no fitting row is to be copied.

Reading a piece, torch builds the row's tensor and takes from it the leading box of the piece's
size: so the row's tensor may reach further, but has to have the same dtype, and the same strides
in all dimensions in which the piece has more than one index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.format.frames import DTYPE_BYTES, Frames, Kind
from groupio.format.manifest import ManifestReader
from groupio.model import ChunkTable, ItemSpec
from groupio.plan.chunks import cut_edges, cut_sizes, find_cuts

RUN_BYTES = 16 << 20
"""A copied piece has at most this many bytes."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole tensor, and sizes."""


class Piece(NamedTuple):
    """A box of a tensor that lies in one file.

    ``place`` is the archive in a segment: the path from inside the door, offset, length. None
    when the chunks ``rows`` of the epoch's table are to be copied.
    """

    box: Box
    place: tuple[str, int, int] | None
    rows: tuple[int, ...] = ()


class _Index:
    """The frames of an epoch's segments, found by chunk.

    The rows that start at chunk ``c`` of the epoch's table are ``first[c] <= row < last[c]``. Row
    ``r`` is the archive ``offsets[r]``, ``lengths[r]`` of segment ``segments[r]``, and its tensor
    is ``kinds[r]``.
    """

    def __init__(self, table: ChunkTable, frames: Mapping[int, Frames]) -> None:
        first = np.zeros(len(table), np.int64)
        last = np.zeros(len(table), np.int64)
        self.segments: list[int] = []
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.kinds: list[Kind] = []
        for segment, found in sorted(frames.items()):
            rows = found.table
            order = np.argsort(rows.chunk_offsets, kind="stable")
            ascending = rows.chunk_offsets[order]
            chunks = np.flatnonzero(table.segments == segment)
            at = table.offsets[chunks]
            first[chunks] = len(self.segments) + np.searchsorted(ascending, at, "left")
            last[chunks] = len(self.segments) + np.searchsorted(ascending, at, "right")
            self.segments += [segment] * len(order)
            self.offsets += found.slice_offsets[order].tolist()
            self.lengths += found.slice_lengths[order].tolist()
            self.kinds += map(rows.kind_list.__getitem__, rows.kinds[order].tolist())
        self.first: list[int] = first.tolist()
        self.last: list[int] = last.tolist()


class Finder:
    """Finds the pieces of boxes of tensors of one epoch."""

    def __init__(self, manifest: ManifestReader, frames: Mapping[int, Frames]) -> None:
        """``frames``: of the segments that have some, by their index in the epoch."""
        table = manifest.chunks
        self._index = _Index(table, frames)
        self._paths = [f"../../segments/{segment.name}" for segment in manifest.segments]
        self._segments = table.segments
        self._offsets = table.offsets
        self._ends = table.offsets + table.lengths
        self._fits: dict[tuple[str, tuple[int, ...], Kind], bool] = {}

    def pieces(self, spec: ItemSpec, rows: Sequence[int], dtype: str) -> list[Piece]:
        """The pieces that make up the box of ``spec``, whose chunks are ``rows`` of the table.

        ``dtype`` is how torch is to see it: that of ``spec``, or one of the same size. A box
        without elements has no piece.
        """
        if len(rows) != 1:
            return self._many(spec, rows, dtype) if rows else []
        place = self.place(rows[0], dtype, spec.shape)
        box = (spec.offsets, spec.shape)
        return [Piece(box, place, () if place else (rows[0],))]

    def place(self, row: int, dtype: str, shape: tuple[int, ...]) -> tuple[str, int, int] | None:
        """The archive in which chunk ``row`` starts a tensor with a leading box of ``shape``."""
        index = self._index
        for at in range(index.first[row], index.last[row]):
            kind = index.kinds[at]
            if (kind.shape == shape and kind.dtype == dtype) or self._fit(dtype, shape, kind):
                return self._archive(at)
        return None

    def _archive(self, at: int) -> tuple[str, int, int]:
        index = self._index
        return self._paths[index.segments[at]], index.offsets[at], index.lengths[at]

    def _fit(self, dtype: str, shape: tuple[int, ...], kind: Kind) -> bool:
        key = (dtype, shape, kind)
        fits = self._fits.get(key)
        if fits is None:
            fits = self._fits[key] = _fits(dtype, shape, kind)
        return fits

    def _many(self, spec: ItemSpec, rows: Sequence[int], dtype: str) -> list[Piece]:
        grid = _Grid(spec)
        stretches = self._stretches(np.array(rows, np.int64))
        pieces: list[Piece] = []
        missing: list[int] = []  # chunks that are to be copied, adjacent ones
        at, stretch = 0, 0
        while at < len(rows):
            while stretches[stretch + 1] <= at:
                stretch += 1
            piece = self._longest(grid, rows, at, stretches[stretch + 1] - at, dtype)
            if piece is None:
                missing.append(at)
                at += 1
                continue
            pieces += _copied(grid, rows, missing)
            missing = []
            pieces.append(piece[0])
            at += piece[1]
        return pieces + _copied(grid, rows, missing)

    def _stretches(self, refs: npt.NDArray[np.int64]) -> list[int]:
        """Where chunks start that do not directly follow the one before, and the end."""
        apart = (self._segments[refs[1:]] != self._segments[refs[:-1]]) | (
            self._offsets[refs[1:]] != self._ends[refs[:-1]]
        )
        return [0, *(np.flatnonzero(apart) + 1).tolist(), len(refs)]

    def _longest(
        self, grid: _Grid, rows: Sequence[int], at: int, most: int, dtype: str
    ) -> tuple[Piece, int] | None:
        """The largest piece that starts at chunk ``at`` and has at most ``most`` chunks."""
        best: tuple[Piece, int] | None = None
        for number in range(self._index.first[rows[at]], self._index.last[rows[at]]):
            kind = self._index.kinds[number]
            if kind.dtype != dtype:
                continue
            count = grid.within(at, prod(kind.shape) * DTYPE_BYTES[dtype], most)
            if not count:
                continue
            box, count = grid.box(at, count)
            if (best is None or count > best[1]) and self._fit(dtype, box[1], kind):
                best = Piece(box, self._archive(number)), count
        return best


class _Grid:
    """The chunks of one item: ``outer`` times ``blocks`` pieces of one dimension."""

    def __init__(self, spec: ItemSpec) -> None:
        self.spec = spec
        self.cuts = cuts = find_cuts(spec)
        self._sizes = cut_sizes(cuts).tolist()
        self._edges = cut_edges(cuts).tolist()

    def within(self, at: int, nbytes: int, most: int) -> int:
        """How many chunks from ``at`` on fit into ``nbytes``, at most ``most``."""
        count = 0
        for size in self._sizes[at : at + most]:
            nbytes -= size
            if nbytes < 0:
                break
            count += 1
        return count

    def box(self, at: int, count: int) -> tuple[Box, int]:
        """The box that starts at chunk ``at`` and has as many of ``count`` chunks as can be.

        From inside an outer index: up to its end. From its start: whole outer indexes along the
        innermost outer dimension, or a part of one.
        """
        cuts, spec = self.cuts, self.spec
        dim, blocks = cuts.dim, cuts.blocks
        index, block = divmod(at, blocks)
        outer = [int(i) for i in np.unravel_index(index, spec.shape[:dim])] if dim else []
        whole = 1
        if block or count < blocks:
            count = min(count, blocks - block)
        else:
            whole = min(count // blocks, spec.shape[dim - 1] - outer[-1]) if dim else 1
            count = whole * blocks
        end = block + min(count, blocks - block)
        offsets = [spec.offsets[d] + i for d, i in enumerate(outer)] + list(spec.offsets[dim:])
        sizes = [1] * dim + list(spec.shape[dim:])
        if dim:
            sizes[dim - 1] = whole
        if dim < len(spec.shape):
            offsets[dim] = self._edges[block]
            sizes[dim] = self._edges[end] - self._edges[block]
        return (tuple(offsets), tuple(sizes)), count


def _copied(grid: _Grid, rows: Sequence[int], missing: Sequence[int]) -> list[Piece]:
    """Pieces for adjacent chunks that have to be copied."""
    pieces: list[Piece] = []
    done = 0
    while done < len(missing):
        at = missing[done]
        most = max(grid.within(at, RUN_BYTES, len(missing) - done), 1)
        box, count = grid.box(at, most)
        pieces.append(Piece(box, None, tuple(rows[at : at + count])))
        done += count
    return pieces


def _fits(dtype: str, shape: tuple[int, ...], kind: Kind) -> bool:
    """Whether the tensor of ``kind`` has a leading box of ``shape`` with its memory in a row."""
    if kind.dtype != dtype or len(kind.shape) != len(shape):
        return False
    if any(have < want for have, want in zip(kind.shape, shape, strict=True)):
        return False
    return all(
        want == 1 or have == stride
        for want, have, stride in zip(shape, _strides(kind.shape), _strides(shape), strict=True)
    )


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[d + 1 :]) for d in range(len(shape))]
