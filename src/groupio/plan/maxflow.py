"""The largest flow through a graph (Dinic's algorithm), for graphs of some thousand arcs.

Capacities are floats and may be raised between two calls: the flow found so far is kept.
"""

from __future__ import annotations


class FlowGraph:
    """Vertices ``0..vertices-1`` and arcs with room for flow.

    ``room[a]`` is what arc ``a`` still takes; ``room[a ^ 1]`` is what it carries, for ``a`` as
    :meth:`add` returned it. ``tolerance``: room up to this much counts as none.
    """

    def __init__(self, vertices: int, tolerance: float) -> None:
        self.tolerance = tolerance
        self.room: list[float] = []
        self._heads: list[int] = []
        self._arcs: list[list[int]] = [[] for _ in range(vertices)]
        self._level: list[int] = [-1] * vertices

    def add(self, tail: int, head: int, capacity: float) -> int:
        """A new arc; returns its number, which is even."""
        arc = len(self.room)
        self.room += [capacity, 0.0]
        self._heads += [head, tail]
        self._arcs[tail].append(arc)
        self._arcs[head].append(arc + 1)
        return arc

    def push(self, source: int, sink: int) -> float:
        """Send as much more as fits from ``source`` to ``sink``; returns how much that was."""
        sent = 0.0
        while self._find_levels(source, sink):
            sent += self._fill_levels(source, sink)
        return sent

    def reached(self, vertex: int) -> bool:
        """Whether the last :meth:`push` could still send more from its source to ``vertex``.

        The vertices reached and the others are the two sides of a smallest cut.
        """
        return self._level[vertex] >= 0

    def _find_levels(self, source: int, sink: int) -> bool:
        room, heads, tolerance = self.room, self._heads, self.tolerance
        level = self._level = [-1] * len(self._arcs)
        level[source] = 0
        front = [source]
        depth = 0
        while front and level[sink] < 0:
            depth += 1
            following = []
            for vertex in front:
                for arc in self._arcs[vertex]:
                    head = heads[arc]
                    if level[head] < 0 and room[arc] > tolerance:
                        level[head] = depth
                        following.append(head)
            front = following
        return level[sink] >= 0

    def _fill_levels(self, source: int, sink: int) -> float:
        """Saturate all shortest paths."""
        room, heads, level, tolerance = self.room, self._heads, self._level, self.tolerance
        following = [0] * len(self._arcs)  # arcs of a vertex before this one lead nowhere
        path: list[int] = []
        vertex = source
        sent = 0.0
        while True:
            if vertex == sink:
                amount = min([room[arc] for arc in path])
                for arc in path:
                    room[arc] -= amount
                    room[arc ^ 1] += amount
                sent += amount
                full = next(i for i, arc in enumerate(path) if room[arc] <= tolerance)
                vertex = heads[path[full] ^ 1]
                del path[full:]
            arcs = self._arcs[vertex]
            at = following[vertex]
            deeper = level[vertex] + 1
            while at < len(arcs) and not (
                level[heads[arcs[at]]] == deeper and room[arcs[at]] > tolerance
            ):
                at += 1
            following[vertex] = at
            if at < len(arcs):
                path.append(arcs[at])
                vertex = heads[arcs[at]]
            elif path:
                vertex = heads[path.pop() ^ 1]
                following[vertex] += 1
            else:
                return sent
