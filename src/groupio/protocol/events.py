"""What happens to the machines. A failure, a timeout and an answer of the store are events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Lineage, NodeReport
from groupio.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Process:
    """One life of an operating-system process: a pid is reused, a start time is not."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class MemberOpened:
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
    metadata: dict[str, Any] = field(default_factory=dict)
    door: str = ""
    """The view that is to be made of the epoch: "dcp", or none."""

    @property
    def remaining_s(self) -> float:
        """What was left of the deadline at the arrival, in seconds."""
        return max(0.0, self.deadline_s - self.elapsed_s)


@dataclass(frozen=True, slots=True)
class MemberCopied:
    """All bytes of the member are in its agent's memory (or already stored, with waves)."""

    group: int
    rank: int


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """A client reported that it cannot go on with one of its saves."""

    client: str
    save_id: int
    error: GroupIOError


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A client's connection ended; ``process_gone`` when its process ended too."""

    client: str
    process_gone: bool


@dataclass(frozen=True, slots=True)
class NodeAdmitted:
    """The node holds the group's memory."""

    group: int
    node: str


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The node has no room for the group."""

    group: int
    node: str
    error: GroupIOError


@dataclass(frozen=True, slots=True)
class NodeStored:
    """Every unique chunk of the node is hashed and durable in its segments."""

    group: int
    node: str
    report: NodeReport


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """The node could not store its part."""

    group: int
    node: str
    error: GroupIOError


@dataclass(frozen=True, slots=True)
class NodeIdle:
    """After an abort: no thread of the node touches the group's memory or segments any more."""

    group: int
    node: str


@dataclass(frozen=True, slots=True)
class CommittedEpoch:
    """A commit record found in, or put into, the store."""

    key: DecisionKey
    incarnation: int
    content_id: bytes


@dataclass(frozen=True, slots=True)
class StoreState:
    """What the store holds when a job begins, after recovery: nothing in it is undecided."""

    job: str
    lineages: tuple[Lineage, ...]
    committed: tuple[CommittedEpoch, ...]
    aborted: tuple[DecisionKey, ...]
    incarnation: int
    """The highest incarnation that any record names; 0 in a new store."""
    node_local: bool = True
    """The store is lost with this node: REMOTE is reached together with DURABLE."""


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The store is open for writing and recovered."""

    state: StoreState


@dataclass(frozen=True, slots=True)
class StoreUnavailable:
    """The store cannot be opened for writing."""

    error: GroupIOError


@dataclass(frozen=True, slots=True)
class LineageCreated:
    """A new line of epochs exists, or could not be made."""

    lineage: Lineage | None
    error: GroupIOError | None = None


@dataclass(frozen=True, slots=True)
class InflightPublished:
    """Answer to PublishInflight."""

    group: int
    error: GroupIOError | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Answer to PrepareEpoch; ``content_id`` is that of the manifest made."""

    group: int
    content_id: bytes = b""
    error: GroupIOError | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Answer to CompareEpoch."""

    group: int
    equal: bool
    error: GroupIOError | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """Answer to Decide.

    ``committed`` says what stands under the key now, ``ours`` whether this attempt's own record
    does. With ``error`` neither is known.
    """

    group: int
    committed: bool
    ours: bool
    error: GroupIOError | None = None


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that StartTimer set ran out."""

    name: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new groups; those in flight are finished, or given up if they are not STAGED yet."""

    abort_unstaged: bool = False


# -- the agent machine's own events ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """A member of this node opened a save: what its lease has to hold."""

    client: str
    save_id: int
    rank: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class WaveCopied:
    """A rank finished copying a wave into its lease."""

    client: str
    save_id: int
    wave: int


@dataclass(frozen=True, slots=True)
class WaveStored:
    """Every chunk of the wave is hashed and, where new, written: its memory may be reused."""

    group: int
    rank: int
    wave: int


@dataclass(frozen=True, slots=True)
class JobStored:
    """The node's flush job ended well."""

    group: int
    report: NodeReport


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The node's flush job failed."""

    group: int
    error: GroupIOError


@dataclass(frozen=True, slots=True)
class JobIdle:
    """The node's cancelled flush job touches nothing any more."""

    group: int


@dataclass(frozen=True, slots=True)
class WriterStopped:
    """A client acknowledged that it no longer writes to the leases of this save."""

    client: str
    save_id: int


ControllerEvent = (
    MemberOpened
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
