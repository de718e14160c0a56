"""The copy itself: the bytes of one wave from the caller's memory into the arena."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from groupio.client.values import Prepared
from groupio.plan.layout import Layout

PIECE_BYTES = 256 << 20
"""Between pieces of this size the copy looks whether it was called off.

Large on purpose: from about a third of the last-level cache on (120 MB of 300 here) memcpy writes
past the cache, which takes 50 ms a GB where pieces of 16 MiB take 80 (4 processes, 2 CPUs).
"""

_ITEMS_BETWEEN_LOOKS = 256


def wave_bytes(layout: Layout, chunk_lo: int, chunk_hi: int) -> tuple[int, int]:
    """The virtual bytes ``lo <= v < hi`` that chunks ``chunk_lo <= c < chunk_hi`` cover."""
    if chunk_lo >= chunk_hi:
        return 0, 0
    last = chunk_hi - 1
    return int(layout.chunk_start[chunk_lo]), int(
        layout.chunk_start[last] + layout.chunk_length[last]
    )


def copy_range(
    prepared: Prepared,
    layout: Layout,
    lo: int,
    hi: int,
    address: int,
    called_off: Callable[[], bool],
) -> bool:
    """Copy what lies at virtual bytes ``lo <= v < hi`` to memory that starts at ``address``.

    Virtual byte ``lo`` goes to ``address``. Bytes between items are left as they are. Returns
    False, after the piece in work, once ``called_off`` does; what was copied by then stays.
    """
    starts = layout.item_start
    ends = starts + np.array([spec.nbytes for spec in prepared.specs], np.int64)
    inside = np.flatnonzero((starts < hi) & (ends > lo))
    rows = zip(
        inside.tolist(),
        np.maximum(starts[inside], lo).tolist(),
        np.minimum(ends[inside], hi).tolist(),
        starts[inside].tolist(),
        strict=True,
    )
    sources = prepared.sources
    base = address - lo
    since_look = _ITEMS_BETWEEN_LOOKS
    for item, begin, end, start in rows:
        source = sources[item]
        if source is None:
            continue
        since_look += 1
        if end - begin <= PIECE_BYTES and since_look < _ITEMS_BETWEEN_LOOKS:
            source.copy_range(begin - start, end - start, base + begin)
            continue
        since_look = 0
        while begin < end:
            if called_off():
                return False
            # Whole elements: the piece is a multiple of every item size up to 16 bytes but odd
            # ones, which the source cuts itself.
            stop = min(begin + PIECE_BYTES, end)
            source.copy_range(begin - start, stop - start, base + begin)
            begin = stop
    return not called_off()
