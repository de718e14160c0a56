"""Every error that groupio raises.

::

    GroupIOError
    ├── InvalidInput        the call itself is wrong: a value, a name, a rank, a setting
    ├── GroupTimeout        members did not arrive or did not finish before the deadline
    ├── GroupAborted        the group was given up: a member died, failed or was closed
    ├── LateMember          the message belongs to a group that is already decided
    ├── StaleEpoch          the epoch is older than the newest committed one
    ├── EpochConflict       the epoch is committed already, with other content
    ├── ReplicaDivergence   items declared equal on several members differ
    ├── LevelUnreachable    the asked durability level cannot be reached here
    ├── WaitTimeout         ``wait`` ran out of time; the save itself goes on
    ├── StagingFull         the host memory budget has no room
    ├── StorageFull         the store has no room
    ├── StorageError        the store answered with an error
    ├── IntegrityError      stored bytes are damaged
    ├── FormatError         a stored record cannot be read by this version
    ├── NotFound            there is no such store, epoch, member or item
    ├── StateMismatch       a strict load does not fit the given state
    ├── AgentLost           the node's agent ended or cannot be reached
    └── ControllerLost      the job's controller ended or cannot be reached

Errors pickle (frameworks gather them across ranks) and travel between processes as plain
dictionaries (:func:`to_wire`, :func:`from_wire`). A failed save never raises out of a training
loop: it stands on the handle, with ``outcome`` and ``retry`` set.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self


class Outcome(StrEnum):
    """What is known of the epoch after a failed save."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not_committed"
    UNKNOWN = "unknown"


class Retry(StrEnum):
    """What a caller has to save again: missing fragments, the whole epoch, or nothing."""

    MISSING = "missing"
    WHOLE = "whole"
    NONE = "none"


class GroupIOError(Exception):
    """Base of all errors of groupio.

    ``message`` is one sentence that names the rank, path, size or epoch concerned and what to do.
    Keyword fields named in ``FIELDS`` become attributes and survive pickling and the wire.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()
    DEFAULT_RETRY: ClassVar[Retry] = Retry.WHOLE

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome | str = Outcome.NOT_COMMITTED,
        retry: Retry | str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message)
        unknown = set(fields) - set(self.FIELDS)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}")
        self.message = message
        self.outcome = Outcome(outcome)
        self.retry = Retry(retry) if retry is not None else self.DEFAULT_RETRY
        for name in self.FIELDS:
            value = fields.get(name)
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    def fields(self) -> dict[str, Any]:
        """The fields of this error by name."""
        return {name: getattr(self, name) for name in self.FIELDS}

    def with_outcome(self, outcome: Outcome | str) -> Self:
        """The same error, with another ``outcome``."""
        self.outcome = Outcome(outcome)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_wire, (to_wire(self),))


class InvalidInput(GroupIOError):
    """The call itself is wrong; nothing was changed."""

    DEFAULT_RETRY = Retry.NONE


class GroupTimeout(GroupIOError):
    """The deadline passed before the group was STAGED; ``missing`` are the ranks waited for."""

    FIELDS = ("missing", "epoch")
    missing: tuple[int, ...]
    epoch: int | None

    def __init__(self, message: str, *, missing: Sequence[int] = (), **rest: Any) -> None:
        super().__init__(message, missing=tuple(missing), **rest)


class GroupAborted(GroupIOError):
    """The group was given up before it was STAGED; ``members`` are the ranks that caused it."""

    FIELDS = ("members", "epoch")
    members: tuple[int, ...]
    epoch: int | None

    def __init__(self, message: str, *, members: Sequence[int] = (), **rest: Any) -> None:
        super().__init__(message, members=tuple(members), **rest)


class LateMember(GroupIOError):
    """The member speaks for an earlier incarnation, attempt or a decided group."""

    FIELDS = ("member", "epoch")
    member: int | None
    epoch: int | None


class StaleEpoch(GroupIOError):
    """The epoch is not newer than ``latest`` of the lineage."""

    FIELDS = ("epoch", "latest")
    DEFAULT_RETRY = Retry.NONE
    epoch: int | None
    latest: int | None


class EpochConflict(GroupIOError):
    """The epoch is committed with other content; the committed one stays as it is."""

    FIELDS = ("epoch",)
    DEFAULT_RETRY = Retry.NONE
    epoch: int | None


class ReplicaDivergence(GroupIOError):
    """Items declared as replicas have different bytes on different members.

    ``members`` are the ranks that differ from the majority, all of them where there is none.
    ``offsets[i]`` is the first byte, in the local bytes of ``items[i]``, that is not the same
    everywhere; None where the members do not even agree on shape or kind, and where the bytes
    were no longer together in one node's memory (the message then names the chunk).
    """

    FIELDS = ("items", "members", "epoch", "offsets")
    DEFAULT_RETRY = Retry.NONE
    items: tuple[str, ...]
    members: tuple[int, ...]
    epoch: int | None
    offsets: tuple[int | None, ...]

    def __init__(
        self,
        message: str,
        *,
        items: Sequence[str] = (),
        members: Sequence[int] = (),
        offsets: Sequence[int | None] = (),
        **rest: Any,
    ) -> None:
        super().__init__(
            message, items=tuple(items), members=tuple(members), offsets=tuple(offsets), **rest
        )

    @property
    def first_byte(self) -> int | None:
        """Where the first of ``items`` begins to differ, in its local bytes; None: not known."""
        return self.offsets[0] if self.offsets else None


class LevelUnreachable(GroupIOError):
    """The level cannot be reached with these nodes and settings."""

    FIELDS = ("level",)
    DEFAULT_RETRY = Retry.NONE
    level: str | None


class WaitTimeout(GroupIOError):
    """``wait`` ran out; the save goes on and may still succeed."""

    FIELDS = ("level", "epoch")
    DEFAULT_RETRY = Retry.NONE
    level: str | None
    epoch: int | None

    def __init__(self, message: str, *, outcome: str = Outcome.UNKNOWN, **rest: Any) -> None:
        super().__init__(message, outcome=outcome, **rest)


class StagingFull(GroupIOError):
    """The memory budget of the agent has no room; sizes are bytes."""

    FIELDS = ("needed", "budget", "skipped", "epoch")
    needed: int | None
    budget: int | None
    skipped: bool | None
    epoch: int | None


class StorageFull(GroupIOError):
    """The store has no room; sizes are bytes."""

    FIELDS = ("path", "needed", "free")
    path: str | None
    needed: int | None
    free: int | None


class StorageError(GroupIOError):
    """The store answered with an error number."""

    FIELDS = ("path", "errno")
    path: str | None
    errno: int | None


class IntegrityError(GroupIOError):
    """Stored bytes are damaged; ``chunk`` is the hex digest of the chunk, if it is one."""

    FIELDS = ("path", "chunk", "epoch")
    DEFAULT_RETRY = Retry.NONE
    path: str | None
    chunk: str | None
    epoch: int | None


class FormatError(GroupIOError):
    """A stored record is not of a format or version that this release reads."""

    FIELDS = ("path",)
    DEFAULT_RETRY = Retry.NONE
    path: str | None


class NotFound(GroupIOError):
    """There is no such store, epoch, member or item."""

    FIELDS = ("path", "epoch", "member", "items")
    DEFAULT_RETRY = Retry.NONE
    path: str | None
    epoch: int | None
    member: int | None
    items: tuple[str, ...] | None


class StateMismatch(GroupIOError):
    """A strict load does not fit the given state; nothing has been touched."""

    FIELDS = ("missing", "unexpected", "different")
    DEFAULT_RETRY = Retry.NONE
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        different: Sequence[str] = (),
        **rest: Any,
    ) -> None:
        super().__init__(
            message,
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            different=tuple(different),
            **rest,
        )


class AgentLost(GroupIOError):
    """The agent ended or cannot be reached; ``log`` is where it wrote last."""

    FIELDS = ("log",)
    log: str | None

    def __init__(self, message: str, *, outcome: str = Outcome.UNKNOWN, **rest: Any) -> None:
        super().__init__(message, outcome=outcome, **rest)


class ControllerLost(GroupIOError):
    """The controller ended or cannot be reached."""

    def __init__(self, message: str, *, outcome: str = Outcome.UNKNOWN, **rest: Any) -> None:
        super().__init__(message, outcome=outcome, **rest)


ERRORS: dict[str, type[GroupIOError]] = {
    cls.__name__: cls
    for cls in (
        GroupIOError,
        InvalidInput,
        GroupTimeout,
        GroupAborted,
        LateMember,
        StaleEpoch,
        EpochConflict,
        ReplicaDivergence,
        LevelUnreachable,
        WaitTimeout,
        StagingFull,
        StorageFull,
        StorageError,
        IntegrityError,
        FormatError,
        NotFound,
        StateMismatch,
        AgentLost,
        ControllerLost,
    )
}


def to_wire(error: GroupIOError) -> dict[str, Any]:
    """``error`` as a dictionary of plain values."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "outcome": str(error.outcome),
        "retry": str(error.retry),
        "fields": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in error.fields().items()
            if value is not None
        },
    }


def from_wire(data: dict[str, Any]) -> GroupIOError:
    """The error that :func:`to_wire` described; an unknown kind becomes the base class.

    Where ``data`` describes none it is a FormatError that says so; nothing is raised.
    """
    try:
        return parse_error(data)
    except ValueError as error:
        return FormatError(
            f"an error came in a form that cannot be read ({error}); the other process may run "
            "another release of groupio",
            outcome=Outcome.UNKNOWN,
        )


def parse_error(data: Any) -> GroupIOError:
    """As :func:`from_wire`; ValueError when ``data`` describes no error."""
    try:
        cls, message = ERRORS.get(data["kind"], GroupIOError), data["message"]
        if type(message) is not str:
            raise TypeError("its message is no text")
        fields = {k: v for k, v in data.get("fields", {}).items() if k in cls.FIELDS}
        return cls(message, outcome=data["outcome"], retry=data["retry"], **fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
