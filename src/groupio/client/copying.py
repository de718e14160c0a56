"""The copy itself: the bytes of one wave from the caller's memory into the arena."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from groupio.client.values import Prepared
from groupio.plan.layout import Layout

PIECE_BYTES = 256 << 20
"""Between pieces of this size the copy looks whether it was called off.

Large on purpose: from about a third of the last-level cache on (120 MB of 300 here) memcpy writes
past the cache, which takes 50 ms a GB where pieces of 16 MiB take 80 (4 processes, 2 CPUs).
"""

_ITEMS_BETWEEN_LOOKS = 256

_GATHER_BYTES = 256 << 10
"""So much is gathered from small tensors at once, in a buffer that stays in the cache."""


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
    if prepared.pointers is not None:
        small = inside[prepared.pointers[inside] != 0]
        if not _copy_small(prepared.pointers, starts, ends, small, (lo, hi), base, called_off):
            return False
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


def _copy_small(
    pointers: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    items: npt.NDArray[np.int64],
    bounds: tuple[int, int],
    base: int,
    called_off: Callable[[], bool],
) -> bool:
    """Copy the parts of ``items`` within ``bounds``, those of equal size by one call.

    A call for each would take most of a second for a million of them.
    """
    begins: npt.NDArray[np.int64] = np.maximum(starts[items], bounds[0])
    sizes = np.minimum(ends[items], bounds[1]) - begins
    sources: npt.NDArray[np.int64] = pointers[items] + (begins - starts[items])
    targets: npt.NDArray[np.int64] = begins + base
    for size in np.unique(sizes).tolist():
        same = np.flatnonzero(sizes == size)
        step = max(_GATHER_BYTES // size, 1)
        for at in range(0, len(same), step):
            if called_off():
                return False
            some = same[at : at + step]
            to, into = _pieces(targets[some], size)
            come, out_of = _pieces(sources[some], size)
            into[to] = out_of[come]
    return True


def _pieces(
    addresses: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Rows of an array uint8[..., size] that are the memory at ``addresses``, and that array.

    The other rows of it are whatever else is in the memory of this process; nobody looks.
    """
    first = int(addresses.min())
    rows = addresses - first
    return rows, np.asarray(_Memory(first, int(rows.max()) + 1, size))


class _Memory:
    """Memory as an array in which each row starts one byte behind the one before."""

    def __init__(self, address: int, rows: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (rows, size),
            "strides": (1, 1),
            "typestr": "|u1",
            "version": 3,
        }
