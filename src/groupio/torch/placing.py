"""Locates the elements of a DTensor's local part in the whole tensor.

Which indexes of a dimension a rank has is found by placing them as torch places the elements: the
placements split the range of indexes one after another. Plain shards are a range again, uneven
and empty ones too. A strided shard (FSDP over tensor parallelism on the same dimension) is split
by the placement itself and may leave several ranges; the local part is then several boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from groupio.plan.read import Box

CACHED = 1 << 14
"""So many different tensors (shapes, meshes, placements) are remembered."""


class Piece(NamedTuple):
    """A box of the global tensor, and where its elements are in the local one."""

    box: Box
    local: tuple[slice, ...]


class _Range(NamedTuple):
    """``size`` indexes of the global tensor from ``start`` on, at ``at`` of the local one."""

    start: int
    size: int
    at: int


def is_placed(placement: Placement) -> bool:
    """Whether the placement says which elements a rank has."""
    return isinstance(placement, Replicate | Shard | _StridedShard)


def replicates(mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> bool:
    """Whether other ranks of the mesh hold the same elements."""
    return any(
        isinstance(placement, Replicate) and size > 1
        for placement, size in zip(placements, mesh_shape, strict=True)
    )


@lru_cache(CACHED)
def whole_piece(shape: tuple[int, ...]) -> Piece:
    """A tensor that is not distributed, as one piece."""
    return Piece(Box((0,) * len(shape), shape), ())


@lru_cache(CACHED)
def pieces_of(
    global_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """The shape of the local tensor at ``coordinate`` of the mesh, and the boxes it consists of.

    There is at least one box, an empty one inside of the tensor when the rank holds nothing.
    """
    ranges = []
    for dim, size in enumerate(global_shape):
        splits = [
            (placement, mesh_shape[axis], coordinate[axis])
            for axis, placement in enumerate(placements)
            if isinstance(placement, Shard | _StridedShard)
            and placement.dim % len(global_shape) == dim
        ]
        ranges.append(_ranges(size, splits))
    shape = tuple(sum(one.size for one in along) for along in ranges)
    if 0 in shape:
        # An item has to lie inside of its tensor, also when it has no elements.
        corner = tuple(
            min(along[0].start, n - m)
            for along, n, m in zip(ranges, global_shape, shape, strict=True)
        )
        return shape, (Piece(Box(corner, shape), ()),)
    pieces = []
    for one in product(*ranges):
        box = Box(tuple(r.start for r in one), tuple(r.size for r in one))
        pieces.append(Piece(box, tuple(slice(r.at, r.at + r.size) for r in one)))
    return shape, tuple(pieces)


def _ranges(size: int, splits: Sequence[tuple[Placement, int, int]]) -> list[_Range]:
    if any(isinstance(placement, _StridedShard) for placement, _, _ in splits):
        return _strided(size, splits)
    start, end = 0, size
    for _, count, number in splits:
        step = -(-(end - start) // count)
        start, end = min(start + step * number, end), min(start + step * (number + 1), end)
    return [_Range(start, end - start, 0)]


def _strided(size: int, splits: Sequence[tuple[Placement, int, int]]) -> list[_Range]:
    indexes = torch.arange(size, device="cpu")
    for placement, count, number in splits:
        # A placement splits its own dimension: the indexes become that one.
        wide = indexes.view((1,) * placement.dim + (-1,))  # type: ignore[attr-defined]
        shards, _ = placement._split_tensor(  # type: ignore[attr-defined]
            wide, count, with_padding=False, contiguous=False
        )
        indexes = shards[number].reshape(-1)
    if not len(indexes):
        return [_Range(size, 0, 0)]
    breaks = torch.nonzero(indexes[1:] != indexes[:-1] + 1).reshape(-1) + 1
    at = [0, *breaks.tolist(), len(indexes)]
    starts = indexes[at[:-1]].tolist()
    return [
        _Range(start, stop - begin, begin)
        for start, begin, stop in zip(starts, at[:-1], at[1:], strict=True)
    ]
