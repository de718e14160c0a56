"""Of which tensors the chunks are that nodes write for others.

A segment of an epoch with a door has frames, through which torch reads tensors where they lie. A
node that writes chunks of another one knows nothing of their tensors, so the order says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.model import ItemSpec, MemberTable, NodeReport
from groupio.plan.grouped import GroupPlan
from groupio.plan.layout import Layout, lay_out
from groupio.plan.merge import Merged, find_rows, merge
from groupio.plan.orders import Fetch, Labels


class _Owners(NamedTuple):
    """Where each unique chunk first occurs: the member (-1: in none), and its chunk there."""

    members: tuple[MemberTable, ...]
    layouts: dict[bytes, Layout]
    """By the id of the members' item tables, as far as they were needed."""
    member: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.int64]


def label_moves(plan: GroupPlan, reports: Sequence[NodeReport]) -> GroupPlan:
    """``plan`` with labels on all chunks that are written by others than their holders.

    The chunks of a fetch come in the order of their tensors, so that neighbours stay neighbours.
    ``reports`` are those of which the plan was made.
    """
    if not any(part.write.any() for order in plan.orders.values() for part in order.fetch):
        return plan
    merged = merge(reports)
    owners = _find_owners(reports, merged)
    fetches = [(node, part) for node, order in plan.orders.items() for part in order.fetch]
    # All at once: each look-up sorts all chunks of the group.
    rows = find_rows(merged, np.concatenate([part.digests for _, part in fetches]))
    borders = np.cumsum([len(part.lengths) for _, part in fetches])[:-1]
    labelled: dict[str, list[Fetch]] = {node: [] for node in plan.orders}
    for (node, part), mine in zip(fetches, np.split(rows, borders), strict=True):
        labelled[node].append(_label(part, mine, owners) if part.write.any() else part)
    orders = {
        node: replace(order, fetch=tuple(labelled[node])) for node, order in plan.orders.items()
    }
    return replace(plan, orders=orders)


def _find_owners(reports: Sequence[NodeReport], merged: Merged) -> _Owners:
    n = len(merged.lengths)
    member, chunk = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    members = tuple(one for report in reports for one in report.members)
    of_report = [
        rows for report, rows in zip(reports, merged.rows, strict=True) for _ in report.members
    ]
    for number in reversed(range(len(members))):
        rows = of_report[number][members[number].refs]
        # Of equal chunks the first one counts: later assignments win, so the last comes first.
        member[rows[::-1]] = number
        chunk[rows[::-1]] = np.arange(len(rows))[::-1]
    return _Owners(members, {}, member, chunk)


def _label(part: Fetch, rows: npt.NDArray[np.int64], owners: _Owners) -> Fetch:
    """``part`` with labels; ``rows`` int64[n] are its chunks among those of the group."""
    items: list[ItemSpec] = []
    owner, number = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    for which in np.unique(owners.member[rows]).tolist():
        if which < 0:
            continue  # chunks of no member are no tensors
        table = owners.members[which]
        layout = owners.layouts.get(table.items_id)
        if layout is None:
            layout = owners.layouts[table.items_id] = lay_out(table.items)
        mine = np.flatnonzero(owners.member[rows] == which)
        chunks = owners.chunk[rows[mine]]
        used, place = np.unique(layout.chunk_item[chunks], return_inverse=True)
        owner[mine] = len(items) + place
        number[mine] = chunks - layout.item_chunk[used[place]]
        items += [table.items[i] for i in used.tolist()]
    order = np.lexsort((number, owner))
    return Fetch(
        source=part.source,
        digests=part.digests[order],
        lengths=part.lengths[order],
        keep=part.keep[order],
        write=part.write[order],
        others=part.others,
        labels=Labels(tuple(items), owner[order], number[order]),
    )
