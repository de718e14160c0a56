"""Flattens the state dict of a save. A job saves one of the same form again and again: its tree
and the names of its leaves are kept, without the values, and used again where they still hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from groupio.client.values import Encoded
from groupio.format.codec import encode_plain
from groupio.format.structure import Branch, Leaf, encode_structure
from groupio.torch.flatten import flatten, is_branch, kind_of, leaf_of

KEPT = 4
"""So many trees are kept: of one job that saves a few state dicts in turn."""


@dataclass(slots=True)
class Tree:
    """A flattened state dict. Whoever saves it puts what item tables cannot say into ``notes``,
    by leaf name."""

    root: Branch
    notes: dict[str, str] = field(default_factory=dict)
    _record: tuple[dict[str, str], Encoded] | None = None

    def record(self) -> Encoded:
        """The structure record."""
        if self._record is None or self._record[0] != self.notes:
            for leaf in self.root.leaves():
                leaf.note = self.notes.get(leaf.name, "")
            data = encode_plain(encode_structure(self.root), name="the structure record")
            self._record = (self.notes, Encoded(data))
        return self._record[1]


class Remembered:
    """Trees of earlier state dicts. Thread-safe: a tree that is in use is not in here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: list[Tree] = []

    @contextmanager
    def flattened(self, state_dict: Mapping[Any, Any]) -> Iterator[Tree]:
        """The tree of ``state_dict``, as :func:`groupio.torch.flatten.flatten` makes it.

        It holds the values only within the context.
        """
        tree = self._known(state_dict) or Tree(flatten(state_dict))
        try:
            yield tree
        finally:
            _forget_values(tree.root)
            tree.notes = {}
            with self._lock:
                self._trees = [tree, *self._trees[: KEPT - 1]]

    def _known(self, state_dict: Mapping[Any, Any]) -> Tree | None:
        with self._lock:
            trees, self._trees = self._trees, []
        found = None
        try:
            for tree in trees:
                if _refresh(tree.root, state_dict):
                    found = tree
                    break
                _forget_values(tree.root)
        finally:
            with self._lock:
                self._trees += [tree for tree in trees if tree is not found]
        return found


def _refresh(branch: Branch, value: Any) -> bool:
    """Put the leaves of ``value`` into the tree; False when it has another form."""
    if kind_of(value) != branch.kind or len(value) != len(branch.children):
        return False
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    for (key, node), (new_key, child) in zip(branch.children.items(), entries, strict=True):
        if new_key != key or type(new_key) is not type(key):
            return False
        if type(key) is tuple and repr(key) != repr(new_key):
            return False  # (1,) == (True,)
        if type(node) is Leaf:
            if not isinstance(child, torch.Tensor):
                if is_branch(node.path, child):
                    return False
                leaf_of(node.path, child)  # refuses what cannot be stored
            node.value = child
        else:
            assert isinstance(node, Branch)
            if not is_branch(node.path, child) or not _refresh(node, child):
                return False
    return True


def _forget_values(branch: Branch) -> None:
    """Keep no tensor of the caller alive."""
    branch.value = None
    for child in branch.children.values():
        if type(child) is Leaf:
            child.value = None
        else:
            assert isinstance(child, Branch)
            _forget_values(child)
