"""The grouped reads of one job, at its controller: one swarm per epoch that is being read.

A swarm begins when the first node wants chunks of an epoch. All other nodes are asked what they
have of it in memory; what is wanted is planned when they have answered, or after a moment. It
ends when no node takes part any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from groupio.model import NodeLink
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.swarm import Swarm

log = logging.getLogger(__name__)

SOUGHT_S = 1.0
"""So long the first plan waits for nodes to say what they have."""

TIMERS = "read "
"""All timers of reads have names that begin so."""


@dataclass(slots=True)
class _Read:
    swarm: Swarm
    lengths: rm.Rows
    taking_part: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    """Nodes that have not said yet what they have."""
    held: list[rm.NodeAsks] = field(default_factory=list)


class Swarms:
    """All swarms of a job. ``execute`` sends a message to its ``node``, or handles a timer."""

    def __init__(
        self, execute: Callable[[Any], None], backend_bytes_per_s: float | None = None
    ) -> None:
        self._execute = execute
        self._backend = backend_bytes_per_s
        self._reads: dict[str, _Read] = {}
        self._links: dict[str, NodeLink] = {}
        self._addresses: dict[str, str] = {}
        self._lives: dict[str, str] = {}
        """Which life of its agent each node takes part with."""
        self._told: dict[str, dict[str, str]] = {}
        """The addresses that each node was told."""

    def note(self, event: Any) -> None:
        """Learn which nodes there are from what the controller hears.

        As the controller does, this keeps to the life that a node takes part with until it is
        lost: another one, of a second machine of that name or too early, is refused.
        """
        match event:
            case ev.NodeJoined(node=node, life=life) if self._lives.get(node, life) != life:
                log.debug("another life of node %s takes no part in reads", node)
            case ev.NodeJoined(node=node, life=life, link=link, address=address):
                self._lives[node], self._addresses[node] = life, address
                self._told.pop(node, None)
                self._know(link)
            case ev.LinkMeasured(link=link) if link.node in self._links:
                self._know(link)
            case ev.NodeLost(node=node, life=life) if self._lives.get(node) == life:
                del self._links[node], self._addresses[node], self._lives[node]
                for key, read in list(self._reads.items()):
                    self._run(read, rm.NodeGone(key, node))
                    self._leave(key, read, node)

    def _know(self, link: NodeLink) -> None:
        self._links[link.node] = link
        for key, read in self._reads.items():
            self._run(read, rm.NodeKnown(key, link))

    def take(self, message: Any) -> None:
        """Take a message of ``FROM_READER`` of a node that has joined."""
        read = self._reads.get(message.key)
        if message.node not in self._links:
            return
        match message:
            case rm.ReadOpened():
                self._open(message)
            case rm.ReadClosed(key=key, node=node) if read is not None:
                self._leave(key, read, node)
            case _ if read is None or message.node not in read.taking_part:
                pass  # what it said crossed the end of the read
            case rm.NodeAsks() if read.awaited:
                read.held.append(message)
            case rm.NodeHas(node=node):
                self._run(read, message)
                self._answered(message.key, read, node)
            case _:
                self._run(read, message)

    def fire(self, name: str) -> None:
        """A timer whose name begins with ``TIMERS`` ran out."""
        key, _, load = name.removeprefix(TIMERS).partition(" ")
        read = self._reads.get(key)
        if read is None:
            return
        if load:
            self._run(read, ev.TimerFired(name))
        else:
            read.awaited.clear()
            self._release(read)

    def _open(self, message: rm.ReadOpened) -> None:
        key, node = message.key, message.node
        read = self._reads.get(key)
        if read is None:
            swarm = Swarm(key, message.lengths.astype(np.int64), backend_bytes_per_s=self._backend)
            read = self._reads[key] = _Read(swarm, message.lengths)
            for link in self._links.values():
                self._run(read, rm.NodeKnown(key, link))
            read.awaited = self._links.keys() - {node}
            for other in sorted(read.awaited):
                self._send(rm.ReadSought(key, other))
            if read.awaited:
                self._execute(fx.StartTimer(TIMERS + key, SOUGHT_S))
        elif not np.array_equal(read.lengths, message.lengths):
            log.error("node %s sees other chunks in epoch %s than the others", node, key)
            return
        read.taking_part.add(node)

    def _answered(self, key: str, read: _Read, node: str) -> None:
        if node in read.awaited:
            read.awaited.discard(node)
            if not read.awaited:
                self._execute(fx.StopTimer(TIMERS + key))
                self._release(read)

    def _release(self, read: _Read) -> None:
        held, read.held = read.held, []
        for message in held:
            self._run(read, message)

    def _leave(self, key: str, read: _Read, node: str) -> None:
        read.taking_part.discard(node)
        if not read.taking_part and self._reads.pop(key, None) is not None:
            self._execute(fx.StopTimer(TIMERS + key))
            return
        self._answered(key, read, node)

    def _run(self, read: _Read, event: Any) -> None:
        for effect in read.swarm.handle(event):
            match effect:
                case rm.PeerLies(peer=peer, node=node, key=key):
                    log.error("node %s sent node %s wrong bytes of epoch %s", peer, node, key)
                case fx.StartTimer() | fx.StopTimer():
                    self._execute(effect)
                case _:
                    self._send(effect)

    def _send(self, message: Any) -> None:
        if self._told.get(message.node) != self._addresses:
            self._told[message.node] = dict(self._addresses)
            self._execute(rm.Peers(message.node, dict(self._addresses)))
        self._execute(message)
