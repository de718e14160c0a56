"""From who sends and writes which chunk to one order per node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from groupio.model import ItemSpec, NodeLink
from groupio.plan.ordering import stable_order

if TYPE_CHECKING:
    from groupio.plan.copies import Copies
    from groupio.plan.holding import Holding
    from groupio.plan.merge import Merged

OTHERS_MAX = 8
"""So many further nodes are named to fetch chunks from."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Of which tensors chunks are: chunk ``numbers[i]`` (int64[n]) of ``items[owners[i]]``.

    ``owners`` int64[n], -1 for chunks that no member refers to. Whoever writes chunks of others
    needs it where segments have frames.
    """

    items: tuple[ItemSpec, ...]
    owners: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Chunks that a node pulls from ``source``, all of which the ``others`` hold too, to try next.

    ``digests`` uint8[n, 32], ``lengths`` int64[n] (bytes); ``keep`` bool[n]: hold it as a copy,
    ``write`` bool[n]: write it to the node's segments, with ``labels`` where these have frames.
    When ``source`` is the node itself nothing is pulled: it has the chunks, as copies of an
    earlier round.
    """

    source: str
    digests: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    keep: npt.NDArray[np.bool_]
    write: npt.NDArray[np.bool_]
    others: tuple[str, ...]
    labels: Labels | None = None


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """What one node does in one round; a later round comes on top.

    ``write`` int64[m] are the rows of its own report's chunk table that it writes from its own
    memory, ascending. ``record``: it keeps a copy of the sealed record.
    """

    write: npt.NDArray[np.int64]
    fetch: tuple[Fetch, ...]
    record: bool


@dataclass(frozen=True, slots=True)
class Transfers:
    """``writers`` int32[n]: the node that writes each chunk, -1: none has to; ``sources`` int32[n]:
    who has it before it is moved to the writer."""

    merged: Merged
    holding: Holding
    copies: Copies
    sources: npt.NDArray[np.int32]
    writers: npt.NDArray[np.int32]


@dataclass(slots=True)
class Loads:
    """Bytes on the links: ``uplink``, ``egress`` and ``ingress`` are int64[nodes]."""

    uplink: npt.NDArray[np.int64]
    egress: npt.NDArray[np.int64]
    ingress: npt.NDArray[np.int64]
    moved_bytes: int = 0
    replica_bytes: int = 0

    def seconds(self, links: Sequence[NodeLink], backend_bytes_per_s: float | None) -> float:
        """When the last link is done."""
        times = [0.0]
        for i, link in enumerate(links):
            times.append(self.uplink[i] / link.uplink_bytes_per_s)
            if link.fabric_ok:
                port = max(self.egress[i], self.ingress[i])
                times.append(port / link.fabric_bytes_per_s)
        if backend_bytes_per_s is not None:
            times.append(self.uplink.sum() / backend_bytes_per_s)
        return float(max(times))


def give_orders(
    transfers: Transfers, links: Sequence[NodeLink], keepers: Sequence[str]
) -> tuple[dict[str, NodeOrder], Loads]:
    """The order of each of ``links``, by name, and what the links carry then."""
    giving = _Giving(transfers, links)
    giving.own_writes()
    giving.copies()
    giving.rest()
    none = np.empty(0, np.int64)
    orders = {
        link.node: NodeOrder(
            write=giving.writes.get(node, none),
            fetch=tuple(giving.fetches[node]),
            record=link.node in keepers,
        )
        for node, link in enumerate(links)
    }
    return orders, giving.loads


class _Giving:
    """Orders while they are made; ``open`` bool[n]: nobody was told yet to write the chunk."""

    def __init__(self, transfers: Transfers, links: Sequence[NodeLink]) -> None:
        self.it = transfers
        self.links = links
        self.open = transfers.writers >= 0
        self.writes: dict[int, npt.NDArray[np.int64]] = {}
        self.fetches: list[list[Fetch]] = [[] for _ in links]
        zeros = np.zeros((3, len(links)), np.int64)
        self.loads = Loads(*zeros)

    def own_writes(self) -> None:
        """Rows of its own table that each node writes."""
        merged, table = self.it.merged, self.it.holding.table
        n = len(merged.lengths)
        here = np.where(self.it.sources == self.it.writers, self.it.writers, -1)
        sizes = np.array([len(holders) for holders in merged.holder_sets], np.int64)
        held = np.bincount(merged.holder_set, minlength=len(sizes)) @ sizes
        twice = sum(map(len, merged.rows)) > held
        for node, rows in zip(table, merged.rows, strict=True):
            if node < 0:
                continue
            mine = np.flatnonzero(here[rows] == node)
            chunks = rows[mine]
            if twice:
                # A chunk that the table names twice is written once, from its first row.
                place = np.empty(n, np.int64)
                place[chunks[::-1]] = mine[::-1]
                mine = mine[place[chunks] == mine]
                chunks = rows[mine]
            self.writes[node] = mine
            self.open[chunks] = False
            self.loads.uplink[node] += merged.lengths[chunks].sum()

    def copies(self) -> None:
        """Chunks that are sent to be kept, which the keeper may write too."""
        copies = self.it.copies
        sending = np.array([bool(targets) for targets in copies.targets], np.bool_)
        if not sending.any():
            return
        chunks = np.flatnonzero(sending[copies.row])
        chunks = chunks[stable_order(copies.row[chunks])]
        for part in _runs(chunks, copies.row[chunks]):
            row = int(copies.row[part[0]])
            keep = np.ones(len(part), np.bool_)
            for target in copies.targets[row]:
                write = self.it.writers[part] == target
                self._fetch(target, int(copies.sources[row]), part, keep, write)

    def rest(self) -> None:
        """What else is written: moved to the writer, or kept by it since an earlier round."""
        chunks = np.flatnonzero(self.open)
        sets = self.it.holding.holder_set[chunks].astype(np.int64)
        nodes = len(self.links)
        pairs = self.it.writers[chunks].astype(np.int64) * nodes + self.it.sources[chunks]
        keys = pairs * len(self.it.holding.holder_sets) + sets
        order = np.argsort(keys, kind="stable")
        for part in _runs(chunks[order], keys[order]):
            target = int(self.it.writers[part[0]])
            source = int(self.it.sources[part[0]])
            keep = np.full(len(part), target == source, np.bool_)
            self._fetch(target, source, part, keep, np.ones_like(keep))

    def _fetch(
        self,
        target: int,
        source: int,
        chunks: npt.NDArray[np.int64],
        keep: npt.NDArray[np.bool_],
        write: npt.NDArray[np.bool_],
    ) -> None:
        """``target`` gets these chunks of one holder set from ``source``."""
        merged, holding, loads = self.it.merged, self.it.holding, self.loads
        lengths = merged.lengths.take(chunks)
        holders = holding.holder_sets[int(holding.holder_set[chunks[0]])]
        self.fetches[target].append(
            Fetch(
                source=self.links[source].node,
                digests=merged.digests.take(chunks, axis=0),
                lengths=lengths,
                keep=keep,
                write=write,
                others=_others(holders, target, source, self.links),
            )
        )
        self.open[chunks[write]] = False
        loads.uplink[target] += lengths[write].sum()
        if source == target:
            return
        nbytes = int(lengths.sum())
        loads.egress[source] += nbytes
        loads.ingress[target] += nbytes
        if keep[0]:
            loads.replica_bytes += nbytes
        else:
            loads.moved_bytes += nbytes


def _runs(chunks: npt.NDArray[np.int64], keys: npt.NDArray[Any]) -> list[npt.NDArray[np.int64]]:
    """The chunks in runs of equal keys."""
    if not len(chunks):
        return []
    return np.split(chunks, np.flatnonzero(np.diff(keys)) + 1)


def _others(
    holders: tuple[int, ...], node: int, peer: int, links: Sequence[NodeLink]
) -> tuple[str, ...]:
    """Further holders that can send, first those that come after the source."""
    if node == peer:
        return ()
    turned = [h for h in holders if h > peer] + [h for h in holders if h < peer]
    able = [links[h].node for h in turned if h != node and links[h].fabric_ok]
    return tuple(able[:OTHERS_MAX])
