"""The ways from a controller to the agents of other nodes, and who is where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from groupio.controller import messages as cm
from groupio.errors import InvalidInput
from groupio.model import NodeReport
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol.wireform import WireForm

if TYPE_CHECKING:
    from groupio.controller.transport import Peer


@dataclass(slots=True, eq=False)
class Line:
    """The way to one agent that takes part in a job."""

    lines: Lines
    peer: Peer
    hello: cm.NodeHello
    refused: bool = False
    """The agent does not take part, and may not have heard so yet."""
    _out: WireForm = field(default_factory=lambda: WireForm(cm.FROM_CONTROLLER))

    @property
    def node(self) -> str:
        """The agent's node."""
        return self.hello.node

    def send(self, message: Any) -> None:
        """Send an order, or news of a member; nothing comes of it when the agent is gone."""
        if isinstance(message, fx.TellReached):
            message = _as_ages(message)
        self.peer.send(self._out.encode(message))


@dataclass(slots=True)
class Lines:
    """The agents of one job by node; ``own`` is the node that needs no line, or ""."""

    own: str
    by_node: dict[str, Line] = field(default_factory=dict)
    by_life: dict[str, Line] = field(default_factory=dict)
    """Also of agents that are refused because another one has their node's name."""
    clients: dict[str, str] = field(default_factory=dict)
    """The node of each client that was heard of."""
    paths: dict[str, str] = field(default_factory=dict)
    """Each node's path of the store, also of nodes that are lost: for messages."""
    memory: dict[str, cm.NodeMemory] = field(default_factory=dict)
    """What each node said last of its memory."""

    def note(self, event: Any) -> None:
        """Learn from an event where its client is."""
        match event:
            case ev.MemberOpened(node=node, client=client):
                self.clients[client] = node
            case ev.NodeJoined(node=node, clients=arrived, opens=opens, held=held):
                self.paths[node] = event.path
                for client in (*(c.client for c in arrived), *(o.client for o in opens)):
                    self.clients[client] = node
                for one in held:
                    self.clients.update((opened.client, node) for opened in one.opened)
            case ev.MemberGone(client=client, process_gone=True):
                self.clients.pop(client, None)

    def target(self, effect: fx.Effect) -> str:
        """The node that an order, or news of a member, goes to; "" when nobody knows."""
        if isinstance(effect, fx.TellReached | fx.TellFailed | fx.TellUnreachable):
            return self.clients.get(effect.seat.client, "")
        node: str = effect.node
        return node

    def check(self, line: Line, message: Any) -> None:
        """A node speaks for itself and its own clients only. InvalidInput otherwise."""
        kind = type(message).__name__
        for node in _nodes_named(message):
            if node != line.node:
                raise InvalidInput(f"it sent {kind} in the name of node {node}")
        for client in _clients_named(message):
            owner = self.clients.get(client, line.node)
            if owner != line.node:
                raise InvalidInput(f"it sent {kind} in the name of a client of node {owner}")
        for held in message.held if isinstance(message, ev.NodeJoined) else ():
            if foreign := _ranks_claimed(held) - {opened.rank for opened in held.opened}:
                shown = ", ".join(map(str, sorted(foreign)))
                raise InvalidInput(f"it holds epoch {held.key.epoch} of rank(s) {shown} of others")
        if isinstance(message, ev.ClientArrived):
            self.clients[message.client] = line.node


def _nodes_named(message: Any) -> Iterator[str]:
    """The nodes in whose name a message speaks."""
    if (node := getattr(message, "node", "")) != "":
        yield node
    match message:
        case ev.LinkMeasured(link=link) | ev.NodeJoined(link=link):
            yield link.node
        case ev.NodeHashed(report=report) | ev.NodeStored(report=report):
            yield report.node
    if isinstance(message, ev.NodeJoined):
        for opened in _opened_in(message):
            yield opened.node
        for held in message.held:
            yield from (report.node for report in _reports(held))


def _clients_named(message: Any) -> Iterator[str]:
    """The clients in whose name a message speaks."""
    if isinstance(message, ev.NodeJoined):
        yield from (arrived.client for arrived in message.clients)
        yield from (opened.client for opened in _opened_in(message))
    elif (client := getattr(message, "client", "")) != "":
        yield client


def _opened_in(joined: ev.NodeJoined) -> Iterator[ev.MemberOpened]:
    yield from joined.opens
    for held in joined.held:
        yield from held.opened


def _reports(held: ev.HeldGroup) -> list[NodeReport]:
    return [report for report in (held.hashed, held.stored) if report is not None]


def _ranks_claimed(held: ev.HeldGroup) -> set[int]:
    """The members whose bytes a node says that it has."""
    return {*held.copied, *(m.rank for report in _reports(held) for m in report.members)}


def _as_ages(effect: fx.TellReached) -> fx.TellReached:
    """Clocks of nodes differ, so times travel as seconds ago."""
    first, last = effect.first_arrival, effect.last_arrival
    if first is None or last is None:
        return effect
    now = time.monotonic()
    return replace(effect, first_arrival=now - first, last_arrival=now - last)


def from_ages(effect: fx.TellReached) -> fx.TellReached:
    """The same on the agent's side: seconds ago as readings of its own clock."""
    first, last = effect.first_arrival, effect.last_arrival
    if first is None or last is None:
        return effect
    now = time.monotonic()
    return replace(effect, first_arrival=now - first, last_arrival=now - last)
