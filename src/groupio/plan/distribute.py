"""Reading over many nodes: who fetches which chunk from the store, and who gets it from whom.

Every node that asks for a chunk gets it from one *predecessor*, which answers as soon as it has
the chunk itself. The predecessors of a chunk form a tree: its root pulls from a *source*, a node
that has the chunk in memory or the one that fetches it from the store. Two trees, over which the
chunks alternate, have different inner nodes, so that every port sends as much as it receives and
no chunk passes through many nodes. Chunks with the same sources and askers are one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import NodeLink

STORAGE = -1
"""In place of a predecessor: the node reads the chunk from the store."""

NOT_ASKED = -2
"""In place of a predecessor: the node gets nothing of the chunk."""

ASK_PART = 1
"""The node wants a part of the chunk: others get nothing from it."""

ASK_WHOLE = 2
"""The node wants the whole chunk, and passes it on."""

HELP_GAIN = 1.02
"""Nodes that do not ask fetch for others only when that is faster by this factor."""

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int64]
Nodes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which way each chunk takes.

    ``lanes`` int32[n]: chunks on one lane take the same way; -1 for chunks that nobody asks for.
    ``predecessors`` int32[lanes, nodes]: a node number, ``STORAGE`` or ``NOT_ASKED``. ``order``
    int64[m] are the wanted chunks in the order in which all nodes handle them: as they are
    expected from their sources, those with most askers first. ``uplink_bytes``, ``egress_bytes``
    and ``ingress_bytes`` int64[nodes] count a part as its whole chunk; ``makespan_s`` is when the
    busiest link is done.
    """

    lanes: npt.NDArray[np.int32]
    predecessors: npt.NDArray[np.int32]
    order: npt.NDArray[np.int64]
    uplink_bytes: npt.NDArray[np.int64]
    egress_bytes: npt.NDArray[np.int64]
    ingress_bytes: npt.NDArray[np.int64]
    makespan_s: float


class _Class(NamedTuple):
    """Chunks ``rows`` that nodes ``sources`` have and the others ask for; ``alone`` are askers
    without a fabric."""

    rows: Rows
    sources: Nodes
    whole: Nodes
    parts: Nodes
    alone: Nodes


class _Lane(NamedTuple):
    rows: Rows
    source: int
    fetched: bool
    stripe: int
    of: _Class


class _Links(NamedTuple):
    """The links of the nodes in bytes/s, who may use the fabric, and what each link has to do."""

    uplinks: npt.NDArray[np.float64]
    fabrics: npt.NDArray[np.float64]
    fabric_ok: npt.NDArray[np.bool_]
    uplink_loads: Bytes
    egress_loads: Bytes
    backend: float


def plan_read(
    lengths: Bytes,
    has: npt.NDArray[np.bool_],
    asks: npt.NDArray[np.uint8],
    nodes: Sequence[NodeLink],
    *,
    backend_bytes_per_s: float | None = None,
    uplink_loads: Bytes | None = None,
    egress_loads: Bytes | None = None,
    helpers: bool = True,
) -> ReadPlan:
    """Plan the way of every chunk that a node asks for and has not.

    ``lengths`` int64[n]; ``has`` bool[nodes, n]: nodes that have the whole chunk or get it without
    this plan; ``asks`` uint8[nodes, n]: 0, ``ASK_PART`` or ``ASK_WHOLE``. The loads int64[nodes]
    are bytes that the links have to carry besides. With ``helpers`` nodes that do not ask fetch
    for others where that is faster. Every chunk that no node has leaves the store once, and once
    more for each asker with ``fabric_ok`` False. Raises InvalidInput for a link without a positive
    bandwidth and for arrays that do not fit together.
    """
    count, n = len(nodes), len(lengths)
    if has.shape != (count, n) or asks.shape != (count, n):
        raise InvalidInput(
            f"a read of {n} chunks on {count} nodes was given arrays of {has.shape} and of"
            f" {asks.shape}"
        )
    links = _links(nodes, backend_bytes_per_s, uplink_loads, egress_loads)
    classes = _classes(has & links.fabric_ok[:, None], np.where(has, 0, asks), links.fabric_ok)
    lanes = _best(classes, lengths, links, helpers)
    lane_of = np.full(n, -1, np.int32)
    table = np.full((len(lanes), count), NOT_ASKED, np.int32)
    for number, lane in enumerate(lanes):
        lane_of[lane.rows] = number
        table[number] = _way(lane, count, number)
    traffic = _traffic(table, lane_of, lengths)
    return ReadPlan(
        lane_of, table, _order(lanes, lengths, links), *traffic, _seconds(traffic, links, lengths)
    )


def _links(
    nodes: Sequence[NodeLink], backend: float | None, uplinks: Bytes | None, egress: Bytes | None
) -> _Links:
    for node in nodes:
        for rate in (node.uplink_bytes_per_s, node.fabric_bytes_per_s):
            if not (isfinite(rate) and rate > 0):
                raise InvalidInput(
                    f"node {node.node!r} has a link of {rate} bytes/s; it must be a positive number"
                )
    none = np.zeros(len(nodes), np.int64)
    return _Links(
        np.array([node.uplink_bytes_per_s for node in nodes], np.float64),
        np.array([node.fabric_bytes_per_s for node in nodes], np.float64),
        np.array([node.fabric_ok for node in nodes], np.bool_),
        none if uplinks is None else uplinks,
        none if egress is None else egress,
        np.inf if backend is None else backend,
    )


def _classes(
    has: npt.NDArray[np.bool_], asks: npt.NDArray[np.uint8], fabric_ok: npt.NDArray[np.bool_]
) -> list[_Class]:
    """Chunks by who has them and who asks for them; those with the fewest askers, which have the
    least choice, first."""
    wanted = np.flatnonzero(asks.any(axis=0))
    if not len(wanted):
        return []
    has, asks = has[:, wanted], asks[:, wanted]
    kinds = _kinds(np.concatenate([has, asks == ASK_WHOLE, asks == ASK_PART]))
    by_kind = np.argsort(kinds, kind="stable")
    found = []
    for at in np.split(by_kind, np.cumsum(np.bincount(kinds))[:-1]):
        mine = asks[:, at[0]]
        found.append(
            _Class(
                wanted[at],
                np.flatnonzero(has[:, at[0]]),
                np.flatnonzero((mine == ASK_WHOLE) & fabric_ok),
                np.flatnonzero((mine == ASK_PART) & fabric_ok),
                np.flatnonzero((mine > 0) & ~fabric_ok),
            )
        )
    return sorted(found, key=lambda one: (len(one.whole) + len(one.parts), int(one.rows[0])))


def _kinds(bits: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Numbers columns so that equal ones get equal numbers."""
    n = bits.shape[1]
    packed = np.packbits(bits, axis=0)
    # Told apart eight bytes at a time: each step sorts one column of integers.
    packed = np.concatenate((packed, np.zeros((-len(packed) % 8, n), np.uint8)))
    kinds = np.zeros(n, np.int64)
    for word in np.ascontiguousarray(packed.T).view(np.uint64).T:
        kinds = np.unique(kinds, return_inverse=True)[1].reshape(-1) * n
        kinds += np.unique(word, return_inverse=True)[1].reshape(-1)
    return np.unique(kinds, return_inverse=True)[1].reshape(-1)


def _best(classes: Sequence[_Class], lengths: Bytes, links: _Links, helpers: bool) -> list[_Lane]:
    """The lanes; with the help of idle uplinks where the askers' own are the bottleneck."""
    alone = _lanes(classes, lengths, links, help_all=False)
    if not helpers:
        return alone
    alone_s = _fetch_seconds(alone, lengths, links)
    if alone_s <= sum(lengths[lane.rows].sum() for lane in alone if lane.fetched) / links.backend:
        return alone
    helped = _lanes(classes, lengths, links, help_all=True)
    return helped if _fetch_seconds(helped, lengths, links) * HELP_GAIN < alone_s else alone


def _lanes(
    classes: Sequence[_Class], lengths: Bytes, links: _Links, *, help_all: bool
) -> list[_Lane]:
    """Split each class over its sources or fetchers by bytes, and each share over two trees."""
    uplink_loads, egress_loads = links.uplink_loads.copy(), links.egress_loads.copy()
    everyone = np.flatnonzero(links.fabric_ok)
    lanes = []
    for one in classes:
        spans = lengths[one.rows]
        for node in one.alone:
            uplink_loads[node] += spans.sum()
        askers = np.concatenate([one.whole, one.parts])
        if len(one.sources):
            givers, rates, loads = one.sources, links.fabrics, egress_loads
        elif len(askers):
            givers = everyone if help_all else np.sort(askers)
            rates, loads = links.uplinks, uplink_loads
        else:
            lanes.append(_Lane(one.rows, STORAGE, False, 0, one))
            continue
        chosen = _split(spans, loads[givers], rates[givers])
        np.add.at(loads, givers[chosen], spans)
        for place in np.unique(chosen).tolist():
            rows = one.rows[chosen == place]
            # Long and short chunks alternate alike, whatever their order in the table.
            stripe = np.empty(len(rows), np.int64)
            stripe[np.argsort(-lengths[rows], kind="stable")] = np.arange(len(rows)) % 2
            for number in range(min(2, len(rows))):
                lanes.append(
                    _Lane(
                        rows[stripe == number],
                        int(givers[place]),
                        not len(one.sources),
                        number,
                        one,
                    )
                )
    return lanes


def _split(spans: Bytes, loads: Bytes, rates: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Which link gives each chunk: neighbours from the same one, all done at the same time."""
    seconds = loads / rates
    order = np.argsort(seconds, kind="stable")
    levels = (spans.sum() + np.cumsum(loads[order])) / np.cumsum(rates[order])
    # The lowest of these is the one at which links that stand above it stay dry.
    quotas = np.maximum(levels.min() - seconds, 0) * rates
    middles = np.cumsum(spans) - spans / 2
    return np.searchsorted(np.cumsum(quotas)[:-1], middles, side="right")


def _fetch_seconds(lanes: Sequence[_Lane], lengths: Bytes, links: _Links) -> float:
    """When the last chunk that leaves the store has arrived, without the backend's own limit."""
    loads, arriving = links.uplink_loads.copy(), np.zeros_like(links.uplink_loads)
    for lane in lanes:
        if not lane.fetched:
            continue
        size = lengths[lane.rows].sum()
        loads[lane.source] += size
        askers = np.concatenate([lane.of.whole, lane.of.parts])
        arriving[askers[askers != lane.source]] += size
    return float(np.max(np.maximum(loads / links.uplinks, arriving / links.fabrics), initial=0.0))


def _way(lane: _Lane, nodes: int, number: int) -> npt.NDArray[np.int32]:
    """The predecessor of each node for the chunks of a lane."""
    way = np.full(nodes, NOT_ASKED, np.int32)
    whole = lane.of.whole
    # Turned by half, the inner nodes of the second tree are the leaves of the first.
    tree = np.roll(whole, -(len(whole) // 2) * lane.stripe)
    if len(tree):
        way[tree] = tree[(np.arange(len(tree)) - 1) // 2]
        way[tree[0]] = lane.source
    parts = lane.of.parts
    if len(parts):
        holders = tree if len(tree) else np.array([lane.source])
        way[parts] = holders[(np.arange(len(parts)) + number) % len(holders)]
    if lane.fetched:
        way[lane.source] = STORAGE
    way[lane.of.alone] = STORAGE
    return way


def _order(lanes: Sequence[_Lane], lengths: Bytes, links: _Links) -> npt.NDArray[np.int64]:
    """The wanted chunks by when their sources give them."""
    none = np.empty(0, np.int64)
    counts = [len(lane.rows) for lane in lanes]
    rows = np.concatenate([none, *(lane.rows for lane in lanes)])
    sources = np.repeat(np.array([lane.source for lane in lanes], np.int64), counts)
    fetched = np.repeat(np.array([lane.fetched for lane in lanes], np.bool_), counts)
    askers = np.repeat(
        np.array([len(lane.of.whole) + len(lane.of.parts) for lane in lanes], np.int64), counts
    )
    order = np.lexsort((rows, -askers, fetched, sources))
    rows, sources, fetched = rows[order], sources[order], fetched[order]
    spans = lengths[rows]
    before = np.cumsum(spans) - spans
    first = np.searchsorted(sources, sources, side="left")
    shared = links.backend / max(len(np.unique(sources[fetched])), 1)
    rates = np.where(fetched, np.minimum(links.uplinks, shared)[sources], links.fabrics[sources])
    given = (before - before[first]) / rates
    result: npt.NDArray[np.int64] = rows[np.lexsort((rows, given))]
    return result


def _traffic(
    table: npt.NDArray[np.int32], lane_of: npt.NDArray[np.int32], lengths: Bytes
) -> tuple[Bytes, Bytes, Bytes]:
    """Bytes on the uplink, out of the port and into the port of each node."""
    used = lane_of >= 0
    sizes = np.zeros(len(table), np.int64)
    np.add.at(sizes, lane_of[used], lengths[used])
    moved = table >= 0
    ingress = np.where(moved, sizes[:, None], 0).sum(axis=0)
    uplink = np.where(table == STORAGE, sizes[:, None], 0).sum(axis=0)
    egress = np.zeros(table.shape[1], np.int64)
    np.add.at(egress, table[moved], np.broadcast_to(sizes[:, None], table.shape)[moved])
    return uplink, egress, ingress


def _seconds(traffic: tuple[Bytes, Bytes, Bytes], links: _Links, lengths: Bytes) -> float:
    uplink, egress, ingress = traffic
    return float(
        max(
            np.max((uplink + links.uplink_loads) / links.uplinks, initial=0.0),
            np.max((egress + links.egress_loads) / links.fabrics, initial=0.0),
            np.max(ingress / links.fabrics, initial=0.0),
            uplink.sum() / links.backend,
        )
    )
