"""How chunks are cut into tasks, named by digest, and placed one after the other in a segment.

Functions on arrays only: who calls them when is the pipeline's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.agent.workers import BOUNCE_BYTES
from groupio.model import PACK_ITEM_BYTES, PAGE_BYTES

TASK_CHUNKS_MAX = 8192
"""More tiny chunks than this in one task would hold locks for long."""


def split_tasks(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut adjacent chunks into runs ``lo:hi`` that fit one bounce buffer wherever they lie.

    ``lengths`` int64[n] are bytes, each at most CHUNK_BYTES. At least one run, maybe empty.
    """
    cost = np.cumsum(lengths + PAGE_BYTES * _starts_group(lengths))
    room = BOUNCE_BYTES - PAGE_BYTES  # a cut makes one group more
    tasks = []
    lo, spent = 0, 0
    while lo < len(lengths):
        hi = int(np.searchsorted(cost, spent + room, side="right"))
        hi = max(min(hi, lo + TASK_CHUNKS_MAX), lo + 1)
        tasks.append((lo, hi))
        lo, spent = hi, int(cost[hi - 1])
    return tasks or [(0, 0)]


def digest_chunks(
    view: memoryview, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> list[bytes]:
    """The BLAKE3 digests of the pieces of ``view`` at ``starts``; the GIL is free in large ones."""
    ends = (starts + lengths).tolist()
    return [
        blake3(view[start:end]).digest() for start, end in zip(starts.tolist(), ends, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where chunks go, relative to where the first one starts.

    ``offsets`` int64[n]. Chunks that touch form a group: a large one alone, small ones in a run.
    ``first`` int64[g] is the group's first chunk and ``sizes`` int64[g] its bytes up to the next
    page, where the next group starts. ``nbytes`` is all of it.
    """

    offsets: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    nbytes: int


def place(lengths: npt.NDArray[np.int64]) -> Placement:
    """Place chunks of these lengths (at least one) one after the other."""
    first = np.flatnonzero(_starts_group(lengths))
    filled = np.add.reduceat(lengths, first)
    sizes = -(-filled // PAGE_BYTES) * PAGE_BYTES
    group_start = np.cumsum(sizes) - sizes
    before = np.cumsum(lengths) - lengths
    members = np.diff(np.append(first, len(lengths)))
    offsets = np.repeat(group_start - before[first], members) + before
    return Placement(offsets, first, sizes, int(sizes.sum()))


def _starts_group(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    large: npt.NDArray[np.bool_] = lengths >= PACK_ITEM_BYTES
    starts = large.copy()
    starts[1:] |= large[:-1]
    starts[:1] = True
    return starts
