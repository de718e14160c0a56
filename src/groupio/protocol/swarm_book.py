"""Book of one grouped read: the chunks that each node has, wants and gets, and from whom. Nodes are
numbered in the order in which they came; a lost node keeps its number."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from groupio.model import NodeLink
from groupio.plan.distribute import ASK_WHOLE, NOT_ASKED, STORAGE

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


class Book:
    """Arrays of [nodes, chunks]; ``lengths`` int64[n] of the chunks.

    ``has`` bool: the node has the whole chunk. ``asked`` uint8: what it still waits for, as in
    ``plan_read``. ``source`` int16: from whom. ``failures`` uint8: how often it did not come.
    """

    def __init__(self, lengths: npt.NDArray[np.int64]) -> None:
        n = len(lengths)
        self.lengths = lengths
        self.names: list[str] = []
        self.links: list[NodeLink] = []
        self.alive = np.zeros(0, np.bool_)
        self.lying = np.zeros(0, np.bool_)
        self.avoids = np.zeros((0, 0), np.bool_)
        """[node, peer]: the node takes nothing from the peer."""
        self.has = np.zeros((0, n), np.bool_)
        self.asked = np.zeros((0, n), np.uint8)
        self.source = np.zeros((0, n), np.int16)
        self.failures = np.zeros((0, n), np.uint8)
        self._number: dict[str, int] = {}

    def find(self, name: str) -> int | None:
        """The number of a node that is alive, or None."""
        number = self._number.get(name)
        return number if number is not None and self.alive[number] else None

    def add(self, link: NodeLink) -> None:
        """A node came, came back with nothing, or its links changed."""
        number = self._number.get(link.node)
        if number is not None:
            self.links[number] = link
            self.alive[number] = True
            return
        self._number[link.node] = len(self.names)
        self.names.append(link.node)
        self.links.append(link)
        self.alive = np.append(self.alive, True)
        self.lying = np.append(self.lying, False)
        self.avoids = np.pad(self.avoids, ((0, 1), (0, 1)))
        self.has = _more(self.has, 0)
        self.asked = _more(self.asked, 0)
        self.source = _more(self.source, NOT_ASKED)
        self.failures = _more(self.failures, 0)

    def lose(self, number: int) -> None:
        """The node is gone, with what it had and wanted."""
        self.alive[number] = False
        self.lying[number] = False
        self.avoids[number] = self.avoids[:, number] = False
        self.has[number] = False
        self.asked[number] = 0
        self.source[number] = NOT_ASKED
        self.failures[number] = 0

    def settle(self, number: int, rows: npt.NDArray[np.int32]) -> None:
        """The node waits for these chunks no more."""
        self.asked[number, rows] = 0
        self.source[number, rows] = NOT_ASKED

    def plan_links(self) -> list[NodeLink]:
        """The links as a plan may use them: nothing of lost nodes and of those that lie."""
        usable = self.alive & ~self.lying
        return [
            link if ok else msgspec.structs.replace(link, fabric_ok=False)
            for link, ok in zip(self.links, usable, strict=True)
        ]

    def givers(self, rows: Rows, orphans: Mask) -> Mask:
        """bool[nodes, rows]: who has the chunk, or gets it without one of the ``orphans``."""
        asked, source = self.asked[:, rows], self.source[:, rows]
        cut = orphans
        columns = np.arange(len(rows))
        while True:
            behind = cut | ((asked > 0) & (source >= 0) & cut[np.maximum(source, 0), columns])
            if np.array_equal(behind, cut):
                break
            cut = behind
        coming = (asked == ASK_WHOLE) & (source != NOT_ASKED) & ~cut
        result: Mask = (self.has[:, rows] | coming) & self.alive[:, None] & ~self.lying[:, None]
        return result

    def loads(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bytes int64[nodes] that each node has still to read from the store, and to send."""
        waits = self.asked > 0
        sizes = np.broadcast_to(self.lengths, waits.shape)
        uplink = np.where(waits & (self.source == STORAGE), sizes, 0).sum(axis=1)
        pulls = waits & (self.source >= 0)
        egress = np.zeros(len(self.names), np.int64)
        np.add.at(egress, self.source[pulls], sizes[pulls])
        return uplink, egress


def _more(array: npt.NDArray[Any], value: int) -> npt.NDArray[Any]:
    return np.concatenate([array, np.full((1, array.shape[1]), value, array.dtype)])
