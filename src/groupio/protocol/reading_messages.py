"""Messages between the reading machines and their drivers.

``key`` names one read: a store and the committed epoch that is read from it. Rows are those of
the epoch's chunk table, int32[n]. What travels between nodes comes first; the rest stays on its
node. A chunk is *here* when this node has the whole of it in memory, verified.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from groupio.model import NodeLink

Rows = npt.NDArray[np.int32]
Why = str
"""Why bytes did not come: "absent", "digest", "timeout", "lost", "storage", or a sentence."""


class _Message(msgspec.Struct, frozen=True, tag=True, eq=False):
    """Base of all: tagged structs, so that they can travel between nodes."""


# -- node to swarm ---------------------------------------------------------


class NodeKnown(_Message, frozen=True):
    """A node that may ask, serve or fetch for others, with its links; again when they change."""

    key: str
    link: NodeLink


class NodeAsks(_Message, frozen=True):
    """A node wants chunks: those with ``whole`` (bool[n]) set whole, of the others a part.

    ``load`` names a grouped load of ``members`` members: it is planned when so many have asked,
    each once, also for nothing. Without one the chunks are planned at once.
    """

    key: str
    node: str
    rows: Rows
    whole: npt.NDArray[np.bool_]
    load: str = ""
    members: int = 1


class NodeHas(_Message, frozen=True):
    """The node has the chunks ``rows`` here, and got what it wanted of ``parts``."""

    key: str
    node: str
    rows: Rows
    parts: Rows


class NodeDrops(_Message, frozen=True):
    """The node has these chunks no more: their memory was used again."""

    key: str
    node: str
    rows: Rows


class NodeFailed(_Message, frozen=True, tag="NodeFailedToRead"):
    """The node did not get these chunks from node ``source``, or from the store when it is ""."""

    key: str
    node: str
    source: str
    rows: Rows
    why: Why


class NodeGone(_Message, frozen=True):
    """The node's agent is lost, and what it had in memory."""

    key: str
    node: str


class Yielded(_Message, frozen=True):
    """The node has not begun to read these chunks from the store and leaves them to another."""

    key: str
    node: str
    rows: Rows


class ReadOpened(_Message, frozen=True):
    """For the swarms' driver: the node takes part in this read of chunks of ``lengths`` int32[n].

    What it has here follows as ``NodeHas``.
    """

    key: str
    node: str
    lengths: Rows


class ReadClosed(_Message, frozen=True):
    """For the swarms' driver: the node wants nothing of this read, and keeps nothing for it."""

    key: str
    node: str


# -- swarm to node ---------------------------------------------------------


class ReadSought(_Message, frozen=True):
    """From the swarms' driver: others read this; ``node`` may have chunks of it. Answered with
    ``ReadOpened``."""

    key: str
    node: str


class Peers(_Message, frozen=True):
    """From the swarms' driver: where the fabrics of all nodes are, by node."""

    node: str
    addresses: dict[str, str]


class Assign(_Message, frozen=True):
    """Where ``node`` gets chunks from, in the order in which it handles them.

    ``sources`` int32[n] indexes ``names``; ``plan.distribute.STORAGE``: read it from the store,
    ``NOT_ASKED``: only ``serves`` changes. ``serves`` int32[n]: so many more (or fewer) nodes will
    pull the chunk from this one. ``store_bytes_per_s`` is this node's share of the store's rate;
    0: as before.
    """

    key: str
    node: str
    rows: Rows
    sources: npt.NDArray[np.int32]
    serves: npt.NDArray[np.int32]
    names: tuple[str, ...]
    store_bytes_per_s: float = 0.0


class Yield(_Message, frozen=True):
    """Another uplink is idle: say ``Yielded`` for those chunks whose reading has not begun."""

    key: str
    node: str
    rows: Rows


class Unreadable(_Message, frozen=True):
    """No node has these chunks and the store does not give them: damaged, or out of reach."""

    key: str
    node: str
    rows: Rows
    why: Why


# -- swarm to its driver ---------------------------------------------------------


class PeerLies(_Message, frozen=True):
    """``node`` got wrong bytes from ``peer`` and avoids it; to be logged and shown."""

    key: str
    peer: str
    node: str
    row: int


# -- to the reader, on its node ---------------------------------------------------------


class ClientWants(_Message, frozen=True):
    """A client wants bytes ``starts`` to ``stops`` (int64[n], within the chunk) of each row, at
    least one of each.

    ``request`` is the client's own number; ``load`` and ``members`` as in ``NodeAsks``.
    """

    client: str
    request: int
    rows: Rows
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    load: str = ""
    members: int = 1


class ClientTook(_Message, frozen=True):
    """The client copied these rows of its request out of the node's memory."""

    client: str
    request: int
    rows: tuple[int, ...]


class ClientLeft(_Message, frozen=True):
    """The client is gone, or done with everything."""

    client: str


class ChunksHere(_Message, frozen=True):
    """The node has these chunks in memory already, whole and verified."""

    rows: Rows


class ChunksLost(_Message, frozen=True):
    """The memory of released chunks was used again, or their bytes turned out to be wrong."""

    rows: tuple[int, ...]


class Arrived(_Message, frozen=True):
    """The rows of a ``Pull`` (or a ``ReadStorage``: ``source`` "") are in memory, verified."""

    source: str
    rows: tuple[int, ...]


class Failed(_Message, frozen=True):
    """The rows of a ``Pull`` or ``ReadStorage`` did not come."""

    source: str
    rows: tuple[int, ...]
    why: Why


class PeerWants(_Message, frozen=True):
    """Another node's request for a chunk, whole or in part; ``ticket`` is the driver's number."""

    ticket: int
    row: int


class PeerDone(_Message, frozen=True):
    """The request is over: served (``ok``), given up, timed out or broken."""

    ticket: int
    ok: bool


class SwarmLost(_Message, frozen=True):
    """There is no controller: what has no source is read from the store."""


class SwarmBack(_Message, frozen=True):
    """There is a controller, which knows nothing of this node yet."""


# -- from the reader to its driver ---------------------------------------------------------


class Tell(_Message, frozen=True):
    """Send this to the swarm."""

    message: Any


class Pull(_Message, frozen=True):
    """Get these chunks from a peer, in this order; answer ``Arrived`` or ``Failed`` for each.

    Bytes ``starts`` to ``stops`` within each chunk; a part comes with a digest of its own.
    """

    peer: str
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]


class ReadStorage(_Message, frozen=True):
    """Read and verify these whole chunks, in this order; answer with the source ""."""

    rows: tuple[int, ...]


class Deliver(_Message, frozen=True):
    """The client can copy these rows of its request; they stay in place until ``ClientTook``."""

    client: str
    request: int
    rows: tuple[int, ...]


class Damaged(_Message, frozen=True):
    """The client cannot have these rows of its request."""

    client: str
    request: int
    rows: tuple[int, ...]
    why: Why


class Serve(_Message, frozen=True):
    """Send the chunk to the peer that asked under this ticket; then ``PeerDone``."""

    ticket: int
    row: int


class Refuse(_Message, frozen=True):
    """This node will not have the chunk; the ticket is forgotten."""

    ticket: int
    row: int


class Release(_Message, frozen=True):
    """Nobody waits for these chunks any more: keep them as evictable cache, or not at all.

    A later ``Deliver``, ``Serve`` or ``Keep`` needs them again: answer ``ChunksLost`` if gone.
    """

    rows: tuple[int, ...]


class Keep(_Message, frozen=True):
    """Peers will ask for these released chunks: do not use their memory until ``Release``."""

    rows: tuple[int, ...]


class Discard(_Message, frozen=True):
    """These rows arrived from ``source`` but are not needed: free that copy's memory."""

    source: str
    rows: tuple[int, ...]


ToSwarm = NodeKnown | NodeAsks | NodeHas | NodeDrops | NodeFailed | NodeGone | Yielded
ToNode = Assign | Yield | Unreadable
