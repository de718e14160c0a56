"""Whole chunks once more: take from the link that ends last, and move nothing for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from groupio.plan.moves import Floats
from groupio.plan.whole import Ints, Rows, joined

STEPS_MAX = 256
"""At most this many chunks in a row are given to other links."""
TRIES = 8
"""So many rows of the last link are looked at in each step."""
DETOURS_MAX = 64
"""At most this many ways that look longer at first are tried."""

_REAL = 1 - 1e-9  # anything less is a gain, not rounding


class Loads:
    """What each link carries, in bytes (int64[n]): uplinks, egress and ingress of the ports."""

    def __init__(self, rows: Rows, lengths: Ints, uplinks: Floats, fabric: Floats) -> None:
        n = len(uplinks)
        # 0 bytes over a port that may not be used take no time.
        fabric = np.where(fabric > 0, fabric, np.inf)
        self.rates = np.stack((uplinks, fabric, fabric))
        self.bytes = np.zeros((3, n), np.int64)
        nbytes = rows.counts * lengths[rows.classes]
        moved = rows.sources != rows.writers
        np.add.at(self.bytes[0], rows.writers, nbytes)
        np.add.at(self.bytes[1], rows.sources[moved], nbytes[moved])
        np.add.at(self.bytes[2], rows.writers[moved], nbytes[moved])

    def add(self, source: int, writer: int, nbytes: int) -> None:
        """Let ``writer`` write so many bytes that ``source`` has."""
        self.bytes[0, writer] += nbytes
        if source != writer:
            self.bytes[1, source] += nbytes
            self.bytes[2, writer] += nbytes

    def seconds(self) -> float:
        """When the last link is done."""
        return float(np.max(self.bytes / self.rates, initial=0.0))

    def slowest(self) -> float:
        """The rate of the slowest link that carries anything, infinite if none does."""
        return float(np.min(self.rates[self.bytes > 0], initial=np.inf))


def improved(
    rows: Rows,
    holders: Callable[[int], Sequence[int]],
    lengths: Ints,
    uplinks: Floats,
    fabric: Floats,
    bound_s: float,
    enough_s: float,
) -> Rows:
    """``rows`` with a makespan as short or shorter, and without needless moves.

    ``holders(c)`` are the nodes that have class ``c``. ``bound_s`` is what no plan can beat. A
    makespan of at most ``enough_s`` is left as it is if it also is no more than one longest chunk
    on the slowest link above the bound. The result has as many chunks of each class as before.
    """
    loads = Loads(rows, lengths, uplinks, fabric)
    moved = rows.sources != rows.writers
    longest = int(lengths[rows.classes].max(initial=0))
    enough_s = min(enough_s, bound_s + longest / loads.slowest())
    if loads.seconds() <= enough_s and not moved.any():
        return rows
    far = loads.seconds() > enough_s
    # If it is fast enough only the moved chunks matter.
    looked_at = rows if far else rows.picked(moved)
    columns = zip(*(column.tolist() for column in looked_at), strict=True)
    table = {(c, source, writer): count for c, source, writer, count in columns}
    search = _Search(table, holders, lengths, loads, np.flatnonzero(fabric > 0), bound_s)
    if far:
        search.relieve(enough_s)
        while loads.seconds() > bound_s + longest / loads.slowest() and search.detour():
            pass
    search.bring_back(max(loads.seconds(), bound_s))
    flat = np.array([(*key, count) for key, count in search.table.items()], np.int64)
    changed = Rows(*flat.reshape(-1, 4).T)
    return joined([changed] if far else [rows.picked(~moved), changed])


class _Way(NamedTuple):
    """From whose memory over whose uplink, and when the last link on this way would be done."""

    seconds: float
    source: int
    writer: int


_NO_WAY = _Way(np.inf, 0, 0)


class _Search:
    """Changes ``table``, counts of chunks by (class, source, writer), and ``loads`` with it."""

    def __init__(
        self,
        table: dict[tuple[int, int, int], int],
        holders: Callable[[int], Sequence[int]],
        lengths: Ints,
        loads: Loads,
        ports: Ints,
        bound_s: float,
    ) -> None:
        self.table = table
        self._holders = holders
        self._lengths = lengths
        self._loads = loads
        self._ports = ports
        self._bound_s = bound_s
        self._detours = DETOURS_MAX

    def relieve(self, enough_s: float) -> None:
        """Let the last link give chunks away, one by one, until ``enough_s`` or that is no help."""
        for _ in range(STEPS_MAX):
            last = self._loads.seconds()
            if last <= enough_s:
                return
            way, key = min(self._ways_out(), default=(_NO_WAY, (0, 0, 0)))
            if way.seconds >= last * _REAL:
                return
            self._change(key, way.source, way.writer, 1)

    def detour(self) -> bool:
        """Give a chunk away to a link that then has to give others away; whether that helped."""
        table, nbytes, last = dict(self.table), self._loads.bytes.copy(), self._loads.seconds()
        for way, key in sorted(self._ways_out())[: self._detours]:
            self._detours -= 1
            self._change(key, way.source, way.writer, 1)
            self.relieve(self._bound_s)
            if self._loads.seconds() < last * _REAL:
                return True
            self.table = dict(table)
            self._loads.bytes[:] = nbytes
        return False

    def _ways_out(self) -> list[tuple[_Way, tuple[int, int, int]]]:
        """Rows of the link that ends last, each with the best other way for a chunk of it."""
        loads = self._loads
        ends = loads.bytes / loads.rates
        kind, node = divmod(int(np.argmax(ends)), ends.shape[1])
        excess = (float(ends[kind, node]) - self._bound_s) * float(loads.rates[kind, node])
        here = [key for key in self.table if _uses(key, kind, node)]
        here.sort(key=lambda key: abs(int(self._lengths[key[0]]) - excess))
        ways = []
        for key in here[:TRIES]:
            length = int(self._lengths[key[0]])
            loads.add(key[1], key[2], -length)
            ways += [(way, key) for way in self._ways(key[0], length) if way[1:] != key[1:]]
            loads.add(key[1], key[2], length)
        return ways

    def bring_back(self, seconds: float) -> None:
        """Let holders write what was moved where that ends within ``seconds``."""
        loads = self._loads
        limits = np.minimum(seconds * loads.rates[0] * (1 + 1e-12), 1 << 62).astype(np.int64)
        spare = (limits - loads.bytes[0]).tolist()
        for key in [key for key in self.table if key[1] != key[2]]:
            length = int(self._lengths[key[0]])
            for node in (key[1], *self._holders(key[0])):
                if spare[node] >= length and key in self.table:
                    count = min(spare[node] // length, self.table[key])
                    self._change(key, node, node, count)
                    spare[node] -= count * length
                    spare[key[2]] += count * length

    def _change(self, key: tuple[int, int, int], source: int, writer: int, count: int) -> None:
        c = key[0]
        nbytes = int(self._lengths[c]) * count
        self._loads.add(key[1], key[2], -nbytes)
        self._loads.add(source, writer, nbytes)
        self.table[key] -= count
        if not self.table[key]:
            del self.table[key]
        new = (c, source, writer)
        self.table[new] = self.table.get(new, 0) + count

    def _ways(self, c: int, length: int) -> list[_Way]:
        """For one more chunk: over the holders' uplinks, and the best one over the fabric."""
        ends = (self._loads.bytes + length) / self._loads.rates
        holders = np.array(self._holders(c), np.int64)
        ways = [_Way(float(ends[0, at]), at, at) for at in holders.tolist()]
        senders = np.intersect1d(holders, self._ports)
        takers = np.setdiff1d(self._ports, holders)
        if len(senders) and len(takers):
            # Whoever holds the chunk need not receive it.
            source = int(senders[np.argmin(ends[1, senders])])
            arrives = np.maximum(ends[0, takers], ends[2, takers])
            writer = int(takers[np.argmin(arrives)])
            end = max(float(arrives.min()), float(ends[1, source]))
            ways.append(_Way(end, source, writer))
        return ways


def _uses(key: tuple[int, int, int], kind: int, node: int) -> bool:
    """Whether a row's chunks go over this link; ``kind`` as the rows of ``Loads.bytes``."""
    _, source, writer = key
    if kind == 0:
        return writer == node
    return source != writer and (source if kind == 1 else writer) == node
