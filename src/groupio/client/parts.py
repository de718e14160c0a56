"""Index of what all members saved, by name: the boxes of each tensor, and the holders of each
value.

A member's own items come first: where they give what is wanted, nothing of the other members is
even decoded. Members with equal item tables are looked at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from groupio.client.store_reader import check_refs, member_layout
from groupio.format.items import ItemColumns
from groupio.format.manifest import ManifestReader
from groupio.format.structure import owner_of
from groupio.model import ItemKind, ItemSpec, MemberTable
from groupio.plan.layout import Layout
from groupio.plan.read import Box

Rows = npt.NDArray[np.int64]


class Saved(NamedTuple):
    """One item of one member."""

    spec: ItemSpec
    row: int
    """Its number in the member's item table."""
    rank: int

    @property
    def box(self) -> Box:
        """The box of the tensor that it holds."""
        return Box(self.spec.offsets, self.spec.shape)


class Found(NamedTuple):
    """The items that hold a name, one for each distinct box, the preferred member's first.

    ``differs``: members saved different values under the name, and none of them is this member's:
    nobody can say which one is meant.
    """

    saved: tuple[Saved, ...]
    differs: bool = False


class Parts(Protocol):
    """What was saved under each name."""

    def own(self, name: str) -> Sequence[Saved]:
        """This member's items of that name, none when it saved none."""
        ...

    def everyone(self, name: str, boxes: Sequence[Box] | None = None) -> Found:
        """All members' items of that name; with ``boxes`` those that have elements of them."""
        ...

    def rows(self, saved: Saved) -> Rows:
        """The rows in the manifest's chunk table of the item's chunks."""
        ...


class _Table:
    """An item table, and the members that have it, the preferred one first."""

    def __init__(self, columns: ItemColumns, starts: npt.NDArray[np.int64]) -> None:
        self.columns = columns
        self.starts = starts
        """Where the dimensions of each item start in the flat columns."""
        self.ranks: list[int] = []
        self.layout: Layout | None = None
        self.members: dict[int, MemberTable] = {}
        self.equal: npt.NDArray[np.bool_] | None = None
        """Per chunk: whether all the members have the same one."""
        self._like: dict[int, ItemSpec] = {}

    def saved(self, row: int, kind: int = -1) -> Saved:
        """The item of the preferred member; items of one ``kind`` differ in their names only."""
        like = self._like.get(kind)
        if like is None:
            spec = self.columns.spec(row, int(self.starts[row]))
            if kind >= 0:
                self._like[kind] = spec
        else:
            spec = ItemSpec(
                self.columns.names[row],
                like.kind,
                like.dtype,
                like.shape,
                like.global_shape,
                like.offsets,
                like.nbytes,
                like.replicated,
                like.origin,
                like.alias,
            )
        return Saved(spec, row, self.ranks[0])


class _Group:
    """Tables whose items differ in nothing but the boxes that they hold."""

    def __init__(self, by_owner: dict[str, list[int]]) -> None:
        self.by_owner = by_owner
        self.tables: list[_Table] = []
        self._having: dict[tuple[int, object], list[_Table]] = {}

    def having(self, row: int, boxes: Sequence[Box] | None) -> list[_Table]:
        """The tables whose item ``row`` has elements of one of the boxes (None: all tables)."""
        if boxes is None or len(self.tables) < _FEW:
            return self.tables
        key = self.kinds[row], tuple(boxes)
        found = self._having.get(key)
        if found is None:
            found = self._having[key] = self._look(row, boxes)
        return found

    @cached_property
    def kinds(self) -> list[int]:
        """Per item a number: items of one number are alike in all tables, but for their names.

        Layer after layer has the same shapes, so there are few numbers.
        """
        names = self.tables[0].columns.names
        known: dict[bytes, int] = {}
        # In blocks, so that the keys of many tables never stand in memory together.
        return [
            known.setdefault(key, len(known))
            for lo in range(0, len(names), _KEYS)
            for key in self._keys(lo, min(lo + _KEYS, len(names)))
        ]

    def _keys(self, lo: int, hi: int) -> Iterator[bytes]:
        """What the items from ``lo`` to ``hi`` are in all tables, their names left out."""
        first = self.tables[0]
        ends = first.starts[lo:hi] + first.columns.ndim[lo:hi]
        flat_lo, flat_hi = (int(first.starts[lo]), int(ends[-1]))
        scalars = [getattr(first.columns, name) for name in _ALIKE if name != "global_shape"]
        dims = [first.columns.global_shape]
        for table in self.tables:
            scalars += [table.columns.nbytes, table.columns.alias]
            dims += [table.columns.offsets, table.columns.shape]
        items = np.stack([column[lo:hi].astype(np.int64) for column in scalars], axis=1)
        flat = np.stack([column[flat_lo:flat_hi] for column in dims], axis=1)
        at = 0
        for item, end in zip(items, (ends - flat_lo).tolist(), strict=True):
            yield item.tobytes() + flat[at:end].tobytes()
            at = end

    def _look(self, row: int, boxes: Sequence[Box]) -> list[_Table]:
        first = self.tables[0]
        at = int(first.starts[row])
        dims = slice(at, at + int(first.columns.ndim[row]))
        corners = np.stack([table.columns.offsets[dims] for table in self.tables])
        ends = corners + np.stack([table.columns.shape[dims] for table in self.tables])
        found = np.zeros(len(self.tables), np.bool_)
        for box in boxes:
            lo = np.array(box.offsets, np.int64)
            hi = lo + np.array(box.shape, np.int64)
            # An empty item is said to have what lies around it, which does no harm.
            found |= ((corners < hi) & (ends > lo)).all(axis=1)
        return [self.tables[i] for i in np.flatnonzero(found).tolist()]


class _Place(NamedTuple):
    """Where the chunks of a member's items are in ``refs``: of each from ``first`` to ``ends``."""

    refs: Rows
    first: list[int]
    ends: list[int]


class Catalogue:
    """All members' items over a manifest, as member ``rank`` sees them. See :class:`Parts`.

    Its calls raise IntegrityError and FormatError as :class:`ManifestReader` does.
    """

    def __init__(self, manifest: ManifestReader, rank: int) -> None:
        self._manifest = manifest
        self.rank = rank
        self._tables: dict[int, _Table] = {}
        self._owners: dict[int, dict[str, list[int]]] = {}
        self._places: dict[int, _Place] = {}

    @cached_property
    def has_own(self) -> bool:
        """Whether this member is one of those that saved."""
        return self.rank in self._manifest.ranks

    @property
    def others(self) -> int:
        """How many other members saved."""
        return len(self._manifest.ranks) - self.has_own

    def names_of(self, rank: int) -> Iterable[str]:
        """The names of the values that ``rank`` saved, in its order."""
        return self._by_owner(self._manifest.columns(rank)).keys()

    def ranks(self) -> Iterable[int]:
        """The members, one of each item table: this one first, the others ascending."""
        return sorted(
            (table.ranks[0] for group in self._groups for table in group.tables),
            key=lambda rank: (rank != self.rank, rank),
        )

    def find(self, rank: int, item_name: str) -> Saved | None:
        """The item of exactly that name of ``rank``, records of the adapter included."""
        table = self._table(rank)
        names = table.columns.names
        for row in range(len(names) - 1, -1, -1):  # records stand last
            if names[row] == item_name:
                return table.saved(row)._replace(rank=rank)
        return None

    def own(self, name: str) -> Sequence[Saved]:
        """See :class:`Parts`."""
        if not self.has_own:
            return ()
        rows = self._own_rows.get(name)
        if rows is None:
            return ()
        items, rank = self._own_items, self.rank
        return [Saved(items[row], row, rank) for row in rows]

    def everyone(self, name: str, boxes: Sequence[Box] | None = None) -> Found:
        """See :class:`Parts`.

        Where this member saved the name, items of other members under it that are another kind of
        value, dtype or global shape are none of its business.
        """
        own = self.own(name)
        like = _kind_of(own[0].spec) if own else None
        first: dict[object, Saved] = {}
        differs = False
        for group in self._groups:
            for row in group.by_owner.get(name, ()):
                alike = group.kinds[row] if len(group.tables) >= _FEW else -1
                one = group.tables[0].saved(row, alike)
                kind = _kind_of(one.spec)
                like = like or kind
                if kind != like:
                    if not own:
                        return Found((), differs=True)
                    continue
                tensor = one.spec.kind is ItemKind.TENSOR
                tables = group.having(row, boxes if tensor else None)
                for table in tables:
                    saved = table.saved(row, alike)
                    known = first.setdefault(saved.box if tensor else None, saved)
                    if known.rank != self.rank and not known.spec.replicated:
                        same = self._same_in(table, row) and self._same(known, saved)
                        differs = differs or not same
                # Of a name that was saved at all, the reader is told what it is.
                if not tables and not first:
                    first[one.box] = one
        return Found(tuple(first.values()), differs)

    def rows(self, saved: Saved) -> Rows:
        """See :class:`Parts`."""
        place = self._places.get(saved.rank)
        if place is None:
            member, layout = self._laid_out(self._table(saved.rank), saved.rank)
            first = layout.item_chunk.tolist()
            ends = (layout.item_chunk + layout.item_chunks).tolist()
            place = self._places[saved.rank] = _Place(member.refs, first, ends)
        return place.refs[place.first[saved.row] : place.ends[saved.row]]

    def _same(self, one: Saved, other: Saved) -> bool:
        return one == other or (
            one.spec.nbytes == other.spec.nbytes
            and np.array_equal(self.rows(one), self.rows(other))
        )

    def _same_in(self, table: _Table, row: int) -> bool:
        """Whether all members that have the table have equal bytes of the item."""
        if len(table.ranks) == 1:
            return True
        if table.equal is None:
            first = self._laid_out(table, table.ranks[0])[0].refs
            table.equal = np.ones(len(first), np.bool_)
            for rank in table.ranks[1:]:
                refs = self._laid_out(table, rank)[0].refs
                if refs is not first:
                    table.equal &= refs == first
        layout = self._laid_out(table, table.ranks[0])[1]
        return bool(table.equal[slice(*layout.chunk_range(row))].all())

    def _laid_out(self, table: _Table, rank: int) -> tuple[MemberTable, Layout]:
        member = table.members.get(rank)
        if member is None:
            member = self._manifest.member(rank)
            if table.layout is None:
                table.layout = member_layout(self._manifest, member)
            else:
                check_refs(self._manifest, member, table.layout)
            table.members[rank] = member
        assert table.layout is not None
        return member, table.layout

    @cached_property
    def _own_rows(self) -> dict[str, list[int]]:
        return self._by_owner(self._manifest.columns(self.rank))

    @cached_property
    def _own_items(self) -> Sequence[ItemSpec]:
        return self._laid_out(self._table(self.rank), self.rank)[0].items

    def _table(self, rank: int) -> _Table:
        # The reader gives all members of one table the same columns.
        columns = self._manifest.columns(rank)
        table = self._tables.get(id(columns))
        if table is None:
            starts = np.cumsum(columns.ndim, dtype=np.int64) - columns.ndim
            table = self._tables[id(columns)] = _Table(columns, starts)
        if rank not in table.ranks:
            table.ranks.append(rank)
        return table

    def _by_owner(self, columns: ItemColumns) -> dict[str, list[int]]:
        """The items of each name; tables with equal names share the tuple of them."""
        found = self._owners.get(id(columns.names))
        if found is None:
            found = self._owners[id(columns.names)] = {}
            for row, item_name in enumerate(columns.names):
                name = owner_of(item_name)
                if name:
                    found.setdefault(name, []).append(row)
        return found

    @cached_property
    def _groups(self) -> list[_Group]:
        """The tables of all members, in groups: this member's first, then by their lowest rank."""
        ranks = sorted(self._manifest.ranks, key=lambda rank: (rank != self.rank, rank))
        tables = {id(table): table for table in map(self._table, ranks)}
        groups: dict[tuple[object, ...], _Group] = {}
        for table in tables.values():
            table.ranks.sort(key=lambda rank: (rank != self.rank, rank))
            columns = table.columns
            key = (
                id(columns.names),
                columns.words,
                *(getattr(columns, name).tobytes() for name in _ALIKE),
            )
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(self._by_owner(columns))
            group.tables.append(table)
        return list(groups.values())


_FEW = 8
"""With fewer tables than this it is not worth while to look which ones have a box."""

_KEYS = 4096
"""So many items are compared at a time."""

_ALIKE = ("kind", "dtype", "origin", "ndim", "global_shape", "replicated")


def _kind_of(spec: ItemSpec) -> tuple[ItemKind, str, tuple[int, ...]]:
    tensor = spec.kind is ItemKind.TENSOR
    return spec.kind, spec.dtype, spec.global_shape if tensor else ()
