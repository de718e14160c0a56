"""Accepts agents of other nodes for the controllers of this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

import groupio
from groupio.controller import messages as cm
from groupio.controller.host import Host
from groupio.controller.keys import Keys
from groupio.controller.lines import Line
from groupio.controller.transport import ControlServer, Peer
from groupio.errors import ControllerLost, FormatError, GroupIOError, InvalidInput, to_wire
from groupio.protocol import events as ev
from groupio.protocol.wireform import WireForm
from groupio.seldom import REFUSED_LOG_S, Seldom

log = logging.getLogger(__name__)

HELLO_WAIT_S = 10.0
"""A link on which no agent introduces itself for so long is closed."""

REFUSED_S = 1.0
"""So long a refused agent has to hear why before its link is closed."""


class Gate:
    """Takes the links of agents and brings each to the host of its job.

    Runs in the event loop. ``find`` names the host of a store id, or raises why there is none.
    """

    def __init__(
        self,
        address: str,
        keys: Keys,
        node: str,
        life: str,
        find: Callable[[cm.NodeHello], Host],
    ) -> None:
        """Listen at ``address``. InvalidInput when that needs a token and the keys are of none."""
        self._find = find
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._in = WireForm(cm.FROM_NODE)
        self._waiting: dict[int, asyncio.TimerHandle] = {}
        self._refused = Seldom(REFUSED_LOG_S)
        self._server = ControlServer(self._loop, address, keys, self._on_link, life=life)

    @property
    def address(self) -> str:
        """Where agents reach it."""
        return self._server.address

    def close(self) -> None:
        """End all links."""
        for timer in self._waiting.values():
            timer.cancel()
        self._server.close()

    def _on_link(self, peer: Peer) -> None:
        peer.on_message = lambda payload: self._first(peer, payload)
        peer.on_lost = lambda why: self._forget(peer)
        self._waiting[id(peer)] = self._loop.call_later(HELLO_WAIT_S, self._expire, peer)

    def _expire(self, peer: Peer) -> None:
        del self._waiting[id(peer)]
        log.warning("a link from %s is closed: no agent introduced itself", peer.address)
        peer.close("it did not introduce itself")

    def _forget(self, peer: Peer) -> None:
        timer = self._waiting.pop(id(peer), None)
        if timer is not None:
            timer.cancel()

    def _first(self, peer: Peer, payload: bytes) -> None:
        self._forget(peer)
        try:
            hello = self._in.decode(payload)
            if not isinstance(hello, cm.NodeHello):
                raise InvalidInput(f"{type(hello).__name__} came before NodeHello")
            if hello.version != cm.CONTROL_VERSION:
                raise InvalidInput(
                    f"node {hello.node} runs groupio {hello.release} (control version "
                    f"{hello.version}), the controller {groupio.__version__} "
                    f"({cm.CONTROL_VERSION}); use one release on all nodes of a job"
                )
            host = self._find(hello)
        except GroupIOError as error:
            if self._refused.is_due(error.message):
                log.warning("refused an agent at %s: %s", peer.address, error.message)
            refused = cm.NodeRefused(to_wire(error))
            peer.send(WireForm(cm.FROM_CONTROLLER).encode(refused))
            peer.on_message = lambda payload: None  # one try is enough for a link
            self._loop.call_later(REFUSED_S, peer.close)
            return
        line = Line(host.lines, peer, hello)
        peer.on_message = lambda payload: self._take(host, line, payload)
        peer.on_lost = lambda why: host.lose_line(line, why)
        line.send(cm.NodeWelcome(host.term, self._node))

    def _take(self, host: Host, line: Line, payload: bytes) -> None:
        try:
            message = self._in.decode(payload)
            host.lines.check(line, message)
        except (FormatError, InvalidInput) as error:
            log.warning("agent of node %s at %s: %s", line.hello.node, line.peer.address, error)
            line.peer.close()
            host.lose_line(line, f"broke the protocol ({error.message})")
            return
        now = time.monotonic()
        match message:
            case ev.NodeJoined():
                opens = tuple(replace(one, at=now) for one in message.opens)
                held = tuple(
                    replace(one, opened=tuple(replace(o, at=now) for o in one.opened))
                    for one in message.held
                )
                host.joined(line, replace(message, opens=opens, held=held))
            case ev.MemberOpened():
                host.hear(line, replace(message, at=now))
            case cm.ClientSettles():
                host.settle(line, message)
            case cm.StatusAsked(request_id=request_id):
                line.send(cm.StatusAnswer(request_id, host.describe()))
            case cm.NodeMemory():
                if host.lines.by_node.get(line.node) is line:
                    host.lines.memory[line.node] = message
            case _ if isinstance(message, cm.FROM_READER):
                host.read(message)
            case _:
                host.hear(line, message)


def no_such_job(hello: cm.NodeHello) -> ControllerLost:
    """The error for an agent whose job has no controller in this process.

    It says nothing of the jobs that have one here: the agent may have no part in them.
    """
    return ControllerLost(
        f"the controller of job {hello.job!r} (store {hello.store_id}) is not here; "
        "look it up again"
    )
