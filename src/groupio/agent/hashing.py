"""Cuts chunks into tasks and names them by digest.

Functions on arrays only: who calls them when is the pipeline's business.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.agent.workers import BOUNCE_BYTES
from groupio.format.frames import LOCAL_HEADER
from groupio.model import PAGE_BYTES

MANY_CHUNKS = 256
MANY_CHUNKS_BYTES = 4096
"""So many chunks, of so few bytes on average, are handled as one where other members have them."""

TASK_CHUNKS_MAX = 8192
"""More tiny chunks than this in one task would hold locks for long."""


def split_tasks(
    lengths: npt.NDArray[np.int64], items: npt.NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Cut adjacent chunks into ``lo:hi`` that fit one bounce buffer, whichever of them are new.

    ``lengths`` int64[n] are bytes, each at most CHUNK_BYTES; ``items`` int64[n] say whose they
    are. An item is cut only where it does not fit into a task of its own, since a run of its
    chunks ends there. At least one ``lo:hi``, maybe empty.
    """
    cost = np.cumsum(lengths + len(LOCAL_HEADER))
    room = BOUNCE_BYTES - PAGE_BYTES
    item_starts = np.flatnonzero(np.diff(items, prepend=-1))
    tasks = []
    lo, spent = 0, 0
    while lo < len(lengths):
        hi = int(np.searchsorted(cost, spent + room, side="right"))
        hi = max(min(hi, lo + TASK_CHUNKS_MAX), lo + 1)
        if hi < len(lengths):
            # The start of the item that the next task would begin with.
            start = int(item_starts[np.searchsorted(item_starts, hi, side="right") - 1])
            hi = start if start > lo else hi
        tasks.append((lo, hi))
        lo, spent = hi, int(cost[hi - 1])
    return tasks or [(0, 0)]


def are_many(lengths: npt.NDArray[np.int64]) -> bool:
    """Whether it takes longer to handle these chunks one by one than to hash their bytes."""
    return len(lengths) >= MANY_CHUNKS and int(lengths.sum()) < MANY_CHUNKS_BYTES * len(lengths)


def digest_of_all(
    view: memoryview, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> bytes:
    """One digest of all these ascending chunks: equal ones are the same chunks, one by one."""
    hasher = blake3(lengths.tobytes())
    first, end = int(starts[0]), int(starts[-1] + lengths[-1])
    if int(lengths.sum()) == end - first:
        hasher.update(view[first:end])
    else:
        ends = (starts + lengths).tolist()
        hasher.update(b"".join([view[lo:hi] for lo, hi in zip(starts.tolist(), ends, strict=True)]))
    return hasher.digest()


def digest_chunks(
    view: memoryview, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> list[bytes]:
    """The BLAKE3 digests of the pieces of ``view`` at ``starts``; the GIL is free in large ones."""
    ends = (starts + lengths).tolist()
    return [
        blake3(view[start:end]).digest() for start, end in zip(starts.tolist(), ends, strict=True)
    ]
