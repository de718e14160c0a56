"""Tables of the live nodes that have each chunk in memory, and of what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from groupio.model import NodeLink, NodeReport
from groupio.plan.merge import Merged, find_holders, find_rows
from groupio.plan.orders import NodeOrder


@dataclass(frozen=True, slots=True)
class Holding:
    """Chunks are those of a ``Merged``, nodes are numbered like the live links of the plan.

    ``holder_sets[holder_set[c]]`` (ascending) have chunk ``c`` in memory, as their own or as a
    copy; ``stored`` bool[n]: it is in a segment; ``under_way`` bool[n]: an earlier order writes it.
    ``table`` is the number of the live node of each report, -1 when that is lost. ``kept_bytes``
    int64[nodes] is what the copies take.
    """

    holder_set: npt.NDArray[np.int32]
    holder_sets: tuple[tuple[int, ...], ...]
    stored: npt.NDArray[np.bool_]
    under_way: npt.NDArray[np.bool_]
    table: tuple[int, ...]
    kept_bytes: npt.NDArray[np.int64]


def find_holding(
    reports: Sequence[NodeReport],
    merged: Merged,
    links: Sequence[NodeLink],
    lost: frozenset[str],
    done: Sequence[NodeReport],
    copies: Mapping[str, npt.NDArray[np.uint8]],
    earlier: Iterable[Mapping[str, NodeOrder]],
) -> Holding:
    """Arguments as in :func:`groupio.plan.grouped.plan_group`; ``links`` of the live nodes."""
    n = len(merged.lengths)
    numbers = {link.node: number for number, link in enumerate(links)}
    table = tuple(numbers.get(report.node, -1) for report in reports)
    stored, from_memory = _stored(reports, merged, lost, done)
    under_way = np.zeros(n, np.bool_)
    held: list[list[npt.NDArray[np.int64]]] = [[] for _ in links]
    kept = _copies(merged, numbers, copies)
    for orders in earlier:
        _add_orders(orders, reports, merged, lost, numbers, under_way, kept)
    plain = not any(kept.values()) and -1 not in table and all(m is None for m in from_memory)
    kept_bytes = np.zeros(len(links), np.int64)
    if plain:
        sets = tuple(tuple(sorted(table[r] for r in one)) for one in merged.holder_sets)
        return Holding(merged.holder_set, sets, stored, under_way, table, kept_bytes)
    for node, rows, there in zip(table, merged.rows, from_memory, strict=True):
        if node >= 0:
            held[node].append(rows if there is None else rows[there])
    for node, parts in kept.items():
        copied = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
        own = np.isin(copied, np.concatenate([np.empty(0, np.int64), *held[node]]))
        kept_bytes[node] = merged.lengths[copied[~own]].sum()
        held[node].append(copied[~own])
    none = np.empty(0, np.int64)
    holder_set, sets = find_holders([np.concatenate([none, *mine]) for mine in held], n)
    return Holding(holder_set, sets, stored, under_way, table, kept_bytes)


def _stored(
    reports: Sequence[NodeReport],
    merged: Merged,
    lost: frozenset[str],
    done: Sequence[NodeReport],
) -> tuple[npt.NDArray[np.bool_], list[npt.NDArray[np.bool_] | None]]:
    """What is in a segment; and per report which rows are in memory (None: all)."""
    stored = np.zeros(len(merged.lengths), np.bool_)
    from_memory: list[npt.NDArray[np.bool_] | None] = []
    for report, rows in zip(reports, merged.rows, strict=True):
        segments = report.chunks.segments
        placed = segments >= 0
        there = None
        if placed.any():
            # The last place stands for the rows without a segment.
            own = np.array([*(segment.own for segment in report.segments), False], np.bool_)
            waves = own[segments]
            if waves.any():
                there = ~waves
            if report.node in lost:
                # A lost node can have lost what it wrote last.
                placed = placed & ~waves
            stored[rows[placed]] = True
        from_memory.append(there)
    for report in done:
        durable = find_rows(merged, report.chunks.digests[report.chunks.segments >= 0])
        stored[durable[durable >= 0]] = True
    return stored, from_memory


def _copies(
    merged: Merged, numbers: Mapping[str, int], copies: Mapping[str, npt.NDArray[np.uint8]]
) -> dict[int, list[npt.NDArray[np.int64]]]:
    kept: dict[int, list[npt.NDArray[np.int64]]] = {number: [] for number in numbers.values()}
    for node, digests in copies.items():
        rows = find_rows(merged, digests)
        if node in numbers and len(rows):
            kept[numbers[node]].append(rows[rows >= 0])
    return kept


def _add_orders(
    orders: Mapping[str, NodeOrder],
    reports: Sequence[NodeReport],
    merged: Merged,
    lost: frozenset[str],
    numbers: Mapping[str, int],
    under_way: npt.NDArray[np.bool_],
    kept: dict[int, list[npt.NDArray[np.int64]]],
) -> None:
    """What the live nodes still do of an earlier plan, as far as its sources live."""
    rows_of = {report.node: rows for report, rows in zip(reports, merged.rows, strict=True)}
    for node, order in orders.items():
        if node in lost:
            continue
        if len(order.write):
            under_way[rows_of[node][order.write]] = True
        for fetch in order.fetch:
            if {fetch.source, *fetch.others} <= lost:
                continue
            rows = find_rows(merged, fetch.digests)
            under_way[rows[fetch.write]] = True
            kept[numbers[node]].append(rows[fetch.keep])
