"""``GroupSavePlanner``: replicas are divided so that all ranks carry equal bytes."""

from __future__ import annotations

import dataclasses
import uuid
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from groupio.errors import InvalidInput
from groupio.format.structure import SAMPLE, Branch, Step
from groupio.torch.dcp.division import Rules, make_global_plan
from groupio.torch.dcp.items import is_declared
from groupio.torch.flatten import dcp_tree
from groupio.torch.tensors import local_part

VERIFY = ("off", "sampled", "full")


class GroupStorageMeta(StorageMeta):
    """Tells the planner that the writer is groupio's. Made by its ``storage_meta()``."""


@dataclass(frozen=True)
class _Local:
    """What stands in a local plan's ``planner_data``: ``token`` names this plan."""

    mappings: dict[str, Any]
    token: str


@dataclass
class _Cache:
    """The plans of the last successful save; ``sent`` and ``made`` become it when the next one
    has been handed out. ``all_plans`` and what follows are the coordinator's."""

    local: SavePlan | None = None
    final: SavePlan | None = None
    all_plans: list[SavePlan] = dataclasses.field(default_factory=list)
    global_plan: list[SavePlan] = dataclasses.field(default_factory=list)
    metadata: Metadata | None = None
    sent: SavePlan | None = None
    made: tuple[list[SavePlan], list[SavePlan], Metadata] | None = None


class GroupSavePlanner(DefaultSavePlanner):
    """Plans ``dcp.save`` so that every rank writes equally many bytes.

    A tensor of 1 MiB or more that several ranks hold whole under one name and offset (a plain
    tensor, or a DTensor with ``Replicate``) is divided between them. With groupio's writer every
    rank hands over its small tensors and plain values itself: equal ones are stored once, and
    what differs (a random generator's state) is kept for each rank. With torch's own
    ``FileSystemWriter`` one rank writes them, and unmodified torch reads the checkpoint.

    ``verify_replicas`` says what is done against replicas that are not equal:

    - "sampled": each holder of a divided tensor adds a 256th of it, at most 64 KiB, and the group
      compares them: ReplicaDivergence when they differ. Other differences are not noticed.
    - "full": nothing is divided; every rank hands over all that it has. Tensors that are declared
      (``Replicate``) are compared whole; others are stored once if equal, else kept per rank.
    - "off": divided and not compared.

    ``enable_plan_caching``: a rank whose names, shapes, dtypes, offsets and structure are those of
    the last save sends no plan. The cache belongs to this object, which all ranks make together.
    """

    def __init__(
        self,
        verify_replicas: str = "sampled",
        *,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        enable_plan_caching: bool = False,
    ) -> None:
        """InvalidInput for an unknown ``verify_replicas``."""
        if verify_replicas not in VERIFY:
            raise InvalidInput(
                f"verify_replicas={verify_replicas!r}; it is one of {', '.join(VERIFY)}"
            )
        # The caches of the base class are shared by all planners of a process: not used here.
        super().__init__(flatten_state_dict, flatten_sharded_tensors)
        self.verify_replicas = verify_replicas
        self._cache = _Cache() if enable_plan_caching else None
        self._grouped = False
        self.tree: Branch | None = None
        self._local_items: list[WriteItem] = []
        self._parts: dict[MetadataIndex, _View] = {}

    # -- planning, in the order of the calls -----------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict; InvalidInput when two of its values have the same name, or it
        contains itself."""
        grouped = isinstance(storage_meta, GroupStorageMeta)
        if grouped != self._grouped and self._cache is not None:
            self._cache = _Cache()
        self._grouped = grouped
        self.tree = dcp_tree(state_dict) if self.flatten_state_dict else None
        try:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
        except ValueError as error:
            raise InvalidInput(f"the state dict cannot be flattened: {error}") from error

    def create_local_plan(self) -> SavePlan:
        """What this rank holds; an empty plan that says "as before" when the cache has it."""
        try:
            items = create_default_local_save_plan(self.state_dict, self.is_coordinator).items
        except (RuntimeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"the state dict cannot be planned: {error}") from error
        self._check_strided(items)
        self._local_items = items
        mappings = self.mappings if self.flatten_state_dict else {}
        plan = SavePlan(items, planner_data=_Local(mappings, uuid.uuid4().hex))
        cache = self._cache
        if cache is not None:
            old = cache.local
            if old is not None and old.items == items and old.planner_data.mappings == mappings:
                cache.sent = old
                return SavePlan([], planner_data=old.planner_data.token, usable=False)
            cache.sent = plan
        self.plan = plan
        return plan

    def _check_strided(self, items: Sequence[WriteItem]) -> None:
        """torch describes every local tensor by one box; a strided shard may be several."""
        for item in items:
            value = self.state_dict[item.index.fqn]
            if isinstance(value, DTensor) and any(
                isinstance(placement, _StridedShard) for placement in value.placements
            ):
                fqn, data = item.index.fqn, item.tensor_data
                assert data is not None
                boxes = [box for _, box in local_part(value, (Step(fqn, False),)).boxes()]
                if boxes != [(tuple(data.chunk.offsets), tuple(data.chunk.sizes))]:
                    raise InvalidInput(
                        f"the shard of {fqn!r} is not one box of the tensor (placements "
                        f"{value.placements}), which torch.distributed.checkpoint needs; save it "
                        "with groupio.torch.save"
                    )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Divide; InvalidInput when the parts of a tensor overlap or leave holes."""
        cache = self._cache
        full = [
            plan if plan.usable else self._cached_plan(rank, len(all_plans), plan)
            for rank, plan in enumerate(all_plans)
        ]
        if cache is not None and cache.metadata is not None and full == cache.all_plans:
            cache.made = (cache.all_plans, cache.global_plan, cache.metadata)
            self.global_plan, self.metadata = cache.global_plan, _copied(cache.metadata)
            return [_as_before(plan) for plan in all_plans], self.metadata
        split = self.verify_replicas != "full"
        rules = Rules(self._grouped, split, self.verify_replicas == "sampled")
        items, metadata = make_global_plan(full, rules)
        if self.flatten_state_dict:
            mappings = dict(ChainMap(*[plan.planner_data.mappings for plan in full]))
            metadata = dataclasses.replace(metadata, planner_data=mappings)
        # What the writer put into the local plans comes back to it.
        plans = [
            SavePlan(mine, storage_data=plan.storage_data)
            for mine, plan in zip(items, all_plans, strict=True)
        ]
        self.global_plan, self.metadata = plans, metadata
        if cache is None:
            return plans, metadata
        old = cache.global_plan if len(cache.global_plan) == len(plans) else None
        cache.made = (full, plans, _copied(metadata))
        return [
            _as_before(sent)
            if old is not None and not sent.usable and old[rank].items == plan.items
            else plan
            for rank, (sent, plan) in enumerate(zip(all_plans, plans, strict=True))
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the plan of this rank; InvalidInput when it says "as before" and there is none."""
        cache = self._cache
        final = new_plan
        if cache is not None:
            if not new_plan.usable:
                if cache.final is None:
                    raise _mixed_caches()
                final = dataclasses.replace(cache.final, storage_data=new_plan.storage_data)
            # All ranks have their plans: what was sent and made holds from now on.
            cache.local, cache.final = cache.sent, final
            if cache.made is not None:
                cache.all_plans, cache.global_plan, cache.metadata = cache.made
                cache.made = None
        self._parts = _views(self._local_items, final.items)
        self.plan = final
        return final

    def _cached_plan(self, rank: int, world: int, plan: SavePlan) -> SavePlan:
        known = self._cache.all_plans if self._cache is not None else []
        if len(known) != world or known[rank].planner_data.token != plan.planner_data:
            raise _mixed_caches()
        return known[rank]

    # -- values ----------------------------------------------------------------------------------

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value, or the part of a tensor, at ``index`` of the final plan."""
        view = self._parts.get(index)
        if view is None:
            return super().lookup_object(index)
        tensor = super().lookup_object(view.base).detach()
        for dim, start, length in view.narrow:
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def is_declared(self, index: MetadataIndex) -> bool:
        """Whether what is at ``index`` is to be equal on all ranks that hand it over."""
        if index.fqn.startswith(SAMPLE):
            return True
        return index not in self._parts and is_declared(self.state_dict.get(index.fqn))


@dataclass(frozen=True)
class _View:
    """Where the bytes of a part are: in the local tensor ``base``, narrowed by (dim, start,
    length)."""

    base: MetadataIndex
    narrow: tuple[tuple[int, int, int], ...]


def _views(local: Sequence[WriteItem], final: Sequence[WriteItem]) -> dict[MetadataIndex, _View]:
    """The items of the final plan that are parts of what this rank holds."""
    boxes: dict[str, list[WriteItem]] = {}
    whole = set()
    for item in local:
        if item.tensor_data is not None:
            boxes.setdefault(item.index.fqn, []).append(item)
            whole.add((item.index, item.tensor_data.chunk.sizes))
    views = {}
    for item in final:
        data = item.tensor_data
        if data is None or (item.index, data.chunk.sizes) in whole:
            continue
        for base in boxes.get(item.index.fqn.removeprefix(SAMPLE), []):
            narrow = _inside(base, data.chunk.offsets, data.chunk.sizes)
            if narrow is not None:
                views[item.index] = _View(base.index, narrow)
                break
    return views


def _inside(
    base: WriteItem, offsets: torch.Size, sizes: torch.Size
) -> tuple[tuple[int, int, int], ...] | None:
    """How to narrow the local tensor ``base`` to a box; None when the box is not in it."""
    assert base.tensor_data is not None
    chunk = base.tensor_data.chunk
    narrow = []
    for dim, (lo, size, at, length) in enumerate(
        zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)
    ):
        if at < lo or at + length > lo + size:
            return None
        if length != size:
            narrow.append((dim, at - lo, length))
    return tuple(narrow)


def _copied(metadata: Metadata) -> Metadata:
    """The writer's ``finish`` changes the metadata that it gets."""
    return dataclasses.replace(metadata)


def _as_before(sent: SavePlan) -> SavePlan:
    """A plan that says that the last one holds, with what the writer put into this one."""
    return SavePlan([], storage_data=sent.storage_data, usable=False)


def _mixed_caches() -> InvalidInput:
    return InvalidInput(
        "the planners of the ranks do not have the same cached plan: make a new GroupSavePlanner "
        "on all ranks, and use it for all their saves"
    )
