"""Messages between a rank (client) and its node's agent; msgpack, tagged by type.

Times are readings of CLOCK_MONOTONIC in seconds, which all processes of a node share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from groupio.model import DecisionKey

PROTOCOL_VERSION = 1
"""Raised when a message changes its meaning; an agent serves only its own version."""


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: the type name is the tag."""


# -- rank to agent ---------------------------------------------------------


class Hello(_Message, frozen=True):
    """First message on a connection: who is there and which store it means."""

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
    replicas: int = 1
    gave_up: tuple[int, ...] = ()
    """Epochs whose save this rank began with an agent that is lost, before it was released."""


class OpenSave(_Message, frozen=True):
    """This rank takes part in the group of ``epoch``.

    ``items`` is the encoded item table (:func:`groupio.format.items.encode_items`),
    ``items_id`` its digest, ``total_bytes`` the size of its layout, ``bytes_logical`` the sum of
    the items' sizes. ``deadline_s`` counts from ``called_at``. ``door`` names the view that shall
    be made of the epoch, "dcp" or none.
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


class Damaged(_Message, frozen=True):
    """These chunks were found damaged in the store: do not refer to them again."""

    digests: tuple[bytes, ...]


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
    | Damaged
    | Ask
    | Bye
)
ToRank = (
    Welcome | Refused | Arena | Grant | Standby | Reached | Failed | DoorDone | Settled | Answer
)
