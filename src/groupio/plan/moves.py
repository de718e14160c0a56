"""The best flush if chunks could be split: what each node gets, and what moves over the fabric.

Bytes of equal holders are alike, and once a node has taken bytes they are alike whatever their
holders are. The flush is therefore one flow: from each holder set to its holders, from there over
the node's own uplink, or through the fabric (egress, then ingress) to the uplink of another node.
All links have capacity rate x time, and the shortest time in which everything passes is found from
below: the cut that stops the flow says what the time must be at least (Newton's method).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from groupio.plan.maxflow import FlowGraph

Floats = npt.NDArray[np.float64]

_SOURCE, _SINK, _HUB = 0, 1, 2
_NODES = 3  # first vertex of the nodes as holders; as writers they follow
_MISSING = 1e-9  # this part of all bytes may be left over when a time counts as enough
_NOTHING = 1e-12  # flows up to this part of all bytes are rounding


@dataclass(frozen=True, slots=True)
class Fluid:
    """A flush of splittable bytes that takes ``seconds``.

    ``shares[k]`` are the (node, bytes) to which holder set ``k`` gives its bytes, each node a
    holder. ``homes`` float64[n] is what each node gets in sum, ``exports`` float64[n] what of it
    other nodes write. A node that exports has its own uplink busy all the time.
    """

    seconds: float
    shares: tuple[tuple[tuple[int, float], ...], ...]
    homes: Floats
    exports: Floats


def best_local(
    sets: Sequence[tuple[int, ...]], set_bytes: Sequence[float], uplinks: Floats
) -> Fluid:
    """The shortest flush in which every node writes only what it holds."""
    network = _Network(sets, set_bytes, uplinks, np.zeros(len(uplinks)))
    network.settle(0.0)
    return network.result()


def best_moved(
    sets: Sequence[tuple[int, ...]],
    set_bytes: Sequence[float],
    uplinks: Floats,
    fabric: Floats,
    floor_s: float,
) -> Fluid:
    """The flush with the fewest moved bytes among the shortest of at least ``floor_s`` seconds.

    ``uplinks`` and ``fabric`` float64[n] are bytes per second; 0 in ``fabric``: a node that
    neither sends nor receives.
    """
    network = _Network(sets, set_bytes, uplinks, fabric)
    network.settle(floor_s)
    if network.moved() > 0:
        # First all that needs no move, the fabric takes only the rest: no flow of this duration
        # moves less, since a way through the residual graph uses the hub at most once.
        seconds = network.seconds
        network = _Network(sets, set_bytes, uplinks, fabric)
        network.allow(seconds, moves=False)
        network.allow(seconds, moves=True)
    return network.result()


class _Network:
    """The flow graph of a flush; ``seconds`` is the time that its links have."""

    def __init__(
        self,
        sets: Sequence[tuple[int, ...]],
        set_bytes: Sequence[float],
        uplinks: Floats,
        fabric: Floats,
    ) -> None:
        n = len(uplinks)
        self.seconds = 0.0
        self._sets = sets
        self._left = self._total = float(sum(set_bytes))
        self._n = n
        self._only = np.zeros(n)  # bytes of which a node is the one holder
        self._bytes = set_bytes
        graph = self._graph = FlowGraph(_NODES + 2 * n + len(sets), _NOTHING * self._total)
        for holders, nbytes in zip(sets, set_bytes, strict=True):
            if len(holders) == 1:
                self._only[holders[0]] += nbytes
        # Arcs that grow with the time, each with its rate and its ends.
        self._uplinks: list[tuple[int, float, int, int]] = []
        self._ports: list[tuple[int, float, int, int]] = []
        for i, (uplink, port) in enumerate(zip(uplinks.tolist(), fabric.tolist(), strict=True)):
            holder, writer = _NODES + i, _NODES + n + i
            if self._only[i]:
                graph.add(_SOURCE, holder, float(self._only[i]))
            graph.add(holder, writer, inf)
            self._uplinks.append(self._link(writer, _SINK, uplink))
            if port:
                self._ports.append(self._link(holder, _HUB, port))
                self._ports.append(self._link(_HUB, writer, port))
        self._choices: list[tuple[int, ...]] = []
        for k, (holders, nbytes) in enumerate(zip(sets, set_bytes, strict=True)):
            arcs: tuple[int, ...] = ()
            if len(holders) > 1:
                vertex = _NODES + 2 * n + k
                graph.add(_SOURCE, vertex, float(nbytes))
                arcs = tuple(graph.add(vertex, _NODES + i, inf) for i in holders)
            self._choices.append(arcs)

    def _link(self, tail: int, head: int, rate: float) -> tuple[int, float, int, int]:
        return self._graph.add(tail, head, 0.0), rate, tail, head

    def settle(self, floor_s: float) -> None:
        """Find the shortest time, but at least ``floor_s``, and a flow for it."""
        rates = sum(rate for _, rate, _, _ in self._uplinks)
        seconds = max(floor_s, self._total / rates if self._total else 0.0)
        self.allow(seconds, moves=True)
        while self._left > _MISSING * self._total and (seconds := self._cut()) > self.seconds:
            self.allow(seconds, moves=True)

    def allow(self, seconds: float, *, moves: bool) -> None:
        """Give the links this time, the fabric only if there may be ``moves``, and fill them."""
        room = self._graph.room
        for links in (self._uplinks, self._ports) if moves else (self._uplinks,):
            for arc, rate, _, _ in links:
                room[arc] = seconds * rate - room[arc ^ 1]
        self.seconds = seconds
        self._left -= self._graph.push(_SOURCE, _SINK)

    def moved(self) -> float:
        """Bytes that go through the fabric."""
        return sum(self._carried(arc) for arc, _, _, head in self._ports if head == _HUB)

    def result(self) -> Fluid:
        homes = self._only.copy()
        exports = np.zeros(self._n)
        shares: list[tuple[tuple[int, float], ...]] = []
        for holders, nbytes, arcs in zip(self._sets, self._bytes, self._choices, strict=True):
            given = [
                (i, amount)
                for i, arc in zip(holders, arcs, strict=False)
                if (amount := self._carried(arc)) > 0
            ]
            shares.append(tuple(given) or ((holders[0], float(nbytes)),))
            for i, amount in given:
                homes[i] += amount
        for arc, _, tail, head in self._ports:
            if head == _HUB:
                exports[tail - _NODES] = self._carried(arc)
        return Fluid(self.seconds, tuple(shares), homes, exports)

    def _carried(self, arc: int) -> float:
        amount = self._graph.room[arc ^ 1]
        return amount if amount > _MISSING * self._total else 0.0

    def _cut(self) -> float:
        """The time that the smallest cut of the last flow asks for."""
        reached = self._graph.reached
        stuck = float(sum(self._only[i] for i in range(self._n) if reached(_NODES + i)))
        first = _NODES + 2 * self._n
        stuck += sum(
            nbytes
            for k, (nbytes, arcs) in enumerate(zip(self._bytes, self._choices, strict=True))
            if arcs and reached(first + k)
        )
        crossing = sum(
            rate
            for _, rate, tail, head in self._uplinks + self._ports
            if reached(tail) and not reached(head)
        )
        return stuck / crossing
