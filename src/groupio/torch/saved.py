"""The state dict of an epoch as one rank sees it: its own tree, and those of all members as one."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cached_property
from typing import Any

from groupio.client.parts import Catalogue, Saved
from groupio.client.store_reader import StoreReader
from groupio.client.wants import Collector
from groupio.errors import FormatError, IntegrityError
from groupio.format.codec import Converted, decode_plain
from groupio.format.manifest import ManifestReader
from groupio.format.structure import (
    KEYS,
    PATHS,
    STRUCTURE,
    Branch,
    Leaf,
    Path,
    Step,
    decode_structure,
    path_text,
)
from groupio.torch.converted import LISTED
from groupio.torch.matching import Matching, Template, match, match_names


class SavedState:
    """What an epoch holds for rank ``rank`` of ``world_size``.

    ``same_world``: the epoch was saved by as many ranks. Its own counterpart is then what a rank
    is compared with; otherwise all that was saved, as one tree.
    """

    def __init__(
        self, reader: StoreReader, manifest: ManifestReader, rank: int, world_size: int
    ) -> None:
        self.parts = Catalogue(manifest, rank)
        self.same_world = manifest.header.world_size == world_size and self.parts.has_own
        self._reader = reader
        self._manifest = manifest
        self._records: dict[bytes, Any] = {}

    def match(self, template: Template) -> Matching:
        """Pair ``template`` with what was saved; see :mod:`groupio.torch.matching`."""
        if not self._has_structure:
            return match_names(template, self._named, self._paths, self.parts)
        if not self.same_world:
            return match(template, self._merged, self.parts, self.value)
        found = match(template, self._own, self.parts, self.value)
        if not found.missing or not self.parts.others:
            return found
        # Another member may have what this one did not save, such as a pipeline stage.
        wider = match(template, self._merged, self.parts, self.value)
        mine = set(self.parts.names_of(self.parts.rank))
        wider.unexpected = [name for name in wider.unexpected if name in mine]
        return wider

    def tree(self) -> Branch:
        """All that was saved as one tree; without a structure record as far as its paths were
        kept."""
        return self._merged if self._has_structure else self._paths

    @cached_property
    def _first(self) -> int:
        return next(iter(self.parts.ranks()))

    @cached_property
    def _has_structure(self) -> bool:
        first = self.parts.rank if self.parts.has_own else self._first
        return self.parts.find(first, STRUCTURE) is not None

    @cached_property
    def _own(self) -> Branch:
        return self._tree(self.parts.rank)

    @cached_property
    def _merged(self) -> Branch:
        """All that was saved. Where members contradict each other, the first one counts."""
        root: Branch | None = None
        seen: set[str] = set()
        for rank in self.parts.ranks():
            names = self.parts.names_of(rank)
            if root is not None and seen.issuperset(names):
                continue
            seen.update(names)
            tree = self._tree(rank)
            if root is None:
                root = tree
            else:
                _merge(root, tree)
        assert root is not None
        return root

    def _tree(self, rank: int) -> Branch:
        record = self.parts.find(rank, STRUCTURE)
        if record is None:
            raise self._contradiction(rank)
        tree = decode_structure(self._read(record))
        # Items may be missing: ranks that divide replicas do not all have a part of each.
        if not {leaf.name for leaf in tree.leaves()}.issuperset(self.parts.names_of(rank)):
            raise self._contradiction(rank)
        return tree

    def _contradiction(self, rank: int) -> IntegrityError:
        return IntegrityError(
            f"the structure record of rank {rank} and its items contradict each other",
            path=self._manifest.path,
            epoch=self._manifest.header.epoch,
        )

    @cached_property
    def _named(self) -> dict[str, Leaf]:
        return {
            name: Leaf((), name=name) for r in self.parts.ranks() for name in self.parts.names_of(r)
        }

    def notes(self, nodes: Iterable[Branch | Leaf]) -> list[str]:
        """What a load should say that makes values of the saved ``nodes`` anew."""
        untyped = [
            path_text(node.path)
            for node in nodes
            if isinstance(node, Branch) and not self._has_structure and not self._typed
        ]
        if not untyped:
            return []
        return [
            f"{', '.join(untyped[:LISTED])}: the planner of this save kept neither types of keys "
            "nor of containers; they are loaded with str keys in dicts (GroupSavePlanner keeps "
            "them)"
        ]

    @cached_property
    def _typed(self) -> bool:
        """Whether the DCP classes kept the types of keys and containers."""
        return any(self.parts.find(rank, KEYS) is not None for rank in self.parts.ranks())

    @cached_property
    def _paths(self) -> Branch:
        """The named leaves as a tree, as far as the DCP classes kept their paths."""
        root = Branch((), "dict")
        for rank in self.parts.ranks():
            typed = self.parts.find(rank, KEYS)
            if typed is not None:
                tree = decode_structure(self._read(typed))
                _prune(tree, self._named)
                _merge(root, tree)
                continue
            record = self.parts.find(rank, PATHS)
            for name, keys in ({} if record is None else _paths_of(self._read(record))).items():
                if name in self._named:
                    _plant(root, keys, name)
        return root

    def value(self, saved: Saved, converted: list[Converted] | None = None) -> Any:
        """A plain value, new at each call; ``converted`` as of :func:`decode_plain`.

        IntegrityError when it is damaged, StorageError when it cannot be read.
        """
        data = bytearray(saved.spec.nbytes)
        wants = Collector()
        wants.add_whole(saved.spec, self.parts.rows(saved), memoryview(data))
        self._reader.read_wants(self._manifest, wants.finish())
        return decode_plain(data, converted)

    def _read(self, record: Saved) -> Any:
        key = self.parts.rows(record).tobytes()
        if key not in self._records:
            self._records[key] = self.value(record)
        return self._records[key]


def _merge(here: Branch, other: Branch) -> None:
    """Add to ``here`` what only ``other`` has."""
    for key, child in other.children.items():
        mine = here.children.setdefault(key, child)
        if mine is not child and isinstance(mine, Branch) and isinstance(child, Branch):
            _merge(mine, child)


def _prune(branch: Branch, known: Container[str]) -> None:
    """Drop the leaves that nobody saved."""
    for key, child in list(branch.children.items()):
        if isinstance(child, Branch):
            _prune(child, known)
        elif child.name not in known:
            del branch.children[key]


def _paths_of(record: Any) -> dict[str, list[str | int]]:
    if type(record) is not dict or not all(
        type(keys) is list and keys and all(type(key) in (str, int) for key in keys)
        for keys in record.values()
    ):
        raise FormatError(f"the record {PATHS} is malformed")
    return record


def _plant(root: Branch, keys: list[str | int], name: str) -> None:
    """Put the leaf ``name`` at its path; an index is one of a list."""
    here = root
    path: Path = ()
    for number, key in enumerate(keys):
        path = (*path, Step(key, type(key) is int))
        if number == len(keys) - 1:
            here.children.setdefault(key, Leaf(path, name=name))
            return
        kind = "list" if type(keys[number + 1]) is int else "dict"
        below = here.children.setdefault(key, Branch(path, kind))
        if not isinstance(below, Branch):
            return  # two members disagree: by its name it can still be loaded
        here = below
