"""The content of an epoch's door: the union of what its members saved, by name.

Where members differ without having declared it, the lowest rank's value stands under the name.
Names and paths are those that ``torch.distributed.checkpoint`` gives to the same state dict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupio.client.store_reader import StoreReader, member_layout
from groupio.format.frames import DTYPE_BYTES
from groupio.format.manifest import ManifestReader
from groupio.format.structure import (
    KEYS,
    PATHS,
    RESERVED,
    STRUCTURE,
    Branch,
    Leaf,
    Step,
    decode_structure,
    owner_of,
    rebuild,
)
from groupio.model import ItemKind, ItemSpec, MemberTable
from groupio.plan.layout import Layout

NamePath = tuple[str | int, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class Shown:
    """A tensor as the door shows it: ``rows`` of the epoch's table are the chunks of ``spec``.

    ``more`` has its other boxes by (offsets, shape), each with its item and rows.
    """

    name: str
    dtype: str
    spec: ItemSpec
    rows: list[int]
    more: dict[Box, tuple[ItemSpec, list[int]]] | None = None

    def add(self, spec: ItemSpec, rows: list[int]) -> None:
        """Another item of the name; what is no further box of the same tensor is left out."""
        first = self.spec
        if not rows or (spec.dtype, spec.global_shape) != (first.dtype, first.global_shape):
            return
        if not self.rows:
            self.spec, self.rows = spec, rows
        elif (spec.offsets, spec.shape) != (first.offsets, first.shape):
            self.more = self.more or {}
            self.more.setdefault((spec.offsets, spec.shape), (spec, rows))

    def boxes(self) -> list[tuple[ItemSpec, list[int]]]:
        """All boxes, none twice."""
        return [(self.spec, self.rows), *(self.more or {}).values()]


@dataclass(slots=True)
class Contents:
    """The tensors and values of an epoch, by the names under which torch asks for them.

    ``unseen`` are names of tensors in dtypes that have no place in a door.
    """

    tensors: list[Shown] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, NamePath] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)


def read_contents(reader: StoreReader, manifest: ManifestReader, threads: int) -> Contents:
    """What the door of the epoch shows, its values read and verified (tensors are not read).

    IntegrityError when a chunk of a value is damaged.
    """
    collector = _Collector(reader, manifest, threads)
    for member in collector.members():
        collector.add(member)
    return collector.finish()


@dataclass(slots=True)
class _Named:
    """How torch calls something of the epoch, and where it stands in the state dict."""

    name: str
    path: NamePath | None = None
    note: str = ""
    whole: Branch | None = None
    """The value is this list or tuple, which was taken apart, as a whole."""


class _Collector:
    """Goes through the members in the order of their ranks."""

    def __init__(self, reader: StoreReader, manifest: ManifestReader, threads: int) -> None:
        self._reader = reader
        self._manifest = manifest
        self._threads = threads
        self._tensors: dict[str, Shown] = {}
        self._values: dict[str, int] = {}  # the lowest rank that has the value
        self._order: dict[str, None] = {}
        self._roots: list[Branch] = []
        self._key_trees: list[Branch] = []
        self._paths: dict[str, NamePath] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._layouts: dict[bytes, Layout] = {}

    def members(self) -> Iterator[MemberTable]:
        """Those members that have something that no earlier one has."""
        for rank in self._manifest.ranks:
            member = self._manifest.member(rank)
            content = (member.items_id, member.refs.tobytes())
            if content not in self._seen:
                self._seen.add(content)
                yield member

    def add(self, member: MemberTable) -> None:
        """Take the names of ``member`` in."""
        layout = self._layouts.get(member.items_id)
        if layout is None:
            layout = self._layouts[member.items_id] = member_layout(self._manifest, member)
        first, count = layout.item_chunk.tolist(), layout.item_chunks.tolist()
        refs = member.refs.tolist()
        tensors = self._tensors
        for index, spec in enumerate(member.items):
            name = spec.name
            if name.startswith(RESERVED):
                rows = refs[first[index] : first[index] + count[index]]
                if name in (STRUCTURE, PATHS, KEYS):
                    self._add_record(member.rank, name, rows)
                name = owner_of(name)
                if not name:
                    continue
            lo = first[index]
            rows = refs[lo : lo + count[index]]
            shown = tensors.get(name)
            if shown is not None:
                shown.add(spec, rows)
            elif name not in self._values:
                self._order[name] = None
                if _is_tensor(spec):
                    tensors[name] = Shown(name, spec.dtype, spec, rows)
                else:
                    self._values[name] = member.rank

    def _add_record(self, rank: int, name: str, rows: Sequence[int]) -> None:
        content = (name, *rows)
        if content in self._seen:
            return
        self._seen.add(content)
        record = self._read(rank, [name])[name]
        if name == STRUCTURE:
            self._roots.append(decode_structure(record))
        elif name == KEYS:
            self._key_trees.append(decode_structure(record))
        elif isinstance(record, dict):
            for known, path in record.items():
                self._paths.setdefault(known, tuple(path))

    def _read(self, rank: int, names: Sequence[str]) -> dict[str, Any]:
        return self._reader.read_items(self._manifest, rank, names, threads=self._threads)

    def finish(self) -> Contents:
        """Everything under torch's names, with the values."""
        found = Contents()
        special = self._special()
        values = self._read_values()
        for name in self._order:
            entry = special.get(name)
            if entry is None:
                entry = _Named(name)
            shown = self._tensors.get(name)
            if entry.whole is not None:
                value = rebuild(entry.whole, lambda leaf: values[leaf.name])
                found.values.setdefault(entry.name, value)
            elif shown is None:
                found.values[entry.name] = values[name]
            elif entry.note and not _same_size(entry.note, shown.dtype):
                found.unseen.append(entry.name)
                continue
            else:
                shown.name = entry.name
                shown.dtype = entry.note or shown.dtype
                found.tensors.append(shown)
            path = entry.path or self._paths.get(name)
            if path is not None:
                found.paths[entry.name] = path
        self._add_wholes(found, values)
        return found

    def _add_wholes(self, found: Contents, values: dict[str, Any]) -> None:
        """Show the other mappings without tensors whole too, where one was saved whole, or has keys
        that are no str.

        The names of DCP have every key as text, and torch's planner would put ``"5"`` beside ``5``.
        Until torch 2.3 a mapping without tensors was one value under its own name; later planners
        take a checkpoint that has these names for one of that time and read the values whole,
        whose keys and classes are exact.
        """
        trees = [*self._roots, *self._key_trees]
        wholes = [node for root in trees for node in _without_tensors(root, self._tensors)]
        one_is_whole = any(leaf.whole for root in self._roots for leaf in root.leaves())
        if not one_is_whole and not any(_has_other_keys(node) for node in wholes):
            return
        for node in wholes:
            name = _joined(node)
            if name in found.values or name in self._tensors:
                continue
            if all(leaf.name in values for leaf in node.leaves()):
                found.values[name] = rebuild(node, lambda leaf: values[leaf.name])
                found.paths[name] = _keys(node)

    def _read_values(self) -> dict[str, Any]:
        wanted: dict[int, list[str]] = {}
        for name, rank in self._values.items():
            wanted.setdefault(rank, []).append(name)
        values: dict[str, Any] = {}
        for rank, names in wanted.items():
            values |= self._read(rank, names)
        return values

    def _special(self) -> dict[str, _Named]:
        """Item name -> what torch calls it, where that is not plain from the name itself.

        The paths of the other names go to ``_paths``.
        """
        special: dict[str, _Named] = {}
        for root in self._roots:
            self._walk(root, special)
        # An escaped name has a name of torch's only if that is nobody else's.
        times = Counter(entry.name for entry in special.values() if entry.whole is None)
        for item, entry in special.items():
            if entry.name != item and (times[entry.name] > 1 or entry.name in self._order):
                entry.name, entry.path = item, (item,)
        return special

    def _walk(self, node: Branch, special: dict[str, _Named]) -> None:
        for child in node.children.values():
            if isinstance(child, Leaf):
                name, path = child.name, child.path
                if child.note or name.startswith(RESERVED):
                    entry = _Named(_joined(child), _keys(child), child.note)
                    special.setdefault(name, entry)
                elif len(path) > 1:
                    self._paths.setdefault(name, _keys(child))
            elif self._is_whole(child):
                for leaf in child.leaves():
                    special.setdefault(leaf.name, _Named(_joined(child), _keys(child), "", child))
            else:
                self._walk(child, special)

    def _is_whole(self, node: Branch) -> bool:
        """Whether torch takes the list or tuple as one value, and there is one value of it."""
        return _is_value_to_torch(node, self._tensors) and all(
            leaf.name in self._values for leaf in node.leaves()
        )


def _is_value_to_torch(node: Branch, tensors: dict[str, Shown]) -> bool:
    """torch takes apart mappings, and lists that hold mappings, tensors or such lists."""
    if node.keyed:
        return False
    if node.kind != "list":
        return True
    return all(
        child.name not in tensors if isinstance(child, Leaf) else _is_value_to_torch(child, tensors)
        for child in node.children.values()
    )


def _without_tensors(node: Branch, tensors: Mapping[str, Shown]) -> Iterator[Branch]:
    """The largest mappings and lists below ``node`` in which torch finds no tensor."""
    for child in node.children.values():
        if isinstance(child, Branch) and (child.keyed or child.kind == "list"):
            if _holds_tensors(child, tensors):
                yield from _without_tensors(child, tensors)
            else:
                yield child


def _holds_tensors(node: Branch | Leaf, tensors: Mapping[str, Shown]) -> bool:
    if isinstance(node, Leaf):
        return node.name in tensors
    return any(_holds_tensors(child, tensors) for child in node.children.values())


def _has_other_keys(node: Branch) -> bool:
    return any(
        branch.keyed and any(type(key) is not str for key in branch.children)
        for branch in node.branches()
    )


def _is_tensor(spec: ItemSpec) -> bool:
    """Numpy arrays are values to torch; parts of a larger array can only be a tensor."""
    return (
        spec.kind is ItemKind.TENSOR
        and spec.dtype in DTYPE_BYTES
        and (spec.origin == "torch" or spec.shape != spec.global_shape)
    )


def _same_size(dtype: str, stored: str) -> bool:
    return dtype in DTYPE_BYTES and DTYPE_BYTES[dtype] == DTYPE_BYTES[stored]


def _joined(node: Leaf | Branch) -> str:
    return ".".join(str(step.key) for step in node.path)


def _keys(node: Leaf | Branch) -> NamePath:
    return tuple(_key(step) for step in node.path)


def _key(step: Step) -> str | int:
    return step.key if step.indexed else str(step.key)
