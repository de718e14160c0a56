"""``groupio.torch.save``: a state dict as items of a group."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any

import torch
import torch.distributed as dist

from groupio.client import nesting
from groupio.client.arguments import check_deadline, check_epoch
from groupio.client.client import Client
from groupio.client.handle import SaveHandle
from groupio.client.store_parts import part_store
from groupio.client.values import Part
from groupio.errors import (
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    InvalidInput,
    from_wire,
    to_wire,
)
from groupio.format.structure import STRUCTURE, part_name, path_text
from groupio.torch.clients import client_for, save_as
from groupio.torch.converted import ConvertedNotes
from groupio.torch.members import Council, Members, find_members, met
from groupio.torch.remembered import Remembered
from groupio.torch.replicas import Sharing, check_verify
from groupio.torch.tensors import (
    PLAIN_TENSORS,
    Placed,
    all_plain,
    check_no_fake_mode,
    local_part,
    plain_part,
)

ON_ERROR = ("log", "warn", "raise")

_remembered = Remembered()


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
    rewind_to: int | None = None,
    on_error: str = "log",
    part: str | None = None,
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

    ``verify_replicas``: with "full" every holder of a replica hands over all of it, and every
    byte is compared. With "off" the holders divide tensors of 1 MiB and more evenly among each
    other: less memory and hashing, but each part is stored as its one giver has it, and replicas
    that drifted apart are mixed without notice. "sampled" does the same and compares some of
    their chunks (a sixteenth, others in every step): it finds a drift that is everywhere, and any
    other in the long run. With both, all holders have to save the same tensors, else InvalidInput.

    With ``dcp_door`` torch reads the epoch without groupio: ``torch.distributed.checkpoint.load(
    state_dict, checkpoint_id=f"{store}/dcp/{step}")``. That directory, the door, is published
    after the commit and holds references to the store, not the bytes; ``handle.wait("durable")``
    waits for it too, at most a minute. Where it cannot be made ``handle.times.notes`` says why.

    After the :func:`load` of an older ``step`` a first save that is not newer than the latest epoch
    begins a new lineage there and abandons later epochs, once all other incarnations have ended.
    ``rewind_to=L`` begins one after epoch L in any case, unless the present one began there.
    ``on_error`` says what to do about failures of earlier saves that were not read: "log", "warn"
    (a RuntimeWarning), or "raise": it raises the first of them, the same on all ranks, and saves
    nothing. All ranks give "raise"; GroupTimeout names those that do not come in ``deadline_s``.

    ``part`` names a part of the step that is saved in a call of its own, an epoch by itself.
    Raises InvalidInput, on this rank, for what cannot be stored; the others see their handles.
    """
    _check_options(dcp_door, on_error)
    members = find_members(process_group)
    sharing = Sharing(check_verify(verify_replicas), members, check_epoch(step, "step"), replicated)
    return _save(
        _Items(state_dict, sharing),
        part_store(store, part),
        members,
        on_error,
        epoch=step,
        deadline_s=check_deadline(deadline_s),
        replicated=replicated,
        wait_for=wait_for,
        metadata=metadata,
        door="dcp" if dcp_door else "",
        rewind_to=rewind_to,
        side="torch",
    )


def _check_options(dcp_door: object, on_error: object) -> None:
    if not isinstance(dcp_door, bool):
        raise InvalidInput(f"dcp_door={dcp_door!r} must be True or False")
    if on_error not in ON_ERROR:
        raise InvalidInput(f"on_error={on_error!r} must be one of {', '.join(ON_ERROR)}")


def _save(
    items: _Items,
    store: Any,
    members: Members,
    on_error: str,
    *,
    deadline_s: float,
    epoch: int,
    **how: Any,
) -> SaveHandle:
    """Meet the others where that is needed, tell of earlier failures, and save."""
    called_at = time.monotonic()
    failed: GroupIOError | None = None
    # The ranks of a nested call cannot agree: a handler never raises for being one.
    if on_error == "raise" and not (nesting.is_nested() or nesting.is_inside(_save)):
        council = Council.meet(members, deadline_s, "save")
        members = council.members
        _raise_earlier(client_for(store, members, saves=True), council)
    else:
        try:
            members = met(members, deadline_s, "save")
        except (GroupAborted, GroupTimeout) as error:
            failed = error
    client = client_for(store, members, connected=failed is None, saves=failed is None)
    if on_error == "warn":
        for before, unread in client._failures.unread():
            client._failures.take_over([before])
            warnings.warn(_not_saved(before, unread.message), RuntimeWarning, stacklevel=3)
    if failed is not None:
        return client._failed(epoch, called_at, failed)
    handle = save_as(
        store, members, items, epoch=epoch, called_at=called_at, deadline_s=deadline_s, **how
    )
    handle._add_notes(items.notes)
    return handle


def _not_saved(epoch: int, why: str) -> str:
    return f"epoch {epoch} was not saved: {why}"


def _raise_earlier(client: Client, council: Council) -> None:
    """Raise the first failure that a rank knows and its caller has not read, on all ranks.

    News of a failure does not reach all ranks at the same time: one that raised alone would leave
    the others in their next collective.
    """
    unread = client._failures.unread()
    mine = {str(epoch): to_wire(error) for epoch, error in unread}
    rank = council.members.rank
    verdict = council.decide({"rank": rank, "failed": mine}, _first_failure)
    if not verdict["epochs"]:
        return
    client._failures.take_over(verdict["epochs"])
    error = from_wire(verdict["failure"])
    for epoch, own in unread:
        if own.message not in error.message:
            error.add_note(f"rank {rank}: {_not_saved(epoch, own.message)}")
    raise error


def _first_failure(opinions: list[dict[str, Any]]) -> dict[str, Any]:
    """The oldest epoch that failed, as the lowest rank that knows of it says it."""
    epochs = sorted({int(epoch) for one in opinions for epoch in one["failed"]})
    if not epochs:
        return {"epochs": []}
    first = str(epochs[0])
    speaker = next(one for one in opinions if first in one["failed"])
    error = dict(speaker["failed"][first])
    error["message"] = _not_saved(epochs[0], f"rank {speaker['rank']}: {error['message']}")
    return {"epochs": epochs, "failure": error}


class _Items(Mapping[str, Any]):
    """The items of a state dict, made when the client asks for them.

    So an InvalidInput arises inside of the client's ``save``, which tells the other members.
    """

    def __init__(self, state_dict: Mapping[Any, Any], sharing: Sharing) -> None:
        self._state_dict = state_dict
        self._sharing = sharing
        self._made: dict[str, Any] | None = None
        self.notes: list[str] = []

    def _items(self) -> dict[str, Any]:
        if self._made is None:
            self._made = items_of(self._state_dict, self._sharing, self.notes)
        return self._made

    def __getitem__(self, name: str) -> Any:
        return self._items()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def items(self) -> ItemsView[str, Any]:
        return self._items().items()

    def values(self) -> ValuesView[Any]:
        return self._items().values()


def items_of(
    state_dict: Mapping[Any, Any],
    sharing: Sharing | None = None,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """The items that stand for ``state_dict`` on this rank, the structure record last.

    Their names are DCP's FQNs; tensors are not copied. ``sharing`` leaves out of replicas what
    other ranks hand over. ``notes`` gets the containers that will come back as others.
    """
    check_no_fake_mode("groupio.torch.save")
    converted = ConvertedNotes()
    # Who divides tensors has to see them as parts.
    direct = PLAIN_TENSORS if sharing is None or sharing.verify == "full" else ()
    with _remembered.flattened(state_dict) as tree:
        items: dict[str, Any] = {}
        are_plain = direct and all_plain(
            [leaf.value for leaf in tree.leaves if type(leaf.value) in direct]
        )
        placed: dict[tuple[object, ...], Placed] = {}
        for leaf in tree.leaves:
            value = leaf.value
            note = ""
            if type(value) in direct:
                if not are_plain:
                    value, note = plain_part(value, leaf.path)
                items[leaf.name] = value
            elif isinstance(value, torch.Tensor):
                local = local_part(value, leaf.path, placed)
                note = local.note
                for number, (part, box) in enumerate(local.boxes()):
                    items[part_name(leaf.name, number)] = Part(
                        part, local.global_shape, box.offsets, local.replicated, "torch"
                    )
            else:
                items[leaf.name] = converted.encoded(leaf.name, value, leaf.path)
            if note:
                tree.notes[leaf.name] = note
        if sharing is not None:
            items = sharing.divide(items, tree.leaves)
        items[STRUCTURE] = tree.record()
        for branch in tree.branches:
            if branch.was:
                converted.add(path_text(branch.path), branch.was, branch.kind)
    if notes is not None:
        notes += converted.saved()
    return items
