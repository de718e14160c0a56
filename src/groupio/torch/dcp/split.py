"""Divides tensors that several ranks hold whole, so that all ranks carry equal bytes.

Tensors with the same holders stand in one long row, which is cut once per holder. So there are few
cuts however many tensors there are, and almost every tensor is handed over in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

UNIT_BYTES = 256 << 10
"""Cuts fall between units of at most this size: ranks carry equal bytes to within one."""

SAMPLE_BYTES = 64 << 10
SAMPLE_PART = 256
"""So much of a divided tensor is compared between its holders: one part in so many, at most
SAMPLE_BYTES."""


class Box(NamedTuple):
    """A part of a tensor in its global coordinates."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Shared(NamedTuple):
    """A box of a tensor that all of ``holders`` (ranks, ascending) have."""

    box: Box
    itemsize: int
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.box.sizes) * self.itemsize


def divide(tensors: Sequence[Shared], loads: Sequence[int]) -> list[list[tuple[int, Box]]]:
    """Who hands over which boxes of each tensor: ``(rank, box)``, which together make it up.

    ``loads[r]`` are the bytes that rank ``r`` hands over besides. Ranks with fewer get more, so
    that the sums are equal to within a unit, as far as the holders allow it. The same arguments
    give the same answer everywhere.
    """
    carried = list(loads)
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        rows.setdefault(tensor.holders, []).append(number)
    given: list[list[tuple[int, Box]]] = [[] for _ in tensors]
    # Few holders first: they have the least choice.
    for holders, numbers in sorted(rows.items(), key=lambda row: (len(row[0]), row[0])):
        total = sum(tensors[number].nbytes for number in numbers)
        shares = _fill([carried[rank] for rank in holders], total)
        ends = _sums(shares, total)
        at = 0
        for number in numbers:
            tensor = tensors[number]
            given[number] = [
                (holders[index], box) for index, box in _cut(tensor, [end - at for end in ends])
            ]
            at += tensor.nbytes
        for rank, share in zip(holders, shares, strict=True):
            carried[rank] += round(share)
    return given


def sample_box(box: Box, itemsize: int) -> Box:
    """The part of ``box`` that its holders compare: as many rows as fit, from the middle."""
    budget = max(min(SAMPLE_BYTES // itemsize, prod(box.sizes) // SAMPLE_PART), 1)
    offsets, sizes = [], []
    for offset, size in zip(*box, strict=True):
        taken = min(size, budget)
        budget = budget // taken if taken else budget
        offsets.append(offset + (size - taken) // 2)
        sizes.append(taken)
    return Box(tuple(offsets), tuple(sizes))


def _fill(loads: Sequence[int], total: int) -> list[float]:
    """How ``total`` is poured over vessels filled to ``loads``, to one level if there is enough."""
    heights = sorted(loads)
    level, left = float(heights[0]), float(total)
    for count, height in enumerate([*heights[1:], None], start=1):
        room = left if height is None else (height - level) * count
        if room >= left:
            level += left / count
            break
        level, left = float(height or 0), left - room
    return [max(level - load, 0.0) for load in loads]


def _sums(shares: Sequence[float], total: int) -> list[int]:
    """Where each share ends; the last one at ``total``."""
    ends, at = [], 0.0
    for share in shares:
        at += share
        ends.append(round(at))
    ends[-1] = total
    return ends


def _cut(tensor: Shared, ends: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """The boxes of a tensor between the bytes ``ends``, with the number of the stretch."""
    sizes = tensor.box.sizes
    dim, unit = 0, prod(sizes[1:]) * tensor.itemsize
    while unit > UNIT_BYTES:
        dim += 1
        unit = unit // sizes[dim]
    grid = sizes[: dim + 1] or (1,)
    units = prod(grid)
    start = 0
    for index, end in enumerate(ends):
        stop = min(max(round(end / unit), start), units)
        if index == len(ends) - 1:
            stop = units
        for corner, shape in _boxes(grid, start, stop):
            yield index, _placed(tensor.box, corner, shape)
        start = stop


def _placed(box: Box, corner: Sequence[int], shape: Sequence[int]) -> Box:
    """A box of whole units in the coordinates of the tensor."""
    known = len(corner) if box.sizes else 0
    offsets = [lo + at for lo, at in zip(box.offsets, corner, strict=False)]
    return Box(
        (*offsets, *box.offsets[known:]),
        (*shape[:known], *box.sizes[known:]),
    )


def _boxes(
    grid: tuple[int, ...], lo: int, hi: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Places ``lo <= p < hi`` of a row-major grid as boxes: corner and shape of each."""
    if lo >= hi:
        return
    if len(grid) == 1:
        yield (lo,), (hi - lo,)
        return
    inner = prod(grid[1:])
    first, last = -(-lo // inner), hi // inner
    if first > last:  # within one row
        row = last * inner
        for corner, shape in _boxes(grid[1:], lo - row, hi - row):
            yield (last, *corner), (1, *shape)
        return
    if lo < first * inner:
        for corner, shape in _boxes(grid[1:], lo - (first - 1) * inner, inner):
            yield (first - 1, *corner), (1, *shape)
    if first < last:
        yield (first, *(0 for _ in grid[1:])), (last - first, *grid[1:])
    if last * inner < hi:
        for corner, shape in _boxes(grid[1:], 0, hi - last * inner):
            yield (last, *corner), (1, *shape)
