"""The value types that all parts of groupio share: frozen, without behaviour of their own.

Bytes are bytes, times are seconds. Arrays that grow with chunks are numpy arrays with the shapes
and dtypes stated beside them; nothing writes to them after construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CHUNK_BYTES = 4 << 20
"""A chunk is at most this many bytes of one item."""

REPLICAS_MAX = 16
"""More copies than this are taken for a mistake."""

PACK_ITEM_BYTES = 1 << 20
"""Items smaller than this share a pack instead of starting on a page of their own."""

PAGE_BYTES = 4096
"""Alignment of large items in the arena and of writes to a segment (O_DIRECT needs it)."""

DIGEST_BYTES = 32
"""A chunk is named by its 32-byte BLAKE3 digest."""

EPOCH_MAX = (1 << 63) - 1
WORLD_SIZE_MAX = 1 << 20


class Level(StrEnum):
    """How durable an acknowledgement is; DESIGN.md section 2 says what each survives."""

    RELEASED = "released"
    STAGED = "staged"
    REPLICATED = "replicated"
    REMOTE = "remote"
    DURABLE = "durable"


class ItemKind(StrEnum):
    """What an item is: an array of numbers, raw bytes, or an encoded plain value."""

    TENSOR = "tensor"
    BYTES = "bytes"
    PLAIN = "plain"


class ItemSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One item of one member, as it is described to the group and in the manifest.

    ``shape`` is the local extent, ``offsets`` its corner in ``global_shape`` (all of the same
    length; equal to ``shape`` and zeros for a value that is not sharded). ``nbytes`` is the size
    of the local value. ``dtype`` is "" unless ``kind`` is TENSOR: a numpy or ml_dtypes name such
    as "float32", "bfloat16", "float8_e4m3fn", or a numpy ``dtype.str`` for the rest.
    ``origin`` is how the caller gave it: "numpy", "torch", "buffer" or "plain".
    """

    name: str
    kind: ItemKind
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    replicated: bool = False
    origin: str = "numpy"
    alias: int = -1
    """Index of an earlier item whose very bytes this one shares (tied tensors), or -1."""


class DecisionKey(msgspec.Struct, frozen=True, order=True):
    """Names one decision: at most one commit or abort ever exists under it."""

    lineage: int
    epoch: int
    attempt: int

    def __str__(self) -> str:
        return f"L{self.lineage:08d}-E{self.epoch:020d}-A{self.attempt:06d}"


class Lineage(msgspec.Struct, frozen=True):
    """A line of epochs. Lineage 1 is the first; its ``parent`` is 0."""

    number: int
    parent: int
    after_epoch: int
    """Epochs of ``parent`` up to this one belong to the line too (-1: none)."""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The unique chunks of an epoch.

    ``digests`` uint8[n, 32]; ``lengths`` int64[n]; ``segments`` int32[n], an index into the
    epoch's segment list; ``offsets`` int64[n], where the chunk starts in that segment.
    """

    digests: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)


class SegmentRef(msgspec.Struct, frozen=True):
    """A segment that an epoch uses. ``name`` is a file name without directories."""

    name: str
    bytes: int
    own: bool
    """Written by this epoch (True) or by an older one that it refers to."""
    age: int = 0
    """How many committed epochs have referred to it since it was written or verified."""


@dataclass(frozen=True, slots=True)
class MemberTable:
    """What one member saved.

    ``items`` in the order that the member gave; ``refs`` int64[chunks] indexes the epoch's
    ChunkTable in the chunk order of :func:`groupio.plan.layout.lay_out`.
    """

    rank: int
    items: tuple[ItemSpec, ...]
    items_id: bytes
    refs: npt.NDArray[np.int64]
    bytes_logical: int


class EpochHeader(msgspec.Struct, frozen=True):
    """The small part of a manifest: who saved what, when, and how much."""

    store_id: str
    job: str
    lineage: int
    epoch: int
    attempt: int
    incarnation: int
    world_size: int
    fingerprint: bytes
    content_id: bytes
    """BLAKE3 over every member's item table and chunk digests: equal content, equal id."""
    write_id: str
    created_at: float
    """Seconds since 1970 by the clock of the writing node, when the manifest was made."""
    bytes_logical: int
    bytes_unique: int
    bytes_stored: int
    """Bytes of this epoch's own segments (the manifest itself is not counted)."""
    metadata: dict[str, Any] = {}
    replicated: tuple[str, ...] = ()
    door: str = ""
    """The view that belongs to the epoch and whose frames its segments have: "dcp", or none."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one committed epoch."""

    header: EpochHeader
    segments: tuple[SegmentRef, ...]
    chunks: ChunkTable
    members: tuple[MemberTable, ...]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What an agent found and stored of a group: the node-merged lists.

    ``chunks.segments`` indexes ``segments``. ``members`` are the node's own members.
    When the group was only compared with a committed epoch, segments are empty and
    ``chunks.segments`` is -1 throughout.
    """

    node: str
    segments: tuple[SegmentRef, ...]
    chunks: ChunkTable
    members: tuple[MemberTable, ...]


class NodeLink(msgspec.Struct, frozen=True):
    """One node as a plan sees it: its links in bytes per second, and what fails with it.

    ``fabric_ok`` False: the plan leaves this node's fabric port alone (the escape path).
    """

    node: str
    uplink_bytes_per_s: float
    fabric_bytes_per_s: float
    domain: str
    fabric_ok: bool = True


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each level was reached, in seconds since the call of ``save``; None: not reached.

    ``first_arrival`` and ``last_arrival`` say when the first and the last member of the group
    called, on the same scale (negative: before this member).
    """

    called: float = 0.0
    released: float | None = None
    staged: float | None = None
    replicated: float | None = None
    remote: float | None = None
    durable: float | None = None
    first_arrival: float | None = None
    last_arrival: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EpochInfo:
    """One committed epoch, as ``Client.epochs`` lists it; sizes in bytes."""

    epoch: int
    members: int
    bytes_logical: int
    bytes_unique: int
    bytes_stored: int
    committed_at: float
    lineage: int = 1
    abandoned: bool = False
    """True when a rewind left it outside the line that ``latest`` follows."""
    metadata: dict[str, Any] = field(default_factory=dict)
    part: str | None = None
    """The part that was saved, None for the unnamed one."""
