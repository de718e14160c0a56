"""Finds the saved chunks that hold a wanted box of a tensor, and which part of each.

Boxes are in the *global* coordinates of the tensor. What a rank wants on loading need not be what
any rank saved: :func:`cover` says which saved boxes give which parts of it, :func:`overlap` which
chunks of one saved box have to be read for such a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import ItemSpec
from groupio.plan.chunks import Cuts, find_cuts


class Box(NamedTuple):
    """A box of a tensor: its corner and its extent, one number per dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class Cover(NamedTuple):
    """How saved boxes give a wanted one: ``pieces`` are disjoint, each with the number of the
    saved box that has it; ``hole`` is a part that no saved box has, or None."""

    pieces: tuple[tuple[int, Box], ...]
    hole: Box | None


class Overlap(NamedTuple):
    """The chunks of one item that intersect a box, in the order of the item's buffer.

    ``chunks`` int64[n] are their numbers; the other arrays are int64[n, ndim]: where the wanted
    part of each chunk starts and how large it is, and the same of the whole chunk.
    """

    chunks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int64]
    chunk_offsets: npt.NDArray[np.int64]
    chunk_shapes: npt.NDArray[np.int64]


def box_of(spec: ItemSpec) -> Box:
    """The box that an item holds."""
    return Box(spec.offsets, spec.shape)


def common(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common; None when that is nothing."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    shape = tuple(
        min(a + n, b + m) - lo for a, n, b, m, lo in zip(*one, *other, offsets, strict=True)
    )
    return Box(offsets, shape) if all(size > 0 for size in shape) else None


def cover(wanted: Box, saved: Sequence[Box]) -> Cover:
    """Parts of ``saved``, the first ones preferred, that together are ``wanted``.

    Saved boxes may overlap or be equal: no element is taken twice. An empty box needs nothing.
    """
    pieces: list[tuple[int, Box]] = []
    left = [wanted] if wanted.size else []
    for number, box in enumerate(saved):
        if not left:
            break
        rest: list[Box] = []
        for need in left:
            part = common(need, box)
            if part is None:
                rest.append(need)
            else:
                pieces.append((number, part))
                rest += _without(need, part)
        left = rest
    return Cover(tuple(pieces), left[0] if left else None)


def overlap(spec: ItemSpec, wanted: Box) -> Overlap:
    """The chunks of the tensor ``spec`` that have elements of ``wanted``, and which ones.

    InvalidInput when the spec contradicts itself (see :func:`groupio.plan.chunks.find_cuts`), when
    the box has another number of dimensions, and when single elements are larger than a chunk:
    such items are read whole.
    """
    ndim = len(spec.shape)
    if len(wanted.offsets) != ndim or len(wanted.shape) != ndim:
        raise InvalidInput(
            f"item {spec.name!r} has {ndim} dimensions, the wanted box {tuple(wanted)} has others"
        )
    cuts = find_cuts(spec)
    if cuts.dim == ndim and cuts.n_chunks > 1:
        raise InvalidInput(
            f"item {spec.name!r} has elements that are larger than a chunk; read it whole"
        )
    part = common(box_of(spec), wanted)
    if part is None or not cuts.n_chunks:
        nothing = np.empty((0, ndim), np.int64)
        return Overlap(np.empty(0, np.int64), nothing, nothing, nothing, nothing)
    if cuts.n_chunks == 1:
        chunks, starts, ends = _only_chunk(spec)
    else:
        chunks, starts, ends = _chunks_in(spec, cuts, part)
    lo = np.array(part.offsets, np.int64)
    first = np.maximum(starts, lo)
    last = np.minimum(ends, lo + np.array(part.shape, np.int64))
    return Overlap(chunks, first, last - first, starts, ends - starts)


_Chunks = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Numbers of chunks, and the corners where each starts and ends."""


def _only_chunk(spec: ItemSpec) -> _Chunks:
    start = np.array([spec.offsets], np.int64)
    return np.zeros(1, np.int64), start, start + np.array([spec.shape], np.int64)


def _chunks_in(spec: ItemSpec, cuts: Cuts, part: Box) -> _Chunks:
    """The chunks that have elements of ``part``, which lies in the item's box."""
    dim = cuts.dim
    first_line = cuts.start // cuts.step
    lo, size = part.offsets[dim], part.shape[dim]
    blocks = np.arange(lo // cuts.step, (lo + size - 1) // cuts.step + 1, dtype=np.int64)
    # Each dimension outside of the cut one is cut at every index.
    ranges = [
        np.arange(at - corner, at - corner + count, dtype=np.int64)
        for at, count, corner in zip(part.offsets, part.shape, spec.offsets, strict=True)
    ][:dim]
    grid = np.meshgrid(*ranges, blocks, indexing="ij")
    outer, block = [axis.reshape(-1) for axis in grid[:-1]], grid[-1].reshape(-1)
    number = np.zeros(len(block), np.int64)
    for axis, extent in zip(outer, spec.shape, strict=False):
        number = number * extent + axis
    starts = np.tile(np.array(spec.offsets, np.int64), (len(block), 1))
    ends = starts + np.array(spec.shape, np.int64)
    for d, axis in enumerate(outer):
        starts[:, d] += axis
        ends[:, d] = starts[:, d] + 1
    edges = cuts.start, cuts.start + cuts.size
    starts[:, dim] = np.clip(block * cuts.step, *edges)
    ends[:, dim] = np.clip((block + 1) * cuts.step, *edges)
    return number * cuts.blocks + block - first_line, starts, ends


def _without(box: Box, part: Box) -> list[Box]:
    """``box`` without ``part``, which lies in it: at most two boxes per dimension."""
    left = []
    offsets, shape = list(box.offsets), list(box.shape)
    for d, (lo, size) in enumerate(zip(*part, strict=True)):
        end = offsets[d] + shape[d]
        for start, stop in ((offsets[d], lo), (lo + size, end)):
            if stop > start:
                left.append(
                    Box(
                        (*offsets[:d], start, *offsets[d + 1 :]),
                        (*shape[:d], stop - start, *shape[d + 1 :]),
                    )
                )
        offsets[d], shape[d] = lo, size
    return left
