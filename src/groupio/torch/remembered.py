"""Flattens the state dict of a save. A job saves one of the same form again and again: its tree
and the names of its leaves are kept, without the values, and used again where they still hold."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from groupio.client.values import Encoded
from groupio.format.codec import encode_plain
from groupio.format.structure import Branch, Leaf, encode_structure
from groupio.torch.flatten import flatten, form_of, is_branch, is_whole, leaf_of

KEPT = 4
"""So many trees are kept: of one job that saves a few state dicts in turn."""


@dataclass(slots=True)
class Tree:
    """A flattened state dict. Whoever saves it puts what item tables cannot say into ``notes``,
    by leaf name."""

    root: Branch
    notes: dict[str, str] = field(default_factory=dict)
    leaves: list[Leaf] = field(init=False)
    """All leaves, in the order of the state dict."""
    branches: list[Branch] = field(init=False)
    _record: tuple[dict[str, str], Encoded] | None = None

    def __post_init__(self) -> None:
        self.leaves = list(self.root.leaves())
        self.branches = list(self.root.branches())

    def forget_values(self) -> None:
        """Keep no tensor of the caller alive."""
        for leaf in self.leaves:
            leaf.value = None
        for branch in self.branches:
            branch.value = None

    def record(self) -> Encoded:
        """The structure record."""
        if self._record is None or self._record[0] != self.notes:
            for leaf in self.leaves:
                leaf.note = self.notes.get(leaf.name, "")
            data = encode_plain(encode_structure(self.root), name="the structure record")
            self._record = (self.notes, Encoded(data))
        return self._record[1]


class Remembered:
    """Trees of earlier state dicts. Thread-safe: a tree that is in use is not in here."""

    def __init__(self) -> None:
        # Single operations of a deque: a signal handler may come, and save, between any two.
        self._trees: deque[Tree] = deque(maxlen=KEPT)

    @contextmanager
    def flattened(self, state_dict: Mapping[Any, Any]) -> Iterator[Tree]:
        """The tree of ``state_dict``, as :func:`groupio.torch.flatten.flatten` makes it.

        It holds the values only within the context.
        """
        tree = self._known(state_dict) or Tree(flatten(state_dict))
        try:
            yield tree
        finally:
            tree.forget_values()
            tree.notes = {}
            self._trees.appendleft(tree)

    def _known(self, state_dict: Mapping[Any, Any]) -> Tree | None:
        trees: list[Tree] = []
        with contextlib.suppress(IndexError):
            while True:
                trees.append(self._trees.popleft())
        found = None
        try:
            for tree in trees:
                if _refresh(tree.root, state_dict):
                    found = tree
                    break
                tree.forget_values()
        finally:
            self._trees.extend(tree for tree in trees if tree is not found)
        return found


def _refresh(branch: Branch, value: Any) -> bool:
    """Put the leaves of ``value`` into the tree; False when it has another form."""
    if form_of(value) != (branch.kind, branch.detail, branch.was):
        return False
    if len(value) != len(branch.children):
        return False
    children: Iterable[Any] = value
    if isinstance(value, Mapping):
        if not _same_keys(list(branch.children), list(value)):
            return False
        children = value.values()
    for node, child in zip(branch.children.values(), children, strict=True):
        if type(node) is Leaf:
            if node.whole:
                if not is_whole(child):
                    return False
            elif type(child) is not torch.Tensor and not isinstance(child, torch.Tensor):
                if is_branch(node.path, child):
                    return False
                leaf_of(node.path, child)  # refuses what cannot be stored
            node.value = child
        else:
            assert isinstance(node, Branch)
            if not is_branch(node.path, child) or not _refresh(node, child):
                return False
    return True


def _same_keys(keys: list[Any], new: list[Any]) -> bool:
    """Whether the keys are equal and of equal types: True is no 1, and (True,) no (1,)."""
    if keys != new or list(map(type, keys)) != list(map(type, new)):
        return False
    return tuple not in map(type, keys) or repr(keys) == repr(new)
