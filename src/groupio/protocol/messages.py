"""Messages between a rank (client) and its node's agent; msgpack, tagged by type.

Times are readings of CLOCK_MONOTONIC in seconds, which all processes of a node share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from groupio.model import DecisionKey

PROTOCOL_VERSION = 2
"""Raised when a message changes its meaning; an agent serves only its own version."""


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: the type name is the tag."""


# -- rank to agent ---------------------------------------------------------


class Hello(_Message, frozen=True):
    """First message on a connection: who is there and which store it means.

    A descriptor of the deepest existing directory of ``store`` travels with it, where the client
    can open one; ``rest`` are the names below it.
    """

    version: int
    client_id: str
    pid: int
    rank: int
    world_size: int
    store: str
    job: str | None = None
    rewind_to: int | None = None
    launch_id: str | None = None
    file_mode: int | None = None
    umask: int | None = None
    """Of the rank's process: what is written to the store for its job follows it."""
    replicas: int = 1
    controller: str = "local"
    """Where the job's controller is, as :attr:`groupio.Settings.controller` says it."""
    said: bool = False
    """Somebody said so, and the agent's own setting does not count."""
    hosts: bool | None = None
    """Whether the launcher named this node to have the controller; None: it named none."""
    gave_up: tuple[int, ...] = ()
    """Epochs whose save this rank began with an agent that is lost, before it was released."""
    has_saved: bool = False
    """This client saved before, with an agent that is lost."""
    store_id: str = ""
    """The store (hex) that this client has used so far: no other one may be at the path now."""
    rest: str = ""


class OpenSave(_Message, frozen=True):
    """This rank takes part in the group of ``epoch``.

    ``items`` is the encoded item table (:func:`groupio.format.items.encode_items`),
    ``items_id`` its digest, ``total_bytes`` the size of its layout, ``bytes_logical`` the sum of
    the items' sizes. ``deadline_s`` counts from ``called_at``. ``door`` names the view that shall
    be made of the epoch, "dcp" or none. ``resumed_from`` is the older epoch that this client loaded
    by its number and has not saved after, ``begin_after`` the one after which the caller asks for
    a new lineage. ``side`` is the API that was called: "core", "torch" or "dcp".
    """

    save_id: int
    epoch: int
    called_at: float
    deadline_s: float
    items: bytes
    items_id: bytes
    total_bytes: int
    bytes_logical: int
    replicated: tuple[str, ...] = ()
    when_full: str = "wait"
    metadata: dict[str, Any] = {}
    door: str = ""
    resumed_from: DecisionKey | None = None
    begin_after: int | None = None
    side: str = "core"


class Copied(_Message, frozen=True):
    """All bytes of this wave are in the lease."""

    save_id: int
    wave: int


class SaveFailed(_Message, frozen=True):
    """The rank cannot go on with this save; it no longer writes to the lease."""

    save_id: int
    error: dict[str, Any]


class Released(_Message, frozen=True):
    """Answer to ``Failed``: the rank no longer writes to any lease of this save."""

    save_id: int


class Expect(_Message, frozen=True):
    """This rank will likely save about ``total_bytes``: prepare memory, if there is room."""

    total_bytes: int


class Mapped(_Message, frozen=True):
    """Answer to ``Standby``: this rank touches that memory no more until it is granted."""

    offset: int
    length: int


class Settle(_Message, frozen=True):
    """Tell me when all epochs that earlier incarnations staged in this store are decided."""

    request_id: int


class ReadOpen(_Message, frozen=True):
    """Bring chunks of the committed epoch ``key`` into memory that this rank can read.

    ``rows`` int32[n] of the epoch's chunk table, each once; ``starts`` and ``stops`` int64[n] the
    bytes that are wanted of each chunk, empty: all of them. All are the bytes of little-endian
    arrays. ``load`` names a grouped load, which is planned when ``members`` members have asked.
    """

    request_id: int
    key: DecisionKey
    rows: bytes
    starts: bytes = b""
    stops: bytes = b""
    load: str = ""
    members: int = 1


class Took(_Message, frozen=True):
    """The rank copied these rows (int32[n]) of a ``Pieces``: their memory may be used again."""

    request_id: int
    rows: bytes


class ReadClose(_Message, frozen=True):
    """The rank is done with the request, and looks at no memory of it any more."""

    request_id: int


class Damaged(_Message, frozen=True):
    """These chunks were found damaged in the store: do not refer to them again."""

    digests: tuple[bytes, ...]


class Foreground(_Message, frozen=True):
    """The rank communicates: storage traffic of this node keeps to ``share`` (0 pauses it).

    None: it no longer does. A message replaces the one before.
    """

    share: float | None = None


class Ask(_Message, frozen=True):
    """A question of a tool: ``what`` is status, metrics, drain or stop."""

    request_id: int
    what: str


class Bye(_Message, frozen=True):
    """The client closes; it writes to no lease any more."""


# -- agent to rank ---------------------------------------------------------


class Welcome(_Message, frozen=True):
    """Answer to ``Hello``."""

    agent_pid: int
    version: int
    log: str
    notes: tuple[str, ...] = ()
    reads: bool = False
    """The agent brings chunks of committed epochs: from its memory, from other nodes, or from the
    store, each once for all who ask."""


class Refused(_Message, frozen=True):
    """Answer to ``Hello`` of a client that cannot be served; the connection is closed."""

    error: dict[str, Any]


class Arena(_Message, frozen=True):
    """The client's arena: its file descriptor travels with this message, before any ``Grant``."""


class Grant(_Message, frozen=True):
    """A lease: copy the bytes of this wave into the arena.

    The wave is the virtual range ``virt_lo:virt_hi`` of the layout, chunks ``chunk_lo:chunk_hi``;
    it goes to ``offset:offset + virt_hi - virt_lo`` of the member's arena.
    """

    save_id: int
    key: DecisionKey
    wave: int
    waves: int
    offset: int
    virt_lo: int
    virt_hi: int
    chunk_lo: int
    chunk_hi: int


class Standby(_Message, frozen=True):
    """Map this range of the arena ahead of time: a next save is likely to get it."""

    offset: int
    length: int


class Reached(_Message, frozen=True):
    """The group reached ``level`` at time ``at``; higher levels are still to come."""

    save_id: int
    level: str
    at: float
    first_arrival: float | None = None
    last_arrival: float | None = None
    notes: tuple[str, ...] = ()
    store_id: str = ""
    """The store (hex) that has, or will have, the epoch."""


class Unreachable(_Message, frozen=True):
    """The save goes on, but ``level`` cannot be reached; ``error`` is typed."""

    save_id: int
    level: str
    error: dict[str, Any]


class Failed(_Message, frozen=True):
    """The save failed; ``error`` is a typed error (:func:`groupio.errors.from_wire`)."""

    save_id: int
    error: dict[str, Any]


class DoorDone(_Message, frozen=True):
    """The door that the save asked for is published, or ``error`` says why there is none.

    Comes after the save reached DURABLE, and not at all when the agent ends before.
    """

    save_id: int
    error: str = ""


class ReadArena(_Message, frozen=True):
    """Memory for a ``ReadOpen``: its descriptor, to be read only, travels with this message."""

    request_id: int


class Pieces(_Message, frozen=True):
    """Chunks, or what is wanted of them, lie in the memory of the request until ``Took``.

    ``rows`` int32[n]; ``places`` int64[n]: where the first byte that is wanted of each lies. The
    agent verified the whole chunk, or the part with a digest that a verified holder made. ``read``
    bytes of these chunks came from the store for this request, ``forwarded`` from other nodes,
    ``cached`` were in this node's memory.
    """

    request_id: int
    rows: bytes
    places: bytes
    read: int = 0
    forwarded: int = 0
    cached: int = 0


class ReadRefused(_Message, frozen=True):
    """The agent brings nothing more for the request: read what is missing from the store."""

    request_id: int
    why: str


class ReadDamaged(_Message, frozen=True):
    """These rows (int32[n]) of the request could not be had; look into the store."""

    request_id: int
    rows: bytes
    why: str


class Settled(_Message, frozen=True):
    """Answer to ``Settle``."""

    request_id: int
    error: dict[str, Any] | None = None


class Answer(_Message, frozen=True):
    """Answer to ``Ask``."""

    request_id: int
    body: dict[str, Any]


ToAgent = (
    Hello
    | OpenSave
    | Copied
    | SaveFailed
    | Released
    | Expect
    | Mapped
    | Settle
    | ReadOpen
    | Took
    | ReadClose
    | Damaged
    | Foreground
    | Ask
    | Bye
)
ToRank = (
    Welcome
    | Refused
    | Arena
    | Grant
    | Standby
    | Reached
    | Unreachable
    | Failed
    | DoorDone
    | ReadArena
    | Pieces
    | ReadRefused
    | ReadDamaged
    | Settled
    | Answer
)
