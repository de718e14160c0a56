"""``groupio.torch.save``: a state dict as items of a group."""

from __future__ import annotations

import os
import time
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from groupio.client.handle import SaveHandle
from groupio.client.values import Part
from groupio.errors import InvalidInput
from groupio.format.structure import STRUCTURE, encode_structure
from groupio.model import Level
from groupio.torch.clients import client_for
from groupio.torch.flatten import flatten
from groupio.torch.members import find_members
from groupio.torch.tensors import local_part

NO_DOOR_NOTE = "no DCP door was made: this version of groupio does not write them yet"


def save(
    state_dict: Mapping[Any, Any],
    store: str | os.PathLike[str],
    *,
    step: int,
    wait_for: str = "released",
    process_group: dist.ProcessGroup | None = None,
    deadline_s: float = 600.0,
    replicated: Iterable[str] = (),
    verify_replicas: str = "full",
    dcp_door: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Save ``state_dict`` as epoch ``step`` of ``store``, together with all other ranks.

    Every rank of ``process_group`` (default: the world of torch.distributed, else the launcher's
    environment, else this process alone) has to call it with the same ``step``. The state dict
    holds tensors, DTensors, numpy arrays and plain values in nested mappings, lists and tuples.
    A DTensor is stored by its shards; ``Replicate`` declares equal bytes on all holders, and so
    does a name or glob pattern in ``replicated``: ReplicaDivergence when they differ. Undeclared
    tensors of one name are stored once where they are equal and kept per rank where they differ.

    Returns when the tensors may be overwritten (``wait_for="released"``), or at a higher level;
    what was saved are the bytes at the call. A failure of the group stands on the handle.
    ``handle.wait("durable")`` returns once the epoch survives a power cut. ``deadline_s`` bounds,
    in seconds, the time until it is in host memory on all ranks.

    ``verify_replicas`` is "full": the bytes of all replicas are compared. ``dcp_door`` asks for a
    view of the epoch that ``torch.distributed.checkpoint`` reads; this version accepts it, makes
    none, and says so in ``handle.times.notes``.

    Raises InvalidInput, on this rank, for what cannot be stored, with its path and what to do;
    the other ranks learn of it on their handles.
    """
    if verify_replicas != "full":
        raise InvalidInput(
            f"verify_replicas={verify_replicas!r} is not supported; all replicas are compared: "
            'give "full"'
        )
    if not isinstance(dcp_door, bool):
        raise InvalidInput(f"dcp_door={dcp_door!r} must be True or False")
    handle = client_for(store, find_members(process_group)).save(
        _Items(state_dict),
        epoch=step,
        deadline_s=deadline_s,
        replicated=replicated,
        wait_for=wait_for,
        metadata=metadata,
    )
    if dcp_door:
        # RELEASED is reached (or the save failed) by now: this only adds the note.
        handle._reach(Level.RELEASED, time.monotonic(), notes=(NO_DOOR_NOTE,))
    return handle


class _Items(Mapping[str, Any]):
    """The items of a state dict, made when the client asks for them.

    So an InvalidInput arises inside of the client's ``save``, which tells the other members.
    """

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        self._state_dict = state_dict
        self._made: dict[str, Any] | None = None

    def _items(self) -> dict[str, Any]:
        if self._made is None:
            self._made = items_of(self._state_dict)
        return self._made

    def __getitem__(self, name: str) -> Any:
        return self._items()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def items(self) -> ItemsView[str, Any]:
        return self._items().items()


def items_of(state_dict: Mapping[Any, Any]) -> dict[str, Any]:
    """The items that stand for ``state_dict`` on this rank, the structure record last.

    Their names are DCP's FQNs; tensors are not copied.
    """
    root = flatten(state_dict)
    items: dict[str, Any] = {}
    for leaf in root.leaves():
        if not isinstance(leaf.value, torch.Tensor):
            items[leaf.name] = leaf.value
            continue
        local = local_part(leaf.value, leaf.path)
        leaf.note = local.note
        items[leaf.name] = Part(
            local.tensor, local.global_shape, local.offsets, local.replicated, "torch"
        )
    items[STRUCTURE] = encode_structure(root)
    return items
