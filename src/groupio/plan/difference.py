"""Finds where the holders of a diverging item begin to differ, as far as digests can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from groupio.model import ItemKind, ItemSpec, MemberTable, NodeReport
from groupio.plan.dedup import Divergence
from groupio.plan.layout import Layout, lay_out
from groupio.plan.merge import Merged

__all__ = ["Difference", "first_differences"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first chunk that is not the same everywhere.

    ``ranks`` hold it: the first is one of the largest group of equals, each other one differs
    from it in this chunk and in none before. The chunk is bytes ``start <= b < stop`` of the
    item's local bytes, and lies in the lease of ``ranks[i]`` from the virtual offset
    ``places[i]`` on. ``spec`` is the item as the first of ``ranks`` has it.
    """

    spec: ItemSpec
    ranks: tuple[int, ...]
    start: int
    stop: int
    places: tuple[int, ...]


def first_differences(
    reports: Sequence[NodeReport], merged: Merged, found: Sequence[Divergence]
) -> list[Difference | None]:
    """For each of ``found``, which ``divergence(reports, merged)`` gave, where it begins.

    None where the holders do not agree on what the item is (its kind, dtype, shape or size).
    """
    members = _Members(reports, merged)
    return [_first(members, one) for one in found]


class _Holding(NamedTuple):
    """What one member holds of an item; ``rows`` are its chunks in the merged table."""

    spec: ItemSpec
    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class _Members:
    """Looks up what a member holds; members with one table share its layout."""

    def __init__(self, reports: Sequence[NodeReport], merged: Merged) -> None:
        self._members: dict[int, tuple[MemberTable, npt.NDArray[np.int64]]] = {
            member.rank: (member, rows)
            for report, rows in zip(reports, merged.rows, strict=True)
            for member in report.members
        }
        self._tables: dict[bytes, tuple[dict[str, int], Layout]] = {}

    def holding(self, rank: int, name: str) -> _Holding:
        member, rows = self._members[rank]
        if member.items_id not in self._tables:
            index = {item.name: i for i, item in enumerate(member.items)}
            self._tables[member.items_id] = (index, lay_out(member.items))
        index, layout = self._tables[member.items_id]
        lo, hi = layout.chunk_range(index[name])
        return _Holding(
            member.items[index[name]],
            rows[member.refs[lo:hi]],
            layout.chunk_start[lo:hi],
            layout.chunk_length[lo:hi],
        )


def _first(members: _Members, found: Divergence) -> Difference | None:
    """Compare one of each group of equals with one of the largest group of its part."""
    parts: dict[tuple[Any, ...], list[tuple[int, int, _Holding]]] = {}
    for group in found.groups:
        held = members.holding(group[0], found.item)
        parts.setdefault(_part(held.spec), []).append((len(group), group[0], held))
    same_part = next((held for held in parts.values() if len(held) > 1), None)
    if same_part is None:
        return None
    _, rank, most = max(same_part, key=lambda one: one[0])
    first = {
        other: int(np.argmax(held.rows != most.rows))
        for _, other, held in same_part
        if other != rank
    }
    chunk = min(first.values())
    holding = {rank: most, **{o: held for _, o, held in same_part if first.get(o) == chunk}}
    start = int(most.lengths[:chunk].sum())
    return Difference(
        spec=most.spec,
        ranks=tuple(holding),
        start=start,
        stop=start + int(most.lengths[chunk]),
        places=tuple(int(held.starts[chunk]) for held in holding.values()),
    )


def _part(spec: ItemSpec) -> tuple[Any, ...]:
    """What two holders share whose chunks can be compared one by one."""
    if spec.kind is ItemKind.TENSOR:
        return (spec.kind, spec.dtype, spec.global_shape, spec.offsets, spec.shape)
    return (spec.kind, spec.nbytes)
