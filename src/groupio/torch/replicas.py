"""Replicas: what each holder of a replicated tensor hands over, and what is compared.

With "full" every holder hands over everything: the agent hashes all of it and compares. With
"off" and "sampled" the holders divide the large tensors among each other
(:mod:`groupio.plan.slabs`), which saves memory and hashing; with "sampled" all of them hand over
some chunks too, others in every step, which are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from torch.distributed.tensor import DTensor, Replicate

from groupio.client.values import Part, matcher
from groupio.errors import InvalidInput
from groupio.format.structure import NAME_BYTES_MAX, SAMPLE, Leaf, part_name
from groupio.model import PACK_ITEM_BYTES, ItemKind, ItemSpec
from groupio.plan.slabs import Box, samples, slabs
from groupio.plan.splits import split_name
from groupio.torch.members import Members
from groupio.torch.tensors import dtype_text

SPLIT_BYTES_MIN = PACK_ITEM_BYTES
"""Smaller tensors are handed over whole by every holder, and compared, whatever is asked."""

NAME_BYTES_ADDED = 64
"""More than a part's or a sample's name is longer than its tensor's."""

VERIFY = ("off", "sampled", "full")


def check_verify(verify_replicas: object) -> str:
    """``verify_replicas``; InvalidInput unless it is one of VERIFY."""
    if verify_replicas not in VERIFY:
        raise InvalidInput(
            f"verify_replicas={verify_replicas!r} must be one of {', '.join(VERIFY)}"
        )
    return str(verify_replicas)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How one save treats replicas: ``verify``, the names declared ``replicated``, its step."""

    verify: str
    members: Members
    step: int
    replicated: Iterable[str] = ()

    def divide(self, items: dict[str, Any], leaves: Iterable[Leaf]) -> dict[str, Any]:
        """``items`` with every large replicated tensor replaced by this rank's part of it.

        ``leaves`` are the tensors' places in the state dict. Records how the tensors were
        divided, so that a save in which the holders do not agree, or not all take part, fails.
        """
        if self.verify == "full":
            return items
        groups: dict[tuple[int, ...], _Group] = {}
        declared = matcher(self.replicated)
        for leaf in leaves:
            if not _divisible(leaf, items):
                continue
            ranks, own = self._holders(leaf, declared)
            if len(ranks) > 1:
                group = groups.setdefault(ranks, _Group(ranks, ranks.index(own)))
                group.parts[leaf.name] = items[leaf.name]
        if not groups:
            return items
        divided: dict[str, dict[str, Any]] = {}
        records: dict[str, Any] = {}
        for group in groups.values():
            divided |= group.divide(self.step if self.verify == "sampled" else None)
            records[group.name] = Part(group.record(), replicated=True)
        made: dict[str, Any] = {}
        for name, item in items.items():
            made |= divided.get(name) or {name: item}
        return made | records

    def _holders(self, leaf: Leaf, declared: Callable[[str], bool]) -> tuple[tuple[int, ...], int]:
        """The ranks that hold what this rank holds of the tensor, ascending, and this rank."""
        if isinstance(leaf.value, DTensor):
            mesh = leaf.value.device_mesh
            here = mesh.get_coordinate()
            if here is None:
                return (), 0
            same = tuple(
                slice(None) if isinstance(placement, Replicate) else at
                for placement, at in zip(leaf.value.placements, here, strict=True)
            )
            ranks = sorted(int(rank) for rank in mesh.mesh[same].flatten().tolist())
            return tuple(ranks), int(mesh.mesh[tuple(here)])
        if not declared(leaf.name):
            return (), 0
        return tuple(range(self.members.world_size)), self.members.rank


@dataclass(slots=True)
class _Group:
    """The tensors that ``ranks`` hold alike; this rank is number ``index`` of them."""

    ranks: tuple[int, ...]
    index: int
    parts: dict[str, Part] = field(default_factory=dict)
    _text: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the split record."""
        text = ",".join(map(str, self.ranks)).encode()
        return split_name(len(self.ranks), blake3(text).hexdigest()[:16])

    def record(self) -> str:
        """The content of the split record: it is equal where the tensors were divided alike."""
        return blake3("\n".join(self._text).encode()).hexdigest()

    def divide(self, sampled_step: int | None) -> dict[str, dict[str, Any]]:
        """The items that stand for each tensor on this rank, by the tensor's name."""
        # By name: the order of a state dict need not be the same on all ranks.
        names = sorted(self.parts)
        specs = [_spec(name, self.parts[name]) for name in names]
        owners, first = [], dict[tuple[object, ...], int]()
        for i, name in enumerate(names):
            # Tied tensors are the same bytes: their parts are the same, too.
            owners.append(first.setdefault(_place(self.parts[name], specs[i]), i))
        single = sorted(set(owners))
        shares = dict(
            zip(single, slabs([specs[i] for i in single], len(self.ranks), self.index), strict=True)
        )
        compared = samples(specs, sampled_step) if sampled_step is not None else {}
        made = {}
        for i, (name, spec) in enumerate(zip(names, specs, strict=True)):
            self._text.append(
                f"{name!r} {spec.dtype} {spec.global_shape} {spec.offsets} {spec.shape} {owners[i]}"
            )
            made[name] = self._items(name, spec, shares[owners[i]], compared.get(i))
        return made

    def _items(
        self,
        name: str,
        spec: ItemSpec,
        boxes: Sequence[Box],
        compared: Box | None,
    ) -> dict[str, Any]:
        part = self.parts[name]
        boxes = boxes or [Box((0,) * len(spec.shape), (0, *spec.shape[1:]))]
        items = {part_name(name, i): _cut(part, spec, box) for i, box in enumerate(boxes)}
        if compared is not None:
            items[SAMPLE + name] = _cut(part, spec, compared, replicated=True)
        return items


def _divisible(leaf: Leaf, items: Mapping[str, Any]) -> bool:
    """Whether a leaf is a large tensor in one box; names of parts have to fit the limit too."""
    part = items.get(leaf.name)
    return (
        type(part) is Part
        and isinstance(part.value, torch.Tensor)
        and part.value.nbytes >= SPLIT_BYTES_MIN
        and part_name(leaf.name, 1) not in items
        and len(leaf.name.encode()) <= NAME_BYTES_MAX - NAME_BYTES_ADDED
    )


def _spec(name: str, part: Part) -> ItemSpec:
    """The item that ``part`` would be if it were handed over whole."""
    value = part.value
    shape = tuple(value.shape)
    return ItemSpec(
        name,
        ItemKind.TENSOR,
        dtype_text(value.dtype),
        shape,
        shape if part.global_shape is None else part.global_shape,
        (0,) * len(shape) if part.offsets is None else part.offsets,
        value.nbytes,
    )


def _place(part: Part, spec: ItemSpec) -> tuple[object, ...]:
    value = part.value
    where = (value.device, value.data_ptr(), value.stride(), value.is_conj(), value.is_neg())
    return (*where, spec.dtype, spec.shape, spec.global_shape, spec.offsets)


def _cut(part: Part, spec: ItemSpec, box: Box, *, replicated: bool = False) -> Part:
    """The box of a part, which shares memory with it; an empty box may lie anywhere."""
    start = (
        [lo - at for lo, at in zip(box.offsets, spec.offsets, strict=True)]
        if all(box.shape)
        else [0] * len(box.shape)
    )
    corner = zip(start, box.shape, strict=True)
    view = part.value[tuple(slice(lo, lo + size) for lo, size in corner)]
    return Part(view, spec.global_shape, box.offsets, replicated, part.origin)
