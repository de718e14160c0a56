"""The members of a process group, and how they agree on something.

The members talk through the key-value store of their process group: no collective runs on the
user's group, nothing passes through accelerator memory, every wait has a deadline, and a member
that does not answer is named.

A process group may be made again over the same store, with other processes, and a member may have
failed alone before. So members first meet: each shows with a key that nobody has used before that
it is there now. What they decide then stands under keys of this meeting alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist

from groupio.client import nesting
from groupio.client.launch import find_place, launch_id
from groupio.errors import (
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    InvalidInput,
    Outcome,
    from_wire,
    to_wire,
)
from groupio.protocol.members import FormedLaunch

_LOOK_S = 0.25
"""While one member keeps rank 0 waiting it looks so often whether another has failed."""

VERDICT_MARGIN_S = 15.0
"""Members wait so much longer than the one who collects, to hear who was missing."""

SETS_REMEMBERED = 64
"""How many sets of members a process remembers that it belonged to, the newest ones."""

_PAUSE_S, _PAUSE_GROWTH, _LONGEST_PAUSE_S = 0.0001, 1.1, 0.05
"""Rank 0 looks for a key again after about a tenth of the time for which it has waited."""


class _Instance:
    """This process as a member of sets of processes."""

    def __init__(self) -> None:
        self.id = os.urandom(12).hex()
        self._series, self._number = os.urandom(8).hex(), 0
        self._launches: dict[str, str] = {}
        """The id of the launch by the digest of its members."""
        # A signal handler may interrupt any of this and save.
        self._lock = threading.RLock()

    def introduction(self) -> dict[str, Any]:
        """What the others have to know of this process to agree on a launch."""
        with self._lock:
            return {
                "id": self.id,
                "series": self._series,
                "number": self._number,
                "launches": dict(self._launches),
            }

    def join(self, launch: FormedLaunch) -> str:
        """This process is a member of the launch; its id."""
        with self._lock:
            if launch.number > self._number:
                self._series, self._number = launch.series, launch.number
            self._launches.pop(launch.members, None)
            self._launches[launch.members] = launch.launch_id
            if len(self._launches) > SETS_REMEMBERED:
                del self._launches[next(iter(self._launches))]
            return launch.launch_id

    def leave(self, launch_id: str) -> None:
        """The same members make another launch when they meet next."""
        with self._lock:
            self._launches = {m: one for m, one in self._launches.items() if one != launch_id}


_me = _Instance()
_met: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The launches of living process groups whose members have met."""
_met_lock = threading.RLock()


def introduction() -> dict[str, Any]:
    """What the other members have to know of this process, for :func:`agree`."""
    return _me.introduction()


def agree(said: Sequence[Mapping[str, Any]]) -> FormedLaunch:
    """The launch of the processes that said so of themselves, in the order of their ranks.

    The same processes have the same launch each time, unless one of them has left it. Any other
    set that one of them joins comes after it in their series.
    """
    members = hashlib.sha256("\n".join(one["id"] for one in said).encode()).hexdigest()[:16]
    known = {one["launches"].get(members) for one in said}
    launch = FormedLaunch.parse(known.pop()) if len(known) == 1 else None
    if launch is not None:
        return launch
    # Whoever survives of earlier sets has their series in common; a new process has its own one.
    votes = Counter(one["series"] for one in said)
    eldest = max(said, key=lambda one: (votes[one["series"]], one["number"]))
    return FormedLaunch(eldest["series"], max(one["number"] for one in said) + 1, members)


def join(launch: FormedLaunch) -> str:
    """This process is a member of what :func:`agree` found; the id that its clients say."""
    return _me.join(launch)


def leave(launch_id: str, *, refused: bool = False) -> None:
    """The members of this launch make another one when they meet next.

    ``refused``: the controller has seen their successors. Then they meet before the next save.
    """
    _me.leave(launch_id)
    if refused:
        with _met_lock:
            for group in [group for group, one in _met.items() if one == launch_id]:
                del _met[group]


def is_living(launch_id: str | None) -> bool:
    """Whether a process group of this process stands for the launch."""
    with _met_lock:
        return launch_id in list(_met.values())


def _after_fork_in_child() -> None:
    global _me, _met, _met_lock
    _me, _met, _met_lock = _Instance(), WeakKeyDictionary(), threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(frozen=True, slots=True)
class Members:
    """This process's place. ``group`` is the process group, None where there is none.

    ``launch_id`` stands for the member processes; None as long as they have not met.
    """

    rank: int
    world_size: int
    group: Any = None
    launch_id: str | None = None


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
        rank, world_size = find_place(None, None, os.environ)
        return Members(rank, world_size, launch_id=launch_id(os.environ))
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise InvalidInput(
            f"rank {dist.get_rank()} is not a member of the given process group; only its members "
            "may call"
        )
    group = dist.group.WORLD if process_group is None else process_group
    return Members(rank, dist.get_world_size(group), group, _met.get(group))


def met(members: Members, deadline_s: float, what: str) -> Members:
    """``members`` with the launch of their process group; they meet at the first call for it.

    ``what`` is the call of all ranks, "load" or "save". Without a process group only the launcher
    can tell one launch from the next. GroupTimeout names members that do not come, GroupAborted
    comes inside another meeting, which a second one would disturb.
    """
    if members.group is None or members.launch_id is not None:
        return members
    if nesting.is_inside(Council.meet):
        raise GroupAborted(
            f"{what} was called in a signal handler while the ranks of its process group met for "
            f"the first time, for another call; {what} again after that call"
        )
    return Council.meet(members, deadline_s, what).members


class Council:
    """A meeting of all members, for a series of decisions such as those of one load."""

    def __init__(self, members: Members, deadline_s: float, prefix: str, what: str) -> None:
        """Use :meth:`meet`."""
        self.members = members
        self.deadline_s = deadline_s
        """How long the next decision may wait for the slowest member, in seconds."""
        self.alone = members.group is None or members.world_size == 1
        """Whether there is nobody to agree with."""
        self._decisions = 0
        self._prefix = prefix
        self._what = what

    @classmethod
    def meet(cls, members: Members, deadline_s: float, what: str) -> Council:
        """Wait until all members have called ``what``; they know their launch then.

        Each call is a meeting of its own, whatever a member did before: calls that failed, or that
        it made alone, are over. GroupTimeout names members that do not come within
        ``deadline_s``; GroupAborted when the store cannot be reached.
        """
        nonce = os.urandom(12).hex()
        self = cls(members, deadline_s, "groupio/meet", what)
        if members.group is None:
            return self
        if self.alone:
            launch = agree([introduction()])
        elif members.rank == 0:
            launch = self._call(nonce)
        else:
            nonce, launch = self._come(nonce)
        self.members = replace(members, launch_id=join(launch))
        with _met_lock:
            _met[members.group] = launch.launch_id
        self._prefix = f"groupio/{launch.launch_id}/{nonce}"
        return self

    def beside(self, occasion: str, deadline_s: float) -> Council:
        """Another series of decisions of the same members, during this one."""
        return Council(self.members, deadline_s, f"{self._prefix}/{occasion}", self._what)

    def _call(self, nonce: str) -> FormedLaunch:
        """Rank 0: answer everyone's newest call until all have heard the answer."""
        end = time.monotonic() + self.deadline_s
        calls: dict[int, dict[str, Any]] = {}
        here: set[int] = set()
        others = range(1, self.members.world_size)
        for pause in _pauses():
            is_over = time.monotonic() > end
            for rank in others:
                call = self._found(f"{self._prefix}/{rank}")
                if call is not None and call["nonce"] != calls.get(rank, {}).get("nonce"):
                    # What stood there before may be of a call, or a process, that is over.
                    calls[rank] = call
                    here.discard(rank)
                    self._set(f"{self._prefix}/{call['nonce']}/answer", {"nonce": nonce})
                is_settled = rank in here or rank not in calls
                if not is_settled and self._check(f"{self._prefix}/{nonce}/{calls[rank]['nonce']}"):
                    here.add(rank)
            if len(here) == len(others) or is_over:
                break
            time.sleep(pause)
        result = f"{self._prefix}/{nonce}/launch"
        missing = [rank for rank in others if rank not in here]
        if missing:
            error = self._absent(missing, f"did not call {self._what}", self.deadline_s)
            self._set(result, {"error": to_wire(error)})
            raise error
        said = [introduction(), *(calls[rank]["introduction"] for rank in others)]
        launch = agree(said)
        self._set(result, {"launch_id": launch.launch_id})
        return launch

    def _come(self, nonce: str) -> tuple[str, FormedLaunch]:
        """Any other rank: call rank 0; its nonce, and the launch."""
        limit = self.deadline_s + VERDICT_MARGIN_S
        end = time.monotonic() + limit
        call = {"nonce": nonce, "introduction": introduction()}
        self._set(f"{self._prefix}/{self.members.rank}", call)
        answer = self._wait(f"{self._prefix}/{nonce}/answer", limit)
        if answer is None:
            raise self._absent([0], f"did not call {self._what}", limit)
        presider = answer["nonce"]
        self._set(f"{self._prefix}/{presider}/{nonce}", {})
        left = max(end - time.monotonic(), 0.01)
        result = self._wait(f"{self._prefix}/{presider}/launch", left)
        if result is None:
            raise self._absent([0], "did not answer", limit)
        if "error" in result:
            raise from_wire(result["error"])
        launch = FormedLaunch.parse(result["launch_id"])
        assert launch is not None
        return presider, launch

    def _absent(self, missing: list[int], did: str, limit_s: float) -> GroupTimeout:
        who = "rank 0" if missing == [0] else f"ranks {missing}"
        return GroupTimeout(
            f"{who} {did} within {limit_s:.0f} s; see what became of "
            f"{'it' if missing == [0] else 'them'}, then {self._what} again on all ranks",
            missing=missing,
            outcome=Outcome.UNKNOWN,
        )

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
        pauses = _pauses()
        while waiting:
            # After the deadline whoever has answered by now still counts.
            left = max(end - time.monotonic(), 0.01)
            late = left <= 0.01
            opinion = self._look(self._key(str(waiting[0])), min(left, _LOOK_S), pauses)
            answered = [waiting[0]] if opinion is not None else []
            if opinion is None:
                answered = [rank for rank in waiting[1:] if self._has(str(rank))]
            for rank in answered:
                one = opinion if opinion is not None else self._found(self._key(str(rank)))
                assert one is not None
                if "error" in one:
                    raise _of_member(rank, from_wire(one["error"]))
                found[rank] = one
            if answered:
                waiting, pauses = [rank for rank in waiting if rank not in found], _pauses()
            if late and not answered:
                break
        if waiting:
            raise self._absent(waiting, "did not answer", self.deadline_s)
        return [found[rank] for rank in sorted(found)]

    def _hear(self) -> dict[str, Any]:
        limit = self.deadline_s + VERDICT_MARGIN_S
        verdict = self._wait(self._key("verdict"), limit)
        if verdict is None:
            raise self._absent([0], "did not answer", limit)
        return verdict

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._decisions}/{name}"

    def _put(self, name: str, value: Mapping[str, Any]) -> None:
        self._set(self._key(name), value)

    def _has(self, name: str) -> bool:
        return self._check(self._key(name))

    # -- the store ---------------------------------------------------------

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        try:
            _store_of(self.members.group).set(key, msgspec.msgpack.encode(value))
        except RuntimeError as error:
            raise _unreachable(error) from error

    def _check(self, key: str) -> bool:
        try:
            return bool(_store_of(self.members.group).check([key]))
        except RuntimeError as error:
            raise _unreachable(error) from error

    def _found(self, key: str) -> dict[str, Any] | None:
        """What stands under ``key`` now."""
        return self._read(key) if self._check(key) else None

    def _look(self, key: str, timeout_s: float, pauses: Iterator[float]) -> dict[str, Any] | None:
        """What stands under ``key``; None when there is nothing in time. For rank 0.

        A wait of torch's store would log a warning with a stack trace each time it is over.
        """
        end = time.monotonic() + timeout_s
        while (found := self._found(key)) is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(next(pauses), left))
        return found

    def _wait(self, key: str, timeout_s: float) -> dict[str, Any] | None:
        """What stands under ``key``; None when there is nothing in time.

        The store answers once the key is there, so it serves any number of members that wait.
        """
        end = time.monotonic() + timeout_s
        try:
            _store_of(self.members.group).wait([key], timedelta(seconds=timeout_s))
        except RuntimeError as error:  # torch has one type for "too late" and "no connection"
            if time.monotonic() >= end - 0.005:
                return None
            raise _unreachable(error) from error
        return self._read(key)

    def _read(self, key: str) -> dict[str, Any]:
        """What stands under ``key``, which is there."""
        try:
            data: bytes = _store_of(self.members.group).get(key)
        except RuntimeError as error:
            raise _unreachable(error) from error
        return decode_word(data, key)


def decode_word(data: bytes, key: str) -> dict[str, Any]:
    """What a member wrote under ``key``; GroupAborted when it is nothing that a member writes."""
    try:
        value = msgspec.msgpack.decode(data)
        if isinstance(value, dict):
            return value
        why = f"it is a {type(value).__name__}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    raise GroupAborted(
        f"the key {key} in the store of torch.distributed has {len(data)} bytes that no member "
        f"wrote ({why}); use one release of groupio on all ranks, then start the job again",
        outcome=Outcome.UNKNOWN,
    )


def _pauses() -> Iterator[float]:
    """How long to pause before each next look, without end."""
    pause = _PAUSE_S
    while True:
        yield pause
        pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE_S)


def _store_of(group: Any) -> Any:
    return dist.distributed_c10d._world.pg_map[group][1]


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
