"""From a flush of splittable bytes to one of whole chunks.

Where a holder set is split, a node takes whole chunks until it has its share, and at most one chunk
too much. The sets that are split and the nodes they share form trees; they are filled from the
leaves, and what is left of a set goes to the node towards the root. So every node gets such a chunk
at most once, and no link carries more than its share and the longest chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.plan.moves import Floats, Fluid

Ints = npt.NDArray[np.int64]

_ROUNDING = 1e-9  # a share that lacks only this part of all bytes is complete


class Rows(NamedTuple):
    """Row ``i``: ``counts[i]`` chunks of class ``classes[i]`` that node ``sources[i]`` reads from
    its memory and node ``writers[i]`` writes. All int64."""

    classes: Ints
    sources: Ints
    writers: Ints
    counts: Ints

    def picked(self, rows: npt.NDArray[np.bool_] | Ints) -> Rows:
        """Some of the rows."""
        return Rows(*(column[rows] for column in self))

    def written_by(self, writer: int) -> Rows:
        """The same rows, all written by this node."""
        return self._replace(writers=np.full(len(self.classes), writer, np.int64))


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows of ``parts``, equal ones as one, ordered by class; there is at least one part."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    rows = Rows(*columns).picked(columns[3] > 0)
    rows = rows.picked(np.lexsort((rows.writers, rows.sources, rows.classes)))
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.counts)))
    differ = [np.diff(column, prepend=-1) != 0 for column in rows[:3]]
    starts = np.flatnonzero(np.logical_or.reduce(differ))
    ends = np.append(starts[1:], len(rows.counts))
    return rows.picked(starts)._replace(counts=before[ends[: len(starts)]] - before[starts])


def whole_chunks(
    sets: Sequence[tuple[int, ...]],
    set_of: Ints,
    lengths: Ints,
    counts: Ints,
    fluid: Fluid,
    uplinks: Floats,
    fabric: Floats,
) -> Rows:
    """Whole chunks as ``fluid`` has it; class ``c`` belongs to holder set ``set_of[c]``."""
    tolerance = _ROUNDING * float(fluid.homes.sum())
    parts = _at_homes(sets, set_of, lengths, counts, fluid, tolerance)
    exporting = np.flatnonzero(fluid.exports > tolerance)
    if not len(exporting):
        return joined(parts)
    at_homes = joined(parts)
    stay = ~np.isin(at_homes.sources, exporting)
    parts = [at_homes.picked(stay)]
    away = []
    for node in exporting.tolist():
        pile = _Pile(at_homes.picked(at_homes.sources == node), lengths)
        parts.append(pile.take(fluid.seconds * uplinks[node] - tolerance))
        away.append(pile.rest())
    # What one port exports and how the others share it are two questions: the bytes are alike.
    pile = _Pile(joined(away), lengths)
    local = np.zeros(len(uplinks))
    np.add.at(local, parts[0].writers, (parts[0].counts * lengths[parts[0].classes]).astype(float))
    spare = np.minimum(fluid.seconds * fabric, fluid.seconds * uplinks - local)
    spare[exporting] = 0
    for node in np.argsort(-spare, kind="stable").tolist():
        parts.append(pile.take(spare[node] - tolerance).written_by(node))
    parts.append(pile.rest())
    return joined(parts)


def _at_homes(
    sets: Sequence[tuple[int, ...]],
    set_of: Ints,
    lengths: Ints,
    counts: Ints,
    fluid: Fluid,
    tolerance: float,
) -> list[Rows]:
    """Every chunk at one of its holders, as ``fluid.shares`` has it."""
    split = np.array([len(shares) > 1 for shares in fluid.shares], np.bool_)
    only = np.array([shares[0][0] for shares in fluid.shares], np.int64)
    there = np.flatnonzero((counts > 0) & ~split[set_of])
    home = only[set_of[there]]
    parts = [Rows(there, home, home, counts[there])]
    got = np.zeros(len(fluid.homes))
    np.add.at(got, home, (counts[there] * lengths[there]).astype(np.float64))
    forest = _forest({k: dict(fluid.shares[k]) for k in np.flatnonzero(split).tolist()})
    by_set = np.argsort(set_of, kind="stable")
    borders = np.searchsorted(set_of[by_set], np.arange(len(sets) + 1))
    # An exporter as root has the most freedom: what it misses or has too much only changes what
    # moves.
    roots = np.argsort(-fluid.exports, kind="stable").tolist()
    for k, leaves, root in _from_leaves(forest, roots):
        mine = by_set[borders[k] : borders[k + 1]]
        mine = mine[counts[mine] > 0]
        pile = _Pile(Rows(mine, mine, mine, counts[mine]), lengths)
        for node in leaves:
            parts.append(_home(pile.take(fluid.homes[node] - got[node] - tolerance), node))
            got[node] += float((parts[-1].counts * lengths[parts[-1].classes]).sum())
        parts.append(_home(pile.rest(), root))
        got[root] += float((parts[-1].counts * lengths[parts[-1].classes]).sum())
    return parts


def _home(rows: Rows, node: int) -> Rows:
    return rows.written_by(node)._replace(sources=np.full(len(rows.classes), node, np.int64))


def _forest(shares: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
    """The same sums for every set and node, without cycles: ``[set][node]`` bytes."""
    kept: dict[int, dict[int, float]] = {k: {} for k in shares}
    sets_at: dict[int, set[int]] = {}
    for k, given in shares.items():
        for node, amount in given.items():
            kept[k][node] = amount
            sets_at.setdefault(node, set()).add(k)
            if cycle := _cycle(kept, sets_at, k, node):
                # Every second edge gives to the one after it until one of them has nothing left.
                one, end = min(cycle[::2], key=lambda edge: kept[edge[0]][edge[1]])
                shift = kept[one].pop(end)
                sets_at[end].discard(one)
                for i, (giver, there) in enumerate(cycle):
                    if (giver, there) != (one, end):
                        kept[giver][there] += shift if i % 2 else -shift
    return kept


def _cycle(
    kept: dict[int, dict[int, float]], sets_at: dict[int, set[int]], k: int, node: int
) -> list[tuple[int, int]]:
    """The (set, node) edges of the cycle that edge ``k, node`` closes, that one first."""
    came: dict[
        int, tuple[int, int]
    ] = {}  # node -> the set it was reached from, and that set's node
    front = [end for end in kept[k] if end != node]
    first = dict.fromkeys(front)
    seen = {k}
    while front:
        here = front.pop()
        for other in sets_at[here] - seen:
            seen.add(other)
            for end in kept[other]:
                if end == here or end in came or end in first:
                    continue
                came[end] = (other, here)
                front.append(end)
    if node not in came:
        return []
    cycle = [(k, node)]
    at = node
    while at in came:
        other, before = came[at]
        cycle += [(other, at), (other, before)]
        at = before
    return [*cycle, (k, at)]


def _from_leaves(
    forest: dict[int, dict[int, float]], roots: Sequence[int]
) -> list[tuple[int, list[int], int]]:
    """The sets with the nodes that they fill, and the node that gets what is left; leaves first."""
    sets_at: dict[int, list[int]] = {}
    for k, given in forest.items():
        for node in given:
            sets_at.setdefault(node, []).append(k)
    order: list[tuple[int, list[int], int]] = []
    done: set[int] = set()
    for root in roots:
        front = [root]
        while front:
            parent = front.pop()
            for k in sets_at.get(parent, ()):
                if k not in done:
                    done.add(k)
                    leaves = [node for node in forest[k] if node != parent]
                    order.append((k, leaves, parent))
                    front += leaves
    return order[::-1]


class _Pile:
    """Rows of chunks, the longest first, taken from both ends."""

    def __init__(self, rows: Rows, lengths: Ints) -> None:
        order = np.argsort(-lengths[rows.classes], kind="stable")
        self._rows = rows.picked(order)
        self._lengths = lengths[self._rows.classes]
        none = np.zeros(1, np.int64)
        self._before = np.concatenate((none, np.cumsum(self._rows.counts)))
        self._bytes_before = np.concatenate((none, np.cumsum(self._rows.counts * self._lengths)))
        self._front, self._back = 0, int(self._before[-1])

    def take(self, nbytes: float) -> Rows:
        """Chunks of ``nbytes`` or more, as long as there are any, and less without the last one.

        Long ones while they fit, then short ones for the rest.
        """
        room = ceil(nbytes)
        if room <= 0:
            return self._slice(0, 0)
        start = self._bytes(self._front)
        front = min(self._chunk(start + room), self._back)
        gap = room - (self._bytes(front) - start)
        end = self._bytes(self._back)
        back = max(front, self._chunk(max(end - gap, 0)))
        long, short = self._slice(self._front, front), self._slice(back, self._back)
        self._front, self._back = front, back
        if not len(short.counts):
            return long
        return Rows(*(np.concatenate(pair) for pair in zip(long, short, strict=True)))

    def rest(self) -> Rows:
        """All that is left."""
        taken = self._slice(self._front, self._back)
        self._front = self._back
        return taken

    def _bytes(self, chunk: int) -> int:
        """Bytes before this chunk."""
        row = int(np.searchsorted(self._before[1:-1], chunk, "right"))
        if row == len(self._lengths):
            return 0
        ahead = chunk - int(self._before[row])
        return int(self._bytes_before[row]) + ahead * int(self._lengths[row])

    def _chunk(self, nbytes: int) -> int:
        """The last chunk that has at most ``nbytes`` before it."""
        row = int(np.searchsorted(self._bytes_before, nbytes, "right")) - 1
        if row == len(self._lengths):
            return int(self._before[-1])
        ahead = (nbytes - int(self._bytes_before[row])) // int(self._lengths[row])
        return int(self._before[row]) + ahead

    def _slice(self, start: int, stop: int) -> Rows:
        low = int(np.searchsorted(self._before, start, "right")) - 1
        high = int(np.searchsorted(self._before, stop, "left"))
        borders = np.minimum(np.maximum(self._before[low : high + 1], start), stop)
        counts = borders[1:] - borders[:-1]
        classes, sources, writers, _ = self._rows
        high = low + len(counts)
        return Rows(classes[low:high], sources[low:high], writers[low:high], counts)
