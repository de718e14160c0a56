"""Events, the input of the machines: failures, timeouts and answers of the store are events too."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from groupio.errors import GroupIOError
from groupio.model import DecisionKey, Lineage, NodeLink, NodeReport
from groupio.plan.layout import Layout


class _Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events: tagged structs, so that they can travel between nodes."""


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
    node: str = ""
    """The node of its agent; "" where the job has one agent only."""
    has_saved: bool = False
    """It saved before, under another agent or another controller."""


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
    replicas: int = 1
    """Nodes in different failure domains that are to hold the bytes at level REPLICATED."""
    resumed_from: DecisionKey | None = None
    """The older epoch that the member loaded by its number and has not saved after."""
    begin_after: int | None = None
    """The epoch after which the caller of this save asks for a new lineage."""
    side: str = "core"
    """The API that was called, for the words of an error: "core", "torch" or "dcp"."""

    @property
    def remaining_s(self) -> float:
        """What was left of the deadline at the arrival, in seconds."""
        return max(0.0, self.deadline_s - self.elapsed_s)


class MemberCopied(_Event, frozen=True):
    """All bytes of the member are in the memory of ``node`` (or already stored, with waves)."""

    group: int
    rank: int
    node: str


class MemberFailed(_Event, frozen=True):
    """A client reported that it cannot go on with one of its saves."""

    client: str
    save_id: int
    error: GroupIOError


class MemberGone(_Event, frozen=True):
    """A client's connection ended; ``process_gone`` when its process ended too."""

    client: str
    process_gone: bool
    closed: bool = False
    """The client said goodbye: it takes part in nothing any more."""


class NodeAdmitted(_Event, frozen=True):
    """The node holds the group's memory."""

    group: int
    node: str
    waited: bool = False
    """Answer to an order that was to wait for room."""
    replica_bytes: int = 0
    """So much of it is for chunks of other nodes; 0 where there can never be so much."""
    in_memory: bool = True
    """All bytes of its members stay in memory until the group is closed: no waves."""


class NodeRefused(_Event, frozen=True):
    """The node has no room for the group."""

    group: int
    node: str
    error: GroupIOError


class NodeBusy(_Event, frozen=True):
    """The node has no room for the group now; it was asked not to wait."""

    group: int
    node: str


class NodeRoom(_Event, frozen=True):
    """Answer to TakeRoom: so many bytes in all the node now has for chunks of other nodes."""

    group: int
    node: str
    replica_bytes: int


class NodeHashed(_Event, frozen=True):
    """Every chunk of the node's members is hashed and in its memory.

    ``report.chunks.segments`` names older segments only, -1 where the chunk is not stored.
    """

    group: int
    node: str
    report: NodeReport


class Planned(_Event, frozen=True):
    """Answer to MakePlan; ``plan`` is a :class:`groupio.plan.grouped.GroupPlan`."""

    group: int
    round: int
    plan: Any = None
    error: GroupIOError | None = None


class NodeReplicated(_Event, frozen=True):
    """The node holds, verified, all chunks that it keeps of this round, and its sealed record.

    ``copies`` uint8[n, 32] are the digests of all replicas that it holds of the group.
    """

    group: int
    node: str
    round: int
    copies: npt.NDArray[np.uint8]


class NodeShort(_Event, frozen=True):
    """No peer gave the node these chunks (``digests`` uint8[n, 32]); ``liars`` sent wrong bytes.
    Without ``asked`` there was no room for them. ``copies`` are all replicas that it holds now."""

    group: int
    node: str
    round: int
    digests: npt.NDArray[np.uint8]
    asked: tuple[str, ...]
    liars: tuple[str, ...] = ()
    copies: npt.NDArray[np.uint8] | None = None


class NodeStored(_Event, frozen=True):
    """Every chunk that the node has to write is durable in its segments.

    In a planned group the report covers all rounds so far, has further rows for the chunks that
    it wrote for other nodes, and -1 where another node writes.
    """

    group: int
    node: str
    report: NodeReport
    round: int = 0


class NodeFailed(_Event, frozen=True):
    """The node could not store its part; ``repeatable`` is what StoreAgain can do all of anew."""

    group: int
    node: str
    error: GroupIOError
    repeatable: bool = False


class NodeIdle(_Event, frozen=True):
    """After an abort: no thread of the node touches the group's memory or segments any more."""

    group: int
    node: str


class SealedRecord(_Event, frozen=True):
    """What k nodes keep of a sealed group, so that any controller can finish it."""

    key: DecisionKey
    incarnation: int
    world_size: int
    opened: tuple[MemberOpened, ...]
    """All members, by rank."""
    reports: tuple[NodeReport, ...]
    """What all nodes hashed."""


class HeldGroup(_Event, frozen=True):
    """A group of an earlier controller that a node still has in memory."""

    key: DecisionKey
    incarnation: int
    world_size: int
    group: int
    """The number that the earlier controller gave it."""
    opened: tuple[MemberOpened, ...]
    """The members of this node."""
    copied: tuple[int, ...]
    """Those of them whose bytes are all in memory."""
    planned: bool
    copies: npt.NDArray[np.uint8]
    """Digests of the replicas that the node holds, uint8[n, 32]."""
    hashed: NodeReport | None = None
    stored: NodeReport | None = None
    record: SealedRecord | None = None
    round: int = 0
    """The newest round of the store plan that the node was given."""
    replica_bytes: int = 0
    """What it reserved for chunks of other nodes."""
    store: bool = True
    """False: it only compares its bytes with the committed epoch ``key``."""


class NodeJoined(_Event, frozen=True):
    """An agent takes part in the job; the same life joins again after a lost connection."""

    node: str
    life: str
    address: str
    """Where peers reach its fabric."""
    link: NodeLink
    store_id: str
    held: tuple[HeldGroup, ...] = ()
    clients: tuple[ClientArrived, ...] = ()
    opens: tuple[MemberOpened, ...] = ()
    """Saves of its clients that have no group yet, or whose group is not in ``held``."""
    path: str = ""
    """Its path of the store, for messages."""


class NodeReopened(_Event, frozen=True):
    """The agent opened its store anew by its path: which one that is has to be proved again."""

    node: str


class StoreShown(_Event, frozen=True):
    """Answer to ShowStore: ``content`` is that of the controller's mark, b"" when it is not there.

    Then, and after an error, the node left no mark of its own; else it is ``mark`` with
    ``mark_content``, in the folder of segments.
    """

    node: str
    name: str
    content: bytes = b""
    mark: str = ""
    mark_content: bytes = b""
    error: GroupIOError | None = None


class NodeLost(_Event, frozen=True):
    """The agent is gone, or nothing was heard of it for too long."""

    node: str
    life: str
    why: str


class LinkMeasured(_Event, frozen=True):
    """What the node's links have free now; ``fabric_ok`` False: plan without its fabric port."""

    link: NodeLink


class UndecidedAttempt(_Event, frozen=True):
    """An attempt in the store that is neither decided nor prepared, and the nodes it names."""

    key: DecisionKey
    incarnation: int
    world_size: int
    nodes: tuple[str, ...]


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
    undecided: tuple[UndecidedAttempt, ...] = ()
    """Attempts that OpenStore left alone because nodes may still hold their bytes."""
    store_id: str = ""


class StoreOpened(_Event, frozen=True):
    """The store is open for writing and recovered."""

    state: StoreState


class StoreUnavailable(_Event, frozen=True):
    """The store cannot be opened for writing."""

    error: GroupIOError


class StoreRenewed(_Event, frozen=True):
    """The controller's store was opened anew by its path: agents have to prove theirs again."""


class MarkLeft(_Event, frozen=True):
    """Answer to LeaveMark: the mark's name and content, and the controller's path of the store."""

    proof: int
    name: str = ""
    content: bytes = b""
    path: str = ""
    error: GroupIOError | None = None


class MarkFound(_Event, frozen=True):
    """Answer to FindMark: what the controller reads, b"" when there is no such mark."""

    proof: int
    content: bytes = b""
    error: GroupIOError | None = None


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
    """A member of this node opened a save: what its lease has to hold.

    ``opened`` is kept for a controller that takes the group over from another one.
    """

    client: str
    save_id: int
    rank: int
    layout: Layout
    opened: MemberOpened | None = None


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


class JobHashed(_Event, frozen=True):
    """The flush job of a planned group has hashed all waves of all members."""

    group: int
    report: NodeReport


class JobReplicated(_Event, frozen=True):
    """The flush job holds all chunks that it keeps of this round; ``copies`` uint8[n, 32]."""

    group: int
    round: int
    copies: npt.NDArray[np.uint8]


class JobShort(_Event, frozen=True):
    """The round ends without these chunks (uint8[n, 32]); ``copies`` as in NodeShort."""

    group: int
    round: int
    digests: npt.NDArray[np.uint8]
    asked: tuple[str, ...]
    liars: tuple[str, ...] = ()
    copies: npt.NDArray[np.uint8] | None = None


class JobStored(_Event, frozen=True):
    """The node's flush job ended well, in a planned group: this round of it."""

    group: int
    report: NodeReport
    round: int = 0


class JobFailed(_Event, frozen=True):
    """The node's flush job failed; in a planned group it keeps what it has, to be tried again."""

    group: int
    error: GroupIOError


class JobIdle(_Event, frozen=True):
    """The node's cancelled flush job touches nothing any more."""

    group: int


class WriterStopped(_Event, frozen=True):
    """A client acknowledged that it no longer writes to the leases of this save."""

    client: str
    save_id: int


class ControllerLeft(_Event, frozen=True):
    """The controller of these groups is lost; another one will adopt or drop them."""

    groups: tuple[int, ...]


class MemoryReserved(_Event, frozen=True):
    """The agent itself uses so many more bytes of the budget, or fewer; it asked before."""

    nbytes: int


_OfNode = NodeJoined | NodeLost | LinkMeasured | NodeAdmitted | NodeBusy | NodeRefused | NodeFailed
_OfStoring = NodeRoom | NodeHashed | Planned | NodeReplicated | NodeShort | NodeStored | NodeIdle
_OfMember = ClientArrived | MemberOpened | MemberCopied | MemberFailed | MemberGone
_OfStore = StoreOpened | StoreUnavailable | StoreRenewed | LineageCreated | InflightPublished
_OfProof = MarkLeft | StoreShown | MarkFound | NodeReopened
_OfAttempt = Prepared | Compared | Decided

ControllerEvent = (
    _OfNode | _OfStoring | _OfMember | _OfStore | _OfProof | _OfAttempt | TimerFired | Drain
)
