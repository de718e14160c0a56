"""Reading distribution inside one host: who reads which chunk for whom, through shared memory.

Every rank computes the same plan from what all of them want. A chunk that one rank wants is read
by it alone. A chunk that several want is read once, by one of them, into a *slot* of a shared
window, from where each takes it. Chunks that the same ranks want are one class; what a class has to
read goes to the ranks of the class that have the least to read so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from groupio.model import ChunkTable

ALIGN_BYTES = 64
"""Chunks in a slot start at multiples of this."""

_RANKS_AT_ONCE = 32
"""So many bits beside the number of a class, of which there are fewer than 2**31, fit 64 bits."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank reads for several, batch by batch, each of which fits into a slot.

    ``rows`` int64[n] of the chunk table, in the order of the files; ``positions`` int64[n], where
    in its slot a chunk goes; batch ``b`` is ``rows[starts[b]:starts[b + 1]]``; ``wanters``
    bool[ranks, batches] says who wants a chunk of it, the reader always does.
    """

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    wanters: npt.NDArray[np.bool_]

    @property
    def batches(self) -> int:
        """How many slots it fills, one after the other."""
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class Sharing:
    """The plan: ``shares[i]`` is read by rank ``i`` of the host, ``shared`` bool[n] marks the
    chunks in any share. ``loads`` int64[ranks]: the bytes each reads from the store."""

    shares: tuple[Share, ...]
    shared: npt.NDArray[np.bool_]
    loads: npt.NDArray[np.int64]


def share_reading(wanted: npt.NDArray[np.bool_], table: ChunkTable, slot_bytes: int) -> Sharing:
    """Plan the reading of the chunks ``wanted``, bool[ranks, chunks of the table].

    ``slot_bytes`` is at least the length of any chunk.
    """
    counts = wanted.sum(axis=0)
    shared = counts >= 2
    lengths = table.lengths
    loads = (wanted & ~shared) @ lengths
    rows = np.flatnonzero(shared)
    rows = rows[np.lexsort((table.offsets[rows], table.segments[rows]))]
    readers = np.empty(len(rows), np.int64)
    for members, at in _classes(wanted[:, rows]):
        spans = lengths[rows[at]]
        quotas = _level(loads[members], int(spans.sum()))
        middles = np.cumsum(spans) - spans / 2
        chosen = members[np.searchsorted(np.cumsum(quotas)[:-1], middles, side="right")]
        readers[at] = chosen
        np.add.at(loads, chosen, spans)
    shares = tuple(
        _share(rows[readers == reader], wanted, lengths, slot_bytes)
        for reader in range(len(wanted))
    )
    return Sharing(shares, shared, loads)


def _classes(
    wanted: npt.NDArray[np.bool_],
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Per set of ranks that want the same: the ranks, and the columns; small sets first, which
    have the least choice."""
    kinds = np.zeros(wanted.shape[1], np.int64)
    for first in range(0, len(wanted), _RANKS_AT_ONCE):
        for row in wanted[first : first + _RANKS_AT_ONCE]:
            kinds = kinds * 2 + row
        # Numbered anew from 0, so that the next ranks have room beside them.
        kinds = np.unique(kinds, return_inverse=True)[1].reshape(-1)
    order = np.argsort(kinds, kind="stable")
    ends = np.cumsum(np.bincount(kinds))
    columns = np.split(order, ends[:-1]) if len(ends) else []
    found = [(np.flatnonzero(wanted[:, at[0]]), at) for at in columns]
    return sorted(found, key=lambda one: (len(one[0]), one[0].tolist()))


def _level(loads: npt.NDArray[np.int64], amount: int) -> npt.NDArray[np.float64]:
    """How much of ``amount`` each gets, so that the lowest loads rise to one level like water."""
    ordered = np.sort(loads)
    levels = (amount + np.cumsum(ordered)) / np.arange(1, len(loads) + 1)
    # The lowest of these is the one at which those above it stay dry.
    level: npt.NDArray[np.float64] = np.maximum(levels.min() - loads, 0)
    return level


def _share(
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    lengths: npt.NDArray[np.int64],
    slot_bytes: int,
) -> Share:
    spans = -(-lengths[rows] // ALIGN_BYTES) * ALIGN_BYTES
    ends = np.cumsum(spans)
    # Where the next batch begins if one begins here.
    following = np.searchsorted(ends, ends - spans + slot_bytes, side="right")
    following = np.maximum(following, np.arange(1, len(rows) + 1)).tolist()
    starts = [0]
    while starts[-1] < len(rows):
        starts.append(following[starts[-1]])
    begins = np.array(starts, np.int64)
    firsts = begins[:-1]
    positions = ends - spans - np.repeat((ends - spans)[firsts], np.diff(begins))
    if len(firsts):
        wanters = np.logical_or.reduceat(wanted[:, rows], firsts, axis=1)
    else:
        wanters = np.zeros((len(wanted), 0), np.bool_)
    return Share(rows, positions, begins, wanters)
