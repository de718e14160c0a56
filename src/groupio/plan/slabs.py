"""Equal bytes on several members: who hands over which part of them.

The chunks of all tensors that the holders share, one tensor after the other, are one long row,
and each holder takes an equal stretch of it. So all carry the same to within one chunk however
large the tensors are, the cuts lie on the chunk grid (the stored chunks are the same whatever the
number of holders), and most tensors have one or two givers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.model import ItemSpec
from groupio.plan.chunks import Cuts, cut_sizes, find_cuts

__all__ = ["SAMPLED_STEPS", "Box", "samples", "slabs"]

SAMPLED_STEPS = 16
"""A sample is this small a part of the chunks: each one's turn comes once in so many steps."""


class Box(NamedTuple):
    """A part of a tensor: its corner in global coordinates, and its extent."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def slabs(specs: Sequence[ItemSpec], holders: int, index: int) -> list[list[Box]]:
    """The boxes of each of ``specs`` that holder ``index`` of ``holders`` hands over.

    ``specs`` are the tensors as every holder has them; the boxes of all holders make up each of
    them, without overlap. A tensor is one to a few boxes of its holder, or none. Raises
    InvalidInput like :func:`groupio.plan.chunks.find_cuts`.
    """
    cuts = [find_cuts(spec) for spec in specs]
    lengths = [_unit_bytes(spec, cut) for spec, cut in zip(specs, cuts, strict=True)]
    ends = np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]))
    total = int(ends[-1]) if len(ends) else 0
    middles = 2 * ends - np.concatenate([np.empty(0, np.int64), *lengths])
    bounds = [2 * total * k // holders for k in (index, index + 1)]
    lo, hi = np.searchsorted(middles, bounds).tolist()
    shares = []
    first = 0
    for spec, cut, mine in zip(specs, cuts, lengths, strict=True):
        a, b = (min(max(at - first, 0), len(mine)) for at in (lo, hi))
        shares.append(_boxes(spec, cut, a, b, len(mine)))
        first += len(mine)
    return shares


def samples(specs: Sequence[ItemSpec], step: int) -> dict[int, Box]:
    """The chunks that are compared in this step: the number of the tensor, and the box.

    At most one of each tensor, which has to have bytes. Which ones follows from the names and
    ``step``: a tensor of 16 chunks and more always has one, smaller ones accordingly seldom, and
    there is always one at least, so that a drift of everything is found at once.
    """
    draws = [
        int.from_bytes(blake3(f"{step} {spec.name}".encode()).digest()[:8], "little")
        for spec in specs
    ]
    cuts = [find_cuts(spec) for spec in specs]
    units = [len(_unit_bytes(spec, cut)) for spec, cut in zip(specs, cuts, strict=True)]
    due = [i for i, draw in enumerate(draws) if draw % SAMPLED_STEPS < units[i]]
    if not due and specs:
        due = [draws.index(min(draws))]
    found = {}
    for i in due:
        at = draws[i] // SAMPLED_STEPS % units[i]
        found[i] = _boxes(specs[i], cuts[i], at, at + 1, units[i])[0]
    return found


def _unit_bytes(spec: ItemSpec, cuts: Cuts) -> npt.NDArray[np.int64]:
    """Bytes of the pieces that are handed over whole: chunks, unless elements are cut."""
    if cuts.dim == len(spec.shape):
        return np.array([spec.nbytes], np.int64)
    return cut_sizes(cuts)


def _boxes(spec: ItemSpec, cuts: Cuts, lo: int, hi: int, units: int) -> list[Box]:
    """Chunks ``lo <= c < hi`` of ``spec``, which has ``units``, as few boxes."""
    if lo == hi:
        return []
    if hi - lo == units:
        return [Box(spec.offsets, spec.shape)]
    grid = (*spec.shape[: cuts.dim], cuts.blocks)
    boxes = []
    for ranges in _ranges(grid, lo, hi):
        offsets, shape = list(spec.offsets), list(spec.shape)
        for dim, (start, stop) in enumerate(ranges[:-1]):
            offsets[dim] += start
            shape[dim] = stop - start
        begin, end = (_edge(cuts, block) for block in ranges[-1])
        offsets[cuts.dim], shape[cuts.dim] = begin, end - begin
        boxes.append(Box(tuple(offsets), tuple(shape)))
    return boxes


def _edge(cuts: Cuts, block: int) -> int:
    """Where block ``block`` of the cut dimension begins, in global coordinates."""
    line = (cuts.start // cuts.step + block) * cuts.step
    return min(max(line, cuts.start), cuts.start + cuts.size)


def _ranges(grid: tuple[int, ...], lo: int, hi: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Places ``lo <= p < hi`` of a row-major grid as boxes, each one index range per dimension."""
    if len(grid) == 1:
        yield ((lo, hi),)
        return
    inner = prod(grid[1:])
    first, last = lo // inner, (hi - 1) // inner
    if first == last:
        for rest in _ranges(grid[1:], lo - first * inner, hi - first * inner):
            yield ((first, first + 1), *rest)
        return
    whole = (-(-lo // inner), hi // inner)
    if first < whole[0]:
        for rest in _ranges(grid[1:], lo - first * inner, inner):
            yield ((first, first + 1), *rest)
    if whole[0] < whole[1]:
        yield (whole, *((0, size) for size in grid[1:]))
    if whole[1] <= last:
        for rest in _ranges(grid[1:], 0, hi - last * inner):
            yield ((last, last + 1), *rest)
