"""The global plan: who writes what, and what the checkpoint's metadata says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from groupio.errors import InvalidInput
from groupio.format.structure import SAMPLE
from groupio.torch.dcp.split import Box, Shared, divide, sample_box

SPLIT_MIN_BYTES = 1 << 20
"""Smaller tensors are not divided: every holder hands them over, and one copy is stored."""


@dataclass
class _Held:
    """A box or value of one name, and the ranks that have it."""

    item: WriteItem
    ranks: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes of the box; 0 for a value."""
        return item_bytes(self.item)


@dataclass(frozen=True)
class Rules:
    """``replicas``: every holder hands over what is not divided, and its own values: a writer of
    groupio keeps what differs. ``split``: large replicas are divided. ``sample``: and a part of
    each is compared."""

    replicas: bool
    split: bool
    sample: bool


def item_bytes(item: WriteItem) -> int:
    """The bytes of the box that is written, not of the whole tensor; 0 for a value."""
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


def make_global_plan(
    plans: Sequence[SavePlan], rules: Rules
) -> tuple[list[list[WriteItem]], Metadata]:
    """The items of each rank, and the metadata without mappings.

    InvalidInput when the ranks' parts of a tensor overlap or leave holes.
    """
    world = len(plans)
    owned: list[list[WriteItem]] = [[] for _ in range(world)]
    extra: list[list[WriteItem]] = [[] for _ in range(world)]
    loads = [0] * world
    divided: list[_Held] = []
    held, odd = _gather(plans)
    for rank, item in odd:
        if rules.replicas:
            extra[rank].append(dataclasses.replace(item, index=_without_hint(item.index)))
    mixed = {item.index.fqn for _, item in odd}
    for one in held:
        if (
            rules.split
            and len(one.ranks) > 1
            and one.nbytes >= SPLIT_MIN_BYTES
            and one.item.index.fqn not in mixed
        ):
            divided.append(one)
            continue
        # Small ones may be a rank's own values: then they are the lowest rank's, all of them.
        lowest = rules.replicas or one.nbytes < SPLIT_MIN_BYTES
        owner = one.ranks[0] if lowest else min(one.ranks, key=lambda rank: loads[rank])
        owned[owner].append(one.item)
        for rank in one.ranks if rules.replicas else [owner]:
            loads[rank] += one.nbytes
            if rank != owner:
                extra[rank].append(one.item)
    _divide(divided, loads, owned, extra if rules.sample and rules.replicas else None)
    global_plan, metadata = create_default_global_save_plan([SavePlan(items) for items in owned])
    errors = _validate_global_plan(global_plan, metadata)
    if errors:
        raise InvalidInput(
            f"the parts that the {world} ranks have do not make up the tensors: "
            f"{'; '.join(errors)[:500]}"
        )
    return [[*plan.items, *extra[rank]] for rank, plan in enumerate(global_plan)], metadata


def _gather(plans: Sequence[SavePlan]) -> tuple[list[_Held], list[tuple[int, WriteItem]]]:
    """Equal boxes of all ranks, and what differs in kind, dtype or size from the first of its
    name: a rank's own value."""
    first: dict[str, tuple[object, ...]] = {}
    held: dict[tuple[object, ...], _Held] = {}
    odd = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            what = () if data is None else (data.size, data.properties.dtype)
            if first.setdefault(item.index.fqn, what) != what:
                odd.append((rank, item))
                continue
            box = () if data is None else (data.chunk.offsets, data.chunk.sizes)
            ranks = held.setdefault((item.index.fqn, *box), _Held(item)).ranks
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    return list(held.values()), odd


def _divide(
    divided: list[_Held],
    loads: list[int],
    owned: list[list[WriteItem]],
    samples: list[list[WriteItem]] | None,
) -> None:
    tensors = [_shared(one) for one in divided]
    for one, tensor, pieces in zip(divided, tensors, divide(tensors, loads), strict=True):
        for rank, box in pieces:
            owned[rank].append(one.item if box == tensor.box else _part(one.item, box))
    if samples is None:
        return
    sampled: set[tuple[int, str]] = set()
    for one, tensor in zip(divided, tensors, strict=True):
        fqn = one.item.index.fqn
        part = _part(one.item, sample_box(tensor.box, tensor.itemsize), SAMPLE + fqn)
        for rank in one.ranks:
            if (rank, fqn) not in sampled:
                sampled.add((rank, fqn))
                samples[rank].append(part)


def _shared(one: _Held) -> Shared:
    data = one.item.tensor_data
    assert data is not None
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Shared(box, data.properties.dtype.itemsize, tuple(one.ranks))


def _part(item: WriteItem, box: Box, fqn: str | None = None) -> WriteItem:
    """The write item of a part of ``item``."""
    data = item.tensor_data
    assert data is not None
    offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
    return WriteItem(
        index=MetadataIndex(item.index.fqn if fqn is None else fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes), properties=data.properties, size=data.size
        ),
    )


def _without_hint(index: MetadataIndex) -> MetadataIndex:
    return MetadataIndex(index.fqn, index.offset)
