"""What a plain leaf of the template gets: the whole saved subtree, with new tensors in it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from groupio.client.store_reader import StoreReader
from groupio.errors import IntegrityError
from groupio.format.manifest import ManifestReader
from groupio.format.structure import Branch, Leaf, rebuild
from groupio.model import ItemKind, ItemSpec


def leaves_of(nodes: Iterable[Branch | Leaf]) -> list[Leaf]:
    """All leaves of the nodes."""
    found: list[Leaf] = []
    for node in nodes:
        found += [node] if isinstance(node, Leaf) else list(node.leaves())
    return found


def new_tensor(spec: ItemSpec) -> torch.Tensor | None:
    """A new CPU tensor for the local part of ``spec``; None for what is no torch tensor."""
    if spec.kind is not ItemKind.TENSOR or spec.origin != "torch":
        return None
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def is_sharded(spec: ItemSpec) -> bool:
    """Whether the member has only a part of the tensor."""
    return spec.shape != spec.global_shape


def take(node: Branch | Leaf, values: dict[str, Any]) -> Any:
    """The nested value of a saved node, from the values of its items."""

    def value_of(leaf: Leaf) -> Any:
        value = values[leaf.name]
        return value.view(getattr(torch, leaf.note)) if leaf.note else value

    return rebuild(node, value_of)


def read_whole(
    reader: StoreReader,
    manifest: ManifestReader,
    names: list[str],
    deadline: float,
    threads: int | None,
) -> dict[str, torch.Tensor]:
    """Sharded tensors put together from the parts of all members that have one.

    IntegrityError when the parts do not cover a tensor.
    """
    whole: dict[str, torch.Tensor] = {}
    done: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: set() for name in names}
    for rank in manifest.ranks if names else ():
        specs = {spec.name: spec for spec in manifest.member(rank).items if spec.name in done}
        into = {}
        for name, spec in specs.items():
            box = (spec.offsets, spec.shape)
            part = new_tensor(spec)
            if part is not None and part.numel() and box not in done[name]:
                done[name].add(box)
                into[name] = part
        reader.read_items(manifest, rank, list(into), into, deadline=deadline, threads=threads)
        for name, part in into.items():
            spec = specs[name]
            if name not in whole:
                whole[name] = torch.empty(spec.global_shape, dtype=part.dtype)
            corner = zip(spec.offsets, spec.shape, strict=True)
            whole[name][tuple(slice(lo, lo + size) for lo, size in corner)] = part
    for name in names:
        covered = sum(prod(shape) for _, shape in done[name])
        if name not in whole or covered != whole[name].numel():
            raise IntegrityError(
                f"the saved parts of {name!r} do not cover the whole tensor; load it with a state "
                "dict that holds a DTensor there",
                path=manifest.path,
                epoch=manifest.header.epoch,
            )
    return whole
