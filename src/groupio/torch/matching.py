"""Compares the state dict that is to be filled with what a member saved. Touches nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from groupio.errors import InvalidInput, StateMismatch
from groupio.format.structure import Branch, Leaf, path_text
from groupio.model import ItemKind, ItemSpec
from groupio.torch.flatten import flatten
from groupio.torch.tensors import Local, local_part, overlaps_itself

LISTED = 100
"""At most so many names of a kind stand in a message; the fields of the error have all."""

_KEYED = ("dict", "odict")


@dataclass(slots=True)
class Template:
    """The state dict that a load fills: its tree, and the local part of each of its tensors."""

    root: Branch
    locals: dict[str, Local]


@dataclass(slots=True)
class Matching:
    """What a load will do, and every difference.

    ``fill`` are the tensors to fill in place, by name of the saved item; ``replace`` the plain
    leaves of the template with the saved nodes that they take.
    """

    fill: dict[str, Local] = field(default_factory=dict)
    replace: list[tuple[Leaf, Branch | Leaf]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)

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


def match(
    template: Template,
    saved: Branch,
    specs: Mapping[str, ItemSpec],
    same_content: Callable[[str, str], bool],
) -> Matching:
    """Pair the leaves of ``template`` with those that were saved.

    ``specs`` are the saved items by name; ``same_content`` says whether two of them have equal
    bytes.
    """
    found = Matching()
    _match_branch(template, template.root, saved, specs, found)
    _check_tied(found, same_content)
    return found


def _match_branch(
    template: Template,
    here: Branch,
    saved: Branch,
    specs: Mapping[str, ItemSpec],
    found: Matching,
) -> None:
    if not here.children and saved.children and here.path:
        found.hints.append(
            f"{path_text(here.path)} is empty here (an optimizer has no state before its first "
            "step: get the state dicts from torch.distributed.checkpoint.state_dict, or put None "
            "there to take all that was saved)"
        )
    for key, child in here.children.items():
        other = saved.children.get(key)
        if other is None or not _same_side(child, other):
            found.missing += _names(child)
            if other is not None:
                found.unexpected += _names(other)
        elif isinstance(child, Branch):
            assert isinstance(other, Branch)
            _match_branch(template, child, other, specs, found)
        elif child.name in template.locals:
            _match_tensor(child, template.locals[child.name], other, specs, found)
        else:
            found.replace.append((child, other))
    for key, other in saved.children.items():
        if key not in here.children:
            found.unexpected += _names(other)


def _same_side(here: Branch | Leaf, saved: Branch | Leaf) -> bool:
    """Whether the two can be paired at all: a leaf takes anything, a branch only its like."""
    if isinstance(here, Leaf):
        return True
    return isinstance(saved, Branch) and (here.kind in _KEYED) == (saved.kind in _KEYED)


def _match_tensor(
    leaf: Leaf,
    local: Local,
    saved: Branch | Leaf,
    specs: Mapping[str, ItemSpec],
    found: Matching,
) -> None:
    if isinstance(saved, Branch):
        found.different[leaf.name] = f"a tensor here, a {saved.kind} with values saved"
        return
    spec = specs[saved.name]
    if spec.kind is not ItemKind.TENSOR or spec.origin != "torch":
        kind = "numpy array" if spec.kind is ItemKind.TENSOR else "plain value"
        found.different[leaf.name] = f"a tensor here, a {kind} saved"
        return
    here = f"{local.note or local.dtype} {_shape(local.global_shape)}"
    there = f"{saved.note or spec.dtype} {_shape(spec.global_shape)}"
    if here != there:
        found.different[leaf.name] = f"{here} here, {there} saved"
    elif (local.shape, local.offsets) != (spec.shape, spec.offsets):
        found.different[leaf.name] = (
            f"the part {_shape(local.shape)} at {_shape(local.offsets)} here, "
            f"{_shape(spec.shape)} at {_shape(spec.offsets)} saved; this version loads onto the "
            "same mesh and world size only"
        )
    else:
        found.fill[saved.name] = local


def _check_tied(found: Matching, same_content: Callable[[str, str], bool]) -> None:
    """Tensors that share their memory here must have been saved with equal bytes."""
    first: dict[tuple[object, ...], str] = {}
    for name, local in found.fill.items():
        tensor = local.tensor
        if tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            other = first.setdefault(place, name)
            if other != name and not same_content(other, name):
                found.different[name] = f"shares its memory with {other} here, not when saved"


def _names(node: Branch | Leaf) -> list[str]:
    return [node.name] if isinstance(node, Leaf) else [leaf.name for leaf in node.leaves()]


def _listed(names: list[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:LISTED])}{more}"


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))
