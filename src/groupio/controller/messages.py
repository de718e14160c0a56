"""Messages between an agent and a controller's process besides events and orders.

The agent speaks first. After ``NodeWelcome`` it sends ``NodeJoined``; from then on it sends events
of its node and its clients, and the controller sends orders and news of members.
"""

from __future__ import annotations

from typing import Any

import msgspec

from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm

CONTROL_VERSION = 5
"""Raised when a message, an event or an order changes its meaning."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages: the type name is the tag."""


# -- agent to controller ------------------------------------------------------------------------


class NodeHello(_Message, frozen=True):
    """Which agent this is, and which job's controller it means.

    ``store`` is its path of the store, for messages; ``store_id`` is what counts. ``term`` is the
    rule that sent it here, 0 when nobody told it one.
    """

    version: int
    release: str
    node: str
    life: str
    job: str
    store: str
    store_id: str
    term: int = 0


class NodeMemory(_Message, frozen=True):
    """What the node's memory is used for now, in bytes; ``cache`` is a part of what is free."""

    node: str
    budget: int
    leased: int
    cache: int


class ClientSettles(_Message, frozen=True):
    """Say when all epochs that others staged are decided, as far as this client is concerned."""

    client: str
    request_id: int


class StatusAsked(_Message, frozen=True):
    """Describe the job: nodes, links, groups in flight."""

    request_id: int


# -- controller to agent ------------------------------------------------------------------------


class NodeWelcome(_Message, frozen=True):
    """The controller of the job is here and rules in ``term``."""

    term: int
    node: str


class NodeRefused(_Message, frozen=True):
    """The agent cannot take part; ``error`` is a typed error. ``term`` is who rules, if known."""

    error: dict[str, Any]
    term: int = 0


class ControllerEnds(_Message, frozen=True):
    """The controller rules no more: look for the next one, or become it."""


class ClientSettled(_Message, frozen=True):
    """Answer to ``ClientSettles``."""

    client: str
    request_id: int


class StatusAnswer(_Message, frozen=True):
    """Answer to ``StatusAsked``: plain values."""

    request_id: int
    body: dict[str, Any]


FROM_READER = (
    rm.ReadOpened,
    rm.ReadClosed,
    rm.NodeAsks,
    rm.NodeHas,
    rm.NodeDrops,
    rm.NodeFailed,
    rm.Yielded,
)
"""What concerns grouped reads, of what a controller takes."""

FROM_SWARM = (rm.Assign, rm.Yield, rm.Unreadable, rm.ReadSought, rm.Peers)
"""What concerns grouped reads, of what an agent takes."""

FROM_NODE = (
    NodeHello,
    ClientSettles,
    StatusAsked,
    NodeMemory,
    ev.NodeJoined,
    ev.LinkMeasured,
    ev.ClientArrived,
    ev.MemberOpened,
    ev.MemberCopied,
    ev.MemberFailed,
    ev.MemberGone,
    ev.NodeAdmitted,
    ev.NodeBusy,
    ev.NodeRefused,
    ev.NodeRoom,
    ev.NodeHashed,
    ev.NodeReplicated,
    ev.NodeShort,
    ev.NodeStored,
    ev.NodeFailed,
    ev.NodeIdle,
    ev.NodeReopened,
    ev.StoreShown,
    *FROM_READER,
)
"""All that a controller takes from an agent."""

FROM_CONTROLLER = (
    NodeWelcome,
    NodeRefused,
    ControllerEnds,
    ClientSettled,
    StatusAnswer,
    fx.AdmitGroup,
    fx.RetractGroup,
    fx.StartCopy,
    fx.AbortGroup,
    fx.CloseGroup,
    fx.StoreChunks,
    fx.StoreAgain,
    fx.TakeRoom,
    fx.AdoptGroup,
    fx.DropHeld,
    fx.ShowStore,
    fx.RefuseNode,
    fx.TellReached,
    fx.TellUnreachable,
    fx.TellFailed,
    *FROM_SWARM,
)
"""All that an agent takes from a controller."""
