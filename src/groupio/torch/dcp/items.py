"""Turns what DCP writes into items of groupio. No tensor is copied here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from groupio.client.values import Encoded, Part
from groupio.errors import InvalidInput
from groupio.format.codec import encode_plain
from groupio.format.structure import (
    KEYS,
    PATHS,
    Branch,
    Step,
    encode_structure,
    part_name,
    path_text,
)
from groupio.torch.converted import ConvertedNotes
from groupio.torch.dcp.names import check_names
from groupio.torch.flatten import flatten, type_text
from groupio.torch.placing import replicates
from groupio.torch.tensors import Local, local_part

log = logging.getLogger("groupio.torch")

LOGGED = 1000
"""At most so many notes are logged in the life of a process, each once."""

_logged: set[str] = set()


class Items:
    """Collects the items of one rank; several boxes of one tensor get names of their own."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.converted = ConvertedNotes()
        self._boxes: dict[str, int] = {}

    def add_tensor(
        self,
        fqn: str,
        tensor: torch.Tensor,
        size: tuple[int, ...],
        offsets: tuple[int, ...],
        *,
        replicated: bool,
    ) -> None:
        """The box of the tensor ``fqn`` at ``offsets``; InvalidInput when it cannot be stored."""
        local = self._local(fqn, tensor)
        self._add(fqn, local.tensor, size, offsets, replicated)

    def add_dtensor(self, fqn: str, tensor: DTensor) -> None:
        """What this rank has of a DTensor; InvalidInput when it cannot be stored."""
        local = self._local(fqn, tensor)
        for part, box in local.boxes():
            self._add(fqn, part, local.global_shape, box.offsets, local.replicated)

    def _local(self, fqn: str, tensor: torch.Tensor) -> Local:
        local = local_part(tensor, (Step(fqn, False),))
        if local.note:
            raise InvalidInput(
                f"the tensor {fqn!r} has the dtype {local.note}, which "
                "torch.distributed.checkpoint cannot be given back; save it with "
                "groupio.torch.save, or store tensor.view(torch.uint8)"
            )
        return local

    def _add(
        self,
        fqn: str,
        tensor: torch.Tensor,
        size: tuple[int, ...],
        offsets: tuple[int, ...],
        replicated: bool,
    ) -> None:
        if not tensor.numel() and 0 not in size:
            return  # nothing of it is here
        count = self._boxes[fqn] = self._boxes.get(fqn, -1) + 1
        self.made[part_name(fqn, count)] = Part(tensor, size, offsets, replicated, "torch")

    def add_value(self, fqn: str, value: Any) -> None:
        """A value that is no tensor; InvalidInput, with its FQN, when no rule covers it."""
        _check_value(fqn, value)
        self.made[fqn] = self.converted.encoded(fqn, value, (Step(fqn, False),))

    def add_paths(self, mappings: Mapping[str, Any], tree: Branch | None) -> None:
        """DCP's record of where each name stands in the state dict, and that of its types."""
        self.made[PATHS] = {fqn: list(path) for fqn, path in mappings.items()}
        if tree is not None:
            data = encode_plain(encode_structure(tree), name="the record of the keys")
            self.made[KEYS] = Encoded(data)
            for branch in tree.branches():
                if branch.was:
                    self.converted.add(path_text(branch.path), branch.was, branch.kind)

    def finish(self, notes: Sequence[str] = ()) -> dict[str, Any]:
        """The items. DCP has no place for notes: what will change its class is logged."""
        for note in (*notes, *self.converted.saved()):
            if note not in _logged and len(_logged) < LOGGED:
                _logged.add(note)
                log.warning("%s", note)
        return self.made


def plan_items(plan: SavePlan, planner: Any) -> dict[str, Any]:
    """The items of a final plan; the planner has the values.

    InvalidInput when one cannot be stored, or is not what the plan says.
    """
    found = Items()
    for item in plan.items:
        try:
            if item.type is WriteItemType.BYTE_IO:
                found.add_value(item.index.fqn, _looked_up(planner, item.index))
            else:
                _add_planned(found, item, planner)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"{type(planner).__name__} has no value for {item.index.fqn!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
    mappings, tree = getattr(planner, "mappings", {}), getattr(planner, "tree", None)
    found.add_paths(mappings, tree)
    notes = [] if tree is not None else _untyped_keys(plan, mappings)
    return found.finish(notes)


def _untyped_keys(plan: SavePlan, mappings: Mapping[str, Any]) -> list[str]:
    """The planner hands over paths of text: a key that was an int cannot be told from a str."""
    for item in plan.items:
        path = mappings.get(item.index.fqn, ())
        if item.type is WriteItemType.BYTE_IO and any(
            type(key) is str and key.lstrip("-").isdecimal() for key in path
        ):
            return [
                f"this planner keeps no types of keys: if a key of {item.index.fqn!r} is an int, "
                "it comes back as a str where no state dict is given; save with GroupSavePlanner"
            ]
    return []


def state_items(
    flat: Mapping[str, Any], mappings: Mapping[str, Any], tree: Branch | None = None
) -> dict[str, Any]:
    """The items of a flattened state dict, whole as this rank has it; no plan is needed."""
    check_names(flat)
    found = Items()
    for fqn, value in flat.items():
        if not isinstance(value, torch.Tensor):
            found.add_value(fqn, value)
        elif isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is not None:
                found.add_dtensor(fqn, value)
        elif hasattr(value, "local_shards") or hasattr(value, "__create_write_items__"):
            _add_sharded(found, fqn, value)
        else:
            size = tuple(value.shape)
            found.add_tensor(fqn, value, size, (0,) * len(size), replicated=False)
    found.add_paths(mappings, tree)
    return found.finish()


def is_declared(value: Any) -> bool:
    """Whether a value is a DTensor that says that other ranks hold the same bytes."""
    if not isinstance(value, DTensor):
        return False
    return replicates(tuple(value.device_mesh.shape), value.placements)


def _add_planned(found: Items, item: WriteItem, planner: Any) -> None:
    fqn, data = item.index.fqn, item.tensor_data
    assert data is not None
    tensor = _tensor(planner, item)
    if tensor.shape != data.chunk.sizes or tensor.dtype != data.properties.dtype:
        raise InvalidInput(
            f"the plan says that {fqn!r} is {data.properties.dtype} {list(data.chunk.sizes)}, the "
            f"state dict has {tensor.dtype} {list(tensor.shape)}: the planner's cached plan is of "
            "an earlier state dict; use groupio.torch.GroupSavePlanner, whose cache notices"
        )
    declared = getattr(planner, "is_declared", None)
    found.add_tensor(
        fqn,
        tensor,
        tuple(data.size),
        tuple(data.chunk.offsets),
        replicated=declared is not None and declared(item.index),
    )


def _tensor(planner: Any, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"resolve_data gave a {type_text(value)}")
    return value.detach()


def _looked_up(planner: Any, index: MetadataIndex) -> Any:
    if not hasattr(planner, "lookup_object"):
        raise InvalidInput(
            f"{type(planner).__name__} gives {index.fqn!r} as pickled bytes only, which groupio "
            "does not store; use groupio.torch.GroupSavePlanner or a subclass of "
            "DefaultSavePlanner"
        )
    return planner.lookup_object(index)


def _add_sharded(found: Items, fqn: str, value: Any) -> None:
    """A ShardedTensor, or a tensor of a type of its own that tells DCP its parts."""
    try:
        items = _create_write_items(fqn, value)
        parts = [(item, find_tensor_shard(value, item.index)) for item in items]
    except (RuntimeError, ValueError) as error:
        raise InvalidInput(f"the tensor {fqn!r} cannot be stored: {error}") from error
    for item, part in parts:
        assert item.tensor_data is not None
        size, offsets = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
        found.add_tensor(fqn, part, size, offsets, replicated=False)


_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


def _check_value(fqn: str, value: Any) -> None:
    if type(value) in _PLAIN:
        return
    leaves = flatten({fqn: value}).leaves()
    if any(isinstance(leaf.value, torch.Tensor) for leaf in leaves):
        raise InvalidInput(
            f"the value {fqn!r} is a {type_text(value)} that holds tensors, which "
            "torch.distributed.checkpoint would pickle; make it a list, or use groupio.torch.save"
        )
