"""``GroupStorageWriter``: ``dcp.save`` and ``dcp.async_save`` through a group."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from groupio.client import nesting
from groupio.client.address import store_address
from groupio.client.arguments import check_deadline, check_epoch
from groupio.client.handle import SaveHandle
from groupio.client.store_parts import part_store
from groupio.errors import (
    GroupAborted,
    GroupIOError,
    InvalidInput,
    WaitTimeout,
    from_wire,
    to_wire,
)
from groupio.format.structure import RESERVED
from groupio.protocol.members import FormedLaunch
from groupio.torch.clients import client_for, save_as
from groupio.torch.dcp.division import item_bytes
from groupio.torch.dcp.failure import for_all
from groupio.torch.dcp.items import plan_items
from groupio.torch.dcp.names import check_names, epoch_of
from groupio.torch.dcp.planner import GroupStorageMeta
from groupio.torch.dcp.staging import Lazy, Staging
from groupio.torch.members import Members, agree, find_members, introduction, join, met

log = logging.getLogger("groupio.torch")

_SAVE = inspect.unwrap(state_dict_saver.save).__code__

NESTED_S = 2.0
"""A save in a signal handler that interrupted another call is waited for so long."""

DCP_VERSION = "1.0.0"
"""The version that torch's own writer puts into the metadata."""


@dataclass
class _Step:
    """One save, as the thread that runs it sees it."""

    checkpoint_id: str
    epoch: int
    staging: Staging | None = None
    members: Members | None = None
    error: GroupIOError | None = None
    is_used: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it is still to be saved."""
        return not self.is_used and self.error is None


@dataclass(frozen=True)
class _Ticket:
    """What stands in a plan's ``storage_data``: on the way to the coordinator the epoch, the error
    and the introduction of the rank, on the way back its place and the launch of all."""

    epoch: int
    error: dict[str, Any] | None = None
    introduction: dict[str, Any] | None = None
    rank: int = 0
    world_size: int = 0
    launch: FormedLaunch | None = None


@dataclass(frozen=True)
class StoredItem:
    """Where an item of a checkpoint is: in what ``member`` saved of ``epoch``, ``size`` bytes."""

    epoch: int
    member: int
    size: int


class GroupStorageWriter(FileSystemWriter):
    """Saves through groupio: ``dcp.save(sd, checkpoint_id="run/step-1000", storage_writer=w)``.

    The epoch is the integer at the end of ``checkpoint_id``. Works with every planner; with
    :class:`GroupSavePlanner` replicas are divided between the ranks.

    ``dcp.save`` returns, and the future of ``dcp.async_save`` resolves, when the epoch is DURABLE
    and its door is published. For ``async_save`` (of the thread type) the writer is its own
    stager: the one copy goes straight into the agent's memory, in the calling thread, and
    ``async_save`` returns after it. It does not know the planner then: every rank hands over what
    it has, under the names of ``DefaultSavePlanner``, and the agent stores equal bytes once. The
    tensors stay referenced until the future resolves, for the plan's shapes; they may change.

    A failure of any rank is an error on all ranks, within ``deadline_s`` (call to STAGED, in
    seconds) where a rank is gone. After ``async_save``, and while planning, it is the typed error
    of groupio (an ``Exception`` that is also a ``CheckpointException`` and has its ``failures``).
    An error in the write phase of ``dcp.save`` comes as torch's plain ``CheckpointException``,
    which is no ``Exception``: torch wraps it after the last call to a writer. Its
    ``failures[rank][0]`` are the typed errors. Where a rank's process is gone torch itself raises
    the ``RuntimeError`` of its process group.

    In a signal handler that interrupted another call of groupio ``dcp.save`` returns after NESTED_S
    seconds at the latest, also when its epoch is not DURABLE yet: the interrupted save may have to
    be decided first. What fails later is logged. Of several processes none can call it there:
    torch's collectives would mix with those that it interrupted. Use :func:`groupio.torch.save`.

    ``rewind_to=L`` begins a new lineage after epoch L, as that of :func:`groupio.torch.save` does;
    a save after the ``dcp.load`` of an older ``checkpoint_id`` begins one by itself, as there.

    With ``part`` what is saved is a part of the step, in ``<store>/parts/<part>`` an epoch by
    itself: so model and optimizer can be saved in two calls under one ``checkpoint_id``.

    ``process_group`` and ``no_dist`` have to be those given to ``async_save``, which does not
    pass them on before the copy, and to ``dcp.save`` where the planner caches its plans. Saves may
    overlap if each has a process group of its own: torch runs its collectives in the background,
    and those of two saves would mix on one.
    """

    _synchronize_after_execute = True

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        deadline_s: float = 600.0,
        rewind_to: int | None = None,
        part: str | None = None,
    ) -> None:
        """InvalidInput when ``store`` is no path or ``file://`` URL, or ``part`` no name."""
        self._store = os.fspath(part_store(store_address(store), part))
        self._path = os.path.realpath(self._store)
        super().__init__(self._store)
        self._process_group = process_group
        self._no_dist = no_dist
        self._deadline_s = check_deadline(deadline_s)
        self._rewind_to = None if rewind_to is None else check_epoch(rewind_to, "rewind_to")
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._pending: Staging | None = None

    def __reduce__(self) -> NoReturn:
        error = InvalidInput(
            "GroupStorageWriter cannot be sent to another process; use "
            "async_checkpointer_type=AsyncCheckpointerType.THREAD: the agent saves in the "
            "background already"
        )
        staging = self._take_staging()
        if staging is not None:
            staging.refuse(error)
        raise error

    # -- which checkpoint ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next save of this thread is ``checkpoint_id``; InvalidInput if it has no epoch."""
        if checkpoint_id is None:
            return
        staging = self._take_staging()
        try:
            step = _Step(str(checkpoint_id), epoch_of(checkpoint_id), staging)
        except InvalidInput as error:
            if staging is not None:
                staging.refuse(error)
            raise
        if staging is not None:
            staging.name(step.epoch)
        self._begin(step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names an epoch."""
        try:
            epoch_of(checkpoint_id)
        except InvalidInput:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """That of this thread's save; the store before there is one."""
        step = self._known()
        return self._store if step is None else step.checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """Called by DCP before it plans: returns when the copy of ``async_save`` is over."""
        step = self._known()
        if step is None or not step.is_open:
            step = self._named_before()
        if step is None:
            return GroupStorageMeta()
        if step.staging is not None:
            step.staging.wait_copied(self._deadline_s)
        return GroupStorageMeta(checkpoint_id=step.checkpoint_id, save_id=str(step.epoch))

    def _begin(self, step: _Step) -> None:
        """``step`` is that of the innermost call of torch's save in this thread."""
        calls = _save_calls()
        before = getattr(self._thread, "steps", {})
        self._thread.steps = {call: before[call] for call in calls if call in before}
        self._thread.steps[calls[0]] = self._thread.steps[0] = step

    def _known(self) -> _Step | None:
        steps: dict[int, _Step] = getattr(self._thread, "steps", {})
        return next((steps[call] for call in _save_calls() if call in steps), None)

    def _named_before(self) -> _Step | None:
        """The step of an ``async_save`` without ``checkpoint_id``: what ``reset`` said before."""
        staging = self._take_staging()
        if staging is None:
            return None
        if staging.preset is None:
            staging.refuse(_no_checkpoint_id())
            return None
        step = _Step(staging.preset, epoch_of(staging.preset), staging)
        self._begin(step)
        staging.name(step.epoch)
        return step

    # -- staging, in the training thread ---------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the state dict; the copy is made in :meth:`synchronize_staging`. Never fails: what
        is wrong reaches all ranks through the future."""
        step = self._known()
        preset = step.checkpoint_id if step is not None and step.is_open else None
        staging = Staging(state_dict, preset)
        with self._lock:
            before, self._pending = self._pending, staging
        if before is not None:
            before.refuse(GroupAborted("another save began before this one was named"))
        self._thread.staging = staging
        return staging.skeleton

    def synchronize_staging(self) -> None:
        """Copy what :meth:`stage` took; returns when it may change."""
        staging: Staging | None = getattr(self._thread, "staging", None)
        self._thread.staging = None
        if staging is not None:
            staging.copy(self._save_staged)

    def _save_staged(self, items: Mapping[str, Any], epoch: int) -> SaveHandle:
        members = met(self._find_members(), self._deadline_s, "save")
        return save_as(
            self._path,
            members,
            items,
            epoch=epoch,
            deadline_s=self._deadline_s,
            door="dcp",
            rewind_to=self._rewind_to,
            side="dcp",
        )

    def _find_members(self) -> Members:
        return Members(0, 1) if self._no_dist else find_members(self._process_group)

    def _take_staging(self) -> Staging | None:
        """What another thread staged, for the thread that saves it."""
        with self._lock:
            staging = self._pending
            if staging is None or staging.thread == threading.get_ident():
                return None
            self._pending = None
            return staging

    # -- planning --------------------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the rank. A checkpoint without an id is an error of the plan phase."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        step = self._known()
        if step is None or not step.is_open:
            step = _Step("", -1, error=_no_checkpoint_id())
            self._begin(step)
        step.is_used = True
        if not self.use_collectives:
            step.members = dataclasses.replace(
                find_members(self._process_group), rank=self.rank or 0
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the names. After ``async_save`` wait here until the group is decided: what it
        failed of is then told by the plan phase, as an ordinary exception."""
        step = self._step()
        try:
            if step.error is not None:
                raise step.error
            if step.staging is None:
                check_names(item.index.fqn for item in plan.items)
                if step.members is not None:
                    step.members = met(step.members, self._deadline_s, "save")
                members = step.members or self._find_members()
                if members.launch_id is not None or members.group is None:
                    # From here on the others hear of it when this process ends before its save.
                    client_for(self._path, members)
            else:
                self._wait_staged(step.staging, plan)
        except GroupIOError as failed:
            if not self.use_collectives:
                raise
            step.error = failed
        wire = None if step.error is None else to_wire(step.error)
        is_member = self._find_members().group is not None
        ticket = _Ticket(step.epoch, wire, introduction() if is_member else None)
        return dataclasses.replace(plan, storage_data=ticket)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[Any]:
        """Each rank's place; or the error of one of them, which DCP raises on all."""
        mine = self._step()
        # The plan cache of DefaultSavePlanner drops the tickets; ``write_data`` raises then.
        tickets = [
            plan.storage_data if isinstance(plan.storage_data, _Ticket) else _Ticket(mine.epoch)
            for plan in plans
        ]
        errors = {
            rank: from_wire(ticket.error)
            for rank, ticket in enumerate(tickets)
            if ticket.error is not None
        }
        for rank, ticket in enumerate(tickets):
            if ticket.epoch != tickets[0].epoch:
                errors[rank] = InvalidInput(
                    f"rank 0 saves epoch {tickets[0].epoch}, rank {rank} epoch {ticket.epoch}; "
                    "give all ranks the same checkpoint_id"
                )
        if errors:
            return [for_all(errors)] * len(plans)
        said = [ticket.introduction for ticket in tickets if ticket.introduction is not None]
        launch = agree(said) if len(said) == len(tickets) else None
        place = _Ticket(mine.epoch, world_size=len(plans), launch=launch)
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(place, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def _wait_staged(self, staging: Staging, plan: SavePlan) -> None:
        if staging.error is not None:
            raise staging.error
        other = sorted({item.index.fqn for item in plan.items} - staging.names)
        if other:
            raise InvalidInput(
                f"the planner writes {other[0]!r}, which is no name of the state dict that was "
                "staged: give async_save an async_stager (DefaultStager) with this planner"
            )
        assert staging.handle is not None
        staging.handle.wait("durable")

    # -- writing ---------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hand the rank's items over, and wait until the epoch is durable and its door there.

        In a signal handler that interrupted another call of groupio it waits NESTED_S at most.
        Raises the typed error of a failed group.
        """
        step = self._step()
        if step.error is not None:
            raise step.error
        if step.staging is None:
            _await_durable(self._save(step, plan, planner))
        member = plan.storage_data.rank if step.members is None else step.members.rank
        results = []
        for item in plan.items:
            if not item.index.fqn.startswith(RESERVED):
                size = item_bytes(item)
                stored = StoredItem(step.epoch, member, size)
                results.append(WriteResult(item.index, size, stored))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _save(self, step: _Step, plan: SavePlan, planner: SavePlanner) -> SaveHandle:
        return save_as(
            self._path,
            step.members or self._place(step, plan.storage_data),
            Lazy(lambda: plan_items(plan, planner)),
            epoch=step.epoch,
            deadline_s=self._deadline_s,
            door="dcp",
            rewind_to=self._rewind_to,
            side="dcp",
        )

    def _place(self, step: _Step, ticket: _Ticket) -> Members:
        """This rank among those that planned this save."""
        members = self._find_members()
        if ticket.launch is not None and ticket.epoch == step.epoch:
            launch_id = join(ticket.launch)
            return Members(ticket.rank, ticket.world_size, members.group, launch_id)
        if members.world_size != ticket.world_size:
            return Members(ticket.rank, ticket.world_size)
        # A planner that caches its plans gives back those of earlier saves.
        return met(members, self._deadline_s, "save")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the metadata that DCP returns; nothing is written here."""
        step = self._step()
        found: dict[Any, StoredItem] = {}
        for rank_results in results:
            for result in rank_results:
                found.setdefault(result.index, result.storage_data)
        metadata.version = DCP_VERSION
        metadata.storage_data = found
        metadata.storage_meta = StorageMeta(
            checkpoint_id=step.checkpoint_id, save_id=str(step.epoch)
        )

    def _step(self) -> _Step:
        step = self._known()
        if step is None:
            raise _no_checkpoint_id()
        return step


def _await_durable(handle: SaveHandle) -> None:
    if not nesting.is_nested():
        handle.wait("durable")
        return
    try:
        handle.wait("durable", NESTED_S)
    except WaitTimeout:
        # The interrupted call may be of an epoch before it, which is decided first.
        log.warning("epoch %d was called in a handler and is not durable yet", handle.epoch)


def _save_calls() -> list[int]:
    """The calls of ``dcp.save`` on this thread's stack, innermost first; 0 stands for no call.

    A signal handler may call it inside another one, whose step is not over.
    """
    calls = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _SAVE:
            calls.append(id(frame))
        frame = frame.f_back
    return [*calls, 0]


def _no_checkpoint_id() -> InvalidInput:
    return InvalidInput(
        'give checkpoint_id to the save: the step is its end, such as "run/step-1000"'
    )
