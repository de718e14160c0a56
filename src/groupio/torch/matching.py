"""Compares the state dict that is to be filled with what was saved. Touches nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from groupio.client.parts import Parts, Saved
from groupio.errors import InvalidInput, StateMismatch
from groupio.format.codec import Converted
from groupio.format.structure import Branch, Leaf, path_text
from groupio.model import PACK_ITEM_BYTES, PAGE_BYTES
from groupio.torch.flatten import flatten, taken_apart
from groupio.torch.sourcing import Fill, Missing, Take, fill_of, same_content, take_of
from groupio.torch.tensors import Local, local_part, overlaps_itself
from groupio.torch.wholes import Differences, compare, fits

LISTED = 100
"""At most so many names of a kind stand in a message; the fields of the error have all."""

_LEAF_BYTES = 256
"""What a leaf may take in the structure record and the packs, or a plain value itself."""

_RECORD_BYTES = 64 << 10


@dataclass(slots=True)
class Template:
    """The state dict that a load fills: its tree, and the local part of each of its tensors."""

    root: Branch
    locals: dict[str, Local]


@dataclass(slots=True)
class Matching:
    """What a load will do, and every difference.

    ``fill`` are the tensors to fill in place, by their names; ``replace`` the plain leaves of the
    template with the saved nodes that they take, whose values ``take`` has by item name. ``merge``
    are the containers of the template that were saved whole, with what was saved; the containers
    in there that came back as others are in ``converted``.
    """

    fill: dict[str, Fill] = field(default_factory=dict)
    replace: list[tuple[Leaf, Branch | Leaf]] = field(default_factory=list)
    take: dict[str, Take] = field(default_factory=dict)
    merge: list[tuple[Branch | Leaf, Any]] = field(default_factory=list)
    converted: dict[str, list[Converted]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    versions: list[tuple[OrderedDict[Any, Any], Any]] = field(default_factory=list)
    """Modules' state dicts of the template, and the ``_metadata`` that they were saved with."""

    def mismatch(self, strict: bool, where: str) -> StateMismatch | None:
        """The error that lists the differences, or None when they are allowed."""
        if not self.different and not (strict and (self.missing or self.unexpected)):
            return None
        parts = [
            _listed(self.missing, "not saved"),
            _listed(self.unexpected, "saved but not in the state dict"),
            _listed([f"{name} ({why})" for name, why in self.different.items()], "different"),
            *self.hints,
        ]
        return StateMismatch(
            f"the state dict does not fit {where}: {'; '.join(part for part in parts if part)}. "
            "Nothing was changed",
            missing=self.missing,
            unexpected=self.unexpected,
            different=list(self.different),
        )


def template_of(state_dict: Mapping[object, object]) -> Template:
    """``state_dict`` as a template; InvalidInput for tensors that cannot be filled in place."""
    root = flatten(state_dict)
    parts = {}
    for leaf in root.leaves():
        if isinstance(leaf.value, torch.Tensor):
            local = parts[leaf.name] = local_part(leaf.value, leaf.path)
            lazy = local.tensor.is_conj() or local.tensor.is_neg()
            noted = leaf.value.is_conj() or leaf.value.is_neg()
            if overlaps_itself(local.tensor) or (local.note and (lazy or noted)):
                raise InvalidInput(
                    f"the tensor at {path_text(leaf.path)} of the state dict is a view whose "
                    "elements have no memory of their own (expanded or conjugate); give its "
                    "clone() to be filled"
                )
    return Template(root, parts)


def staged_bytes(template: Template) -> int:
    """About how much memory a save of this rank's part takes, in bytes; rather more than less."""
    total = _RECORD_BYTES
    for leaf in template.root.leaves():
        total += _LEAF_BYTES * (len(leaf.value) if leaf.whole else 1)
        local = template.locals.get(leaf.name)
        if local is not None:
            size = local.tensor.nbytes
            total += size + len(local.pieces) * (PAGE_BYTES if size >= PACK_ITEM_BYTES else 0)
    return total


ReadValue = Callable[[Saved, list[Converted]], Any]
"""Reads a plain value; see :meth:`groupio.torch.saved.SavedState.value`."""


def match(template: Template, saved: Branch, parts: Parts, read: ReadValue) -> Matching:
    """Pair the leaves of ``template`` with those of the tree ``saved``, path by path.

    ``parts`` say what was saved under the names of the leaves. ``read`` gives the containers that
    were saved whole: their keys stand nowhere else.
    """
    found = Matching()
    _Matcher(template, parts, found, read).branch(template.root, saved)
    _check_tied(found, parts)
    return found


def match_names(
    template: Template, saved: Mapping[str, Leaf], tree: Branch, parts: Parts
) -> Matching:
    """The same for an epoch without structure records: a leaf is paired with the item of its name.

    ``tree`` has the paths of the items as far as they are known, with keys that are str where
    their types are not; a plain leaf that is none of the items takes the subtree there.
    """
    found = Matching()
    matcher = _Matcher(template, parts, found)
    used: set[str] = set()
    _take_apart(template.root, template)
    for leaf in template.root.leaves():
        node: Branch | Leaf | None = saved.get(leaf.name)
        if node is None and leaf.name not in template.locals:
            node = _at(tree, leaf)
        if node is None:
            found.missing.append(leaf.name)
        else:
            used.update(_names(node))
            matcher.leaf(leaf, node)
    found.unexpected += [name for name in saved if name not in used]
    _check_tied(found, parts)
    return found


class _Matcher:
    """Fills a Matching."""

    def __init__(
        self,
        template: Template,
        parts: Parts,
        found: Matching,
        read: ReadValue | None = None,
    ) -> None:
        self._read = read
        self._template = template
        self._parts = parts
        self._found = found

    def branch(self, here: Branch, saved: Branch) -> None:
        """Pair what is below two nodes."""
        found = self._found
        if not here.children and saved.children and here.path:
            self._hint_empty(here)
        if saved.kind == "odict" and saved.detail is not None and here.kind == "odict":
            found.versions.append((here.value, saved.detail))
        for key, child in here.children.items():
            other = saved.children.get(key)
            if isinstance(other, Leaf) and other.whole and _is_container(child):
                self.whole(child, other)
                continue
            if isinstance(other, Branch) and isinstance(child, Leaf) and child.whole:
                child = here.children[key] = _apart(child, self._template)
            if other is None or not _same_side(child, other):
                found.missing += _names(child)
                if other is not None:
                    found.unexpected += _names(other)
            elif isinstance(child, Branch):
                assert isinstance(other, Branch)
                self.branch(child, other)
            else:
                self.leaf(child, other)
        for key, other in saved.children.items():
            if key not in here.children:
                found.unexpected += _names(other)

    def leaf(self, leaf: Leaf, saved: Branch | Leaf) -> None:
        """Find what a leaf is filled with or takes."""
        found = self._found
        local = self._template.locals.get(leaf.name)
        if local is None:
            takes: dict[str, Take] = {}
            for below in [saved] if isinstance(saved, Leaf) else saved.leaves():
                take = take_of(below, self._parts)
                if isinstance(take, Take):
                    takes[below.name] = take
                else:
                    self._failed(leaf.name, take)
                    return
            found.replace.append((leaf, saved))
            found.take |= takes
        elif isinstance(saved, Branch):
            found.different[leaf.name] = f"a tensor here, a {saved.kind} with values saved"
        else:
            fill = fill_of(local, saved, self._parts)
            if isinstance(fill, Fill):
                found.fill[leaf.name] = fill
            else:
                self._failed(leaf.name, fill)

    def whole(self, here: Branch | Leaf, saved: Leaf) -> None:
        """Compare a container of the template with one that was saved whole."""
        assert self._read is not None
        found = self._found
        take = take_of(saved, self._parts)
        if not isinstance(take, Take):
            self._failed(saved.name, take)
            return
        converted = found.converted.setdefault(saved.name, [])
        value = self._read(take.reads[0].saved, converted)
        if not fits(here.value, value):
            found.missing += _names(here)
            found.unexpected.append(saved.name)
            return
        if isinstance(here, Branch) and not here.children and value:
            self._hint_empty(here)
        keys = tuple(step.key for step in here.path)
        compare(
            here.value, value, keys, Differences(found.missing, found.unexpected, found.different)
        )
        found.merge.append((here, value))

    def _hint_empty(self, here: Branch) -> None:
        self._found.hints.append(
            f"{path_text(here.path)} is empty here (an optimizer has no state before its first "
            "step: get the state dicts from torch.distributed.checkpoint.state_dict, or put "
            "None there to take all that was saved)"
        )

    def _failed(self, name: str, why: Missing | str) -> None:
        if isinstance(why, str):
            self._found.different[name] = why
            return
        self._found.missing.append(name)
        if why.reason and why.reason not in self._found.hints:
            self._found.hints.append(why.reason)


def _at(tree: Branch, leaf: Leaf) -> Branch | Leaf | None:
    node: Branch | Leaf | None = tree
    for step in leaf.path:
        if not isinstance(node, Branch):
            return None
        children = node.children
        node = children.get(step.key)
        if node is None and not step.indexed:
            node = children.get(str(step.key))
    return node


def _is_container(node: Branch | Leaf) -> bool:
    return isinstance(node, Branch) or node.whole


def _apart(leaf: Leaf, template: Template) -> Branch:
    """The tree of a whole leaf of the template, its leaves named."""
    made = taken_apart(leaf.path, leaf.value)
    for one in made.leaves():
        one.name = ".".join([str(step.key) for step in one.path])
        if one.name in template.locals:
            one.name = path_text(one.path)
    return made


def _take_apart(branch: Branch, template: Template) -> None:
    """Take all whole leaves below ``branch`` apart."""
    for key, child in branch.children.items():
        if isinstance(child, Branch):
            _take_apart(child, template)
        elif child.whole:
            branch.children[key] = _apart(child, template)


def _same_side(here: Branch | Leaf, saved: Branch | Leaf) -> bool:
    """Whether the two can be paired at all: a leaf takes anything, a branch only its like."""
    if isinstance(here, Leaf):
        return not here.whole
    return isinstance(saved, Branch) and here.keyed == saved.keyed


def _check_tied(found: Matching, parts: Parts) -> None:
    """Tensors that share their memory here must have been saved with equal bytes."""
    starts: dict[int, list[str]] = {}
    for name, fill in found.fill.items():
        tensor = fill.local.tensor
        if tensor.numel():
            starts.setdefault(tensor.data_ptr(), []).append(name)
    for names in starts.values():
        first: dict[tuple[object, ...], str] = {}
        for name in names if len(names) > 1 else ():
            tensor = found.fill[name].local.tensor
            other = first.setdefault((tensor.device, tensor.shape, tensor.stride()), name)
            if other != name and not same_content(found.fill[other], found.fill[name], parts):
                found.different[name] = f"shares its memory with {other} here, not when saved"


def _names(node: Branch | Leaf) -> list[str]:
    return [node.name] if isinstance(node, Leaf) else [leaf.name for leaf in node.leaves()]


def _listed(names: list[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:LISTED])}{more}"
