"""What the machines ask their driver to do, in the order given.

Each store effect says in its docstring what must be durable when its answer comes. Store effects
with one key are executed in the order given, and OpenStore after all that were given before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Level, Lineage, NodeReport
from groupio.plan.layout import Wave


@dataclass(frozen=True, slots=True)
class MemberSeat:
    """A member's place in a group, as its agent needs to know it."""

    rank: int
    client: str
    save_id: int


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Feed ``TimerFired(name)`` back after ``delay_s`` seconds unless stopped."""

    name: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class StopTimer:
    """Forget the timer."""

    name: str


# -- to the store ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open or create the store, recover it (decide what is undecided), list what it holds.

    Attempts in ``held`` are in flight here and are left alone. Without ``create`` a store that
    is not there is an error.
    """

    held: tuple[DecisionKey, ...]
    create: bool


@dataclass(frozen=True, slots=True)
class CreateLineage:
    """Create-if-absent the lineage record; durable when LineageCreated comes."""

    lineage: Lineage


@dataclass(frozen=True, slots=True)
class PublishInflight:
    """Write the in-flight record: visible (not necessarily durable) before segments are named."""

    group: int
    key: DecisionKey
    incarnation: int
    world_size: int


@dataclass(frozen=True, slots=True)
class PrepareEpoch:
    """Build the manifest and write it as a prepared record; durable when Prepared comes.

    All segments of the reports are durable before this effect is issued.
    """

    group: int
    key: DecisionKey
    incarnation: int
    world_size: int
    reports: tuple[NodeReport, ...]
    replicated: tuple[str, ...]
    metadata: dict[str, Any]
    door: str = ""


@dataclass(frozen=True, slots=True)
class CompareEpoch:
    """Compare the members' content with the committed epoch under ``key``."""

    group: int
    key: DecisionKey
    world_size: int
    reports: tuple[NodeReport, ...]


@dataclass(frozen=True, slots=True)
class Decide:
    """Create-if-absent the decision under ``key``: the prepared record, or an abort record.

    When Decided comes, the decision that stands there, whoever made it, is durable.
    """

    group: int
    key: DecisionKey
    commit: bool
    incarnation: int
    reason: str = ""
    members: tuple[int, ...] = ()
    drop_segments_if_full: bool = False
    """No prepared record exists, so nobody can commit this attempt: on a full store the
    segments' bytes may be given back before the abort record is written."""


@dataclass(frozen=True, slots=True)
class ForgetInflight:
    """Remove the in-flight record of an attempt that is decided or never began."""

    group: int
    key: DecisionKey


# -- to agents ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdmitGroup:
    """Reserve memory for the node's members of this group; answer NodeAdmitted or NodeRefused."""

    node: str
    group: int
    key: DecisionKey
    seats: tuple[MemberSeat, ...]
    store: bool
    """False: only hash and compare, write nothing."""
    when_full: str
    door: str = ""
    """The view whose frames the segments need, or none."""


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Grant the leases."""

    node: str
    group: int


@dataclass(frozen=True, slots=True)
class AbortGroup:
    """Stop all work of the group on the node; answer NodeIdle."""

    node: str
    group: int


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """The group is decided: free its memory; delete its own segments unless committed."""

    node: str
    group: int
    committed: bool
    keep_segments: bool
    """The decision is unknown or the segments are in use: delete nothing."""


# -- to members ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellReached:
    """Tell a member that the group reached a level."""

    seat: MemberSeat
    level: Level
    first_arrival: float | None = None
    last_arrival: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TellFailed:
    """Tell a member that its save failed."""

    seat: MemberSeat
    error: GroupIOError


# -- of the agent machine ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenArena:
    """Make an empty arena of this number and hand its file to the client."""

    arena: int
    client: str


@dataclass(frozen=True, slots=True)
class CloseArena:
    """Give an arena's memory back to the system."""

    arena: int


@dataclass(frozen=True, slots=True)
class Populate:
    """Give memory to a range of an arena ahead of its use, in the background; tell the client."""

    arena: int
    offset: int
    length: int
    client: str


@dataclass(frozen=True, slots=True)
class Punch:
    """Give the memory of a range back to the system."""

    arena: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Send a lease for one wave to a client."""

    client: str
    save_id: int
    group: int
    key: DecisionKey
    arena: int
    offset: int
    number: int
    waves: int
    wave: Wave


@dataclass(frozen=True, slots=True)
class StartJob:
    """Make the group's flush job."""

    group: int
    key: DecisionKey
    store: bool
    door: str = ""


@dataclass(frozen=True, slots=True)
class AddWave:
    """Hand a copied wave to the flush job."""

    group: int
    client: str
    save_id: int
    rank: int
    number: int
    arena: int
    offset: int
    wave: Wave


@dataclass(frozen=True, slots=True)
class FinishJob:
    """All waves of all members are with the job: store the rest and report."""

    group: int


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Stop the job; feed JobIdle back."""

    group: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """Forget the job; delete its segments if asked."""

    group: int
    delete_segments: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Hand this event to the group's controller."""

    event: Any


Effect = Any
"""Effects are plain dataclasses of this module; drivers dispatch on the type."""
