"""Who takes part: rank and world size of a process group, and how its members agree on something.

The members talk through the key-value store of ``torch.distributed``: no collective runs on the
user's group, nothing passes through accelerator memory, every wait has a deadline, and a member
that does not answer is named.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from groupio.client.launch import find_place
from groupio.errors import (
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    InvalidInput,
    Outcome,
    from_wire,
    to_wire,
)

_LOOK_S = 0.25
"""While one member keeps rank 0 waiting it looks so often whether another has failed."""

VERDICT_MARGIN_S = 15.0
"""Members wait so much longer than the one who collects, to hear who was missing."""

_rounds: dict[tuple[str, int], int] = {}


@dataclass(frozen=True, slots=True)
class Members:
    """This process's place. ``group`` names the process group, "" when there is none."""

    rank: int
    world_size: int
    group: str = ""


def find_members(process_group: dist.ProcessGroup | None) -> Members:
    """The place of this process: by the group, else by the launcher's environment, else 0 of 1.

    InvalidInput when this process is not in ``process_group``.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise InvalidInput(
                "process_group is given but torch.distributed is not initialised; call "
                "init_process_group first"
            )
        return Members(*find_place(None, None, os.environ))
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise InvalidInput(
            f"rank {dist.get_rank()} is not a member of the given process group; only its members "
            "may call"
        )
    ranks = dist.get_process_group_ranks(process_group)
    name = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    group = getattr(process_group, "group_name", "world")
    return Members(rank, len(ranks), f"{group}-{name}")


class Council:
    """One series of decisions of all members, such as those of one load.

    Every member makes one for the same occasion, in the same order.
    """

    def __init__(
        self, members: Members, occasion: str, deadline_s: float, again: str = "load"
    ) -> None:
        """``again`` is the call that errors advise to repeat."""
        self.members = members
        self._again = again
        self.deadline_s = deadline_s
        """How long the next decision may wait for the slowest member, in seconds."""
        self.alone = not members.group or members.world_size == 1
        """Whether there is nobody to agree with."""
        self._decisions = 0
        key = f"groupio/{members.group}/{occasion}"
        place = (key, members.rank)
        number = _rounds[place] = _rounds.get(place, -1) + 1
        self._prefix = f"{key}/{number}"

    def decide(
        self,
        mine: Mapping[str, Any] | GroupIOError,
        judge: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> dict[str, Any]:
        """What rank 0 makes of everyone's opinion; the same for all members.

        ``mine`` is a dict of plain values, or why this member cannot go on: then all members
        raise, this one its own error and the others one that names it, without waiting for those
        that have not answered. ``judge`` runs on rank 0 and may raise an error for all.
        GroupTimeout names members that do not answer in time.
        """
        self._decisions += 1
        if self.alone:
            if isinstance(mine, GroupIOError):
                raise mine
            return judge([dict(mine)])
        if self.members.rank == 0:
            verdict = self._preside(mine, judge)
            self._put("verdict", verdict)
        else:
            self._put(str(self.members.rank), _opinion(mine))
            verdict = {} if isinstance(mine, GroupIOError) else self._hear()
        if isinstance(mine, GroupIOError):
            raise mine
        if "error" in verdict:
            raise from_wire(verdict["error"])
        return verdict

    def _preside(
        self,
        mine: Mapping[str, Any] | GroupIOError,
        judge: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> dict[str, Any]:
        try:
            if isinstance(mine, GroupIOError):
                raise _of_member(0, mine)
            return judge([dict(mine), *self._collect()])
        except GroupIOError as error:
            return {"error": to_wire(error)}

    def _collect(self) -> list[dict[str, Any]]:
        """The opinions of ranks 1, 2, ...; raises the first error among them as soon as it is
        there, for the others may be waiting for a member that will never come."""
        end = time.monotonic() + self.deadline_s
        found: dict[int, dict[str, Any]] = {}
        waiting = list(range(1, self.members.world_size))
        while waiting:
            # After the deadline whoever has answered by now still counts.
            left = max(end - time.monotonic(), 0.01)
            late = left <= 0.01
            opinion = self._get(str(waiting[0]), min(left, _LOOK_S))
            answered = [waiting[0]] if opinion is not None else []
            if opinion is None:
                answered = [rank for rank in waiting[1:] if self._has(str(rank))]
            for rank in answered:
                one = opinion if opinion is not None else self._get(str(rank), left)
                assert one is not None
                if "error" in one:
                    raise _of_member(rank, from_wire(one["error"]))
                found[rank] = one
            waiting = [rank for rank in waiting if rank not in found]
            if late and not answered:
                break
        if waiting:
            raise GroupTimeout(
                f"ranks {waiting} did not answer within {self.deadline_s:.0f} s; see what became "
                f"of them, then {self._again} again on all ranks",
                missing=waiting,
                outcome=Outcome.UNKNOWN,
            )
        return [found[rank] for rank in sorted(found)]

    def _hear(self) -> dict[str, Any]:
        verdict = self._get("verdict", self.deadline_s + VERDICT_MARGIN_S)
        if verdict is not None:
            return verdict
        raise GroupTimeout(
            f"rank 0 did not answer within {self.deadline_s + VERDICT_MARGIN_S:.0f} s; see what "
            f"became of it, then {self._again} again on all ranks",
            missing=[0],
            outcome=Outcome.UNKNOWN,
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._decisions}/{name}"

    def _put(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            _store().set(self._key(name), msgspec.msgpack.encode(value))
        except RuntimeError as error:
            raise _unreachable(error) from error

    def _has(self, name: str) -> bool:
        try:
            return bool(_store().check([self._key(name)]))
        except RuntimeError as error:
            raise _unreachable(error) from error

    def _get(self, name: str, timeout_s: float) -> dict[str, Any] | None:
        """What a member put under ``name``; None when it did not in time."""
        key = self._key(name)
        end = time.monotonic() + timeout_s
        try:
            _store().wait([key], timedelta(seconds=timeout_s))
            value: dict[str, Any] = msgspec.msgpack.decode(_store().get(key))
        except RuntimeError as error:  # torch has one type for "too late" and "no connection"
            if time.monotonic() >= end - 0.005:
                return None
            raise _unreachable(error) from error
        return value


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _opinion(mine: Mapping[str, Any] | GroupIOError) -> dict[str, Any]:
    return {"error": to_wire(mine)} if isinstance(mine, GroupIOError) else dict(mine)


def _of_member(rank: int, error: GroupIOError) -> GroupIOError:
    wire = to_wire(error)
    wire["message"] = f"rank {rank}: {error.message}"
    return from_wire(wire)


def _unreachable(error: RuntimeError) -> GroupAborted:
    first_line = (str(error).splitlines() or [""])[0]
    return GroupAborted(
        f"the store of torch.distributed, which rank 0 or torchrun keeps, cannot be reached "
        f"({first_line}); start the job again",
        members=[0],
        outcome=Outcome.UNKNOWN,
    )
