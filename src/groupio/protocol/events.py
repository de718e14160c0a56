"""What happens to the machines. A failure, a timeout and an answer of the store are events."""

from __future__ import annotations

from typing import Any

import msgspec

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Lineage, NodeReport
from groupio.plan.layout import Layout


class _Event(msgspec.Struct, frozen=True):
    """Base of all events: structs, because a starting agent would define dataclasses slowly."""


class Process(_Event, frozen=True):
    """One life of an operating-system process: a pid is reused, a start time is not."""

    pid: int
    started: int


class ClientArrived(_Event, frozen=True):
    """A client said Hello; it may save later, or never.

    ``gave_up`` are epochs that it began to save with an agent that is lost.
    """

    client: str
    process: Process
    rank: int
    world_size: int
    job: str | None = None
    launch_id: str | None = None
    gave_up: tuple[int, ...] = ()


class MemberOpened(_Event, frozen=True):
    """A member asks to take part in the group of ``epoch``.

    ``elapsed_s`` is the time since the member's call; ``at`` the arrival on the driver's clock.
    """

    node: str
    client: str
    process: Process
    rank: int
    world_size: int
    save_id: int
    epoch: int
    deadline_s: float
    elapsed_s: float
    at: float
    total_bytes: int
    bytes_logical: int
    items_id: bytes
    replicated: tuple[str, ...] = ()
    when_full: str = "wait"
    job: str | None = None
    """The job that the member named, or None: whichever owns the store."""
    rewind_to: int | None = None
    launch_id: str | None = None
    metadata: dict[str, Any] = {}
    door: str = ""
    """The view that is to be made of the epoch: "dcp", or none."""

    @property
    def remaining_s(self) -> float:
        """What was left of the deadline at the arrival, in seconds."""
        return max(0.0, self.deadline_s - self.elapsed_s)


class MemberCopied(_Event, frozen=True):
    """All bytes of the member are in its agent's memory (or already stored, with waves)."""

    group: int
    rank: int


class MemberFailed(_Event, frozen=True):
    """A client reported that it cannot go on with one of its saves."""

    client: str
    save_id: int
    error: GroupIOError


class MemberGone(_Event, frozen=True):
    """A client's connection ended; ``process_gone`` when its process ended too."""

    client: str
    process_gone: bool


class NodeAdmitted(_Event, frozen=True):
    """The node holds the group's memory."""

    group: int
    node: str


class NodeRefused(_Event, frozen=True):
    """The node has no room for the group."""

    group: int
    node: str
    error: GroupIOError


class NodeStored(_Event, frozen=True):
    """Every unique chunk of the node is hashed and durable in its segments."""

    group: int
    node: str
    report: NodeReport


class NodeFailed(_Event, frozen=True):
    """The node could not store its part."""

    group: int
    node: str
    error: GroupIOError


class NodeIdle(_Event, frozen=True):
    """After an abort: no thread of the node touches the group's memory or segments any more."""

    group: int
    node: str


class CommittedEpoch(_Event, frozen=True):
    """A commit record found in, or put into, the store."""

    key: DecisionKey
    incarnation: int
    content_id: bytes


class StoreState(_Event, frozen=True):
    """What the store holds when a job begins, after recovery: nothing in it is undecided."""

    job: str
    lineages: tuple[Lineage, ...]
    committed: tuple[CommittedEpoch, ...]
    aborted: tuple[DecisionKey, ...]
    incarnation: int
    """The highest incarnation that any record names; 0 in a new store."""
    node_local: bool = True
    """The store is lost with this node: REMOTE is reached together with DURABLE."""


class StoreOpened(_Event, frozen=True):
    """The store is open for writing and recovered."""

    state: StoreState


class StoreUnavailable(_Event, frozen=True):
    """The store cannot be opened for writing."""

    error: GroupIOError


class LineageCreated(_Event, frozen=True):
    """A new line of epochs exists, or could not be made."""

    lineage: Lineage | None
    error: GroupIOError | None = None


class InflightPublished(_Event, frozen=True):
    """Answer to PublishInflight."""

    group: int
    error: GroupIOError | None = None


class Prepared(_Event, frozen=True):
    """Answer to PrepareEpoch; ``content_id`` is that of the manifest made."""

    group: int
    content_id: bytes = b""
    error: GroupIOError | None = None


class Compared(_Event, frozen=True):
    """Answer to CompareEpoch."""

    group: int
    equal: bool
    error: GroupIOError | None = None


class Decided(_Event, frozen=True):
    """Answer to Decide.

    ``committed`` says what stands under the key now, ``ours`` whether this attempt's own record
    does. With ``error`` neither is known.
    """

    group: int
    committed: bool
    ours: bool
    error: GroupIOError | None = None


class TimerFired(_Event, frozen=True):
    """A timer that StartTimer set ran out."""

    name: str


class Drain(_Event, frozen=True):
    """Take no new groups; those in flight are finished, or given up if they are not STAGED yet."""

    abort_unstaged: bool = False


# -- the agent machine's own events ---------------------------------------------------------


class SaveExpected(_Event, frozen=True):
    """A client has not saved yet, and its first save will likely take ``total_bytes``."""

    client: str
    total_bytes: int


class AheadMapped(_Event, frozen=True):
    """A client has mapped this range of its arena ahead of its first save."""

    client: str
    offset: int
    length: int


class LeaseAsked(_Event, frozen=True):
    """A member of this node opened a save: what its lease has to hold."""

    client: str
    save_id: int
    rank: int
    layout: Layout


class WaveCopied(_Event, frozen=True):
    """A rank finished copying a wave into its lease."""

    client: str
    save_id: int
    wave: int


class WaveStored(_Event, frozen=True):
    """Every chunk of the wave is hashed and, where new, written: its memory may be reused."""

    group: int
    rank: int
    wave: int


class JobStored(_Event, frozen=True):
    """The node's flush job ended well."""

    group: int
    report: NodeReport


class JobFailed(_Event, frozen=True):
    """The node's flush job failed."""

    group: int
    error: GroupIOError


class JobIdle(_Event, frozen=True):
    """The node's cancelled flush job touches nothing any more."""

    group: int


class WriterStopped(_Event, frozen=True):
    """A client acknowledged that it no longer writes to the leases of this save."""

    client: str
    save_id: int


ControllerEvent = (
    ClientArrived
    | MemberOpened
    | MemberCopied
    | MemberFailed
    | MemberGone
    | NodeAdmitted
    | NodeRefused
    | NodeStored
    | NodeFailed
    | NodeIdle
    | StoreOpened
    | StoreUnavailable
    | LineageCreated
    | InflightPublished
    | Prepared
    | Compared
    | Decided
    | TimerFired
    | Drain
)
