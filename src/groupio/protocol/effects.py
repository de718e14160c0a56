"""Effects: requests of the machines to their driver, in the order given.

Each store effect says in its docstring what must be durable when its answer comes. Store effects
with one key are executed in the order given, and OpenStore after all that were given before it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Level, Lineage, NodeLink, NodeReport
from groupio.plan.layout import Wave
from groupio.plan.orders import NodeOrder
from groupio.protocol.events import SealedRecord


class _Effect(msgspec.Struct, frozen=True, tag=True):
    """Base of all effects: tagged structs, so that they can travel between nodes."""


class MemberSeat(_Effect, frozen=True):
    """A member's place in a group, as its agent needs to know it."""

    rank: int
    client: str
    save_id: int


class StartTimer(_Effect, frozen=True):
    """Feed ``TimerFired(name)`` back after ``delay_s`` seconds unless stopped."""

    name: str
    delay_s: float


class StopTimer(_Effect, frozen=True):
    """Forget the timer."""

    name: str


# -- to the store ---------------------------------------------------------


class OpenStore(_Effect, frozen=True):
    """Open or create the store, recover it (decide what is undecided), list what it holds.

    Attempts in ``held`` are in flight here and are left alone. Without ``create`` a store that
    is not there is an error.
    """

    held: tuple[DecisionKey, ...]
    create: bool
    resume: bool = False
    """Leave unprepared attempts alone whose bytes other nodes may still hold; name them in
    ``StoreState.undecided``."""


class CreateLineage(_Effect, frozen=True):
    """Create-if-absent the lineage record; durable when LineageCreated comes."""

    lineage: Lineage


class PublishInflight(_Effect, frozen=True):
    """Write the in-flight record: visible (not necessarily durable) before segments are named."""

    group: int
    key: DecisionKey
    incarnation: int
    world_size: int
    nodes: tuple[str, ...] = ()
    """The nodes whose members take part."""


class PrepareEpoch(_Effect, frozen=True):
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


class CompareEpoch(_Effect, frozen=True):
    """Compare the members' content with the committed epoch under ``key``."""

    group: int
    key: DecisionKey
    world_size: int
    reports: tuple[NodeReport, ...]


class Decide(_Effect, frozen=True):
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


class LeaveMark(_Effect, frozen=True):
    """Leave a mark in the folder of decisions, for the agent of ``node``; answer MarkLeft.

    A mark is a small file with random content, under a name that was never used.
    """

    node: str
    proof: int


class FindMark(_Effect, frozen=True):
    """Read the mark that the agent of ``node`` left in the folder of segments; answer MarkFound."""

    node: str
    proof: int
    name: str


class RemoveMarks(_Effect, frozen=True):
    """Remove marks, if they are there: those of this controller, and those of agents."""

    own: tuple[str, ...]
    shown: tuple[str, ...]


class ForgetInflight(_Effect, frozen=True):
    """Remove the in-flight record of an attempt that is decided or never began."""

    group: int
    key: DecisionKey


# -- to agents ---------------------------------------------------------


class AdmitGroup(_Effect, frozen=True):
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
    planned: bool = False
    """Hash, report and wait for StoreChunks, instead of writing at once."""
    replica_bytes: int = 0
    """Reserve so much for chunks of other nodes too."""
    wait: bool = True
    """Without room: wait for it, or answer NodeBusy at once."""
    incarnation: int = 0
    world_size: int = 0
    again: bool = False
    """The node may have had this order, and its answer may have been lost."""


class RetractGroup(_Effect, frozen=True):
    """Give the memory of an admitted group that has not begun back; it will be asked for again."""

    node: str
    group: int


class MakePlan(_Effect, frozen=True):
    """Plan who stores, moves and keeps what: :func:`groupio.protocol.storing.make_plan`."""

    group: int
    round: int
    reports: tuple[NodeReport, ...]
    nodes: tuple[NodeLink, ...]
    replicas: int
    shares: dict[str, int]
    lost: tuple[str, ...]
    done: tuple[NodeReport, ...]
    copies: dict[str, npt.NDArray[np.uint8]]
    earlier: tuple[Any, ...] = ()
    """Plans (:class:`groupio.plan.grouped.GroupPlan`) that nodes still carry out."""
    reserved: dict[str, int] = {}


class StoreChunks(_Effect, frozen=True):
    """Do this node's part of the plan; answer NodeReplicated and NodeStored, or NodeShort.

    ``addresses`` are where peers serve.
    ``record`` is to be kept until the group is closed. A later round comes on top of earlier ones.
    """

    node: str
    group: int
    round: int
    order: NodeOrder
    addresses: dict[str, str]
    record: SealedRecord | None = None


class StoreAgain(_Effect, frozen=True):
    """Hash and write anew what could not be written: the store may be back.

    For a group that writes at once, and a node that said that it has all bytes in memory. Answer
    NodeStored or NodeFailed; a node that has not failed since the last order is at it already.
    """

    node: str
    group: int


class TakeRoom(_Effect, frozen=True):
    """Take more memory for chunks of other nodes, so that there are ``replica_bytes`` in all.

    As far as there is room now: nothing is waited for. Answer NodeRoom.
    """

    node: str
    group: int
    replica_bytes: int


class AdoptGroup(_Effect, frozen=True):
    """A controller goes on with the group of this key, under this number.

    The node says again what it reported of it: nobody may have heard it.
    """

    node: str
    key: DecisionKey
    group: int


class DropHeld(_Effect, frozen=True):
    """A new controller does not go on with the group of this key: stop its work and forget it.

    Its segments are deleted unless ``keep_segments``.
    """

    node: str
    key: DecisionKey
    committed: bool
    keep_segments: bool
    group: int = 0
    """The number under which the node holds it, if there are several of the key."""


class ShowStore(_Effect, frozen=True):
    """Read the controller's mark of this name, and leave one of the node's; answer StoreShown."""

    node: str
    name: str


class RefuseNode(_Effect, frozen=True):
    """The agent cannot take part: tell it why and close its connection."""

    node: str
    life: str
    error: GroupIOError


class TellUnreachable(_Effect, frozen=True):
    """Tell a member that its save goes on, but cannot reach this level."""

    seat: MemberSeat
    level: Level
    error: GroupIOError


class StartCopy(_Effect, frozen=True):
    """Grant the leases."""

    node: str
    group: int


class AbortGroup(_Effect, frozen=True):
    """Stop all work of the group on the node; answer NodeIdle."""

    node: str
    group: int


class CloseGroup(_Effect, frozen=True):
    """The group is decided: free its memory; delete its own segments unless committed."""

    node: str
    group: int
    committed: bool
    keep_segments: bool
    """The decision is unknown or the segments are in use: delete nothing."""


# -- to members ---------------------------------------------------------


class TellReached(_Effect, frozen=True):
    """Tell a member that the group reached a level."""

    seat: MemberSeat
    level: Level
    first_arrival: float | None = None
    last_arrival: float | None = None
    notes: tuple[str, ...] = ()


class TellFailed(_Effect, frozen=True):
    """Tell a member that its save failed."""

    seat: MemberSeat
    error: GroupIOError


# -- of the agent machine ---------------------------------------------------------


class OpenArena(_Effect, frozen=True):
    """Make an empty arena of this number and hand its file to the client."""

    arena: int
    client: str


class CloseArena(_Effect, frozen=True):
    """Give an arena's memory back to the system."""

    arena: int


class Populate(_Effect, frozen=True):
    """Give memory to a range of an arena ahead of its use, in the background; tell the client."""

    arena: int
    offset: int
    length: int
    client: str


class Punch(_Effect, frozen=True):
    """Give the memory of a range back to the system."""

    arena: int
    offset: int
    length: int


class GrantLease(_Effect, frozen=True):
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


class StartJob(_Effect, frozen=True):
    """Make the group's flush job."""

    group: int
    key: DecisionKey
    store: bool
    door: str = ""
    planned: bool = False
    """Hash only, feed JobHashed when all is hashed, and wait for RunOrder."""


class AddWave(_Effect, frozen=True):
    """Hand a copied wave to the flush job."""

    group: int
    client: str
    save_id: int
    rank: int
    number: int
    arena: int
    offset: int
    wave: Wave
    eager: bool = True
    """Write what is new at once; otherwise the wave stays in memory until the group is closed."""


class FinishJob(_Effect, frozen=True):
    """All waves of all members are with the job: store the rest and report."""

    group: int


class RepeatJob(_Effect, frozen=True):
    """The job has failed, and all its waves are in memory: do them anew, in other segments."""

    group: int


class RunOrder(_Effect, frozen=True):
    """Do one round of a planned group's flush; feed JobReplicated and JobStored, or JobShort.

    JobReplicated only where the order keeps chunks or the record; JobStored or JobShort comes last.
    What an earlier round has done already is not done again.

    Fetched chunks that are kept go to the ranges ``room`` of ``arena``, each an offset and a length
    in bytes. Later orders have the ranges of earlier ones, and maybe more.
    """

    group: int
    round: int
    order: NodeOrder
    addresses: dict[str, str]
    arena: int
    room: tuple[tuple[int, int], ...] = ()


class KeepContent(_Effect, frozen=True):
    """The group is committed: its chunks may be served to readers from where they lie."""

    group: int
    key: DecisionKey


class DropContent(_Effect, frozen=True):
    """This range of an arena is about to hold other bytes: serve nothing from it any more."""

    arena: int
    offset: int
    length: int


class CancelJob(_Effect, frozen=True):
    """Stop the job; feed JobIdle back once nobody uses its memory, neither threads nor peers that
    get chunks from it. That takes bounded time."""

    group: int


class EndJob(_Effect, frozen=True):
    """Forget the job; delete its segments if asked."""

    group: int
    delete_segments: bool


class Report(_Effect, frozen=True):
    """Hand this event to the group's controller."""

    event: Any
    group: int = 0
    """The number that the group had when the node was admitted: drivers know it by that one."""


Effect = Any
"""Effects are structs of this module; drivers dispatch on the type."""
